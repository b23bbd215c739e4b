"""The limit on the share of failed episodes.

Failures are counted by group, because the episodes of a broken task fail together.
"""

from collections.abc import Iterable, Sequence

from unstale.records import Failure, Trajectory

WINDOW = 100
"""Number of groups from which the share of failed episodes is computed, unless more run at once."""
MINIMUM = 20
"""Number of groups that must have ended before failed episodes can stop the run."""


class TooManyFailures(RuntimeError):
    """Error: too many episodes failed, for example more than `rollout.max_failed_share` allows."""


class FailureLimit:
    """The share of failed episodes in the last groups, with the limit at which the run stops.

    Failing episodes often end early, so the groups that end first contain more failures than
    others. To avoid this bias, groups are counted in the order of their start. When n groups have
    ended, the share is that of the first n groups in this order, or of the last `WINDOW` of these.
    A group among them that still runs counts as one without failures.
    """

    def __init__(self, max_share: float) -> None:
        self._max_share = max_share
        self._num_begun = 0
        self._running: set[int] = set()
        self._window = WINDOW
        """Number of groups from which the share of failed episodes is computed: `WINDOW`, or the
        largest number of groups that ran at the same time if that is more.
        """
        self._first = 0
        """Number of the oldest group from which the share of failed episodes is computed."""
        self._shares: dict[int, float] = {}
        """Number of an ended group, from `_first` on -> share of its episodes that failed."""

    def restore(self, shares: Iterable[float]) -> None:
        """Restore the shares of failed episodes of groups before a resume, in the order of their
        start.
        """
        for share in shares:
            self._shares[self._num_begun] = share
            self._num_begun += 1

    def begin(self) -> int:
        """Return the number of a new group, and count the group as running."""
        number = self._num_begun
        self._num_begun += 1
        self._running.add(number)
        self._window = max(self._window, len(self._running))
        return number

    def end(self, group: int) -> None:
        """Record that a group no longer runs, because it has ended or was cancelled."""
        self._running.discard(group)

    def count(self, group: int, outcomes: Sequence[Trajectory | Failure]) -> None:
        """Record the outcomes of the episodes of a group that has ended.

        Raises `TooManyFailures` if the share of failed episodes in the last groups exceeds the
        limit.
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
