"""Promises: the examples in the docs run as they stand, and the README shows the loop as it is."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def test_a_task_of_ones_own_trains_in_under_60_lines(tmp_path: Path) -> None:
    tasks, script = blocks("docs/your-own-task.md", "python")
    assert len(f"{tasks}\n{script}".splitlines()) < 60
    (tmp_path / "order_desk.py").write_text(tasks)
    (tmp_path / "train.py").write_text(script)
    check = "from afterimage.testing import check_env; from order_desk import EchoTasks; check_env(EchoTasks())"
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", check], cwd=tmp_path, env=path, check=True)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=path, check=True, capture_output=True, text=True
    )
    success, report = done.stdout.strip().splitlines()[-1].split(" ", 1)
    assert 0 <= float(success) <= 1 and (tmp_path / report).exists()


def test_the_readme_shows_the_loop_as_it_is() -> None:
    source = (ROOT / "afterimage" / "loop.py").read_text()
    shown = blocks("README.md", "python")[0]
    assert shown.startswith("async def train(") and shown in source


def test_every_command_of_the_readme_exists() -> None:
    readme = (ROOT / "README.md").read_text()
    verbs = set(re.findall(r"^make ([a-z-]+)", readme, re.MULTILINE))
    assert {"demo", "test"} <= verbs
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert verbs <= targets
    for verb in set(re.findall(r"^afterimage ([a-z]+)", readme, re.MULTILINE)):
        subprocess.run(
            [sys.executable, "-m", "afterimage.cli", verb, "--help"], cwd=ROOT, check=True, capture_output=True
        )


def test_links_in_the_docs_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
