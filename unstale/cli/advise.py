"""The command `advise`: compute from a run's figures which old-logit route is worth its cost."""

import argparse
from pathlib import Path
from typing import Any

from unstale.cli.recipe_options import print_json
from unstale.durability.console import Console


def add(verbs: Any) -> None:
    """Add the command and its arguments to the command line."""
    about = "show which old-logit route pays for a run, and which thresholds fit"
    parser = verbs.add_parser("advise", help=about, description=f"{about.capitalize()}.")
    parser.add_argument("run", type=Path, help="a run folder; the run may be in progress")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(act=_advise)


def _advise(chosen: argparse.Namespace) -> int:
    from unstale.observe.advice import ComparisonTable, as_json, conclude, gather_evidence, page

    evidence = gather_evidence(chosen.run)
    conclusions, comparisons = conclude(evidence), ComparisonTable.load()
    if chosen.json:
        print_json(as_json(evidence, conclusions, comparisons))
    else:
        Console().print(page(evidence, conclusions, comparisons), highlight=False)
    return 0
