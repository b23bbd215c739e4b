"""Compare the exact routes with independent full copies of the versions.

They agree to 1e-5 in float32 and 1e-9 in float64, with one, two and five versions in an episode,
and in asynchronous runs with one and two optimizer steps per batch.

`eager` is exact on the tokens it covers and uses its fallback only for the others. Unreachable
scores are dropped. Pieces of one episode share a forward pass. `interrupt_sync` counts its stall.
The old-logit process delays publication, never a piece. If it dies or freezes, the next call raises
within five seconds. In lockstep its speed changes no bit.
"""

import asyncio
import os
import signal
import tempfile
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.support.forked import run_forked
from tests.support.waits import FROZEN_S, LIMIT_S, wait_until_gone
from tests.test_loop import make, run
from unstale.builders import build_old_logps
from unstale.cluster.ranked_trainer import RankedOldLogps
from unstale.config import CorrectionConfig, OldLogpsConfig, TrainerConfig
from unstale.engines import SamplingParams, Update
from unstale.loop import RunComponents
from unstale.model.lora import Lora
from unstale.model.policy import Policy
from unstale.old_logps import Needs, OldLogps, interrupt_sync
from unstale.old_logps.eager import Eager
from unstale.old_logps.interrupt_sync import InterruptSync
from unstale.old_logps.old_logit_model import OldLogitModel, OldLogitModelDied
from unstale.old_logps.scoring.cache import LogpCache, by_key, score_pieces
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.old_logps.scoring.queue import PieceKey, key_of
from unstale.records import Batch, PendingPiece, Sampled, ScoredTrajectory, collate, walk
from unstale.rewriting import remove_text
from unstale.rollout.episode import Rollout
from unstale.testing import (
    checkpoint_round_trip,
    episode,
    nudge,
    plain_logps,
    tiny_policy,
    with_kept_sets,
)
from unstale.trainer.local import LocalTrainer
from unstale.weights import child_process
from unstale.weights.leftovers import hold_lock

pytestmark = pytest.mark.usefixtures("forked_children")

ROUTES = {
    "snapshot_old": OldLogpsConfig(route="snapshot_old"),
    "old_logit_model": OldLogpsConfig(route="old_logit_model"),
    "interrupt_sync": OldLogpsConfig(route="interrupt_sync"),
    "eager, snapshot_old": OldLogpsConfig(route="eager", fallback="snapshot_old"),
    "eager, interrupt_sync": OldLogpsConfig(route="eager", fallback="interrupt_sync"),
}
PLANS = (
    [4, (5, 3)],
    [4, (3, 2), (4, 3), 2],
    [4, (3, 2), 5, (4, 3)],
    [4, (2, 0), (3, 1), (1, 2), (2, 3), (3, 4)],
    [4, (2, 0), 3, (3, 1), (2, 2), 4, (1, 2), (2, 3), 2, (3, 4), 1],
    [6, (3, 4)],
)
"""One, two and five versions in a turn and across turns."""
TRAJECTORIES = [episode(number, plan) for number, plan in enumerate(PLANS)]
BATCH = collate(TRAJECTORIES)


TRUNCATED = [with_kept_sets(each) for each in TRAJECTORIES]


def pieces_of(
    version: int, trajectories: Sequence[ScoredTrajectory] = TRAJECTORIES
) -> list[PendingPiece]:
    found = []
    for number, credited in enumerate(trajectories):
        tokens = credited.trajectory.tokens
        for start, piece, _ in walk(credited.trajectory.pieces):
            if isinstance(piece, Sampled) and piece.version == version:
                found.append(
                    PendingPiece(number, tokens[: start + len(piece.tokens)], start, piece)
                )
    return found


def play(
    route: OldLogps,
    policy: Policy,
    *,
    versions: int = 5,
    closed: Callable[[int], list[PendingPiece]] = pieces_of,
    arriving: Callable[[int], list[PendingPiece]] = pieces_of,
) -> list[Policy]:
    """Drive a route as the loop does. Half of each version's pieces end early, and are scored in
    idle time. `closed` are the pieces that arrive before the version changes. Return full copies.
    """
    copies = []
    for version in range(versions):
        if version:
            route.before_update(closed(version - 1))
            nudge(policy, seed=version)
        policy.version = version
        copies.append(policy.twin())
        route.before_publish()
        route.on_published(live=range(version))
        early, late = arriving(version)[::2], arriving(version)[1::2]
        for piece in early:
            route.on_piece(piece)
            route.on_end([piece])
        while route.score_while_idle():
            pass
        for piece in late:
            route.on_piece(piece)
    return copies


