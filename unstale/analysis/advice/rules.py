"""Draw conclusions about a run's route and thresholds from its figures.

A route is a method to obtain old log-probabilities. A rule is a function that returns a conclusion,
or None if the figures do not support one. Rules read only `Evidence`, so equal evidence gives equal
advice.
"""

from collections.abc import Sequence

from unstale.analysis.advice import symptoms, thresholds
from unstale.analysis.advice.conclusion import Conclusion, Rule
from unstale.analysis.advice.evidence import Evidence
from unstale.analysis.advice.remedies import (
    accepted,
    accepted_quietly,
    cheapest_exact,
    repeat_longer,
    repeat_with_audit,
    select_route,
)
from unstale.analysis.advice.samples import is_of_tokens
from unstale.config.routes import routes
from unstale.lint.finding import Fix
from unstale.observe.words import amount, percent

SAME = 0.001
"""Two routes (ways to get `old_logp`) count as equal if the thresholds on D and S stop less than
this share of tokens with only one of them. A clip of PPO typically stops 1% to 5% of the tokens.
"""
SAME_OF_STOPPED = 0.05
"""If thresholds stop a share s of the tokens, the limit `SAME` is raised to this multiple of s. A
clip on the ratio of sequences may stop half of the tokens.
"""
PART = 0.05
"""Smallest var log D / (var log D + var log S) at which a way to reduce D is suggested. D = pi_old
/ mu is the discrepancy of trainer and engine, and S = pi / pi_old the staleness ratio.
"""
LARGE_ERROR = 0.1
"""Smallest size of log D (old_logp - behavior_logp), or of an error of `old_logp`, that leads to a
conclusion. The unit is the distance in nats of the nearest threshold from a ratio of 1.
"""
CORRELATED = 0.2
"""Smallest |correlation| of log D (old_logp - behavior_logp) and log S (logp - old_logp) that the
advice mentions.
"""
BUSY = 0.03
"""Smallest share of a step's time spent on `old_logp` at which a cheaper route is suggested."""
SEE_COMPARISONS = "Success was compared in other runs: see the table of comparisons"
"""Last sentence of reasons that count stopped tokens: such counts do not show which route learns
better.
"""


def conclude(evidence: Evidence) -> list[Conclusion]:
    """Return the conclusions that a run's figures support. Rules are applied in the order of
    `RULES`.
    """
    found = [rule(evidence) for rule in RULES]
    return [conclusion for conclusion in found if conclusion]


def _nothing_yet(evidence: Evidence) -> Conclusion | None:
    if evidence.get("steps"):
        return None
    return Conclusion(
        name="nothing_yet",
        text="The run has not finished a step, so there is nothing to advise on.",
        reason="Advice is computed from the metrics and the journal of trained steps",
    )


def _one_ratio_is_enough(evidence: Evidence) -> Conclusion | None:
    high = evidence.get("changed/rollout_high")
    if high is None or high >= _same(evidence):
        return None
    text = "These thresholds do not need the split: a clip on pi / mu decides nearly the same."
    route_share = evidence.get("route_share") or 0.0
    options: Fix = {}
    # Without a band, a correction limits the weight D, and `rollout` would not.
    if evidence.route != "rollout" and evidence.limits.band is not None:
        options = accepted(evidence.config, select_route(evidence.config, "rollout"))
        waits = evidence.get("wait_s") or 0.0
        if options and route_share >= BUSY and waits < (evidence.get("route_s") or 0.0):
            text += f" The route `rollout` would save at most {percent(route_share)} of a step."
    return Conclusion(
        name="one_ratio_is_enough",
        text=text,
        reason="If the clip acted on pi / mu, without a correction of D (`rollout`), it would stop "
        f"or pass at most {percent(high, 2)} of the tokens differently (95% interval). This counts "
        f"decisions at the present thresholds. {SEE_COMPARISONS}",
        figures=(*_changed(evidence), "stopped_share", "sample_tokens"),
        options=options,
    )


