"""Measure how many bytes of weights per second are encoded as a delta, applied, joined and checked.

    python -m benchmarks.deltas --peer ../main    # five minutes; `--peer` is another checkout

Each measurement runs in a new process, in this checkout and in the peer's, in turn. The bfloat16
weights of versions differ in the share of words that one optimizer step changes at some learning
rates. A version store encodes a version, checksum and copy included (encode). The delta is applied
and the result's checksum compared (apply). A version between two others is dropped, so that its
deltas are joined (merge). Copying the weights in memory is the limit.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import tables
from unstale.weights.bits import checksum, sum64, words
from unstale.weights.codec import advance
from unstale.weights.store import VersionStore

SHARES = {"1e-06": 0.014, "3e-06": 0.034, "1e-05": 0.115, "0.0001": 0.54}
"""Share of changed words after one step, by learning rate (`benchmarks.publish`)."""
TENSORS = 8
GOAL_GB = 2.0
"""GB of weights that a core should encode per second."""
THREADS = (1, 2)
TRIES = 5
"""Each measurement is the fastest of these."""

Figures = dict[str, float]
Weights = dict[str, Tensor]


def versions(share: float, num_words: int) -> tuple[Weights, Weights]:
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


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds and the processor seconds of a call."""
    began, began_cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - began, time.process_time() - began_cpu


def store_of(*versions: Mapping[str, Tensor]) -> VersionStore:
    store = VersionStore()
    for number, weights in enumerate(versions):
        store.put(number, weights)
    return store


def copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}


def operations(before: Weights, after: Weights) -> dict[str, Callable[[], Callable[[], object]]]:
    """Return functions that prepare an operation on the weights, by the operation's name."""
    third = {name: tensor.roll(1) for name, tensor in changed_words(before, after).items()}
    third = {name: (words(after[name]) ^ third[name]).view(torch.bfloat16) for name in after}
    delta = store_of(before, after).delta(1)
    return {
        "encode": lambda: partial(store_of(before).put, 1, after),
        "apply": lambda: partial(advance, copied(before), delta),
        "merge": lambda: partial(store_of(before, after, third).keep, {0, 2}),
    }


def changed_words(before: Weights, after: Weights) -> Weights:
    return {name: words(before[name]) ^ words(after[name]) for name in before}


def measure(num_words: int) -> Figures:
    """Return GB per second, and per processor second, of each operation, in this process."""
    gigabytes = 2 * num_words / 1e9
    figures: Figures = {}

    def add(what: str, prepare: Callable[[], Callable[[], object]]) -> None:
        for threads in THREADS:
            torch.set_num_threads(threads)
            seconds, processor_s = zip(*(timed(prepare()) for _ in range(TRIES)), strict=True)
            figures[f"{what}, {threads}"] = gigabytes / min(seconds)
            figures[f"{what}, {threads}, processor"] = gigabytes / min(processor_s)

    for rate, share in SHARES.items():
        before, after = versions(share, num_words)
        for what, prepare in operations(before, after).items():
            add(f"{what} {rate}", prepare)
    held = copied(after)
    add("checksum", lambda: partial(checksum, after))
    add("sum of a GPU's weights", lambda: partial(sum64, [*after.values()]))
    add("copy", lambda: lambda: [tensor.copy_(after[name]) for name, tensor in held.items()])
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
        f"GB of bfloat16 weights per second, {options.words:,} words in {TENSORS} tensors. Medians",
        f"of {options.repeats} alternating rounds, with the range; a round is the fastest of "
        f"{TRIES}. Per processor second, the time",
        "of all threads counts, and that of other programs does not.",
        "",
        *tables.columns(
            "",
            "threads",
            "GB/s",
            "per processor second",
            *(["peer, per processor second", "ratio"] if options.peer else []),
        ),
    ]
    for key in (key for key in results["this"][0] if not key.endswith("processor")):
        what, threads = key.rsplit(", ", 1)
        runs = {name: [run[f"{key}, processor"] for run in results[name]] for name in checkouts}
        figures = [
            tables.spread([run[key] for run in results["this"]]),
            tables.spread(runs["this"]),
        ]
        if options.peer:
            ratio = tables.ratios(runs, "this", over="peer")
            figures += [tables.spread(runs["peer"]), tables.spread(ratio)]
        lines.append(tables.row(what, threads, *figures))
    lines.append("")
    for rate in SHARES:
        rates = [run[f"encode {rate}, 1, processor"] for run in results["this"]]
        verdict = tables.verdict(rates, GOAL_GB)
        lines.append(f"- Encoding at {rate}, GB a second of a core: {verdict}.")
    tables.write("deltas", "Encoding, applying and joining deltas", lines)


if __name__ == "__main__":
    main()
