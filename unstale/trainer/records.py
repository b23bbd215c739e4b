"""Records of the trainer: the data of one optimizer step."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from unstale.algorithms.corrections import NonFinite
from unstale.records import Batch

NOT_FINITE = (FloatingPointError, NonFinite)
"""Errors for a loss, gradient or log-probability that is not finite, before the step is taken."""


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The sequences of one optimizer step. Every tensor is `[T]` on the CPU, without gradient."""

    batch: Batch
    old_logp: Tensor
    """Empty for an inline route, which computes it anew in every training pass."""
    factor: Tensor
    """Correction weight, 0 for a dropped token. Ones for an inline route."""
    norm: Tensor
    """One over the denominator of the loss, for each token."""
    reference_logp: Tensor
    """Log-probability under the reference policy. Empty without a KL term."""
    lag: Tensor
    """Staleness in batches, -1 on tokens that were not sampled."""


@dataclass(frozen=True, slots=True)
class FailedBatch:
    """The data for which a number was not finite, saved for `unstale replay`."""

    stage: Literal["old_logps", "step"]
    """The computation that failed: the route's values for a batch, or the gradient of a step."""
    minibatch: Minibatch
