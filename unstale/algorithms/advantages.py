"""Credit: how much better than its siblings was a trajectory, or a turn of it?

Every estimator is `(groups) -> list[Credited]`, trajectories in their order, and rests on a function of tensors that
knows no records (`rewards [n]` and `group [n]`, any integers). Both directions agree on the edges: a trajectory
without siblings, and a group whose rewards are all equal, get exactly 0 from every estimator that compares siblings,
never NaN. Failed episodes have no reward and take no part. Rewards are summed over their channels, in float64. An
episode counts once however many branches it has; each of them gets its advantage, after it.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unstale.records import Group, ScoredTrajectory, Trajectory

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it, as public GRPO implementations do."""


def grpo(groups: Sequence[Group], *, std: bool = True) -> list[ScoredTrajectory]:
    """Reward minus the group's mean, over the group's standard deviation (arXiv 2402.03300, section 4.1.2)."""
    rewards, group = _outcomes(groups)
    return _credited(groups, grpo_advantage(rewards, group, std=std))


def grpo_no_std(groups: Sequence[Group]) -> list[ScoredTrajectory]:
    """`grpo` without the division: groups with little spread are not blown up."""
    return grpo(groups, std=False)


def dr_grpo(groups: Sequence[Group]) -> list[ScoredTrajectory]:
    """The advantage of Dr. GRPO (arXiv 2503.20783), `grpo_no_std`; its other half is `token_norm(how="constant")`."""
    return grpo(groups, std=False)


def rloo(groups: Sequence[Group]) -> list[ScoredTrajectory]:
    """Reward minus the mean of the *other* siblings: unbiased (arXiv 2402.14740)."""
    return _credited(groups, rloo_advantage(*_outcomes(groups)))


def opo(groups: Sequence[Group]) -> list[ScoredTrajectory]:
    """Reward minus the group's mean weighted by action tokens: less variance (arXiv 2505.23585)."""
    rewards, group = _outcomes(groups)
    return _credited(groups, opo_advantage(rewards, group, lengths=_lengths(groups)))


def reinforce_batch(
    groups: Sequence[Group], *, group_baseline: bool = True, by_tokens: bool = True
) -> list[ScoredTrajectory]:
    """REINFORCE with rewards normalised over the whole batch (REINFORCE++, arXiv 2501.03262).

    `group_baseline` first takes each group's mean away. `by_tokens` counts a trajectory once per action token in the
    batch's mean and deviation, else once. Give it the groups of one batch, all of them.
    """
    rewards, group = _outcomes(groups)
    lengths = _lengths(groups) if by_tokens else None
    return _credited(
        groups, batch_advantage(rewards, group if group_baseline else None, lengths=lengths)
    )


def turn_level(
    groups: Sequence[Group], *, discount: float = 1.0, std: bool = True
) -> list[ScoredTrajectory]:
    """One advantage per turn: the discounted reward to go, normalised over all turns of the group.

    A turn's reward is its own of `Trajectory.turn_rewards` (0 where there are none); the last turn has the
    episode's reward besides. With discount 1, outcome rewards and equally many turns, `std=False` gives every turn
    what `grpo_no_std` gives.
    Raises ValueError if `turn_rewards` has another length than the trajectory has turns.
    """
    items = _trajectories(groups)
    if not items:
        return []
    _, group = _outcomes(groups)
    _, siblings = _members(group)
    returns = [reward_to_go(_turn_rewards(item), discount=discount) for item in items]
    turns = torch.tensor([len(item) for item in returns])
    advantage = grpo_advantage(torch.cat(returns), group.repeat_interleave(turns), std=std)
    advantage = torch.where((siblings[group] > 1).repeat_interleave(turns), advantage, 0.0)
    parts = [tuple(part.tolist()) or (0.0,) for part in advantage.split(turns.tolist())]
    return [
        ScoredTrajectory(one, part if one is item else part[-1:])
        for item, part in zip(items, parts, strict=True)
        for one in (item, *item.branches)
    ]


def grpo_advantage(
    rewards: Float[Tensor, "n"],
    group: Int[Tensor, "n"],
    *,
    std: bool = True,
    epsilon: float = EPSILON,
) -> Float[Tensor, "n"]:
    """`(r - mean) / (deviation + epsilon)` per group, or `r - mean`. The deviation is the sample's (n - 1)."""
    index, count = _members(group)
    centred = _centre(rewards, index, count.to(rewards.dtype).reciprocal()[index])
    if std:
        squares = _sum(centred.square(), index)
        centred = centred / ((squares / (count - 1).clamp(min=1)).sqrt() + epsilon)[index]
    return torch.where(_differs(rewards, index), centred, 0.0)


