"""Who may begin, in which order results are taken, and how old what is taken can be.

`StalenessQueue` holds budget, order and look-ahead window in one object, because the staleness bound needs all three
(derivation: docs/staleness.md). `PendingPieces` knows every piece that was sampled and not yet consumed, and so which
versions somebody still needs.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from heapq import heappop, heappush

from torch import Tensor

from unstale.config import staleness_bound
from unstale.records import Batch, Group, PendingPiece

Work = Callable[[], Awaitable[Group]]


class QueueExhausted(RuntimeError):
    """Nobody can ever finish the groups that are waited for."""


class StalenessQueue:
    """Groups in admission order, at most `(max_staleness + 1) * groups_per_step` of them live.

    A ticket is taken before a group's work begins and comes back with `release`, which the loop calls when every
    engine holds the version that the batch led to. `take` hands out groups one by one from the `lookahead_window` oldest
    positions, the oldest finished first; `lookahead_window=1` is strict admission order.

    `admit` waits for a ticket: `release` unblocks it. `take` waits for finished groups: their work unblocks it. A group
    costs O(log live) in all, however many others are live.
    """

    def __init__(
        self, *, max_staleness: int, groups_per_step: int, lookahead_window: int = 1
    ) -> None:
        self.groups_per_step = groups_per_step
        self.lookahead_window = lookahead_window
        self.bound = staleness_bound(max_staleness, groups_per_step, lookahead_window)
        self._tickets = (max_staleness + 1) * groups_per_step
        self._live = 0
        self._free = asyncio.Event()
        self._admitted = 0
        self._unfinished: OrderedDict[int, None] = OrderedDict()  # positions, the oldest first
        self._beyond: list[
            tuple[int, Group]
        ] = []  # a heap of what is finished and out of the window's reach
        self._within: list[tuple[int, Group]] = []  # and of what is within it
        self._unreleased = 0
        self._arrival = asyncio.Event()
        self._closed = ""

    @property
    def num_open(self) -> int:
        """Groups admitted and not yet taken."""
        return len(self._unfinished) + self.num_finished

    @property
    def num_finished(self) -> int:
        """Groups that wait to be taken."""
        return len(self._beyond) + len(self._within)

    def metrics(self) -> dict[str, float]:
        """Of the groups that have begun and are not taken: how many, and how many of these only wait to be."""
        return {
            "schedule/groups_in_flight": self.num_open,
            "schedule/groups_waiting": self.num_finished,
        }

    def restore(self, admitted: int, open_positions: Sequence[int]) -> None:
        """As it was when so many groups had been admitted and these not taken. They are to be admitted again."""
        self._admitted = admitted
        self._unfinished = OrderedDict.fromkeys(sorted(open_positions))

    async def readmit(self, position: int, work: Work, tasks: asyncio.TaskGroup) -> None:
        """Wait for a ticket for a group that has its position from `restore`, then start its work.

        After a resume there may be more groups than tickets: lost batches had made room for them. What these would
        sample before as many batches were trained again would be too old when they are taken.
        """
        await self._ticket()
        tasks.create_task(self._finish(position, work))

    async def admit(self, work: Work, tasks: asyncio.TaskGroup) -> None:
        """Wait for a ticket, then start `work` as a child of `tasks`."""
        await self._ticket()
        self._unfinished[self._admitted] = None
        tasks.create_task(self._finish(self._admitted, work))
        self._admitted += 1

    async def _ticket(self) -> None:
        while self._live >= self._tickets:
            self._free.clear()
            await self._free.wait()
        self._live += 1

    def close(self, reason: str) -> None:
        """Nobody will be admitted any more: who waits for more groups than there are is told why."""
        self._closed = reason
        self._arrival.set()

    async def _finish(self, position: int, work: Work) -> None:
        group = await work()
        del self._unfinished[position]
        heappush(self._beyond, (position, group))
        reach = next(iter(self._unfinished), self._admitted) + self.lookahead_window
        while self._beyond and self._beyond[0][0] < reach:
            heappush(self._within, heappop(self._beyond))
        if len(self._within) >= self.groups_per_step:
            self._arrival.set()

    async def take(self) -> list[Group]:
        """The next batch of `groups_per_step` groups, in the order in which the window allows them.

        `QueueExhausted` if they can never come.
        """
        while len(self._within) < self.groups_per_step:
            self._require_prospects()
            self._arrival.clear()
            await self._arrival.wait()
        self._unreleased += self.groups_per_step
        return [heappop(self._within)[1] for _ in range(self.groups_per_step)]

    def _require_prospects(self) -> None:
        if self.num_open >= self.groups_per_step:
            return
        short = f"a batch takes {self.groups_per_step} groups, {self.num_open} are open and no more will come: "
        if self._closed:
            raise QueueExhausted(short + self._closed)
        if self._live >= self._tickets:
            raise QueueExhausted(
                short
                + f"all {self._tickets} tickets are out, {self._unreleased} of them never released"
            )

    def release(self) -> None:
        """Give back the tickets of the oldest batch taken. Call when all engines hold the version that it led to."""
        count = min(self._unreleased, self.groups_per_step)
        self._live, self._unreleased = self._live - count, self._unreleased - count
        self._free.set()


class PendingPieces:
    """Every piece that was sampled and not yet consumed, by version and episode.

    The versions of these pieces are what a route must still be able to answer for: they pin snapshots, and they are
    what is left to score when the weights are about to leave a version. What is asked costs what is answered.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, dict[int, list[PendingPiece]]] = {}
        self.news = asyncio.Event()
        """Set when a piece arrives; whoever waits for it clears it."""
        self.told = asyncio.Event()
        """Set while whoever scores has heard that every engine holds the newest version."""

    def add(self, piece: PendingPiece) -> None:
        self._pieces.setdefault(piece.piece.version, {}).setdefault(piece.episode, []).append(piece)
        self.news.set()

    def discard(self, episodes: Collection[int]) -> None:
        """These episodes were consumed or given up: nothing more will be asked about them."""
        for version in self.versions:
            held = self._pieces[version]
            for episode in episodes:
                held.pop(episode, None)
            if not held:
                del self._pieces[version]

    @property
    def versions(self) -> frozenset[int]:
        """Versions that some unconsumed piece was sampled with."""
        return frozenset(self._pieces)

    def of_version(self, version: int, *, excluding: Collection[int] = ()) -> list[PendingPiece]:
        """The unconsumed pieces of one version, partial, finished and queued, but for those of some episodes."""
        passed, held = frozenset(excluding), self._pieces.get(version, {})
        return [
            piece for episode, pieces in held.items() if episode not in passed for piece in pieces
        ]


