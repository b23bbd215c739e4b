"""The limit on failed episodes.

It looks at groups, because the episodes of a broken task fail together.
"""

from collections.abc import Hashable, Iterable

from unstale.records import Failure

WINDOW = 100
"""Number of latest groups over which the share of failed episodes is measured."""
MINIMUM = 20
"""Number of groups that are assumed to exist at least, so that a few failures end no run."""


class TooManyFailures(RuntimeError):
    """Error: a larger share of episodes failed than `rollout.max_failed_share` allows."""


class FailureLimit:
    """The share of failed episodes among the latest groups, and its limit.

    Each group counts by the share of its episodes that failed for good. A group that runs and has
    no outcome yet counts as one without failures: failures are often faster than successes.
    """

    def __init__(self, max_share: float) -> None:
        self._max_share = max_share
        self._sizes: dict[Hashable, int] = {}
        """Number of episodes of each running group."""
        self._silent: set[Hashable] = set()
        """Running groups without an outcome."""
        self._shares: dict[Hashable, float] = {}
        """Failed share of the latest groups, in the order of their first outcome."""

    def restore(self, shares: Iterable[float]) -> None:
        """Restore the failed shares of earlier groups, oldest first."""
        for share in shares:
            self._set(object(), share)

    def begin(self, group: Hashable, episodes: int) -> None:
        """Note that so many further episodes of a group begin."""
        if group not in self._sizes:
            self._silent.add(group)
        self._sizes[group] = self._sizes.get(group, 0) + episodes

    def end(self, group: Hashable) -> None:
        """Note that all episodes of a group have ended, or were cancelled."""
        self._sizes.pop(group, None)
        self._silent.discard(group)

    def succeeded(self, group: Hashable) -> None:
        """Count an episode of a running group that finished."""
        self._set(group, self._shares.get(group, 0.0))

    def failed(self, group: Hashable, failure: Failure) -> None:
        """Count an episode of a running group that failed for good.

        Raises `TooManyFailures` if the share of failed episodes is too large.
        """
        self._set(group, self._shares.get(group, 0.0) + 1 / self._sizes[group])
        count = max(MINIMUM, min(WINDOW, len(self._shares) + len(self._silent)))
        share = sum(self._shares.values()) / count
        if share > self._max_share + 1e-9:
            groups = f"{count} groups" if count > len(self._shares) else f"last {count} groups"
            raise TooManyFailures(
                f"{share:.1%} of the episodes of the {groups} failed, more than "
                f"rollout.max_failed_share = {self._max_share:g} allows; "
                f"the last one in {failure.stage} of {failure.task.key}: {failure.error}"
            )

    def _set(self, group: Hashable, share: float) -> None:
        self._silent.discard(group)
        self._shares[group] = share
        if len(self._shares) > WINDOW:
            del self._shares[next(iter(self._shares))]
