"""Running totals, asked of a chat model: the tasks of `benchmarks/studies/recipes.toml`.

The first message asks for a sum, and each later one to add a number to it. The replies are not
judged before the last one, which alone decides the reward. So one wrong reply loses the episode.
"""

import random
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from benchmarks.sums import NUMBER, is_right
from unstale.envs import Env, ListedTasks, Message, Turn
from unstale.records import Task

TASKS, HELD_OUT = 1000, 256
"""Numbers of tasks in the list, and of its first tasks, which are held out."""
SYSTEM = "Reply with a number and nothing else."


def questions(numbers: Sequence[int]) -> list[str]:
    """Return the messages of the user: a sum, and numbers to add.

    >>> questions([12, 7, 5])
    ['What is 12 + 7?', 'Add 5.']
    """
    return [f"What is {numbers[0]} + {numbers[1]}?", *(f"Add {each}." for each in numbers[2:])]


class Total:
    """An environment with a reply for each sum of a running total."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._total = sum(numbers)
        self._questions = questions(numbers)
        self._replies = 0

    async def begin(self) -> Turn:
        return Turn((Message("system", SYSTEM), Message("user", self._questions[0])))

    async def step(self, reply: Message) -> Turn:
        self._replies += 1
        if self._replies < len(self._questions):
            return Turn((Message("user", self._questions[self._replies]),))
        right = is_right(reply.content, self._total)
        return Turn((), done=True, rewards={"success": float(right)})


class Totals(ListedTasks):
    """Lists of `replies` + 1 numbers from 1 to `largest`, in one random order for all runs."""

    tools: tuple[Mapping[str, Any], ...] = ()

    def __init__(self, replies: int, largest: int) -> None:
        self.name = f"totals-{replies}"
        draws = random.Random(0)
        lists: dict[tuple[int, ...], None] = {}
        while len(lists) < TASKS:
            lists[tuple(draws.randint(1, largest) for _ in range(replies + 1))] = None
        data = [{"numbers": numbers} for numbers in lists]
        self.data = {"train": data[HELD_OUT:], "held_out": data[:HELD_OUT]}

    def numbers(self, task: Task) -> tuple[int, ...]:
        numbers: tuple[int, ...] = self.data_of(task)["numbers"]
        return numbers

    def text(self, task: Task) -> str:
        return " + ".join(map(str, self.numbers(task)))

    def env(self, task: Task, seed: int) -> Env:
        return Total(self.numbers(task))

    def answer_of(self, task: Task, reply: str) -> str:
        """Return the last number of a reply, which is what it is judged by. Empty without one."""
        return (NUMBER.findall(reply) or [""])[-1]

    def right_replies(self, task: Task) -> list[Message]:
        totals = list(accumulate(self.numbers(task)))[1:]
        return [Message("assistant", str(total)) for total in totals]

    def demonstration(self, task: Task) -> tuple[Message, ...]:
        asked = [Message("user", text) for text in questions(self.numbers(task))]
        pairs = zip(asked, self.right_replies(task), strict=True)
        return (Message("system", SYSTEM), *(message for pair in pairs for message in pair))

    def correction(self, task: Task, replies: Sequence[Message]) -> tuple[int, Message] | None:
        """Return the index of the first reply with a wrong total, and the right one."""
        for number, (said, right) in enumerate(
            zip(replies, self.right_replies(task), strict=False)
        ):
            if not is_right(said.content, int(right.content)):
                return number, right
        return None


def one() -> Totals:
    """One reply: the sum of two numbers."""
    return Totals(1, 40)


def four() -> Totals:
    """Four replies: a running total of five small numbers."""
    return Totals(4, 10)


def hard() -> Totals:
    """Four replies with larger numbers."""
    return Totals(4, 15)
