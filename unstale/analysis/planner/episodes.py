"""Simulated episodes. They take the place of `rollout.Rollout`, without a coroutine per episode.

The training loop gets records of these episodes. A record has pieces, one for each run of tokens
that one version sampled. Each piece has a single token, and the simulated numbers of tokens are
kept here.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unstale.analysis.planner.clock import SimulatedClock
from unstale.analysis.planner.costs import NO_OVERHEADS, Overheads
from unstale.analysis.planner.engines import SimulatedEnginePool, SimulatedReply
from unstale.analysis.planner.rewards import SimulatedRewards
from unstale.analysis.planner.workload import Constant, EpisodeShape, Prefix, Workload
from unstale.engines import Stopwatch
from unstale.records import (
    ContextPiece,
    Failure,
    Group,
    GroupRequest,
    PendingPiece,
    Piece,
    Sampled,
    Task,
    Trajectory,
)
from unstale.rollout import More, no_more
from unstale.rollout.rounds import Rounds
from unstale.rollout.staleness_queue import PendingPieces
from unstale.rollout.transcript import OpenWriter


class SimulatedEpisode:
    """An episode that alternates between replies of an engine and tool calls."""

    def __init__(
        self,
        rollout: "SimulatedRollout",
        shape: EpisodeShape,
        *,
        group: int,
        on_end: "Callable[[SimulatedEpisode | None], None]",
    ) -> None:
        """Start an episode of the group with number `group`.

        `on_end` is called with the finished episode, or with None if all attempts failed.
        """
        self.rollout = rollout
        self.shape = shape
        self.group = group
        self.on_end = on_end
        self.failures = 0
        self.began = self.ended = self.requested = rollout.clock.now
        self._begin()

    def _begin(self) -> None:
        self.number = next(self.rollout.numbers)
        self.rollout.episodes[self.number] = self
        self.pieces: list[tuple[int, int]] = []
        """For each run of tokens that one version sampled: the version, and the number of
        tokens.
        """
        self.turn = 0
        self._calls = 0
        """Number of tool calls so far."""
        prompt = self.shape.prompt
        prefixes = self.shape.prefixes or (Prefix(-1 - self.group, prompt),)
        self.reply = SimulatedReply(self.number, prefixes, self._on_tokens, prompt)
        self._begin_reply()

    def _begin_reply(self) -> None:
        self.reply.sampled = 0
        self.reply.left = self.shape.turns[self.turn].reply
        self.requested = self.reply.requested_at = self.rollout.clock.now
        self.rollout.engines.sample(self.reply)

    def _on_tokens(self, tokens: int, complete: bool) -> None:
        if tokens:
            version = self.rollout.engines.version
            self.pieces.append((version, tokens))
            self.rollout.arrived(self.number, version)
            self.reply.sampled += tokens
        if complete:
            self.rollout.receive(self.group, self._receive)

    def _receive(self) -> None:
        now = self.rollout.clock.now
        self.rollout.totals["engine_s"] += now - self.requested
        self.rollout.engines.lengths.add(self.shape.turns[self.turn].reply)
        self._call_tools(now)

    def _call_tools(self, now: float) -> None:
        timeout_s = self.rollout.workload.timeout_s
        calls = self.shape.turns[self.turn].calls
        seconds = self.rollout.tool_s(self.group, self._calls, calls)
        self._calls += calls
        continuation = self._fail if seconds > timeout_s else self._next_turn
        seconds = min(seconds, timeout_s)
        self.rollout.totals["tool_s"] += seconds
        if seconds:
            self.rollout.clock.at(now + seconds, continuation)
        else:
            continuation()

    def _next_turn(self) -> None:
        self.reply.context += self.shape.turns[self.turn].answer
        self.turn += 1
        if self.turn < len(self.shape.turns):
            self._begin_reply()
        elif self.rollout.workload.reward_s == Constant(0):
            self._end(self)
        else:
            self.rollout.rewards.compute(self.rollout.reward_s(), lambda: self._end(self))

    def _fail(self) -> None:
        self.rollout.gave_up(self)
        self.failures += 1
        if self.failures > self.rollout.workload.retries:
            self._end(None)
        else:
            self._begin()

    def _end(self, finished: "SimulatedEpisode | None") -> None:
        self.rollout.engines.forget(self.reply)
        self.ended = self.rollout.clock.now
        if finished:
            self.rollout.totals["episodes"] += 1
            self.rollout.totals["life_s"] += self.ended - self.began
        self.on_end(finished)


_ONE_TOKEN = (0,)


class SimulatedRollout:
    """A simulation of the episodes of each group, which returns records of them."""

    def __init__(  # noqa: PLR0913 - all of them are parts of a simulation
        self,
        workload: Workload,
        clock: SimulatedClock,
        engines: SimulatedEnginePool,
        *,
        pending: PendingPieces,
        rewards: SimulatedRewards,
        seed: int,
        overheads: Overheads = NO_OVERHEADS,
    ) -> None:
        """Create the simulation. It uses `reply_s`, `turn_s`, `run_turn_s` and `processes` of
        `overheads`.
        """
        self._overheads = overheads
        self._loops_free = [0.0] * (overheads.processes + 1)
        """Simulated time at which the event loop of each rollout process is next free. The last
        entry is for the run's main process.
        """
        self.clock = clock
        self.engines = engines
        self.rewards = rewards
        self.workload = workload
        self.numbers = count()
        self.wait_times = Stopwatch()
        self.resources: AbstractAsyncContextManager[Any] = nullcontext()
        self.totals: dict[str, float] = defaultdict(float)
        """Number of episodes and seconds of activities, by name, as sums over all episodes."""
        self.episodes: dict[int, SimulatedEpisode] = {}
        """Number of an episode -> the episode, until it has been trained on or has failed."""
        self._pending = pending
        self._seed = seed
        self._samples: dict[int, Sampled] = {}
        self._random = np.random.default_rng([seed, 2])
        self._reward_random = np.random.default_rng([seed, 5])
        self._tool_s: list[float] = []
        self._group_tool_s: dict[int, NDArray[np.float64]] = {}
        """Number of a group -> seconds of its tool calls in order, if they are the same in all its
        episodes.
        """
        shuffled = np.random.default_rng([seed, 3]).permutation(len(workload.recorded))
        self._order: list[int] = shuffled.tolist()

    async def group(
        self,
        request: GroupRequest,
        *,
        size: int,
        open_writer: OpenWriter,
        more: More = no_more,
        rounds: Rounds | None = None,
    ) -> Group:
        random = np.random.default_rng([self._seed, 0, request.number])
        results: list[Trajectory | Failure] = []
        while size:
            results += await self._stage(request, size, random, begun=len(results))
            size = len(await more(results))
        first = request.sizes[0] if request.sizes else len(results)
        return Group(
            request.task,
            tuple(each for each in results if isinstance(each, Trajectory)),
            tuple(each for each in results if isinstance(each, Failure)),
            request.number,
            added=frozenset(
                each.episode for each in results[first:] if isinstance(each, Trajectory)
            ),
            turn_limit=request.turn_limit,
            budget=request.budget,
        )

    async def _stage(
        self, request: GroupRequest, size: int, random: np.random.Generator, *, begun: int
    ) -> list[Trajectory | Failure]:
        """Run `size` episodes of a group at the same time. Return their results in the order of
        their ends.

        `begun` is the number of episodes of the group that ran before.
        """
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        siblings: list[SimulatedEpisode | None] = []

        def on_end(episode: SimulatedEpisode | None) -> None:
            siblings.append(episode)
            if len(siblings) == size:
                self.clock.resolve(ended, None)

        number = self._recorded_number(request.number, begun)
        for shape in self.workload.group(random, size, number=number):
            SimulatedEpisode(self, shape, group=request.number, on_end=on_end)
        await ended
        self._group_tool_s.pop(request.number, None)
        return [
            self._trajectory(each, request.task)
            if each
            else Failure(request.task, "step", "timed out")
            for each in siblings
        ]

    def _recorded_number(self, request: int, begun: int) -> int | None:
        """Return the number of the recorded group to use for the group request with number
        `request`.

        Recorded groups are used in random order, each once before one is used again. The result is
        None, so that a group is drawn at random, if none was recorded or if `begun` is not 0.
        """
        if begun or not self._order:
            return None
        turn, index = divmod(request, len(self._order))
        return turn * len(self._order) + self._order[index]

    def tool_s(self, group: int, begun: int, calls: int) -> float:
        """Return the seconds of `calls` successive tool calls of an episode, drawn at random.

        The episode belongs to group `group`, and has made `begun` calls before.
        """
        if not calls:
            return 0.0
        if self.workload.equal_tool_s:
            if group not in self._group_tool_s:
                random = np.random.default_rng([self._seed, 4, group])
                self._group_tool_s[group] = self.workload.tool_s.draw(random, 64)
            drawn = self._group_tool_s[group]
            return float(sum(drawn[number % 64] for number in range(begun, begun + calls)))
        total = 0.0
        for _ in range(calls):
            if not self._tool_s:
                self._tool_s = self.workload.tool_s.draw(self._random, 1000).tolist()
            total += self._tool_s.pop()
        return total

    def reward_s(self) -> float:
        """Return the seconds that the reward of an episode takes, drawn at random."""
        return float(self.workload.reward_s.draw(self._reward_random, 1)[0])

    def receive(self, group: int, then: Callable[[], None]) -> None:
        """Call `then` when an episode of group `group` has received a reply that its engine returns
        now.

        The reply passes the event loop of its rollout process, and then that of the run's main
        process. Each loop handles one turn at a time.
        """
        overheads, clock = self._overheads, self.clock

        def in_run() -> None:
            clock.at(self._free_loop(-1, overheads.run_turn_s, clock.now), then)

        arrived = clock.now + overheads.reply_s
        due = self._free_loop(group % overheads.processes, overheads.turn_s, arrived)
        if overheads.run_turn_s:
            clock.at(due, in_run)
        elif due > clock.now:
            clock.at(due, then)
        else:
            then()

    def _free_loop(self, number: int, seconds: float, begin: float) -> float:
        """Occupy the event loop `number` for `seconds`, from `begin` on or when it is free. Return
        the end.
        """
        end = max(begin, self._loops_free[number]) + seconds if seconds else begin
        self._loops_free[number] = max(end, self._loops_free[number])
        return end

    def arrived(self, episode: int, version: int) -> None:
        self._pending.add(PendingPiece(episode, _ONE_TOKEN, 0, self._sampled(version)))

    def gave_up(self, episode: SimulatedEpisode) -> None:
        self.totals["failed"] += 1
        self._pending.discard([episode.number])
        del self.episodes[episode.number]

    def length(self, number: int) -> int:
        """Return the number of tokens that episode `number` has so far."""
        return self.episodes[number].reply.context

    def _sampled(self, version: int) -> Sampled:
        if version not in self._samples:
            self._samples[version] = Sampled(_ONE_TOKEN, (0.0,), version)
        return self._samples[version]

    def _trajectory(self, episode: SimulatedEpisode, task: Task) -> Trajectory:
        pieces: list[Piece] = [ContextPiece(_ONE_TOKEN)]
        pieces += [self._sampled(version) for version, _ in episode.pieces]
        return Trajectory(tuple(pieces), {}, "done", task, 0, episode.number)
