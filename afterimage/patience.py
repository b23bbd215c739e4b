"""How long somebody is waited for."""

import asyncio

INSIST_S = 1.0
"""Between two cancellations of what is past its time-out."""


class Patience:
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
        if self._cancelled and isinstance(error, asyncio.CancelledError) and not self.task.cancelling():
            raise TimeoutError from error
