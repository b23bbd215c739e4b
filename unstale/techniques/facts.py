"""Figures of the environment that techniques need."""

from __future__ import annotations

from collections.abc import Sequence

from unstale.config.checks import ConfigError
from unstale.records import Group


class RequiredFact:
    """A fact that the environment must report of successes."""

    def __init__(self, name: str, *, option: str) -> None:
        """Create the check of a run that has seen nothing. `option` is that with the name."""
        self._name = name
        self._option = option
        self._seen = False

    def require(self, groups: Sequence[Group]) -> None:
        """Raise `ConfigError` if a batch has successes, and no success so far had the fact.

        Later batches may lack it. A resumed run begins anew.
        """
        successes = [item for group in groups for item in group.trajectories if item.success]
        self._seen = self._seen or any(self._name in item.facts for item in successes)
        if self._seen or not successes:
            return
        names = sorted({name for item in successes for name in item.facts})
        raise ConfigError(
            f"{self._option} is {self._name!r}, but the environment reports no such fact; it "
            f"reports {', '.join(names) or 'none'}. Set {self._option} to one of them, or choose "
            "other techniques"
        )
