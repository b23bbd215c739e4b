"""The version store: the published weights of every version that somebody still needs, bit for bit.

One copy of the weights is moved from version to version; beside it only the differences between neighbours are kept.
Every operation is on one tensor's own words, so a shard can be kept by the rank that holds it.
"""

import time
from collections.abc import Collection, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from unstale.weights.codec import (
    Delta,
    apply,
    check_fit,
    checksum,
    dumps,
    encode,
    loads,
    whole,
    words,
)
from unstale.weights.shelf import Shelf

__all__ = ["Delta", "StoreFull", "Update", "VersionStore"]

Update = Mapping[str, Tensor] | Delta
"""All weights of a version, or the difference from the version that the receiver holds."""

_GB = 1e9


class StoreFull(MemoryError):
    """A version does not fit the store's memory limit. The store is as it was."""


class VersionStore:
    """A chain of versions, oldest first, and one movable copy of the weights that stands at one of them.

    The movable copy is moved in place: `movable` are its tensors (a twin's `weights()`, on any device), or the store
    makes a copy of its own when the first version comes. With `storage="full"` every version is a copy by itself.
    What is kept is in memory, at most `memory_gb` of it (0 has no limit), or in files under `folder`.

    >>> store = VersionStore()
    >>> for version in range(4):
    ...     store.put(version, {"w": torch.full((1000,), float(version))})
    >>> store.keep({1}); store.versions
    (1, 3)
    >>> store.tensors(1)["w"].mean().item(), store.movable_bytes, store.bytes < 200
    (1.0, 4000, True)
    """

    def __init__(
        self,
        movable: Mapping[str, Tensor] | None = None,
        *,
        storage: Literal["delta", "full"] = "delta",
        memory_gb: float = 0.0,
        folder: Path | None = None,
    ) -> None:
        self._movable: dict[str, Tensor] = {}
        self._aliases: dict[str, str] = {}
        """Further names of a movable tensor: tied weights are held once."""
        self._own(movable or {})
        self._full = storage == "full"
        self._memory_gb = memory_gb
        self._versions: list[int] = []
        self._at = -1
        self._shelf = Shelf(folder)
        """By version: the delta from its predecessor, which the first has not; or, if full, the weights themselves."""
        self.encode_s = 0.0
        """Seconds that forming what is kept has taken."""

    def put(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep the weights of the newest version. One difference is formed, from the version before.

        A version never changes: putting it again is allowed only with the same bits. Raises `StoreFull`.
        """
        if not self._movable:
            self._own(tensors)
            self._movable = {name: tensor.cpu().clone() for name, tensor in self._movable.items()}
        wrong = self._misfits(tensors)
        if version in self._versions:
            self.move_to(version)
            if wrong := wrong or self._changed(tensors):
                raise ValueError(
                    f"version {version} is published already, with other weights: {wrong[:4]} differ"
                )
            return
        if wrong:
            raise ValueError(f"version {version} does not fit the store's weights: {wrong[:4]}")
        if self._versions and version < self._versions[-1]:
            raise ValueError(
                f"version {version} comes after version {self._versions[-1]}: versions only grow"
            )
        began = time.perf_counter()
        self._add(version, {name: tensors[name] for name in self._movable})
        self.encode_s += time.perf_counter() - began

    def move_to(self, version: int) -> None:
        """Bring the movable copy there. LookupError if the version is gone."""
        if version not in self._versions:
            raise LookupError(
                f"version {version} is gone, kept {self._versions}: it was in no `keep` since it was published"
            )
        if version == self._at:
            return
        if self._full:
            for target in self._movable.values():
                words(target).zero_()
            self._apply(version)
            self._at = version
            return
        here, there = self._versions.index(self._at), self._versions.index(version)
        step = 1 if there > here else -1
        for i in range(here, there, step):
            self._apply(self._versions[max(i, i + step)])
            self._at = self._versions[i + step]

    def tensors(self, version: int) -> Mapping[str, Tensor]:
        """The weights of `version`, to be read and not written, until the copy moves on. LookupError if gone."""
        self.move_to(version)
        return self._named()

    def keep(self, live: Collection[int]) -> None:
        """Drop every version that is not in `live`, but for the newest; deltas that meet there become one."""
        kept = [
            version
            for version in self._versions
            if version in live or version == self._versions[-1]
        ]
        if kept == self._versions:
            return
        if self._at not in kept:
            self.move_to(min(kept, key=lambda version: abs(version - self._at)))
        if not self._full:
            for before, after in pairwise(kept):
                links = [version for version in self._versions if before < version <= after]
                if len(links) > 1:
                    self._shelf.put(after, self._merge(before, links))
            self._shelf.drop(kept[0])
        for version in set(self._versions) - set(kept):
            self._shelf.drop(version)
        self._versions = kept

    def delta(self, version: int) -> Delta:
        """What leads to `version` from the version before it in the chain. LookupError if there is none."""
        if self._full or version not in self._versions[1:]:
            raise LookupError(f"no delta leads to version {version}: kept {self._versions}")
        return self._shelf.get(version)

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(self._versions)

    @property
    def at(self) -> int:
        """Where the movable copy stands; -1 before the first version."""
        return self._at

    @property
    def bytes(self) -> int:
        """Memory that the kept versions take, the movable copy apart."""
        return 0 if self._shelf.in_files else self._shelf.bytes

    @property
    def encoded_bytes(self) -> int:
        """What is kept beside the movable copy, in memory or in files."""
        return self._shelf.bytes

    @property
    def movable_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._movable.values())

    def state(self) -> Mapping[str, Any]:
        """Tensors and numbers; deltas as bytes of safetensors files."""
        return {
            "full": self._full,
            "at": self._at,
            "versions": list(self._versions),
            "aliases": dict(self._aliases),
            "movable": {name: tensor.clone() for name, tensor in self._movable.items()},
            "checksum": checksum(self._movable),
            "shelf": {
                version: torch.frombuffer(
                    bytearray(dumps(self._shelf.get(version))), dtype=torch.uint8
                )
                for version in self._shelf.versions
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """From a store of the same storage. The movable copy goes where it was. ValueError for what cannot be one."""
        if state["full"] != self._full:
            raise ValueError(
                "a store goes on from a state of the same storage: keep old_logps.storage as it was"
            )
        if not self._movable:
            self._aliases = dict(state["aliases"])
            self._movable = {name: tensor.clone() for name, tensor in state["movable"].items()}
        if wrong := self._misfits(
            state["movable"] | {a: state["movable"][name] for a, name in state["aliases"].items()}
        ):
            raise ValueError(f"the state does not fit the store's weights: {wrong[:4]}")
        deltas = {
            int(version): loads(held.numpy().tobytes()) for version, held in state["shelf"].items()
        }
        self._check_chain(deltas, state)
        for name, tensor in self._movable.items():
            words(tensor).copy_(words(state["movable"][name]))
        self._shelf.close()
        for version, delta in deltas.items():
            self._shelf.put(version, delta)
        self._versions, self._at = list(state["versions"]), state["at"]
        self._check_copy(state["checksum"])

    def close(self) -> None:
        """Forget every version, and remove the files."""
        self._shelf.close()
        self._versions, self._at = [], -1

    def _add(self, version: int, given: Mapping[str, Tensor]) -> None:
        if self._full:
            self._shelve(
                Delta(-1, version, checksum(given), {name: whole(t) for name, t in given.items()})
            )
        elif self._versions:
            newest = self._versions[-1]
            self.move_to(newest)
            differences = {
                name: encode(self._difference(name, tensor)) for name, tensor in given.items()
            }
            self._shelve(Delta(newest, version, checksum(given), differences))
        for name, tensor in given.items():
            words(self._movable[name]).copy_(words(tensor))
        self._versions.append(version)
        self._at = version

    def _shelve(self, delta: Delta) -> None:
        resident = self._shelf.bytes + delta.nbytes
        if not self._shelf.in_files and 0 < self._memory_gb * _GB < resident:
            raise StoreFull(
                f"version {delta.version} would take the version store to {resident:,} bytes, over the limit of "
                f"{self._memory_gb:g} GB: versions {self._versions} are still needed. Raise old_logps.memory_gb, set "
                "old_logps.spill to keep them in files, or lower schedule.max_staleness to need fewer"
            )
        self._shelf.put(delta.version, delta)

    def _apply(self, version: int) -> None:
        for name, encoded in self._shelf.get(version).tensors.items():
            apply(encoded, words(self._movable[name]))

    def _merge(self, before: int, links: list[int]) -> Delta:
        """One delta in place of those that lead to each of `links` in turn."""
        deltas = [self._shelf.get(version) for version in links]
        merged = {}
        for name, tensor in self._movable.items():
            difference = torch.zeros_like(
                words(tensor), device="cpu", memory_format=torch.contiguous_format
            )
            for delta in deltas:
                apply(delta.tensors[name], difference)
            merged[name] = encode(difference)
        return Delta(before, links[-1], deltas[-1].checksum, merged)

    def _check_chain(self, deltas: Mapping[int, Delta], state: Mapping[str, Any]) -> None:
        """A state is whole: each version but the first has what leads to it, for the weights that there are."""
        versions, at = state["versions"], state["at"]
        pairs = [(-1, version) for version in versions] if self._full else list(pairwise(versions))
        links = [(after, before, after) for before, after in pairs]
        found = sorted((version, delta.base, delta.version) for version, delta in deltas.items())
        if found != links or versions != sorted(set(versions)):
            raise ValueError(
                f"the state is not whole: {found} where {links} should lead to each, from and to"
            )
        if at not in (versions or [-1]):
            raise ValueError(
                f"the state's copy stands at version {at}, which is none of {versions}"
            )
        own = {name: state["movable"][name] for name in self._movable}
        for version, delta in deltas.items():
            if delta.tensors.keys() != own.keys():
                raise ValueError(
                    f"version {version} has other weights: {sorted(delta.tensors.keys() ^ own.keys())[:4]}"
                )
            for name, encoded in delta.tensors.items():
                check_fit(encoded, words(own[name]))

    def _check_copy(self, written: int) -> None:
        """The copy is the version that it stands at: nothing says so of the first, so one step is taken from there."""
        at, known = self._at, self._shelf.versions
        sound = checksum(self._movable) == written
        if known and sound:
            self.move_to(at if at in known else self._versions[1])
            sound = checksum(self._movable) == self._shelf.get(self._at).checksum
            self.move_to(at)
        if not sound:
            raise ValueError(f"the state's copy is not version {at}: the checksum differs")

    def _difference(self, name: str, tensor: Tensor) -> Tensor:
        mine = words(self._movable[name])
        return mine ^ words(tensor).to(mine.device)

    def _own(self, tensors: Mapping[str, Tensor]) -> None:
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
        """Names on one side only, of another shape or dtype, or no longer tied."""
        own = self._named()
        other = {
            name for name in own.keys() & tensors.keys()
            if (own[name].shape, own[name].dtype) != (tensors[name].shape, tensors[name].dtype)
        }  # fmt: skip
        if wrong := other | (own.keys() ^ tensors.keys()):
            return sorted(wrong)
        return [
            a
            for a, name in self._aliases.items()
            if not torch.equal(words(tensors[a]), words(tensors[name]))
        ]

    def _changed(self, tensors: Mapping[str, Tensor]) -> list[str]:
        return [
            name for name, mine in self._movable.items()
            if not torch.equal(words(mine), words(tensors[name]).to(mine.device))
        ]  # fmt: skip
