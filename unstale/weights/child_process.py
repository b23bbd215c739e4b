"""A process of our own at the other end of a socket, and what is said over it: frames of one JSON object and bytes.

A frame is `header length | body length | header | body`. The header is JSON, the body safetensors or empty: nothing
that arrives is ever unpickled.
"""

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
from pathlib import Path
from typing import Any

_LENGTHS = struct.Struct(">IQ")
_LAST_WORDS = 2000
_READ_BYTES = 1 << 16

BEAT_S = 0.5
"""How often a process says that it runs, and how often whoever waits for it should look."""
FROZEN_S = 4.0
"""Silence after which it is taken for frozen."""
_START_S = 60.0
"""The same before its first beat, which an interpreter that is read from a slow disk may be long in giving."""

_PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.set_wakeup_fd(int(sys.argv[2]), warn_on_full_buffer=False)
signal.signal(signal.SIGALRM, lambda *_: None)
signal.siginterrupt(signal.SIGALRM, False)
signal.setitimer(signal.ITIMER_REAL, 0.001, {beat_s})
from {module} import main
main(int(sys.argv[1]), sys.argv[3])
"""
"""A timer's signal makes the interpreter write a byte from its own handler, whatever holds the lock of its threads."""

Bytes = bytes | memoryview
Header = dict[str, Any]


class ChildFrozen(RuntimeError):
    """A process runs no more, though it has not ended: stopped, or starved by its machine. It has been killed."""


def pack(header: Header, body: bytes = b"") -> bytes:
    """One frame.

    >>> list(Frames().feed(pack({"op": "resume"}, b"xy")))
    [({'op': 'resume'}, b'xy')]
    """
    return b"".join(frame(header, [body]))


def frame(header: Header, body: Sequence[Bytes]) -> list[Bytes]:
    """The parts of one frame, those of its body as they lie."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return [_LENGTHS.pack(len(text), sum(map(len, body))) + text, *body]


class Frames:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Header, bytes]]:
        """Every frame that `data` completes."""
        self._buffer += data
        while len(self._buffer) >= _LENGTHS.size:
            header_size, body_size = _LENGTHS.unpack_from(self._buffer)
            start = _LENGTHS.size + header_size
            if len(self._buffer) < start + body_size:
                return
            header = json.loads(self._buffer[_LENGTHS.size : start])
            with memoryview(self._buffer) as read:
                body = bytes(read[start : start + body_size])
            del self._buffer[: start + body_size]
            yield header, body


class Child:
    """A process that runs `main(descriptor, options)` of a module, and our end of the `socket` to it.

    Its threads are set before torch loads there. It has a session of its own and ignores Ctrl-C: only `kill` ends it,
    or the end of this process, which it sees as the end of the socket. Only its own end closes the socket at its side.
    From its first moment it beats, every `BEAT_S`, also while it computes; `check` listens.
    """

    def __init__(self, name: str, module: str, options: Header, *, threads: int) -> None:
        self.name = name
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self.socket, theirs = socket.socketpair()
        beats, beat = os.pipe()
        os.set_blocking(beats, False)
        os.set_blocking(beat, False)
        self._beats = os.fdopen(beats, "rb", buffering=0)
        self._patience_s = _START_S
        self._silent_s = 0.0
        self._looked = time.monotonic()
        program = _PROGRAM.format(beat_s=BEAT_S, module=module)
        arguments = [str(theirs.fileno()), str(beat), json.dumps(options)]
        with theirs, os.fdopen(beat, "wb"):
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-X", "faulthandler", "-c", program, *arguments],
                pass_fds=[theirs.fileno(), beat],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                start_new_session=True,
                env=_environment(threads),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Kill the process and raise `ChildFrozen` if it has been silent for `FROZEN_S`. To be called every `BEAT_S`.

        Silence counts only while somebody looks: a pause of this process, or of the whole machine, is nobody's fault.
        """
        now = time.monotonic()
        if self._beats.read(_READ_BYTES):
            self._patience_s, self._silent_s = FROZEN_S, 0.0
        else:
            self._silent_s += min(now - self._looked, BEAT_S)
        self._looked = now
        if self._silent_s >= self._patience_s:
            self._process.kill()
            raise ChildFrozen(
                f"the {self.name} process (pid {self.pid}) did not answer for {self._silent_s:.0f} s"
            )

    def recv(self, size: int) -> bytes:
        """What has arrived, once something has. Empty at the end of the process. Raises `ChildFrozen`."""
        while not self._ready(select.POLLIN):
            self.check()
        try:
            return self.socket.recv(size)
        except ConnectionResetError:
            return b""

    def sendall(self, data: bytes | memoryview) -> None:
        """Raises `ChildFrozen`, or BrokenPipeError or ConnectionResetError at the end of the process."""
        rest = memoryview(data)
        while rest:
            if self._ready(select.POLLOUT):
                rest = rest[self.socket.send(rest, socket.MSG_DONTWAIT) :]
            else:
                self.check()

    def _ready(self, event: int) -> bool:
        """Wait for it until the next look is due."""
        poll = select.poll()
        poll.register(self.socket, event)
        return bool(poll.poll(1000 * BEAT_S))

    def last_words(self) -> str:
        """Why the process ended. It has hung up, which only its end does, so its exit code is there."""
        code = self._process.wait()
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - _LAST_WORDS))
        output = self._stderr.read().decode(errors="replace").strip()
        reason = f"exit code {code}" if code >= 0 else f"signal {-code}"
        return f"the {self.name} process (pid {self.pid}) ended with {reason}" + (
            f":\n{output}" if output else ""
        )

    def kill(self) -> None:
        """It has nothing to save."""
        self._process.kill()
        self.socket.close()
        self._beats.close()

    def wait(self) -> None:
        """Until the process is gone, after `kill`."""
        self._process.wait()
        self._stderr.close()


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _environment(threads: int) -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        # Kernels compiled for a shape of bfloat16 matrices, several hundred kB each: both caches hold a thousand else.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
        "LRU_CACHE_CAPACITY": "256",
    }
