"""Records of the trainer: the rules of the loss, and a batch divided into optimizer steps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from unstale.algorithms.corrections import Control, NonFinite
from unstale.algorithms.objectives import Surrogate
from unstale.records import Batch

NOT_FINITE = (FloatingPointError, NonFinite)
"""Errors for a loss, gradient or log-probability that is not finite.

Raised before the optimizer step.
"""

Correction = Callable[[Tensor, Batch], Control]
"""`(old_logp [T], batch)` -> weight and mask of each token, from the discrepancy D."""

Audit = Callable[[Batch, Tensor], Mapping[str, float]]
"""`(batch, old_logp [T])` -> metrics of the route's error.

`old_logp` is empty for an inline route.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The loss: a surrogate per token, its denominator, and two optional terms."""

    surrogate: Callable[[Tensor, Tensor, Batch], Surrogate]
    """`(logp [T], old_logp [T], batch)` -> loss per token, and where it is clipped."""
    norm: Callable[[Tensor, Tensor, Tensor], Tensor]
    """`(sampled, keep, sequence)`, each `[T]`, to the factor `[T]` of each token's loss."""
    kl_coef: float = 0.0
    """Coefficient of the KL to the reference, the policy at the run's start."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus."""
    idle_at_zero: bool = False
    """True if a token with advantage 0 contributes no gradient.

    The trainer then skips the passes over sequences in which every advantage is 0.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The functions that turn log-probabilities into a loss."""

    correction: Correction
    objective: Objective
    temperature: float
    """The sampling temperature. The trainer's log-probabilities use it too."""
    audit: Audit = lambda batch, old_logp: {}
    """Called before the first optimizer step on a batch."""


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The sequences of one optimizer step. Every tensor is `[T]` on the CPU, without gradient."""

    batch: Batch
    old_logp: Tensor
    """Empty for an inline route, which is asked in every forward pass."""
    factor: Tensor
    """Correction weight, 0 for a dropped token. Ones for an inline route."""
    norm: Tensor
    """One over the denominator of the step's loss, for each token, before dropping."""
    reference_logp: Tensor
    """Log-probability under the reference policy. Empty without a KL term."""
    lag: Tensor
    """Staleness in batches, -1 on tokens that were not sampled."""


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch divided into its optimizer steps."""

    minibatches: tuple[Minibatch, ...]


@dataclass(frozen=True, slots=True)
class FailedBatch:
    """The data in work when a number was not finite, to be saved for `unstale replay`."""

    stage: Literal["old_logps", "step"]
    """`old_logps`: the route's values for a batch.

    `step`: loss and gradient of one optimizer step.
    """
    minibatch: Minibatch
