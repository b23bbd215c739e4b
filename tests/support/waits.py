"""Waits of tests for other processes and threads. Each has a limit and says what it waited for."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

LIMIT_S = 300.0
"""Longest wait in seconds. Processes start slowly on a busy machine."""
_TICK_S = 0.01
FROZEN_S = 60.0
"""Seconds in place of the package's few, so that no process of a busy machine counts as frozen."""


def wait_long_for_processes() -> None:
    """Raise the time limits of child processes and the journal's writer, so that only hung ones
    exceed them.
    """
    from unstale.durability.journal import writer
    from unstale.weights import child_process

    child_process.FROZEN_S = FROZEN_S
    writer.STUCK_S = FROZEN_S


def wait_until(claim: Callable[[], bool], what: str) -> None:
    """Wait until `claim` is true. Fails after `LIMIT_S`, and says that it waited for `what`."""
    until = time.monotonic() + LIMIT_S
    while not claim():
        assert time.monotonic() < until, f"waited {LIMIT_S:g} s for {what}"
        time.sleep(_TICK_S)


def wait_until_gone(pid: int) -> None:
    """Wait for the end of a process. A zombie, which nobody has waited for, has ended."""
    status = Path(f"/proc/{pid}/status")

    def is_gone() -> bool:
        try:
            return "State:\tZ" in status.read_text()
        except OSError:
            return True

    wait_until(is_gone, f"the end of process {pid}")


async def until(claim: Callable[[], bool], what: str) -> None:
    """Like `wait_until`, but the event loop continues meanwhile."""
    limit = time.monotonic() + LIMIT_S
    while not claim():
        assert time.monotonic() < limit, f"waited {LIMIT_S:g} s for {what}"
        await asyncio.sleep(_TICK_S)
