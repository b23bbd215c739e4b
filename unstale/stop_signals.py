"""Ctrl-C and SIGTERM: the first ends a run in order, the second ends the process at once.

A command also sends messages to the process that supervises it (`cli/supervisor.py`): heartbeats,
the beginning of a run, and the end. Without a supervisor, as in a notebook, nothing is sent.
"""

import asyncio
import builtins
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

from unstale.frames import show_frame

SHOW_CURSOR = "\x1b[?25h"
HIDE_CURSOR = "\x1b[?25l"
REPEAT_S = 0.2
"""Seconds after a signal during which further signals are ignored. Some programs send a signal to a
process and then to its process group.
"""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class SecondSignal(KeyboardInterrupt):
    """Error raised by the second Ctrl-C in a notebook or interactive Python, whose process
    continues.

    Code that turns errors of environments into failed episodes must not catch this error.
    """


HANG_S = 15.0
"""Seconds without a `beat` after which a process without a supervisor writes what its threads run
to a file. 0 turns this off: Python has only one such timer, which a host program may need.
"""
_hangs: IO[bytes] | None = None
_supervisor: tuple[int, int] | None = None
"""The id of this process, and the descriptor of the pipe to its supervisor. A forked process has
another id and sends nothing.
"""


def connect(pipe: int) -> None:
    """Send all later messages to the supervisor, through the pipe with this file descriptor.

    After this call, calls of `os._exit` and `os.kill` that may end this process are reported, too.
    """
    global _supervisor
    _supervisor = (os.getpid(), pipe)
    os.set_blocking(pipe, False)
    leave, kill = os._exit, os.kill

    def noted_exit(status: int) -> NoReturn:
        _send({"left": f"os._exit({status}) was called: {show_frame(sys._getframe(1))}"})
        leave(status)

    def noted_kill(pid: int, number: int, /) -> None:
        if number and pid == os.getpid():
            _send({"left": f"os.kill({pid}, {number}) was called: {show_frame(sys._getframe(1))}"})
        kill(pid, number)

    os._exit, os.kill = noted_exit, noted_kill


def _send(message: dict[str, Any] | None = None) -> None:
    """Send a message as a line of JSON. None is a heartbeat, which is an empty line.

    Nothing is sent without a supervisor, or if the pipe is full or closed.
    """
    if _supervisor and _supervisor[0] == os.getpid():
        with suppress(OSError):
            os.write(_supervisor[1], (json.dumps(message) if message else "").encode() + b"\n")


def beat(*, last: bool = False) -> None:
    """Send a heartbeat to the supervisor.

    It then expects another one within seconds, unless this is the `last`. Without a supervisor,
    restart the timer of `noted_hangs`, or stop it with `last`.
    """
    _send({"rests": True} if last else None)
    if last:
        faulthandler.cancel_dump_traceback_later()
    elif _hangs:
        faulthandler.dump_traceback_later(HANG_S, file=_hangs)


@contextmanager
def noted_hangs(path: Path) -> Iterator[None]:
    """Return a context that writes the stacks of all threads to a file if the process hangs.

    It hangs if `beat` is not called for `HANG_S` seconds. The cause is code that holds Python's
    global lock (GIL), such as a regular expression that backtracks without end. If the process does
    not hang, no file remains. Under a supervisor no file is written, because the supervisor reports
    the code.
    """
    global _hangs
    if _supervisor or _hangs or not HANG_S:
        yield
        return
    with path.open("ab", buffering=0) as _hangs:
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            _hangs = None
            if not path.stat().st_size:
                path.unlink()


def begin_run(folder: str, note: str, limit_s: float) -> None:
    """Notify the supervisor that a run begins.

    `folder` is the run folder. `note` is advice that the supervisor prints if it ends the run.
    `limit_s` is the number of seconds for which code may hold the GIL.
    """
    _send({"run": folder, "note": note, "limit_s": limit_s})


def note_end(code: int) -> None:
    """Notify the supervisor that this process is about to end with an exit code.

    The process must have printed the reason.
    """
    _send({"ended": code})


def end_process(code: int) -> NoReturn:
    """End this process at once with an exit code. The caller must have printed the reason."""
    note_end(code)
    os._exit(code)


class StopSignals:
    """The handler of a run's signals, and the asyncio task that the first signal cancels."""

    def __init__(self, note: str = "", on_end: Callable[[], None] = lambda: None) -> None:
        self.has_cancelled = False
        """True if a signal has cancelled the task of the latest `cancelling` context."""
        self._note = note
        self._on_end = on_end
        self._count = 0
        self._last = -REPEAT_S
        self._task: asyncio.Task[object] | None = None

    @contextmanager
    def cancelling(self) -> Iterator[None]:
        """Return a context in which the first signal cancels the current asyncio task."""
        self._task = asyncio.current_task()
        self.has_cancelled = False
        try:
            yield
        finally:
            self._task = None

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal.

        The first signal cancels the task, or raises KeyboardInterrupt if there is no task. The
        second ends the process, or raises `SecondSignal` in interactive Python. Python calls this
        between two instructions of the main thread.
        """
        now = time.monotonic()
        if now - self._last < REPEAT_S:
            return
        self._last = now
        self._count += 1
        if self._count > 1:
            self._end_at_once(number)
        if self._task is None or self._task.done():
            raise KeyboardInterrupt
        self.has_cancelled = True
        self._task.cancel()
        self._task.get_loop().call_soon_threadsafe(lambda: None)  # the loop may wait for sockets

    def _end_at_once(self, number: int) -> NoReturn:
        if hasattr(sys, "ps1") or hasattr(builtins, "__IPYTHON__"):
            raise SecondSignal
        cursor = SHOW_CURSOR if os.isatty(2) else ""
        text = f"\n{cursor}unstale: ended at once by a second signal{self._note}\n"
        with suppress(OSError):
            os.write(2, text.encode(errors="backslashreplace"))
            self._on_end()
        end_process(128 + number)


_active: StopSignals | None = None


def active() -> StopSignals:
    """Return the `StopSignals` of the current `stop_signals` context.

    Outside of such a context, and in another thread than the main one, return a new object that
    receives no signals.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return _active if _active and is_main else StopSignals()


@contextmanager
def stop_signals(note: str = "", on_end: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Return a context in which SIGTERM acts like Ctrl-C, and the second signal ends the process.

    `note`, such as the command to continue, is added to the message that the second signal prints.
    `on_end` is then called in the signal handler, before the process ends. Background jobs of a
    shell ignore Ctrl-C, but not in this context. A host program's own handler of Ctrl-C is kept. In
    another thread than the main one, and within another such context, nothing is changed.
    """
    global _active
    if threading.current_thread() is not threading.main_thread() or _active:
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    _active = StopSignals(note, on_end)
    if before[signal.SIGINT] in (signal.default_int_handler, signal.SIG_IGN):
        signal.signal(signal.SIGINT, _active.receive)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        _active = None
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def cursor_while_stopped(terminal: int) -> Iterator[None]:
    """Return a context in which Ctrl-Z shows the terminal's cursor, which a display has hidden.

    When the process continues, the cursor is hidden again. `terminal` is a file descriptor. Nothing
    is changed in another thread than the main one, or if the program handles Ctrl-Z itself.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTSTP) is not signal.SIG_DFL:
        yield
        return

    def stop(*_: object) -> None:
        os.write(terminal, SHOW_CURSOR.encode())
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)  # returns when the process goes on
        signal.signal(signal.SIGTSTP, stop)
        with suppress(OSError):  # the terminal may be gone
            os.write(terminal, HIDE_CURSOR.encode())

    signal.signal(signal.SIGTSTP, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
