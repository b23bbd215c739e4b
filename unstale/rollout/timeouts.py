"""Time-outs, turns and cancellation of asyncio tasks that run the code of environments."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from unstale.envs import EnvError
from unstale.envs.guard import CANCEL_INTERVAL_S, MAX_CANCELS, OCCUPANCY, abandon

_T = TypeVar("_T")

END_S = 4.0
"""Seconds that an environment has to release its resources after its first cancellation."""


MOST_IN_ROUND = 4
"""Number of episodes that continue in one round of the event loop."""


class Turns:
    """A queue of episodes that could continue, so that the rounds of the event loop stay short.

    Many replies and environments can answer at once. All of their episodes in one round would let
    timers, engines and the endpoint wait. Their number decides, not time, so that deterministic
    runs repeat.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._passed = 0
        """Number of episodes that continue in this round."""

    async def wait(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._passed == MOST_IN_ROUND or self._waiting:
            turn = loop.create_future()
            self._waiting.append(turn)
            await turn
            return
        if not self._passed:
            loop.call_soon(self._next, loop)
        self._passed += 1

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        self._passed = 0
        while self._waiting and self._passed < MOST_IN_ROUND:
            turn = self._waiting.popleft()
            if not turn.done():  # else its episode was cancelled
                turn.set_result(None)
                self._passed += 1
        if self._passed:
            loop.call_soon(self._next, loop)


_TURNS: WeakKeyDictionary[asyncio.AbstractEventLoop, Turns] = WeakKeyDictionary()
"""The queue of each event loop."""


async def in_turn() -> None:
    """Wait until this episode may continue. Without others, that is at once."""
    loop = asyncio.get_running_loop()
    await _TURNS.setdefault(loop, Turns()).wait(loop)


class Attempt(asyncio.Task[None]):
    """An asyncio task that runs the code of an environment.

    If the code ignores cancellation, nobody waits for the task any more, and it is left running.
    """

    __slots__ = ("_outcome", "ending", "stage")

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        loop = asyncio.get_running_loop()
        self.stage = ""
        """Name of the current or last stage of the episode, such as "step 2"."""
        self.ending = False
        """True if the task's owner has cancelled it, or no longer waits for it."""
        self._outcome: asyncio.Future[Any] = loop.create_future()
        super().__init__(_settle(work, self._outcome), loop=loop)

    async def outcome(self) -> Any:
        """Wait until the environment's code ends. Return its result, or raise its error.

        Raises `EnvError` if the code cancels its own task, or ignores cancellation.
        """
        try:
            return await self._outcome
        except asyncio.CancelledError:
            await self._end()
            raise
        finally:
            # the error's traceback may refer to this task, which would be a reference cycle
            del self._outcome

    def cancel(self, msg: Any = None) -> bool:
        running = OCCUPANCY.current
        if running and asyncio.current_task() is self:
            OCCUPANCY.canceller = running.name
        return super().cancel(msg)

    def abandon(self) -> None:
        """Stop waiting for the task, because its code ignores cancellation."""
        self.ending = True
        abandon(self)
        if not self._outcome.done():
            self._outcome.set_exception(EnvError("it ignores cancellation"))

    async def _end(self) -> None:
        """Cancel the task, several times if needed, and wait up to `END_S` seconds for its end."""
        self.ending = True
        for seconds in (END_S, *[CANCEL_INTERVAL_S] * (MAX_CANCELS - 1)):
            self.cancel()
            await asyncio.wait((self,), timeout=seconds)
            if self.done():
                return
        abandon(self)


async def _settle(work: Coroutine[Any, Any, Any], outcome: asyncio.Future[Any]) -> None:
    """Run `work` and store its result or error in `outcome`, unless that is set already."""
    try:
        result = await work
    except asyncio.CancelledError:
        if not outcome.done():
            outcome.set_exception(EnvError("it cancelled its own task"))
        raise
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - the owner raises it, also a panic of Rust code
        if not outcome.done():
            outcome.set_exception(error)
    else:
        if not outcome.done():
            outcome.set_result(result)
    finally:
        del outcome  # the error's traceback refers to this frame, which would be a reference cycle


class PersistentTimeout:
    """A context that raises TimeoutError after `timeout_s` seconds.

    Unlike `asyncio.timeout`, it repeats the cancellation, because the code of an environment may
    ignore the first one. It also leaves no reference cycle.
    """

    __slots__ = ("_loop", "_num_cancelled", "_timeout_s", "_timer", "task")

    def __init__(self, timeout_s: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self._loop = asyncio.get_running_loop()
        self._num_cancelled = 0
        self._timeout_s = timeout_s
        self._timer = self._loop.call_later(timeout_s, self._cancel)

    def _cancel(self) -> None:
        if self._num_cancelled == MAX_CANCELS and isinstance(self.task, Attempt):
            self.task.abandon()
            return
        self.task.cancel()
        self._num_cancelled += 1
        self._timer = self._loop.call_later(CANCEL_INTERVAL_S, self._cancel)

    async def without_limit(self, work: Awaitable[None]) -> None:
        """Await `work` without a time limit. Then start the time limit again from zero."""
        self._timer.cancel()
        await work
        self._timer = self._loop.call_later(self._timeout_s, self._cancel)

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """Raise TimeoutError if this time limit ended the body, unless another cancellation came
        too.
        """
        self._timer.cancel()
        for _ in range(self._num_cancelled):
            self.task.uncancel()
        cancelled = isinstance(error, asyncio.CancelledError) and not self.task.cancelling()
        del self.task  # the timer holds the error, whose traceback refers to this frame
        if self._num_cancelled and cancelled:
            raise TimeoutError(f"no answer within {self._timeout_s:g} s") from error


async def run_to_completion(work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of `work`, which a first cancellation of the caller does not interrupt.

    When `work` has ended, its error is raised. If it has none, the cancellation is raised. A second
    cancellation ends the wait at once.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()):
            raise error from None
        raise


def first_error(group: BaseException) -> BaseException:
    """Return the first error in an exception group, which may be nested.

    An exception that is not a group is returned unchanged.
    """
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
