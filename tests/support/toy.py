"""A toy task set: the reply "yes" is rewarded. Its episodes can fail, hang or take several
turns."""

import asyncio
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

from unstale.envs import Message, Turn
from unstale.records import Task


class ToyEnv:
    def __init__(self, task: Task, tasks: "ToyTasks") -> None:
        self.task, self.tasks = task, tasks
        self.turns = 0

    async def begin(self) -> Turn:
        if self.tasks.broken and self.task.index % self.tasks.broken == 0:
            raise ValueError(f"{self.tasks.error} {self.task.index}")
        return Turn((Message("user", "say yes"),))

    async def step(self, reply: Message) -> Turn:
        self.turns += 1
        if self.tasks.hangs:
            await asyncio.Event().wait()
        if self.turns < self.tasks.turns:
            return Turn((Message("user", "again"),), reward=float("yes" in reply.content))
        if not self.tasks.pays:
            return Turn((), done=True)
        said = "yes" in reply.content
        return Turn((), done=True, rewards={"yes": float(said)}, facts={"turns": self.turns})


class ToyTasks:
    name = "toy"
    tools: tuple[dict[str, Any], ...] = ()
    turns = 2
    broken = 0
    """Every n-th task raises an error in `begin`, where n is this number; 0 means none."""
    error = "no task"
    hangs = False
    pays = True
    """False ends episodes without a reward."""

    def train(self, seed: int) -> Iterator[Task]:
        return (Task("toy", "train", index) for index in count(seed * 10**6 + 1))

    def held_out(self, number: int) -> list[Task]:
        return [Task("toy", "held-out", -1 - index) for index in range(number)]

    def env(self, task: Task, seed: int) -> ToyEnv:
        return ToyEnv(task, self)


class BrokenTasks(ToyTasks):
    broken = 1


class HostileTasks(BrokenTasks):
    """A task set whose errors try to change the terminal's title, clear it and reverse the text."""

    error = "\x1b]0;title\x07\x1b[2J\x9b2J\u202e\x7fno task"


class BlockingEnv(ToyEnv):
    """An environment that blocks the event loop at the first task."""

    async def begin(self) -> Turn:
        if self.task.index == 1:
            time.sleep(0.5)  # noqa: ASYNC251
        return await super().begin()


class BlockingTasks(ToyTasks):
    def env(self, task: Task, seed: int) -> ToyEnv:
        return BlockingEnv(task, self)


class NoRewardTasks(ToyTasks):
    pays = False


class HalfBrokenTasks(ToyTasks):
    broken = 5
