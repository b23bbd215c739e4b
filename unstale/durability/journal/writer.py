"""Writes. Whoever has something to say appends to a queue; one thread owns the connection and commits what gathered."""

import asyncio
import json
import queue
import sqlite3
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self

from unstale.durability.journal.reader import JournalReader, require_tables
from unstale.durability.journal.tables import (
    FORMAT,
    JOURNAL,
    NEWER,
    SCHEMA,
    JournalError,
    Record,
    failed,
    handed_out,
    insert,
    outcome_row,
    piece_row,
    plain,
)
from unstale.records import Failure, Group, GroupRequest, Piece, Trajectory

WINDOW_S = 0.2
"""What was written is committed this much later at the latest; a barrier does not wait for it."""

STUCK_S = 8.0
"""Nothing written for longer ends the run. SQLite itself waits for the lock of another writer for half of it."""

_Item = list[Record] | Future[None] | None
"""Records that become true together, a barrier, or the end."""


class Journal:
    """`with journal:` opens and closes it. Nothing that writes waits; only `barrier` and what says so does.

    A failure of the disk or the file surfaces as `JournalError` in `watch`, at once, and at every barrier.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._awaited = Event()
        self._thread: Thread | None = None
        self._failure: Future[None] = Future()
        self._failure.set_running_or_notify_cancel()  # who stops watching does not cancel it
        self._waiting = asyncio.Lock()
        self._waiter = ThreadPoolExecutor(
            1, thread_name_prefix="barrier"
        )  # environments may keep others busy
        self._barriers = self._passed = self._written = 0
        self._after = self._highest = -1
        self._trained_on: list[tuple[int, int, int, int, float]] = []
        """Consumed, but in no checkpoint: rows of the table without its last column."""

    @staticmethod
    def read(run: Path) -> JournalReader:
        """The journal of a run folder as it is at this moment; the run may be going on."""
        return JournalReader(run / JOURNAL)

    def __enter__(self) -> Self:
        """Make the database, or open the one that is there."""
        try:
            connection = _connect(self.path)
            self._after = _number(connection, "SELECT max(checkpoint) FROM checkpoints")
            self._highest = _number(connection, "SELECT max(version) FROM versions")
        except sqlite3.Error as error:
            raise failed(self.path, error) from error
        # A daemon, because a disk that does not answer must not keep the process from ending.
        self._thread = Thread(target=self._write, args=(connection,), name="journal", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """What was going wrong already is the cause; that closing fails too is a note to it."""
        try:
            self.close()
        except JournalError as too:
            if error is None:
                raise
            error.add_note(str(too))

    def close(self) -> None:
        """Commit what is queued and end the thread. Raises what goes wrong here; an earlier failure was told."""
        if self._thread is None:
            return
        told = self._failure.done()
        thread, self._thread = self._thread, None
        self._queue.put(None)
        self._awaited.set()
        written = -1
        while thread.is_alive() and self._written > written:  # else it is stuck
            written = self._written
            thread.join(STUCK_S)
        if thread.is_alive():
            raise failed(self.path, f"it could not be closed in {STUCK_S:g} s")
        if not told and self._failure.done():
            self._failure.result()

    def add_request(self, request: GroupRequest) -> None:
        """A task was admitted as a group."""
        self.transaction([handed_out(request, self._after)])

    def begin(
        self, number: int, sibling: int, *, episode: int, seed: int, again: bool = False
    ) -> "_Page":
        """An attempt at one episode of a group begins, or goes on `again`: where to write it down."""
        if not again:
            self._insert("episodes", episode, number, sibling, seed, time.time())
        return _Page(self, episode)

    async def finish(self, group: Group) -> None:
        """All episodes of a group have ended, and are committed when this returns."""
        self._insert("finished", group.number, time.time())
        await self.barrier()

    async def publishing(self, version: int) -> None:
        """A version will be loaded by engines; that it exists is committed when this returns.

        The newest may be brought to them again, by a run that goes on from a checkpoint.
        """
        if version != self._highest:
            self._insert("versions", version, time.time())
            self._highest = version
        await self.barrier()

    def consume(self, groups: Sequence[Group], *, step: int, version: int) -> None:
        """A step trained on these groups, in this order. It becomes true with the checkpoint that holds its effect."""
        now = time.time()
        self._trained_on += [
            (group.number, step, place, version, now) for place, group in enumerate(groups)
        ]

    async def checkpoint(self, name: str, *, step: int, version: int) -> None:
        """A checkpoint is there: in one transaction it becomes the current one, and what it was trained on consumed.

        A group that was consumed before is refused by the table.
        """
        self._after += 1
        rows, self._trained_on = self._trained_on, []
        records = [insert("checkpoints", self._after, step, version, name, time.time())]
        self.transaction(records + [insert("consumed", *row, self._after) for row in rows])
        await self.barrier()

    def rewind(self, checkpoint: int, *, everything: bool) -> None:
        """That checkpoint becomes the current one again: later ones are gone, and what they consumed is not consumed.

        The metrics of its step and of later ones go, they will be written again. `everything` that came after it goes
        for a deterministic run, which makes it again.
        """
        later = [("DELETE FROM consumed WHERE checkpoint > ?", (checkpoint,))]
        later += [("DELETE FROM checkpoints WHERE checkpoint > ?", (checkpoint,))]
        kinds = "" if everything else " AND kind = 'step'"
        later += [(f"DELETE FROM events WHERE after >= ?{kinds}", (checkpoint,))]
        if everything:
            later += [(f"DELETE FROM {table} WHERE after >= ?", (checkpoint,)) for table in NEWER]
        self.transaction(later)
        self.flush()
        self._after = checkpoint

    def event(self, kind: str, **fields: Any) -> None:
        """Something that happened."""
        self._insert("events", time.time(), kind, json.dumps(fields, default=float))

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """As a `Sink`: a step's metrics are an event."""
        self.event(
            "step", step=step, **{name: value for name, value in metrics.items() if name != "step"}
        )

    def _insert(self, table: str, *values: Any) -> None:
        self.transaction([insert(table, *values, self._after)])

    def transaction(self, records: Sequence[Record]) -> None:
        """Records that become true together or not at all."""
        self._queue.put(list(records))

    async def barrier(self) -> None:
        """Everything written before is committed when this returns. Those who come while one waits share the next."""
        self._barriers += 1
        mine = self._barriers
        async with self._waiting:
            if self._passed < mine:
                covers = self._barriers
                await asyncio.get_running_loop().run_in_executor(self._waiter, self.flush)
                self._passed = covers

    def flush(self) -> None:
        """`barrier` for a thread, which waits."""
        if self._thread is None:
            raise failed(self.path, "it is not open")
        mark: Future[None] = Future()
        self._queue.put(mark)
        self._awaited.set()
        while True:
            written = self._written
            try:
                return mark.result(STUCK_S)
            except TimeoutError as error:
                if self._written == written:  # else there is so much before it
                    raise failed(
                        self.path, f"nothing could be committed for {STUCK_S:g} s"
                    ) from error

    async def watch(self) -> None:
        """Return never; raise when the journal fails."""
        await asyncio.wrap_future(self._failure)

    def _write(self, connection: sqlite3.Connection) -> None:
        """The thread. After a failure it only tells whoever asks, until it is closed."""
        with closing(connection):
            items: list[_Item] = []
            while None not in items:
                items = self._gather()
                if not self._failure.done():
                    self._commit(
                        connection,
                        [record for item in items if isinstance(item, list) for record in item],
                    )
                for mark in items:
                    if isinstance(mark, Future) and mark.set_running_or_notify_cancel():
                        error = self._failure.exception() if self._failure.done() else None
                        mark.set_exception(error) if error else mark.set_result(None)
            if not self._failure.done():
                with suppress(
                    sqlite3.OperationalError
                ):  # one plain file, unless somebody is reading
                    connection.execute("PRAGMA busy_timeout=0")
                    connection.execute("PRAGMA journal_mode=DELETE")

    def _commit(self, connection: sqlite3.Connection, records: Sequence[Record]) -> None:
        try:
            connection.execute("BEGIN IMMEDIATE")
            for statement, row in records:
                connection.execute(statement, row)
                self._written += 1
            connection.execute("COMMIT")
        except (sqlite3.Error, OverflowError, UnicodeError) as error:
            with suppress(sqlite3.Error):  # SQLite may have rolled back itself
                connection.execute("ROLLBACK")
            self._failure.set_exception(failed(self.path, error))

    def _gather(self) -> list[_Item]:
        """What comes within `WINDOW_S`, or until somebody waits. To wake for each record would cost more than it."""
        items = [self._queue.get()]
        if isinstance(items[0], list):
            self._awaited.wait(WINDOW_S)
        self._awaited.clear()
        with suppress(queue.Empty):
            while True:
                items.append(self._queue.get_nowait())
        return items


