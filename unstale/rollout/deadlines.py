"""Deadlines of groups, so that finished groups may be taken before older unfinished ones.

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
    """The deadlines of the groups in the staleness queue that no batch has taken yet.

    A deadline is the number of the last batch that may contain the group. It is never earlier than
    the deadline of an older group.
    """

    bound: int
    groups_per_step: int
    _num_taken: int = 0
    _num_released: int = 0
    """Number of released batches: all engines have loaded the weights trained on them."""
    _unfinished: Counter[int] = field(default_factory=Counter)
    """For each deadline, the number of its groups that are unfinished."""
    _newest: dict[int, int] = field(default_factory=dict)
    """For each deadline, in ascending order, the position in the queue of its newest group."""
    _own: dict[int, int] = field(default_factory=dict)
    """The deadline of each unfinished group, by the group's position in the queue."""

    @property
    def num_unfinished(self) -> int:
        return len(self._own)

    def admit(self, position: int, *, at_most: int | None = None) -> None:
        """Set the deadline of the new group at a position in the queue.

        `at_most` is an upper limit of the deadline. It is given if this group, or a newer one, has
        tokens that were sampled before a resume.
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
        """Count one more batch as released: all engines have loaded the weights trained on it."""
        self._num_released += 1

    def take(self, count: int, *, oldest: int) -> None:
        """Record that `count` groups were taken into a batch.

        `oldest` is the position in the queue of the oldest group that remains.
        """
        self._num_taken += count
        for deadline in [each for each, newest in self._newest.items() if newest < oldest]:
            del self._newest[deadline], self._unfinished[deadline]

    def allow(self, count: int, finished: Sequence[tuple[int, Group]]) -> bool:
        """Return True if the first `count` of the finished groups may be taken into the next batch.

        `finished` has (position in the queue, group), oldest first. Taking them is allowed if every
        other group can still be trained on in time: for each deadline, the batches up to it have
        enough places for all groups with this deadline or an earlier one.
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
