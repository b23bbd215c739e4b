"""Measure what it costs to bring the environment of a forked episode to its turn.

    python -m benchmarks.fork_cost --replies 8

For each shipped environment and library, an episode gets the same reply 8 times. `again`: a new
environment gets these replies too. `snapshot`: the state is saved after the last of them, and
restored in a new environment. `copy`: `fork()` of the environment. Beside it is the time of its
last turn. An environment without the method has no figure. Delays are off. `user model` is a server
on this machine that answers each request after 50 ms. Writes a dated table under
benchmarks/results/.
"""

import argparse
import asyncio
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from statistics import median
from typing import Any

from benchmarks.tables import CONSOLE, columns, row, write
from examples.terminal_tasks import repairs
from unstale.config.tasks import make_task
from unstale.envs import (
    Closable,
    Forkable,
    Message,
    Resumable,
    Taskset,
    ToolCall,
    implements,
    sandbox,
)
from unstale.envs.guard import call
from unstale.envs.registry import build_taskset
from unstale.records import Task


def called(tool: str, **arguments: Any) -> Callable[[Taskset, Task], Message]:
    return lambda taskset, task: Message("assistant", "", (ToolCall(tool, arguments),))


def said(text: str) -> Callable[[Taskset, Task], Message]:
    return lambda taskset, task: Message("assistant", text)


def found(taskset: Any, task: Task) -> Message:
    scenario = getattr(taskset, "inner", taskset).scenario(task)
    return Message("assistant", "", (ToolCall("find_user", {"email": scenario.user.email}),))


USER = "tau2:retail, user model"
CASES: dict[str, Callable[[Taskset, Task], Message]] = {
    "retail": found,
    "chain:retail": lambda taskset, task: found(taskset, taskset.tasks_of(task)[0]),  # type: ignore[attr-defined]
    "calculator": called("calculate", expression="12 * 7"),
    "gymnasium:Taxi-v4": said("0"),
    "textarena:LightsOut-v0": said("[0 0]"),
    "bfcl:multi_turn_base": called("ls"),
    "tau2:retail": called("list_all_product_types"),
    "tau2:telecom": called("get_customer_by_id", customer_id="C1001"),
    USER: said("What is your order?"),
    "python": called("python", code="print(2 ** 100)"),
    "terminal": called("bash", command="echo one >> log; wc log"),
}
"""`task.env` -> the reply that its environment gets. `terminal` has the tasks of an example."""


class UserModel(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(0.05)
        message = {"role": "assistant", "content": "I do not know."}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        body = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy"}
        answer = json.dumps(body | {"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None: ...


def taskset_of(name: str) -> Taskset:
    if name == "terminal":
        return repairs()
    if name == USER:
        server = ThreadingHTTPServer(("127.0.0.1", 0), UserModel)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        return build_taskset(make_task("tau2:retail", user=url))
    return build_taskset(make_task(name))


class Forked:
    """Episodes of one environment, which are brought to the same turn in different ways."""

    def __init__(self, taskset: Taskset, reply: Callable[[Taskset, Task], Message]) -> None:
        self._taskset = taskset
        self._task = next(islice(taskset.train(0), 1))
        self._reply = reply(taskset, self._task)

    async def played(self, replies: int) -> tuple[Any, float]:
        """Return an environment after so many replies, and the milliseconds of its last turn."""
        env = self._taskset.env(self._task, 0)
        await call(env.begin)
        seconds = 0.0
        for number in range(replies):
            begun = time.perf_counter()
            turn = await call(env.step, self._reply)
            seconds = time.perf_counter() - begun
            assert not turn.done, f"{self._task.key} ends after {number + 1} replies"
        return env, 1e3 * seconds

    async def times(self, replies: int) -> dict[str, float]:
        """Return the milliseconds of one turn and of each way to continue from it, by name."""
        env, turn_ms = await self.played(replies)
        begun = time.perf_counter()
        again, _ = await self.played(replies)
        found = {"turn": turn_ms, "again": 1e3 * (time.perf_counter() - begun)}
        opened = [env, again]
        if implements(env, Resumable) and (state := env.snapshot()) is not None:
            begun = time.perf_counter()
            state = env.snapshot()
            opened.append(self._taskset.env(self._task, 0))
            await call(opened[-1].resume, state)
            found["snapshot"] = 1e3 * (time.perf_counter() - begun)
        if implements(env, Forkable):
            begun = time.perf_counter()
            opened.append(env.fork())
            found["copy"] = 1e3 * (time.perf_counter() - begun)
        for each in opened:
            if implements(each, Closable):
                await call(each.close)
        return found


def measure(name: str, replies: int, rounds: int) -> str:
    forked = Forked(taskset_of(name), CASES[name])

    async def repeated() -> list[dict[str, float]]:
        return [await forked.times(replies) for _ in range(rounds + 1)][1:]  # the first imports

    found = asyncio.run(repeated())
    ways = ("turn", "again", "snapshot", "copy")
    middle = {way: median(each[way] for each in found) for way in ways if way in found[0]}
    CONSOLE.print(name, middle)
    return row(name, *(f"{middle[way]:.3g}" if way in middle else "" for way in ways))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--replies", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--envs", nargs="+", default=[*CASES])
    options = parser.parse_args()
    sandbox.allow_weak()  # the programs are those of this file
    lines = columns("`task.env`", "one turn, ms", "again, ms", "snapshot, ms", "copy, ms")
    lines += [measure(name, options.replies, options.rounds) for name in options.envs]
    text = f"Median of {options.rounds} rounds, for a fork after {options.replies} replies."
    title = "Time to bring the environment of a forked episode to its turn"
    write("fork-cost", title, [text, "", *lines])


if __name__ == "__main__":
    main()
