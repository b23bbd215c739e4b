"""In lockstep mode, replies and their timing depend on the calls alone, bit for bit."""

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from unstale.durability import virtual_clock
from unstale.engines import EngineDied, Reply, SamplingParams
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.engines.registry import EngineOptions
from unstale.weights import child_process

pytestmark = pytest.mark.usefixtures("forked_children")

Event = tuple[str, int, float, Any]
"""What happened, to which episode, at which virtual time, with which reply."""


def _engine(folder: Path) -> EmbeddedEngine:
    return EmbeddedEngine(
        EngineOptions(folder, dtype="bfloat16", max_running=4, max_context=256, lockstep=True)
    )


class _Scene:
    """Seven episodes of two turns in four slots, interrupted once and continued with new
    weights."""

    def __init__(self, engine: EmbeddedEngine, weights: list[Mapping[str, Tensor]]) -> None:
        self.engine = engine
        self.weights = weights
        self.events: list[Event] = []

    async def play(self) -> tuple[list[Event], Mapping[str, float]]:
        began = asyncio.get_running_loop().time()
        await self.engine.start()
        await self.engine.load(self.weights[0], 0)
        await self.engine.resume()
        async with asyncio.TaskGroup() as tasks:
            for number in range(7):
                tasks.create_task(self.episode(number))
            await asyncio.sleep(0.5)
            await self.engine.interrupt()
            self.note("interrupted")
            await self.engine.load(self.weights[1], 1)
            await self.engine.resume()
        counters = {
            name: value for name, value in self.engine.metrics().items() if not name.endswith("_s")
        }
        return [
            (what, number, round(at - began, 6), reply) for what, number, at, reply in self.events
        ], counters

    async def episode(self, number: int) -> None:
        context = [5, 6, 7, *range(10, 10 + number)]
        for turn in range(2):
            await asyncio.sleep(0.07 * number)
            end = len(context) + 15 + 5 * number
            while len(context) < end:
                params = SamplingParams(max_tokens=end - len(context), stop_tokens=(), seed=number)
                reply = await self.engine.sample(context, params)
                self.note("reply", number, reply)
                context += reply.piece.tokens
            context += [20 + turn] * (1 + number)

    def note(self, what: str, number: int = -1, reply: Reply | None = None) -> None:
        self.events.append((what, number, asyncio.get_running_loop().time(), reply))


def test_two_lives_are_equal_bit_for_bit(folder: Path, weights: list[Mapping[str, Tensor]]) -> None:
    """Compare a new process, a restarted one, and one that starts during the second scene."""

    async def lives(count: int) -> list[tuple[list[Event], Mapping[str, float]]]:
        engine, found = _engine(folder), []
        try:
            for life in range(count):
                if life == 2:
                    begun = asyncio.ensure_future(_Scene(engine, weights).play())
                    await asyncio.sleep(0.4)
                    begun.cancel()
                    await asyncio.wait([begun])
                found.append(await _Scene(engine, weights).play())
        finally:
            await engine.close()
        return found

    first, second, third = virtual_clock.run(lives(3), virtual=True)
    (other,) = virtual_clock.run(lives(1), virtual=True)
    events, counters = first
    cut = events.index(next(event for event in events if event[0] == "interrupted"))
    parts = [reply for *_, reply in events[:cut] if reply.stop == "interrupted"]
    assert len(parts) >= 4 and any(reply.piece.tokens for reply in parts), (
        "the interrupt found replies in the middle"
    )
    assert {reply.piece.version for *_, reply in events[cut + 1 :]} == {1}
    assert counters["cached_tokens"] > 0 and counters["reprefill_tokens"] > 0
    assert first == other
    assert first == second
    assert first == third


def test_nothing_is_computed_unless_time_passes(
    folder: Path, weights: list[Mapping[str, Tensor]]
) -> None:
    """A reply of ten tokens takes ten steps of the virtual clock, at any real speed."""

    async def live() -> float:
        engine = _engine(folder)
        try:
            await engine.start()
            await engine.load(weights[0], 0)
            await engine.resume()
            began = asyncio.get_running_loop().time()
            await engine.sample([5, 6, 7], SamplingParams(max_tokens=10, stop_tokens=()))
            return asyncio.get_running_loop().time() - began
        finally:
            await engine.close()

    assert virtual_clock.run(live(), virtual=True) == pytest.approx(0.2)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_end_of_the_process_is_told_in_lockstep_too(
    how: signal.Signals,
    folder: Path,
    weights: list[Mapping[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child_process, "FROZEN_S", 2.0)
    why = "ended with signal 9" if how == signal.SIGKILL else "did not answer for 2 s"

    async def live() -> None:
        engine = _engine(folder)
        try:
            await engine.start()
            await engine.load(weights[0], 0)
            await engine.resume()
            pending = [
                asyncio.ensure_future(engine.sample([5, seed], SamplingParams(99, (), seed=seed)))
                for seed in (1, 2)
            ]
            await asyncio.sleep(0.1)
            os.kill(engine.pid, how)
            for end in await asyncio.gather(*pending, return_exceptions=True):
                assert isinstance(end, EngineDied) and why in str(end)
            with pytest.raises(EngineDied, match=why):
                await engine.interrupt()
        finally:
            await engine.close()

    virtual_clock.run(live(), virtual=True)
