"""Test the optimizer's state in main memory.

A step changes the weights as with the state on the device, bit for bit. Between steps the state has
no memory on the device, and within a step only that of one part. A checkpoint does not depend on
where the state was.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.test_masters import learn, make, masters, passes
from unstale.model.lora import Lora
from unstale.model.policy import Policy
from unstale.records import collate
from unstale.testing import checkpoint_round_trip, episode, tiny_policy
from unstale.trainer import train_on, weight_update
from unstale.trainer.local import LocalTrainer

PART = 6000
"""Weights of a part of a step. The test policy has tensors of up to 4,096 weights."""


@pytest.fixture(autouse=True)
def _several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_update, "PART", PART)


def numbers(trainer: LocalTrainer) -> list[Tensor]:
    """Return the trained weights, those of the passes, and the optimizer's state."""
    state = trainer.state()["optimizer"]["state"]
    moments = [value.clone() for _, each in sorted(state.items()) for value in each.values()]
    return [masters(trainer), passes(trainer.policy), *moments]


def on_device(trainer: LocalTrainer) -> int:
    """Return the number of values of the optimizer's state that have memory on the device."""
    values = [value for each in trainer.optimizer.state.values() for value in each.values()]
    weights = {id(each) for each in trainer.policy.model.parameters()}
    group = trainer.optimizer.param_groups[0]["params"]
    values += [each.detach() for each in group if id(each) not in weights]
    return sum(value.untyped_storage().nbytes() // 4 for value in values if value.dim())


@pytest.mark.costly(cases=3)
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adagrad", "Adafactor"])
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_a_step_is_that_of_a_state_on_the_device(optimizer: str, rounding: str) -> None:
    options: dict[str, Any] = {"optimizer": optimizer, "rounding": rounding, "lr": 1e-3}
    policies = [tiny_policy(dtype="bfloat16", seed=7) for _ in range(2)]
    plain = make(policies[0], **options)
    offloaded = make(policies[1], offload_optimizer=True, **options)
    for step in range(3):
        plain_metrics, metrics = learn(plain, step), learn(offloaded, step)
        for name in ("trainer/grad_norm", "trainer/moved_weight_share"):
            assert metrics[name] == plain_metrics[name]
    pairs = zip(numbers(plain), numbers(offloaded), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(
    ("dtype", "lora"), [("float32", None), ("float16", None), ("bfloat16", Lora(4))]
)
def test_float32_passes_and_adapters_are_offloaded_too(dtype: str, lora: Lora | None) -> None:
    found = []
    for offload in (False, True):
        trainer = make(tiny_policy(dtype=dtype, lora=lora), dtype=dtype, offload_optimizer=offload)
        for step in range(2):
            learn(trainer, step)
        assert bool(on_device(trainer)) != offload
        found.append(numbers(trainer))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_only_one_part_has_memory_on_the_device_in_a_step() -> None:
    """A part has its float32 weights and, after the first step, two moments."""
    trainer = make(tiny_policy(dtype="bfloat16"), offload_optimizer=True)
    seen = []
    trainer.optimizer.register_step_pre_hook(lambda *_: seen.append(on_device(trainer)))
    assert on_device(trainer) == 0
    for step in range(2):
        learn(trainer, step)
        assert on_device(trainer) == 0
    total = masters(trainer).numel()
    first, second = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert len(first) > 2 and sum(first) == total and sum(second) == 3 * total
    assert max(second) <= 3 * PART


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_step_is_the_same_and_the_state_is_in_main_memory(tmp_path: Path) -> None:
    tiny_policy(dtype="bfloat16", seed=7).save(tmp_path)
    found = []
    for offload in (False, True):
        policy = Policy.load(tmp_path, dtype="bfloat16", device="cuda")
        trainer = make(policy, lr=1e-3, offload_optimizer=offload)
        for step in range(2):
            learn(trainer, step)
        assert bool(on_device(trainer)) != offload
        found.append([each.cpu() for each in numbers(trainer)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_a_checkpoint_is_read_wherever_the_state_is(*, before: bool, after: bool) -> None:
    one = make(tiny_policy(dtype="bfloat16"), offload_optimizer=before)
    learn(one, 0)
    state = checkpoint_round_trip(one.state())
    # An offloaded state is a copy: a second trainer can read the same checkpoint.
    others = [
        make(tiny_policy(dtype="bfloat16", seed=5), offload_optimizer=after)
        for _ in range(1 + after)
    ]
    for other in others:
        other.restore(state)
        assert all(torch.equal(*pair) for pair in zip(numbers(one), numbers(other), strict=True))
    for trainer in (one, *others):
        trainer.policy.version = 2
        trainer.old.on_published([2])
        train_on(
            trainer,
            collate([episode(i, [9, (7, 2)], advantage=1.0 - i % 2 * 2) for i in range(4)]),
        )
    for other in others:
        assert all(torch.equal(*pair) for pair in zip(numbers(one), numbers(other), strict=True))
