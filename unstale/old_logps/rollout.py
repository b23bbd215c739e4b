"""`rollout`: no correction. The engine's own log-probability stands for the old logit, so D is 1 and S is pi / mu."""

import torch
from torch import Tensor

from unstale.old_logps import Needs, Passive
from unstale.records import Batch


class Rollout(Passive):
    """`prox = behavior_logp` (algorithm.md, section 3): the discrepancy lands in S, and the clip punishes numerics."""

    needs = Needs()

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        return batch.behavior_logp, torch.zeros_like(batch.sampled)
