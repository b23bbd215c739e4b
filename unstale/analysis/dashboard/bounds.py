"""The bounds that a run's options set on D, S and D S, and their effect on a token's gradient.

log D is old_logp - behavior_logp, and log S is logp - old_logp. A correction bounds D, an objective
bounds S, and `objective.ratio_cap` bounds D S. One page of the dashboard draws the bounds as lines
in a plot of D and S. The page of an episode lists them beside the numbers of a token.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from unstale.config import CorrectionConfig, ObjectiveConfig
from unstale.config.objectives import Bounds, exp
from unstale.durability.run_folder import Row

NO_GRADIENT = ("vetoed", "masked", "dropped", "skipped")
"""Outcomes of tokens that have no part in the loss."""


def bounds(correction: CorrectionConfig, objective: ObjectiveConfig) -> list[Bounds]:
    """Return the bounds that a correction and an objective set on D, S and D S."""
    found = [*_of_correction(correction), *objective.bounds()]
    if objective.ratio_cap:
        cap = Bounds(
            on="ds",
            kind="cap",
            high=objective.ratio_cap,
            effect="has a smaller weight (ratio_cap)",
            name="limit of D S",
            about="objective.ratio_cap",
        )
        found.append(cap)
    if objective.opsm_threshold:
        of_sequences = Bounds(
            on="ds",
            low=math.exp(-objective.opsm_threshold),
            below="negative",
            name="limit of D S over a sequence",
            about="objective.opsm_threshold",
            unit="sequence",
        )
        found.append(of_sequences)
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
    control = config.mode
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


class TrainedToken(NamedTuple):
    """The values of a trained token. A value that was not computed is None."""

    log_d: float | None
    log_s: float | None
    weight: float | None
    advantage: float | None
    outcome: str


def gradient(config: ObjectiveConfig, token: TrainedToken) -> tuple[float, str] | None:
    """Return the factor by which the update multiplies the gradient of a token's logp, and the
    factor's formula in words.

    A factor above 0 makes the token more probable. 0 means that the token is clipped or has no part
    in the loss. Return None if the gradient is not a weight times the advantage, if S is a ratio of
    several tokens, or if a value is missing.
    """
    if token.outcome in NO_GRADIENT:
        return 0.0, f"the token is {token.outcome}"
    if not config.is_token_weight or config.unit != "token":
        return None
    if config.stops and token.outcome.startswith("clipped"):
        return 0.0, "the token is clipped, so the loss does not change with S"
    if config.opsm_threshold and token.outcome == "clipped_low":
        return None  # its weight is at a limit, or its sequence is masked
    log_d, log_s, weight, advantage, _ = token
    if log_d is None or log_s is None or weight is None or advantage is None:
        return None
    if (of_s := config.weight(exp(log_s))) is None:
        return None
    names = ["weight", of_s[1], "advantage"]
    found = weight * of_s[0] * advantage
    if config.ratio_cap and (size := exp(log_d + log_s)) > config.ratio_cap:
        found *= config.ratio_cap / size
        names.append("limit of D S / (D S)")
    if not math.isfinite(found):
        return None
    return found, f"{' times '.join(names)}, before the division of the loss"


def explain(
    correction: CorrectionConfig,
    objective: ObjectiveConfig,
    training: Mapping[str, Any],
    *,
    is_replaced: bool,
) -> Row:
    """Return `training`, the values of an episode's training, with bounds and gradients added.

    `limits` has a row for each bound, and `formulas` the formulas of gradients in words. `tokens`
    gets three lists, with an entry for each token: `outside` says for each bound if the token is
    outside it (None if not known), `gradient` is the factor of the gradient, and `formula` is a
    position in `formulas`. With `is_replaced`, a technique replaces the ratio or the loss of a
    token, and `gradient` and `formula` are None.
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