def truth(batch: Batch, copies: Sequence[Policy], *, temperature: float = 1.0) -> Tensor:
    """Return `[T]` log-probabilities by one plain float64 forward pass per sequence and version."""
    values = torch.zeros(len(batch.tokens), dtype=torch.float64)
    for start, end in batch.spans():
        tokens, versions = batch.tokens[start:end].tolist(), batch.version[start:end]
        for version in versions[batch.sampled[start:end]].unique().tolist():
            kept = batch.kept_sets.at(slice(start, end)) if batch.kept_sets else None
            logp = plain_logps(copies[version], tokens, temperature=temperature, kept_sets=kept)
            values[start:end] = torch.where(versions == version, logp, values[start:end])
    return torch.where(batch.sampled, values, 0.0)


@contextmanager
def built(name: str, policy: Policy, *, max_tokens_per_microbatch: int = 48) -> Iterator[OldLogps]:
    with closing(
        build_old_logps(ROUTES[name], LocalScorer(policy, 0.7, max_tokens_per_microbatch))
    ) as route:
        yield route


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-9)])
@pytest.mark.parametrize("name", ROUTES)
def test_exact_routes_equal_independent_full_copies(
    name: str, dtype: str, tolerance: float
) -> None:
    policy = tiny_policy(dtype=dtype)
    with built(name, policy) as route:
        copies = play(route, policy)
        values, exact = route.logps(BATCH, torch.empty(0))
    assert torch.equal(exact, BATCH.sampled)
    assert (values - truth(BATCH, copies, temperature=0.7)).abs().max() < tolerance


@pytest.mark.costly(cases=3)
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", ROUTES)
def test_exact_routes_take_their_values_over_the_kept_sets(name: str, lora: bool) -> None:
    policy = tiny_policy(dtype="float32" if lora else "float64", lora=Lora(4) if lora else None)
    batch = collate(TRUNCATED)
    pieces = partial(pieces_of, trajectories=TRUNCATED)
    with built(name, policy) as route:
        copies = play(route, policy, closed=pieces, arriving=pieces)
        values, exact = route.logps(batch, torch.empty(0))
    assert torch.equal(exact, batch.sampled)
    assert (values - truth(batch, copies, temperature=0.7)).abs().max() < (1e-5 if lora else 1e-9)
    assert (values - truth(BATCH, copies, temperature=0.7)).abs().max() > 0.1


def test_pieces_of_one_episode_share_one_sequence() -> None:
    policy = tiny_policy()
    pieces = by_key(piece for piece in pieces_of(2) if piece.episode == 4)
    assert sorted(place.start for place in pieces) == [12, 18]
    scorer = LocalScorer(policy, 1.0, 48)
    answers = score_pieces(scorer, pieces)
    assert scorer.take_forward_tokens() == 19  # to the end of the second piece, once
    expected = plain_logps(policy, TRAJECTORIES[4].trajectory.tokens).float()
    for place, values in answers.items():
        truth_of_it = expected[place.start : place.start + len(values)]
        torch.testing.assert_close(values, truth_of_it, atol=1e-5, rtol=0)


class Sevens(OldLogps):
    """A fallback that returns -7 and records the tokens."""

    def __init__(self) -> None:
        self.asked: list[Batch] = []

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        self.asked.append(batch)
        return torch.where(batch.sampled, -7.0, 0.0), torch.zeros_like(batch.sampled)


def test_eager_is_exact_on_what_it_covers_and_asks_for_nothing_else() -> None:
    policy, fallback = tiny_policy(), Sevens()
    route = Eager(LocalScorer(policy, 1.0, 48), fallback=fallback)
    copies = play(route, policy, closed=lambda version: pieces_of(version)[1:2])
    values, exact = route.logps(BATCH, torch.empty(0))
    # in time: every other piece of versions 0 to 3, in order of arrival, and the second one before
    # the update; of version 4 the trainer still is everything
    early = {
        (piece.episode, piece.start)
        for version in range(4)
        for piece in [*pieces_of(version)[::2], *pieces_of(version)[1:2]]
    }
    early |= {(piece.episode, piece.start) for piece in pieces_of(4)}
    covered = torch.zeros_like(BATCH.sampled)
    for version in range(5):
        for piece in pieces_of(version):
            at = BATCH.offsets[piece.episode]
            covered[at + piece.start : at + len(piece.tokens)] = (
                piece.episode,
                piece.start,
            ) in early
    assert torch.equal(exact, covered)
    expected = truth(BATCH, copies).float()
    torch.testing.assert_close(values[covered], expected[covered], atol=1e-5, rtol=0)
    assert (values[BATCH.sampled & ~covered] == -7).all() and not values[~BATCH.sampled].any()
    (asked,) = fallback.asked
    left = [i for i, (a, b) in enumerate(BATCH.spans()) if (BATCH.sampled & ~covered)[a:b].any()]
    part, index = BATCH.select(left)
    assert 0 < len(left) < len(PLANS) and asked.episodes == part.episodes
    assert torch.equal(asked.sampled, (BATCH.sampled & ~covered)[index])
    fraction = route.costs()["scored_in_time_share"]
    assert (
        fraction == pytest.approx(int(covered.sum()) / int(BATCH.sampled.sum()))
        and 0.4 < fraction < 0.95
    )
    assert route.costs()["scored_in_time_share"] == 0


