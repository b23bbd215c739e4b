"""The environment `traces:FILE`: an expert's recorded conversations, replayed against the policy.

Each row has `messages` as in `unstale sft`. A user's may have pictures, such as screens: parts of
type `image_url` with a data URL or the name of a file. The policy answers the recorded
observations. A reply with the expert's tool calls, or without calls with its text, is right and has
the reward 1; numbers of a call, such as a place on a screen, may differ by `tolerance`. A reply
that only names the same tools has 0.5, any other 0. After a wrong reply, a patch shows the expert's
step and its result, and the episode continues, at most `patches` times. The episode is a
success if all replies were right. From UI-S1; `step_groups` with `cut_below` 1 cuts returns at
patches.

The facts are `progress`, the share of the expert's steps before the first wrong reply, `patches`,
the number of wrong replies, and `semi_online`, the mean of progress and success. A recording cannot
show where another way of solving the task leads, so measure success in the true environment as
well.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unstale.config import ConfigError, TaskConfig
from unstale.config.checks import Count, NonNegative, Share
from unstale.config.tasks import EnvSpec
from unstale.envs import Image, ListedTasks, Message, Turn
from unstale.envs.dataset import HELD_OUT_SHARE, share_of
from unstale.envs.references import picture_reader, read_messages, read_tools
from unstale.envs.rows import load_rows
from unstale.records import Task

PATCH = "That was not the right step. The right one was: {step}"
RESULT = "It was answered: {answer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracesConfig(TaskConfig):
    """Tasks that replay the recorded conversations of an expert."""

    env: str = "traces:"
    """`traces:FILE` with a row for each conversation."""
    tolerance: NonNegative = 0.0
    """Largest difference of a number in a call from the expert's, such as a place on a screen."""
    patches: Count = 2
    """Number of wrong replies that are patched: the expert's step is shown, and the episode
    continues. It ends after one more wrong reply.
    """
    held_out_share: Share = HELD_OUT_SHARE
    """Share of the conversations that are held out for evaluation. A hash of the prompt selects
    them.
    """

    @property
    def source(self) -> str:
        """The file with the conversations."""
        return self.env.partition(":")[2]


@dataclass(frozen=True, slots=True)
class _Trace:
    """A conversation of an expert: its first messages, and each reply with the messages that follow
    it.
    """

    opening: tuple[Message, ...]
    steps: tuple[tuple[Message, tuple[Message, ...]], ...]

    @property
    def messages(self) -> tuple[Message, ...]:
        return (*self.opening, *(one for reply, after in self.steps for one in (reply, *after)))


class TraceTasks(ListedTasks):
    """A task set that replays recorded conversations of an expert, one as each task."""

    def __init__(self, rows: Sequence[Any], options: TracesConfig) -> None:
        """Create the tasks from the rows of a file.

        Raises `ConfigError` for a row without a conversation, or if no conversation is left for
        training.
        """
        self.name = options.env
        self._options = options
        self._folder = Path(options.source).parent
        data: dict[str, list[Any]] = {"train": [], "held_out": []}
        self.data = data
        schemas: dict[str, Mapping[str, Any]] = {}
        for row in rows:
            trace, tools = _read(row, picture_reader(self._folder, only_check=True))
            is_held_out = share_of(trace.opening) < options.held_out_share
            data["held_out" if is_held_out else "train"].append(row)
            schemas |= {tool["function"]["name"]: tool for tool in tools}
        if not data["train"]:
            raise ConfigError(f"{options.env} has no conversations for training: add some")
        self.tools: tuple[Mapping[str, Any], ...] = tuple(schemas.values())

    def _trace(self, task: Task, *, only_check: bool = False) -> _Trace:
        reader = picture_reader(self._folder, only_check=only_check)
        return _read(self.data_of(task), reader)[0]

    def tools_of(self, task: Task) -> Sequence[Mapping[str, Any]]:
        return read_tools(self.data_of(task), required=False) or ()

    def text(self, task: Task) -> str:
        opening = self._trace(task, only_check=True).opening
        return "\n".join(each.content for each in opening if each.role != "system")

    def demonstration(self, task: Task) -> Sequence[Message]:
        return self._trace(task).messages

    def env(self, task: Task, seed: int) -> "TraceEnv":
        return TraceEnv(self._trace(task), self._options)


