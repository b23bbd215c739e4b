"""Train several configurations (arms) with several seeds each, every run in a separate process.

A comparison is a folder. For each run it has `<arm>-seed<k>/` and `<arm>-seed<k>.log`. `plan.json`
lists the planned runs, `launches.jsonl` the start and end of each process, and `compare.html` has
the results. After an interruption, the same command continues the comparison.
"""

import asyncio
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from unstale.cli.failures import literal
from unstale.cli.recipe_options import configure_recipe, refuse_unknown, split_options
from unstale.config import ConfigError, RunConfig
from unstale.config.options import changed_options, stored_config
from unstale.config.routes import routes
from unstale.durability.machine import commit, lock_folder, machine, versions
from unstale.durability.run_folder import CONFIG, EVENTS, METRICS, RunFolder, dumps
from unstale.lint import check
from unstale.observe.report.compare import LAUNCHES, PLAN, ended, grouped
from unstale.observe.report.compare_page import write_comparison
from unstale.observe.report.words import duration, number, percent
from unstale.weights.child_process import cores

SHARED = (
    "runs",
    "name",
    "seed",
    "steps",
    "minutes",
    "schedule.groups_per_step",
    "schedule.group_size",
)
"""Options that must be the same in all arms, so that runs are comparable. Those of `eval` must be,
too.
"""

ON_CORES = (
    "import os, sys; os.sched_setaffinity(0, map(int, sys.argv[1].split(','))); "
    "os.execv(sys.argv[2], sys.argv[2:])"
)
"""Source of a program that executes a command on given CPU cores. A run takes its thread counts
from them.
"""

GRACE_S = 90.0
"""Seconds in which a run must write its last checkpoint after Ctrl-C."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One configuration of a comparison: its name, and the recipe options that it changes."""

    name: str
    values: Mapping[str, Any]

    @property
    def folder(self) -> str:
        """The arm's name in a form for folder names. The names of its runs begin with it."""
        return re.sub(r"[^A-Za-z0-9_.]+", "-", self.name).strip("-.")

    @classmethod
    def of_route(cls, route: str) -> "Arm":
        arm = cls.parse(f"{route}: old_logps.route={route}")
        return replace(arm, values={**arm.values, **routes()[route].requires})

    @classmethod
    def parse(cls, text: str) -> "Arm":
        """Return the arm that `name: section.option=value ...` describes.

        Raises ConfigError for another form.

        >>> Arm.parse("no reset: old_logps.route=ppo_ewma_async old_logps.beta=0.75").values
        {'old_logps.route': 'ppo_ewma_async', 'old_logps.beta': 0.75}
        """
        name, colon, changes = text.partition(":")
        name = name.strip()
        words = shlex.split(changes)
        if not colon or not name or not all("=" in word for word in words):
            raise ConfigError(
                f"an arm is written 'name: section.option=value section.option=value', got {text!r}"
            )
        with _naming(name):
            rest, values = split_options([f"--{word.removeprefix('--')}" for word in words])
            if rest:
                refuse_unknown(rest[0])
        return cls(name, values)


@contextmanager
def _naming(arm: str) -> Iterator[None]:
    """Add the name of an arm to the message of a `ConfigError` that is raised in the context."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"arm {arm!r}: {error}") from error


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned run of one arm and seed. `config` is the recipe with the options in `values`."""

    arm: str
    values: Mapping[str, Any]
    config: RunConfig

    @property
    def folder(self) -> Path:
        return self.config.runs / self.config.name

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def words(self) -> list[str]:
        """The arguments of the command `unstale` that start this run."""
        options = [f"--{name}={_word(value)}" for name, value in self.values.items()]
        return ["train", self.config.recipe, *options]

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "unstale", *self.words]


