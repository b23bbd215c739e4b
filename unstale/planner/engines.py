"""Simulated engines: each shares its steps among the replies that it runs.

All running replies of an engine advance by one token a decoding step, and a step takes what `Costs.step_s` says of how
many run and the context they hold. Between two arrivals or departures the number is fixed and the context grows by it
with every step, so any number of steps is one addition: exact where a step's time is affine in the context, by the
midpoint rule elsewhere. New contexts are computed between two steps, which delays everybody by `Costs.prefill_s`.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np

from unstale.engines.pool import CACHED_TOKENS_PER_REPLY, MAX_EXTRA_REPLIES
from unstale.planner.clock import SimulatedClock
from unstale.planner.costs import Costs


class SimulatedReply:
    """One reply on its way: what is left of it, and whom to tell of its pieces.

    `done` is called with the tokens that a stretch gave, the version, and whether the reply is complete.
    """

    __slots__ = (
        "cached",
        "context",
        "done",
        "engine",
        "episode",
        "group",
        "left",
        "prompt",
        "since",
    )

    def __init__(
        self, episode: int, group: int, prompt: int, done: Callable[[int, bool], None]
    ) -> None:
        self.episode, self.group, self.prompt, self.done = episode, group, prompt, done
        self.context = prompt
        """Tokens that it goes on from."""
        self.left = 0
        """Tokens still to be sampled."""
        self.cached = 0
        """Tokens of its context that `engine` computed under its version."""
        self.engine: SimulatedEngine | None = None
        """Where it was sampled last."""
        self.since = 0


class EngineCapacity(NamedTuple):
    """Replies that run at most, and tokens that there is memory for (0: for as many contexts as run at most)."""

    replies: int
    tokens: int = 0


_SPARE = 0.01
"""Share of the memory that is left free when a reply is let in, so that it is not the next one out."""


class SimulatedEngine:
    """A processor-sharing server. As many replies run as there are `EngineCapacity` for, further ones wait in order.

    Contexts of episodes that wait for their environment give way to running ones, the oldest first. Where these grow
    beyond the memory, the newest waits again, and is computed again.
    """

    def __init__(
        self, clock: SimulatedClock, costs: Costs, places: EngineCapacity, number: int
    ) -> None:
        self.number = number
        self.busy = 0
        """Replies that are its own: running, waiting, or held while it stands still."""
        self.told: Callable[[SimulatedEngine], None] = lambda engine: None
        """Hears of every change of `busy`."""
        self.up, self.standing = True, True
        self.prompts: set[int] = set()
        """Groups whose prompt it has computed."""
        self.busy_s, self.sampled, self.lost = 0.0, 0, 0
        self._clock, self._costs, self._places = clock, costs, places
        self._running: list[tuple[int, int, SimulatedReply]] = []
        self._order = count()
        self._waiting: deque[SimulatedReply] = deque()
        self._kept: dict[int, tuple[SimulatedReply, int]] = {}
        """With the tokens that it held when it was complete."""
        self._held = 0
        self._steps = self._context = 0
        self._at = self._decoded = 0.0
        """When its next step can begin, and when its last one ended: contexts are computed in between."""
        self._turn = 0

    def take(self, reply: SimulatedReply) -> None:
        """A reply to sample; it waits while the engine stands still or is full."""
        self._count(1)
        self.forget(reply.episode)
        if not self.standing:
            self._advance(self._clock.now)
        if (
            self.standing or self._waiting or not self._fits(reply) or not self._ahead()
        ):  # that are told first
            self._waiting.append(reply)
        else:
            self._join(reply)
        if not self.standing:
            self._schedule()

    def interrupt(self) -> float:
        """Stop at the end of the step: everybody gets what there is of their replies. When that is."""
        if self.standing:
            return self._clock.now
        self._stop()
        self._advance(self._clock.now)
        self.busy_s -= max(
            0.0, self._at - max(self._decoded, self._clock.now)
        )  # contexts that nobody needs now
        self._at = max(self._decoded, self._clock.now)
        interrupted = [reply for _, _, reply in sorted(self._running)]
        self._running = []
        for reply in interrupted:
            fresh = reply.since == self._steps
            reply.done(self._leave(reply), False)
            if fresh:  # its context may not have been computed to its end
                reply.cached = 0
                self.prompts.discard(reply.group)
        self._waiting.extendleft(reversed(interrupted))
        return self._at

    def resume(self, *, keep_cache: bool) -> None:
        """Sample again. What was computed under older weights is computed again, unless it is kept."""
        if not self.standing:
            return
        self.standing = False
        self._at = self._decoded = self._clock.now
        if not keep_cache:
            self.prompts.clear()
            for reply in self._waiting:
                reply.cached = 0
            for episode in list(self._kept):
                self._lose(episode)
        self._admit()
        self._schedule()

    def die(self) -> list[SimulatedReply]:
        """Gone with everything it holds. The replies that have to go elsewhere, from what they had said before."""
        self._advance(self._clock.now)
        self._stop()
        self.busy_s -= max(0.0, self._at - self._clock.now)
        homeless = [reply for _, _, reply in sorted(self._running)]
        self.lost += sum(self._steps - reply.since for reply in homeless)
        homeless += self._waiting
        for reply in homeless:
            reply.cached, reply.engine = 0, None
        self._running, self._context, self.busy, self.up = [], 0, 0, False
        self._waiting.clear()
        for episode in list(self._kept):
            self._lose(episode)
        self.prompts.clear()
        return homeless

    def _count(self, more: int) -> None:
        self.busy += more
        self.told(self)

    def _stop(self) -> None:
        self.standing = True
        self._turn += 1

    def _join(self, reply: SimulatedReply) -> None:
        have = reply.cached if reply.engine is self else 0
        if reply.group in self.prompts:
            have = max(have, reply.prompt)
        self.prompts.add(reply.group)
        tokens = reply.context - have
        if tokens > 0:
            took = self._costs.prefill_s(tokens)
            self._at += took
            self.busy_s += took
        reply.engine, reply.since = self, self._steps
        heapq.heappush(self._running, (self._steps + reply.left, next(self._order), reply))
        self._context += reply.context
        self._evict()

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0]):
            self._join(self._waiting.popleft())

    def _fits(self, reply: SimulatedReply) -> bool:
        (most, tokens), running = self._places, len(self._running)
        room = not tokens or self._context + reply.context + running + 1 <= (1 - _SPARE) * tokens
        return not running or (running < most and room)

    def _ahead(self) -> int:
        """Steps until somebody is complete, or there is no memory left; where one runs, there is enough."""
        if not (running := len(self._running)):
            return 1
        steps = self._running[0][0] - self._steps
        return (
            steps
            if not self._places.tokens or running == 1
            else min(steps, self._room() // running)
        )

    def _room(self) -> int:
        return max(0, self._places.tokens - self._context)

    def _evict(self) -> None:
        """What is kept gives way to what runs, and that to itself."""
        most, tokens = self._places

        def crowded() -> bool:
            return (
                self._held + self._context > tokens
                if tokens
                else len(self._kept) + len(self._running) > most
            )

        while self._kept and crowded():
            self._lose(next(iter(self._kept)))
        while tokens and len(self._running) > 1 and self._room() < len(self._running):
            newest = max(self._running, key=lambda one: one[1])
            self._running.remove(newest)
            heapq.heapify(self._running)
            newest[2].done(self._leave(newest[2]), False)
            newest[2].cached = 0
            self._waiting.appendleft(newest[2])

    def _lose(self, episode: int) -> None:
        """A context that was kept."""
        reply, _ = self._kept[episode]
        self.forget(episode)
        if reply.engine is self:
            reply.cached = 0

    def _advance(self, now: float) -> None:
        """Do the steps that have begun by `now`; the state is then that at the end of the last of them."""
        if not self._running or self._at >= now:
            self._at = max(self._at, now)
            self._decoded = max(self._decoded, self._at) if not self._running else self._decoded
            return
        most, ahead = self._ahead(), now - self._at
        steps = 1
        for _ in range(3):
            steps = min(most, max(1, math.ceil(ahead / self._step_s(steps) - 1e-9)))
        while steps < most and steps * self._step_s(steps) < ahead - 1e-9:
            steps += 1
        self._do(steps)

    def _step_s(self, steps: int) -> float:
        """The mean time of so many steps from here."""
        replies = len(self._running)
        half, odd = divmod(replies * (steps - 1), 2)
        took = self._costs.step_s(replies, self._context + half)
        return (took + self._costs.step_s(replies, self._context + half + 1)) / 2 if odd else took

    def _do(self, steps: int) -> None:
        took = steps * self._step_s(steps)
        self.busy_s += took
        self._at += took
        self._decoded = self._at
        self._steps += steps
        self._context += steps * len(self._running)

    def _schedule(self) -> None:
        """Be here again when the next reply is complete, or the memory full."""
        self._turn += 1
        if self._running:
            steps = self._ahead()
            due = self._at + steps * self._step_s(steps) if steps else self._at
            self._clock.at(due, partial(self._complete, self._turn))

    def _complete(self, turn: int) -> None:
        if turn != self._turn:
            return
        if steps := self._ahead():
            self._do(steps)
        finished = []
        while self._running and self._running[0][0] <= self._steps:
            reply = heapq.heappop(self._running)[2]
            self._count(-1)
            finished.append((reply, self._leave(reply)))
            self._held += reply.context
            self._kept[reply.episode] = reply, reply.context
        self._evict()
        self._admit()
        for reply, tokens in finished:
            reply.done(tokens, True)
        self._schedule()

    def _leave(self, reply: SimulatedReply) -> int:
        """It runs no longer. The tokens that it got."""
        tokens = self._steps - reply.since
        self.sampled += tokens
        reply.left -= tokens
        reply.context += tokens
        reply.cached = reply.context
        self._context -= reply.context
        return tokens

    def forget(self, episode: int) -> None:
        """The context of an episode that is over, or runs again, is kept no longer."""
        if episode in self._kept:
            self._held -= self._kept.pop(episode)[1]


class SimulatedEnginePool:
    """Engines of one version. A reply goes where its context is, or where the fewest are: as `engines.EnginePool` does."""

    def __init__(
        self,
        clock: SimulatedClock,
        engines: list[SimulatedEngine],
        *,
        keep_cache: bool,
        restart_s: float,
    ) -> None:
        self.version = -1
        self.deaths = 0
        self.members = engines
        self._clock, self._keep_cache, self._restart_s = clock, keep_cache, restart_s
        self._standing = True
        self._homeless: list[SimulatedReply] = []
        self._by_busy: list[tuple[int, int]] = []
        self._back: dict[int, float] = {}
        """When an engine that died is there again."""
        for engine in engines:
            engine.told = self._rank
            self._rank(engine)

    def sample(self, reply: SimulatedReply) -> None:
        idlest, at = self._idlest(), reply.engine
        if idlest is None:
            self._homeless.append(reply)
        elif (
            at is not None
            and at.up
            and at.busy - idlest.busy
            <= min(MAX_EXTRA_REPLIES, reply.cached / CACHED_TOKENS_PER_REPLY)
        ):
            at.take(reply)
        else:
            idlest.take(reply)

    def _idlest(self) -> SimulatedEngine | None:
        """Of those that are up. Every change of `busy` is on the heap, and what is there and no longer true is not."""
        while self._by_busy:
            busy, number = self._by_busy[0]
            if self.members[number].up and self.members[number].busy == busy:
                return self.members[number]
            heapq.heappop(self._by_busy)
        return None

    def _rank(self, engine: SimulatedEngine) -> None:
        heapq.heappush(self._by_busy, (engine.busy, engine.number))
        if len(self._by_busy) > 64 * len(self.members):
            self._by_busy = [(other.busy, other.number) for other in self.members if other.up]
            heapq.heapify(self._by_busy)

    def interrupt(self) -> float:
        """All stop. When the last one has."""
        self._standing = True
        return max([self._clock.now, *(engine.interrupt() for engine in self.members if engine.up)])

    def resume(self, version: int) -> None:
        """All sample again, under this version; those that died and are there again, too."""
        self.version, self._standing = version, False
        for number, back in list(self._back.items()):
            if back <= self._clock.now:
                del self._back[number]
                self.members[number].up = True
                self._rank(self.members[number])
        for engine in self.members:
            if engine.up:
                engine.resume(keep_cache=self._keep_cache)
        homeless, self._homeless = self._homeless, []
        for reply in homeless:
            self.sample(reply)

    def fail(self, random: np.random.Generator, per_hour: float) -> None:
        """Let engines die at this rate from here on."""

        def doom(engine: SimulatedEngine) -> None:
            self._clock.at(
                self._clock.now + random.exponential(3600 / per_hour), partial(strike, engine)
            )

        def strike(engine: SimulatedEngine) -> None:
            if engine.up:
                self._kill(engine)
            doom(engine)

        for engine in self.members:
            doom(engine)

    def _kill(self, engine: SimulatedEngine) -> None:
        homeless = engine.die()
        self.deaths += 1
        self._back[engine.number] = self._clock.now + self._restart_s
        if not any(
            other.up for other in self.members
        ):  # nobody is left: whoever is back first gets the weights
            self._clock.at(self._clock.now + self._restart_s, self._revive)
        for reply in homeless:
            self.sample(reply)

    def _revive(self) -> None:
        if not self._standing:
            self.resume(self.version)
