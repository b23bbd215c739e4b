"""The queue that bounds staleness, and the list of sampled tokens that no batch has contained yet.

Staleness is the number of versions between sampling a token and training on it. The bound depends
on the number of tickets (permissions to start a group), on the order of the groups in batches and
on the look-ahead window. So one class has all three (derivation: docs/staleness.md).
"""

import asyncio
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from operator import itemgetter

from torch import Tensor

from unstale.config import staleness_bound
from unstale.records import Batch, Group, PendingPiece
from unstale.rollout.deadlines import Deadlines

TICKET_SHARE = 8
"""The permitted number of started groups changes by `groups_per_step` divided by this number. A
smaller change would need too many steps to fit the workload, a larger one would vary the staleness
from step to step.
"""

StartGroup = Callable[[], Awaitable[Group]]


class QueueExhausted(RuntimeError):
    """Error: a batch can never be completed, because no more groups will start."""


class StalenessQueue:
    """A queue of groups (several episodes of one task), in the order of their admission.

    Each group has a position in this order, from 0. A group needs a ticket before its episodes
    start. There are `(max_staleness + 1) * groups_per_step` tickets, and `admit` waits until one is
    free. `release` frees the tickets of a batch when every engine has the version that was trained
    on it.

    `take` waits for the finished groups of the next batch and returns the oldest ones. It may skip
    unfinished groups: it takes only positions less than `lookahead_window` after the oldest
    unfinished group. A window of 1 means strict order of admission. `take_part` returns the same
    batch in several parts, with the same bound.

    With `adaptive_window`, every group has a deadline, and `take` skips unfinished groups as long
    as these can still be taken in time. The bound is `max_staleness`. Fewer tickets are then given
    out if finished groups wait for older ones, and more if too few groups are finished.
    """

    def __init__(
        self,
        *,
        max_staleness: int,
        groups_per_step: int,
        lookahead_window: int = 1,
        adaptive_window: bool = False,
    ) -> None:
        self.groups_per_step = groups_per_step
        self.lookahead_window = lookahead_window
        self.bound = staleness_bound(max_staleness, groups_per_step, lookahead_window)
        self._most_tickets = (max_staleness + 1) * groups_per_step
        self._num_tickets = self._most_tickets
        """Largest number of groups that may be started and not yet released. `adaptive_window`
        changes it.
        """
        self._num_live = 0
        self._num_unreleased = 0
        self._num_admitted = 0
        self._unfinished: OrderedDict[int, None] = OrderedDict()
        """Positions in the queue of the unfinished groups, oldest first."""
        self._finished: list[tuple[int, Group]] = []
        """Finished groups that were not taken yet, each with its position in the queue."""
        self._ticket_free = asyncio.Event()
        self._ready = asyncio.Event()
        """An event that is set when at least `_num_wanted` groups, as the waiting caller needs, may
        be taken.
        """
        self._num_wanted = groups_per_step
        self._num_missing = groups_per_step
        """Number of groups that the batch of the waiting caller still lacks."""
        self._takes_part = False
        """True if the waiting caller accepts a part of a batch."""
        self._waited_for = ""
        """The cause of the last wait: "groups" that had to finish, or the "deadline" of an older
        group.
        """
        self._deadlines = Deadlines(self.bound, groups_per_step) if adaptive_window else None
        self._restored_deadlines: Mapping[int, int] = {}
        """Deadlines, by position, of the groups with tokens from before a resume and of all older
        groups.
        """
        self._closed = ""

    @property
    def num_open(self) -> int:
        """Number of groups that were started and not yet taken into a batch."""
        return len(self._unfinished) + self.num_finished

    @property
    def num_finished(self) -> int:
        """Number of finished groups that were not yet taken into a batch."""
        return len(self._finished)

    @property
    def waits_for_training(self) -> bool:
        """True if no group is unfinished, and none can start before the next optimizer step.

        Then the limit on started groups is reached, and at most one batch waits for `release`. Any
        thread may read it.
        """
        is_publishing = self._num_unreleased > self.groups_per_step
        return not (self._unfinished or self._num_live < self._num_tickets or is_publishing)

    def metrics(self) -> dict[str, float]:
        return {
            "schedule/groups_in_flight": self.num_open,
            "schedule/groups_waiting": self.num_finished,
            "schedule/tickets": self._num_tickets,
            "schedule/tickets_in_use": self._num_live,
        }

    def restore(
        self, admitted: int, open_positions: Sequence[int], ages: Mapping[int, int] | None = None
    ) -> None:
        """Restore a queue that had admitted `admitted` groups before a resume.

        `open_positions` are the positions of the groups that were not trained on. Call `readmit`
        for each of them afterwards. `ages` has, by position, the staleness of the oldest token of
        each group that has tokens.
        """
        self._num_admitted = admitted
        self._unfinished = OrderedDict.fromkeys(sorted(open_positions))
        self._restored_deadlines = _ascending_deadlines(self._unfinished, ages or {}, self.bound)

    async def readmit(self, position: int, start: StartGroup, tasks: asyncio.TaskGroup) -> None:
        """Wait until a group that was admitted before a resume may start, then start it.

        `position` is the group's position in the queue. There may be more such groups than may
        start, because the steps since the last checkpoint are lost, and their groups must be
        trained on again. Groups beyond the limit must wait, because tokens sampled earlier would be
        too old when the group is taken into a batch.
        """
        await self._take_ticket()
        if self._deadlines:
            self._deadlines.admit(position, at_most=self._restored_deadlines.get(position))
            self._notify()  # the last of these groups lets others pass
        tasks.create_task(self._run(position, start))

    async def admit(self, start: StartGroup, tasks: asyncio.TaskGroup) -> None:
        """Wait until another group may start, then start it in the task group `tasks`."""
        await self._take_ticket()
        self._unfinished[self._num_admitted] = None
        if self._deadlines:
            self._deadlines.admit(self._num_admitted)
        tasks.create_task(self._run(self._num_admitted, start))
        self._num_admitted += 1

    async def wait_for_ticket(self) -> None:
        """Wait until another group may start. No group is started."""
        while self._num_live >= self._num_tickets:
            self._ticket_free.clear()
            await self._ticket_free.wait()

    async def _take_ticket(self) -> None:
        await self.wait_for_ticket()
        self._num_live += 1

    def close(self, reason: str) -> None:
        """Declare that no more groups will be started.

        Afterwards `take` raises `QueueExhausted` with this reason if a batch cannot be completed.
        """
        self._closed = reason
        self._ready.set()

    async def _run(self, position: int, start: StartGroup) -> None:
        group = await start()
        del self._unfinished[position]
        if self._deadlines:
            self._deadlines.finish(position)
        insort(self._finished, (position, group), key=itemgetter(0))
        self._notify()

    def _notify(self) -> None:
        """Wake the caller of `take` or `take_part` if enough groups may be taken."""
        if self._num_ready() >= self._num_wanted and not self._ready.is_set():
            was_enough = self.num_finished > self._num_wanted
            self._waited_for = "deadline" if was_enough else "groups"
            self._ready.set()

    def _num_ready(self) -> int:
        """Return the number of finished groups that may be taken into the next batch."""
        if self._deadlines:
            return self._num_in_time(self._deadlines)
        reach = next(iter(self._unfinished), self._num_admitted) + self.lookahead_window
        if self._takes_part and self.lookahead_window == 1:
            # The batch is certain: it has the oldest groups, in whatever order they finish.
            positions = sorted([*self._unfinished, *map(itemgetter(0), self._finished)])
            reach = [*positions, self._num_admitted][: self._num_missing + 1][-1]
        return bisect_left(self._finished, reach, key=itemgetter(0))

    def _num_in_time(self, deadlines: Deadlines) -> int:
        """Return how many finished groups may be taken so that no other group misses its deadline.

        The oldest groups may always be taken. After a resume, only these may be taken while other
        groups wait to start.
        """
        oldest = next(iter(self._unfinished), self._num_admitted)
        most = min(len(self._finished), self._num_missing)
        in_order = min(most, bisect_left(self._finished, oldest, key=itemgetter(0)))
        if deadlines.num_unfinished < len(self._unfinished):
            return in_order
        for count in range(most, max(in_order, self._num_wanted - 1), -1):
            if deadlines.allow(count, self._finished):
                return count
        return in_order

    async def take(self, missing: int = 0) -> list[Group]:
        """Wait for the groups of the next batch and return them.

        `missing` is their number (0: a whole batch). Raises `QueueExhausted` if so many can never
        finish.
        """
        self._takes_part = False
        missing = missing or self.groups_per_step
        return await self._take(missing, missing=missing)

    def leave_out(self, count: int) -> None:
        """Allow other groups to start in place of `count` taken groups that no step is trained on.

        The batch then takes as many more. The staleness bound holds, because the new groups are
        behind all others in the queue. Not for a queue with `adaptive_window`.
        """
        self._num_live -= count
        self._num_unreleased -= count
        self._ticket_free.set()

    async def take_part(self, missing: int) -> list[Group]:
        """Wait for a part of the next batch, which lacks `missing` groups, and return it.

        The part has at least one group, and all missing groups that may be taken at that time. With
        a window of 1, the batch has the oldest groups, and those that are finished may be taken in
        any order. With a larger window, a group must be near the oldest unfinished group, as for
        `take`. It then stays near, because the oldest unfinished group only gets newer.

        Raises `QueueExhausted` if the batch can never be complete.
        """
        self._takes_part = True
        return await self._take(1, missing=missing)

    async def _take(self, fewest: int, *, missing: int) -> list[Group]:
        self._num_wanted = fewest
        self._num_missing = missing
        self._waited_for = ""
        while self._num_ready() < fewest:
            self._require_prospects(missing)
            self._ready.clear()
            await self._ready.wait()
        count = min(missing, self._num_ready())
        self._num_unreleased += count
        taken = self._finished[:count]
        del self._finished[:count]
        if self._deadlines:
            oldest = next(iter(self._unfinished), self._num_admitted)
            if self._finished:
                oldest = min(oldest, self._finished[0][0])
            self._deadlines.take(count, oldest=oldest)
            if count == missing:
                self._adapt_tickets()
        return [group for _, group in taken]

    def _adapt_tickets(self) -> None:
        """Change the number of groups that may be started, by the cause of the last wait.

        Starting fewer groups leaves places in batches free, so that finished groups may enter a
        batch before slow ones. The number always suffices for a batch in training and another one.
        """
        change = max(1, self.groups_per_step // TICKET_SHARE)
        if self._waited_for == "deadline":
            fewest = min(2 * self.groups_per_step, self._most_tickets)
            self._num_tickets = max(self._num_tickets - change, fewest)
        elif self._waited_for == "groups":
            self._num_tickets = min(self._num_tickets + change, self._most_tickets)

    def _require_prospects(self, missing: int) -> None:
        """Raise `QueueExhausted` if a batch that lacks `missing` groups can never be completed."""
        if self.num_open >= missing:
            return
        reason = self._closed
        if not reason and self._num_live >= self._num_tickets:
            reason = (
                f"all {self._num_tickets} tickets are out, "
                f"{self._num_unreleased} of them never released"
            )
        if reason:
            raise QueueExhausted(
                f"a batch takes {missing} groups, {self.num_open} are open "
                f"and no more will come: {reason}"
            )

    def release(self) -> None:
        """Allow as many groups to start as the oldest taken batch has.

        Call it when every engine has the weights that were trained on this batch.
        """
        count = min(self._num_unreleased, self.groups_per_step)
        if self._deadlines and count:
            self._deadlines.release()
        self._num_live -= count
        self._num_unreleased -= count
        self._ticket_free.set()


def _ascending_deadlines(
    positions: Collection[int], ages: Mapping[int, int], bound: int
) -> dict[int, int]:
    """Return the deadlines of groups after a resume, by position, as numbers of batches from 0.

    `ages` has, by position, the staleness of the oldest token of each group with tokens. The
    deadline of such a group is `bound` minus this age. An older group gets the deadline of a newer
    one if this is earlier. Groups that are newer than all groups with tokens get none.

    >>> _ascending_deadlines([3, 5, 6, 8], {5: 2, 6: 0}, bound=2)
    {3: 0, 5: 0, 6: 2}
    """
    deadlines: dict[int, int] = {}
    earliest: int | None = None
    for position in reversed([*positions]):
        if position in ages:
            own = bound - ages[position]
            earliest = own if earliest is None else min(own, earliest)
        if earliest is not None:
            deadlines[position] = earliest
    return dict(reversed(deadlines.items()))


class PendingPieces:
    """The sampled tokens that no batch has contained yet, by version and episode.

    The weights of their versions must be kept, because their old log-probabilities may still be
    needed.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, dict[int, list[PendingPiece]]] = {}
        self.changed = asyncio.Event()
        """An event that is set when an episode ends, and when no more tokens of a version will be
        sampled. A caller that waits for it clears it first.
        """

    def add(self, piece: PendingPiece) -> None:
        self._pieces.setdefault(piece.piece.version, {}).setdefault(piece.episode, []).append(piece)

    def end(self, episode: int) -> list[PendingPiece]:
        """Return all sampled tokens of an episode that has ended, and set the event `changed`."""
        self.changed.set()
        return [
            piece for of_version in self._pieces.values() for piece in of_version.get(episode, ())
        ]

    def discard(self, episodes: Collection[int]) -> None:
        """Remove the tokens of episodes that were trained on or have failed."""
        for version in self.versions:
            by_episode = self._pieces[version]
            for episode in episodes:
                by_episode.pop(episode, None)
            if not by_episode:
                del self._pieces[version]

    @property
    def versions(self) -> frozenset[int]:
        """The versions of the weights that sampled at least one of these tokens."""
        return frozenset(self._pieces)

    def before(self, version: int, *, excluding: Collection[int] = ()) -> list[PendingPiece]:
        """Return the tokens of versions before `version`, except those of the episodes
        `excluding`.
        """
        earlier = sorted(each for each in self._pieces if each < version)
        return [piece for each in earlier for piece in self.of_version(each, excluding=excluding)]

    def of_version(self, version: int, *, excluding: Collection[int] = ()) -> list[PendingPiece]:
        """Return the tokens that one version sampled, without those of the episodes `excluding`."""
        excluded = frozenset(excluding)
        by_episode = self._pieces.get(version, {})
        return [
            piece
            for episode, pieces in by_episode.items()
            if episode not in excluded
            for piece in pieces
        ]


class StalenessError(AssertionError):
    """Error: a token in a batch is older than the staleness bound."""


def measure_staleness(
    batch: Batch, groups: Sequence[Group], *, lag: Tensor, bound: int
) -> dict[str, object]:
    """Return the staleness metrics of a batch. Raises `StalenessError` for a token beyond `bound`.

    `lag` is the staleness of each token, `[T]`, in versions. Replayed tokens are not included:
    `measure_replay` checks them.
    """
    ages = lag[batch.fresh]
    youngest, oldest = (int(ages.min()), int(ages.max())) if len(ages) else (0, 0)
    if oldest > bound or youngest < 0:
        raise StalenessError(f"tokens of age {youngest} to {oldest}; the bound is 0 to {bound}")
    tokens = len(ages)
    counts = {age: count for age, count in enumerate(ages.bincount().tolist()) if count}
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    mixed = sum(len(trajectory.versions) > 1 for trajectory in trajectories)
    return {
        "schedule/staleness_max": oldest,
        "schedule/staleness_mean": sum(age * count for age, count in counts.items())
        / max(tokens, 1),
        "schedule/staleness_bound": bound,
        "schedule/staleness_histogram": {str(age): count for age, count in counts.items()},
        "schedule/mixed_version_share": mixed / max(len(trajectories), 1),
        "schedule/stale_kv_share": (~batch.clean[batch.fresh]).double().sum().item()
        / max(tokens, 1),
    }


def measure_replay(batch: Batch, *, lag: Tensor, bound: int, version: int) -> dict[str, float]:
    """Return the metrics of a batch's replayed tokens, on which earlier steps were trained, too.

    `version` is the version of the weights before training on the batch. `lag` is the staleness of
    each token, `[T]`, in versions. Raises `StalenessError` for a replayed token of the current
    version, which no step can have been trained on before, and for one that is older than `bound`.
    After a resume, tokens of versions that were lost may have lag 0.
    """
    ages = lag[batch.replayed].double()
    is_current = batch.version[batch.replayed] >= version
    if len(ages) and (ages.max() > bound or is_current.any()):
        raise StalenessError(
            f"replayed tokens of age {ages.min():g} to {ages.max():g}; the bound is 1 to {bound}"
        )
    return {
        "replay/groups": len(batch.replayed_groups),
        "replay/token_share": len(ages) / max(int(batch.sampled.sum()), 1),
        "replay/age_mean": ages.mean().item(),
        "replay/age_max": ages.max().item() if len(ages) else math.nan,
    }
