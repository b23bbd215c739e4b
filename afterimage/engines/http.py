"""JSON over HTTP/1.1, as a client: all that an engine behind a server needs, without a library of its own."""

import asyncio
import json
import ssl
from typing import Any
from urllib.parse import quote, urlsplit


class HttpError(OSError):
    """The server answered, and refused. `status` is HTTP's."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:2000]}")
        self.status = status


class Http:
    """A server at `http://host:port`, `https://host:port`, or the socket `unix:/path`. A connection for every call."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "unix") or not (parts.hostname or parts.scheme == "unix"):
            raise ValueError(f"{url!r} is no address of a server: http://host:port, https://host:port or unix:/path")
        self.url = url.rstrip("/")
        self._parts = parts

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """What the answer's JSON says, None for an empty one. Raises OSError for whatever goes wrong.

        Cancelled, it hangs up, by which the server knows that nobody waits any more.
        """
        reader, writer = await self._connect()
        try:
            content = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
            host, base = ("localhost", "") if self._parts.scheme == "unix" else (self._parts.netloc, self._parts.path)
            lines = (
                f"{method} {quote(base.rstrip('/') + path, safe='/?=&')} HTTP/1.1",
                f"Host: {host}",
                "Connection: close",
                "Content-Type: application/json",
                f"Content-Length: {len(content)}",
            )
            writer.write("\r\n".join((*lines, "", "")).encode() + content)
            await writer.drain()
            return await _answer(reader)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, IndexError) as error:
            raise ConnectionError(f"{self.url} broke off, or speaks no HTTP: {error}") from error
        finally:
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = self._parts
        if parts.scheme == "unix":
            return await asyncio.open_unix_connection(parts.path)
        secure = ssl.create_default_context() if parts.scheme == "https" else None
        return await asyncio.open_connection(parts.hostname, parts.port or (443 if secure else 80), ssl=secure)


async def _answer(reader: asyncio.StreamReader) -> Any:
    status = int((await reader.readuntil(b"\r\n")).split(b" ", 2)[1])
    headers = {}
    while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    if headers.get("transfer-encoding", "").lower() == "chunked":
        content = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            content += await reader.readexactly(size)
            await reader.readexactly(2)
    else:
        content = await reader.readexactly(int(headers.get("content-length", 0)))
    if status >= 300:
        raise HttpError(status, content.decode(errors="replace"))
    return json.loads(content) if content else None
