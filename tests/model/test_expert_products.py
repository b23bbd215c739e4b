"""Test the products of experts on the CPU.

They are those of transformers, with the same gradients, for experts with biases, transposed weights
and without a gate. In float32 no bit of a row depends on the other rows.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.integrations.moe import use_experts_implementation

from unstale.model import expert_products, linear
from unstale.model.expert_products import EXPERTS

NUM_EXPERTS = 8


def make(dtype: torch.dtype, *, width: int = 64, inner: int = 32, **kinds: bool) -> Any:
    """Return a module of experts. `kinds` are options of transformers' decorator."""

    @use_experts_implementation(**kinds)
    class Experts(nn.Module):
        def __init__(self, config: Qwen3MoeConfig) -> None:
            super().__init__()
            self.num_experts = NUM_EXPERTS
            self.act_fn = nn.SiLU()
            gated = kinds.get("has_gate", True)
            layers = {
                "gate_up_proj" if gated else "up_proj": (inner * (1 + gated), width),
                "down_proj": (width, inner),
            }
            generator = torch.Generator().manual_seed(0)
            for name, (rows, columns) in layers.items():
                shape = (columns, rows) if kinds.get("is_transposed") else (rows, columns)
                weight = torch.randn(NUM_EXPERTS, *shape, generator=generator) / columns**0.5
                setattr(self, name, nn.Parameter(weight.to(dtype)))
                if kinds.get("has_bias"):
                    bias = torch.randn(NUM_EXPERTS, rows, generator=generator)
                    setattr(self, f"{name}_bias", nn.Parameter(bias.to(dtype)))

        def forward(self, *args: Any) -> Tensor:
            raise AssertionError("replaced by the decorator")

    return Experts(Qwen3MoeConfig())


def choices(rows: int, k: int, seed: int, *, used: int = NUM_EXPERTS) -> tuple[Tensor, Tensor]:
    """Return experts and weights `[rows, k]`. Experts from `used` on are not chosen."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(rows, used, generator=generator)
    # Some experts are chosen by many rows, as by a router.
    weights, chosen = (scores * torch.rand(used, generator=generator)).topk(k)
    return chosen, weights


def run(module: Any, implementation: str, *inputs: Tensor) -> Tensor:
    module.config._experts_implementation = implementation
    output: Tensor = module(*inputs)
    return output


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize(
    "kinds",
    [{}, {"has_bias": True}, {"is_transposed": True, "has_bias": True}, {"has_gate": False}],
    ids=str,
)
def test_values_and_gradients_are_those_of_transformers(kinds: dict[str, bool], k: int) -> None:
    module = make(torch.float64, **kinds)
    chosen, weights = choices(50, k, seed=1, used=5)
    hidden = torch.randn(50, 64, dtype=torch.float64)
    found = []
    for implementation in ("batched_mm", EXPERTS):
        inputs = [tensor.double().clone().requires_grad_() for tensor in (hidden, weights)]
        output = run(module, implementation, inputs[0], chosen, inputs[1])
        scale = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output)
        output.mul(scale).sum().backward()
        gradients = [tensor.grad for tensor in (*inputs, *module.parameters())]
        found.append([output, *(gradient.clone() for gradient in gradients)])  # type: ignore[union-attr]
        module.zero_grad()
    for expected, own in zip(*found, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-12)
    assert not found[1][-1][5:].any(), "experts without rows have no gradient"


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize(("width", "inner"), [(128, 256), (64, 96), (48, 40)])
def test_no_bit_of_a_row_depends_on_other_rows(k: int, width: int, inner: int) -> None:
    module = make(torch.float32, width=width, inner=inner)
    hidden = torch.randn(600, width)
    chosen, weights = choices(600, k, seed=2)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        expected = run(module, EXPERTS, hidden, chosen, weights)
        for count in (1, 2, 7, 31, 32, 33, 64, 100, 255, 256, 400, 599):
            rows = torch.randperm(600, generator=generator)[:count]
            output = run(module, EXPERTS, hidden[rows], chosen[rows], weights[rows])
            assert torch.equal(output, expected[rows]), count


def test_rows_on_which_no_expert_works_are_padding() -> None:
    """The rows of experts 0 and 2, of which expert 2 has one more than fits."""
    chosen = torch.tensor([[0]] + [[2]] * 33)
    place, sizes = expert_products.group(chosen, 3, linear.WHOLE)
    assert sizes == [32, 0, 64] and place.flatten().tolist() == [0, *range(32, 65)]
