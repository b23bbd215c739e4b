"""Measure the cost of the journal and of checkpoints, and the time to resume a killed run.

    python -m benchmarks.resume          # minutes; the demo's own configuration

In some steps of the demo: the journal's time per step, the disk space per sampled token, and the
cost of checkpoints and versions. For the demo killed in its middle: the seconds from `unstale train
--resume` to the first trained step. Also the same deterministic steps with and without a journal.
Writes a dated table under benchmarks/results/.
"""

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import date
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import tables
from unstale.cli import main as cli
from unstale.durability.checkpoint import Checkpoints
from unstale.durability.journal import Journal
from unstale.durability.journal import writer as journal_writer
from unstale.durability.run_folder import EVENTS
from unstale.observe.recorder import Recorder
from unstale.trainer.local import LocalTrainer

ROOT = Path(__file__).parent.parent
CHILD = "child"
"""First argument of this program in a child process that is measured."""
WARM = 2
"""Steps that are not measured, because nothing waits for anything yet."""
KILLED_AT = 7
"""Step after which the demo is killed: two after a checkpoint."""

Measured = dict[str, Any]


class Meter:
    """A meter of the journal and the checkpoints in the training process.

    It writes a line for each step.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._threads: list[Journal] = []
        self._journal_s = 0.0

    def watch(self) -> None:
        page = journal_writer._EpisodeWriter
        for function in (Journal.add_request, Journal.begin, Journal.commit, Journal.event):
            self._time(Journal, function, "loop_s", time.thread_time)
        for of_page in (page.write_piece, page.write_snapshot, page.write_outcome):
            self._time(page, of_page, "loop_s", time.thread_time)
        self._time(Checkpoints, Checkpoints.write, "save_s", time.perf_counter)
        self._time(Checkpoints, Checkpoints.write_version, "put_s", time.perf_counter)
        for wait in (Journal.publishing, Journal.checkpoint, Journal.finish):
            self._await(wait)
        enter, write = Journal.__enter__, Recorder.write

        def opened(journal: Journal) -> Journal:
            self._threads.append(journal)
            return enter(journal)

        def written(recorder: Recorder, step: int, metrics: Any) -> None:
            write(recorder, step, metrics)
            self._tell(step)

        Journal.__enter__ = opened  # type: ignore[method-assign,assignment]
        Recorder.write = written  # type: ignore[method-assign,assignment]

    def _time(
        self, owner: Any, function: Callable[..., Any], sum_: str, clock: Callable[[], float]
    ) -> None:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = clock()
            try:
                return function(*arguments, **named)
            finally:
                self._sums[sum_] += clock() - began
                self._sums[f"{sum_}_calls"] += 1

        setattr(owner, function.__name__, timed)

    def _await(self, function: Callable[..., Any]) -> None:
        name = function.__name__

        async def timed(*arguments: Any, **named: Any) -> None:
            began = time.perf_counter()
            await function(*arguments, **named)
            self._sums[f"{name}_wait_s"] += time.perf_counter() - began
            self._sums[f"{name}_wait_s_calls"] += 1

        setattr(Journal, name, timed)

    def _tell(self, step: int) -> None:
        clocks = (
            time.pthread_getcpuclockid(j._thread.ident)
            for j in self._threads
            if j._thread and j._thread.ident
        )
        thread_s = sum(time.clock_gettime(clock) for clock in clocks)
        line = {"step": step, "at": time.monotonic(), "thread_s": thread_s, **self._sums}
        with self._out.open("a") as file:
            file.write(json.dumps(line) + "\n")


def after_steps(count: int, act: Callable[[], object]) -> None:
    """Call `act` when the process has trained `count` steps."""
    step, done = LocalTrainer.step, 0

    def stepped(trainer: LocalTrainer) -> None:
        nonlocal done
        step(trainer)
        done += 1
        if done == count:
            act()

    LocalTrainer.step = stepped  # type: ignore[method-assign,assignment]


def without_journal() -> None:
    """Make the journal write nothing after the start of the run."""
    enter, opened = Journal.__enter__, 0

    def deaf(journal: Journal) -> Journal:
        nonlocal opened
        opened += 1
        if opened > 1:  # the first is the one in which the run begins
            journal.transaction = lambda records: None  # type: ignore[method-assign]
            journal.flush = lambda: None  # type: ignore[method-assign]
            journal._commit = lambda connection, records: None  # type: ignore[method-assign]
        return enter(journal)

    Journal.__enter__ = deaf  # type: ignore[method-assign,assignment]


def child(mode: str, out: Path, arguments: list[str]) -> None:
    """Run once in this process."""
    began = time.monotonic()

    def tell_and_leave() -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        out.write_text(
            json.dumps({"wall_s": time.monotonic() - began, "cpu_s": used.ru_utime + used.ru_stime})
        )
        os.kill(os.getpid(), signal.SIGKILL)

    match mode:
        case "meter":
            Meter(out).watch()
        case "kill":
            after_steps(KILLED_AT, tell_and_leave)
        case "with" | "without":
            if mode == "without":
                without_journal()
            after_steps(1, lambda: began_at.append((time.monotonic(), _cpu_s())))
            began_at: list[tuple[float, float]] = []

            def stop() -> None:
                (wall, cpu) = began_at[0]
                out.write_text(
                    json.dumps({"wall_s": time.monotonic() - wall, "cpu_s": _cpu_s() - cpu})
                )
                os.kill(os.getpid(), signal.SIGKILL)

            after_steps(1 + AB_STEPS, stop)
    cli.main(arguments)


AB_STEPS = 3
"""Number of deterministic steps, after the first, timed with and without a journal."""


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def spawn(mode: str, out: Path, *arguments: str) -> None:
    """Run a child to its end."""
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.resume", CHILD, mode, str(out), *arguments]
    with (out.with_suffix(".log")).open("w") as log:
        code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log).returncode
    if code not in (0, -signal.SIGKILL):
        raise RuntimeError(f"{' '.join(command)} ended with {code}; see {log.name}")


def steps(runs: Path, count: int) -> Measured:
    """Return measurements of `count` steps of the demo."""
    spawn("meter", runs / "demo.jsonl", *_demo(runs, "demo"), "--max_steps", str(count))
    lines = [json.loads(line) for line in (runs / "demo.jsonl").read_text().splitlines()]
    gone = [
        {name: after[name] - before.get(name, 0) for name in after}
        for before, after in pairwise(lines[WARM:-1])  # the last one ends with an evaluation
    ]
    for line in gone:
        line["barriers_s"] = line["publishing_wait_s"] + line.get("checkpoint_wait_s", 0)
        group_s = line["finish_wait_s"] / max(1, line["finish_wait_s_calls"])
        line["share"] = (line["thread_s"] + line["loop_s"] + line["barriers_s"] + group_s) / line[
            "at"
        ]
    last = lines[-1]
    with Journal.read(runs / "demo") as journal:
        sampled = journal.rows("SELECT sum(num_tokens) FROM pieces WHERE version IS NOT NULL")[0][0]
        size, sizes = journal.num_bytes, dict(_sizes(journal))
    return {
        "step_s": median(line["at"] for line in gone),
        "share": median(line["share"] for line in gone),
        "share_max": max(line["share"] for line in gone),
        "thread_s": median(line["thread_s"] for line in gone),
        "loop_s": median(line["loop_s"] for line in gone),
        "barriers_s": median(line["barriers_s"] for line in gone),
        "finish_s": last["finish_wait_s"] / last["finish_wait_s_calls"],
        "save_s": last["save_s"] / last["save_s_calls"],
        "saves": last["save_s_calls"],
        "put_s": last["put_s"] / last["put_s_calls"],
        "counted": len(gone),
        "sampled": sampled,
        "bytes": size,
        "tables": {name: held / sampled for name, held in sizes.items()},
    }


def _sizes(journal: Any) -> Iterator[tuple[str, int]]:
    """Yield the bytes of each table's pages, those of its indexes included."""
    yield from journal.rows(
        """SELECT coalesce(tbl_name, 'schema'), sum(pgsize)
        FROM dbstat LEFT JOIN sqlite_master USING (name)
        GROUP BY 1 ORDER BY 2 DESC"""
    )


