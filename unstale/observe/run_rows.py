"""Functions that read parts of a run's events, options and metrics.

They skip invalid data, because the files may come from others.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from unstale.config.options import TECHNIQUE_OPTIONS
from unstale.durability.run_folder import Row
from unstale.observe.words import mapping, number


def last_stop(events: Iterable[Row]) -> Row:
    """Return the last event of a run's log that says how the run ended, in its `reason`.

    Empty if the run has not ended, or was resumed after this event.

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


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested options in one mapping, by their names on the command line.

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
    """Return the number of tokens that a step trained on, by lag, from the step's metrics.

    The lag of a token is the number of versions by which it is older than the policy.
    """
    return by_lag(mapping(row.get("schedule/staleness_histogram")).items())


def by_lag(pairs: Iterable[tuple[Any, Any]]) -> dict[int, float]:
    """Return a dict from lag (staleness in versions) to number, from pairs of both.

    Pairs are left out if the number is missing, or if the lag is not a number of one or two digits.

    >>> by_lag([("0", 3), ("x", 1), ("2", None), (1, 4.5)])
    {0: 3.0, 1: 4.5}
    """
    lags: dict[int, float] = {}
    for key, value in pairs:
        text, amount = str(key), number(value)
        if amount is not None and text.isascii() and text.isdigit() and len(text) <= 2:
            lags[int(text)] = amount
    return dict(sorted(lags.items()))
