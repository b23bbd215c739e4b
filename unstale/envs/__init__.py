"""The Protocols of environments and task sets. An environment exchanges messages with the policy.

A task set creates the environments of its tasks. `chat.py` converts messages to tokens.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cache, partial
from hashlib import sha256
from itertools import count
from numbers import Real
from random import Random
from reprlib import repr as short_repr
from typing import Any, Literal, Protocol, TypeGuard, TypeVar, get_args, runtime_checkable

from unstale.records import Task

_Contract = TypeVar("_Contract")

MAX_REWARD = 1e15
"""Largest absolute value of a reward. Squares of larger ones would not fit into float32."""
MAX_FACT = 1e300
"""Largest absolute value of a fact (see `Turn.facts`), so that the sum over a batch is finite."""
_TASKS_PER_SEED = 10**9
"""Number of task numbers reserved for each seed of a run, so that two runs with different seeds
share no task.
"""


def tool_schema(
    name: str, description: str, properties: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the schema of a tool in the format that chat templates expect.

    `properties` has the schema of each argument by name. All arguments are required.
    """
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the policy.

    If the call is malformed, `error` has the reason; otherwise `error` is empty.
    """

    name: str
    arguments: Mapping[str, Any]
    error: str = ""
    id: str = field(default="", compare=False)
    """The id of the call. Empty if the policy wrote none; most chat templates have no ids."""


@dataclass(frozen=True, slots=True)
class Image:
    """A picture in a message: the bytes of its file, such as a PNG or JPEG.

    It stands after the first `at` characters of the message's content.
    """

    data: bytes = field(repr=False)
    at: int = 0

    @property
    def digest(self) -> str:
        """The SHA-256 of the file, in hex."""
        return sha256(self.data).hexdigest()


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, with the fields that chat templates use."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    thoughts: str = ""
    """The assistant's reasoning text, if the chat template has such texts."""
    images: tuple[Image, ...] = ()
    """The pictures of a user's message or of a tool's result, in their order. Only a
    vision-language model reads them.
    """

    @property
    def parts(self) -> Iterator[str | Image]:
        """The text and the pictures of the content, in their order."""
        start = 0
        for image in self.images:
            if image.at > start:
                yield self.content[start : image.at]
            yield image
            start = image.at
        if self.content[start:]:
            yield self.content[start:]


ROLES: tuple[str, ...] = get_args(Message.__annotations__["role"])


