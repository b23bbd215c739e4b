"""Recipes: functions that return a `RunConfig`.

A module of this package lists its recipes in `RECIPES`. A recipe's name is what the command line
takes, and the first line of its docstring is what `unstale recipes` shows.
"""

import pkgutil
from collections.abc import Callable
from importlib import import_module

from unstale.config import RunConfig
from unstale.recipes.calculator import calculator
from unstale.recipes.retail import retail


def find_recipes() -> dict[str, Callable[..., RunConfig]]:
    """Return the recipes of all modules of this package by name."""
    recipes = {}
    for module in pkgutil.iter_modules(__path__):
        for recipe in import_module(f"{__name__}.{module.name}").RECIPES:
            recipes[recipe.__name__] = recipe
    return recipes


RECIPES = find_recipes()

__all__ = ["RECIPES", "calculator", "retail"]
