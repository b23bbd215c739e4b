"""Run a command at a low priority, so that it hardly slows down training on the same machine."""

import ctypes
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

NICENESS = 10
"""Niceness of such a command. On a core with another busy process, it gets about 10% of the time.

With niceness 19, which gets 1.5%, a list of 60 runs took 7.6 s while three trainings kept two cores
busy. With 10 it took 0.9 s.
"""

_AUTOGROUP = Path("/proc/self/autogroup")
_PDEATHSIG = 1
_AWAITED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)


def run_at_low_priority(act: Callable[[], object]) -> int:
    """Call `act` at a low priority. Return the exit code of the process that called it.

    Linux divides the processor between sessions (terminals) first, and by niceness only within a
    session. So on Linux, `act` runs in a child process with a session of its own. This process
    passes signals on to the child, and the child ends with it. An error of `act` is raised in the
    child. Call this function before any thread is started.
    """
    if not _AUTOGROUP.exists():
        if hasattr(os, "nice"):
            os.nice(NICENESS)
        act()
        return 0
    parent = os.getpid()
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    child = os.fork()
    if child:
        return _wait_for(child, unblocked)
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
    os.setsid()
    with suppress(OSError):  # the system may forbid it, or allow few changes a second
        _AUTOGROUP.write_text(str(NICENESS))
    os.nice(NICENESS)
    act()
    return 0


def _wait_for(child: int, unblocked: Iterable[signal.Signals | int]) -> int:
    """Pass signals on to the child process until it ends. Return its exit code.

    Signals are blocked and waited for, because a handler could miss one that arrives just before
    the wait for the child. `unblocked` is the signal mask to be set at the end.
    """
    try:
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            number = signal.sigwait(_AWAITED)
            if number != signal.SIGCHLD:
                os.kill(child, number)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
