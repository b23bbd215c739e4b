"""Test that the pages of a run and the terminal show it with the same figures.

- The sentence on the pace has the shares of the bars.
- A failed evaluation is called failed, and held-out shares have their tasks and intervals.
- A resume with other rows is marked with its step.
"""

import json
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_run import fake_config, fake_run
from unstale.analysis.dashboard import details, summary
from unstale.analysis.dashboard.index import RunIndex
from unstale.cli.grades import EvalResult
from unstale.durability.console import Console
from unstale.durability.run_folder import EVENTS
from unstale.observe.live import LiveDisplay
from unstale.observe.words import percent


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return fake_run(tmp_path / "run", steps=24)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[list[RunIndex]]:
    indexes: list[RunIndex] = []
    yield indexes
    for index in indexes:
        index.close()


def shown(run: Path, opened: list[RunIndex]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the dashboard and the report show of a run: as a whole, and its parts."""
    index = RunIndex(run, run.parent / f"{len(opened)}.sqlite")
    opened.append(index)
    while index.update_files():
        pass
    return summary.overview("run", index), details.details(index.database)


def add_event(run: Path, **event: Any) -> None:
    with (run / EVENTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": 1e6, **event}) + "\n")


def test_the_sentence_on_the_pace_has_the_shares_of_the_bars(
    run: Path, opened: list[RunIndex]
) -> None:
    overview, parts = shown(run, opened)
    bars = {bar["name"]: bar for bar in parts["shares"]}
    waits = {name: share for name, _, share in bars["trainer"]["parts"]}["trainer waits"]
    idle = {name: share for name, _, share in bars["engine"]["parts"]}["idle"]
    assert 0 < waits < 1 and 0 < idle < 1
    assert f"waited for episodes {percent(waits)} of the time" in overview["pace"]["sentence"]
    assert f"engine was idle {percent(idle)}" in overview["pace"]["sentence"]


def test_a_failed_evaluation_is_failed_on_every_page(run: Path, opened: list[RunIndex]) -> None:
    add_event(run, kind="eval", step=24, success=None, tasks=8, failed=8)
    overview, _ = shown(run, opened)
    assert overview["outcome"]["shares"][-1] == ("failed", "all 8 tasks failed")
    assert not overview["outcome"]["better"]
    assert overview["remarks"] == ["The evaluation after 24 steps failed."]
    last = overview["evaluations"][-1]
    assert (last["success"], last["share"], last["interval"]) == (None, "failed", None)


def test_fewer_held_out_tasks_than_asked_are_named(run: Path, opened: list[RunIndex]) -> None:
    asked = fake_config("snapshot_old", 24, 0).eval.tasks
    add_event(run, kind="eval", step=24, success=0.5, tasks=asked - 1, failed=3)
    overview, _ = shown(run, opened)
    note = f"{asked - 1} held-out tasks (fewer than eval.tasks = {asked})"
    assert note in overview["outcome"]["note"]
    assert f"3 of {asked - 1} tasks failed" in overview["outcome"]["shares"][-1][1]


def test_a_change_of_the_data_is_marked_on_every_page(run: Path, opened: list[RunIndex]) -> None:
    add_event(run, kind="data_changed", step=7, text="the rows of x have changed", data={})
    overview, _ = shown(run, opened)
    assert overview["data_changes"] == [7]
    (remark,) = overview["remarks"]
    assert remark.startswith("After step 7, the rows of x have changed.")


def test_the_terminal_has_the_counts_of_a_held_out_share_and_calls_a_failed_one_so() -> None:
    config = fake_config("snapshot_old", 24, 0)
    for width in (80, 100, 160):
        out = StringIO()
        console = Console(file=out, width=width, height=40, force_terminal=True, color_system=None)
        display = LiveDisplay(config, console=console)
        display.update({"step": 0, "eval/success_rate": 0.25, "eval/tasks": 8})
        console.print(display.panel())
        assert "8 tasks, 7% to 59%" in out.getvalue()
        display.update({"step": 1, "eval/success_rate": None, "eval/tasks": 8})
        console.print(display.panel())
        assert "failed" in out.getvalue() and "was 25.0%" in out.getvalue()


def test_an_evaluation_without_a_finished_episode_is_failed() -> None:
    result = EvalResult.of([None, None], 1)
    out = StringIO()
    Console(file=out, width=100).print(result.table([1]))
    assert "failed" in out.getvalue() and "0.0%" not in out.getvalue()
    assert "avg@1" not in result.as_json([1])
