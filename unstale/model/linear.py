"""Faster matrix products on CPUs, by the library oneDNN.

On AMD CPUs with AVX-512, torch's default library (MKL) has less than half of oneDNN's speed,
forward and backward. Without AVX-512 both have the same speed, but each call of oneDNN costs more.
On such CPUs, MKL multiplies small matrices. It also computes the gradients of weights there,
because it is faster.

x86 CPUs without instructions for bfloat16 or float16 are slow with these formats: with float16,
torch had 40% of the speed of float32 on a Zen 5. On such CPUs, the rows and weights of a linear
layer are converted to float32, multiplied, and the result is rounded. Sums are always float32.
"""

import platform
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WHOLE = 32
"""The sizes of matrices passed to oneDNN are multiples of this number. oneDNN compiles code for
each new shape, which takes milliseconds, so the number of different shapes is kept small.
"""


def _has_fast_mkl() -> bool:
    return torch.backends.mkl.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX2"


HAS_FAST_MKL = _has_fast_mkl()
"""True on CPUs where MKL computes some products faster than oneDNN. It is a constant, so that
torch.compile can compile code that reads it.
"""


def _multiplies_bfloat16() -> bool:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


MULTIPLIES_BFLOAT16 = _multiplies_bfloat16()
"""False on an x86 CPU without instructions for bfloat16."""


def _multiplies_float16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    return "avx512_fp16" in flags or torch.cpu._is_amx_fp16_supported()


MULTIPLIES_FLOAT16 = _multiplies_float16()
"""False on an x86 CPU without instructions for float16."""


def supported(dtype: torch.dtype) -> bool:
    """Return True if oneDNN is enabled in torch and can multiply `dtype` on this CPU.

    This includes bfloat16 and float16 if they have to be converted to float32 first.
    """
    return bool(torch.backends.mkldnn.enabled) and _works(_multiplied(dtype))


