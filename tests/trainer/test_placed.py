"""Placed text: exact means of its gradient by enumeration, and what it leaves alone."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unstale.builders import build_old_logps
from unstale.config import CorrectionConfig, ObjectiveConfig, OldLogpsConfig, RunConfig
from unstale.config.training import TrainerConfig
from unstale.model.policy import Policy
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.records import (
    Batch,
    ContextPiece,
    Piece,
    Sampled,
    ScoredTrajectory,
    Task,
    Trajectory,
    collate,
)
from unstale.rewriting import remove_text
from unstale.testing import nudge, plain_logps, tiny_policy
from unstale.trainer.local import LocalTrainer

WIDE = CorrectionConfig(mode="truncate", high=1e6)
ASKED, HINT = (5, 6, 7), (33, 34)
VOCAB = 64


def make(policy: Policy, objective: ObjectiveConfig, **trainer: Any) -> LocalTrainer:
    """Return a trainer at version 1 whose route has versions 0 and 1."""
    config = RunConfig(
        recipe="",
        max_steps=10,
        correction=WIDE,
        objective=objective,
        trainer=TrainerConfig(**{"optimizer": "SGD", "lr": 1.0, "grad_clip": 1e9} | trainer),
    )
    old = build_old_logps(OldLogpsConfig(route="snapshot_old"), LocalScorer(policy, 1.0, 64))
    old.on_published(live={0})
    nudge(policy, seed=1)
    policy.version = 1
    old.on_published(live={0, 1})
    return LocalTrainer(policy, config, old)


def objective(placed: str, cap: float = 0.0, loss_type: str = "none") -> ObjectiveConfig:
    options: dict[str, Any] = {"placed_cap": cap} if placed == "guided" else {}
    return ObjectiveConfig(loss_type=loss_type, placed=placed, **options)


def scored(pieces: tuple[Piece, ...], advantage: float, number: int) -> ScoredTrajectory:
    task = Task("bandit", "train", 0)
    item = Trajectory(pieces, {"reward": 1.0}, "done", task, seed=number, episode=number)
    return ScoredTrajectory(item, (advantage,))


def gradient(trainer: LocalTrainer, batch: Batch) -> Tensor:
    for minibatch in trainer.prepare(batch):
        trainer.backward(minibatch)
    return -torch.cat([each.grad.flatten() for each in trainer.policy.model.parameters()])


def logps(policy: Policy, context: tuple[int, ...]) -> Tensor:
    """Return the log-probability of each token after a context, `[VOCAB]`."""
    return torch.tensor([plain_logps(policy, [*context, arm])[-1] for arm in range(VOCAB)])


def bandit() -> tuple[Tensor, Tensor]:
    """Return the engine's log-probabilities of all arms after the hint, and the arms' rewards."""
    noise = torch.Generator().manual_seed(3)
    engine = logps(tiny_policy(dtype="float64"), (*ASKED, *HINT))
    engine += 0.3 * torch.randn(VOCAB, generator=noise)
    rewards = (torch.rand(VOCAB, generator=noise) < 0.2).double()
    return engine.log_softmax(-1), rewards


def gradient_of_bandit(placed: str, cap: float = 0.0) -> Tensor:
    """Return the mean gradient over all arms, drawn by the engine with the hint, trained without.

    The divisor of the loss is the number of arms.
    """
    engine, rewards = bandit()
    items = []
    for arm in range(VOCAB):
        text = Sampled((arm,), (engine[arm].item(),), version=0)
        pieces = remove_text((ContextPiece(ASKED), ContextPiece(HINT), text), 3, 5)
        items.append(scored(pieces, VOCAB * engine[arm].exp().item() * rewards[arm].item(), arm))
    batch = collate(items, placed=placed)
    batch = replace(batch, behavior_logp=batch.behavior_logp.double())
    return gradient(make(tiny_policy(dtype="float64"), objective(placed, cap)), batch)


def true_gradient() -> Tensor:
    policy = tiny_policy(dtype="float64")
    nudge(policy, seed=1)
    logits = policy.model(input_ids=torch.tensor([ASKED]), use_cache=False).logits[0, -1]
    (logits.softmax(-1) @ bandit()[1]).backward()
    return torch.cat([each.grad.flatten() for each in policy.model.parameters()])


def bias(found: Tensor, true: Tensor) -> float:
    return ((found - true).norm() / true.norm()).item()


def test_guided_text_has_the_exact_gradient_and_imitation_another_one() -> None:
    true = true_gradient()
    assert bias(gradient_of_bandit("guided"), true) < 1e-6  # advantages are float32
    anchor = gradient_of_bandit("anchor")
    assert 0.3 < torch.cosine_similarity(anchor, true, dim=0).item() < 0.99
    assert 0.001 < bias(gradient_of_bandit("guided", cap=1.0), true) < 1
