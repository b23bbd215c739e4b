"""Handle requests in threads, with a time limit.

A request of 2 MB may take seconds to check, render and encode. On the event loop, this would stop
all episodes of the run.
"""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from unstale.envs.guard import Overdue, run_limited
from unstale.rollout.endpoint.schemas import Refused

LIMIT_S = 30.0
"""Seconds that one function may take. A request of 2 MB takes 4 s."""
AT_ONCE = 4
"""Number of functions that run at the same time. Others wait."""

_T = TypeVar("_T")

_SLOTS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def off_loop(function: Callable[..., _T], name: str, *arguments: Any) -> _T:
    """Run `function` in a thread and return its result.

    After `LIMIT_S` seconds it is interrupted, and `Refused` is raised with `name` in its text.
    """
    slots = _SLOTS.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(AT_ONCE))
    async with slots:
        try:
            return await run_limited(function, *arguments, limit_s=LIMIT_S, name=name)
        except Overdue as error:
            raise Refused(str(error), status=503, code="too_slow") from None
