"""On what something was run: what a table of results says of itself."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

LIBRARIES = ("torch", "transformers")


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> str:
    """`2 cores of <processor>`."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{cores()} cores of {names[0] if names else platform.machine()}"


def versions() -> str:
    """Of Python and of what the figures depend on."""
    return f"Python {platform.python_version()}, " + ", ".join(f"{name} {version(name)}" for name in LIBRARIES)


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