def resumes(runs: Path, repeats: int) -> list[float]:
    """Return the seconds from the command to the first trained step after kills in mid-run."""
    kill_demo(runs)
    found = []
    for number in range(repeats):
        run = runs / f"again{number}"
        shutil.copytree(runs / "killed", run)
        found.append(resume_s(run))
        tables.CONSOLE.print(f"resumed: {found[-1]:.1f} s to the first trained step", markup=False)
    return found


def kill_demo(runs: Path) -> None:
    """Make the run `killed` in a folder: the demo, killed in its middle."""
    spawn("kill", runs / "killed.json", *_demo(runs, "killed"))


def resume_s(run: Path, *options: str) -> float:
    """Return the seconds from the start of the resume command to its first trained step.

    `options` are those of Python. What the command writes is in a file beside the run's folder.
    """
    command = [sys.executable, *options, "-m", "unstale", "train", "--resume", str(run)]
    log = run.with_suffix(".log")
    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        while not _has_trained_again(run / EVENTS):
            if process.poll() is not None:
                raise RuntimeError(f"{' '.join(command)} ended; see {log}")
            time.sleep(0.01)
        return time.monotonic() - began
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _has_trained_again(events: Path) -> bool:
    """Return True if a run was resumed and has then trained a step."""
    lines = events.read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    kinds = [row["kind"] for row in rows]
    after = rows[kinds.index("resumed") :] if "resumed" in kinds else []
    return any(row["kind"] == "span" and row["lane"] == "trainer" for row in after)


def apart(runs: Path, repeats: int) -> dict[str, list[Measured]]:
    """Time the same deterministic steps in turn with a journal and without."""
    found: dict[str, list[Measured]] = {"with": [], "without": []}
    for number in range(repeats):
        for mode, rows in found.items():
            out = runs / f"{mode}{number}.json"
            arguments = _demo(
                runs,
                f"{mode}{number}",
                "--minutes",
                "0",
                "--deterministic",
                "true",
                "--eval.tasks",
                "0",
            )
            spawn(mode, out, *arguments, "--checkpoint.interval", "1000")
            rows.append(json.loads(out.read_text()))
            tables.CONSOLE.print(f"{mode} a journal: {rows[-1]}", markup=False)
    return found


