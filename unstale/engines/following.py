"""Engines whose servers are shared by the run's process and its rollout processes.

The run's process starts the servers and loads the weights. Its pool has a `SharedEngine` for each
server. A rollout process has a pool with a `FollowedEngine` for each, which sends its requests to
the server itself. An `EngineHub` sends every change of a server's state to all rollout processes.
`SharedEngine.interrupt` returns only after all of them have received their interrupted replies.
"""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar, cast

import msgspec

from unstale.engines import Engine, EngineDied, Reply, SamplingParams, Update
from unstale.engines.pool import EnginePool
from unstale.engines.registry import ModelSizes

DRAIN_S = 60.0
"""Seconds within which a rollout process must have received the replies of an interrupted
server.
"""
_T = TypeVar("_T")


class EngineOpened(msgspec.Struct, tag=True):
    """A message to rollout processes: the server samples with the weights of `version`."""

    engine: int
    epoch: int
    """Number of the server's start. Each start raises it by 1. Messages about an earlier start are
    outdated.
    """
    url: str
    version: int


class EngineVerified(msgspec.Struct, tag=True):
    """A message to rollout processes: a server's new weights passed their test, the probe."""

    engine: int
    epoch: int


class EngineClosed(msgspec.Struct, tag=True):
    """A message to rollout processes: a server is interrupted. They answer with `EngineDrained`."""

    engine: int
    ask: int


class EngineEnded(msgspec.Struct, tag=True):
    """A message to rollout processes: a server has died, or is being started again."""

    engine: int
    epoch: int
    reason: str


class EngineDrained(msgspec.Struct, tag=True):
    """The answer to `EngineClosed`: the rollout process has all replies of the server."""

    ask: int


class EngineFailed(msgspec.Struct, tag=True):
    """A message to the run's process: a rollout process found that a server does not work."""

    engine: int
    epoch: int
    reason: str


class EngineCounters(msgspec.Struct, tag=True):
    """A message to the run's process: a server's counters since the last such message."""

    engine: int
    counters: dict[str, float]


StateChange = EngineOpened | EngineVerified | EngineClosed | EngineEnded
Finding = EngineDrained | EngineFailed | EngineCounters


class SharedServer(Engine, Protocol):
    """An engine on a server, or on an engine host, that several processes can call.

    One process controls it. In others, `follow` opens it for requests and `leave` ends this.
    """

    sizes: ModelSizes

    @property
    def url(self) -> str:
        """The address from which another process makes such an engine."""
        ...

    async def verified(self) -> None:
        """Wait until the loaded weights have passed their probe. Raises `EngineDied` otherwise."""
        ...

    def fail(self, reason: str) -> EngineDied:
        """Make all calls fail until the next start. Return the error that they raise."""
        ...

    def follow(self, version: int, probe: "asyncio.Future[None]") -> None:
        """Take requests. Replies may be held back until `probe` is done."""
        ...

    def unfollow(self, reason: str) -> None:
        """Make all calls fail until the next `follow`."""
        ...

    async def leave(self) -> None:
        """Take no requests until the next `follow`. Wait until all replies have returned."""
        ...


