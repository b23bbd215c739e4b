"""Run misbehaving environments and clients for a long time, and count what they leave behind.

    python -m benchmarks.soak --minutes 30        # 32 minutes; two cores, of which it uses one

Three runs of the shipped model train at the same time, each with a kind of user code
(`benchmarks/soak_envs.py`): environments in the process of the run, environments in worker
processes, and agents that call the endpoint. A dashboard shows them. Clients connect to the
dashboard and to the runs' metrics, send nothing or half a request, and wait.

The descriptors, threads and resident memory of each process are counted, and those of its child
processes. The table compares the last third of the time with the second third. Exits with 1 if a
run ended early, or if a count grew.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from urllib.parse import urlsplit

from benchmarks.soak_envs import FACTORIES
from benchmarks.tables import CONSOLE, columns, row, write
from unstale.durability.run_folder import RunFolder

EVERY_S = 5.0
"""Seconds between two counts, and between two rounds of new idle clients."""
KEPT_S = 45.0
"""Seconds for which an idle client keeps its connection."""
CLIENTS = 4
"""New clients of each server in each round."""
GROWTH = {"descriptors": (0.1, 32.0), "threads": (0.1, 8.0), "memory": (0.05, 16.0)}
"""Growth of a figure that still counts as flat: a share of it, or an absolute number if larger.

Two agents that leave connections open have 32 descriptors, because both ends are in the process.
"""

LOW = 10
"""Memory is compared at its first of so many quantiles: a leak stays, but a large request in flight
(up to 600 MB of 200,000 messages) is gone after seconds.
"""

SMALL = (
    *("--model", "base", "--max_steps", "1000000"),
    *("--rollout.max_failed_share", "1", "--rollout.max_turns", "2"),
    *("--schedule.groups_per_step", "4", "--schedule.group_size", "2"),
    *("--engine.max_completion_tokens", "24", "--engine.max_context", "256", "--eval.tasks", "4"),
    *("--eval.interval", "50", "--checkpoint.interval", "50", "--allow-weak-sandbox"),
)
OPTIONS: Mapping[str, Sequence[str]] = {
    "here": ("--rollout.timeout_s", "5", "--rollout.retries", "0"),
    # A blocked worker is interrupted after 7 s, or ended after 10 s: others in it wait for longer.
    "in_workers": (
        *("--task.isolate", "process", "--task.worker_memory_gb", "2"),
        *("--rollout.timeout_s", "20", "--rollout.retries", "1"),
        *("--task.workers", "3", "--schedule.groups_per_step", "8"),
    ),
    "agents": (
        *("--endpoint.lenient", "true", "--rollout.timeout_s", "20"),
        *("--rollout.retries", "0", "--schedule.groups_per_step", "8"),
    ),
}


@dataclass(frozen=True, slots=True)
class Count:
    """What a process and its children hold at one time."""

    process: str
    minute: float
    descriptors: int
    threads: int
    memory: float
    """Resident memory in MB."""
    children: int
    all_descriptors: int
    all_threads: int
    all_memory: float


def _children() -> dict[int, list[int]]:
    """Return the child processes of each process."""
    found: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            found.setdefault(parent, []).append(int(path.parent.name))
    return found


def _held(process: int) -> tuple[int, int, float]:
    """Return the descriptors, threads and MB of resident memory of a process, 0 if it has ended."""
    path = Path("/proc") / str(process)
    with suppress(OSError, KeyError):
        lines = (line.split(":", 1) for line in (path / "status").read_text().splitlines())
        status = dict(lines)
        return (
            len(os.listdir(path / "fd")),
            int(status["Threads"]),
            int(status["VmRSS"].split()[0]) / 1024,
        )
    return 0, 0, 0.0


def count(name: str, process: int, minute: float) -> Count:
    """Return what a process and all of its descendants hold."""
    children, of = [process], _children()
    for each in children:
        children += of.get(each, [])
    held = [_held(each) for each in children]
    sums = [sum(column) for column in zip(*held, strict=True)]
    own = held[min(1, len(held) - 1)]  # a command works in the child of its supervisor
    return Count(name, minute, *own, len(children) - 1, int(sums[0]), int(sums[1]), sums[2])


class IdleClients:
    """Connections that send nothing or a part of a request. Each is closed after `KEPT_S`."""

    def __init__(self) -> None:
        self._open: list[tuple[float, socket.socket]] = []
        self.num_opened = 0

    def connect(self, ports: Sequence[int]) -> None:
        """Open new connections to each port, and close old ones."""
        now = time.monotonic()
        while self._open and self._open[0][0] < now - KEPT_S:
            self._open.pop(0)[1].close()
        for port in ports:
            for number in range(CLIENTS):
                with suppress(OSError):
                    client = socket.create_connection(("127.0.0.1", port), timeout=1)
                    self._open.append((now, client))
                    self.num_opened += 1
                    if number % 2:
                        client.sendall(b"GET / HTTP/1.1\r\nHost: ")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@contextmanager
def _started(folder: Path, name: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command of the package with its output in a file, and end it after the context."""
    command = [sys.executable, "-m", "unstale", *words]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(log: Path) -> str:
    """Return the address that a dashboard has printed."""
    for _ in range(600):
        for word in log.read_text().split():
            if word.startswith("http://"):
                return word
        time.sleep(0.1)
    raise RuntimeError(f"the dashboard did not start: {log.read_text()}")


