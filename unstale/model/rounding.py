"""Stochastic rounding of float32 weights to bfloat16 or float16 (arXiv 2010.06192).

A number lies between two adjacent numbers of the narrower format. It is rounded up with a
probability that is its distance from the lower one, divided by the distance between the two. So the
expected result is the number itself, and an update smaller than that distance is not lost. A number
that the format can represent is not changed. A finite number below 65536 never becomes infinite.

The random bits are a function of the run's seed, the optimizer step, the name of the tensor and the
index in the whole tensor. They do not depend on the device or on how a tensor is divided among
ranks, and a resumed run draws the same bits. The kernels in `rounding.c` and `gpu_kernels` give the
same results as the code for torch.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from unstale.model.kernels import gpu_kernels, kernels

SOURCE = Path(__file__).with_name("rounding.c")

NARROW = (torch.bfloat16, torch.float16)
"""The dtypes to which weights can be rounded."""

CHUNK = 1 << 20
"""Number of weights that torch rounds at once. Each takes up to 50 bytes of memory meanwhile."""

BLOCK = 1 << 32
"""Number of elements of a tensor whose random bits have the same keys. The index that is hashed
with the keys has 32 bits.
"""

_INFINITE = 0x7F800000
_NOT_NEGATIVE = 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class Draw:
    """The numbers from which one rounding of all weights draws its random bits."""

    seed: int
    step: int
    """The number of the optimizer step after which the weights are rounded."""

    def keys(self, name: str, block: int) -> tuple[int, int]:
        """Return the two 32-bit keys of the random bits for one block of a tensor.

        `name` is the tensor's name. `block` is the number of the block of `BLOCK` elements, from 0.
        """
        text = f"{self.seed} {self.step} {block} {name}".encode()
        digest = hashlib.blake2b(text, digest_size=8).digest()
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


@torch.no_grad()
def round_stochastically(
    weights: Tensor, out: Tensor, draw: Draw, *, name: str, first: int = 0
) -> None:
    """Round float32 `weights` into `out`, a bfloat16 or float16 tensor of the same shape.

    Both are contiguous and on one device. `weights` may be a part of the tensor `name`, whose
    element `first` is the part's first. Raises ValueError for other dtypes and for tensors that are
    not contiguous.
    """
    fits = weights.shape == out.shape and weights.is_contiguous() and out.is_contiguous()
    if not fits or weights.dtype != torch.float32 or out.dtype not in NARROW:
        raise ValueError(
            f"contiguous float32 weights of one shape are rounded to bfloat16 or float16, not "
            f"{weights.dtype} {tuple(weights.shape)} to {out.dtype} {tuple(out.shape)}"
        )
    wide, narrow = weights.detach().view(-1), out.detach().view(-1)
    start = 0
    while start < len(wide):
        block, index = divmod(first + start, BLOCK)
        stop = min(len(wide), start + BLOCK - index)
        _round_block(wide[start:stop], narrow[start:stop], index, draw.keys(name, block))
        start = stop


def _round_block(wide: Tensor, narrow: Tensor, first: int, keys: tuple[int, int]) -> None:
    """Round the elements of one block of a tensor stochastically from `wide` into `narrow`.

    `first` is the index of the first element in its block. `keys` are those of the random bits.
    """
    is_half = narrow.dtype == torch.float16
    if wide.is_cuda and (gpu := gpu_kernels()) is not None:
        gpu.round_weights(wide, narrow, len(wide), first, *keys, is_half)
    elif wide.device.type == "cpu" and (native := kernels(SOURCE)) is not None:
        native.round_weights(wide, narrow, len(wide), first, *keys, int(is_half))
    else:
        for start in range(0, len(wide), CHUNK):
            part = wide[start : start + CHUNK]
            bits = _random_bits(first + start, len(part), keys, part.device)
            narrow[start : start + CHUNK] = _round(part, bits, is_half=is_half)


def _random_bits(first: int, count: int, keys: tuple[int, int], device: torch.device) -> Tensor:
    """Return 32 random bits for each index from `first` to `first + count - 1`, `[count]` int32."""
    low, high = keys
    x = _words(torch.arange(first, first + count, device=device) + low)
    x = (x ^ _right(x, 17)) * _word(0xED5AD4BB)
    x = (x ^ _right(x, 11)) + _word(high)
    x = (x ^ _right(x, 16)) * _word(0xAC4C1B51)
    x = (x ^ _right(x, 15)) * _word(0x31848BAB)
    return x ^ _right(x, 14)


def _round(weights: Tensor, bits: Tensor, *, is_half: bool) -> Tensor:
    """Return contiguous float32 numbers `[n]`, rounded by random bits `[n]` with torch."""
    words = weights.view(torch.int32)
    size = words & _NOT_NEGATIVE
    if is_half:
        narrow = _to_float16(size, bits)
        dtype = torch.float16
    else:
        finite = size + _right(bits, 16)
        finite = torch.where((finite & _INFINITE) == _INFINITE, size, finite)
        narrow = _right(torch.where(size < _INFINITE, finite, size), 16)
        narrow = torch.where(size > _INFINITE, narrow | 0x40, narrow)
        dtype = torch.bfloat16
    return (narrow | (_right(words, 16) & 0x8000)).to(torch.int16).view(dtype)


def _to_float16(size: Tensor, bits: Tensor) -> Tensor:
    """Round absolute values, given as float32 bits, to float16. Return the bits."""
    normal = (_right(size + _right(bits, 19) - (112 << 23), 13)).clamp(max=0x7BFF)
    # Below 2^-14 all neighbours are multiples of 2^-24.
    is_small = size < 0x38800000
    kept = torch.where(is_small & (size >= 0x800000), size, 0)
    value = kept.view(torch.float32) * 2.0**24
    whole = value.to(torch.int32)
    raised = _right(bits, 8).float() * 2.0**-24 < value - whole
    result = torch.where(is_small, whole + raised, normal)
    result = torch.where(size >= 0x47800000, 0x7C00, result)  # 65536 and more
    return torch.where(size > _INFINITE, 0x7E00, result)


def _right(words: Tensor, places: int) -> Tensor:
    return (words >> places) & ((1 << (32 - places)) - 1)


def _words(numbers: Tensor) -> Tensor:
    return numbers.to(torch.int32)


def _word(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number
