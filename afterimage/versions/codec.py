"""The difference of two versions, bit for bit, in few bytes: XOR of words, each tensor written in the smallest way.

    sparse   where words differ (gaps, as bytes) and how (byte planes), each stream compressed by zstandard
    packed   the byte planes of all words, compressed: for differences that are everywhere and small
    raw      the words as they are: no larger than the tensor, and XOR all the same

XOR is its own inverse: what leads from one version to the next leads back. Words are integers of the element's size,
so that NaN payloads, -0.0 and denormals are what they are. Coding is done on the CPU, one tensor at a time.
"""

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import zstandard
from safetensors.numpy import save
from torch import Tensor

SPARSE_BELOW = 2 / 3
"""Share of changed words above which `sparse` is not tried: it would be slow and lose."""
PACKED_ABOVE = 1 / 8
"""Share of changed words below which `packed` is not tried: it would cost most of the time and lose."""

_ENTROPY = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6)
"""What is left to find is the skew of single bytes: looking hard for repeats takes longer and gives more bytes."""
_ESCAPE = 255
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HEADER = struct.Struct("<Q")

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Encoded:
    """The difference of one tensor."""

    kind: Literal["sparse", "packed", "raw"]
    words: int
    width: int
    """Bytes of a word."""
    changed: int
    """Words that differ."""
    streams: tuple[bytes, ...]

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
        crc = zlib.crc32(words(tensors[name]).cpu().contiguous().numpy().reshape(-1).view(np.uint8).data, crc)
    return crc


def encode(difference: Tensor) -> Encoded:
    """The smallest of three ways to write an XOR of `words`.

    >>> encode(torch.tensor([0, 0, 3], dtype=torch.int16)).kind
    'raw'
    >>> encode(torch.arange(4096, dtype=torch.int16) % 100 // 99).kind
    'sparse'
    """
    flat = difference.cpu().contiguous().numpy().reshape(-1)
    where = flat.nonzero()[0]
    share = len(where) / max(1, len(flat))
    written: list[tuple[Literal["sparse", "packed"], tuple[bytes, ...]]] = []
    if share <= SPARSE_BELOW:
        written.append(("sparse", (_pack(_gaps(where)), *_planes(flat[where])) if len(where) else ()))
    if share >= PACKED_ABOVE:
        written.append(("packed", _planes(flat)))
    kind, streams = min(written, key=lambda way: sum(map(len, way[1])))
    shape = {"words": len(flat), "width": flat.itemsize, "changed": len(where)}
    if sum(map(len, streams)) >= flat.nbytes > 0:
        return Encoded("raw", streams=(flat.tobytes(),), **shape)
    return Encoded(kind, streams=streams, **shape)


def whole(tensor: Tensor) -> Encoded:
    """A tensor's own bits, not compressed: its difference from nothing."""
    flat = words(tensor).cpu().contiguous().numpy().reshape(-1)
    return Encoded("raw", len(flat), flat.itemsize, len(flat), (flat.tobytes(),) if len(flat) else ())


def apply(encoded: Encoded, target: Tensor) -> None:
    """XOR the difference into `target`, a tensor's `words`, in place."""
    _check_fit(encoded, target)
    if not encoded.streams:
        return
    flat = target.reshape(-1)
    match encoded.kind:
        case "sparse":
            where = torch.from_numpy(_indices(encoded)).to(flat.device)
            flat[where] ^= _unplane(encoded.streams[1:], encoded.width).to(flat.device)
        case "packed":
            flat ^= _unplane(encoded.streams, encoded.width).to(flat.device)
        case "raw":
            flat ^= torch.frombuffer(bytearray(encoded.streams[0]), dtype=target.dtype).to(flat.device)
    if not target.is_contiguous():
        target.copy_(flat.view(target.shape))


def advance(tensors: Mapping[str, Tensor], delta: Delta) -> None:
    """From the weights of `delta.base` to those of `delta.version`, in place.

    Raises ValueError if what comes out is not that version, bit for bit; the tensors are then as they were.
    """
    if tensors.keys() != delta.tensors.keys():
        raise ValueError(
            f"the delta has other weights than there are: {sorted(tensors.keys() ^ delta.tensors.keys())[:4]}"
        )
    targets = {name: words(tensor) for name, tensor in tensors.items()}
    for name, encoded in delta.tensors.items():
        _check_fit(encoded, targets[name])
    for name, encoded in delta.tensors.items():
        apply(encoded, targets[name])
    if checksum(tensors) != delta.checksum:
        for name, encoded in delta.tensors.items():
            apply(encoded, targets[name])
        raise ValueError(
            f"the delta from version {delta.base} does not lead to the weights of version {delta.version}: the "
            "checksum differs, so it was applied to other weights than it was formed from"
        )


def dumps(delta: Delta) -> bytes:
    """A safetensors file: one tensor of bytes per stream, all else in the header's metadata."""
    streams: dict[str, Array] = {}
    tensors = {}
    for name, encoded in delta.tensors.items():
        streams |= {f"{name}/{i}": np.frombuffer(stream, np.uint8) for i, stream in enumerate(encoded.streams)}
        tensors[name] = asdict(encoded) | {"streams": len(encoded.streams)}
    about = {"base": delta.base, "version": delta.version, "checksum": delta.checksum, "tensors": tensors}
    return save(streams, {"delta": json.dumps(about)})


def loads(data: bytes) -> Delta:
    """What `dumps` wrote."""
    (size,) = _HEADER.unpack_from(data)
    start = _HEADER.size + size
    header = json.loads(data[_HEADER.size : start])
    about = json.loads(header["__metadata__"]["delta"])
    tensors = {}
    for name, fields in about.pop("tensors").items():
        spans = [header[f"{name}/{i}"]["data_offsets"] for i in range(fields["streams"])]
        streams = tuple(data[start + first : start + last] for first, last in spans)
        tensors[name] = Encoded(**fields | {"streams": streams})
    return Delta(tensors=tensors, **about)


def _check_fit(encoded: Encoded, target: Tensor) -> None:
    if (encoded.words, encoded.width) != (target.numel(), target.element_size()):
        raise ValueError(
            f"a difference of {encoded.words} words of {encoded.width} bytes does not fit a tensor of "
            f"{target.numel()} words of {target.element_size()}"
        )


def _pack(array: Array) -> bytes:
    return zstandard.ZstdCompressor(compression_params=_ENTROPY).compress(np.ascontiguousarray(array).data)


def _unpack(stream: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(zstandard.ZstdDecompressor().decompress(stream), np.uint8)


def _planes(array: Array) -> tuple[bytes, ...]:
    """The first bytes of all words, then their second ones, and so on: each plane is skewed in its own way."""
    return tuple(_pack(plane) for plane in array.view(np.uint8).reshape(-1, array.itemsize).T)


def _unplane(streams: tuple[bytes, ...], width: int) -> Tensor:
    return torch.from_numpy(np.stack([_unpack(stream) for stream in streams], axis=1)).view(_WORDS[width]).squeeze(1)


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
    coded = _unpack(encoded.streams[0])
    skipped = np.cumsum(coded, dtype=np.int64)
    if len(coded) > encoded.changed:
        skipped = skipped[coded != _ESCAPE]
    return skipped + np.arange(encoded.changed)
