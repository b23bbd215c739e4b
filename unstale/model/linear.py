"""Matrix products in float32 on a processor by oneDNN, which uses all of its vector units; torch's own do not on all.

On an AMD processor with AVX-512, torch's MKL reaches less than half of what oneDNN does, forward and for the gradient.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WHOLE = 32
"""oneDNN compiles a program for every shape, in milliseconds: it gets those that come again, of whole multiples."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def supported(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this dtype on this processor, with its weight reordered and not, and may be used."""
    return bool(torch.backends.mkldnn.enabled) and _works(dtype)


@cache
def _works(dtype: torch.dtype) -> bool:
    weight = torch.ones(WHOLE, WHOLE, dtype=dtype, device="cpu")
    try:
        reordered = torch.ops.mkldnn._reorder_linear_weight(weight, WHOLE)
        for ready in (weight, reordered):
            torch.ops.mkldnn._linear_pointwise(weight, ready, None, "none", [], "")
    except (RuntimeError, AttributeError):
        return False
    return True


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`rows [R, K] @ weight [N, K]^T + bias [N]`, without a gradient."""
    if torch.compiler.is_compiling():
        return _opaque(rows, weight, bias)
    regular = rows.numel() and not any(size % WHOLE for size in rows.shape)
    if (
        regular
        and rows.device.type == "cpu"
        and rows.dtype == torch.float32
        and supported(rows.dtype)
    ):
        return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return F.linear(rows, weight, bias)


@torch.library.custom_op("unstale::product", mutates_args=())
def _opaque(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`product`, into which torch.compile does not look: its own oneDNN layer refuses weights that are trained."""
    return product(rows, weight, bias)


@_opaque.register_fake
def _(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0])


def outer(grad: Tensor, rows: Tensor) -> Tensor:
    """`grad [R, N]^T @ rows [R, K]`, the gradient of a weight: oneDNN is fastest where what it makes is wide."""
    return (
        product(grad.t(), rows.t())
        if grad.shape[1] <= rows.shape[1]
        else product(rows.t(), grad.t()).t()
    )


class Linear(nn.Linear):
    """`nn.Linear` by `product`."""

    def forward(self, input: Tensor) -> Tensor:
        if input.device.type != "cpu" or input.dtype != torch.float32:
            return F.linear(input, self.weight, self.bias)
        rows = input.reshape(-1, self.in_features)
        return _Linear.apply(rows, self.weight, self.bias).view(
            *input.shape[:-1], self.out_features
        )


def use(model: nn.Module) -> None:
    """Make all linear layers of a model `Linear`, in place."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        for_rows, for_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(rows if for_weight else None, weight if for_rows else None)
        return product(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        for_rows, for_weight, for_bias = ctx.needs_input_grad
        grad = grad.contiguous()
        return (
            product(grad, weight.t()) if for_rows else None,
            outer(grad, rows) if for_weight else None,
            grad.sum(0) if for_bias else None,
        )
