"""Run `check_env` on the shipped environments, and on ones with typical mistakes."""

from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Any

import pytest

from tests.support.toy import ToyEnv, ToyTasks
from unstale.envs import Message, Taskset, Turn
from unstale.envs.calculator import CalculatorTasks
from unstale.envs.python_tool import PythonTasks
from unstale.records import Task
from unstale.testing import check_env


@pytest.mark.parametrize(
    "taskset",
    [CalculatorTasks(), PythonTasks(), ToyTasks()],
    ids=lambda tasks: type(tasks).__name__,
)
def test_a_shipped_environment_keeps_the_contract(taskset: Taskset) -> None:
    check_env(taskset)


class Unseeded(ToyTasks):
    def env(self, task: Task, seed: int) -> ToyEnv:
        env = super().env(task, seed)
        env.turns = Random().randrange(2)
        return env


class Leaks(ToyTasks):
    def held_out(self, number: int) -> list[Task]:
        return [Task("toy", "train", 1 + index) for index in range(number)]


class Restless(ToyTasks):
    def train(self, seed: int) -> Iterator[Task]:
        return (Task("toy", "train", Random().randrange(10**9)) for _ in count())


class Silent(ToyTasks):
    def env(self, task: Task, seed: int) -> Any:
        class Env(ToyEnv):
            async def step(self, reply: Message) -> Turn:
                return Turn(())

        return Env(task, self)


@pytest.mark.parametrize(
    "taskset, says",
    [
        (Unseeded(), "went differently the second time"),
        (Leaks(), "held-out tasks are among the training tasks"),
        (Restless(), "gives other tasks the second time"),
        (Silent(), "leaves nothing to answer"),
    ],
)
def test_a_broken_one_is_told_what_is_wrong(taskset: Taskset, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_env(taskset)
