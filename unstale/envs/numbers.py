"""Numbers in the texts of language models."""

import re

_NUMBER = re.compile(
    r"(?<!\w)(?<!\d\.)[-+]?"
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?<!\.)(?=\.\d))(?:\.\d+)?(?:[eE][-+]?\d+)?"
)
_FRACTION = re.compile(r"(?<![\w.,/])([-+]?\d{1,15})/(\d{1,15})(?![\w/]|[.,]\d)")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_BETWEEN_THOUSANDS = re.compile(
    r"(?<=\d)(?:\{,\}|\\[,;:! ]|[\N{NO-BREAK SPACE}\N{THIN SPACE}\N{NARROW NO-BREAK SPACE}])"
    r"(?=\d{3}(?!\d))"
)
"""Separators of thousands other than a comma, in LaTeX and in typeset text."""
_MINUS_SIGNS = str.maketrans("\N{MINUS SIGN}\N{EN DASH}", "--")
_SIGN_OF_CURRENCY = re.compile(r"([-+])\\?[$\N{EURO SIGN}\N{POUND SIGN}\N{YEN SIGN}](?=\.?\d)")


def last_number(text: str) -> float | None:
    """Return the last number in the text, or None.

    Typeset minus signs, separators of thousands and fractions of whole numbers are understood. A
    sign may stand before that of a currency.

    >>> last_number("from 1,350 to -$5.50"), last_number("three quarters, or 3/4")
    (-5.5, 0.75)
    """
    plain = _BETWEEN_THOUSANDS.sub(",", text).translate(_MINUS_SIGNS)
    plain = _SIGN_OF_CURRENCY.sub(r"\1", _LATEX_FRACTION.sub(r"\1/\2", plain))
    numbers = list(_NUMBER.finditer(plain))
    if not numbers:
        return None
    for fraction in _FRACTION.finditer(plain):
        if fraction.end() == numbers[-1].end() and int(fraction[2]):
            return int(fraction[1]) / int(fraction[2])
    return float(numbers[-1][0].replace(",", ""))
