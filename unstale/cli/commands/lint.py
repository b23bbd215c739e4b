"""`unstale lint`: explain a recipe's ratios and refuse wrong settings."""

import argparse
from typing import Any

from rich.console import Console

from unstale.cli.recipe_options import add_recipe, configure


def add(verbs: Any) -> None:
    parser = verbs.add_parser("lint", help="explain a recipe's ratios and find wrong settings")
    add_recipe(parser)
    parser.set_defaults(act=_lint)


def _lint(chosen: argparse.Namespace) -> int:
    """Return 2 if the recipe is refused."""
    from unstale.lint import check, page

    verdict = check(configure(chosen))
    Console().print(page(verdict), highlight=False)
    return 2 if verdict.refusals else 0
