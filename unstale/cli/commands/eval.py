"""`unstale eval`: measure the success of a policy on held-out tasks."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from unstale.cli.recipe_options import add_recipe, configure
from unstale.cli.running import exit_code
from unstale.config import ConfigError


def add(verbs: Any) -> None:
    parser = verbs.add_parser("eval", help="measure a policy's success on held-out tasks")
    parser.add_argument("trained", type=Path, metavar="folder", help="a run folder or model folder")
    add_recipe(parser)
    parser.add_argument(
        "--k", nargs="+", type=int, default=[1], metavar="K", help="report pass@k (default: 1)"
    )
    parser.add_argument(
        "--attempts", type=int, metavar="N", help="attempts per task (default: the largest k)"
    )
    parser.set_defaults(act=_eval)


def _eval(chosen: argparse.Namespace) -> int:
    config = configure(chosen)
    attempts = max(chosen.k) if chosen.attempts is None else chosen.attempts
    if min(chosen.k) < 1 or max(chosen.k) > attempts:
        words = " ".join(map(str, chosen.k))
        raise ConfigError(f"--k must be between 1 and --attempts ({attempts}), got {words}")
    from unstale.cli.evaluate import evaluate

    def show() -> None:
        grade = evaluate(chosen.trained, config, attempts=attempts)
        rows = {f"avg@{attempts}": grade.average}
        for k in sorted(set(chosen.k) - {1}):
            rows[f"pass@{k}"] = grade.passed(k)
        table = Table("", "held-out success", "95% interval", "", title=str(grade))
        for name, estimate in rows.items():
            interval = f"{estimate.low:.1%} to {estimate.high:.1%}"
            table.add_row(name, f"{estimate.value:.1%}", interval, estimate.interval)
        Console().print(table)

    return exit_code(show)
