"""The limit on failed episodes.

It looks at groups, because the episodes of a broken task fail together.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from unstale.records import Failure, Trajectory

WINDOW = 100
"""Number of last groups over which the share of failed episodes is measured."""
MINIMUM = 20
"""Number of ended groups from which on the share may end the run."""


class TooManyFailures(RuntimeError):
    """Error: a larger share of episodes failed than `rollout.max_failed_share` allows."""


class FailureLimit:
    """The share of failed episodes in the last groups that ended, and its limit.

    At first, failures are among the groups that end early. So as long as more groups run than have
    ended, those in excess count as groups without failures.
    """

    def __init__(self, max_share: float) -> None:
        self._max_share = max_share
        self._shares: deque[float] = deque(maxlen=WINDOW)
        """The share of failed episodes of each of the last groups, oldest first."""
        self._num_ended = 0
        self._num_running = 0

    def restore(self, shares: Iterable[float]) -> None:
        """Restore the failed shares of earlier groups, oldest first."""
        for share in shares:
            self._shares.append(share)
            self._num_ended += 1

    def begin(self) -> None:
        """Note that a group begins."""
        self._num_running += 1

    def end(self) -> None:
        """Note that a group has ended, or was cancelled."""
        self._num_running -= 1

    def count(self, outcomes: Sequence[Trajectory | Failure]) -> None:
        """Count the outcomes of a group that has begun, before `end`.

        Raises `TooManyFailures` if the share of failed episodes is too large.
        """
        failures = [each for each in outcomes if isinstance(each, Failure)]
        self._shares.append(len(failures) / len(outcomes))
        self._num_ended += 1
        others = self._num_running - 1
        number = len(self._shares) + max(0, others - self._num_ended)
        share = sum(self._shares) / number
        if failures and self._num_ended >= MINIMUM and share > self._max_share + 1e-9:
            last = failures[-1]
            raise TooManyFailures(
                f"{share:.1%} of the episodes of the last {number} groups failed, more than "
                f"rollout.max_failed_share = {self._max_share:g} allows; "
                f"the last one in {last.stage} of {last.task.key}: {last.error}"
            )