def _split_decides(evidence: Evidence) -> Conclusion | None:
    low, share = evidence.get("changed/rollout_low"), evidence.get("changed/rollout")
    if low is None or share is None or low < _same(evidence):
        return None
    old = evidence.config.old_logps
    stopped = percent(evidence.get("stopped_share"), 2)
    text = f"One ratio would treat {percent(share, 2)} of the tokens differently; exact ratios "
    text += f"stop {stopped}."
    if not old.exact:
        text += " An exact route would decide them by each factor alone."
    return Conclusion(
        name="split_decides",
        text=text,
        reason="If the clip acted on pi / mu, without a correction of D (`rollout`), it would stop "
        "tokens for numerical differences, and pass stale ones. With an exact route the thresholds "
        f"act on what they are meant for.{_noise(evidence)} This counts decisions. "
        f"{SEE_COMPARISONS}",
        figures=(
            *_changed(evidence),
            "stopped_share",
            "nearest_threshold",
            "log_d_unit_sd",
            "log_s_unit_sd",
            "unit_tokens",
            *([] if old.exact else ["clip_f1"]),
            "sample_tokens",
        ),
        options={} if old.exact else cheapest_exact(evidence)[0],
    )


def _too_few_tokens(evidence: Evidence) -> Conclusion | None:
    low, high = (evidence.get(f"changed/rollout_{end}") for end in ("low", "high"))
    same = _same(evidence)
    if low is None or high is None or low >= same or high < same:
        return None
    return Conclusion(
        name="too_few_tokens",
        text="Too few tokens to decide if one ratio would be enough.",
        reason=f"Between {percent(low, 2)} and {percent(high, 2)} of the tokens would be treated "
        f"differently (95% interval), and the limit is {percent(same, 2)}. A step adds at most 256 "
        "tokens to the sample, or 64 of the audit",
        figures=("changed/rollout", "sample_tokens"),
        command=repeat_longer(evidence, "changed/rollout", same),
    )


def _parts(evidence: Evidence) -> Conclusion | None:
    share = evidence.get("d_variance_share")
    if share is None:
        return None
    of_d, of_s = (
        "under 0.1%" if part < 0.001 else "over 99.9%" if part > 0.999 else percent(part, 1)
        for part in (share, 1 - share)
    )
    if evidence.get("staleness_max") == 0:
        text = "No token is stale, so pi / mu before the step is the discrepancy D alone."
    elif share >= 0.5:
        text = f"The discrepancy D varies most: it has {of_d} of the variance, staleness S {of_s}."
    else:
        text = f"The staleness S varies most: it has {of_s} of the variance, discrepancy D {of_d}."
    reason = "Variances of log D and log S over tokens, as parts of their sum"
    correlation = evidence.get("log_d_log_s_corr")
    if evidence.source == "lag 0":
        reason = "The ratio of a token of lag 0 contains no staleness, so its spread is that of D"
    elif correlation is not None and abs(correlation) >= CORRELATED:
        way = "less" if correlation < 0 else "more"
        reason += f". The two are correlated, so pi / mu varies {way} than its parts suggest"
    return Conclusion(
        name="parts",
        text=text,
        reason=reason,
        figures=(
            "log_d_sd", "log_s_sd", "log_ratio_sd", "d_variance_share", "d_variance_share_se",
            "log_d_log_s_corr", "sample_tokens",
        ),
    )  # fmt: skip


def _removable_discrepancy(evidence: Evidence) -> Conclusion | None:
    """Suggest an option that removes a cause of the discrepancy D = pi_old / mu, if D is large
    enough.
    """
    share = evidence.get("d_variance_share")
    size = _d_by_threshold(evidence)
    if share is None or (share < PART and (size or 0.0) < 1):
        return None
    if size is not None and size < LARGE_ERROR:
        return None  # no threshold is near enough for D to matter
    config = evidence.config
    fmt = config.engine.quantise
    causes: list[tuple[bool, str, Fix]] = [
        (
            fmt != "none" and config.trainer.quantise == "none",
            f"the engine rounds weights to {fmt}, and the trainer does not",
            {"trainer.quantise": fmt},
        ),
        (
            fmt != "none" and config.trainer.quantise == "none",
            f"the engine rounds weights to {fmt} and activations to bfloat16, and the trainer does "
            "neither",
            {"trainer.quantise": fmt, "engine.dtype": "float32"},
        ),
        (
            evidence.is_moe and not config.trainer.routing_replay,
            "engine and trainer choose other experts for some tokens",
            {"trainer.routing_replay": True},
        ),
        (
            config.engine.dtype == "bfloat16" and config.trainer.dtype == "float32",
            "the engine computes in bfloat16, and the trainer in float32",
            {"engine.dtype": "float32"},
        ),
    ]
    for applies, cause, fix in causes:
        options = accepted_quietly(config, fix) if applies else {}
        if options:
            return Conclusion(
                name="removable_discrepancy",
                text=f"A part of the discrepancy can be removed: {cause}.",
                reason="This option removes one of the causes of D. With a smaller D less depends "
                "on the route",
                figures=("d_variance_share", "log_d_sd", "log_d_abs_p99", "nearest_threshold"),
                options=options,
            )
    return None


