"""What is promised of the page of a run, of the audit and of the comparison of two runs.

- Every metric of docs/metrics.md that has a plot has a sentence on good and bad curves.
- The timeline has a lane for each engine, and stays bounded and complete when it is dense.
- Each engine's last state is shown, and the staleness by place in the episode is counted exactly.
- An audit is turned into verdicts; one that is damaged or too large is a sentence.
- Two runs are compared on the groups that both finished, and their curves over steps, seconds or
  sampled tokens.
- In Chromium, the pages are complete and readable, and the timeline is moved by wheel and keys.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.analysis.test_dashboard import STATIC, served
from tests.analysis.test_dashboard_browser import CONTRAST, NAMELESS, see_all
from tests.analysis.test_dashboard_browser import PAGES as TRIED
from tests.analysis.test_dashboard_index import fill, table_of
from tests.analysis.test_report import audit_it
from tests.support.chromium import NO_BROWSER, browser_program, dashboard_page
from tests.support.fake_run import NoDisplay, fake_config, fake_run
from unstale.analysis.dashboard import ages, audits, axes, charts, details, pairs, summary, timeline
from unstale.analysis.dashboard.index import RunIndex
from unstale.analysis.dashboard.table import BadQuestion
from unstale.analysis.report.audited import COLUMNS, cells
from unstale.config.options import override
from unstale.durability.journal import JOURNAL, Journal
from unstale.durability.journal.survivors import contrast
from unstale.durability.run_folder import EVENTS, METRICS, RunFolder, RunLog
from unstale.observe.recorder import Outputs, Recorder
from unstale.observe.survivors import survivorship


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return audit_it(fake_run(tmp_path_factory.mktemp("runs") / "first", steps=6))


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "runs" / "first"))


@pytest.fixture
def index(run: Path, tmp_path: Path) -> Iterator[RunIndex]:
    found = RunIndex(run, tmp_path / "index.sqlite")
    yield found
    found.close()


def add_row(run: Path, **values: Any) -> None:
    with (run / METRICS).open("a") as file:
        file.write(json.dumps(values) + "\n")


def add_event(run: Path, **values: Any) -> None:
    with (run / EVENTS).open("a") as file:
        file.write(json.dumps(values) + "\n")


def test_every_plot_says_what_good_and_bad_look_like() -> None:
    for section in charts.SECTIONS:
        for chart in section.charts:
            assert chart.reading.startswith("Good: ") and " Bad: " in chart.reading, chart.title


def test_engines_and_rewards_have_one_plot_for_all_their_lines() -> None:
    names = [f"engine_{number}/{name}" for number in (0, 1) for name in ("up", "busy_share")]
    names += ["reward/task_mean", "reward/format_mean", "reward/mean", "engine_0/odd/name"]
    found = {section["name"]: section["charts"] for section in charts.sections(names)}
    (engines,) = found["engines"]
    assert engines["title"] == "Busy, by engine"
    assert [line["name"] for line in engines["lines"]] == ["engine 0", "engine 1"]
    (rewards,) = found["rewards"]
    assert [line["name"] for line in rewards["lines"]] == ["format", "task"]
    assert not any(name.startswith("other-") for name in found)


def test_tokens_are_counted_by_their_place_in_the_episode() -> None:
    """Of 3 tokens, the tenths 0, 3 and 6 have one each; context takes place but is not counted."""
    assert ages.count_ages([(1, None), (1, 4), (1, 5)], 6) == {(3, 2): 1, (6, 1): 1}
    assert ages.count_ages([(20, 2)], 2) == {(tenth, 0): 2 for tenth in range(10)}
    assert ages.count_ages([], 2) == {}


def test_the_ages_of_a_run_add_up_to_its_trained_tokens(index: RunIndex, run: Path) -> None:
    fill(index)
    found = details.ages(index.database)
    with Journal.read(run) as journal:
        versions = {row.number: row.version for row in journal.groups()}
        expected: dict[int, int] = {}
        for number, version in versions.items():
            for count, own in journal.rows(
                "SELECT num_tokens, version FROM pieces JOIN episodes USING (episode) "
                "WHERE number = ? AND version IS NOT NULL",
                number,
            ):
                expected[version - own] = expected.get(version - own, 0) + count
    assert sum(each["tokens"] for each in found) == sum(expected.values()) > 0
    assert max(each["max"] for each in found) == max(expected)
    total = sum(each["mean"] * each["tokens"] for each in found)
    assert total == pytest.approx(sum(lag * count for lag, count in expected.items()))


def test_each_engine_has_its_last_state_and_all_its_restarts(index: RunIndex, run: Path) -> None:
    for step, version in ((7, 6), (8, 7)):
        add_row(
            run,
            step=step,
            time_s=100 * step,
            **{
                "engine_0/version": version,
                "engine_0/busy_share": 0.5,
                "engine_0/restarts": 1,
                "engine_1/version": 5,
                "engine_1/busy_share": 0.25,
            },
        )
    add_event(run, time=705.0, kind="engine_lost", engine=0, cause="out of memory")
    fill(index)
    first, second = details.engines(index.database)
    assert first == {
        "engine": 0,
        "version": 7,
        "busy_share": 0.5,
        "restarts": 2,
        "lost": 1,
        "cause": "out of memory",
    }
    assert second["version"] == 5 and "lost" not in second
    found = timeline.spans(index.database, 700, 800)
    engines = [level for level in found["levels"] if level[0].startswith("engine")]
    assert engines == []  # no activity was recorded as late as these steps
    add_event(run, time=801.0, kind="span", lane="publish", start=790, end=800, label="version 8")
    fill(index)
    found = timeline.spans(index.database, 700, 800)
    assert [level for level in found["levels"] if level[0].startswith("engine")] == [
        ["engine 0", 700.0, 800.0, 0.5, "step 8: busy 50%"],
        ["engine 1", 700.0, 800.0, 0.25, "step 8: busy 25%"],
    ]
    assert found["marks"] == [[800.0, "version 8"]] and found["steps"] == [700.0, 800.0]


def test_a_dense_timeline_keeps_all_of_the_time(
    index: RunIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part of a lane has the share of its time that is covered, so nothing disappears."""
    fill(index)
    monkeypatch.setattr(timeline, "PARTS", 7)
    exact = timeline.spans(index.database, 20, 60)
    dense = timeline.spans(index.database, 20, 60, limit=3)
    assert dense["spans"] == [] and dense["inside"] == len(exact["spans"]) > 3
    assert dense["left_out"] == 0
    end = min(60, exact["last"])
    for lane, shares in dense["parts"]:
        seconds = sum(
            min(stop, end) - max(start, 20)
            for name, start, stop, _ in exact["spans"]
            if name == lane
        )
        assert sum(shares) * (end - 20) / 7 == pytest.approx(seconds, abs=0.05), lane


