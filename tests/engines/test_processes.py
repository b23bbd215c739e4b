"""Several embedded engines as one: what may be asked for, that it does not matter which of them serves, who has each
version, and what a killed one costs."""

import asyncio
import os
import signal
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from unstale import build
from unstale.build import build_engine
from unstale.cli import session
from unstale.config import (
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
from unstale.testing import nudge, tiny_policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_policy().save(path)
    return path


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"processes": 0}, r"engine.processes must be >= 1"),
        ({"processes": 2, "kind": "vllm"}, "name servers by engine.urls"),
        ({"processes": 4, "max_running": 3}, "engine.max_running must be >= 4"),
    ],
)
def test_what_cannot_be_asked_for(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        EngineConfig(**wrong)


def test_several_are_not_deterministic() -> None:
    with pytest.raises(ConfigError, match=r"deterministic needs .* processes = 1"):
        RunConfig(recipe="x", deterministic=True, engine=EngineConfig(processes=2))


def configured(folder: Path | str, **engine: Any) -> RunConfig:
    options = {"dtype": "float32", "max_context": 512, "max_completion_tokens": 8, **engine}
    return RunConfig(
        recipe="toy",
        name="run",
        policy=str(folder),
        steps=3,
        task=TaskConfig(env="tests.support.toy:ToyTasks"),
        schedule=ScheduleConfig(max_staleness=1, groups_per_step=2, group_size=2),
        engine=EngineConfig(**options),
        eval=EvalConfig(tasks=0),
    )


def test_replies_are_shared_out_and_one_is_no_several(folder: Path) -> None:
    several = build_engine(configured(folder, processes=3, max_running=8), None)
    assert isinstance(several, EnginePool) and not several.takes_deltas
    made = [member.engine for member in several._members]
    assert all(isinstance(engine, EmbeddedEngine) and not engine.takes_deltas for engine in made)
    assert [engine._options["max_slots"] for engine in made] == [3] * 3  # type: ignore[attr-defined]
    one = build_engine(configured(folder), None)
    assert isinstance(one, EmbeddedEngine) and one.takes_deltas, (
        "float32 on both sides: deltas travel"
    )


def test_the_trainer_takes_the_cores_that_all_of_them_leave(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "cores", lambda: 16)
    for engine, left in (({"processes": 3, "threads": 2}, 10), ({"processes": 8, "threads": 2}, 1)):
        assert build.trainer_threads(configured(folder, **engine)) == left


async def publish(engine: Engine, version: int) -> None:
    policy = tiny_policy()
    nudge(policy, seed=version, size=0.05)
    await engine.interrupt()
    await engine.load(policy.weights(), version)
    await engine.resume()


async def say(engine: Engine, seed: int, *, length: int = 150) -> list[Reply]:
    """One reply, over as many pieces as it takes."""
    context, replies = [5, 6, seed], list[Reply]()
    while not replies or replies[-1].stop == "interrupted":
        left = length + 3 - len(context)
        replies.append(await engine.sample(context, SamplingParams(left, (), seed=seed)))
        context += replies[-1].piece.tokens
    return replies


def said(replies: list[Reply]) -> list[int]:
    return [token for reply in replies for token in reply.piece.tokens]


def test_a_killed_one_costs_nobody_a_token_and_comes_back_with_a_version(folder: Path) -> None:
    """Whoever samples a reply, it is the same. No restart is allowed: the death of one of two is none."""
    several = build_engine(configured(folder, processes=2), None)
    assert isinstance(several, EnginePool)
    first, second = (member.engine for member in several._members)
    assert isinstance(first, EmbeddedEngine) and isinstance(second, EmbeddedEngine)
    engine = RestartingEngine(several, lambda version: {}, restarts=0)
    told: list[tuple[str, int]] = []
    several.told = lambda kind, *, engine, cause: told.append((kind, engine))

    async def live() -> None:
        await engine.start()
        await publish(engine, 0)
        alone, others = [
            await asyncio.gather(*(say(each, seed) for seed in range(6)))
            for each in (first, second)
        ]
        assert list(map(said, alone)) == list(map(said, others))
        for version in (1, 0):
            await publish(engine, version)
            assert [
                (await say(each, 0, length=2))[0].piece.version for each in (first, second)
            ] == [version] * 2
        killed = first.pid
        async with asyncio.TaskGroup() as tasks:
            speaking = [tasks.create_task(say(engine, seed)) for seed in range(6)]
            await say(engine, 9, length=10)
            os.kill(killed, signal.SIGKILL)
        replies = [task.result() for task in speaking]
        assert list(map(said, replies)) == list(map(said, alone))
        assert sorted(len(each) for each in replies) == [1, 1, 1, 2, 2, 2]
        assert all(not each[0].piece.tokens for each in replies if len(each) == 2)
        assert told == [("engine_lost", 0)] and engine.metrics()["deaths"] == 1
        rising = several._members[0].rising
        assert rising is not None
        await rising
        await publish(engine, 2)
        assert told[1:] == [("engine_back", 0)] and first.pid != killed
        again = [await say(each, 1, length=40) for each in (first, second)]
        assert said(again[0]) == said(again[1]) and {each[0].piece.version for each in again} == {2}
        counted = engine.metrics()
        assert counted["restarts"] == counted["deaths"] == 0 and counted[
            "batch_size_mean"
        ] == pytest.approx(1, abs=0.05)

    async def living() -> None:
        try:
            async with asyncio.timeout(60):
                await live()
        finally:
            await engine.close()

    asyncio.run(living())


def test_a_run_with_two_trains_adapters_too(tmp_path: Path) -> None:
    """They travel to both and are merged in each: what both sampled is what the exact route finds."""
    config = replace(
        configured("base", processes=2), runs=tmp_path, trainer=TrainerConfig(lora_rank=2, lr=1e-2)
    )
    run = session.train(config, console=Console(file=StringIO()))
    assert [row["version"] for row in run.metrics] == [0, 1, 2]
    for row in run.metrics:
        assert (
            row["old_logps/exact_fraction"] == 1
            and row["engine/deaths"] == row["engine/restarts"] == 0
        )
        assert row["correction/log_d_abs_mean"] < 1e-4
