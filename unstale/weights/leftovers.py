"""Temporary folders that are removed even if the process that made them was killed.

A running process locks its folder. The folder of a killed process has no lock, so a later process
removes it.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

_LOCK = "lock"
_NEW_S = 3600.0
"""Age in seconds above which a folder without a lock file is removed. The process of a younger
folder may be about to lock it.
"""


def hold_lock(folder: Path) -> TextIO:
    """Lock a folder. The lock lasts until the returned file is closed."""
    lock = (folder / f"{_LOCK}.new").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    (folder / f"{_LOCK}.new").rename(folder / _LOCK)
    return lock


@contextmanager
def locked_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Return a context with a new temporary folder in `parent`, which is removed at the end.

    Its name begins with `prefix`. Folders of this prefix that killed processes left in `parent` are
    removed first.
    """
    remove_leftovers(parent, prefix)
    with (
        tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as folder,
        hold_lock(Path(folder)),
    ):
        yield Path(folder)


def remove_leftovers(parent: Path, prefix: str) -> None:
    """Remove this user's unlocked folders in `parent` whose names begin with `prefix`.

    A folder without a lock file is removed an hour after its last change.
    """
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            if folder.lstat().st_uid != os.getuid():
                continue
            if not (
                folder / _LOCK
            ).exists():  # its process was killed between making and locking it
                if time.time() - folder.lstat().st_mtime > _NEW_S:
                    shutil.rmtree(folder, ignore_errors=True)
                continue
            with (folder / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
