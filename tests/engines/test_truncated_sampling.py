"""Promise: a truncated distribution is that of its definition, and its kept set is returned.

- compiled and by torch, the set is that of `Truncation`, written out here, and log-probabilities
  are renormalised over it;
- tokens are drawn with these probabilities;
- a reply of the embedded engine has the set of every token, also beside plain replies and after an
  interruption, unless the request needs none.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from unstale.engines import SamplingParams, check_request
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.engines.embedded.sampling import Sampler, draw, truncated, uniforms
from unstale.engines.registry import EngineOptions
from unstale.kept_sets import WHOLE, KeptSets, Truncation
from unstale.testing import plain_logps, tiny_policy

pytestmark = pytest.mark.usefixtures("forked_children")

LIMITS = [
    Truncation(top_p=0.95),
    Truncation(top_p=0.3),
    Truncation(top_p=0.9999),
    Truncation(top_p=1e-6),
    Truncation(top_k=1),
    Truncation(top_k=20),
    Truncation(min_p=0.05),
    Truncation(top_p=0.8, top_k=7, min_p=0.02),
    WHOLE,
]


def defined(likely: NDArray[np.float64], limits: Truncation) -> list[int]:
    """Return the kept tokens of a distribution `[V]`, ascending, by the definition."""
    order = sorted(range(len(likely)), key=lambda token: (-likely[token], token))
    order = [token for token in order if likely[token] >= limits.min_p * likely[order[0]]]
    order = order[: limits.top_k or None]
    if limits.top_p < 1:
        sums = np.cumsum(likely[order])
        order = order[: 1 + int(np.searchsorted(sums, limits.top_p * sums[-1]))]
    return sorted(order)


@pytest.mark.parametrize("vocab", [5, 64, 1000])
@pytest.mark.parametrize("scale", [0.1, 2.0, 8.0])
def test_the_set_is_that_of_the_definition_compiled_and_by_torch(vocab: int, scale: float) -> None:
    limits = LIMITS * 3
    rows = len(limits)
    noise = np.random.default_rng(int(vocab * 10 + scale))
    logits = torch.from_numpy((noise.normal(size=(rows, vocab)) * scale).astype(np.float32))
    heat = np.array([1.0, 0.7, 1.3] * len(LIMITS), np.float32)
    seeds, at = np.arange(rows, dtype=np.uint64), np.arange(rows) + 3
    compiled = Sampler()(logits, heat, seeds, at, limits)
    masked, kept = truncated(logits, torch.from_numpy(heat), limits)
    tokens, logp = draw(masked, torch.from_numpy(heat), torch.from_numpy(uniforms(seeds, at)))
    assert compiled.tokens.tolist() == tokens.squeeze().tolist()
    np.testing.assert_allclose(compiled.logp, logp.numpy(), atol=2e-5)
    for row in range(rows):
        likely = torch.softmax(logits[row].double() / float(heat[row]), -1).numpy()
        expected = defined(likely, limits[row])
        for found in (compiled.kept_sets, kept):
            assert isinstance(found, KeptSets)
            assert found.at([row]).ids.tolist() == (expected if limits[row] else [])
        token = int(compiled.tokens[row])
        assert token in expected
        assert compiled.logp[row] == pytest.approx(
            np.log(likely[token] / likely[expected].sum()), abs=1e-4
        )


def test_tokens_are_drawn_with_the_renormalised_probabilities() -> None:
    likely = np.array([0.05, 0.4, 0.1, 0.3, 0.15])
    count = 40_000
    logits = torch.from_numpy(np.log(likely).astype(np.float32)).expand(count, -1).contiguous()
    drawn = Sampler()(
        logits,
        np.ones(count, np.float32),
        np.zeros(count, np.uint64),
        np.arange(count),
        [Truncation(top_p=0.8)] * count,
    )
    shares = np.bincount(drawn.tokens, minlength=5) / count
    np.testing.assert_allclose(shares, [0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85], atol=0.01)


def test_a_greedy_reply_has_the_most_probable_token_whatever_is_kept() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    drawn = Sampler()(
        logits, np.zeros(1, np.float32), np.zeros(1, np.uint64), np.zeros(1, int), [LIMITS[0]]
    )
    assert drawn.tokens.tolist() == [1] and drawn.logp.tolist() == [0.0]


def test_an_engine_that_returns_no_sets_refuses_truncation() -> None:
    params = SamplingParams(8, (), top_p=0.9, min_p=0.1)
    with pytest.raises(ValueError, match=r"top_p=0.9.* does not return the set"):
        check_request([1], params)
    check_request([1], params, keeps_sets=True)
    unrecorded = replace(params, return_sets=False)
    check_request([1], unrecorded, truncates=True)
    with pytest.raises(ValueError, match=r"top_p=0.9.* samples only from the whole vocabulary"):
        check_request([1], unrecorded)


def test_replies_of_the_embedded_engine_have_the_sets_of_their_model(tmp_path: Path) -> None:
    policy = tiny_policy(seed=2)
    policy.save(tmp_path)
    engine = EmbeddedEngine(EngineOptions(tmp_path, dtype="float32", max_context=128))
    prompt = [5, 9, 33, 4]
    limits = Truncation(top_p=0.7, top_k=9)

    async def replies() -> list[object]:
        await engine.start()
        await engine.load(policy.weights(), 3)
        await engine.resume()
        params = [
            SamplingParams(24, (), temperature=0.8, seed=1, top_p=0.7, top_k=9),
            SamplingParams(24, (), seed=2),
        ]
        params.append(replace(params[0], return_sets=False))
        try:
            return [*await asyncio.gather(*(engine.sample(prompt, each) for each in params))]
        finally:
            await engine.close()

    found = [reply.piece for reply in asyncio.run(replies())]  # type: ignore[attr-defined]
    cut, plain, unrecorded = found
    assert plain.kept_sets is None and len(cut.kept_sets) == 24
    assert unrecorded == cut and unrecorded.kept_sets is None
    lengths = range(len(prompt), len(prompt) + 24)
    rows = policy.logps_after([*prompt, *cut.tokens], lengths, temperature=0.8).double()
    for at, (token, logp) in enumerate(zip(cut.tokens, rows, strict=True)):
        likely = logp.exp().numpy()
        kept = cut.kept_sets.at([at]).ids.tolist()
        assert kept == defined(likely, limits)
        expected = np.log(likely[token] / likely[kept].sum())
        assert cut.behavior_logp[at] == pytest.approx(expected, abs=1e-4)
    whole = plain_logps(policy, [*prompt, *plain.tokens])[len(prompt) :]
    np.testing.assert_allclose(plain.behavior_logp, whole.numpy(), atol=1e-4)
