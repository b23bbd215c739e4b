"""The words that differ between two tensors on the CPU, and sums over words.

Compiled code (`changes.c`) finds them in one pass. Without a C compiler NumPy does, several times
slower, after a warning. Both return the same bytes.
"""

import ctypes
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unstale.native import NotCompiled, compile_library

SOURCE = Path(__file__).with_name("changes.c")
ESCAPE = 255
"""A gap's byte of this value means that 255 is added to the number in the next byte."""

MAX_WORDS_AT_ONCE = 1 << 24
"""Largest number of words of a sum that are mixed at once without compiled code."""
_STEP = 0x9E3779B97F4A7C15
"""The factor of a word's place."""
_MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""Shifts and factors of SplitMix64."""

Bytes = npt.NDArray[np.uint8]
Gaps = TypeVar("Gaps", npt.NDArray[Any], Tensor)


@dataclass(frozen=True, slots=True)
class Changes:
    """The changed words of a tensor: their number, and unless these are too many, what changed."""

    count: int
    gaps: Bytes
    """The number of unchanged words before each changed word, in bytes with `ESCAPE`."""
    planes: tuple[Bytes, ...]
    """The first bytes of the XOR of all changed words, then their second bytes, and so on."""


def find_changes(before: Tensor, after: Tensor | None, limit: int) -> Changes:
    """Return the words that differ between two contiguous integer tensors `[n]`.

    Without `after`, `before` is their XOR. If more than `limit` words differ, only their number is
    returned. Raises ValueError for other tensors.
    """
    _check_words(before, after)
    library = _library()
    if library is None:
        return _by_numpy(_difference(before, after), limit)
    width = before.element_size()
    gaps = np.empty(limit + len(before) // ESCAPE + 1, np.uint8)
    planes = np.empty((width, limit), np.uint8)
    num_gaps = ctypes.c_int64()
    count = getattr(library, f"changes_{8 * width}")(
        before.data_ptr(),
        after.data_ptr() if after is not None else None,
        len(before),
        limit,
        gaps.ctypes.data,
        planes.ctypes.data,
        ctypes.byref(num_gaps),
    )
    if count > limit:
        return Changes(count, gaps[:0], ())
    return Changes(count, gaps[: num_gaps.value], tuple(plane[:count] for plane in planes))


def split_planes(before: Tensor, after: Tensor | None) -> tuple[Bytes, ...]:
    """Return the byte planes of the XOR of all words of two contiguous integer tensors `[n]`.

    Without `after`, `before` is their XOR. Raises ValueError for other tensors.
    """
    _check_words(before, after)
    library = _library()
    if library is None:
        return _planes(_difference(before, after))
    width = before.element_size()
    planes = np.empty((width, len(before)), np.uint8)
    getattr(library, f"split_{8 * width}")(
        before.data_ptr(),
        after.data_ptr() if after is not None else None,
        len(before),
        planes.ctypes.data,
    )
    return tuple(planes)


def find_changes_on_device(difference: Tensor, limit: int) -> Changes:
    """Return what `find_changes` returns for the XOR `[n]` of two tensors on any device.

    Gaps and planes are made on that device, so only these bytes are copied to the CPU.
    """
    count = int(torch.count_nonzero(difference))
    if not 0 < count <= limit:
        return Changes(count, np.empty(0, np.uint8), ())
    where = difference.nonzero().squeeze(1)
    changed = difference[where]
    planes = [(changed >> 8 * i).to(torch.uint8) for i in range(difference.element_size())]
    gaps, *parts = (each.cpu().numpy() for each in (_gaps_of(where), *planes))
    return Changes(count, gaps, tuple(parts))


def _gaps_of(where: Tensor) -> Tensor:
    """Return what `encode_gaps` returns, on the device of the positions."""
    gaps = torch.diff(where, prepend=where.new_tensor([-1])) - 1
    escapes = gaps // ESCAPE
    ends = (escapes + 1).cumsum(0) - 1
    coded = torch.full((int(ends[-1]) + 1,), ESCAPE, dtype=torch.uint8, device=where.device)
    coded[ends] = (gaps - escapes * ESCAPE).to(torch.uint8)
    return coded


def positions_of(gaps: Gaps, changed: int, words: int) -> Gaps:
    """Return the positions `[changed]` of changed words, from what `encode_gaps` returned.

    The gaps, `[n]` uint8, are of NumPy or torch, and so are the positions, on the same device.
    NumPy takes down to a third of torch's time on a CPU. Raises ValueError if they are not
    positions of that many words.
    """
    if isinstance(gaps, Tensor):
        skipped = gaps.cumsum(0, dtype=torch.int64)
        order = torch.arange(changed, device=gaps.device)
    else:
        skipped = gaps.cumsum(dtype=np.int64)
        order = np.arange(changed)
    if len(gaps) > changed:
        skipped = skipped[gaps != ESCAPE]
    if len(skipped) != changed:
        raise ValueError(f"{len(skipped)} positions for {changed} changed words")
    where = skipped + order
    if len(where) and where[-1] >= words:
        raise ValueError(f"position {where[-1]} is outside a tensor of {words} words")
    return where


def mixed_sum(lanes: Tensor, place: int) -> int:
    """Return the sum of 64-bit words `[n]`, each mixed with its place, as a number below 2^64.

    `place` is that of the first word. A word is mixed by the last steps of SplitMix64 (Steele, Lea
    and Flood, 2014), after the exclusive or with a multiple of its place.
    """
    library = _library() if lanes.is_cpu else None
    if library is not None:
        total: int = library.sum_words(lanes.data_ptr(), len(lanes), place)
        return total
    total = 0
    for first in range(0, len(lanes), MAX_WORDS_AT_ONCE):
        part = lanes[first : first + MAX_WORDS_AT_ONCE]
        begin = place + first + 1
        mixed = torch.arange(begin, begin + len(part), device=lanes.device).mul_(_signed(_STEP))
        mixed ^= part
        for shift, factor in _MIXING:
            shifted = mixed >> shift
            mixed ^= shifted.bitwise_and_((1 << 64 - shift) - 1)  # `>>` repeats the sign
            mixed *= _signed(factor)
        total += int(mixed.sum())
    return total % 2**64


def _signed(number: int) -> int:
    """Return the number that has the same 64 bits with a sign."""
    return number - (number >> 63 << 64)


def require_alike(before: Tensor, after: Tensor) -> None:
    """Raise ValueError unless two tensors have the same shape and dtype."""
    if before.shape != after.shape or before.dtype != after.dtype:
        raise ValueError(
            f"the versions of a tensor differ in shape or dtype: {_described(before)} before, "
            f"{_described(after)} after"
        )


def _check_words(before: Tensor, after: Tensor | None) -> None:
    """Raise ValueError unless compiled code can read the tensors by their addresses."""
    if after is not None:
        require_alike(before, after)
    for each in (before,) if after is None else (before, after):
        is_integer = not (each.is_floating_point() or each.is_complex())
        if not (is_integer and each.is_cpu and each.dim() == 1 and each.is_contiguous()):
            layout = "" if each.is_contiguous() else "non-contiguous "
            raise ValueError(
                f"differences need contiguous integer tensors [n] on the CPU, got a {layout}tensor "
                f"{_described(each)} on {each.device}"
            )


def _described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype}"


@cache
def _library() -> ctypes.CDLL | None:
    """Return the compiled functions. Without a compiler, warn and return None."""
    try:
        library = compile_library(SOURCE)
    except NotCompiled as error:
        warnings.warn(
            "differences of weights are found by NumPy, several times slower, because "
            f"{SOURCE.name} does not compile: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.sum_words.argtypes = [pointer, number, number]
    library.sum_words.restype = ctypes.c_uint64
    for bits in (8, 16, 32, 64):
        changes = getattr(library, f"changes_{bits}")
        changes.argtypes = [pointer, pointer, number, number, pointer, pointer, pointer]
        changes.restype = number
        split = getattr(library, f"split_{bits}")
        split.argtypes = [pointer, pointer, number, pointer]
        split.restype = None
    return library


def _difference(before: Tensor, after: Tensor | None) -> npt.NDArray[Any]:
    return (before if after is None else before ^ after).numpy()


def _by_numpy(difference: npt.NDArray[Any], limit: int) -> Changes:
    # on booleans this is several times faster than on numbers
    where = (difference != 0).nonzero()[0]
    if len(where) > limit:
        return Changes(len(where), np.empty(0, np.uint8), ())
    return Changes(len(where), encode_gaps(where), _planes(difference[where]))


def encode_gaps(where: npt.NDArray[Any]) -> Bytes:
    """Return the number of unchanged words before each changed word, as bytes.

    A byte of 255 means that 255 is added to the number in the next byte.
    """
    gaps = np.diff(where, prepend=-1) - 1
    if not len(gaps) or gaps.max() < ESCAPE:
        return gaps.astype(np.uint8)
    escapes = gaps // ESCAPE
    ends = np.cumsum(escapes + 1) - 1
    coded = np.full(int(ends[-1]) + 1, ESCAPE, np.uint8)
    coded[ends] = gaps - escapes * ESCAPE
    return coded


def _planes(array: npt.NDArray[Any]) -> tuple[Bytes, ...]:
    """Return the first bytes of all words, then their second bytes, and so on."""
    bits = array.view(f"u{array.itemsize}")
    return tuple((bits >> 8 * i).astype(np.uint8) for i in range(array.itemsize))
