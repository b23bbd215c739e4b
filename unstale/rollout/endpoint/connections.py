"""A server that limits the number of its connections, and the time until a request is complete.

Requests need a secret token: in the header `Authorization` or `x-api-key` for the endpoint, in a
cookie for the dashboard. Connections that have not sent it are limited in number and time. So they
cannot use up the file descriptors that the run needs for its journal, engines and checkpoints, or
lock out a user.
"""

import asyncio
import hmac
import json
import logging
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from functools import partial
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from unstale.config import ConfigError
from unstale.rollout.endpoint.schemas import Refused

HEAD_TIMEOUT_S = 10.0
"""Seconds within which the head of a request must be complete. A new connection must also send the
secret token within this time.
"""
MAX_CONNECTIONS = 4096
MAX_STRANGERS = 256
RESERVED_DESCRIPTORS = 256
"""Number of file descriptors that connections must leave free for the run. If the process may open
fewer than 1024 files, it is a quarter of that limit.
"""

BACKLOG = 512
ACCEPTED_AT_ONCE = 8
"""Number of connections that are accepted in one iteration of the event loop. Without this limit,
asyncio accepts all that wait, before the number of connections is checked.
"""
ACCEPTED_WITH_TLS = 2
"""`ACCEPTED_AT_ONCE` for TLS, because a handshake takes about a millisecond of the event loop."""
SHUTDOWN_S = 1.0
"""Seconds within which a client must end TLS after its last answer."""
MIN_TOKEN_BITS = 128

Admits = Callable[[Mapping[str, Any]], bool]
"""A function that returns True if a request, given as ASGI scope, has the secret token."""


class LimitedServer(uvicorn.Server):
    """A uvicorn server that limits the number and time of connections without the secret token.

    `admits` checks the token. Connections use TLS if `context` is given.
    """

    def __init__(
        self, app: Any, admits: Admits, context: ssl.SSLContext | None = None, **options: Any
    ) -> None:
        make: Any = (
            partial(TlsGate, admits, {}, context) if context else partial(Protocol, admits, {})
        )
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=1,
            ws="none",
            http=make,
            backlog=ACCEPTED_WITH_TLS if context else ACCEPTED_AT_ONCE,
            **{"log_level": logging.ERROR, **options},
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            if all(server.is_serving() for server in self.servers):  # else clients are in memory
                each.listen(BACKLOG)


def bearer(token: str) -> Admits:
    """Return a function that admits requests with this secret token.

    A request sends it as bearer token in `Authorization`, or in `x-api-key` as clients of
    Anthropic's API do.
    """
    expected = token.encode()

    def is_token(name: bytes, value: bytes) -> bool:
        if name == b"authorization":
            kind, _, value = value.partition(b" ")
            return hmac.compare_digest(value.strip(), expected) and kind.lower() == b"bearer"
        return name == b"x-api-key" and hmac.compare_digest(value.strip(), expected)

    return lambda scope: any(is_token(name, value) for name, value in scope["headers"])


def only_admitted(app: Any, admits: Admits) -> Any:
    """Return an ASGI app that answers requests without the secret token with status 401.

    It closes their connection. So each further attempt needs a new connection, and the number of
    connections is limited.
    """
    refused = Refused("the token is missing or wrong", status=401, code="invalid_api_key").body()
    body = json.dumps({"type": "error", **refused}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]

    async def admitted(scope: Any, receive: Any, send: Any) -> None:
        if admits(scope):
            return await app(scope, receive, send)
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return admitted


def require_strong(token: str) -> None:
    """Raise `ConfigError` for a token that could be guessed.

    It must have at least `MIN_TOKEN_BITS` bits, counted as 4 per hexadecimal digit or else 6 per
    character, and 8 different characters.
    """
    is_hexadecimal = not set(token.lower()) - set("0123456789abcdef")
    if len(token) * (4 if is_hexadecimal else 6) < MIN_TOKEN_BITS or len(set(token)) < 8:
        raise ConfigError(
            f"the endpoint's token must have at least {MIN_TOKEN_BITS} bits (32 hexadecimal "
            "digits or 22 other letters, at random), because endpoint.host can be reached from "
            "outside: leave it out for a new one, or use `openssl rand -hex 16`"
        )


