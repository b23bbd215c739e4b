"""Profile the engine, the trainer and whole steps: which code takes the processor time.

    python -m benchmarks.profiles       # 4 minutes on two cores; `--help` for parts of it

It needs Linux's `perf` (package `linux-perf` or `linux-tools`), and the permission to use it. The
work is that of `benchmarks.generate` and `benchmarks.train`. docs/speed.md explains missed goals by
this table. Each part of the code is found by the names of compiled functions, so Python and NumPy
are what has no other name.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from benchmarks import generate, train
from benchmarks.generate_peers import GROUP, Episode, Ours
from benchmarks.tables import CONSOLE, columns, row, spread, write
from unstale import loop
from unstale.engines.embedded.decoder import RUN
from unstale.engines.embedded.pages import PAGE

FREQUENCY = 499
"""Samples of a thread in a second of its processor time."""
PRODUCTS, ATTENTION, WAITING = "products with weights", "attention", "waiting for another thread"
OTHER = "Python and NumPy"
PARTS = {
    ATTENTION: r"^(decoder|kernels)-\S+ attend",
    PRODUCTS: r"^decoder-\S+ (tiles?|panel_product)\b| mkl_(blas|\w*gemm)|dnnl|^perf-\d+\.map",
    "rest of the layers": r"^(decoder|kernels)-",
    "choice of tokens": r"^sampling-",
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


@contextmanager
def recorded(pids: Sequence[int], owner: Callable[[int, int], str]) -> Iterator[Shares]:
    """Record what some processes do within a context. The result is complete at its end.

    `owner` names the process or thread by its numbers.
    """
    found: Shares = {}
    with tempfile.NamedTemporaryFile(suffix=".perf") as file:
        process = _begin(file.name, pids)
        try:
            yield found
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()
        found.update(_read(file.name, owner))


def _begin(target: str, pids: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start `perf record`, and wait until it records. Raises RuntimeError if it cannot."""
    command = ["perf", "record", "-q", "-F", str(FREQUENCY), "-e", "cpu-clock", "-o", target]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [*command, "-p", ",".join(map(str, pids))], stdout=said, stderr=said
        )
        time.sleep(0.5)
        if process.poll() is not None:
            said.seek(0)
            raise RuntimeError(f"perf does not record: {said.read().decode().strip()}")
    return process


def _read(target: str, owner: Callable[[int, int], str]) -> Shares:
    """Return the processor seconds of a record of `perf`."""
    command = ["perf", "script", "-i", target, "-F", "pid,tid,ip,sym,dso"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    form = re.compile(r"^\s*(\d+)/(\d+)\s+[0-9a-f]+ (.*) \((.*)\)\s*$")
    counts: Counter[tuple[str, str]] = Counter()
    for line in said.splitlines():
        if match := form.match(line):
            pid, tid, function, library = match.groups()
            part = part_of(library.rpartition("/")[2], function)
            counts[owner(int(pid), int(tid)), part] += 1
    if not counts:
        raise RuntimeError(f"perf recorded nothing: {said[:200]}")
    return {key: count / FREQUENCY for key, count in counts.items()}


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
                with recorded([os.getpid(), *engine.pids], lambda *_: "all") as found:
                    tokens, _ = engine.play(episodes, live)
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


def read_bytes(size: str, episodes: Sequence[Episode]) -> int:
    """Return the bytes of keys and values that the engine's attention reads.

    A pass reads the keys of whole pages and the values of the tokens before it, once for `RUN`
    tokens of a prompt or tool result. Siblings are computed together, so they read the whole pages
    of their prompt once.

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
    """Return how many keys and values are read by passes that see so many tokens."""
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
            with recorded([child.process.pid], lambda *_: "trainer") as found:
                ends = time.monotonic() + 8
                while time.monotonic() < ends:
                    turn()
            rounds.append(found)
    shares = [
        spread([of_part(found, name) / sum(found.values()) for found in rounds], "{:.0%}")
        for name in names
    ]
    rest = spread([_rest(found, names) / sum(found.values()) for found in rounds], "{:.0%}")
    return [row(size, *shares, rest)]


def whole_steps(staleness: int, repeats: int, bench: train.Bench) -> list[str]:
    """Return a row of the processor seconds of a whole step, of the 1M model."""
    rounds = []
    for number in range(repeats):
        CONSOLE.print(f"whole steps, {staleness} behind, round {number + 1} of {repeats}")
        rounds.append(_whole(staleness, bench.made("1M")))

    def one(value: Callable[[Shares], float]) -> str:
        return spread([value(found) / steps for found, steps, _ in rounds])

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
            spread([seconds for *_, seconds in rounds]),
        )
    ]


MEASURED_STEPS = 12


def _whole(staleness: int, model: Path) -> tuple[Shares, int, float]:
    """Return the processor seconds of some whole steps, their number, and seconds for one."""
    take_step = loop.take_step
    mine = os.getpid()
    state: dict[str, Any] = {"steps": 0}

    def owner(pid: int, tid: int) -> str:
        return "engine" if pid != mine else "event loop" if tid == mine else "trainer"

    async def counted(*given: Any) -> Any:
        if state["steps"] == train.WARM:
            state["record"] = recorded([mine, *_children()], owner)
            state["found"] = state["record"].__enter__()
            state["began"] = time.perf_counter()
        done = await take_step(*given)
        state["steps"] += 1
        if state["steps"] == train.WARM + MEASURED_STEPS:
            state["seconds"] = time.perf_counter() - state["began"]
            state["record"].__exit__(None, None, None)
        return done

    steps = MEASURED_STEPS + 1  # the last one publishes its weights for an evaluation
    options = ["--child", "whole", "--model", str(model), "--steps", str(steps)]
    loop.take_step = counted  # type: ignore[assignment]
    try:
        train.whole(train.options().parse_args([*options, "--staleness", str(staleness)]))
    finally:
        loop.take_step = take_step
    return state["found"], MEASURED_STEPS, state["seconds"] / MEASURED_STEPS


def _children() -> list[int]:
    """Return the child processes of this one."""
    lists = Path("/proc/self/task").glob("*/children")
    return [int(pid) for each in lists for pid in each.read_text().split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    every = ["sampling", "training", "whole"]
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
                "Half of those of all, without waiting, is the least time that a step can take on "
                "two cores.",
                "",
                *columns(
                    "step", "engines", "event loop", "trainer, products", "trainer, the rest",
                    "all, without waiting", "seconds a step",
                ),
            ]  # fmt: skip
            for staleness in (0, 1):
                lines += whole_steps(staleness, chosen.repeats, bench)
    write("profiles", "Where the processor time goes", lines)


if __name__ == "__main__":
    main()
