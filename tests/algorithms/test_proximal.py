"""Test the functions that approximate old log-probabilities.

With the log-linear proxy, D and S are powers of one ratio, so masks and clips only change their
thresholds (Proposition 1). The chosen decay of an average gives the requested age. Padded and
packed layouts agree.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unstale.algorithms import corrections, objectives, proximal

LOGPS = st.lists(
    st.tuples(st.floats(-8, 0), st.floats(-8, 0), st.floats(-3, 3)), min_size=1, max_size=20
)


def columns(rows: list[tuple[float, float, float]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mu, pi, advantage = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)
    )
    return mu, pi, advantage, torch.ones(len(mu), dtype=torch.bool)


@given(LOGPS, st.floats(0.05, 0.95), st.floats(0.01, 2.0))
@settings(deadline=None)
def test_behind_the_loglinear_proxy_thresholds_are_reparameterised_and_nothing_is_decoupled(
    rows: list[tuple[float, float, float]], alpha: float, bound: float
) -> None:
    """Proposition 1: log D = alpha r, log S = (1 - alpha) r. Masking D at c masks the total ratio
    at c / alpha; clipping S at e clips it at e / (1 - alpha). Ratios at a threshold are left out,
    because of rounding.
    """
    mu, pi, advantage, sampled = columns(rows)
    prox = proximal.loglinear(mu, pi, alpha, sampled=sampled)
    total = pi - mu
    log_d = corrections.log_discrepancy(prox, mu, sampled=sampled)
    unit = torch.arange(len(mu))
    log_s = corrections.log_staleness(pi, prox, unit=unit, sampled=sampled)
    torch.testing.assert_close(log_d, alpha * total, atol=1e-12, rtol=0)
    torch.testing.assert_close(log_s, (1 - alpha) * total, atol=1e-12, rtol=0)

    clear = (total.abs() - bound / alpha).abs() > 1e-9
    band = {"low": math.exp(-bound), "high": math.exp(bound)}
    kept = corrections.mask(log_d, corrections.keep_all(sampled), **band).keep
    wide = {"low": math.exp(-bound / alpha), "high": math.exp(bound / alpha)}
    on_total = corrections.mask(total, corrections.keep_all(sampled), **wide).keep
    assert torch.equal(kept[clear], on_total[clear])

    clear = (total.abs() - bound / (1 - alpha)).abs() > 1e-9
    clipped, on_total = (
        objectives.ppo_clip(
            log_ratio, advantage, clip_low=-math.expm1(-limit), clip_high=math.expm1(limit)
        ).clipped
        for log_ratio, limit in ((log_s, bound), (total, bound / (1 - alpha)))
    )
    assert torch.equal(clipped[clear], on_total[clear])


@given(LOGPS, st.floats(0, 1))
@settings(deadline=None)
def test_the_linear_proxy_is_the_mixture_and_its_ends_are_the_two_policies(
    rows: list[tuple[float, float, float]], alpha: float
) -> None:
    mu, pi, _, sampled = columns(rows)
    mixed = proximal.linear(mu, pi, alpha, sampled=sampled)
    torch.testing.assert_close(
        mixed.exp(), (1 - alpha) * mu.exp() + alpha * pi.exp(), atol=1e-12, rtol=0
    )
    for end, policy in ((0.0, mu), (1.0, pi)):
        torch.testing.assert_close(proximal.linear(mu, pi, end, sampled=sampled), policy)
        torch.testing.assert_close(proximal.loglinear(mu, pi, end, sampled=sampled), policy)


def test_no_gradient_flows_through_a_proxy_and_nothing_stands_off_the_mask() -> None:
    mu, pi = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]], requires_grad=True)
    sampled = torch.tensor([[True, False]])
    for between in (proximal.loglinear, proximal.linear):
        prox = between(mu, pi, 0.5, sampled=sampled)
        assert not prox.requires_grad and prox[0, 1] == 0 and prox.shape == (1, 2)


def test_padded_and_packed_layouts_agree() -> None:
    noise = torch.Generator().manual_seed(0)
    mu, pi = (-torch.rand(3, 5, generator=noise) for _ in range(2))
    lag = torch.randint(0, 4, (3, 5), generator=noise)
    sampled = torch.rand(3, 5, generator=noise) < 0.7
    padded = proximal.loglinear(mu, pi, proximal.weight_of_now(lag), sampled=sampled)
    packed = proximal.loglinear(
        mu.flatten(), pi.flatten(), proximal.weight_of_now(lag.flatten()), sampled=sampled.flatten()
    )
    assert torch.equal(padded.flatten(), packed)


@pytest.mark.parametrize(
    ("fresh", "expected"), [(1.0, [1.0, 0.0, 0.5, 2 / 3]), (0.0, [0.0, 0.0, 0.5, 2 / 3])]
)
def test_the_weight_of_the_current_policy_follows_the_lag(
    fresh: float, expected: list[float]
) -> None:
    assert proximal.weight_of_now(
        torch.tensor([0, 1, 2, 3]), fresh=fresh
    ).tolist() == pytest.approx(expected)


@given(st.lists(st.floats(0, 8), min_size=1, max_size=60))
@settings(deadline=None)
def test_the_decay_that_is_chosen_leaves_the_age_that_was_asked_for(targets: list[float]) -> None:
    """One update adds less than 1 to the age, and no more than beta_max allows."""
    weight, age = 1.0, 0.0
    for target in targets:
        beta = proximal.beta_for_age(weight, age, target=target, beta_max=0.95)
        assert 0 <= beta <= 0.95
        before = age
        weight, age = proximal.averaged(weight, age, beta=beta)
        assert age < before + 1
        if beta < 0.95:
            assert age == pytest.approx(target, abs=1e-6)
        else:
            assert age <= target + 1e-6


def test_from_age_zero_a_target_of_three_is_reached_and_kept() -> None:
    weight, age, ages = 1.0, 0.0, []
    for _ in range(40):
        beta = proximal.beta_for_age(weight, age, target=3.0, beta_max=0.95)
        weight, age = proximal.averaged(weight, age, beta=beta)
        ages.append(age)
    assert max(ages) <= 3 + 1e-9
    reached = next(k for k, age in enumerate(ages) if age > 3 - 1e-9)
    assert reached < 10 and ages[reached:] == pytest.approx([3.0] * (40 - reached))
    assert beta == pytest.approx(3 / 4, abs=1e-3)  # in the long run d / (1 + d)


def test_a_decay_of_one_has_no_limit_and_is_refused() -> None:
    with pytest.raises(ValueError, match="beta_max must be"):
        proximal.beta_for_age(1.0, 0.0, target=1.0, beta_max=1.0)
