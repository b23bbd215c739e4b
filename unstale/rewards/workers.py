"""Worker processes that grade replies with limits on CPU time and memory.

Some answers take hours to compare, and Python can interrupt neither arithmetic of large numbers nor
most libraries. So they run in processes, which the kernel ends.
"""

import atexit
import json
import os
import select
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, LifoQueue
from typing import Any

from unstale.envs import EnvError

CPU_S = 3.0
"""CPU seconds that grading one reply may take. An ordinary reply takes 0.01."""
WALL_S = 60.0
"""Seconds without an answer after which a worker is treated as frozen. Even on a busy machine, a
working one has used its `CPU_S` seconds of processor time by then and was ended for that.
"""
MEMORY_MB = 1024
"""Address space of a worker in MB. It uses 150 MB of it after its start."""
WORKERS = min(4, os.cpu_count() or 1)
"""Number of replies that one pool grades at the same time."""


class Worker:
    """A process of a program that reads a line of JSON for each task and prints lines of text."""

    is_closed = False

    def __init__(self, program: str) -> None:
        self._program = program
        source = Path(__file__).with_name(program).read_text("utf-8")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", source, str(CPU_S), str(MEMORY_MB)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,  # `select` sees all that is unread
        )

    def send(self, task: Any) -> None:
        """Send a task to the process. If it has ended, the next `line` is empty."""
        data = memoryview(json.dumps(task).encode() + b"\n")
        assert self._process.stdin
        with suppress(BrokenPipeError):  # the process has ended
            while data:
                data = data[self._process.stdin.write(data) :]

    def line(self) -> bytes:
        """Return the next line that the process prints, or an empty one if the process has ended.

        A process that has ended is closed. Raises `EnvError` if it does not answer within `WALL_S`
        seconds.
        """
        assert self._process.stdout
        line = b""
        try:
            if not select.select([self._process.stdout], [], [], WALL_S)[0]:
                raise EnvError(f"the process of {self._program} gave no answer for {WALL_S:g} s")
            line = self._process.stdout.readline().strip()
        finally:
            if not line:
                self.close()
        return line

    def close(self) -> None:
        """Kill the process."""
        self.is_closed = True
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                stream.close()


class WorkerPool:
    """A pool of at most `WORKERS` processes of one program, which are started when they are
    needed.
    """

    def __init__(self, program: str) -> None:
        self._program = program
        self._idle: LifoQueue[Worker | None]
        self.renew()
        _POOLS.add(self)

    @contextmanager
    def worker(self) -> Iterator[Worker]:
        """Wait for an idle process. Return a context in which it works on one task.

        If the context's body fails or closes the process, another one replaces it, because an
        unread answer would be taken for that of the next task.
        """
        worker, is_done = self._idle.get(), False
        try:
            worker = worker or Worker(self._program)
            yield worker
            is_done = True
        finally:
            if worker and not is_done:
                worker.close()
            self._idle.put(None if worker is None or worker.is_closed else worker)

    def renew(self) -> None:
        """Drop the processes without ending them.

        Called in a forked child, because they belong to the parent.
        """
        self._idle = LifoQueue()
        for _ in range(WORKERS):
            self._idle.put(None)

    def close(self) -> None:
        """Kill the idle processes.

        Busy ones end after their current task, because their input ends.
        """
        with suppress(Empty):
            while True:
                if worker := self._idle.get_nowait():
                    worker.close()


_POOLS: "weakref.WeakSet[WorkerPool]" = weakref.WeakSet()


@atexit.register
def _end() -> None:
    for pool in _POOLS:
        pool.close()


def _renew() -> None:
    for pool in _POOLS:
        pool.renew()


os.register_at_fork(after_in_child=_renew)
