"""Advantage estimators, which compare the reward of an episode or turn with other rewards.

A function with the decorator `@estimator` is a value of the option `advantage.estimator`. It may
also be in a file of the user that the run imports, or be an entry point of another package. It
receives the groups of one batch and returns their trajectories with advantages, in the same order.
Its keyword-only parameters get the values of the options of the same names in `advantage`. Most
estimators call a function of two tensors: `rewards [n]`, and `group [n]` with any integers.

The reward of an episode is the sum of its named rewards, in float64. Failed episodes have no reward
and are left out. Most estimators compare the episodes of one task. They give advantage 0 to the
only episode of a group, and to the episodes of a group with equal rewards. An episode counts once,
even if it has branches (further conversations). Each branch gets the advantage of its episode.

If the policy has several roles in an episode, an episode counts once for each role. The reward of a
role (`Trajectory.role_reward`) is compared with the same role's rewards in the other episodes of
the group, and all conversations of the role get this advantage.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unstale.config.declared import add_choice
from unstale.config.plugins import Plugins
from unstale.records import Group, ScoredTrajectory, Trajectory

EPSILON = 1e-6
"""A number that is added to a standard deviation before dividing by it, so that the divisor is
never 0. Public implementations of GRPO use the same number.
"""

Estimator = Callable[..., list[ScoredTrajectory]]
Function = TypeVar("Function", bound=Estimator)

ESTIMATORS: dict[str, Estimator] = {}


def estimator(function: Function) -> Function:
    """Register a function as a value of the option `advantage.estimator`. Used as a decorator.

    Raises ValueError if a function of another file has the same name.
    """
    name = function.__name__
    if ESTIMATORS.setdefault(name, function).__module__ != function.__module__:
        raise ValueError(f"estimator {name} is registered already")
    ESTIMATORS[name] = function
    add_choice("advantages", "estimator", function)
    return function


def find_estimator(name: str) -> Estimator:
    """Return the advantage estimator with the given name, a value of `advantage.estimator`.

    It is a registered function, or an entry point of another package. Raises `ConfigError` if that
    package is broken.
    """
    return ESTIMATORS.get(name) or Plugins("unstale.estimators", Callable).load(name)


@estimator
def grpo(groups: Sequence[Group]) -> list[ScoredTrajectory]:
    """GRPO (arXiv 2402.03300): reward minus the group's mean, divided by the group's deviation."""
    return _score(groups, grpo_advantage(*_outcomes(groups)))


@estimator
def grpo_no_std(groups: Sequence[Group]) -> list[ScoredTrajectory]:
    """GRPO without the division: the reward minus the group's mean.

    Dividing by the standard deviation gives groups whose rewards differ little a larger weight.
    """
    return _score(groups, grpo_advantage(*_outcomes(groups), std=False))


@estimator
def dr_grpo(groups: Sequence[Group]) -> list[ScoredTrajectory]:
    """Dr. GRPO (arXiv 2503.20783): the reward minus the group's mean, without a division.

    The advantage equals that of `grpo_no_std`. To complete the method, set
    `objective.loss_aggregation = constant`.
    """
    return grpo_no_std(groups)


@estimator
def rloo(groups: Sequence[Group]) -> list[ScoredTrajectory]:
    """RLOO (arXiv 2402.14740): the reward minus the mean reward of the group's other episodes.

    This gives an unbiased estimate of the policy gradient.
    """
    return _score(groups, rloo_advantage(*_outcomes(groups)))


@estimator
def rloo_first(groups: Sequence[Group]) -> list[ScoredTrajectory]:
    """RLOO with a baseline from the first episodes of a group, before a technique added more.

    Use it with a technique that adds episodes to a group because of the rewards of its first ones.
    A mean over all episodes would then be biased. With the mean of the first episodes, the gradient
    of each task keeps its direction, and its size grows with the number of episodes. Without added
    episodes the result equals `rloo`.
    """
    rewards, group = _outcomes(groups)
    added = [
        groups[row.group].trajectories[row.place].episode in groups[row.group].added
        for row in _rows(groups)
    ]
    first = torch.tensor([not each for each in added], dtype=torch.bool)
    return _score(groups, rloo_first_advantage(rewards, group, first=first))


@estimator
def opo(groups: Sequence[Group]) -> list[ScoredTrajectory]:
    """OPO (arXiv 2505.23585): the reward minus the group's length-weighted mean reward.

    The length of an episode is the number of tokens that the policy sampled.
    """
    return _score(groups, opo_advantage(*_outcomes(groups), lengths=_lengths(groups)))


@estimator
def reinforce_batch(
    groups: Sequence[Group], *, group_baseline: bool = True, by_tokens: bool = True
) -> list[ScoredTrajectory]:
    """REINFORCE++ (arXiv 2501.03262): rewards normalized over all episodes of the batch.

    With `group_baseline`, the mean of each group is subtracted first. With `by_tokens`, the weight
    of an episode in the batch's mean and deviation is its number of sampled tokens. Otherwise all
    episodes have the same weight. `groups` must be all groups of the batch.
    """
    rewards, group = _outcomes(groups)
    lengths = _lengths(groups) if by_tokens else None
    baseline = group if group_baseline else None
    return _score(groups, batch_advantage(rewards, baseline, lengths=lengths))


@estimator
def turn_level(
    groups: Sequence[Group], *, discount: float = 1.0, std: bool = True
) -> list[ScoredTrajectory]:
    """One advantage per turn: the discounted sum of its own and later rewards, normalized by group.

    A turn is one reply. The reward of a turn is its entry of `Trajectory.turn_rewards`, or 0 if
    this is empty. The last turn also gets the reward of the whole episode. With `std`, the result
    is divided by the standard deviation over all turns of the group. With discount 1, `std=False`,
    no turn rewards and equal numbers of turns, every turn has the advantage of `grpo_no_std`.
    Raises ValueError if the length of `turn_rewards` is not the number of turns of the trajectory.
    """
    _refuse_roles(groups, "turn_level")
    trajectories = _trajectories(groups)
    if not trajectories:
        return []
    _, group = _outcomes(groups)
    index, count = _members(group)
    returns = [reward_to_go(turn_rewards(item), discount=discount) for item in trajectories]
    turns = torch.tensor([len(item) for item in returns])
    advantage = grpo_advantage(torch.cat(returns), group.repeat_interleave(turns), std=std)
    has_siblings = (count[index] > 1).repeat_interleave(turns)
    advantage = torch.where(has_siblings, advantage, 0.0)
    scored = []
    for item, part in zip(trajectories, advantage.split(turns.tolist()), strict=True):
        of_turns = tuple(part.tolist()) or (0.0,)
        scored.append(ScoredTrajectory(item, of_turns))
        # The branch's replies come after the last turn of its episode.
        scored += [ScoredTrajectory(branch, of_turns[-1:]) for branch in item.branches]
    return scored


@estimator
def gae(
    groups: Sequence[Group],
    *,
    discount: float = 1.0,
    lam: float = 1.0,
    over: str = "token",
    whiten: bool = True,
) -> list[ScoredTrajectory]:
    """GAE (arXiv 1506.02438): later rewards, compared with the forecasts of a critic.

    The trainer has the critic, and computes the advantages (`unstale.trainer.critic`). This
    function only gives the advantages of a critic that always forecasts 0: each turn gets the
    discounted sum of its own and later rewards, even in a group of one episode.
    """
    _refuse_roles(groups, "gae")
    scored = []
    for item in _trajectories(groups):
        returns = reward_to_go(turn_rewards(item), discount=discount).tolist() or [0.0]
        scored.append(ScoredTrajectory(item, tuple(returns)))
        scored += [ScoredTrajectory(branch, (item.reward,)) for branch in item.branches]
    return scored


def grpo_advantage(
    rewards: Float[Tensor, "n"],
    group: Int[Tensor, "n"],
    *,
    std: bool = True,
    epsilon: float = EPSILON,
) -> Float[Tensor, "n"]:
    """Return `(reward - mean) / (deviation + epsilon)`, with the mean and deviation of each group.

    If `std` is False, return `reward - mean`. The deviation is that of a sample (divisor n - 1).
    """
    index, count = _members(group)
    centred = _centre(rewards, index, count.to(rewards.dtype).reciprocal()[index])
    if std:
        squares = _sum(centred.square(), index)
        centred = centred / ((squares / (count - 1).clamp(min=1)).sqrt() + epsilon)[index]
    return torch.where(_differs(rewards, index), centred, 0.0)


def rloo_advantage(rewards: Float[Tensor, "n"], group: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
    """Return each reward minus the mean of the other rewards in its group.

    This equals `(reward - mean) * n / (n - 1)` in a group of n.
    """
    index, count = _members(group)
    size = count.to(rewards.dtype)
    return grpo_advantage(rewards, group, std=False) * (size / (size - 1).clamp(min=1))[index]


def rloo_first_advantage(
    rewards: Float[Tensor, "n"], group: Int[Tensor, "n"], *, first: Bool[Tensor, "n"]
) -> Float[Tensor, "n"]:
    """Return each reward minus the mean reward of the other first episodes of its group.

    `first` marks the episodes with which the group began. An episode whose group has no other first
    episode has advantage 0.
    """
    index, count = _members(group)
    lowest = rewards.new_full((len(count),), math.inf)
    lowest = lowest.scatter_reduce(0, index[first], rewards[first], "amin")
    # Relative to the lowest one, equal first rewards are exactly 0, and so is their mean.
    relative = rewards - lowest[index]
    weight = first.to(rewards.dtype)
    others = _sum(weight, index)[index] - weight
    relative = torch.where(others > 0, relative, 0.0)
    total = _sum(weight * relative, index)[index] - weight * relative
    return torch.where(others > 0, relative - total / others.clamp(min=1), 0.0)


def opo_advantage(
    rewards: Float[Tensor, "n"], group: Int[Tensor, "n"], *, lengths: Float[Tensor, "n"]
) -> Float[Tensor, "n"]:
    """Return each reward minus its group's mean reward, in which episodes have the weights
    `lengths`.

    The result is 0 in a group whose lengths are all 0.
    """
    index, _ = _members(group)
    # In a group whose lengths are all 0 the share is 0 / 0 = NaN, which is not > 0.
    share = lengths / _sum(lengths, index)[index]
    return torch.where(_differs(rewards, index) & (share > 0), _centre(rewards, index, share), 0.0)


def batch_advantage(
    rewards: Float[Tensor, "n"],
    group: Int[Tensor, "n"] | None = None,
    *,
    lengths: Float[Tensor, "n"] | None = None,
    epsilon: float = 1e-8,
) -> Float[Tensor, "n"]:
    """Return rewards normalized over the batch: `(x - mean) / sqrt(variance + epsilon)`.

    x is the reward, or with `group` the reward minus its group's mean. `lengths` are weights in the
    mean and in the variance, whose divisor is n - 1. If all rewards of a group (without `group`: of
    the batch) are equal, the results for it are 0. Otherwise subtracting the weighted mean of x
    would give these rewards an advantage, although they carry no information.
    """
    whole = torch.zeros_like(rewards, dtype=torch.long)
    index = whole if group is None else _members(group)[0]
    base = rewards if group is None else grpo_advantage(rewards, group, std=False)
    weight = torch.ones_like(base) if lengths is None else lengths
    total = weight.sum().clamp(min=1)
    centred = _centre(base, whole, weight / total)
    variance = (weight * centred.square()).sum() / (total - 1).clamp(min=1)
    return torch.where(_differs(rewards, index), centred * (variance + epsilon).rsqrt(), 0.0)


def whiten(
    values: Float[Tensor, "n"],
    *,
    lengths: Float[Tensor, "n"] | None = None,
    epsilon: float = EPSILON,
) -> Float[Tensor, "n"]:
    """Return `(value - mean) / (deviation + epsilon)` with the mean and deviation of all values.

    `lengths` are weights in both. The deviation has the divisor n - 1, where n is the sum of the
    weights. Where all values are equal, the result is 0.
    """
    weight = torch.ones_like(values) if lengths is None else lengths
    total = weight.sum()
    centred = values - (weight * values).sum() / total.clamp(min=1)
    variance = (weight * centred.square()).sum() / (total - 1).clamp(min=1)
    whole = torch.zeros_like(values, dtype=torch.long)
    return torch.where(_differs(values, whole), centred / (variance.sqrt() + epsilon), 0.0)


def reward_to_go(
    rewards: Float[Tensor, "turns"], *, discount: float = 1.0
) -> Float[Tensor, "turns"]:
    """Return for each turn the discounted sum of its own and all later rewards.

    The sum is `G_k = rewards_k + discount * G_{k+1}`. Raises ValueError if `discount` is not from 0
    to 1.

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


