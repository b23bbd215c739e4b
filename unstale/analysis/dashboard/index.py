"""Copy a run's metrics, events and journal into its index (an SQLite database), one bounded part at
a time.
"""

import os
import sqlite3
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from unstale.analysis.dashboard.ages import add_ages, add_ages_of, count_ages
from unstale.analysis.dashboard.database import Database
from unstale.analysis.dashboard.episode_rows import (
    PIECES,
    Piece,
    add_outcome,
    measure_pieces,
    text_of,
)
from unstale.analysis.dashboard.events import MAX_EVENT_TEXT, add_event
from unstale.analysis.dashboard.journals import open_journal, unreadable
from unstale.analysis.dashboard.tail import Tail
from unstale.analysis.dashboard.training import measure_group
from unstale.durability.journal import JOURNAL, JournalError, JournalReader
from unstale.durability.journal.conversations import Decode, load_decoder
from unstale.durability.run_folder import EVENTS, METRICS, Row
from unstale.observe.health import TrainingHealth
from unstale.observe.run_rows import histogram
from unstale.observe.words import number

CHUNK_EPISODES = 400
"""Largest number of episodes that are copied in one transaction, to limit its duration."""

CHUNK_TOKENS = 400_000
"""Approximate largest number of tokens that are copied in one transaction, to limit the memory."""

MAX_NAMES = 2000
"""Largest number of different metrics that are copied. A damaged file may have any number of
names.
"""

STATE_EVENTS = ("started", "resumed", "stopped")
"""Kinds of events from which the state of a run (for example, stopped) follows."""

STATE_FIELDS = ("reason", "detail", "command")

_UNSTORABLE = (OverflowError, UnicodeEncodeError, RecursionError)
"""Errors that SQLite or JSON raises for a row that cannot be stored: a number beyond 64 bits, half
a surrogate pair, very deep nesting.
"""

ADD_WORDS = "INSERT INTO words (rowid, text) VALUES (?, ?)"


class _Consumed(NamedTuple):
    """A group that was trained on: its number, the step, and the policy's version before this
    step.
    """

    group: int
    step: int
    version: int


_NOTHING = _Consumed(-1, -1, -1)


