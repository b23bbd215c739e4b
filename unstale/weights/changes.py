"""Find the elements that differ between two versions of a tensor, and apply such differences.

Elements are compared as integers, called words. A gap is the number of unchanged words before a
changed one. A byte plane has one byte of each word: the first plane all lowest bytes, and so on.
Compiled code (`changes.c`) does the work in one pass. Without a C compiler, NumPy does it after a
warning, several times slower, with the same result.
"""

import ctypes
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unstale.native import NotCompiled, compile_library

SOURCE = Path(__file__).with_name("changes.c")
ESCAPE = 255
"""The byte that begins a gap of 255 or more. (A gap is the number of unchanged words before a
changed one.) A smaller gap is one byte. Each byte of 255 means that 255 is added to the number that
follows.
"""

MAX_SUM_WORDS = 1 << 24
"""Largest number of words that `mixed_sum` mixes at once. Mixing takes memory for two copies."""
_STEP = 0x9E3779B97F4A7C15
"""The factor of a word's position in `mixed_sum`, from SplitMix64."""
_MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""Shifts and factors of the generator SplitMix64, for mixing words in `mixed_sum`."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Changes:
    """The changed words of a tensor: their number, and, if they are few, their positions and XOR.

    If there are more than the caller's limit, `gaps` and `planes` are empty.
    """

    count: int
    gaps: Bytes
    """The positions of the changed words, as bytes: for each of them, the number of unchanged words
    before it (its gap), in the format of `encode_gaps`.
    """
    planes: tuple[Bytes, ...]
    """The XOR of each changed word's old and new value, as byte planes: one array for each byte of
    a word, lowest byte first.
    """


def find_changes(before: Tensor, after: Tensor | None, limit: int) -> Changes:
    """Return the words that differ between two contiguous integer tensors `[n]`.

    If `after` is None, `before` is the XOR of both tensors. If more than `limit` words differ, only
    their number is returned. Raises ValueError unless the tensors are on the CPU, contiguous, and
    equal in shape and integer dtype.
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
    """Return the XOR of two contiguous integer tensors `[n]` as byte planes.

    A byte plane `[n]` has one byte of each element. The plane of the lowest bytes comes first. If
    `after` is None, `before` is the XOR itself. Raises ValueError as `find_changes` does.
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
    """Return the changed words of a tensor on any device, like `find_changes` on the CPU.

    `difference` `[n]` is the XOR of the tensor's two versions. The device computes the result, so
    only the positions and XOR of changed words are copied to the CPU.
    """
    count = int(torch.count_nonzero(difference))
    if not 0 < count <= limit:
        return Changes(count, np.empty(0, np.uint8), ())
    where = difference.nonzero().squeeze(1)
    gaps = _gaps_of(where).cpu().numpy()
    return Changes(count, gaps, tuple(_planes_from_device(difference[where])))


def _planes_from_device(changed: Tensor) -> list[Bytes]:
    """Return the byte planes of words `[n]`, lowest bytes first. The words' device splits them."""
    return [(changed >> 8 * i).to(torch.uint8).cpu().numpy() for i in range(changed.element_size())]


def find_all_on_device(
    difference: Tensor, sizes: Sequence[int], limits: Sequence[int]
) -> list[Changes]:
    """Return the changed words of each of several tensors on a device, such as a GPU.

    `difference` `[n]` has the XORs of all tensors, concatenated. `sizes` has the number of words of
    each tensor. `limits` has the largest number of changed words for which positions are returned,
    for each tensor. On a GPU, a few kernels process all tensors together.
    """
    count = int(torch.count_nonzero(difference))
    if not count or 3 * count > len(difference):  # many positions would take much memory
        parts = zip(difference.split([*sizes]), limits, strict=True)
        return [find_changes_on_device(part, limit) for part, limit in parts]
    where = difference.nonzero().squeeze(1)
    changed = difference[where]
    starts = torch.tensor([0, *sizes]).cumsum(0)
    first = torch.searchsorted(where, starts.to(where.device)).cpu()  # of each tensor's changes
    has_changes = first[1:] > first[:-1]
    before = torch.cat([where.new_tensor([-1]), where[:-1]])
    before[first[:-1][has_changes].to(where.device)] = starts[:-1][has_changes].to(where.device) - 1
    coded, ends = _coded(where - before - 1)
    ends = torch.cat([ends.new_zeros(1), ends])[first.to(where.device)]
    gaps = coded.cpu().numpy()
    planes = _planes_from_device(changed)
    found = []
    places = zip(pairwise(first.tolist()), pairwise(ends.tolist()), limits, strict=True)
    for (begin, end), (gaps_begin, gaps_end), limit in places:
        few = 0 < end - begin <= limit
        found.append(
            Changes(
                end - begin,
                gaps[gaps_begin:gaps_end] if few else gaps[:0],
                tuple(plane[begin:end] for plane in planes) if few else (),
            )
        )
    return found


