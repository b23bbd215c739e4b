"""A sandbox for programs of a model: no network; limits on time, memory, files and processes.

It uses Bubblewrap if that works on this machine: a read-only file system with one small writable
folder, and no process outlives the program. Otherwise it uses resource limits, in namespaces if the
kernel allows them. `kind` and `weaknesses` report the method and its limits. Linux only. See
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
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from types import MappingProxyType
from typing import Literal

from unstale.envs import EnvError

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
"""One program per core. A program dies with the thread that started it, so threads are kept."""

_UIDS = itertools.cycle(range(61_184 + os.getpid() % 4_096, 65_520))
"""Unused user ids: if this process is root, each program gets a user of its own."""

_INSIDE = "/tmp/work"
"""The empty folder in which a program starts in bubblewrap."""
_LOOK_MS = 50
"""Interval in milliseconds at which a waiting thread checks for cancellation."""


class SandboxError(EnvError):
    """No sandbox can be made, or the program does not exist. A failing program is no error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The resources of a program. Requests for more memory, files or processes fail inside it."""

    seconds: float = 5.0
    """Wall-clock seconds, and CPU seconds of each process, before it is killed."""
    memory_mb: int = 512
    """Address space of each process."""
    file_mb: int = 16
    """Size of each file; with bubblewrap, of all files together."""
    processes: int = 16
    """Simultaneous processes and threads."""
    output_kb: int = 64
    """Size at which stdout is cut off, and stderr."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"limits.{name} must be > 0, got {value}")


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The output and exit code of a program; 128 + n for signal n, as in a shell."""

    stdout: str
    stderr: str
    code: int
    ended: Ended
    """`exited`; `timeout`: killed after its time; `output`: exited, but its output was cut off."""


@dataclass(frozen=True, slots=True)
class _Way:
    """A method of isolation. `isolated`: namespaces without bubblewrap. `own_user`: not as root."""

    kind: Kind
    isolated: bool = False
    own_user: bool = False

    @property
    def counts_processes(self) -> bool:
        """True if the kernel limits processes: it counts by user and namespace, but not for root."""
        return self.own_user or (os.getuid() != 0 and (self.isolated or self.kind == "bubblewrap"))

    @property
    def helpers(self) -> int:
        """Processes of the sandbox that count towards the program's limit."""
        return 2 if self.isolated else int(self.kind == "bubblewrap" and not self.own_user)


@dataclass(frozen=True, slots=True)
class _Job:
    argv: Sequence[str]
    stdin: str
    files: Mapping[str, str]
    limits: Limits


async def run(
    program: str | Sequence[str],
    *,
    stdin: str = "",
    files: Mapping[str, str] = MappingProxyType({}),
    limits: Limits | None = None,
    require: Kind = "limits",
) -> ProgramResult:
    """Run Python code or a command in a new folder with `files`, without environment variables.

    Cancelling the caller kills the program. Raises `ValueError` for `require="bubblewrap"` on a
    machine without it.
    """
    if odd := [name for name in files if name in ("", ".", "..") or "/" in name]:
        raise ValueError(f"a program's files have plain names, got {odd[0]!r}")
    argv = [sys.executable, "-s", "-c", program] if isinstance(program, str) else list(program)
    stop, loop = threading.Event(), asyncio.get_running_loop()
    try:
        way = await loop.run_in_executor(_POOL, _way)
        if require == "bubblewrap" != way.kind:
            raise ValueError(
                "this program is to run in bubblewrap only: bwrap is not installed, or cannot run here"
            )
        return await loop.run_in_executor(
            _POOL, _run, way, _Job(argv, stdin, files, limits or Limits()), stop
        )
    finally:
        stop.set()


def kind() -> Kind:
    """Return the isolation that works on this machine."""
    return _way().kind


def weaknesses() -> str:
    """Return a sentence on what the sandbox of this machine does not stop."""
    way, told = (
        _way(),
        [
            "a program that uses a fault of the kernel",
            "limits.memory_mb of memory in every process",
        ],
    )
    if way.kind == "bubblewrap":
        told.append("reading /usr, this Python and its packages")
    else:
        whose = (
            "open to everybody"
            if way.own_user
            else "of your user, secrets and this run among them,"
        )
        told += [
            f"reading and writing files {whose} and speaking to sockets that are files",
            "any number of files",
        ]
    if way.kind == "limits" and not way.isolated:
        told += ["the network", "processes that leave their group and stay behind"]
        told += (
            [] if way.own_user else ["looking into your user's other processes, and ending them"]
        )
    if not way.counts_processes:
        told.append("any number of processes while it runs")
    return f"not stopped with {way.kind}: {'; '.join(told)}"


