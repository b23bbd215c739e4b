"""Tensors as bits (integer words and bytes), and checksums of these bits.

A checksum is text that begins with its kind:

    tensors:... XXH3 of the XXH3 of each tensor, on several threads: for weights in main memory
    sum64:...   a sum over all words of 64 bits, which a GPU computes: for weights in its memory
    xxh3:...    XXH3 with 64 bits, which reads the bytes in order: for files

Checksums of each kind can be computed on every device.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor

from unstale.weights.changes import MAX_SUM_WORDS, mixed_sum
from unstale.weights.child_process import Bytes, cores

T = TypeVar("T")
R = TypeVar("R")

MIN_SHARED_BYTES = 1 << 25
"""Smallest number of bytes for which `in_threads` starts threads. With fewer bytes, starting
threads takes longer than the work.
"""
_KINDS = re.compile("(tensors|sum64):[0-9a-f]{16}")
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""torch's signed integer dtypes, by their size in bytes."""
_WORD_BYTES = 8


def words(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as integers of the same size, in the same memory."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(WORDS[tensor.element_size()])


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU. The tensor's memory is shared where possible."""
    return words(tensor).cpu().contiguous().numpy().reshape(-1).view(np.uint8).data


def in_threads(call: Callable[[T], R], items: Sequence[T], sizes: Sequence[int]) -> list[R]:
    """Call a function with each item, in several threads. Return the results in the order of the
    items.

    `sizes` has the number of bytes of each item. If their sum is below `MIN_SHARED_BYTES`, the
    calls run in the caller's thread. Otherwise there are as many threads as torch uses, or half as
    many as the processor has cores, whichever is more: some processes give torch only one thread.
    The threads have the caller's GPU stream, but not its torch modes, such as `no_grad`.
    """
    threads = max(torch.get_num_threads(), cores() // 2)
    if min(threads, len(items)) <= 1 or sum(sizes) < MIN_SHARED_BYTES:
        return [call(item) for item in items]
    order = sorted(range(len(items)), key=lambda i: -sizes[i])  # so that all threads end together
    use_stream = (
        partial(torch.cuda.set_stream, torch.cuda.current_stream())
        if torch.cuda.is_initialized()
        else None
    )
    with ThreadPoolExecutor(min(threads, len(items)), initializer=use_stream) as pool:
        made = dict(zip(order, pool.map(call, [items[i] for i in order]), strict=True))
    return [made[i] for i in range(len(items))]


def on_side_stream(call: Callable[[], R], device: torch.device) -> Callable[[], R]:
    """Return a function that calls `call` on a separate GPU stream. It can be used in another
    thread.

    The function first waits for the work that the caller's stream has now. It returns when the
    separate stream is done. For a device other than a GPU, `call` itself is returned.
    """
    if device.type != "cuda":
        return call
    begins, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)

    def on_stream() -> R:
        stream.wait_stream(begins)
        with torch.cuda.stream(stream):
            result = call()
        stream.synchronize()
        return result

    return on_stream


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return the checksum of the bits of all tensors, taken in the order of their names.

    Its kind is `sum64` if all tensors are on a GPU, else `tensors`.
    """
    ordered = [tensors[name] for name in sorted(tensors)]
    if ordered and all(tensor.is_cuda for tensor in ordered):
        return sum64(ordered)
    return _of_tensors(ordered)


def _of_tensors(tensors: Sequence[Tensor]) -> str:
    def digest(tensor: Tensor) -> bytes:
        return xxhash.xxh3_64_digest(bytes_of(tensor))

    digests = in_threads(digest, tensors, [tensor.nbytes for tensor in tensors])
    return f"tensors:{xxhash.xxh3_64_hexdigest(b''.join(digests))}"


def has_checksum(tensors: Mapping[str, Tensor], recorded: str) -> bool:
    """Return True if the checksum of the tensors equals `recorded`, which may be of either kind.

    Raises ValueError for an unknown kind of checksum.
    """
    ordered = [tensors[name] for name in sorted(tensors)]
    check_kind(recorded)
    compute = sum64 if recorded.startswith("sum64:") else _of_tensors
    return compute(ordered) == recorded


def xxh3(parts: Iterable[Bytes]) -> str:
    """Return the XXH3 (64 bits) of bytes given in parts, as `xxh3:` and 16 hexadecimal digits."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return f"xxh3:{state.hexdigest()}"


def sum64(tensors: Sequence[Tensor]) -> str:
    """Return the checksum `sum64`: the sum of all 64-bit words, each mixed with its position.

    The sum is modulo 2^64. The bytes of each tensor are padded with zeros to whole words. The words
    can be added in any order, so any device can compute the sum in parallel.
    """
    if all(tensor.is_cpu for tensor in tensors):
        sizes = [tensor.nbytes for tensor in tensors]
        places = accumulate((-(-size // _WORD_BYTES) for size in sizes), initial=0)
        sums = in_threads(_sum_of, [*zip(tensors, places, strict=False)], sizes)
        return f"sum64:{sum(sums) % 2**64:016x}"
    total = place = 0
    for lanes in _in_groups(lanes for tensor in tensors for lanes in _lanes_of(tensor)):
        total += mixed_sum(lanes, place)
        place += len(lanes)
    return f"sum64:{total % 2**64:016x}"


def _sum_of(placed: tuple[Tensor, int]) -> int:
    """Return the sum of one tensor's 64-bit words, each mixed with its position, modulo 2^64.

    `placed` has the tensor, and the position of its first word among the words of all tensors.
    """
    tensor, place = placed
    total = 0
    for lanes in _lanes_of(tensor):
        total += mixed_sum(lanes, place)
        place += len(lanes)
    return total


def _lanes_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the bytes of a tensor as 64-bit words. The last word is padded with zeros."""
    flat = words(tensor).contiguous().reshape(-1).view(torch.uint8)
    whole = len(flat) // _WORD_BYTES * _WORD_BYTES
    if flat.storage_offset() % _WORD_BYTES or flat.data_ptr() % _WORD_BYTES:
        flat = flat.clone()  # words of 64 bits must be at such addresses
    yield flat[:whole].view(torch.int64)
    if rest := len(flat) - whole:
        padded = torch.cat([flat[whole:], flat.new_zeros(_WORD_BYTES - rest)])
        yield padded.view(torch.int64)


def _in_groups(parts: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors, with small successive tensors on a GPU joined into one.

    Each GPU operation has a fixed cost, so fewer and larger tensors take less time.
    """
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
    """Return 1-D tensors concatenated. A single tensor is returned without a copy."""
    return torch.cat([*parts]) if len(parts) > 1 else parts[0]


def check_kind(recorded: object) -> None:
    """Raise ValueError for a recorded checksum of weights of an unknown kind."""
    if not (isinstance(recorded, str) and _KINDS.fullmatch(recorded)):
        raise ValueError(
            f"its checksum is {repr(recorded)[:40]}, but must be tensors: or sum64: and 16 "
            "hexadecimal digits"
        )
