"""Test the metrics of a batch: values worked out by hand, and every name in every row."""

import math

import pytest
import torch
from torch import Tensor

from unstale.algorithms.corrections import CorrectionWeights
from unstale.algorithms.objectives import Surrogate
from unstale.records import Batch, collate
from unstale.testing import episode
from unstale.trainer.metrics import (
    ENTROPY_SAMPLE,
    StepMetrics,
    effective_sample_size,
    kl_estimates,
)

STANDARD = {
    "trainer/grad_norm",
    "trainer/lr",
    "correction/kl_k1",
    "correction/kl_k3",
    "correction/d_ess_share",
    "objective/clip_share",
    "objective/clip_low_share",
    "objective/clip_high_share",
    "objective/kl_k1",
    "objective/kl_k3",
    "objective/s_ess_share",
    "policy/entropy_mean",
    "policy/ds_ess_share",
    "policy/kl_behavior_k1",
    "policy/kl_behavior_k3",
    "policy/kl_reference_k1",
    "policy/kl_reference_k3",
}


def test_kl_estimates_are_the_formulas() -> None:
    """r = log 2 and log 1/2: k1 is their mean with the sign changed, k3 the mean of e^r - 1 - r."""
    k1, k3 = kl_estimates(torch.tensor([math.log(2), math.log(0.5)]))
    assert k1 == pytest.approx(0, abs=1e-7)
    assert k3 == pytest.approx(((2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2))) / 2)
    k1, k3 = kl_estimates(torch.tensor([-1.0]))
    assert (k1, k3) == (pytest.approx(1), pytest.approx(math.exp(-1)))


def test_effective_sample_size_is_the_formula() -> None:
    """Weights 1, 2 and 3: (1 + 2 + 3)^2 / (3 * (1 + 4 + 9)) = 36 / 42."""
    weights = torch.tensor([1.0, 2.0, 3.0]).log()
    assert effective_sample_size(weights) == pytest.approx(36 / 42)
    assert effective_sample_size(weights + 5) == pytest.approx(36 / 42)
    assert effective_sample_size(torch.full((4,), -0.3)) == pytest.approx(1)
    assert effective_sample_size(torch.tensor([20.0, -20.0])) == pytest.approx(1 / 2)
    assert math.isnan(effective_sample_size(torch.empty(0)))


def filled() -> StepMetrics:
    """Return three action tokens with D = 2, 1, 1/2 and S = 1, 1, 4; two are clipped."""
    batch = collate([episode(0, [2, (3, 0)])])
    log_d = torch.tensor([math.log(2), 0.0, math.log(0.5)])
    log_s = torch.tensor([0.0, 0.0, math.log(4)])
    metrics = StepMetrics(action_tokens=3, tokens_with_gradient=3)
    old_logp = at_sampled(batch, batch.behavior_logp[batch.sampled] + log_d)
    logp = at_sampled(batch, old_logp[batch.sampled] + log_s)
    lag = torch.where(batch.sampled, 1, -1)
    correction = CorrectionWeights(torch.ones(len(batch.tokens)), batch.sampled)
    metrics.add_correction(batch, old_logp, correction, exact=batch.sampled, lag=lag)
    low = at_sampled(batch, torch.tensor([1.0, 0.0, 0.0])).bool()
    high = at_sampled(batch, torch.tensor([0.0, 0.0, 1.0])).bool()
    surrogate = Surrogate(logp, clipped_low=low, clipped_high=high)
    metrics.add_forward(batch, logp, old_logp, lag=lag, surrogate=surrogate)
    metrics.add_entropy(torch.tensor([1.0, 3.0]))
    return metrics


def at_sampled(batch: Batch, values: Tensor) -> Tensor:
    row = torch.zeros(len(batch.tokens))
    row[batch.sampled] = values
    return row


def test_a_batch_gives_the_figures_worked_out_by_hand() -> None:
    metrics = filled().metrics()
    log2 = math.log(2)
    expected = {
        "correction/kl_k1": 0.0,
        "correction/kl_k3": ((1 - log2) + 0 + (-0.5 + log2)) / 3,
        "correction/d_ess_share": 3.5**2 / (3 * 5.25),
        "correction/log_d_abs_mean": 2 * log2 / 3,
        "correction/log_d_abs_mean/lag_1": 2 * log2 / 3,
        "correction/log_d_tokens/lag_1": 3,
        "objective/log_s_tokens/lag_1": 3,
        "correction/kept_share": 1.0,
        "objective/kl_k1": -2 * log2 / 3,
        "objective/kl_k3": (3 - 2 * log2) / 3,
        "objective/s_ess_share": 6**2 / (3 * 18),
        "objective/log_s_abs_p99": 2 * log2,
        "objective/clip_share": 2 / 3,
        "objective/clip_low_share": 1 / 3,
        "objective/clip_high_share": 1 / 3,
        "policy/kl_behavior_k1": -2 * log2 / 3,
        "policy/kl_behavior_k3": ((1 - log2) + 0 + (1 - log2)) / 3,
        "policy/ds_ess_share": 5**2 / (3 * 9),
        "policy/entropy_mean": 2.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert metrics["policy/kl_behavior_k1"] == pytest.approx(
        metrics["correction/kl_k1"] + metrics["objective/kl_k1"]
    )


def test_every_standard_name_is_in_a_row_without_tokens() -> None:
    metrics = StepMetrics().metrics()
    assert metrics.keys() >= STANDARD
    assert math.isnan(metrics["policy/entropy_mean"])
    assert math.isnan(filled().metrics()["policy/kl_reference_k3"])
    assert metrics.keys() <= filled().metrics().keys()


def test_the_reference_kl_is_a_plain_token_mean() -> None:
    metrics = filled()
    metrics.add_reference(torch.tensor([0.0, -1.0]))
    assert metrics.metrics()["policy/kl_reference_k1"] == pytest.approx(0.5)
    assert metrics.metrics()["policy/kl_reference_k3"] == pytest.approx(math.exp(-1) / 2)


@pytest.mark.parametrize("num_tokens", [10, ENTROPY_SAMPLE, 5000])
def test_entropy_is_of_evenly_spaced_tokens_however_a_batch_is_cut(num_tokens: int) -> None:
    metrics = StepMetrics(tokens_with_gradient=num_tokens)
    parts = torch.ones(num_tokens, dtype=torch.bool).split(7)
    chosen = torch.cat([metrics.entropy_sample(part) for part in parts]).nonzero().squeeze(1)
    every = math.ceil(num_tokens / ENTROPY_SAMPLE)
    assert chosen.tolist() == list(range(0, num_tokens, every))
    assert len(chosen) <= ENTROPY_SAMPLE
