"""Promise: the kept set of a sampled token follows it, unchanged, from the engine to the loss.

- what is packed is unpacked, and damage is refused;
- a batch has the sets of its tokens, however it is cut and joined;
- a recording and the checkpoint of replayed groups give back the sets, as does the journal
  (`tests/durability/test_journal.py`).
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unstale.kept_sets import KeptSets, join
from unstale.model.whole_weights import WholeWeights
from unstale.records import (
    Batch,
    ContextPiece,
    Sampled,
    ScoredTrajectory,
    StoredLogps,
    Task,
    Trajectory,
    collate,
    concatenate,
)
from unstale.techniques.replay import Replay, ReplayConfig, StoredGroup
from unstale.testing import checkpoint_round_trip
from unstale.weights.recording import Recorded, RecordedBatch, Recording

SETS = st.lists(st.one_of(st.just(()), st.sets(st.integers(0, 2**18), min_size=1, max_size=40)))
ALIKE = st.sets(st.integers(0, 60).map(lambda each: 997 * each), min_size=1)
"""Sets with many ids in common, so that one refers to another."""


def made(sets: list[tuple[int, ...]]) -> tuple[KeptSets, tuple[int, ...]]:
    """Return kept sets, and a token of each: the middle one."""
    tokens = tuple(sorted(each)[len(each) // 2] if each else 7 for each in sets)
    ids = [token for each in sets for token in sorted(each)]
    sizes = np.array([len(each) for each in sets], np.int64)
    return KeptSets(sizes, np.array(ids, np.int32)), tokens


def listed(kept: KeptSets | None) -> list[list[int]]:
    assert kept is not None
    return [kept.at([i]).ids.tolist() for i in range(len(kept))]


@given(SETS | st.lists(ALIKE | st.just(()), min_size=8))
def test_packed_sets_are_unpacked(sets: list[tuple[int, ...]]) -> None:
    kept, tokens = made(sets)
    assert listed(KeptSets.unpack(kept.pack(tokens), tokens)) == [sorted(each) for each in sets]


def test_a_set_of_one_token_takes_less_than_a_byte_and_large_ones_few_bytes_an_id() -> None:
    kept, tokens = made([(5,)] * 64)
    assert len(kept.pack(tokens)) < 32
    ids = np.flatnonzero(np.random.default_rng(0).random(9000) < 0.1).tolist()
    kept, tokens = made([tuple(ids)])
    assert len(kept.pack(tokens)) < len(ids)


def test_a_set_that_resembles_an_earlier_one_takes_little_more_than_a_bit_an_id() -> None:
    ids = np.flatnonzero(np.random.default_rng(0).random(50_000) < 0.01).tolist()
    alike = [tuple(each for each in ids if each % 7 != left) for left in range(7)]
    single, whole = (len(kept.pack(tokens)) for kept, tokens in (made(alike[:1]), made(alike)))
    assert whole < single + 6 * 1.2 * len(ids) / 8


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: b"no"])
def test_damaged_sets_are_refused(damage) -> None:  # type: ignore[no-untyped-def]
    kept, tokens = made([(1, 2, 3), (), (400, 70_000)])
    with pytest.raises(ValueError, match="damaged"):
        KeptSets.unpack(damage(kept.pack(tokens)), tokens)


def test_a_set_without_its_token_is_refused() -> None:
    kept, _ = made([(1, 2), (3,)])
    with pytest.raises(ValueError, match="lacks the token that was drawn"):
        kept.pack((1, 4))
    with pytest.raises(ValueError, match="3 tokens, 2 kept sets"):
        Sampled((1, 3, 5), (-0.1, 0.0, 0.0), 0, kept_sets=kept)


def sampled(*sets: tuple[int, ...], version: int = 0) -> Sampled:
    kept, tokens = made(list(sets))
    return Sampled(tokens, (-0.5,) * len(tokens), version, kept_sets=kept)


PIECES = (
    ContextPiece((8, 9)),
    sampled((1, 2, 3), (4,)),
    sampled((2, 900), version=1),
    ContextPiece((5,)),
    Sampled((6,), (-1.0,), 1),
    sampled((6, 7, 70_000), (1, 5), version=1),
)
EXPECTED = [[], [], [1, 2, 3], [4], [2, 900], [], [], [6, 7, 70_000], [1, 5]]
TASK = Task("toy", "train", 3)


def trajectory(episode: int) -> Trajectory:
    return Trajectory(PIECES, {"reward": 1.0}, "done", TASK, seed=1, episode=episode)


def batch(*episodes: int) -> Batch:
    return collate([ScoredTrajectory(trajectory(each), (1.0,)) for each in episodes])


def test_a_batch_has_the_sets_of_its_tokens_however_it_is_cut_and_joined() -> None:
    whole = batch(0, 1)
    assert listed(whole.kept_sets) == EXPECTED * 2
    part, index = whole.select([1])
    assert listed(part.kept_sets) == EXPECTED and index[0] == len(EXPECTED)
    plain = collate([ScoredTrajectory(replace(trajectory(2), pieces=PIECES[3:5]), (1.0,))])
    assert plain.kept_sets is None
    assert listed(concatenate([plain, whole]).kept_sets) == [[], []] + EXPECTED * 2
    assert join([(2, None), (0, None)]) is None
    first = PIECES[5].first(1)  # type: ignore[union-attr]
    assert first.tokens == (7,) and listed(first.kept_sets) == [[6, 7, 70_000]]


def test_a_recorded_batch_gives_back_the_sets(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    for version in (0, 1):
        recording.version(version, WholeWeights({}, lambda name: torch.zeros(0)))
    recording.batch(RecordedBatch(1, 1, batch(0, 1)))
    assert listed(Recorded(tmp_path).batch(1).batch.kept_sets) == EXPECTED * 2


def test_a_checkpoint_of_stored_groups_gives_back_the_sets() -> None:
    def stored(number: int, made: Batch) -> StoredGroup:
        count = len(made.tokens)
        kept = StoredLogps(torch.zeros(count), torch.zeros(count, dtype=torch.bool))
        return StoredGroup(number, f"toy/train/{number}", 1, replace(made, stored=kept))

    plain = collate([ScoredTrajectory(replace(trajectory(2), pieces=PIECES[3:5]), (1.0,))])
    replay, again = Replay(ReplayConfig()), Replay(ReplayConfig())
    replay.stored = [stored(0, batch(0, 1)), stored(1, plain), stored(2, batch(3))]
    again.restore(checkpoint_round_trip(replay.state()))
    found = [listed(each.batch.kept_sets) for each in again.stored]
    assert found == [EXPECTED * 2, [[], []], EXPECTED]
