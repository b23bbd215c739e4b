"""Task sets for tests of isolation. Worker processes import this module, so it imports little."""

import asyncio
import json
import os
import sys
import threading
from random import Random
from typing import Any

from tests.support import urllib_agent
from unstale.envs import Message, NumberedTasks, Turn
from unstale.envs.external import ExternalAgent
from unstale.records import Task


class Plain:
    """An environment of two replies whose methods are plain functions."""

    def __init__(self, task: Task, seed: int) -> None:
        self.random = Random(f"{task.key}/{seed}")
        self.replies = 0

    def begin(self) -> Turn:
        return Turn((Message("user", f"say {self.random.randrange(100)}"),))

    def step(self, reply: Message) -> Turn:
        self.replies += 1
        if self.replies == 2:
            rewards = {"luck": self.random.random(), "length": len(reply.content) % 3 / 3}
            return Turn((), done=True, rewards=rewards, facts={"replies": self.replies})
        return Turn((Message("user", f"now {self.random.randrange(100)}"),))

    def close(self) -> None:
        self.random.random()


class Async:
    """An environment like `Plain` whose methods are coroutines."""

    def __init__(self, task: Task, seed: int) -> None:
        self.plain = Plain(task, seed)

    async def begin(self) -> Turn:
        return self.plain.begin()

    async def step(self, reply: Message) -> Turn:
        return self.plain.step(reply)


class Delayed(Async):
    """An environment like `Async` that waits for timers, tasks and a thread."""

    async def step(self, reply: Message) -> Turn:
        await asyncio.sleep(self.plain.random.random())
        turn = await asyncio.create_task(super().step(reply))
        await asyncio.to_thread(threading.get_ident)
        return turn


class Saved(Async):
    """An environment that saves its state."""

    def snapshot(self) -> str:
        version, state, gauss = self.plain.random.getstate()
        return json.dumps([self.plain.replies, version, state, gauss])

    async def resume(self, state: str) -> None:
        self.plain.replies, version, numbers, gauss = json.loads(state)
        self.plain.random.setstate((version, tuple(numbers), gauss))


class Mixed(NumberedTasks):
    """A task set with all of these environments, which combines its rewards."""

    name = "mixed"
    tools = ()

    def env(self, task: Task, seed: int) -> Any:
        return (Plain, Async, Delayed, Saved)[task.index % 4](task, seed)

    def combine(self, rewards: dict[str, float]) -> float:
        return max(rewards.values())


class Where(Plain):
    """An environment of one reply. The reward is 1 in a worker process, else 0."""

    def step(self, reply: Message) -> Turn:
        return Turn((), done=True, rewards={"worker": float(in_a_worker())})


class WhereTasks(NumberedTasks):
    name = "where"
    tools = ()

    def env(self, task: Task, seed: int) -> Where:
        return Where(task, seed)


def in_a_worker() -> bool:
    return "pytest" not in sys.modules


def agent(base_url: str, task: str, seed: int, api_key: str) -> dict[str, float]:
    """Return the reward, and the id of this process."""
    return {"right": urllib_agent.main(base_url, task, api_key), "process": float(os.getpid())}


def agents() -> ExternalAgent:
    return ExternalAgent(agent, ["1 + 2", "30 + 4"], held_out=["5 + 6"], name="agents")


def cannot_be_made_in_a_worker() -> Mixed:
    if in_a_worker():
        raise OSError("no licence")
    return Mixed()
