"""The program of a worker process: it creates environments and answers the calls of the run.

Calls of different episodes run concurrently on one event loop. Those of one episode run in order.
"""

import asyncio
import ctypes
import os
import resource
import signal
import socket
import threading
import traceback
from asyncio import TimerHandle
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from unstale.config import make_task
from unstale.durability.virtual_clock import RunLoop, VirtualLoop
from unstale.envs import (
    Closable,
    EnvError,
    HasSimulatedDelays,
    Resumable,
    RewardCombiner,
    Taskset,
    combine_rewards,
    implements,
)
from unstale.envs.guard import (
    OCCUPANCY,
    UnjoinedThreads,
    Watchdog,
    describe,
    user_line,
    watch_tasks,
)
from unstale.envs.hooks import EnvCaller, call_hook, is_own, make_env
from unstale.envs.registry import build_taskset
from unstale.isolation.wire import (
    MAX_ERROR,
    MAX_FRAME_BYTES,
    Row,
    check_length,
    read_message,
    turn_row,
)
from unstale.records import Task
from unstale.weights.child_process import Frames, frame

BEAT_S = 1.0
"""Seconds between two messages by which the run sees that the worker's event loop is alive."""
_SEND_WAIT_S = 5.0
_READ_BYTES = 1 << 16
_MAX_NAME = 200
_PDEATHSIG = 1


def main(descriptor: int, options: Row) -> None:
    """Answer the calls that the run sends over a socket. This runs in a worker process.

    `descriptor` is the socket's file descriptor. The process exits when the run closes the socket,
    so this never returns.
    """
    end_with(options["parent"])
    connection = _Connection(descriptor)
    try:
        taskset = build_taskset(make_task(**options["task"]))
    except ValueError as error:
        connection.send({"op": "refused", "error": describe(error)})
        os._exit(1)
    loop = FollowingLoop() if options["lockstep"] else RunLoop()
    loop.set_task_factory(cast(Any, watch_tasks))
    loop.set_default_executor(UnjoinedThreads(thread_name_prefix="asyncio"))
    server = Server(taskset, loop, connection.send)

    def on_stuck(message: str) -> None:
        connection.send({"op": "stuck", "error": message[:MAX_ERROR]})

    try:
        with Watchdog(on_stuck):
            connection.send({"op": "ready"})
            if isinstance(loop, FollowingLoop):
                _serve_in_lockstep(server, loop, connection)
            else:
                _serve(server, loop, connection)
    finally:  # an error of code outside of any call
        traceback.print_exc()
        os._exit(1)


def end_with(parent: int) -> None:
    """End this process when the process with the id `parent` ends. Ignore Ctrl-C, which the run
    handles.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # SIG_IGN would be inherited by programs
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class _Connection:
    """The socket to the run. The watchdog's thread may also send on it."""

    def __init__(self, descriptor: int) -> None:
        self.socket = socket.socket(fileno=descriptor)
        self._frames = Frames()
        self._lock = threading.Lock()

    def send(self, row: Row) -> None:
        """Send a message. If the run has closed the socket, end this process.

        Raises ValueError, TypeError or RecursionError if the message cannot be written as JSON, and
        ValueError if it is too long. Nothing is sent then.
        """
        data = b"".join(frame(row))
        if len(data) > MAX_FRAME_BYTES:
            raise ValueError(
                f"it takes {len(data):,} bytes; with task.isolate = process at most "
                f"{MAX_FRAME_BYTES:,} are allowed"
            )
        is_ours = self._lock.acquire(timeout=_SEND_WAIT_S)
        try:
            self.socket.sendall(data)
        except OSError:
            os._exit(0)  # the run has ended
        finally:
            if is_ours:
                self._lock.release()

    def receive(self) -> list[Row]:
        """Wait for data, and return the messages that it completes.

        If the run has closed the socket, end this process.
        """
        data = self.socket.recv(_READ_BYTES)
        if not data:
            os._exit(0)
        return [header for header, _ in self._frames.feed(data)]


