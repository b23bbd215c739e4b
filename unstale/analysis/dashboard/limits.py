"""The limits that a run's options set on D and S, as lines in the plane of log D and log S.

A line is `on` log D (`d`, vertical), on log S (`s`, horizontal) or on their sum (`ds`, diagonal),
`at` a value in nats. A correction limits log D, a clip log S.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unstale.analysis.dashboard.bounds import bounds, explain
from unstale.analysis.dashboard.factors import UNIT, to_axis
from unstale.analysis.dashboard.folders import is_own_file
from unstale.analysis.dashboard.table import BadQuestion
from unstale.analysis.report.words import factor_names
from unstale.config import ConfigError, RunConfig
from unstale.config.objectives import NAMES, Bounds
from unstale.config.options import stored_config
from unstale.config.routes import Needs, OldLogpsConfig
from unstale.config.techniques import Entry, chosen
from unstale.durability.run_folder import CONFIG, Row, RunFolder

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.records import Batch

COMPUTED = (Needs(), Needs(inline=True), Needs(now=True, forwards="one"))
"""`Needs` of the methods (routes) whose `old_logp` follows from the values in the journal."""

REACH = 8.0
"""Largest |log pi - log mu|, in nats, at which the limits on D and S are searched."""

CURVE_POINTS = 81
"""Number of points of the curve of one way to get `old_logp`, evenly spaced on the axes.

With straight lines between them, the curves of `interp_prox_*` are off by less than 0.005 in the
scale of the axes (`to_axis`). An axis is about 20 long, so this is a fifth of a pixel.
"""

LAGS = 6
"""Largest number of lags (staleness in versions), from 0 on, for which a curve of the run's route
(way to get `old_logp`) is drawn.
"""


def in_loss(config: RunConfig) -> list[Entry]:
    """Return the techniques of a run that replace the ratio or the loss of a token."""
    return [entry for entry in chosen(config.techniques) if entry.slot in ("ratio", "objective")]


def own_config(folder: Path) -> RunConfig:
    """Return the options of a run. Raises `BadQuestion` if its `config.json` cannot be read."""
    try:
        if not is_own_file(folder / CONFIG):
            raise ConfigError(f"{CONFIG} is missing")
        return stored_config(RunFolder(folder).config())
    except ConfigError as error:
        raise BadQuestion(f"the options of the run cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class _Weights:
    """The part of a scorer that routes (ways to get `old_logp`) without other weights use:
    versions, and their ages.
    """

    version: int
    weights_match_version: bool = True

    def lag(self, version: "Tensor") -> "Tensor":
        """Return the number of versions between each of `version` and the current version."""
        return (self.version - version).clamp(min=0)


def lines(config: RunConfig, *, lag_max: int) -> list[Row]:
    """Return the lines that show the limits of a run's options, each with a sentence.

    Lines are vertical or horizontal; that of `ratio_cap` is diagonal.
    """
    found = bounds(config.correction, config.objective)
    return [*(line for each in found for line in _lines(each)), *_of_route(config, lag_max)]


def _lines(limit: Bounds) -> Iterator[Row]:
    """Yield a line for each end of a bound, with a sentence on the tokens beyond it."""
    aggregated = limit.unit != "token"
    for at, text in limit.ends():
        label = f"{NAMES[limit.on]} {at:g}"
        if aggregated:
            text += (
                f" It applies to the {limit.unit} of a token, so the place of one token does not "
                "decide."
            )
        yield {
            "on": limit.on,
            "at": math.log(at),
            "kind": limit.kind,
            "label": f"veto, {label}" if limit.kind == "veto" else label,
            "text": text,
            "faint": aggregated,
        }


def _of_route(config: RunConfig, lag_max: int) -> Iterator[Row]:
    """Yield the curve on which all tokens of an approximate route lie, for each lag.

    The curve exists if the route computes `old_logp` from only `behavior_logp` and `logp`.
    """
    spec = config.old_logps
    if spec.exact or spec.needs not in COMPUTED:
        return
    if spec.needs.now and config.trainer.steps_per_batch > 1:
        return
    import numpy as np

    end = float(to_axis(REACH))
    ratio = UNIT * np.sinh(np.linspace(-end, end, CURVE_POINTS))
    drawn: list[list[list[float]]] = []
    for lag in range(min(lag_max, LAGS - 1) + 1):
        log_d, log_s = _factors(spec, lag, ratio)
        points = [[float(d), float(s)] for d, s in zip(log_d, log_s, strict=True)]
        if points in drawn:
            continue
        drawn.append(points)
        yield {
            "on": "curve",
            "at": 0.0,
            "kind": "route",
            "label": f"{spec.route}, lag {lag}" if len(drawn) > 1 else spec.route,
            "text": f"Every token lies on the line of its lag, because {spec.route} computes "
            "old_logp from behavior_logp and logp: D and S are not separated."
            if len(drawn) == 1
            else "",
            "faint": False,
            "points": points,
        }


def _factors(spec: OldLogpsConfig, lag: int, ratio: Any) -> tuple[Any, Any]:
    """Return log D and log S of a route at values of log pi - log mu, for tokens of one lag.

    The route (way to get `old_logp`) with the options `spec` computes them. `ratio` has these
    values. It and both results are `[n]` float64.
    """
    import torch

    logp = torch.from_numpy(ratio) - 10.0
    mu = torch.full_like(logp, -10.0)
    old_logp, _ = spec.make(_Weights(lag), lockstep=True).logps(_tokens(mu), logp)
    old_logp = old_logp.to(torch.float64)
    return (old_logp - mu).numpy(), (logp - old_logp).numpy()


def _tokens(behavior_logp: "Tensor") -> "Batch":
    """Return a batch of one sequence of sampled tokens of version 0."""
    import torch

    from unstale.records import Batch, Provenance

    zeros = torch.zeros(len(behavior_logp), dtype=torch.long)
    yes = torch.ones(len(zeros), dtype=torch.bool)
    return Batch(
        tokens=zeros,
        offsets=(0, len(zeros)),
        sampled=yes,
        behavior_logp=behavior_logp,
        version=zeros,
        turn=zeros,
        provenance=zeros + int(Provenance.SAMPLED),
        clean=yes,
        advantage=behavior_logp * 0,
        episodes=(0,),
    )


def of_training(folder: Path, training: Row) -> Row:
    """Return the row `training` with the run's limits on D and S, and the gradient of each token.

    `training` has the values of the tokens of an episode in the step that trained on it. `problem`
    is a sentence on why the options of the run are not known, or "".
    """
    try:
        config = own_config(folder)
    except BadQuestion as error:
        return training | {"limits": [], "formulas": [], "problem": str(error)}
    is_replaced = bool(in_loss(config))
    found = explain(config.correction, config.objective, training, is_replaced=is_replaced)
    return found | {"problem": ""}


def of_run(folder: Path, *, lag_max: int) -> Row:
    """Return the `lines` of a run, and `sentences` that explain them.

    `problem` is a sentence on why its options are not known, or "".
    """
    try:
        config = own_config(folder)
    except BadQuestion as error:
        return {"lines": [], "sentences": [], "problem": str(error)}
    route = config.old_logps
    found = lines(config, lag_max=lag_max)
    texts = [*factor_names(route.route, exact=route.exact), *(line["text"] for line in found)]
    for entry in in_loss(config):
        texts.append(
            f"The technique {entry.name} replaces the {entry.slot} of a token, so the lines of the "
            "clip are those of a token without it."
        )
    return {"lines": found, "sentences": list(dict.fromkeys(filter(None, texts))), "problem": ""}
