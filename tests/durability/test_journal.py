"""Test the journal.

Consumed groups are read back bit for bit. After a barrier, rows are committed for other processes
and survive SIGKILL. Every disk or file failure raises one error that names both. `check` finds
inconsistent rows. A run takes a group only after its commit, and records nothing twice.
"""

import asyncio
import json
import math
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.cli.test_run import small
from tests.support.forked import Forked
from tests.support.waits import LIMIT_S, wait_until
from tests.test_loop import make, run
from unstale.analysis.planner.recorded import RESULTS
from unstale.cli import main, session
from unstale.config import ConfigError, install
from unstale.durability.journal import (
    JOURNAL,
    CheckpointRow,
    Journal,
    JournalError,
    JournalReader,
    check,
    content,
    wal,
    writer,
)
from unstale.durability.journal.export import export_rows, write_jsonl
from unstale.kept_sets import KeptSets
from unstale.records import (
    HAS_BEHAVIOR,
    UNREPEATED_TEXT,
    ContextPiece,
    Edit,
    EpisodeRecord,
    Failure,
    Fork,
    Group,
    GroupRequest,
    Piece,
    Placed,
    Provenance,
    Sampled,
    Stop,
    Task,
    Trajectory,
)
from unstale.rollout.timeouts import first_error
from unstale.signals import Signals

ROOT = Path(__file__).parents[2]
TASK = Task("retail", "train", 17)


def float32(value: float) -> float:
    return float(np.float32(value))


def trajectory(*pieces: Piece, episode: int = 0, reward: float = 1.0) -> Trajectory:
    return Trajectory(pieces, {"r": reward}, "done", TASK, seed=episode + 70, episode=episode)


def request(number: int) -> GroupRequest:
    return GroupRequest(number, TASK, seed=5, place=number + 3)


def train_on(journal: Journal, group: Group, *, step: int, version: int) -> None:
    """Record a training step followed by a checkpoint."""
    journal.commit([group], step=step, version=version)
    asyncio.run(journal.checkpoint(f"of {step}", step=step, version=version + 1))


def record(journal: Journal, group: Group) -> None:
    """Record one group up to its end, as the loop and the rollout do."""
    journal.add_request(request(group.number))
    for sibling, told in enumerate(group.trajectories):
        page = journal.begin(group.number, sibling, episode=told.episode, seed=told.seed)
        for position, piece in enumerate(told.pieces):
            page.write_piece(position, piece)
        page.write_outcome(told)
    asyncio.run(journal.finish(group))


def group(number: int, *pieces: Piece) -> Group:
    pieces = pieces or (
        ContextPiece((1, 2)),
        Sampled((3, 4), (-0.5, -0.25), version=0),
        ContextPiece((5,)),
    )
    return Group(
        TASK, tuple(trajectory(*pieces, episode=2 * number + i) for i in range(2)), number=number
    )


tokens = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 300), max_size=6).map(tuple)
numbers = st.floats(width=32, allow_nan=False)
names = st.dictionaries(st.text(max_size=4), st.floats(allow_nan=False), max_size=3)


@st.composite
def sampled(draw: st.DrawFn) -> Sampled:
    held = draw(tokens)
    logps = tuple(draw(st.lists(numbers, min_size=len(held), max_size=len(held))))
    source = draw(st.sampled_from(sorted(HAS_BEHAVIOR)))
    return Sampled(held, logps, draw(st.integers(0, 2**40)), draw(st.booleans()), source)


others = st.sampled_from(sorted(set(Provenance) - HAS_BEHAVIOR))
edits = st.builds(
    lambda at, width, cut: Edit(at, at + width, cut), *[st.integers(0, 9)] * 2, tokens
)


@st.composite
def rewritten(draw: st.DrawFn) -> Placed:
    one = draw(sampled())
    source = one.version, one.behavior_logp, draw(edits)
    if draw(st.booleans()):
        return Placed(one.tokens, Provenance.FOREIGN, *source[:2])
    return Placed(one.tokens, Provenance.REWRITTEN, *source)


placed = st.sampled_from([Provenance.FORCED, Provenance.FOREIGN])
pieces = st.lists(
    sampled()
    | rewritten()
    | st.builds(ContextPiece, tokens, others)
    | st.builds(Placed, tokens, placed),
    max_size=6,
).map(tuple)


@pytest.mark.costly
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.builds(
            Trajectory,
            pieces,
            names,
            st.sampled_from(get_args(Stop)),
            st.just(TASK),
            st.integers(0, 2**63 - 1),
            turn_rewards=st.lists(st.floats(allow_nan=False), max_size=3).map(tuple),
            facts=names,
        ),
        max_size=3,
    )
)
def test_what_was_consumed_is_read_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, told: list[Trajectory]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    numbered = [
        Trajectory(t.pieces, t.rewards, t.stop, TASK, t.seed, e, t.turn_rewards, t.facts)
        for e, t in enumerate(told)
    ]
    whole = Group(TASK, tuple(numbered), number=3)
    with Journal(folder / JOURNAL) as journal:
        record(journal, whole)
        train_on(journal, whole, step=9, version=8)
    with Journal.read(folder) as read:
        assert read.group(3) == whole and repr(read.group(3)) == repr(whole)
        assert read.consumed(9) == [whole]
        assert [(kept.trajectory, kept.group, kept.step) for kept in read.trajectories()] == [
            (t, 3, 9) for t in numbered
        ]
        ((handed),) = read.groups()
    assert (handed.task, handed.seed, handed.place, handed.step, handed.version) == (
        TASK,
        5,
        6,
        9,
        8,
    )
    assert handed.ended == ("consumed" if told else "failed")
    assert sorted(os.listdir(folder)) == [JOURNAL]  # closed: one plain file


def test_a_float32_comes_back_exactly_and_a_float64_rounded_to_it(tmp_path: Path) -> None:
    values = tuple(
        map(
            float32,
            np.random.default_rng(0).normal(size=500) * 10.0 ** np.arange(-25, 25).repeat(10),
        )
    )
    one = Group(TASK, (trajectory(Sampled((7,) * 502, (*values, -math.inf, -0.1), 0)),))
    with Journal(tmp_path / JOURNAL) as journal:
        record(journal, one)
    with Journal.read(tmp_path) as read:
        (piece,) = read.pieces(0)
    assert isinstance(piece, Sampled) and piece.behavior_logp == (*values, -math.inf, float32(-0.1))


