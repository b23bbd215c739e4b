"""A child process, and the messages exchanged with it over a socket.

A message is one frame: `header length | body length | header | body`. The header is JSON. The body
is empty or in safetensors format. No data is unpickled, because that could run code.
"""

import atexit
import json
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

_LENGTHS = struct.Struct(">IQ")
_SIZE = struct.Struct(">I")
_ALIGNMENT = 16
"""A message's body starts at a multiple of this many bytes, so that tensors can use its memory."""
_LAST_WORDS = 2000
_READ_BYTES = 1 << 16

BEAT_S = 0.5
"""Seconds between heartbeats of a child process, and between checks for them by its parent."""
FROZEN_S = 4.0
"""Seconds without a heartbeat after which a child process is treated as frozen."""
_START_S = 60.0
"""Longest time in seconds until a child's first heartbeat. Python may start slowly."""
_EXIT_S = 5.0
"""Longest time in seconds to wait for the end of a child that has closed its socket, before it is
killed. The wait may block the event loop, but a child normally ends in less than 1 ms.
"""

_PROGRAM = """
import gc, os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.set_wakeup_fd(int(sys.argv[2]), warn_on_full_buffer=False)
parent = int(sys.argv[3])
signal.signal(signal.SIGALRM, lambda *_: os.getppid() == parent or os._exit(1))
signal.siginterrupt(signal.SIGALRM, False)
signal.setitimer(signal.ITIMER_REAL, 0.001, {beat_s})
gc.disable()
from {module} import main
gc.freeze()
gc.enable()
from unstale.weights.child_process import receive_options
if options := receive_options(int(sys.argv[1])):
    main(int(sys.argv[1]), options)
"""
"""The program of the child process. A timer signal writes the heartbeats through Python's C
handler, even while other code holds the GIL. The signal's Python handler ends the process if its
parent, whose process ID is an argument, has ended. Garbage collection is off during the imports,
which create little garbage.
"""

Bytes = bytes | memoryview
Header = dict[str, Any]


class ChildFrozen(RuntimeError):
    """Error: a child process sent no heartbeat, because it was stopped or got no CPU time.

    The child process has been killed.
    """


def frame(header: Header, body: Sequence[Bytes] = ()) -> list[Bytes]:
    """Return one message as byte strings to be sent in order. The parts of `body` are not copied.

    >>> list(Frames().feed(b"".join(frame({"op": "resume"}, [b"xy"]))))
    [({'op': 'resume'}, bytearray(b'xy'))]
    """
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTHS.size + len(text)) % _ALIGNMENT)
    return [_LENGTHS.pack(len(text), sum(map(len, body))) + text, *body]


class Frames:
    """A parser that divides a stream of bytes into messages.

    `max_bytes` is the largest allowed size of a message, None for no limit.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self._buffer = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> Iterator[tuple[Header, bytearray]]:
        """Add `data` to the stream. Yield the header and body of every message that is complete
        with it.

        Raises ValueError for a message that is too long, or whose header is not JSON.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTHS.size:
            header_size, body_size = _LENGTHS.unpack_from(self._buffer)
            start = _LENGTHS.size + header_size
            if self._max_bytes is not None and start + body_size > self._max_bytes:
                raise ValueError(
                    f"a message of {start + body_size:,} bytes; at most {self._max_bytes:,} are "
                    "allowed"
                )
            if len(self._buffer) < start + body_size:
                return
            header = json.loads(self._buffer[_LENGTHS.size : start])
            if not body_size:
                del self._buffer[:start]
                yield header, bytearray()
                continue
            rest = self._buffer[start + body_size :]
            body = self._buffer
            self._buffer = rest
            del body[start + body_size :]
            del body[:start]  # moves the start of the array: the body is not copied
            yield header, body


class _Process:
    """A new child process, which imports its module and then waits for its options.

    Raises OSError if it cannot be created.
    """

    def __init__(self, module: str, *, threads: int, gpus: Sequence[str]) -> None:
        self.kind = (threads, tuple(gpus))
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self.socket, child_socket = socket.socketpair()
        beats, beat = os.pipe()
        os.set_blocking(beats, False)
        os.set_blocking(beat, False)
        self.beats = os.fdopen(beats, "rb", buffering=0)
        program = _PROGRAM.format(beat_s=BEAT_S, module=module)
        arguments = [str(child_socket.fileno()), str(beat), str(os.getpid())]
        try:
            with child_socket, os.fdopen(beat, "wb"):
                self.popen = subprocess.Popen(
                    [sys.executable, "-P", "-X", "faulthandler", "-c", program, *arguments],
                    pass_fds=[child_socket.fileno(), beat],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self.stderr,
                    start_new_session=True,
                    env=_environment(threads) | visible_gpus(gpus),
                )
        except OSError:
            self._close_files()
            raise

    def begin(self, options: Header) -> None:
        """Send the options to the process.

        No error is raised if the process has ended. The next read from its socket detects that.
        """
        text = json.dumps(options).encode()
        with suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(_SIZE.pack(len(text)) + text)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self._close_files()

    def _close_files(self) -> None:
        for file in (self.socket, self.beats, self.stderr):
            file.close()


def receive_options(descriptor: int) -> str:
    """Wait for the options that the parent's `Child` sends first, and return them as JSON text.

    `descriptor` is the file descriptor of the socket, which stays open. Return "" if the parent has
    ended.
    """
    connection = socket.socket(fileno=descriptor)
    try:
        size = connection.recv(_SIZE.size, socket.MSG_WAITALL)
        if len(size) < _SIZE.size:
            return ""
        (length,) = _SIZE.unpack(size)
        return connection.recv(length, socket.MSG_WAITALL).decode()
    finally:
        connection.detach()  # the descriptor stays open


