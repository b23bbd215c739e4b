"""Promise: with truncated sampling, vLLM's replies have the kept set of each token.

The server is a fake of vLLM's documented reply. A server that returns no sets, or others, is
refused, and so are options with which vLLM returns none.
"""

import asyncio
from pathlib import Path

import pytest
import torch

from tests.support.fake_vllm import FakeVllm
from unstale.config import ConfigError, EngineConfig
from unstale.engines import EngineDied, Reply, SamplingParams
from unstale.engines.registry import EngineOptions
from unstale.engines.servers.vllm import VllmEngine
from unstale.kept_sets import Truncation
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


def sampled(model: Path, server: FakeVllm, *asked: SamplingParams) -> list[Reply]:
    engine = VllmEngine(
        EngineOptions(model, dtype="float32", url=server.url, max_context=128, truncation=LIMITS)
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
    for at, token in enumerate(cut.tokens):
        logp = POLICY.next_logps([*PROMPT, *cut.tokens[:at]], temperature=0.8).double()
        kept = cut.kept_sets.at([at]).ids.tolist()
        assert kept == sorted(logp.topk(len(kept)).indices.tolist())
        expected = float(logp[token] - logp[kept].logsumexp(0))
        assert cut.behavior_logp[at] == pytest.approx(expected, abs=1e-4)
    assert best.kept_sets is None and set(best.behavior_logp) == {0.0}
    assert best.tokens[0] == int(POLICY.next_logps(PROMPT, temperature=1.0).argmax())


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
    EngineConfig(backend="vllm", top_p=0.9, top_k=64)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("unstale.engines.servers.vllm.require_vllm", lambda python: None)
    with pytest.raises(ValueError, match=r"with vLLM needs a GPU.*Set engine.backend = embedded"):
        VllmEngine(EngineOptions(model, truncation=LIMITS))
