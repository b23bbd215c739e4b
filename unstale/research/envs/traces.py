"""The environment `traces:FILE`: an expert's recorded conversations, replayed against the policy.

Each row of the file has `messages` as for `unstale sft`. After each reply, the policy reads the
recorded observation. A reply's reward is 1 if it has the expert's tool calls, or the expert's text
where the expert calls no tool; 0.5 if it only calls the same tools; else 0. A reply with a reward
below 1 is wrong. After it, a patch (a message with the expert's step and its results) is shown, and
the episode continues, at most `patches` times. The episode succeeds if all replies are right. From
UI-S1; `step_groups` with `cut_below` 1 cuts returns at patches.

The facts are `progress`, the share of the expert's steps before the first wrong reply, `patches`,
the number of wrong replies, and `semi_online`, the mean of progress and success. A recording cannot
show where another way of solving the task leads, so measure success in the true environment as
well.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unstale.config import ConfigError, TaskConfig
from unstale.config.checks import Count, Share
from unstale.config.tasks import EnvSpec
from unstale.envs import ListedTasks, Message, Turn
from unstale.envs.dataset import HELD_OUT_SHARE, share_of
from unstale.envs.references import read_messages, read_tools
from unstale.envs.rows import load_rows
from unstale.records import Task

PATCH = "That was not the right step. The right one was: {step}"
RESULT = "It was answered: {answer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracesConfig(TaskConfig):
    """Tasks that replay the recorded conversations of an expert."""

    env: str = "traces:"
    """`traces:FILE` with a row for each conversation."""
    patches: Count = 2
    """Number of wrong replies that are patched: the expert's step is shown, and the episode
    continues. It ends after one more wrong reply.
    """
    held_out_share: Share = HELD_OUT_SHARE
    """Share of the conversations that are held out for evaluation. A hash of the prompt selects
    them.
    """


@dataclass(frozen=True, slots=True)
class _Trace:
    """A conversation of an expert: its first messages, and each reply with the messages that follow
    it.
    """

    opening: tuple[Message, ...]
    steps: tuple[tuple[Message, tuple[Message, ...]], ...]
    tools: Sequence[Mapping[str, Any]]
    place: str

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
        self._patches = options.patches
        traces = [_read(row) for row in rows]
        data: dict[str, list[_Trace]] = {"train": [], "held_out": []}
        for trace in traces:
            is_held_out = share_of(trace.opening) < options.held_out_share
            data["held_out" if is_held_out else "train"].append(trace)
        self.data = data
        if not self.data["train"]:
            raise ConfigError(f"{options.env} has no conversations for training: add some")
        schemas = {tool["function"]["name"]: tool for each in traces for tool in each.tools}
        self.tools: tuple[Mapping[str, Any], ...] = tuple(schemas.values())

    def tools_of(self, task: Task) -> Sequence[Mapping[str, Any]]:
        trace: _Trace = self.data_of(task)
        return trace.tools

    def text(self, task: Task) -> str:
        trace: _Trace = self.data_of(task)
        return "\n".join(each.content for each in trace.opening if each.role != "system")

    def demonstration(self, task: Task) -> Sequence[Message]:
        trace: _Trace = self.data_of(task)
        return trace.messages

    def env(self, task: Task, seed: int) -> "TraceEnv":
        return TraceEnv(self.data_of(task), self._patches)


class TraceEnv:
    """The replay of one conversation. Nothing in it is random."""

    def __init__(self, trace: _Trace, patches: int) -> None:
        self._trace = trace
        self._left = patches
        self._scores: list[float] = []

    async def begin(self) -> Turn:
        return Turn(self._trace.opening)

    async def step(self, reply: Message) -> Turn:
        expert, after = self._trace.steps[len(self._scores)]
        score = score_step(reply, expert)
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


def score_step(reply: Message, expert: Message) -> float:
    """Return the reward of a reply: 1 if it equals the expert's, 0.5 for the same tools, else 0.

    Replies are equal if their tool calls are or, without expert calls, their texts.

    >>> score_step(Message("assistant", " yes"), Message("assistant", "yes"))
    1.0
    """
    calls, wanted = reply.tool_calls, expert.tool_calls
    if not wanted:
        return float(not calls and reply.content.split() == expert.content.split())
    if calls == wanted:
        return 1.0
    return 0.5 * ([call.name for call in calls] == [call.name for call in wanted])


def _patched(expert: Message, after: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages after a wrong reply: the expert's step with its results, then the
    others.
    """
    calls = [json.dumps([each.name, dict(each.arguments)]) for each in expert.tool_calls]
    lines = [PATCH.format(step=" ".join(filter(None, (expert.content, *calls))))]
    lines += [RESULT.format(answer=each.content) for each in after if each.role == "tool"]
    others = [each.content for each in after if each.role != "tool"]
    return (Message("user", "\n".join([*lines, *others])),)


def _read(row: Any) -> _Trace:
    try:
        messages, tools = read_messages(row), read_tools(row, required=False)
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
    return _Trace(tuple(messages[: places[0]]), tuple(steps), tools or (), row.place)


def _make(options: TracesConfig) -> TraceTasks:
    return TraceTasks(load_rows(options.env.partition(":")[2]), options)


ENV = EnvSpec("traces", _make, TracesConfig, takes_source=True)
