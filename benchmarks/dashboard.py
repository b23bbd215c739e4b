"""Measure how long the dashboard takes with 100,000 episodes, and what it costs a training.

    python -m benchmarks.dashboard                 # all parts (40 minutes on two cores)
    python -m benchmarks.dashboard --parts pauses  # a long run: server and Chromium
    python -m benchmarks.dashboard --parts cost    # a demo with and without an open dashboard
    python -m benchmarks.dashboard --parts bytes   # the journal with and without values of tokens
    python -m benchmarks.dashboard --parts cost --rounds 1 --keep FILE  # add a round

The long run is made from a short one of the demo: its episodes are written again, by the journal's
own writer, with other groups, versions and log-probabilities, until there are enough. Each question
of the pages is then asked of it and of a run with a hundredth of the episodes, so that the ratio
does not depend on the machine. In Chromium, if it is installed, the longest pause of the page's
thread is measured while a user opens, sorts, filters and scrolls.
"""

import argparse
import asyncio
import http.client
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal
from urllib.parse import urlencode

import numpy as np

from benchmarks.tables import CONSOLE, ROOT, columns, row, spread, write
from unstale.analysis.dashboard.database import COLUMNS
from unstale.analysis.dashboard.summary import MAX_METRICS
from unstale.durability.journal import JOURNAL, Journal
from unstale.durability.run_folder import CONFIG, EVENTS, METRICS, TOKENIZER
from unstale.records import Group, GroupRequest, Piece, Sampled, Trajectory
from unstale.token_values import TokenValues

PARTS = ("pauses", "cost", "bytes")

EPISODES = 100_000
SMALL = 100
"""The long run has this many times the episodes of the short one."""

GOAL_MS = 200.0
GOAL_COST = 1.01
"""Goal for the time of a step with an open dashboard, as a multiple of that without."""

STEPS = 16
"""Steps of a training whose cost is measured."""

DEMO = (
    f"--max_steps={STEPS}",
    "--eval.tasks=8",
    "--eval.interval=0",
    "--minutes=0",
    "--audit.share=0",
    "--trainer.lr_schedule=constant",
)
"""Options of the demo that is trained with and without a dashboard."""

SHORT = (*DEMO, "--max_steps=12", "--task.latency_s=0")
"""Options of the run whose episodes are multiplied."""

IN_VIEW = 12
"""Plots of a run's page that are in view, and therefore follow the run."""

FIRST = 2
"""Steps at the beginning of a training that are not measured."""

UPDATE_S = 5.0
"""Seconds between two updates of a page, as in `static/api.js`."""

TICKS = os.sysconf("SC_CLK_TCK")
"""Units of the processor time of a process, in a second."""

TOGETHER = 64
"""Groups of the long run that are written between two waits for the disk."""


# A long run ------------------------------------------------------------------------------------


def record(runs: Path) -> Path:
    """Train the demo for some steps and return its folder."""
    return train(runs, "short", *SHORT)


Recorded = tuple[tuple[Trajectory, ...], list[TokenValues]]
"""The episodes of a group, and the values of their training."""


def read_groups(run: Path) -> list[Recorded]:
    """Return the groups of a run that were trained on."""
    with Journal.read(run) as journal:
        members: dict[int, list[Trajectory]] = {}
        for stored in journal.trajectories():
            if stored.step is not None:
                members.setdefault(stored.group, []).append(stored.trajectory)
        return [
            (tuple(episodes), list(journal.trained_tokens(number)))
            for number, episodes in members.items()
        ]


