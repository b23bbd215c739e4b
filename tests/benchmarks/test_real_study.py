"""The study on a pretrained model: every arm is accepted and trains, and its power is computed."""

from pathlib import Path
from typing import Any

import pytest
from scipy.stats import nct, t

from benchmarks.power import pilot_spreads, table
from benchmarks.sums import HELD_OUT, LARGEST, Sums
from tests.support.fake_comparison import comparison, study_plan
from tests.support.tiny_runs import save_tiny
from unstale.cli import main
from unstale.cli.session import train
from unstale.config.options import override
from unstale.research import study
from unstale.research.compare import Planned

FILE = Path(__file__).parents[2] / "benchmarks" / "studies" / "real.toml"
SMALL: dict[str, Any] = {
    "max_steps": 2,
    "schedule.groups_per_step": 2,
    "schedule.group_size": 2,
    "eval.tasks": 2,
    "eval.interval": 2,
    "checkpoint.interval": 2,
    "engine.max_running": 16,
    "trainer.warmup_steps": 0,
}
"""Options with which a run of an arm takes a second."""


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Planned]:
    """Return the first run of each arm in each setting, with a tiny policy."""
    folder = tmp_path_factory.mktemp("study")
    save_tiny(folder / "tiny", bitwise=True)
    words = [str(FILE), "--model", str(folder / "tiny"), "--seeds", "1"]
    plan = study.planned(main.parse(["compare", *words, "--runs", str(folder / "runs")]))
    return {(each.folder.name, run.arm): run for each in plan.comparisons for run in each.runs}


def test_each_setting_has_its_bound_and_its_minibatches(
    planned: dict[tuple[str, str], Planned],
) -> None:
    assert {setting for setting, _ in planned} == {"s8-m1", "s8-m4", "s2-m1", "s2-m4"}
    for (setting, _), run in planned.items():
        bound, minibatches = setting.split("-")
        assert bound == f"s{run.config.schedule.max_staleness}"
        assert minibatches == f"m{run.config.trainer.minibatches_per_batch}"
    arms = {"snapshot_old", "rollout", "current_recompute", "zero D"}
    assert {arm for setting, arm in planned if setting == "s8-m1"} > arms
    assert {arm for setting, arm in planned if setting == "s2-m4"} == arms


@pytest.mark.costly(cases=0)
@pytest.mark.parametrize(
    "arm", ["zero D", "rollout truncated", "AReaL loglinear", "ppo_ewma_async"]
)
def test_an_arm_trains(arm: str, planned: dict[tuple[str, str], Planned]) -> None:
    run = train(override(planned["s8-m1", arm].config, SMALL))
    assert [row["step"] for row in run.metrics if "trainer/grad_norm" in row] == [1, 2]


def test_all_sums_are_asked_once_and_no_held_out_one_is_trained_on() -> None:
    listed = Sums().data.values()
    train_sums, held_out = ({(each["first"], each["second"]) for each in part} for part in listed)
    assert not train_sums & held_out and len(held_out) == HELD_OUT
    assert len(train_sums) + len(held_out) == LARGEST**2


def test_the_power_is_that_of_the_noncentral_t_distribution() -> None:
    _, _, line = table({"pilot": 0.15}, [12], 3)
    name, sd, found, needed = (cell.strip() for cell in line.strip("|").split("|"))
    assert (name, sd) == ("pilot", "15.0")

    def power(true: float, pairs: int) -> float:
        limit = t.isf(0.05 / 3 / 2, pairs - 1)
        return float(nct.sf(limit, pairs - 1, true / 0.15 * pairs**0.5))

    assert power(int(found) / 100 - 0.005, 12) < 0.8 < power(int(found) / 100 + 0.005, 12)
    assert power(0.05, int(needed) - 1) < 0.8 <= power(0.05, int(needed))


def test_the_spread_is_that_of_differences_with_the_same_seed(tmp_path: Path) -> None:
    success = {"snapshot_old": (0.5, 0.6, 0.7), "rollout": (0.4, 0.4, 0.7)}
    finals = {arm: [{"evaluations": (0.1, each)} for each in s] for arm, s in success.items()}
    comparison(tmp_path / "s8-m1", finals)
    study_plan(tmp_path, {"s8-m1": {"bound": "s8", "minibatches": "m1"}})
    assert pilot_spreads(tmp_path) == {"s8-m1, rollout": pytest.approx(0.1)}
