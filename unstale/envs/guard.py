"""Call the user's code, and protect the run against code that blocks the event loop.

Plain functions run in threads, and so do hooks: the other plain methods of task sets and
environments (`call_hook`). A coroutine that blocks would stop all episodes. `Watched` measures how
long each part of a coroutine blocks the event loop. `Watchdog` interrupts a part that takes too
long.
"""

import asyncio
import ctypes
import inspect
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Generator, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any, Generic, NamedTuple, TypeVar

from unstale.envs import EnvError
from unstale.frames import (
    INSTALLED,
    PYTHON,
    format_error,
    is_hidden,
    one_line,
    show_frame,
    show_line,
    user_frame,
)
from unstale.stop_signals import beat, end_process
from unstale.threads import in_thread

T = TypeVar("T")

BLOCKED_S = 0.2
"""Seconds for which code may block the event loop without a report. Ordinary steps take less than 1
ms.
"""
HELD_S = 7.0
"""Seconds after which user code that blocks the event loop is interrupted."""
THREAD_S = 60.0
"""Seconds after which user code is interrupted while it waits for a thread and so blocks the event
loop, as with a virtual clock.
"""
IGNORED_S = 3.0
"""Seconds for which user code may ignore interruptions before the process is ended."""
CANCEL_INTERVAL_S = 1.0
"""Seconds between repeated cancellations of a task."""
MAX_INTERRUPTIONS = 3
"""Number of interruptions that end the run. Before each one, all episodes have waited for
`HELD_S`.
"""
MAX_CANCELS = 5
"""Number of cancellations that a task may ignore before it is abandoned."""
MAX_HUNG = 64
"""Largest number of threads in which user code may run on after its time limit. Each keeps its
memory and may use a core.
"""
MAX_RECURSION = 1_000_000
"""Largest recursion limit that user code may set. Endless recursion would fill the memory."""
_LATER = "do slow work before the run, or in a method of an environment"
_TICK_S = 0.5
_MAX_TEXT = 300
_PLAIN = (str, int, float, bool, bytes, type(None))
_MAX_CAUSES = 8


class DescribedError(EnvError):
    """An error whose text is already what `describe` returns, perhaps after the name of the user's
    code.

    It may come from another process.
    """


class EventLoopBlocked(BaseException):
    """Raised inside user code that blocks the event loop. `except Exception` does not catch it."""


class Interrupted(BaseException):
    """Raised inside user code whose thread has exceeded its time limit."""


class Overdue(EnvError):
    """Error: a function exceeded its time limit in a thread."""


class NoThread(RuntimeError):
    """Error: the watchdog's thread could not be started. The user's code is not the cause."""


class RunBlocked(RuntimeError):
    """Error: user code was interrupted `MAX_INTERRUPTIONS` times, because it blocked the event
    loop.
    """


class Running(NamedTuple):
    """User code that occupies the event loop, since when, and for how many seconds it may
    (`max_s`).
    """

    name: str
    since: float
    on_blocked: Callable[[float], None]
    max_s: float
    advice: str = "make it a plain function, which runs in a thread, or await"
    """Advice to the code's author in errors."""
    frame: Callable[[], FrameType | None] = lambda: None
    """A function that returns the frame of the thread for which the code waits. None if it waits
    for none.
    """