def test_the_shares_of_time_are_those_of_the_report(index: RunIndex) -> None:
    fill(index)
    trainer, engine = timeline.shares(index.database)
    assert trainer["name"] == "trainer" and engine["name"] == "engine"
    for bar in (trainer, engine):
        assert sum(share for *_, share in bar["parts"]) == pytest.approx(1.0, abs=0.01)
    assert [name for name, *_ in trainer["parts"]][:3] == ["trainer waits", "scoring", "training"]


@pytest.mark.parametrize("ratio", ["D", "S"])
def test_sizes_by_lag_are_weighted_by_the_tokens_that_were_measured(
    index: RunIndex, run: Path, ratio: str
) -> None:
    """Runs from before their numbers were recorded are weighted by all tokens of a lag."""
    name = {"D": "correction/log_d", "S": "objective/log_s"}[ratio]
    for step, tokens, measured, size in ((7, 100, 90, 0.5), (8, 300, 10, 0.1)):
        row = {
            f"{name}_abs_mean/lag_8": size,
            f"{name}_abs_mean/lag_9": size,
            f"{name}_tokens/lag_9": measured,
            "schedule/staleness_histogram": {"8": tokens, "9": tokens},
        }
        add_row(run, step=step, **row)
    fill(index)
    found = dict(details.size_by_lag(index.database, ratio))
    assert found[8] == pytest.approx(0.2) and {0, 1, 2} < found.keys()
    assert found[9] == pytest.approx((90 * 0.5 + 10 * 0.1) / 100)


