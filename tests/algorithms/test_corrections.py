"""Test `corrections`, by hand or against an independent calculation.

- pi / mu = D * S for every proxy.
- Units, aggregation, bands, weights and vetoes have the values worked out here, packed and padded.
- Only `log_staleness` carries a gradient: exactly 1 per token.
- A non-finite log-probability of an action token is an error that names its position. Other
  positions may hold any value.
- D enters a weight once. Only sampled and replayed tokens are weighted.
"""

import math
from inspect import unwrap
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor

from unstale.algorithms import corrections
from unstale.algorithms.corrections import (
    CorrectionWeights,
    NonFinite,
    aggregate,
    bounded_exp,
    cap_ratio,
    check_finite,
    clamp,
    divergence,
    has_behavior,
    keep_all,
    log_discrepancy,
    log_staleness,
    mask,
    mask_weight,
    none,
    summary,
    truncate,
    unit_ids,
    veto,
)
from unstale.records import HAS_BEHAVIOR, Provenance

NAN, INF = math.nan, math.inf

# Two sequences: a prompt, a reply of two versions, a tool result, a second reply; then a reply of
# one token.
SEQUENCE = tensor([0, 0, 0, 0, 0, 0, 1, 1])
TURN = tensor([-1, 0, 0, 0, -1, 1, -1, 0])
VERSION = tensor([-1, 3, 3, 4, -1, 4, -1, 4])
SAMPLED = TURN >= 0
LOG_D = tensor([9.0, 0.1, -0.3, 0.5, 9.0, -0.7, 9.0, 0.2])

logs = st.lists(st.floats(-4, 0), min_size=3, max_size=8)


def ids(unit: Any) -> Tensor:
    return unit_ids(unit, sequence=SEQUENCE, turn=TURN, version=VERSION, sampled=SAMPLED)


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        ("token", [-1, 0, 1, 2, -1, 3, -1, 4]),
        ("segment", [-1, 0, 0, 1, -1, 2, -1, 3]),
        ("turn", [-1, 0, 0, 0, -1, 1, -1, 2]),
        ("sequence", [-1, 0, 0, 0, -1, 0, -1, 1]),
    ],
)
def test_units(unit: str, expected: list[int]) -> None:
    assert ids(unit).tolist() == expected


def test_a_version_that_returns_inside_a_turn_begins_a_new_segment() -> None:
    one = torch.zeros(3, dtype=torch.long)
    found = unit_ids("segment", sequence=one, turn=one, version=tensor([3, 4, 3]), sampled=one == 0)
    assert found.tolist() == [0, 1, 2]


def test_the_same_turn_number_in_the_next_sequence_is_another_turn() -> None:
    zero = torch.zeros(2, dtype=torch.long)
    found = unit_ids("turn", sequence=tensor([0, 1]), turn=zero, version=zero, sampled=zero == 0)
    assert found.tolist() == [0, 1]


def test_units_of_a_batch_without_action_tokens() -> None:
    found = unit_ids("turn", sequence=SEQUENCE, turn=TURN, version=VERSION, sampled=SAMPLED & False)
    assert found.tolist() == [-1] * 8
    assert aggregate(LOG_D, found, sampled=SAMPLED & False).tolist() == [0.0] * 8


@pytest.mark.parametrize(
    ("unit", "how", "expected"),
    [
        ("token", "mean", [0, 0.1, -0.3, 0.5, 0, -0.7, 0, 0.2]),
        ("segment", "mean", [0, -0.1, -0.1, 0.5, 0, -0.7, 0, 0.2]),
        ("segment", "sum", [0, -0.2, -0.2, 0.5, 0, -0.7, 0, 0.2]),
        ("turn", "mean", [0, 0.1, 0.1, 0.1, 0, -0.7, 0, 0.2]),
        ("turn", "sum", [0, 0.3, 0.3, 0.3, 0, -0.7, 0, 0.2]),
        ("sequence", "mean", [0, -0.1, -0.1, -0.1, 0, -0.1, 0, 0.2]),
        ("sequence", "sum", [0, -0.4, -0.4, -0.4, 0, -0.4, 0, 0.2]),
        ("token", "max", [0, 0.1, -0.3, 0.5, 0, -0.7, 0, 0.2]),
        ("turn", "max", [0, 0.5, 0.5, 0.5, 0, -0.7, 0, 0.2]),
        ("sequence", "max", [0, -0.7, -0.7, -0.7, 0, -0.7, 0, 0.2]),
    ],
)
def test_aggregation(unit: str, how: Any, expected: list[float]) -> None:
    assert aggregate(LOG_D, ids(unit), sampled=SAMPLED, how=how).tolist() == pytest.approx(
        expected, abs=1e-6
    )


