"""Test on how many cores the trainer computes.

It leaves a core to every other process. While the engines have no request it has their cores, too.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from unstale.config import ClusterConfig, EngineConfig, OldLogpsConfig, RunConfig, TrainerConfig
from unstale.model.forward import ForwardOptions
from unstale.model.prefix_tree import Packed
from unstale.testing import tiny_policy
from unstale.trainer import threads
from unstale.trainer.threads import LocalThread, SharedCores, trainer_threads

COMPILED = TrainerConfig(compile=True)
EIGHT_CORES: tuple[tuple[dict[str, Any], int, int], ...] = (
    ({}, 7, 8),
    ({"engine": EngineConfig(processes=3, threads=2)}, 2, 8),
    ({"engine": EngineConfig(processes=3, threads=4)}, 1, 8),
    ({"old_logps": OldLogpsConfig(route="old_logit_model")}, 6, 7),
    ({"cluster": ClusterConfig(trainers=2)}, 3, 4),
    ({"cluster": ClusterConfig(trainers=2, engine_hosts=4)}, 2, 4),
    ({"deterministic": True}, 1, 1),
    ({"trainer": TrainerConfig(threads=5)}, 5, 5),
)


@pytest.mark.parametrize("changes, without, with_engines", EIGHT_CORES)
def test_the_trainer_leaves_a_core_to_every_other_process(
    changes: dict[str, Any], without: int, with_engines: int
) -> None:
    config = RunConfig(recipe="", **changes)
    assert trainer_threads(config, num_cores=8) == without
    assert trainer_threads(config, with_engine_cores=True, num_cores=8) == with_engines


@pytest.mark.parametrize("trainer, while_idle", [(TrainerConfig(), 3), (COMPILED, 2)])
def test_the_trainer_takes_the_engines_cores_while_they_are_idle(
    monkeypatch: pytest.MonkeyPatch, trainer: TrainerConfig, while_idle: int
) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 3)
    idle = False
    shared = SharedCores(RunConfig(recipe="", trainer=trainer), are_engines_idle=lambda: idle)
    thread = LocalThread("trainer", shared.take)

    async def count() -> int:
        return await thread.run(torch.get_num_threads)

    try:
        for idle, expected in (  # noqa: B007 - read by `are_engines_idle`
            (False, 2),
            (True, while_idle),
            (True, while_idle),
            (False, 2),
        ):
            assert asyncio.run(count()) == expected
            with ThreadPoolExecutor(1) as later:
                assert later.submit(torch.get_num_threads).result() == 1
    finally:
        thread.close()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_cores_are_taken_before_each_layer_forward_and_backward(checkpointing: bool) -> None:
    policy = tiny_policy()
    policy.set_forward_options(ForwardOptions(gradient_checkpointing=checkpointing))
    calls: list[str] = []
    thread = LocalThread("trainer", lambda: calls.append(where))
    text = Packed(torch.arange(9), (0, 4, 9))

    def learn() -> None:
        nonlocal where
        where = "forward"
        loss = policy.logps(text, temperature=1.0).sum()
        where = "backward"
        loss.backward()

    where = "start"
    try:
        asyncio.run(thread.run(learn))
    finally:
        thread.close()
    layers = policy.model.config.num_hidden_layers
    assert calls == ["start"] + layers * ["forward"] + layers * ["backward"]


def test_a_twin_takes_cores_too_and_other_threads_do_not() -> None:
    twin, calls = tiny_policy().twin(), 0

    def count() -> None:
        nonlocal calls
        calls += 1

    thread = LocalThread("trainer", count)
    text, everything = Packed(torch.arange(9), (0, 4, 9)), torch.ones(9, dtype=torch.bool)
    score = partial(twin.score, text, everything, temperature=1.0, max_tokens_per_microbatch=99)
    try:
        score()
        assert calls == 0
        asyncio.run(thread.run(score))
        assert calls == 1 + twin.model.config.num_hidden_layers
    finally:
        thread.close()
