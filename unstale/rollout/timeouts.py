"""Time-outs and cancellation of asyncio tasks."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")

CANCEL_INTERVAL_S = 1.0
"""Seconds between two cancellations of a task that ignored the first."""


class PersistentTimeout:
    """A time-out that repeats its cancellation: code in the task may swallow the first.

    It uses one timer and leaves no reference cycle, so it needs no garbage collector.
    """

    __slots__ = ("_loop", "_num_cancelled", "_timer", "task")

    def __init__(self, timeout_s: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self._loop = asyncio.get_running_loop()
        self._num_cancelled = 0
        self._timer = self._loop.call_later(timeout_s, self._cancel)

    def _cancel(self) -> None:
        self.task.cancel()
        self._num_cancelled += 1
        self._timer = self._loop.call_later(CANCEL_INTERVAL_S, self._cancel)

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """Raise TimeoutError for its own cancellation, unless others cancelled the task too."""
        self._timer.cancel()
        for _ in range(self._num_cancelled):
            self.task.uncancel()
        cancelled = isinstance(error, asyncio.CancelledError)
        if self._num_cancelled and cancelled and not self.task.cancelling():
            raise TimeoutError from error


class reraise_after:
    """A context that delays an error until `work` is done. An error of `work` replaces it.

    A cancellation is raised at once.
    """

    __slots__ = ("_work",)

    def __init__(self, work: asyncio.Task[None]) -> None:
        self._work = work

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, Exception):
            await self._work


async def run_to_completion(work: Coroutine[Any, Any, _T]) -> _T:
    """Run `work` to its end before a cancellation takes effect. Only a second one interrupts it."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def first_error(group: BaseException) -> BaseException:
    """Return the first error of nested exception groups: the task that failed first."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
