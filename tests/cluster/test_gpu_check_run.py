"""Test that `make gpu-check` runs as a whole at tiny sizes, with trainer ranks on Ray."""

import re
from pathlib import Path

import pytest

from benchmarks import gpu_check, tables


def test_the_script_measures_every_goal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    target = gpu_check.main(["--tiny"])
    rows = re.findall(r"^\| (\d) \|.*$", target.read_text(), re.MULTILINE)
    lines = [line for line in target.read_text().splitlines() if re.match(r"\| \d \|", line)]
    assert rows == ["1", "2", "3", "4", "8"] and target.name.endswith("-gpu-check-tiny.md")
    assert all("not possible here" in line or "not judged" in line for line in lines)
    assert not any("Broke off" in line or "| - |" in line for line in lines)
    assert "bitwise equal" in lines[-1]
