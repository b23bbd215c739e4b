"""Test the trackers, offline and against the real libraries.

- Metrics arrive with their step, texts letter by letter, and options where the tracker keeps them.
- A tracker opened again for the same run folder continues its run.
- Prometheus fetches the newest metrics from loopback, at a port that the display names. Silent and
  broken connections neither hold the run nor its end.
- A tracker that fails is dropped with a warning, and the run continues.
- An unknown name or a missing package is one line before anything starts.
- Your own tracker is `module:factory`; a run folder alone cannot choose it.
"""

import inspect
import json
import math
import re
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from io import StringIO
from pathlib import Path
from threading import Event
from typing import Any
from urllib.request import urlopen

import pytest
from rich.console import Console

from tests.cli.test_run import quiet, small
from tests.observe.test_health import HEALTHY, Notes
from tests.support.tracker import OPENED, Memory
from tests.support.waits import LIMIT_S
from unstale import RunFailed, RunOutcome, Sink, TrackedRun
from unstale.cli import session
from unstale.cli.resume import load_config, require_named_trackers, resume_command
from unstale.config import CheckpointConfig, ConfigError, EvalConfig, TaskConfig, install
from unstale.durability.run_folder import RunFolder, RunLog
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.observe.recorder import Outputs, Recorder
from unstale.observe.trackers import Trackers, find_trackers, tracker_names

pytestmark = pytest.mark.usefixtures("forked_children")

TEXT = "<b>one</b>\n* two \N{GREEK SMALL LETTER PI}"
FINISHED = RunOutcome("finished", "all 3 steps are done")
ODD_NAMES = ("acc@1", "a,b=c", "a;b=c", "", "x\ny", "../up", "sub/name", "\u683c", "n" * 300)
OPTIONS = {"seed": 3, "trainer": {"lr": 1e-6}}


def open_tracker(name: str, folder: Path, first_step: int = 0) -> Sink:
    folder.mkdir(exist_ok=True)
    return find_trackers(name)[name](TrackedRun(folder, OPTIONS, first_step=first_step))


