"""Lossless compression of the difference between two versions of the weights (a delta).

The difference is the XOR of the tensors' words, which are integers as wide as one element. Each
tensor is stored in the smallest of three formats:

    sparse   the positions of changed words (gaps) and their XOR (byte planes), compressed
    packed   the byte planes of all words, compressed: for small differences in most words
    raw      the XOR of all words: never larger than the tensor

XOR is its own inverse, so a delta can be applied in both directions. Working on bits keeps NaN
payloads, -0.0 and denormals. Tensors are compressed on the CPU by several threads. If few words of
a tensor on a GPU changed, only their gaps and planes are copied to the CPU.

`weights/bits.py` computes the checksums of weights. A file with a delta also has a checksum of its
own bytes.

The bytes of a delta may be damaged or hostile. Reading them returns the delta that was written, or
raises ValueError. Applying a delta takes no more memory than its bytes and the tensors. On a GPU it
also takes 24 bytes for each changed word of a tensor, or of a group of small tensors.
"""

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from mmap import mmap
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import zstandard
from torch import Tensor

from unstale.weights.bits import (
    WORDS,
    bytes_of,
    check_kind,
    checksum,
    has_checksum,
    in_threads,
    joined,
    words,
    xxh3,
)
from unstale.weights.changes import (
    ESCAPE,
    Changes,
    apply_changes,
    apply_on_device,
    apply_planes,
    find_all_on_device,
    find_changes,
    find_changes_on_device,
    join_planes,
    merge_changes,
    require_alike,
    split_planes,
    upload,
)
from unstale.weights.child_process import Bytes

SPARSE_BELOW = 2 / 3
"""Largest share of changed words at which the format `sparse` is tried. With more changes it is
slow and larger than `packed`.
"""
PACKED_ABOVE = 1 / 3
"""Smallest share of changed words at which the format `packed` is tried. With fewer changes it is
slow and larger than `sparse`.
"""
SAMPLE_WORDS = 1 << 16
"""Number of words in the sample of a large tensor by which `sparse` or `packed` is chosen."""
SAMPLE_BLOCKS = 64
"""Number of blocks in the sample of a tensor's words, at equal distances. Several are needed,
because the changes may be in one part of a tensor, such as the rows of some tokens or experts.
"""
EXACT_WORDS = 1 << 18
"""Largest number of words of a tensor that is compressed in both formats, `sparse` and `packed`.
For a larger tensor, a sample decides between them.
"""
MAX_GROUP_WORDS = 1 << 26
"""Largest number of words in a group of tensors on a GPU that are compared or changed together.
This limits memory, because such a group is copied. A larger tensor is a group by itself.
"""

_ENTROPY = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6)
"""Fast settings of the compressor zstd. The data has frequent byte values but few repeated strings,
so a search for repeats would take time and save nothing.
"""
_WIDTHS = (1, 2, 4, 8)
_NAMES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64",
    torch.complex64: "C64", torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8",
    torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip
"""The names of dtypes in safetensors files."""
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_HEADER = struct.Struct("<Q")
_DAMAGE = (struct.error, KeyError, TypeError, AttributeError, RuntimeError)
"""Errors, besides ValueError, that reading a damaged header can raise."""

