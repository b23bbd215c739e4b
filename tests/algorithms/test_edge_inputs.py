"""Test the pure functions with inputs at the edge of what they take.

- An advantage off the mask changes neither loss nor gradient, also if it is NaN or infinite.
- Ids may be any integers, such as hashes, and give what small ids give.
- Approximations of old log-probabilities widen bfloat16.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, tensor

from unstale.algorithms import audit, proximal
from unstale.algorithms.advantages import grpo_advantage
from unstale.algorithms.corrections import (
    aggregate,
    divergence,
    keep_all,
    log_staleness,
    mask_weight,
    renumber,
    unit_ids,
    veto,
)
from unstale.algorithms.objectives import token_norm
from unstale.config.objectives import objectives

HASHES = tensor([2**62 + 7, -(2**62), -1])
"""Ids for which a table of their range would have 2^63 rows."""

SEQUENCE = tensor([0, 0, 0, 1, 1, 2, 2, 2])
TURN = tensor([-1, 0, 0, -1, 0, 0, -1, 1])
SAMPLED = TURN >= 0
UNITS: list[Any] = ["token", "segment", "turn", "sequence"]
AGGREGATES: list[Any] = ["mean", "sum", "max"]


def inputs_of(name: str) -> dict[str, Tensor]:
    """Return the further tensors that an objective declares, with junk off the mask."""
    known = {"old_logp": torch.where(SAMPLED, logps(2), math.nan), "sequence": SEQUENCE}
    return {each: known[each] for each in objectives()[name].inputs if each != "sampled"}


def logps(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return -torch.rand(8, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("filler", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("how", AGGREGATES)
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("name", objectives())
def test_an_advantage_off_the_mask_changes_nothing(
    name: str, unit: Any, how: Any, filler: float
) -> None:
    ids = unit_ids(unit, sequence=SEQUENCE, turn=TURN, version=SEQUENCE * 0, sampled=SAMPLED)
    norm = token_norm(SAMPLED, SAMPLED, sequence=SEQUENCE)
    found = []
    for off in (0.0, filler):
        advantage = torch.where(SAMPLED, logps(3) + 0.5, off)
        logp = logps(1).requires_grad_()
        log_s = log_staleness(logp, logps(2), unit=ids, sampled=SAMPLED, how=how)
        surrogate = objectives()[name]().surrogate(
            log_s, advantage, sampled=SAMPLED, **inputs_of(name)
        )
        loss = (norm * keep_all(SAMPLED).factor * surrogate.loss).sum()
        loss.backward()
        assert logp.grad is not None and loss.isfinite()
        found.append((loss.detach(), logp.grad, surrogate.clipped))
    for clean, dirty in zip(*found, strict=True):
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize("name", objectives())
def test_an_advantage_on_the_mask_that_is_not_a_number_is_not_hidden(name: str) -> None:
    advantage = torch.where(SAMPLED, math.nan, 0.0)
    surrogate = objectives()[name]().surrogate(
        torch.zeros(8), advantage, sampled=SAMPLED, **inputs_of(name)
    )
    assert surrogate.loss[SAMPLED].isnan().all() and not surrogate.loss[~SAMPLED].any()


def test_ids_are_renumbered_in_their_order() -> None:
    index, count = renumber(HASHES[SEQUENCE])
    assert index.tolist() == [2, 2, 2, 0, 0, 1, 1, 1] and count == 3
    index, count = renumber(torch.zeros(0, dtype=torch.long))
    assert index.tolist() == [] and count == 0


@pytest.mark.parametrize("how", AGGREGATES)
def test_units_may_be_hashes(how: Any) -> None:
    expected = aggregate(logps(1), SEQUENCE, sampled=SAMPLED, how=how)
    assert torch.equal(aggregate(logps(1), HASHES[SEQUENCE], sampled=SAMPLED, how=how), expected)


@pytest.mark.parametrize("how", ["action_tokens", "kept", "sequence_mean", "constant"])
def test_sequences_of_denominators_may_be_hashes(how: Any) -> None:
    keep = SAMPLED & (SEQUENCE != 1)
    expected = token_norm(SAMPLED, keep, sequence=SEQUENCE, how=how)
    assert torch.equal(token_norm(SAMPLED, keep, sequence=HASHES[SEQUENCE], how=how), expected)


def test_sequences_of_a_veto_and_of_metrics_may_be_hashes() -> None:
    log_d = torch.where(SAMPLED & (SEQUENCE == 1), -3.0, 0.0)
    for ids in (SEQUENCE, HASHES[SEQUENCE]):
        kept = veto(log_d, keep_all(SAMPLED), sequence=ids, below=0.5).keep
        assert kept.tolist() == (SAMPLED & (SEQUENCE != 1)).tolist()
    small, large = (
        divergence(logps(1), logps(2), sequence=ids, sampled=SAMPLED)
        for ids in (SEQUENCE, HASHES[SEQUENCE])
    )
    assert large == pytest.approx(small, rel=1e-12)


def test_sequences_of_the_audit_may_be_hashes() -> None:
    def tokens(sequence: Tensor) -> audit.Tokens:
        lag = torch.ones_like(sequence)
        return audit.Tokens(*(logps(seed) for seed in range(4)), lag, sequence, SAMPLED)

    small = audit.join([tokens(SEQUENCE), tokens(SEQUENCE)])
    large = audit.join([tokens(HASHES[SEQUENCE]), tokens(HASHES[SEQUENCE])])
    assert large.sequence.max() == small.sequence.max() == 5
    assert audit.decomposition_error(large) == audit.decomposition_error(small)


def test_units_are_found_and_groups_compared_by_any_ids() -> None:
    for unit in UNITS:
        small, large = (
            unit_ids(unit, sequence=ids, turn=TURN, version=HASHES[SEQUENCE], sampled=SAMPLED)
            for ids in (SEQUENCE, HASHES[SEQUENCE])
        )
        assert torch.equal(small, large)
    rewards = logps(1)
    assert torch.equal(grpo_advantage(rewards, HASHES[SEQUENCE]), grpo_advantage(rewards, SEQUENCE))


@pytest.mark.parametrize("approximate", [proximal.loglinear, proximal.linear])
@pytest.mark.parametrize("alpha", [0.3, "per token"])
def test_approximations_widen_bfloat16(approximate: Any, alpha: Any) -> None:
    mu, pi = (logps(seed).bfloat16() for seed in (1, 2))
    weight = proximal.weight_of_now(SEQUENCE) if alpha == "per token" else alpha
    found = approximate(mu, pi, weight, sampled=SAMPLED)
    assert found.dtype == torch.float32
    assert torch.equal(found, approximate(mu.float(), pi.float(), weight, sampled=SAMPLED))
    wide = approximate(mu.double(), pi.double(), weight, sampled=SAMPLED)
    assert wide.dtype == torch.float64
    torch.testing.assert_close(found.double(), wide, rtol=1e-6, atol=1e-7)


def test_weights_are_finite_beside_junk_off_the_mask() -> None:
    log_d = torch.where(SAMPLED, 0.1, math.nan)
    correction = mask_weight(log_d, keep_all(SAMPLED), low=0.5, high=2.0, normalize=True)
    assert correction.factor.tolist() == pytest.approx(SAMPLED.double().tolist())
