"""A started engine for the length of a test."""

import asyncio
from collections.abc import Awaitable, Callable

from tests.support.waits import LIMIT_S
from unstale.engines import Engine


def run_engine(engine: Engine, story: Callable[[], Awaitable[None]]) -> None:
    """Start an engine, run `story`, and close the engine. Fails if that hangs."""

    async def running() -> None:
        try:
            async with asyncio.timeout(LIMIT_S):
                await engine.start()
                await story()
        finally:
            await engine.close()

    asyncio.run(running())
