"""The linter's rules. Each is a function that returns a finding, or None if nothing is wrong.

D = prox / mu and S = pi / prox are the ratios that `unstale.lint` defines.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from unstale.config import RunConfig
from unstale.config.routes import age_of_average, live_versions
from unstale.lint.semantics import bounds_s, d_is_one, over, s_is_one

NOISE = 0.02
"""Typical difference between the log-probabilities of two forward passes in bfloat16.

The passes have equal weights, but pack the sequences differently.
"""
GSPO_CLIP = 0.02
"""Widest useful clip range of `gspo`, because mean ratios hardly leave it.

The paper of GSPO uses 3e-4 and 4e-4.
"""
LORA_RATE = 1e-5
"""A usual learning rate for training all weights. LoRA adapters need about ten times as much.

Source: Schulman, LoRA Without Regret, 2025.
"""
_EXACT_ROUTE = "--old_logps.route snapshot_old"
_MIXED_CACHE = "tokens sampled with keys and values of older weights belong to no version's policy"


@dataclass(frozen=True, slots=True)
class Finding:
    """A setting that has no effect, or a wrong one."""

    wrong: str
    why: str
    fix: str
    """Options for the command line that remove the finding. Alternatives follow `, or`."""

    def __str__(self) -> str:
        return f"{self.wrong}: {self.why}. Fix: {self.fix}"


def _idle_clip(config: RunConfig) -> Finding | None:
    if not s_is_one(config) or not bounds_s(config) or config.old_logps.baseline:
        return None
    kind = config.objective.kind
    if config.old_logps.needs.inline:
        why = (
            "at this staleness and weight the proxy is the current policy; the whole ratio is in D"
        )
    else:
        why = "one optimizer step per batch: pi is still pi_now; staleness is in D alone"
    baseline = "--old_logps.baseline true for a baseline to compare with"
    fix = ", or ".join(filter(None, [config.old_logps.to_free_s, _EXACT_ROUTE, baseline]))
    return Finding(f"S is identically 1, {kind} can never act", why, fix)


def _idle_control(config: RunConfig) -> Finding | None:
    rule = config.correction
    idle = []
    if rule.control == "mask":
        idle.append("mask")
    if rule.token_veto_threshold > 0:
        idle.append("token_veto_threshold")
    if not idle or not d_is_one(config) or config.old_logps.baseline:
        return None
    why = "the proxy is mu itself, so the discrepancy is in S, where the trust region sees it"
    fix = (
        "--correction.control none --correction.token_veto_threshold 0, "
        f"or {_EXACT_ROUTE}, or --old_logps.baseline true"
    )
    return Finding(f"D is identically 1, {' and '.join(idle)} can never act", why, fix)


def _double_count(config: RunConfig) -> Finding | None:
    control = config.correction.control
    if control not in ("truncate", "clamp", "mask_weight"):
        return None
    if not d_is_one(config) or config.old_logps.baseline:
        return None
    why = "S = pi / mu is the whole ratio, so with this proxy the weight D is 1"
    fix = f"--correction.control none, or {_EXACT_ROUTE}, or --old_logps.baseline true"
    return Finding(f"a weight on D ({control}) beside a loss that is anchored on mu", why, fix)


def _missing_half(config: RunConfig) -> Finding | None:
    if config.correction.control != "none" or config.old_logps.exact or d_is_one(config):
        return None
    if config.schedule.staleness_bound == 0 and not config.old_logps.needs.averages:
        return None
    half = (
        "is not bounded from above"
        if config.correction.token_veto_threshold
        else "is neither bounded nor weighted"
    )
    why = f"{config.old_logps.route} leaves staleness in D, which {config.objective.kind} ignores"
    fix = f"--correction.control mask_weight, or {_EXACT_ROUTE}"
    return Finding(f"half of pi / mu is missing: D {half}", why, fix)


def _kept_cache(config: RunConfig) -> Finding | None:
    if not config.engine.keep_cache or not config.old_logps.partly_exact:
        return None
    why = f"{_MIXED_CACHE}, so no route is exact for them"
    fix = "--engine.keep_cache false, or an approximate route: --old_logps.route ppo_ewma_async"
    return Finding(f"{config.old_logps.route} is exact, and the engine keeps its cache", why, fix)


def _too_few_copies(config: RunConfig) -> Finding | None:
    """Compare the memory limit with the copies of the weights that the route keeps.

    Only full copies have a size that is known before the run. The store checks that of deltas.
    """
    old = config.old_logps
    limit_gb = old.copies_limit_gb
    if not limit_gb:
        return None
    if config.trainer.lora_rank:
        return None  # adapters are small, and their size is unknown before the model is loaded
    bytes_per_weight = 2 if config.trainer.dtype == "bfloat16" else 4
    copy_gb = num_weights(config.policy_folder) * bytes_per_weight / 1e9
    needed = max(2, live_versions(config))  # the newest is kept until the next one is stored
    if needed * copy_gb <= limit_gb:
        return None
    why = (
        f"tokens of {needed} versions can be waiting ({needed * copy_gb:.3g} GB), "
        f"and the store has memory for {int(limit_gb / copy_gb)}"
    )
    needed_gb = math.ceil(needed * copy_gb * 1000) / 1000
    fix = f"--old_logps.memory_gb {needed_gb:g}, or --old_logps.storage delta"
    return Finding("the staleness bound can outrun the versions that are kept", why, fix)


def num_weights(folder: Path) -> int:
    """Return the number of weights in a model folder's safetensors files, from their headers."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            names = file.keys()
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    return total


