"""A sandbox for programs that a model wrote, on Linux only.

Programs have no network, and limits on time, memory, files and processes. If Bubblewrap works on
this machine, the file system is read-only except for one small folder, and no process outlives the
program. Otherwise the sandbox sets resource limits, inside of kernel namespaces if these are
allowed. `kind` and `weaknesses` return which method is used and what it does not prevent. See
docs/security.md.
"""

import asyncio
import itertools
import json
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import Literal

from unstale.config import ConfigError
from unstale.envs import EnvError
from unstale.envs.sandboxed import landlock_version
from unstale.weights.leftovers import hold_lock, remove_leftovers

Kind = Literal["bubblewrap", "limits"]
Ended = Literal["exited", "timeout", "output"]

_ENTER = (
    sys.executable,
    "-I",
    "-S",
    "-c",
    Path(__file__).with_name("sandboxed.py").read_text("utf-8"),
)

_POOL = ThreadPoolExecutor(max(2, os.cpu_count() or 1), thread_name_prefix="sandbox")
"""Threads that start programs, one per core. They must live on: the kernel kills a program when the
thread that started it ends.
"""

_UIDS = itertools.cycle(range(61_184, 65_520))
"""User ids without an account. If this process is root, each program may run under one of them."""

ALLOW_WEAK = "UNSTALE_ALLOW_WEAK_SANDBOX"
"""Environment variable that allows root to run programs without bubblewrap. Child processes inherit
it.
"""
_PREFIX = "unstale-sandbox-"
_KILL_ROUNDS = 50
"""Largest number of attempts to kill all processes of a user. It is limited because zombies that
nobody waits for cannot be killed.
"""
_SHARED_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
"""Folders in which every user may write."""

