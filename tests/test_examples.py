"""The short form of `examples/first_hour.py`: each command of a new user, on two tiny models."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_first_hour_of_a_new_user(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "first_hour.py", "--short", "--folder", tmp_path],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in ("qwen3", "llama"):
        assert re.search(rf"{kind}: held-out success \d+%, \d+ episodes", done.stdout)
        assert (tmp_path / "runs" / kind / "policy" / "model.safetensors").is_file()
        assert (tmp_path / "runs" / kind / "report.html").is_file()
        assert (tmp_path / "pushed" / kind / "README.md").is_file()
    assert "| stage | qwen3 | llama |" in done.stdout
    assert re.search(r"^\| all \| \d+\.\d\d \| \d+\.\d\d \|$", done.stdout, re.MULTILINE)
