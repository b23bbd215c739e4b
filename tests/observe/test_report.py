"""What is promised of a report.

- One file that needs nothing else: no address, no resource, and a policy that admits only the
  page's own script.
- Whatever a run folder holds is shown as text: it cannot become an element, an attribute or a
  script.
- Every plot is there; where a file is missing, cut off or broken, a sentence says so.
- The outcome comes first, with intervals; an approximate route is called approximate wherever D and
  S are shown.
- Conversations are shown letter by letter, with versions and interruptions.
- What an audit found is shown beside the truth, and that there was none is said.
- What was generated is shown beside what was trained on, by environment; long attempts lost first
  are a warning.
- Nothing but `report.html` is written.
"""

import base64
import hashlib
import html
import json
import math
import re
import shlex
import sqlite3
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_run import NoDisplay, fake_config, fake_place, fake_run
from unstale.cli import main, recipe_options
from unstale.config import ConfigError, OldLogpsConfig
from unstale.config.options import override
from unstale.config.routes import routes
from unstale.durability.journal import JOURNAL, Journal
from unstale.durability.run_folder import RunFolder, RunLog
from unstale.observe.recorder import Outputs, Recorder
from unstale.observe.report.audited import COLUMNS, cells
from unstale.observe.report.compare import ended
from unstale.observe.report.figures import (
    average_lag,
    clouds,
    dropped_and_clipped,
    learning,
    size_by_lag,
    staleness_over_steps,
)
from unstale.observe.report.gather import Chosen, gather
from unstale.observe.report.page import write_and_summarize, write_report
from unstale.observe.report.plots import Axis
from unstale.observe.report.transcripts import conversation
from unstale.observe.report.words import is_exact, route_about, waiting
from unstale.records import Failure, Task

