"""Fill the HTML templates of the reports. Text from a run is escaped."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from unstale.analysis.report.bundle import Code, styles
from unstale.durability.run_folder import show_controls


def printed(value: Any) -> Any:
    r"""Return a value in the form in which templates show it.

    Floats get six digits, None becomes "", and control characters become visible.

    >>> printed(1 / 3), printed(None), printed("a" + chr(7))
    ('0.333333', '', 'a\\x07')
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
    """Return the template of this name in `templates/`, filled with `values`."""
    return Markup(_TEMPLATES.get_template(template).render(values))


def document(title: str, code: Code, **values: Any) -> Markup:
    """Return the HTML page of a run's report: the template `run.html`, filled with `values`.

    The page's content security policy admits only its own styles and the script `code`.
    """
    return render("run.html", title=title, style=_marked(styles()), script=_marked(code), **values)


def _marked(code: Code) -> Code:
    return Code(Markup(code.text), code.digest)
