"""Records of the trainer: the data of one optimizer step, and of a step that failed."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from unstale.algorithms.corrections import NonFinite
from unstale.records import Batch
from unstale.trainer.bitwise import NotBitwise
from unstale.trainer.critic import Forecasts

NOT_FINITE = (FloatingPointError, NonFinite, NotBitwise)
"""Errors raised before an optimizer step: a loss, gradient or log-probability is not finite, or a
log-probability differs from the engine's with `engine.bitwise`.
"""


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The sequences of one optimizer step, with all inputs of their loss.

    Tensors have one value for each of T tokens. They are on the CPU, without gradient.
    """

    batch: Batch
    old_logp: Tensor
    """Old log-probability of each token. Empty if it is computed in every training pass."""
    factor: Tensor
    """Weight of each token that corrects the discrepancy between trainer and engine. 0 for a
    dropped token. All 1 if the old log-probability is computed in every training pass.
    """
    norm: Tensor
    """Factor on each token's loss: 1 / the divisor of the loss."""
    reference_logp: Tensor
    """Log-probability of each token under the reference policy. Empty if the loss has no KL
    term.
    """
    lag: Tensor
    """Lag of each token in batches. -1 for tokens that the policy did not sample."""
    teacher_logp: Tensor = field(default_factory=lambda: torch.empty(0))
    """Log-probability of each token under its sequence's teacher. Empty without a teacher, and if
    the loss needs the teacher's whole distribution.
    """
    forecasts: Forecasts | None = None
    """The critic's forecasts of rewards. None without a critic."""


@dataclass(frozen=True, slots=True)
class FailedBatch:
    """The batch of a step in which a loss, gradient or log-probability was not finite.

    It is saved for `unstale replay`.
    """

    stage: Literal["old_logps", "step"]
    """The computation that failed: `old_logps` (of old log-probabilities) or `step` (of the
    gradient).
    """
    minibatch: Minibatch
    divisor: int = 1
    """With `trainer.stream`, the divisor of the loss, which the minibatch's `norm` does not
    include. Otherwise 1.
    """
