"""Test the engines for inference servers against fakes of their servers.

They keep the engine contract, stamp each token with its version, probe new weights, detect a dead
server, and route episodes over several servers. `make test-engines` uses the real vLLM. Tests of
SGLang alone are in test_sglang.py.
"""

import asyncio
import json
import math
import re
import socket
import threading
from collections.abc import Awaitable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.support.fake_server import FakeServer
from tests.support.fake_sglang import FakeSglang
from tests.support.fake_vllm import FakeVllm
from tests.support.run_engine import run_engine
from tests.support.waits import until
from unstale import config
from unstale.builders import build_engine
from unstale.engines import (
    Engine,
    EngineDied,
    Reply,
    SamplingParams,
    rates,
    remote,
    session,
    shared_weights,
)
from unstale.engines.http import Body, Http, _encode_json, decode_json
from unstale.engines.pool import EnginePool, Recovery
from unstale.engines.registry import EngineOptions
from unstale.engines.remote import ProbeFailed, RemoteEngine
from unstale.engines.routing import CACHED_TOKENS_PER_REPLY, MAX_EXTRA_REPLIES
from unstale.engines.scripted import ScriptedEngine
from unstale.engines.servers.sglang import SglangEngine
from unstale.engines.servers.vllm import VllmEngine
from unstale.engines.usage import UsageCounters
from unstale.testing import check_engine, nudge, plain_logps, tiny_policy
from unstale.weights.store import VersionStore

POLICY = tiny_policy(seed=5)
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    POLICY.save(folder)
    return folder


KINDS = pytest.mark.parametrize("kind", [FakeVllm, FakeSglang])
Kind = type[FakeVllm] | type[FakeSglang]


def fake(kind: Kind, folder: Path, *, room: int = 2048, raw: bool = False) -> FakeServer:
    if kind is FakeVllm:
        return FakeVllm(folder, max_model_len=room, raw_logprobs=raw)
    return FakeSglang(context_length=room + 6, original_logprob=raw)


@pytest.fixture(params=[FakeVllm, FakeSglang])
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    with fake(request.param, tmp_path) as one:
        yield one


def attached(
    model: Path, at: FakeServer, *, keep_cache: bool = False, deltas: bool = False
) -> RemoteEngine:
    made = VllmEngine if isinstance(at, FakeVllm) else SglangEngine
    return made(
        EngineOptions(model, dtype="float32", url=at.url, keep_cache=keep_cache, deltas=deltas)
    )


async def hold(engine: Engine, version: int, *, seed: int = 5) -> None:
    await engine.interrupt()
    await engine.load(tiny_policy(seed=seed).weights(), version)
    await engine.resume()


@pytest.mark.costly
def test_it_keeps_the_contract(model: Path, server: FakeServer) -> None:
    check_engine(lambda: attached(model, server), update=POLICY.model.state_dict())


@pytest.mark.costly
def test_deltas_change_the_weights_in_place(model: Path, server: FakeServer) -> None:
    """The server reads new weights from a delta of the version store, and refuses a foreign
    delta."""
    engine, policy = attached(model, server, deltas=True), tiny_policy(seed=5)
    store = VersionStore(policy.twin().weights())

    async def story() -> None:
        for version in range(3):
            nudge(policy, seed=version, size=0.01)
            store.put(version, policy.weights())
            await engine.interrupt()
            if version:
                with pytest.raises(ValueError, match="the engine holds"):
                    await engine.load(store.delta(version), version + 1)
                await engine.load(store.delta(version), version)
            else:
                await engine.load(policy.weights(), 0)
            await engine.resume()
            piece = (await engine.sample(PROMPT, SamplingParams(20, ()))).piece
            expected = plain_logps(policy, [*PROMPT, *piece.tokens], temperature=1.0)[len(PROMPT) :]
            assert piece.version == version
            assert torch.allclose(torch.tensor(piece.behavior_logp).double(), expected, atol=1e-4)

    run_engine(engine, story)


