"""Profile the engine, the trainer and whole steps: which code takes the processor time.

    python -m benchmarks.profiles       # 12 minutes on two cores; `--help` for parts of it

It needs Linux's `perf` (package `linux-perf` or `linux-tools`), and the permission to use it. The
work is that of `benchmarks.generate`, `benchmarks.train` and `benchmarks.deltas`. docs/speed.md
explains missed goals by this table. Each part of the code is found by the names of compiled
functions and their libraries. What fits none of them is counted as Python and NumPy.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from benchmarks import deltas, generate, resume, train
from benchmarks.generate_peers import GROUP, Episode, Ours
from benchmarks.tables import CONSOLE, OURS, ROOT, columns, environ, row, spread, write
from unstale import loop
from unstale.engines.embedded.pages import PAGE, RUN
from unstale.weights.store import VersionStore

FREQUENCY = 499
"""Samples of a thread in a second of its processor time. It is no round number, so that samples do
not fall into step with work that repeats.
"""
CHANGES, COMPRESSION, CHECKSUMS = "changed words", "compression", "checksums"
PRODUCTS, ATTENTION, WAITING = "products with weights", "attention", "waiting for another thread"
OTHER = "Python and NumPy"
PARTS = {
    ATTENTION: r"^(decoder|kernels)-\S+ attend",
    PRODUCTS: r"^decoder-\S+ (tiles?|panel_product)\b| mkl_(blas|\w*gemm)|dnnl|^perf-\d+\.map",
    "rest of the layers": r"^(decoder|kernels)-",
    "choice of tokens": r"^sampling-",
    CHANGES: r"^changes-",
    COMPRESSION: r"^backend_c\.|zstd",  # the library of the package zstandard
    CHECKSUMS: r"xxhash",
    WAITING: r"^libgomp",
    "other operations of torch": r"^lib(torch_cpu|c10)\.",
    "system and memory": r"^(\[kernel|libc\.|libc-)",
}
"""Regular expressions by part of the code, matched with `library function`. The first match counts.

