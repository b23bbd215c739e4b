"""Promise: with truncated sampling, vLLM's replies have the kept set of each token.

The server is a fake of vLLM's documented reply. A server that returns no sets, or others, is
refused, and so are options with which vLLM returns none. Replies of evaluations need no sets.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.fake_vllm import FakeVllm
from unstale.config import ConfigError, EngineConfig, EvalConfig, RunConfig
from unstale.engines import EngineDied, Reply, SamplingParams
from unstale.engines.registry import EngineOptions
from unstale.engines.servers.vllm import VllmEngine
from unstale.kept_sets import WHOLE, Truncation
from unstale.testing import tiny_policy

POLICY = tiny_policy(seed=5)
PROMPT = [3, 1, 4, 1, 5]
LIMITS = Truncation(top_p=0.8, top_k=12, min_p=0.01)
PARAMS = SamplingParams(24, (), temperature=0.8, seed=3, **LIMITS._asdict())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    POLICY.save(folder)
    return folder


def sampled(
    model: Path, server: FakeVllm, *asked: SamplingParams, limits: Truncation = LIMITS
) -> list[Reply]:
    engine = VllmEngine(
        EngineOptions(model, dtype="float32", url=server.url, max_context=128, truncation=limits)
    )

    async def story() -> list[Reply]:
        try:
            await engine.start()
            await engine.interrupt()
            await engine.load(POLICY.weights(), 3)
            await engine.resume()
            return [await engine.sample(PROMPT, each) for each in asked]
        finally:
            await engine.close()

    return asyncio.run(story())


def test_replies_have_the_sets_over_which_their_log_probabilities_are(
    model: Path, tmp_path: Path
) -> None:
    greedy = SamplingParams(8, (), temperature=0.0, **LIMITS._asdict())
    with FakeVllm(tmp_path) as server:
        server.returns_masks = True
        cut, best = (reply.piece for reply in sampled(model, server, PARAMS, greedy))
    assert cut.kept_sets is not None and len(cut.kept_sets) == len(cut.tokens) == 24
    sizes = cut.kept_sets.sizes.tolist()
    assert max(sizes) <= 12 and len(set(sizes)) > 1
    lengths = range(len(PROMPT), len(PROMPT) + 24)
    rows = POLICY.logps_after([*PROMPT, *cut.tokens], lengths, temperature=0.8).double()
    for at, (token, logp) in enumerate(zip(cut.tokens, rows, strict=True)):
        kept = cut.kept_sets.at([at]).ids.tolist()
        assert kept == sorted(logp.topk(len(kept)).indices.tolist())
        expected = float(logp[token] - logp[kept].logsumexp(0))
        assert cut.behavior_logp[at] == pytest.approx(expected, abs=1e-4)
    assert best.kept_sets is None and set(best.behavior_logp) == {0.0}
    (first,) = POLICY.logps_after(PROMPT, [len(PROMPT)], temperature=1.0)
    assert best.tokens[0] == int(first.argmax())


def test_a_server_without_sets_truncates_replies_that_need_none(
    model: Path, tmp_path: Path
) -> None:
    unrecorded = replace(PARAMS, return_sets=False)
    with FakeVllm(tmp_path) as server:
        (reply,) = sampled(model, server, unrecorded, limits=WHOLE)
        with pytest.raises(ValueError, match="does not return the set"):
            sampled(model, server, PARAMS, limits=WHOLE)
    tokens = reply.piece.tokens
    assert reply.piece.kept_sets is None and len(tokens) == 24
    lengths = range(len(PROMPT), len(PROMPT) + 24)
    rows = POLICY.logps_after([*PROMPT, *tokens], lengths, temperature=0.8)
    for token, logp in zip(tokens, rows, strict=True):
        assert int((logp > logp[token]).sum()) < 12


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        (False, "no kept sets: start it with --return-sampling-mask"),
        (True, "the 32 kept sets of 32 tokens do not contain them"),
    ],
)
def test_a_server_without_the_sets_of_its_tokens_is_found_by_the_probe(
    model: Path, tmp_path: Path, returns: bool, message: str
) -> None:
    with FakeVllm(tmp_path) as server:
        server.returns_masks = server.confuses_masks = returns
        with pytest.raises(EngineDied, match=message):
            sampled(model, server, PARAMS)


def test_options_with_which_vllm_returns_no_sets_are_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"top_k must be above 0 with engine.top_p = 0.9 and"):
        EngineConfig(backend="vllm", top_p=0.9)
    engine = EngineConfig(backend="vllm", top_p=0.9, top_k=64)
    greedy = EvalConfig(top_k=0, temperature=0.0)
    RunConfig(recipe="toy", engine=engine, eval=greedy)
    with pytest.raises(ConfigError, match=r"eval.top_k must be above 0 with engine.top_p = 0.9, "):
        RunConfig(recipe="toy", engine=engine, eval=EvalConfig(top_k=0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("unstale.engines.servers.vllm.require_vllm", lambda python: None)
    with pytest.raises(ValueError, match=r"with vLLM needs a GPU.*Set engine.backend = embedded"):
        VllmEngine(EngineOptions(model, truncation=LIMITS))
