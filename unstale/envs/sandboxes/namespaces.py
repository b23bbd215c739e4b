"""Sandboxes in kernel namespaces: no daemon, no image, no network.

Programs are those of this machine, read-only. All other files are in memory and end with the
sandbox. `holder.py` is the process that makes the namespaces.
"""

import asyncio
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from unstale.config import ConfigError
from unstale.envs import EnvError
from unstale.envs.sandboxes.dockerfile import Copy, Run, read_dockerfile
from unstale.envs.sandboxes.runtime import (
    MAX_PROCESSES,
    REWARD_FILES,
    CommandResult,
    File,
    Sandbox,
    TerminalTask,
    TestsIn,
    Verdict,
)

T = TypeVar("T")

_STARTERS = ThreadPoolExecutor(2, thread_name_prefix="terminal-start")
"""A pool of threads that start and end the sandboxes' processes. It is small so that they do not
delay the event loop.
"""
_BOUND = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_BOUND_ETC = ("/etc/alternatives", "/etc/ld.so.cache")
_PYTHON = "/python"
"""Folder of this Python in the sandbox, unless it is below /usr."""
_TEST_PATHS = ("PATH", "PYTHONPATH", "LD_PRELOAD", "LD_LIBRARY_PATH", "BASH_ENV", "ENV")
"""Variables of the Dockerfile that tests do not get, since they could load code of the agent."""
_CLOSE_S = 3.0
_MEMORY_MB = 2048
_CHUNK = 1 << 16


