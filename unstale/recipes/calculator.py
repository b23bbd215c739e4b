"""A small second task: one tool, one number to report."""

from dataclasses import replace
from typing import Any

from unstale.config import AuditConfig, EvalConfig, RunConfig, ScheduleConfig, TaskConfig


def calculator(**changes: Any) -> RunConfig:
    """The calculator environment, as a smoke test of a second environment.

    Expected result: a success rate of 0, since the shipped policy was made for the retail desk and
    5 steps teach it nothing. It takes about 15 seconds on two CPU cores. Give `--policy` and more
    `--steps` to train a model.
    """
    config = RunConfig(
        recipe="calculator",
        steps=5,
        task=TaskConfig(env="calculator"),
        schedule=ScheduleConfig(max_staleness=1, groups_per_step=4, group_size=4),
        audit=AuditConfig(share=0.1),
        eval=EvalConfig(tasks=16),
    )
    return replace(config, **changes)


RECIPES = (calculator,)
