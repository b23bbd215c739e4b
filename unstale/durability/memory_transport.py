"""Connections in memory between a server and a client of one event loop.

Data arrive in the order in which they were written, after the code that runs now. With sockets, the
operating system would decide when they arrive.
"""

import asyncio
import socket
from typing import Any


class MemoryTransport(asyncio.Transport):
    """One end of a connection. What is written arrives at the protocol of the `peer`.

    A protocol that sets options of the connection's socket gets `listening` in place of this
    socket.
    """

    peer: "MemoryTransport"

    def __init__(
        self, loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol, listening: Any
    ) -> None:
        super().__init__({"socket": listening, "sockname": listening.getsockname()})
        self._loop = loop
        self._protocol = protocol
        self._arrived: list[bytes] = []
        self._has_ended = False
        """True if the peer writes no more."""
        self._is_reading = True
        self._is_closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if data and not self._is_closing:
            self.peer._arrived.append(bytes(data))
            self._loop.call_soon(self.peer._deliver)

    def write_eof(self) -> None:
        self.peer._has_ended = True
        self._loop.call_soon(self.peer._deliver)

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing, because writing never waits."""

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol)
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def is_reading(self) -> bool:
        return self._is_reading and not self._is_closing

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        self._loop.call_soon(self._deliver)

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self.write_eof()
            self._loop.call_soon(self._protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def _deliver(self) -> None:
        """Pass what has arrived to the protocol, as long as it reads."""
        while self._arrived and self.is_reading():
            self._protocol.data_received(self._arrived.pop(0))
        if self._has_ended and self.is_reading() and not self._protocol.eof_received():
            self.close()


def connect(
    loop: asyncio.AbstractEventLoop,
    client: asyncio.Protocol,
    server: asyncio.Protocol,
    listening: socket.socket | Any,
) -> tuple[MemoryTransport, asyncio.Protocol]:
    """Connect the protocols of a client and a server. Return the client's transport and protocol.

    `listening` is the server's socket, of which only the address and the options are used.
    """
    one, other = (MemoryTransport(loop, each, listening) for each in (client, server))
    one.peer, other.peer = other, one
    server.connection_made(other)
    client.connection_made(one)
    return one, client