def _confounds(evidence: Evidence) -> Conclusion | None:
    """Report the share of tokens that thresholds stop only with the run's `old_logp`, or only with
    the exact one.
    """
    low, share = evidence.get("changed_by_route_low"), evidence.get("changed_by_route")
    if low is None or share is None or low < _same(evidence) or evidence.route == "rollout":
        return None  # `split_decides` is about `rollout`
    meaning = evidence.config.old_logps.meaning(evidence.config)
    return Conclusion(
        name="confounds",
        text=f"The route {evidence.route} treats {percent(share, 2)} of the tokens differently "
        "from exact values.",
        reason=f"Its D contains {meaning.d}. Its S contains {meaning.s}",
        figures=(
            "changed_by_route", "passed_by_route", "stopped_share", "staleness_leak",
            "discrepancy_leak", "mask_f1", "clip_f1",
        ),
        options=cheapest_exact(evidence)[0],
    )  # fmt: skip


def _nearer_route(evidence: Evidence) -> Conclusion | None:
    """Suggest a way to get `old_logp` without forward passes, if thresholds stop nearly the same
    tokens with it as with exact values.
    """
    low, share = evidence.get("changed_by_route_low"), evidence.get("changed_by_route")
    free = {
        name: figure
        for name in _changed(evidence)
        if (figure := evidence.get(f"{name}_high")) is not None
        and routes()[name.removeprefix("changed/")]().needs.forwards == "none"
    }
    if low is None or share is None or not free:
        return None
    best = min(free, key=lambda name: (free[name], name))
    route = best.removeprefix("changed/")
    if free[best] >= low or route == evidence.route:
        return None
    options = accepted(evidence.config, select_route(evidence.config, route))
    return Conclusion(
        name="nearer_route",
        text=f"The route {route} costs no time and decides more like exact values than "
        f"{evidence.route} does.",
        reason="Counted are the tokens that exact values would stop or pass differently, at the "
        "present thresholds",
        figures=("changed_by_route", *_changed(evidence), "sample_tokens"),
        options=options,
    )


def _large_error(evidence: Evidence) -> Conclusion | None:
    error = evidence.get("audit_error")
    limit = evidence.limits.nearest
    if evidence.config.old_logps.exact or error is None or limit is None:
        return None
    if not all(is_of_tokens(limit) for limit in evidence.limits.limits):
        return None  # errors of tokens cancel in part in the ratio of a sequence
    near = limit.narrowest
    if error < LARGE_ERROR * near:
        return None
    return Conclusion(
        name="large_error",
        text=f"The old log-probability of {evidence.route} is wrong by {percent(error / near)} of "
        "the nearest threshold, on average.",
        reason=f"The audit found a mean error of {amount(error)} nats, and a threshold is "
        f"{amount(near)} nats from 1 on a logarithmic scale. The error moves a token that far "
        "between D and S",
        figures=("audit_error", "audit_noise", "staleness_leak", "discrepancy_leak",
                 "audit_tokens"),
        options=cheapest_exact(evidence)[0],
    )  # fmt: skip


def _not_exact(evidence: Evidence) -> Conclusion | None:
    """Report that an audit found errors in the `old_logp` of a route that should be exact."""
    error, noise = evidence.get("audit_error"), evidence.get("audit_noise")
    if not evidence.config.old_logps.exact or error is None or noise is None:
        return None
    if error <= 10 * noise:
        return None
    return Conclusion(
        name="not_exact",
        text=f"The route {evidence.route} is exact, but the audit found an error above the noise.",
        reason=f"The mean error is {amount(error)} nats, more than ten times what another packing "
        f"changes ({amount(noise)}). Measure it token by token with `unstale audit`, and report it "
        "as a defect",
        figures=("audit_error", "audit_noise", "exact_share", "audit_tokens"),
    )


