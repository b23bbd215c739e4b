"""A pool of processes that compute rewards. It grows while requests wait, and shrinks when idle.

`PoolSize` has the rule. The planner's simulated pool uses it too.
"""

import asyncio
import atexit
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

from unstale.envs import EnvError
from unstale.envs.guard import OCCUPANCY
from unstale.envs.hooks import has_virtual_clock
from unstale.frames import last_words, outcome

ANSWER_S = 600.0
"""Longest wait for an answer in a deterministic run, in seconds. The first also waits for the start
of the process.
"""
IDLE_STARTS = 10.0
"""Idle time after which a process ends, as a multiple of the time that a start takes. So starting
takes at most a tenth of the time for which a process is kept.
"""
MAX_FAILED = 3
"""Number of requests in a row that ended two processes each, after which a pool starts no more. No
other request was answered in between, so their processes would probably end too.
"""
_OUTPUT_BYTES = 1 << 20
"""Size at which the file with a process's output is emptied."""
_ROUNDING_S = 1e-9
_METRICS = ("processes_max", "waiting_max", "wait_s", "starts", "ends")


class PoolSize:
    """The rule for the number of processes of a pool, without a clock.

    Another process starts when requests have waited, since the last start, for as long as a start
    takes. A process ends when it had no work for ten times as long. So all starts together take at
    most as long as requests have waited. A pool without processes starts one for the first request.
    """

    def __init__(self, fewest: int, most: int) -> None:
        """Set the limits. `fewest` processes (0 or more) do not end, however long they are idle."""
        self.fewest = fewest
        self.most = most
        self.start_s: float | None = None
        """Seconds that the last start took. None before the first one ends."""
        self._waited_s = 0.0
        self._waits = False
        self._at = 0.0

    def observe(self, now: float, *, waiting: int, running: int, starting: int) -> bool:
        """Record how many requests wait, and how many processes run or start, from `now` on.

        Return True if a process must start now. Then call this again with the new numbers. Time in
        which no process runs does not count: another start would not shorten it.
        """
        if self._waits:
            self._waited_s += now - self._at
        self._at = now
        self._waits = waiting > 0 and running > 0 and running + starting < self.most
        if not waiting or running + starting >= self.most:
            return False
        if running + starting >= max(1, self.fewest) and not (
            self._waits and self._seconds_left() <= 0
        ):
            return False
        self._waited_s = 0.0
        return True

    def next_start_s(self) -> float:
        """Return after how many seconds a process must start if nothing changes until then."""
        return self._seconds_left() if self._waits else math.inf

    def idle_s_left(self, idle_s: float, processes: int) -> float:
        """Return after how many more seconds a process must end that had no work for `idle_s`.

        `processes` is the number of processes that run or start.
        """
        if processes <= self.fewest or self.start_s is None:
            return math.inf
        return _rounded(IDLE_STARTS * self.start_s - idle_s)

    def _seconds_left(self) -> float:
        return math.inf if self.start_s is None else _rounded(self.start_s - self._waited_s)


def _rounded(seconds: float) -> float:
    """Return 0 for a time that is too short to move a clock, and for a negative one."""
    return seconds if seconds > _ROUNDING_S else 0.0


class LineProcess:
    """A process that prints a line of JSON when it is ready, and answers each line with a line."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the process, in a session of its own: the run handles Ctrl-C."""
        self._stderr: IO[bytes] = tempfile.TemporaryFile(mode="a+b")  # noqa: SIM115 - see `close`
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            start_new_session=True,
            env=environment,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def first_line(self) -> dict[str, Any]:
        """Wait until the process is ready. Return what it prints, or `error` if it has ended.

        Other lines are passed over: a start file of Python may print some.
        """
        while line := self._line():
            if line.startswith("{"):
                return dict(json.loads(line))
        return {"error": self.end()}

    def ask(self, items: Sequence[str]) -> list[Any]:
        """Send items, each as JSON, to the process. Return an answer for each. Empty if the process
        has ended.
        """
        assert self._process.stdin
        try:
            self._process.stdin.write(f"[{', '.join(items)}]\n")
            self._process.stdin.flush()
            line = self._line()
        except (BrokenPipeError, ValueError):  # ValueError: `close` has closed the pipes
            return []
        if self._stderr.tell() > _OUTPUT_BYTES:
            os.lseek(self._stderr.fileno(), 0, os.SEEK_SET)  # the process writes at this offset
            os.ftruncate(self._stderr.fileno(), 0)
        return list(json.loads(line)) if line else []

    def _line(self) -> str:
        """Return the next line. Empty if the process has ended, also within a line."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        return line if line.endswith("\n") else ""

    def end(self) -> str:
        """Wait for the end of the process. Return the signal that ended it, or its exit code and
        the last line that it printed.
        """
        code = self._process.wait()
        last = last_words(self._stderr) if code >= 0 else ""  # progress of loading
        return f"its process has ended with {outcome(code)}{last}"

    def kill(self) -> None:
        """End the process, and those that it has started. They may have its pipes."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process, and wait for its end."""
        self.kill()
        self._process.communicate()  # closes the pipes
        self._stderr.close()


