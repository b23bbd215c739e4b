"""Inject faults one by one. Each ends as the table in docs/durability.md states. None hangs.

Faults of a single component are tested with it: checkpoint files in test_checkpoint.py, the engine
process in test_pool.py, the old-logit process in test_exact_routes.py, a queue that cannot fill a
batch in test_staleness_queue.py.
"""

import asyncio
import errno
import fcntl
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.cli.test_run import children, started, wait_for_steps
from tests.durability.test_resume import (
    STEPS,
    Toy,
    config,
    killed,
    pieces,
    played,
    played_with,
    require_sound,
)
from tests.test_loop import TwoTurns
from unstale.cli import session
from unstale.cli.failures import RunFailed
from unstale.cli.resume import load_config
from unstale.config import ConfigError, OldLogpsConfig, RolloutConfig, RunConfig
from unstale.durability import checkpoint, checkpoint_files, compare_runs, run_folder
from unstale.durability.journal import JOURNAL, Journal, writer
from unstale.durability.machine import lock_folder
from unstale.durability.run_folder import CONFIG, RunLog, read_jsonl
from unstale.engines.scripted import ScriptedEngine
from unstale.envs import Message, Turn
from unstale.records import Task
from unstale.weights import child_process

pytestmark = pytest.mark.usefixtures("forked_children")

