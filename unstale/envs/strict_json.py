"""Read JSON from others. Numbers that are not finite are refused, which Python's parser accepts."""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of an object. Raises `ValueError` for a repeated name."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name is given twice in one object")
    return fields


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


MAX_DEPTH = 100
"""Largest nesting depth of a value. Python and templates cannot process values much deeper."""


def is_too_deep(value: Any, limit: int = MAX_DEPTH) -> bool:
    """Return True if a value of lists and mappings is nested more than `limit` times.

    >>> is_too_deep([[1]], 1), is_too_deep([[1]], 2)
    (True, False)
    """
    level = [value]
    for _ in range(limit):
        level = [each for outer in level for each in _contents(outer)]
    return any(isinstance(each, list | tuple | Mapping) for each in level)


def _contents(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large for a number")
    return value


def loads(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises `ValueError` for invalid JSON, NaN, infinities and numbers such as 1e999, which Python
    reads as infinite, and `RecursionError` for deep nesting.
    """
    return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)


STRICT_DECODER = json.JSONDecoder(
    object_pairs_hook=unique_names, parse_constant=_refuse_constant, parse_float=_finite
)
"""A decoder that refuses what `loads` refuses, and repeated names in an object."""
