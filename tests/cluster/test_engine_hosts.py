"""Engine hosts on a cluster of fake nodes: the contract, hosts that join late, and dead hosts."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from tests.cluster.conftest import NODE_MEMORY
from tests.engines.test_processes import configured, said, say
from tests.support.host_engines import EngineWithPid, LoggedEngine, SlowEngine, digits
from tests.support.waits import LIMIT_S, until, wait_until
from unstale.cli import session
from unstale.cluster.engine_host import HostOptions
from unstale.cluster.engine_host_weights import VersionOfWeights, WeightPosts
from unstale.cluster.hosted_engine import RESOURCE, HostedEngine, place
from unstale.config import ClusterConfig
from unstale.durability.journal import Journal
from unstale.durability.run_folder import EVENTS, RunFolder
from unstale.engines import SamplingParams
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.engines.pool import EnginePool, Recovery
from unstale.engines.registry import EngineOptions
from unstale.engines.routing import Phases
from unstale.testing import check_engine, tiny_policy
from unstale.weights.bits import checksum
from unstale.weights.store import VersionStore


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_policy().save(path)
    return path


@pytest.fixture(scope="module")
def first_node(cluster: Any) -> Any:
    return add_node(cluster)


def add_node(cluster: Any) -> Any:
    """Add a machine that may run one engine host."""
    return cluster.add_node(num_cpus=1, resources={RESOURCE: 1}, object_store_memory=NODE_MEMORY)


def hosted(folder: Path, number: int = 0, *, restarts: int = 2, **options: Any) -> HostedEngine:
    key = options.get("cache_key", "")
    each = EngineOptions(folder, dtype="float32", max_running=8, max_context=1536, cache_key=key)
    engines = HostOptions(options.get("make", EmbeddedEngine), (each,), restarts=restarts)
    ready = options.get("ready", lambda: None)

    def place_when_ready() -> Any:
        ready()
        return place(engines)

    return HostedEngine(number, engines, place_when_ready)


class Weights:
    """Four versions of a model on disk, and in Ray's store as they are published."""

    def __init__(self) -> None:
        policy = tiny_policy()
        self.full: list[dict[str, Tensor]] = []
        self.store = VersionStore()
        for version in range(4):
            self.full.append({name: tensor.clone() for name, tensor in policy.weights().items()})
            self.full[-1]["model.norm.weight"] += version  # a delta of few words
            self.store.put(version, self.full[-1])
        self.reads: list[int] = []
        self.posts = WeightPosts(self._read, dtype=torch.float32)

    def _read(self, version: int) -> Mapping[str, Tensor]:
        self.reads.append(version)
        return self.full[version]

    async def publish(self, engine: EnginePool, version: int) -> None:
        delta = self.store.delta(version) if version else None
        posted = await asyncio.to_thread(self.posts.post, version, self.full[version], delta)
        await engine.interrupt()
        await engine.load(posted, version)
        await engine.resume()


class Events:
    """The events of a pool. `wait` waits for one of a kind."""

    def __init__(self) -> None:
        self.seen: Counter[tuple[str, int]] = Counter()

    def __call__(self, kind: str, *, engine: int, **_: Any) -> None:
        self.seen[kind, engine] += 1

    async def wait(self, kind: str, engine: int) -> None:
        await until(lambda: self.seen[kind, engine] > 0, f"{kind} of engine {engine}")


@asynccontextmanager
async def running(pool: EnginePool) -> AsyncIterator[EnginePool]:
    """Start a pool. Close it at the end of the context."""
    try:
        async with asyncio.timeout(1.5 * LIMIT_S):  # later than `until`, which says why
            await pool.start()
            yield pool
    finally:
        await pool.close()


def test_a_host_keeps_the_contract_of_engines(first_node: Any, folder: Path) -> None:
    check_engine(lambda: hosted(folder), update=tiny_policy().weights())


