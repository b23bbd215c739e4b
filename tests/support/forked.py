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
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from unstale.cli.main import main

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


class Forked:
    """A process that runs a program, or `unstale` with some words.

    The methods are those of `subprocess.Popen`. The process is killed at the end of the context.
    """

    def __init__(
        self,
        program: str | Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._outputs = TemporaryDirectory()
        folder = str(cwd or Path.cwd())
        environment = dict(os.environ if env is None else env)
        arguments = (program, folder, environment, self._files())
        self._process = CONTEXT.Process(target=_run, args=arguments, daemon=True)
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
    """Return the standard output. Raises AssertionError if the process fails."""
    with Forked(program, cwd=cwd, env=env) as process:
        output, errors = process.communicate()
        assert process.returncode == 0, output + errors
    return output


def _run(
    program: str | Sequence[str], folder: str, environment: dict[str, str], files: Sequence[str]
) -> None:
    for descriptor, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv = ["unstale", *([] if isinstance(program, str) else program)]
    try:
        if isinstance(program, str):
            exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
        else:
            main()
    finally:
        atexit._run_exitfuncs()


class ForkedChild:
    """A child process of `weights.child_process`, with the methods of its `subprocess.Popen`."""

    def __init__(
        self, command: Sequence[str], *, pass_fds: Sequence[int], stderr: IO[bytes], **options: Any
    ) -> None:
        *_, program, _, _, settings = command
        passed = [Connection(os.dup(each)) for each in (*pass_fds, stderr.fileno())]
        arguments = (program, settings, dict(options["env"]), passed)
        self._process = CONTEXT.Process(target=_run_child, args=arguments, daemon=True)
        self._process.start()
        for each in passed:
            each.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


def _run_child(
    program: str, settings: str, environment: dict[str, str], passed: Sequence[Connection]
) -> None:
    os.setsid()
    connection, beat, errors = (os.dup(each.fileno()) for each in passed)
    for each in passed:
        each.close()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(errors, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", str(connection), str(beat), settings]
    exec(compile(program, "<child>", "exec"), {"__name__": "__main__"})
