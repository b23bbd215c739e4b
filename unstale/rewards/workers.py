"""Worker processes that grade replies, with limits on CPU time and memory.

Some answers take hours to compare. Python can interrupt neither arithmetic of large numbers nor
most libraries, but the kernel can end a process.
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
"""CPU seconds that a worker may take for one reply. An ordinary reply takes 0.01."""
WALL_S = 60.0
"""Seconds without an answer after which a worker counts as frozen. Even on a busy machine, a worker
that computes has used up `CPU_S` by then, and the kernel has ended it.
"""
MEMORY_MB = 1024
"""Largest address space of a worker in MB. After its start, it uses 150 MB."""
WORKERS = min(4, os.cpu_count() or 1)
"""Largest number of replies that one pool grades at the same time."""


class Worker:
    """A process that reads a line of JSON for each task and prints lines of text.

    `program` is the name of its source file in this folder.
    """

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
        """Send a task to the process. If the process has ended, the next `line` is empty."""
        data = memoryview(json.dumps(task).encode() + b"\n")
        assert self._process.stdin
        with suppress(BrokenPipeError):  # the process has ended
            while data:
                data = data[self._process.stdin.write(data) :]

    def line(self) -> bytes:
        """Return the next line that the process prints. Empty if the process has ended, which
        closes this.

        Raises `EnvError` if the process prints nothing for `WALL_S` seconds.
        """
        assert self._process.stdout
        line = b""
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        try:
            if not poll.poll(WALL_S * 1000):
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
    """A pool of at most `WORKERS` processes of one program, which are started when needed."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._idle: LifoQueue[Worker | None]
        self.renew()
        _POOLS.add(self)

    @contextmanager
    def worker(self) -> Iterator[Worker]:
        """Wait for an idle process. Return a context in which it works on one task.

        If the context's body fails or closes the process, the process is replaced, because the next
        task could otherwise read its old answer.
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
        """Forget the processes without ending them. A forked child calls this, as its parent owns
        them.
        """
        self._idle = LifoQueue()
        for _ in range(WORKERS):
            self._idle.put(None)

    def close(self) -> None:
        """Kill the idle processes. Busy ones end after their current task, because their input
        ends.
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
