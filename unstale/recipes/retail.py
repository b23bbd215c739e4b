"""The recipe `retail`, which is the demo: a small model with tools at a customer-service desk.

Every other desk of the package has a recipe with its name.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from unstale.config import (
    AuditConfig,
    EngineConfig,
    RunConfig,
    ScheduleConfig,
    TrainerConfig,
    make_task,
)
from unstale.envs.desk import DeskConfig, desk_names


def retail(**changes: Any) -> RunConfig:
    """A customer-service desk, easiest level: asynchronous, up to 2 versions stale, exact route.

    Expected result: success on held-out tasks rises from 36% to about 88% in 5 to 7 minutes on two
    CPU cores (`make bench-demo`). Tool calls take 0.6 s on average, so episodes last longer than
    the time between two weight updates.
    """
    config = RunConfig(
        recipe="retail",
        steps=115,
        minutes=8.0,
        task=DeskConfig(level="1", latency_s=0.6),
        schedule=ScheduleConfig(max_staleness=2, groups_per_step=16, group_size=8),
        engine=EngineConfig(max_running=400, max_context=512),
        trainer=TrainerConfig(lr=5e-4, lr_schedule="linear", warmup_steps=5),
        audit=AuditConfig(share=0.05),
    )
    return replace(config, **changes)


def desk_recipe(name: str) -> Callable[..., RunConfig]:
    """Return the recipe of another desk than `retail`, or of all desks in turn (`desks`)."""

    def recipe(**changes: Any) -> RunConfig:
        config = replace(
            retail(), recipe=name, task=make_task(name), engine=EngineConfig(max_context=1024)
        )
        return replace(config, **changes)

    recipe.__name__ = name
    recipe.__doc__ = (
        f"The desk `{name}`, easiest level. Give `--policy`: the shipped one knows retail alone."
    )
    return recipe


OTHER_DESKS = (*(name for name in desk_names() if name != "retail"), "desks")
RECIPES = (retail, *map(desk_recipe, OTHER_DESKS))
