"""The transfer of a context's KV cache from one engine process to another, on any machine.

The sender gathers keys and values from its pages into one contiguous buffer, and writes it to a TCP
connection to the other process. So the size of a page does not limit the rate, and the data do not
pass through the process of the run. The receiver checks that the sender has the key of the run, and
the reverse (HMAC-SHA256 of random numbers of both). The data are not encrypted.
"""

import hmac
import json
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

TIMEOUT_S = 30.0
"""Seconds without progress after which a transfer fails. The receiver then computes the context."""
_MAX_CONNECTIONS = 64
"""Largest number of open connections of a receiver. Further ones wait to be accepted."""
_MAX_HEADER = 1 << 16
_PIECE = 1 << 20
"""Number of bytes that are sent at once."""
_NONCE = 32
_SIZES = struct.Struct(">IQ")
_ANSWER = struct.Struct(">q")


class TransferFailed(ConnectionError):
    """Error: a cache did not arrive, or the other side does not have the key of the run."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A received context: its `header`, and the tokens, keys and values in `body`, in bytes.

    `answer` must be called once with the number of tokens that were stored.
    """

    header: dict[str, Any]
    body: NDArray[np.uint8]
    _answers: "SimpleQueue[int]" = field(default_factory=SimpleQueue)

    def answer(self, tokens: int) -> None:
        self._answers.put(tokens)

    def wait(self) -> int:
        """Return the number that `answer` gets. Raises TransferFailed after `TIMEOUT_S` seconds."""
        try:
            return self._answers.get(timeout=TIMEOUT_S)
        except Empty:
            raise TransferFailed("the engine did not store the cache in time") from None


class CacheReceiver:
    """A listening socket for caches, and the threads that read them.

    `host` is the address to listen on, `key` the key of the run, and `max_bytes` the largest size
    of a body. When a cache has arrived, `wake` becomes readable. `take` then returns the cache.
    """

    def __init__(self, host: str, key: str, max_bytes: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        self.wake, self._waker = socket.socketpair()
        self._key = key
        self._max_bytes = max_bytes
        self._arrived: SimpleQueue[Arrived] = SimpleQueue()
        self._places = threading.Semaphore(_MAX_CONNECTIONS)
        threading.Thread(target=self._accept, daemon=True).start()

    def take(self) -> Arrived:
        """Return the next cache that has arrived. Wait for it if there is none."""
        self.wake.recv(1)
        return self._arrived.get()

    def close(self) -> None:
        """Stop listening. Connections that are open end by themselves."""
        with suppress(OSError):  # it wakes the thread that accepts connections
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            self._places.acquire()
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the listener was closed
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(TIMEOUT_S)
                _admit(connection, self._key)
                arrived = Arrived(*_read(connection, self._max_bytes))
                self._arrived.put(arrived)
                self._waker.send(b"\0")
                connection.sendall(_ANSWER.pack(arrived.wait()))
        except (OSError, ValueError):
            pass  # the sender gets no answer, and reports it
        finally:
            self._places.release()


def send(address: str, key: str, header: dict[str, Any], parts: Sequence[NDArray[Any]]) -> int:
    """Send a cache to the receiver at `address` (host:port). Return the number of stored tokens.

    The bytes of `parts`, arrays of one dimension, are sent in order as one body. Raises
    TransferFailed if the receiver cannot be reached, does not have the `key`, or does not answer.
    """
    host, _, port = address.rpartition(":")
    text = json.dumps(header).encode()
    views: list[memoryview] = [part.view(np.uint8).data for part in parts]
    try:
        with socket.create_connection((host, int(port)), TIMEOUT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _introduce(connection, key)
            size = sum(view.nbytes for view in views)
            connection.sendall(_SIZES.pack(len(text), size) + text)
            for view in views:
                for at in range(0, view.nbytes, _PIECE):  # the time limit is of each call
                    connection.sendall(view[at : at + _PIECE])
            (tokens,) = _ANSWER.unpack(_exactly(connection, _ANSWER.size))
    except OSError as error:
        raise TransferFailed(f"no cache could be sent to {address}: {error}") from error
    return int(tokens)


def _admit(connection: socket.socket, key: str) -> None:
    """Check that the sender has the key, and prove to it that this process has it."""
    own = secrets.token_bytes(_NONCE)
    connection.sendall(own)
    theirs = _exactly(connection, _NONCE)
    if not hmac.compare_digest(_exactly(connection, _NONCE), _proof(key, b"sender", own, theirs)):
        raise TransferFailed("the sender does not have the key of this run")
    connection.sendall(_proof(key, b"receiver", own, theirs))


def _introduce(connection: socket.socket, key: str) -> None:
    """Prove to the receiver that this process has the key, and check that the receiver has it."""
    theirs = _exactly(connection, _NONCE)
    own = secrets.token_bytes(_NONCE)
    connection.sendall(own + _proof(key, b"sender", theirs, own))
    proof = _exactly(connection, _NONCE)
    if not hmac.compare_digest(proof, _proof(key, b"receiver", theirs, own)):
        raise TransferFailed("the receiver does not have the key of this run")


def _proof(key: str, role: bytes, receiver: bytes, sender: bytes) -> bytes:
    return hmac.digest(key.encode(), role + receiver + sender, "sha256")


def _read(connection: socket.socket, max_bytes: int) -> tuple[dict[str, Any], NDArray[np.uint8]]:
    """Return the header and the body of a cache, read into memory that is allocated once."""
    header_size, size = _SIZES.unpack(_exactly(connection, _SIZES.size))
    if header_size > _MAX_HEADER:
        raise TransferFailed(
            f"a header of {header_size:,} bytes; at most {_MAX_HEADER:,} are allowed"
        )
    if size > max_bytes:
        raise TransferFailed(f"a cache of {size:,} bytes; at most {max_bytes:,} are allowed")
    header = json.loads(_exactly(connection, header_size))
    body = np.empty(size, np.uint8)
    _fill(connection, body.data)
    return header, body


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _fill(connection, memoryview(data))
    return bytes(data)


def _fill(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view)
        if not count:
            raise TransferFailed("the other side closed the connection")
        view = view[count:]
