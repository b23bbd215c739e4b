"""Open the journal of a run, an SQLite database, without writing anything into its folder."""

import os
import stat
from pathlib import Path

from unstale.analysis.dashboard.folders import is_own_file
from unstale.durability.journal import JOURNAL, JournalReader

_SHAPE_OFFSET, _SHAPE_WAL = 18, 2
"""Position of the byte in the header of an SQLite file that shows if it has a write-ahead log, and
the byte's value if so.
"""


def open_journal(folder: Path) -> JournalReader:
    """Open the journal in a run folder for reading. The run may be active at the same time.

    Raises FileNotFoundError with the sentence of `unreadable`, and `JournalError` if the journal is
    damaged.
    """
    if problem := unreadable(folder):
        raise FileNotFoundError(problem)
    return JournalReader(folder / JOURNAL, leave_files=True)


def unreadable(folder: Path) -> str:
    """Return a sentence on why `open_journal` refuses the journal in a run folder, or "" if it
    opens it.
    """
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
    """Return a sentence on what a path is if it exists and is not a regular file. Otherwise return
    "".
    """
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return ""
    if stat.S_ISLNK(mode):
        return f"{path.name} is a link, and links are not followed"
    return "" if stat.S_ISREG(mode) else f"{path.name} is not a regular file, so it is not opened"
