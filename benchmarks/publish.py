"""Measure the cost of publishing a version, full and as a delta, by model size and learning rate.

    python -m benchmarks.publish          # under 4 minutes on two cores; `--help` for smaller sizes

The project's trainer trains random Qwen3 models: bfloat16 forward weights, float32 masters, AdamW.
Each version is published to two real engine processes, once in full and once as a delta. The engine
that receives the version generates on its own core. The trainer's preparation is timed apart from
the pause of generation, from the return of the last reply until the engine may sample again.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from benchmarks.routes import RATES, History, Size, advance, train
from benchmarks.tables import CONSOLE, columns, picture, ratios, row, spread, write
from unstale.durability.checkpoint import Checkpoints
from unstale.engines import SamplingParams, Update
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.engines.registry import EngineOptions
from unstale.model.policy import Policy
from unstale.weights.publish import DirectPublisher
from unstale.weights.store import VersionStore

Way = Literal["full", "delta"]
WAYS: tuple[Way, Way] = ("full", "delta")
SHAPES = {
    "1M": (4, 128, 1024),
    "5M": (6, 256, 2048),
    "20M": (8, 448, 2048),
    "100M": (12, 800, 8192),
    "tiny": (2, 32, 256),
}
"""Layers, width and vocabulary."""
SPEAKERS = 8
"""Replies that each engine generates at once while a version is prepared."""
NEWS = 0.95
"""Median ratio below which one way counts as faster. A smaller difference is noise."""


@dataclass(slots=True)
class Spent:
    """Costs of one way to publish, by version."""

    bytes: list[float] = field(default_factory=list)
    prepare_s: list[float] = field(default_factory=list)
    """In the trainer's thread, while the engine generates."""
    disk_s: list[float] = field(default_factory=list)
    """In the trainer's thread, to write the version to disk. Not part of `prepare_s`."""
    standstill_s: list[float] = field(default_factory=list)

    @property
    def all_s(self) -> list[float]:
        """Preparation and standstill of each version."""
        return [sum(both) for both in zip(self.prepare_s, self.standstill_s, strict=True)]


@dataclass(frozen=True, slots=True)
class Cell:
    """The measurements of one model at one learning rate."""

    model: str
    rate: float
    changed: float
    """Share of the weights that differ from one version to the next."""
    spent: Mapping[Way, Spent]

    @property
    def names(self) -> tuple[str, str]:
        return self.model, f"{self.rate:g}"

    def over(self, what: str) -> list[float]:
        """Return the ratio of the delta's cost to that of the whole weights, for each version."""
        return ratios({way: getattr(self.spent[way], what) for way in WAYS}, "delta", over="full")

    def spread(self, way: Way, what: str) -> str:
        return spread([1000 * seconds for seconds in getattr(self.spent[way], what)], "{:.0f}")


