"""Worker processes for environments, as the run sees them: send calls to them, end those that
fail.
"""

import asyncio
import fcntl
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from unstale.envs import EnvError
from unstale.envs.guard import OCCUPANCY, THREAD_S, Line
from unstale.frames import last_words, outcome
from unstale.isolation.wire import MAX_FRAME_BYTES, Row, read_line
from unstale.records import Task
from unstale.weights.child_process import Frames, frame

START_S = 120.0
"""Seconds within which a new worker process must have created its task set."""
SILENT_S = 12.0
"""Seconds without a message after which a worker process is ended. A watchdog in the worker ends it
earlier, if it can, with a message that names the environment that blocks.
"""
TICK_S = 1.0
"""Seconds between two checks that a worker process is alive and within its limits."""
MAX_THREADS = 512
MAX_DESCRIPTORS_SHARE = 0.75
"""Share of the allowed number of open files at which a worker process is replaced."""
_ABORT_S = 0.5
"""Seconds that a silent worker process has to print the line of code at which it hangs."""
_KILL_S = 2.0
"""Seconds for which the end of a process is awaited. The wait begins when the process closes its
socket, and again when it is killed.
"""
_OUTPUT_BYTES = 1 << 20
"""Size at which the file with the output of a worker process is emptied."""
_READ_BYTES = 1 << 18

_PROGRAM = """
import json, sys
options = json.loads(sys.argv[2])
sys.path[:] = options["path"]
from unstale.isolation.worker import main
main(int(sys.argv[1]), options)
"""
_WRONG = (ValueError, LookupError, TypeError, RecursionError, asyncio.InvalidStateError)
"""The kinds of errors that reading an invalid message may raise."""


class WorkerEnded(EnvError):
    """Error: the worker process in which an episode ran has ended."""


class EpisodeWorker(Protocol):
    """The interface of a worker process for environments. `Worker` describes the attributes."""

    ended: str
    retired: str
    suspects: set[str]
    num_episodes: int

    @property
    def is_ready(self) -> bool: ...

    async def ready(self) -> None: ...

    async def call(self, episode: int, method: str, task: Task, **fields: Any) -> Row: ...

    def release(self) -> None: ...

    def end(self, reason: str) -> None: ...


class PendingCall(NamedTuple):
    """A call of a method of an environment that is not answered yet."""

    answer: asyncio.Future[Row]
    method: str
    task: str


