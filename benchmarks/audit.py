"""Audit every route on one recorded asynchronous run and compare the errors with the theory.

    python -m benchmarks.audit          # about 5 minutes on two quiet cores

The retail recipe runs for some steps with tokens of up to 4 versions of lag, and records every
version and batch. Each route is then replayed, and its error is fitted to the two true factors. A
longer tool `--latency` spreads the lags. Writes a dated table under benchmarks/results/.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import tables
from unstale.analysis.audit import audit
from unstale.durability.run_folder import AUDIT

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
    chosen = parser.parse_args()
    knobs = KNOBS | {"max_steps": chosen.steps, "task.latency_s": chosen.latency}
    with tempfile.TemporaryDirectory() as folder:
        words = [
            f"--{name}={value}"
            for name, value in {**knobs, "runs": folder, "name": "audited"}.items()
        ]
        subprocess.run([sys.executable, "-m", "unstale", "train", "retail", *words], check=True)
        run = Path(folder) / "audited"
        audit(run)
        table = (run / AUDIT).with_suffix(".md").read_text()
    options = " ".join(f"`{name} = {value}`" for name, value in knobs.items())
    _, *rest = table.splitlines()
    lines = [f"The retail recipe with {options}.", *rest]
    tables.write("audit", "What the old logit really was", lines)


if __name__ == "__main__":
    main()
