"""The recipe `demo`: a pretrained model learns to use a calculator for puzzles of reasoning-gym."""

from typing import Any

from unstale.config import (
    CheckpointConfig,
    EngineConfig,
    EvalConfig,
    RolloutConfig,
    RunConfig,
    ScheduleConfig,
    SftConfig,
    TrainerConfig,
    make_task,
)
from unstale.config.options import with_changes


def demo(**changes: Any) -> RunConfig:
    """SmolLM2-135M-Instruct and a calculator: sums and products of reasoning-gym.

    First, supervised training on 48 of 64 demonstrations, of sums only, teaches the form of a call.
    Then it trains on sums and products, with tokens up to 2 versions old. It needs the extra
    `reasoning-gym`. `make demo` runs it. Its results are in docs/first-run.md.
    """
    config = RunConfig(
        recipe="demo",
        model="smollm2",
        chat_template="python_calls",
        max_steps=24,
        task=make_task("reasoning-gym:chain_sum+products", tool="calculator"),
        sft=SftConfig(
            steps=6,
            env="reasoning-gym:chain_sum",
            demonstrations=64,
            batch=8,
            lr=3e-5,
        ),
        rollout=RolloutConfig(max_turns=4),
        engine=EngineConfig(dtype="bfloat16", max_context=256, max_completion_tokens=64),
        schedule=ScheduleConfig(max_staleness=2, groups_per_step=8, group_size=8),
        trainer=TrainerConfig(
            dtype="bfloat16",
            lr=2e-5,
            warmup_steps=1,
            max_tokens_per_microbatch=512,
        ),
        checkpoint=CheckpointConfig(interval=12),
        eval=EvalConfig(tasks=120, interval=12),
    )
    return with_changes(config, changes)


RECIPES = (demo,)