PLOTS = (
    "Learning curve",
    "Staleness histogram",
    "Staleness over steps",
    "|log D| by lag",
    "|log S| by lag",
    "log D against log S, token by token",
    "|log D| and |log S| over the run",
    "Dropped and clipped tokens",
    "Throughput",
    "Timeline",
)
FILES = ("config.json", "metrics.jsonl", "events.jsonl")
ATTACK = "\"'><img src=x onerror=alert(1)></style></script><script>alert(2)</script>\ud800\x00"
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """The elements of a page, with a check that tags close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
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
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def having(self, name: str) -> list[dict[str, str | None]]:
        """Attributes of the elements of this class."""
        return [attrs for _, attrs in self.elements if name in (attrs.get("class") or "").split()]


def report(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_run(tmp_path_factory.mktemp("runs") / "retail", steps=40)


def cards(text: str) -> dict[str, str]:
    """The figures of a page by title."""
    found = re.findall(r"<figure.*?</figure>", text, re.DOTALL)
    titles = (re.search(r"<h3>(.*?)</h3>", figure, re.DOTALL) for figure in found)
    return {title.group(1): figure for title, figure in zip(titles, found, strict=True) if title}


def test_every_plot_is_drawn(run: Path) -> None:
    drawn = cards(write_report(run).read_text())
    for title in PLOTS:
        assert "<svg" in drawn[title], title
    assert 'class="bound"' in drawn["Staleness histogram"]
    assert drawn["log D against log S, token by token"].count("<svg") == 3
    assert "fill engine" in drawn["Timeline"]


def test_the_page_needs_nothing_else(run: Path) -> None:
    text = write_report(run).read_text()
    assert not re.search(
        r"https?:|//[a-z]|url\(|@import|<link|<iframe|<object", text, re.IGNORECASE
    )
    assert not [
        attrs
        for _, attrs in Page(text).elements
        if {"src", "href", "srcset", "action"} & set(attrs)
    ]


def test_the_policy_admits_only_the_pages_script(run: Path) -> None:
    page = report(run)
    (script,) = page.scripts
    (policy,) = (
        attrs["content"] for tag, attrs in page.elements if tag == "meta" and "http-equiv" in attrs
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy is not None
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy


def poisoned(value: Any) -> Any:
    """Every text replaced by an attack, every other number too."""
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


@pytest.mark.parametrize("everything", [False, True])
def test_nothing_of_a_run_becomes_code(run: Path, tmp_path: Path, everything: bool) -> None:
    folder = tmp_path / "a <script>alert(3)</script>&lt;".replace("/", "_")
    fake_run(folder, steps=6, prefix=ATTACK.replace("\ud800", ""))
    if everything:
        with sqlite3.connect(folder / JOURNAL) as journal:
            samples = "UPDATE events SET fields = json_set(fields, '$.tokens.lag[0]', ?)"
            journal.execute(f"{samples} WHERE kind = 'token_samples'", [ATTACK[:-2]])
    for name in FILES:
        rows = (
            [json.loads(line) for line in (run / name).read_text().splitlines()]
            if name != "config.json"
            else []
        )
        if name == "config.json":
            config = poisoned(json.loads((run / name).read_text()))
            (folder / name).write_text(json.dumps(config | {ATTACK: ATTACK}))
            continue
        spoilt = [poisoned(row) for row in rows]
        if everything:
            spoilt += [
                {key: ATTACK if key != "kind" else value for key, value in row.items()}
                for row in rows
            ]
            spoilt += [
                {
                    key: [{ATTACK: [ATTACK]}] if key != "kind" else value
                    for key, value in row.items()
                }
                for row in rows
            ]
        else:
            for row in spoilt:
                row["lane"] = "trainer"
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in spoilt))
    (folder / "error.txt").write_text(ATTACK, errors="replace")
    page = report(folder)
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert "img" not in {tag for tag, _ in page.elements}
    assert not [name for _, attrs in page.elements for name in attrs if name.startswith("on")]
    assert "alert(2)" in page.text
    assert not any(
        "alert" in (attrs.get("style") or "") + (attrs.get("class") or "")
        for _, attrs in page.elements
    )


@pytest.mark.parametrize("name", [*FILES, "journal.sqlite", "tokenizer.json"])
def test_a_missing_file_is_a_stated_gap(tmp_path: Path, name: str) -> None:
    folder = fake_run(tmp_path / "run", steps=6)
    (folder / name).unlink()
    assert f"{name} is missing" in report(folder).text


def test_without_spans_the_timeline_says_so(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", steps=6)
    (folder / "events.jsonl").write_text("")
    drawn = cards(write_report(folder).read_text())
    assert "busy share of each step" in drawn["Timeline"]
    (folder / "metrics.jsonl").write_text("")
    assert "No spans were recorded" in cards(write_report(folder).read_text())["Timeline"]


def test_a_run_that_only_began(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    page = report(tmp_path)
    assert "Too few steps were recorded" in page.text
    assert "<svg" not in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("name", FILES[1:])
def test_a_file_cut_off_in_its_last_line(tmp_path: Path, name: str) -> None:
    folder = fake_run(tmp_path / "run", steps=6)
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:-20])
    page = report(folder)
    assert not page.having("gaps")


def test_a_broken_line_is_stated(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", steps=6)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[3] = "{"
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page = report(folder)
    assert "metrics.jsonl, line 4 is not a JSON object" in page.text
    assert "2 of 6 steps" in page.text


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", steps=5, planned=80)
    assert "not finished" in report(folder).text
    (folder / "error.txt").write_text("EngineDied: exit code -9")
    page = report(folder)
    assert page.text.startswith("run · unstale unstale failed ")
    assert "EngineDied: exit code -9" in page.text


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


@pytest.mark.parametrize(
    ("reason", "state"),
    [("Ctrl-C", "unstale stopped: Ctrl-C"), ("finished", "unstale finished")],
)
def test_a_run_that_was_resumed_has_not_ended(tmp_path: Path, reason: str, state: str) -> None:
    """It trains again, or was killed. Only an end after the resume counts."""
    folder = fake_run(tmp_path / "run", steps=5, planned=80)
    with RunLog(folder) as log:
        log.event("stopped", reason=reason)
        assert state in report(folder).text
        log.event("resumed", step=4)
        page = report(folder)
        assert page.text.startswith("run · unstale unstale not finished: still running, or killed")
        assert "Ended" not in page.text and ended(folder) == ("unfinished", "")
        log.event("stopped", reason="finished")
    assert "unstale finished" in report(folder).text and ended(folder)[0] == "finished"


def test_a_run_that_took_all_steps_and_did_not_end_is_not_finished(tmp_path: Path) -> None:
    """It was killed in its last evaluation, or while its policy was saved."""
    folder = fake_run(tmp_path / "run", steps=5)
    lines = (folder / "events.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["kind"] == "stopped"
    (folder / "events.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    assert "not finished: still running, or killed" in report(folder).text


def test_the_outcome_comes_first_with_its_intervals(run: Path) -> None:
    text = report(run).text
    evaluations = gather(run).evaluations
    assert [evaluation.step for evaluation in evaluations] == [0, 20, 40]
    p, n, z = 0.434, 256, 1.959964
    spread = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    assert evaluations[0].interval == pytest.approx((middle - spread, middle + spread), abs=1e-6)
    assert text.index("43.4%") < text.index("staleness, max")
    assert "95% interval 37.5% to 49.5%" in text
    assert f"{100 * evaluations[-1].success:.1f}%" in text
    assert "before training and after 40 steps" in text


def test_an_approximate_route_is_called_approximate(tmp_path: Path) -> None:
    ewma = report(fake_run(tmp_path / "ewma", steps=6, route="ewma_prox"))
    assert "ewma_prox is an approximate route." in ewma.text
    assert "discrepancy and staleness are mixed" in ewma.text
    assert ewma.having("stand-in")
    rollout = report(fake_run(tmp_path / "rollout", steps=6, route="rollout"))
    assert "log S contains discrepancy and staleness" in rollout.text
    exact = report(fake_run(tmp_path / "exact", steps=6))
    assert not exact.having("warning")
    assert not exact.having("stand-in")
    assert "each token is scored by the version that sampled it" in exact.text


def test_staleness_beyond_the_bound_is_not_hidden(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", steps=6)
    with (folder / "metrics.jsonl").open("a") as file:
        row = {"step": 7, "schedule/staleness_histogram": {"4": 10}, "schedule/staleness_bound": 2}
        file.write(json.dumps(row) + "\n")
    assert "Tokens of lag 4 were trained on, beyond the bound of 2." in report(folder).text


def test_means_by_lag_count_by_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    rows = [
        {
            "step": 1,
            "schedule/staleness_histogram": {"0": 10, "1": 30},
            "correction/log_d_abs_mean/lag_0": 1.0,
            "correction/log_d_abs_mean/lag_1": 4.0,
        },
        {
            "step": 2,
            "schedule/staleness_histogram": {"1": 10},
            "correction/log_d_abs_mean/lag_1": 8.0,
        },
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert average_lag(gather(tmp_path), "correction/log_d_abs_mean/lag_") == {0: 1.0, 1: 5.0}


def test_many_steps_share_a_column_of_staleness(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    rows = (
        {"step": step, "schedule/staleness_histogram": {str(step % 2): 10}}
        for step in range(1, 2401)
    )
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawn = str(staleness_over_steps(gather(tmp_path), {0: 12000.0, 1: 12000.0}))
    assert "The same shares, for 10 steps each." in drawn
    assert "steps 1 to 10\nlag 0 50%\nlag 1 50%" in drawn and "steps 2391 to 2400\n" in drawn


@pytest.mark.parametrize(
    ("options", "whole"),
    [
        ({}, []),
        ({"objective.kind": "gspo"}, ["S"]),
        ({"objective.unit": "turn", "correction.unit": "sequence"}, ["D", "S"]),
    ],
)
def test_bounds_of_sequences_are_no_bounds_of_tokens(
    tmp_path: Path, options: dict[str, Any], whole: list[str]
) -> None:
    folder = fake_run(tmp_path / "run", steps=6)
    config = json.loads((folder / "config.json").read_text())
    for name, value in options.items():
        section, option = name.split(".")
        config[section][option] = value
    (folder / "config.json").write_text(json.dumps(config))
    drawn = html.unescape(str(clouds(gather(folder))))
    for ratio, verb in (("D", "dropped"), ("S", "clipped")):
        says_whole = f"The bounds of {ratio} are those of a whole" in drawn
        assert says_whole is (ratio in whole)
        assert (f"Tokens are {verb} outside the band on log {ratio}" in drawn) is not says_whole


@pytest.mark.parametrize(("ratio", "name"), [("D", "correction/log_d"), ("S", "objective/log_s")])
def test_means_by_lag_count_by_the_tokens_that_were_measured(
    tmp_path: Path, ratio: str, name: str
) -> None:
    """Lag 0 has no such number, as in older runs, and counts by all of its tokens."""
    (tmp_path / "config.json").write_text("{}")
    rows = [
        {
            "step": step,
            "schedule/staleness_histogram": {"0": tokens, "1": tokens},
            f"{name}_abs_mean/lag_0": size,
            f"{name}_abs_mean/lag_1": size,
            f"{name}_tokens/lag_1": measured,
        }
        for step, tokens, measured, size in ((1, 100, 90, 0.5), (2, 300, 10, 0.1))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    means = average_lag(gather(tmp_path), f"{name}_abs_mean/lag_")
    assert means == pytest.approx({0: 0.2, 1: (90 * 0.5 + 10 * 0.1) / 100})
    assert "lag 0 0.2, lag 1 0.46" in size_by_lag(gather(tmp_path), ratio)


def test_a_long_run_has_means_of_five_steps_and_not_of_more(tmp_path: Path) -> None:
    """The success is 1 in five steps of 1,200. Each of the 240 points averages five values."""
    (tmp_path / "config.json").write_text("{}")
    rows = [
        {"step": step, "rollout/success_rate": float(600 < step <= 605)} for step in range(1, 1201)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawn = learning(gather(tmp_path))
    assert "averaged to 240 points" in drawn
    found = {int(share) for share in re.findall(r"mean of the last 5 (\d+)%", drawn)}
    assert found == {0, 40, 60}  # of 0.2, 0.4, 0.6, 0.8, 1.0, and of 0.8, 0.6, 0.4, 0.2, 0


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
            "Waiting for tools",
            "80% of their time in tools",
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
                ("eval/duration_s", "Evaluation", "eval.every"),
            )
        ),
        (
            {"eval/duration_s": 6.0, "schedule/wait_for_batch_s": 2.0},
            "Evaluation",
            "it took 50%",
            "eval.tasks",
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
    """Of 10 s, 9 are waiting, training and scoring: a checkpoint of 4 s held nobody up for more
    than one."""
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


def test_the_lanes_show_what_goes_on_beside_what(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", steps=6)
    with (folder / "events.jsonl").open("a") as file:
        for lane, start, end in (
            ("checkpoint", 20.0, 21.0),
            ("publish", 30.0, 30.4),
            ("standstill", 30.3, 30.4),
        ):
            file.write(
                json.dumps(
                    {"kind": "span", "lane": lane, "start": start, "end": end, "label": "here"}
                )
                + "\n"
            )
    page = report(folder)
    tips = [
        attrs["data-tip"] for attrs in page.having("fill") if "here" in attrs.get("data-tip", "")
    ]
    assert sorted(tip.split(":")[0] for tip in tips) == [
        "checkpoints",
        "engine paused",
        "publishing",
    ]
    assert "The dark part of a publication is the engine's pause" in page.text


def test_a_conversation_keeps_every_letter_and_marks_the_interruption() -> None:
    pieces = [
        {"text": 'Well. <tool_call>{"na', "version": 3, "provenance": "SAMPLED", "num_tokens": 6},
        {
            "text": 'me": "cancel"}</tool_call><|im_end|>',
            "version": 4,
            "provenance": "SAMPLED",
            "num_tokens": 9,
        },
    ]
    opening = (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nCancel <b>it</b>.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    turns = [
        {
            "role": "environment",
            "text": opening,
            "pieces": [{"text": opening, "version": None, "num_tokens": 20}],
        },
        {"role": "assistant", "text": "".join(p["text"] for p in pieces), "pieces": pieces},
        {
            "role": "environment",
            "text": "\n<|im_start|>user\n<tool_response>\nok\n</tool_response><|im_end|>\n",
        },
    ]
    page = Page(conversation(Chosen("early success", {"reward": 1.0, "turns": turns}), opened=True))
    said = "".join(page.words)
    assert 'Well. <tool_call>{"nav3 → v4me": "cancel"}</tool_call><|im_end|>' in said
    assert "Cancel <b>it</b>." in said
    assert [attrs["class"] for attrs in page.having("turn")] == [
        "turn system",
        "turn user",
        "turn assistant",
        "turn tool",
    ]
    assert len(page.having("interruption")) == 1
    assert [attrs["data-tip"] for attrs in page.having("run")] == [
        "version 3, 6 tokens",
        "version 4, 9 tokens",
    ]
    assert len(page.having("call")) == 2  # the call goes on under the next version
    assert "<|im_start|>" not in said


def test_conversations_are_early_and_late_won_and_lost(run: Path) -> None:
    chosen = gather(run).conversations
    assert [item.why for item in chosen] == [
        "early success",
        "early failure",
        "late success",
        "late failure",
    ]
    for item in chosen:
        early, won = item.why.split()
        assert (item.record["step"] <= 10) == (early == "early")
        assert (item.record["reward"] == 1.0) == (won == "success")
        assert len(item.record["versions"]) > 1


AUDITED = (
    "Decomposition error over the run",
    "Leaks over the run",
    "log D against log S, by the route and true",
)
OFFLINE = ("log D against log S, by route", "Error by lag", "Mask and clip agreement")


def route_row(route: str, error: float, **figures: Any) -> dict[str, Any]:
    """As `audit.json` has it."""
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
    """What the audit adds to a run's folder."""
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


