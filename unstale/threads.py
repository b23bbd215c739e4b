"""Threads for the blocking work of engines, such as loading weights.

User code that never returns may occupy all threads of `asyncio.to_thread`. Engines must still load
weights and close, so they have threads of their own.
"""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

_P = ParamSpec("_P")
_T = TypeVar("_T")

_POOLS: WeakKeyDictionary[asyncio.AbstractEventLoop, ThreadPoolExecutor] = WeakKeyDictionary()
"""The thread pool of each event loop, which is freed together with the loop."""


async def in_thread(function: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs) -> _T:
    """Run `function` in a thread. Return its result, or raise its error.

    Unlike `asyncio.to_thread`, this never waits for threads that user code occupies.
    """
    loop = asyncio.get_running_loop()
    pool = _POOLS.get(loop)
    if pool is None:
        pool = _POOLS[loop] = ThreadPoolExecutor(thread_name_prefix="engines")
    call = partial(contextvars.copy_context().run, function, *arguments, **options)
    return await loop.run_in_executor(pool, call)