def _word(value: Any) -> str:
    """Return the value of an option in the form that the command line takes."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonPlan:
    """The runs of a comparison, in order of execution.

    All arms of one seed come before the next seed, so an interrupted comparison stays balanced.
    """

    folder: Path
    runs: tuple[Planned, ...]
    warnings: Mapping[str, Sequence[str]]
    """Name of an arm -> warnings of the linter about its configuration."""


def plan(
    arms: Sequence[Arm], seeds: int, *, recipe: str, values: Mapping[str, Any]
) -> ComparisonPlan:
    """Return all runs of a comparison, with configurations that the linter accepts.

    All arms have the options in `values` and train for the same number of steps, without the
    recipe's limit in minutes. If the recipe evaluates only at start and end, the runs are evaluated
    eight times.
    """
    _distinct(arms)
    if len(arms) < 2 or seeds < 1:
        raise ConfigError(
            f"a comparison needs at least 2 arms and 1 seed, got {len(arms)} and {seeds}"
        )
    if "minutes" in values:
        raise ConfigError(
            "minutes would stop slow arms early, and arms are compared at equal steps; "
            "give --steps instead"
        )
    config = configure_recipe(recipe, values)
    folder = config.runs / (config.name or f"compare-{config.recipe.rpartition(':')[2]}")
    every = config.eval.every or max(1, config.steps // 8)
    shared = {name: value for name, value in values.items() if name != "recipe"}
    shared |= {"minutes": 0.0, "eval.every": every, "runs": folder}
    runs: list[Planned] = []
    warnings: dict[str, list[str]] = {}
    for seed, arm in itertools.product(range(config.seed, config.seed + seeds), arms):
        changes = {**shared, **arm.values, "seed": seed, "name": f"{arm.folder}-seed{seed}"}
        with _naming(arm.name):
            runs.append(Planned(arm.name, changes, configure_recipe(recipe, changes)))
            verdict = check(runs[-1].config)
            verdict.require()
        warnings[arm.name] = [str(warning) for warning in verdict.warnings]
    return ComparisonPlan(folder=folder, runs=tuple(runs), warnings=warnings)


def _distinct(arms: Sequence[Arm]) -> None:
    """Raise ConfigError if two arms share a folder name, or an arm changes a shared option."""
    counts = Counter(arm.folder for arm in arms)
    for arm in arms:
        if not arm.folder or counts[arm.folder] > 1:
            raise ConfigError(f"arm {arm.name!r} needs a unique name of letters, digits, _ and .")
        for name in arm.values:
            if name in SHARED or name.startswith("eval."):
                raise ConfigError(
                    f"arm {arm.name!r}: {name} is the same for all arms; give it as --{name}"
                )


def compare(
    plan: ComparisonPlan, *, jobs: int = 1, command: str = "", console: Console | None = None
) -> Path:
    """Run the unfinished runs of a plan, `jobs` at a time. Return the path of the page.

    A failed run does not stop the others. Raises ConfigError before the first run if a folder has a
    run of another configuration, or if there are too few cores for `jobs`. After Ctrl-C, the
    current runs write a checkpoint, the page is written and KeyboardInterrupt is raised.
    """
    shares = _shares(jobs)
    console = console or Console(soft_wrap=True)
    left = [run for run in plan.runs if not _holds(run)]
    plan.folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(plan.folder) as lock:
        _remember(plan, command)
        finished = len(plan.runs) - len(left)
        console.print(
            f"{len(plan.runs)} runs in {plan.folder}, {finished} of them already finished"
        )
        for warning in grouped(plan.warnings):
            console.print(f"[yellow]warning:[/] {literal(warning)}", highlight=False)
        # A shell starts background jobs with SIGINT ignored, and so its runs would ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            asyncio.run(_Launcher(plan, console, shares=shares, lock=lock).run(left))
        except KeyboardInterrupt:
            done = sum(map(_holds, plan.runs))
            console.print(
                f"[yellow]stopped with {done} of {len(plan.runs)} runs finished; "
                "the same command continues:[/]"
            )
            console.print(command, markup=False, highlight=False)
            raise
        finally:
            page = write_comparison(plan.folder)
            console.print(f"comparison {page}", highlight=False)
    return page


def _shares(jobs: int) -> list[tuple[int, ...]]:
    """Return the CPU cores of each job. If there is only one job, its entry is empty: all cores."""
    if jobs == 1:
        return [()]
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(f"jobs must be 1, got {jobs}: this system cannot pin runs to cores")
    if not 1 <= jobs <= cores() // 2:
        reason = f"a run needs two cores, for trainer and engine, and there are {cores()} cores"
        raise ConfigError(f"jobs must be from 1 to {max(1, cores() // 2)}, got {jobs}: {reason}")
    usable, size = sorted(os.sched_getaffinity(0)), cores() // jobs
    return [tuple(usable[job * size : (job + 1) * size]) for job in range(jobs)]


def _holds(run: Planned) -> bool:
    """Return True if the folder has this run and it has finished.

    Raises ConfigError if the folder has a run of another configuration.
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


