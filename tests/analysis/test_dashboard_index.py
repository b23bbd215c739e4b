"""What is promised of the dashboard's index, its table and its tokens.

- It has what the journal has, also while the run writes, after a kill and after a resume.
- A damaged journal gives a sentence, and one damaged episode hides no other.
- Filters, search, sorting and pages give what a plain search through all episodes gives.
- Texts are read only once somebody searches, and none is left out or read twice.
- A page of 100,000 episodes is read through an index and not by sorting.
- The texts of tokens join to the text of the episode.
"""

import asyncio
import json
import os
import random
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.fake_run import fake_run
from unstale.analysis.dashboard import charts, summary, table, tokens, training
from unstale.analysis.dashboard import database as database_module
from unstale.analysis.dashboard import folders as folders_module
from unstale.analysis.dashboard import index as index_module
from unstale.analysis.dashboard import table as table_module
from unstale.analysis.dashboard.database import COLUMNS, Database
from unstale.analysis.dashboard.events import MAX_EVENT
from unstale.analysis.dashboard.folders import RunFolders, UnknownRun
from unstale.analysis.dashboard.index import RunIndex
from unstale.analysis.dashboard.summary import series, state_of, thin
from unstale.analysis.dashboard.table import BadQuestion, Question, page, parse_filter, statements
from unstale.analysis.dashboard.timeline import spans
from unstale.config import ConfigError
from unstale.durability.journal import JOURNAL, Journal
from unstale.durability.journal.conversations import load_decoder
from unstale.durability.run_folder import EVENTS, METRICS
from unstale.records import (
    ContextPiece,
    Edit,
    Fork,
    Group,
    GroupRequest,
    Placed,
    Provenance,
    Sampled,
    Task,
    Trajectory,
    count_turns,
)
from unstale.token_values import TokenFlag, TokenValues

STEPS = 20


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_run(tmp_path_factory.mktemp("runs") / "first", steps=STEPS)


def fill(index: RunIndex) -> RunIndex:
    """Read all that the run has."""
    while index.update_files() | index.update_journal():
        pass
    return index


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "runs" / "first"))


@pytest.fixture
def filled(run: Path, tmp_path: Path) -> Iterator[RunIndex]:
    index = RunIndex(run, tmp_path / "index.sqlite")
    index.want_words()
    yield fill(index)
    index.close()


def table_of(index: RunIndex) -> list[dict[str, Any]]:
    return list(page(index.database, Question(sort="episode", size=200))["rows"])


def test_every_episode_is_in_the_index_as_the_journal_has_it(filled: RunIndex, run: Path) -> None:
    rows = {row["episode"]: row for row in table_of(filled)}
    with Journal.read(run) as journal:
        stored = list(journal.trajectories())
        consumed = {row.number: (row.step, row.version) for row in journal.groups()}
    assert len(stored) == len(rows) == 4 * STEPS and filled.problems == []
    for each in stored:
        trajectory, row = each.trajectory, rows[each.trajectory.episode]
        sampled = [piece for piece in trajectory.pieces if isinstance(piece, Sampled)]
        step, version = consumed[each.group]
        assert version is not None
        assert row["group_number"] == each.group and row["step"] == step
        assert row["task"] == f"retail/train/{trajectory.task.index}"
        assert (row["outcome"], row["stop"]) == ("trained", trajectory.stop)
        assert (row["reward"], row["success"]) == (trajectory.reward, trajectory.success)
        assert row["figures"] == {"reward:task": trajectory.reward}
        assert (row["tokens"], row["sampled_tokens"]) == (
            len(trajectory),
            sum(len(piece.tokens) for piece in sampled),
        )
        assert row["turns"] == count_turns(trajectory.pieces)
        assert row["lag_max"] == version - min(trajectory.versions)
        assert (row["version_min"], row["version_max"], row["versions"]) == (
            min(trajectory.versions),
            max(trajectory.versions),
            len(trajectory.versions),
        )
        assert row["behavior_logp_min"] == pytest.approx(-0.1)
        assert row["behavior_logp_mean"] == pytest.approx(-0.1)


def test_metrics_and_events_are_in_the_index(filled: RunIndex, run: Path) -> None:
    rows = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    (found,) = series(filled.database, ["reward/mean"], 500).values()
    expected = [(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row]
    assert list(zip(*found, strict=True)) == expected and filled.last_step == STEPS
    events = [json.loads(line) for line in (run / EVENTS).read_text().splitlines()]
    recorded_spans = [event for event in events if event["kind"] == "span"]
    shown = spans(filled.database, 0, 1e9)
    assert sorted((lane, start, end) for lane, start, end, _ in shown["spans"]) == sorted(
        (span["lane"], span["start"], span["end"]) for span in recorded_spans
    )
    part = spans(filled.database, 30.0, 40.0)
    inside = [span for span in recorded_spans if span["end"] >= 30 and span["start"] <= 40]
    assert len(part["spans"]) == part["inside"] == len(inside)
    assert part["total"] == len(recorded_spans)


def test_a_growing_file_is_continued_and_a_replaced_one_is_read_again(
    filled: RunIndex, run: Path
) -> None:
    whole = '{"step": 21, "reward/mean": 0.5}\n'
    with (run / METRICS).open("a") as file:
        file.write(whole + '{"step": 22, "rew')
    assert filled.update_files() and filled.last_step == 21  # half a line waits
    assert not filled.update_files()
    with (run / METRICS).open("a") as file:
        file.write('ard/mean": 0.25}\n')
    assert filled.update_files() and filled.last_step == 22
    (run / "new").write_text('{"step": 1, "reward/mean": 0.125}\n')
    (run / "new").replace(run / METRICS)  # as a resume does
    fill(filled)
    assert series(filled.database, ["reward/mean"], 500) == {"reward/mean": [[1], [0.125]]}
    assert filled.last_step == 1


def test_broken_lines_are_left_out_and_named(filled: RunIndex, run: Path) -> None:
    with (run / METRICS).open("a") as file:
        file.write('nonsense\n{"step": 21, "reward/mean": 1e999, "x/y": true, "loss": 2}\n')
    fill(filled)
    assert filled.last_step == 21
    assert filled.problems == [
        "metrics.jsonl has lines that are not JSON objects; they were left out"
    ]
    assert series(filled.database, ["loss", "x/y"], 10) == {"loss": [[21], [2.0]], "x/y": [[], []]}


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 1e300, "loss": 1}',
        '{"step": 21, "\\ud800": 1}',
        '{"kind": "span", "lane": "\\ud800", "start": 0, "end": 1}',
        '{"kind": "\\ud800", "time": 1}',
        '{"kind": "deep", "time": 1, "x": ' + "[" * 900 + "]" * 900 + "}",
    ],
)
def test_lines_that_cannot_be_stored_are_left_out_and_named(
    filled: RunIndex, run: Path, line: str
) -> None:
    name = EVENTS if "kind" in line else METRICS
    last = {METRICS: '{"step": 22, "loss": 2}', EVENTS: '{"kind": "stopped", "time": 2}'}[name]
    with (run / name).open("a") as file:
        file.write(f"{line}\n{last}\n")
    fill(filled)
    assert filled.problems == [
        f"{name} has lines with numbers or texts that cannot be stored; they were left out"
    ]
    if name == METRICS:
        assert series(filled.database, ["loss"], 500)["loss"][0][-1] == filled.last_step == 22
    else:
        ((kind,),) = filled.database.rows("SELECT kind FROM events ORDER BY id DESC LIMIT 1")
        assert kind == "stopped"


