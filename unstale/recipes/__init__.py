"""Recipes: functions that return the configuration of a run (`RunConfig`), with options as
arguments.

Each module of this package and of `unstale.research.recipes` lists its recipes in `RECIPES`. The
command line takes a recipe by its name. `unstale recipes` shows the first line of its docstring. A
recipe of another package has an entry point, or is given as `module:function`.
"""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from unstale.config import ConfigError, RunConfig, nearest
from unstale.config.plugins import Plugins, added_names, declared, missing_annexes
from unstale.envs.registry import import_user_code, user_code
from unstale.recipes.calculator import calculator
from unstale.recipes.llm import llm
from unstale.recipes.retail import retail

Recipe = Callable[..., RunConfig]

RECIPES: Mapping[str, Recipe]
"""The recipes of this distribution by name, which `shipped_recipes` fills at the first use."""
ADDED = Plugins("unstale.recipes", Callable)


@cache
def shipped_recipes() -> Mapping[str, Recipe]:
    """Return the recipes of this distribution by name."""
    return {recipe.__name__: recipe for each in declared(__name__, "RECIPES") for recipe in each}


def __getattr__(name: str) -> Any:
    if name == "RECIPES":
        return shipped_recipes()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def recipe_names() -> list[str]:
    """Return the names of all recipes. Recipes of other distributions are not imported for this."""
    own = shipped_recipes()
    return [*own, *added_names(ADDED.group, own)]


def find_recipes() -> dict[str, Recipe]:
    """Return all recipes by name. Recipes of other distributions are imported."""
    own = shipped_recipes()
    return {**own, **ADDED.load_all(own)}


def make_recipe(name: str) -> RunConfig:
    """Return the configuration that the recipe `name` makes.

    `name` is one of `recipe_names`, or `module:function` of any module that can be imported. Raises
    `ConfigError` if there is no such recipe.
    """
    if name in shipped_recipes():
        return shipped_recipes()[name]()
    problem = f"the recipe {name!r} cannot be used"
    recipe = import_user_code(name, problem) if ":" in name else ADDED.load(name)
    if recipe is None and Path(name).suffix:
        problem = "is no recipe" if Path(name).exists() else "is no recipe, and no such file exists"
        raise ConfigError(f"{name} {problem}: a file of options ends with .toml or .json")
    if recipe is None:
        hint = nearest(name, recipe_names()) + missing_annexes()
        raise ConfigError(f"unknown recipe {name!r}{hint}")
    with user_code(problem):
        try:
            config = recipe()
        except ConfigError as error:
            raise ConfigError(f"{problem}: {error}") from error
    if not isinstance(config, RunConfig):
        raise ConfigError(f"the recipe {name!r} returned a {type(config).__name__}, no RunConfig")
    return config


__all__ = ["RECIPES", "calculator", "llm", "make_recipe", "retail"]