def rloo_advantage(rewards: Float[Tensor, "n"], group: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
    """`r - mean of the others`, which is `(r - mean) * n / (n - 1)`."""
    index, count = _members(group)
    size = count.to(rewards.dtype)
    return grpo_advantage(rewards, group, std=False) * (size / (size - 1).clamp(min=1))[index]


def opo_advantage(
    rewards: Float[Tensor, "n"], group: Int[Tensor, "n"], *, lengths: Float[Tensor, "n"]
) -> Float[Tensor, "n"]:
    """`r - sum(length * r) / sum(length)` per group. A group without a token gets 0."""
    index, _ = _members(group)
    share = (
        lengths / _sum(lengths, index)[index]
    )  # 0 / 0 in a group without a token: NaN, which is not > 0
    return torch.where(_differs(rewards, index) & (share > 0), _centre(rewards, index, share), 0.0)


def batch_advantage(
    rewards: Float[Tensor, "n"],
    group: Int[Tensor, "n"] | None = None,
    *,
    lengths: Float[Tensor, "n"] | None = None,
    epsilon: float = 1e-8,
) -> Float[Tensor, "n"]:
    """`(x - mean) / sqrt(variance + epsilon)` over the batch, where x is r, or r - group mean if `group` is given.

    `lengths` weigh mean and variance (the sample's, n - 1). 0 for a group (without `group`: a batch) whose r do not
    vary: it teaches nothing, and the weighted mean of x would otherwise move it.
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
    """`G_k = r_k + discount * G_{k+1}`.

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
    """Rewards `[n]` in float64, and the number of the group each belongs to."""
    for item in _trajectories(groups):
        if not math.isfinite(item.reward):
            raise ValueError(
                f"episode {item.episode} of {item.task.key} has reward {item.reward}: {dict(item.rewards)}"
            )
    rewards = [item.reward for item in _trajectories(groups)]
    owner = [index for index, group in enumerate(groups) for _ in group.trajectories]
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(owner, dtype=torch.long)


def _lengths(groups: Sequence[Group]) -> Tensor:
    episodes = [(item, *item.branches) for item in _trajectories(groups)]
    return torch.tensor(
        [sum(one.num_sampled for one in each) for each in episodes], dtype=torch.float64
    )


def _turn_rewards(item: Trajectory) -> Tensor:
    turns = item.num_turns
    own = item.turn_rewards or (0.0,) * turns
    if len(own) != turns:
        raise ValueError(
            f"episode {item.episode} of {item.task.key}: {len(own)} turn_rewards, {turns} turns"
        )
    rewards = own and (*own[:-1], own[-1] + item.reward)
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"episode {item.episode} of {item.task.key} has turn_rewards {rewards}")
    return torch.tensor(rewards, dtype=torch.float64)


def _credited(groups: Sequence[Group], advantage: Tensor) -> list[ScoredTrajectory]:
    pairs = zip(_trajectories(groups), advantage.tolist(), strict=True)
    return [
        ScoredTrajectory(one, (value,)) for item, value in pairs for one in (item, *item.branches)
    ]


def _members(group: Tensor) -> tuple[Tensor, Tensor]:
    """Groups renumbered 0, 1, ..., and how many members each has."""
    _, index, count = group.unique(return_inverse=True, return_counts=True)
    return index, count


def _sum(values: Tensor, index: Tensor) -> Tensor:
    return values.new_zeros(int(index.max()) + 1 if len(index) else 0).index_add(0, index, values)


def _centre(values: Tensor, index: Tensor, share: Tensor) -> Tensor:
    """Values minus their group's mean under `share`, which sums to 1 over a group."""
    return values - _sum(share * values, index)[index]


def _differs(values: Tensor, index: Tensor) -> Tensor:
    """True where a group's values are not all equal: rounding in a mean must not become an advantage."""
    size = int(index.max()) + 1 if len(index) else 0
    top = values.new_full((size,), -math.inf).scatter_reduce(0, index, values, "amax")
    bottom = values.new_full((size,), math.inf).scatter_reduce(0, index, values, "amin")
    return (top > bottom)[index]
