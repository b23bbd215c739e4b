"""Test the kill benchmark.

A deterministic run that is killed and resumed repeatedly ends equal to an undisturbed one. An
ordinary run loses nothing and trains on nothing twice. Killing the engine changes neither.
Differences between two runs are reported.
"""

import json
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from unstale.cli.main import main
from unstale.durability.best_policy import BEST, RECORD
from unstale.durability.compare_runs import differences
from unstale.durability.journal import JOURNAL
from unstale.durability.run_folder import METRICS

ROOT = Path(__file__).parents[2]


@pytest.mark.costly
def test_kills_change_nothing(tmp_path: Path) -> None:
    """Runs `python -m benchmarks.chaos` with three kills of short runs."""
    kills = ["--kills", "1", "--ordinary", "1", "--engine", "1", "--steps", "4", "--seed", "1"]
    where = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "table.md")]
    command = [sys.executable, "-m", "benchmarks.chaos", *kills, *where]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    table = (tmp_path / "table.md").read_text()
    totals = [
        [cell.strip() for cell in line.split("|")[2:7]]
        for line in table.splitlines()
        if "| all |" in line
    ]
    assert totals == [
        ["1", "1", "1", "0", "0"],
        ["1", "1", "1", "0", "0"],
        ["1", "1", "1", "0", "0"],
    ]
    assert "wrong" not in table


@pytest.fixture
def pair(whole: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Return a run and a copy of it."""
    shutil.copytree(whole, tmp_path / "copy")
    return whole, tmp_path / "copy"


def test_a_run_is_the_same_as_itself_whatever_the_clock_said(pair: tuple[Path, Path]) -> None:
    one, other = pair
    rows = [json.loads(line) for line in (other / METRICS).read_text().splitlines()]
    for row in rows:
        row |= {name: 7.5 for name in row if name.endswith(("_s", "busy_share"))}
    (other / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    _change(other, "UPDATE groups SET at = at + 1, seal = 0")
    assert differences(one, other) == []
    with pytest.raises(SystemExit) as left:
        main(["same", str(one), str(other)])
    assert left.value.code == 0


def test_one_bit_of_the_policy_is_told(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = pair
    weights = load_file(other / "policy" / "model.safetensors")
    name = min(weights)
    weights[name].view(torch.uint8).reshape(-1)[5] ^= 1
    save_file(weights, other / "policy" / "model.safetensors")
    assert differences(one, other) == [f"policy/model.safetensors: /{name} differs"]
    with pytest.raises(SystemExit) as left:
        main(["same", str(one), str(other)])
    assert left.value.code == 1 and f"{name} differs" in capsys.readouterr().out


def test_the_best_policy_and_its_record_are_compared(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    one, other = shutil.copytree(pair[0], tmp_path / "one"), pair[1]
    for run in (one, other):
        (run / BEST).mkdir()
        save_file({"w": torch.zeros(3)}, run / BEST / "model.safetensors")
        (run / BEST / RECORD).write_text('{"value": 0.5, "evaluations": [[0, 0.5]]}')
    assert differences(one, other) == []
    save_file({"w": torch.tensor([0.0, -0.0, 0.0])}, other / BEST / "model.safetensors")
    (other / BEST / RECORD).write_text('{"value": 0.5, "evaluations": [[0, 0.5], [1, 0.4]]}')
    assert differences(one, other) == [
        "best/model.safetensors: /w differs",
        "best/evaluation.json: /evaluations has 1 and 2 entries",
    ]
    shutil.rmtree(other / BEST)
    assert "best/model.safetensors: /w is in only one of them" in differences(one, other)


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        (
            "UPDATE pieces SET behavior_logp = zeroblob(length(behavior_logp)) WHERE rowid = 2",
            "row/1/behavior_logp",
        ),
        ("DELETE FROM consumed WHERE number = 3", "consumed of the journal: row/3"),
        (
            "UPDATE versions SET version = 99 WHERE version = 4",
            "versions of the journal: row/4/version is 4 and 99",
        ),
        (
            "UPDATE events SET fields = replace(fields, 'lr\": 0.01', 'lr\": 1.0') WHERE id = 2",
            "fields/trainer/lr",
        ),
    ],
)
def test_one_cell_of_the_journal_is_told(
    pair: tuple[Path, Path], statement: str, told: str
) -> None:
    one, other = pair
    _change(other, statement)
    assert any(told in text for text in differences(one, other)), differences(one, other)


def test_a_changed_metric_and_a_renamed_checkpoint_are_found(pair: tuple[Path, Path]) -> None:
    one, other = pair
    rows = [json.loads(line) for line in (other / METRICS).read_text().splitlines()]
    rows[2]["trainer/grad_norm"] += 1e-12
    (other / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for folder in [*(other / "checkpoints").iterdir()]:
        folder.rename(folder.with_name(f"step9{folder.name.removeprefix('step0')}"))
    found = differences(one, other)
    assert len(found) == 2 and "none has the same name" in found[0]
    assert "2/trainer/grad_norm" in found[1]


def _change(run: Path, statement: str) -> None:
    connection = sqlite3.connect(run / JOURNAL, isolation_level=None)
    connection.execute("PRAGMA foreign_keys=OFF")
    assert connection.execute(statement).rowcount > 0
    connection.close()
