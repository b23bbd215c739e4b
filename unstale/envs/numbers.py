"""Numbers in the texts of language models."""

import re

_NUMBER = re.compile(
    r"(?<!\w)(?<!\d\.)[-+]?"
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?<!\.)(?=\.\d))(?:\.\d+)?(?:[eE][-+]?\d+)?"
)
_FRACTION = re.compile(
    r"(?<![\w.,/])([-+]?)(?:(\d{1,15}) )?(\d{1,3}(?:,\d{3}){1,4}|\d{1,15}) ?/ ?(\d{1,15})"
    r"(?![\d/]|[.,]\d)"
)
"""A sign, a whole part, and the two numbers of a fraction."""
_LATEX_FRACTION = re.compile(r"(\d?)\\[dt]?frac\{([-+]?\d+)\}\{(\d+)\}")
_BETWEEN_THOUSANDS = re.compile(
    r"(?<=\d)(?:\{,\}|\\[,;:! ]|[\N{NO-BREAK SPACE}\N{THIN SPACE}\N{NARROW NO-BREAK SPACE}])"
    r"(?=\d{3}(?!\d))"
)
"""Separators of thousands other than a comma, in LaTeX and in typeset text."""
_MINUS_SIGNS = str.maketrans("\N{MINUS SIGN}\N{EN DASH}", "--")
_SIGN_OF_CURRENCY = re.compile(r"([-+])\\?[$\N{EURO SIGN}\N{POUND SIGN}\N{YEN SIGN}](?=\.?\d)")


def with_plain_numbers(text: str) -> str:
    """Return the text with ASCII minus signs, commas between thousands, and no `$` after a sign.

    >>> with_plain_numbers("\N{MINUS SIGN}$1 000".replace(" ", "\N{NO-BREAK SPACE}"))
    '-1,000'
    """
    plain = _BETWEEN_THOUSANDS.sub(",", text).translate(_MINUS_SIGNS)
    return _SIGN_OF_CURRENCY.sub(r"\1", plain)


def last_number(text: str) -> float | None:
    """Return the last number in the text, or None.

    Typeset minus signs, separators of thousands, fractions and mixed numbers are understood. A sign
    may stand before that of a currency.

    >>> last_number("from 1,350 to -$5.50"), last_number("three quarters, or 3/4")
    (-5.5, 0.75)
    >>> last_number("-2 1/2"), last_number("on 3/4/2024")
    (-2.5, 2024.0)
    """
    plain = _LATEX_FRACTION.sub(_plain_fraction, with_plain_numbers(text))
    numbers = list(_NUMBER.finditer(plain))
    if not numbers:
        return None
    for fraction in _FRACTION.finditer(plain):
        if fraction.end() == numbers[-1].end() and int(fraction[4]):
            return _value(*fraction.groups())
    return float(numbers[-1][0].replace(",", ""))


def _plain_fraction(found: re.Match[str]) -> str:
    """Return a fraction of LaTeX as `3/4`, with a space between it and a digit before it."""
    before, numerator, denominator = found.groups()
    return f"{before}{' ' if before else ''}{numerator}/{denominator}"


def _value(sign: str, whole: str | None, numerator: str, denominator: str) -> float:
    """Return a fraction. A number before an improper fraction is not a part of it.

    >>> _value("-", "2", "1", "2"), _value("", "7", "9", "4")
    (-2.5, 2.25)
    """
    above, below = int(numerator.replace(",", "")), int(denominator)
    if whole and above >= below:
        return above / below
    value = int(whole or 0) + above / below
    return -value if sign == "-" else value
