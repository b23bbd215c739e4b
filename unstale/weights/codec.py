"""The difference of two versions, bit for bit, in few bytes: XOR of words, each tensor written in the smallest way.

    sparse   where words differ (gaps, as bytes) and how (byte planes), each stream compressed by zstandard
    packed   the byte planes of all words, compressed: for differences that are everywhere and small
    raw      the words as they are: no larger than the tensor, and XOR all the same

XOR is its own inverse: what leads from one version to the next leads back. Words are integers of the element's size,
so that NaN payloads, -0.0 and denormals are what they are. Coding is done on the CPU, one tensor at a time; of one on
another device, only the words that changed come over while they are few.

What is read may be damaged or from somebody else: whatever it is, it gives the delta that was written or a ValueError,
and takes no more memory than the bytes given and the tensors it is applied to.
"""

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import zstandard
from torch import Tensor

from unstale.weights.child_process import Bytes

SPARSE_BELOW = 2 / 3
"""Share of changed words above which `sparse` is not tried: it would be slow and lose."""
PACKED_ABOVE = 1 / 3
"""Share of changed words below which `packed` is not tried: it would cost most of the time and lose."""

_ENTROPY = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6)
"""What is left to find is the skew of single bytes: looking hard for repeats takes longer and gives more bytes."""
_ESCAPE = 255
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NAMES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64",
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip
"""What safetensors calls them."""
_HEADER = struct.Struct("<Q")

Array = npt.NDArray[Any]
Kind = Literal["sparse", "packed", "raw"]
Part = tuple[str, str, tuple[int, ...], Bytes]
"""Of a file: the name, dtype and shape of a tensor, and what is in it."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """The difference of one tensor."""

    kind: Kind
    words: int
    width: int
    """Bytes of a word."""
    changed: int
    """Words that differ."""
    streams: tuple[bytes, ...]

    def __post_init__(self) -> None:
        numbers = (self.words, self.width, self.changed)
        if any(type(number) is not int for number in numbers) or self.width not in _WORDS:
            raise ValueError(
                f"no difference has {self.words!r} words of {self.width!r} bytes, {self.changed!r} changed"
            )
        wanted = {"sparse": 1 + self.width, "packed": self.width, "raw": 1}[self.kind]
        if not 0 <= self.changed <= self.words or len(self.streams) != (
            wanted if self.changed else 0
        ):
            raise ValueError(
                f"{self.changed} of {self.words} words changed cannot be {self.kind} in {len(self.streams)} streams"
            )
        if self.kind == "raw" and self.changed and self.nbytes != self.words * self.width:
            raise ValueError(
                f"{self.words} words of {self.width} bytes are not {self.nbytes} bytes"
            )

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.streams))


@dataclass(frozen=True, slots=True)
class Delta:
    """What leads from the weights of `base` to those of `version`, and back."""

    base: int
    version: int
    checksum: int
    """Of the weights of `version`, as `checksum` forms it."""
    tensors: Mapping[str, Encoded]

    @property
    def nbytes(self) -> int:
        return sum(encoded.nbytes for encoded in self.tensors.values())

    def check_way(self, held: int, wanted: int) -> None:
        """ValueError if it does not lead from the version that an engine holds to the one that it is to hold."""
        if (self.base, self.version) != (held, wanted):
            raise ValueError(
                f"the delta leads from version {self.base} to {self.version}, but the engine holds {held} "
                f"and is to hold {wanted}"
            )


def words(tensor: Tensor) -> Tensor:
    """The bits of a tensor as integers: a view of the same memory."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_WORDS[tensor.element_size()])


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """CRC-32 over the bits of all tensors, in the order of their names."""
    crc = 0
    for name in sorted(tensors):
        crc = zlib.crc32(_bytes(tensors[name]), crc)
    return crc


def encode(difference: Tensor) -> Encoded:
    """The smallest of three ways to write an XOR of `words`.

    >>> encode(torch.tensor([0, 0, 3], dtype=torch.int16)).kind
    'raw'
    >>> encode(torch.arange(4096, dtype=torch.int16) % 100 // 99).kind
    'sparse'
    """
    flat = difference.contiguous().reshape(-1)
    where, changed = _changed(flat)
    share = len(where) / max(1, len(flat))
    written: list[tuple[Kind, tuple[bytes, ...]]] = []
    if share <= SPARSE_BELOW:
        written.append(("sparse", (_pack(_gaps(where)), *_planes(changed)) if len(where) else ()))
    if share >= PACKED_ABOVE:
        written.append(("packed", _planes(flat.cpu().numpy())))
    kind, streams = min(written, key=lambda way: sum(map(len, way[1])))
    shape = {"words": len(flat), "width": flat.element_size(), "changed": len(where)}
    if sum(map(len, streams)) >= flat.nbytes > 0:
        return Encoded("raw", streams=(flat.cpu().numpy().tobytes(),), **shape)
    return Encoded(kind, streams=streams, **shape)


