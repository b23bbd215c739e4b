"""Sandboxes in containers of podman or docker, for tasks that need an image.

With `tests_in="own"`, the agent works in a container whose root is read-only. It can write to
volumes: the working directory, and folders that have no programs. The tests run in another
container of the same image, which gets these volumes when the first container is removed. So
nothing that the agent wrote is in the place of the tests, the reward files or the system's
programs.

With `tests_in="agent"`, the agent can write to the whole root. After its turn, the tests are copied
into its container and run there, beside the processes that it left.
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
from threading import BoundedSemaphore, Lock, Timer
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
    TestsIn,
    Verdict,
)

T = TypeVar("T")

_POOL = ThreadPoolExecutor(256, thread_name_prefix="container")
"""Threads that wait for podman or docker."""
_CLOSERS = ThreadPoolExecutor(8, thread_name_prefix="container-close")
"""Threads that remove containers. They are separate, because commands that still run may occupy all
threads of `_POOL`.
"""
MAX_STARTS = max(4, os.cpu_count() or 1)
"""Number of containers of agents that start at once. With docker, 16 at once started no sooner than
four on two cores, and each takes 60 MB until it has started.
"""
_STARTS = BoundedSemaphore(MAX_STARTS)
_FOLDER = tempfile.gettempdir()
"""Working folder of podman and docker. Podman may write a file there if memory is short."""
_SECONDS = 120.0
"""Time limit of each call of podman or docker, except for builds, commands and tests."""
_REMOVAL_S = 600.0
"""Time limit of the removal of a container. It is long, because many files take long to delete, and
a removal that is killed leaves volumes behind.
"""
_SYSTEM = {"bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "logs", "nix", "proc"}
_SYSTEM |= {"run", "sbin", "sys", "tests", "usr", "var"}
"""Folders of the root that no agent can write to. So is each one that has programs of `PATH`."""
_OF_TESTS = {"/bin", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/logs", "/sbin", "/tests"}
_OF_TESTS |= {"/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libx32", "/usr/local/lib"}
"""Folders on which tests rely, besides those of `PATH`. No volume may hide one."""
_CAPABILITIES = ("chown", "dac_override", "fowner", "fsetid", "kill", "setgid", "setuid")
"""Linux capabilities of root in a container."""
_OF_INSTALLERS = ("net_bind_service", "setfcap", "setpcap", "sys_chroot")
"""Further capabilities of root in a container where it may install packages and start servers."""
_BRIDGE = {"podman": "podman", "docker": "bridge"}
"""Network of containers with access to the network, by program. Each program has it by default."""
_CLEAR = "rm -rf /tests /logs/verifier 2>/dev/null; mkdir -p /tests /logs/verifier"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LIST_FOLDERS = 'for d in /*/ /var/tmp/; do [ -L "${d%/}" ] || [ ! -d "$d" ] || echo "${d%/}"; done'
_IDLE = "sleep 2147483647 & wait; exec sleep 2147483647"
"""The first process of the agent's container. It waits for the processes that it inherits."""
_COMMAND = """printf '%8d\\n' $$; exec 2>&1
if [ -x /bin/bash ]; then exec /bin/bash -c "$1"; else exec /bin/sh -c "$1"; fi"""
"""A shell script that prints its process id, which is also that of its process group, and then runs
the command.
"""
_ID_SIZE = 9
_SAFE = dict.fromkeys(("LD_PRELOAD", "BASH_ENV", "ENV"), "")
_SAFE |= {"PYTHONPATH": "/tests", "PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}
_SAFE |= {"HOME": "/tests", "TEST_DIR": "/tests"}
"""Variables of the tests. They load no code of the agent, also not from its home folder."""
_MAX_REWARD = 1 << 16
"""Largest number of bytes to read from a reward file."""
_KILLED = 137
_NOT_STARTED = 126
_KILL_S = 10.0
_AT_END = """exec 3<&0
{ cat <&3; "$1" rm -f -v $("$1" ps -aq --filter "name=$2" --filter "label=$3"); } &"""
"""A shell script that removes this process's containers after its end, also if it was killed. Until
then the script reads a pipe, of which only this process has the other end.
"""
_CAN_LIMIT = {
    "podman": "{{.Host.CgroupControllers}}",
    "docker": "cpu{{.CPUCfsQuota}} memory{{.MemoryLimit}} pids{{.PidsLimit}}",
}
"""Format of the program's command `info`, by program. Its output shows which limits it can set."""


@dataclass(frozen=True, slots=True)
class ContainerRuntime:
    """A runtime that makes sandboxes in containers of podman or docker."""

    program: str = ""
    """`podman` or `docker`. Empty means the first of them that works."""
    storage_mb: int = 256
    """Largest size in MB of each file."""
    tests_in: TestsIn = "own"

    def check(self, task: TerminalTask) -> None:
        """Raise `ConfigError` if no container can be started here."""
        _working(self.program)

    async def start(self, task: TerminalTask) -> Sandbox:
        """Return a new sandbox. Its image is built first if no image has its content. Raises
        `EnvError` if that fails.
        """
        sandbox = ContainerSandbox(_working(self.program), task, self.storage_mb, self.tests_in)
        try:
            await sandbox.begin()
        except BaseException:
            await sandbox.close()
            raise
        return sandbox


@dataclass(frozen=True, slots=True)
class _Image:
    """An image: its name, and the folders and paths that its containers use."""

    tag: str
    folder: str
    paths: Mapping[str, str]
    """The variables `PATH` and `LD_LIBRARY_PATH`, without folders that the agent can write to."""
    open: tuple[str, ...]
    """Folders that the agent can write to, if the root is read-only."""


class ContainerSandbox:
    """One sandbox: a container for the agent, and later perhaps another one for the tests."""

    def __init__(
        self, program: str, task: TerminalTask, storage_mb: int, tests_in: TestsIn
    ) -> None:
        self._program = program
        self._call = partial(_call, program)
        self._task = task
        self._storage_mb = min(storage_mb, task.storage_mb)
        self._agent = _own_name() + uuid.uuid4().hex[:12]
        self._is_own = tests_in == "own"
        self._tests = f"{self._agent}-tests" if self._is_own else self._agent
        """Name of the container of the tests."""
        self._closed = False

    async def begin(self) -> None:
        """Build the image, and start the agent's container."""
        await self._in_thread(self._begin)

    async def run(self, command: str, *, seconds: float, output_kb: int) -> CommandResult:
        return await self._in_thread(lambda: self._run(command, seconds, output_kb << 10))

    async def verify(self) -> Verdict:
        """Run the tests. Return their result when no process of the sandbox is left."""
        return await self._in_thread(self._verify)

    async def close(self) -> None:
        """Remove the containers, with all processes and volumes."""
        self._closed = True
        loop = asyncio.get_running_loop()
        await asyncio.shield(loop.run_in_executor(_CLOSERS, self._remove_all))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Return the result of blocking work, done in a thread.

        If the sandbox is closed, the work may still run in its thread.
        """

        def watched() -> T:
            try:
                return work()
            finally:
                if self._closed:
                    self._remove_all()

        return await asyncio.get_running_loop().run_in_executor(_POOL, watched)

    def _begin(self) -> None:
        task = self._task
        self._image = _image(self._program, task, self._is_own)
        made = self._options(task.agent_network, task.env)
        if self._is_own:
            made += ["--read-only", *(f"--volume={folder}" for folder in self._image.open)]
        else:
            made += [f"--cap-add={name}" for name in _OF_INSTALLERS]
        if self._changes_network:  # a container without a network could not get one later
            made += [f"--network={self._bridge}"]
        idle = ["--entrypoint=/bin/sh", self._image.tag, "-c", _IDLE]
        start = ("run", "-d", f"--name={self._agent}", *made, *idle)
        with _STARTS:
            self._call(*start, seconds=task.build_timeout_s)
        if self._changes_network and not task.agent_network:
            self._call("network", "disconnect", self._bridge, self._agent)

    @property
    def _bridge(self) -> str:
        return _BRIDGE[os.path.basename(self._program)]

    @property
    def _changes_network(self) -> bool:
        """True if one container has the network either for the agent or for the tests."""
        return not self._is_own and self._task.agent_network != self._task.test_network

    def _options(self, network: bool, env: Mapping[str, str]) -> list[str]:
        """Return the options that all containers have: limits, rights and variables."""
        task = self._task
        memory = f"{task.memory_mb}m"
        return [
            *([] if network or self._changes_network else ["--network=none"]),
            f"--label={_machine()}",
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
        return self._not_started(why)

    def _not_started(self, why: str) -> CommandResult:
        """Return a failed result for a command that could not be started, with the reason `why`.

        An error would repeat the episode, so the agent could avoid a bad result by breaking its
        container. Raises `EnvError` if the container does not run.
        """
        if self._try("inspect", "--format={{.State.Running}}", self._agent) != b"true":
            raise EnvError(f"the sandbox has ended: {why}")
        return CommandResult(f"not started: {why}", _NOT_STARTED, "exited")

    def _verify(self) -> Verdict:
        task, stop = self._task, ["stop", "-t", "0", self._tests]
        if self._changes_network:
            change = "connect" if task.test_network else "disconnect"
            self._call("network", change, self._bridge, self._agent)
        try:
            words = self._replace_agent() if self._is_own else self._clear_agent()
            self._call("cp", "-", f"{self._tests}:/tests", sent=_archive(task.tests))
        except EnvError as error:
            if self._is_own:
                raise
            return Verdict(self._not_started(str(error)), "")
        result = self._watched(words, task.test_timeout_s, 64 << 10, lambda _: [stop])
        self._call(*stop)
        return Verdict(result, "" if result.was_killed else self._reward())

    def _clear_agent(self) -> list[str]:
        """Empty the folders of the tests in the agent's container.

        Return the arguments of podman or docker that run the tests.
        """
        env = {"TEST_DIR": "/tests", **self._task.test_env}
        given = ("--user=0", *(f"--env={name}={value}" for name, value in env.items()))
        self._call("exec", "--user=0", self._agent, "/bin/sh", "-c", _CLEAR)
        return ["exec", *given, self._agent, *self._task.test_command]

    def _replace_agent(self) -> list[str]:
        """Make a container for the tests, and remove the agent's container.

        Return the arguments of podman or docker that run the tests.
        """
        task, image = self._task, self._image
        env = {**task.env, **_SAFE, **image.paths, **task.test_env}
        program, *arguments = task.test_command
        volumes = [f"--volumes-from={self._agent}", "--volume=/tests", "--volume=/logs/verifier"]
        options = [f"--entrypoint={program}", "--user=0", *self._options(task.test_network, env)]
        self._call("create", f"--name={self._tests}", *volumes, *options, image.tag, *arguments)
        self._call("rm", "-f", self._agent)
        return ["start", "--attach", self._tests]

    def _reward(self) -> str:
        """Return the text of the first reward file that exists. "" if it is not a plain file.

        The files arrive as an archive in the order of their names, so the first of `REWARD_FILES`
        is found first. Other files before it are skipped, until the time limit.
        """
        copy = [self._program, "cp", f"{self._tests}:/logs/verifier/.", "-"]
        out, lost = subprocess.PIPE, subprocess.DEVNULL
        with subprocess.Popen(copy, stdout=out, stderr=lost, cwd=_FOLDER) as client:
            timer = Timer(_SECONDS, client.kill)
            timer.start()
            try:
                return self._first_reward(client.stdout)
            finally:
                timer.cancel()
                client.kill()

    def _first_reward(self, stream: IO[bytes] | None) -> str:
        is_empty = True
        with suppress(tarfile.TarError), tarfile.open(fileobj=stream, mode="r|") as tar:
            for row in tar:
                is_empty = False
                vars(tar)["members"] = []  # it would keep a row of each file
                if f"/logs/verifier/{posixpath.normpath(row.name).lstrip('/')}" in REWARD_FILES:
                    file = tar.extractfile(row) if row.isreg() else None
                    return file.read(_MAX_REWARD).decode(errors="replace") if file else ""
        if is_empty and self._is_own:
            raise EnvError("the folder of the reward file cannot be copied")
        return ""

    def _watched(
        self,
        words: Sequence[str],
        seconds: float,
        most: int,
        kills: Callable[[bytes], Iterable[Sequence[str]]],
        messages: IO[bytes] | int = subprocess.STDOUT,
    ) -> CommandResult:
        """Call podman or docker to run a command. Return the command's result.

        If the command reaches a limit, it is ended by the calls that `kills` returns for the
        beginning of its output. They are tried in order until the command has ended. Warnings and
        errors of podman or docker itself are written to `messages`.
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
            if words[:2] == ["exec", self._agent]:  # the time of its start is not the command's
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
        for name in {self._tests, self._agent}:
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
"""A lock for each image, by name. It ensures that all episodes of a task build the image once."""
_IMAGES: dict[tuple[str, str, bool], _Image] = {}
"""Images that exist. A key is the path of podman or docker, the image's name, and True if the root
of its containers is read-only.
"""
_NOT_BUILT: set[tuple[str, str]] = set()
"""Images that could not be built: the path of podman or docker, and the image's name."""


def _image(program: str, task: TerminalTask, read_only: bool) -> _Image:
    """Return the image of a task. Build it first if no image has this content.

    Raises `EnvError` if the build fails. A failed build is not repeated, so only the first error
    has the reason.
    """
    text = f"FROM {task.image}\n" if task.image else task.dockerfile
    text += f"\nWORKDIR {task.workdir}\n" if task.workdir else ""
    content = repr((text, sorted(task.environment.items())))
    tag = f"unstale-task:{hashlib.sha256(content.encode()).hexdigest()[:32]}"
    with _LOCKS[tag]:
        if (program, tag) in _NOT_BUILT:
            raise EnvError(f"the image of {task.name} could not be built; its first error says why")
        if (program, tag, read_only) not in _IMAGES:
            try:
                described = _call(program, "image", "inspect", tag)
            except EnvError:
                _build(program, tag, text, task)
                described = _call(program, "image", "inspect", tag)
            config = json.loads(described)[0]["Config"]
            _IMAGES[program, tag, read_only] = _describe(program, tag, config, read_only)
        return _IMAGES[program, tag, read_only]


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
        words = ("build", f"--tag={tag}", "--label=unstale", f"--file={folder}/Dockerfile")
        try:
            _call(program, *words, str(context), seconds=task.build_timeout_s)
        except EnvError:
            _NOT_BUILT.add((program, tag))
            raise


def _describe(program: str, tag: str, config: Mapping[str, Any], read_only: bool) -> _Image:
    """Return an image with the folders and paths that its containers use.

    `config` is the part `Config` of the output of `image inspect`. Raises `EnvError` if the agent
    could write to a folder with programs or files of the tests.
    """
    env = dict(each.split("=", 1) for each in config.get("Env") or ())
    workdir = config.get("WorkingDir") or "/"
    if not read_only:
        return _Image(tag, workdir, {}, ())
    searched = {"PATH": env.get("PATH", _PATH), "LD_LIBRARY_PATH": env.get("LD_LIBRARY_PATH", "")}
    found = {
        name: [each for each in text.split(":") if each[:1] == "/"]
        for name, text in searched.items()
    }
    trusted = [each for places in found.values() for each in places]
    words = ["--network=none", *_limits(), "--entrypoint=/bin/sh", tag, "-c", _LIST_FOLDERS]
    folders = _call(program, "run", "--rm", *words).decode().split("\n")
    programs = {each.split("/")[1] for each in trusted} - {"root"}
    free = [each for each in folders if each[1:] and each[1:] not in _SYSTEM | programs]
    if workdir != "/" and not _is_in(workdir, free):
        free.append(workdir)
    volumes = tuple(config.get("Volumes") or ())
    safe = {
        name: [each for each in places if not _is_in(each, free)] for name, places in found.items()
    }
    for folder in (*volumes, workdir):
        for each in (*sorted(_OF_TESTS), *safe["PATH"], *safe["LD_LIBRARY_PATH"]):
            if _is_in(each, [folder]) or (folder in volumes and _is_in(folder, [each])):
                kind = "VOLUME" if folder in volumes else "WORKDIR"
                raise EnvError(
                    f"{kind} {folder} would let the agent write where tests have their programs "
                    f"and files ({each}): make an image without it"
                )
    paths = {name: ":".join(places) for name, places in safe.items()}
    return _Image(tag, workdir, {**paths, "PATH": paths["PATH"] or _PATH}, tuple(free))


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
    """Return the path of `program`, or of the first of podman and docker that works.

    Raises `ConfigError` if none of them can start containers with limits.
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


@cache
def _machine() -> str:
    """Return a label for the containers started from this machine's namespace of process ids.

    Only for these containers, this process can check whether the process that started one is alive.
    A host name is not enough: machines can share it, and a container has process ids of its own.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"unstale.machine={boot}-{os.stat('/proc/self/ns/pid').st_ino}"


def _own_name() -> str:
    """Return the start of the names of this process's containers."""
    return f"unstale-{os.getpid()}-{_begun(os.getpid())}-"


def _begun(pid: int) -> str:
    """Return the start time of a process, in clock ticks since boot. "" if it does not exist."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def _sweep(program: str) -> None:
    """Remove the containers that ended processes of this machine have left.

    Also start a shell that removes the containers of this process when it ends.
    """
    mine = f"--filter=label={_machine()}"
    for name in _call(program, "ps", "-a", mine, "--format={{.Names}}").split():
        _, pid, begun, *_ = name.decode().split("-")
        if _begun(int(pid)) != begun:
            with suppress(EnvError):
                _call(program, "rm", "-f", "-v", name.decode())
    reading, _ = os.pipe()  # the other end closes with this process
    watcher = ["/bin/sh", "-c", _AT_END, "sh", program, _own_name(), _machine()]
    out = subprocess.DEVNULL
    subprocess.run(watcher, stdin=reading, stdout=out, stderr=out, start_new_session=True)
    os.close(reading)
