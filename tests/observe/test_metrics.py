"""Test the files of a run folder.

- Files are valid JSON: non-finite numbers are null, numpy and torch scalars are numbers.
- A line is on disk when the call returns. A file cut at any byte is read up to its last whole line.
- Control characters are escaped in every file, so that showing it cannot steer a terminal.
- A folder that already holds a run is refused and unchanged.
- Reading, live display and report do not import torch.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fake_run import FakeClock, fake_config
from unstale.config import ConfigError
from unstale.durability.run_folder import BrokenFile, RunFolder, RunLog, dumps, read_jsonl


def test_non_finite_numbers_are_null() -> None:
    written = dumps(
        {"a": float("nan"), "b": [float("inf"), -float("inf")], "c": np.float32("nan"), "d": 1e-300}
    )
    assert json.loads(written, parse_constant=pytest.fail) == {
        "a": None,
        "b": [None, None],
        "c": None,
        "d": 1e-300,
    }


def test_scalars_of_other_libraries_are_numbers() -> None:
    assert json.loads(dumps({"a": np.int64(3), "b": torch.tensor(0.5), "c": np.bool_(True)})) == {
        "a": 3,
        "b": 0.5,
        "c": True,
    }
    with pytest.raises(TypeError, match="object cannot be written"):
        dumps({"a": object()})


def test_the_configuration_is_written_whole(tmp_path: Path) -> None:
    RunLog.create(tmp_path / "run", fake_config()).close()
    config = RunFolder(tmp_path / "run").config()
    assert config["schedule"] == {
        "max_staleness": 2,
        "groups_per_step": 16,
        "group_size": 8,
        "lookahead_window": 1,
        "resampled_groups": 0,
        "adaptive_window": False,
        "pin_versions": False,
    }
    assert config["runs"] == "runs"


def test_a_line_is_on_disk_when_the_call_returns(tmp_path: Path) -> None:
    clock = FakeClock()
    log = RunLog.create(tmp_path, clock=clock)
    clock.now = 2.5
    log.write(1, {"rollout/success_rate": 0.5})
    log.event("stopped", reason="Ctrl-C")
    folder = RunFolder(tmp_path)
    assert folder.metrics() == [{"step": 1, "time_s": 2.5, "rollout/success_rate": 0.5}]
    assert list(folder.rows("events.jsonl")) == [
        {"time": 2.5, "kind": "stopped", "reason": "Ctrl-C"}
    ]
    assert folder.gaps == []
    log.close()


def test_a_span_is_recorded_also_when_its_block_raises(tmp_path: Path) -> None:
    clock = FakeClock(100.0)
    with RunLog.create(tmp_path, clock=clock) as log:
        clock.now = 101.0
        with pytest.raises(RuntimeError), log.span("trainer", "step 1"):
            clock.now = 103.5
            raise RuntimeError
    (span,) = read_jsonl(tmp_path / "events.jsonl")
    assert span == {
        "time": 3.5,
        "kind": "span",
        "lane": "trainer",
        "start": 1.0,
        "end": 3.5,
        "label": "step 1",
    }


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "events.jsonl"])
def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("kept")
    with pytest.raises(ConfigError, match=f"already holds a run \\({name}\\)") as caught:
        RunLog.create(tmp_path)
    assert "\n" not in str(caught.value)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "kept"}


def test_a_file_is_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        RunLog.create(tmp_path / "run")


def test_an_empty_folder_may_become_a_run(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    RunLog.create(tmp_path).close()
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.costly
@given(cut=st.integers(min_value=0, max_value=200), texts=st.lists(st.text(max_size=8), max_size=6))
def test_a_file_cut_at_any_byte_is_read_up_to_its_last_whole_line(
    tmp_path_factory: pytest.TempPathFactory, cut: int, texts: list[str]
) -> None:
    whole = [(dumps({"text": text}) + "\n").encode("utf-8", "replace") for text in texts]
    data = b"".join(whole)[:cut]
    file = tmp_path_factory.mktemp("cut") / "events.jsonl"
    file.write_bytes(data)
    complete, at = 0, 0
    for line in whole:
        at += len(line)
        complete += len(data) >= at - 1  # all but the line's end
    assert len(list(read_jsonl(file))) == complete


def test_only_the_last_line_may_be_broken(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2\n{"step": 3}\n')
    rows = read_jsonl(file)
    assert next(rows) == {"step": 1}
    with pytest.raises(BrokenFile, match=r"metrics\.jsonl, line 2"):
        next(rows)


def test_a_broken_line_in_the_middle_is_a_stated_gap(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n[2]\n{"step": 3}\n')
    folder = RunFolder(tmp_path)
    assert folder.metrics() == [{"step": 1}]
    assert folder.gaps == [
        "metrics.jsonl, line 2 is not a JSON object; what follows it was not read"
    ]


def test_missing_files_are_stated_gaps(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    folder = RunFolder(tmp_path)
    assert (folder.config(), list(folder.rows("events.jsonl")), folder.error()) == ({}, [], "")
    assert folder.gaps == ["config.json is missing", "events.jsonl is missing"]


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        RunFolder(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="is not a run folder"):
        RunFolder(tmp_path)


def test_control_characters_are_escaped_in_every_file(tmp_path: Path) -> None:
    text = "\x1b[2J\x9b2J\x7f\u202e"
    with RunLog.create(tmp_path / "run", {"name": text}) as log:
        log.event("failed", error=text)
        log.failed(f"ValueError: {text}\n")
    for file in (tmp_path / "run").iterdir():
        content = file.read_text("utf-8")
        assert not set(text) - set("[2J") & set(content), file
    assert next(RunFolder(tmp_path / "run").rows("events.jsonl"))["error"] == text
    assert RunFolder(tmp_path / "run").error() == r"ValueError: \x1b[2J\x9b2J\x7f\u202e"


def test_watching_needs_no_torch() -> None:
    code = (
        "import sys, unstale.observe.trackers, unstale.observe.live, "
        "unstale.analysis.report.compare_tables, unstale.observe.recorder; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