class _Row(NamedTuple):
    """All conversations of one role in one episode. They get the same advantage."""

    group: int
    place: int
    """Index of the episode in its group."""
    conversations: tuple[Trajectory, ...]


def _rows(groups: Sequence[Group]) -> list[_Row]:
    """Return a row for each role of each episode, or for each episode if there are no roles."""
    rows = []
    for index, group in enumerate(groups):
        for place, item in enumerate(group.trajectories):
            of_role: dict[str, list[Trajectory]] = {}
            for each in item.conversations:
                of_role.setdefault(each.role, []).append(each)
            rows += [_Row(index, place, tuple(each)) for each in of_role.values()]
    return rows


def _refuse_roles(groups: Sequence[Group], name: str) -> None:
    if any(each.role for item in _trajectories(groups) for each in item.conversations):
        raise ValueError(f"{name} has no credit by role: use grpo, rloo or opo")


def _outcomes(groups: Sequence[Group]) -> tuple[Tensor, Tensor]:
    """Return the rewards to compare, `[n]` in float64, and the number of the group of each, `[n]`.

    There is a reward for each role of each episode. Rewards with the same number are compared with
    each other: those of one role in one group.
    """
    for item in _trajectories(groups):
        if not math.isfinite(item.reward):
            raise ValueError(
                f"episode {item.episode} of {item.task.key} has reward {item.reward}: "
                f"{dict(item.rewards)}"
            )
    rows = _rows(groups)
    rewards = [row.conversations[0].role_reward for row in rows]
    numbers: dict[tuple[int, str], int] = {}
    owner = [
        numbers.setdefault((row.group, row.conversations[0].role), len(numbers)) for row in rows
    ]
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(owner, dtype=torch.long)


