"""Simulate FP8, INT8, INT4 and FP4 by rounding weights and activations.

A format has few values. A block of numbers shares one scale, which maps the block's largest number
to the largest value of the format. Each number is rounded to the nearest value times the scale, and
then to the usual precision, in which products are computed. So nothing becomes faster.

An engine rounds the weights that it loads and, in `fp8` and `int8`, the input of each layer. The
trainer can do the same (arXiv 2601.14243, Jet-RL). A weight then gets the gradient of its rounded
copy (straight-through, arXiv 1308.3432).
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unstale.model import linear

_IN_LAYER = re.compile(r"\.\d+\.")
_ROUTER = re.compile(r"(^|[._])(gate|router)\.weight$")
_STACKED = (".gate_up_proj", ".down_proj")
"""Ends of the names of weights that have all experts of a layer in one tensor `[experts, out,
in]`.
"""


@dataclass(frozen=True, slots=True)
class Format:
    """A number format with few values, and the blocks of numbers that share a scale."""

    largest: float
    """The largest value of the format."""
    nearest: Callable[[Tensor], Tensor]
    """A function that rounds float32 numbers, of at most `largest`, to values of the format."""
    weight_block: tuple[int, int]
    """Number of rows and of columns of a weight `[out, in]` that share a scale. 0 means all
    columns.
    """
    activation_block: int | None
    """Number of successive features of a token that share a scale. 0 means all features. None means
    that activations are not rounded.
    """
    stored: torch.dtype
    """The one-byte dtype in which values of the format are stored."""
    scales_of: Callable[[Tensor, float], Tensor] = torch.div
    """A function that returns the scales of blocks. Its arguments are the largest absolute number
    of each block, `[..., R, 1, C, 1]`, and `largest`.
    """

    def weight(self, weight: Tensor) -> Tensor:
        """Return a weight `[..., out, in]` rounded to this format, in the same dtype."""
        return self._rounded(weight, *self.weight_block)

    def activations(self, rows: Tensor) -> Tensor:
        """Return a layer's input `[..., in]` rounded to this format, in the same dtype."""
        if self.activation_block is None:
            return rows
        flat = rows.reshape(-1, rows.shape[-1])
        return self._rounded(flat, 1, self.activation_block).view(rows.shape)

    def pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return a weight rounded to this format, as stored values and scales.

        The values are `[..., out, in]` int8 with the bytes of `stored`. The scales are float32, one
        for each block: `[..., out / rows, in / columns]`.
        """
        values, scales = self._divided(weight, *self.weight_block)
        codes = _joined(values, weight.shape).to(self.stored)
        return codes.view(torch.int8), scales.squeeze(-1).squeeze(-2)

    def unpack(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rounded weight from the results of `pack`. It equals that of `weight` bit for
        bit.
        """
        values = _blocks(codes.view(self.stored).float(), *self.weight_block)
        return _joined(values * scales[..., :, None, :, None], codes.shape).to(dtype)

    def _rounded(self, values: Tensor, rows: int, columns: int) -> Tensor:
        """Round `[..., R, C]` numbers in blocks of `rows` times `columns`."""
        if not values.numel():
            return values
        rounded, scales = self._divided(values, rows, columns)
        return _joined(rounded * scales, values.shape).to(values.dtype)

    def _divided(self, numbers: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Return numbers in blocks, rounded to values of the format, and the scale of each block.

        The blocks are `[..., R / rows, rows, C / columns, columns]`.
        """
        blocks = _blocks(numbers.float(), rows, columns)
        scales = self.scales_of(blocks.abs().amax((-3, -1), keepdim=True), self.largest)
        scales = torch.where(scales > 0, scales, 1.0)
        return self.nearest(blocks / scales), scales


def _blocks(numbers: Tensor, rows: int, columns: int) -> Tensor:
    """Divide `[..., R, C]` numbers into blocks. The last blocks are padded with zeros."""
    height, width = numbers.shape[-2:]
    rows = min(rows, height)
    columns = min(columns or width, width)
    wide = F.pad(numbers, (0, -width % columns, 0, -height % rows))
    return wide.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))


def _joined(blocks: Tensor, shape: torch.Size) -> Tensor:
    """Undo `_blocks`: return numbers of a shape `[..., R, C]`, without the padding."""
    return blocks.flatten(-4, -3).flatten(-2)[..., : shape[-2], : shape[-1]]


def _nearest_e4m3(values: Tensor) -> Tensor:
    return values.to(torch.float8_e4m3fn).float()


def _nearest_integer(values: Tensor) -> Tensor:
    return torch.round(values) + 0.0  # integers have no -0.0


def _nearest_e2m1(values: Tensor) -> Tensor:
    """Round numbers to 0, 0.5, 1, 1.5, 2, 3, 4, 6 and negatives, ties to the even mantissa."""
    size = values.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (torch.round(values / step) * step).clamp(-6, 6) + 0.0


def _nvfp4_scales(sizes: Tensor, largest: float) -> Tensor:
    """Return scales in e4m3, multiplied by one float32 scale of the whole matrix."""
    top = sizes.amax((-4, -2), keepdim=True) / (largest * _LARGEST_E4M3)
    shares = sizes / (largest * torch.where(top > 0, top, 1.0))
    return torch.where(sizes > 0, _nearest_e4m3(shares).clamp(min=_SMALLEST_E4M3) * top, 0.0)


def _mxfp4_scales(sizes: Tensor, largest: float) -> Tensor:
    """Return scales that are powers of 2: the largest number of a block gets the exponent of 4."""
    exponents = torch.frexp(sizes).exponent - math.frexp(largest)[1]
    return torch.where(sizes > 0, torch.ldexp(torch.ones_like(sizes), exponents), 0.0)


_LARGEST_E4M3 = 448.0
_SMALLEST_E4M3 = 2.0**-9
FORMATS = {
    "fp8": Format(448.0, _nearest_e4m3, (128, 128), 128, torch.float8_e4m3fn),
    "int8": Format(127.0, _nearest_integer, (1, 0), 0, torch.int8),
    "int4": Format(7.0, _nearest_integer, (1, 32), None, torch.int8),
    "nvfp4": Format(6.0, _nearest_e2m1, (1, 16), None, torch.float8_e4m3fn, _nvfp4_scales),
    "mxfp4": Format(6.0, _nearest_e2m1, (1, 32), None, torch.float8_e4m3fn, _mxfp4_scales),
}
"""The formats, by their name in `engine.quantise`. `fp8` is e4m3 with the blocks of DeepSeek-V3
(arXiv 2412.19437). `int8` has one scale for each output row of a weight and for each token, as
LLM.int8() (arXiv 2208.07339). `int4` rounds only weights, in groups of 32, as GPTQ and AWQ do.
`nvfp4` and `mxfp4` round only weights, to e2m1. The scales of `nvfp4` are e4m3 for 16 weights, with
a float32 scale of the matrix. Those of `mxfp4` are powers of 2 for 32 weights (OCP MX 1.0).
"""


def is_quantised(name: str, weight: Tensor) -> bool:
    """Return True if number formats round this weight: the matrix of a linear layer, or of experts.

    Routers, embeddings and the output head are not rounded.

    >>> is_quantised("model.layers.0.mlp.up_proj.weight", torch.ones(2, 2))
    True
    >>> is_quantised("model.layers.0.mlp.gate.weight", torch.ones(2, 2))
    False
    >>> is_quantised("lm_head.weight", torch.ones(2, 2))
    False
    """
    is_matrix = weight.dim() == 2 and name.endswith(".weight") and not _ROUTER.search(name)
    are_experts = weight.dim() == 3 and name.endswith(_STACKED)
    return (is_matrix or are_experts) and bool(_IN_LAYER.search(name))


def quantised(name: str, weight: Tensor, kind: str) -> Tensor:
    """Return a weight rounded to the number format `kind`, a name in `FORMATS` or "none".

    With "none", and for a weight that is not rounded (`is_quantised` False), return it unchanged.
    """
    if kind == "none" or not is_quantised(name, weight):
        return weight
    return FORMATS[kind].weight(weight)


def round_activations(model: nn.Module, kind: str) -> None:
    """Make a model round the inputs of its linear layers to the number format `kind`, in place.

    Do nothing for "none", and for a format that rounds only weights. Use this only for models that
    compute no gradient.
    """
    if kind == "none" or FORMATS[kind].activation_block is None:
        return
    for module, _ in _quantised_modules(model):
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(partial(_round_input, kind))


def quantise_passes(model: nn.Module, kind: str, published: torch.dtype) -> None:
    """Make the forward passes of a model round its weights and activations, in place.

    `kind` is the number format. With "none", do nothing. The parameters keep their values, and get
    the gradient of the rounded weights. `published` is the dtype in which an engine receives the
    weights. They are rounded to it first, so that trainer and engine round the same numbers.
    """
    if kind == "none":
        return
    for module, names in _quantised_modules(model):
        module.__class__ = _quantised_class(type(module), names, kind, published)


def _quantised_modules(model: nn.Module) -> list[tuple[nn.Module, tuple[str, ...]]]:
    """Return the modules that have weights to round, with the names of these weights."""
    modules = []
    for path, module in model.named_modules():
        names = tuple(
            name
            for name, weight in module.named_parameters(recurse=False)
            if is_quantised(f"{path}.{name}", weight)
        )
        if names:
            modules.append((module, names))
    return modules


def _quantised_class(
    base: type[nn.Module], names: tuple[str, ...], kind: str, published: torch.dtype
) -> type[nn.Module]:
    """Return a subclass of `base` that computes with rounded values of the parameters `names`.

    Optimizers and checkpoints still find the parameters themselves, in `_parameters`.
    """
    if issubclass(base, nn.Linear):

        def forward(self: nn.Linear, input: Tensor) -> Tensor:
            rows = input.reshape(-1, self.in_features)
            product: Tensor = _RoundedLinear.apply(rows, self.weight, self.bias, kind, published)
            return product.view(*input.shape[:-1], self.out_features)

        return type(base.__name__, (base,), {"forward": forward})

    def rounded(name: str) -> property:
        return property(
            lambda self: _StraightThrough.apply(self._parameters[name], kind, published),
            lambda self, value: nn.Module.__setattr__(self, name, value),
        )

    return type(base.__name__, (base,), {name: rounded(name) for name in names})


def _rounded_weight(weight: Tensor, kind: str, published: torch.dtype) -> Tensor:
    return FORMATS[kind].weight(weight.to(published)).to(weight.dtype)


class _StraightThrough(torch.autograd.Function):
    """Rounding of a weight. The weight gets the gradient of the rounded weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, kind: str, published: torch.dtype) -> Tensor:
        return _rounded_weight(weight, kind, published)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None


class _RoundedLinear(torch.autograd.Function):
    """A linear layer with rounded weight and input. Both are rounded again in the backward pass."""

    @staticmethod
    def forward(  # noqa: PLR0913 - the layer and its number formats
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kind: str,
        published: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.kind, ctx.published = kind, published
        rounded = _rounded_weight(weight, kind, published)
        return linear.product(FORMATS[kind].activations(rows), rounded, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        for_rows, for_weight, for_bias, *_ = ctx.needs_input_grad
        grad = grad.contiguous()
        of_rows = of_weight = None
        if for_rows:
            of_rows = linear.product(grad, _rounded_weight(weight, ctx.kind, ctx.published).t())
        if for_weight:
            of_weight = linear.outer(grad, FORMATS[ctx.kind].activations(rows))
        return of_rows, of_weight, grad.sum(0) if for_bias else None, None, None


def _round_input(kind: str, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (FORMATS[kind].activations(inputs[0]), *inputs[1:])