LIMIT_S = 60
"""More seconds than any fault takes on a busy machine. Only a hang reaches it."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail the test if the block takes longer."""

    def late(*_: object) -> None:
        raise AssertionError(f"it hung for {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def toy() -> Iterator[Toy]:
    with played(Toy()) as toy:
        yield toy


def named(folder: Path, made: RunConfig) -> RunConfig:
    return replace(made, runs=folder, name="run")


def train(made: RunConfig) -> None:
    with within(LIMIT_S):
        session.train(made, console=Console(file=StringIO()))


def resume(made: RunConfig) -> None:
    with within(LIMIT_S):
        session.resume(made.runs / "run", made, console=Console(file=StringIO()))


def test_a_full_disk_under_the_journal_ends_the_run_and_nothing_is_lost(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, connect = named(tmp_path, config()), writer._connect

    def small(path: Path) -> sqlite3.Connection:
        connection = connect(path)
        connection.execute("PRAGMA max_page_count=19")
        return connection

    with monkeypatch.context() as patch:
        patch.setattr(writer, "_connect", small)
        with pytest.raises(
            RunFailed,
            match=r"^the journal .*journal\.sqlite failed: database or disk is full",
        ):
            train(made)
    held = pieces(tmp_path / "run")
    assert held and "disk is full" in (tmp_path / "run" / "error.txt").read_text()
    resume(made)
    require_sound(tmp_path / "run")
    assert held <= pieces(tmp_path / "run") and not (tmp_path / "run" / "error.txt").exists()


@pytest.mark.costly
@pytest.mark.parametrize("name", ["state.safetensors", "manifest.json", "trainer", "000003.part"])
def test_a_full_disk_under_a_checkpoint_or_a_version_ends_the_run_and_the_older_one_is_sound(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    made, to_disk, calls = named(tmp_path, config()), checkpoint.flush_to_disk, 0

    def full(path: Path) -> None:
        nonlocal calls
        calls += path.name == name
        if path.name == name and calls > (name != "000003.part"):  # not the run's first
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        to_disk(path)

    with monkeypatch.context() as patch:
        for module in (checkpoint, checkpoint_files):
            patch.setattr(module, "flush_to_disk", full)
        with pytest.raises(
            RunFailed,
            match=rf"CheckpointError: .*\.part cannot be written: .*No space left.*{name}",
        ):
            train(made)
    with Journal.read(tmp_path / "run") as reader:
        newest = reader.checkpoints()[-1]
    assert newest.step == (2 if name == "000003.part" else 0)
    resume(made)
    require_sound(tmp_path / "run")


@pytest.mark.parametrize("runs", ["a file", "/proc/none"])
def test_where_no_run_folder_can_be_made_nothing_is_trained(
    toy: Toy, tmp_path: Path, runs: str
) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(ConfigError, match=r"run folder .* cannot be created"):
        train(named(tmp_path / runs, config()))


def test_a_folder_that_cannot_be_written_is_not_gone_on_in(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = config()
    with killed("step", 4):
        toy.begin(tmp_path / "run", made)

    def read_only(path: Path, text: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "write_whole", read_only)
        with pytest.raises(ConfigError, match=r"run cannot be resumed: .*Read-only file system"):
            resume(named(tmp_path, made))
    monkeypatch.setattr(sqlite3, "connect", refused := RefusedWrites(sqlite3.connect))
    with pytest.raises(
        RunFailed,
        match=r"^the journal .* failed: attempt to write a readonly database",
    ):
        resume(named(tmp_path, made))
    assert refused.asked


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES, errno.ENOLCK])
def test_a_folder_that_cannot_be_locked_is_refused_with_the_cause(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    made, folder = config(), tmp_path / "run"
    with killed("step", 4):
        toy.begin(folder, made)
    machines = len(toy.machines)
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", fail(OSError(error, os.strerror(error))))
        with pytest.raises(
            ConfigError, match=rf"{folder} cannot be locked: .*{os.strerror(error)}"
        ):
            resume(named(tmp_path, made))
    (folder / ".lock").unlink()
    (folder / ".lock").mkdir()  # a file that cannot be opened, for root as well
    with pytest.raises(ConfigError, match=rf"{folder} cannot be locked: .*Is a directory"):
        resume(named(tmp_path, made))
    assert len(toy.machines) == machines, "the model was loaded for nothing"
    (folder / ".lock").rmdir()
    resume(named(tmp_path, made))
    require_sound(folder)


def test_an_error_while_a_folder_is_locked_keeps_its_kind(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no disk"), lock_folder(tmp_path):
        raise OSError("no disk")
    with lock_folder(tmp_path):
        pass


def test_the_configuration_is_on_the_disk_before_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is flushed before it is renamed, and its folder after that."""
    flushed: list[tuple[bool, str]] = []
    to_disk = os.fsync

    def flush(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        text = (path / CONFIG if path.is_dir() else path).read_text()
        flushed.append((path.is_dir(), text))
        assert path.name != CONFIG, "it was renamed before it was on the disk"
        to_disk(descriptor)

    monkeypatch.setattr(os, "fsync", flush)
    folder = tmp_path / "run"
    with RunLog.create(folder, {"steps": 1}) as log:
        text = (folder / CONFIG).read_text()
        assert flushed == [(False, text), (True, text)]
        log.write(0, {"loss": 0.5})
        log.event("stopped")
    with RunLog.reopen(folder) as log:
        log.rewind([])
        assert len(flushed) == 2, "only the configuration is worth the time"
        log.begin_again({"steps": 2})
    text = (folder / CONFIG).read_text()
    assert flushed[2:] == [(False, text), (True, text)]


def test_the_options_of_a_resume_that_fails_before_it_trains_are_not_kept(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, folder = named(tmp_path, config()), tmp_path / "run"
    with pytest.raises(RunFailed), monkeypatch.context() as patch:
        patch.setattr(checkpoint.Checkpoints, "write_version", fail(OSError("no disk")))
        train(made)
    kept = [(folder / name).read_bytes() for name in ("config.json", "error.txt")]
    other = replace(made, trainer=made.trainer.with_options(lr=0.5))
    with pytest.raises(ConfigError), monkeypatch.context() as patch:
        patch.setattr(session, "build_components", fail(ConfigError("the file is missing")))
        resume(other)
    assert [(folder / name).read_bytes() for name in ("config.json", "error.txt")] == kept
    *_, last = read_jsonl(folder / "events.jsonl")
    assert (last["reason"], last["detail"]) == ("failed", "the file is missing")
    with pytest.raises(RunFailed, match="no model"), monkeypatch.context() as patch:
        patch.setattr(ScriptedEngine, "start", fail(ValueError("no model")))
        resume(other)
    assert (folder / "config.json").read_bytes() == kept[0]
    assert "no model" in (folder / "error.txt").read_text()
    resume(other)
    require_sound(folder)
    assert load_config(folder, named={"task.env": made.task.env}) == other
    assert not (folder / "error.txt").exists()


def fail(error: Exception) -> Callable[..., None]:
    """Return a function that raises an error."""

    def call(*_: object, **__: object) -> None:
        raise error

    return call


class RefusedWrites:
    """SQLite connections on which every write fails."""

    def __init__(self, connect: Callable[..., sqlite3.Connection]) -> None:
        self.connect, self.asked = connect, 0

    def __call__(self, database: Any, **keywords: Any) -> sqlite3.Connection:
        connection = self.connect(database, **keywords)
        if isinstance(database, Path):
            self.asked += 1
            connection.execute("PRAGMA query_only=ON")
        return connection


def test_a_damaged_page_of_the_journal_is_found_before_anything_is_written(
    toy: Toy, tmp_path: Path
) -> None:
    made, folder = config(), tmp_path / "run"
    with killed("step", 4):
        toy.begin(folder, made)
    journal = folder / JOURNAL
    with sqlite3.connect(journal) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
        tables = ("groups", "episodes", "pieces", "finished", "checkpoints", "consumed", "versions")
        roots = dict(
            connection.execute(
                "SELECT name, rootpage FROM sqlite_master WHERE type = 'table'"
            ).fetchall()
        )
    connection.close()
    sound = journal.read_bytes()
    for table in tables:
        data = bytearray(sound)
        end = 4096 * roots[table]
        data[end - 24 : end] = bytes(
            byte ^ 0x55 for byte in data[end - 24 : end]
        )  # where the first row is, or leads
        journal.write_bytes(data)
        with pytest.raises(RunFailed, match=r"the journal .*journal\.sqlite (failed|is damaged)"):
            resume(named(tmp_path, made))
        assert journal.read_bytes() == data, "a damaged journal was written to"
    journal.write_bytes(sound)
    resume(named(tmp_path, made))
    require_sound(folder)


def test_rows_that_the_journal_has_lost_are_found_before_a_resume(toy: Toy, tmp_path: Path) -> None:
    made, folder = config(), tmp_path / "run"
    with killed("step", 4):
        toy.begin(folder, made)
    with sqlite3.connect(folder / JOURNAL) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")
        connection.execute("DELETE FROM events WHERE id = (SELECT max(id) FROM events)")
    connection.close()

    def files() -> dict[Path, bytes]:
        paths = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
        return {path: path.read_bytes() for path in paths}

    before, machines = files(), len(toy.machines)
    with pytest.raises(RunFailed, match=r"is damaged: events has \d+ rows, but \d+ were written"):
        resume(named(tmp_path, made))
    assert files() == before
    assert len(toy.machines) == machines, "the model was loaded for nothing"


def test_a_run_that_ended_while_its_journal_was_created_is_resumed(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = named(tmp_path, config())
    with monkeypatch.context() as patch:
        patch.setattr(writer, "SCHEMA", writer.SCHEMA + "CREATE TABLE broken (")
        with pytest.raises(RunFailed, match="the journal"):
            train(made)
    resume(made)
    require_sound(tmp_path / "run")


@pytest.mark.parametrize("what", ["run", JOURNAL])
def test_a_run_folder_or_a_journal_that_is_removed_in_mid_run_is_said_once(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    made, folder = named(tmp_path, config()), tmp_path / "run"
    write = checkpoint.Checkpoints.write_version

    def strike(self: checkpoint.Checkpoints, version: int, *rest: Any) -> None:
        if version == 2:
            folder.rename(tmp_path / "gone") if what == "run" else (folder / JOURNAL).unlink()
        write(self, version, *rest)

    monkeypatch.setattr(checkpoint.Checkpoints, "write_version", strike)
    with pytest.raises(RunFailed) as error:
        train(made)
    said = str(error.value)
    assert "while the run wrote to it" in said and "resume the run, or start it again" in said
    assert said.count(str(folder)) == 1 and "Error:" not in said


def test_a_truncated_checkpoint_is_passed_over_and_that_is_said(toy: Toy, tmp_path: Path) -> None:
    made, folder = config(), tmp_path / "run"
    with killed("write", 4):
        toy.begin(folder, made)
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    file = next((newest / "trainer").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    resume(named(tmp_path, made))
    require_sound(folder)
    (told,) = (
        event
        for event in read_jsonl(folder / "events.jsonl")
        if event["kind"] == "checkpoint_unsound"
    )
    assert told["name"] == newest.name and file.name in told["error"]


@pytest.mark.costly
def test_a_clock_that_jumps_changes_nothing_but_stamps(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, clock, calls = config(deterministic=True), time.time, count()
    toy.begin(tmp_path / "whole", made)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: clock() + 86_400 * (next(calls) % 3 - 1))
        with killed("step", 3):
            toy.begin(tmp_path / "run", made)
        toy.go_on(tmp_path / "run", made)
    assert (
        next(calls) > 100 and compare_runs.differences(tmp_path / "whole", tmp_path / "run") == []
    )
    with Journal.read(tmp_path / "run") as reader:
        stamps = [at for (at,) in reader.rows("SELECT at FROM groups ORDER BY number")]
    assert stamps != sorted(stamps)


class Hanging(TwoTurns):
    """A task set in which one task in three never returns."""

    def __init__(self, task: Task, life: int) -> None:
        super().__init__(task)

    async def step(self, reply: Message) -> Turn:
        if self.task.index % 3 == 1:
            await asyncio.Event().wait()
        return await super().step(reply)


def patient(retries: int, share: float) -> RunConfig:
    return replace(
        config(), rollout=RolloutConfig(timeout_s=0.5, retries=retries, max_failed_share=share)
    )


def test_an_environment_that_hangs_is_tried_again_with_its_seed_and_then_quarantined(
    tmp_path: Path,
) -> None:
    made, folder = named(tmp_path, patient(1, 1.0)), tmp_path / "run"
    with played_with(Hanging, count):
        train(made)
    with Journal.read(folder) as reader:
        seeds = reader.rows(
            """SELECT group_concat(DISTINCT e.seed), count(*)
            FROM episodes e JOIN groups USING (number)
            JOIN finished USING (number) WHERE task % 3 = 1 GROUP BY number, sibling"""
        )
        stages = {stage for (stage,) in reader.rows("SELECT stage FROM failures")}
        errors = {error for (error,) in reader.rows("SELECT error FROM failures")}
        assert {task.index for task in reader.given_up(1)} >= {1, 4}
    assert seeds and all(tries == 2 and "," not in str(seed) for seed, tries in seeds)
    assert stages == {"step 1"} and len(errors) == 1
    assert errors.pop().startswith("TimeoutError: no answer within 0.5 s (")


def test_above_the_allowed_share_of_hanging_environments_the_run_stops(tmp_path: Path) -> None:
    made = named(tmp_path, replace(patient(0, 0.2), max_steps=100))
    message = (
        r"TooManyFailures: \d+.\d% of the episodes of \d+ groups failed, "
        r"more than rollout.max_failed_share = 0.2 allows"
    )
    with played_with(Hanging, count), pytest.raises(RunFailed, match=message):
        train(made)


class Stubborn(Hanging):
    """An environment that ignores the first cancellations."""

    async def step(self, reply: Message) -> Turn:
        for _ in range(3):
            try:
                await super().step(reply)
                break
            except asyncio.CancelledError:
                continue
        return await super().step(reply)


def test_an_environment_that_swallows_its_cancellation_is_cancelled_again(tmp_path: Path) -> None:
    with played_with(Stubborn, count):
        train(named(tmp_path, patient(0, 1.0)))
    with Journal.read(tmp_path / "run") as reader:
        errors = {error for (error,) in reader.rows("SELECT error FROM failures")}
        assert all(each.startswith("TimeoutError: no answer within 0.5 s (") for each in errors)
        assert errors and reader.steps()[-1]["step"] == STEPS


def test_out_of_tasks_is_an_error_that_says_so(tmp_path: Path) -> None:
    says = r"QueueExhausted: a batch takes 2 groups, 1 are open .* ran out of tasks"
    with (
        played_with(lambda task, life: TwoTurns(task), lambda: iter(range(5))),
        pytest.raises(RunFailed, match=says),
    ):
        train(named(tmp_path, config()))


@pytest.mark.costly
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the processes through /proc")
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_an_old_logit_process_that_is_killed_or_frozen_ends_the_run(
    tmp_path: Path, fault: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "FROZEN_S", 2.0)
    made = named(
        tmp_path,
        replace(config(), max_steps=10_000, old_logps=OldLogpsConfig(route="old_logit_model")),
    )

    class Striking(TwoTurns):
        def __init__(self, task: Task, life: int) -> None:
            super().__init__(task)
            if task.index == 12:
                os.kill(toy.machines[-1].old.pid, fault)  # type: ignore[attr-defined]

    with (
        played_with(Striking, count) as toy,
        pytest.raises(RunFailed, match=r"the old-logit.* process \(pid \d+\)"),
    ):
        train(made)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the engine's process through /proc")
def test_an_engine_that_is_killed_is_started_again_and_one_that_freezes_too_ends_the_run(
    tmp_path: Path,
) -> None:
    """A real engine in a run with `engine.restarts` 1."""
    metrics_file = tmp_path / "run" / "metrics.jsonl"
    with started(tmp_path, 100_000, "--engine.restarts", "1", is_patient=False) as process:
        wait_for_steps(tmp_path, 2, process)
        (engine,) = children(process.pid)
        os.kill(engine, signal.SIGKILL)
        wait_for_steps(tmp_path, len(metrics_file.read_text().splitlines()) + 4, process)
        (again,) = children(process.pid)
        os.kill(again, signal.SIGSTOP)
        _, errors = process.communicate(timeout=300)
    told = " ".join(errors.split())
    assert (
        process.returncode == 1
        and "did not answer" in told
        and "all 1 restarts of this run are used" in told
    )
    (event,) = (
        event
        for event in read_jsonl(tmp_path / "run" / "events.jsonl")
        if event["kind"] == "engine_restarted"
    )
    assert again != engine and "signal 9" in event["cause"]