def whole(tensor: Tensor) -> Encoded:
    """A tensor's own bits, not compressed: its difference from nothing."""
    bits = words(tensor)
    count, data = bits.numel(), bytes(_bytes(tensor))
    return Encoded("raw", count, bits.element_size(), count, (data,) if count else ())


def apply(encoded: Encoded, target: Tensor) -> None:
    """XOR the difference into `target`, a tensor's `words`, in place."""
    check_fit(encoded, target)
    if not encoded.streams:
        return
    flat = target.reshape(-1)
    match encoded.kind:
        case "sparse":
            where, changed = _indices(encoded), _unplane(encoded.streams[1:], encoded.changed)
            if flat.is_cpu:  # in half of torch's time
                flat.numpy()[where] ^= changed
            else:
                flat[torch.from_numpy(where).to(flat.device)] ^= torch.from_numpy(changed).to(
                    flat.device
                )
        case "packed":
            flat ^= torch.from_numpy(_unplane(encoded.streams, encoded.words)).to(flat.device)
        case "raw":
            flat ^= torch.frombuffer(bytearray(encoded.streams[0]), dtype=target.dtype).to(
                flat.device
            )
    if not target.is_contiguous():
        target.copy_(flat.view(target.shape))


def advance(tensors: Mapping[str, Tensor], delta: Delta) -> None:
    """From the weights of `delta.base` to those of `delta.version`, in place.

    Raises ValueError if it cannot be applied or what comes out is not that version, bit for bit; the tensors are then
    as they were.
    """
    if tensors.keys() != delta.tensors.keys():
        raise ValueError(
            f"the delta has other weights than there are: {sorted(tensors.keys() ^ delta.tensors.keys())[:4]}"
        )
    targets = {name: words(tensor) for name, tensor in tensors.items()}
    for name, encoded in delta.tensors.items():
        check_fit(encoded, targets[name])
    applied = []
    try:
        for name, encoded in delta.tensors.items():
            apply(encoded, targets[name])
            applied.append(name)
        if checksum(tensors) != delta.checksum:
            raise ValueError(
                f"the delta from version {delta.base} does not lead to the weights of version {delta.version}: the "
                "checksum differs, so it was applied to other weights than it was formed from"
            )
    except ValueError:
        for name in applied:
            apply(delta.tensors[name], targets[name])
        raise


def dumps(delta: Delta) -> bytes:
    """A safetensors file: one tensor of bytes per stream, all else in the header's metadata."""
    streams: list[Part] = []
    tensors = {}
    for name, encoded in delta.tensors.items():
        streams += [
            (f"{name}/{i}", "U8", (len(stream),), stream)
            for i, stream in enumerate(encoded.streams)
        ]
        shape = {
            "kind": encoded.kind,
            "words": encoded.words,
            "width": encoded.width,
            "changed": encoded.changed,
        }
        tensors[name] = {**shape, "streams": len(encoded.streams)}
    about = {
        "base": delta.base,
        "version": delta.version,
        "checksum": delta.checksum,
        "tensors": tensors,
    }
    text = json.dumps(about)
    return b"".join(_file(streams, {"delta": f"{_seal(text, delta.tensors)} {text}"}))


def file_of(weights: Mapping[str, Tensor]) -> list[Bytes]:
    """A safetensors file of whole tensors, in parts that are the tensors' own memory where that is in order.

    Tied tensors are written out one by one. Join the parts, or write them one after the other.

    >>> from safetensors.torch import load
    >>> load(b"".join(file_of({"a": torch.tensor([1.5, 2.0]).bfloat16(), "b": torch.tensor(3)})))["a"].tolist()
    [1.5, 2.0]
    """
    parts = []
    for name, tensor in sorted(
        weights.items(), key=lambda item: -item[1].element_size()
    ):  # each where it is aligned
        if tensor.dtype not in _NAMES:
            raise ValueError(
                f"{name} is {tensor.dtype}; what can be handed over: {', '.join(map(str, _NAMES))}"
            )
        parts.append((name, _NAMES[tensor.dtype], tuple(tensor.shape), _bytes(tensor)))
    return _file(parts, {})


def _file(parts: Sequence[Part], metadata: Mapping[str, str]) -> list[Bytes]:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, dtype, shape, data in parts:
        start, end = end, end + len(data)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER.size)
    return [_HEADER.pack(len(text)) + text, *(data for *_, data in parts)]


def loads(data: bytes) -> Delta:
    """What `dumps` wrote, or a ValueError."""
    try:
        return _loads(data)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"these {len(data):,} bytes are no delta as it was written: {error!r}"
        ) from error


