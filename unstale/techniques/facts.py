"""Figures of the environment that techniques need."""

from __future__ import annotations

from collections.abc import Sequence

from unstale.config.checks import ConfigError
from unstale.records import Group


class Seen:
    """A memory of whether a batch of the run has had some property.

    It is not part of a checkpoint. So a process that continues a run assumes that an earlier batch
    had the property.
    """

    def __init__(self) -> None:
        self._seen: bool | None = None

    def update(self, now: bool, *, progress: float) -> bool:
        """Return True if this batch has the property, or an earlier one had it.

        `progress` is the share of the run's steps that are done, as in `CreditContext`.
        """
        before = progress > 0 if self._seen is None else self._seen
        self._seen = before or now
        return self._seen


class RequiredFact:
    """A fact that the environment must report of successes."""

    def __init__(self, name: str, *, option: str) -> None:
        """Create the check of a run. `option` is the option that holds the name of the fact."""
        self._name = name
        self._option = option
        self._seen = Seen()

    def require(self, groups: Sequence[Group], *, progress: float) -> None:
        """Raise `ConfigError` if a batch has successes, and no success so far had the fact.

        Later batches may lack it. `progress` is the share of the run's steps that are done.
        """
        successes = [item for group in groups for item in group.trajectories if item.success]
        has_fact = any(self._name in item.facts for item in successes)
        if self._seen.update(has_fact, progress=progress) or not successes:
            return
        names = sorted({name for item in successes for name in item.facts})
        raise ConfigError(
            f"{self._option} is {self._name!r}, but the environment reports no such fact; it "
            f"reports {', '.join(names) or 'none'}. Set {self._option} to one of them, or choose "
            "other techniques"
        )