class Occupancy:
    """The user code that occupies the event loop. There is one such record, because one event loop
    runs all episodes of a process.
    """

    current: Running | None = None
    queued_before: float | None = None
    """Total seconds that the event loop's thread had waited for a processor when `current` began.
    """
    canceller: str = ""
    """Name of user code that cancelled its own task, and perhaps all tasks. Empty if none did."""
    num_interrupted: int = 0
    """Number of interruptions of user code since the event loop was started."""
    last_interrupted: str = ""
    """Description of the last interrupted code."""

    @contextmanager
    def waiting(
        self, max_s: float, frame: Callable[[], FrameType | None] | None = None
    ) -> Iterator[None]:
        """Return a context in which the current code may wait `max_s` seconds for a thread or
        process.

        `frame` returns the frame in which that thread is.
        """
        before = self.current
        if before:
            self.current = before._replace(
                max_s=max_s,
                advice="a deterministic run waits for it: make it quicker, or leave out "
                "deterministic",
                frame=frame or before.frame,
            )
        try:
            yield
        finally:
            self.current = before and before._replace(since=time.monotonic())

    def own_s(self, seconds: float) -> float:
        """Return for how many of the last `seconds` the event loop's thread did not wait for a
        processor.
        """
        if seconds <= BLOCKED_S or self.queued_before is None:
            return seconds
        return seconds - (queued_s(threading.get_native_id()) - self.queued_before)

    def require_few_interruptions(self) -> None:
        """Raise `RunBlocked` if user code was interrupted `MAX_INTERRUPTIONS` times or more."""
        if self.num_interrupted >= MAX_INTERRUPTIONS:
            count = self.num_interrupted
            text = f"code blocked all episodes {count} times. The last: {self.last_interrupted}"
            raise RunBlocked(text) from None  # a traceback would call `__str__` of the user's error


def queued_s(thread: int) -> float:
    """Return how many seconds a thread has waited for a processor. 0 if Linux does not report it.

    This time does not count as blocking: the machine is busy with other work.
    """
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_bytes().split()[1]) / 1e9
    return 0.0


OCCUPANCY = Occupancy()


@contextmanager
def time_limit(
    name: str, max_s: float | None = None, advice: str = "it must return at once: " + _LATER
) -> Iterator[None]:
    """Return a context for plain user code on the event loop, which must return at once.

    After `max_s` seconds, by default `HELD_S`, the code is interrupted and `EnvError` is raised
    with `name` and `advice`. A `Watchdog` must watch this thread.
    """
    before = OCCUPANCY.current
    limit_s = HELD_S if max_s is None else max_s
    OCCUPANCY.current = Running(name, time.monotonic(), lambda seconds: None, limit_s, advice)
    try:
        yield
    except EventLoopBlocked as error:
        raise EnvError(f"{name}: {error}") from None
    finally:
        OCCUPANCY.current = before and before._replace(since=time.monotonic())


def _place(frame: FrameType | None) -> str:
    """Return the file and line of the innermost frame outside of libraries, or else of `frame`."""
    place = user_frame(frame) or frame
    if place is None:
        return ""
    return f" in {place.f_code.co_filename}, line {place.f_lineno} ({place.f_code.co_name})"


