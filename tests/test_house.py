"""The house's budgets, checked by a machine: the story fits one file, rooms stay small, light imports stay light."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import unstale

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "unstale").rglob("*.py"))


def test_one_broad_except_and_it_is_in_the_rollout() -> None:
    broad = [
        path.name
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler)
        and (
            node.type is None
            or (isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException"))
        )
    ]
    assert broad == ["episode.py"]


def test_what_schedules_looks_at_no_clock_to_see_whether_something_happened() -> None:
    """`asyncio.sleep(0)` lets others go first; every other wait there is for what it waits for, or a time-out."""
    timers = re.compile(r"sleep\((?!0\))|call_later|call_at|Timer\(|LOOK_S|BEAT_S")
    rooms = (
        "loop",
        "components",
        "rollout/staleness_queue",
        "rollout/episode",
        "weights/publish",
        "trainer/local",
    )
    assert not [
        name for name in rooms if timers.search((ROOT / "unstale" / f"{name}.py").read_text())
    ]


def test_nothing_is_left_for_later() -> None:
    words = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
    assert not [str(path) for path in SOURCES if any(word in path.read_text() for word in words)]


def test_public_names_are_sorted_and_importable() -> None:
    assert unstale.__all__ == sorted(unstale.__all__)
    for name in unstale.__all__:
        assert getattr(unstale, name) is not None


@pytest.mark.parametrize(
    "statement",
    [
        "import unstale.cli.main",
        "import unstale.observe.report.page",
        "from unstale import recipes",
    ],
)
def test_what_must_start_quickly_leaves_torch_alone(statement: str) -> None:
    code = f"{statement}\nimport sys\nassert not {{'torch', 'transformers', 'ray', 'vllm'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
