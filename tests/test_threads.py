"""Test that user code which occupies the threads of asyncio does not hold up engines."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest
from safetensors.torch import load_file

from unstale.config import SHIPPED_POLICIES
from unstale.durability import virtual_clock
from unstale.engines import Reply, SamplingParams
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.engines.registry import EngineOptions
from unstale.threads import in_thread

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


def test_names_of_hosts_are_found() -> None:
    async def main() -> int:
        async with occupied():
            found = await asyncio.get_running_loop().getaddrinfo("localhost", 80)
            return len(found) + await in_thread(lambda number: number, number=1)

    assert virtual_clock.run(main()) >= 2


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
