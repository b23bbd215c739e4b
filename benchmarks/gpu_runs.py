"""Kill processes of a run, and watch the memory and speed of another, for `benchmarks.gpu_check`.

    python -m benchmarks.gpu_runs FOLDER --gpus 0        # the kills alone; FOLDER is for the run

Both runs train the small policy of the package, unless the second has another. The first is on Ray,
on simulated nodes of this machine. Its trainer rank, the raylet below it, its engine host and the
host's engine process are killed one after the other, by SIGKILL.
"""

import argparse
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
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
from benchmarks.gpu_engines import MEMORY_SHARE, Finding, stand_in, uses_vllm
from unstale.analysis.planner.analytic import AnalyticCosts, Placement, TrainingSetup
from unstale.analysis.planner.candidates import Candidate, PlanRequest
from unstale.analysis.planner.hardware import DEVICES, Device, Shares
from unstale.analysis.planner.measured import recorded_workload
from unstale.analysis.planner.models import Model
from unstale.analysis.planner.recorded import recorded_groups
from unstale.analysis.planner.route_costs import route_cost
from unstale.analysis.planner.workload import EpisodeStats
from unstale.cluster.gpus import engine_gpus
from unstale.config import RunConfig
from unstale.config.options import stored_config
from unstale.durability.run_folder import RunFolder

if TYPE_CHECKING:
    from benchmarks.gpu_check import Check

LIMIT_S = 60.0
"""Seconds that a recovery may take in addition to the time of a start."""
STEPS = 12
"""Steps of the run whose processes are killed. It must not end before the last kill."""
KILLS_S = 1500.0
"""Longest time of that run in seconds."""
ENGINE_PROCESSES = ("unstale.engines.embedded.worker", "VLLM::")
"""Parts of the titles of engine processes."""
LONG_STEPS, TINY_STEPS = 500, 4
LEAK_PER_H = 1e9
"""Bytes that the memory of a run may grow in an hour."""
GOAL_PARAMETERS = 25e9
"""Parameters that the policy of goal 7 has at least."""
WARM = 2
"""Steps whose speed does not count."""
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


def deaths(check: "Check") -> Finding:
    """Kill processes of a run in another process, because it needs a Ray cluster for itself."""
    folder = check.folder / "kills"
    command = [sys.executable, "-m", "benchmarks.gpu_runs", str(folder), "--gpus", str(check.gpus)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=KILLS_S, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip()[-2000:])
    found = json.loads(done.stdout.splitlines()[-1])
    found["deaths"] = [Death(**each) for each in found["deaths"]]
    return judge_deaths(Deaths(**found), open=stand_in(check))


def judge_deaths(found: Deaths, *, open: str = "") -> Finding:
    limit_s = LIMIT_S + found.start_s
    back = ", ".join(f"{each.name} {each.back_s:.1f}" for each in found.deaths)
    return Finding(
        f"back after s: {back}; a start takes {found.start_s:.1f}; "
        f"{'; '.join(found.wrong) or 'the run is sound'}",
        not found.wrong and all(each.back_s <= limit_s for each in found.deaths),
        open,
    )


def endurance(check: "Check") -> Finding:
    """Measure how the memory of a run grows, and compare its speed with `unstale plan`."""
    folder = check.folder / "long"
    steps = TINY_STEPS if check.is_tiny else LONG_STEPS
    ranks = ["--cluster.trainers", str(check.gpus - 1)] if check.gpus > 1 else []
    engine = ["--engine.backend", "vllm"] if uses_vllm(check.gpus) else []
    recipe = ["llm", "--model", str(check.policy)] if check.policy else ["retail", *SMALL]
    place = ["--runs", str(folder.parent), "--name", folder.name, "--max_steps", str(steps)]
    options = [*ranks, *engine, *place, *shlex.split(check.run_options)]
    run = RunProcess([*recipe, *options], folder)
    times, memory = [], []
    try:
        while not run.ended:
            run.new_events()
            times.append(time.monotonic())
            memory.append(used_memory(run.process.pid))
            time.sleep(0.5 if check.is_tiny else 5.0)
    finally:
        run.kill()
    if run.process.returncode:
        raise RuntimeError(f"the run failed: {run.last_words()}")
    growth = slope_per_hour(times, memory)
    rate, planned = rates(folder, device_here())
    is_goal = check.policy is not None and num_parameters(check.policy) >= GOAL_PARAMETERS
    found = judge_endurance(growth, rate, planned, is_goal=is_goal)
    return replace(found, figure=f"{steps} steps: {found.figure}")


