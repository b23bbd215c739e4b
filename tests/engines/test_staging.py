"""Test that servers sample while a version is staged and while their probe is computed.

The servers are fakes. A load after `stage` only makes the server read the file. A server that dies
meanwhile gets whole weights. Replies are held back until the probe of their version has passed.
"""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.fake_server import FakeServer
from tests.support.fake_sglang import FakeSglang
from tests.support.fake_vllm import FakeVllm
from tests.support.run_engine import run_engine
from tests.support.waits import LIMIT_S, until
from unstale.builders import shares_deltas
from unstale.config import ClusterConfig, EngineConfig, RunConfig, TrainerConfig
from unstale.engines import Engine, EngineDied, SamplingParams, remote, shared_weights
from unstale.engines.embedded.reference import ReferenceModel
from unstale.engines.pool import EnginePool, Recovery
from unstale.engines.registry import EngineOptions
from unstale.engines.remote import ProbeFailed, RemoteEngine
from unstale.engines.servers.sglang import SglangEngine
from unstale.engines.servers.vllm import VllmEngine
from unstale.model.policy import Policy
from unstale.testing import nudge, plain_logps, tiny_policy
from unstale.weights.publish import DeltaInParts
from unstale.weights.store import Delta, VersionStore

PROMPT = [3, 1, 4, 1, 5]
FEW = SamplingParams(8, ())
MANY = SamplingParams(1000, ())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_policy(seed=5).save(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(params=[FakeVllm, FakeSglang])
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    with FakeVllm(tmp_path) if request.param is FakeVllm else FakeSglang() as one:
        yield one


def attached(model: Path, at: FakeServer, **options: Any) -> RemoteEngine:
    make = VllmEngine if isinstance(at, FakeVllm) else SglangEngine
    return make(EngineOptions(model, dtype="float32", url=at.url, **options))


class Blocked:
    """A function that waits until it is released, in place of one that runs in a thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.begun, self.released = threading.Event(), threading.Event()
        call = getattr(owner, name)

        def wait(*args: Any, **options: Any) -> Any:
            self.begun.set()
            assert self.released.wait(LIMIT_S)
            return call(*args, **options)

        monkeypatch.setattr(owner, name, wait)


class Versions:
    """Three versions of a policy, and what leads from one to the next."""

    def __init__(self) -> None:
        policy = tiny_policy(seed=5)
        self.store = VersionStore(policy.twin().weights())
        self.policies: list[Policy] = []
        for version in range(3):
            nudge(policy, seed=version, size=0.01)
            self.store.put(version, policy.weights())
            self.policies.append(policy.twin())

    async def switch(self, engine: Engine, version: int) -> None:
        await engine.interrupt()
        full = self.policies[version].weights()
        await engine.load(self.store.delta(version) if version else full, version)
        await engine.resume()

    async def check(self, engine: Engine, version: int) -> None:
        """Sample a reply, and compare its log-probabilities with those of a version."""
        piece = (await engine.sample(PROMPT, FEW)).piece
        policy = self.policies[version]
        expected = plain_logps(policy, [*PROMPT, *piece.tokens], temperature=1.0)[len(PROMPT) :]
        assert piece.version == version
        assert torch.allclose(torch.tensor(piece.behavior_logp).double(), expected, atol=1e-4)


def test_replies_are_sampled_while_a_version_is_staged_and_the_load_only_switches(
    model: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, versions = attached(model, server, deltas=True), Versions()

    async def story() -> None:
        await versions.switch(engine, 0)
        with monkeypatch.context() as patch:
            blocked = Blocked(patch, remote, "advance")
            staging = asyncio.ensure_future(engine.stage(versions.store.delta(1), 1))
            await until(blocked.begun.is_set, "the stage")
            await versions.check(engine, 0)
            assert not staging.done()
            blocked.released.set()
            await staging
        await versions.check(engine, 0)
        with monkeypatch.context() as patch:
            patch.delattr(remote, "advance")  # a load that decodes would fail
            await versions.switch(engine, 1)
        await versions.check(engine, 1)
        await versions.switch(engine, 2)  # without `stage`
        await versions.check(engine, 2)

    run_engine(engine, story)


def test_a_server_that_dies_while_a_version_is_staged_comes_back_with_whole_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions, events = Versions(), list[str]()
    recovery = Recovery(
        lambda version: versions.policies[version].weights(),
        restarts=1000,
        on_event=lambda kind, **_: events.append(kind),
    )
    with FakeVllm(tmp_path) as server:
        engine = EnginePool([attached(model, server, deltas=True)], recovery)

        async def story() -> None:
            await versions.switch(engine, 0)
            await versions.check(engine, 0)
            blocked = Blocked(monkeypatch, remote, "advance")
            staging = asyncio.ensure_future(engine.stage(versions.store.delta(1), 1))
            await until(blocked.begun.is_set, "the stage")
            server.frozen = True
            speaking = asyncio.ensure_future(engine.sample(PROMPT, MANY))
            await until(lambda: bool(server.running), "a reply")
            await asyncio.to_thread(server.die)
            with FakeVllm(tmp_path):
                await staging
                blocked.released.set()  # it changes the file before the restart writes it
                assert (await speaking).stop == "interrupted" and "engine_lost" in events
                await versions.check(engine, 0)
                await versions.switch(engine, 1)
                await versions.check(engine, 1)

        run_engine(engine, story)


def test_wrong_weights_are_refused_before_anything_is_interrupted(
    model: Path, server: FakeServer
) -> None:
    engine, versions = attached(model, server, deltas=True), Versions()

    async def story() -> None:
        await versions.switch(engine, 0)
        with pytest.raises(ValueError, match="the engine holds 0"):
            await engine.stage(versions.store.delta(2), 2)
        with pytest.raises(ValueError, match="missing"):
            await engine.stage({}, 1)
        await versions.check(engine, 0)
        await versions.switch(engine, 1)
        await versions.check(engine, 1)

    run_engine(engine, story)


def test_no_room_for_the_file_is_an_error_of_the_run_and_not_a_death_of_the_server(
    model: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions, events = Versions(), list[str]()
    recovery = Recovery(restarts=9, on_event=lambda kind, **_: events.append(kind))
    engine = EnginePool([attached(model, server)], recovery)

    async def story() -> None:
        await versions.switch(engine, 0)
        await versions.check(engine, 0)
        with monkeypatch.context() as patch:
            patch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=0))
            with pytest.raises(OSError, match=r"make /dev/shm larger"):
                await engine.stage(versions.policies[1].weights(), 1)
        await versions.check(engine, 0)
        assert not events

    run_engine(engine, story)


def test_replies_are_held_back_until_the_probe_has_passed(
    model: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, versions = attached(model, server), Versions()
    blocked = Blocked(monkeypatch, ReferenceModel, "logps")

    async def story() -> None:
        await versions.switch(engine, 0)
        checking = asyncio.ensure_future(versions.check(engine, 0))
        await until(blocked.begun.is_set, "the probe")
        await until(lambda: server.asked == 2 and not server.running, "the reply")
        interrupting = asyncio.ensure_future(engine.interrupt())
        await asyncio.sleep(0.05)
        assert not (checking.done() or interrupting.done())
        blocked.released.set()
        await asyncio.gather(checking, interrupting)

    run_engine(engine, story)


def test_an_engine_that_is_closed_while_a_version_is_staged_leaves_no_file(
    model: Path, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(shared_weights, "MEMORY", memory)
    blocked = Blocked(monkeypatch, ReferenceModel, "cast")
    engine, versions = attached(model, server), Versions()

    async def story() -> None:
        staging = asyncio.ensure_future(engine.stage(versions.policies[0].weights(), 0))
        await until(blocked.begun.is_set, "the stage")
        closing = asyncio.ensure_future(engine.close())
        with pytest.raises(EngineDied, match="the engine is closed"):
            await staging
        blocked.released.set()  # its thread has not written the file yet
        await closing

    run_engine(engine, story)
    assert not [*memory.iterdir()]


def test_an_engine_that_is_lost_for_good_keeps_no_staged_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in ("memory", "first", "second")]
    for folder in folders:
        folder.mkdir()
    memory = folders[0]
    monkeypatch.setattr(shared_weights, "MEMORY", memory)
    versions = Versions()
    with FakeVllm(folders[1]) as living, FakeVllm(folders[2]) as dying:
        engine = EnginePool([attached(model, each) for each in (living, dying)])

        async def story() -> None:
            await versions.switch(engine, 0)
            await until(lambda: not [*memory.iterdir()], "the probes of both servers")
            update = versions.policies[1].weights()
            await engine.stage(update, 1)
            assert len([*memory.iterdir()]) == 2
            await asyncio.to_thread(dying.die)
            await engine.interrupt()
            await until(lambda: len([*memory.iterdir()]) == 1, "the end of the lost engine")
            await engine.load(update, 1)
            await engine.resume()
            await versions.check(engine, 1)

        run_engine(engine, story)


def halves(versions: Versions, base: int) -> Iterator[Delta]:
    """Return the delta from one version to the next in two parts, as two trainer ranks have it."""
    for half in (0, 1):
        store, starts = VersionStore(), dict[str, int]()
        for version in (base, base + 1):
            parts = {}
            for name, tensor in versions.policies[version].weights().items():
                middle = tensor.numel() // 3
                starts[name] = half * middle
                parts[name] = tensor.flatten()[middle:] if half else tensor.flatten()[:middle]
            store.put(version, parts)
        yield replace(store.delta(base + 1), starts=starts)


def test_the_deltas_of_trainer_ranks_change_the_file_of_a_server(
    model: Path, server: FakeServer
) -> None:
    config = RunConfig(
        recipe="x",
        engine=EngineConfig(backend="vllm", dtype="float32"),
        trainer=TrainerConfig(dtype="float32"),
        cluster=ClusterConfig(trainers=2),
    )
    assert shares_deltas(config)
    assert not shares_deltas(replace(config, engine=EngineConfig(backend="vllm")))
    assert not shares_deltas(replace(config, engine=EngineConfig(dtype="float32")))
    engine, versions = attached(model, server, deltas=True), Versions()

    async def story() -> None:
        await versions.switch(engine, 0)
        for version in (1, 2):
            read = partial(halves, versions, version - 1)
            update = DeltaInParts(version - 1, version, 0, {}, read=read)
            await engine.stage(update, version)
            await versions.check(engine, version - 1)
            await engine.interrupt()
            await engine.load(update, version)
            await engine.resume()
            await versions.check(engine, version)

    run_engine(engine, story)


def test_the_tolerance_of_the_probe_is_an_option(model: Path, server: FakeServer) -> None:
    versions = Versions()
    server.corrupt = "model.layers.1.mlp.down_proj.weight"
    loose, strict = (attached(model, server, probe_tolerance=each) for each in (1e3, 1e-12))

    async def accepted() -> None:
        await versions.switch(loose, 0)
        assert (await loose.sample(PROMPT, FEW)).piece.version == 0
        assert loose.metrics()["probe_logp_error"] > 0.01

    async def refused() -> None:
        server.corrupt = ""
        await versions.switch(strict, 0)
        with pytest.raises(ProbeFailed, match="probe_tolerance allows 1e-12"):
            await strict.sample(PROMPT, FEW)

    run_engine(loose, accepted)
    run_engine(strict, refused)


@pytest.mark.costly(cases=0)
@pytest.mark.parametrize("raw_logprobs", [False, True])
def test_the_probe_of_a_pretrained_model_in_bfloat16(
    raw_logprobs: bool, pretrained: Path, tmp_path: Path
) -> None:
    """A server that rounds nothing passes. One that ignores the temperature does not."""
    float32 = Policy.load(pretrained)
    weights = {name: each.bfloat16() for name, each in float32.weights().items()}
    with FakeVllm(tmp_path, float32, raw_logprobs=raw_logprobs) as server:
        engine = VllmEngine(EngineOptions(pretrained, url=server.url))

        async def story() -> None:
            await engine.load(weights, 0)
            await engine.resume()
            if raw_logprobs:
                with pytest.raises(ProbeFailed, match=r"allows 0\.2"):
                    await engine.sample(PROMPT, FEW)
            else:
                await engine.sample(PROMPT, SamplingParams(1, ()))
                assert 0.01 < engine.metrics()["probe_logp_error"] < 0.1

        run_engine(engine, story)