class Protocol(H11Protocol):
    """uvicorn's HTTP protocol with limits on connections and request heads, and with errors as
    JSON.
    """

    _timer: asyncio.TimerHandle | None = None

    def __init__(self, admits: Admits, strangers: "Strangers", **options: Any) -> None:
        super().__init__(**options)
        self._admits = admits
        self._strangers = strangers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        _add_stranger(self, self._strangers, transport, len(self.connections))
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
        """Start the timer while the secret token or the end of a request head is missing, else stop
        it.
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
        """Answer with an error and close the connection. If an answer has begun, close it without
        an error.
        """
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
        if self.scheme == "https":
            self.transport.abort()  # a client that does not end TLS would hold its descriptor
        else:
            self.transport.close()


class TlsGate(asyncio.Protocol):
    """The TLS handshake of a connection, after which its HTTP protocol begins.

    A connection counts from the start as one without the secret token. asyncio's own TLS servers do
    not count connections during the handshake, so clients could hold any number of them.
    """

    def __init__(
        self, admits: Admits, strangers: "Strangers", context: ssl.SSLContext, **options: Any
    ) -> None:
        self._inner = Protocol(admits, strangers, **options)
        self._strangers = strangers
        self._context = context
        self._transport: asyncio.BaseTransport | None = None
        self._received = b""
        """Data received between the end of the handshake and the start of the HTTP protocol."""
        self._is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        _add_stranger(self, self._strangers, transport, len(self._inner.connections))
        self._handshake = asyncio.ensure_future(self._secure(transport))

    def data_received(self, data: bytes) -> None:
        self._received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True

    def refuse(self, status: int, code: str, message: str) -> None:
        """Close the connection. No reason can be sent before the handshake has ended."""
        self._strangers.pop(self, None)
        self._transport.abort()  # type: ignore[union-attr]

    async def _secure(self, transport: Any) -> None:
        try:
            secure = await asyncio.get_running_loop().start_tls(
                transport,
                self,
                self._context,
                server_side=True,
                ssl_handshake_timeout=HEAD_TIMEOUT_S,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        except OSError:  # the handshake failed or took too long
            return
        finally:
            self._strangers.pop(self, None)
        if secure is None or self._is_lost:
            return
        secure.set_protocol(self._inner)
        self._inner.connection_made(secure)
        if self._received:
            self._inner.data_received(self._received)


Strangers = MutableMapping["Protocol | TlsGate", str]
"""The connections that have not sent the secret token, oldest first, each with the IP address of
its client.
"""


def _add_stranger(
    connection: Protocol | TlsGate,
    strangers: Strangers,
    transport: asyncio.BaseTransport,
    num_connections: int,
) -> None:
    """Add a connection to those without the secret token. If there are too many, close one of them.

    The oldest connection of the IP address with the most such connections is closed, so that a
    flood from one address does not affect others.
    """
    strangers[connection] = (transport.get_extra_info("peername") or ("",))[0]
    limit = _descriptor_limit()
    descriptor = transport.get_extra_info("socket").fileno()
    # The lowest free descriptor is used. So a high number means that few are left.
    is_full = descriptor >= limit - min(RESERVED_DESCRIPTORS, limit // 4)
    is_full = is_full or num_connections > MAX_CONNECTIONS
    if is_full or len(strangers) > min(MAX_STRANGERS, limit // 4):
        (crowded, _), *_ = Counter(strangers.values()).most_common(1)
        next(each for each, address in strangers.items() if address == crowded).refuse(
            503,
            "too_many_connections",
            "too many connections; the oldest one without a valid token is closed. "
            "If they are all yours, raise the limit of open files (ulimit -n)",
        )


def _descriptor_limit() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 30 if limit == resource.RLIM_INFINITY else limit