def write_twice(name: str, folder: Path) -> None:
    """Write steps 1 and 2 and a text, then open the tracker again and write steps 2 and 3."""
    sink = open_tracker(name, folder)
    sink.write(1, {"reward/mean": 0.25, "trainer/lr": 1e-6})
    sink.text(1, "sample", TEXT)
    sink.write(2, {"reward/mean": 0.5})
    sink.close(RunOutcome("stopped", "Ctrl-C"))
    sink = open_tracker(name, folder, 2)
    sink.write(2, {"reward/mean": 0.5})
    sink.write(3, {"reward/mean": 0.75})
    sink.close(FINISHED)


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_twice("tensorboard", tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [
        (1, 0.25),
        (2, 0.5),
        (3, 0.75),
    ]
    (sample,) = events.Tensors("sample/text_summary")
    assert sample.tensor_proto.string_val[0].decode() == (
        "    <b>one</b>\n    * two \N{GREEK SMALL LETTER PI}"
    )
    notes: list[str] = []
    sink = find_trackers("tensorboard")["tensorboard"](
        TrackedRun(tmp_path / "odd", {}, notes.append)
    )
    sink.write(1, {f"reward/{name}" if name else "": float(n) for n, name in enumerate(ODD_NAMES)})
    sink.close(FINISHED)
    events = EventAccumulator(str(tmp_path / "odd" / "tensorboard"))
    events.Reload()
    values = [events.Scalars(name)[0].value for name in events.Tags()["scalars"]]
    assert sorted(values) == list(range(len(ODD_NAMES)))  # each has a chart of its own
    assert len(notes) == len(ODD_NAMES) - 1


@pytest.mark.costly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    write_twice("mlflow", tmp_path / "run")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("unstale")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params == {"seed": "3", "trainer.lr": "1e-06"}
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert {each.step: each.value for each in history} == {1: 0.25, 2: 0.5, 3: 0.75}
    assert client.get_metric_history(run.info.run_id, "trainer/lr")[0].value == 1e-6
    notes: list[str] = []
    kept = TrackedRun(tmp_path / "run", {}, notes.append)
    sink = find_trackers("mlflow")["mlflow"](kept)
    sink.write(
        9, {f"reward/{name}" if name else "": 1.0 for name in ODD_NAMES} | {"reward/std": 2.0}
    )
    sink.close(FINISHED)
    names = set(client.get_run(run.info.run_id).data.metrics) - {"reward/mean", "trainer/lr"}
    assert len(names) == len(ODD_NAMES) + 1 and {"reward/std", "reward/sub/name"} <= names
    assert len(notes) == len(ODD_NAMES) - 1 and any(
        "'reward/acc@1', sent as" in note for note in notes
    )
    sample = client.download_artifacts(run.info.run_id, "sample/step000001.txt", str(tmp_path))
    assert Path(sample).read_text("utf-8") == TEXT
    for kind, status in (("stopped", "KILLED"), ("failed", "FAILED"), (None, "RUNNING")):
        sink = open_tracker("mlflow", tmp_path / "run", 3)
        if kind:
            sink.close(RunOutcome(kind, "no disk"))
        found = client.get_run(run.info.run_id)
        assert found.info.status == status
        assert found.data.tags["outcome"] == f"{kind or 'failed'}: no disk"


@pytest.mark.costly
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    write_twice("wandb", tmp_path / "run")
    open_tracker("wandb", tmp_path / "run").close(RunOutcome("failed", "no disk"))
    wandb.teardown()  # ends the process that writes the files
    rows, configs, ids, ends = [], {}, set(), []
    for record in wandb_records(tmp_path / "run"):
        if record.HasField("run"):
            ids.add(record.run.run_id)
            configs |= {each.key: json.loads(each.value_json) for each in record.run.config.update}
        if record.HasField("exit"):
            ends.append(record.exit.exit_code)
        if record.HasField("history"):
            items = record.history.item
            rows.append({"/".join(each.nested_key) or each.key: each.value_json for each in items})
    values = {(int(row["step"]), float(row["reward/mean"])) for row in rows if "reward/mean" in row}
    assert values == {(1, 0.25), (2, 0.5), (3, 0.75)}
    assert sorted(ends) == [0, 1, 255]
    assert ids == {(tmp_path / "run" / "wandb.id").read_text().strip()}
    assert (configs["seed"], configs["trainer"]) == (3, {"lr": 1e-6})
    (page,) = (tmp_path / "run").rglob("sample*.html")
    assert "&lt;b&gt;one&lt;/b&gt;\n* two \N{GREEK SMALL LETTER PI}" in page.read_text("utf-8")


def wandb_records(folder: Path) -> list[Any]:
    """Return the records that an offline run wrote, to be sent later."""
    from wandb.proto.wandb_internal_pb2 import Record

    return [
        Record.FromString(data)
        for file in sorted(folder.rglob("run-*.wandb"))
        for data in leveldb_records(file.read_bytes())
    ]


def leveldb_records(log: bytes) -> Iterator[bytes]:
    """Yield the records of a LevelDB log, which begins with 7 bytes of wandb's.

    Blocks have 32 KiB. A chunk has a checksum (4 bytes), its length (2) and its type: 1 is a whole
    record, 2 to 4 are the first, a middle and the last part of one.
    """
    at, record = 7, b""
    while at + 7 <= len(log):
        left = -at % 32768
        if 0 < left < 7:  # too little for a chunk: filled with zeros
            at += left
            continue
        length, kind = struct.unpack_from("<HB", log, at + 4)
        record += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def gauges(url: str) -> dict[tuple[str, str, str], float]:
    """Return the figures that a tracker serves, by name, metric and run."""
    from prometheus_client.parser import text_string_to_metric_families

    with urlopen(url, timeout=LIMIT_S) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        families = text_string_to_metric_families(answer.read().decode())
    samples = [sample for family in families for sample in family.samples]
    return {(each.name, each.labels["metric"], each.labels["run"]): each.value for each in samples}


def open_prometheus(folder: Path, port: int = 0) -> tuple[Sink, str]:
    """Open the tracker. Return it with the address that it names on the display."""
    notes: list[str] = []
    run = TrackedRun(folder, {"prometheus_port": port}, notes.append)
    sink = find_trackers("prometheus")["prometheus"](run)
    (note,) = notes
    url = note.removeprefix("metrics for Prometheus are at ")
    assert re.fullmatch(r"http://127\.0\.0\.1:[1-9]\d*/metrics", url)
    return sink, url


def test_prometheus(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    sink, url = open_prometheus(tmp_path / "first")
    assert gauges(url) == {}
    sink.write(1, {"reward/mean": 0.25, "reward/a b": 1.0, "reward/a_b": 2.0})
    sink.text(1, "sample", TEXT)
    sink.write(2, {"reward/mean": 0.5})
    assert gauges(url) == {
        ("unstale_step", "step", "first"): 2,
        ("unstale_reward_mean", "reward/mean", "first"): 0.5,
        ("unstale_reward_a_b", "reward/a b", "first"): 1,
        ("unstale_reward_a_b", "reward/a_b", "first"): 2,
    }
    sink.close(FINISHED)
    with pytest.raises(OSError, match="refused"):
        urlopen(url, timeout=LIMIT_S)


def test_silent_connections_hold_neither_prometheus_nor_its_end(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    sink, url = open_prometheus(tmp_path / "run")
    sink.write(1, {"reward/mean": 0.25})
    address = ("127.0.0.1", int(url.split(":")[2].partition("/")[0]))
    with ExitStack() as opened:
        broken = opened.enter_context(socket.create_connection(address))
        broken.sendall(b"GET")
        assert len(gauges(url)) == 2
        for _ in range(2):
            opened.enter_context(socket.create_connection(address)).sendall(b"G")
        sink.close(FINISHED)


def test_slow_connections_do_not_block_prometheus(tmp_path: Path) -> None:
    """A client that always sends a little is never silent."""
    pytest.importorskip("prometheus_client")
    sink, url = open_prometheus(tmp_path / "run")
    sink.write(1, {"reward/mean": 0.25})
    address = ("127.0.0.1", int(url.split(":")[2].partition("/")[0]))
    ended, scraped = threading.Event(), threading.Event()
    with socket.create_connection(address) as slow:

        def send() -> None:
            with suppress(OSError):
                slow.sendall(b"GET /")
                while not scraped.wait(0.05):
                    slow.sendall(b"x")
            ended.set()

        sender = threading.Thread(target=send)
        sender.start()
        assert len(gauges(url)) == 2
        assert not ended.is_set(), "the slow client was still sending"
        scraped.set()
        sender.join()
        sink.close(FINISHED)


def test_a_run_says_where_prometheus_finds_its_metrics(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    output = StringIO()
    session.train(small(tmp_path, trackers="prometheus"), console=Console(file=output))
    text = "metrics for Prometheus are at http://127.0.0.1:"
    assert re.search(rf"{re.escape(text)}\d+/metrics\n", output.getvalue())


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    sink, url = open_prometheus(tmp_path / "run")
    port = int(url.split(":")[2].partition("/")[0])
    config = small(tmp_path, trackers="prometheus", prometheus_port=port)
    with pytest.raises(ConfigError, match=rf"cannot use port {port} of 127.0.0.1: Address already"):
        session.train(config, console=quiet())
    sink.close(FINISHED)
    session.train(replace(config, name="run"), console=quiet())


def test_a_run_sends_metrics_and_a_text_to_your_own_tracker(tmp_path: Path) -> None:
    config = small(tmp_path, trackers="tests.support.tracker:make_memory")
    run = session.train(config, console=quiet())
    memory = OPENED.pop()
    assert [step for step, _ in memory.rows] == [0, 1, 2, 3] and memory.outcome == FINISHED
    for (step, sent), row in zip(memory.rows, run.metrics, strict=True):
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
        assert {"step": step, **sent} == numbers
    ((step, name, text),) = memory.texts
    assert (step, name) == (1, "sample") and text.startswith("task toy")
    assert "say yes" in text
    stored = load_config(run.folder, named={"task.env": config.task.env})
    with pytest.raises(ConfigError, match=r"names your own code as a tracker.* --trackers tests\."):
        require_named_trackers(stored, {})
    require_named_trackers(stored, {"trackers": ""})


def test_a_program_gives_trackers_as_objects_functions_and_names(tmp_path: Path) -> None:
    sink, opened = Memory(), []

    def make(run: TrackedRun) -> Sink:
        opened.append(Memory(first_step=run.first_step))
        return opened[0]

    trackers: Any = [sink, make, "tests.support.tracker:make_memory"]
    session.train(small(tmp_path, trackers=trackers, max_steps=1), console=quiet())
    for memory in (sink, *opened, OPENED.pop()):
        assert [step for step, _ in memory.rows] == [0, 1] and memory.outcome
    assert json.loads((tmp_path / "run" / "config.json").read_text())["trackers"].endswith(
        "make,tests.support.tracker:make_memory"
    )


@pytest.mark.parametrize("value", [5, object(), ["wandb", object()]])
def test_other_objects_are_refused_as_trackers(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"trackers must be a text, .* write\(\), text\(\) and"):
        small(tmp_path, trackers=value)


@pytest.mark.costly
def test_a_run_in_segments_opens_a_tracker_once(tmp_path: Path) -> None:
    """A deterministic run loads every checkpoint, as a resumed one does."""
    session.train(
        small(
            tmp_path,
            trackers="tests.support.tracker:make_memory",
            deterministic=True,
            checkpoint=CheckpointConfig(interval=1),
        ),
        console=quiet(),
    )
    (memory,) = OPENED
    OPENED.clear()
    assert [step for step, _ in memory.rows] == [0, 1, 2, 3] and memory.outcome == FINISHED


def test_a_tracker_receives_the_outcome_of_a_run_that_failed_or_was_stopped(
    tmp_path: Path,
) -> None:
    failing = small(
        tmp_path,
        task=TaskConfig(env="tests.support.toy:BrokenTasks"),
        eval=EvalConfig(tasks=0),
        trackers="tests.support.tracker:make_memory",
    )
    with pytest.raises(RunFailed, match="all 4 episodes of a batch failed") as failed:
        session.train(failing, console=quiet())
    stopped = small(
        tmp_path, name="stopped", max_steps=99, trackers="tests.support.tracker:make_interrupting"
    )
    with pytest.raises(KeyboardInterrupt):
        session.train(stopped, console=quiet())
    outcomes = [memory.outcome for memory in OPENED]
    OPENED.clear()
    assert outcomes == [
        RunOutcome("failed", str(failed.value)),
        RunOutcome("stopped", f"to continue: {resume_command(tmp_path / 'stopped')}"),
    ]


def test_a_tracker_receives_the_outcome_of_a_run_whose_policy_cannot_be_saved(
    tmp_path: Path,
) -> None:
    config = small(
        tmp_path,
        max_steps=1,
        eval=EvalConfig(tasks=0),
        trackers="tests.support.tracker:make_obstructing",
    )
    with pytest.raises(RunFailed, match=r"the model cannot be written to \S+policy: ") as failed:
        session.train(config, console=quiet())
    output = StringIO()
    with pytest.raises(KeyboardInterrupt):
        session.train(replace(config, max_steps=99, name="stopped"), console=Console(file=output))
    assert "the policy was not saved: the model cannot be written" in output.getvalue()
    outcomes = [memory.outcome for memory in OPENED]
    OPENED.clear()
    told = f"to continue: {resume_command(tmp_path / 'stopped')}"
    assert outcomes == [RunOutcome("failed", str(failed.value)), RunOutcome("stopped", told)]
    for name, reason in (("run", "failed"), ("stopped", "Ctrl-C")):
        *_, last = RunFolder(tmp_path / name).rows("events.jsonl")
        assert (last["kind"], last["reason"]) == ("stopped", reason)
        assert (tmp_path / name / "report.html").is_file()


def test_a_tracker_receives_the_outcome_of_a_run_whose_engine_cannot_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = EmbeddedEngine.close

    async def fail(engine: EmbeddedEngine) -> None:
        await close(engine)
        raise error

    monkeypatch.setattr(EmbeddedEngine, "close", fail)
    config = small(
        tmp_path,
        max_steps=1,
        eval=EvalConfig(tasks=0),
        deterministic=True,
        trackers="tests.support.tracker:make_memory",
    )
    error: Exception = RuntimeError("the process does not answer")
    with pytest.raises(RunFailed, match="the process does not answer"):
        session.train(config, console=quiet())
    error = LookupError("a mistake")
    with pytest.raises(LookupError, match="a mistake"):
        session.resume(tmp_path / "run", replace(config, max_steps=2), console=quiet())
    outcomes = [memory.outcome for memory in OPENED]
    OPENED.clear()
    assert [outcome and outcome.kind for outcome in outcomes] == ["failed", "failed"]
    *_, last = RunFolder(tmp_path / "run").rows("events.jsonl")
    assert (last["kind"], last["reason"]) == ("stopped", "failed")


def test_a_tracker_of_a_resumed_run_is_told_its_first_step(tmp_path: Path) -> None:
    config = small(tmp_path, trackers="tests.support.tracker:make_memory")
    run = session.train(config, console=quiet())
    session.resume(run.folder, replace(config, max_steps=4), console=quiet())
    first, second = OPENED
    OPENED.clear()
    assert (first.first_step, second.first_step) == (0, 3)
    assert [step for step, _ in second.rows] == [3, 4]


def test_only_finite_numbers_are_sent() -> None:
    memory = Memory()
    trackers = Trackers({"memory": memory})
    trackers.write(1, {"step": 1, "a": 2, "gap": None, "bins": {"0": 1}, "nan": float("nan")})
    trackers.close(FINISHED)
    assert memory.rows == [(1, {"a": 2.0})]


def test_a_tracker_that_fails_is_dropped_with_a_warning(tmp_path: Path) -> None:
    log, display = RunLog.create(tmp_path, {}), Notes()
    broken, memory = Memory(fails=True), Memory()
    recorder = Recorder(Outputs(log, display, Trackers({"broken": broken, "memory": memory})))
    for step in range(1, 4):
        recorder.write(step, HEALTHY)
    recorder.close(FINISHED)
    log.close()
    assert len(memory.rows) == 3
    assert display.notes == [
        "warning: broken gets no more metrics, it failed: OSError: no route to \x1b[2Jhost"
    ]
    (event,) = RunFolder(tmp_path).rows("events.jsonl")
    assert (event["kind"], event["tracker"]) == ("tracker_failed", "broken")


@dataclass
class Slow(Memory):
    """A tracker whose server answers nothing until `released`."""

    released: threading.Event = field(default_factory=threading.Event)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        assert self.released.wait(LIMIT_S)
        super().write(step, metrics)


def test_a_slow_tracker_does_not_delay_training(tmp_path: Path) -> None:
    log, display, slow = RunLog.create(tmp_path, {}), Notes(), Slow()
    recorder = Recorder(Outputs(log, display, Trackers({"slow": slow})))
    for step in range(1, 4):
        recorder.write(step, HEALTHY)
    assert [row["step"] for row in RunFolder(tmp_path).metrics()] == [1, 2, 3]
    assert not slow.rows
    slow.released.set()
    recorder.close(FINISHED)
    log.close()
    assert [step for step, _ in slow.rows] == [1, 2, 3] and slow.outcome == FINISHED
    assert not display.notes


class Closing(Memory):
    """A tracker that counts how often it is closed, and waits there if it is asked to."""

    def __init__(self, *, waits: Event | None = None, **rest: Any) -> None:
        super().__init__(**rest)
        self.outcomes: list[RunOutcome] = []
        self._waits = waits

    def close(self, outcome: RunOutcome) -> None:
        self.outcomes.append(outcome)
        if self._waits:
            self._waits.wait()


def test_a_tracker_that_failed_is_closed_once() -> None:
    broken, sound = Closing(fails=True), Closing()
    trackers = Trackers({"broken": broken, "sound": sound})
    failed: list[str] = []
    while not failed:
        trackers.write(1, HEALTHY)
        failed += [name for name, _ in trackers.failures()]
    trackers.write(2, HEALTHY)
    trackers.close(FINISHED)
    assert failed == ["broken"] and not list(trackers.failures())
    (outcome,) = broken.outcomes
    assert outcome.kind == "failed" and "later metrics were not sent" in outcome.detail
    assert sound.outcomes == [FINISHED]


def test_a_tracker_whose_last_call_failed_is_not_closed_as_finished() -> None:
    broken = Closing(fails=True)
    trackers = Trackers({"broken": broken})
    trackers.write(1, HEALTHY)
    trackers.close(FINISHED)
    assert [outcome.kind for outcome in broken.outcomes] == ["failed"]


def test_a_tracker_that_does_not_end_is_not_waited_for() -> None:
    end = Event()
    late = Closing(waits=end)
    trackers = Trackers({"late": late})
    trackers.write(1, HEALTHY)
    trackers.close(FINISHED, timeout_s=0.2)
    ((name, error),) = trackers.failures()
    assert name == "late" and isinstance(error, TimeoutError) and late.rows
    end.set()
    assert inspect.signature(Trackers.close).parameters["timeout_s"].default < math.inf


@pytest.mark.parametrize(
    "option, says",
    [
        ("wandbb", r"trackers cannot hold 'wandbb'; did you mean wandb\?"),
        (
            "tensorboard,x",
            r"cannot hold 'x'; there are: mlflow, prometheus, tensorboard, wandb, MODULE:FACT",
        ),
        ("no_module:x", "x cannot be imported: ModuleNotFoundError: No module named 'no_module'"),
        ("json:x", "x cannot be imported: AttributeError: module 'json' has no attribute 'x'"),
    ],
)
def test_an_unknown_tracker_is_refused_before_anything_starts(
    tmp_path: Path, option: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        session.train(small(tmp_path, trackers=option), console=quiet())
    assert not (tmp_path / "run").exists()


def unreachable(run: TrackedRun) -> Sink:
    run.store_id("unreachable", "7")
    (run.folder / "wandb-1").mkdir()
    (run.folder / "wandb-1" / "debug.log").touch()
    raise ConnectionError("no route to host")


def test_a_tracker_that_cannot_start_leaves_the_name_of_the_run_free(tmp_path: Path) -> None:
    config = small(tmp_path, trackers=f"{__name__}:unreachable")
    says = (
        r"unreachable cannot start: ConnectionError: no route to host "
        r"\(.*test_trackers.py, line \d+, in unreachable"
    )
    with pytest.raises(ConfigError, match=says):
        session.train(config, console=quiet())
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").touch()
    with pytest.raises(ConfigError, match=says):
        session.train(config, console=quiet())
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]
    assert session.train(replace(config, trackers=""), console=quiet()).metrics


@pytest.mark.parametrize("name", tracker_names())
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = import_module(f"unstale.observe.trackers.{name}").PACKAGE
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=re.escape(install(name))):
        find_trackers(name)