def test_options_of_routes_and_techniques_are_marked_if_they_are_not_the_default(
    tmp_path: Path,
) -> None:
    values = {"techniques": "ess_lr", "ess_lr.base": 0.75, "old_logps.beta": 0.625}
    config = override(fake_config("ewma_prox"), values)
    RunLog.create(tmp_path / "run", config).close()
    index = RunIndex(tmp_path / "run", tmp_path / "index.sqlite")
    found = summary.overview("run", index)
    assert {name: found["options"][name] for name in values} == {
        name: str(value) for name, value in values.items()
    }
    assert {*values, "old_logps.route"} <= set(found["changed"])
    assert not {"minutes", "old_logps.baseline", "task.env"} & set(found["changed"])
    index.close()


def test_a_check_that_failed_in_a_step_before_a_resume_holds_if_the_repeated_step_is_sound(
    index: RunIndex, run: Path
) -> None:
    """A resume takes back the metrics after its checkpoint, and keeps the events."""

    def failed() -> dict[str, tuple[float, str]]:
        fill(index)
        checks = summary.overview("first", index)["checks"]
        return {each["name"]: (each["step"], each["text"]) for each in checks if each["text"]}

    before = [*RunFolder(run).rows(METRICS)]
    assert failed() == {}
    with RunLog(run) as log:
        Recorder(Outputs(log, NoDisplay())).write(7, {"correction/kept_share": 0.25})
        ((step, text),) = failed().values()
        assert step == 7 and "kept 25% of the tokens" in text
        log.rewind(before)  # as a resume does
        log.event("resumed", step=6)
        assert failed() == {}
        Recorder(Outputs(log, NoDisplay())).write(7, {"correction/kept_share": 0.75})
    assert failed() == {} and index.last_step == 7
    events = [event["kind"] for event in RunFolder(run).rows(EVENTS)]
    assert events.count("health") == 1


def test_attempts_examples_and_forks_come_from_the_index(index: RunIndex, run: Path) -> None:
    for episode in (3, 5):
        add_event(run, time=9.0, kind="forked", reason="edited", episode=episode, at=2)
    fill(index)
    found = details.details(index.database)
    assert found["forks"] == [{"reason": "edited", "count": 2, "episode": 3, "at": 2}]
    (trained,) = found["attempts"]["kinds"]
    assert trained["count"] == 24 and trained["name"] == "trained on"
    assert found["attempts"]["curve"][-1][1:] == [1.0, 1.0]
    assert found["attempts"]["sentence"] == "No attempt that ended was lost."
    steps = {each["why"]: each["step"] for each in found["examples"]}
    assert {"early success", "early failure", "late success"} <= steps.keys()
    assert all(step <= 2 if why.startswith("early") else step >= 5 for why, step in steps.items())
    for each in found["examples"]:
        reward = table_of(index)[each["episode"] - 1]["reward"]
        assert each["reward"] == reward == each["why"].endswith("success")


@pytest.mark.parametrize(
    ("lost", "sentence", "is_biased"),
    [
        ([300] * 9 + [400] * 9, "Lost attempts were 3.5 times as long as kept ones", True),
        ([300], "Lengths cannot be compared: fewer than two attempts were lost or kept.", False),
        ([], "No attempt that ended was lost.", False),
    ],
)
def test_the_lengths_of_lost_attempts_are_compared_as_in_the_report(
    tmp_path: Path, lost: list[int], sentence: str, is_biased: bool
) -> None:
    index = RunIndex(tmp_path, tmp_path / "lengths.sqlite")
    kept = [90, 110] * 10
    ends = [*zip(lost, ("failed", "restarted") * 9, strict=False), *((n, "trained") for n in kept)]
    with index.database.write() as writer:
        for number, (length, outcome) in enumerate(ends):
            writer.execute(
                "INSERT INTO episodes (group_number, sibling, task, outcome, sampled_tokens, seed,"
                " is_branch) VALUES (?, 0, 't', ?, ?, 0, 0)",
                (number, outcome, length),
            )
    found = details.attempts(index.database)
    assert found["sentence"].startswith(sentence) and found["is_biased"] == is_biased
    reported = survivorship({"kinds": {"failed": {}}, "contrast": contrast(lost, kept)})
    assert not lost or reported == (found["sentence"], is_biased)
    index.close()