@dataclass(frozen=True, slots=True)
class _Page:
    """Where one episode is written down while it happens."""

    journal: Journal
    episode: int

    def write_piece(self, position: int, piece: Piece) -> None:
        self.journal.transaction([piece_row(self.episode, position, piece, self.journal._after)])

    def write_snapshot(self, num_pieces: int, state: str) -> None:
        """The environment's own, after it had led to so many pieces."""
        self.journal._insert("snapshots", self.episode, num_pieces, plain(state))

    def write_outcome(self, outcome: Trajectory | Failure) -> None:
        self.journal.transaction([outcome_row(self.episode, outcome, self.journal._after)])

    def write_restart(self, reason: str, *, turns: int, sampled_tokens: int) -> None:
        """It could not be gone on with, and is begun again."""
        self.journal._insert("restarts", self.episode, plain(reason), turns, sampled_tokens)


def _connect(path: Path) -> sqlite3.Connection:
    """A connection that commits to the disk, on a database with the tables. Handed to the thread that writes."""
    with ExitStack() as stack:
        connection = sqlite3.connect(
            path, timeout=STUCK_S / 2, isolation_level=None, check_same_thread=False
        )
        stack.callback(connection.close)
        connection.executescript(
            "PRAGMA trusted_schema=OFF; PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA foreign_keys=ON;"
        )
        (found,) = connection.execute("PRAGMA user_version").fetchone()
        if found not in (0, FORMAT):
            raise failed(path, f"it has format {found}, this version writes {FORMAT}")
        if not found:
            connection.executescript(
                f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version={FORMAT}; COMMIT;"
            )
        require_tables(path, connection)
        stack.pop_all()
    return connection


def _number(connection: sqlite3.Connection, question: str) -> int:
    """-1 for nothing."""
    ((found,),) = connection.execute(question).fetchall()
    return -1 if found is None else int(found)