_early: dict[str, list[_Process]] = {}
"""Child processes that `start_early` has started and that no `Child` has taken yet, by module."""


def start_early(module: str, *, threads: int, gpus: Sequence[str] = ()) -> None:
    """Start the process for the next `Child` with the same arguments, and return without waiting.

    So `module` is imported before the `Child` needs it. The process is killed at the end of this
    program, or if the next `Child` of the module has other arguments.
    """
    if not _early:
        atexit.register(_end_early)
    _early.setdefault(module, []).append(_Process(module, threads=threads, gpus=gpus))


def _end_early() -> None:
    while _early:
        for process in _early.popitem()[1]:
            process.kill()


def _started(module: str, *, threads: int, gpus: Sequence[str]) -> _Process:
    """Return a process that `start_early` started with the same arguments, or a new process."""
    waiting = _early.get(module, [])
    while waiting:
        process = waiting.pop(0)
        if process.kind == (threads, tuple(gpus)):
            return process
        process.kill()
    return _Process(module, threads=threads, gpus=gpus)


class Child:
    """A child process that calls `main(descriptor, options)` of a module.

    `socket` is connected to the child. The child ignores Ctrl-C and SIGTERM, which a cluster may
    send to every process. It ends by `kill`, or when this process ends and the socket closes. It
    sends a heartbeat every `BEAT_S` seconds, even while it computes. `check` reads the heartbeats.
    """

    def __init__(
        self, name: str, module: str, options: Header, *, threads: int, gpus: Sequence[str] = ()
    ) -> None:
        """Start the process with `threads` CPU threads, unless `start_early` has started it.

        `name` appears in error messages. The process sees only the GPUs `gpus`. If there are none,
        it sees those of this process. Its `main` receives the options as JSON text.
        """
        self.name = name
        process = _started(module, threads=threads, gpus=gpus)
        process.begin(options)
        self.socket = process.socket
        self._process = process.popen
        self._stderr = process.stderr
        self._beats = process.beats
        self._max_silent_s = _START_S
        self._silent_s = 0.0
        self._last_check = time.monotonic()

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Kill the process and raise `ChildFrozen` if it sent no heartbeat for `FROZEN_S` seconds.

        Call this every `BEAT_S` seconds. After a longer time without a call, only `BEAT_S` seconds
        count, because then this process or the machine was probably paused too. The first heartbeat
        may take `_START_S` seconds.
        """
        now = time.monotonic()
        if self._beats.read(_READ_BYTES):
            self._max_silent_s = FROZEN_S
            self._silent_s = 0.0
        else:
            self._silent_s += min(now - self._last_check, BEAT_S)
        self._last_check = now
        if self._silent_s >= self._max_silent_s:
            self._process.kill()
            raise ChildFrozen(
                f"the {self.name} process (pid {self.pid}) did not answer "
                f"for {self._silent_s:.0f} s"
            )

    def recv(self, size: int) -> bytes:
        """Wait for bytes from the process. Return at most `size` bytes.

        Return b"" if the process has ended. Raises `ChildFrozen` if the heartbeat stops.
        """
        while not self._ready(select.POLLIN):
            self.check()
        try:
            return self.socket.recv(size)
        except ConnectionResetError:
            return b""

    def sendall(self, data: bytes | memoryview) -> None:
        """Send all bytes to the process.

        Raises `ChildFrozen` if the heartbeat stops. Raises BrokenPipeError or ConnectionResetError
        if the process has ended.
        """
        unsent = memoryview(data)
        while unsent:
            if self._ready(select.POLLOUT):
                unsent = unsent[self.socket.send(unsent, socket.MSG_DONTWAIT) :]
            else:
                self.check()

    def _ready(self, event: int) -> bool:
        """Wait up to `BEAT_S` seconds for an event of `select.poll`. Return True if it came."""
        poll = select.poll()
        poll.register(self.socket, event)
        return bool(poll.poll(1000 * BEAT_S))

    def last_words(self) -> str:
        """Return a message with the exit code of the ended process and the end of its stderr.

        Call this after the process closed its socket. The process is killed if it does not end
        within `_EXIT_S` seconds.
        """
        try:
            code = self._process.wait(_EXIT_S)
        except TimeoutExpired:
            self._process.kill()
            self._process.wait()
            end = f"closed its connection, did not end within {_EXIT_S:g} s and was killed"
        else:
            end = f"ended with exit code {code}" if code >= 0 else f"ended with signal {-code}"
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - _LAST_WORDS))
        output = self._stderr.read().decode(errors="replace").strip()
        return f"the {self.name} process (pid {self.pid}) {end}" + (
            f":\n{output}" if output else ""
        )

    def kill(self) -> None:
        """Kill the process at once, and close the socket."""
        self._process.kill()
        self.socket.close()
        self._beats.close()

    def wait(self) -> None:
        """Wait for the end of the process. Call `kill` first."""
        self._process.wait()
        self._stderr.close()


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible_gpus(gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment variable that restricts a child process to the GPUs `gpus`.

    Return an empty dict if `gpus` is empty. The child process then sees all GPUs of this process.
    """
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}


def _environment(threads: int) -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        # Each shape of a cached bfloat16 kernel takes several hundred kB, and 1024 are cached by
        # default.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
        "LRU_CACHE_CAPACITY": "256",
    }
