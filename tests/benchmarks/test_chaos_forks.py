"""Test that copies and snapshots of a desk's environment go on like it, without changing it."""

import asyncio
from random import Random

from benchmarks.chaos_forks import Delays, copied, restored, state_of
from unstale.config.tasks import make_task
from unstale.envs import Message, ToolCall
from unstale.envs.desk import DeskEnv, DeskTasks
from unstale.envs.registry import build_taskset


def test_copies_and_snapshots_have_the_whole_state() -> None:
    tasks = build_taskset(make_task("retail"))
    assert isinstance(tasks, DeskTasks)
    scenario = tasks.scenario(next(tasks.train(0)))
    env, new = (DeskEnv(scenario, Delays(0.3, 0.5, Random(seed))) for seed in (1, 2))
    refused = {"order_id": scenario.requests[0].case, "reason": "status"}
    first = Message("assistant", "", (ToolCall("refuse", refused),))
    env.answer(first)
    next(env._delays)
    env.answer(Message("assistant", "Hello?"))
    state = state_of(env)
    copy = copied(env)
    asyncio.run(restored(new, state))
    assert env.desk.writes
    for reply in (first, Message("assistant", "I am sorry."), Message("assistant", "Bye.")):
        turns = [each.answer(reply) for each in (env, copy, new)]
        assert turns[0] == turns[1] == turns[2]
    assert turns[0].done
    assert next(env._delays) == next(copy._delays) == next(new._delays)
    before = len(copy.desk.writes)
    env.answer(first)
    assert len(env.desk.writes) > before == len(copy.desk.writes)
