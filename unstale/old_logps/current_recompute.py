"""`current_recompute`: the trainer's forward pass at the start of the step stands for the old logit."""

from collections.abc import Collection

import torch
from torch import Tensor

from unstale.model.policy import Policy
from unstale.old_logps import Needs, Passive, has_clean_behavior
from unstale.records import Batch


class CurrentRecompute(Passive):
    """`prox = log pi_now` (algorithm.md, section 3): staleness lands in D, and S sees this step's own movement only.

    A token of the version that the policy still is gets its true old logit, and is counted as exact.
    """

    needs = Needs(now=True)

    def __init__(self) -> None:
        self._policy: Policy | None = None

    def published(self, policy: Policy, live: Collection[int]) -> None:
        self._policy = policy

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        if now.shape != batch.sampled.shape:
            raise ValueError(
                f"current_recompute needs `now` for {len(batch.sampled)} tokens, got {tuple(now.shape)}"
            )
        exact = torch.zeros_like(batch.sampled)
        if self._policy is not None and self._policy.at_version:
            exact = has_clean_behavior(batch) & (batch.version == self._policy.version)
        return torch.where(batch.sampled, now, 0.0), exact