Array = npt.NDArray[Any]
Kind = Literal["sparse", "packed", "raw"]
Entry = tuple[str, str, tuple[int, ...], int]
"""One tensor in the header of a safetensors file: name, dtype, shape and number of bytes."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """The compressed difference of one tensor between two versions."""

    kind: Kind
    words: int
    width: int
    """Size in bytes of a word, which is one element of the tensor as an integer."""
    changed: int
    """Number of words of the tensor that differ between the two versions."""
    streams: tuple[Bytes, ...]

    def __post_init__(self) -> None:
        num_streams = {"sparse": 1 + self.width, "packed": self.width, "raw": 1}[self.kind]
        is_valid = (
            all(type(number) is int for number in (self.words, self.width, self.changed))
            and self.width in _WIDTHS
            and 0 <= self.changed <= self.words
            and len(self.streams) == (num_streams if self.changed else 0)
        )
        if is_valid and self.kind == "raw" and self.changed:
            is_valid = self.nbytes == self.words * self.width
        if not is_valid:
            raise ValueError(
                f"invalid difference: {self.changed!r} of {self.words!r} words of "
                f"{self.width!r} bytes changed, {self.kind}, in {len(self.streams)} streams of "
                f"{self.nbytes} bytes"
            )

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.streams))


@dataclass(frozen=True, slots=True)
class Delta:
    """The difference between the weights of version `base` and those of `version`.

    It can be applied in both directions. `tensors` has the difference of each tensor.
    """

    base: int
    version: int
    checksum: str
    """The checksum of the weights of `version`. It is compared with that of the result of applying
    the delta.
    """
    tensors: Mapping[str, Encoded]
    starts: Mapping[str, int] | None = None
    """For a delta that covers only a part of each tensor: the index of the word at which the part
    begins in its tensor, by name. None if the delta covers whole tensors.
    """

    @property
    def nbytes(self) -> int:
        return sum(encoded.nbytes for encoded in self.tensors.values())

    def targets(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors to which the delta applies, by name.

        They are `tensors`, which must be whole, or views of parts of them if the delta covers only
        parts. Raises ValueError if a delta of parts names an unknown tensor, or exceeds a tensor.
        """
        if self.starts is None:
            return tensors
        if self.starts.keys() != self.tensors.keys() or self.starts.keys() - tensors.keys():
            unknown = sorted((self.starts.keys() ^ self.tensors.keys()) - tensors.keys())
            raise ValueError(f"the delta is of parts of other weights: {unknown[:4]}")
        parts = {}
        for name, encoded in self.tensors.items():
            start, flat = self.starts[name], words(tensors[name]).view(-1)
            if type(start) is not int or not 0 <= start <= len(flat) - encoded.words:
                raise ValueError(
                    f"{encoded.words} words from word {start!r} on are not a part of {name}, which "
                    f"has {len(flat)}"
                )
            parts[name] = flat[start : start + encoded.words]
        return parts

    def check_way(self, held: int, wanted: int) -> None:
        """Raise ValueError unless the delta leads from version `held` to version `wanted`."""
        if (self.base, self.version) != (held, wanted):
            raise ValueError(
                f"the delta leads from version {self.base} to {self.version}, "
                f"but the engine holds {held} and needs {wanted}"
            )


def encode_all(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], names: Iterable[str]
) -> dict[str, Encoded]:
    """Compress the differences between two versions of the tensors `names`, in several threads."""

    def encode_one(name: str) -> Encoded:
        return encode_between(words(before[name]), words(after[name]))

    names = list(names)
    on_cpu = [name for name in names if before[name].is_cpu]
    sizes = [before[name].nbytes for name in on_cpu]
    made = dict(zip(on_cpu, in_threads(encode_one, on_cpu, sizes), strict=True))
    others = {name: words(before[name]) for name in names if name not in made}
    for group in _groups(others):
        made |= _encode_group(
            {name: others[name] for name in group}, {name: words(after[name]) for name in group}
        )
    return {name: made[name] for name in names}