def test_eager_scores_nothing_once_the_trainer_has_left_the_version() -> None:
    policy = tiny_policy()
    route = Eager(LocalScorer(policy, 1.0, 48), fallback=Sevens())
    policy.version = 2
    route.on_published(live=())
    for piece in pieces_of(2):
        route.on_end([piece])
    nudge(policy, seed=1)
    assert not route.score_while_idle()
    policy.version = 3
    route.on_published(live={2})
    for piece in pieces_of(3):
        route.on_end([piece])
    while route.score_while_idle():
        pass
    route.costs()
    _, exact = route.logps(BATCH, torch.empty(0))
    assert exact.any() and torch.equal(exact, BATCH.version == 3)
    assert route.costs()["forward_tokens"] == 0


TURNS = [40, (5, 0), 3, (4, 0), 6, (5, 0), 2, (5, 0)]
"""An episode of four turns of one version."""


@pytest.mark.parametrize("ends", [True, False], ids=["ended", "unfinished"])
def test_eager_computes_the_context_of_an_episode_once_for_all_its_turns(ends: bool) -> None:
    policy = tiny_policy()
    scorer = LocalScorer(policy, 1.0, 48)
    route = Eager(scorer, fallback=Sevens())
    route.on_published(live={0})
    credited = [episode(number, TURNS) for number in range(2)]
    of_episodes = [
        [
            PendingPiece(each.trajectory.episode, each.trajectory.tokens, start, piece)
            for start, piece, _ in walk(each.trajectory.pieces)
            if isinstance(piece, Sampled)
        ]
        for each in credited
    ]
    for pieces in of_episodes:
        for piece in pieces:
            route.on_piece(piece)
            assert not route.score_while_idle(), "an unfinished episode must wait"
        if ends:
            route.on_end(pieces)
            assert route.score_while_idle() and not route.score_while_idle()
    route.before_update([piece for pieces in of_episodes for piece in pieces])
    length = len(credited[0].trajectory.tokens)
    assert route.costs()["forward_tokens"] == 2 * length, "each episode is one sequence, once"
    expected = [scorer.score(collate([each]), collate([each]).sampled).logp for each in credited]
    nudge(policy, seed=1)
    batch = collate(credited)
    values, exact = route.logps(batch, torch.empty(0))
    assert torch.equal(exact, batch.sampled) and torch.equal(values, torch.cat(expected))
    assert route.costs()["scored_in_time_share"] == 1


def pending(credited: ScoredTrajectory, version: int) -> list[PendingPiece]:
    """Return the pieces of an episode that one version sampled."""
    trajectory = credited.trajectory
    return [
        PendingPiece(
            trajectory.episode, trajectory.tokens[: start + len(piece.tokens)], start, piece
        )
        for start, piece, _ in walk(trajectory.pieces)
        if isinstance(piece, Sampled) and piece.version == version
    ]


