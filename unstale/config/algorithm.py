"""Options of the algorithm: advantages, the audit and corrections."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

from unstale.config.checks import (
    OneOf,
    Range,
    Section,
    Share,
)
from unstale.config.declared import choices

Estimator = Annotated[str, OneOf(partial(choices, "advantages", "estimator"))]
CorrectionMode = Annotated[str, OneOf(partial(choices, "corrections", "mode"))]

Unit = Literal["token", "turn", "segment", "sequence"]
Aggregate = Literal["mean", "sum", "max"]
LossAggregation = Literal["action_tokens", "kept", "sequence_mean", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConfig(Section):
    """The advantage estimator, which turns the rewards of a task's episodes into advantages."""

    selector: ClassVar[str] = "estimator"
    refused_unread: ClassVar = ("discount", "group_baseline")

    estimator: Estimator = "grpo"
    """The function that computes advantages from the rewards of a task's episodes."""
    discount: Share = 1.0
    """Only for `turn_level`: discount factor on the rewards of later turns, per turn."""
    group_baseline: bool = True
    """Only for `reinforce_batch`: first subtract the mean reward of each group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig(Section):
    """The audit, which measures the error of old log-probabilities with copies of past weights."""

    share: Share = 0.0
    """Share of sequences that are scored again with the weights that sampled them; 0 measures
    nothing and keeps no copies of past weights.
    """
    record: bool = False
    """Keep every version of the weights and every batch in the run folder, for `unstale audit`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionConfig(Section):
    """The correction for the discrepancy D = pi_old / mu between trainer and engine.

    D is the trainer's probability of a token, divided by that of the engine which sampled it.
    """

    selector: ClassVar[str] = "mode"
    refused_unread: ClassVar = ("low", "high", "normalize")

    mode: CorrectionMode = "mask_weight"
    """Use of the discrepancy D: weight the loss of a token by D, drop tokens whose D is outside
    limits, or both; `none` ignores D.
    """
    low: Share = 0.5
    """Only for `mask`, `clamp` and `mask_weight`: lower limit of the discrepancy D.
    `correction.mode` decides what happens to tokens below this limit.
    """
    high: Annotated[float, Range(1)] = 2.0
    """Not for `none`: upper limit of the discrepancy D. `correction.mode` decides what happens to
    tokens above this limit.
    """
    normalize: bool = False
    """Divide the correction's token weights by their mean over the tokens of the batch that the
    correction kept.
    """
    unit: Unit = "token"
    """The tokens over which the discrepancy is aggregated: one token, a turn, a segment (tokens
    sampled by one version of the weights), or a sequence.
    """
    aggregate: Aggregate = "mean"
    """Aggregate of the discrepancies of a unit's tokens: `mean` is their geometric mean, `sum`
    their product, `max` the one farthest from 1.
    """
    token_veto_threshold: Share = 0.0
    """Drop a whole sequence if the discrepancy D of any of its tokens is below this value; 0 drops
    none.
    """
