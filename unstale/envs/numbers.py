"""Numbers in the texts of language models."""

import math
import re
import unicodedata
from collections.abc import Callable

_NUMBER = re.compile(
    r"(?<!\w)(?<!\d\.)[-+]?"
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?<!\.)(?=\.\d))(?:\.\d+)?(?:[eE][-+]?\d+)?"
)
_FRACTION = re.compile(
    r"(?<![\w.,/])([-+]?)(?:(\d{1,15}) )?(\d{1,3}(?:,\d{3}){1,4}|\d{1,15}) ?/ ?(\d{1,15})"
    r"(?![\d/]|[.,]\d)"
)
"""A sign, a whole part, and the two numbers of a fraction."""
_PLAIN = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+"
_BRACED = rf"\s*(?:\{{\s*({_PLAIN})\s*\}}|(\d))"
"""An argument of a LaTeX command: a number in braces, or one digit."""
_LATEX_FRACTION = re.compile(rf"(\d?)\\[cdt]?frac{_BRACED}{_BRACED}")
_SUPERSCRIPT = re.compile(
    "[\N{SUPERSCRIPT ZERO}\N{SUPERSCRIPT ONE}\N{SUPERSCRIPT TWO}"
    "\N{SUPERSCRIPT THREE}\N{SUPERSCRIPT FOUR}-\N{SUPERSCRIPT NINE}\N{SUPERSCRIPT MINUS}]+"
)
_VULGAR = re.compile(
    "[\N{VULGAR FRACTION ONE QUARTER}-\N{VULGAR FRACTION THREE QUARTERS}"
    "\N{VULGAR FRACTION ONE SEVENTH}-\N{VULGAR FRACTION SEVEN EIGHTHS}]"
)
_EXPONENT = r"\s?\^\s?(?:\{\s*([-+]?\d+)\s*\}|([-+]?\d+))"
_SCIENTIFIC = re.compile(
    rf"(?<![\w.,])({_PLAIN})\s*(?:\\times|\\cdot|[*\N{{MULTIPLICATION SIGN}}\N{{MIDDLE DOT}}])"
    rf"\s*10{_EXPONENT}"
)
_POWER = re.compile(rf"(?<![\w.,])(\d+(?:\.\d+)?){_EXPONENT}")
_NO_NUMBER = re.compile(rf"{_EXPONENT}|_\{{[^{{}}]*\}}")
"""The exponent of a unit or a variable, and an index."""
_ROOT = re.compile(rf"(?:(?<![\w.,])(\d+(?:\.\d+)?)\s*)?\\sqrt{_BRACED}")
_UNKNOWN = re.compile(
    rf"(?:(?<![\w.,]){_PLAIN}\s*)?(?:\\[cdt]?frac(?:\s*\{{[^{{}}]*\}}){{2}}"
    r"|\\sqrt(?:\[\w{0,9}\])?(?:\{[^{}]*\})?|\\pi\b|\N{GREEK SMALL LETTER PI})"
)
"""Expressions that are not computed, with the number before them."""
_MARK = "\N{REPLACEMENT CHARACTER}"
_MAX_DIGITS = 400
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
    """Return the last number in the text, or None. A whole number is exact, as int.

    Typeset minus signs, separators of thousands, fractions, mixed numbers, powers and square roots
    are understood. A sign may stand before that of a currency. It is None if the last expression
    has pi, another root, or a division by 0. Exponents of units and of variables are no numbers.

    >>> last_number("from 1,350 to -$5.50"), last_number("three quarters, or 3/4")
    (-5.5, 0.75)
    >>> last_number("-2 1/2"), last_number("on 3/4/2024")
    (-2.5, 2024)
    >>> last_number("1.5 * 10^3 cm^2"), last_number(r"\\boxed{2\\pi}")
    (1500.0, None)
    """
    plain = _computed(with_plain_numbers(text))
    numbers = list(_NUMBER.finditer(plain))
    if not numbers or _MARK in plain[numbers[-1].end() :]:
        return None
    for fraction in _FRACTION.finditer(plain):
        if fraction.end() == numbers[-1].end():
            return _value(*fraction.groups()) if int(fraction[4]) else None
    digits = numbers[-1][0].replace(",", "")
    is_whole = digits.lstrip("+-").isdecimal() and len(digits) <= _MAX_DIGITS
    return int(digits) if is_whole else float(digits)


def _computed(text: str) -> str:
    """Return the text with numbers instead of powers and roots, and `3/4` instead of `\\frac34`.

    What is not computed is replaced by `_MARK`, and exponents and indices of others are removed.
    """
    text = _SUPERSCRIPT.sub(lambda found: f"^{{{_compatible(found[0])}}}", text)
    text = _VULGAR.sub(lambda found: f" {_compatible(found[0])}", text)
    steps: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
        (_SCIENTIFIC, lambda found: f"{found[1]}e{found[2] or found[3]}"),
        (_POWER, _plain_power),
        (_NO_NUMBER, lambda found: ""),
        (_LATEX_FRACTION, _plain_fraction),
        (_ROOT, _plain_root),
        (_UNKNOWN, lambda found: _MARK),
    )
    for pattern, replace in steps:
        text = pattern.sub(replace, text)
    return text


def _compatible(text: str) -> str:
    """Return superscripts and typeset fractions as plain characters."""
    plain = unicodedata.normalize("NFKC", text)
    return plain.replace("\N{FRACTION SLASH}", "/").replace("\N{MINUS SIGN}", "-")


def _plain_power(found: re.Match[str]) -> str:
    base, exponent = found[1], int(found[2] or found[3])
    if abs(exponent) * max(1.0, math.log10(1 + float(base))) > _MAX_DIGITS:
        return _MARK
    if exponent >= 0 and base.isdecimal():
        return str(int(base) ** exponent)
    return repr(float(base) ** exponent) if float(base) else _MARK


def _plain_root(found: re.Match[str]) -> str:
    factor, radicand = found[1] or "1", (found[2] or found[3]).replace(",", "")
    if radicand.startswith("-"):
        return _MARK
    value = float(factor) * math.sqrt(float(radicand))
    return f" {int(value) if value < 1e15 and value.is_integer() else value!r}"


def _plain_fraction(found: re.Match[str]) -> str:
    """Return a fraction of LaTeX as `3/4`, with a space between it and a digit before it.

    With decimals it is the quotient.
    """
    before = f"{found[1]} " if found[1] else ""
    above, below = (one or two for one, two in ((found[2], found[3]), (found[4], found[5])))
    if below.startswith("-"):
        above = above[1:] if above.startswith("-") else f"-{above.lstrip('+')}"
    below = below.lstrip("+-")
    if "." not in above + below and "," not in below:
        return f"{before}{above}/{below}"
    divisor = float(below.replace(",", ""))
    return f"{before}{float(above.replace(',', '')) / divisor!r}" if divisor else _MARK


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
