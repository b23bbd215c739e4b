"""`unstale recipes`: list the recipes."""

import argparse
import inspect
from typing import Any

from rich.console import Console
from rich.table import Table

from unstale.recipes import RECIPES


def add(verbs: Any) -> None:
    verbs.add_parser("recipes", help="list the recipes").set_defaults(act=_recipes)


def _recipes(chosen: argparse.Namespace) -> int:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    for name, recipe in RECIPES.items():
        table.add_row(name, (inspect.getdoc(recipe) or "").splitlines()[0])
    Console().print(table)
    return 0