def test_aggregation_takes_ids_with_gaps_so_a_batch_can_be_cut() -> None:
    part = slice(6, 8)
    whole = aggregate(LOG_D, SEQUENCE * 1000, sampled=SAMPLED)
    assert torch.equal(
        aggregate(LOG_D[part], SEQUENCE[part] * 1000, sampled=SAMPLED[part]), whole[part]
    )


@pytest.mark.parametrize("unit", ["token", "segment", "turn", "sequence"])
def test_padded_rows_give_what_packed_sequences_give(unit: Any) -> None:
    def pad(packed: Tensor, filler: float) -> Tensor:
        padded = packed.new_full((2, 6), filler)
        padded[0], padded[1, :2] = packed[:6], packed[6:]
        return padded

    sampled = pad(SAMPLED, False)
    rows = torch.arange(2)[:, None].expand(2, 6)
    found = unit_ids(
        unit, sequence=rows, turn=pad(TURN, -1), version=pad(VERSION, -1), sampled=sampled
    )
    assert found[sampled].tolist() == ids(unit)[SAMPLED].tolist()
    for how in ("mean", "sum"):
        padded = aggregate(pad(LOG_D, NAN), found, sampled=sampled, how=how)
        assert torch.equal(padded, pad(aggregate(LOG_D, ids(unit), sampled=SAMPLED, how=how), 0.0))
    dropped = veto(LOG_D.where(SAMPLED, 0.0), keep_all(SAMPLED), sequence=SEQUENCE, below=0.6)
    dropped_padded = veto(
        pad(LOG_D.where(SAMPLED, 0.0), 0.0), keep_all(sampled), sequence=rows, below=0.6
    )
    assert torch.equal(dropped_padded.keep, pad(dropped.keep, False))


def test_unknown_words_are_refused() -> None:
    """`unwrap` skips conftest's type checks, which would raise first."""
    with pytest.raises(ValueError, match="unit must be"):
        unwrap(unit_ids)("step", sequence=SEQUENCE, turn=TURN, version=VERSION, sampled=SAMPLED)
    with pytest.raises(ValueError, match="how must be"):
        unwrap(aggregate)(LOG_D, SEQUENCE, sampled=SAMPLED, how="median")


def test_shapes_are_checked_in_tests() -> None:
    """This fails if conftest.py does not install its shape checks."""
    with pytest.raises(Exception, match="Type-check error"):
        aggregate(LOG_D, SEQUENCE[:3], sampled=SAMPLED)


# --- the two factors
# ---------------------------------------------------------------------------------------------


@given(logs, st.data())
@settings(deadline=None)
def test_the_factors_multiply_to_the_total_ratio_for_any_proxy(
    behavior: list[float], data: st.DataObject
) -> None:
    size = len(behavior)
    now, prox = (
        data.draw(st.lists(st.floats(-4, 0), min_size=size, max_size=size)) for _ in range(2)
    )
    everywhere = torch.ones(size, dtype=torch.bool)
    d = bounded_exp(log_discrepancy(tensor(prox), tensor(behavior), sampled=everywhere))
    s = bounded_exp(
        log_staleness(tensor(now), tensor(prox), unit=torch.arange(size), sampled=everywhere)
    )
    torch.testing.assert_close(d * s, (tensor(now) - tensor(behavior)).exp(), rtol=1e-5, atol=0)


def test_the_gradient_of_a_unit_is_one_per_token_and_none_elsewhere() -> None:
    """A broadcast product must not multiply the gradient by the unit's length. At S = 1 it is 1 per
    token."""
    for how in ("mean", "sum"):
        now, old, behavior = (torch.full((8,), -1.0, requires_grad=True) for _ in range(3))
        ratio = bounded_exp(log_staleness(now, old, unit=ids("sequence"), sampled=SAMPLED, how=how))
        assert not log_discrepancy(old, behavior, sampled=SAMPLED).requires_grad
        ratio.sum().backward()
        assert now.grad is not None and now.grad.tolist() == SAMPLED.float().tolist()
        assert old.grad is None and behavior.grad is None


