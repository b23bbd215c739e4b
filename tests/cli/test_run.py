"""Test `unstale train` from the command line.

A run leaves a complete folder. Failed episodes are counted, and too many end the run. A dead engine
ends it within seconds with the engine's error. Ctrl-C saves. The trained policy is an ordinary
model folder. With equal precision in engine and trainer, weights travel as deltas.
"""

import asyncio
import json
import math
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

import unstale
from tests.support.forked import Forked
from tests.support.waits import LIMIT_S, wait_until
from unstale.cli import session
from unstale.cli.evaluate import evaluate
from unstale.cli.saved_episodes import open_saved
from unstale.config import (
    ConfigError,
    EngineConfig,
    EvalConfig,
    RunConfig,
    ScheduleConfig,
    TaskConfig,
    TrainerConfig,
    make_task,
)
from unstale.durability.journal import Journal, conversation, trained_episodes
from unstale.durability.journal.conversations import load_decoder
from unstale.durability.run_folder import read_jsonl
from unstale.records import Failure, Task, Trajectory
from unstale.rollout.episode import Rollout
from unstale.trainer import threads as cpu_threads
from unstale.trainer.local import LocalTrainer

pytestmark = pytest.mark.usefixtures("forked_children")

ROOT = Path(__file__).parents[2]

REQUIRED = {
    "step",
    "version",
    "rollout/success_rate",
    "schedule/staleness_max",
    "schedule/staleness_bound",
    "schedule/mixed_version_share",
    "correction/kept_share",
    "objective/clip_share",
    "engine/sampled_tokens_per_s",
    "trainer/tokens_per_s",
}


def small(folder: Path, **changes: object) -> RunConfig:
    config = RunConfig(
        recipe="toy",
        runs=folder,
        name="run",
        max_steps=3,
        task=TaskConfig(env="tests.support.toy:ToyTasks"),
        schedule=ScheduleConfig(max_staleness=1, groups_per_step=2, group_size=2),
        engine=EngineConfig(max_completion_tokens=8, max_context=128, max_running=8),
        eval=EvalConfig(tasks=4),
    )
    return replace(config, **changes)


DETERMINISTIC = {"deterministic": True, "minutes": 0}


def quiet() -> Console:
    return Console(file=StringIO())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> unstale.Run:
    return session.train(small(tmp_path_factory.mktemp("runs")), console=quiet())


def test_metrics_have_one_row_a_step_with_what_every_reader_counts_on(run: unstale.Run) -> None:
    rows = run.metrics
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in (rows[0], rows[-1]):
        assert 0 <= row["eval/success_rate"] <= 1 and math.isfinite(row["eval/reward_mean"])
    for row in rows[1:]:
        assert row.keys() >= REQUIRED
        assert 0 <= row["schedule/staleness_max"] <= row["schedule/staleness_bound"] == 1
    assert [row["version"] for row in rows[1:]] == [0, 1, 2]


def journal_tokens(folder: Path, episode: int) -> tuple[int, ...]:
    with Journal.read(folder) as journal:
        return journal.episode(episode).trajectory.tokens


def test_the_folder_holds_conversations_a_report_and_a_model(run: unstale.Run) -> None:
    decode = load_decoder(run.folder)
    with Journal.read(run.folder) as journal:
        trained = list(trained_episodes(journal))
        records = [conversation(journal.episode(row["episode"]), decode) for row in trained]
    assert len(records) == 3 * 2 * 2 and not (run.folder / "trajectories.jsonl").exists()
    assert [
        {name: record[name] for name in row} for row, record in zip(trained, records, strict=True)
    ] == trained
    text = run.policy.tokenizer.decode(list(journal_tokens(run.folder, records[0]["episode"])))
    assert "".join(turn["text"] for turn in records[0]["turns"]) == text
    assert all(record["turns"][0]["role"] == "environment" for record in records)
    assert run.report.read_text().startswith("<!doctype html>")
    model = AutoModelForCausalLM.from_pretrained(run.folder / "policy")
    assert AutoTokenizer.from_pretrained(run.folder / "policy").chat_template
    assert model.config.vocab_size == run.policy.model.config.vocab_size