class TraceEnv:
    """The replay of one conversation. Nothing in it is random."""

    def __init__(self, trace: _Trace, options: TracesConfig) -> None:
        self._trace = trace
        self._left = options.patches
        self._tolerance = options.tolerance
        self._scores: list[float] = []

    async def begin(self) -> Turn:
        return Turn(self._trace.opening)

    async def step(self, reply: Message) -> Turn:
        expert, after = self._trace.steps[len(self._scores)]
        score = score_step(reply, expert, self._tolerance)
        self._scores.append(score)
        is_wrong = score < 1
        done = len(self._scores) == len(self._trace.steps) or (is_wrong and not self._left)
        if done:
            return Turn((), done=True, reward=score, rewards=self._rewards(), facts=self._facts())
        self._left -= is_wrong
        return Turn(_patched(expert, after) if is_wrong else after, reward=score)

    def _rewards(self) -> dict[str, float]:
        is_right = all(score == 1 for score in self._scores)
        return {"success": float(is_right and len(self._scores) == len(self._trace.steps))}

    def _facts(self) -> dict[str, float]:
        wrong = [place for place, score in enumerate(self._scores) if score < 1]
        progress = min(wrong, default=len(self._scores)) / len(self._trace.steps)
        semi_online = (progress + self._rewards()["success"]) / 2
        return {"progress": progress, "patches": float(len(wrong)), "semi_online": semi_online}


def score_step(reply: Message, expert: Message, tolerance: float = 0.0) -> float:
    """Return 1 for the expert's calls or text, 0.5 for calls of the same tools, else 0.

    Numbers of calls may differ by `tolerance`.

    >>> score_step(Message("assistant", " yes"), Message("assistant", "yes"))
    1.0
    """
    calls, wanted = reply.tool_calls, expert.tool_calls
    if not wanted:
        return float(not calls and reply.content.split() == expert.content.split())
    if [call.name for call in calls] != [call.name for call in wanted]:
        return 0.0
    right = (
        not one.error and _is_near(dict(one.arguments), dict(other.arguments), tolerance)
        for one, other in zip(calls, wanted, strict=True)
    )
    return 1.0 if all(right) else 0.5


def _is_near(value: Any, wanted: Any, tolerance: float) -> bool:
    """Return True for values that are equal but for numbers, which may differ by `tolerance`."""
    pairs: Iterable[tuple[Any, Any]]
    match value, wanted:
        case (bool(), _) | (_, bool()):
            return value is wanted
        case (int() | float(), int() | float()):
            return abs(value - wanted) <= tolerance
        case dict(), dict():
            pairs = ((value[name], wanted[name]) for name in wanted if name in value)
            same = value.keys() == wanted.keys()
        case list(), list():
            pairs, same = zip(value, wanted, strict=False), len(value) == len(wanted)
        case _:
            return bool(value == wanted)
    return same and all(_is_near(one, other, tolerance) for one, other in pairs)


def _patched(expert: Message, after: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages after a wrong reply: the expert's step with its results, then the
    others.
    """
    calls = [json.dumps([each.name, dict(each.arguments)]) for each in expert.tool_calls]
    lines = [PATCH.format(step=" ".join(filter(None, (expert.content, *calls))))]
    lines += [RESULT.format(answer=each.content) for each in after if each.role == "tool"]
    text, images = "\n".join(lines), list[Image]()
    for each in (each for each in after if each.role != "tool"):
        text += "\n"
        images += [replace(image, at=len(text) + image.at) for image in each.images]
        text += each.content
    return (Message("user", text, images=tuple(images)),)


def _read(row: Any, picture: Callable[[str], bytes]) -> tuple[_Trace, Sequence[Mapping[str, Any]]]:
    """Return the conversation of a row, and its tools."""
    try:
        messages = read_messages(row, picture)
        tools = read_tools(row, required=False)
        places = [place for place, each in enumerate(messages) if each.role == "assistant"]
        if not places or places[0] == 0:
            raise ValueError("messages must begin with a prompt, and have a reply of the assistant")
        ends = [*places[1:], len(messages)]
        steps = [
            (messages[place], tuple(messages[place + 1 : end]))
            for place, end in zip(places, ends, strict=True)
        ]
        if not all(after for _, after in steps[:-1]):
            raise ValueError("two replies of the assistant follow each other")
    except ValueError as error:
        raise ConfigError(f"{row.place}: {error}") from error
    return _Trace(tuple(messages[: places[0]]), tuple(steps)), tools or ()


def _make(options: TracesConfig) -> TraceTasks:
    return TraceTasks(load_rows(options.source), options)


ENV = EnvSpec("traces", _make, TracesConfig, takes_source=True)
