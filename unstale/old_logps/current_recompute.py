"""`current_recompute`: the trainer's forward pass at the start of the step is the old log-prob."""

import torch
from torch import Tensor

from unstale.old_logps import Needs, Passive, has_clean_behavior
from unstale.old_logps.scoring.scorer import Scorer
from unstale.records import Batch


class CurrentRecompute(Passive):
    """Set `prox = log pi_now` (algorithm.md, section 3): staleness is part of D, and S only sees this step.

    Tokens of the current version get their true old log-probability and are counted as exact.
    """

    needs = Needs(now=True)

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        if now.shape != batch.sampled.shape:
            raise ValueError(
                f"current_recompute needs `now` for {len(batch.sampled)} tokens, got {tuple(now.shape)}"
            )
        exact = torch.zeros_like(batch.sampled)
        if self._scorer.at_version:
            exact = has_clean_behavior(batch) & (batch.version == self._scorer.version)
        return torch.where(batch.sampled, now, 0.0), exact