@dataclass(eq=False, slots=True)
class _Request:
    item: str
    found: "Future[Any]"
    at: float
    is_retried: bool = False
    is_abandoned: bool = False


@dataclass(eq=False, slots=True)
class _Member:
    """A process of a pool. `slot` is the smallest number that was free at its start."""

    slot: int
    wake: threading.Condition
    process: LineProcess | None = None
    thread: threading.Thread | None = None
    is_ready: bool = False
    is_ending: bool = False
    idle_since: float = 0.0
    batch: list[_Request] = field(default_factory=list)


class ElasticPool:
    """A pool of equal processes, each started by `start`, which answer requests.

    `PoolSize` decides how many there are. If a process ends while it works, its requests are sent
    once more, each alone, to another process. An answer that is a text is an error of its request.
    If `MAX_FAILED` requests in a row end two processes each, all further requests fail at once.
    """

    def __init__(  # noqa: PLR0913 - two errors, two limits, and what differs between pools
        self,
        start: Callable[[int], LineProcess],
        *,
        name: str,
        ended: type[EnvError],
        failed: type[EnvError] = EnvError,
        fewest: int,
        most: int,
        largest_batch: int = 1,
        ends_abandoned: bool = False,
    ) -> None:
        """Create the pool. No process starts before the first request.

        `start` gets the smallest number from 0 that no other process has. Errors begin with `name`
        if it is not empty. They are of the class `ended` if a process has ended or cannot start,
        and `failed` if it answers with an error. With `ends_abandoned`, a process ends if all
        requests on which it works are cancelled. `most` must be at least 1.
        """
        self._prefix = f"{name}: " if name else ""
        self.batches: list[int] = []
        """The number of requests that were sent together, each time."""
        self.versions: set[str] = set()
        """The versions of what the processes have loaded, which must be one. Empty at first."""
        self.size = PoolSize(fewest, most)
        self.starts = 0
        self.ends = 0
        self._seen: defaultdict[str, float] = defaultdict(float)
        """Sums and largest values since the last call of `read`, by the name of the metric."""
        self.most = most
        """Largest number of processes, as given. `size.most` is lower if some could not start."""
        self._start_process = start
        self._ended = ended
        self._failed = failed
        self._largest = largest_batch
        self._ends_abandoned = ends_abandoned
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[_Request] = deque()
        self._members: list[_Member] = []
        self._keeper: threading.Thread | None = None
        self._due = math.inf
        """Time at which `_keeper` calls `_update` next."""
        self._cause = ""
        self._num_failed = 0
        """Number of requests in a row that ended two processes, without an answer since."""
        _POOLS.add(self)

    async def ask(self, item: Any) -> Any:
        """Return the answer to a request. A deterministic run waits for it, without virtual time.

        Raises `EnvError` if the answer is an error, and `ended` if no process can answer.
        """
        found = self.submit(item)
        try:
            if has_virtual_clock():  # no batch may depend on real time
                with OCCUPANCY.waiting(ANSWER_S):
                    return found.result()
            return await asyncio.wrap_future(found)
        except BaseException:
            if not found.done():
                self._abandon(found)
            raise

    def submit(self, item: Any) -> "Future[Any]":
        """Add a request. Return a future of its answer, with the errors of `ask`."""
        try:
            text = json.dumps(item)
        except (TypeError, ValueError) as error:
            problem = f"requests are sent as JSON, and this one cannot be: {error}"
            raise self._failed(f"{self._prefix}{problem}") from None
        request = _Request(text, Future(), time.monotonic())
        with self._lock:
            self._waiting.append(request)
            self._update()
        return request.found

    def load(self) -> str:
        """Start a process now, unless one runs, and wait for it. Return an error text, or "" on
        success.
        """
        with self._changed:
            if not self._members and not self._cause:
                self._spawn()
            self._changed.wait_for(
                lambda: not self._members or any(each.is_ready for each in self._members)
            )
            return self._cause

    def read(self) -> dict[str, float]:
        """Return the number of processes, and sums and largest values since the last call."""
        with self._lock:
            seen = {name: self._seen[name] for name in _METRICS} | {"processes": self._number}
            self._seen.clear()
            self._seen["processes_max"] = self._number
            return seen

    @property
    def pids(self) -> list[int]:
        """The process ids of the processes that are ready."""
        with self._lock:
            return [each.process.pid for each in self._members if each.is_ready and each.process]

    def close(self) -> None:
        """End all processes. Requests without an answer get an `EnvError`."""
        with self._changed:
            members, self._members = self._members, []
            waiting, self._waiting = self._waiting, deque()
            keeper, self._keeper, self._cause = self._keeper, None, ""
            self._num_failed = 0
            self._seen.clear()
            for member in members:
                member.is_ending = True
                member.wake.notify()
                if member.process:
                    member.process.kill()
            self._changed.notify_all()
        threads = [each.thread for each in members]
        for thread in (*threads, keeper):
            if thread and thread is not threading.current_thread():
                thread.join()
        self._fail(waiting, "it was closed", EnvError)

    def _abandon(self, found: "Future[Any]") -> None:
        """Remove an abandoned request that waits. End the process that works on it alone, as it may
        never answer.
        """
        with self._lock:
            self._waiting = deque(each for each in self._waiting if each.found is not found)
            for member in self._members:
                for request in member.batch:
                    request.is_abandoned |= request.found is found
                is_over = member.batch and all(each.is_abandoned for each in member.batch)
                if self._ends_abandoned and is_over and member.process:
                    member.process.kill()
            self._update()

    def _update(self) -> float:
        """Hand out requests, and start and end processes. Return the seconds until the next change.

        The caller holds the lock.
        """
        if self._cause:
            waiting, self._waiting = self._waiting, deque()
            self._fail(waiting, self._cause, self._ended)
        now = time.monotonic()
        ready = [each for each in self._members if each.is_ready and not each.is_ending]
        for member in ready:
            if not member.batch and (batch := self._take(now)):
                member.batch = batch
                self.batches.append(len(batch))
                member.wake.notify()
        while self.size.observe(
            now,
            waiting=len(self._waiting),
            running=len(ready),
            starting=sum(not each.is_ready for each in self._members),
        ):
            self._spawn()
        left = self.size.next_start_s()
        for member in reversed(ready):
            if not member.batch:
                idle_left = self.size.idle_s_left(now - member.idle_since, self._number)
                if idle_left <= 0:
                    member.is_ending = True
                    member.wake.notify()
                left = min(left, idle_left or math.inf)
        seen = self._seen
        seen["waiting_max"] = max(seen["waiting_max"], len(self._waiting))
        seen["processes_max"] = max(seen["processes_max"], self._number)
        if now + left < self._due:
            self._changed.notify_all()
        return left

    @property
    def _number(self) -> int:
        return sum(not each.is_ending for each in self._members)

    def _take(self, now: float) -> list[_Request]:
        """Return the next requests for one process. A request that is sent again is sent alone."""
        batch: list[_Request] = []
        while self._waiting and len(batch) < self._largest:
            if self._waiting[0].is_retried and batch:
                break
            request = self._waiting.popleft()
            if not request.is_retried and not request.found.set_running_or_notify_cancel():
                continue  # its episode was cancelled
            self._seen["wait_s"] += now - request.at
            batch.append(request)
            if request.is_retried:
                break
        return batch

    def _spawn(self) -> None:
        """Start a process in a thread of its own. The caller holds the lock."""
        taken = {each.slot for each in self._members}
        slot = next(n for n in range(len(taken) + 1) if n not in taken)
        member = _Member(slot, threading.Condition(self._lock))
        self._members.append(member)
        self._members.sort(key=lambda each: each.slot)
        self.starts += 1
        self._seen["starts"] += 1
        member.thread = threading.Thread(
            target=self._serve, args=(member,), daemon=True, name="reward"
        )
        member.thread.start()
        if self._keeper is None:
            self._keeper = threading.Thread(target=self._keep, daemon=True, name="rewards")
            self._keeper.start()

    def _keep(self) -> None:
        """Call `_update` when time alone requires it, until `close`."""
        with self._changed:
            while self._keeper is threading.current_thread():
                left = self._update()
                self._due = time.monotonic() + left
                self._changed.wait(None if math.isinf(left) else left)

    def _serve(self, member: _Member) -> None:
        """Start a process, and send it one batch after another until it ends."""
        began = time.monotonic()
        with self._lock:
            if member.is_ending:
                return
            try:
                member.process = process = self._start_process(member.slot)
            except OSError as error:
                self._cannot_start(member, f"no process can be started: {error}")
                return
        loaded = process.first_line()
        with self._lock:
            cause = str(loaded.get("error", "")) or self._other_version(loaded)
            if not cause and not member.is_ending:
                self.size.start_s = time.monotonic() - began
                member.is_ready, member.idle_since = True, time.monotonic()
                self._update()
                self._changed.notify_all()
        if cause:
            process.close()
            self._cannot_start(member, cause)
            return
        while batch := self._next_batch(member):
            answers = process.ask([each.item for each in batch])
            if not answers:
                self._lost(member, batch, process.end())
                break
            with self._lock:
                self._num_failed = 0
                member.batch, member.idle_since = [], time.monotonic()
                self._update()
            for request, answer in zip(batch, answers, strict=True):
                if isinstance(answer, str):
                    self._fail([request], answer, self._failed)
                else:
                    request.found.set_result(answer)
        process.close()
        with self._lock:
            if member in self._members:
                self._remove(member)
                self._update()

    def _other_version(self, loaded: Mapping[str, Any]) -> str:
        """Return an error text if a process has loaded another version than the others."""
        self.versions.add(str(loaded.get("version", "")))
        if len(self.versions) == 1:
            return ""
        known = self.versions - {version := str(loaded.get("version", ""))}
        self.versions = known
        return (
            f"its files have changed from version {min(known)} to {version} since the first "
            "process read them: restore them, or start the run again"
        )

    def _next_batch(self, member: _Member) -> list[_Request]:
        with self._lock:
            member.wake.wait_for(lambda: member.batch or member.is_ending)
            return member.batch

    def _cannot_start(self, member: _Member, cause: str) -> None:
        """Fail all requests if no other process runs. Otherwise the pool does not grow further."""
        with self._lock:
            if member not in self._members:
                return  # it was closed
            self._remove(member)
            if self._members:
                self.size.most = max(1, len(self._members))
                text = f"unstale: {self._prefix}{cause}. {self.size.most} processes remain"
                print(text, file=sys.stderr)  # noqa: T201 - the run continues
            else:
                self._cause = cause
            self._update()
            self._changed.notify_all()

    def _remove(self, member: _Member) -> None:
        self._members.remove(member)
        self.ends += 1
        self._seen["ends"] += 1

    def _lost(self, member: _Member, batch: Sequence[_Request], cause: str) -> None:
        """Send the requests of a process that has ended to another one, or fail them."""
        failed: list[_Request] = []
        with self._lock:
            is_closed = member not in self._members
            for request in reversed(batch):
                if is_closed or request.is_retried or request.is_abandoned:
                    failed.append(request)
                    self._num_failed += not (is_closed or request.is_abandoned)
                else:
                    request.is_retried, request.at = True, time.monotonic()
                    self._waiting.appendleft(request)
            member.batch, member.is_ending = [], True
            if self._num_failed >= MAX_FAILED:
                self._cause = cause
        text = "it was closed" if is_closed else cause
        self._fail(failed, text, EnvError if is_closed else self._ended)

    def _fail(self, requests: Iterable[_Request], text: str, kind: type[EnvError]) -> None:
        for request in requests:
            if request.found.running() or request.found.set_running_or_notify_cancel():
                request.found.set_exception(kind(f"{self._prefix}{text}"))


_POOLS: "weakref.WeakSet[ElasticPool]" = weakref.WeakSet()


def read_pools() -> dict[str, float]:
    """Return metrics of this process's pools since the last call, summed over the pools.

    Empty if no process was ever started, and in a deterministic run, where no request waits.
    """
    pools = [each for each in list(_POOLS) if each.starts]
    if not pools or has_virtual_clock():
        return {}
    read = [pool.read() for pool in pools]
    return {f"reward_pool/{name}": sum(each[name] for each in read) for name in read[0]}


@atexit.register
def _end() -> None:
    for pool in list(_POOLS):
        pool.close()