def _remember(plan: ComparisonPlan, command: str) -> None:
    """Merge the plan into `plan.json`. Arms and seeds of earlier commands are kept."""
    path = plan.folder / PLAN
    stored: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    runs = {run["folder"]: run for run in stored.get("runs", [])}
    runs |= {
        run.folder.name: {"arm": run.arm, "seed": run.config.seed, "folder": run.folder.name}
        for run in plan.runs
    }
    commands = list(dict.fromkeys([*stored.get("commands", []), command]))
    warnings = stored.get("warnings", {}) | plan.warnings
    merged = {"commands": commands, "runs": list(runs.values()), "warnings": warnings}
    path.write_text(dumps(merged, indent=2) + "\n")


class _Launcher:
    """Starts runs and prints the progress. Each set of cores has one run at a time."""

    def __init__(
        self, plan: ComparisonPlan, console: Console, *, shares: Sequence[Sequence[int]], lock: int
    ) -> None:
        self._plan = plan
        self._console = console
        self._shares = shares
        self._lock = lock
        self._going: dict[str, Planned] = {}
        self._took: list[float] = []
        self._left = 0
        self._facts = {
            "jobs": len(shares),
            "commit": commit(),
            "machine": machine(),
            "versions": versions(),
        }

    async def run(self, runs: Sequence[Planned]) -> None:
        self._left = len(runs)
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
            self._going[run.folder.name] = run
            command = shlex.join(["unstale", *run.words])
            self._note(run, "began", **self._facts, command=command)
            try:
                code = await self._process(run, share)
            finally:
                del self._going[run.folder.name]
            self._left -= 1
            self._took.append(time.monotonic() - began)
            self._note(run, "ended", code=code)
            state, error = ended(run.folder)
            if state == "finished":
                result = _success(run)
            else:
                reason = literal(error or f"exit code {code}, see {run.log}")
                result = f"[red]{state}[/]: {reason}"
            self._console.print(
                f"{run.folder.name}: {result} in {duration(self._took[-1])}; "
                f"{self._left} runs left, {self._eta()}",
                highlight=False,
            )
            if not self._going:
                write_comparison(self._plan.folder)

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

    def _note(self, run: Planned, kind: str, **fields: Any) -> None:
        row = {"kind": kind, "run": run.folder.name, "time": round(time.time()), **fields}
        with (self._plan.folder / LAUNCHES).open("a", encoding="utf-8") as file:
            file.write(dumps(row) + "\n")

    def _eta(self) -> str:
        if not self._took:
            return "time left unknown until the first run ends"
        mean_s = sum(self._took) / len(self._took)
        runs = max(self._left - len(self._going) / 2, 0)
        return f"about {duration(mean_s * runs / len(self._shares))} left"

    def _status(self) -> Text:
        first = len(self._plan.runs) - self._left + 1
        going = "; ".join(f"{name} {_progress(run)}" for name, run in self._going.items())
        return Text(f"run {first} of {len(self._plan.runs)}: {going}; {self._eta()}")


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
    """Rename the folder and log of an unfinished run, which starts again from the beginning."""
    if not run.folder.exists():
        return
    names = (f"{run.folder.name}-attempt{number}" for number in itertools.count(1))
    name = next(name for name in names if not run.folder.with_name(name).exists())
    run.folder.rename(run.folder.with_name(name))
    if run.log.exists():
        run.log.rename(run.log.with_name(f"{name}.log"))


def _last_row(run: Planned) -> Mapping[str, Any]:
    """Return the newest row of the metrics, read from the end of the file."""
    path = run.folder / METRICS
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 40_000))
        lines = file.read().splitlines()
    for line in reversed(lines):
        with suppress(ValueError):
            if isinstance(row := json.loads(line), dict):
                return row
    return {}


def _progress(run: Planned) -> str:
    row = _last_row(run)
    progress = f"step {row.get('step', 0)} of {run.config.steps}"
    success = row.get("rollout/success_rate")
    return progress if success is None else f"{progress}, success {percent(number(success))}"


def _success(run: Planned) -> str:
    events = RunFolder(run.folder).rows(EVENTS)
    rates = [event["success"] for event in events if event.get("kind") == "eval"]
    return f"held-out success {percent(number(rates[-1]), 1)}" if rates else "finished"