def test_failed_episodes_of_evaluations_are_counted_apart(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", steps=6)
    before = gather(folder)
    failure = Failure(Task("retail", "held_out", 3), stage="step", error="timed out")
    log = RunLog(folder)
    for final in (False, True):
        Recorder(Outputs(log, NoDisplay())).held_out_failure(0, failure, final=final)
    log.close()
    *_, event = RunFolder(folder).rows("events.jsonl")
    assert event["held_out"] and "episode" not in event
    found = gather(folder)
    assert found.failures == before.failures and found.num_failures == before.num_failures
    assert found.num_held_out_failures == 1 and not before.num_held_out_failures
    assert "1 episodes of evaluations failed" in report(folder).text


def test_an_audit_is_drawn_beside_the_truth(tmp_path: Path) -> None:
    folder = audit_it(fake_run(tmp_path / "run", steps=6))
    drawn = cards(write_report(folder).read_text())
    for title in (*AUDITED, *OFFLINE):
        assert "<svg" in drawn[title], title
    assert drawn[OFFLINE[0]].count("<svg") == 3  # the truth, and two routes
    assert drawn["Error by lag"].count("<circle") == 2 * 8  # once wide, once for a phone
    assert drawn["Mask and clip agreement"].count("<circle") == 2 * 3
    page = report(folder)
    assert "Not built: eager: no time." in page.text
    assert "6,000 action tokens of 6 recorded batches" in page.text
    assert "300 in all. The audit took 0.6 s and 3 MB of copies" in page.text
    assert "dropped tokens none, clipped tokens 0.060" in page.text
    found = gather(folder)
    assert (
        len(found.audited) == 40
        and found.points_seen == gather(fake_run(tmp_path / "bare", steps=6)).points_seen
    )


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


def test_without_an_audit_the_report_says_how_to_get_one(run: Path) -> None:
    assert "Not measured. --audit.share measures during training" in report(run).text


@pytest.mark.parametrize("everything", [False, True])
def test_nothing_of_an_audit_becomes_code(tmp_path: Path, everything: bool) -> None:
    folder = audit_it(fake_run(tmp_path / "run", steps=6))
    found = json.loads((folder / "audit.json").read_text())
    spoilt = poisoned(found)
    if everything:
        spoilt["routes"] += [
            dict.fromkeys(found["routes"][0], ATTACK),
            {key: [[ATTACK]] for key in found["routes"][0]},
        ]
        spoilt["routes"] += [
            ATTACK,
            {"by_lag": {ATTACK: {"error": ATTACK}}, "points": {"log_d": [ATTACK], "log_s": 3}},
        ]
        spoilt |= {"not_built": {ATTACK: ATTACK}, "points": ATTACK}
    (folder / "audit.json").write_text(json.dumps(spoilt))
    page = report(folder)
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert "img" not in {tag for tag, _ in page.elements} and "alert(2)" in page.text
    (folder / "audit.json").write_text("{")
    assert "audit.json is not a JSON object" in report(folder).text


def test_what_was_generated_is_beside_what_was_trained_on(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", steps=3)
    page = report(folder)
    drawn = cards(write_report(folder).read_text())
    assert (
        drawn["Length, generated and trained on"].count('class="line ') == 2 * 2
    )  # once wide, once for a phone
    assert "54 groups were started: 45 trained on, 5 waiting to be trained on, 4 open." in page.text
    assert "trained on 360 212 106 · 201 · 339 4.71 3 · 5 · 8 72.0% 0.72" in page.text
    assert "145 to 229 106 91 10 5 86% 95%" in page.text
    assert "Lost and kept attempts do not differ measurably in length" in page.text
    assert "6 open: neither kept nor lost." in page.text
    assert not page.having("warning")


def test_long_attempts_lost_first_are_a_warning(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", steps=3)
    places = [fake_place("retail", lost_mean=430.0), fake_place("calculator")]
    (folder / "survivors.json").write_text(json.dumps({"places": places}))
    page = report(folder)
    assert len(page.having("warning")) == 1
    assert (
        "2 times as long as kept ones (430 sampled tokens against 212, 24 attempts): long ones are"
        in page.text
    )
    assert page.text.index("retail/train: all attempts") < page.text.index(
        "calculator/train: all attempts"
    )


@pytest.mark.parametrize(
    "held, says",
    [
        (None, "Not known: `unstale report` writes survivors.json"),
        ('{"missing": "the journal failed: <b>"}', "Not known: the journal failed: <b>"),
        ('{"places": []}', "No group was started."),
        ('{"places": [{}]}', "0 groups were started: none."),
        ("[", "survivors.json is not a JSON object"),
    ],
)
def test_without_survivors_the_report_says_why(tmp_path: Path, held: str | None, says: str) -> None:
    folder = fake_run(tmp_path / "run", steps=3)
    (folder / "survivors.json").unlink() if held is None else (
        folder / "survivors.json"
    ).write_text(held)
    assert says in report(folder).text


def test_nothing_of_the_survivors_becomes_code(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", steps=3)
    place = fake_place("retail")
    spoilt = [
        poisoned(place),
        dict.fromkeys(place, ATTACK),
        {key: [[ATTACK]] for key in place},
        ATTACK,
    ]
    spoilt += [
        place | {name: dict.fromkeys(place[name], ATTACK)}
        for name in ("groups", "kinds", "contrast")
    ]
    spoilt += [
        place | {"buckets": [{"low": ATTACK}], "curve": [[ATTACK, 1, 2], ATTACK, [1], [-5, 0, 0]]}
    ]
    (folder / "survivors.json").write_text(json.dumps({"places": spoilt}))
    page = report(folder)
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert "img" not in {tag for tag, _ in page.elements} and "alert(2)" in page.text


def test_every_route_is_explained() -> None:
    assert route_about("unknown").startswith("Not known")
    for route in routes():
        config = OldLogpsConfig(route=route)
        fallback = "snapshot_old" if route == "eager" else None
        exact = is_exact({"old_logps.route": route, "old_logps.fallback": fallback}.get)
        assert exact == config.exact == route_about(route).startswith("Exact")
    assert not is_exact({"old_logps.route": "eager", "old_logps.fallback": "ewma_prox"}.get)


def test_how_to_run_it_again(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", steps=6)
    assert "unstale train retail --seed 0" in report(folder).text


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
    text = write_report(folder).read_text()
    (command,) = re.findall(r'<pre class="command">(.*?)</pre>', text)
    program, *words = shlex.split(html.unescape(command))
    assert program == "unstale"
    again = recipe_options.configure(main.parse(words))
    assert again.name != config.name and replace(again, name=config.name) == config
    marked = dict(re.findall(r'<li class="changed"><span>(.*?)</span><code>(.*?)</code>', text))
    changed = ("trainer.lr", "old_logps.route", "old_logps.beta", "ess_lr.base")
    assert {name: marked.get(name) for name in changed} == {
        "trainer.lr": "1.23456789e-05",
        "old_logps.route": "ewma_prox",
        "old_logps.beta": "0.123456789",
        "ess_lr.base": "0.987654321",
    }
    assert not marked.keys() & {"minutes", "old_logps.baseline", "task.env", "task.workers"}
    (folder / "config.json").unlink()
    assert '<pre class="command">' not in write_report(folder).read_text()


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


def test_a_run_with_old_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"credit": {"estimator": "grpo"}}')
    with pytest.raises(ConfigError, match=r"older version of unstale \(credit is now advantage\)"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("low", "high", "whole", "ticks"),
    [
        (0, 1, False, [0, 0.25, 0.5, 0.75, 1]),
        (0, 3, True, [0, 1, 2, 3]),
        (5, 5, False, [5]),
        (0, 1, True, [0, 1]),
    ],
)
def test_ticks_are_round(low: float, high: float, whole: bool, ticks: list[float]) -> None:
    assert Axis(label="", low=low, high=high, whole=whole).ticks(5) == ticks


@pytest.mark.parametrize("largest", [0.011, 0.0042, 0.5])
def test_ticks_of_shares_are_written_exactly(tmp_path: Path, largest: float) -> None:
    (tmp_path / "config.json").write_text("{}")
    rows = [{"step": step, "objective/clip_share": largest / step} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ticks = re.findall(r">([\d.]+)%</text>", str(dropped_and_clipped(gather(tmp_path))))
    wide = ticks[: ticks.index("0", 1)]  # the plot is drawn for two widths
    steps = [round(b - a, 6) for a, b in pairwise(map(float, wide))]
    assert len(steps) > 2 and len(set(steps)) == 1


def test_the_made_up_run_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    a, b = (fake_run(tmp_path / name, steps=3) for name in "ab")
    assert all((a / name).read_bytes() == (b / name).read_bytes() for name in FILES)