class Worker:
    """A worker process for environments, and the calls to it. Subclasses send and receive the
    messages.

    The function `on_end` is called once, when the process has ended.
    """

    _line_s = 0.5
    """Seconds to wait for the worker to report the line of code at which a call was cancelled."""

    def __init__(
        self, options: Row, memory_gb: float, on_end: Callable[[EpisodeWorker], None]
    ) -> None:
        """Start the process. Raises `OSError` if it cannot be started.

        `options` are for the program of the process. `memory_gb` is the size in GB at which it is
        replaced. It is ended at twice this size.
        """
        self.ended = ""
        """The reason why the process has ended. Empty while it runs."""
        self.retired = ""
        """The reason why the worker gets no new episodes. Empty if it may get some."""
        self.suspects: set[str] = set()
        """The tasks whose calls were running when the process ended, as one of them may be the
        cause.
        """
        self.num_episodes = 0
        self._memory_gb = memory_gb
        self._on_end = on_end
        self._calls: dict[int, PendingCall] = {}
        self._numbers = count()
        self._frames = Frames(MAX_FRAME_BYTES)
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._silent_s = 0.0
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        flags = fcntl.fcntl(self._output, fcntl.F_GETFL)
        fcntl.fcntl(self._output, fcntl.F_SETFL, flags | os.O_APPEND)
        self._socket, inner = socket.socketpair()
        with inner:
            try:
                self._process = _start(options, inner.fileno(), self._output.fileno())
            except OSError:
                self._socket.close()
                self._output.close()
                raise

    @property
    def is_ready(self) -> bool:
        """True once the process has created its task set or has ended, so that `ready` does not
        wait.
        """
        return self._ready.done()

    async def ready(self) -> None:
        """Wait until the worker has created its task set. Raises `WorkerEnded` if the process ends
        first.
        """
        await asyncio.shield(self._ready)  # for several episodes, of which one may be cancelled

    async def call(self, episode: int, method: str, task: Task, **fields: Any) -> Row:
        """Call a method of an environment in the worker, with the arguments `fields`. Return the
        answer.

        `episode` is the number of the environment's episode. Raises `WorkerEnded` if the process
        ends first.
        """
        if self.ended:
            raise WorkerEnded(self.ended)
        number = next(self._numbers)
        answer: asyncio.Future[Row] = self._loop.create_future()
        self._calls[number] = PendingCall(answer, method, task.key)
        row = {"op": "call", "call": number, "episode": episode, "method": method, **fields}
        self._send({**row, "task": [task.env, task.split, task.index]})
        try:
            return await answer
        except asyncio.CancelledError:
            if number in self._calls and (line := await self._cancel(number)):
                raise asyncio.CancelledError(Line(line)) from None
            raise

    async def _cancel(self, number: int) -> str:
        """Cancel a call. Return the line of user code that it was executing, or "" if that is
        unknown.
        """
        answer: asyncio.Future[Row] = self._loop.create_future()
        self._calls[number] = self._calls[number]._replace(answer=answer)
        try:
            self._send({"op": "cancel", "call": number})
            if self._line_s and not answer.done():
                await asyncio.wait((answer,), timeout=self._line_s)
        finally:
            self._calls.pop(number, None)
        with suppress(*_WRONG, WorkerEnded):
            return read_line(answer.result(), "line")
        return ""

    def release(self) -> None:
        """Record the end of one episode. A worker that is to be replaced ends with its last
        episode.
        """
        self.num_episodes -= 1
        self.check()

    def check(self) -> None:
        """End the worker if it has more than twice the allowed memory.

        Mark it as to be replaced if it has too much memory, too many threads or too many open
        files. A worker that is to be replaced ends when it has no episodes.
        """
        if self.ended:
            return
        if self._output.seek(0, os.SEEK_END) > _OUTPUT_BYTES:
            self._output.truncate(0)
        memory_gb, threads, descriptors = _usage(self._process.pid)
        limit = f"task.worker_memory_gb is {self._memory_gb:g}"
        if memory_gb > 2 * self._memory_gb:
            self.end(f"a worker process has {memory_gb:.1f} GB of memory{self._during()}; {limit}")
        elif memory_gb > self._memory_gb:
            self.retired = f"a worker process has {memory_gb:.1f} GB of memory; {limit}"
        elif threads > MAX_THREADS + self.num_episodes:
            self.retired = f"environments have left threads: a worker process has {threads}"
        elif descriptors > MAX_DESCRIPTORS_SHARE * resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
            self.retired = f"environments have left open files: a worker has {descriptors}"
        if self.retired and not self.num_episodes:
            self.end(self.retired)

    def end(self, reason: str, *, names_task: bool = False) -> None:
        """Kill the process and those that it started. Its calls fail with `reason`.

        With `names_task`, only tasks that `reason` names are suspected of the cause. The call waits
        for the killed process and blocks the event loop: usually some milliseconds, at most
        `_KILL_S` seconds.
        """
        if self.ended:
            return
        self.ended = reason
        tasks = {call.task for call in self._calls.values()}
        self.suspects = {task for task in tasks if task in reason} if names_task else tasks
        self._detach()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_S)
        self._socket.close()
        self._output.close()
        waiting: list[asyncio.Future[Any]] = [call.answer for call in self._calls.values()]
        for future in (*waiting, self._ready):
            if not future.done():
                future.set_exception(WorkerEnded(reason))
                future.exception()  # nothing may wait for it any more
        self._calls.clear()
        self._on_end(self)

    def _send(self, row: Row) -> None:
        raise NotImplementedError

    def _detach(self) -> None:
        """Stop reading from the worker's socket."""

    def _receive(self, data: bytes) -> None:
        """Handle the messages that `data` completes. If one is invalid, end the process."""
        if not data:
            self._died()
            return
        self._silent_s = 0.0
        try:
            for row, _ in self._frames.feed(data):
                if self.ended:
                    return
                self._handle(row)
        except _WRONG as error:
            self.end(f"a worker process sent a wrong message{self._during()}: {error}")

    def _handle(self, row: Row) -> None:
        match row["op"]:
            case "answer":
                call = self._calls.pop(row["call"], None)
                if call and not call.answer.done():  # it may be cancelled
                    call.answer.set_result(row)
            case "ready":
                self._ready.set_result(None)
            case "refused":
                self.end(f"a worker process cannot make the task set: {read_line(row, 'error')}")
            case "stuck":
                self.end(read_line(row, "error"), names_task=True)
            case "beat":
                pass
            case operation:
                raise ValueError(f"unknown message {operation!r}")

    def _died(self) -> None:
        """End a worker that has closed its socket. Its calls fail with an error that names the exit
        code.

        The event loop waits for the exit code: up to `_KILL_S` seconds if the process closed its
        socket without ending.
        """
        end = _wait_for_end(self._process.pid)
        if end is None:
            self.end(f"a worker process closed its connection{self._during()}")
            return
        how = outcome(end.si_status if end.si_code == os.CLD_EXITED else -end.si_status)
        self.end(f"a worker process ended with {how}{self._during()}{last_words(self._output)}")

    def _abort(self) -> None:
        """End a silent worker by SIGABRT. Python then prints the line of code that it was
        executing.
        """
        limit = SILENT_S if self._ready.done() else START_S
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGABRT)
        _wait_for_end(self._process.pid, _ABORT_S)
        self.end(
            f"a worker process gave no sign of life for {limit:.0f} s{self._during()}"
            f"{last_words(self._output)}"
        )

    def _is_silent(self) -> bool:
        """Count one more check without a message. Return True if the worker has been silent for too
        long.
        """
        self._silent_s += TICK_S
        return self._silent_s >= (SILENT_S if self._ready.done() else START_S)

    def _during(self) -> str:
        """Return words such as " during step of TASK" for a running call, or "" if none runs."""
        calls = [f"{call.method} of {call.task}" for call in self._calls.values()]
        others = f" and {len(calls) - 1} other calls" if calls[1:] else ""
        return f" during {calls[0]}{others}" if calls else ""


