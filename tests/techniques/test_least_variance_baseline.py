"""Test the baseline, its refusals, and the variance of the gradient under lag."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from tests.support.signals import at_sampled, made, packed
from unstale.config import ConfigError, RunConfig
from unstale.config.options import override
from unstale.records import Batch
from unstale.research.techniques.least_variance_baseline import (
    LeastVarianceBaseline,
    LeastVarianceBaselineConfig,
)

NONE = RunConfig(recipe="mine")


def reduced(
    batch: Batch, log_weight: Tensor, norms: Tensor, advantage: Tensor, **options: object
) -> tuple[Tensor, list[int]]:
    """Return the advantage of each sequence, and the sequences whose gradients were computed."""
    length = int(batch.sampled.sum()) // batch.num_sequences
    wanted: list[int] = []

    def gradient_norms(sequences: Sequence[int], part: str) -> Tensor:
        assert part == "full"
        wanted.extend(sequences)
        return norms.double()[list(sequences)]

    whole = replace(batch, advantage=at_sampled(batch, advantage.repeat_interleave(length)))
    logp = at_sampled(batch, (log_weight / length).repeat_interleave(length))
    logp[~batch.sampled] = 50.0  # of no token that was sampled
    signals = made(whole, logp=logp, gradient_norms=gradient_norms)
    out = LeastVarianceBaseline(LeastVarianceBaselineConfig(**options)).shape(whole, signals)  # type: ignore[arg-type]
    assert torch.equal(out.keep, batch.sampled) and not out.advantage[~batch.sampled].any()
    return out.advantage[batch.sampled].reshape(-1, length)[:, 0], wanted


def test_the_baseline_is_the_mean_weighted_by_squared_weights_and_norms() -> None:
    """For w 1, 2 and g 1, 1 and rewards 1, 0 it is 0.2, whatever was subtracted before."""
    batch = packed(4, 3, group_size=2)
    weight = torch.tensor([1.0, 2, 1, 3]).double().log()
    rewards = torch.tensor([1.0, 0, 0.25, 0.25])
    for shift in (0.0, 0.5):
        found, wanted = reduced(batch, weight, torch.ones(4), rewards - shift)
        assert found.tolist() == pytest.approx([0.8, -0.2, 0, 0])
        assert wanted == [0, 1]  # no gradient for a group of equal rewards
    found, _ = reduced(batch, weight, torch.tensor([2.0, 1, 1, 1]), rewards)
    assert found[:2].tolist() == pytest.approx([0.5, -0.5])
    found, _ = reduced(batch, weight + 900, torch.ones(4), rewards)
    assert found[:2].tolist() == pytest.approx([0.8, -0.2])
    found, _ = reduced(batch, weight, torch.zeros(4), rewards)
    assert found[:2].tolist() == pytest.approx([0.5, -0.5])  # no gradient: the plain mean
    found, wanted = reduced(batch, weight, torch.ones(4), rewards, scope="batch")
    assert found.tolist() == pytest.approx((rewards - 3.5 / 15).tolist()) and len(wanted) == 4


def test_a_sequence_without_sampled_tokens_has_no_part_in_the_baseline() -> None:
    """The group has rewards 1, 0 and one such sequence. The baseline is the mean of 1 and 0."""
    batch = packed(3, 2, group_size=3)
    advantage = at_sampled(batch, torch.tensor([1.0, 1, 0, 0, 7, 7]))
    sampled = batch.sampled & (batch.sequence < 2)
    batch = replace(batch, advantage=advantage, sampled=sampled)
    wanted: list[int] = []

    def gradient_norms(sequences: Sequence[int], part: str) -> Tensor:
        wanted.extend(sequences)
        return torch.ones(len(sequences)).double()

    signals = made(batch, logp=batch.behavior_logp.double(), gradient_norms=gradient_norms)
    out = LeastVarianceBaseline(LeastVarianceBaselineConfig()).shape(batch, signals)
    assert out.advantage[sampled].tolist() == pytest.approx([0.5, 0.5, -0.5, -0.5])
    assert wanted == [0, 1] and not out.advantage[~sampled].any()


def test_no_other_constant_has_a_lower_variance() -> None:
    """The second moment of sum w (R - b) s is least there, for gradients s of one direction."""
    noise = torch.Generator().manual_seed(0)
    weight, norms, rewards = torch.rand(3, 8, generator=noise).double() + 0.1
    found, _ = reduced(packed(8, 1, group_size=8), weight.log(), norms, rewards)
    best = (rewards - found).mean()
    moments = [
        (weight * norms * (rewards - best - shift)).square().sum() for shift in (-0.01, 0, 0.01)
    ]
    assert moments[1] < min(moments[0], moments[2])


def test_several_advantages_in_a_sequence_are_an_error() -> None:
    batch = packed(1, 2)
    batch = replace(batch, advantage=at_sampled(batch, torch.tensor([1.0, 2.0])))
    with pytest.raises(ValueError, match="one advantage per sequence, got several"):
        LeastVarianceBaseline(LeastVarianceBaselineConfig()).shape(
            batch, made(batch, logp=batch.advantage)
        )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"advantage.estimator": "turn_level"},
            "one advantage per episode, got advantage.estimator = turn_level",
        ),
        (
            {"techniques": "confident_error_penalty least_variance_baseline"},
            "got confident_error_penalty, which.*write least_variance_baseline before shapers",
        ),
        (
            {"trainer.lora_rank": 4, "least_variance_baseline.norm": "head"},
            "least_variance_baseline.norm = head needs trainer.lora_rank",
        ),
        (
            {"schedule.group_size": 1},
            "least_variance_baseline.scope = group needs schedule.group_size >= 2, got 1",
        ),
        (
            {"objective.placed": "anchor", "old_logps.route": "snapshot_old"},
            "least_variance_baseline needs objective.placed = mask, got anchor",
        ),
        ({"cluster.trainers": 2}, "least_variance_baseline needs cluster.trainers = 0, got 2"),
    ],
)
def test_what_it_does_not_fit_is_refused(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        override(NONE, {"techniques": "least_variance_baseline", **values})


def test_under_lag_its_gradient_has_less_variance_and_less_noise_than_with_the_mean() -> None:
    """Groups of 8 sequences of 6 tokens, 24 pairs of policies whose logits differ by 0.6.

    The variance is that of a group's gradient, the noise its ratio to the squared mean. The mean is
    smaller, too: a sequence with a large weight is its own baseline.
    """
    seeds, groups, size, length, arms = 24, 60, 8, 6, 4
    noise = torch.Generator().manual_seed(0)
    logits, drift, quality = torch.randn(3, seeds, length, arms, generator=noise).double()
    now, mu = logits.log_softmax(-1), (logits + 0.6 * drift).log_softmax(-1)
    drawn = torch.multinomial(
        mu.exp().reshape(-1, arms).float(), groups * size, replacement=True, generator=noise
    )
    drawn = drawn.reshape(seeds, length, -1).movedim(1, 2)

    def taken(values: Tensor) -> Tensor:
        whole = values[:, None].expand(-1, groups * size, -1, -1)
        return whole.gather(3, drawn[..., None])[..., 0].sum(-1)

    log_weight, total = taken(now - mu), taken(quality)
    reward = (total > total.median(1, keepdim=True).values).double()
    mean = reward.reshape(seeds, groups, size).mean(-1).repeat_interleave(size, 1)
    score = (one_hot(drawn, arms) - now.exp()[:, None]).flatten(2)
    batch = packed(seeds * groups * size, 1, group_size=size)
    flat = [each.flatten() for each in (log_weight, score.norm(dim=-1), reward - mean)]
    better = reduced(batch, *flat)[0].reshape(reward.shape)
    variance, relative = [], []
    for advantage in (reward - mean, better):
        each = (log_weight.exp() * advantage)[..., None] * score
        gradient = each.reshape(seeds, groups, size, -1).mean(2)
        variance.append(gradient.var(1).sum(-1).mean())
        relative.append(variance[-1] / gradient.mean(1).square().sum(-1).mean())
    assert variance[1] < 0.5 * variance[0]
    assert relative[1] < 0.8 * relative[0]
