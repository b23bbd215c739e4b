"""Test the scripted engine: given replies, stragglers, continuations and failures."""

import asyncio
from collections.abc import Sequence

import pytest

from unstale.engines import EngineDied, SamplingParams
from unstale.engines.scripted import ScriptedEngine

STOP = 9
PARAMS = SamplingParams(max_tokens=6, stop_tokens=(STOP,))


def _count(tokens: Sequence[int], params: SamplingParams) -> list[int]:
    """Return 1, 2, 3, 4, stop. Each token is its own position, so continuations are visible."""
    return [*range(len(tokens), 5), STOP]


async def _ready(engine: ScriptedEngine, *, version: int = 0) -> ScriptedEngine:
    await engine.start()
    await engine.load({}, version)
    await engine.resume()
    return engine


def test_a_straggler_holds_up_nobody_but_itself() -> None:
    gate = asyncio.Event()

    async def delay(tokens: Sequence[int], params: SamplingParams) -> None:
        if params.seed == 1 and len(tokens) == 3:
            await gate.wait()

    async def live() -> None:
        engine = await _ready(ScriptedEngine(_count, token_delay=delay))
        slow = asyncio.ensure_future(engine.sample([0], SamplingParams(6, (STOP,), seed=1)))
        quick = await engine.sample([0], PARAMS)
        assert (quick.piece.tokens, quick.stop) == ((1, 2, 3, 4, STOP), "stop")
        assert not slow.done()
        gate.set()
        assert (await slow).piece.tokens == quick.piece.tokens
        await engine.close()

    asyncio.run(live())


def test_an_interrupted_straggler_goes_on_under_the_next_version() -> None:
    stuck = asyncio.Event()

    async def delay(tokens: Sequence[int], params: SamplingParams) -> None:
        if len(tokens) == 3 and not stuck.is_set():
            stuck.set()
            await asyncio.Event().wait()

    async def live() -> None:
        engine = await _ready(
            ScriptedEngine(_count, logp=lambda context, token: -0.1 * token, token_delay=delay)
        )
        first = asyncio.ensure_future(engine.sample([0], PARAMS))
        await stuck.wait()
        await engine.interrupt()
        assert first.done(), "the interrupt returned after the reply had"
        piece = first.result().piece
        assert (piece.tokens, piece.version, first.result().stop) == ((1, 2), 0, "interrupted")
        assert piece.behavior_logp == pytest.approx((-0.1, -0.2))
        await engine.load({}, 1)
        await engine.resume()
        rest = await engine.sample([0, *piece.tokens], PARAMS)
        assert (rest.piece.tokens, rest.piece.version, rest.stop) == ((3, 4, STOP), 1, "stop")
        assert engine.metrics()["sampled_tokens"] == 5.0
        assert not any(engine.metrics().values())
        await engine.close()

    asyncio.run(live())


def test_an_interrupt_may_find_nothing_said_yet() -> None:
    async def never(tokens: Sequence[int], params: SamplingParams) -> None:
        await asyncio.Event().wait()

    async def live() -> None:
        engine = await _ready(ScriptedEngine(_count, token_delay=never), version=4)
        reply = asyncio.ensure_future(engine.sample([0], PARAMS))
        await asyncio.sleep(0)
        await engine.interrupt()
        assert (reply.result().piece.tokens, reply.result().piece.version) == ((), 4)
        await engine.close()

    asyncio.run(live())


def test_it_dies_on_demand() -> None:
    async def never(tokens: Sequence[int], params: SamplingParams) -> None:
        await asyncio.Event().wait()

    async def live() -> None:
        engine = await _ready(ScriptedEngine(_count, token_delay=never))
        reply = asyncio.ensure_future(engine.sample([0], PARAMS))
        await asyncio.sleep(0)
        engine.die("out of memory")
        with pytest.raises(EngineDied, match="out of memory"):
            await reply
        with pytest.raises(EngineDied, match="out of memory"):
            await engine.interrupt()

    asyncio.run(live())


def test_a_script_that_runs_dry_is_an_error() -> None:
    async def live() -> None:
        engine = await _ready(ScriptedEngine(lambda tokens, params: [1, 2]))
        with pytest.raises(
            ValueError,
            match="the script returned 2 tokens without a stop token, but max_tokens is 6",
        ):
            await engine.sample([0], PARAMS)

    asyncio.run(live())


def test_a_cancelled_reply_is_forgotten() -> None:
    async def never(tokens: Sequence[int], params: SamplingParams) -> None:
        await asyncio.Event().wait()

    async def live() -> None:
        engine = await _ready(ScriptedEngine(_count, token_delay=never))
        reply = asyncio.ensure_future(engine.sample([0], PARAMS))
        await asyncio.sleep(0)
        reply.cancel()
        await engine.interrupt()
        assert reply.cancelled()

    asyncio.run(live())
