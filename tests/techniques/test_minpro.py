"""Test `minpro`: its formula, what is refused, and the error of the gradient by enumeration."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from unstale.algorithms.objectives import cispo
from unstale.config import ConfigError, RunConfig
from unstale.config.options import override
from unstale.lint import check
from unstale.records import Batch, ScoredTrajectory, collate
from unstale.research.techniques.minpro import Minpro, MinproConfig
from unstale.testing import episode

NONE = RunConfig(recipe="mine")


def ratios(*plans: tuple[list, list[float]], **options: object) -> Tensor:
    """Return the ratios of the sampled tokens. A plan is an episode's, with its token ratios."""
    batch = collate([episode(i, plan) for i, (plan, _) in enumerate(plans)])
    rho = torch.tensor([each for _, own in plans for each in own]).double()
    old_logp = torch.full((len(batch.tokens),), 50.0).double()  # also where nothing was sampled
    old_logp[batch.sampled] = -rho.log()
    logp = torch.zeros_like(old_logp).requires_grad_()
    out = Minpro(MinproConfig(**options)).log_ratio(logp, old_logp, batch)  # type: ignore[arg-type]
    assert not out[~batch.sampled].any()
    out.sum().backward()
    assert logp.grad is not None
    assert torch.equal(logp.grad, batch.sampled.double())
    return out[batch.sampled].detach().exp()


PLAN = [2, (2, 0), 1, (1, 1)]
RHO = [2.0, 0.5, 1.2]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [2, 1, 0.6]),
        ({"cap": True}, [2, 0.5, 0.6]),
        ({"prefix": "inclusive"}, [4, 0.25, 0.6]),
        ({"reset": "turn"}, [2, 1, 1.2]),
    ],
)
def test_a_ratio_is_multiplied_by_the_smallest_one_before_it(
    options: dict, expected: list[float]
) -> None:
    """A second sequence has no part in the first one's prefix, nor has the first in its own."""
    found = ratios((PLAN, RHO), ([1, (2, 0)], [0.1, 3.0]), **options)
    alone = ratios(([1, (2, 0)], [0.1, 3.0]), **options)
    assert found[:3].tolist() == pytest.approx(expected)
    assert torch.equal(found[3:], alone)


def test_the_objective_clips_the_result() -> None:
    for low, expected in ((0.2, [1.28, 1, 0.8]), (1, [1.28, 1, 0.6])):
        logs = ratios((PLAN, RHO)).log().requires_grad_()
        cispo(logs, -torch.ones(3).double(), clip_low=low).loss.sum().backward()
        assert logs.grad is not None
        assert logs.grad.tolist() == pytest.approx(expected)


def test_later_tokens_do_not_change_the_ratio_of_a_token() -> None:
    first, other = (ratios(([1, (4, 0)], [0.9, 1.5, *rest])) for rest in ([0.2, 3], [3, 0.2]))
    assert torch.equal(first[:2], other[:2])
    assert ratios(([1, (4, 0)], [1.0] * 4)).tolist() == [1.0] * 4