def test_a_late_host_gets_full_weights_and_then_the_deltas_it_missed(
    cluster: Any, first_node: Any, folder: Path, tmp_path: Path
) -> None:
    """The second host loads version 1 while versions 2 and 3 are published without it."""
    import ray

    weights = Weights()
    log, never, hold = tmp_path / "first", tmp_path / "never", tmp_path / "hold"
    late_log = tmp_path / "late"
    hold.touch()
    fetched: list[tuple[bool, int]] = []

    def free() -> float:
        return float(ray.available_resources().get(RESOURCE, 0))

    def first_has_place() -> None:
        """Wait until the first host has the only node."""
        wait_until(lambda: free() == 0, "the first host")

    wait_until(lambda: free() == 1, "the host of an earlier test to leave its node")

    def objects(update: VersionOfWeights, held: int) -> Any:
        found = weights.posts.objects(held, update._version)
        fetched.append((found[0] is not None, len(found[1])))
        return found

    async def live() -> None:
        events = Events()
        engines = [
            hosted(folder, 0, make=partial(LoggedEngine, log, never)),
            hosted(folder, 1, make=partial(LoggedEngine, late_log, hold), ready=first_has_place),
        ]
        recovery = Recovery(weights.posts.at, restarts=0, on_event=events)
        async with running(EnginePool(engines, recovery, patience_s=LIMIT_S)) as pool:
            for version in (0, 1):
                await weights.publish(pool, version)
            assert weights.reads == [] and events.seen == {("engine_joined", 0): 1}
            node = add_node(cluster)
            await until(lambda: weights.reads == [1], "the late host to read version 1")
            for version in (2, 3):
                await weights.publish(pool, version)
            reply = await pool.sample([5, 6], SamplingParams(4, ()))
            assert reply.piece.version == 3 and not events.seen["engine_joined", 1]
            hold.unlink()
            await events.wait("engine_joined", 1)
            assert (await engines[1].sample([5, 6], SamplingParams(4, ()))).piece.version == 3
        cluster.remove_node(node)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VersionOfWeights, "objects", objects)
        asyncio.run(live())
    rows = [line.split() for line in late_log.read_text().splitlines()]
    assert [int(version) for version, *_ in rows] == [1, 3]
    assert [total for _, total, _ in rows] == [checksum(weights.full[at]) for at in (1, 3)]
    assert weights.reads == [1], "the full weights were read from disk once"
    # By the first host: all of version 0, then a delta each. By the second: all, then two deltas.
    assert Counter(fetched) == {(True, 0): 2, (False, 1): 3, (False, 2): 1}


def test_a_killed_node_costs_no_token_and_a_new_one_takes_its_place(
    cluster: Any, first_node: Any, folder: Path
) -> None:
    weights = Weights()

    async def live() -> None:
        node = add_node(cluster)
        events = Events()
        engines = [hosted(folder, number, make=SlowEngine) for number in range(2)]
        recovery = Recovery(weights.posts.at, restarts=1, on_event=events)
        async with running(EnginePool(engines, recovery, patience_s=LIMIT_S)) as pool:
            await weights.publish(pool, 0)
            for number in range(2):
                await events.wait("engine_joined", number)
            async with asyncio.TaskGroup() as tasks:
                speaking = [tasks.create_task(say(pool, seed, length=300)) for seed in range(4)]
                await say(pool, 9, length=5)
                await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
            replies = [task.result() for task in speaking]
            expected = digits([5, 6, 0], SamplingParams(300, ()))
            assert [said(each) for each in replies] == [expected] * 4
            assert sorted(len(each) for each in replies) == [1, 1, 2, 2], "two had to continue"
            (lost,) = [engine for kind, engine in events.seen if kind == "engine_lost"]
            await weights.publish(pool, 1)
            replies = await say(pool, 0, length=5)
            assert {reply.piece.version for reply in replies} == {1}
            node = add_node(cluster)
            await events.wait("engine_back", lost)
            replies = await say(engines[lost], 0, length=5)
            assert {reply.piece.version for reply in replies} == {1}
        cluster.remove_node(node)

    asyncio.run(live())


