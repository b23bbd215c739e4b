"""Test the puzzles of reasoning-gym with a calculator: demonstrations, verdicts and turns."""

import asyncio
from collections.abc import Sequence

import pytest

from unstale.builders.sampling import print_notice
from unstale.config import ConfigError, make_task
from unstale.envs import Message, Turn
from unstale.envs.mixed import MixedTasks
from unstale.envs.registry import build_taskset
from unstale.records import Task

pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")
from unstale.research.adapters.reasoning_gym import ReasoningGymTasks


def with_calculator(names: str) -> ReasoningGymTasks:
    taskset = build_taskset(make_task(f"reasoning-gym:{names}", tool="calculator"))
    assert isinstance(taskset, ReasoningGymTasks)
    return taskset


async def play(taskset: ReasoningGymTasks, task: Task, replies: Sequence[Message]) -> list[Turn]:
    env = taskset.env(task, 0)
    return [await env.begin(), *[await env.step(reply) for reply in replies]]


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_demonstrations_with_the_calculator_are_right_by_the_librarys_verdict(split: str) -> None:
    taskset = with_calculator("chain_sum+products+gcd+lcm")
    for index in range(40):
        task = Task(taskset.name, split, index)
        demonstration = taskset.demonstration(task)
        replies = [message for message in demonstration if message.role == "assistant"]
        turns = asyncio.run(play(taskset, task, replies))
        ended = turns[-1]
        assert (*turns[0].messages, *turns[1].messages) == (*demonstration[:2], demonstration[3])
        assert ended.done and dict(ended.rewards) == {"score": 1.0}
        assert dict(ended.facts) == {"tool_calls": 1.0, "tool_errors": 0.0}


def test_several_data_sets_come_in_turn() -> None:
    taskset = with_calculator("chain_sum+gcd+lcm")
    names = [taskset.puzzle(task).name for task in taskset.held_out(6)]
    assert names == ["chain_sum", "gcd", "lcm"] * 2
    with pytest.raises(ConfigError, match="options are for one data set"):
        ReasoningGymTasks("gcd+lcm", max_value=9)


def test_a_puzzle_answered_without_the_calculator_is_scored_too() -> None:
    taskset = with_calculator("lcm")
    task = taskset.held_out(1)[0]
    right = taskset.puzzle(task).answer
    for text, score in ((f" {right}\n", 1.0), (f"{right}1", None), ("", 0.0)):
        ended = asyncio.run(taskset.env(task, 0).step(Message("assistant", text)))
        assert ended.done and ended.facts["tool_calls"] == 0
        assert ended.rewards["score"] == score or (score is None and ended.rewards["score"] < 1)


def test_data_sets_whose_scorer_pays_a_constant_answer_are_named() -> None:
    """Only one pays any answer, and answers of the library that are right by chance are not."""
    taskset = ReasoningGymTasks("game_of_life_halting+chain_sum+propositional_logic")
    assert taskset.notice().startswith(
        "an answer that solves nothing is paid: '?' gets 1.00 in "
        "reasoning-gym:game_of_life_halting. A policy may learn"
    )
    assert not ReasoningGymTasks("basic_arithmetic+syllogism+leg_counting").notice()


def test_a_run_tells_of_paid_constants(capsys: pytest.CaptureFixture[str]) -> None:
    print_notice(MixedTasks("both", [ReasoningGymTasks("game_of_life_halting")]))
    assert "note: an answer that solves nothing is paid" in capsys.readouterr().err
    print_notice(ReasoningGymTasks("chain_sum"))
    assert not capsys.readouterr().err
