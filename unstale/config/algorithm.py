"""Options of the algorithm: advantages, their critic, the audit and the correction."""

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
    """Only for `turn_level` and `gae`: factor by which a later reward is multiplied for each turn
    until then. With `gae`, for each action (`advantage.over`).
    """
    group_baseline: bool = True
    """Only for `reinforce_batch`: first subtract the mean reward of each group."""
    lam: Share = 1.0
    """Only for `gae`: lambda. With 1, an action's advantage is the sum of all later rewards minus
    the critic's forecast. Smaller values put later forecasts in place of rewards, which reduces
    the variance and adds a bias.
    """
    over: Literal["token", "turn"] = "token"
    """Only for `gae`: the unit of an action. Each token or each turn has one forecast and one
    advantage.
    """
    whiten: bool = True
    """Only for `gae`: shift and scale the advantages of a batch's tokens to mean 0 and standard
    deviation 1.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig(Section):
    """The critic (value function) of `advantage.estimator = gae`. See docs/critic.md.

    The critic's forecast before an action is the expected sum of the episode's later rewards.
    """

    model: Literal["trunk", "own"] = "trunk"
    """The layers below the critic's head: those of the policy (`trunk`), or a copy of the model
    that only the critic trains (`own`).
    """
    memory: Share = 0.95
    """Weight of earlier batches in the least squares fit of the critic's head: it is multiplied
    by this factor at each optimizer step. With 1, all batches count equally.
    """
    own_lr: Positive = 1e-5
    """Only for `model = own`: learning rate of the copy's layers."""
    coef: NonNegative = 0.1
    """Only for `model = trunk`: coefficient of the critic's loss in the gradient of the policy's
    layers. With 0, this loss trains only the critic's head.
    """
    lam: Share = 1.0
    """Lambda of the targets to which forecasts are fitted. With 1, a target is the sum of the
    episode's later rewards.
    """
    clip: NonNegative = 0.2
    """PPO's value clipping: largest change of the critic's forecast within a batch that still
    lowers its loss; 0 sets no limit. Without effect if a batch has one optimizer step.
    """
    warmup_steps: Count = 0
    """Optimizer steps at the start of the run that train only the critic, not the policy."""

    read_with: ClassVar = {"own_lr": ("model", "= own"), "coef": ("model", "= trunk")}
    refused_unread: ClassVar = ("own_lr", "coef")

    def applies(self, option: str) -> bool:
        return {"own_lr": self.model == "own", "coef": self.model == "trunk"}.get(option, True)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig(Section):
    """The audit, which measures the error of old log-probabilities. It needs copies of past
    weights.
    """

    share: Share = 0.0
    """Share of sequences whose log-probabilities are computed again with the weights that sampled
    them; 0 measures nothing and keeps no copies of past weights.
    """
    record: bool = False
    """Keep every version of the weights and every batch in the run folder, for `unstale audit`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionConfig(Section):
    """The correction for the discrepancy D = pi_old / mu between trainer and engine.

    D is a token's probability under the old policy, computed by the trainer, divided by the
    probability with which the engine sampled it.
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
    """Only for `kpop` and `k3_mask`: tokens are dropped if a divergence between pi_old and mu is
    above this limit, in nats. It is the larger binary KL of both directions (`kpop`) or D - 1 - log
    D (`k3_mask`), aggregated over the unit. `k3_mask` on sequences needs about 0.01.
    """
    normalize: bool = False
    """Divide the weights that the correction gives to tokens by their mean over the tokens of the
    batch that it keeps.
    """
    unit: Unit = "token"
    """The tokens over which D is aggregated: one token, a turn, a segment (successive tokens
    sampled by one version of the weights), or a sequence.
    """
    aggregate: Aggregate = "mean"
    """Aggregate of the D of a unit's tokens: `mean` is their geometric mean, `sum` their product,
    `max` the one farthest from 1.
    """
    token_veto_threshold: Share = 0.0
    """Drop a whole sequence if the discrepancy D of any of its tokens is below this value; 0 drops
    none.
    """

    @property
    def is_weight(self) -> bool:
        """True if `mode` multiplies the loss of tokens by D."""
        return self.mode not in ("none", "mask", "k3_mask")

    @property
    def band(self) -> tuple[float, float] | None:
        """The range of D outside of which the correction drops a unit of tokens (option `unit`).

        None if it drops none. If `mode` has a limit in nats, this is approximately the range for a
        token of probability 1/2.
        """
        if self.mode in ("kpop", "k3_mask"):
            width = math.sqrt(2 * self.kl_limit)
            return math.exp(-width), math.exp(width)
        return (self.low, self.high) if self.mode in ("mask", "mask_weight") else None
