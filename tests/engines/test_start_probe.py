"""Test the probe of a runner with a runner that returns the plain logits, partly changed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from unstale.engines.embedded.probe import SLOTS, Probe
from unstale.engines.embedded.runner import Step

POSITIONS = 8
"""Number of positions whose logits the probe compares."""
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.15,
}


class _Echo:
    """A runner that returns the plain logits of a probe, after `change(number, logits)`."""

    keeps_beginnings = True

    def __init__(self, probe: Probe, change: Callable[[int, Tensor], Tensor]) -> None:
        self._probe, self._change, self.count = probe, change, 0

    def copy_prefix(self, source: int, target: int, count: int) -> None:
        pass

    def forward(self, step: Step) -> Tensor:
        ends = [*range(len(step.rows)), *(span.stop - 1 for _, span in step.spans())]
        slots = [*step.rows.tolist(), *(chunk.slot for chunk in step.chunks)]
        found = []
        for slot, end in zip(slots, ends, strict=True):
            if slot == SLOTS - 1:
                found.append(torch.zeros(64))
                continue
            plain = self._probe._plain[slot][step.positions[end]]
            found.append(self._change(self.count, plain.clone()))
            self.count += 1
        return torch.stack(found)


def _model(*, experts: bool = False, scale: float = 1.0) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel
    if experts:
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
        )
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    with torch.no_grad():
        model.get_output_embeddings().weight *= scale
    return model.eval()


def _error(probe: Probe, change: Callable[[int, Tensor], Tensor]) -> str:
    runner: Any = _Echo(probe, change)
    error = probe.error(runner)
    assert runner.count == POSITIONS
    return error


def _raised(start: int, by: float) -> Callable[[int, Tensor], Tensor]:
    """Return a change of one logit at the positions from `start` on."""
    return lambda number, logits: logits + by * (number >= start) * (torch.arange(64) == 5)


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_an_error(experts: bool, value: float) -> None:
    probe = Probe(_model(experts=experts), 64)
    assert not _error(probe, _raised(POSITIONS, 0.0))
    assert "not finite" in _error(
        probe, lambda number, logits: logits * value if number == POSITIONS - 1 else logits
    )


def test_plain_logits_that_are_not_finite_are_an_error() -> None:
    model = _model(scale=torch.nan)
    assert "a plain forward pass gives" in _error(Probe(model, 64), lambda number, logits: logits)


def test_plain_logits_of_zero_are_compared() -> None:
    probe = Probe(_model(scale=0.0), 64)
    assert not _error(probe, _raised(POSITIONS, 0.0))
    assert "differ by" in _error(probe, _raised(0, 1e-3))


def test_large_logits_of_a_dense_model_are_bounded_in_nats_at_every_position() -> None:
    """One position differs by 2e-5 of the largest logit, but by more than 1e-3 nats."""
    probe = Probe(_model(scale=100.0), 64)
    largest = min(float(rows.abs().amax(-1).min()) for rows in probe._plain)
    assert largest > 100
    assert not _error(probe, _raised(POSITIONS - 1, 5e-4))
    assert "at 1 of 8 positions" in _error(probe, _raised(POSITIONS - 1, 2e-3))


def test_small_logits_are_bounded_as_a_share_of_the_largest() -> None:
    assert "differ by" in _error(Probe(_model(scale=0.01), 64), _raised(POSITIONS - 1, 5e-5))


@pytest.mark.parametrize(("outliers", "accepted"), [(0, True), (2, True), (3, False)])
def test_a_quarter_of_the_positions_may_differ_with_experts(outliers: int, accepted: bool) -> None:
    probe = Probe(_model(experts=True), 64)
    error = _error(probe, _raised(POSITIONS - outliers, 0.5))
    assert bool(error) != accepted
    if not outliers:
        assert not probe.warning
    else:
        assert f"at {outliers} of 8 positions" in (probe.warning if accepted else error)


@pytest.mark.parametrize("experts", [False, True])
def test_bfloat16_may_differ_as_much_as_its_plain_pass(experts: bool) -> None:
    exact = Probe(_model(experts=experts), 64)
    probe = Probe(_model(experts=experts).bfloat16(), 64, exact)
    assert not _error(probe, _raised(POSITIONS, 0.0))
    assert not _error(probe, lambda number, logits: logits * (1 + 2**-8))
    assert "bfloat16 logits differ by" in _error(probe, lambda number, logits: logits * 1.5)
    assert "not finite" in _error(probe, lambda number, logits: logits * torch.nan)
