"""Promise: `engine.logit_bias` changes one distribution, and all three log-probabilities are its.

- the sampler, compiled and by torch, draws from the softmax of (logits + bias) / temperature, and a
  banned token is neither drawn nor kept;
- the trainer computes this log-probability and its gradient, for each kind of output head, also
  over kept sets;
- replies of the embedded engine have the log-probability that the trainer and its scorer in another
  process compute, so D is 1 up to rounding;
- a wrong option is refused with a message.
"""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from unstale.config import ConfigError, EngineConfig
from unstale.engines import SamplingParams
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.engines.embedded.sampling import Sampler
from unstale.engines.registry import EngineOptions
from unstale.kept_sets import KeptSets, Truncation
from unstale.model.head import LogpQuery, query_head
from unstale.model.packing import Packed
from unstale.native import NotCompiled
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.testing import tiny_policy

pytestmark = pytest.mark.usefixtures("forked_children")

BIAS = EngineConfig(logit_bias="3=-inf 5=1.5 9=-0.75").biases


def no_compiler(*_: object) -> None:
    raise NotCompiled("no C compiler")


def biased(logits: torch.Tensor) -> torch.Tensor:
    logits = logits.double().clone()
    logits[..., 3], logits[..., 5], logits[..., 9] = (
        torch.full_like(logits[..., 3], -torch.inf),
        logits[..., 5] + 1.5,
        logits[..., 9] - 0.75,
    )
    return logits


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("limits", [(), Truncation(top_p=0.9)])
def test_tokens_are_drawn_from_the_biased_distribution(
    compiled: bool, limits: Truncation | tuple[()], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr("unstale.engines.embedded.sampling.compile_library", no_compiler)
    sampler = Sampler(BIAS)
    assert sampler.compiled == compiled
    count = 20_000
    row = torch.randn(12, generator=torch.Generator().manual_seed(0))
    row[3] = 6.0  # by far the most probable, but banned
    heat = np.full(count, 0.8, np.float32)
    truncations = [limits] * count if isinstance(limits, Truncation) else ()
    given = row.expand(count, -1).contiguous()
    drawn = sampler(given, heat, np.zeros(count, np.uint64), np.arange(count), truncations)
    likely = torch.softmax(biased(row) / 0.8, -1)
    if drawn.kept_sets is not None:
        kept = drawn.kept_sets.at([0]).ids.tolist()
        assert 3 not in kept and 0.9 <= likely[kept].sum() < 1
        outside = torch.ones(12, dtype=torch.bool)
        outside[kept] = False
        likely[outside] = 0
        likely /= likely.sum()
    shares = np.bincount(drawn.tokens, minlength=12) / count
    np.testing.assert_allclose(shares, likely.numpy(), atol=0.015)
    np.testing.assert_allclose(drawn.logp, likely.log().numpy()[drawn.tokens], atol=1e-5)
    assert shares[3] == 0 and torch.equal(given[0], row)


class Scaled(nn.Module):
    """A head that is more than one linear map."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.weight = inner.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return 4 * torch.tanh(self.inner(rows) / 4)


@pytest.mark.parametrize("kind", ["linear", "scaled"])
@pytest.mark.parametrize("keeps", [True, False])
def test_the_trainer_adds_the_bias_with_each_head(kind: str, keeps: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(8, 12).double()
    head = Scaled(linear) if kind == "scaled" else linear
    rows = torch.randn(40, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 5, 9, 11] * 10)
    sets = KeptSets(np.full(40, 5, np.int64), np.tile(np.array([0, 5, 7, 9, 11], np.int32), 40))
    added = torch.zeros(12, dtype=torch.float64)
    for token, value in BIAS:
        added[token] = value
    query = LogpQuery(targets, 0.8, True, kept_sets=sets if keeps else None, logit_bias=added)
    logp, entropy = query_head(head, rows, query)
    found = torch.autograd.grad((logp + 0.1 * entropy).sum(), [rows, linear.weight])
    logits = biased(head(rows)) / 0.8
    inside = [0, 5, 7, 9, 11] if keeps else [each for each in range(12) if each != 3]
    masked = torch.full_like(logits, -torch.inf)
    masked[:, inside] = logits[:, inside]
    whole = masked.log_softmax(-1)
    expected = whole.gather(1, targets[:, None]).squeeze(1)
    spread = -(whole[:, inside].exp() * whole[:, inside]).sum(-1)
    wanted = torch.autograd.grad((expected + 0.1 * spread).sum(), [rows, linear.weight])
    torch.testing.assert_close(logp, expected)
    torch.testing.assert_close(entropy, spread)
    torch.testing.assert_close(found, wanted)


def test_engine_trainer_and_scorer_have_the_same_log_probabilities(tmp_path: Path) -> None:
    policy = tiny_policy(seed=2)
    policy.save(tmp_path)
    policy.bias_logits(BIAS)
    options = EngineOptions(tmp_path, dtype="float32", max_context=128, logit_bias=BIAS)
    prompt = [5, 9, 33, 4]

    async def replies() -> list[object]:
        engine = EmbeddedEngine(options)
        await engine.start()
        await engine.load(policy.weights(), 3)
        await engine.resume()
        params = [
            SamplingParams(48, (), temperature=0.8, seed=1),
            SamplingParams(48, (), temperature=0.8, seed=2, top_p=0.9),
        ]
        try:
            return [*await asyncio.gather(*(engine.sample(prompt, each) for each in params))]
        finally:
            await engine.close()

    scorer = LocalScorer(policy, 0.8, 512)
    apart = LocalScorer.load(scorer.export(tmp_path / "exported"))
    for reply in asyncio.run(replies()):
        piece = reply.piece  # type: ignore[attr-defined]
        tokens = torch.tensor([*prompt, *piece.tokens])
        assert 3 not in piece.tokens
        kept = piece.kept_sets
        if kept:
            nothing = np.zeros(len(prompt), np.int64)
            kept = KeptSets(np.concatenate([nothing, kept.sizes]), kept.ids)
        packed = Packed(tokens, (0, len(tokens)), None, kept)
        where = torch.arange(len(tokens)) >= len(prompt)
        for each in (policy, apart.policy, policy.twin()):
            logp = each.score(packed, where, temperature=0.8, max_tokens_per_microbatch=512).logp
            np.testing.assert_allclose(logp[where], piece.behavior_logp, atol=1e-4)
    assert policy.logps_after(prompt, [len(prompt)], temperature=0.8)[0, 3] < -1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": "5"}, "has '5': write the id of a token, = and a number"),
        ({"logit_bias": "5=nan"}, "from -100 to 100, or -inf"),
        ({"logit_bias": "5=inf"}, "has '5=inf'"),
        ({"logit_bias": "a=1"}, "has 'a=1'"),
        ({"logit_bias": "5=1 5=2"}, "names token 5 twice"),
        ({"logit_bias": "5=1", "bitwise": True}, "not built with engine.bitwise"),
        ({"logit_bias": "5=1", "backend": "sglang"}, "not built with engine.backend = sglang"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)  # type: ignore[arg-type]


def test_a_token_outside_of_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="token 64 is not one of the model's 0 to 63"):
        tiny_policy().bias_logits([(64, 1.0)])