def _demo(runs: Path, name: str, *knobs: str) -> list[str]:
    return ["train", "retail", "--runs", str(runs), "--name", name, *knobs]


def report(
    costs: list[Measured],
    back: list[float],
    ab: dict[str, list[Measured]],
    *,
    quiet: bool = False,
) -> None:
    """Write the table of what was measured so far."""
    lines = [
        "The demo's configuration"
        + (
            f"; medians of {len(costs)} runs, of {costs[0]['counted']} steps each, the first "
            f"{WARM} not counted."
            if costs
            else "."
        ),
        "",
        "| of the demo | measured | goal |",
        "|---|---|---|",
    ]
    if costs:
        lines += _cost_rows(costs)
    if back:
        lines.append(
            f"| `--resume` to the first trained step, killed at step {KILLED_AT} | "
            f"**{median(back):.1f} s** ({min(back):.1f} to {max(back):.1f}, {len(back)} times) "
            "| 5 s |"
        )
    if costs:
        lines += _cost_notes(costs)
    if ab["with"]:
        lines += [
            "",
            f"{AB_STEPS} deterministic steps of the demo (one thread, one core at a time), by "
            f"turns, medians of {len(ab['with'])}:",
            "",
            "| | seconds | processor seconds of the trainer's process |",
            "|---|---|---|",
            *(
                f"| {mode} a journal | {_spread(rows, 'wall_s')} | {_spread(rows, 'cpu_s')} |"
                for mode, rows in ab.items()
            ),
        ]
    tables.write("resume", "What durability costs", lines, quiet=quiet)


def _cost_rows(costs: list[Measured]) -> list[str]:
    def of(name: str) -> float:
        return median(cost[name] for cost in costs)

    return [
        f"| a step | {of('step_s'):.2f} s | |",
        f"| the journal's part of it, at most | **{of('share'):.2%}** (largest of any step "
        f"{max(cost['share_max'] for cost in costs):.2%}) | < 3% |",
        f"| - processor time of the thread that writes | {1000 * of('thread_s'):.1f} ms a step | |",
        f"| - processor time on the event loop, making rows | {1000 * of('loop_s'):.1f} ms a step "
        "| |",
        f"| - waiting for commits, before a version is loaded | {1000 * of('barriers_s'):.1f} ms "
        "a step | |",
        f"| - waiting for a commit, before a group counts | {1000 * of('finish_s'):.1f} ms a "
        "group | |",
        f"| bytes on disk a sampled token | **{of('bytes') / of('sampled'):.1f}** | < 40 |",
        f"| a checkpoint, written, read back and compared | {of('save_s'):.2f} s | |",
        f"| - a step, at one every 5 | {of('save_s') / 5 / of('step_s'):.1%} of a step; training "
        "continues meanwhile | |",
        f"| a version's weights to the disk | {1000 * of('put_s'):.0f} ms | |",
    ]


def _cost_notes(costs: list[Measured]) -> list[str]:
    bytes_by_table = costs[0]["tables"].items()
    return [
        "",
        "The journal's part is counted as if its thread had the interpreter to itself whenever it "
        "works, every wait",
        "were one of the trainer's, and one group in each batch were waited for.",
        "",
        "Bytes a sampled token by table: "
        + ", ".join(f"{name} {held:.1f}" for name, held in bytes_by_table if held >= 0.05)
        + ".",
    ]


def _spread(rows: list[Measured], name: str) -> str:
    values = [row[name] for row in rows]
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


@contextmanager
def folder(runs: Path) -> Iterator[Path]:
    """Return a context with an empty folder, which is deleted unless something failed."""
    shutil.rmtree(runs, ignore_errors=True)
    yield runs
    shutil.rmtree(runs)


def main() -> None:
    if sys.argv[1:2] == [CHILD]:
        child(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max_steps", type=int, default=12)
    parser.add_argument(
        "--only-resumes", action="store_true", help="measure the time to resume, and nothing else"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs") / f"bench-resume-{date.today()}")
    chosen = parser.parse_args()
    back: list[float] = []
    ab: dict[str, list[Measured]] = {"with": [], "without": []}
    costs: list[Measured] = []
    with folder(chosen.runs.resolve()) as runs:
        for number in range(0 if chosen.only_resumes else chosen.repeats):
            costs.append(steps(runs / f"steps{number}", chosen.steps))
            tables.CONSOLE.print(f"{chosen.steps} steps: {costs[-1]}", markup=False)
            report(costs, back, ab, quiet=True)
        back = resumes(runs / "resumes", chosen.repeats)
        report(costs, back, ab, quiet=not chosen.only_resumes)
        if not chosen.only_resumes:
            ab = apart(runs / "apart", chosen.repeats)
            report(costs, back, ab)


if __name__ == "__main__":
    main()
