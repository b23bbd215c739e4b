"""Test gradients that are added before the batch is complete (`trainer.stream`).

For every divisor, correction, route and technique that is allowed, the optimizer step and its
metrics are those of the whole batch, whatever the order in which the groups arrive. Groups without
a gradient are left until the batch is complete. An advantage that depends on other groups is an
error.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from tests.trainer.test_ranks import EXPERTS, with_experts
from unstale.algorithms.objectives import loss_divisor, token_norm
from unstale.builders import build_trainer
from unstale.config import (
    AuditConfig,
    CorrectionConfig,
    ObjectiveConfig,
    OldLogpsConfig,
    RunConfig,
    ScheduleConfig,
    TrainerConfig,
)
from unstale.config.algorithm import LossAggregation
from unstale.lint import check
from unstale.model.lora import Lora
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.records import Batch, Group, ScoredTrajectory, collate
from unstale.testing import episode, nudge, tiny_policy
from unstale.trainer import train_on
from unstale.trainer.auditor import Auditor
from unstale.trainer.local import LocalTrainer

PLANS: Sequence[Sequence[tuple[list, float]]] = (
    (([4, (6, 0), 3, (2, 1)], 1.0), ([4, (3, 1)], -0.5), ([4, (2, 0)], 0.0)),
    (([5, (7, 1), 2, (2, 1), 3], 0.0), ([5, (4, 0)], 0.0), ([3], 0.0)),
    (([7, (2, 1), 2, (2, 1), 3], 2.0), ([7, (9, 0), 1, (3, 1)], -2.0)),
    (([3, (5, 1)], -1.0), ([3, (1, 0), 2, (8, 1)], 1.5)),
    (([5, (7, 1), 2, (2, 1), 3], 0.0), ([5, (4, 0)], 0.0)),
)
"""The episodes of five groups, with advantages. The second and the last have no gradient."""
WIDE = CorrectionConfig(mode="truncate", high=1e6)
ORDERS: Sequence[Sequence[Sequence[int]]] = (
    ((3,), (2,), (1,), (0,)),
    ((1,), (0, 2), (3,)),
    ((0, 2, 3), (1,)),
    ((0, 1, 2, 3),),
)
"""The numbers of the groups that arrive together. The last part completes the batch."""
TIMES = ("_s", "_per_s", "trainer/microbatches", "trainer/forward_tokens")
"""Ends of the names of metrics that depend on how the passes are divided."""


@pytest.fixture(autouse=True)
def norms_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the layers' norms compute in the dtype of the model, not in float32."""

    def forward(self: Any, rows: Tensor) -> Tensor:
        variance = rows.square().mean(-1, keepdim=True)
        return self.weight * rows * (variance + self.variance_epsilon).rsqrt()

    monkeypatch.setattr(Qwen3RMSNorm, "forward", forward)
    monkeypatch.setattr(Qwen3MoeRMSNorm, "forward", forward)


def batch_of(groups: Sequence[int], *, replay: bool = False, scale: float = 1.0) -> Batch:
    """Return some of the groups as a batch."""
    scored: list[ScoredTrajectory] = []
    made = []
    for number in groups:
        items = [
            episode(10 * number + i, plan, advantage=scale * advantage)
            for i, (plan, advantage) in enumerate(PLANS[number])
        ]
        items = [with_experts(each) for each in items] if replay else items
        scored += items
        trajectories = tuple(each.trajectory for each in items)
        made.append(Group(trajectories[0].task, trajectories, number=number))
    return collate(scored, groups=made, replay_experts=replay)


def build(stream: bool, *, experts: int = 0, lora: int = 0, **changes: Any) -> tuple[Any, ...]:
    """Return a trainer in float64 at version 1, whose route has versions 0 and 1."""
    options = {"optimizer": "SGD", "lr": 1.0, "grad_clip": 1e9, "stream": stream}
    config = RunConfig(
        recipe="",
        max_steps=10,
        schedule=ScheduleConfig(groups_per_step=4, group_size=3),
        trainer=TrainerConfig(
            **{
                **options,
                "lora_rank": lora,
                "routing_replay": experts > 0,
                **changes.pop("trainer", {}),
            }
        ),
        **{"correction": WIDE, "audit": AuditConfig(share=0.5), **changes},
    )
    if stream:
        names = [str(each) for each in check(config).refusals]
        assert not [name for name in names if "trainer.stream" in name]
    policy = tiny_policy(dtype="float64", experts=experts, lora=Lora(lora) if lora else None)
    if experts:
        policy.replay_experts()
    trainer, auditor = build_trainer(config, policy, LocalScorer(policy, 1.0, 64))
    for version in (0, 1):
        policy.version = version
        live = set(range(version + 1))
        trainer.old.on_published(live)
        auditor.on_published(live)
        if version == 0:
            nudge(policy, seed=1)
    return trainer, auditor


