"""Prefill engines send their caches to decode engines (P/D-Serve).

Real engines show that a sent context is not computed again and gives the same reply. Scripted ones
show that no request is lost if weights change or an engine dies on the way.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.run_engine import run_engine
from tests.support.tiny_runs import save_tiny
from tests.support.waits import LIMIT_S
from unstale.cluster import engine_host
from unstale.cluster.engine_host import EngineHost, HostOptions
from unstale.cluster.weight_objects import arrays
from unstale.engines import CacheNotSent, Engine, SamplingParams
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.engines.pool import EnginePool, Recovery, supervise
from unstale.engines.registry import EngineOptions
from unstale.engines.routing import Phases
from unstale.engines.scripted import ScriptedEngine
from unstale.model.loading import load_model
from unstale.testing import nudge, tiny_policy
from unstale.testing.architectures import ARCHITECTURES, save_architecture
from unstale.weights.codec import file_of

CONTEXT = tuple(range(5, 60)) * 3
"""165 tokens: two full pages of the cache and a part of a third."""
REPLY = SamplingParams(20, (), seed=7)
DECODER, PACKED, BITWISE = "decoder", "packed", "bitwise"


def save(kind: str, folder: Path) -> None:
    if kind == PACKED:
        save_architecture(ARCHITECTURES["Llama"], folder, planted=False)
    elif kind == BITWISE:
        save_tiny(folder, bitwise=True)
    else:
        tiny_policy().save(folder)


def weights_of(folder: Path, kind: str) -> dict[str, Tensor]:
    if kind != DECODER:
        model = load_model(folder, torch.float32)
        return {name: each.detach() for name, each in model.named_parameters()}
    policy = tiny_policy()
    nudge(policy, seed=1, size=0.05)
    return dict(policy.weights())


async def publish(engine: Engine, weights: dict[str, Tensor], version: int) -> None:
    await engine.interrupt()
    await engine.load(weights, version)
    await engine.resume()


def engines_of(folder: Path, count: int, **options: Any) -> list[EmbeddedEngine]:
    """Return engines that send caches, as those of a run do."""
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_running": 2,
        "max_context": 256,
        "cache_key": "k" * 64,
    }
    return [EmbeddedEngine(EngineOptions(folder, **(settings | options))) for _ in range(count)]


@pytest.mark.parametrize("kind", [DECODER, PACKED, BITWISE])
@pytest.mark.usefixtures("forked_children")
def test_a_sent_context_gives_the_same_reply_and_is_not_computed_again(
    tmp_path: Path, kind: str
) -> None:
    save(kind, tmp_path)
    engines = engines_of(tmp_path, 2, bitwise=kind == BITWISE)
    pool = EnginePool(engines, phases=Phases(1, ratio=1.0, sends_cache=True))
    prefill, decode = engines

    async def story() -> None:
        weights = weights_of(tmp_path, kind)
        await publish(pool, weights, 0)
        alone = await prefill.sample(CONTEXT, REPLY)
        await publish(pool, weights, 1)
        pool.metrics()
        reply = await pool.sample(CONTEXT, REPLY)
        assert reply.stop == "length" and reply.piece.version == 1
        assert reply.piece.tokens == alone.piece.tokens
        assert reply.piece.behavior_logp == alone.piece.behavior_logp and reply.piece.clean
        assert reply.first_token_s and alone.first_token_s
        counted = decode.metrics()
        assert (counted["prefill_tokens"], counted["sampled_tokens"]) == (0, 19)
        assert counted["received_tokens"] == len(CONTEXT)
        assert prefill.metrics()["sampled_tokens"] == 1
        longer = CONTEXT + reply.piece.tokens + tuple(range(30))
        await pool.sample(longer, REPLY)
        assert prefill.metrics()["sampled_tokens"] == 1, "its new tokens are more than a reply"

        address = await decode.cache_address(CONTEXT)
        assert await prefill.send_cache(CONTEXT, address) == 0, "it has a longer context"
        await publish(decode, weights, 2)
        assert await prefill.send_cache(CONTEXT, address) == 0, "it is of another version"
        await publish(prefill, weights, 2)
        await prefill.sample(CONTEXT, REPLY)
        assert await prefill.send_cache(CONTEXT, address) == len(CONTEXT)

    run_engine(pool, story)


@pytest.mark.usefixtures("forked_children")
def test_replies_go_on_with_the_same_bits_when_a_prefill_and_a_decode_engine_are_killed(
    tmp_path: Path,
) -> None:
    save(BITWISE, tmp_path)
    weights = weights_of(tmp_path, BITWISE)
    engines = engines_of(tmp_path, 4, bitwise=True, max_running=4)
    phases = Phases(2, ratio=0.5, sends_cache=True)
    killed: list[str] = []
    recovery = Recovery(lambda version: weights, 2, lambda kind, **_: killed.append(kind))
    pool = supervise(EnginePool(engines, max_running=4, phases=phases), recovery)
    contexts = [(9 + number, *CONTEXT) for number in range(6)]

    async def whole(engine: Engine, context: tuple[int, ...]) -> list[tuple[int, float]]:
        """Return 60 sampled tokens and their log-probabilities, over as many replies as needed."""
        found: list[tuple[int, float]] = []
        while len(found) < 60:
            tokens = (*context, *(token for token, _ in found))
            params = replace(REPLY, max_tokens=60 - len(found), sampled=len(found))
            piece = (await engine.sample(tokens, params)).piece
            found += zip(piece.tokens, piece.behavior_logp, strict=True)
        return found

    async def story() -> None:
        await publish(pool, weights, 0)
        expected = [await whole(engines[3], context) for context in contexts]
        await publish(pool, weights, 1)
        replies = [asyncio.ensure_future(whole(pool, each)) for each in contexts]
        for engine in (engines[0], engines[2]):
            await asyncio.sleep(0.02)
            os.kill(engine.pid, signal.SIGKILL)
        assert await asyncio.gather(*replies) == expected
        assert killed.count("engine_lost") == 2

    run_engine(pool, story)


@pytest.mark.usefixtures("forked_children")
def test_a_cache_goes_from_one_host_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host listens at an address of its own, as two machines do."""
    save(BITWISE, tmp_path)
    weights = weights_of(tmp_path, BITWISE)
    options = EngineOptions(
        tmp_path, dtype="float32", max_context=256, max_running=2, bitwise=True, cache_key="k" * 64
    )

    async def host_at(address: str) -> EngineHost:
        monkeypatch.setattr(engine_host, "machine_address", lambda: address)
        host = EngineHost(HostOptions(EmbeddedEngine, (options, options)))
        await host.start(0)
        await host.stage(0, -1, arrays(file_of(weights)))
        await host.load(0)
        await host.resume()
        return host

    async def story() -> None:
        prefill, decode = await host_at("127.0.0.2"), await host_at("127.0.0.3")
        try:
            alone = (await prefill.sample(0, CONTEXT, REPLY)).reply.piece
            await prefill.interrupt(1)
            await prefill.resume()
            address = await decode.cache_address(CONTEXT)
            assert address.startswith("127.0.0.3:")
            first = (await prefill.sample(1, CONTEXT, replace(REPLY, max_tokens=1))).reply.piece
            assert await prefill.send_cache(CONTEXT, address) >= len(CONTEXT)
            rest = replace(REPLY, max_tokens=19, sampled=1)
            piece = (await decode.sample(0, CONTEXT + first.tokens, rest)).reply.piece
            assert first.tokens + piece.tokens == alone.tokens
            assert first.behavior_logp + piece.behavior_logp == alone.behavior_logp
            counters = (await decode.interrupt(1)).counters
            assert counters["received_tokens"] >= len(CONTEXT) > counters["prefill_tokens"]
        finally:
            await prefill.close()
            await decode.close()

    asyncio.run(story())


