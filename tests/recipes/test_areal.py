"""Test the recipes with AReaL's losses: two optimizer steps of each have the loss of its formula.

The formula is -sum w min(r A, clip(r, 0.8, 1.2) A) / n over the n sampled tokens of a step, with r
= pi / pi_prox and w = pi_prox / mu, and w = 0 over 5.
"""

import pytest
import torch
from torch import Tensor

from unstale.builders import build_old_logps
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.recipes import RECIPES
from unstale.records import Batch, ScoredTrajectory, collate
from unstale.research.techniques.m2po import under_limit
from unstale.techniques.hooks import Techniques
from unstale.testing import episode, nudge, plain_logps, tiny_policy
from unstale.trainer.local import LocalTrainer

VERSION = 3


def a_batch(logps: list[Tensor]) -> Batch:
    """Return sequences of versions 0 to 3. The engine's policy is up to e^0.4 off, and once e^3."""
    items: list[ScoredTrajectory] = []
    for i in range(8):
        items.append(episode(i, [3, (6, i % 4)], advantage=(-1) ** i * (1 + i / 4)))
    batch = collate(items)
    noise = 0.4 * torch.randn(len(batch.tokens), generator=torch.Generator().manual_seed(9))
    noise[batch.offsets[2] - 1] = -3
    batch.behavior_logp[batch.sampled] = (torch.cat(logps) + noise)[batch.sampled].float()
    return batch


def log_prox(name: str, now: Tensor, batch: Batch, start: Tensor) -> Tensor:
    if name == "areal_naive":
        return batch.behavior_logp.double()
    if name != "areal_loglinear":
        return start
    lag = (VERSION - batch.version).clamp(min=1)
    share = (lag - 1) / lag
    return share * now + (1 - share) * batch.behavior_logp.double()


@pytest.mark.costly
@pytest.mark.parametrize(
    "name", ["areal_naive", "areal_decoupled", "areal_loglinear", "areal_m2po"]
)
def test_its_loss_is_that_of_the_formula(name: str) -> None:
    config = RECIPES[name]()
    policy = tiny_policy(dtype="float64")
    nudge(policy, seed=1)
    policy.version = VERSION
    plans = [episode(i, [3, (6, 0)]) for i in range(8)]
    tokens = [[t for piece in each.trajectory.pieces for t in piece.tokens] for each in plans]
    batch = a_batch([plain_logps(policy, each) for each in tokens])
    route = build_old_logps(config.old_logps, LocalScorer(policy, 1.0, 64))
    trainer = LocalTrainer(policy, config, route, techniques=Techniques.of(config))
    start = torch.cat([plain_logps(policy, each) for each in tokens])
    keep = batch.sampled.clone()
    if name == "areal_m2po":
        squares = (start - batch.behavior_logp.double()).square()
        keep[batch.sampled] = under_limit(squares[batch.sampled], 0.04)
        assert 1 < (batch.sampled & ~keep).sum() < batch.sampled.sum() - 1
    whole = 0.0
    steps = trainer.prepare(batch)
    assert len(steps) == 4
    for number in range(2):
        now = torch.cat([plain_logps(policy, each) for each in tokens])
        prox = log_prox(name, now, batch, start)
        ratio, weight = (now - prox).exp(), (prox - batch.behavior_logp).exp()
        weight = weight.masked_fill((weight > 5) | ~keep, 0)
        clipped = torch.minimum(ratio * batch.advantage, ratio.clamp(0.8, 1.2) * batch.advantage)
        chosen = batch.sampled & (batch.sequence % 4 == number)
        whole -= float((weight * clipped)[chosen].sum() / chosen.sum())
        trainer.backward(steps[number])
        trainer.step()
        found = trainer.metrics()["objective/loss"] * (number + 1)
        assert found == pytest.approx(whole, rel=1e-6)
