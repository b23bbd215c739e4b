"""Environments pose tasks, answer replies and judge episodes. They speak messages; `chat.py` makes tokens of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random
from types import MappingProxyType
from typing import Any, Literal, Protocol, runtime_checkable

from unstale.records import Task

_A_SEED = 10**9
"""Numbers of tasks that a seed has for itself."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the policy made. `error` says why the text is not a call, for the environment to answer."""

    name: str
    arguments: Mapping[str, Any]
    error: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, as chat templates know them."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    thoughts: str = ""
    """Of the assistant, where the chat template knows of them."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the environment says: new messages, and at the end the verdict.

    `rewards` are named channels and only count when `done`; they are added up, unless the task set is `RewardCombiner`.
    `reward` is for the last reply alone, in addition; only the credit estimator `turn_level` reads it.
    """

    messages: tuple[Message, ...]
    done: bool = False
    rewards: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    reward: float = 0.0
    facts: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


class EnvError(Exception):
    """The environment's own fault. The episode is retried, then reported; the run goes on."""


class Env(Protocol):
    """One episode: single use, seeded. Both methods may raise `EnvError`."""

    async def begin(self) -> Turn:
        """The opening messages (system, user)."""
        ...

    async def step(self, reply: Message) -> Turn:
        """Answer the policy's reply. `reply.role` is "assistant"."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """An environment that can be put where it was without asking it everything again.

    One that is not is resumed by replaying the recorded replies to it, and has to answer each with the same text.
    """

    def snapshot(self) -> str:
        """All of it between two replies, as text. It is kept in the journal."""
        ...

    async def resume(self, state: str) -> None:
        """In place of `begin`: a fresh environment, of the same task and seed, goes on from there."""
        ...


@runtime_checkable
class HasSimulatedDelays(Protocol):
    """An environment whose waiting is pretended, so that it can leave it out while it is `replaying`."""

    replaying: bool


@runtime_checkable
class Closable(Protocol):
    """An environment that holds something outside of it, to be let go however its episode ends."""

    async def close(self) -> None:
        """Raises nothing, and takes no longer than a few seconds."""
        ...


class Taskset(Protocol):
    """Where tasks come from, and the environment that poses each."""

    name: str
    tools: tuple[Mapping[str, Any], ...]
    """JSON schemas of the tools, as chat templates take them."""

    def train(self, seed: int) -> Iterator[Task]:
        """Endless, in an order that depends on `seed` alone."""
        ...

    def held_out(self, count: int) -> list[Task]:
        """The same tasks each time, none of which `train` ever yields."""
        ...

    def env(self, task: Task, seed: int) -> Env:
        """A fresh environment for one episode. Everything random in it comes from `task` and `seed`."""
        ...


class NumberedTasks:
    """The tasks of a task set that makes each from its number alone."""

    name: str

    def train(self, seed: int) -> Iterator[Task]:
        return (Task(self.name, "train", index) for index in count(seed * _A_SEED))

    def held_out(self, count: int) -> list[Task]:
        return [Task(self.name, "held_out", index) for index in range(count)]

    @staticmethod
    def seed_of(task: Task) -> int:
        """31 bits; odd for training tasks, even for others."""
        return 2 * Random(task.key).getrandbits(30) + (task.split == "train")


class ListedTasks:
    """The tasks of a task set that has a list of what it poses, for each split."""

    name: str
    data: Mapping[str, Sequence[Any]]

    def train(self, seed: int) -> Iterator[Task]:
        """All tasks in another order each time round; each time under other numbers."""
        number = len(self.data["train"])
        for begin in range(0, _A_SEED - number, number):
            order = Random(f"{self.name}/{seed}/{begin}").sample(range(number), number)
            yield from (Task(self.name, "train", seed * _A_SEED + begin + place) for place in order)

    def held_out(self, count: int) -> list[Task]:
        """The first of those given; fewer if there are no more."""
        return [
            Task(self.name, "held_out", index)
            for index in range(min(count, len(self.data["held_out"])))
        ]

    def data_of(self, task: Task) -> Any:
        """What stands in the list."""
        data = self.data[task.split]
        return data[task.index % _A_SEED % len(data)]


@runtime_checkable
class RewardCombiner(Protocol):
    """A task set whose named rewards are not to be added up."""

    def combine(self, rewards: Mapping[str, float]) -> float:
        """An episode's reward, of its named rewards."""
        ...


def combine_rewards(taskset: Taskset, turn: Turn) -> Turn:
    """A verdict with one reward, if the task set combines them; what it is made of is then in facts `reward/<name>`."""
    if not (turn.done and turn.rewards and isinstance(taskset, RewardCombiner)):
        return turn
    made_of = {f"reward/{name}": float(value) for name, value in turn.rewards.items()}
    rewards = MappingProxyType({"reward": float(taskset.combine(turn.rewards))})
    return replace(turn, rewards=rewards, facts=MappingProxyType({**turn.facts, **made_of}))