def test_a_unit_shares_the_value_of_its_ratio() -> None:
    now = tensor([-1.0, -2.0], requires_grad=True)
    old = tensor([-1.5, -2.1])
    both = torch.zeros(2, dtype=torch.long)
    ratio = log_staleness(now, old, unit=both, sampled=both == 0, how="sum").exp()
    assert ratio.tolist() == pytest.approx([math.exp(0.6)] * 2)
    (gradient,) = torch.autograd.grad(ratio[1], now)
    assert gradient.tolist() == pytest.approx([0.0, math.exp(0.6)])  # its own token only


def test_ratios_are_formed_in_float32_and_float64_stays() -> None:
    half = tensor([-1.0], dtype=torch.bfloat16)
    everywhere, unit = torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.long)
    exact = tensor([-1.001], dtype=torch.float32)  # bfloat16 cannot tell it from -1
    assert log_discrepancy(half, exact, sampled=everywhere).item() == pytest.approx(0.001, rel=1e-3)
    assert log_discrepancy(half, half, sampled=everywhere).dtype == torch.float32
    assert log_staleness(half, half, unit=unit, sampled=everywhere).dtype == torch.float32
    assert aggregate(half, unit, sampled=everywhere).dtype == torch.float32
    for name in ("log_discrepancy", "log_staleness"):
        units = {} if name == "log_discrepancy" else {"unit": unit}
        wide = getattr(corrections, name)(half.double(), half.double(), sampled=everywhere, **units)
        assert wide.dtype == torch.float64


def test_a_ratio_is_held_within_e_to_the_20() -> None:
    held = bounded_exp(tensor([-1000.0, 1000.0], dtype=torch.float64)).tolist()
    assert held == pytest.approx([math.exp(-20), math.exp(20)])


# --- controls
# ------------------------------------------------------------------------------------------------

LOG = torch.where(SAMPLED, LOG_D, 0.0)
D = [1.0, math.exp(0.1), math.exp(-0.3), math.exp(0.5), 1.0, math.exp(-0.7), 1.0, math.exp(0.2)]


def kept(correction: CorrectionWeights) -> list[int]:
    return correction.keep.int().tolist()


def test_mask() -> None:
    correction = mask(LOG, keep_all(SAMPLED), low=math.exp(-0.4), high=math.exp(0.4))
    assert kept(correction) == [0, 1, 1, 0, 0, 0, 0, 1]
    assert correction.factor.tolist() == kept(correction)


def test_both_ends_of_a_band_belong_to_it() -> None:
    assert (
        kept(mask(torch.zeros(8), keep_all(SAMPLED), low=1.0, high=1.0)) == SAMPLED.int().tolist()
    )


def test_truncate() -> None:
    correction = truncate(LOG, keep_all(SAMPLED), high=1.2)
    assert correction.factor.tolist() == pytest.approx([0, D[1], D[2], 1.2, 0, D[5], 0, 1.2])
    assert kept(correction) == SAMPLED.int().tolist()


def test_clamp_is_truncate_with_a_lower_bound() -> None:
    correction = clamp(LOG, keep_all(SAMPLED), low=0.8, high=1.2)
    assert correction.factor.tolist() == pytest.approx([0, D[1], 0.8, 1.2, 0, 0.8, 0, 1.2])
    assert kept(correction) == SAMPLED.int().tolist()


def test_normalized_weights_have_the_mean_one_over_kept_tokens() -> None:
    """Of the five tokens, the veto drops sequence 0; a band drops D[3] and D[5]."""
    everything = truncate(LOG, keep_all(SAMPLED), high=1.2, normalize=True)
    weights = [D[1], D[2], 1.2, D[5], 1.2]
    assert everything.factor[SAMPLED].tolist() == pytest.approx(
        [weight * 5 / sum(weights) for weight in weights]
    )
    vetoed = veto(LOG, keep_all(SAMPLED), sequence=SEQUENCE, below=0.6)
    assert truncate(LOG, vetoed, high=9.0, normalize=True).factor.tolist() == [0] * 7 + [1]
    low, high = math.exp(-0.4), math.exp(0.4)
    inside = mask_weight(LOG, keep_all(SAMPLED), low=low, high=high, normalize=True)
    total = D[1] + D[2] + D[7]
    assert inside.factor[inside.keep].tolist() == pytest.approx(
        [weight * 3 / total for weight in (D[1], D[2], D[7])]
    )
    nothing = truncate(LOG, keep_all(SAMPLED & False), high=1.2, normalize=True)
    assert nothing.factor.tolist() == [0] * 8


