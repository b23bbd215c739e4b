"""Test `synthesis`: its tasks have one answer, come once, and keep to measured pass rates."""

import asyncio
import json
import re
from collections.abc import Mapping
from itertools import islice, permutations
from pathlib import Path
from random import Random
from types import MappingProxyType

import pytest

from unstale.config import ConfigError
from unstale.config.tasks import make_task
from unstale.envs import Message
from unstale.envs.registry import build_taskset
from unstale.records import Task
from unstale.research.envs.synthesis import (
    TEMPLATES,
    Draft,
    Puzzle,
    SynthesisConfig,
    SynthesisTasks,
    read_pass_rates,
    refusal,
)
from unstale.testing import check_env


def made(**options: object) -> SynthesisTasks:
    values = {"size": 60, "held_out": 20, **options}
    return SynthesisTasks(SynthesisConfig(**values))  # type: ignore[arg-type]


def test_it_keeps_the_contract_of_environments() -> None:
    check_env(made())
    assert isinstance(build_taskset(make_task("synthesis", size=9, held_out=9)), SynthesisTasks)


def test_a_draft_is_kept_if_its_one_answer_is_its_makers() -> None:
    assert refusal(Draft("?", "3", {"3"}), seen=set()) == ""
    assert refusal(Draft("?", "3", {"3"}), seen={"?"}) == "duplicate"
    assert refusal(Draft("?", "3", {"3", "4"}), seen=set()) == "several answers"
    assert refusal(Draft("?", "3", {"4"}), seen=set()) == "another answer"
    assert refusal(Draft("?", "3", set()), seen=set()) == "another answer"


def answers_to(text: str) -> set[str]:
    """Return the answers to a puzzle, read from its text alone."""
    if " stand in a line" in text:
        people = text.partition(" stand in a line")[0].split(", ")
        before = re.findall(r"(\w+) stands before (\w+)", text)
        (asked,) = re.findall(r"Who is number (\d)", text)
        return {
            line[int(asked) - 1]
            for line in permutations(people)
            if all(line.index(one) < line.index(other) for one, other in before)
        }
    if " cost" in text:
        (top,) = map(int, re.findall(r"from 1 to (\d+)", text))
        totals = re.findall(r"(\d+) x (\w+) and (\d+) x (\w+) cost (\d+)", text)
        (asked,) = re.findall(r"What does a (\w+) cost", text)
        assert asked == totals[0][1]
        return {
            str(one)
            for one in range(1, top + 1)
            for other in range(1, top + 1)
            if all(int(a) * one + int(b) * other == int(cost) for a, _, b, _, cost in totals)
        }
    (top,) = map(int, re.findall(r"between 1 and (\d+)", text))
    rests = re.findall(r"divided by (\d+) it leaves (\d+)", text)
    sums = re.findall(r"digits add up to (\d+)", text)
    return {
        str(n)
        for n in range(1, top + 1)
        if all(n % int(by) == int(rest) for by, rest in rests)
        and all(sum(map(int, str(n))) == int(total) for total in sums)
    }


def test_every_task_has_one_answer_and_comes_once() -> None:
    tasks = made(easiest=1, hardest=4)
    puzzles: list[Puzzle] = [*tasks.data["train"], *tasks.data["held_out"]]
    assert all(answers_to(puzzle.text) == {puzzle.answer} for puzzle in puzzles)
    assert len({puzzle.text for puzzle in puzzles}) == len(puzzles) == 80
    assert {puzzle.topic for puzzle in puzzles} == set(TEMPLATES)
    assert {puzzle.difficulty for puzzle in puzzles} == {1, 2, 3, 4}
    assert tasks.refused["several answers"] > 0 and tasks.refused["another answer"] == 0
    for puzzle in puzzles[:5]:  # the lineage makes the same task again
        topic, difficulty, _, _ = puzzle.lineage.split("/")
        again = TEMPLATES[topic](Random(puzzle.lineage), int(difficulty))
        assert (again.text, again.answer) == (puzzle.text, puzzle.answer)
    ours = {tasks.identity(task) for task in islice(tasks.train(0), 60)}
    assert len(ours) == 60
    assert ours == {tasks.identity(task) for task in islice(tasks.train(1), 60, 120)}


