"""Recipes: functions that return the configuration of a run (`RunConfig`).

Each module of this package lists its recipes in `RECIPES`. The command line takes a recipe by its
name. `unstale recipes` shows the first line of its docstring. A recipe outside this package has an
entry point, or is given as `module:function`.
"""

from collections.abc import Callable
from pathlib import Path

from unstale.config import ConfigError, RunConfig, nearest
from unstale.config.plugins import Plugins, added_names, declared
from unstale.envs.registry import import_user_code, user_code
from unstale.recipes.calculator import calculator
from unstale.recipes.llm import llm
from unstale.recipes.retail import retail

Recipe = Callable[..., RunConfig]

RECIPES: dict[str, Recipe] = {
    recipe.__name__: recipe for each in declared(__name__, "RECIPES") for recipe in each
}
"""The recipes of this package by name."""
ADDED = Plugins("unstale.recipes", Callable)


def recipe_names() -> list[str]:
    """Return the names of all recipes. Those of other distributions are not imported."""
    return [*RECIPES, *added_names(ADDED.group, RECIPES)]


def find_recipes() -> dict[str, Recipe]:
    """Return all recipes by name."""
    return {**RECIPES, **ADDED.load_all(RECIPES)}


def make_recipe(name: str) -> RunConfig:
    """Return the configuration that a recipe makes.

    `name` is one of `recipe_names`, or `module:function` of any importable module. Raises
    `ConfigError` if there is no such recipe.
    """
    if name in RECIPES:
        return RECIPES[name]()
    problem = f"the recipe {name!r} cannot be used"
    recipe = import_user_code(name, problem) if ":" in name else ADDED.load(name)
    if recipe is None and Path(name).suffix:
        problem = "is no recipe" if Path(name).exists() else "is no recipe, and no such file exists"
        raise ConfigError(f"{name} {problem}: a file of options ends with .toml or .json")
    if recipe is None:
        raise ConfigError(f"unknown recipe {name!r}{nearest(name, recipe_names())}")
    with user_code(problem):
        try:
            config = recipe()
        except ConfigError as error:
            raise ConfigError(f"{problem}: {error}") from error
    if not isinstance(config, RunConfig):
        raise ConfigError(f"the recipe {name!r} returned a {type(config).__name__}, no RunConfig")
    return config


__all__ = ["RECIPES", "calculator", "llm", "make_recipe", "retail"]
