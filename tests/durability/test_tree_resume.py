"""Test that a killed and resumed run has the same forks of episodes as an unkilled one."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.durability.test_limits_resume import Wandering, Wanders
from tests.durability.test_resume import KILLS, killed, played, require_sound
from tests.durability.test_selection_resume import Choosing, chosen
from unstale.config import RunConfig
from unstale.durability.compare_runs import differences
from unstale.durability.journal import JOURNAL, Journal, check
from unstale.envs import Message, Turn
from unstale.records import SURVIVAL, Provenance, Task, Trajectory

TECHNIQUES = "tree tree_advantage"
STOP = 1
"""The token that ends each reply of the scripted engine."""


def forked(*, deterministic: bool, size: int = 4, **options: Any) -> RunConfig:
    named = {f"tree.{name}": value for name, value in options.items()}
    named["schedule.group_size"] = size
    return chosen(TECHNIQUES, deterministic=deterministic, **named)


def forks(folder: Path) -> Sequence[tuple[int, int, int, int]]:
    """Return the episode, its seed, the parent and the place of every fork, in order."""
    with Journal.read(folder) as reader:
        assert check(reader) == []
        return reader.rows(
            "SELECT episode, seed, parent, forks.at FROM forks JOIN episodes USING (episode) "
            "ORDER BY episode"
        )


def require_forked(folder: Path) -> None:
    """Check that every forked episode has its parent's beginning, which only the parent sampled."""
    with Journal.read(folder) as reader:
        ended = {each.trajectory.episode: each.trajectory for each in reader.trajectories()}
        trained = {
            each.episode: len(each.flags)
            for group, steps in reader.token_steps().items()
            for each in reader.token_values(group, steps[0])
        }
    # an episode of a group in flight may have ended before its parent
    found = [each for each in ended.values() if each.fork and each.fork.parent in ended]
    assert found
    for each in found:
        assert each.fork is not None
        parent, at = ended[each.fork.parent], each.fork.at
        assert each.tokens[:at] == parent.tokens[:at]
        assert each.tokens != parent.tokens or parent.tokens[at] == STOP
        assert origins(each)[:at] == [
            Provenance.SHARED if origin == Provenance.SAMPLED else origin
            for origin in origins(parent)[:at]
        ]
        assert Provenance.SHARED not in origins(each)[at:]
        assert each.num_sampled
        if each.episode in trained:
            assert trained[each.episode] == each.num_sampled


