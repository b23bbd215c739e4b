"""Test AdamW with 8-bit moments.

A moment has an error of a few percent of itself, and small numbers beside large ones are not lost.
The weights move as those of AdamW. The rows of a weight can be divided among ranks. A restored
optimizer continues exactly.
"""

import pytest
import torch
from torch import Tensor

from tests.trainer.test_masters import learn, make, masters
from unstale.config import ConfigError, TrainerConfig
from unstale.testing import checkpoint_round_trip, tiny_policy
from unstale.trainer.adamw8bit import BLOCK, AdamW8bit
from unstale.trainer.optimizer import make_optimizer

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}


def gradients(*shape: int, seed: int = 0) -> Tensor:
    """Return gradients whose sizes in a row are over four orders of magnitude."""
    draw = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** -(4 * torch.rand(shape, generator=draw))
    return sizes * torch.randn(shape, generator=draw)


def stepped(kind: type[torch.optim.Optimizer], grads: list[Tensor], **options: float) -> Tensor:
    """Return the change of a weight in some steps."""
    start = torch.linspace(-1, 1, grads[0].numel()).view(grads[0].shape)
    weight = torch.nn.Parameter(start.clone())
    optimizer = kind([weight], **{**OPTIONS, **options})
    for grad in grads:
        weight.grad = grad
        optimizer.step()
    return (weight - start).detach()


@pytest.mark.parametrize("shape", [(3, BLOCK), (2, 3, 200), (5, 700)])
def test_the_first_step_is_that_of_adamw(shape: tuple[int, ...]) -> None:
    """The moments are rounded only after they were used."""
    found, want = (stepped(kind, [gradients(*shape)]) for kind in (AdamW8bit, torch.optim.AdamW))
    assert torch.allclose(found, want, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("shape", [(7,), (40, 5)])
def test_short_rows_have_moments_in_float32(shape: tuple[int, ...]) -> None:
    grads = [gradients(*shape, seed=seed) for seed in range(20)]
    found, want = (stepped(kind, grads) for kind in (AdamW8bit, torch.optim.AdamW))
    assert torch.allclose(found, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("wide", "error"), [(False, 0.04), (True, 0.15)])
def test_weights_move_as_with_float32_moments(*, wide: bool, error: float) -> None:
    """Each weight has gradients of about one sign and size for 60 steps.

    The sizes within a block are those of a normal distribution, or `wide`, over four orders. A
    rounded second moment would be 0 for the small ones, and these weights would move 30 times as
    far.
    """
    shape = (16, BLOCK)
    draw = torch.Generator().manual_seed(0)
    common = gradients(*shape) if wide else torch.randn(shape, generator=draw)
    grads = [common * (1 + 0.3 * torch.randn(shape, generator=draw)) for _ in range(60)]
    found, want = (stepped(kind, grads) for kind in (AdamW8bit, torch.optim.AdamW))
    assert (found - want).norm() < error * want.norm()
    assert found.abs().max() < 1.5 * want.abs().max()


def test_moments_take_one_byte_and_a_scale_for_each_block() -> None:
    weight = torch.nn.Parameter(torch.zeros(8, 4 * BLOCK))
    optimizer = AdamW8bit([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = optimizer.state[weight]
    held = sum(value.nbytes for value in state.values() if value.dim())
    assert held == 2 * (weight.numel() + 4 * weight.numel() // BLOCK)
    assert {value.dtype for value in state.values() if value.dim() and len(value) == 8} == {
        torch.uint8,
        torch.float32,
    }


def test_rows_do_not_depend_on_other_rows() -> None:
    grads = [gradients(6, 300, seed=seed) for seed in range(5)]
    whole = stepped(AdamW8bit, grads, weight_decay=0.0)
    parts = [
        stepped(AdamW8bit, [g[rows] for g in grads], weight_decay=0.0)
        for rows in ([0, 1], [2, 3, 4, 5])
    ]
    assert torch.allclose(torch.cat(parts), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("offload", [False, True])
def test_a_restored_trainer_goes_on_exactly(*, offload: bool) -> None:
    options = {"optimizer": "AdamW8bit", "lr": 1e-3, "offload_optimizer": offload}
    kept = make(tiny_policy(dtype="bfloat16"), **options)
    learn(kept, 0)
    other = make(tiny_policy(dtype="bfloat16", seed=9), **options)
    other.restore(checkpoint_round_trip(kept.state()))
    other.old.restore(checkpoint_round_trip(kept.old.state()))
    for trainer in (kept, other):
        for step in (1, 2):
            learn(trainer, step)
    assert torch.equal(masters(kept), masters(other))
    codes = [value for each in other.optimizer.state.values() for value in each.values()]
    assert any(value.dtype == torch.uint8 for value in codes)


def test_a_policy_moves_as_with_adamw() -> None:
    """After 3 steps of a policy in bfloat16 the change differs by less than a twentieth."""
    moved = {}
    for kind in ("AdamW", "AdamW8bit"):
        trainer = make(tiny_policy(dtype="bfloat16"), optimizer=kind, rounding="nearest", lr=1e-4)
        before = masters(trainer)
        for step in range(3):
            learn(trainer, step)
        moved[kind] = masters(trainer) - before
    difference = (moved["AdamW8bit"] - moved["AdamW"]).norm()
    assert 0 < difference < 0.05 * moved["AdamW"].norm()


def test_names_of_other_trainers_lead_to_it() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    made = make_optimizer(TrainerConfig(optimizer="AdamW8bit", weight_decay=0.1), [weight])
    assert isinstance(made, AdamW8bit) and made.defaults["weight_decay"] == 0.1
    with pytest.raises(ConfigError, match="got 'adamw_8bit'; it is AdamW8bit here"):
        make_optimizer(TrainerConfig(optimizer="adamw_8bit"), [weight])
