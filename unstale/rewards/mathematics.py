"""A reward for mathematical answers, by the library math-verify.

The library limits its own time by signals, which work in a main thread only, and reward functions
run in other threads. So it runs in worker processes, without its limits. A worker that computes or
allocates too much is ended by the kernel.
"""

import atexit
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, LifoQueue
from typing import Any

from unstale.config import install
from unstale.envs import EnvError
from unstale.envs.numbers import with_plain_numbers

if find_spec("math_verify") is None:
    raise ImportError(f"it needs math-verify: {install('math')}")

CPU_S = 3.0
"""CPU seconds for one reply. An ordinary one takes 0.01."""
WALL_S = 60.0
"""Seconds without an answer after which a worker is treated as frozen. Even with many other
processes it has `CPU_S` of a core by then.
"""
MEMORY_MB = 1024
"""Address space of a worker. It uses 150 MB of it after its start."""
WORKERS = min(4, os.cpu_count() or 1)
"""Number of replies that are compared at the same time."""

_PROGRAM = Path(__file__).with_name("math_worker.py").read_text("utf-8")


def math_answer(reply: str, row: Mapping[str, Any]) -> float:
    r"""Return 1 if the reply's answer equals the `answer` of the task's row as mathematics, else 0.

    This is a reward function for the environment `dataset`. It needs the extra `math`. The answer
    is the last `\boxed{}` of the reply. If there is none, it is what follows "answer is", the last
    formula or the last number. `answer` is a number or LaTeX, with or without `$`; a text with
    `####`, as in GSM8K; or a solution with `\boxed{}`. Numbers are compared exactly if both are
    whole, otherwise to 6 decimals. A reply that takes more than `CPU_S` of CPU time gets 0. Raises
    ValueError if `answer` cannot be read.

    >>> math_answer(r"So it is \boxed{\frac{2}{4}}.", {"answer": "0.5"})
    1.0
    """
    expected = with_plain_numbers(str(row["answer"]))
    with _POOL.worker() as worker:
        return worker.compare(expected, with_plain_numbers(reply))


class _Worker:
    """A process of `math_worker.py`."""

    is_closed = False

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, str(CPU_S), str(MEMORY_MB)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,  # `select` sees all that is unread
        )

    def compare(self, expected: str, reply: str) -> float:
        """Return 1 if the two answers are equal, else 0, and 0 if the reply takes too much.

        Raises ValueError if the expected answer cannot be read, and `EnvError` if the process does
        not answer. A process that has ended is closed.
        """
        task = memoryview(json.dumps([expected, reply]).encode() + b"\n")
        assert self._process.stdin
        with suppress(BrokenPipeError):  # the process has ended
            while task:
                task = task[self._process.stdin.write(task) :]
        if self._line() != b"read":
            raise ValueError(f"the answer cannot be read as mathematics: {expected[:200]!r}")
        return float(self._line() == b"1")

    def _line(self) -> bytes:
        """Return the next line that the process prints, or nothing if it ends."""
        assert self._process.stdout
        line = b""
        try:
            if not select.select([self._process.stdout], [], [], WALL_S)[0]:
                raise EnvError(f"the process of math-verify gave no answer for {WALL_S:g} s")
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


class _Pool:
    """At most `WORKERS` processes. They start when they are needed, and stay."""

    def __init__(self) -> None:
        self._idle: LifoQueue[_Worker | None] = LifoQueue()
        for _ in range(WORKERS):
            self._idle.put(None)

    @contextmanager
    def worker(self) -> Iterator[_Worker]:
        """Lend a process, once one is idle. If its user closes it, another one replaces it."""
        worker = self._idle.get()
        try:
            worker = worker or _Worker()
            yield worker
        finally:
            self._idle.put(None if worker is None or worker.is_closed else worker)

    def close(self) -> None:
        """Kill the idle processes. The others end with their task, as their input ends then."""
        with suppress(Empty):
            while True:
                if worker := self._idle.get_nowait():
                    worker.close()


_POOL = _Pool()


@atexit.register
def _end() -> None:
    _POOL.close()


def _renew() -> None:
    """Leave the processes to the parent, after a fork."""
    global _POOL
    _POOL = _Pool()


os.register_at_fork(after_in_child=_renew)