def test_branches_are_no_attempts_and_the_last_failure_is_final(tmp_path: Path) -> None:
    index = RunIndex(tmp_path, tmp_path / "attempts.sqlite")
    attempts = [  # group, sibling, outcome, reward, is_branch
        (1, 0, "failed", None, 0),
        (1, 0, "trained", 1.0, 0),
        *[(1, 0, "trained", 1.0, 1)] * 5,
        (1, 1, "failed", None, 0),
        (1, 1, "failed", None, 0),
        (2, 0, "trained", 0.0, 0),
    ]
    with index.database.write() as writer:
        for each in attempts:
            writer.execute(
                "INSERT INTO episodes (group_number, sibling, outcome, reward, is_branch, task,"
                " seed) VALUES (?, ?, ?, ?, ?, 't', 0)",
                each,
            )
    kinds = {row["outcome"]: row for row in details.attempts(index.database)["kinds"]}
    assert {name: row["count"] for name, row in kinds.items()} == {
        "failed": 2,
        "given_up": 1,
        "trained": 2,
    }
    assert kinds["trained"]["reward"] == 0.5
    assert kinds["given_up"]["name"] == "failed, not retried"
    index.close()


def test_an_audit_has_a_verdict_for_each_route(index: RunIndex, run: Path) -> None:
    fill(index)
    found = audits.audit(index)
    after = found["after"]
    stored = json.loads((run / "audit.json").read_text())
    assert [row["route"] for row in after["routes"]] == [row["route"] for row in stored["routes"]]
    assert len(after["routes"][0]["cells"]) == len(after["columns"])
    assert found["verdict"] == (
        "Approximate: the mean error is 0.004 nats. It moves 30% of the staleness into D and 70% "
        "of the discrepancy into S. Other tokens are clipped (F1 0.06) than with the true old_logp."
    )
    assert all(row["verdict"] for row in after["routes"])


@pytest.mark.parametrize(("fallback", "exact"), [("snapshot_old", True), ("ewma_prox", False)])
def test_eager_is_exact_if_its_fallback_is(tmp_path: Path, fallback: str, exact: bool) -> None:
    config = override(fake_config("eager"), {"old_logps.fallback": fallback})
    RunLog.create(tmp_path / "run", config).close()
    index = RunIndex(tmp_path / "run", tmp_path / "index.sqlite")
    found = audits.audit(index)
    assert (found["route"], found["exact"]) == ("eager", exact)
    assert summary.overview("run", index)["exact"] == exact
    index.close()


def test_an_f1_without_tokens_is_none_and_not_0() -> None:
    """`algorithms.audit.agreement` gives None if no token was dropped or should have been."""
    names = [column.name for column in COLUMNS]
    row = {"route": "rollout", "mask_f1": None, "clip_f1": 0.0}
    found = dict(zip(names, cells(row), strict=True))
    assert (found["mask F1"], found["clip F1"]) == ("none", "0.000")
    assert dict(zip(names, cells({}), strict=True))["mask F1"] == "—"
    text = audits.verdict({"logp_error_abs_mean": 0.1, "noise": 0.0, "mask_f1": None})
    assert text == "Approximate: the mean error is 0.1 nats."


