"""The tables of a run's index: an SQLite database in a temporary folder, from which pages are made.

The index has copies of the data for tables and plots, because the run's own journal is never
written to and cannot sort quickly. The index can be deleted at any time and filled again.
"""

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["number", "text"]


@dataclass(frozen=True, slots=True)
class Column:
    """A column by which the table of episodes can be sorted and filtered."""

    name: str
    kind: Kind
    about: str
    unit: str = ""


COLUMNS = (
    Column("episode", "number", "number of the episode, in the order of their start"),
    Column("group_number", "number", "number of its group of siblings"),
    Column("sibling", "number", "its place in the group"),
    Column("task", "text", "environment, split and index of the task"),
    Column("role", "text", "role of the policy in this conversation, if its tasks have several"),
    Column("outcome", "text", "trained, waiting, failed, restarted or open"),
    Column("stop", "text", "why it ended"),
    Column("reward", "number", "sum of its rewards"),
    Column("success", "number", "1 if it succeeded, otherwise 0"),
    Column("step", "number", "optimizer step that trained on it"),
    Column("lag_max", "number", "staleness of its oldest sampled token when it was trained on"),
    Column("versions", "number", "number of versions that sampled it"),
    Column("version_min", "number", "oldest version that sampled it"),
    Column("version_max", "number", "newest version that sampled it"),
    Column("advantage", "number", "mean advantage of its sampled tokens in the loss"),
    Column("log_d_abs_max", "number", "largest |log D| of a trained token", "nats"),
    Column("log_s_abs_max", "number", "largest |log S| of a trained token", "nats"),
    Column("dropped_tokens", "number", "trained tokens that the correction or a technique dropped"),
    Column("clipped_tokens", "number", "trained tokens that the objective clipped or capped"),
    Column("turns", "number", "replies of the policy"),
    Column("tokens", "number", "tokens, context included"),
    Column("sampled_tokens", "number", "tokens that the policy sampled"),
    Column("behavior_logp_mean", "number", "mean behavior_logp of the sampled tokens", "nats"),
    Column("behavior_logp_min", "number", "smallest behavior_logp of a sampled token", "nats"),
)
"""Columns of the table of episodes. A column by which many episodes are sorted gets a database
index when it is first needed, so that the next page is read without sorting. Keeping all 22 indexes
would take as long as reading the episodes of a live run.
"""

COLUMN = {column.name: column for column in COLUMNS}

_WHOLE = ("group_number", "sibling")
"""Columns that the table of episodes declares as integers, as the journal does."""


def _declare(column: Column) -> str:
    if column.name == "episode":
        return "episode INTEGER PRIMARY KEY"
    kind = "INTEGER" if column.name in _WHOLE else {"number": "REAL", "text": "TEXT"}[column.kind]
    return f"{column.name} {kind}"


FILES = """
CREATE TABLE names (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE metrics (name INTEGER NOT NULL, step INTEGER NOT NULL, value REAL NOT NULL,
    PRIMARY KEY (name, step)) WITHOUT ROWID;
CREATE TABLE lags (step INTEGER NOT NULL, lag INTEGER NOT NULL, tokens REAL NOT NULL,
    PRIMARY KEY (step, lag)) WITHOUT ROWID;
CREATE TABLE spans (id INTEGER PRIMARY KEY, lane TEXT NOT NULL, start REAL NOT NULL,
    "end" REAL NOT NULL, label TEXT NOT NULL);
CREATE INDEX spans_by_end ON spans ("end");
CREATE TABLE events (id INTEGER PRIMARY KEY, time REAL, kind TEXT NOT NULL, fields TEXT NOT NULL);
CREATE INDEX events_by_kind ON events (kind, id)"""
"""SQL of the tables with data of `metrics.jsonl` and `events.jsonl`. `lags` has the number of
trained tokens by step and lag (staleness).
"""

_EPISODE_COLUMNS = ", ".join(_declare(column) for column in COLUMNS)

SORTED = tuple(column.name for column in COLUMNS if column.name not in ("episode", "group_number"))
"""Columns of the table of episodes that get a database index when it is first needed. The columns
`episode` and `group_number` always have one.
"""

EPISODES = f"""
CREATE TABLE episodes ({_EPISODE_COLUMNS}, seed INTEGER NOT NULL, is_branch INTEGER NOT NULL,
    note TEXT NOT NULL DEFAULT '');
CREATE INDEX episodes_by_group_number ON episodes (group_number, episode);
CREATE INDEX episodes_open ON episodes (episode) WHERE outcome = 'open';
CREATE TABLE figures (episode INTEGER NOT NULL, name TEXT NOT NULL, value REAL NOT NULL,
    PRIMARY KEY (episode, name)) WITHOUT ROWID;
CREATE INDEX figures_by_value ON figures (name, value, episode);
CREATE TABLE ages (tenth INTEGER NOT NULL, lag INTEGER NOT NULL, tokens INTEGER NOT NULL,
    PRIMARY KEY (tenth, lag)) WITHOUT ROWID;
CREATE VIRTUAL TABLE words USING fts5(text, content='', tokenize='unicode61')"""
"""SQL of the tables with data of the journal. `ages` has the number of trained tokens by tenth of
the episode and lag (staleness). `figures` has the rewards (`reward:NAME`) and facts (`fact:NAME`)
of an episode. `words` is the full-text index of the conversations, without the text.
"""


