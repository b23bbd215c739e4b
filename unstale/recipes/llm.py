"""The recipe `llm`: neutral settings for a model and a task of the user."""

from typing import Any

from unstale.config import (
    CheckpointConfig,
    EngineConfig,
    EvalConfig,
    RunConfig,
    ScheduleConfig,
    TrainerConfig,
)
from unstale.config.options import with_changes
from unstale.envs.dataset import DatasetConfig


def llm(**changes: Any) -> RunConfig:
    """A Hugging Face model on your own task: lr 1e-6, bfloat16, long replies, no time limit.

    Weights are rounded stochastically, because rounding to nearest loses most updates of this rate.

    Give `--model` and `--task.env`. Without these options the run trains Qwen3-0.6B on GSM8K. No
    result was measured, because it depends on model, task and hardware. `unstale plan` suggests
    sizes for your hardware.
    """
    config = RunConfig(
        recipe="llm",
        model="Qwen/Qwen3-0.6B",
        max_steps=200,
        task=DatasetConfig(
            env="dataset:openai/gsm8k",
            subset="main",
            prompt_column="question",
            reward="unstale.rewards:numeric_answer",
        ),
        schedule=ScheduleConfig(max_staleness=2, groups_per_step=16, group_size=8),
        engine=EngineConfig(max_completion_tokens=2048, max_context=4096),
        trainer=TrainerConfig(
            dtype="bfloat16",
            lr=1e-6,
            warmup_steps=5,
            gradient_checkpointing=True,
        ),
        checkpoint=CheckpointConfig(interval=20),
        eval=EvalConfig(tasks=128, interval=20),
    )
    return with_changes(config, changes)


RECIPES = (llm,)
