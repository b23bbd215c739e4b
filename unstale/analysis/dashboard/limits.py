"""The limits that a run's options set on D and S, as lines in the plane of log D and log S.

A line is `on` log D (`d`, vertical), on log S (`s`, horizontal) or on their sum (`ds`, diagonal),
`at` a value in nats. With the run's own route, a correction limits the log D that is drawn and a
clip the log S. Another route computes both from the sum log pi - log mu, which is the same for all
routes. So each of its limits is drawn as a limit on the sum.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from unstale.analysis.dashboard.bounds import bounds, explain
from unstale.analysis.dashboard.factors import UNIT, to_axis
from unstale.analysis.dashboard.folders import is_own_file
from unstale.analysis.dashboard.table import BadQuestion
from unstale.analysis.report.words import factor_names
from unstale.config import ConfigError, CorrectionConfig, ObjectiveConfig, RunConfig
from unstale.config.objectives import NAMES, Bounds
from unstale.config.options import field_docs, options, sections, stored_config
from unstale.config.routes import Needs, OldLogpsConfig, routes
from unstale.config.techniques import Entry, chosen, completed_options
from unstale.durability.run_folder import CONFIG, Row, RunFolder

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.records import Batch
    from unstale.trainer.rules import LossSpec

COMPUTED = (Needs(), Needs(inline=True), Needs(now=True, forwards="one"))
"""`Needs` of the methods (routes) whose `old_logp` follows from the values in the journal."""

SectionT = TypeVar("SectionT", CorrectionConfig, ObjectiveConfig)

SECTIONS = ("correction", "objective", "old_logps")

FIXED = ("loss_aggregation", "constant", "kl_coef", "entropy_coef", "normalize", "baseline")
"""Options in `SECTIONS` that do not affect which tokens are kept and which are clipped."""

REACH = 8.0
"""Largest |log pi - log mu|, in nats, at which the limits on D and S are searched."""

CURVE_POINTS = 81
"""Number of points of the curve of one way to get `old_logp`, evenly spaced on the axes.

With straight lines between them, the curves of `interp_prox_*` are off by less than 0.005 in the
scale of the axes (`to_axis`). An axis is about 20 long, so this is a fifth of a pixel.
"""

LAGS = 6
"""Lines are drawn for this many lags (staleness in versions), from 0."""


@dataclass(frozen=True)
class Settings:
    """The rules by which a run's tokens are treated: `old_logp`, correction, objective,
    techniques.
    """

    config: RunConfig
    """The options of the run, in which route (way to get `old_logp`), correction and objective may
    be changed.
    """
    route: str
    """The method (route) by which `old_logp` is computed. "" if the stored values are used."""

    @property
    def correction(self) -> CorrectionConfig:
        """The correction without `normalize`, which does not affect if a token is dropped."""
        return replace(self.config.correction, normalize=False)

    @property
    def objective(self) -> ObjectiveConfig:
        return self.config.objective

    @property
    def spec(self) -> OldLogpsConfig:
        """The options of the route, which is the method to compute `old_logp`."""
        return self.config.old_logps

    @property
    def is_mixed(self) -> bool:
        """True if `old_logp` is computed from `behavior_logp` and `logp`, not the stored value."""
        return bool(self.route)

    def rules(self) -> "LossSpec":
        """Return the trainer's rules with these settings, including techniques in the loss."""
        from unstale.techniques.hooks import Techniques
        from unstale.trainer.rules import LossSpec

        options = completed_options(self.config)
        made = {entry.name: entry.makes(options[entry.name]) for entry in in_loss(self.config)}
        return LossSpec(self.correction, self.objective, Techniques(made))


def in_loss(config: RunConfig) -> list[Entry]:
    """Return the techniques of a run that replace the ratio or the loss of a token."""
    return [entry for entry in chosen(config.techniques) if entry.slot in ("ratio", "objective")]


def own_settings(folder: Path) -> Settings:
    """Return the settings of a run. Raises `BadQuestion` if its `config.json` cannot be read."""
    try:
        if not is_own_file(folder / CONFIG):
            raise ConfigError(f"{CONFIG} is missing")
        return Settings(stored_config(RunFolder(folder).config()), "")
    except ConfigError as error:
        raise BadQuestion(f"the options of the run cannot be read: {error}") from error