class _OneThread(Executor):
    """Runs coroutines in one thread, on an event loop of its own.

    With a thread for each sandbox, many would compete with the run's event loop for the interpreter
    lock when sandboxes answer at once.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, name="terminal", daemon=True).start()

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work(*arguments, **options), self._loop)


_thread = cache(_OneThread)
"""Returns the thread that asks all sandboxes. It starts with the first one."""


@dataclass(frozen=True, slots=True)
class NamespaceRuntime:
    """A runtime that makes sandboxes in kernel namespaces.

    With `host_programs`, this machine's programs take the place of the image that FROM names.
    """

    host_programs: bool = False
    storage_mb: int = 256
    """Largest size in MB of all files of a sandbox, which are in memory."""
    tests_in: TestsIn = "own"

    def check(self, task: TerminalTask) -> None:
        """Raise `ConfigError` if the task needs an image, or an instruction that cannot be carried
        out.
        """
        image = task.image or read_dockerfile(task.dockerfile, task.environment).image
        if image != "scratch" and not self.host_programs:
            raise ConfigError(
                f"{task.name} needs the image {image}, which namespaces cannot have: give "
                "--task.host_programs true to use the programs of this machine instead"
            )

    async def start(self, task: TerminalTask) -> Sandbox:
        """Return a new sandbox with the task's files. Raises `EnvError` if a command of the
        Dockerfile fails.
        """
        loop = asyncio.get_running_loop()
        sandbox = await loop.run_in_executor(_STARTERS, NamespaceSandbox, task, self.tests_in)
        try:
            await sandbox.build(min(self.storage_mb, task.storage_mb))
        except BaseException:
            await sandbox.close()
            raise
        return sandbox


class NamespaceSandbox:
    """One sandbox. A separate process (`holder.py`) carries out its requests one by one."""

    def __init__(self, task: TerminalTask, tests_in: TestsIn) -> None:
        self._task = task
        self._is_own = tests_in == "own"
        self._build = read_dockerfile(task.dockerfile, task.environment)
        if task.workdir:
            self._build.folder = task.workdir
            self._build.steps.append(Copy([task.workdir]))
        self._env = {**_environment(), **task.env, **self._build.env}
        self._ours, theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._asking = asyncio.Lock()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in _close_files
        holder = str(Path(__file__).with_name("holder.py"))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", holder, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,
                cwd="/",
                env={},
            )

    async def build(self, storage_mb: int) -> None:
        """Make the namespaces, and carry out the steps of the Dockerfile."""
        await self._in_thread(self._make, storage_mb)

    async def _make(self, storage_mb: int) -> None:
        limits = {
            "AS": _MEMORY_MB << 20,
            "FSIZE": storage_mb << 20,
            "CORE": 0,
            "NOFILE": 256,
            "NPROC": MAX_PROCESSES + 2,  # the holder and the first process count
        }
        await self._ask("", storage_mb=storage_mb, binds=_binds(), limits=limits)
        for step in self._build.steps:
            if isinstance(step, Copy):
                await self._put("put", step.files, step.folders)
                continue
            step.env = {**self._env, **step.env}
            result = await self._run(step, self._task.build_timeout_s, 4)
            if result.code or result.ended == "timeout":
                what = f"ended with {result.code}" if result.code else "took too long"
                raise EnvError(f"RUN {step.argv[-1]} {what} (no network): {result.output[-300:]}")
        await self._ask("seal")

    async def run(self, command: str, *, seconds: float, output_kb: int) -> CommandResult:
        step = Run(["/bin/bash", "-c", command], self._build.folder, self._env)
        return await self._in_thread(self._run, step, seconds, output_kb)

    async def verify(self) -> Verdict:
        """Write the tests and run them. Return their result when no process is left."""
        return await self._in_thread(self._test)

    async def _test(self) -> Verdict:
        task = self._task
        if self._is_own:
            await self._ask("end")
        tests = {f"/tests/{name}": file for name, file in task.tests.items()}
        await self._put("add_tests", tests, (), alone=self._is_own)
        plain = {name: value for name, value in self._env.items() if name not in _TEST_PATHS}
        safe = {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1", "TEST_DIR": "/tests"}
        env = {**plain, **_environment(), **safe, "PYTHONPATH": "/tests", **task.test_env}
        if not self._is_own:
            env = {**self._env, "TEST_DIR": "/tests", **task.test_env}
        step = Run([*task.test_command], self._build.folder, env)
        result = await self._run(step, task.test_timeout_s, 64)
        reward = await self._ask("rewards", paths=REWARD_FILES)
        return Verdict(result, "" if result.was_killed else reward["text"])

    async def close(self) -> None:
        """End the holder. With it, the kernel ends all other processes and frees the files."""
        with suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)
        # Its thread goes on if a time limit ends this call: else process and files would stay.
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(_STARTERS, self._stop))

    def _stop(self) -> None:
        """Wait until the holder ends, or kill it. Then close the files."""
        end = os.pidfd_open(self._process.pid)
        poll = select.poll()
        poll.register(end, select.POLLIN)
        try:
            poll.poll(_CLOSE_S * 1000)  # until all processes of the sandbox have ended
        finally:
            os.close(end)
            self._process.kill()
            self._process.wait()
            _thread().submit(self._close_files)

    async def _close_files(self) -> None:
        async with self._asking:  # a request that still waits fails first
            self._ours.close()
            self._errors.close()

    async def _in_thread(self, work: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
        loop = asyncio.get_running_loop()
        call: Callable[[], Any] = partial(work, *arguments)  # the thread awaits what it returns
        result: T = await loop.run_in_executor(_thread(), call)
        return result

    async def _run(self, step: Run, seconds: float, output_kb: int) -> CommandResult:
        answer = await self._ask("run", **vars(step), seconds=seconds, output_kb=output_kb)
        output = answer["output"].decode(errors="replace")
        return CommandResult(output, answer["code"], answer["ended"])

    async def _put(
        self, op: str, files: Mapping[str, File], folders: Sequence[str], **fields: Any
    ) -> None:
        rows = [
            (path, 0o755 if file.executable else 0o644, len(file.content))
            for path, file in files.items()
        ]
        payload = b"".join(file.content for file in files.values())
        await self._ask(op, payload, files=rows, folders=list(folders), **fields)

    async def _ask(self, op: str, payload: bytes = b"", **fields: Any) -> dict[str, Any]:
        """Send a request to the process that holds the sandbox, and return its answer.

        Raises `EnvError` if the request fails.
        """
        request = json.dumps({"op": op, **fields, "size": len(payload)}).encode() + b"\n"
        async with self._asking:
            try:
                await asyncio.get_running_loop().sock_sendall(self._ours, request + payload)
                answer = await self._answer()
            except (OSError, EOFError) as error:
                why = "it is closed"
                with suppress(ValueError):  # the file is closed, too
                    self._errors.seek(0)
                    why = self._errors.read().decode()[-300:].strip()
                raise EnvError(f"the sandbox has ended: {why}") from error
        if "error" in answer:
            raise EnvError(f"the sandbox refused: {answer['error']}")
        return answer

    async def _answer(self) -> dict[str, Any]:
        """Return an answer, with its bytes as `output`. Raises `EOFError` if the holder has
        ended.
        """
        received = bytearray()
        while b"\n" not in received:
            received += await self._receive()
        line, _, output = received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        while len(output) < answer["size"]:
            output += await self._receive()
        return {**answer, "output": output}

    async def _receive(self) -> bytes:
        data = await asyncio.get_running_loop().sock_recv(self._ours, _CHUNK)
        if not data:
            raise EOFError
        return data


def _python() -> str:
    """Return the folder in which this Python is inside of the sandbox."""
    prefix = os.path.realpath(sys.base_prefix)
    return prefix if f"{prefix}/".startswith("/usr/") else _PYTHON


def _binds() -> list[tuple[str, str]]:
    """Return (path here, path in the sandbox) for all that the sandbox can read of this machine."""
    binds = [(path, path) for path in (*_BOUND, *_BOUND_ETC) if os.path.lexists(path)]
    if _python() == _PYTHON:
        binds.append((os.path.realpath(sys.base_prefix), _PYTHON))
    return binds


def readable_folders() -> list[Path]:
    """Return the folders of this machine that every sandbox can read."""
    return [Path(source).resolve() for source, _ in _binds()]


def _environment() -> dict[str, str]:
    env = {"PATH": f"{_python()}/bin:/usr/local/bin:/usr/bin:/bin", "HOME": "/root"}
    env |= {"LANG": "C.UTF-8", "USER": "root", "TERM": "dumb", "PYTHONDONTWRITEBYTECODE": "1"}
    if _python() == _PYTHON:
        env["LD_LIBRARY_PATH"] = f"{_PYTHON}/lib"
    return env
