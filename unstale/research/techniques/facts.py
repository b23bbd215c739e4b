"""Facts (numbers) that the environment reports about episodes, for techniques that need them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from unstale.config.checks import ConfigError
from unstale.records import Group

if TYPE_CHECKING:
    from unstale.techniques.hooks import CreditContext

CONTINUED_BATCHES = 8
"""Number of batches after a resume in which `Seen` assumes that the property was seen before."""


class Seen:
    """A record of whether any batch of the run has had some property.

    The record is not part of a checkpoint. So in a resumed run, the first `CONTINUED_BATCHES`
    batches assume that an earlier batch had the property.
    """

    def __init__(self) -> None:
        self._seen = False
        self._num_assumed: int | None = None
        """Number of further batches for which the property is assumed. None before the first
        batch.
        """

    def update(self, now: bool, *, counts: bool, progress: float) -> bool:
        """Record a batch, with `now` True if it has the property. Return True if this batch has the
        property, or if an earlier batch had it or may have had it.

        `counts` is False for a batch that cannot have the property. `progress` is the share of the
        run's steps that are done. It is above 0 in the first batch of a resumed run.
        """
        if self._num_assumed is None:
            self._num_assumed = CONTINUED_BATCHES if progress > 0 else 0
        self._seen = self._seen or now
        if self._seen or not counts:
            return self._seen
        self._num_assumed -= 1
        return self._num_assumed >= 0


class RequiredFact:
    """A check that the environment reports a certain fact about successful episodes."""

    def __init__(self, name: str, *, option: str) -> None:
        """Create a check for the fact (a reported number) `name`, which the user named by
        `option`.
        """
        self._name = name
        self._option = option
        self._seen = Seen()

    def require(self, groups: Sequence[Group], context: CreditContext) -> None:
        """Raise `ConfigError` if a batch has successes, but no success of the run has had the fact.

        After a success with the fact (a reported number), later batches may lack the fact.
        """
        successes = [item for group in groups for item in group.trajectories if item.success]
        has_fact = any(self._name in item.facts for item in successes)
        counts = bool(successes) and context.whole
        if self._seen.update(has_fact, counts=counts, progress=context.progress) or not counts:
            return
        names = sorted({name for item in successes for name in item.facts})
        raise ConfigError(
            f"{self._option} is {self._name!r}, but the environment reports no such fact; it "
            f"reports {', '.join(names) or 'none'}. Set {self._option} to one of them, or choose "
            "other techniques"
        )
