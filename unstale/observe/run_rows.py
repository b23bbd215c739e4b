"""Read parts of a run's files. All data are checked, because others may have written them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from unstale.config import ConfigError
from unstale.config.names import RENAMED
from unstale.config.options import TECHNIQUE_OPTIONS
from unstale.durability.run_folder import Row
from unstale.observe.words import mapping, number


def last_stop(events: Iterable[Row]) -> Row:
    """Return the event with which a run ended.

    Empty if the run has not ended, or was resumed after it.

    >>> last_stop([{"kind": "started"}, {"kind": "stopped", "reason": "Ctrl-C"}])["reason"]
    'Ctrl-C'
    >>> last_stop([{"kind": "stopped", "reason": "Ctrl-C"}, {"kind": "resumed"}])
    {}
    """
    stopped: Row = {}
    for event in events:
        match event.get("kind"):
            case "started" | "resumed":
                stopped = {}
            case "stopped":
                stopped = event
    return stopped


def refuse_old(config: Row, path: Path) -> None:
    """Raise `ConfigError` for a run from before the options and metrics were renamed."""
    names = RENAMED.keys() - {"tensorboard"}  # this option was renamed after the metrics
    old = next((name for name in (*config, *flatten(config)) if name in names), None)
    if old:
        raise ConfigError(
            f"{path} is from an older version of unstale ({old} is now {RENAMED[old]}). "
            "Metrics were renamed, too: write its report with the version that ran it."
        )


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested options under their full names, as on the command line.

    >>> flatten({"a": 1, "b": {"c": 2}, "technique_options": {"ess_lr": {"base": 0.5}}})
    {'a': 1, 'b.c': 2, 'ess_lr.base': 0.5}
    """
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and name == TECHNIQUE_OPTIONS:
            flat.update(flatten(value, prefix))
        elif isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def step_of(row: Mapping[str, Any]) -> int:
    return int(number(row.get("step")) or 0)


def histogram(row: Mapping[str, Any]) -> dict[int, float]:
    """Return how many tokens a step trained on at each lag. Invalid entries are left out."""
    return by_lag(mapping(row.get("schedule/staleness_histogram")).items())


def by_lag(pairs: Iterable[tuple[Any, Any]]) -> dict[int, float]:
    """Return numbers by lag. Pairs without a lag or a number are left out.

    >>> by_lag([("0", 3), ("x", 1), ("2", None), (1, 4.5)])
    {0: 3.0, 1: 4.5}
    """
    lags: dict[int, float] = {}
    for key, value in pairs:
        text, amount = str(key), number(value)
        if amount is not None and text.isascii() and text.isdigit() and len(text) <= 2:
            lags[int(text)] = amount
    return dict(sorted(lags.items()))