def test_eager_scores_unfinished_episodes_when_their_version_is_complete() -> None:
    """Each version of an episode is one pass, in idle time. Ended episodes come first."""
    policy = tiny_policy()
    scorer = LocalScorer(policy, 1.0, 8)
    route = build_old_logps(ROUTES["eager, snapshot_old"], scorer)
    credited = [
        episode(0, [4, (5, 0), 3, (4, 0), 2, (3, 1)]),
        episode(1, [6, (2, 0), 1, (5, 1), 2, (4, 1)]),
    ]
    route.on_published(live=())
    copies = [policy.twin()]
    for piece in (piece for each in credited for piece in pending(each, 0)):
        route.on_piece(piece)
        assert not route.score_while_idle(), "an unfinished episode must wait"
    nudge(policy, seed=1)
    policy.version = 1
    route.on_published(live={0})
    copies.append(policy.twin())
    of_one = [*pending(credited[1], 0), *pending(credited[1], 1)]
    route.on_end(of_one)
    route.on_wait([*pending(credited[0], 0), *pending(credited[1], 0)])
    passes = []
    while route.score_while_idle():
        passes.append(scorer.take_forward_tokens())
    assert passes == [6 + 2 + 1 + 5 + 2 + 4, 6 + 2, 4 + 5 + 3 + 4]
    route.on_wait([*pending(credited[0], 0), *pending(credited[1], 0)])
    assert not route.score_while_idle(), "each token is scored once"
    route.on_end([*pending(credited[0], 0), *pending(credited[0], 1)])
    assert route.score_while_idle() and not route.score_while_idle()
    route.costs()
    nudge(policy, seed=2)
    batch = collate(credited)
    values, exact = route.logps(batch, torch.empty(0))
    assert torch.equal(exact, batch.sampled)
    torch.testing.assert_close(values, truth(batch, copies).float(), atol=1e-5, rtol=0)
    costs = route.costs()
    assert costs["forward_tokens"] == 0 and costs["scored_in_time_share"] == 1
    route.close()


def test_ranks_receive_each_piece_once() -> None:
    sent: list[tuple[str, list[PieceKey]]] = []

    def later(name: str, pieces: Sequence[PendingPiece]) -> None:
        sent.append((name, [key_of(piece) for piece in pieces]))

    trainer = SimpleNamespace(
        ranks=SimpleNamespace(later=later), version=0, call=lambda name, *arguments: None
    )
    route = RankedOldLogps(cast(Any, trainer), Needs(idle=True, snapshots=True))
    first, *rest = pieces_of(0)
    route.on_end([first])
    trainer.version = 1
    route.on_published({0})
    for _ in range(2):
        route.on_wait([first, *rest])
    assert rest and sent == [
        ("on_end", [key_of(first)]),
        ("on_wait", [key_of(piece) for piece in rest]),
    ]


def test_eager_scores_no_version_that_nobody_needs_any_more() -> None:
    policy = tiny_policy()
    scorer = LocalScorer(policy, 1.0, 48)
    with closing(build_old_logps(ROUTES["eager, snapshot_old"], scorer)) as route:
        credited = episode(0, [4, (5, 0), 3, (4, 1)])
        for version, live in enumerate([(), {0}, {1}]):
            if version:
                nudge(policy, seed=version)
            policy.version = version
            route.on_published(live=live)
            if version == 1:
                route.on_wait(pending(credited, 0))
        route.on_wait(pending(credited, 1))
        assert route.score_while_idle() and not route.score_while_idle()
        assert scorer.take_forward_tokens() == len(credited.trajectory.tokens)
        assert _answered(route) == {1}


def test_eager_forgets_an_ended_episode_once_its_batch_is_scored() -> None:
    policy = tiny_policy()
    route = Eager(LocalScorer(policy, 1.0, 48), fallback=Sevens())
    route.on_published(live={0})
    credited = episode(0, TURNS)
    batch = collate([credited])
    route.on_end(
        [
            PendingPiece(0, credited.trajectory.tokens, start, piece)
            for start, piece, _ in walk(credited.trajectory.pieces)
            if isinstance(piece, Sampled)
        ]
    )
    route.logps(batch, torch.empty(0))
    route.before_update([])
    assert route.costs()["forward_tokens"] == len(batch.tokens)


@pytest.mark.parametrize("name", ["interrupt_sync", "eager, interrupt_sync", "old_logit_model"])
def test_what_nobody_can_ask_for_is_forgotten(name: str) -> None:
    """The live versions decide, whether episodes were trained on or given up."""
    policy = tiny_policy()
    with built(name, policy) as route:
        play(route, policy)
        assert _answered(route) >= {0, 1, 2, 3}
        route.before_update(pieces_of(4))
        policy.version = 5
        route.on_published(live={2, 5})
        assert _answered(route) == {2}


def _answered(route: OldLogps) -> set[int]:
    """Return the versions with cached scores."""
    state = route.state()
    held = [part["answers"] for part in (state, state.get("fallback", {})) if "answers" in part]
    return {version for answers in held for version in answers["places"][:, 0].tolist()}