def _idle_window(config: RunConfig) -> Finding | None:
    schedule = config.schedule
    if schedule.lookahead_window == 1 or schedule.max_staleness > 0:
        return None
    why = "with max_staleness 0 no group beyond the batch is started"
    fix = "--schedule.lookahead_window 1, or --schedule.max_staleness 1"
    return Finding(
        f"a window of {schedule.lookahead_window} positions has nothing to look ahead at", why, fix
    )


def _inline_kept(config: RunConfig) -> Finding | None:
    if not config.old_logps.needs.inline or config.objective.loss_aggregation != "kept":
        return None
    why = f"{config.old_logps.route} computes its proxy in the training passes, after that number"
    fix = "--objective.loss_aggregation action_tokens"
    return Finding("the number of kept tokens is not known in time", why, fix)


def _inline_normalized(config: RunConfig) -> Finding | None:
    if not config.correction.normalize or not config.old_logps.needs.inline:
        return None
    why = (
        f"{config.old_logps.route} computes D in the training passes, each for a part of the batch"
    )
    fix = f"--correction.normalize false, or {_EXACT_ROUTE}"
    return Finding("the mean weight of the batch is not known in time", why, fix)


def _idle_reset(config: RunConfig) -> Finding | None:
    rule = config.correction
    if not config.old_logps.resets or rule.token_veto_threshold:
        return None
    if rule.control not in ("none", "truncate", "clamp"):
        return None
    why = f"correction.control {rule.control} keeps every token, so the kept share never falls"
    fix = "--correction.control mask_weight, or --old_logps.reset_below 0"
    return Finding("the average can never be reset", why, fix)


def _gspo_unit(config: RunConfig) -> Finding | None:
    rule = config.objective
    if rule.kind != "gspo" or (rule.unit in ("token", "sequence") and rule.aggregate == "mean"):
        return None
    why = "gspo is the clip on the mean over a sequence"
    fix = "--objective.unit sequence --objective.aggregate mean, or --objective.kind ppo_clip"
    return Finding(f"gspo cannot take S as the {over(rule.unit, rule.aggregate)}", why, fix)


def _wide_gspo(config: RunConfig) -> Finding | None:
    rule = config.objective
    if rule.kind != "gspo" or max(rule.clip_low, rule.clip_high) <= GSPO_CLIP:
        return None
    why = "the mean ratio of a sequence hardly ever leaves it"
    fix = "--objective.clip_low 3e-4 --objective.clip_high 4e-4"
    return Finding(
        f"gspo with the band of a single token ({rule.clip_low:g}, {rule.clip_high:g})", why, fix
    )


