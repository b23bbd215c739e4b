"""Kill runs and engines at random, and check that nothing is lost or trained on twice.

    python -m benchmarks.chaos --kills 100          # about 40 minutes on two shared cores

There are three series. A deterministic run is killed with SIGKILL at random calls
(`chaos_child.py`), resumed, and compared bit for bit with an undisturbed run. An ordinary run is
killed at the same calls and at random times; the rows of its journal must survive unchanged. The
engine process of an ordinary run is killed or stopped repeatedly while the run continues.

With `--forks` the first series is repeated for each of these ways in which environments of forked
episodes continue (`chaos_forks.py`). The undisturbed runs must have the same forks.

Exits with 1 if anything was lost. Writes the table benchmarks/results/chaos.md.
"""

import argparse
import json
import os
import random
import shlex
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from benchmarks.chaos_child import CLOCK, TARGETS
from benchmarks.chaos_forks import WAYS
from unstale.durability.compare_runs import differences
from unstale.durability.console import Console
from unstale.durability.journal import JOURNAL, Journal, check, trained_episodes
from unstale.durability.machine import commit, machine, versions
from unstale.durability.run_folder import RunFolder

RESULTS = Path(__file__).parent / "results"
TABLE = "chaos.md"
CONSOLE = Console(soft_wrap=True, highlight=False)
STEPS = 9
"""Steps of each run that is killed. The calls at which it is killed are drawn from this number."""
SPAN_S = 12.0
"""Longest time in seconds before a kill at a random time."""

SMALL = shlex.split(
    "--minutes 0 --schedule.groups_per_step 3 --schedule.group_size 3 --eval.tasks 3 "
    "--checkpoint.interval 3 --trainer.warmup_steps 0 --task.latency_s 0.3"
)
"""Options that make the retail recipe small. Episodes still last longer than a version."""


@dataclass(slots=True)
class Kill:
    """A kill of a run and its result."""

    target: str
    run: int
    resumed: bool = False
    """True if the run came up again: from its checkpoint, or from the beginning if it had none."""
    anew: bool = False
    back_s: float | None = None
    """Seconds from `--resume` to the first trained step, or None if no step was trained."""
    orphans: int = 0


@dataclass(slots=True)
class Ended:
    """The result of checking a killed run after its end."""

    wrong: list[str] = field(default_factory=list)
    lost: int = 0
    twice: int = 0
    renumbered: list[int] = field(default_factory=list)
    """Versions whose training was lost, of every resume that had to skip version numbers."""


@dataclass(slots=True)
class Series:
    """The kills of one kind of run, and the results of its runs by number."""

    title: str
    kills: list[Kill] = field(default_factory=list)
    ends: dict[int, Ended] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    states: int = 0
    """Number of forks in these runs that began with a copy or snapshot of their parent's
    environment.
    """

    @property
    def failures(self) -> list[str]:
        told = [
            f"{self.title}, run {run}: {text}"
            for run, end in self.ends.items()
            for text in end.wrong
        ]
        told += [
            f"{self.title}, run {k.run}: did not come back after {k.target}"
            for k in self.kills
            if not k.resumed
        ]
        return told + [
            f"{self.title}, run {k.run}: {k.orphans} orphans" for k in self.kills if k.orphans
        ]