def _lengths(groups: Sequence[Group]) -> Tensor:
    """Return the number of tokens that the policy sampled in each row of `_rows`, `[n]`."""
    lengths = [sum(each.num_sampled for each in row.conversations) for row in _rows(groups)]
    return torch.tensor(lengths, dtype=torch.float64)


def turn_rewards(item: Trajectory) -> Float[Tensor, "turns"]:
    """Return the reward of each turn in float64. The last turn also gets the episode's reward.

    Raises ValueError if `item.turn_rewards` is neither empty nor one number for each turn, or if a
    reward is not finite.
    """
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
    """Return every trajectory and its branches, in order, with the advantage of its role."""
    values = {
        (row.group, row.place, row.conversations[0].role): value
        for row, value in zip(_rows(groups), advantage.tolist(), strict=True)
    }
    return [
        ScoredTrajectory(one, (values[index, place, one.role],))
        for index, group in enumerate(groups)
        for place, item in enumerate(group.trajectories)
        for one in item.conversations
    ]


def _members(group: Tensor) -> tuple[Tensor, Tensor]:
    """Return each episode's group as a number 0, 1, ..., and the size of each group."""
    _, index, count = group.unique(return_inverse=True, return_counts=True)
    return index, count


def _sum(values: Tensor, index: Tensor) -> Tensor:
    return values.new_zeros(int(index.max()) + 1 if len(index) else 0).index_add(0, index, values)


def _centre(values: Tensor, index: Tensor, share: Tensor) -> Tensor:
    """Subtract from each value its group's weighted mean. The weights `share` sum to 1 in a
    group.
    """
    return values - _sum(share * values, index)[index]


def _differs(values: Tensor, index: Tensor) -> Tensor:
    """Return True for each value whose group has at least two different values.

    If all rewards of a group are equal, rounding errors would otherwise become advantages.
    """
    size = int(index.max()) + 1 if len(index) else 0
    top = values.new_full((size,), -math.inf).scatter_reduce(0, index, values, "amax")
    bottom = values.new_full((size,), math.inf).scatter_reduce(0, index, values, "amin")
    return (top > bottom)[index]
