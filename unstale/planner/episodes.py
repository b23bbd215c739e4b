"""Simulated episodes: what `rollout.Rollout` does, without a coroutine, a context or a journal row for each.

In the records that go through the loop one token stands for one piece; the true counts stay here, by episode.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from itertools import count

import numpy as np

from unstale.engines import Stopwatch
from unstale.planner.clock import SimulatedClock
from unstale.planner.engines import SimulatedEnginePool, SimulatedReply
from unstale.planner.workload import EpisodeShape, Workload
from unstale.records import (
    ContextPiece,
    Failure,
    Group,
    GroupRequest,
    PendingPiece,
    Sampled,
    Task,
    Trajectory,
)
from unstale.rollout.staleness_queue import PendingPieces
from unstale.rollout.transcript import OpenWriter


class SimulatedEpisode:
    """One episode on its way through engine and environment, as `rollout.Rollout` runs it."""

    __slots__ = (
        "asked", "began", "done", "ended", "failures", "group", "number", "pieces", "reply", "rollout", "shape", "turn",
    )  # fmt: skip

    def __init__(
        self,
        rollout: "SimulatedRollout",
        shape: EpisodeShape,
        *,
        group: int,
        done: "Callable[[SimulatedEpisode | None], None]",
    ) -> None:
        """`done` is told when it ends: itself, or None if it gave up."""
        self.rollout, self.shape, self.group, self.done = rollout, shape, group, done
        self.failures = 0
        self.began = self.ended = self.asked = rollout.clock.now
        self._begin()

    def _begin(self) -> None:
        self.number = next(self.rollout.numbers)
        self.rollout.episodes[self.number] = self
        self.pieces: list[tuple[int, int]] = []
        self.turn = 0
        self.reply = SimulatedReply(self.number, self.group, self.shape.prompt, self._said)
        self._speak()

    def _speak(self) -> None:
        self.reply.left = self.shape.turns[self.turn].reply
        self.asked = self.rollout.clock.now
        self.rollout.engines.sample(self.reply)

    def _said(self, tokens: int, complete: bool) -> None:
        if tokens:
            version = self.rollout.engines.version
            self.pieces.append((version, tokens))
            self.rollout.arrived(self.number, version)
        if complete:
            now = self.rollout.clock.now
            self.rollout.totals["engine_s"] += now - self.asked
            self._answer(now)

    def _answer(self, now: float) -> None:
        """The environment takes its time, too much of it at times."""
        spoken, workload = self.shape.turns[self.turn], self.rollout.workload
        took = self.rollout.tool_s(spoken.waits)
        late = took > workload.timeout_s
        took = min(took, workload.timeout_s)
        self.rollout.totals["tool_s"] += took
        act = self._failed if late else self._go_on
        if took:
            self.rollout.clock.at(now + took, act)
        else:
            act()

    def _go_on(self) -> None:
        self.reply.context += self.shape.turns[self.turn].given
        self.turn += 1
        if self.turn < len(self.shape.turns):
            self._speak()
        else:
            self._end(self)

    def _failed(self) -> None:
        self.rollout.gave_up(self)
        self.failures += 1
        if self.failures > self.rollout.workload.retries:
            self._end(None)
        else:
            self._begin()

    def _end(self, finished: "SimulatedEpisode | None") -> None:
        if self.reply.engine is not None:
            self.reply.engine.forget(self.number)
        self.ended = self.rollout.clock.now
        if finished:
            self.rollout.totals["episodes"] += 1
            self.rollout.totals["life_s"] += self.ended - self.began
        self.done(finished)


_ONE = (0,)


class SimulatedRollout:
    """Runs the episodes of a group, and makes the records that the loop hands on: one token for each piece."""

    def __init__(
        self,
        workload: Workload,
        clock: SimulatedClock,
        engines: SimulatedEnginePool,
        *,
        pending: PendingPieces,
        seed: int,
    ) -> None:
        self.clock, self.engines, self.workload = clock, engines, workload
        self.numbers = count()
        self.wait_times = Stopwatch()
        self.totals: dict[str, float] = defaultdict(float)
        """Sums over episodes that ended, and over attempts that failed."""
        self.episodes: dict[int, SimulatedEpisode] = {}
        """By number, until they are trained on or given up."""
        self._pending, self._seed = pending, seed
        self._samples: dict[int, Sampled] = {}
        self._random = np.random.default_rng([seed, 2])
        self._waits: list[float] = []

    async def group(self, request: GroupRequest, *, size: int, open_writer: OpenWriter) -> Group:
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        siblings: list[SimulatedEpisode | None] = []

        def done(episode: SimulatedEpisode | None) -> None:
            siblings.append(episode)
            if len(siblings) == size:
                self.clock.resolve(ended, None)

        for shape in self.workload.group(
            np.random.default_rng([self._seed, 0, request.number]), size
        ):
            SimulatedEpisode(self, shape, group=request.number, done=done)
        await ended
        finished = [episode for episode in siblings if episode]
        failures = (Failure(request.task, "step", "took too long"),) * (size - len(finished))
        trajectories = tuple(self._trajectory(episode, request.task) for episode in finished)
        return Group(request.task, trajectories, failures, request.number)

    def tool_s(self, waits: int) -> float:
        """Seconds of so many answers, drawn a thousand at a time."""
        total = 0.0
        for _ in range(waits):
            if not self._waits:
                self._waits = self.workload.tool_s.draw(self._random, 1000).tolist()
            total += self._waits.pop()
        return total

    def arrived(self, episode: int, version: int) -> None:
        self._pending.add(PendingPiece(episode, _ONE, 0, self._sampled(version)))

    def gave_up(self, episode: SimulatedEpisode) -> None:
        self.totals["failed"] += 1
        self._pending.discard([episode.number])
        del self.episodes[episode.number]

    def length(self, number: int) -> int:
        """Tokens of an episode so far."""
        return self.episodes[number].reply.context

    def _sampled(self, version: int) -> Sampled:
        if version not in self._samples:
            self._samples[version] = Sampled(_ONE, (0.0,), version)
        return self._samples[version]

    def _trajectory(self, episode: SimulatedEpisode, task: Task) -> Trajectory:
        sampled = (self._sampled(version) for version, _ in episode.pieces)
        return Trajectory((ContextPiece(_ONE), *sampled), {}, "done", task, 0, episode.number)
