"""Measure how long servers stand still for a new version of 4B and of 30B-A3B weights.

    python -m benchmarks.standstill                # under 3 minutes, hardly any CPU time

Nothing here has so many weights. A real publisher sends a tiny model to a fake vLLM server, through
the real engine and the real engine host. Each step then sleeps as long as it takes with all bytes,
at the speeds that `SPEEDS` and `--load_gb_s` give. Replies are generated meanwhile. With `--before`
a table of this script from another commit is compared.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.tables import CONSOLE, columns, row, write
from tests.support.fake_vllm import FakeVllm
from unstale.cluster import engine_host
from unstale.cluster.engine_host import EngineHost, HostOptions
from unstale.cluster.weight_objects import arrays
from unstale.engines import SamplingParams, Update, remote
from unstale.engines.embedded.reference import ReferenceModel
from unstale.engines.registry import EngineOptions
from unstale.engines.servers.vllm import VllmEngine
from unstale.engines.shared_weights import SharedWeights
from unstale.testing import nudge, tiny_policy
from unstale.weights.codec import file_of, file_parts
from unstale.weights.publish import DirectPublisher
from unstale.weights.store import Delta, VersionStore


@dataclass(frozen=True, slots=True)
class Speeds:
    """Seconds per GB of all weights, measured on one thread of the project's two-core machine."""

    apply_s: float = 0.235
    """Decompress a delta and apply it."""
    check_s: float = 0.045
    """Compute the checksum."""
    write_s: float = 0.49
    """Write whole weights to /dev/shm."""


SPEEDS = Speeds()
LOAD_GB_S = (2.5, 5.0, 10.0)
"""Bandwidths of a copy from pageable memory to one GPU, in GB/s: slow, usual and fast ones."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its servers, and the way of its weights."""

    name: str
    gb: float
    gpus: int
    """GPUs of each server, which read their parts of the file at once."""
    reference_s: float
    """Seconds of the reference of the probe on one CPU thread."""
    way: str

    @property
    def stage_s(self) -> float:
        """Seconds to make the weights of a version."""
        each = SPEEDS.write_s if self.way == "whole" else SPEEDS.apply_s + SPEEDS.check_s
        return each * self.gb


CASES = (
    Case("4B", 8.04, 1, 3.0, "whole"),
    Case("4B", 8.04, 1, 3.0, "delta"),
    Case("30B-A3B", 61.0, 4, 8.0, "delta, engine host"),
)


class SlowServer(FakeVllm):
    """A server whose loads take time. It does nothing else meanwhile, like vLLM."""

    load_s = 0.0

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().load(weights)
        time.sleep(self.load_s)


class HostReceiver:
    """An engine host without Ray, as an engine of a publisher."""

    takes_deltas = True

    def __init__(self, options: EngineOptions) -> None:
        self._host = EngineHost(HostOptions(VllmEngine, (options,)))
        self._epoch = 0
        self._version = -1
        self._open = asyncio.Event()

    async def start(self) -> None:
        await self._host.start(0)

    async def sample(self, tokens: Sequence[int], params: SamplingParams) -> None:
        await self._open.wait()
        await self._host.sample(self._epoch, tokens, params)

    async def stage(self, update: Update, version: int) -> None:
        if isinstance(update, Delta):
            delta = arrays(file_parts(update))
            await self._host.stage(version, self._version, None, delta)
        else:
            await self._host.stage(version, -1, arrays(file_of(update)))

    async def interrupt(self) -> None:
        self._open.clear()
        self._epoch += 1
        await self._host.interrupt(self._epoch)

    async def load(self, update: Update, version: int) -> None:
        if self._host._weights.version != version:
            await self.stage(update, version)
        await self._host.load(version)
        self._version = version

    async def resume(self) -> None:
        await self._host.resume()
        self._open.set()

    async def close(self) -> None:
        await self._host.close()


