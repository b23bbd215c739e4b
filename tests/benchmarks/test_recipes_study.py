"""The study of three recipes: its task, and every arm is accepted and trains."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.totals import Totals, four, hard, one
from tests.benchmarks.test_real_study import SMALL
from unstale.cli import main
from unstale.cli.session import train
from unstale.config.options import override
from unstale.envs import Message
from unstale.records import Task
from unstale.research import study
from unstale.research.compare import Planned

FILE = Path(__file__).parents[2] / "benchmarks" / "studies" / "recipes.toml"
ARMS = {"hard": "hard_tasks", "four": "long_horizon", "one": "test_time"}
"""Setting -> the recipe that is compared with the plain one in it."""


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Planned]:
    """Return the first run of each arm in each setting, with the small policy of the package."""
    folder = tmp_path_factory.mktemp("study")
    words = [str(FILE), "--model", "base", "--seeds", "1"]
    plan = study.planned(main.parse(["compare", *words, "--runs", str(folder / "runs")]))
    return {(each.folder.name, run.arm): run for each in plan.comparisons for run in each.runs}


def test_only_test_time_trains_on_held_out_tasks(
    planned: dict[tuple[str, str], Planned],
) -> None:
    assert {*planned} == {*ARMS.items(), *((setting, "plain") for setting in ARMS)}
    chosen = [place for place, run in planned.items() if run.config.selection.test_time]
    assert chosen == [("one", "test_time")]


@pytest.mark.costly(cases=0)
@pytest.mark.parametrize("place", ARMS.items())
def test_an_arm_trains(place: tuple[str, str], planned: dict[tuple[str, str], Planned]) -> None:
    changes = {**SMALL, "schedule.group_size": 4, "sft.steps": 0}
    run = train(override(planned[place].config, changes))
    assert [row["step"] for row in run.metrics if "trainer/grad_norm" in row] == [1, 2]


def reward(tasks: Totals, task: Task, said: list[str]) -> float:
    """Return the reward of an episode with these replies."""

    async def play() -> float:
        env = tasks.env(task, 0)
        await env.begin()
        for text in said:
            turn = await env.step(Message("assistant", text))
        assert turn.done
        return turn.rewards["success"]

    return asyncio.run(play())


def test_the_last_total_decides_and_the_first_wrong_one_is_corrected() -> None:
    tasks = four()
    (task,) = tasks.held_out(1)
    said = [each.content for each in tasks.demonstration(task) if each.role == "assistant"]
    assert reward(tasks, task, said) == 1.0 == reward(tasks, task, ["?", *said[1:]])
    assert reward(tasks, task, [*said[:3], f"{said[3]} or {said[2]}"]) == 0.0
    wrong = [Message("assistant", text) for text in (said[0], "no idea", said[2], "0")]
    assert tasks.correction(task, wrong) == (1, Message("assistant", said[1]))
    assert tasks.correction(task, [Message("assistant", f"It is {each}.") for each in said]) is None


def test_no_held_out_list_is_trained_on_and_votes_are_numbers() -> None:
    for tasks in (one(), four(), hard()):
        train_lists, held_out = ({each["numbers"] for each in part} for part in tasks.data.values())
        assert not train_lists & held_out
    (task,) = one().held_out(1)
    assert [one().answer_of(task, text) for text in ("4, so 12.", "none")] == ["12", ""]
