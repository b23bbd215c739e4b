"""Promises: planned differences of a study are corrected for their number by Holm's method, and
their intervals hold together; the power of a test is that of the noncentral t distribution; the
Markdown tables and the JSON have every setting, arm and measure."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.support.fake_comparison import comparison, study_plan
from unstale.analysis.report.study import Difference, read_results
from unstale.analysis.report.study_tables import write_tables
from unstale.cli import main
from unstale.observe.statistics import PairedDifference, holm, paired_difference

GAINS = {  # held-out success of an arm less that of the reference, by seed
    ("narrow", "rollout"): (-0.10, -0.12, -0.09, -0.11, -0.08),
    ("narrow", "average"): (0.02, -0.03, 0.01, -0.02, 0.00),
    ("middle", "rollout"): (0.05, -0.01, 0.03, -0.02, 0.01),
    ("wide", "rollout"): (0.01, 0.02, 0.00, -0.01, 0.04),
}


def p_of_4(t: float) -> float:
    """The two-sided p-value of Student's t with 4 degrees of freedom, in closed form."""
    square = t * t / (1 + t * t / 4)
    return 1 - 2 * (3 / 8 * math.sqrt(square) * (1 - square / 12))


def power(shift: float, critical: float, freedom: int) -> float:
    """P(T > critical) for a noncentral t, by summation over the chi distribution of its spread."""
    s = np.linspace(1e-6, 4, 40_001)
    log_density = (
        (freedom - 1) * np.log(s) - freedom * s * s / 2 + freedom / 2 * math.log(freedom / 2)
    )
    weight = np.exp(log_density - math.lgamma(freedom / 2)) * 2 * (s[1] - s[0])
    above = [0.5 * math.erfc((critical * each - shift) / math.sqrt(2)) for each in s]
    return float((weight * np.array(above)).sum())


def test_a_paired_difference_has_the_p_value_and_interval_of_students_t() -> None:
    found = paired_difference([-0.10, -0.12, -0.09, -0.11, -0.08])
    assert found and found.mean == pytest.approx(-0.10) and found.sd == pytest.approx(0.0158114)
    assert found.p == pytest.approx(p_of_4(math.sqrt(200)), rel=1e-6)  # t = 0.1 / 0.00707107
    assert found.interval(0.05) == pytest.approx((-0.119632, -0.080368), abs=1e-6)
    # the 99.375% quantile of t with 4 degrees of freedom, for four differences together
    assert p_of_4(4.3147) == pytest.approx(0.0125, abs=1e-5)
    assert found.interval(0.05 / 4) == pytest.approx((-0.130510, -0.069490), abs=1e-5)
    assert paired_difference([0.1]) is None
    assert paired_difference([0.05, 0.05]) is None, "the spread is unknown"


def test_power_is_that_of_the_noncentral_t_distribution() -> None:
    # half a standard deviation needs 34 pairs, a value that power tables print
    assert PairedDifference(5, 0.0, 1.0).pairs_needed(0.5, 0.05) == 34
    five = PairedDifference(5, 0.0, 0.1)
    for alpha, critical in ((0.05, 2.776445), (0.0125, 4.3147)):
        shift = five.detectable(alpha) * math.sqrt(5) / 0.1
        assert power(shift, critical, 4) == pytest.approx(0.8, abs=1e-4)