def test_a_cap_holds_the_whole_ratio_however_it_is_divided() -> None:
    """pi / mu = 1.5, 3 and 0.5: with a cap of 2, D S times the factor is 1.5, 2 and 0.5."""
    behavior = torch.zeros(3, dtype=torch.float64)
    now = tensor([1.5, 3.0, 0.5], dtype=torch.float64).log().requires_grad_()
    everywhere = torch.ones(3, dtype=torch.bool)
    factor = cap_ratio(now, behavior, sampled=everywhere, high=2.0)
    assert factor.tolist() == pytest.approx([1, 2 / 3, 1]) and not factor.requires_grad
    for old in (behavior, now.detach(), tensor([-0.4, 0.3, 0.9], dtype=torch.float64)):
        log_d = log_discrepancy(old, behavior, sampled=everywhere)
        weight = truncate(log_d, keep_all(everywhere), high=INF).factor
        log_s = log_staleness(now, old, unit=torch.arange(3), sampled=everywhere)
        assert (weight * bounded_exp(log_s) * factor).tolist() == pytest.approx([1.5, 2, 0.5])
    off = cap_ratio(
        tensor([NAN, 9.0]), tensor([0.0, NAN]), sampled=everywhere[:2] & False, high=2.0
    )
    assert off.tolist() == [1, 1]


def test_mask_weight() -> None:
    correction = mask_weight(LOG, keep_all(SAMPLED), low=math.exp(-0.4), high=math.exp(0.4))
    assert correction.factor.tolist() == pytest.approx([0, D[1], D[2], 0, 0, 0, 0, D[7]])
    assert kept(correction) == [0, 1, 1, 0, 0, 0, 0, 1]


def test_veto_drops_the_whole_sequence_and_only_that() -> None:
    correction = veto(LOG, keep_all(SAMPLED), sequence=SEQUENCE, below=0.6)  # exp(-0.7) = 0.497
    assert kept(correction) == [0, 0, 0, 0, 0, 0, 0, 1]
    assert (
        kept(veto(LOG, keep_all(SAMPLED), sequence=SEQUENCE, below=0.4)) == SAMPLED.int().tolist()
    )
    assert (
        kept(veto(torch.full((8,), -100.0), keep_all(SAMPLED), sequence=SEQUENCE, below=0.0))
        == SAMPLED.int().tolist()
    )


def test_veto_also_sees_tokens_that_were_dropped_before() -> None:
    before = mask(LOG, keep_all(SAMPLED), low=0.6, high=10.0)
    assert kept(before) == [0, 1, 1, 1, 0, 0, 0, 1]
    assert kept(veto(LOG, before, sequence=SEQUENCE, below=0.6)) == [0, 0, 0, 0, 0, 0, 0, 1]


def test_controls_compose() -> None:
    correction = veto(LOG, keep_all(SAMPLED), sequence=SEQUENCE, below=0.1)
    correction = mask(aggregate(LOG, ids("turn"), sampled=SAMPLED), correction, low=0.9, high=1.2)
    correction = truncate(LOG, correction, high=1.3)
    assert correction.factor.tolist() == pytest.approx([0, D[1], D[2], 1.3, 0, 0, 0, 0])
    assert none(LOG, correction) is correction


def test_a_second_weight_is_refused() -> None:
    once = truncate(LOG, keep_all(SAMPLED), high=2.0)
    with pytest.raises(ValueError, match="twice"):
        mask_weight(LOG, once, low=0.5, high=2.0)
    with pytest.raises(ValueError, match="twice"):
        truncate(LOG, once, high=2.0)


@pytest.mark.parametrize(("low", "high"), [(2.0, 1.0), (-0.1, 1.0), (NAN, 1.0)])
def test_an_impossible_band_is_refused(low: float, high: float) -> None:
    for mode in (mask, mask_weight):
        with pytest.raises(ValueError, match="band"):
            mode(LOG, keep_all(SAMPLED), low=low, high=high)


