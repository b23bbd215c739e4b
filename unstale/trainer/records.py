"""Records."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from unstale.algorithms.corrections import Control, NonFinite
from unstale.algorithms.objectives import Surrogate
from unstale.records import Batch

NOT_FINITE = (FloatingPointError, NonFinite)
"""What is raised, before the optimizer step, when a loss, a gradient or a log-probability is not finite."""

Correction = Callable[[Tensor, Batch], Control]
"""`(old_logp [T], batch)` -> what the discrepancy control says of each token."""

Audit = Callable[[Batch, Tensor], Mapping[str, float]]
"""`(batch, old_logp [T])` -> figures of how wrong the route is; `old_logp` is empty if the route answers inline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The loss: `surrogate` per token, what it is divided by, and the two terms beside it."""

    surrogate: Callable[[Tensor, Tensor, Batch], Surrogate]
    """`(logp [T], old_logp [T], batch)`."""
    norm: Callable[[Tensor, Tensor, Tensor], Tensor]
    """`(sampled [T], keep [T], sequence [T])` -> what each token's loss is multiplied by."""
    kl_coef: float = 0.0
    """Coefficient of the KL to the policy that the run began with."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus."""
    idle_at_zero: bool = False
    """A token whose advantage is 0 has no gradient. Then sequences of such tokens alone are not run at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """From three log-probabilities to a loss: what `build` made of the configuration."""

    correction: Correction
    objective: Objective
    temperature: float
    """The sampling temperature: it is part of mu, so it is part of pi."""
    audit: Audit = lambda batch, old_logp: {}
    """Called before the first optimizer step on a batch."""


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The sequences of one optimizer step; every tensor is `[T]` and needs no gradient."""

    batch: Batch
    old_logp: Tensor
    """Empty if the route answers inline: it is then asked with each pass's own log-probabilities."""
    factor: Tensor
    """Correction weight, 0 where dropped; ones while that is not known."""
    norm: Tensor
    """Shares of the step's one denominator, before masking."""
    reference_logp: Tensor
    """Of the policy that the run began with; empty unless the objective has a reference KL."""
    lag: Tensor


@dataclass(frozen=True, slots=True)
class FailedBatch:
    """What the trainer is at work on, to be kept beside the error if a number goes wrong."""

    stage: Literal["old_logps", "step"]
    """`old_logps`: the route's answers for a batch. `step`: the loss and the gradient of one optimizer step."""
    part: Minibatch


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch cut into its optimizer steps."""

    parts: tuple[Minibatch, ...]
