"""Runs worth repeating: functions that return a `RunConfig`. Names are what the command line takes."""

from collections.abc import Callable

from afterimage.config import RunConfig
from afterimage.recipes.calculator import calculator
from afterimage.recipes.retail import retail
from afterimage.recipes.routes import ROUTES

RECIPES: dict[str, Callable[[], RunConfig]] = {
    "calculator": calculator,
    "retail": retail,
    **{recipe.__name__: recipe for recipe in ROUTES},
}

__all__ = ["RECIPES", "calculator", "retail"]
