"""Kill the processes of runs on Ray at random instants, and check that nothing is lost.

    python -m benchmarks.cluster_chaos                    # about 30 minutes on two quiet cores
    python -m benchmarks.cluster_chaos --ranks 4 --drivers 0 --hosts 0 --nodes 0 --seed 7

There are four series, each with SIGKILL:

    ranks      a trainer rank of a deterministic run with two ranks
    drivers    the process of such a run, which is then resumed with `--resume`
    hosts      an engine host of a run with two engine hosts
    nodes      a simulated machine (a raylet of `ray.cluster_utils.Cluster`) with a trainer rank,
               or with an engine host; another machine joins up to 5 s later

Several kills hit one run. Deterministic runs must end bitwise equal to a run that nobody killed.
Needs the environment of `make test-cluster`. Exits with 1 if anything was lost. Writes a dated
table under benchmarks/results/.
"""

import argparse
import os
import random
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from threading import Timer
from typing import Any

from benchmarks.chaos import Ended, Witness, finish, tell
from benchmarks.chaos_child import adopt_orphans
from unstale.durability.compare_runs import differences
from unstale.durability.machine import commit, machine, versions
from unstale.durability.run_folder import EVENTS, RunFolder

RESULTS = Path(__file__).parent / "results"
SMALL = shlex.split(
    "--minutes 0 --schedule.groups_per_step 2 --schedule.group_size 3 --eval.tasks 2 "
    "--checkpoint.interval 2 --trainer.warmup_steps 0 --audit.share 0.5 --cluster.restarts 1000 "
    "--engine.restarts 1000"
)
"""Options that make the retail recipe small."""
RANKS = (*SMALL, "--deterministic", "true", "--cluster.trainers", "2")
HOSTS = (*SMALL, "--cluster.engine_hosts", "2", "--task.latency_s", "0.3")
STEPS = 10
HOST_STEPS = 6
"""Runs with engine hosts have this many times as many steps: they train while a host starts."""
HUNG_S = 400.0
"""Seconds without a new event after which a run counts as hung."""
ORPHAN_S = 30.0
"""Seconds within which all processes of a killed driver must end."""
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
START_SHARE = 0.25
"""Share of the kills that are made while a life starts. The others hit training."""
START_SPAN_S = 10.0
SPAN_S = 4.0
"""Longest time in seconds from the first step of a life to a kill."""
JOIN_S = 5.0
"""Longest time in seconds until another machine takes the place of a killed one."""
_TICK_S = 0.05


@dataclass(slots=True)
class Kill:
    """One kill, with seconds after it. None means that it was not seen before the next kill."""

    run: int
    starting: bool
    """True if the killed process, or the life that it belongs to, was starting."""
    noticed_s: float | None = None
    back_s: float | None = None
    """Seconds until a step was trained, or until an engine host sampled again."""


@dataclass(slots=True)
class Series:
    """The kills of one kind, and the results of its runs by number."""

    title: str
    columns: tuple[str, str]
    """The events that `noticed_s` and `back_s` measure, in words."""
    kills: list[Kill] = field(default_factory=list)
    ends: dict[int, Ended] = field(default_factory=dict)
    restarts: int = 0
    """Commands that a human would have given: `train --resume` after the death of a driver."""

    @property
    def failures(self) -> list[str]:
        return [
            f"{self.title}, run {n}: {text}" for n, end in self.ends.items() for text in end.wrong
        ]


