"""The queue of groups that bounds staleness, and the sampled tokens that wait for training.

Staleness is the number of versions between sampling a token and training on it. Its bound depends
on the number of tickets (permissions to start a group), on the order in which batches take groups,
and on the look-ahead window. So one class handles all three (derivation: docs/staleness.md).
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
"""With `adaptive_window`, the number of groups that may be started changes by `groups_per_step`
divided by this number. A smaller change would adapt too slowly. A larger one would vary the
staleness from step to step.
"""

StartGroup = Callable[[], Awaitable[Group]]


class QueueExhausted(RuntimeError):
    """Error: a batch can never be completed, because no more groups will start."""


class StalenessQueue:
    """A queue of groups (several episodes of one task), in the order of their admission.

    Each group has a position in this order, from 0. A group needs a ticket before its episodes
    start, and `admit` waits for a free one. There are `(max_staleness + 1) * groups_per_step`
    tickets. `release` frees the tickets of a batch once every engine has the version that was
    trained on it.

    `take` waits until the next batch is complete and returns its groups, the oldest finished ones.
    It may pass over unfinished groups: it takes positions that are less than `lookahead_window`
    after the oldest unfinished group. A window of 1 means strict order of admission. `take_part`
    returns the same batch in several parts, with the same bound.

    With `adaptive_window`, each group has a deadline, and `take` may pass over unfinished groups as
    long as these can still meet their deadlines. The bound is then `max_staleness`. The number of
    tickets shrinks while finished groups wait for older ones, and grows while too few are finished.
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
        """Number of tickets: groups that may be started and not yet released. `adaptive_window`
        varies it.
        """
        self._num_live = 0
        self._num_unreleased = 0
        self._num_admitted = 0
        self._unfinished: OrderedDict[int, None] = OrderedDict()
        """Positions in the queue of the unfinished groups, oldest first."""
        self._finished: list[tuple[int, Group]] = []
        """Finished groups that no batch has taken yet, as (position in the queue, group)."""
        self._ticket_free = asyncio.Event()
        self._ready = asyncio.Event()
        """An event that is set when the waiting caller of `take` or `take_part` can get
        `_num_wanted` groups or more.
        """
        self._num_wanted = groups_per_step
        self._num_missing = groups_per_step
        """Number of groups that the current batch still lacks."""
        self._takes_part = False
        """True if the waiting caller is `take_part`, which accepts a part of the batch."""
        self._waited_for = ""
        """Why the last caller of `take` or `take_part` had to wait. "groups": too few groups were
        finished. "deadline": places in the batch were reserved for older, unfinished groups. Empty
        if it did not wait.
        """
        self._deadlines = Deadlines(self.bound, groups_per_step) if adaptive_window else None
        self._restored_deadlines: Mapping[int, int] = {}
        """Position in the queue -> deadline (number of a batch), for groups with tokens from before
        a resume and for all older groups.
        """
        self._closed = ""

    @property
    def num_open(self) -> int:
        """Number of groups that were started and that no batch has taken yet."""
        return len(self._unfinished) + self.num_finished

    @property
    def num_finished(self) -> int:
        """Number of finished groups that no batch has taken yet."""
        return len(self._finished)

    @property
    def waits_for_training(self) -> bool:
        """True if every started group is finished, and no other can start before the next optimizer
        step.

        Any thread may read it.
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
        """Restore the queue of a resumed run, which had admitted `admitted` groups.

        `open_positions` are the positions of the groups that no step was trained on. Afterwards,
        call `readmit` for each of them. `ages` is position -> staleness of the group's oldest
        token, for groups that have tokens.
        """
        self._num_admitted = admitted
        self._unfinished = OrderedDict.fromkeys(sorted(open_positions))
        self._restored_deadlines = _ascending_deadlines(self._unfinished, ages or {}, self.bound)

    async def readmit(self, position: int, start: StartGroup, tasks: asyncio.TaskGroup) -> None:
        """Wait for a ticket, then start the group at this position, which was admitted before a
        resume.

        There may be more such groups than tickets, because groups of steps since the last
        checkpoint must be trained on again. These must wait, so that their tokens are not too old
        when a batch takes them.
        """
        await self._take_ticket()
        if self._deadlines:
            self._deadlines.admit(position, at_most=self._restored_deadlines.get(position))
            self._notify()  # the last of these groups lets others pass
        tasks.create_task(self._run(position, start))

    async def admit(self, start: StartGroup, tasks: asyncio.TaskGroup) -> None:
        """Wait for a ticket, then start another group in the task group `tasks`."""
        await self._take_ticket()
        self._unfinished[self._num_admitted] = None
        if self._deadlines:
            self._deadlines.admit(self._num_admitted)
        tasks.create_task(self._run(self._num_admitted, start))
        self._num_admitted += 1

    async def wait_for_ticket(self) -> None:
        """Wait until another group may start, but start none."""
        while self._num_live >= self._num_tickets:
            self._ticket_free.clear()
            await self._ticket_free.wait()

    async def _take_ticket(self) -> None:
        await self.wait_for_ticket()
        self._num_live += 1

    def close(self, reason: str) -> None:
        """Declare that no more groups will start.

        Afterwards `take` and `take_part` raise `QueueExhausted` with this reason if the groups do
        not suffice for a batch.
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
        """Wake the caller of `take` or `take_part` if it can get enough groups."""
        if self._num_ready() >= self._num_wanted and not self._ready.is_set():
            was_enough = self.num_finished > self._num_wanted
            self._waited_for = "deadline" if was_enough else "groups"
            self._ready.set()

    def _num_ready(self) -> int:
        """Return how many finished groups the next batch may take."""
        if self._deadlines:
            return self._num_in_time(self._deadlines)
        reach = next(iter(self._unfinished), self._num_admitted) + self.lookahead_window
        if self._takes_part and self.lookahead_window == 1:
            # The batch is certain: it has the oldest groups, in whatever order they finish.
            positions = sorted([*self._unfinished, *map(itemgetter(0), self._finished)])
            reach = [*positions, self._num_admitted][: self._num_missing + 1][-1]
        return bisect_left(self._finished, reach, key=itemgetter(0))

    def _num_in_time(self, deadlines: Deadlines) -> int:
        """Return how many finished groups the next batch may take so that the others meet their
        deadlines.

        Groups older than every unfinished one may always be taken. After a resume, only these may
        be taken while other groups wait for a ticket.
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
        """Wait until the next batch is complete, and return its groups.

        `missing` is the number of groups to take (0: `groups_per_step`). Raises `QueueExhausted` if
        this number of groups can never finish.
        """
        self._takes_part = False
        missing = missing or self.groups_per_step
        return await self._take(missing, missing=missing)

    def leave_out(self, count: int) -> None:
        """Free the tickets of `count` groups that a batch took but that no step will be trained on.

        As many other groups can then start, and the batch takes other groups in their place. The
        staleness bound still holds, because new groups come after all others in the queue. Not for
        a queue with `adaptive_window`.
        """
        self._num_live -= count
        self._num_unreleased -= count
        self._ticket_free.set()

    async def take_part(self, missing: int) -> list[Group]:
        """Wait for some groups of the next batch, which lacks `missing` groups, and return them.

        These are all missing groups that may be taken at that time, at least one. With a window of
        1, the batch has the oldest groups of the queue, and takes them in the order in which they
        finish. A larger window limits which groups may be taken, as for `take`.

        Raises `QueueExhausted` if the batch can never be completed.
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
        """Change the number of tickets (groups that may be started), by what the last caller waited
        for.

        Fewer tickets leave places in batches free, so that more finished groups may be taken before
        older unfinished ones. The tickets always suffice for two batches.
        """
        change = max(1, self.groups_per_step // TICKET_SHARE)
        if self._waited_for == "deadline":
            fewest = min(2 * self.groups_per_step, self._most_tickets)
            self._num_tickets = max(self._num_tickets - change, fewest)
        elif self._waited_for == "groups":
            self._num_tickets = min(self._num_tickets + change, self._most_tickets)

    def _require_prospects(self, missing: int) -> None:
        """Raise `QueueExhausted` if too few groups can still finish for a batch that lacks
        `missing` groups.
        """
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
        """Free the tickets of the oldest batch that was taken, so that as many other groups can
        start.

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
    """Return the deadline of each group after a resume, by position, as a number of batches from 0.

    `ages` is position -> staleness of the group's oldest token. The deadline of such a group is
    `bound` minus this age. No group has a later deadline than a newer one. Groups that are newer
    than all groups in `ages` get none.

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
    """The sampled pieces (runs of tokens) that no batch has contained yet, by version and episode.

    The weights of these versions must be kept: the tokens' old log-probabilities may still be
    needed.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, dict[int, list[PendingPiece]]] = {}
        self.changed = asyncio.Event()
        """An event that is set when an episode ends, and when no engine samples with a version any
        more. A caller must clear it before waiting for it.
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
        """The versions that sampled tokens on which no batch was trained yet."""
        return frozenset(self._pieces)

    def before(self, version: int, *, excluding: Collection[int] = ()) -> list[PendingPiece]:
        """Return the tokens that versions before `version` sampled. Leave out the episodes
        `excluding`.
        """
        earlier = sorted(each for each in self._pieces if each < version)
        return [piece for each in earlier for piece in self.of_version(each, excluding=excluding)]

    def of_version(self, version: int, *, excluding: Collection[int] = ()) -> list[PendingPiece]:
        """Return the tokens that this version sampled, except those of `excluding` episodes."""
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
    """Return the staleness metrics of a batch.

    `lag` is the staleness of each token, `[T]`, in versions. Replayed tokens are left out: they are
    checked by `measure_replay`. Raises `StalenessError` if a token is older than `bound`.
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
    """Return the metrics of a batch's replayed tokens, on which an earlier step was trained, too.

    `lag` is the staleness of each token, `[T]`, in versions, and `version` is the version before
    training on the batch. Raises `StalenessError` if a replayed token is older than `bound`. Also
    raises it for a token of the current version, on which no step can have been trained before.
    After a resume, tokens of lost versions may have lag 0.
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
