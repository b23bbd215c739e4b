"""Locks on temporary folders.

A killed process leaves its folder behind, without a lock. A later process removes it.
"""

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TextIO

_LOCK = "lock"


def hold_lock(folder: Path) -> TextIO:
    """Lock a folder until the returned file is closed."""
    lock = (folder / f"{_LOCK}.new").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    (folder / f"{_LOCK}.new").rename(folder / _LOCK)
    return lock


def remove_leftovers(parent: Path, prefix: str) -> None:
    """Remove this user's folders with such a name that no running process has locked."""
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            if folder.lstat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
