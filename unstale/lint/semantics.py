"""Explain a configuration: what D = pi_old / mu and S = pi / pi_old contain, and what it costs."""

from dataclasses import dataclass
from typing import Any

from unstale.config import RunConfig
from unstale.config.gguf import names_gguf
from unstale.config.hub import is_hub_name
from unstale.config.objectives import over
from unstale.config.routes import live_versions
from unstale.config.techniques import chosen, describe, needed_methods
from unstale.lint.policy_files import local_folder
from unstale.lint.techniques import order


@dataclass(frozen=True, slots=True)
class Factor:
    """A description of D or S, the two ratios whose product is pi / mu."""

    name: str
    numerator: str
    denominator: str
    meaning: str
    """The causes for which the ratio is not 1: numerical differences, staleness or learning."""
    bound: str
    """How the loss limits the ratio."""


def factors(config: RunConfig) -> tuple[Factor, Factor]:
    """Return descriptions of the discrepancy D and the staleness ratio S for this run."""
    proxy = config.old_logps.meaning(config)
    return (
        Factor("D", proxy.symbol, "mu", proxy.d, _bound_on_d(config)),
        Factor("S", "pi", proxy.symbol, proxy.s, _bound_on_s(config)),
    )


def facts(config: RunConfig) -> dict[str, str]:
    """Return sentences about the configuration, by a short name, in reading order.

    The first ones describe the policies in the ratios.
    """
    proxy = config.old_logps.meaning(config)
    engine = config.engine
    trainer = config.trainer
    techniques = {"techniques": "; ".join(describe(config))} if config.techniques else {}
    if in_order := order(config):
        techniques["order"] = in_order
    merged = f", adapters {engine.adapters}" if trainer.lora_rank else ""
    rounded = f" rounded to {engine.quantise}" if engine.quantise != "none" else ""
    support = "the whole vocabulary"
    if engine.truncated_by:
        support = f"over the kept set of each token ({engine.truncated_by}), as old_logp and logp"
    if engine.logit_bias:
        support += f", with engine.logit_bias = {engine.logit_bias!r} in all three"
    same = "; the trainer computes the same bits, so D is 1" if engine.bitwise else ""
    passes = f", rounded to {trainer.quantise}" if trainer.quantise != "none" else ""
    return {
        proxy.symbol: f"{proxy.policy} ({trainer.dtype})",
        "mu": f"the engine's distribution: {engine.dtype}{rounded}, temperature "
        f"{engine.temperature:g} (the trainer's too), {support}{merged}{same}",
        "pi": f"the trainer's weights being trained ({trainer.dtype}{passes})",
        "versions": versions(config),
        "unbounded": _unbounded(config),
        "exact": exactness(config),
        "costs": proxy.cost + _audit(config),
        "loss": _denominator(config),
        **_placed(config),
        **techniques,
        **_evaluation(config),
        **_missing_policy(config),
        "not read": _not_read(config),
    }


def _not_read(config: RunConfig) -> str:
    """Return a sentence on what is checked only when a run starts."""
    needs = "".join(
        f", and {' or '.join(f'{method}()' for method in methods)} of its tasks for {name}"
        for name, methods in needed_methods(config).items()
    )
    return f"data, reward and environment{needs}: unstale train checks them at its start"


def _evaluation(config: RunConfig) -> dict[str, str]:
    """Return a sentence on the sampling of evaluations. Empty if it is that of training."""
    options = config.eval
    limits = [f"eval.{name} = {value:g}" for name, value in options.limits.items()]
    if options.temperature >= 0:
        limits.insert(0, f"eval.temperature = {options.temperature:g}")
    if not limits:
        return {}
    return {
        "evaluation": f"sampled with {', '.join(limits)}; none of its tokens is trained on, so no "
        "ratio contains it"
    }


def _missing_policy(config: RunConfig) -> dict[str, str]:
    """Return a sentence on what a run does if the policy is not on this machine. Empty if it is."""
    if (local_folder(config) / "config.json").is_file():
        return {}
    fate = "unstale train refuses it"
    if config.model_download and is_hub_name(config.model):
        fate = "unstale train downloads it"
    elif names_gguf(config.model, config.model_gguf):
        fate = "unstale train converts it to one"
    return {
        "policy": f"{config.model} is no model folder here, so its limits are not known; {fate}"
    }


def d_is_one(config: RunConfig) -> bool:
    """Return True if D = pi_old / mu is always 1: the route returns the engine's
    log-probability.
    """
    return config.old_logps.weight_of_now(config) == 0


def s_is_one(config: RunConfig) -> bool:
    """Return True if S = pi / pi_old is always 1, because the old policy is the current one.

    This needs a route that computes it in every training pass, or batches with one minibatch.
    Otherwise the policy changes after the first minibatch, and the old log-probabilities do not.
    """
    old = config.old_logps
    moves_away = not old.needs.inline and config.trainer.steps_per_batch > 1
    return old.weight_of_now(config) == 1 and not moves_away


def masks_s(config: RunConfig) -> bool:
    """Return True if the technique `m2po` drops tokens by a ratio that contains S = pi / pi_old."""
    m2po: Any = config.technique_options.get("m2po")
    return m2po is not None and m2po.of != "discrepancy"


