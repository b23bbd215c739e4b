"""Test limits on a change of probability, against their formulas in plain Python.

- `kpop` bounds a binary KL in both directions, and `LossSpec` aggregates a divergence over units as
  it aggregates log D.
- `dppo` stops the tokens that prime-rl's default loss stops (TV) and that the KL of the paper does.
- Its penalty is on every token, its gradient elsewhere that of an importance weight.
- `drpo` has the gradient weight of its paper and vanishes at the limit of `dppo`.
- `vaco` stops tokens that move away in sequences whose mean |S - 1| is above its limit.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor

from tests.trainer.test_trainer import a_batch, gradient, make, tiny_policy
from unstale.algorithms.corrections import binary_kl, keep_all, kpop, mask_weight, two_way_kl
from unstale.algorithms.objectives import Surrogate, dppo, drpo, vaco
from unstale.config import CorrectionConfig, ObjectiveConfig
from unstale.trainer.rules import LossSpec

PROBABILITY = st.floats(1e-5, 1 - 1e-5)
ADVANTAGES = st.sampled_from([-3.0, -0.5, 0.0, 0.5, 3.0])


def at(now: float, old: float, advantage: float, **options: Any) -> tuple[float, float, Surrogate]:
    """Return loss, derivative by logp and the whole answer for one token."""
    old_logp = tensor([math.log(old)], dtype=torch.float64)
    log_s = (tensor([math.log(now)], dtype=torch.float64) - old_logp).requires_grad_()
    found = dppo(log_s, tensor([advantage], dtype=torch.float64), old_logp=old_logp, **options)
    (slope,) = torch.autograd.grad(found.loss, log_s)
    return found.loss.item(), slope.item(), found


def plain_kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


@pytest.mark.parametrize(
    ("now", "old", "advantage", "loss", "side"),
    [
        (0.6, 0.5, 2.0, -2.4, ""),
        (0.75, 0.5, 2.0, 0.0, "high"),  # likelier by 0.25
        (0.75, 0.5, -2.0, 3.0, ""),  # likelier although bad: never stopped
        (0.25, 0.5, -2.0, 0.0, "low"),
        (0.25, 0.5, 2.0, -1.0, ""),
        (0.01, 0.001, 2.0, -20.0, ""),  # a ratio of 10, which moves hardly any probability
        (0.9, 0.1, 0.0, 0.0, ""),
    ],
)
def test_dppo_stops_by_the_change_of_probability(
    now: float, old: float, advantage: float, loss: float, side: str
) -> None:
    value, slope, found = at(now, old, advantage)
    assert (value, slope) == pytest.approx((loss, loss), abs=1e-12)  # d (S A) / d logp = S A
    assert bool(found.clipped_low) == (side == "low")
    assert bool(found.clipped_high) == (side == "high")


@given(PROBABILITY, PROBABILITY, ADVANTAGES)
@settings(deadline=None)
def test_dppo_with_a_penalty_is_the_default_loss_of_prime_rl(
    now: float, old: float, advantage: float
) -> None:
    """Its mask is on pi - mu, above 0.2 where A > 0 and below -0.2 elsewhere; kl_tau is 1e-3."""
    low, high, kl_tau = 0.2, 0.15, 1e-3
    invalid = now - old > high if advantage > 0 else now - old < -low
    log_ratio = math.log(now) - math.log(old)
    ratio = math.exp(max(-20.0, min(20.0, log_ratio)))
    pull = 2 * kl_tau * log_ratio
    expected = kl_tau * log_ratio**2 - (0.0 if invalid else advantage * ratio)
    slope = pull - (0.0 if invalid else advantage * ratio)
    found = at(now, old, advantage, divergence_low=low, divergence_high=high, kl_tau=kl_tau)
    assert found[:2] == pytest.approx((expected, slope), rel=1e-9, abs=1e-12)


@given(PROBABILITY, PROBABILITY, ADVANTAGES)
@settings(deadline=None)
def test_dppo_with_kl_stops_beyond_the_kl_on_the_side_of_the_advantage(
    now: float, old: float, advantage: float
) -> None:
    kl = plain_kl(old, now)
    stopped = advantage * (now - old) > 0 and kl > 0.05
    options = {"divergence": "kl", "divergence_low": 0.05, "divergence_high": 0.05}
    _, slope, found = at(now, old, advantage, **options)
    if abs(kl - 0.05) > 1e-9:  # at the limit itself, rounding decides
        assert bool(found.clipped) == stopped
        assert (slope == 0) == (stopped or advantage == 0)


def test_a_binary_kl_by_hand() -> None:
    """KL({1/2, 1/2}, {1/4, 3/4}) = log 2 - log(3) / 2 = 0.1438 nats."""
    found = binary_kl(tensor([0.5]).log(), tensor([0.25]).log())
    assert found.item() == pytest.approx(math.log(2) - math.log(3) / 2, rel=1e-5)


def test_rounding_to_certainty_is_no_divergence() -> None:
    """A float32 log-probability of -1e-7 and one that was rounded to 0."""
    certain = tensor([0.0, -1e-7, 0.0]), tensor([-1e-7, 0.0, 0.0])
    assert binary_kl(*certain).abs().max() < 1e-5
    assert 1 < binary_kl(tensor([-0.1]), tensor([0.0])).item() < 2  # 10% against at most 1e-6


def test_junk_off_the_mask_changes_nothing() -> None:
    sampled = tensor([True, False, True])
    found = []
    for junk in (-1.0, math.nan, -math.inf):
        old_logp = tensor([-1.0, junk, -2.0])
        log_s = tensor([0.1, 0.0, -0.2], requires_grad=True)
        inputs = {"old_logp": old_logp, "sampled": sampled}
        advantage = tensor([1.0, junk, -1.0])
        loss = dppo(log_s, advantage, kl_tau=0.1, **inputs).loss
        loss = loss + drpo(log_s, advantage, **inputs).loss
        loss.sum().backward()
        found.append((loss.tolist(), log_s.grad))
    assert all(loss == found[0][0] and grad.equal(found[0][1]) for loss, grad in found)


@given(PROBABILITY, PROBABILITY, ADVANTAGES)
@settings(deadline=None)
def test_drpo_has_the_gradient_weight_of_its_paper(
    now: float, old: float, advantage: float
) -> None:
    """1 - sign(A) (pi - pi_old) / delta, times S A (arXiv 2606.09821, table 1)."""
    old_logp = tensor([math.log(old)], dtype=torch.float64)
    log_s = (tensor([math.log(now)], dtype=torch.float64) - old_logp).requires_grad_()
    found = drpo(log_s, tensor([advantage], dtype=torch.float64), old_logp=old_logp)
    (slope,) = torch.autograd.grad(found.loss, log_s)
    ratio = now / old
    weight = 1 - math.copysign(1, advantage) * (now - old) / 0.2
    loss = abs(advantage) / 0.4 * old * (ratio - 1) ** 2 - ratio * advantage
    assert found.loss.item() == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert slope.item() == pytest.approx(-ratio * advantage * weight, rel=1e-6, abs=1e-9)


def test_vaco_stops_what_moves_away_in_a_far_sequence() -> None:
    """The means of |S - 1| are (0.5 + 0.1 + 0.3) / 3 = 0.3, and 0.15 where nothing is stopped."""
    ratio = tensor([7.0, 1.5, 0.9, 0.7, 1.3, 1.0], dtype=torch.float64)
    sampled = tensor([False, True, True, True, True, True])
    sequence = tensor([0, 0, 0, 0, 1, 1])
    advantage = tensor([0.0, 1.0, 1.0, -1.0, 1.0, 1.0], dtype=torch.float64)
    log_s = ratio.log().requires_grad_()
    found = vaco(log_s, advantage, sequence=sequence, sampled=sampled)
    (slope,) = torch.autograd.grad(found.loss.sum(), log_s)
    assert slope.tolist() == pytest.approx([0, 0, -0.9, 0, -1.3, -1.0])
    assert found.clipped_high.tolist() == [False, True, False, False, False, False]
    assert found.clipped_low.tolist() == [False, False, False, True, False, False]
    wide = vaco(log_s, advantage, sequence=sequence, sampled=sampled, vaco_delta=0.31)
    assert not wide.clipped.any()


# --- corrections
# ------------------------------------------------------------------------------------------------


@given(PROBABILITY, PROBABILITY)
@settings(deadline=None)
def test_kpop_bounds_the_binary_kl_in_both_directions(old: float, mu: float) -> None:
    """D = pi_old / mu is the weight of a token that is kept."""
    log_d = tensor([math.log(old) - math.log(mu)], dtype=torch.float64)
    both = two_way_kl(log_d, tensor([math.log(mu)], dtype=torch.float64))
    found = kpop(log_d, keep_all(tensor([True])), two_way_kl=both, kl_limit=0.1)
    larger = max(plain_kl(old, mu), plain_kl(mu, old))
    if abs(larger - 0.1) > 1e-9:
        kept = larger <= 0.1
        assert found.keep.item() == kept
        ratio = min(math.exp(20), old / mu)
        assert found.factor.item() == pytest.approx(ratio if kept else 0.0, rel=1e-5)


def test_kpop_keeps_large_ratios_of_rare_tokens_where_icepop_does_not() -> None:
    """D = 6 at a probability of 1e-3 moves 0.5% of the mass; D = 1.6 at 0.6 moves 36%."""
    log_d, behavior = tensor([6.0, 1.6]).log(), tensor([1e-3, 0.6]).log()
    every = keep_all(tensor([True, True]))
    divergence = two_way_kl(log_d, behavior)
    assert kpop(log_d, every, two_way_kl=divergence, kl_limit=0.1).keep.tolist() == [True, False]
    assert mask_weight(log_d, every, low=0.5, high=5.0).keep.tolist() == [False, True]


@pytest.mark.parametrize(
    ("mode", "unit", "aggregate"),
    [("kpop", "token", "mean"), ("kpop", "sequence", "max"), ("k3_mask", "sequence", "mean")],
)
def test_divergences_are_aggregated_over_units(mode: str, unit: Any, aggregate: Any) -> None:
    batch = a_batch()
    noise = torch.randn(len(batch.tokens), generator=torch.Generator().manual_seed(3)) * 0.3
    old_logp = torch.where(batch.sampled, batch.behavior_logp + noise, math.nan).clamp(max=-1e-3)
    log_d = (old_logp - batch.behavior_logp).double()
    rows = [batch.sampled & (batch.sequence == i) for i in range(batch.num_sequences)]
    if unit == "token":
        rows = [batch.sampled & (torch.arange(len(noise)) == i) for i in range(len(noise))]
    size = {
        "kpop": lambda i: max(
            plain_kl(*pair)
            for one, two in [(old_logp[i].exp().item(), batch.behavior_logp[i].exp().item())]
            for pair in [(one, two), (two, one)]
        ),
        "k3_mask": lambda i: math.exp(log_d[i]) - 1 - log_d[i].item(),
    }[mode]
    found, expected = [], []
    for row in (each for each in rows if each.any()):
        values = [size(i) for i in row.nonzero().flatten().tolist()]
        found.append(max(values) if aggregate == "max" else sum(values) / len(values))
        expected.append(row)
    limit = sorted(found)[len(found) // 2] * (1 + 1e-4)
    rules = LossSpec(
        CorrectionConfig(mode=mode, unit=unit, aggregate=aggregate, kl_limit=limit),
        ObjectiveConfig(),
    )
    kept = rules.correct(old_logp, batch)
    wanted = torch.zeros_like(batch.sampled)
    for value, row in zip(found, expected, strict=True):
        wanted |= row & (value <= limit)
    assert kept.keep.equal(wanted) and 0 < wanted.sum() < batch.sampled.sum()
    assert kept.weighted == (mode == "kpop")


# --- in the trainer
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", ["dppo", "drpo", "vaco"])
def test_discrepancy_is_limited_only_where_the_engine_is_the_old_policy(loss_type: str) -> None:
    """Before the first step, exact values have S = 1; those of `route = rollout` have S = D."""
    batch = a_batch()
    shift = torch.where(batch.sequence == 0, 0.5, 0.0)  # this sequence has A = 1
    behavior = torch.where(batch.sampled, math.log(0.4), 0.0)
    batch = replace(batch, behavior_logp=behavior)
    rules = LossSpec(CorrectionConfig(), ObjectiveConfig(loss_type=loss_type))
    slopes = []
    for old_logp in (behavior + shift, behavior):
        logp = (behavior + shift).clone().requires_grad_()
        found = rules.surrogate(logp, old_logp, batch)
        (slope,) = torch.autograd.grad(found.loss.sum(), logp)
        slopes.append(slope)
    exact, rollout = slopes
    far = batch.sampled & (batch.sequence == 0)
    torch.testing.assert_close(exact[batch.sampled], -batch.advantage[batch.sampled])
    # p = 0.66 against 0.4: DPPO and VACO stop the tokens, DRPO turns their gradient around
    assert (rollout[far] > 0).all() if loss_type == "drpo" else not rollout[far].any()
    torch.testing.assert_close(rollout[~far], exact[~far])


def first_gradient(**options: Any) -> Tensor:
    """Return the gradient of a first minibatch, with `route = rollout`."""
    trainer = make(
        tiny_policy(dtype="float64"),
        route="rollout",
        objective=ObjectiveConfig(**options),
        correction=CorrectionConfig(mode="none"),
    )
    (part,) = trainer.prepare(a_batch())
    trainer.backward(part)
    return gradient(trainer)


def test_the_trainer_gives_dppo_the_old_log_probabilities() -> None:
    """Without a limit it is a plain importance weight; a limit of 1e-9 stops one direction."""
    wide = {"divergence_low": 0.999, "divergence_high": 0.999}
    plain = first_gradient(loss_type="none")
    torch.testing.assert_close(first_gradient(loss_type="dppo", **wide), plain, rtol=1e-12, atol=0)
    narrow = {"divergence_low": 1e-9, "divergence_high": 1e-9}
    stopped = first_gradient(loss_type="dppo", **narrow)
    torch.testing.assert_close(first_gradient(loss_type="vaco", vaco_delta=1e-9), stopped)
    clipped = first_gradient(loss_type="ppo_clip", clip_low=1e-9, clip_high=1e-9)
    torch.testing.assert_close(stopped, clipped, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(stopped, plain)