def weights(trainer: LocalTrainer) -> Tensor:
    return torch.cat([tensor.flatten().clone() for tensor in trainer.weights().values()])


def learn(
    parts: Sequence[Sequence[int]], *, stream: bool, replay: bool = False, **changes: Any
) -> tuple[Tensor, Mapping[str, float]]:
    """Take a step on groups that arrive in parts. Return the change of the weights, and metrics."""
    trainer, auditor = build(stream, **changes)
    before = weights(trainer)
    for part in parts[:-1] if stream else ():
        trainer.add(batch_of(part, replay=replay))
        assert torch.equal(weights(trainer), before)
    numbers = sorted(number for part in parts for number in part)
    train_on(trainer, batch_of(numbers, replay=replay))
    assert isinstance(auditor, Auditor)
    trainer.old.close()
    return weights(trainer) - before, trainer.metrics()


def require_equal(
    found: tuple[Tensor, Mapping[str, float]],
    expected: tuple[Tensor, Mapping[str, float]],
    *,
    error: float = 1e-12,
) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=error)
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        if not name.endswith(TIMES):
            wanted = pytest.approx(value, rel=1e3 * error, abs=error, nan_ok=True)
            assert found[1][name] == wanted, name


KEPT = CorrectionConfig(mode="mask", low=0.05, high=3.0, unit="turn")
CASES: Mapping[str, dict[str, Any]] = {
    **{
        how: {
            "correction": KEPT,
            "objective": ObjectiveConfig(loss_aggregation=how, entropy_coef=0.1, kl_coef=0.2),
        }
        for how in ("action_tokens", "kept", "sequence_mean", "constant")
    },
    "clipped gradient": {"trainer": {"grad_clip": 0.05}},
    "small passes": {"trainer": {"max_tokens_per_microbatch": 20}},
    "prompts apart": {"trainer": {"share_prompts": False}},
    "momentum": {"trainer": {"optimizer": "AdamW", "lr": 1e-2, "weight_decay": 0.1}},
    "gspo": {
        "objective": ObjectiveConfig(loss_type="gspo", loss_aggregation="sequence_mean"),
        "correction": CorrectionConfig(mode="mask_weight", unit="sequence", low=0.1, high=5),
    },
    "veto and cap": {
        "correction": CorrectionConfig(mode="truncate", high=9.0, token_veto_threshold=2e-3),
        "objective": ObjectiveConfig(loss_type="cispo", ratio_cap=1.5),
    },
    "eager": {"old_logps": OldLogpsConfig(route="eager")},
    "own": {"old_logps": OldLogpsConfig(route="snapshot_old", placement="own")},
    "rollout": {"old_logps": OldLogpsConfig(route="rollout")},
    "current_recompute": {"old_logps": OldLogpsConfig(route="current_recompute", baseline=True)},
    "interp_prox_linear": {"old_logps": OldLogpsConfig(route="interp_prox_linear")},
    "ewma_prox": {"old_logps": OldLogpsConfig(route="ewma_prox")},
    "ppo_ewma_async": {"old_logps": OldLogpsConfig(route="ppo_ewma_async", beta=0.5)},
    "lora": {"lora": 4},
    "experts": {"experts": EXPERTS, "replay": True},
    "techniques": {
        "techniques": "minpro ess_lr entropy_advantage_reweighting novelty top_turns preserve_clip"
    },
    "baselines": {
        "techniques": "least_variance_baseline confident_error_penalty unlikely_token_bonus"
    },
}


@pytest.mark.costly
@pytest.mark.parametrize("case", CASES)
def test_the_step_is_that_of_the_whole_batch(case: str) -> None:
    whole = learn([range(4)], stream=False, **CASES[case])
    assert whole[0].abs().max() > 1e-4
    parts = ((3,), (1,), (0,), (2,))
    # The router of experts computes in float32, also in a float64 model.
    error = 1e-6 if "experts" in CASES[case] else 1e-12
    require_equal(learn(parts, stream=True, **CASES[case]), whole, error=error)


