"""Run a command at a low priority, so that it hardly slows down training on the same machine."""

import ctypes
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

NICENESS = 10
"""Niceness of a command at low priority. Beside a busy process, it gets about 10% of a core's time.

With niceness 19, which gets 1.5%, a list of 60 runs took 7.6 s while three trainings kept two cores
busy. With 10 it took 0.9 s.
"""

_AUTOGROUP = Path("/proc/self/autogroup")
_PDEATHSIG = 1
_AWAITED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)


def run_at_low_priority(act: Callable[[], object]) -> int:
    """Call `act` at a low priority. Return an exit code for the command: 0 if `act` returned.

    On Linux, `act` runs in a child process with a session of its own, because Linux applies
    niceness only within a session (a terminal). Signals to this process are passed on to the child.
    The child is ended when this process ends. If `act` raises an error, the child prints it, and
    the result is the child's exit code. Call this function before any thread is started.

    On other systems, `act` runs in this process, and its errors are raised here.
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
