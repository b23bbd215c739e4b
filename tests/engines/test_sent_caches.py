"""Prefill engines send their caches to decode engines, and engines change groups (P/D-Serve).

Real engines show that a sent context is not computed again and gives the same reply. Scripted ones
show that no request is lost if weights change or an engine dies on the way.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.run_engine import run_engine
from unstale.engines import Engine, SamplingParams
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.engines.pool import EnginePool, Recovery, supervise
from unstale.engines.registry import EngineOptions
from unstale.engines.routing import Candidate, GroupLoads, Phases
from unstale.engines.scripted import ScriptedEngine
from unstale.model.loading import load_model
from unstale.testing import nudge, tiny_policy
from unstale.testing.architectures import ARCHITECTURES, save_architecture

CONTEXT = tuple(range(5, 60)) * 3
"""165 tokens: two full pages of the cache and a part of a third."""
REPLY = SamplingParams(20, (), seed=7)
DECODER, PACKED = "decoder", "packed"


def save(kind: str, folder: Path) -> None:
    if kind == PACKED:
        save_architecture(ARCHITECTURES["Llama"], folder, planted=False)
    else:
        tiny_policy().save(folder)


def weights_of(folder: Path, kind: str) -> dict[str, Tensor]:
    if kind == PACKED:
        model = load_model(folder, torch.float32)
        return {name: each.detach() for name, each in model.named_parameters()}
    policy = tiny_policy()
    nudge(policy, seed=1, size=0.05)
    return dict(policy.weights())


async def publish(engine: Engine, weights: dict[str, Tensor], version: int) -> None:
    await engine.interrupt()
    await engine.load(weights, version)
    await engine.resume()


@pytest.mark.parametrize("kind", [DECODER, PACKED])
@pytest.mark.usefixtures("forked_children")
def test_a_sent_context_gives_the_same_reply_and_is_not_computed_again(
    tmp_path: Path, kind: str
) -> None:
    save(kind, tmp_path)
    options = EngineOptions(tmp_path, dtype="float32", max_running=2, max_context=256)
    engines = [EmbeddedEngine(options) for _ in range(2)]
    pool = EnginePool(engines, phases=Phases(1, ratio=1.0, sends_cache=True))
    prefill, decode = engines

    async def story() -> None:
        weights = weights_of(tmp_path, kind)
        await publish(pool, weights, 0)
        alone = await prefill.sample(CONTEXT, REPLY)
        await publish(pool, weights, 1)
        pool.metrics()
        reply = await pool.sample(CONTEXT, REPLY)
        assert reply.piece.tokens == alone.piece.tokens
        assert reply.piece.behavior_logp == alone.piece.behavior_logp and reply.piece.clean
        counted = decode.metrics()
        assert (counted["prefill_tokens"], counted["sampled_tokens"]) == (0, 20)
        assert counted["received_tokens"] == len(CONTEXT)
        assert prefill.metrics()["sampled_tokens"] == 1
        longer = CONTEXT + reply.piece.tokens + tuple(range(30))
        await pool.sample(longer, REPLY)
        assert prefill.metrics()["sampled_tokens"] == 1, "its new tokens are more than a reply"

        context = await prefill.send_cache(CONTEXT)
        assert decode.metrics()["received_tokens"] == len(longer)
        await publish(decode, weights, 2)
        await decode.take_cache(context)
        assert not decode.metrics()["received_tokens"], "it is of another version"

    run_engine(pool, story)


class Sending(ScriptedEngine):
    """A scripted engine that sends and takes caches. `calls` of all engines are one list."""

    def __init__(self, name: str, calls: list[tuple[str, str]]) -> None:
        def script(tokens: Sequence[int], params: SamplingParams) -> list[int]:
            calls.append((name, f"sample {params.max_tokens}"))
            return [1] * params.max_tokens

        super().__init__(script)
        self._name, self._calls = name, calls
        self.on_send: Callable[[], Awaitable[None]] = nothing

    async def send_cache(self, tokens: Sequence[int]) -> bytes:
        self._calls.append((self._name, "send"))
        await self.on_send()
        self._check_alive()
        return b""

    async def take_cache(self, data: bytes) -> None:
        self._calls.append((self._name, "take"))
        self._check_alive()


async def nothing() -> None:
    pass


def test_a_request_passes_both_engines_and_survives_what_happens_between() -> None:
    calls: list[tuple[str, str]] = []
    engines = [Sending("prefill", calls), Sending("decode", calls)]
    phases = Phases(1, ratio=1.0, sends_cache=True)
    pool = supervise(EnginePool(engines, phases=phases), Recovery(lambda version: {}, 2))
    first, second = ("prefill", "sample 1"), ("decode", "sample 20")

    async def ask() -> tuple[str, int, int]:
        calls.clear()
        reply = await pool.sample([len(calls), 2] * 80, REPLY)
        return reply.stop, len(reply.piece.tokens), reply.piece.version

    async def story() -> None:
        await publish(pool, {}, 0)
        assert await ask() == ("length", 20, 0)
        assert calls == [first, ("prefill", "send"), ("decode", "take"), second]
        await publish(pool, {}, 1)

        engines[0].on_send = lambda: publish(pool, {}, 2)
        assert await ask() == ("interrupted", 0, 2)
        assert second not in calls, "the reply must not be of two versions"

        async def dies() -> None:
            engines[0].die("killed")

        engines[0].on_send = dies
        await publish(pool, {}, 3)
        assert await ask() == ("length", 20, 3)
        assert calls == [first, ("prefill", "send"), second], "it computes the context itself"

    run_engine(pool, story)


def test_a_short_context_is_decoded_at_once_and_a_prefill_engine_serves_without_others() -> None:
    calls: list[tuple[str, str]] = []
    engines = [Sending("prefill", calls), Sending("decode", calls)]
    pool = EnginePool(engines, phases=Phases(1, ratio=1.0, sends_cache=True))

    async def story() -> None:
        await publish(pool, {}, 0)
        await pool.sample([3] * 8, REPLY)
        assert calls == [("decode", "sample 20")]
        engines[1].die("killed")
        calls.clear()
        assert (await pool.sample([4] * 8, REPLY)).stop == "interrupted"
        reply = await pool.sample([4] * 80, REPLY)
        assert len(reply.piece.tokens) == 20 and calls[-1] == ("prefill", "sample 20")

    run_engine(pool, story)


def loads(prefill: list[int], decode: list[int]) -> list[Candidate]:
    found = [Candidate(load, 0, is_free=True, prefills=True) for load in prefill]
    return found + [Candidate(load, 0, is_free=True) for load in decode]


@pytest.mark.parametrize(
    ("prefill", "decode", "group"),
    [([8], [3, 4], None), ([9], [3, 4], True), ([1, 1], [3], None), ([1, 1], [4], False)],
)
def test_the_group_with_over_twice_the_load_gets_an_engine(
    prefill: list[int], decode: list[int], group: bool | None
) -> None:
    """Means of 8 against 3.5 are not over 2 * 3.5 + 1, those of 9 are."""
    seen = GroupLoads()
    found = [seen.add(loads(prefill, decode)) for _ in range(128)]
    assert [found[63], found[127]] == [group] * 2
    assert {*found[:63], *found[64:127]} == {None}


def test_engines_follow_the_load_and_the_last_one_stays() -> None:
    gate = asyncio.Event()

    async def wait(tokens: Sequence[int], params: SamplingParams) -> None:
        await gate.wait()

    engines = [ScriptedEngine(lambda *_: [1] * 4, token_delay=wait) for _ in range(4)]
    pool = EnginePool(engines, phases=Phases(1, moves=True))

    async def sizes(length: int) -> list[float]:
        """Return the sizes of the prefill group after each 64 requests of a length."""
        found = []
        gate.clear()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(5):
                for n in range(64):
                    context = [len(found), n] * (length // 2)
                    tasks.create_task(pool.sample(context, SamplingParams(4, ())))
                await asyncio.sleep(0)
                found.append(pool.metrics()["prefill_engines"])
            gate.set()
        return found

    async def story() -> None:
        await publish(pool, {}, 0)
        grown = await sizes(200)
        assert grown == sorted(grown) and grown[-1] == 3, grown
        shrunk = await sizes(8)
        assert shrunk == sorted(shrunk, reverse=True) and shrunk[-1] == 1, shrunk

    run_engine(pool, story)
