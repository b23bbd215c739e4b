"""Measure how long agents in sandboxes stop the event loop of a run.

    python -m benchmarks.terminal          # two minutes on two cores

Episodes of the shipped examples run at once: each builds its sandbox, runs its commands and its
hidden tests, and is closed. A second case has no sandboxes: its environments answer after the same
number of short waits, so it shows what the loop and the machine do alone. Writes a dated table
under benchmarks/results/.

A gap is the time between two rounds of the event loop, which never sleeps here. It is the shorter
of elapsed time, in which other programs count, and the processor time of this process.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from itertools import islice
from statistics import median

from benchmarks import tables
from benchmarks.event_loop import RoundTimer
from examples.terminal_tasks import MadeTasks, jobs, repairs
from unstale.envs import Message, ToolCall
from unstale.records import Task

GOAL_MS, LATE_MS = 20.0, 5.0
WAIT_S = 0.01


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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--agents", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows, worst = [], 0.0
    for tasks in (jobs(), repairs()):
        for name, play in (("yes", episode), ("none", waiting)):
            for agents in options.agents:
                asyncio.run(measure(play, tasks, agents))  # the threads are there then
                found = [asyncio.run(measure(play, tasks, agents)) for _ in range(options.repeats)]
                longest = [1e3 * max(gaps) for gaps, _, _ in found]
                late = [1e3 * gap for gaps, _, _ in found for gap in gaps if 1e3 * gap > LATE_MS]
                over = sum(gap > GOAL_MS for gap in late)
                rate = median(2 * agents / seconds for _, seconds, _ in found)
                reward = min(reward for _, _, reward in found)
                if play is episode:
                    worst = max(worst, *longest)
                cells = (tasks.name, name, agents, tables.spread(longest, "{:.1f} ms"), len(late))
                rows.append(tables.row(*cells, over, f"{rate:.1f}", f"{reward:g}"))
                tables.CONSOLE.print(rows[-1])
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
        *rows,
    ]
    tables.write("terminal-event-loop", "Agents in sandboxes and the event loop", lines)
    return int(worst > GOAL_MS)


if __name__ == "__main__":
    sys.exit(main())
