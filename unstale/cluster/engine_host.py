"""The engines of one machine, in a Ray actor on that machine.

The actor starts the engines or connects to their servers, and keeps the weights in shared memory.
If an engine dies, the actor restarts it with these weights, without help from the rest of the run.
The run's main process uses the actor through a `HostedEngine`.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import unstale
from unstale.cluster.posted_experts import PostedExperts
from unstale.cluster.session import machine_address
from unstale.cluster.weight_objects import Part, read_delta
from unstale.engines import Engine, EngineDied, Reply, SamplingParams
from unstale.engines.pool import EnginePool, Recovery, WeightsReplaced
from unstale.engines.registry import EngineOptions
from unstale.engines.shared_weights import SharedWeights
from unstale.records import Sampled
from unstale.threads import in_thread
from unstale.weights.codec import advance

SMALL_EXPERTS_BYTES = 1 << 18
"""Largest size in bytes of routed experts (the experts that an MoE model chose) that are sent in
their reply. Larger ones go through Ray's object store, which is faster for them and keeps messages
below 1 MB.
"""

Event = tuple[str, Mapping[str, Any]]
"""The kind and the details of an event, for the run's log."""


@dataclass(frozen=True, slots=True)
class HostOptions:
    """The options for the engines of one engine host."""

    make: Callable[[EngineOptions], Engine]
    engines: tuple[EngineOptions, ...]
    restarts: int = 0
    """Number of times that the host may restart an engine. If an engine dies after that, the whole
    host fails.
    """
    release: str = unstale.__version__
    """The version of this package in the process that trains."""

    def make_pool(self, recovery: Recovery) -> EnginePool:
        """Return a pool of the host's engines.

        Raises ValueError if this machine cannot run them.
        """
        machine = socket.gethostname()
        if self.release != unstale.__version__:
            raise ValueError(
                f"{machine} has unstale {unstale.__version__}, but the run has {self.release}: "
                "install the same version on every machine"
            )
        for options in self.engines:
            if not options.model_folder.is_dir():
                raise ValueError(
                    f"{machine} has no model folder {options.model_folder}: every engine host "
                    "needs it under this path, for instance on a shared file system"
                )
        first = self.engines[0]
        engines = self.engines
        if first.cache_key:
            host = machine_address()
            engines = tuple(replace(options, cache_host=host) for options in engines)
        return EnginePool(
            [self.make(options) for options in engines],
            recovery,
            max_running=first.max_running,
            keep_cache=first.keep_cache,
            load_tokens=first.load_tokens,
        )


@dataclass(frozen=True, slots=True)
class HostReport:
    """The state of an engine host, and its counters and events since its last report."""

    machine: str
    held: int
    """The version of the weights in the host's shared memory. -1 if there are none."""
    counters: Mapping[str, float]
    """The counters of the host's engines (`Engine.metrics`). Only the report of an interrupt has
    them.
    """
    events: Sequence[Event]


@dataclass(frozen=True, slots=True)
class HostReply:
    """An engine's reply, as an engine host sends it.

    Large routed experts are not in `reply` but in Ray's object store, to which `routed_experts`
    refers.
    """

    reply: Reply
    routed_experts: PostedExperts | None = None


