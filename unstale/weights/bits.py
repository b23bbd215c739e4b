"""Tensors as bits (integer words and bytes), and checksums of these bits.

A checksum of weights is text that begins with its kind:

    xxh3:...    XXH3 with 64 bits, which reads the bytes in order: for weights in main memory
    sum64:...   a sum over all words of 64 bits, which a GPU computes: for weights in its memory

Earlier releases wrote a CRC-32, as a number. Every kind can be checked on every device.
"""

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
import xxhash
from torch import Tensor

from unstale.weights.changes import MAX_SUM_WORDS, mixed_sum
from unstale.weights.child_process import Bytes

Checksum = int | str
"""`xxh3:` or `sum64:` and 16 hexadecimal digits, or a CRC-32 as a number."""

_KINDS = re.compile("(xxh3|sum64):[0-9a-f]{16}")
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD_BYTES = 8
"""Bytes of a word of `sum64`."""


def words(tensor: Tensor) -> Tensor:
    """Return a tensor's bits as integers of the element size, in the same memory."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_WORDS[tensor.element_size()])


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU, sharing its memory where possible."""
    return words(tensor).cpu().contiguous().numpy().reshape(-1).view(np.uint8).data


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return the checksum of the bits of all tensors, in the order of their names.

    The checksum is an XXH3, or a sum if all tensors are on a GPU.
    """
    ordered = [tensors[name] for name in sorted(tensors)]
    if ordered and all(tensor.is_cuda for tensor in ordered):
        return sum64(ordered)
    return xxh3(map(bytes_of, ordered))


def has_checksum(tensors: Mapping[str, Tensor], recorded: Checksum) -> bool:
    """Return True if the tensors have a recorded checksum.

    Raises ValueError for other kinds of checksums.
    """
    ordered = [tensors[name] for name in sorted(tensors)]
    check_kind(recorded)
    if isinstance(recorded, str) and recorded.startswith("sum64:"):
        return sum64(ordered) == recorded
    return checksum_like(recorded, map(bytes_of, ordered)) == recorded


def xxh3(parts: Iterable[Bytes]) -> str:
    """Return the XXH3 of bytes that are given in parts."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return f"xxh3:{state.hexdigest()}"


def sum64(tensors: Iterable[Tensor]) -> str:
    """Return the sum of all 64-bit words, each mixed with its position, modulo 2^64.

    The bytes of each tensor are padded with zeros to whole words of 64 bits. The sum of the first
    `n` words does not depend on the order in which they are added, so any device can compute it.
    """
    total = place = 0
    for lanes in _in_groups(lanes for tensor in tensors for lanes in _lanes_of(tensor)):
        total += mixed_sum(lanes, place)
        place += len(lanes)
    return f"sum64:{total % 2**64:016x}"


def _lanes_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the bytes of a tensor as words of 64 bits, the last of them padded with zeros."""
    flat = words(tensor).contiguous().reshape(-1).view(torch.uint8)
    whole = len(flat) // _WORD_BYTES * _WORD_BYTES
    if flat.storage_offset() % _WORD_BYTES or flat.data_ptr() % _WORD_BYTES:
        flat = flat.clone()  # words of 64 bits must be at such addresses
    yield flat[:whole].view(torch.int64)
    if rest := len(flat) - whole:
        padded = torch.cat([flat[whole:], flat.new_zeros(_WORD_BYTES - rest)])
        yield padded.view(torch.int64)


def _in_groups(parts: Iterable[Tensor]) -> Iterator[Tensor]:
    """Join successive small tensors on a GPU, where each operation takes time to start."""
    small: list[Tensor] = []
    for part in parts:
        fits = sum(map(len, small)) + len(part) <= MAX_SUM_WORDS
        if small and not (fits and small[0].device == part.device):
            yield joined(small)
            small = []
        if part.is_cpu:
            yield part
        else:
            small.append(part)
    if small:
        yield joined(small)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors `[n]` one after the other. A single tensor is not copied."""
    return torch.cat([*parts]) if len(parts) > 1 else parts[0]


def check_kind(recorded: object) -> None:
    """Raise ValueError unless this release can compute the given kind of checksum."""
    is_text = isinstance(recorded, str) and _KINDS.fullmatch(recorded)
    if type(recorded) is not int and not is_text:
        raise ValueError(
            f"its checksum is {repr(recorded)[:40]}, but this release reads CRC-32 (a number), and "
            "XXH3 and sums (xxh3: or sum64:, and 16 hexadecimal digits)"
        )


def checksum_like(recorded: object, parts: Iterable[Bytes]) -> Checksum:
    """Return the CRC-32 or XXH3 of bytes: the same kind as a recorded checksum.

    Raises ValueError for other kinds.
    """
    check_kind(recorded)
    if type(recorded) is int:
        crc = 0
        for part in parts:
            crc = zlib.crc32(part, crc)
        return crc
    return xxh3(parts)
