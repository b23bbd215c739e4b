"""Run `check_env` on the shipped environments, and on ones with typical mistakes."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.toy import ToyEnv, ToyTasks
from unstale.config.tasks import libraries, shipped_envs
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


TESTED = {
    **dict.fromkeys(("airline", "delivery", "instore", "retail", "telecom"), "envs/test_desks.py"),
    **dict.fromkeys(("calculator", "python"), "contracts/test_envs.py"),
    **dict.fromkeys(("gymnasium", "reasoning-gym", "textarena"), "envs/test_libraries.py"),
    "bfcl": "envs/test_bfcl.py",
    "chain": "envs/test_chain.py",
    "traces": "envs/test_traces.py",
    "dataset": "envs/test_dataset.py",
    "desks": "envs/test_mixed_desks.py",
    "openenv": "adapters/test_openenv.py",
    "synthesis": "envs/test_synthesis.py",
    "tau2": "adapters/test_tau2.py",
    "terminal": "envs/test_terminal_tasks.py",
    "vita": "envs/test_vita.py",
}
"""The test that runs `check_env`, which forks episodes, on each environment and adapter."""
REFUSED = {"verifiers"}
"""Adapters of external agents, which techniques that fork episodes refuse."""


def test_every_shipped_environment_and_adapter_is_forked_in_a_test_or_refuses_forks() -> None:
    assert {*shipped_envs(), *libraries()} == {*TESTED, *REFUSED}
    tests = Path(__file__).parents[1]
    assert all("check_env(" in (tests / name).read_text("utf-8") for name in TESTED.values())
    for name in REFUSED:
        found = find_spec(libraries()[name])
        assert found and found.origin and "ExternalAgent" in Path(found.origin).read_text("utf-8")


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


class Shared(ToyTasks):
    """A task set whose environments have one state, which each of them resets when it begins."""

    replies = 0

    def env(self, task: Task, seed: int) -> Any:
        tasks = self

        class Env(ToyEnv):
            async def begin(self) -> Turn:
                tasks.replies = 0
                return await super().begin()

            async def step(self, reply: Message) -> Turn:
                tasks.replies += 1
                return Turn((Message("user", str(tasks.replies)),), done=tasks.replies > 5)

        return Env(task, self)


class Fading(ToyTasks):
    """A task set whose environments answer differently while another of the task is open."""

    open = 0

    def env(self, task: Task, seed: int) -> Any:
        tasks = self

        class Env(ToyEnv):
            async def begin(self) -> Turn:
                tasks.open += 1
                return Turn((Message("user", f"player {tasks.open}"),))

            async def close(self) -> None:
                tasks.open -= 1

        return Env(task, self)


class Copied(ToyTasks):
    """A task set whose environments can be copied. Broken ones share `shared` with their parent."""

    def __init__(self, shared: str = "") -> None:
        self._shared = shared

    def env(self, task: Task, seed: int) -> Any:
        shared = self._shared

        class Env:
            def __init__(self) -> None:
                self.random, self.heard, self.files = Random(seed), list[str](), {"open": True}

            async def begin(self) -> Turn:
                return Turn((Message("user", "play"),))

            async def step(self, reply: Message) -> Turn:
                assert self.files["open"], "the files are closed"
                self.heard.append(f"{reply.content}{len(reply.tool_calls)}")
                text = f"{''.join(self.heard)} {self.random.random()}"
                return Turn((Message("user", text),), done=len(self.heard) == 6)

            async def close(self) -> None:
                self.files["open"] = False

            def fork(self) -> "Env":
                copied = Env()
                copied.heard[:] = self.heard
                if shared != "seed":
                    copied.random.setstate(self.random.getstate())
                if shared in ("heard", "random", "files"):
                    setattr(copied, shared, getattr(self, shared))
                return copied

        return Env()


class Saved(Copied):
    """A task set whose environments can be saved. A broken one does not save its random state."""

    def env(self, task: Task, seed: int) -> Any:
        env = super().env(task, seed)
        env.fork, saves = None, self._shared != "random"

        async def resume(state: str) -> None:
            heard, count = json.loads(state)
            env.heard[:] = heard
            for _ in range(count):
                env.random.random()

        env.snapshot = lambda: json.dumps([env.heard, len(env.heard) * saves])
        env.resume = resume
        return env


@pytest.mark.parametrize("taskset", [Copied(), Saved()], ids=["copied", "saved"])
def test_an_environment_that_forks_right_keeps_the_contract(taskset: Taskset) -> None:
    check_env(taskset)


@pytest.mark.parametrize(
    "taskset, says",
    [
        *(
            (Copied(shared), "forked after 1 replies, by copy, change the answers to its parent")
            for shared in ("heard", "random")
        ),
        (Copied("files"), "the files are closed"),
        (Copied("seed"), "after 1 replies, by copy, .* to a fork that gets the same replies"),
        (Saved("random"), "after 1 replies, by snapshot, .* to a fork that gets the same replies"),
        (Unseeded(), "went differently the second time"),
        (Leaks(), "held-out tasks are among the training tasks"),
        (Restless(), "gives other tasks the second time"),
        (Silent(), "leaves nothing to answer"),
        (Shared(), "forked after 1 replies, by replies, change the answers to its parent"),
        (Fading(), "forked after 1 replies gets other answers to the same replies"),
    ],
)
def test_a_broken_one_is_told_what_is_wrong(taskset: Taskset, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_env(taskset)