class Watched:
    """An engine that measures how long the last publication paused its sampling."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine
        self.takes_deltas = engine.takes_deltas
        self.standstill_s = self._stopped = 0.0

    async def stage(self, update: Update, version: int) -> None:
        await self.engine.stage(update, version)

    async def interrupt(self) -> None:
        await self.engine.interrupt()
        self._stopped = time.perf_counter()

    async def load(self, update: Update, version: int) -> None:
        await self.engine.load(update, version)

    async def resume(self) -> None:
        await self.engine.resume()
        self.standstill_s = time.perf_counter() - self._stopped

    @asynccontextmanager
    async def speaking(self, vocab: int) -> AsyncIterator[None]:
        """Keep `SPEAKERS` replies in generation until the block ends."""

        async def speak(seed: int) -> None:
            prompt = [(seed * 31 + place) % vocab for place in range(32)]
            while True:
                await self.engine.sample(
                    prompt,
                    SamplingParams(max_tokens=96, stop_tokens=(), temperature=1.0, seed=seed),
                )

        async with asyncio.TaskGroup() as tasks:
            speakers = [tasks.create_task(speak(number)) for number in range(SPEAKERS)]
            yield
            for speaker in speakers:
                speaker.cancel()


class Sender:
    """One way to publish to its own engine, as the loop does it."""

    def __init__(self, way: Way, engine: Watched, policy: Policy, folder: Path) -> None:
        self.spent = Spent()
        self._engine, self._vocab = engine, int(policy.model.config.vocab_size)
        folder.mkdir()
        self._checkpoints = Checkpoints(folder, {})
        self._store = VersionStore(policy.twin().weights()) if way == "delta" else None
        self._disk_s = 0.0
        self._publisher = DirectPublisher(
            engine,
            dtype=policy.dtype,
            store=self._store,
            put=self._put,
            in_place=policy.device.type == "cuda",
        )

    def _put(self, *version: Any) -> None:
        with timed() as clock:
            self._checkpoints.write_version(*version)
        self._disk_s = clock[0]

    async def publish(self, policy: Policy, *, count: bool) -> None:
        async with self._engine.speaking(self._vocab) if policy.version else nullcontext():
            with timed() as clock:
                await asyncio.to_thread(self._publisher.prepare, policy, (policy.version - 1,))
            await self._publisher.stage()
            await self._publisher.publish()
        if count:
            self.spent.bytes.append(self._publisher.bytes)
            self.spent.prepare_s.append(clock[0] - self._disk_s)
            self.spent.disk_s.append(self._disk_s)
            self.spent.standstill_s.append(self._engine.standstill_s)


@contextmanager
def timed() -> Iterator[list[float]]:
    """Yield a list, to which the end of the block adds its seconds."""
    began = time.perf_counter()
    found: list[float] = []
    yield found
    found.append(time.perf_counter() - began)


async def send(model: str, size: Size, history: History, engines: Mapping[Way, Watched]) -> Cell:
    """Publish every version in both ways, in alternating order. Return the costs from version 2 on.

    Versions 0 and 1 are a warm-up.
    """
    policy = size.policy()
    advance(policy, history, 0)
    with tempfile.TemporaryDirectory() as folder:
        senders = {
            way: Sender(way, engine, policy, Path(folder) / way) for way, engine in engines.items()
        }
        for version in range(len(history.copies)):
            advance(policy, history, version)
            for way in WAYS if version % 2 else WAYS[::-1]:
                await senders[way].publish(policy, count=version > 1)
        spent = {way: sender.spent for way, sender in senders.items()}
    return Cell(model, history.rate, changed_share(history), spent)


def changed_share(history: History) -> float:
    """Return the share of words that change from the second to the third version."""
    before, after = (history.copies[number] for number in (1, 2))
    differ = sum(int((before[name] != after[name]).sum()) for name in before)
    return differ / sum(tensor.numel() for tensor in before.values())


async def measure(model: str, size: Size, rates: Sequence[float], repeats: int) -> list[Cell]:
    """Measure one model at every learning rate, with one engine for each way to publish."""
    engines = {
        way: Watched(
            EmbeddedEngine(EngineOptions(size.folder, max_context=256, deltas=way == "delta"))
        )
        for way in WAYS
    }
    cells = []
    try:
        for engine in engines.values():
            await engine.engine.start()
        for rate in rates:
            CONSOLE.print(f"{model} at lr {rate:g}: training")
            history = train(size, rate, repeats + 2)
            CONSOLE.print(f"{model} at lr {rate:g}: {repeats} versions, full and delta")
            cells.append(await send(model, size, history, engines))
    finally:
        for engine in engines.values():
            await engine.engine.close()
    return cells


def table(cells: Sequence[Cell]) -> list[str]:
    lines = columns(
        "model",
        "lr",
        "words changed",
        "full MB",
        "delta MB",
        "delta / full",
        "prepare ms, full",
        "delta",
        "standstill ms, full",
        "delta",
        "both, delta / full",
        "to the disk ms, full",
        "delta",
    )
    for cell in cells:
        full, delta = cell.spent["full"], cell.spent["delta"]
        sizes_mb = [median(spent.bytes) / 1e6 for spent in (full, delta)]
        lines.append(
            row(
                *cell.names,
                f"{cell.changed:.1%}",
                *(f"{size:.2f}" for size in sizes_mb),
                f"{median(cell.over('bytes')):.1%}",
                *(cell.spread(way, "prepare_s") for way in WAYS),
                *(cell.spread(way, "standstill_s") for way in WAYS),
                spread(cell.over("all_s")),
                *(f"{1000 * median(spent.disk_s):.0f}" for spent in (full, delta)),
            )
        )
    return lines


def judged(cells: Sequence[Cell]) -> list[str]:
    """Return sentences on where a delta is faster or slower than whole weights."""
    lines = []
    for what, words in (
        ("standstill_s", "Generation stands still"),
        ("all_s", "Prepared and loaded, a version takes"),
    ):
        slower = [cell for cell in cells if median(cell.over(what)) > 1 / NEWS]
        quicker = [cell for cell in cells if median(cell.over(what)) < NEWS]
        where = "; ".join(
            f"{' at '.join(cell.names)}: {median(cell.over(what)):.2f}" for cell in slower
        )
        lines.append(
            f"- {words} for a delta less long than for whole weights in {len(quicker)} of "
            f"{len(cells)} cases"
            + (
                f", and longer in {len(slower)} ({where} times as long)."
                if slower
                else ", and longer in none."
            )
        )
    return lines


def draw(cells: Sequence[Cell]) -> None:
    with picture("publish", panels=3, width=10.5) as axes:
        for axis, what, title in zip(
            axes,
            ("bytes", "standstill_s", "all_s"),
            ("bytes", "standstill", "preparing and standstill"),
            strict=True,
        ):
            for model in dict.fromkeys(cell.model for cell in cells):
                own = [cell for cell in cells if cell.model == model]
                points = [median(cell.over(what)) for cell in own]
                axis.plot(
                    [cell.rate for cell in own], points, marker="o", markersize=3.5, label=model
                )
            axis.axhline(1, color="grey", linewidth=0.8, linestyle="--")
            axis.set(
                xscale="log", ylim=(0, None), title=f"{title}: delta / full", xlabel="learning rate"
            )
        axes[0].legend(frameon=False, fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--models", nargs="+", choices=list(SHAPES), default=["1M", "5M", "20M", "100M"]
    )
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument(
        "--repeats", type=int, default=5, help="versions of each model at each rate that count"
    )
    parser.add_argument(
        "--warm-steps", type=int, default=3, help="optimizer steps before the first version"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    began, cells = time.monotonic(), list[Cell]()
    with tempfile.TemporaryDirectory() as folder:
        for model in chosen.models:
            layers, hidden, vocab = SHAPES[model]
            size = Size(Path(folder) / model, layers, hidden, vocab, 2, 96, chosen.warm_steps)
            size.make()
            cells += asyncio.run(measure(model, size, chosen.rates, chosen.repeats))
    draw(cells)
    minutes = (time.monotonic() - began) / 60
    head = [
        f"{chosen.repeats} versions a case, one optimizer step each; {SPEAKERS} replies are "
        f"generated meanwhile; {minutes:.1f} minutes.",
        "Whole weights are bfloat16, as the engine's. Preparing is done in the trainer's thread "
        "while the engine",
        "generates, with one thread each; that the version is also brought to the disk, as in a "
        "run, is timed apart.",
        "Standstill begins when all replies have come back and ends when the engine may sample "
        "again. Medians, ranges",
        "in brackets; `delta / full` are ratios of the same version.",
        "",
    ]
    described = []
    for model in chosen.models:
        layers, hidden, vocab = SHAPES[model]
        described.append(f"{model} has {layers} layers of {hidden}, vocabulary {vocab}")
    shapes = ", ".join(described)
    lines = [*head, *table(cells), "", f"{shapes}.", "", *judged(cells)]
    write("publish", "What a published version costs", lines)


if __name__ == "__main__":
    main()
