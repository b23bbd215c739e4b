"""Test tasks of BFCL with its own checker: possible answers are right, changed ones wrong."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from unstale.config import ConfigError
from unstale.envs import EnvError, Message, Turn
from unstale.envs.calls import PythonCalls
from unstale.research.adapters import bfcl
from unstale.research.adapters.bfcl import (
    BfclEnv,
    BfclTasks,
    BfclTurns,
    first_values,
    is_valid,
    load_entries,
    reference_calls,
)
from unstale.testing import check_env

pytest.importorskip("bfcl_eval", reason="needs: pip install --no-deps bfcl-eval==2026.3.23")

CATEGORIES = ["simple_python", "multiple", "parallel", "parallel_multiple", "live_simple"]


@pytest.mark.parametrize("category", CATEGORIES)
def test_possible_answers_are_right_and_others_wrong(category: str) -> None:
    entries = load_entries(category)[:40]
    assert len(entries) == 40
    for entry in entries:
        calls = reference_calls(entry)
        whole = [
            replace(call, arguments=first_values(answer[call.name], optional=True))
            for call, answer in zip(calls, entry["answer"], strict=True)
        ]  # some schemas require an argument that their answers leave out
        assert is_valid(entry, category, calls) or is_valid(entry, category, whole), entry["id"]
        assert not is_valid(entry, category, [replace(each, name="other") for each in calls])
        assert not is_valid(entry, category, calls[:-1])


def test_an_irrelevant_question_must_not_be_answered_by_a_call() -> None:
    (entry, *_) = load_entries("irrelevance")
    (other, *_) = load_entries("simple_python")
    assert is_valid(entry, "irrelevance", [])
    assert not is_valid(entry, "irrelevance", reference_calls(other))


def test_tasks_are_split_by_their_names_and_an_episode_is_one_reply() -> None:
    tasks = BfclTasks("simple_python")
    held_out, train = list(tasks.held_out(1_000)), tasks.train(0)
    names = {tasks.identity(task) for task in held_out}
    assert 60 < len(names) < 140 and tasks.identity(next(iter(train))) not in names
    task = held_out[0]
    env = tasks.env(task, 0)
    assert isinstance(env, BfclEnv)
    assert env.begin().messages[-1].role == "user" and tasks.tools_of(task)
    turn = env.step(Message("assistant", "I cannot help."))
    assert turn.done and turn.rewards == {"valid": 0.0}
    right = tasks.demonstration(task)[-1].tool_calls
    assert env.step(Message("assistant", "", right)).rewards == {"valid": 1.0}


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize("category", ["simple_python", "multi_turn_base"])
def test_its_environments_keep_the_contract(category: str) -> None:
    check_env(BfclTasks(category), episodes=3, max_turns=6)


async def played(entry: Mapping[str, Any], turns: list[list[str]]) -> Turn:
    """Play calls that are written in Python, each in a reply, and return the last turn."""
    env = BfclTurns(entry)
    await env.begin()
    for written in turns:
        for text in written:
            (call,) = PythonCalls("", "").read(text, {})
            turn = await env.step(Message("assistant", "", (call,)))
            assert not turn.done and turn.messages[0].role == "tool"
        turn = await env.step(Message("assistant", "Done."))
    return turn


def test_categories_without_right_calls_have_no_demonstrations() -> None:
    for category in ("simple_java", "irrelevance", "multi_turn_base"):
        tasks = BfclTasks(category)
        with pytest.raises(ConfigError, match="no demonstrations"):
            tasks.demonstration(next(tasks.train(0)))


def test_turns_are_judged_by_the_states_and_results_of_their_calls() -> None:
    entry = next(
        each
        for each in load_entries("multi_turn_base")
        if all("='" in call or "()" in call for turn in each["answer"] for call in turn)
    )
    turn = asyncio.run(played(entry, entry["answer"]))
    assert turn.done and turn.rewards == {"valid": 1.0}
    turn = asyncio.run(played(entry, [*entry["answer"][:-1], []]))
    assert turn.done and turn.rewards == {"valid": 0.0}


def test_a_checker_that_breaks_is_an_error_and_no_reward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bfcl, "_RUN", "import no_such_module")
    (entry, *_) = load_entries("multi_turn_base")
    with pytest.raises(EnvError, match="no_such_module"):
        asyncio.run(played(entry, [[] for _ in entry["answer"]]))


@pytest.mark.parametrize("category", ["web_search", "memory_kv", "nope"])
def test_categories_that_cannot_be_used_are_refused(category: str) -> None:
    with pytest.raises(ConfigError, match=category):
        BfclTasks(category)