def test_eval_grades_a_run_folder_and_a_killed_one_resumes(
    run: unstale.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third episode is killed while it is written. Only it and later ones are played again."""
    config, save = small(run.folder.parent), tmp_path / "episodes.jsonl"
    grade = evaluate(run.folder, config, attempts=2, save=save, console=quiet())
    assert (grade.tasks, grade.attempts) == (4, 2) and max(grade.successes) <= 2
    assert 0 <= grade.average.low <= grade.success <= grade.average.high <= 1
    whole = save.read_text().splitlines(keepends=True)
    rewards = [json.loads(line)["reward"] for line in whole[1:]]
    assert grade.reward == pytest.approx(sum(rewards) / 8)
    assert grade.as_json([1])["reward_mean"] == grade.reward
    assert len(whole) == 1 + 8
    save.write_text("".join(whole[:3]) + whole[3][:10])
    played: list[str] = []
    episode = Rollout.episode

    async def watched(self: Rollout, task: Task, **options: Any) -> Trajectory | Failure:
        played.append(task.key)
        return await episode(self, task, **options)

    monkeypatch.setattr(Rollout, "episode", watched)
    again = evaluate(run.folder, config, attempts=2, save=save, console=quiet())
    assert again == grade and len(played) == 6
    assert sorted(save.read_text().splitlines(keepends=True)) == sorted(whole)
    truncated = replace(config, eval=EvalConfig(tasks=4, top_k=5))
    with pytest.raises(ConfigError, match=r"episodes with eval.top_k -1, and this command has 5"):
        evaluate(run.folder, truncated, attempts=2, save=save, console=quiet())
    fewer = replace(config, eval=EvalConfig(tasks=3))
    part = evaluate(run.folder, fewer, save=save, console=quiet())
    assert len(played) == 6, "fewer tasks and attempts are among those of the file"
    of = {(row["task"], row["attempt"]): row["reward"] for row in map(json.loads, whole[1:])}
    tasks = sorted({task for task, _ in of})[:3]
    assert part.reward == pytest.approx(sum(of[task, 0] for task in tasks) / 3)
    without = [line.replace(', "reward": ', ', "old": ') for line in whole]
    save.write_text("".join(without))  # as an earlier version of the package wrote it
    old = evaluate(run.folder, fewer, save=save, console=quiet())
    assert old.successes == part.successes and math.isnan(old.reward)
    assert "reward_mean" not in old.as_json([1])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"policy": "0"}\n', "has episodes with policy 0, and this command has"),
        ("[1]\n", "is not a file of `unstale eval --save`"),
        ('{"policy": "0"}\n{"task": 1}\n', "is not a file of `unstale eval --save` (KeyError"),
        (
            '{"my": "precious results"}',
            "is not a file of `unstale eval --save` (ValueError: its first",
        ),
        ('{"policy": "0"}\nanother line', "has episodes with policy 0, and this command has"),
        (None, "cannot be used: Is a directory"),
    ],
)
def test_eval_refuses_a_file_of_another_evaluation(
    tmp_path: Path, content: str | None, says: str
) -> None:
    save = tmp_path / "episodes.jsonl"
    if content is None:
        save = tmp_path
    else:
        save.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(says)), open_saved(save, small(tmp_path)):
        pass
    assert content is None or save.read_text() == content, "the file is unchanged"


def test_the_episodes_of_a_file_depend_on_template_and_data_and_not_on_budgets(
    tmp_path: Path,
) -> None:
    model, data, save = tmp_path / "model", tmp_path / "rows.jsonl", tmp_path / "saved.jsonl"
    model.mkdir()
    template = model / "chat_template.jinja"
    for file in (template, data):
        file.write_text("old")

    def reopen(env: str = "retail", **options: Any) -> None:
        task = make_task(env, **options)
        with open_saved(save, small(tmp_path, model=str(model), task=task)):
            pass

    reopen()
    reopen(latency_s=1.0, latency_sigma=0.5)
    first = json.loads(save.read_text())
    save.write_text(json.dumps({k: v for k, v in first.items() if k != "task.level"}) + "\n")
    reopen()  # an earlier version of the package may lack an option, which had its default
    with pytest.raises(ConfigError, match=r"has episodes with task\.level 1, and this .* has 2"):
        reopen(level="2")
    template.write_text("new")
    with pytest.raises(ConfigError, match="has episodes with policy"):
        reopen()
    save.unlink()
    reopen(f"dataset:{data}", reward="x:y")
    data.write_text("new")
    with pytest.raises(ConfigError, match="has episodes with task data"):
        reopen(f"dataset:{data}", reward="x:y")
    save.unlink()
    judge = {"judge": "http://127.0.0.1:1"}
    reopen("vita:all", **judge)
    reopen("vita:all", **judge, judge_tokens=7)


def test_with_one_precision_on_both_sides_differences_travel_and_old_logits_are_exact(
    tmp_path: Path,
) -> None:
    config = small(
        tmp_path,
        task=make_task("retail"),
        schedule=ScheduleConfig(max_staleness=1, groups_per_step=3, group_size=4),
        engine=EngineConfig(dtype="bfloat16", max_context=512, max_running=24),
        trainer=TrainerConfig(dtype="bfloat16", lr=1e-6, warmup_steps=0),
        eval=EvalConfig(tasks=0),
    )
    rows = session.train(config, console=quiet()).metrics
    assert [row["version"] for row in rows] == [0, 1, 2] and rows[-1]["schedule/staleness_max"] == 1
    for row in rows:
        assert row["publish/bytes"] < row["old_logps/model_bytes"] / 32  # one full copy in bfloat16
        assert row["old_logps/exact_share"] == 1
    assert any(row["publish/bytes"] > 0 for row in rows[:-1]), (
        "the engine sampled from no changed weights"
    )


def test_a_failed_episode_is_data(tmp_path: Path) -> None:
    config = small(
        tmp_path,
        task=TaskConfig(env="tests.support.toy:HalfBrokenTasks"),
        max_steps=4,
        eval=EvalConfig(tasks=5),  # one of them fails
    )
    run = session.train(config, console=quiet())
    assert sum(row.get("rollout/failed_episodes", 0) for row in run.metrics) >= 2
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    failed = [event for event in events if event["kind"] == "episode_failed"]
    held_out = [event for event in failed if "held_out" in event]
    assert len(held_out) == 2 * 2, "two evaluations, with one retry each"
    assert all(event["held_out"] and "episode" not in event for event in held_out)
    failed = [event for event in failed if event not in held_out]
    assert failed[0]["stage"] == "begin" and "no task 5" in failed[0]["error"]
    assert "episode" in failed[0]


def test_too_many_failures_end_the_run_with_the_reason(tmp_path: Path) -> None:
    config = small(
        tmp_path,
        task=TaskConfig(env="tests.support.toy:BrokenTasks"),
        max_steps=200,
        eval=EvalConfig(tasks=0),
    )
    with pytest.raises(
        unstale.RunFailed,
        match=r"all 4 episodes of a batch failed; the last one in begin of .*: ValueError: no task",
    ):
        session.train(config, console=quiet())
    assert "TooManyFailures" in (tmp_path / "run" / "error.txt").read_text()


def test_the_end_of_a_failed_run_is_recorded_without_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that failed for lack of memory or open files may not be able to import modules."""
    monkeypatch.setitem(sys.modules, "unstale.analysis.dashboard.frozen", None)
    config = small(tmp_path, task=TaskConfig(env="tests.support.toy:BrokenTasks"), max_steps=200)
    with pytest.raises(unstale.RunFailed, match="episodes of a batch failed"):
        session.train(replace(config, eval=EvalConfig(tasks=0)), console=quiet())
    events = read_jsonl(tmp_path / "run" / "events.jsonl")
    assert [event["reason"] for event in events if event["kind"] == "stopped"] == ["failed"]


def test_code_that_blocks_the_event_loop_is_named(tmp_path: Path) -> None:
    config = small(
        tmp_path,
        task=TaskConfig(env="tests.support.toy:BlockingTasks"),
        max_steps=1,
        eval=EvalConfig(tasks=0),
    )
    console = Console(file=StringIO(), soft_wrap=True)
    run = session.train(config, console=console)
    events = read_jsonl(run.folder / "events.jsonl")
    blocked = [event for event in events if event["kind"] == "loop_blocked"]
    assert blocked and {event["by"] for event in blocked} == {"the environment of toy"}
    assert blocked[0]["duration_s"] >= 0.3
    assert isinstance(console.file, StringIO)
    assert "the environment of toy blocked all episodes for 0." in console.file.getvalue()
    assert not any(row.get("rollout/failed_episodes") for row in run.metrics)


def test_a_run_without_rewards_says_so(tmp_path: Path) -> None:
    console = Console(file=StringIO(), soft_wrap=True)
    run = session.train(
        small(tmp_path, task=TaskConfig(env="tests.support.toy:NoRewardTasks")), console=console
    )
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    warnings = [line.split("warning: ")[1] for line in lines if "warning: " in line]
    first, *later = [warning.split(".")[0] for warning in warnings]
    nothing_learned = "no token had an advantage, so nothing was learned: the rewards of every "
    assert first == f"since step 1, {nothing_learned}group were equal"  # known after one step
    assert {
        "since step 1, 100% of the episodes ended without a reward, which counts as 0",
        "since step 1, every reward was 0",
    } <= set(later)
    assert lines[-1] == "finished: all 3 steps are done"
    text = run.report.read_text()
    assert "ended without a reward" in text and "Ended: all 3 steps are done" in text
    with Journal.read(run.folder) as journal:
        checks = [row["check"] for row in journal.events() if row["kind"] == "health"]
    assert sorted(checks) == ["constant_rewards", "missing_rewards", "no_advantage"]


def test_a_run_that_its_time_limit_ends_says_so(tmp_path: Path) -> None:
    console = Console(file=StringIO(), soft_wrap=True)
    session.train(small(tmp_path, minutes=1e-6), console=console)
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue().splitlines()[-1] == (
        "finished: the time limit of 1e-06 minutes (--minutes) was reached after step 1 of 3"
    )


@contextmanager
def started(folder: Path, steps: int, *knobs: str, is_patient: bool = True) -> Iterator[Forked]:
    """Start a run in a process that is killed at the end of the test."""
    arguments = [
        "train",
        "retail",
        "--task.env",
        "tests.support.toy:ToyTasks",
        "--runs",
        str(folder),
        "--name",
        "run",
        "--max_steps",
        str(steps),
        "--eval.tasks",
        "0",
        "--schedule.groups_per_step",
        "2",
        "--schedule.group_size",
        "2",
        "--engine.max_completion_tokens",
        "8",
        "--engine.max_running",
        "8",
        *knobs,
    ]
    with Forked(arguments, cwd=ROOT, is_patient=is_patient) as process:
        yield process


def wait_for_steps(folder: Path, number: int, process: Forked) -> None:
    metrics = folder / "run" / "metrics.jsonl"

    def has_rows() -> bool:
        assert process.poll() is None, process.communicate()
        return metrics.exists() and len(metrics.read_text().splitlines()) >= number

    wait_until(has_rows, f"{number} rows of metrics")


SECONDS_TO_AN_END = 60.0
"""Seconds for a run to notice a dead process and write its report, on a busy machine."""


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def children(pid: int) -> list[int]:
    """Return the engines of a command, whose run is in the child of its supervisor."""
    (run,) = _children(pid)
    return _children(run)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the engine's process through /proc")
def test_a_dead_engine_ends_the_run_within_seconds(tmp_path: Path) -> None:
    with started(tmp_path, 100_000, "--engine.restarts", "0") as process:
        wait_for_steps(tmp_path, 2, process)
        for child in children(process.pid):
            os.kill(child, signal.SIGKILL)
        _, errors = process.communicate(timeout=SECONDS_TO_AN_END)
    assert process.returncode == 1
    (line,) = errors.splitlines()
    assert line.startswith("the run failed: EngineDied: the engine process")
    assert "EngineDied" in (tmp_path / "run" / "error.txt").read_text()
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_save_and_say_where_to_look(tmp_path: Path, by: signal.Signals) -> None:
    with started(tmp_path, steps=100_000) as process:
        wait_for_steps(tmp_path, 2, process)
        for child in (*_children(process.pid), *children(process.pid)):  # a cluster ends them all
            os.kill(child, by)
        process.send_signal(by)
        output, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert (tmp_path / "run" / "policy" / "model.safetensors").exists()
    assert str(tmp_path / "run" / "report.html") in output.replace("\n", "")
    command = f"unstale train --resume {tmp_path / 'run'} --task.env tests.support.toy:ToyTasks"
    reason = f"Ctrl-C: to continue: {command}"
    assert output.splitlines()[-1] == reason
    page = (tmp_path / "run" / "report.html").read_text()
    assert reason.replace("Ctrl-C: ", "Ended by Ctrl-C; ") in page


@pytest.mark.costly
def test_a_resume_with_other_rows_is_refused_or_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(40)]

    def write(first: int) -> None:
        text = "".join(json.dumps(row) + "\n" for row in rows[first:])
        Path("rows.jsonl").write_text(text)

    write(0)
    task = make_task("dataset:rows.jsonl", reward="unstale.rewards:numeric_answer")
    config = small(tmp_path, task=task, max_steps=1, model="base")
    session.train(config, console=quiet())
    more = replace(config, max_steps=2)
    write(1)
    with pytest.raises(
        ConfigError, match=r"rows of dataset:rows.jsonl have changed \(.*Put the old data"
    ):
        session.resume(tmp_path / "run", more, console=quiet())
    write(0)  # the old data is accepted
    session.resume(tmp_path / "run", more, console=quiet())
    write(1)
    last = replace(config, max_steps=3, allow_changed_data=True)
    run = session.resume(tmp_path / "run", last, console=quiet())
    assert "After step 2, the rows of dataset:rows.jsonl have changed" in run.report.read_text()
    assert run.metrics[-1]["step"] == 3
    # the new rows are now those of the run
    session.resume(tmp_path / "run", replace(last, max_steps=4), console=quiet())
    changes = [
        row
        for row in read_jsonl(tmp_path / "run" / "events.jsonl")
        if row["kind"] == "data_changed"
    ]
    assert len(changes) == 1 and changes[0]["step"] == 2


