"""Does the audit measure what the theory says? Every route on one recorded asynchronous run.

    python benchmarks/audit.py          # about 5 minutes on two quiet cores

The retail recipe with tokens of up to 4 versions of lag is run for some steps, with every version
and batch recorded; then each route is replayed on what it trained on, and its error is fitted to
the two true factors. `--latency` is how long a tool takes: the longer, the more an episode's lags
spread. Writes a dated table under benchmarks/results/."""

import argparse
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from rich.console import Console

from unstale.cli.audit import AUDIT, audit
from unstale.durability.machine import commit, machine, versions

RESULTS = Path(__file__).parent / "results"
KNOBS = {
    "audit.record": "true",
    "schedule.max_staleness": 4,
    "schedule.groups_per_step": 8,
    "trainer.lr_schedule": "constant",
    "eval.tasks": 0,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--latency", type=float, default=3.0, help="seconds a tool takes, in the mean"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / f"{date.today()}-audit.md")
    chosen = parser.parse_args()
    knobs = KNOBS | {"steps": chosen.steps, "task.latency_s": chosen.latency}
    with tempfile.TemporaryDirectory() as folder:
        words = [
            f"--{name}={value}"
            for name, value in {**knobs, "runs": folder, "name": "audited"}.items()
        ]
        subprocess.run([sys.executable, "-m", "unstale", "train", "retail", *words], check=True)
        run = Path(folder) / "audited"
        audit(run)
        table = (run / AUDIT).with_suffix(".md").read_text()
    command = " ".join(["python benchmarks/audit.py", *sys.argv[1:]])
    options = " ".join(f"`{name} = {value}`" for name, value in knobs.items())
    place = f"commit {commit()}, {machine()}, {versions()}"
    head = f"`{command}` at {place}. The retail recipe with {options}."
    title, rest = table.split("\n", 1)
    chosen.out.parent.mkdir(exist_ok=True)
    chosen.out.write_text(f"# What the old logit really was, {date.today()}\n\n{head}\n{rest}")
    Console().print(f"{title}: {chosen.out}", markup=False)


if __name__ == "__main__":
    main()
