"""Published weights in Ray's object store, from which engine hosts (machines with engines) fetch
them.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from unstale.cluster.weight_objects import PostedStep, Reference, put, put_delta
from unstale.weights.codec import file_header, file_of
from unstale.weights.publish import PostedWeights, num_bytes
from unstale.weights.store import Delta


class VersionOfWeights(PostedWeights):
    """The weights of one version, in Ray's object store.

    Engine hosts fetch `objects`. Other code uses the object as a mapping of full weights by name,
    which are read from disk.
    """

    def __init__(self, posts: "WeightPosts", version: int, nbytes: int = 0) -> None:
        self.nbytes = nbytes
        self._posts = posts
        self._version = version
        self._weights: Mapping[str, Tensor] | None = None

    def objects(self, held: int) -> tuple[Reference | None, list[Reference]]:
        """Return references to the objects from which a host that has version `held` makes this
        version.

        They are full weights and deltas to apply to them in order. If the full weights are None,
        the deltas apply to version `held`. The call may read weights from disk, so make it in a
        thread. Raises LookupError if this version is no longer on disk.
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

    `read` returns the full weights of a version on disk. They are stored in the precision `dtype`.
    The oldest deltas are dropped once all together are larger than the full weights. Full weights
    are kept until the next version is added. A host that needs them later gets them from disk.
    """

    def __init__(self, read: Callable[[int], Mapping[str, Tensor]], *, dtype: torch.dtype) -> None:
        self._read_from_disk = read
        self._dtype = dtype
        self._steps: list[PostedStep] = []
        """A chain of deltas: each one leads from the version at which the one before it ends."""
        self._full: tuple[int, Reference, Sequence[Reference]] | None = None
        """The version of the full weights in the store, a reference to their file, and the deltas
        that lead from the file's content to this version.
        """
        self._full_bytes = 0
        self._lock = threading.Lock()
        """A lock that guards the fields of this object. No thread holds it during a transfer."""
        self._reading = threading.Lock()
        """A lock that a thread holds while it reads full weights from disk."""

    def post(
        self, version: int, weights: Mapping[str, Tensor], delta: Delta | None
    ) -> VersionOfWeights:
        """Put a version into the store: as `delta` from the previous version, or, if that is None,
        as a whole.
        """
        if delta is None:
            cast = {name: tensor.detach().to(self._dtype) for name, tensor in weights.items()}
            return self._post_full(version, put(file_of(cast)), [], num_bytes(cast))
        return self._post(PostedStep(delta.base, version, delta.nbytes, [put_delta(delta)]))

    def post_parts(self, step: PostedStep, layout: Mapping[str, Tensor]) -> VersionOfWeights:
        """Add a version whose parts the trainer ranks have already put into the store.

        `layout` has a tensor with the name, shape and dtype of each weight.
        """
        if step.base != -1:
            return self._post(step)
        zeros = put([file_header(layout)[0]])
        return self._post_full(step.version, zeros, step.deltas, num_bytes(layout))

    def at(self, version: int) -> VersionOfWeights:
        """Return the weights of a version that is in the store or only on disk."""
        return VersionOfWeights(self, version)

    def read(self, version: int) -> dict[str, Tensor]:
        """Read the full weights of a version from disk."""
        weights = self._read_from_disk(version)
        return {name: tensor.detach().to(self._dtype) for name, tensor in weights.items()}

    def objects(self, held: int, version: int) -> tuple[Reference | None, list[Reference]]:
        """Return references to the objects from which a host that has version `held` makes
        `version`.

        They are full weights and deltas to apply to them in order. If the full weights are None,
        the deltas apply to version `held`. Weights that are not in the store are read from disk.
        """
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
                newest = self._steps[-1].version if self._steps else version
                if version >= newest:
                    self._full = version, reference, []
        return reference, []

    def _post(self, step: PostedStep) -> VersionOfWeights:
        with self._lock:
            self._full = None
            if self._steps and self._steps[-1].version != step.base:
                self._steps.clear()
            self._steps.append(step)
            while sum(each.nbytes for each in self._steps) > self._full_bytes > 0:
                del self._steps[0]
        return VersionOfWeights(self, step.version, step.nbytes)

    def _post_full(
        self, version: int, file: Reference, deltas: Sequence[Reference], nbytes: int
    ) -> VersionOfWeights:
        with self._lock:
            self._steps.clear()
            self._full = version, file, deltas
            self._full_bytes = nbytes
        return VersionOfWeights(self, version, nbytes)

    def _find(self, held: int, version: int) -> tuple[Reference | None, list[Reference]] | None:
        deltas = self._path(held, version)
        if deltas is not None:
            return None, deltas
        if self._full is None:
            return None
        at, file, from_zeros = self._full
        deltas = self._path(at, version)
        return None if deltas is None else (file, [*from_zeros, *deltas])

    def _path(self, held: int, version: int) -> list[Reference] | None:
        """Return the deltas that lead from version `held` to `version`, or None if the store lacks
        one.
        """
        if held == version:
            return []
        versions = [step.base for step in self._steps[:1]]
        versions += [step.version for step in self._steps]
        if not (held in versions and version in versions and held < version):
            return None
        steps = self._steps[versions.index(held) : versions.index(version)]
        return [reference for step in steps for reference in step.deltas]
