"""Measure what a quantised engine does to the discrepancy and to the size of a version.

    python -m benchmarks.quantise          # 34 short runs of the retail desk, ten minutes

The runs are deterministic, so the load of the machine changes nothing. The discrepancy is the mean
of |log D| over the tokens of all steps, in nats. The size of a version is what is sent to one
engine: whole for the first version, a difference for later ones where a run sends them.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from benchmarks.tables import CONSOLE, columns, row, write
from unstale.durability.run_folder import Row, RunFolder

FORMATS = ("none", "fp8", "int8", "int4", "nvfp4", "mxfp4")
DTYPES = ("bfloat16", "float32")
RATES = ("5e-4", "1e-6")
"""Learning rates: that of the recipe, and that of a large model."""


def metrics_of(options: Mapping[str, str], steps: int) -> list[Row]:
    """Run deterministic steps of the retail desk, and return all lines of the run's metrics."""
    given = {
        "max_steps": str(steps),
        "minutes": "0",
        "eval.tasks": "0",
        "checkpoint.interval": str(steps),  # a deterministic run ends all episodes at a checkpoint
        "deterministic": "true",
        **options,
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "unstale", "train", "retail", "--runs", folder]
        command += ["--name", "run", *(f"--{name}={value}" for name, value in given.items())]
        CONSOLE.print(" ".join(f"{name}={value}" for name, value in options.items()))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"quantise: {' '.join(command)}\n{done.stderr or done.stdout}")
        return RunFolder(Path(folder) / "run").metrics()


def discrepancy(rows: Sequence[Row]) -> float:
    """Return the mean of |log D| over the steps, in nats, each step with the same weight."""
    name = "correction/log_d_abs_mean"
    return mean(found[name] for found in rows if name in found)


def sizes(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the largest size of a published version, and the mean of the others, in KB.

    The largest is a whole version; others are differences, unless the run sends only whole ones.
    """
    sent = [found["publish/bytes"] / 1000 for found in rows if found.get("publish/bytes")]
    sent.remove(whole := max(sent))
    return whole, mean(sent)


def discrepancies(steps: int) -> list[str]:
    lines = columns("format", "engine.dtype", "engine rounds", "both round")
    for dtype in DTYPES:
        for fmt in FORMATS if dtype == "bfloat16" else FORMATS[1:]:
            engine = {"engine.dtype": dtype, "engine.quantise": fmt}
            one = discrepancy(metrics_of(engine, steps))
            cells = [fmt, dtype, f"{one:.2g}"]
            both = "—"
            if fmt != "none":
                both = f"{discrepancy(metrics_of({**engine, 'trainer.quantise': fmt}, steps)):.2g}"
            lines.append(row(*cells, both))
    return lines


def published(steps: int) -> list[str]:
    lines = columns("format", "whole, KB", *(f"difference at {rate}, KB" for rate in RATES))
    for fmt in FORMATS:
        # A bfloat16 trainer keeps versions in the engine's precision, so differences can be sent.
        options = {"engine.quantise": fmt, "trainer.dtype": "bfloat16"}
        found = [sizes(metrics_of({**options, "trainer.lr": rate}, steps)) for rate in RATES]
        lines.append(row(fmt, f"{found[0][0]:.0f}", *(f"{each[1]:.1f}" for each in found)))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3, help="steps of a run for the discrepancy")
    parser.add_argument("--versions", type=int, default=8, help="steps of a run for the sizes")
    chosen = parser.parse_args()
    lines = [
        f"Runs of {chosen.steps} steps; the mean of |log D| in nats. *Both round*: with",
        "`trainer.quantise`.",
        "",
        *discrepancies(chosen.steps),
        "",
        f"What is sent to one engine for a version, in runs of {chosen.versions} steps with a",
        "bfloat16 trainer: the largest version, and the mean of the others.",
        "",
        *published(chosen.versions),
    ]
    write("quantise", "Quantised rollouts on the retail desk", lines)


if __name__ == "__main__":
    main()
