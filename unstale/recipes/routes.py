"""One recipe for each way to obtain old log-probabilities (a route, option `old_logps.route`).

Their runs compare these ways. They differ only in the route and in the options that it needs, and
train on tokens so stale that an unsuitable route lowers the reward.
"""

from collections.abc import Callable
from typing import Any

from unstale.config import (
    AuditConfig,
    EngineConfig,
    EvalConfig,
    OldLogpsConfig,
    RunConfig,
    ScheduleConfig,
    TrainerConfig,
)
from unstale.config.options import override, with_changes
from unstale.envs.desk import DeskConfig


def route_recipe(name: str) -> Callable[..., RunConfig]:
    """Return a recipe that trains with the route `name`, a way to obtain old log-probabilities.

    The run trains on the customer-service desk, with tokens up to 6 versions old.
    """
    route = OldLogpsConfig.variants_by_name(added=False)[name]

    def recipe(**changes: Any) -> RunConfig:
        config = RunConfig(
            recipe=f"route_{name}",
            max_steps=80,
            task=DeskConfig(level="1", latency_s=0.6),
            schedule=ScheduleConfig(max_staleness=6, groups_per_step=8, group_size=8),
            engine=EngineConfig(max_running=400, max_context=512),
            trainer=TrainerConfig(lr=5e-4, lr_schedule="constant", warmup_steps=5),
            audit=AuditConfig(share=0.05),
            eval=EvalConfig(tasks=256, interval=20),
            old_logps=OldLogpsConfig(route=name, **route.recipe),
        )
        return with_changes(override(config, route.requires), changes)

    recipe.__name__ = f"route_{name}"
    recipe.__doc__ = f"Stale tokens, with the route `{name}`. Old policy: {route.docs.policy}."
    return recipe


RECIPES = tuple(map(route_recipe, OldLogpsConfig.variants_by_name(added=False)))