def origins(trajectory: Trajectory) -> list[Provenance]:
    return [piece.provenance for piece in trajectory.pieces for _ in piece.tokens]


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize("options", [{"turn": 2}, {"branch": "peaks", "places": 1}])
def test_a_killed_deterministic_run_has_the_forks_of_an_unkilled_one(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    made = forked(deterministic=True, **options)
    with played(Choosing(lambda: Wandering(count()))) as toy:
        toy.require_equal_resume(tmp_path, made, "step", 4)
    assert forks(tmp_path / "whole") == forks(tmp_path / "run")
    require_forked(tmp_path / "run")
    assert not differences(tmp_path / "whole", tmp_path / "run")
    with closing(sqlite3.connect(tmp_path / "run" / JOURNAL)) as journal:
        journal.execute(
            "UPDATE forks SET at = at + 1 WHERE episode = (SELECT min(episode) FROM forks)"
        )
        journal.commit()
    (found,) = differences(tmp_path / "whole", tmp_path / "run")
    assert found.startswith("forks of the journal") and "/at " in found


PLACES = [each for each in KILLS if each[0] != "prune"]
PLACES += [("transaction", number) for number in range(30, 110, 10)]
"""20 places at which a run is killed."""


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize(("call", "number"), PLACES)
def test_a_deterministic_tree_ends_equal_wherever_it_is_killed(
    tmp_path: Path, call: str, number: int
) -> None:
    """Forks are equal in number, place and seed."""
    made = forked(deterministic=True, turn=2)
    with played(Choosing(lambda: Wandering(count()))) as toy:
        toy.require_equal_resume(tmp_path, made, call, number)
    assert len(PLACES) == 20
    assert forks(tmp_path / "whole") == forks(tmp_path / "run") != []


class Remembering(Wanders):
    """An environment that restores snapshots. The reward of a turn is the number of replies."""

    resumed: ClassVar[list[int]] = []

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.replies = 0

    async def step(self, reply: Message) -> Turn:
        self.replies += 1
        return replace(await super().step(reply), reward=float(self.replies))

    def snapshot(self) -> str:
        return str(self.replies)

    async def resume(self, state: str) -> None:
        self.replies = int(state)
        self.resumed.append(self.replies)


class Remembered(Wandering):
    def env(self, task: Task, seed: int) -> Remembering:
        return Remembering(task)


class Copying(Remembering):
    """An environment that can be copied, and has no snapshots."""

    snapshot = None  # type: ignore[assignment]

    def fork(self) -> "Copying":
        copied = Copying(self.task)
        copied.replies = self.replies
        self.resumed.append(self.replies)
        return copied


class Copied(Wandering):
    def env(self, task: Task, seed: int) -> Copying:
        return Copying(task)


@pytest.mark.costly
@pytest.mark.parametrize(("call", "number"), [("step", 4), ("transaction", 60)])
@pytest.mark.parametrize("options", [{"turn": 2}, {"branch": "entropy", "every": 2}])
@pytest.mark.parametrize("tasks", [Remembered, Copied])
def test_a_killed_deterministic_run_forks_by_snapshots_and_copies_as_an_unkilled_one(
    tmp_path: Path, tasks: type[Wandering], options: dict[str, Any], call: str, number: int
) -> None:
    """A parent's copies are gone after the resume. New environments then get its replies."""
    Remembering.resumed.clear()
    made = forked(deterministic=True, **options)
    with played(Choosing(lambda: tasks(count()))) as toy:
        toy.require_equal_resume(tmp_path, made, call, number)
    assert Remembering.resumed
    assert forks(tmp_path / "whole") == forks(tmp_path / "run") != []
    require_forked(tmp_path / "run")


def test_a_fork_of_an_environment_with_snapshots_keeps_the_rewards_of_its_own_turns(
    tmp_path: Path,
) -> None:
    Remembering.resumed.clear()
    with played(Choosing(lambda: Remembered(count()))) as toy:
        made = forked(deterministic=False, turn=2)
        with killed("step", 3):
            toy.begin(tmp_path / "run", made)
        toy.go_on(tmp_path / "run", made)
    require_forked(tmp_path / "run")
    assert Remembering.resumed
    with Journal.read(tmp_path / "run") as reader:
        for stored in reader.trajectories():
            each = stored.trajectory
            first = 1 if each.fork is None else 2
            assert each.turn_rewards == tuple(range(first, first + each.num_turns))


@pytest.mark.costly(cases=2)
@pytest.mark.parametrize(("call", "number"), PLACES)
def test_an_ordinary_run_keeps_the_forks_of_open_groups(
    tmp_path: Path, call: str, number: int
) -> None:
    made = forked(deterministic=False, turn=2)
    with played(Choosing(lambda: Wandering(count()))) as toy:
        with killed(call, number):
            toy.begin(tmp_path / "run", made)
        before = forks(tmp_path / "run")
        toy.go_on(tmp_path / "run", made)
    require_sound(tmp_path / "run")
    assert set(before) <= set(forks(tmp_path / "run"))
    require_forked(tmp_path / "run")


LIVE: list[dict[str, Any]] = [
    {"branch": "entropy", "every": 2},
    {"branch": "entropy", "every": 2, "prune": "confidence", "threshold": 0.5, "size": 8},
    {"branch": "second", "every": 2},
    {"branch": "tool", "every": 1, "roots": 1},
    {"branch": "confidence", "every": 2, "threshold": 0.1, "continuations": 3},
    {"branch": "none", "every": 2, "prune": "mixed"},
]


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize("options", LIVE)
def test_a_killed_deterministic_run_decides_about_running_episodes_as_an_unkilled_one(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    made = forked(deterministic=True, **options)
    with played(Choosing(lambda: Wandering(count()))) as toy:
        toy.require_equal_resume(tmp_path, made, "step", 4)
    assert forks(tmp_path / "whole") == forks(tmp_path / "run")
    with Journal.read(tmp_path / "run") as reader:
        stops = {each.trajectory.stop for each in reader.trajectories()}
        weights = [each.trajectory.facts.get(SURVIVAL, 1.0) for each in reader.trajectories()]
    if options.get("prune"):
        assert "pruned" in stops and 0.0 in weights
    else:
        require_forked(tmp_path / "run")


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize(("call", "number"), PLACES)
def test_an_ordinary_run_keeps_its_decisions_about_running_episodes(
    tmp_path: Path, call: str, number: int
) -> None:
    made = forked(deterministic=False, **LIVE[1])
    with played(Choosing(lambda: Wandering(count()))) as toy:
        with killed(call, number):
            toy.begin(tmp_path / "run", made)
        before = forks(tmp_path / "run")
        toy.go_on(tmp_path / "run", made)
    require_sound(tmp_path / "run")
    assert set(before) <= set(forks(tmp_path / "run"))
    require_forked(tmp_path / "run")
