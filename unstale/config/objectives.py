"""The options and declarations of objectives. Importing it does not import torch.

An objective is the loss of a token, as a function of the staleness ratio S = pi / pi_old. Each is a
subclass of `ObjectiveConfig` in `unstale/objectives`, with its options, its formula, its bounds on
S and their meaning in words. The command line's help, the linter, the trainer, reports, the
dashboard, advice and docs read these declarations.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from unstale.config.algorithm import Aggregate, LossAggregation, PlacedMode, Unit
from unstale.config.checks import NonNegative, OneOf, Range, base_of, option_types
from unstale.config.variants import VariantSection

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.algorithms.objectives import Surrogate

NAMES = {"d": "D", "s": "S", "ds": "D S"}
MAX_EXPONENT = 700.0
"""Logarithm in nats from which a ratio counts as infinite. exp overflows float64 above 709."""


def exp(value: float) -> float:
    """Return the ratio with the given logarithm in nats.

    Infinity if it is too large for a float.
    """
    return math.exp(value) if value < MAX_EXPONENT else math.inf


def over(unit: Unit, aggregate: str) -> str:
    """Return a text on how a ratio is aggregated: the aggregate, and the unit of tokens.

    >>> over("turn", "sum")
    'product over a turn'
    """
    if unit == "token":
        return "per token"
    words = {"mean": "geometric mean", "sum": "product", "max": "the ratio farthest from 1"}
    return f"{words[aggregate]} over a {unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """A range of a ratio of probabilities, outside of which a rule of the trainer acts on a token.

    The ratio is D = pi_old / mu, S = pi / pi_old, or their product D S = pi / mu.
    """

    on: str = "s"
    """The ratio that is bounded: `d` (D), `s` (S) or `ds` (D S)."""
    kind: str = "clip"
    """The rule: `veto`, `mask`, `weight`, `clip` or `cap`."""
    low: float = 0.0
    high: float = math.inf
    effect: str = "has no gradient"
    """The effect of the rule: the end of a sentence that begins with "A token with D below 0.5".
    """
    below: str = ""
    """The sign of the advantage, such as "negative", with which the rule acts on a token below
    `low`. Empty if the rule acts with either sign. `above` is the same for a token above `high`.
    """
    above: str = ""
    name: str
    about: str
    """The names of the options that set the bounds, as text."""
    unit: str = "token"

    def ends(self) -> Iterator[tuple[float, str]]:
        """Yield each bound that is finite and above 0, with a sentence about the tokens beyond
        it.
        """
        for limit, side, sign in (
            (self.low, "below", self.below),
            (self.high, "above", self.above),
        ):
            if 0 < limit < math.inf:
                condition = f" and {sign} advantage" if sign else ""
                ratio = NAMES[self.on]
                yield limit, f"A token with {ratio} {side} {limit:g}{condition} {self.effect}."

    def excludes(self, log_d: float | None, log_s: float | None) -> bool | None:
        """Return True if a token's ratio lies outside the bounds.

        `log_d` and `log_s` are the token's log-ratios in nats. Return None if a needed one is None,
        or if the bounds apply to an aggregate of several tokens.
        """
        values = [each for name, each in (("d", log_d), ("s", log_s)) if name in self.on]
        known = [each for each in values if each is not None]
        if self.unit != "token" or len(known) < len(values):
            return None
        return not self.low <= exp(sum(known)) <= self.high

    def row(self) -> dict[str, Any]:
        """Return the bounds as a JSON object for the dashboard. A missing bound is None."""
        return {
            "name": self.name,
            "low": self.low if self.low > 0 else None,
            "high": self.high if self.high < math.inf else None,
            "about": self.about,
            "unit": self.unit,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveDocs:
    """The texts of one objective in the table of objectives in docs/options.md."""

    loss: str
    """The formula of the loss of a token with advantage A."""
    source: str
    choose: str
    """The situation in which a user should choose the objective."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(VariantSection):
    """The trust region on the staleness ratio S = pi / pi_old, and the aggregation of the loss.

    `ObjectiveConfig(loss_type="gspo", clip_low=3e-4)` returns an instance of that loss's subclass.

    A new objective is a subclass that sets `loss_type` and `docs` and defines `limit`. It defines
    `surrogate`, too, unless `unstale.algorithms.objectives` has a function with its name.
    """

    selector: ClassVar[str] = "loss_type"
    refused_unread: ClassVar = ("constant", "placed_cap")
    read_with: ClassVar = {
        "constant": ("loss_aggregation", "= constant"),
        "placed_cap": ("placed", "= guided"),
    }
    package: ClassVar[str] = "unstale.objectives"
    registered: ClassVar[dict[str, "type[ObjectiveConfig]"]] = {}
    group: ClassVar[str] = "unstale.objectives"

    loss_type: Annotated[str, OneOf(lambda: ObjectiveConfig.own_options())] = "ppo_clip"
    """The loss of a token, which limits how far the staleness ratio S = pi / pi_old may move from
    1.
    """
    ratio_cap: NonNegative = 0.0
    """Upper limit of the whole importance ratio pi / mu (D times S), by which a token's loss is
    weighted; 0 sets no limit.
    """
    opsm_threshold: NonNegative = 0.0
    """Tokens with a negative advantage have no gradient if the mean of log(mu / pi) over their
    sequence is above this value, in nats (off-policy sequence masking); 0 masks none.
    """
    unit: Unit = "token"
    """The tokens over which the staleness ratio is aggregated: one token, a turn, a segment (tokens
    sampled by one version of the weights), or a sequence.
    """
    aggregate: Aggregate = "mean"
    """Aggregate of the staleness ratios of a unit's tokens: `mean` is their geometric mean, `sum`
    their product, `max` the one farthest from 1.
    """
    loss_aggregation: LossAggregation = "action_tokens"
    """Divisor of a batch's loss. `action_tokens` is the number of tokens that the policy sampled,
    including those that the correction dropped.
    """
    constant: Annotated[float, Range(1)] = 1000.0
    """Only for `loss_aggregation = "constant"`: tokens per sequence in the divisor (Dr. GRPO)."""
    kl_coef: NonNegative = 0.0
    """Coefficient of the KL divergence from the policy at the start of the run; 0 computes none."""
    entropy_coef: NonNegative = 0.0
    """Coefficient of the entropy bonus in the loss; 0 computes none."""

    placed: PlacedMode = "mask"
    """Use of text in a reply that the policy did not sample there, such as a hint: `mask` gives it
    no loss, `guided` weights it by its importance ratio, `anchor` imitates it (docs/placed.md).
    """
    placed_cap: NonNegative = 2.0
    """Only for `placed = guided`: upper limit of Gamma, the ratio of the text's probabilities in
    the recorded context and in the one in which it was sampled; 0 sets no limit.
    """

    docs: ClassVar[ObjectiveDocs]
    ratio: ClassVar[tuple[Unit, Aggregate] | None] = None
    """The unit and the aggregate of S that the objective always uses. None if the options `unit`
    and `aggregate` decide.
    """
    inputs: ClassVar[tuple[str, ...]] = ()
    """Further tensors over the tokens that `surrogate` receives by name: `old_logp`, `sequence` or
    `sampled`.
    """
    stops: ClassVar[bool] = True
    """True if a token whose ratio is outside the bounds has no gradient."""
    wide: ClassVar[Mapping[str, float]] = {}
    """For options of this objective: limits wide enough to exceed numerical noise. The linter
    suggests them if a run's limits are narrower.
    """

    no_limit: ClassVar[tuple[str, ...]] = ()
    """Options of this objective for which infinity means that there is no limit."""

    def __new__(cls, loss_type: str = "", **options: Any) -> "ObjectiveConfig":
        return object.__new__(cls.chosen_class(loss_type, options))

    def surrogate(
        self,
        log_staleness: "Tensor",
        advantage: "Tensor",
        *,
        sampled: "Tensor | None" = None,
        **inputs: "Tensor",
    ) -> "Surrogate":
        """Return the loss of each token from log S and its advantage, tensors of any one shape.

        `sampled` is the mask of tokens that the policy sampled. Advantages of other tokens then
        have no effect. `inputs` are the other tensors that the objective declares. The function in
        `algorithms.objectives` with the objective's name computes the loss from the objective's
        own options. A subclass without such a function overrides this method.
        """
        function = getattr(import_module("unstale.algorithms.objectives"), self.loss_type)
        common = option_types(base_of(type(self)))
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        own = {name: value for name, value in own.items() if name not in common}
        surrogate: Surrogate = function(log_staleness, advantage, sampled=sampled, **inputs, **own)
        return surrogate

    def limit(self) -> str:
        """Return a text on how the loss limits S, such as "a weight held within [0.8, 1.28]"."""
        raise NotImplementedError

    def bounds(self) -> Sequence[Bounds]:
        """Return the ranges of S outside of which the objective limits a token.

        The main range comes first.
        """
        return ()

    def thresholds(self) -> Iterator[float]:
        """Yield the absolute values of log S, in nats, beyond which the objective limits a
        token.
        """
        for each in self.bounds():
            if each.high < math.inf:
                yield math.log(each.high)
            if each.low > 0:
                yield -math.log(each.low)

    def weight(self, ratio: float) -> tuple[float, str] | None:
        """Return w and its name, if the loss's gradient is -w * advantage * grad logp.

        `ratio` is the token's S. If the objective `stops` tokens, it must be within the bounds.
        None if the gradient does not have this form.
        """
        return None

    def unlimited(self, *, capped: bool) -> str:
        """Return a text on what the objective does not limit. Empty if the objective limits S.

        `capped` is True if `ratio_cap` limits the weight of a token.
        """
        return ""

    @property
    def bounds_s(self) -> bool:
        """True if the objective limits the staleness ratio S."""
        return True

    @property
    def trains_zero_advantage(self) -> bool:
        """True if a token with advantage 0 can have a gradient, so that it must not be skipped."""
        return False

    @property
    def ratio_unit(self) -> Unit:
        """The unit of tokens over which the staleness ratio S is aggregated."""
        return self.ratio[0] if self.ratio else self.unit

    @property
    def ratio_aggregate(self) -> Aggregate:
        return self.ratio[1] if self.ratio else self.aggregate

    @property
    def is_token_weight(self) -> bool:
        """True if each token's own ratio is a factor of its gradient, with or without a clip."""
        return self.weight(1.0) is not None and self.ratio is None

    @property
    def clips_tokens(self) -> bool:
        """True if each token's own ratio weights its gradient, and clipped tokens have none."""
        return self.is_token_weight and self.stops and bool(self.bounds())

    @property
    def meaning(self) -> str:
        """A clause on how the loss limits S.

        It names the objective and the unit over which S is aggregated.
        """
        return f"{self.loss_type}: {self.limit()}, {over(self.ratio_unit, self.ratio_aggregate)}"

    def applies(self, option: str) -> bool:
        if option == "constant":
            return self.loss_aggregation == "constant"
        if option == "placed_cap":
            return self.placed == "guided"
        return super().applies(option)

    @classmethod
    def unread(cls, values: Mapping[str, Any]) -> list[str]:
        """Return the options in `values` that the objective does not use, so must not be changed.

        Options of other objectives than `values["loss_type"]` are among them.
        """
        base = ObjectiveConfig
        known = cls.variants_by_name().get(values.get("loss_type", base.loss_type), base)
        names = {option.name for option in fields(known)}
        foreign = [name for name in values if name not in names and cls.readers(name)]
        return [*foreign, *super().unread(values)]


def objectives() -> Mapping[str, type[ObjectiveConfig]]:
    """Return the options class of every objective, by name."""
    return ObjectiveConfig.variants_by_name()
