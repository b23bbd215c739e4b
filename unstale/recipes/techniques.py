"""Recipes that combine techniques (docs/techniques.md)."""

from dataclasses import replace
from typing import Any

from unstale.config import ObjectiveConfig, RunConfig, ScheduleConfig
from unstale.recipes.retail import retail


def steady(**changes: Any) -> RunConfig:
    """Tokens up to 6 versions old: smaller steps and ratios of a prefix (ess_lr, minpro).

    The desk and the model are those of `retail`. The techniques have not been measured together, so
    no result is promised: `benchmarks/studies/techniques.toml` compares them with the plain recipe.
    """
    config = retail(
        recipe="steady",
        techniques="ess_lr minpro",
        schedule=ScheduleConfig(max_staleness=6, groups_per_step=16, group_size=8),
        objective=ObjectiveConfig(kind="cispo", clip_low=1.0),
    )
    return replace(config, **changes)


RECIPES = (steady,)
