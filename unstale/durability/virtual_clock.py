"""Virtual time: an event loop on which what happens first depends on nothing but the program.

Timers jump: when nothing is ready, the clock goes to the next one at once. What runs in another thread is waited for
where it is asked for, and its result comes `WORK_S` later; so the trainer's work takes time during which episodes go
on, and always the same. Nothing here waits for the world: a socket on this loop is read too late, or never.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any, TypeVar

T = TypeVar("T")

WORK_S = 0.1
"""Virtual seconds that one call in another thread takes."""


class Stalled(RuntimeError):
    """Everybody waits and no timer is set: nothing can ever happen again."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own, which begins at 0.

    >>> async def nap() -> float:
    ...     await asyncio.sleep(3600)
    ...     return asyncio.get_running_loop().time()
    >>> run(nap(), virtual=True)
    3600.0
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="virtual")
        super().__init__(_Jump(self._jump))

    def time(self) -> float:
        return self._now

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> "asyncio.Future[T]":
        """Wait for `func` in its thread. What it returns or raises comes `WORK_S` later."""
        working = (executor or self._thread).submit(func, *args)
        wait_for([working])
        told: asyncio.Future[T] = self.create_future()
        self.call_later(WORK_S, _tell, working, told)
        return told

    def close(self) -> None:
        super().close()
        self._thread.shutdown()

    def _jump(self, seconds: float | None) -> None:
        if seconds is None:
            raise Stalled(
                "everybody waits for somebody else and no timer is set: nothing can happen any more"
            )
        self._now += seconds


def _tell(working: "Future[T]", told: "asyncio.Future[T]") -> None:
    if told.done():  # who asked has stopped waiting
        return
    if error := working.exception():
        told.set_exception(error)
    else:
        told.set_result(working.result())


class _Jump(selectors.BaseSelector):
    """Looks whether a thread has called; otherwise lets the time pass instead of waiting."""

    def __init__(self, jump: Callable[[float | None], None]) -> None:
        self._selector = selectors.DefaultSelector()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._selector.select(0)
        if not ready and timeout != 0:
            self._jump(timeout)
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._selector.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._selector.unregister(fileobj)

    def close(self) -> None:
        self._selector.close()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._selector.get_map()


def run(main: Coroutine[Any, Any, T], *, virtual: bool) -> T:
    """`asyncio.run`, on the clock that is asked for."""
    with asyncio.Runner(loop_factory=VirtualLoop if virtual else None) as runner:
        return runner.run(main)
