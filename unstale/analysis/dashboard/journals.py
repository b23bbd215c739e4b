"""Open the journal of a run without writing anything into its folder."""

import os
import stat
from pathlib import Path

from unstale.analysis.dashboard.folders import is_own_file
from unstale.durability.journal import JOURNAL, JournalReader

_SHAPE_OFFSET, _SHAPE_WAL = 18, 2
"""Where the header of a database has its format, and that of one with a write-ahead log."""


def open_journal(folder: Path) -> JournalReader:
    """Open a journal for reading. The run may still be active.

    Raises `JournalError`, and FileNotFoundError with the sentence of `unreadable`.
    """
    if problem := unreadable(folder):
        raise FileNotFoundError(problem)
    return JournalReader(folder / JOURNAL, leave_files=True)


def unreadable(folder: Path) -> str:
    """Return why a journal is not opened, as a sentence. Empty if it can be."""
    path = folder / JOURNAL
    if not is_own_file(path):
        return _strange(path) or f"{JOURNAL} is missing, so there are no episodes"
    beside = [folder / f"{JOURNAL}{suffix}" for suffix in ("-wal", "-shm", "-journal")]
    if problem := next(filter(None, map(_strange, beside)), ""):
        return problem
    wal, shm, unfinished = (each.exists() for each in beside)
    if unfinished:
        return (
            f"{JOURNAL} has an unfinished transaction of a killed writer; "
            "`unstale journal` undoes it, which the dashboard may not"
        )
    with path.open("rb") as file:
        header = file.read(_SHAPE_OFFSET + 1)
    if header[_SHAPE_OFFSET:] == bytes([_SHAPE_WAL]) and not (wal and shm):
        return (
            f"{JOURNAL} is a copy without all files of its log; `unstale journal` creates the "
            "missing ones, which the dashboard may not"
        )
    return ""


def _strange(path: Path) -> str:
    """Return what a path is, as a sentence, if there is something that is no regular file."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return ""
    if stat.S_ISLNK(mode):
        return f"{path.name} is a link, and links are not followed"
    return "" if stat.S_ISREG(mode) else f"{path.name} is not a regular file, so it is not opened"
