"""The version store: the published weights of every version that somebody still needs, bit for bit."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor


class VersionStore:
    """Full copies, one per version, on `device`. What `tensors` gives back equals what was `put`, bitwise.

    >>> store = VersionStore()
    >>> store.put(0, {"w": torch.zeros(2)})
    >>> store.put(1, {"w": torch.ones(2)})
    >>> store.keep({0}); store.versions
    (0, 1)
    >>> store.keep({1}); store.versions, store.bytes
    ((1,), 8)
    """

    def __init__(self, *, device: str = "cpu") -> None:
        self._device = torch.device(device)
        self._held: dict[int, dict[str, Tensor]] = {}

    def put(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep a copy. A version never changes: putting it again is allowed only with the same bits."""
        if version in self._held:
            _check_same(version, self._held[version], tensors)
            return
        self._held[version] = {
            name: torch.empty_like(tensor, device=self._device).copy_(tensor.detach())
            for name, tensor in tensors.items()
        }

    def tensors(self, version: int) -> Mapping[str, Tensor]:
        """The weights of `version`, to be read and not written. LookupError if they are gone."""
        if version not in self._held:
            raise LookupError(
                f"version {version} is gone, kept {list(self.versions)}: it was in no `keep` since it was published"
            )
        return self._held[version]

    def keep(self, live: Collection[int]) -> None:
        """Drop every version that is not in `live`, but for the newest."""
        newest = max(self._held, default=-1)
        self._held = {version: held for version, held in self._held.items() if version in live or version == newest}

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(sorted(self._held))

    @property
    def bytes(self) -> int:
        """Memory that the kept versions take."""
        return sum(tensor.nbytes for held in self._held.values() for tensor in held.values())

    def state(self) -> Mapping[str, Any]:
        return {"versions": {version: dict(held) for version, held in self._held.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._held = {}
        for version, tensors in state["versions"].items():
            self.put(int(version), tensors)


def _check_same(version: int, held: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    changed = sorted(held.keys() ^ given.keys()) or [
        name for name, tensor in held.items() if not _same_bits(tensor, given[name])
    ]
    if changed:
        raise ValueError(f"version {version} is published already, with other weights: {changed[:4]} differ")


def _same_bits(one: Tensor, two: Tensor) -> bool:
    """Bytes compared as bytes: NaN equals itself, and -0.0 is not 0.0."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    return torch.equal(*(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (one, two)))
