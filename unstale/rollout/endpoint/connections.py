"""Limits on a server's connections: their number, and the time until a request is complete.

A secret token admits a request: the endpoint's is in the header `Authorization` or `x-api-key`,
the dashboard's in a cookie. Connections that have not sent it are limited in number and time. So
they cannot use up the file descriptors that a run needs for its journal, engines and checkpoints,
or lock out a user.
"""

import asyncio
import hmac
import json
import logging
import resource
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from unstale.rollout.endpoint.schemas import Refused

HEAD_TIMEOUT_S = 10.0
"""Seconds until the head of a request must be complete, and until a new connection must have sent
the secret token.
"""
MAX_CONNECTIONS = 4096
MAX_STRANGERS = 256
RESERVED_DESCRIPTORS = 256
"""Number of file descriptors that connections leave to the run. If the process may open fewer than
1024 files, a quarter of that limit is left instead.
"""

BACKLOG = 512
ACCEPTED_AT_ONCE = 8
"""Number of connections accepted before the limit on connections is checked. asyncio would accept
all that wait, even beyond the limit.
"""

Admits = Callable[[Mapping[str, Any]], bool]
"""A function that returns True if the request with this ASGI scope has the secret token."""


class LimitedServer(uvicorn.Server):
    """A uvicorn server that limits connections without the secret token in number and time."""

    def __init__(self, app: Any, admits: Admits, **options: Any) -> None:
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
            ws="none",
            http=partial(Protocol, admits, {}),  # type: ignore[arg-type]
            backlog=ACCEPTED_AT_ONCE,
            **{"log_level": logging.ERROR, **options},
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)


def bearer(token: str) -> Admits:
    """Return a function that admits requests with the secret token.

    It is the bearer token of the `Authorization` header, or the value of `x-api-key`, which clients
    of Anthropic's API send.
    """
    expected = token.encode()

    def is_token(name: bytes, value: bytes) -> bool:
        if name == b"authorization":
            kind, _, value = value.partition(b" ")
            return hmac.compare_digest(value.strip(), expected) and kind.lower() == b"bearer"
        return name == b"x-api-key" and hmac.compare_digest(value.strip(), expected)

    return lambda scope: any(is_token(name, value) for name, value in scope["headers"])


class Protocol(H11Protocol):
    """uvicorn's HTTP protocol, with limits on connections and request heads, and errors as JSON.

    `strangers` are the connections that have not sent the secret token, oldest first.
    """

    _timer: asyncio.TimerHandle | None = None

    def __init__(self, admits: Admits, strangers: "dict[Protocol, None]", **options: Any) -> None:
        super().__init__(**options)
        self._admits = admits
        self._strangers = strangers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._strangers[self] = None
        limit = _descriptor_limit()
        descriptor = transport.get_extra_info("socket").fileno()
        # The lowest free descriptor is used. So a high number means that few are left.
        is_full = descriptor >= limit - min(RESERVED_DESCRIPTORS, limit // 4)
        is_full = is_full or len(self.connections) > MAX_CONNECTIONS
        if is_full or len(self._strangers) > min(MAX_STRANGERS, limit // 4):
            next(iter(self._strangers)).refuse(
                503,
                "too_many_connections",
                "too many connections; the oldest one without a valid token is closed. "
                "If they are all yours, raise the limit of open files (ulimit -n)",
            )
        self._watch()

    def handle_events(self) -> None:
        super().handle_events()
        if self in self._strangers and self.scope is not None and self._admits(self.scope):
            del self._strangers[self]
            self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._strangers.pop(self, None)
        super().connection_lost(exc)
        self._watch()

    def _watch(self) -> None:
        """Start a timer for a connection without the secret token or with an incomplete request
        head.

        Stop the timer of any other connection.
        """
        waiting = self in self._strangers or self.conn.their_state is h11.IDLE
        waiting = waiting and not self.transport.is_closing()
        if waiting and self._timer is None:
            self._timer = self.loop.call_later(
                HEAD_TIMEOUT_S, self.refuse, 408, "timeout", "the request did not arrive in time"
            )
        elif not waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, "invalid_http", msg)

    def refuse(self, status: int, code: str, message: str) -> None:
        """Answer with an error and close the connection. If an answer has begun, only close it."""
        self._strangers.pop(self, None)
        body = json.dumps(Refused(message, status=status, code=code).body()).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        with suppress(h11.LocalProtocolError):  # an answer has already begun
            for event in (
                h11.Response(status_code=status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:
            self.cycle.disconnected = True
        self.transport.close()


def _descriptor_limit() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 30 if limit == resource.RLIM_INFINITY else limit