def test_the_last_word_of_the_reply_is_the_answer() -> None:
    tasks = made(topics="order", easiest=2, hardest=2)
    task = Task("synthesis", "train", 0)
    answer = tasks.data_of(task).answer

    def reward(text: str) -> float:
        async def play() -> float:
            env = tasks.env(task, 0)
            opening = await env.begin()
            assert opening.messages[-1].content == tasks.data_of(task).text
            turn = await env.step(Message("assistant", text))
            assert turn.done and turn.facts == {"difficulty": 2.0}
            return turn.rewards["success"]

        return asyncio.run(play())

    assert reward(f"It is {answer.upper()}.") == reward(f"**{answer}**") == 1
    assert reward("") == reward(f"{answer} or not") == reward("Nobody") == 0


def rates_file(
    folder: Path,
    rates: dict[int, tuple[int, int]],
    *,
    split: str = "train",
    options: Mapping[str, object] = MappingProxyType({}),
) -> str:
    """Write a file as `unstale eval --save` does, with successes and attempts by task."""
    rows: list[dict[str, object]] = [{"policy": "0", **options}]
    for place, (successes, attempts) in rates.items():
        rows += [
            {"task": f"synthesis/{split}/{place}", "attempt": k, "success": k < successes}
            for k in range(attempts)
        ]
    path = folder / "rates.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_measured_tasks_are_kept_by_their_pass_rate(tmp_path: Path) -> None:
    """A policy whose chance is 0.995, 0.5 or 0.005 by difficulty has 8 attempts at each task."""
    whole = made()
    measured = made(measure=True)
    keys = [task.key for task in measured.held_out(1000)]
    assert keys == [f"synthesis/train/{place}" for place in range(60)]
    assert {task.split for task in islice(measured.train(0), 100)} == {"held_out"}
    noise = Random(0)
    chance = {1: 0.995, 2: 0.5, 3: 0.005}
    rates = {
        place: (sum(noise.random() < chance[puzzle.difficulty] for _ in range(8)), 8)
        for place, puzzle in enumerate(whole.data["train"])
    }
    path = rates_file(tmp_path, rates)
    assert read_pass_rates(Path(path), "synthesis/train/", {}) == {
        place: successes / 8 for place, (successes, _) in rates.items()
    }
    kept = made(pass_rates=path).data["train"]
    assert kept == [
        puzzle for place, puzzle in enumerate(whole.data["train"]) if 0 < rates[place][0] < 8
    ]
    middle = [
        sum(each.difficulty == 2 for each in part) / len(part)
        for part in (whole.data["train"], kept)
    ]
    assert middle[0] < 0.4 and middle[1] > 0.7
    few = made(pass_rates=path, lowest_rate=0.4, highest_rate=0.6).data["train"]
    assert 0 < len(few) < len(kept)


def test_what_cannot_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task.topics must be some of numbers, .*got 'poems'"):
        made(topics="poems")
    with pytest.raises(ConfigError, match=r"task.easiest must be <= task.hardest, got 3 and 2"):
        made(easiest=3, hardest=2)
    with pytest.raises(ConfigError, match=r"leave task.pass_rates empty"):
        made(measure=True, pass_rates="x")
    with pytest.raises(ConfigError, match=r"give \d+ different tasks, fewer than task.size"):
        made(topics="numbers", hardest=1, size=500)
    with pytest.raises(ConfigError, match=r"missing.jsonl: No such file"):
        made(pass_rates=str(tmp_path / "missing.jsonl"))
    with pytest.raises(ConfigError, match=r"measure them with --task.measure true"):
        made(pass_rates=rates_file(tmp_path, {0: (1, 2)}, split="held_out"))
    with pytest.raises(ConfigError, match=r"has no training task with a pass rate from 0.01"):
        made(pass_rates=rates_file(tmp_path, {0: (0, 2), 1: (2, 2)}))
    same = {"task.topics": " ".join(TEMPLATES), "task.tasks_seed": 0, "task.size": 7}
    made(pass_rates=rates_file(tmp_path, {0: (1, 2)}, options=same))
    for name, value in (("tasks_seed", 3), ("topics", "order"), ("held_out", 5), ("hardest", 5)):
        other = rates_file(tmp_path, {0: (1, 2)}, options={**same, f"task.{name}": value})
        says = rf"of other tasks: they were measured with task.{name} {value}, and this run has"
        with pytest.raises(ConfigError, match=says):
            made(pass_rates=other)
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n{}\n")
    with pytest.raises(ConfigError, match="is not a file of `unstale eval --save`"):
        made(pass_rates=str(bad))