def judge_endurance(growth: float, rate: float, planned: float, *, is_goal: bool) -> Finding:
    """Judge bytes per hour and tokens per second. `is_goal` is True for the policy of the goal."""
    is_fast = abs(rate / planned - 1) <= 0.2
    return Finding(
        f"memory grows by {growth / 1e9:.2f} GB/h; {rate:,.0f} tokens/s, {planned:,.0f} as planned",
        growth < LEAK_PER_H and (is_fast or not is_goal),
        open="" if is_goal else "a small policy: give --model FOLDER of Qwen3-30B-A3B",
    )


def used_memory(pid: int) -> float:
    """Return the bytes of memory of a process and all below it. Shared pages count in parts."""
    total = 0
    for each in (pid, *descendants(pid)):
        try:
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
        except OSError:  # it ended meanwhile
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def slope_per_hour(times: Sequence[float], values: Sequence[float]) -> float:
    """Return the growth per hour in the second half of the samples, by least squares.

    >>> round(slope_per_hour([0, 1800, 3600, 7200], [9, 9, 1, 3]), 2)
    2.0
    """
    half = len(times) // 2
    if len(times) - half < 2:
        raise RuntimeError(f"{len(times)} samples of the memory are too few")
    return float(np.polyfit(np.array(times[half:]) / 3600, np.array(values[half:]), 1)[0])


def device_here() -> Device:
    """Return the data sheet of this GPU. Without a GPU it is that of an H100, to try the check."""
    if not torch.cuda.is_available():
        return DEVICES["H100"]
    name = torch.cuda.get_device_name()
    for known, device in DEVICES.items():
        if known in name:
            return device
    raise RuntimeError(f"`unstale plan` knows no {name}, but {', '.join(DEVICES)}")


def num_parameters(folder: Path) -> float:
    return Model.from_folder(folder).parameters


def rates(run: Path, device: Device) -> tuple[float, float]:
    """Return the trained tokens per second of a run, and those that the planner estimates."""
    folder = RunFolder(run)
    config = stored_config(folder.config(), f"{run}/config.json")
    rows = [row for row in folder.metrics() if row["step"] > 0]
    timed = rows[WARM:]
    tokens = sum(row["rollout/episodes"] * row["rollout/total_tokens_mean"] for row in timed)
    rate = tokens / (timed[-1]["time_s"] - rows[WARM - 1]["time_s"])
    workload = recorded_workload(config, *recorded_groups(run, rows))
    episodes = EpisodeStats.of(workload, group_size=config.schedule.group_size)
    setup = TrainingSetup(
        model=Model.from_folder(config.policy_folder),
        device=device,
        shares=Shares(),
        lr=config.trainer.lr,
        episodes=episodes,
        gradient_checkpointing=config.trainer.gradient_checkpointing,
        context=config.cluster.context,
    )
    return rate, planned_rate(config, PlanRequest(setup=setup, workload=workload, devices=2))


def planned_rate(config: RunConfig, request: PlanRequest) -> float:
    """Return the tokens per second that the planner's formula gives for a run's configuration."""
    schedule, route = config.schedule, route_cost(config.old_logps.route)
    sequences = schedule.groups_per_step * schedule.group_size
    costs = AnalyticCosts(
        setup=request.setup,
        placement=Placement(max(1, config.cluster.trainers), 1, engine_gpus(config)),
        route=route,
        batch=sequences * request.setup.episodes.tokens,
        live=schedule.staleness_bound + 1,
    )
    return Candidate(request, costs, config.old_logps.route, schedule).rate


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the run")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs of this machine")
    chosen = parser.parse_args()
    adopt_orphans()
    try:
        found = kill_all(chosen.folder, gpus=chosen.gpus, vllm=uses_vllm(chosen.gpus))
    finally:
        end_orphans(5.0)
    sys.stdout.write(json.dumps(asdict(found)) + "\n")


if __name__ == "__main__":
    main()