def test_a_prefill_host_sends_its_cache_to_a_decode_host(
    cluster: Any, first_node: Any, folder: Path
) -> None:
    """Then a node is killed, and replies go on. Without Ray, bits are compared in
    `tests/engines/test_sent_caches.py`."""
    weights = Weights()
    context = tuple(range(5, 60)) * 3
    params = SamplingParams(20, (), seed=7)

    async def whole(pool: EnginePool, context: tuple[int, ...]) -> int:
        """Return the number of sampled tokens, over as many replies as it takes."""
        count = 0
        while count < 20:
            rest = replace(params, max_tokens=20 - count, sampled=count)
            count += len((await pool.sample(context, rest)).piece.tokens)
        return count

    async def live() -> None:
        node = add_node(cluster)
        events = Events()
        engines = [hosted(folder, number, cache_key="k" * 64) for number in range(2)]
        recovery = Recovery(weights.posts.at, restarts=1, on_event=events)
        phases = Phases(1, ratio=1.0, sends_cache=True)
        async with running(
            EnginePool(engines, recovery, phases=phases, patience_s=LIMIT_S)
        ) as pool:
            await weights.publish(pool, 0)
            for number in range(2):
                await events.wait("engine_joined", number)
            await weights.publish(pool, 1)
            pool.metrics()
            reply = await pool.sample(context, params)
            alone = await engines[0].sample(context, params)
            assert reply.piece.tokens == alone.piece.tokens and reply.stop == "length"
            assert reply.piece.behavior_logp == pytest.approx(alone.piece.behavior_logp, abs=1e-5)
            await weights.publish(pool, 2)
            assert pool.metrics()["received_tokens"] == len(context)
            replies = [asyncio.ensure_future(whole(pool, (n, *context))) for n in (8, 9)]
            await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
            replies.append(asyncio.ensure_future(whole(pool, (7, *context))))
            assert await asyncio.gather(*replies) == [20] * 3

    asyncio.run(live())


def test_a_host_whose_engines_died_starts_them_again_and_fetches_nothing(
    first_node: Any, folder: Path, tmp_path: Path
) -> None:
    weights = Weights()

    async def live() -> None:
        events = Events()
        pid = tmp_path / "pid"
        engine = hosted(folder, restarts=0, make=partial(EngineWithPid, pid))
        recovery = Recovery(weights.posts.at, restarts=1, on_event=events)
        async with running(EnginePool([engine], recovery, patience_s=LIMIT_S)) as pool:
            for version in (0, 1):
                await weights.publish(pool, version)
            expected = said(await say(pool, 3, length=200))
            speaking = asyncio.ensure_future(say(pool, 3, length=200))
            await say(pool, 9, length=5)
            os.kill(int(pid.read_text()), signal.SIGKILL)
            assert said(await speaking) == expected
            assert events.seen["engine_back", 0] == 1
            assert weights.reads == []

    asyncio.run(live())


def test_a_machine_without_the_model_is_named_at_once(first_node: Any, tmp_path: Path) -> None:
    """The second host has no machine, but the first one's error does not wait for it."""
    engines = [hosted(tmp_path / "absent", number) for number in range(2)]

    async def live() -> None:
        pool = EnginePool(engines, patience_s=LIMIT_S)
        with pytest.raises(ValueError, match=r"has no model folder .*absent: every engine host"):
            async with running(pool):
                pass

    asyncio.run(live())


def test_a_run_goes_on_when_a_node_with_engines_dies(
    cluster: Any, first_node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [add_node(cluster)]
    config = replace(
        configured("base", restarts=4),
        runs=tmp_path,
        max_steps=4,
        cluster=ClusterConfig(engine_hosts=2, address=cluster.address),
    )
    load = HostedEngine.load
    loaded: set[HostedEngine] = set()

    async def kill_at_version_2(engine: HostedEngine, update: Any, version: int) -> None:
        """Kill a node in the middle of an update, once both hosts sample."""
        if version == 2 and nodes:
            node = nodes.pop()
            await until(lambda: len(loaded) == 2, "the second host to join")
            await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
        await load(engine, update, version)
        loaded.add(engine)

    monkeypatch.setattr(HostedEngine, "load", kill_at_version_2)
    run = session.train(config, console=Console(file=StringIO()))
    assert [row["version"] for row in run.metrics] == [0, 1, 2, 3]
    for row in run.metrics:
        assert row["old_logps/exact_share"] == 1 and row["rollout/failed_episodes"] == 0
        assert row["correction/log_d_abs_mean"] < 1e-4
    events = [row["kind"] for row in RunFolder(run.folder).rows(EVENTS)]
    assert "engine_joined" in events and "engine_lost" in events
    with Journal.read(run.folder) as journal:
        assert journal.unsound() == []
