"""Refuse options that cannot be used if placed text has a loss (`objective.placed`).

Placed text is text in a reply that the policy did not sample there.
"""

from typing import TYPE_CHECKING

from unstale.config.checks import ConfigError
from unstale.config.techniques import chosen

if TYPE_CHECKING:
    from unstale.config import RunConfig

REFUSED = {
    "distiller": "which is not built with it, because a teacher scores sampled tokens only",
    "objective": "whose loss is that of sampled tokens",
    "ratio": "which needs the behavior_logp of every token",
}
"""Slots (kinds of techniques) that cannot be used if placed text has a loss, each with the
reason.
"""
HAVE_PLACED_TEXT = ("opmd",)
"""Techniques that can be used with placed text although others of their slot cannot, because they
also compute a loss for placed text.
"""


def check_placed(config: "RunConfig") -> None:
    """Raise `ConfigError` for options that cannot be used if placed text has a loss."""
    mode = config.objective.placed
    if mode == "mask":
        return
    needed = _needs(config)
    if mode == "guided":
        needed |= _guided_needs(config)
    for need, (is_met, reason) in needed.items():
        if not is_met:
            raise ConfigError(f"objective.placed = {mode} needs {need}: {reason}")
    for entry in chosen(config.techniques):
        if entry.slot in REFUSED and entry.name not in HAVE_PLACED_TEXT:
            raise ConfigError(
                f"objective.placed = {mode} cannot be used with {entry.name}, "
                f"{REFUSED[entry.slot]}: remove it from --techniques, or set "
                "--objective.placed mask"
            )


def _needs(config: "RunConfig") -> dict[str, tuple[bool, str]]:
    objective = config.objective
    whole = "a ratio over several tokens would have some that were sampled elsewhere"
    return {
        "objective.unit = token": (objective.unit == "token", whole),
        "another objective.loss_type, such as ppo_clip": (
            objective.ratio is None and "sequence" not in objective.inputs,
            f"{objective.loss_type} is computed over whole sequences, and {whole}",
        ),
        "another advantage.estimator than gae": (
            config.advantage.estimator != "gae",
            "a critic forecasts before sampled tokens only",
        ),
        "a route that computes old_logp once per batch": (
            not config.old_logps.needs.inline,
            f"{config.old_logps.route} computes it in every training pass",
        ),
        "trainer.routing_replay = false": (
            not config.trainer.routing_replay,
            "no experts were recorded for placed text",
        ),
    }


def _guided_needs(config: "RunConfig") -> dict[str, tuple[bool, str]]:
    needs, route = config.old_logps.needs, config.old_logps.route
    return {
        "old_logps.route = snapshot_old": (
            config.old_logps.exact and needs.snapshots and not needs.idle,
            f"the version that sampled the text must score it in two contexts, and {route} "
            "scores sampled tokens only where they stand",
        ),
        "correction.unit = token": (
            config.correction.unit == "token",
            "the D of placed text is that of each token",
        ),
        "correction.normalize = false": (
            not config.correction.normalize,
            "the mean weight is that of sampled tokens",
        ),
        "no technique that stores groups, such as replay": (
            all(entry.slot != "source" for entry in chosen(config.techniques)),
            "the weight of placed text beside stored groups is not known",
        ),
        "engine.keep_cache = false": (
            not config.engine.keep_cache,
            "text over a KV cache of older weights has no single version that sampled it",
        ),
        "sampling from the whole vocabulary": (
            not config.engine.truncated_by,
            f"with {config.engine.truncated_by}, no kept sets are known for the recorded context",
        ),
    }
