"""Test the recovery of routes and of the audit when a run resumes from an older checkpoint.

Every route and fallback continues from a saved state. Versions published since are loaded from disk
once each, also after two crashes and without any state. A version without weights is named in the
error. The audit and its recording continue. The contract suite rejects routes that do not recover.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.test_audit import RULES, sampled_batch
from tests.old_logps.test_exact_routes import BATCH, ROUTES, pieces_of, play, truth
from unstale.builders import build_old_logps
from unstale.config import OldLogpsConfig
from unstale.durability.checkpoint import CheckpointError
from unstale.model.policy import Policy
from unstale.old_logps import OldLogps
from unstale.old_logps.interrupt_sync import InterruptSync
from unstale.old_logps.old_logit_model import OldLogitModel
from unstale.old_logps.rollout import RolloutRoute
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.old_logps.scoring.scorer import Scorer, Weights
from unstale.old_logps.snapshot_old import SnapshotOld
from unstale.records import PendingPiece, collate
from unstale.testing import check_old_logps, checkpoint_round_trip, episode, nudge, tiny_policy
from unstale.trainer.auditor import Auditor, Truth
from unstale.weights.recording import Recorded, RecordedBatch, Recording

pytestmark = pytest.mark.usefixtures("forked_children")

SCORING = (0.7, 48)
EXACT = sorted(ROUTES)

MADE = {
    "two averages": OldLogpsConfig(route="ppo_ewma_async", averages=2),
    "an average of steps": OldLogpsConfig(route="ewma_prox", update_every="step"),
    "eager, interrupt_sync": OldLogpsConfig(route="eager", fallback="interrupt_sync"),
    "eager, ewma_prox": OldLogpsConfig(route="eager", fallback="ewma_prox"),
}


@pytest.mark.costly
@pytest.mark.parametrize("name", MADE)
def test_whatever_a_route_is_made_of_it_goes_on(name: str) -> None:
    check_old_logps(lambda scorer: build_old_logps(MADE[name], scorer))


class Tupled(RolloutRoute):
    def state(self) -> Mapping[str, Any]:
        return {"answers": {(3, 1): 0.5}}


class Sets(RolloutRoute):
    def state(self) -> Mapping[str, Any]:
        return {"versions": {3, 1}}


class Unrecovered(SnapshotOld):
    def recover(self, past: Mapping[int, Sequence[PendingPiece]], weights: Weights) -> None:
        """Use the newest weights for every missing version."""
        super().recover(past, lambda version: weights(max(past)))


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (lambda _: Tupled(), "is a dict, which cannot be saved"),
        (lambda _: Sets(), "is a set, which cannot be saved"),
        (
            Unrecovered,
            "called exact at version 3, but off",
        ),
    ],
)
def test_the_suite_finds_a_route_that_does_not_go_on(
    broken: Callable[[Scorer], OldLogps], what: str
) -> None:
    with pytest.raises((AssertionError, CheckpointError), match=what):
        check_old_logps(broken)


class Disk:
    """Full copies of the versions, with a record of those read."""

    def __init__(self, copies: Sequence[Policy]) -> None:
        self.copies = copies
        self.read: list[int] = []

    def __call__(self, version: int) -> Mapping[str, Tensor]:
        self.read.append(version)
        return self.copies[version].weights()


def expect_truth(route: OldLogps, copies: list[Policy]) -> None:
    values, exact = route.logps(BATCH, torch.empty(0))
    assert torch.equal(exact, BATCH.sampled)
    assert (values - truth(BATCH, copies, temperature=0.7)).abs().max() < 1e-5


def resumed(
    name: str, copies: list[Policy], *, state: Any, disk: Disk, published: int
) -> tuple[OldLogps, Policy]:
    """Return a new route for the policy of version 2, with versions up to `published` on disk."""
    policy = copies[2].twin()
    policy.version = 2
    route = build_old_logps(ROUTES[name], LocalScorer(policy, *SCORING))
    if state is not None:
        route.restore(checkpoint_round_trip(state))
    policy.assign_new_version(published + 1)
    route.recover({version: pieces_of(version) for version in range(5)}, disk)
    return route, policy


@pytest.mark.costly
@pytest.mark.parametrize("name", EXACT)
def test_killed_twice_after_the_same_checkpoint_and_resumed_from_no_state_at_all(name: str) -> None:
    policy = tiny_policy()
    with closing(build_old_logps(ROUTES[name], LocalScorer(policy, *SCORING))) as route:
        copies = play(route, policy, versions=2)
        route.before_update(pieces_of(1))
        state = checkpoint_round_trip(route.state())
    for version in (2, 3, 4):
        nudge(policy, seed=version)
        copies.append(policy.twin())
    first, _ = resumed(name, copies, state=state, disk=Disk(copies), published=4)
    with closing(first):
        first.before_publish()
        first.on_published(live=range(5))
        expect_truth(first, copies)
        later = checkpoint_round_trip(first.state())
    for kept in (state, later, None):
        route, _ = resumed(name, copies, state=kept, disk=Disk(copies), published=5)
        with closing(route):
            route.before_publish()
            route.on_published(live=range(5))
            expect_truth(route, copies)


@pytest.mark.parametrize("name", ["interrupt_sync", "old_logit_model", "eager, interrupt_sync"])
def test_only_what_lacks_is_scored(name: str) -> None:
    policy = tiny_policy()
    with closing(build_old_logps(ROUTES[name], LocalScorer(policy, *SCORING))) as route:
        copies = play(route, policy)
        route.before_update(pieces_of(4))
        state = checkpoint_round_trip(route.state())
    route, _ = resumed(name, copies, state=state, disk=(disk := Disk(copies)), published=4)
    with closing(route):
        assert disk.read == [] and route.costs()["forward_tokens"] == 0
        if not isinstance(route, InterruptSync | OldLogitModel):
            return
        route.cache.keep({0, 1, 2})
        route.recover({version: pieces_of(version) for version in (2, 3)}, disk)
        assert disk.read == [3]
        longest = {piece.episode: len(piece.tokens) for piece in pieces_of(3)}
        assert route.costs()["forward_tokens"] == sum(longest.values())


def test_snapshots_read_no_version_twice() -> None:
    policy = tiny_policy()
    config = OldLogpsConfig()
    route = build_old_logps(config, LocalScorer(policy, *SCORING))
    copies = []
    for version in range(3):
        nudge(policy, seed=version)
        policy.version = version
        copies.append(policy.twin())
        route.on_published(live=range(3))
    state = checkpoint_round_trip(route.state())
    route, disk = build_old_logps(config, LocalScorer(policy, *SCORING)), Disk([*copies, *copies])
    assert isinstance(route, SnapshotOld)
    route.restore(state)
    route.recover({1: pieces_of(1), 4: pieces_of(4)}, disk)
    assert disk.read == [4] and route.scorer.store.versions == (
        1,
        2,
        4,
    )  # the newest of its state has no piece


def test_weights_that_were_not_kept_are_named() -> None:
    def weights(version: int) -> Mapping[str, Tensor]:
        raise LookupError(f"version {version} is not in the run folder")

    for name in EXACT:
        route = build_old_logps(ROUTES[name], LocalScorer(tiny_policy(), *SCORING))
        with closing(route), pytest.raises(LookupError, match="version 3 is not in the run folder"):
            route.recover({3: pieces_of(3)}, weights)


def test_the_audit_goes_on_with_the_same_figures() -> None:
    """Killed after its second batch, when versions 2 and 3 were published and sampled from."""
    policy, old = tiny_policy(), RolloutRoute()
    copies: list[Policy] = []
    auditor = Auditor(LocalScorer(policy, 1.0, 64), old, RULES, share=0.5)
    for version in range(4):
        nudge(policy, seed=version, size=0.004)
        policy.version = version
        copies.append(policy.twin())
        if version < 2:
            auditor.on_published(range(2))
            batch = sampled_batch(policy, version, dict(enumerate(copies)), far=0.05)
            auditor.look(batch, batch.behavior_logp)
    state, rows = checkpoint_round_trip(auditor.state()), []
    for jumped in (False, True):
        again = copies[2].twin()
        again.version = 2
        auditor = Auditor(LocalScorer(again, 1.0, 64), old, RULES, share=0.5)
        auditor.restore(checkpoint_round_trip(state) if jumped else state)
        auditor.recover({1: (), 3: ()}, disk := Disk(copies))
        assert disk.read == [3]
        again.assign_new_version(4)
        auditor.on_published({3})
        nudge(again, seed=9, size=0.004)
        again.version = 5
        auditor.on_published({3, 4})
        batch = sampled_batch(again, 7, {3: copies[3], 4: copies[2], 5: again}, far=0.05)
        rows.append({**auditor.look(batch, batch.behavior_logp), "audit/duration_s": 0})
        assert {point["lag"] for point in auditor.scatter_sample()} == {
            0,
            1,
        }  # 4 stands where 2 stood, and 5 where 3 did
    assert rows[0] == rows[1] and rows[0]["audit/logp_error_abs_mean"] > 1e-3
    assert rows[0]["audit/tokens"] == 160
    fresh = Auditor(LocalScorer(tiny_policy(), *SCORING), old, RULES, share=0.0)
    fresh.recover({3: ()}, Disk([]))
    assert fresh.state()["copies"] == {}


def test_a_recording_knows_where_the_numbers_jumped(tmp_path: Path) -> None:
    recording, version_gaps = Recording(tmp_path), ((4, 3),)
    policy = tiny_policy()
    batch = collate([episode(1, [3, (4, 0), (5, 1), (2, 3), (2, 4)])])
    for version in (0, 1, 3, 4):
        recording.version(version, policy.whole_weights())
    recording.batch(RecordedBatch(2, 4, batch, version_gaps))
    trained = Recorded(tmp_path).batch(2)
    assert trained.version_gaps == version_gaps
    truth = Truth(
        trained.batch,
        trained.version,
        batch.behavior_logp,
        batch.behavior_logp,
        trained.version_gaps,
    )
    lag = truth.compare(batch.behavior_logp, RULES).tokens.lag
    assert lag.tolist() == [1] * 4 + [0] * 9  # 4 stands where 1 stood, and 3 is not reached
