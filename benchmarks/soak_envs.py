"""Misbehaving environments and agents of `benchmarks.soak`. Two of three tasks behave well."""

import asyncio
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from unstale.envs import Message, NumberedTasks, Turn, sandbox
from unstale.envs.external import ExternalAgent
from unstale.records import Task

HELD_S = 20.0
"""Seconds for which a plain method hangs in the run's own process. It cannot be ended there."""
LIMITS = sandbox.Limits(seconds=2.0, memory_mb=256, processes=8)
_FORKS = """
import os, socket, time
for _ in range(30):
    try:
        if os.fork() == 0:
            socket.socketpair(), os.pipe()
            time.sleep(1000)
    except OSError:
        break
held = [open("/dev/null") for _ in range(200)]
time.sleep(1000)
"""
"""A program that forks until it is refused, and leaves descriptors open."""


class Good:
    """An environment of one question and one reply."""

    async def begin(self) -> Turn:
        return Turn((Message("user", "Which number follows 6?"),))

    async def step(self, reply: Message) -> Turn:
        return await self.last(reply)

    async def last(self, reply: Message) -> Turn:
        return Turn((), done=True, rewards={"even": float(len(reply.content) % 2 == 0)})


class HangsInAThread(Good):
    def step(self, reply: Message) -> Turn:  # type: ignore[override]
        time.sleep(HELD_S)
        raise AssertionError("it is overdue")


class BlocksTheLoop(Good):
    async def step(self, reply: Message) -> Turn:
        time.sleep(1)  # noqa: ASYNC251 - it blocks the event loop
        return await self.last(reply)


class RaisesALongError(Good):
    async def step(self, reply: Message) -> Turn:
        raise ValueError("x" * 20_000_000)


class SlowText(Exception):
    def __str__(self) -> str:
        time.sleep(1)
        return "slow"


class RaisesASlowError(Good):
    async def step(self, reply: Message) -> Turn:
        raise SlowText


class LeavesThreads(Good):
    async def step(self, reply: Message) -> Turn:
        for _ in range(3):
            threading.Thread(target=time.sleep, args=(HELD_S,), daemon=True).start()
        return await self.last(reply)


class LeavesTasks(Good):
    async def step(self, reply: Message) -> Turn:
        self.left = [asyncio.create_task(asyncio.sleep(HELD_S)) for _ in range(20)]
        return await self.last(reply)


class EndlessGenerator(Good):
    async def step(self, reply: Message) -> Turn:
        async def words() -> Any:
            for number in itertools.count():
                await asyncio.sleep(0.05)
                yield number

        async for _ in words():
            pass
        raise AssertionError


class EndlessMessages(Good):
    async def step(self, reply: Message) -> Turn:
        def each() -> Iterator[Message]:
            while True:
                yield Message("user", "more")

        return Turn(each())  # type: ignore[arg-type]


class OpensFiles(Good):
    async def step(self, reply: Message) -> Turn:
        self.files = [tempfile.TemporaryFile() for _ in range(10)]  # noqa: SIM115
        self.sockets = [socket.socket() for _ in range(10)]
        return await self.last(reply)


class ForksInASandbox(Good):
    async def step(self, reply: Message) -> Turn:
        await sandbox.run(_FORKS, limits=LIMITS)
        return await self.last(reply)


class FailsToClose(Good):
    async def close(self) -> None:
        raise OSError("the service is gone")


class NeverCloses(Good):
    async def close(self) -> None:
        await asyncio.Event().wait()


HERE = (
    *(HangsInAThread, BlocksTheLoop, RaisesALongError, RaisesASlowError, LeavesThreads),
    *(LeavesTasks, EndlessGenerator, EndlessMessages, OpensFiles, ForksInASandbox),
    *(FailsToClose, NeverCloses),
)
"""Environments that the run's own process can bear for a long time."""


class HangsForEver(Good):
    def step(self, reply: Message) -> Turn:  # type: ignore[override]
        threading.Event().wait()
        raise AssertionError


class BlocksForEver(Good):
    async def step(self, reply: Message) -> Turn:
        threading.Event().wait()
        raise AssertionError


class IgnoresInterruptions(Good):
    async def step(self, reply: Message) -> Turn:
        while True:
            try:
                time.sleep(3600)  # noqa: ASYNC251 - it blocks the event loop
            except BaseException:  # noqa: BLE001 - it ignores everything
                continue


