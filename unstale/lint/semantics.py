"""What a configuration says, in plain words: what stands in each ratio, what bounds it, what the route costs."""

from dataclasses import dataclass

from unstale.config import EWMA_BETA, RunConfig, Unit

_ONE = "1 by construction"
_WHOLE = "the whole ratio: numerics and learning in one"


@dataclass(frozen=True, slots=True)
class Factor:
    """One of the two ratios whose product is pi / mu."""

    name: str
    numerator: str
    denominator: str
    meaning: str
    bound: str


@dataclass(frozen=True, slots=True)
class _Proxy:
    """What a route puts in the place of the old logit, and what the factors and the bill then are."""

    symbol: str
    who: str
    d: str
    s: str
    cost: str


def factors(config: RunConfig) -> tuple[Factor, Factor]:
    """D and S."""
    proxy = _proxy(config)
    return (
        Factor("D", proxy.symbol, "mu", proxy.d, _bound_on_d(config)),
        Factor("S", "pi", proxy.symbol, proxy.s, _bound_on_s(config)),
    )


def facts(config: RunConfig) -> dict[str, str]:
    """Who the policies in the ratios are, and what else there is to know, in reading order."""
    proxy, engine, trainer = _proxy(config), config.engine, config.trainer
    who = {
        proxy.symbol: f"{proxy.who} ({trainer.dtype})",
        "mu": f"the engine's distribution: {engine.dtype}, temperature {engine.temperature:g} (the trainer's too), "
        "the whole vocabulary" + ", adapters merged into the base" * bool(trainer.lora_rank),
        "pi": f"the trainer's weights being trained ({trainer.dtype})",
    }
    return who | {
        "versions": _versions(config),
        "unbounded": _unbounded(config),
        "exact": _exactness(config),
        "costs": proxy.cost + _audit(config),
        "loss": _denominator(config),
    }


def _proxy(config: RunConfig) -> _Proxy:
    if config.old_logps.exact:
        return _exact(config)
    match config.old_logps.route:
        case "rollout":
            return _Proxy("mu", "the engine's own", _ONE, _WHOLE, "nothing")
        case "current_recompute":
            s = (
                _ONE
                if s_is_one(config)
                else "learning, but only by this batch's own optimizer steps"
            )
            who = "the trainer's weights at the start of the batch"
            return _Proxy(
                "pi_now", who, "numerics and all staleness", s, "one more forward pass a batch"
            )
        case "interp_prox_loglinear" | "interp_prox_linear":
            return _between(config)
        case "eager":
            who = "the weights that sampled the token where scored in time, their moving average elsewhere"
            d = "numerics where scored in time; elsewhere staleness too, as far as the average misses the token's age"
            s = "learning where scored in time; elsewhere since the average"
            cost = "the trainer's idle time; an average, one movable copy and a forward pass for the rest"
            return _Proxy("pi_v or ewma", who, d, s, cost)
        case "ewma_prox":
            age = f"tends to {average_age(config):.2g}"
        case _:
            age = "follows the batch's mean lag"
            if config.old_logps.beta is not None:
                age = f"tends to {average_age(config):.2g}"
    what = "adapters, of A and of B apart" if config.trainer.lora_rank else "weights"
    who = f"a moving average of the {what}, whose age in versions {age}"
    d = "numerics, and staleness as far as the average misses the token's age"
    cost = f"{config.old_logps.averages} averaged and one movable copy of the weights; one more forward pass a batch"
    return _Proxy("ewma", who, d, "learning since the average", cost)


