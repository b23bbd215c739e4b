"""Test `snapshot_old` on the version store.

Values equal those of independent full copies for every storage and position of the movable model.
The model moves as little as the batch allows. A thread reads the weights before they change. The
route restores its state, keeps a memory limit and leaves no file behind.
"""

import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from unstale.builders import build_old_logps
from unstale.config import OldLogpsConfig
from unstale.model.policy import Policy
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.old_logps.snapshot_old import SnapshotOld
from unstale.records import Batch, collate
from unstale.testing import episode, nudge, plain_logps, tiny_policy
from unstale.weights import store as stores
from unstale.weights.store import VersionStore

SCORING = (0.7, 48)
NOTHING = torch.empty(0)
VERSIONS_IN_TURNS = (
    [4, (5, 3)],
    [4, (3, 2), (4, 3), 2],
    [4, (3, 2), 5, (4, 3)],
    [4, (2, 0), (3, 1), (1, 2), (2, 3), (3, 4)],
    [4, (2, 0), 3, (3, 1), (2, 2), 4, (1, 2), (2, 3), 2, (3, 4), 1],
)


class Counting(VersionStore):
    """A store that records each move of the movable copy."""

    def __init__(self, movable: Mapping[str, Tensor]) -> None:
        super().__init__(movable)
        self.visits: list[int] = []

    def move_to(self, version: int) -> None:
        super().move_to(version)
        self.visits.append(version)


def build(config: OldLogpsConfig, policy: Policy) -> SnapshotOld:
    route = build_old_logps(config, LocalScorer(policy, *SCORING))
    assert isinstance(route, SnapshotOld)
    return route


def publish(policy: Policy, *routes: SnapshotOld, versions: int = 5) -> list[Policy]:
    """Publish versions through the routes and return full copies of them."""
    copies = []
    for version in range(versions):
        if version:
            nudge(policy, seed=version)
        policy.version = version
        copies.append(policy.twin())
        for route in routes:
            route.on_published(live=range(version))
    return copies


def check(route: SnapshotOld, batch: Batch, copies: list[Policy], *, tolerance: float) -> None:
    values, exact = route.logps(batch, NOTHING)
    assert torch.equal(exact, batch.sampled)
    for start, end in batch.spans():
        tokens, own = batch.tokens[start:end].tolist(), batch.sampled[start:end]
        for version in batch.version[start:end][own].unique().tolist():
            here = own & (batch.version[start:end] == version)
            truth = plain_logps(copies[version], tokens, temperature=0.7)
            assert (values[start:end][here] - truth[here]).abs().max() < tolerance


@pytest.mark.costly
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-9)])
def test_values_equal_those_of_independent_full_copies(dtype: str, tolerance: float) -> None:
    policy = tiny_policy(dtype=dtype)
    route = build(OldLogpsConfig(), policy)
    copies = publish(policy, route)
    for plan in VERSIONS_IN_TURNS:
        check(
            route,
            collate([episode(0, plan), episode(1, [6, (3, 0), (2, 4)])]),
            copies,
            tolerance=tolerance,
        )
    check(
        route,
        collate([episode(i, plan) for i, plan in enumerate(VERSIONS_IN_TURNS)]),
        copies,
        tolerance=tolerance,
    )
    route.close()


def test_the_model_is_moved_along_the_chain_from_its_nearer_end() -> None:
    policy = tiny_policy()
    route = SnapshotOld(LocalScorer(policy, *SCORING), make_store=Counting)
    publish(policy, route)
    store = route.scorer.store
    assert isinstance(store, Counting) and store.at == 4
    visited = []
    for plan in (
        [4, (2, 0), (3, 2), (1, 3)],
        [4, (2, 1), (3, 2)],
        [4, (2, 0), (3, 4), (3, 3)],
        [5, (2, 4)],
    ):
        store.visits.clear()
        route.logps(collate([episode(0, plan)]), NOTHING)
        visited.append(list(store.visits))
    # version 4 is the policy's own: it scores that one itself, and nothing is moved for it
    assert visited == [[3, 2, 0], [1, 2], [3, 0], []]


def test_costs_are_what_the_store_holds_and_what_the_batch_took() -> None:
    policy = tiny_policy(dtype="bfloat16")
    route = build(OldLogpsConfig(), policy)
    publish(policy, route)
    first = route.costs()
    assert first["encode_s"] > 0 and first["restore_s"] == 0 and first["forward_tokens"] == 0
    route.logps(collate([episode(0, [4, (2, 1), (3, 2), 5])]), NOTHING)
    costs = route.costs()
    assert (
        costs["forward_tokens"] == (4 + 2) + (4 + 2 + 3)
        and costs["restore_s"] > 0
        and costs["encode_s"] == 0
    )
    assert costs["model_bytes"] == sum(tensor.nbytes for tensor in policy.weights().values())
    deltas = [route.scorer.store.delta(version).nbytes for version in range(1, 5)]
    assert (
        costs["versions"] == 5 and costs["memory_bytes"] == sum(deltas) < 4 * costs["model_bytes"]
    )
    assert costs["bytes_per_version"] == sum(deltas) / 4


def test_weights_change_when_the_thread_has_compared_them(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy()
    route = build(OldLogpsConfig(), policy)
    publish(policy, route, versions=1)
    nudge(policy, seed=1)
    policy.version = 1
    expected = {name: tensor.clone() for name, tensor in policy.weights().items()}
    store, begins = route.scorer.store, threading.Event()
    encode_all, wait = stores.encode_all, store.wait

    def late(*arguments: Any) -> Any:
        assert begins.wait(20), "publication waits for the comparison"
        return encode_all(*arguments)

    def told() -> None:
        begins.set()
        wait()

    monkeypatch.setattr(stores, "encode_all", late)
    monkeypatch.setattr(store, "wait", told)
    route.on_published(live={0})
    nudge(policy, seed=2)
    kept = store.tensors(1)
    assert all(torch.equal(kept[name], expected[name]) for name in expected)
    assert not all(torch.equal(expected[name], each) for name, each in policy.weights().items())


def test_it_goes_on_from_its_state_and_the_same_version_may_be_published_again() -> None:
    policy = tiny_policy()
    route, other = build(OldLogpsConfig(), policy), build(OldLogpsConfig(), policy)
    publish(policy, route)
    batch = collate([episode(i, plan) for i, plan in enumerate(VERSIONS_IN_TURNS)])
    other.restore(route.state())
    other.on_published(live=range(5))
    assert torch.equal(other.logps(batch, NOTHING)[0], route.logps(batch, NOTHING)[0])
    nudge(policy, seed=9)
    other.on_published(live=range(5))
    with pytest.raises(ValueError, match="version 4 is stored already, with other weights"):
        other.logps(batch, NOTHING)
    other.close()
