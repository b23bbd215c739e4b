"""Test that a killed and resumed run has the same limits of turns as an unkilled one."""

import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest

from tests.durability.test_resume import killed, played, require_sound
from tests.durability.test_selection_resume import Choosing, chosen
from tests.test_loop import Numbers
from unstale.cli.turn_limits import learned_limit
from unstale.config import ConfigError, RunConfig
from unstale.config.options import override
from unstale.durability.journal import JOURNAL, TURN_LIMIT, Journal
from unstale.envs import Message, Turn
from unstale.records import GroupRequest, Task, TurnLimit
from unstale.techniques.limits import limit_of


class Wanders:
    """An environment that a reply with an even number ends. An odd one costs another turn."""

    def __init__(self, task: Task) -> None:
        self.task = task

    async def begin(self) -> Turn:
        return Turn((Message("user", str(self.task.index % 10)),))

    async def step(self, reply: Message) -> Turn:
        if int(reply.content) % 2 == 0:
            return Turn((), done=True, rewards={"r": float(int(reply.content) % 4 == 0)})
        return Turn((Message("user", "1"),))


class Wandering(Numbers):
    def env(self, task: Task, seed: int) -> Wanders:  # type: ignore[override]
        return Wanders(task)


def limited(*, deterministic: bool, scope: str = "run") -> RunConfig:
    made = chosen("limits", deterministic=deterministic)
    if scope == "task":
        made = override(made, {"selection.pool": 2, "max_steps": 6})
    options = {"window": 8, "free_every": 2, "remind": 0, "scope": scope}
    options["successes"] = 1 if scope == "task" else 2
    return override(made, {f"limits.{name}": value for name, value in options.items()})


def limits(folder: Path) -> Sequence[tuple[int, int]]:
    """Return the number and the limit of each group with a limit."""
    with Journal.read(folder) as reader:
        rows = reader.rows("SELECT fields FROM events WHERE kind = ? ORDER BY id", TURN_LIMIT)
    return [(event["group"], event["turns"]) for event in map(json.loads, (row[0] for row in rows))]


def stops(folder: Path) -> set[str]:
    """Return how the episodes with a limit ended, after a check that none is longer."""
    found = dict(limits(folder))
    with Journal.read(folder) as reader:
        ended = [each for each in reader.trajectories() if each.group in found]
    assert all(each.trajectory.num_turns <= found[each.group] for each in ended)
    return {each.trajectory.stop for each in ended}


@pytest.mark.costly(cases=0)
@pytest.mark.parametrize("scope", ["run", "task"])
def test_a_killed_deterministic_run_has_the_limits_of_an_unkilled_one(
    tmp_path: Path, scope: str
) -> None:
    made = limited(deterministic=True, scope=scope)
    with played(Choosing(lambda: Wandering(count()))) as toy:
        toy.require_equal_resume(tmp_path, made, "step", 4)
    found = limits(tmp_path / "whole")
    assert found == limits(tmp_path / "run")
    assert found and all(number % 2 == 1 for number, _ in found)
    assert "max_turns" in stops(tmp_path / "run")


def test_an_ordinary_run_keeps_the_limits_of_open_groups(tmp_path: Path) -> None:
    made = limited(deterministic=False)
    with played(Choosing(lambda: Wandering(count()))) as toy:
        with killed("flush", 11):
            toy.begin(tmp_path / "run", made)
        before = dict(limits(tmp_path / "run"))
        toy.go_on(tmp_path / "run", made)
    require_sound(tmp_path / "run")
    after = limits(tmp_path / "run")
    assert len(dict(after)) == len(after) and before
    assert {number: turns for number, turns in after if number in before} == before
    assert "max_turns" in stops(tmp_path / "run")


def test_the_limit_of_a_run_is_that_of_its_latest_free_successes(tmp_path: Path) -> None:
    made = override(limited(deterministic=True), {"limits.remind": 1})
    with played(Choosing(lambda: Wandering(count()))) as toy:
        toy.begin(tmp_path / "run", made)
    found = dict(limits(tmp_path / "run"))
    with Journal.read(tmp_path / "run") as reader:
        ended = [each for each in reader.trajectories() if each.group not in found]
    turns = [each.trajectory.num_turns for each in ended if each.trajectory.success][-8:]
    assert len(turns) > 2
    expected = TurnLimit(limit_of(turns, 0.75), remind=1)
    assert learned_limit(tmp_path / "run", made) == expected
    many = override(made, {"limits.successes": 900, "limits.window": 900})
    with pytest.raises(ConfigError, match=r"needs 900 successes \(limits.successes\) in groups"):
        learned_limit(tmp_path / "run", many)
    with pytest.raises(ConfigError, match="--limit-turns needs a run folder"):
        learned_limit(tmp_path, made)


def test_the_journal_keeps_every_figure_of_a_limit(tmp_path: Path) -> None:
    task, limit = Task("numbers", "train", 3), TurnLimit(4, 1, 3, 2, "go")
    with Journal(tmp_path / JOURNAL) as journal:
        journal.add_request(GroupRequest(0, task, 5, 0, sizes=(2,), turn_limit=limit))
        journal.add_request(GroupRequest(1, task, 5, 1))
    with Journal.read(tmp_path) as reader:
        first, second = reader.requests()
    assert (first.turn_limit, first.sizes, second.turn_limit) == (limit, (2,), None)
