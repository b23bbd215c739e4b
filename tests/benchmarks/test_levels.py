"""The tables of routes by engine and bound have the means and differences of the runs."""

from pathlib import Path

import pytest

from benchmarks.levels import differences, successes
from tests.support.fake_comparison import comparison, study_plan
from unstale.analysis.report.study import StudyResults, read_results

FINAL = {  # setting -> arm -> held-out success by seed
    "fp8-s2": {"snapshot_old": (0.50, 0.60, 0.70), "rollout": (0.40, 0.56, 0.60)},
    "fp8-s6": {"snapshot_old": (0.02, 0.30, 0.04), "rollout": (0.10, 0.20, 0.00)},
    "int4-s6": {"snapshot_old": (0.80, 0.80, 0.80)},
}


@pytest.fixture
def study(tmp_path: Path) -> StudyResults:
    for setting, arms in FINAL.items():
        comparison(
            tmp_path / setting,
            {
                arm: [{"evaluations": (0.4, final)} for final in success]
                for arm, success in arms.items()
            },
        )
    dials = ("engine", "bound")
    study_plan(tmp_path, {name: dict(zip(dials, name.split("-"), strict=True)) for name in FINAL})
    return read_results(tmp_path)


def test_a_setting_has_the_mean_of_each_arm_with_an_interval(study: StudyResults) -> None:
    _, _, first, second, third = successes(study)
    # half of the interval: 4.3027 (Student's t, 2 degrees of freedom) * 0.1 / sqrt(3) = 0.248
    assert first.startswith("| fp8-s2 | 60% (35% to 85%) |")
    assert second.startswith("| fp8-s6 | 12% (0% to 51%) |"), "cut at 0%"
    assert third == "| int4-s6 | 80% | — |", "equal values have no interval"


def test_differences_are_means_over_the_pairs_of_all_settings(study: StudyResults) -> None:
    # fp8: -10, -4, -10, +8, -10 and -4 points: mean -5, standard deviation 7.0143, and
    # 2.5706 (5 degrees of freedom) * 7.0143 / sqrt(6) = 7.4
    assert differences(study, "engine")[2:] == [
        "| fp8 | -5.0 (-12.4 to +2.4), 6 pairs |",
        "| int4 | — |",
    ]
    # s2: -10, -4, -10: mean -8, 4.3027 * 3.4641 / sqrt(3) = 8.6
    assert differences(study, "bound")[2] == "| s2 | -8.0 (-16.6 to +0.6), 3 pairs |"
