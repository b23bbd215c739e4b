"""Advantage estimators: compare the reward of a trajectory, or of its turns, with that of others.

A function with `@estimator`, here or in a file of the user that has been imported, is a value of
the option `advantage.estimator`. It maps the groups of one batch to scored trajectories in their
order; its keyword-only parameters are options of that section. Each is based on a function of
tensors without records: `rewards [n]` and `group [n]` (any integers).

With an estimator that compares siblings, a trajectory without siblings has advantage 0, and so has
each trajectory of a group with equal rewards. Failed episodes have no reward and are left out. An
episode's reward is the sum of its named rewards, in float64. An episode counts once, however many
branches (further conversations) it has, and each branch gets the advantage of its episode.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unstale.config.declared import add_choice
from unstale.records import Group, ScoredTrajectory, Trajectory

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it, as public GRPO implementations do."""

Estimator = Callable[..., list[ScoredTrajectory]]
Function = TypeVar("Function", bound=Estimator)

ESTIMATORS: dict[str, Estimator] = {}


def estimator(function: Function) -> Function:
    """Register a function as a value of `advantage.estimator`.

    ValueError if an estimator from another file has its name.
    """
    name = function.__name__
    if ESTIMATORS.setdefault(name, function).__module__ != function.__module__:
        raise ValueError(f"estimator {name} is registered already")
    ESTIMATORS[name] = function
    add_choice("advantages", "estimator", function)
    return function


@estimator
def grpo(groups: Sequence[Group]) -> list[ScoredTrajectory]:
    """GRPO: reward minus the group's mean, divided by the group's standard deviation.

    arXiv 2402.03300, section 4.1.2.
    """
    return _score(groups, grpo_advantage(*_outcomes(groups)))


@estimator
def grpo_no_std(groups: Sequence[Group]) -> list[ScoredTrajectory]:
    """GRPO without the division, which would amplify groups with little spread."""
    return _score(groups, grpo_advantage(*_outcomes(groups), std=False))


@estimator
def dr_grpo(groups: Sequence[Group]) -> list[ScoredTrajectory]:
    """Dr. GRPO (arXiv 2503.20783): `grpo_no_std`.

    Use it with `objective.loss_aggregation = constant`.
    """
    return grpo_no_std(groups)


@estimator
def rloo(groups: Sequence[Group]) -> list[ScoredTrajectory]:
    """RLOO: reward minus the mean of the other siblings, which is unbiased (arXiv 2402.14740)."""
    return _score(groups, rloo_advantage(*_outcomes(groups)))


@estimator
def opo(groups: Sequence[Group]) -> list[ScoredTrajectory]:
    """OPO: reward minus the group's mean, weighted by action tokens (arXiv 2505.23585)."""
    return _score(groups, opo_advantage(*_outcomes(groups), lengths=_lengths(groups)))


@estimator
def reinforce_batch(
    groups: Sequence[Group], *, group_baseline: bool = True, by_tokens: bool = True
) -> list[ScoredTrajectory]:
    """REINFORCE++: rewards normalized over the whole batch (arXiv 2501.03262).

    `group_baseline` first subtracts each group's mean. With `by_tokens` a trajectory counts once
    per action token in the batch's mean and deviation, otherwise once. `groups` must be all groups
    of one batch.
    """
    rewards, group = _outcomes(groups)
    lengths = _lengths(groups) if by_tokens else None
    baseline = group if group_baseline else None
    return _score(groups, batch_advantage(rewards, baseline, lengths=lengths))


@estimator
def turn_level(
    groups: Sequence[Group], *, discount: float = 1.0, std: bool = True
) -> list[ScoredTrajectory]:
    """One advantage per turn: the discounted reward to go, normalized over all turns of the group.

    The reward of a turn is its entry of `Trajectory.turn_rewards` (0 without); the last turn has
    the episode's reward in addition. With discount 1, `std=False`, outcome rewards and equal
    numbers of turns, every turn has the advantage of `grpo_no_std`. Raises ValueError if
    `turn_rewards` has another length than the trajectory has turns.
    """
    trajectories = _trajectories(groups)
    if not trajectories:
        return []
    _, group = _outcomes(groups)
    _, siblings = _members(group)
    returns = [reward_to_go(_turn_rewards(item), discount=discount) for item in trajectories]
    turns = torch.tensor([len(item) for item in returns])
    advantage = grpo_advantage(torch.cat(returns), group.repeat_interleave(turns), std=std)
    has_siblings = (siblings[group] > 1).repeat_interleave(turns)
    advantage = torch.where(has_siblings, advantage, 0.0)
    scored = []
    for item, part in zip(trajectories, advantage.split(turns.tolist()), strict=True):
        of_turns = tuple(part.tolist()) or (0.0,)
        scored.append(ScoredTrajectory(item, of_turns))
        # A branch follows the last turn of its episode.
        scored += [ScoredTrajectory(branch, of_turns[-1:]) for branch in item.branches]
    return scored


def grpo_advantage(
    rewards: Float[Tensor, "n"],
    group: Int[Tensor, "n"],
    *,
    std: bool = True,
    epsilon: float = EPSILON,
) -> Float[Tensor, "n"]:
    """Return `(r - mean) / (deviation + epsilon)` per group, or `r - mean` without `std`.

    The deviation is that of a sample (n - 1).
    """
    index, count = _members(group)
    centred = _centre(rewards, index, count.to(rewards.dtype).reciprocal()[index])
    if std:
        squares = _sum(centred.square(), index)
        centred = centred / ((squares / (count - 1).clamp(min=1)).sqrt() + epsilon)[index]
    return torch.where(_differs(rewards, index), centred, 0.0)


