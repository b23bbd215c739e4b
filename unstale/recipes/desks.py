"""A recipe for each customer-service desk except `retail`, and one for all desks in turn."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from unstale.config import RunConfig, make_task
from unstale.envs.desk import desk_names
from unstale.recipes.llm import llm


def desk_recipe(name: str) -> Callable[..., RunConfig]:
    """Return the recipe of a desk, or of all desks in turn (`desks`)."""

    def recipe(**changes: Any) -> RunConfig:
        config = replace(llm(), recipe=name, task=make_task(name, level="2"))
        return replace(config, **changes)

    place = "All desks in turn" if name == "desks" else f"The desk `{name}`"
    recipe.__name__ = name
    recipe.__doc__ = (
        f"{place}, level 2, with the settings of `llm`. Give `--policy`, or it is Qwen3-0.6B."
    )
    return recipe


RECIPES = tuple(desk_recipe(name) for name in (*desk_names(), "desks") if name != "retail")
