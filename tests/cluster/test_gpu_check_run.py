"""Test that `benchmarks.gpu_check` runs as a whole at tiny sizes, with trainer ranks on Ray.

It also kills a rank, a raylet, an engine host and an engine process of one run.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_check, tables

KILLS = "6"
"""The goal that is measured in another process meanwhile, because it waits most of the time."""
LIMIT_S = 600


def rows(folder: Path) -> list[str]:
    """Return the rows of the table in a folder."""
    (table,) = folder.glob("gpu-check-tiny.md")
    lines = [line for line in table.read_text().splitlines() if re.match(r"\| \d", line)]
    assert all("| open: needs " in line for line in lines)
    assert not any("Broke off" in line or "| - |" in line for line in lines)
    return lines


def test_the_script_measures_every_goal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [goal.name for goal in gpu_check.GOALS if goal.name != KILLS]
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--tiny", "--goals", KILLS]
    environment = os.environ | {"BENCH_RESULTS": str(tmp_path / "kills")}
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "others")
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as kills:
        gpu_check.main(["--tiny", "--goals", *names])
        others = rows(tmp_path / "others")
        assert [line.split(" ")[1] for line in others] == names
        assert "bitwise equal" in others[-1]
        assert kills.wait(LIMIT_S) == 0
    (killed,) = rows(tmp_path / "kills")
    assert re.search(r"process \d.* host \d.* rank \d.* raylet \d.* the run is sound", killed)
