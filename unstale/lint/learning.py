"""Rules for runs that cannot learn, because gradients vanish or steps destroy the model.

Each rule is a function that returns a problem, or None if nothing is wrong.
"""

import math
from dataclasses import fields

from unstale.config import RunConfig
from unstale.config.hub import count_weights
from unstale.config.options import options
from unstale.config.techniques import chosen
from unstale.lint.estimator_trials import compares
from unstale.lint.finding import Finding, Fix
from unstale.lint.policy_files import local_folder, num_weights, width
from unstale.techniques.distil import START, DistilConfig

MAX_BOUND = 16
"""Largest staleness, in versions, that a run may allow without a warning. No published result uses
more.
"""
LORA_RATE = 1e-5
"""Largest learning rate for which a run with LoRA adapters gets a warning. It is usual for training
all weights, and adapters need about ten times as much (Schulman, LoRA Without Regret, 2025).
"""
RATE_TIMES_WEIGHTS = 1e4
"""The largest sensible learning rate of Adam is this, divided by the number of weights. That is 20
times the usual rate, which is 5e-4 for a million weights and 1e-6 for a billion and more.
"""
MIN_LARGEST_RATE = 2e-5
"""Largest sensible learning rate of Adam for very large models, and for models of unknown size."""
RATE_RANGE = 1e4
"""The largest sensible learning rate divided by the smallest. With a smaller one, a run of usual
length has no effect.
"""
ROUNDING = 1e-8
"""Typical rounding error of a float32 weight, and also the epsilon of Adam."""
GAPS = {"bfloat16": 2.4e-4, "float16": 3.1e-5}
"""Distance of neighbouring numbers of a format around 0.06, the usual size of a language model's
weights.
"""
LOST_STEPS = 5
"""The linter warns if a weight of the usual size 0.06 does not change in this number of optimizer
steps in one direction. Rounding to nearest then loses most updates.
"""
TEMPERATURES = (0.01, 50.0)
"""Range of useful sampling temperatures. Below it, all replies to a task are equal. Above it,
replies are noise that hardly depends on the weights.
"""

ADAPTER_SCALES = (0.01, 1000.0)
"""Range of sensible values of lora_alpha / lora_rank. Below it, adapters hardly change the output.
Above it, they ruin the output. Usual are 0.5 to 64.
"""
MAX_COEFFICIENT = 1000.0
"""Largest sensible coefficient of a term in the loss. Advantages are about 1 in size."""
MIN_MINUTES = 0.1
"""Smallest sensible value of the option `minutes`. An engine takes seconds to start."""

NO_LIMIT = (
    "correction.high",
    "minutes",
    "objective.ratio_cap",
    "rollout.timeout_s",
    "trainer.grad_clip",
)
"""Options for which infinity means that there is no limit. The class of an objective names further
ones of its options in `no_limit`.
"""


def no_comparison(config: RunConfig) -> Finding | None:
    """Refuse groups of one episode with an advantage estimator that then gives every episode 0."""
    schedule = config.schedule
    replaced = any(each.slot == "estimator" for each in chosen(config.techniques)) or any(
        not getattr(config.technique_options[each.name], "advantage_coef", 0)
        for each in chosen(config.techniques)
        if each.slot == "distiller"  # without the coefficient, no advantage of rewards is used
    )
    if schedule.group_size > 1 or replaced or compares(config) is not False:
        return None
    name = config.advantage.estimator
    batch = {"advantage.estimator": "reinforce_batch", "advantage.group_baseline": False}
    what = f"groups of {schedule.group_size}"
    if schedule.groups_per_step == 1:
        what = "batches of one episode"
    return Finding(
        f"{name} gives every episode the advantage 0 in {what}",
        "it compares an episode with the others of its group or batch, and there are none",
        ({"schedule.group_size": 8}, batch),
    )


def equal_teacher(config: RunConfig) -> Finding | None:
    """Refuse a teacher that is the policy at the start, if nothing else changes the policy."""
    options = config.technique_options.get("distil")
    if not isinstance(options, DistilConfig) or {*options.sources} != {START}:
        return None
    moves = config.objective.entropy_coef or config.trainer.weight_decay
    if options.context or options.advantage_coef or moves:
        return None
    return Finding(
        f"distil.teacher {options.teacher} with distil.advantage_coef 0",
        "the teacher is equal to the policy, and no rewards change the policy, so every gradient "
        "is 0",
        ({"distil.advantage_coef": 1.0},),
    )


def infinite(config: RunConfig) -> Finding | None:
    """Refuse an option whose value is infinite, except where infinity means that there is no
    limit.
    """
    unlimited = {*NO_LIMIT, *(f"objective.{name}" for name in config.objective.no_limit)}
    for name, option in options().items():
        value = option.of(config)
        if name in unlimited or not isinstance(value, float) or math.isfinite(value):
            continue
        default = {field.name: field.default for field in fields(option.owner)}[option.field]
        return Finding(
            f"{name} is infinite", "the first step would give weights NaN", ({name: default},)
        )
    return None