def soak(folder: Path, minutes: float) -> tuple[list[Count], list[str]]:
    """Run everything for some minutes. Return the counts, and what ended before its time."""
    counts: list[Count] = []
    ended: dict[str, str] = {}
    clients = IdleClients()
    with ExitStack() as stack:
        running, ports = {}, []
        for name in FACTORIES:
            ports.append(_free_port())
            words = ("train", "calculator", "--task.env", f"benchmarks.soak_envs:{name}", *SMALL)
            place = ("--runs", str(folder / "runs"), "--name", name)
            port = ("--prometheus-port", str(ports[-1]))
            command = (*words, *place, *port, *OPTIONS[name])
            running[name] = stack.enter_context(_started(folder, name, *command))
        while not (folder / "runs").is_dir():
            time.sleep(0.5)
        shown = ("dashboard", str(folder / "runs"))
        running["dashboard"] = stack.enter_context(_started(folder, "dashboard", *shown))
        ports.append(urlsplit(_address(folder / "dashboard.log")).port or 0)
        began = time.monotonic()
        while (minute := (time.monotonic() - began) / 60) < minutes:
            clients.connect(ports)
            for name, process in running.items():
                if process.poll() is None:
                    counts.append(count(name, process.pid, minute))
                elif name not in ended:
                    last = (folder / f"{name}.log").read_text(errors="replace")[-600:]
                    ended[name] = f"{name} ended after {minute:.1f} minutes: {last}"
            (folder / "counts.json").write_text(json.dumps([asdict(each) for each in counts]))
            time.sleep(EVERY_S)
        CONSOLE.print(f"{clients.num_opened} idle connections were opened")
    return counts, list(ended.values())


def grown(counts: Sequence[Count], minutes: float) -> list[str]:
    """Return what grew from the second to the last third of the time, by process."""
    found = []
    for name in dict.fromkeys(each.process for each in counts):
        own = [each for each in counts if each.process == name]
        for kind, (share, least) in GROWTH.items():
            middle, last = _thirds(own, kind, minutes)
            if last > middle + max(share * middle, least):
                found.append(f"{kind} of {name} grew from {middle:,.0f} to {last:,.0f}")
    return found


def _thirds(own: Sequence[Count], kind: str, minutes: float) -> tuple[float, float]:
    """Return what the second and the last third of the time have: memory `LOW`, else medians."""
    middle = [getattr(each, kind) for each in own if 1 / 3 < each.minute / minutes <= 2 / 3]
    last = [getattr(each, kind) for each in own if each.minute / minutes > 2 / 3]
    figure = (lambda values: quantiles(values, n=LOW)[0]) if kind == "memory" else median
    return figure(middle or [0, 0]), figure(last or [0, 0])


def table(counts: Sequence[Count], minutes: float, folder: Path) -> list[str]:
    """Return the table of all processes over time, and what the runs did meanwhile."""
    marks = [minutes * part / 6 for part in range(1, 7)]
    lines = columns("process", "what", *(f"{mark:.0f} min" for mark in marks), "largest")
    for name in dict.fromkeys(each.process for each in counts):
        own = [each for each in counts if each.process == name]
        near = [min(own, key=lambda each: abs(each.minute - mark)) for mark in marks]
        for kind in ("descriptors", "threads", "memory", "children", "all_memory"):
            label = {"memory": "memory in MB", "all_memory": "memory with children in MB"}
            values = [getattr(each, kind) for each in near]
            largest = max(getattr(each, kind) for each in own)
            cells = [f"{value:,.0f}" for value in (*values, largest)]
            lines.append(row(name, label.get(kind, kind), *cells))
    lines += ["", *columns("run", "steps", "failed attempts", "worker processes that were ended")]
    for name in FACTORIES:
        run = RunFolder(folder / "runs" / name)
        kinds = [each.get("kind") for each in run.rows("events.jsonl")]
        ends = [kinds.count(kind) for kind in ("episode_failed", "worker_ended")]
        lines.append(row(name, len(run.metrics()), *ends))
    return lines


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--folder", type=Path, help="a folder to keep the runs in")
    parser.add_argument("--again", action="store_true", help="the table of the runs in the folder")
    chosen = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        problems: list[str] = []
        if chosen.again:
            stored = json.loads((folder / "counts.json").read_text())
            counts = [Count(**each) for each in stored]
        else:
            counts, problems = soak(folder, chosen.minutes)
        problems += grown(counts, chosen.minutes)
        lines = [
            "A third of all tasks misbehave. Counts are of the process itself, after the given "
            "minutes of the run. Flat means: the median of the last third is at most 10% above "
            "that of the second third, or at most 32 descriptors or 8 threads. Memory is flat if "
            "its first decile is at most 5%, or 16 MB, above. The agents keep some connections "
            "open for 60 s, with both ends in the process.",
            "",
            *table(counts, chosen.minutes, folder),
            "",
            *([f"- {problem}" for problem in problems] or ["All counts are flat."]),
        ]
        write("soak", "Misbehaving environments for a long time", lines)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