def test_the_audited_tokens_of_the_newest_steps_are_shown(
    index: RunIndex, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = [0.01, 0.02, 0.02, 0.01]
    assert audits.audit(index)["tokens"] == [first] * 40
    names = ("log_d", "log_s", "true_log_d", "true_log_s")
    second = dict(zip(names, (0.5, 0.25, 0.125, 0.625), strict=True))
    with Journal(run / JOURNAL) as journal:
        recorder = Recorder(Outputs(RunLog(run), NoDisplay()), journal=journal)
        recorder.trained(7, points=[second | {"lag": 1}], events=())
    assert audits.audit(index)["tokens"] == [first] * 40 + [[*second.values()]]
    monkeypatch.setattr(audits, "MAX_STEPS", 1)
    found = audits.audit(index)
    assert found["tokens"] == [[*second.values()]] and found["problems"] == []
    (run / JOURNAL).write_bytes(b"no journal")
    found = audits.audit(index)
    assert found["tokens"] == [] and "audited tokens cannot be read" in found["problems"][0]


@pytest.mark.parametrize(
    ("content", "problem"),
    [("{", "audit.json is not a JSON object"), ("x" * 2000, "has 2,000 bytes; at most 1,000 are")],
)
def test_a_damaged_or_too_large_audit_is_a_sentence(
    index: RunIndex, run: Path, monkeypatch: pytest.MonkeyPatch, content: str, problem: str
) -> None:
    monkeypatch.setattr(audits, "MAX_BYTES", 1000)
    (run / "audit.json").write_text(content)
    found = audits.audit(index)
    assert found["after"] is None and problem in " ".join(found["problems"])


def test_no_common_dropped_token_is_a_sentence_without_f1() -> None:
    text = audits.verdict({"logp_error_abs_mean": 0.1, "noise": 0.0, "mask_f1": 0, "clip_f1": 0.5})
    assert "No token is dropped both by the route and with the true old_logp." in text
    assert "F1 0.00" not in text and "clipped (F1 0.50)" in text


def test_an_audit_is_read_again_only_if_its_file_changed(
    index: RunIndex, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = audits.audit(index)
    points = {"log_d": [0.5] * 10_000, "log_s": [0.25] * 10_000}
    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "read_object", lambda *_, **__: {})
        patched.setattr(RunFolder, "config", lambda _: {})
        assert audits.audit(index)["after"] == first["after"]
    (run / "audit.json").write_text(json.dumps({"points": points}))
    assert audits.audit(index)["after"]["points"] == [[0.5, 0.25]] * audits.MAX_POINTS


def test_two_runs_are_compared_on_the_groups_that_both_finished(tmp_path: Path) -> None:
    """Groups 1 to 3 have the differences 0, 1 and 0.5 in success; group 4 had another task.

    Group 5 is not finished in run B, whose second episode is open.
    """
    indexes = []
    shares: dict[str, list[tuple[int | None, ...]]] = {
        "a": [(0, 0), (0, 0), (0, 1), (1, 1), (0, 0)],
        "b": [(0, 0), (1, 1), (1, 1), (0, 0), (1, None)],
    }
    for name, groups in shares.items():
        index = RunIndex(tmp_path, tmp_path / f"{name}.sqlite")
        with index.database.write() as writer:
            for number, successes in enumerate(groups, 1):
                for sibling, success in enumerate(successes):
                    task = f"t/{name}" if number == 4 else f"t/{number}"
                    outcome = "open" if success is None else "waiting" if number == 5 else "trained"
                    writer.execute(
                        "INSERT INTO episodes (group_number, sibling, task, outcome, success, seed,"
                        " is_branch) VALUES (?, ?, ?, ?, ?, 0, 0)",
                        (number, sibling, task, outcome, success),
                    )
        indexes.append(index)
    found = pairs.pairs(*(index.database for index in indexes))
    assert (found["groups"], found["only"], found["late_groups"]) == (3, 3, 1)
    (success,) = found["figures"]
    assert (success["a"], success["b"]) == pytest.approx((1 / 6, 2 / 3))
    assert success["difference"] == pytest.approx(0.5)
    # Student's t with two degrees of freedom is 4.303.
    half = 4.302653 * 0.5 / 3**0.5
    assert success["interval"] == pytest.approx([0.5 - half, 0.5 + half])
    assert found["late"][0]["interval"] is None
    for index in indexes:
        index.close()


def test_a_long_series_has_means_of_steps_and_not_of_the_points_that_are_kept(
    tmp_path: Path,
) -> None:
    values = [0.25 * (step * step % 5) for step in range(1, 1201)]
    run = tmp_path / "run"
    run.mkdir()
    for step, value in enumerate(values, 1):
        add_row(run, step=step, **{"rollout/success_rate": value, "x": step})
    index = fill(RunIndex(run, tmp_path / "index.sqlite"))
    names = ["rollout/success_rate", "x"]
    found = summary.series(index.database, names, 100, window=5)
    for name, of_steps in zip(names, (values, range(1, 1201)), strict=True):
        steps, means = found[name]
        assert len(steps) <= 102 and steps[-1] == 1200
        expected = []
        for step in steps:
            last = of_steps[max(0, step - 5) : step]
            expected.append(sum(last) / len(last))
        assert means == pytest.approx(expected)
    assert summary.series(index.database, names, 2000, window=1)["x"][1] == list(range(1, 1201))
    with pytest.raises(BadQuestion, match="window must be between 1 and 100, got 0"):
        summary.series(index.database, names, window=0)
    index.close()


def test_curves_may_be_over_seconds_of_training_and_sampled_tokens(
    index: RunIndex, run: Path
) -> None:
    """The seconds are those of `unstale compare`: without evaluations, from the first step on."""
    add_row(run, step=7, time_s=1e6)
    add_row(run, step=8, **{"rollout/sampled_tokens": 50, "trainer/action_tokens": 20, "x": 1})
    fill(index)
    rows = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    events = [json.loads(line) for line in (run / EVENTS).read_text().splitlines()]
    spans = [each for each in events if each["kind"] == "span"]
    first = next(row["time_s"] for row in rows if row["step"] == 0)
    seconds = axes.positions(index.database, "seconds", [0, 3, 8, 99])
    assert seconds[0] == 0 and seconds[2:] == [None, None]
    between = [each for each in spans if each["lane"] == "eval" and each["start"] >= first]
    assert between == []  # 6 steps, and an evaluation every 20
    assert seconds[1] == pytest.approx(rows[3]["time_s"] - first)
    tokens = {row["step"]: row.get("rollout/sampled_tokens", 0) for row in rows}
    upto = [sum(count for step, count in tokens.items() if step <= last) for last in (3, 6)]
    found = axes.positions(index.database, "tokens", [3, 6, 8])
    assert found == [*upto, upto[1] + 50]
    series = summary.series(index.database, ["reward/mean", "x"], axis="tokens")
    assert series["x"] == [[upto[1] + 50], [1]]
    assert series["reward/mean"][0][2] == upto[0]
    assert summary.series(index.database, ["x"], axis="seconds")["x"] == [[], []]
    with pytest.raises(BadQuestion, match="x must be one of step, seconds, tokens"):
        axes.positions(index.database, "hours", [1])


def test_the_server_answers_them(run: Path) -> None:
    with served(run.parent) as client:
        client.when_read("first")
        assert client.ask("details", run="first")["ages"]
        assert client.ask("audit", run="first")["after"]["routes"]
        paired = client.ask("pairs", a="first", b="first")
        assert paired["groups"] == 6
        assert all(figure["difference"] == 0 for figure in paired["figures"])
        assert not any(figure["interval"] for figure in paired["figures"]), "they are all equal"
        assert client.ask("pairs", 404, a="first", b="no")["error"]
        found = client.ask("series", run="first", name="reward/mean", x="seconds", at=[2, 99])
        assert found["at"] == [found["series"]["reward/mean"][0][1], None]
        assert client.ask("series", 400, run="first", window=101)["error"].startswith("window must")
        mean, raw = (
            client.ask("series", run="first", name="reward/mean", window=window)["series"]
            for window in (5, 1)
        )
        assert mean["reward/mean"][1][-1] == pytest.approx(sum(raw["reward/mean"][1][1:]) / 5)
        assert client.ask("series", 400, run="first", x="hours", at=1)["error"].startswith("x must")
        assert client.ask("series", 400, run="first", at="x")["error"]
        assert client.ask("series", 400, run="first", at=[1] * 501)["error"]
        assert client.ask("audit", 404, run="../first")["error"]


PAGES = {
    "run/first": "document.querySelector('.lanes') && "
    "document.querySelectorAll('.contents button').length > 5",
    "run/first/audit": "document.querySelectorAll('.cloud').length == 6 && "
    "document.querySelector('.verdict')",
    "compare?a=first&b=second": "document.querySelector('main').innerText.includes('last 2')",
}
"""The pages, each with a condition that it is complete."""


def test_every_page_is_tried_with_axe() -> None:
    """The long tests visit all of `PAGES`. Only the address of a token is left out: it is that of
    its episode with a token chosen."""
    (listed,) = re.findall(r"start\(\[(.*?)\n\], ", (STATIC / "main.js").read_text(), re.DOTALL)
    patterns = re.findall(r'^  \["([^"]*)"', listed, re.MULTILINE)
    assert len(patterns) > 7
    for pattern in patterns:
        shape = re.sub(":[a-z]+", "[^/?]+", pattern) + r"(\?.*)?"
        found = [path for path in TRIED if re.fullmatch(shape, path)]
        assert found or pattern.endswith("/token/:token"), pattern


@pytest.mark.costly
@pytest.mark.skipif(browser_program() is None, reason=NO_BROWSER)
def test_the_pages_are_complete_and_readable(recorded: Path, tmp_path: Path) -> None:
    """In light, dark and narrow windows; the timeline's wheel, drag and keys change its range."""
    root = tmp_path / "runs"
    first = Path(shutil.copytree(recorded, root / "first"))
    values = {"up": 1, "version": 5, "busy_share": 0.5, "running": 3, "restarts": 0}
    both = {f"engine_{n}/{name}": value for n in (0, 1) for name, value in values.items()}
    add_row(first, step=7, time_s=60, **both | {"engine_1/version": 4})
    shutil.copytree(first, root / "second")
    with served(root) as client, dashboard_page(client.dashboard.url, runs=2) as page:
        for name in ("first", "second"):
            client.when_read(name)
        for width, dark in ((1280, False), (1280, True), (380, False)):
            page.resize(width, 900, dark=dark)
            for path, is_complete in PAGES.items():
                page.run(f"location.hash = {json.dumps('#/' + path)}")
                page.wait(is_complete)
                if path == "run/first":
                    see_all(page)
                    page.wait("document.querySelector('.time-bar')")
                assert page.run("document.documentElement.scrollWidth <= innerWidth + 1"), path
                assert page.run(CONTRAST) == [] and page.run(NAMELESS) == [], path
                assert page.run(UNREACHED) == [], path
                assert page.run("document.querySelectorAll('h1').length") == 1, path
        page.resize(1280, 900)
        page.run("location.hash = '#/run/first'")
        page.wait(PAGES["run/first"])
        see_all(page)
        text = page.run("document.querySelector('#section-engines').innerText")
        assert "engine 0" in text and "4, 1 behind" in text
        page.run("document.querySelector('.lanes').focus()")
        page.wait(f"{NOTE}.startsWith('0.0 s')")
        page.press("+")
        page.wait(f"!{NOTE}.startsWith('0.0 s')")
        zoomed = page.run(NOTE)
        page.run(
            "document.querySelector('.lanes').dispatchEvent(new WheelEvent('wheel', "
            "{ deltaY: -1, ctrlKey: true, clientX: 600, cancelable: true }))"
        )
        page.wait(f"{NOTE} !== {json.dumps(zoomed)}")
        page.press("0")
        page.wait(f"{NOTE}.startsWith('0.0 s')")
        tokens = client.ask("series", run="first", name="rollout/success_rate", x="tokens")
        last = round(tokens["series"]["rollout/success_rate"][0][-1])
        for axis, end in (("seconds", ""), ("tokens", f" {last:,}"), ("step", " 6")):
            page.run("location.hash = '#/compare?a=first&b=second'")
            page.wait("document.querySelector('#x-axis')?.value === 'step'")
            page.run(
                "{ const choice = document.querySelector('#x-axis');"
                f" choice.value = '{axis}'; choice.dispatchEvent(new Event('change')); }}"
            )
            page.wait(f"document.querySelector('#x-axis')?.value === '{axis}'")
            page.wait(f"document.querySelector('.where')?.innerText.startsWith('{axis}{end}')")
            assert page.run("location.hash").endswith("" if axis == "step" else f"&x={axis}")
        assert page.errors == []


@pytest.mark.costly
@pytest.mark.skipif(browser_program() is None, reason=NO_BROWSER)
def test_the_learning_curve_shows_means_of_five_steps(tmp_path: Path) -> None:
    """The success of the last five of 1,200 steps is 1. Before, it is 0 and 1 in turns."""
    run = tmp_path / "runs" / "long"
    RunLog.create(run, fake_config()).close()
    rows = [
        {"step": step, "rollout/success_rate": float(step % 2 or step > 1195)}
        for step in range(1, 1201)
    ]
    (run / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = "document.querySelector('figure .keys')?.innerText ?? ''"
    with served(run.parent) as client, dashboard_page(client.dashboard.url, runs=1) as page:
        page.run("location.hash = '#/run/long'")
        page.wait(f"({keys}).includes('mean of 5')")
        assert re.search(r"rollouts, mean of 5\s+100\.0%", page.run(keys)), page.run(keys)
        assert page.errors == []


UNREACHED = """
[...document.querySelectorAll('.scroll')].filter((each) => each.querySelector('td'))
  .filter((each) => each.tabIndex < 0 && !each.querySelector('a, button'))
  .map((each) => each.innerText.slice(0, 80))
"""
"""Return tables that may be wider than the window and that the keyboard cannot move."""

NOTE = "document.querySelector('#section-timeline [role=status]').textContent.split(',')[0]"
"""The range that the timeline shows."""
