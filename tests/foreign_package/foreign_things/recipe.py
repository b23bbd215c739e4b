"""The recipe `tiny_echo`, with one thing of every kind but an engine."""

from unstale.config import EngineConfig, EvalConfig, RunConfig, ScheduleConfig
from unstale.config.options import override


def tiny_echo() -> RunConfig:
    """Two steps of the echo."""
    config = RunConfig(
        recipe="tiny_echo",
        max_steps=2,
        trackers="lines",
        schedule=ScheduleConfig(max_staleness=1, groups_per_step=2, group_size=2),
        engine=EngineConfig(max_completion_tokens=8, max_context=128, max_running=8),
        eval=EvalConfig(tasks=0),
    )
    values = {
        "task.env": "echo",
        "techniques": "gentle",
        "old_logps.route": "shifted",
        "objective.loss_type": "ceiling",
        "advantage.estimator": "reward_alone",
    }
    return override(config, values)