def _cost(evidence: Evidence) -> Conclusion | None:
    """Report the share of a step's time spent on `old_logp`, and suggest a cheaper exact route."""
    share, seconds = evidence.get("route_share"), evidence.get("route_s")
    step_s = evidence.get("step_s")
    if share is None or seconds is None or step_s is None:
        return None
    text = f"{evidence.route} takes {percent(share, 1)} of a step: {amount(seconds)} of "
    text += f"{amount(step_s)} s."
    options, about = cheapest_exact(evidence)
    exact = evidence.config.old_logps.exact
    if exact and share < BUSY:
        options, about = {}, ""
    return Conclusion(
        name="cost",
        text=text,
        reason="Medians of the run's own timers. The time of the route includes the correction and "
        f"log-probabilities of a reference policy, but no scoring while the trainer waits. "
        f"{about}".strip(),
        figures=(
            "route_s",
            "step_s",
            "wait_s",
            "update_s",
            "scoring_s",
            "versions_per_episode",
            "live_versions",
            "route_mb",
        ),
        options=options if exact else {},
    )


def _not_audited(evidence: Evidence) -> Conclusion | None:
    """Suggest a command that measures the errors of an inexact `old_logp` that no audit has
    measured.
    """
    if evidence.config.old_logps.exact or not evidence.get("steps"):
        return None
    if evidence.source in ("audited", "replayed"):
        return None
    known = (
        "The spread of D is known from tokens of lag 0, but not D and S of a stale token"
        if evidence.source == "lag 0"
        else "Neither D nor S is known: only their product is"
    )
    return Conclusion(
        name="not_audited",
        text=f"The effect of an exact route on this run is unknown: {evidence.route} is not exact, "
        "and there was no audit.",
        reason=f"{known}. The command below repeats the first steps of this run with an audit, "
        "which scores half of the sequences with the weights that sampled them",
        command=repeat_with_audit(evidence),
    )


RULES: Sequence[Rule] = (
    _nothing_yet,
    _not_exact,
    _one_ratio_is_enough,
    _split_decides,
    _too_few_tokens,
    _confounds,
    _nearer_route,
    _large_error,
    _not_audited,
    _parts,
    _removable_discrepancy,
    thresholds.band_is_random,
    thresholds.clip_is_tight,
    thresholds.clip_never_acts,
    thresholds.fitting_thresholds,
    *symptoms.RULES,
    _cost,
)


def _changed(evidence: Evidence) -> list[str]:
    """Return the names `changed/ROUTE` of figures in `evidence`, without the ends of their
    intervals.
    """
    return [
        name
        for name in sorted(evidence.figures)
        if name.startswith("changed/") and not name.endswith(("_low", "_high"))
    ]


def _same(evidence: Evidence) -> float:
    """Return the share of tokens stopped or passed differently below which two routes count as
    equal.
    """
    return max(SAME, SAME_OF_STOPPED * (evidence.get("stopped_share") or 0.0))


def _noise(evidence: Evidence) -> str:
    """Return a sentence that compares log D with the nearest threshold. Empty if log D is not
    known.
    """
    near, of_unit = evidence.limits.nearest, evidence.get("log_d_unit_sd")
    of_token = evidence.get("log_d_abs_p99")
    if near is None or (of_unit is None and of_token is None):
        return ""
    what, size, how = (
        ("move 1% of the tokens by", of_token or 0.0, " or more")
        if of_unit is None
        else (f"move the ratio of a {near.unit} by", of_unit, " (standard deviation)")
    )
    times = f"{amount(size / near.narrowest)} times the nearest threshold"
    return f" Numerical differences alone {what} {times}{how}."


def _d_by_threshold(evidence: Evidence) -> float | None:
    """Return a large value of |log D| (its 99th percentile, or twice its standard deviation over
    units of tokens) divided by the nearest threshold. None if either is not known.
    """
    near, of_unit = evidence.limits.nearest, evidence.get("log_d_unit_sd")
    size = evidence.get("log_d_abs_p99") if of_unit is None else 2 * of_unit
    return None if near is None or size is None else size / near.narrowest
