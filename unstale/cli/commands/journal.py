"""`unstale journal`: check and summarize the journal of a run."""

import argparse
from typing import Any

from rich.console import Console

from unstale.cli.open_journal import add_run, open_journal


def add(verbs: Any) -> None:
    parser = verbs.add_parser("journal", help="check and summarize a run's journal")
    add_run(parser)
    parser.set_defaults(act=_journal)


def _journal(chosen: argparse.Namespace) -> int:
    """Return 1 if the journal is damaged."""
    from unstale.durability.journal import check, page, survivors
    from unstale.observe.report.survivors import table

    with open_journal(chosen.run) as journal:
        problems = check(journal)
        Console().print(page(journal, problems), highlight=False)
        Console().print(table(survivors(journal).row()), highlight=False)
    return 1 if problems else 0
