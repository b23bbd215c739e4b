"""Test the staleness queue.

With stragglers the staleness bound holds and is reached, for bounds 0 to 3 and every window. Groups
are taken in the order that the window allows, also in parts of a batch. Tickets limit the live
groups. The queue says when no group can run before the next optimizer step. A restored queue
continues. A queue that can never fill a batch gives the reason. Pending pieces name the versions
still needed.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unstale.config import staleness_bound
from unstale.records import (
    Batch,
    ContextPiece,
    Group,
    PendingPiece,
    Sampled,
    ScoredTrajectory,
    Task,
    Trajectory,
    collate,
)
from unstale.rollout.staleness_queue import (
    PendingPieces,
    QueueExhausted,
    StalenessError,
    StalenessQueue,
    measure_staleness,
)

STEPS = 40


@dataclass
class World:
    """Groups with tokens stamped with their current version. One group in seven is very slow."""

    line: StalenessQueue
    slow_ticks: int
    version: int = 0
    live: int = 0
    most_live: int = 0
    admitted: int = 0
    ages: list[int] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    begun: dict[int, int] = field(default_factory=dict)
    """The version at which each group begins."""
    parts: bool = False
    """Take the groups of a batch in parts."""
    left_out_share: float = 0.0
    """The share of taken groups that are left out of their batch."""
    left_out: list[int] = field(default_factory=list)

    async def group(self, number: int, ticks: int) -> Group:
        pieces: list[ContextPiece | Sampled] = [ContextPiece((0,))]
        self.begun[number] = self.version
        for _ in range(ticks):
            pieces.append(Sampled((1,), (-0.5,), self.version))
            await asyncio.sleep(0)
        task = Task("toy", "train", number)
        return Group(
            task, (Trajectory(tuple(pieces), {"r": 1.0}, "done", task, seed=0, episode=number),)
        )

    async def produce(self, rng: random.Random, first: int = 0) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(first, 10**9):
                ticks = self.slow_ticks if number % 7 == 3 else rng.randint(1, 3)
                await self.line.admit(
                    lambda number=number, ticks=ticks: self.group(number, ticks), tasks
                )
                self.admitted += 1
                self.live += 1
                self.most_live = max(self.most_live, self.live)

    async def go_on(self, rng: random.Random, open_groups: list[int]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in open_groups:
                await self.line.readmit(number, lambda number=number: self.group(number, 2), tasks)
            await self.produce(rng, self.admitted)

    async def train(self, steps: int) -> None:
        for _ in range(steps):
            groups = await self.take()
            self.order += [group.task.index for group in groups]
            for group in groups:
                for piece in group.trajectories[0].sampled:
                    self.ages.append(self.version - piece.version)
            for _ in range(5):
                await asyncio.sleep(0)
            self.version += 1
            self.live -= len(groups)
            self.line.release()

    async def take(self) -> list[Group]:
        if not self.parts and not self.left_out_share:
            return await self.line.take()
        take = self.line.take_part if self.parts else self.line.take
        groups: list[Group] = []
        while missing := self.line.groups_per_step - len(groups):
            part = await take(missing)
            assert 1 <= len(part) <= missing
            kept = [each for each in part if not self._is_left_out(each.task.index)]
            left_out = [each.task.index for each in part if each not in kept]
            self.line.leave_out(len(left_out))
            self.live -= len(left_out)
            self.left_out += left_out
            groups += kept
        return groups

    def _is_left_out(self, number: int) -> bool:
        return random.Random(number).random() < self.left_out_share

    async def run(self, steps: int, seed: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            producer = tasks.create_task(self.produce(random.Random(seed)))
            await self.train(steps)
            producer.cancel()

    def require_none_lost(self, bound: int, *, taken_before: Sequence[int] = ()) -> None:
        """Check that the groups not taken are open, and none of them is too old to be taken."""
        taken = {*taken_before, *self.order, *self.left_out}
        left = set(range(self.admitted)) - taken
        assert self.line.num_open == len(left)
        assert {number for number in left if number < max(self.order)} <= self.begun.keys()
        begun = [self.begun[number] for number in left & self.begun.keys()]
        assert all(self.version - version <= bound for version in begun)


def simulate(  # noqa: PLR0913 - a queue, its groups and how they are taken
    budget: int,
    groups: int,
    window: int | None,
    *,
    slow: int,
    seed: int = 0,
    parts: bool = False,
    left_out_share: float = 0.0,
) -> World:
    """Run `STEPS` steps. Without a `window`, the queue chooses it."""

    async def main() -> World:
        world = World(
            make_queue(budget, groups, window),
            slow_ticks=slow,
            parts=parts,
            left_out_share=left_out_share,
        )
        await world.run(STEPS, seed)
        return world

    return asyncio.run(main())


def make_queue(budget: int, groups: int, window: int | None) -> StalenessQueue:
    return StalenessQueue(
        max_staleness=budget,
        groups_per_step=groups,
        lookahead_window=window or 1,
        adaptive_window=window is None,
    )


@pytest.mark.parametrize("budget", [0, 1, 2, 3])
def test_with_stragglers_the_bound_holds_and_is_reached(budget: int) -> None:
    world = simulate(budget, groups=4, window=1, slow=40)
    assert max(world.ages) == budget
    assert world.order == list(range(4 * STEPS))
    assert world.most_live <= (budget + 1) * 4


def test_the_same_budget_with_whatever_is_finished_bounds_nothing() -> None:
    async def main() -> World:
        world = World(
            StalenessQueue(max_staleness=1, groups_per_step=4, lookahead_window=10**9),
            slow_ticks=200,
        )
        await world.run(STEPS, seed=0)
        return world

    assert max(asyncio.run(main()).ages) > 4 * staleness_bound(1, 4, lookahead_window=1)


@given(
    budget=st.integers(0, 3),
    groups=st.integers(1, 5),
    window=st.none() | st.integers(1, 12),
    slow=st.integers(1, 120),
    seed=st.integers(0, 99),
    parts=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_no_window_outruns_its_derived_bound(  # noqa: PLR0913 - drawn values
    budget: int, groups: int, window: int | None, slow: int, seed: int, parts: bool
) -> None:
    world = simulate(budget, groups, window, slow=slow, seed=seed, parts=parts)
    bound = staleness_bound(budget, groups, window or 1)
    assert max(world.ages) <= bound
    assert len(set(world.order)) == len(world.order) == STEPS * groups
    assert window != 1 or sorted(world.order) == list(range(STEPS * groups))
    assert window != 1 or parts or world.order == sorted(world.order)
    world.require_none_lost(bound)


@given(
    budget=st.integers(0, 3),
    groups=st.integers(1, 5),
    window=st.integers(1, 12),
    slow=st.integers(1, 120),
    parts=st.booleans(),
    share=st.floats(0.1, 0.9),
)
@settings(max_examples=60, deadline=None)
def test_groups_in_the_place_of_others_keep_the_bound(  # noqa: PLR0913 - drawn values
    budget: int, groups: int, window: int, slow: int, parts: bool, share: float
) -> None:
    world = simulate(budget, groups, window, slow=slow, parts=parts, left_out_share=share)
    bound = staleness_bound(budget, groups, window)
    assert max(world.ages) <= bound
    assert world.most_live <= (budget + 1) * groups
    assert len({*world.order, *world.left_out}) == STEPS * groups + len(world.left_out)
    world.require_none_lost(bound)


@pytest.mark.parametrize("budget", [0, 2])
def test_parts_of_a_batch_come_in_any_order_and_make_the_same_batch(budget: int) -> None:
    whole, parts = (simulate(budget, groups=4, window=1, slow=40, parts=p) for p in (False, True))
    batches = [
        [sorted(world.order[start : start + 4]) for start in range(0, 4 * STEPS, 4)]
        for world in (whole, parts)
    ]
    assert batches[0] == batches[1] and parts.order != whole.order
    assert max(parts.ages) == budget


def test_a_window_lets_finished_groups_pass_a_straggler_up_to_its_reach() -> None:
    straight, windowed = (simulate(2, groups=4, window=w, slow=200) for w in (1, 5))
    assert straight.order == list(range(4 * STEPS))
    assert windowed.order != sorted(windowed.order)
    assert max(windowed.ages) == staleness_bound(2, 4, 5) == 3
    for place, number in enumerate(windowed.order):
        skipped = set(range(number)) - set(windowed.order[:place])
        assert not skipped or number - min(skipped) < 5


def test_the_first_failure_of_work_ends_the_line() -> None:
    async def main() -> None:
        line = StalenessQueue(max_staleness=0, groups_per_step=1)

        async def broken() -> Group:
            raise RuntimeError("out of tea")

        async with asyncio.TaskGroup() as tasks:
            await line.admit(broken, tasks)
            await line.take()

    with pytest.raises(ExceptionGroup) as failure:
        asyncio.run(main())
    assert "out of tea" in repr(failure.value.exceptions)


def piece(episode: int, version: int) -> PendingPiece:
    return PendingPiece(episode, (1, 2), 1, Sampled((2,), (-0.1,), version))


def test_pending_pieces_pin_a_version_until_its_last_piece_is_settled() -> None:
    pending = PendingPieces()
    for episode, version in [(1, 0), (1, 1), (2, 1)]:
        pending.add(piece(episode, version))
    assert pending.versions == {0, 1}
    assert [item.episode for item in pending.of_version(1)] == [1, 2]
    assert [item.episode for item in pending.of_version(1, excluding={2, 3})] == [1]
    pending.discard([1])
    assert pending.versions == {1}
    pending.discard([2, 99])
    assert pending.versions == frozenset()


def batch_of(versions: list[int]) -> tuple[Batch, list[Group]]:
    task = Task("toy", "train", 0)
    pieces = (ContextPiece((0,)), *(Sampled((1,), (-0.5,), version) for version in versions))
    trajectory = Trajectory(pieces, {"r": 1.0}, "done", task, seed=0)
    return collate([ScoredTrajectory(trajectory, (1.0,))]), [Group(task, (trajectory,))]


def test_ages_are_counted_where_the_batch_is_consumed() -> None:
    batch, groups = batch_of([3, 3, 4, 5])
    ages = measure_staleness(batch, groups, lag=5 - batch.version, bound=2)
    assert ages["schedule/staleness_max"] == 2
    assert ages["schedule/staleness_mean"] == pytest.approx(1.25)
    assert ages["schedule/staleness_histogram"] == {"0": 1, "1": 1, "2": 2}
    assert ages["schedule/mixed_version_share"] == 1.0
    assert ages["schedule/stale_kv_share"] == 0
    unclean = replace(batch, clean=batch.version != 3)
    assert (
        measure_staleness(unclean, groups, lag=5 - batch.version, bound=2)[
            "schedule/stale_kv_share"
        ]
        == 0.5
    )
    assert torch.equal(batch.version, torch.tensor([-1, 3, 3, 4, 5]))


@pytest.mark.parametrize("version, bound", [(6, 2), (4, 2)])
def test_a_token_older_than_the_bound_or_from_the_future_is_an_error(
    version: int, bound: int
) -> None:
    batch, groups = batch_of([3, 5])
    with pytest.raises(StalenessError, match=f"the bound is 0 to {bound}"):
        measure_staleness(batch, groups, lag=version - batch.version, bound=bound)


def line_of(open_groups: int, *, closed: str = "") -> StalenessQueue:
    line = StalenessQueue(max_staleness=1, groups_per_step=2)
    line.restore(10 + open_groups, range(10, 10 + open_groups))
    if closed:
        line.close(closed)
    return line


@pytest.mark.parametrize("number", [0, 1])
def test_a_line_that_can_never_be_filled_says_why(number: int) -> None:
    short = f"a batch takes 2 groups, {number} are open and no more will come: "
    with pytest.raises(QueueExhausted, match=short + "the shop ran out of tasks"):
        asyncio.run(line_of(number, closed="the shop ran out of tasks").take())


def test_a_part_may_be_the_last_groups_there_are() -> None:
    async def work() -> Group:
        return Group(Task("toy", "train", 0), ())

    async def main() -> None:
        queue = line_of(0)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(2):
                await queue.admit(work, tasks)
        queue.close("the end")
        assert len(await queue.take_part(2)) == 2
        with pytest.raises(QueueExhausted, match="a batch takes 1 groups, 0 are open"):
            await queue.take_part(1)

    asyncio.run(main())


def test_a_queue_whose_tickets_were_never_released_says_so() -> None:
    async def work() -> Group:
        return Group(Task("toy", "train", 0), ())

    async def main() -> None:
        queue = line_of(0)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(4):
                await queue.admit(work, tasks)
        for _ in range(2):
            await queue.take()
        assert queue.metrics() == {
            "schedule/groups_in_flight": 0,
            "schedule/groups_waiting": 0,
            "schedule/tickets": 4,
            "schedule/tickets_in_use": 4,
        }
        with pytest.raises(
            QueueExhausted, match=r"0 are open.*all 4 tickets are out, 4 of them never released"
        ):
            await queue.take()

    asyncio.run(main())


def test_a_line_that_is_closed_while_somebody_waits_wakes_them() -> None:
    async def main() -> None:
        line = line_of(1)
        taking = asyncio.ensure_future(line.take())
        await asyncio.sleep(0)
        line.close("the end")
        await taking

    with pytest.raises(QueueExhausted, match="the end"):
        asyncio.run(main())


@given(
    budget=st.integers(0, 3),
    groups=st.integers(1, 4),
    window=st.none() | st.integers(1, 6),
    seed=st.integers(0, 99),
    cut=st.integers(1, 30),
)
@settings(max_examples=40, deadline=None)
def test_a_line_goes_on_where_it_was_with_its_order_and_its_tickets(
    budget: int, groups: int, window: int | None, seed: int, cut: int
) -> None:
    """One queue takes half of a run's groups and a restored one the others, each exactly once."""

    async def main() -> tuple[World, World]:
        line = make_queue(budget, groups, window)
        first = World(line, slow_ticks=30)
        await first.run(cut, seed)
        open_groups = sorted(set(range(first.admitted)) - set(first.order))
        again = make_queue(budget, groups, window)
        again.restore(first.admitted, open_groups)
        assert again.num_open == len(open_groups) and again.num_finished == 0
        second = World(
            again,
            slow_ticks=30,
            version=first.version,
            live=len(open_groups),
            admitted=first.admitted,
        )
        async with asyncio.TaskGroup() as tasks:
            producer = tasks.create_task(second.go_on(random.Random(seed), open_groups))
            await second.train(10)
            producer.cancel()
        return first, second

    first, second = asyncio.run(main())
    order = first.order + second.order
    assert len(set(order)) == len(order) == groups * (cut + 10)
    bound = staleness_bound(budget, groups, window or 1)
    assert max(second.ages) <= bound
    assert window != 1 or order == list(range(len(order)))
    second.require_none_lost(bound, taken_before=first.order)
    assert second.most_live <= (budget + 1) * groups


