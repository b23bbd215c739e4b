"""NAME=VALUE of a command line. Imports no torch."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from unstale.config.checks import ConfigError, nearest
from unstale.planner.workload import Constant, Distribution, LogNormal

_WANTED = {
    bool: "true or false",
    int: "a whole number of 0 or more",
    float: "a number of 0 or more",
}


def parse_assignments(where: str, words: Iterable[str], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """`NAME=VALUE` by name, each value as its kind has it.

    >>> parse_assignments("--set", ["decode=0.01", "tool_s=5~1.2"], {"decode": float, "tool_s": Distribution})
    {'decode': 0.01, 'tool_s': LogNormal(mean=5.0, sigma=1.2, most=inf)}
    """
    found = {}
    for word in words:
        name, _, text = word.partition("=")
        if name not in kinds:
            raise ConfigError(f"{where} cannot have {name!r}{nearest(name, list(kinds))}")
        try:
            found[name] = _read(kinds[name], text)
        except (ValueError, KeyError) as error:
            wanted = _WANTED.get(kinds[name], "N, MEAN~SIGMA or MEAN~SIGMA<MOST")
            raise ConfigError(f"{where}: {name} must be {wanted}, got {text!r}") from error
    return found


def _read(kind: Any, text: str) -> Any:
    if kind is str:
        return text
    if kind is bool:
        return {"true": True, "false": False}[text.lower()]
    if kind == Distribution:
        mean, spreads, rest = text.partition("~")
        sigma, cut, most = rest.partition("<")
        numbers: list[float] = [
            _read(float, number) for number in (mean, sigma, most)[: 1 + bool(spreads) + bool(cut)]
        ]
        return (
            LogNormal.cut(*numbers)
            if cut
            else LogNormal(*numbers)
            if spreads
            else Constant(*numbers)
        )
    if not 0 <= (value := kind(text)) < math.inf:
        raise ValueError(text)
    return value