def _loads(data: bytes) -> Delta:
    (size,) = _HEADER.unpack_from(data)
    start = _HEADER.size + size
    header = json.loads(data[_HEADER.size : start])
    metadata = header.pop("__metadata__")
    seal, _, text = metadata["delta"].partition(" ")
    about = json.loads(text)
    left = len(data) - start
    tensors = {}
    for name, given in about.pop("tensors").items():
        streams = []
        for i in range(given["streams"]):
            first, last = header.pop(f"{name}/{i}")["data_offsets"]
            left -= last - first
            if not 0 <= first <= last <= len(data) - start or left < 0:
                raise ValueError(f"stream {i} of {name} is not in the file")
            streams.append(data[start + first : start + last])
        tensors[name] = Encoded(**given | {"streams": tuple(streams)})
    if seal != str(_seal(text, tensors)) or header or left:
        raise ValueError("its checksum differs")
    delta = Delta(tensors=tensors, **about)
    if any(type(getattr(delta, each.name)) is not int for each in fields(Delta)[:3]):
        raise ValueError("base, version and checksum must be whole numbers")
    return delta


def _seal(about: str, tensors: Mapping[str, Encoded]) -> int:
    """CRC-32 of all that is written."""
    crc = zlib.crc32(about.encode())
    for encoded in tensors.values():
        for stream in encoded.streams:
            crc = zlib.crc32(stream, crc)
    return crc


def check_fit(encoded: Encoded, target: Tensor) -> None:
    """ValueError when the difference is that of another shape."""
    if (encoded.words, encoded.width) != (target.numel(), target.element_size()):
        raise ValueError(
            f"a difference of {encoded.words} words of {encoded.width} bytes does not fit a tensor of "
            f"{target.numel()} words of {target.element_size()}"
        )


def _bytes(tensor: Tensor) -> memoryview:
    """The bits of a tensor in main memory, in order: its own where they are."""
    return words(tensor).cpu().contiguous().numpy().reshape(-1).view(np.uint8).data


def _changed(flat: Tensor) -> tuple[Array, Array]:
    """Where words are not 0, and these words."""
    if flat.is_cpu:
        array = flat.numpy()
        where = (array != 0).nonzero()[
            0
        ]  # that of a bool is several times faster than that of a number
        return where, array[where]
    found = flat.nonzero().squeeze(1)
    return found.cpu().numpy(), flat[found].cpu().numpy()


def _pack(array: Array) -> bytes:
    return zstandard.ZstdCompressor(compression_params=_ENTROPY).compress(
        np.ascontiguousarray(array).data
    )


def _unpack(stream: bytes, low: int, high: int) -> npt.NDArray[np.uint8]:
    """Of a stream that says it has from `low` to `high` bytes: what it says is what would be allocated."""
    try:
        size = zstandard.frame_content_size(stream)
        if not low <= size <= high:
            raise ValueError(f"a stream of {size} bytes where {low} to {high} belong")
        return np.frombuffer(
            zstandard.ZstdDecompressor().decompress(stream, allow_extra_data=False), np.uint8
        )
    except zstandard.ZstdError as error:
        raise ValueError(f"a stream cannot be read: {error}") from error


def _planes(array: Array) -> tuple[bytes, ...]:
    """The first bytes of all words, then their second ones, and so on: each plane is skewed in its own way."""
    bits = array.view(f"u{array.itemsize}")
    return tuple(_pack((bits >> 8 * i).astype(np.uint8)) for i in range(array.itemsize))


def _unplane(streams: tuple[bytes, ...], count: int) -> Array:
    bits = np.zeros(count, f"u{len(streams)}")
    for stream in reversed(streams):  # the last holds the highest bits
        bits <<= 8 * (len(streams) > 1)
        bits |= _unpack(stream, count, count)
    return bits.view(f"i{len(streams)}")


def _gaps(where: Array) -> npt.NDArray[np.uint8]:
    """Unchanged words before each changed one; a byte of 255 adds 255 to the gap that the next byte ends."""
    gaps = np.diff(where, prepend=-1) - 1
    if gaps.max() < _ESCAPE:
        return gaps.astype(np.uint8)
    escapes = gaps // _ESCAPE
    ends = np.cumsum(escapes + 1) - 1
    coded = np.full(int(ends[-1]) + 1, _ESCAPE, np.uint8)
    coded[ends] = gaps - escapes * _ESCAPE
    return coded


def _indices(encoded: Encoded) -> npt.NDArray[np.int64]:
    coded = _unpack(encoded.streams[0], encoded.changed, encoded.changed + encoded.words // _ESCAPE)
    skipped = np.cumsum(coded, dtype=np.int64)
    if len(coded) > encoded.changed:
        skipped = skipped[coded != _ESCAPE]
    if len(skipped) != encoded.changed:
        raise ValueError(f"{len(skipped)} places for {encoded.changed} words")
    where = skipped + np.arange(encoded.changed)
    if len(where) and where[-1] >= encoded.words:
        raise ValueError(f"word {where[-1]} of {encoded.words}")
    return where