def _serve(server: "Server", loop: RunLoop, connection: _Connection) -> None:
    def read() -> None:
        for row in connection.receive():
            server.receive(row)

    def beat() -> None:
        connection.send({"op": "beat"})
        loop.call_later(BEAT_S, beat)

    loop.add_reader(connection.socket, read)
    loop.call_soon(beat)
    while True:  # a thread of an environment may stop the loop
        loop.run_forever()


def _serve_in_lockstep(server: "Server", loop: "FollowingLoop", connection: _Connection) -> None:
    """For each message, do all work that it causes, then send the timers that this work has set."""
    while True:
        for row in connection.receive():
            loop.set_time(row["now"])
            if row["op"] == "fire":
                loop.fire(row["timer"])
            else:
                server.receive(row)
            loop.run_forever()
            connection.send({"op": "idle", "timers": loop.new_timers()})


class FollowingLoop(VirtualLoop):
    """An event loop that has the clock of the run's virtual event loop, on which its timers are
    set.
    """

    def __init__(self) -> None:
        self._timers: dict[int, TimerHandle] = {}
        self._new: list[tuple[int, float]] = []
        self._num_timers = 0
        super().__init__()

    def set_time(self, now: float) -> None:
        self._now = now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> TimerHandle:
        handle = TimerHandle(when, callback, args, self, context)
        self._timers[self._num_timers] = handle
        self._new.append((self._num_timers, when))
        self._num_timers += 1
        return handle

    def fire(self, timer: int) -> None:
        """Run the callback of the timer with this number, unless the timer was cancelled."""
        handle = self._timers.pop(timer)
        if not handle.cancelled():
            self._ready.append(handle)  # type: ignore[attr-defined]

    def new_timers(self) -> list[tuple[int, float]]:
        """Return the number and the time of each timer that was set since the last call."""
        timers, self._new = self._new, []
        return timers

    def _jump(self, seconds: float | None) -> None:
        """Return from `run_forever`, because no task can continue before the next message."""
        self.stop()


class Call(asyncio.Task[None]):
    """The asyncio task of one call from the run.

    `canceller` is the name of the user code that cancelled the task. It is empty if the run did, or
    if the task was not cancelled.
    """

    canceller = ""

    def cancel(self, msg: Any = None) -> bool:
        if running := OCCUPANCY.current:
            self.canceller = running.name
        return super().cancel(msg)


class Episode:
    """The environment of one episode, and its latest call."""

    def __init__(self, task: Task, seed: int) -> None:
        self.task = task
        self.seed = seed
        self.call: Call | None = None
        self.blocked_s = 0.0
        self.caller = EnvCaller(None, f"the environment of {task.key}", self.on_blocked)

    def on_blocked(self, caller: EnvCaller, seconds: float) -> None:
        self.blocked_s = max(self.blocked_s, seconds)


