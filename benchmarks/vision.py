"""Teach a small random vision-language policy to read digits from pictures, asynchronously.

    python -m benchmarks.vision        # a few minutes on two quiet cores

The policy has the architecture of Qwen3-VL, two layers, 21 words and random weights. Its vision
tower stays random: it is frozen. All tasks have the same text, so only the picture says which digit
is right. Each picture is drawn anew, with a place, a shade and noise of its own. A reply has at
most two words, and the first is graded.

Held-out success is the share of 200 other pictures that a greedy reply reads, before the first step
and after the last. A run that is blind is the same but shows one picture in all tasks, so it cannot
learn more than chance. Writes a dated table under benchmarks/results/.
"""

import argparse
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import unstale
from benchmarks import tables
from unstale.cli import session
from unstale.config import (
    AuditConfig,
    EngineConfig,
    EvalConfig,
    OldLogpsConfig,
    RunConfig,
    ScheduleConfig,
    TaskConfig,
    TrainerConfig,
)
from unstale.durability.journal import JOURNAL
from unstale.durability.run_folder import RunFolder
from unstale.pictures import PICTURES
from unstale.records import Task
from unstale.testing.pictures import DigitEnv, DigitTasks, save_vision_model

HELD_OUT = 200


class BlindTasks(DigitTasks):
    """Tasks that all show one picture, which says nothing about the digit that is right."""

    name = "blind"

    def env(self, task: Task, seed: int) -> DigitEnv:
        shown = DigitEnv(0, Random(0))
        shown.digit = super().env(task, seed).digit
        return shown


def configure(model: Path, runs: Path, tasks: str, *, steps: int, seed: int) -> RunConfig:
    return RunConfig(
        recipe="digits",
        model=str(model),
        runs=runs,
        name=f"{tasks}-{seed}",
        seed=seed,
        max_steps=steps,
        engine=EngineConfig(dtype="float32", max_context=64, max_completion_tokens=2),
        task=TaskConfig(env=f"benchmarks.vision:{tasks}"),
        schedule=ScheduleConfig(max_staleness=2, groups_per_step=8, group_size=8),
        trainer=TrainerConfig(lr=1e-3),
        old_logps=OldLogpsConfig(route="snapshot_old"),
        audit=AuditConfig(share=0.1),
        eval=EvalConfig(tasks=HELD_OUT, temperature=0.0),
    )


def results(folder: Path, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of a finished run."""
    rates = [row["eval/success_rate"] for row in rows if "eval/success_rate" in row]
    trained = [row for row in rows if "old_logps/exact_share" in row]
    with sqlite3.connect(folder / JOURNAL) as connection:
        ((records,),) = connection.execute("SELECT count(*) FROM pictures").fetchall()
        ((seconds,),) = connection.execute(
            "SELECT (SELECT max(at) FROM finished) - min(at) FROM groups"
        ).fetchall()
    connection.close()
    return {
        "before": rates[0],
        "after": rates[-1],
        "staleness": max(row["schedule/staleness_max"] for row in trained),
        "exact": min(row["old_logps/exact_share"] for row in trained),
        "error": max(row.get("audit/logp_error_abs_mean", 0.0) for row in trained),
        "discrepancy": max(row["correction/log_d_abs_p99"] for row in trained),
        "records": records,
        "seconds": seconds,
        "files": len([*(folder / PICTURES).iterdir()]),
    }


def train(model: Path, runs: Path, tasks: str, *, steps: int, seed: int) -> dict[str, Any]:
    """Return the figures of a run, which is made, or continued if it was killed."""
    config = configure(model, runs, tasks, steps=steps, seed=seed)
    folder = runs / config.name
    if not folder.exists():
        unstale.train(config)
    elif len([*RunFolder(folder).metrics()]) <= steps:
        session.resume(folder, config)
    return results(folder, list(RunFolder(folder).metrics()))


def line(name: str, found: Mapping[str, Any]) -> str:
    return tables.row(
        name,
        f"{found['before']:.1%}",
        f"{found['after']:.1%}",
        found["staleness"],
        f"{found['exact']:.0%}",
        f"{found['error']:.1e}",
        f"{found['discrepancy']:.1e}",
        f"{found['files']} of {found['records']}",
        f"{found['seconds']:.0f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--blind", type=int, nargs="*", default=[0], help="seeds of blind runs")
    parser.add_argument("--runs", type=Path, help="keep the runs here, to go on after a kill")
    chosen = parser.parse_args()
    lines = tables.columns(
        "run",
        "held-out success before",
        "after",
        "oldest token, versions",
        "exact `old_logp`",
        "audit: error of `old_logp`, nats",
        "99th percentile of log D",
        "picture files of records",
        "seconds",
    )
    with TemporaryDirectory() as folder:
        runs = chosen.runs or Path(folder)
        model = runs / "model"
        save_vision_model("qwen3_vl", model, num_hidden_layers=2)
        for tasks, seeds in (("DigitTasks", chosen.seeds), ("BlindTasks", chosen.blind)):
            for seed in seeds:
                found = train(model, runs, tasks, steps=chosen.steps, seed=seed)
                lines.append(line(f"{tasks}, seed {seed}", found))
                tables.CONSOLE.print(lines[-1])
    tables.write("vision", "Reading digits from pictures", lines)


if __name__ == "__main__":
    main()
