"""Read JSON from others. Numbers that are not finite are refused, which Python's parser accepts."""

import json
import math
from typing import Any, NoReturn


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of an object. Raises `ValueError` for a repeated name."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name is given twice in one object")
    return fields


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


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
