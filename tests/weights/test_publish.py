"""Test the publication of weights.

With the route's store one delta is formed per version. An engine that takes deltas and has the
previous version gets it, and then has the trainer's weights bit for bit. Otherwise full weights are
sent. A delta that gives other weights is refused and changes nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from unstale.builders import loads_in_place, shares_deltas
from unstale.config import ClusterConfig, EngineConfig, OldLogpsConfig, RunConfig, TrainerConfig
from unstale.engines import Engine, Reply, SamplingParams, Update
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.engines.registry import EngineOptions
from unstale.engines.scripted import ScriptedEngine
from unstale.model.policy import Policy
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.old_logps.snapshot_old import SnapshotOld
from unstale.testing import nudge, tiny_policy
from unstale.weights.bits import checksum
from unstale.weights.publish import DirectPublisher
from unstale.weights.store import Delta, VersionStore

pytestmark = pytest.mark.usefixtures("forked_children")


class Remembering(ScriptedEngine):
    """A scripted engine that records every load."""

    takes_deltas = True

    def __init__(self) -> None:
        super().__init__(lambda tokens, params: [1])
        self.loaded: list[Update] = []

    async def load(self, update: Update, version: int) -> None:
        await super().load({}, version)
        self.loaded.append(update)


class Counting(VersionStore):
    """A store that counts the deltas it forms."""

    added = 0

    def _add(self, version: int, given: object) -> None:
        super()._add(version, given)  # type: ignore[arg-type]
        self.added += 1


def fresh(policy: Policy) -> VersionStore:
    return VersionStore(policy.twin().weights())


def size(policy: Policy) -> int:
    return sum(tensor.nbytes for tensor in policy.weights().values())


def step(policy: Policy, seed: int) -> None:
    """Change few of the bfloat16 weights, like an optimizer step at a low learning rate."""
    nudge(policy, seed=seed, size=1e-4)
    policy.version += 1


def any_bits(tensor: torch.Tensor) -> torch.Tensor:
    noise = torch.Generator().manual_seed(tensor.numel())
    return (
        torch.randint(-(2**15), 2**15, tensor.shape, generator=noise).short().view(torch.bfloat16)
    )


async def publish(publisher: DirectPublisher, policy: Policy, live: Collection[int] = ()) -> None:
    publisher.prepare(policy, live)
    await publisher.publish()


def test_the_route_and_the_engine_share_one_delta_per_version() -> None:
    policy, engine = tiny_policy(dtype="bfloat16"), Remembering()
    route = SnapshotOld(LocalScorer(policy, 1.0, 48), make_store=Counting)
    publisher = DirectPublisher(engine, dtype=torch.bfloat16, store=route.scorer.store)
    sizes = []

    async def run() -> None:
        await engine.start()
        for version in range(4):
            if version:
                step(policy, version)
            await publish(publisher, policy, range(version))
            route.on_published(live=range(version))
            sizes.append(publisher.bytes)

    asyncio.run(run())
    assert isinstance(route.scorer.store, Counting) and route.scorer.store.added == 4
    assert [isinstance(update, Delta) for update in engine.loaded] == [False, True, True, True]
    assert engine.loaded[3] is route.scorer.store.delta(3)
    assert sizes == [
        size(policy),
        *(route.scorer.store.delta(version).nbytes for version in (1, 2, 3)),
    ]
    assert max(sizes[1:]) < size(policy) / 8


def test_the_disk_gets_a_delta_also_if_the_engine_takes_none() -> None:
    policy, engine = tiny_policy(dtype="bfloat16"), Remembering()
    engine.takes_deltas = False
    written: list[Delta | None] = []
    publisher = DirectPublisher(
        engine,
        dtype=torch.bfloat16,
        store=fresh(policy),
        put=lambda version, weights, delta: written.append(delta),
    )

    async def run() -> None:
        await engine.start()
        await publish(publisher, policy)
        step(policy, 1)
        await publish(publisher, policy, range(1))

    asyncio.run(run())
    assert written[0] is None and written[1] is not None
    assert (written[1].base, written[1].version) == (0, 1)
    assert not any(isinstance(update, Delta) for update in engine.loaded)


@pytest.mark.parametrize("case", ["takes none", "another version", "no smaller", "no store"])
def test_full_weights_travel_where_a_delta_cannot_or_need_not(case: str) -> None:
    policy, engine = tiny_policy(dtype="bfloat16"), Remembering()
    engine.takes_deltas = case != "takes none"
    store = None if case == "no store" else fresh(policy)
    publisher = DirectPublisher(engine, dtype=torch.bfloat16, store=store)

    async def run() -> None:
        await engine.start()
        await publish(publisher, policy)
        step(policy, 1)
        if case == "another version" and store is not None:
            store.put(1, policy.weights())
            step(policy, 2)
        if case == "no smaller":
            policy.load_weights(
                {name: any_bits(tensor) for name, tensor in policy.weights().items()}
            )
        await publish(publisher, policy)

    asyncio.run(run())
    update = engine.loaded[1]
    assert not isinstance(update, Delta) and publisher.bytes == size(policy)
    assert checksum(update) == checksum(policy.weights())


def test_weights_are_cast_to_the_engines_precision_and_do_not_follow_the_trainer() -> None:
    policy, engine = tiny_policy(), Remembering()
    publisher = DirectPublisher(engine, dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in policy.weights().items()}

    async def run() -> None:
        await engine.start()
        publisher.prepare(policy)
        nudge(policy, seed=1)
        await publisher.publish()

    asyncio.run(run())
    assert all(
        torch.equal(tensor, before[name].bfloat16())
        for name, tensor in dict(engine.loaded[0]).items()
    )  # type: ignore[call-overload]
    with pytest.raises(RuntimeError, match="nothing to publish"):
        asyncio.run(publisher.publish())


def test_an_engine_fed_with_deltas_holds_the_weights_of_one_that_is_loaded_in_full(
    tmp_path: Path,
) -> None:
    policy = tiny_policy(dtype="bfloat16")
    policy.save(tmp_path)
    params = SamplingParams(max_tokens=40, stop_tokens=(), seed=3)

    async def run() -> list[list[Reply]]:
        fed = EmbeddedEngine(
            EngineOptions(tmp_path, dtype="bfloat16", max_running=4, max_context=64, deltas=True)
        )
        full = EmbeddedEngine(
            EngineOptions(tmp_path, dtype="bfloat16", max_running=4, max_context=64)
        )
        publishers = [
            DirectPublisher(fed, dtype=torch.bfloat16, store=fresh(policy)),
            DirectPublisher(full, dtype=torch.bfloat16),
        ]
        said = []
        try:
            for engine in (fed, full):
                await engine.start()
            for version in range(4):
                if version:
                    step(policy, version)
                for publisher in publishers:
                    await publish(publisher, policy)
                assert (publishers[0].bytes < size(policy) / 8) == (version > 0)
                said.append([await engine.sample([5, 6, 7], params) for engine in (fed, full)])
            await check_refusals(fed, policy)
            said.append([await engine.sample([5, 6, 7], params) for engine in (fed, full)])
        finally:
            for engine in (fed, full):
                await engine.close()
        return said

    said = asyncio.run(run())
    for one, other in said:
        assert one == other
    assert len({one.piece.behavior_logp for one, _ in said[:4]}) == 4, (
        "the versions can be told apart"
    )
    assert said[4] == said[3], "a refused delta changes nothing"


async def check_refusals(engine: Engine, policy: Policy) -> None:
    """Send wrong deltas to an engine at version 3 of `policy`. Each must be refused."""
    weights = {name: tensor.clone() for name, tensor in policy.weights().items()}
    other = dict(weights) | {"model.norm.weight": weights["model.norm.weight"] + 1}

    def delta(first: dict[str, torch.Tensor], base: int) -> Delta:
        store = VersionStore()
        store.put(base, first)
        step(policy, 9)
        store.put(policy.version, policy.weights())
        return store.delta(policy.version)

    async def refused(wrong: Delta, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            await engine.load(wrong, wrong.version)

    await engine.interrupt()
    await refused(delta(weights, 2), r"leads from version 2 to \d, but the engine holds 3")
    await refused(delta(other, 3), "does not lead to version .* the checksum differs")
    some = delta(weights, 3)
    few = replace(some, tensors={"model.norm.weight": some.tensors["model.norm.weight"]})
    await refused(few, "the delta is of other weights")
    await engine.resume()


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: EmbeddedEngine(EngineOptions(folder)),
        lambda folder: ScriptedEngine(lambda *_: [1]),
    ],
)
def test_an_engine_that_takes_no_deltas_says_so(
    make: Callable[[Path], Engine], tmp_path: Path
) -> None:
    policy = tiny_policy()
    policy.save(tmp_path)
    engine, delta = make(tmp_path), Delta(0, 1, 0, {})
    assert not engine.takes_deltas

    async def run() -> None:
        loading: Awaitable[None] = engine.load(delta, 1)
        if isinstance(engine, ScriptedEngine):
            await engine.start()
        await loading

    with pytest.raises(ValueError, match="takes full weights"):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("old", "dtypes", "shares"),
    [
        (OldLogpsConfig(), ("bfloat16", "bfloat16"), True),
        (OldLogpsConfig(route="eager"), ("float32", "float32"), True),
        (OldLogpsConfig(), ("bfloat16", "float32"), False),
        (OldLogpsConfig(route="eager", fallback="ewma_prox"), ("bfloat16", "bfloat16"), False),
        (OldLogpsConfig(route="rollout"), ("bfloat16", "bfloat16"), False),
    ],
)
def test_a_run_shares_deltas_where_route_and_engine_have_one_precision(
    old: OldLogpsConfig, dtypes: tuple, shares: bool
) -> None:
    engine, trainer = dtypes
    config = RunConfig(
        recipe="x",
        old_logps=old,
        engine=EngineConfig(dtype=engine),
        trainer=TrainerConfig(dtype=trainer),
    )
    assert shares_deltas(config) == shares
    assert not shares_deltas(replace(config, cluster=ClusterConfig(trainers=2)))


@pytest.mark.parametrize(
    ("changes", "in_place"),
    [
        ({}, True),
        ({"trainer": TrainerConfig(lora_rank=2)}, False),
        ({"engine": EngineConfig(quantise="fp8")}, False),
        ({"engine": EngineConfig(backend="vllm")}, False),
        ({"engine": EngineConfig(transfer="file")}, False),
        ({"cluster": ClusterConfig(trainers=2)}, False),
        ({"cluster": ClusterConfig(engine_hosts=2)}, False),
    ],
)
def test_an_embedded_engine_beside_the_trainer_reads_weights_on_its_gpu(
    changes: dict[str, Any], in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(RunConfig(recipe="retail"), **changes)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not loads_in_place(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert loads_in_place(config) == in_place
