"""Time-outs and cancellation of asyncio tasks."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")

CANCEL_INTERVAL_S = 1.0
"""Seconds between two cancellations of a task."""


class PersistentTimeout:
    """A context that raises TimeoutError after `timeout_s`, like `asyncio.timeout`.

    It repeats the cancellation of its task, because an environment's code may swallow the first.
    It leaves no reference cycle for the garbage collector.
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
        """Raise TimeoutError if this timer alone cancelled the task."""
        self._timer.cancel()
        for _ in range(self._num_cancelled):
            self.task.uncancel()
        cancelled = isinstance(error, asyncio.CancelledError)
        if self._num_cancelled and cancelled and not self.task.cancelling():
            raise TimeoutError from error


async def run_to_completion(work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of `work`. If the caller is cancelled, first wait for the end of `work`.

    Only a second cancellation of the caller does not wait.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def first_error(group: BaseException) -> BaseException:
    """Return the error of the task that failed first, out of nested exception groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
