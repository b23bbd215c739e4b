"""Measure the turns per second of a rollout in one process and in several (`rollout.processes`).

    python -m benchmarks.rollout_processes          # 3 minutes

Rollout, chat template, engine pools, HTTP, messages between processes and journal are the real
ones. Servers in other processes answer at once (`benchmarks.canned`). On a machine with fewer cores
than processes, these wait for each other. So the table has the processor time of each process per
turn, and the rate at which the busiest of them is full: that of the run's process, which writes the
journal for all, or that of a rollout process, which has its share of the turns.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from benchmarks import tables
from benchmarks.canned import UnprobedVllm
from benchmarks.event_loop import Case, RealRollout, TinyModel, moe_model, server
from unstale.builders.run import ROLLOUT_PROCESS, rollout_setup
from unstale.cli.process import limit_threads, rare_garbage_collection
from unstale.config import EngineConfig, RolloutConfig, RunConfig, TaskConfig
from unstale.durability.virtual_clock import run as run_loop
from unstale.engines.following import EngineHub, share
from unstale.engines.pool import EnginePool
from unstale.engines.registry import EngineOptions
from unstale.envs.registry import build_taskset
from unstale.rollout.processes.process import program
from unstale.rollout.processes.shards import ProcessRollout
from unstale.rollout.staleness_queue import PendingPieces

PROCESSES = (1, 2)
REPLY = 200
"""Tokens of a reply, as in the budget of the largest runs."""
TURNS = 8
EPISODES = 320
SERVERS = 2
MAX_CONTEXT = 8192
_TICK = os.sysconf("SC_CLK_TCK")

Figures = Mapping[str, float]


def cpu_s(pid: int) -> float:
    """Return the seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


async def measure(processes: int, model: TinyModel, urls: Sequence[str]) -> Figures:
    config = RunConfig(
        recipe="canned",
        model=str(model.folder),
        task=TaskConfig(env="benchmarks.canned:CannedTasks"),
        engine=EngineConfig(
            backend="vllm",
            urls=" ".join(urls),
            dtype="float32",
            max_context=MAX_CONTEXT,
            max_completion_tokens=REPLY,
        ),
        rollout=RolloutConfig(processes=processes, max_turns=64),
    )
    options = [
        EngineOptions(model.folder, url=url, dtype="float32", max_context=MAX_CONTEXT)
        for url in urls
    ]
    hub = EngineHub()
    pool = EnginePool([UnprobedVllm(each) for each in options])
    if processes > 1:
        pool = share(pool, hub)
    await pool.start()
    await pool.load(model.weights, 0)
    await pool.resume()
    case = Case("http", REPLY, TURNS, routes=False)
    with tempfile.TemporaryDirectory() as folder:
        real = RealRollout(case, Path(folder), pool, build_taskset(config.task))
        if processes > 1:
            real.use(
                ProcessRollout(
                    real.rollout.generator,
                    real.rollout.taskset,
                    config.rollout,
                    on_piece=PendingPieces().add,
                    setup=rollout_setup(config, (), hub, pool.max_running),
                    program=program(ROLLOUT_PROCESS),
                    hub=hub,
                )
            )
        async with real.rollout.resources:
            with real.journal:
                figures = await timed(real, processes)
    await pool.close()
    return figures


async def timed(real: RealRollout, processes: int) -> Figures:
    """Run the episodes. Return seconds and processor seconds, all per turn."""
    await real.play(8 * processes)
    pids = [pid for pid in getattr(real.rollout, "pids", []) if pid]
    before = [cpu_s(pid) for pid in pids]
    loop_s, process_s, began = time.thread_time(), time.process_time(), time.perf_counter()
    await real.play(EPISODES)
    wall_s = time.perf_counter() - began
    loop_s, process_s = time.thread_time() - loop_s, time.process_time() - process_s
    used = [cpu_s(pid) - earlier for pid, earlier in zip(pids, before, strict=True)]
    turns = EPISODES * TURNS
    return {
        "wall": wall_s / turns,
        "loop": loop_s / turns,
        "process": process_s / turns,
        "shard": max(used, default=0.0) / turns,
    }


def measure_one(processes: int) -> Figures:
    with ExitStack() as resources:
        folders = [
            Path(resources.enter_context(tempfile.TemporaryDirectory())) for _ in range(SERVERS + 1)
        ]
        model = moe_model(folders[0])
        urls = [resources.enter_context(server(each, routes=False)) for each in folders[1:]]
        limit_threads()
        with rare_garbage_collection():
            return run_loop(measure(processes, model, urls))


def in_new_process(processes: int) -> Figures:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure_one, processes).result()


def rate(figures: Figures) -> float:
    """Return the turns per second at which the busiest process uses one core."""
    return 1 / max(figures["process"], figures["shard"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--processes", type=int, nargs="+", default=PROCESSES)
    options = parser.parse_args()
    results: dict[int, list[Figures]] = {count: [] for count in options.processes}
    for _ in range(options.repeats):
        for count in options.processes:
            results[count].append(in_new_process(count))
    first = median(map(rate, results[options.processes[0]]))
    lines = [
        f"Replies of {REPLY} tokens, {TURNS} turns an episode, {SERVERS} servers that answer at",
        f"once, {EPISODES} episodes; medians of {options.repeats} rounds with the range. Rates are",
        "those at which the busiest process uses one core.",
        "",
        *tables.columns(
            "processes",
            "run's process ms a turn",
            "its event loop",
            "busiest rollout process",
            "turns/s at a full core",
            "ratio",
            "turns/s here",
        ),
    ]
    for count, runs in results.items():
        rates = [rate(each) for each in runs]
        lines.append(
            tables.row(
                count,
                *(
                    tables.spread([1e3 * each[name] for each in runs])
                    for name in ("process", "loop", "shard")
                ),
                f"{median(rates):,.0f}",
                f"{median(rates) / first:.2f}",
                f"{median(1 / each['wall'] for each in runs):,.0f}",
            )
        )
    tables.write("rollout-processes", "Turns a second with several rollout processes", lines)


if __name__ == "__main__":
    main()
