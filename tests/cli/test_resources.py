"""A run that finds too few descriptors, threads or memory ends with one line, not a traceback."""

import errno
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from unstale.builders import sampling
from unstale.cli import main
from unstale.cli.failures import exhausted

ROOT = Path(__file__).parents[2]
FEW_THREADS = """
import sys, threading
start = getattr(threading, "_start_joinable_thread", None) or threading._start_new_thread
left = int(sys.argv.pop(1))

def limited(*arguments, **options):
    global left
    left -= 1
    if left < 0:
        raise RuntimeError("can't start new thread")
    return start(*arguments, **options)

threading._start_new_thread = threading._start_joinable_thread = limited
from unstale.cli.main import main
main()
"""
"""A program that starts a command, and no more threads than its first argument says."""
SHORT = ["--max_steps=1", "--minutes=0", "--eval.tasks=0", "--task.latency_s=0"]
SHORT += ["--schedule.groups_per_step=2", "--schedule.group_size=2"]


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12))


@pytest.mark.costly(cases=0)
@pytest.mark.parametrize(
    ("program", "limit", "says"),
    [
        (["-m", "unstale"], few_files, "no more files can be opened: the limit is 12"),
        (["-c", FEW_THREADS, "3"], None, "no new thread or process can be started"),
    ],
)
def test_a_run_without_descriptors_or_threads_is_one_line(
    tmp_path: Path, program: list[str], limit: object, says: str
) -> None:
    done = subprocess.run(
        [sys.executable, *program, "train", "retail", *SHORT, "--runs", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=limit,  # type: ignore[arg-type]
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "no more files can be opened"),
        (ImportError("libx.so: cannot open shared object: Too many open files"), "`ulimit -n"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory is used up"),
        (MemoryError(), "memory is used up"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "memory is used up"),
        (SystemError("error return without exception set"), "memory is used up"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "no new thread or"),
        (RuntimeError("can't start new thread"), "no new thread or"),
    ],
)
def test_an_exhausted_resource_at_the_start_is_one_line(
    error: Exception,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(sampling, "load_policy", fail)
    with pytest.raises(SystemExit) as end:
        main.main(["train", "retail"])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert end.value.code == 1 and says in line
    assert line.startswith("the system has too few resources: ")


def test_a_socket_without_data_is_no_lack_of_threads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        with pytest.raises(BlockingIOError) as refused:
            server.accept()
    assert refused.value.errno == errno.EAGAIN and exhausted(refused.value) == ""


def test_another_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a mistake in the code")

    monkeypatch.setattr(sampling, "load_policy", fail)
    with pytest.raises(RuntimeError, match="a mistake in the code"):
        main.main(["train", "retail"])
