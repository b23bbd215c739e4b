"""Options of advantages, the audit, corrections and objectives."""

from dataclasses import dataclass, fields
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
    """The advantage estimator."""

    selector: ClassVar[str] = "estimator"

    estimator: Estimator = "grpo"
    """The function from the rewards of a task's episodes to advantages."""
    discount: Share = 1.0
    """`turn_level`: factor on the rewards of each later turn."""
    group_baseline: bool = True
    """`reinforce_batch`: subtract the mean of each group first."""

    def check_combination(self) -> None:
        self.refuse_unread([option.name for option in fields(self)])


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig(Section):
    """The measured error of old log-probabilities, found with full copies of the weights."""

    share: Share = 0.0
    """Share of sequences scored again with the weights that sampled them; 0 keeps no copies."""
    record: bool = False
    """Keep every version and every batch in the run folder, for `unstale audit`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionConfig(Section):
    """The correction of the discrepancy D = pi_old / mu: same weights, two programs."""

    selector: ClassVar[str] = "control"

    control: CorrectionControl = "mask_weight"
    """How D is used: as a weight on tokens, to drop tokens, or not at all."""
    low: Share = 0.5
    """Lower end of the band on D."""
    high: Annotated[float, Range(1)] = 2.0
    """Upper end of the band on D."""
    normalize: bool = False
    """Divide the weights by their mean over the batch's kept tokens."""
    unit: Unit = "token"
    """Tokens over which D is aggregated."""
    aggregate: Aggregate = "mean"
    """Geometric mean of the ratios in a unit, their product, or the ratio farthest from 1."""
    token_veto_threshold: Share = 0.0
    """Drop a whole sequence if D of any of its tokens is below this; 0 never does."""

    def check_combination(self) -> None:
        self.refuse_unread(["normalize"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig(Section):
    """The trust region on staleness S = pi / pi_old (same program, newer weights), and the loss."""

    selector: ClassVar[str] = "kind"

    kind: ObjectiveKind = "ppo_clip"
    """The trust region."""
    clip_low: Share = 0.2
    """No gradient for S below 1 - clip_low; `cispo` bounds the weight. `gspo` needs about 3e-4."""
    clip_high: NonNegative = 0.28
    """No gradient for S above 1 + clip_high; `cispo` bounds the weight. `gspo` needs about 4e-4."""
    dual_clip: float = 3.0
    """`dual_clip`: bound on the loss of a negative advantage, in multiples of it."""
    kl_penalty: NonNegative = 1.0
    """`kl_penalty`: the coefficient c of S A - c / 2 (log S)^2."""
    tau_pos: Positive = 1.0
    """`sapo`: how fast the gradient of a positive advantage fades as S leaves 1."""
    tau_neg: Positive = 1.05
    """`sapo`: how fast the gradient of a negative advantage fades as S leaves 1."""
    dro_beta: Positive = 0.05
    """`dro`: the coefficient c of A log S - c / 2 (log S)^2."""
    ratio_cap: NonNegative = 0.0
    """Limit of pi / mu = D S as a weight on a token's loss; 0 sets none."""
    unit: Unit = "token"
    """Tokens over which S is aggregated."""
    aggregate: Aggregate = "mean"
    """Geometric mean of the ratios in a unit, their product, or the ratio farthest from 1."""
    loss_aggregation: LossAggregation = "action_tokens"
    """The denominator of the loss; `action_tokens` counts them before masking."""
    constant: Annotated[float, Range(1)] = 1000.0
    """`loss_aggregation = "constant"`: tokens per sequence in the denominator (Dr. GRPO)."""
    kl_coef: NonNegative = 0.0
    """Coefficient of the KL to the policy at the start of the run."""
    entropy_coef: NonNegative = 0.0
    """Coefficient of the entropy bonus."""

    def check_combination(self) -> None:
        if not self.dual_clip > 1:
            raise ConfigError(
                f"objective.dual_clip must be > 1 (1 stops fresh tokens too), got {self.dual_clip}"
            )
        self.refuse_unread(["tau_pos", "tau_neg", "dro_beta"])

    def applies(self, option: str) -> bool:
        if option == "constant":
            return self.loss_aggregation == "constant"
        return Section.applies(self, option)
