"""Published weights in Ray's object store, from which engine hosts fetch what they lack."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unstale.cluster.session import import_ray
from unstale.weights.child_process import Bytes
from unstale.weights.codec import dumps, file_of
from unstale.weights.publish import PostedWeights
from unstale.weights.store import Delta

Reference = Any
"""A reference to an object in Ray's store: a list of arrays of bytes, one after the other."""


def put(parts: Sequence[Bytes]) -> Reference:
    """Put bytes that are given in parts into the object store. Copies them once."""
    ray = import_ray()
    return ray.put([np.frombuffer(part, np.uint8) for part in parts if len(part)])


class VersionOfWeights(PostedWeights):
    """The weights of one version. Engine hosts call `objects`; others read it as full weights."""

    def __init__(self, posts: "WeightPosts", version: int, nbytes: int = 0) -> None:
        self.nbytes = nbytes
        self._posts = posts
        self._version = version
        self._weights: Mapping[str, Tensor] | None = None

    def objects(self, held: int) -> tuple[Reference | None, list[Reference]]:
        """Return what leads from version `held` to this one: full weights or None, and deltas.

        May read the weights from disk, so call it in a thread. Raises LookupError if this version
        is not on disk any more.
        """
        return self._posts.objects(held, self._version)

    def _read(self) -> Mapping[str, Tensor]:
        if self._weights is None:
            self._weights = self._posts.read(self._version)
        return self._weights

    def __getitem__(self, name: str) -> Tensor:
        return self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())


class WeightPosts:
    """The newest versions in Ray's object store: deltas, and full weights while they are needed.

    `read` returns the full weights of a version on disk. They are posted in the precision `dtype`.
    Deltas are kept until together they exceed the full weights. Full weights are kept until the
    next version is posted; a host that needs them later gets them from disk.
    """

    def __init__(self, read: Callable[[int], Mapping[str, Tensor]], *, dtype: torch.dtype) -> None:
        self._read_from_disk = read
        self._dtype = dtype
        self._deltas: list[tuple[Delta, Reference]] = []
        """A chain: each begins at the version to which the one before leads."""
        self._full: tuple[int, Reference] | None = None
        self._full_bytes = 0
        self._lock = threading.Lock()
        """Guards the fields. It is never held during a transfer."""
        self._reading = threading.Lock()
        """Held by the thread that reads full weights from disk."""

    def post(
        self, version: int, weights: Mapping[str, Tensor], delta: Delta | None
    ) -> VersionOfWeights:
        """Put a version into the store: its delta if there is one, otherwise all its weights."""
        if delta is None:
            self._post_full(version, weights)
            return VersionOfWeights(self, version, self._full_bytes)
        reference = put([dumps(delta)])
        with self._lock:
            self._full = None
            if self._deltas and self._deltas[-1][0].version != delta.base:
                self._deltas.clear()
            self._deltas.append((delta, reference))
            while sum(each.nbytes for each, _ in self._deltas) > self._full_bytes > 0:
                del self._deltas[0]
        return VersionOfWeights(self, version, delta.nbytes)

    def at(self, version: int) -> VersionOfWeights:
        """Return a version that was posted, or that only the disk has."""
        return VersionOfWeights(self, version)

    def read(self, version: int) -> dict[str, Tensor]:
        """Read the full weights of a version from disk."""
        weights = self._read_from_disk(version)
        return {name: tensor.detach().to(self._dtype) for name, tensor in weights.items()}

    def objects(self, held: int, version: int) -> tuple[Reference | None, list[Reference]]:
        """Return full weights or None, and the deltas after them that lead to `version`."""
        with self._lock:
            found = self._find(held, version)
        if found is not None:
            return found
        with self._reading:
            with self._lock:  # another thread may have read them meanwhile
                found = self._find(held, version)
            if found is not None:
                return found
            reference = put(file_of(self.read(version)))
            with self._lock:
                newest = self._deltas[-1][0].version if self._deltas else version
                if version >= newest:
                    self._full = version, reference
        return reference, []

    def _post_full(self, version: int, weights: Mapping[str, Tensor]) -> None:
        cast = {name: tensor.detach().to(self._dtype) for name, tensor in weights.items()}
        reference = put(file_of(cast))
        with self._lock:
            self._deltas.clear()
            self._full = version, reference
            self._full_bytes = sum(tensor.nbytes for tensor in cast.values())

    def _find(self, held: int, version: int) -> tuple[Reference | None, list[Reference]] | None:
        deltas = self._path(held, version)
        if deltas is not None:
            return None, deltas
        if self._full is None:
            return None
        deltas = self._path(self._full[0], version)
        return None if deltas is None else (self._full[1], deltas)

    def _path(self, held: int, version: int) -> list[Reference] | None:
        """Return the deltas from version `held` to `version`, None if they are not in the store."""
        if held == version:
            return []
        versions = [delta.base for delta, _ in self._deltas[:1]]
        versions += [delta.version for delta, _ in self._deltas]
        if not (held in versions and version in versions and held < version):
            return None
        steps = self._deltas[versions.index(held) : versions.index(version)]
        return [reference for _, reference in steps]
