"""Texts for the pages of a run: its key figures, and the meaning of the two policy ratios.

For each token, log D = old_logp - behavior_logp and log S = logp - old_logp. A route is a method to
compute `old_logp`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from unstale.config.routes import exact_routes
from unstale.observe.words import amount, percent


def tiles(figures: Mapping[str, float | None], failed: int) -> list[tuple[str, str, str]]:
    """Return the eight key figures of a run that all pages show.

    Each is a tuple: name, formatted value, and an explanation such as the unit. `failed` is the
    number of failed episodes.
    """
    return [
        (name, show(figures[key]), about.format(bound=amount(figures["staleness_bound"])))
        for name, key, show, about in _TILES
    ] + [("failed", str(failed), "episodes")]


def _per_cent(share: float | None) -> str:
    return percent(share, 1)


_TILES: tuple[tuple[str, str, Callable[[float | None], str], str], ...] = (
    ("staleness, max", "staleness_max", amount, "bound {bound}"),
    ("mixed versions", "mixed", percent, "of the episodes"),
    ("kept", "kept", _per_cent, "of the tokens with an advantage"),
    ("clipped", "clipped", _per_cent, "of the tokens with an advantage"),
    ("engine", "engine_tokens_per_s", amount, "tokens per second"),
    ("trainer", "trainer_tokens_per_s", lambda rate: amount(rate or None), "tokens per second"),
    ("trained on", "trained_tokens", amount, "action tokens"),
)

MEANS = {
    "mixed": "schedule/mixed_version_share",
    "kept": "correction/kept_share",
    "clipped": "objective/clip_share",
    "engine_tokens_per_s": "engine/sampled_tokens_per_s",
    "trainer_tokens_per_s": "trainer/tokens_per_s",
    "log_d": "correction/log_d_abs_mean",
    "log_s": "objective/log_s_abs_mean",
}
"""The metric of each key figure, by the figure's name. A figure is the mean of its metric over the
steps.
"""


def is_exact(setting: Any) -> bool:
    """Return True if a run computes `old_logp` of each token with the weights that sampled it.

    `setting(name)` returns the value of one of the run's options. For a configuration in memory,
    use `OldLogpsConfig.exact`.
    """
    return (setting("old_logps.fallback") or setting("old_logps.route")) in exact_routes()


def factor_names(route: str, *, exact: bool) -> tuple[str, str]:
    """Return two sentences on what log D and log S measure when `route` computes `old_logp`.

    `exact` is True if the route uses the weights that sampled each token.
    """
    if exact:
        return (
            "log D compares engine and trainer with the same weights. It shows differences in "
            "numerics, which should not depend on the age of a token.",
            "log S compares the current weights with those that sampled the token. It shows "
            "staleness, which should grow with age.",
        )
    if route == "rollout":
        return (
            "log D is 0 by construction, because old_logp is the engine's log-probability.",
            "log S therefore contains both discrepancy and staleness.",
        )
    return (
        f"Under {route}, log D (old_logp - behavior_logp) mixes discrepancy with part of the "
        "staleness.",
        "log S (logp - old_logp) contains only the remaining staleness.",
    )


def meanings(route: str, *, exact: bool) -> tuple[str, str]:
    """Return in a few words what D and S contain when `route` computes `old_logp`.

    `exact` is True if the route uses the weights that sampled each token.
    """
    if exact:
        return "discrepancy", "staleness"
    if route == "rollout":
        return "0 by construction", "discrepancy and staleness"
    return "mixed", "remaining staleness"