class EnvError(Exception):
    """Error of an environment. The episode is tried again, and counts as failed if this goes on."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An environment's answer to a reply: new messages, and the rewards if the episode ends now.

    Numbers may be NumPy or torch scalars. Raises `EnvError` with the field's name for a value that
    is not a finite number.

    >>> Turn((), done=True, rewards={"right": True}).rewards
    {'right': 1.0}
    """

    messages: tuple[Message, ...]
    done: bool = False
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards of the whole episode by name, used if the episode ends after this turn, by `done` or
    by a limit of turns or tokens. Without rewards in the last turn, the episode's reward is 0.
    Rewards of earlier turns are not used. The episode's reward is the sum of the named rewards, or
    the result of the task set's `combine`. A single number is stored as `{"reward": number}`.
    """
    reward: float = 0.0
    """Reward of the last reply alone. The advantage estimator `turn_level`, the technique
    `step_groups`, and `limits` without `limits.request` use it.
    """
    facts: Mapping[str, float] = field(default_factory=dict)
    """Numbers for metrics, which do not affect the reward. An episode has the facts of all its
    turns. If several turns have a fact of one name, the last one counts.
    """

    def __post_init__(self) -> None:
        set_field = partial(object.__setattr__, self)
        set_field("messages", _messages(self.messages))
        set_field("rewards", read_rewards(self.rewards))
        set_field("reward", _number("Turn.reward", self.reward, most=MAX_REWARD))
        set_field("facts", _numbers("Turn.facts", self.facts))


def read_rewards(rewards: Any, source: str = "Turn.") -> dict[str, float]:
    """Return a reward value as rewards by name. A single number becomes `{"reward": number}`.

    Raises `EnvError` for another value. `source` begins the error's message.

    >>> read_rewards(1), read_rewards({"right": True})
    ({'reward': 1.0}, {'right': 1.0})
    """
    name = f"{source}rewards"
    if not isinstance(rewards, dict | Mapping):
        return {"reward": _number(name, rewards, or_else=" or numbers by name", most=MAX_REWARD)}
    return _numbers(name, rewards, most=MAX_REWARD)


def _messages(messages: Any) -> tuple[Message, ...]:
    found = tuple(messages) if isinstance(messages, list | tuple) else (messages,)
    for message in found:
        if not isinstance(message, Message) or not isinstance(message.content, str):
            raise EnvError(
                "Turn.messages must be a tuple of Message(role, content) with content as text, "
                f"got {short_repr(message)}"
            )
        if message.role not in ROLES:
            raise EnvError(
                f"the role of a message in Turn.messages must be one of {', '.join(ROLES)}, "
                f"got {short_repr(message.role)}"
            )
        _require_images(message)
    return found


def _require_images(message: Message) -> None:
    """Raise `EnvError` for pictures that are not where a message can have them."""
    places = [image.at for image in message.images if isinstance(image, Image)]
    if len(places) < len(message.images) or places != sorted(places):
        raise EnvError("Message.images must be a tuple of Image(data, at) in the order of `at`")
    if places and (
        message.role not in ("user", "tool")
        or not 0 <= places[0] <= places[-1] <= len(message.content)
    ):
        raise EnvError(
            "Message.images must be of the role user or tool, with `at` within the content; "
            f"got role {message.role}, at {places}"
        )


def _numbers(name: str, values: Any, *, most: float = MAX_FACT) -> dict[str, float]:
    if not isinstance(values, dict | Mapping):
        raise EnvError(f"{name} must be numbers by name, got {short_repr(values)}")
    return {str(key): _number(name, value, key, most=most) for key, value in values.items()}


def _number(name: str, value: Any, key: Any = None, *, or_else: str = "", most: float) -> float:
    """Return a number as float. It may be a Decimal, or a scalar of NumPy or torch.

    Raises `EnvError` for other values, and for a number whose absolute value exceeds `most`.
    """
    if type(value) is float and -most <= value <= most:
        return value
    try:
        number = value if isinstance(value, Real | Decimal) else value.item()
        if isinstance(number, Real | Decimal) and -most <= float(number) <= most:
            return float(number)
    except (AttributeError, TypeError, ValueError, RuntimeError, ArithmeticError):
        pass
    where = name if key is None else f"{name}[{short_repr(key)}]"
    or_else += f", of at most {most:g}" if isinstance(value, Real) and value == value else ""
    raise EnvError(f"{where} must be a finite number{or_else}, got {short_repr(value)}")


class Env(Protocol):
    """The environment of one episode. It has its own seed and is used only once.

    A method that is not a coroutine is run in a thread. Both methods may raise `EnvError`.
    """

    def begin(self) -> Awaitable[Turn] | Turn:
        """Start the episode. Return its first messages, such as a system and a user message."""
        ...

    def step(self, reply: Message) -> Awaitable[Turn] | Turn:
        """Return the environment's answer to a reply of the policy. `reply.role` is "assistant"."""
        ...


def implements(value: object, protocol: Callable[..., _Contract]) -> TypeGuard[_Contract]:
    """Return True if a value has all public members of a protocol and none of them is None.

    Members may come from `__getattr__`. In Python 3.11 `isinstance` collects the members anew at
    each call, which takes 20 to 40 us. Every episode makes several of these checks.

    >>> implements(NumberedTasks(), HasIdentities), implements(ListedTasks(), HasIdentities)
    (False, True)
    """
    return all(getattr(value, name, None) is not None for name in members(protocol))


@cache
def members(protocol: Any) -> tuple[str, ...]:
    """Return the names of the public members that a protocol and its bases declare."""
    declared = [{**vars(base), **vars(base).get("__annotations__", {})} for base in protocol.mro()]
    return tuple(name for names in declared for name in names if not name.startswith("_"))


