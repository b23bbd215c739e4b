"""Engines whose servers are shared by the run's process and its rollout processes.

Rollout processes are child processes that run episodes. The run's process starts the servers and
loads the weights. Its pool of engines has a `SharedEngine` for each server. The pool of a rollout
process has a `FollowedEngine` for each server, and sends requests to the servers itself. An
`EngineHub` sends every change of a server's state to all rollout processes.
`SharedEngine.interrupt` returns only after all of them have received their interrupted replies.
"""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar, cast

import msgspec

from unstale.engines import Engine, EngineDied, Reply, SamplingParams, Update
from unstale.engines.pool import EnginePool
from unstale.engines.registry import ModelSizes

DRAIN_S = 60.0
"""Longest time in seconds, after an interruption of a server, until each rollout process has
received its replies.
"""
_T = TypeVar("_T")


class EngineOpened(msgspec.Struct, tag=True):
    """A message to rollout processes: server number `engine` samples with the weights `version`."""

    engine: int
    epoch: int
    """Number of times that the server was started. Messages with a lower number are outdated."""
    url: str
    version: int


class EngineVerified(msgspec.Struct, tag=True):
    """A message to rollout processes: a server's new weights passed their test, the probe."""

    engine: int
    epoch: int


class EngineClosed(msgspec.Struct, tag=True):
    """A message to rollout processes: a server is interrupted.

    Each process answers with an `EngineDrained` with the same number `ask`.
    """

    engine: int
    ask: int


class EngineEnded(msgspec.Struct, tag=True):
    """A message to rollout processes: a server has died, or is being started again."""

    engine: int
    epoch: int
    reason: str


class EngineDrained(msgspec.Struct, tag=True):
    """The answer to `EngineClosed`: the rollout process has received all replies of the server."""

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
    """An engine on a server, or on an engine host, that several processes can use.

    One process starts the server and loads its weights. Each other process has its own engine for
    the same server, and calls `follow` and `leave` instead of `resume` and `interrupt`.
    """

    sizes: ModelSizes

    @property
    def url(self) -> str:
        """The server's address, with which another process creates its own engine for it."""
        ...

    async def verified(self) -> None:
        """Wait for the probe, the test of the loaded weights. Raises `EngineDied` if it fails."""
        ...

    def fail(self, reason: str) -> EngineDied:
        """Make all calls fail until the next start. Return their error, which contains `reason`."""
        ...

    def follow(self, version: int, probe: "asyncio.Future[None]") -> None:
        """Begin to accept requests for the weights `version`, which another process has loaded.

        `probe` is done when these weights have passed their test. Replies may be held back until
        then.
        """
        ...

    def unfollow(self, reason: str) -> None:
        """Make all calls fail until the next `follow`. Their error has the text `reason`."""
        ...

    async def leave(self) -> None:
        """Accept no requests until the next `follow`. Wait until all replies have returned."""
        ...


