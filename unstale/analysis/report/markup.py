"""Fill the HTML templates of the reports. Text from a run is escaped."""

from collections.abc import Iterable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from unstale.analysis.report.bundle import Code, script, styles
from unstale.durability.run_folder import show_controls


def printed(value: Any) -> Any:
    """Return a value as templates print it.

    Floats are short, None is empty, and control characters are visible.

    >>> printed(1 / 3), printed(None), printed("a" + chr(7))
    ('0.333333', '', 'a\\\\x07')
    """
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str) and not isinstance(value, Markup):
        return show_controls(value)
    return value


_TEMPLATES = Environment(
    loader=PackageLoader("unstale.analysis.report"),
    autoescape=select_autoescape(["html"]),
    finalize=printed,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(template: str, **values: Any) -> Markup:
    """Return a template of `templates/`, filled with these values."""
    return Markup(_TEMPLATES.get_template(template).render(values))


def document(template: str, title: str, code: Code | None = None, **values: Any) -> Markup:
    """Return the page that a template gives with these values. The template extends `base.html`.

    The page's content security policy admits only its styles and its script: `code`, or by default
    that of the plots.
    """
    return render(
        template, title=title, style=_marked(styles()), script=_marked(code or _plots()), **values
    )


def _plots() -> Code:
    return script("plots.js")


def _marked(code: Code) -> Code:
    return Code(Markup(code.text), code.digest)


_PARTS: Any = _TEMPLATES.get_template("parts.html").module


def figure(
    title: str,
    about: str,
    *content: Markup,
    class_: str = "",
) -> Markup:
    """Return a box with a title, an explanation and its content."""
    return _PARTS.figure(title, about, Markup().join(content), class_)


def gap(title: str, missing: str) -> Markup:
    """Return a box that gives the reason why there is no plot."""
    return _PARTS.gap(title, missing)


def table(head: Iterable[str], rows: Iterable[Iterable[Any]], class_: str = "") -> Markup:
    """Return an HTML table, which scrolls sideways if it is too wide."""
    return _PARTS.table(head, rows, class_)