def _bound_on_d(config: RunConfig) -> str:
    rule = config.correction
    band = f"[{rule.low:g}, {rule.high:g}]"
    of = over(rule.unit, rule.aggregate)
    words = {
        "none": "nothing: it has no part in the loss",
        "mask": f"mask: dropped outside {band}, {of}",
        "truncate": f"truncate: a weight of at most {rule.high:g}, {of}",
        "clamp": f"clamp: a weight held within {band}, {of}",
        "mask_weight": f"mask_weight: a weight inside {band}, dropped outside, {of}",
        "kpop": f"kpop: a weight, dropped where the binary KL is above {rule.kl_limit:g}, {of}",
        "k3_mask": f"k3_mask: dropped where D - 1 - log D is above {rule.kl_limit:g}, {of}",
    }[rule.mode]
    if rule.normalize:
        words += "; divided by the mean weight of the batch"
    if rule.token_veto_threshold:
        words += f"; a sequence with a token under {rule.token_veto_threshold:g} is dropped"
    idle = d_is_one(config) and words != "nothing: it has no part in the loss"
    return f"idle: {words}" if idle else words


def _bound_on_s(config: RunConfig) -> str:
    rule = config.objective
    words = rule.meaning
    if s_is_one(config) and rule.bounds_s:
        words = f"idle: {words}"
    changed = [
        each.name for each in chosen(config.techniques) if each.slot in ("ratio", "objective")
    ]
    if masks_s(config):
        changed.append("m2po")
    if changed:
        words += f"; changed by {' and '.join(changed)} (see techniques)"
    if rule.opsm_threshold:
        words += (
            "; no gradient where A < 0 and the mean of log(mu / pi) over the sequence is above "
            f"{rule.opsm_threshold:g}"
        )
    return f"{words}; pi / mu at most {rule.ratio_cap:g}" if rule.ratio_cap else words


def _unbounded(config: RunConfig) -> str:
    loose = []
    if config.correction.mode == "none" and not d_is_one(config):
        loose.append("D")
    if not s_is_one(config):
        rule = config.objective
        if not rule.bounds_s and not masks_s(config):
            loose.append("S")
        elif unlimited := rule.unlimited(capped=_caps_ratio(config)):
            loose.append(unlimited)
    return "; ".join(loose) or "nothing"


def _caps_ratio(config: RunConfig) -> bool:
    """Return True if the weight of a token is pi / mu, and `objective.ratio_cap` limits it."""
    weighted = config.correction.is_weight or d_is_one(config)
    return weighted and config.objective.ratio_cap > 0


def versions(config: RunConfig) -> str:
    """Return sentences on how old tokens may be, and how many versions may sample one episode."""
    schedule = config.schedule
    bound = schedule.staleness_bound
    words = (
        f"a token is at most {bound} versions old when its batch is taken "
        f"(max_staleness {schedule.max_staleness}"
    )
    if schedule.lookahead_window > 1:
        extra = bound - schedule.max_staleness
        words += f", and {extra} for a window of {schedule.lookahead_window}"
    words += f"); an episode may have tokens of {bound + 1} versions"
    if (steps := config.trainer.steps_per_batch) > 1:
        words += f"; in optimizer steps, a token is at most {(bound + 1) * steps - 1} old"
    return words


def _audit(config: RunConfig) -> str:
    share = config.audit.share
    kept = f"full copies of up to {live_versions(config)} versions"
    scored = f"{100 * share:.3g}% of the sequences scored again"
    return f"; the audit: {kept}, and {scored}" if share else ""


def exactness(config: RunConfig) -> str:
    """Return a sentence on the tokens whose `old_logp` is that of the weights that sampled them."""
    if config.engine.bitwise and (config.old_logps.exact or d_is_one(config)):
        return (
            "yes, bit for bit (engine.bitwise): behavior_logp is the trainer's own value under the "
            "weights that sampled the token, so rollout is exact, too"
        )
    if not config.old_logps.exact:
        return config.old_logps.exactness
    bfloat16 = config.trainer.dtype == "bfloat16"
    noise = "the packing noise of bfloat16" if bfloat16 else "float32 rounding"
    return (
        f"yes, to {noise} (audit/logp_noise_rms), for every token whose keys and values have the "
        "same version"
    )


def _placed(config: RunConfig) -> dict[str, str]:
    """Return a sentence on text that is put into replies. Empty if it does not enter the loss."""
    cap = config.objective.placed_cap
    limit = f"min(Gamma, {cap:g})" if cap else "Gamma"
    words = {
        "guided": f"weighted by D {limit}, as are the sampled tokens of its sequence; text without "
        "a source has no loss",
        "anchor": "imitated, weighted by its advantage (another gradient)",
    }
    mode = config.objective.placed
    return {"placed text": words[mode]} if mode in words else {}


def _denominator(config: RunConfig) -> str:
    constant = config.objective.constant
    return {
        "action_tokens": "divided by the action tokens before masking: a dropped one does not "
        "inflate the others",
        "kept": "divided by the tokens that the controls kept: a dropped one inflates the others",
        "sequence_mean": "the mean over each sequence's action tokens, then over sequences: it "
        "trains on reward / length",
        "constant": f"divided by {constant:g} for each sequence of any length",
    }[config.objective.loss_aggregation]
