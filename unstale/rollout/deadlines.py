"""Deadlines of groups, by which the staleness queue lets a group enter a batch before older ones.

A group is several episodes of one task. Batches are numbered from 0. A batch is released when all
engines have loaded the weights that were trained on it. A group that is admitted to the queue when
`n` batches are released has the deadline `n + bound`: no later batch may contain it.
docs/staleness.md has the derivation.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from unstale.records import Group


@dataclass(slots=True)
class Deadlines:
    """The deadlines of the groups in the staleness queue: admitted, but not yet taken into a batch.

    A deadline is the number of the last batch that may contain the group. It is never earlier than
    the deadline of an older group.
    """

    bound: int
    groups_per_step: int
    _num_taken: int = 0
    _num_released: int = 0
    """Number of batches after which all engines have loaded the weights trained on the batch."""
    _unfinished: Counter[int] = field(default_factory=Counter)
    """Number of unfinished groups by deadline."""
    _newest: dict[int, int] = field(default_factory=dict)
    """The position of the newest group with each deadline, in the order of deadlines."""
    _own: dict[int, int] = field(default_factory=dict)
    """The deadline of each unfinished group, by the group's position in the order of admission."""

    @property
    def num_unfinished(self) -> int:
        return len(self._own)

    def admit(self, position: int, *, at_most: int | None = None) -> None:
        """Set the deadline of the new group at a position in the queue.

        `at_most` is its latest possible deadline, if it or a newer group has tokens from before a
        resume.
        """
        deadline = self._num_released + self.bound
        if at_most is not None:
            deadline = min(deadline, at_most)
        self._own[position] = deadline
        self._newest[deadline] = position
        self._unfinished[deadline] += 1

    def finish(self, position: int) -> None:
        self._unfinished[self._own.pop(position)] -= 1

    def release(self) -> None:
        """Count a batch as released: all engines have loaded the weights trained on it."""
        self._num_released += 1

    def take(self, count: int, *, oldest: int) -> None:
        """Record that `count` groups were taken into a batch.

        All groups that remain in the queue are at position `oldest` or newer.
        """
        self._num_taken += count
        for deadline in [each for each, newest in self._newest.items() if newest < oldest]:
            del self._newest[deadline], self._unfinished[deadline]

    def allow(self, count: int, finished: Sequence[tuple[int, Group]]) -> bool:
        """Return True if the first `count` of the finished groups may be taken into the batch now.

        `finished` has groups with their positions, oldest first. They may be taken if all other
        groups then fit into the batches up to their deadlines: for each deadline, at most as many
        groups have this deadline or an earlier one as these batches have places.
        """
        num_taken = self._num_taken + count
        left = 0
        for deadline, newest in self._newest.items():
            left += self._unfinished[deadline]
            num_finished = bisect_left(finished, newest + 1, key=itemgetter(0))
            places = self.groups_per_step * (deadline + 1) - num_taken
            if left + max(0, num_finished - count) > places:
                return False
        return True
