"""Protocols of environments, which exchange messages with the policy, and of task sets.

`chat.py` converts messages to tokens.
"""

import math
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from numbers import Real
from random import Random
from reprlib import repr as short_repr
from typing import Any, Literal, Protocol, runtime_checkable

from unstale.records import Task

_TASKS_PER_SEED = 10**9
"""Task numbers reserved for each seed, so that two seeds have no task in common."""


def tool_schema(
    name: str, description: str, properties: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the schema of a tool as chat templates expect it. All `properties` are required."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the policy. `error` is not empty if the call is malformed."""

    name: str
    arguments: Mapping[str, Any]
    error: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, as in chat templates."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    thoughts: str = ""
    """Reasoning of the assistant, if the chat template supports it."""


class EnvError(Exception):
    """A fault of the environment. The episode is retried, then counted as failed."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An environment's answer to a reply: new messages, and rewards if the episode is `done`.

    Numbers may be NumPy or torch scalars. Raises `EnvError`, which names the field, for anything
    that is not a finite number.

    >>> Turn((), done=True, rewards={"right": True}).rewards
    {'right': 1.0}
    """

    messages: tuple[Message, ...]
    done: bool = False
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards by name, if `done`. The episode's reward is their sum, or the result of `combine`.

    One number becomes `{"reward": number}`."""
    reward: float = 0.0
    """Reward of the last reply alone, used only by the advantage estimator `turn_level`."""
    facts: Mapping[str, float] = field(default_factory=dict)
    """Numbers to log."""

    def __post_init__(self) -> None:
        set_field = partial(object.__setattr__, self)
        set_field("messages", _messages(self.messages))
        if isinstance(self.rewards, Mapping):
            set_field("rewards", _numbers("rewards", self.rewards))
        else:
            set_field(
                "rewards", {"reward": _number("rewards", self.rewards, " or numbers by name")}
            )
        set_field("reward", _number("reward", self.reward))
        set_field("facts", _numbers("facts", self.facts))


def _messages(messages: Any) -> tuple[Message, ...]:
    found = tuple(messages) if isinstance(messages, list | tuple) else (messages,)
    for message in found:
        if not isinstance(message, Message) or not isinstance(message.content, str):
            raise EnvError(
                "Turn.messages must be a tuple of Message(role, content) with content as text, "
                f"got {short_repr(message)}"
            )
    return found


def _numbers(name: str, values: Any) -> dict[str, float]:
    if not isinstance(values, Mapping):
        raise EnvError(f"Turn.{name} must be numbers by name, got {short_repr(values)}")
    return {str(key): _number(f"{name}[{short_repr(key)}]", value) for key, value in values.items()}


def _number(name: str, value: Any, or_else: str = "") -> float:
    """Return a number or a scalar of NumPy or torch as float. Raises `EnvError`."""
    if type(value) is float and math.isfinite(value):
        return value
    try:
        number = value if isinstance(value, Real) else value.item()
        if isinstance(number, Real) and math.isfinite(number):
            return float(number)
    except (AttributeError, TypeError, ValueError, RuntimeError, OverflowError):
        pass
    raise EnvError(f"Turn.{name} must be a finite number{or_else}, got {short_repr(value)}")


class Env(Protocol):
    """One episode, seeded and used once. Both methods may raise `EnvError`.

    A method that is no coroutine runs in a thread.
    """

    def begin(self) -> Awaitable[Turn] | Turn:
        """Return the first messages (system, user)."""
        ...

    def step(self, reply: Message) -> Awaitable[Turn] | Turn:
        """Answer a reply of the policy. `reply.role` is "assistant"."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """An environment that can save and restore its state.

    To resume any other environment, the recorded replies are sent to a new one. It must answer them
    as the first one did.
    """

    def snapshot(self) -> str:
        """Return the state between two replies as text, for the journal."""
        ...

    async def resume(self, state: str) -> None:
        """Restore the state in a new environment of the same task and seed, instead of `begin`."""
        ...


@runtime_checkable
class HasSimulatedDelays(Protocol):
    """An environment with simulated delays, which it skips while `replaying` is true."""

    replaying: bool


@runtime_checkable
class Closable(Protocol):
    """An environment with resources to release at the end of an episode, failed or not."""

    def close(self) -> Awaitable[None] | None:
        """Release the resources within a few seconds. An error fails the episode."""
        ...


class Taskset(Protocol):
    """A source of tasks and their environments."""

    name: str
    tools: tuple[Mapping[str, Any], ...]
    """JSON schemas of the tools, in the format of chat templates."""

    def train(self, seed: int) -> Iterator[Task]:
        """Yield training tasks without end, in an order that depends only on `seed`."""
        ...

    def held_out(self, count: int) -> list[Task]:
        """Return a fixed set of tasks that `train` never yields."""
        ...

    def env(self, task: Task, seed: int) -> Env:
        """Return a new environment. All its randomness is derived from `task` and `seed`."""
        ...


class NumberedTasks:
    """A base class for task sets that generate each task from its number."""

    name: str

    def train(self, seed: int) -> Iterator[Task]:
        return (Task(self.name, "train", index) for index in count(seed * _TASKS_PER_SEED))

    def held_out(self, count: int) -> list[Task]:
        return [Task(self.name, "held_out", index) for index in range(count)]

    @staticmethod
    def seed_of(task: Task) -> int:
        """Return a random seed of 31 bits: odd for a training task, even for a held-out one."""
        return 2 * Random(task.key).getrandbits(30) + (task.split == "train")


class ListedTasks:
    """A base class for task sets with a list of task data for each split."""

    name: str
    data: Mapping[str, Sequence[Any]]

    def train(self, seed: int) -> Iterator[Task]:
        """Yield the list again and again, each time in a new order and with new task numbers."""
        number = len(self.data["train"])
        for begin in range(0, _TASKS_PER_SEED - number, number):
            order = Random(f"{self.name}/{seed}/{begin}").sample(range(number), number)
            first = seed * _TASKS_PER_SEED + begin
            yield from (Task(self.name, "train", first + place) for place in order)

    def held_out(self, count: int) -> list[Task]:
        """Return the first `count` tasks, or all if there are fewer."""
        return [
            Task(self.name, "held_out", index)
            for index in range(min(count, len(self.data["held_out"])))
        ]

    def data_of(self, task: Task) -> Any:
        """Return the task's entry in the list."""
        data = self.data[task.split]
        return data[task.index % _TASKS_PER_SEED % len(data)]


@runtime_checkable
class RewardCombiner(Protocol):
    """A task set that combines named rewards itself."""

    def combine(self, rewards: Mapping[str, float]) -> float:
        """Return an episode's reward."""
        ...


def combine_rewards(taskset: Taskset, turn: Turn) -> Turn:
    """Return the turn with one combined reward, if it is the last and the task set has `combine`.

    The named rewards become facts `reward/<name>`, which are logged.
    """
    if not (turn.done and turn.rewards and isinstance(taskset, RewardCombiner)):
        return turn
    parts = {f"reward/{name}": value for name, value in turn.rewards.items()}
    rewards = {"reward": taskset.combine(turn.rewards)}
    return replace(turn, rewards=rewards, facts={**turn.facts, **parts})
