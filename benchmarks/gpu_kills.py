"""Kill the processes of a run on GPUs, one after the other, and see that it goes on.

    python -m benchmarks.gpu_kills FOLDER        # FOLDER is for the run

The run trains the small policy of the package on Ray, on simulated nodes of this machine, and
samples with vLLM if it is installed. Its trainer rank, the raylet below it, its engine host and the
host's engine process are killed by SIGKILL. Each must be back within 60 s and the time of a start,
and nothing may be lost or trained twice.
"""

import argparse
import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.chaos import Witness
from benchmarks.chaos_child import adopt_orphans
from benchmarks.cluster_chaos import (
    SMALL,
    Nodes,
    RunProcess,
    descendants,
    end_orphans,
    is_host_back,
    is_step,
    parents,
    title,
)
from benchmarks.gpu_experts import MEMORY_SHARE, uses_vllm
from benchmarks.tables import CONSOLE

LIMIT_S = 60.0
"""Seconds that a recovery may take in addition to the time of a start."""
STEPS = 12
"""Steps of the run whose processes are killed. It must not end before the last kill."""
ENGINE_PROCESSES = ("unstale.engines.embedded.worker", "VLLM::")
"""Parts of the titles of engine processes."""
_TICK_S = 0.05


@dataclass(frozen=True, slots=True)
class Death:
    """A process that was killed, with the seconds until the run trained or sampled again."""

    name: str
    back_s: float


@dataclass(frozen=True, slots=True)
class Deaths:
    """The kills of one run."""

    start_s: float
    """Seconds from the start of the run to its first step."""
    deaths: Sequence[Death]
    wrong: Sequence[str]
    """The problems of the ended run, in sentences."""


@dataclass(frozen=True, slots=True)
class Target:
    """A process that is killed, and the events that show the recovery."""

    name: str
    find: Callable[[], int]
    """Returns the process, or 0 if it does not run now."""
    noticed: str
    is_back: Callable[[Mapping[str, Any]], bool]


def find_process(*parts: str) -> int:
    """Return a process below this one that has one of `parts` in its title, or 0."""
    found = [pid for pid in descendants(os.getpid()) if any(part in title(pid) for part in parts)]
    return found[0] if found else 0


TARGETS = (
    Target("engine process", lambda: find_process(*ENGINE_PROCESSES), "engine_lost", is_host_back),
    Target("engine host", lambda: find_process("ray::EngineHost"), "engine_lost", is_host_back),
    Target("rank", lambda: find_process("ray::_RankActor"), "trainer_died", is_step),
    Target(
        "raylet",
        lambda: parents().get(find_process("ray::_RankActor"), 0),
        "trainer_died",
        is_step,
    ),
)


def kill_all(folder: Path, *, gpus: int, vllm: bool) -> Deaths:
    """Kill each of `TARGETS` in one run, and wait for each recovery."""
    nodes = Nodes(random.Random(0))
    gpu = {"num_gpus": 1 if gpus else 0}
    options = ["--cluster.trainers", "1", "--cluster.engine_hosts", "1"]
    if vllm:
        options += ["--engine.backend", "vllm"]
        options += ["--engine.gpu_memory_utilization", str(MEMORY_SHARE)]
    try:
        for _ in range(2):  # the second takes the place of the first
            nodes.add(num_cpus=1, **gpu)
        nodes.add(num_cpus=0, num_gpus=0, resources={"engine_host": 1})
        options += ["--cluster.address", nodes.cluster.address, "--max_steps", str(STEPS)]
        place = ["--runs", str(folder.parent), "--name", folder.name]
        began = time.monotonic()
        run = RunProcess(["retail", *SMALL, *options, *place], folder)
        try:
            wait_for(run, is_step)
            start_s = time.monotonic() - began
            deaths = [kill(run, target) for target in TARGETS]
            while not run.ended:
                run.new_events()
                time.sleep(_TICK_S)
            witness = Witness(keeps=False)
            if run.process.returncode:
                witness.end.wrong.append(f"the run failed: {run.last_words()}")
            else:
                witness.finish(folder, STEPS)
            lost = witness.end.lost + witness.end.twice
            wrong = [*witness.end.wrong, *([f"{lost} groups lost or twice"] if lost else [])]
            return Deaths(start_s, deaths, wrong)
        finally:
            run.kill()
    finally:
        nodes.close()


def kill(run: RunProcess, target: Target) -> Death:
    """Kill one process, and wait until the run has recovered and trained a step."""
    while not (pid := target.find()):
        run.new_events()
        time.sleep(_TICK_S)
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    wait_for(run, lambda event: event["kind"] == target.noticed, target.is_back)
    back_s = time.monotonic() - began
    if target.is_back is not is_step:
        wait_for(run, is_step)
    return Death(target.name, back_s)


def wait_for(run: RunProcess, *wanted: Callable[[Mapping[str, Any]], bool]) -> None:
    """Wait for events, in this order. Raises RuntimeError if the run ends before."""
    left = list(wanted)
    while True:
        ended = run.ended
        for event in run.new_events():
            if left and left[0](event):
                del left[0]
        if not left:
            return
        if ended:
            raise RuntimeError(f"the run ended before it recovered: {run.last_words()}")
        time.sleep(_TICK_S)


def verdict(found: Deaths) -> tuple[str, bool]:
    """Return what was found, and True if all processes were back in time and nothing was lost."""
    limit_s = LIMIT_S + found.start_s
    back = ", ".join(f"{each.name} {each.back_s:.1f}" for each in found.deaths)
    text = (
        f"back after s: {back}; a start takes {found.start_s:.1f}; "
        f"{'; '.join(found.wrong) or 'the run is sound'}"
    )
    return text, not found.wrong and all(each.back_s <= limit_s for each in found.deaths)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the run")
    chosen = parser.parse_args()
    adopt_orphans()
    try:
        found = kill_all(chosen.folder, gpus=torch.cuda.device_count(), vllm=uses_vllm())
    finally:
        end_orphans(5.0)
    text, is_met = verdict(found)
    CONSOLE.print(f"{'met' if is_met else 'missed'}: {text}", markup=False)


if __name__ == "__main__":
    main()