def test_a_version_closed_without_a_piece_is_missed_with_numbers() -> None:
    policy = tiny_policy()
    route = InterruptSync(LocalScorer(policy, 1.0, 48))
    route.on_published(live=())
    route.before_update([])
    policy.version = 1
    route.on_published(live={0})
    with pytest.raises(LookupError, match=r"2 tokens of versions \[0\] were never scored"):
        route.logps(collate([episode(0, [4, (2, 0), (3, 1)])]), torch.empty(0))


def test_the_stall_lasts_from_closing_to_publication(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.5, 19.0])  # closing begins, closing ends, the next version is published
    monkeypatch.setattr(interrupt_sync.time, "perf_counter", lambda: next(clock))
    policy = tiny_policy()
    route = InterruptSync(LocalScorer(policy, 1.0, 48))
    policy.version = 3
    route.on_published(live=())
    part, _ = BATCH.select([0])
    route.logps(part, torch.empty(0))
    assert route.costs() == {
        "forward_tokens": 9,
        "closing_s": 0,
        "stall_s": 0,
    }
    route.before_update([piece for piece in pieces_of(3) if piece.episode != part.episodes[0]])
    assert route.costs() == {
        "forward_tokens": 11 + 16 + 12 + 21,
        "closing_s": 2.5,
        "stall_s": 0,
    }
    policy.version = 4
    route.on_published(live={3})
    assert route.costs() == {
        "forward_tokens": 0,
        "closing_s": 0,
        "stall_s": 9,
    }


@contextmanager
def old_logit_model(policy: Policy) -> Iterator[OldLogitModel]:
    with closing(OldLogitModel(LocalScorer(policy, 1.0, 48))) as route:
        route.on_published(live=())
        yield route


def advance(policy: Policy, route: OldLogps, seed: int) -> None:
    nudge(policy, seed=seed)
    policy.version += 1
    route.before_publish()
    route.on_published(live=range(policy.version))


@pytest.mark.costly
def test_publishing_waits_for_the_process_to_load_the_version_before_and_arrivals_do_not() -> None:
    policy = tiny_policy()
    with ThreadPoolExecutor(1) as trainer, old_logit_model(policy) as route:
        one = pieces_of(0)[0]
        route.on_piece(one)
        assert len(route.state()["answers"]["places"]) == 1  # so version 0 is loaded
        route.costs()
        os.kill(route.pid, signal.SIGSTOP)
        tokens = one.tokens * 150
        for number in range(1000, 1099):  # half a megabyte: more than a socket holds
            route.on_piece(
                PendingPiece(number, tokens, len(tokens) - len(one.piece.tokens), one.piece)
            )
        advance(
            policy, route, seed=1
        )  # tells of version 1, and waits for nothing: version 0 is loaded
        waiting = trainer.submit(route.before_publish)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.5)
        os.kill(route.pid, signal.SIGCONT)
        waiting.result(timeout=LIMIT_S)
        assert route.costs()["publish_wait_s"] > 0
        assert len(route.state()["answers"]["places"]) == 100


def test_the_model_on_disk_is_removed_once_loaded_or_by_a_later_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    leftover = tmp_path / "unstale-old-logit-killed"
    leftover.mkdir()
    hold_lock(leftover).close()
    policy = tiny_policy()
    with old_logit_model(policy) as route:
        assert not leftover.exists()
        advance(policy, route, seed=1)  # waits until version 0 is loaded
        assert not list(tmp_path.glob("unstale-old-logit-*"))
        for piece in pieces_of(1):
            route.on_piece(piece)
        assert len(route.state()["answers"]["places"]) == len(pieces_of(1))


@pytest.mark.parametrize("call", ["publishing", "logps", "state"])
def test_a_process_that_died_ends_the_next_call_with_its_cause(call: str) -> None:
    policy = tiny_policy()
    with old_logit_model(policy) as route:
        os.kill(route.pid, signal.SIGKILL)
        wait_until_gone(route.pid)
        calls: dict[str, Callable[[], object]] = {
            "publishing": route.before_publish,
            "logps": lambda: route.logps(collate([episode(0, [4, (2, 0)])]), torch.empty(0)),
            "state": route.state,
        }
        with pytest.raises(
            OldLogitModelDied, match=r"the old-logit process \(pid \d+\) ended with signal 9"
        ):
            calls[call]()


