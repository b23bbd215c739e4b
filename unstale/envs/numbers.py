r"""Numbers in texts of language models.

The answer of a text is its last expression, or the content of its last `\boxed{}`. It counts only
if the whole expression is understood and computed exactly. A part of an expression is never the
answer.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Literal, NamedTuple

from unstale.envs.arithmetic import SCALES, Token, Value, computed, is_mixed

_DIGITS = (
    r"\d{1,3}(?:\.\d{3})+,(?:\d{1,2}|\d{4,})(?!\d)"
    r"|(?:\d{1,3}(?P<by>[,'_\N{RIGHT SINGLE QUOTATION MARK} ])\d{3}(?:(?P=by)\d{3})*(?!\d)"
    r"|\d{1,2}(?:,\d\d){1,6},\d{3}(?!\d)|\d+|(?<![\w.])(?=\.\d))(?:\.\d+)?(?:[eE][-+]?\d+(?!\w))?"
)
"""Pattern of a number in digits: `1.234,5`, `12,00,000`, thousands separated by one of five
characters, or digits with a decimal point.
"""
_RAISED = r"\s?\^\s?(?:\{[^{}]*\}|[-+]?\d+)"
_LOWERED = r"_(?:\{[^{}]*\}|[^\W_]+)"
_TOKEN = re.compile(
    r"(?P<unknown>[\N{PLUS-MINUS SIGN}\N{INFINITY}\N{LEFT CEILING}-\N{RIGHT FLOOR}]"
    r"|\b0[xX][\da-fA-F]+|(?<=\d)\.\(\d|(?<=\d)_(?=[{\d])|\|(?=[-+.\d])|(?<=\d)\|)"
    r"|(?P<text>\d+(?:\.\d+)?(?:(?: : |:)\d+(?:\.\d+)?)+"
    r"|(?!\d{1,3}(?:\.\d{3})+,)\d+(?:\.\d+){2,})"
    rf"|(?P<number>\d+_\d\d?(?!\w)|{_DIGITS})|(?P<command>\\(?:[A-Za-z]+|.))"
    r"|(?P<times>(?<=[\d)%])\ ?[xX]\ ?(?=[-.\d($\\\N{SQUARE ROOT}\N{CUBE ROOT}]|sqrt))"
    rf"|(?P<word>(?:(?:/\s?|-)(?!sqrt))?(?:[A-Za-z][^\W_]*(?:&[A-Za-z]+|{_LOWERED}|{_RAISED})*|[^\W\d_]))"
    r"|(?P<operator>\*\*|[-+*/^])|(?P<after>[!%\N{DEGREE SIGN}])"
    r"|(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<comma>,)"
    r"|(?P<currency>[$\N{EURO SIGN}\N{POUND SIGN}\N{YEN SIGN}\N{INDIAN RUPEE SIGN}])"
    r"|(?P<root>[\N{SQUARE ROOT}\N{CUBE ROOT}])"
    r"|(?P<end>\S)"
)
_OPERATORS = {"times": "*", "cdot": "*", "ast": "*", "div": "/"}
_SPACES = re.compile(r"[,;:!> ]|q?quad|left|right|[bB]igg?[lr]?|displaystyle|boxed")
_RELATIONS = re.compile(
    r"approx|equiv|sim|implies|iff|[rR]ightarrow|therefore|because|"
    r"(?:black)?square|checkmark|hline|begin|end|text\w*|[&\\]"
)
"""LaTeX commands that end an expression."""
_SEPARATORS = (";", "or", "and")
_MARKUP = ("*", "$", "`", "~")
_BOUND = "\N{NOT EQUAL TO}"
"""Sign that stands for every inequality sign. A number beside it is not the answer."""
_INEQUALITY = re.compile(
    r"[gl]eq?(?:slant)?|[gl]t|neq?"
    r"|[\N{NOT EQUAL TO}\N{LESS-THAN OR EQUAL TO}-\N{GREATER-THAN OVER EQUAL TO}]"
)
_ASCII_INEQUALITY = re.compile(r"(?<![\d)!])!=(?!=)|(?<![-<>=])[<>]=(?![<>=])")
_BRACKET_IN_BOX = re.compile(r"(?<![-=<>])[<>](?![<>])")
_SCALES = {"percent": "%", "pct": "%"} | {name: name for name in SCALES}
_JOINS = re.compile(
    r"(of|to|and|times|plus|minus|over|per|by|in|into|off|than|remainder|')( the)?"
    r"|out of|[a-z]+ by|(more|less|fewer|greater) than|[a-z]+ (times|plus|minus|[a-z]+ by)"
)
"""Words that join two numbers to one expression, as in `10% of 50`."""
_PARTS = "(thir|four|fif|six|seven|eigh|nin|ten|hundred|thousand)(d|th)"
_BEFORE = re.compile(
    rf"(.* )?((half|root|cube|square|quarters?|{_PARTS}s?) of( the)?|twice|double|triple|minus"
    "|negative)"
)
"""Words before a number that change its value, such as `twice`."""
_AFTER = re.compile(rf"({_PARTS}s|squared|cubed|factorial|and an? (half|quarter|{_PARTS}))\b")
"""Words after a number that change its value, such as `squared`."""
_MEASURES = tuple(
    frozenset(names.split())
    for names in (
        "mile miles mi km m yard yards yd foot feet ft inch inches in cm mm meter meters metres",
        "ton tons kg g pound pounds lb lbs stone ounce ounces oz gram grams kilogram kilograms",
        "year years month months week weeks day days hour hours hr hrs h minute minutes min mins m"
        " second seconds sec secs s",
        "dollar dollars cent cents pound pounds penny pence euro euros",
        "gallon gallons quart quarts pint pints cup cups tablespoons teaspoons liter liters ml",
        "degrees degree minutes minute seconds second",
    )
)
"""Units by kind of quantity. A value such as `5 feet 6 inches` has two units of one kind."""
_EQUALS = tuple("=<>\N{ALMOST EQUAL TO}\N{RIGHTWARDS ARROW}")
_AFTER_SIGN = tuple("-+*/^)=}$")
"""Characters that follow the `!` of a factorial in prose, but never an exclamation mark."""
_CALLS = tuple(f"({each}" for each in "0123456789-.\\")
_FOLLOWING = re.compile(r"(\s*)(.{0,2})")
_UNITS = frozenset("mgshlLtdJNWVAKCFcp")
"""Units of one letter. Any other letter beside a number is a variable."""
_FUNCTIONS = ("sin", "cos", "tan", "log", "ln", "exp")
_GREEK = re.compile(r"[\N{GREEK CAPITAL LETTER ALPHA}-\N{GREEK SMALL LETTER OMEGA}]|pi$")
_WORD = re.compile(r"(?<![\\A-Za-z])(?!sqrt\b)[A-Za-z]{2,}")
_REMARK = re.compile(r"(?<![-+/^\w])(?<![-+/^]\s)(?<![\s\d]\*\s)\(([^()\n]*)\)(?!\s*[*/^])")
_TEXT_COMMAND = re.compile(
    r"\\(?:text\w*|math(?:rm|bf|it|sf)|mbox|emph|operatorname|tag)\s*\{([^{}]*)\}"
)
_DEGREES = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree")
_DELIMITERS = re.compile(r"\\[()\[\]]|\$\$")
_SHORT_FRACTION = re.compile(r"\\[cdt]?frac\s*(?:(\d)|\{([^{}]*)\})\s*(\d)?")
_SUPERSCRIPT = re.compile(
    "[\N{SUPERSCRIPT ZERO}\N{SUPERSCRIPT ONE}\N{SUPERSCRIPT TWO}"
    "\N{SUPERSCRIPT THREE}\N{SUPERSCRIPT FOUR}-\N{SUPERSCRIPT NINE}\N{SUPERSCRIPT MINUS}]+"
)
_VULGAR = re.compile(
    "[\N{VULGAR FRACTION ONE QUARTER}-\N{VULGAR FRACTION THREE QUARTERS}"
    "\N{VULGAR FRACTION ONE SEVENTH}-\N{VULGAR FRACTION SEVEN EIGHTHS}]"
)
_BETWEEN_THOUSANDS = re.compile(
    r"(?<=\d)(?:\{,\}|,?\\[,;:! ]|[\N{NO-BREAK SPACE}\N{THIN SPACE}\N{NARROW NO-BREAK SPACE}])"
    r"(?=\d{3}(?!\d))"
)
"""Separators of thousands in LaTeX and typeset text, other than a comma."""
_MINUS_SIGNS = str.maketrans("\N{MINUS SIGN}\N{EN DASH}", "--")
_PLAIN = str.maketrans(
    "\N{FRACTION SLASH}\N{DIVISION SLASH}\N{DIVISION SIGN}\N{MINUS SIGN}\N{MULTIPLICATION SIGN}"
    "\N{MIDDLE DOT}\N{DOT OPERATOR}\N{BULLET OPERATOR}\N{ASTERISK OPERATOR}",
    "///-*****",
)
_SIGN_OF_CURRENCY = re.compile(r"([-+])\\?[$\N{EURO SIGN}\N{POUND SIGN}\N{YEN SIGN}](?=\.?\d)")


class Quantity(NamedTuple):
    """The answer of a text: a number, a list of numbers, or a text such as a time."""

    value: Value
    """The value: an exact number, or a float if it has an irrational root. A tuple for a list of
    numbers. A str for what is not computed: a time or ratio (`7:30`), a range or date (`3-4`), a
    version (`1.2.3`).
    """
    is_percent: bool = False
    """True if a percent sign follows. `5%` has the value 5."""


def with_plain_numbers(text: str) -> str:
    r"""Return the text with ASCII minus signs, commas between thousands, and no `$` after a sign.

    >>> with_plain_numbers("\N{MINUS SIGN}$1 000".replace(" ", "\N{NO-BREAK SPACE}"))
    '-1,000'
    """
    plain = _BETWEEN_THOUSANDS.sub(",", text).translate(_MINUS_SIGNS)
    return _SIGN_OF_CURRENCY.sub(r"\1", plain)


def last_number(text: str) -> Fraction | float | None:
    r"""Return the value of the last expression in a text, or None if it is not a number.

    `last_quantity` says which expressions are understood.

    >>> last_number("first 1,350, then -$5.50"), last_number("three quarters, or 3/4")
    (Fraction(-11, 2), Fraction(3, 4))
    >>> last_number("1.5 * 10^3 cm^2"), last_number(r"\boxed{2\pi}"), last_number("on 3/4/2024")
    (Fraction(1500, 1), None, None)
    """
    found = last_quantity(text)
    value = found.value if found else None
    return None if isinstance(value, str | tuple) else value


def given_answer(text: str) -> str:
    r"""Return the answer of a text in a form that is equal for equal numbers.

    It is the last quantity, or else the content of the last `\boxed{}`. Empty without both.

    >>> given_answer("It is **1,350.0**"), given_answer(r"\boxed{3/4}"), given_answer("about 5%")
    ('1350', '3/4', '5%')
    >>> given_answer(r"So \boxed{No Way}"), given_answer("no")
    ('no way', '')
    """
    quantity = last_quantity(text)
    if quantity:
        return f"{quantity.value}{'%' if quantity.is_percent else ''}"
    return " ".join((_last_box(text) or "").casefold().split())


def last_quantity(text: str) -> Quantity | None:
    r"""Return the value of the last expression in a text. None if there is none or it is not
    understood.

    If there is a `\boxed{}`, only the last one counts. Otherwise, a number in a remark in
    parentheses counts only if there is no other. Units, signs of currencies and markup are skipped.
    An expression with a variable, a function, a division by 0 or a very large number is not
    understood.

    >>> last_quantity("5% of it"), last_quantity("x = 2i")
    (Quantity(value=Fraction(5, 1), is_percent=True), None)
    >>> last_quantity("**18** (in 2024)").value, last_quantity("at 7:30").value
    (Fraction(18, 1), '7:30')
    """
    box = _last_box(text)
    if box is not None:
        text = _BRACKET_IN_BOX.sub(_BOUND, box.replace("\n", " "))
    plain = _plain(text)
    is_prose = bool(_WORD.search(plain))
    if box is not None:
        return _of_line(plain, is_prose, is_box=True) or None
    for part in (_REMARK.sub(_without_remark, plain), plain):
        for line in reversed(part.split("\n")):
            found = _of_line(line, is_prose)
            if found is not False:
                return found
    return None


def _last_box(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    depth = 0
    for place in range(start, len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if text[place] == "}" and not depth:
            return text[start + 7 : place]
    return None


def _plain(text: str) -> str:
    r"""Return the text with plain characters, in which every fraction is written `\frac{1}{2}`."""
    text = _SUPERSCRIPT.sub(lambda found: f"^{{{_compatible(found[0])}}}", with_plain_numbers(text))
    text = _VULGAR.sub(lambda found: "\\frac" + _compatible(found[0]).replace("/", ""), text)
    text = _ASCII_INEQUALITY.sub(_BOUND, _compatible(text))
    text = _DELIMITERS.sub("$", _DEGREES.sub("\N{DEGREE SIGN}", _TEXT_COMMAND.sub(r" \1 ", text)))
    return _SHORT_FRACTION.sub(
        lambda found: f"\\frac{{{found[1] or found[2]}}}" + (f"{{{found[3]}}}" if found[3] else ""),
        text,
    )


def _compatible(text: str) -> str:
    """Return the text with superscripts, wide characters and typeset fractions as plain
    characters.
    """
    plain = unicodedata.normalize("NFKC", text)
    return plain.translate(_PLAIN)


def _without_remark(found: re.Match[str]) -> str:
    return ";" if _WORD.search(found[1]) else found[0]


def _of_line(
    line: str, is_prose: bool, *, is_box: bool = False
) -> Quantity | Literal[False] | None:
    r"""Return the value of the last expression in a line.

    None if it is not understood, False if there is none. `is_prose` is True if the whole text has
    words, so that "!" may be an exclamation mark. `is_box` is True for the content of a `\boxed{}`.
    """
    tokens = _grouped([*_tokens(line, is_prose)], is_box=is_box)
    found = [place for place, token in enumerate(tokens) if _is_value(token)]
    if not found:
        return False
    start = end = found[-1]
    while start and _belong(tokens, start):
        start -= 1
    while end + 1 < len(tokens) and _belong(tokens, end + 1):
        end += 1
    relation = max((n for n, each in enumerate(tokens[:start]) if each.text == "="), default=-1)
    if is_box and any(relation < place < start for place in found):
        return None
    if _BOUND in [each.text for each in (*tokens[:start][-1:], *tokens[end + 1 :][:1])]:
        return None
    if is_box and _is_list(tokens[: relation + 1]):
        return None
    before = tokens[start - 1] if start else Token("end", "=" if is_box else "\n", True)
    beside = [*tokens[max(0, start - 2) : start], *tokens[end + 2 : end + 0 : -1]]
    for each, bracket in (beside[:2], beside[-2:]) if len(beside) > 1 else ():
        if each.kind == "operator" and each.text != "-" and bracket.text in tuple("()[]{}"):
            return None  # 3 * (5 apples)
    if _is_fragment(tokens, start, end):
        return None
    run = _trimmed(tokens[start : end + 1], before)
    is_percent = len(run) in (2, 3) and (run[-2].kind, run[-1].text) == ("number", "%")
    value = computed(run[:-1] if is_percent else run)
    return None if value is None else Quantity(value, is_percent)


def _tokens(line: str, is_prose: bool) -> Iterator[Token]:
    """Yield the tokens of a line. Text that is not part of an expression has the kind `end`."""
    last, spaced, place = Token("end", "\n", True), False, 0
    for found in _TOKEN.finditer(line):
        spaced |= found.start() > place
        place = found.end()
        following = _FOLLOWING.match(line, place) or found
        context = _Context(last, spaced, following[1], following[2], is_prose)
        kind, text = _classified(str(found.lastgroup), found[0], context)
        if kind:
            last, spaced = Token(kind, text, spaced), False
            yield last


class _Context(NamedTuple):
    last: Token
    spaced: bool
    space: str
    following: str
    """The next two characters, after the white space `space`."""
    is_prose: bool

    @property
    def after_value(self) -> bool:
        return self.last.kind in ("number", "text", "close", "after", "unknown")

    @property
    def before_value(self) -> bool:
        first = self.following[:1]
        signs = tuple("(\\[{-+$\N{SQUARE ROOT}\N{CUBE ROOT}\N{EURO SIGN}")
        return first.isalnum() or first in signs or self.following[1:].isdigit()


def _classified(kind: str, text: str, context: _Context) -> tuple[str, str]:
    """Return the kind and text of a token. Tokens of an empty kind are skipped."""
    if kind == "command":
        kind, text = _command(text[1:])
        if kind == "operator":
            return kind, _OPERATORS[text]
    if kind in ("operator", "times"):
        return _operator(_OPERATORS.get(text, text).strip(), context)
    if kind == "word":
        return _word(text, context)
    if kind == "comma":
        is_tight = context.last.kind in ("number", "text") and context.following[:1].isdigit()
        return ("comma" if is_tight and not context.spaced + len(context.space) else "loose"), text
    if kind == "currency":
        is_inside = context.last.kind in ("operator", "open", "loose", "comma") or (
            context.after_value and context.following[:1] in tuple("-+*/^)")
        )
        return ("" if is_inside else "end"), "$"
    if kind == "after":
        is_loud = text == "!" and context.is_prose
        is_operand = context.after_value and (not is_loud or context.following[:1] in _AFTER_SIGN)
        return ("after" if is_operand else "end"), text
    if _INEQUALITY.fullmatch(text):
        return kind, _BOUND
    return kind, "=" if text in _EQUALS else text


def _command(name: str) -> tuple[str, str]:
    """Return the kind and text of the token of a LaTeX command."""
    if _INEQUALITY.fullmatch(name):
        return "end", _BOUND
    if _RELATIONS.fullmatch(name):
        return "end", "="
    if _SPACES.fullmatch(name):
        return "", ""
    if name.endswith("frac"):
        return "fraction", "frac"
    if name == "sqrt":
        return "root", name
    kinds = {"%": "after", "$": "currency", "{": "open", "}": "close"}
    return ("operator" if name in _OPERATORS else kinds.get(name, "unknown")), name


def _operator(sign: str, context: _Context) -> tuple[str, str]:
    """Return the kind and text of an operator's token. A star that is markup is of the kind
    `end`.
    """
    if sign not in ("*", "**", "x", "X"):
        return "operator", sign
    is_even, is_between = context.spaced == bool(context.space), context.before_value
    if context.after_value and is_between and is_even:
        return "operator", "^" if sign == "**" else "*"
    if context.after_value and sign == "*" and context.following[:1].isdigit():
        return "unknown", sign
    is_word = context.last.text[-1:].isalpha() and context.spaced and bool(context.space)
    return ("operator" if is_word and is_between else "end"), sign


def _word(text: str, context: _Context) -> tuple[str, str]:
    """Return the kind of the first word in `text`, and what it stands for.

    Units and other words that are no scale, function or variable are of the kind `end`.
    """
    name = re.split(r"[\s^_]", text.lstrip("-/ "))[0]
    is_tight = context.after_value and not context.spaced and text[0] not in "-/"
    if context.after_value and (name.lower() in _SCALES or (text == "k" and is_tight)):
        return "after", _SCALES.get(name.lower(), name.lower())
    if name == "sqrt":
        return "root", name
    is_call = not context.space and context.following.startswith(_CALLS)
    is_infix = context.after_value and name in ("mod", "choose")
    if is_call or is_infix or name in _FUNCTIONS or _GREEK.match(name):
        return "unknown", "\\" + name
    if len(name) > 1 or not name.isascii():
        is_product = is_tight and re.fullmatch(r"[abcnxyz]{2}|\w*\d\w+|[a-z]*[014-9]", name)
        return ("unknown" if is_product else "end"), name
    if context.after_value:
        is_unit = name in _UNITS or (context.spaced and name in "aIA")
        return ("end" if is_unit else "unknown"), name
    return ("end" if context.space and context.following[:1].isdigit() else "unknown"), name


def _grouped(tokens: list[Token], *, is_box: bool) -> list[Token]:
    """Return the tokens, with brackets that enclose neither an expression nor a list as kind `end`.

    A comma before a space separates items only inside of the other brackets and in a box.
    """
    ends = [*accumulate(token.kind == "end" for token in tokens)]
    values = [*accumulate(_is_value(token) for token in tokens)]
    opened: list[int] = []
    kept: set[int] = set()
    commas: dict[int, int] = {}
    for place, token in enumerate(tokens):
        if token.kind == "open":
            opened.append(place)
        elif token.kind == "loose":
            commas[place] = opened[-1] if opened else -1
        elif token.kind == "close" and opened:
            start = opened.pop()
            is_label = values[start] == values[place] and tokens[place + 1 : place + 2]
            if ends[start] == ends[place] and not (is_label and tokens[place + 1].spaced):
                kept |= {start, place}
    kept |= {-1} if is_box else set()
    grouped = []
    for place, token in enumerate(tokens):
        if token.kind == "loose":
            token = token._replace(kind="comma" if commas[place] in kept else "end")
        elif token.kind in ("open", "close") and place not in kept:
            token = token._replace(kind="end")
        grouped.append(token)
    return grouped


def _is_value(token: Token) -> bool:
    """Return True if a token is, or begins, something that has a value. A variable has none."""
    is_named = token.kind == "unknown" and not token.text[:1].isalpha()
    return is_named or token.kind in ("number", "text", "root", "fraction")


def _belong(tokens: Sequence[Token], place: int) -> bool:
    """Return True if the token at `place` and the one before it belong to one expression."""
    before, token = tokens[place - 1], tokens[place]
    if "end" in (before.kind, token.kind):
        return False
    if token.kind in ("number", "text") and before.kind in ("number", "text", "after", "close"):
        is_whole = before.text in tuple("%\N{DEGREE SIGN})]!") or before.kind in ("number", "text")
        return not (token.spaced and is_whole) or is_mixed(before, tokens[place : place + 7])
    return True


def _is_list(tokens: Sequence[Token]) -> bool:
    """Return True if a comma, `;`, `or` or `and` follows a value, outside of brackets."""
    depth = has_value = 0
    for token in tokens:
        depth += (token.kind == "open") - (token.kind == "close")
        has_value |= _is_value(token)
        if has_value and not depth and (token.kind == "comma" or token.text in _SEPARATORS):
            return True
    return False


def _is_fragment(tokens: Sequence[Token], start: int, end: int) -> bool:
    """Return True if words make the expression part of a larger one, as in `3 of 4`."""
    last = next((place for place in range(start - 1, -1, -1) if tokens[place].kind != "end"), -1)
    before = [each.text.lower() for each in tokens[last + 1 : start] if each.text not in _MARKUP]
    after = [each.text.lower() for each in tokens[end + 1 : end + 4] if each.text not in _MARKUP]
    words = " ".join(before)
    if _BEFORE.fullmatch(words) or _AFTER.match(" ".join(after)):
        return True
    if last < 0:
        return False
    units = [each for each in before if each not in (".", ",", "and")]
    is_compound = len(units) == 1 and any({units[0], *after[:1]} <= each for each in _MEASURES)
    is_tight = "'" not in before or not tokens[start].spaced
    return is_compound or (is_tight and bool(_JOINS.fullmatch(words)))


def _trimmed(run: Sequence[Token], before: Token) -> Sequence[Token]:
    """Return the expression `run` without dashes at its ends. `before` is the token before it.

    Empty if the expression continues another one.
    """
    first, last = run[0], run[-1]
    if first.kind == "operator":
        after_word = before.text[-1:].isalnum()
        is_sign = not run[1].spaced and (first.spaced or not after_word)
        if first.text not in ("+", "-") or (before.text == "." and not first.spaced):
            return ()
        if not is_sign and before.text not in ("=", "$", "(", "["):
            if first.text == "+" and run[1].spaced and before.text != "\n":
                return ()
            run = run[1:]
    if last.kind == "operator":
        return run[:-1] if last.text == "-" or (last.text == "+" and not last.spaced) else ()
    return run