class EngineHub:
    """The connections from the run's process to the rollout processes that use its engines.

    Rollout processes must receive all their replies within `DRAIN_S` seconds after an interruption.
    If one does not, the hub calls the function `on_late` that was passed to `attach` for it.
    """

    def __init__(self) -> None:
        self.engines: list[SharedEngine] = []
        self._members: dict[int, tuple[Callable[[StateChange], None], Callable[[str], None]]] = {}
        self._keys = itertools.count()
        self._asks = itertools.count()
        self._waiting: dict[int, tuple[set[int], asyncio.Event]] = {}
        """For each `EngineClosed`, by its number `ask`: the processes that have not answered yet,
        and an event that is set when all have.
        """

    def attach(self, send: Callable[[StateChange], None], on_late: Callable[[str], None]) -> int:
        """Add a rollout process, and send it the current state of all engines. Return its key.

        `send` sends a message to the process. `on_late` is called with a reason if the process
        answers an interruption too late.
        """
        key = next(self._keys)
        self._members[key] = (send, on_late)
        for engine in self.engines:
            for change in engine.state:
                send(change)
        return key

    def detach(self, key: int) -> None:
        """Remove the rollout process `key`. Calls that wait for its answer stop waiting."""
        self._members.pop(key, None)
        for ask in [*self._waiting]:
            self._answered(ask, key)

    def broadcast(self, change: StateChange) -> None:
        for send, _ in [*self._members.values()]:
            send(change)

    def close(self, engine: int) -> Coroutine[None, None, None]:
        """Notify all rollout processes that the engine with the number `engine` is interrupted.

        Return a coroutine that waits until all of them have received their replies of this engine.
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
    """An engine of the run's process on a server that is also used by rollout processes.

    A call that changes the server's state also sends the new state to the rollout processes.
    """

    def __init__(self, engine: SharedServer, number: int, hub: EngineHub) -> None:
        self.engine = engine
        self.takes_deltas = engine.takes_deltas
        self.on_death: Callable[[EngineDied], None] = lambda died: None
        """Called when a rollout process reports that the server has died, and when the probe (the
        test of the loaded weights) has failed.
        """
        self._number = number
        self._hub = hub
        self._epoch = 0
        self._version = -1
        self._opened: EngineOpened | None = None
        self._is_verified = False
        self._counted: dict[int, defaultdict[str, float]] = {}
        """The counters that each rollout process has sent since the last call of `metrics`."""
        self._verifying: asyncio.Task[None] | None = None

    @property
    def state(self) -> Sequence[StateChange]:
        """The messages by which a new rollout process learns the engine's state. Empty while it is
        interrupted.
        """
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

        `busy_s` is the largest value of any process, at most the elapsed time. Most other counters
        are summed.
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
        """Treat the server as dead, because a rollout process reported its death with `reason`.

        `epoch` is the number of the server's start to which the report belongs. A report about an
        earlier start is ignored.
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
        """Wait for the probe, the test of the weights. Send its result to rollout processes."""
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
        """Await a call of the engine. If it raises `EngineDied`, first notify rollout processes."""
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

    Only messages from the run's process change its state: `stage`, `load`, `interrupt` and `resume`
    do nothing. `start` waits until the run's process has restarted a dead server. Meanwhile the
    `EnginePool` sends requests to other servers.
    """

    takes_deltas = False

    def __init__(
        self,
        number: int,
        make: Callable[[str], SharedServer],
        report: Callable[[Finding], None],
    ) -> None:
        """Create the engine of the server with this number. It sends requests after an
        `EngineOpened`.

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
        """Apply a message of the run's process about the server's state."""
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
        """Refuse requests, and report to the run's process that the server does not work.

        Do nothing if the server's end was already reported.
        """
        if self._up.is_set():
            self._end(str(died))
            self._report(EngineFailed(self._number, self._epoch, str(died)))

    async def start(self) -> None:
        """Wait until the run's process has restarted the server, unless it was never used."""
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
        """Send the counters of this process's requests since the last report to the run's main
        process.
        """
        if self._engine is not None and (counters := self._engine.metrics()):
            self._report(EngineCounters(self._number, dict(counters)))


def require_servers(engines: Sequence[Engine]) -> list[SharedServer]:
    """Return the engines, typed as servers that several processes can use.

    Raises ValueError if only the run's process can use one of them.
    """
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
    """Return a pool of `SharedEngine`s for the run's process, which notify the rollout processes of
    `hub`.

    It has the servers and settings of `pool`. Raises ValueError like `require_servers`.
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
        phases=replace(pool.phases, scenarios="none"),
        patience_s=pool.patience_s,
    )


def restart_dead(pool: EnginePool, hub: EngineHub) -> None:
    """Let `pool` restart each engine of `hub` that a rollout process finds dead."""
    for engine in hub.engines:
        engine.on_death = partial(pool.report_death, engine)
