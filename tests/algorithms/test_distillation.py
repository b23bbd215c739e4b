"""Test divergences from a teacher against formulas in probabilities, and their expected gradients.

Promises: `mixed_divergence` is the generalised Jensen-Shannon divergence of GKD, with the two KL
divergences at its ends; its gradients are those of the formulas. By enumeration of all replies of a
tiny vocabulary in float64: the sampled reverse KL has in expectation the gradient of the full one,
for tokens that older versions and another engine sampled. It has not without D, and not with the
reward of an older policy.
"""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from unstale.algorithms.distillation import mixed_divergence, reverse_advantage
from unstale.config import CorrectionConfig, ObjectiveConfig
from unstale.records import Batch, Provenance
from unstale.techniques.distil import Distil, DistilConfig
from unstale.techniques.hooks import Techniques
from unstale.trainer.rules import LossSpec

VOCABULARY, LENGTH = 3, 3
REPLIES = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
PREFIX = [
    REPLIES[:, :t] @ torch.tensor([VOCABULARY**i for i in range(t)], dtype=torch.long)
    for t in range(LENGTH)
]
Tables = list[Tensor]
"""The logits of the next token, one row per prefix: `[3**t, 3]` for the token at place t."""


def noise(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def tables(seed: int, base: Tables | None = None, scale: float = 1.0) -> Tables:
    made = [scale * noise(seed + t, VOCABULARY**t, VOCABULARY) for t in range(LENGTH)]
    return [a + b for a, b in zip(made, base, strict=True)] if base else made


def logps(of: Tables) -> Tensor:
    """Return the log-probability of every token of every reply, `[27, 3]`."""
    columns = [of[t].log_softmax(-1)[PREFIX[t], REPLIES[:, t]] for t in range(LENGTH)]
    return torch.stack(columns, 1)


FIRST = tables(10)
SECOND = tables(20, FIRST, 0.4)
NOW = tables(30, SECOND, 0.5)
TEACHER = tables(40)
ENGINES = [tables(50, FIRST, 0.2), tables(60, SECOND, 0.2)]
VERSIONS = (0, 1, 1)
"""The version that sampled each token of a reply: a weight update interrupted it."""
BEHAVIOR = torch.stack([logps(ENGINES[v])[:, t] for t, v in enumerate(VERSIONS)], 1)
OLD = torch.stack([logps([FIRST, SECOND][v])[:, t] for t, v in enumerate(VERSIONS)], 1)


def every_reply() -> Batch:
    count = REPLIES.numel()
    return Batch(
        tokens=REPLIES.flatten(),
        offsets=tuple(range(0, count + 1, LENGTH)),
        sampled=torch.ones(count, dtype=torch.bool),
        behavior_logp=BEHAVIOR.flatten(),
        version=torch.tensor(VERSIONS).repeat(len(REPLIES)),
        turn=torch.zeros(count, dtype=torch.long),
        provenance=torch.full((count,), int(Provenance.SAMPLED)),
        clean=torch.ones(count, dtype=torch.bool),
        advantage=noise(99, count),
        episodes=tuple(range(len(REPLIES))),
    )


def leaves() -> Tables:
    return [row.clone().requires_grad_() for row in NOW]


def gradient(value: Tensor, of: Tables) -> Tensor:
    return torch.cat([part.flatten() for part in torch.autograd.grad(value, of)])


def full_gradient(divergence: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return the gradient of the divergence, summed over tokens, at states that mu visits."""
    theta = leaves()
    total = torch.zeros((), dtype=torch.float64)
    for t, (row, taught) in enumerate(zip(theta, TEACHER, strict=True)):
        visits = torch.zeros(VOCABULARY**t, dtype=torch.float64)
        # Sums over the tokens at t and later, whose probabilities add up to 1.
        visits.index_add_(0, PREFIX[t], BEHAVIOR.sum(1).exp())
        total = total + (visits * divergence(row.log_softmax(-1), taught.log_softmax(-1))).sum()
    return gradient(total, theta)


def sampled_gradient(
    *,
    corrected: bool = True,
    reward_of: Tensor | None = None,
    old_logp: Tensor = OLD,
) -> Tensor:
    """Return the gradient of the loss of all replies, each weighted by its probability under mu."""
    correction = CorrectionConfig(mode="none")
    if corrected:
        correction = CorrectionConfig(mode="truncate", high=1e9)
    distil = Distil(DistilConfig(teacher="models/a"))
    rules = LossSpec(
        correction,
        ObjectiveConfig(loss_type="none"),
        Techniques({"distil": distil}),
    )
    theta, batch = leaves(), every_reply()
    logp = logps(theta).flatten()
    rewarded = distil.rewarded(
        batch, logps(TEACHER).flatten(), logp.detach() if reward_of is None else reward_of.flatten()
    )
    factor = rules.correct(old_logp.flatten(), batch).factor
    loss = factor * rules.surrogate(logp, old_logp.flatten(), rewarded).loss
    chance = BEHAVIOR.sum(1, keepdim=True).exp().expand_as(BEHAVIOR).flatten()
    return gradient((chance * loss).sum(), theta)


def test_the_sampled_reverse_kl_has_the_gradient_of_the_full_one_for_stale_tokens() -> None:
    wanted = full_gradient(lambda p, q: (p.exp() * (p - q)).sum(-1))
    torch.testing.assert_close(sampled_gradient(), wanted, rtol=1e-10, atol=1e-13)
    full = Distil(DistilConfig(teacher="models/a", divergence="reverse")).divergence
    torch.testing.assert_close(full_gradient(full), wanted, rtol=1e-10, atol=1e-13)


def test_any_old_policy_gives_the_same_expectation_if_d_is_a_weight() -> None:
    """D S = pi / mu, whatever stands in for old_logp. Only clips and caps depend on it."""
    moved = OLD + noise(7, *OLD.shape)
    torch.testing.assert_close(
        sampled_gradient(old_logp=moved), sampled_gradient(), rtol=1e-10, atol=1e-13
    )


def test_without_d_or_with_the_reward_of_an_older_policy_it_is_biased() -> None:
    wanted = sampled_gradient()
    for biased in (sampled_gradient(corrected=False), sampled_gradient(reward_of=OLD)):
        assert (biased - wanted).norm() > 0.05 * wanted.norm()


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_values_and_gradients_are_those_of_the_formulas(beta: float) -> None:
    logits, taught = noise(1, 5, 7).requires_grad_(), noise(2, 5, 7)
    found = mixed_divergence(logits.log_softmax(-1), taught.log_softmax(-1), beta=beta)
    (slope,) = torch.autograd.grad(found.sum(), logits)
    p, q = logits.detach().softmax(-1), taught.softmax(-1)
    if beta == 0:
        value, wanted = (q * (q / p).log()).sum(-1), p - q
    elif beta == 1:
        value = (p * (p / q).log()).sum(-1)
        wanted = p * ((p / q).log() - value[:, None])
    else:
        m = beta * q + (1 - beta) * p
        of_p = (p * (p / m).log()).sum(-1)
        value = beta * (q * (q / m).log()).sum(-1) + (1 - beta) * of_p
        wanted = (1 - beta) * p * ((p / m).log() - of_p[:, None])
    torch.testing.assert_close(found, value)
    torch.testing.assert_close(slope, wanted)


def test_the_ends_are_limits_and_impossible_tokens_add_nothing() -> None:
    p, q = noise(1, 6).log_softmax(-1), noise(2, 6).log_softmax(-1)
    for end, beta in ((0.0, 1e-6), (1.0, 1 - 1e-6)):
        near = mixed_divergence(p, q, beta=beta) / (beta * (1 - beta))
        assert float(near) == pytest.approx(float(mixed_divergence(p, q, beta=end)), rel=1e-4)
    halved = torch.tensor([0.5, 0.5, 0.0]).log()
    thirds = torch.tensor([1 / 3] * 3).log()
    assert float(mixed_divergence(thirds, halved, beta=0)) == pytest.approx(math.log(1.5))
    assert mixed_divergence(thirds, halved, beta=1).isinf()
    assert mixed_divergence(thirds, halved, beta=0.5).isfinite()
    with pytest.raises(ValueError, match=r"from 0 to 1, got 1\.5"):
        mixed_divergence(p, q, beta=1.5)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_probabilities_that_float32_cannot_hold_add_nothing(beta: float) -> None:
    """A logit of -200 has the probability 1e-87, which float32 rounds to 0."""
    logits = torch.tensor([[1.0, 2.0, -200.0], [1.0, -200.0, 0.5]], requires_grad=True)
    taught = torch.tensor([[0.5, 1.0, -200.0], [-200.0, 2.0, 1.0]])
    found, wanted = [
        mixed_divergence(
            logits.to(dtype).log_softmax(-1), taught.to(dtype).log_softmax(-1), beta=beta
        )
        for dtype in (torch.float32, torch.float64)
    ]
    torch.testing.assert_close(found.double(), wanted)
    slopes = [torch.autograd.grad(each.sum(), logits)[0] for each in (found, wanted)]
    torch.testing.assert_close(*slopes)


def test_the_reward_has_no_gradient() -> None:
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    reward = reverse_advantage(logp, torch.tensor([-0.5, -4.0]))
    assert reward.tolist() == [0.5, -2.0] and not reward.requires_grad