def _multiplied(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to which this CPU converts `dtype` for a product: the same, or float32."""
    is_slow = (dtype == torch.bfloat16 and not MULTIPLIES_BFLOAT16) or (
        dtype == torch.float16 and not MULTIPLIES_FLOAT16
    )
    return torch.float32 if is_slow else dtype


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
    """Return `rows [R, K] @ weight [N, K]^T + bias [N]`, without gradient."""
    if torch.compiler.is_compiling():
        return _opaque(rows, weight, bias)
    if _is_slow(rows):
        wide = product(rows.float(), weight.float(), None if bias is None else bias.float())
        return wide.to(rows.dtype)
    if rows.numel() and _by_onednn(rows):
        return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return F.linear(rows, weight, bias)


def _by_onednn(rows: Tensor) -> bool:
    is_regular = not any(size % WHOLE for size in rows.shape)
    is_wide = rows.device.type == "cpu" and rows.dtype == torch.float32
    return is_regular and is_wide and supported(rows.dtype)


BLOCK = 192
"""Approximate number of terms that `accurate_product` sums in one block."""


def accurate_product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the result of `product`, with a smaller rounding error in long float32 sums.

    oneDNN adds all terms of a sum one after another. For 1,536 terms, as in SmolLM2's widest layer,
    its mean error is twice that of MKL, which sums short blocks. This function multiplies blocks
    separately and adds the results, so its error is MKL's. With 512 rows this takes 9% to 14%
    longer than `product`.
    """
    terms = rows.shape[1]
    if terms < 2 * BLOCK or not _by_onednn(rows):
        return product(rows, weight, bias)
    size = -(-terms // (terms // BLOCK * WHOLE)) * WHOLE
    # oneDNN is a thousand times slower if the rows of a block are not contiguous.
    blocks = zip(rows.split(size, 1), weight.split(size, 1), strict=True)
    parts = [(each.contiguous(), of_weight.contiguous()) for each, of_weight in blocks]
    total = product(*parts[0], bias)
    for part in parts[1:]:
        total += product(*part)
    return total


USUAL_ROWS = 64
"""Number of rows for which the layout of a prepared weight (`prepare`) is chosen. Products with
another number of rows are slightly slower.
"""


SMALL_WEIGHTS = 1 << 17
"""Largest size of a matrix, in numbers, that MKL multiplies on CPUs without AVX-512. With 8 to 64
rows, MKL takes 7 to 30 microseconds for 128 x 128 weights, and oneDNN 30 to 50. At this size both
take the same time.
"""


def prepare(weight: Tensor) -> Tensor:
    """Return a copy of a weight `[N, K]`, in the layout in which `prepared_product` is fastest.

    `supported` must be True for its dtype. The copy of a bfloat16 or float16 weight is float32 if
    this CPU multiplies float32 faster.
    """
    dtype = _multiplied(weight.dtype)
    if _is_small(weight.numel(), dtype):
        return weight.to(dtype, copy=True, memory_format=torch.contiguous_format)
    whole = weight.to(dtype).contiguous()
    prepared: Tensor = torch.ops.mkldnn._reorder_linear_weight(whole, USUAL_ROWS)
    return prepared


def prepared_product(rows: Tensor, prepared: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `rows [..., K] @ weight [N, K]^T + bias [N]`, in the dtype of `rows`.

    `prepared` is the result of `prepare` for the weight.
    """
    if rows.dtype in (torch.bfloat16, torch.float16) and prepared.dtype == torch.float32:
        wide = None if bias is None else bias.float()
        return prepared_product(rows.float(), prepared, wide).to(rows.dtype)
    if not prepared.is_mkldnn:
        return F.linear(rows, prepared, bias)
    result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, prepared, bias, "none", [], "")
    return result


def _is_small(size: int, dtype: torch.dtype) -> bool:
    return dtype == torch.float32 and size <= SMALL_WEIGHTS and _has_fast_mkl()


def _is_slow(rows: Tensor) -> bool:
    return rows.device.type == "cpu" and _multiplied(rows.dtype) != rows.dtype


@torch.library.custom_op("unstale::product", mutates_args=())
def _opaque(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `product` as one operation that torch.compile leaves as it is."""
    return product(rows, weight, bias)


@_opaque.register_fake
def _(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0])


def outer(grad: Tensor, rows: Tensor) -> Tensor:
    """Return `grad [R, N]^T @ rows [R, K]`, the gradient `[N, K]` of a weight matrix."""
    if _is_slow(grad):
        return outer(grad.float(), rows.float()).to(grad.dtype)
    if grad.device.type != "cpu" or HAS_FAST_MKL:
        return grad.t() @ rows
    if grad.shape[1] <= rows.shape[1]:
        return product(grad.t(), rows.t())
    return product(rows.t(), grad.t()).t()


class Products(Protocol):
    """The three matrix products of a linear layer with weight `[N, K]`, without autograd.

    They are the output, the gradient of the input, and the gradient of the weight.
    """

    def forward(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `rows [R, K] @ weight^T + bias [N]`."""
        ...

    def for_rows(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the input rows, `grad [R, N] @ weight`.

        `grad` is that of the output.
        """
        ...

    def for_weight(self, grad: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the gradient of a weight, `grad [R, N]^T @ rows [R, K]`.

        `dtype` is the weight's.
        """
        ...


class _FastProducts:
    def forward(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return accurate_product(rows, weight, bias)

    def for_rows(self, grad: Tensor, weight: Tensor) -> Tensor:
        return product(grad, weight.t())

    def for_weight(self, grad: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
        return outer(grad, rows)


FAST = _FastProducts()


class Linear(nn.Linear):
    """An `nn.Linear` layer that multiplies by `product`, with a gradient."""

    def forward(self, input: Tensor) -> Tensor:
        by_torch = input.dtype != torch.float32 and not _is_slow(input)
        if input.device.type != "cpu" or by_torch:
            return F.linear(input, self.weight, self.bias)
        rows = input.reshape(-1, self.in_features)
        return apply(rows, self.weight, self.bias).view(*input.shape[:-1], self.out_features)


def apply(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `rows [R, K] @ weight [N, K]^T + bias [N]`, with gradient."""
    if torch.is_autocast_enabled("cpu"):
        return F.linear(rows, weight, bias)
    result: Tensor = _Linear.apply(rows, weight, bias)
    return result


def use(model: nn.Module) -> None:
    """Make all `nn.Linear` layers of a model faster, in place: they become `Linear` layers."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        for_rows, for_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(rows if for_weight else None, weight if for_rows else None)
        return accurate_product(rows, weight, bias)

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
