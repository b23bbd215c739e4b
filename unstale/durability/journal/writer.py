"""Write the journal of a run.

Callers add records to a queue. One thread owns the database connection, and commits many records
together.
"""

import asyncio
import json
import queue
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self

from unstale.config.files import flush_to_disk
from unstale.durability.journal.expert_files import ROUTED_EXPERTS, ExpertFiles
from unstale.durability.journal.reader import (
    JournalReader,
    holds_journal,
    require_sound_wal,
    require_tables,
)
from unstale.durability.journal.tables import (
    EPISODE_BUDGET,
    FORMAT,
    GROUP_SIZE,
    JOURNAL,
    REPEATED,
    ROUND,
    SCHEMA,
    TOKEN_SAMPLES,
    TURN_LIMIT,
    JournalError,
    Record,
    count_rows,
    insert,
    journal_error,
    outcome_row,
    piece_rows,
    to_utf8,
)
from unstale.durability.journal.token_rows import token_rows
from unstale.records import (
    NO_BUDGET,
    Failure,
    Fork,
    Group,
    GroupRequest,
    Piece,
    Sampled,
    Trajectory,
)
from unstale.token_values import TokenValues

WINDOW_S = 0.2
"""Largest time in seconds before a record is committed. A call of `barrier` commits sooner."""

STUCK_S = 8.0
"""Seconds without a successful commit after which the run ends with an error. If another program
has locked the journal, SQLite waits half as long.
"""

_Item = list[Record] | Callable[[], Iterable[Record]] | Future[None] | None
"""An entry of the writing thread's queue: a list of records for one transaction, a function that
returns such a list, the future of a waiting `flush`, or None to end the thread.
"""