_INSIDE = "/tmp/work"
"""Working directory of a program in bubblewrap. It is empty at first."""
_ENVIRONMENT = {
    "PATH": os.defpath,
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_READ_ONLY = ["/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache"]
"""System files and folders that a program in bubblewrap can read."""
_POLL_MS = 50
"""Milliseconds between two checks whether the caller was cancelled."""


class SandboxError(EnvError):
    """Error: a program could not be started in the sandbox. A program that fails raises no
    error.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on a program's resources. Requests beyond a limit fail."""

    seconds: float = 5.0
    """Wall-clock seconds after which the program is killed. Also the limit of each process's CPU
    time.
    """
    memory_mb: int = 512
    """Address space of each process in MB. Memory that this does not count, such as a memfd or a
    shared segment of System V, cannot be created.
    """
    file_mb: int = 16
    """Largest size of a file in MB. With bubblewrap, all files together."""
    processes: int = 16
    """Largest number of processes and threads at the same time."""
    output_kb: int = 64
    """Size in kB at which stdout is cut off, and the same for stderr."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"limits.{name} must be > 0, got {value}")


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The output and exit code of a program. The code is 128 + n after signal n, as in a shell."""

    stdout: str
    stderr: str
    code: int
    ended: Ended
    """How the program ended. `timeout`: it was killed at the time limit. `output`: it ended, but
    its stdout or stderr was cut off.
    """


@dataclass(frozen=True, slots=True)
class _Way:
    """A method of isolation.

    `isolated`: in new kernel namespaces, without bubblewrap. `own_user`: as a new user instead of
    root.
    """

    kind: Kind
    isolated: bool = False
    own_user: bool = False

    @property
    def counts_processes(self) -> bool:
        """True if the kernel can limit a program's processes. It counts per user, and not for
        root.
        """
        return self.own_user or (os.getuid() != 0 and (self.isolated or self.kind == "bubblewrap"))

    @property
    def helpers(self) -> int:
        """Number of the sandbox's own processes that count as the program's."""
        return 2 if self.isolated else int(self.kind == "bubblewrap" and not self.own_user)


@dataclass(frozen=True, slots=True)
class _Job:
    argv: Sequence[str]
    stdin: str
    files: Mapping[str, str]
    limits: Limits
    keep_stderr: bool = True


async def run(  # noqa: PLR0913 - two of them are what the program reads
    program: str | Sequence[str],
    *,
    stdin: str = "",
    files: Mapping[str, str] = MappingProxyType({}),
    limits: Limits | None = None,
    require: Kind = "limits",
    keep_stderr: bool = True,
) -> ProgramResult:
    """Run Python code (a string) or a command (a list of strings), and return its result.

    It runs in a new folder with `files` (name -> text), without this process's environment
    variables. Without `keep_stderr`, stderr is discarded and unlimited. If the caller is cancelled,
    the program is killed. Raises `ConfigError` if bubblewrap does not work here but is required, by
    `require` or because this process is root (see `check_allowed`).
    """
    for name in files:
        if name in ("", ".", "..") or "/" in name:
            raise ValueError(f"files must have plain names, got {name!r}")
    argv = [sys.executable, "-s", "-c", program] if isinstance(program, str) else list(program)
    stop = threading.Event()
    loop = asyncio.get_running_loop()
    try:
        way = await loop.run_in_executor(_POOL, _way)
        check_allowed()
        if require == "bubblewrap" != way.kind:
            raise ConfigError(
                "bubblewrap is required, but bwrap is not installed or does not work here"
            )
        return await loop.run_in_executor(
            _POOL, _run, way, _Job(argv, stdin, files, limits or Limits(), keep_stderr), stop
        )
    finally:
        stop.set()


def check_allowed() -> None:
    """Raise `ConfigError` if this process is root and bubblewrap does not work here.

    A program could then write files outside of its folder. `allow_weak` turns this check off.
    """
    if os.getuid() == 0 and os.environ.get(ALLOW_WEAK) != "1" and _way().kind != "bubblewrap":
        raise ConfigError(
            "a model's programs would run as root without bubblewrap, and could write to /proc/sys "
            "and to your files: install bubblewrap, run as another user, or allow it with "
            "--allow-weak-sandbox"
        )


def allow_weak() -> None:
    """Let root run programs without bubblewrap, in this process and its children."""
    os.environ[ALLOW_WEAK] = "1"


def kind() -> Kind:
    """Return the method of isolation that is used here: "bubblewrap" or "limits"."""
    return _way().kind


def weaknesses() -> str:
    """Return a sentence that lists what this machine's sandbox does not prevent."""
    way = _way()
    risks = [
        "a program that uses a fault of the kernel",
        "limits.memory_mb of memory in every process",
    ]
    if way.kind == "bubblewrap":
        risks.append("reading /usr, this Python and its packages")
    else:
        risks += _risks_of_limits(way)
    if not way.counts_processes:
        risks.append("any number of processes while it runs")
    if not _is_filtered(way):
        risks.append("new namespaces, in which more of the kernel can be reached")
        risks.append("memory beyond the limit, in memfds and shared segments")
    return f"not stopped with {way.kind}: {'; '.join(risks)}"


def _risks_of_limits(way: _Way) -> list[str]:
    """Return what the method `limits` does not prevent, but bubblewrap does.

    It depends on the kernel's version of Landlock.
    """
    version = landlock_version()
    files = "open to everybody" if way.own_user else "of your user, secrets included,"
    access = "reading, and setting the permissions of," if version else "reading and writing"
    risks = [
        f"{access} files {files} and connecting to sockets that are files",
        "any number of files",
    ]
    if way.isolated:
        return risks
    risks.append("the network, except for TCP" if version >= 4 else "the network")
    if not _is_filtered(way):
        risks.append("processes that leave their group and stay behind")
    if not way.own_user:
        ending = "" if version >= 6 else " and ending them"
        risks.append(f"reading your user's other processes{ending}")
    return risks


@cache
def _is_filtered(way: _Way) -> bool:
    """Return True if the filter of system calls works, so that no program can create a user
    namespace.
    """
    code = "import ctypes; raise SystemExit(ctypes.CDLL(None).unshare(0x10000000) == 0)"
    result = _run(way, _Job([sys.executable, "-c", code], "", {}, Limits()), threading.Event())
    return not result.code


@cache
def _way() -> _Way:
    """Return the strongest method of isolation that works here, found by trying all.

    Also removes folders of killed runs. Raises `SandboxError` if no method works.
    """
    remove_leftovers(Path(tempfile.gettempdir()), _PREFIX)
    ways = [_Way("bubblewrap", own_user=True), _Way("bubblewrap")] if shutil.which("bwrap") else []
    ways += [_Way("limits", True, True), _Way("limits", True), _Way("limits", own_user=True)]
    if os.getuid():
        ways = [way for way in ways if not way.own_user] + [_Way("limits")]
    failures = []
    for way in ways:
        try:
            result = _run(
                way, _Job([sys.executable, "-c", ""], "", {}, Limits()), threading.Event()
            )
        except SandboxError as error:
            failures.append(f"{way}: {error}")
        else:
            if not result.code:
                return way
            failures.append(f"{way}: {result}")
    raise SandboxError("\n".join(["no sandbox can be made on this machine", *failures]))


def _run(way: _Way, job: _Job, stop: threading.Event) -> ProgramResult:
    """Run a program until it ends, its time is over, or `stop` is set. Return its result."""
    with _own_folder() as folder, _user(way) as user:
        return _run_in(folder, user, way, job, stop)


def _run_in(
    folder: Path, user: int | None, way: _Way, job: _Job, stop: threading.Event
) -> ProgramResult:
    limits = job.limits
    outer = _bubblewrap(way, limits) if way.kind == "bubblewrap" else []
    note = asdict(limits) | {
        "argv": job.argv,
        "files": dict(job.files),
        "isolated": way.isolated,
        "user": user,
        "processes": limits.processes + way.helpers if way.counts_processes else None,
        "seconds": math.ceil(limits.seconds),
        "parent": os.getpid(),
        "inside": bool(outer),
    }
    with (
        TemporaryFile() as note_file,
        TemporaryFile() as stdin,
        TemporaryFile() as stdout,
        TemporaryFile() as stderr,
    ):
        for file, text in ((note_file, json.dumps(note)), (stdin, job.stdin)):
            file.write(text.encode(errors="replace"))
            file.seek(0)
        if user is not None:
            os.chown(folder, user, user)
        process = subprocess.Popen(
            [*outer, *_ENTER, str(note_file.fileno())],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr if job.keep_stderr else subprocess.DEVNULL,
            pass_fds=[note_file.fileno()],
            start_new_session=True,
            cwd=folder,
            env=_ENVIRONMENT | dict.fromkeys(("HOME", "TMPDIR"), _INSIDE if outer else str(folder)),
        )
        try:
            is_over = not _ends(process.pid, time.monotonic() + limits.seconds, stop)
        finally:  # nobody has waited for the process yet, so its group id is not used again
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        for file in (note_file, stdout, stderr):
            file.seek(0)
        max_bytes = limits.output_kb << 10
        outputs = [file.read(max_bytes + 1) for file in (stdout, stderr)]
        unread = note_file.read().decode()
    shown = [output[:max_bytes].decode(errors="replace") for output in outputs]
    if unread and not is_over:
        reason = shown[1][-300:] if unread[0] == "{" else unread
        raise SandboxError(f"{job.argv[0]} was not started: {reason}")
    is_cut = max(map(len, outputs)) > max_bytes
    ended: Ended = "timeout" if is_over else "output" if is_cut else "exited"
    return ProgramResult(shown[0], shown[1], code if code >= 0 else 128 - code, ended)


@contextmanager
def _own_folder() -> Iterator[Path]:
    """Return a context with a new, empty folder, which is removed at the end.

    If this process is killed, a later one removes the folder.
    """
    parent = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        parent.chmod(0o711)  # so that a separate user can reach its folder
        with hold_lock(parent):
            (parent / "work").mkdir()
            yield parent / "work"
    finally:
        shutil.rmtree(parent, ignore_errors=True)


@contextmanager
def _user(way: _Way) -> Iterator[int | None]:
    """Return a context with a user id that no other sandbox uses. None if programs run as this
    user.

    At the end, the user's processes are killed and its files in shared folders are removed.
    """
    if not way.own_user:
        yield None
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as claim:
        for user in _UIDS:
            with suppress(OSError):
                claim.bind(f"\0{_PREFIX}{user}")  # only one process at a time can hold this name
                break
        try:
            yield user
        finally:
            if way.kind == "limits":
                _remove_traces(user)


def _remove_traces(user: int) -> None:
    """Kill all processes of a user, and remove its files in shared folders."""
    for _ in range(_KILL_ROUNDS):
        if not (processes := _owned(Path("/proc"), user)):
            break
        for process in processes:
            with suppress(OSError, ValueError):
                os.kill(int(process.name), signal.SIGKILL)
        time.sleep(0.01)
    for folder in {*_SHARED_FOLDERS, tempfile.gettempdir()}:
        for path in _owned(Path(folder), user):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _owned(folder: Path, user: int) -> list[Path]:
    """Return the files and folders in `folder` that belong to a user."""
    found = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.stat(follow_symlinks=False).st_uid == user:
                    found.append(Path(entry.path))
    return found


def _ends(pid: int, deadline: float, stop: threading.Event) -> bool:
    """Return True if the process ends before `deadline` and before `stop` is set.

    Its exit status is not read, so that its id is not reused yet.
    """
    descriptor = os.pidfd_open(pid)
    poll = select.poll()
    try:
        poll.register(descriptor, select.POLLIN)
        while not stop.is_set() and (left := deadline - time.monotonic()) > 0:
            if poll.poll(min(_POLL_MS, math.ceil(left * 1000))):
                return True
        return False
    finally:
        os.close(descriptor)


def _bubblewrap(way: _Way, limits: Limits) -> list[str]:
    """Return the bubblewrap command that goes before the program's command.

    The program sees a read-only system, one small writable folder, no network and no other process.
    It is killed when this process ends.
    """
    command = [
        shutil.which("bwrap") or "bwrap",
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
    ]
    command += ["--unshare-cgroup-try", "--die-with-parent", "--new-session"]
    if os.getuid():
        command.append("--unshare-user")
    if way.own_user:
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    for path in _READ_ONLY:
        command += ["--ro-bind-try", path, path]
    command += ["--size", str(limits.file_mb << 20), "--perms", "1777", "--tmpfs", "/tmp"]
    pythons = {Path(sys.base_prefix), Path(sys.base_prefix).resolve(), Path(sys.prefix)}
    for python in sorted(pythons):
        # By default, bubblewrap makes parent folders that only its own user can open.
        for parent in reversed(python.parents):
            command += ["--perms", "0755", "--dir", str(parent)]
        command += ["--ro-bind", str(python), str(python)]
    command += ["--perms", "1777", "--dir", _INSIDE]
    command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--remount-ro", "/"]
    return [*command, "--chdir", _INSIDE, "--"]
