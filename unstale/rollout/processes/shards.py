"""Rollout in several processes, seen from the main process."""

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
"""Number of rollout processes in a row that may die without finishing a group before the run
ends.
"""
CHECK_S = 1.0
"""Seconds between two checks that at least one engine works or is being restarted."""


class RolloutFailed(RuntimeError):
    """Error: a rollout process cannot start or fails, or several in a row have died."""


@dataclass(slots=True)
class _Attempt:
    """An attempt at an episode in a rollout process: what the main process has received of it."""

    index: int
    episode: int
    seed: int
    writer: EpisodeWriter
    tokens: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    snapshot: tuple[int, str] | None = None
    outcome: Trajectory | Failure | None = None

    def add(self, piece: Piece) -> int:
        """Add a piece (run of tokens). Return the offset of its first token in the episode."""
        start = len(self.tokens)
        self.tokens += piece.tokens
        self.pieces.append(piece)
        return start


class _Job:
    """Episodes of one group that a rollout process runs, with what was received of them."""

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
        """Index of an episode in its group -> the latest attempt at it."""
        self._records = dict(records)
        self._failures = {index: record.failures for index, record in records.items()}

    def began(self, event: Began) -> _Attempt:
        """Return the attempt that an event announces.

        It is a new attempt, or with `event.again` one that continues, from what was received of it
        or from the record before a resume.
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
        """Count a failed attempt at this episode. Return how many attempts at it have failed."""
        self._failures[index] = self._failures.get(index, 0) + 1
        return self._failures[index]

    def restart(self, index: int) -> None:
        """Forget the attempt at this episode, which could not be replayed."""
        del self.attempts[index]
        self._records.pop(index, None)

    def command(self) -> RunEpisodes:
        """Return the command that runs the episodes, each from what was received of it so far."""
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
        """Return the outcome of each episode, in the order of the indices in the group."""
        found = []
        for index in self.indices:
            attempt, record = self.attempts.get(index), self._records.get(index)
            outcome = attempt.outcome if attempt else record.outcome if record else None
            assert outcome is not None, "all episodes have ended"
            found.append(outcome)
        return found


class _Shard:
    """A rollout process and its jobs. If the process dies, a new one continues the jobs."""

    def __init__(self, rollout: "ProcessRollout", number: int) -> None:
        self.jobs: dict[int, _Job] = {}
        self.error: Exception | None = None
        """Why no process can run episodes any more. None while one can."""
        self.running: Mapping[str, int] = {}
        """Name of an activity, such as "tool_wait" -> number of episodes in it."""
        self._rollout = rollout
        self._number = number
        self._process: RolloutProcess | None = None
        self._is_ready = False
        self._attempts: dict[int, _Attempt] = {}
        """Number of an episode -> the attempt at it, until the attempt ends."""
        self._jobs_of: dict[int, _Job] = {}
        """Number of an episode -> its job, until the attempt at the episode ends."""
        self._next_episode = -1
        self._deaths = 0
        self._key = -1

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def begin(self, job: _Job) -> None:
        """Send a job to the process and return at once.

        While no process runs, the job waits for the next one. If there will be no further process,
        raises `error`.
        """
        if self.error:
            raise self.error
        self.jobs[job.number] = job
        if self._process is not None:
            self._process.send(job.command())

    def cancel(self, job: _Job) -> None:
        """Cancel the episodes of a job. Later events about them are ignored."""
        self.jobs.pop(job.number, None)
        for episode in [each for each, its_job in self._jobs_of.items() if its_job is job]:
            self._forget(episode)
        if self._process is not None:
            self._process.send(CancelEpisodes(job.number))

    async def run(self, first_episode: int) -> None:
        """Run a process, and another one whenever it dies, until `error` is set.

        `first_episode` is the number of the first process's first episode.
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
        """Log the end of a process. Call `fail` if it never became ready, or if too many died in a
        row.
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
        """Set `error` and raise it in all jobs, which ends the run."""
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
        """Write the outcome of an attempt to the journal, and keep it until the job ends."""
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
        """Ignore further events about this episode's attempt. Return the attempt's job."""
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

    All episodes of a group run in the same process. If it dies, a new process continues them from
    what the main process has received, as after a resume. The main process applies the limit on
    failures, writes the journal and calls all callbacks.
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
        """Create a rollout that is divided among `setup.stride` processes. Each is started with the
        command line `program`.

        `hub` connects the processes with the engines. `on_event` is called with the kind
        `rollout_process_lost` when a process dies, and with each event that a process logs.
        `arguments`, `options` and `on_blocked` are those of `Rollout`.
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
        """The process id of each rollout process. None for a process that does not run."""
        return [shard.pid for shard in self._shards]

    @asynccontextmanager
    async def _processes(self, resources: Any) -> AsyncIterator[None]:
        """Return a context in which the rollout processes run, besides the context `resources`."""
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
        """Check regularly, without end, that an engine works. Otherwise make all jobs raise
        `EngineDied`.
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
        """Add the seconds for which one process's episodes waited, by activity."""
        for name, each in seconds.items():
            self.wait_times.add(name, each)
        self.wait_times.running.clear()
        for shard in self._shards:
            self.wait_times.running.update(shard.running)
