"""`unstale check-template`: check that a chat template extends conversations exactly."""

import argparse
from pathlib import Path
from typing import Any


def add(verbs: Any) -> None:
    parser = verbs.add_parser(
        "check-template", help="check that a chat template extends conversations exactly"
    )
    parser.add_argument("folder", type=Path, help="a model folder, or the folder of its tokenizer")
    parser.add_argument(
        "--conversations",
        type=int,
        default=1000,
        metavar="N",
        help="conversations to try (default: 1000)",
    )
    parser.set_defaults(act=_check_template)


def _check_template(chosen: argparse.Namespace) -> int:
    from unstale.cli.check_template import check_template

    return 0 if check_template(chosen.folder, conversations=chosen.conversations) else 1