def far_bound(config: RunConfig) -> Finding | None:
    schedule = config.schedule
    bound = schedule.staleness_bound
    if bound <= MAX_BOUND:
        return None
    window = (MAX_BOUND - schedule.max_staleness) * schedule.groups_per_step + 1
    fixes: list[Fix] = [{"schedule.max_staleness": 2, "schedule.lookahead_window": 1}]
    what = f"max_staleness {schedule.max_staleness}"
    if schedule.lookahead_window > 1:
        what += f" and a window of {schedule.lookahead_window} positions"
    if window > 1:
        fixes.insert(0, {"schedule.lookahead_window": window})
    return Finding(
        f"{what} let tokens be {bound} versions old",
        f"more than {MAX_BOUND} leave little that the trust region lets pass",
        tuple(fixes),
    )


def slow_adapters(config: RunConfig) -> Finding | None:
    if not config.trainer.lora_rank or config.trainer.lr > LORA_RATE:
        return None
    rate = config.trainer.lr
    return Finding(
        f"adapters at a learning rate of {rate:g}",
        "this is a rate for all weights; adapters learn best at about ten times that",
        ({"trainer.lr": usual_rate(config)},),
    )


def wide_adapters(config: RunConfig) -> Finding | None:
    rank = config.trainer.lora_rank
    size = width(local_folder(config))
    if size is None or rank <= size:
        return None
    return Finding(
        f"adapters of rank {rank} on a model of width {size}",
        "they have more weights than the layers, and can express no more",
        ({"trainer.lora_rank": min(16, size)},),
    )


def wrong_adapter_scale(config: RunConfig) -> Finding | None:
    options = config.trainer
    lowest, highest = ADAPTER_SCALES
    scale = options.lora_alpha / options.lora_rank if options.lora_rank else 1.0
    if lowest <= scale <= highest:
        return None
    why = (
        "the adapters hardly change the policy" if scale < lowest else "a step destroys the policy"
    )
    return Finding(
        f"the output of adapters is multiplied by {scale:.2g} (trainer.lora_alpha / lora_rank)",
        why,
        ({"trainer.lora_alpha": 32.0}, {"trainer.lora_alpha": 2.0 * options.lora_rank}),
    )


def wrong_rate(config: RunConfig) -> Finding | None:
    """Warn of a learning rate that would destroy a model of this size, or hardly change it."""
    rate = config.trainer.lr
    if not math.isfinite(rate):
        return None
    size = num_weights(local_folder(config))
    usual: Fix = {"trainer.lr": usual_rate(config)}
    named = f"usual is about {usual['trainer.lr']:g}"
    if rate > _largest_rate(config):
        why = f"steps of this size destroy {size / 1e6:.3g}M weights: {named}"
        if not size:
            why = (
                f"steps of this size destroy a large model: {named} (this model's size is unknown)"
            )
        return Finding(f"a learning rate of {rate:g}", why, (usual,))
    if not config.trainer.lora_rank and rate < _smallest_rate(config):
        model = f"{size / 1e6:.3g}M weights" if size else "any model"
        fixes = (usual, {**usual, "trainer.grad_clip": 1.0})
        why = f"it hardly changes {model} in any run: {named}"
        return Finding(f"a learning rate of {rate:g}", why, fixes)
    return None


def _is_adam(config: RunConfig) -> bool:
    """Return True for optimizers whose steps are about as large as the learning rate, such as
    Adam.
    """
    names = ("Adam", "Adagrad", "RMSprop", "Rprop")
    return any(name in config.trainer.optimizer for name in names)


def _rate_of_adam(config: RunConfig) -> float:
    """Return the usual learning rate of Adam for a model of this size, rounded to one digit."""
    lora = bool(config.trainer.lora_rank)
    usual = _largest_rate_of_adam(config) / 20
    return float(f"{max(usual, 10 * LORA_RATE if lora else 0):.0e}")


def usual_rate(config: RunConfig) -> float:
    return _rate_of_adam(config) if _is_adam(config) else 0.1


def _largest_rate_of_adam(config: RunConfig) -> float:
    size = num_weights(local_folder(config)) or math.inf
    largest = min(0.1, max(MIN_LARGEST_RATE, RATE_TIMES_WEIGHTS / size))
    return largest * (10 if config.trainer.lora_rank else 1)


def _largest_rate(config: RunConfig) -> float:
    return _largest_rate_of_adam(config) if _is_adam(config) else 1.0


def _smallest_rate(config: RunConfig) -> float:
    """Return the smallest sensible learning rate. 0 for Adam with a model of unknown size.

    For other optimizers, it is the rate at which a step just exceeds the rounding of the weights.
    """
    if _is_adam(config):
        is_known = num_weights(local_folder(config)) > 0
        return _largest_rate_of_adam(config) / RATE_RANGE if is_known else 0.0
    return _rounding_norm(config) / min(1.0, config.trainer.grad_clip)