def test_a_process_that_dies_while_it_is_waited_for_ends_the_wait() -> None:
    policy = tiny_policy()
    with ThreadPoolExecutor(1) as trainer, old_logit_model(policy) as route:
        os.kill(route.pid, signal.SIGSTOP)
        for piece in pieces_of(0):
            route.on_piece(piece)
        waiting = trainer.submit(route.state)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.3)
        os.kill(route.pid, signal.SIGKILL)
        with pytest.raises(OldLogitModelDied, match="signal 9"):
            waiting.result(timeout=LIMIT_S)


def test_a_frozen_process_ends_whoever_waits_for_it_within_five_seconds(
    monkeypatch: pytest.MonkeyPatch, frozen_s: float
) -> None:
    assert frozen_s + child_process.BEAT_S < 5
    monkeypatch.setattr(child_process, "FROZEN_S", 1.0)
    policy = tiny_policy()
    with old_logit_model(policy) as route:
        route.on_piece(pieces_of(0)[0])
        route.state()  # so it has begun to beat
        os.kill(route.pid, signal.SIGSTOP)
        for piece in pieces_of(0)[1:]:
            route.on_piece(piece)
        advance(policy, route, seed=1)
        asked = replace(BATCH, sampled=BATCH.version == 0)
        with pytest.raises(
            OldLogitModelDied, match=r"the old-logit process \(pid \d+\) did not answer for 1 s"
        ):
            route.logps(asked, torch.empty(0))
        for call in (
            route.state,
            route.before_publish,
            partial(route.logps, asked, torch.empty(0)),
        ):
            with pytest.raises(OldLogitModelDied, match="signal 9"):  # it is not left behind
                call()


def test_closing_does_not_wait_for_a_frozen_process_with_a_full_socket() -> None:
    policy = tiny_policy()
    route = OldLogitModel(LocalScorer(policy, 1.0, 48))
    route.on_published(live=())
    os.kill(route.pid, signal.SIGSTOP)
    piece, pid = pieces_of(0)[0], route.pid
    for number in range(1000, 1099):  # half a megabyte: more than a socket holds
        route.on_piece(
            PendingPiece(number, piece.tokens * 150, len(piece.tokens) * 150 - 1, piece.piece)
        )
    with ThreadPoolExecutor(1) as trainer:
        trainer.submit(route.close).result(timeout=FROZEN_S / 2)
    wait_until_gone(pid)


def in_lockstep(*, hindered: bool) -> list[Any]:
    """Return a route's values and costs in the middle of every version. `hindered` delays the
    process."""
    policy, copies, found = tiny_policy(), [], []
    with closing(OldLogitModel(LocalScorer(policy, 0.7, 24), lockstep=True)) as route:
        for version in range(5):
            if version:
                nudge(policy, seed=version)
            policy.version = version
            copies.append(policy.twin())
            route.before_publish()
            route.on_published(live=range(version))
            pieces = pieces_of(version)
            if hindered:
                os.kill(route.pid, signal.SIGSTOP)
                threading.Timer(0.3, os.kill, (route.pid, signal.SIGCONT)).start()
            for piece in pieces[-2::-1] if hindered else pieces[:-1]:
                route.on_piece(piece)
            asked = replace(BATCH, sampled=BATCH.sampled & (BATCH.version <= version))
            found += [route.logps(asked, torch.empty(0))[0], route.costs()["forward_tokens"]]
            route.on_piece(pieces[-1])
        values, _ = route.logps(BATCH, torch.empty(0))
        assert (values - truth(BATCH, copies, temperature=0.7)).abs().max() < 1e-5
        return [*found, values, route.costs()["forward_tokens"], *route.state()["answers"].values()]


