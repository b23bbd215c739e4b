"""Products and log-probabilities that have the same bits in the engine and in the trainer, on CPUs.

The kernels in `rowwise.c` compute a row of a result only from one row of the input, with sums in a
fixed order. So a value does not depend on the other rows of a call or on the number of threads.
With a bfloat16 weight the input is rounded to bfloat16. Sums and results are always float32.
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from unstale.config import ConfigError
from unstale.model import linear
from unstale.model.kernels import Kernels
from unstale.native import NotCompiled

SOURCE = Path(__file__).with_name("rowwise.c")

DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes of weights that `pack` accepts."""


class Panels(NamedTuple):
    """A weight `[columns, depth]` in the layout that `rowwise.c` reads. `pack` creates it."""

    values: Tensor
    columns: int
    depth: int
    dtype: torch.dtype
    """The dtype of the original weight. `values` may be float32 even if this is bfloat16."""


@cache
def _kernels() -> Kernels:
    """Return the compiled functions of `rowwise.c`. Raises ConfigError if it cannot be compiled."""
    try:
        return Kernels(SOURCE)
    except NotCompiled as error:
        raise ConfigError(
            f"engine.bitwise must be false, because {SOURCE.name} does not compile: {error}"
        ) from error


@cache
def _layout() -> tuple[int, bool]:
    """Return the number of columns in a panel, and True if panels can store bfloat16."""
    library = _kernels().library
    return int(library.panel()), bool(library.has_pairs())


def require_kernels() -> None:
    """Raise ConfigError if `rowwise.c` cannot be compiled."""
    _kernels()


def pack(weight: Tensor) -> Panels:
    """Return a copy of a weight `[columns, depth]` in the layout for `product`.

    Raises ValueError unless the weight is on the CPU, its dtype is in `DTYPES` and `depth` is even.
    """
    columns, depth = weight.shape
    if weight.dtype not in DTYPES or depth % 2 or weight.device.type != "cpu":
        raise ValueError(f"no panels of a {weight.dtype} weight {[*weight.shape]}")
    width, has_pairs = _layout()
    is_wide = weight.dtype == torch.float32
    stored = weight.dtype if is_wide or has_pairs else torch.float32
    values = torch.empty(-(-columns // width) * width * depth, dtype=stored)
    write = _kernels().pack if is_wide else _kernels().pack_bfloat16
    write(weight.detach().contiguous(), values, columns, depth)
    return Panels(values, columns, depth, weight.dtype)


def product(rows: Tensor, panels: Panels, bias: Tensor | None = None) -> Tensor:
    """Return `rows [R, depth] @ weight^T + bias`, `[R, columns]`, for a weight from `pack`.

    All tensors are float32, and `bias` is `[columns]`.
    """
    rows = rows.contiguous()
    out = torch.empty(len(rows), panels.columns)
    sizes = (len(rows), panels.columns, panels.depth)
    if panels.dtype == torch.float32:
        _kernels().product(rows, panels.values, bias, out, *sizes)
    else:
        memory = torch.empty_like(rows)
        _kernels().product_bfloat16(rows, panels.values, bias, out, memory, *sizes)
    return out


def score(
    logits: Tensor, targets: Tensor, temperature: Tensor, *, with_entropy: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probability of each target token in the softmax of `logits` / `temperature`.

    `logits` is `[R, V]` float32, `targets` `[R]` int64, and `temperature` `[R]` float32, above 0.
    Return three tensors, `[R]` float32: the log-probabilities, the logarithms of the softmax's
    denominators, and the entropies, which are 0 without `with_entropy`.
    """
    logp, total = torch.empty(2, len(logits)).unbind()
    entropy = torch.zeros(len(logits))
    wanted = entropy if with_entropy else None
    inputs = (logits.contiguous(), temperature.contiguous(), targets.contiguous())
    _kernels().score(*inputs, logp, total, wanted, *logits.shape)
    return logp, total, entropy


class _RowwiseProducts:
    """The products of a linear layer, with `rowwise.c` in the forward pass.

    Gradients are ordinary products in the dtype of the weight. The layer's inputs and their
    gradients are float32.
    """

    def forward(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return product(rows, pack(weight), bias)

    def for_rows(self, grad: Tensor, weight: Tensor) -> Tensor:
        return linear.product(grad.to(weight.dtype), weight.t()).float()

    def for_weight(self, grad: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
        return linear.outer(grad.to(dtype), rows.to(dtype))


ROWWISE = _RowwiseProducts()