def changed_settings(own: Settings, changes: Mapping[str, str]) -> Settings:
    """Return the settings of a run with `changes`: full names of options -> values as texts.

    With another route (way to get `old_logp`), the options of the run's route do not apply. If the
    run's route is exact, other exact routes have the stored values. Raises `BadQuestion` for an
    unknown option or value, and for a route whose `old_logp` does not follow from the journal.
    """
    config = own.config
    known = options()
    route = changes.get("old_logps.route", config.old_logps.route)
    changes = {name: text for name, text in changes.items() if name != "old_logps.route"}
    try:
        if route not in routes():
            raise ConfigError(f"there is no route {route!r}: use one of {', '.join(routes())}")
        is_own = route == config.old_logps.route and not any(
            name.startswith("old_logps.") for name in changes
        )
        values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        for name, text in changes.items():
            section, _, field = name.partition(".")
            if name not in known or section not in SECTIONS or field in FIXED:
                raise ConfigError(f"{name} is not an option that can be changed here")
            values[section][field] = known[name].parse(text)
        spec = config.old_logps
        if route == spec.route:
            spec = spec.with_options(**values["old_logps"])
        else:
            spec = OldLogpsConfig(route=route, **values["old_logps"])
        correction = _changed(config.correction, values["correction"])
        objective = _changed(config.objective, values["objective"])
    except ConfigError as error:
        raise BadQuestion(str(error)) from error
    stored = is_own or (spec.exact and config.old_logps.exact)
    if not stored and (reason := refusal(spec, config)):
        raise BadQuestion(reason)
    changed = _with_sections(config, spec, correction, objective)
    for entry in in_loss(config):
        try:
            entry.check(config.technique_options[entry.name], changed)
        except ConfigError as error:
            raise BadQuestion(str(error)) from error
    return Settings(changed, "" if stored else route)


def _changed(section: SectionT, values: Mapping[str, Any]) -> SectionT:
    """Return a section of the configuration with other values of some options.

    A value that another of them makes unused is ignored, because the form does not show its field.
    """
    unread = section.unread({**asdict(section), **values})
    hidden = [name for name in unread if section.decides(name) in values]
    return section.with_options(**{name: values[name] for name in values if name not in hidden})


def _with_sections(
    config: RunConfig,
    spec: OldLogpsConfig,
    correction: CorrectionConfig,
    objective: ObjectiveConfig,
) -> RunConfig:
    """Return the configuration with other sections, without the checks of `RunConfig`.

    They may refuse combinations of options for reasons that do not matter here.
    """
    import copy

    changed = copy.copy(config)
    for name, section in (
        ("old_logps", spec),
        ("correction", correction),
        ("objective", objective),
    ):
        object.__setattr__(changed, name, section)
    return changed


def refusal(spec: OldLogpsConfig, config: RunConfig) -> str:
    """Return a sentence on why the `old_logp` of a route does not follow from the journal.

    Empty if it does. `config` has the options of the run.
    """
    if spec.needs in COMPUTED:
        return ""
    if spec.exact:
        return (
            f"{spec.route} needs the weights that sampled the tokens, which the journal does not "
            f"keep: the run used {config.old_logps.route}, which approximates them"
        )
    why = "moving averages of the weights" if spec.needs.averages else "other weights"
    return f"{spec.route} needs {why}, which the journal does not keep"


def choices(own: Settings) -> Row:
    """Return the content of the form for other settings.

    `options` has name, allowed words, the run's value and explanation of each option in the form.
    `routes` has each route (way to get `old_logp`) with the reason why it cannot be computed, or
    "". `computed` is True if the options of the run's own route can be changed.
    """
    known = options()
    found = []
    for name, option in known.items():
        if option.section not in SECTIONS or option.field in FIXED or name == "old_logps.route":
            continue
        readers = sections()[option.section].readers(option.field)
        found.append(
            {
                "name": name,
                "words": list(option.choices),
                "value": _as_text(option.of(own.config)) if option.is_in(own.config) else "",
                "readers": readers,
                "about": field_docs(option.owner).get(option.field, ""),
            }
        )
    named = {}
    for name, spec in routes().items():
        made = own.config.old_logps if name == own.config.old_logps.route else spec()
        is_stored = name == own.config.old_logps.route or (
            made.exact and own.config.old_logps.exact
        )
        named[name] = "" if is_stored else refusal(made, own.config)
    return {
        "options": found,
        "routes": named,
        "route": own.config.old_logps.route,
        "computed": own.spec.needs in COMPUTED,
    }


def _as_text(value: Any) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def make_route(settings: Settings, *, version: int) -> Any:
    """Return the object that computes a route's `old_logp`, for a batch trained on at `version`."""
    return settings.spec.make(_Weights(version), lockstep=True)


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


