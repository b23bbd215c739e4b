"""Simulated engines. A decoding step of an engine adds a token to each of its running replies.

A step takes `Costs.step_s` seconds. While no reply starts or ends, the number of replies is
constant and their context grows linearly. Many steps are then simulated at once: they take their
number times the seconds of the middle step. This is exact if `step_s` is linear in the context.
Contexts that are not cached are computed between two steps. This takes `Costs.prefill_s`, and all
replies of the engine wait for it.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np

from unstale.analysis.planner.clock import SimulatedClock
from unstale.analysis.planner.costs import NO_OVERHEADS, Costs, Overheads
from unstale.analysis.planner.workload import Fleet, Prefix
from unstale.engines.routing import (
    CACHED_TOKENS_PER_REPLY,
    MAX_EXTRA_REPLIES,
    Candidate,
    Phases,
    ReplyLengths,
    choose,
    request_weight,
)


@dataclass(slots=True, eq=False)
class SimulatedReply:
    """A reply that a simulated engine samples, or will sample."""

    episode: int
    prefixes: Sequence[Prefix]
    """First parts of the episode's contexts that other episodes may share, shortest first."""
    on_tokens: Callable[[int, bool], None]
    """A function that an engine calls when it returns tokens. Its arguments are their number, and
    True if the reply is complete.
    """
    context: int
    """Number of tokens in the context, including those sampled so far."""
    left: int = 0
    """Number of tokens of the reply that are still to be sampled."""
    sampled: int = 0
    """Number of tokens of the reply that its episode has received."""
    cached: int = 0
    """Number of context tokens whose keys and values `engine` has in its cache."""
    engine: "SimulatedEngine | None" = None
    """The engine that sampled for this reply last. None if none did, or if it failed."""
    weight: int = 1
    """The load of the reply on an engine, in replies: a long context counts as several."""
    since: int = 0
    """Number of decoding steps that the engine had made when the reply began to run."""
    requested_at: float = -1.0
    """Simulated time of the request, in seconds. Negative if the time to its first token is not
    measured, or has been already.
    """
    computed: Collection[int] = ()
    """Names of the `prefixes` that `engine` had not cached and computed for this reply."""


_ORDER = count()
"""Counter of started replies. It orders replies that end at the same step."""
_UNKNOWN = 1 << 30
"""Length in tokens that is expected of a reply before any reply is complete."""
_SPARE = 0.01
"""Share of an engine's memory for contexts that must stay free when a reply starts. With less, a
context would soon be evicted.
"""