def test_a_failed_attempt_is_kept_and_the_last_one_of_each_episode_counts(tmp_path: Path) -> None:
    broken = Failure(TASK, "step 1", "EnvError: \ud800 gone", turns=1, sampled_tokens=2)
    told = trajectory(ContextPiece((1,)), Sampled((2,), (-0.5,), 0), episode=2)
    with Journal(tmp_path / JOURNAL) as journal:
        journal.add_request(request(0))
        for sibling, episode, outcome in (
            (0, 0, broken),
            (1, 1, broken),
            (0, 2, told),
            (1, 3, broken),
        ):
            page = journal.begin(0, sibling, episode=episode, seed=told.seed)
            for position, piece in enumerate(told.pieces):
                page.write_piece(position, piece)
            page.write_outcome(outcome)
        asyncio.run(journal.finish(Group(TASK, (told,), (broken,))))
    with Journal.read(tmp_path) as read:
        found = read.group(0)
        assert found.trajectories == (told,) and read.groups()[0].num_failures == 3
        assert [failure.error for failure in found.failures] == ["EnvError: ? gone"]
        assert check(read) == ["version 0 was sampled from but never published"]


def test_a_barrier_means_that_another_connection_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "WINDOW_S", 30.0)  # nothing but a barrier commits within the test
    with Journal(tmp_path / JOURNAL) as journal:
        record(journal, group(0))
        journal.add_request(request(1))
        with Journal.read(tmp_path) as read:
            assert (
                read.group(0) == group(0)
                and len(read.groups()) == 1
                and read.groups()[0].ended == "finished"
            )
        journal.flush()
        with Journal.read(tmp_path) as later:
            assert [handed.ended for handed in later.groups()] == ["finished", "open"]
            train_on(journal, group(0), step=1, version=0)
            assert later.groups()[0].ended == "finished", "a reader sees one moment"


def test_what_is_written_is_committed_without_a_barrier_too(tmp_path: Path) -> None:
    with Journal(tmp_path / JOURNAL) as journal:
        journal.add_request(request(0))
        wait_until(lambda: _groups(tmp_path) > 0, "a commit")


def _groups(folder: Path) -> int:
    with Journal.read(folder) as read:
        return len(read.groups())


def test_a_transaction_is_whole_or_not_there(tmp_path: Path) -> None:
    with Journal(tmp_path / JOURNAL) as journal:
        record(journal, group(0))
        with pytest.raises(JournalError, match=r"UNIQUE constraint failed: consumed\.number"):
            journal.commit([group(0), group(0)], step=1, version=0)
            asyncio.run(journal.checkpoint("of 1", step=1, version=1))
    with Journal.read(tmp_path) as read:
        assert [handed.ended for handed in read.groups()] == [
            "finished"
        ] and read.checkpoints() == []


def test_consumption_becomes_true_with_the_checkpoint_that_holds_its_effect(tmp_path: Path) -> None:
    with Journal(tmp_path / JOURNAL) as journal:
        for number in range(3):
            record(journal, group(number))
            journal.commit([group(number)], step=number, version=number)
        journal.flush()
        with Journal.read(tmp_path) as read:
            assert [handed.ended for handed in read.groups()] == ["finished"] * 3
        asyncio.run(journal.checkpoint("all", step=2, version=3))
    with Journal.read(tmp_path) as read:
        assert [handed.ended for handed in read.groups()] == [
            "consumed"
        ] * 3 and read.requests() == []
        assert read.checkpoints() == [CheckpointRow(0, 2, 3, "all")]


@pytest.mark.parametrize("everything", [False, True])
def test_a_rewind_undoes_what_was_consumed_and_no_more_or_everything(
    tmp_path: Path, everything: bool
) -> None:
    with Journal(tmp_path / JOURNAL) as journal:
        for step in range(3):
            asyncio.run(journal.publishing(step))
            record(journal, group(step))
            journal.write(step, {"loss": step})
            journal.event("eval", step=step)
            train_on(journal, group(step), step=step, version=step)
        journal.add_request(request(3))
        journal.rewind(1, everything=everything)
        with Journal.read(tmp_path) as read:
            assert [mark.step for mark in read.checkpoints()] == [0, 1] and check(read) == []
            ended = ["consumed", "consumed", "finished", "open"]
            assert [handed.ended for handed in read.groups()] == ended[: 2 if everything else 4]
            assert [event["step"] for event in read.events() if event["kind"] == "step"] == [0, 1]
            assert [event["step"] for event in read.events() if event["kind"] == "eval"] == [
                0,
                1,
                2,
            ][: 3 - everything]
            assert read.versions() == [0, 1, 2][: 3 - everything]
            assert read.counts() == ((2, 5, 4) if everything else (4, 7, 6))
            assert [(each.number, each.finished) for each in read.requests()] == (
                [] if everything else [(2, True), (3, False)]
            )
        if everything:
            asyncio.run(journal.publishing(2))
            record(journal, group(2))
        train_on(journal, group(2), step=2, version=2)  # what was undone can be done again
    with Journal.read(tmp_path) as read:
        assert [mark.checkpoint for mark in read.checkpoints()] == [0, 1, 2]
        assert read.groups()[2].ended == "consumed" and check(read) == []


def test_what_is_open_is_handed_out_again_with_all_that_is_known_of_it(tmp_path: Path) -> None:
    broken = Failure(TASK, "begin", "EnvError: gone")
    first, said = ContextPiece((1,)), Sampled((2,), (-0.5,), 0)
    with Journal(tmp_path / JOURNAL) as journal:
        asyncio.run(journal.publishing(0))
        journal.add_request(request(0))
        for sibling, episode in ((0, 0), (1, 1), (2, 2), (0, 3)):
            page = journal.begin(0, sibling, episode=episode, seed=7)
            if episode == 0:
                page.write_outcome(broken)
                continue
            page.write_piece(0, first)
            if episode == 2:
                page.write_restart("it said something else", turns=1, sampled_tokens=4)
            else:
                page.write_snapshot(1, "at the first")
                page.write_piece(1, said)
                page.write_snapshot(2, "at the second")
        page = journal.begin(0, 1, episode=1, seed=7, again=True)
        told = trajectory(first, said, episode=1)
        page.write_outcome(told)
        told_of = group(2, first, said)
        record(journal, told_of)
        journal.add_request(request(3))
    with Journal.read(tmp_path) as read:
        one, two, three = read.requests()
        assert one.past == (
            EpisodeRecord(3, (first, said), None, failures=1, snapshot=(2, "at the second")),
            EpisodeRecord(1, (first, said), replace(told, seed=7)),
            EpisodeRecord(2, (), Failure(TASK, "replay", "it said something else", 1, 4)),
        )
        assert (two.finished, three.finished, three.past) == (True, False, ()) and all(
            h.begun for h in (one, two, three)
        )
        assert [past.outcome for past in two.past] == list(told_of.trajectories)
        assert [(item.episode, item.start) for item in one.opens()] == [(3, 1), (1, 1)]
        assert read.given_up(0) == {TASK} and read.given_up(1) == frozenset()


