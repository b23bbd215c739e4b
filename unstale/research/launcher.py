"""Execution of the planned runs of a comparison or a study, each in a separate process.

`launches.jsonl` in the plan's folder has the start and end of each process. After an interruption,
the same command continues.
"""

import asyncio
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from rich.live import Live
from rich.text import Text

from unstale.analysis.report.compare import LAUNCHES, ended, grouped
from unstale.analysis.report.compare_tables import write_comparison
from unstale.cli.failures import literal
from unstale.config import ConfigError
from unstale.config.options import changed_options, stored_config
from unstale.durability.console import Console
from unstale.durability.machine import commit, lock_folder, machine, versions
from unstale.durability.run_folder import (
    CONFIG,
    EVENTS,
    METRICS,
    RunFolder,
    disk_size,
    dumps,
    read_jsonl,
)
from unstale.observe.held_out import held_out
from unstale.observe.words import duration, number, percent
from unstale.research.compare import ComparisonPlan, Planned
from unstale.weights.child_process import cores

ON_CORES = (
    "import os, sys; os.sched_setaffinity(0, map(int, sys.argv[1].split(','))); "
    "os.execv(sys.argv[2], sys.argv[2:])"
)
"""Source code of a program that runs a command on the given CPU cores. The run derives its number
of threads from them.
"""

GRACE_S = 90.0
"""Seconds within which a run must write its last checkpoint after Ctrl-C."""


class Plan(Protocol):
    """An interface that the plans of a comparison and of a study (several
    comparisons) implement.
    """

    @property
    def folder(self) -> Path: ...

    @property
    def comparisons(self) -> Sequence[ComparisonPlan]: ...

    def remember(self, command: str) -> None:
        """Write the plan into its folder. Runs that earlier commands planned are kept."""
        ...

    def write(self) -> Path:
        """Write the results of the finished runs. Return the path of the main tables."""
        ...


def compare(
    plan: Plan, *, jobs: int = 1, command: str = "", console: Console | None = None
) -> Path:
    """Run the unfinished runs of a plan, `jobs` at a time. Return the path of the tables.

    All runs of one seed come before the next seed, so the results of an interrupted comparison can
    be compared. A failed run does not stop the others. Raises ConfigError before the first run if a
    folder has a run of another configuration, or if there are too few cores for `jobs`. After
    Ctrl-C, the current runs write a checkpoint, the results are written and KeyboardInterrupt is
    raised.
    """
    plans = plan.comparisons
    runs = sorted((run for each in plans for run in each.runs), key=lambda run: run.config.seed)
    shares = _shares(jobs, runs)
    console = console or Console(soft_wrap=True)
    left = [run for run in runs if not _holds(run)]
    plan.folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(plan.folder) as lock:
        plan.remember(command)
        finished = len(runs) - len(left)
        console.print(f"{len(runs)} runs in {plan.folder}, {finished} of them already finished")
        for warning in _warnings(plans):
            console.print(f"[yellow]warning:[/] {literal(warning)}", highlight=False)
        # A shell starts background jobs with SIGINT ignored, and so its runs would ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        launcher = _Launcher(plan, console, shares=shares, lock=lock)
        try:
            asyncio.run(launcher.run(left, finished))
        except KeyboardInterrupt:
            done = sum(map(_holds, runs))
            console.print(
                f"[yellow]stopped with {done} of {len(runs)} runs finished; "
                "the same command continues:[/]"
            )
            console.print(command, markup=False, highlight=False)
            raise
        finally:
            tables = plan.write()
            console.print(f"comparison {tables}", highlight=False)
    return tables


def _warnings(plans: Sequence[ComparisonPlan]) -> list[str]:
    """Return the linter's warnings, each once and with the configurations that it is about."""
    arms: dict[str, list[str]] = {}
    for plan in plans:
        for arm, texts in plan.warnings.items():
            arms[arm] = list(dict.fromkeys([*arms.get(arm, []), *texts]))
    return grouped(arms)


