"""Environments that do harm. Worker processes import this module too, so it imports little."""

import asyncio
import ctypes
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from unstale.envs import Message, NumberedTasks, ToolCall, Turn, guard
from unstale.records import Task


class Env:
    """A good environment: one question, one reply."""

    async def begin(self) -> Turn:
        return Turn((Message("user", "hi"),))

    async def step(self, reply: Message) -> Turn:
        return Turn((), done=True, rewards={"right": 1.0})


class ReturnsNothing(Env):
    async def step(self, reply: Message) -> Turn:
        return None  # type: ignore[return-value]


class LongText(Env):
    async def step(self, reply: Message) -> Turn:
        return Turn((Message("user", "x" * 100_000_000),))


class ManyMessages(Env):
    async def begin(self) -> Turn:
        return Turn((Message("user", ""),) * 100_000)


class SwallowsCancellation(Env):
    async def step(self, reply: Message) -> Turn:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()


class AwaitsATaskThatSwallows(Env):
    async def step(self, reply: Message) -> Turn:
        return await asyncio.create_task(SwallowsCancellation().step(reply))


class CancelsItself(Env):
    async def step(self, reply: Message) -> Turn:
        task = asyncio.current_task()
        assert task
        task.cancel()
        await asyncio.sleep(0)
        return await super().step(reply)


class StopsTheLoop(Env):
    async def step(self, reply: Message) -> Turn:
        asyncio.get_running_loop().stop()
        return await super().step(reply)


class ClosesTheLoop(Env):
    async def step(self, reply: Message) -> Turn:
        asyncio.get_running_loop().close()
        return await super().step(reply)


class NeverCloses(Env):
    async def close(self) -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()


class Sleeps(Env):
    async def step(self, reply: Message) -> Turn:
        time.sleep(3600)  # noqa: ASYNC251 - it blocks the event loop
        return await super().step(reply)


class Spins(Env):
    async def begin(self) -> Turn:
        while True:
            with suppress(Exception):
                sum(range(1000))


class SpinsInATask(Env):
    async def step(self, reply: Message) -> Turn:
        async def spin() -> Turn:
            while True:
                pass

        return await asyncio.create_task(spin())


class PlainAndEndless(Env):
    def step(self, reply: Message) -> Turn:  # type: ignore[override]
        threading.Event().wait()
        raise AssertionError


class IgnoresInterruptions(Env):
    async def step(self, reply: Message) -> Turn:
        while True:
            with suppress(BaseException):
                time.sleep(3600)  # noqa: ASYNC251 - it blocks the event loop


class HoldsTheLock(Env):
    """An environment that holds Python's global lock in C, as some regular expressions do."""

    async def step(self, reply: Message) -> Turn:
        re.fullmatch("(a|a)*b", "a" * 60)
        return await super().step(reply)


class Crashes(Env):
    async def step(self, reply: Message) -> Turn:
        ctypes.string_at(0)
        return await super().step(reply)


class Exits(Env):
    def step(self, reply: Message) -> Turn:  # type: ignore[override]
        os._exit(3)


class ExitsInATask(Env):
    async def step(self, reply: Message) -> Turn:
        async def leave() -> None:
            sys.exit("no licence")

        self.left = asyncio.create_task(leave())
        await asyncio.sleep(60)
        return await super().step(reply)


class ClosesDescriptors(Env):
    async def step(self, reply: Message) -> Turn:
        os.closerange(3, 1000)
        await asyncio.sleep(60)
        return await super().step(reply)


class SendsRubbish(Env):
    """An environment that writes to every open file, including the connection to the run."""

    async def step(self, reply: Message) -> Turn:
        for descriptor in range(3, 1000):
            with suppress(OSError):
                os.write(descriptor, bytes(100))
        await asyncio.sleep(60)
        return await super().step(reply)


