"""Test the recipe `dart` on screenshots: all parts of its curation of data, in one run.

A policy that reads pictures acts on a screen for up to four turns. Each answer is a new screenshot.
"""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.cli.test_run import quiet
from unstale.cli import session
from unstale.config.options import override
from unstale.durability.journal import Journal, check
from unstale.envs import Image, Message, NumberedTasks, Turn
from unstale.recipes import RECIPES
from unstale.records import ContextPiece, Placed, Provenance, Task
from unstale.testing.pictures import draw_digit, save_vision_model

TURNS = 4


class ScreenEnv:
    """Shows a digit after each reply. A reply that begins with a digit of the same parity ends the
    episode with a success.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._turns = 0

    def begin(self) -> Turn:
        return Turn((self._screenshot(),))

    def _screenshot(self) -> Message:
        self._digit = self._random.randrange(10)
        return Message("user", "digit ", images=(Image(draw_digit(self._digit, self._random), 6),))

    def step(self, reply: Message) -> Turn:
        self._turns += 1
        first, *_ = reply.content.split() or [""]
        right = first.isdigit() and int(first) % 2 == self._digit % 2
        if right or self._turns == TURNS:
            return Turn((), done=True, rewards={"r": float(right)}, facts={"success": float(right)})
        return Turn((self._screenshot(),))


class ScreenTasks(NumberedTasks):
    """Tasks whose screens depend on the task only, so that an episode can be played again."""

    name = "screens"
    tools = ()

    def env(self, task: Task, seed: int) -> ScreenEnv:
        return ScreenEnv(Random(task.key))


def train(model: Path, runs: Path, **changes: Any) -> Path:
    values = {
        "model": str(model),
        "runs": runs,
        "name": "run",
        "max_steps": 6,
        "task.env": f"{__name__}:ScreenTasks",
        "selection.pool": 6,
        "eval.tasks": 0,
        "engine.dtype": "float32",
        "engine.max_context": 256,
        "engine.max_completion_tokens": 4,
        "schedule.groups_per_step": 3,
        "schedule.group_size": 8,
        "allocate.mean": 8.0,
        "limits.successes": 2,
        "limits.free_every": 2,
        "audit.share": 1.0,
    }
    config = override(RECIPES["dart"](), values)
    return session.train(override(config, changes), console=quiet()).folder


@pytest.mark.usefixtures("forked_children")
@pytest.mark.costly
def test_an_agent_that_sees_screenshots_has_all_parts_of_dart(tmp_path: Path) -> None:
    save_vision_model("smolvlm", tmp_path / "model", num_hidden_layers=2)
    first = train(tmp_path / "model", tmp_path / "a")
    changes = {
        "bus.load": str(first),
        "bus.number": 2,
        "objective.placed": "anchor",
        "replay.rule": "uniform",  # the rule of the recipe needs a group that fails again
    }
    techniques = "allocate limits bus replay top_turns"
    second = train(tmp_path / "model", tmp_path / "b", techniques=techniques, **changes)
    rows = list(session.Run(second, second).metrics)
    assert max(row["schedule/staleness_max"] for row in rows) > 0
    assert {row["old_logps/exact_share"] for row in rows} == {1.0}
    assert max(row["audit/logp_error_abs_mean"] for row in rows) < 1e-6
    assert max(row["trainer/grad_norm"] for row in rows) > 0
    assert max(row["bus/episode_share"] for row in rows) > 0
    assert sum(row["replay/groups"] for row in rows) > 0, "beside loaded and fresh episodes"
    with Journal.read(second) as journal:
        assert check(journal) == []
        episodes = [each.trajectory for each in journal.trajectories()]
        used = [group for row in rows for group in journal.consumed(row["step"])]
        sizes = {sum(each.fork is None for each in group.finished) for group in used}
    assert len(sizes) > 1, "the numbers of episodes follow the tasks"
    loaded = [each for each in episodes if each.fork]
    assert loaded, "tasks have successes of the earlier run"
    for each in episodes:
        assert all(one.pictures for one in each.pieces if isinstance(one, ContextPiece))
    for each in loaded:
        *_, text = (one for one in each.pieces if isinstance(one, Placed))
        assert text.provenance == Provenance.FOREIGN
