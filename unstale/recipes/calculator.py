"""The recipe `calculator`: arithmetic with one tool, as a quick check of a second environment."""

from typing import Any

from unstale.config import AuditConfig, EvalConfig, RunConfig, ScheduleConfig, TaskConfig
from unstale.config.options import with_changes


def calculator(**changes: Any) -> RunConfig:
    """Arithmetic with a calculator tool: a quick check that a second environment runs.

    Expected result: a success rate of 0. The shipped model was made for the retail desk, and 5
    steps do not teach it arithmetic. The run takes about 15 seconds on two CPU cores. Give
    `--model` and more `--max_steps` to train a model.
    """
    config = RunConfig(
        recipe="calculator",
        max_steps=5,
        task=TaskConfig(env="calculator"),
        schedule=ScheduleConfig(max_staleness=1, groups_per_step=4, group_size=4),
        audit=AuditConfig(share=0.1),
        eval=EvalConfig(tasks=16),
    )
    return with_changes(config, changes)


RECIPES = (calculator,)
