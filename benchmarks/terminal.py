"""Measure how long agents in sandboxes stop the event loop of a run.

    python -m benchmarks.terminal          # five minutes on two cores

Episodes of the shipped examples run at once: each builds its sandbox, runs its commands and its
hidden tests, and is closed. A second case has no sandboxes: its environments answer after the same
number of short waits, so it shows what the loop and the machine do alone. Writes a dated table
under benchmarks/results/.

First the loop has nothing else to do. A gap is then the time between two rounds of the event loop,
which never sleeps. It is the shorter of elapsed time, in which other programs count, and the
processor time of this process.

Then the same episodes are those of runs: the engine samples every reply, and the trainer trains on
them. The environment carries out the right commands, whatever the reply says, so that the work of
the sandboxes is the same. A gap is how late a timer of a millisecond fires. The run is to blame for
the gap without the time that the loop's thread waited for a processor, but for no more than the
processor time of its process: the work of the loop, and waiting for threads that hold the
interpreter lock. A process beside it has an event loop with nothing but the timer.
"""

import argparse
import asyncio
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

from benchmarks import tables
from benchmarks.event_loop import RoundTimer
from examples.terminal_tasks import MadeTasks, job, jobs, repairs, train_jobs
from unstale.cli.session import train
from unstale.config import EvalConfig, ScheduleConfig, SftConfig, TaskConfig
from unstale.durability.console import Console
from unstale.envs import Message, ToolCall, Turn
from unstale.envs.guard import queued_s
from unstale.observe.trackers import RunOutcome
from unstale.records import Task

GOAL_MS, LATE_MS = 20.0, 5.0
WAIT_S = 0.01
TICK_S = 0.001
AGENTS = 64
"""Agents at once in a run."""


class GapTimer(RoundTimer):
    """A timer that keeps the time between every two rounds, in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.gaps: list[float] = []

    def _round(self) -> None:
        self.longest_s = 0.0
        super()._round()
        self.gaps.append(self.longest_s)


async def episode(tasks: MadeTasks, task: Task) -> float:
    """Run one episode with the right commands. Return its reward."""
    env, solved = await asyncio.to_thread(lambda: (tasks.env(task, 0), tasks.solved(task)))
    try:
        await env.begin()
        for command, _ in solved.commands:
            call = ToolCall("bash", {"command": command})
            await env.step(Message("assistant", "", (call,)))
        return (await env.step(Message("assistant", "Done."))).rewards["reward"]
    finally:
        await env.close()


async def waiting(tasks: MadeTasks, task: Task) -> float:
    """Do the same without a sandbox."""
    solved = await asyncio.to_thread(tasks.solved, task)
    for _ in range(len(solved.commands) + 2):
        await asyncio.sleep(WAIT_S)
    return 1.0


async def measure(
    play: Callable[[MadeTasks, Task], Awaitable[float]], tasks: MadeTasks, agents: int
) -> tuple[list[float], float, float]:
    """Run `agents` episodes at once, twice each. Return the gaps in seconds, the seconds, and the
    mean reward.
    """
    drawn = list(islice(tasks.train(0), 2 * agents))
    slots = asyncio.Semaphore(agents)

    async def one(task: Task) -> float:
        async with slots:
            return await play(tasks, task)

    began = time.monotonic()
    with GapTimer() as timer:
        rewards = await asyncio.gather(*map(one, drawn))
    return timer.gaps, time.monotonic() - began, sum(rewards) / len(rewards)


class Gap(NamedTuple):
    """How late a timer fired, in seconds."""

    at: float
    late: float
    queued: float
    """Seconds that the loop's thread waited for a processor meanwhile."""
    used: float
    """Processor seconds of all threads of this process meanwhile."""
    worked: float
    """Those of the loop's thread."""

    @property
    def own(self) -> float:
        """The part of the delay for which this process is to blame."""
        return max(0.0, min(self.late - self.queued, self.used))


