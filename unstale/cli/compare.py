"""Arms of one experiment, several seeds each: ordinary runs in processes of their own, one after another.

A comparison is a folder: `<arm>-seed<k>/` and `<arm>-seed<k>.log` for every run, `plan.json` with what was asked for,
`launches.jsonl` with what was started when and beside how many others, and the page (`observe/compare.py`). Whatever
ended it, the same command goes on with it.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from unstale.config import ConfigError, RunConfig
from unstale.config.routes import routes
from unstale.durability.machine import commit, lock_folder, machine, versions
from unstale.durability.run_folder import CONFIG, EVENTS, METRICS, RunFolder, dumps, plain
from unstale.lint import check
from unstale.observe.report.compare import LAUNCHES, PLAN, ended, grouped
from unstale.observe.report.compare_page import write_comparison
from unstale.observe.report.sections import flatten
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
"""Knobs that an arm cannot have of its own, nor any of `eval`: they make the runs comparable."""

ON_CORES = "import os, sys; os.sched_setaffinity(0, map(int, sys.argv[1].split(','))); os.execv(sys.argv[2], sys.argv[2:])"
"""Becomes the command that follows, on the cores named first. A run sizes itself by the cores that it may use."""

GRACE_S = 90.0
"""Seconds that a run has to save itself after Ctrl-C."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to run the recipe. `words` are knobs as the command line takes them; `folder` begins its runs' names."""

    name: str
    words: tuple[str, ...]

    @property
    def folder(self) -> str:
        return re.sub(r"[^A-Za-z0-9_.]+", "-", self.name).strip("-.")

    @classmethod
    def of_route(cls, route: str) -> "Arm":
        words = [f"--old_logps.route={route}"]
        if route in routes():
            required = routes()[route].requires
            words += [f"--{name}={str(value).lower()}" for name, value in required.items()]
        return cls(route, tuple(words))

    @classmethod
    def parse(cls, text: str) -> "Arm":
        """
        >>> Arm.parse("no reset: old_logps.route=ppo_ewma_async old_logps.beta=0.75").words
        ('--old_logps.route=ppo_ewma_async', '--old_logps.beta=0.75')
        """
        name, colon, changes = text.partition(":")
        words = shlex.split(changes)
        if not colon or not name.strip() or not all("=" in word for word in words):
            raise ConfigError(
                f"an arm is written 'name: section.knob=value section.knob=value', got {text!r}"
            )
        return cls(name.strip(), tuple(f"--{word.removeprefix('--')}" for word in words))


@dataclass(frozen=True, slots=True)
class Planned:
    """One run: an arm and a seed. `words` make its command, `config` is what they come to."""

    arm: str
    words: tuple[str, ...]
    config: RunConfig

    @property
    def folder(self) -> Path:
        return self.config.runs / self.config.name

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "unstale", "train", self.config.recipe, *self.words]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonPlan:
    """A comparison. `runs` stand in the order in which they are run: cut short, every arm has as many seeds (or one
    more)."""

    folder: Path
    runs: tuple[Planned, ...]
    warnings: Mapping[str, Sequence[str]]
    """Of the linter, by arm."""


