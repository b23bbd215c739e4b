"""Metrics of the episodes and advantages of one batch. docs/metrics.md defines each of them."""

import math
from collections.abc import Iterable, Sequence
from statistics import stdev

from unstale.records import (
    CUT_OFF,
    CUT_REPLIES,
    ENDED_BY_ENVIRONMENT,
    SURVIVAL,
    Group,
    ScoredTrajectory,
    Trajectory,
    nearest_rank,
)

PERCENTILES = (50, 90, 99)


def describe(groups: Sequence[Group]) -> dict[str, float]:
    """Return the metrics of a batch's episodes. Failed and pruned episodes are only counted.

    A metric is NaN if no episode has a value for it.
    """
    everything = [trajectory for group in groups for trajectory in group.trajectories]
    finished = [each for each in everything if each.stop != "pruned"]
    uniform = [group.has_one_reward for group in groups]
    rewards = [trajectory.reward for trajectory in finished]
    stops = [trajectory.stop for trajectory in finished]
    metrics = {
        "rollout/episodes": len(finished),
        "rollout/failed_episodes": sum(len(group.failures) for group in groups),
        "rollout/success_rate": _mean(trajectory.success for trajectory in finished),
        "rollout/turns_mean": _mean(trajectory.num_turns for trajectory in finished),
        "rollout/total_tokens_mean": _mean(len(trajectory) for trajectory in finished),
        "reward/mean": _mean(rewards),
        "reward/std": stdev(rewards) if len(rewards) > 1 else math.nan,
        "reward/zero_std_group_share": _mean(uniform),
        "reward/missing_share": _mean(
            each.stop in ENDED_BY_ENVIRONMENT and not each.rewards for each in finished
        ),
        "completion/truncated_share": _mean(stop in CUT_OFF for stop in stops),
        "completion/max_turns_share": _mean(stop == "max_turns" for stop in stops),
        "completion/max_tokens_share": _mean(stop in ("max_tokens", "cut_reply") for stop in stops),
        "completion/cut_reply_share": _cut_reply_share(finished),
        "completion/invalid_format_share": _mean(stop == "invalid_format" for stop in stops),
    }
    if len(finished) < len(everything):
        metrics["rollout/pruned_share"] = 1 - len(finished) / len(everything)
    lengths = sorted(trajectory.num_sampled_in_all for trajectory in everything)
    metrics["rollout/sampled_tokens"] = sum(lengths)
    metrics["completion/tokens_mean"] = _mean(lengths)
    metrics["completion/tokens_max"] = lengths[-1] if lengths else math.nan
    for percent in PERCENTILES:
        metrics[f"completion/tokens_p{percent}"] = _percentile(lengths, percent)
    limits = [group.turn_limit.turns for group in groups if group.turn_limit]
    if limits:
        metrics["rollout/turn_limit_mean"] = _mean(limits)
    contexts = [group.budget.context for group in groups if group.budget.context]
    if contexts:
        metrics["rollout/context_limit_mean"] = _mean(contexts)
    return metrics | _named_rewards(finished) | _facts(finished)


def describe_advantages(
    groups: Sequence[Group], scored: Sequence[ScoredTrajectory]
) -> dict[str, float]:
    """Return the share of groups whose tokens all have the same advantage, as one metric."""
    by_episode = {each.trajectory.episode: each.advantage for each in scored}
    uniform = []
    for group in groups:
        values: set[float] = set()
        for trajectory in group.trajectories:
            for each in trajectory.conversations:
                values.update(by_episode.get(each.episode, ()))
        uniform.append(len(values) <= 1)
    return {"advantage/zero_spread_group_share": _mean(uniform)}


def _cut_reply_share(finished: Sequence[Trajectory]) -> float:
    """Return the share of replies that ended because a limit of tokens was reached."""
    replies = sum(one.num_turns for each in finished for one in each.conversations)
    cut = sum(each.facts.get(CUT_REPLIES, 0.0) for each in finished)
    return cut / replies if replies else math.nan


def _named_rewards(finished: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean of each named reward. An episode without it counts as 0."""
    names = {name for trajectory in finished for name in trajectory.rewards} - {"reward"}
    return {
        f"reward/{name}_mean": _mean(trajectory.rewards.get(name, 0.0) for trajectory in finished)
        for name in sorted(names)
    }


def _facts(finished: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean of each fact. A fact is a number that the environment reports with an
    episode.

    The rewards that a task set combines into one are among the facts, as `reward/<name>`.
    """
    names = {name for trajectory in finished for name in trajectory.facts} - {
        "success",
        CUT_REPLIES,
        SURVIVAL,
    }
    means = {}
    for name in sorted(names):
        key = name if name.startswith("reward/") else f"env/{name}"
        means[f"{key}_mean"] = _mean(trajectory.facts.get(name, 0.0) for trajectory in finished)
    return means


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else math.nan


def _percentile(ordered: Sequence[float], percent: int) -> float:
    """Return the percentile of sorted values by the nearest-rank method."""
    return ordered[nearest_rank(len(ordered), percent / 100)] if ordered else math.nan
