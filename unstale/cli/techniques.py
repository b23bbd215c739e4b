"""`unstale techniques`: the table of published techniques, and which of them the package has."""

import argparse
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unstale.cli.recipe_options import print_json
from unstale.techniques.catalogue import ROWS

_STYLES = {"works": "bold green", "transfer": "green", "not yet": "dim"}


def add(verbs: Any) -> None:
    """Add the command and its arguments to the command line."""
    about = "list published techniques, and which of them this package has"
    parser = verbs.add_parser("techniques", help=about, description=f"{about.capitalize()}.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(act=_techniques)


def _techniques(chosen: argparse.Namespace) -> int:
    counts: Counter[str] = Counter(row.state for row in ROWS)
    if chosen.json:
        rows = [{"row": row.number, "techniques": row.names, **_cells(row)} for row in ROWS]
        print_json({"counts": counts, "rows": rows})
        return 0
    table = Table("", "paper", "what it does", "state", "how, or what is missing", "--techniques")
    for row in ROWS:
        state = Text(row.state, _STYLES[row.state])
        words = (row.reason, " ".join(row.names))
        table.add_row(str(row.number), row.paper, row.about, state, *words)
    console = Console()
    console.print(table)
    console.print(", ".join(f"{counts[state]} {state}" for state in _STYLES), highlight=False)
    return 0


def _cells(row: Any) -> dict[str, str]:
    return {name: getattr(row, name) for name in ("paper", "about", "state", "reason")}
