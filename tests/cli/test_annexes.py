"""The core works without its annexes, whose folders can be left out of an installation."""

import json
from pathlib import Path

import pytest

from tests.cli.test_foreign_package import run_commands
from unstale.config.plugins import ANNEXES, modules
from unstale.durability.run_folder import RunFolder, read_jsonl

PACKAGE = Path(__file__).parents[2] / "unstale"
FOLDERS = ("analysis", "research")

TRAIN = (
    "train retail --runs . --name run --max_steps 2 --minutes 0 --eval.tasks 1 "
    "--schedule.groups_per_step 2 --schedule.group_size 2 --task.latency_s 0 "
    "--rollout.max_turns 2 --engine.max_completion_tokens 16 --audit.share 0"
)
EVAL = "eval run --eval.tasks 2 --rollout.max_turns 2 --engine.max_completion_tokens 16 --json"


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the package, but without its annexes."""
    folder = tmp_path_factory.mktemp("core")
    (folder / "unstale").mkdir()
    for entry in PACKAGE.iterdir():
        if entry.name not in (*FOLDERS, "__pycache__"):
            (folder / "unstale" / entry.name).symlink_to(entry)
    return folder


def test_core_trains_and_evaluates_without_annexes(core: Path) -> None:
    done = run_commands([core], ["--help", "lint retail", TRAIN, EVAL, "journal run"])
    assert {name: row["code"] for name, row in done.items() if row["code"]} == {}, done
    assert "train " in done["--help"]["out"] and "dashboard" not in done["--help"]["out"]
    run = RunFolder(core / "run")
    assert [row["step"] for row in run.metrics() if row["step"]] == [1, 2]
    assert list(read_jsonl(run.path / "events.jsonl"))[-1]["reason"] == "finished"
    assert not (run.path / "report.html").exists()
    assert json.loads(done[EVAL]["out"])["result"]["attempts"] == 1


def test_the_error_for_a_name_of_a_missing_annex_names_the_annex(core: Path) -> None:
    unknown = [
        "dashboard runs",
        "lint airline",
        "lint retail --task.env airline",
        "lint retail --techniques ess_lr",
    ]
    for command, row in run_commands([core], unknown).items():
        assert row["code"] == 2, command
        absent = "It may be of unstale.analysis or unstale.research, not installed here"
        assert row["err"].endswith(f"{absent}\n"), command


def test_every_folder_in_the_table_of_annexes_has_modules() -> None:
    """A wrong name in the table would hide what an annex adds."""
    for package, places in ANNEXES.items():
        found = modules(package).values()
        for place in places:
            assert any(each.startswith(f"{place}.") for each in found), place