MAX_IDLE = 8
"""Largest number of idle connections for reading that are kept open, for all runs together."""


class _IdleReaders:
    """Idle connections for reading. They are kept because opening one takes as long as a short
    answer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[tuple[Path, sqlite3.Connection]] = []

    def take(self, path: Path) -> sqlite3.Connection:
        with self._lock:
            for place, (own, reader) in enumerate(self._idle):
                if own == path:
                    del self._idle[place]
                    return reader
        reader = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        reader.execute("PRAGMA query_only=ON")
        return reader

    def give(self, path: Path, reader: sqlite3.Connection) -> None:
        """Keep a connection for later use. If there are more than `MAX_IDLE`, close the one idle
        for longest.
        """
        with self._lock:
            self._idle.append((path, reader))
            spare = self._idle.pop(0)[1] if len(self._idle) > MAX_IDLE else None
        if spare is not None:
            spare.close()

    def drop(self, path: Path) -> None:
        with self._lock:
            closed = [reader for own, reader in self._idle if own == path]
            self._idle = [each for each in self._idle if each[0] != path]
        for reader in closed:
            reader.close()


_READERS = _IdleReaders()


class Database:
    """The database of one run's index.

    One thread writes. Any thread may read, each with its own connection.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writer: sqlite3.Connection | None = None
        self._reading = threading.local()
        """Values of the current thread. `reader` is its open connection, or None if it is not
        reading.
        """
        self._open().executescript(f"PRAGMA journal_mode=WAL;{FILES};{EPISODES};")
        self.close_writer()
        self._made: set[str] = set()
        self._wanted: set[str] = set()
        """Columns whose database index was requested and does not exist yet."""

    def _open(self) -> sqlite3.Connection:
        if self._writer is None:
            self._writer = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            self._writer.execute("PRAGMA synchronous=OFF")
            self._writer.execute("PRAGMA temp_store=MEMORY")
        return self._writer

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Return a context that is one transaction and gives the writing connection. An error
        undoes it.
        """
        writer = self._open()
        writer.execute("BEGIN")
        try:
            yield writer
        except BaseException:
            writer.execute("ROLLBACK")
            raise
        writer.execute("COMMIT")

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Return a context that gives a reading connection. The data stay the same within the
        context.

        A `read` inside another `read` of the same thread gives the same connection.
        """
        reader: sqlite3.Connection | None = getattr(self._reading, "reader", None)
        if reader is not None:
            yield reader
            return
        reader = _READERS.take(self.path)
        try:
            reader.execute("BEGIN")
            self._reading.reader = reader
            yield reader
            reader.execute("COMMIT")
        except BaseException:
            reader.close()
            raise
        finally:
            self._reading.reader = None
        _READERS.give(self.path, reader)

    def rows(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows that one SQL statement selects."""
        with self.read() as reader:
            return reader.execute(statement, parameters).fetchall()

    def want_index(self, column: str) -> None:
        """Request a database index of a column of the table of episodes. `make_index` makes it
        later.
        """
        if column in SORTED and column not in self._made:
            self._wanted.add(column)

    @property
    def wants_index(self) -> bool:
        """True if a requested database index of a column does not exist yet."""
        return bool(self._wanted)

    def make_index(self) -> bool:
        """Make one requested database index of a column. Return False if none was requested."""
        for name in sorted(self._wanted):
            self._wanted.discard(name)
            with self.write() as writer:
                writer.execute(
                    f"CREATE INDEX IF NOT EXISTS episodes_by_{name} ON episodes ({name}, episode)"
                )
            self._made.add(name)
            return True
        return False

    def clear_episodes(self) -> None:
        """Remove all data that came from the journal. Database indexes of columns are requested
        again.
        """
        with self.write() as writer:
            for name in ("episodes", "figures", "ages", "words"):
                writer.execute(f"DROP TABLE {name}")
            for statement in EPISODES.split(";"):
                writer.execute(statement)
        self._wanted |= self._made
        self._made = set()

    def clear_metrics(self) -> None:
        """Remove all data that came from `metrics.jsonl`."""
        with self.write() as writer:
            for name in ("metrics", "lags", "names"):
                writer.execute(f"DELETE FROM {name}")

    def clear_events(self) -> None:
        """Remove all data that came from `events.jsonl`."""
        with self.write() as writer:
            for name in ("spans", "events"):
                writer.execute(f"DELETE FROM {name}")

    def close_writer(self) -> None:
        """Close the writing connection, so that many runs need few file descriptors.

        `write` opens it again.
        """
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def close(self) -> None:
        """Close all idle connections to the database. Later reads and writes open new ones."""
        self.close_writer()
        _READERS.drop(self.path)