def rloo_advantage(rewards: Float[Tensor, "n"], group: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
    """Return `r - mean of the others` per group, which is `(r - mean) * n / (n - 1)`."""
    index, count = _members(group)
    size = count.to(rewards.dtype)
    return grpo_advantage(rewards, group, std=False) * (size / (size - 1).clamp(min=1))[index]


def opo_advantage(
    rewards: Float[Tensor, "n"], group: Int[Tensor, "n"], *, lengths: Float[Tensor, "n"]
) -> Float[Tensor, "n"]:
    """Return `r - sum(length * r) / sum(length)` per group; 0 for a group without a token."""
    index, _ = _members(group)
    # A group without a token has the share 0 / 0 = NaN, which is not > 0.
    share = lengths / _sum(lengths, index)[index]
    return torch.where(_differs(rewards, index) & (share > 0), _centre(rewards, index, share), 0.0)


def batch_advantage(
    rewards: Float[Tensor, "n"],
    group: Int[Tensor, "n"] | None = None,
    *,
    lengths: Float[Tensor, "n"] | None = None,
    epsilon: float = 1e-8,
) -> Float[Tensor, "n"]:
    """Return `(x - mean) / sqrt(variance + epsilon)` over the batch.

    x is r, or r minus its group's mean if `group` is given. `lengths` are the weights in mean and
    variance (that of a sample, n - 1). Equal rewards in a group (without `group`: in the batch)
    give 0: they teach nothing, and the weighted mean of x would otherwise shift them.
    """
    whole = torch.zeros_like(rewards, dtype=torch.long)
    index = whole if group is None else _members(group)[0]
    base = rewards if group is None else grpo_advantage(rewards, group, std=False)
    weight = torch.ones_like(base) if lengths is None else lengths
    total = weight.sum().clamp(min=1)
    centred = _centre(base, whole, weight / total)
    variance = (weight * centred.square()).sum() / (total - 1).clamp(min=1)
    return torch.where(_differs(rewards, index), centred * (variance + epsilon).rsqrt(), 0.0)


def reward_to_go(
    rewards: Float[Tensor, "turns"], *, discount: float = 1.0
) -> Float[Tensor, "turns"]:
    """Return the discounted reward from each turn on: `G_k = r_k + discount * G_{k+1}`.

    >>> reward_to_go(torch.tensor([1.0, 0.0, 2.0]), discount=0.5)
    tensor([1.5000, 1.0000, 2.0000])
    """
    if not 0 <= discount <= 1:
        raise ValueError(f"discount must be between 0 and 1, got {discount}")
    to_go, running = [], 0.0
    for reward in reversed(rewards.tolist()):
        running = reward + discount * running
        to_go.append(running)
    return rewards.new_tensor(to_go[::-1])


def _trajectories(groups: Sequence[Group]) -> list[Trajectory]:
    return [item for group in groups for item in group.trajectories]


def _outcomes(groups: Sequence[Group]) -> tuple[Tensor, Tensor]:
    """Return rewards `[n]` in float64 and the index `[n]` of each trajectory's group."""
    for item in _trajectories(groups):
        if not math.isfinite(item.reward):
            raise ValueError(
                f"episode {item.episode} of {item.task.key} has reward {item.reward}: "
                f"{dict(item.rewards)}"
            )
    rewards = [item.reward for item in _trajectories(groups)]
    owner = [index for index, group in enumerate(groups) for _ in group.trajectories]
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(owner, dtype=torch.long)


def _lengths(groups: Sequence[Group]) -> Tensor:
    """Return the action tokens `[n]` of each episode, branches included."""
    lengths = []
    for item in _trajectories(groups):
        lengths.append(item.num_sampled + sum(branch.num_sampled for branch in item.branches))
    return torch.tensor(lengths, dtype=torch.float64)


def _turn_rewards(item: Trajectory) -> Tensor:
    turns = item.num_turns
    rewards = item.turn_rewards or (0.0,) * turns
    if len(rewards) != turns:
        raise ValueError(
            f"episode {item.episode} of {item.task.key}: {len(rewards)} turn_rewards, {turns} turns"
        )
    if rewards:
        rewards = (*rewards[:-1], rewards[-1] + item.reward)
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"episode {item.episode} of {item.task.key} has turn_rewards {rewards}")
    return torch.tensor(rewards, dtype=torch.float64)


def _score(groups: Sequence[Group], advantage: Tensor) -> list[ScoredTrajectory]:
    """Return each trajectory and its branches with the episode's advantage."""
    scored = []
    for item, value in zip(_trajectories(groups), advantage.tolist(), strict=True):
        scored += [ScoredTrajectory(one, (value,)) for one in (item, *item.branches)]
    return scored


def _members(group: Tensor) -> tuple[Tensor, Tensor]:
    """Return the groups renumbered 0, 1, ..., and the number of members of each group."""
    _, index, count = group.unique(return_inverse=True, return_counts=True)
    return index, count


def _sum(values: Tensor, index: Tensor) -> Tensor:
    return values.new_zeros(int(index.max()) + 1 if len(index) else 0).index_add(0, index, values)


def _centre(values: Tensor, index: Tensor, share: Tensor) -> Tensor:
    """Subtract the group's mean under the weights `share`, which sum to 1 over a group."""
    return values - _sum(share * values, index)[index]


def _differs(values: Tensor, index: Tensor) -> Tensor:
    """Return True where a group's values differ. Else rounding would become an advantage."""
    size = int(index.max()) + 1 if len(index) else 0
    top = values.new_full((size,), -math.inf).scatter_reduce(0, index, values, "amax")
    bottom = values.new_full((size,), math.inf).scatter_reduce(0, index, values, "amin")
    return (top > bottom)[index]
