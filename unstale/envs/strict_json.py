"""Functions for JSON of others: they refuse repeated names, NaN, infinities and deep nesting."""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of an object. Raises `ValueError` for a repeated name."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name is given twice in one object")
    return fields


def refuse_constant(word: str) -> NoReturn:
    """Raise `ValueError` for NaN and infinities, which Python's JSON parser accepts."""
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
