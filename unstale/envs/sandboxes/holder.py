"""The process that holds the kernel namespaces of one terminal sandbox, and runs its commands.

`namespaces.py` starts this file in a Python interpreter without other modules. The process reads
requests from a socket: a line of JSON, then `size` bytes. It answers each in the same form, and
ends when the socket is closed.

After the build, the sandbox's root folder is read-only. The agent can write only to folders beside
those of the system, such as its working directory. All processes of a phase (build, agent's turn,
tests) share a namespace of process ids, which ends with the phase. The holder is outside of this
namespace, so that no command can reach it.
"""

import ctypes
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any, Literal, NoReturn

_SANDBOXED: Any = ModuleType("sandboxed")
"""The module `sandboxed.py`, without its package, whose import would take a second."""
SourceFileLoader(
    "sandboxed", os.path.join(os.path.dirname(__file__), "..", "sandboxed.py")
).exec_module(_SANDBOXED)
_call, _filter = _SANDBOXED._call, _SANDBOXED._filter_system_calls

_NEW_PID, _NEW_ALL = 0x20000000, 0x7C020000
"""Flags for new namespaces: only process ids, or also users, mounts, network, IPC and host name."""
_BIND, _REMOUNT, _RECURSIVE, _PRIVATE = 1 << 12, 1 << 5, 1 << 14, 1 << 18
_READ_ONLY, _SAFE, _DETACH = 1, 6, 2
"""Flags for mounts. `_SAFE` ignores set-user-id bits and device files."""
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR, _AT_CWD, _AT_RECURSIVE = 442, -100, 0x8000
_PDEATHSIG, _DUMPABLE, _DROP_CAPABILITY, _NO_NEW_PRIVS = 1, 4, 24, 38
_OUTER_USER = 61_183
"""If this process is root: user id that the sandbox's root has outside of it."""
_SYSTEM = {"bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32"}
_SYSTEM |= {"logs", "proc", "run", "sbin", "sys", "tests", "usr"}
"""Folders of the root that are read-only during the agent's turn."""
_STICKY = ("tmp", "var/tmp", "dev/shm")
_OPEN = ("app", "home", "opt", "root", "srv", "logs/agent", "logs/artifacts", *_STICKY)
_CLOSED = ("logs/verifier", "proc", "sys", "tests")
_DEVICES = ("full", "null", "random", "urandom", "zero")
_ETC = {
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n",
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534::/:/bin/false\n",
}
_BASES = ("/mnt", "/media", "/srv", "/tmp")
_FLOOD = 4 << 20
"""Number of bytes of output after which a command is killed."""
_MAX_REWARD = 1 << 16
_MAX_DESCRIPTORS = 256

Row = Mapping[str, Any]


def main(descriptor: int) -> NoReturn:
    """Make the sandbox that the first request describes. Then answer requests until the socket
    closes.
    """
    stream = socket.socket(fileno=descriptor).makefile("rwb")
    holder = None
    while line := stream.readline():
        request = json.loads(line)
        payload = stream.read(request["size"])
        answer: dict[str, Any] = {}
        try:
            if holder is None:
                holder = Holder(descriptor, request)
            else:
                answer = getattr(holder, request["op"])(request, payload)
        except OSError as error:
            answer = {"error": str(error)}
        output = answer.pop("output", b"")
        stream.write(json.dumps({**answer, "size": len(output)}).encode() + b"\n" + output)
        stream.flush()
    os._exit(0)


