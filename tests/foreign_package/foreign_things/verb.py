"""The command `shout`."""

import argparse
import sys

from unstale.cli.verbs import Verb, argument


def shout(chosen: argparse.Namespace) -> int:
    sys.stdout.write(f"{chosen.text.upper()}!\n")
    return 0


VERB = Verb("shout", "print a text in capitals", shout, (argument("text", help="the text"),))
