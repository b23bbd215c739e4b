"""An engine that restarts while its host stages a new version loads that one.

A host refuses deltas to other weights, and leaves no file. An interrupt may take as long as a
probe. The host runs without Ray.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.host_engines import digits
from tests.support.waits import LIMIT_S, until
from unstale.cluster import hosted_engine
from unstale.cluster.engine_host import EngineHost, HostOptions, HostReport
from unstale.cluster.hosted_engine import HostedEngine
from unstale.cluster.weight_objects import Part, arrays
from unstale.engines import EngineDied, SamplingParams, Update, shared_weights
from unstale.engines.registry import EngineOptions
from unstale.engines.scripted import ScriptedEngine
from unstale.testing import tiny_policy
from unstale.weights.codec import file_of
from unstale.weights.store import Delta


class Gated(ScriptedEngine):
    """An engine whose second start waits for `gate`. It records the versions that it loads."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(digits)
        self.gate = asyncio.Event()
        self.starts = 0
        self.loads: list[int] = []

    async def start(self) -> None:
        self.starts += 1
        if self.starts > 1:
            await self.gate.wait()
        await super().start()

    async def load(self, update: Update, version: int) -> None:
        assert not isinstance(update, Delta)
        assert update["weight"].tolist() == [version, version]
        await super().load(update, version)
        self.loads.append(version)


class Slow(Sequence[Part]):
    """The parts of full weights. Something happens before the host reads them."""

    def __init__(self, parts: Sequence[Part], before: Callable[[], None]) -> None:
        self._parts = parts
        self._before = before

    def __getitem__(self, index: int) -> Part:  # type: ignore[override]
        return self._parts[index]

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Part]:
        self._before()
        return iter(self._parts)


def full(version: int) -> list[Part]:
    return arrays(file_of({"weight": torch.full((2,), float(version))}))


def test_an_engine_that_restarts_while_a_version_is_staged_gets_the_new_version(
    tmp_path: Path,
) -> None:
    tiny_policy().save(tmp_path)
    engines: list[Gated] = []

    def make(options: EngineOptions) -> Gated:
        engines.append(Gated(options))
        return engines[-1]

    async def main() -> list[HostReport]:
        host = EngineHost(HostOptions(make, (EngineOptions(tmp_path),), restarts=1))
        await host.start(0)
        await host.stage(0, -1, full(0))
        await host.load(0)
        await host.resume()
        (engine,) = engines
        engine.die("a bad page")
        waiting = asyncio.ensure_future(host.sample(0, [1], SamplingParams(2, ())))
        loop = asyncio.get_running_loop()

        def restart() -> None:
            loop.call_soon_threadsafe(engine.gate.set)
            time.sleep(0.1)  # until the engine waits for the weights, which `stage` changes

        reports = [
            await host.stage(1, 0, Slow(full(1), restart)),
            await host.interrupt(1),
            await host.load(1),
        ]
        await host.resume()
        reply = (await waiting).reply
        assert (
            reply.stop == "interrupted"
        )  # a reply without tokens, for which the caller asks again
        reply = (await host.sample(1, [1], SamplingParams(2, ()))).reply
        assert reply.piece.version == 1 and len(reply.piece.tokens) == 2
        assert engine.loads == [0, 1]
        await host.close()
        return reports

    reports = asyncio.run(main())
    assert reports[-1].held == 1
    assert [kind for report in reports for kind, _ in report.events] == [
        "engine_lost",
        "engine_restarted",
        "engine_back",
    ]


def test_a_host_refuses_a_delta_to_weights_that_it_does_not_have(tmp_path: Path) -> None:
    """Another stage came between the report on which the delta is based, and the delta."""
    tiny_policy().save(tmp_path)

    async def main() -> None:
        host = EngineHost(HostOptions(Gated, (EngineOptions(tmp_path),)))
        await host.start(0)
        await host.stage(1, -1, full(1))
        with pytest.raises(EngineDied, match="the host has version 1, not 0"):
            await host.stage(2, 0, None, [])
        with pytest.raises(EngineDied, match="version 2 was not staged, but 1"):
            await host.load(2)
        await host.load(1)
        await host.close()

    asyncio.run(main())


def test_a_host_that_is_closed_while_a_version_is_staged_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_policy().save(tmp_path)
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(shared_weights, "MEMORY", memory)
    begun, released = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert released.wait(LIMIT_S)

    async def main() -> None:
        host = EngineHost(HostOptions(Gated, (EngineOptions(tmp_path),)))
        await host.start(0)
        staging = asyncio.ensure_future(host.stage(0, -1, Slow(full(0), wait)))
        await until(begun.is_set, "the stage")
        staging.cancel()
        closing = asyncio.ensure_future(host.close())
        await asyncio.wait((closing,), timeout=0.1)
        assert not closing.done()
        released.set()  # its thread has not written the file yet
        await closing

    asyncio.run(main())
    assert not [*memory.iterdir()]


class Probing(ScriptedEngine):
    """An engine whose interrupt waits for a probe, which a test ends."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(digits)
        self.probed = asyncio.Event()

    async def interrupt(self) -> None:
        await self.probed.wait()
        await super().interrupt()


def test_an_interrupt_of_a_host_may_take_as_long_as_a_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_policy().save(tmp_path)
    engines: list[Probing] = []
    options = HostOptions(lambda _: engines[0], (EngineOptions(tmp_path),))

    class Actor:
        """A handle of a host. Its calls run in this process."""

        host = EngineHost(options)

        def __getattr__(self, name: str) -> Any:
            return SimpleNamespace(
                remote=lambda *args: asyncio.ensure_future(getattr(self.host, name)(*args))
            )

    ray = SimpleNamespace(
        exceptions=SimpleNamespace(RayError=OSError, RayTaskError=OSError),
        cancel=lambda reference: reference.cancel(),
        is_initialized=lambda: False,
    )
    monkeypatch.setattr(hosted_engine, "import_ray", lambda: ray)

    async def main() -> None:
        engines.append(Probing(EngineOptions(tmp_path)))
        engine = HostedEngine(0, options, Actor)
        await engine.start()
        with monkeypatch.context() as patch:
            patch.setattr(hosted_engine, "HANG_S", 0.05)
            interrupting = asyncio.ensure_future(engine.interrupt())
            await asyncio.wait((interrupting,), timeout=0.3)
            engines[0].probed.set()
            await interrupting
        await engine.close()

    asyncio.run(main())
