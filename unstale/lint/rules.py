"""The linter's rules about ratios, routes and engines. Each rule is a function.

It returns a problem, or None if nothing is wrong. `unstale.lint` defines the ratios D = pi_old / mu
and S = pi / pi_old.
"""

import math
import shlex
from collections.abc import Collection, Sequence

from unstale.config import RunConfig
from unstale.config.algorithm import Aggregate, Unit
from unstale.config.objectives import over
from unstale.config.options import options
from unstale.config.routes import age_of_average
from unstale.config.techniques import chosen
from unstale.lint import critic, learning, noise, stream, techniques
from unstale.lint.desks import unpractised_desk
from unstale.lint.finding import Finding, Fix, Rule, use_route
from unstale.lint.noise import BAND, TOKEN_RATIO
from unstale.lint.policy_files import experts, local_folder, positions
from unstale.lint.semantics import d_is_one, masks_s, s_is_one
from unstale.objectives.clips import ClippedObjective

GSPO_CLIP = 0.02
"""Largest useful clip range for a sequence's mean ratio, which varies little. The GSPO paper uses
3e-4 and 4e-4.
"""
PRODUCT_CLIP = 0.5
"""Smallest useful clip range for the product of the ratios of a sequence's tokens."""
WIDEST_BAND = 10.0
"""Largest upper limit on D = pi_old / mu that still limits staleness."""
_MIXED_CACHE = "tokens sampled with keys and values of older weights belong to no version's policy"
_BASELINE: Fix = {"old_logps.baseline": True}
_SEQUENCE_RATIO: Fix = {
    "objective.unit": "sequence",
    "objective.aggregate": "mean",
    "objective.clip_low": 3e-4,
    "objective.clip_high": 4e-4,
    "objective.loss_aggregation": "sequence_mean",
}
"""The options that fixes suggest for a ratio S of sequences, with the values of the GSPO paper."""


def _exact_route(config: RunConfig) -> Fix:
    return use_route(config, "snapshot_old")


def _idle_clip(config: RunConfig) -> Finding | None:
    if not s_is_one(config) or not config.objective.bounds_s or config.old_logps.baseline:
        return None
    kind = config.objective.loss_type
    if config.old_logps.needs.inline:
        why = (
            "at this staleness and weight the proxy is the current policy; the whole ratio is in D"
        )
    else:
        why = "one optimizer step per batch: pi is still pi_now; staleness is in D alone"
    fixes = (config.old_logps.to_free_s, _exact_route(config), _BASELINE)
    return Finding(f"S is identically 1, {kind} can never act", why, fixes)


def _idle_control(config: RunConfig) -> Finding | None:
    rule = config.correction
    idle = []
    if rule.mode in ("mask", "k3_mask"):
        idle.append(rule.mode)
    if rule.token_veto_threshold > 0:
        idle.append("token_veto_threshold")
    if not idle or not d_is_one(config) or config.old_logps.baseline:
        return None
    why = (
        f"{config.old_logps.route} takes mu itself as the proxy, so the discrepancy is in S, where "
        "the trust region sees it"
    )
    off: Fix = {"correction.mode": "none", "correction.token_veto_threshold": 0.0}
    fixes = (off, _exact_route(config), _BASELINE)
    return Finding(f"D is identically 1, {' and '.join(idle)} can never act", why, fixes)


def _double_count(config: RunConfig) -> Finding | None:
    control = config.correction.mode
    if not config.correction.is_weight:
        return None
    if not d_is_one(config) or config.old_logps.baseline:
        return None
    why = f"with {config.old_logps.route} S = pi / mu is the whole ratio, so the weight D is 1"
    fixes = ({"correction.mode": "none"}, _exact_route(config), _BASELINE)
    return Finding(f"a weight on D ({control}) beside a loss that is anchored on mu", why, fixes)


def _missing_half(config: RunConfig) -> Finding | None:
    if config.correction.mode != "none" or config.old_logps.exact or d_is_one(config):
        return None
    if config.schedule.staleness_bound == 0 and not config.old_logps.needs.averages:
        return None
    half = (
        "is not bounded from above"
        if config.correction.token_veto_threshold
        else "is neither bounded nor weighted"
    )
    route, loss = config.old_logps.route, config.objective.loss_type
    why = f"{route} leaves staleness in D, which {loss} ignores"
    fixes = ({"correction.mode": "mask_weight"}, _exact_route(config))
    return Finding(f"half of pi / mu is missing: D {half}", why, fixes)


def _kept_cache(config: RunConfig) -> Finding | None:
    if not config.engine.keep_cache or not config.old_logps.partly_exact:
        return None
    why = f"{_MIXED_CACHE}, so no route is exact for them"
    fixes = ({"engine.keep_cache": False}, use_route(config, "ppo_ewma_async"))
    return Finding(f"{config.old_logps.route} is exact, and the engine keeps its cache", why, fixes)


