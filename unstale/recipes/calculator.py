"""A second, tiny task: one tool, one number to report."""

from dataclasses import replace
from typing import Any

from unstale.config import AuditConfig, EvalConfig, RunConfig, ScheduleConfig, TaskConfig


def calculator(**changes: Any) -> RunConfig:
    """The calculator environment with the desk's base policy: shows the seam, teaches little."""
    config = RunConfig(
        recipe="calculator",
        steps=5,
        task=TaskConfig(env="calculator"),
        schedule=ScheduleConfig(max_staleness=1, groups_per_step=4, group_size=4),
        audit=AuditConfig(share=0.1),
        eval=EvalConfig(tasks=16),
    )
    return replace(config, **changes)
