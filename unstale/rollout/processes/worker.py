"""The code of a rollout process, which runs episodes and sends their records to the main
process.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from unstale.engines.following import FollowedEngine
from unstale.engines.pool import EnginePool
from unstale.envs.guard import describe
from unstale.records import Failure, GroupRequest, Piece, Trajectory
from unstale.rollout.episode import Rollout
from unstale.rollout.processes.wire import (
    TICK_S,
    Began,
    Blocked,
    CancelEpisodes,
    Command,
    Ended,
    EpisodesEnded,
    Event,
    Ready,
    Restarted,
    RunEpisodes,
    Saved,
    Setup,
    Waited,
    WireFailure,
    Wrote,
    encode,
    read_record,
    wire_outcome,
    wire_piece,
)
from unstale.rollout.timeouts import first_error


class Outbox:
    """A sender of events to the main process. It sends the events of one iteration of the event
    loop as one frame.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._events: list[Event] = []

    def send(self, event: Event) -> None:
        if not self._events:
            asyncio.get_running_loop().call_soon(self._flush)
        self._events.append(event)

    def _flush(self) -> None:
        events, self._events = self._events, []
        self._writer.write(encode(events))


class EventWriter:
    """An `EpisodeWriter` that sends an attempt's record to the main process, as events."""

    __slots__ = ("_episode", "_send")

    def __init__(  # noqa: PLR0913 - those of an `OpenWriter`
        self,
        send: Callable[[Event], None],
        job: int,
        _number: int,
        index: int,
        *,
        episode: int,
        seed: int,
        again: bool = False,
    ) -> None:
        self._send = send
        self._episode = episode
        send(Began(job, index, episode, seed, again))

    def write_piece(self, position: int, piece: Piece) -> None:
        self._send(Wrote(self._episode, position, wire_piece(piece)))

    def write_snapshot(self, num_pieces: int, state: str) -> None:
        self._send(Saved(self._episode, num_pieces, state))

    def write_outcome(self, outcome: Trajectory | Failure) -> None:
        self._send(Ended(self._episode, wire_outcome(outcome)))

    def write_restart(self, reason: str, *, turns: int, sampled_tokens: int) -> None:
        """Do nothing: the event `Restarted`, which follows, has this information."""


class Shard(Rollout):
    """A rollout that uses every `stride`-th episode number, so that no two processes share one."""

    stride = 1
    """Difference between the numbers of two successive episodes of this process."""

    def next_episode(self) -> int:
        number = self._num_episodes
        self._num_episodes += self.stride
        return number


class ShardServer:
    """A server in a rollout process, which runs episodes by the commands of the main process.

    `make_rollout` creates the rollout. It is called with the arguments `on_restart` and
    `on_blocked` of `Rollout`.
    """

    def __init__(
        self,
        setup: Setup,
        engines: Sequence[FollowedEngine],
        make_rollout: Callable[..., Shard],
        outbox: Outbox,
    ) -> None:
        self._engines = engines
        self._outbox = outbox
        self._jobs: dict[int, asyncio.Task[None]] = {}
        self._rollout = make_rollout(on_restart=self._on_restart, on_blocked=self._on_blocked)
        self._rollout.restore(setup.first_episode, ())
        self._rollout.stride = setup.stride

    async def serve(self, receive: Callable[[], Any]) -> None:
        """Handle the commands that `receive` returns, until it raises at the end of the
        connection.
        """
        pool = self._rollout.generator.engine
        assert isinstance(pool, EnginePool)
        await pool.start()
        await pool.load({}, 0)
        await pool.resume()
        async with self._rollout.resources:
            self._outbox.send(Ready())
            beat = asyncio.ensure_future(self._beat())
            try:
                while True:
                    for command in await receive():
                        self._handle(command)
            finally:
                beat.cancel()

    def _handle(self, command: Command) -> None:
        match command:
            case RunEpisodes(job=job):
                self._jobs[job] = asyncio.ensure_future(self._run(command))
            case CancelEpisodes(job=job):
                if job in self._jobs:
                    self._jobs[job].cancel()
            case Setup():
                raise ValueError("a second Setup")
            case change:
                self._engines[change.engine].change(change)

    async def _run(self, command: RunEpisodes) -> None:
        """Run the episodes of a command, and send `EpisodesEnded` when all have ended."""
        task, seed = command.task, command.seed
        request = GroupRequest(
            command.number,
            task,
            seed,
            place=0,
            turn_limit=command.turn_limit,
            budget=command.budget,
        )
        records = {
            index: read_record(record, task, seed) for index, record in command.records.items()
        }
        open_writer = partial(EventWriter, self._outbox.send, command.job)
        error = ""
        try:
            await self._rollout.run_episodes(request, range(*command.indices), records, open_writer)
        except Exception as failure:  # noqa: BLE001 - any other error ends the run, with its text
            error = describe(first_error(failure))
        finally:
            del self._jobs[command.job]
        self._outbox.send(EpisodesEnded(command.job, error))

    async def _beat(self) -> None:
        """Every `TICK_S` seconds, send the episodes' waiting times and the counters of the
        engines.
        """
        waits = self._rollout.wait_times
        while True:
            seconds = {
                name.removeprefix("/").removesuffix("_s"): value
                for name, value in waits.read("").items()
            }
            self._outbox.send(Waited(seconds, dict(waits.running)))
            for engine in self._engines:
                engine.report_counters()
            await asyncio.sleep(TICK_S)

    def _on_restart(self, episode: int, failure: Failure) -> None:
        reason = f"{failure.stage}: {failure.error}"
        self._outbox.send(Restarted(episode, reason, WireFailure.of(failure)))

    def _on_blocked(self, name: str, seconds: float) -> None:
        self._outbox.send(Blocked(name, seconds))
