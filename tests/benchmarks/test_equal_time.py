"""The comparison after equal time takes each arm at the step that its cost allows."""

import json
from pathlib import Path

import pytest

from benchmarks import equal_time
from tests.support.fake_comparison import comparison, study_plan
from unstale.analysis.report.study import StudyResults, read_results
from unstale.config import ConfigError


@pytest.fixture(autouse=True)
def single_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_time, "WINDOW", 1)


def test_an_arm_that_costs_more_is_compared_at_an_earlier_step(tmp_path: Path) -> None:
    # Success after 0, 1, ... 4 steps. In the time of 4 steps `snapshot_old`, at 1.34, does 2.
    comparison(
        tmp_path / "int4-s2",
        {
            "snapshot_old": [
                {"evaluations": (0.0, 0.1, 0.2, 0.5, 0.8)},
                {"evaluations": (0.0, 0.1, 0.3, 0.5, 0.7)},
            ],
            "rollout": [
                {"evaluations": (0.0, 0.1, 0.2, 0.4, 0.6)},
                {"evaluations": (0.0, 0.1, 0.2, 0.4, 0.6)},
            ],
        },
    )
    study_plan(tmp_path, {"int4-s2": {"engine": "int4", "bound": "s2"}})
    study = read_results(tmp_path)
    assert equal_time.pairs(study, "rollout", 4, 4) == pytest.approx([-0.2, -0.1])
    assert equal_time.pairs(study, "rollout", 4, 2) == pytest.approx([0.4, 0.3])
    head, _, cheap, dear = equal_time.table(study, {"snapshot_old": 1.34, "rollout": 1.0})
    assert "minus snapshot_old after 4 steps" in head
    # mean and half width: 12.7062 (Student's t, 1 degree of freedom) * 7.0711 / sqrt(2) = 63.5
    assert cheap == "| `rollout` | 1.00 | 4 | -15.0 (-78.5 to +48.5) | +35.0 (-28.5 to +98.5) |"
    assert dear == "| `snapshot_old` | 1.34 | 2 | — | — |"


def test_a_run_without_success_up_to_a_step_is_refused(tmp_path: Path) -> None:
    study = one_run(tmp_path)
    (arm,) = study.settings[0].comparison.arms
    with pytest.raises(ConfigError, match="seed0: no success in the 1 steps up to step 7"):
        equal_time.success_up_to(arm.finished[0], 7)


def test_a_success_is_the_mean_of_the_last_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equal_time, "WINDOW", 2)
    comparison(tmp_path / "int4-s2", {"snapshot_old": [{"evaluations": (0.9, 0.1, 0.2, 0.4)}]})
    study_plan(tmp_path, {"int4-s2": {"engine": "int4", "bound": "s2"}})
    (arm,) = read_results(tmp_path).settings[0].comparison.arms
    found = [equal_time.success_up_to(arm.finished[0], step) for step in (1, 2, 3)]
    assert found == pytest.approx([0.1, 0.15, 0.3])


def test_a_learning_rate_that_changes_is_refused(tmp_path: Path) -> None:
    one_run(tmp_path)
    file = tmp_path / "int4-s2" / "snapshot_old-seed0" / "config.json"
    config = json.loads(file.read_text())
    config["trainer"]["lr_schedule"] = "linear"
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"seed0: trainer\.lr_schedule is linear"):
        list(equal_time.table(read_results(tmp_path), {"snapshot_old": 1.0}))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["snapshot_old"], "--step snapshot_old: not of the form ARM=TIME"),
        (["snapshot_old=1", "eager=1.1"], "--step eager=1.1: the study has the arms snapshot_old"),
        (["snapshot_old=1.1"], "the smallest time is 1.1; divide all by it"),
        ([], "the reference snapshot_old has no time"),
    ],
)
def test_times_that_cannot_be_right_are_refused(
    tmp_path: Path, words: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        equal_time.step_times(words, one_run(tmp_path))


def test_arms_without_a_time_are_named(tmp_path: Path) -> None:
    comparison(
        tmp_path / "int4-s2",
        {
            "snapshot_old": [{"evaluations": (0.0, 0.1)}],
            "rollout": [{"evaluations": (0.0, 0.1)}],
        },
    )
    study_plan(tmp_path, {"int4-s2": {"engine": "int4", "bound": "s2"}})
    *_, last = equal_time.table(read_results(tmp_path), {"snapshot_old": 1.0})
    assert last == "Without a time of a step, so not in the table: `rollout`."


def one_run(folder: Path) -> StudyResults:
    comparison(folder / "int4-s2", {"snapshot_old": [{"evaluations": (0.0, 0.1)}]})
    study_plan(folder, {"int4-s2": {"engine": "int4", "bound": "s2"}})
    return read_results(folder)
