"""Test the behaviour of SGLang that its engine works around.

Default stop tokens, replies that an abort misses or that never started, refused cache flushes,
servers without seeds or with preferred sampling parameters; and a whole run.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.test_run import quiet
from tests.engines.test_remote import POLICY, PROMPT, hold
from tests.support.fake_sglang import FakeSglang
from tests.support.run_engine import run_engine
from tests.support.tiny_runs import save_tiny, tiny_run
from tests.support.waits import LIMIT_S
from unstale.cli import session
from unstale.config import EngineConfig
from unstale.engines import SamplingParams
from unstale.engines.registry import EngineOptions
from unstale.engines.servers.sglang import SglangEngine
from unstale.testing import plain_logps, tiny_policy

LONG = SamplingParams(1000, ())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    POLICY.save(folder)
    return folder


@pytest.fixture
def server() -> Iterator[FakeSglang]:
    with FakeSglang() as fake:
        yield fake


def _engine(model: Path, server: FakeSglang, *, keep_cache: bool = False) -> SglangEngine:
    return SglangEngine(
        EngineOptions(model, dtype="float32", url=server.url, keep_cache=keep_cache)
    )


@pytest.mark.costly
def test_an_end_that_nobody_asked_for_is_none(model: Path, server: FakeSglang) -> None:
    engine = _engine(model, server)

    async def story() -> None:
        await hold(engine, 3)
        params = SamplingParams(60, (), seed=9, temperature=1.3)
        server.eos = set()
        whole = await engine.sample(PROMPT, params)
        asked, server.eos = server.asked, set(range(0, 64, 2))
        broken = await engine.sample(PROMPT, params)
        assert broken.stop == whole.stop == "length" and server.asked > asked + 10
        assert broken.piece.tokens == whole.piece.tokens and broken.piece.version == 3
        torch.testing.assert_close(
            broken.piece.behavior_logp, whole.piece.behavior_logp, atol=1e-5, rtol=0
        )
        stop = whole.piece.tokens[40]
        ended = await engine.sample(PROMPT, replace(params, stop_tokens=(stop,)))
        at = whole.piece.tokens.index(stop) + 1
        assert ended.stop == "stop" and ended.piece.tokens == whole.piece.tokens[:at]
        full = await engine.sample([3] * 2045, replace(params, max_tokens=3))
        assert full.stop == "length" and len(full.piece.tokens) == 3
        async with asyncio.TaskGroup() as tasks:
            speaking = tasks.create_task(engine.sample(PROMPT, LONG))
            await engine.sample(PROMPT, params)
            await engine.interrupt()
        assert (
            speaking.result().stop == "interrupted"
            and 0 < len(speaking.result().piece.tokens) < 1000
        )

    run_engine(engine, story)


def test_what_waits_in_front_of_the_engine_or_in_its_queue_comes_back(model: Path) -> None:
    with FakeSglang(max_running=1) as server:
        engine = _engine(model, server)

        async def story() -> None:
            await hold(engine, 0)
            async with asyncio.TaskGroup() as tasks:
                speaking = [tasks.create_task(engine.sample(PROMPT, LONG)) for _ in range(2)]
                while len(server.running) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                server.frontend_s = 0.3
                speaking.append(tasks.create_task(engine.sample(PROMPT, LONG)))
                while server.asked < 4:  # noqa: ASYNC110 - one is the probe
                    await asyncio.sleep(0.01)
                await engine.interrupt()
                assert all(task.done() for task in speaking)
            replies = [task.result() for task in speaking]
            assert {reply.stop for reply in replies} == {"interrupted"}
            assert [bool(reply.piece.tokens) for reply in replies[:2]] == [True, False]
            server.frontend_s = 0.0
            await hold(engine, 1)
            again = await engine.sample(PROMPT, SamplingParams(4, ()))
            assert again.stop == "length" and again.piece.version == 1

        run_engine(engine, story)


def test_a_reply_that_nobody_waits_for_does_not_outlive_its_weights(
    model: Path, server: FakeSglang
) -> None:
    """The server notices a closed connection late, and a load does not wait for it."""
    server.notices_s = 60.0
    engine = _engine(model, server)

    async def story() -> None:
        await hold(engine, 0)
        task = asyncio.ensure_future(engine.sample(PROMPT, LONG))
        await engine.sample(PROMPT, SamplingParams(2, ()))
        task.cancel()
        await asyncio.wait((task,))
        assert server.running
        async with asyncio.timeout(LIMIT_S / 10):
            await hold(engine, 1)
        assert not server.running

    run_engine(engine, story)


@pytest.mark.parametrize("keep_cache", [False, True])
def test_a_cache_is_dropped_before_anything_is_sampled(model: Path, keep_cache: bool) -> None:
    """The flush is repeated until the server accepts it. The first load drops older caches too."""
    with FakeSglang() as server:
        server.cache([7] * 70)
        server.refuses = 3
        engine = _engine(model, server, keep_cache=keep_cache)

        async def story() -> None:
            for version in (0, 1):
                await hold(engine, version)
                server.refuses = 3
                reply = await engine.sample([7] * 70, SamplingParams(2, ()))
                assert reply.piece.clean == (not keep_cache or version == 0)
            assert engine.metrics()["prefill_tokens"] == (70 + 6 if keep_cache else 2 * 70)

        run_engine(engine, story)


def test_without_seeds_log_probabilities_are_as_right(model: Path) -> None:
    with FakeSglang(deterministic=False) as server:
        engine = _engine(model, server)

        async def story() -> None:
            await hold(engine, 5)
            params = SamplingParams(40, (), seed=1, temperature=0.7)
            first, second = [(await engine.sample(PROMPT, params)).piece for _ in range(2)]
            assert first.tokens != second.tokens
            for piece in (first, second):
                expected = plain_logps(
                    tiny_policy(seed=5), [*PROMPT, *piece.tokens], temperature=0.7
                )[len(PROMPT) :]
                assert (expected - torch.tensor(piece.behavior_logp)).abs().max() < 1e-4

        run_engine(engine, story)


def test_replies_that_need_no_sets_are_truncated(model: Path, server: FakeSglang) -> None:
    engine = _engine(model, server)
    limits = {"top_p": 0.5, "top_k": 4, "min_p": 0.05}

    async def story() -> None:
        await hold(engine, 5)
        for given in (limits, {"top_p": 0.5}):
            params = SamplingParams(40, (), seed=1, return_sets=False, **given)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="does not return the set"):
                await engine.sample(PROMPT, replace(params, return_sets=True))
            tokens = (await engine.sample(PROMPT, params)).piece.tokens
            lengths = range(len(PROMPT), len(PROMPT) + len(tokens))
            rows = POLICY.logps_after([*PROMPT, *tokens], lengths, temperature=1.0).exp()
            for token, shares in zip(tokens, rows, strict=True):
                likelier = shares[shares > shares[token]]
                assert likelier.sum() <= given["top_p"]
                assert len(likelier) < given.get("top_k", 64)
                assert shares[token] >= given.get("min_p", 0) * shares.max()

    run_engine(engine, story)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"preferred_sampling_params": {"top_k": 5}}, "overrides sampling parameters"),
        ({"page_size": 1}, "--page-size 16"),
    ],
)
def test_servers_that_would_do_something_else(model: Path, flags: dict[str, Any], why: str) -> None:
    async def story() -> None: ...

    with FakeSglang(**flags) as server, pytest.raises(ValueError, match=why):
        run_engine(_engine(model, server, keep_cache=True), story)


@pytest.mark.costly
def test_an_asynchronous_run(tmp_path: Path) -> None:
    """Two servers, a lag of up to 2, replies of several versions, and exact old
    log-probabilities."""
    model = tmp_path / "model"
    save_tiny(model)
    with FakeSglang() as first, FakeSglang() as second:
        engine = EngineConfig(
            backend="sglang",
            urls=f"{first.url} {second.url}",
            dtype="float32",
            max_context=256,
            max_completion_tokens=16,
        )
        config = tiny_run(model, tmp_path, max_steps=4, deterministic=False, engine=engine)
        rows = session.train(config, console=quiet()).metrics
        assert first.asked > 6 and second.asked > 6
    assert [row["step"] for row in rows] == list(range(1, 5))
    assert max(row["schedule/staleness_max"] for row in rows) == 2
    assert max(row["schedule/mixed_version_share"] for row in rows) > 0
    assert all(
        row["engine/probe_logp_error"] < 1e-3 and row["correction/log_d_abs_mean"] < 1e-4
        for row in rows
    )
    assert all(
        row["old_logps/exact_share"] == 1 and row["audit/logp_error_abs_mean"] < 1e-5
        for row in rows
    )
