"""Supervise a command from another process, which ends the command if nothing else can.

The command runs in a child process. User code may hold Python's interpreter lock there without end,
for example in a regular expression. Python then runs no signal handler and no time limit. User code
may also end the child without a message. The supervisor itself runs no user code.
"""

import ctypes
import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from unstale.cli.failures import print_failure
from unstale.durability.run_folder import EVENTS, RunFolder, RunLog
from unstale.frames import lines_of_dump
from unstale.stop_signals import REPEAT_S, SHOW_CURSOR, connect

SUPERVISED = ("eval", "probe-distillation", "serve", "train")
"""Names of the commands that run user code, such as environments."""
GRACE_S = 3.0
"""Seconds that the child process has to end by itself after a second signal."""
SILENT_S = 15.0
"""Seconds without a message from the child after which a warning names the user code that it
runs.
"""
LIMIT_S = 60.0
"""Seconds without a message from the child after which the supervisor ends it, unless the run sets
another limit. A child that works is silent for at most a second.
"""
ANSWER_S = 3.0
"""If the child has sent no message for this many seconds, the supervisor itself answers the first
signal, such as Ctrl-C.
"""
TICK_S = 1.0
_DUMP_S = 0.5
"""Seconds that the child has to write the stacks of its threads."""
_MAX_DUMP = 1 << 18
_MAX_LINES = 3
_DUMP = signal.SIGRTMAX - 2
"""The signal on which the child writes the stacks of its threads. It is used for nothing else."""
_AWAITED = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
_PDEATHSIG = 1
_LOCKED = (
    "Nothing else in the run moves, because it holds Python's global lock, as a regular expression "
    "does that backtracks without end"
)


def supervise() -> int | None:
    """Fork this process. The child returns None, and the parent supervises it and returns its exit
    code.

    The parent returns when the child has ended. Call this before threads are started. Under a
    debugger, and on other systems than Linux, nothing is forked and None is returned.
    """
    if sys.platform != "linux" or sys.gettrace():
        return None
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    dump = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115 - the child writes to it
    pipe, inner = os.pipe()
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    child = os.fork()
    if child:
        os.close(inner)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # a signal that is ignored cannot be awaited
        return _Supervisor(child, pipe, dump).wait()
    os.close(pipe)
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    faulthandler.enable(dump)
    faulthandler.register(_DUMP, dump)
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    connect(inner)
    return None