def piece(*ids: int, version: int | None = None) -> ContextPiece | Sampled:
    return ContextPiece(ids) if version is None else Sampled(ids, (-0.5,) * len(ids), version)


def test_an_episode_is_followed_from_its_start_to_its_training(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    task = Task("toy", "train", 0)
    with Journal(run / JOURNAL) as journal:
        index = RunIndex(run, tmp_path / "index.sqlite")
        journal.add_request(GroupRequest(0, task, seed=0, place=0))
        writer = journal.begin(0, 0, episode=0, seed=7)
        other = journal.begin(0, 1, episode=1, seed=8)
        branch = journal.begin(0, 0, episode=2, seed=9, role="judge")
        writer.write_piece(0, piece(1, 2))
        asyncio.run(journal.checkpoint("empty", step=0, version=0))
        fill(index)
        assert [(row["outcome"], row["is_branch"]) for row in table_of(index)] == [
            ("open", False),
            ("open", False),
            ("open", True),
        ]
        assert [row.get("role") for row in table_of(index)] == [None, None, "judge"]
        assert tokens.episode(index, 0)["pieces"][0]["ids"] == [1, 2]
        talks = [{"episode": 0, "role": None}, {"episode": 2, "role": "judge"}]
        assert tokens.episode(index, 0)["conversations"] == talks
        trajectories = []
        for number, each in enumerate((writer, other, branch)):
            pieces = (piece(1, 2), piece(3, version=2), piece(4, 5, version=3))
            for position in range(1 if number == 0 else 0, 3):
                each.write_piece(position, pieces[position])
            ended = Trajectory(pieces, {"r": float(number)}, "done", task, 7 + number, number)
            each.write_outcome(ended)
            trajectories.append(ended)
        group = Group(task, tuple(trajectories), number=0)
        asyncio.run(journal.finish(group))
        fill(index)
        assert [row["outcome"] for row in table_of(index)] == ["waiting"] * 3
        assert all("lag_max" not in row for row in table_of(index))
        copied = Path(shutil.copytree(run, tmp_path / "copied"))  # as after a kill
        files = {path: path.read_bytes() for path in copied.iterdir() if path.name[-4:] != "-shm"}
        assert copied / f"{JOURNAL}-wal" in files
        killed = fill(RunIndex(copied, tmp_path / "killed.sqlite"))
        assert table_of(killed) == table_of(index) and killed.num_ended == 3
        assert {path: path.read_bytes() for path in files} == files
        killed.close()
        journal.commit([group], step=1, version=4)
        asyncio.run(journal.checkpoint("first", step=1, version=4))
        fill(index)
        assert [(row["outcome"], row["step"], row["lag_max"]) for row in table_of(index)] == [
            ("trained", 1, 2)
        ] * 3
        shown = tokens.episode(index, 1)
        assert [(each.get("version"), each.get("lag")) for each in shown["pieces"]] == [
            (None, None),
            (2, 2),
            (3, 1),
        ]
    index.close()


def test_an_episode_names_its_fork_and_its_placed_text(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    told = Placed((3, 4), Provenance.REWRITTEN, 2, (-0.5, -0.25), Edit(1, 1, (9,)))
    pieces = (ContextPiece((1,)), told, Placed((5,), Provenance.FORCED), piece(6, version=3))
    with Journal(run / JOURNAL) as journal:
        journal.add_request(GroupRequest(0, Task("toy", "train", 0), seed=0, place=0))
        journal.begin(0, 0, episode=0, seed=7).write_piece(0, piece(1, 2))
        journal.begin(0, 1, episode=1, seed=8, fork=Fork(0, 1), prefix=pieces)
        asyncio.run(journal.checkpoint("empty", step=0, version=0))
        index = fill(RunIndex(run, tmp_path / "index.sqlite"))
        shown, plain = (tokens.episode(index, number, limit=2) for number in (1, 0))
        rest = tokens.episode(index, 1, start=2)
    assert shown["fork"] == {"parent": 0, "at": 1} and plain["fork"] is None
    _, first = shown["pieces"]
    assert first["placed"] and first["source_version"] == 2 and first["source_logp"] == [-0.5]
    assert first["provenance"] == "rewritten" and first["turn"] == 0 and "version" not in first
    cut, forced, sampled = rest["pieces"]
    assert cut["source_logp"] == [-0.25] and cut["ids"] == [4]
    assert forced["placed"] and "source_logp" not in forced and "placed" not in sampled
    index.close()


def trained(episode: int, flags: tuple[int, ...], *, run: bool = True) -> TokenValues:
    """Return values of three trained tokens. Only the last has an entropy."""
    unknown = np.full(3, np.nan, np.float32)
    return TokenValues(
        group=0,
        episode=episode,
        route="snapshot_old",
        minibatch=0 if run else None,
        log_d=np.array([0.0, -0.25, 0.125], np.float32),
        log_s=np.array([0.5, 0.0, -1.0], np.float32) if run else unknown,
        weight=np.array([1.0, 0.0, 1.5], np.float32),
        advantage=np.array([1.0, 1.0, 0.25], np.float32) if run else np.zeros(3, np.float32),
        entropy=np.array([np.nan, np.nan, 2.0], np.float32) if run else unknown,
        flags=np.array(flags, np.uint8),
    )


def test_values_of_training_are_in_the_table_and_at_each_token(tmp_path: Path) -> None:
    """Both for a group that was trained on before the index was filled, and for one after."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    task = Task("toy", "train", 0)
    flags = (TokenFlag.EXACT, TokenFlag.MASKED, TokenFlag.EXACT | TokenFlag.CLIPPED_LOW)
    with Journal(run / JOURNAL) as journal:
        journal.add_request(GroupRequest(0, task, seed=0, place=0))
        ended = []
        for number in range(2):
            writer = journal.begin(0, number, episode=number, seed=number)
            pieces = (piece(1, 2), piece(3, version=2), piece(9), piece(4, 5, version=3))
            for position, each in enumerate(pieces):
                writer.write_piece(position, each)
            ended.append(Trajectory(pieces, {"r": 1.0 - number}, "done", task, number, number))
            writer.write_outcome(ended[-1])
        group = Group(task, tuple(ended), number=0)
        asyncio.run(journal.finish(group))
        live = fill(RunIndex(run, tmp_path / "live.sqlite"))
        assert tokens.episode(live, 0)["training"] is None
        values = (trained(0, flags), trained(1, flags, run=False))
        journal.commit([group], step=1, version=4, tokens=values)
        asyncio.run(journal.checkpoint("first", step=1, version=4))
        fill(live)
    late = fill(RunIndex(run, tmp_path / "late.sqlite"))
    for index in (live, late):
        first, second = table_of(index)
        expected = {"log_d_abs_max": 0.25, "log_s_abs_max": 1, "advantage": 0.75, "lag_max": 2}
        expected |= {"dropped_tokens": 1, "clipped_tokens": 1}
        assert {name: first[name] for name in expected} == expected
        assert second["advantage"] == 0 and "log_d_abs_max" not in second
        assert page(index.database, Question("log_s_abs_max>=1"))["total"] == 1
        whole = tokens.episode(index, 0)
        assert whole["training"] == {
            "steps": [1],
            "step": 1,
            "route": "snapshot_old",
            "version": 4,
            "minibatch": 0,
            "not_run": "",
            "limits": [],
            "formulas": [],
            "problem": "the options of the run cannot be read: config.json has no option recipe",
        }
        assert ["trained" in each for each in whole["pieces"]] == [False, True, False, True]
        one, two = (each["trained"] for each in whole["pieces"][1::2])
        assert one == {
            "old_logp": [-0.5],
            "logp": [0.0],
            "log_d": [0.0],
            "log_s": [0.5],
            "weight": [1.0],
            "advantage": [1.0],
            "entropy": [None],
            "outcome": ["kept"],
            "exact": [True],
        }
        assert two["old_logp"] == [-0.75, -0.375] and two["logp"] == [-0.75, -1.375]
        assert two["outcome"] == ["masked", "clipped_low"] and two["entropy"] == [None, 2.0]
        assert two["exact"] == [False, True]
        (part,) = tokens.episode(index, 0, start=5, limit=1)["pieces"]
        assert part["trained"] == {name: values[1:] for name, values in two.items()}
        skipped = tokens.episode(index, 1)
        assert skipped["training"]["not_run"] == "its advantages are all 0"
        assert skipped["pieces"][1]["trained"]["logp"] == [None]
        assert skipped["pieces"][1]["trained"]["outcome"] == ["skipped"]
        index.close()


def test_a_replayed_episode_has_the_values_and_the_lags_of_each_step(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    task = Task("toy", "train", 0)
    kept, masked = (TokenFlag.EXACT,) * 3, (TokenFlag.EXACT, TokenFlag.EXACT, TokenFlag.MASKED)
    with Journal(tmp_path / JOURNAL) as journal:
        journal.add_request(GroupRequest(0, task, seed=0, place=0))
        writer = journal.begin(0, 0, episode=0, seed=0)
        pieces = (piece(1, 2), piece(4, 5, 6, version=3))
        for position, each in enumerate(pieces):
            writer.write_piece(position, each)
        ended = Trajectory(pieces, {"r": 1.0}, "done", task, 0, 0)
        writer.write_outcome(ended)
        group = Group(task, (ended,), number=0)
        asyncio.run(journal.finish(group))
        journal.commit([group], step=1, version=4, tokens=[trained(0, kept)])
        journal.commit([], step=5, version=8, replayed=[0], tokens=[trained(0, masked)])
        asyncio.run(journal.checkpoint("first", step=5, version=8))
    index = fill(RunIndex(tmp_path, tmp_path / "index.sqlite"))
    for step, used, lag, outcome in (
        (None, 1, 1, ["kept"] * 3),
        (1, 1, 1, ["kept"] * 3),
        (5, 5, 5, ["kept", "kept", "masked"]),
    ):
        found = tokens.episode(index, 0, step=step)
        assert (found["training"]["step"], found["training"]["steps"]) == (used, [1, 5])
        assert found["pieces"][1]["lag"] == lag
        assert found["pieces"][1]["trained"]["outcome"] == outcome
    with pytest.raises(BadQuestion, match=r"step 4 did not train on episode 0; these did: 1, 5"):
        tokens.episode(index, 0, step=4)
    index.close()


def test_episodes_that_a_resume_deleted_leave_the_index(filled: RunIndex, run: Path) -> None:
    with sqlite3.connect(run / JOURNAL) as journal:
        for name in ("pieces", "trajectories", "episodes"):
            journal.execute(f"DELETE FROM {name} WHERE episode > 50")
    journal.close()
    fill(filled)
    assert [row["episode"] for row in table_of(filled)] == list(range(1, 51))
    shutil.rmtree(run)
    fake_run(run, steps=3, seed=5)  # another run with the same name
    fill(filled)
    assert len(table_of(filled)) == 12 and filled.last_step == 3


def test_groups_that_a_resume_trains_on_again_have_their_new_values(
    filled: RunIndex, run: Path
) -> None:
    """A resume from an older checkpoint takes back what was trained on, and keeps the episodes."""
    with closing(sqlite3.connect(run / JOURNAL)) as journal:
        journal.execute(f"DELETE FROM consumed WHERE step > {STEPS - 3}")
        journal.commit()
        fill(filled)
        found = table_of(filled)
        assert max(row["step"] for row in found if "step" in row) == STEPS - 3
        assert {row["outcome"] for row in found if "step" not in row} == {"waiting"}
        journal.execute(f"UPDATE consumed SET version = version + 5 WHERE step = {STEPS - 3}")
        journal.commit()
    again = {row["episode"]: row["lag_max"] for row in table_of(fill(filled)) if "step" in row}
    for row in found:
        if "step" in row:
            assert again[row["episode"]] == row["lag_max"] + 5 * (row["step"] == STEPS - 3)


def test_small_parts_give_the_same_index(
    filled: RunIndex, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "CHUNK_EPISODES", 7)
    monkeypatch.setattr(index_module, "CHUNK_TOKENS", 500)
    small = RunIndex(run, tmp_path / "small.sqlite")
    assert small.update_journal() and 0 < small.num_ended < 7 and not small.is_complete
    with pytest.raises(tokens.NotYet, match="episode 70 is not read yet"):
        tokens.episode(small, 70)
    fill(small)
    assert table_of(small) == table_of(filled) and small.is_complete
    os.utime(run / JOURNAL)
    small.look_again()
    assert not small.is_complete, "the journal has changed"
    small.close()


def test_a_run_is_read_without_a_pause_and_sorted_on_demand(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update returns False only when nothing is left, because the next one is a second later.
    A column by which many episodes were sorted has its index after the next update."""
    monkeypatch.setattr(index_module, "CHUNK_EPISODES", 3)
    index = RunIndex(run, tmp_path / "index.sqlite")

    def indexed() -> set[str]:
        found = index.database.rows("SELECT name FROM sqlite_master WHERE type = 'index'")
        return {name for (name,) in found} & {f"episodes_by_{each.name}" for each in COLUMNS}

    while index.update_journal():
        pass
    assert index.is_complete and index.num_ended == 4 * STEPS
    first = page(index.database, Question(sort="reward"))
    page(index.database, Question(sort="fact:calls"))
    assert not index.update_journal() and indexed() == {"episodes_by_group_number"}
    monkeypatch.setattr(table_module, "SORTED_QUICKLY", 20)
    page(index.database, Question(sort="stop", filter="episode<=20"))
    assert page(index.database, Question(sort="reward")) == first
    assert index.update_journal() and not index.update_journal()
    assert indexed() == {"episodes_by_group_number", "episodes_by_reward"}
    assert page(index.database, Question(sort="reward")) == first
    (run / JOURNAL).touch()
    assert not index.update_journal()
    index.close()


def test_one_damaged_episode_hides_no_other(run: Path, tmp_path: Path) -> None:
    with sqlite3.connect(run / JOURNAL) as journal:
        journal.execute("UPDATE trajectories SET rewards = 'nonsense' WHERE episode = 3")
        journal.execute("UPDATE pieces SET tokens = x'00' WHERE episode = 5")
    journal.close()
    index = fill(RunIndex(run, tmp_path / "index.sqlite"))
    rows = table_of(index)
    assert len(rows) == 4 * STEPS
    damaged = {row["episode"]: row["note"] for row in rows if row["outcome"] == "damaged"}
    assert damaged.keys() == {3, 5} and all(JOURNAL in note for note in damaged.values())
    with pytest.raises(RuntimeError, match="episode 5"):
        tokens.episode(index, 5)
    group = tokens.group(index, rows[4]["group_number"])
    assert ["problem" in member for member in group["members"]] == [True, False, False, False]
    index.close()


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda path: path.write_bytes(b"not a database" * 100), "failed: file is not a database"),
        (lambda path: path.unlink(), "is missing, so there are no episodes"),
        (
            lambda path: path.with_name(f"{JOURNAL}-journal").write_bytes(b"x"),
            "`unstale journal` undoes it",
        ),
        (
            lambda path: (path.rename(path.with_name("real")), path.symlink_to("real")),
            "is a link, and links are not followed",
        ),
    ],
)
def test_a_journal_that_cannot_be_read_is_a_sentence(
    harm: Any, sentence: str, run: Path, tmp_path: Path
) -> None:
    harm(run / JOURNAL)
    index = fill(RunIndex(run, tmp_path / "index.sqlite"))
    assert len(index.problems) == 1 and sentence in index.problems[0]
    assert index.is_complete and index.num_rows == STEPS + 1
    index.close()


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal"])
@pytest.mark.parametrize("kind", ["fifo", "directory", "link"])
def test_a_strange_file_of_a_journal_is_not_opened(
    kind: str, suffix: str, run: Path, tmp_path: Path
) -> None:
    path = run / f"{JOURNAL}{suffix}"
    path.unlink(missing_ok=True)
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "link":
            path.symlink_to("elsewhere")
    before = sorted(run.rglob("*"))
    index = fill(RunIndex(run, tmp_path / "index.sqlite"))
    (problem,) = index.problems
    expected = "is a link" if kind == "link" else "is not a regular file"
    assert problem.startswith(f"{path.name} {expected}")
    assert index.is_complete and index.num_rows == STEPS + 1
    assert sorted(run.rglob("*")) == before
    index.close()