def _idle_window(config: RunConfig) -> Finding | None:
    schedule = config.schedule
    if schedule.lookahead_window == 1 or schedule.max_staleness > 0:
        return None
    why = "with max_staleness 0 no group beyond the batch is started"
    fixes = ({"schedule.lookahead_window": 1}, {"schedule.max_staleness": 1})
    window = schedule.lookahead_window
    return Finding(f"a window of {window} positions has nothing to look ahead at", why, fixes)


def _inline_kept(config: RunConfig) -> Finding | None:
    if not config.old_logps.needs.inline or config.objective.loss_aggregation != "kept":
        return None
    why = f"{config.old_logps.route} computes its proxy in the training passes, after that number"
    fixes = ({"objective.loss_aggregation": "action_tokens"},)
    return Finding("the number of kept tokens is not known in time", why, fixes)


def _inline_normalized(config: RunConfig) -> Finding | None:
    if not config.correction.normalize or not config.old_logps.needs.inline:
        return None
    why = (
        f"{config.old_logps.route} computes D in the training passes, each for a part of the batch"
    )
    fixes = ({"correction.normalize": False}, _exact_route(config))
    return Finding("the mean weight of the batch is not known in time", why, fixes)


def _idle_reset(config: RunConfig) -> Finding | None:
    rule = config.correction
    if not config.old_logps.resets or rule.token_veto_threshold:
        return None
    if rule.mode not in ("none", "truncate", "clamp"):
        return None
    why = f"correction.mode {rule.mode} keeps every token, so the kept share never falls"
    fixes = ({"correction.mode": "mask_weight"}, {"old_logps.reset_below": 0.0})
    return Finding("the average can never be reset", why, fixes)


def _other_unit(config: RunConfig) -> Finding | None:
    rule = config.objective
    given = (rule.unit, rule.aggregate)
    if rule.ratio is None or given in (("token", "mean"), rule.ratio):
        return None
    why = f"{rule.loss_type} always takes S {_as(*rule.ratio)}"
    own: Fix = {"objective.unit": rule.ratio[0], "objective.aggregate": rule.ratio[1]}
    fixes = (own, TOKEN_RATIO)
    return Finding(f"{rule.loss_type} cannot take S {_as(*given)}", why, fixes)


def _as(unit: Unit, aggregate: Aggregate) -> str:
    words = over(unit, aggregate)
    return words if unit == "token" else f"as the {words}"


def _clip_of_a_token(config: RunConfig) -> Finding | None:
    """Warn of a clip range for the ratio of a token that is used on the ratio of a sequence."""
    rule = config.objective
    if rule.ratio_unit != "sequence" or not isinstance(rule, ClippedObjective):
        return None
    if rule.ratio_aggregate == "max":
        return None  # the ratio is that of one token
    widest = max(rule.clip_low, rule.clip_high)
    product = rule.ratio_aggregate == "sum"
    if widest >= PRODUCT_CLIP if product else widest <= GSPO_CLIP:
        return None
    why = "the mean ratio of a sequence hardly ever leaves it"
    if product:
        why = "the product of a sequence's ratios leaves it at the first small changes"
    what = (
        f"{rule.loss_type} with the band of a single token ({rule.clip_low:g}, {rule.clip_high:g})"
    )
    of = over("sequence", "sum" if product else "mean")
    return Finding(f"{what} on the {of}", why, (_SEQUENCE_RATIO, TOKEN_RATIO))


def _token_mean_of_sequences(config: RunConfig) -> Finding | None:
    rule = config.objective
    if rule.ratio_unit != "sequence" or rule.loss_aggregation not in ("action_tokens", "kept"):
        return None
    if rule.ratio == ("sequence", "sum"):
        return None  # the weight of a sequence's log-probability, which is a sum over its tokens
    return Finding(
        f"a ratio per sequence, and a mean over tokens (loss_aggregation {rule.loss_aggregation})",
        "a sequence then counts as often as it has tokens, and long ones outweigh the others",
        ({"objective.loss_aggregation": "sequence_mean"}, TOKEN_RATIO),
    )


def _free_staleness(config: RunConfig) -> Finding | None:
    bound = config.schedule.staleness_bound
    if config.objective.bounds_s or masks_s(config) or s_is_one(config) or bound == 0:
        return None
    why = f"data is up to {bound} versions old, and nothing keeps pi near the sampling policy"
    clip: Fix = {"objective.loss_type": "ppo_clip"}
    fixes: list[Fix] = [clip, TOKEN_RATIO]
    if losses := [each.name for each in chosen(config.techniques) if each.slot == "objective"]:
        fixes.append({**clip, **techniques.without(config, *losses)})  # some do not take a clip
    return Finding("nothing bounds S", why, tuple(fixes))


