"""The recipe `retail`, the one-minute example: a small model at a customer-service desk."""

from typing import Any

from unstale.config import (
    AuditConfig,
    EngineConfig,
    RunConfig,
    ScheduleConfig,
    TrainerConfig,
)
from unstale.config.options import with_changes
from unstale.envs.desk import DeskConfig


def retail(**changes: Any) -> RunConfig:
    """A customer-service desk, easiest level: asynchronous, up to 2 versions stale, exact route.

    Expected result: success on held-out tasks rises from 36% to about 88% in 5 to 7 minutes on two
    CPU cores (`python -m benchmarks.demo`). Tool calls take 0.6 s on average, so episodes last
    longer than the time between two weight updates.
    """
    config = RunConfig(
        recipe="retail",
        max_steps=115,
        minutes=8.0,
        task=DeskConfig(level="1", latency_s=0.6),
        schedule=ScheduleConfig(max_staleness=2, groups_per_step=16, group_size=8),
        engine=EngineConfig(max_running=400, max_context=512),
        trainer=TrainerConfig(lr=5e-4, lr_schedule="linear", warmup_steps=5),
        audit=AuditConfig(share=0.05),
    )
    return with_changes(config, changes)


RECIPES = (retail,)
