"""Hand a version to the engines. An engine is never left between versions."""

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import torch
from torch import Tensor

from unstale.weights.store import Delta, Update, VersionStore


class WeightReceiver(Protocol):
    """The part of an engine that takes weights (see `unstale.engines.Engine`)."""

    @property
    def takes_deltas(self) -> bool: ...

    async def interrupt(self) -> None: ...

    async def load(self, update: Update, version: int) -> None: ...

    async def resume(self) -> None: ...


class VersionedWeights(Protocol):
    """The weights of a version: those of a `Policy`, or of a `Trainer`."""

    @property
    def version(self) -> int: ...

    def weights(self) -> Mapping[str, Tensor]:
        """Return the forward weights by name. They are the live tensors."""
        ...


class Publisher(Protocol):
    """Brings the newest version to every engine."""

    bytes: int
    """Of what was last prepared to travel."""

    def prepare(self, source: VersionedWeights, live: Collection[int] = ()) -> None:
        """In the trainer's thread: what will travel, made while generation goes on.

        `live` are the older versions that somebody still needs.
        """
        ...

    async def publish(self) -> None:
        """Bring what was prepared to the engines. Generation goes on, under that version, when it returns."""
        ...


Put = Callable[[int, Mapping[str, Tensor], Delta | None], None]
"""Keeps a version: its forward weights, and what leads to them from the version before, if that is known."""


def _nowhere(version: int, weights: Mapping[str, Tensor], delta: Delta | None) -> None:
    """For a run that leaves no folder."""


class DirectPublisher:
    """Weights handed straight to one engine, in the engine's own precision; adapters as they are, for it to merge.

    With the route's version `store`, whose weights are in that precision, the one delta of a version that is formed is
    put there, and it is what travels: if the engine takes deltas and holds the version before, and it is the smaller.
    `put` brings every version to the disk before the engine gets it.
    """

    def __init__(
        self,
        engine: WeightReceiver,
        *,
        dtype: torch.dtype,
        store: VersionStore | None = None,
        put: Put = _nowhere,
    ) -> None:
        self.bytes = 0
        self._engine = engine
        self._dtype = dtype
        self._store = store
        self._put = put
        self._loaded = -1
        """What the engine holds."""
        self._prepared: tuple[Update, int] | None = None

    def prepare(self, source: VersionedWeights, live: Collection[int] = ()) -> None:
        weights = source.weights()
        delta = self._delta(source.version, weights, live)
        self._put(source.version, weights, delta)
        update = delta or _cast(weights, self._dtype)
        self.bytes = update.nbytes if isinstance(update, Delta) else _size(update)
        self._prepared = update, source.version

    async def publish(self) -> None:
        """Interrupt, load, resume. If loading fails the engine stays interrupted and the error ends the run."""
        if self._prepared is None:
            raise RuntimeError("nothing to publish: call prepare first")
        (update, version), self._prepared = self._prepared, None
        await self._engine.interrupt()
        await self._engine.load(update, version)
        self._loaded = version
        await self._engine.resume()

    def _delta(
        self, version: int, weights: Mapping[str, Tensor], live: Collection[int]
    ) -> Delta | None:
        if self._store is None:
            return None
        self._store.keep(live)  # what nobody needs must not count against the memory limit
        self._store.put(version, weights)
        older = self._store.versions[: self._store.versions.index(version)]
        if not self._engine.takes_deltas or self._loaded not in older:
            return None
        delta = self._store.delta(version)
        return delta if delta.base == self._loaded and delta.nbytes < _size(weights) else None


def _size(weights: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in weights.values())


def _cast(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies, in main memory: all engines take them from there."""
    return {name: tensor.detach().to("cpu", dtype, copy=True) for name, tensor in weights.items()}