def _wrong_age(config: RunConfig) -> Finding | None:
    old = config.old_logps
    bound = config.schedule.staleness_bound
    if old.decay is None:
        return None
    age = age_of_average(old, config)
    if bound / 2 <= age <= bound:
        return None
    # With a full queue, the mean staleness is about 3/4 of the bound.
    wanted = 3 * bound / 4 * old.updates_per_version(config)
    why = "D gets the difference in age, with a negative sign where the average is older"
    beta = round(wanted / (wanted + 1), 4)
    adaptive = use_route(config, "ppo_ewma_async")
    fixes = ({"old_logps.beta": beta}, adaptive, _exact_route(config))
    return Finding(f"the average is {age:.2g} versions old, the tokens 0 to {bound}", why, fixes)


def _mixed_cache(config: RunConfig) -> Finding | None:
    if not config.engine.keep_cache or _kept_cache(config):
        return None
    why = f"{_MIXED_CACHE}, and D includes the difference"
    return Finding("the engine keeps its cache", why, ({"engine.keep_cache": False},))


def _wide_reach(config: RunConfig) -> Finding | None:
    """Warn if the clip on S = pi / pi_old lets tokens pass whose pi / mu is beyond it."""
    rule = config.objective
    old = config.old_logps
    if not isinstance(rule, ClippedObjective) or old.baseline or s_is_one(config):
        return None
    ends = {rule.high: 1.01} | ({rule.low: 1 / 1.01} if rule.low > 0 else {})
    for clip, factor in ends.items():
        if clip == 1 or not _passes(config, clip**1.2, clip):
            continue
        ratio = clip
        while 1e-3 < ratio < 1e3 and not _beyond(old.s_of(ratio, config), clip):
            ratio *= factor
        reach = f"only at pi / mu = {ratio:.2g}" if 1e-3 < ratio < 1e3 else "at no pi / mu"
        lag = config.schedule.staleness_bound
        fixes: tuple[Fix, ...] = (
            _exact_route(config),
            {"schedule.max_staleness": 1, "schedule.lookahead_window": 1},
            _BASELINE,
        )
        return Finding(
            f"the clip at {clip:g} acts {reach} for a token of lag {lag}",
            f"{old.route} leaves only a part of pi / mu in S, and the rest in D",
            fixes,
        )
    return None


def _passes(config: RunConfig, ratio: float, clip: float) -> bool:
    """Return True if a token with the largest lag and this pi / mu (`ratio`) is not clipped or
    masked.
    """
    s = config.old_logps.s_of(ratio, config)
    rule = config.correction
    low, high = (rule.band if rule.unit == "token" else None) or (0.0, math.inf)
    return not _beyond(s, clip) and low <= ratio / s <= high


def _beyond(s: float, clip: float) -> bool:
    """Return True if S = `s` is at the clip or beyond it."""
    return s >= clip if clip > 1 else s <= clip


def _bandless(config: RunConfig) -> Finding | None:
    """Warn if all staleness is in D = pi_old / mu, but D has no limit."""
    rule = config.correction
    stale = config.schedule.staleness_bound > 0 and config.old_logps.weight_of_now(config) == 1
    if not stale or rule.mode == "none":
        return None
    low, high = rule.band or (0.0, math.inf)
    bounded_above = high <= WIDEST_BAND
    bounded_below = rule.is_weight or low >= 1 / WIDEST_BAND
    if bounded_above and bounded_below:
        return None
    return Finding(
        f"{config.old_logps.route} without a band on D",
        "all staleness is in D, which no clip on S can see, so nothing keeps pi near mu",
        ({"correction.mode": "mask_weight", **BAND}, _exact_route(config)),
    )


def _imitation(config: RunConfig) -> Finding | None:
    if config.objective.placed != "anchor":
        return None
    # hints and retries refuse mask, so the fix is a run without them, and without their weights
    entries = [each for each in chosen(config.techniques) if each.slot != "strategy"]
    others = [each.name for each in entries if each.name != "hint_entropy_weights"]
    return Finding(
        "objective.placed anchor",
        "placed text is imitated, weighted by its advantage: this is not the gradient of the "
        "reward, however small the share of the text is (docs/placed.md)",
        (
            {"objective.placed": "mask"},
            {"objective.placed": "mask", "techniques": " ".join(others)},
        ),
    )


def _timed(config: RunConfig) -> Finding | None:
    if not config.deterministic or not config.minutes:
        return None
    why = "the number of steps would depend on the machine, so two runs would differ"
    fixes = ({"minutes": 0.0}, {"deterministic": False})
    return Finding("a deterministic run that ends by the clock", why, fixes)


