"""Public fakes, and tests for engines, environments and routes (`OldLogps`) that a user adds.

A route is a method to compute old log-probabilities.
"""

from unstale.testing.engines import check_engine
from unstale.testing.envs import NOISE, check_env
from unstale.testing.models import (
    checkpoint_round_trip,
    episode,
    nudge,
    plain_logps,
    tiny_policy,
    with_kept_sets,
)
from unstale.testing.old_logps import check_old_logps
from unstale.testing.tabulate import tabulate

__all__ = [
    "NOISE",
    "check_engine",
    "check_env",
    "check_old_logps",
    "checkpoint_round_trip",
    "episode",
    "nudge",
    "plain_logps",
    "tabulate",
    "tiny_policy",
    "with_kept_sets",
]
