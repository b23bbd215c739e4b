"""The version store: the exact weights of every published version that is still needed.

The store has one full copy of the weights, and the differences (deltas) between adjacent versions.
Each tensor is handled separately, so each process of a sharded trainer can store its own shards. At
each publication the store gets the list of versions that pending tokens still need, and drops the
others. The files in `versions/` of a run's folder are written and removed by
`unstale.durability.checkpoint`.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from unstale.weights.bits import (
    checksum,
    has_checksum,
    in_threads,
    on_side_stream,
    words,
)
from unstale.weights.codec import (
    Delta,
    apply_all,
    encode_all,
    file_parts,
    loads,
    merge,
    require_fit,
)

__all__ = ["Delta", "Update", "VersionStore"]

Update = Mapping[str, Tensor] | Delta
"""New weights for an engine: all weights of a version, or the delta from the engine's version."""


class VersionStore:
    """The weights of several versions: one full copy, and the deltas between adjacent versions.

    `move_to` applies deltas to turn the full copy into any stored version. If the tensors `movable`
    are given, they are the full copy: they are changed in place and may be on any device. Otherwise
    the store copies the first version.

    `begin_put` and `begin_keep` start their work in a thread of the store. Every other method first
    waits for this thread, and raises its error. `wait` and `delta` may be called from any thread.
    The other methods must be called one at a time.

    >>> store = VersionStore()
    >>> for version in range(4):
    ...     store.put(version, {"w": torch.full((1000,), float(version))})
    >>> store.keep({1}); store.versions
    (1, 3)
    >>> store.tensors(1)["w"].mean().item(), store.movable_bytes, store.bytes < 200
    (1.0, 4000, True)
    """

    def __init__(self, movable: Mapping[str, Tensor] | None = None) -> None:
        self._movable: dict[str, Tensor] = {}
        self._aliases: dict[str, str] = {}
        """Names of tied weights, each with the name under which its value is stored."""
        self._adopt(movable or {})
        self._versions: list[int] = []
        self._at = -1
        self._files: dict[int, bytearray] = {}
        """The delta to each stored version (except the first) from the one before, as a safetensors
        file. Checkpoints write these bytes without a copy.
        """
        self._deltas: dict[int, Delta] = {}
        """The delta to each stored version, as views of the bytes in `_files`."""
        self.encode_s = 0.0
        """Seconds spent on compression so far."""
        self._jobs: list[Future[None]] = []
        """The jobs of the store's thread that no method has waited for yet."""
        self._thread: ThreadPoolExecutor | None = None
        self._changing_jobs = Lock()

    def put(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Add the weights of a new version.

        If the version is stored already, the weights are compared instead. Raises ValueError if
        names, shapes or dtypes differ from the store's, if the version is older than the newest, or
        if it is stored with other weights.
        """
        self.begin_put(version, tensors)
        self.wait()

    def begin_put(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Begin to do what `put` does, in the store's thread.

        The tensors are not copied, so they must not change until `wait` has returned.
        """
        self._begin(partial(self._put, version, tensors), tensors)

    def begin_keep(self, live: Collection[int]) -> None:
        """Begin to do what `keep` does, in the store's thread."""
        self._begin(partial(self._keep, frozenset(live)), self._movable)

    def wait(self) -> None:
        """Wait until the store's thread has done its work, and raise its error.

        Afterwards the thread reads none of the tensors that were passed to it. If a job failed, the
        store is as it was before this job.
        """
        with self._changing_jobs:
            jobs = self._jobs
        try:
            if jobs:
                jobs[-1].result()  # or the error of a job before it
        finally:
            self._forget(jobs)

    def _begin(self, work: Callable[[], None], tensors: Mapping[str, Tensor]) -> None:
        """Queue a job that reads `tensors` for the store's thread.

        The job is skipped if an earlier one fails.
        """
        device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
        work = on_side_stream(work, device)
        with self._changing_jobs:
            before = self._jobs[-1] if self._jobs else None
            self._thread = self._thread or ThreadPoolExecutor(1, "versions")
            self._jobs = [*self._jobs, self._thread.submit(_after, before, work)]

    def _forget(self, jobs: "Sequence[Future[None]]") -> None:
        """Remove those of `jobs` that are finished from the list of jobs. End the thread if no job
        is left.

        Unfinished jobs stay, because a signal may end the wait for them early.
        """
        with self._changing_jobs:
            self._jobs = [job for job in self._jobs if job not in jobs or not job.done()]
            if not self._jobs and self._thread:
                self._thread.shutdown(wait=False)
                self._thread = None

    def _put(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        if not self._movable:
            self._adopt(tensors)
            self._movable = {name: tensor.cpu().clone() for name, tensor in self._movable.items()}
        wrong = self._misfits(tensors)
        if version in self._versions:
            self._move_to(version)
            if wrong := wrong or self._changed(tensors):
                raise ValueError(
                    f"version {version} is stored already, with other weights: {wrong[:4]} differ"
                )
            return
        if wrong:
            raise ValueError(f"version {version} does not fit the store's weights: {wrong[:4]}")
        if self._versions and version < self._versions[-1]:
            raise ValueError(f"version {version} is older than the newest, {self._versions[-1]}")
        began = time.perf_counter()
        self._add(version, {name: tensors[name] for name in self._movable})
        self.encode_s += time.perf_counter() - began

    def move_to(self, version: int) -> None:
        """Turn the store's full copy of the weights, in place, into those of `version`.

        Raises LookupError if the version is not stored.
        """
        self.wait()
        self._move_to(version)

    def _move_to(self, version: int) -> None:
        if version not in self._versions:
            raise LookupError(f"version {version} is not stored, only {self._versions}")
        if version == self._at:
            return
        here = self._versions.index(self._at)
        there = self._versions.index(version)
        step = 1 if there > here else -1
        for i in range(here, there, step):
            self._apply(self._versions[max(i, i + step)])
            self._at = self._versions[i + step]

    def tensors(self, version: int) -> Mapping[str, Tensor]:
        """Return the weights of `version`, for reading only.

        The next `move_to` or `put` changes the tensors. Raises LookupError if the version is not
        stored.
        """
        self.move_to(version)
        return self._named()

    def keep(self, live: Collection[int]) -> None:
        """Drop all versions that are not in `live`, except the newest.

        The deltas before and after a dropped version become one.
        """
        self.begin_keep(live)
        self.wait()

    def _keep(self, live: Collection[int]) -> None:
        kept = [
            version
            for version in self._versions
            if version in live or version == self._versions[-1]
        ]
        if kept == self._versions:
            return
        if self._at not in kept:
            self._move_to(min(kept, key=lambda version: abs(version - self._at)))
        for before, after in pairwise(kept):
            links = [version for version in self._versions if before < version <= after]
            if len(links) > 1:
                self._shelve(self._merge(before, links))
        for version in {kept[0], *self._versions} - set(kept[1:]):
            self._files.pop(version, None)
            self._deltas.pop(version, None)
        self._versions = kept

    def delta(self, version: int) -> Delta:
        """Return the delta to `version` from the stored version before it.

        Raises LookupError for the first version, and for one that is not stored.
        """
        self.wait()
        if version not in self._versions[1:]:
            raise LookupError(f"no delta leads to version {version}: kept {self._versions}")
        return self._deltas[version]

    @property
    def versions(self) -> tuple[int, ...]:
        self.wait()
        return tuple(self._versions)

    @property
    def at(self) -> int:
        """The version whose weights the full copy has at present. -1 before the first."""
        self.wait()
        return self._at

    @property
    def bytes(self) -> int:
        """The size of all deltas in bytes, without the full copy."""
        self.wait()
        return sum(delta.nbytes for delta in self._deltas.values())

    @property
    def movable_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._movable.values())

    def state(self) -> Mapping[str, Any]:
        """Return the contents of the store, for a checkpoint.

        A delta is a uint8 tensor: the bytes of a safetensors file. Nothing is copied, so the
        returned full copy changes at the next `move_to` or `put`.
        """
        self.wait()
        return {
            "at": self._at,
            "versions": list(self._versions),
            "aliases": dict(self._aliases),
            "movable": dict(self._movable),
            "checksum": checksum(self._movable),
            "shelf": {
                version: torch.frombuffer(file, dtype=torch.uint8)
                for version, file in self._files.items()
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load the contents of a store from a checkpoint. `state` is a result of the method
        `state`.

        Raises ValueError if the contents are damaged, or do not fit the full copy.
        """
        self.wait()
        if not self._movable:
            self._aliases = dict(state["aliases"])
            self._movable = {name: tensor.clone() for name, tensor in state["movable"].items()}
        movable = state["movable"]
        wrong = self._misfits(movable | {a: movable[name] for a, name in state["aliases"].items()})
        if wrong:
            raise ValueError(f"the state does not fit the store's weights: {wrong[:4]}")
        deltas = {
            int(version): loads(file.numpy().tobytes()) for version, file in state["shelf"].items()
        }
        self._check_chain(deltas, state)
        for name, tensor in self._movable.items():
            words(tensor).copy_(words(state["movable"][name]))
        self._files, self._deltas = {}, {}
        for delta in deltas.values():
            self._shelve(delta)
        self._versions = list(state["versions"])
        self._at = state["at"]
        self._check_copy(state["checksum"])

    def close(self) -> None:
        """Drop all versions. Raises an error of the store's thread that no call has raised yet."""
        try:
            self.wait()
        finally:
            self._files, self._deltas = {}, {}
            self._versions = []
            self._at = -1

    def _add(self, version: int, weights: Mapping[str, Tensor]) -> None:
        if self._versions:
            newest = self._versions[-1]
            self._move_to(newest)
            encoded = encode_all(self._movable, weights, weights)
            self._shelve(Delta(newest, version, checksum(weights), encoded))
        for name, tensor in weights.items():
            words(self._movable[name]).copy_(words(tensor))
        self._versions.append(version)
        self._at = version

    def _shelve(self, delta: Delta) -> None:
        file = bytearray().join(file_parts(delta))
        self._files[delta.version] = file
        self._deltas[delta.version] = loads(memoryview(file))

    def _apply(self, version: int) -> None:
        targets = {name: words(tensor) for name, tensor in self._movable.items()}
        apply_all(self._deltas[version].tensors, targets)

    def _merge(self, before: int, links: list[int]) -> Delta:
        """Combine the deltas to the successive versions `links`, from `before` to the last."""
        deltas = [self._deltas[version] for version in links]
        merged = in_threads(
            lambda name: merge([delta.tensors[name] for delta in deltas]),
            [*self._movable],
            [tensor.nbytes for tensor in self._movable.values()],
        )
        tensors = dict(zip(self._movable, merged, strict=True))
        return Delta(before, links[-1], deltas[-1].checksum, tensors)

    def _check_chain(self, deltas: Mapping[int, Delta], state: Mapping[str, Any]) -> None:
        """Raise ValueError unless the deltas lead from each stored version to the next."""
        versions = state["versions"]
        at = state["at"]
        links = [(after, before, after) for before, after in pairwise(versions)]
        actual = sorted((version, delta.base, delta.version) for version, delta in deltas.items())
        if actual != links or versions != sorted(set(versions)):
            raise ValueError(
                f"the state is not whole: its deltas (key, base, version) are {actual}, not {links}"
            )
        if at not in (versions or [-1]):
            raise ValueError(f"the state's copy is of version {at}, which is not in {versions}")
        tensors = {name: state["movable"][name] for name in self._movable}
        for delta in deltas.values():
            require_fit(delta, tensors)

    def _check_copy(self, written: str) -> None:
        """Raise ValueError unless the full copy has exactly the weights of its version.

        Its checksum must equal `written`, which was saved with the copy, and the checksum in the
        delta to its version. No delta leads to the first version. A copy of the first version is
        turned into the second one, checked, and turned back.
        """
        at = self._at
        with_delta = self._deltas
        sound = has_checksum(self._movable, written)
        if with_delta and sound:
            self.move_to(at if at in with_delta else self._versions[1])
            sound = has_checksum(self._movable, self._deltas[self._at].checksum)
            self.move_to(at)
        if not sound:
            raise ValueError(f"the state's copy is not version {at}: the checksum differs")

    def _adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Use these tensors as the full copy of the weights. Tied tensors are stored once."""
        first: dict[Any, str] = {}
        for name, tensor in tensors.items():
            memory = (
                (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
                if tensor.numel()
                else name
            )
            if first.setdefault(memory, name) == name:
                self._movable[name] = tensor.detach()
            else:
                self._aliases[name] = first[memory]

    def _named(self) -> dict[str, Tensor]:
        return self._movable | {alias: self._movable[name] for alias, name in self._aliases.items()}

    def _misfits(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Return the names of tensors that do not fit the store's weights.

        Such tensors are missing or unknown, have another shape or dtype, or differ from each other
        although their weights are tied in the store.
        """
        current = self._named()
        wrong = current.keys() ^ tensors.keys()
        for name in current.keys() & tensors.keys():
            ours, theirs = current[name], tensors[name]
            if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
                wrong.add(name)
        if wrong:
            return sorted(wrong)
        return [
            alias
            for alias, name in self._aliases.items()
            if not torch.equal(words(tensors[alias]), words(tensors[name]))
        ]

    def _changed(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Return the names of the tensors whose bits differ from those of the full copy."""
        return [
            name
            for name, current in self._movable.items()
            if not torch.equal(words(current), words(tensors[name]).to(current.device))
        ]


def _after(before: "Future[None] | None", work: Callable[[], None]) -> None:
    """Do `work`. If the job `before` has failed, raise its error instead."""
    if before is not None:
        before.result()
    work()
