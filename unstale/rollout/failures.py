"""The limit on the share of failed episodes.

Failures are counted by group, because the episodes of a broken task fail together.
"""

from collections.abc import Iterable, Sequence

from unstale.records import Failure, Trajectory

WINDOW = 100
"""Smallest number of groups over which the share of failed episodes is measured."""
MINIMUM = 20
"""Smallest number of ended groups after which failures can stop the run."""


class TooManyFailures(RuntimeError):
    """Error: a larger share of episodes failed than `rollout.max_failed_share` allows."""


class FailureLimit:
    """The share of failed episodes in the last groups, and the limit of this share.

    Episodes that fail often end earlier than others, so the groups that end first have more
    failures. To avoid this bias, the share is taken over groups in the order of their start: when n
    groups have ended, over the first n groups that began. Groups among these that still run count
    as groups without failures.
    """

    def __init__(self, max_share: float) -> None:
        self._max_share = max_share
        self._num_begun = 0
        self._running: set[int] = set()
        self._window = WINDOW
        """Number of groups over which the share is taken: `WINDOW`, or as many as ran at the same
        time if that is more.
        """
        self._first = 0
        """The number of the first group over which the share of failed episodes is taken."""
        self._shares: dict[int, float] = {}
        """The share of failed episodes of each ended group, by the group's number. Groups before
        `_first` are removed.
        """

    def restore(self, shares: Iterable[float]) -> None:
        """Restore the shares of failed episodes of earlier groups, in the order of their start."""
        for share in shares:
            self._shares[self._num_begun] = share
            self._num_begun += 1

    def begin(self) -> int:
        """Count a group that begins, and return its number."""
        number = self._num_begun
        self._num_begun += 1
        self._running.add(number)
        self._window = max(self._window, len(self._running))
        return number

    def end(self, group: int) -> None:
        """Record that the group with this number no longer runs.

        Called for cancelled groups, too.
        """
        self._running.discard(group)

    def count(self, group: int, outcomes: Sequence[Trajectory | Failure]) -> None:
        """Record the outcomes of the episodes of a group that has ended.

        Raises `TooManyFailures` if the share of failed episodes is too large.
        """
        failures = [each for each in outcomes if isinstance(each, Failure)]
        if group >= self._first:
            self._shares[group] = len(failures) / len(outcomes)
        self.end(group)
        ended = self._num_begun - len(self._running)
        while self._first < ended - self._window:
            self._shares.pop(self._first, None)
            self._first += 1
        num_groups = ended - self._first
        if not failures or num_groups < MINIMUM:
            return
        failed = sum(self._shares.get(number, 0.0) for number in range(self._first, ended))
        if failed > self._max_share * num_groups + 1e-9:
            last = failures[-1]
            raise TooManyFailures(
                f"{failed / num_groups:.1%} of the episodes of {num_groups} groups failed, more "
                f"than rollout.max_failed_share = {self._max_share:g} allows; "
                f"the last one in {last.stage} of {last.task.key}: {last.error}"
            )
