"""A queue of simulated events on an event loop whose clock is virtual.

Continuing a task of the event loop is slow, and only few simulated events need it. So one callback
handles event after event in order of time, until an event resolves a future. Then the event loop
advances its clock to that time and continues the task that waits for the future.
"""

import asyncio
import heapq
from collections.abc import Callable
from itertools import count
from typing import TypeVar

T = TypeVar("T")


class SimulatedClock:
    """A queue of simulated events, which are handled in order of time.

    `now` is the simulated time, in seconds, of the event that was handled last.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._timer: asyncio.TimerHandle | None = None
        self._unresolved = 0

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Call `action` at the simulated time `time`, in seconds."""
        heapq.heappush(self._events, (time, next(self._numbers), action))
        self._set_timer()

    def resolve(self, future: "asyncio.Future[T]", result: T) -> None:
        """Resolve `future` at the present simulated time.

        Later events are not handled until the task that waits for it has continued.
        """
        self._unresolved += 1
        asyncio.get_running_loop().call_at(self.now, self._set_result, future, result)

    async def sleep(self, seconds: float) -> None:
        if seconds > 0:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.at(self.now + seconds, lambda: self.resolve(future, None))
            await future

    def _set_result(self, future: "asyncio.Future[T]", result: T) -> None:
        self._unresolved -= 1
        if not future.done():
            future.set_result(result)
        self._set_timer()

    def _set_timer(self) -> None:
        """Set a timer of the event loop for the next simulated event.

        No timer is set while an event has a future to resolve, because time must not advance
        before.
        """
        if self._unresolved or not self._events:
            return
        due = self._events[0][0]
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(due, self._handle_events)

    def _handle_events(self) -> None:
        self._timer = None
        while self._events and not self._unresolved:
            self.now, _, action = heapq.heappop(self._events)
            action()
