"""The linter's rules for thresholds that are narrower than numerical noise.

The noise of the discrepancy D = pi_old / mu is that of two forward passes, of trainer and engine.
An engine that rounds to a format of few values (`engine.quantise`) adds noise.
"""

import math
from collections.abc import Iterator

from unstale.config import RunConfig
from unstale.lint.finding import Finding, Fix, use_route
from unstale.lint.semantics import d_is_one, s_is_one

NOISE = 0.02
"""Typical difference of log-probabilities between two forward passes in bfloat16. The passes have
equal weights but pack the sequences differently.
"""
ROUNDING = 1e-5
"""Typical difference of log-probabilities between two forward passes in float32."""
UNIT = 10
"""Factor by which numerical noise is larger in a product of ratios over about 100 tokens, and
smaller in their mean.
"""
FARTHEST = 3
"""The largest noise among about 100 tokens divided by the typical noise, if it is Gaussian."""
RARE = 10
"""The largest noise among the tokens of a batch divided by the typical noise. It is large, because
the noise is not Gaussian.
"""
MIN_CLIP = 1e-3
"""Smallest useful clip range for a token's ratio. One step of learning changes it by more."""
BFLOAT16_D = 0.00067
"""Mean size of log D in nats with a bfloat16 engine, for the policy measured in `QUANTISED_D`."""
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
"""Mean size of log D in nats, by `engine.quantise` and `engine.dtype`. The first number is with
rounding in the engine only, the second with rounding in the trainer, too. It is the table in
docs/quantisation.md.
"""
BAND: Fix = {"correction.low": 0.5, "correction.high": 2.0}
"""The limits on the discrepancy D that fixes suggest. They are wider than its numerical noise."""
TOKEN_CLIP: Fix = {"objective.clip_low": 0.2, "objective.clip_high": 0.28}
TOKEN_RATIO: Fix = {"objective.loss_type": "ppo_clip", "objective.unit": "token", **TOKEN_CLIP}
"""Options that fixes suggest: the staleness ratio is that of a single token, with a usual clip."""


def _noise_of_d(config: RunConfig) -> float:
    """Return the typical size of a token's log discrepancy if engine and trainer work correctly."""
    stale = not config.old_logps.exact and config.schedule.staleness_bound > 0
    bfloat16 = (config.trainer.dtype, config.engine.dtype) != ("float32", "float32")
    bfloat16 = bfloat16 and not config.engine.bitwise
    return max(NOISE if bfloat16 or stale else ROUNDING, _noise_of_format(config))


def _noise_of_format(config: RunConfig) -> float:
    """Return the typical size of a token's log discrepancy that comes from `engine.quantise`.

    0 if the engine does not round.
    """
    engine = config.engine
    if engine.quantise == "none":
        return 0.0
    alone, both = QUANTISED_D[engine.quantise, engine.dtype]
    return NOISE * (alone if config.trainer.quantise == "none" else both) / BFLOAT16_D


def _noise(config: RunConfig, ratio: str) -> float:
    """Return the typical size of numerical noise in the log of a ratio: "D" or "S".

    The ratio is that of a unit, the tokens over which it is aggregated.
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
    """Yield every threshold of the configuration as the name of its ratio, "D" or "S", and a size.

    The size is the absolute value of the log ratio at the threshold, in nats.
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
    """Return a problem if the veto's limit on log D is `low` to `high` times the noise of log D.

    The veto drops sequences with a token whose D is below `correction.token_veto_threshold`.
    `wrong` is the text of the problem, with `{}` in the place of this threshold.
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
    """Warn if S contains the rounding of the engine to its format, so that the clip acts on it."""
    quantise = config.engine.quantise
    if quantise in ("none", config.trainer.quantise) or not d_is_one(config):
        return None
    if config.old_logps.baseline:
        return None
    why = "the clip then drops tokens because the engine rounds, and no correction of D sees it"
    fixes = (use_route(config, "snapshot_old"), *_less_rounding(config))
    return Finding(f"S = pi / mu contains the rounding of the engine to {quantise}", why, fixes)


def idle_format(config: RunConfig) -> Finding | None:
    """Warn if `trainer.quantise`, which rounds as the engine does, hardly reduces the discrepancy
    D.
    """
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
    """Return fixes after which engine and trainer round alike. Empty without `engine.quantise`."""
    if config.engine.quantise == "none":
        return ()
    neither: Fix = {"trainer.quantise": "none", "engine.quantise": "none"}
    return ({"trainer.quantise": config.engine.quantise}, neither)
