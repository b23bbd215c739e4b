"""Options of advantages, old log-probabilities, corrections and objectives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from unstale.config.checks import (
    ConfigError,
    NonNegative,
    PositiveInt,
    Range,
    Section,
    Share,
)
from unstale.config.declared import ChoiceOf

ESTIMATORS = ChoiceOf("advantages", "estimator")
CONTROLS = ChoiceOf("corrections", "control")
OBJECTIVES = ChoiceOf("objectives", "objective")

Unit = Literal["token", "turn", "segment", "sequence"]
Aggregate = Literal["mean", "sum"]
LossAggregation = Literal["action_tokens", "kept", "sequence_mean", "constant"]

Route = Literal[
    "rollout",
    "current_recompute",
    "snapshot_old",
    "old_logit_model",
    "interrupt_sync",
    "eager",
    "interp_prox_loglinear",
    "interp_prox_linear",
    "ewma_prox",
    "ppo_ewma_async",
]
EXACT_ROUTES = ("snapshot_old", "old_logit_model", "interrupt_sync")
"""Routes that are exact for every token sampled without stale keys and values."""

EWMA_BETA = 0.5
"""Default decay of `ewma_prox`: a mean age of one version."""

_OF_ROUTES: dict[str, tuple[str, ...]] = {
    "alpha": ("interp_prox_loglinear", "interp_prox_linear"),
    "fresh": ("interp_prox_loglinear", "interp_prox_linear"),
    "beta": ("ewma_prox", "ppo_ewma_async"),
    "update_every": ("ewma_prox",),
    "averages": ("ppo_ewma_async",),
    "reset_below": ("ppo_ewma_async",),
    "reset_patience": ("ppo_ewma_async",),
    "reset_cooldown": ("ppo_ewma_async",),
    "fallback": ("eager",),
    "storage": ("snapshot_old",),
    "memory_gb": ("snapshot_old",),
    "spill": ("snapshot_old",),
}
"""Option -> the routes that read it. `eager` passes options on to its fallback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConfig(Section):
    """The advantage estimator."""

    selector: ClassVar[str] = "estimator"

    estimator: Annotated[str, ESTIMATORS] = "grpo"
    """How rewards of the same task become advantages."""
    discount: Share = 1.0
    """`turn_level`: factor on the rewards of each later turn."""
    group_baseline: bool = True
    """`reinforce_batch`: subtract the mean of each group first."""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        self.refuse_unused()

    def readers(self, option: str) -> Sequence[str]:
        return ESTIMATORS.readers(option)


