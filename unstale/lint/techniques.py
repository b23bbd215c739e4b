"""The linter's rules for techniques, the additions to the algorithm in the option `techniques`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from unstale.config import ConfigError, RunConfig
from unstale.config.tasks import shipped_envs
from unstale.config.techniques import Slot, chosen, needed_methods
from unstale.envs.registry import build_taskset, missing_methods
from unstale.lint.finding import Finding, Fix, Rule
from unstale.lint.learning import usual_rate

CHAINS: Mapping[Slot, str] = {
    "reward": "rewards",
    "filter": "episodes",
    "recredit": "advantages of turns",
    "shaper": "advantages of tokens",
}
"""The values that techniques of a slot change. If a run uses several techniques of one of these
slots, each one changes the result of the technique before it.
"""
LOW_RATE = 5
"""A learning rate is low if it is below the usual one divided by this number."""
MAX_ENTROPY_FACTOR = 1 / 3
"""Largest sensible `token_entropy_advantage.a`. With a larger one, a token whose entropy is 3
standard deviations under the mean has no gradient, and such tokens are common.
"""
TREE_BIASES: Mapping[str, tuple[float, Fix]] = {
    "tree_advantage.rule pooled": (0.430, {"tree_advantage.rule": "loo"}),
    "tree_advantage.rule depth": (0.575, {"tree_advantage.rule": "loo"}),
    "tree.branch peaks": (0.185, {"tree.branch": "entropy"}),
    "tree.branch second": (0.137, {"tree.branch": "entropy"}),
    "tree.branch unlikely": (0.162, {"tree.branch": "turn"}),
    "tree.spare 0": (0.721, {"tree.spare": 0.25}),
}
"""Options of trees that bias the gradient. For each the size of the bias, relative to that of the
gradient, in a small problem (`tests/techniques/test_tree.py`), and the change that removes it.
"""


def order(config: RunConfig) -> str:
    """Return a text on the order in which techniques of the same slot act. Empty if no order
    matters.
    """
    entries = chosen(config.techniques)
    sentences = []
    for slot, changed in CHAINS.items():
        names = [entry.name for entry in entries if entry.slot == slot]
        if len(names) > 1:
            sentences.append(f"{', then '.join(names)} change the {changed}")
    return "; ".join(sentences)


def low_rate_with_smaller_steps(config: RunConfig) -> Finding | None:
    """Warn of techniques that lower the learning rate if it is already low."""
    usual = usual_rate(config)
    rate = config.trainer.lr
    names = [name for name in ("ess_lr", "outer_step") if name in config.technique_options]
    if getattr(config.technique_options.get("outer_step"), "lowest", 0.0) == 1:
        names.remove("outer_step")  # it only measures
    if not names or not rate < usual / LOW_RATE:
        return None
    return Finding(
        f"{' and '.join(names)} at a learning rate of {rate:g}",
        f"usual is about {usual:g}; at a low rate, smaller steps only slow learning "
        "(docs/techniques.md)",
        (without(config, *names), {"trainer.lr": usual}),
    )


def hard_prefix_clip(config: RunConfig) -> Finding | None:
    """Warn of the technique `minpro` with a clip, as one small ratio then drops all later tokens'
    gradient.
    """
    kind = config.objective.loss_type
    if "minpro" not in config.technique_options or not config.objective.clips_tokens:
        return None
    return Finding(
        f"minpro with {kind}",
        "one small ratio lowers those of all later tokens of its sequence; where the advantage is "
        "negative, they lose their gradient",
        ({"objective.loss_type": "cispo", "objective.clip_low": 1.0}, without(config, "minpro")),
    )


def strong_entropy_factor(config: RunConfig) -> Finding | None:
    """Warn of a `token_entropy_advantage.a` with which tokens of low entropy have no gradient."""
    options = config.technique_options.get("token_entropy_advantage")
    a: float = getattr(options, "a", 0.0)
    if a <= MAX_ENTROPY_FACTOR:
        return None
    return Finding(
        f"token_entropy_advantage.a is {a:g}",
        f"tokens with an entropy of more than {1 / a:.2g} standard deviations under the mean get "
        "no gradient, and there are many",
        ({"token_entropy_advantage.a": 0.2},),
    )


def biased_tree(config: RunConfig) -> Finding | None:
    """Warn of options of the techniques `tree` and `tree_advantage` that bias the gradient."""
    tree: Any = config.technique_options.get("tree")
    rule = getattr(config.technique_options.get("tree_advantage"), "rule", "")
    if tree is None:
        return None
    values = [f"tree_advantage.rule {rule}", f"tree.branch {tree.branch}"]
    values += [f"tree.spare {tree.spare:g}"] if tree.prune != "none" else []
    biased = {each: TREE_BIASES[each] for each in values if each in TREE_BIASES}
    if not biased:
        return None
    sizes = " and ".join(f"{bias:.3f}" for bias, _ in biased.values())
    return Finding(
        " and ".join(biased),
        f"the mean gradient is biased, in a small problem by {sizes} of its size "
        "(docs/techniques.md#tree_advantage)",
        ({name: value for _, fix in biased.values() for name, value in fix.items()},),
    )


def baseline_of_picked(config: RunConfig) -> Finding | None:
    """Warn of the technique `baseline` with `episode_filter`: it averages only the episodes that
    are kept.
    """
    rule = getattr(config.technique_options.get("episode_filter"), "rule", "variance")
    advantage = config.advantage
    if rule == "variance" or advantage.estimator != "reinforce_batch" or advantage.group_baseline:
        return None
    return Finding(
        f"episode_filter.rule is {rule}, and the baseline is the mean of the batch",
        "episodes are chosen by their result, so the mean of the chosen ones is not that of the "
        "policy",
        ({"advantage.group_baseline": True}, {"episode_filter.rule": "variance"}),
    )


def baseline_with_added_episodes(config: RunConfig) -> Finding | None:
    """Warn of a biased baseline: `allocate` adds episodes because of rewards that are in it."""
    gain = getattr(config.technique_options.get("allocate"), "gain", "v0")
    estimators = [each.name for each in chosen(config.techniques) if each.slot == "estimator"]
    baseline = config.technique_options.get("baseline")
    centre = getattr(baseline, "centre", "")
    name = config.advantage.estimator
    if gain in ("v0", "sqrt_law") or name == "rloo_first" or centre == "prior":
        return None
    if gain == "v05_risk" and centre == "shrink" and not getattr(baseline, "leave_out", False):
        return None  # V0.5, whose baseline is biased more with groups of a fixed size
    what = f"advantage.estimator {name}"
    if estimators:
        what = f"baseline.centre {centre}" if centre else estimators[0]
    return Finding(
        f"allocate.gain {gain} with {what}",
        "episodes are added because of rewards that the baseline contains, so it is biased "
        "(docs/unbiasedness.md)",
        (
            {**without(config, *estimators), "advantage.estimator": "rloo_first"},
            without(config, "allocate"),
        ),
    )


def even_groups_of_median(config: RunConfig) -> Finding | None:
    """Warn of a median as baseline if groups may get an even number of episodes."""
    options = config.technique_options
    if getattr(options.get("baseline"), "centre", "") != "median":
        return None
    causes = [each.name for each in chosen(config.techniques) if each.slot == "allocator"]
    if getattr(options.get("truncated"), "rule", "") == "mask":
        causes.append("truncated")
    stages: int = getattr(options.get("hard_task_stages"), "size", 0)
    if stages and stages % 2 == 0:
        causes.append("hard_task_stages")
    if not causes:
        return None
    return Finding(
        f"baseline.centre median with {' and '.join(causes)}",
        "the number of episodes of a group may become even, and then the median is the mean of "
        "two rewards, which gains little",
        ({"baseline.centre": "loo"}, without(config, *causes)),
    )


def unlearned_limits(config: RunConfig) -> Finding | None:
    """Warn of the techniques `limits` and `truncated` if a cut episode has no penalty."""
    options = config.technique_options
    penalty: float = getattr(options.get("truncated"), "penalty", 0.0)
    if "limits" not in options or "truncated" not in options or penalty:
        return None
    return Finding(
        "limits with truncated",
        "episodes that the limit cuts off cost nothing, so the policy does not learn to end before",
        (
            without(config, "truncated"),
            {"truncated.rule": "reward", "truncated.penalty": 0.3},
        ),
    )


def slots_for_all(config: RunConfig) -> Finding | None:
    """Warn if the technique `segments` may run all episodes at once, so that it never pauses
    one.
    """
    slots: int = getattr(config.technique_options.get("segments"), "max_concurrent_episodes", 0)
    schedule = config.schedule
    most = (schedule.max_staleness + 1) * schedule.groups_per_step * schedule.group_size
    sizes = {"sampler", "allocator"} & {each.slot for each in chosen(config.techniques)}
    if slots < most or sizes:
        return None
    return Finding(
        f"segments.max_concurrent_episodes is {slots}",
        f"at most {most} episodes are in flight, so none ever waits for a slot",
        ({"segments.max_concurrent_episodes": max(1, most // 2)},),
    )


def picked_after_allocation(config: RunConfig) -> Finding | None:
    """Warn if the technique `allocate` adds episodes which `episode_filter` may then leave out."""
    allocators = [each.name for each in chosen(config.techniques) if each.slot == "allocator"]
    if not allocators or "episode_filter" not in config.technique_options:
        return None
    return Finding(
        f"episode_filter with {allocators[0]}",
        f"{allocators[0]} samples more episodes of some tasks, and episode_filter leaves some of "
        "them out",
        (without(config, "episode_filter"), without(config, allocators[0])),
    )


def too_old_when_tasks_return(config: RunConfig) -> Finding | None:
    """Warn if the technique `replay` drops the stored groups of a task before the task comes
    again.
    """
    options = config.technique_options.get("replay")
    max_age: int = getattr(options, "max_age", 0)
    pool, groups = config.selection.pool, config.schedule.groups_per_step
    in_turn = all(each.slot != "sampler" for each in chosen(config.techniques))
    if getattr(options, "rule", "") != "failed" or not in_turn or pool <= groups * max_age:
        return None
    return Finding(
        f"replay.rule is failed, and a task comes again after {pool / groups:.3g} steps",
        f"stored groups older than {max_age} versions are dropped (replay.max_age), so few or none "
        "are replayed",
        (
            {"replay.max_age": -(-pool // groups) + config.schedule.staleness_bound},
            {"selection.pool": groups * max(max_age - config.schedule.staleness_bound, 1)},
        ),
    )


def unreachable_success(config: RunConfig) -> Finding | None:
    """Warn of an option `success_at` that no episode can reach, if the largest reward is known."""
    baseline = config.technique_options.get("baseline")
    known = [config.task.largest_reward]
    if getattr(baseline, "centre", "") in ("prior", "shrink"):
        known.append(getattr(baseline, "reward_max", None))  # above it, the run stops
    largest = min((each for each in known if each is not None), default=math.inf)
    changed = any(each.slot == "reward" for each in chosen(config.techniques))
    above = {}
    for name, options in config.technique_options.items():
        success_at: float | None = getattr(options, "success_at", None)
        is_of_terms = name == "novelty" and changed  # it sees rewards with the terms of techniques
        if success_at is not None and success_at > largest and not is_of_terms:
            above[name] = success_at
    if not above:
        return None
    return Finding(
        ", ".join(f"{name}.success_at is {value:g}" for name, value in above.items()),
        f"the largest reward of an episode is {largest:g}, so there is no success",
        (
            {f"{name}.success_at": float(largest) for name in above},
            without(config, *above),
        ),
    )


def methods_of_tasks(config: RunConfig) -> Finding | None:
    """Refuse techniques that need a method of the task set, if an environment of this package lacks
    it.

    Environments with a source are not checked, because the linter reads no source.
    """
    spec = shipped_envs().get(config.task.env)
    if spec is None or spec.takes_source or not needed_methods(config):
        return None
    try:
        missing = missing_methods(config, build_taskset(config.task))
    except ConfigError:  # the environment cannot be made here, which unstale train says
        return None
    if not missing:
        return None
    return Finding(
        f"{' and '.join(missing)} at task.env {config.task.env}",
        f"its tasks have no {', no '.join(missing.values())}",
        (left := without(config, *missing), {**left, "selection.test_time": False}),
    )


def without(config: RunConfig, *names: str) -> Fix:
    """Return a fix that removes the techniques `names` from the option `techniques`."""
    kept = [entry.name for entry in chosen(config.techniques) if entry.name not in names]
    return {"techniques": " ".join(kept)}


WARNINGS: Sequence[Rule] = (
    low_rate_with_smaller_steps,
    hard_prefix_clip,
    strong_entropy_factor,
    biased_tree,
    baseline_of_picked,
    baseline_with_added_episodes,
    even_groups_of_median,
    unlearned_limits,
    slots_for_all,
    picked_after_allocation,
    too_old_when_tasks_return,
    unreachable_success,
)