class Watched(Generic[T]):
    """An awaitable that runs user code, named `name` in errors.

    Each time the code blocks the event loop too long, `on_blocked` is called with the seconds.
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
                # the error's traceback refers to this frame, which would be a reference cycle
                value = None
                held = OCCUPANCY.current
                OCCUPANCY.current = None
                seconds = OCCUPANCY.own_s(time.monotonic() - (held.since if held else since))
                if seconds > BLOCKED_S:
                    self._on_blocked(seconds)
            try:
                value = yield yielded
                resume = turns.send
            except BaseException as error:  # noqa: BLE001 - the work gets it
                value = error
                resume = turns.throw


def watch_tasks(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> "asyncio.Task[Any]":
    """Create a task: a task factory for event loops. Tasks that user code creates are watched."""
    if running := OCCUPANCY.current:
        work = _await(Watched(work, running.name, running.on_blocked))
    return asyncio.Task(work, loop=loop, **options)


async def _await(work: Awaitable[T]) -> T:
    return await work


class OwnThread(Executor):
    """A daemon thread that runs functions in order. It starts with the first one.

    Neither the end of the run nor that of Python waits for it, because a thread cannot be stopped.
    """

    def __init__(self, name: str = "environment") -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._calls: SimpleQueue[Callable[[], None] | None] | None = None
        self._num_submitted = 0
        self._num_finished = 0

    @property
    def is_started(self) -> bool:
        return self._thread is not None

    @property
    def busy(self) -> bool:
        """True while a function runs or waits to be run."""
        return self._num_finished < self._num_submitted

    def submit(self, function: Callable[..., T], /, *arguments: Any, **options: Any) -> Future[T]:
        """Run a function after those submitted earlier. Return a future, which cannot be
        cancelled.
        """
        future = _Outcome()
        future.set_running_or_notify_cancel()
        held = [future]

        def work() -> None:
            with held[0]:
                try:
                    result = function(*arguments, **options)
                finally:
                    self._num_finished += 1
                held[0].set_result(result)
            held.clear()  # else an error's frames and the future would hold each other

        if self._calls is None:
            self._calls = SimpleQueue()
            self._thread = threading.Thread(
                target=_run_calls, args=(self._calls,), name=self._name, daemon=True
            )
            self._thread.start()
        self._num_submitted += 1
        self._calls.put(work)
        return future

    def frame(self) -> FrameType | None:
        """Return the innermost Python frame of the thread. None before it has started."""
        return sys._current_frames().get(self._thread.ident or 0) if self._thread else None

    def close(self) -> None:
        """End the thread after the functions that were submitted so far."""
        if self._calls is not None:
            self._calls.put(None)
        if self.busy and self._thread:
            _hung[:] = [thread for thread in _hung if thread.is_alive()]
            _hung.append(self._thread)

    def interrupt(self) -> None:
        """Raise `Interrupted` in the current function, and end the thread."""
        self.close()
        if self.busy and self._thread and self._thread.ident:
            thread, error = ctypes.c_ulong(self._thread.ident), ctypes.py_object(Interrupted)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error)


_hung: list[threading.Thread] = []
"""Threads that were closed while their function still ran."""


def num_hung() -> int:
    """Return the number of threads in which user code runs on after its time limit.

    Code that waits in the operating system, such as `time.sleep`, cannot be interrupted.
    """
    return sum(thread.is_alive() for thread in _hung)


def _run_calls(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    with suppress(Interrupted):
        while work := calls.get():
            work()


async def run_limited(function: Callable[..., T], *arguments: Any, limit_s: float, name: str) -> T:
    """Run a plain function in a new thread and return its result.

    After `limit_s` seconds it is interrupted, and `Overdue` is raised with `name` in its text.
    """
    thread = OwnThread(name)
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await asyncio.get_running_loop().run_in_executor(thread, function, *arguments)
    except TimeoutError:
        if not limit.expired():
            raise
        raise Overdue(f"{name} gave no result within {limit_s:g} s") from None
    finally:
        thread.interrupt()
        del limit  # it holds the task, whose error holds this frame


class _Outcome(Future[Any]):
    """A future that is also a context. An error raised in the context becomes the future's
    result.
    """

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> bool:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            self.set_exception(error)
        # SystemExit would end the event loop, and a future does not accept StopIteration
        elif error:
            self.set_exception(EnvError(f"the code raised {describe(error)}"))
        return True


class UnjoinedThreads(ThreadPoolExecutor):
    """A thread pool whose shutdown does not wait for its threads, since user code may never
    return.
    """

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


def _never_free(work: object) -> None:
    """Keep an object alive to the end of Python, because freeing it would run user code again."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(work))


def abandon(task: asyncio.Task[Any]) -> None:
    """Do not wait for this task at the end of the event loop: its code ignores cancellation."""
    asyncio.tasks._unregister_task(task)
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    _never_free(task)


