"""Build HTML and SVG from functions. Text that is not `Markup` is escaped."""

import html
import re
from collections.abc import Iterable
from typing import TypeAlias

Child: TypeAlias = "str | int | float | Iterable[Child] | None"

_VOID = frozenset({"meta", "br", "hr", "img", "input", "link"})
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]"
)
"""Control characters, lone surrogates and marks that change the reading direction."""


class Markup(str):
    """Text that is already HTML. Only this package creates it."""

    __slots__ = ()


def escape(text: str) -> Markup:
    """Escape text for HTML and replace unprintable characters.

    >>> escape('<b onclick="x">')
    '&lt;b onclick=&quot;x&quot;&gt;'
    """
    return Markup(html.escape(_UNPRINTABLE.sub("\ufffd", text), quote=True))


def join(*children: Child) -> Markup:
    """Concatenate children. None is left out and strings are escaped."""
    return Markup("".join(_render(child) for child in children))


def el(tag: str, *children: Child, **attributes: str | int | float | bool | None) -> Markup:
    """Return an element. `class_` is `class`, `stroke_width` is `stroke-width`.

    An attribute that is None or False is left out.

    >>> el("p", "1 < 2", el("b", "!"), class_="note", hidden=True, title=None)
    '<p class="note" hidden>1 &lt; 2<b>!</b></p>'
    """
    written = ""
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        name = name.rstrip("_").replace("_", "-")
        written += f" {name}" if value is True else f' {name}="{_value(value)}"'
    if tag in _VOID:
        return Markup(f"<{tag}{written}>")
    return Markup(f"<{tag}{written}>{join(*children)}</{tag}>")


def _value(value: str | int | float) -> str:
    return f"{value:.6g}" if isinstance(value, float) else escape(str(value))


def _render(child: Child) -> str:
    match child:
        case None:
            return ""
        case Markup() | int() | float():
            return str(child)
        case str():
            return escape(child)
    return "".join(_render(item) for item in child)
