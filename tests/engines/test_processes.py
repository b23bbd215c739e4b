"""Test several embedded engines behind one interface.

The options are checked. Replies do not depend on the engine that serves them. All engines get each
version. A killed engine is replaced without losing tokens.
"""

import asyncio
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import Tensor

from tests.support.waits import LIMIT_S
from unstale.builders import build_engine
from unstale.cli import session
from unstale.config import (
    ClusterConfig,
    ConfigError,
    EngineConfig,
    EvalConfig,
    RunConfig,
    ScheduleConfig,
    TaskConfig,
    TrainerConfig,
)
from unstale.engines import Engine, Reply, SamplingParams
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.engines.pool import Recovery, supervise
from unstale.testing import nudge, tiny_policy
from unstale.trainer import threads

pytestmark = pytest.mark.usefixtures("forked_children")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"processes": 0}, r"engine.processes must be >= 1"),
        ({"processes": 2, "backend": "vllm"}, "give engine.urls"),
        ({"processes": 4, "max_running": 3}, "engine.max_running must be >= 4"),
    ],
)
def test_what_cannot_be_asked_for(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        EngineConfig(**wrong)


def test_several_are_not_deterministic() -> None:
    with pytest.raises(ConfigError, match=r"deterministic needs .* engine.processes = 1"):
        RunConfig(recipe="x", deterministic=True, engine=EngineConfig(processes=2))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"address": "head:6379"}, "cluster.address is used only with cluster.engine_hosts > 0"),
        ({"engine_hosts": 1, "address": "ray://head:1"}, "must be host:port or auto, got 'ray:"),
        ({"engine_hosts": -1}, "cluster.engine_hosts must be >= 0, got -1"),
        ({"context": 2}, r"cluster.context must divide cluster.trainers \(0\), got 2"),
        ({"context": 2, "trainers": 3}, r"must divide cluster.trainers \(3\), got 2"),
        ({"context": 0, "trainers": 2}, "cluster.context must be >= 1, got 0"),
        ({"replicas": 2}, r"replicas must divide cluster.trainers \(0\) into copies of at least 2"),
        ({"replicas": 2, "trainers": 3}, r"must divide cluster.trainers \(3\) into .* got 2"),
        ({"expert_parallel": True}, r"at least 2 trainer ranks for each .* cluster.trainers = 0"),
        ({"expert_parallel": True, "trainers": 1}, r"at least 2 .* got cluster.trainers = 1"),
        ({"replicas": 4, "trainers": 4}, r"into copies of at least 2 ranks, got 4"),
    ],
)
def test_wrong_options_of_a_cluster_are_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        RunConfig(recipe="x", cluster=ClusterConfig(**wrong))


def test_copies_of_the_divided_model_have_no_adapters() -> None:
    cluster = ClusterConfig(trainers=4, replicas=2)
    assert RunConfig(recipe="x", cluster=cluster).cluster.replicas == 2
    with pytest.raises(ConfigError, match=r"replicas must be 1 with trainer.lora_rank > 0, got 2"):
        RunConfig(recipe="x", cluster=cluster, trainer=TrainerConfig(lora_rank=4))


def test_engine_hosts_are_not_deterministic() -> None:
    with pytest.raises(ConfigError, match=r"deterministic needs cluster.engine_hosts = 0"):
        RunConfig(recipe="x", deterministic=True, cluster=ClusterConfig(engine_hosts=1))


def configured(folder: Path | str, **engine: Any) -> RunConfig:
    options = {"dtype": "float32", "max_context": 512, "max_completion_tokens": 8, **engine}
    return RunConfig(
        recipe="toy",
        name="run",
        model=str(folder),
        max_steps=3,
        task=TaskConfig(env="tests.support.toy:ToyTasks"),
        schedule=ScheduleConfig(max_staleness=1, groups_per_step=2, group_size=2),
        engine=EngineConfig(**options),
        eval=EvalConfig(tasks=0),
    )


def test_replies_are_shared_out_among_several_and_one_takes_deltas(folder: Path) -> None:
    pool = build_engine(configured(folder, processes=3, max_running=8), None)
    assert len(pool.engines) == 3 and pool.max_running == 3 and not pool.takes_deltas
    one = build_engine(configured(folder), None)
    assert len(one.engines) == 1
    assert one.takes_deltas, "float32 on both sides: deltas travel"