class Exits(Good):
    def step(self, reply: Message) -> Turn:  # type: ignore[override]
        os._exit(3)


class LeavesDescriptors(Good):
    def step(self, reply: Message) -> Turn:  # type: ignore[override]
        for _ in range(10):
            os.pipe()
        return Turn((), done=True, rewards={"even": 0.0})


class LeavesAProgram(Good):
    def step(self, reply: Message) -> Turn:  # type: ignore[override]
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        return Turn((), done=True, rewards={"even": 0.0})


IN_WORKERS = (
    *HERE,
    *(HangsForEver, BlocksForEver, IgnoresInterruptions, Exits, LeavesDescriptors, LeavesAProgram),
)


class Tasks(NumberedTasks):
    """A task set in which every third task has one of the environments `kinds`, in turn."""

    name = "soak"
    tools = ()

    def __init__(self, kinds: tuple[type[Good], ...]) -> None:
        self.kinds = kinds

    def env(self, task: Task, seed: int) -> Any:
        number, place = divmod(task.index, 3)
        if place or task.split == "held_out":
            return Good()
        return self.kinds[number % len(self.kinds)]()


def here() -> Tasks:
    """Return the tasks whose environments run in the process of the run."""
    return Tasks(HERE)


def in_workers() -> Tasks:
    """Return the tasks whose environments run in worker processes."""
    return Tasks(IN_WORKERS)


def _parse(base_url: str) -> tuple[str, int]:
    host, _, port = base_url.split("/")[2].partition(":")
    return host, int(port)


def _bomb() -> dict[str, Any]:
    parts = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 4} for i in range(12)}
    schema = {"$defs": {**parts, "d12": {}}, "$ref": "#/$defs/d0"}
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def _deep() -> list[Any]:
    schema: dict[str, Any] = {}
    for _ in range(400):
        schema = {"type": "object", "properties": {"a": schema}}
    return [{"type": "function", "function": {"name": "deep", "parameters": schema}}]


async def agent(base_url: str, kind: str, seed: int, api_key: str) -> float:
    """Call the policy once, after a misbehaviour of this kind."""
    import httpx

    if kind in ("idle", "half"):
        sent = b"" if kind == "idle" else b"POST /v1/chat/completions HTTP/1.1\r\nContent-Le"
        for _ in range(8):
            _, writer = await asyncio.open_connection(*_parse(base_url))
            writer.write(sent)
            _LEFT.append((time.monotonic(), writer))
        while _LEFT and _LEFT[0][0] < time.monotonic() - 60:
            _LEFT.pop(0)[1].close()
    bodies: dict[str, dict[str, Any]] = {
        "bomb": {"response_format": _bomb()},
        "deep": {"tools": _deep()},
        "many": {"messages": [{"role": "user", "content": ""}] * 50_000},
        "blank": {"messages": [{"role": "user", "content": " " * 1_500_000}]},
    }
    async with httpx.AsyncClient(base_url=base_url, timeout=60) as client:
        head = {"Authorization": f"Bearer {api_key}"}
        good = {"messages": [{"role": "user", "content": "Which number follows 6?"}]}
        for body in ([good | bodies[kind]] if kind in bodies else []) + [good]:
            answer = await client.post("/chat/completions", json=body, headers=head)
        if kind == "hang":
            await asyncio.Event().wait()
        if kind == "error":
            raise SlowText
        return float(len(answer.json()["choices"][0]["message"]["content"] or "") % 2 == 0)


_LEFT: list[tuple[float, asyncio.StreamWriter]] = []
"""Connections that agents leave open, with the time of their start. They are closed after 60 s."""

AGENTS = ("idle", "half", "bomb", "deep", "many", "blank", "hang", "error")


def agents() -> ExternalAgent:
    """Return the tasks of agents that misbehave at the endpoint."""
    kinds = [kind for bad in AGENTS for kind in (bad, "good", "good")]
    return ExternalAgent(agent, kinds, held_out=["good"] * 4, name="soak", timeout_s=40.0)


FACTORIES: dict[str, Callable[[], Any]] = {
    "here": here,
    "in_workers": in_workers,
    "agents": agents,
}
