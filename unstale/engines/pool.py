"""A pool of engines with the same weights.

The pool sends each request to an engine with little load, or to one that has the request's context
in its cache. It restarts engines that die.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from torch import Tensor

from unstale.engines import (
    CacheEngine,
    Engine,
    EngineDied,
    Reply,
    SamplingParams,
    Update,
    VersionedEngine,
    per_second,
)
from unstale.engines.prefixes import CachedPrefixes, add_blocks, hash_blocks
from unstale.engines.routing import (
    CACHED_TOKENS_PER_REPLY,
    MAX_EXTRA_REPLIES,
    NO_PHASES,
    Candidate,
    GroupLoads,
    Phases,
    ReplyLengths,
    choose,
    request_weight,
)
from unstale.records import Sampled
from unstale.threads import in_thread

MAX_LAG_S = 120.0
"""Seconds that an elastic pool, after calling all its engines and getting a first answer, waits for
the others. Engines may join and leave an elastic pool during a run.

An engine that takes longer is treated as dead. The pool restarts it without waiting for it.
"""

MAX_LISTED = 32
"""Number of engines of a pool that have metrics of their own. The limit bounds the number of
metrics.
"""


class WeightsReplaced(LookupError):
    """Error: the weights of a version are no longer available. A newer version replaced them."""


class _Member:
    """One engine of a pool, with the pool's record of its state."""

    def __init__(self, engine: Engine, *, prefills: bool, precise: bool) -> None:
        self.engine = engine
        self.precise = precise
        """True if the engine does not round, in a pool with engines that do."""
        self.prefills = prefills
        """True if the engine belongs to the group for requests with much new context (prefill)."""
        self.cached = CachedPrefixes()
        self.num_running = 0
        self.load = 0
        """Sum of the loads of the engine's running requests (`request_weight`)."""
        self.up = False
        self.generation = 0
        """Number of successful starts by the pool. If the number changed during a call, the engine
        died since the call began.
        """
        self.num_restarts = 0
        """Number of successful restarts since metrics were last read."""
        self.version = -1
        """Version of the weights that the engine loaded last, -1 before the first."""
        self.versions: set[int] = set()
        """The versions of adapters that a `VersionedEngine` has. Empty for other engines."""
        self.adding = asyncio.Lock()
        """A lock that is held while adapters of an older version are added to the engine."""
        self.restart: asyncio.Task[None] | None = None

    def metrics(self, counters: Mapping[str, float]) -> dict[str, float]:
        """Return metrics of the engine: its state, and shares and rates computed from `counters`.

        `counters` is empty for an engine that does not work. Then only the state is returned.
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
    """A function from a version to its full weights. The version may be one that the pool is still
    loading. If the function raises `WeightsReplaced`, a restarted engine waits for the pool's next
    version.
    """
    restarts: int = 0
    """Number of restarts allowed in a run, for all engines together."""
    on_event: Callable[..., None] = lambda kind, **_: None
    """A function called with the kind of an event and its details, for the run's log. Kinds are
    `engine_lost`, `engine_restarted` (a restart begins), `engine_back` (it has succeeded), and
    `engine_joined` for the first start in an elastic pool.
    """


NO_RECOVERY = Recovery()
_ROUTED = ("rejects", "prefill_requests", "decode_requests")
"""The additional counters of a pool with a prefill and a decode group."""


class EnginePool:
    """One or more engines with the same model, used as one engine.

    If an engine dies, each of its requests returns an interrupted reply without tokens. The engine
    is restarted, if `recovery` allows it, and loads the current version. The other engines
    continue. A call waits for a restart only while no engine works. It raises `EngineDied` if no
    engine works and none can be restarted.

    Each engine samples up to `max_running` replies at once. With `keep_cache`, engines keep their
    caches when the weights change. `load_tokens` makes requests with long contexts count as more
    load (`request_weight`).

    With `phases`, the engines are divided into a group for requests with much new context (prefill)
    and one for the others (decode). `routing.choose` chooses the group. Raises ValueError if a
    group would be empty. With `phases.sends_cache`, all engines must be `CacheEngine`s: a prefill
    engine computes the context, and its first token is dropped. A decode engine receives the cached
    context and samples the reply.

    The last `precise_engines` do not round, and the others do. A request is sent to the kind of
    engine that it asks for (`SamplingParams.precise`).

    With `patience_s` the pool is elastic. `start` waits for one engine only. The others join when
    they have started and loaded the current version. No call waits for an engine that starts. Once
    one engine has answered, a call waits at most `MAX_LAG_S` for the others. `EngineDied` is raised
    when no engine was up for `patience_s` seconds.
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
        """An event that is set when `_version` changes. A new event then replaces it."""
        self._running = False
        """True between `resume` and `interrupt`. A restarted engine is resumed only while it is
        True.
        """
        self._starts = 0
        self._restarts = 0
        self._reported_restarts = 0
        self._deaths = 0
        self._lengths = ReplyLengths()
        self._loads = GroupLoads()
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
        for number, member in enumerate(self._members):
            member.prefills = number < self.phases.prefill_engines
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
        blocks = self._hash_blocks(tokens)
        weight = request_weight(len(tokens), self.load_tokens)
        while True:
            starts = self._starts
            kind = params.precise if self.precise_engines else None
            await self._wait_until_up(kind)
            if self.phases.prefill_engines:
                member = self._route_by_phase(blocks, len(tokens), params)
            else:
                member = self._route(blocks, self._working(kind))
            hands_over = self.phases.sends_cache and member.prefills and params.max_tokens > 1
            asked = replace(params, max_tokens=1) if hands_over else params
            with self._counted(member, weight):
                # set before the wait, so that siblings are sent to this engine, too
                member.cached.add(blocks)
                reply = await self._ask(member, tokens, asked, starts)
            if hands_over and reply and reply.stop == "length":
                decoding = [each for each in self._up if not each.prefills]
                target = self._route(blocks, decoding or [member])
                with self._counted(target, weight):
                    target.cached.add(blocks)
                    reply = None
                    if await self._hand_over(member, target, tokens, starts):
                        reply = await self._ask(target, tokens, params, starts)
                member = target
            if reply:
                if len(self._members) > 1:
                    member.cached.add(add_blocks(tokens, reply.piece.tokens, blocks))
                if _is_complete(reply, params):
                    self._lengths.add(params.sampled + len(reply.piece.tokens))
                return reply
            await self._wait_until_up()
            if self._version >= 0:
                return Reply(Sampled((), (), self._version), "interrupted")

    @contextmanager
    def _counted(self, member: _Member, weight: int) -> Iterator[None]:
        """Count a request of load `weight` as one of the engine's."""
        member.num_running += 1
        member.load += weight
        try:
            yield
        finally:
            member.num_running -= 1
            member.load -= weight

    async def _ask(
        self, member: _Member, tokens: Sequence[int], params: SamplingParams, starts: int
    ) -> Reply | None:
        """Return the reply of an engine, None if the engine died.

        Raises `EngineDied` if the pool was started again since the caller read `starts`.
        """
        generation = member.generation
        try:
            await self._provide(member, params.version)
            return await member.engine.sample(tokens, params)
        except EngineDied as died:
            if starts != self._starts:
                raise
            self._lose(member, generation, died)
            return None

    async def _hand_over(
        self, source: _Member, target: _Member, tokens: Sequence[int], starts: int
    ) -> bool:
        """Send the cache of a context from one engine to another (P/D-Serve).

        If `source` dies, `target` computes the context itself. Return False if sampling was
        interrupted meanwhile. Raises `EngineDied` as `_ask`.
        """
        version, member = self._version, source
        generation = member.generation
        try:
            data = await cast(CacheEngine, source.engine).send_cache(tokens)
            member, generation = target, target.generation
            await cast(CacheEngine, target.engine).take_cache(data)
        except EngineDied as died:
            if starts != self._starts:
                raise
            self._lose(member, generation, died)
        return self._running and version == self._version

    def report_death(self, engine: Engine, died: EngineDied) -> None:
        """Restart `engine`, whose death another component noticed. The error `died` gives the
        reason.
        """
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

        Those load the next version, because the current one may no longer be available.
        """
        self._running = False
        await self._call_all(lambda engine: engine.interrupt())

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

    async def keep_versions(self, versions: Collection[int]) -> None:
        """Drop adapters of other versions than `versions` and the current one in every engine.

        All engines must be `VersionedEngine`s.
        """
        kept = {*versions, self._version}
        for member in self._members:
            member.versions &= kept
        await self._call_all(lambda engine: cast(VersionedEngine, engine).keep_versions(versions))

    async def _provide(self, member: _Member, version: int) -> None:
        """Add the adapters of `version` to the engine, if the engine lacks them.

        A restarted engine has only the adapters that were loaded last.
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
        """Return counters of the working engines since the last call, and numbers of crashes and
        restarts.

        Tokens and processor time are summed. Other times, and means, are averaged. Of errors the
        maximum is returned. The first `MAX_LISTED` engines also have metrics of their own, named
        `engine_<number>/...`.
        """
        members = self._up or self._members
        counters = [member.engine.metrics() for member in members]
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
        return totals | self._by_engine(dict(zip(map(id, members), counters, strict=True)))

    def _by_engine(self, counters: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
        """Return the metrics that each of the first `MAX_LISTED` engines has of its own.

        `counters` has each engine's counters by `id(member)`.
        """
        return {
            f"engine_{number}/{name}": value
            for number, member in enumerate(self._members[:MAX_LISTED])
            for name, value in member.metrics(counters.get(id(member), {})).items()
        }

    @property
    def _up(self) -> list[_Member]:
        return self._working()

    def _working(self, precise: bool | None = None) -> list[_Member]:
        """Return the working engines, or those that do not round (`precise`), or that do."""
        members = [member for member in self._members if member.up]
        return [member for member in members if precise in (None, member.precise)]

    def _hash_blocks(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the hashes of the blocks of a context. Empty if the pool has only one engine."""
        return hash_blocks(tokens) if len(self._members) > 1 else []

    def _route(self, blocks: Sequence[int], members: Sequence[_Member]) -> _Member:
        """Return one of `members`: with enough of a request's context cached, or little load.

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

    def _route_by_phase(
        self, blocks: Sequence[int], context: int, params: SamplingParams
    ) -> _Member:
        """Return the engine for a request with `context` tokens, by `routing.choose`."""
        members = self._up
        candidates = [
            Candidate(
                load=member.load,
                cached=member.cached.length(blocks),
                is_free=member.num_running < self.max_running,
                prefills=member.prefills,
            )
            for member in members
        ]
        choice = choose(
            candidates,
            context=context,
            reply_tokens=self._lengths.expected(params.reply_limit, params.sampled),
            phases=self.phases,
        )
        self._routed["rejects"] += choice.rejects
        self._routed["prefill_requests" if choice.is_prefill else "decode_requests"] += 1
        group = self._loads.add(candidates) if self.phases.moves else None
        others = [member for member in members if member.prefills != group]
        if group is not None and len(others) > 1:
            min(others, key=lambda member: member.load).prefills = group
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

        Restart those that die during the call. An error other than `EngineDied` is raised after all
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
        """Wait for one of the calls to succeed, then at most `MAX_LAG_S` for the others. Cancel
        late ones.
        """
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
        """Return the running tasks that restart engines (of the kind `precise`, as `_working`).

        Raise the last error if no engine works and none is being restarted.
        """
        members = [member for member in self._members if precise in (None, member.precise)]
        restarts = [member.restart for member in members if member.restart is not None]
        if not (restarts or self._working(precise)):
            raise self._error
        return restarts

    async def _wait_until_up(self, precise: bool | None = None) -> None:
        """Wait until an engine works (of the kind `precise`, as `_working`).

        Raise the last error if all restarts have failed.
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
        """Mark an engine as down and begin to restart it. `died` is the error that gives the
        reason.

        Do nothing if the engine is already down, or was restarted since the caller read
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
        """Restart an engine and load the pool's version. Repeat if the engine dies again meanwhile.

        `died` is None for a first start, which does not count as a restart. The call runs in its
        own task, so that the cancellation of a request does not cancel it. When no restart is left,
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
        """Load the pool's version into a restarted engine, and resume the engine if the pool is
        sampling.

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


def _is_complete(reply: Reply, params: SamplingParams) -> bool:
    """Return True if a reply has ended as a whole, not only the part that one request asked for.

    A stop text, which only the caller can find, is not noticed: the result is then False.
    """
    if reply.stop == "length":
        is_part = params.max_tokens < params.reply_limit
        return not is_part or len(reply.piece.tokens) < params.max_tokens
    return reply.stop == "stop"


def _busy_shares(
    members: Sequence[_Member], counters: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Return the mean share of busy time (0 to 1) of the prefill and the decode group, as metrics.

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
    """Raise the first error, other than `EngineDied`, of the ended tasks `starts`.

    Such an error means that an engine rejects its settings, so a restart would not help.
    """
    for start in starts:
        error = None if start.cancelled() else start.exception()
        if error is not None and not isinstance(error, EngineDied):
            raise error


def supervise(engine: Engine, recovery: Recovery) -> EnginePool:
    """Return a pool that restarts its engines when they die, by the rules of `recovery`.

    `engine` is one engine, or a pool, whose engines and settings the new pool gets.
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
