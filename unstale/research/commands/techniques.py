"""`unstale techniques`: the techniques of the package, and the table of published ones."""

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from unstale.cli.recipe_options import print_json
from unstale.cli.verbs import JSON, argument, command
from unstale.config import ConfigError
from unstale.config.techniques import chosen as find
from unstale.config.techniques import techniques
from unstale.durability.console import Console
from unstale.research.techniques.catalogue import COMMANDS, ROWS, WISHES, Row

_STYLES = {"works": "bold green", "partly": "green", "diagnostic": "green", "idea only": "dim"}


def _techniques(chosen: argparse.Namespace) -> int:
    if chosen.name:
        return _explain(chosen.name, as_json=chosen.json)
    counts: Counter[str] = Counter(row.state for row in ROWS)
    if chosen.json:
        print_json({"counts": counts, "rows": [_as_json(row) for row in ROWS], "wishes": WISHES})
        return 0
    console = Console()
    if chosen.all:
        console.print(_full_table())
    else:
        for wish, names in _wishes().items():
            console.print(Text(wish, "bold underline"))
            console.print(_short_table(names, console.width))
    console.print(", ".join(f"{counts[state]} {state}" for state in _STYLES), highlight=False)
    if not chosen.all:
        console.print(
            "`unstale techniques NAME` explains one, --all lists the papers and what is missing",
            highlight=False,
        )
    return 0


def _wishes() -> dict[str, Sequence[str]]:
    """Return the names of techniques, grouped by what a user may want from them.

    Techniques of other packages are the last group.
    """
    own = {name for names in WISHES.values() for name in names}
    others = [name for name in techniques() if name not in own]
    return {**WISHES, **({"of other packages": others} if others else {})}


def _short_table(names: Sequence[str], width: int) -> Table:
    """Return a table with a line for each technique or command: its name and what it does."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, width=width)
    table.add_column(no_wrap=True, style="bold", width=max(map(len, techniques())))
    table.add_column(ratio=1)
    for name in names:
        text = COMMANDS[name] if name in COMMANDS else techniques()[name].formula
        table.add_row(name, Text(" ".join(text.split()).partition(". ")[0]))
    return table


def _full_table() -> Table:
    table = Table("", "paper", "what it does", "state", "how", "what is missing")
    for row in ROWS:
        state = Text(row.state, _STYLES[row.state])
        table.add_row(str(row.number), row.paper, row.about, state, row.how, row.missing)
    return table


def _explain(name: str, *, as_json: bool) -> int:
    """Print a technique's description.

    Raises `ConfigError` if there is no technique of this name.
    """
    if not name.isidentifier():
        raise ConfigError(f"expected the name of one technique, got {name!r}")
    (entry,) = find(name)
    papers = [row.paper for row in ROWS if row.number in entry.rows]
    words = {
        "name": entry.name,
        "papers": "; ".join(papers),
        "part of training": entry.slot,
        "changes": ", ".join(sorted(entry.changes)),
        "needs": ", ".join(entry.needs),
        "formula from": entry.evidence,
        "about": entry.formula,
        "use it if": entry.use,
        "exactness": entry.exactness,
        "options": f"unstale train RECIPE --techniques {name} --help",
        "measured": entry.measured.strip(),
    }
    if as_json:
        print_json({**words, "papers": papers})
        return 0
    from rich.markdown import Markdown  # no other command needs its parser

    table = Table(show_header=False, box=None, padding=(0, 2, 1, 0))
    for title, text in words.items():
        table.add_row(Text(title, "bold"), Markdown(text or "nothing"))
    Console().print(table)
    return 0


def _as_json(row: Row) -> dict[str, Any]:
    names = ("paper", "about", "state", "how", "missing")
    fields = {name: getattr(row, name) for name in names}
    return {"row": row.number, "techniques": row.names, **fields}


add = command(
    "techniques",
    "list techniques by what they are for, and the papers that they are from",
    argument("name", nargs="?", help="a technique to explain"),
    argument("--all", action="store_true", help="list all papers, with state and what is missing"),
    JSON,
)(_techniques)