def test_of_whole_takes_the_ratio_to_the_engine() -> None:
    item: ScoredTrajectory = episode(0, [2, (3, 0)])
    batch: Batch = collate([item])
    logp = batch.behavior_logp.double() + torch.tensor([0, 0, 0.3, -0.2, 0.1])
    out = Minpro(MinproConfig(of="whole")).log_ratio(logp, torch.full_like(logp, 9.0), batch)
    assert out[batch.sampled].tolist() == pytest.approx([0.3, 0.1, -0.1])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"objective.loss_type": "gspo"},
            "needs objective.loss_type = ppo_clip, dual_clip, .*got gspo",
        ),
        ({"objective.unit": "turn"}, "needs objective.unit = token, got turn"),
        ({"minpro.of": "whole"}, "needs correction.mode = none, mask or k3_mask, got mask_weight"),
    ],
)
def test_what_its_ratio_does_not_fit_is_refused(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        override(NONE, {"techniques": "minpro", **values})


def test_the_linter_warns_of_a_clip_that_drops_gradients() -> None:
    found = check(override(NONE, {"techniques": "minpro"}))
    (warning,) = [each for each in found.warnings if each.wrong == "minpro with ppo_clip"]
    cispo_fix, without = warning.fix.split(", or ")
    assert cispo_fix == "--objective.loss_type cispo --objective.clip_low 1"
    assert without == "--techniques ''"
    assert "changed by minpro" in found.factors[1].bound
    soft = override(NONE, {"techniques": "minpro", **dict(warning.fixes[0])})
    assert not any("minpro" in each.wrong for each in check(soft).warnings)


WORDS, LENGTH, PAIRS, DRIFT = 4, 3, 48, 0.5


def errors() -> dict[str, tuple[float, float]]:
    """Return the squared bias of the gradient by weight, and its error with 32 sequences.

    All sequences are enumerated, for pairs of random policies and random rewards.
    """
    noise = torch.Generator().manual_seed(0)
    words = torch.tensor(list(itertools.product(range(WORDS), repeat=LENGTH)))
    count = len(words)
    start = torch.zeros(count, dtype=torch.long)
    context = torch.stack([start, 1 + words[:, 0], 5 + WORDS * words[:, 0] + words[:, 1]], 1)
    shape = (PAIRS, 1 + WORDS + WORDS**2, WORDS)
    logits = torch.randn(shape, generator=noise).double()
    drift = DRIFT * torch.randn(shape, generator=noise).double()
    pi, mu = logits.log_softmax(-1), (logits + drift).log_softmax(-1)
    rewards = torch.randn(PAIRS, count, generator=noise).double()
    now, then = pi[:, context, words], mu[:, context, words]
    chance = then.sum(-1).exp()
    score = one_hot(words, WORDS) - pi.exp()[:, context]
    index = context[None, :, :, None].expand(PAIRS, count, LENGTH, WORDS)

    def gradients(weight: Tensor) -> Tensor:
        each = (weight * rewards[..., None])[..., None] * score
        return each.new_zeros(PAIRS, count, *shape[1:]).scatter_add(2, index, each)

    true = (now.sum(-1).exp()[..., None, None] * gradients(torch.ones_like(now))).sum(1)
    batch = collate([episode(i, [1, (LENGTH, 0)]) for i in range(count)])
    factors = []
    for logp, old_logp in zip(now, then, strict=True):
        given = torch.zeros(2, len(batch.tokens)).double()
        given[:, batch.sampled] = torch.stack([logp.flatten(), old_logp.flatten()])
        out = Minpro(MinproConfig()).log_ratio(given[0], given[1], batch)
        factors.append(out[batch.sampled].reshape(count, LENGTH))
    rho = now - then
    found = {}
    for name, log_weight, high in (
        ("token", rho, torch.inf),
        ("minpro", torch.stack(factors), torch.inf),
        ("prefix", rho.cumsum(-1), torch.inf),
        ("sequence", rho.sum(-1, keepdim=True).expand_as(rho), torch.inf),
        ("clipped token", rho, 1.28),
        ("clipped minpro", torch.stack(factors), 1.28),
    ):
        each = gradients(log_weight.exp().clamp(max=high))
        mean = (chance[..., None, None] * each).sum(1)
        bias = (mean - true).square().sum((1, 2))
        square = (chance * each.square().sum((2, 3))).sum(1)
        variance = square - mean.square().sum((1, 2))
        found[name] = bias.mean().item(), (bias + variance / 32).mean().item()
    return found


def test_its_gradient_is_nearer_to_the_true_one_than_with_token_ratios() -> None:
    """The catalogue of techniques has the figures of 200 pairs."""
    found = errors()
    bias = {name: each[0] for name, each in found.items()}
    assert bias["sequence"] < 1e-20
    assert bias["prefix"] < 0.85 * bias["minpro"] and bias["minpro"] < 0.75 * bias["token"]
    error = {name: each[1] for name, each in found.items()}
    assert error["minpro"] < 0.95 * min(error["token"], error["prefix"], error["sequence"])
    assert error["clipped minpro"] < 0.9 * error["clipped token"] < error["minpro"]
