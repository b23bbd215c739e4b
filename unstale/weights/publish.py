"""Publication of a version of the weights: every engine loads it, and never mixes two versions."""

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from unstale.model.packed_weights import pack
from unstale.weights.bits import checksum
from unstale.weights.codec import encode_all
from unstale.weights.store import Delta, Update, VersionStore


class WeightReceiver(Protocol):
    """The methods of an engine (`unstale.engines.Engine`) by which it receives weights."""

    @property
    def takes_deltas(self) -> bool: ...

    async def stage(self, update: Update, version: int) -> None: ...

    async def interrupt(self) -> None: ...

    async def load(self, update: Update, version: int) -> None: ...

    async def resume(self) -> None: ...


class VersionedWeights(Protocol):
    """An object that has the weights of one version, such as a `Policy` or a `Trainer`."""

    @property
    def version(self) -> int: ...

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights of the forward pass by name, without a copy."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaInParts(Delta):
    """A delta in several parts, such as one from each trainer rank.

    The function `read` fetches the parts. The field `tensors` is empty.
    """

    read: Callable[[], Iterable[Delta]]
    """A function that fetches the parts and yields them one at a time, each as a delta."""


class Publisher(Protocol):
    """A sender of the newest version of the weights to every engine.

    It works in four steps: `begin`, `finish`, `stage` and `publish`.
    """

    bytes: int
    """Size in bytes of the update that was prepared last: whole weights, or a delta."""

    def begin(self, source: VersionedWeights, live: Collection[int] = ()) -> None:
        """Begin to prepare the update, in the trainer's thread, while engines still sample.

        The weights of `source` must not change before the version is published. `live` are the
        older versions that must be kept, because tokens that they sampled are still to be trained
        on.
        """
        ...

    def finish(self) -> None:
        """Finish the preparation that `begin` started.

        Call this in a thread other than the trainer's, which may compute log-probabilities in the
        meantime.
        """
        ...

    async def stage(self) -> None:
        """Send the prepared update to the engines while they still sample, so that the later `load`
        is short.
        """
        ...

    async def publish(self) -> None:
        """Load the prepared update into the engines, which then sample with the new version."""
        ...


Put = Callable[[int, Mapping[str, Tensor], Delta | None], None]
"""A function that saves a version to disk. Its arguments are the number of the version, its
weights, and the delta from the previous version, or None.
"""


class PostedWeights(Mapping[str, Tensor]):
    """The weights of a version, in a place from which engines on other machines fetch them."""

    nbytes: int
    """Number of bytes that an engine with the previous version must fetch."""


Post = Callable[[int, Mapping[str, Tensor], Delta | None], PostedWeights]
"""A function like `Put` that makes a version available to engines on other machines."""


KeepVersions = Callable[[Collection[int]], Awaitable[None]]
"""A function that receives versions, and makes engines drop the LoRA adapters of all other
versions.
"""


