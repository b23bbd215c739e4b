"""The bounds that a run's options set on D, S and D S, and what they mean for a token's gradient.

A correction bounds D, an objective S, and `objective.ratio_cap` bounds D S. The page D against S
draws the bounds as lines, and an episode's page lists them beside the numbers of a token.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from unstale.config import CorrectionConfig, ObjectiveConfig
from unstale.durability.run_folder import Row

NAMES = {"d": "D", "s": "S", "ds": "D S"}

NO_GRADIENT = ("vetoed", "masked", "dropped", "skipped")
"""Outcomes of tokens that are not in the loss."""

ON_EACH_TOKEN = ("ppo_clip", "dual_clip", "cispo", "none")
"""Objectives whose gradient of a token's logp is S times the advantage inside of the bounds."""

MAX_EXPONENT = 700.0
"""Logarithm in nats above which a ratio counts as infinite: a float64 ends at 709."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """A range of D, S or D S. Outside of it a rule of the trainer acts on a token."""

    on: str
    """The ratio: a key of `NAMES`."""
    kind: str
    """The rule: `veto`, `mask`, `weight`, `clip` or `cap`."""
    low: float = 0.0
    high: float = math.inf
    effect: str
    """The end of a sentence on a token outside, which begins with "A token with D below 0.5"."""
    below: str = ""
    """The advantage that a token below must have, such as "negative"."""
    above: str = ""
    name: str
    about: str
    """The options that set the bounds."""
    unit: str = "token"

    def ends(self) -> Iterator[tuple[float, str]]:
        """Yield each finite bound above 0, with a sentence on the tokens beyond it."""
        for limit, side, sign in (
            (self.low, "below", self.below),
            (self.high, "above", self.above),
        ):
            if 0 < limit < math.inf:
                condition = f" and {sign} advantage" if sign else ""
                ratio = NAMES[self.on]
                yield limit, f"A token with {ratio} {side} {limit:g}{condition} {self.effect}."

    def excludes(self, log_d: float | None, log_s: float | None) -> bool | None:
        """Return True if a token lies outside.

        None if one of its values is not known, or if the bounds are on an aggregate of several
        tokens.
        """
        values = [each for name, each in (("d", log_d), ("s", log_s)) if name in self.on]
        known = [each for each in values if each is not None]
        if self.unit != "token" or len(known) < len(values):
            return None
        return not self.low <= _exp(sum(known)) <= self.high

    def row(self) -> Row:
        """Return what an answer has of the bounds. A side without a bound is None."""
        return {
            "name": self.name,
            "low": self.low if self.low > 0 else None,
            "high": self.high if self.high < math.inf else None,
            "about": self.about,
            "unit": self.unit,
        }


def bounds(correction: CorrectionConfig, objective: ObjectiveConfig) -> list[Bounds]:
    """Return the bounds of a correction and an objective."""
    found = [*_of_correction(correction), *_of_objective(objective)]
    return [each for each in found if each.low > 0 or each.high < math.inf]


def _of_correction(config: CorrectionConfig) -> Iterator[Bounds]:
    if config.token_veto_threshold:
        yield Bounds(
            on="d",
            kind="veto",
            low=config.token_veto_threshold,
            effect="drops its whole sequence",
            name="veto of D",
            about="a token below drops its whole sequence (correction.token_veto_threshold)",
        )
    control = config.control
    if control in ("mask", "mask_weight"):
        weighted = "; between both limits D is the weight" if control == "mask_weight" else ""
        kind, effect = "mask", f"is dropped ({control}){weighted}"
    elif control in ("clamp", "truncate"):
        kind, effect = "weight", f"is kept, with this limit as its weight ({control})"
    else:
        return
    yield Bounds(
        on="d",
        kind=kind,
        low=0.0 if control == "truncate" else config.low,
        high=config.high,
        effect=effect,
        name="limits of D",
        about=f"correction.low and high ({control})",
        unit=config.unit,
    )


def _of_objective(config: ObjectiveConfig) -> Iterator[Bounds]:
    unit = _unit_of_s(config)
    if config.kind in ("ppo_clip", "dual_clip", "gspo", "cispo"):
        keeps = config.kind == "cispo"
        below, above = ("any", "any") if keeps else ("negative", "positive")
        yield Bounds(
            on="s",
            kind="clip",
            low=1 - config.clip_low,
            high=1 + config.clip_high,
            effect="keeps its gradient, with the limit as its weight"
            if keeps
            else "has no gradient",
            below=below,
            above=above,
            name="limits of S",
            about=f"1 - objective.clip_low and 1 + clip_high ({config.kind})",
            unit=unit,
        )
    if config.kind == "dual_clip":
        yield Bounds(
            on="s",
            kind="clip",
            high=config.dual_clip,
            effect="has no gradient",
            above="negative",
            name="limit of S if A < 0",
            about="objective.dual_clip",
            unit=unit,
        )
    if config.ratio_cap:
        yield Bounds(
            on="ds",
            kind="cap",
            high=config.ratio_cap,
            effect="has a smaller weight (ratio_cap)",
            name="limit of D S",
            about="objective.ratio_cap",
        )


def _unit_of_s(config: ObjectiveConfig) -> str:
    return "sequence" if config.kind == "gspo" else config.unit


class TrainedToken(NamedTuple):
    """The values of a trained token. None if one was not computed."""

    log_d: float | None
    log_s: float | None
    weight: float | None
    advantage: float | None
    outcome: str


def gradient(config: ObjectiveConfig, token: TrainedToken) -> tuple[float, str] | None:
    """Return the factor of the gradient of a token's logp in the policy's loss, and its formula.

    It is above 0 if the token is made more probable. None if the objective is not one of
    `ON_EACH_TOKEN`, or has ratios of several tokens.
    """
    if token.outcome in NO_GRADIENT:
        return 0.0, f"the token is {token.outcome}"
    if config.kind not in ON_EACH_TOKEN or _unit_of_s(config) != "token":
        return None
    clipped = token.outcome.startswith("clipped")
    if clipped and config.kind != "cispo":
        return 0.0, "the token is clipped, so the loss does not change with S"
    log_d, log_s, weight, advantage, _ = token
    if log_d is None or log_s is None or weight is None or advantage is None:
        return None
    ratio, names = _exp(log_s), ["weight", "S", "advantage"]
    if config.kind == "cispo":
        limited = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
        names[1] = "S" if limited == ratio else "limit of S"
        ratio = limited
    found = weight * ratio * advantage
    if config.ratio_cap and (size := _exp(log_d + log_s)) > config.ratio_cap:
        found *= config.ratio_cap / size
        names.append("limit of D S / (D S)")
    if not math.isfinite(found):
        return None
    return found, f"{' times '.join(names)}, before the division of the loss"


def _exp(value: float) -> float:
    return math.exp(value) if value < MAX_EXPONENT else math.inf


def explain(
    correction: CorrectionConfig,
    objective: ObjectiveConfig,
    training: Mapping[str, Any],
    *,
    is_replaced: bool,
) -> Row:
    """Add the bounds and the gradients to the values of an episode's training.

    `limits` has a row for each of the bounds, and `formulas` the explanations of gradients. The
    `tokens` get `outside`, which is for each row True, False or None, `gradient`, and `formula`, a
    place in `formulas`. Gradients are None if `is_replaced`: a technique replaces the ratio or the
    loss of a token.
    """
    tokens = training["tokens"]
    found = bounds(correction, objective)
    formulas: dict[str, int] = {}
    outside: list[list[bool | None]] = []
    gradients: list[float | None] = []
    places: list[int | None] = []
    columns = [tokens[name] for name in TrainedToken._fields]
    for token in map(TrainedToken._make, zip(*columns, strict=True)):
        outside.append([each.excludes(token.log_d, token.log_s) for each in found])
        value, formula = (None if is_replaced else gradient(objective, token)) or (None, None)
        gradients.append(value)
        places.append(None if formula is None else formulas.setdefault(formula, len(formulas)))
    more = {"outside": outside, "gradient": gradients, "formula": places}
    return {
        **training,
        "tokens": {**tokens, **more},
        "limits": [each.row() for each in found],
        "formulas": list(formulas),
    }
