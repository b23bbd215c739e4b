"""Exact values of arithmetic expressions, given as lists of tokens."""

import re
from collections.abc import Sequence
from fractions import Fraction
from math import factorial, isqrt
from typing import NamedTuple

SCALES = {
    "dozen": 12,
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "bn": 10**9,
    "trillion": 10**12,
    "lakh": 10**5,
    "crore": 10**7,
}
"""Word after a number -> factor by which it multiplies the number."""
_FACTORS: dict[str, int | Fraction] = {
    **SCALES,
    "k": 10**3,
    "%": Fraction(1, 100),
    "\N{DEGREE SIGN}": 1,
}
_MAX_TOKENS = 500
_MAX_DEPTH = 40
_MAX_BITS = 4096
"""Largest number of bits of a numerator or denominator, which limits the time of a computation."""

Value = Fraction | float | str | tuple["Value", ...]


class Token(NamedTuple):
    """A token of an expression, such as a number or an operator."""

    kind: str
    text: str
    spaced: bool
    """True if white space comes before the token."""


class _UnknownError(Exception):
    """Error: an expression is not understood, or its value is too large."""


def computed(tokens: Sequence[Token]) -> Value | None:
    """Return the value of an expression. None if any part of it is not understood.

    A number is an exact `Fraction`, or a float if it has an irrational root. A list is a tuple
    (bracket, items, bracket). Numbers joined by `-` or by several `/`, without spaces, are a range
    or a date. Their value is their text.
    """
    text = _range_or_date(tokens)
    if text is not None:
        return text
    if not tokens or len(tokens) > _MAX_TOKENS:
        return None
    parser = _Parser(tokens)
    try:
        value = parser.items("", "")
        return value if parser.place == len(tokens) else None
    except (_UnknownError, ArithmeticError, ValueError, TypeError):
        return None


def _range_or_date(tokens: Sequence[Token]) -> str | None:
    if len(tokens) == 1 and tokens[0].kind == "text":
        return tokens[0].text.replace(" ", "")
    signs = {token.text for token in tokens[1::2]}
    is_chain = (
        len(tokens) > 2 and len(tokens) % 2 and all(token.kind == "number" for token in tokens[::2])
    )
    is_chain = is_chain and not any(token.spaced for token in tokens[1:])
    is_text = signs == {"-"} or (signs == {"/"} and len(tokens) > 3)
    return "".join(token.text for token in tokens) if is_chain and is_text else None


