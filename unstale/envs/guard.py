"""Calls of user code: plain functions run in threads, and code that blocks the event loop is named.

A coroutine that blocks stops all episodes. `Watched` measures each of its turns on the event loop;
`Watchdog` interrupts one that lasts too long.
"""

import asyncio
import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from unstale.envs import EnvError

T = TypeVar("T")

BLOCKED_S = 0.2
"""Seconds of blocking that are reported. Ordinary steps take less than 1 ms."""
HELD_S = 7.0
"""Seconds of blocking after which user code is interrupted."""
THREAD_S = 60.0
"""The same where the code waits for a thread: with a virtual clock, that blocks the event loop."""
IGNORED_S = 3.0
"""Seconds of interruptions after which the process is ended."""
CANCEL_INTERVAL_S = 1.0
"""Seconds between two cancellations of a task."""
MAX_CANCELS = 5
"""Cancellations that a task may ignore before it is abandoned."""
_TICK_S = 0.5
_MAX_TEXT = 300


class EventLoopBlocked(BaseException):
    """Raised in user code that holds the event loop, past its `except Exception`."""


class Running(NamedTuple):
    """User code that has the event loop now."""

    name: str
    since: float
    on_blocked: Callable[[float], None]
    max_s: float


class Occupancy:
    """The user code that has the event loop. There is one event loop with episodes."""

    current: Running | None = None
    canceller: str = ""
    """The user code that cancelled its own task, and perhaps all others."""

    @contextmanager
    def waiting_for_thread(self) -> Iterator[None]:
        """Allow `THREAD_S` while the event loop waits for a thread."""
        before = self.current
        if before:
            self.current = before._replace(max_s=THREAD_S)
        try:
            yield
        finally:
            self.current = before and before._replace(since=time.monotonic())


OCCUPANCY = Occupancy()


class Watched(Generic[T]):
    """An awaitable that runs user code called `name`.

    `on_blocked` is called with the seconds of each turn that blocks the event loop too long.
    """

    __slots__ = ("_name", "_on_blocked", "_work")

    def __init__(self, work: Awaitable[T], name: str, on_blocked: Callable[[float], None]) -> None:
        self._work = work
        self._name = name
        self._on_blocked = on_blocked

    def __await__(self) -> Generator[Any, Any, T]:
        turns: Any = self._work.__await__()
        resume: Callable[[Any], Any] = turns.send
        value: Any = None
        while True:
            since = time.monotonic()
            OCCUPANCY.current = Running(self._name, since, self._on_blocked, HELD_S)
            try:
                yielded = resume(value)
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                value = None  # its traceback refers to this frame: a reference cycle
                held = OCCUPANCY.current
                OCCUPANCY.current = None
                seconds = time.monotonic() - (held.since if held else since)
                if seconds > BLOCKED_S:
                    self._on_blocked(seconds)
            try:
                value = yield yielded
                resume = turns.send
            except BaseException as error:  # noqa: BLE001 - the work gets it
                value = error
                resume = turns.throw


def watch_tasks(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> "asyncio.Task[Any]":
    """Create a task, as the task factory of an event loop. Tasks of user code are watched too."""
    if running := OCCUPANCY.current:
        work = _await(Watched(work, running.name, running.on_blocked))
    return asyncio.Task(work, loop=loop, **options)


async def _await(work: Awaitable[T]) -> T:
    return await work


class OwnThread(Executor):
    """A daemon thread that runs functions in order. It starts with the first one.

    A thread cannot be stopped: nothing waits for its end, neither a run nor the interpreter.
    """

    def __init__(self, name: str = "environment") -> None:
        self._name = name
        self._calls = SimpleQueue[Callable[[], None] | None]()
        self._started = False

    def submit(self, function: Callable[..., T], /, *arguments: Any, **options: Any) -> Future[T]:
        """Run the function after the earlier ones. Its result cannot be cancelled."""
        outcome = _Outcome()
        outcome.set_running_or_notify_cancel()

        def work() -> None:
            with outcome:
                outcome.set_result(function(*arguments, **options))

        if not self._started:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self._started = True
        self._calls.put(work)
        return outcome

    def _run(self) -> None:
        while work := self._calls.get():
            work()

    def close(self) -> None:
        """End the thread after its current function."""
        self._calls.put(None)


class _Outcome(Future[Any]):
    """A future that takes an error raised in its context."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> bool:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            self.set_exception(error)
        elif error:  # SystemExit would end the event loop; a future refuses StopIteration
            self.set_exception(EnvError(f"the code raised {describe(error)}"))
        return True


class UnjoinedThreads(ThreadPoolExecutor):
    """A thread pool whose shutdown does not wait: user code in it may never return."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


_abandoned: list[asyncio.Task[Any]] = []
"""Tasks that never end. Collecting one would run its code again."""


def abandon(task: asyncio.Task[Any]) -> None:
    """Let the event loop end without this task, whose code ignores cancellation."""
    asyncio.tasks._unregister_task(task)
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    _abandoned.append(task)


async def end_leftovers() -> None:
    """Cancel all other tasks of the event loop. Abandon those that ignore it."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for _ in range(MAX_CANCELS):
        for task in left:
            task.cancel()
        if left:
            _, left = await asyncio.wait(left, timeout=CANCEL_INTERVAL_S)
    for task in left:
        abandon(task)


async def call(
    function: Callable[..., Any], *arguments: Any, thread: OwnThread | None = None
) -> Any:
    """Call user code and return its result. A plain function runs in `thread`, or in a new one."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        type(function).__call__
    ):
        return await function(*arguments)
    own = thread or OwnThread()
    loop = asyncio.get_running_loop()
    try:
        result = await loop.run_in_executor(own, function, *arguments)
    finally:
        if thread is None:
            own.close()
    return await result if inspect.isawaitable(result) else result


