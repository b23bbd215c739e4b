"""Recipes that combine techniques (docs/techniques.md)."""

from dataclasses import replace
from typing import Any

from unstale.config import ObjectiveConfig, RunConfig, ScheduleConfig
from unstale.recipes.retail import retail


def steady(**changes: Any) -> RunConfig:
    """Tokens up to 6 versions old: smaller steps, ratios of a prefix, no cut-off episodes.

    The techniques are ess_lr, minpro and truncated. The desk and the model are those of `retail`.
    The techniques have not been measured together, so no result is promised.
    `benchmarks/studies/techniques.toml` compares ess_lr and minpro with the plain recipe.
    """
    config = retail(
        recipe="steady",
        techniques="ess_lr minpro truncated",
        schedule=ScheduleConfig(max_staleness=6, groups_per_step=16, group_size=8),
        objective=ObjectiveConfig(kind="cispo", clip_low=1.0),
    )
    return replace(config, **changes)


RECIPES = (steady,)
