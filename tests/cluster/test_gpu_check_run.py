"""Test `benchmarks.gpu_check` with trainer ranks on Ray, and `benchmarks.gpu_kills`.

The latter kills a rank, a raylet, an engine host and an engine process of one run.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_check, tables

LIMIT_S = 600


def test_the_parts_of_a_step_are_measured_on_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kills run meanwhile in another process, because they wait most of the time."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    command = [sys.executable, "-m", "benchmarks.gpu_kills", str(tmp_path / "kills")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as kills:
        told = json.loads(gpu_check.main(["--tiny", "--trainers", "2"]).read_text())
        seconds = told["parts"]["steps"]["values"]["seconds"]
        for name in ("score", "move", "put", "forward", "backward", "communication", "encode"):
            assert seconds[name]["measured"] > 0, name
        assert told["parts"]["exactness"]["values"]["exact share"]["value"] == 1
        printed, _ = kills.communicate(timeout=LIMIT_S)
    assert kills.returncode == 0
    assert re.search(r"process \d.* host \d.* rank \d.* raylet \d.* the run is sound", printed)
