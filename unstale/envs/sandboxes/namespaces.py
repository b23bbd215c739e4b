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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    Verdict,
)

_POOL = ThreadPoolExecutor(256, thread_name_prefix="terminal")
"""Threads that wait for answers of sandboxes."""
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


@dataclass(frozen=True, slots=True)
class NamespaceRuntime:
    """Makes sandboxes in kernel namespaces.

    With `host_programs`, this machine's programs take the place of the image that FROM names.
    """

    host_programs: bool = False
    storage_mb: int = 256
    """Largest size in MB of all files of a sandbox, which are in memory."""

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
        sandbox = await loop.run_in_executor(_STARTERS, NamespaceSandbox, task)
        try:
            await sandbox.build(min(self.storage_mb, task.storage_mb))
        except BaseException:
            await sandbox.close()
            raise
        return sandbox


class NamespaceSandbox:
    """One sandbox. A separate process (`holder.py`) carries out its requests one by one."""

    def __init__(self, task: TerminalTask) -> None:
        self._task = task
        self._build = read_dockerfile(task.dockerfile, task.environment)
        if task.workdir:
            self._build.folder = task.workdir
            self._build.steps.append(Copy([task.workdir]))
        self._env = {**_environment(), **task.env, **self._build.env}
        self._ours, theirs = socket.socketpair()
        self._stream = self._ours.makefile("rwb")
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in _stop
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
        return await self._run(step, seconds, output_kb)

    async def verify(self) -> Verdict:
        """Kill the agent's processes, write the tests and run them. Return their result."""
        await self._ask("end")
        task = self._task
        tests = {f"/tests/{name}": file for name, file in task.tests.items()}
        await self._put("add_tests", tests, ())
        plain = {name: value for name, value in self._env.items() if name not in _TEST_PATHS}
        safe = {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1", "TEST_DIR": "/tests"}
        env = {**plain, **_environment(), **safe, "PYTHONPATH": "/tests", **task.test_env}
        step = Run([*task.test_command], self._build.folder, env)
        result = await self._run(step, task.test_timeout_s, 64)
        reward = (await self._ask("rewards", paths=REWARD_FILES))["text"]
        return Verdict(result, "" if result.was_killed else reward)

    async def close(self) -> None:
        """End the holder. With it, the kernel ends all other processes and frees the files."""
        with suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)
        # Its thread goes on if a time limit ends this call: else process and files would stay.
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(_STARTERS, self._stop))

    def _stop(self) -> None:
        end = os.pidfd_open(self._process.pid)
        poll = select.poll()
        poll.register(end, select.POLLIN)
        try:
            poll.poll(_CLOSE_S * 1000)  # until all processes of the sandbox have ended
        finally:
            os.close(end)
            self._process.kill()
            self._process.wait()
            for each in (self._stream, self._ours, self._errors):
                with suppress(OSError):
                    each.close()

    async def _run(self, step: Run, seconds: float, output_kb: int) -> CommandResult:
        answer = await self._ask("run", **vars(step), seconds=seconds, output_kb=output_kb)
        output = answer["output"].decode(errors="replace")
        return CommandResult(output, answer["code"], answer["ended"])

    async def _put(self, op: str, files: Mapping[str, File], folders: Sequence[str]) -> None:
        rows = [
            (path, 0o755 if file.executable else 0o644, len(file.content))
            for path, file in files.items()
        ]
        payload = b"".join(file.content for file in files.values())
        await self._ask(op, payload, files=rows, folders=list(folders))

    async def _ask(self, op: str, payload: bytes = b"", **fields: Any) -> dict[str, Any]:
        """Send a request to the process that holds the sandbox, and return its answer.

        Raises `EnvError` if the request fails.
        """
        request = json.dumps({"op": op, **fields, "size": len(payload)})
        return await self._in(_POOL, self._exchange, request.encode() + b"\n" + payload)

    def _exchange(self, request: bytes) -> dict[str, Any]:
        try:
            self._stream.write(request)
            self._stream.flush()
            answer = json.loads(self._stream.readline() or "null")
            output = self._stream.read(answer["size"]) if answer else b""
        except (OSError, ValueError):
            answer = None
        if answer is None:
            self._errors.seek(0)
            raise EnvError(f"the sandbox has ended: {self._errors.read().decode()[-300:].strip()}")
        if "error" in answer:
            raise EnvError(f"the sandbox refused: {answer['error']}")
        return {**answer, "output": output}

    async def _in(self, pool: ThreadPoolExecutor, work: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)


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
