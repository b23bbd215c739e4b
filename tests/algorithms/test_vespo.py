"""Test `vespo` against its formula in plain Python, over whole sequences.

- The weight is W^k exp(lambda (1 - W)), with W the product of a sequence's ratios, and no gradient.
- On fresh data its gradient is REINFORCE's; far from W = 1 it vanishes, and stays finite.
- The trainer takes the product over sequences, whatever the unit.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import tensor

from tests.trainer.test_trainer import a_batch, make
from unstale.algorithms.corrections import log_staleness
from unstale.algorithms.objectives import vespo
from unstale.config import CorrectionConfig, ObjectiveConfig
from unstale.testing import plain_logps, tiny_policy

SEQUENCE = tensor([0, 0, 0, 1, 1, 2])
SAMPLED = tensor([False, True, True, True, True, True])
ADVANTAGE = tensor([9.0, 1.5, 1.5, -2.0, -2.0, 0.5], dtype=torch.float64)


def test_the_weight_is_that_of_the_whole_sequence() -> None:
    """The gradient of a token's logp is -W^k exp(lambda (1 - W)) A."""
    old = tensor([-9.0, -1.0, -2.0, -0.5, -1.5, -1.0], dtype=torch.float64)
    change = tensor([4.0, 0.3, -0.1, 0.4, 0.5, -0.7], dtype=torch.float64)
    logp = (old + change).requires_grad_()
    log_s = log_staleness(logp, old, unit=SEQUENCE, sampled=SAMPLED, how="sum")
    (found,) = torch.autograd.grad(vespo(log_s, ADVANTAGE, sampled=SAMPLED).loss.sum(), logp)
    weights = {}
    for sequence, log_w, k, rate in ((0, 0.2, 2, 3), (1, 0.9, 3, 2), (2, -0.7, 2, 3)):
        w = math.exp(log_w)
        weights[sequence] = w**k * math.exp(rate * (1 - w))
    expected = [
        -weights[int(sequence)] * float(advantage) if own else 0.0
        for sequence, advantage, own in zip(SEQUENCE, ADVANTAGE, SAMPLED, strict=True)
    ]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("advantage", [2.0, -0.5])
def test_the_weight_is_one_on_fresh_data_and_vanishes_far_from_it(advantage: float) -> None:
    slopes = []
    for log_w in (0.0, -60.0, -6.0, 3.0, 60.0):
        log_s = tensor([log_w], requires_grad=True)
        loss = vespo(log_s, tensor([advantage])).loss
        (slope,) = torch.autograd.grad(loss, log_s)
        assert loss.isfinite() and slope.isfinite()
        slopes.append(slope.item())
    assert slopes[0] == pytest.approx(-advantage)
    assert max(map(abs, slopes[1:])) < 1e-3 * abs(advantage)


def test_the_pairs_of_constants_follow_the_sign_of_the_advantage() -> None:
    options = {"vespo_k_pos": 0.0, "vespo_lambda_pos": 1.0}
    log_s = tensor([math.log(2.0)] * 2, dtype=torch.float64, requires_grad=True)
    loss = vespo(log_s, tensor([1.0, -1.0], dtype=torch.float64), **options).loss
    (slope,) = torch.autograd.grad(loss.sum(), log_s)
    assert slope.tolist() == pytest.approx([-math.exp(-1), 2**3 * math.exp(-2)])


def test_its_thresholds_are_where_seven_percent_remain() -> None:
    thresholds = list(ObjectiveConfig(loss_type="vespo").thresholds())
    weights = [
        math.exp(k * at + rate * (1 - math.exp(at)))
        for at, (k, rate) in zip(thresholds, ((2, 3), (3, 2)), strict=True)
    ]
    assert weights == pytest.approx([0.07, 0.07])


@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_the_trainer_takes_the_product_over_a_sequence(unit: Any) -> None:
    """With `route = rollout` W is pi / mu, from unpacked forward passes."""
    policy, batch = tiny_policy(dtype="float64"), a_batch()
    trainer = make(
        policy,
        route="rollout",
        objective=ObjectiveConfig(loss_type="vespo", unit=unit),
        correction=CorrectionConfig(mode="none"),
    )
    spans = list(batch.spans())
    now = torch.cat([plain_logps(policy, batch.tokens[a:b].tolist()) for a, b in spans])
    shift = torch.randn(len(now), generator=torch.Generator().manual_seed(1)) * 0.2
    batch = replace(batch, behavior_logp=torch.where(batch.sampled, now + shift, 0.0))
    total = 0.0
    for start, end in spans:
        own = batch.sampled[start:end]
        log_w = -float(shift[start:end][own].sum())
        for advantage in batch.advantage[start:end][own].tolist():
            k, rate = (2, 3) if advantage >= 0 else (3, 2)
            total -= math.exp(k * log_w + rate * (1 - math.exp(log_w))) * advantage * log_w
    (part,) = trainer.prepare(batch)
    trainer.backward(part)
    assert trainer.metrics()["objective/loss"] == pytest.approx(total / 29, rel=1e-5)