def _rounding_norm(config: RunConfig) -> float:
    """Return the norm of a gradient step in which each weight moves by its rounding error."""
    return ROUNDING * math.sqrt(max(1, num_weights(local_folder(config))))


def faint_gradient(config: RunConfig) -> Finding | None:
    limit = config.trainer.grad_clip
    if limit >= _rounding_norm(config):
        return None
    return Finding(
        f"the gradient is scaled down to a norm of {limit:g}",
        "a weight's share of it is below the rounding of float32 and the epsilon of Adam",
        ({"trainer.grad_clip": 1.0},),
    )


def lost_updates(config: RunConfig) -> Finding | None:
    """Warn of a learning rate whose updates are lost because weights are rounded to nearest.

    This needs a model whose files have the format of `trainer.dtype`, so that all weights begin at
    a number of this format. Weights of a float32 model lie between two such numbers, so some of
    them change in every step.
    """
    options = config.trainer
    gap = GAPS.get(options.dtype)
    if gap is None or options.rounding != "nearest" or not _is_adam(config) or options.lora_rank:
        return None
    if not 0 < options.lr < gap / 2 / LOST_STEPS:
        return None
    stored = count_weights(local_folder(config))
    on_grid = stored[{"bfloat16": "BF16", "float16": "F16"}[options.dtype]]
    if on_grid < stored.total() / 2:
        return None
    steps = math.ceil(gap / 2 / options.lr)
    return Finding(
        f"a learning rate of {options.lr:g} with weights that are rounded to nearest in "
        f"{options.dtype}",
        f"a weight of 0.06 has neighbours {gap:g} apart there, so it stays as it is until "
        f"{steps} steps in one direction add up to half of that (docs/rounding.md)",
        ({"trainer.rounding": "stochastic"}, {"trainer.dtype": "float32"}),
    )


def low_cap(config: RunConfig) -> Finding | None:
    cap = config.objective.ratio_cap
    if not 0 < cap < 1:
        return None
    return Finding(
        f"pi / mu is limited to {cap:g}",
        "the ratio of a fresh token is 1, so this scales down every token",
        ({"objective.ratio_cap": 3.0}, {"objective.ratio_cap": 0.0}),
    )


def large_constant(config: RunConfig) -> Finding | None:
    rule = config.objective
    most = config.engine.max_context
    if rule.loss_aggregation != "constant" or rule.constant <= 1000 * most:
        return None
    return Finding(
        f"the loss of each sequence is divided by {rule.constant:g}",
        f"a sequence has at most {most} tokens (engine.max_context), so the loss is about 0",
        ({"objective.constant": float(most)},),
    )


def dominant_term(config: RunConfig) -> Finding | None:
    """Warn of a term of the loss that outweighs the rewards, such as the KL to the initial
    policy.
    """
    rule = config.objective
    terms = {"kl_coef": 0.0, "entropy_coef": 0.0}
    own = {"kl_penalty": {"kl_penalty": 1.0}, "dro": {"dro_beta": 0.05}, "dppo": {"kl_tau": 1e-3}}
    terms |= own.get(rule.loss_type, {})
    large = {name: value for name, value in terms.items() if getattr(rule, name) > MAX_COEFFICIENT}
    if not large:
        return None
    return Finding(
        ", ".join(f"objective.{name} {getattr(rule, name):g}" for name in large),
        "this term outweighs the advantages, which are about 1 in size, in every gradient",
        ({f"objective.{name}": value for name, value in large.items()},),
    )


def short_time(config: RunConfig) -> Finding | None:
    if not 0 < config.minutes < MIN_MINUTES:
        return None
    return Finding(
        f"a time limit of {60 * config.minutes:.2g} s",
        "the run ends before its first steps",
        ({"minutes": 0.0},),
    )


def odd_temperature(config: RunConfig) -> Finding | None:
    lowest, highest = TEMPERATURES
    value = config.engine.temperature
    if lowest <= value <= highest:
        return None
    why = "replies are random and hardly depend on the weights"
    if value < lowest:
        why = "sampling is greedy: the episodes of a group are equal, and have no advantage"
    return Finding(f"a sampling temperature of {value:g}", why, ({"engine.temperature": 1.0},))


def strong_decay(config: RunConfig) -> Finding | None:
    options = config.trainer
    share = options.lr * options.weight_decay
    if not share >= 1:
        return None  # NaN is found by `infinite`
    return Finding(
        f"weight decay takes {share:.3g} of every weight in each step",
        "trainer.lr * trainer.weight_decay must be far below 1",
        ({"trainer.weight_decay": 0.0}, {"trainer.lr": usual_rate(config)}),
    )


def long_warmup(config: RunConfig) -> Finding | None:
    warmup = config.trainer.warmup_steps
    total = config.max_steps * config.trainer.steps_per_batch
    if warmup <= total:
        return None
    return Finding(
        f"a warm-up of {warmup} optimizer steps, in a run of {total}",
        f"the learning rate never exceeds {total / warmup:.2g} of trainer.lr",
        ({"trainer.warmup_steps": total // 20},),
    )
