"""A test that every task set must pass, such as one that a user adds."""

from itertools import islice
from typing import Any

from unstale.durability import virtual_clock
from unstale.envs import (
    Closable,
    Env,
    HasSimulatedDelays,
    Message,
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
MAX_FORKS = 3
"""Largest number of replies after which `check_env` forks an episode: an environment made anew gets
the same replies again.
"""


def check_env(taskset: Taskset, *, episodes: int = 20, max_turns: int = 30) -> None:
    """Test a task set. Raise AssertionError if it, or one of its environments, breaks its contract.

    Up to `episodes` tasks are played twice with the same replies, at most `max_turns` each. Both
    times the environment must give the same answers. For one task, a second environment gets the
    first one to three replies again and must give the same answers. Then it gets other replies,
    which must not change the answers of the first environment.
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
        for at in range(1, min(len(first) - 1, MAX_FORKS) + 1):
            virtual_clock.run(_fork(taskset, task, first, at))


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


async def _fork(taskset: Taskset, task: Task, turns: list[Turn], at: int) -> None:
    """Test an episode with seed 0 that is forked after `at` replies.

    A second environment gets these replies too, and then others than the first. `turns` are the
    turns of the episode without a fork.
    """
    parent, fork = taskset.env(task, 0), taskset.env(task, 0)

    async def answers(env: Any, numbers: range, *, other: int = 0) -> list[Turn]:
        found: list[Turn] = []
        for number in numbers:
            if found and found[-1].done:
                break
            reply = NOISE[(number + other) % len(NOISE)]
            found.append(combine_rewards(taskset, await call(env.step, reply)))
        return found

    shared, rest = range(at), range(at, len(turns) - 1)
    before = [await call(parent.begin), *await answers(parent, shared)]
    if implements(fork, HasSimulatedDelays):
        fork.replaying = True
    again = [await call(fork.begin), *await answers(fork, shared)]
    assert again == before == turns[: at + 1], (
        f"{task.key}: an episode that is forked after {at} replies gets other answers to the same "
        "replies: an environment must depend only on its task, its seed and its replies"
    )
    if not turns[at].done:
        if implements(fork, HasSimulatedDelays):
            fork.replaying = False
        await answers(fork, rest, other=1)
    assert await answers(parent, rest) == turns[at + 1 :], (
        f"{task.key}: the replies of an episode that was forked after {at} replies change the "
        "answers to its parent: environments must not share state that changes"
    )
    await _close(parent)
    await _close(fork)


async def _close(env: Env) -> None:
    if implements(env, Closable):
        await call(env.close)
