"""Rollout in several processes, as the run's process sees it."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from unstale.engines import EngineDied
from unstale.engines.following import EngineHub
from unstale.engines.pool import EnginePool
from unstale.envs import EnvError
from unstale.records import (
    EpisodeRecord,
    Failure,
    GroupRequest,
    PendingPiece,
    Piece,
    Sampled,
    Trajectory,
)
from unstale.rollout.episode import Rollout
from unstale.rollout.processes.process import RolloutProcess
from unstale.rollout.processes.wire import (
    Began,
    Blocked,
    CancelEpisodes,
    Ended,
    EpisodesEnded,
    Event,
    Logged,
    Ready,
    Refused,
    Restarted,
    RunEpisodes,
    Saved,
    Setup,
    Waited,
    Wrote,
    linked,
    read_outcome,
    read_piece,
    wire_record,
)
from unstale.rollout.rounds import Start
from unstale.rollout.transcript import EpisodeWriter, OpenWriter

MAX_DEATHS = 3
"""Number of times in a row that a rollout process may die without finishing a group."""
CHECK_S = 1.0
"""Seconds between two checks that an engine works or is being restarted."""


class RolloutFailed(RuntimeError):
    """Error: a rollout process cannot run episodes, or rollout processes died too often."""


@dataclass(slots=True)
class _Attempt:
    """An attempt at an episode in a rollout process: all that the process has sent of it so far."""

    index: int
    episode: int
    seed: int
    writer: EpisodeWriter
    tokens: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    snapshot: tuple[int, str] | None = None
    outcome: Trajectory | Failure | None = None

    def add(self, piece: Piece) -> int:
        """Add recorded tokens. Return the position of the first one in the episode."""
        start = len(self.tokens)
        self.tokens += piece.tokens
        self.pieces.append(piece)
        return start


class _Job:
    """Episodes of one group that a rollout process runs, and all that it has sent of them."""

    def __init__(
        self,
        number: int,
        request: GroupRequest,
        indices: Sequence[int],
        records: Mapping[int, EpisodeRecord],
        open_writer: OpenWriter,
    ) -> None:
        self.number = number
        self.request = request
        self.indices = indices
        self.open_writer = open_writer
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.attempts: dict[int, _Attempt] = {}
        """The latest attempt at each episode, by the episode's index in its group."""
        self._records = dict(records)
        self._failures = {index: record.failures for index, record in records.items()}

    def began(self, event: Began) -> _Attempt:
        """Return the attempt that an event announces: a new one, or a known one that continues.

        A known attempt is one that a process sent earlier or that was recorded before a resume.
        """
        known = self.attempts.get(event.index)
        writer = self.open_writer(
            self.request.number,
            event.index,
            episode=event.episode,
            seed=event.seed,
            again=event.again,
        )
        if event.again and known is not None and known.episode == event.episode:
            known.writer = writer
            return known
        attempt = _Attempt(event.index, event.episode, event.seed, writer)
        record = self._records.get(event.index)
        if event.again and record is not None:
            for piece in record.pieces:
                attempt.add(piece)
            attempt.snapshot = record.snapshot
        self.attempts[event.index] = attempt
        return attempt

    def count_failure(self, index: int) -> int:
        """Count a failed attempt at the episode with this index.

        Return how many of its attempts failed.
        """
        self._failures[index] = self._failures.get(index, 0) + 1
        return self._failures[index]

    def restart(self, index: int) -> None:
        """Delete the attempt at an episode, because it could not be replayed."""
        del self.attempts[index]
        self._records.pop(index, None)

    def command(self) -> RunEpisodes:
        """Return the command that runs the episodes, from the state in which they were last
        sent.
        """
        records = self._records | {
            index: EpisodeRecord(
                attempt.episode,
                tuple(attempt.pieces),
                attempt.outcome,
                self._failures.get(index, 0),
                attempt.snapshot,
            )
            for index, attempt in self.attempts.items()
        }
        return RunEpisodes(
            job=self.number,
            number=self.request.number,
            task=self.request.task,
            seed=self.request.seed,
            indices=(self.indices[0], self.indices[-1] + 1),
            records={index: wire_record(record) for index, record in records.items()},
            turn_limit=self.request.turn_limit,
            budget=self.request.budget,
        )

    def outcomes(self) -> list[Trajectory | Failure]:
        """Return the outcome of each episode of the job, in the order of their indices."""
        found = []
        for index in self.indices:
            attempt, record = self.attempts.get(index), self._records.get(index)
            outcome = attempt.outcome if attempt else record.outcome if record else None
            assert outcome is not None, "all episodes have ended"
            found.append(outcome)
        return found


