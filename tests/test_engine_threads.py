"""Test that user code which occupies the threads of asyncio does not hold up engines."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest
from safetensors.torch import load_file

from unstale.config import SHIPPED_POLICIES
from unstale.engines import Reply, SamplingParams
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.engines.http import Http
from unstale.engines.registry import EngineOptions

LIMIT_S = 60.0


@asynccontextmanager
async def occupied() -> AsyncIterator[None]:
    """Occupy the only thread of asyncio within a context."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    over = threading.Event()
    blocking = asyncio.create_task(asyncio.to_thread(over.wait, 2 * LIMIT_S))
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(LIMIT_S):
            yield
        assert not blocking.done()
    finally:
        over.set()
        await blocking


def test_servers_are_found_by_name() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n{"a":1}')
        writer.close()

    async def main() -> Any:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, occupied():
            return await Http(f"http://localhost:{port}").call("GET", "/")

    assert asyncio.run(main()) == {"a": 1}


@pytest.mark.usefixtures("forked_children")
def test_weights_are_loaded_and_the_engine_ends() -> None:
    folder = SHIPPED_POLICIES["base"]
    weights = load_file(folder / "model.safetensors")

    async def main() -> Reply:
        engine = EmbeddedEngine(EngineOptions(folder, max_running=1, max_context=32))
        async with occupied():
            await engine.start()
            await engine.load(weights, 3)
            await engine.resume()
            reply = await engine.sample(
                (1, 2), SamplingParams(max_tokens=1, seed=0, stop_tokens=())
            )
            await engine.close()
        return reply

    assert asyncio.run(main()).piece.version == 3
