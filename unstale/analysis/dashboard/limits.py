"""The limits that a run's options set on D and S, as lines in a plot of log D and log S.

A correction limits log D, a clip limits log S. A line is `on` log D (`d`, vertical), on log S (`s`,
horizontal) or on their sum (`ds`, diagonal), and `at` is its value in nats.
"""

import math
from collections.abc import Iterator
from pathlib import Path

from unstale.analysis.dashboard.bounds import bounds, explain
from unstale.analysis.dashboard.folders import is_own_file
from unstale.analysis.dashboard.table import BadQuestion
from unstale.analysis.report.words import factor_names
from unstale.config import ConfigError, RunConfig
from unstale.config.objectives import NAMES, Bounds
from unstale.config.options import stored_config
from unstale.config.techniques import Entry, chosen
from unstale.durability.run_folder import CONFIG, Row, RunFolder


def in_loss(config: RunConfig) -> list[Entry]:
    """Return the chosen techniques of a run that replace the ratio or the loss of a token."""
    return [entry for entry in chosen(config.techniques) if entry.slot in ("ratio", "objective")]


def own_config(folder: Path) -> RunConfig:
    """Return the options of a run. Raises `BadQuestion` if its `config.json` cannot be read."""
    try:
        if not is_own_file(folder / CONFIG):
            raise ConfigError(f"{CONFIG} is missing")
        return stored_config(RunFolder(folder).config())
    except ConfigError as error:
        raise BadQuestion(f"the options of the run cannot be read: {error}") from error


def lines(config: RunConfig) -> list[Row]:
    """Return the lines that show the limits of a run's options in the plot of log D and log S.

    Each has a sentence (`text`) on the tokens beyond it.
    """
    found = bounds(config.correction, config.objective)
    return [line for each in found for line in _lines(each)]


def _lines(limit: Bounds) -> Iterator[Row]:
    """Yield a line for each end of a bound."""
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


def of_training(folder: Path, training: Row) -> Row:
    """Return the row `training` with the run's limits on D and S, and the gradient of each token.

    `training` has the values of an episode's tokens in the step that trained on it.
    `bounds.explain` describes the result. If the options of the run cannot be read, the result has
    no limits and no gradients, and `problem` has the reason. It is "" otherwise.
    """
    try:
        config = own_config(folder)
    except BadQuestion as error:
        return training | {"limits": [], "formulas": [], "problem": str(error)}
    is_replaced = bool(in_loss(config))
    found = explain(config.correction, config.objective, training, is_replaced=is_replaced)
    return found | {"problem": ""}


def of_run(folder: Path) -> Row:
    """Return the `lines` of a run, and `sentences` that explain them and the ratios.

    Both are empty if the options of the run cannot be read. `problem` has the reason, or is "".
    """
    try:
        config = own_config(folder)
    except BadQuestion as error:
        return {"lines": [], "sentences": [], "problem": str(error)}
    route = config.old_logps
    found = lines(config)
    texts = [*factor_names(route.route, exact=route.exact), *(line["text"] for line in found)]
    for entry in in_loss(config):
        texts.append(
            f"The technique {entry.name} replaces the {entry.slot} of a token, so the lines of the "
            "clip are those of a token without it."
        )
    return {"lines": found, "sentences": list(dict.fromkeys(filter(None, texts))), "problem": ""}