def _took(plans: Sequence[ComparisonPlan]) -> list[float]:
    """Return the durations in seconds of the plan's runs that earlier commands have finished."""
    took = []
    for plan in plans:
        names = {run.folder.name for run in plan.runs}
        began: dict[str, float] = {}
        for row in read_jsonl(plan.folder / LAUNCHES):
            if row["run"] in names and row["kind"] == "began":
                began[row["run"]] = row["time"]
            elif row["run"] in began and row.get("code") == 0:
                took.append(row["time"] - began[row["run"]])
    return took


def _shares(jobs: int, runs: Sequence[Planned]) -> list[tuple[int, ...]]:
    """Return the CPU cores of each of `jobs` concurrent runs.

    With one job, its tuple is empty, which stands for all cores.
    """
    if jobs == 1:
        return [()]
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(f"jobs must be 1, got {jobs}: this system cannot pin runs to cores")
    one_core = all(run.config.deterministic for run in runs)
    most = cores() if one_core else cores() // 2
    if not 1 <= jobs <= most:
        need = "a run needs two cores, for trainer and engine"
        if one_core:
            need = "a deterministic run needs a core"
        reason = f"{need}, and there are {cores()} cores"
        raise ConfigError(f"jobs must be from 1 to {max(1, most)}, got {jobs}: {reason}")
    usable, size = sorted(os.sched_getaffinity(0)), cores() // jobs
    return [tuple(usable[job * size : (job + 1) * size]) for job in range(jobs)]


def _holds(run: Planned) -> bool:
    """Return True if the folder of a planned run contains this run, finished.

    Raises ConfigError if it contains a run of another configuration.
    """
    if not (run.folder / CONFIG).is_file():
        return False
    stored = stored_config(RunFolder(run.folder).config(), str(run.folder / CONFIG))
    differences = [
        f"{name} is {old} and would be {new}"
        for name, (old, new) in changed_options(stored, run.config).items()
        if name not in ("runs", "name")
    ]
    if differences:
        raise ConfigError(
            f"{run.folder} holds another run: {', '.join(differences)}; "
            "choose another --name, or remove it"
        )
    return ended(run.folder)[0] == "finished"


