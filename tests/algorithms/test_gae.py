"""Test GAE and the loss of a critic.

Advantages and targets are those of TRL's PPO trainer and of verl (`compute_gae_advantage_return`),
whose formulas are written here again for padded rows. Text between the turns takes no time. The
value loss is TRL's. With lambda 1, targets do not depend on the forecasts.
"""

import pytest
import torch
from torch import Tensor

from unstale.algorithms.gae import action_starts, gae_advantage, value_loss


def verl_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """verl's formula for `[B, L]`: masked tokens pass the next value and the running sum on."""
    next_value = torch.zeros(len(rewards), dtype=torch.float64)
    running = torch.zeros_like(next_value)
    found = []
    for t in reversed(range(rewards.shape[1])):
        error = rewards[:, t] + gamma * next_value - values[:, t]
        summed = error + gamma * lam * running
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        running = torch.where(mask[:, t], summed, running)
        found.append(running)
    advantage = torch.stack(found[::-1], 1)
    return advantage, advantage + values


def trl_gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """TRL's formula for `[B, L]` without masked tokens in between."""
    last, reversed_ = torch.zeros(len(rewards), dtype=torch.float64), []
    length = rewards.shape[1]
    for t in reversed(range(length)):
        following = values[:, t + 1] if t < length - 1 else torch.zeros_like(last)
        delta = rewards[:, t] + gamma * following - values[:, t]
        last = delta + gamma * lam * last
        reversed_.append(last)
    advantage = torch.stack(reversed_[::-1], dim=1)
    return advantage, advantage + values


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.97, 0.0)])
def test_advantages_are_those_of_trl_and_verl(gamma: float, lam: float) -> None:
    made = torch.Generator().manual_seed(3)
    rewards, values = torch.randn(2, 5, 17, generator=made, dtype=torch.float64)
    ours = gae_advantage(
        rewards.flatten(),
        values.flatten(),
        sequence=torch.arange(5).repeat_interleave(17),
        discount=gamma,
        lam=lam,
    )
    everywhere = torch.ones(5, 17, dtype=torch.bool)
    for theirs, returns in (
        trl_gae(rewards, values, gamma, lam),
        verl_gae(rewards, values, everywhere, gamma, lam),
    ):
        torch.testing.assert_close(ours.reshape(5, 17), theirs, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close((ours + values.flatten()).reshape(5, 17), returns)


def test_text_between_turns_takes_no_time_as_in_verl() -> None:
    made = torch.Generator().manual_seed(4)
    mask = torch.rand(6, 23, generator=made) < 0.6
    mask[:, 0] = True
    rewards, values = torch.randn(2, 6, 23, generator=made, dtype=torch.float64)
    rewards = rewards * mask
    theirs, _ = verl_gae(rewards, values, mask, 0.9, 0.8)
    ours = gae_advantage(
        rewards[mask],
        values[mask],
        sequence=torch.arange(6)[:, None].expand(6, 23)[mask],
        discount=0.9,
        lam=0.8,
    )
    torch.testing.assert_close(ours, theirs[mask], rtol=1e-12, atol=1e-12)


def test_with_lambda_one_a_target_is_the_sum_of_later_rewards() -> None:
    values = torch.tensor([3.0, -2.0, 0.5, 9.0])
    sequence = torch.tensor([0, 0, 0, 1])
    rewards = torch.tensor([1.0, 0.0, 2.0, 5.0])
    advantage = gae_advantage(rewards, values, sequence=sequence, discount=1.0, lam=1.0)
    assert (advantage + values).tolist() == [3.0, 2.0, 2.0, 5.0]


def test_an_action_begins_with_each_token_or_with_each_turn() -> None:
    turn = torch.tensor([-1, 0, 0, -1, 1, 0, 0])
    sequence = torch.tensor([0, 0, 0, 0, 0, 1, 1])
    sampled = turn >= 0
    given = {"sampled": sampled, "turn": turn, "sequence": sequence}
    assert torch.equal(action_starts(**given, over="token"), sampled)
    assert action_starts(**given, over="turn").tolist() == [0, 1, 0, 0, 1, 1, 0]


def test_the_value_loss_is_that_of_trl() -> None:
    made = torch.Generator().manual_seed(5)
    value, before, target = torch.randn(3, 64, generator=made, dtype=torch.float64)
    value.requires_grad_()
    for clip in (0.2, 1.0):
        clipped = torch.clamp(value, before - clip, before + clip)
        theirs = 0.5 * torch.max((value - target) ** 2, (clipped - target) ** 2)
        ours = value_loss(value, before, target, clip=clip)
        torch.testing.assert_close(ours, theirs)
        (mine,) = torch.autograd.grad(ours.sum(), value)
        (other,) = torch.autograd.grad(theirs.sum(), value)
        torch.testing.assert_close(mine, other)
    plain = value_loss(value, before, target, clip=0.0)
    torch.testing.assert_close(plain, 0.5 * (value - target) ** 2)
