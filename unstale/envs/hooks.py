"""Call hooks: plain methods of task sets and environments, which may be slow code of the user.

They run in threads, so that the event loop and all other episodes continue. Hooks of this package
run on the event loop: they take a few microseconds, and a change of threads about 100.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from contextvars import copy_context
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import islice
from reprlib import repr as short_repr
from types import CodeType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from unstale.envs import (
    Closable,
    EnvError,
    Forkable,
    HasSimulatedDelays,
    HasWorker,
    Resumable,
    Taskset,
    Turn,
    implements,
    task_identity,
)
from unstale.envs.guard import (
    OCCUPANCY,
    THREAD_S,
    DescribedError,
    Line,
    OwnThread,
    Watched,
    call,
    describe,
    time_limit,
    user_line,
)
from unstale.frames import show_frame, show_line
from unstale.records import Task

T = TypeVar("T")

MAX_IDLE = 8
"""Largest number of threads that are kept for later calls of hooks (plain methods of user code).
Starting a thread takes longer than a call.
"""
QUICK_S = 0.002
"""Seconds for which the event loop blocks on a hook (a plain method of user code) before it awaits
it. It does not block if it already awaits another hook.

Most hooks end within microseconds, and an `await` takes five times as much processor time. It also
lets episodes that start together continue one by one, each with disk writes of its own.
"""
SLOW_S = 0.5
"""Seconds for which a hook (a plain method of user code) waits for the end of the previous one.
Quicker hooks run in the order of their calls.
"""
MAX_IDENTITIES = 100_000
"""Largest number of tasks whose identity (a name that repetitions share) is cached. Far fewer are
in flight.
"""
_KINDS = (Closable, Forkable, HasSimulatedDelays, HasWorker, Resumable)
_idle: list[OwnThread] = []
"""Threads that wait for another call of a hook (a plain method of user code)."""
_unfinished: set[Future[Any]] = set()
"""Futures of the calls of hooks (plain methods of user code) that the event loop awaits."""
os.register_at_fork(after_in_child=_idle.clear)
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def is_own(value: object) -> bool:
    """Return True for a task set or environment of this package, whose plain methods are quick.

    False for adapters, which run code of libraries, and for external agents, whose tasks are a list
    of the user.
    """
    module = type(value).__module__
    runs_others = ".adapters." in module or module == "unstale.envs.external"
    if runs_others or not module.startswith("unstale."):
        return False
    inner = getattr(value, "inner", None)
    return all(map(is_own, [*getattr(value, "parts", ()), *([inner] if inner else [])]))


async def call_hook(
    name: str,
    function: Callable[..., T],
    *arguments: Any,
    on_loop: bool,
    thread: OwnThread | None = None,
) -> T:
    """Call a plain function of a task set or environment, and return its result.

    It runs in `thread`, by default in one of a few threads that run such calls one after the other.
    With `on_loop` it runs on the event loop and must be quick. If the caller is cancelled, the
    error has `name` and the line that the function has reached. With a virtual clock, no virtual
    time passes during the call.
    """
    if on_loop:
        with time_limit(name):
            return function(*arguments)
    is_virtual = has_virtual_clock()
    slot = None if thread or is_virtual else await _free_slot()
    own = thread or (_idle.pop() if _idle else OwnThread("hook"))
    running = own.submit(copy_context().run, function, *arguments)
    try:
        if is_virtual:
            with time_limit(name), OCCUPANCY.waiting(THREAD_S, own.frame):
                return running.result()
        if not _unfinished:
            with suppress(TimeoutError):
                running.exception(QUICK_S)
        if running.done():
            return running.result()
        _unfinished.add(running)
        return await asyncio.wrap_future(running)
    except asyncio.CancelledError:
        line = show_frame(own.frame())
        raise asyncio.CancelledError(Line(f"{name}: {line}" if line else name)) from None
    finally:
        _unfinished.discard(running)
        if slot:
            slot.release()
        if thread is None and (own.busy or len(_idle) >= MAX_IDLE):
            own.close()
        elif thread is None:
            _idle.append(own)


def has_virtual_clock() -> bool:
    """Return True in a deterministic run, whose event loop waits for calls in other threads."""
    return getattr(asyncio.get_running_loop(), "waits_for_threads", False)


async def _free_slot() -> asyncio.Semaphore | None:
    """Wait until no other hook (plain method of user code) runs, at most `SLOW_S` seconds.

    Return the semaphore to release afterwards, or None after a time-out.
    """
    slot = _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore())
    if not slot.locked():
        await slot.acquire()
        return slot
    with suppress(TimeoutError):
        await asyncio.wait_for(slot.acquire(), SLOW_S)
        return slot
    return None


async def hook_of(taskset: Taskset, method: str, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function of a task set like `call_hook`, and return its result.

    `method` is its name in errors. Raises `DescribedError` after `THREAD_S` seconds.
    """
    name = f"{method} of {taskset.name}"
    try:
        # a timer on a virtual clock would change the order of other timers
        async with asyncio.timeout(None if has_virtual_clock() else THREAD_S) as limit:
            return await call_hook(name, function, *arguments, on_loop=is_own(taskset))
    except TimeoutError as error:
        if not limit.expired():
            raise
        text = f"no result within {THREAD_S:g} s{user_line(error)}"
    raise DescribedError(text)