class _Parser:
    """A recursive-descent parser. `place` is the index of the next token."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens = [*tokens, Token("end", "", True)]
        self.place = self.depth = 0

    def items(self, opening: str, closing: str) -> Value:
        """Parse a sum, or several that commas separate, up to the bracket `closing`. Return its
        value.
        """
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise _UnknownError
        values = [self.sum()]
        while self.takes(","):
            values.append(self.sum())
        if closing and not self.takes(*closing):
            raise _UnknownError
        self.depth -= 1
        last = self.tokens[self.place - 1].text if closing else ""
        return values[0] if len(values) == 1 else (opening, *values, last)

    def takes(self, *texts: str) -> bool:
        """Return True and skip the next token if it is one of `texts`."""
        found = self.tokens[self.place].text in texts
        self.place += found
        return found

    def sum(self) -> Value:
        value = self.product()
        while self.tokens[self.place].text in ("+", "-"):
            sign = -1 if self.takes("-") else 1
            value = _checked(_number(value) + sign * _number(self.product()))
        return value

    def product(self) -> Value:
        value, divided = self.signed(), False
        while True:
            token = self.tokens[self.place]
            if self.takes("*"):
                value = _checked(_number(value) * _number(self.signed()))
            elif self.takes("/"):
                value, divided = _checked(_number(value) / _number(self.signed())), True
            elif token.kind in ("open", "root", "fraction"):
                last = self.tokens[self.place - 1]
                if divided or (token.spaced and token.kind == "open" and token.text != "{"):
                    raise _UnknownError  # 1/2(3), 18 (9)
                if token.kind == "fraction" and last.kind == "number":
                    raise _UnknownError  # only a mixed number, which `atom` reads
                value = _checked(_number(value) * _number(self.power()))
            else:
                return value

    def signed(self) -> Value:
        if self.takes("-"):
            return -_number(self.power())
        self.takes("+")
        return self.power()

    def power(self) -> Value:
        value = self.atom()
        while self.tokens[self.place].kind == "after":
            value = _after(_number(value), self.tokens[self.place].text)
            self.place += 1
        if self.takes("^"):
            self.depth += 1
            if self.depth > _MAX_DEPTH:
                raise _UnknownError
            value = _power(_number(value), _number(self.signed()))
            self.depth -= 1
        return value

    def atom(self) -> Value:
        token = self.tokens[self.place]
        self.place += 1
        if token.kind == "number":
            return self.mixed(_read(token.text), token)
        if token.kind == "open":
            return self.items(token.text, "}" if token.text == "{" else ")]")
        if token.kind == "root":
            index = Fraction(3) if token.text == "\N{CUBE ROOT}" else Fraction(2)
            if self.takes("["):
                index = Fraction(self.items("[", "]"))  # type: ignore[arg-type]
            return _root(_number(self.atom()), index)
        if token.kind == "fraction":
            return _checked(_number(self.braced()) / _number(self.braced()))
        raise _UnknownError

    def braced(self) -> Value:
        if not self.takes("{"):
            raise _UnknownError
        return self.items("{", "}")

    def mixed(self, whole: Fraction, token: Token) -> Fraction:
        """Return `whole` plus the proper fraction that may follow it, as in `2 1/2`."""
        following = self.tokens[self.place : self.place + 7]
        if is_mixed(token, following):
            self.place += 3 if following[0].kind == "number" else 7
            digits = [_read(each.text) for each in following if each.kind == "number"]
            return whole + digits[0] / digits[1]
        return whole


def is_mixed(token: Token, following: Sequence[Token]) -> bool:
    """Return True if `token` and the tokens after it are a mixed number, such as `2 1/2`."""
    shape = [each.kind if each.kind == "number" else each.text for each in following]
    texts = [token.text, *(each.text for each in following if each.kind == "number")][:3]
    if len(texts) < 3 or not all(text.isdecimal() and len(text) < 16 for text in texts):
        return False
    is_plain = shape[:3] == ["number", "/", "number"] and following[0].spaced
    is_latex = shape == ["frac", "{", "number", "}", "{", "number", "}"]
    return (is_plain or is_latex) and int(texts[1]) < int(texts[2])


def _read(text: str) -> Fraction:
    """Return the number in a token's text, which may have separators of thousands."""
    if re.search(r"_\d\d?$", text):
        digits, _, base = text.partition("_")
        return Fraction(int(digits, int(base)))
    if re.search(r"\.\d{3},|\.\d+,", text):
        text = text.replace(".", "").replace(",", ".")
    digits, _, exponent = (
        re.sub("[,'_ \N{RIGHT SINGLE QUOTATION MARK}]", "", text).lower().partition("e")
    )
    if len(digits) > 1000 or abs(int(exponent or 0)) > 1000:
        raise _UnknownError
    return Fraction(digits) * Fraction(10) ** int(exponent or 0)


def _number(value: Value) -> Fraction | float:
    if isinstance(value, str | tuple):
        raise _UnknownError
    return value


def _checked(value: Fraction | float) -> Fraction | float:
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
            raise _UnknownError
    elif not abs(value) < float("inf"):
        raise _UnknownError
    return value


def _after(value: Fraction | float, sign: str) -> Fraction | float:
    """Return a number to which the sign after it is applied: a factorial, a scale word or a
    unit.
    """
    if sign != "!":
        return _checked(value * _FACTORS[sign])
    if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= 400:
        raise _UnknownError
    return _checked(Fraction(factorial(int(value))))


def _power(base: Fraction | float, exponent: Fraction | float) -> Fraction | float:
    if not isinstance(exponent, Fraction) or (base == 0 and exponent <= 0):
        raise _UnknownError
    if exponent.denominator != 1:
        base, exponent = _root(base, Fraction(exponent.denominator)), Fraction(exponent.numerator)
    if isinstance(base, Fraction):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if abs(exponent) * bits > _MAX_BITS:
            raise _UnknownError
    return _checked(base ** int(exponent))


def _root(value: Fraction | float, index: Fraction) -> Fraction | float:
    """Return the real root of a number: exact if it is rational, otherwise a float."""
    if index.denominator != 1 or not 2 <= index <= 100 or (value < 0 and index % 2 == 0):
        raise _UnknownError
    if value < 0:
        return -_root(-value, index)
    if isinstance(value, Fraction):
        above, below = (_whole_root(each, int(index)) for each in value.as_integer_ratio())
        if Fraction(above, below) ** int(index) == value:
            return Fraction(above, below)
    return _checked(float(value) ** (1 / int(index)))


def _whole_root(value: int, index: int) -> int:
    """Return the largest integer whose power `index` is at most `value`."""
    if index == 2:
        return isqrt(value)
    guess = 1 << -(-value.bit_length() // index)
    while value:
        better = ((index - 1) * guess + value // guess ** (index - 1)) // index
        if better >= guess:
            break
        guess = better
    return guess if value else 0
