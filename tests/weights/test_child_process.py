"""A busy child process still sends heartbeats and is distinguished from a frozen one."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.waits import wait_until_gone
from unstale.weights import child_process
from unstale.weights.child_process import Child, ChildFrozen, receive_options, start_early

_PROGRAM = """
import signal, socket, sys

def main(descriptor, options):
    with socket.socket(fileno=descriptor) as connection:
        while asked := connection.recv(1):
            if asked == b"q":
                connection.close()
                print("no way out", file=sys.stderr, flush=True)
                while True:
                    signal.pause()
            if asked == b"h":
                # A single call holds the interpreter: no other thread runs until it returns.
                sum(range(2 * 10**8))
            connection.sendall(asked)
"""

_TELL_PIDS = """
import subprocess
from unstale.weights.child_process import start_early
begin = subprocess.Popen
def counted(*arguments, **options):
    process = begin(*arguments, **options)
    print(process.pid, flush=True)
    return process
subprocess.Popen = counted
"""
"""The start of a program that prints the id of each process that it starts."""

Start = Callable[[], Child]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    (tmp_path / "echo_of_a_child.py").write_text(_PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(child_process, "FROZEN_S", 1.5)
    children: list[Child] = []

    def begin() -> Child:
        children.append(Child("echo", "echo_of_a_child", {}, threads=1))
        children[-1].sendall(b"a")
        assert children[-1].recv(1) == b"a"
        return children[-1]

    yield begin
    for child in children:
        child.kill()
        child.wait()


@contextmanager
def _stopped(child: Child) -> Iterator[None]:
    os.kill(child.pid, signal.SIGSTOP)
    yield
    os.kill(child.pid, signal.SIGCONT)


def test_a_busy_process_is_heard_and_a_stopped_one_is_killed(start: Start) -> None:
    child = start()
    child.sendall(b"h")
    assert child.recv(1) == b"h"
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(
        ChildFrozen, match=rf"the echo process \(pid {child.pid}\) did not answer for 2 s"
    ):
        child.recv(1)
    assert "signal 9" in child.last_words()


def test_what_a_stopped_process_does_not_read_is_not_waited_for(start: Start) -> None:
    child = start()
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(ChildFrozen):
        child.sendall(bytes(10**7))


def test_a_pause_in_which_nobody_looks_is_nobodys_fault(start: Start) -> None:
    child = start()
    with _stopped(child):
        time.sleep(2.0)
        child.check()
        child.check()
    child.sendall(b"b")
    assert child.recv(1) == b"b"


def test_the_end_of_a_process_is_an_empty_read(start: Start) -> None:
    child = start()
    os.kill(child.pid, signal.SIGKILL)
    assert child.recv(1) == b""
    assert "ended with signal 9" in child.last_words()
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        child.sendall(b"c")


def test_a_process_that_closes_its_socket_without_ending_is_killed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = start()
    child.sendall(b"q")
    assert child.recv(1) == b""
    monkeypatch.setattr(child_process, "_EXIT_S", 0.5)
    words = child.last_words()
    assert "closed its connection, did not end within 0.5 s and was killed:\nno way out" in words
    assert not _is_alive(child.pid)


@pytest.fixture
def pids(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the ids of the processes that are started from now on."""
    found: list[int] = []
    begin = subprocess.Popen

    def counted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = begin(*arguments, **options)
        found.append(process.pid)
        return process

    monkeypatch.setattr(subprocess, "Popen", counted)
    return found


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_process_that_was_started_early_is_used(start: Start, pids: list[int]) -> None:
    start_early("echo_of_a_child", threads=1)
    assert [start().pid, start().pid] == pids
    assert len(pids) == 2


def test_a_process_that_was_started_early_for_other_arguments_is_killed(
    start: Start, pids: list[int]
) -> None:
    start_early("echo_of_a_child", threads=2)
    child = start()
    early, other = pids
    assert child.pid == other
    assert not _is_alive(early)


def test_an_unused_process_ends_with_the_program_that_started_it(start: Start) -> None:
    program = f"{_TELL_PIDS}start_early('echo_of_a_child', threads=1)\n"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not _is_alive(int(done.stdout))


def test_a_process_whose_parent_was_killed_does_not_wait_for_options() -> None:
    parent, child = socket.socketpair()
    parent.close()
    with child:
        assert receive_options(child.fileno()) == ""


@pytest.mark.parametrize("begins", [True, False])
def test_a_process_that_still_imports_ends_when_its_parent_is_killed(
    begins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the parent is killed before the process has run its first line."""
    began = tmp_path / "began"
    (tmp_path / "slow_to_import.py").write_text(
        f"import time\nopen({str(began)!r}, 'w').close()\ntime.sleep(3600)\n"
    )
    program = (
        f"{_TELL_PIDS}import os, signal, time\n"
        "start_early('slow_to_import', threads=1)\n"
        f"while {begins} and not os.path.exists({str(began)!r}): time.sleep(0.01)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_until_gone(int(done.stdout))