oneDNN's products have no library: they are compiled while the program runs.
"""
Shares = dict[tuple[str, str], float]
"""Processor seconds by owner (a process or thread) and part of the code."""


def part_of(library: str, function: str) -> str:
    """Return the part of the code to which a function belongs.

    >>> part_of("decoder-0af3.so", "attend"), part_of("libpython3.11.so.1.0", "_PyEval_EvalFrame")
    ('attention', 'Python and NumPy')
    """
    name = f"{library} {function}"
    return next((part for part, form in PARTS.items() if re.search(form, name)), OTHER)


class Recording:
    """A record of what some processes do, by `perf`, from the start of a context on."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = ",".join(map(str, pids))
        self._stack = ExitStack()

    def __enter__(self) -> "Recording":
        """Start `perf`, and give it half a second. Raises RuntimeError if it ends meanwhile."""
        self._file = self._stack.enter_context(tempfile.NamedTemporaryFile(suffix=".perf"))
        said = self._stack.enter_context(tempfile.TemporaryFile())
        command = ["perf", "record", "-q", "-F", str(FREQUENCY), "-e", "cpu-clock"]
        command += ["-k", "CLOCK_MONOTONIC", "-o", self._file.name, "-p", self._pids]
        self._perf = subprocess.Popen(command, stdout=said, stderr=said)
        self._stack.callback(self._stop)
        time.sleep(0.5)
        if self._perf.poll() is not None:
            said.seek(0)
            self._stack.close()
            raise RuntimeError(f"perf does not record: {said.read().decode().strip()}")
        self._began = time.monotonic()
        return self

    def __exit__(self, *reason: object) -> None:
        self._stack.close()

    def shares(self, owner: Callable[[int, int], str], *, since: float | None = None) -> Shares:
        """Stop, and return the processor seconds since a time of the monotonic clock.

        Without a time they are those since the context began. `owner` names the process or thread
        by the numbers of both.
        """
        ended = time.monotonic()
        self._stop()
        command = ["perf", "script", "-i", self._file.name, "-F", "pid,tid,time,ip,sym,dso"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        form = re.compile(r"^\s*(\d+)/(\d+)\s+([\d.]+):\s+[0-9a-f]+ (.*) \((.*)\)\s*$")
        counts: Counter[tuple[str, str]] = Counter()
        for line in said.splitlines():
            if not (match := form.match(line)):
                continue
            pid, tid, at, function, library = match.groups()
            if (since or self._began) <= float(at) <= ended:
                part = part_of(library.rpartition("/")[2], function)
                counts[owner(int(pid), int(tid)), part] += 1
        if not counts:
            raise RuntimeError(f"perf recorded nothing: {said[:200]}")
        return {key: count / FREQUENCY for key, count in counts.items()}

    def _stop(self) -> None:
        self._perf.send_signal(signal.SIGINT)
        self._perf.wait()


def of_part(found: Shares, part: str) -> float:
    return sum(seconds for (_, name), seconds in found.items() if name == part)


def sampling(size: str, repeats: int, folder: Path) -> list[str]:
    """Return rows of the processor time of a sampled token, with 64 and 256 live episodes."""
    generate.make_model(size, folder)
    engine = Ours(folder, "float32", 2)
    rounds: dict[int, list[tuple[int, Shares, float]]] = {64: [], 256: []}
    try:
        engine.forget()
        engine.play(generate.workload(16, generate.SIZES[size][4], 0), 16)
        for number in range(repeats):
            for live, measured in rounds.items():
                CONSOLE.print(f"sampling, {size}, {live} live, round {number + 1} of {repeats}")
                episodes = generate.workload(live, generate.SIZES[size][4], number)
                engine.forget()
                with Recording([os.getpid(), *engine.pids]) as recording:
                    tokens, _ = engine.play(episodes, live)
                    found = recording.shares(lambda *_: "all")
                measured.append((tokens, found, read_bytes(size, episodes)))
    finally:
        engine.close()
    names = [PRODUCTS, ATTENTION, "rest of the layers", "choice of tokens"]
    return [
        row(
            f"{size}, {live} live",
            *(
                spread(
                    [1e6 * of_part(found, name) / tokens for tokens, found, _ in measured], "{:.0f}"
                )
                for name in names
            ),
            spread([1e6 * _rest(found, names) / tokens for tokens, found, _ in measured], "{:.0f}"),
            spread([1e6 * sum(found.values()) / tokens for tokens, found, _ in measured], "{:.0f}"),
            spread(
                [read / of_part(found, ATTENTION) / 1e9 for _, found, read in measured], "{:.1f}"
            ),
        )
        for live, measured in rounds.items()
    ]


def _rest(found: Shares, names: Sequence[str]) -> float:
    return sum(seconds for (_, name), seconds in found.items() if name not in names)


def _in_percent(rounds: Sequence[Shares], names: Sequence[str]) -> list[str]:
    """Return the shares of some parts in all rounds, and that of all other parts."""
    parts: list[Callable[[Shares], float]] = [partial(of_part, part=name) for name in names]
    parts.append(partial(_rest, names=names))
    return [
        spread([seconds(found) / sum(found.values()) for found in rounds], "{:.0%}")
        for seconds in parts
    ]


def read_bytes(size: str, episodes: Sequence[Episode]) -> int:
    """Return the bytes of keys and values that the engine's attention reads.

    A pass reads the keys of whole pages and the values of the tokens before it, once for `RUN`
    tokens of a prompt or tool result. All siblings are taken to be computed together, and then read
    the whole pages of their prompt once. As they end at different times, more is read.

    >>> read_bytes("tiny", [([2] * 8, [(2, [3]), (1, [])])])  # passes see 8 / 8, 9 and 11 tokens
    40192
    """
    layers, _, _, kv_heads, _ = generate.SIZES[size]
    tokens = 0.0
    for opening, turns in episodes:
        shared = len(opening) // PAGE * PAGE * (1 - 1 / GROUP)
        tokens += _tokens_read(_ends(0, len(opening))) / GROUP
        end = len(opening)
        cached = end
        for number, (length, result) in enumerate(turns):
            passes = np.arange(end + 1, end + length)  # the first token needs no pass of its own
            if number:
                passes = np.concatenate([_ends(cached, end), passes])
            tokens += _tokens_read(passes) - 2 * shared * len(passes)
            cached = end + length - 1
            end += length + len(result)
    return round(tokens * layers * kv_heads * 32 * 4)


def _ends(start: int, end: int) -> "np.ndarray":
    """Return the last positions of the runs in which some context tokens are computed."""
    return np.minimum(np.arange(start, end, RUN) + RUN, end)


def _tokens_read(passes: "np.ndarray") -> int:
    """Return how many keys and values some passes read. `passes` are the tokens that each sees."""
    return int((-(-passes // PAGE) * PAGE + passes).sum())


def scattered_read() -> float:
    """Return the bytes that a processor second reads from blocks of 8 KB in random order."""
    blocks = torch.ones(2**15, 2048)
    took = []
    for _ in range(5):
        order = torch.randperm(len(blocks)).view(2, -1)
        began = time.process_time()
        functional.embedding_bag(order, blocks, mode="sum")
        took.append(time.process_time() - began)
    return blocks.nbytes / min(took)


def training(size: str, repeats: int, bench: train.Bench) -> list[str]:
    """Return rows of the shares of the trainer's processor time, for a ragged batch."""
    model, batch = bench.made(size), bench.folder / f"{size}.json"
    batch.write_text(json.dumps(train.ragged(4, train.MODELS[size].vocab)))
    names = [PRODUCTS, ATTENTION, "rest of the layers", WAITING]
    rounds: list[Shares] = []
    child = bench.mine("ours", model, "--batch", batch)
    with child as turn:
        for _ in range(3):
            turn()
        for number in range(repeats):
            CONSOLE.print(f"training, {size}, round {number + 1} of {repeats}")
            with Recording([child.process.pid]) as recording:
                ends = time.monotonic() + 8
                while time.monotonic() < ends:
                    turn()
                rounds.append(recording.shares(lambda *_: "trainer"))
    return [row(size, *_in_percent(rounds, names))]


WHOLE = "whole-child"
"""First argument of this program in a process that is measured."""
MEASURED_STEPS = 12
Steps = tuple[Shares, float]
"""The processor seconds of a step, and its seconds by the clock."""


def whole_steps(staleness: int, repeats: int, bench: train.Bench) -> list[str]:
    """Return a row of the processor seconds of a whole step, of the 1M model."""
    rounds = []
    for number in range(repeats):
        CONSOLE.print(f"whole steps, {staleness} behind, round {number + 1} of {repeats}")
        rounds.append(_whole(staleness, bench.made("1M")))

    def one(value: Callable[[Shares], float]) -> str:
        return spread([value(found) for found, _ in rounds])

    def trainer(found: Shares, *parts: str) -> float:
        return sum(s for (who, name), s in found.items() if who == "trainer" and name in parts)

    def everything_of(found: Shares, name: str) -> float:
        return sum(s for (who, _), s in found.items() if who == name)

    return [
        row(
            "synchronous" if staleness == 0 else f"{staleness} version behind, exact",
            one(lambda found: everything_of(found, "engine")),
            one(lambda found: everything_of(found, "event loop")),
            one(lambda found: trainer(found, PRODUCTS)),
            one(lambda found: everything_of(found, "trainer") - trainer(found, PRODUCTS, WAITING)),
            one(lambda found: sum(found.values()) - of_part(found, WAITING)),
            spread([seconds for _, seconds in rounds]),
        )
    ]


NUM_WORDS = 10_000_000
NUM_VERSIONS = 30
"""Versions that are encoded in a round. Their weights are those of two versions by turns."""


def encoding(repeats: int) -> list[str]:
    """Return rows of the shares of one thread's time, while a store adds the next version."""
    rows = []
    torch.set_num_threads(1)
    for rate, share in deltas.SHARES.items():
        both = deltas.versions(share, NUM_WORDS)
        rounds: list[Shares] = []
        for number in range(repeats):
            CONSOLE.print(f"encoding, learning rate {rate}, round {number + 1} of {repeats}")
            store = VersionStore()
            store.put(0, both[0])
            with Recording([os.getpid()]) as recording:
                for version in range(1, 1 + NUM_VERSIONS):
                    store.put(version, both[version % 2])
                rounds.append(recording.shares(lambda *_: "store"))
        names = [CHANGES, COMPRESSION, CHECKSUMS]
        rows.append(row(rate, *_in_percent(rounds, names)))
    return rows


IMPORTED = ("torch", "transformers", "scipy", "unstale")


def imports(repeats: int, folder: Path) -> list[str]:
    """Return rows of the seconds that imports take, from `--resume` to the first trained step."""
    resume.kill_demo(folder)
    rounds = []
    for number in range(repeats):
        CONSOLE.print(f"imports of a resumed run, round {number + 1} of {repeats}")
        run = folder / f"again{number}"
        shutil.copytree(folder / "killed", run)
        seconds = resume.resume_s(run, "-X", "importtime")
        rounds.append(_imported(run.with_suffix(".log").read_text()) | {"all": seconds})
    rest = [
        each["imports"] - sum(each[name] for name in IMPORTED if name in each) for each in rounds
    ]
    return [
        *(row(name, spread([each[name] for each in rounds])) for name in IMPORTED),
        row("other packages and the standard library", spread(rest)),
        row("all imports", spread([each["imports"] for each in rounds])),
        row("from the command to the end of the first step", spread([e["all"] for e in rounds])),
    ]


def _imported(log: str) -> dict[str, float]:
    """Return the seconds of all imports, and of those of each package of `IMPORTED`.

    >>> _imported("import time:  2000000 |  3000000 |     torch.nn")["torch"]
    2.0
    """
    found = dict.fromkeys([*IMPORTED, "imports"], 0.0)
    for line in log.splitlines():
        if match := re.match(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\w+)", line):
            seconds, package = int(match[1]) / 1e6, match[2]
            found["imports"] += seconds
            if package in found:
                found[package] += seconds
    return found


def _whole(staleness: int, model: Path) -> Steps:
    """Run whole steps in a new process, which has the settings of threads that a run has."""
    command = [sys.executable, "-m", "benchmarks.profiles", WHOLE, str(staleness), str(model)]
    done = subprocess.run(
        command, cwd=ROOT, env=environ(OURS), check=True, capture_output=True, text=True
    )
    seconds, rows = json.loads(done.stdout.splitlines()[-1])
    return {(owner, part): value for owner, part, value in rows}, seconds


def measure_whole(staleness: int, model: str) -> None:
    """Write the seconds and the processor seconds of a whole step to standard output, as JSON."""
    take_step = loop.take_step
    mine = os.getpid()
    num_taken = 0
    began = 0.0
    result: list[Any] = []

    def owner(pid: int, tid: int) -> str:
        return "engine" if pid != mine else "event loop" if tid == mine else "trainer"

    with ExitStack() as stack:

        async def counted(*given: Any) -> Any:
            nonlocal num_taken, began
            if num_taken == train.WARM - 1:  # a step earlier, because its start stops the loop
                result.append(stack.enter_context(Recording([mine, *_children()])))
            if num_taken == train.WARM:
                began = time.monotonic()
            done = await take_step(*given)
            num_taken += 1
            if num_taken == train.WARM + MEASURED_STEPS:
                seconds = (time.monotonic() - began) / MEASURED_STEPS
                found = result.pop().shares(owner, since=began)
                rows = [(*key, value / MEASURED_STEPS) for key, value in found.items()]
                result.extend([seconds, rows])
            return done

        loop.take_step = counted  # type: ignore[assignment]
        steps = MEASURED_STEPS + 1  # one more, because an evaluation follows the last step
        options = ["--child", "whole", "--model", model, "--steps", str(steps)]
        train.whole(train.options().parse_args([*options, "--staleness", str(staleness)]))
    sys.stdout.write(json.dumps(result) + "\n")


def _children() -> list[int]:
    """Return the child processes of this one."""
    lists = Path("/proc/self/task").glob("*/children")
    return [int(pid) for each in lists for pid in each.read_text().split()]


def main() -> None:
    if sys.argv[1:2] == [WHOLE]:
        measure_whole(int(sys.argv[2]), sys.argv[3])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    every = ["sampling", "training", "whole", "encoding", "imports"]
    parser.add_argument("--parts", nargs="+", choices=every, default=every)
    parser.add_argument("--sizes", nargs="+", choices=["1M", "5M"], default=["1M", "5M"])
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    if not shutil.which("perf"):
        raise SystemExit("perf is not installed: apt-get install linux-perf, or linux-tools")
    lines = [f"Two threads, {chosen.repeats} rounds, medians and ranges."]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bench = train.Bench(train.options().parse_args([]), folder)
        if "sampling" in chosen.parts:
            lines += [
                "",
                "## Sampling",
                "",
                "Processor microseconds for each sampled token, prompts and tool results included. "
                "The last column is the rate at which attention reads keys and values, in GB for a "
                "processor second. Blocks of 8 KB in random order were read at "
                f"{scattered_read() / 1e9:.1f} GB for a processor second in the same run.",
                "",
                *columns(
                    "model", PRODUCTS, ATTENTION, "rest of the layers", "choice of tokens",
                    "Python and the rest", "all", "GB/s",
                ),
            ]  # fmt: skip
            for size in chosen.sizes:
                lines += sampling(size, chosen.repeats, folder / f"{size}-generate")
        if "training" in chosen.parts:
            lines += [
                "",
                "## Training",
                "",
                "Shares of the trainer's processor time, two threads, for the ragged batch of "
                "`benchmarks.train`.",
                "",
                *columns("model", PRODUCTS, ATTENTION, "rest of the layers", WAITING, "the rest"),
            ]
            for size in chosen.sizes:
                lines += training(size, chosen.repeats, bench)
        if "whole" in chosen.parts:
            lines += [
                "",
                "## The whole step",
                "",
                f"Processor seconds of a step of the 1M model, means of {MEASURED_STEPS} steps. "
                "On two cores a step takes at least half of `all, without waiting`.",
                "",
                *columns(
                    "step", "engines", "event loop", "trainer, products", "trainer, the rest",
                    "all, without waiting", "seconds a step",
                ),
            ]  # fmt: skip
            for staleness in (0, 1):
                lines += whole_steps(staleness, chosen.repeats, bench)
        if "encoding" in chosen.parts:
            lines += [
                "",
                "## Encoding a version",
                "",
                f"Shares of one thread's processor time, {NUM_WORDS:,} bfloat16 words, as in "
                "`benchmarks.deltas`.",
                "",
                *columns("learning rate", CHANGES, COMPRESSION, CHECKSUMS, "copies and the rest"),
                *encoding(chosen.repeats),
            ]
        if "imports" in chosen.parts:
            lines += [
                "",
                "## Imports of a resumed run",
                "",
                "Seconds of the modules of each package, without what they import of others, by "
                "`python -X importtime`, which makes imports slower. The search of transformers "
                "for its model files counts as `unstale`, whose module first imports a model. "
                "The demo, killed as in `benchmarks.resume`.",
                "",
                *columns("what", "seconds"),
                *imports(chosen.repeats, folder / "resumes"),
            ]
    write("profiles", "Where the processor time goes", lines)


if __name__ == "__main__":
    main()
