"""Engine hosts (machines with engines), each used by the run as one engine of its pool."""

import asyncio
import itertools
import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

from unstale.cluster.engine_host import EngineHost, HostOptions, HostReply, HostReport
from unstale.cluster.engine_host_weights import VersionOfWeights
from unstale.cluster.session import MAX_CONCURRENT, import_ray, result_of, summary
from unstale.cluster.weight_objects import Reference, put, put_delta
from unstale.engines import (
    NOT_STARTED,
    REQUIRED_COUNTERS,
    EngineDied,
    Reply,
    SamplingParams,
    Update,
    check_load,
    check_request,
    check_resume,
)
from unstale.engines.registry import ModelSizes
from unstale.engines.session import EngineSession, deadline
from unstale.threads import in_thread
from unstale.weights.codec import file_of
from unstale.weights.store import Delta

RESOURCE = "engine_host"
"""The Ray resource that marks machines for engines: `ray start --resources '{"engine_host":
1}'`.
"""
HANG_S = 60.0
"""Seconds without an answer after which an engine host counts as dead."""
LOAD_S = 1200.0
"""Seconds after which a start or a load of an engine host fails. A start may start servers, and a
load may transfer all weights.
"""
CLOSE_S = 20.0
"""Seconds that an engine host may take to end its servers before it is killed."""
_PLACEMENTS = 4

Handle = Any
"""A handle of a Ray actor of the class `EngineHost`."""


def place(options: HostOptions) -> Handle:
    """Request a Ray actor on a machine for engines, which Ray finds by its `RESOURCE`.

    If no such machine is free, the actor starts when one is.
    """
    actor = import_ray().remote(EngineHost)
    placed = actor.options(
        num_cpus=0, resources={RESOURCE: 1}, max_restarts=0, max_concurrency=MAX_CONCURRENT
    )
    return placed.remote(options)


