"""Options of the algorithm: advantages, the audit and corrections."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

from unstale.config.checks import (
    Count,
    NonNegative,
    OneOf,
    Positive,
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
PlacedMode = Literal["mask", "guided", "anchor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConfig(Section):
    """The advantage estimator, which turns the rewards of a task's episodes into advantages."""

    selector: ClassVar[str] = "estimator"
    refused_unread: ClassVar = ("discount", "group_baseline", "lam", "over", "whiten")

    estimator: Estimator = "grpo"
    """The function that computes advantages from the rewards of a task's episodes. `gae` needs no
    groups, because it compares each token with the forecast of a critic (docs/critic.md).
    """
    discount: Share = 1.0
    """Only for `turn_level` and `gae`: discount factor on later rewards, per turn or per action of
    `gae`.
    """
    group_baseline: bool = True
    """Only for `reinforce_batch`: first subtract the mean reward of each group."""
    lam: Share = 1.0
    """Only for `gae`: lambda. 1 compares the rewards of the rest of the episode with one forecast;
    smaller values trust later forecasts instead, with less noise and a bias.
    """
    over: Literal["token", "turn"] = "token"
    """Only for `gae`: the actions that get one forecast and one advantage each."""
    whiten: bool = True
    """Only for `gae`: give the advantages of a batch's tokens the mean 0 and the deviation 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig(Section):
    """The critic, which forecasts rewards for `advantage.estimator = gae`. See docs/critic.md."""

    model: Literal["trunk", "own"] = "trunk"
    """The layers below the critic's head: those of the policy (`trunk`), or a copy of the model
    that only the critic trains (`own`).
    """
    memory: Share = 0.95
    """Factor on the weight of earlier batches in the least squares of the critic's head, at each
    optimizer step.
    """
    own_lr: Positive = 1e-5
    """Only for `model = own`: learning rate of the copy's layers."""
    coef: NonNegative = 0.1
    """Only for `model = trunk`: coefficient of the critic's loss in the gradient of the policy's
    layers. With 0, only the head learns from it.
    """
    lam: Share = 1.0
    """Lambda of the forecasts' targets; 1 is the sum of the episode's later rewards."""
    clip: NonNegative = 0.2
    """Largest change of a forecast, from the start of the batch, that lowers the loss (PPO's value
    clipping); 0 sets no limit. It matters only with several optimizer steps per batch.
    """
    warmup_steps: Count = 0
    """Optimizer steps at the start of the run in which only the critic learns."""

    read_with: ClassVar = {"own_lr": ("model", "= own"), "coef": ("model", "= trunk")}
    refused_unread: ClassVar = ("own_lr", "coef")

    def applies(self, option: str) -> bool:
        return {"own_lr": self.model == "own", "coef": self.model == "trunk"}.get(option, True)


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
    refused_unread: ClassVar = ("low", "high", "kl_limit", "normalize")

    mode: CorrectionMode = "mask_weight"
    """Use of the discrepancy D: weight the loss of a token by D, drop tokens whose D is outside
    limits, or both; `kpop` and `k3_mask` drop tokens by a divergence in nats; `none` ignores D.
    """
    low: Share = 0.5
    """Only for `mask`, `clamp` and `mask_weight`: lower limit of the discrepancy D.
    `correction.mode` decides what happens to tokens below this limit.
    """
    high: Annotated[float, Range(1)] = 2.0
    """Not for `none`, `kpop` and `k3_mask`: upper limit of the discrepancy D. `correction.mode`
    decides what happens to tokens above this limit.
    """
    kl_limit: Positive = 0.1
    """Only for `kpop` and `k3_mask`: a token is dropped if the divergence between pi_old and mu at
    it is above this limit, in nats. It is the larger binary KL of both directions, or D - 1 - log
    D, and is aggregated over the unit, too. `k3_mask` on sequences needs about 0.01.
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

    @property
    def is_weight(self) -> bool:
        """True if the correction's mode weights the loss of tokens by the discrepancy D."""
        return self.mode not in ("none", "mask", "k3_mask")

    @property
    def band(self) -> tuple[float, float] | None:
        """The range of D outside of which the correction drops a unit of tokens.

        None if it drops none. If the mode has a limit in nats, this is approximately the range for
        a token of probability 1/2.
        """
        if self.mode in ("kpop", "k3_mask"):
            width = math.sqrt(2 * self.kl_limit)
            return math.exp(-width), math.exp(width)
        return (self.low, self.high) if self.mode in ("mask", "mask_weight") else None
