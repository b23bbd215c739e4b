"""Test the checks of training health.

- Every sign that a run cannot learn is found, with its first step, the number of steps and what to
  do. A run that learns has no finding.
- Signs that a small batch may show by chance count after three steps in a row.
- A check holds only if enough steps had the metrics that it needs. A run whose first steps had no
  advantage is not called sound, and neither is one with failed episodes.
- A finding is an event and a line in the display, once, also across a resume.
- The report lists all checks, each with its finding. Held-out success that did not rise is not
  called better.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_run import NoDisplay, fake_metrics, fake_run
from unstale.analysis.dashboard.frozen import freeze, write_and_summarize, write_and_warn
from unstale.durability.run_folder import RunFolder, RunLog, dumps
from unstale.observe.health import CHECKS, examine
from unstale.observe.recorder import Outputs, Recorder
from unstale.observe.trackers import RunOutcome
from unstale.records import Failure, Task

HEALTHY = {
    "trainer/tokens_with_gradient": 100.0,
    "trainer/grad_norm": 0.1,
    "reward/mean": 0.5,
    "reward/std": 0.5,
    "reward/missing_share": 0.0,
    "policy/entropy_mean": 0.8,
    "correction/kept_share": 0.99,
    "completion/truncated_share": 0.5,
    "trainer/moved_weight_share": 0.015,
    "trainer/due_weight_share": 0.02,
}
SIGNS = {
    "no_advantage": ({"trainer/tokens_with_gradient": 0.0}, 3, "schedule.group_size"),
    "constant_rewards": ({"reward/std": 0.0, "reward/mean": 0.25}, 3, "every reward was 0.25"),
    "missing_rewards": ({"reward/missing_share": 0.25}, 1, "25% of the episodes"),
    "faint_gradient": ({"trainer/grad_norm": 1e-24}, 3, "Scale the rewards"),
    "lost_updates": (
        {"trainer/moved_weight_share": 0.004, "trainer/due_weight_share": 0.02},
        3,
        "0.4% of the weights changed, and 2% should have",
    ),
    "entropy_collapse": ({"policy/entropy_mean": 0.05}, 3, "0.05 nats"),
    "kept_share": ({"correction/kept_share": 0.49}, 1, "kept 49% of the tokens"),
    "all_truncated": ({"completion/truncated_share": 1.0}, 1, "engine.max_completion_tokens"),
    "invalid_formats": ({"completion/invalid_format_share": 0.75}, 3, "endpoint.format_retries"),
}


def rows(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"step": step, **HEALTHY, **change} for step, change in enumerate(changes, start=1)]


@dataclass
class Notes(NoDisplay):
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.parametrize("name", SIGNS)
def test_each_sign_is_found_with_its_steps_and_what_to_do(name: str) -> None:
    sign, in_a_row, says = SIGNS[name]
    health = examine(rows({}, {}, {}, *[sign] * (in_a_row + 1), {}, sign))
    (found,) = health.findings.values()
    assert (found.name, found.step, found.steps) == (name, 4, in_a_row + 2)
    assert says in found.text


def test_there_is_a_test_of_every_check() -> None:
    assert [check.name for check in CHECKS] == list(SIGNS)


@pytest.mark.parametrize(
    "name", ["no_advantage", "constant_rewards", "faint_gradient", "entropy_collapse"]
)
def test_a_sign_in_two_steps_in_a_row_is_no_finding(name: str) -> None:
    sign = SIGNS[name][0]
    assert not examine(rows({}, {}, {}, sign, sign, {}, sign, sign)).findings


def test_a_policy_without_entropy_from_the_start_is_found() -> None:
    assert "entropy_collapse" in examine(rows(*[{"policy/entropy_mean": 1e-4}] * 3)).findings


def test_a_run_that_learns_and_one_without_metrics_have_no_finding() -> None:
    rng = random.Random(0)
    learning = [{"step": step, **fake_metrics(step, 80, rng)} for step in range(1, 81)]
    assert not examine(learning).findings
    assert not examine([{"step": step} for step in range(9)]).findings
    assert not examine([{"step": 0, "completion/truncated_share": 1.0}]).findings


UNIFORM = SIGNS["no_advantage"][0] | SIGNS["constant_rewards"][0]


def test_a_check_holds_only_after_enough_steps_with_its_metrics() -> None:
    def passed(*changes: dict[str, Any]) -> dict[str, bool | None]:
        health = examine(rows(*changes))
        return {check.name: health.passed(check) for check in CHECKS}

    two = passed(UNIFORM, UNIFORM)
    assert [name for name in two if two[name]] == ["missing_rewards", "kept_share", "all_truncated"]
    assert two["no_advantage"] is False and two["constant_rewards"] is None
    assert passed({}, {}, {})["entropy_collapse"] is None  # they only give the first entropy
    assert passed(*[UNIFORM] * 16)["faint_gradient"] is None
    invalid = {"completion/invalid_format_share": 0.0}
    assert all(passed(*[invalid] * 6).values()) and not passed(*[{}] * 6)["invalid_formats"]


def test_a_run_without_an_advantage_so_far_learned_nothing_from_its_first_step_on() -> None:
    health = examine(rows(UNIFORM))
    assert (found := health.findings["no_advantage"]).step == 1
    assert "nothing was learned" in found.text and health.update(rows({}, UNIFORM)[1]) == []
    assert health.findings["no_advantage"].steps == 2
    health.update(rows({}, {}, {})[2])  # the first two were chance
    assert not health.findings and examine(rows(UNIFORM, {}, UNIFORM, UNIFORM)).findings == {}
    (found,) = examine(rows({}, *[SIGNS["no_advantage"][0]] * 3)).findings.values()
    assert (found.step, found.steps) == (2, 3)


def test_the_first_step_without_an_advantage_is_a_warning_at_once(tmp_path: Path) -> None:
    display = Notes()
    with RunLog.create(tmp_path, {}) as log:
        recorder = Recorder(Outputs(log, display))
        recorder.write(1, HEALTHY | UNIFORM)
        recorder.write(2, HEALTHY | UNIFORM)
    (note,) = display.notes
    assert note.startswith("warning: since step 1, no token had an advantage, so nothing was")
    assert "Warning, in 2 of 2 steps: no token had an advantage" in write_and_summarize(tmp_path)


def test_failed_episodes_are_a_warning_with_the_most_frequent_error(tmp_path: Path) -> None:
    with RunLog.create(tmp_path, {}) as log:
        recorder = Recorder(Outputs(log, NoDisplay()))
        recorder.write(1, HEALTHY)
        assert not write_and_warn(tmp_path)[1]
        for index, error in enumerate(
            ("OSError: gone", "ValueError: row 3\nof 7", "ValueError: row 3\n")
        ):
            failure = Failure(Task("rows", "train", index % 2), stage="reward", error=error)
            recorder.failure(index, failure, final=True)
    said = "3 episodes of 2 tasks failed, most often with: ValueError: row 3"
    assert write_and_warn(tmp_path)[1] == [f"Warning: {said}"]
    assert f"Warning: {said}" in write_and_summarize(tmp_path).splitlines()


def test_a_finding_is_an_event_and_a_line_once_also_after_a_resume(tmp_path: Path) -> None:
    log = RunLog.create(tmp_path, {})
    bad = HEALTHY | SIGNS["constant_rewards"][0]
    shown: list[str] = []
    for steps in (range(1, 3), range(3, 5), range(5, 7)):
        display = Notes()
        recorder = Recorder(Outputs(log, display))
        for step in steps:
            recorder.write(step, bad)
        recorder.close(RunOutcome("finished"))
        log.close()
        shown += display.notes
    assert [note.split(". ")[0] for note in shown] == [
        "warning: since step 1, every reward was 0.25"
    ]
    events = [row for row in RunFolder(tmp_path).rows("events.jsonl") if row["kind"] == "health"]
    assert [(event["step"], event["check"]) for event in events] == [(1, "constant_rewards")]


def test_the_report_lists_the_checks(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", steps=20)
    found = freeze(folder)["run"]
    assert [check["title"] for check in found["checks"]] == [check.title for check in CHECKS]
    assert not any(check["text"] for check in found["checks"]) and found["outcome"]["better"]
    (folder / "metrics.jsonl").write_text(
        "".join(dumps(row) + "\n" for row in rows({}, *[SIGNS["all_truncated"][0]] * 5))
    )
    (wrong,) = (check for check in freeze(folder)["run"]["checks"] if check["text"])
    assert (wrong["name"], wrong["step"], wrong["steps"]) == ("all_truncated", 2, 5)
    assert "a limit ended every episode" in wrong["text"]


def test_success_that_did_not_rise_is_not_better(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", steps=6)
    events = [row for row in RunFolder(folder).rows("events.jsonl") if row["kind"] != "eval"]
    events += [{"kind": "eval", "step": step, "success": 0.0, "tasks": 9} for step in (0, 6)]
    (folder / "events.jsonl").write_text("".join(dumps(row) + "\n" for row in events))
    assert not freeze(folder)["run"]["outcome"]["better"]
