"""A strict reader of JSON. It refuses input that Python's parser would silently change or drop."""

import json
import math
import re
from typing import Any, NoReturn

from unstale.config.names import unique_names

_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
_DIGIT = re.compile(r"[^eE]*[1-9]")
"""Pattern that matches the start of a number other than 0."""


def require_characters(text: str) -> None:
    """Raise `ValueError` if a text has half of a surrogate pair, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"a text has {text[error.start]!a}, which is half of a character (a surrogate)"
        ) from None


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


def read_float(text: str) -> float:
    """Return the number that a text names. Raises `ValueError` if a float would be infinite, or 0
    instead of a tiny number.
    """
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large for a number")
    if not value and _DIGIT.match(text):
        raise ValueError(f"{text[:20]} is too small for a number")
    return value


class _StrictDecoder(json.JSONDecoder):
    def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
        value, end = super().raw_decode(s, idx)
        read = s[idx:end]
        require_characters(read)
        if _HALF_PAIR.search(read):
            require_characters(json.dumps(value, ensure_ascii=False))
        return value, end


STRICT_DECODER = _StrictDecoder(
    object_pairs_hook=unique_names, parse_constant=_refuse_constant, parse_float=read_float
)
"""The decoder that `loads` uses. It can also decode a value that other text follows."""


def loads(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises `ValueError` for invalid JSON, a name that an object has twice, half of a surrogate pair,
    NaN, infinities, and numbers such as 1e999 and 1e-999, which Python reads as infinite and as 0.
    Raises `RecursionError` for deep nesting.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text))
    return STRICT_DECODER.decode(text)
