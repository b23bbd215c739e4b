"""Shared tokens of forked episodes in ratios over whole sequences.

A forked episode must be weighted as an independent episode with the same tokens is. Only the loss
of its shared tokens is left to the episode that sampled them.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from unstale.builders import build_old_logps
from unstale.config import CorrectionConfig, ObjectiveConfig, OldLogpsConfig, RunConfig
from unstale.config.training import TrainerConfig
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.records import (
    Batch,
    ContextPiece,
    Fork,
    Piece,
    Placed,
    PlacedTokens,
    Provenance,
    Sampled,
    ScoredTrajectory,
    Task,
    Trajectory,
    collate,
)
from unstale.research.techniques.minpro import Minpro, MinproConfig
from unstale.techniques.hooks import StepPlan, StepSeen, Techniques
from unstale.testing import nudge, tiny_policy
from unstale.trainer import train_on
from unstale.trainer.auditor import Auditor, Truth
from unstale.trainer.local import LocalTrainer
from unstale.trainer.rules import LossSpec
from unstale.weights.recording import FailedStep

TASK = Task("toy", "train", 0)
ASKED, TOLD = ContextPiece((5, 6, 7)), ContextPiece((8, 9))
LATER = ContextPiece((11,))
TRUNK: tuple[Piece, ...] = (
    ASKED,
    Sampled((21, 22), (-5.5, -5.9), 0),
    Sampled((23,), (-5.0,), 1),
    TOLD,
    Sampled((24, 25, 26), (-6.5, -7.0, -5.0), 1),
)
OWN: tuple[Piece, ...] = (Sampled((31, 32), (-8.0, -5.5), 1), LATER, Sampled((33,), (-4.5,), 1))
DEEP: tuple[Piece, ...] = (Sampled((41,), (-7.5,), 1),)
OTHER: tuple[Piece, ...] = (Sampled((31, 32), (-4.9, -5.0), 1), LATER, Sampled((33,), (-4.5,), 1))
FORKS = {1: Fork(0, 9), 2: Fork(1, 12), 3: Fork(0, 5)}
"""Two forks in the middle of a reply, one of them of a fork, and one before a reply."""


def first(pieces: tuple[Piece, ...], count: int) -> tuple[Piece, ...]:
    """Return the pieces of the first `count` tokens."""
    taken: list[Piece] = []
    for piece in pieces:
        tokens = piece.tokens[:count]
        count -= len(tokens)
        if tokens and isinstance(piece, Sampled):
            taken.append(piece.first(len(tokens)))
        elif tokens:
            taken.append(ContextPiece(tokens))
    return tuple(taken)


def a_batch(*, forked: bool, planted: float = -5.9) -> Batch:
    """Return a tree of four episodes, or independent episodes with the same tokens.

    `planted` is the behavior_logp of a token that all episodes have.
    """
    trunk = (ASKED, Sampled((21, 22), (-5.5, planted), 0), *TRUNK[2:])
    whole = {0: trunk}
    for number, own in ((1, OWN), (2, DEEP), (3, OTHER)):
        whole[number] = (*first(whole[FORKS[number].parent], FORKS[number].at), *own)
    pieces = dict(whole)
    if forked:
        for number, fork in FORKS.items():
            own = whole[number][len(first(whole[fork.parent], fork.at)) :]
            pieces[number] = (*fork.prefix_of(pieces[fork.parent]), *own)
    items = []
    for number, each in pieces.items():
        item = Trajectory(
            each,
            {"r": 1.0},
            "done",
            TASK,
            seed=number,
            episode=number,
            fork=FORKS.get(number) if forked else None,
        )
        start = FORKS[number].at if number else 0
        gain = (1.0, -0.7, 0.4, -0.5)[number]
        items.append(ScoredTrajectory(item, (0.0,) * start + (gain,) * (len(item) - start)))
    batch = collate(items)
    return replace(batch, behavior_logp=batch.behavior_logp.double())


class Plans:
    def __init__(self) -> None:
        self.log_weights: Tensor = torch.empty(0)

    def plan(self, seen: StepSeen) -> StepPlan:
        self.log_weights = seen.log_weight
        return StepPlan()


def make(
    *parts: object, route: str = "snapshot_old", correction: Any = None, **objective: Any
) -> LocalTrainer:
    policy = tiny_policy(dtype="float64")
    config = RunConfig(
        recipe="",
        max_steps=10,
        correction=correction or CorrectionConfig(mode="truncate", high=1e6),
        objective=ObjectiveConfig(loss_aggregation="constant", **objective),
        trainer=TrainerConfig(optimizer="SGD", lr=1.0, grad_clip=1e9, max_tokens_per_microbatch=15),
    )
    old = build_old_logps(OldLogpsConfig(route=route), LocalScorer(policy, 1.0, 64))
    old.on_published(live={0})
    nudge(policy, seed=1, size=0.05)
    policy.version = 1
    old.on_published(live={0, 1})
    nudge(policy, seed=2, size=0.05)
    policy.weights_match_version = False
    techniques = Techniques({str(i): part for i, part in enumerate(parts)})
    return LocalTrainer(policy, config, old, techniques=techniques)


def gradient(trainer: LocalTrainer, batch: Batch) -> Tensor:
    for minibatch in trainer.prepare(batch):
        trainer.backward(minibatch)
    return torch.cat([each.grad.flatten() for each in trainer.policy.model.parameters()])


def sequence_mask(**options: Any) -> CorrectionConfig:
    return CorrectionConfig(mode="mask_weight", low=0.4, high=2.5, **options)


SETTINGS: dict[str, dict[str, Any]] = {
    "D of sequences": {"correction": sequence_mask(unit="sequence")},
    "D of turns": {"correction": sequence_mask(unit="turn", aggregate="sum")},
    "D of segments": {"correction": sequence_mask(unit="segment", aggregate="max")},
    "gspo": {"loss_type": "gspo", "clip_low": 0.05, "clip_high": 0.05},
    "vespo": {"loss_type": "vespo"},
    "vaco": {"loss_type": "vaco", "vaco_delta": 0.75},
    "S of turns": {"unit": "turn", "aggregate": "sum"},
    "S of segments": {"unit": "segment"},
    "opsm": {"opsm_threshold": 0.05},
    "inline": {"unit": "sequence", "route": "interp_prox_loglinear"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_fork_is_weighted_as_an_independent_episode_with_the_same_tokens(name: str) -> None:
    options = SETTINGS[name]
    alone = gradient(make(**options), a_batch(forked=False))
    tree = a_batch(forked=True)
    torch.testing.assert_close(gradient(make(**options), tree), alone, rtol=1e-9, atol=1e-12)
    own = gradient(make(**options), replace(tree, shared=None))  # only the ends of forks
    assert (own - alone).norm() > 1e-3 * alone.norm()


@pytest.mark.parametrize("options", [{}, {"prefix": "inclusive", "of": "whole"}, {"reset": "turn"}])
def test_minpro_takes_the_minimum_over_the_shared_tokens_too(options: dict[str, Any]) -> None:
    technique = Minpro(MinproConfig(**options))
    alone = gradient(make(technique), a_batch(forked=False))
    tree = a_batch(forked=True)
    torch.testing.assert_close(gradient(make(technique), tree), alone, rtol=1e-9, atol=1e-12)
    own = gradient(make(technique), replace(tree, shared=None))
    assert (own - alone).norm() > 1e-3 * alone.norm()


def test_an_impossible_shared_token_vetoes_all_episodes_that_have_it() -> None:
    veto = CorrectionConfig(mode="none", token_veto_threshold=0.1)
    batch = a_batch(forked=True, planted=-1.0)
    (minibatch,) = make(correction=veto).prepare(batch)
    assert not minibatch.factor.any()
    batch = a_batch(forked=True)
    tokens = batch.sampled & (batch.sequence == 1)
    behavior = batch.behavior_logp.clone()
    behavior[tokens.nonzero()[0]] = -1.0  # of episode 1, which only episode 2 shares
    assert batch.shared
    where = batch.shared.where & (batch.shared.episode == 1)
    planted = batch.shared.behavior_logp.masked_fill(where, -1.0)
    batch = replace(
        batch, behavior_logp=behavior, shared=replace(batch.shared, behavior_logp=planted)
    )
    (minibatch,) = make(correction=veto).prepare(batch)
    kept = minibatch.factor != 0
    assert kept.equal(batch.sampled & (batch.sequence != 1) & (batch.sequence != 2))


def test_controllers_get_the_ratio_of_whole_sequences() -> None:
    found = []
    for forked in (False, True):
        plans = Plans()
        train_on(make(plans), a_batch(forked=forked))
        found.append(plans.log_weights.sort().values)
    torch.testing.assert_close(found[1], found[0])


def test_the_audit_counts_shared_tokens_as_those_of_independent_episodes() -> None:
    correction = CorrectionConfig(mode="mask", low=0.95, high=1.05, unit="sequence")
    rules = LossSpec(correction, ObjectiveConfig(loss_type="gspo", clip_low=0.05, clip_high=0.05))
    found = []
    own = a_batch(forked=True).sampled
    for forked in (False, True):
        batch = a_batch(forked=forked)
        change = (batch.tokens % 5) / 5
        logps = [batch.behavior_logp + size * change for size in (0.1, 0.4, 0.7)]
        true, prox, logp = (each.where(batch.sampled, 0.0) for each in logps)
        audited = Truth(batch, 1, true, logp).compare(prox, rules)
        where = own[batch.sampled]
        found.append((audited.dropped[:, where], audited.clipped[:, where]))
    for alone, tree in zip(*found, strict=True):
        assert alone.any() and not alone.all()
        assert tree.equal(alone)


def test_the_audit_of_a_fork_includes_the_episodes_whose_tokens_it_shares() -> None:
    policy = tiny_policy(dtype="float64")
    old = build_old_logps(OldLogpsConfig(route="rollout"), LocalScorer(policy, 1.0, 64))
    batch, tokens = a_batch(forked=True), []
    for correction in (CorrectionConfig(), sequence_mask(unit="sequence")):
        auditor = Auditor(
            LocalScorer(policy, 1.0, 64),
            old,
            LossSpec(correction, ObjectiveConfig()),
            share=0.25,
        )
        for policy.version in (0, 1):
            auditor.on_published({0, 1})
        tokens.append(auditor.look(batch, batch.behavior_logp)["audit/tokens"])
    sampled = batch.count(batch.sampled)
    assert tokens == [sampled[2], sum(sampled[:3])]


def test_the_loss_and_its_divisor_count_each_drawn_token_once() -> None:
    batch = a_batch(forked=True)
    trainer = make(loss_type="gspo")
    (minibatch,) = trainer.prepare(batch)
    trainer.backward(minibatch)
    assert int(batch.sampled.sum()) == trainer.metrics()["trainer/action_tokens"] == 13
    assert not minibatch.norm[~batch.sampled].any() and not minibatch.factor[~batch.sampled].any()


def test_kl_and_entropy_weight_a_token_by_the_branches_before_it() -> None:
    batch = a_batch(forked=True)
    assert batch.shared
    rows = [each.tolist() for each in batch.shared.reach.split([11, 13, 13, 9])]
    assert rows[0] == [1.0] * 5 + [0.5] * 4 + [0.25] * 2
    assert rows[1] == [1.0] * 5 + [0.5] * 4 + [0.25] * 3 + [0.125]
    assert rows[2] == rows[1] and rows[3] == [1.0] * 5 + [0.5] * 4
    silent = replace(batch, advantage=0 * batch.advantage)
    twice = replace(silent, shared=replace(batch.shared, reach=2 * batch.shared.reach))
    even = replace(silent, shared=replace(batch.shared, reach=batch.shared.reach**0))
    for coefficient in ("entropy_coef", "kl_coef"):
        found = []
        for each in (silent, twice, even):
            trainer = make(**{coefficient: 0.5})
            nudge(trainer.policy, seed=3, size=0.05)  # away from the reference
            found.append(gradient(trainer, each))
        torch.testing.assert_close(found[1], 2 * found[0])
        assert (found[2] - found[0]).norm() > 0.01 * found[0].norm()


def test_episodes_with_placed_text_have_the_kl_and_entropy_of_independent_ones() -> None:
    fork = Fork(0, 3, (Placed((31, 32), Provenance.FORCED),))
    pieces = {0: TRUNK, 1: (*fork.prefix_of(TRUNK), *OWN), 2: (*fork.prefix_of(TRUNK), *DEEP)}
    for coefficient in ("entropy_coef", "kl_coef"):
        found = []
        for each in (fork, None):
            forks = {1: each, 2: each}
            items = [
                Trajectory(own, {"r": 1.0}, "done", TASK, number, number, fork=forks.get(number))
                for number, own in pieces.items()
            ]
            trainer = make(**{coefficient: 0.5})
            nudge(trainer.policy, seed=3, size=0.05)  # away from the reference
            batch = collate([ScoredTrajectory(item, (0.0,)) for item in items])
            batch = replace(batch, behavior_logp=batch.behavior_logp.double())
            found.append(gradient(trainer, batch))
        assert found[1].norm() > 0
        torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)


def test_a_saved_step_has_shared_and_placed_tokens(tmp_path: Path) -> None:
    batch = a_batch(forked=True)
    placed = PlacedTokens(
        batch.turn < 0, batch.turn < 0, batch.turn, batch.advantage, ((),) * batch.num_sequences
    )
    weights = tiny_policy().whole_weights()
    for each in (batch, replace(batch, placed=placed)):
        FailedStep(each, {}, weights, {"stage": "step"}).save(tmp_path / "step")
        read = FailedStep.load(tmp_path / "step").batch
        assert read.trained.equal(each.trained) and (read.placed is None) == (each.placed is None)
        found, whole = read.whole_sequences(), each.whole_sequences()
        assert found.sampled.equal(whole.sampled) and found.turn.equal(whole.turn)
        assert found.behavior_logp.equal(whole.behavior_logp)
        assert read.of_owners(read.tokens).equal(each.of_owners(each.tokens))


def test_a_fork_is_scored_with_the_parent_whose_tokens_it_shares() -> None:
    """The parent has no gradient of its own, so that it would be left out."""
    batch = a_batch(forked=True)
    only_fork = replace(batch, advantage=batch.advantage * (batch.sequence == 2))
    (minibatch,) = make(loss_type="gspo").prepare(only_fork)
    assert minibatch.batch.episodes == (0, 1, 2)
    copies = a_batch(forked=False)
    copies = replace(copies, advantage=copies.advantage * (copies.sequence == 2))
    alone = gradient(make(loss_type="gspo"), copies)
    found = gradient(make(loss_type="gspo"), only_fork)
    torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-12)
