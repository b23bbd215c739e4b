"""Test the choice of tasks and of group sizes, and that a resumed run chooses the same."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from tests.support.drawn import taken
from tests.test_loop import Numbers, Repeated
from unstale.config import ConfigError, RunConfig, ScheduleConfig, SelectionConfig
from unstale.durability.resume import ResumeState
from unstale.records import ContextPiece, Failure, Group, GroupRequest, Task, Trajectory
from unstale.rollout.hooks import RunHooks
from unstale.rollout.selection import Selection, make_pool
from unstale.techniques.hooks import NO_TECHNIQUES, Draw, DrawContext, GroupSoFar, Techniques

CONFIG = RunConfig(
    recipe="mine", schedule=ScheduleConfig(groups_per_step=2), selection=SelectionConfig(pool=4)
)


class AnyTask:
    """A sampler that draws with the random numbers it is given."""

    def __init__(self) -> None:
        self.seen: list[tuple[Sequence[str], int]] = []

    def draw(self, tasks: Sequence[str], context: DrawContext) -> Draw:
        self.seen.append((tasks, context.step))
        return Draw(context.random.choice(tasks), size=context.number % 3)


class UntilSolved:
    """An allocator that adds 2 episodes until one is solved, up to 6."""

    def first(self, task: str) -> int:
        return 2

    def more(self, group: GroupSoFar) -> int:
        assert group.first == 2
        return 0 if max(group.rewards) == 1 or group.started == 6 else 2


def make(
    config: RunConfig = CONFIG,
    life: ResumeState | None = None,
    *,
    skipped: Sequence[str] = (),
    **parts: Any,
) -> Selection:
    tasks: Any = Numbers(count())
    return Selection(config, tasks, life or ResumeState(), Techniques(parts), skipped=skipped)


def first(number: int, selection: Selection) -> list[GroupRequest]:
    return asyncio.run(taken(selection.requests(), number))


def ended(*rewards: float | None) -> list[Trajectory | Failure]:
    task = Task("numbers", "train", 0)
    return [
        Failure(task, "step", "broken")
        if reward is None
        else Trajectory((ContextPiece((1,)),), {"r": reward}, "done", task, 0)
        for reward in rewards
    ]


def test_the_tasks_of_a_pool_come_in_turn_with_another_seed_at_each_visit() -> None:
    requests = first(12, make())
    assert [request.task.index for request in requests] == [*range(4)] * 3
    assert [request.place for request in requests[4:8]] == [0, 1, 2, 3]
    assert len({(request.task, request.seed) for request in requests}) == 12
    assert not any(request.sizes for request in requests)
    skipping = first(5, make(skipped=["numbers/train/1"]))
    assert [request.task.index for request in skipping] == [0, 2, 2, 3, 0]
    assert first(1, make(skipped=[f"numbers/train/{i}" for i in range(4)])) == []


def test_a_skipped_task_is_skipped_each_time_its_list_repeats() -> None:
    tasks: Any = Repeated(count())
    life = ResumeState()
    config = replace(CONFIG, selection=SelectionConfig())
    selection = Selection(config, tasks, life, Techniques({}), skipped=["1"])
    drawn = [tasks.identity(request.task) for request in first(9, selection)]
    assert set(drawn) == {"0", "2", "3"} and len({r.task for r in first(9, selection)}) == 9


def test_a_pool_larger_than_the_list_is_refused() -> None:
    tasks: Any = Repeated(count())
    assert list(make_pool(tasks, 0, SelectionConfig(pool=4))) == ["0", "1", "2", "3"]
    with pytest.raises(ConfigError, match=r"selection.pool must be at most 4.*got 6"):
        make_pool(tasks, 0, SelectionConfig(pool=6))


def test_a_resumed_run_draws_the_same_tasks_and_counts_visits_on() -> None:
    whole = first(10, make(sampler=AnyTask()))
    assert {request.sizes for request in whole} == {(), (1,), (2,)}
    visits: dict[Task, int] = {}
    for request in whole[:6]:
        visits[request.task] = visits.get(request.task, 0) + 1
    life = ResumeState(admitted=6, visits=visits, requests=tuple(whole[:6]))
    assert first(4, make(life=life, sampler=AnyTask())) == whole[6:]


def test_a_sampler_chooses_among_some_tasks_that_are_not_in_flight() -> None:
    config = replace(CONFIG, selection=SelectionConfig(pool=50, candidates=8))
    sampler = AnyTask()
    selection = make(config, sampler=sampler, skipped=["numbers/train/7"])

    async def draw() -> tuple[list[GroupRequest], list[GroupRequest]]:
        stream = selection.requests()
        drawn = await taken(stream, 40)
        selection.ended([Group(drawn[0].task, (), (), drawn[0].number)])
        return drawn, await taken(stream, 10)

    requests, after = asyncio.run(draw())
    keys = [request.task.key for request in requests]
    assert len(set(keys)) == 40 and "numbers/train/7" not in keys
    assert all(len(set(tasks)) == 8 for tasks, _ in sampler.seen[:40])
    assert [step for _, step in sampler.seen[:5]] == [1, 1, 2, 2, 3]
    usable = {f"numbers/train/{i}" for i in range(50) if i != 7}
    later = [each.task.key for each in after]
    assert sorted(later) == sorted(usable - set(keys[1:])), "its task is not in flight any more"
    few = AnyTask()
    busy = first(9, make(sampler=few))  # more groups than tasks: all are in flight
    assert {request.task.index for request in busy} == {0, 1, 2, 3}
    assert [len(tasks) for tasks, _ in few.seen[:5]] == [4, 3, 2, 1, 4]


def test_an_allocator_decides_the_size_and_the_journal_gets_it_before() -> None:
    config = replace(CONFIG, selection=SelectionConfig())
    selection = make(config, allocator=UntilSolved())
    (request,) = first(1, selection)
    assert request.sizes == (2,)
    recorded: list[tuple[int, int]] = []
    no_texts: Any = None

    hooks = RunHooks(
        techniques=NO_TECHNIQUES,
        selection=selection,
        estimate=lambda groups: [],
        identify=lambda task: task.key,
        answer=lambda episode: "",
        texts=no_texts,
        lag=torch.zeros_like,
        resize=lambda *row: recorded.append(row),
        hidden_states=None,
        seed=0,
        replay_experts=False,
    )

    def more(*rewards: float | None) -> int:
        return len(asyncio.run(hooks.more(request, ended(*rewards))))

    assert more(0.0, 0.0) == 2 and more(0.0, 0.0, 0.0, None) == 2
    assert recorded == [(0, 4), (0, 6)]
    assert more(0.0, 1.0) == more(None, None) == more(0.0, 0.0, 0.0, 0.0, 0.0, None) == 0
    assert make(config).more(request, ended(0.0), 1) == 0 and len(recorded) == 2
