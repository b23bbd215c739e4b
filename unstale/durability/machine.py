"""Text about the machine and the code for result tables, and the lock of a folder."""

import fcntl
import platform
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path

from unstale.config import ConfigError
from unstale.weights.child_process import cores

LOCK_S = 1.0
"""Seconds to wait for a lock, because a killed command keeps its lock for a moment."""


def machine() -> str:
    """Return the machine's number of cores and its processor, as `2 cores of <CPU name>`."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{cores()} cores of {names[0] if names else platform.machine()}"


def versions() -> str:
    """Return a text with the installed versions of Python, torch and transformers."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return f"Python {platform.python_version()}, {packages}"


def commit() -> str:
    """Return the git commit of unstale's code, with `-dirty` if files were changed.

    Empty if the code is not in a repository.
    """
    describe = ["describe", "--always", "--dirty", "--exclude=*"]
    try:
        git = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *describe],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return git.stdout.strip()


def _lock(file: int) -> None:
    until = time.monotonic() + LOCK_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


@contextmanager
def lock_folder(folder: Path) -> Iterator[int]:
    """Return a context in which this process has locked a folder. Its value is a file descriptor.

    Processes that inherit the descriptor share the lock. Raises `ConfigError` if another process
    has locked the folder, or if it cannot be locked.
    """
    with ExitStack() as until_unlocked:
        try:
            file = until_unlocked.enter_context((folder / ".lock").open("a"))
            _lock(file.fileno())
        except BlockingIOError:
            raise ConfigError(f"{folder} is in use by another running process") from None
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot be locked: {error}. The folder must be writable, on a file "
                "system that supports locks"
            ) from error
        yield file.fileno()
