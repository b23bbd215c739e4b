"""Figures of the environment that techniques need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from unstale.config.checks import ConfigError
from unstale.records import Group

if TYPE_CHECKING:
    from unstale.techniques.hooks import CreditContext

CONTINUED_BATCHES = 8
"""Batches for which a process that continues a run assumes that an earlier one had a property."""


class Seen:
    """A memory of whether a batch of the run has had some property.

    It is not part of a checkpoint. So a process that continues a run assumes for
    `CONTINUED_BATCHES` batches that an earlier one had the property.
    """

    def __init__(self) -> None:
        self._seen = False
        self._num_assumed: int | None = None
        """Number of batches for which it may still be assumed. None before the first batch."""

    def update(self, now: bool, *, counts: bool, progress: float) -> bool:
        """Return True if this batch has the property, or an earlier one has or may have had it.

        `counts` is False for a batch that cannot have the property. `progress` is the share of the
        run's steps that are done, as in `CreditContext`.
        """
        if self._num_assumed is None:
            self._num_assumed = CONTINUED_BATCHES if progress > 0 else 0
        self._seen = self._seen or now
        if self._seen or not counts:
            return self._seen
        self._num_assumed -= 1
        return self._num_assumed >= 0


class RequiredFact:
    """A fact that the environment must report of successes."""

    def __init__(self, name: str, *, option: str) -> None:
        """Create the check of a run. `option` is the option that holds the name of the fact."""
        self._name = name
        self._option = option
        self._seen = Seen()

    def require(self, groups: Sequence[Group], context: CreditContext) -> None:
        """Raise `ConfigError` if a whole batch has successes, and no success so far had the fact.

        Later batches may lack it.
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
