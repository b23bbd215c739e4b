"""Parse words NAME=VALUE of the command line. Importing this module does not import torch."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from unstale.analysis.planner.workload import Constant, Distribution, LogNormal
from unstale.config.checks import MAX_EXACT_INT, ConfigError
from unstale.config.names import nearest

_EXPECTED = {
    bool: "true or false",
    int: "a whole number of 0 or more",
    float: "a number of 0 or more",
}
MAX_SIGMA = 10
_DISTRIBUTION = f"N, MEAN~SIGMA or MEAN~SIGMA<MAX, with SIGMA at most {MAX_SIGMA}"


def value_kinds(cls: Any) -> dict[str, Any]:
    """Return name -> type of the fields of the dataclass `cls`, without the ranges in
    annotations.
    """
    types = get_type_hints(cls)
    return {field.name: types[field.name] for field in fields(cls)}


def parse_assignments(
    option: str, words: Iterable[str], kinds: Mapping[str, Any]
) -> dict[str, Any]:
    """Return name -> value of the command-line words NAME=VALUE.

    `kinds` has the type of each allowed name. Raises `ConfigError` for a wrong word. The message
    names the command-line option `option`, which got the words.

    >>> kinds = {"decode": float, "tool_s": Distribution}
    >>> parse_assignments("--set", ["decode=0.01", "tool_s=5~1.2"], kinds)
    {'decode': 0.01, 'tool_s': LogNormal(mean=5.0, sigma=1.2, max=inf)}
    """
    values = {}
    for word in words:
        name, has_value, text = word.partition("=")
        if not has_value:
            raise ConfigError(f"{option} must be NAME=VALUE, got {word!r}")
        if name not in kinds:
            raise ConfigError(f"{option} cannot have {name!r}{nearest(name, list(kinds))}")
        try:
            values[name] = _parse(kinds[name], text)
        except (ValueError, KeyError) as error:
            expected = _EXPECTED.get(kinds[name], _DISTRIBUTION)
            raise ConfigError(f"{option}: {name} must be {expected}, got {text!r:.60}") from error
    return values


def _parse(kind: Any, text: str) -> Any:
    if kind is str:
        return text
    if kind is bool:
        return {"true": True, "false": False}[text.lower()]
    if kind == Distribution:
        return _parse_distribution(text)
    value = kind(text)
    if not 0 <= value <= MAX_EXACT_INT:
        raise ValueError(text)
    return value


def _parse_distribution(text: str) -> Distribution:
    mean, has_sigma, spread = text.partition("~")
    if not has_sigma:
        return Constant(_parse(float, mean))
    width, has_max, maximum = spread.partition("<")
    sigma = _parse(float, width)
    if sigma > MAX_SIGMA:
        raise ValueError(width)
    if has_max:
        return LogNormal.capped(_parse(float, mean), sigma, _parse(float, maximum))
    return LogNormal(_parse(float, mean), sigma)