class Timed:
    """An engine that measures how long it stands still."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.takes_deltas = engine.takes_deltas
        self.stage = engine.stage
        self.load = engine.load
        self.stopped = self.resumed = 0.0

    async def interrupt(self) -> None:
        await self.engine.interrupt()
        self.stopped = time.perf_counter()

    async def resume(self) -> None:
        await self.engine.resume()
        self.resumed = time.perf_counter()


@dataclass(frozen=True, slots=True)
class Measured:
    stage_s: float
    replies: int
    """Replies that were returned while the version was staged."""
    standstill_s: float
    held_s: float
    """Seconds from the end of the standstill to the first reply."""


@contextmanager
def sleeping(case: Case) -> Iterator[None]:
    """Let each step of a publication sleep as long as it takes with all bytes."""

    def then_sleep(seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
        def both(*args: Any, **options: Any) -> Any:
            result = call(*args, **options)
            time.sleep(seconds)
            return result

        return both

    with ExitStack() as patches:
        for owner, name, seconds in (
            (remote, "advance", case.stage_s),
            (engine_host, "advance", case.stage_s),
            (SharedWeights, "write", case.stage_s),
            (ReferenceModel, "logps", case.reference_s),
        ):
            slow = then_sleep(seconds, getattr(owner, name))
            patches.enter_context(patch.object(owner, name, slow))
        yield


async def measure(case: Case, load_gb_s: float, *, stages: bool, versions: int) -> list[Measured]:
    """Publish some versions, and return what each took."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policy = tiny_policy(seed=5)
        policy.save(folder / "model")
        with SlowServer(folder) as server:
            options = EngineOptions(
                folder / "model", dtype="float32", url=server.url, deltas=case.way == "delta"
            )
            is_host = case.way.endswith("host")
            engine: Any = HostReceiver(options) if is_host else VllmEngine(options)
            timed = Timed(engine)
            publisher = DirectPublisher(
                timed, dtype=torch.float32, store=VersionStore(policy.twin().weights())
            )
            try:
                await engine.start()
                publisher.prepare(policy)
                await publisher.publish()
                await engine.sample([3, 1, 4, 1], SamplingParams(2, ()))  # the probe has passed
                server.load_s = case.gb / (load_gb_s * case.gpus)
                found = []
                with sleeping(case):
                    for version in range(1, versions + 1):
                        nudge(policy, seed=version, size=1e-3)
                        policy.version = version
                        found.append(await publish(publisher, policy, timed, stages=stages))
                return found
            finally:
                await engine.close()


async def publish(
    publisher: DirectPublisher, policy: Any, timed: Timed, *, stages: bool
) -> Measured:
    returned: list[float] = []

    async def speak(number: int) -> None:
        while True:
            await timed.engine.sample([3, 1, 4, number], SamplingParams(24, ()))
            returned.append(time.perf_counter())

    async with asyncio.TaskGroup() as tasks:
        speakers = [tasks.create_task(speak(number)) for number in range(4)]
        await asyncio.sleep(0.2)
        publisher.prepare(policy, (policy.version - 1,))
        began = time.perf_counter()
        if stages:
            await publisher.stage()
        staged = time.perf_counter()
        await publisher.publish()
        while not returned or returned[-1] < timed.resumed:  # noqa: ASYNC110 - it is a measurement
            await asyncio.sleep(0.01)
        for speaker in speakers:
            speaker.cancel()
    first = min(time for time in returned if time > timed.resumed)
    while_staged = sum(began < time < staged for time in returned)
    return Measured(
        staged - began, while_staged, timed.resumed - timed.stopped, first - timed.resumed
    )


def standstills(table: Path) -> dict[tuple[str, ...], str]:
    """Return the standstill in each row of a table, by model, size, way and speed."""
    rows = [line.strip("| ").split(" | ") for line in table.read_text().splitlines()]
    return {tuple(cells[:4]): cells[-2] for cells in rows if len(cells) > 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--load_gb_s", type=float, nargs="+", default=LOAD_GB_S)
    parser.add_argument("--versions", type=int, default=1)
    parser.add_argument("--unstaged", action="store_true", help="publish without staging")
    parser.add_argument("--before", type=Path, help="a table of another commit")
    chosen = parser.parse_args()
    before = standstills(chosen.before) if chosen.before else {}
    lines = columns(
        "model",
        "GB",
        "way",
        "GB/s to each GPU",
        "staged s",
        "replies meanwhile",
        "standstill s, before",
        "now",
        "first reply held back s",
    )
    for case in CASES:
        for speed in chosen.load_gb_s:
            call = partial(measure, stages=not chosen.unstaged, versions=chosen.versions)
            found = asyncio.run(call(case, speed))
            middle = [
                median(getattr(each, name) for each in found)
                for name in ("stage_s", "replies", "standstill_s", "held_s")
            ]
            names = (case.name, str(case.gb), case.way, str(speed))
            cells = (*names, f"{middle[0]:.1f}", f"{middle[1]:.0f}", before.get(names, ""))
            lines.append(row(*cells, *(f"{seconds:.1f}" for seconds in middle[2:])))
            CONSOLE.print(lines[-1])
    lines += [
        "",
        f"Sleeps in seconds per GB: {SPEEDS.apply_s} to apply a delta, {SPEEDS.check_s} for its "
        f"checksum, {SPEEDS.write_s} to write whole weights. In seconds: "
        + ", ".join({f"{case.reference_s:g} for the probe of {case.name}": 0 for case in CASES})
        + ". The goals are 4 s for 4B and 8 s for 30B-A3B. Contexts that engines compute again are "
        "not part of the standstill.",
    ]
    write("standstill", "The standstill of servers by bytes, with throttled speeds", lines)


if __name__ == "__main__":
    main()
