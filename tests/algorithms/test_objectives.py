"""Test `objectives`, by hand or against an exact gradient.

- Values and clipped tokens of every objective, and the side on which its trust region acts.
- On fresh data every objective, unit and aggregation has REINFORCE's gradient.
- Only `logp` gets a gradient: not mu, the proxy, a weight, a mask or a denominator.
- Denominators: worked out by hand; micro-batches sum to the loss and gradient of the batch.
- The expected gradients of `reference_kl` are those of the exact quantity.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial
from inspect import unwrap
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor

from unstale.algorithms.corrections import (
    aggregate,
    keep_all,
    log_discrepancy,
    log_staleness,
    mask,
    mask_weight,
    truncate,
    unit_ids,
    veto,
)
from unstale.algorithms.objectives import (
    Surrogate,
    cispo,
    dppo,
    dro,
    drpo,
    dual_clip,
    entropy,
    gspo,
    kl_penalty,
    none,
    ppo_clip,
    reference_kl,
    sapo,
    token_norm,
    vaco,
    vespo,
)

UNITS: list[Any] = ["token", "segment", "turn", "sequence"]

SEQUENCE = tensor([0, 0, 0, 0, 0, 0, 1, 1])
TURN = tensor([-1, 0, 0, 0, -1, 1, -1, 0])
VERSION = tensor([-1, 3, 3, 4, -1, 4, -1, 4])
SAMPLED = TURN >= 0
ADVANTAGE = tensor([0.0, 1.5, 1.5, 1.5, 0.0, -0.5, 0.0, -2.0])


OBJECTIVES: dict[str, Callable[[Tensor, Tensor], Surrogate]] = {
    "ppo_clip": ppo_clip,
    "no room to move": partial(ppo_clip, clip_low=0.0, clip_high=0.0),
    "dual_clip": dual_clip,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "vespo": vespo,
    "dppo": lambda log_s, advantage: dppo(log_s, advantage, old_logp=0.1 * log_s.detach() - 1),
    "drpo": lambda log_s, advantage: drpo(log_s, advantage, old_logp=0.1 * log_s.detach() - 1),
    "vaco": lambda log_s, advantage: vaco(
        log_s,
        advantage,
        sequence=SEQUENCE.reshape(log_s.shape),
        sampled=SAMPLED.reshape(log_s.shape),
    ),
    "kl_penalty": kl_penalty,
    "dro": dro,
    "none": none,
}


def ids(unit: Any) -> Tensor:
    return unit_ids(unit, sequence=SEQUENCE, turn=TURN, version=VERSION, sampled=SAMPLED)


def one(
    objective: Callable[..., Surrogate], ratio: float, advantage: float
) -> tuple[float, float, bool]:
    """Return loss, derivative by logp and clipped flag of one token with this ratio."""
    log_s = tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    found = objective(log_s, tensor([advantage], dtype=torch.float64))
    (slope,) = torch.autograd.grad(found.loss, log_s)
    return found.loss.item(), slope.item(), bool(found.clipped)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.1, 2.0, -2.2, -2.2, False),
        (1.5, 2.0, -2.56, 0.0, True),  # likelier already, held at 1.28
        (0.5, 2.0, -1.0, -1.0, False),  # less likely although good: never clipped
        (0.5, -2.0, 1.6, 0.0, True),  # held at 0.8
        (1.5, -2.0, 3.0, 3.0, False),  # likelier although bad: never clipped
        (9.0, 0.0, 0.0, 0.0, False),
    ],
)
def test_ppo_clip(ratio: float, advantage: float, loss: float, slope: float, clipped: bool) -> None:
    assert one(ppo_clip, ratio, advantage) == pytest.approx((loss, slope, clipped))


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (2.5, -2.0, (5.0, 5.0, False)),
        (4.0, -2.0, (6.0, 0.0, True)),  # PPO would pay 8
        (0.5, -2.0, (1.6, 0.0, True)),
        (4.0, 2.0, (-2.56, 0.0, True)),
    ],
)
def test_dual_clip_bounds_the_loss_of_bad_tokens(
    ratio: float, advantage: float, expected: tuple[float, float, bool]
) -> None:
    assert one(dual_clip, ratio, advantage) == pytest.approx(expected)


def test_dual_clip_refuses_a_bound_that_would_act_at_once() -> None:
    with pytest.raises(ValueError, match="dual_clip must be > 1"):
        dual_clip(torch.zeros(1), torch.ones(1), dual_clip=1.0)


def test_gspo_is_a_narrow_clip() -> None:
    assert one(gspo, 1.0005, 1.0) == pytest.approx((-1.0004, 0.0, True))
    assert one(gspo, 1.0003, 1.0) == pytest.approx((-1.0003, -1.0003, False))


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"), [(1.1, 2.0, 1.1), (1.5, 2.0, 1.28), (0.5, -2.0, 0.8)]
)
def test_cispo_bounds_the_weight_and_keeps_the_gradient(
    ratio: float, advantage: float, weight: float
) -> None:
    loss = -weight * advantage * math.log(ratio)
    assert one(cispo, ratio, advantage) == pytest.approx(
        (loss, -weight * advantage, weight != ratio)
    )


def test_kl_penalty_pulls_back() -> None:
    log_ratio = math.log(2.0)
    expected = (0.75 * log_ratio**2 - 2.0 * 3.0, 1.5 * log_ratio - 2.0 * 3.0, False)
    assert one(partial(kl_penalty, kl_penalty=1.5), 2.0, 3.0) == pytest.approx(expected)


def test_kl_penalty_still_pulls_beyond_the_bound_of_exp() -> None:
    log_s = tensor([30.0], dtype=torch.float64, requires_grad=True)
    kl_penalty(log_s, torch.zeros(1, dtype=torch.float64)).loss.sum().backward()
    assert log_s.grad is not None and log_s.grad.item() == 30.0


@pytest.mark.parametrize("advantage", [2.0, -0.5])
@pytest.mark.parametrize("ratio", [0.2, 0.9, 1.0, 1.7, 30.0])
def test_sapo_is_a_gate_whose_slope_fades_away_from_one(ratio: float, advantage: float) -> None:
    """By hand: with p = 1 / (1 + exp(-tau (S - 1))) the loss is -4 p A / tau, and its derivative by
    log pi is -4 p (1 - p) S A (arXiv 2511.20347)."""
    tau = 0.7 if advantage > 0 else 3.0
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    expected = (-4 / tau * gate * advantage, -4 * gate * (1 - gate) * ratio * advantage, False)
    found = one(partial(sapo, tau_pos=0.7, tau_neg=3.0), ratio, advantage)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_sapo_refuses_a_gate_without_slope() -> None:
    with pytest.raises(ValueError, match=r"must be > 0, got 0\.0 and 1\.05"):
        sapo(torch.zeros(1), torch.ones(1), tau_pos=0.0)


def test_dro_pulls_back_without_a_weight() -> None:
    log_ratio = math.log(2.0)
    expected = (0.2 * log_ratio**2 - 3.0 * log_ratio, 0.4 * log_ratio - 3.0, False)
    assert one(partial(dro, dro_beta=0.4), 2.0, 3.0) == pytest.approx(expected)


def test_dro_over_a_sequence_is_the_regression_of_the_paper() -> None:
    """Its gradient is that of (A - beta log pi(x) / mu(x))^2 / (2 beta), summed over sequences."""
    now = torch.linspace(-2.0, -0.1, 8, dtype=torch.float64).requires_grad_()
    behavior = torch.linspace(-0.3, -1.5, 8, dtype=torch.float64)
    log_s = log_staleness(now, behavior, unit=ids("sequence"), sampled=SAMPLED, how="sum")
    reward = torch.where(SEQUENCE == 0, 1.5, -2.0).double()
    surrogate = dro(log_s, reward, sampled=SAMPLED, dro_beta=0.3)
    (ours,) = torch.autograd.grad(surrogate.loss.sum(), now)
    loss = torch.zeros(())
    for sequence, wanted in ((0, 1.5), (1, -2.0)):
        own = SAMPLED & (sequence == SEQUENCE)
        loss = loss + (wanted - 0.3 * (now - behavior)[own].sum()).square() / 0.6
    (expected,) = torch.autograd.grad(loss, now)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)


def test_none_weighs_and_bounds_nothing() -> None:
    assert one(none, 9.0, 2.0) == pytest.approx((-18.0, -18.0, False))


@given(st.floats(-19, 19), st.sampled_from([-3.0, -0.5, 0.5, 3.0]))
@settings(deadline=None)
def test_clipped_means_that_a_clip_took_the_gradient(log_ratio: float, advantage: float) -> None:
    for objective in (ppo_clip, dual_clip):
        _, slope, clipped = one(objective, math.exp(log_ratio), advantage)
        assert clipped == (slope == 0.0)
        assert clipped or slope == pytest.approx(-math.exp(log_ratio) * advantage)


# --- gradients
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["mean", "sum"])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_on_fresh_data_every_objective_is_reinforce(name: str, unit: Any, how: Any) -> None:
    """With engine = proxy = policy all tokens are kept, and d loss / d logp is -A * norm."""
    value = torch.linspace(-2.0, -0.1, 8, dtype=torch.float64)
    logp = value.clone().requires_grad_()
    log_d = aggregate(
        log_discrepancy(value, value, sampled=SAMPLED), ids(unit), sampled=SAMPLED, how=how
    )
    correction = mask(log_d, keep_all(SAMPLED), low=0.999, high=1.001)
    correction = mask_weight(
        log_d, veto(log_d, correction, sequence=SEQUENCE, below=0.9), low=0.5, high=2.0
    )
    log_s = log_staleness(logp, value, unit=ids(unit), sampled=SAMPLED, how=how)
    norm = token_norm(SAMPLED, correction.keep, sequence=SEQUENCE)
    loss = (OBJECTIVES[name](log_s, ADVANTAGE.double()).loss * correction.factor * norm).sum()
    (gradient,) = torch.autograd.grad(loss, logp)
    torch.testing.assert_close(gradient, -ADVANTAGE.double() / 5, rtol=1e-12, atol=0)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_reach_nothing_but_logp(name: str, unit: Any) -> None:
    values = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)) * 0.2 - 1.0
    logp, old_logp, behavior_logp, reference_logp = (row.clone().requires_grad_() for row in values)
    log_d = aggregate(
        log_discrepancy(old_logp, behavior_logp, sampled=SAMPLED), ids(unit), sampled=SAMPLED
    )
    correction = truncate(log_d, mask(log_d, keep_all(SAMPLED), low=0.5, high=2.0), high=1.1)
    log_s = log_staleness(logp, old_logp, unit=ids(unit), sampled=SAMPLED)
    surrogate = OBJECTIVES[name](log_s, ADVANTAGE)
    norm = token_norm(SAMPLED, correction.keep, sequence=SEQUENCE, how="kept")
    extra = reference_kl(logp, reference_logp, sampled=SAMPLED)
    ((surrogate.loss * correction.factor + extra) * norm).sum().backward()
    assert (
        not surrogate.clipped.requires_grad
        and not norm.requires_grad
        and not correction.factor.requires_grad
    )
    assert logp.grad is not None and logp.grad[SAMPLED].any()
    assert not logp.grad[~SAMPLED].any()
    assert old_logp.grad is None and behavior_logp.grad is None and reference_logp.grad is None


@pytest.mark.parametrize("name", ["ppo_clip", "dual_clip", "cispo"])
def test_a_clip_is_counted_on_its_side(name: str) -> None:
    """S = 1/2 and 2 with a good and a bad token; the last has S = 5, beyond dual_clip."""
    ratio = torch.tensor([0.5, 0.5, 2.0, 2.0, 5.0])
    found = OBJECTIVES[name](ratio.log(), torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0]))
    low = {"cispo": [True, True, False, False, False]}
    high = {
        "ppo_clip": [False, False, True, False, False],
        "dual_clip": [False, False, True, False, True],
        "cispo": [False, False, True, True, True],
    }
    assert found.clipped_low.tolist() == low.get(name, [False, True, False, False, False])
    assert found.clipped_high.tolist() == high[name]


def test_a_clip_on_a_unit_takes_the_gradient_of_all_its_tokens() -> None:
    now = tensor([-1.0, -1.0, -1.0], requires_grad=True)
    old = tensor([-1.6, -1.0, -1.0])  # mean log S over the first two: 0.3, above log 1.28
    unit = tensor([0, 0, 1])
    surrogate = ppo_clip(log_staleness(now, old, unit=unit, sampled=unit >= 0), torch.ones(3))
    surrogate.loss.sum().backward()
    assert surrogate.clipped.tolist() == [True, True, False]
    assert now.grad is not None and now.grad.tolist() == [0.0, 0.0, -1.0]


# --- denominators
# ------------------------------------------------------------------------------------------------

KEEP = SAMPLED & (torch.arange(8) != 2)  # drops one of the four action tokens of sequence 0


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("action_tokens", [0, 1 / 5, 1 / 5, 1 / 5, 0, 1 / 5, 0, 1 / 5]),
        ("kept", [0, 1 / 4, 0, 1 / 4, 0, 1 / 4, 0, 1 / 4]),
        ("sequence_mean", [0, 1 / 8, 1 / 8, 1 / 8, 0, 1 / 8, 0, 1 / 2]),
        ("constant", [0, 1 / 20, 1 / 20, 1 / 20, 0, 1 / 20, 0, 1 / 20]),
    ],
)
def test_denominators(how: Any, expected: list[float]) -> None:
    norm = token_norm(SAMPLED, KEEP, sequence=SEQUENCE, how=how, constant=10.0)
    assert norm.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("how", ["action_tokens", "kept", "sequence_mean", "constant"])
def test_denominators_of_nothing_are_zero_not_nan(how: Any) -> None:
    nothing = SAMPLED & False
    assert token_norm(nothing, nothing, sequence=SEQUENCE, how=how).tolist() == [0.0] * 8


def test_sequences_without_action_tokens_do_not_count() -> None:
    for how in ("sequence_mean", "constant"):
        norm = token_norm(SAMPLED, SAMPLED, sequence=SEQUENCE * 7, how=how)
        assert torch.equal(norm, token_norm(SAMPLED, SAMPLED, sequence=SEQUENCE, how=how))


def test_masking_a_token_takes_its_gradient_and_leaves_the_others_alone() -> None:
    logp = torch.zeros(8, requires_grad=True)
    log_s = log_staleness(logp, torch.zeros(8), unit=ids("token"), sampled=SAMPLED)
    norm = token_norm(SAMPLED, KEEP, sequence=SEQUENCE)
    (none(log_s, ADVANTAGE).loss * KEEP * norm).sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx((-ADVANTAGE / 5).where(KEEP, 0.0).tolist())


def test_an_impossible_constant_is_refused() -> None:
    with pytest.raises(ValueError, match="constant must be > 0"):
        token_norm(SAMPLED, KEEP, sequence=SEQUENCE, how="constant", constant=0.0)


def test_unknown_words_are_refused() -> None:
    """`unwrap` skips conftest's type checks, which would raise first."""
    with pytest.raises(ValueError, match="how must be"):
        unwrap(token_norm)(SAMPLED, KEEP, sequence=SEQUENCE, how="mean")
    with pytest.raises(ValueError, match="estimator must be"):
        unwrap(reference_kl)(ADVANTAGE, ADVANTAGE, sampled=SAMPLED, estimator="k4")


