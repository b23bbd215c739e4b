"""Compare a fixed reward process with a pool that grows and shrinks.

    python -m benchmarks.reward_pool

Runs of a small policy are synchronous, so the rewards of a step wait all at once. A reward sleeps
for `--seconds`, so processes do not compete for cores. Steps of each run are compared with one
process in the same round. The planner simulates the same runs: all time of a step with one process
that is not in rewards is taken as training.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from benchmarks.tables import CONSOLE, columns, ratios, rotated, row, spread, write
from unstale.analysis.planner.costs import LinearCosts
from unstale.analysis.planner.simulate import Constant, Fleet, Workload, simulate
from unstale.cli.session import train
from unstale.config import (
    SHIPPED_POLICY,
    CheckpointConfig,
    EngineConfig,
    EvalConfig,
    RunConfig,
    ScheduleConfig,
    TrainerConfig,
)
from unstale.durability.run_folder import RunFolder
from unstale.envs.dataset import DatasetConfig, load_reward
from unstale.envs.reward_processes import RewardProcesses
from unstale.recipes.llm import llm

POOLS = {"1": (1, 1), "1 to 4": (1, 4), "0 to 4": (0, 4), "4": (4, 4)}
"""The smallest and the largest number of processes, by the name of the pool."""
MODULE = """
import time
def slow(reply, row):
    time.sleep(row["seconds"])
    return float(len(reply) % 3)
"""
FILLING = 2
"""Steps that are left out, because the first processes start in them."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Means over the steps of a run."""

    step_s: float
    wait_s: float
    """Time for which a reward waited for a process."""
    processes: float
    """Largest number of processes."""
    starts: float
    """Number of starts in the whole run."""


def config(folder: Path, name: str, options: argparse.Namespace, seed: int) -> RunConfig:
    fewest, most = POOLS[name]
    task = DatasetConfig(
        env=f"dataset:{folder / 'rows.jsonl'}",
        reward="slow_reward:slow",
        reward_processes=most,
        min_reward_processes=fewest,
        held_out_share=0.0,
    )
    return replace(
        llm(),
        model=str(SHIPPED_POLICY),
        seed=seed,
        runs=folder / "runs",
        name=f"{name.replace(' ', '-')}-{seed}",
        max_steps=options.steps,
        task=task,
        schedule=schedule(options),
        engine=EngineConfig(max_completion_tokens=8, max_context=128, max_running=32),
        trainer=TrainerConfig(lr=1e-7, threads=1),
        checkpoint=CheckpointConfig(interval=options.steps + 1),
        eval=EvalConfig(tasks=0),
    )


def schedule(options: argparse.Namespace) -> ScheduleConfig:
    return ScheduleConfig(max_staleness=0, groups_per_step=options.groups, group_size=8)


def measured(folder: Path, rewards: int) -> Steps:
    rows = [each for each in RunFolder(folder).metrics() if each["step"] > 0]
    times = [after["time_s"] - before["time_s"] for before, after in pairwise(rows)]
    late = rows[FILLING:]
    return Steps(
        fmean(times[FILLING - 1 :]),
        fmean(each["reward_pool/wait_s"] for each in late) / rewards,
        max(each["reward_pool/processes_max"] for each in late),
        sum(each["reward_pool/starts"] for each in rows),
    )


def simulated(name: str, options: argparse.Namespace, rest_s: float, start_s: float) -> Steps:
    fewest, most = POOLS[name]
    result = simulate(
        Workload(
            prompt_tokens=Constant(8),
            reply_tokens=Constant(8),
            reward_s=Constant(options.seconds),
        ),
        Fleet(reward_processes=most, min_reward_processes=fewest, reward_start_s=start_s),
        schedule(options),
        LinearCosts(decode=1e-4, train=rest_s),
        steps=options.steps,
    )
    times = result.steps_s[FILLING:]
    return Steps(fmean(times), result.reward_wait_s, most, result.reward_starts)


def start_seconds() -> float:
    """Return how long a process for the reward takes to start."""
    slow = load_reward("slow_reward:slow")
    rewards = RewardProcesses("slow_reward:slow", slow, processes=1, min_processes=1)
    assert not rewards.pool.load()
    rewards.pool.close()
    assert rewards.pool.size.start_s
    return rewards.pool.size.start_s


def compare(options: argparse.Namespace) -> list[str]:
    runs: dict[str, list[Steps]] = {name: [] for name in POOLS}
    rewards = 8 * options.groups
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        (folder / "slow_reward.py").write_text(MODULE)
        sys.path.append(text)
        lines = [{"prompt": f"Say {n}.", "seconds": options.seconds} for n in range(512)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
        start_s = start_seconds()
        for turn in range(options.repeats):
            for name in rotated(list(POOLS), turn % len(POOLS)):
                CONSOLE.print(f"round {turn + 1} of {options.repeats}: {name}")
                wanted = config(folder, name, options, turn)
                runs[name].append(measured(train(wanted, console=CONSOLE).folder, rewards))
    rest_s = median(each.step_s for each in runs["1"]) - rewards * options.seconds
    rates = {name: [1 / each.step_s for each in rounds] for name, rounds in runs.items()}
    forecasts = {name: simulated(name, options, rest_s, start_s) for name in POOLS}
    table = columns(
        "processes",
        "steps a second, over one process",
        "simulated",
        "a reward waits, s",
        "simulated",
        "most processes",
        "starts",
        "simulated",
    )
    for name, rounds in runs.items():
        forecast = forecasts[name]
        table.append(
            row(
                name,
                spread(ratios(rates, name, "1")),
                f"{forecasts['1'].step_s / forecast.step_s:.2f}",
                f"{median(each.wait_s for each in rounds):.2f}",
                f"{forecast.wait_s:.2f}",
                f"{median(each.processes for each in rounds):.0f}",
                f"{median(each.starts for each in rounds):.0f}",
                f"{forecast.starts:.0f}",
            )
        )
    return [
        *table,
        "",
        f"A step has {rewards} rewards of {options.seconds:g} s, which one process computes in "
        f"{rewards * options.seconds:g} s. The rest of a step takes {rest_s:.2f} s, and a start "
        f"{start_s:.2f} s. {options.repeats} rounds of {options.steps} steps, of which "
        f"{FILLING} are left out.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reward_pool")
    parser.add_argument("--seconds", type=float, default=0.25, help="of a reward (default 0.25)")
    for name, value, text in (
        ("groups", 4, "groups of 8 episodes in a step"),
        ("steps", 8, "steps of a run"),
        ("repeats", 3, "rounds"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default {value})")
    write("reward-pool", "Pool of reward processes", compare(parser.parse_args()))


if __name__ == "__main__":
    main()
