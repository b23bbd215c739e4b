"""Test that a report is the page of a run in the dashboard, with its answers, in one file.

- It needs nothing else: no address, no resource, and a policy that admits only the page's own
  script and style. What it shows in a browser is in `test_report_browser.py`.
- Whatever a run folder holds is data: it cannot become an element, an attribute or a script.
- Where a file is missing, cut off or broken, a sentence says so.
- An approximate route is called approximate, and an audit or its absence is shown.
- What was generated is shown beside what was trained on, by environment.
- Its size does not grow with the number of steps.
- Nothing but `report.html` is written.
"""

import base64
import hashlib
import json
import math
import re
import shlex
import sqlite3
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_run import NoDisplay, fake_config, fake_run
from unstale.analysis.dashboard import frozen
from unstale.analysis.dashboard.frozen import freeze, write_and_summarize, write_report
from unstale.analysis.report.audited import COLUMNS, cells
from unstale.analysis.report.bundle import script
from unstale.analysis.report.compare import ended
from unstale.analysis.report.words import is_exact
from unstale.cli import main, recipe_options
from unstale.config import ConfigError, OldLogpsConfig
from unstale.config.options import override
from unstale.config.routes import routes
from unstale.durability.journal import JOURNAL, Journal
from unstale.durability.run_folder import RunLog
from unstale.observe.held_out import HeldOut
from unstale.observe.recorder import Outputs, Recorder
from unstale.observe.words import Waiting, waiting
from unstale.records import Failure, Task

FILES = ("config.json", "metrics.jsonl", "events.jsonl")
ATTACK = "\"'><img src=x onerror=alert(1)></style></script><script>alert(2)</script>\ud800\x00"
VOID = {"meta", "br", "hr", "img", "input", "link"}
ELEMENTS = {"html", "head", "meta", "title", "style", "body", "a", "header", "span", "nav"}
ELEMENTS |= {"button", "main", "noscript", "h1", "p", "script"}


