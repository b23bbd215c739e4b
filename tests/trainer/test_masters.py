"""Test the optimizer's float32 weights and their rounding into bfloat16 and float16 passes.

A version is its rounded weights: exact old log-probabilities are those of the stored version. Small
updates arrive in the forward pass. A restored trainer rounds as one that was never stopped.
"""

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from unstale.builders import build_old_logps
from unstale.config import OldLogpsConfig, RunConfig, TrainerConfig
from unstale.model.lora import Lora
from unstale.model.policy import Policy
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.records import Batch, collate
from unstale.testing import episode, tiny_policy
from unstale.trainer import train_on
from unstale.trainer.local import LocalTrainer
from unstale.trainer.loss_scale import FIRST

OPTIMIZERS = ("AdamW", "SGD", "Adafactor", "NAdam")
RANDOM = ("stochastic", "dither")


def mixed_batch(step: int) -> Batch:
    """Return a batch whose tokens are of the last three versions."""
    plans = [
        [20 + i % 3, (12, max(0, step - 2)), 5, (9, max(0, step - 1)), (7, step)] for i in range(4)
    ]
    return collate(
        [episode(100 * step + i, plan, advantage=1.0 - i % 2 * 2) for i, plan in enumerate(plans)]
    )


def make(policy: Policy, **options: object) -> LocalTrainer:
    trainer = TrainerConfig(**{"dtype": "bfloat16", "rounding": "stochastic", "lr": 1e-5} | options)
    config = RunConfig(recipe="", max_steps=10, seed=4, trainer=trainer)
    old = build_old_logps(OldLogpsConfig(route="snapshot_old"), LocalScorer(policy, 1.0, 4096))
    return LocalTrainer(policy, config, old)


def learn(trainer: LocalTrainer, step: int) -> dict[str, float]:
    trainer.policy.version = step
    trainer.old.on_published(range(max(0, step - 2), step + 1))
    train_on(trainer, mixed_batch(step))
    return dict(trainer.metrics())


def passes(policy: Policy) -> Tensor:
    return torch.cat([tensor.flatten().clone() for tensor in policy.weights().values()])


def masters(trainer: LocalTrainer) -> Tensor:
    return torch.cat([each.flatten().clone() for each in trainer.state()["weights"].values()])


@pytest.mark.parametrize(("dtype", "lr"), [("bfloat16", 1e-5), ("float16", 1e-6)])
def test_small_updates_arrive_where_rounding_to_nearest_loses_them(dtype: str, lr: float) -> None:
    """Most weights are near 0.3, where neighbours in bfloat16 are 0.002 apart."""
    shares = {}
    for kind in ("nearest", "dither"):
        trainer = make(tiny_policy(dtype=dtype), dtype=dtype, rounding=kind, lr=lr)
        before, precise = passes(trainer.policy).double(), masters(trainer).double()
        for step in range(2):
            metrics = learn(trainer, step)
        meant = masters(trainer).double() - precise
        change = passes(trainer.policy).double() - before
        shares[kind] = float((change * meant).sum() / meant.square().sum())
        due = metrics["trainer/due_weight_share"]
        assert 0.002 < due < 0.3
        moved = metrics["trainer/moved_weight_share"]
        assert moved < 0.7 * due if kind == "nearest" else 0.7 * due < moved < 1.4 * due
    # 1 is an update that arrives as it is: 10,000 weights of which few move have a wide spread.
    assert shares["nearest"] < 0.6 and 0.6 < shares["dither"] < 1.5


def test_moved_share_is_absent_in_float32() -> None:
    metrics = learn(make(tiny_policy(), dtype="float32"), 0)
    assert not [name for name in metrics if "weight_share" in name]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("lora", [None, Lora(4)])
def test_every_optimizer_has_rounded_weights(optimizer: str, lora: Lora | None) -> None:
    trainer = make(tiny_policy(dtype="bfloat16", lora=lora), optimizer=optimizer, lr=1e-3)
    assert torch.equal(masters(trainer).bfloat16(), passes(trainer.policy))
    learn(trainer, 0)
    wide, narrow = masters(trainer), passes(trainer.policy).float()
    assert bool(((wide - narrow).abs() < wide.abs() * 2.0**-7 + 1e-30).all())
    is_far = wide.bfloat16().float() != narrow  # the farther of the two neighbours
    assert 0.002 < is_far.float().mean() < 0.5


@pytest.mark.parametrize("rounding", RANDOM)
def test_old_logps_are_exactly_those_of_the_stored_versions(rounding: str) -> None:
    trainer = make(tiny_policy(dtype="bfloat16"), rounding=rounding, lr=1e-3)
    stored = {}
    for step in range(4):
        stored[step] = {name: each.clone() for name, each in trainer.weights().items()}
        learn(trainer, step)
    trainer.policy.version = 4
    trainer.old.on_published([2, 3, 4])
    stored[4] = {name: each.clone() for name, each in trainer.weights().items()}
    batch = mixed_batch(4)
    old_logp, exact = trainer.old.logps(batch, torch.empty(0))
    assert bool(exact[batch.sampled].all())
    other = tiny_policy(dtype="bfloat16", seed=9)
    for version in (2, 3, 4):
        other.load_weights(stored[version])
        where = batch.sampled & (batch.version == version)
        known = other.score(batch, where, temperature=1.0, max_tokens_per_microbatch=4096).logp
        assert where.any() and torch.equal(old_logp[where], known[where])
    changed = [passes_of(stored[v]) != passes_of(stored[v + 1]) for v in range(4)]
    assert all(bool(each.any()) for each in changed)


