"""A pool of engines with the same weights.

The pool sends each request to an engine with little load, or to one that has the request's context
in its cache. It restarts engines that die.
"""

import asyncio
import heapq
import itertools
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Hashable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

from torch import Tensor

from unstale.engines import (
    CacheEngine,
    CacheNotSent,
    Engine,
    EngineDied,
    Rejected,
    Reply,
    SamplingParams,
    Update,
    VersionedEngine,
    per_second,
)
from unstale.engines.groups import (
    MOVE_REQUESTS,
    MOVE_S,
    FirstTokens,
    Groups,
    GroupTimes,
    Size,
    assign,
)
from unstale.engines.prefixes import CachedPrefixes, add_blocks, hash_blocks
from unstale.engines.routing import (
    CACHED_TOKENS_PER_REPLY,
    MAX_EXTRA_REPLIES,
    NO_PHASES,
    Candidate,
    Phases,
    ReplyLengths,
    choose,
    request_weight,
)
from unstale.kept_sets import join
from unstale.records import Sampled
from unstale.signals import Signals
from unstale.threads import in_thread

_T = TypeVar("_T")

MAX_LAG_S = 120.0
"""Longest time in seconds for which an elastic pool waits for slow engines. A call goes to all
engines, and the time begins when the first one has answered. (Engines may join and leave an elastic
pool during a run.)

An engine that takes longer is treated as dead. The pool restarts it without waiting for it.
"""

RETRY_S = 0.5
"""Seconds after which a request that all prefill engines rejected is offered to them again, if no
other request has ended meanwhile.
"""
_WOKEN = 8
"""Number of rejected requests that are offered again when a request ends: as many replies to one
prompt, which a prefill engine accepts together.
"""

MAX_LISTED = 32
"""Largest number of engines of a pool that have their own metrics, to limit the metrics."""


class WeightsReplaced(LookupError):
    """Error: the weights of a version are no longer available. A newer version replaced them."""


class _Member:
    def __init__(self, engine: Engine, *, prefills: bool, precise: bool) -> None:
        self.engine = engine
        self.precise = precise
        """True if the engine does not round, while others of the pool do."""
        self.prefills = prefills
        """True if the engine is for requests with much new context (prefill)."""
        self.group = 0
        """Number of the engine's group, which serves some scenarios (`groups.Groups`)."""
        self.num_prefilling = 0
        """Number of running requests that the engine got as a prefill engine."""
        self.busy_since = 0.0
        """Time of the event loop up to which the engine's time with such requests was counted."""
        self.busy_times = GroupTimes()
        """The times of the group for which that time is counted."""
        self.cached = CachedPrefixes()
        self.num_running = 0
        self.load = 0
        """Sum of the loads of the engine's running requests (`request_weight`)."""
        self.up = False
        self.generation = 0
        """Number of successful starts by the pool. If it changes during a call, the engine has died
        meanwhile.
        """
        self.num_restarts = 0
        """Number of successful restarts since the metrics were last read."""
        self.version = -1
        """Version of the weights that the engine loaded last, -1 before the first."""
        self.versions: set[int] = set()
        """The versions of adapters that a `VersionedEngine` has. Empty for other engines."""
        self.adding = asyncio.Lock()
        """A lock that is held while adapters of an older version are added to the engine."""
        self.restart: asyncio.Task[None] | None = None

    def metrics(self, counters: Mapping[str, float]) -> dict[str, float]:
        """Return metrics of the engine: its state, and shares and rates computed from `counters`.

        `counters` is empty for an engine that does not work. Only its state is returned.
        """
        found = {
            "up": float(self.up),
            "running": float(self.num_running),
            "restarts": float(self.num_restarts),
        }
        self.num_restarts = 0
        if self.version >= 0:
            found["version"] = float(self.version)
        if counters:
            found |= per_second(counters)
            cached = counters.get("cached_tokens", 0.0)
            prompt = cached + counters.get("prefill_tokens", 0.0)
            if prompt:
                found["cached_share"] = cached / prompt
        return found


@dataclass(frozen=True, slots=True)
class Recovery:
    """The rules by which a pool restarts engines that died."""

    weights: Callable[[int], Mapping[str, Tensor]] = lambda version: {}
    """A function that returns the full weights of a version, possibly of one that the pool is still
    loading. If it raises `WeightsReplaced`, a restarted engine waits for the pool's next version.
    """
    restarts: int = 0
    """Number of restarts allowed in a run, for all engines together."""
    on_event: Callable[..., None] = lambda kind, **_: None
    """A function that writes an event to the run's log. It is called with the kind of event and its
    details. Kinds are `engine_lost`, `engine_restarted` (a restart begins), `engine_back` (it has
    succeeded), and `engine_joined` for the first start in an elastic pool.
    """


NO_RECOVERY = Recovery()
_ROUTED = ("rejects", "forwards", "prefill_requests", "decode_requests", "lost_caches")
"""The additional counters of a pool with prefill and decode engines."""