@pytest.mark.usefixtures("forked_children")
def test_sets_of_kept_tokens_are_joined(tmp_path: Path) -> None:
    save(DECODER, tmp_path)
    engines = engines_of(tmp_path, 2)
    pool = EnginePool(engines, phases=Phases(1, ratio=1.0, sends_cache=True))
    params = replace(REPLY, top_k=3, signals=True)

    async def story() -> None:
        await publish(pool, weights_of(tmp_path, DECODER), 0)
        piece = (await pool.sample(CONTEXT, params)).piece
        alone = (await engines[0].sample(CONTEXT, params)).piece
        assert piece.kept_sets and alone.kept_sets and piece.signals and alone.signals
        assert piece.kept_sets.ids.tolist() == alone.kept_sets.ids.tolist()
        assert piece.signals.entropy.tolist() == alone.signals.entropy.tolist()

    run_engine(pool, story)


@pytest.mark.usefixtures("forked_children")
def test_an_engine_without_the_key_of_the_run_gets_nothing(tmp_path: Path) -> None:
    save(DECODER, tmp_path)
    (own,), (other,) = (engines_of(tmp_path, 1, cache_key=key * 64) for key in "ab")

    async def story() -> None:
        await other.start()
        for engine in (own, other):
            await publish(engine, weights_of(tmp_path, DECODER), 0)
        await own.sample(CONTEXT, REPLY)
        with pytest.raises(CacheNotSent, match="no cache could be sent"):
            await own.send_cache(CONTEXT, await other.cache_address(CONTEXT))
        assert not other.metrics()["received_tokens"]
        await other.close()

    run_engine(own, story)