def test_groups_that_lost_batches_had_made_room_for_wait_for_their_tickets() -> None:
    """Six groups are open with four tickets. Sampling all at once would make the last two too
    old."""

    async def main() -> None:
        line, begun = StalenessQueue(max_staleness=1, groups_per_step=2), []
        line.restore(6, range(6))

        async def work(number: int) -> Group:
            begun.append(number)
            return Group(Task("toy", "train", number), ())

        async def readmit(tasks: asyncio.TaskGroup) -> None:
            for number in range(6):
                await line.readmit(number, lambda number=number: work(number), tasks)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(readmit(tasks))
            for begun_by_then in ([0, 1, 2, 3], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]):
                await line.take()
                for _ in range(5):
                    await asyncio.sleep(0)
                assert begun == begun_by_then
                line.release()
                for _ in range(5):
                    await asyncio.sleep(0)

    asyncio.run(main())


@pytest.mark.parametrize("budget", [2, 3, 4])
def test_an_adaptive_window_passes_stragglers_and_attains_the_bound(budget: int) -> None:
    world = simulate(budget, groups=4, window=None, slow=60)
    assert max(world.ages) == budget
    assert world.order != sorted(world.order)
    assert world.most_live <= (budget + 1) * 4


@dataclass
class Tickets:
    """A queue with adaptive tickets, whose groups end when the test says so."""

    world: "Shuffled"
    num_waits: int = 0

    async def take(self, before: Sequence[int], during: Sequence[int] = ()) -> float:
        """Take a batch and return the number of tickets.

        The groups `before` end before the queue is asked, and the others while it waits.
        """
        queue = self.world.queue
        await self._end(before)
        taking = asyncio.ensure_future(queue.take())
        await self.world._settle()
        assert not (during and taking.done())
        self.num_waits += not taking.done()
        await self._end(during)
        assert taking.done()
        assert len(taking.result()) == queue.groups_per_step
        tickets = queue.metrics()["schedule/tickets"]
        queue.release()
        await self.world._settle()
        return tickets

    async def _end(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.world.ends[number].set()
        await self.world._settle()


def with_tickets(check: Callable[[Tickets], Awaitable[None]]) -> None:
    """Run a check of a queue with 16 groups per batch and a bound of 2."""

    async def main() -> None:
        world = Shuffled(make_queue(2, 16, None), random.Random(0))
        async with asyncio.TaskGroup() as tasks:
            producer = tasks.create_task(world.produce(0, []))
            await world._settle()
            await check(Tickets(world))
            producer.cancel()
            for end in world.ends.values():
                end.set()

    asyncio.run(main())


def test_an_eighth_of_a_batch_of_tickets_is_left_free_after_a_deadline_and_used_again() -> None:
    """The first 48 groups have the deadline of batch 2, and the next 16 that of batch 3."""

    async def check(tickets: Tickets) -> None:
        assert len(tickets.world.ends) == 48
        assert await tickets.take(range(16)) == 48, "there was no wait"
        # Groups 48 and 49 are finished, but batch 1 must have 16 of the first 48.
        assert await tickets.take([*range(16, 31), 48, 49], [31]) == 46
        assert len(tickets.world.ends) == 46 - 2
        assert await tickets.take(range(32, 48)) == 46, "there was no wait"
        assert await tickets.take([], range(50, 64)) == 48, "too few groups were finished"
        assert tickets.num_waits == 2

    with_tickets(check)


def test_there_are_always_tickets_for_two_batches() -> None:
    """The oldest group ends last, when its deadline is there."""

    async def check(tickets: Tickets) -> None:
        counts: list[float] = []
        while tickets.num_waits < 12:
            oldest, *others = sorted(tickets.world.ends)
            await tickets._end(others)
            waits = tickets.num_waits
            is_due = tickets.world.queue._num_ready() < 16
            count = await tickets.take([], [oldest] if is_due else [])
            assert tickets.num_waits == waits + is_due
            counts += [count] if is_due else []
        assert counts == [46, 44, 42, 40, 38, 36, 34, 32, 32, 32, 32, 32]

    with_tickets(check)


def test_an_adaptive_window_is_strict_order_where_nothing_can_be_passed() -> None:
    """With one version in each batch or two, all tickets are needed."""
    for budget in (0, 1):
        strict, adaptive = (simulate(budget, groups=4, window=w, slow=60) for w in (1, None))
        assert [set(strict.order[n : n + 4]) for n in range(8, 4 * STEPS, 4)] == [
            set(adaptive.order[n : n + 4]) for n in range(8, 4 * STEPS, 4)
        ]


@dataclass
class Shuffled:
    """A queue whose groups end, and whose batches are taken and released, in any order.

    Tokens are stamped with the place of their version, as in `unstale.model.versions`.
    """

    queue: StalenessQueue
    rng: random.Random
    taken: int = 0
    released: int = 0
    first: dict[int, int] = field(default_factory=dict)
    """The place of the version of each group's first token."""
    ends: dict[int, asyncio.Event] = field(default_factory=dict)
    batches: list[list[int]] = field(default_factory=list)

    async def group(self, number: int) -> Group:
        self.first[number] = min(self.first.get(number, self.released), self.released)
        self.ends[number] = asyncio.Event()
        await self.ends[number].wait()
        del self.ends[number]
        return Group(Task("toy", "train", number), ())

    async def produce(self, first: int, reopened: list[int]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in reopened:
                await self.queue.readmit(number, partial(self.group, number), tasks)
            for number in range(first, 10**9):
                await self.queue.admit(partial(self.group, number), tasks)

    async def train(self, steps: int) -> None:
        for _ in range(steps):
            taking = asyncio.ensure_future(self.queue.take())
            while not taking.done():
                await self._settle()
                if self.released < self.taken and self.rng.random() < 0.5:
                    self.release()
                elif self.ends:
                    self.ends[self.rng.choice(list(self.ends))].set()
                elif not taking.done():
                    self.release()
            batch = [group.task.index for group in taking.result()]
            assert all(self.taken - self.first[number] <= self.queue.bound for number in batch)
            self.batches.append(batch)
            self.taken += 1
            while self.released < self.taken - min(1, self.queue.bound):  # as the loop does
                self.release()
        await self._settle()

    def release(self) -> None:
        self.released += 1
        self.queue.release()

    async def _settle(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)

    async def run(self, steps: int, first: int = 0, reopened: Sequence[int] = ()) -> None:
        async with asyncio.TaskGroup() as tasks:
            producer = tasks.create_task(self.produce(first, list(reopened)))
            await self.train(steps)
            producer.cancel()


@given(
    budget=st.integers(0, 5),
    groups=st.integers(1, 5),
    seed=st.integers(0, 10**6),
    lost=st.integers(0, 3),
)
@settings(max_examples=80, deadline=None)
def test_deadlines_hold_in_any_order_and_after_lost_batches(
    budget: int, groups: int, seed: int, lost: int
) -> None:
    """A resume opens the groups of lost batches again, with tokens of lost versions."""

    async def main() -> None:
        rng = random.Random(seed)
        first = Shuffled(make_queue(budget, groups, None), rng)
        await first.run(12)
        kept = first.batches[: 12 - lost]
        trained = {number for batch in kept for number in batch}
        admitted = max(first.first) + 1
        reopened = [number for number in range(admitted) if number not in trained]
        begun = {number: first.first[number] for number in reopened if rng.random() < 0.8}
        place = len(kept)
        queue = make_queue(budget, groups, None)
        ages = {number: max(0, place - version) for number, version in begun.items()}
        queue.restore(admitted, reopened, ages)
        second = Shuffled(queue, rng, taken=place, released=place, first=begun)
        await second.run(12, admitted, reopened)
        order = [number for batch in [*kept, *second.batches] for number in batch]
        assert len(set(order)) == len(order)
        left = set(range(max(second.first) + 1)) - set(order)
        assert queue.num_open == len(left) and left <= second.first.keys()
        assert all(second.taken - second.first[number] <= queue.bound for number in left)

    asyncio.run(main())


def test_the_queue_waits_for_training_when_no_group_runs_or_can_start() -> None:
    async def main() -> None:
        line = StalenessQueue(max_staleness=1, groups_per_step=1)
        ends = [asyncio.Event() for _ in range(3)]
        world = World(line, slow_ticks=1)

        async def group(number: int) -> Group:
            await ends[number].wait()
            return await world.group(number, 1)

        async def finish(number: int) -> None:
            ends[number].set()
            for _ in range(4):
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks:
            await line.admit(partial(group, 0), tasks)
            await finish(0)
            assert not line.waits_for_training, "one ticket is free"
            await line.admit(partial(group, 1), tasks)
            assert not line.waits_for_training, "group 1 runs"
            await finish(1)
            assert line.waits_for_training
            await line.take()
            assert line.waits_for_training, "the batch is being trained on"
            await line.take()
            assert not line.waits_for_training, "the batch before is being published"
            line.release()
            assert not line.waits_for_training, "its ticket is free"
            await line.admit(partial(group, 2), tasks)
            assert not line.waits_for_training, "group 2 runs"
            await finish(2)
            assert line.waits_for_training

    asyncio.run(main())
