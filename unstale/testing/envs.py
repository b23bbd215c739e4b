"""A test that every task set must pass."""

from itertools import islice

from unstale.durability import virtual_clock
from unstale.envs import Closable, Message, Taskset, ToolCall, Turn, combine_rewards, implements
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
"""Replies that an untrained policy may give. An environment must answer all of them."""


def check_env(taskset: Taskset, *, episodes: int = 20, max_turns: int = 30) -> None:
    """Test a task set. Raise AssertionError if the task set or its environments break their
    contract.

    Up to `episodes` tasks are played twice with fixed replies. The environment must give the same
    answers both times.
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
    for number, task in enumerate(drawn[:episodes]):
        first, again = (
            virtual_clock.run(_play(taskset, task, number, max_turns)) for _ in range(2)
        )
        assert first == again, (
            f"{task.key} with seed {number} went differently the second time: seed all randomness"
        )


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
    if implements(env, Closable):
        await call(env.close)
    for turn in turns:
        assert turn.done or turn.messages, (
            f"{task.key}: a turn without messages that is not done leaves nothing to answer"
        )
        roles = {message.role for message in turn.messages}
        assert roles <= {"system", "user", "tool"}, (
            f"{task.key}: an environment cannot speak as {roles}"
        )
    return turns