@pytest.mark.parametrize("how", ["action_tokens", "kept", "sequence_mean", "constant"])
def test_a_cut_batch_sums_to_the_whole(how: Any) -> None:
    """Weights and denominators are of the whole batch, ratios of each part."""
    now, old, behavior = torch.randn(
        3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    log_d = aggregate(log_discrepancy(old, behavior, sampled=SAMPLED), ids("turn"), sampled=SAMPLED)
    correction = mask_weight(log_d, keep_all(SAMPLED), low=0.3, high=3.0)
    scale = correction.factor * token_norm(SAMPLED, correction.keep, sequence=SEQUENCE, how=how)

    def loss(logp: Tensor, part: slice) -> Tensor:
        log_s = log_staleness(
            logp[part], old[part], unit=ids("sequence")[part], sampled=SAMPLED[part]
        )
        return (ppo_clip(log_s, ADVANTAGE.double()[part]).loss * scale[part]).sum()

    whole, cut = (now.clone().requires_grad_() for _ in range(2))
    once = loss(whole, slice(0, 8))
    once.backward()
    parts = [loss(cut, part) for part in (slice(0, 6), slice(6, 8))]
    for part in parts:
        part.backward()
    assert once.item() == pytest.approx(sum(part.item() for part in parts), rel=1e-12)
    torch.testing.assert_close(cut.grad, whole.grad, rtol=1e-12, atol=0)


# --- regularisers
# ------------------------------------------------------------------------------------------------


def test_values_of_the_kl_estimators() -> None:
    logp, reference = tensor([-1.0, -2.0]), tensor([-1.5, -1.5])
    everywhere = torch.ones(2, dtype=torch.bool)
    expected = {
        "k1": [0.5, -0.5],
        "k2": [0.125, 0.125],
        "k3": [math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5],
    }
    for name, values in expected.items():
        found = reference_kl(logp, reference, sampled=everywhere, estimator=name)  # type: ignore[arg-type]
        assert found.tolist() == pytest.approx(values, rel=1e-5)


def draws() -> tuple[Tensor, Tensor, Tensor]:
    """Return logits with a gradient, reference logits and a stale distribution, over 5 tokens."""
    rows = torch.randn(3, 5, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return rows[0].clone().requires_grad_(), *(torch.log_softmax(row, -1) for row in rows[1:])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("stale", [False, True])
def test_expected_gradient_of_the_reference_kl_is_that_of_the_exact_kl(
    estimator: Any, stale: bool
) -> None:
    """Enumerate every token, drawn from pi, or from mu with the detached ratio that the docstring
    requires."""
    logits, reference, behavior = draws()
    logp = torch.log_softmax(logits, -1)
    drawn_from = behavior if stale else logp.detach()
    ratio = (logp.detach() - drawn_from).exp()
    estimate = reference_kl(
        logp, reference, sampled=torch.ones(5, dtype=torch.bool), estimator=estimator
    )
    ours = torch.autograd.grad(
        (drawn_from.exp() * ratio * estimate).sum(), logits, retain_graph=True
    )[0]
    exact = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits)[0]
    torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_values_of_the_kl(estimator: Any) -> None:
    logits, reference, _ = draws()
    logp = torch.log_softmax(logits, -1).detach()
    found = reference_kl(
        logp, reference, sampled=torch.ones(5, dtype=torch.bool), estimator=estimator
    )
    exact = (logp.exp() * (logp - reference)).sum().item()
    assert (logp.exp() * found).sum().item() == pytest.approx(exact, rel=1e-12)


def test_entropy_of_a_fair_coin() -> None:
    assert entropy(torch.zeros(3, 2)).tolist() == pytest.approx([math.log(2)] * 3)
    assert entropy(torch.zeros(2, dtype=torch.bfloat16)).dtype == torch.float32


def test_entropy_without_the_tokens_that_cannot_be_drawn() -> None:
    """Their logits are -inf, as of a top-k filter. Value and gradient are those of the others."""
    logits, _, _ = draws()
    filtered = torch.full((9,), -math.inf, dtype=torch.float64)
    filtered[2:7] = logits.detach()
    filtered.requires_grad_()
    exact = torch.distributions.Categorical(logits=logits).entropy()
    assert entropy(filtered).item() == pytest.approx(exact.item(), rel=1e-12)
    (truth,) = torch.autograd.grad(exact, logits)
    (ours,) = torch.autograd.grad(entropy(filtered), filtered)
    torch.testing.assert_close(ours[2:7], truth)
    assert not ours[:2].any() and not ours[7:].any()


def test_regularisers_ignore_what_is_off_the_mask() -> None:
    junk = tensor([math.nan, -1.0])
    sampled = tensor([False, True])
    logp = junk.clone().requires_grad_()
    kls = [reference_kl(logp, junk, sampled=sampled, estimator=name) for name in ("k1", "k2", "k3")]
    found = torch.stack(kls)
    assert found.tolist() == [[0, 0], [0, 0], [0, 0]]
    found.sum().backward()
    assert logp.grad is not None and logp.grad.tolist() == [0.0, 0.0]


def test_objectives_take_padded_batches_too() -> None:
    for objective, advantage in itertools.product(OBJECTIVES.values(), (ADVANTAGE.reshape(2, 4),)):
        flat = objective(torch.linspace(-1, 1, 8), ADVANTAGE)
        padded = objective(torch.linspace(-1, 1, 8).reshape(2, 4), advantage)
        assert torch.equal(padded.loss.flatten(), flat.loss) and torch.equal(
            padded.clipped.flatten(), flat.clipped
        )
