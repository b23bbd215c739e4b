"""Deadlines of groups, by which the staleness queue decides which groups to take out of turn.

Batches are numbered from 0. A group that is admitted when `n` batches are released has the deadline
`n + bound`: no later batch may contain it. docs/staleness.md has the derivation.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from unstale.records import Group


@dataclass(slots=True)
class Deadlines:
    """The deadlines of the groups that were admitted and not taken yet.

    A group's deadline is never earlier than the deadline of an older group.
    """

    bound: int
    groups_per_step: int
    _num_taken: int = 0
    _num_released: int = 0
    """Number of batches after which all engines have loaded the new weights."""
    _unfinished: Counter[int] = field(default_factory=Counter)
    """Number of unfinished groups by deadline."""
    _newest: dict[int, int] = field(default_factory=dict)
    """The newest position with each deadline, in the order of deadlines."""
    _own: dict[int, int] = field(default_factory=dict)
    """The deadline of each unfinished group, by position."""

    @property
    def num_unfinished(self) -> int:
        return len(self._own)

    def admit(self, position: int, *, at_most: int | None = None) -> None:
        """Set the deadline of a group: at most `at_most` if it has tokens from before a resume."""
        deadline = self._num_released + self.bound
        if at_most is not None:
            deadline = min(deadline, at_most)
        self._own[position] = deadline
        self._newest[deadline] = position
        self._unfinished[deadline] += 1

    def finish(self, position: int) -> None:
        self._unfinished[self._own.pop(position)] -= 1

    def release(self) -> None:
        """Count a batch after which all engines have loaded the new weights."""
        self._num_released += 1

    def take(self, count: int, *, oldest: int) -> None:
        """Count groups that were taken. All remaining groups are at position `oldest` or newer."""
        self._num_taken += count
        for deadline in [each for each, newest in self._newest.items() if newest < oldest]:
            del self._newest[deadline], self._unfinished[deadline]

    def allow(self, count: int, finished: Sequence[tuple[int, Group]]) -> bool:
        """Return True if the first `count` of the finished groups may be taken.

        Then all other groups fit into the batches up to their deadlines: for each deadline, there
        are at most as many groups with this deadline or an earlier one as places in these batches.
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