class _Shard:
    """One rollout process and its groups. If it dies, a new process continues the groups."""

    def __init__(self, rollout: "ProcessRollout", number: int) -> None:
        self.jobs: dict[int, _Job] = {}
        self.error: Exception | None = None
        """The reason why no rollout process can run the episodes of this object any more. None
        while one can.
        """
        self.running: Mapping[str, int] = {}
        """For each activity, such as waiting for tools, the number of episodes in it."""
        self._rollout = rollout
        self._number = number
        self._process: RolloutProcess | None = None
        self._is_ready = False
        self._attempts: dict[int, _Attempt] = {}
        """The attempts that have not ended, by the number of the episode."""
        self._jobs_of: dict[int, _Job] = {}
        """The job of each attempt that has not ended, by the number of the episode."""
        self._next_episode = -1
        self._deaths = 0
        self._key = -1

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def begin(self, job: _Job) -> None:
        """Send the episodes of a job to the process, without waiting for their end.

        Without a process, the next one gets them. Raises `error` if no process can be started any
        more.
        """
        if self.error:
            raise self.error
        self.jobs[job.number] = job
        if self._process is not None:
            self._process.send(job.command())

    def cancel(self, job: _Job) -> None:
        """Cancel the episodes of a job. Messages about them that arrive later are ignored."""
        self.jobs.pop(job.number, None)
        for episode in [each for each, its_job in self._jobs_of.items() if its_job is job]:
            self._forget(episode)
        if self._process is not None:
            self._process.send(CancelEpisodes(job.number))

    async def run(self, first_episode: int) -> None:
        """Run a rollout process, and a new one whenever it dies, until no process can run episodes.

        `first_episode` is the number of the first episode.
        """
        self._next_episode = first_episode
        try:
            while self.error is None:
                self._died(await self._run_process())
        except Exception as error:  # noqa: BLE001 - it ends the run, whose groups wait for it
            self.fail(error)

    async def _run_process(self) -> str:
        rollout = self._rollout
        setup = msgspec.structs.replace(rollout.setup, first_episode=self._next_episode)
        try:
            process = self._process = RolloutProcess(rollout.program, setup)
        except OSError as error:
            self.fail(RolloutFailed(f"no rollout process can be started: {error}"))
            return ""
        self._is_ready = False
        for job in self.jobs.values():
            process.send(job.command())
        try:
            return await process.run(self._handle)
        finally:
            rollout.hub.detach(self._key)
            self._process = None
            self.running = {}

    def _died(self, reason: str) -> None:
        """Log the end of a process.

        If several in a row died without finishing a group, fail the shard.
        """
        if self.error:
            return
        self._deaths += 1
        running = sorted({job.request.task.key for job in self.jobs.values()})
        during = f" during {', '.join(running[:3])}" if running else ""
        more = f" and {len(running) - 3} other tasks" if running[3:] else ""
        text = f"rollout process {self._number} ended{during}{more}: {reason}"
        self._rollout.on_event("rollout_process_lost", process=self._number, cause=text)
        if not self._is_ready:
            self.fail(RolloutFailed(f"{text}. It was not ready for any episode"))
        elif self._deaths >= MAX_DEATHS:
            self.fail(
                RolloutFailed(
                    f"{text}. {self._deaths} processes in a row finished no group. If "
                    "environments crash, set task.isolate = process"
                )
            )

    def fail(self, error: Exception) -> None:
        """Make the groups of this rollout process raise an error, which ends the run."""
        self.error = self.error or error
        for job in self.jobs.values():
            if not job.ended.done():
                job.ended.set_exception(error)
        if self._process is not None:
            self._process.end("the run ends")

    def _handle(self, event: Event) -> None:
        rollout = self._rollout
        match event:
            case Wrote(episode, position, piece):
                self._wrote(episode, position, read_piece(piece))
            case Began(job=job) if job in self.jobs:
                self._attempts[event.episode] = self.jobs[job].began(event)
                self._jobs_of[event.episode] = self.jobs[job]
                if not event.again:
                    self._next_episode = event.episode + rollout.setup.stride
            case Ended(episode, outcome) if attempt := self._attempts.get(episode):
                task = self._jobs_of[episode].request.task
                self._outcome(
                    attempt,
                    read_outcome(
                        outcome,
                        pieces=attempt.pieces,
                        task=task,
                        seed=attempt.seed,
                        episode=episode,
                    ),
                )
            case Restarted(episode, reason, failure) if attempt := self._attempts.get(episode):
                attempt.writer.write_restart(
                    reason, turns=failure.turns, sampled_tokens=failure.sampled_tokens
                )
                self._forget(episode).restart(attempt.index)
                rollout.on_restart(episode, failure.read())
            case Saved(episode, num_pieces, state) if attempt := self._attempts.get(episode):
                attempt.snapshot = (num_pieces, state)
                attempt.writer.write_snapshot(num_pieces, state)
            case EpisodesEnded(job, error) if job in self.jobs:
                self._finished(self.jobs[job], error)
            case Waited(seconds, running):
                self.running = running
                rollout.count_waits(seconds)
            case Blocked(name, seconds):
                rollout.on_blocked(name, seconds)
            case Logged(kind, fields):
                rollout.on_event(kind, **fields)
            case Ready():
                self._is_ready = True
                # only now: an update of the weights waits for the processes of the hub
                assert self._process is not None, "its event"
                self._key = rollout.hub.attach(self._process.send, self._process.end)
            case Refused(error):
                self.fail(EnvError(f"rollout process {self._number}: {error}"))
            case Began() | Ended() | Restarted() | Saved() | EpisodesEnded():
                pass  # of a job that was cancelled
            case finding:
                rollout.hub.receive(self._key, finding)

    def _wrote(self, episode: int, position: int, piece: Piece) -> None:
        attempt = self._attempts.get(episode)
        if attempt is None:
            return
        piece = linked(piece, attempt.pieces)
        attempt.writer.write_piece(position, piece)
        start = attempt.add(piece)
        if isinstance(piece, Sampled):
            self._rollout.on_piece(PendingPiece(episode, attempt.tokens, start, piece))

    def _outcome(self, attempt: _Attempt, outcome: Trajectory | Failure) -> None:
        """Write the outcome of an attempt to the journal, and store it until its job ends."""
        attempt.outcome = outcome
        attempt.writer.write_outcome(outcome)
        job = self._forget(attempt.episode)
        if isinstance(outcome, Failure):
            failures = job.count_failure(attempt.index)
            is_last = failures > self._rollout.config.retries
            self._rollout.on_failure(attempt.episode, outcome, is_last)
        else:
            self._rollout.on_end(attempt.episode)

    def _forget(self, episode: int) -> _Job:
        """Stop expecting events of an attempt at an episode.

        Return the `_Job` to which it belongs.
        """
        del self._attempts[episode]
        return self._jobs_of.pop(episode)

    def _finished(self, job: _Job, error: str) -> None:
        if error:
            self.fail(RolloutFailed(f"rollout process {self._number}: {error}"))
            return
        del self.jobs[job.number]
        self._deaths = 0
        if not job.ended.done():
            job.ended.set_result(None)


