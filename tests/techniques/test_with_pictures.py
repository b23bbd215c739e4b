"""Test the techniques that docs/vision.md names, with a policy that reads pictures.

The options are those of the page. `test_dart.py` and `tests/envs/test_traces.py` train the two rows
whose tasks are screens.
"""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_run import quiet
from tests.support.tiny_runs import tiny_run
from unstale.cli import main, recipe_options, session
from unstale.config import TaskConfig
from unstale.config.options import override
from unstale.durability.journal import Journal, check
from unstale.envs import Message
from unstale.lint import check as lint
from unstale.records import ContextPiece, Task
from unstale.research.techniques.catalogue import ROWS
from unstale.testing.pictures import DigitTasks, save_vision_model

PAGE = Path(__file__).parents[2] / "docs" / "vision.md"
SCREENS = {11, 46}
"""Rows whose tasks are screens."""


def rows() -> dict[int, str]:
    """Return number of a row -> the recipe and options of its command, in the table of the page."""
    line = r"^\| (\d+) [^|]+ \| `unstale train ([^`]+)`"
    found = re.findall(line, PAGE.read_text("utf-8"), re.MULTILINE)
    return {int(number): words for number, words in found}


class AnsweredDigits(DigitTasks):
    """Tasks to read a digit from a picture, with a solution and with answers that can vote."""

    def answer_of(self, task: Task, reply: str) -> str:
        return next((word for word in reply.split() if word.isdigit()), "")

    def demonstration(self, task: Task) -> Sequence[Message]:
        env = self.env(task, 0)
        said = f"{env.digit} digit {env.digit}"
        return (*env.begin().messages, Message("assistant", said))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_vl")
    save_vision_model("qwen3_vl", folder, num_hidden_layers=2)
    return folder


def test_the_page_has_the_rows_that_are_about_pictures() -> None:
    papers = {row.number: row.paper.partition(",")[0] for row in ROWS}
    text = PAGE.read_text("utf-8")
    assert {*rows()} == {5, 8, 11, 37, 46, 53}
    assert all(f"| {number} {papers[number]} |" in text for number in rows())


@pytest.mark.parametrize("number", rows())
def test_the_linter_accepts_a_row_of_the_page(number: int, model: Path) -> None:
    words = ["lint", *shlex.split(rows()[number]), "--model", str(model)]
    if "--task.env" not in words:
        words += ["--task.env", f"{__name__}:AnsweredDigits"]
    chosen = main.parse(words)
    assert not lint(recipe_options.configure(chosen)).refusals


@pytest.mark.costly(cases=1)
@pytest.mark.usefixtures("forked_children")
@pytest.mark.parametrize("number", sorted({*rows()} - SCREENS))
def test_a_row_of_the_page_trains_with_pictures(number: int, model: Path, tmp_path: Path) -> None:
    _, values = recipe_options.split_options(shlex.split(rows()[number]))
    tasks = TaskConfig(env=f"{__name__}:AnsweredDigits")
    config = tiny_run(model, tmp_path, max_steps=3, task=tasks)
    small: dict[str, Any] = {
        "engine.max_completion_tokens": 6,
        "schedule.groups_per_step": 4,
        "schedule.group_size": 4,
        **values,
        "selection.pool": 8,
    }
    run = session.train(override(config, small), console=quiet())
    assert {row["old_logps/exact_share"] for row in run.metrics} == {1.0}
    assert max(row["audit/logp_error_abs_mean"] for row in run.metrics) < 1e-6
    assert max(row["trainer/grad_norm"] for row in run.metrics) > 0
    with Journal.read(run.folder) as journal:
        assert check(journal) == []
        episodes = [each.trajectory for each in journal.trajectories()]
    first = [each.pieces[0] for each in episodes]
    assert all(isinstance(piece, ContextPiece) and piece.pictures for piece in first)