class EnginePool:
    """One or more engines with the same model, used as one engine.

    If an engine dies, each of its requests returns an interrupted reply without tokens. The engine
    is restarted, if `recovery` allows it, and loads the current version. The other engines
    continue. A call waits for a restart only while no engine works. It raises `EngineDied` if no
    engine works and none can be restarted.

    Each engine samples up to `max_running` replies at once. With `keep_cache`, engines keep their
    caches when the weights change. With `load_tokens`, requests with long contexts count as more
    load (`request_weight`).

    With `phases`, the engines are divided into some for requests with much new context (prefill)
    and others (decode). `routing.choose` chooses the phase. Raises ValueError if there would be no
    engine of a phase. With `phases.scenarios`, there are several such groups, each for some of the
    scenarios (`groups.py`). With `phases.moves`, engines change group or phase as the measured
    times require: when a new version is loaded, and while they serve one. A request stays on the
    engine that has it.

    With `phases.sends_cache`, all engines must be `CacheEngine`s. A prefill engine computes the
    context and samples the first token. A decode engine receives the cached context and samples the
    rest. A prefill engine that cannot begin at once rejects the request, and the next one gets it.
    If all reject it, it waits in the pool, not at an engine. The pool is then a `CacheEngine`, too.

    With `precise_engines`, the last engines, this many, do not round weights and activations
    (`engine.quantise`), and the others do. `SamplingParams.precise` chooses the kind of engine.

    With `patience_s` the pool is elastic. `start` waits for one engine only. The others join when
    they have started and loaded the current version. No call waits for an engine that starts. Once
    one engine has answered, a call waits at most `MAX_LAG_S` for the others. `EngineDied` is raised
    after `patience_s` seconds without a working engine.
    """

    def __init__(  # noqa: PLR0913 - the options of a run that concern several engines
        self,
        engines: Sequence[Engine],
        recovery: Recovery = NO_RECOVERY,
        *,
        max_running: int = 1 << 30,
        keep_cache: bool = False,
        load_tokens: int = 0,
        phases: Phases = NO_PHASES,
        precise_engines: int = 0,
        patience_s: float = 0.0,
    ) -> None:
        if phases.prefill_engines and not phases.prefill_engines < len(engines):
            raise ValueError(
                f"the prefill group must have fewer engines than the pool ({len(engines)}), "
                f"got {phases.prefill_engines}"
            )
        # An engine that restarts has no weights to which a delta applies, and the others must not
        # wait.
        self.takes_deltas = len(engines) == 1 and engines[0].takes_deltas
        self.engines = tuple(engines)
        self._members = [
            _Member(
                engine,
                prefills=number < phases.prefill_engines,
                precise=number >= len(engines) - precise_engines,
            )
            for number, engine in enumerate(engines)
        ]
        self._recovery = recovery
        self.max_running = max_running
        self.keep_cache = keep_cache
        self.load_tokens = load_tokens
        self.phases = phases
        self.precise_engines = precise_engines
        self.patience_s = patience_s
        self._version = -1
        self._version_changed = asyncio.Event()
        """An event that is set when `_version` changes, and then replaced by a new event."""
        self._running = False
        """True between `resume` and `interrupt`. Only then is a restarted engine resumed."""
        self._starts = 0
        self._restarts = 0
        self._reported_restarts = 0
        self._deaths = 0
        self._lengths = ReplyLengths()
        self._groups = Groups(phases)
        self._first_tokens: dict[int, FirstTokens] = {}
        """For each group, the times to the first token since the metrics were last read."""
        self._measured_to: float | None = None
        """Time of the event loop up to which the groups' times are counted. None while the engines
        are interrupted.
        """
        self._ended = 0
        """Number of requests that ended since engines last moved."""
        self._moves = 0
        """Number of engines that changed group or phase since the metrics were last read."""
        self._arrivals = itertools.count()
        self._rejected: list[tuple[int, int, asyncio.Future[None]]] = []
        """Heap of the requests that no engine of their group and phase can begin: the number of the
        arrival, a number that makes entries comparable, and the future for which the request waits.
        """
        self._between: set[asyncio.Future[Any]] = set()
        """The calls of requests on their way from a prefill engine to a decode engine."""
        self._none_between = asyncio.Event()
        """An event that is set when the last of the calls in `_between` ends."""
        self._routed = dict.fromkeys(_ROUTED, 0.0)
        self._error: BaseException = EngineDied("the engines are not started: await start() first")
        """The error to raise when no engine works and none is being restarted."""

    async def start(self) -> None:
        self._starts += 1
        await self._cancel_restarts()
        self._version = -1
        self._running = False
        self._deaths = 0
        self._reported_restarts = self._restarts
        self._groups = Groups(self.phases)
        self._first_tokens = {}
        self._measured_to = None
        for number, member in enumerate(self._members):
            member.prefills, member.group = number < self.phases.prefill_engines, 0
            member.up = not self.patience_s
            member.cached = CachedPrefixes()
            member.version, member.num_restarts = -1, 0
            member.versions = set()
        if self.patience_s:
            for member in self._members:
                self._begin_start(member, None)
        else:
            await self._call_all(lambda engine: engine.start())
        await self._wait_until_up()

    async def sample(self, tokens: Sequence[int], params: SamplingParams) -> Reply:
        request = _Request(
            tokens,
            params,
            self._hash_blocks(tokens),
            request_weight(len(tokens), self.load_tokens),
            began=self._time(),
        )
        scenario = self._groups.scenario(params.scenario, request.blocks)
        while True:
            request.starts = self._starts
            kind = params.precise if self.precise_engines else None
            await self._wait_until_up(kind)
            with self._in_group(request, scenario):
                reply = await self._sample_once(request, kind)
            if reply:
                if reply.first_token_s is not None and not params.sampled:
                    times = self._first_tokens.setdefault(request.group, FirstTokens())
                    times.add(reply.first_token_s)
                if _is_complete(reply, params):
                    self._lengths.add(params.sampled + len(reply.piece.tokens))
                return reply
            await self._wait_until_up()
            if self._version >= 0:
                return self._nothing()

    async def _sample_once(self, request: "_Request", kind: bool | None) -> Reply | None:
        """Return the reply to a request, or None if an engine died before it sampled a token.

        `kind` is as in `_working`. Raises `Rejected` if the request must not wait.
        """
        if not request.params.waits:
            _, reply = await self._offer(request, self._working(kind), request.params)
            return reply
        if not self.phases.prefill_engines:
            members = self._of_group(request.group, self._working(kind))
            return await self._from(self._route(request.blocks, members), request)
        member = self._route_by_phase(request)
        if self.phases.sends_cache and member.prefills and request.params.max_tokens > 1:
            return await self._sample_in_phases(request)
        return await self._from(member, request)

    async def _from(self, member: _Member, request: "_Request") -> Reply | None:
        """Return an engine's reply to a request, or None if the engine died."""
        with self._counted(member, request.weight):
            # set before the wait, so that siblings are sent to this engine, too
            member.cached.add(request.blocks)
            return await self._ask(member, request, request.params)

    async def _sample_in_phases(self, request: "_Request") -> Reply | None:
        """Let a prefill engine compute the context, and a decode engine sample the rest.

        If sampling is interrupted in between, or the decode engine dies, the reply has the first
        token only.
        """
        source, first = await self._prefill(request)
        if first is None or first.stop != "length":
            return first
        target = await self._interruptible(self._place(source, request))
        if target is None:
            return replace(first, stop="interrupted")
        with self._counted(target, request.weight):
            target.cached.add(request.blocks)
            if target is not source and not await self._interruptible(
                self._hand_over(source, target, request)
            ):
                return replace(first, stop="interrupted")
            rest = await self._ask(target, request, _after_first(request.params), first.piece)
        return _joined(first, rest)

    async def _place(self, source: _Member, request: "_Request") -> _Member:
        """Wait until a decode engine of the group can begin a request at once. Return the engine.

        It is `source`, which computed the context, if no decode engine works.
        """
        arrival = next(self._arrivals)
        while True:
            members = self._of_group(request.group, self._up)
            decoding = [member for member in members if not member.prefills] or [source]
            if free := [each for each in decoding if each.num_running < self.max_running]:
                return self._route(request.blocks, free)
            await self._wait_for_place(arrival)

    async def _prefill(self, request: "_Request") -> tuple[_Member, Reply | None]:
        """Return the prefill engine that accepted a request, and its reply of one token.

        The request is offered to the engines of the group in turn. If all reject it, it is offered
        again when another request ends. If sampling is interrupted meanwhile, the reply has no
        tokens.
        """
        arrival = next(self._arrivals)
        asked = replace(request.params, max_tokens=1, waits=False)
        while True:
            members = self._of_group(request.group, self._up)
            prefill = [member for member in members if member.prefills] or members
            try:
                accepted = await self._offer(request, prefill, asked)
                self._routed["forwards"] += request.rejects > 0
                return accepted
            except Rejected:
                if not await self._wait_for_place(arrival):
                    return prefill[0], self._nothing()
            if request.starts != self._starts:
                raise EngineDied("the engines were started again")
            await self._wait_until_up()

    async def _offer(
        self, request: "_Request", members: Sequence[_Member], asked: SamplingParams
    ) -> tuple[_Member, Reply | None]:
        """Ask engines in turn until one does not reject the request. Return it and its reply.

        Raises `Rejected` if all do.
        """
        left = [*members]
        while left:
            member = self._route(request.blocks, left)
            left.remove(member)
            try:
                with self._counted(member, request.weight):
                    member.cached.add(request.blocks)
                    return member, await self._ask(member, request, asked)
            except Rejected:
                self._routed["rejects"] += 1
                request.rejects += 1
        raise Rejected(f"none of {len(members)} engines can begin the request at once")

    async def _wait_for_place(self, arrival: int) -> bool:
        """Wait until a request has ended, at most `RETRY_S` seconds.

        Requests with a lower number `arrival` come first. Return False if sampling was interrupted
        meanwhile.
        """
        was_running = self._running
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._rejected, (arrival, next(self._arrivals), place))
        try:
            await asyncio.wait([place], timeout=RETRY_S)
        finally:
            place.cancel()
        return self._running or not was_running

    def _wake(self, count: int) -> None:
        """Offer the first `count` rejected requests to the engines again."""
        while self._rejected and count:
            *_, place = heapq.heappop(self._rejected)
            if not place.done():
                place.set_result(None)
                count -= 1

    def _nothing(self) -> Reply:
        return Reply(Sampled((), (), self._version), "interrupted")

    @contextmanager
    def _in_group(self, request: "_Request", scenario: Hashable) -> Iterator[None]:
        """Return a context in which a request belongs to the group of its scenario.

        A new scenario may create a group. Engines are then divided anew.
        """
        count = self._groups.count
        prefill = sum(member.prefills for member in self._members)
        request.group = self._groups.of(scenario, len(self._up), prefill)
        if self._groups.count > count:
            self._arrange(self._groups.equal_sizes(len(self._members), prefill))
        times = self._groups.times[request.group]
        began = self._time()
        try:
            yield
        finally:
            times.requests += 1
            times.in_flight_s += self._time() - began
            self._move_while_serving()

    def _of_group(self, group: int, members: Sequence[_Member]) -> Sequence[_Member]:
        """Return the members whose engine is in group `group`. If none is, return all members."""
        return [member for member in members if member.group == group] or members

    def _arrange(self, sizes: Sequence[Size]) -> None:
        """Move engines between groups and phases, so that the groups have `sizes`."""
        cells = assign([(member.group, member.prefills) for member in self._members], sizes)
        for member, (group, prefills) in zip(self._members, cells, strict=True):
            self._moves += (member.group, member.prefills) != (group, prefills)
            member.group, member.prefills = group, prefills
            if member.num_prefilling and prefills:
                self._count_prefilling(member)
                member.busy_times = self._groups.times[group]

    def _rearrange(self) -> None:
        """Move engines between groups as the measured times require.

        Requests that are running stay on their engines, so nothing is lost.
        """
        now = self._time()
        if self._measured_to is not None:
            for times in self._groups.times:
                times.elapsed_s += now - self._measured_to
            self._measured_to = now if self._running else None
        if not self.phases.moves:
            return
        for member in self._members:
            if member.num_prefilling:
                self._count_prefilling(member)
        self._arrange(self._groups.sizes(self._sizes(), self.max_running))
        self._groups.decay()
        self._ended = 0

    def _move_while_serving(self) -> None:
        """Count an ended request. Move engines if enough was measured since the last time.

        P/D-Serve also changes the ratio of a running service, without an interruption.
        """
        self._ended += 1
        if not (self.phases.moves and self._running) or self._measured_to is None:
            return
        if self._ended >= MOVE_REQUESTS and self._time() - self._measured_to >= MOVE_S:
            self._rearrange()

    def _sizes(self) -> list[Size]:
        """Return the numbers of prefill and decode engines of each group."""
        cells = [(member.group, member.prefills) for member in self._members]
        return [
            (cells.count((group, True)), cells.count((group, False)))
            for group in range(self._groups.count)
        ]

    def _count_prefilling(self, member: _Member) -> None:
        """Add an engine's time with prefill requests up to now to the times of its group."""
        now = self._time()
        member.busy_times.prefill_s += now - member.busy_since
        member.busy_since = now

    @staticmethod
    def _time() -> float:
        return asyncio.get_running_loop().time()

    @contextmanager
    def _counted(self, member: _Member, weight: int) -> Iterator[None]:
        """Return a context in which a request of load `weight` counts as one of the engine's."""
        prefills = member.prefills
        if prefills:
            if not member.num_prefilling:
                member.busy_since = self._time()
                member.busy_times = self._groups.times[member.group]
            member.num_prefilling += 1
        member.num_running += 1
        member.load += weight
        has_begun = True
        try:
            yield
        except Rejected:
            has_begun = False
            raise
        finally:
            member.num_running -= 1
            member.load -= weight
            if prefills:
                member.num_prefilling -= 1
                if not member.num_prefilling:
                    self._count_prefilling(member)
            if has_begun:  # otherwise no place has become free
                self._wake(_WOKEN)

    async def _ask(
        self,
        member: _Member,
        request: "_Request",
        params: SamplingParams,
        first: Sampled | None = None,
    ) -> Reply | None:
        """Return the reply of an engine, or None if the engine died.

        `first` has tokens of the reply that another engine sampled. Raises `EngineDied` if the pool
        was started again since `request.starts`.
        """
        generation = member.generation
        began, running, prefills = self._time(), member.num_running, member.prefills
        tokens = [*request.tokens, *first.tokens] if first else request.tokens
        try:
            await self._provide(member, params.version)
            reply = await member.engine.sample(tokens, params)
        except EngineDied as died:
            if request.starts != self._starts:
                raise
            self._lose(member, generation, died)
            return None
        sampled = reply.piece.tokens
        if len(self._members) > 1:
            before = first.tokens if first else ()
            blocks = add_blocks(request.tokens, (*before, *sampled), request.blocks)
            member.cached.add(blocks)
        if sampled and not prefills:
            times = self._groups.times[min(request.group, self._groups.count - 1)]
            running_mean = (running + member.num_running) / 2
            times.add_reply(len(sampled), self._time() - began, running_mean)
        if reply.first_token_s is not None and not first:
            return replace(reply, first_token_s=began - request.began + reply.first_token_s)
        return reply

    async def _interruptible(self, call: Coroutine[Any, Any, _T]) -> _T | None:
        """Return the result of a call, or None as soon as sampling is interrupted."""
        if not self._running:
            call.close()
            return None
        task = asyncio.ensure_future(call)
        self._between.add(task)
        try:
            await asyncio.wait([task])
            return None if task.cancelled() else task.result()
        finally:
            task.cancel()
            self._between.discard(task)
            if not self._between:
                self._none_between.set()

    async def _hand_over(self, source: _Member, target: _Member, request: "_Request") -> bool:
        """Send the cache of a context from one engine to another (P/D-Serve).

        If `source` dies or the transfer fails, `target` computes the context itself. Return False
        if sampling was interrupted meanwhile. Raises `EngineDied` like `_ask`.
        """
        version, member = self._version, target
        generation = member.generation
        try:
            address = await cast(CacheEngine, target.engine).cache_address(request.tokens)
            member, generation = source, source.generation
            await cast(CacheEngine, source.engine).send_cache(request.tokens, address)
        except CacheNotSent:
            self._routed["lost_caches"] += 1
        except EngineDied as died:
            if request.starts != self._starts:
                raise
            self._lose(member, generation, died)
        return self._running and version == self._version

    async def cache_address(self, tokens: Sequence[int]) -> str:
        """Return the address of the engine to which the pool will send a request for a context."""
        blocks = self._hash_blocks(tokens)
        await self._wait_until_up()
        member = self._route(blocks, self._up)
        member.cached.add(blocks)
        return await self._calling(member, cast(CacheEngine, member.engine).cache_address(tokens))

    async def send_cache(self, tokens: Sequence[int], address: str) -> int:
        """Make the engine that has cached most of a context send this cache to the engine at
        `address`.
        """
        blocks = self._hash_blocks(tokens)
        await self._wait_until_up()
        member = max(self._up, key=lambda each: each.cached.length(blocks))
        sent = cast(CacheEngine, member.engine).send_cache(tokens, address)
        return await self._calling(member, sent)

    async def _calling(self, member: _Member, call: Awaitable[_T]) -> _T:
        """Await a call for a cache. Raises `CacheNotSent` if the engine dies."""
        generation = member.generation
        try:
            return await call
        except EngineDied as died:
            self._lose(member, generation, died)
            raise CacheNotSent(str(died)) from died

    def report_death(self, engine: Engine, died: EngineDied) -> None:
        """Restart `engine`, because it raised the error `died` in another component."""
        for member in self._members:
            if member.engine is engine:
                self._lose(member, member.generation, died)

    def require_prospects(self) -> None:
        """Raise the last error of an engine if no engine works and none is being restarted."""
        self._pending_restarts()

    def is_idle(self) -> bool:
        """Return True if no engine has a request. May be called from any thread."""
        return not any(member.num_running for member in self._members)

    async def stage(self, update: Update, version: int) -> None:
        """Stage the update in all working engines.

        An engine that is restarted later loads full weights instead.
        """
        await self._call_all(lambda engine: engine.stage(update, version))

    async def interrupt(self) -> None:
        """Interrupt the working engines, without waiting for engines that are being restarted.

        The latter load the next version, because the current one may no longer be available.
        """
        self._running = False
        self._wake(len(self._rejected))
        for task in [*self._between]:
            task.cancel()
        await self._call_all(lambda engine: engine.interrupt())
        while self._between:  # these requests return the first token, which is of this version
            self._none_between.clear()
            await self._none_between.wait()

    async def load(self, update: Update, version: int) -> None:
        before = self._version
        self._set_version(version)  # first, because engines that restart load it by themselves
        try:
            await self._wait_until_up()
            older = [member for member in self._up if member.version != version]
            await self._call_all(lambda engine: engine.load(update, version), older)
            await self._wait_until_up()
        except (ValueError, RuntimeError):
            self._set_version(before)
            raise
        for member in self._up:
            member.version = version
            member.versions.add(version)
        if not self.keep_cache:
            for member in self._members:
                member.cached = CachedPrefixes()
        self._rearrange()

    async def keep_versions(self, versions: Collection[int]) -> None:
        """In every engine, drop the adapters of all versions except `versions` and the current one.

        All engines must be `VersionedEngine`s.
        """
        kept = {*versions, self._version}
        for member in self._members:
            member.versions &= kept
        await self._call_all(lambda engine: cast(VersionedEngine, engine).keep_versions(versions))

    async def _provide(self, member: _Member, version: int) -> None:
        """Add the adapters of `version` to the engine if it lacks them.

        This happens after a restart: the engine then has only the adapters that were loaded last.
        """
        if version < 0 or version in member.versions:
            return
        async with member.adding:
            if version in member.versions:
                return
            adapters = await in_thread(self._recovery.weights, version)
            await cast(VersionedEngine, member.engine).add_version(adapters, version)
            member.versions.add(version)

    async def resume(self) -> None:
        await self._wait_until_up()
        before = self._running
        self._running = True
        self._measured_to = self._time()
        self._wake(len(self._rejected))
        try:
            await self._call_all(lambda engine: engine.resume())
            await self._wait_until_up()
        except RuntimeError:
            self._running = before
            raise

    async def close(self) -> None:
        self._starts += 1  # pending requests then raise an error instead of waiting for a restart
        self._error = EngineDied("the engine is closed")
        await self._cancel_restarts()
        for member in self._members:
            member.up = False
        results = await asyncio.gather(
            *(engine.close() for engine in self.engines), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def metrics(self) -> Mapping[str, float]:
        """Return the working engines' counters since the last call, and numbers of crashes and
        restarts.

        Tokens and processor time are summed. Other times, and means, are averaged. Of errors the
        maximum is returned. The first `MAX_LISTED` engines also have their own metrics, named
        `engine_<number>/...`.
        """
        members = self._up or self._members
        counters = [_countable(member.engine.metrics()) for member in members]
        restarts = float(self._restarts - self._reported_restarts)
        totals = {"crashes": float(self._deaths), "restarts": restarts}
        self._deaths = 0
        self._reported_restarts = self._restarts
        for name in dict.fromkeys(name for each in counters for name in each if "/" not in name):
            values = [each[name] for each in counters if name in each]
            if name.endswith("_error"):
                totals[name] = max(values)
            elif name.endswith(("_s", "_mean")) and name != "cpu_s":
                totals[name] = sum(values) / len(values)
            else:
                totals[name] = totals.get(name, 0.0) + sum(values)
        if self.phases.prefill_engines:
            totals |= self._routed | _busy_shares(members, counters)
            totals["prefill_engines"] = float(sum(member.prefills for member in self._members))
            self._routed = dict.fromkeys(_ROUTED, 0.0)
        if self.phases.scenarios != "none":
            totals["scenario_groups"] = float(self._groups.count)
        if self.phases.moves:
            totals["moves"] = float(self._moves)
        self._moves = 0
        totals |= self._first_token_metrics()
        return totals | self._by_engine(dict(zip(map(id, members), counters, strict=True)))

    def _first_token_metrics(self) -> dict[str, float]:
        """Return the times to the first token, of all requests and of each group, as metrics.

        A group also has its numbers of requests and engines. They are left out if the engines are
        not divided.
        """
        by_group, self._first_tokens = self._first_tokens, {}
        found = {**FirstTokens.joined(by_group.values()).metrics()}
        if not (self.phases.prefill_engines or self.phases.scenarios != "none"):
            return found
        for group, (prefill, decode) in enumerate(self._sizes()[:MAX_LISTED]):
            times = by_group.get(group, FirstTokens())
            about = {
                "requests": float(times.requests),
                "prefill_engines": float(prefill),
                "decode_engines": float(decode),
            }
            found |= {f"group_{group}/{name}": x for name, x in (about | times.metrics()).items()}
        return found

    def _by_engine(self, counters: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
        return {
            f"engine_{number}/{name}": value
            for number, member in enumerate(self._members[:MAX_LISTED])
            for name, value in member.metrics(counters.get(id(member), {})).items()
        }

    @property
    def _up(self) -> list[_Member]:
        return self._working()

    def _working(self, precise: bool | None = None) -> list[_Member]:
        """Return the working engines. `precise`: True for those without rounding, False for
        others.
        """
        members = [member for member in self._members if member.up]
        return [member for member in members if precise in (None, member.precise)]

    def _hash_blocks(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the hashes of the blocks of a context. Empty if the pool has only one engine."""
        return hash_blocks(tokens) if len(self._members) > 1 else []

    def _route(self, blocks: Sequence[int], members: Sequence[_Member]) -> _Member:
        """Return the best of `members` for a request: with much of its context cached and little
        load.

        `blocks` are the block hashes of the request's context.
        """
        free = [member for member in members if member.num_running < self.max_running]
        least = min(member.load for member in free or members)
        most = least + MAX_EXTRA_REPLIES if free else least
        candidates = [member for member in free or members if member.load <= most]
        return max(
            candidates,
            key=lambda member: (
                member.cached.length(blocks) - CACHED_TOKENS_PER_REPLY * member.load,
                -member.load,
            ),
        )

    def _route_by_phase(self, request: "_Request") -> _Member:
        """Return the engine that `routing.choose` chooses for a request, of the request's group."""
        members = self._of_group(request.group, self._up)
        offers = self.phases.sends_cache and request.params.max_tokens > 1
        candidates = [
            Candidate(
                load=member.load,
                cached=member.cached.length(request.blocks),
                # a prefill engine that sends caches itself rejects what it cannot begin
                is_free=member.num_running < self.max_running or (offers and member.prefills),
                prefills=member.prefills,
            )
            for member in members
        ]
        choice = choose(
            candidates,
            context=len(request.tokens),
            reply_tokens=self._lengths.expected(request.params.reply_limit, request.params.sampled),
            phases=self.phases,
        )
        self._routed["rejects"] += choice.rejects
        self._routed["forwards"] += choice.rejects > 0 and choice.has_place
        self._routed["prefill_requests" if choice.is_prefill else "decode_requests"] += 1
        return members[choice.index]

    def _set_version(self, version: int) -> None:
        self._version = version
        self._version_changed.set()
        self._version_changed = asyncio.Event()

    async def _call_all(
        self,
        call: Callable[[Engine], Awaitable[None]],
        members: "Sequence[_Member] | None" = None,
    ) -> None:
        """Call every working engine, or only the engines in `members`.

        Restart engines that die during the call. Raise any other error than `EngineDied` after all
        engines have answered.
        """
        self._pending_restarts()
        members = self._up if members is None else members
        generations = [member.generation for member in members]
        calls = [asyncio.ensure_future(call(member.engine)) for member in members]
        if self.patience_s:
            await self._cancel_stragglers(calls)
        results = await asyncio.gather(*calls, return_exceptions=True)
        for member, generation, result in zip(members, generations, results, strict=True):
            if isinstance(result, asyncio.CancelledError):
                late = f"no answer {MAX_LAG_S:g} s after another engine had answered"
                self._lose(member, generation, EngineDied(late))
            elif isinstance(result, EngineDied):
                self._lose(member, generation, result)
        for result in results:
            lost = isinstance(result, EngineDied | asyncio.CancelledError)
            if isinstance(result, BaseException) and not lost:
                raise result

    async def _cancel_stragglers(self, calls: "Sequence[asyncio.Future[None]]") -> None:
        """Wait for one call to succeed, then at most `MAX_LAG_S` for others. Cancel late ones."""
        pending = {*calls}
        answered = False
        try:
            while pending and not answered:
                ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                answered = any(call.exception() is None for call in ended)
            if pending:
                await asyncio.wait(pending, timeout=MAX_LAG_S)
        finally:
            for call in calls:
                call.cancel()

    def _pending_restarts(self, precise: bool | None = None) -> "list[asyncio.Task[None]]":
        """Return the running tasks that restart engines of the kind `precise` (as in `_working`).

        Raise the last error of an engine if no such engine works and none is being restarted.
        """
        members = [member for member in self._members if precise in (None, member.precise)]
        restarts = [member.restart for member in members if member.restart is not None]
        if not (restarts or self._working(precise)):
            raise self._error
        return restarts

    async def _wait_until_up(self, precise: bool | None = None) -> None:
        """Wait until an engine of the kind `precise` (as in `_working`) works.

        Raise the last error of an engine if all restarts have failed.
        """
        while not self._working(precise):
            ended, _ = await asyncio.wait(
                self._pending_restarts(precise),
                timeout=self.patience_s or None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self.patience_s and self._version < 0:
                _raise_refusals(ended)
            if not ended:
                raise EngineDied(
                    f"no engine was ready for {self.patience_s:g} s; the last error: {self._error}"
                ) from self._error

    def _lose(self, member: _Member, generation: int, died: EngineDied) -> None:
        """Mark an engine as down, because of the error `died`, and begin to restart it.

        Do nothing if the engine is already down, or if it was restarted since the caller read
        `generation`.
        """
        if not member.up or member.generation != generation:
            return
        member.up = False
        self._deaths += 1
        self._report_loss(member, died)
        self._begin_start(member, died)

    def _begin_start(self, member: _Member, died: EngineDied | None) -> None:
        member.restart = asyncio.ensure_future(self._restart(member, died))
        member.restart.add_done_callback(partial(self._restart_ended, member))

    def _report_loss(self, member: _Member, error: BaseException) -> None:
        self._error = error
        self._recovery.on_event("engine_lost", engine=self._members.index(member), cause=str(error))

    async def _restart(self, member: _Member, died: EngineDied | None) -> None:
        """Restart an engine and load the pool's version. Repeat this if the engine dies again
        meanwhile.

        `died` is None for a first start, which does not count as a restart. The call runs in its
        own task, so that the cancellation of a request does not cancel it. If no restart is left,
        it closes the engine and raises `EngineDied`.
        """
        event = "engine_back" if died else "engine_joined"
        while not member.up:
            if died is not None:
                try:
                    self._count_restart(member, died)
                except EngineDied:
                    await member.engine.close()  # it may hold staged weights, or a machine
                    raise
            try:
                await member.engine.start()
                await self._bring_up_to_date(member.engine)
            except EngineDied as again:
                died = again
            else:
                # no other task may run between the check of the state and this change
                member.up = True
                member.version = self._version
                member.versions = {self._version}
        member.generation += 1
        member.num_restarts += event == "engine_back"
        member.cached = CachedPrefixes()
        self._recovery.on_event(event, engine=self._members.index(member))

    def _count_restart(self, member: _Member, died: EngineDied) -> None:
        if not self._recovery.restarts:
            raise died
        if self._restarts == self._recovery.restarts:
            raise EngineDied(
                f"{died}; all {self._restarts} restarts of this run are used up: raise "
                f"engine.restarts = {self._recovery.restarts} to allow more"
            ) from died
        self._restarts += 1
        self._recovery.on_event(
            "engine_restarted",
            engine=self._members.index(member),
            cause=str(died),
            restarts=self._restarts,
        )

    async def _bring_up_to_date(self, engine: Engine) -> None:
        """Load the pool's version into a restarted engine, and resume it if the pool is sampling.

        If the pool's version changes meanwhile, load again. If the weights of a version are no
        longer available, wait for the next version.
        """
        version = -1
        running = False
        while (version, running) != (self._version, self._running):
            if running:
                await engine.interrupt()
                running = False
            elif version != self._version:
                version = self._version
                try:
                    weights = await in_thread(self._recovery.weights, version)
                except WeightsReplaced:
                    while version == self._version:
                        await self._version_changed.wait()
                    version = -1
                else:
                    await engine.load(weights, version)
            else:
                await engine.resume()
                running = True

    def _restart_ended(self, member: _Member, restart: asyncio.Task[None]) -> None:
        member.restart = None
        if not restart.cancelled():
            error = restart.exception()
            if error is not None and error is not self._error:
                self._report_loss(member, error)

    async def _cancel_restarts(self) -> None:
        restarts = [member.restart for member in self._members if member.restart is not None]
        for restart in restarts:
            restart.cancel()
        if restarts:
            await asyncio.wait(restarts)


@dataclass(slots=True)
class _Request:
    """A call of `EnginePool.sample` that is in progress."""

    tokens: Sequence[int]
    params: SamplingParams
    blocks: Sequence[int]
    """The block hashes of the context `tokens`."""
    weight: int
    began: float
    """Time of the event loop at which the pool got the request."""
    rejects: int = 0
    """Number of engines that rejected the request so far."""
    starts: int = 0
    """The number of the pool's starts when the request was sent."""
    group: int = 0


def _after_first(params: SamplingParams) -> SamplingParams:
    """Return the parameters with which a reply continues after its first token."""
    return replace(
        params,
        max_tokens=params.max_tokens - 1,
        sampled=params.sampled + 1,
        remaining=max(0, params.remaining - 1),
    )


def _joined(beginning: Reply, rest: Reply | None) -> Reply:
    """Return a reply whose first tokens one engine sampled, and another one the rest.

    If there is no rest, or one of other weights, the reply has the first tokens only.
    """
    first = beginning.piece
    if rest is None or (rest.piece.tokens and rest.piece.version != first.version):
        return replace(beginning, stop="interrupted")
    piece = rest.piece
    if not piece.tokens:
        return replace(beginning, stop=rest.stop)
    kept = [(len(each.tokens), each.kept_sets) for each in (first, piece)]
    signals = [each.signals for each in (first, piece) if each.signals is not None]
    joined = replace(
        piece,
        tokens=first.tokens + piece.tokens,
        behavior_logp=first.behavior_logp + piece.behavior_logp,
        clean=first.clean and piece.clean,
        kept_sets=join(kept) if piece.kept_sets is not None else None,
        signals=Signals.join(signals) if piece.signals is not None else None,
    )
    return replace(beginning, piece=joined, stop=rest.stop)


def _is_complete(reply: Reply, params: SamplingParams) -> bool:
    """Return True if the whole reply has ended, and not only the part that this request asked for.

    The result is False if the reply ends at a stop text, because only the caller can find that.
    """
    if reply.stop == "length":
        is_part = params.max_tokens < params.reply_limit
        return not is_part or len(reply.piece.tokens) < params.max_tokens
    return reply.stop == "stop"


def _countable(counters: Mapping[str, float]) -> dict[str, float]:
    """Return an engine's counters without times to the first token.

    A pool on an engine host has such times. Those of this pool also have the way to the host.
    """
    return {name: x for name, x in counters.items() if not name.startswith("first_token")}


def _busy_shares(
    members: Sequence[_Member], counters: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Return, as metrics, the share of time in which the engines of each group were busy, 0 to 1.

    A group without a working engine is left out.
    """
    shares = {}
    for name, prefills in (("prefill_busy_share", True), ("decode_busy_share", False)):
        group = [
            each
            for member, each in zip(members, counters, strict=True)
            if member.prefills == prefills
        ]
        busy_s = sum(each["busy_s"] for each in group)
        elapsed_s = busy_s + sum(each["idle_s"] for each in group)
        if group:
            shares[name] = busy_s / (elapsed_s or 1.0)
    return shares


def _raise_refusals(starts: Collection[asyncio.Task[None]]) -> None:
    """Raise the first error other than `EngineDied` of the ended tasks in `starts`.

    Such an error means that an engine rejects its settings, so a restart would not help.
    """
    for start in starts:
        error = None if start.cancelled() else start.exception()
        if error is not None and not isinstance(error, EngineDied):
            raise error


def supervise(engine: Engine, recovery: Recovery) -> EnginePool:
    """Return a pool that restarts its engines when they die, by the rules of `recovery`.

    `engine` is one engine, or a pool whose engines and settings the new pool gets.
    """
    if not isinstance(engine, EnginePool):
        return EnginePool([engine], recovery)
    return EnginePool(
        engine.engines,
        recovery,
        max_running=engine.max_running,
        keep_cache=engine.keep_cache,
        load_tokens=engine.load_tokens,
        phases=engine.phases,
        precise_engines=engine.precise_engines,
        patience_s=engine.patience_s,
    )
