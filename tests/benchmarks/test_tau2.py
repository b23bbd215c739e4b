"""Test which saved episodes the benchmark of tau2-bench uses again, and the order of practice.

tau2 itself is not needed.
"""

import json
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import tau2, tau2_policy
from tools.base_policy.practice import Example
from unstale.cli.grades import EvalResult
from unstale.config.options import override
from unstale.envs import Message, Turn
from unstale.recipes import make_recipe
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


def test_the_context_is_at_most_the_models_positions(tmp_path: Path) -> None:
    config = override(make_recipe("llm"), tau2.OPTIONS)
    for positions, context in ((8192, 8192), (65536, 24576)):
        (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
        assert tau2.fit_context(config, tmp_path).engine.max_context == context
    assert tau2.fit_context(config, tmp_path / "none").engine.max_context == 24576


def test_both_splits_are_measured_each_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, bool, str]] = []

    def evaluate(folder: Path, config: Any, *, save: Path, **_: Any) -> EvalResult:
        seen.append((config.task.eval_split, config.task.policy_document, save.name))
        return EvalResult.of([True], 1, ["tau2:retail"])

    monkeypatch.setattr(tau2, "build_taskset", lambda task: Tasks())
    monkeypatch.setattr(tau2, "evaluate_policy", evaluate)
    monkeypatch.setattr(tau2, "RESULTS", tmp_path / "results")
    words = ["runs/rl", "--attempts", "1", "--small", "--splits", "test", "train"]
    tau2.main([*words, "--saved", str(tmp_path)])
    assert seen == [("test", False, "policy-rl.jsonl"), ("train", False, "policy-rl-train.jsonl")]
    (table,) = (tmp_path / "results").glob("tau2-policy.md")
    assert "| rl | test | all | 1 |" in table.read_text()
    assert "| rl | train | all | 1 |" in table.read_text()


def test_practice_takes_domains_in_turn_and_each_example_once_in_a_round() -> None:
    short, long = ([Example((name, place), (1.0, 1.0)) for place in range(name)] for name in (2, 4))
    drawn = [example.tokens for example in islice(tau2_policy.draw([short, long]), 16)]
    assert [name for name, _ in drawn] == [2, 4] * 8
    for rounds, size in ((drawn[::2], 2), (drawn[1::2], 4)):
        for begin in range(0, 8, size):
            assert sorted(place for _, place in rounds[begin : begin + size]) == list(range(size))
    assert drawn[1:9:2] != drawn[9::2], "each round has a new order"


def test_the_repairs_of_telecom_are_demonstrated_in_a_fixed_order() -> None:
    roaming = {"customer_id": "C1001", "line_id": "L1002"}
    actions = [
        SimpleNamespace(name="grant_app_permission", requestor="user", arguments={}),
        SimpleNamespace(name="enable_roaming", requestor="assistant", arguments=roaming),
        SimpleNamespace(name="toggle_airplane_mode", requestor="user", arguments={}),
    ]
    task = SimpleNamespace(evaluation_criteria=SimpleNamespace(actions=actions))
    order = ["toggle_airplane_mode", "enable_roaming", "grant_app_permission"]
    first, second, *repairs = tau2_policy.demonstration("telecom", task)
    assert (first, second) == (tau2_policy.LINE, tau2_policy.CHECKS)
    assert [tau2_policy.tool_of(reply) for reply in repairs] == order
    assert repairs[1].tool_calls[0].arguments == roaming
    retail = [tau2_policy.tool_of(reply) for reply in tau2_policy.demonstration("retail", task)]
    assert retail == [action.name for action in actions], "in the order of the solution"


class Saved:
    """A model or tokenizer that writes a file, or fails."""

    def __init__(self, name: str, *, fails: bool = False) -> None:
        self._name = name
        self._fails = fails

    def to(self, dtype: object) -> "Saved":
        return self

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / self._name).write_text(self._name)
        if self._fails:
            raise KeyboardInterrupt


def test_the_folder_of_a_policy_exists_only_if_it_is_complete(tmp_path: Path) -> None:
    folder = tmp_path / "practice"
    model: Any = Saved("model")
    with pytest.raises(KeyboardInterrupt):
        tau2_policy.save_policy(model, Saved("tokenizer", fails=True), folder)
    assert not folder.exists(), "make would take it for a finished policy"
    for _ in range(2):
        tau2_policy.save_policy(model, Saved("tokenizer"), folder)
    assert [path.name for path in tmp_path.iterdir()] == ["practice"]
    assert {path.name for path in folder.iterdir()} == {"model", "tokenizer"}
