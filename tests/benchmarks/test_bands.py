"""The tables of tight limits have the kept shares, the differences and the resets of the runs."""

from pathlib import Path

import pytest

from benchmarks.bands import kept_shares, over_all, reset_table, resets, with_limits
from tests.support.fake_comparison import comparison, study_plan
from unstale.analysis.report.compare import KEPT
from unstale.analysis.report.study import StudyResults, read_results
from unstale.durability.run_folder import EVENTS, dumps

SETTINGS = {  # setting -> arm -> (held-out success, kept share) by seed
    "bfloat16-seq2": {
        "snapshot_old": ((0.50, 0.9), (0.60, 0.7)),
        "rollout": ((0.40, 1.0), (0.56, 1.0)),
    },
    "bfloat16-seq4": {
        "snapshot_old": ((0.50, 0.9), (0.60, 0.9)),
        "rollout": ((0.60, 1.0), (0.60, 1.0)),
    },
    "bfloat16-seq5": {
        "snapshot_old": ((0.50, 0.9), (0.60, 0.9)),
        "average": ((0.40, 0.2), (0.44, 0.4)),
    },
}


@pytest.fixture
def study(tmp_path: Path) -> StudyResults:
    for setting, arms in SETTINGS.items():
        comparison(
            tmp_path / setting,
            {
                arm: [{"evaluations": (0.3, 0.35, final), "kept": share} for final, share in found]
                for arm, found in arms.items()
            },
        )
    dials = ("engine", "limits")
    study_plan(
        tmp_path, {name: dict(zip(dials, name.split("-"), strict=True)) for name in SETTINGS}
    )
    return read_results(tmp_path)


def test_the_kept_share_is_that_of_the_arm(study: StudyResults) -> None:
    rows = kept_shares(with_limits(study, ("seq2", "seq4")))
    assert rows[0] == "| setting | snapshot_old | rollout |"
    # of 0.9 and 0.7: 12.7062 (Student's t, 1 degree of freedom) * 0.1414 / sqrt(2) = 1.27, cut
    assert rows[2] == "| bfloat16-seq2 | 80% (0% to 100%) | 100% |"
    (first, _) = study.settings[0].comparison.arms[0].finished
    assert first.mean(KEPT) == pytest.approx(0.9)


def test_the_difference_over_all_has_the_chosen_settings_alone(study: StudyResults) -> None:
    # -10, -4, +10 and 0 points: mean -1, standard deviation 8.4063, and
    # 3.1824 (3 degrees of freedom) * 8.4063 / 2 = 13.4
    assert over_all(with_limits(study, ("seq2", "seq4"))) == [
        "- rollout, over all 2 settings: -1.0 (-14.4 to +12.4), 4 pairs"
    ]


def test_resets_are_counted_and_act_in_the_step_after_their_version(
    study: StudyResults, tmp_path: Path
) -> None:
    folder = tmp_path / "bfloat16-seq5"
    with (folder / "average-seed1" / EVENTS).open("a") as file:
        for version in (0, 1):
            file.write(dumps({"kind": "ewma_reset", "version": version, "reason": "low"}) + "\n")
    assert resets(folder / "average-seed1") == [1, 2]
    rows = reset_table(read_results(tmp_path).settings[2].comparison)
    assert rows[-1].startswith("| average | 42% (17% to 67%) | 30% (0% to 100%) ") and rows[
        -1
    ].endswith("| 0, 2 |")