def describe(error: BaseException) -> str:
    """Return the type and text of an error in one line of bounded length. Never raises.

    >>> describe(ValueError("two\\nlines"))
    'ValueError: two lines'
    """
    text = "(its text cannot be shown: str() raises an error)"
    with suppress(BaseException):
        text = str(error)
    shown = " ".join(text[: 4 * _MAX_TEXT].split())
    escaped = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)
    if len(escaped) > _MAX_TEXT or len(text) > 4 * _MAX_TEXT:
        escaped = f"{escaped[:_MAX_TEXT]}... ({len(text):,} characters)"
    return f"{type(error).__name__}: {escaped}"


class Watchdog:
    """A thread that watches the event loop of the thread that enters this context.

    User code that blocks it for `HELD_S` seconds is interrupted: `EventLoopBlocked` is raised in
    it. If it ignores that, `on_stuck` is called with a message and the process ends. Outside the
    main thread, Python cannot interrupt code: there the message is printed.
    """

    def __init__(self, on_stuck: Callable[[str], None] = lambda message: None) -> None:
        self._on_stuck = on_stuck
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._num_raised = 0
        self._traced = False

    def __enter__(self) -> None:
        self._watched = threading.get_ident()
        self._is_main = threading.current_thread() is threading.main_thread()
        if self._is_main:
            self._previous = signal.signal(signal.SIGURG, self._interrupt)
        OCCUPANCY.canceller = ""
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._is_main:
            signal.signal(signal.SIGURG, self._previous)

    def _watch(self) -> None:
        seen: Running | None = None
        ticks = 0
        while not self._ended.wait(_TICK_S):
            current = OCCUPANCY.current
            if current is None or current is not seen:
                seen = current
                ticks = 0
                self._num_raised = 0
                continue
            ticks += 1  # a pause of the whole process counts as one tick
            if ticks * _TICK_S >= current.max_s:
                self._act(current, ticks * _TICK_S)

    def _act(self, running: Running, seconds: float) -> None:
        message = (
            f"{running.name} has blocked the event loop for {seconds:.0f} s; "
            "make it a plain function, which runs in a thread, or await"
        )
        if not self._is_main:
            if seconds < running.max_s + _TICK_S:
                print(f"unstale: {message}", file=sys.stderr)  # noqa: T201 - the loop is blocked
            return
        if self._num_raised * _TICK_S < IGNORED_S and seconds < running.max_s + 2 * IGNORED_S:
            signal.pthread_kill(self._watched, signal.SIGURG)
        elif not self._traced:
            self._on_stuck(f"{message}. It ignores interruptions, so the process ends")
            os._exit(1)

    def _interrupt(self, *_: object) -> None:
        """Raise `Held` in the user code that runs, unless a debugger traces it."""
        running = OCCUPANCY.current
        self._traced = sys.gettrace() is not None
        if running and not self._traced and time.monotonic() - running.since >= running.max_s / 2:
            self._num_raised += 1
            raise EventLoopBlocked(
                f"it blocked the event loop for more than {running.max_s:g} s; "
                "make it a plain function, which runs in a thread, or await"
            )
