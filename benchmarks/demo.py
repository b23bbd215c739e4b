"""Does the demo learn, and is it RL that does it? Each seed beside as much time of more supervised training.

    python benchmarks/demo.py --seeds 0 1 2          # about 20 minutes a seed on two quiet cores

Each seed runs the retail recipe in a process of its own, as `make demo` does; the control then continues supervised
training on the same kind of demonstrations for the wall-clock of that run, on all cores. Both are graded on the same
256 held-out tasks, sampled at temperature 1 by the same engine. Writes a dated table under benchmarks/results/.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import date
from itertools import count
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from afterimage import recipes
from afterimage.build import SHIPPED_POLICY
from afterimage.launch.local import Grade, cores, evaluate
from afterimage.observe.metrics import RunFolder
from afterimage.recipes.base_policy.practice import Practice
from afterimage.recipes.base_policy.train import continue_training

RESULTS = Path(__file__).parent / "results"
CONSOLE = Console()


@dataclass(frozen=True, slots=True)
class Outcome:
    """One seed: the run, and the control that had the same time."""

    seed: int
    base: float
    trained: float
    minutes: float
    steps: int
    control: Grade
    lags: dict[str, int]
    mixed: float
    staleness: tuple[int, int]


def rl(seed: int, runs: Path) -> tuple[list[dict[str, object]], float]:
    """The recipe from the command line. Its metrics, and the seconds from start to prompt."""
    began = time.monotonic()
    name = f"seed{seed}"
    command = [sys.executable, "-m", "afterimage.cli", "train", "retail", "--seed", str(seed)]
    subprocess.run([*command, "--runs", str(runs), "--name", name], check=True)
    return RunFolder(runs / name).metrics(), time.monotonic() - began


def control(seed: int, seconds: float, folder: Path) -> Grade:
    """As many seconds of more supervised training from the same base policy, on demonstrations that differ by seed."""
    torch.set_num_threads(cores())
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_POLICY)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED_POLICY, dtype=torch.float32)
    continue_training(model, Practice(tokenizer), seconds=seconds, start=10**6 * (seed + 1))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return evaluate(folder, replace(recipes.retail(), seed=seed), console=CONSOLE)


def measure(seed: int, runs: Path) -> Outcome:
    rows, seconds = rl(seed, runs)
    steps = [row for row in rows if "schedule/staleness_max" in row]
    graded = [float(str(row["eval/success"])) for row in rows if "eval/success" in row]
    lags: dict[str, int] = {}
    for row in steps:
        for lag, tokens in dict(row["schedule/staleness_histogram"]).items():  # type: ignore[call-overload]
            lags[lag] = lags.get(lag, 0) + int(tokens)
    CONSOLE.print(f"seed {seed}: RL {graded[0]:.1%} -> {graded[-1]:.1%} in {seconds / 60:.1f} min; now the control")
    with tempfile.TemporaryDirectory() as folder:
        beside = control(seed, seconds, Path(folder))
    return Outcome(
        seed=seed,
        base=graded[0],
        trained=graded[-1],
        minutes=seconds / 60,
        steps=len(steps),
        control=beside,
        lags=lags,
        mixed=sum(float(str(row["schedule/mixed_version_share"])) for row in steps) / len(steps),
        staleness=(
            max(int(str(row["schedule/staleness_max"])) for row in steps),
            max(int(str(row["schedule/staleness_bound"])) for row in steps),
        ),
    )


def table(outcomes: list[Outcome], command: str) -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    lines = [
        f"# The demo and its control, {date.today()}",
        "",
        f"`{command}` at commit {commit}, {cores()} cores of {_processor()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}. Success on 256 held-out tasks, sampled at temperature 1; 95% Wilson intervals.",
        "",
        "| seed | base policy | after RL | more supervised training | minutes | steps | tokens by lag 0 / 1 / 2 "
        "| trajectories of several versions | staleness seen / bound |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        lags = sum(outcome.lags.values())
        shares = " / ".join(f"{outcome.lags.get(lag, 0) / lags:.0%}" for lag in ("0", "1", "2"))
        lines.append(
            f"| {outcome.seed} | {_graded(outcome.base)} | {_graded(outcome.trained)} | "
            f"{_graded(outcome.control.success)} | {outcome.minutes:.1f} | {outcome.steps} | {shares} | "
            f"{outcome.mixed:.0%} | {outcome.staleness[0]} / {outcome.staleness[1]} |"
        )
    lines += [
        "",
        "The minutes are those of `afterimage train retail`, from its start to the report, evaluations included;",
        "the control trained for as long on all cores.",
    ]
    return "\n".join(lines) + "\n"


def _graded(success: float, tasks: int = 256) -> str:
    grade = Grade(round(success * tasks), tasks)
    return f"{grade.success:.1%} ({grade.low:.0%} to {grade.high:.0%})"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs") / f"bench-demo-{os.getpid()}")
    chosen = parser.parse_args()
    command = "python benchmarks/demo.py --seeds " + " ".join(map(str, chosen.seeds))
    target = next(
        path for n in count() if not (path := RESULTS / f"{date.today()}-demo{f'-{n}' if n else ''}.md").exists()
    )
    outcomes = []
    for seed in chosen.seeds:
        outcomes.append(measure(seed, chosen.runs))
        RESULTS.mkdir(exist_ok=True)
        target.write_text(table(outcomes, command))
        (chosen.runs / "outcomes.json").write_text(json.dumps([str(outcome) for outcome in outcomes]))
    CONSOLE.print(f"{table(outcomes, command)}\n{target}", markup=False)


if __name__ == "__main__":
    main()