async def tasks_of(taskset: Taskset, seed: int) -> AsyncIterator[Task]:
    """Yield the training tasks of a task set. User code runs in a thread.

    Raises `EnvError` if the task set raises an error or takes too long for a task.
    """
    if is_own(taskset):
        for task in taskset.train(seed):
            yield task
        return
    tasks: Iterator[Task] | None = None

    def take() -> Sequence[Task]:
        nonlocal tasks
        if tasks is None:
            tasks = iter(taskset.train(seed))
        return tuple(islice(tasks, 1))

    while True:
        try:
            taken = await hook_of(taskset, "train()", take)
        except EnvError:
            raise
        except Exception as error:
            raise EnvError(f"train() of {taskset.name}: {describe(error)}") from error
        if not taken:
            return
        yield taken[0]


@dataclass(frozen=True, slots=True)
class EnvCaller:
    """Calls the methods of one environment. Coroutines are watched, plain methods run in a thread.

    All of its plain methods run in the same thread, because libraries may require that.
    """

    env: Any
    name: str
    on_blocked: Callable[["EnvCaller", float], None]
    """Called with this object and with how many seconds a coroutine has blocked the event loop."""
    thread: OwnThread = field(default_factory=OwnThread)
    code_name: str = "the environment"
    kinds: tuple[Any, ...] = ()
    """Optional protocols that the environment implements, such as `Closable`."""

    def __call__(self, method: Callable[..., Any], *arguments: Any) -> Watched[Any]:
        work = call(method, *arguments, thread=self.thread)
        return Watched(work, self.name, partial(self.on_blocked, self))

    async def turn(self, method: Callable[..., Any], *arguments: Any) -> Turn:
        """Call `begin` or `step` of the environment, and return a plain `Turn`.

        An object of a subclass is converted, because its fields may be properties. Raises
        `EnvError` for any other result.
        """
        turn = await self(method, *arguments)
        if type(turn) is Turn:
            return turn
        return await self.hook(f"the result of {method.__name__}()", _plain_turn, turn, method)

    async def hook(self, name: str, function: Callable[..., T], *arguments: Any) -> T:
        """Call a plain method of the environment like `call_hook`, and return its result."""
        thread = self.thread if self.thread.is_started else None
        name = f"{name} of {self.name}"
        on_loop = is_own(self.env)
        return await call_hook(name, function, *arguments, on_loop=on_loop, thread=thread)

    async def fork(self) -> "EnvCaller":
        """Return a copy of a `Forkable` environment. The caller must close it.

        Raises `EnvError` if the environment returns itself, or no environment.
        """
        copy = await self.hook("fork()", self.env.fork)
        if copy is self.env or not hasattr(copy, "step"):
            raise EnvError(f"fork() must return a copy of the environment, got {short_repr(copy)}")
        return replace(self, env=copy, thread=OwnThread())


def _plain_turn(turn: Any, method: Any) -> Turn:
    if not isinstance(turn, Turn):
        name, got = f"{type(method.__self__).__name__}.{method.__name__}()", short_repr(turn)
        raise EnvError(f"{name} must return a Turn, got {got}{_defined_at(method)}")
    return Turn(*(getattr(turn, each.name) for each in fields(Turn)))


def _defined_at(function: Any) -> str:
    """Return the place where a function is defined, in brackets. Empty without Python source."""
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    if not isinstance(code, CodeType):
        return ""
    return f" ({show_line(code.co_filename, code.co_firstlineno, code.co_name)})"


async def make_env(
    taskset: Taskset, task: Task, seed: int, on_blocked: Callable[[EnvCaller, float], None]
) -> EnvCaller:
    """Create the environment of a task, and return the object that calls its methods.

    The caller must close the `thread` of this object in the end.
    """

    def make() -> tuple[Any, str, tuple[Any, ...]]:
        env = taskset.env(task, seed)
        code = str(getattr(env, "code_name", "the environment"))
        return env, code, tuple(kind for kind in _KINDS if implements(env, kind))

    name = f"env() of {taskset.name}"
    env, code, kinds = await call_hook(name, make, on_loop=is_own(taskset))
    return EnvCaller(env, f"{code} of {task.key}", on_blocked, code_name=code, kinds=kinds)


class Identities:
    """A cache of the identities of tasks, which are texts that all repetitions of a task share.

    `find` computes an identity in a thread. A call of this object computes it at once, which may
    block.
    """

    def __init__(self, taskset: Taskset) -> None:
        self._taskset = taskset
        self._is_own = is_own(taskset)
        self._known: dict[Task, str] = {}

    async def find(self, task: Task) -> str:
        """Return the name that all repetitions of a task share. Raises `EnvError` if this takes too
        long.
        """
        if self._is_own or task in self._known:
            return self(task)
        name = await hook_of(self._taskset, "identity()", task_identity, self._taskset, task)
        return self._kept(task, name)

    def __call__(self, task: Task) -> str:
        if (name := self._known.get(task)) is None:
            is_running = asyncio._get_running_loop() is not None
            limit = time_limit(f"identity() of {self._taskset.name}")
            with limit if is_running else nullcontext():
                name = task_identity(self._taskset, task)
        return name if self._is_own else self._kept(task, name)

    def _kept(self, task: Task, name: str) -> str:
        self._known[task] = name
        if len(self._known) > MAX_IDENTITIES:
            del self._known[next(iter(self._known))]
        return name


async def with_place(text: str, taskset: Taskset, task: Task) -> str:
    """Return a text about a task, with the file and line from which the task was read, if any."""
    place = ""
    with suppress(Exception):  # only task sets that read files have it
        place = await hook_of(taskset, "place_of()", lambda: taskset.place_of(task))  # type: ignore[attr-defined]
    return f"{text} ({place})" if place else text