def test_holm_adjusts_for_the_number_of_planned_tests() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005], 4) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    # 14 were planned: 14 * 0.005, 13 * 0.01, 12 * 0.03, 11 * 0.04
    assert holm([0.01, 0.04, 0.03, 0.005], 14) == pytest.approx([0.13, 0.44, 0.36, 0.07])
    assert holm([0.5, 0.9], 3) == [1.0, 1.0]


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A study of three settings, finished but for one arm, and of one that has not begun."""
    for setting, position in (("narrow", 0.3), ("middle", 0.6), ("wide", 0.9)):
        gains = {"snapshot_old": [0.0] * 5}
        gains |= {arm: gain for (name, arm), gain in GAINS.items() if name == setting}
        comparison(
            tmp_path / setting,
            {
                arm: [
                    {"evaluations": (0.4, 0.6, 0.7 + gain), "kept": position}
                    for gain in of_seeds[:5]
                ]
                for arm, of_seeds in gains.items()
            },
        )
    names = ("narrow", "middle", "wide", "none")
    study_plan(
        tmp_path,
        {name: {"band": name, "bound": "s6"} for name in names},
        planned=[(name, "rollout") for name in names],
        commands=["unstale compare bands.toml"],
    )
    return tmp_path


def by_name(folder: Path) -> dict[tuple[str, str], Difference]:
    return {(each.setting, each.arm): each for each in read_results(folder).at("steps")}


def test_planned_differences_are_corrected_and_others_are_exploratory(study: Path) -> None:
    assert read_results(study).num_planned == 4  # that of the setting without runs counts
    found = by_name(study)
    narrow = found["narrow", "rollout"]
    assert narrow.planned and narrow.significant and narrow.detectable is None
    assert narrow.p == pytest.approx(4 * p_of_4(math.sqrt(200)), rel=1e-6)
    assert narrow.interval == pytest.approx((-0.130510, -0.069490), abs=1e-5)
    wide = found["wide", "rollout"]  # mean 0.012, sd 0.0192354: the second smallest p-value
    assert wide.p == pytest.approx(3 * p_of_4(0.012 / 0.0192354 * math.sqrt(5)), rel=1e-4)
    assert wide.paired and wide.detectable == wide.paired.detectable(0.0125)
    assert wide.seeds_needed == wide.paired.pairs_needed(0.05, 0.0125)
    other = found["narrow", "average"]
    assert not other.planned and other.alpha == 0.05
    assert other.p == pytest.approx(p_of_4(0.004 / 0.0207364 * math.sqrt(5)), rel=1e-4)
    assert found["narrow", "snapshot_old"].p is None
    (study / "plan.json").unlink()  # all differences of the folder then count as planned
    assert by_name(study)["narrow", "average"].planned
    assert read_results(study).num_planned == 4


@pytest.mark.costly
def test_pairs_of_all_settings_give_one_difference_of_an_arm(study: Path) -> None:
    (rollout,) = read_results(study).pooled("steps")
    assert rollout.arm == "rollout", "`average` has pairs in one setting alone"
    assert rollout.settings == ("narrow", "middle", "wide")
    pairs = np.array(
        [gain for (_, arm), gains in GAINS.items() if arm == "rollout" for gain in gains]
    )
    assert rollout.paired.n == 15 and rollout.paired.mean == pytest.approx(pairs.mean())
    error = pairs.std(ddof=1) / math.sqrt(15)
    low, high = rollout.paired.interval(0.05)  # the 97.5% quantile of t with 14 degrees of freedom
    assert (high - low) / 2 == pytest.approx(2.144787 * error, rel=1e-5)
    write_tables(study)
    row = (
        f"| rollout | 3 | 15 | {100 * pairs.mean():+.1f} ({100 * low:+.1f} to {100 * high:+.1f}) |"
    )
    assert row in (study / "study.md").read_text()


@pytest.mark.costly
def test_results_have_every_measure(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main.main(["compare", "--report", str(study), "--json"])
    assert end.value.code == 0
    data = json.loads(capsys.readouterr().out)
    assert data["planned"] == 4 and len(data["differences"]) == 3 * 7
    tables = (study / "study.md").read_text()
    assert (
        "| narrow | rollout | 5 | 60.0% (58.0% to 62.0%) | -10.0 (-13.1 to -6.9) | < 0.001 | — |"
        in tables
    )
    middle = by_name(study)["middle", "rollout"]
    assert f"| {100 * middle.detectable:.1f} ({middle.seeds_needed} pairs) |" in tables
    assert "1 of 4 planned differences are significant" in tables
    assert "1 of the study's 4 settings have no runs yet." in tables
    for heading in ("## At equal steps", "## At equal tokens", "## At equal wall-clock"):
        assert heading in tables
    assert (study / "narrow" / "compare.md").exists()
    assert write_tables(study / "narrow").name == "compare.md"
