"""AdamW with one byte for each of an optimizer's two moments."""

import math
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unstale.model.sharding import local, zero_rows

BLOCK = 256
"""Number of moments that share a scale factor."""
MIN_ROW = 64
"""Rows of a weight with fewer numbers keep float32 moments. Such rows are a small share of a
model.
"""
_PART = 1 << 24
"""Number of weights that are updated at a time. It limits the memory for moments in float32."""
_EXPONENTS = 7
_MOMENTS = {"mean": True, "deviation": False}
"""The two moments of a weight. The value is True if numbers of this moment may be negative."""


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with 8-bit moments in blocks, each with a float32 scale (arXiv 2110.02861).

    The second moment is stored as its root, because the square of a small number would be rounded
    to 0. A row is one index of a weight's first dimension. A block never crosses a row. So ranks
    that divide a weight by rows have the same blocks as a single process. Weights with short rows,
    such as those of norms, have float32 moments.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights that have a gradient. `closure` must be None."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight]
                    if not state:
                        state.update(_new_state(weight))
                    state["step"] += 1
                    _update(weight, state, group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load a state, and restore 8-bit codes that torch has cast to the dtype of the weights."""
        super().__setstate__(state)
        for values in self.state.values():
            for name in _MOMENTS:
                if _scale(name) in values:
                    values[name] = values[name].to(torch.uint8)


class _Moment(NamedTuple):
    """This rank's part of one moment of a weight: the mean, or the root of the variance."""

    values: Tensor
    """8-bit codes, or float32 numbers if there is no `scale`."""
    scale: Tensor | None
    levels: Tensor

    def read(self, rows: slice) -> Tensor:
        """Return the moments of some rows of the weight as float32, `[rows, N]`."""
        if self.scale is None:
            return self.values[rows].flatten(1)
        codes = self.values[rows].flatten(1)
        width = codes.shape[1]
        blocks = _in_blocks(self.levels[codes.int()])
        return (blocks * self.scale[rows][..., None]).flatten(1)[:, :width]

    def write(self, rows: slice, numbers: Tensor) -> None:
        """Store the moments of some rows, each rounded to the nearest of 256 levels."""
        target = self.values[rows]
        if self.scale is None:
            target.copy_(numbers.view_as(target))
            return
        blocks = _in_blocks(numbers)
        scale = blocks.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny)
        middles = (self.levels[1:] + self.levels[:-1]) / 2
        codes = torch.bucketize(blocks / scale[..., None], middles, out_int32=True, right=True)
        target.copy_(codes.flatten(1)[:, : numbers.shape[1]].view_as(target))
        self.scale[rows] = scale


def _in_blocks(rows: Tensor) -> Tensor:
    """Return rows `[R, N]` as blocks `[R, blocks, BLOCK]`.

    The last block of a row is padded with zeros.
    """
    missing = -rows.shape[1] % BLOCK
    return torch.nn.functional.pad(rows, (0, missing)).unflatten(1, (-1, BLOCK))


@cache
def _levels(device: torch.device, *, signed: bool) -> Tensor:
    """Return the 256 numbers that an 8-bit code can stand for, between -1 or 0 and 1.

    They are 0, 1 and numbers in each of 7 powers of ten. A larger power has more of them.
    """
    found = [torch.tensor([0.0, 1.0])]
    for exponent in range(_EXPONENTS):
        bounds = torch.linspace(0.1, 1, 2 ** (exponent + (not signed)) + 1)
        sizes = 10.0 ** (exponent - _EXPONENTS + 1) * (bounds[1:] + bounds[:-1]) / 2
        found += [sizes, -sizes] if signed else [sizes]
    return torch.cat(found).sort().values.to(device)


def _scale(moment: str) -> str:
    return f"{moment}_scale"


def _new_state(weight: Tensor) -> dict[str, Tensor]:
    state = {"step": torch.tensor(0.0)}
    row = math.prod(weight.shape[1:]) if weight.dim() > 1 else 0
    for name, signed in _MOMENTS.items():
        if row < MIN_ROW:
            state[name] = torch.zeros_like(weight, dtype=torch.float32)
            continue
        zero = int((_levels(weight.device, signed=signed) == 0).nonzero())
        state[name] = torch.full_like(weight, zero, dtype=torch.uint8)
        state[_scale(name)] = zero_rows(weight, math.ceil(row / BLOCK))
    return state


def _update(weight: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    """Update this rank's part of a weight, some rows at a time."""
    assert weight.grad is not None
    (beta1, beta2), count = group["betas"], float(state["step"])
    numbers, gradient = local(weight.detach()), local(weight.grad)
    if not numbers.numel():
        return
    if numbers.dim() < 2:
        numbers, gradient = numbers[None], gradient[None]
    mean, deviation = (_moment(state, name, like=numbers) for name in _MOMENTS)
    step = max(1, _PART // numbers[0].numel())
    for first in range(0, len(numbers), step):
        rows = slice(first, first + step)
        some = gradient[rows].flatten(1).float()
        m = mean.read(rows).lerp(some, 1 - beta1)
        d = deviation.read(rows).square().mul_(beta2).addcmul_(some, some, value=1 - beta2).sqrt_()
        mean.write(rows, m)
        deviation.write(rows, d)
        d.div_(math.sqrt(1 - beta2**count)).add_(group["eps"])
        change = m.div_(d).mul_(group["lr"] / (1 - beta1**count))
        part = numbers[rows]
        part.mul_(1 - group["lr"] * group["weight_decay"]).sub_(change.view_as(part))


def _moment(state: dict[str, Tensor], name: str, *, like: Tensor) -> _Moment:
    scale = state.get(_scale(name))
    return _Moment(
        local(state[name]).view(like.shape),
        None if scale is None else local(scale),
        _levels(like.device, signed=_MOMENTS[name]),
    )
