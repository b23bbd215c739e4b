"""Options of the algorithm: advantages, the audit, corrections and objectives."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

from unstale.config.checks import (
    ConfigError,
    NonNegative,
    OneOf,
    Positive,
    Range,
    Section,
    Share,
)
from unstale.config.declared import choices

Estimator = Annotated[str, OneOf(partial(choices, "advantages", "estimator"))]
CorrectionControl = Annotated[str, OneOf(partial(choices, "corrections", "control"))]
ObjectiveKind = Annotated[str, OneOf(partial(choices, "objectives", "objective"))]

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
    """Only for `turn_level`: factor by which rewards count less for each later turn."""
    group_baseline: bool = True
    """Only for `reinforce_batch`: first subtract the mean reward of each group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig(Section):
    """The audit, which measures the error of old log-probabilities with copies of past weights."""

    share: Share = 0.0
    """Share of sequences that are scored again with the weights that sampled them; 0 keeps no
    copies.
    """
    record: bool = False
    """Keep every version of the weights and every batch in the run folder, for `unstale audit`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionConfig(Section):
    """The correction of D = pi_old / mu: trainer against engine, with the same weights."""

    selector: ClassVar[str] = "control"
    refused_unread: ClassVar = ("low", "high", "normalize")

    control: CorrectionControl = "mask_weight"
    """Use of the discrepancy D: as a weight on the loss of a token, as a reason to drop a token, or
    not at all.
    """
    low: Share = 0.5
    """Only for `mask`, `clamp` and `mask_weight`: lower limit of the discrepancy D. The control
    decides what happens to tokens below it.
    """
    high: Annotated[float, Range(1)] = 2.0
    """Not for `none`: upper limit of the discrepancy D. The control decides what happens to tokens
    above it.
    """
    normalize: bool = False
    """Divide the weights by their mean over the tokens of the batch that the correction kept."""
    unit: Unit = "token"
    """The tokens over which the discrepancy is aggregated: one token, a turn, a segment of one
    version, or a sequence.
    """
    aggregate: Aggregate = "mean"
    """The aggregate over a unit: `mean` is the geometric mean of its ratios, `sum` their product,
    `max` the ratio farthest from 1.
    """
    token_veto_threshold: Share = 0.0
    """Drop a whole sequence if the discrepancy D of any of its tokens is below this value; 0 drops
    none.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig(Section):
    """The trust region on the staleness ratio S = pi / pi_old, and the aggregation of the loss."""

    selector: ClassVar[str] = "kind"
    refused_unread: ClassVar = (
        "clip_low",
        "clip_high",
        "dual_clip",
        "kl_penalty",
        "tau_pos",
        "tau_neg",
        "dro_beta",
        "constant",
    )
    read_with: ClassVar = {"constant": ("loss_aggregation", "= constant")}

    kind: ObjectiveKind = "ppo_clip"
    """The loss of a token, which limits how far the staleness ratio S = pi / pi_old may move from
    1.
    """
    clip_low: Share = 0.2
    """A token has no gradient to lower the staleness ratio S below 1 - clip_low. `cispo` limits the
    weight S instead. `gspo` needs about 3e-4.
    """
    clip_high: NonNegative = 0.28
    """A token has no gradient to raise the staleness ratio S above 1 + clip_high. `cispo` limits
    the weight S instead. `gspo` needs about 4e-4.
    """
    dual_clip: float = 3.0
    """Only for `dual_clip`: limit of the loss where the advantage A is negative, as a multiple of
    |A|.
    """
    kl_penalty: NonNegative = 1.0
    """Only for `kl_penalty`: the coefficient c of S A - c / 2 (log S)^2, where S is the staleness
    ratio and A the advantage.
    """
    tau_pos: Positive = 1.0
    """Only for `sapo`: the rate at which the gradient fades as the staleness ratio leaves 1, for
    positive advantages.
    """
    tau_neg: Positive = 1.05
    """Only for `sapo`: the rate at which the gradient fades as the staleness ratio leaves 1, for
    negative advantages.
    """
    dro_beta: Positive = 0.05
    """Only for `dro`: the coefficient c of A log S - c / 2 (log S)^2, where S is the staleness
    ratio and A the advantage.
    """
    ratio_cap: NonNegative = 0.0
    """Limit of the whole importance ratio pi / mu, by which a token's loss is weighted; 0 sets no
    limit.
    """
    unit: Unit = "token"
    """The tokens over which the staleness ratio is aggregated: one token, a turn, a segment of one
    version, or a sequence.
    """
    aggregate: Aggregate = "mean"
    """The aggregate over a unit: `mean` is the geometric mean of its ratios, `sum` their product,
    `max` the ratio farthest from 1.
    """
    loss_aggregation: LossAggregation = "action_tokens"
    """The number by which the loss of a batch is divided. `action_tokens` counts the tokens that
    the policy sampled, dropped ones included.
    """
    constant: Annotated[float, Range(1)] = 1000.0
    """Only for `loss_aggregation = "constant"`: tokens per sequence in the divisor (Dr. GRPO)."""
    kl_coef: NonNegative = 0.0
    """Coefficient of the KL divergence from the policy at the start of the run; 0 computes none."""
    entropy_coef: NonNegative = 0.0
    """Coefficient of the entropy bonus in the loss; 0 computes none."""

    def check_combination(self) -> None:
        if not self.dual_clip > 1:
            raise ConfigError(
                f"objective.dual_clip must be > 1 (1 stops fresh tokens too), got {self.dual_clip}"
            )

    def applies(self, option: str) -> bool:
        if option == "constant":
            return self.loss_aggregation == "constant"
        return Section.applies(self, option)
