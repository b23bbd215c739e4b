"""Sandboxes in containers of podman or docker, for tasks that need an image.

The agent works in a container whose root is read-only. It can write to volumes: the working
directory, and folders that have no programs. The tests run in another container of the same image,
which gets these volumes when the first container is removed. So nothing that the agent wrote is in
the place of the tests, the reward files or the system's programs.
"""

import asyncio
import hashlib
import io
import json
import os
import posixpath
import re
import resource
import select
import shutil
import socket
import subprocess
import tarfile
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import IO, Any, TypeVar

from unstale.config import ConfigError
from unstale.envs import EnvError
from unstale.envs.sandboxes.holder import watch
from unstale.envs.sandboxes.runtime import (
    MAX_PROCESSES,
    REWARD_FILES,
    CommandResult,
    File,
    Sandbox,
    TerminalTask,
    Verdict,
)

T = TypeVar("T")

_POOL = ThreadPoolExecutor(256, thread_name_prefix="container")
"""Threads that wait for podman or docker."""
_CLOSERS = ThreadPoolExecutor(8, thread_name_prefix="container-close")
"""Other threads, since commands that wait for their end could have taken all."""
_FOLDER = tempfile.gettempdir()
"""Folder in which they run, since podman can write a file there if memory is short."""
_SECONDS = 120.0
"""Time limit of each call of podman or docker, except for builds, commands and tests."""
_REMOVAL_S = 600.0
"""Time limit of a removal. One that is killed leaves volumes, and many files take long."""
_SYSTEM = {"bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "logs", "nix", "proc"}
_SYSTEM |= {"run", "sbin", "sys", "tests", "usr", "var"}
"""Folders of the root that no agent can write to. So is each one that has programs of `PATH`."""
_OF_TESTS = {"/bin", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/logs", "/sbin", "/tests"}
_OF_TESTS |= {"/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libx32", "/usr/local/lib"}
"""Folders on which tests rely, besides those of `PATH`. No volume may hide one."""
_CAPABILITIES = ("chown", "dac_override", "fowner", "fsetid", "kill", "setgid", "setuid")
"""What root may do in a container, besides what every user may."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LIST_FOLDERS = 'for d in /*/ /var/tmp/; do [ -L "${d%/}" ] || [ ! -d "$d" ] || echo "${d%/}"; done'
_IDLE = "sleep 2147483647 & wait; exec sleep 2147483647"
"""The first process of the agent's container. It waits for the processes that it inherits."""
_COMMAND = """printf '%8d\\n' $$; exec 2>&1
if [ -x /bin/bash ]; then exec /bin/bash -c "$1"; else exec /bin/sh -c "$1"; fi"""
"""Writes the id of the command's process, which also is the id of its group. Then runs it."""
_ID_SIZE = 9
_SAFE = dict.fromkeys(("LD_PRELOAD", "LD_LIBRARY_PATH", "BASH_ENV", "ENV"), "")
_SAFE |= {"PYTHONPATH": "/tests", "PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}
_SAFE |= {"HOME": "/tests", "TEST_DIR": "/tests"}
"""Variables of the tests. They load no code of the agent, also not from its home folder."""
_MAX_REWARD, _MAX_LOGS = 1 << 16, 1 << 26
"""Number of bytes that are read of a reward file, and of all files in its folder."""
_KILLED = 137
_NOT_STARTED = 126
_KILL_S = 10.0
_AT_END = 'exec 3<&0; { cat <&3; "$1" rm -f -v $("$1" ps -aq --filter "name=$2"); } &'
"""Waits until the process that has the other end of the pipe ends, and removes its containers."""
_CAN_LIMIT = {
    "podman": "{{.Host.CgroupControllers}}",
    "docker": "cpu{{.CPUCfsQuota}} memory{{.MemoryLimit}} pids{{.PidsLimit}}",
}
"""Program -> what `info` is asked, to know if it can set limits here."""


@dataclass(frozen=True, slots=True)
class ContainerRuntime:
    """Makes sandboxes in containers."""

    program: str = ""
    """`podman` or `docker`. Empty means the first of them that works."""
    storage_mb: int = 256
    """Largest size in MB of each file."""

    def check(self, task: TerminalTask) -> None:
        """Raise `ConfigError` if no container can be started here."""
        _working(self.program)

    async def start(self, task: TerminalTask) -> Sandbox:
        """Return a new sandbox. Its image is built first if no image has its content. Raises
        `EnvError` if that fails.
        """
        sandbox = ContainerSandbox(_working(self.program), task, self.storage_mb)
        try:
            await sandbox.begin()
        except BaseException:
            await sandbox.close()
            raise
        return sandbox


@dataclass(frozen=True, slots=True)
class _Image:
    """An image: its name, and what containers need to know of it."""

    tag: str
    folder: str
    path: str
    """The variable `PATH`."""
    open: tuple[str, ...]
    """Folders that the agent can write to."""


class ContainerSandbox:
    """One sandbox: a container for the agent, and later another one for the tests."""

    def __init__(self, program: str, task: TerminalTask, storage_mb: int) -> None:
        self._program = program
        self._call = partial(_call, program)
        self._task = task
        self._storage_mb = min(storage_mb, task.storage_mb)
        self._agent = _own_name() + uuid.uuid4().hex[:12]
        self._tests = self._agent + "-tests"
        self._closed = False

    async def begin(self) -> None:
        """Build the image, and start the agent's container."""
        await self._in_thread(self._begin)

    async def run(self, command: str, *, seconds: float, output_kb: int) -> CommandResult:
        return await self._in_thread(lambda: self._run(command, seconds, output_kb << 10))

    async def verify(self) -> Verdict:
        """Remove the agent's container, and run the tests in another one with its volumes."""
        return await self._in_thread(self._verify)

    async def close(self) -> None:
        """Remove both containers, with all processes and volumes."""
        self._closed = True
        loop = asyncio.get_running_loop()
        await asyncio.shield(loop.run_in_executor(_CLOSERS, self._remove_all))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Return the result of blocking work. It can still go on when the sandbox is closed."""

        def watched() -> T:
            try:
                return work()
            finally:
                if self._closed:
                    self._remove_all()

        return await asyncio.get_running_loop().run_in_executor(_POOL, watched)

    def _begin(self) -> None:
        self._image = _image(self._program, self._task)
        volumes = [f"--volume={folder}" for folder in self._image.open]
        made = self._options(self._task.agent_network, self._task.env)
        idle = ["--entrypoint=/bin/sh", self._image.tag, "-c", _IDLE]
        start = ("run", "-d", f"--name={self._agent}", "--read-only", *volumes, *made, *idle)
        self._call(*start, seconds=self._task.build_timeout_s)

    def _options(self, network: bool, env: Mapping[str, str]) -> list[str]:
        """Return the options that both containers have: limits, rights and variables."""
        task = self._task
        memory = f"{task.memory_mb}m"
        return [
            *([] if network else ["--network=none"]),
            f"--label=unstale.host={socket.gethostname()}",
            f"--memory={memory}",
            f"--memory-swap={memory}",
            f"--cpus={min(task.cpus, os.cpu_count() or 1)}",
            f"--pids-limit={MAX_PROCESSES}",
            f"--ulimit=fsize={self._storage_mb << 20}",
            *_limits(),
            "--cap-drop=all",
            *(f"--cap-add={name}" for name in _CAPABILITIES),
            "--security-opt=no-new-privileges",
            "--stop-signal=KILL",
            "--log-driver=none",
            f"--workdir={self._image.folder}",
            *(f"--env={name}={value}" for name, value in env.items()),
        ]

    def _run(self, command: str, seconds: float, most: int) -> CommandResult:
        def kills(output: bytes) -> Iterator[list[str]]:
            group = output[:_ID_SIZE].decode(errors="replace").strip()
            yield ["exec", self._agent, "/bin/sh", "-c", f"kill -KILL -{group}"]
            yield ["restart", "-t", "0", self._agent]

        words = ["exec", self._agent, "/bin/sh", "-c", _COMMAND, "sh", command]
        with tempfile.TemporaryFile() as messages:
            result = self._watched(words, seconds, most + _ID_SIZE, kills, messages)
            if result.output[:_ID_SIZE].strip().isdecimal():
                return replace(result, output=result.output[_ID_SIZE:])
            messages.seek(0)
            why = (result.output + messages.read().decode(errors="replace"))[-300:]
        if self._try("inspect", "--format={{.State.Running}}", self._agent) != b"true":
            raise EnvError(f"the sandbox has ended: {why}")
        return CommandResult(f"not started: {why}", _NOT_STARTED, "exited")

    def _verify(self) -> Verdict:
        task, image, name = self._task, self._image, self._tests
        safe_path = ":".join(each for each in image.path.split(":") if not _is_in(each, image.open))
        env = {**task.env, **_SAFE, "PATH": safe_path or _PATH, **task.test_env}
        program, *arguments = task.test_command
        volumes = [f"--volumes-from={self._agent}", "--volume=/tests", "--volume=/logs/verifier"]
        options = [f"--entrypoint={program}", "--user=0", *self._options(task.test_network, env)]
        self._call("create", f"--name={name}", *volumes, *options, image.tag, *arguments)
        self._call("rm", "-f", self._agent)
        self._call("cp", "-", f"{name}:/tests", sent=_archive(task.tests))
        words, stop = ["start", "--attach", name], ["stop", "-t", "0", name]
        result = self._watched(words, task.test_timeout_s, 64 << 10, lambda _: [stop])
        self._call(*stop)
        return Verdict(result, "" if result.was_killed else self._reward())

    def _reward(self) -> str:
        """Return the text of the first reward file that exists. Empty if it is no plain file."""
        copy = (self._program, "cp", f"{self._tests}:/logs/verifier/.", "-")
        data = _call("/bin/sh", "-c", f'"$@" | head -c {_MAX_LOGS}', "sh", *copy)
        if not data:
            raise EnvError("the folder of the reward file cannot be copied")
        found: dict[str, str] = {}
        with suppress(tarfile.TarError), tarfile.open(fileobj=io.BytesIO(data)) as tar:
            for row in tar:
                file = tar.extractfile(row) if row.isreg() else None
                text = file.read(_MAX_REWARD).decode(errors="replace") if file else ""
                found[f"/logs/verifier/{posixpath.normpath(row.name).lstrip('/')}"] = text
        return next((found[path] for path in REWARD_FILES if path in found), "")

    def _watched(
        self,
        words: Sequence[str],
        seconds: float,
        most: int,
        kills: Callable[[bytes], Iterable[Sequence[str]]],
        messages: IO[bytes] | int = subprocess.STDOUT,
    ) -> CommandResult:
        """Return the result of a command, for which podman or docker is called.

        `kills` returns, for the start of the output, calls that end the command if a limit is
        reached. Each one is tried if the one before has not ended it. `messages` gets what podman
        or docker itself has to say, such as warnings.
        """
        try:
            client = subprocess.Popen(
                [self._program, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=messages,
                cwd=_FOLDER,
            )
        except OSError as error:  # the command is too long
            return CommandResult(f"not started: {error}", _NOT_STARTED, "exited")
        with client:
            assert client.stdout
            process, reading = os.pidfd_open(client.pid), client.stdout.fileno()
            if words[0] == "exec":  # the time of its start is not the command's
                start = select.poll()
                start.register(reading, select.POLLIN)
                start.poll(_SECONDS * 1000)
            output, ended = watch(process, reading, seconds, most)
            os.close(process)
            code = client.poll()
            for call in kills(output) if code is None else ():
                self._try(*call)
                client.stdout.close()  # else it could wait to write
                with suppress(subprocess.TimeoutExpired):
                    client.wait(_KILL_S)
                    break
            client.kill()
        code = _KILLED if code is None else code
        return CommandResult(output.decode(errors="replace"), code, ended)

    def _try(self, *words: str) -> bytes:
        with suppress(EnvError):
            return self._call(*words).strip()
        return b""

    def _remove_all(self) -> None:
        for name in (self._tests, self._agent):
            with suppress(EnvError):  # none of this name
                self._call("rm", "-f", "-v", name, seconds=_REMOVAL_S)


def _call(program: str, *words: str, sent: bytes = b"", seconds: float = _SECONDS) -> bytes:
    """Return the output of podman or docker. Raises `EnvError` if it fails or takes too long."""
    try:
        done = subprocess.run(
            [program, *words], input=sent, capture_output=True, timeout=seconds, cwd=_FOLDER
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvError(f"{program} {words[0]}: {error}") from error
    if done.returncode:
        what = (done.stderr or done.stdout).decode(errors="replace")[-500:].strip()
        raise EnvError(f"{program} {words[0]} ended with {done.returncode}: {what}")
    return done.stdout


_LOCKS: dict[str, Lock] = defaultdict(Lock)
"""Name of an image -> lock, so that it is built once for all episodes of a task."""
_IMAGES: dict[tuple[str, str], _Image] = {}
"""Path of podman or docker, and name of an image -> image."""


def _image(program: str, task: TerminalTask) -> _Image:
    """Return the image of a task. It is built if there is none of this content."""
    text = f"FROM {task.image}\n" if task.image else task.dockerfile
    text += f"\nWORKDIR {task.workdir}\n" if task.workdir else ""
    content = repr((text, sorted(task.environment.items())))
    tag = f"unstale-task:{hashlib.sha256(content.encode()).hexdigest()[:32]}"
    with _LOCKS[tag]:
        if (program, tag) not in _IMAGES:
            try:
                described = _call(program, "image", "inspect", tag)
            except EnvError:
                _build(program, tag, text, task)
                described = _call(program, "image", "inspect", tag)
            config = json.loads(described)[0]["Config"]
            _IMAGES[program, tag] = _describe(program, tag, config)
        return _IMAGES[program, tag]


def _build(program: str, tag: str, text: str, task: TerminalTask) -> None:
    with tempfile.TemporaryDirectory(prefix="unstale-build-") as folder:
        Path(folder, "Dockerfile").write_text(text, "utf-8")
        context = Path(folder, "context")
        context.mkdir()
        for name, file in task.environment.items():
            path = context / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.content)
            path.chmod(0o755 if file.executable else 0o644)
        words = ("build", f"--tag={tag}", f"--file={folder}/Dockerfile", str(context))
        _call(program, *words, seconds=task.build_timeout_s)


def _describe(program: str, tag: str, config: Mapping[str, Any]) -> _Image:
    """Return what containers need to know of an image. `config` is its part of `image inspect`."""
    env = dict(each.split("=", 1) for each in config.get("Env") or ())
    path, workdir = env.get("PATH", _PATH), config.get("WorkingDir") or "/"
    words = ["--network=none", *_limits(), "--entrypoint=/bin/sh", tag, "-c", _LIST_FOLDERS]
    folders = _call(program, "run", "--rm", *words).decode().split("\n")
    programs = {each.split("/")[1] for each in path.split(":") if each.startswith("/")} - {"root"}
    free = [each for each in folders if each[1:] and each[1:] not in _SYSTEM | programs]
    if workdir != "/" and not _is_in(workdir, free):
        free.append(workdir)
    volumes = tuple(config.get("Volumes") or ())
    safe = [each for each in path.split(":") if each.startswith("/") and not _is_in(each, free)]
    for folder in (*volumes, workdir):
        for each in (*sorted(_OF_TESTS), *safe):
            if _is_in(each, [folder]) or (folder in volumes and _is_in(folder, [each])):
                kind = "VOLUME" if folder in volumes else "WORKDIR"
                raise EnvError(
                    f"{kind} {folder} would let the agent write where tests have their programs "
                    f"and files ({each}): make an image without it"
                )
    return _Image(tag, workdir, path, tuple(free))


def _is_in(path: str, folders: Iterable[str]) -> bool:
    return any(f"{path}/".startswith(f"{each}/") for each in folders)


def _archive(files: Mapping[str, File]) -> bytes:
    """Return a tar archive of files."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        for name, file in files.items():
            row = tarfile.TarInfo(name)
            row.size, row.mode = len(file.content), 0o755 if file.executable else 0o644
            tar.addfile(row, io.BytesIO(file.content))
    return written.getvalue()


def _working(program: str) -> str:
    """Return the path of `program`, or of the first one that works. Raises `ConfigError` if none
    does.
    """
    problems = []
    for each in (program,) if program else _CAN_LIMIT:
        path = shutil.which(each)
        problem = _problem(each, path) if path else "is not installed"
        if path and not problem:
            return path
        problems.append(f"{each} {problem}")
    raise ConfigError(
        f"no container can be started: {'; '.join(problems)}. Install podman, such as by "
        "`apt-get install podman`"
    )


@cache
def _problem(program: str, path: str) -> str:
    """Return why a program cannot start containers with limits. Empty if it can, and then the
    containers of processes that have ended are removed.
    """
    try:
        answer = _call(path, "info", f"--format={_CAN_LIMIT[program]}").decode()
        words = {word.removesuffix("true") for word in re.findall(r"\w+", answer)}
        if missing := {"cpu", "memory", "pids"} - words:
            return f"cannot limit {', '.join(sorted(missing))} here"
        _sweep(path)
    except EnvError as error:
        return f"does not work: {error}"
    return ""


def _limits() -> list[str]:
    """Return limits that every container has. Podman fails if it cannot raise those of this process
    to its own defaults, as in a container.
    """
    most = min(1 << 14, resource.getrlimit(resource.RLIMIT_NPROC)[1] % (1 << 63))
    return ["--ulimit=core=0", "--ulimit=nofile=1024", f"--ulimit=nproc={most}"]


def _own_name() -> str:
    """Return the start of the names of this process's containers."""
    return f"unstale-{os.getpid()}-{_begun(os.getpid())}-"


def _begun(pid: int) -> str:
    """Return when a process began. Empty if there is no such process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def _sweep(program: str) -> None:
    """Remove the containers of this machine's processes that have ended, and later those of this
    process when it ends.
    """
    mine = f"label=unstale.host={socket.gethostname()}"
    for name in _call(program, "ps", "-a", f"--filter={mine}", "--format={{.Names}}").split():
        _, pid, begun, *_ = name.decode().split("-")
        if _begun(int(pid)) != begun:
            with suppress(EnvError):
                _call(program, "rm", "-f", "-v", name.decode())
    reading, _ = os.pipe()  # the other end closes with this process
    watcher = ["/bin/sh", "-c", _AT_END, "sh", program, _own_name()]
    out = subprocess.DEVNULL
    subprocess.run(watcher, stdin=reading, stdout=out, stderr=out, start_new_session=True)
    os.close(reading)
