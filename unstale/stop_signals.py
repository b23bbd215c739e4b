"""Ctrl-C and SIGTERM: the first ends a run in order, the second ends it at once in any state."""

import asyncio
import builtins
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

_SHOW_CURSOR = "\x1b[?25h"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class SecondSignal(KeyboardInterrupt):
    """Raised by the second Ctrl-C in a notebook or interactive Python, whose process must live.

    Code that turns errors of environments into failed episodes must let it pass.
    """


class StopSignals:
    """The signals that a run has received, and the task that the first one cancels."""

    def __init__(self, note: str = "", on_end: Callable[[], None] = lambda: None) -> None:
        self.has_cancelled = False
        """True if the first signal has cancelled the task that ran."""
        self._note = note
        self._on_end = on_end
        self._count = 0
        self._task: asyncio.Task[object] | None = None

    @contextmanager
    def cancelling(self) -> Iterator[None]:
        """Let the first signal cancel the current task, as `asyncio.Runner` does, in a context."""
        self._task = asyncio.current_task()
        self.has_cancelled = False
        try:
            yield
        finally:
            self._task = None

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Act on a signal. Called between two instructions of the main thread."""
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
        cursor = _SHOW_CURSOR if os.isatty(2) else ""
        text = f"\n{cursor}unstale: ended at once by a second signal{self._note}\n"
        with suppress(OSError):
            os.write(2, text.encode(errors="backslashreplace"))
            self._on_end()
        os._exit(128 + number)


_active: StopSignals | None = None


def active() -> StopSignals:
    """Return the signals of the context that this thread is in. Without one, it receives none."""
    is_main = threading.current_thread() is threading.main_thread()
    return _active if _active and is_main else StopSignals()


@contextmanager
def stop_signals(note: str = "", on_end: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Return a context in which SIGTERM acts like Ctrl-C, and the second of them ends the process.

    `note` is added to the last line, such as the command to continue. `on_end` is called before the
    end at once, in the signal handler. A shell lets background jobs
    ignore Ctrl-C; in the context they do not. A host program's own handler of Ctrl-C stays. Only
    the main thread can set this. In another thread, or within such a context, nothing is changed.
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