class Ticker:
    """A timer that fires every millisecond, and measures how late it is."""

    def __init__(self) -> None:
        self.gaps: list[Gap] = []
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start on the running event loop. Without effect if it has started."""
        if self._timer is None:
            self._thread = threading.get_native_id()
            self._begin()

    def _begin(self) -> None:
        self._before = self._clocks()
        self._due = time.perf_counter() + TICK_S
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._fire)

    def _fire(self) -> None:
        now = time.perf_counter()
        passed = (b - a for a, b in zip(self._before, self._clocks(), strict=True))
        self.gaps.append(Gap(now, max(0.0, now - self._due), *passed))
        self._begin()

    def _clocks(self) -> tuple[float, float, float]:
        return queued_s(self._thread), time.process_time(), time.thread_time()


TICKER = Ticker()
"""The timer of the run that is measured."""


class DrivenTasks(MadeTasks):
    """Jobs that are done rightly, whatever the policy says. `AGENTS` of them have an environment at
    once."""

    def __init__(self, *, sandboxes: bool) -> None:
        super().__init__("jobs", job)
        self._sandboxes = sandboxes
        self._slots = asyncio.Semaphore(AGENTS)

    def env(self, task: Task, seed: int) -> Any:
        inner = super().env(task, seed) if self._sandboxes else WaitingEnv()
        commands = [command for command, _ in self.solved(task).commands]
        return DrivenEnv(inner, commands, self._slots)


def in_sandboxes() -> DrivenTasks:
    """Return the tasks of a run that is measured."""
    return DrivenTasks(sandboxes=True)


def without_sandboxes() -> DrivenTasks:
    """Return tasks whose environments only wait."""
    return DrivenTasks(sandboxes=False)


@dataclass
class DrivenEnv:
    """An environment that gets the given commands instead of those of the policy."""

    inner: Any
    commands: list[str]
    slots: asyncio.Semaphore
    begun: bool = False

    async def begin(self) -> Turn:
        TICKER.start()
        await self.slots.acquire()
        self.begun = True
        turn: Turn = await self.inner.begin()
        return turn

    async def step(self, reply: Message) -> Turn:
        calls = [ToolCall("bash", {"command": each}) for each in self.commands[:1]]
        del self.commands[:1]
        turn: Turn = await self.inner.step(Message("assistant", reply.content, tuple(calls)))
        return turn

    async def close(self) -> None:
        try:
            await self.inner.close()
        finally:
            if self.begun:
                self.slots.release()


class WaitingEnv:
    """An environment without a sandbox."""

    async def begin(self) -> Turn:
        await asyncio.sleep(WAIT_S)
        return Turn((Message("user", "Do what job.txt says."),))

    async def step(self, reply: Message) -> Turn:
        await asyncio.sleep(WAIT_S)
        if reply.tool_calls:
            return Turn((Message("tool", "(no output)"),))
        return Turn((), done=True, rewards={"reward": 1.0})

    async def close(self) -> None:
        pass


def tick_alone(pipe: Any) -> None:
    """Run an event loop with nothing but the timer until the pipe has a message. Send the gaps."""

    async def tick() -> list[Gap]:
        TICKER.start()
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        return TICKER.gaps

    pipe.send("ready")
    pipe.send(asyncio.run(tick()))


class StepEnds:
    """A tracker that notes when each step was logged."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.times.append(time.perf_counter())

    def text(self, step: int, name: str, text: str) -> None:
        pass

    def close(self, outcome: RunOutcome) -> None:
        pass


class RunGaps(NamedTuple):
    """The gaps of a run, and of the event loop beside it at the same time."""

    run: Sequence[Gap]
    beside: Sequence[Gap]
    episodes: int
    seconds: float
    tokens: float


def measure_run(tasks: str, steps: int) -> RunGaps:
    """Train for some steps. The first two are not counted, in which caches fill."""
    global TICKER
    TICKER = Ticker()
    ours, theirs = get_context("spawn").Pipe()
    beside = get_context("spawn").Process(target=tick_alone, args=(theirs,), daemon=True)
    beside.start()
    ours.recv()
    ends = StepEnds()
    with tempfile.TemporaryDirectory() as folder:
        config = replace(
            train_jobs(),
            task=TaskConfig(env=f"benchmarks.terminal:{tasks}"),
            runs=Path(folder),
            name="run",
            max_steps=steps + 2,
            sft=SftConfig(),
            schedule=ScheduleConfig(max_staleness=2, groups_per_step=8, group_size=8),
            eval=EvalConfig(tasks=0),
            trackers=cast(Any, ends),
        )
        rows = train(config, console=Console(file=StringIO())).metrics[-steps:]
    ours.send("end")
    alone = ours.recv()
    beside.join()
    began, ended = ends.times[-steps - 1], ends.times[-1]
    gaps, alone = ([gap for gap in each if began < gap.at < ended] for each in (TICKER.gaps, alone))
    tokens = sum(row["trainer/action_tokens"] for row in rows)
    return RunGaps(gaps, alone, 64 * steps, ended - began, tokens)