class EngineHost:
    """The engines of one machine, as a Ray actor. There is one on each engine host.

    Each interrupt begins a new period, whose number is `epoch`. A request has the number of the
    period in which it was sent. If it arrives in a later period, it returns no tokens, because the
    interrupt between the two should have ended it.
    """

    def __init__(self, options: HostOptions) -> None:
        self._options = options
        self._pool: EnginePool | None = None
        self._weights = _HeldWeights()
        self._events: list[Event] = []
        self._epoch = -1
        self._version = -1
        self._samples: set[asyncio.Task[Reply]] = set()

    async def ping(self) -> None:
        """Do nothing. An answer shows that the host works."""

    async def start(self, epoch: int) -> HostReport:
        """Start the engines, or start them again, in the period `epoch`. Weights in shared memory
        are kept.
        """
        self._epoch = epoch
        self._version = -1
        if self._pool is None:
            recovery = Recovery(self._weights.copy, self._options.restarts, self._on_event)
            self._pool = await in_thread(self._options.make_pool, recovery)
        await self._pool.start()
        self._pool.metrics()  # counters of an earlier start are dropped
        return self._report()

    async def sample(self, epoch: int, tokens: Sequence[int], params: SamplingParams) -> HostReply:
        pool = self._started()
        if epoch != self._epoch:
            return self._nothing()
        task = asyncio.ensure_future(pool.sample(tokens, params))
        self._samples.add(task)
        try:
            reply = await task
            routed_experts = reply.piece.routed_experts
            if routed_experts is None or routed_experts.experts.nbytes <= SMALL_EXPERTS_BYTES:
                return HostReply(reply)
            return await in_thread(_post, reply)
        except asyncio.CancelledError:
            if epoch == self._epoch:  # the caller has cancelled the request
                raise
            return self._nothing()
        finally:
            task.cancel()
            self._samples.discard(task)

    async def cache_address(self, tokens: Sequence[int]) -> str:
        return await self._started().cache_address(tokens)

    async def send_cache(self, tokens: Sequence[int], address: str) -> int:
        return await self._started().send_cache(tokens, address)

    async def interrupt(self, epoch: int) -> HostReport:
        """Interrupt the engines, and begin the period `epoch`.

        Requests that are waiting for an engine return no tokens.
        """
        pool = self._started()
        self._epoch = epoch
        await pool.interrupt()
        await asyncio.sleep(0)  # lets interrupted replies return
        for task in self._samples:
            task.cancel()
        return self._report(pool.metrics())

    async def stage(
        self, version: int, held: int, full: Sequence[Part] | None, *deltas: Sequence[Part]
    ) -> HostReport:
        """Create the weights of `version` in shared memory, and stage them in the engines.

        They are made by applying `deltas` in order: to the weights `full`, or, if `full` is None,
        to the weights in shared memory, which must be version `held`. If each trainer rank has a
        part of the weights, `full` is a file of zeros, and each rank's delta makes its part. Raises
        ValueError for weights that do not fit, or deltas of other weights. The host then needs full
        weights.
        """
        await in_thread(self._weights.change, version, held, full, deltas)
        await self._started().stage(self._weights.shared, version)
        return self._report()

    async def load(self, version: int) -> HostReport:
        """Load the weights that `stage` prepared last into all engines of the host.

        Raises `EngineDied` if those are not the weights of `version`.
        """
        if self._weights.version != version:
            raise EngineDied(f"version {version} was not staged, but {self._weights.version}")
        await self._started().load(self._weights.shared, version)
        self._version = version
        return self._report()

    async def resume(self) -> HostReport:
        await self._started().resume()
        return self._report()

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()
        await in_thread(self._weights.close)

    def _started(self) -> EnginePool:
        if self._pool is None:
            raise EngineDied("the engine host was not started")
        return self._pool

    def _nothing(self) -> HostReply:
        return HostReply(Reply(Sampled((), (), self._version), "interrupted"))

    def _on_event(self, kind: str, **fields: Any) -> None:
        self._events.append((kind, fields))

    def _report(self, counters: Mapping[str, float] | None = None) -> HostReport:
        events, self._events = self._events, []
        return HostReport(socket.gethostname(), self._weights.version, counters or {}, events)


def _post(reply: Reply) -> HostReply:
    """Return a reply after moving its large routed experts to Ray's object store."""
    assert reply.piece.routed_experts is not None
    piece = replace(reply.piece, routed_experts=None)
    return HostReply(replace(reply, piece=piece), PostedExperts.post(reply.piece.routed_experts))


class _HeldWeights:
    """The weights of one version in shared memory, from which all engines of a host load."""

    def __init__(self) -> None:
        self.shared = SharedWeights()
        self.version = -1

    def change(
        self,
        version: int,
        held: int,
        full: Sequence[Part] | None,
        deltas: Sequence[Sequence[Part]],
    ) -> None:
        """Turn the weights in shared memory into those of `version`.

        The arguments are those of `EngineHost.stage`. Raises ValueError if the deltas do not fit,
        and `EngineDied` if the weights in shared memory are not version `held`.
        """
        with self.shared.changing():
            if full is None and self.version != held:  # another call came between
                raise EngineDied(f"the host has version {self.version}, not {held}")
            self.version = -1
            if full is not None:
                self.shared.write_file([part.data for part in full])
            for parts in deltas:
                advance(self.shared.weights, read_delta(parts))
            self.version = version

    def close(self) -> None:
        """Remove the file of the weights. Wait first for a thread that may still write it after a
        cancelled `stage`.
        """
        with self.shared.changing():
            self.shared.close()

    def copy(self, version: int) -> dict[str, Tensor]:
        """Return a copy of the shared weights, which an engine can load while new weights arrive.

        Raises `WeightsReplaced` if the shared weights are not those of `version`.
        """
        with self.shared.reading():
            if self.version != version:
                raise WeightsReplaced(
                    f"the host holds version {self.version}, and the engine needs {version}"
                )
            return {name: torch.clone(tensor) for name, tensor in self.shared.items()}