class DirectPublisher:
    """A publisher that passes weights to one engine, in the precision `dtype`.

    `store` keeps earlier versions for `old_logp`, and computes the delta: the compressed difference
    from the previous version. A delta that is smaller than the weights is passed to `put`, and to
    an engine that accepts deltas and has the previous version. `put` saves every version to disk
    before the engine loads it. With `post`, the engine receives the result of `post` and fetches
    the weights itself. With `in_place`, whole weights stay on the trainer's device. With `packed`,
    a format of `quantisation.FORMATS`, the engine receives quantised weights and their scales, and
    later versions as differences of these. `keep_versions` is called with the older versions that
    the engine must keep.
    """

    def __init__(  # noqa: PLR0913 - the options of a publication
        self,
        engine: WeightReceiver,
        *,
        dtype: torch.dtype,
        store: VersionStore | None = None,
        put: Put | None = None,
        post: Post | None = None,
        in_place: bool = False,
        packed: str = "none",
        keep_versions: KeepVersions | None = None,
    ) -> None:
        self.bytes = 0
        self._engine = engine
        self._dtype = dtype
        self._store = store
        self._put = put
        self._post = post
        self._device = None if in_place else "cpu"
        self._packed = packed
        self._last_packed: tuple[int, Mapping[str, Tensor]] = -1, {}
        """The version whose weights were quantised last, and its quantised weights with their
        scales. -1 before the first.
        """
        self._loaded = -1
        """The version of the weights that the engine has loaded. -1 before the first."""
        self._begun: tuple[int, Mapping[str, Tensor]] | None = None
        """The version whose publication is being prepared, and its weights. None for no version."""
        self._prepared: tuple[Update, int] | None = None
        self._keep_versions = keep_versions
        self._live: Collection[int] = ()
        """The older versions with sampled tokens that are not trained on yet."""

    def begin(self, source: VersionedWeights, live: Collection[int] = ()) -> None:
        self._live = live
        self._begun = version, weights = source.version, source.weights()
        if self._store is not None:
            # versions that are no longer needed must not count against the memory limit
            self._store.begin_keep(live)
            self._store.begin_put(version, weights)

    def finish(self) -> None:
        """Finish the preparation that `begin` started. Raises the errors of `VersionStore.put`."""
        if self._begun is None:
            return
        (version, weights), self._begun = self._begun, None
        delta = self._delta(version, weights)
        if self._put is not None:
            self._put(version, weights, delta)
        if self._post is not None:
            posted = self._post(version, weights, delta)
            update: Update = posted
            self.bytes = posted.nbytes
        else:
            if self._packed != "none":
                update = self._pack(version, weights)
            else:
                sent = delta if self._engine.takes_deltas else None
                update = sent or cast(weights, self._dtype, device=self._device)
            self.bytes = update.nbytes if isinstance(update, Delta) else num_bytes(update)
        self._prepared = update, version

    def prepare(self, source: VersionedWeights, live: Collection[int] = ()) -> None:
        """Do what `begin` and `finish` do, in the caller's thread."""
        self.begin(source, live)
        self.finish()

    async def stage(self) -> None:
        """Send the update to the engine before it is interrupted. If this fails, the engine still
        samples.
        """
        await self._engine.stage(*self._update())

    async def publish(self) -> None:
        """Interrupt the engine, load the update into it, and resume it.

        If loading fails, the engine stays interrupted, and the error ends the run.
        """
        update, version = self._update()
        self._prepared = None
        await self._engine.interrupt()
        await self._engine.load(update, version)
        if self._keep_versions is not None:
            # The version before may have sampled its first tokens since `begin`.
            await self._keep_versions({*self._live, self._loaded})
        self._loaded = version
        await self._engine.resume()

    def _update(self) -> tuple[Update, int]:
        if self._prepared is None:
            raise RuntimeError("nothing to publish: call prepare first")
        return self._prepared

    def _pack(self, version: int, weights: Mapping[str, Tensor]) -> Update:
        """Return the weights quantised to the format `packed`, or the difference from those of the
        engine.

        The difference is returned if it is smaller and the engine accepts deltas.
        """
        packed = pack(cast(weights, self._dtype), self._packed, self._dtype)
        (base, before), self._last_packed = self._last_packed, (version, packed)
        if base < 0 or base != self._loaded or not self._engine.takes_deltas:
            return packed
        tensors = encode_all(before, packed, packed)
        delta = Delta(base, version, checksum(packed), tensors)
        return delta if delta.nbytes < num_bytes(packed) else packed

    def _delta(self, version: int, weights: Mapping[str, Tensor]) -> Delta | None:
        if self._store is None:
            return None
        if self._loaded not in self._store.versions[: self._store.versions.index(version)]:
            return None
        delta = self._store.delta(version)
        return delta if delta.base == self._loaded and delta.nbytes < num_bytes(weights) else None


def num_bytes(weights: Mapping[str, Tensor]) -> int:
    """Return the size of all tensors together, in bytes."""
    return sum(tensor.nbytes for tensor in weights.values())


def cast(
    weights: Mapping[str, Tensor], dtype: torch.dtype, *, device: str | None = "cpu"
) -> dict[str, Tensor]:
    """Return the weights in precision `dtype` on `device`. None leaves each on its own device.

    Weights that have this device and precision are not copied. So the trained model must not change
    before the version is published (`unstale.loop.until_scorable`).
    """
    return {name: tensor.detach().to(device, dtype) for name, tensor in weights.items()}
