"""A thread that keeps the indexes (databases of copied data) of runs up to date."""

import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from unstale.analysis.dashboard.folders import RunFolders, UnknownRun
from unstale.analysis.dashboard.index import RunIndex

POLL_S = 1.0
"""Seconds between two checks of the run folders for new data."""

SEARCH_S = 5.0
"""Seconds between two searches for new run folders."""

JOURNAL_S = 5.0
"""Seconds between two readings of a journal that was read to its end, and so between two updates of
pages with episodes.
"""

WATCHED_S = 60.0
"""Seconds for which the journal of a run is read after a request for the run's episodes."""

SLICE_S = 0.5
"""Seconds for which one run is read before it is the next run's turn."""

FAILURES = (
    sqlite3.Error,
    OSError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    RuntimeError,
)
"""Errors that damaged or unexpected content of a run folder can cause."""


class Indexer:
    """The indexes of all runs in a folder. They are in a temporary folder that is removed at the
    end.

    A thread reads new metrics and events of every run. It reads the journal of a run only while the
    run's episodes are requested. It only counts the episodes if the run's page is requested without
    them. The thread runs while the indexer is used as a context manager.
    """

    def __init__(self, folders: RunFolders, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.folders = folders
        self.problem = ""
        """Sentences on why some runs are not shown. Empty if all are shown."""
        self._clock = clock
        self._indexes: dict[str, RunIndex] = {}
        self._asked: dict[str, float] = {}
        """Name of a run -> time of the last request for its episodes."""
        self._shown: dict[str, float] = {}
        """Name of a run -> time of the last request for its page."""
        self._read_at: dict[str, float] = {}
        """Name of a run -> time at which its journal was last read."""
        self._searched = -SEARCH_S
        self._made = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="unstale-dashboard-")
        self._thread = threading.Thread(target=self._work, name="unstale-dashboard-index")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        for index in self._indexes.values():
            index.close()
        self._folder.cleanup()

    def get(self, name: str, *, journal: bool = True, count: bool = False) -> RunIndex:
        """Return the index of a run. It may not be filled yet.

        With `journal`, the run's episodes are copied for the next `WATCHED_S` seconds. With
        `count`, they are counted for as long. Raises `UnknownRun` if there is no such run.
        """
        path = self.folders.path(name)
        with self._lock:
            index = self._indexes.get(name)
            if index is None:
                index = RunIndex(path, Path(self._folder.name) / f"{self._made}.sqlite")
                self._indexes[name] = index
                self._made += 1
        now = self._clock()
        if journal:
            if now - self._asked.get(name, -WATCHED_S) >= WATCHED_S:
                index.look_again()
                self._read_at.pop(name, None)
                self._wake.set()
            self._asked[name] = now
        if count:
            self._shown[name] = now
        return index

    def want_words(self, index: RunIndex) -> None:
        """Request the full-text index of a run's conversations, and wake the thread to fill it."""
        index.want_words()
        if index.lacks_words:
            self._wake.set()

    def known(self) -> dict[str, RunIndex]:
        """Return the indexes of all runs that were found so far, by name."""
        with self._lock:
            return dict(self._indexes)

    def _work(self) -> None:
        while not self._stopped:
            self._wake.clear()
            if not self._update():
                self._wake.wait(POLL_S)

    def _update(self) -> bool:
        """Read new data of every run, each for a limited time. Return True if any run has more to
        read.
        """
        now = self._clock()
        if now - self._searched >= SEARCH_S:
            self._searched, names = now, self.folders.names()
            problems = [self.folders.problem]
            for name in sorted({*names, *self.known()}):
                try:
                    self.get(name, journal=False)
                except UnknownRun:
                    self._forget(name)
                except (sqlite3.Error, OSError) as error:
                    problems.append(f"{name} cannot be read: {error}")
            self.problem = "; ".join(filter(None, problems))
        more = False
        for name, index in self.known().items():
            if self._stopped:
                return False
            more |= self._for_a_while(index, index.update_files)
            more |= self._read_journal(name, index)
            index.database.close_writer()  # many runs may have more rows than descriptors
        return more

    def _is_looked_at(self, name: str) -> bool:
        last = max(self._asked.get(name, -WATCHED_S), self._shown.get(name, -WATCHED_S))
        return self._clock() - last < WATCHED_S

    def _read_journal(self, name: str, index: RunIndex) -> bool:
        """Copy or count the episodes of a run if its episodes or page were requested lately.

        Return True if there is more to copy. A journal that was read to its end is not opened again
        for `JOURNAL_S` seconds, because opening it takes some milliseconds.
        """
        now = self._clock()
        if not self._is_looked_at(name):
            return False
        is_followed = now - self._asked.get(name, -WATCHED_S) < WATCHED_S
        is_due = now - self._read_at.get(name, -JOURNAL_S) >= JOURNAL_S
        if not is_due and (index.is_idle or not is_followed):
            return False
        self._read_at[name] = now
        if is_followed:
            return self._for_a_while(index, index.update_journal)

        def count() -> bool:
            index.count_episodes()
            return False

        return self._for_a_while(index, count)

    def _forget(self, name: str) -> None:
        with self._lock:
            index = self._indexes.pop(name, None)
        if index is not None:
            index.close()
            index.database.path.unlink(missing_ok=True)

    def _for_a_while(self, index: RunIndex, update: Callable[[], bool]) -> bool:
        """Call `update` again and again until it returns False or `SLICE_S` seconds are over.

        Return True if the time was over. If a call fails, for example on a full disk, the index is
        not updated any more, and its `failure` has the reason.
        """
        end = self._clock() + SLICE_S
        while not self._stopped and not index.failure:
            try:
                if not update():
                    return False
            except FAILURES as error:
                text = str(error) if isinstance(error, sqlite3.Error) else repr(error)
                index.failure = f"the index {index.database.path} failed: {text}; start again"
                index.changes += 1
                return False
            if self._clock() >= end:
                return True
        return False