class _Supervisor:
    """The parent of a child process, to which it passes signals, and which it may end."""

    def __init__(self, child: int, pipe: int, dump: IO[bytes]) -> None:
        self._child = child
        self._pipe = pipe
        self._dump = dump
        os.set_blocking(pipe, False)
        self._unread = b""
        self._facts: dict[str, str | int | float] = {}
        """The content of the child's last message of each kind, by the kind."""
        self._verdict: tuple[str, str, int] | None = None
        """The cause for which the supervisor has ended the child: a reason for the event log, a
        text for the user, and an exit code. None if it has not ended the child.
        """
        self._num_signals = 0
        self._last_signal = -REPEAT_S
        self._deadline = float("inf")
        self._is_watching = False
        self._silent_s = 0.0
        self._has_answered = False
        """True if the supervisor has answered a signal because the child did not."""

    def wait(self) -> int:
        """Pass signals to the child and read its messages until it ends. Return the exit code."""
        since = time.monotonic()
        while True:
            info = signal.sigtimedwait(_AWAITED, TICK_S)
            if info and info.si_signo != signal.SIGCHLD:
                self._receive(info)
            self._read()
            ended, status = os.waitpid(self._child, os.WNOHANG)
            if ended:
                self._read()
                return self._conclude(os.waitstatus_to_exitcode(status))
            now = time.monotonic()
            if self._is_watching and not self._is_stopped():
                self._silent_s += min(now - since, TICK_S)  # this process may have been stopped
            since = now
            if self._verdict is None:
                self._check()

    def _receive(self, info: signal.struct_siginfo) -> None:
        """Count a signal.

        Pass it to the child, unless the terminal has sent it to both processes.
        """
        if info.si_code <= 0:
            os.kill(self._child, info.si_signo)
        now = time.monotonic()
        if now - self._last_signal < REPEAT_S:
            return
        self._last_signal = now
        self._num_signals += 1
        if self._num_signals > 1:
            self._deadline = now + (GRACE_S if self._num_signals == 2 else 0)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while data := os.read(self._pipe, 1 << 16):
                self._silent_s = 0.0
                *lines, self._unread = (self._unread + data).split(b"\n")
                for line in lines:
                    self._facts.update(json.loads(line or b"{}"))
                    rests = self._facts.pop("rests", False)
                    self._is_watching = not line or (self._is_watching and not rests)

    def _is_stopped(self) -> bool:
        """Return True while the child is paused by a signal, such as that of Ctrl-Z."""
        with suppress(OSError):
            state = Path(f"/proc/{self._child}/stat").read_bytes().rpartition(b") ")[2][:1]
            return state in (b"T", b"t")
        return False

    def _check(self) -> None:
        limit_s = float(self._facts.get("limit_s", LIMIT_S))
        if time.monotonic() >= self._deadline:
            text = "ended at once by a second signal, to which it did not react"
            self._end("Ctrl-C", f"{text}{self._standing()}", 128 + signal.SIGINT)
        elif self._silent_s >= limit_s:
            text = f"code blocked the process for {self._silent_s:.0f} s{self._standing()}. "
            self._end("failed", f"{text}{_LOCKED}", 1)
        elif self._num_signals == 1 and self._silent_s > ANSWER_S and not self._has_answered:
            self._has_answered = True
            text = f"the run does not react: code has blocked it{self._standing()}. "
            print_failure("warning", f"{text}{_LOCKED}. A second signal ends it")
        elif SILENT_S <= self._silent_s < SILENT_S + TICK_S and limit_s > SILENT_S + TICK_S:
            text = f"code has blocked the process for {self._silent_s:.0f} s{self._standing()}. "
            print_failure("warning", f"{text}{_LOCKED}. It is ended after {limit_s:.0f} s")

    def _end(self, reason: str, text: str, code: int) -> None:
        self._verdict = reason, text, code
        os.kill(self._child, signal.SIGKILL)

    def _standing(self) -> str:
        """Return the lines of user code at which the child's threads are. Empty if not known."""
        self._dump.truncate(0)
        os.kill(self._child, _DUMP)
        time.sleep(_DUMP_S)
        return self._lines()

    def _lines(self) -> str:
        self._dump.seek(0)
        lines = lines_of_dump(self._dump.read(_MAX_DUMP).decode(errors="replace"))
        return f": {'; '.join(lines[:_MAX_LINES])}" if lines else ""

    def _conclude(self, code: int) -> int:
        """Return the exit code, given the child's own.

        If the child has not reported how it ended, this is printed and written to the run folder.
        """
        if self._verdict is None and "ended" in self._facts:
            return int(self._facts["ended"])
        if self._verdict is None and self._num_signals and -code in _AWAITED:
            return 128 - code
        reason, text, shown = self._verdict or ("failed", self._cause(code), 128 - code)
        if code >= 0:
            shown = code or 1
        if os.isatty(2):
            os.write(2, SHOW_CURSOR.encode())
        run = str(self._facts.get("run", ""))
        text += f"; {self._facts['note']}" if run else ""
        print_failure("the run failed" if run and reason == "failed" else "unstale", text)
        if run:
            with suppress(OSError):
                _write_end(Path(run), reason, text)
        return shown

    def _cause(self, code: int) -> str:
        """Return a text on how the child ended without a report.

        `code` is its exit code, or the negative number of the signal that ended it.
        """
        if code >= 0:
            how = f"ended with exit code {code} before the command had finished"
        else:
            how = f"was ended by signal {-code} ({_signal_name(-code)})"
        if left := self._facts.get("left"):
            return f"the process {how}: {left}"
        if code == -signal.SIGKILL:
            how += ", perhaps because memory was used up: `dmesg` says so"
        elif code >= 0:
            how += ", perhaps by code of the task"
        return f"the process {how}{self._lines() if code < 0 else ''}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _write_end(folder: Path, reason: str, text: str) -> None:
    """Write how a run ended into its event log, unless the run has done so itself."""
    events = list(RunFolder(folder).rows(EVENTS))
    if events and events[-1].get("kind") == "stopped":
        return
    log = RunLog(folder)
    if reason == "failed":
        log.failed(text)
    last = max((float(row.get("time", 0.0)) for row in events), default=0.0)
    log.write_last_event("stopped", reason=reason, detail=text, time=last)
