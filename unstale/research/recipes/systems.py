"""Recipes with the four losses of AReaL, each with tokens up to 4 versions old.

The desk and the model are those of `retail`. AReaL bounds staleness when it admits new episodes, as
`schedule.max_staleness` does here. Its option `max_staleness` has the same meaning.
"""

from collections.abc import Callable, Mapping
from typing import Any

from unstale.config import (
    RunConfig,
    ScheduleConfig,
    TrainerConfig,
)
from unstale.config.options import override, with_changes
from unstale.objectives.clips import PpoClip
from unstale.recipes.retail import retail

DECOUPLED: Mapping[str, Any] = {
    "correction.mode": "mask_weight",
    "correction.low": 0.0,
    "correction.high": 5.0,
}
"""Options that weight each token by pi_prox / mu (pi_old / mu in this package). Tokens with a
weight above 5 get no gradient.
"""


def areal(name: str, about: str, route: str, values: Mapping[str, Any]) -> Callable[..., RunConfig]:
    """Return a recipe with one of AReaL's losses.

    `about` describes the loss. `route` is the method that computes `old_logp`. `values` has the
    other options by name.
    """

    def recipe(**changes: Any) -> RunConfig:
        config = retail(
            recipe=name,
            schedule=ScheduleConfig(max_staleness=4, groups_per_step=16, group_size=8),
            objective=PpoClip(clip_low=0.2, clip_high=0.2),
            trainer=TrainerConfig(
                lr=5e-4, lr_schedule="linear", warmup_steps=5, minibatches_per_batch=4
            ),
        )
        return with_changes(override(config, {"old_logps.route": route, **values}), changes)

    recipe.__name__ = name
    recipe.__doc__ = (
        f"AReaL, {about}\n\nTokens are up to 4 versions old. The desk and the model are those of "
        "`retail`. It has not been measured."
    )
    return recipe


RECIPES = (
    areal(
        "areal_naive",
        "naive: PPO whose old policy is the engine's. The clip acts on pi / mu.",
        "rollout",
        {"correction.mode": "none"},
    ),
    areal(
        "areal_decoupled",
        "decoupled: the clip acts on pi / pi_prox, with pi_prox recomputed for each batch.",
        "current_recompute",
        DECOUPLED,
    ),
    areal(
        "areal_loglinear",
        "decoupled: log pi_prox is between log mu and log pi, by the token's age.",
        "interp_prox_loglinear",
        {**DECOUPLED, "old_logps.fresh": "behavior", "old_logps.baseline": True},
    ),
    areal(
        "areal_m2po",
        "decoupled, recomputed, with M2PO's mask of the largest pi_prox / mu.",
        "current_recompute",
        {**DECOUPLED, "techniques": "m2po", "m2po.of": "discrepancy", "m2po.over": "all"},
    ),
)
