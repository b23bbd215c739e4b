"""Compare the demo's RL run with supervised training for the same time, seed by seed.

    python -m benchmarks.demo --seeds 0 1 2          # about 20 minutes a seed on two quiet cores

Each seed runs the retail recipe in a process, as `make demo` does. The control continues supervised
training on the same kind of demonstrations for the run's wall-clock time. Both are evaluated on the
same 256 held-out tasks, sampled at temperature 1 by the same engine. Finished runs in the folder
are not repeated. Writes a dated table under benchmarks/results/.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date
from itertools import count
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import tables
from tools.base_policy.practice import Practice
from tools.base_policy.retail import RetailPractice
from tools.base_policy.train import Place, batches, one_step, optimizer_for
from unstale import recipes
from unstale.cli.evaluate import evaluate
from unstale.config import SHIPPED_POLICY
from unstale.durability.console import Console
from unstale.durability.run_folder import RunFolder
from unstale.observe.statistics import wilson
from unstale.weights.child_process import cores

CONTROL = "control"
CONSOLE = Console()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of one seed: of the RL run, and of the control (None before it has run)."""

    seed: int
    base: float
    trained: float
    minutes: float
    steps: int
    lags: dict[str, int]
    mixed: float
    staleness: tuple[int, int]
    control: float | None


def rl(seed: int, folder: Path) -> None:
    """Run the recipe from the command line."""
    command = [sys.executable, "-m", "unstale", "train", "retail", "--seed", str(seed)]
    subprocess.run([*command, "--runs", str(folder.parent), "--name", folder.name], check=True)


def continue_training(
    model: nn.Module,
    practice: Practice,
    *,
    seconds: float,
    learning_rate: float = 3e-4,
    start: int = 10**6,
) -> list[float]:
    """Continue supervised training for the given time, as the control for RL.

    The demonstrations are new ones (numbered from `start`) with the same faults; the learning rate
    is constant.
    """
    optimizer = optimizer_for(model, learning_rate)
    source = batches(
        (practice.demonstration("faulty", index, faulty=True) for index in count(start)), 2048
    )
    losses, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        losses.append(one_step(model, optimizer, next(source), Place()))
    return losses


def control(seed: int, folder: Path) -> None:
    """Train the control of a seed for as many seconds, from the same base policy.

    Each seed has its own demonstrations.
    """
    torch.set_num_threads(cores())
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_POLICY)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED_POLICY, dtype=torch.float32)
    continue_training(
        model, RetailPractice(tokenizer), seconds=seconds_of(folder), start=10**6 * (seed + 1)
    )
    model.save_pretrained(folder / CONTROL)
    tokenizer.save_pretrained(folder / CONTROL)
    grade = evaluate(folder / CONTROL, replace(recipes.retail(), seed=seed), console=CONSOLE)
    (folder / CONTROL / "grade.json").write_text(json.dumps({"success": grade.success}))


def seconds_of(folder: Path) -> float:
    """Return the wall-clock seconds of a run, evaluations included."""
    return next(
        float(event["time"])
        for event in RunFolder(folder).rows("events.jsonl")
        if event["kind"] == "stopped"
    )


def finished(folder: Path) -> bool:
    return folder.is_dir() and any(
        event["kind"] == "stopped" for event in RunFolder(folder).rows("events.jsonl")
    )


def read(seed: int, folder: Path) -> Outcome:
    rows = RunFolder(folder).metrics()
    steps = [row for row in rows if "schedule/staleness_max" in row]
    graded = [row["eval/success_rate"] for row in rows if "eval/success_rate" in row]
    lags: dict[str, int] = {}
    for row in steps:
        for lag, tokens in row["schedule/staleness_histogram"].items():
            lags[lag] = lags.get(lag, 0) + tokens
    beside = folder / CONTROL / "grade.json"
    return Outcome(
        seed=seed,
        base=graded[0],
        trained=graded[-1],
        minutes=seconds_of(folder) / 60,
        steps=len(steps),
        lags=lags,
        mixed=sum(row["schedule/mixed_version_share"] for row in steps) / len(steps),
        staleness=(
            max(row["schedule/staleness_max"] for row in steps),
            max(row["schedule/staleness_bound"] for row in steps),
        ),
        control=json.loads(beside.read_text())["success"] if beside.exists() else None,
    )


def table(outcomes: list[Outcome]) -> list[str]:
    lines = [
        "Success on 256 held-out tasks, sampled at temperature 1; 95% Wilson intervals.",
        "",
        "| seed | base policy | after RL | more supervised training | minutes | steps | tokens by "
        "lag 0 / 1 / 2 | trajectories of several versions | staleness seen / bound |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        lags = sum(outcome.lags.values())
        shares = " / ".join(f"{outcome.lags.get(lag, 0) / lags:.0%}" for lag in ("0", "1", "2"))
        beside = "not run" if outcome.control is None else graded(outcome.control)
        lines.append(
            f"| {outcome.seed} | {graded(outcome.base)} | {graded(outcome.trained)} | {beside} | "
            f"{outcome.minutes:.1f} | {outcome.steps} | {shares} | {outcome.mixed:.0%} | "
            f"{outcome.staleness[0]} / {outcome.staleness[1]} |"
        )
    return [
        *lines,
        "",
        "Minutes are those of the run, its two evaluations included; the control trained for as "
        "long, in one process",
        "with as many threads as there are cores.",
    ]


def report(folders: Mapping[int, Path], *, quiet: bool = False) -> None:
    """Write the table of the runs that have finished."""
    outcomes = [read(seed, folder) for seed, folder in folders.items() if finished(folder)]
    tables.write("demo", "The demo and its control", table(outcomes), quiet=quiet)


def graded(success: float, tasks: int = 256) -> str:
    low, high = wilson(round(success * tasks) / tasks, tasks)
    return f"{success:.1%} ({low:.0%} to {high:.0%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs") / f"bench-demo-{date.today()}")
    chosen = parser.parse_args()
    folders = {seed: chosen.runs / f"seed{seed}" for seed in chosen.seeds}
    for work, done in (
        (rl, finished),
        (control, lambda folder: (folder / CONTROL / "grade.json").exists()),
    ):
        for seed, folder in folders.items():
            if not done(folder):
                work(seed, folder)
            report(folders, quiet=True)
    report(folders)


if __name__ == "__main__":
    main()