class Journal:
    """A writer of a run's journal. Use it as a context manager.

    Its methods queue a record and return. `barrier`, `flush`, and methods whose text says "and
    commit", wait for the disk. If the disk or the file fails, `watch` raises `JournalError` at
    once, and so does every `barrier`.
    """

    def __init__(
        self, path: Path, *, routed_experts: ExpertFiles | None = None, keep_snapshots: bool = False
    ) -> None:
        """Prepare a writer of the journal `path`, which is opened when the context is entered.

        `routed_experts` are the files that record which experts of an MoE model each token used.
        The journal closes them. `keep_snapshots` keeps all saved states of environments. A
        deterministic run must set it, because it can return to an earlier saved state. Otherwise
        only the last saved state of each unfinished episode is kept.
        """
        self.path = path
        self._keep_snapshots = keep_snapshots
        self._routed_experts = routed_experts
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._awaited = Event()
        self._thread: Thread | None = None
        self._failure: Future[None] = Future()
        # a cancelled `watch` must not cancel this future
        self._failure.set_running_or_notify_cancel()
        self._failure_raised = False
        self._barrier_lock = asyncio.Lock()
        # a separate thread, because environments may keep the threads of asyncio busy
        self._barrier_thread = ThreadPoolExecutor(1, thread_name_prefix="barrier")
        self._barriers = 0
        self._barriers_passed = 0
        self._num_written = 0
        self._counts: dict[str, int] = {}
        """Number of rows in each table."""
        self._file = _FileState()
        self._checkpoint = -1
        self._highest_version = -1
        self._last_step_id = self._last_step = -1
        """Id of the event with the newest metrics when the journal was opened. `_last_step` is
        their step.
        """
        self._trained_on: list[tuple[int, int, int, int, float]] = []
        """Groups that were trained on since the last checkpoint, as rows of the table `consumed`
        without the column `checkpoint`.
        """
        self._replayed: list[tuple[int, int, int, int, float]] = []
        """Groups that were trained on again since the last checkpoint, as rows of the table
        `replayed` without the column `checkpoint`.
        """

    @staticmethod
    def read(run: Path, *, routed_experts: bool = False) -> JournalReader:
        """Return a reader of the journal in a run folder. The run may still be active.

        With `routed_experts`, sampled tokens are read with the experts that an MoE model used for
        them.
        """
        return JournalReader(
            run / JOURNAL, ExpertFiles(run / ROUTED_EXPERTS) if routed_experts else None
        )

    def __enter__(self) -> Self:
        """Open the database, or create it, and start the writing thread."""
        try:
            connection = _connect(self.path)
            self._checkpoint = _max(connection, "SELECT max(checkpoint) FROM checkpoints")
            self._highest_version = _max(connection, "SELECT max(version) FROM versions")
            self._last_step_id, self._last_step = _find_last_step(connection)
            self._counts = dict(connection.execute("SELECT name, num_rows FROM counts"))
            self._file = _FileState.of(self.path)
            if self._routed_experts:
                self._routed_experts.on_error = lambda error: self._fail(
                    journal_error(self.path, error)
                )
                rows = "SELECT checkpoint, number FROM consumed ORDER BY checkpoint"
                for _, consumed in groupby(connection.execute(rows), key=itemgetter(0)):
                    self._routed_experts.consumed([number for _, number in consumed])
        except (sqlite3.Error, OSError) as error:
            raise journal_error(self.path, error) from error
        # a daemon thread, because a disk that does not answer must not keep the process alive
        self._thread = Thread(target=self._write, args=(connection,), name="journal", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """Close the journal.

        If the body of the context raised an error, an error of closing is added to that error as a
        note.
        """
        try:
            self.close()
        except JournalError as close_error:
            if error is None:
                raise
            error.add_note(str(close_error))

    def close(self) -> None:
        """Commit all queued records and end the writing thread.

        Raises the `JournalError` with which the journal failed, unless it was already raised.
        """
        if self._thread is None:
            return
        stuck: JournalError | None = None
        if self._routed_experts:
            try:
                self._routed_experts.close(STUCK_S)
            except TimeoutError:
                stuck = self._experts_stuck()
        thread = self._thread
        self._thread = None
        self._queue.put(None)
        self._awaited.set()
        num_written = -1
        while thread.is_alive() and self._num_written > num_written:  # as long as there is progress
            num_written = self._num_written
            thread.join(STUCK_S)
        if thread.is_alive():
            raise journal_error(self.path, f"it could not be closed in {STUCK_S:g} s")
        if stuck:
            raise stuck
        if self._failure.done() and not self._failure_raised:
            self._failure_raised = True
            self._failure.result()

    def add_request(self, request: GroupRequest) -> None:
        """Record that a group was started, with its task, sizes and limits, in one transaction."""
        task = request.task
        row = (request.number, task.env, task.split, int(task.index), request.seed, request.place)
        records = [insert("groups", *row, time.time(), self._checkpoint)]
        records += [self._size_record(request.number, size) for size in request.sizes]
        if request.turn_limit:
            fields = json.dumps({"group": request.number, **asdict(request.turn_limit)})
            records.append(insert("events", time.time(), TURN_LIMIT, fields, self._checkpoint))
        if request.budget != NO_BUDGET:
            fields = json.dumps({"group": request.number, **asdict(request.budget)})
            records.append(insert("events", time.time(), EPISODE_BUDGET, fields, self._checkpoint))
        self.transaction(records)

    def resize(self, number: int, size: int) -> None:
        """Record that group `number` is enlarged to `size` episodes. Call it before the further
        ones begin.
        """
        self.transaction([self._size_record(number, size)])

    def add_round(self, number: int, decisions: Mapping[str, Any]) -> None:
        """Record decisions about the episodes of group `number`, such as to prune one.

        Call it before any of these episodes continues.
        """
        fields = json.dumps({"group": number, **decisions})
        self.transaction([insert("events", time.time(), ROUND, fields, self._checkpoint)])

    def _size_record(self, number: int, size: int) -> Record:
        fields = json.dumps({"group": number, "size": size})
        return insert("events", time.time(), GROUP_SIZE, fields, self._checkpoint)

    def begin(  # noqa: PLR0913 - two of them number the episode
        self,
        number: int,
        sibling: int,
        *,
        episode: int,
        seed: int,
        again: bool = False,
        fork: Fork | None = None,
        prefix: Sequence[Piece] = (),
        role: str = "",
    ) -> "_EpisodeWriter":
        """Record the start of an attempt at an episode. Return the writer of the attempt's tokens.

        `number` is the group, `sibling` the episode's index in the group, and `episode` the
        attempt's number in the run. With `again`, the attempt was recorded before a resume, and
        nothing is recorded. If the episode is forked from another one, `prefix` has the tokens
        before the `fork`. They are recorded in the same transaction.
        """
        if not again:
            after = self._checkpoint
            row = (episode, number, sibling, seed, time.time(), after)
            records = [insert("episodes", *row)]
            if fork:
                records.append(insert("forks", episode, fork.parent, fork.at, after))
            if fork and fork.note:
                records.append(insert("notes", episode, fork.note, fork.writes, after))
            if role:
                records.append(insert("roles", episode, role, after))
            for position, piece in enumerate(prefix):
                records += piece_rows(episode, position, piece, after)
            self.transaction(records)
        return _EpisodeWriter(self, number, episode)

    async def finish(self, group: Group) -> None:
        """Record that every episode of a group has ended, and commit."""
        self._insert("finished", group.number, time.time())
        await self.barrier()

    async def publishing(self, version: int) -> None:
        """Record that the weight version `version` is about to be published, and commit.

        Call it before any engine loads the version. A resumed run may call it again for its newest
        version.
        """
        if version != self._highest_version:
            self._insert("versions", version, time.time())
            self._highest_version = version
        await self.barrier()

    def commit(
        self,
        groups: Sequence[Group],
        *,
        step: int,
        version: int,
        replayed: Sequence[int] = (),
        tokens: Sequence[TokenValues] = (),
    ) -> None:
        """Record that step `step` trained on these groups, in this order. `checkpoint` commits the
        record.

        `version` is the policy's version before the step. `replayed` are the numbers of groups that
        earlier steps had trained on, too. `tokens` are the values of the step's trained tokens.
        They are committed before the checkpoint, and removed if a resume starts from a checkpoint
        before the step.
        """
        now = time.time()
        for place, group in enumerate(groups):
            self._trained_on.append((group.number, step, place, version, now))
        for place, number in enumerate(replayed):
            self._replayed.append((number, step, place, version, now))
        if tokens:  # they are packed in the journal's thread
            after = self._checkpoint
            self._queue.put(partial(token_rows, tokens, step=step, version=version, after=after))

    async def checkpoint(self, name: str, *, step: int, version: int) -> None:
        """Record a checkpoint, and the groups trained on since the last one, and commit.

        `name` is the checkpoint's folder, `version` the policy's version. The transaction fails if
        one of the groups was recorded before as trained on.
        """
        self._checkpoint += 1
        records = [insert("checkpoints", self._checkpoint, step, version, name, time.time())]
        records += [insert("consumed", *row, self._checkpoint) for row in self._trained_on]
        records += [insert("replayed", *row, self._checkpoint) for row in self._replayed]
        consumed = [number for number, *_ in self._trained_on]
        self._trained_on = []
        self._replayed = []
        self.transaction(records)
        await self.barrier()
        if self._routed_experts:
            self._routed_experts.consumed(consumed)

    def rewind(self, checkpoint: int, *, everything: bool, kept: int = -1) -> None:
        """Make an earlier checkpoint the current one. `checkpoint` is its number in the journal.

        Groups that were trained on after it can be trained on again. Metrics and token values of
        later steps are removed, because they will be logged again. `kept` is the id of the event
        with the metrics of the checkpoint's own step, which stays until `write` replaces it. With
        `everything` (deterministic runs), all other rows written after the checkpoint are removed
        too, because the run computes them again.
        """
        events = f"DELETE FROM events WHERE after >= ? AND id != {kept:d}"
        if not everything:
            events += f" AND kind IN ('step', '{TOKEN_SAMPLES}')"
        statements = [
            "DELETE FROM trained_tokens WHERE after >= ?",
            "DELETE FROM replayed WHERE checkpoint > ?",
            "DELETE FROM consumed WHERE checkpoint > ?",
            "DELETE FROM checkpoints WHERE checkpoint > ?",
            events,
        ]
        if everything:
            statements += [f"DELETE FROM {table} WHERE after >= ?" for table in REPEATED]
        self.transaction([(statement, (checkpoint,)) for statement in statements])
        self.flush()
        self._checkpoint = checkpoint

    def event(self, kind: str, **fields: Any) -> None:
        self._insert("events", time.time(), kind, json.dumps(fields, default=float))

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of a step. They replace those that the journal had of it when it was
        opened.
        """
        others = {name: value for name, value in metrics.items() if name != "step"}
        fields = json.dumps({"step": step, **others}, default=float)
        records = [insert("events", time.time(), "step", fields, self._checkpoint)]
        if step == self._last_step:
            records.insert(0, ("DELETE FROM events WHERE id = ?", (self._last_step_id,)))
        self._last_step = -1
        self.transaction(records)

    def transaction(self, records: Sequence[Record]) -> None:
        """Queue records for the writing thread. It commits all of them together or none."""
        self._queue.put(list(records))

    async def barrier(self) -> None:
        """Wait until all records queued before this call are committed. Concurrent calls share one
        commit.

        Raises `JournalError` if the journal has failed.
        """
        self._barriers += 1
        mine = self._barriers
        async with self._barrier_lock:
            if self._barriers_passed < mine:
                loop = asyncio.get_running_loop()
                passed = await loop.run_in_executor(self._barrier_thread, self._flush_barriers)
                self._barriers_passed = passed

    def _flush_barriers(self) -> int:
        """Commit all queued records. Return how many calls of `barrier` were made before."""
        covered = self._barriers
        self.flush()
        return covered

    def flush(self) -> None:
        """Block the calling thread until all records queued before this call are committed.

        Raises `JournalError` if the journal has failed.
        """
        if self._thread is None:
            raise journal_error(self.path, "it is not open")
        if self._routed_experts:
            try:
                self._routed_experts.flush(STUCK_S)
            except TimeoutError as error:
                raise self._experts_stuck() from error
        mark: Future[None] = Future()
        self._queue.put(mark)
        self._awaited.set()
        while True:
            num_written = self._num_written
            try:
                return mark.result(STUCK_S)
            except TimeoutError as error:
                if self._num_written == num_written:  # no progress, so the queue is not only long
                    raise journal_error(
                        self.path, f"nothing could be committed for {STUCK_S:g} s"
                    ) from error

    async def watch(self) -> None:
        """Wait until the journal fails, and raise its error."""
        try:
            await asyncio.wrap_future(self._failure)
        except JournalError:
            self._failure_raised = True
            raise

    def _experts_stuck(self) -> JournalError:
        return journal_error(self.path, f"no routed experts could be written for {STUCK_S:g} s")

    def _fail(self, error: JournalError) -> None:
        """End the run with this error, unless the journal has failed before."""
        with suppress(InvalidStateError):
            self._failure.set_exception(error)

    def _insert(self, table: str, *values: Any) -> None:
        self.transaction([insert(table, *values, self._checkpoint)])

    def _write(self, connection: sqlite3.Connection) -> None:
        """Commit queued records until the queue yields None. Runs in the writing thread.

        After a failure, nothing more is committed and every `barrier` raises the error.
        """
        with closing(connection):
            items: list[_Item] = []
            while None not in items:
                items = self._gather()
                if not self._failure.done():
                    self._commit(connection, chain.from_iterable(map(_records, items)))
                for mark in items:
                    if isinstance(mark, Future) and mark.set_running_or_notify_cancel():
                        error = self._failure.exception() if self._failure.done() else None
                        self._failure_raised |= error is not None
                        mark.set_exception(error) if error else mark.set_result(None)
            if not self._failure.done():
                # a reader is active, so the WAL file is kept
                with suppress(sqlite3.OperationalError):
                    connection.execute("PRAGMA busy_timeout=0")
                    connection.execute("PRAGMA journal_mode=DELETE")

    def _commit(self, connection: sqlite3.Connection, records: Iterable[Record]) -> None:
        try:
            connection.execute("BEGIN IMMEDIATE")
            changes: Counter[str] = Counter()
            for statement, row in records:
                count = connection.execute(statement, row).rowcount
                match statement.split(maxsplit=3):
                    case ["INSERT", "INTO", table, _]:
                        changes[table] += count
                    case ["DELETE", "FROM", table, _]:
                        changes[table] -= count
                self._num_written += 1
            for statement, row in count_rows(changes, self._counts):
                connection.execute(statement, row)
            connection.execute("COMMIT")
            self._file = self._file.require_same(self.path)
        except JournalError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - the thread must live on, and the run must end
            with suppress(sqlite3.Error):  # SQLite may already have rolled back
                connection.execute("ROLLBACK")
            self._fail(_commit_error(self.path, error))

    def _gather(self) -> list[_Item]:
        """Return the entries queued within `WINDOW_S` of the first one. A waiting `flush` ends this
        time.

        One commit for many transactions is cheaper than one for each.
        """
        items = [self._queue.get()]
        if items[0] is not None and not isinstance(items[0], Future):
            self._awaited.wait(WINDOW_S)
        self._awaited.clear()
        with suppress(queue.Empty):
            while True:
                items.append(self._queue.get_nowait())
        return items


@dataclass(frozen=True, slots=True)
class _EpisodeWriter:
    """A writer of one attempt at an episode to the journal."""

    journal: Journal
    group: int
    episode: int

    def write_piece(self, position: int, piece: Piece) -> None:
        if self.journal._routed_experts and isinstance(piece, Sampled):
            self.journal._routed_experts.write(self.group, self.episode, position, piece)
        checkpoint = self.journal._checkpoint
        self.journal.transaction(piece_rows(self.episode, position, piece, checkpoint))

    def write_snapshot(self, num_pieces: int, state: str) -> None:
        """Record the environment's state after the episode's first `num_pieces` pieces.

        A piece is a run of tokens that are all context, or that one weight version sampled.
        """
        row = (self.episode, num_pieces, to_utf8(state), self.journal._checkpoint)
        self._replace_snapshots(insert("snapshots", *row))

    def write_outcome(self, outcome: Trajectory | Failure) -> None:
        self._replace_snapshots(outcome_row(self.episode, outcome, self.journal._checkpoint))

    def write_restart(self, reason: str, *, turns: int, sampled_tokens: int) -> None:
        """Record that the attempt could not be replayed after a resume, so the episode starts
        again.

        `turns` and `sampled_tokens` are the numbers that are lost.
        """
        row = (self.episode, to_utf8(reason), turns, sampled_tokens, self.journal._checkpoint)
        self._replace_snapshots(insert("restarts", *row))

    def _replace_snapshots(self, record: Record) -> None:
        """Write a record and delete the episode's earlier snapshots, in one transaction.

        With `keep_snapshots` (deterministic runs), none are deleted, because a resume may need
        them.
        """
        delete = ("DELETE FROM snapshots WHERE episode = ?", (self.episode,))
        self.journal.transaction([record] if self.journal._keep_snapshots else [delete, record])


@dataclass(frozen=True, slots=True)
class _FileState:
    """The inode and size of the journal's file, which show whether another program removed it.

    SQLite would continue to write to a removed file without an error, and the rows would be lost.
    """

    number: int = -1
    size: int = 0

    @classmethod
    def of(cls, path: Path) -> Self:
        status = path.stat()
        return cls(status.st_ino, status.st_size)

    def require_same(self, path: Path) -> Self:
        """Return the file's current state. Raises `JournalError` if it was removed, replaced or
        shortened.
        """
        try:
            found = self.of(path)
        except OSError:
            found = replace(self, number=-1)
        if found.number != self.number:
            raise JournalError(
                f"the journal {path} was removed or replaced while the run wrote to it, and with "
                "it the newest episodes. Put it back and resume the run, or start it again"
            )
        if found.size < self.size:
            raise JournalError(
                f"the journal {path} was truncated while the run wrote to it: {found.size:,} bytes "
                f"are left of {self.size:,}. Resume a copy of the folder, or start the run again"
            )
        return found


def _records(item: _Item) -> Iterable[Record]:
    """Return the records that an entry of the queue stands for."""
    if item is None or isinstance(item, Future):
        return ()
    return item if isinstance(item, list) else item()


def _commit_error(path: Path, error: Exception) -> JournalError:
    """Return the error for a failed commit, with the cause and advice in its text."""
    if getattr(error, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return JournalError(
            f"the journal {path} was locked by another process for {STUCK_S / 2:g} s "
            f"({error}). End that process, then resume the run"
        )
    return journal_error(path, error)


def _create(path: Path) -> None:
    """Create an empty journal under a temporary name, then rename it."""
    new = path.with_name(f".{path.name}.new")
    for end in ("", "-journal"):
        new.with_name(new.name + end).unlink(missing_ok=True)
    for end in ("-wal", "-shm", "-journal"):  # of an earlier journal, which is not there any more
        path.with_name(path.name + end).unlink(missing_ok=True)
    with closing(sqlite3.connect(new, isolation_level=None)) as connection:
        connection.executescript(
            "PRAGMA synchronous=FULL; "
            f"PRAGMA application_id={1 + secrets.randbelow(2**31 - 1)}; "
            f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version={FORMAT}; COMMIT;"
        )
    new.rename(path)
    flush_to_disk(path.parent)


def _connect(path: Path) -> sqlite3.Connection:
    """Open or create a journal's database. Every commit waits until the disk has the data."""
    if not holds_journal(path):
        _create(path)
    require_sound_wal(path)
    with ExitStack() as on_error:
        connection = sqlite3.connect(
            path, timeout=STUCK_S / 2, isolation_level=None, check_same_thread=False
        )
        on_error.callback(connection.close)
        connection.executescript(
            "PRAGMA trusted_schema=OFF; PRAGMA journal_mode=WAL; "
            "PRAGMA synchronous=FULL; PRAGMA foreign_keys=ON;"
        )
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version != FORMAT:
            raise journal_error(path, f"its format is {version}, this release writes {FORMAT}")
        require_tables(path, connection)
        on_error.pop_all()
    return connection


def _find_last_step(connection: sqlite3.Connection) -> tuple[int, int]:
    """Return the id of the event with the newest metrics, and their step. (-1, -1) if there are
    none.
    """
    rows = connection.execute(
        "SELECT id, fields FROM events WHERE kind = 'step' ORDER BY id DESC LIMIT 1"
    )
    for event, fields in rows.fetchall():
        with suppress(ValueError, LookupError, TypeError):
            return event, int(json.loads(fields)["step"])
    return -1, -1


def _max(connection: sqlite3.Connection, question: str) -> int:
    """Return the number that a query yields, or -1 if it yields NULL, as for an empty table."""
    ((value,),) = connection.execute(question).fetchall()
    return -1 if value is None else int(value)
