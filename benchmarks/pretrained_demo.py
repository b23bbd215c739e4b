"""Run the recipe `demo` with three seeds, and a control without reinforcement learning.

    python -m benchmarks.pretrained_demo        # about 25 minutes on two quiet cores

Registered before the first of these runs, as the second registration. The first was on chain_sum,
gcd and lcm in float32 and failed: seed 0 rose from 27.5% to 49.2%, less than the 40 points that
were registered, and its seeds 1 and 2 were not made. A pilot of the same tasks in bfloat16 had
32.5% after 22 steps. So the tasks are easier now. They, the learning rate and the precisions were
chosen by one pilot with seed 100 (25.0% to 95.8% in 18 steps), and `sft.steps` by the starts of the
seeds 100, 101 and 102 (25.0%, 21.7%, 16.7%). Pilots are not part of the result.

* The recipe as it is, with the seeds 10, 11 and 12. A seed decides the demonstrations, the tasks
  and the samples. Compared is held-out success on the same 120 tasks after the supervised start,
  which is the run's step 0, and after the last step. The recipe is kept if every seed starts
  between 3% and 40% and ends at least 40 points higher.
* The control has 30 supervised steps instead of 6. Its held-out success after the start shows what
  more demonstrations of sums reach. (A run has at least one step, so the control has one.)

The table also has the minutes of each run, its share of busy cores, and the largest memory of its
processes together: the proportional set size (PSS), which counts shared pages once, every 2 s.
Finished runs in the folder are not repeated. Writes a dated table under benchmarks/results/.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import tables
from benchmarks.cluster_chaos import descendants
from benchmarks.demo import finished, graded
from unstale.durability.run_folder import RunFolder
from unstale.weights.child_process import cores

SEEDS = (10, 11, 12)
CONTROL = ("--sft.steps=30", "--max_steps=1", "--eval.interval=0")
TASKS = 120
MEASURED = "measured.json"


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


def train(folder: Path, *options: str) -> None:
    """Run the recipe from the command line, and write its minutes and memory into its folder."""
    command = [sys.executable, "-m", "unstale", "train", "demo", *options]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    run = subprocess.Popen([*command, "--runs", str(folder.parent), "--name", folder.name])
    peak_gib = 0.0
    while run.poll() is None:
        peak_gib = max(peak_gib, used_memory(run.pid) / 2**30)
        time.sleep(2)
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {run.returncode}")
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / seconds / cores()
    measured = {"minutes": seconds / 60, "busy": busy, "peak_gib": peak_gib}
    (folder / MEASURED).write_text(json.dumps(measured))


def row(kind: str, seed: int, folder: Path) -> str:
    """Return the row of a finished run."""
    rates = [
        each["eval/success_rate"]
        for each in RunFolder(folder).metrics()
        if "eval/success_rate" in each
    ]
    end = "" if kind == "control" else graded(rates[-1], TASKS)
    measured = json.loads((folder / MEASURED).read_text())
    return (
        f"| {kind} | {seed} | {graded(rates[0], TASKS)} | {end} | {measured['minutes']:.1f} | "
        f"{measured['busy']:.0%} | {measured['peak_gib']:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs") / "pretrained_demo")
    chosen = parser.parse_args()
    rows = []
    for kind, options in (("demo", ()), ("control", CONTROL)):
        for seed in SEEDS:
            folder = chosen.runs / f"{kind}{seed}"
            if not finished(folder):
                train(folder, f"--seed={seed}", *options)
            rows.append(row(kind, seed, folder))
    lines = [
        f"Success on {TASKS} held-out tasks, sampled at temperature 1; 95% Wilson intervals.",
        "",
        "| run | seed | after the start | after 24 steps | minutes | busy cores | PSS, GiB |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]
    tables.write("pretrained-demo", "The demo with a pretrained model", lines)


if __name__ == "__main__":
    main()