class SendsALongFrame(Env):
    async def step(self, reply: Message) -> Turn:
        for descriptor in range(3, 1000):
            with suppress(OSError):
                os.write(descriptor, b"\x7f" * 12)
        await asyncio.sleep(60)
        return await super().step(reply)


class NotJson(Env):
    async def step(self, reply: Message) -> Turn:
        call: Any = {"price": {1, 2}}
        return Turn((Message("user", "", (ToolCall("buy", call),)),))


class LongAnswer(Env):
    """An environment whose turn has fewer characters than allowed, each of which takes 12 bytes in
    JSON.
    """

    async def step(self, reply: Message) -> Turn:
        return Turn((Message("user", "\U0001f642" * 6_000_000),))


class HoldsMemory(Env):
    async def step(self, reply: Message) -> Turn:
        self.held = b"x" * (300 << 20)
        await asyncio.sleep(60)
        return await super().step(reply)


class LeaksThreads(Env):
    async def step(self, reply: Message) -> Turn:
        for _ in range(40):
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        return await super().step(reply)


class LeavesAProgram(Env):
    def step(self, reply: Message) -> Turn:  # type: ignore[override]
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "unstale-left"])
        os._exit(0)


class CancelsEverything(Env):
    async def step(self, reply: Message) -> Turn:
        for task in asyncio.all_tasks():
            task.cancel()
        return await super().step(reply)


class Waits(Env):
    """A good environment that takes some time to answer."""

    async def step(self, reply: Message) -> Turn:
        await asyncio.sleep(1)
        return await super().step(reply)


HOSTILE: tuple[tuple[type[Env], str, str], ...] = (
    (ReturnsNothing, "step 1", "step() must return a Turn, got None"),
    (LongText, "step 1", "100,000,000 characters, at least 100,000,000 tokens; engine.max_con"),
    (ManyMessages, "begin", "Turn.messages has 100,000 messages"),
    (SwallowsCancellation, "step 1", "it ignores cancellation"),
    (AwaitsATaskThatSwallows, "step 1", "it ignores cancellation"),
    (CancelsItself, "step 1", "it cancelled its own task"),
    (StopsTheLoop, "step 1", "it stops the event loop of the run"),
    (ClosesTheLoop, "step 1", "Cannot close a running event loop"),
    (NeverCloses, "close", "it ignores cancellation"),
    (Sleeps, "step 1", "EventLoopBlocked: it blocked the event loop for more than 0.6 s"),
    (Spins, "begin", "EventLoopBlocked: it blocked the event loop for more than 0.6 s"),
    (SpinsInATask, "step 1", "EventLoopBlocked"),
    (PlainAndEndless, "step 1", "in step: threading.Event().wait())"),
)
"""Environments that fail without harm to others, with the stage and a part of the message."""


class HostileTasks(NumberedTasks):
    """A task set in which the number of a task is that of its environment in `classes`.

    All other numbers are good environments.
    """

    name = "toy"
    tools = ()

    def __init__(self, *classes: Callable[[], Any]) -> None:
        self.classes = classes

    def env(self, task: Task, seed: int) -> Any:
        known = 0 <= task.index < len(self.classes)
        return self.classes[task.index]() if known else Env()


ISOLATED = (
    *(hostile for hostile, _, _ in HOSTILE),
    IgnoresInterruptions,
    HoldsTheLock,
    Crashes,
    Exits,
    ExitsInATask,
    ClosesDescriptors,
    SendsRubbish,
    SendsALongFrame,
    NotJson,
    HoldsMemory,
    LeaksThreads,
    Waits,
    CancelsEverything,
    LeavesAProgram,
)


def isolated_tasks() -> HostileTasks:
    """Return tasks of all environments that need isolation, for workers that interrupt code after
    0.6 s.

    The last is `LongAnswer`, whose worker needs more memory than the others.
    """
    guard.HELD_S = 0.6
    guard.IGNORED_S = 0.5
    guard._TICK_S = 0.1
    return HostileTasks(*ISOLATED, LongAnswer)
