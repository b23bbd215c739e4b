"""Rules for thresholds that are narrower than numerical noise.

Thresholds limit D = pi_old / mu and S = pi / pi_old (see `unstale.lint`). D has noise because
trainer and engine compute the same probability in different ways. An engine that rounds numbers to
a format of few values (`engine.quantise`) adds to it.
"""

import math
from collections.abc import Iterator

from unstale.config import RunConfig
from unstale.lint.finding import Finding, Fix, use_route
from unstale.lint.semantics import d_is_one, s_is_one

NOISE = 0.02
"""Typical difference, in nats, of log-probabilities between two forward passes in bfloat16 with
equal weights, which pack the sequences differently.
"""
ROUNDING = 1e-5
"""Typical difference, in nats, of log-probabilities between two forward passes in float32."""
UNIT = 10
"""Numerical noise is larger by this factor in the product of about 100 tokens' ratios, and smaller
by it in their mean.
"""
FARTHEST = 3
"""The largest noise among about 100 tokens, divided by the typical noise. Noise is taken as
Gaussian.
"""
RARE = 10
"""The largest noise among the tokens of a batch, divided by the typical noise. It is larger than
for Gaussian noise.
"""
MIN_CLIP = 1e-3
"""Smallest useful clip range for a token's ratio, because one optimizer step changes the ratio
more.
"""
BFLOAT16_D = 0.00067
"""Mean size of log D in nats with a bfloat16 engine, for the policy of `QUANTISED_D`."""
QUANTISED_D = {
    ("fp8", "bfloat16"): (0.0031, 0.0028),
    ("int8", "bfloat16"): (0.0011, 0.0010),
    ("int4", "bfloat16"): (0.0071, 0.0006),
    ("nvfp4", "bfloat16"): (0.0065, 0.00053),
    ("mxfp4", "bfloat16"): (0.0097, 0.00063),
    ("fp8", "float32"): (0.0027, 0.00015),
    ("int8", "float32"): (0.00096, 0.00009),
    ("int4", "float32"): (0.0070, 0.0000005),
    ("nvfp4", "float32"): (0.0065, 0.0000005),
    ("mxfp4", "float32"): (0.0098, 0.0000005),
}
"""Mean size of log D in nats, by `engine.quantise` and `engine.dtype`. Of each pair, the first
number is with rounding in the engine only, the second with rounding in the trainer, too. They are
measured (docs/quantisation.md).
"""
BAND: Fix = {"correction.low": 0.5, "correction.high": 2.0}
"""The limits on D = pi_old / mu that fixes suggest. They are wider than numerical noise."""
TOKEN_CLIP: Fix = {"objective.clip_low": 0.2, "objective.clip_high": 0.28}
TOKEN_RATIO: Fix = {"objective.loss_type": "ppo_clip", "objective.unit": "token", **TOKEN_CLIP}
"""The options that fixes suggest for S = pi / pi_old: the ratio of a single token, with a usual
clip.
"""


def _noise_of_d(config: RunConfig) -> float:
    """Return the typical size of a token's log D, in nats, if engine and trainer work correctly."""
    stale = not config.old_logps.exact and config.schedule.staleness_bound > 0
    bfloat16 = (config.trainer.dtype, config.engine.dtype) != ("float32", "float32")
    bfloat16 = bfloat16 and not config.engine.bitwise
    return max(NOISE if bfloat16 or stale else ROUNDING, _noise_of_format(config))


def _noise_of_format(config: RunConfig) -> float:
    """Return the part of a token's typical log D, in nats, that comes from `engine.quantise`.

    0 if the engine does not round.
    """
    engine = config.engine
    if engine.quantise == "none":
        return 0.0
    alone, both = QUANTISED_D[engine.quantise, engine.dtype]
    return NOISE * (alone if config.trainer.quantise == "none" else both) / BFLOAT16_D


def _noise(config: RunConfig, ratio: str) -> float:
    """Return the typical numerical noise, in nats, of the log of `ratio`, which is "D" or "S".

    The ratio is that of the tokens over which the configuration aggregates it, such as a sequence.
    """
    # With engine.bitwise a value does not depend on what it is packed with.
    bfloat16 = config.trainer.dtype == "bfloat16" and not config.engine.bitwise
    unit, aggregate = config.correction.unit, config.correction.aggregate
    if ratio == "S":
        unit, aggregate = config.objective.ratio_unit, config.objective.ratio_aggregate
    noise = _noise_of_d(config) if ratio == "D" else (NOISE if bfloat16 else ROUNDING)
    if ratio == "S" and d_is_one(config):
        noise = max(noise, _noise_of_format(config))
    if ratio == "S" and unit != "sequence":
        noise = max(noise, MIN_CLIP)
    if unit == "token":
        return noise
    if aggregate == "mean" and bfloat16:
        return noise  # a mean over tokens reduces only the noise of the engine
    return noise * {"mean": 1 / UNIT, "sum": UNIT, "max": FARTHEST}[aggregate]