def _groups(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Yield lists of tensor names. The tensors of a list have the same element size and device.

    A list has at most `MAX_GROUP_WORDS` elements in all, or is a single larger tensor.
    """
    alike: dict[tuple[int, torch.device], list[str]] = {}
    for name, tensor in tensors.items():
        alike.setdefault((tensor.element_size(), tensor.device), []).append(name)
    for names in alike.values():
        group: list[str] = []
        size = 0
        for name in names:
            count = tensors[name].numel()
            if group and size + count > MAX_GROUP_WORDS:
                yield group
                group, size = [], 0
            group.append(name)
            size += count
        yield group


def _encode_group(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Encoded]:
    """Compress the differences of tensors on one device, such as a GPU. The tensors are `words`.

    The device finds the changes of all tensors together. Several CPU threads compress them.
    """
    for name, tensor in before.items():
        require_alike(tensor, after[name])
    device = next(iter(before.values())).device
    difference = joined([tensor.reshape(-1) for tensor in before.values()]) ^ joined(
        [after[name].to(device).reshape(-1) for name in before]
    )
    sizes = [tensor.numel() for tensor in before.values()]
    limits = [_sparse_limit(size) for size in sizes]
    changes = find_all_on_device(difference, sizes, limits)
    parts = zip(difference.split(sizes), changes, strict=True)
    pairs = {
        name: _Pair(part, found=found) for name, (part, found) in zip(before, parts, strict=True)
    }
    made = in_threads(_encode, [*pairs.values()], [tensor.nbytes for tensor in before.values()])
    return dict(zip(pairs, made, strict=True))


def encode(difference: Tensor) -> Encoded:
    """Compress the difference of one tensor in the smallest of the three formats (see the module).

    `difference` is the XOR of the tensor's `words` in two versions.

    >>> encode(torch.tensor([0, 0, 3], dtype=torch.int16)).kind
    'raw'
    >>> encode(torch.arange(4096, dtype=torch.int16) % 100 // 99).kind
    'sparse'
    """
    return _encode(_Pair(difference.contiguous().reshape(-1)))


def encode_between(before: Tensor, after: Tensor) -> Encoded:
    """Compress the difference between two versions of a tensor's `words`, as `encode` does.

    On the CPU, this allocates little memory if few words changed. Raises ValueError unless both
    tensors have the same shape and dtype.
    """
    require_alike(before, after)
    if not before.is_cpu:
        return encode(before ^ after.to(before.device))
    flat, its_next = (each.cpu().contiguous().reshape(-1) for each in (before, after))
    return _encode(_Pair(flat, its_next))


@dataclass(frozen=True, slots=True)
class _Pair:
    """The words `[n]` of a tensor in two versions. If `after` is None, `before` is their XOR."""

    before: Tensor
    after: Tensor | None = None
    found: Changes | None = None
    """The changed words. If there are more than `_sparse_limit`, it has only their number. None
    before the search.
    """

    @property
    def difference(self) -> Tensor:
        return self.before if self.after is None else self.before ^ self.after

    def sample(self) -> "_Pair":
        """Return the same `SAMPLE_WORDS` words of both versions of a large tensor, in
        `SAMPLE_BLOCKS` blocks.
        """
        length = SAMPLE_WORDS // SAMPLE_BLOCKS
        last = len(self.before) - length
        starts = [number * last // (SAMPLE_BLOCKS - 1) for number in range(SAMPLE_BLOCKS)]

        def blocks(flat: Tensor) -> Tensor:
            return torch.cat([flat[start : start + length] for start in starts])

        return _Pair(blocks(self.before), None if self.after is None else blocks(self.after))

    def changes(self, limit: int) -> tuple[int, tuple[Array, ...]]:
        """Return the number of changed words, and their data in the format `sparse`, not yet
        compressed.

        The data is empty if no words, or more than `limit`, changed.
        """
        if self.found is not None:
            found = self.found
        elif self.before.is_cpu:
            found = find_changes(self.before, self.after, limit)
        else:
            found = find_changes_on_device(self.difference, limit)
        return found.count, (found.gaps, *found.planes) if 0 < found.count <= limit else ()

    def planes(self) -> tuple[Array, ...]:
        if self.before.is_cpu:
            return split_planes(self.before, self.after)
        return split_planes(self.difference.cpu(), None)


def _encode(pair: _Pair) -> Encoded:
    count, width = len(pair.before), pair.before.element_size()
    changed, sparse = pair.changes(_sparse_limit(count))
    shape = {"words": count, "width": width, "changed": changed}
    if not changed:
        return Encoded("sparse", streams=(), **shape)
    kind, streams = _smaller(pair, changed, sparse)
    if sum(map(len, streams)) >= count * width:
        return Encoded("raw", streams=(pair.difference.cpu().numpy().tobytes(),), **shape)
    return Encoded(kind, streams=streams, **shape)


def _sparse_limit(count: int) -> int:
    """Return the largest number of changed words, of `count`, for which `sparse` is tried."""
    return int(SPARSE_BELOW * count)


def _smaller(
    pair: _Pair, changed: int, sparse: tuple[Array, ...]
) -> tuple[Kind, tuple[bytes, ...]]:
    """Return the name and the compressed data of the smaller format, `sparse` or `packed`.

    `sparse` has the data in the format `sparse`, not yet compressed. For a tensor of more than
    `EXACT_WORDS` words, a sample decides which format is smaller.
    """
    count = len(pair.before)
    kinds: list[Kind] = []
    if sparse:
        kinds.append("sparse")
    if changed >= PACKED_ABOVE * count:
        kinds.append("packed")
    if len(kinds) == 2 and count > EXACT_WORDS:
        sample = pair.sample()
        _, its_changes = sample.changes(SAMPLE_WORDS)
        of_sample = {"sparse": its_changes, "packed": sample.planes()}
        sizes = {kind: sum(len(_pack(each)) for each in of_sample[kind]) for kind in kinds}
        kinds = [min(kinds, key=sizes.__getitem__)]
    made: dict[Kind, tuple[bytes, ...]] = {
        kind: tuple(map(_pack, sparse if kind == "sparse" else pair.planes())) for kind in kinds
    }
    return min(made.items(), key=lambda each: sum(map(len, each[1])))


def whole(tensor: Tensor, *, copy: bool = True) -> Encoded:
    """Return a tensor as a difference from zeros, uncompressed.

    Without `copy`, the result shares the tensor's memory where possible.
    """
    bits = words(tensor)
    count = bits.numel()
    data = bytes_of(tensor)
    streams: tuple[Bytes, ...] = (bytes(data) if copy else data,) if count else ()
    return Encoded("raw", count, bits.element_size(), count, streams)


def all_of(version: int, weights: Mapping[str, Tensor]) -> Delta:
    """Return all weights of a version as a delta from zeros, uncompressed. Its `base` is -1."""
    tensors = {name: whole(tensor, copy=False) for name, tensor in weights.items()}
    return Delta(-1, version, checksum(weights), tensors)


def apply(encoded: Encoded, target: Tensor) -> None:
    """Apply a difference in place, by XOR, to `target`: the `words` of a tensor.

    Raises ValueError if the difference is damaged or belongs to a tensor of another size.
    """
    _check_fit(encoded, target)
    if not encoded.streams:
        return
    if encoded.kind == "sparse" and not target.is_cpu:
        apply_on_device([target], [_changes_of(encoded)])
        return
    flat = target.contiguous().reshape(-1)
    match encoded.kind:
        case "sparse":
            apply_changes(flat, _changes_of(encoded))
        case "packed":
            planes = [_unpack(each, encoded.words, encoded.words) for each in encoded.streams]
            if flat.is_cpu:
                apply_planes(flat, planes)
            else:
                flat ^= join_planes([upload([plane], flat) for plane in planes], flat.dtype)
        case "raw":
            raw = np.frombuffer(encoded.streams[0], f"i{encoded.width}")
            if flat.is_cpu:  # no copy: several threads may each have a large tensor
                np.bitwise_xor(flat.numpy(), raw, out=flat.numpy())
            else:
                flat ^= torch.from_numpy(raw.copy()).to(flat.device)
    if not target.is_contiguous():
        target.copy_(flat.view(target.shape))


def apply_all(tensors: Mapping[str, Encoded], targets: Mapping[str, Tensor]) -> None:
    """Apply differences in place, by XOR and with several threads, to the `words` of tensors.

    On a GPU, tensors with few changes are changed together.
    """
    together = {
        name: targets[name]
        for name, encoded in tensors.items()
        if encoded.kind == "sparse"
        and 0 < encoded.changed < PACKED_ABOVE * encoded.words
        and not targets[name].is_cpu
    }
    others = [name for name in tensors if name not in together]
    sizes = [targets[name].nbytes for name in others]
    in_threads(lambda name: apply(tensors[name], targets[name]), others, sizes)
    for group in _groups(together):
        for name in group:
            _check_fit(tensors[name], targets[name])
        sizes = [targets[name].nbytes for name in group]
        changes = in_threads(lambda name: _changes_of(tensors[name]), group, sizes)
        apply_on_device([targets[name] for name in group], changes)


def merge(parts: Sequence[Encoded]) -> Encoded:
    """Combine successive differences of one tensor into a single one with the same effect.

    If few words changed, this allocates little memory. Raises ValueError unless all differences
    have the same number and size of words.
    """
    words, width = parts[0].words, parts[0].width
    if any((part.words, part.width) != (words, width) for part in parts):
        raise ValueError(f"differences of other tensors: {[part.words for part in parts]} words")
    changing = [part for part in parts if part.changed]
    changed = sum(part.changed for part in changing)
    if all(part.kind == "sparse" for part in changing) and changed < PACKED_ABOVE * words:
        found = Changes(0, np.empty(0, np.uint8), (np.empty(0, np.uint8),) * width)
        for part in changing:
            found = (
                merge_changes(found, _changes_of(part), words) if found.count else _changes_of(part)
            )
        shape = {"words": words, "width": width, "changed": found.count}
        streams = tuple(map(_pack, (found.gaps, *found.planes))) if found.count else ()
        if not found.count or sum(map(len, streams)) < words * width:
            return Encoded("sparse", streams=streams, **shape)
    difference = torch.zeros(words, dtype=WORDS[width])
    for part in changing:
        apply(part, difference)
    return encode(difference)


def _changes_of(encoded: Encoded) -> Changes:
    """Return the decompressed changes of a `sparse` difference. Raises ValueError for damage."""
    stream, *planes = encoded.streams
    changed = encoded.changed
    gaps = _unpack(stream, changed, changed + encoded.words // ESCAPE)
    return Changes(changed, gaps, tuple(_unpack(each, changed, changed) for each in planes))


def advance(tensors: Mapping[str, Tensor], delta: Delta) -> None:
    """Turn the weights of version `delta.base` into those of `delta.version`, in place.

    A delta of parts of tensors changes only these parts. Raises ValueError, and leaves the tensors
    unchanged, if the delta belongs to other tensors, or if the result does not have the delta's
    checksum.
    """
    tensors = delta.targets(tensors)
    require_fit(delta, tensors)
    targets = {name: words(tensor) for name, tensor in tensors.items()}
    applied = []

    def apply_one(name: str) -> None:
        apply(delta.tensors[name], targets[name])
        applied.append(name)

    names = [*delta.tensors]
    try:
        if all(target.is_cpu for target in targets.values()):
            in_threads(apply_one, names, [targets[name].nbytes for name in names])
        else:
            for name in names:
                apply_one(name)
        if not has_checksum(tensors, delta.checksum):
            raise ValueError(
                f"the delta from version {delta.base} does not lead to version {delta.version}: "
                "the checksum differs. It was applied to other weights than it was made from"
            )
    except ValueError:
        for name in applied:
            apply(delta.tensors[name], targets[name])
        raise


def advance_overlap(parts: Mapping[str, Tensor], starts: Mapping[str, int], delta: Delta) -> int:
    """Apply a delta to parts of tensors, in place. Return the number of their words that it covers.

    `starts` has the index of the word at which each part begins in its whole tensor. Words of the
    delta outside these parts are ignored. The delta's checksum is not compared, because it may be
    that of other parts. Raises ValueError if the delta has a tensor that `parts` lacks.
    """
    common = 0
    for name, encoded in delta.tensors.items():
        if name not in parts:
            raise ValueError(f"the delta is of other weights: {name} is not among them")
        target = words(parts[name]).view(-1)
        here, there = starts[name], delta.starts[name] if delta.starts else 0
        first, last = max(here, there), min(here + len(target), there + encoded.words)
        if first >= last:
            continue
        common += last - first
        if encoded.streams:
            difference = torch.zeros(encoded.words, dtype=target.dtype)
            apply(encoded, difference)
            target[first - here : last - here] ^= difference[first - there : last - there].to(
                target.device
            )
    return common


def dumps(delta: Delta) -> bytes:
    """Return a delta as the bytes of a safetensors file.

    The compressed data is in uint8 tensors, and everything else in the metadata.
    """
    return b"".join(file_parts(delta))


def file_parts(delta: Delta) -> list[Bytes]:
    """Return a delta as the bytes of a safetensors file, in parts to be written in order.

    Compressed data is not copied.
    """
    streams: list[Bytes] = []
    entries: list[Entry] = []
    tensors = {}
    for name, encoded in delta.tensors.items():
        streams += encoded.streams
        entries += [
            (f"{name}/{i}", "U8", (len(stream),), len(stream))
            for i, stream in enumerate(encoded.streams)
        ]
        tensors[name] = {
            "kind": encoded.kind,
            "words": encoded.words,
            "width": encoded.width,
            "changed": encoded.changed,
            "streams": len(encoded.streams),
        }
    about: dict[str, Any] = {
        "base": delta.base,
        "version": delta.version,
        "checksum": delta.checksum,
        "tensors": tensors,
    }
    if delta.starts is not None:
        about["starts"] = dict(delta.starts)
    text = json.dumps(about)
    return [_header(entries, {"delta": f"{_seal(text, delta.tensors)} {text}"}), *streams]


def file_of(weights: Mapping[str, Tensor]) -> list[Bytes]:
    """Return tensors as the bytes of a safetensors file, in parts to be written in order.

    A part shares a tensor's memory where possible. Tied tensors are written once for each name.

    >>> from safetensors.torch import load
    >>> file = b"".join(file_of({"a": torch.tensor([1.5, 2.0]).bfloat16(), "b": torch.tensor(3)}))
    >>> load(file)["a"].tolist()
    [1.5, 2.0]
    """
    header, starts = file_header(weights)
    return [header, *(bytes_of(weights[name]) for name in starts)]


def file_header(
    layout: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """Return the header of a safetensors file, and each tensor's byte offset in the file, in order.

    `layout` has tensors of the right dtypes and shapes, possibly on the device `meta`. Raises
    ValueError for a dtype that safetensors files cannot have.
    """
    entries = []
    # Wide elements first, so that each tensor is aligned to its element size.
    for name, tensor in sorted(layout.items(), key=lambda item: -item[1].element_size()):
        if tensor.dtype not in _NAMES:
            allowed = ", ".join(map(str, _NAMES))
            raise ValueError(f"{name} is {tensor.dtype}, which is not one of {allowed}")
        entries.append((name, _NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes))
    header = _header(entries, metadata or {})
    starts = {}
    end = len(header)
    for name, *_, size in entries:
        starts[name] = end
        end += size
    return header, starts


def file_size(header: Bytes) -> int:
    """Return the size in bytes of a whole safetensors file, according to its header."""
    (size,) = _HEADER.unpack_from(header)
    entries = json.loads(bytes(header[_HEADER.size : _HEADER.size + size]))
    entries.pop("__metadata__", None)
    ends = [entry["data_offsets"][1] for entry in entries.values()]
    return _HEADER.size + int(size) + max(ends, default=0)


def _header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, dtype, shape, size in entries:
        start = end
        end += size
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER.size)
    return _HEADER.pack(len(text)) + text


def tensors_of(data: bytes | bytearray | mmap) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file as views of its bytes.

    Tensors can be changed only if `data` is writable. Raises ValueError if `data` is not a
    safetensors file.
    """
    try:
        (size,) = _HEADER.unpack_from(data)
        start = _HEADER.size + size
        header = json.loads(bytes(data[_HEADER.size : start]))
        header.pop("__metadata__", None)
        return {name: _tensor_at(data, start, **entry) for name, entry in header.items()}
    except _DAMAGE as error:
        raise ValueError(f"these {len(data):,} bytes are no tensors: {error!r}") from error


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and value of each tensor of a safetensors file, with one in memory at a time.

    The file is read instead of mapped, because mapped pages would count as memory of the process.
    Raises ValueError if the file is damaged or cut short.
    """
    with path.open("rb") as file:
        try:
            (size,) = _HEADER.unpack(file.read(_HEADER.size))
            left = path.stat().st_size - _HEADER.size - size
            if left < 0:
                raise ValueError(f"its header has {left + size:,} of its {size:,} bytes")
            header = json.loads(file.read(size))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                first, last = entry["data_offsets"]
                if not 0 <= first <= last <= left:  # before memory is allocated for it
                    found = min(last, left) - first
                    raise ValueError(f"{name} has {found:,} of its {last - first:,} bytes")
                file.seek(_HEADER.size + size + first)
                data = bytearray(last - first)
                file.readinto(data)
                yield name, _tensor_at(data, -first, **entry)
        except (*_DAMAGE, ValueError) as error:
            raise ValueError(f"{path} is not a whole safetensors file: {error!r}") from error


def _tensor_at(
    data: Any, start: int, *, dtype: str, shape: Sequence[int], data_offsets: Sequence[int]
) -> Tensor:
    kind = _DTYPES[dtype]
    count = math.prod(shape)
    first, last = data_offsets
    if last - first != count * kind.itemsize:
        raise ValueError(f"{count} numbers of {dtype} do not take {last - first} bytes")
    if not count:
        return torch.empty(list(shape), dtype=kind)
    return torch.frombuffer(data, dtype=kind, offset=start + first, count=count).view(shape)


def loads(data: Bytes) -> Delta:
    """Return the delta whose bytes `dumps` returned. Raises ValueError for any other bytes.

    The delta's compressed data are slices of `data`: copies if `data` is `bytes`, views if it is a
    memoryview.
    """
    try:
        return _loads(data)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"these {len(data):,} bytes are not a delta, or are damaged: {error!r}"
        ) from error


def _loads(data: Bytes) -> Delta:
    (size,) = _HEADER.unpack_from(data)
    start = _HEADER.size + size
    header = json.loads(bytes(data[_HEADER.size : start]))
    metadata = header.pop("__metadata__")
    seal, _, text = metadata["delta"].partition(" ")
    about = json.loads(text)
    left = len(data) - start
    tensors = {}
    for name, entry in about.pop("tensors").items():
        streams = []
        for i in range(entry["streams"]):
            first, last = header.pop(f"{name}/{i}")["data_offsets"]
            left -= last - first
            if not 0 <= first <= last <= len(data) - start or left < 0:
                raise ValueError(f"stream {i} of {name} is not in the file")
            streams.append(data[start + first : start + last])
        tensors[name] = Encoded(**entry | {"streams": tuple(streams)})
    if _seal(text, tensors) != seal or header or left:
        raise ValueError("its checksum differs")
    delta = Delta(tensors=tensors, **about)
    if any(type(getattr(delta, each.name)) is not int for each in fields(Delta)[:2]):
        raise ValueError("base and version must be integers")
    check_kind(delta.checksum)
    return delta


def _seal(about: str, tensors: Mapping[str, Encoded]) -> str:
    """Return a checksum of a delta's metadata and compressed data, to detect damage."""
    streams = (stream for encoded in tensors.values() for stream in encoded.streams)
    return xxh3(chain([about.encode()], streams))


def require_fit(delta: Delta, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless a delta fits the tensors: in names, and in number and size of
    elements.
    """
    if unmatched := sorted(tensors.keys() ^ delta.tensors.keys()):
        raise ValueError(f"the delta is of other weights: {unmatched[:4]} on one side only")
    for name, encoded in delta.tensors.items():
        _check_fit(encoded, words(tensors[name]))


def _check_fit(encoded: Encoded, target: Tensor) -> None:
    if (encoded.words, encoded.width) != (target.numel(), target.element_size()):
        raise ValueError(
            f"a difference of {encoded.words} words of {encoded.width} bytes does not fit "
            f"a tensor of {target.numel()} words of {target.element_size()} bytes"
        )


def _pack(array: Array) -> bytes:
    packed = zstandard.ZstdCompressor(compression_params=_ENTROPY).compress(
        np.ascontiguousarray(array).data
    )
    # The library cuts the length of its buffer, which holds the input's size, but not its memory.
    return bytes(memoryview(packed))


def _unpack(stream: Bytes, low: int, high: int) -> npt.NDArray[np.uint8]:
    """Decompress data. Raises ValueError unless the result has between `low` and `high` bytes.

    The size that the data's header gives is checked before memory is allocated.
    """
    try:
        size = zstandard.frame_content_size(stream)
        if not low <= size <= high:
            raise ValueError(f"a stream has {size} bytes, but must have {low} to {high}")
        return np.frombuffer(
            zstandard.ZstdDecompressor().decompress(stream, allow_extra_data=False), np.uint8
        )
    except zstandard.ZstdError as error:
        raise ValueError(f"a stream cannot be read: {error}") from error