def _start(options: Row, descriptor: int, output: int) -> "subprocess.Popen[bytes]":
    """Start a worker process in a new session, so that the programs it starts can be killed with
    it.
    """
    options = {**options, "parent": os.getpid(), "path": [path or os.getcwd() for path in sys.path]}
    arguments = [str(descriptor), json.dumps(options)]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # unless the user sets others
    return subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", _PROGRAM, *arguments],
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        env={**threads, **os.environ},
    )


def _wait_for_end(pid: int, timeout_s: float = _KILL_S) -> os.waitid_result | None:
    """Wait for the end of a child process. Return its result, or None if it does not end in time.

    The process is not reaped, so no other process gets its number.
    """
    descriptor = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    try:
        if not poll.poll(timeout_s * 1000):
            return None
        return os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOWAIT)
    finally:
        os.close(descriptor)


def _usage(pid: int) -> tuple[float, int, int]:
    """Return the memory in GB, threads and open files of a process, or zeros if it has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        pages = int((folder / "statm").read_text().split()[1])
        threads = len(os.listdir(folder / "task"))
        descriptors = len(os.listdir(folder / "fd"))
    except (OSError, IndexError):
        return 0.0, 0, 0
    return pages * resource.getpagesize() / 2**30, threads, descriptors


class ConcurrentWorker(Worker):
    """A worker process whose messages the event loop reads while other work continues."""

    def __init__(
        self, options: Row, memory_gb: float, on_end: Callable[[EpisodeWorker], None]
    ) -> None:
        super().__init__({**options, "lockstep": False}, memory_gb, on_end)
        self._unsent = bytearray()
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._read)
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._receive(data)

    def _send(self, row: Row) -> None:
        if not self._unsent:
            self._loop.add_writer(self._socket, self._write)
        self._unsent += b"".join(frame(row))
        self._write()

    def _write(self) -> None:
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:  # the reader notices the end too, and has the reason
            self._unsent.clear()
        if not self._unsent:
            self._loop.remove_writer(self._socket)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK_S, self._tick)
        if self._is_silent():
            self._abort()
        else:
            self.check()

    def _detach(self) -> None:
        self._timer.cancel()
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)


class LockstepWorker(Worker):
    """A worker process of a deterministic run.

    The run's virtual clock does not advance until the worker has answered. The timers of the
    worker's environments are set on the run's event loop. So all timers of a run end in the same
    order as without worker processes.
    """

    _line_s = 0.0

    def __init__(
        self, options: Row, memory_gb: float, on_end: Callable[[EpisodeWorker], None]
    ) -> None:
        super().__init__({**options, "lockstep": True}, memory_gb, on_end)
        self._socket.settimeout(TICK_S)
        self._is_idle = True

    async def ready(self) -> None:
        with OCCUPANCY.waiting(START_S + SILENT_S):
            self._read_until(self._ready.done)
        await self._ready

    def _send(self, row: Row) -> None:
        with OCCUPANCY.waiting(START_S + THREAD_S + SILENT_S):
            self._read_until(self._ready.done)
            if self.ended:
                return
            self._is_idle = False
            self._send_all(b"".join(frame({**row, "now": self._loop.time()})))
            self._read_until(lambda: self._is_idle)

    def _send_all(self, data: bytes) -> None:
        """Send all bytes to the worker. It does not count as silent while it reads them."""
        unsent = memoryview(data)
        while unsent and not self.ended:
            try:
                unsent = unsent[self._socket.send(unsent) :]
                self._silent_s = 0.0
            except TimeoutError:
                if self._is_silent():
                    self._abort()
            except OSError:
                self._died()

    def _read_until(self, is_over: Callable[[], bool]) -> None:
        while not self.ended and not is_over():
            try:
                data = self._socket.recv(_READ_BYTES)
            except TimeoutError:
                if self._is_silent():
                    self._abort()
            except OSError:
                self._died()
            else:
                self._receive(data)

    def _handle(self, row: Row) -> None:
        if row["op"] != "idle":
            super()._handle(row)
            return
        self._is_idle = True
        for timer, when in row["timers"]:
            self._loop.call_at(when, self._fire, timer)

    def _fire(self, timer: int) -> None:
        if not self.ended:
            self._send({"op": "fire", "timer": timer})

    def _is_silent(self) -> bool:
        """Count one more check without a message. Return True if the worker has been silent for too
        long.

        Calls may take `THREAD_S` seconds longer than in other workers, because they may wait for
        threads.
        """
        self._silent_s += TICK_S
        return self._silent_s >= (SILENT_S + THREAD_S if self._ready.done() else START_S)