class Nursery:
    """A process that has imported the package and forks the runs."""

    def __init__(self) -> None:
        quiet = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.chaos_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | quiet,
            text=True,
        )

    def live(
        self, arguments: Sequence[str], beside: Path, life: int, **order: Any
    ) -> dict[str, Any]:
        """Run until the end or a kill. The output and the events lie beside the run's folder."""
        assert self._process.stdin and self._process.stdout
        beside.mkdir(parents=True, exist_ok=True)
        paths = {"log": str(beside / f"{life:03d}.log"), "told": str(beside / f"{life:03d}.jsonl")}
        self._process.stdin.write(
            json.dumps({"arguments": list(arguments), **paths, **order}) + "\n"
        )
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline()) | {
            "told": list(_told(Path(paths["told"])))
        }

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def _told(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.endswith("}"):  # the last one may be torn
            yield json.loads(line)


class Witness:
    """A record of what a run's journal contained and of what its versions meant.

    Later looks at the journal must find the same.
    """

    def __init__(self, keeps: bool) -> None:
        self._keeps = keeps
        """True if pieces newer than the checkpoint must survive. Deterministic runs remake them."""
        self._pieces: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._consumed: dict[int, tuple[Any, ...]] = {}
        self._meanings: dict[int, int] = {}
        self.deaths = 0
        self.end = Ended()

    def hear(self, told: Sequence[dict[str, Any]]) -> None:
        for line in told:
            if line["kind"] == "meaning":
                version, meaning = line["version"], line["sum"]
                if self._meanings.setdefault(version, meaning) != meaning:
                    self.end.wrong.append(f"version {version} has two meanings")
            if line["kind"] == "renumbered":
                self.end.renumbered.append(line["lost"])

    def look(self, folder: Path) -> bool:
        """Check a copy of the journal after a kill. Return True if the run has a checkpoint."""
        if not (folder / JOURNAL).exists():
            return False
        with tempfile.TemporaryDirectory() as aside:
            for path in folder.glob(f"{JOURNAL}*"):
                if not path.name.endswith("-shm"):
                    shutil.copy(path, aside)
            connection = sqlite3.connect(Path(aside) / JOURNAL)
            try:
                ((found,),) = connection.execute("PRAGMA user_version")
                if (
                    not found
                    or not connection.execute("SELECT count(*) FROM checkpoints").fetchone()[0]
                ):
                    return False
                self._compare(connection)
            finally:
                connection.close()
        return True

    def _compare(self, connection: sqlite3.Connection) -> None:
        pieces = {
            row[:2]: row
            for row in connection.execute(
                "SELECT episode, position, provenance, tokens, version, clean, behavior_logp FROM "
                "pieces"
            )
        }
        consumed = {
            row[0]: row for row in connection.execute("SELECT number, step, version FROM consumed")
        }
        numbers = [row[0] for row in connection.execute("SELECT version FROM versions ORDER BY id")]
        if numbers != sorted(set(numbers)):
            self.end.wrong.append(f"the versions are not in order: {numbers}")
        self.deaths += 1
        if self._keeps:
            gone = [key for key, row in self._pieces.items() if pieces.get(key) != row]
            self.end.wrong += [f"piece {key} is gone or changed" for key in gone[:3]]
            self._pieces = pieces
        self.end.lost += sum(number not in consumed for number in self._consumed)
        self.end.twice += sum(
            consumed.get(number, row) != row for number, row in self._consumed.items()
        )
        self._consumed = consumed

    def finish(self, folder: Path, steps: int) -> Ended:
        """Check a run that has ended: its journal and files agree and hold every step once."""
        self.look(folder)
        with Journal.read(folder) as journal:
            self.end.wrong += check(journal)
            trained = [
                t.episode
                for step in range(1, steps + 1)
                for g in journal.consumed(step)
                for t in g.trajectories
            ]
            handed = {group.number for group in journal.groups()}
            self.end.lost += len(set(range(max(handed) + 1)) - handed)
        self.end.twice += len(trained) - len(set(trained))
        rows = RunFolder(folder).metrics()
        if [row["step"] for row in rows] != list(range(steps + 1)):
            self.end.wrong.append(f"its steps are {[row['step'] for row in rows]}")
        for row in rows[1:]:
            if not 0 <= row["schedule/staleness_max"] <= row["schedule/staleness_bound"]:
                self.end.wrong.append(
                    f"step {row['step']} has staleness {row['schedule/staleness_max']}"
                )
        if self.end.lost or self.end.twice:
            self.end.wrong.append(f"{self.end.lost} lost, {self.end.twice} twice")
        return self.end


def orders(seed: int, steps: int, clock: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the places of the next kills: all targets in turn, in random order, at random calls."""
    draw = random.Random(seed)
    turn = 0
    while True:
        for target in draw.sample(list(TARGETS), len(TARGETS)):
            places = TARGETS[target]
            place = turn % len(places)
            call = draw.randint(1, max(1, round(places[place].calls * steps / STEPS)))
            yield target, {"target": target, "place": place, "call": call, "moment": draw.random()}
        if clock:
            for _ in TARGETS:  # as many as all others
                yield CLOCK, {"after_s": draw.uniform(0.2, SPAN_S * steps / STEPS)}
        turn += 1


@dataclass(frozen=True, slots=True)
class Deadly:
    """A series of runs, each killed and resumed until it ends."""

    nursery: Nursery
    runs: Path
    arguments: tuple[str, ...]
    steps: int
    reference: Path | None = None
    """Folder of the undisturbed run that deterministic runs must equal."""
    forks: str = ""
    """How environments of forked episodes continue, one of `WAYS`. Empty leaves them as they are.
    """

    def kill(self, series: Series, wanted: int, seed: int) -> None:
        """Start runs until `wanted` kills were made and the last run has ended.

        A run that ends before its next kill ends normally.
        """
        places, run = orders(seed, self.steps, clock=self.reference is None), 0
        while len(series.kills) < wanted:
            run += 1
            self._run(series, wanted, places, run)
            if series.failures:
                return

    def _run(
        self, series: Series, wanted: int, places: Iterator[tuple[str, dict[str, Any]]], run: int
    ) -> None:
        folder, witness = self.runs / f"run{run:03d}", Witness(keeps=self.reference is None)
        beside = folder.with_name(f"{folder.name}-lives")
        begun, last, life = False, None, 0
        while True:
            life += 1
            first = (
                "train",
                *self.arguments,
                "--max_steps",
                str(self.steps),
                "--name",
                folder.name,
            )
            target, order = next(places) if len(series.kills) < wanted else ("", {})
            resume = ("train", "--resume", str(folder))
            answer = self.nursery.live(
                resume if begun else (*first, "--runs", str(folder.parent)),
                beside,
                life,
                forks=self.forks,
                **order,
            )
            witness.hear(answer["told"])
            series.states += sum(line["kind"] == "state" for line in answer["told"])
            log = (beside / f"{life:03d}.log").read_text()
            if answer["code"] == 2 and last and last.target == "the end" and "is finished" in log:
                answer["code"] = 0  # only its report was not written
            if last:
                last.resumed = answer["code"] in (0, -9)
                trained = [line["seconds"] for line in answer["told"] if line["kind"] == "trained"]
                last.back_s = trained[0] if begun and trained else None
            if answer["code"] != -9:
                break
            last = Kill(target, run, orphans=answer["orphans"])
            series.kills.append(last)
            before, begun = begun, witness.look(folder)
            if before and not begun:
                witness.end.wrong.append("its checkpoints are gone")
            if not begun and folder.exists():
                last.anew = True
                shutil.rmtree(folder)
            tell(
                f"{len(series.kills):4d}/{wanted} {target}: life {life} of run {run} died at "
                f"{answer['seconds']:.1f} s"
            )
        if answer["code"] == 0:
            series.ends[run] = self._finish(witness, folder)
            tell(
                f"     run {run} ended after {life} lives: "
                f"{'; '.join(witness.end.wrong[:5]) or 'sound'}"
            )
            if not witness.end.wrong:
                shutil.rmtree(folder)
                shutil.rmtree(beside)
        else:
            series.ends[run] = Ended([f"life {life} ended with {answer['code']}: {log[-800:]}"])
            tell(f"     run {run} failed: {log[-800:]}")

    def _finish(self, witness: Witness, folder: Path) -> Ended:
        end = witness.finish(folder, self.steps)
        if self.reference:
            end.wrong += differences(self.reference, folder)
            with Journal.read(self.reference) as one, Journal.read(folder) as other:
                end.lost += len(
                    {g.number for g in one.groups()} - {g.number for g in other.groups()}
                )
        return end


def hunt(nursery: Nursery, runs: Path, wanted: int, seed: int) -> Series:
    """Kill the engines of ordinary runs at random times until `wanted` kills hit."""
    series, run = Series("Engine killed"), 0
    shares: Counter[str] = Counter()
    while len(series.kills) < wanted and not series.failures:
        run, left = run + 1, wanted - len(series.kills)
        folder, steps = runs / f"run{run:03d}", max(3, left)
        arguments = [*SMALL, "--max_steps", str(steps), "--name", folder.name, "--runs", str(runs)]
        answer = nursery.live(
            ["train", "retail", *arguments, "--engine.restarts", str(10 * wanted)],
            runs / f"{folder.name}-lives",
            1,
            hunt={"kills": left, "span_s": 2.0, "seed": seed + run},
        )
        if answer["code"]:
            log = (runs / f"{folder.name}-lives" / "001.log").read_text()
            series.ends[run] = Ended([f"it ended with {answer['code']}: {log[-800:]}"])
            break
        witness = Witness(keeps=True)
        witness.hear(answer["told"])
        end = series.ends[run] = witness.finish(folder, steps)
        born = [line["pid"] for line in answer["told"] if line["kind"] == "born"]
        hits = [
            line for line in answer["told"] if line["kind"] == "killed" and line["pid"] in born[:-1]
        ]
        restarted = [
            row
            for row in RunFolder(folder).rows("events.jsonl")
            if row["kind"] == "engine_restarted"
        ]
        counted = sum(row.get("engine/restarts", 0) for row in RunFolder(folder).metrics())
        late = sum(row["time"] > _last_advance(folder) for row in restarted)
        if not len(hits) == len(restarted) == len(born) - 1 == counted + late:
            end.wrong.append(
                f"{len(hits)} kills, {len(restarted)} restarts told, {counted:g} in metrics and "
                f"{late} after the last"
            )
        for hit in hits:
            kind = f"{hit['how']}{' while it started' if hit['while_starting'] else ''}"
            series.kills.append(Kill(kind, run, resumed=True, orphans=answer["orphans"]))
        shares["steps"] += steps
        tell(
            f"{len(series.kills):4d}/{wanted} engines killed: run {run} ended, "
            f"{'; '.join(end.wrong) or 'sound'}"
        )
    series.notes.append(f"{len(series.ends)} runs of {shares['steps']} steps in all.")
    return series


def _last_advance(folder: Path) -> float:
    """Return the end of the trainer's last span, when the engine's counters were last read."""
    spans = (row for row in RunFolder(folder).rows("events.jsonl") if row.get("lane") == "trainer")
    return max(row["end"] for row in spans)


def several_versions(folder: Path) -> str:
    """Return how much mixed data there was to get wrong.

    These are the share of trajectories with several versions, the share of stale tokens, and the
    number of forked episodes, if any.
    """
    with Journal.read(folder) as journal:
        rows = list(trained_episodes(journal))
        ((forks,),) = journal.rows("SELECT count(*) FROM forks")
    mixed = sum(len(row["versions"]) > 1 for row in rows) / len(rows)
    lags: Counter[str] = Counter()
    for row in RunFolder(folder).metrics():
        lags.update(row.get("schedule/staleness_histogram", {}))
    told = ", ".join(
        f"{count / lags.total():.0%} at lag {lag}" for lag, count in sorted(lags.items())
    )
    told += f"; {forks} forked episodes" if forks else ""
    return f"{mixed:.0%} of {len(rows)} trajectories hold tokens of several versions; {told}"


def finish(out: Path, lines: Sequence[str], failures: Sequence[str]) -> NoReturn:
    """Write and print the lines of a table and what was wrong; exit with 1 if anything was."""
    out.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join([*lines, "", *(f"* wrong: {each}" for each in failures)])
    out.write_text(text.rstrip() + "\n")
    CONSOLE.print(f"{out.read_text()}\n{out}", markup=False)
    sys.exit(1 if failures else 0)


def tell(text: str) -> None:
    CONSOLE.print(f"{time.strftime('%H:%M:%S')} {text}", markup=False)


def table(series: Series, equal: str) -> list[str]:
    """Return the table by target. A run's result counts for each kill that it survived."""
    rows = defaultdict(list)
    for kill in series.kills:
        rows[kill.target].append(kill)
    lines = [
        f"| {series.title.lower()} in | kills | resumed | {equal} | groups lost | trained twice "
        "| s to a trained step |",
        "|---|---|---|---|---|---|---|",
    ]
    for target, kills in [*rows.items(), ("all", series.kills)]:
        ends = [series.ends[kill.run] for kill in kills if kill.run in series.ends]
        back = [kill.back_s for kill in kills if kill.back_s is not None]
        lines.append(
            f"| {target} | {len(kills)} | {sum(kill.resumed for kill in kills)} | "
            f"{sum(not e.wrong for e in ends)} | {sum(e.lost for e in ends)} | "
            f"{sum(e.twice for e in ends)} | {f'{median(back):.1f}' if back else '-'} |"
        )
    lost = [n for end in series.ends.values() for n in end.renumbered]
    anew = sum(kill.anew for kill in series.kills)
    if any(kill.back_s for kill in series.kills):
        series.notes.append(
            f"{len(series.ends)} runs came to their end. {anew} deaths were before the first "
            "checkpoint was in the journal, where nothing had been trained: those runs were begun "
            "anew."
        )
    if lost:
        series.notes.append(
            f"{len(lost)} resumes left {sum(lost)} published versions behind and numbered on from "
            "the highest."
        )
    return [*lines, "", *series.notes, ""]


def kill_deterministic(
    nursery: Nursery, runs: Path, chosen: argparse.Namespace, forks: str
) -> Series:
    """Kill runs that must equal an undisturbed one, which is run first."""
    arguments = ("retail", *SMALL, *shlex.split(chosen.options), "--deterministic", "true")
    alone = runs / f"alone{forks}"
    where = ("--runs", str(runs), "--name", alone.name, "--max_steps", str(chosen.steps))
    tell(f"a run that nobody kills {forks}")
    answer = nursery.live(
        ("train", *arguments, *where), runs / f"{alone.name}-lives", 1, forks=forks
    )
    if answer["code"]:
        log = (runs / f"{alone.name}-lives" / "001.log").read_text()
        sys.exit(f"the run that nobody kills ended with {answer['code']}: {log[-800:]}")
    told = several_versions(alone)
    series = Series(f"Killed (forks by {forks})" if forks else "Killed")
    series.notes.append(f"The run that nobody killed: {told}.")
    killed = runs / f"deterministic{forks}"
    Deadly(nursery, killed, arguments, chosen.steps, alone, forks).kill(
        series, chosen.kills, chosen.seed
    )
    if forks:
        own = sum(line["kind"] == "state" for line in answer["told"])
        series.notes.append(
            f"Forks that began with a parent's {forks}: {own} in the run that nobody killed, "
            f"{series.states} in those that were killed."
        )
        if bool(own) != (forks != "replies"):
            series.ends[0] = Ended([f"{own} forks began with a parent's {forks}"])
    return series


def different_forks(runs: Path, ways: Sequence[str]) -> list[str]:
    """Return a text for each way whose forks differ from those of the first in number, place or
    seed.
    """
    found = {}
    for way in ways:
        with Journal.read(runs / f"alone{way}") as journal:
            found[way] = journal.rows(
                "SELECT episode, seed, parent, forks.at FROM forks JOIN episodes USING (episode) "
                "ORDER BY episode"
            )
    first = ways[0]
    return [f"forks by {way} differ from {first}" for way in ways if found[way] != found[first]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="kills of the deterministic run")
    parser.add_argument(
        "--ordinary", type=int, help="kills of the ordinary run (default: half of --kills)"
    )
    parser.add_argument("--engine", type=int, help="kills of the engine (default: half of --kills)")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each run that is killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=Path("runs") / f"chaos-{date.today()}")
    parser.add_argument("--out", type=Path, default=RESULTS / TABLE)
    parser.add_argument("--options", default="", help="more options of the killed runs")
    parser.add_argument(
        "--forks", nargs="+", choices=WAYS, help="how environments of forked episodes continue"
    )
    chosen = parser.parse_args()
    ordinary = chosen.kills // 2 if chosen.ordinary is None else chosen.ordinary
    engine = chosen.kills // 2 if chosen.engine is None else chosen.engine
    runs, began = chosen.runs.resolve(), time.monotonic()
    shutil.rmtree(runs, ignore_errors=True)
    retail = ("retail", *SMALL, *shlex.split(chosen.options))
    nursery = Nursery()
    killed, failures = list[Series](), list[str]()
    try:
        for way in chosen.forks or [""]:
            killed.append(kill_deterministic(nursery, runs, chosen, way))
        if chosen.forks:
            failures += different_forks(runs, chosen.forks)
        second = Series("Killed")
        Deadly(nursery, runs / "ordinary", retail, chosen.steps).kill(
            second, ordinary, chosen.seed + 1
        )
        third = hunt(nursery, runs / "engine", engine, chosen.seed + 2)
    finally:
        nursery.close()
    command = (
        f"python -m benchmarks.chaos --kills {chosen.kills} --ordinary {ordinary} --engine {engine}"
    )
    if chosen.steps != STEPS:
        command += f" --steps {chosen.steps}"
    if chosen.options:
        command += f" --options {shlex.quote(chosen.options)}"
    if chosen.forks:
        command += f" --forks {' '.join(chosen.forks)}"
    if chosen.out.name != TABLE:
        command += f" --out {chosen.out.name}"
    lines = [
        f"# Runs and engines killed, {date.today()}",
        "",
        f"`{command}` at commit {commit()}, {machine()}, {versions()}; "
        f"{(time.monotonic() - began) / 60:.0f} minutes. The retail recipe, small "
        "(`benchmarks/chaos.py`), killed with SIGKILL, which takes nothing from the page cache: a "
        "power cut is not tried.",
        "",
        "## A deterministic run is killed",
        "",
        *(line for each in killed for line in table(each, "ended bitwise equal")),
        "## An ordinary run is killed",
        "",
        *table(second, "ended with every piece"),
        "## The engine of an ordinary run is killed or stopped",
        "",
        *table(third, "run ended sound"),
        "Seconds to a trained step are those of a process that has imported the package already.",
    ]
    for each in [*killed, second, third]:
        failures += each.failures
    finish(chosen.out, lines, failures)


if __name__ == "__main__":
    main()
