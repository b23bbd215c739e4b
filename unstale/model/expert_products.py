"""The experts of MoE models on CPUs: each expert multiplies all of its tokens at once.

transformers calls `_experts` in place of its own functions. The rows (tokens) of an expert are
padded with zero rows to a multiple of `linear.WHOLE`. So the result of a row does not depend on the
other rows, as in a dense layer.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from unstale.model import linear
from unstale.routed_experts import num_experts

EXPERTS = "unstale_experts"
"""The name of `_experts` among the expert implementations of transformers."""
ON_GPU = "batched_mm"
"""The implementation of transformers that is used on a GPU. It computes the experts of each token
separately.
"""


def use(model: PreTrainedModel) -> None:
    """Make an MoE model on the CPU compute its experts with this module, in place.

    Other models are not changed. A model that is divided among ranks must be loaded with the
    implementation `EXPERTS` instead.
    """
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    if num_experts(model.config.to_dict()) and on_cpu:
        model.set_experts_implementation(EXPERTS)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the sizes depend on the choices
def _experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the outputs of each token's chosen experts, `[T, H]`.

    `chosen` `[T, k]` has the indices of the experts, and `weights` `[T, k]` their weights.
    """
    if hidden.device.type != "cpu":
        result: Tensor = ALL_EXPERTS_FUNCTIONS[ON_GPU](module, hidden, chosen, weights)
        return result
    place, sizes = group(chosen, module.num_experts, linear.WHOLE)
    first = _layer(module, "gate_up_proj" if module.has_gate else "up_proj")
    last = _layer(module, "down_proj")
    activation = module._apply_gate if module.has_gate else module.act_fn
    outputs = [
        last(expert, activation(first(expert, rows)))
        for expert, rows in enumerate(_Spread.apply(hidden, place, sum(sizes)).split(sizes))
        if len(rows)
    ]
    rows = torch.cat(outputs)
    if getattr(module, "has_post_expert_norm", False):  # transformers 5.19 has no such attribute
        rows = module.post_expert_norm(rows)
    weighted: Tensor = _Collect.apply(rows, place) * weights.unsqueeze(-1)
    return weighted.sum(1).to(hidden.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)


def group(chosen: Tensor, num_experts: int, whole: int) -> tuple[Tensor, list[int]]:
    """Assign a row to each pair of a token and one of its k chosen experts, sorted by expert.

    `chosen` `[T, k]` has the indices of the experts. Return the row of each pair, `[T, k]`, and the
    number of rows of each expert. Each number is rounded up to a multiple of `whole`.

    >>> group(torch.tensor([[2, 0, 2]]), 3, 4)
    (tensor([[4, 0, 5]]), [4, 0, 4])
    """
    flat = chosen.reshape(-1)
    counts = torch.bincount(flat, minlength=num_experts)
    sizes = (counts + whole - 1) // whole * whole
    added = (sizes - counts).cumsum(0) - (sizes - counts)
    order = flat.argsort(stable=True)
    place = torch.empty_like(flat)
    place[order] = torch.arange(len(flat)) + added[flat[order]]
    return place.view(chosen.shape), sizes.tolist()


def _layer(module: Any, name: str) -> Callable[[int, Tensor], Tensor]:
    """Return a function of (expert's index, rows) that applies the expert's linear layer `name`."""
    weight: Tensor = getattr(module, name)
    weights = (weight.mT if module.is_transposed else weight).unbind(0)
    biases = getattr(module, f"{name}_bias").unbind(0) if module.has_bias else None

    def apply(expert: int, rows: Tensor) -> Tensor:
        return linear.apply(rows, weights[expert], biases[expert] if biases else None)

    return apply


class _Spread(torch.autograd.Function):
    """Copy each row of `[T, K]` to its k places in a tensor of `count` rows.

    Other rows are zero.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, place: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(place)
        out = rows.new_zeros(count, rows.shape[1])
        return out.index_copy_(0, place.view(-1), rows.repeat_interleave(place.shape[1], 0))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        return grad[place].sum(1), None, None


class _Collect(torch.autograd.Function):
    """Select the rows of `[R, N]` at the places `[T, k]`. The result is `[T, k, N]`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.count = len(rows)
        return rows[place]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        out = grad.new_zeros(ctx.count, grad.shape[-1])
        return out.index_copy_(0, place.view(-1), grad.flatten(0, 1)), None