class RunProcess:
    """The process of a run, started by the command line."""

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        self.folder = folder
        program = [sys.executable, "-c", "from unstale.cli.main import main; main()"]
        with folder.with_suffix(".log").open("ab") as log:
            self.process = subprocess.Popen(
                [*program, "train", *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._heard = len(self._rows())
        self._last = time.monotonic()

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def new_events(self) -> list[dict[str, Any]]:
        """Return the events since the last call. Raises TimeoutError if the run hangs."""
        rows = self._rows()
        new, self._heard = rows[self._heard :], len(rows)
        if new:
            self._last = time.monotonic()
        elif time.monotonic() - self._last > HUNG_S:
            raise TimeoutError(f"{self.folder.name} wrote no event for {HUNG_S:.0f} s")
        return new

    def _rows(self) -> list[dict[str, Any]]:
        if not (self.folder / EVENTS).exists():
            return []
        return list(RunFolder(self.folder).rows(EVENTS))

    def named(self, name: str) -> list[int]:
        """Return the Ray processes below this one whose title begins with `name`."""
        return [pid for pid in descendants(self.process.pid) if title(pid).startswith(name)]

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()

    def last_words(self) -> str:
        return self.folder.with_suffix(".log").read_text(errors="replace")[-1500:]


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def parents() -> dict[int, int]:
    """Return the parent of each process that has not ended."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            head, _, rest = stat.read_text().rpartition(")")
            state, parent = rest.split()[:2]
            if state != "Z":
                found[int(head.split()[0])] = int(parent)
    return found


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for child, parent in parents().items():
        children.setdefault(parent, []).append(child)
    found, left = [], [pid]
    while left:
        new = children.get(left.pop(), [])
        found += new
        left += new
    return found


def end_orphans(limit_s: float) -> int:
    """Wait until all processes below this one ended. End the others, and return their number.

    Ray's own agents are ended at once: they try for a minute to report to the head that is gone.
    """
    until = time.monotonic() + limit_s
    while True:
        with suppress(ChildProcessError):  # until there are none
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = descendants(os.getpid())
        others = [pid for pid in left if not title(pid).startswith(AGENTS)]
        if others and time.monotonic() < until:
            time.sleep(_TICK_S)
            continue
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(others)


def is_step(row: Mapping[str, Any]) -> bool:
    """Return True for the event that a step was trained."""
    return row["kind"] == "span" and row["lane"] == "trainer"


def is_host_back(row: Mapping[str, Any]) -> bool:
    """Return True for the event that an engine host samples, again or for the first time."""
    return row["kind"] in ("engine_back", "engine_joined")


@dataclass(frozen=True, slots=True)
class Prey:
    """The runs of one series, and the processes of them that are killed."""

    options: Sequence[str]
    """Options of the runs."""
    strike: Callable[[RunProcess], bool]
    """Kills a part of a run. Returns False if there is none now."""
    noticed: str
    """The event that the run writes when it notices the death."""
    is_back: Callable[[Mapping[str, Any]], bool]
    """Returns True for an event that shows the recovery."""
    reference: Path | None = None
    """The folder of the run that a deterministic run must equal."""
    times: int = 1
    """The runs have this many times the steps of the others."""


@dataclass(slots=True)
class Chaos:
    """The folder, the random numbers and the options of all series."""

    runs: Path
    draw: random.Random
    steps: int
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(1, 10_000)))

    def arguments(self, folder: Path, options: Sequence[str], times: int = 1) -> list[str]:
        steps = (
            "--max_steps",
            str(times * self.steps),
            "--runs",
            str(folder.parent),
            "--name",
            folder.name,
        )
        return ["retail", *options, *steps]

    def delay(self) -> tuple[bool, float]:
        """Draw the instant of a kill: while a life starts or not, and the seconds from there."""
        starting = self.draw.random() < START_SHARE
        return starting, self.draw.uniform(0, START_SPAN_S if starting else SPAN_S)

    def finish(self, series: Series, number: int, run: RunProcess, prey: Prey) -> None:
        """Check a run that has ended."""
        witness = Witness(keeps=False)
        if code := run.process.wait(HUNG_S):
            witness.end.wrong.append(f"it ended with {code}: {run.last_words()}")
        else:
            witness.finish(run.folder, prey.times * self.steps)
            if prey.reference:
                witness.end.wrong += differences(prey.reference, run.folder)
        series.ends[number] = witness.end
        tell(f"run {number} ended, {'; '.join(witness.end.wrong) or 'sound'}")
        if not witness.end.wrong:
            shutil.rmtree(run.folder)

    def hunt(self, series: Series, wanted: int, prey: Prey) -> None:
        """Start runs, and kill a part of them until `wanted` kills were made and the run ended.

        The next kill follows after the recovery or, with the share `START_SHARE`, during it.
        """
        while len(series.kills) < wanted and not series.failures:
            number = next(self.numbers)
            folder = self.runs / f"run{number:03d}"
            run = RunProcess(self.arguments(folder, prey.options, prey.times), folder)
            try:
                for kill in self._disturb(run, number, prey, wanted - len(series.kills)):
                    series.kills.append(kill)
                    tell(f"{len(series.kills):4d}/{wanted} {series.title}: killed in run {number}")
                self.finish(series, number, run, prey)
            except TimeoutError as error:
                series.ends[number] = Ended([f"{error}: {run.last_words()}"])
            finally:
                run.kill()

    def _disturb(self, run: RunProcess, number: int, prey: Prey, wanted: int) -> Iterator[Kill]:
        """Yield the kills, at most `wanted`, until the run ends."""
        last: Kill | None = None
        killed_at = time.monotonic()
        starting, delay_s = self.delay()
        due = killed_at + delay_s if starting else None
        while not run.ended:
            time.sleep(_TICK_S)
            now = time.monotonic()
            for row in run.new_events():
                if last and last.noticed_s is None and row["kind"] == prey.noticed:
                    last.noticed_s = now - killed_at
                    if starting and due is None:
                        due = now + delay_s
                elif prey.is_back(row) and (last is None or last.noticed_s is not None):
                    if last and last.back_s is None:
                        last.back_s = now - killed_at
                    if due is None and not starting:
                        due = now + delay_s
            if wanted and due is not None and now >= due:
                struck_at = time.monotonic()
                if not prey.strike(run):
                    continue
                killed_at, wanted = struck_at, wanted - 1
                last = Kill(number, starting)
                yield last
                starting, delay_s = self.delay()
                due = None


def kill_one(draw: random.Random, name: str) -> Callable[[RunProcess], bool]:
    """Return a function that kills one of the processes whose title begins with `name`."""

    def strike(run: RunProcess) -> bool:
        pids = run.named(name)
        if not pids:
            return False
        os.kill(draw.choice(pids), signal.SIGKILL)
        return True

    return strike


def kill_drivers(chaos: Chaos, series: Series, wanted: int, reference: Path) -> None:
    """Kill the processes of deterministic runs, and resume them until they end."""
    prey = Prey(RANKS, lambda run: False, "", is_step, reference)
    while len(series.kills) < wanted and not series.failures:
        number = next(chaos.numbers)
        folder = chaos.runs / f"run{number:03d}"
        witness = Witness(keeps=False)
        run = RunProcess(chaos.arguments(folder, RANKS), folder)
        last: Kill | None = None
        try:
            while True:
                began = time.monotonic()
                is_killed = _disturb_driver(chaos, run, last, began, len(series.kills) < wanted)
                if not is_killed:
                    break
                killed_at = time.monotonic()
                if orphans := end_orphans(ORPHAN_S):
                    witness.end.wrong.append(f"{orphans} processes did not end with the driver")
                last = Kill(number, is_killed == "starting", time.monotonic() - killed_at)
                series.kills.append(last)
                tell(f"{len(series.kills):4d}/{wanted} {series.title}: killed in run {number}")
                if witness.look(folder):
                    arguments = ["--resume", str(folder)]
                else:  # nothing was trained yet
                    shutil.rmtree(folder, ignore_errors=True)
                    arguments = chaos.arguments(folder, RANKS)
                series.restarts += 1
                run = RunProcess(arguments, folder)
            chaos.finish(series, number, run, prey)
            series.ends[number].wrong += witness.end.wrong
            series.ends[number].lost += witness.end.lost
            series.ends[number].twice += witness.end.twice
        except TimeoutError as error:
            series.ends[number] = Ended([f"{error}: {run.last_words()}"])
        finally:
            run.kill()


def _disturb_driver(
    chaos: Chaos, run: RunProcess, last: Kill | None, began: float, may_kill: bool
) -> str:
    """Wait for a random instant and kill the run. Return "" if it ended before."""
    starting, delay_s = chaos.delay()
    due = began + 2 * delay_s if starting else None
    while not run.ended:
        time.sleep(_TICK_S)
        now = time.monotonic()
        for row in run.new_events():
            if is_step(row):
                if last and last.back_s is None:
                    last.back_s = now - began
                due = due or now + delay_s
        if may_kill and due is not None and now >= due:
            run.kill()
            return "starting" if starting else "training"
    return ""


class Nodes:
    """A Ray cluster on this machine, whose nodes are killed."""

    def __init__(self, draw: random.Random) -> None:
        os.environ.update(
            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
            RAY_USAGE_STATS_ENABLED="0",
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN=secrets.token_hex(32),
        )
        from ray.cluster_utils import Cluster

        self._draw = draw
        self._memory = {"object_store_memory": 100 << 20}
        head = {"num_cpus": 0, "include_dashboard": False, **self._memory}
        self.cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
        self._nodes: list[Any] = []
        self._options: dict[str, Any] = {}
        self._joining = Timer(0.0, self._join)
        """The last arrival of a node that takes the place of a killed one."""

    def use(self, **options: Any) -> None:
        """Replace the nodes by two others."""
        if self._joining.is_alive():
            self._joining.join(HUNG_S)
        for node in self._nodes:
            self.cluster.remove_node(node)
        self._options = options
        self._nodes = [self.add(**options) for _ in range(2)]

    def add(self, **options: Any) -> Any:
        """Add a node."""
        return self.cluster.add_node(**options, **self._memory)

    def strike(self, run: RunProcess) -> bool:
        """Kill one of the two nodes. Add another one some seconds later."""
        if len(self._nodes) < 2:
            return False
        node = self._nodes.pop(self._draw.randrange(2))
        self.cluster.remove_node(node, allow_graceful=False)  # SIGKILL for all its processes
        self._joining = Timer(self._draw.uniform(0, JOIN_S), self._join)
        self._joining.start()
        return True

    def _join(self) -> None:
        self._nodes.append(self.add(**self._options))

    def close(self) -> None:
        if self._joining.is_alive():
            self._joining.join(HUNG_S)
        self.cluster.shutdown()


def kill_nodes(chaos: Chaos, wanted: int, reference: Path) -> tuple[Series, Series]:
    """Kill nodes with trainer ranks, two of three, and nodes with engine hosts."""
    of_hosts = wanted // 3
    trainers = Series("a node with a trainer rank", ("noticed", "next life trained"))
    engines = Series("a node with an engine host", ("noticed", "host samples again"))
    nodes = Nodes(chaos.draw)
    address = ("--cluster.address", nodes.cluster.address)
    try:
        nodes.use(num_cpus=1)
        prey = Prey((*RANKS, *address), nodes.strike, "trainer_died", is_step, reference)
        chaos.hunt(trainers, wanted - of_hosts, prey)
        nodes.use(num_cpus=1, resources={"engine_host": 1})
        chaos.hunt(
            engines,
            of_hosts,
            Prey((*HOSTS, *address), nodes.strike, "engine_lost", is_host_back, times=HOST_STEPS),
        )
    finally:
        nodes.close()
    return trainers, engines


def span(values: Sequence[float | None]) -> str:
    """Return median and range of seconds, without the unknown ones."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return f"{median(known):.1f} ({min(known):.1f} to {max(known):.1f}; {len(known)})"


def table(series: Sequence[Series]) -> list[str]:
    lines = [
        "| killed | kills | while starting | runs | ended sound | groups lost | trained twice | "
        "noticed after s | back after s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each in series:
        if not each.kills and not each.ends:
            continue
        ends = each.ends.values()
        lines.append(
            f"| {each.title} | {len(each.kills)} | {sum(kill.starting for kill in each.kills)} | "
            f"{len(ends)} | {sum(not end.wrong for end in ends)} | {sum(e.lost for e in ends)} | "
            f"{sum(e.twice for e in ends)} | {span([kill.noticed_s for kill in each.kills])} | "
            f"{span([kill.back_s for kill in each.kills])} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=20, help="kills of trainer ranks")
    parser.add_argument("--drivers", type=int, default=20, help="kills of drivers")
    parser.add_argument("--hosts", type=int, default=10, help="kills of engine hosts")
    parser.add_argument("--nodes", type=int, default=3, help="kills of machines")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=Path("runs") / f"cluster-chaos-{date.today()}")
    parser.add_argument("--out", type=Path, default=RESULTS / "cluster-chaos.md")
    chosen = parser.parse_args()
    adopt_orphans()
    runs, began = chosen.runs.resolve(), time.monotonic()
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir(parents=True)
    chaos = Chaos(runs, random.Random(chosen.seed), chosen.steps)
    reference = runs / "undisturbed"
    if chosen.ranks or chosen.drivers or chosen.nodes:
        tell("a run that nobody kills")
        undisturbed = RunProcess(chaos.arguments(reference, RANKS), reference)
        if undisturbed.process.wait(2 * HUNG_S):
            sys.exit(f"the undisturbed run failed: {undisturbed.last_words()}")
    ranks = Series("a trainer rank", ("noticed", "next life trained"))
    drivers = Series("the driver", ("all processes ended", "resumed life trained"))
    hosts = Series("an engine host", ("noticed", "host samples again"))
    nodes: tuple[Series, ...] = ()
    if chosen.ranks:
        strike = kill_one(chaos.draw, "ray::_RankActor")
        prey = Prey(RANKS, strike, "trainer_died", is_step, reference)
        chaos.hunt(ranks, chosen.ranks, prey)
    if chosen.drivers:
        kill_drivers(chaos, drivers, chosen.drivers, reference)
    if chosen.hosts:
        strike = kill_one(chaos.draw, "ray::EngineHost")
        chaos.hunt(
            hosts, chosen.hosts, Prey(HOSTS, strike, "engine_lost", is_host_back, times=HOST_STEPS)
        )
    if chosen.nodes:
        nodes = kill_nodes(chaos, chosen.nodes, reference)
    write(chosen, [ranks, drivers, hosts, *nodes], time.monotonic() - began)


def write(chosen: argparse.Namespace, series: Sequence[Series], seconds: float) -> None:
    """Write the table, print it, and exit with 1 if anything was lost."""
    counts = ("ranks", "drivers", "hosts", "nodes", "steps", "seed")
    options = " ".join(f"--{name} {getattr(chosen, name)}" for name in counts)
    meanings = [
        f"* {each.title}: {each.columns[0]}; {each.columns[1]}" for each in series if each.kills
    ]
    lines = [
        f"# Processes of runs on Ray killed, {date.today()}",
        "",
        f"`python -m benchmarks.cluster_chaos {options}` at commit {commit()}, {machine()}, "
        f"{versions()}; {seconds / 60:.0f} minutes. SIGKILL at random instants of small runs.",
        "",
        *table(series),
        "",
        "Seconds after the kill: median (range; number). A deterministic run counts as sound only "
        "if it is bitwise equal to the one that nobody killed. What was noticed, and what is back:",
        "",
        *meanings,
    ]
    finish(chosen.out, lines, [text for each in series for text in each.failures])


if __name__ == "__main__":
    main()