def multiply(source: Path, groups: Sequence[Recorded], target: Path, episodes: int) -> int:
    """Write a run with about `episodes` episodes, from those of another one. Return its steps."""
    size = len(groups[0][0])
    per_step = json.loads((source / CONFIG).read_text())["schedule"]["groups_per_step"]
    target.mkdir(parents=True)
    for name in (CONFIG, TOKENIZER):
        shutil.copy(source / name, target / name)
    steps = max(2, episodes // size // per_step)
    _write_logs(source, target, steps)
    with Journal(target / JOURNAL) as journal:
        asyncio.run(_write_groups(journal, groups, steps=range(1, steps + 1), per_step=per_step))
    return steps


async def _write_groups(
    journal: Journal, groups: Sequence[Recorded], *, steps: range, per_step: int
) -> None:
    """Write the groups of these steps. Steps before them must have been written."""
    rng = random.Random(steps.start)
    number = (steps.start - 1) * per_step
    episode = number * len(groups[0][0])
    for step in steps:
        consumed: list[Group] = []
        trained: list[TokenValues] = []
        for _ in range(per_step):
            recorded, values = groups[rng.randrange(len(groups))]
            lag = rng.randrange(min(step, 4))
            first = max(0, step - 1 - lag)
            task = recorded[0].task
            journal.add_request(GroupRequest(number, task, seed=number, place=number))
            again = []
            numbers: dict[int, int] = {}
            for sibling, each in enumerate(recorded):
                episode += 1
                numbers[each.episode] = episode
                seed = 100 * number + sibling
                writer = journal.begin(number, sibling, episode=episode, seed=seed)
                pieces = _varied(each.pieces, first, rng)
                for position, piece in enumerate(pieces):
                    writer.write_piece(position, piece)
                changed = replace(each, pieces=pieces, seed=seed, episode=episode)
                writer.write_outcome(changed)
                again.append(changed)
            trained += [_scaled(each, number, numbers[each.episode], rng) for each in values]
            consumed.append(Group(task, tuple(again), number=number))
            number += 1
        await asyncio.gather(*map(journal.finish, consumed))
        journal.commit(consumed, step=step, version=step - 1, tokens=trained)
        if step % TOGETHER == 0 or step == steps[-1]:
            await journal.checkpoint(f"step-{step}", step=step, version=step)
            CONSOLE.print(f"{episode:,} episodes written")


@contextmanager
def growing(run: Path, groups: Sequence[Recorded], *, first: int, per_step: int) -> Iterator[None]:
    """Append a step to a run about twice a second, from a thread, until the body ends."""
    over = threading.Event()

    async def append() -> None:
        step = first
        with Journal(run / JOURNAL) as journal:
            while not over.is_set():
                steps = range(step, step + 1)
                await _write_groups(journal, groups, steps=steps, per_step=per_step)
                step += 1
                await asyncio.sleep(0.5)

    thread = threading.Thread(target=lambda: asyncio.run(append()))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _varied(pieces: Sequence[Piece], first: int, rng: random.Random) -> tuple[Piece, ...]:
    """Return pieces with the versions after `first`, and other log-probabilities."""
    oldest = min((piece.version for piece in pieces if isinstance(piece, Sampled)), default=0)
    factor = rng.uniform(0.9, 1.1)
    return tuple(
        replace(
            piece,
            version=first + min(1, piece.version - oldest),
            behavior_logp=tuple(factor * logp for logp in piece.behavior_logp),
        )
        if isinstance(piece, Sampled)
        else piece
        for piece in pieces
    )


def _scaled(values: TokenValues, group: int, episode: int, rng: random.Random) -> TokenValues:
    factor = np.float32(rng.uniform(0.5, 1.5))
    names = TokenValues.__dataclass_fields__
    same = {name: getattr(values, name) for name in names}
    changed = {"log_d": values.log_d * factor, "log_s": values.log_s * factor}
    return TokenValues(**{**same, **changed, "group": group, "episode": episode})


def _write_logs(source: Path, target: Path, steps: int) -> None:
    """Repeat the metrics and the activities of a run for more steps."""
    rows = [json.loads(line) for line in (source / METRICS).read_text().splitlines()]
    rows = [each for each in rows if each.get("step", 0) > 1]
    with (target / METRICS).open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps({**rows[step % len(rows)], "step": step}) + "\n")
    events = [json.loads(line) for line in (source / EVENTS).read_text().splitlines()]
    spans = [each for each in events if each["kind"] == "span"]
    length = max(span["end"] for span in spans)
    with (target / EVENTS).open("w") as file:
        for turn in range(max(1, steps // len(rows))):
            for span in spans:
                moved = {name: span[name] + turn * length for name in ("start", "end")}
                file.write(json.dumps({**span, **moved}) + "\n")


# The dashboard as a process ---------------------------------------------------------------------


class Server:
    """A running `unstale dashboard`, its questions, and what it costs."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.url = url
        self.pid = _child_of(process)
        address, token = url.split("/?token=")
        self._host = address.removeprefix("http://")
        self._cookie = f"unstale_{self._host.split(':')[1]}={token}"

    def ask(self, question: str, **parameters: Any) -> Any:
        """Return the answer to a question of the pages."""
        connection = http.client.HTTPConnection(self._host, timeout=120)
        path = f"/api/{question}?{urlencode(parameters, doseq=True)}"
        connection.request("GET", path, headers={"cookie": self._cookie})
        response = connection.getresponse()
        body = response.read()
        connection.close()
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status} {body[:200]!r}")
        return json.loads(body)

    def news(self, run: str) -> Iterator[dict[str, Any]]:
        """Yield the progress of a run after each change, and {} now and then without one."""
        connection = http.client.HTTPConnection(self._host, timeout=120)
        path = f"/api/stream?{urlencode({'run': run})}"
        connection.request("GET", path, headers={"cookie": self._cookie})
        with closing(connection), connection.getresponse() as response:
            for line in response:
                is_news = line.startswith(b"data:")
                yield json.loads(line.removeprefix(b"data:")) if is_news else {}

    def cpu_s(self) -> float:
        """Return the processor time of the process so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(") ", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def peak_mb(self) -> float:
        """Return the largest resident memory of the process so far."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
        raise RuntimeError("the system does not state the peak memory")

    def timed(self, question: str, parameters: dict[str, Any], repeats: int) -> "Timed":
        """Ask a question several times, and measure each answer."""
        walls = []
        before = self.cpu_s()
        for _ in range(repeats):
            begin = time.perf_counter()
            self.ask(question, **parameters)
            walls.append(1000 * (time.perf_counter() - begin))
        return Timed(walls, 1000 * (self.cpu_s() - before) / repeats)


@dataclass(frozen=True, slots=True)
class Timed:
    """Times of one question in milliseconds: of each answer, and of the processor in the mean."""

    walls: list[float]
    cpu: float


def _child_of(process: subprocess.Popen[str]) -> int:
    """Return the process in which a dashboard serves. It may not have started yet."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (children := path.read_text().split()):
        if process.poll() is not None:
            raise RuntimeError(f"the dashboard ended with status {process.returncode}")
        time.sleep(0.01)
    return int(children[0])


@contextmanager
def served(runs: Path) -> Iterator[Server]:
    """Run the dashboard in its own process."""
    command = [sys.executable, "-m", "unstale", "dashboard", str(runs)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield Server(process, process.stdout.readline().strip())
    finally:
        process.terminate()
        process.wait()


# Pauses with many episodes ----------------------------------------------------------------------


def questions(run: str, last: int) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Return what the pages ask for each interaction of a user, as `(question, parameters)`."""

    def table(**parameters: Any) -> tuple[str, dict[str, Any]]:
        return "episodes", {"run": run, **parameters}

    sorts = [order + column.name for column in COLUMNS for order in ("", "-")]
    return {
        "open a run": [("run", {"run": run})],
        "open the table": [table()],
        "next page": [table(page=1), table(page=7)],
        "last page": [table(page=(last - 1) // 50, sort="reward")],
        "sort by a column": [table(sort=sort) for sort in sorts],
        "filter": [
            table(filter="success=0 outcome=trained"),
            table(filter="lag_max>=2", sort="-reward"),
            table(filter="clipped_tokens>0", sort="-clipped_tokens"),
            table(filter="task~retail stop=done", sort="turns"),
        ],
        "filter by a fact": [table(filter=f"{FACT}>0", sort="-reward")],
        "search a rare word": [table(search=RARE)],
        "search a word of all episodes": [table(search=COMMON, sort="-reward")],
        "search and filter": [table(search=COMMON, filter="success=0", sort="lag_max")],
        "open a group": [("group", {"run": run, "group": last // 20})],
        "open an episode": [("episode", {"run": run, "episode": last // 2})],
        "plots": [("series", {"run": run, "name": "reward/mean"}), ("lags", {"run": run})],
        "timeline": [("spans", {"run": run})],
    }


FACT = "fact:tool_errors"
COMMON, RARE = "order", "blanket"
"""Words of the conversations of the demo: one of nearly all, and one of few."""


def ask_all(server: Server, run: str, repeats: int) -> dict[str, list[Timed]]:
    """Measure each interaction. Return its questions' times."""
    last = server.ask("episodes", run=run, size=1)["rows"][0]["episode"]
    return {
        name: [server.timed(question, parameters, repeats) for question, parameters in asked]
        for name, asked in questions(run, last).items()
    }


def wait_until_read(server: Server, run: str) -> tuple[float, float, list[float]]:
    """Wait until the index has a run and all its texts.

    Return the seconds, the processor time, and the milliseconds that pages of the table took
    meanwhile, with a search and sorted by different columns.
    """
    begin, before = time.perf_counter(), server.cpu_s()
    walls = []
    for turn in range(1_000_000):
        sort = f"-{COLUMNS[turn % len(COLUMNS)].name}"
        asked = time.perf_counter()
        answer = server.ask("episodes", run=run, sort=sort, search=COMMON)
        walls.append(1000 * (time.perf_counter() - asked))
        if answer["index"]["complete"]:
            break
        time.sleep(0.2)
    return time.perf_counter() - begin, server.cpu_s() - before, walls


WATCH = """
window.tasks = [];
const note = (list) => window.tasks.push(...list.getEntries().map((each) => each.duration));
new PerformanceObserver(note).observe({ type: 'longtask' });
"""
FRAME = "new Promise((done) => requestAnimationFrame(() => setTimeout(done, 100)))"
SCROLL = f"""(async () => {{
  for (let at = 0; at < document.body.scrollHeight; at += 300) {{ scrollTo(0, at); await {FRAME}; }}
  scrollTo(0, 0);
}})()"""


@dataclass(frozen=True, slots=True)
class Paused:
    """One interaction in the browser, in milliseconds."""

    longest: float
    """Longest task of the page's thread. 0 if none took more than 50 ms."""
    cpu: float
    """Processor time of all its tasks, which no pause can exceed on a machine without other load.
    """


def measure_browser(server: Server, run: str, repeats: int) -> dict[str, list[Paused]]:
    """Measure the pauses of the page's thread while a user works with the table of a run."""
    from tests.support.chromium import browser, browser_program

    if browser_program() is None:
        return {}
    last = server.ask("episodes", run=run, size=1)["rows"][0]["episode"]
    found: dict[str, list[Paused]] = {}
    with browser() as page:
        page.resize(1280, 900)
        page.open(server.url)
        page.wait("document.querySelector('tbody tr')")
        page.run(f"{{ {WATCH} }} true")
        page.call("Performance.enable", timeDomain="threadTicks")

        def task_s() -> float:
            metrics = page.call("Performance.getMetrics")["metrics"]
            return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))

        def measure(name: str, action: str, condition: str) -> None:
            page.run("window.tasks.length = 0; true")
            before = task_s()
            page.run(action)
            page.wait(condition)
            page.run(FRAME)
            longest = max([0.0, *page.run("window.tasks")])
            found.setdefault(name, []).append(Paused(longest, 1000 * (task_s() - before)))

        def go(path: str) -> str:
            return f"location.hash = {json.dumps(f'#/run/{run}{path}')}"

        rows = "document.querySelectorAll('tbody tr').length === 50"
        for _ in range(repeats):
            page.run("location.hash = '#/'")
            page.wait("document.querySelector('h1')?.textContent === 'Runs'")
            measure("open the run", go(""), "document.querySelector('.uplot')")
            measure("scroll the run", SCROLL, "true")
            measure("open the table", go("/episodes"), rows)
            measure("scroll the table", SCROLL, "true")
            heads = int(page.run("document.querySelectorAll('th').length"))
            for number in range(1, heads + 1):
                head = f"document.querySelector('th:nth-child({number})')"
                sort = f"{head}.querySelector('button').click()"
                measure("sort by a column", sort, f"{head}.ariaSort !== 'none'")
            button = "document.querySelector('.pager button[aria-label=\"Next page\"]')"
            second = "document.querySelector('.pager span').innerText.startsWith('page 2 of')"
            measure("next page", f"{button}.click()", f"{rows} && {second}")
            box = "const box = document.getElementById('filter')"
            fill = f"{{ {box}; box.value = 'success=0'; box.dispatchEvent(new Event('input')); }}"
            measure("filter", fill, "location.hash.includes('success')")
            measure(
                "open a group", go(f"/group/{last // 20}"), "document.querySelector('.sibling')"
            )
            tokens = "document.querySelectorAll('.t.sampled').length > 3"
            measure("open an episode", go(f"/episode/{last // 2}"), tokens)
            colour = "const way = document.getElementById('colour')"
            change = f"{{ {colour}; way.value = 'log_d'; way.dispatchEvent(new Event('change')); }}"
            measure("colour an episode", change, "location.hash.includes('log_d')")
    return found


def pauses(folder: Path, repeats: int, episodes: int) -> list[str]:
    """Measure a long run and return the lines of the table."""
    source = record(folder)
    groups = read_groups(source)
    runs = folder / "runs"
    multiply(source, groups, runs / "short", max(1, episodes // SMALL))
    steps = multiply(source, groups, runs / "long", episodes)
    per_step = json.loads((source / CONFIG).read_text())["schedule"]["groups_per_step"]
    with served(runs) as server:
        wait_until_read(server, "short")
        seconds, cpu_s, meanwhile = wait_until_read(server, "long")
        server.ask("episodes", run="long", sort="reward")
        short = ask_all(server, "short", repeats)
        long = ask_all(server, "long", repeats)
        with growing(runs / "long", groups, first=steps + 1, per_step=per_step):
            while_growing = [
                server.timed("episodes", {"run": "long", "sort": f"-{column.name}"}, 1)
                for column in COLUMNS
                for _ in range(repeats)
            ]
        shown = measure_browser(server, "long", repeats)
        peak = server.peak_mb()
    return [
        f"## {episodes:,} episodes",
        "",
        f"The journal has {(runs / 'long' / JOURNAL).stat().st_size / 1e6:.0f} MB. The index was "
        f"filled in {seconds:.0f} s, with {cpu_s:.0f} s of processor time, pages asked for "
        f"meanwhile included; such a page took {spread(meanwhile, '{:.0f}')} ms. The largest "
        f"resident memory of the dashboard was {peak:.0f} MB.",
        "",
        f"Milliseconds at the server, {repeats} answers to each question. The largest is of all "
        "answers. Processor time has the resolution of the system's clock, and depends less on "
        f"other load. The ratio is that of the processor times with {episodes:,} and "
        f"{episodes // SMALL:,} episodes.",
        "",
        *columns("interaction", "median", "largest", "processor", "its largest", "ratio"),
        *(_server_row(name, long[name], short[name]) for name in long),
        _server_row("sort by a column while the run grows", while_growing, None),
        "",
        *_browser_table(shown),
    ]


def _server_row(name: str, long: Sequence[Timed], short: Sequence[Timed] | None) -> str:
    walls = [wall for each in long for wall in each.walls]
    cpu = [each.cpu for each in long]
    ratio = "—"
    if short is not None and median(each.cpu for each in short) > 0:
        ratio = f"{median(cpu) / median(each.cpu for each in short):.1f}"
    cells = (median(walls), max(walls), median(cpu), max(cpu))
    return row(name, *(f"{cell:.0f}" for cell in cells), ratio)


def _browser_table(shown: dict[str, list[Paused]]) -> list[str]:
    if not shown:
        return ["Chromium was not installed, so the pauses of the pages were not measured.", ""]
    return [
        "Milliseconds in which the page in Chromium did not respond, by the longest pause of an "
        "interaction. Pauses below 50 ms are not reported and count as 0. The processor time is "
        "that of all tasks of the interaction together.",
        "",
        *columns("interaction", "longest task, median", "largest", "processor", "its largest"),
        *(
            row(
                name,
                f"{median(each.longest for each in times):.0f}",
                f"{max(each.longest for each in times):.0f}",
                f"{median(each.cpu for each in times):.0f}",
                f"{max(each.cpu for each in times):.0f}",
            )
            for name, times in shown.items()
        ),
        "",
    ]


# What an open page costs the training -----------------------------------------------------------


Kind = Literal["page", "all"]
"""A client of a dashboard."""

OPEN: dict[Kind, str] = {
    "page": "the page of the run",
    "all": "all of that page, and the table of episodes",
}


class Reader:
    """A client that does what an open page of a run does.

    It follows the run and asks again after changes, as often as the page. The kind `page` asks for
    what a page shows before it is scrolled: the page asks for other parts when they come into view.
    The kind `all` asks for all parts, and for the table of episodes, which no one page does.
    """

    def __init__(self, server: Server, kind: Kind) -> None:
        self._server = server
        self._kind = kind
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow)
        self.spent: list[tuple[int, float]] = []
        """After each update: the last step of the run, and the server's processor time so far."""

    def __enter__(self) -> "Reader":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _follow(self) -> None:
        while not (runs := self._server.ask("runs")["runs"]):
            if self._over.wait(1):
                return
        name = runs[0]["name"]
        for progress in self._server.news(name):
            if self._over.is_set():
                return
            if progress:
                step = self._update(name)
                self.spent.append((step, self._server.cpu_s()))
                self._over.wait(UPDATE_S)

    def _update(self, name: str) -> int:
        """Ask for what is shown. Return the last step of the run."""
        run = self._server.ask("run", run=name)
        charts = [chart for section in run["sections"] for chart in section["charts"]]
        names = [line["metric"] for chart in charts[:IN_VIEW] for line in chart["lines"]]
        names.append("rollout/success_rate")
        for start in range(0, len(names), MAX_METRICS):
            part = names[start : start + MAX_METRICS]
            self._server.ask("series", run=name, name=part, points=500)
        if self._kind == "all":
            for question in ("lags", "spans", "log", "details", "episodes"):
                self._server.ask(question, run=name)
        return int(run["step"] or 0)

    def per_step(self) -> float:
        """Return the server's processor time per step, from step 2 on, without its start."""
        known = [each for each in self.spent if each[0] >= FIRST]
        (first, before), (last, after) = known[0], known[-1]
        return (after - before) / (last - first)


@dataclass(frozen=True, slots=True)
class Trained:
    """Times of a run of the demo, with open dashboards or without."""

    step_s: float
    """Mean time of a step. The first two do not count."""
    cpu_s: float
    """Processor time of the training per step, with all its processes and its start."""
    dashboard_s: dict[Kind, float]
    """Processor time per step of the dashboard that has this client. Empty without dashboards."""


def train(folder: Path, name: str, *options: str) -> Path:
    """Train the demo and return its folder."""
    run_training(folder, name, *options)
    return folder / name


def run_training(folder: Path, name: str, *options: str) -> float:
    """Train the demo and return its processor time, with that of all its processes."""
    command = [sys.executable, "-m", "unstale", "train", "retail", f"--name={name}"]
    process = subprocess.Popen(
        [*command, f"--runs={folder}", *DEMO, *options],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _, status, used = os.wait4(process.pid, 0)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"the training ended with status {process.returncode}")
    return used.ru_utime + used.ru_stime


def measure_training(folder: Path, name: str, *, steps: int, is_open: bool) -> Trained:
    """Train the demo, without a dashboard or with one for each client."""
    runs = folder / name
    runs.mkdir()
    with ExitStack() as stack:
        readers = {
            kind: stack.enter_context(Reader(stack.enter_context(served(runs)), kind))
            for kind in (OPEN if is_open else ())
        }
        used = run_training(runs, "demo", f"--max_steps={steps}")
    rows = [json.loads(line) for line in (runs / "demo" / METRICS).read_text().splitlines()]
    times = {each["step"]: each["time_s"] for each in rows}
    last = max(times)
    return Trained(
        step_s=(times[last] - times[FIRST]) / (last - FIRST),
        cpu_s=used / last,
        dashboard_s={kind: reader.per_step() for kind, reader in readers.items()},
    )


def journal_bytes(folder: Path, share: float) -> tuple[int, float]:
    """Return the trained tokens of a demo, and the bytes of its journal per trained token."""
    run = train(folder, f"share-{share}", f"--journal.token_share={share}")
    rows = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    tokens = sum(int(each.get("trainer/action_tokens", 0)) for each in rows)
    size = sum(file.stat().st_size for file in run.glob(f"{JOURNAL}*"))
    return tokens, size / tokens


def read_kept(path: Path | None) -> list[Trained]:
    """Return the trainings that earlier calls kept in a file."""
    if path is None or not path.exists():
        return []
    return [Trained(**json.loads(line)) for line in path.read_text().splitlines()]


def cost(folder: Path, rounds: int, steps: int, keep: Path | None) -> list[str]:
    """Measure the cost of an open dashboard and return the lines of the table.

    A round is a training with open dashboards and one without. Trainings in the file `keep` count
    as well, and each new one is added to it.
    """
    measured = read_kept(keep)
    for _ in range(2 * rounds):
        is_open = sum(bool(each.dashboard_s) for each in measured) * 2 <= len(measured)
        CONSOLE.print(f"training {len(measured) + 1}: {'open dashboards' if is_open else 'none'}")
        name = f"run-{len(measured)}"
        found = measure_training(folder, name, steps=steps, is_open=is_open)
        measured.append(found)
        if keep is not None:
            with keep.open("a") as file:
                file.write(json.dumps(asdict(found)) + "\n")
    opened = [each for each in measured if each.dashboard_s]
    without = [each for each in measured if not each.dashboard_s]
    lines = [
        "## The training",
        "",
        f"The demo for {steps} steps: {len(opened)} times with two open "
        f"dashboards, in turn with {len(without)} times without. The client of the first asks for "
        "what the page of the run shows before it is scrolled, that of the second for all of that "
        f"page and the table of episodes, each at most every {UPDATE_S:.0f} seconds. Processor "
        f"times are those of one dashboard and of the same training. Without the first {FIRST} "
        "steps. Median and range.",
        "",
        *columns("one dashboard, with", "processor time per step", "part of the training's"),
    ]
    for kind, name in OPEN.items():
        spent = [1000 * each.dashboard_s[kind] for each in opened]
        parts = [100 * each.dashboard_s[kind] / each.cpu_s for each in opened]
        lines.append(row(name, spread(spent, "{:.1f} ms"), spread(parts, "{:.2f}%")))
    lines += ["", *columns("training", "time of a step", "processor time of a step")]
    for name, trainings in (("both dashboards", opened), ("none", without)):
        if trainings:
            times = spread([each.step_s for each in trainings], "{:.2f} s")
            used = spread([each.cpu_s for each in trainings], "{:.2f} s")
            lines.append(row(name, times, used))
    return [*lines, ""]


def sizes(folder: Path) -> list[str]:
    """Measure the journal with and without the values of trained tokens. Return the table."""
    found = {share: journal_bytes(folder, share) for share in (0.0, 1.0)}
    return [
        "## The journal",
        "",
        *columns("`journal.token_share`", "bytes per trained token", "trained tokens"),
        *(
            row(f"{share:g}", f"{size:.1f}", f"{tokens:,}")
            for share, (tokens, size) in found.items()
        ),
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=("pauses", "cost", "bytes"))
    parser.add_argument("--episodes", type=int, default=EPISODES)
    parser.add_argument("--repeats", type=int, default=5, help="answers to each question")
    parser.add_argument("--rounds", type=int, default=5, help="trainings with and without")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of these trainings")
    parser.add_argument("--keep", type=Path, help="file of trainings, to which each is added")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # ends its processes as well
    lines = [
        f"Goals: no interaction above {GOAL_MS:.0f} ms, and a step with an open dashboard at most "
        f"{GOAL_COST:.2f} times as long as without.",
        "",
    ]
    with tempfile.TemporaryDirectory(prefix="bench-dashboard-") as folder:
        if "pauses" in chosen.parts:
            lines += pauses(Path(folder), chosen.repeats, chosen.episodes)
        if "cost" in chosen.parts:
            lines += cost(Path(folder), chosen.rounds, chosen.steps, chosen.keep)
        if "bytes" in chosen.parts:
            lines += sizes(Path(folder))
    write("dashboard", "What the dashboard takes", lines)


if __name__ == "__main__":
    main()
