"""Test a rollout in several processes, with fake vLLM servers.

A synchronous run computes the same numbers with one process and with two, although one of these is
killed in between. An asynchronous run keeps its bound, and stays exact although versions
interrupt replies of all processes. Servers that die are replaced as with one process. A killed run
ends its processes, and resumes without loss. What cannot be divided is refused.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import killed_envs
from tests.support.fake_vllm import FakeVllm
from tests.support.tiny_runs import save_tiny, tiny_run
from tests.support.waits import wait_until, wait_until_gone
from unstale.cli import session
from unstale.cli.failures import RunFailed
from unstale.cli.resume import load_config
from unstale.config import (
    ConfigError,
    EngineConfig,
    RolloutConfig,
    RunConfig,
    ScheduleConfig,
    TaskConfig,
)
from unstale.durability.console import Console
from unstale.durability.journal import Journal, check
from unstale.durability.run_folder import EVENTS, RunFolder
from unstale.records import ContextPiece, Sampled
from unstale.rollout.processes.wire import encode, linked, read_piece, wire_piece
from unstale.routed_experts import RoutedExperts

FATAL_TASKS = f"{killed_envs.__name__}:KillingTasks"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    save_tiny(folder)
    return folder


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[FakeVllm]]:
    folders = [tmp_path / f"server{number}" for number in range(2)]
    for folder in folders:
        folder.mkdir()
    with FakeVllm(folders[0]) as first, FakeVllm(folders[1]) as second:
        yield [first, second]


def configure(
    model: Path, folder: Path, servers: list[FakeVllm], processes: int, **changes: Any
) -> RunConfig:
    engine = EngineConfig(
        backend="vllm",
        urls=" ".join(server.url for server in servers),
        dtype="float32",
        max_context=256,
        max_completion_tokens=8,
        max_running=16,
    )
    config = tiny_run(
        model,
        folder / "runs",
        deterministic=False,
        engine=engine,
        max_steps=3,
        rollout=RolloutConfig(processes=processes),
        schedule=ScheduleConfig(max_staleness=0, groups_per_step=2, group_size=2),
    )
    return replace(config, **changes)


def train(config: RunConfig) -> list[dict[str, Any]]:
    return session.train(config, console=Console(quiet=True)).metrics


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in RunFolder(folder).rows(EVENTS) if row["kind"] == kind]


def episodes(folder: Path) -> Mapping[tuple[int, int], tuple[Any, ...]]:
    """Return the pieces and rewards of each finished episode, by group and index in the group."""
    with Journal.read(folder) as reader:
        assert not check(reader)
        rows = reader.rows(
            """SELECT number, sibling, provenance, num_tokens, hex(tokens), hex(behavior_logp),
            version FROM episodes JOIN pieces USING (episode)
            WHERE episode IN (SELECT episode FROM trajectories)
            ORDER BY number, sibling, position"""
        )
    found: dict[tuple[int, int], tuple[Any, ...]] = {}
    for number, sibling, *piece in rows:
        found[number, sibling] = (*found.get((number, sibling), ()), tuple(piece))
    return found


def test_two_processes_of_which_one_is_killed_train_as_one_does(
    model: Path, tmp_path: Path, servers: list[FakeVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name, processes in (("one", 1), ("two", 2)):
        folder = tmp_path / name
        flag = tmp_path / f"{name}.flag"
        if processes == 1:
            flag.touch()
        monkeypatch.setenv(killed_envs.FLAG, str(flag))
        config = configure(model, folder, servers, processes, task=TaskConfig(env=FATAL_TASKS))
        rows = train(config)
        lost = events(folder / "runs/run", "rollout_process_lost")
        assert len(lost) == (processes == 2)
        if lost:
            assert "SIGKILL" in lost[0]["cause"] and "toy/train/" in lost[0]["cause"]
        numbers = [(row["trainer/grad_norm"], row["schedule/staleness_max"]) for row in rows]
        played = episodes(folder / "runs/run")
        # others may begin after the last step, until the run has ended
        trained = {place: played[place] for place in played if place[0] < 6}
        found.append((numbers, trained))
    assert len(found[0][0]) == 3 and len(found[0][1]) == 12
    assert found[1] == found[0]


@pytest.mark.costly
def test_an_asynchronous_run_keeps_its_bound_and_stays_exact(
    model: Path, tmp_path: Path, servers: list[FakeVllm]
) -> None:
    schedule = ScheduleConfig(max_staleness=2, groups_per_step=2, group_size=2)
    config = configure(model, tmp_path, servers, 2, max_steps=6, schedule=schedule)
    rows = train(config)
    assert max(row["schedule/mixed_version_share"] for row in rows) > 0
    for row in rows:
        assert row["schedule/staleness_max"] <= 2
        assert row["old_logps/exact_share"] == 1.0
        assert row["audit/logp_error_abs_mean"] < 1e-5
    assert sum(row["engine/sampled_tokens"] for row in rows) > 0
    assert sum(row["rollout/generation_wait_s"] for row in rows) > 0
    assert not events(tmp_path / "runs/run", "engine_lost")


@pytest.mark.costly
def test_replies_continue_when_a_server_dies(
    model: Path, tmp_path: Path, servers: list[FakeVllm]
) -> None:
    def kill() -> None:
        wait_until(lambda: servers[1].asked > 6, "replies of the second server")
        servers[1].die()

    killer = threading.Thread(target=kill)
    killer.start()
    schedule = ScheduleConfig(max_staleness=1, groups_per_step=2, group_size=2)
    rows = train(configure(model, tmp_path, servers, 2, max_steps=5, schedule=schedule))
    killer.join()
    assert len(rows) == 5 and {row["old_logps/exact_share"] for row in rows} == {1.0}
    lost = events(tmp_path / "runs/run", "engine_lost")
    assert lost and lost[0]["engine"] == 1
    episodes(tmp_path / "runs/run")


@pytest.mark.costly
def test_a_run_ends_when_all_servers_are_dead(
    model: Path, tmp_path: Path, servers: list[FakeVllm]
) -> None:
    def kill() -> None:
        wait_until(lambda: min(server.asked for server in servers) > 3, "replies of both")
        for server in servers:
            server.die()

    killer = threading.Thread(target=kill)
    killer.start()
    config = configure(model, tmp_path, servers, 2, max_steps=50)
    config = replace(config, engine=replace(config.engine, restarts=0))
    with pytest.raises(RunFailed, match="vLLM at unix"):
        train(config)
    killer.join()


@pytest.mark.costly
def test_a_task_that_always_kills_its_process_ends_the_run(
    model: Path, tmp_path: Path, servers: list[FakeVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(killed_envs.FLAG, "")
    config = configure(model, tmp_path, servers, 2, task=TaskConfig(env=FATAL_TASKS))
    with pytest.raises(RunFailed) as failed:
        train(config)
    assert "toy/train/" in str(failed.value) and "SIGKILL" in str(failed.value)
    assert "task.isolate = process" in str(failed.value)


@pytest.mark.costly
def test_a_killed_run_ends_its_processes_and_resumes_without_loss(
    model: Path, tmp_path: Path, servers: list[FakeVllm]
) -> None:
    config = configure(model, tmp_path, servers, 2, max_steps=40)
    options = (
        f"--max_steps 40 --engine.backend vllm --rollout.processes 2 --engine.dtype float32 "
        f"--model {model} --runs {tmp_path / 'runs'} --name run --engine.max_context 256 "
        "--engine.max_completion_tokens 8 --schedule.max_staleness 1 --schedule.groups_per_step 2 "
        f"--schedule.group_size 2 --task.env {config.task.env} --checkpoint.interval 2 "
        "--eval.tasks 0"
    )
    command = [sys.executable, "-m", "unstale", "train", "llm", *options.split()]
    urls = ["--engine.urls", config.engine.urls]
    run = subprocess.Popen([*command, *urls], stdout=subprocess.DEVNULL, start_new_session=True)
    folder = tmp_path / "runs/run"
    try:
        wait_until(lambda: len(_rows(folder)) > 3, "four steps")
        children = _rollout_processes(run.pid)
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    assert len(children) == 2
    for pid in children:
        wait_until_gone(pid)
    before = episodes(folder)
    resumed = load_config(folder, named={"task.env": config.task.env, "engine.urls": urls[1]})
    steps = len(_rows(folder)) + 3
    rows = session.resume(
        folder, replace(resumed, max_steps=steps), console=Console(quiet=True)
    ).metrics
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert max(row["schedule/staleness_max"] for row in rows) <= 1
    after = episodes(folder)
    assert before.items() <= after.items(), "nothing recorded was lost"
    with Journal.read(folder) as reader:
        ((trained, distinct),) = reader.rows(
            "SELECT count(*), count(DISTINCT number) FROM consumed"
        )
    assert trained == distinct == 2 * steps


def _rows(folder: Path) -> list[dict[str, Any]]:
    return RunFolder(folder).metrics() if (folder / "metrics.jsonl").exists() else []


def _rollout_processes(session_id: int) -> list[int]:
    """Return the process IDs of the rollout processes of a run, by the session of its processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_text().rstrip("\0").split("\0")
            is_one = any("unstale.cli.rollout_process" in each for each in command)
            if is_one and os.getsid(int(command[-1])) == session_id:
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"engine": EngineConfig()},
            "engine.backend = embedded, got 2: only the process of the run",
        ),
        (
            {"task": TaskConfig(env="calculator", isolate="ray")},
            "task.isolate = ray, got 2: rollout processes do not connect to Ray",
        ),
        (
            {"engine": EngineConfig(backend="vllm", quantise="fp8", servers=2, precise_engines=1)},
            "engine.precise_engines, got 2: rollout processes do not know",
        ),
        ({"techniques": "segments"}, "technique segments, got 2: its slots are shared"),
    ],
)
def test_what_cannot_be_divided_is_refused(changes: Any, says: str) -> None:
    engine = EngineConfig(backend="vllm")
    options = {"engine": engine, "task": TaskConfig(env="calculator"), **changes}
    with pytest.raises(ConfigError, match=says):
        RunConfig(recipe="x", rollout=RolloutConfig(processes=2), **options)


def test_a_piece_is_the_same_after_its_journey() -> None:
    first = RoutedExperts(0, np.arange(24, dtype=np.uint8).reshape(4, 2, 3))
    before = [ContextPiece((5, 1 << 20)), Sampled((7, 8), (-0.1, -1e-9), 3, routed_experts=first)]
    own = RoutedExperts(4, np.ones((1, 2, 3), np.uint8))
    piece = Sampled((9,), (0.0,), 3, clean=False, routed_experts=own)
    assert encode([wire_piece(each) for each in before]), "it can be encoded"
    for each in (*before, piece):
        assert read_piece(wire_piece(each)) == each
    arrived = linked(read_piece(wire_piece(piece)), before)
    assert isinstance(arrived, Sampled) and arrived.routed_experts is not None
    rows = arrived.routed_experts.rows(5)
    assert rows[:4].tolist() == first.experts.tolist() and (rows[4] == 1).all()
