"""Folders that a process holds by a lock, so that the next one of the same user removes what a killed one has left."""

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TextIO

_LOCK = "lock"


def hold(folder: Path) -> TextIO:
    """It is held for as long as this file is open."""
    lock = (folder / f"{_LOCK}.new").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    (folder / f"{_LOCK}.new").rename(folder / _LOCK)
    return lock


def sweep(parent: Path, prefix: str) -> None:
    """Remove the folders whose process is gone: the lock of a living one is taken."""
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            if folder.lstat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
