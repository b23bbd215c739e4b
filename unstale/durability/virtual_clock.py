"""An event loop with virtual time, in which the events of a run always have the same order.

Deterministic runs use it. When no task can continue, the clock advances to the next timer. A call
in another thread stops the loop until the call ends, and its result is delivered `WORK_S` virtual
seconds later. In these virtual seconds, episodes continue, as they would beside a real trainer.
Sockets do not work on this loop. A server of the loop and its clients are connected in memory.
"""

import asyncio
import logging
import selectors
import socket
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for
from typing import Any, TypeVar

from unstale.durability.memory_transport import connect
from unstale.envs import EnvError, guard
from unstale.envs.guard import (
    OCCUPANCY,
    OwnThread,
    UnjoinedThreads,
    Watchdog,
    end_leftovers,
    watch_tasks,
)
from unstale.stop_signals import StopSignals, active

T = TypeVar("T")

WORK_S = 0.1
"""Virtual seconds after which the loop receives the result of a call in another thread."""


class Stalled(RuntimeError):
    """Error: a deadlock of a deterministic run, because every task waits and no timer is set."""


class RunLoop(asyncio.SelectorEventLoop):
    """An event loop for runs. If an environment's or other user code calls `stop`, it raises
    `EnvError`.
    """

    def stop(self) -> None:
        if OCCUPANCY.current:
            raise EnvError("it stops the event loop of the run")
        super().stop()


class VirtualLoop(RunLoop):
    """An event loop whose virtual clock starts at 0.

    >>> async def nap() -> float:
    ...     await asyncio.sleep(3600)
    ...     return asyncio.get_running_loop().time()
    >>> run(nap(), virtual=True)
    3600.0
    """

    waits_for_threads = True

    def __init__(self) -> None:
        self._now = 0.0
        self._servers: dict[tuple[str, int], tuple[asyncio.Server, Callable[[], Any]]] = {}
        """Address -> server, and the function that makes the protocol of a connection."""
        self._thread = UnjoinedThreads(1, thread_name_prefix="virtual")
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        return self._now

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> "asyncio.Future[T]":
        """Run `func` in a thread and block the loop until it ends.

        The result is delivered `WORK_S` virtual seconds later, however long `func` really took.
        """
        work = (executor or self._thread).submit(func, *args)
        frame = executor.frame if isinstance(executor, OwnThread) else None
        with OCCUPANCY.waiting(guard.THREAD_S, frame):
            wait_for([work])
        result: asyncio.Future[T] = self.create_future()
        self.call_later(WORK_S, _set_result, work, result)
        return result

    async def create_server(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], Any],
        *address: Any,
        sock: socket.socket,
        **options: Any,
    ) -> asyncio.Server:
        """Serve clients of this loop. `sock` only reserves the address: it stops to listen, so that
        clients in other threads and processes fail at once.
        """
        options |= {"sock": sock, "start_serving": False}
        server = await super().create_server(protocol_factory, *address, **options)
        self._servers[sock.getsockname()[:2]] = server, protocol_factory
        sock.shutdown(socket.SHUT_RDWR)
        return server

    async def create_connection(
        self,
        protocol_factory: Callable[[], Any],
        host: str | None = None,
        port: int | None = None,
        **options: Any,
    ) -> tuple[asyncio.Transport, Any]:
        """Connect a client to a server of this loop. Raises ConnectionRefusedError for any other
        address.
        """
        found = self._servers.get((host or "", port or 0))
        if found is None or not found[0].sockets or options.get("ssl"):
            raise ConnectionRefusedError(
                f"no connection to {host}, port {port}: in a deterministic run, code on the event "
                "loop can only call the endpoint of the run"
            )
        server, make_protocol = found
        return connect(self, protocol_factory(), make_protocol(), server.sockets[0])

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Do nothing, because the default executor is never used.

        asyncio would end it in a thread, for which virtual time cannot wait.
        """

    def close(self) -> None:
        super().close()
        self._thread.shutdown()

    def _jump(self, seconds: float | None) -> None:
        if seconds is None:
            raise Stalled("deadlock in a deterministic run: every task waits and no timer is set")
        self._now += seconds


def _set_result(work: "Future[T]", result: "asyncio.Future[T]") -> None:
    if result.done():  # the future was cancelled
        return
    if error := work.exception():
        result.set_exception(error)
    else:
        result.set_result(work.result())


class _JumpingSelector(selectors.SelectSelector):
    """A selector that, instead of waiting, advances the virtual clock to the next timer."""

    def __init__(self, jump: Callable[[float | None], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout != 0:
            self._jump(timeout)
        return ready


def _report_lost(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error that no task receives, without its text, because making the text may hang."""
    error = context.get("exception")
    kind = f" ({type(error).__name__})" if error else ""
    logging.getLogger("asyncio").error("%s%s", context.get("message"), kind)


async def _cancelled_by(signals: StopSignals, main: Coroutine[Any, Any, T]) -> T:
    with signals.cancelling():
        return await main


def run(
    main: Coroutine[Any, Any, T],
    *,
    virtual: bool = False,
    on_stuck: Callable[[str], None] = lambda message: None,
) -> T:
    """Run a coroutine like `asyncio.run`, and return its result. With `virtual`, its time is
    virtual.

    An event loop that already runs in this thread, such as Jupyter's, waits meanwhile. User code,
    such as an environment, is interrupted if it blocks the event loop. If that is not possible,
    `on_stuck` is called with a message and the process ends. User code that never returns does not
    keep this function from returning.
    """
    outer = asyncio.events._get_running_loop()
    asyncio.events._set_running_loop(None)
    try:
        make_loop = VirtualLoop if virtual else RunLoop
        with Watchdog(on_stuck), asyncio.Runner(loop_factory=make_loop) as runner:
            loop = runner.get_loop()
            loop.set_default_executor(UnjoinedThreads(thread_name_prefix="asyncio"))
            loop.set_task_factory(watch_tasks)
            loop.set_exception_handler(_report_lost)
            signals = active()
            try:
                return runner.run(_cancelled_by(signals, main))
            except asyncio.CancelledError:
                if signals.has_cancelled:
                    raise KeyboardInterrupt from None
                raise
            finally:
                runner.run(end_leftovers())
    finally:
        asyncio.events._set_running_loop(outer)
