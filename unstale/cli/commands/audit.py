"""`unstale audit`: measure every route on the tokens of a recorded run."""

import argparse
from pathlib import Path
from typing import Any

from unstale.cli.running import INTERRUPTED


def add(verbs: Any) -> None:
    parser = verbs.add_parser("audit", help="measure every route on the tokens of a recorded run")
    parser.add_argument("run", type=Path, help="a run folder, trained with --audit.record true")
    parser.add_argument(
        "--routes", nargs="+", default=[], metavar="ROUTE", help="only these (default: all)"
    )
    parser.add_argument(
        "--alpha",
        nargs="+",
        type=float,
        default=[0.5],
        help="constant weights of interp_prox_* (default: 0.5)",
    )
    parser.set_defaults(act=_audit)


def _audit(chosen: argparse.Namespace) -> int:
    from unstale.cli.audit import audit

    try:
        audit(chosen.run, routes=chosen.routes, alphas=chosen.alpha)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0