class StalenessError(AssertionError):
    """A token older than the bound reached the trainer: the schedule broke its promise."""


def measure_staleness(
    batch: Batch, groups: Sequence[Group], *, lag: Tensor, bound: int
) -> dict[str, object]:
    """Ages of a batch's action tokens where it is consumed, as metrics. Raises `StalenessError` beyond `bound`.

    `lag` is `[T]`, as `Policy.lag` counts it.
    """
    ages = Counter(lag[batch.sampled].tolist())
    oldest = max(ages, default=0)
    if oldest > bound or min(ages, default=0) < 0:
        raise StalenessError(f"tokens of age {min(ages)} to {oldest}; the bound is 0 to {bound}")
    tokens = sum(ages.values())
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    mixed = sum(len(trajectory.versions) > 1 for trajectory in trajectories)
    return {
        "schedule/staleness_max": oldest,
        "schedule/staleness_mean": sum(age * count for age, count in ages.items()) / max(tokens, 1),
        "schedule/staleness_bound": bound,
        "schedule/staleness_histogram": {str(age): count for age, count in sorted(ages.items())},
        "schedule/mixed_version_share": mixed / max(len(trajectories), 1),
        "schedule/stale_kv_share": (~batch.clean[batch.sampled]).double().sum().item()
        / max(tokens, 1),
    }
