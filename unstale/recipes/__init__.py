"""Recipes: functions that return the configuration of a run (`RunConfig`).

Each module of this package lists its recipes in `RECIPES`. The command line takes a recipe by its
name. `unstale recipes` shows the first line of its docstring. A recipe outside this package is
given as `module:function` and needs no entry.
"""

import pkgutil
from collections.abc import Callable
from importlib import import_module

from unstale.config import ConfigError, RunConfig, nearest
from unstale.envs.registry import import_user_code, user_code
from unstale.recipes.calculator import calculator
from unstale.recipes.llm import llm
from unstale.recipes.retail import retail


def find_recipes() -> dict[str, Callable[..., RunConfig]]:
    """Return the recipes of all modules of this package, by name."""
    recipes = {}
    for module in pkgutil.iter_modules(__path__):
        for recipe in import_module(f"{__name__}.{module.name}").RECIPES:
            recipes[recipe.__name__] = recipe
    return recipes


RECIPES = find_recipes()


def make_recipe(name: str) -> RunConfig:
    """Return the configuration that a recipe makes.

    `name` is a key of `RECIPES`, or `module:function` of any importable module. Raises
    `ConfigError` if there is no such recipe.
    """
    colon = ":" in name
    if not colon and name not in RECIPES:
        raise ConfigError(f"unknown recipe {name!r}{nearest(name, list(RECIPES))}")
    if not colon:
        return RECIPES[name]()
    problem = f"the recipe {name!r} cannot be used"
    recipe = import_user_code(name, problem)
    with user_code(problem):
        try:
            config = recipe()
        except ConfigError as error:
            raise ConfigError(f"{problem}: {error}") from error
    if not isinstance(config, RunConfig):
        raise ConfigError(f"the recipe {name!r} returned a {type(config).__name__}, no RunConfig")
    return config


__all__ = ["RECIPES", "calculator", "llm", "make_recipe", "retail"]
