"""`rollout`: no correction. The engine's own log-probability stands for the old logit, so D is 1 and S is pi / mu."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from afterimage.old_logps import Needs
from afterimage.policy import Policy
from afterimage.trajectory import Batch, Open


class Rollout:
    """`prox = behavior_logp` (algorithm.md, section 3): the discrepancy lands in S, and the clip punishes numerics."""

    needs = Needs()

    def published(self, policy: Policy, live: Collection[int]) -> None:
        """Keeps nothing."""

    def arrived(self, piece: Open) -> None:
        """Keeps nothing."""

    def closing(self, policy: Policy, unscored: Sequence[Open]) -> None:
        """Scores nothing."""

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        return batch.behavior_logp, torch.zeros_like(batch.sampled)

    def costs(self) -> Mapping[str, float]:
        return {}

    def state(self) -> Mapping[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing to take back."""
