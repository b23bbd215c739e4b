"""Sentences for the pages of a run: figures, settings and the two policy ratios.

For each token, log D = old_logp - behavior_logp and log S = logp - old_logp. A route is a method to
compute old_logp.
"""

from collections.abc import Callable, Mapping
from typing import Any

from unstale.config import ConfigError, ObjectiveConfig, staleness_bound
from unstale.config.objectives import objectives
from unstale.config.options import options
from unstale.config.routes import exact_routes, routes
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
"""Key figures that are means of a metric over the steps of a run -> the metric."""


def is_exact(setting: Any) -> bool:
    """Return True if a run's `old_logp` of each token is that of the weights which sampled it.

    `setting(name)` returns the value of an option in a run folder. For a configuration in memory,
    use `OldLogpsConfig.exact`.
    """
    return (setting("old_logps.fallback") or setting("old_logps.route")) in exact_routes()


def factor_names(route: str, *, exact: bool) -> tuple[str, str]:
    """Return two sentences on what log D and log S contain with a way to get `old_logp` (route)."""
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
    """Return in words what D and S contain with a route, which is the way to get `old_logp`."""
    if exact:
        return "discrepancy", "staleness"
    if route == "rollout":
        return "0 by construction", "discrepancy and staleness"
    return "mixed", "remaining staleness"


def semantics(setting: Any, exact_share: float | None) -> list[tuple[str, str]]:
    """Return explanations of a run's settings, as (heading, sentence).

    `setting(name)` returns the value of an option in a run folder. `exact_share` is the measured
    share of tokens whose old_logp was computed with the version that sampled them, or None.
    """
    route = str(setting("old_logps.route", "unknown"))
    if setting("schedule.max_staleness") == 0:
        schedule = "Synchronous: generation waits for every step."
    else:
        schedule = (
            "Asynchronous: generation continues while the trainer works. Tokens are at most "
            f"{_bound(setting)} versions old, and no episode is dropped for being slow."
        )
    return [
        ("Old log-probabilities", _route_words(route, exact_share)),
        ("Discrepancy", _control_words(setting)),
        ("Staleness", _objective_words(setting)),
        ("Schedule", schedule),
    ]


def _bound(setting: Any) -> str:
    names = ("max_staleness", "groups_per_step", "lookahead_window")
    values = [setting(f"schedule.{name}") for name in names]
    if not all(isinstance(value, int) for value in values):
        return "an unknown number of"
    return str(staleness_bound(*values))


def _route_words(route: str, exact_share: float | None) -> str:
    if exact_share is None:
        return route_about(route)
    share = f" Measured: exact for {percent(exact_share, 1)} of the tokens with an advantage."
    return route_about(route) + share


def route_about(route: str) -> str:
    """Return a sentence on how the method (route) with this name computes `old_logp`."""
    if route == "unknown":
        return "Not known: the configuration could not be read."
    if route not in routes():
        return f"{route} is not a route of this version of unstale."
    return routes()[route].docs.report


def _control_words(setting: Any) -> str:
    high = setting("correction.high")
    band = f"[{setting('correction.low')}, {high}], per {setting('correction.unit')}"
    ratio = "D = π_old / μ" if is_exact(setting) else "the approximation of D = π_old / μ"
    match setting("correction.mode"):
        case "none":
            return f"{_capitalized(ratio)} is not corrected."
        case "mask":
            return f"Tokens with {ratio} outside {band} are dropped."
        case "truncate":
            return f"Tokens are weighted by {ratio}, truncated at {high}."
        case "clamp":
            return f"Tokens are weighted by {ratio}, held within {band}."
        case "mask_weight":
            return f"Tokens are weighted by {ratio} inside {band} and dropped outside."
        case "kpop":
            return f"Tokens are weighted by {ratio}, and dropped {_above_limit(setting)}."
        case "k3_mask":
            return f"Tokens are dropped by {ratio} {_above_limit(setting)}."
    return "Not known."


def _above_limit(setting: Any) -> str:
    name = "D - 1 - log D" if setting("correction.mode") == "k3_mask" else "the binary KL"
    limit, unit = setting("correction.kl_limit"), setting("correction.unit")
    return f"where {name} is above {limit}, per {unit}"


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def stored_objective(setting: Any) -> ObjectiveConfig | None:
    """Return the objective of a run from its stored options. None if it cannot be read."""
    kind = setting("objective.loss_type")
    if kind not in objectives():
        return None
    common = {name: setting(f"objective.{name}") for name in ("unit", "aggregate")}
    values = {name: value for name, value in common.items() if value is not None}
    try:
        for name in ObjectiveConfig.own_options()[kind]:  # null is infinity
            values[name] = options()[f"objective.{name}"].read(setting(f"objective.{name}"), name)
        return ObjectiveConfig(loss_type=kind, **values)
    except (ConfigError, TypeError):
        return None


def _objective_words(setting: Any) -> str:
    ratio = "S = π / π_old" if is_exact(setting) else "the approximation of S = π / π_old"
    objective = stored_objective(setting)
    if objective is None:
        return "Not known."
    return f"{_capitalized(ratio)} is limited by {objective.meaning}."
