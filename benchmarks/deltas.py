"""Measure how many bytes of weights per second are encoded as a delta, and how many are applied.

    python -m benchmarks.deltas --peer ../main    # five minutes; `--peer` is another checkout

Each measurement runs in a new process, in this checkout and in the peer's, in turn. The bfloat16
weights of two versions differ in the share of words that one optimizer step changes at some
learning rates. A version store encodes the second version, checksum and copy included. The rates
are those of one thread, per processor second. Copying the weights in memory is the limit.

A second table has the rates of encoding on several threads, per processor second and per second.
If they are the same per processor second, the threads do not wait for each other.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import tables
from unstale.weights.bits import checksum, words
from unstale.weights.codec import Delta, advance
from unstale.weights.store import VersionStore

SHARES = {"1e-06": 0.014, "3e-06": 0.034, "1e-05": 0.115, "0.0001": 0.54}
"""Share of changed words after one step, by learning rate (`benchmarks.publish`)."""
TENSORS = 8
GOAL_GB = 2.0
"""GB of weights that a core should encode per second."""
THREADS = (1, 2, 4)
"""Numbers of threads of the second table."""
TRIES = 5
"""Each measurement is the fastest of these."""

Figures = dict[str, float]


def versions(share: float, num_words: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return weights, and the same with low bits changed in a share of the words."""
    noise = torch.Generator().manual_seed(0)
    before, after = {}, {}
    for number in range(TENSORS):
        size = (num_words // TENSORS,)
        before[f"w{number}"] = weights = torch.randn(size, generator=noise).bfloat16()
        low_bits = torch.randint(1, 4, size, generator=noise, dtype=torch.int16)
        changed = torch.rand(size, generator=noise) < share
        after[f"w{number}"] = (words(weights) ^ low_bits * changed).view(torch.bfloat16)
    return before, after


def put_s(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> tuple[float, float]:
    """Return the processor seconds and the seconds in which a store adds the second version."""
    store = VersionStore()
    store.put(0, before)
    began, began_cpu = time.perf_counter(), time.process_time()
    store.put(1, after)
    return time.process_time() - began_cpu, time.perf_counter() - began


def advance_s(before: Mapping[str, Tensor], delta: Delta) -> float:
    """Return the processor seconds in which a delta is applied and its checksum compared."""
    held = {name: tensor.clone() for name, tensor in before.items()}
    began = time.process_time()
    advance(held, delta)
    return time.process_time() - began


def checksum_s(weights: Mapping[str, Tensor]) -> float:
    began = time.process_time()
    checksum(weights)
    return time.process_time() - began


def copy_s(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> float:
    held = {name: tensor.clone() for name, tensor in before.items()}
    began = time.process_time()
    for name, tensor in held.items():
        tensor.copy_(after[name])
    return time.process_time() - began


def measure(num_words: int) -> Figures:
    """Return GB per processor second for each share of changed words, in this process."""
    torch.set_num_threads(1)
    gigabytes = 2 * num_words / 1e9
    figures: Figures = {}
    for rate, share in SHARES.items():
        before, after = versions(share, num_words)
        store = VersionStore()
        store.put(0, before)
        store.put(1, after)
        delta = store.delta(1)
        for threads in THREADS:
            torch.set_num_threads(threads)
            processor_s, elapsed_s = zip(*(put_s(before, after) for _ in range(TRIES)), strict=True)
            figures[f"threads {rate}, {threads}"] = gigabytes / min(processor_s)
            figures[f"elapsed {rate}, {threads}"] = gigabytes / min(elapsed_s)
        torch.set_num_threads(1)
        figures[f"encode {rate}"] = figures[f"threads {rate}, 1"]
        figures[f"apply {rate}"] = gigabytes / min(advance_s(before, delta) for _ in range(TRIES))
    figures["checksum"] = gigabytes / min(checksum_s(after) for _ in range(TRIES))
    figures["copy"] = gigabytes / min(copy_s(before, after) for _ in range(TRIES))
    return figures


def measure_in(checkout: Path, num_words: int) -> Figures:
    """Measure the package of a checkout in a new process."""
    command = [sys.executable, __file__, "--measure", str(num_words)]
    path = os.pathsep.join([str(checkout), str(Path(__file__).parents[1])])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, check=True, capture_output=True, text=True
    )
    figures: Figures = json.loads(done.stdout)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", type=Path, help="another checkout, to compare with")
    parser.add_argument("--words", type=int, default=10_000_000, help="words of the weights")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        sys.stdout.write(json.dumps(measure(options.measure)))
        return
    checkouts = {"this": Path(__file__).parents[1]}
    if options.peer:
        checkouts["peer"] = options.peer.resolve()
    results: dict[str, list[Figures]] = {name: [] for name in checkouts}
    for repeat in range(options.repeats):
        for name in tables.rotated(list(checkouts), repeat % len(checkouts)):
            tables.CONSOLE.print(f"round {repeat + 1} of {options.repeats}: {name}")
            results[name].append(measure_in(checkouts[name], options.words))
    lines = [
        "GB of bfloat16 weights per processor second of one thread, "
        f"{options.words:,} words in {TENSORS} tensors. Medians",
        f"of {options.repeats} alternating rounds, with the range. Encoding includes the checksum "
        "and the copy.",
        "",
        *tables.columns("", *checkouts, *(["ratio"] if options.peer else [])),
    ]
    alone = [what for what in results["this"][0] if not what.startswith(("threads ", "elapsed "))]
    for what in alone:
        runs = {name: [run[what] for run in results[name]] for name in checkouts}
        ratio = [tables.spread(tables.ratios(runs, "this", over="peer"))] if options.peer else []
        lines.append(tables.row(what, *map(tables.spread, runs.values()), *ratio))
    lines += ["", "## Encoding on several threads", ""]
    lines += tables.columns("", "threads", "GB per processor second", "GB per second")
    for rate in SHARES:
        for threads in THREADS:
            both = [
                tables.spread([run[f"{kind} {rate}, {threads}"] for run in results["this"]])
                for kind in ("threads", "elapsed")
            ]
            lines.append(tables.row(f"encode {rate}", threads, *both))
    lines.append("")
    for rate in SHARES:
        rates = [run[f"encode {rate}"] for run in results["this"]]
        verdict = tables.verdict(rates, GOAL_GB)
        lines.append(f"- Encoding at {rate}, GB a second of a core: {verdict}.")
    tables.write("deltas", "Encoding and applying deltas", lines)


if __name__ == "__main__":
    main()