class Page(HTMLParser):
    """The elements of a page, with a check that tags close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.contents: dict[str, list[str]] = {"script": [], "style": []}
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.contents.get(self.open[-1] if self.open else "", self.words).append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@dataclass(frozen=True)
class Report:
    """A report: its file, its elements, and the answers in it."""

    file: str
    page: Page

    @property
    def data(self) -> dict[str, Any]:
        return dict(json.loads(self.page.contents["script"][0]))

    @property
    def run(self) -> dict[str, Any]:
        return dict(self.data["run"])


def report(folder: Path) -> Report:
    text = write_report(folder).read_text(encoding="utf-8")
    return Report(text, Page(text))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_run(tmp_path_factory.mktemp("runs") / "retail", steps=40, with_values=True)


def test_every_answer_that_the_page_asks_for_is_in_the_file(run: Path) -> None:
    data = report(run).data
    wanted = {
        line["metric"]
        for section in data["run"]["sections"]
        for chart in section["charts"]
        for line in chart["lines"]
    }
    assert wanted <= data["series"].keys() and "time_s" in data["series"]
    for place, values in data["series"].values():
        assert len(data["steps"][place]) == len(values)
    assert (
        data["factors"]["points"]["log_d"] and data["spans"][0]["spans"] and data["lags"]["total"]
    )
    shown = {str(each["episode"]) for each in data["details"]["examples"]}
    assert len(shown) == 4 and shown == data["episodes"].keys()
    assert all(each["pieces"] for each in data["episodes"].values())


def test_the_page_needs_nothing_else(run: Path) -> None:
    found = report(run)
    code = found.page.contents["script"][1].replace("http://www.w3.org/2000/svg", "")
    code = re.sub(r"/\*.*?\*/", "", code, flags=re.DOTALL)
    for text in (code, found.page.contents["style"][0]):
        assert not re.search(r"https?:|fetch\(|url\(|@import|EventSource|import\(", text)
    addresses = {"src", "href", "srcset", "action"}
    used = [attrs.get(name) for _, attrs in found.page.elements for name in addresses & set(attrs)]
    assert used == ["#content"]


def test_the_policy_admits_only_the_pages_script_and_style(run: Path) -> None:
    page = report(run).page
    (policy,) = (
        attrs["content"] for tag, attrs in page.elements if tag == "meta" and "http-equiv" in attrs
    )
    assert policy is not None and "default-src 'none'" in policy and "unsafe" not in policy
    kinds = [attrs.get("type") for tag, attrs in page.elements if tag == "script"]
    assert kinds == ["application/json", None]
    for kind, text in (
        ("script", page.contents["script"][1]),
        ("style", page.contents["style"][0]),
    ):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy


def test_a_script_with_what_cannot_be_joined_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from unstale.analysis.report import bundle

    texts = {"a.js": 'import { b } from "./b.js";\nb();\n', "b.js": "export let b = 1;\n"}
    read = bundle.read_static
    monkeypatch.setattr(bundle, "read_static", lambda name: texts.get(name) or read(name))
    with pytest.raises(ValueError, match="cannot be joined with others: export let b"):
        script("a.js")
    texts["b.js"] = 'export const b = () => "</SCRIPT>";\n'
    with pytest.raises(ValueError, match="which ends a script"):
        script("a.js")


def poisoned(value: Any) -> Any:
    """Return a value with an attack in every text."""
    match value:
        case dict():
            return {
                f"{key}": value if key == "kind" else poisoned(value)
                for key, value in value.items()
            }
        case list():
            return [poisoned(item) for item in value]
        case str():
            return ATTACK + value
    return value


def is_data(found: Report) -> bool:
    """Return True if the attack is in the answers and in no element of the page."""
    page = found.page
    assert [tag for tag, _ in page.elements].count("script") == 2
    assert {tag for tag, _ in page.elements} <= ELEMENTS
    assert not [name for _, attrs in page.elements for name in attrs if name.startswith("on")]
    assert "alert(2)" not in page.contents["script"][1] + page.contents["style"][0]
    assert "<" not in page.contents["script"][0]
    return "alert(2)" in json.dumps(found.data)


@pytest.mark.parametrize("everything", [False, True])
def test_nothing_of_a_run_becomes_code(run: Path, tmp_path: Path, everything: bool) -> None:
    folder = tmp_path / "a <script>alert(3)</script>&lt;".replace("/", "_")
    fake_run(folder, steps=6, prefix=ATTACK.replace("\ud800", ""))
    if everything:
        with sqlite3.connect(folder / JOURNAL) as journal:
            samples = "UPDATE events SET fields = json_set(fields, '$.tokens.lag[0]', ?)"
            journal.execute(f"{samples} WHERE kind = 'token_samples'", [ATTACK[:-2]])
    config = poisoned(json.loads((run / "config.json").read_text()))
    (folder / "config.json").write_text(json.dumps(config | {ATTACK: ATTACK}))
    for name in FILES[1:]:
        rows = [json.loads(line) for line in (run / name).read_text().splitlines()]
        spoilt = [poisoned(row) for row in rows]
        for value in (ATTACK, [{ATTACK: [ATTACK]}]) if everything else ():
            spoilt += [
                {key: value if key != "kind" else each for key, each in row.items()} for row in rows
            ]
        if not everything:
            spoilt = [row | {"lane": "trainer"} for row in spoilt]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in spoilt))
    (folder / "error.txt").write_text(ATTACK, errors="replace")
    assert is_data(report(folder))


@pytest.mark.parametrize("name", [*FILES, "journal.sqlite", "tokenizer.json"])
def test_a_missing_file_is_a_stated_gap(tmp_path: Path, name: str) -> None:
    folder = fake_run(tmp_path / "run", steps=6)
    (folder / name).unlink()
    found = report(folder).run
    assert any(f"{name} is missing" in text for text in [*found["gaps"], *found["problems"]])


def test_a_run_that_only_began(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    data = report(tmp_path).data
    assert data["run"]["outcome"] is None and not data["run"]["checks"]
    assert data["series"].keys() == {"time_s"}
    assert data["episodes"] == {} and data["lags"]["total"] == []


@pytest.mark.parametrize("name", FILES[1:])
def test_a_file_cut_off_in_its_last_line(tmp_path: Path, name: str) -> None:
    folder = fake_run(tmp_path / "run", steps=6)
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:-20])
    found = report(folder).run
    assert not found["gaps"] and not found["problems"]


def test_a_broken_line_is_stated(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", steps=6)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[3] = "{"
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    found = report(folder).run
    assert "metrics.jsonl has lines that are not JSON objects" in found["problems"][0]
    assert found["step"] == 6


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", steps=5, planned=80)
    lines = (folder / "events.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["kind"] != "stopped"]
    (folder / "events.jsonl").write_text("\n".join(kept) + "\n")
    assert "not finished: still running, or killed" in report(folder).page.text
    (folder / "error.txt").write_text("Traceback\nEngineDied: exit code -9")
    found = report(folder)
    assert "The run failed: EngineDied: exit code -9" in found.page.text
    assert found.run["state"] == "failed" and "EngineDied" in found.run["error"]


def test_the_reason_of_the_end_is_in_the_report(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", steps=6)
    for reason, detail, said in (
        ("finished", "all 6 steps are done", "Ended: all 6 steps are done"),
        ("Ctrl-C", "to continue: unstale train --resume x", "Ended by Ctrl-C; to continue: uns"),
        ("failed", "OSError: no disk", "The run failed: OSError: no disk"),
    ):
        with RunLog(folder) as log:
            log.event("stopped", reason=reason, detail=detail)
        found = report(folder)
        assert said in found.page.text and found.run["detail"] == detail


def test_a_run_that_was_resumed_has_not_ended(tmp_path: Path) -> None:
    """It trains again, or was killed. Only an end after the resume counts."""
    folder = fake_run(tmp_path / "run", steps=5, planned=80)
    with RunLog(folder) as log:
        log.event("stopped", reason="finished")
        assert report(folder).run["state"] == "finished"
        log.event("resumed", step=4)
        found = report(folder)
        assert found.run["state"] == "silent" and found.run["age_s"] is None
        assert "Ended" not in found.page.text and ended(folder) == ("unfinished", "")
        log.event("stopped", reason="finished")
    assert report(folder).run["state"] == "finished" and ended(folder)[0] == "finished"


def test_the_summary_names_the_end_the_success_and_what_is_wrong(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", steps=6)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps(row | {"reward/std": 0.0, "reward/mean": 0.0}) for row in rows]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with (folder / "events.jsonl").open("a") as events:
        stopped = {"time": 9e9, "kind": "stopped", "reason": "failed", "detail": "KeyError: 'x'"}
        events.write(json.dumps(stopped) + "\n")
    path, end, success, *warnings, told, advice = write_and_summarize(folder).splitlines()
    assert path.endswith("report.html") and end == "The run failed: KeyError: 'x'"
    assert "success on" in success
    assert any("every reward was 0. Check the reward function" in each for each in warnings)
    assert "bottleneck" in told and advice.startswith("What would help")
    without_script = Page((folder / "report.html").read_text()).text
    assert all(line in without_script for line in (end, success, *warnings, told, advice))


def test_the_outcome_has_its_intervals(run: Path) -> None:
    found = report(run).run
    assert [each["step"] for each in found["evaluations"]] == [0, 20, 40]
    p, n, z = 0.434, 256, 1.959964
    spread = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    interval = found["evaluations"][0]["interval"]
    assert interval == pytest.approx([middle - spread, middle + spread], abs=1e-6)
    (before, about), (after, _) = found["outcome"]["shares"]
    assert (before, about.replace("\u00a0", " ")) == ("43.4%", "95% interval 37.5% to 49.5%")
    assert after == f"{100 * found['evaluations'][-1]['success']:.1f}%"
    assert "before training and after 40 steps" in found["outcome"]["note"]


@pytest.mark.parametrize(
    ("route", "exact", "meanings"),
    [
        ("snapshot_old", True, ["discrepancy", "staleness"]),
        ("ewma_prox", False, ["mixed", "remaining staleness"]),
        ("rollout", False, ["0 by construction", "discrepancy and staleness"]),
    ],
)
def test_an_approximate_route_is_called_so(
    tmp_path: Path, route: str, exact: bool, meanings: list[str]
) -> None:
    found = report(fake_run(tmp_path / "run", steps=6, route=route)).run
    assert (found["route"], found["exact"], found["meanings"]) == (route, exact, meanings)
    assert "snapshot_old" in found["exact_routes"]


def test_the_size_does_not_grow_with_the_run(tmp_path: Path) -> None:
    sizes = []
    for steps in (300, 1200):
        folder = fake_run(tmp_path / str(steps), steps=12)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        long = [rows[step % 12] | {"step": step, "time_s": 6.0 * step} for step in range(1, steps)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in long))
        with (folder / "events.jsonl").open("a") as file:
            for step in range(1, steps):
                evaluated = {"step": step, "success": 0.5, "tasks": 9}
                failed = {"episode": step, "task": "t", "stage": "step", "error": "e" * 200}
                for kind, fields in (("eval", evaluated), ("episode_failed", failed)):
                    file.write(json.dumps({"kind": kind, "time": 6.0 * step, **fields}) + "\n")
                for lane in ("trainer", "publish", "wait", "old_logps"):
                    span = {"lane": lane, "start": 6.0 * step, "end": 6.0 * step + 1, "label": "x"}
                    file.write(json.dumps({"kind": "span", **span}) + "\n")
        found = report(folder)
        sizes.append(len(found.file))
        whole, last = found.data["spans"]
        assert whole["parts"] and not whole["spans"] and last["spans"]
        assert max(len(values) for _, values in found.data["series"].values()) < 260
    assert sizes[1] < 1.15 * sizes[0] and sizes[1] < 500_000


def test_a_journal_that_takes_too_long_is_read_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "READ_S", 0.0)
    monkeypatch.setattr("unstale.analysis.dashboard.index.CHUNK_EPISODES", 4)
    folder = fake_run(tmp_path / "run", steps=6)
    found = report(folder).run
    assert any("The run is long, so not all of it is here" in each for each in found["problems"])


def test_a_full_disk_is_an_os_error(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(index: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(frozen, "_answers", full)
    with pytest.raises(OSError, match="database or disk is full"):
        freeze(run)


def test_who_waits_for_whom() -> None:
    rows: list[dict[str, Any]] = [{"time_s": 0.0}]
    for step in (1, 2):
        rows.append(
            {"time_s": 10.0 * step, "schedule/wait_for_batch_s": 0.5, "engine/busy_share": 0.6}
        )
    wait = waiting(rows)
    assert (wait.trainer, wait.engine) == pytest.approx((0.05, 0.4))
    assert wait.sentence.startswith("Training is the bottleneck: ")
    assert waiting([]).sentence.startswith("Too little")


BUSY = {
    "trainer/update_s": 2.0,
    "old_logps/prepare_s": 1.0,
    "publish/duration_s": 0.5,
    "engine/busy_share": 0.5,
}
TOOLS = {"rollout/tool_wait_s": 80.0, "rollout/generation_wait_s": 20.0}
LINE = {"schedule/groups_in_flight": 8, "schedule/groups_waiting": 1, "schedule/staleness_bound": 2}


@pytest.mark.parametrize(
    "row, bottleneck, fact, knob",
    [
        (
            {"schedule/wait_for_batch_s": 4.0, "engine/busy_share": 0.9},
            "Generation",
            "waited for episodes 40%",
            "threads",
        ),
        (
            {"schedule/wait_for_batch_s": 6.0, **TOOLS, **LINE},
            "Tools and rewards",
            "80% of their time in them",
            "max_staleness",
        ),
        (
            {"schedule/wait_for_batch_s": 6.0, **TOOLS, **LINE, "schedule/groups_waiting": 6},
            "The staleness budget",
            "75% of the groups in flight were finished",
            "schedule.lookahead_window",
        ),
        (
            {"schedule/wait_for_batch_s": 6.0, "schedule/staleness_bound": 0},
            "Taking turns",
            "idle 50%",
            "above 0",
        ),
        *(
            ({metric: 6.0, "schedule/wait_for_batch_s": 0.1}, bottleneck, "it took 60%", knob)
            for metric, bottleneck, knob in (
                ("trainer/update_s", "Training", "trainer.threads"),
                ("old_logps/prepare_s", "Scoring old log-probabilities", "old_logps.route"),
                ("publish/duration_s", "Publishing", "lora_rank"),
                ("checkpoint/duration_s", "Checkpointing", "checkpoint"),
                ("eval/duration_s", "Evaluation", "eval.interval"),
            )
        ),
        (
            {"eval/duration_s": 6.0, "schedule/wait_for_batch_s": 2.0},
            "Evaluation",
            "it took 50%",
            "eval.tasks",
        ),
        (
            {
                "eval/duration_s": 6.0,
                "eval/tool_wait_s": 9.0,
                "eval/generation_wait_s": 1.0,
                "schedule/wait_for_batch_s": 0.1,
            },
            "Grading held-out tasks",
            "evaluation took 60% of the trainer's time, and held-out episodes spent 90% of theirs "
            "in tools and rewards; ",
            "reward functions",
        ),
        (
            {
                "rollout/tool_wait_s": 8.0,
                "rollout/generation_wait_s": 2.0,
                "schedule/wait_for_batch_s": 6.0,
                "schedule/staleness_bound": 0,
            },
            "Tools and rewards",
            "80% of their time in them",
            "reward functions",
        ),
    ],
)
def test_each_bottleneck_is_named_with_its_share_and_a_knob(
    row: dict[str, float], bottleneck: str, fact: str, knob: str
) -> None:
    wait = waiting([{"time_s": 10.0}, {"time_s": 20.0, **BUSY, **row}])
    assert wait.bottleneck == bottleneck
    assert wait.sentence.startswith(f"{bottleneck} is the bottleneck: ") and fact in wait.sentence
    assert wait.advice.startswith("What would help: ") and knob in wait.advice


def test_what_goes_on_beside_training_counts_as_far_as_time_is_left() -> None:
    """Waiting, training and scoring take 9 of 10 s, so a checkpoint of 4 s can have delayed the run
    by at most 1 s."""
    row = {
        "trainer/update_s": 7.0,
        "old_logps/prepare_s": 1.5,
        "schedule/wait_for_batch_s": 0.5,
        "checkpoint/duration_s": 4.0,
    }
    wait = waiting([{"time_s": 10.0}, {"time_s": 20.0, "engine/busy_share": 0.95, **row}])
    assert wait.work == pytest.approx(
        {"Training": 0.7, "Scoring old log-probabilities": 0.15, "Checkpointing": 0.1}
    )
    assert wait.sentence.startswith("Generation and training keep pace: ") and not wait.advice


def route_row(route: str, error: float, **figures: Any) -> dict[str, Any]:
    """Return the row of a route in `audit.json`."""
    points = {
        "log_d": [error * i / 30 for i in range(-30, 30)],
        "log_s": [0.001 * i for i in range(-30, 30)],
    }
    by_lag = {str(lag): {"error": error * lag, "error_se": None, "tokens": 100} for lag in range(4)}
    return {
        "route": route,
        "logp_error_abs_mean": error,
        "points": points,
        "by_lag": by_lag,
        **figures,
    }


def audit_it(folder: Path) -> Path:
    """Write what `unstale audit` adds to a run folder. Return the folder."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for step, row in enumerate(rows):
        row |= {
            "audit/tokens": 50.0,
            "audit/duration_s": 0.1,
            "audit/memory_bytes": 3e6,
            "audit/logp_noise_rms": 1e-6,
        }
        row |= {"audit/logp_error_abs_mean": 0.004, "audit/logp_error_abs_mean_se": 0.001}
        row |= {
            "audit/staleness_leak": 0.3,
            "audit/discrepancy_leak": 0.7,
            "audit/clip_f1": step / 100,
        }
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    point = {
        "lag": 1,
        "log_d": 0.01,
        "log_s": 0.02,
        "true_log_d": 0.02,
        "true_log_s": 0.01,
    }
    with Journal(folder / JOURNAL) as journal:
        recorder = Recorder(Outputs(RunLog(folder), NoDisplay()), journal=journal)
        recorder.trained(1, points=[point | {"lag": i % 3} for i in range(40)], events=())
    exact = route_row("snapshot_old", 0.0, mask_f1=1.0, clip_f1=1.0, exact_fraction=1.0)
    proxy = route_row(
        "rollout",
        0.01,
        logp_error_abs_mean_se=0.002,
        staleness_leak=-0.0001,
        staleness_leak_se=0.01,
        discrepancy_leak=1.0,
        clip_f1=0.25,
        seconds=1.5,
        costs={"forward_tokens": 12345, "memory_bytes": 2e6},
    )
    found = {
        "tokens": 6000,
        "steps": 6,
        "noise": 1e-6,
        "not_built": {"eager": "no time"},
        "routes": [exact, proxy],
    }
    (folder / "audit.json").write_text(json.dumps(found | {"points": exact["points"]}))
    return folder


