"""The state of an engine that runs in another process, and functions that wait for its answers.

These functions raise an error when the engine dies, or after a time limit.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from unstale.engines import EngineDied

CHECK_S = 2.0
"""Seconds between two health checks while replies are pending."""
_T = TypeVar("_T")


class EngineSession:
    """The state of an engine in another process, from one start of the engine to the next.

    While replies are pending, the function `check_health` is awaited every `CHECK_S` seconds. It
    must raise `EngineDied` if the engine does not work.
    """

    def __init__(self, check_health: Callable[[], Awaitable[None]]) -> None:
        self.error = ""
        """The reason why the session ended. Empty until then."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.open = asyncio.Event()
        """An event that is set while the engine may sample, from `resume` to `interrupt`."""
        self.pending: set[str] = set()
        self.quiet = asyncio.Event()
        """An event that is set while no request is pending."""
        self._check_health = check_health
        self._checked_at = 0.0

    def end(self, error: str) -> None:
        self.error = self.error or error
        if not self.ended.done():
            self.ended.set_result(None)

    def begin(self, request_id: str) -> None:
        self.pending.add(request_id)
        self.quiet.clear()

    def finish(self, request_id: str) -> None:
        self.pending.discard(request_id)
        if not self.pending:
            self.quiet.set()

    async def while_alive(self, awaitable: Awaitable[_T]) -> _T:
        """Await `awaitable` and return its result.

        Raises `EngineDied` if the session ends first.
        """
        task = asyncio.ensure_future(awaitable)
        try:
            while not task.done():
                await asyncio.wait(
                    (task, self.ended), timeout=CHECK_S, return_when=asyncio.FIRST_COMPLETED
                )
                if self.error:
                    raise EngineDied(self.error)
                if not task.done() and self.pending and self._check_due():
                    await self._check_health()
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait((task,))
            if not task.cancelled():
                task.exception()  # marks it as retrieved

    def _check_due(self) -> bool:
        """Return True if the last health check was `CHECK_S` seconds ago or more.

        If so, the present time is recorded as that of a check, which the caller must then make.
        """
        now = time.monotonic()
        due = now >= self._checked_at + CHECK_S
        if due:
            self._checked_at = now
        return due


@asynccontextmanager
async def deadline(
    seconds: float, died: Callable[[str], EngineDied], what: str
) -> AsyncIterator[None]:
    """Return a context that raises an error if its body takes longer than `seconds`.

    `died` makes the error from a text, such as "no answer within 60 s". `what` is the beginning of
    this text, here "no answer".
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise died(f"{what} within {seconds:g} s") from None
