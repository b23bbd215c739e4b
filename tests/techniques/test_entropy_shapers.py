"""Test the shapers that use the entropy of tokens."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from tests.support.lagged_bandit import learn, ratio
from tests.support.signals import at_sampled, made, packed
from unstale.config import ConfigError, RunConfig
from unstale.config.options import override
from unstale.lint import check
from unstale.records import Batch
from unstale.research.techniques.entropy_advantage_reweighting import (
    EntropyAdvantageReweighting,
    EntropyAdvantageReweightingConfig,
)
from unstale.research.techniques.token_entropy_advantage import (
    TokenEntropyAdvantage,
    TokenEntropyAdvantageConfig,
)
from unstale.research.techniques.top_tokens import TopTokens, TopTokensConfig, largest
from unstale.research.techniques.unlikely_token_bonus import (
    UnlikelyTokenBonus,
    UnlikelyTokenBonusConfig,
)
from unstale.techniques.hooks import Shaper

NONE = RunConfig(recipe="mine")


def with_advantage(batch: Batch, values: Tensor) -> Batch:
    return replace(batch, advantage=at_sampled(batch, values))


def shaped(shaper: Shaper, batch: Batch, **signals: Tensor) -> Tensor:
    """Return the advantages of sampled tokens. Signals are given for these tokens."""
    whole = {name: at_sampled(batch, values) for name, values in signals.items()}
    for values in whole.values():
        values[~batch.sampled] = 50.0  # of no token that was sampled
    out = shaper.shape(batch, made(batch, **whole))
    assert torch.equal(out.keep, batch.sampled)
    return out.advantage[batch.sampled]


def test_ear_multiplies_by_the_entropy_relative_to_the_group() -> None:
    """The second group has its own mean, of replies of two tokens."""
    batch = packed(6, 2, group_size=3)
    entropy = torch.tensor([1.0, 1, 2, 2, 3, 3, 0, 4, 2, 2, 9, 9])
    batch = with_advantage(batch, torch.tensor([1.0, 1, -1, -1, 2, 2, 1, 1, 1, 1, 1, 1]))
    found = shaped(
        EntropyAdvantageReweighting(EntropyAdvantageReweightingConfig()), batch, entropy=entropy
    )
    assert found[:6].tolist() == pytest.approx([1.5, 1.5, -1, -1, 1, 1])
    mean = 13 / 3
    assert found[6:].tolist() == pytest.approx(
        [min(1.5, 2 - 2 / mean)] * 2 + [min(1.5, 2 - 2 / mean)] * 2 + [0.5] * 2
    )
    lost = replace(batch, group=())
    with pytest.raises(ValueError, match="does not say which sequences are of one group"):
        EntropyAdvantageReweighting(EntropyAdvantageReweightingConfig()).shape(
            lost, made(lost, entropy=batch.advantage)
        )


def test_ear_leaves_out_sequences_without_sampled_tokens() -> None:
    """The first group has one, beside three others whose mean is 2. The second has no others."""
    batch = packed(8, 2, group_size=4)
    advantage = torch.tensor([1.0, 1, -1, -1, 2, 2, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1])
    batch = with_advantage(batch, advantage)
    batch = replace(batch, sampled=batch.sampled & (batch.sequence < 3))
    entropy = torch.tensor([1.0, 1, 2, 2, 3, 3])
    shaper = EntropyAdvantageReweighting(EntropyAdvantageReweightingConfig())
    assert shaped(shaper, batch, entropy=entropy).tolist() == pytest.approx(
        [1.5, 1.5, -1, -1, 1, 1]
    )
    out = shaper.shape(batch, made(batch, entropy=at_sampled(batch, entropy)))
    late = batch.sequence >= 3
    assert torch.equal(out.advantage[late], batch.advantage[late])


def test_ear_moves_weight_to_replies_of_low_entropy_and_keeps_signs() -> None:
    noise = torch.Generator().manual_seed(0)
    batch = packed(24 * 8, 1, group_size=8)
    entropy = 3 * torch.rand(24 * 8, generator=noise)
    advantage = torch.randn(24 * 8, generator=noise)
    found = shaped(
        EntropyAdvantageReweighting(EntropyAdvantageReweightingConfig()),
        with_advantage(batch, advantage),
        entropy=entropy,
    )
    assert torch.equal(found.sign(), advantage.double().sign())
    size, before = found.abs().reshape(24, 8), advantage.abs().reshape(24, 8)
    low = entropy.reshape(24, 8) < entropy.reshape(24, 8).mean(1, keepdim=True)
    assert (size * low).sum() / size.sum() > (before * low).sum() / before.sum() + 0.1


def test_aepo_multiplies_by_the_standardised_entropy() -> None:
    batch = with_advantage(packed(1, 3), torch.tensor([1.0, -1, 2]))
    given = torch.tensor([1.0, 2, 3])
    assert shaped(
        TokenEntropyAdvantage(TokenEntropyAdvantageConfig()), batch, entropy=given
    ).tolist() == pytest.approx([0.8, -1, 2.4])
    far = shaped(TokenEntropyAdvantage(TokenEntropyAdvantageConfig(a=2.0)), batch, entropy=given)
    assert far.tolist() == [0.0, -1.0, 6.0]
    equal = shaped(
        TokenEntropyAdvantage(TokenEntropyAdvantageConfig()), batch, entropy=torch.ones(3)
    )
    assert torch.equal(equal, batch.advantage[batch.sampled])


def test_aepo_changes_no_sign_and_the_linter_warns_where_it_would_drop_tokens() -> None:
    noise = torch.Generator().manual_seed(0)
    entropy = torch.randn(10_000, generator=noise).exp()
    batch = with_advantage(packed(1, 10_000), torch.where(entropy > 1, 1.0, -1.0))
    found = shaped(TokenEntropyAdvantage(TokenEntropyAdvantageConfig()), batch, entropy=entropy)
    assert torch.equal(found.sign(), batch.advantage[batch.sampled].sign())
    assert not check(override(NONE, {"techniques": "token_entropy_advantage"})).warnings
    (warning,) = check(
        override(NONE, {"techniques": "token_entropy_advantage", "token_entropy_advantage.a": 0.5})
    ).warnings
    assert (
        warning.wrong == "token_entropy_advantage.a is 0.5"
        and warning.fix == "--token_entropy_advantage.a 0.2"
    )


def test_mssr_adds_a_bonus_that_the_advantage_limits() -> None:
    batch = with_advantage(packed(1, 4), torch.tensor([-1.0, 1, 0, 3]))
    logp = -torch.tensor([2.0, 0.1, 5, 1])
    found = shaped(UnlikelyTokenBonus(UnlikelyTokenBonusConfig()), batch, logp=logp)
    assert found.tolist() == pytest.approx([-0.5, 1.04, 0.0, 3.4])
    noise = torch.Generator().manual_seed(0)
    batch = with_advantage(packed(1, 10_000), torch.randn(10_000, generator=noise))
    shaper = UnlikelyTokenBonus(UnlikelyTokenBonusConfig(alpha=9.0, kappa=1.01))
    found = shaped(shaper, batch, logp=-torch.rand(10_000, generator=noise))
    assert torch.equal(found.sign(), batch.advantage[batch.sampled].sign())
    with pytest.raises(ConfigError, match=r"unlikely_token_bonus.kappa must be > 1, got 1"):
        UnlikelyTokenBonusConfig(kappa=1.0)


def test_mssr_keeps_the_entropy_higher_and_learns_more_slowly() -> None:
    """Measured over 24 seeds and 100 steps: entropy 1.36 and 1.87 nats, success 0.58 and 0.37."""
    shaper = UnlikelyTokenBonus(UnlikelyTokenBonusConfig())

    def with_bonus(logp: Tensor, behavior_logp: Tensor, advantage: Tensor) -> Tensor:
        batch = with_advantage(packed(1, advantage.numel()), advantage)
        given = shaped(shaper, batch, logp=logp).reshape(advantage.shape).float()
        return ratio(logp, behavior_logp, given)

    plain, bonus = learn(ratio), learn(with_bonus)
    assert bonus.entropy.mean() > plain.entropy.mean() + 0.3
    assert bonus.success.mean() < plain.success.mean() - 0.1


def test_top_tokens_keeps_the_largest_products_of_advantage_and_entropy() -> None:
    """The share grows with the progress of the run."""
    batch = with_advantage(packed(1, 5), torch.tensor([1.0, -3, 2, 0.5, 0]))
    entropy = at_sampled(batch, torch.tensor([2.0, 1, 0.1, 4, 9]))
    entropy[0] = 99.0
    shaper = TopTokens(TopTokensConfig())
    for progress, expected in ((0.0, "01000"), (0.25, "11000"), (0.5, "11010"), (1.0, "11111")):
        out = shaper.shape(batch, made(batch, entropy=entropy, progress=progress))
        assert torch.equal(out.advantage, batch.advantage)
        assert "".join(str(int(each)) for each in out.keep[batch.sampled]) == expected
        assert not out.keep[~batch.sampled].any()


def test_the_gradient_of_top_tokens_is_nearer_to_the_true_one_than_that_of_random_ones() -> None:
    """20 positions, of which most are certain, 32 sequences, 20% of the tokens, 40 seeds.

    Measured cosines with the true gradient: 0.65, 0.40 with random tokens, 0.72 with all.
    """
    seeds, sequences, positions, arms = 40, 32, 20, 6
    noise = torch.Generator().manual_seed(0)
    sharp = torch.where(torch.rand(seeds, positions, generator=noise) < 0.7, 6.0, 1.0)
    logits = torch.randn(seeds, positions, arms, generator=noise) * sharp[..., None]
    logp = logits.double().log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    best = torch.randint(0, arms, (seeds, positions), generator=noise)
    chance = logp.exp().reshape(-1, arms).float()
    drawn = torch.multinomial(chance, sequences, replacement=True, generator=noise)
    drawn = drawn.reshape(seeds, positions, sequences).movedim(1, 2)
    reward = (drawn == best[:, None]).double().mean(-1)
    advantage = reward - reward.mean(1, keepdim=True)
    score = one_hot(drawn, arms) - logp.exp()[:, None]
    true = logp.exp() * (one_hot(best, arms) - logp.exp().gather(2, best[..., None]))
    product = advantage.abs()[..., None] * entropy[:, None]

    def cosine(order: Tensor, share: float) -> float:
        flat = order.reshape(seeds, -1)
        keep = torch.stack([largest(each, int(share * len(each))) for each in flat])
        weight = advantage[..., None] * keep.reshape(product.shape)
        found = (weight[..., None] * score).mean(1)
        return torch.cosine_similarity(found.flatten(1), true.flatten(1)).mean().item()

    top = cosine(product, 0.2)
    assert top > cosine(torch.rand(product.shape, generator=noise), 0.2) + 0.15
    assert top < cosine(product, 1.0)