class ProcessRollout(Rollout):
    """A `Rollout` whose episodes run in other processes.

    All episodes of a group run in one process. If it dies, a new process continues them from what
    the run's process has received, as after a resume. The limit on failures, the journal's records
    and all callbacks are in the run's process.
    """

    def __init__(
        self,
        *arguments: Any,
        setup: Setup,
        program: Sequence[str],
        hub: EngineHub,
        on_event: Callable[..., None] = lambda kind, **_: None,
        on_blocked: Callable[[str, float], None] = lambda name, seconds: None,
        **options: Any,
    ) -> None:
        """Create a rollout in `setup.stride` processes, each started by the command `program`.

        `on_event` is called with `rollout_process_lost` when a process ends. The other arguments
        are those of `Rollout`.
        """
        super().__init__(*arguments, on_blocked=on_blocked, **options)
        self.setup = setup
        self.program = program
        self.hub = hub
        self.on_event = on_event
        self.on_blocked = on_blocked
        self._shards = [_Shard(self, number) for number in range(setup.stride)]
        self._numbers = itertools.count()
        self.resources = self._processes(self.resources)

    @property
    def pids(self) -> list[int | None]:
        """The process id of each rollout process. None for one that is not running."""
        return [shard.pid for shard in self._shards]

    @asynccontextmanager
    async def _processes(self, resources: Any) -> AsyncIterator[None]:
        """Return a context in which the rollout processes run."""
        async with resources:
            tasks = [
                asyncio.ensure_future(shard.run(self._num_episodes + number))
                for number, shard in enumerate(self._shards)
            ]
            tasks.append(asyncio.ensure_future(self._watch()))
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    async def _watch(self) -> None:
        """Make all groups raise an error whenever no engine works and none is being restarted.

        The coroutine never ends by itself.
        """
        pool = self.generator.engine
        assert isinstance(pool, EnginePool)
        while True:
            await asyncio.sleep(CHECK_S)
            if not any(shard.jobs for shard in self._shards):
                continue
            try:
                pool.require_prospects()
            except EngineDied as died:
                for shard in self._shards:
                    shard.fail(died)

    async def run_episodes(
        self,
        request: GroupRequest,
        indices: Sequence[int],
        records: Mapping[int, EpisodeRecord],
        open_writer: OpenWriter,
        *,
        starts: Mapping[int, Start] = MappingProxyType({}),
    ) -> list[Trajectory | Failure]:
        assert not starts, "forks are refused with several rollout processes"
        job = _Job(next(self._numbers), request, indices, records, open_writer)
        shard = min(self._shards, key=lambda each: len(each.jobs))
        shard.begin(job)
        try:
            await job.ended
        except asyncio.CancelledError:
            shard.cancel(job)
            raise
        outcomes = job.outcomes()
        if any(isinstance(outcome, Failure) for outcome in outcomes):
            await self.quarantine(request.task)
        return outcomes

    def count_waits(self, seconds: Mapping[str, float]) -> None:
        """Add the seconds for which the episodes of a rollout process waited, by activity."""
        for name, each in seconds.items():
            self.wait_times.add(name, each)
        self.wait_times.running.clear()
        for shard in self._shards:
            self.wait_times.running.update(shard.running)