def test_no_bound_of_a_share_is_a_negative_zero() -> None:
    for tasks in range(1, 300):
        none, all_of_them = HeldOut(0, 0.0, tasks), HeldOut(0, 1.0, tasks)
        assert ", 0% to" in none.counts and "95% interval 0.0%" in none.about
        assert all_of_them.counts.endswith(" to 100%")


def test_the_bottleneck_names_another_activity_that_takes_much_of_the_time() -> None:
    wait = Waiting(0.005, 0.6, {"Training": 0.39, "Evaluation": 0.36, "Publishing": 0.1})
    assert wait.sentence == (
        "Training is the bottleneck: it took 39% of the trainer's time, evaluation 36%, the "
        "trainer waited for episodes 0.5% of the time, the engine was idle 60%."
    )
    assert "not measured 60%" in replace(wait, work={"Training": 0.395}).sentence
    assert "evaluation" not in replace(wait, work={"Training": 0.8, "Evaluation": 0.15}).sentence


def test_failed_episodes_of_evaluations_are_counted_apart(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", steps=6)
    before = report(folder).run["failures"]
    failure = Failure(Task("retail", "held_out", 3), stage="step", error="timed out")
    log = RunLog(folder)
    for final in (False, True):
        Recorder(Outputs(log, NoDisplay())).held_out_failure(0, failure, final=final)
    log.close()
    found = report(folder).run["failures"]
    assert found == before | {"held_out": 1} and not before["held_out"]


def test_an_audit_is_in_the_report(tmp_path: Path) -> None:
    folder = audit_it(fake_run(tmp_path / "run", steps=6))
    found = report(folder).data["audit"]
    assert [each["route"] for each in found["after"]["routes"]] == ["snapshot_old", "rollout"]
    assert found["after"]["tokens"] == 6000 and found["after"]["not_built"] == {"eager": "no time"}
    assert len(found["tokens"]) == 40 and "Approximate" in found["verdict"]
    (folder / "audit.json").write_text("{")
    assert "audit.json is not a JSON object" in report(folder).data["audit"]["problems"]


@pytest.mark.parametrize("everything", [False, True])
def test_nothing_of_an_audit_becomes_code(tmp_path: Path, everything: bool) -> None:
    folder = audit_it(fake_run(tmp_path / "run", steps=6))
    found = json.loads((folder / "audit.json").read_text())
    spoilt = poisoned(found)
    if everything:
        spoilt["routes"] += [
            dict.fromkeys(found["routes"][0], ATTACK),
            {key: [[ATTACK]] for key in found["routes"][0]},
            ATTACK,
            {"by_lag": {ATTACK: {"error": ATTACK}}, "points": {"log_d": [ATTACK], "log_s": 3}},
        ]
        spoilt |= {"not_built": {ATTACK: ATTACK}, "points": ATTACK}
    (folder / "audit.json").write_text(json.dumps(spoilt))
    assert is_data(report(folder))


def test_a_route_is_a_row_of_the_table() -> None:
    row = route_row(
        "rollout",
        0.01,
        logp_error_abs_mean_se=0.002,
        staleness_leak=-0.0001,
        staleness_leak_se=0.01,
        discrepancy_leak=1.0,
        exact_fraction=0.5,
        seconds=1.5,
        costs={"forward_tokens": 12345, "memory_bytes": 2e6},
    )
    assert cells(row) == [
        "rollout",
        "0.01 ± 0.002",
        "—",
        "0.000 ± 0.010",
        "1.000",
        "—",
        "—",
        "—",
        "50.0%",
        "—",
        "1.5",
        "12,345",
        "2",
    ]
    assert cells({}) == ["—"] * len(COLUMNS)


def test_exact_routes_are_known_from_stored_options() -> None:
    for route in routes():
        config = OldLogpsConfig(route=route)
        fallback = "snapshot_old" if route == "eager" else None
        exact = is_exact({"old_logps.route": route, "old_logps.fallback": fallback}.get)
        assert exact == config.exact
    assert not is_exact({"old_logps.route": "eager", "old_logps.fallback": "ewma_prox"}.get)


def test_how_to_run_it_again(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", steps=6)
    assert report(folder).run["command"].startswith("unstale train retail --seed 0")


def test_a_run_from_python_is_repeated_by_a_command_that_makes_the_same_run(tmp_path: Path) -> None:
    """The recipe `retail` limits the minutes. This run does not, which is the default."""
    config = override(
        fake_config("ewma_prox"),
        {
            "minutes": 0.0,
            "trainer.lr": 1.23456789e-5,
            "old_logps.beta": 0.123456789,
            "techniques": "ess_lr",
            "ess_lr.base": 0.987654321,
        },
    )
    folder = tmp_path / "a run"
    with RunLog.create(folder, config) as log:
        log.event("started", cores=2)
    found = report(folder).run
    program, *words = shlex.split(found["command"])
    assert program == "unstale" and "was started from Python" in found["command_about"]
    again = recipe_options.configure(main.parse(words))
    assert again.name != config.name and replace(again, name=config.name) == config
    values = {name: found["options"][name] for name in found["changed"]}
    changed = ("trainer.lr", "old_logps.route", "old_logps.beta", "ess_lr.base")
    assert {name: values.get(name) for name in changed} == {
        "trainer.lr": "1.23456789e-05",
        "old_logps.route": "ewma_prox",
        "old_logps.beta": "0.123456789",
        "ess_lr.base": "0.987654321",
    }
    assert not values.keys() & {"minutes", "old_logps.baseline", "task.env", "task.workers"}
    assert ["cores", "2"] in found["started"]
    (folder / "config.json").unlink()
    assert not report(folder).run["command"]


def test_only_the_report_is_written(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", steps=3)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    first = write_report(folder).read_bytes()
    assert write_report(folder).read_bytes() == first
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert after.pop("report.html") == first
    assert after == before


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run folder"):
        write_report(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_made_up_run_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    a, b = (fake_run(tmp_path / name, steps=3) for name in "ab")
    assert all((a / name).read_bytes() == (b / name).read_bytes() for name in FILES)
