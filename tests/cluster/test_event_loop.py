"""Long replies of engine hosts do not stall the event loop of a run, nor send it large messages.

The routed experts of a reply, which an MoE policy replays, exceed the largest message.
"""

import asyncio
import json
import shutil
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.cluster.conftest import NODE_MEMORY
from tests.engines.test_processes import configured
from tests.support.host_engines import EXPERTS, ROUTED, LongEngine
from unstale.builders import sampling
from unstale.cli import session
from unstale.cluster.hosted_engine import RESOURCE, HostedEngine
from unstale.config import SHIPPED_POLICY, AuditConfig, ClusterConfig, ScheduleConfig, TrainerConfig
from unstale.engines.registry import EngineSpec

TOKENS = 16_384
"""Tokens of a reply."""
MAX_MESSAGE_BYTES = 1_000_000
MAX_STALL_S = 0.05
"""Processor time of the event loop's thread in one callback."""


@pytest.fixture
def long_policy(tmp_path: Path) -> Path:
    """A tiny MoE model with the base policy's tokenizer and many positions."""
    folder = tmp_path / "policy"
    shutil.copytree(SHIPPED_POLICY, folder)
    written = json.loads((folder / "config.json").read_text())
    sizes = {"hidden_size": 8, "moe_intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    config = Qwen3MoeConfig(
        num_experts=EXPERTS,
        num_experts_per_tok=ROUTED,
        vocab_size=written["vocab_size"],
        max_position_embeddings=2 * TOKENS,
        tie_word_embeddings=True,
        **sizes,
        **heads,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def test_replies_of_16k_tokens_stall_nothing(
    cluster: Any, long_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    cluster.add_node(num_cpus=1, resources={RESOURCE: 1}, object_store_memory=NODE_MEMORY)
    stalls: list[float] = []
    sizes: list[int] = []
    run_callback = asyncio.events.Handle._run
    call, get = HostedEngine._call, ray.get

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run_callback(handle)
        stalls.append(time.thread_time() - began)

    async def measured(engine: HostedEngine, method: str, *args: Any) -> Any:
        direct = [arg for arg in args if not isinstance(arg, ray.ObjectRef)]
        result = await call(engine, method, *args)
        sizes.extend(len(ray.cloudpickle.dumps(each)) for each in (direct, result))
        return result

    def get_elsewhere(*args: Any, **kwargs: Any) -> Any:
        assert asyncio._get_running_loop() is None, "ray.get blocks the event loop"
        return get(*args, **kwargs)

    monkeypatch.setattr(asyncio.events.Handle, "_run", timed)
    monkeypatch.setattr(HostedEngine, "_call", measured)
    monkeypatch.setattr(ray, "get", get_elsewhere)
    monkeypatch.setattr(sampling, "engine_spec", lambda backend: EngineSpec(LongEngine))
    limits = {"max_context": 2 * TOKENS - 64, "max_completion_tokens": TOKENS}
    config = configured(long_policy, **limits)
    run = session.train(
        replace(
            config,
            runs=tmp_path,
            max_steps=2,
            audit=AuditConfig(share=0.0),
            rollout=replace(config.rollout, max_turns=1, timeout_s=600.0),
            schedule=ScheduleConfig(max_staleness=1, groups_per_step=1, group_size=2),
            trainer=TrainerConfig(
                max_tokens_per_microbatch=20_000, gradient_checkpointing=True, routing_replay=True
            ),
            cluster=ClusterConfig(engine_hosts=1, address=cluster.address),
        ),
        console=Console(file=StringIO()),
    )
    assert run.metrics[-1]["trainer/action_tokens"] == 2 * TOKENS
    assert {row["routed_experts/missing_share"] for row in run.metrics} == {0.0}
    assert 100_000 < max(sizes) < MAX_MESSAGE_BYTES < TOKENS * ROUTED
    assert max(stalls) < MAX_STALL_S