def plan(
    arms: Sequence[Arm],
    seeds: int,
    *,
    base: Sequence[str],
    configure: Callable[[Sequence[str]], RunConfig],
) -> ComparisonPlan:
    """Every run, each configuration checked. `configure` turns words into a configuration of the recipe.

    All runs train the same number of steps: the recipe's limit in minutes is switched off. Where it evaluates only at
    the ends, held-out success is measured eight times on the way.
    """
    _distinct(arms)
    if len(arms) < 2 or seeds < 1:
        raise ConfigError(
            f"a comparison needs at least 2 arms and 1 seed, got {len(arms)} and {seeds}"
        )
    if any(knob(word) == "minutes" for word in base):
        raise ConfigError(
            "a comparison is at equal steps, and minutes would cut slow arms short; give --steps instead"
        )
    told = configure(base)
    folder = told.runs / (told.name or f"compare-{told.recipe}")
    every = told.eval.every or max(1, told.steps // 8)
    base = [word for word in base if knob(word) not in ("runs", "name", "seed", "eval.every")]
    runs, warnings = [], {}
    for seed, arm in itertools.product(range(told.seed, told.seed + seeds), arms):
        words = (*base, *arm.words, "--minutes=0", f"--eval.every={every}")
        words += (f"--seed={seed}", f"--runs={folder}", f"--name={arm.folder}-seed{seed}")
        try:
            runs.append(Planned(arm.name, words, configure(words)))
            verdict = check(runs[-1].config)
            verdict.require()
        except ConfigError as error:
            raise ConfigError(f"arm {arm.name!r}: {error}") from error
        warnings[arm.name] = [str(warning) for warning in verdict.warnings]
    return ComparisonPlan(folder=folder, runs=tuple(runs), warnings=warnings)


def knob(word: str) -> str:
    """
    >>> knob("--eval.every=5")
    'eval.every'
    """
    return word.removeprefix("--").split("=")[0]


def _distinct(arms: Sequence[Arm]) -> None:
    """Every arm has a folder name of its own and leaves alone what makes the runs comparable."""
    taken = Counter(arm.folder for arm in arms)
    for arm in arms:
        if not arm.folder or taken[arm.folder] > 1:
            raise ConfigError(
                f"arm {arm.name!r} needs a name of its own, in letters, digits, _ and ."
            )
        for name in map(knob, arm.words):
            if name in SHARED or name.startswith("eval."):
                raise ConfigError(
                    f"arm {arm.name!r}: {name} is the same for all arms; give it as --{name}"
                )


def compare(
    plan: ComparisonPlan, *, jobs: int = 1, command: str = "", console: Console | None = None
) -> Path:
    """Run whatever of the plan has not finished, `jobs` at a time, and write the page: its path.

    One failed run does not stop the others. Raises `ConfigError` before anything runs when a folder holds a run of
    another configuration, or there are too few cores for so many jobs; after Ctrl-C the runs in progress have saved
    themselves, the page is written, and `KeyboardInterrupt` goes on.
    """
    shares = _shares(jobs)
    console = console or Console(soft_wrap=True)
    left = [run for run in plan.runs if not _holds(run)]
    plan.folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(plan.folder) as lock:
        _remember(plan, command)
        console.print(
            f"{len(plan.runs)} runs in {plan.folder}, {len(plan.runs) - len(left)} of them finished before"
        )
        for warning in grouped(plan.warnings):
            console.print(f"[yellow]warning:[/] {escape(warning)}", highlight=False)
        signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # a shell's background job, and its runs, ignore it
        try:
            asyncio.run(_Launcher(plan, console, shares=shares, lock=lock).run(left))
        except KeyboardInterrupt:
            done = sum(map(_holds, plan.runs))
            console.print(
                f"[yellow]stopped with {done} of {len(plan.runs)} runs finished; the same command goes on:[/]"
            )
            console.print(command, markup=False, highlight=False)
            raise
        finally:
            page = write_comparison(plan.folder)
            console.print(f"comparison {page}", highlight=False)
    return page


def _shares(jobs: int) -> list[tuple[int, ...]]:
    """The cores of each job. One job has the machine to itself, and its share is left empty."""
    if jobs == 1:
        return [()]
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError(
            f"jobs must be 1, got {jobs}: this system cannot give every run cores of its own"
        )
    if not 1 <= jobs <= cores() // 2:
        why = f"a run is two processes, trainer and engine, and there are {cores()} cores to divide"
        raise ConfigError(f"jobs must be from 1 to {max(1, cores() // 2)}, got {jobs}: {why}")
    usable, size = sorted(os.sched_getaffinity(0)), cores() // jobs
    return [tuple(usable[job * size : (job + 1) * size]) for job in range(jobs)]


def _holds(run: Planned) -> bool:
    """Whether the folder holds this run, finished. ConfigError where it holds another one."""
    if not (run.folder / CONFIG).is_file():
        return False
    defaults = flatten(plain(RunConfig(recipe="")))
    found = defaults | flatten(RunFolder(run.folder).config())
    wanted = flatten(plain(run.config))
    differ = [
        name for name in wanted if name not in ("runs", "name") and found.get(name) != wanted[name]
    ]
    if differ:
        told = ", ".join(
            f"{name} is {found.get(name)} and would be {wanted[name]}" for name in differ
        )
        raise ConfigError(
            f"{run.folder} holds another run: {told}; choose another --name, or remove it"
        )
    return ended(run.folder)[0] == "finished"


def _remember(plan: ComparisonPlan, command: str) -> None:
    """Add to what was asked for: arms and seeds of an earlier command stay in the comparison."""
    path = plan.folder / PLAN
    before: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    runs = {run["folder"]: run for run in before.get("runs", [])}
    runs |= {
        run.folder.name: {"arm": run.arm, "seed": run.config.seed, "folder": run.folder.name}
        for run in plan.runs
    }
    commands = list(dict.fromkeys([*before.get("commands", []), command]))
    warnings = before.get("warnings", {}) | plan.warnings
    path.write_text(
        dumps({"commands": commands, "runs": list(runs.values()), "warnings": warnings}, indent=2)
        + "\n"
    )


class _Launcher:
    """Starts runs, one at a time on each share of the cores, and says how it goes."""

    def __init__(
        self, plan: ComparisonPlan, console: Console, *, shares: Sequence[Sequence[int]], lock: int
    ) -> None:
        self._plan, self._console, self._shares, self._lock = plan, console, shares, lock
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
        # A run may need all cores: the terminal is looked at rarely, and only if there is one.
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
            self._note(
                run, "began", **self._facts, command=shlex.join(["unstale", *run.command[3:]])
            )
            try:
                code = await self._process(run, share)
            finally:
                del self._going[run.folder.name]
            self._left -= 1
            self._took.append(time.monotonic() - began)
            self._note(run, "ended", code=code)
            state, why = ended(run.folder)
            told = (
                _success(run)
                if state == "finished"
                else f"[red]{state}[/]: {why or f'exit code {code}, see {run.log}'}"
            )
            self._console.print(
                f"{run.folder.name}: {told} in {duration(self._took[-1])}; {self._left} runs left, {self._eta()}",
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
        with (self._plan.folder / LAUNCHES).open("a", encoding="utf-8") as file:
            file.write(
                dumps({"kind": kind, "run": run.folder.name, "time": round(time.time()), **fields})
                + "\n"
            )

    def _eta(self) -> str:
        if not self._took:
            return "time left is known after the first"
        mean = sum(self._took) / len(self._took)
        return f"about {duration(mean * max(self._left - len(self._going) / 2, 0) / len(self._shares))} left"

    def _status(self) -> Text:
        first = len(self._plan.runs) - self._left + 1
        going = "; ".join(f"{name} {_progress(run)}" for name, run in self._going.items())
        return Text(f"run {first} of {len(self._plan.runs)}: {going}; {self._eta()}")


async def _end(process: asyncio.subprocess.Process) -> None:
    """As Ctrl-C does: the run saves what there is, and is killed with all it began if that takes too long."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
        try:
            async with asyncio.timeout(GRACE_S):
                await process.wait()
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def _set_aside(run: Planned) -> None:
    """Keep an unfinished run under another name: it is begun again, never continued."""
    if not run.folder.exists():
        return
    names = (f"{run.folder.name}-attempt{number}" for number in itertools.count(1))
    name = next(name for name in names if not run.folder.with_name(name).exists())
    run.folder.rename(run.folder.with_name(name))
    if run.log.exists():
        run.log.rename(run.log.with_name(f"{name}.log"))


def _last_row(run: Planned) -> Mapping[str, Any]:
    """The newest step, from the end of the file."""
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
    success = (
        f", success {percent(number(row.get('rollout/success_rate')))}"
        if row.get("rollout/success_rate") is not None
        else ""
    )
    return f"step {row.get('step', 0)} of {run.config.steps}{success}"


def _success(run: Planned) -> str:
    graded = [
        row["success"] for row in RunFolder(run.folder).rows(EVENTS) if row.get("kind") == "eval"
    ]
    return f"success {percent(number(graded[-1]), 1)} held out" if graded else "finished"