@cache
def _way() -> _Way:
    """Return the strongest method that works here, found by trying.

    Without isolation, programs of root must run as another user.
    """
    ways = [_Way("bubblewrap", own_user=True), _Way("bubblewrap")] if shutil.which("bwrap") else []
    ways += [_Way("limits", True, True), _Way("limits", True), _Way("limits", own_user=True)]
    if os.getuid():
        ways = [way for way in ways if not way.own_user] + [_Way("limits")]
    why = []
    for way in ways:
        try:
            tried = _run(way, _Job([sys.executable, "-c", ""], "", {}, Limits()), threading.Event())
        except SandboxError as error:
            why.append(f"{way}: {error}")
        else:
            if not tried.code:
                return way
            why.append(f"{way}: {tried}")
    raise SandboxError("\n".join(["no sandbox can be made on this machine", *why]))


def _run(way: _Way, job: _Job, stop: threading.Event) -> ProgramResult:
    """Run a job until it ends, its time is over, or `stop` is set."""
    limits, user = job.limits, next(_UIDS) if way.own_user else None
    counted = limits.processes + way.helpers if way.counts_processes else None
    outer = _bubblewrap(way, limits) if way.kind == "bubblewrap" else []
    wanted = asdict(limits) | {"argv": job.argv, "files": dict(job.files), "isolated": way.isolated}
    wanted |= {"user": user, "processes": counted, "seconds": math.ceil(limits.seconds)}
    wanted |= {"parent": os.getpid(), "inside": bool(outer)}
    with (
        TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as folder,
        TemporaryFile() as note, TemporaryFile() as words, TemporaryFile() as out, TemporaryFile() as err,
    ):  # fmt: skip
        for file, text in ((note, json.dumps(wanted)), (words, job.stdin)):
            file.write(text.encode(errors="replace"))
            file.seek(0)
        if user is not None:
            os.chown(folder, user, user)
        home = _INSIDE if way.kind == "bubblewrap" else folder
        process = subprocess.Popen(
            [*outer, *_ENTER, str(note.fileno())],
            stdin=words, stdout=out, stderr=err, pass_fds=[note.fileno()], start_new_session=True, cwd=folder,
            env={"PATH": os.defpath, "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
                 "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            over = not _ends(process.pid, time.monotonic() + limits.seconds, stop)
        finally:  # not reaped yet, so that the number of its group is still its own
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        for file in (note, out, err):
            file.seek(0)
        kept = limits.output_kb << 10
        texts = [file.read(kept + 1) for file in (out, err)]
        unread = note.read().decode()
    shown = [text[:kept].decode(errors="replace") for text in texts]
    if unread and not over:
        raise SandboxError(
            f"{job.argv[0]} was not started: {shown[1][-300:] if unread[0] == '{' else unread}"
        )
    ended: Ended = "timeout" if over else "output" if max(map(len, texts)) > kept else "exited"
    return ProgramResult(shown[0], shown[1], code if code >= 0 else 128 - code, ended)


def _ends(pid: int, deadline: float, stop: threading.Event) -> bool:
    """Return True if the process ends before the deadline and before `stop`. Does not reap it."""
    descriptor, poll = os.pidfd_open(pid), select.poll()
    try:
        poll.register(descriptor, select.POLLIN)
        while not stop.is_set() and (left := deadline - time.monotonic()) > 0:
            if poll.poll(min(_LOOK_MS, math.ceil(left * 1000))):
                return True
        return False
    finally:
        os.close(descriptor)


def _bubblewrap(way: _Way, limits: Limits) -> list[str]:
    """Return the command: a read-only system, one small folder, no network, no other process.

    It dies with its parent.
    """
    words = [
        "bwrap",
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
        "--unshare-cgroup-try",
    ]
    words += ["--die-with-parent", "--new-session"] + (["--unshare-user"] if os.getuid() else [])
    words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if way.own_user else []
    for path in (
        "/usr",
        "/bin",
        "/sbin",
        "/lib",
        "/lib64",
        "/etc/alternatives",
        "/etc/ld.so.cache",
    ):
        words += ["--ro-bind-try", path, path]
    words += ["--size", str(limits.file_mb << 20), "--perms", "1777", "--tmpfs", "/tmp"]
    for python in sorted(
        {Path(sys.base_prefix), Path(sys.base_prefix).resolve(), Path(sys.prefix)}
    ):
        for parent in reversed(
            python.parents
        ):  # left to itself, bubblewrap makes them for its own user alone
            words += ["--perms", "0755", "--dir", str(parent)]
        words += ["--ro-bind", str(python), str(python)]
    words += ["--perms", "1777", "--dir", _INSIDE]
    words += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--remount-ro", "/"]
    return [*words, "--chdir", _INSIDE, "--"]