@pytest.mark.usefixtures("forked_children")
def test_a_policy_without_pages_is_refused_at_the_start(tmp_path: Path) -> None:
    save_architecture(ARCHITECTURES["Mamba"], tmp_path, planted=False)
    (engine,) = engines_of(tmp_path, 1)

    async def start() -> None:
        try:
            with pytest.raises(ValueError, match=r"send_cache must be false.*not kept in pages"):
                await engine.start()
        finally:
            await engine.close()

    asyncio.run(start())


class Sending(ScriptedEngine):
    """A scripted engine that sends and takes caches. `calls` of all engines are one list."""

    def __init__(self, name: str, calls: list[tuple[str, str]]) -> None:
        def script(tokens: Sequence[int], params: SamplingParams) -> list[int]:
            calls.append((name, f"sample {params.max_tokens}"))
            return [1] * params.max_tokens

        super().__init__(script)
        self._name, self._calls = name, calls
        self.on_send: Callable[[], Awaitable[None]] = nothing

    async def cache_address(self, tokens: Sequence[int]) -> str:
        self._calls.append((self._name, "address"))
        self._check_alive()
        return self._name

    async def send_cache(self, tokens: Sequence[int], address: str) -> int:
        self._calls.append((self._name, f"send to {address}"))
        await self.on_send()
        self._check_alive()
        return len(tokens)


async def nothing() -> None:
    pass


def test_a_request_passes_both_engines_and_survives_what_happens_between() -> None:
    calls: list[tuple[str, str]] = []
    engines = [Sending("prefill", calls), Sending("decode", calls)]
    phases = Phases(1, ratio=1.0, sends_cache=True)
    pool = supervise(EnginePool(engines, phases=phases), Recovery(lambda version: {}, 2))
    first, sent = ("prefill", "sample 1"), ("prefill", "send to decode")
    second, asked = ("decode", "sample 19"), ("decode", "address")

    async def ask() -> tuple[str, int, int]:
        calls.clear()
        reply = await pool.sample([len(calls), 2] * 80, REPLY)
        return reply.stop, len(reply.piece.tokens), reply.piece.version

    async def story() -> None:
        await publish(pool, {}, 0)
        assert await ask() == ("length", 20, 0)
        assert calls == [first, asked, sent, second]
        await publish(pool, {}, 1)

        publishing: list[asyncio.Task[None]] = []

        async def stalls() -> None:
            publishing.append(asyncio.ensure_future(publish(pool, {}, 2)))
            await asyncio.sleep(LIMIT_S)

        engines[0].on_send = stalls
        assert await ask() == ("interrupted", 1, 1), "the first token is kept"
        assert second not in calls, "the reply must not be of two versions"
        await publishing[0]

        async def fails() -> None:
            raise CacheNotSent("no connection")

        engines[0].on_send = fails
        pool.metrics()
        assert await ask() == ("length", 20, 2)
        assert pool.metrics()["lost_caches"] == 1

        async def dies() -> None:
            engines[0].die("killed")

        engines[0].on_send = dies
        await publish(pool, {}, 3)
        assert await ask() == ("length", 20, 3)
        assert calls == [first, asked, sent, second], "it computes the context itself"

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
        assert len(reply.piece.tokens) == 20
        assert calls[-2:] == [("prefill", "sample 1"), ("prefill", "sample 19")]

    run_engine(pool, story)
