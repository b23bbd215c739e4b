"""Whole runs of a tiny policy whose weights change at every step."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.support.toy import ToyEnv, ToyTasks
from unstale.config import (
    AuditConfig,
    EngineConfig,
    EvalConfig,
    OldLogpsConfig,
    RunConfig,
    ScheduleConfig,
    TaskConfig,
    TrainerConfig,
)
from unstale.envs import Message, Turn
from unstale.records import Task
from unstale.testing import tiny_policy


def save_tiny(folder: Path, *, experts: int = 0, bitwise: bool = False) -> None:
    """Save a policy whose chat template marks turns, with `experts` experts in each layer.

    With `bitwise` its heads have the size that the kernels of `engine.bitwise` need.
    """
    policy = tiny_policy(seed=5, experts=experts)
    policy.tokenizer.chat_template = (
        "{% for message in messages %}w2 {{ message['content'] }}w1 {% endfor %}"
        "{% if add_generation_prompt %}w2 {% endif %}"
    )
    policy.save(folder)
    if bitwise:
        config = Qwen3Config.from_pretrained(folder)
        config.head_dim = 16
        torch.manual_seed(7)
        Qwen3ForCausalLM(config).save_pretrained(folder)


def judge_config(*, labels: int, length: int) -> Qwen3Config:
    """Return the shape of a tiny reward model for the tokens of `tiny_policy`.

    It has `labels` labels, and reads at most `length` tokens.
    """
    return Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=length,
        num_labels=labels,
        initializer_range=0.3,
    )


EVEN_WORDS = "w4 w6 w8 w4 w6 w8 w4 w6 w8 w4"
"""A reply of even words."""


class EvenEnv(ToyEnv):
    """An environment whose reward is the share of words with an even number in the last reply."""

    async def step(self, reply: Message) -> Turn:
        turn = await super().step(reply)
        words = [word for word in reply.content.split() if word[1:].isdigit()]
        even = sum(int(word[1:]) % 2 == 0 for word in words) / max(1, len(words))
        rewards = {"even": even} if turn.done else {}
        facts = {"tool_calls": len(words), "flaw": float(len(words) > 1)}
        return Turn(turn.messages, done=turn.done, rewards=rewards, facts=facts)


class EvenTasks(ToyTasks):
    """Tasks whose rewards differ within a group, so that every step changes the weights."""

    def text(self, task: Task) -> str:
        return f"task of kind {task.index % 3}"

    def demonstration(self, task: Task) -> tuple[Message, ...]:
        return (Message("user", "say yes"), Message("assistant", EVEN_WORDS))

    def answer_of(self, task: Task, reply: str) -> str:
        return next((word for word in reply.split() if word.startswith("w")), "")

    def env(self, task: Task, seed: int) -> EvenEnv:
        return EvenEnv(task, self)


def tiny_run(policy: Path, runs: Path, **changes: Any) -> RunConfig:
    """Return a deterministic, asynchronous run of 20 steps that audits every token."""
    config = RunConfig(
        recipe="tiny",
        model=str(policy),
        runs=runs,
        name="run",
        max_steps=20,
        deterministic=True,
        engine=EngineConfig(
            dtype="float32", max_context=256, max_completion_tokens=24, max_running=16
        ),
        task=TaskConfig(env=f"{__name__}:EvenTasks"),
        schedule=ScheduleConfig(max_staleness=2, groups_per_step=2, group_size=2),
        trainer=TrainerConfig(lr=1e-3),
        old_logps=OldLogpsConfig(route="snapshot_old"),
        audit=AuditConfig(share=1.0),
        eval=EvalConfig(tasks=0),
    )
    return replace(config, **changes)