def test_without_deltas_none_is_taken_and_nothing_stays_in_memory(
    model: Path, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(shared_weights, "MEMORY", memory)
    engine, policy = attached(model, server), tiny_policy(seed=5)
    store = VersionStore(policy.twin().weights())

    async def story() -> None:
        for version in (0, 1):
            nudge(policy, seed=version, size=0.01)
            store.put(version, policy.weights())
        await hold(engine, 0)
        await engine.interrupt()
        assert not list(memory.iterdir())
        with pytest.raises(ValueError, match="takes full weights"):
            await engine.load(store.delta(1), 1)

    run_engine(engine, story)


@pytest.mark.costly
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_log_probabilities_and_versions_are_those_of_the_weights(
    model: Path, server: FakeServer, temperature: float
) -> None:
    engine = attached(model, server)

    async def story() -> None:
        pieces = []
        for version in (4, 5):
            await hold(engine, version, seed=version)
            async with asyncio.TaskGroup() as tasks:
                context = PROMPT + [token for piece in pieces for token in piece.tokens]
                params = SamplingParams(40, (), temperature=temperature, seed=1)
                speaking = tasks.create_task(engine.sample(context, params))
                if version == 4:
                    await engine.sample([9], replace(params, max_tokens=8))
                    await engine.interrupt()
            pieces.append(speaking.result().piece)
        assert [piece.version for piece in pieces] == [4, 5]
        assert 0 < len(pieces[0].tokens) < 40 == len(pieces[1].tokens)
        tokens, at = list(PROMPT), len(PROMPT)
        for piece in pieces:
            tokens += piece.tokens
            expected = plain_logps(
                tiny_policy(seed=piece.version), tokens, temperature=temperature
            )[at:]
            assert torch.allclose(
                torch.tensor(piece.behavior_logp).double()[:50], expected[:50], atol=1e-4
            )
            at = len(tokens)

    run_engine(engine, story)


@pytest.mark.costly
@pytest.mark.parametrize("keep_cache", [True, False])
def test_what_is_sampled_over_a_kept_cache_is_not_clean(
    model: Path, server: FakeServer, keep_cache: bool
) -> None:
    engine = attached(model, server, keep_cache=keep_cache)
    params = SamplingParams(2, ())

    async def story() -> None:
        await hold(engine, 0)
        contexts = ([7] * 70, [7] * 80, [8] * 50, [8] * 51)
        assert all([(await engine.sample(context, params)).piece.clean for context in contexts])
        async with (
            asyncio.TaskGroup() as tasks
        ):  # the second finds cached what the first has not reported yet
            first = tasks.create_task(engine.sample([6] * 40, replace(params, max_tokens=200)))
            await engine.sample([9], replace(params, max_tokens=4))
            server.cache([6] * 40)
            second = await engine.sample([6] * 40, params)
        assert first.result().piece.clean and second.piece.clean != keep_cache
        assert engine.metrics()["reprefill_tokens"] == 0
        await hold(engine, 1)
        contexts = ([7] * 70 + [1] * 30, [5] * 70, [5] * 90, [7] * 70 + [1] * 31)
        cleans = [(await engine.sample(context, params)).piece.clean for context in contexts]
        assert cleans == ([False, True, True, False] if keep_cache else [True] * 4)
        assert engine.metrics()["reprefill_tokens"] == (0 if keep_cache else 64)

    run_engine(engine, story)


def test_prompt_tokens_that_a_server_had_in_its_cache_are_counted(
    model: Path, server: FakeServer
) -> None:
    engine = EnginePool([attached(model, server)])

    async def story() -> None:
        await hold(engine, 0)
        for cached in (0, 64):
            await engine.sample([7] * 70, SamplingParams(2, ()))
            metrics = engine.metrics()
            assert (metrics["cached_tokens"], metrics["prefill_tokens"]) == (cached, 70 - cached)
            assert metrics["engine_0/cached_share"] == cached / 70

    run_engine(engine, story)


def test_no_noise_is_used_twice_when_a_reply_goes_on(model: Path, server: FakeServer) -> None:
    engine = attached(model, server)

    async def story() -> None:
        await hold(engine, 0)
        params = SamplingParams(6, (), seed=3)
        first = (await engine.sample(PROMPT, params)).piece.tokens
        assert (await engine.sample(PROMPT, params)).piece.tokens == first
        others = [(await engine.sample([9] * k + PROMPT, params)).piece.tokens for k in (60, 61)]
        assert others[0] != others[1]

    run_engine(engine, story)


def test_a_greedy_reply_is_a_point_mass(model: Path, server: FakeServer) -> None:
    engine = attached(model, server)

    async def story() -> None:
        await hold(engine, 0)
        reply = await engine.sample(PROMPT, SamplingParams(3, (), temperature=0))
        assert reply.piece.behavior_logp == (0.0, 0.0, 0.0)

    run_engine(engine, story)


@pytest.mark.costly
@KINDS
@pytest.mark.parametrize(
    "fault", ["stale head", "a tensor of zeros", "raw log-probabilities", "no record"]
)
def test_the_probe_refuses_to_sample(model: Path, tmp_path: Path, kind: Kind, fault: str) -> None:
    with fake(kind, tmp_path, raw=fault == "raw log-probabilities") as server:
        engine = attached(model, server)
        server.forgetful = fault == "no record"

        async def story() -> None:
            if fault in ("stale head", "a tensor of zeros"):
                await hold(engine, 0)
                server.stale_head = fault == "stale head"
                server.corrupt = (
                    "model.layers.1.mlp.down_proj.weight" if fault == "a tensor of zeros" else ""
                )
            moved = tiny_policy(seed=5)
            nudge(moved, seed=1, size=0.01)
            await engine.interrupt()
            await engine.load(moved.weights(), 1)
            await engine.resume()
            with pytest.raises(
                EngineDied if fault == "no record" else ProbeFailed, match="version 1"
            ):
                await engine.sample(PROMPT, SamplingParams(2, ()))
            with pytest.raises(EngineDied):
                await engine.interrupt()

        run_engine(engine, story)


@pytest.mark.costly
@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_server_that_is_gone_is_noticed(
    model: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(session, "CHECK_S", 0.05)
    engine = attached(model, server)

    async def story() -> None:
        await hold(engine, 0)
        if how == "hangs":
            monkeypatch.setattr(remote, "HANG_S", 2.0)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(fails(engine.sample(PROMPT, SamplingParams(1000, ()))))
            await engine.sample(PROMPT, SamplingParams(2, ()))
            if how == "dies":
                await asyncio.to_thread(server.die)
            else:
                server.frozen = True
        assert ("did not answer within 2 s" in task.result()) == (how == "hangs")
        server.frozen = False

    run_engine(engine, story)


def test_a_server_of_somebody_elses_gets_time_to_come_back(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attached server may come back; one that never answered may not."""
    with FakeSglang() as server:
        engine = attached(model, server)

        async def story() -> None:
            await hold(engine, 0)
            await asyncio.to_thread(server.die)
            coming = asyncio.ensure_future(engine.start())
            await asyncio.sleep(0.3)
            assert not coming.done()
            with FakeSglang(port=server.port):
                await coming
                await hold(engine, 1)
                assert (await engine.sample(PROMPT, SamplingParams(2, ()))).piece.version == 1
            monkeypatch.setattr(remote, "HANG_S", 0.3)
            with pytest.raises(EngineDied, match=r"not ready within 0\.3 s"):
                await engine.start()

        run_engine(engine, story)
        with pytest.raises(EngineDied, match=r"refused|Connect"):
            run_engine(attached(model, server), story)


def test_a_server_that_hangs_from_the_start_is_given_up(
    model: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "HANG_S", 0.3)
    server.frozen = True

    async def story() -> None: ...

    with pytest.raises(EngineDied, match=r"0\.3 s"):
        run_engine(attached(model, server), story)


async def fails(call: Awaitable[object]) -> str:
    with pytest.raises(EngineDied) as caught:
        await call
    return str(caught.value)


def test_a_cancelled_sample_hangs_up(model: Path, server: FakeServer) -> None:
    engine = attached(model, server)

    async def story() -> None:
        await hold(engine, 0)
        task = asyncio.ensure_future(engine.sample(PROMPT, SamplingParams(1000, ())))
        await engine.sample(PROMPT, SamplingParams(2, ()))
        task.cancel()
        await asyncio.wait((task,))
        while server.running:  # noqa: ASYNC110 - the fake has a loop of its own
            await asyncio.sleep(0.01)
        assert engine.metrics()["sampled_tokens"] == 2

    run_engine(engine, story)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("tokens", "params", "why"),
    [
        ([], SamplingParams(2, ()), "the context is empty"),
        ([1] * 2048, SamplingParams(2, ()), "no space"),
        ([64], SamplingParams(2, ()), "does the tokenizer fit the model"),
        ([1], SamplingParams(2, (), temperature=1e-7), "needs temperature 0 or >="),
        ([1], SamplingParams(2, (), top_k=3), "truncate the support"),
    ],
)
def test_requests_that_cannot_be_right(
    model: Path, server: FakeServer, tokens: Sequence[int], params: SamplingParams, why: str
) -> None:
    engine = attached(model, server)

    async def story() -> None:
        await hold(engine, 0)
        with pytest.raises(ValueError, match=why):
            await engine.sample(tokens, params)

    run_engine(engine, story)


@KINDS
def test_servers_that_cannot_be_worked_with(model: Path, tmp_path: Path, kind: Kind) -> None:
    async def start(engine: Engine) -> None:
        await engine.start()

    made = VllmEngine if kind is FakeVllm else SglangEngine
    with fake(kind, tmp_path, room=64) as short, pytest.raises(ValueError, match="started with 64"):
        asyncio.run(start(attached(model, short)))
    with pytest.raises(EngineDied, match="nobody"):
        asyncio.run(start(made(EngineOptions(model, url=f"unix:{tmp_path}/nobody"))))
    wrong = {
        "localhost:8000": "'localhost' is unknown",
        "http://host:abc": "'abc'",
        "http://host:70000": "0-65535",
        "http://host:0": "must be 1 to 65535",
        "http://a..b": "label",
        "http://[::1": "IPv6",
        "http://:80": "no host",
        "unix:": "no path",
    }
    for url, fault in wrong.items():
        with pytest.raises(
            ValueError,
            match=rf"^engine\.urls: not a server address: '{re.escape(url)}' \(.*{fault}.*\); use",
        ):
            made(EngineOptions(model, url=url))
    with pytest.raises(ValueError, match="but the policy has"):
        made(EngineOptions(model, url="http://localhost:1", max_context=40960))


@pytest.mark.parametrize(
    "answer", [(404, {}), (200, {}), (200, {"data": [], "internal_states": []}), (200, None)]
)
def test_a_server_that_greets_otherwise_is_refused(
    model: Path, server: FakeServer, answer: tuple[int, Any]
) -> None:
    server.answers = dict.fromkeys(("/v1/models", "/server_info"), answer)

    async def story() -> None: ...

    with pytest.raises(ValueError, match="lacks what a run needs"):
        run_engine(attached(model, server), story)


@pytest.mark.costly
@pytest.mark.parametrize(
    "answer",
    [
        (500, {"error": "oh"}),
        (503, b""),
        (200, b"<html>"),
        (200, {}),
        (200, []),
        (200, {"choices": []}),
    ],
)
def test_a_reply_that_cannot_be_read_ends_its_service_until_it_is_started_again(
    model: Path, server: FakeServer, answer: tuple[int, Any]
) -> None:
    engine = attached(model, server)

    async def story() -> None:
        await hold(engine, 0)
        server.answers = dict.fromkeys(("/inference/v1/generate", "/generate"), answer)
        await fails(engine.sample(PROMPT, SamplingParams(2, ())))
        await fails(engine.interrupt())
        server.answers = {}
        await engine.start()
        await hold(engine, 1)
        assert (await engine.sample(PROMPT, SamplingParams(2, ()))).piece.version == 1

    run_engine(engine, story)


@pytest.mark.parametrize(
    ("logprobs", "fault"),
    [
        ([(3, -0.5)], r"2 tokens has 1 log-probabilities for 1 token ids"),
        ([(3, -0.5), (9, -0.5)], r"token 1 of a reply is 4, .* is of token 9"),
        (
            [(3, -0.5), (4, -9999.0)],
            r"token 1 of a reply, 4, has .* -9999\.0: .* above -9999, .* 0",
        ),
        ([(3, 0.5), (4, -0.5)], r"token 0 of a reply, 3, has the log-probability 0\.5"),
    ],
)
def test_the_fault_of_a_log_probability_is_named(
    model: Path, server: FakeServer, logprobs: list[tuple[int, float]], fault: str
) -> None:
    engine = attached(model, server)
    spans = [{"version": "0", "end": 2}]
    choice = {
        "token_ids": [3, 4],
        "logprobs": {"content": [{"token_id": id, "logprob": logp} for id, logp in logprobs]},
        "weight_versions": spans,
        "finish_reason": "length",
    }
    meta = {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [(logp, id, None) for id, logp in logprobs],
        "weight_versions": spans,
    }

    async def story() -> None:
        await hold(engine, 0)
        server.answers = {
            "/inference/v1/generate": (200, {"choices": [choice], "usage": {}}),
            "/generate": (200, {"output_ids": [3, 4], "meta_info": meta}),
        }
        with pytest.raises(EngineDied, match=fault):
            await engine.sample(PROMPT, SamplingParams(2, ()))

    run_engine(engine, story)


def test_weights_that_it_does_not_take_are_its_end(model: Path, server: FakeServer) -> None:
    engine = attached(model, server)
    refused = (400, {"success": False, "message": "Failed to update weights: no"})

    async def story() -> None:
        server.answers = dict.fromkeys(("/collective_rpc", "/update_weights_from_disk"), refused)
        with pytest.raises(EngineDied, match="Failed to update weights: no"):
            await engine.load(tiny_policy(seed=5).weights(), 0)

    run_engine(engine, story)


def _say(tokens: Sequence[int], params: SamplingParams) -> list[int]:
    return [(len(tokens) + index) ** 2 % 61 for index in range(params.max_tokens)]


async def _tick(tokens: Sequence[int], params: SamplingParams) -> None:
    await asyncio.sleep(0)


@pytest.mark.parametrize("restarts", [0, 3])
def test_several_engines_keep_the_contract(restarts: int) -> None:
    update = POLICY.weights()

    def make() -> Engine:
        engines = [ScriptedEngine(_say, token_delay=_tick, parameters=update) for _ in range(3)]
        return EnginePool(engines, Recovery(lambda version: update, restarts))

    check_engine(make, update=update)


class _Asked(list[tuple[int, int]]):
    """A record of which server continued from which first token. Long replies wait for a gate."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    def engine(self, number: int) -> ScriptedEngine:
        async def wait(tokens: Sequence[int], params: SamplingParams) -> None:
            self.append((number, tokens[0]))
            if params.max_tokens > 1:
                await self.gate.wait()

        return ScriptedEngine(_say, token_delay=wait)

    async def until(self, count: int) -> None:
        while len(self) < count:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def siblings(self, several: EnginePool, count: int, *, length: int) -> list[int]:
        """Return the server of each sibling when so many start at once with a prompt of this
        length."""
        await hold_nothing(several, 0)
        self.clear()
        async with asyncio.TaskGroup() as tasks:
            for begun in range(1, count + 1):
                tasks.create_task(several.sample([10] * length, SamplingParams(2, ())))
                await self.until(begun)
            found = [number for number, _ in self]
            self.gate.set()
        self.gate.clear()
        return found


@pytest.mark.parametrize("keep_cache", [False, True])
def test_an_episode_goes_where_its_prefix_is(keep_cache: bool) -> None:
    asked = _Asked()
    engine = EnginePool([asked.engine(0), asked.engine(1)], keep_cache=keep_cache)

    async def story() -> None:
        await hold_nothing(engine, 0)
        async with asyncio.TaskGroup() as tasks:
            for task in (10, 11, 12, 13):  # nobody has seen any
                tasks.create_task(engine.sample([task] * 64, SamplingParams(2, ())))
            await asked.until(4)
            asked.gate.set()
        home = {task: number for number, task in asked}
        assert sorted(home.values()) == [0, 0, 1, 1]
        asked.clear()
        for task in (13, 11, 10, 12):
            await engine.sample([task] * 64 + [1] * 40, SamplingParams(1, ()))
        assert {task: number for number, task in asked} == home
        asked.clear()
        await hold_nothing(engine, 1)
        for task in (13, 11, 10, 12):
            await engine.sample([task] * 64, SamplingParams(1, ()))
        assert {number for number, _ in asked} == {
            0,
            keep_cache * 1,
        }  # else nothing is cached, and the first is free
        assert not keep_cache or {task: number for number, task in asked} == home

    run_engine(engine, story)


@pytest.mark.parametrize(
    ("length", "together"),
    [
        (CACHED_TOKENS_PER_REPLY - 16, 1),
        (3 * CACHED_TOKENS_PER_REPLY, 3),
        (CACHED_TOKENS_PER_REPLY * (MAX_EXTRA_REPLIES + 1), MAX_EXTRA_REPLIES + 1),
        (CACHED_TOKENS_PER_REPLY * 2 * MAX_EXTRA_REPLIES, MAX_EXTRA_REPLIES + 1),
    ],
)
def test_siblings_begin_together_as_far_as_their_opening_is_worth_it(
    length: int, together: int
) -> None:
    """The prompt is prefilled twice only if that is faster than waiting, or if no server has
    room."""
    asked = _Asked()
    engine = EnginePool([asked.engine(0), asked.engine(1)])
    cramped = EnginePool([asked.engine(0), asked.engine(1)], max_running=2)

    async def story() -> None:
        await cramped.start()
        where = await asked.siblings(engine, 2 * MAX_EXTRA_REPLIES + 2, length=length)
        assert where.index(1) == together and abs(where.count(0) - where.count(1)) <= together
        assert sorted((await asked.siblings(cramped, 5, length=length))[:4]) == [0, 0, 1, 1]

    run_engine(engine, story)


def test_a_request_with_a_long_context_weighs_more() -> None:
    """A context of 640 tokens weighs 11: as much as 11 requests without whole 64 tokens."""
    asked = _Asked()
    engine = EnginePool([asked.engine(0), asked.engine(1)], load_tokens=64)
    plain = EnginePool([asked.engine(0), asked.engine(1)])
    full = EnginePool([asked.engine(0), asked.engine(1)], load_tokens=64, max_running=2)

    async def places(several: EnginePool) -> list[int]:
        await hold_nothing(several, 0)
        asked.clear()
        async with asyncio.TaskGroup() as tasks:
            for number, length in enumerate((640, *[8] * 12)):
                tasks.create_task(several.sample([number] * length, SamplingParams(2, ())))
                await asyncio.sleep(0.001)
            found = [number for number, _ in asked]
            asked.gate.set()
        asked.gate.clear()
        return found

    async def story() -> None:
        await plain.start()
        await full.start()
        assert await places(engine) == [0, *[1] * 11, 0]
        assert await places(engine) == [0, *[1] * 11, 0]  # no load is left of the first round
        assert await places(plain) == [0, 1] * 6 + [0]
        assert (await places(full))[:4] == [0, 1, 1, 0]  # no request waits while one has room

    run_engine(engine, story)


@pytest.mark.costly
@KINDS
def test_episodes_go_on_elsewhere_when_a_server_dies_and_come_back_with_it(
    model: Path, tmp_path: Path, kind: Kind
) -> None:
    folders = [tmp_path / name for name in "ab"]
    events: list[str] = []
    for folder in folders:
        folder.mkdir()
    first, second = (fake(kind, folder) for folder in folders)
    with first, second:
        engine = EnginePool(
            [attached(model, one) for one in (first, second)],
            Recovery(
                lambda version: POLICY.weights(),
                restarts=100,
                on_event=lambda kind, **_: events.append(kind),
            ),
        )

        async def story() -> None:
            await hold(engine, 0)
            params = SamplingParams(20, (), seed=2)
            for task in (2, 3):  # the probes of both have passed
                await engine.sample([4, 4, task], replace(params, max_tokens=1))
            first.frozen = True  # so it dies in the middle of its replies
            async with asyncio.TaskGroup() as tasks:
                speaking = [
                    tasks.create_task(engine.sample([4, 4, task], params)) for task in range(4)
                ]
                await until(lambda: len(first.running) == 2, "two replies")
                await asyncio.to_thread(first.die)
            stops = sorted(task.result().stop for task in speaking)
            assert stops == ["interrupted", "interrupted", "length", "length"]
            asked = second.asked
            replies: list[Reply] = [
                await engine.sample([4, 4, task], replace(params, max_tokens=2)) for task in (0, 1)
            ]
            assert second.asked == asked + 2 and {reply.piece.version for reply in replies} == {0}
            assert engine.metrics()["crashes"] == 1
            again = (
                FakeSglang(port=first.port)
                if isinstance(first, FakeSglang)
                else fake(kind, folders[0])
            )
            with again as reborn:
                version = 0
                while "engine_back" not in events:  # a restart may have failed before it was there
                    version += 1
                    await hold(engine, version)
                    await asyncio.sleep(0.1)
                await hold(engine, version + 1)
                async with asyncio.TaskGroup() as tasks:
                    for task in range(4):
                        tasks.create_task(engine.sample([task], SamplingParams(20, ())))
                assert reborn.asked >= 2

        run_engine(engine, story)


class _Odd(ScriptedEngine):
    """A server whose second start fails the compatibility check."""

    starts, closed = 0, False

    async def start(self) -> None:
        await super().start()
        self.starts += 1
        if self.starts > 1:
            raise ValueError("another model")

    async def close(self) -> None:
        self.closed = True
        await super().close()


def test_one_that_comes_back_as_something_else_stays_away_and_all_are_closed() -> None:
    members = [_Odd(_say), _Odd(_say)]
    events: list[tuple[str, dict[str, Any]]] = []

    def on_event(kind: str, **fields: Any) -> None:
        events.append((kind, fields))

    engine = EnginePool(members, Recovery(restarts=9, on_event=on_event))

    async def story() -> None:
        await hold_nothing(engine, 0)
        members[0].die("out of memory")
        for task in (1, 2):
            await engine.sample([task] * 20, SamplingParams(1, ()))
        await hold_nothing(engine, 1)
        await hold_nothing(engine, 2)
        assert members[0].starts == 2, "it is started again and again"
        members[1].die("the same")
        with pytest.raises(ValueError, match="another model"):
            await engine.sample([1], SamplingParams(1, ()))

    run_engine(engine, story)
    assert all(member.closed for member in members)
    assert [(kind, fields["cause"]) for kind, fields in events] == [
        ("engine_lost", "out of memory"),
        ("engine_restarted", "out of memory"),
        ("engine_lost", "another model"),
        ("engine_lost", "the same"),
        ("engine_restarted", "the same"),
        ("engine_lost", "another model"),
    ]


async def hold_nothing(engine: Engine, version: int) -> None:
    await engine.interrupt()
    await engine.load({}, version)
    await engine.resume()
    await asyncio.sleep(0)


def test_counters_of_several_are_those_of_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    members = [ScriptedEngine(_say) for _ in range(4)]
    counted = {
        "sampled_tokens": 100.0,
        "busy_s": 1.0,
        "idle_s": 3.0,
        "batch_size_mean": 2.0,
        "probe_logp_error": 1e-3,
    }
    counted["cpu_s"] = 0.5
    for member in members:
        monkeypatch.setattr(member, "metrics", lambda: counted)
    several = EnginePool(members)
    metrics = several.metrics()
    found = {name: value for name, value in metrics.items() if not name.startswith("engine_")}
    assert metrics["engine_3/busy_share"] == 0.25
    summed = {"sampled_tokens": 400, "cpu_s": 2.0}
    assert found == {**counted, **summed, "crashes": 0, "restarts": 0}
    assert rates({**found, "busy_s": 1.0, "idle_s": 0.0})["engine/sampled_tokens_per_s"] == 400

    async def lose_one() -> None:
        await hold_nothing(several, 0)
        members[0].die("out of memory")
        await several.sample([1], SamplingParams(1, ()))
        assert several.metrics()["sampled_tokens"] == 300, (
            "the counters of a dead engine are left out"
        )

    run_engine(several, lose_one)


def test_what_an_older_version_computed_is_not_taken_for_the_newer_ones() -> None:
    """Both versions cached a whole block, and the server may find either."""
    usage = UsageCounters(keep_cache=True)
    assert usage.count([1] * 16, [2, 3], cached=0)
    usage.loaded()
    assert usage.count([1] * 16, [2, 3], cached=0), "all of it was computed again"
    assert not usage.count([1] * 20, [4], cached=16)
    usage.loaded()
    usage.loaded()
    assert usage.count([1] * 17, [5], cached=0)
    assert not usage.count([1] * 20, [6], cached=16)


@pytest.mark.parametrize("wrong", [{"urls": "http://localhost:1"}, {"backend": "sglang2"}])
def test_options_that_do_not_go_together(wrong: dict[str, Any]) -> None:
    with pytest.raises(config.ConfigError):
        config.EngineConfig(**wrong)


@pytest.mark.parametrize("urls", ["", " "])
def test_a_backend_that_starts_no_server_needs_urls(urls: str) -> None:
    engine = config.EngineConfig(backend="sglang", urls=urls)
    with pytest.raises(config.ConfigError, match=r"sglang needs engine\.urls"):
        build_engine(config.RunConfig(recipe="x", engine=engine), None)


def test_a_server_is_not_deterministic() -> None:
    with pytest.raises(config.ConfigError, match="deterministic"):
        config.RunConfig(recipe="x", deterministic=True, engine=config.EngineConfig(backend="vllm"))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            b'4\r\n{"a"\r\n3\r\n:1}\r\n0\r\n\r\n',
            {"a": 1},
        ),
        (
            b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n7;x=y\r\n{"a":1}\r\n0\r\n\r\n',
            {"a": 1},
        ),
        (b'HTTP/1.0 200 OK\r\n\r\n{"a":1}', {"a": 1}),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", OSError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", OSError),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000, OSError),
        (b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nbusy", OSError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\n{", OSError),
        (b"SSH-2.0\r\n", OSError),
    ],
)
def test_http_answers(tmp_path: Path, answer: bytes, expected: Any) -> None:
    async def story() -> Any:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            writer.close()

        async with await asyncio.start_unix_server(serve, tmp_path / "s"):
            return await Http(f"unix:{tmp_path}/s").call("GET", "/")

    if expected is OSError:
        with pytest.raises(OSError):
            asyncio.run(story())
    else:
        assert asyncio.run(story()) == expected


