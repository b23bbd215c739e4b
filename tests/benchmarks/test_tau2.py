"""Test which saved episodes the benchmark of tau2-bench uses again. tau2 itself is not needed."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import tau2
from unstale.cli.grades import EvalResult
from unstale.envs import Message, Turn
from unstale.records import Task


class Tasks:
    """One task that ends at the first reply with the reward 1."""

    def held_out(self, count: int) -> list[Task]:
        return [Task("tau2:retail", "held_out", 0)]

    def part_of(self, task: Task) -> Any:
        data = SimpleNamespace(evaluation_criteria=SimpleNamespace(actions=()))
        return SimpleNamespace(data_of=lambda task: data)

    def env(self, task: Task, seed: int) -> "Tasks":
        return self

    async def begin(self) -> Turn:
        return Turn((Message("user", "Hello"),))

    async def step(self, reply: Message) -> Turn:
        return Turn((), done=True, rewards={"state": 1.0})


def test_saved_episodes_are_of_one_script_and_of_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files: dict[str, Path] = {}

    def evaluate(folder: Path, *_: Any, save: Path, **__: Any) -> EvalResult:
        files[folder.name] = save
        return EvalResult.of([True], 1, ["tau2:retail"])

    monkeypatch.setattr(tau2, "build_taskset", lambda task: Tasks())
    monkeypatch.setattr(tau2, "evaluate_policy", evaluate)
    monkeypatch.setattr(tau2, "RESULTS", tmp_path / "results")
    words = ["--attempts", "1", "--saved", str(tmp_path)]
    tau2.main(["runs/first", "runs/second", *words])
    before = dict(files)
    tau2.main(["runs/second", "runs/first", *words])
    assert files == before and len(set(files.values())) == 2, "the order does not matter"
    header = json.loads((tmp_path / "only-talk.jsonl").read_text().splitlines()[0])
    assert header["script"] == "only talk" and header["script_version"] == tau2.SCRIPTS_VERSION
    monkeypatch.setattr(tau2, "SCRIPTS_VERSION", tau2.SCRIPTS_VERSION + 1)
    with pytest.raises(SystemExit):
        tau2.main(words)
    assert "has episodes with script_version 1" in capsys.readouterr().err