def _exact(config: RunConfig) -> _Proxy:
    old = config.old_logps
    kind = "full copies" if old.storage == "full" else "lossless differences"
    costs = {
        "snapshot_old": f"the weights of up to {live_versions(config)} versions ({kind}, in "
        f"{'files' if old.spill else 'memory'}) and one movable copy; a forward pass over each trajectory for every "
        "version in it",
        "old_logit_model": "a second model in a process of its own; a publication waits until it has loaded the "
        "version before",
        "interrupt_sync": "generation stands still from before a batch's first optimizer step to the publication",
    }
    cost = (
        f"the trainer's idle time; for the rest {costs[old.fallback]}"
        if old.route == "eager"
        else costs[old.route]
    )
    fresh = config.schedule.staleness_bound == 0 and config.trainer.minibatches_per_batch == 1
    s = (
        "learning alone: 1 here, because nothing is stale"
        if fresh
        else "learning alone: one program, two weights"
    )
    who = "the trainer's own weights of the version that sampled the token"
    return _Proxy("pi_v", who, "numerics alone: the same weights, two programs", s, cost)


def _between(config: RunConfig) -> _Proxy:
    alpha, log_scale = weight_of_now(config), config.old_logps.route == "interp_prox_loglinear"
    a, rest = ("a", "(1-a)") if alpha is None else (f"{alpha:g}", f"{1 - alpha:g}")
    who = f"formed anew in each training pass; the weight of pi is {a}"
    if alpha is None:
        who += (
            f" = (d - 1) / d at lag d, {1 if config.old_logps.fresh == 'trainer' else 0} at lag 0"
        )
    d, s = "a part of pi / mu: nothing is told apart", "the other part of pi / mu"
    if log_scale:
        d, s = (
            f"(pi / mu)^{a}: a power of the whole ratio, nothing is told apart",
            f"(pi / mu)^{rest}: the other power",
        )
    if alpha in (0, 1):
        d, s = (_ONE, _WHOLE) if alpha == 0 else (_WHOLE, _ONE)
    symbol = f"mu^{rest} pi^{a}" if log_scale else f"{rest} mu + {a} pi"
    return _Proxy(symbol, who, d, s, "nothing")


def weight_of_now(config: RunConfig) -> float | None:
    """Weight of the current policy in every token's proxy; None where it differs, or is not how the route works."""
    old, bound = config.old_logps, config.schedule.staleness_bound
    match old.route:
        case "rollout":
            return 0.0
        case "current_recompute":
            return 1.0
        case "interp_prox_loglinear" | "interp_prox_linear":
            fresh = 1.0 if old.fresh == "trainer" else 0.0
            alike = bound == 0 or (bound == 1 and fresh == 0)
            return fresh if old.alpha is None and alike else old.alpha
    return None


def d_is_one(config: RunConfig) -> bool:
    """Whether D is 1 by construction."""
    return weight_of_now(config) == 0


def s_is_one(config: RunConfig) -> bool:
    """Whether S is 1 by construction. An interpolated proxy moves along; a recomputed one stays where it was."""
    moves_away = (
        config.old_logps.route == "current_recompute" and config.trainer.minibatches_per_batch > 1
    )
    return weight_of_now(config) == 1 and not moves_away


def bounds_s(config: RunConfig) -> bool:
    """Whether the objective constrains S at all."""
    rule = config.objective
    return rule.kind != "none" and not (rule.kind == "kl_penalty" and rule.kl_penalty == 0)


def has_average(config: RunConfig) -> bool:
    """Whether a moving average stands in for some tokens."""
    return config.old_logps.underlying in ("ewma_prox", "ppo_ewma_async")


def average_age(config: RunConfig) -> float:
    """Versions that an average of fixed decay lags behind in the long run."""
    beta = EWMA_BETA if config.old_logps.beta is None else config.old_logps.beta
    steps = config.trainer.minibatches_per_batch if config.old_logps.update_every == "step" else 1
    return beta / (1 - beta) / steps


def live_versions(config: RunConfig) -> int:
    """Versions of which tokens can be waiting at the same time."""
    return config.schedule.staleness_bound + 1


def over(unit: Unit, aggregate: str) -> str:
    """What a ratio is taken over.

    >>> over("turn", "sum")
    'product over a turn'
    """
    if unit == "token":
        return "per token"
    return f"{'geometric mean' if aggregate == 'mean' else 'product'} over a {unit}"