def test_a_long_answer_is_parsed_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = [0.125] * 50_000
    content = json.dumps(numbers).encode()
    parse, threads = msgspec.json.decode, set()

    def noted(text: bytes, **options: Any) -> Any:
        threads.add(threading.current_thread())
        return parse(text, **options)

    def total(body: Body) -> float:
        threads.add(threading.current_thread())
        return sum(decode_json(body))

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(content)}\r\n\r\n"
            connection.sendall(head.encode() + content)

    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as server:
        listener.bind(f"{tmp_path}/s")
        listener.listen()
        serving = server.submit(serve, listener)
        monkeypatch.setattr(msgspec.json, "decode", noted)
        assert asyncio.run(Http(f"unix:{tmp_path}/s").call("GET", "/", decode=total)) == sum(
            numbers
        )
        serving.result()
    assert len(threads) == 1 and threading.main_thread() not in threads


def test_a_long_answer_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"1" * 99_999)

    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as server:
        listener.bind(f"{tmp_path}/s")
        listener.listen()
        serving = server.submit(serve, listener)
        with pytest.raises(ConnectionError, match="the body ends after 99999 of 100000 bytes"):
            asyncio.run(Http(f"unix:{tmp_path}/s").call("GET", "/"))
        serving.result()


def test_json_that_orjson_or_msgspec_refuses_is_sent_and_read_as_by_json(tmp_path: Path) -> None:
    received = bytearray()

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            received.extend(connection.recv(1 << 16))
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n[NaN]")

    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as server:
        listener.bind(f"{tmp_path}/s")
        listener.listen()
        serving = server.submit(serve, listener)
        (value,) = asyncio.run(Http(f"unix:{tmp_path}/s").call("POST", "/", {"text": "\ud800"}))
        serving.result()
    assert math.isnan(value)
    assert received.endswith(b'{"text":"\\ud800"}')


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"temperature": math.nan, "text": "null"}, "temperature is nan"),
        ({"sampling": {"top_p": -math.inf}}, "sampling.top_p is -inf"),
        ({"n": 1, "bias": [0.5, math.inf], "text": "\ud800"}, r"bias\[1\] is inf"),
    ],
)
def test_numbers_that_json_does_not_have_are_refused_by_name(
    body: dict[str, Any], name: str
) -> None:
    with pytest.raises(ValueError, match=f"^{name}, but a request can only have finite numbers"):
        asyncio.run(Http("unix:/does/not/exist").call("POST", "/", body))


@pytest.mark.parametrize("value", [date(2026, 1, 1), datetime(2026, 1, 1), SamplingParams(1, ())])
def test_objects_that_json_does_not_have_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        _encode_json({"value": value})


@pytest.mark.parametrize("text", ['{"n": 1, "more": [[]]}', '{"n": 1, "more": NaN}'])
def test_fields_that_a_form_does_not_name_are_skipped(text: str) -> None:
    assert decode_json(text.encode(), _OnlyN).n == 1


@pytest.mark.parametrize("text", ['{"n": "1"}', '{"m": 1}', '{"n": NaN}', "[1]"])
def test_json_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"Expected|required"):
        decode_json(text.encode(), _OnlyN)


class _OnlyN(msgspec.Struct):
    n: int


def test_null_is_sent() -> None:
    assert _encode_json({"a": None, "b": "null", "c": [1.5, "é"]}) == (
        b'{"a":null,"b":"null","c":[1.5,"\\u00e9"]}'
    )
