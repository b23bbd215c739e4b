"""What happens when, beside the event loop: machines' events in one heap, on the loop's virtual clock.

Machines have far more events than anybody waits for. They are handled in order without the event loop, up to the
next one that somebody is to be told of; only then does the loop's clock go on, and whoever waits is told.
"""

import asyncio
import heapq
from collections.abc import Callable
from itertools import count
from typing import TypeVar

T = TypeVar("T")
Action = Callable[[], None]


class SimulatedClock:
    """Events of machines, in order of time and then of their making. `now` is the time of the latest."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Action]] = []
        self._numbers = count()
        self._pump: asyncio.TimerHandle | None = None
        self._telling = 0

    def at(self, time: float, action: Action) -> None:
        """Have something happen then."""
        heapq.heappush(self._events, (time, next(self._numbers), action))
        self._wind()

    def resolve(self, future: "asyncio.Future[T]", result: T) -> None:
        """Somebody waits for this: the loop's clock comes here first."""
        self._telling += 1
        asyncio.get_running_loop().call_at(self.now, self._told, future, result)

    async def sleep(self, seconds: float) -> None:
        if seconds > 0:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.at(self.now + seconds, lambda: self.resolve(future, None))
            await future

    def _told(self, future: "asyncio.Future[T]", result: T) -> None:
        self._telling -= 1
        if not future.done():
            future.set_result(result)
        self._wind()

    def _wind(self) -> None:
        """The next event that is due is handled when the loop's clock comes to it, and not while somebody is told."""
        if self._telling or not self._events:
            return
        due = self._events[0][0]
        if self._pump is not None:
            if self._pump.when() <= due:
                return
            self._pump.cancel()
        self._pump = asyncio.get_running_loop().call_at(due, self._run)

    def _run(self) -> None:
        self._pump = None
        while self._events and not self._telling:
            self.now, _, action = heapq.heappop(self._events)
            action()
