"""Rules of advice on a run's thresholds: the band, limits of D, and the clip, limits of S.

D is pi_old / mu, and S is pi / pi_old. The rules find thresholds that act at random or never.
"""

import math

from unstale.analysis.advice.conclusion import Conclusion
from unstale.analysis.advice.evidence import Evidence
from unstale.analysis.advice.remedies import accepted, band_options, outwards
from unstale.analysis.advice.samples import Limit, is_of_tokens
from unstale.lint.finding import Fix
from unstale.observe.words import amount, percent

RANDOM = 0.01
"""Smallest share of tokens dropped by the correction's limits of D (pi_old / mu) that the advice
mentions.
"""
MANY = 0.2
"""If at least this share of the tokens has S (pi / pi_old) outside the clip, the data is too
stale.
"""
NEVER_ACTS = 5.0
"""A clip of S (pi / pi_old) never acts if its nearer end, as log S, is at least this multiple of
the 99.9th percentile of |log S|.
"""
NOISE = 3.0
"""A limit of |log D| (D = pi_old / mu) below this multiple of the numerical noise drops tokens by
chance.
"""
FEW = 4000
"""Smallest sample for advice that a clip never acts: with it, the 95% interval of a share of 0 ends
below `rules.SAME`.
"""


def band_is_random(evidence: Evidence) -> Conclusion | None:
    """Report that the correction's limits of D (pi_old / mu) drop tokens for numerical differences
    only.
    """
    rule, dropped = evidence.config.correction, evidence.get("band_share")
    if dropped is None and evidence.config.old_logps.exact and rule.unit != "token":
        kept = evidence.get("kept_share")
        dropped = None if kept is None or rule.mode not in ("mask", "mask_weight") else 1 - kept
    band, noise = evidence.limits.band, evidence.get("audit_noise")
    inside = is_of_tokens(band) and noise is not None and band.narrowest < NOISE * noise
    if dropped is None or (dropped < RANDOM and not inside):
        return None
    of = "tokens" if rule.unit == "token" else f"tokens, by the {rule.aggregate} of a {rule.unit}"
    options: Fix = {}
    if rule.unit == "token":
        far = 2 * (evidence.get("log_d_abs_p999") or 0.0)
        wide = math.exp(max(far, NOISE * (noise or 0.0)))
        low, high = min(rule.low, 1 / wide), max(rule.high, wide)
        options = accepted(evidence.config, band_options(low, high))
    return Conclusion(
        name="band_is_random",
        text=f"The band [{rule.low:g}, {rule.high:g}] on D drops {percent(dropped, 1)} of the "
        f"{of}, for numerical differences alone.",
        reason="The weights in D are the same for engine and trainer, so D has no part in "
        "learning. A band this narrow drops tokens at random. "
        + ("The one below is twice as wide as D's 99.9th percentile" if options else ""),
        figures=("band_share", "kept_share", "log_d_abs_p99", "log_d_abs_p999", "audit_noise"),
        options=options,
    )


def clip_is_tight(evidence: Evidence) -> Conclusion | None:
    outside = evidence.get("clip_outside_share")
    if outside is None or outside < MANY or not is_of_tokens(evidence.limits.clip):
        return None  # clips on sequences stop many tokens by design
    older = evidence.config.schedule.max_staleness // 2
    return Conclusion(
        name="clip_is_tight",
        text=f"S of {percent(outside)} of the tokens is outside the clip.",
        reason="A stopped token has no gradient. If there are many, data is lost and the rest "
        "is biased. Less stale data, or a smaller learning rate, keeps S near 1",
        figures=("clip_outside_share", "clip_share", "log_s_sd", "staleness_mean"),
        options=accepted(evidence.config, {"schedule.max_staleness": older}) if older else {},
    )


def clip_never_acts(evidence: Evidence) -> Conclusion | None:
    clip, far = evidence.limits.clip, evidence.get("log_s_abs_p999")
    if not is_of_tokens(clip) or far is None or (evidence.get("sample_tokens") or 0) < FEW:
        return None
    if evidence.get("clip_outside_share") or clip.narrowest < NEVER_ACTS * far:
        return None
    return Conclusion(
        name="clip_never_acts",
        text="The clip on S never acts, so it does not limit the staleness.",
        reason=f"abs(log S) of 99.9% of the tokens is below {amount(far)} nats, and the clip is "
        f"at {amount(clip.narrowest)}. Staler data would still be within it",
        figures=("clip_outside_share", "log_s_abs_p999", "staleness_mean", "sample_tokens"),
    )


def fitting_thresholds(evidence: Evidence) -> Conclusion | None:
    """Report ranges of D (pi_old / mu) and S (pi / pi_old) outside which only 0.1% or 1% of the
    exact values are.
    """
    band, clip = evidence.limits.band, evidence.limits.clip
    names = (
        "log_d_abs_p999" if band is None or band.tokens == 1 else "log_d_unit_abs_p99",
        "log_s_abs_p99" if clip is None or clip.tokens == 1 else "log_s_unit_abs_p99",
    )
    of_d, of_s = (evidence.get(name) for name in names)
    if not of_d:
        return None
    drops = "1%" if "unit" in names[0] else "0.1%"
    text = f"A band on D of {_range(of_d)} would drop at most {drops} of the {_units(band)}"
    if of_s:
        text += f", and a clip on S of {_range(of_s)} would stop at most 1% of the {_units(clip)}"
    return Conclusion(
        name="fitting_thresholds",
        text=f"{text}.",
        reason="These are percentiles of the exact ratios. They show where a threshold begins to "
        "act, not which one learns best. A band should be wider than D is without a defect; a clip "
        "should be within the spread of S",
        figures=(*names, "unit_tokens", "sample_tokens"),
    )


def _units(limit: Limit | None) -> str:
    """Return the unit of `limit` in the plural, such as `tokens`."""
    return "tokens" if limit is None or limit.tokens == 1 else f"{limit.unit}s"


def _range(log_limit: float) -> str:
    low, high = outwards(math.exp(-log_limit), math.exp(log_limit))
    return f"[{low!r}, {high!r}]"
