"""A process of our own at the other end of a socket, and what is said over it: frames of one JSON object and bytes.

A frame is `header length | body length | header | body`. The header is JSON, the body safetensors or empty: nothing
that arrives is ever unpickled.
"""

import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LENGTHS = struct.Struct(">IQ")
_LAST_WORDS = 2000

Header = dict[str, Any]


def pack(header: Header, body: bytes = b"") -> bytes:
    """One frame.

    >>> list(Frames().feed(pack({"op": "resume"}, b"xy")))
    [({'op': 'resume'}, b'xy')]
    """
    text = json.dumps(header, separators=(",", ":")).encode()
    return _LENGTHS.pack(len(text), len(body)) + text + body


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
            body = bytes(self._buffer[start : start + body_size])
            del self._buffer[: start + body_size]
            yield header, body


class Child:
    """A process that runs `main(descriptor, options)` of a module, and our end of the `socket` to it.

    Its threads are set before torch loads there. It has a session of its own and ignores Ctrl-C: only `kill` ends it,
    or the end of this process, which it sees as the end of the socket. Only its own end closes the socket at its side.
    """

    def __init__(self, name: str, module: str, options: Header, *, threads: int) -> None:
        self.name = name
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self.socket, theirs = socket.socketpair()
        program = (
            "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import sys; "
            f"from {module} import main; main(int(sys.argv[1]), sys.argv[2])"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-X", "faulthandler", "-c", program, str(theirs.fileno()), json.dumps(options)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                start_new_session=True,
                env=_environment(threads),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def last_words(self) -> str:
        """Why the process ended. It has hung up, which only its end does, so its exit code is there."""
        code = self._process.wait()
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - _LAST_WORDS))
        output = self._stderr.read().decode(errors="replace").strip()
        reason = f"exit code {code}" if code >= 0 else f"signal {-code}"
        return f"the {self.name} process (pid {self.pid}) ended with {reason}" + (f":\n{output}" if output else "")

    def kill(self) -> None:
        """It has nothing to save."""
        self._process.kill()
        self.socket.close()

    def wait(self) -> None:
        """Until the process is gone, after `kill`."""
        self._process.wait()
        self._stderr.close()


def _environment(threads: int) -> dict[str, str]:
    root = str(Path(__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "4096",
    }