class SimulatedEngine:
    """A simulated engine. Replies beyond its capacity wait in order of arrival.

    It keeps the contexts of complete replies for the next turns of their episodes. If memory is
    short, it evicts these first, in the order of completion. Then it evicts the newest running
    reply, which waits again and has its context computed again.
    """

    def __init__(self, clock: SimulatedClock, costs: Costs, fleet: Fleet, number: int) -> None:
        self.number = number
        self.prefills = number < fleet.prefill_engines
        """True if the engine belongs to the prefill group, which gets requests with many new
        context tokens.
        """
        self.longest_queue = 0
        """Largest number of replies that waited while the engine was not paused."""
        self.on_first_token: Callable[[SimulatedReply, float], None] = lambda reply, time: None
        self.on_complete: Callable[[SimulatedReply, int], None] = lambda reply, tokens: None
        self.load = 0
        """Sum of the weights (`SimulatedReply.weight`) of all replies on this engine."""
        self.on_load_change: Callable[[SimulatedEngine], None] = lambda engine: None
        self.up = True
        self.restarted_at = 0.0
        self.paused = True
        self.prefixes: set[int] = set()
        """Names of the prefixes (first parts of contexts) that this engine has computed and
        cached.
        """
        self.busy_s = 0.0
        self.sampled = 0
        self.steps = 0
        """Number of decoding steps."""
        self.prefilled = 0
        """Number of context tokens that the engine has computed."""
        self.lost = 0
        """Number of sampled tokens that were lost because the engine failed."""
        self._clock = clock
        self._costs = costs
        self._pace = 1.0
        self._max_running = fleet.max_running
        self._max_tokens = fleet.cache_tokens
        """Number of context tokens that fit into memory. 0 means no limit."""
        self._running: list[tuple[int, int, SimulatedReply]] = []
        """A heap of (step at which the reply is complete, order of arrival, reply)."""
        self._fresh: dict[int, SimulatedReply] = {}
        """Episode -> its reply, if it has started but not got its first token."""
        self._waiting: deque[SimulatedReply] = deque()
        self._kept: dict[int, tuple[SimulatedReply, int]] = {}
        """Episode -> its last complete reply, and the number of context tokens that are kept of
        it.
        """
        self._kept_tokens = 0
        self._context = 0
        """Number of context tokens of the running replies."""
        self._steps = 0
        self._next_step_at = 0.0
        self._last_step_ended = 0.0
        """Simulated time at which the last step ended. `_next_step_at` is later if contexts are
        computed between two steps.
        """
        self._timer = 0
        """Number of the newest scheduled event for the completion of a reply. Older events are
        ignored.
        """

    def take(self, reply: SimulatedReply) -> None:
        """Start a reply. It waits in the queue if the engine is paused or full, or other replies
        wait.
        """
        self._add_load(reply.weight)
        self.forget(reply.episode)
        if not self.paused:
            self._advance(self._clock.now)
        # a reply that is complete now must be returned before another one starts
        if self.paused or self._waiting or not self._fits(reply) or not self._steps_ahead():
            self._waiting.append(reply)
            self._measure_queue()
        else:
            self._start(reply)
        if not self.paused:
            self._schedule()

    def interrupt(self) -> float:
        """Pause after the current step. New tokens of all replies are passed to their episodes.

        Return the simulated time, in seconds, at which the engine is paused.
        """
        if self.paused:
            return self._clock.now
        self._pause()
        self._advance(self._clock.now)
        paused_at = max(self._last_step_ended, self._clock.now)
        self.busy_s -= max(0.0, self._next_step_at - paused_at)  # these contexts are not needed now
        self._next_step_at = paused_at
        interrupted = [reply for _, _, reply in sorted(self._running)]
        self._running = []
        for reply in interrupted:
            is_new = reply.since == self._steps
            reply.on_tokens(self._stop(reply), False)
            if is_new:  # the context of this reply may be incomplete
                reply.cached = 0
                self.prefixes.difference_update(reply.computed)
        self._waiting.extendleft(reversed(interrupted))
        return self._next_step_at

    def resume(self, *, keep_cache: bool, pace: float = 1.0) -> None:
        """Continue to sample after a pause. Cached contexts are discarded unless `keep_cache` is
        True.

        All durations are multiplied by `pace` until the next pause.
        """
        if not self.paused:
            return
        self.paused = False
        self._pace = pace
        self._next_step_at = self._last_step_ended = self._clock.now
        if not keep_cache:
            self.prefixes.clear()
            for reply in self._waiting:
                reply.cached = 0
            for episode in list(self._kept):
                self._evict_kept(episode)
        self._start_waiting()
        self._schedule()

    def fail(self) -> list[SimulatedReply]:
        """Lose all state, as in a crash. Return the unfinished replies, which other engines can
        continue.
        """
        self._advance(self._clock.now)
        self._pause()
        self.busy_s -= max(0.0, self._next_step_at - self._clock.now)
        replies = [reply for _, _, reply in sorted(self._running)]
        self.lost += sum(self._steps - reply.since for reply in replies)
        replies += self._waiting
        for reply in replies:
            reply.cached = 0
            reply.engine = None
        self._fresh.clear()
        self._running = []
        self._context = 0
        self.load = 0
        self.up = False
        self._waiting.clear()
        for episode in list(self._kept):
            self._evict_kept(episode)
        self.prefixes.clear()
        return replies

    def forget(self, episode: int) -> None:
        """Discard the context that is kept of an episode."""
        if episode in self._kept:
            self._kept_tokens -= self._kept.pop(episode)[1]

    @property
    def num_replies(self) -> int:
        """Number of replies that run or wait on this engine."""
        return len(self._running) + len(self._waiting)

    @property
    def has_place(self) -> bool:
        return self.num_replies < self._max_running

    def cached_tokens(self, reply: SimulatedReply) -> int:
        """Return the number of context tokens of a reply whose keys and values this engine has."""
        cached = reply.cached if reply.engine is self else 0
        if reply.episode in self._kept:
            cached = max(cached, self._kept[reply.episode][1])
        return min(max(cached, self._copied_tokens(reply)), reply.context)

    def _copied_tokens(self, reply: SimulatedReply) -> int:
        """Return how many context tokens of a reply the engine has cached because other replies
        share them.
        """
        for name, tokens in reversed(reply.prefixes):
            if tokens <= reply.context and name in self.prefixes:
                return tokens
        return 0

    def _measure_queue(self) -> None:
        if not self.paused:
            self.longest_queue = max(self.longest_queue, len(self._waiting))

    def _add_load(self, weight: int) -> None:
        self.load += weight
        self.on_load_change(self)

    def _pause(self) -> None:
        self.paused = True
        self._timer += 1

    def _start(self, reply: SimulatedReply) -> None:
        cached = reply.cached if reply.engine is self else 0
        cached = max(cached, self._copied_tokens(reply))
        names = {prefix.name for prefix in reply.prefixes if prefix.tokens <= reply.context}
        reply.computed = names - self.prefixes
        self.prefixes |= names
        tokens = reply.context - cached
        if tokens > 0:
            self.prefilled += tokens
            seconds = self._pace * self._costs.prefill_s(tokens)
            self._next_step_at += seconds
            self.busy_s += seconds
        reply.engine = self
        reply.since = self._steps
        if reply.requested_at >= 0:
            self._fresh[reply.episode] = reply
        heapq.heappush(self._running, (self._steps + reply.left, next(_ORDER), reply))
        self._context += reply.context
        self._evict()

    def _start_waiting(self) -> None:
        while self._waiting and self._fits(self._waiting[0]):
            self._start(self._waiting.popleft())
        self._measure_queue()

    def _fits(self, reply: SimulatedReply) -> bool:
        running = len(self._running)
        if not running:
            return True
        if running >= self._max_running:
            return False
        needed = self._context + reply.context + running + 1
        return not self._max_tokens or needed <= (1 - _SPARE) * self._max_tokens

    def _steps_ahead(self) -> int:
        """Return the number of decoding steps until the next reply is complete or the memory is
        full.

        A single running reply always has enough memory. The result is 1 if no reply runs.
        """
        running = len(self._running)
        if not running:
            return 1
        steps = self._running[0][0] - self._steps
        if not self._max_tokens or running == 1:
            return steps
        return min(steps, self._free_tokens() // running)

    def _free_tokens(self) -> int:
        return max(0, self._max_tokens - self._context)

    def _evict(self) -> None:
        """Evict contexts of complete replies, then the newest running replies, until the memory
        suffices.
        """
        while self._kept and self._exceeds_capacity():
            self._evict_kept(next(iter(self._kept)))
        while (
            self._max_tokens and len(self._running) > 1 and self._free_tokens() < len(self._running)
        ):
            newest = max(self._running, key=lambda entry: entry[1])
            self._running.remove(newest)
            heapq.heapify(self._running)
            reply = newest[2]
            reply.on_tokens(self._stop(reply), False)
            reply.cached = 0
            self._waiting.appendleft(reply)

    def _exceeds_capacity(self) -> bool:
        if self._max_tokens:
            return self._kept_tokens + self._context > self._max_tokens
        return len(self._kept) + len(self._running) > self._max_running

    def _evict_kept(self, episode: int) -> None:
        reply, _ = self._kept[episode]
        self.forget(episode)
        if reply.engine is self:
            reply.cached = 0

    def _advance(self, now: float) -> None:
        """Simulate the decoding steps that begin before the simulated time `now`."""
        if not self._running or self._next_step_at >= now:
            self._next_step_at = max(self._next_step_at, now)
            if not self._running:
                self._last_step_ended = max(self._last_step_ended, self._next_step_at)
            return
        limit = self._steps_ahead()
        ahead_s = now - self._next_step_at
        steps = 1
        for _ in range(3):
            steps = min(limit, max(1, math.ceil(ahead_s / self._mean_step_s(steps) - 1e-9)))
        while steps < limit and steps * self._mean_step_s(steps) < ahead_s - 1e-9:
            steps += 1
        self._do(steps)

    def _mean_step_s(self, steps: int) -> float:
        """Return the mean seconds of the next `steps` steps, which are those of the middle step."""
        replies = len(self._running)
        half, odd = divmod(replies * (steps - 1), 2)
        seconds = self._step_s(self._context + half)
        if odd:
            return (seconds + self._step_s(self._context + half + 1)) / 2
        return seconds

    def _step_s(self, context: int) -> float:
        return self._pace * self._costs.step_s(len(self._running), context)

    def _do(self, steps: int) -> None:
        seconds = steps * self._mean_step_s(steps)
        if self._fresh:
            self._report_first_tokens()
        self.busy_s += seconds
        self._next_step_at += seconds
        self._last_step_ended = self._next_step_at
        self._steps += steps
        self.steps += steps
        self._context += steps * len(self._running)

    def _report_first_tokens(self) -> None:
        """Call `on_first_token` for the replies that get their first token in the next step."""
        ended = self._next_step_at + self._step_s(self._context)
        for reply in self._fresh.values():
            self.on_first_token(reply, ended)
        self._fresh.clear()

    def _schedule(self) -> None:
        """Schedule an event for the time when the next reply is complete or the memory is full."""
        self._timer += 1
        if self._running:
            steps = self._steps_ahead()
            due = self._next_step_at
            if steps:
                due += steps * self._mean_step_s(steps)
            self._clock.at(due, partial(self._complete, self._timer))

    def _complete(self, timer: int) -> None:
        if timer != self._timer:
            return
        if steps := self._steps_ahead():
            self._do(steps)
        finished = []
        while self._running and self._running[0][0] <= self._steps:
            reply = heapq.heappop(self._running)[2]
            self._add_load(-reply.weight)
            finished.append((reply, self._stop(reply)))
            self._kept_tokens += reply.context
            self._kept[reply.episode] = (reply, reply.context)
        self._evict()
        self._start_waiting()
        for reply, tokens in finished:
            self.on_complete(reply, tokens)
        self._schedule()

    def _stop(self, reply: SimulatedReply) -> int:
        """Count the tokens of a running reply that stops to run. Return how many it got since it
        started.
        """
        tokens = self._steps - reply.since
        self._fresh.pop(reply.episode, None)
        self.sampled += tokens
        reply.left -= tokens
        reply.context += tokens
        reply.cached = reply.context
        self._context -= reply.context
        return tokens


class SimulatedEnginePool:
    """Simulated engines that all sample from the same version of the weights.

    As `engines.EnginePool` does, a reply is sent to the engine that has its context cached, unless
    that has far more load than the least loaded one. With a prefill group, `routing.choose`
    decides.
    """

    def __init__(
        self,
        clock: SimulatedClock,
        costs: Costs,
        fleet: Fleet,
        overheads: Overheads = NO_OVERHEADS,
    ) -> None:
        self._overheads = overheads
        self.version = -1
        self.held_until = 0.0
        """Simulated time until which complete replies are held back, because new weights are
        checked.
        """
        self.deaths = 0
        self.members = [
            SimulatedEngine(clock, costs, fleet, number) for number in range(fleet.engines)
        ]
        self._clock = clock
        self._keep_cache = fleet.keep_cache
        self._load_tokens = fleet.load_tokens
        self._phases = Phases(fleet.prefill_engines, fleet.prefill_ratio)
        self.lengths = ReplyLengths()
        """Lengths of complete replies, from which that of the next one is predicted."""
        self.first_tokens: list[tuple[float, float]] = []
        """For each request: the simulated time of its first token, and the seconds since the
        request.
        """
        self.rejects = 0
        """Number of times that the engine preferred for a request was full, so that another one
        was tried.
        """
        self._restart_s = fleet.restart_s
        self._paused = True
        self._unplaced: list[SimulatedReply] = []
        self._by_load: list[tuple[int, int]] = []
        """A heap of (load, number of the engine). Entries whose load has changed are skipped."""
        for engine in self.members:
            engine.on_load_change = self._rank
            engine.on_first_token = self._add_first_token
            engine.on_complete = self._complete
            self._rank(engine)

    def sample(self, reply: SimulatedReply) -> None:
        reply.weight = request_weight(reply.context, self._load_tokens)
        idlest = self._idlest()
        if idlest is None:
            self._unplaced.append(reply)
        elif self._phases.prefill_engines:
            self._sample_by_phase(reply)
        else:
            self._by_prefix(reply, idlest).take(reply)

    def forget(self, reply: SimulatedReply) -> None:
        """Discard the cached context of the episode to which `reply` belongs."""
        holders = self.members if self._phases.prefill_engines else [reply.engine]
        for engine in holders:
            if engine is not None:
                engine.forget(reply.episode)

    def _by_prefix(self, reply: SimulatedReply, idlest: SimulatedEngine) -> SimulatedEngine:
        """Return the engine for a reply: the one that has its context cached, or `idlest`.

        The first is not chosen if it has far more load than `idlest`, the least loaded engine. A
        full engine is skipped if another one has a free place.
        """
        cached_at = reply.engine
        if (
            cached_at is not None
            and cached_at.up
            and cached_at.load - idlest.load
            <= min(MAX_EXTRA_REPLIES, reply.cached / CACHED_TOKENS_PER_REPLY)
        ):
            if cached_at.has_place:
                return cached_at
            self.rejects += 1
        if not idlest.has_place:
            self.rejects += 1
            free = [engine for engine in self.members if engine.up and engine.has_place]
            return min(free, key=lambda engine: engine.load, default=idlest)
        return idlest

    def _sample_by_phase(self, reply: SimulatedReply) -> None:
        engines = [engine for engine in self.members if engine.up]
        choice = choose(
            [self._candidate(engine, reply) for engine in engines],
            context=reply.context,
            reply_tokens=self.lengths.expected(_UNKNOWN, reply.sampled),
            phases=self._phases,
        )
        self.rejects += choice.rejects
        engine = engines[choice.index]
        reply.cached = engine.cached_tokens(reply)
        reply.engine = engine
        engine.take(reply)

    def _candidate(self, engine: SimulatedEngine, reply: SimulatedReply) -> Candidate:
        return Candidate(
            load=engine.load,
            cached=engine.cached_tokens(reply),
            is_free=engine.has_place,
            prefills=engine.prefills,
        )

    def _complete(self, reply: SimulatedReply, tokens: int) -> None:
        """Return a complete reply to its episode. If new weights are being checked, wait for the
        end.
        """
        if self._clock.now < self.held_until:
            self._clock.at(self.held_until, partial(reply.on_tokens, tokens, True))
        else:
            reply.on_tokens(tokens, True)

    def _add_first_token(self, reply: SimulatedReply, time: float) -> None:
        self.first_tokens.append((time, time - reply.requested_at))
        reply.requested_at = -1.0

    def _idlest(self) -> SimulatedEngine | None:
        """Return the least loaded engine that works. None if all have failed."""
        while self._by_load:
            load, number = self._by_load[0]
            if self.members[number].up and self.members[number].load == load:
                return self.members[number]
            heapq.heappop(self._by_load)
        return None

    def _rank(self, engine: SimulatedEngine) -> None:
        heapq.heappush(self._by_load, (engine.load, engine.number))
        if len(self._by_load) > 64 * len(self.members):
            self._by_load = [(other.load, other.number) for other in self.members if other.up]
            heapq.heapify(self._by_load)

    def interrupt(self) -> float:
        """Pause all engines. Return the simulated time, in seconds, at which the last one is
        paused.
        """
        self._paused = True
        return max([self._clock.now, *(engine.interrupt() for engine in self.members if engine.up)])

    def resume(self, version: int) -> None:
        """Continue to sample with version `version`. Failed engines that have restarted by now
        join.
        """
        self.version = version
        self._paused = False
        pace = self._overheads.pace(version).engine
        for engine in self.members:
            if not engine.up and engine.restarted_at <= self._clock.now:
                engine.up = True
                self._rank(engine)
        for engine in self.members:
            if engine.up:
                engine.resume(keep_cache=self._keep_cache, pace=pace)
        unplaced = self._unplaced
        self._unplaced = []
        for reply in unplaced:
            self.sample(reply)

    def fail(self, random: np.random.Generator, per_hour: float) -> None:
        """Schedule failures at random times: each engine fails `per_hour` times an hour on
        average.
        """

        def schedule(engine: SimulatedEngine) -> None:
            delay = random.exponential(3600 / per_hour)
            self._clock.at(self._clock.now + delay, partial(fail_now, engine))

        def fail_now(engine: SimulatedEngine) -> None:
            if engine.up:
                self._fail(engine)
            schedule(engine)

        for engine in self.members:
            schedule(engine)

    def _fail(self, engine: SimulatedEngine) -> None:
        replies = engine.fail()
        self.deaths += 1
        engine.restarted_at = self._clock.now + self._restart_s
        # the first engine to restart loads the weights
        if not any(other.up for other in self.members):
            self._clock.at(engine.restarted_at, self._resume_restarted)
        for reply in replies:
            self.sample(reply)

    def _resume_restarted(self) -> None:
        if not self._paused:
            self.resume(self.version)
