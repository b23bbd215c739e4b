"""The options of objectives and what is known about each. Importing this does not import torch.

An objective is the loss of a token, as a function of the staleness ratio S = pi / pi_old. Each is a
subclass of `ObjectiveConfig` in `unstale/objectives`, with its options, its formula, its bounds on
S and their meaning in words. The command line's help, the linter, the trainer, reports, the
dashboard, advice and docs read these classes.
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
"""Logarithm of a ratio, in nats, from which the ratio counts as infinite. exp overflows a float64
above 709.
"""


def exp(value: float) -> float:
    """Return e to the power of `value`: the ratio whose logarithm it is. Infinity if it is too
    large.
    """
    return math.exp(value) if value < MAX_EXPONENT else math.inf


def over(unit: Unit, aggregate: str) -> str:
    """Return a text on the aggregate of a ratio over a unit of tokens.

    >>> over("turn", "sum")
    'product over a turn'
    """
    if unit == "token":
        return "per token"
    words = {"mean": "geometric mean", "sum": "product", "max": "the ratio farthest from 1"}
    return f"{words[aggregate]} over a {unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """A range of a ratio of probabilities outside of which the trainer treats a token differently.

    The ratio is D = pi_old / mu, S = pi / pi_old, or their product D S = pi / mu.
    """

    on: str = "s"
    """The ratio to which the range applies: `d` (D), `s` (S) or `ds` (D S)."""
    kind: str = "clip"
    """The treatment of tokens outside the range: `veto`, `mask`, `weight`, `clip` or `cap`.
    `effect` describes it.
    """
    low: float = 0.0
    high: float = math.inf
    effect: str = "has no gradient"
    """The effect of the treatment on a token outside the bounds. It is the end of a sentence that
    begins with "A token with D below 0.5".
    """
    below: str = ""
    """The sign of the advantage, such as "negative", with which a token below `low` is treated.
    Empty means any sign. `above` is the same for a token above `high`.
    """
    above: str = ""
    name: str
    about: str
    """The names of the options that set the range, as text."""
    unit: str = "token"

    def ends(self) -> Iterator[tuple[float, str]]:
        """Yield each end of the range that is finite and above 0, with a sentence on tokens beyond
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
        """Return True if a token's ratio is outside the range.

        `log_d` and `log_s` are the token's log D and log S in nats. None if one that is needed is
        None, or if the range is for an aggregate of several tokens.
        """
        values = [each for name, each in (("d", log_d), ("s", log_s)) if name in self.on]
        known = [each for each in values if each is not None]
        if self.unit != "token" or len(known) < len(values):
            return None
        return not self.low <= exp(sum(known)) <= self.high

    def row(self) -> dict[str, Any]:
        """Return the range as a JSON object for the dashboard.

        An end that does not exist is None.
        """
        return {
            "name": self.name,
            "low": self.low if self.low > 0 else None,
            "high": self.high if self.high < math.inf else None,
            "about": self.about,
            "unit": self.unit,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveDocs:
    """The texts about an objective in a table of docs/options.md."""

    loss: str
    """The formula of the loss of a token with advantage A."""
    source: str
    choose: str
    """The situation in which a user should choose the objective."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(VariantSection):
    """The loss of tokens, its limit on the staleness ratio S = pi / pi_old, and its aggregation.

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
    """The tokens over which S is aggregated: one token, a turn, a segment (successive tokens
    sampled by one version of the weights), or a sequence.
    """
    aggregate: Aggregate = "mean"
    """Aggregate of the S of a unit's tokens: `mean` is their geometric mean, `sum` their product,
    `max` the one farthest from 1.
    """
    loss_aggregation: LossAggregation = "action_tokens"
    """Divisor of a batch's loss. `action_tokens` is the number of tokens that the policy sampled,
    including those that the correction dropped.
    """
    constant: Annotated[float, Range(1)] = 1000.0
    """Only for `loss_aggregation = "constant"`: tokens per sequence in the divisor (Dr. GRPO)."""
    kl_coef: NonNegative = 0.0
    """Coefficient, in the loss, of the KL divergence from the policy at the start of the run; 0
    computes none.
    """
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
    """The values of `unit` and `aggregate` that this objective always uses. None if the options
    decide.
    """
    inputs: ClassVar[tuple[str, ...]] = ()
    """Further tensors, one value per token, that `surrogate` gets by name: `old_logp`, `sequence`
    or `sampled`.
    """
    stops: ClassVar[bool] = True
    """True if a token outside of `bounds` has no gradient."""
    wide: ClassVar[Mapping[str, float]] = {}
    """Option of this objective -> a value with which its limit is wider than numerical noise. The
    linter suggests these values if a run's limits are narrower than the noise.
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
        """Return the loss of each token, from log S and its advantage. The tensors have any one
        shape.

        `sampled` is a mask of the tokens that the policy sampled. Advantages of other tokens have
        no effect. The function of this objective's name in `algorithms.objectives` computes the
        loss. It also gets the objective's own options, and the tensors that `inputs` names. A
        subclass without such a function overrides this method.
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
        """Return the ranges of S outside of which the objective treats tokens differently, main
        range first.
        """
        return ()

    def thresholds(self) -> Iterator[float]:
        """Yield the sizes of log S, in nats, beyond which the objective treats a token
        differently.
        """
        for each in self.bounds():
            if each.high < math.inf:
                yield math.log(each.high)
            if each.low > 0:
                yield -math.log(each.low)

    def weight(self, ratio: float) -> tuple[float, str] | None:
        """Return the weight w of a token whose S is `ratio`, and its name as text.

        The gradient of the loss is then -w * advantage * grad logp. If the objective `stops`
        tokens, this holds for one within `bounds`. None if the gradient does not have this form.
        """
        return None

    def unlimited(self, *, capped: bool) -> str:
        """Return a text on ratios that the objective does not limit, for the linter. Empty if there
        are none.

        `capped` is True if the option `ratio_cap` limits the weight of a token.
        """
        return ""

    @property
    def bounds_s(self) -> bool:
        """True if the objective limits S."""
        return True

    @property
    def trains_zero_advantage(self) -> bool:
        """True if tokens with advantage 0 may have a gradient, so that they must not be skipped."""
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
        """True if the gradient of each token has its own ratio as a factor, with or without a
        clip.
        """
        return self.weight(1.0) is not None and self.ratio is None

    @property
    def clips_tokens(self) -> bool:
        """True if the gradient of each token has its own ratio as a factor, and that of clipped
        tokens is 0.
        """
        return self.is_token_weight and self.stops and bool(self.bounds())

    @property
    def meaning(self) -> str:
        """Text on how the objective limits S, and over which tokens S is aggregated."""
        return f"{self.loss_type}: {self.limit()}, {over(self.ratio_unit, self.ratio_aggregate)}"

    def applies(self, option: str) -> bool:
        if option == "constant":
            return self.loss_aggregation == "constant"
        if option == "placed_cap":
            return self.placed == "guided"
        return super().applies(option)

    @classmethod
    def unread(cls, values: Mapping[str, Any]) -> list[str]:
        """Return the options in `values` that the objective `values["loss_type"]` does not use.

        These options must keep their defaults.
        """
        base = ObjectiveConfig
        known = cls.variants_by_name().get(values.get("loss_type", base.loss_type), base)
        names = {option.name for option in fields(known)}
        foreign = [name for name in values if name not in names and cls.readers(name)]
        return [*foreign, *super().unread(values)]


def objectives() -> Mapping[str, type[ObjectiveConfig]]:
    """Return the options class of every objective, by name."""
    return ObjectiveConfig.variants_by_name()
