"""`unstale report`: write the report of a run."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console


def add(verbs: Any) -> None:
    parser = verbs.add_parser("report", help="write the report of a run")
    parser.add_argument("run", type=Path, help="a run folder")
    parser.set_defaults(act=_report)


def _report(chosen: argparse.Namespace) -> int:
    from unstale.cli.survivors import write_survivors
    from unstale.observe.report.page import write_and_summarize

    write_survivors(chosen.run)
    Console(soft_wrap=True).print(write_and_summarize(chosen.run), highlight=False, markup=False)
    return 0
