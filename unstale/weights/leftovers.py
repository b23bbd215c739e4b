"""Temporary folders that are removed later if their process was killed.

A running process locks its folder. A killed process leaves the folder without a lock, and a later
process removes it.
"""

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TextIO

_LOCK = "lock"


def hold_lock(folder: Path) -> TextIO:
    """Lock a folder. The lock lasts until the returned file is closed."""
    lock = (folder / f"{_LOCK}.new").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    (folder / f"{_LOCK}.new").rename(folder / _LOCK)
    return lock


def remove_leftovers(parent: Path, prefix: str) -> None:
    """Remove this user's folders whose name begins with `prefix` and that no process has locked."""
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            if folder.lstat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
