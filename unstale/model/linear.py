"""Float32 matrix products on a CPU by oneDNN.

On AMD CPUs with AVX-512, torch's default library (MKL) is less than half as fast, forward and
backward.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WHOLE = 32
"""oneDNN gets only sizes that are multiples of this, so that shapes repeat.

It compiles each new shape, which takes milliseconds."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def supported(dtype: torch.dtype) -> bool:
    """Return True if oneDNN is enabled in torch and multiplies this dtype on this CPU."""
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
    """Return `rows [R, K] @ weight [N, K]^T + bias [N]`, without a gradient."""
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
    """Return `product`. torch.compile does not look inside: it cannot compile the oneDNN call."""
    return product(rows, weight, bias)


@_opaque.register_fake
def _(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0])


def outer(grad: Tensor, rows: Tensor) -> Tensor:
    """Return `grad [R, N]^T @ rows [R, K]`, the gradient of a weight.

    oneDNN is fastest for a result with at least as many columns as rows.
    """
    if grad.shape[1] <= rows.shape[1]:
        return product(grad.t(), rows.t())
    return product(rows.t(), grad.t()).t()


class Linear(nn.Linear):
    """`nn.Linear` that uses `product`."""

    def forward(self, input: Tensor) -> Tensor:
        if input.device.type != "cpu" or input.dtype != torch.float32:
            return F.linear(input, self.weight, self.bias)
        rows = input.reshape(-1, self.in_features)
        return _Linear.apply(rows, self.weight, self.bias).view(
            *input.shape[:-1], self.out_features
        )


def use(model: nn.Module) -> None:
    """Turn all `nn.Linear` layers of a model into `Linear`, in place."""
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
