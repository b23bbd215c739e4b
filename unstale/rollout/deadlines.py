"""Deadlines of groups, so that finished groups may be trained on before older unfinished ones.

A group is several episodes of one task. Batches are numbered from 0. A batch is released when all
engines have loaded the weights that were trained on it. If `n` batches were released before a group
entered the queue, its deadline is `n` + the staleness bound. The deadline is the number of the last
batch that may contain the group. docs/staleness.md has the rule by which batches are taken.

Why no token is older than the bound: let `B` be the bound, `G` the number of groups in a batch, `t`
the number of groups taken so far. Invariant: before batch `n` is taken, for every `d >= n - 1`, at
most `G (d + 1) - t` groups are not taken and have a deadline of `d` or earlier.

It holds. A batch is taken only if the invariant holds afterwards, or in strict order. Deadlines
never decrease with the position, so strict order takes the earliest ones first. If all `G` groups
of the batch have a deadline of `d` or earlier, both sides become smaller by `G`. Otherwise no such
group is left. A group that is admitted when `v` batches are released has the latest deadline,
`v + B`. There are at most `(B + 1) G` tickets. They are held by the groups that are not taken, and
by the `t - v G` that are taken and not released. So with the new group, at most
`(B + 1) G - (t - v G) = G (v + B + 1) - t` groups are not taken, as the invariant asks for
`d = v + B`.

It suffices. Before batch `n` is taken, `t = n G`. For `d = n - 1` there is no place left, so no
group has a deadline before `n`. The first token of a group in batch `n` has version `n - B` or a
newer one. The queue cannot stop, because groups end and the oldest ones can be taken.
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

    A deadline is the number of the last batch that may contain a group. A newer group never has an
    earlier deadline than an older one.
    """

    bound: int
    groups_per_step: int
    _num_taken: int = 0
    _num_released: int = 0
    """Number of batches whose trained weights all engines have loaded."""
    _unfinished: Counter[int] = field(default_factory=Counter)
    """Deadline (number of a batch) -> number of unfinished groups that have it."""
    _newest: dict[int, int] = field(default_factory=dict)
    """Deadline (number of a batch), ascending -> position in the queue of the newest group that has
    it.
    """
    _own: dict[int, int] = field(default_factory=dict)
    """Position of an unfinished group in the queue -> its deadline, the number of a batch."""

    @property
    def num_unfinished(self) -> int:
        return len(self._own)

    def admit(self, position: int, *, at_most: int | None = None) -> None:
        """Set the deadline of the new group at this position in the queue.

        `at_most` is an upper limit of the deadline, for a group that is readmitted after a resume
        and may have old tokens. None sets no limit.
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
        """Count one more released batch: all engines have loaded the weights trained on it."""
        self._num_released += 1

    def take(self, count: int, *, oldest: int) -> None:
        """Record that a batch has taken the `count` oldest finished groups.

        `oldest` is the position of the oldest group that is still in the queue.
        """
        self._num_taken += count
        for deadline in [each for each, newest in self._newest.items() if newest < oldest]:
            del self._newest[deadline], self._unfinished[deadline]

    def allow(self, count: int, finished: Sequence[tuple[int, Group]]) -> bool:
        """Return True if the next batch may take the first `count` of the finished groups.

        `finished` has pairs (position in the queue, group), oldest first. The batch may take them
        if every other group can still meet its deadline. So for each deadline d, the batches up to
        number d must have enough places for all groups whose deadline is d or earlier.
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