@dataclass(frozen=True, slots=True, kw_only=True)
class OldLogpsConfig(Section):
    """The route to the trainer's log-probability at the sampling version. See docs/old-logps.md."""

    selector: ClassVar[str] = "route"

    route: Route = "snapshot_old"
    """Exact: `snapshot_old`, `old_logit_model`, `interrupt_sync`, `eager` with an exact fallback."""
    alpha: Annotated[float | None, Range(0, 1)] = None
    """`interp_prox_*`: weight of the current policy; none follows the token's lag d: (d - 1) / d."""
    fresh: Literal["trainer", "behavior"] = "trainer"
    """`interp_prox_*` at lag 0: the log-probability of the trainer, or that of the engine."""
    beta: Annotated[float | None, Range(0, 0.9999)] = None
    """Decay of the average; none: 0.5 (`ewma_prox`), or follows the staleness (`ppo_ewma_async`)."""
    update_every: Literal["version", "step"] = "version"
    """`ewma_prox`: average every published version, or the weights after every optimizer step."""
    averages: PositiveInt = 1
    """`ppo_ewma_async`: averages of different ages; a token takes the one nearest to its lag."""
    reset_below: Share = 0.0
    """`ppo_ewma_async`: reset the average while the correction keeps a smaller share; 0 never."""
    reset_patience: PositiveInt = 3
    """`ppo_ewma_async`: batches below `reset_below` in a row before a reset."""
    reset_cooldown: PositiveInt = 10
    """`ppo_ewma_async`: smallest number of batches between two resets."""
    fallback: Literal["snapshot_old", "interrupt_sync", "ewma_prox"] = "snapshot_old"
    """`eager`: the route of tokens that were not scored while their version was current."""
    storage: Literal["delta", "full"] = "delta"
    """Version store: lossless differences between versions, or a full copy of each."""
    memory_gb: NonNegative = 0.0
    """Version store: largest size; 0 has no limit."""
    spill: bool = False
    """Version store: keep versions in files of a temporary folder instead of memory."""
    baseline: bool = False
    """Allow settings that the linter refuses because a ratio is always 1, as a baseline."""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.beta is not None and self.averages > 1:
            raise ConfigError(
                "old_logps.averages must be 1 with a fixed old_logps.beta: "
                "all averages would have the same age"
            )
        self.refuse_unused()

    def readers(self, option: str) -> Sequence[str]:
        return _OF_ROUTES.get(option, ())

    def applies(self, option: str) -> bool:
        readers = self.readers(option)
        return not readers or self.route in readers or self.underlying in readers

    def selection(self) -> str:
        with_fallback = f"eager with the fallback {self.fallback}"
        return with_fallback if self.route == "eager" else self.route

    @property
    def underlying(self) -> Route:
        """The route of tokens that `eager` does not cover; for other routes, the route itself."""
        return self.fallback if self.route == "eager" else self.route

    @property
    def exact(self) -> bool:
        """True if every clean token gets the trainer's own log-probability at its version."""
        return self.underlying in EXACT_ROUTES


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig(Section):
    """The measured error of the route, against full copies of versions. See docs/old-logps.md."""

    share: Share = 0.0
    """Share of a batch's sequences that are scored again; 0 keeps no copies."""
    record: bool = False
    """Keep every version and every batch in the run folder, for `unstale audit`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionConfig(Section):
    """The correction of the discrepancy D = pi_old / mu: same weights, two programs."""

    selector: ClassVar[str] = "control"

    control: Annotated[str, CONTROLS] = "mask_weight"
    """What happens to tokens by their D."""
    low: Share = 0.5
    """Lower end of the band on D."""
    high: Annotated[float, Range(1)] = 2.0
    """Upper end of the band on D."""
    unit: Unit = "token"
    """Tokens over which D is aggregated."""
    aggregate: Aggregate = "mean"
    """Geometric mean of the ratios in a unit, or their product."""
    token_veto_threshold: Share = 0.0
    """Drop a whole sequence if D of any of its tokens is below this; 0 never does."""

    def readers(self, option: str) -> Sequence[str]:
        return CONTROLS.readers(option)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig(Section):
    """The trust region on staleness S = pi / pi_old (same program, newer weights), and the loss."""

    selector: ClassVar[str] = "kind"

    kind: Annotated[str, OBJECTIVES] = "ppo_clip"
    """The trust region."""
    clip_low: Share = 0.2
    """No gradient for S below 1 - clip_low; `cispo` bounds the weight. `gspo` needs about 3e-4."""
    clip_high: NonNegative = 0.28
    """No gradient for S above 1 + clip_high; `cispo` bounds the weight. `gspo` needs about 4e-4."""
    dual_clip: float = 3.0
    """`dual_clip`: bound on the loss of a negative advantage, in multiples of it."""
    kl_penalty: NonNegative = 1.0
    """`kl_penalty`: the coefficient c of S A - c / 2 (log S)^2."""
    unit: Unit = "token"
    """Tokens over which S is aggregated."""
    aggregate: Aggregate = "mean"
    """Geometric mean of the ratios in a unit, or their product."""
    loss_aggregation: LossAggregation = "action_tokens"
    """The denominator of the loss; `action_tokens` counts them before masking."""
    constant: Annotated[float, Range(1)] = 1000.0
    """`loss_aggregation = "constant"`: tokens per sequence in the denominator (Dr. GRPO)."""
    kl_coef: NonNegative = 0.0
    """Coefficient of the KL to the policy at the start of the run."""
    entropy_coef: NonNegative = 0.0
    """Coefficient of the entropy bonus."""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if not self.dual_clip > 1:
            raise ConfigError(
                f"objective.dual_clip must be > 1 (1 stops fresh tokens too), got {self.dual_clip}"
            )

    def readers(self, option: str) -> Sequence[str]:
        return OBJECTIVES.readers(option)

    def applies(self, option: str) -> bool:
        if option == "constant":
            return self.loss_aggregation == "constant"
        return Section.applies(self, option)