def narrow_threshold(config: RunConfig) -> Finding | None:
    narrow = {
        f"{name} at {size:.2g}": name
        for name, size in _thresholds(config)
        if size < _noise(config, name)
    }
    if not narrow:
        return None
    noise = max(_noise(config, name) for name in narrow.values())
    why = f"log ratios of about {noise:.2g} occur without any defect (audit/logp_noise_rms)"
    if _noise_of_format(config):
        why = (
            f"rounding to {config.engine.quantise} changes log-probabilities "
            f"{_noise_of_format(config) / NOISE:.2g} times as much as bfloat16 does "
            f"(docs/quantisation.md), so log ratios of about {noise:.2g} occur without any defect"
        )
    own: Fix = {"correction.kl_limit": 0.1} if config.correction.applies("kl_limit") else BAND
    band = own if "D" in narrow.values() else {}
    wide = config.objective.wide if "S" in narrow.values() else {}
    clip = {f"objective.{name}": limit for name, limit in wide.items()}
    fixes: tuple[Fix, ...] = (
        *_less_rounding(config),
        {"engine.dtype": "float32"},
        {"trainer.dtype": "float32", "engine.dtype": "float32"},
        {**band, **clip},
        {**band, **TOKEN_RATIO} if clip else band,
        {"correction.unit": "sequence", "correction.aggregate": "mean"},
    )
    return Finding(
        f"a threshold is narrower than the noise (log ratio: {', '.join(narrow)})", why, fixes
    )


def narrow_sequence_mask(config: RunConfig) -> Finding | None:
    limit = config.objective.opsm_threshold
    exact = config.engine.bitwise or (config.trainer.dtype, config.engine.dtype) == (
        "float32",
        "float32",
    )
    noise = max(ROUNDING if exact else NOISE, _noise_of_format(config))
    noise = noise / UNIT if exact else noise  # a mean over tokens, see `_noise`
    if not 0 < limit < noise:
        return None
    why = f"a mean log(mu / pi) of about {noise:.2g} occurs without staleness"
    fixes = ({"objective.opsm_threshold": 5 * noise}, {"objective.opsm_threshold": 0.0})
    return Finding(f"opsm_threshold {limit:g} is narrower than the noise", why, fixes)


def _thresholds(config: RunConfig) -> Iterator[tuple[str, float]]:
    """Yield each threshold of the configuration: "D" or "S", and the size of the log ratio at it,
    in nats.
    """
    d = config.correction
    if d.mode != "none" and not d_is_one(config):
        low, high = d.band or (0.0 if d.mode == "truncate" else d.low, d.high)
        yield "D", math.log(high)
        if low:
            yield "D", -math.log(low)
    if not s_is_one(config):
        yield from (("S", size) for size in config.objective.thresholds())


def certain_veto(config: RunConfig) -> Finding | None:
    return _veto(config, 0.0, 1.0, "token_veto_threshold {} drops nearly every sequence")


def noisy_veto(config: RunConfig) -> Finding | None:
    return _veto(config, 1.0, RARE, "token_veto_threshold {} drops sequences for mere noise")


def _veto(config: RunConfig, low: float, high: float, wrong: str) -> Finding | None:
    """Return a problem if the veto's threshold is `low` to `high` times as far from D = 1 as noise
    is.

    The veto drops sequences with a token whose D is below `correction.token_veto_threshold`.
    `wrong` is the text of the problem, with `{}` in place of this threshold.
    """
    threshold = config.correction.token_veto_threshold
    if not threshold or d_is_one(config):
        return None
    noise = _noise_of_d(config)
    size = -math.log(threshold) / noise
    if not (low < size <= high or size == low == 0):
        return None
    why = f"log D of a token is {noise:g} in size without any defect, and far more in the tails"
    fixes: tuple[Fix, ...] = (
        {"correction.token_veto_threshold": 0.01},
        *_less_rounding(config),
        {"trainer.dtype": "float32", "engine.dtype": "float32"},
    )
    return Finding(wrong.format(f"{threshold:g}"), why, fixes)


def mixed_format(config: RunConfig) -> Finding | None:
    """Warn if the engine's rounding to its format is in S, so that the clip acts on it."""
    quantise = config.engine.quantise
    if quantise in ("none", config.trainer.quantise) or not d_is_one(config):
        return None
    if config.old_logps.baseline:
        return None
    why = "the clip then drops tokens because the engine rounds, and no correction of D sees it"
    fixes = (use_route(config, "snapshot_old"), *_less_rounding(config))
    return Finding(f"S = pi / mu contains the rounding of the engine to {quantise}", why, fixes)


def idle_format(config: RunConfig) -> Finding | None:
    """Warn if `trainer.quantise`, which rounds as the engine does, hardly brings D nearer to 1."""
    quantise = config.trainer.quantise
    if quantise == "none":
        return None
    alone, both = QUANTISED_D[quantise, config.engine.dtype]
    if both < alone / 2:
        return None
    why = (
        f"measured, the mean log discrepancy is {both:g} in place of {alone:g}: activations "
        "between two values of the format are rounded differently"
    )
    fixes: tuple[Fix, ...] = ({"engine.dtype": "float32"}, {"trainer.quantise": "none"})
    what = f"trainer.quantise = {quantise} removes little with engine.dtype = {config.engine.dtype}"
    return Finding(what, why, fixes)


def _less_rounding(config: RunConfig) -> tuple[Fix, ...]:
    """Return fixes with which engine and trainer round alike. Empty without `engine.quantise`."""
    if config.engine.quantise == "none":
        return ()
    neither: Fix = {"trainer.quantise": "none", "engine.quantise": "none"}
    return ({"trainer.quantise": config.engine.quantise}, neither)