class HostedEngine:
    """All engines of one engine host (a machine with engines), as a single `Engine`.

    `start` waits until Ray has a machine for the host. After a failure, `start` uses the host's
    process again if it answers: the process then needs only the weights that it lacks. Otherwise
    `start` asks Ray for a new process.
    """

    takes_deltas = True
    sizes = ModelSizes(0)
    """No facts about the model: these serve to check replies, which the host's engines do
    themselves.
    """

    def __init__(self, number: int, options: HostOptions, place: Callable[[], Handle]) -> None:
        self._number = number
        self._options = options.engines[0]
        self._place = place
        self._host: Handle | None = None
        self._placed = False
        self._session: EngineSession | None = None
        self._epochs = itertools.count()
        self._epoch = next(self._epochs)
        self._request_ids = map(str, itertools.count())
        self._held = -1
        """The version of the weights in the host's shared memory. -1 if unknown."""
        self._version = -1
        """The version of the weights that the host's engines have loaded. -1 if they have none."""
        self._staged: tuple[Update, int] | None = None
        self._counters: Counter[str] = Counter()
        self._machine = ""
        self.on_event: Callable[..., None] = lambda kind, **_: None
        """A function that is called with each event of the host's engines."""

    @classmethod
    def at(cls, url: str, options: HostOptions) -> Self:
        """Return an engine on a host that another process controls. `follow` opens it for requests.

        `url` is the `url` of the other process's engine.
        """
        host, epoch = pickle.loads(bytes.fromhex(url))
        engine = cls(0, options, lambda: host)
        engine._host, engine._epoch = host, epoch
        return engine

    @property
    def url(self) -> str:
        """A text that names the host and its current period, for `at`. A period ends at the next
        interrupt.
        """
        return bytes(import_ray().cloudpickle.dumps((self._host, self._epoch))).hex()

    def follow(self, version: int, probe: "asyncio.Future[None]") -> None:
        """Sample from a host that another process has loaded with `version`.

        The host holds replies back until its engines have passed their probe (the test of the
        weights), so `probe` is not used.
        """
        self._session = EngineSession(self._check_health)
        self._version = version
        self._session.open.set()

    def unfollow(self, reason: str) -> None:
        """Make all calls fail with the text `reason`, because the other process lost the host."""
        if self._session is not None:
            self._session.end(reason)

    async def verified(self) -> None:
        """Do nothing: the host itself restarts an engine that fails its probe, the test of the
        weights.
        """

    def fail(self, reason: str) -> EngineDied:
        """Make all calls fail until the next start, because another process found the host dead.

        `reason` says what it found. Return the error that the calls raise.
        """
        return self._fail(self._live_session(), reason)

    async def start(self) -> None:
        """Start the host's engines. Raises ValueError if its machine cannot run them."""
        if self._session is not None:
            self._session.end("the engine was started again")
        session = self._session = EngineSession(self._check_health)
        self._version = -1
        self._staged = None
        self._counters.clear()
        if self._placed:
            try:
                await self._control("start", self._epoch, timeout_s=HANG_S)
            except EngineDied:
                self._drop()
                session = self._session = EngineSession(self._check_health)
            else:
                return
        self._held = -1
        await self._wait_until_placed(session)
        await self._control("start", self._epoch, timeout_s=LOAD_S)

    async def sample(self, tokens: Sequence[int], params: SamplingParams) -> Reply:
        limit = self._options.max_context
        check_request(tokens, params, max_context=limit, keeps_sets=True, measures=True)
        session = self._live_session()
        while not session.open.is_set():
            await session.while_alive(session.open.wait())
        request_id = next(self._request_ids)
        session.begin(request_id)
        try:
            answer: HostReply = await self._call("sample", self._epoch, tuple(tokens), params)
            reply = await self._with_experts(session, answer)
        finally:
            session.finish(request_id)
        if reply.piece.tokens and reply.piece.version != self._version:
            raise self._fail(
                session,
                f"it returned tokens of version {reply.piece.version}, "
                f"but {self._version} was loaded",
            )
        return reply

    async def cache_address(self, tokens: Sequence[int]) -> str:
        address: str = await self._call("cache_address", tuple(tokens))
        return address

    async def send_cache(self, tokens: Sequence[int], address: str) -> int:
        stored: int = await self._call("send_cache", tuple(tokens), address)
        return stored

    async def _with_experts(self, session: EngineSession, answer: HostReply) -> Reply:
        """Return the reply in a host's answer, with its routed experts.

        Experts in Ray's store are fetched by a thread.
        """
        if answer.routed_experts is None:
            return answer.reply
        try:
            routed_experts = await session.while_alive(in_thread(answer.routed_experts.fetch))
        except ValueError as error:
            raise self._fail(session, str(error)) from error
        return replace(
            answer.reply, piece=replace(answer.reply.piece, routed_experts=routed_experts)
        )

    async def interrupt(self) -> None:
        self._live_session().open.clear()
        self._epoch = next(self._epochs)
        # servers first end the probe of the weights that they loaded last
        await self._control("interrupt", self._epoch, timeout_s=LOAD_S)
        await self.leave()

    async def leave(self) -> None:
        """Send no requests until the engine is opened again. Wait until all replies have returned.

        Raises `EngineDied` if they do not return within `HANG_S` seconds.
        """
        session = self._live_session()
        session.open.clear()
        async with deadline(HANG_S, partial(self._fail, session), "interrupted replies not back"):
            while session.pending:
                await session.while_alive(session.quiet.wait())

    async def stage(self, update: Update, version: int) -> None:
        """Send the host the deltas or full weights that it needs to make the weights of
        `version`.
        """
        session = self._live_session()
        check_load(update, version, self._version, sampling=False, deltas=True)
        if self._staged and self._staged[0] is update and self._staged[1] == version:
            return
        self._staged = None
        held, self._held = self._held, -1  # if this fails, the host needs full weights
        try:
            full, deltas = await in_thread(_objects, update, held)
        except LookupError as error:
            raise self._fail(session, f"its weights are gone: {error}") from error
        await self._control("stage", version, held, full, *deltas, timeout_s=LOAD_S)
        self._staged = update, version

    async def load(self, update: Update, version: int) -> None:
        session = self._live_session()
        sampling = session.open.is_set()
        check_load(update, version, self._version, sampling=sampling, deltas=True)
        await self.stage(update, version)
        self._staged = None
        await self._control("load", version, timeout_s=LOAD_S)
        self._version = version

    async def resume(self) -> None:
        session = self._live_session()
        check_resume(self._version)
        await self._control("resume", timeout_s=HANG_S)
        session.open.set()

    async def close(self) -> None:
        """End the host's engines and then its process."""
        if self._session is not None:
            self._session.end("the engine is closed")
        if self._host is not None and self._placed:
            ray = import_ray()
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self._host.close.remote()
            except (TimeoutError, ray.exceptions.RayError):
                pass  # it is killed below
        self._drop()

    def metrics(self) -> Mapping[str, float]:
        """Return the counters that the host sent at its interrupts since the last call."""
        counters = dict.fromkeys(REQUIRED_COUNTERS, 0.0) | dict(self._counters)
        self._counters.clear()
        return counters

    def _drop(self) -> None:
        """Kill the host's process. If Ray has not started it yet, withdraw the request for it."""
        if self._host is not None and import_ray().is_initialized():
            import_ray().kill(self._host)
        self._host = None
        self._placed = False

    async def _wait_until_placed(self, session: EngineSession) -> None:
        """Wait until Ray has placed the host on a machine.

        There is no time limit, because no request waits for this engine. The request is repeated,
        because Ray may for some seconds choose a machine that is already dead.
        """
        exceptions = import_ray().exceptions
        for last in (False,) * (_PLACEMENTS - 1) + (True,):
            host: Any = self._host
            if host is None:
                host = await in_thread(self._place)  # it pickles a class
            self._host = host
            try:
                await session.while_alive(result_of(host.ping.remote()))
            except exceptions.RayError as error:
                self._drop()
                if last:
                    raise self._fail(session, summary(error)) from error
            else:
                self._placed = True
                return

    async def _control(self, method: str, *args: Any, timeout_s: float) -> None:
        """Call a method of the host, and process the report that it returns.

        Raises `EngineDied` after `timeout_s` seconds without an answer.
        """
        session = self._live_session()
        async with deadline(timeout_s, partial(self._fail, session), f"no answer to {method}"):
            report: HostReport = await self._call(method, *args)
        self._machine = report.machine
        self._held = report.held
        self._counters.update(report.counters)
        for kind, fields in report.events:
            self.on_event(kind, **{**fields, "host": self._number})

    async def _call(self, method: str, *args: Any) -> Any:
        """Call a method of the host. Raises the method's error, or `EngineDied` if the host is
        lost.
        """
        session = self._live_session()
        exceptions = import_ray().exceptions
        if self._host is None:
            raise EngineDied(NOT_STARTED)
        reference = getattr(self._host, method).remote(*args)
        try:
            return await session.while_alive(result_of(reference))
        except asyncio.CancelledError:
            import_ray().cancel(reference)
            raise
        except exceptions.RayTaskError as error:
            cause = error.cause
            if not isinstance(cause, Exception) or isinstance(
                cause, EngineDied | exceptions.RayError
            ):
                raise self._fail(session, summary(cause or error)) from error
            raise cause from None
        except exceptions.RayError as error:
            raise self._fail(session, summary(error)) from error

    async def _check_health(self) -> None:
        """Raise `EngineDied` if the host does not answer."""
        session = self._live_session()
        exceptions = import_ray().exceptions
        if self._host is None:
            return
        try:
            async with deadline(HANG_S, partial(self._fail, session), "no answer"):
                await self._host.ping.remote()
        except exceptions.RayError as error:
            raise self._fail(session, summary(error)) from error

    def _live_session(self) -> EngineSession:
        if self._session is None:
            raise RuntimeError(NOT_STARTED)
        if self._session.error:
            raise EngineDied(self._session.error)
        return self._session

    def _fail(self, session: EngineSession, reason: str) -> EngineDied:
        """Make all calls fail until the next start. Return the error that they raise."""
        where = f" on {self._machine}" if self._machine else ""
        session.end(f"engine host {self._number}{where}: {reason}")
        return EngineDied(session.error)


def _objects(update: Update, held: int) -> tuple[Reference | None, Sequence[Reference]]:
    """Return references to the objects from which a host that has version `held` makes the update.

    They are full weights and deltas to apply to them in order. If the full weights are None, the
    deltas apply to version `held`.
    """
    if isinstance(update, VersionOfWeights):
        return update.objects(held)
    if isinstance(update, Delta):
        return None, [put_delta(update)]
    return put(file_of(update)), []
