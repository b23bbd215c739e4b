"""The short form of `examples/first_hour.py`: each command of a new user, on two tiny models."""

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples import first_hour
from tests.support.forked import Forked


def forked(command: Sequence[str], *, cwd: Path, env: Mapping[str, str], **pipes: Any) -> Forked:
    """Start `python -m unstale` in the same folder and environment, without its imports."""
    assert list(command[:3]) == [sys.executable, "-m", "unstale"]
    assert pipes == {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return Forked(command[3:], cwd=cwd, env=env, forks_children=True)


@pytest.mark.costly
def test_the_first_hour_of_a_new_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        first_hour, "subprocess", SimpleNamespace(Popen=forked, PIPE=subprocess.PIPE)
    )
    monkeypatch.setattr(sys, "argv", ["first_hour.py", "--short", "--folder", str(tmp_path)])
    first_hour.main()
    printed = capsys.readouterr().out
    for kind in ("qwen3", "llama"):
        assert re.search(rf"{kind}: held-out success \d+%, \d+ episodes", printed)
        assert (tmp_path / "runs" / kind / "policy" / "model.safetensors").is_file()
        assert (tmp_path / "runs" / kind / "report.html").is_file()
        assert (tmp_path / "pushed" / kind / "README.md").is_file()
    assert "| stage | qwen3 | llama |" in printed
    assert re.search(r"^\| all \| \d+\.\d\d \| \d+\.\d\d \|$", printed, re.MULTILINE)
