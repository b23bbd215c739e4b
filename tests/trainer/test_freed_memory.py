"""Freed memory goes back to the system when the process has grown."""

import subprocess
import sys

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


def test_a_process_that_has_grown_returns_freed_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    before, grown, after = map(int, done.stdout.split())
    assert grown > 1.5 * before, "the freed blocks must be held by the C library"
    assert after < 1.1 * before