class Server:
    """Carries out, in a worker process, the run's calls to the environments of its episodes.

    The function `send` sends a message to the run. It raises the errors of `_Connection.send`.
    """

    def __init__(
        self, taskset: Taskset, loop: asyncio.AbstractEventLoop, send: Callable[[Row], None]
    ) -> None:
        self._taskset = taskset
        self._loop = loop
        self._send = send
        self._episodes: dict[int, Episode] = {}
        self._calls: dict[int, Call] = {}

    def receive(self, row: Row) -> None:
        """Handle a message of the run, which starts a call or cancels one."""
        number = row["call"]
        if row["op"] == "cancel":
            if call := self._calls.get(number):
                call.cancel()
            return
        key = row["episode"]
        if key not in self._episodes:
            self._episodes[key] = Episode(Task(*row["task"]), row["seed"])
        episode = self._episodes[key]
        previous = episode.call
        call = Call(self._answer(episode, previous, row), loop=self._loop)
        episode.call = self._calls[number] = call
        call.add_done_callback(partial(self._ended, episode, number))

    def _ended(self, episode: Episode, number: int, call: asyncio.Task[None]) -> None:
        """Remove a call that has ended.

        If it was cancelled before it began, send an answer for it.
        """
        del self._calls[number]
        if call.cancelled():
            answer: Row = {"op": "answer", "call": number, "blocked_s": 0.0, "busy": False}
            error = _describe(asyncio.CancelledError(), episode)
            self._send({**answer, "code": _code_name(episode.caller), "error": error})

    async def _answer(self, episode: Episode, previous: Call | None, row: Row) -> None:
        """Carry out the call in the message `row`, after the call `previous` of the same episode.

        Send the result, or the error that the environment raised.
        """
        episode.blocked_s = 0.0
        answer: Row = {"op": "answer", "call": row["call"]}
        try:
            if previous and not previous.done():
                await asyncio.wait((previous,))
            answer |= await self._perform(episode, row)
        except BaseException as error:  # noqa: BLE001 - the run gets it
            answer["line"] = user_line(error)[2:-1]
            answer["error"] = _describe(error, episode)
        answer |= {
            "code": _code_name(episode.caller),
            "blocked_s": episode.blocked_s,
            "busy": episode.caller.thread.busy,
        }
        try:
            self._send(answer)
        except (TypeError, ValueError, RecursionError) as error:
            problem = f"EnvError: its answer cannot be sent to the run as JSON: {error}"
            self._send({**answer, "turn": None, "snapshot": None, "error": problem[:MAX_ERROR]})

    async def _perform(self, episode: Episode, row: Row) -> Row:
        method = row["method"]
        if method == "close":
            return await self._close(episode, row["episode"])
        if episode.caller.env is None:
            await self._make(episode)
        caller = episode.caller
        env = caller.env
        if method == "resume":
            if Resumable not in caller.kinds:
                raise EnvError("it has no method resume, with which its record was made")
            await caller(env.resume, row["state"])
            return {}
        if HasSimulatedDelays in caller.kinds:
            await caller.hook("replaying", setattr, env, "replaying", row.get("replaying", False))
        arguments = row.get("arguments", ())
        if method == "step":
            arguments = (read_message(row["reply"]),)
        turn = await caller.turn(getattr(env, method), *arguments)
        if turn.rewards and implements(self._taskset, RewardCombiner):
            name = f"combine() of {row['task'][0]}"
            on_loop = is_own(self._taskset)
            turn = await call_hook(name, combine_rewards, self._taskset, turn, on_loop=on_loop)
        answer: Row = {"turn": turn_row(turn)}
        if Resumable in caller.kinds and not turn.done:
            answer["snapshot"] = await caller.hook("snapshot()", lambda: env.snapshot())
            check_length("snapshot()", [answer["snapshot"] or ""])
        return answer

    async def _make(self, episode: Episode) -> None:
        task, seed = episode.task, episode.seed
        episode.caller = await make_env(self._taskset, task, seed, episode.on_blocked)

    async def _close(self, episode: Episode, key: int) -> Row:
        """Close an environment, and remove its episode, which has the number `key`."""
        caller = episode.caller
        del self._episodes[key]
        try:
            if Closable in caller.kinds:
                await caller(caller.env.close)
        finally:
            caller.thread.close()
        return {}


def _code_name(caller: EnvCaller) -> str:
    name = caller.code_name[:_MAX_NAME]
    return name if name.isprintable() else ascii(name)


def _describe(error: BaseException, episode: Episode) -> str:
    call = episode.call
    if isinstance(error, asyncio.CancelledError) and call and call.cancelling():
        name = call.canceller
        own = name == episode.caller.name
        error = EnvError("it cancelled its own task" if own else f"{name} cancelled its task")
    text = describe(error)
    error.__traceback__ = None  # it refers to the frames of the environment
    return text
