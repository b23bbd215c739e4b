"""Test the records.

Per-token values derive from pieces. An interrupted reply is one turn of two versions. Collation
packs without padding and keeps every value at its token. Pieces and advantages of the wrong length
are refused.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unstale.config.algorithm import PlacedMode
from unstale.records import (
    ContextPiece,
    Edit,
    Fork,
    Group,
    Piece,
    Placed,
    Provenance,
    Sampled,
    ScoredTrajectory,
    Task,
    Trajectory,
    collate,
    concatenate,
    walk,
)
from unstale.rewriting import remove_text

TASK = Task("desk", "train", 3)


def trajectory(*pieces: Piece, episode: int = 0) -> Trajectory:
    return Trajectory(pieces, {"success": 1.0, "style": 0.5}, "done", TASK, seed=1, episode=episode)


ASKED = ContextPiece((1, 2, 3))
BEGUN = Sampled((4, 5), (-0.1, -0.2), version=6)
CONTINUED = Sampled((7,), (-0.3,), version=7, clean=False)
TOOL = ContextPiece((8, 9))
FORCED = ContextPiece((10,), Provenance.FORCED)
REPLAYED = Sampled((11, 12), (-0.4, -0.5), version=5, provenance=Provenance.REPLAYED)
EMPTY = Sampled((), (), version=9)


def test_everything_per_token_derives_from_pieces() -> None:
    batch = collate(
        [ScoredTrajectory(trajectory(ASKED, BEGUN, CONTINUED, TOOL, FORCED, REPLAYED), (2.0,))]
    )
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12]
    assert batch.sampled.int().tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1]
    assert batch.version.tolist() == [-1, -1, -1, 6, 6, 7, -1, -1, -1, 5, 5]
    assert batch.turn.tolist() == [-1, -1, -1, 0, 0, 0, -1, -1, -1, 1, 1]
    assert batch.provenance.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 2, 5, 5]
    assert batch.clean.int().tolist() == [1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1]
    expected = torch.tensor([0, 0, 0, -0.1, -0.2, -0.3, 0, 0, 0, -0.4, -0.5])
    torch.testing.assert_close(batch.behavior_logp, expected)
    assert batch.advantage.tolist() == [0, 0, 0, 2, 2, 2, 0, 0, 0, 2, 2]


def test_an_interrupted_reply_is_one_turn_of_two_versions() -> None:
    episode = trajectory(ASKED, BEGUN, EMPTY, CONTINUED, TOOL, REPLAYED)
    assert episode.num_turns == 2
    assert episode.versions == {5, 6, 7}  # an empty piece sampled nothing
    assert episode.num_sampled == 5 and len(episode) == 10 and episode.reward == 1.5


def test_an_empty_given_piece_does_not_end_a_turn() -> None:
    assert [turn for _, _, turn in walk([BEGUN, ContextPiece(()), CONTINUED])] == [0, 0]


def test_sequences_lie_end_to_end() -> None:
    batch = collate(
        [
            ScoredTrajectory(trajectory(ASKED, BEGUN, episode=4), (1.0,)),
            ScoredTrajectory(trajectory(TOOL, REPLAYED), (2.0,)),
        ]
    )
    assert batch.offsets == (0, 5, 9) and batch.episodes == (4, 0)
    assert batch.spans() == [(0, 5), (5, 9)]
    assert batch.sequence.tolist() == [0] * 5 + [1] * 4
    chosen, index = batch.select([1])
    assert (
        chosen.tokens.tolist() == [8, 9, 11, 12]
        and chosen.offsets == (0, 4)
        and chosen.episodes == (0,)
    )
    assert index.tolist() == [5, 6, 7, 8]


def test_a_batch_has_the_group_and_the_reward_of_each_sequence() -> None:
    branch = trajectory(ASKED, BEGUN, episode=5)
    led = replace(trajectory(ASKED, BEGUN, episode=4), branches=(branch,))
    left_out = trajectory(TOOL, REPLAYED, episode=6)
    groups = [
        Group(led.task, (led,), number=8, unused=(left_out,)),
        Group(led.task, (trajectory(TOOL, REPLAYED, episode=9),), number=3),
    ]
    assert groups[0].episodes == {4, 5, 6}
    conversations = (led, branch, groups[1].trajectories[0])
    scored = [ScoredTrajectory(each, (1.0,)) for each in conversations]
    batch = collate(scored, groups=groups)
    assert batch.group == (8, 8, 3) and batch.reward == (1.5, 1.5, 1.5)
    assert batch.select([2, 0])[0].group == (3, 8)


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [((3.0,), [3, 3, 3, 3, 3]), ((1.0, 2.0), [1, 1, 1, 2, 2]), (tuple(range(10)), [3, 4, 5, 8, 9])],
)
def test_an_advantage_stands_for_the_episode_a_turn_or_a_token(
    advantage: tuple[float, ...], expected: list
) -> None:
    batch = collate(
        [ScoredTrajectory(trajectory(ASKED, BEGUN, CONTINUED, TOOL, REPLAYED), advantage)]
    )
    assert batch.advantage[batch.sampled].tolist() == expected
    assert not batch.advantage[~batch.sampled].any()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens, 1 behavior_logp"):
        Sampled((1, 2), (-0.1,), version=0)
    with pytest.raises(ValueError, match="version must be >= 0"):
        Sampled((1,), (-0.1,), version=-1)
    with pytest.raises(ValueError, match="cannot be SAMPLED"):
        ContextPiece((1,), Provenance.SAMPLED)
    with pytest.raises(ValueError, match="cannot be FOREIGN"):
        Sampled((1,), (-0.1,), version=0, provenance=Provenance.FOREIGN)
    with pytest.raises(ValueError, match="3 advantages for 2 turns"):
        ScoredTrajectory(trajectory(ASKED, BEGUN, TOOL, REPLAYED), (1.0, 2.0, 3.0))
    with pytest.raises(ValueError, match="nothing to collate"):
        collate([])


PIECES = st.one_of(
    st.integers(0, 5).map(lambda n: ContextPiece(tuple(range(n)))),
    st.tuples(st.integers(0, 5), st.integers(0, 3)).map(
        lambda pair: Sampled(tuple(range(pair[0])), (-1.0,) * pair[0], version=pair[1])
    ),
)


@given(st.lists(st.lists(PIECES, max_size=6), min_size=1, max_size=5))
def test_a_batch_holds_every_token_once_and_no_padding(episodes: list) -> None:
    items = [trajectory(*pieces) for pieces in episodes]
    batch = collate([ScoredTrajectory(item, (1.0,)) for item in items])
    assert batch.tokens.tolist() == [token for item in items for token in item.tokens]
    assert batch.offsets[-1] == len(batch.tokens) == sum(map(len, items))
    assert int(batch.sampled.sum()) == sum(item.num_sampled for item in items)
    for (start, end), item in zip(batch.spans(), items, strict=True):
        turns = batch.turn[start:end]
        assert int(turns.max() if len(turns) else -1) + 1 == item.num_turns


HINT = ContextPiece((21, 22))
GUIDED = Placed((4, 5), Provenance.REWRITTEN, 6, (-0.1, -0.2), Edit(3, 3, (21, 22)))
GIVEN = Placed((31,), Provenance.FORCED)


def test_text_sampled_after_a_removed_hint_is_rewritten() -> None:
    pieces = remove_text((ASKED, HINT, BEGUN, TOOL, GIVEN), 3, 5)
    assert pieces == (ASKED, GUIDED, TOOL, GIVEN)
    assert GUIDED.edit is not None and GUIDED.edit.shift == 2
    assert GUIDED.edit.undo((1, 2, 3, 4, 5)) == (1, 2, 3, 21, 22, 4, 5)
    cut = remove_text((ASKED, BEGUN, TOOL), 4, 6)  # the end of a reply, and what follows it
    assert cut == (ASKED, BEGUN.first(1), ContextPiece((9,)))
    ends = remove_text((ASKED, BEGUN), 2, 4)
    assert ends == (
        ContextPiece((1, 2)),
        Placed((5,), Provenance.REWRITTEN, 6, (-0.2,), Edit(2, 2, (3, 4))),
    )
    with pytest.raises(ValueError, match="cannot be edited again"):
        remove_text(pieces, 0, 1)
    with pytest.raises(ValueError, match="of 3 tokens has no tokens 2 to 4"):
        remove_text((ASKED,), 2, 4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Placed((1,), Provenance.SAMPLED),
        lambda: Placed((1,), Provenance.REWRITTEN),
        lambda: Placed((1,), Provenance.FORCED, source_logp=(-0.1,)),
        lambda: Placed((1,), Provenance.FOREIGN, source_logp=(-0.1,)),
        lambda: Placed((1,), Provenance.FOREIGN, 0, (-0.1,), Edit(0, 0, ())),
        lambda: Placed((1, 2), Provenance.REWRITTEN, 0, (-0.1,), Edit(0, 0, ())),
        lambda: Edit(3, 2, ()),
    ],
)
def test_placed_text_without_a_whole_source_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"must be|needs|tokens"):
        make()


@pytest.mark.parametrize(
    ("placed", "trained"), [("mask", [0, 0, 0]), ("guided", [1, 1, 0]), ("anchor", [1, 1, 1])]
)
def test_the_option_chooses_the_placed_text_with_a_loss(
    placed: PlacedMode, trained: list[int]
) -> None:
    items = [
        ScoredTrajectory(trajectory(TOOL, BEGUN, episode=1), (3.0,)),
        ScoredTrajectory(trajectory(ASKED, GUIDED, GIVEN, BEGUN, TOOL, REPLAYED), (1.0, 2.0)),
    ]
    batch = collate(items, placed=placed)
    plain = collate(
        [
            replace(item, trajectory=replace(item.trajectory, pieces=tuple(map(context, pieces))))
            for item in items
            for pieces in [item.trajectory.pieces]
        ]
    )
    part, index = batch.select([1])
    for chosen in (part, concatenate([plain.select([0])[0], part]).select([1])[0]):
        assert chosen.placed is not None
        assert chosen.placed.given.int().tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0]
        assert chosen.placed.trained.int()[3:6].tolist() == trained
        assert chosen.trained.int().tolist() == [0, 0, 0, *trained, 1, 1, 0, 0, 1, 1]
        assert chosen.advantage.tolist() == [0, 0, 0, *trained, 1, 1, 0, 0, 2, 2]
        known = placed != "mask"
        assert chosen.placed.version.tolist()[3:6] == [6 * known - (not known)] * 2 + [-1]
        torch.testing.assert_close(
            chosen.placed.source_logp[3:6], torch.tensor([-0.1, -0.2, 0]) * known
        )
        assert chosen.placed.edits == (((3, 5, GUIDED.edit),) if known else (),)
    assert part.sampled.equal(plain.sampled[index]) and part.version.equal(plain.version[index])
    assert part.turn.tolist() == [-1] * 6 + [0, 0, -1, -1, 1, 1]


def context(piece: Piece) -> Piece:
    return ContextPiece(piece.tokens, piece.provenance) if isinstance(piece, Placed) else piece


def test_a_fork_shares_the_placed_text_of_its_parent() -> None:
    shared = Fork(0, 6).prefix_of((ASKED, GUIDED, GIVEN, BEGUN))
    assert [piece.provenance.name for piece in shared] == ["ENVIRONMENT", "SHARED", "SHARED"]
