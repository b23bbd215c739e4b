"""The command `shout`."""

import argparse
import sys
from typing import Any


def add(verbs: Any) -> None:
    """Add the command and its arguments to the command line."""
    parser = verbs.add_parser("shout", help="print a text in capitals")
    parser.add_argument("text", help="the text")
    parser.set_defaults(act=shout)


def shout(chosen: argparse.Namespace) -> int:
    sys.stdout.write(f"{chosen.text.upper()}!\n")
    return 0
