"""`unstale techniques`: the table of published techniques, and which of them the package has."""

import argparse
from collections import Counter
from typing import Any

from rich.table import Table
from rich.text import Text

from unstale.cli.recipe_options import print_json
from unstale.cli.verbs import JSON, argument, command
from unstale.config import ConfigError
from unstale.config.techniques import chosen as find
from unstale.config.techniques import techniques
from unstale.durability.console import Console
from unstale.research.techniques.catalogue import ROWS

_STYLES = {"works": "bold green", "transfer": "green", "not yet": "dim"}


def _techniques(chosen: argparse.Namespace) -> int:
    if chosen.name:
        return _explain(chosen.name, as_json=chosen.json)
    counts: Counter[str] = Counter(row.state for row in ROWS)
    if chosen.json:
        rows = [{"row": row.number, "techniques": row.names, **_cells(row)} for row in ROWS]
        print_json({"counts": counts, "rows": rows})
        return 0
    console = Console()
    console.print(_full_table() if chosen.all else _short_table(console.width))
    console.print(", ".join(f"{counts[state]} {state}" for state in _STYLES), highlight=False)
    if not chosen.all:
        console.print(
            "`unstale techniques NAME` explains one, --all lists the papers without a name here",
            highlight=False,
        )
    return 0


def _short_table(width: int) -> Table:
    """Return a table, `width` characters wide, of each technique's name and what it does."""
    texts = {name: " ".join(each.formula.split()) for name, each in techniques().items()}
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, width=width)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(ratio=1)
    for name, text in texts.items():
        table.add_row(name, Text(text.partition(". ")[0]))
    return table


def _full_table() -> Table:
    table = Table("", "paper", "what it does", "state", "how, or what is missing", "--techniques")
    for row in ROWS:
        state = Text(row.state, _STYLES[row.state])
        words = (row.reason, " ".join(row.names))
        table.add_row(str(row.number), row.paper, row.about, state, *words)
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
        "needs": ", ".join(sorted(entry.requires)),
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


def _cells(row: Any) -> dict[str, str]:
    return {name: getattr(row, name) for name in ("paper", "about", "state", "reason")}


add = command(
    "techniques",
    "list published techniques, and which of them this package has",
    argument("name", nargs="?", help="a technique to explain"),
    argument("--all", action="store_true", help="list all papers, with what is missing"),
    JSON,
)(_techniques)