def test_control_characters_of_an_environment_are_shown_and_never_sent(tmp_path: Path) -> None:
    with started(tmp_path, 5, "--task.env", "tests.support.toy:HostileTasks") as process:
        output, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    shown = r"\x1b]0;title\x07\x1b[2J\x9b2J\u202e\x7fno task"
    assert shown in output and shown in errors.splitlines()[-1]
    run = tmp_path / "run"
    for name in ("error.txt", "report.html"):
        assert shown in (run / name).read_text("utf-8", errors="strict").replace("&#39;", "'")
    texts = [run.joinpath(name).read_text("utf-8") for name in ("error.txt", "events.jsonl")]
    for text in (output, errors, (run / "report.html").read_text("utf-8"), *texts):
        assert not set("\x1b\x07\x9b\u202e\r\x7f") & set(text)


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize(
    "changes, used", [({}, 3), ({"trainer": TrainerConfig(threads=2)}, 2), (DETERMINISTIC, 1)]
)
def test_the_trainer_has_all_cores_while_no_episode_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], used: int
) -> None:
    counts: list[int] = []
    backward = LocalTrainer.backward

    def counted(trainer: LocalTrainer, minibatch: Any) -> None:
        counts.append(torch.get_num_threads())
        backward(trainer, minibatch)

    monkeypatch.setattr(LocalTrainer, "backward", counted)
    monkeypatch.setattr(cpu_threads, "cores", lambda: 3)
    synchronous = ScheduleConfig(max_staleness=0, groups_per_step=2, group_size=2)
    config = small(tmp_path, schedule=synchronous, eval=EvalConfig(tasks=0), **changes)
    session.train(config, console=quiet())
    assert counts == [used] * 3


def test_the_loop_runs_beside_a_loop_of_the_callers(tmp_path: Path) -> None:
    async def main() -> unstale.Run:
        return await asyncio.to_thread(session.train, small(tmp_path, max_steps=1), console=quiet())

    assert asyncio.run(main()).metrics[-1]["step"] == 1


def test_training_works_inside_a_running_loop_as_in_a_notebook(tmp_path: Path) -> None:
    async def cell() -> tuple[unstale.Run, float]:
        notebook = asyncio.get_running_loop()
        run = session.train(small(tmp_path, max_steps=1), console=quiet())
        success = evaluate(run.folder, small(tmp_path), console=quiet()).success
        assert asyncio.get_running_loop() is notebook and asyncio.get_event_loop() is notebook
        await asyncio.sleep(0)  # the notebook's loop goes on
        return run, success

    run, success = asyncio.run(cell())
    assert run.metrics[-1]["step"] == 1 and 0 <= success <= 1