def test_impossible_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="high must be > 0"):
        truncate(LOG, keep_all(SAMPLED), high=0.0)
    with pytest.raises(ValueError, match=r"0 <= low <= high and high > 0, got 3.0 \.\. 2.0"):
        clamp(LOG, keep_all(SAMPLED), low=3.0, high=2.0)
    with pytest.raises(ValueError, match="high must be > 0, got 0"):
        cap_ratio(LOG, LOG, sampled=SAMPLED, high=0.0)
    with pytest.raises(ValueError, match="below must be"):
        veto(LOG, keep_all(SAMPLED), sequence=SEQUENCE, below=1.5)


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=12), st.floats(0.1, 1), st.floats(1, 10))
@settings(deadline=None)
def test_masking_and_then_capping_is_weighing_inside_the_band(
    values: list[float], low: float, high: float
) -> None:
    log_d = tensor(values)
    everywhere = torch.ones_like(log_d, dtype=torch.bool)
    one = truncate(log_d, mask(log_d, keep_all(everywhere), low=low, high=high), high=high)
    other = mask_weight(log_d, keep_all(everywhere), low=low, high=high)
    assert torch.equal(one.keep, other.keep)
    torch.testing.assert_close(one.factor, other.factor)


def test_verdicts_carry_no_gradient() -> None:
    log_d = LOG.clone().requires_grad_()
    for correction in (
        mask(log_d, keep_all(SAMPLED), low=0.5, high=2.0),
        truncate(log_d, keep_all(SAMPLED), high=2.0),
        mask_weight(log_d, keep_all(SAMPLED), low=0.5, high=2.0),
        veto(log_d, keep_all(SAMPLED), sequence=SEQUENCE, below=0.5),
    ):
        assert not correction.weight.requires_grad and not correction.factor.requires_grad


# --- what may enter, and what is reported
# ------------------------------------------------------------------------


def test_only_sampled_and_replayed_tokens_have_a_behaviour_probability() -> None:
    kinds = tensor([int(kind) for kind in Provenance])
    assert has_behavior(kinds).tolist() == [kind in HAS_BEHAVIOR for kind in Provenance]


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_non_finite_action_token_is_an_error_that_says_where(value: float) -> None:
    logp = torch.zeros(8)
    logp[7] = value
    with pytest.raises(
        NonFinite, match=r"old_logp is .* at token 1 of sequence 1, sampled by version 4"
    ) as caught:
        check_finite(
            {"behavior_logp": torch.zeros(8), "old_logp": logp},
            SAMPLED,
            sequence=SEQUENCE,
            version=VERSION,
        )
    error = caught.value
    assert (error.name, error.sequence, error.token, error.version) == ("old_logp", 1, 1, 4)


def test_off_the_mask_anything_may_stand() -> None:
    """Masked positions may be non-finite; they change neither values nor gradients."""
    junk = torch.where(SAMPLED, LOG_D, NAN)
    check_finite({"logp": junk}, SAMPLED, sequence=SEQUENCE, version=VERSION)
    now = junk.clone().requires_grad_()
    log_s = log_staleness(now, junk - 0.1, unit=ids("turn"), sampled=SAMPLED)
    log_s.exp().sum().backward()
    assert now.grad is not None and now.grad.isfinite().all()
    assert log_discrepancy(junk, junk, sampled=SAMPLED).tolist() == [0.0] * 8


def test_summary() -> None:
    correction = mask(LOG, keep_all(SAMPLED), low=math.exp(-0.4), high=math.exp(0.4))
    found = summary(correction, sampled=SAMPLED, log_discrepancy=LOG, log_staleness=2 * LOG)
    assert found["correction/kept_share"] == pytest.approx(3 / 5)
    assert found["correction/weight_mean"] == pytest.approx(3 / 5)
    assert found["correction/log_d_mean"] == pytest.approx(-0.2 / 5)
    assert found["correction/log_d_abs_mean"] == pytest.approx(1.8 / 5)
    percentiles = [found[f"objective/log_s_p{percent}"] for percent in ("01", "50", "99")]
    assert percentiles == pytest.approx([-1.4, 0.2, 1.0])


def test_divergence_of_equal_policies_is_zero() -> None:
    found = divergence(LOG_D, LOG_D, sequence=SEQUENCE, sampled=SAMPLED)
    perplexity = -((0.1 - 0.3 + 0.5 - 0.7) / 4 + 0.2) / 2
    assert found.pop("correction/behavior_log_ppl_mean") == pytest.approx(perplexity)
    assert found.pop("correction/old_log_ppl_mean") == pytest.approx(perplexity)
    assert set(found.values()) == {0.0}


def test_nothing_is_reported_of_a_batch_without_action_tokens() -> None:
    nothing = SAMPLED & False
    assert summary(keep_all(nothing), sampled=nothing, log_discrepancy=LOG, log_staleness=LOG) == {}
    assert divergence(LOG, LOG, sequence=SEQUENCE, sampled=nothing) == {}
