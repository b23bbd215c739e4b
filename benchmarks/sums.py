"""The task of `benchmarks/studies/real.toml`: sums of two numbers, asked of a chat model.

A small pretrained model writes sentences at first, and few of its answers are right. It learns the
short form and the sum within some ten steps, so a study can afford many runs.
"""

import random
import re
from collections.abc import Mapping
from typing import Any

from unstale.envs import Env, ListedTasks, Message, Turn
from unstale.records import Task

LARGEST = 60
HELD_OUT = 360
"""Number of held-out sums, a tenth of all. No sum is in both lists."""
NUMBER = re.compile(r"-?\d+")


def is_right(reply: str, total: int) -> bool:
    """Return True if the last number of a reply is the sum.

    >>> is_right("12 + 30 is 42.", 42), is_right("42, or 43", 42), is_right("no idea", 42)
    (True, False, False)
    """
    numbers = NUMBER.findall(reply)
    return bool(numbers) and numbers[-1] == str(total)


class Sum:
    """An environment of one turn: a sum, and a reward of 1 for the right number."""

    def __init__(self, first: int, second: int) -> None:
        self._first, self._second = first, second

    async def begin(self) -> Turn:
        text = f"What is {self._first} + {self._second}? Answer with the number only."
        return Turn((Message("user", text),))

    async def step(self, reply: Message) -> Turn:
        right = is_right(reply.content, self._first + self._second)
        return Turn((), done=True, rewards={"success": float(right)})


class Sums(ListedTasks):
    """All sums of two numbers from 1 to `LARGEST`, in one random order for all runs."""

    name = "sums"
    tools: tuple[Mapping[str, Any], ...] = ()

    def __init__(self) -> None:
        numbers = range(1, LARGEST + 1)
        pairs = [(first, second) for first in numbers for second in numbers]
        random.Random(0).shuffle(pairs)
        data = [{"first": a, "second": b, "answer": a + b} for a, b in pairs]
        self.data = {"train": data[HELD_OUT:], "held_out": data[:HELD_OUT]}

    def text(self, task: Task) -> str:
        data = self.data_of(task)
        return f"{data['first']} + {data['second']}"

    def env(self, task: Task, seed: int) -> Env:
        data = self.data_of(task)
        return Sum(data["first"], data["second"])
