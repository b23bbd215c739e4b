"""What the embedded engine and its process say to each other: frames of one JSON object and raw bytes.

A frame is `header length | body length | header | body`. The header is JSON, the body safetensors or empty: nothing
that arrives is ever unpickled.
"""

import json
import struct
from collections.abc import Iterator
from typing import Any

_LENGTHS = struct.Struct(">IQ")

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
