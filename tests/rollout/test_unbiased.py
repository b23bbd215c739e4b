"""Promise: with both factors in place, the gradient is that of the objective, exactly and for every
proxy.

Nothing is sampled. Vocabulary 4, length 3: all 64 sequences are enumerated in float64, and
expectations are sums. The engine's policy mu is, token by token, a perturbed version; the schedule
of versions does not look at the tokens. Everything under test goes through the public functions;
only the true gradients are written out here.

- (a) the product over the sequence times the sequence's score is unbiased, whatever stands in for
  `old_logp`;
- (b) so are prefix products for step rewards;
- (c) token-level ratios have the gradient of another quantity, which is asserted, and it is not
  grad J unless pi = mu;
- without D, (a) fails.
"""

import itertools

import pytest
import torch
from torch import Tensor

from unstale.algorithms.corrections import (
    aggregate,
    keep_all,
    log_discrepancy,
    log_staleness,
    truncate,
    unit_ids,
)
from unstale.algorithms.objectives import none, token_norm

VOCABULARY, LENGTH = 4, 3
SEQUENCES = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
PREFIX = [
    SEQUENCES[:, :t] @ torch.tensor([VOCABULARY**i for i in range(t)], dtype=torch.long)
    for t in range(LENGTH)
]
SAMPLED = torch.ones(SEQUENCES.shape, dtype=torch.bool)
SEQUENCE = torch.arange(len(SEQUENCES))[:, None].expand(SEQUENCES.shape)
SCHEDULES = [(0, 0, 0), (0, 0, 1), (0, 1, 2), (1, 2, 2)]
PROXIES = ["exact", "behavior", "now", "loglinear", "arbitrary"]

Policy = list[Tensor]
"""Logits of the next token, one row per prefix: shapes [1, 4], [4, 4], [16, 4]."""


def noise(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return (
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        * scale
    )


def policy(seed: int) -> Policy:
    return [noise(seed + 10 * t, VOCABULARY**t, VOCABULARY) for t in range(LENGTH)]


def moved(base: Policy, seed: int, *, scale: float) -> Policy:
    return [row + noise(seed + 10 * t, *row.shape, scale=scale) for t, row in enumerate(base)]


def logps(of: Policy) -> Tensor:
    """`[64, 3]`: the log-probability of every token of every sequence, given what precedes it."""
    columns = [torch.log_softmax(of[t], -1)[PREFIX[t], SEQUENCES[:, t]] for t in range(LENGTH)]
    return torch.stack(columns, 1)


ADVANTAGE = noise(900, len(SEQUENCES))
VERSIONS = [policy(1), moved(policy(1), 2, scale=0.3), moved(policy(1), 3, scale=0.6)]
NOW = moved(policy(1), 4, scale=0.8)
ENGINES = [moved(version, 50 + v, scale=0.2) for v, version in enumerate(VERSIONS)]


def of_schedule(policies: list[Policy], schedule: tuple[int, ...]) -> Tensor:
    return torch.stack([logps(policies[v])[:, t] for t, v in enumerate(schedule)], 1)


def proxy(name: str, *, behavior: Tensor, exact: Tensor, now: Tensor) -> Tensor:
    return {
        "exact": exact,
        "behavior": behavior,
        "now": now,
        "loglinear": behavior + 0.4 * (now - behavior),
        "arbitrary": noise(77, *now.shape),
    }[name]


def leaves() -> Policy:
    return [row.clone().requires_grad_() for row in NOW]


def gradient(value: Tensor, of: Policy) -> Tensor:
    return torch.cat([part.flatten() for part in torch.autograd.grad(value, of)])


def true_gradient(reward: Tensor) -> Tensor:
    """Return grad of J = sum over sequences of pi(x) * reward(x)."""
    theta = leaves()
    return gradient((logps(theta).sum(1).exp() * reward).sum(), theta)


def expected_gradient(
    old_logp: Tensor, behavior: Tensor, *, reward: Tensor, whole: bool = True, correct: bool = True
) -> Tensor:
    """Return minus the gradient of the loss, averaged over sequences drawn from mu.

    Tokens with a non-finite `reward` `[64, 3]` are left out. `whole` multiplies ratios over a
    sequence; otherwise they are per token.
    """
    theta = leaves()
    logp = logps(theta)
    sampled = reward.isfinite()
    unit = unit_ids(
        "sequence" if whole else "token",
        sequence=SEQUENCE,
        turn=SEQUENCE,
        version=SEQUENCE,
        sampled=sampled,
    )
    log_d = log_discrepancy(old_logp, behavior, sampled=sampled)
    log_s = log_staleness(logp, old_logp, unit=unit, sampled=sampled, how="sum")
    control = keep_all(sampled)
    if correct:
        control = truncate(
            aggregate(log_d, unit, sampled=sampled, how="sum"), control, high=float("inf")
        )
    assert max(log_d.abs().sum(1).max(), log_s.detach().abs().max()) < 20, "the clamp would act"
    norm = token_norm(
        sampled, control.keep, sequence=SEQUENCE, how="constant", constant=1 / len(SEQUENCES)
    )
    loss = none(log_s, reward.nan_to_num()).loss * control.factor * norm
    return gradient(-(behavior.sum(1).exp()[:, None] * loss).sum(), theta)


def per_token(reward: Tensor) -> Tensor:
    return reward[:, None].expand(SEQUENCES.shape)


def setting(schedule: tuple[int, ...], name: str) -> tuple[Tensor, Tensor]:
    behavior = of_schedule(ENGINES, schedule)
    exact = of_schedule(VERSIONS, schedule)
    return proxy(name, behavior=behavior, exact=exact, now=logps(NOW)), behavior


def assert_close(ours: Tensor, truth: Tensor) -> None:
    torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-13)