def _long_context(config: RunConfig) -> Finding | None:
    """Refuse a context that is longer than the policy's. Engines refuse it as well."""
    number = positions(local_folder(config))
    if number is None or config.engine.max_context <= number:
        return None
    wrong = (
        f"engine.max_context = {config.engine.max_context}, but the policy has {number} positions"
    )
    why = "the policy was not trained on longer contexts"
    return Finding(wrong, why, ({"engine.max_context": number},))


def _dense_replay(config: RunConfig) -> Finding | None:
    if not config.trainer.routing_replay or experts(local_folder(config)) != 0:
        return None
    why = "its model has no experts, so there is nothing to replay"
    return Finding("routing replay of a dense policy", why, ({"trainer.routing_replay": False},))


def _adapters_of_experts(config: RunConfig) -> Finding | None:
    rank, number = config.trainer.lora_rank, experts(local_folder(config))
    if not rank or not number:
        return None
    known = options()
    off = {name: value for name, value in _NO_ADAPTERS.items() if known[name].of(config) != value}
    return Finding(
        f"trainer.lora_rank {rank} with a model of {number} experts in a layer",
        "adapters of an MoE policy are not built",
        (off,),
    )


_NO_ADAPTERS: Fix = {
    "trainer.lora_rank": 0,
    "trainer.lora_alpha": 32.0,
    "trainer.lora_targets": "all-linear",
    "engine.adapters": "merged",
    "schedule.pin_versions": False,
}


def _unrecorded_experts(config: RunConfig) -> Finding | None:
    """Refuse flags of vLLM with which it records no experts of an MoE model, or only some."""
    if not config.trainer.routing_replay or config.engine.backend != "vllm":
        return None
    words = " ".join(shlex.split(config.engine.args)).replace("=", " ").replace("_", "-").split()
    found = [word for word in words if word.startswith(_NO_ROUTES)]
    if not found:
        return None
    why = (
        "vLLM records routed experts only with prefix caching and without these kinds of splitting"
    )
    fixes = ({"engine.args": ""}, {"trainer.routing_replay": False})
    return Finding(f"routing replay with {', '.join(found)} in engine.args", why, fixes)


_NO_ROUTES = (
    "--no-enable-prefix-caching",
    "--pipeline-parallel-size",
    "-pp",
    "--decode-context-parallel-size",
    "-dcp",
    "--kv-transfer-config",
)


def _free_experts(config: RunConfig) -> Finding | None:
    """Warn of an MoE policy with an exact route if the trainer does not use the engine's
    experts.
    """
    if config.trainer.routing_replay or not config.old_logps.partly_exact:
        return None
    if not experts(local_folder(config)):
        return None
    why = (
        "engine and trainer round differently, so they choose other experts for some tokens, and D "
        "includes the difference"
    )
    fixes = ({"trainer.routing_replay": True},)
    return Finding("an MoE policy without routing replay", why, fixes)


REFUSALS: Sequence[Rule] = (
    techniques.methods_of_tasks,
    _idle_clip,
    _idle_control,
    _double_count,
    _missing_half,
    _kept_cache,
    _idle_window,
    _inline_kept,
    _inline_normalized,
    _idle_reset,
    _other_unit,
    _timed,
    noise.certain_veto,
    _long_context,
    _dense_replay,
    _adapters_of_experts,
    _unrecorded_experts,
    learning.no_comparison,
    learning.equal_teacher,
    learning.infinite,
    *critic.REFUSALS,
    *stream.REFUSALS,
)
TRIES_ESTIMATOR: Collection[Rule] = (learning.no_comparison, *stream.TRIES_ESTIMATOR)
"""Rules that call the advantage estimator with invented episodes, and so import torch."""
WARNINGS: Sequence[Rule] = (
    _clip_of_a_token,
    _token_mean_of_sequences,
    _free_staleness,
    _wrong_age,
    _mixed_cache,
    noise.narrow_threshold,
    noise.narrow_sequence_mask,
    noise.noisy_veto,
    noise.mixed_format,
    noise.idle_format,
    _wide_reach,
    _bandless,
    _imitation,
    _free_experts,
    unpractised_desk,
    learning.far_bound,
    learning.slow_adapters,
    learning.wide_adapters,
    learning.wrong_adapter_scale,
    learning.wrong_rate,
    learning.faint_gradient,
    learning.lost_updates,
    learning.low_cap,
    learning.large_constant,
    learning.dominant_term,
    learning.short_time,
    learning.odd_temperature,
    learning.strong_decay,
    learning.long_warmup,
    *techniques.WARNINGS,
    *stream.WARNINGS,
)
