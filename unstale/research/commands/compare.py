"""The command `compare`: run variants of a recipe, or a study, and compare them."""

import argparse
import json
import shlex
from pathlib import Path

from unstale.cli.recipe_options import print_json
from unstale.cli.verbs import CONFIG, COUNT, JSON, OPTIONAL_RECIPE, argument, command, console_of


def _compare(chosen: argparse.Namespace) -> int:
    from unstale.analysis.report.study_tables import write_tables
    from unstale.research.launcher import compare
    from unstale.research.study import planned

    console = console_of(chosen)
    if chosen.report:
        tables = write_tables(chosen.report)
        console.print(str(tables), highlight=False)
    else:
        command = shlex.join(["unstale", *chosen.given])
        tables = compare(planned(chosen), jobs=chosen.jobs, command=command, console=console)
    if chosen.json:
        print_json(json.loads(tables.with_suffix(".json").read_text("utf-8")))
    return 0


add = command(
    "compare",
    "run variants of a recipe and compare them",
    OPTIONAL_RECIPE,
    CONFIG,
    argument("--routes", nargs="+", default=[], metavar="ROUTE", help="one variant per route"),
    argument(
        "--arms",
        nargs="+",
        default=[],
        metavar="'NAME: OPTION=VALUE ...'",
        help="one variant for each of these",
    ),
    argument(
        "--seeds",
        type=COUNT,
        metavar="N",
        help="runs per variant (default: 3, or as the study says)",
    ),
    argument(
        "--settings",
        nargs="+",
        default=[],
        metavar="NAME",
        help="only these settings or parts of a study; a name may have a *",
    ),
    argument("--jobs", type=COUNT, default=1, metavar="N", help="runs at a time (default: 1)"),
    argument("--report", type=Path, metavar="FOLDER", help="only write the results again"),
    JSON,
)(_compare)
