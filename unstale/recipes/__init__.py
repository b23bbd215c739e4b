"""Runs worth repeating: functions that return a `RunConfig`. Names are what the command line takes."""

from collections.abc import Callable

from unstale.config import RunConfig
from unstale.recipes.calculator import calculator
from unstale.recipes.retail import retail
from unstale.recipes.routes import ROUTES

RECIPES: dict[str, Callable[[], RunConfig]] = {
    "calculator": calculator,
    "retail": retail,
    **{recipe.__name__: recipe for recipe in ROUTES},
}

__all__ = ["RECIPES", "calculator", "retail"]
