"""Tests of a command at a low priority: its session, exit codes, signals, and its end."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.waits import LIMIT_S, wait_until_gone
from unstale.cli.nice import NICENESS

AUTOGROUP = Path("/proc/self/autogroup")

pytestmark = pytest.mark.skipif(
    not AUTOGROUP.exists(), reason="this system has no sessions for the processor"
)

HEAD = """
import os, signal, sys, time
from pathlib import Path
from unstale.cli.nice import run_at_low_priority
"""
SLEEPER = f"""{HEAD}
def act():
    print(os.getpid(), flush=True)
    for _ in range(6_000):  # a signal just before a sleep is handled only after the sleep
        time.sleep(0.1)
sys.exit(run_at_low_priority(act))
"""


@contextmanager
def started(program: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program. It is killed at the end of the block if it has not ended."""
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_it_runs_in_a_session_of_its_own_with_the_low_priority() -> None:
    program = f"""{HEAD}
def act():
    group = Path("/proc/self/autogroup").read_text().split()[-1]
    print(os.nice(0), group, os.getsid(0) == os.getpid())
sys.exit(run_at_low_priority(act))
"""
    before = AUTOGROUP.read_text()
    with started(program) as process:
        output, _ = process.communicate(timeout=LIMIT_S)
    assert output.split() == [str(os.nice(0) + NICENESS), str(NICENESS), "True"]
    assert AUTOGROUP.read_text() == before


def test_the_exit_code_is_that_of_the_child() -> None:
    with started(f"{HEAD}\nsys.exit(run_at_low_priority(lambda: sys.exit(3)))") as process:
        process.communicate(timeout=LIMIT_S)
        assert process.returncode == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_child(number: signal.Signals) -> None:
    with started(SLEEPER) as process:
        assert process.stdout
        process.stdout.readline()
        process.send_signal(number)
        process.wait(LIMIT_S)
        assert process.returncode == 128 + number


def test_the_child_ends_with_its_parent() -> None:
    with started(SLEEPER) as process:
        assert process.stdout
        child = int(process.stdout.readline())
        process.kill()
        process.wait(LIMIT_S)
        wait_until_gone(child)