def test_the_files_of_a_killed_run_are_read_and_left_as_they_are(tmp_path: Path) -> None:
    """A kill leaves the write-ahead log. Its shared file is not written, and not created."""
    live, killed, copied = (tmp_path / name for name in ("live", "killed", "copied"))
    live.mkdir()
    with Journal(live / JOURNAL) as journal:
        journal.add_request(GroupRequest(0, Task("toy", "train", 0), seed=0, place=0))
        journal.begin(0, 0, episode=0, seed=7)
        asyncio.run(journal.checkpoint("empty", step=0, version=0))
        shutil.copytree(live, killed)
    shutil.copytree(killed, copied)
    (copied / f"{JOURNAL}-shm").unlink()

    def content(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    for folder, problem in ((killed, ""), (copied, "`unstale journal` creates the missing ones")):
        assert f"{JOURNAL}-wal" in content(folder)
        (folder / "config.json").write_text("{}")
        before = content(folder)
        index = fill(RunIndex(folder, tmp_path / f"{folder.name}.sqlite"))
        assert problem in index.problem and bool(problem) == bool(index.problem)
        assert index.num_episodes == (0 if problem else 1)
        assert content(folder) == before
        index.close()


def value_of(row: dict[str, Any], name: str) -> Any:
    return row["figures"].get(name) if ":" in name else row.get(name)


def holds(row: dict[str, Any], condition: tuple[str, str, Any]) -> bool:
    name, operator, value = condition
    found = value_of(row, name)
    if found is None:
        return False
    return {
        "=": lambda: found == value,
        "!=": lambda: found != value,
        "<": lambda: found < value,
        "<=": lambda: found <= value,
        ">": lambda: found > value,
        ">=": lambda: found >= value,
        "~": lambda: str(value).lower() in str(found).lower(),
    }[operator]()


def synthetic(database: Database, count: int, rng: random.Random) -> None:
    """Write episodes with random columns, some of them without a value."""
    names = ", ".join(column.name for column in COLUMNS)
    marks = ", ".join("?" * (len(COLUMNS) + 3))

    def random_value(column: str, kind: str, episode: int) -> Any:
        if column == "episode":
            return episode
        if column == "group_number":
            return episode // 8
        if column not in ("outcome", "task") and rng.random() < 0.1:
            return None
        return rng.choice("abc%_") if kind == "text" else rng.choice((0.0, 0.5, 1.0, 2.0, -3.25))

    with database.write() as writer:
        writer.executemany(
            f"INSERT INTO episodes ({names}, seed, is_branch, note) VALUES ({marks})",
            (
                [random_value(column.name, column.kind, episode) for column in COLUMNS] + [0, 0, ""]
                for episode in range(count)
            ),
        )
        writer.executemany(
            "INSERT INTO figures VALUES (?, 'fact:calls', ?)",
            ((episode, float(rng.randrange(4))) for episode in range(0, count, 2)),
        )


@pytest.mark.costly
def test_pages_are_those_of_a_plain_search(tmp_path: Path) -> None:
    rng = random.Random(0)
    database = Database(tmp_path / "index.sqlite")
    synthetic(database, 300, rng)
    everything = page(database, Question(sort="episode", size=200))["rows"]
    everything += page(database, Question(sort="episode", size=200, page=1))["rows"]
    assert [row["episode"] for row in everything] == list(range(300))
    several = 0
    for _ in range(400):
        conditions = []
        for _ in range(rng.randrange(3)):
            column = rng.choice(COLUMNS)
            if rng.random() < 0.2:
                conditions.append(("fact:calls", rng.choice(("=", "<", ">=")), rng.randrange(4)))
            elif column.kind == "text":
                operator = rng.choice(("=", "!=", "~"))
                conditions.append((column.name, operator, rng.choice("abc%_")))
            else:
                operator = rng.choice(("=", "!=", "<", "<=", ">", ">="))
                conditions.append((column.name, operator, rng.choice((0.0, 0.5, 1.0, 2.0))))
        sort = rng.choice([*(column.name for column in COLUMNS), *["fact:calls"] * 5, "reward:x"])
        is_down = rng.random() < 0.5
        expected = [row for row in everything if all(holds(row, each) for each in conditions)]
        valued = [row for row in expected if value_of(row, sort) is not None]
        valued.sort(key=lambda row: (value_of(row, sort), row["episode"]), reverse=is_down)
        rest = [row for row in expected if value_of(row, sort) is None]
        rest.sort(key=lambda row: row["episode"], reverse=is_down)
        wanted = [row["episode"] for row in valued + rest]
        text = " ".join(f"{name}{operator}{value}" for name, operator, value in conditions)
        size = rng.choice((7, 50, 200))
        shown = []
        for number in range(len(wanted) // size + 1):
            found = page(
                database, Question(text, sort="-" * is_down + sort, page=number, size=size)
            )
            assert found["total"] == len(wanted), text
            shown += [row["episode"] for row in found["rows"]]
        assert shown == wanted, (text, sort, is_down)
        several += 1 < len(wanted) < 300
    assert several > 100
    database.close()


def test_search_finds_the_conversations_with_all_words(filled: RunIndex, run: Path) -> None:
    decode = load_decoder(run)
    with Journal.read(run) as journal:
        texts = {
            stored.trajectory.episode: decode(
                [token for each in stored.trajectory.pieces for token in each.tokens]
            ).lower()
            for stored in journal.trajectories()
        }
    for search, words in (
        ("Mia", ("mia",)),
        ("desk Noah", ("desk", "noah")),
        ('"oak desk"', ("oak desk",)),
        ("kettle", ("kettle",)),
        ("nowhere", ("nowhere",)),
    ):
        found = page(filled.database, Question(search=search, sort="episode", size=200))["rows"]
        expected = [number for number, text in texts.items() if all(word in text for word in words)]
        assert [row["episode"] for row in found] == expected, search
    assert page(filled.database, Question(search='*"^ - OR'))["total"] == 0
    assert page(filled.database, Question(search='  "" '))["total"] == 4 * STEPS


def test_texts_are_read_only_for_a_search(
    filled: RunIndex, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that were left out are read when a search is wanted, and later ones with their episode.
    The index then finds what one finds that had all from the beginning."""
    monkeypatch.setattr(index_module, "CHUNK_EPISODES", 7)
    index = fill(RunIndex(run, tmp_path / "late.sqlite"))
    question = Question(search="kettle", sort="episode", size=200)
    assert index.is_idle and index.num_searchable == 0
    assert index.database.rows("SELECT count(*) FROM words WHERE words MATCH 'kettle'") == [(0,)]
    index.want_words()
    assert index.lacks_words and not index.is_idle
    assert index.update_journal() and index.num_searchable == 7
    fill(index)
    assert index.is_idle and index.num_searchable == 4 * STEPS
    assert page(index.database, question) == page(filled.database, question)
    assert page(index.database, question)["total"] > 0
    index.close()


def test_a_failed_transaction_leaves_no_text_out_and_adds_none_twice(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = RunIndex(run, tmp_path / "index.sqlite")
    copy = index_module._copy_consumed

    def fail(*given: Any) -> Any:
        raise ValueError("the disk is gone")

    monkeypatch.setattr(index_module, "_copy_consumed", fail)
    index.update_journal()
    assert index.problem == "the disk is gone" and index.num_ended == 0
    monkeypatch.setattr(index_module, "_copy_consumed", copy)
    (run / JOURNAL).touch()
    index.want_words()
    fill(index)
    assert index.num_searchable == index.num_ended == 4 * STEPS
    ((count, distinct),) = index.database.rows(
        "SELECT count(rowid), count(DISTINCT rowid) FROM words WHERE words MATCH 'the'"
    )
    assert count == distinct
    index.close()


def test_episodes_are_counted_without_being_copied(run: Path, tmp_path: Path) -> None:
    index = RunIndex(run, tmp_path / "index.sqlite")
    index.count_episodes()
    changes = index.changes
    index.count_episodes()
    assert (index.num_started, index.num_episodes, index.is_complete) == (4 * STEPS, 0, False)
    assert index.changes == changes > 0
    fill(index)
    index.count_episodes()
    assert index.is_complete and index.num_episodes == 4 * STEPS
    (run / JOURNAL).unlink()
    index.count_episodes()
    assert index.problem.startswith(f"{JOURNAL} is missing") and not index.is_complete
    index.close()


def test_connections_for_reading_are_kept_and_bounded(tmp_path: Path) -> None:
    databases = [Database(tmp_path / f"{number}.sqlite") for number in range(12)]

    def opened() -> int:
        links = Path("/proc/self/fd").iterdir()
        return sum(os.readlink(link).endswith(".sqlite") for link in links if os.path.islink(link))

    for database in databases:
        database.close_writer()
        assert database.rows("SELECT count(*) FROM episodes") == [(0,)]
    assert opened() == database_module.MAX_IDLE
    with pytest.raises(sqlite3.OperationalError):
        databases[-1].rows("SELECT nothing FROM nowhere")
    for database in databases:
        assert database.rows("SELECT count(*) FROM episodes") == [(0,)]
        database.close()
    assert opened() == 0


def test_the_columns_of_training_are_those_of_each_episode_alone() -> None:
    rng = np.random.default_rng(3)

    def values(episode: int, count: int, minibatch: int | None) -> TokenValues:
        numbers = {
            name: rng.normal(size=count).astype(np.float32)
            for name in ("advantage", "log_d", "weight", "log_s", "entropy")
        }
        numbers["log_d"][: count // 3] = np.nan
        flags = rng.integers(0, 128, size=count).astype(np.uint8)
        return TokenValues(
            group=1, episode=episode, route="rollout", minibatch=minibatch, flags=flags, **numbers
        )

    given = [
        values(1, 5, 0),
        values(2, 0, 0),
        values(3, 40, None),
        values(4, 1, 1),
        values(5, 9, 0),
    ]
    given[4].log_s[:] = np.inf
    found = training.measure(given)
    for each in given:
        row: dict[str, Any] = {"advantage": None}
        if len(each.flags):
            row["advantage"] = pytest.approx(float(each.advantage.astype(float).mean()))
        if each.minibatch is not None and len(each.flags):
            for name in ("log_d", "log_s"):
                sizes = [abs(x) for x in getattr(each, name).tolist() if np.isfinite(x)]
                row[f"{name}_abs_max"] = max(sizes, default=None)
            dropped = each.has(training.DROPPED)
            row["dropped_tokens"] = int(dropped.sum())
            row["clipped_tokens"] = int((each.has(training.CLIPPED) & ~dropped).sum())
        assert found[each.episode] == row
    assert training.measure([]) == {}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("reward", "cannot read the condition 'reward'"),
        ("rewad>1", "there is no column 'rewad'"),
        ("reward>high", "reward is a number"),
        ("reward~1", "reward is a number"),
        ("fact:calls=many", "fact:calls is a number"),
        ("stop='done", "open quotation mark"),
        ("reward>1; DROP TABLE episodes", "reward is a number"),
        ("reward>1 " * 21, "at most 20 conditions, got 21"),
    ],
)
def test_a_wrong_filter_is_explained(text: str, sentence: str) -> None:
    with pytest.raises(BadQuestion, match="^" + "(?s:.)*" + sentence):
        parse_filter(text)


@pytest.mark.parametrize(
    "wrong", [{"size": 0}, {"size": 201}, {"page": -1}, {"sort": "note"}, {"sort": "--reward"}]
)
def test_a_wrong_page_is_explained(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadQuestion, match=r"must be"):
        Question(**wrong)


@pytest.mark.costly
def test_a_page_of_100_000_episodes_is_read_without_sorting(tmp_path: Path) -> None:
    """SQLite's steps are counted: the page itself takes few, and the count of all matches some for
    each episode. A sort of all would take more, and its plan would name it."""
    database = Database(tmp_path / "index.sqlite")
    count = 100_000
    synthetic(database, count, random.Random(1))
    for column in COLUMNS:
        page(database, Question(sort=column.name))
    while database.make_index():
        pass
    for name in (*(column.name for column in COLUMNS), "fact:calls"):
        for order in ("", "-"):
            question = Question(sort=order + name, size=50)
            total, parts = statements(question)
            for part in parts:
                plan = database.rows(f"EXPLAIN QUERY PLAN {part.sql} LIMIT 50", part.parameters)
                assert not [row for row in plan if "ORDER BY" in row[-1]], (name, plan)
                assert steps_of(database, f"{part.sql} LIMIT 50", part.parameters) < 20_000
            assert steps_of(database, total.sql, total.parameters) < 12 * count
    for sort in ("-step", "fact:calls"):
        filtered = Question("reward>=1 stop=a fact:calls>1", sort=sort, size=50)
        total, parts = statements(filtered)
        for part in (total, *parts):
            assert steps_of(database, part.sql, part.parameters) < 60 * count
    found = page(database, Question("episode>=99990", sort="-behavior_logp_min", size=200))
    assert found["total"] == 10
    assert page(database, Question(sort="reward", page=count // 50 - 1))["rows"][-1]
    database.close()


def steps_of(database: Database, statement: str, parameters: tuple[Any, ...]) -> int:
    """Return about how many instructions SQLite's virtual machine runs for a statement."""
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 100

    with database.read() as reader:
        reader.set_progress_handler(count, 100)
        reader.execute(statement, parameters).fetchall()
        reader.set_progress_handler(None, 0)
    return steps


def test_long_series_keep_their_peaks() -> None:
    rows = [(step, 1.0) for step in range(10_000)]
    rows[1234], rows[7777] = (1234, 50.0), (7777, -3.0)
    kept = thin(rows, 100)
    assert len(kept) <= 102 and {(1234, 50.0), (7777, -3.0), (0, 1.0), (9999, 1.0)} <= set(kept)
    assert kept == sorted(kept) and thin(rows[:100], 100) == rows[:100]


def test_the_state_of_a_run(filled: RunIndex, run: Path) -> None:
    now = (run / METRICS).stat().st_mtime
    assert state_of(filled, now=now)["state"] == "stopped"  # with another reason than "finished"
    with (run / EVENTS).open("a") as file:
        file.write('{"time": 1, "kind": "resumed"}\n')
    fill(filled)
    assert state_of(filled, now=now + 100)["state"] == "live"
    assert state_of(filled, now=now + 100_000)["state"] == "silent"
    with (run / EVENTS).open("a") as file:
        file.write('{"time": 2, "kind": "stopped", "reason": "finished", "detail": "done"}\n')
    fill(filled)
    ended = state_of(filled, now=now)
    assert (ended["state"], ended["detail"]) == ("finished", "done")


def test_tokens_of_an_episode_in_parts_are_those_of_the_whole(filled: RunIndex) -> None:
    whole = tokens.episode(filled, 7)
    ids = [token for each in whole["pieces"] for token in each["ids"]]
    parts = []
    for start in range(0, len(ids), 13):
        part = tokens.episode(filled, 7, start, 13)
        assert part["num_tokens"] == len(ids)
        found = [token for each in part["pieces"] for token in each["ids"]]
        places = [each["start"] for each in part["pieces"]]
        assert places[0] == start and len(found) <= 13
        parts += found
    assert parts == ids
    with pytest.raises(BadQuestion, match="start must be >= 0"):
        tokens.episode(filled, 7, -1)
    with pytest.raises(tokens.UnknownEpisode, match="the run has no episode 4711"):
        tokens.episode(filled, 4711)


def test_siblings_are_compared_with_one_that_finished(filled: RunIndex) -> None:
    number = table_of(filled)[0]["group_number"]
    found = tokens.group(filled, number)
    assert found["compared_with"] == found["members"][0]["episode"]
    streams = [
        [token for each in member["pieces"] for token in each["ids"]] for member in found["members"]
    ]
    assert len(streams) == 4 and found["num_episodes"] == 4
    for member, stream in zip(found["members"], streams, strict=True):
        same = member["first_difference"]
        assert (same is None) == (stream == streams[0]) and member["window"] is None
        if same is not None:
            assert stream[:same] == streams[0][:same]
            assert stream[same : same + 1] != streams[0][same : same + 1]
    assert all(
        stream[: found["common_tokens"]] == streams[0][: found["common_tokens"]]
        for stream in streams
    )
    with pytest.raises(tokens.UnknownEpisode, match="the run has no group 4711"):
        tokens.group(filled, 4711)


def test_a_late_difference_is_found_and_an_unfinished_sibling_is_not_the_measure(
    tmp_path: Path,
) -> None:
    """The prompt has 4,000 tokens, so the first 3,000 of the siblings are equal."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    task = Task("toy", "train", 0)
    prompt = piece(*range(4000))
    replies = {2: (7,) * 900, 3: (7, 7, 8, *(9,) * 900), 4: (7,) * 900, 5: (7,) * 500}
    with Journal(run / JOURNAL) as journal:
        journal.add_request(GroupRequest(0, task, seed=0, place=0))
        journal.begin(0, 0, episode=0, seed=0)
        journal.begin(0, 1, episode=1, seed=1).write_piece(0, piece(1, 2))
        for number, reply in replies.items():
            writer = journal.begin(0, number, episode=number, seed=number)
            pieces = (prompt, piece(*reply, version=1))
            for position, each in enumerate(pieces):
                writer.write_piece(position, each)
            writer.write_outcome(Trajectory(pieces, {}, "done", task, number, number))
        asyncio.run(journal.checkpoint("first", step=1, version=1))
    index = fill(RunIndex(run, tmp_path / "index.sqlite"))
    found = tokens.group(index, 0)
    assert (found["compared_with"], found["common_tokens"]) == (2, 0)
    differences = [each["first_difference"] for each in found["members"]]
    assert differences == [None, 0, None, 4002, None, 4500]
    windows = [each["window"] for each in found["members"]]
    assert [bool(each) for each in windows] == [False, False, True, True, False, True]
    for member, start, end in ((2, 3902, 4402), (3, 3902, 4402), (5, 4400, 4500)):
        window = windows[member]
        ids = [token for each in window["pieces"] for token in each["ids"]]
        assert (window["start"], window["end"], len(ids)) == (start, end, end - start)
        assert window["pieces"][0]["start"] == start
    assert 8 in windows[3]["pieces"][1]["ids"]
    assert all(each.get("end", 0) <= tokens.MAX_SIBLING_TOKENS for each in found["members"])
    index.close()


def test_texts_of_tokens_join_to_the_text_of_all() -> None:
    """A character of several tokens belongs to the first; a tokenizer may drop a leading space."""
    data = "größer €5 😀 <end>".encode()
    by_byte = list(data)

    def decode(ids: Any) -> str:
        return bytes(ids).decode(errors="replace")

    parts = tokens.texts(by_byte, decode)
    assert "".join(parts) == data.decode() and parts[:4] == ["g", "r", "ö", ""]
    broken = [0xF0, 0x9F, 65]  # half a character
    assert "".join(tokens.texts(broken, decode)) == decode(broken)
    words = ["▁a", "▁b", "c", "▁d"]

    def sentencepiece(ids: Any) -> str:
        return "".join(words[each] for each in ids).replace("▁", " ").removeprefix(" ")

    assert tokens.texts([0, 1, 2, 3], sentencepiece) == ["a", " b", "c", " d"]


def test_every_metric_has_one_plot_and_is_documented() -> None:
    doc = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    own = [
        name for each in charts.SECTIONS for chart in each.charts for name in chart.lines.values()
    ]
    assert len(own) == len(set(own)) and [name for name in own if f"`{name}`" not in doc] == []
    names = [*own, "reward/success_mean", "env/turns_mean", "replay/groups", "step", "time_s"]
    names += [f"correction/log_d_abs_mean/lag_{lag}" for lag in range(3)]
    found = charts.sections(names)
    lines = [
        line["metric"]
        for section in found
        for chart in section["charts"]
        for line in chart["lines"]
    ]
    assert sorted(lines) == sorted(set(names) - {"step", "time_s"})
    by_name = {section["name"]: section for section in found}
    assert by_name["ratios"]["charts"][-1]["title"] == "correction/log_d_abs_mean by lag"
    assert {"rewards", "environment", "other-replay"} <= by_name.keys()
    assert charts.sections([]) == []


def test_only_run_folders_below_the_root_have_names(run: Path, tmp_path: Path) -> None:
    root = run.parent
    shutil.copytree(run, root / "study" / "arm" / "seed0")
    (root / "empty").mkdir()
    outside = Path(shutil.copytree(run, tmp_path / "outside"))
    (root / "linked").symlink_to(outside)
    (root / "study" / "linked").symlink_to(outside)
    folders = RunFolders(root)
    assert folders.names() == ["first", "study/arm/seed0"]
    assert folders.problem.startswith("linked is a link, and links are not followed: start the")
    assert folders.path("study/arm/seed0") == root.resolve() / "study" / "arm" / "seed0"
    wrong = ["", ".", "..", "../outside", "first/..", "first/../first", "/first", str(outside)]
    wrong += ["linked", "study/linked", "empty", "first\0", "first/", "study//arm", "a/b/c/d/e/f"]
    for name in wrong:
        with pytest.raises(UnknownRun):
            folders.path(name)
    only = RunFolders(run)
    assert only.names() == ["first"] and only.path("first") == run.resolve()
    with pytest.raises(UnknownRun):
        only.path("study/arm/seed0")
    with pytest.raises(ConfigError, match="it does not exist"):
        RunFolders(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="it is a file"):
        RunFolders(run / METRICS)


@pytest.mark.parametrize(("limit", "shown"), [("MAX_RUNS", 2), ("MAX_VISITED", 1)])
def test_runs_beyond_the_limit_are_named_as_missing(
    run: Path, limit: str, shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two runs allowed the third is missing; of two folders, one is no run."""
    shutil.copytree(run, run.parent / "second")
    shutil.copytree(run, run.parent / "third")
    (run.parent / "a").mkdir()
    monkeypatch.setattr(folders_module, limit, 2)
    folders = RunFolders(run.parent)
    assert folders.names() == ["first", "second"][:shown]
    assert f"only the first {shown} runs are shown" in folders.problem
    monkeypatch.setattr(folders_module, limit, 4)
    assert len(folders.names()) == 3 and folders.problem == ""


def test_columns_are_described() -> None:
    assert all(column["about"] for column in table.columns())


def test_a_long_event_is_shortened_and_a_damaged_one_is_left_out(
    filled: RunIndex, run: Path
) -> None:
    error = "x" * 150_000
    many = [[error[:1000]] * 200]
    before = summary.failures(filled.database)["count"]
    with (run / EVENTS).open("a") as file:
        for more in ({"error": error}, {"error": error, "final": False}, {"many": many}):
            event = {"kind": "episode_failed", "time": 1.0, "episode": 7, **more}
            file.write(json.dumps(event) + "\n")
    fill(filled)
    with filled.database.write() as writer:
        writer.execute("INSERT INTO events (kind, fields) VALUES ('episode_failed', '{\"x')")
    found = summary.overview("first", filled)["failures"]
    assert found["count"] == before + 2
    rows = found["rows"]
    assert len(rows) == found["count"]
    assert [row["episode"] for row in rows[:2]] == ["7", "7"]
    assert [row["error"] for row in rows[:2]] == ["", "x" * 300], "newest first"
    assert summary.failures(filled.database, limit=1)["rows"] == rows[:1]
    stored = filled.database.rows("SELECT fields FROM events WHERE kind = 'episode_failed'")
    assert max(len(fields) for (fields,) in stored) < MAX_EVENT


def test_failed_episodes_of_evaluations_are_events_and_no_training_failures(
    filled: RunIndex, run: Path
) -> None:
    before = summary.failures(filled.database)
    with (run / EVENTS).open("a") as file:
        for more in ({"held_out": True}, {"episode": 7}):
            event = {"kind": "episode_failed", "time": 1.0, "final": True, "task": "t", **more}
            file.write(json.dumps(event) + "\n")
    fill(filled)
    found = summary.failures(filled.database)
    assert found["count"] == before["count"] + 1
    assert found["rows"][0]["episode"] == "7"
    failed = [row for row in summary.log(filled.database) if row["kind"] == "episode_failed"]
    assert [row["text"] for row in failed] == ["final True, task t, held_out True"]


def test_large_files_of_a_run_are_not_read_whole(filled: RunIndex, run: Path) -> None:
    (run / "error.txt").write_text("a" * 3_000_000 + "\nValueError: the end\n")
    (run / "config.json").write_text(json.dumps({"recipe": "x" * 3_000_000}))
    found = summary.overview("first", filled)
    assert found["error"].endswith("ValueError: the end") and len(found["error"]) <= 20_000
    gaps = " ".join(found["gaps"])
    assert "error.txt has 3,000,021 bytes; its last 100,000 were read" in gaps
    assert "config.json has 3,000,014 bytes; at most 1,048,576 are read" in gaps
    assert found["options"] == {}


def test_a_run_without_steps_has_no_checks_and_the_time_of_its_options(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    index = fill(RunIndex(folder, tmp_path / "index.sqlite"))
    found = summary.overview("empty", index)
    assert found["checks"] == []
    assert found["age_s"] < 100
    index.close()
