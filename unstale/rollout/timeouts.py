"""How long somebody is waited for, and which error is told."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")

INSIST_S = 1.0
"""Between two cancellations of what is past its time-out."""


class PersistentTimeout:
    """`asyncio.timeout` that cancels the task again and again from then on: something in it may swallow that.

    One timer, and no cycle of references: what it leaves behind goes away without the garbage collector.
    """

    __slots__ = ("_cancelled", "_loop", "_timer", "task")

    def __init__(self, timeout_s: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task, self._loop, self._cancelled = task, asyncio.get_running_loop(), 0
        self._timer = self._loop.call_later(timeout_s, self._cancel)

    def _cancel(self) -> None:
        self.task.cancel()
        self._cancelled += 1
        self._timer = self._loop.call_later(INSIST_S, self._cancel)

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """TimeoutError for its own cancellation, unless the task was cancelled by somebody else too."""
        self._timer.cancel()
        for _ in range(self._cancelled):
            self.task.uncancel()
        if (
            self._cancelled
            and isinstance(error, asyncio.CancelledError)
            and not self.task.cancelling()
        ):
            raise TimeoutError from error


class reraise_after:
    """`async with After(work)`: an error from inside is told when `work` is done, and that of `work` before it.

    A cancellation is told at once.
    """

    __slots__ = ("_work",)

    def __init__(self, work: asyncio.Task[None]) -> None:
        self._work = work

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, Exception):
            await self._work


async def run_to_completion(work: Coroutine[Any, Any, _T]) -> _T:
    """Do it; a cancellation is told when it is done. Only a second one leaves it half done."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def first_error(group: BaseException) -> BaseException:
    """The error that began it: groups nest as tasks do, and the first to fail comes first."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