def passes_of(weights: dict[str, Tensor]) -> Tensor:
    return torch.cat([each.flatten() for each in weights.values()])


@pytest.mark.parametrize("rounding", RANDOM)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_restored_trainer_rounds_as_one_that_never_stopped(dtype: str, rounding: str) -> None:
    kept = make(tiny_policy(dtype=dtype), dtype=dtype, rounding=rounding, lr=1e-3)
    for step in range(2):
        learn(kept, step)
    state = copy.deepcopy(kept.state())
    other = make(tiny_policy(dtype=dtype, seed=9), dtype=dtype, rounding=rounding, lr=1e-3)
    other.restore(state)
    assert torch.equal(passes(other.policy), passes(kept.policy))
    for trainer in (kept, other):
        trainer.policy.version = 2
        trainer.old.on_published([2])
        batch = collate([episode(i, [9, (7, 2)], advantage=1.0 - i % 2 * 2) for i in range(4)])
        train_on(trainer, batch)
    assert torch.equal(passes(other.policy), passes(kept.policy))
    assert torch.equal(masters(other), masters(kept))


def test_float32_weights_begin_with_the_digits_of_the_checkpoint(tmp_path: Path) -> None:
    """The first version is rounded to nearest, as an engine rounds the checkpoint."""
    precise = tiny_policy(seed=3)
    precise.save(tmp_path / "float32")
    tiny_policy(seed=3, dtype="bfloat16").save(tmp_path / "bfloat16")
    wanted = passes(precise)
    for rounding in ("nearest", *RANDOM):
        trainer = make(Policy.load(tmp_path / "float32", dtype="bfloat16"), rounding=rounding)
        assert torch.equal(masters(trainer), wanted)
        assert torch.equal(passes(trainer.policy), wanted.bfloat16())
    narrow = Policy.load(tmp_path / "bfloat16", dtype="bfloat16")
    assert narrow.checkpoint_weights() == {}
    assert torch.equal(masters(make(narrow)), wanted.bfloat16().float())
    changed = Policy.load(tmp_path / "float32", dtype="bfloat16")
    changed.load_weights(narrow.weights())
    assert changed.checkpoint_weights() == {}


def test_a_float16_gradient_below_its_range_is_scaled() -> None:
    """Most gradients of advantages of 1e-5 would be 0 in float16, without a factor on the loss."""
    found = []
    for advantage, scale in ((1.0, 1.0), (1e-5, FIRST), (1e-5, 1.0)):
        trainer = make(tiny_policy(dtype="float16"), dtype="float16")
        trainer.policy.version = 0
        trainer.old.on_published([0])
        batch = mixed_batch(0)
        (minibatch,) = trainer.prepare(replace(batch, advantage=batch.advantage * advantage))
        trainer._loss_scale.value = scale
        trainer.backward(minibatch)
        gradient = torch.cat([each.grad.flatten() for each in trainer._master.values()])
        found.append(gradient / advantage)
    scaled, plain = ((found[0] - each).norm() / found[0].norm() for each in found[1:])
    assert scaled < 0.01 and plain > 0.3


def test_an_overflow_skips_the_step_and_halves_the_scale() -> None:
    trainer = make(tiny_policy(dtype="float16"), dtype="float16", lr=1e-3)
    learn(trainer, 0)
    narrow, wide = passes(trainer.policy), masters(trainer)
    trainer.policy.version = 1
    trainer.old.on_published([0, 1])
    (minibatch,) = trainer.prepare(mixed_batch(1))
    trainer.backward(minibatch)
    next(iter(trainer._master.values())).grad[0] = torch.inf
    trainer.step()
    metrics = trainer.metrics()
    assert metrics["trainer/overflow_step_share"] == metrics["trainer/skipped_step_share"] == 1
    assert math.isnan(metrics["trainer/grad_norm"]), "it is no faint gradient"
    assert metrics["trainer/loss_scale"] == FIRST / 2
    assert torch.equal(passes(trainer.policy), narrow) and torch.equal(masters(trainer), wide)
    assert trainer.steps == 2
    other = make(tiny_policy(dtype="float16"), dtype="float16", lr=1e-3)
    other.restore(trainer.state())
    assert torch.equal(passes(other.policy), narrow)
    assert other.metrics()["trainer/loss_scale"] == FIRST / 2


def test_an_infinite_gradient_is_an_error_without_a_scale() -> None:
    trainer = make(tiny_policy(dtype="bfloat16"))
    trainer.old.on_published([0])
    (minibatch,) = trainer.prepare(mixed_batch(0))
    trainer.backward(minibatch)
    next(iter(trainer._master.values())).grad[0] = torch.inf
    with pytest.raises(FloatingPointError, match="no step was taken"):
        trainer.step()