class RunIndex:
    """The index of one run: a database of copied data, and how far the copying has come.

    One thread calls `update_files` and `update_journal`. Any thread may read the attributes.
    """

    def __init__(self, folder: Path, path: Path) -> None:
        self.folder = folder
        self.database = Database(path)
        self.num_rows = 0
        """Number of rows of `metrics.jsonl` read so far."""
        self.num_events = 0
        self.last_step = 0
        self.num_episodes = 0
        """Number of the journal's episodes that are in the database, whether they have ended or
        not.
        """
        self.num_ended = 0
        self.num_started = 0
        """Number of episodes that had begun when the journal was last read."""
        self.is_complete = False
        """True if nothing was left to copy when the journal was last read. It is also True if the
        journal cannot be read.
        """
        self.problem = ""
        """A sentence on why the journal cannot be read. Empty if it can."""
        self.failure = ""
        """A sentence on why the index is not updated any more, for example because of a full disk.
        Empty if it is.
        """
        self.search_problem = ""
        """A sentence on why the text of episodes cannot be searched. Empty if it can."""
        self.changes = 0
        """A number that grows whenever the content of this index or a sentence on a problem
        changes.
        """
        self._metrics = Tail(folder / METRICS)
        self._events = Tail(folder / EVENTS)
        self.state_events: dict[str, tuple[int, Row]] = {}
        """The last event of each kind in `STATE_EVENTS`: its position in `events.jsonl`, and its
        fields.
        """
        self.health = TrainingHealth()
        """The checks of training health, applied to the rows of `metrics.jsonl` read so far.

        The checks that the run itself logged as events are not used, because they include steps
        that a resume has repeated.
        """
        self._names: dict[str, int] = {}
        self._state: tuple[int, ...] = ()
        self._inode = 0
        self._last_episode = -1
        self._last_consumed = _NOTHING
        self._has_backlog = False
        """True if the last part was full, so that more episodes may have ended that are not copied
        yet.
        """
        self._siblings: tuple[int, dict[int, Row]] = (-1, {})
        """The number of the group that `_training` read last (-1 before the first), and the
        training columns of each of its episodes, by episode number.
        """
        self._decode: Decode | None = None
        self._counted: tuple[int, ...] = ()
        """State of the journal's files (`_state`) when `count_episodes` last read it."""
        self._wants_words = False
        self._without_words = array("q")
        """Numbers of ended episodes whose text is not in the full-text index yet."""
        self._skipped = array("q")
        """Numbers of episodes that are added to `_without_words` when the current transaction has
        succeeded.
        """

    def close(self) -> None:
        self.database.close()

    @property
    def problems(self) -> list[str]:
        """Sentences on what could not be read or updated, for the page."""
        read = (self._metrics.problem, self._events.problem, self.problem, self.search_problem)
        found = (self.failure, *read)
        return [text for text in found if text]

    @property
    def names(self) -> list[str]:
        return list(self._names)

    @property
    def coverage(self) -> str:
        """A clause for messages: how many of the episodes that have begun have ended and are in the
        index.
        """
        return f"{self.num_ended} of {self.num_started} episodes are in the index"

    @property
    def num_searchable(self) -> int:
        """The number of ended episodes that a full-text search covers."""
        return self.num_ended - len(self._without_words)

    @property
    def lacks_words(self) -> bool:
        """True if a full-text search was requested and the text of some ended episodes is not
        indexed yet.
        """
        return self._wants_words and len(self._without_words) > 0

    @property
    def is_idle(self) -> bool:
        """True if `update_journal` has nothing to do until the journal grows."""
        return self.is_complete and not self.lacks_words and not self.database.wants_index

    def look_again(self) -> None:
        """Set `is_complete` to False if the journal's files have changed since they were last
        read.
        """
        if _state(self.folder) != self._state:
            self.is_complete = False

    def want_words(self) -> None:
        """Request the full-text index of the conversations. `update_journal` then fills it.

        The full-text index is filled only on request, because this takes a quarter of the time to
        copy an episode.
        """
        self._wants_words = True

    def update_files(self) -> bool:
        """Copy the next part of `metrics.jsonl` and `events.jsonl`. Return False if neither had new
        rows.
        """
        return self._read_metrics() | self._read_events()

    def _read_metrics(self) -> bool:
        rows, is_new = self._metrics.read()
        if is_new:
            self.database.clear_metrics()
            self._names, self.num_rows, self.last_step = {}, 0, 0
            self.health = TrainingHealth()
        self._add_each(self._metrics, rows, self._add_row)
        for row in rows:
            self.health.update(row)
        self.num_rows += len(rows)
        self.changes += bool(rows or is_new)
        return bool(rows)

    def _add_each(
        self, tail: Tail, rows: Sequence[Row], add: Callable[[sqlite3.Connection, Row], None]
    ) -> None:
        """Call `add` for each row of the file that `tail` reads. Rows that SQLite cannot store are
        left out.

        In that case `tail.problem` has a sentence about it.
        """
        if not rows:
            return
        with self.database.write() as writer:
            for row in rows:
                try:
                    add(writer, row)
                except _UNSTORABLE:
                    tail.problem = (
                        f"{tail.path.name} has lines with numbers or texts that cannot be stored; "
                        "they were left out"
                    )

    def _add_row(self, writer: sqlite3.Connection, row: Row) -> None:
        found = number(row.get("step"))
        if found is None:
            return
        step = int(found)
        values = []
        for name, value in row.items():
            amount = number(value)
            if amount is None or name == "step":
                continue
            if name not in self._names:
                if len(self._names) >= MAX_NAMES:
                    continue
                writer.execute("INSERT INTO names VALUES (?, ?)", (len(self._names), name))
                self._names[name] = len(self._names)
            values.append((self._names[name], step, amount))
        writer.executemany("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?)", values)
        writer.executemany(
            "INSERT OR REPLACE INTO lags VALUES (?, ?, ?)",
            [(step, lag, tokens) for lag, tokens in histogram(row).items()],
        )
        self.last_step = max(self.last_step, step)

    def _read_events(self) -> bool:
        rows, is_new = self._events.read()
        if is_new:
            self.database.clear_events()
            self.num_events, self.state_events = 0, {}
        self._add_each(self._events, rows, add_event)
        for place, row in enumerate(rows, self.num_events):
            if (kind := str(row.get("kind"))) in STATE_EVENTS:
                fields = {name: str(row.get(name) or "")[:MAX_EVENT_TEXT] for name in STATE_FIELDS}
                self.state_events = {**self.state_events, kind: (place, fields)}
        self.num_events += len(rows)
        self.changes += bool(rows or is_new)
        return bool(rows)

    def update_journal(self) -> bool:
        """Copy a part of the journal, or make a requested database index. Return False if nothing
        was left.

        If the journal cannot be read, `problem` has the reason, and a later call tries again when
        the file has changed.
        """
        state = _state(self.folder)
        if self.is_complete and state == self._state and not self.lacks_words:
            return self.database.make_index()
        before, had_backlog = self.changes, self._has_backlog
        try:
            self.problem = unreadable(self.folder)
            if not self.problem:
                if state[0] != self._inode:
                    self._restart(state[0])
                with open_journal(self.folder) as journal:
                    self.is_complete = self._copy(journal)
        except (JournalError, OSError, ValueError) as error:
            self.problem = str(error)
        if self.problem:
            self.is_complete = True
            self.changes += self._state != state
        if self.is_complete:
            self._state = state
        if self.changes != before or had_backlog:
            return True
        return self.is_complete and self.database.make_index()

    def count_episodes(self) -> None:
        """Update `num_started` from the journal without copying episodes. It is read only if it has
        changed.
        """
        state = _state(self.folder)
        if state in (self._counted, self._state):
            return
        self._counted, self.is_complete = state, False
        before = self.num_started, self.problem
        try:
            self.problem = unreadable(self.folder)
            if not self.problem:
                with open_journal(self.folder) as journal:
                    rows = journal.rows("SELECT num_rows FROM counts WHERE name = 'episodes'")
                self.num_started = sum(count for (count,) in rows)
        except (JournalError, OSError, ValueError) as error:
            self.problem = str(error)
        self.changes += before != (self.num_started, self.problem)

    def _restart(self, inode: int) -> None:
        self.database.clear_episodes()
        self._without_words = array("q")
        self._inode, self._last_episode, self._last_consumed = inode, -1, _NOTHING
        self._has_backlog = False
        self._siblings = (-1, {})
        self.num_episodes = self.num_ended = 0
        self.changes += 1
        self.search_problem, self._decode = "", None
        try:
            self._decode = load_decoder(self.folder)
        except (OSError, ValueError) as error:
            self.search_problem = f"texts cannot be searched: {error}"

    def _copy(self, journal: JournalReader) -> bool:
        """Copy one part of the journal. Return True if everything was copied."""
        ((started,),) = journal.rows("SELECT count(*) FROM episodes")
        if started < self.num_episodes or self._was_rewound(journal):
            self._restart(self._inode)
        self.num_started = started
        new = journal.rows(
            "SELECT e.episode, number, sibling, e.seed, role, env, split, task FROM episodes e "
            "JOIN groups USING (number) LEFT JOIN roles USING (episode) "
            "WHERE e.episode > ? ORDER BY e.episode LIMIT ?",
            self._last_episode,
            0 if self._has_backlog else CHUNK_EPISODES,
        )
        self._skipped = array("q")
        with self.database.write() as writer:
            for row in new:
                _add_episode(writer, *row)
            open_ = writer.execute(
                "SELECT episode FROM episodes WHERE outcome = 'open' ORDER BY episode"
            ).fetchall()
            copied, is_last = self._copy_ended(journal, writer, [episode for (episode,) in open_])
            consumed = _copy_consumed(journal, writer, self._last_consumed.step)
        self._without_words += self._skipped
        texts = self._copy_words(journal) if is_last and self.lacks_words else 0
        self._has_backlog = not is_last
        self._last_episode = new[-1][0] if new else self._last_episode
        self._last_consumed = consumed[-1] if consumed else self._last_consumed
        self.num_episodes += len(new)
        self.num_ended += copied
        self.changes += bool(new or copied or consumed or texts)
        return is_last and self.num_episodes >= started

    def _was_rewound(self, journal: JournalReader) -> bool:
        """Return True if a resume has removed the newest copied training of a group from the
        journal.

        If the group was trained on again in the same step with the same version, its values are the
        same, so the result is False.
        """
        last = self._last_consumed
        rows = journal.rows("SELECT step, version FROM consumed WHERE number = ?", last.group)
        return last is not _NOTHING and (last.step, last.version) not in rows

    def _copy_ended(
        self, journal: JournalReader, writer: sqlite3.Connection, open_: Sequence[int]
    ) -> tuple[int, bool]:
        """Copy those of the episodes `open_` that have ended, up to the limits of a transaction.

        Return the number of copied episodes, and False if a limit was reached.
        """
        copied = tokens = 0
        is_last = True
        ages: Counter[tuple[int, int]] = Counter()
        for end in _ends(journal, open_):
            tokens += self._copy_end(journal, writer, end, ages)
            copied += 1
            if tokens >= CHUNK_TOKENS or copied >= CHUNK_EPISODES:
                is_last = False
                break
        add_ages(writer, ages)
        return copied, is_last

    def _training(self, journal: JournalReader, end: Sequence[Any], oldest: int | None) -> Row:
        """Return the columns of the table of episodes that describe the training of one episode.

        The columns are computed for its whole group and cached. `end` is a row of `_ends`. `oldest`
        is the oldest version that sampled the episode, or None if no token was sampled.
        """
        episode, step, group, version = end[0], *end[-3:]
        if self._siblings[0] != group:
            self._siblings = group, measure_group(journal, group, step)
        lag = None if oldest is None else version - oldest
        return {"lag_max": lag, **self._siblings[1].get(episode, {})}

    def _copy_end(
        self,
        journal: JournalReader,
        writer: sqlite3.Connection,
        end: Sequence[Any],
        ages: Counter[tuple[int, int]],
    ) -> int:
        """Copy one episode that has ended. Return its number of tokens.

        `end` is a row of `_ends`. The trained tokens of the episode are added to `ages`, by (tenth
        of the episode, lag).
        """
        episode = end[0]
        try:
            with journal.wrap_errors(f"episode {episode}"):
                pieces = journal.rows(PIECES, episode)
                values = measure_pieces(pieces) | add_outcome(writer, end)
                if values.get("step") is not None:
                    values |= self._training(journal, end, values["version_min"])
                    ages.update(count_ages([piece[2:4] for piece in pieces], end[-1]))
                text = self._searched_text(episode, pieces)
        except JournalError as error:
            values, text = {"outcome": "damaged", "note": str(error)[:2000]}, ""
        changes = ", ".join(f"{name} = ?" for name in values)
        writer.execute(
            f"UPDATE episodes SET {changes} WHERE episode = ?", (*values.values(), episode)
        )
        if text:
            writer.execute(ADD_WORDS, (episode, text))
        return int(values.get("tokens", 0))

    def _searched_text(self, episode: int, pieces: Sequence[Piece]) -> str:
        """Return the text of an episode for the full-text index.

        If no search was requested, return "" and note that the text is missing.
        """
        if self._decode is None:
            return ""
        if not self._wants_words:
            self._skipped.append(episode)
            return ""
        return text_of(pieces, self._decode)

    def _copy_words(self, journal: JournalReader) -> int:
        """Add a part of the missing texts to the full-text index. Return the number of episodes.

        If the text of an episode cannot be read, its row gets a note, and it has no text.
        """
        copied = tokens = 0
        with self.database.write() as writer:
            for episode in reversed(self._without_words[-CHUNK_EPISODES:]):
                copied += 1
                try:
                    with journal.wrap_errors(f"episode {episode}"):
                        pieces = journal.rows(PIECES, episode)
                        text = text_of(pieces, self._decode) if self._decode else ""
                except JournalError as error:
                    note = "UPDATE episodes SET note = ? WHERE episode = ?"
                    writer.execute(note, (str(error)[:2000], episode))
                    continue
                writer.execute(ADD_WORDS, (episode, text))
                tokens += sum(piece[2] for piece in pieces)
                if tokens >= CHUNK_TOKENS:
                    break
        del self._without_words[-copied:]
        return copied


