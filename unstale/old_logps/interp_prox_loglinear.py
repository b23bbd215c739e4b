"""`interp_prox_loglinear`: between mu and pi on a logarithmic scale. Free, and tells nothing apart."""

import torch
from torch import Tensor

from unstale.algorithms import proximal
from unstale.old_logps import Needs, Passive
from unstale.old_logps.scoring.scorer import Scorer
from unstale.records import Batch


class InterpProxLoglinear(Passive):
    """`prox = log mu + alpha (log pi - log mu)` (arXiv 2512.06547), formed anew in every training pass. Never exact.

    `alpha` None follows the lag, (d - 1) / d, and is `fresh` at lag 0.
    """

    needs = Needs(inline=True)
    _between = staticmethod(proximal.loglinear)

    def __init__(self, scorer: Scorer, *, alpha: float | None = None, fresh: float = 1.0) -> None:
        self._scorer = scorer
        self._alpha = alpha
        self._fresh = fresh

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        if now.shape != batch.sampled.shape:
            raise ValueError(
                f"an interpolated proxy needs `now` for {len(batch.sampled)} tokens, got {len(now)}"
            )
        lag = self._scorer.lag(batch.version)
        alpha = (
            proximal.weight_of_now(lag, fresh=self._fresh) if self._alpha is None else self._alpha
        )
        values = self._between(batch.behavior_logp, now, alpha, sampled=batch.sampled)
        return values, torch.zeros_like(batch.sampled)
