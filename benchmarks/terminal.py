"""Measure how long agents in sandboxes stop the event loop of a run.

    python -m benchmarks.terminal                                 # five minutes on two cores
    python -m benchmarks.terminal --runtime docker --agents 64 --episodes 1 --repeats 1 --runs 0

Episodes of the shipped examples run at once: each builds its sandbox, waits until all agents have
one, runs its commands and its hidden tests, and is closed. A second case has no sandboxes: its
environments answer after the same number of short waits, so it shows what the loop and the machine
do alone. Writes a dated table under benchmarks/results/. Sandboxes are kernel namespaces, or with
`--runtime docker` or `podman` containers of an image that has this machine's programs. All
containers then have the same job, since an image would be built for each one.

First the loop has nothing else to do. Then the same episodes are those of runs: the engine samples
every reply, and the trainer trains on them. The environment carries out the right commands,
whatever the reply says, so that the work of the sandboxes is the same.

A gap is how late a timer of a millisecond fires. The process is to blame for the gap without the
time that the loop's thread waited for a processor, which the programs of the agents use, but for no
more than its own processor time: the work of the loop, and waiting for threads that hold the
interpreter lock. Beside a run, another process has an event loop with nothing but the timer.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple, cast

from benchmarks import tables
from examples.terminal_tasks import MadeTasks, Solved, job, repairs, train_jobs
from tests.support.shell_image import write_root
from unstale.cli.process import limit_threads, rare_garbage_collection
from unstale.cli.session import train
from unstale.config import EvalConfig, RolloutConfig, ScheduleConfig, SftConfig, TaskConfig
from unstale.durability.console import Console
from unstale.envs import Message, ToolCall, Turn
from unstale.envs.sandboxes.containers import ContainerRuntime
from unstale.observe.trackers import RunOutcome
from unstale.records import Task

GOAL_MS, LATE_MS = 20.0, 5.0
WAIT_S = 0.01
TICK_S = 0.001
AGENTS = 64
"""Agents at once in a run."""
CONTAINERS = ("docker", "podman")
IMAGE = "localhost/unstale-benchmark"
TIMEOUT_S = 900.0
"""Time limit of a call of an environment. 64 containers start in a minute or more on two cores."""


def container_job(_: Random, right: float) -> Solved:
    """Return the job of all containers. Its commands are right."""
    solved = job(Random(0), right)
    dockerfile = f"FROM {IMAGE}\nWORKDIR /app\nCOPY . .\n"
    return replace(solved, task=replace(solved.task, dockerfile=dockerfile))


def build_image(program: str) -> None:
    """Build the image of the containers."""
    with tempfile.TemporaryDirectory() as folder:
        write_root(Path(folder), "cmp", "sort", "tac", "tail", "wc")
        Path(folder, "Dockerfile").write_text("FROM scratch\nCOPY . /\n")
        command = [program, "build", f"--tag={IMAGE}", folder]
        subprocess.run(command, check=True, capture_output=True)


class Jobs(MadeTasks):
    """Jobs in sandboxes that `runtime` makes."""

    def __init__(self, runtime: str) -> None:
        in_containers = runtime in CONTAINERS
        super().__init__("jobs", container_job if in_containers else job)
        if in_containers:
            self._runtime = ContainerRuntime(runtime, storage_mb=8)


async def episode(tasks: MadeTasks, task: Task, all_begun: asyncio.Barrier) -> float:
    """Run one episode with the right commands. Return its reward."""
    env, solved = await asyncio.to_thread(lambda: (tasks.env(task, 0), tasks.solved(task)))
    try:
        await env.begin()
        await all_begun.wait()
        for command, _ in solved.commands:
            call = ToolCall("bash", {"command": command})
            await env.step(Message("assistant", "", (call,)))
        return (await env.step(Message("assistant", "Done."))).rewards["reward"]
    finally:
        await env.close()


async def waiting(tasks: MadeTasks, task: Task, all_begun: asyncio.Barrier) -> float:
    """Do the same without a sandbox."""
    solved = await asyncio.to_thread(tasks.solved, task)
    await all_begun.wait()
    for _ in range(len(solved.commands) + 2):
        await asyncio.sleep(WAIT_S)
    return 1.0


async def measure(
    play: Callable[[MadeTasks, Task, asyncio.Barrier], Awaitable[float]],
    tasks: MadeTasks,
    agents: int,
    episodes: int,
) -> tuple[list["Gap"], float, float]:
    """Let `agents` agents run `episodes` episodes each. Return the gaps, the seconds, and the mean
    reward.
    """
    drawn = list(islice(tasks.train(0), episodes * agents))
    slots, all_begun = asyncio.Semaphore(agents), asyncio.Barrier(agents)

    async def one(task: Task) -> float:
        async with slots:
            return await play(tasks, task, all_begun)

    began = time.monotonic()
    ticker = Ticker()
    ticker.start()
    rewards = await asyncio.gather(*map(one, drawn))
    ticker.stop()
    return ticker.gaps, time.monotonic() - began, sum(rewards) / len(rewards)


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
            path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
            self._queued = os.open(path, os.O_RDONLY)  # an open file is read with one call
            self._begin()

    def stop(self) -> None:
        """End the timer."""
        assert self._timer is not None
        self._timer.cancel()
        os.close(self._queued)

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
        queued = int(os.pread(self._queued, 128, 0).split()[1]) / 1e9
        return queued, time.process_time(), time.thread_time()


TICKER = Ticker()
"""The timer of the run that is measured."""


class DrivenTasks(Jobs):
    """Jobs that are done rightly, whatever the policy says. `AGENTS` of them have an environment at
    once, which only waits if `runtime` is empty."""

    def __init__(self, runtime: str) -> None:
        super().__init__(runtime)
        self._sandboxes = bool(runtime)
        self._slots = asyncio.Semaphore(AGENTS)

    def env(self, task: Task, seed: int) -> Any:
        inner = super().env(task, seed) if self._sandboxes else WaitingEnv()
        commands = [command for command, _ in self.solved(task).commands]
        return DrivenEnv(inner, commands, self._slots)


in_namespaces = partial(DrivenTasks, "namespaces")
in_podman = partial(DrivenTasks, "podman")
in_docker = partial(DrivenTasks, "docker")
without_sandboxes = partial(DrivenTasks, "")
"""The tasks of runs that are measured."""


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
            rollout=RolloutConfig(max_turns=4, timeout_s=TIMEOUT_S),
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


def gap_cell(times: Sequence[Sequence[float]]) -> str:
    """Return the longest gap, then how many are above 5 and above 20 ms. Gaps are in seconds."""
    gaps = [1e3 * gap for each in times for gap in each]
    longest = tables.spread([1e3 * max(each) for each in times], "{:.1f} ms")
    return f"{longest}; {sum(gap > LATE_MS for gap in gaps)}, {sum(gap > GOAL_MS for gap in gaps)}"


def idle_rows(
    runtime: str, agents: Sequence[int], episodes: int, repeats: int
) -> tuple[list[str], float]:
    """Measure a loop that has nothing else to do. Return the rows, and the longest gap in ms."""
    rows, worst = [], 0.0
    for tasks in (Jobs(runtime), *([repairs()] if runtime == "namespaces" else [])):
        for name, play in ((runtime, episode), ("none", waiting)):
            for number in agents:
                asyncio.run(measure(play, tasks, number, 1))  # the threads are there then
                found = [
                    asyncio.run(measure(play, tasks, number, episodes)) for _ in range(repeats)
                ]
                columns = (
                    [[gap.own for gap in gaps] for gaps, _, _ in found],
                    [[gap.late for gap in gaps] for gaps, _, _ in found],
                )
                rate = median(episodes * number / seconds for _, seconds, _ in found)
                reward = min(reward for _, _, reward in found)
                if play is episode:
                    worst = max(worst, 1e3 * max(map(max, columns[0])))
                cells = (tasks.name, name, number, *map(gap_cell, columns))
                rows.append(tables.row(*cells, f"{rate:.1f}", f"{reward:g}"))
                tables.CONSOLE.print(rows[-1])
    return rows, worst


def run_rows(runtime: str, steps: int, repeats: int) -> tuple[list[str], float]:
    """Measure runs. Return the rows, and the longest gap in ms of those with sandboxes."""
    rows, worst = [], 0.0
    for name, tasks in ((runtime, f"in_{runtime}"), ("none", "without_sandboxes")):
        found = [measure_run(tasks, steps) for _ in range(repeats)]
        columns = {
            "to blame": [[gap.own for gap in each.run] for each in found],
            "work of the loop": [[gap.worked for gap in each.run] for each in found],
            "elapsed": [[gap.late for gap in each.run] for each in found],
            "beside it": [[gap.late for gap in each.beside] for each in found],
        }
        cells = map(gap_cell, columns.values())
        if name == runtime:
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
    parser.add_argument("--episodes", type=int, default=2, help="of each agent")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of each run")
    parser.add_argument("--runs", type=int, default=3, help="runs of each kind, or 0")
    parser.add_argument("--runtime", choices=("namespaces", *CONTAINERS), default="namespaces")
    options = parser.parse_args()
    if options.runtime in CONTAINERS:
        build_image(options.runtime)
    limit_threads()
    with rare_garbage_collection():  # as in a run: else a collection of all objects takes 0.2 s
        idle, worst_idle = idle_rows(
            options.runtime, options.agents, options.episodes, options.repeats
        )
    lines = [
        f"Episodes of each agent: {options.episodes}, all of them {options.repeats} times. All "
        "agents have a sandbox at once. A cell of gaps has the longest "
        "(median over the times, with the least and the most), then how many of all times' gaps "
        f"are above "
        f"{LATE_MS:g} ms and above the goal of {GOAL_MS:g} ms. The process is to blame for a gap "
        "without the time that the loop's thread waited for a processor, and for no more than its "
        "own processor time.",
        "",
        *tables.columns(
            "tasks",
            "sandboxes",
            "agents",
            "gaps that the process is to blame for",
            "elapsed gaps",
            "episodes/s",
            "least reward",
        ),
        *idle,
    ]
    worst_run = 0.0
    if options.runs:
        runs, worst_run = run_rows(options.runtime, options.steps, options.runs)
        lines += [
            "",
            f"While the engine samples and the trainer trains: {AGENTS} agents at once, "
            f"{options.runs} runs of {options.steps} steps. The loop beside a run has nothing to "
            "do, on the same cores.",
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
    suffix = f"-{options.runtime}" if options.runtime in CONTAINERS else ""
    tables.write(f"terminal-event-loop{suffix}", "Agents in sandboxes and the event loop", lines)
    return int(max(worst_idle, worst_run) > GOAL_MS)


if __name__ == "__main__":
    from benchmarks import terminal  # the module whose timer the task set starts

    sys.exit(terminal.main())