def _ends(journal: JournalReader, open_: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    """Yield a row of the journal for each of the episodes `open_` that has ended: its end and
    training.
    """
    for start in range(0, len(open_), CHUNK_EPISODES):
        part = open_[start : start + CHUNK_EPISODES]
        marks = ", ".join("?" * len(part))
        yield from journal.rows(
            f"""SELECT e.episode, t.stop, t.rewards, t.facts, f.stage, f.error, r.reason,
                c.step, number, c.version FROM episodes e
            LEFT JOIN trajectories t USING (episode) LEFT JOIN failures f USING (episode)
            LEFT JOIN restarts r USING (episode) LEFT JOIN consumed c USING (number)
            WHERE e.episode IN ({marks}) AND
                coalesce(t.episode, f.episode, r.episode) IS NOT NULL ORDER BY e.episode""",
            *part,
        )


def _add_episode(writer: sqlite3.Connection, *row: Any) -> None:
    """Add an episode that has begun to the table of episodes, as open.

    A further attempt at an episode has the same seed. A branch (further conversation) has another.
    """
    episode, group, sibling, seed, role, env, split, task = row
    first = writer.execute(
        "SELECT seed FROM episodes WHERE group_number = ? AND sibling = ? ORDER BY episode LIMIT 1",
        (group, sibling),
    ).fetchone()
    is_branch = first is not None and first[0] != seed
    writer.execute(
        "INSERT INTO episodes (episode, group_number, sibling, task, role, outcome, seed, "
        "is_branch) VALUES (?, ?, ?, ?, ?, 'open', ?, ?)",
        (episode, group, sibling, f"{env}/{split}/{task}", role, seed, is_branch),
    )


def _copy_consumed(
    journal: JournalReader, writer: sqlite3.Connection, after: int
) -> list[_Consumed]:
    """Mark the episodes of all groups that were trained on in steps after `after` as trained.

    Return these groups in the order of the steps.
    """
    rows = journal.rows(
        "SELECT number, step, version FROM consumed WHERE step > ? ORDER BY step", after
    )
    for group, step, version in rows:
        waiting = writer.execute(
            "SELECT episode FROM episodes WHERE group_number = ? AND outcome = 'waiting'", (group,)
        ).fetchall()
        changed = writer.execute(
            "UPDATE episodes SET outcome = 'trained', step = ?, lag_max = ? - version_min "
            "WHERE group_number = ? AND outcome = 'waiting'",
            (step, version, group),
        )
        if changed.rowcount:
            add_ages_of(journal, writer, [episode for (episode,) in waiting], version)
            _add_training(journal, writer, group, step)
    return [_Consumed(*row) for row in rows]


def _add_training(
    journal: JournalReader, writer: sqlite3.Connection, group: int, step: int
) -> None:
    """Write the columns that describe training for all episodes of a group that was trained on in
    `step`.

    If the journal is damaged, write a note into their rows instead.
    """
    try:
        found = measure_group(journal, group, step)
    except JournalError as error:
        note = "UPDATE episodes SET note = ? WHERE group_number = ?"
        writer.execute(note, (str(error)[:2000], group))
        return
    for episode, values in found.items():
        changes = ", ".join(f"{name} = ?" for name in values)
        writer.execute(
            f"UPDATE episodes SET {changes} WHERE episode = ?", (*values.values(), episode)
        )


def _state(folder: Path) -> tuple[int, ...]:
    """Return numbers that change whenever the journal changes: inode, size and time of its two
    files.
    """
    state: list[int] = []
    for name in (JOURNAL, f"{JOURNAL}-wal"):
        try:
            status = os.lstat(folder / name)
            state += [status.st_ino, status.st_size, status.st_mtime_ns]
        except OSError:
            state += [0, 0, 0]
    return tuple(state)