async def end_leftovers() -> None:
    """Cancel all other tasks of the event loop, and `abandon` those that ignore it."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for _ in range(MAX_CANCELS):
        for task in left:
            task.cancel()
        if left:
            _, left = await asyncio.wait(left, timeout=CANCEL_INTERVAL_S)
    for task in left:
        abandon(task)


def is_coroutine(function: Callable[..., Any]) -> bool:
    """Return True for an `async` function, or an object that is called like one."""
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


async def call(
    function: Callable[..., Any], *arguments: Any, thread: OwnThread | None = None
) -> Any:
    """Call user code and return its result.

    A plain function runs in `thread`, by default in a new one. If the caller is cancelled during
    this, the `CancelledError` names the line that the function has reached.
    """
    if is_coroutine(function):
        return await function(*arguments)
    own = thread or OwnThread()
    loop = asyncio.get_running_loop()
    try:
        result = await loop.run_in_executor(own, function, *arguments)
    except asyncio.CancelledError:
        if line := _standing_at(own.frame()):
            raise asyncio.CancelledError(line) from None
        raise
    finally:
        if thread is None:
            own.close()
    return await result if inspect.isawaitable(result) else result


async def call_named(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call user code like `call`. Errors are raised as `DescribedError` that begins with `name`."""
    try:
        return await call(function, *arguments)
    except Exception as error:
        raise DescribedError(f"{name}: {describe(error)}") from error


def describe(error: BaseException) -> str:
    r"""Return the type and text of an error, in one line of limited length.

    If user code raised it, file and line follow in brackets. Never raises an error, and waits at
    most `HELD_S` seconds for `__str__`. Use `describe_apart` on the event loop.

    >>> describe(ValueError("two\nlines"))
    'ValueError: two lines'
    """
    if isinstance(error, DescribedError):
        return one_line(str(error))[: 3 * _MAX_TEXT]
    text = error_text(error)
    escaped = one_line(text)
    if len(escaped) > _MAX_TEXT or len(text) > 4 * _MAX_TEXT:
        escaped = f"{escaped[:_MAX_TEXT]}... ({len(text):,} characters)"
    return f"{type(error).__name__}: {escaped}{user_line(error)}"


def error_text(error: BaseException) -> str:
    """Return `str(error)`, or in brackets the reason why that fails.

    Code of the user runs in a thread, for at most `HELD_S` seconds.
    """
    if _has_plain_text(error):
        return str(error)
    name = f"str() of a {type(error).__name__}"
    try:
        return finish_within(lambda: str.__str__(str(error)), HELD_S, name)
    except Overdue as slow:
        return f"(its text cannot be shown: {slow})"
    except Exception:  # noqa: BLE001 - the error that is described is another
        return "(its text cannot be shown: str() raises an error)"


def traceback_text(error: BaseException) -> str:
    """Return an error's traceback, without the texts of errors if these take more than `HELD_S`
    seconds.
    """
    try:
        lines = finish_within(lambda: format_error(error), HELD_S, "a traceback")
    except Overdue as slow:
        lines = [*traceback.format_tb(error.__traceback__), f"{type(error).__name__}: {slow}"]
    return "".join(lines)


async def describe_apart(error: BaseException) -> str:
    """Return `describe(error)`. If that may run user code, it runs in a thread."""
    return describe(error) if _has_plain_text(error) else await in_thread(describe, error)


def _has_plain_text(error: BaseException) -> bool:
    """Return True if `str(error)` runs no user code."""
    is_builtin = type(error).__str__ in (BaseException.__str__, KeyError.__str__)
    return is_builtin and all(type(each) in _PLAIN for each in error.args)


def finish_within(function: Callable[[], T], limit_s: float, name: str) -> T:
    """Run a function in a new thread, block until it ends, and return its result.

    After `limit_s` seconds it is interrupted, and `Overdue` is raised with `name` in its text.
    """
    thread = OwnThread(name)
    outcome = thread.submit(function)
    try:
        return outcome.result(limit_s)
    except TimeoutError:
        if outcome.done():
            raise
        raise Overdue(f"{name} gave no result within {limit_s:g} s") from None
    finally:
        thread.interrupt()


class Line(str):
    """The line that user code has reached in another thread, as a text."""

    __slots__ = ()


def _standing_at(frame: FrameType | None) -> Line:
    """Return the line that a frame has reached, outside of Python and of libraries. Empty without
    one.
    """
    return Line(show_frame(frame))