@runtime_checkable
class Resumable(Protocol):
    """An environment whose state can be saved and restored, to continue an episode after a resume.

    Without these methods, a resumed run sends the recorded replies to a new environment. That
    environment must answer them as the first one did.
    """

    def snapshot(self) -> str | None:
        """Return the environment's state between two replies as text, for the journal.

        Return None to store nothing.
        """
        ...

    async def resume(self, state: str) -> None:
        """Restore a state that `snapshot` returned, in a new environment of the same task and seed.

        Called instead of `begin`.
        """
        ...


@runtime_checkable
class HasSimulatedDelays(Protocol):
    """An environment that waits to simulate slow tools.

    It must not wait while `replaying` is True, because a resumed run then repeats recorded replies.
    """

    replaying: bool


@runtime_checkable
class Closable(Protocol):
    """An environment with resources that must be released when its episode ends or fails."""

    def close(self) -> Awaitable[None] | None:
        """Release the resources within a few seconds. An error fails the episode."""
        ...


@runtime_checkable
class HasWorker(Protocol):
    """An environment in a worker process. `rollout.timeout_s` excludes the process's start."""

    def worker_start(self) -> Awaitable[None] | None:
        """Assign a worker process to the environment.

        Return an awaitable that waits for the start of the process, or None if it has started.
        Raises `EnvError` if no process can be started. The awaitable raises it if the start fails.
        """

    def close(self) -> Awaitable[None]:
        """Release the worker."""


class Taskset(Protocol):
    """A set of training and held-out tasks, which creates the environment of each task.

    If it is also an asynchronous context manager, the run enters it before the first episode.
    """

    name: str
    tools: tuple[Mapping[str, Any], ...]
    """JSON schemas of the tools, in the format that chat templates expect."""

    def train(self, seed: int) -> Iterator[Task]:
        """Yield training tasks endlessly. Their order must depend only on `seed`."""
        ...

    def held_out(self, count: int) -> list[Task]:
        """Return up to `count` held-out tasks.

        They must be the same in every call, and `train` must never yield one of them.
        """
        ...

    def env(self, task: Task, seed: int) -> Env:
        """Return a new environment for an episode of a task.

        All its random choices must be derived from `task` and `seed`.
        """
        ...


class NumberedTasks:
    """A base class for task sets that create each task from its number."""

    name: str

    def train(self, seed: int) -> Iterator[Task]:
        return (Task(self.name, "train", index) for index in count(seed * _TASKS_PER_SEED))

    def held_out(self, count: int) -> list[Task]:
        return [Task(self.name, "held_out", index) for index in range(count)]

    @staticmethod
    def seed_of(task: Task) -> int:
        """Return a random seed of 31 bits: odd for a training task, even for a held-out task."""
        return 2 * Random(task.key).getrandbits(30) + (task.split == "train")


class ListedTasks:
    """A base class for task sets with a list of training tasks and a list of held-out tasks."""

    name: str
    data: Mapping[str, Sequence[Any]]

    def train(self, seed: int) -> Iterator[Task]:
        """Yield the training list endlessly, each time in a new order and with new task numbers."""
        number = len(self.data["train"])
        for begin in range(0, _TASKS_PER_SEED - number, number):
            order = Random(f"{self.name}/{seed}/{begin}").sample(range(number), number)
            first = seed * _TASKS_PER_SEED + begin
            yield from (Task(self.name, "train", first + place) for place in order)

    def held_out(self, count: int) -> list[Task]:
        """Return the first `count` held-out tasks, or all if there are fewer."""
        return [
            Task(self.name, "held_out", index)
            for index in range(min(count, len(self.data["held_out"])))
        ]

    def identity(self, task: Task) -> str:
        """Return the name of a task's entry in the list.

        All repetitions of the task have this name.
        """
        number = task.index % _TASKS_PER_SEED % len(self.data[task.split])
        return f"{task.env}/{task.split}/{number}"

    def data_of(self, task: Task) -> Any:
        """Return the data of a task, which is its entry in the list of tasks."""
        data = self.data[task.split]
        return data[task.index % _TASKS_PER_SEED % len(data)]

    def place_of(self, task: Task) -> str:
        """Return the file and the line from which a task was read.

        Empty if it was not read from a file.
        """
        return str(getattr(self.data_of(task), "place", ""))


