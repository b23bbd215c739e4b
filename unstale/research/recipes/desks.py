"""A recipe for each customer-service desk except `retail`, and two for all desks in turn."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from unstale.config import EvalConfig, RunConfig, ScheduleConfig, make_task
from unstale.config.options import with_changes
from unstale.envs.desk import desk_names
from unstale.recipes.llm import llm
from unstale.recipes.retail import retail


def desk_recipe(name: str) -> Callable[..., RunConfig]:
    """Return the recipe for a customer-service desk, or for all desks in turn (`desks`)."""

    def recipe(**changes: Any) -> RunConfig:
        config = replace(llm(), recipe=name, task=make_task(name, level="2"))
        return with_changes(config, changes)

    place = "All desks in turn" if name == "desks" else f"The desk `{name}`"
    recipe.__name__ = name
    recipe.__doc__ = (
        f"{place}, level 2, with the settings of `llm`. Give `--model`, or it is Qwen3-0.6B."
    )
    return recipe


def desks_small(**changes: Any) -> RunConfig:
    """All desks in turn, easiest level, with the small model `base-desks`, as `retail` trains.

    Each step has 4 groups of each desk. Give `--task.desks airline,telecom` to choose desks.
    Expected result: after 69 steps, success on held-out tasks has risen from 32-45% to 84-98% at
    each desk, in 24 minutes on two CPU cores that did other work, too
    (`benchmarks/results/base-desks.md`). All 300 steps were not measured.
    """
    config = replace(
        retail(),
        recipe="desks_small",
        model="base-desks",
        max_steps=300,
        minutes=0.0,
        task=make_task("desks", level="1", latency_s=0.6),
        schedule=ScheduleConfig(max_staleness=2, groups_per_step=20, group_size=8),
        eval=EvalConfig(tasks=320, interval=50),
    )
    return with_changes(config, changes)


RECIPES = tuple(desk_recipe(name) for name in (*desk_names(), "desks") if name != "retail")
RECIPES += (desks_small,)