class Holder:
    """The sandbox. Each public method answers the requests of its name."""

    def __init__(self, connection: int, request: Row) -> None:
        self._connection = connection
        self._options = request
        self._init = 0
        """Id of the first process of the current phase. 0 between phases."""
        _enter_namespaces()
        _call("prctl", _DUMPABLE, 0)  # later, since it would forbid to write the maps of users
        _call("mount", None, b"/", None, _RECURSIVE | _PRIVATE, None)
        _make_root(request)
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        os.umask(0o022)
        for name in _OPEN:
            os.makedirs(f"/{name}", exist_ok=True)
        for name in _STICKY:
            os.chmod(f"/{name}", 0o1777)

    def put(self, request: Row, payload: bytes) -> dict[str, Any]:
        """Make the request's folders, and write its files, each with a path, a mode and a size in
        bytes.

        `payload` is the contents of all files, one after the other.
        """
        at = 0
        for path in request["folders"]:
            os.makedirs(path, exist_ok=True)
        for path, mode, size in request["files"]:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(payload[at : at + size])
            os.chmod(path, mode)
            at += size
        return {}

    def seal(self, request: Row, payload: bytes) -> dict[str, Any]:
        """End the build phase: kill its processes, and protect the system from the agent.

        The root folder becomes read-only. The agent can then write only to folders that the build
        made beside those of the system (`_SYSTEM`), and to folders for its logs and artifacts.
        """
        self.end(request, payload)
        system = {*_SYSTEM, *(target.split("/")[1] for _, target in self._options["binds"])}
        own = [name for name in os.listdir("/") if name not in system and _is_folder(f"/{name}")]
        for name in [*own, "logs/agent", "logs/artifacts", "dev/shm"]:
            path = f"/{name}".encode()
            _call("mount", path, path, None, _BIND | _RECURSIVE, None)
        _call("mount", None, b"/", None, _REMOUNT | _BIND | _READ_ONLY | _SAFE, None)
        return {}

    def end(self, request: Row, payload: bytes) -> dict[str, Any]:
        """End the phase: kill all its processes, and wait until none is left."""
        if self._init:
            os.kill(self._init, signal.SIGKILL)
            os.waitpid(self._init, 0)
            self._init = 0
            if os.path.ismount("/proc"):
                _call("umount2", b"/proc", _DETACH)
            _call("setns", os.pidfd_open(os.getpid()), _NEW_PID)
        return {}

    def add_tests(self, request: Row, payload: bytes) -> dict[str, Any]:
        """Write the tests into a new file system, and mount another one for the reward file.

        Both cover folders that were read-only for the agent, so nothing that it wrote is left in
        them.
        """
        if self._init and request["alone"]:
            raise OSError("processes of the agent's turn are left")
        for path in ("/tests", "/logs/verifier"):
            _mount_memory(path, self._options["storage_mb"])
        return self.put(request, payload)

    def rewards(self, request: Row, payload: bytes) -> dict[str, Any]:
        """End the tests. Return the text of the first reward file that exists.

        The text is empty if no file exists, or if the first one is not a plain file.
        """
        self.end(request, payload)
        path = next(filter(os.path.lexists, request["paths"]), None)
        return {"text": _read_reward(path) if path else ""}

    def run(self, request: Row, payload: bytes) -> dict[str, Any]:
        """Run a command. Return its output, its exit code and how it ended."""
        if not self._init:
            self._start_phase()
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            _become(request, self._options["limits"], writing)
        os.close(writing)
        process = os.pidfd_open(child)
        limits = (request["seconds"], request["output_kb"] << 10)
        output, ended = watch(process, reading, *limits, self._connection)
        if not select.select([process], [], [], 0)[0]:  # its id is not used again yet
            os.killpg(child, signal.SIGKILL)
        os.close(process)
        os.close(reading)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return {"code": code if code >= 0 else 128 - code, "ended": ended, "output": output}

    def _start_phase(self) -> None:
        """Fork the first process of a new namespace of process ids.

        It keeps its capabilities, so that no command can trace it. Commands are forked into the
        same namespace.
        """
        _call("unshare", _NEW_PID)
        reading, writing = os.pipe()
        self._init = os.fork()
        if self._init:
            os.close(writing)
            os.read(reading, 1)  # returns when the child has closed its end
            os.close(reading)
            return
        _call("prctl", _PDEATHSIG, signal.SIGKILL)
        _call("prctl", _DUMPABLE, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that orphans do not stay as zombies
        with suppress(OSError):  # where parts of /proc are hidden, a new one is refused
            _call("mount", b"proc", b"/proc", b"proc", _SAFE, None)
        os.closerange(0, _MAX_DESCRIPTORS)
        while True:
            signal.pause()


def _become(request: Row, limits: Mapping[str, int], output: int) -> NoReturn:
    """Replace this process by a command, without capabilities and with limits."""
    try:
        os.setsid()
        _call("prctl", _PDEATHSIG, signal.SIGKILL)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.closerange(3, _MAX_DESCRIPTORS)
        os.chdir(request["folder"])
        for name, value in limits.items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
        _call("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)
        libc, number = ctypes.CDLL(None), 0
        while not libc.prctl(_DROP_CAPABILITY, number, 0, 0, 0):
            number += 1
        _filter(os.uname().machine, keep_group=False)
        os.execvpe(request["argv"][0], request["argv"], request["env"])
    except OSError as error:
        os.write(2, f"{request['argv'][0]} was not started: {error}\n".encode())
    finally:
        os._exit(127)


def watch(
    process: int, reading: int, seconds: float, most: int, connection: int | None = None
) -> tuple[bytes, Literal["exited", "timeout", "output"]]:
    """Return the first `most` bytes of a command's output when the command ends, and how it ended.

    Arguments: a descriptor of its process, the pipe of its output, and its limit in seconds. This
    process ends if the other side of `connection` is closed.
    """
    os.set_blocking(reading, False)
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.register(reading, select.POLLIN)
    if connection is not None:
        poll.register(connection, select.POLLRDHUP)
    deadline = time.monotonic() + seconds
    kept, size = b"", 0
    while size <= _FLOOD:
        left = deadline - time.monotonic()
        if left <= 0:
            return kept, "timeout"
        ready = {descriptor for descriptor, _ in poll.poll(left * 1000 + 1)}
        if connection in ready:
            os._exit(0)  # the run has ended
        data: bytes | None = b"."
        while data and size <= _FLOOD:
            data = _read(reading)
            kept += (data or b"")[: max(0, most - len(kept))]
            size += len(data or b"")
        if process in ready:
            break
        if data == b"" and reading in ready:
            poll.unregister(reading)  # the command has closed its output
    return kept, "output" if size > most else "exited"


def _read(reading: int) -> bytes | None:
    """Return the data in a pipe, empty at the pipe's end. None if there is none yet."""
    try:
        return os.read(reading, 1 << 16)
    except BlockingIOError:
        return None


def _read_reward(path: str) -> str:
    with suppress(OSError):  # a link
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return os.read(descriptor, _MAX_REWARD).decode(errors="replace")
    return ""


def _enter_namespaces() -> None:
    """Enter new namespaces, in which this process's user is root and has no rights of root outside.

    If this process is root, files and processes of the sandbox belong to `_OUTER_USER` outside, and
    the real root is user 1 inside.
    """
    holder, user, group = os.getpid(), os.getuid(), os.getgid()
    reading, writing = os.pipe()
    writer = os.fork()
    if not writer:  # the maps must be written from outside
        try:
            os.read(reading, 1)
            for kind, own in (("uid", user), ("gid", group)):
                if user and kind == "gid":
                    _write(f"/proc/{holder}/setgroups", "deny")
                lines = f"0 {own} 1" if user else f"0 {_OUTER_USER} 1\n1 {own} 1"
                _write(f"/proc/{holder}/{kind}_map", lines)
        except OSError:
            os._exit(1)
        os._exit(0)
    try:
        _call("unshare", _NEW_ALL)
    finally:
        os.write(writing, b".")
        status = os.waitpid(writer, 0)[1]
    if status:
        raise OSError("the user ids of a new namespace cannot be set")
    if not user:
        os.setgroups([])
    if child := os.fork():  # the first process that is in the new namespace of process ids
        os.waitpid(child, 0)
        os._exit(0)
    _call("prctl", _PDEATHSIG, signal.SIGKILL)


def _make_root(options: Row) -> None:
    """Make a new root in memory, with this machine's programs read-only, and enter it."""
    base = next(path for path in _BASES if os.path.isdir(path))
    _mount_memory(base, options["storage_mb"])
    for name in _CLOSED:
        os.makedirs(f"{base}/{name}")
    for source, target in options["binds"]:
        if os.path.islink(source) and source == target:
            os.symlink(os.readlink(source), base + target)
        elif os.path.exists(source):
            _bind(source, base + target, _READ_ONLY | _SAFE)
    for name in _DEVICES:
        _bind(f"/dev/{name}", f"{base}/dev/{name}", 2)
    os.makedirs(f"{base}/etc", exist_ok=True)
    for name, text in _ETC.items():
        _write(f"{base}/etc/{name}", text)
    os.mkdir(f"{base}/.old")
    path = base.encode()
    _call("syscall", _PIVOT_ROOT[os.uname().machine], path, path + b"/.old")
    os.chdir("/")
    _call("umount2", b"/.old", _DETACH)
    os.rmdir("/.old")


def _mount_memory(path: str, size_mb: int) -> None:
    options = f"size={size_mb}m,nr_inodes={size_mb * 256},mode=755,uid=0,gid=0"
    _call("mount", b"tmpfs", path.encode(), b"tmpfs", _SAFE, options.encode())


def _bind(source: str, target: str, attributes: int) -> None:
    """Mount a file or folder of this machine in the sandbox. `attributes` are flags of the
    mount.
    """
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        _write(target, "")
    where = target.encode()
    _call("mount", source.encode(), where, None, _BIND | _RECURSIVE, None)
    changes = ctypes.create_string_buffer(struct.pack("QQQQ", attributes, 0, 0, 0))
    _call("syscall", _MOUNT_SETATTR, _AT_CWD, where, _AT_RECURSIVE, changes, 32)


def _is_folder(path: str) -> bool:
    return stat.S_ISDIR(os.lstat(path).st_mode)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    main(int(sys.argv[1]))