def apply_changes(target: Tensor, found: Changes) -> None:
    """Apply changes to the words of a contiguous integer tensor `[n]` on the CPU, in place.

    Raises ValueError, before any word is changed, if a position is outside the tensor, or if the
    number of positions is not `found.count`.
    """
    _check_words(target, None)
    check_gaps(found.gaps, found.count, len(target))
    library = _library()
    if library is None:
        where = positions_of(found.gaps, found.count, len(target))
        target.numpy()[where] ^= words_of(found.planes)
        return
    call = getattr(library, f"apply_{8 * target.element_size()}")
    gaps, planes = _pointers([found.gaps]), _pointers(found.planes)
    call(gaps[0], len(found.gaps), planes, target.data_ptr())


def apply_planes(target: Tensor, planes: Sequence[Bytes]) -> None:
    """XOR a contiguous integer tensor `[n]` on the CPU, in place, with a difference in byte planes.

    `planes` must have one byte of every element, as the result of `split_planes` does.
    """
    _check_words(target, None)
    library = _library()
    if library is None:
        target ^= torch.from_numpy(words_of(planes))
        return
    call = getattr(library, f"apply_planes_{8 * target.element_size()}")
    call(_pointers(planes), len(target), target.data_ptr())


def merge_changes(first: Changes, second: Changes, words: int) -> Changes:
    """Combine two successive sets of changes of one tensor into a single set with the same effect.

    `words` is the number of words of the tensor. Raises ValueError if a changed position is outside
    it.
    """
    for found in (first, second):
        check_gaps(found.gaps, found.count, words)
    width, limit = len(first.planes), first.count + second.count
    library = _library()
    if library is None:
        return _merged_by_numpy(first, second, words)
    gaps = np.empty(limit + words // ESCAPE + 1, np.uint8)
    planes = np.empty((width, limit), np.uint8)
    num_gaps = ctypes.c_int64()
    count = getattr(library, f"merge_{8 * width}")(
        _pointers([first.gaps, second.gaps]),
        (ctypes.c_int64 * 2)(len(first.gaps), len(second.gaps)),
        _pointers([*first.planes, *second.planes]),
        limit,
        gaps.ctypes.data,
        planes.ctypes.data,
        ctypes.byref(num_gaps),
    )
    return Changes(count, gaps[: num_gaps.value], tuple(plane[:count] for plane in planes))


def _merged_by_numpy(first: Changes, second: Changes, words: int) -> Changes:
    both = (first, second)
    where = np.concatenate([positions_of(found.gaps, found.count, words) for found in both])
    bits = np.concatenate([words_of(found.planes) for found in both])
    order = np.argsort(where, kind="stable")
    where, begins = np.unique(where[order], return_index=True)
    bits = np.bitwise_xor.reduceat(bits[order], begins) if len(where) else bits
    return Changes(
        int(np.count_nonzero(bits)), encode_gaps(where[bits != 0]), _planes(bits[bits != 0])
    )


def _pointers(parts: Sequence[Bytes]) -> "ctypes.Array[ctypes.c_void_p]":
    """Return the addresses of byte arrays, for compiled code. The caller must keep the arrays."""
    for part in parts:
        if part.dtype != np.uint8 or not part.flags.c_contiguous:
            raise ValueError(
                f"bytes must be contiguous, got strides {part.strides} of {part.dtype}"
            )
    return (ctypes.c_void_p * len(parts))(*(part.ctypes.data for part in parts))


def apply_on_device(targets: Sequence[Tensor], changes: Sequence[Changes]) -> None:
    """Apply changes in place to the words of several integer tensors of one device and dtype.

    `changes` has one entry for each tensor. The tensors may have any memory layout. Raises
    ValueError, before any tensor is changed, if a position is outside its tensor.
    """
    like = targets[0]
    for target, found in zip(targets, changes, strict=True):
        check_gaps(found.gaps, found.count, target.numel())
    counts = torch.tensor([found.count for found in changes])
    sizes = torch.tensor([target.numel() for target in targets])
    skipped = torch.tensor([int(found.gaps.sum(dtype=np.int64)) for found in changes])
    # In the sum over the gaps of all tensors, a tensor's first word is not where it begins.
    moved = _starts(sizes) - _starts(skipped + counts)
    gaps = upload([found.gaps for found in changes], like)
    where = gaps.cumsum(0, dtype=torch.int64)
    if len(gaps) > int(counts.sum()):
        where = where[gaps != ESCAPE]
    where += torch.arange(len(where), device=like.device)
    where += torch.repeat_interleave(
        moved.to(like.device), counts.to(like.device), output_size=len(where)
    )
    width = like.element_size()
    planes = [upload([found.planes[i] for found in changes], like) for i in range(width)]
    bits = join_planes(planes, like.dtype)
    if len(targets) == 1 and like.is_contiguous():
        like.view(-1)[where] ^= bits
        return
    difference = torch.zeros(int(sizes.sum()), dtype=like.dtype, device=like.device)
    difference[where] = bits
    for target, part in zip(targets, difference.split(sizes.tolist()), strict=True):
        target ^= part.view(target.shape)


def _starts(sizes: Tensor) -> Tensor:
    """Return the offset at which each of several adjacent parts begins, given their sizes."""
    return sizes.cumsum(0) - sizes


def check_gaps(gaps: Bytes, changed: int, words: int) -> None:
    """Raise ValueError unless encoded gaps give `changed` positions, all below `words`.

    Gaps are encoded as in `encode_gaps`.
    """
    found = len(gaps) - int(np.count_nonzero(gaps == ESCAPE))
    if found != changed:
        raise ValueError(f"{found} positions for {changed} changed words")
    last = int(gaps.sum(dtype=np.int64)) + changed - 1
    if last >= words:
        raise ValueError(f"position {last} is outside a tensor of {words} words")


def join_planes(planes: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the words `[n]` that byte planes `[n]` (uint8) are made of, as a tensor of type
    `dtype`.

    The first plane has the lowest byte of each word.
    """
    bits = torch.zeros(len(planes[0]), dtype=dtype, device=planes[0].device)
    for i, plane in enumerate(planes):
        bits |= plane.to(dtype) << 8 * i
    return bits


def words_of(planes: Sequence[Bytes]) -> npt.NDArray[Any]:
    """Return the words `[n]` that byte planes `[n]` are made of, as an array of signed integers.

    The first plane has the lowest byte of each word.
    """
    bits = np.zeros(len(planes[0]), f"u{len(planes)}")
    for plane in reversed(planes):
        bits <<= 8 * (len(planes) > 1)
        bits |= plane
    return bits.view(f"i{len(planes)}")


def upload(parts: Sequence[Bytes], like: Tensor) -> Tensor:
    """Copy byte arrays to the device of `like`. Return them joined, as a uint8 tensor `[n]`."""
    return torch.from_numpy(np.concatenate(parts)).to(like.device)


def _gaps_of(where: Tensor) -> Tensor:
    """Return the encoded gaps (`encode_gaps`) of positions `[n]`, computed on their device."""
    return _coded(torch.diff(where, prepend=where.new_tensor([-1])) - 1)[0]


def _coded(gaps: Tensor) -> tuple[Tensor, Tensor]:
    """Return gaps in the format of `encode_gaps`, and the offset after the bytes of each gap."""
    escapes = gaps // ESCAPE
    ends = (escapes + 1).cumsum(0)
    coded = torch.full((int(ends[-1]),), ESCAPE, dtype=torch.uint8, device=gaps.device)
    coded[ends - 1] = (gaps - escapes * ESCAPE).to(torch.uint8)
    return coded, ends


def positions_of(gaps: Bytes, changed: int, words: int) -> npt.NDArray[np.int64]:
    """Return the positions `[changed]` of changed words from their encoded gaps (`encode_gaps`).

    `words` is the number of words of the tensor. Raises ValueError if a position is outside it.
    """
    check_gaps(gaps, changed, words)
    skipped = gaps.cumsum(dtype=np.int64)
    if len(gaps) > changed:
        skipped = skipped[gaps != ESCAPE]
    return skipped + np.arange(changed)


def mixed_sum(lanes: Tensor, place: int) -> int:
    """Return the sum of 64-bit words `[n]`, each mixed with its position, as a number below 2^64.

    `lanes` has the words, and `place` is the position of the first one. Mixing takes the XOR of a
    word and a multiple of its position, then the last steps of SplitMix64 (Steele, Lea and Flood,
    2014).
    """
    library = _library() if lanes.is_cpu else None
    if library is not None:
        total: int = library.sum_words(lanes.data_ptr(), len(lanes), place)
        return total
    total = 0
    for first in range(0, len(lanes), MAX_SUM_WORDS):
        part = lanes[first : first + MAX_SUM_WORDS]
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
    return number - (number >> 63 << 64)


def require_alike(before: Tensor, after: Tensor) -> None:
    """Raise ValueError unless two tensors have the same shape and dtype."""
    if before.shape != after.shape or before.dtype != after.dtype:
        raise ValueError(
            f"the versions of a tensor differ in shape or dtype: {_described(before)} before, "
            f"{_described(after)} after"
        )


def _check_words(before: Tensor, after: Tensor | None) -> None:
    """Raise ValueError for tensors whose memory compiled code cannot read."""
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
    try:
        library = compile_library(SOURCE)
    except NotCompiled as error:
        warnings.warn(
            "differences of weights are found and applied by NumPy, several times slower, because "
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
        apply = getattr(library, f"apply_{bits}")
        apply.argtypes = [pointer, number, pointer, pointer]
        apply.restype = None
        apply_planes = getattr(library, f"apply_planes_{bits}")
        apply_planes.argtypes = [pointer, number, pointer]
        apply_planes.restype = None
        merge = getattr(library, f"merge_{bits}")
        merge.argtypes = [pointer, pointer, pointer, number, pointer, pointer, pointer]
        merge.restype = number
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
    """Return the gap of each changed word, which is the number of unchanged words before it, as
    bytes.

    `where` has the positions `[n]` of the changed words, in ascending order. A gap below 255 is one
    byte. A byte of 255 means that 255 is added to the number that follows.
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
    """Return the byte planes of words `[n]`, one for each byte of a word, lowest bytes first."""
    bits = array.view(f"u{array.itemsize}")
    return tuple((bits >> 8 * i).astype(np.uint8) for i in range(array.itemsize))
