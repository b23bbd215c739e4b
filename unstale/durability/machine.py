"""On what something was run: what a table of results says of itself."""

import fcntl
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from unstale.config import ConfigError
from unstale.weights.child_process import cores


def machine() -> str:
    """`2 cores of <processor>`."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{cores()} cores of {names[0] if names else platform.machine()}"


def versions() -> str:
    """Of Python and of what the figures depend on."""
    return f"Python {platform.python_version()}, torch {version('torch')}, transformers {version('transformers')}"


def commit() -> str:
    """Of the code that runs, `-dirty` if it was changed since; empty outside a repository."""
    try:
        told = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return ""
    return told.stdout.strip()


@contextmanager
def lock_folder(folder: Path) -> Iterator[int]:
    """The folder for oneself, and for the processes that inherit the descriptor. ConfigError if it is somebody's."""
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder} is in use by another process that is still alive"
            ) from None
        yield file.fileno()
