"""A small JSON client for HTTP/1.1, used for servers that sample and for judges (reward models).

A call costs the training process 0.3 ms. A call through httpx would cost 1 to 2 ms.
"""

import asyncio
import json
import math
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit
from weakref import WeakKeyDictionary

import msgspec
import orjson

from unstale.threads import in_thread

MAX_BODY_BYTES = 1 << 28
LARGE_BODY_BYTES = 1 << 16
"""Size above which a response is parsed in a thread, so that the event loop does not wait.

The parser holds the interpreter lock. For a reply of 16,384 tokens with log-probabilities it takes
15 ms, or 5 ms if `decode_json` skips the fields that are not needed.
"""
Body = bytes | mmap
"""The body of a response. It is an anonymous `mmap` if the `Content-Length` exceeds
`LARGE_BODY_BYTES`.
"""

ROUNDS_TO_CALLER = 4
"""Number of iterations of the event loop between the end of parsing and the return of `Http.call`:
one for each task that awaits another.
"""


class HttpError(OSError):
    """Error: a server answered with an HTTP status of 300 or more.

    Its text has the beginning of the response body.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:2000]}")
        self.status = status


class Http:
    """A client of one server. Every call opens a new connection.

    `url` is `http://host:port`, `https://host:port` or `unix:/path`. `key` is sent as a bearer
    token. A response that is longer than `max_body_bytes` is refused. Raises ValueError for another
    form of URL, and for a key that is not printable ASCII.
    """

    def __init__(self, url: str, *, key: str = "", max_body_bytes: int = MAX_BODY_BYTES) -> None:
        parts = _split_url(url)
        if not (key.isascii() and key.isprintable()):
            raise ValueError("the key must be printable ASCII without line ends")
        self.url = url.rstrip("/")
        self._parts = parts
        self._max_body_bytes = max_body_bytes
        if parts.scheme == "unix":
            self._base_path = ""
            host = "localhost"
        else:
            self._base_path = parts.path.rstrip("/")
            host = parts.netloc.rpartition("@")[2]
        self._headers = [f"Host: {host}", "Connection: close", "Content-Type: application/json"]
        if key:
            self._headers.append(f"Authorization: Bearer {key}")

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        decode: Callable[[Body], Any] | None = None,
    ) -> Any:
        """Send a request. Return the JSON of the response, or None if the response is empty.

        With `decode`, return the result of this function for the response's bytes. It runs in a
        thread if the response is large, so it must not use objects of the event loop.

        Raises ValueError if `body` has a number that JSON does not have (NaN, infinity). Raises
        OSError for every failure of the call, such as a response that cannot be decoded. Cancelling
        the call closes the connection, so that the server can stop its work.
        """
        request = self._request(method, path, body)
        reader, writer = await self._connect()
        try:
            writer.write(request)
            await writer.drain()
            return await _read_response(reader, self._max_body_bytes, decode or decode_json)
        except (
            EOFError,
            asyncio.LimitOverrunError,
            ValueError,
            IndexError,
            RecursionError,
        ) as error:
            raise ConnectionError(f"no valid HTTP response from {self.url}: {error}") from error
        finally:
            writer.close()

    def _request(self, method: str, path: str, body: Any) -> bytes:
        content = b"" if body is None else _encode_json(body)
        target = quote(self._base_path + path, safe="/?=&")
        lines = [
            f"{method} {target} HTTP/1.1",
            *self._headers,
            f"Content-Length: {len(content)}",
        ]
        return "\r\n".join([*lines, "", ""]).encode() + content

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = self._parts
        if parts.scheme == "unix":
            return await asyncio.open_unix_connection(parts.path)
        secure = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if secure else 80)
        host = parts.hostname or ""
        server_hostname = host if secure else None
        errors = []
        for address in await _addresses_of(host, port):
            try:
                return await asyncio.open_connection(
                    address, port, ssl=secure, server_hostname=server_hostname
                )
            except ssl.SSLError:
                raise
            except OSError as error:
                errors.append(error)
        if len({type(error) for error in errors}) == 1:
            raise errors[0]
        raise OSError(f"no address of {host} answers: {'; '.join(map(str, errors))}")


async def _addresses_of(host: str, port: int) -> list[str]:
    """Return the IP addresses of a host, or its name if one of them is IPv6 with a scope.

    asyncio looks up names in threads that user code may occupy. So it gets a name only where the
    scope is needed.
    """
    with suppress(ValueError):
        return [str(ip_address(host))]
    found = await in_thread(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    if any(family == socket.AF_INET6 and address[-1] for family, *_, address in found):
        return [host]
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _split_url(url: str) -> SplitResult:
    """Return the parts of a server's URL.

    Raises ValueError for a form that `Http` does not accept.
    """
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "unix"):
            fault = f"the scheme {parts.scheme!r} is unknown"
        elif parts.scheme == "unix":
            fault = "" if parts.path else "it has no path"
        elif not parts.hostname:
            fault = "it has no host"
        else:
            parts.hostname.encode("idna")  # as the system's functions do
            fault = "the port must be 1 to 65535" if parts.port == 0 else ""
    except ValueError as error:  # of the port, the host or its brackets
        fault = str(error)
    if fault:
        raise ValueError(
            f"not a server address: {url!r} ({fault}); use http://host:port, https://host:port "
            "or unix:/path"
        )
    return parts


async def _read_response(
    reader: asyncio.StreamReader, max_bytes: int, decode: Callable[[Body], Any]
) -> Any:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    status_line, *lines = head.split("\r\n")
    status = int(status_line.split(" ", 2)[1])
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    content = await _read_body(reader, headers, max_bytes)
    if status >= 300:
        raise HttpError(status, bytes(content).decode(errors="replace"))
    if len(content) > LARGE_BODY_BYTES:
        async with parsing_turn():
            return await in_thread(decode, content)
    return decode(content)


_LOCKS = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]()


@asynccontextmanager
async def parsing_turn() -> AsyncIterator[None]:
    """Return a context for parsing a large response in a thread. Only one task can be in it at a
    time.

    Several parsing threads would not be faster, and each would make the event loop wait. The next
    task enters `ROUNDS_TO_CALLER` iterations of the loop after this one has left, when the caller
    has processed its result. Each event loop has its own turns.
    """
    loop = asyncio.get_running_loop()
    lock = _LOCKS.setdefault(loop, asyncio.Lock())
    await lock.acquire()
    try:
        yield
    finally:
        _release_after(loop, lock, ROUNDS_TO_CALLER)


def _release_after(loop: asyncio.AbstractEventLoop, lock: asyncio.Lock, rounds: int) -> None:
    if rounds:
        loop.call_soon(_release_after, loop, lock, rounds - 1)
    else:
        lock.release()


def _encode_json(body: Any) -> bytes:
    """Return a value as JSON text. Raises ValueError for NaN and infinite numbers.

    Values that orjson refuses, such as lone surrogates, are written by `json`. orjson writes NaN
    and infinity as null. So a text with null is written again by `json`, which refuses these
    numbers.
    """
    try:
        content = orjson.dumps(body, option=_AS_JSON)
    except TypeError:
        content = b"null"
    if b"null" not in content:
        return content
    try:
        return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        for name, value in _not_finite(body):
            raise ValueError(
                f"{name} is {value}, but a request can only have finite numbers"
            ) from None
        raise


_AS_JSON = orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS
"""Options with which orjson refuses dates and dataclasses, as `json` does."""


def _not_finite(value: Any, name: str = "the body") -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each number in a JSON value that is NaN or infinite.

    `name` is the path of the value itself.
    """
    if isinstance(value, float) and not math.isfinite(value):
        yield name, str(value)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _not_finite(each, str(key) if name == "the body" else f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _not_finite(each, f"{name}[{index}]")


def decode_json(content: Body, form: Any = Any) -> Any:
    """Return the value of a JSON text, or None for an empty text.

    `form` is the expected type of the value, for msgspec. Fields that the type does not name are
    skipped, which is faster than reading them. Texts that msgspec refuses, such as those with NaN,
    are read by `json`. If `form` is not `Any`, NaN becomes null, and an empty text is an error.

    Raises ValueError for invalid texts and for values of another type.
    """
    if not content and form is Any:
        return None
    try:
        return msgspec.json.decode(content, type=form)
    except msgspec.ValidationError:
        raise
    except ValueError:
        value = json.loads(bytes(content))
        # `msgspec.convert` cannot make the `Raw` fields of a type.
        return value if form is Any else msgspec.json.decode(msgspec.json.encode(value), type=form)


async def _read_body(
    reader: asyncio.StreamReader, headers: Mapping[str, str], max_bytes: int
) -> Body:
    content = b""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            _check_size(len(content) + size, max_bytes)
            content += await reader.readexactly(size)
            await reader.readexactly(2)
    elif "content-length" in headers:
        size = int(headers["content-length"])
        _check_size(size, max_bytes)
        if size > LARGE_BODY_BYTES:
            return await _read_large(reader, size)
        content = await reader.readexactly(size)
    else:
        while part := await reader.read(1 << 16):
            content += part
            _check_size(len(content), max_bytes)
    return content


async def _read_large(reader: asyncio.StreamReader, size: int) -> mmap:
    """Read `size` bytes in parts, so that the event loop can run other tasks between them.

    A `bytes` object of megabytes would be copied at once, while no other thread can run.
    """
    content = mmap(-1, size, MAP_PRIVATE | MAP_ANONYMOUS)
    while (at := content.tell()) < size:
        part = await reader.read(min(size - at, 1 << 16))
        if not part:
            raise EOFError(f"the body ends after {at} of {size} bytes")
        content.write(part)
    return content


def _check_size(size: int, max_bytes: int) -> None:
    if not 0 <= size <= max_bytes:
        raise ValueError(f"a body of {size} bytes; at most {max_bytes} are allowed")
