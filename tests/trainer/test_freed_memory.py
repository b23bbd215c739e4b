"""Freed memory goes back to the system when the process has grown."""

import platform
import subprocess
import sys
import time
import weakref

import pytest

from unstale.cli.process import rare_garbage_collection
from unstale.trainer.threads import FreedMemory

SCRIPT = """
from unstale.trainer.threads import FreedMemory, resident_pages
memory = FreedMemory()
memory.trim(now=False)
before = resident_pages()
blocks = [bytes(60_000) for _ in range(10 * before * 4096 // 600_000)]
kept, blocks = blocks[::100], None
grown = resident_pages()
memory.trim(now=False)
print(before, grown, resident_pages())
"""


@pytest.mark.costly
def test_a_process_that_has_grown_returns_freed_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    before, grown, after = map(int, done.stdout.split())
    assert grown > 1.5 * before, "the freed blocks must be held by the C library"
    assert after < 1.1 * before


class Circle:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.own = self


def test_old_reference_cycles_are_collected_at_checkpoints_and_each_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = FreedMemory()
    seconds = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])

    def is_freed(*, after_s: float, now: bool = False) -> bool:
        circle = weakref.ref(Circle())
        seconds[0] += after_s
        memory.trim(now=now)
        return circle() is None

    with rare_garbage_collection():
        assert is_freed(after_s=0.0)
        assert not is_freed(after_s=59.0)
        assert is_freed(after_s=1.0)
        assert is_freed(after_s=0.0, now=True)


THREADS = """
import ctypes, sys, threading
from unstale.cli.process import limit_threads
if sys.argv[1] == "limited":
    limit_threads()
begin = threading.Barrier(8)
held = []
def allocate():
    begin.wait()
    held.append([bytes(60_000) for _ in range(100)])
    begin.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
for each in threads: each.start()
for each in threads: each.join()
ctypes.CDLL(None).malloc_stats()
"""


@pytest.mark.costly
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_stats is of glibc")
def test_all_threads_of_a_run_share_two_heaps() -> None:
    def num_heaps(word: str) -> int:
        command = [sys.executable, "-c", THREADS, word]
        return subprocess.run(command, capture_output=True, text=True).stderr.count("Arena ")

    assert num_heaps("free") > 2
    assert num_heaps("limited") == 2