def _bound_on_d(config: RunConfig) -> str:
    rule = config.correction
    band, of = f"[{rule.low:g}, {rule.high:g}]", over(rule.unit, rule.aggregate)
    words = {
        "none": "nothing: it has no part in the loss",
        "mask": f"mask: dropped outside {band}, {of}",
        "truncate": f"truncate: a weight of at most {rule.high:g}, {of}",
        "mask_weight": f"mask_weight: a weight inside {band}, dropped outside, {of}",
    }[rule.control]
    if rule.token_veto_threshold:
        words += f"; a sequence with a token under {rule.token_veto_threshold:g} is dropped"
    idle = d_is_one(config) and words != "nothing: it has no part in the loss"
    return f"idle: {words}" if idle else words


def _bound_on_s(config: RunConfig) -> str:
    rule = config.objective
    band = f"[{1 - rule.clip_low:g}, {1 + rule.clip_high:g}]"
    of = over("sequence", "mean") if rule.kind == "gspo" else over(rule.unit, rule.aggregate)
    clip = f"{rule.kind}: no gradient for moving further outside {band}, {of}"
    words = {
        "ppo_clip": clip,
        "dual_clip": f"{clip}; where A < 0 the loss is at most {rule.dual_clip:g} |A|",
        "gspo": clip,
        "cispo": f"cispo: a weight held within {band}, {of}",
        "kl_penalty": f"kl_penalty: pulled back by {rule.kl_penalty / 2:g} (log S)^2, {of}",
        "none": "nothing",
    }[rule.kind]
    return f"idle: {words}" if s_is_one(config) and bounds_s(config) else words


def _unbounded(config: RunConfig) -> str:
    loose = []
    if config.correction.control == "none" and not d_is_one(config):
        loose.append("D")
    if not s_is_one(config):
        if not bounds_s(config):
            loose.append("S")
        elif config.objective.kind == "kl_penalty":
            loose.append("S is pulled back, not cut")
        elif config.objective.kind in ("ppo_clip", "gspo"):
            loose.append(
                "S upwards where A < 0: a bad token that became likelier counts in full (dual_clip bounds it)"
            )
    return "; ".join(loose) or "nothing"


def _versions(config: RunConfig) -> str:
    schedule, bound = config.schedule, config.schedule.staleness_bound
    words = f"a token is at most {bound} old when its batch is taken (max_staleness {schedule.max_staleness}"
    if schedule.lookahead_window > 1:
        words += (
            f", and {bound - schedule.max_staleness} for a window of {schedule.lookahead_window}"
        )
    words += f"); an episode may hold tokens of {bound + 1}"
    if (steps := config.trainer.minibatches_per_batch) > 1:
        words += f"; counted in optimizer steps a token is at most {(bound + 1) * steps - 1} old"
    return words


def _audit(config: RunConfig) -> str:
    share = config.audit.share
    kept = f"full copies of up to {live_versions(config)} versions"
    return f"; the audit: {kept}, and {share:.3g} of each batch scored again" if share else ""


def _exactness(config: RunConfig) -> str:
    if config.old_logps.exact:
        noise = (
            "the packing noise of bfloat16"
            if config.trainer.dtype == "bfloat16"
            else "float32 rounding"
        )
        return f"yes, for every clean token, to {noise} (audit/logp_noise_rms)"
    partly = {
        "eager": "where scored in time (old_logps/exact_share)",
        "current_recompute": "for tokens of lag 0",
    }
    return partly.get(
        config.old_logps.route, "no: a stand-in (--audit.share 0.05 measures how wrong)"
    )


def _denominator(config: RunConfig) -> str:
    return {
        "action_tokens": "divided by the action tokens before masking: dropping one does not inflate the others",
        "kept": "divided by the tokens that the controls kept: dropping one inflates the others",
        "sequence_mean": "the mean over each sequence's action tokens, then over sequences",
        "constant": f"divided by {config.objective.constant:g} for each sequence, whatever its length",
    }[config.objective.loss_aggregation]