class EngineHub:
    """The connections from the run's process to the rollout processes that use its engines.

    A process that `attach` adds first receives the current state of all engines. If an engine is
    interrupted and a process does not have all its replies within `DRAIN_S` seconds, the `on_late`
    of this process is called with a reason.
    """

    def __init__(self) -> None:
        self.engines: list[SharedEngine] = []
        self._members: dict[int, tuple[Callable[[StateChange], None], Callable[[str], None]]] = {}
        self._keys = itertools.count()
        self._asks = itertools.count()
        self._waiting: dict[int, tuple[set[int], asyncio.Event]] = {}
        """For each `EngineClosed` without all answers: the processes that must still answer, and an
        event that is set when none is left.
        """

    def attach(self, send: Callable[[StateChange], None], on_late: Callable[[str], None]) -> int:
        """Add a rollout process, to which `send` sends messages.

        Return the key that identifies it.
        """
        key = next(self._keys)
        self._members[key] = (send, on_late)
        for engine in self.engines:
            for change in engine.state:
                send(change)
        return key

    def detach(self, key: int) -> None:
        """Remove a rollout process. Calls that wait for its answer stop waiting."""
        self._members.pop(key, None)
        for ask in [*self._waiting]:
            self._answered(ask, key)

    def broadcast(self, change: StateChange) -> None:
        for send, _ in [*self._members.values()]:
            send(change)

    def close(self, engine: int) -> Coroutine[None, None, None]:
        """Notify all rollout processes that an engine is interrupted.

        Return a coroutine that waits until they have received all replies of the engine.
        """
        ask = next(self._asks)
        waiting, answered = self._waiting[ask] = ({*self._members}, asyncio.Event())
        if not waiting:
            answered.set()
        self.broadcast(EngineClosed(engine, ask))
        return self._drained(ask, waiting, answered)

    async def _drained(self, ask: int, waiting: set[int], answered: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(DRAIN_S):
                await answered.wait()
        except TimeoutError:
            for key in waiting & {*self._members}:
                self._members[key][1](f"it did not return its replies within {DRAIN_S:g} s")
        finally:
            self._waiting.pop(ask, None)

    def _answered(self, ask: int, key: int) -> None:
        if ask in self._waiting:
            waiting, answered = self._waiting[ask]
            waiting.discard(key)
            if not waiting:
                answered.set()

    def receive(self, key: int, finding: Finding) -> None:
        """Handle a message from the rollout process `key`."""
        match finding:
            case EngineDrained(ask):
                self._answered(ask, key)
            case EngineFailed(engine, epoch, reason):
                self.engines[engine].found_dead(epoch, reason)
            case EngineCounters(engine, counters):
                self.engines[engine].count(key, counters)


class SharedEngine:
    """An engine of the run's process on a server that rollout processes use, too.

    Each call also changes the state of the server in the rollout processes.
    """

    def __init__(self, engine: SharedServer, number: int, hub: EngineHub) -> None:
        self.engine = engine
        self.takes_deltas = engine.takes_deltas
        self.on_death: Callable[[EngineDied], None] = lambda died: None
        """Called when a rollout process reports that the server died, or when the server's probe
        failed.
        """
        self._number = number
        self._hub = hub
        self._epoch = 0
        self._version = -1
        self._opened: EngineOpened | None = None
        self._is_verified = False
        self._counted: dict[int, defaultdict[str, float]] = {}
        """The counters that each rollout process sent since `metrics` was last called."""
        self._verifying: asyncio.Task[None] | None = None

    @property
    def state(self) -> Sequence[StateChange]:
        """The messages that inform a new rollout process of this engine's state."""
        if self._opened is None:
            return ()
        verified = EngineVerified(self._number, self._epoch)
        return (self._opened, verified) if self._is_verified else (self._opened,)

    async def start(self) -> None:
        self._end("the engine was started again")
        self._epoch += 1
        self._counted.clear()
        await self._reporting(self.engine.start())

    async def sample(self, tokens: Sequence[int], params: SamplingParams) -> Reply:
        return await self._reporting(self.engine.sample(tokens, params))

    async def stage(self, update: Update, version: int) -> None:
        await self._reporting(self.engine.stage(update, version))

    async def interrupt(self) -> None:
        self._opened = None
        drained = asyncio.ensure_future(self._hub.close(self._number))
        try:
            await self._reporting(self.engine.interrupt())
            await drained
        finally:
            drained.cancel()

    async def load(self, update: Update, version: int) -> None:
        await self._reporting(self.engine.load(update, version))
        self._version = version
        self._is_verified = False

    async def resume(self) -> None:
        await self._reporting(self.engine.resume())
        self._opened = EngineOpened(self._number, self._epoch, self.engine.url, self._version)
        self._hub.broadcast(self._opened)
        self._verifying = asyncio.ensure_future(self._verify())

    async def close(self) -> None:
        self._end("the engine is closed")
        if self._verifying:
            self._verifying.cancel()
        await self.engine.close()

    def metrics(self) -> Mapping[str, float]:
        """Return the counters of this process and all rollout processes since the last call.

        `busy_s` is the largest of their values, at most the elapsed time. Other counters are
        summed.
        """
        totals = defaultdict[str, float](float, self.engine.metrics())
        elapsed = totals["busy_s"] + totals["idle_s"]
        busy_s = totals["busy_s"]
        for counted in self._counted.values():
            busy_s = max(busy_s, min(elapsed, counted["busy_s"]))
            for name, value in counted.items():
                if name not in ("busy_s", "idle_s", "probe_logp_error"):
                    totals[name] += value
        self._counted.clear()
        totals["busy_s"], totals["idle_s"] = busy_s, max(0.0, elapsed - busy_s)
        totals["reprefill_s"] = min(totals["reprefill_s"], busy_s)
        return dict(totals)

    def count(self, key: int, counters: Mapping[str, float]) -> None:
        """Add the counters that the rollout process `key` sent."""
        totals = self._counted.setdefault(key, defaultdict(float))
        for name, value in counters.items():
            totals[name] += value

    def found_dead(self, epoch: int, reason: str) -> None:
        """End a server that a rollout process found dead.

        `epoch` is the number of the server's start. Do nothing if the server was started again
        since.
        """
        if epoch != self._epoch:
            return
        try:
            died = self.engine.fail(reason)
        except EngineDied as earlier:
            died = earlier
        self._end(str(died))
        self.on_death(died)

    async def _verify(self) -> None:
        """Wait for the probe, the test of the loaded weights.

        Notify the rollout processes of its result.
        """
        epoch, version = self._epoch, self._version
        try:
            await self.engine.verified()
        except EngineDied as died:
            if epoch == self._epoch:
                self._end(str(died))
                self.on_death(died)
            return
        if (epoch, version) == (self._epoch, self._version):
            self._is_verified = True
            self._hub.broadcast(EngineVerified(self._number, epoch))

    async def _reporting(self, call: Awaitable[_T]) -> _T:
        """Await a call of the engine.

        If it raises `EngineDied`, notify the rollout processes and re-raise.
        """
        try:
            return await call
        except EngineDied as died:
            self._end(str(died))
            raise

    def _end(self, reason: str) -> None:
        self._opened = None
        self._is_verified = False
        self._hub.broadcast(EngineEnded(self._number, self._epoch, reason))


class FollowedEngine:
    """An engine of a rollout process on a server that the run's process controls.

    Only messages from the run's process change its state. `stage`, `load`, `interrupt` and `resume`
    do nothing. `start` waits for the run to restart a dead server, so that an `EnginePool` sends
    requests to other servers meanwhile.
    """

    takes_deltas = False

    def __init__(
        self,
        number: int,
        make: Callable[[str], SharedServer],
        report: Callable[[Finding], None],
    ) -> None:
        """Create the engine of the server with this number. It sends no requests before `change`.

        `make` returns an engine for the server at a URL. `report` sends a message to the run's
        process.
        """
        self._number = number
        self._make = make
        self._report = report
        self._engine: SharedServer | None = None
        self._epoch = -1
        self._up = asyncio.Event()
        self._was_up = False
        self._probe: asyncio.Future[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    def change(self, change: StateChange) -> None:
        """Apply a message about the server's state."""
        match change:
            case EngineOpened():
                self._open(change)
            case EngineVerified(epoch=epoch) if epoch == self._epoch and self._probe:
                if not self._probe.done():
                    self._probe.set_result(None)
            case EngineClosed(ask=ask):
                task = asyncio.ensure_future(self._leave(ask))
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)
            case EngineEnded(reason=reason):
                self._end(reason)

    def _open(self, change: EngineOpened) -> None:
        if self._engine is None or self._engine.url != change.url:
            self._engine = self._make(change.url)
        self._epoch = change.epoch
        self._probe = asyncio.get_running_loop().create_future()
        self._engine.follow(change.version, self._probe)
        self._was_up = True
        self._up.set()

    async def _leave(self, ask: int) -> None:
        try:
            if self._engine is not None and self._up.is_set():
                await self._engine.leave()
        except EngineDied as died:
            self._lost(died)
        self.report_counters()
        self._report(EngineDrained(ask))

    def _end(self, reason: str) -> None:
        self._up.clear()
        if self._engine is not None:
            self._engine.unfollow(reason)
        if self._probe is not None and not self._probe.done():
            self._probe.set_exception(EngineDied(reason))
            self._probe.exception()  # marks it as retrieved: no reply may wait for it

    def _lost(self, died: EngineDied) -> None:
        """Report to the run's process that the server does not work, unless the run ended it."""
        if self._up.is_set():
            self._end(str(died))
            self._report(EngineFailed(self._number, self._epoch, str(died)))

    async def start(self) -> None:
        """Wait until the run's process has started the server again.

        The first call does not wait.
        """
        if self._was_up:
            await self._up.wait()

    async def sample(self, tokens: Sequence[int], params: SamplingParams) -> Reply:
        while self._engine is None:
            await self._up.wait()
        try:
            return await self._engine.sample(tokens, params)
        except EngineDied as died:
            self._lost(died)
            raise

    async def stage(self, update: Update, version: int) -> None: ...

    async def interrupt(self) -> None: ...

    async def load(self, update: Update, version: int) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None:
        self._end("the rollout process ends")

    def metrics(self) -> Mapping[str, float]:
        return {}

    def report_counters(self) -> None:
        """Send the run's process the counters since the last call."""
        if self._engine is not None and (counters := self._engine.metrics()):
            self._report(EngineCounters(self._number, dict(counters)))


def require_servers(engines: Sequence[Engine]) -> list[SharedServer]:
    """Return the engines. Raises ValueError if other processes cannot use one of them."""
    servers: list[SharedServer] = []
    for engine in engines:
        if not hasattr(engine, "follow"):
            raise ValueError(
                "rollout.processes > 1 needs engines on HTTP servers or engine hosts, got a "
                f"{type(engine).__name__}, which only the process of the run can call. Set "
                "rollout.processes = 1, or engine.backend = vllm or sglang"
            )
        servers.append(cast(SharedServer, engine))
    return servers


def share(pool: EnginePool, hub: EngineHub) -> EnginePool:
    """Return a pool of the same servers for the run's process.

    They are shared with the rollout processes of `hub`. Raises ValueError like `require_servers`.
    """
    hub.engines = [
        SharedEngine(engine, number, hub)
        for number, engine in enumerate(require_servers(pool.engines))
    ]
    return EnginePool(
        hub.engines,
        max_running=pool.max_running,
        keep_cache=pool.keep_cache,
        load_tokens=pool.load_tokens,
        phases=pool.phases,
        patience_s=pool.patience_s,
    )


def restart_dead(pool: EnginePool, hub: EngineHub) -> None:
    """Let `pool` restart the engines that a rollout process found dead.

    The engines are those of `hub`.
    """
    for engine in hub.engines:
        engine.on_death = partial(pool.report_death, engine)