def _free_staleness(config: RunConfig) -> Finding | None:
    bound = config.schedule.staleness_bound
    if bounds_s(config) or s_is_one(config) or bound == 0:
        return None
    why = f"data is up to {bound} versions old, and nothing keeps pi near the sampling policy"
    return Finding("nothing bounds S", why, "--objective.kind ppo_clip")


def _wrong_age(config: RunConfig) -> Finding | None:
    old = config.old_logps
    bound = config.schedule.staleness_bound
    if old.decay is None:
        return None
    age = age_of_average(old, config)
    if bound / 2 <= age <= bound:
        return None
    wanted = max(1, 3 * bound / 4) * old.updates_per_version(
        config
    )  # about the mean staleness with a full queue
    why = "D gets the difference in age, with a negative sign where the average is older"
    beta = wanted / (wanted + 1)
    fix = f"--old_logps.beta {beta:.3g}, or --old_logps.route ppo_ewma_async, or {_EXACT_ROUTE}"
    return Finding(f"the average is {age:.2g} versions old, the tokens 0 to {bound}", why, fix)


def _mixed_cache(config: RunConfig) -> Finding | None:
    if not config.engine.keep_cache or _kept_cache(config):
        return None
    why = f"{_MIXED_CACHE}, and D includes the difference"
    return Finding("the engine keeps its cache", why, "--engine.keep_cache false")


def _narrow_threshold(config: RunConfig) -> Finding | None:
    trainer = config.trainer.dtype == "bfloat16"
    engine = config.engine.dtype == "bfloat16"
    is_mean = config.correction.unit != "token" and config.correction.aggregate == "mean"
    noisy = {"D": trainer or (engine and not is_mean), "S": trainer}  # a mean cancels the noise
    narrow = [
        f"{name} at {size:.2g}"
        for name, size in _thresholds(config)
        if noisy[name] and size < NOISE
    ]
    if not narrow:
        return None
    pair = "two passes of the trainer" if trainer else "engine and trainer"
    why = (
        f"in bfloat16, log-probabilities of {pair} with the same weights differ by about {NOISE:g} "
        "(audit/logp_noise_rms)"
    )
    fix = (
        "wider thresholds, or --trainer.dtype float32 --engine.dtype float32, "
        "or a mean over a sequence for D"
    )
    return Finding(
        f"a threshold is narrower than the noise (log ratio: {', '.join(narrow)})", why, fix
    )


def _thresholds(config: RunConfig) -> Iterator[tuple[str, float]]:
    """Yield "D" or "S", and the size of the log ratio, for every threshold of the configuration."""
    d = config.correction
    s = config.objective
    if d.control != "none" and not d_is_one(config):
        yield "D", math.log(d.high)
        if d.control != "truncate" and d.low:
            yield "D", -math.log(d.low)
    if s.kind in ("ppo_clip", "dual_clip", "gspo", "cispo") and not s_is_one(config):
        yield "S", math.log1p(s.clip_high)
        if s.clip_low < 1:
            yield "S", -math.log1p(-s.clip_low)


def _timed(config: RunConfig) -> Finding | None:
    if not config.deterministic or not config.minutes:
        return None
    why = "the number of steps would depend on the machine, so two runs would differ"
    return Finding(
        "a deterministic run that ends by the clock", why, "--minutes 0, or --deterministic false"
    )


def _slow_adapters(config: RunConfig) -> Finding | None:
    if not config.trainer.lora_rank or config.trainer.lr > LORA_RATE:
        return None
    rate = config.trainer.lr
    why = "this is a rate for all weights; adapters learn best at about ten times that"
    return Finding(f"adapters at a learning rate of {rate:g}", why, f"--trainer.lr {10 * rate:g}")


Rule = Callable[[RunConfig], Finding | None]


REFUSALS: Sequence[Rule] = (
    _idle_clip,
    _idle_control,
    _double_count,
    _missing_half,
    _kept_cache,
    _too_few_copies,
    _idle_window,
    _inline_kept,
    _inline_normalized,
    _idle_reset,
    _gspo_unit,
    _timed,
)
WARNINGS: Sequence[Rule] = (
    _wide_gspo,
    _free_staleness,
    _wrong_age,
    _mixed_cache,
    _narrow_threshold,
    _slow_adapters,
)
