"""The study of other ways to train: every arm is accepted, samples as much, and trains."""

from pathlib import Path

import pytest

from tests.benchmarks.test_real_study import SMALL
from tests.support.tiny_runs import save_tiny
from unstale.cli import main
from unstale.cli.session import train
from unstale.config.options import override
from unstale.research import study
from unstale.research.compare import Planned

FILE = Path(__file__).parents[2] / "benchmarks" / "studies" / "training.toml"
ARMS = ("snapshot_old", "rollout", "DPPO", "KPop", "critic", "told teacher")


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Planned]:
    """Return the first run of each arm, with a tiny policy."""
    folder = tmp_path_factory.mktemp("study")
    save_tiny(folder / "tiny")
    words = [str(FILE), "--model", str(folder / "tiny"), "--seeds", "1"]
    plan = study.planned(main.parse(["compare", *words, "--runs", str(folder / "runs")]))
    return {run.arm: run for each in plan.comparisons for run in each.runs}


def test_every_arm_samples_as_many_episodes_a_step(planned: dict[str, Planned]) -> None:
    assert tuple(planned) == ARMS
    for run in planned.values():
        schedule = run.config.schedule
        assert schedule.group_size * schedule.groups_per_step == 64
        assert schedule.max_staleness == 8


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize("arm", ["told teacher", "critic", "DPPO", "KPop"])
def test_an_arm_trains(arm: str, planned: dict[str, Planned]) -> None:
    run = train(override(planned[arm].config, SMALL))
    assert [row["step"] for row in run.metrics if "trainer/grad_norm" in row] == [1, 2]
