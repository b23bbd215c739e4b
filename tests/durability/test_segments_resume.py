"""Test that a killed and resumed run has the same segments and limits as an unkilled one."""

import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest

from tests.durability.test_limits_resume import Wandering
from tests.durability.test_resume import killed, played, require_sound
from tests.durability.test_selection_resume import Choosing, chosen
from tests.test_loop import REPLY
from unstale.config import RunConfig
from unstale.durability.journal import EPISODE_BUDGET, JOURNAL, Journal
from unstale.records import NO_BUDGET, EpisodeBudget, GroupRequest, Task


def segmented(*, deterministic: bool, techniques: str = "segments") -> RunConfig:
    options = {
        "max_concurrent_episodes": 2,
        "tokens": REPLY,
        "table": "60:9:1 60:9:2 60:9:9",
        "window": 4,
    }
    named = {f"segments.{name}": value for name, value in options.items()}
    return chosen(techniques, deterministic=deterministic, **named)


def budgets(folder: Path) -> Sequence[tuple[int, int]]:
    """Return the number of each group, and the segments that its episodes may have."""
    with Journal.read(folder) as reader:
        rows = reader.rows("SELECT fields FROM events WHERE kind = ? ORDER BY id", EPISODE_BUDGET)
    events = [json.loads(row[0]) for row in rows]
    return [(event["group"], event["segments"]) for event in events]


def require_within_limits(folder: Path) -> None:
    """Check that no episode has more segments than its limit, and that some were cut off."""
    limits = dict(budgets(folder))
    with Journal.read(folder) as reader:
        ended = list(reader.trajectories())
    for each in ended:
        # each reply is one segment, and so many were allowed when the group began
        assert each.trajectory.facts["segments"] == each.trajectory.num_turns <= limits[each.group]
    assert {each.trajectory.stop for each in ended} >= {"done", "max_tokens"}


@pytest.mark.costly
def test_a_killed_deterministic_run_has_the_segments_of_an_unkilled_one(tmp_path: Path) -> None:
    made = segmented(deterministic=True)
    with played(Choosing(lambda: Wandering(count()))) as toy:
        toy.require_equal_resume(tmp_path, made, "step", 4)
    found = budgets(tmp_path / "whole")
    assert found == budgets(tmp_path / "run")
    assert len({most for _, most in found}) > 1  # the limits grew
    require_within_limits(tmp_path / "run")


@pytest.mark.costly
def test_an_ordinary_run_keeps_the_limits_of_open_groups(tmp_path: Path) -> None:
    made = segmented(deterministic=False)
    with played(Choosing(lambda: Wandering(count()))) as toy:
        with killed("flush", 11):
            toy.begin(tmp_path / "run", made)
        before = budgets(tmp_path / "run")
        toy.go_on(tmp_path / "run", made)
    require_sound(tmp_path / "run")
    after = budgets(tmp_path / "run")
    assert before and after[: len(before)] == before
    assert len(dict(after)) == len(after)
    require_within_limits(tmp_path / "run")


def test_without_the_technique_a_group_has_no_budget(tmp_path: Path) -> None:
    with played(Choosing(lambda: Wandering(count()))) as toy:
        toy.begin(tmp_path / "run", chosen("", deterministic=True))
    assert budgets(tmp_path / "run") == []


@pytest.mark.parametrize("budget", [EpisodeBudget(5, 100, 4, 3, 50, 2), NO_BUDGET])
def test_the_journal_keeps_every_figure_of_a_budget(tmp_path: Path, budget: EpisodeBudget) -> None:
    with Journal(tmp_path / JOURNAL) as journal:
        journal.add_request(GroupRequest(0, Task("numbers", "train", 3), 5, 0, budget=budget))
    with Journal.read(tmp_path) as reader:
        (request,) = reader.requests()
    assert request.budget == budget
