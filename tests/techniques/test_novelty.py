"""Test `novelty`: its formula, and its effect on the number of right answers that survive."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from tests.support.signals import at_sampled, made, packed
from unstale.config import ConfigError, RunConfig
from unstale.config.options import override
from unstale.records import Batch
from unstale.research.techniques.novelty import Novelty, NoveltyConfig
from unstale.techniques.hooks import Shaper


def batch_of(advantage: list[float], reward: list[float], *, group_size: int) -> Batch:
    """Return sequences of two sampled tokens that share one advantage."""
    batch = packed(len(reward), 2, group_size=group_size)
    values = torch.tensor(advantage).repeat_interleave(2)
    return replace(batch, advantage=at_sampled(batch, values), reward=tuple(reward))


def shaped(batch: Batch, score: list[float], **options: float) -> list[float]:
    """Return the advantage of each sequence. Its tokens have a mean log-probability of `score`."""
    values = torch.tensor(score).repeat_interleave(2) + torch.tensor([0.25, -0.25]).repeat(
        len(score)
    )
    logp = at_sampled(batch, values)
    logp[~batch.sampled] = 50.0  # of no token that was sampled
    out = Novelty(NoveltyConfig(**options)).shape(batch, made(batch, logp=logp))
    assert torch.equal(out.keep, batch.sampled)
    assert not out.advantage[~batch.sampled].any()
    both = out.advantage[batch.sampled].reshape(-1, 2)
    assert torch.equal(both[:, 0], both[:, 1])
    return both[:, 0].tolist()


def test_unlikely_correct_sequences_gain_up_to_the_cap() -> None:
    """Two groups with the means -1 and -2. The eta of sequences are 0.8, 1.25, 0.9 and 1 / 0.9."""
    rare, slight = math.log(0.8), math.log(0.9)
    score = [-1 + rare, -1 - rare, -2 + slight, -2 - slight]
    batch = batch_of([1.0, 2.0, 3.0, -1.0], [1, 1, 1, 0], group_size=2)
    assert shaped(batch, score) == pytest.approx([1.5, 2.0, 3.25, -1.0])
    assert shaped(batch, score, scale=1.0) == pytest.approx([1.2, 2.0, 3.1, -1.0])
    assert shaped(batch, score, cap=0.05) == pytest.approx([1.05, 2.0, 3.15, -1.0])
    assert shaped(batch, [-9.0, -1.0, -9.0, -1.0]) == pytest.approx([1.5, 2.0, 4.5, -1.0])


def test_others_keep_their_advantage() -> None:
    """Wrong ones, right ones with a negative or no advantage, and those of equal likelihood."""
    score = [-3.0, -1.0]
    assert shaped(batch_of([1.0, -1.0], [0.5, 0], group_size=2), score) == [1.0, -1.0]
    assert shaped(batch_of([1.0, -1.0], [0.5, 0], group_size=2), score, success_at=0.5) == [1.5, -1]
    assert shaped(batch_of([-1.0, 1.0], [1, 1], group_size=2), score) == [-1.0, 1.0]
    assert shaped(batch_of([0.0, 0.0], [1, 1], group_size=2), score) == [0.0, 0.0]
    assert shaped(batch_of([1.0, -1.0], [1, 0], group_size=2), [-2.0, -2.0]) == [1.0, -1.0]


def test_a_sequence_without_sampled_tokens_does_not_count_in_the_mean() -> None:
    batch = batch_of([1.0, 0.0, 0.0], [1, 1, 0], group_size=3)
    silent = replace(batch, sampled=batch.sampled & (batch.sequence < 2))
    score = torch.tensor([-1.2, -1.2, -0.8, -0.8])
    out = Novelty(NoveltyConfig()).shape(silent, made(silent, logp=at_sampled(silent, score)))
    expected = 1 + 2.5 * (1 - math.exp(-0.2))
    assert out.advantage[silent.sampled].tolist() == pytest.approx([expected, expected, 0, 0])


def test_what_it_needs_is_required() -> None:
    batch = batch_of([1.0, -1.0], [1, 0], group_size=2)
    for missing, message in (("reward", "the reward"), ("group", "are of one group")):
        lost = replace(batch, **{missing: ()})
        with pytest.raises(ValueError, match=message):
            Novelty(NoveltyConfig()).shape(lost, made(lost, logp=lost.advantage))
    values = {"techniques": "novelty", "schedule.group_size": 1}
    with pytest.raises(ConfigError, match=r"novelty needs schedule.group_size >= 2, got 1"):
        override(RunConfig(recipe="mine"), values)


def diversity(shaper: Shaper | None, *, seeds: int = 64) -> tuple[Tensor, Tensor]:
    """Return success, and the entropy within the 8 right ones of 20 arms, `[seeds]`."""
    noise = torch.Generator().manual_seed(0)
    logits = torch.randn(seeds, 20, generator=noise).double()
    empty = packed(seeds * 8, 1, group_size=8)
    for _ in range(100):
        logp = logits.log_softmax(1)
        drawn = torch.multinomial(logp.exp().float(), 8, replacement=True, generator=noise)
        reward = (drawn < 8).double()
        spread = reward.std(1, keepdim=True) + 1e-6
        advantage = (reward - reward.mean(1, keepdim=True)) / spread
        if shaper:
            rewards = tuple(reward.flatten().tolist())
            batch = replace(empty, advantage=at_sampled(empty, advantage), reward=rewards)
            signals = made(batch, logp=at_sampled(batch, logp.gather(1, drawn)))
            given = shaper.shape(batch, signals).advantage
            advantage = given[batch.sampled].reshape(seeds, 8)
        score = one_hot(drawn, 20) - logp.exp()[:, None]
        logits = logits + 0.1 * (advantage[..., None] * score).mean(1)
    chance = logits.softmax(1)[:, :8]
    success = chance.sum(1)
    within = chance / success[:, None]
    return success, -(within * within.log()).sum(1)


def test_more_right_answers_survive_at_nearly_equal_success() -> None:
    """The technique's page has figures of more steps, where the difference is as large."""
    success, plain = diversity(None)
    rewarded, kept = diversity(Novelty(NoveltyConfig()))
    gain = kept - plain
    assert gain.mean() > 0.06 and gain.mean() > 5 * gain.std() / 8
    assert abs(rewarded.mean() - success.mean()) < 0.03