def test_the_trainer_takes_the_cores_that_all_of_them_leave(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 16)
    for engine, left in (({"processes": 3, "threads": 2}, 10), ({"processes": 8, "threads": 2}, 1)):
        assert threads.trainer_threads(configured(folder, **engine)) == left


def weights_of(version: int) -> Mapping[str, Tensor]:
    policy = tiny_policy()
    nudge(policy, seed=version, size=0.05)
    return policy.weights()


async def publish(engine: Engine, version: int) -> None:
    await engine.interrupt()
    await engine.load(weights_of(version), version)
    await engine.resume()


async def say(engine: Engine, seed: int, *, length: int = 150) -> list[Reply]:
    """Sample one reply, over as many pieces as it takes."""
    context, replies = [5, 6, seed], list[Reply]()
    while not replies or replies[-1].stop == "interrupted":
        left = length + 3 - len(context)
        replies.append(await engine.sample(context, SamplingParams(left, (), seed=seed)))
        context += replies[-1].piece.tokens
    return replies


def said(replies: list[Reply]) -> list[int]:
    return [token for reply in replies for token in reply.piece.tokens]


@pytest.mark.costly
def test_a_killed_one_costs_nobody_a_token_and_comes_back_with_the_version(folder: Path) -> None:
    """Every engine gives the same reply. One engine continues while the killed one restarts."""
    events: list[tuple[str, int]] = []
    back = asyncio.Event()

    def on_event(kind: str, *, engine: int, **_: Any) -> None:
        events.append((kind, engine))
        if kind == "engine_back":
            back.set()

    recovery = Recovery(weights_of, restarts=1, on_event=on_event)
    pool = supervise(build_engine(configured(folder, processes=2), None), recovery)
    first, second = pool.engines
    assert isinstance(first, EmbeddedEngine) and isinstance(second, EmbeddedEngine)

    async def live() -> None:
        await pool.start()
        await publish(pool, 0)
        alone, others = [
            await asyncio.gather(*(say(each, seed) for seed in range(6)))
            for each in (first, second)
        ]
        assert list(map(said, alone)) == list(map(said, others))
        for version in (1, 0):
            await publish(pool, version)
            assert [
                (await say(each, 0, length=2))[0].piece.version for each in (first, second)
            ] == [version] * 2
        killed = first.pid
        async with asyncio.TaskGroup() as tasks:
            speaking = [tasks.create_task(say(pool, seed)) for seed in range(6)]
            await say(pool, 9, length=10)
            os.kill(killed, signal.SIGKILL)
        replies = [task.result() for task in speaking]
        assert list(map(said, replies)) == list(map(said, alone))
        assert sorted(len(each) for each in replies) == [1, 1, 1, 2, 2, 2]
        assert all(not each[0].piece.tokens for each in replies if len(each) == 2)
        await back.wait()
        assert events == [("engine_lost", 0), ("engine_restarted", 0), ("engine_back", 0)]
        assert first.pid != killed
        again = [await say(each, 1, length=40) for each in (first, second)]
        assert said(again[0]) == said(again[1]) and {each[0].piece.version for each in again} == {0}
        counted = pool.metrics()
        assert counted["crashes"] == counted["restarts"] == 1
        await publish(pool, 2)
        again = [await say(each, 1, length=40) for each in (first, second)]
        assert said(again[0]) == said(again[1]) and {each[0].piece.version for each in again} == {2}
        counted = pool.metrics()
        assert counted["restarts"] == counted["crashes"] == 0
        assert counted["batch_size_mean"] == pytest.approx(1, abs=0.05)

    async def living() -> None:
        try:
            async with asyncio.timeout(LIMIT_S):
                await live()
        finally:
            await pool.close()

    asyncio.run(living())


@pytest.mark.costly
def test_a_run_with_two_trains_adapters_too(tmp_path: Path) -> None:
    """Adapters are sent to both engines and merged there. The exact route agrees with their
    samples."""
    config = replace(
        configured("base", processes=2), runs=tmp_path, trainer=TrainerConfig(lora_rank=2, lr=1e-2)
    )
    run = session.train(config, console=Console(file=StringIO()))
    assert [row["version"] for row in run.metrics] == [0, 1, 2]
    for row in run.metrics:
        assert (
            row["old_logps/exact_share"] == 1
            and row["engine/crashes"] == row["engine/restarts"] == 0
        )
        assert row["correction/log_d_abs_mean"] < 1e-4