@pytest.mark.costly
@pytest.mark.parametrize("parts", ORDERS)
def test_the_order_of_arrival_changes_nothing(parts: Sequence[Sequence[int]]) -> None:
    require_equal(learn(parts, stream=True), learn([range(4)], stream=False))


def test_a_batch_without_a_gradient_is_scored_as_a_whole() -> None:
    """Its metrics need some tokens. The first part has no gradient, so nothing is added."""
    found = learn([(1,), (4,)], stream=True)
    require_equal(found, learn([(1, 4)], stream=False))
    assert found[1]["trainer/tokens_with_gradient"] == 0 and not found[0].any()
    assert found[1]["correction/kept_share"] == 1


def test_the_entropy_is_that_of_equally_many_tokens_of_every_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a limit of 12 tokens, not all of the 41 are measured. Each stands for several."""
    monkeypatch.setattr("unstale.trainer.metrics.ENTROPY_SAMPLE", 12)
    exact = learn([range(4)], stream=False, objective=ObjectiveConfig(entropy_coef=1e-9))[1]
    trainer, _ = build(True)
    trainer.add(batch_of((3,)))
    assert trainer._metrics.expected_tokens == 4 * 14 and trainer._metrics.entropy_every == 5
    train_on(trainer, batch_of(range(4)))
    assert trainer._metrics.entropy_every == 4
    assert trainer.metrics()["policy/entropy_mean"] == pytest.approx(
        exact["policy/entropy_mean"], rel=0.1
    )


@pytest.mark.costly
@pytest.mark.parametrize("case", ["kept", "current_recompute", "techniques"])
@pytest.mark.parametrize("parts", [((3,), (0, 2), (1,)), ((0, 1, 2, 3),)])
def test_the_data_of_a_step_are_those_of_all_parts(
    case: str, parts: Sequence[Sequence[int]]
) -> None:
    """They give the same step in another trainer, also if the last part has no gradient."""
    trainer, _ = build(True, **CASES[case])
    before = weights(trainer)
    for part in parts[:-1]:
        trainer.add(batch_of(part))
    (minibatch,) = trainer.prepare(batch_of(range(4)))
    trainer.backward(minibatch)
    trainer.step()
    kept = trainer.failed_batch
    assert kept and kept.divisor == trainer.divisor > 1
    assert {0, 1, 20, 21, 30, 31} <= set(kept.minibatch.batch.episodes)
    other, _ = build(True, **CASES[case])
    other.divisor = kept.divisor
    other.backward(kept.minibatch)
    other.step()
    torch.testing.assert_close(
        weights(other) - before, weights(trainer) - before, rtol=0, atol=1e-12
    )


def test_advantages_that_depend_on_other_groups_are_an_error() -> None:
    trainer, _ = build(True)
    trainer.add(batch_of((0,)))
    with pytest.raises(ValueError, match=r"episode 0 had the advantage 1 .* then 2\. .*: set tr"):
        trainer.prepare(batch_of(range(4), scale=2.0))


def test_a_part_of_another_batch_is_an_error() -> None:
    trainer, _ = build(True)
    trainer.add(batch_of((0,)))
    with pytest.raises(ValueError, match=r"\[0, 1, 2\] were added .* but are in no batch"):
        trainer.prepare(batch_of((2, 3)))


@pytest.mark.parametrize("how", ["action_tokens", "kept", "sequence_mean", "constant"])
def test_divisors_of_parts_add_up(how: LossAggregation) -> None:
    """Token 4 is dropped. Sequences of 2, 1 and 2 sampled tokens."""
    sampled = torch.tensor([False, True, True, True, True, True])
    keep = torch.tensor([False, True, True, True, False, True])
    sequence = torch.tensor([0, 0, 0, 1, 2, 2])

    def parts(*places: slice) -> list[tuple[Tensor, int]]:
        found = []
        for at in places:
            masks = sampled[at], keep[at]
            norm = token_norm(*masks, sequence=sequence[at], how=how, constant=8.0)
            found.append((norm, loss_divisor(*masks, sequence=sequence[at], how=how)))
        return found

    ((norm, divisor),) = parts(slice(None))
    assert divisor == {"action_tokens": 5, "kept": 4, "sequence_mean": 3, "constant": 3}[how]
    divided = parts(slice(0, 3), slice(3, 6))
    assert sum(each for _, each in divided) == divisor
    weights_of_parts = torch.cat([each * count for each, count in divided])
    torch.testing.assert_close(weights_of_parts / divisor, norm)