class _Launcher:
    """A launcher of runs that prints their progress. Each set of cores executes
    one run at a time.
    """

    def __init__(
        self, plan: Plan, console: Console, *, shares: Sequence[Sequence[int]], lock: int
    ) -> None:
        self._folder = plan.folder
        self._console = console
        self._shares = shares
        self._lock = lock
        self._going: dict[str, Planned] = {}
        self._took = _took(plan.comparisons)
        self._all = self._left = 0
        self._is_warned_of_disk = False
        self._facts = {
            "jobs": len(shares),
            "commit": commit(),
            "machine": machine(),
            "versions": versions(),
        }

    async def run(self, runs: Sequence[Planned], finished: int) -> None:
        """Execute the given runs. `finished` is the number of runs that earlier commands have
        finished.
        """
        self._left = len(runs)
        self._all = finished + self._left
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGTERM, signal.raise_signal, signal.SIGINT
        )
        pending = iter(runs)
        # A run may need all cores, so the display is refreshed rarely.
        with Live(
            console=self._console,
            get_renderable=self._status,
            refresh_per_second=0.5,
            transient=True,
        ):
            async with asyncio.TaskGroup() as workers:
                for share in self._shares:
                    workers.create_task(self._work(pending, share))

    async def _work(self, pending: Iterator[Planned], share: Sequence[int]) -> None:
        for run in pending:
            _set_aside(run)
            began = time.monotonic()
            name = self._name(run)
            self._going[name] = run
            command = shlex.join(["unstale", *run.words])
            self._note(run, "began", **self._facts, command=command)
            try:
                code = await self._process(run, share)
            finally:
                del self._going[name]
            self._left -= 1
            self._took.append(time.monotonic() - began)
            self._note(run, "ended", code=code)
            state, error = ended(run.folder)
            if state == "finished":
                result = _success(run)
                self._warn_of_disk(run)
            else:
                reason = literal(error or f"exit code {code}, see {run.log}")
                result = f"[red]{state}[/]: {reason}"
            self._console.print(
                f"{name}: {result} in {duration(self._took[-1])}; "
                f"{self._left} runs left, {self._eta()}",
                highlight=False,
            )
            if not self._going:
                write_comparison(run.folder.parent)

    def _name(self, run: Planned) -> str:
        """Return the path of a run's folder, relative to the plan's folder.

        In a study, it begins with the name of the setting.
        """
        return str(run.folder.relative_to(self._folder))

    async def _process(self, run: Planned, share: Sequence[int]) -> int:
        pinned = [sys.executable, "-c", ON_CORES, ",".join(map(str, share))] if share else []
        with run.log.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *pinned,
                *run.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(self._lock,),
            )
            try:
                return await process.wait()
            except asyncio.CancelledError:
                await _end(process)
                raise

    def _warn_of_disk(self, run: Planned) -> None:
        """Print a warning, once, if the runs left would not fit on the disk at a finished run's
        size.
        """
        if self._is_warned_of_disk:
            return
        each = disk_size(run.folder) / 1e9
        free = shutil.disk_usage(self._folder).free / 1e9
        if each * self._left > free:
            self._is_warned_of_disk = True
            self._console.print(
                f"[yellow]warning:[/] a run takes {each:.2f} GB of disk, so the {self._left} runs "
                f"left need {each * self._left:.2f} GB, and {free:.2f} GB are free: remove "
                "checkpoints/ and versions/ of finished runs, which the tables do not read",
                highlight=False,
            )

    def _note(self, run: Planned, kind: str, **fields: Any) -> None:
        row = {"kind": kind, "run": run.folder.name, "time": round(time.time()), **fields}
        with (run.folder.with_name(LAUNCHES)).open("a", encoding="utf-8") as file:
            file.write(dumps(row) + "\n")

    def _eta(self) -> str:
        if not self._took:
            return "time left unknown until the first run ends"
        mean_s = sum(self._took) / len(self._took)
        runs = max(self._left - len(self._going) / 2, 0)
        return f"about {duration(mean_s * runs / len(self._shares))} left"

    def _status(self) -> Text:
        ended = self._all - self._left
        going = "".join(f"{name} {_progress(run)}; " for name, run in self._going.items())
        return Text(f"{ended} of {self._all} runs have ended; {going}{self._eta()}")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Interrupt a run, which then writes a checkpoint. After `GRACE_S`, kill its process group."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
        try:
            async with asyncio.timeout(GRACE_S):
                await process.wait()
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def _set_aside(run: Planned) -> None:
    """Rename the folder and the log of an unfinished run that will be started from
    the beginning.
    """
    if not run.folder.exists():
        return
    names = (f"{run.folder.name}-attempt{number}" for number in itertools.count(1))
    name = next(name for name in names if not run.folder.with_name(name).exists())
    run.folder.rename(run.folder.with_name(name))
    if run.log.exists():
        run.log.rename(run.log.with_name(f"{name}.log"))


def _last_row(run: Planned) -> Mapping[str, Any]:
    """Return the newest row of a run's metrics. Empty if there is none.

    It is read from the end of the file.
    """
    path = run.folder / METRICS
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 40_000))
        lines = file.read().splitlines()
    for line in reversed(lines):
        with suppress(ValueError, RecursionError):
            if isinstance(row := json.loads(line), dict):
                return row
    return {}


def _progress(run: Planned) -> str:
    row = _last_row(run)
    progress = f"step {row.get('step', 0)} of {run.config.max_steps}"
    success = row.get("rollout/success_rate")
    return progress if success is None else f"{progress}, success {percent(number(success))}"


def _success(run: Planned) -> str:
    events = RunFolder(run.folder).rows(EVENTS)
    evaluations = held_out(event for event in events if event.get("kind") == "eval")
    return f"held-out success {evaluations[-1]}" if evaluations else "finished"
