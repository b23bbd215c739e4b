"""Test weight transfers to vLLM servers over a group, with gloo in place of NCCL.

The server gets the trainer's bits under the right version. A server that dies or hangs during a
transfer never hangs the run: its pool continues without it, and it comes back in a new group. What
cannot work is refused with one message. `make test-engines` compares the messages with the real
vLLM. Nothing here was verified on a GPU.
"""

import asyncio
import itertools
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.fake_vllm import FakeVllm
from tests.support.gloo_groups import GlooGroup, GlooWorkers
from tests.support.run_engine import run_engine
from tests.support.waits import LIMIT_S
from unstale.builders import build_engine
from unstale.cluster.gpus import GpuShares, run_gpus
from unstale.config import ClusterConfig, ConfigError, EngineConfig, RunConfig
from unstale.engines import Engine, SamplingParams, vllm_transfer
from unstale.engines.pool import EnginePool, Recovery
from unstale.engines.registry import EngineOptions
from unstale.engines.remote import ProbeFailed
from unstale.engines.servers import vllm
from unstale.engines.servers.vllm import NcclVllmEngine
from unstale.engines.vllm_server import VllmServer
from unstale.testing import check_engine, nudge, plain_logps, tiny_policy
from unstale.weights.publish import DirectPublisher

POLICY = tiny_policy(seed=5)
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    POLICY.save(folder)
    return folder


class Groups:
    """Makes the trainer's sides of groups, and keeps them."""

    def __init__(self, folder: Path) -> None:
        self.made: list[GlooGroup] = []
        self._files = (folder / f"group{number}" for number in itertools.count())

    def __call__(self) -> GlooGroup:
        self.made.append(GlooGroup(next(self._files)))
        return self.made[-1]


def fake(folder: Path, workers: int = 1) -> FakeVllm:
    folder.mkdir(exist_ok=True)
    server = FakeVllm(folder)
    server.workers = GlooWorkers(workers)
    return server


def attached(model: Path, server: FakeVllm, groups: Groups) -> NcclVllmEngine:
    options = EngineOptions(model, dtype="float32", url=server.url, transfer="nccl")
    return NcclVllmEngine(options, make_group=groups)


async def hold(engine: Engine, version: int) -> None:
    await engine.interrupt()
    await engine.load(POLICY.weights(), version)
    await engine.resume()


@pytest.mark.costly
def test_it_keeps_the_contract(model: Path, tmp_path: Path) -> None:
    groups = Groups(tmp_path)
    with fake(tmp_path / "a") as server:
        check_engine(lambda: attached(model, server, groups), update=POLICY.model.state_dict())