@runtime_checkable
class HasIdentities(Protocol):
    """A task set that yields the same task several times, each time under another number."""

    def identity(self, task: Task) -> str:
        """Return a name of a task that does not depend on its number."""
        ...


def task_identity(taskset: Taskset, task: Task) -> str:
    """Return a name of the task that all its repetitions share, for statistics of tasks."""
    return taskset.identity(task) if implements(taskset, HasIdentities) else task.key


@runtime_checkable
class HasTexts(Protocol):
    """A task set with a text of each task, for techniques that compare tasks."""

    def text(self, task: Task) -> str:
        """Return the words of a task, such as its question. Empty if the task has none."""
        ...


def task_text(taskset: Taskset, task: Task) -> str:
    """Return the words of a task, without running it.

    Empty if the task set has no method `text`.
    """
    return taskset.text(task) if implements(taskset, HasTexts) else ""


@runtime_checkable
class Votable(Protocol):
    """A task set whose episodes end with an answer that can be compared with those of others."""

    def answer_of(self, task: Task, reply: str) -> str:
        """Return the answer that an episode's last reply gives. Empty if it gives none.

        Equal answers are equal texts. The reward of a task must not be used.
        """
        ...


def task_answer(taskset: Taskset, task: Task, reply: str) -> str:
    """Return the answer that an episode's last reply gives. Empty without one."""
    return taskset.answer_of(task, reply) if implements(taskset, Votable) else ""


@runtime_checkable
class HasGiveaways(Protocol):
    """A task set that can detect tasks that reward an empty or a constant reply."""

    def giveaways(self) -> str:
        """Return a sentence about tasks that reward an empty or a constant reply.

        Empty if there are none.
        """
        ...


@runtime_checkable
class HasDemonstrations(Protocol):
    """A task set that can solve its own tasks, for a supervised start (`sft.steps`)."""

    def demonstration(self, task: Task) -> Sequence[Message]:
        """Return a conversation that solves a task: prompt, replies and the environment's answers.

        Raises `ConfigError` if the task has no demonstration.
        """
        ...


@runtime_checkable
class HasCorrections(Protocol):
    """A task set that finds wrong replies, for instance by a judge and a teacher."""

    def correction(
        self, task: Task, replies: Sequence[Message]
    ) -> Awaitable[tuple[int, Message | str] | None] | tuple[int, Message | str] | None:
        """Return the index of the first wrong reply of an episode, and a right reply in its place.

        A text is only the beginning of a reply: its right steps, and the next one as it should be.
        The policy goes on with the reply. None if no reply is wrong.
        """
        ...


@runtime_checkable
class HasTaskTools(Protocol):
    """A task set whose tasks have different tools, such as a mixture of other task sets.

    `tools` has the tools of all tasks.
    """

    def tools_of(self, task: Task) -> Sequence[Mapping[str, Any]]:
        """Return the JSON schemas of the tools of a task."""
        ...


@runtime_checkable
class RewardCombiner(Protocol):
    """A task set with a method that combines the named rewards of an episode into one."""

    def combine(self, rewards: Mapping[str, float]) -> float:
        """Return the reward of an episode from its named rewards."""
        ...


def combine_rewards(taskset: Taskset, turn: Turn) -> Turn:
    """Return the turn with one combined reward, if it has rewards and the task set combines them.

    The task set does so if it has the method `combine`. The named rewards become facts
    `reward/<name>`, which are logged.
    """
    name = f"the result of combine() of {taskset.name}"
    if not (turn.rewards and implements(taskset, RewardCombiner)):
        return turn
    parts = {f"reward/{name}": value for name, value in turn.rewards.items()}
    combined = taskset.combine(turn.rewards)
    rewards = {"reward": _number(name, combined, most=MAX_REWARD)}
    return replace(turn, rewards=rewards, facts={**turn.facts, **parts})