def idle_rows(agents: Sequence[int], repeats: int) -> tuple[list[str], float]:
    """Measure a loop that has nothing else to do. Return the rows, and the longest gap in ms."""
    rows, worst = [], 0.0
    for tasks in (jobs(), repairs()):
        for name, play in (("yes", episode), ("none", waiting)):
            for number in agents:
                asyncio.run(measure(play, tasks, number))  # the threads are there then
                found = [asyncio.run(measure(play, tasks, number)) for _ in range(repeats)]
                longest = [1e3 * max(gaps) for gaps, _, _ in found]
                late = [1e3 * gap for gaps, _, _ in found for gap in gaps if 1e3 * gap > LATE_MS]
                over = sum(gap > GOAL_MS for gap in late)
                rate = median(2 * number / seconds for _, seconds, _ in found)
                reward = min(reward for _, _, reward in found)
                if play is episode:
                    worst = max(worst, *longest)
                cells = (tasks.name, name, number, tables.spread(longest, "{:.1f} ms"), len(late))
                rows.append(tables.row(*cells, over, f"{rate:.1f}", f"{reward:g}"))
                tables.CONSOLE.print(rows[-1])
    return rows, worst


def run_rows(steps: int, repeats: int) -> tuple[list[str], float]:
    """Measure runs. Return the rows, and the longest gap in ms of those with sandboxes."""
    rows, worst = [], 0.0
    for name, tasks in (("yes", "in_sandboxes"), ("none", "without_sandboxes")):
        found = [measure_run(tasks, steps) for _ in range(repeats)]
        columns = {
            "to blame": [[gap.own for gap in each.run] for each in found],
            "work of the loop": [[gap.worked for gap in each.run] for each in found],
            "elapsed": [[gap.late for gap in each.run] for each in found],
            "beside it": [[gap.late for gap in each.beside] for each in found],
        }
        cells = [
            f"{tables.spread([1e3 * max(gaps) for gaps in runs], '{:.1f} ms')}; "
            f"{sum(1e3 * gap > LATE_MS for gaps in runs for gap in gaps)}, "
            f"{sum(1e3 * gap > GOAL_MS for gaps in runs for gap in gaps)}"
            for runs in columns.values()
        ]
        if name == "yes":
            worst = 1e3 * max(map(max, columns["to blame"]))
        rates = (
            f"{sum(each.episodes for each in found) / sum(each.seconds for each in found):.1f}",
            f"{sum(each.tokens for each in found) / sum(each.seconds for each in found):,.0f}",
        )
        rows.append(tables.row(name, *cells, f"{sum(e.seconds for e in found):.0f}", *rates))
        tables.CONSOLE.print(rows[-1])
    return rows, worst


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--agents", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of each run")
    parser.add_argument("--runs", type=int, default=3, help="runs of each kind")
    options = parser.parse_args()
    idle, worst_idle = idle_rows(options.agents, options.repeats)
    runs, worst_run = run_rows(options.steps, options.runs)
    lines = [
        f"Two episodes of each agent, {options.repeats} times. The longest gap is the median over "
        f"the times, with the least and the most. Gaps above {LATE_MS:g} ms and above the goal of "
        f"{GOAL_MS:g} ms are those of all times together.",
        "",
        *tables.columns(
            "tasks",
            "sandboxes",
            "agents",
            "longest gap",
            f"above {LATE_MS:g} ms",
            f"above {GOAL_MS:g} ms",
            "episodes/s",
            "least reward",
        ),
        *idle,
        "",
        f"While the engine samples and the trainer trains: {AGENTS} agents at once, {options.runs} "
        f"runs of {options.steps} steps. Each cell has the longest gap (median over the runs, with "
        f"the least and the most), then how many of all runs' gaps are above {LATE_MS:g} ms and "
        f"above {GOAL_MS:g} ms. A run is to blame for a gap without the time that its thread "
        "waited for a processor, and for no more than the processor time of its process. The loop "
        "beside it has nothing to do, on the same cores.",
        "",
        *tables.columns(
            "sandboxes",
            "gaps that the run is to blame for",
            "work of the loop's thread",
            "elapsed gaps of the run",
            "elapsed gaps of the loop beside it",
            "seconds",
            "episodes/s",
            "sampled tokens/s",
        ),
        *runs,
    ]
    tables.write("terminal-event-loop", "Agents in sandboxes and the event loop", lines)
    return int(max(worst_idle, worst_run) > GOAL_MS)


if __name__ == "__main__":
    from benchmarks import terminal  # the module whose timer the task set starts

    sys.exit(terminal.main())