@pytest.mark.parametrize(
    ("error", "share", "given_up"),
    [(f"{UNREPEATED_TEXT} piece 2 has other tokens", 0.0, set()), ("EnvError: x", 1 / 3, {TASK})],
)
def test_a_failure_by_the_text_of_a_fork_does_not_count(
    tmp_path: Path, error: str, share: float, given_up: set[Task]
) -> None:
    of_two = group(0)
    with Journal(tmp_path / JOURNAL) as journal:
        asyncio.run(journal.publishing(0))
        journal.add_request(request(0))
        for sibling, told in enumerate(of_two.trajectories):
            page = journal.begin(0, sibling, episode=told.episode, seed=told.seed)
            for position, piece in enumerate(told.pieces):
                page.write_piece(position, piece)
            page.write_outcome(told)
        text = (
            Placed((6,), Provenance.FORCED),
            ContextPiece((7,)),
            Placed((8,), Provenance.FORCED),
        )
        fork = Fork(0, 2, text)
        prefix = fork.prefix_of(of_two.trajectories[0].pieces)
        page = journal.begin(0, 2, episode=2, seed=9, fork=fork, prefix=prefix)
        page.write_outcome(Failure(TASK, "step 1", error))
        asyncio.run(journal.finish(of_two))
    with Journal.read(tmp_path) as read:
        assert read.failed_shares(9) == (share,)
        assert read.given_up(0) == given_up


@pytest.mark.parametrize(
    "table", ["groups", "episodes", "pieces", "trajectories", "versions", "checkpoints", "events"]
)
def test_a_row_that_the_disk_changed_is_found(tmp_path: Path, table: str) -> None:
    with Journal(tmp_path / JOURNAL) as journal:
        asyncio.run(journal.publishing(0))
        record(journal, group(0))
        journal.write(1, {"loss": 0.5})
        train_on(journal, group(0), step=1, version=0)
    with Journal.read(tmp_path) as read:
        assert read.unsound() == []
    column = {
        "versions": "at",
        "checkpoints": "at",
        "events": "at",
        "trajectories": "num_pieces",
    }.get(table, "after")
    if table in ("groups", "episodes", "pieces"):
        column = {"groups": "place", "episodes": "seed", "pieces": "num_tokens"}[table]
    with sqlite3.connect(tmp_path / JOURNAL) as connection:
        connection.execute(
            f"UPDATE {table} SET {column} = {column} + 1 WHERE rowid = (SELECT max(rowid) FROM "
            f"{table})"
        )
    connection.close()
    with Journal.read(tmp_path) as read:
        assert read.unsound() == [f"1 rows of {table} changed after they were written"]
        assert f"1 rows of {table} changed after they were written" in check(read)


@pytest.mark.parametrize(
    "twice, says",
    [
        (
            lambda journal: train_on(journal, group(0), step=2, version=1),
            "UNIQUE constraint failed: consumed.number",
        ),
        (
            lambda journal: train_on(journal, group(9), step=2, version=1),
            "FOREIGN KEY constraint failed",
        ),
        (
            lambda journal: asyncio.run(journal.publishing(0)),
            "UNIQUE constraint failed: versions.version",
        ),
    ],
)
def test_the_tables_refuse_what_may_not_be(
    tmp_path: Path, twice: Callable[[Journal], None], says: str
) -> None:
    with pytest.raises(JournalError, match=says), Journal(tmp_path / JOURNAL) as journal:
        for version in (0, 1):
            asyncio.run(journal.publishing(version))
        record(journal, group(0))
        train_on(journal, group(0), step=1, version=0)
        twice(journal)


