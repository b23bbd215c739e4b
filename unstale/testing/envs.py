"""A test that every task set must pass, such as one that a user adds."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from unstale.durability import virtual_clock
from unstale.envs import (
    Closable,
    Env,
    Forkable,
    HasSimulatedDelays,
    Message,
    Resumable,
    Taskset,
    ToolCall,
    Turn,
    combine_rewards,
    implements,
)
from unstale.envs.guard import call
from unstale.records import Task

NOISE = (
    Message("assistant", ""),
    Message("assistant", "hello"),
    Message("assistant", "", (ToolCall("", {}, error="the call is not JSON"),)),
    Message("assistant", "", (ToolCall("no_such_tool", {"x": 1}),)),
    Message(
        "assistant",
        "bye",
        (ToolCall("no_such_tool", {}), ToolCall("", {}, error="the call is not JSON")),
    ),
)
"""Replies as an untrained policy may give them, which an environment must answer without an
error.
"""
MAX_FORKS = 8
"""Largest number of replies after which `check_env` forks an episode."""
Way = Literal["replies", "snapshot", "copy"]
"""A method that brings a second environment to the state of a first one: send it the same replies,
restore a snapshot (`Resumable`), or copy the first one (`Forkable`).
"""


def check_env(taskset: Taskset, *, episodes: int = 20, max_turns: int = 30) -> None:
    """Test a task set. Raise AssertionError if it, or one of its environments, breaks its contract.

    Up to `episodes` tasks are played twice with the same replies, at most `max_turns` each. Both
    times the environment must give the same answers. One task is forked after each of its first
    replies, in each `Way` that its environment has. Of two further environments, one gets the same
    replies as the first, and must give the same answers with the same random numbers. The other one
    gets other replies, which must not change the answers of the two. Nor may `close` of one of
    them.
    """
    held_out = taskset.held_out(8)
    drawn = list(islice(taskset.train(0), 200))
    assert drawn == list(islice(taskset.train(0), 200)), (
        "train(0) gives other tasks the second time: seed all randomness"
    )
    both = {task.key for task in held_out} & {task.key for task in drawn}
    assert not both, f"held-out tasks are among the training tasks: {sorted(both)[:3]}"
    assert held_out == taskset.held_out(8), (
        "held_out gives other tasks the second time: it must be a fixed set"
    )
    for tool in taskset.tools:
        assert tool.get("function", {}).get("name"), (
            f"a tool without function.name, as chat templates need it: {tool}"
        )
    turns: list[list[Turn]] = []
    for number, task in enumerate(drawn[:episodes]):
        first, again = (
            virtual_clock.run(_play(taskset, task, number, max_turns)) for _ in range(2)
        )
        assert first == again, (
            f"{task.key} with seed {number} went differently the second time: seed all randomness"
        )
        turns.append(first)
    for task, first in zip(drawn, turns[:1], strict=False):
        env = taskset.env(task, 0)
        virtual_clock.run(_close(env))
        for at in range(1, min(len(first) - 1, MAX_FORKS) + 1):
            for way in _ways(env, is_over=first[at].done):
                virtual_clock.run(_Forked(taskset, task, first, at, way).check())


async def _play(taskset: Taskset, task: Task, seed: int, max_turns: int) -> list[Turn]:
    env = taskset.env(task, seed)
    turns = [await call(env.begin)]
    assert turns[0].messages and not turns[0].done, (
        f"{task.key} begins with nothing to answer: begin() poses the task"
    )
    for number in range(max_turns):
        if turns[-1].done:
            break
        reply = NOISE[(seed + number) % len(NOISE)]
        turns.append(combine_rewards(taskset, await call(env.step, reply)))
    await _close(env)
    for turn in turns:
        assert turn.done or turn.messages, (
            f"{task.key}: a turn without messages that is not done leaves nothing to answer"
        )
        roles = {message.role for message in turn.messages}
        assert roles <= {"system", "user", "tool"}, (
            f"{task.key}: an environment cannot speak as {roles}"
        )
    return turns


def _ways(env: Env, *, is_over: bool) -> Iterator[Way]:
    """Yield the methods by which an environment can be forked. After a last turn, only the method
    `replies` is possible.
    """
    yield "replies"
    if implements(env, Resumable) and not is_over:
        yield "snapshot"
    if implements(env, Forkable) and not is_over:
        yield "copy"


@dataclass(frozen=True)
class _Forked:
    """An episode of a task with seed 0 that is forked after `at` replies, in one way.

    `turns` are the turns of the episode without a fork.
    """

    taskset: Taskset
    task: Task
    turns: list[Turn]
    at: int
    way: Way

    async def check(self) -> None:
        parent, before = await self._begun()
        # a fork by replies repeats an episode, which has been compared already
        number = 1 if self.way == "replies" else 2
        other, *same = [await self._fork(parent, before) for _ in range(number)]
        rest = range(self.at, len(self.turns) - 1)
        await self._answers(other, rest, other=1)
        await _close(other)
        for env in (parent, *same):
            who = "its parent" if env is parent else "a fork that gets the same replies"
            assert await self._answers(env, rest) == self.turns[self.at + 1 :], (
                f"{self.task.key}: the replies of an episode that was forked after {self.at} "
                f"replies, by {self.way}, change the answers to {who}: environments must not share "
                "state that changes, and a fork must have the same random state"
            )
            await _close(env)

    async def _answers(self, env: Any, numbers: range, *, other: int = 0) -> list[Turn]:
        found: list[Turn] = []
        for number in numbers:
            if found and found[-1].done:
                break
            reply = NOISE[(number + other) % len(NOISE)]
            found.append(combine_rewards(self.taskset, await call(env.step, reply)))
        return found

    async def _begun(self, *, replaying: bool = False) -> tuple[Any, list[Turn]]:
        env = self.taskset.env(self.task, 0)
        if implements(env, HasSimulatedDelays):
            env.replaying = replaying
        return env, [await call(env.begin), *await self._answers(env, range(self.at))]

    async def _fork(self, parent: Any, before: list[Turn]) -> Any:
        """Return an environment in the state of `parent`, whose turns so far are `before`."""
        if self.way == "copy":
            return parent.fork()
        if self.way == "snapshot":
            env = self.taskset.env(self.task, 0)
            await call(env.resume, parent.snapshot())  # type: ignore[attr-defined]
            return env
        env, again = await self._begun(replaying=True)
        assert again == before == self.turns[: self.at + 1], (
            f"{self.task.key}: an episode that is forked after {self.at} replies gets other "
            "answers to the same replies: an environment must depend only on its task, its seed "
            "and its replies"
        )
        if implements(env, HasSimulatedDelays):
            env.replaying = False
        return env


async def _close(env: Env) -> None:
    if implements(env, Closable):
        await call(env.close)
