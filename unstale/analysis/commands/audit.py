"""The command `audit`: measure each method to obtain old log-probabilities on a recorded run."""

import argparse
from pathlib import Path

from unstale.cli.preflight import quick_imports
from unstale.cli.recipe_options import print_json
from unstale.cli.verbs import JSON, argument, command, console_of, require_runs
from unstale.config.checks import bounded


def _audit(chosen: argparse.Namespace) -> int:
    require_runs(chosen.run)
    with quick_imports():
        from unstale.analysis.audit import audit

    result = audit(
        chosen.run, routes=chosen.routes, alphas=chosen.alpha, console=console_of(chosen)
    )
    if chosen.json:
        print_json(result)
    return 0


add = command(
    "audit",
    "measure every route on the tokens of a recorded run",
    argument("run", type=Path, help="a run folder, trained with --audit.record true"),
    argument("--routes", nargs="+", default=[], metavar="ROUTE", help="only these (default: all)"),
    argument(
        "--alpha",
        nargs="+",
        type=bounded(float, 0, 1),
        default=[0.5],
        help="constant weights of interp_prox_* (default: 0.5)",
    ),
    JSON,
)(_audit)
