"""Test GAE and the loss of a critic.

`test_peers_critics.py` has numbers from other trainers, also with text between turns. With lambda
1, targets do not depend on the forecasts.
"""

import pytest
import torch
from torch import Tensor

from unstale.algorithms.gae import action_starts, gae_advantage, value_loss


def by_definition(rewards: Tensor, values: Tensor, discount: float, lam: float) -> Tensor:
    """The sum over k of (discount lam)^k delta[t + k], as a product with a matrix (GAE, eq. 16)."""
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    delta = rewards + discount * following - values
    at = torch.arange(rewards.shape[1])
    ahead = at - at[:, None]
    return delta @ torch.where(ahead >= 0, (discount * lam) ** ahead.clamp(min=0).double(), 0.0).T


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.97, 0.0)])
def test_advantages_are_sums_of_discounted_errors_of_forecasts(gamma: float, lam: float) -> None:
    made = torch.Generator().manual_seed(3)
    rewards, values = torch.randn(2, 5, 17, generator=made, dtype=torch.float64)
    ours = gae_advantage(
        rewards.flatten(),
        values.flatten(),
        sequence=torch.arange(5).repeat_interleave(17),
        discount=gamma,
        lam=lam,
    )
    expected = by_definition(rewards, values, gamma, lam)
    torch.testing.assert_close(ours.reshape(5, 17), expected, rtol=1e-12, atol=1e-12)


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


def test_the_value_loss_is_the_larger_one_with_and_without_the_clip() -> None:
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
