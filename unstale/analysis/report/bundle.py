"""Join the scripts and styles of the dashboard, for a page that is one file and needs no network.

Scripts are JavaScript modules that import each other. Each becomes a function that returns its
exports.
"""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import NamedTuple

STYLES = ("base.css", "vendor/uPlot.css", "dashboard.css", "factors.css")

_IMPORT = re.compile(r'^import (?:\* as (\w+)|\{(.+)\}) from "\./([\w./]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) (\w+))", re.MULTILINE)
_LEFT = re.compile(r"^(?:import|export)\b.*$", re.MULTILINE)
_SPARE = re.compile(r"^[ \t]+(?://.*)?|^//.*\n|\n(?=\n)", re.MULTILINE)
"""Indents, comment lines and empty lines of a script, which are removed. Scripts must not have
string literals of several lines, because this would change them.
"""


class Code(NamedTuple):
    """The text of a script or style, and its hash for a content security policy."""

    text: str
    digest: str


def read_static(name: str) -> str:
    """Return the text of a file in the folder `static` of the dashboard."""
    static = files("unstale.analysis.dashboard").joinpath("static")
    return static.joinpath(name).read_text(encoding="utf-8")


@cache
def styles() -> Code:
    """Return the CSS that all pages share, joined to one text."""
    return _with_digest("".join(map(read_static, STYLES)))


@cache
def script(entry: str, replaced: tuple[tuple[str, str], ...] = ()) -> Code:
    """Return one script with the library of plots, the module `entry` and all modules it imports.

    `replaced` has pairs (module, module to use in its place). Raises ValueError if a module cannot
    be joined with others.
    """
    modules: dict[str, str] = {}
    _add(entry, dict(replaced), modules)
    licence, library = (read_static(f"vendor/uPlot{end}") for end in ("-LICENSE.txt", ".min.js"))
    joined = "".join(modules.values())
    text = f'/*\n{licence}*/\n{library}\n(() => {{\n"use strict";\n{joined}}})();\n'
    if "</script" in text.lower():
        raise ValueError(f"the modules of {entry} have the text </script, which ends a script")
    return _with_digest(text)


def _add(name: str, replaced: dict[str, str], modules: dict[str, str]) -> str:
    """Add the JavaScript module `name` to `modules`, after the modules that it imports.

    `modules` maps names to joined texts. Return the variable that holds the module's exports.
    Raises ValueError for an import or export that cannot be joined.
    """
    name = replaced.get(name, name)
    variable = "module_" + re.sub(r"\W", "_", name)
    if name in modules:
        return variable
    source = read_static(name)
    for found in _IMPORT.finditer(source):
        _add(found[3], replaced, modules)

    def imported(found: re.Match[str]) -> str:
        whole, names, file = found.groups()
        given = whole or f"{{{names.replace(' as ', ': ')}}}"
        return f"const {given} = {_add(file, replaced, modules)};"

    body = _EXPORT.sub("", _IMPORT.sub(imported, source))
    if left := _LEFT.search(body):
        raise ValueError(f"{name} has a line that cannot be joined with others: {left[0]}")
    body = _SPARE.sub("", body)
    exports = ", ".join(_EXPORT.findall(source))
    modules[name] = f"const {variable} = (() => {{\n{body}\nreturn {{ {exports} }};\n}})();\n"
    return variable


def _with_digest(text: str) -> Code:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return Code(text, f"sha256-{digest}")
