"""Commands, programs and child processes that are forked from one that has imported the package.

The imports of torch and transformers take seconds of CPU time; a fork takes none. Otherwise the
process is as any other: with its arguments, folder, environment, output, signals and exit code.
"""

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import IO, Any, NamedTuple

from tests.support.waits import wait_long_for_processes
from unstale.cli.main import main
from unstale.weights import child_process

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "unstale.cli.main",
        "unstale.cli.session",
        "unstale.testing",
        "unstale.model.sharding",
        "unstale.engines.embedded.worker",
        "unstale.engines.embedded.fallback",
        "unstale.old_logps.scoring.worker",
    ]
)


class _Order(NamedTuple):
    """The program of a forked process and its surroundings."""

    program: str | Sequence[str]
    folder: str
    environment: dict[str, str]
    files: Sequence[str]
    """The files of its standard output and standard error."""
    is_patient: bool
    server: str
    """The socket of the process that forks its child processes, or "" if they are not forked."""


class Forked:
    """A process that runs a program, or `unstale` with some words.

    The methods are those of `subprocess.Popen`. The process is killed at the end of the context.
    Its own child processes count as frozen after `FROZEN_S` of `tests.support.waits`, or with
    `is_patient` False after the package's shorter time. With `forks_children` they are forked, too,
    and are not its children for the operating system.
    """

    def __init__(
        self,
        program: str | Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        is_patient: bool = True,
        forks_children: bool = False,
    ) -> None:
        self._outputs = TemporaryDirectory()
        folder = str(cwd or Path.cwd())
        environment = dict(os.environ if env is None else env)
        server = _server_address() if forks_children else ""
        order = _Order(program, folder, environment, self._files(), is_patient, server)
        self._process = CONTEXT.Process(target=_run, args=(order,), daemon=True)
        self._process.start()

    def _files(self) -> tuple[str, str]:
        return f"{self._outputs.name}/stdout", f"{self._outputs.name}/stderr"

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.join()
        self._outputs.cleanup()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def output(self) -> tuple[str, str]:
        """Return the text so far of the standard output and of the standard error."""
        output, errors = (
            path.read_text() if (path := Path(file)).exists() else "" for file in self._files()
        )
        return output, errors

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self.output()


def run_forked(
    program: str | Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> str:
    """Run a program in a forked process. Return its standard output. Raises AssertionError if the
    process fails.
    """
    with Forked(program, cwd=cwd, env=env, forks_children=True) as process:
        output, errors = process.communicate()
        assert process.returncode == 0, output + errors
    return output


def _run(order: _Order) -> None:
    if order.is_patient:
        wait_long_for_processes()
    if order.server:
        _fork_children(order.server)
    for descriptor, file in enumerate(order.files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.folder)
    sys.path.insert(0, order.folder)
    program = order.program
    sys.argv = ["unstale", *([] if isinstance(program, str) else program)]
    try:
        if isinstance(program, str):
            exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
        else:
            main()
    finally:
        atexit._run_exitfuncs()


def _server_address() -> str:
    """Return the socket of the process that forks the programs."""
    forkserver.ensure_running()
    return str(forkserver._forkserver._forkserver_address)  # type: ignore[attr-defined]


def _fork_children(server: str) -> None:
    """Let the process that forked this one fork the engines and scorers of this one."""
    forkserver._forkserver._forkserver_address = server  # type: ignore[attr-defined]
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    popen = SimpleNamespace(Popen=ForkedChild, DEVNULL=subprocess.DEVNULL)
    child_process.subprocess = popen  # type: ignore[assignment]


class ForkedChild:
    """A child process of `weights.child_process`, with the methods of its `subprocess.Popen`."""

    def __init__(
        self, command: Sequence[str], *, pass_fds: Sequence[int], stderr: IO[bytes], **options: Any
    ) -> None:
        *_, program, _, _, _ = command
        passed = [Connection(os.dup(each)) for each in (*pass_fds, stderr.fileno())]
        arguments = (program, dict(options["env"]), passed)
        self._process = CONTEXT.Process(target=_run_child, args=arguments, daemon=True)
        self._process.start()
        for each in passed:
            each.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked child", timeout or 0)
        return self._process.exitcode


def _run_child(program: str, environment: dict[str, str], passed: Sequence[Connection]) -> None:
    os.setsid()
    connection, beat, errors = (os.dup(each.fileno()) for each in passed)
    for each in passed:
        each.close()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(errors, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", str(connection), str(beat), str(os.getppid())]
    exec(compile(program, "<child>", "exec"), {"__name__": "__main__"})
