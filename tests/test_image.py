"""Test the Dockerfile: what it copies exists and is in the context, and its steps can run.

Where a container runtime works, `-m slow` builds the CPU image and trains in it.
"""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tools.image_steps import ROOT, copies, stage


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_every_copied_file_exists_and_is_in_the_context(name: str) -> None:
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    copied = [each for word, rest in stage(name) if word == "COPY" for each in copies(rest)]
    assert copied and all(source.exists() for source, _ in copied)
    assert sent[0] == "*" and {f"!{source.name}" for source, _ in copied} <= set(sent)


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_the_image_installs_torch_first_and_extras_that_exist(name: str) -> None:
    steps = [rest for word, rest in stage(name) if word == "RUN" and rest.startswith("pip ")]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = extras["optional-dependencies"]
    assert all("-c constraints.txt" in step for step in steps)
    assert "torch" in steps[0] and "triton" not in known
    asked = re.search(r"'\.\[([\w,-]+)\]'", steps[-1])
    assert asked and set(asked[1].split(",")) <= set(known)
    assert ("ENTRYPOINT", '["unstale"]') in stage(name)


@pytest.mark.slow
def test_the_cpu_image_trains(tmp_path: Path) -> None:
    if not shutil.which("docker") or subprocess.run(["docker", "info"]).returncode:
        pytest.skip("no container runtime works here: python -m tools.image_steps cpu FOLDER")
    tag = "unstale-test:cpu"
    subprocess.run(["docker", "build", "--target", "cpu", "-t", tag, str(ROOT)], check=True)
    words = ["train", "retail", "--max_steps", "1", "--eval.tasks", "2", "--name", "first"]
    mount = f"{tmp_path}:/work/runs"
    subprocess.run(["docker", "run", "--rm", "-v", mount, tag, *words], check=True)
    assert (tmp_path / "first" / "report.html").exists()