def user_line(error: BaseException) -> str:
    """Return, in brackets, the line of user code that raised or caused an error.

    It is the last line outside of Python and installed libraries, or else outside of Python. Empty
    if only this package ran, and for a `SyntaxError`, whose text has the line.
    """
    if isinstance(error, SyntaxError):
        return ""
    cause: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if cause is None:
            break
        if cause.args and isinstance(cause.args[0], Line):
            return f" ({cause.args[0]})"
        frames = [
            (frame.f_code, line)
            for frame, line in traceback.walk_tb(cause.__traceback__)
            if not is_hidden(frame.f_code.co_filename, frame.f_code.co_name)
        ]
        for libraries in (INSTALLED, PYTHON):
            for code, line in reversed(frames):
                if not code.co_filename.startswith(libraries):
                    return f" ({show_line(code.co_filename, line, code.co_name)})"
        cause = cause.__cause__ or cause.__context__
    return ""


class Watchdog:
    """A thread that interrupts user code that blocks the event loop.

    It watches the thread that enters this context. After `HELD_S` seconds it raises
    `EventLoopBlocked` in the code. If the code ignores this, `on_stuck` is called with a message,
    and the process ends. Python cannot interrupt code outside of the main thread: there, only a
    message is printed.
    """

    def __init__(self, on_stuck: Callable[[str], None] = lambda message: None) -> None:
        self._on_stuck = on_stuck
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._num_raised = 0
        self._traced = False

    def __enter__(self) -> None:
        self._watched = threading.get_ident()
        self._number = threading.get_native_id()
        self._is_main = threading.current_thread() is threading.main_thread()
        if self._is_main:
            self._previous = signal.signal(signal.SIGURG, self._interrupt)
        OCCUPANCY.canceller = ""
        OCCUPANCY.num_interrupted = 0
        beat()  # before any code of others, which may hold the lock that this thread needs
        try:
            self._thread.start()
        except RuntimeError as error:
            raise NoThread(str(error)) from None

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        OCCUPANCY.queued_before = None
        beat(last=True)
        if self._is_main:
            signal.signal(signal.SIGURG, self._previous)

    def _watch(self) -> None:
        seen: Running | None = None
        ticks = 0
        queued = first = queued_s(self._number)
        while not self._ended.wait(_TICK_S):
            beat()
            if sys.getrecursionlimit() > MAX_RECURSION:
                sys.setrecursionlimit(MAX_RECURSION)
            current = OCCUPANCY.current
            before, queued = queued, queued_s(self._number)
            if current is None or current is not seen:
                seen, first = current, queued
                OCCUPANCY.queued_before = before
                ticks = 0
                self._num_raised = 0
                continue
            ticks += 1  # a pause of the whole process counts as one interval
            seconds = ticks * _TICK_S - (queued - first)
            if seconds >= current.max_s:
                self._act(current, seconds)

    def _act(self, running: Running, seconds: float) -> None:
        message = (
            f"{running.name} has blocked the event loop for {seconds:.0f} s"
            f"{_place(sys._current_frames().get(self._watched))}; {running.advice}"
        )
        if not self._is_main:
            if seconds < running.max_s + _TICK_S:
                print(f"unstale: {message}", file=sys.stderr)  # noqa: T201 - the loop is blocked
            return
        if self._num_raised * _TICK_S < IGNORED_S and seconds < running.max_s + 2 * IGNORED_S:
            signal.pthread_kill(self._watched, signal.SIGURG)
        elif not self._traced:
            self._on_stuck(f"{message}. It ignores interruptions, so the process ends")
            end_process(1)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Raise `EventLoopBlocked` in the code that is running, unless a debugger is attached."""
        running = OCCUPANCY.current
        self._traced = sys.gettrace() is not None
        if running and not self._traced and time.monotonic() - running.since >= running.max_s / 2:
            self._num_raised += 1
            place = _place(running.frame() or frame)
            text = f"blocked the event loop for more than {running.max_s:g} s{place}"
            if self._num_raised == 1:
                OCCUPANCY.num_interrupted += 1
                OCCUPANCY.last_interrupted = f"{running.name} {text}. Advice: {running.advice}"
            raise EventLoopBlocked(f"it {text}; {running.advice}")
