"""Figures of the environment that techniques need."""

from __future__ import annotations

from collections.abc import Sequence

from unstale.config.checks import ConfigError
from unstale.records import Group


def require_fact(groups: Sequence[Group], name: str, *, option: str) -> None:
    """Raise `ConfigError` if a batch has successes, and none of them has the fact `name`.

    `option` is the option with the name of the fact.
    """
    successes = [item for group in groups for item in group.trajectories if item.success]
    if successes and not any(name in item.facts for item in successes):
        names = sorted({name for item in successes for name in item.facts})
        raise ConfigError(
            f"{option} is {name!r}, but the environment reports no such fact; it reports "
            f"{', '.join(names) or 'none'}. Set {option} to one of them, or choose other techniques"
        )
