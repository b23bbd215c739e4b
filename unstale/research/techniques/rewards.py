"""Reward terms: named rewards that techniques add to episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from unstale.config.checks import ConfigError
from unstale.records import Group, Trajectory
from unstale.techniques.hooks import CreditContext


def add_reward(
    groups: Sequence[Group],
    name: str,
    term: Callable[[Trajectory], float],
    context: CreditContext,
) -> Sequence[Group]:
    """Return the groups with one more named reward in each trajectory. Record its mean as a metric.

    `name` is the name of the reward, and `term` returns its value. Further conversations of an
    agent get the reward of their episode. The new reward does not change whether an episode counts
    as a success. Raises `ConfigError` if a trajectory already has a reward of that name.
    """
    if any(name in item.rewards for group in groups for item in group.trajectories):
        raise ConfigError(
            f"the technique {name} adds a reward named {name}, but the environment gives one of "
            f"that name. Rename it there, or leave {name} out of --techniques"
        )
    values: list[float] = []

    def graded(item: Trajectory) -> Trajectory:
        values.append(term(item))
        rewards = {**item.rewards, name: values[-1]}
        return item.with_rewards(rewards, {"success": float(item.success)})

    result = [
        replace(group, trajectories=tuple(graded(item) for item in group.trajectories))
        for group in groups
    ]
    context.metrics[f"{name}/mean"] = fmean(values) if values else 0.0
    return result
