"""Functions for `json.loads` that refuse JSON with repeated names, NaN or infinities."""

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