def test_in_lockstep_nothing_depends_on_how_fast_the_process_is_nor_on_the_order_of_arrival() -> (
    None
):
    for one, other in zip(in_lockstep(hindered=False), in_lockstep(hindered=True), strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_a_resumed_route_starts_its_process_at_the_first_publication() -> None:
    policy = tiny_policy()
    with built("old_logit_model", policy) as route:
        copies = play(route, policy, versions=3)
        state = checkpoint_round_trip(route.state())
    nudge(policy, seed=3)
    policy.version = 3
    copies.append(policy.twin())
    batch = collate([TRAJECTORIES[i] for i in (0, 1, 2)])
    with built("old_logit_model", policy) as route:
        route.restore(state)
        route.recover({2: pieces_of(2)}, lambda version: copies[version].weights())
        assert route.costs()["forward_tokens"] == 0  # its state lacked nothing
        for piece in pieces_of(3):
            route.on_piece(piece)
        with pytest.raises(RuntimeError, match="starts at the first publication"):
            route.pid  # type: ignore[attr-defined]  # noqa: B018
        route.before_publish()
        route.on_published(live={2, 3})
        nudge(policy, seed=4)
        values, exact = route.logps(batch, torch.empty(0))
    assert torch.equal(exact, batch.sampled)
    assert (values - truth(batch, copies, temperature=0.7)).abs().max() < 1e-5


def test_a_piece_that_comes_after_its_version_was_left_ends_with_that_cause() -> None:
    policy = tiny_policy()
    with old_logit_model(policy) as route:
        advance(policy, route, seed=1)
        for piece in pieces_of(1):
            route.on_piece(piece)
        route.state()  # so version 1 is loaded
        route.on_piece(pieces_of(0)[0])
        with pytest.raises(
            OldLogitModelDied, match="a piece of version 0 came when version 1 was loaded"
        ):
            route.state()


def test_a_piece_that_never_arrived_is_missed_and_not_waited_for() -> None:
    policy = tiny_policy()
    with old_logit_model(policy) as route:
        advance(policy, route, seed=1)
        with pytest.raises(LookupError, match=r"2 tokens of versions \[0\] were never scored"):
            route.logps(collate([episode(0, [4, (2, 0), (3, 1)])]), torch.empty(0))


def test_the_process_ends_when_its_parent_is_gone() -> None:
    program = (
        "import os; from unstale.testing import tiny_policy; "
        "from unstale.old_logps.scoring.local_scorer import LocalScorer; "
        "from unstale.old_logps.old_logit_model import OldLogitModel; "
        "policy = tiny_policy(); route = OldLogitModel(LocalScorer(policy, 1.0, 48)); "
        "route.on_published(()); print(route.pid, flush=True); os._exit(0)"
    )
    root = Path(__file__).parents[2]
    wait_until_gone(int(run_forked(program, cwd=root)))


class Witness:
    """A route that delegates all calls and keeps full copies of versions and values."""

    def __init__(self, route: OldLogps, policy: Policy) -> None:
        self.route = route
        self.policy = policy
        self.copies: list[Policy] = []
        self.answers: list[tuple[Batch, Tensor, Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.route, name)

    def on_published(self, live: Collection[int]) -> None:
        self.copies.append(self.policy.twin())
        self.route.on_published(live)

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        values, exact = self.route.logps(batch, now)
        self.answers.append((batch, values, exact))
        return values, exact


def routed(
    parts: RunComponents, old: OldLogps | Witness, *, minibatches_per_batch: int = 1
) -> RunComponents:
    """Return the same run with another route, and a learning rate that separates the versions."""

    def arrived(piece: PendingPiece) -> None:
        parts.pending.add(piece)
        old.on_piece(piece)

    config = replace(
        parts.config, trainer=TrainerConfig(lr=3e-3, minibatches_per_batch=minibatches_per_batch)
    )
    # the script's log-probabilities are far from the policy's: any control of D would drop every
    # token
    without_correction = replace(config, correction=CorrectionConfig(mode="none"))
    return replace(
        parts,
        config=config,
        old_logps=old,
        rollout=Rollout(
            parts.rollout.generator, parts.rollout.taskset, config.rollout, on_piece=arrived
        ),
        trainer=LocalTrainer(parts.trainer.policy, without_correction, old),
    )


def test_no_engine_gets_a_version_before_the_process_has_loaded_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without lag no batch waits for scores. The process is paused from the first update on."""
    parts = make(tmp_path, count(), budget=0, steps=4)
    route = OldLogitModel(LocalScorer(parts.trainer.policy, 1.0, 256))
    load, publishing = parts.engine.load, route.before_publish
    happened: list[str] = []

    async def hooked_load(update: Update, version: int) -> None:
        await load(update, version)
        happened.append(f"engine {version}")
        if version == 1:
            os.kill(route.pid, signal.SIGSTOP)

    def go_on() -> None:
        happened.append("goes on")
        os.kill(route.pid, signal.SIGCONT)

    def hooked_publishing() -> None:
        if parts.trainer.policy.version == 2:
            threading.Timer(0.5, go_on).start()
        publishing()
        happened.append(f"loaded {route.loaded}")

    monkeypatch.setattr(parts.engine, "load", hooked_load)
    monkeypatch.setattr(route, "before_publish", hooked_publishing)
    with closing(route):
        rows = run(routed(parts, route))
    assert happened == [
        "loaded -1",
        "engine 0",
        "loaded 0",
        "engine 1",
        "goes on",
        "loaded 1",
        "engine 2",
        "loaded 2",
        "engine 3",
        "loaded 3",
        "engine 4",
    ]
    assert rows[2]["old_logps/publish_wait_s"] > 0
    assert all(row["old_logps/exact_share"] == 1 for row in rows)


def pauses() -> Callable[[Sequence[int], SamplingParams], Awaitable[None]]:
    """In one task in seven, pause each reply once, until an update or for one second."""
    begun: set[tuple[int, int]] = set()

    async def wait(tokens: Sequence[int], params: SamplingParams) -> None:
        place = params.seed, len(tokens)
        if tokens[1] == 5 and len(tokens) in (4, 11) and place not in begun:
            begun.add(place)
            await asyncio.sleep(1.0)
        await asyncio.sleep(0)

    return wait


@pytest.mark.costly
@pytest.mark.parametrize("minibatches_per_batch", [1, 2])
@pytest.mark.parametrize(
    "name", ["old_logit_model", "interrupt_sync", "eager, snapshot_old", "eager, interrupt_sync"]
)
def test_in_an_asynchronous_run_every_token_gets_its_own_versions_logp(
    tmp_path: Path, name: str, minibatches_per_batch: int
) -> None:
    parts = make(tmp_path, count(), budget=2, steps=10, delay=pauses())
    old = build_old_logps(ROUTES[name], LocalScorer(parts.trainer.policy, 1.0, 256))
    witness = Witness(old, parts.trainer.policy)
    parts = routed(parts, witness, minibatches_per_batch=minibatches_per_batch)
    with closing(witness.route):
        rows = run(parts)
    assert len(rows) == len(witness.answers) == 10 and len(witness.copies) == 11
    mixed, moved = 0, 0.0
    for batch, values, exact in witness.answers:
        expected = truth(batch, witness.copies)
        assert torch.equal(exact, batch.sampled)
        assert (values - expected).abs().max() < 1e-5
        newest = truth(replace(batch, version=torch.where(batch.sampled, 10, -1)), witness.copies)
        moved = max(moved, float((expected - newest).abs().max()))
        turns = zip(
            batch.sequence.tolist(), batch.turn.tolist(), batch.version.tolist(), strict=True
        )
        seen = {turn for turn in turns if turn[1] >= 0}
        mixed += len(seen) - len({turn[:2] for turn in seen})
    assert mixed > 0, "no turn had tokens of two versions: this run tests nothing"
    assert moved > 1e-3, "all versions are alike: this run tests nothing"
    assert all(row["old_logps/exact_share"] == 1 for row in rows)
    if "eager" in name:
        assert any(row["old_logps/scored_in_time_share"] > 0 for row in rows)
    if "interrupt_sync" in name:
        assert rows[0]["old_logps/stall_s"] == 0 and all(
            row["old_logps/stall_s"] > 0 for row in rows[1:]
        )


def test_the_first_score_of_a_token_stays_however_late_another_one_comes() -> None:
    """A later score differs by rounding: its pass was packed differently."""
    policy = tiny_policy()
    cache = LogpCache(LocalScorer(policy, 1.0, 64))
    batch = collate([episode(1, [3, (4, 0), 2, (3, 0)])])
    first, known = cache.lookup(batch)
    assert torch.equal(known, batch.sampled)
    cache.add_rows([[(0, 1, 3), [-1.0] * 4], [(0, 1, 10), [-2.0] * 2], [(0, 1, 9), [-3.0] * 3]])
    assert torch.equal(cache.lookup(batch)[0], first)
    cache.add_rows([[(0, 1, 9), [-3.0] * 4]])
    values, _ = cache.lookup(collate([episode(1, [3, (4, 0), 2, (4, 0)])]))
    assert torch.equal(values[:12], first) and values[12] == -3.0


def test_scores_of_rewritten_text_are_not_those_of_the_next_episode() -> None:
    """Without its advice, an episode is shorter than the places of its scores say."""
    policy = tiny_policy()
    policy.weights_match_version = False  # nothing is computed for the lookup
    cache = LogpCache(LocalScorer(policy, 1.0, 64))
    cache.add_rows([[(0, 1, 11), [-1.0] * 3]])
    advised = episode(1, [3, 8, (3, 0)]).trajectory
    cut = replace(advised, pieces=remove_text(advised.pieces, 3, 11))
    short, other = ScoredTrajectory(cut, (1.0,)), episode(2, [3, (6, 0)])
    for batch in (collate([short, other], placed="anchor"), collate([short], placed="anchor")):
        values, known = cache.lookup(batch)
        assert not values.any() and not known.any()