def lines(settings: Settings, *, lag_max: int) -> list[Row]:
    """Return the lines that show the limits of some settings, each with a sentence.

    With the stored values, lines are vertical or horizontal; that of `ratio_cap` is diagonal. With
    a route (way to get `old_logp`) that mixes `behavior_logp` and `logp`, lines are diagonal and
    may differ between lags.
    """
    found = bounds(settings.correction, settings.objective)
    own = [line for each in found for line in _lines(each)]
    if not settings.is_mixed:
        return [*own, *_of_route(settings, lag_max)]
    return [each for line in own for each in _on_ratio(line, settings, lag_max)]


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


def _of_route(settings: Settings, lag_max: int) -> Iterator[Row]:
    """Yield the curve on which all tokens of an approximate route lie, for each lag (staleness).

    The curve exists if the route computes `old_logp` from only `behavior_logp` and `logp`.
    """
    spec = settings.spec
    if spec.exact or spec.needs not in COMPUTED:
        return
    if spec.needs.now and settings.config.trainer.steps_per_batch > 1:
        return
    import numpy as np

    end = float(to_axis(REACH))
    ratio = UNIT * np.sinh(np.linspace(-end, end, CURVE_POINTS))
    drawn: list[list[list[float]]] = []
    for lag in range(min(lag_max, LAGS - 1) + 1):
        log_d, log_s = _factors(settings, lag, ratio)
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


def _factors(settings: Settings, lag: int, ratio: Any) -> tuple[Any, Any]:
    """Return log D and log S at values of log pi - log mu, for tokens of one lag (staleness).

    The route (way to get `old_logp`) of `settings` computes them. `ratio` and both results are
    `[n]` float64.
    """
    import torch

    logp = torch.from_numpy(ratio) - 10.0
    mu = torch.full_like(logp, -10.0)
    old_logp, _ = make_route(settings, version=lag).logps(_tokens(mu), logp)
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


def _on_ratio(line: Row, settings: Settings, lag_max: int) -> Iterator[Row]:
    """Yield the lines on log D + log S that correspond to `line`.

    The route (way to get `old_logp`) of the settings must mix pi and mu. Lags (staleness) up to
    `lag_max` may have different lines.
    """
    import numpy as np

    if line["on"] == "ds":
        yield line
        return
    seen: set[float] = set()
    ratio = np.linspace(-REACH, REACH, 801)
    for lag in range(min(lag_max, LAGS - 1) + 1):
        values = _factors(settings, lag, ratio)[0 if line["on"] == "d" else 1]
        above = values >= line["at"] if line["at"] > 0 else values <= line["at"]
        if above.all() or not above.any():
            continue
        order = values if values[-1] >= values[0] else values[::-1]
        at = float(np.interp(line["at"], order, ratio))
        if round(at, 3) in seen:
            continue
        seen.add(round(at, 3))
        of_lag = f", lag {lag}" if lag_max else ""
        text = line["text"] if len(seen) == 1 else ""
        if text:
            text += (
                f" With {settings.route} both factors are made of pi / mu, so the limit is on D S."
            )
        yield {**line, "on": "ds", "at": at, "label": f"{line['label']}{of_lag}", "text": text}


def drawn(settings: Settings, *, lag_max: int) -> Row:
    """Return the `lines` of some settings, and `sentences` that explain them."""
    found = lines(settings, lag_max=lag_max)
    texts = [line["text"] for line in found if line["text"]]
    for entry in in_loss(settings.config):
        texts.append(
            f"The technique {entry.name} replaces the {entry.slot} of a token, so the lines of the "
            "clip are those of a token without it."
        )
    return {"lines": found, "sentences": list(dict.fromkeys(texts))}


def of_training(folder: Path, training: Row) -> Row:
    """Return the row `training` with the run's limits on D and S, and the gradient of each token.

    `training` has the values of the tokens of an episode in the step that trained on it. `problem`
    is a sentence on why the options of the run are not known, or "".
    """
    try:
        own = own_settings(folder)
    except BadQuestion as error:
        return training | {"limits": [], "formulas": [], "problem": str(error)}
    is_replaced = bool(in_loss(own.config))
    found = explain(own.correction, own.objective, training, is_replaced=is_replaced)
    return found | {"problem": ""}


def of_run(folder: Path, *, lag_max: int) -> Row:
    """Return the result of `drawn` for a run's own settings.

    `problem` is a sentence on why these settings are not known, or "".
    """
    try:
        own = own_settings(folder)
    except BadQuestion as error:
        return {"lines": [], "sentences": [], "problem": str(error)}
    spec = own.spec
    about = factor_names(own.config.old_logps.route, exact=spec.exact)
    found = drawn(own, lag_max=lag_max)
    return found | {"sentences": [*about, *found["sentences"]], "problem": ""}