def test_every_worker_gets_the_bits_of_each_published_version(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in several packets. One group serves all versions, and ends with the engine."""
    monkeypatch.setattr(vllm_transfer, "PACKET_BYTES", 20_000)
    groups, policy = Groups(tmp_path), tiny_policy(seed=5)
    with fake(tmp_path / "a", workers=2) as server:
        engine = attached(model, server, groups)
        publisher = DirectPublisher(engine, dtype=torch.float32, in_place=True)

        async def story() -> None:
            for version in range(3):
                nudge(policy, seed=version, size=0.01)
                policy.version = version
                publisher.prepare(policy)
                await publisher.publish()
                piece = (await engine.sample(PROMPT, SamplingParams(20, ()))).piece
                logps = plain_logps(policy, [*PROMPT, *piece.tokens], temperature=1.0)
                logps = logps[len(PROMPT) :]
                assert piece.version == version
                assert torch.allclose(torch.tensor(piece.behavior_logp).double(), logps, atol=1e-4)
                got = server.policy.weights()
                assert all(torch.equal(got[name], each) for name, each in policy.weights().items())

        run_engine(engine, story)
        (group,) = groups.made
        assert server.workers is not None and server.workers.joined == 1
        num_packets, rest = divmod(len(group.packets), 3)
        assert num_packets > 2 and not rest
        assert sum(group.packets) == 3 * sum(each.nbytes for each in policy.weights().values())
        assert group.closed.wait(LIMIT_S)


class Fault:
    """A fault in the third packet of a transfer to a server: it dies, hangs or refuses."""

    def __init__(self, server: FakeVllm, kind: str) -> None:
        assert server.workers is not None
        self.server, self.kind, self._workers = server, kind, server.workers
        self._struck, self._released = threading.Event(), threading.Event()
        self._packets = itertools.count(1)
        self._workers.refusals = int(kind == "not joined")

    def strike(self) -> None:
        """Begin with the next packet."""
        if self.kind != "not joined":
            self._workers.on_packet = self._on_packet

    def _on_packet(self) -> None:
        if next(self._packets) == 3:
            self._struck.set()
            if self.kind == "refuses":
                raise RuntimeError("out of memory")
            self._released.wait(LIMIT_S)

    def kill(self) -> None:
        """Kill the server when it is in the middle of the transfer."""
        if self.kind == "killed":
            assert self._struck.wait(LIMIT_S)
            self._workers.die()
            self.release()
            self.server.die()

    def release(self) -> None:
        """End the hang, after the time limit."""
        self._released.set()


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["killed", "hangs", "refuses", "not joined"])
def test_a_transfer_that_fails_ends_the_engine_and_not_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The pool continues on the other server. The first comes back in a new group."""
    monkeypatch.setattr(vllm_transfer, "PACKET_BYTES", 20_000)
    groups, events = Groups(tmp_path), list[dict[str, Any]]()

    def on_event(kind: str, **fields: Any) -> None:
        events.append({"kind": kind, **fields})

    async def until_event(kind: str) -> None:
        while not any(each["kind"] == kind for each in events):  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    with ExitStack() as servers:
        first, second = (servers.enter_context(fake(tmp_path / name)) for name in "ab")
        fault = Fault(first, kind)
        servers.callback(fault.release)
        pool = EnginePool(
            [attached(model, one, groups) for one in (first, second)],
            Recovery(lambda version: POLICY.weights(), restarts=100, on_event=on_event),
        )

        async def story() -> None:
            if kind != "not joined":
                await hold(pool, 0)
            fault.strike()
            if kind == "hangs":
                monkeypatch.setattr(vllm, "TRANSFER_S", 5.0)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(hold(pool, 1))
                tasks.create_task(asyncio.to_thread(fault.kill))
            assert (await pool.sample(PROMPT, SamplingParams(2, ()))).piece.version == 1
            await until_event("engine_lost")
            monkeypatch.setattr(vllm, "TRANSFER_S", LIMIT_S)
            fault.release()
            again = servers.enter_context(fake(tmp_path / "a")) if kind == "killed" else first
            await until_event("engine_back")
            await hold(pool, 2)
            replies = await asyncio.gather(
                *(pool.sample([task] * 20, SamplingParams(2, ())) for task in range(1, 5))
            )
            assert {reply.piece.version for reply in replies} == {2}
            assert sum(group.closed.is_set() for group in groups.made) <= 1
            got = again.policy.weights()
            assert all(torch.equal(got[name], each) for name, each in POLICY.weights().items())

        run_engine(pool, story)
    assert len(groups.made) == 3 and all(group.closed.wait(LIMIT_S) for group in groups.made)
    (lost,) = [each for each in events if each["kind"] == "engine_lost"]
    expected = {
        "killed": "",  # the connection or the group ends first
        "hangs": "/update_weights did not end within 5 s",
        "refuses": "out of memory",
        "not joined": "no such group",
    }
    assert lost["engine"] == 0 and expected[kind] in lost["cause"]


def test_a_server_that_an_earlier_run_left_in_a_transfer_is_used_again(
    model: Path, tmp_path: Path
) -> None:
    with fake(tmp_path / "a") as server:
        assert server.workers is not None
        server.workers.start()
        engine = attached(model, server, Groups(tmp_path))

        async def story() -> None:
            await hold(engine, 7)
            assert (await engine.sample(PROMPT, SamplingParams(2, ()))).piece.version == 7

        run_engine(engine, story)


def test_the_probe_finds_a_worker_that_lost_a_tensor(model: Path, tmp_path: Path) -> None:
    with fake(tmp_path / "a") as server:
        server.corrupt = "model.layers.1.mlp.down_proj.weight"
        with pytest.raises(ProbeFailed, match="differ by"):
            run_engine(engine := attached(model, server, Groups(tmp_path)), lambda: hold(engine, 0))


def test_what_cannot_work_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def config(cluster: dict[str, Any], **engine: Any) -> RunConfig:
        options = EngineConfig(backend="vllm", transfer="nccl", **engine)
        return RunConfig(recipe="x", engine=options, cluster=ClusterConfig(**cluster))

    with pytest.raises(ConfigError, match=r"nccl needs engine\.backend = vllm, got embedded"):
        EngineConfig(transfer="nccl")
    with pytest.raises(ConfigError, match=r"no cluster\.address, got 2 and '': the process of"):
        config({"engine_hosts": 2})
    with pytest.raises(ConfigError, match=r"needs cluster\.engine_hosts = 0 .* 0 and 'head:1'"):
        config({"trainers": 2, "address": "head:1"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_gpus(config({})) == GpuShares()
    with pytest.raises(ValueError, match=r"no CUDA GPU here: set engine\.transfer = file"):
        build_engine(config({}), None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(vllm_transfer, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs vLLM in the environment of the trainer, too"):
        vllm.SPEC.make(EngineOptions(model, transfer="nccl"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        ConfigError, match="1 GPU for the trainer and 1 for the server, but this machine has 1"
    ):
        run_gpus(config({}))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert run_gpus(config({})) == GpuShares(("0",), ("1", "2", "3"))
    assert run_gpus(config({"trainers": 2})) == GpuShares(("0", "1"), ("2", "3"))
    assert run_gpus(config({}, urls="http://127.0.0.1:1")) == GpuShares()


def test_a_started_server_takes_part_in_transfers(model: Path) -> None:
    options = EngineOptions(model, args=('--weight-transfer-config={"backend": "ipc"}',))
    VllmServer(options).close()
    with pytest.raises(ValueError, match="cannot set --weight-transfer-config"):
        VllmServer(replace(options, transfer="nccl"))
