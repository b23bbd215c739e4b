"""Compare deterministic runs of two checkouts bit for bit, except for renamed metrics.

Usage: python -m tools.refactor_check --before ../before --module unstale.cli

Both checkouts run the same three short recipes on this machine. `renames.json` beside this file
maps the option and metric names of the older checkout to those of the newer one; a metric mapped to
null was dropped. Exit code 1 if anything differs."""

import argparse
import json
import math
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
RENAMES = Path(__file__).with_name("renames.json")

COMMON = (
    "--deterministic true --minutes 0 --schedule.groups_per_step 4 --schedule.group_size 4 "
    "--engine.max_running 64 --eval.tasks 8 --checkpoint.every 3 --steps 6"
)
RUNS = {
    "snapshot": "--seed 3 --audit.share 0.5 --trainer.steps_per_batch 2 "
    "--objective.reference_kl 0.01 --objective.entropy 0.001",
    "eager": "--seed 4 --old_logps.route eager --old_logps.fallback ewma_prox "
    "--correction.veto_below 0.0001 --credit.estimator rloo",
    "sync": "--seed 5 --old_logps.route interrupt_sync --objective.normalise kept "
    "--objective.kind dual_clip --schedule.window 3",
}
"""Run name -> options, in the names of the older checkout."""

TABLES = [
    "groups",
    "episodes",
    "pieces",
    "snapshots",
    "trajectories",
    "failures",
    "restarts",
    "finished",
    "checkpoints",
    "consumed",
    "versions",
]

MEASURED = re.compile(r"(_s|/seconds|/busy_share|_per_s)$")
"""Metrics that a real clock measured; they differ between any two runs."""

AUDIT_TOLERANCE = 1e-9
"""Relative tolerance of audit statistics, whose last bits depend on memory alignment."""


def run_all(checkout: Path, module: str, folder: Path, options: Mapping[str, str]) -> None:
    """Run the three recipes with one checkout. `options` renames options."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    environment |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}
    for name, more in RUNS.items():
        words = [_renamed_option(word, options) for word in f"{COMMON} {more}".split()]
        command = [sys.executable, "-m", module, "train", "retail", "--name", name]
        command += ["--runs", str(folder), *words]
        subprocess.run(command, cwd=checkout, env=environment, check=True, capture_output=True)


def _renamed_option(word: str, options: Mapping[str, str]) -> str:
    return f"--{options.get(word[2:], word[2:])}" if word.startswith("--") else word


def differences(before: Path, after: Path, metrics: Mapping[str, str | None]) -> Iterator[str]:
    """Yield one line per difference between two run folders."""
    for file in sorted(path.relative_to(before) for path in before.rglob("*.safetensors")):
        if not (after / file).exists():
            yield f"{file} is missing"
        else:
            yield from _tensor_differences(before / file, after / file, str(file))
    for table in TABLES:
        left, right = _rows(before, table), _rows(after, table)
        if left != right:
            yield f"journal table {table} differs ({len(left)} and {len(right)} rows)"
    left, right = _metric_rows(before), _metric_rows(after)
    if len(left) != len(right):
        yield f"metrics.jsonl has {len(left)} and {len(right)} rows"
    for number, (one, other) in enumerate(zip(left, right, strict=False)):
        for old_name, value in one.items():
            name = _renamed_metric(old_name, metrics)
            if name is None or old_name == "time_s" or MEASURED.search(old_name):
                continue
            if name not in other:
                yield f"row {number}: {old_name} became {name}, which is missing"
            elif not _same_value(name, value, other[name]):
                yield f"row {number}: {old_name} = {value} became {name} = {other[name]}"


def _tensor_differences(one: Path, other: Path, name: str) -> Iterator[str]:
    left, right = load_file(one), load_file(other)
    if left.keys() != right.keys():
        yield f"{name}: other tensors {sorted(left.keys() ^ right.keys())[:4]}"
        return
    for key, tensor in left.items():
        same = tensor.dtype == right[key].dtype and tensor.shape == right[key].shape
        if not same or not torch.equal(_bits(tensor), _bits(right[key])):
            yield f"{name}: {key} differs"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _rows(run: Path, table: str) -> list[dict[str, Any]]:
    """Read a journal table without the times of its rows and the seals over these."""
    with sqlite3.connect(f"file:{run / 'journal.sqlite'}?mode=ro", uri=True) as connection:
        connection.row_factory = sqlite3.Row
        rows = connection.execute(f"SELECT * FROM {table} ORDER BY rowid")
        return [{k: v for k, v in dict(row).items() if k not in ("at", "seal")} for row in rows]


def _metric_rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _renamed_metric(name: str, metrics: Mapping[str, str | None]) -> str | None:
    """Return the new name of a metric, or None for one that was dropped.

    >>> _renamed_metric("by_lag/x/3", {"by_lag/x/<n>": "y/lag_<n>"})
    'y/lag_3'
    >>> _renamed_metric("env/turns", {"env/<fact>": "env/<fact>_mean"})
    'env/turns_mean'
    """
    if name in metrics:
        return metrics[name]
    for old, new in metrics.items():
        pattern = re.sub(r"<\w+>", "(.+)", re.escape(old).replace(r"\<", "<").replace(r"\>", ">"))
        if new is not None and "<" in old and (match := re.fullmatch(pattern, name)):
            return re.sub(r"<\w+>", match[1], new)
    return name


def _same_value(name: str, one: Any, other: Any) -> bool:
    if repr(one) == repr(other):
        return True
    numbers = isinstance(one, float) and isinstance(other, float)
    return (
        numbers and name.startswith("audit/") and math.isclose(one, other, rel_tol=AUDIT_TOLERANCE)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="checkout of the older code")
    parser.add_argument("--module", default="unstale.cli.main", help="its command-line module")
    parser.add_argument("--after", type=Path, default=ROOT, help="checkout of the newer code")
    chosen = parser.parse_args()
    renames = json.loads(RENAMES.read_text())
    num_different = 0
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder, "before"), Path(folder, "after")
        run_all(chosen.before, chosen.module, before, {})
        run_all(chosen.after, "unstale.cli.main", after, renames["options"])
        for name in RUNS:
            found = list(differences(before / name, after / name, renames["metrics"]))
            files = len(list((before / name).rglob("*.safetensors")))
            rows = sum(len(_rows(before / name, table)) for table in TABLES)
            figures = sum(len(row) for row in _metric_rows(before / name))
            print(
                f"{name}: {files} tensor files, {rows} journal rows, {figures} metric values, "
                f"{len(found)} differences"
            )
            for line in found[:20]:
                print(f"  {line}")
            num_different += len(found)
    sys.exit(num_different > 0)


if __name__ == "__main__":
    main()