KILLED = """
import asyncio, os, signal
from pathlib import Path
from typing import Any, get_args
from tests.durability.test_journal import group, request, record, train_on
from unstale.durability.journal import JOURNAL, Journal
journal = Journal(Path(os.environ["RUN"]) / JOURNAL).__enter__()
asyncio.run(journal.publishing(0))
for number in range(20):
    record(journal, group(number))
    train_on(journal, group(number), step=number, version=0)
journal.add_request(request(20))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_after_sigkill_everything_up_to_the_barrier_is_there(tmp_path: Path) -> None:
    with Forked(KILLED, cwd=ROOT, env={**os.environ, "RUN": str(tmp_path)}) as process:
        assert process.wait() == -signal.SIGKILL, process.output()
    with Journal.read(tmp_path) as read:
        assert check(read) == []
        assert [read.consumed(step) for step in range(20)] == [
            [group(number)] for number in range(20)
        ]
        assert len(read.groups()) in (20, 21)  # the last was written within the window
    with Journal(tmp_path / JOURNAL) as journal:  # and it can be gone on with
        record(journal, group(30))
    with Journal.read(tmp_path) as read:
        assert read.group(30) == group(30) and check(read) == []


def killed_copy(tmp_path: Path, number: int, change: Callable[[bytes], bytes]) -> Path:
    """Return a folder with the journal of a killed writer, after a change of its `-wal` file."""
    killed = tmp_path / "killed"
    if not killed.exists():
        killed.mkdir()
        with Forked(KILLED, cwd=ROOT, env={**os.environ, "RUN": str(killed)}) as process:
            assert process.wait() == -signal.SIGKILL, process.output()
    folder = tmp_path / str(number)
    folder.mkdir()
    (folder / JOURNAL).write_bytes((killed / JOURNAL).read_bytes())
    wal = f"{JOURNAL}-wal"
    (folder / wal).write_bytes(change((killed / wal).read_bytes()))
    return folder


FRAME = 24 + 4096


def test_one_changed_bit_in_the_wal_file_is_refused_with_what_it_hides(tmp_path: Path) -> None:
    size = len((killed_copy(tmp_path, 0, bytes) / f"{JOURNAL}-wal").read_bytes())
    num_frames = (size - 32) // FRAME
    headers = [1, 4, 10, 13, 18, 25, 30]
    frames = [
        32 + FRAME * frame + place
        for frame in (0, 1, num_frames // 2, num_frames - 2, num_frames - 1)
        for place in (2, 6, 9, 14, 17, 22, 24, 1000, 4119)
    ]
    for number, place in enumerate(headers + frames, start=1):

        def flip(held: bytes, place: int = place) -> bytes:
            changed = bytearray(held)
            changed[place] ^= 1 << place % 8
            return bytes(changed)

        folder = killed_copy(tmp_path, number, flip)
        (folder / "metrics.jsonl").write_text('{"step": 19}\n')
        where = f"frame {1 + (place - 32) // FRAME}" if place >= 32 else "its header"
        with pytest.raises(JournalError) as error:
            Journal.read(folder)
        assert f"its -wal file is damaged at {where}, which hides" in str(error.value)
        assert "metrics.jsonl ends at step 19" in str(error.value)
        with (
            pytest.raises(JournalError, match="its -wal file is damaged"),
            Journal(folder / JOURNAL),
        ):
            pass
        assert (folder / f"{JOURNAL}-wal").stat().st_size == size
    with pytest.raises(SystemExit) as ended:
        main.main(["journal", str(folder)])
    assert ended.value.code == 1


def test_a_torn_end_of_the_wal_file_is_accepted(tmp_path: Path) -> None:
    killed_copy(tmp_path, 0, bytes)
    cuts = (1, 100, FRAME - 1, FRAME, FRAME + 30)
    for number, cut in enumerate(cuts, start=1):
        folder = killed_copy(tmp_path, number, lambda held, cut=cut: held[:-cut])  # type: ignore[misc]
        with Journal.read(folder) as read:
            assert check(read) == []
    lost = killed_copy(tmp_path, 9, lambda held: held[: -FRAME + 512] + bytes(FRAME - 512))
    with Journal(lost / JOURNAL) as journal:  # the new frames follow, and old ones stay behind them
        record(journal, group(30))
    with Journal.read(lost) as read:
        assert read.group(30) == group(30) and check(read) == []
    assert wal.find_damage(lost / "none.sqlite") is None
    for ending in ("-shm", "-journal"):
        pipe = lost / f"none.sqlite{ending}"
        os.mkfifo(pipe)
        with pytest.raises(OSError, match=f"none.sqlite{ending} is not a regular file"):
            wal.find_damage(lost / "none.sqlite")
        pipe.unlink()


def full(journal: Journal) -> None:
    journal.transaction([("PRAGMA max_page_count=20", ())])
    for number in range(100):
        record(journal, group(number, ContextPiece(tuple(range(3000)))))


def read_only(journal: Journal) -> None:
    journal.transaction([("PRAGMA query_only=ON", ())])
    journal.flush()
    record(journal, group(0))


def locked(journal: Journal) -> None:
    other = sqlite3.connect(journal.path, isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        record(journal, group(0))
    finally:
        other.close()


@pytest.mark.parametrize(
    "fault, says",
    [
        (full, "database or disk is full"),
        (read_only, "attempt to write a readonly database"),
        (locked, "locked by another process"),
    ],
)
def test_a_fault_while_writing_is_told_at_the_barrier_and_to_who_watches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Journal], None], says: str
) -> None:
    monkeypatch.setattr(writer, "STUCK_S", 2.0)
    path = tmp_path / JOURNAL
    with Journal(path) as journal:
        for _ in range(2):  # and again at every later barrier
            with pytest.raises(JournalError) as error:
                fault(journal)
            said = str(error.value)
            assert said.startswith(f"the journal {path} ") and said.count(JOURNAL) == 1
            assert f"failed: {says}. " in said or "End that process, then resume" in said
        with pytest.raises(JournalError, match=says):
            asyncio.run(journal.watch())


def test_results_are_counted_of_finished_and_of_all_episodes(tmp_path: Path) -> None:
    with Journal(tmp_path / JOURNAL) as journal:
        record(journal, group(0))  # two episodes of one result each
        journal.add_request(request(1))
        page = journal.begin(1, 0, episode=2, seed=7)
        for position, piece in enumerate(
            [ContextPiece((1,)), Sampled((2,), (-0.5,), 0), ContextPiece((3,)), ContextPiece((4,))]
        ):
            page.write_piece(position, piece)
    with Journal.read(tmp_path) as reader:
        assert list(reader.rows(RESULTS)) == [(2, 4)]


@pytest.mark.parametrize("waits", [Journal.flush, Journal.close])
def test_a_barrier_or_the_end_waits_as_long_as_what_is_before_it_is_written(
    waits: Callable[[Journal], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "STUCK_S", 1.5)
    slow, naps = writer._connect(tmp_path / JOURNAL), []
    slow.create_function("nap", 0, lambda: naps.append(time.sleep(0.35)))
    monkeypatch.setattr(writer, "_connect", lambda path: slow)
    with Journal(tmp_path / JOURNAL) as journal:
        journal.transaction([("SELECT nap()", ())] * 5)
        waits(journal)
        assert len(naps) == 5


def test_any_error_of_the_writing_thread_ends_the_run_with_its_text(tmp_path: Path) -> None:
    """The values of trained tokens are packed in that thread."""
    damaged: Any = ["no tokens"]
    with (
        pytest.raises(JournalError, match=r"the journal .* failed: 'str' object has no attribute"),
        Journal(tmp_path / JOURNAL) as journal,
    ):
        journal.commit([], step=1, version=0, tokens=damaged)
        journal.flush()


def test_a_writer_that_does_not_come_back_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "STUCK_S", 0.2)
    with pytest.raises(JournalError, match=r"it is not open"):
        Journal(tmp_path / JOURNAL).flush()
    journal = Journal(tmp_path / JOURNAL)
    slow = writer._connect(tmp_path / JOURNAL)
    slow.create_function("wait", 0, lambda: holding.wait(LIMIT_S))
    holding = threading.Event()
    monkeypatch.setattr(writer, "_connect", lambda path: slow)
    try:
        with pytest.raises(JournalError, match=r"could not be closed in 0.2 s"), journal:
            (thread,) = (thread for thread in threading.enumerate() if thread.name == "journal")
            assert thread.daemon  # it keeps no process from ending
            journal.transaction([("SELECT wait()", ())])
            for barrier in (journal.flush, lambda: asyncio.run(journal.barrier())):
                with pytest.raises(JournalError, match=r"nothing could be committed for 0.2 s"):
                    barrier()
    finally:
        journal.close()  # a second time it waits for nothing
        holding.set()
        thread.join(LIMIT_S)


def damaged(path: Path) -> None:
    """Write some groups, then overwrite all pages in the file but those with the schema."""
    with Journal(path) as journal:
        for number in range(30):
            record(journal, group(number, ContextPiece(tuple(range(900)))))
    held = bytearray(path.read_bytes())
    for start in range(4096, len(held) - 4096, 4096):
        if b"CREATE TABLE" not in held[start : start + 4096]:
            held[start : start + 4096] = b"\xa5" * 4096
    path.write_bytes(held)


def test_a_damaged_page_is_told_to_who_writes_and_to_who_reads(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL
    damaged(path)
    with (
        pytest.raises(JournalError, match=rf"the journal {path} failed: .*malformed"),
        Journal(path) as journal,
    ):
        record(journal, group(40))
    with Journal.read(tmp_path) as read:
        assert check(read)
        with pytest.raises(JournalError, match=rf"the journal {path} failed: .*malformed"):
            list(read.trajectories())


def unusable(tmp_path: Path, kind: str) -> Path:
    match kind:
        case "folder":
            folder = Path("/proc") if os.geteuid() == 0 else tmp_path / "held"
            if folder.name == "held":
                folder.mkdir(mode=0o500)
            return folder / JOURNAL
        case "text":
            (tmp_path / JOURNAL).write_text(
                "no database at all, but long enough to be looked at\n" * 20
            )
        case "format":
            with sqlite3.connect(tmp_path / JOURNAL) as connection:
                connection.execute("PRAGMA user_version=11")
            connection.close()
    return tmp_path / JOURNAL


@pytest.mark.parametrize(
    "kind, says",
    [
        ("folder", "unable to open database file"),
        ("text", "file is not a database"),
        ("format", "its format is 11, this release writes 10"),
    ],
)
def test_what_cannot_be_opened_is_told_at_once(tmp_path: Path, kind: str, says: str) -> None:
    path = unusable(tmp_path, kind)
    with pytest.raises(JournalError, match=f"the journal {path} failed: {says}"), Journal(path):
        pass
    if kind != "folder":
        with pytest.raises(JournalError, match=says.replace("writes", "reads")):
            JournalReader(path)


def test_a_replayed_group_is_recorded_beside_its_first_training(tmp_path: Path) -> None:
    with Journal(tmp_path / JOURNAL) as journal:
        asyncio.run(journal.publishing(0))
        for step in range(3):
            record(journal, group(step))
            again = [step - 1, 0][:step]
            journal.commit([group(step)], step=step, version=step, replayed=again)
            asyncio.run(journal.checkpoint(f"of {step}", step=step, version=step + 1))
        with Journal.read(tmp_path) as read:
            assert [read.replayed(step) for step in range(3)] == [[], [0], [1, 0]]
            assert read.replayed() == [0, 1, 0] and check(read) == []
            assert [[one.number for one in read.consumed(step)] for step in range(3)] == [
                [0],
                [1],
                [2],
            ]
            assert content(read)["groups_replayed"] == 2
        journal.rewind(1, everything=True)
    with Journal.read(tmp_path) as read:
        assert read.replayed() == [0] and check(read) == []


KEPT = KeptSets(np.array([3, 0], np.int64), np.array([2, 3, 70_000], np.int32))


def test_kept_sets_are_read_back_sealed_and_rewound(tmp_path: Path) -> None:
    kept = Sampled((3, 4), (-0.5, -0.25), version=0, kept_sets=KEPT)
    with Journal(tmp_path / JOURNAL) as journal:
        asyncio.run(journal.publishing(0))
        asyncio.run(journal.checkpoint("start", step=0, version=0))
        record(journal, group(0, ContextPiece((1,)), kept, Sampled((5,), (-1.0,), 0)))
        with Journal.read(tmp_path) as read:
            assert check(read) == []
            _, found, plain = read.pieces(1)
        assert isinstance(found, Sampled) and isinstance(plain, Sampled)
        assert found.kept_sets is not None and plain.kept_sets is None
        assert found.kept_sets.sizes.tolist() == [3, 0]
        assert found.kept_sets.ids.tolist() == [2, 3, 70_000]
        journal.rewind(0, everything=True)
    with Journal.read(tmp_path) as read:
        assert check(read) == [] and read.rows("SELECT * FROM kept_sets") == []
    with Journal(tmp_path / JOURNAL) as journal:
        record(journal, group(0, ContextPiece((1,)), kept))
    with closing(sqlite3.connect(tmp_path / JOURNAL)) as connection:
        connection.execute("UPDATE kept_sets SET sets = x'00' WHERE episode = 1")
        connection.commit()
    with Journal.read(tmp_path) as read:
        assert check(read) == ["1 rows of kept_sets changed after they were written"]
        with pytest.raises(JournalError, match="kept_sets of episode 1: a row changed"):
            read.pieces(1)


def test_placed_text_is_read_back_sealed_and_rewound(tmp_path: Path) -> None:
    edit = Edit(1, 2, (70_000, 8))
    placed = (
        ContextPiece((1, 9), Provenance.FORCED),
        Placed((3, 4), Provenance.REWRITTEN, 0, (-0.5, -0.25), edit),
        Placed((6,), Provenance.FORCED),
        Sampled((5,), (-1.0,), 0),
    )
    with Journal(tmp_path / JOURNAL) as journal:
        asyncio.run(journal.publishing(0))
        asyncio.run(journal.checkpoint("start", step=0, version=0))
        record(journal, group(0, *placed))
        with Journal.read(tmp_path) as read:
            assert check(read) == [] and read.pieces(1) == placed
        journal.rewind(0, everything=True)
    with Journal.read(tmp_path) as read:
        assert check(read) == [] and read.rows("SELECT * FROM placed") == []
    with Journal(tmp_path / JOURNAL) as journal:
        record(journal, group(0, *placed))
    with closing(sqlite3.connect(tmp_path / JOURNAL)) as connection:
        connection.execute("UPDATE placed SET stop = 1 WHERE episode = 1 AND stop = 2")
        connection.commit()
    with Journal.read(tmp_path) as read:
        assert check(read) == ["1 rows of placed changed after they were written"]
        with pytest.raises(JournalError, match="placed of episode 1: a row changed"):
            read.pieces(1)


def test_signals_are_read_back_and_sealed(tmp_path: Path) -> None:
    signals = Signals(
        np.array([0.5, 0.25], np.float32),
        np.array([[3, 70_000], [4, 5]], np.int32),
        np.array([[-0.5, -1.5], [-0.25, -2.5]], np.float32),
    )
    told = Sampled((3, 4), (-0.5, -0.25), version=0, signals=signals)
    with Journal(tmp_path / JOURNAL) as journal:
        asyncio.run(journal.publishing(0))
        record(journal, group(0, ContextPiece((1,)), told, Sampled((5,), (-1.0,), 0)))
    with Journal.read(tmp_path) as read:
        assert check(read) == []
        _, found, plain = read.pieces(1)
    assert isinstance(found, Sampled) and isinstance(plain, Sampled)
    assert found.signals is not None and plain.signals is None
    assert found.signals.tobytes() == signals.tobytes()
    with closing(sqlite3.connect(tmp_path / JOURNAL)) as connection:
        connection.execute("UPDATE signals SET signals = x'00' WHERE episode = 1")
        connection.commit()
    with Journal.read(tmp_path) as read:
        assert check(read) == ["1 rows of signals changed after they were written"]
        with pytest.raises(JournalError, match="signals of episode 1: a row changed"):
            read.pieces(1)


def test_exports_name_the_parent_of_a_fork_and_the_source_of_placed_text(tmp_path: Path) -> None:
    told = Placed((3, 4), Provenance.REWRITTEN, 0, (-0.5, -0.25), Edit(1, 1, (9,)))
    fork = Fork(0, 1, (told, ContextPiece((6,)), Placed((7,), Provenance.FORCED)))
    own = (ContextPiece((1,)), Sampled((3, 5), (-0.5, -1.0), 0))
    rest = (ContextPiece((6,)), Sampled((8,), (-1.5,), 0))
    pieces = (*fork.prefix_of(own), *rest)
    ended = (trajectory(*own), replace(trajectory(*pieces, episode=1), fork=fork))
    with Journal(tmp_path / JOURNAL) as journal:
        asyncio.run(journal.publishing(0))
        journal.add_request(request(0))
        for number, each in enumerate(ended):
            page = journal.begin(0, number, episode=number, seed=each.seed, fork=each.fork)
            for position, piece in enumerate(each.pieces):
                page.write_piece(position, piece)
            page.write_outcome(each)
        asyncio.run(journal.finish(Group(TASK, ended)))
    with Journal.read(tmp_path) as read:
        assert check(read) == [] and read.group(0).trajectories == ended
        first, row = export_rows(read, "tokens", str)
        _, text = export_rows(read, "text", str)
    assert first["parent"] is first["forked_at"] is None and first["source_logp"] == [None] * 3
    assert (row["parent"], row["forked_at"]) == (text["parent"], text["forked_at"]) == (0, 1)
    assert row["source_logp"] == [None, -0.5, -0.25, None, None, None, None]
    origins = ["ENVIRONMENT", *["REWRITTEN"] * 2, "ENVIRONMENT", "FORCED", "ENVIRONMENT", "SAMPLED"]
    assert row["provenance"] == origins
    roles = [turn["role"] for turn in text["turns"]]
    assert roles == ["environment", "assistant"] * 3


PLANTED = (
    (
        "DELETE FROM finished WHERE number = 0",
        "row 0 of consumed belongs to a row of finished that is missing",
    ),
    (
        "DELETE FROM groups WHERE number = 0",
        "row 0 of finished belongs to a row of groups that is missing",
    ),
    (
        "DELETE FROM trajectories WHERE episode = 2",
        "group 1 was finished while its episode 2 was open",
    ),
    (
        "DELETE FROM pieces WHERE episode = 2 AND position = 1",
        "episode 2 has 2 pieces, the last at position 2",
    ),
    (
        "DELETE FROM pieces WHERE episode = 2 AND position = 2",
        "episode 2 ended with 3 pieces, but 2 are recorded",
    ),
    (
        "UPDATE pieces SET tokens = x'00' WHERE episode = 1 AND position = 0",
        "episode 1, position 0: the length",
    ),
    (
        "UPDATE pieces SET behavior_logp = x'00' WHERE episode = 1 AND position = 1",
        "episode 1, position 1: the length",
    ),
    ("DELETE FROM versions WHERE version = 0", "version 0 was sampled from but never published"),
    (
        "UPDATE versions SET version = 9 WHERE version = 0",
        "version 1 was published after version 9",
    ),
    (
        "INSERT INTO pieces SELECT episode, 3, provenance, num_tokens, tokens, 1, clean, "
        "behavior_logp, after, seal FROM pieces WHERE episode = 0 AND position = 1;"
        "UPDATE pieces SET version = 2 WHERE episode = 0 AND position = 1",
        "episode 0, position 3: version 1 comes after version 2",
    ),
    (
        "DELETE FROM episodes WHERE episode = 3",
        "row 3 of trajectories belongs to a row of episodes that is missing",
    ),
)


@pytest.mark.parametrize("statements, says", PLANTED)
def test_a_check_finds_what_cannot_be(tmp_path: Path, statements: str, says: str) -> None:
    with Journal(tmp_path / JOURNAL) as journal:
        for number in range(2):
            asyncio.run(journal.publishing(number))
            record(journal, group(number))
            train_on(journal, group(number), step=number, version=number)
    with Journal.read(tmp_path) as read:
        assert check(read) == []
    connection = sqlite3.connect(tmp_path / JOURNAL)
    connection.executescript(statements)
    connection.close()
    with Journal.read(tmp_path) as read:
        assert any(found.startswith(says) for found in check(read))
    with pytest.raises(SystemExit) as end:
        main.main(["journal", str(tmp_path)])
    assert end.value.code == 1


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE t AS SELECT * FROM consumed",
        "CREATE TRIGGER t AFTER INSERT ON pieces BEGIN DELETE FROM pieces; END",
        "CREATE VIEW t AS SELECT load_extension('t')",
        "ALTER TABLE pieces ADD COLUMN more TEXT",
    ],
)
def test_what_has_other_tables_than_a_journal_is_neither_read_nor_gone_on_with(
    tmp_path: Path, statement: str
) -> None:
    with Journal(tmp_path / JOURNAL) as journal:
        record(journal, group(0))
    with sqlite3.connect(tmp_path / JOURNAL) as connection:
        connection.execute(statement)
    connection.close()
    for use in (lambda: Journal(tmp_path / JOURNAL).__enter__(), lambda: Journal.read(tmp_path)):
        with pytest.raises(
            JournalError,
            match=r"journal\.sqlite failed: the database's tables are not those of a journal",
        ):
            use()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, list[Group]]]]:
    """Run the real loop and return the consumed groups. Each taken group is looked up on disk at
    once."""
    folder = tmp_path_factory.mktemp("run")
    parts = make(folder, count(), budget=2)
    take, consume = parts.queue.take, parts.journal.commit
    consumed: list[tuple[int, list[Group]]] = []

    async def looked_up(missing: int) -> list[Group]:
        groups = await take(missing)
        with Journal.read(folder) as read:
            for each in groups:
                assert read.group(each.number) == each
        return groups

    def kept(groups: list[Group], *, step: int, **rest: object) -> None:
        consumed.append((step, list(groups)))
        consume(groups, step=step, **rest)

    parts.queue.take, parts.journal.commit = looked_up, kept  # type: ignore[method-assign]
    run(parts)
    return folder, consumed


def test_a_run_records_what_it_consumed_once_and_before_it_took_it(
    ran: tuple[Path, list[tuple[int, list[Group]]]],
) -> None:
    folder, consumed = ran
    with Journal.read(folder) as read:
        assert check(read) == []
        assert [(step, read.consumed(step)) for step, _ in consumed] == consumed
        assert read.versions() == list(range(13)) and len(consumed) == 12
        handed = read.groups()
        assert [each.number for each in handed] == list(range(len(handed)))
        assert sum(each.ended == "consumed" for each in handed) == 12 * 2
        assert all(each.version == each.step - 1 for each in handed if each.step is not None)


def test_a_journal_that_fails_ends_the_run_with_its_error(tmp_path: Path) -> None:
    parts = make(tmp_path, count())
    parts.journal.transaction([("PRAGMA max_page_count=1", ())])
    with pytest.raises(ExceptionGroup) as failure:
        run(parts)
    assert (
        str(first_error(failure.value))
        == f"the journal {tmp_path / JOURNAL} failed: database or disk is full. Free space on its "
        "disk"
    )


def test_replies_as_short_as_the_demos_cost_under_40_bytes_a_token(tmp_path: Path) -> None:
    """Episodes like the demo's: turns of 6 sampled and 20 context tokens, in groups of 8."""
    rng = np.random.default_rng(0)
    with Journal(tmp_path / JOURNAL) as journal:
        for number in range(60):
            told = []
            for sibling in range(8):
                pieces: list[Piece] = [ContextPiece(tuple(rng.integers(0, 2000, 36).tolist()))]
                for _ in range(6):
                    reply = rng.integers(0, 2000, rng.integers(3, 10)).tolist()
                    pieces.append(
                        Sampled(
                            tuple(reply),
                            tuple(map(float32, -rng.random(len(reply)))),
                            version=number,
                        )
                    )
                    pieces.append(
                        ContextPiece(tuple(rng.integers(0, 2000, rng.integers(8, 30)).tolist()))
                    )
                told.append(trajectory(*pieces, episode=8 * number + sibling))
            record(journal, Group(TASK, tuple(told), number=number))
    with Journal.read(tmp_path) as read:
        assert (
            read.num_bytes / sum(kept.trajectory.num_sampled for kept in read.trajectories()) < 40
        )


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as end:
        main.main(arguments)
    assert end.value.code == code
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_the_verb_shows_what_is_in_it(
    ran: tuple[Path, list[tuple[int, list[Group]]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = said(capsys, "journal", str(ran[0]))
    assert (
        re.search(r"left out of a batch\W+24\b", text)
        and "0 to 12" in text
        and "no problems found" in text
    )
    out = str(tmp_path / "none" / "rows.jsonl")
    assert f"--out {out} cannot be written: No such file" in said(
        capsys, "export-trajectories", str(ran[0]), "--out", out, code=2
    )


def test_the_verbs_say_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds no journal" in said(capsys, "journal", str(tmp_path), code=2)
    assert "needs --out FILE" in said(
        capsys, "export-trajectories", str(tmp_path), "--format", "parquet", code=2
    )
    damaged(tmp_path / JOURNAL)
    assert "malformed" in said(capsys, "export-trajectories", str(tmp_path), code=1)
    assert JOURNAL in said(capsys, "journal", str(tmp_path), code=1)


def test_jsonl_has_one_row_a_trajectory_and_one_entry_a_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = trajectory(
        ContextPiece((1, 2)),
        Sampled((3,), (-0.5,), 0),
        Sampled((4,), (-0.25,), 1),
        ContextPiece((5,), Provenance.FORCED),
        Sampled((6,), (-1.0,), 1, provenance=Provenance.REPLAYED),
    )
    one = Group(TASK, (told,), number=4)
    with Journal(tmp_path / JOURNAL) as journal:
        record(journal, one)
        train_on(journal, one, step=3, version=2)
    expected = {
        "task": "retail/train/17",
        "group": 4,
        "episode": 0,
        "seed": 70,
        "step": 3,
        "versions": [0, 1],
        "rewards": {"r": 1.0},
        "reward": 1.0,
        "success": True,
        "stop": "done",
        "turns": 2,
        "token": [1, 2, 3, 4, 5, 6],
        "behavior_logp": [None, None, -0.5, -0.25, None, -1.0],
        "version": [-1, -1, 0, 1, -1, 1],
        "provenance": ["ENVIRONMENT", "ENVIRONMENT", "SAMPLED", "SAMPLED", "FORCED", "REPLAYED"],
        "turn": [-1, -1, 0, 0, -1, 1],
        "source_logp": [None] * 6,
        "parent": None,
        "forked_at": None,
        "role": None,
        "role_reward": None,
    }
    assert json.loads(said(capsys, "export-trajectories", str(tmp_path))) == expected
    out = tmp_path / "rows.jsonl"
    said(capsys, "export-trajectories", str(tmp_path), "--out", str(out))
    assert json.loads(out.read_text()) == expected


def test_parquet_holds_the_same_rows_as_jsonl(
    ran: tuple[Path, list[tuple[int, list[Group]]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "rows.parquet"
    said(capsys, "export-trajectories", str(ran[0]), "--format", "parquet", "--out", str(out))
    rows = parquet.read_table(out).to_pylist()
    lines = [
        json.loads(line) for line in said(capsys, "export-trajectories", str(ran[0])).splitlines()
    ]
    assert [{**row, "rewards": dict(row["rewards"])} for row in rows] == lines and len(lines) >= 72


def test_without_pyarrow_parquet_says_what_to_install(
    ran: tuple[Path, list[tuple[int, list[Group]]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    out = str(tmp_path / "rows.parquet")
    text = said(
        capsys, "export-trajectories", str(ran[0]), "--format", "parquet", "--out", out, code=2
    )
    assert install("parquet") in text


def test_who_reads_an_export_may_stop_early(tmp_path: Path) -> None:
    """The export is much larger than a pipe's buffer."""
    with Journal(tmp_path / JOURNAL) as journal:
        for number in range(3):
            record(journal, group(number, Sampled((7,) * 5000, (-0.5,) * 5000, version=0)))
    command = f"{sys.executable} -m unstale.cli.main export-trajectories {tmp_path} --format jsonl"
    shell = f"set -o pipefail; {command} | head -c 1"
    done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{", "")


def test_a_folder_with_a_journal_is_not_begun_again(tmp_path: Path) -> None:
    config = small(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / JOURNAL).touch()
    with pytest.raises(ConfigError, match=r"already holds a run \(journal\.sqlite\)"):
        session.train(config, console=Console(file=StringIO()))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [JOURNAL]


def test_a_failure_that_nobody_waits_for_ends_the_run_and_is_its_cause(tmp_path: Path) -> None:
    """The journal fails while no barrier waits; the watcher ends the run."""
    parts = make(tmp_path, count(), budget=1, steps=10_000)
    seen: list[int] = []

    def spoil(groups: object, *, step: int, **rest: object) -> None:
        seen.append(step)
        parts.journal.transaction([("INSERT INTO no_such_table VALUES (1)", ())])

    parts.journal.commit = spoil  # type: ignore[assignment]
    with pytest.raises(ExceptionGroup) as failures:
        asyncio.run(session._supervise(parts, lambda: None))
    assert isinstance(first_error(failures.value), JournalError) and "no_such_table" in str(
        first_error(failures.value)
    )
    assert len(seen) < 100


def test_what_was_going_wrong_stays_the_cause_when_closing_fails_too(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as error, Journal(tmp_path / JOURNAL) as journal:
        journal.transaction([("INSERT INTO no_such_table VALUES (1)", ())])
        raise ZeroDivisionError
    assert any("no_such_table" in note for note in error.value.__notes__)
    with pytest.raises(JournalError, match="no_such_table"), Journal(tmp_path / JOURNAL) as journal:
        journal.transaction([("INSERT INTO no_such_table VALUES (1)", ())])


def test_an_export_is_json_for_everybody(tmp_path: Path) -> None:
    with Journal(tmp_path / JOURNAL) as journal:
        record(journal, group(0, Sampled((7, 8), (-math.inf, -0.5), version=0)))
    out = StringIO()
    with Journal.read(tmp_path) as read:
        write_jsonl(export_rows(read, "tokens", str), out)
    rows = [json.loads(row, parse_constant=pytest.fail) for row in out.getvalue().splitlines()]
    assert [(row["episode"], row["behavior_logp"]) for row in rows] == [
        (episode, [None, -0.5]) for episode in (0, 1)
    ]


def test_a_writer_killed_while_it_made_one_plain_file_is_rolled_back_for_a_reader(
    tmp_path: Path,
) -> None:
    with Journal(tmp_path / JOURNAL) as journal:
        record(journal, group(0))
    code = f"""
import os, sqlite3
connection = sqlite3.connect({str(tmp_path / JOURNAL)!r}, isolation_level=None)
connection.execute("PRAGMA cache_size=1")
connection.execute("BEGIN IMMEDIATE")
connection.execute("UPDATE groups SET seed = 77")
for _ in range(200):
    connection.execute("INSERT INTO events VALUES (NULL, 0.5, 'x', hex(randomblob(2000)), 0, 0)")
os._exit(9)"""
    subprocess.run([sys.executable, "-c", code], check=False)
    assert (tmp_path / f"{JOURNAL}-journal").exists()
    with Journal.read(tmp_path) as read:
        assert read.unsound() == [] and read.events() == [] and read.group(0) == group(0)


def test_a_journal_is_created_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash while it is created leaves a folder that can be used again."""
    path = tmp_path / JOURNAL
    with monkeypatch.context() as patch:
        patch.setattr(writer, "SCHEMA", writer.SCHEMA + "CREATE TABLE broken (")
        with pytest.raises(JournalError, match=rf"the journal {path} failed"), Journal(path):
            pass
    assert not path.exists()
    path.touch()  # what a crash between creating and writing a file leaves
    with Journal(path) as journal:
        asyncio.run(journal.publishing(0))
        record(journal, group(0))
    with Journal.read(tmp_path) as read:
        assert check(read) == [] and read.group(0) == group(0)
    assert [file.name for file in tmp_path.iterdir()] == [JOURNAL]


@pytest.mark.parametrize("keeps", [False, True])
def test_snapshots_that_no_resume_reads_are_deleted_unless_the_run_is_deterministic(
    tmp_path: Path, keeps: bool
) -> None:
    with Journal(tmp_path / JOURNAL, keep_snapshots=keeps) as journal:
        journal.add_request(request(0))
        pages = [journal.begin(0, sibling, episode=sibling, seed=7) for sibling in range(4)]
        for page in pages:
            for num_pieces in (1, 3):
                page.write_snapshot(num_pieces, "a state")
        pages[0].write_outcome(trajectory(ContextPiece((1,)), Sampled((2,), (-0.5,), 0), episode=0))
        pages[1].write_outcome(Failure(TASK, "step 1", "EnvError: gone"))
        pages[2].write_restart("it said something else", turns=1, sampled_tokens=4)
    with Journal.read(tmp_path) as read:
        found = read.rows("SELECT episode, num_pieces FROM snapshots ORDER BY episode, num_pieces")
        every = [(episode, num_pieces) for episode in range(4) for num_pieces in (1, 3)]
        assert found == (every if keeps else [(3, 3)])
        assert read.unsound() == []


@pytest.mark.parametrize("table", ["events", "versions", "snapshots"])
def test_rows_that_were_lost_are_found(tmp_path: Path, table: str) -> None:
    with Journal(tmp_path / JOURNAL) as journal:
        for version in range(2):
            asyncio.run(journal.publishing(version))
            journal.event("something")
        record(journal, group(0))
        journal.begin(0, 0, episode=0, seed=7, again=True).write_snapshot(1, "a state")
    with sqlite3.connect(tmp_path / JOURNAL) as connection:
        before = connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        connection.execute(f"DELETE FROM {table} WHERE rowid = (SELECT max(rowid) FROM {table})")
    connection.close()
    lost = f"{table} has {before - 1} rows, but {before} were written"
    with Journal.read(tmp_path) as read:
        assert read.unsound() == [lost] and lost in check(read)


def removed(path: Path) -> None:
    path.unlink()


def swapped(path: Path) -> None:
    path.rename(path.with_name("aside"))
    path.write_bytes(path.with_name("aside").read_bytes())


def cut(path: Path) -> None:
    os.truncate(path, 4096)


@pytest.mark.parametrize(
    "strike, says",
    [
        (removed, "was removed or replaced while the run wrote to it"),
        (swapped, "was removed or replaced while the run wrote to it"),
        (cut, "was truncated while the run wrote to it: 4,096 bytes are left"),
    ],
)
def test_a_file_that_is_changed_by_somebody_else_is_noticed_at_the_next_commit(
    tmp_path: Path, strike: Callable[[Path], None], says: str
) -> None:
    """SQLite itself writes on, into a file that nobody can open."""
    path = tmp_path / JOURNAL
    with pytest.raises(JournalError) as error, Journal(path) as journal:
        record(journal, group(0))
        strike(path)
        record(journal, group(1))
    said = str(error.value)
    assert says in said and said.count(JOURNAL) == 1 and "esume" in said
