"""Compare GAE and the loss of a critic with verl, AReaL and slime, over several turns.

TRL computes both inside of its PPO trainer, so it is not compared. Where a peer means
something else, a test states what:

- AReaL continues a sequence that a limit cut off with a forecast; here it counts as ended.
- slime's GAE counts text between turns as time, and its value loss has no factor of 1/2.
"""

import pytest
import torch
from torch import Tensor

from tests.support.peers import COUNT, INPUTS, SAMPLED, SEQUENCE, SINGLE, TURN, close, made_by
from unstale.algorithms.advantages import whiten
from unstale.algorithms.gae import action_starts, gae_advantage, value_loss

VALUE, BEFORE, REWARD = (INPUTS[name] for name in ("value", "value_before", "reward"))
EVERYWHERE = torch.ones_like(SAMPLED)


def over_tokens(
    discount: float, lam: float, *, where: Tensor = SAMPLED, reward: Tensor = REWARD
) -> Tensor:
    given = {"sequence": SEQUENCE[where], "discount": discount, "lam": lam}
    return gae_advantage(reward[where], VALUE[where], **given)


def over_turns(discount: float, lam: float, reward: Tensor = REWARD) -> tuple[Tensor, Tensor]:
    """Return the advantage and the target of each sampled token's turn."""
    sequence, turn = SEQUENCE.flatten(), TURN.flatten()
    sampled = turn >= 0
    starts = action_starts(sampled, turn, sequence=sequence, over="turn")
    action = (starts.cumsum(0) - 1)[sampled]
    paid = torch.zeros(int(starts.sum()), dtype=torch.float64)
    paid.index_add_(0, action, reward.flatten()[sampled])
    value = VALUE.flatten()[starts]
    given = {"sequence": sequence[starts], "discount": discount, "lam": lam}
    advantage = gae_advantage(paid, value, **given)
    return advantage[action], (advantage + value)[action]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8)])
def test_targets_and_whitened_advantages_are_those_of_verl(gamma: float, lam: float) -> None:
    theirs = made_by("verl", f"gae {gamma} {lam}")
    advantage = over_tokens(gamma, lam)
    close(advantage + VALUE[SAMPLED], theirs["returns"][SAMPLED])
    close(whiten(advantage), theirs["whitened"][SAMPLED], SINGLE)  # it adds 1e-8 to divisors


def test_gae_over_tokens_is_that_of_areal() -> None:
    theirs = made_by("AReaL", "gae over tokens")
    advantage = over_tokens(0.9, 0.8)
    close(advantage, theirs["advantage"][SAMPLED])
    close(advantage + VALUE[SAMPLED], theirs["returns"][SAMPLED])


def test_gae_over_turns_is_that_of_areal() -> None:
    theirs = made_by("AReaL", "gae over turns")
    for ours, name in zip(over_turns(0.9, 0.8), ("advantage", "returns"), strict=True):
        close(ours, theirs[name][SAMPLED], SINGLE)


def test_areal_forecasts_the_rest_of_a_sequence_that_was_cut() -> None:
    """Its value 5 after the end counts as a reward of discount * 5 for the last action."""
    last = torch.zeros_like(REWARD)
    rows = torch.arange(len(SAMPLED))
    last[rows, (SAMPLED * torch.arange(1, SAMPLED.shape[1] + 1)).argmax(1)] = 0.9 * 5.0
    cut = REWARD + last
    tokens = made_by("AReaL", "gae over tokens of cut sequences")["advantage"][SAMPLED]
    turns = made_by("AReaL", "gae over turns of cut sequences")["advantage"][SAMPLED]
    close(over_tokens(0.9, 0.8, reward=cut), tokens)
    close(over_turns(0.9, 0.8, cut)[0], turns, SINGLE)
    assert (tokens - over_tokens(0.9, 0.8)).abs().min() > 0.01


def test_slimes_gae_counts_text_between_turns_as_time() -> None:
    theirs = made_by("slime", "gae")["advantage"]
    close(over_tokens(0.9, 0.8, where=EVERYWHERE), theirs.flatten())
    assert (over_tokens(0.9, 0.8) - theirs[SAMPLED]).abs().max() > 0.3


@pytest.mark.parametrize(
    ("peer", "clip", "factor", "tolerance"),
    [
        ("verl", 0.2, 1.0, 1e-10),
        ("verl", 0.4, 1.0, 1e-10),
        ("AReaL", 0.2, 1.0, 1e-6),  # in float32
        ("slime", 0.2, 2.0, 1e-10),  # without 1/2
    ],
)
def test_the_clipped_value_loss(peer: str, clip: float, factor: float, tolerance: float) -> None:
    theirs = made_by(peer, f"value loss {clip}")
    value = VALUE.clone().requires_grad_()
    loss = value_loss(value[SAMPLED], BEFORE[SAMPLED], (BEFORE + REWARD)[SAMPLED], clip=clip)
    total = factor * loss.sum() / COUNT
    (slope,) = torch.autograd.grad(total, value)
    both = {"rtol": tolerance, "atol": tolerance}
    close(total.detach(), theirs["loss"], both)
    close(slope, theirs["gradient"], both)
    assert 0 < (slope[SAMPLED] == 0).sum() < COUNT  # some are clipped