def assert_apart(ours: Tensor, truth: Tensor) -> None:
    assert (ours - truth).norm() > 0.05 * truth.norm()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", PROXIES)
def test_sequence_products_are_unbiased_for_every_proxy(
    name: str, schedule: tuple[int, ...]
) -> None:
    old_logp, behavior = setting(schedule, name)
    ours = expected_gradient(old_logp, behavior, reward=per_token(ADVANTAGE))
    assert_close(ours, true_gradient(ADVANTAGE))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", PROXIES)
def test_prefix_products_are_unbiased_for_step_rewards(
    name: str, schedule: tuple[int, ...]
) -> None:
    """The reward of step k depends on the first k tokens and is weighted by the product up to k."""
    old_logp, behavior = setting(schedule, name)
    rewards = [noise(300 + k, VOCABULARY ** (k + 1)) for k in range(LENGTH)]
    earned = [rewards[k][PREFIX[k] + VOCABULARY**k * SEQUENCES[:, k]] for k in range(LENGTH)]
    ours = torch.zeros(())
    for k, reward in enumerate(earned):
        upto = torch.where(torch.arange(LENGTH) <= k, per_token(reward), float("nan"))
        ours = ours + expected_gradient(old_logp, behavior, reward=upto)
    assert_close(ours, true_gradient(sum(earned, torch.zeros(()))))


def one_token_replaced(behavior: Tensor) -> Tensor:
    """Return grad of sum_t E[x_<t ~ mu, x_t ~ pi, x_>t ~ mu] A."""
    theta = leaves()
    logp = logps(theta)
    swapped = [behavior.sum(1) - behavior[:, t] + logp[:, t] for t in range(LENGTH)]
    return gradient(sum(((row.exp() * ADVANTAGE).sum() for row in swapped), torch.zeros(())), theta)


@pytest.mark.parametrize("name", PROXIES)
def test_token_ratios_have_the_gradient_of_another_quantity(name: str) -> None:
    old_logp, behavior = setting((0, 1, 2), name)
    ours = expected_gradient(old_logp, behavior, reward=per_token(ADVANTAGE), whole=False)
    assert_close(ours, one_token_replaced(behavior))
    assert_apart(ours, true_gradient(ADVANTAGE))


def test_token_ratios_are_unbiased_when_the_engine_is_the_policy() -> None:
    now = logps(NOW)
    for name in PROXIES:
        old_logp = proxy(name, behavior=now, exact=now, now=now)
        ours = expected_gradient(old_logp, now, reward=per_token(ADVANTAGE), whole=False)
        assert_close(ours, true_gradient(ADVANTAGE))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["exact", "now", "loglinear", "arbitrary"])
def test_without_the_discrepancy_it_is_biased(name: str, schedule: tuple[int, ...]) -> None:
    """`now` without D is plain REINFORCE on stale data. `behavior` is left out: its D is 1."""
    old_logp, behavior = setting(schedule, name)
    ours = expected_gradient(old_logp, behavior, reward=per_token(ADVANTAGE), correct=False)
    assert_apart(ours, true_gradient(ADVANTAGE))


def test_a_cap_on_the_weight_is_biased() -> None:
    """Truncation is biased, so the unbiasedness tests above can fail."""
    old_logp, behavior = setting((0, 1, 2), "exact")
    unit = SEQUENCE
    theta = leaves()
    log_d = aggregate(
        log_discrepancy(old_logp, behavior, sampled=SAMPLED), unit, sampled=SAMPLED, how="sum"
    )
    log_s = log_staleness(logps(theta), old_logp, unit=unit, sampled=SAMPLED, how="sum")
    weight = truncate(log_d, keep_all(SAMPLED), high=1.0).factor
    loss = none(log_s, per_token(ADVANTAGE)).loss * weight
    assert_apart(
        gradient(-(behavior.sum(1).exp()[:, None] * loss).sum(), theta), true_gradient(ADVANTAGE)
    )
