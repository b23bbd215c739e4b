"""A bandit of several positions whose policy learns from sequences of an older policy."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

POSITIONS, ARMS, SEQUENCES = 10, 10, 16


class Learnt(NamedTuple):
    """The result of training. Tensors have one value for each seed, `[seeds]`."""

    success: Tensor
    """Probability of the best arm at the end."""
    stopped: float
    """Share of tokens without a gradient, over all steps and seeds."""
    entropy: Tensor
    """Mean entropy of the policy at the end, in nats."""


Weigh = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of log pi, log mu and advantage, each `[seeds, positions, sequences]`. It returns the
factor of each token's score function.
"""


def learn(
    weigh: Weigh, *, lag: int = 0, lr: float = 1.0, steps: int = 100, seeds: int = 24
) -> Learnt:
    """Train with sequences sampled by the policy of `lag` steps before.

    The reward of a sequence is its share of best arms, plus noise.
    """
    noise = torch.Generator().manual_seed(0)
    logits = torch.zeros(seeds, POSITIONS, ARMS)
    past = [logits]
    stopped = 0.0
    for _ in range(steps):
        mu, now = past[0].log_softmax(-1), logits.log_softmax(-1)
        drawn = torch.multinomial(
            mu.exp().reshape(-1, ARMS), SEQUENCES, replacement=True, generator=noise
        )
        arms = drawn.reshape(seeds, POSITIONS, SEQUENCES)
        reward = (arms == 0).float().mean(1)
        reward = reward + 0.5 * torch.randn(reward.shape, generator=noise)
        advantage = (reward - reward.mean(1, keepdim=True)) / reward.std(1, keepdim=True)
        logp, behavior_logp = now.gather(2, arms), mu.gather(2, arms)
        weight = weigh(logp, behavior_logp, advantage[:, None].expand_as(logp))
        stopped += (weight == 0).float().mean().item() / steps
        score = one_hot(arms, ARMS) - now.exp()[:, :, None]
        logits = logits + lr * (weight[..., None] * score).mean(2)
        past = [*past, logits][-(lag + 1) :]
    logp = logits.log_softmax(-1)
    success, entropy = logp.exp()[..., 0].mean(1), -(logp.exp() * logp).sum(-1).mean(1)
    return Learnt(success, stopped, entropy)


def ratio(logp: Tensor, behavior_logp: Tensor, advantage: Tensor) -> Tensor:
    """Return each token's factor without a limit: its ratio pi / mu times its advantage."""
    return (logp - behavior_logp).exp() * advantage


def clip(logp: Tensor, behavior_logp: Tensor, advantage: Tensor) -> Tensor:
    """Return each token's factor in the gradient of PPO's clip."""
    rho = (logp - behavior_logp).exp()
    outside = ((advantage > 0) & (rho > 1.28)) | ((advantage < 0) & (rho < 0.8))
    return torch.where(outside, 0.0, rho * advantage)
