"""Several engines as one: an episode goes where its prefix is cached, and elsewhere when that engine dies."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from unstale.engines import Engine, EngineDied, Reply, SamplingParams, Update
from unstale.engines.prefixes import Prefixes
from unstale.records import Sampled

MAX_EXTRA_REPLIES = 8
"""So many more replies than the least busy engine one may be sampling, for the sake of what it has cached."""
CACHED_TOKENS_PER_REPLY = 128
"""Cached tokens for each of them: in a small model, to compute them takes as long as one more reply holds up others."""


class _Member:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seen = Prefixes()
        self.busy = 0
        self.up = False
        self.rising: asyncio.Task[None] | None = None
        """Its way back up, begun when it died."""


class EnginePool:
    """`Engine` of engines with the same model. One that dies is started again meanwhile; the next `load` takes it back.

    Its replies end as interrupted ones, without a token. `EngineDied` is raised when none is left. One that comes back
    as something that cannot be worked with stays away. `told` hears of who is lost, why, and who is back. Each
    samples `room` replies at once; one that would wait there goes elsewhere while there is room. With `keep_cache` what
    is cached stays when weights change.
    """

    def __init__(
        self, engines: Sequence[Engine], *, room: int = 1 << 30, keep_cache: bool = False
    ) -> None:
        self.takes_deltas, self._keep_cache, self._room = False, keep_cache, room
        self.told: Callable[..., None] = lambda kind, **_: None
        self._members = [_Member(engine) for engine in engines]
        self._version, self._starts, self._deaths = -1, 0, 0
        self._died: EngineDied = EngineDied(
            "the engines have not been started: await start() first"
        )

    async def start(self) -> None:
        self._starts += 1
        await self._settle()
        self._version, self._deaths = -1, 0
        for member in self._members:
            member.up, member.seen = True, Prefixes()
        await self._each(lambda engine: engine.start())

    async def sample(self, tokens: Sequence[int], params: SamplingParams) -> Reply:
        member, starts = self._route(tokens), self._starts
        member.busy += 1
        member.seen.add(tokens)  # being computed there: its siblings need not compute it elsewhere
        try:
            reply = await member.engine.sample(tokens, params)
        except EngineDied as died:
            if starts != self._starts:
                raise
            self._lose(member, died)
            if self._version < 0 or not self._up:
                raise
            return Reply(Sampled((), (), self._version), "interrupted")
        finally:
            member.busy -= 1
        member.seen.add([*tokens, *reply.piece.tokens])
        return reply

    async def interrupt(self) -> None:
        await self._each(lambda engine: engine.interrupt())

    async def load(self, update: Update, version: int) -> None:
        for number, member in enumerate(self._members):
            if member.rising is not None and member.rising.done():
                error, member.rising = member.rising.exception(), None
                member.up, member.seen = error is None, Prefixes()
                self.told(
                    "engine_back" if member.up else "engine_lost",
                    engine=number,
                    cause=str(error or ""),
                )
                if isinstance(error, EngineDied):
                    member.rising = asyncio.ensure_future(member.engine.start())
        await self._each(lambda engine: engine.load(update, version))
        self._version = version
        for member in () if self._keep_cache else self._members:
            member.seen = Prefixes()

    async def resume(self) -> None:
        await self._each(lambda engine: engine.resume())

    async def close(self) -> None:
        self._starts += 1  # whose replies end with it have nowhere else to go
        self._died = EngineDied("the engines are closed")
        await self._settle()
        for member in self._members:
            member.up = False
        closed = await asyncio.gather(
            *(member.engine.close() for member in self._members), return_exceptions=True
        )
        for error in closed:
            if isinstance(error, BaseException):
                raise error

    def metrics(self) -> Mapping[str, float]:
        """Tokens and processor time of all, time and means of the mean one; the worst error; deaths since before."""
        found = [member.engine.metrics() for member in self._up or self._members]
        total = {"deaths": float(self._deaths)}
        self._deaths = 0
        for name in dict.fromkeys(name for counters in found for name in counters):
            values = [counters[name] for counters in found if name in counters]
            share = len(values) if name.endswith(("_s", "_mean")) and name != "processor_s" else 1
            total[name] = max(values) if name.endswith("_error") else sum(values) / share
        return total

    @property
    def _up(self) -> list[_Member]:
        return [member for member in self._members if member.up]

    def _route(self, tokens: Sequence[int]) -> _Member:
        """Where what is cached of it is most worth being busier than others, which ends at `MAX_EXTRA_REPLIES`."""
        if not self._up:
            raise self._died
        least = min(member.busy for member in self._up)
        most = min(least + MAX_EXTRA_REPLIES, max(least, self._room - 1))
        near = [member for member in self._up if member.busy <= most]
        return max(
            near,
            key=lambda member: (
                member.seen.length(tokens) - CACHED_TOKENS_PER_REPLY * member.busy,
                -member.busy,
            ),
        )

    async def _each(self, call: Callable[[Engine], Awaitable[None]]) -> None:
        """Of those that are up. What one refuses counts once all have answered; the death of one is no failure."""
        if not self._up:
            raise self._died
        members = self._up
        results = await asyncio.gather(
            *(call(member.engine) for member in members), return_exceptions=True
        )
        for member, result in zip(members, results, strict=True):
            if isinstance(result, EngineDied):
                self._lose(member, result)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, EngineDied):
                raise result
        if not self._up:
            raise self._died

    def _lose(self, member: _Member, died: EngineDied) -> None:
        """It is down until a `load` finds it started again. When all are, whoever supervises starts all."""
        self._died = died
        if member.up:
            member.up = False
            self._deaths += 1
            self.told("engine_lost", engine=self._members.index(member), cause=str(died))
            if self._up:
                member.rising = asyncio.ensure_future(member.engine.start())

    async def _settle(self) -> None:
        """No member is on its way any more."""
        for member in self._members:
            rising, member.rising = member.rising, None
            if rising is not None:
                rising.cancel()
                await asyncio.wait((rising,))
                _ = rising.cancelled() or rising.exception()
