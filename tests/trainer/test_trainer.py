"""Test the trainer.

The gradient does not depend on the cut into micro-batches, for every denominator and for several
optimizer steps a batch. The loss is that of `unstale.trainer.loss`. Nothing is padded. Non-finite
numbers stop the run before a step and are named. Schedules and optimizers follow their definitions.
bfloat16 training keeps float32 weights. A restored trainer continues exactly.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from unstale.algorithms.corrections import NonFinite
from unstale.builders import build_old_logps
from unstale.config import (
    ConfigError,
    CorrectionConfig,
    ObjectiveConfig,
    OldLogpsConfig,
    RunConfig,
    TrainerConfig,
)
from unstale.model.policy import Policy
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.records import (
    Batch,
    ContextPiece,
    Sampled,
    ScoredTrajectory,
    Task,
    Trajectory,
    collate,
)
from unstale.testing import checkpoint_round_trip, episode, nudge, plain_logps, tiny_policy
from unstale.trainer import train_on
from unstale.trainer.local import LocalTrainer
from unstale.trainer.masters import Masters
from unstale.trainer.optimizer import lr_factor, make_optimizer

WIDE = CorrectionConfig(mode="truncate", high=1e6)
PLANS: tuple[tuple[list, float], ...] = (
    ([4, (6, 0), 3, (2, 1)], 1.0),
    ([5, (3, 1)], -0.5),
    ([2, (9, 0)], 0.0),
    ([7, (2, 1), 2, (2, 1), 3], 2.0),
    ([3], 1.0),
    ([3, (5, 1)], -1.0),
)


def a_batch() -> Batch:
    return collate(
        [episode(i, plan, advantage=advantage) for i, (plan, advantage) in enumerate(PLANS)]
    )


def make(
    policy: Policy,
    *,
    route: str = "snapshot_old",
    correction: CorrectionConfig = WIDE,
    objective: ObjectiveConfig | None = None,
    **trainer: Any,
) -> LocalTrainer:
    """Return a trainer at version 1 whose route has versions 0 and 1."""
    config = RunConfig(
        recipe="",
        max_steps=10,
        correction=correction,
        objective=objective or ObjectiveConfig(),
        trainer=TrainerConfig(**{"optimizer": "SGD", "lr": 1.0, "grad_clip": 1e9} | trainer),
    )
    old = build_old_logps(OldLogpsConfig(route=route), LocalScorer(policy, 1.0, 64))
    old.on_published(live={0})
    nudge(policy, seed=1)
    policy.version = 1
    old.on_published(live={0, 1})
    return LocalTrainer(policy, config, old)


def gradient(trainer: LocalTrainer) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in trainer.policy.model.parameters()])


def weights(policy: Policy) -> Tensor:
    return torch.cat([tensor.flatten().clone() for tensor in policy.weights().values()])


def learn(trainer: LocalTrainer, batch: Batch) -> Mapping[str, float]:
    train_on(trainer, batch)
    return trainer.metrics()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_and_a_restored_state_wait_for_a_thread_that_reads_the_weights(dtype: str) -> None:
    policy = tiny_policy(dtype=dtype)
    trainer = make(policy)
    state, read = checkpoint_round_trip(trainer.state()), list[Tensor]()
    before = weights(policy)
    policy.lend_weights(lambda: read.append(weights(policy)))
    train_on(trainer, a_batch())
    assert torch.equal(read.pop(), before) and not torch.equal(weights(policy), before)
    after = weights(policy)
    policy.lend_weights(lambda: read.append(weights(policy)))
    trainer.restore(state)
    assert torch.equal(read.pop(), after) and torch.equal(weights(policy), before)
    train_on(trainer, a_batch())
    assert not read, "the weights were lent until they changed"


def test_a_cap_on_the_whole_ratio_holds_what_a_token_counts() -> None:
    """The loss is -sum min(pi / mu, cap) A / N, from unpacked forward passes."""
    policy, batch = tiny_policy(), a_batch()
    trainer = make(policy, objective=ObjectiveConfig(loss_type="none", ratio_cap=1.5))
    total, capped = 0.0, 0
    for start, end in batch.spans():
        now = plain_logps(policy, batch.tokens[start:end].tolist())
        for at in batch.sampled[start:end].nonzero().squeeze(1).tolist():
            ratio = math.exp(float(now[at] - batch.behavior_logp[start + at]))
            capped += ratio > 1.5
            total -= min(ratio, 1.5) * float(batch.advantage[start + at])
    (part,) = trainer.prepare(batch)
    trainer.backward(part)
    assert 0 < capped < 29
    assert trainer.metrics()["objective/loss"] == pytest.approx(total / 29, rel=1e-4)


def test_normalized_weights_have_the_mean_one_over_the_batch() -> None:
    correction = CorrectionConfig(mode="truncate", high=2.0, normalize=True)
    trainer = make(tiny_policy(), correction=correction, minibatches_per_batch=2)
    factors = [part.factor[part.batch.sampled] for part in trainer.prepare(a_batch())]
    assert torch.cat(factors).mean().item() == pytest.approx(1.0)
    assert abs(factors[0].mean().item() - 1) > 0.005


def test_sequences_without_an_advantage_count_in_the_mean_of_the_weights() -> None:
    """So an option that trains them, too, does not change the weights of the others."""
    correction = CorrectionConfig(mode="truncate", high=1e6, normalize=True)
    found = []
    for entropy_coef in (0.0, 0.1):
        trainer = make(
            tiny_policy(),
            correction=correction,
            objective=ObjectiveConfig(entropy_coef=entropy_coef),
        )
        (part,) = trainer.prepare(a_batch())
        found.append(part.factor[part.batch.trained & (part.batch.advantage != 0)])
    assert len(found[0]) == 20
    torch.testing.assert_close(*found)


def test_the_cap_on_the_whole_ratio_also_limits_the_kl_term() -> None:
    """Per token it is min(pi / mu, cap) (exp(r) - r - 1), where r = log pi_reference - log pi."""
    policy, batch = tiny_policy(dtype="float64"), a_batch()
    options = ObjectiveConfig(loss_type="none", ratio_cap=1.5, kl_coef=0.5)
    reference = tiny_policy(dtype="float64")
    trainer = make(policy, objective=options)
    nudge(reference, seed=1)  # as in `make`
    nudge(policy, seed=2)
    (part,) = trainer.prepare(batch)
    trainer.backward(part)
    total, capped = 0.0, 0
    for start, end in batch.spans():
        tokens = batch.tokens[start:end].tolist()
        now, base = plain_logps(policy, tokens), plain_logps(reference, tokens)
        for at in batch.sampled[start:end].nonzero().squeeze(1).tolist():
            ratio = min(math.exp(float(now[at] - batch.behavior_logp[start + at])), 1.5)
            capped += ratio == 1.5
            log_ratio = float(base[at] - now[at])
            total -= ratio * float(batch.advantage[start + at])
            total += 0.5 * ratio * (math.exp(log_ratio) - log_ratio - 1)
    assert 0 < capped < 29
    assert trainer.metrics()["objective/loss"] == pytest.approx(total / 29, rel=1e-6)


@pytest.mark.parametrize("kind", ["sapo", "dro"])
def test_a_step_on_fresh_data_is_that_of_the_other_objectives(kind: str) -> None:
    steps = []
    for each in ("none", kind):
        policy = tiny_policy(dtype="float64")
        trainer = make(policy, route="rollout", objective=ObjectiveConfig(loss_type=each))
        batch = a_batch()
        logp = trainer.policy.score(
            batch, batch.sampled, temperature=1.0, max_tokens_per_microbatch=64
        ).logp
        (part,) = trainer.prepare(replace(batch, behavior_logp=logp))
        trainer.backward(part)
        steps.append(gradient(trainer))
    torch.testing.assert_close(steps[1], steps[0], rtol=1e-9, atol=1e-12)


def test_each_pass_over_a_batch_has_the_same_minibatches_and_old_logps() -> None:
    """Two passes of two minibatches are the four steps on them, with old values of before."""
    passes = make(tiny_policy(), minibatches_per_batch=2, epochs_per_batch=2, lr=0.1)
    by_hand = make(tiny_policy(), minibatches_per_batch=2, lr=0.1)
    metrics = learn(passes, a_batch())
    parts = by_hand.prepare(a_batch())
    for part in [*parts, *parts]:
        by_hand.backward(part)
        by_hand.step()
    assert torch.equal(weights(passes.policy), weights(by_hand.policy))
    once = learn(make(tiny_policy(), minibatches_per_batch=2, lr=0.1), a_batch())
    assert passes.steps == 4
    assert once["objective/clip_share"] / 2 <= metrics["objective/clip_share"] <= 1
    assert metrics["objective/log_s_abs_mean"] > once["objective/log_s_abs_mean"]
    assert metrics["correction/log_d_abs_mean"] == pytest.approx(once["correction/log_d_abs_mean"])


@pytest.mark.costly(cases=4)
@pytest.mark.parametrize("minibatches_per_batch", [1, 2])
@pytest.mark.parametrize("loss_aggregation", ["action_tokens", "kept", "sequence_mean", "constant"])
def test_the_gradient_does_not_depend_on_the_cut_into_micro_batches(
    loss_aggregation: str, minibatches_per_batch: int
) -> None:
    found = []
    for max_tokens_per_microbatch in (1, 20, 10_000):
        trainer = make(
            tiny_policy(dtype="float64"),
            correction=CorrectionConfig(mode="mask", low=0.05, high=3.0, unit="turn"),
            objective=ObjectiveConfig(
                loss_aggregation=loss_aggregation, entropy_coef=0.1, kl_coef=0.2, unit="sequence"
            ),
            max_tokens_per_microbatch=max_tokens_per_microbatch,
            minibatches_per_batch=minibatches_per_batch,
        )
        gradients = []
        for part in trainer.prepare(a_batch()):
            trainer.backward(part)
            gradients.append(gradient(trainer).clone())
            trainer.optimizer.zero_grad()
        metrics = trainer.metrics()
        assert 0 < metrics["correction/kept_share"] < 1
        found.append((torch.stack(gradients), metrics))
    assert [metrics["trainer/microbatches"] for _, metrics in found] == [
        5,
        4,
        minibatches_per_batch,
    ]
    for gradients, metrics in found[:2]:
        assert len(gradients) == minibatches_per_batch
        torch.testing.assert_close(gradients, found[2][0], atol=1e-12, rtol=1e-9)
        assert metrics["objective/loss"] == pytest.approx(found[2][1]["objective/loss"], abs=1e-9)


def test_the_loss_is_the_formula() -> None:
    """-sum D min(S A, clip(S) A) / N, token by token from unpacked forward passes; N counts tokens
    before masking."""
    policy, batch = tiny_policy(), a_batch()
    version_0 = policy.twin()
    trainer = make(policy, correction=CorrectionConfig(mode="mask_weight", low=0.2, high=5.0))
    total, clipped, kept, busy = 0.0, 0, 0, 0
    for start, end in batch.spans():
        tokens = batch.tokens[start:end].tolist()
        now, then = plain_logps(policy, tokens), plain_logps(version_0, tokens)
        for at in batch.sampled[start:end].nonzero().squeeze(1).tolist():
            version, advantage = int(batch.version[start + at]), float(batch.advantage[start + at])
            old = float((now if version == 1 else then)[at])
            d, s = (
                math.exp(old - float(batch.behavior_logp[start + at])),
                math.exp(float(now[at]) - old),
            )
            inside = 0.2 <= d <= 5.0
            total -= inside * d * min(s * advantage, min(max(s, 0.8), 1.28) * advantage)
            clipped += (advantage > 0 and s > 1.28) or (advantage < 0 and s < 0.8)
            busy += advantage != 0
            kept += inside and advantage != 0
    (part,) = trainer.prepare(batch)
    trainer.backward(part)
    metrics = trainer.metrics()
    assert (
        metrics["trainer/action_tokens"] == 29
        and 0 < kept < busy == metrics["trainer/tokens_with_gradient"] < 29
    )
    assert metrics["objective/loss"] == pytest.approx(total / 29, abs=1e-5)
    assert metrics["correction/kept_share"] == pytest.approx(kept / busy)
    assert metrics["objective/clip_share"] == pytest.approx(clipped / busy)


def test_siblings_are_spread_over_the_optimizer_steps_and_each_has_its_own_denominator() -> None:
    trainer = make(
        tiny_policy(), minibatches_per_batch=2, objective=ObjectiveConfig(loss_type="kl_penalty")
    )
    parts = trainer.prepare(a_batch())
    assert [part.batch.episodes for part in parts] == [(0, 2, 5), (1, 3)]  # 4 has no action token
    assert [part.norm.sum().item() for part in parts] == pytest.approx([1.0, 1.0])


def test_nothing_is_padded() -> None:
    batch = a_batch()
    metrics = learn(make(tiny_policy(), objective=ObjectiveConfig(loss_type="kl_penalty")), batch)
    assert (
        metrics["trainer/sequence_tokens"] == len(batch.tokens) - 3
    )  # the sequence without action tokens is not run


def test_sequences_without_gradient_are_not_run_and_that_changes_nothing() -> None:
    found = []
    for run_all in (False, True):
        trainer = make(tiny_policy(dtype="float64"))
        assert trainer.skips_zero_advantage
        if run_all:
            trainer.skips_zero_advantage = False
        (part,) = trainer.prepare(a_batch())
        trainer.backward(part)
        found.append((gradient(trainer), trainer.metrics()["trainer/sequence_tokens"]))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-12, rtol=1e-9)
    assert found[1][1] - found[0][1] == 11  # the third sequence, whose advantage is 0
    assert not make(
        tiny_policy(), objective=ObjectiveConfig(loss_type="kl_penalty")
    ).skips_zero_advantage
    assert not make(tiny_policy(), objective=ObjectiveConfig(entropy_coef=0.1)).skips_zero_advantage


def test_a_batch_without_any_gradient_still_takes_its_optimizer_step() -> None:
    """The momentum still moves the weights. A gradient of 0 differs from no gradient."""
    trainer = make(tiny_policy(), optimizer="Adam", lr=0.01)
    learn(trainer, a_batch())
    before = weights(trainer.policy)
    metrics = learn(trainer, collate([episode(0, [4, (6, 1)], advantage=0.0)]))
    assert metrics["trainer/sequence_tokens"] == 0 and metrics["trainer/grad_norm"] == 0
    assert trainer.steps == 2 and not torch.equal(before, weights(trainer.policy))


def test_a_batch_without_action_tokens_is_refused() -> None:
    with pytest.raises(
        ValueError, match="none of the 1 sequences of this batch has an action token"
    ):
        make(tiny_policy()).prepare(collate([episode(0, [5])]))


def test_the_gradient_is_clipped_to_its_norm() -> None:
    trainer = make(tiny_policy(), grad_clip=0.01, lr=1.0)
    before = weights(trainer.policy)
    metrics = learn(trainer, a_batch())
    assert metrics["trainer/grad_norm"] > 0.01  # as it was before clipping
    assert (weights(trainer.policy) - before).norm().item() == pytest.approx(0.01, rel=1e-3)


def test_after_a_step_the_policy_is_no_longer_at_its_version() -> None:
    trainer = make(tiny_policy())
    (part,) = trainer.prepare(a_batch())
    trainer.backward(part)
    assert trainer.policy.weights_match_version
    trainer.step()
    assert not trainer.policy.weights_match_version and trainer.policy.version == 1


def test_a_reference_kl_pulls_back_to_where_the_run_began() -> None:
    policy = tiny_policy()
    trainer = make(
        policy, objective=ObjectiveConfig(loss_type="none", kl_coef=1.0), route="rollout", lr=0.01
    )
    nudge(policy, seed=2, size=0.01)
    batch = collate([engine_made(policy, number) for number in range(8)])
    before = learn(trainer, batch)["policy/kl_reference_k3"]
    for _ in range(5):
        after = learn(trainer, batch)["policy/kl_reference_k3"]
    assert 0 < after < before


def engine_made(policy: Policy, number: int) -> ScoredTrajectory:
    """Return an episode of advantage 0 with this policy's log-probabilities."""
    made = episode(number, [3, (8, 0)]).trajectory
    logps = tuple(plain_logps(policy, made.tokens)[3:].tolist())
    pieces = (ContextPiece(made.tokens[:3]), Sampled(made.tokens[3:], logps, 1))
    return ScoredTrajectory(
        Trajectory(pieces, {}, "done", Task("random", "train", number), seed=0, episode=number),
        (0.0,),
    )


def test_an_entropy_bonus_follows_the_gradient_of_entropy() -> None:
    policy, batch = tiny_policy(dtype="float64"), collate([episode(0, [3, (8, 1)], advantage=0.0)])
    trainer = make(policy, objective=ObjectiveConfig(entropy_coef=0.5))
    (part,) = trainer.prepare(batch)
    trainer.backward(part)
    found = gradient(trainer).clone()
    policy.model.zero_grad()
    logits = policy.model(input_ids=batch.tokens[None]).logits[0, 2:-1]
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    (-0.5 * entropy).backward()
    torch.testing.assert_close(found, gradient(trainer), atol=1e-10, rtol=1e-8)
    assert trainer.metrics()["policy/entropy_mean"] == pytest.approx(entropy.item())


@pytest.mark.parametrize("name", ["behavior_logp", "old_logp"])
def test_a_log_probability_that_is_not_finite_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, batch = (
        make(tiny_policy()),
        collate([episode(7, [2, (3, 0)]), episode(9, [4, (6, 1)])]),
    )
    column = batch.behavior_logp if name == "behavior_logp" else torch.zeros(15)
    column[5 + 4 + 2] = math.nan
    if name == "old_logp":
        monkeypatch.setattr(trainer.old, "logps", lambda batch, now: (column, batch.sampled))
    with pytest.raises(
        NonFinite, match=f"{name} is nan at token 6 of sequence 9, sampled by version 1"
    ):
        trainer.prepare(batch)


def test_a_model_that_breaks_is_named_and_no_step_is_taken() -> None:
    trainer = make(tiny_policy())
    (part,) = trainer.prepare(a_batch())
    with torch.no_grad():
        next(trainer.policy.model.parameters())[:] = math.nan
    with pytest.raises(NonFinite, match="logp is nan at token"):
        trainer.backward(part)
    assert trainer.steps == 0


def test_a_loss_or_gradient_that_is_not_finite_stops_before_the_step() -> None:
    trainer = make(tiny_policy())
    before = weights(trainer.policy)
    (part,) = trainer.prepare(collate([episode(0, [3, (4, 1)], advantage=math.inf)]))
    with pytest.raises(FloatingPointError, match="the loss of optimizer step 1 is -inf"):
        trainer.backward(part)
    (part,) = trainer.prepare(a_batch())
    trainer.backward(part)
    next(trainer.policy.model.parameters()).grad[0, 0] = math.inf
    with pytest.raises(
        FloatingPointError, match="the gradient norm of optimizer step 1 is inf; no step was taken"
    ):
        trainer.step()
    assert torch.equal(before, weights(trainer.policy))


def test_metrics_say_what_happened_by_lag() -> None:
    policy, batch = tiny_policy(), a_batch()
    version_0 = policy.twin()
    trainer = make(policy, objective=ObjectiveConfig(loss_type="kl_penalty"))
    metrics = learn(trainer, batch)
    assert metrics["old_logps/exact_share"] == 1.0
    assert (
        metrics["objective/log_s_abs_mean/lag_0"] < 1e-5 < metrics["objective/log_s_abs_mean/lag_1"]
    )
    assert (
        metrics["trainer/lr"] == 1.0
        and metrics["trainer/tokens_per_s"] > 0
        and metrics["old_logps/prepare_s"] > 0
    )
    assert metrics["old_logps/forward_tokens"] == (10 + 11) + (
        15 + 8 + 13 + 8
    )  # version 0 in 0 and 2, 1 in 0, 1, 3, 5
    assert (
        metrics["trainer/forward_tokens"]
        == metrics["trainer/sequence_tokens"]
        == len(batch.tokens) - 3
    )
    points = trainer.scatter_sample()
    assert len(points) == 29 and {point["lag"] for point in points} == {0, 1}
    then = version_0.logps(batch, temperature=1.0)[batch.sampled & (batch.version == 0)].detach()
    behavior = batch.behavior_logp[batch.sampled & (batch.version == 0)]
    at_lag_1 = sorted(point["log_d"] for point in points if point["lag"] == 1)
    assert at_lag_1 == pytest.approx(sorted((then - behavior).tolist()), abs=1e-4)
    learn(trainer, collate([episode(i, [2, (60, 1)]) for i in range(10)]))
    assert len(trainer.scatter_sample()) == 256


def test_the_current_policy_is_run_only_for_a_route_that_asks() -> None:
    batch = a_batch()
    assert learn(make(tiny_policy(), route="rollout"), batch)["old_logps/forward_tokens"] == 0
    every = ObjectiveConfig(loss_type="kl_penalty")  # runs sequences without advantage, too
    asked = learn(make(tiny_policy(), route="current_recompute", objective=every), batch)
    assert (
        asked["old_logps/forward_tokens"] == len(batch.tokens) - 3 - 3
    )  # cut after the last action token
    assert (
        asked["objective/log_s_abs_mean"] < 1e-5
    )  # one step: the ratio is 1, and all staleness is in D


def test_schedules() -> None:
    cosine = TrainerConfig(lr_schedule="cosine", warmup_steps=4)
    assert [lr_factor(step, cosine, num_steps=8) for step in range(9)] == pytest.approx(
        [0.25, 0.5, 0.75, 1.0, 1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0.0]
    )
    constant = TrainerConfig(warmup_steps=2)
    assert [lr_factor(step, constant, num_steps=3) for step in range(5)] == [
        0.5,
        1.0,
        1.0,
        1.0,
        1.0,
    ]
    trainer = make(tiny_policy(), lr=0.1, lr_schedule="linear")
    rates = [learn(trainer, a_batch())["trainer/lr"] for _ in range(3)]
    assert rates == pytest.approx([0.1, 0.09, 0.08])


def test_optimizers_go_by_their_torch_names() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    adam = make_optimizer(TrainerConfig(optimizer="AdamW", weight_decay=0.1, lr=0.5), [parameter])
    assert isinstance(adam, torch.optim.AdamW)
    assert adam.param_groups[0]["weight_decay"] == 0.1 and adam.param_groups[0]["lr"] == 0.5
    assert (
        make_optimizer(TrainerConfig(), [parameter]).param_groups[0]["weight_decay"] == 0.0
    )  # not torch's 0.01
    assert make_optimizer(
        TrainerConfig(optimizer="Adam", weight_decay=0.1), [parameter]
    ).param_groups[0]["decoupled_weight_decay"]
    for config, message in (
        (TrainerConfig(optimizer="AdamV"), "got 'AdamV'; did you mean Adam"),
        (TrainerConfig(optimizer="Optimizer"), "must be a class of torch.optim"),
        (TrainerConfig(optimizer="lr_scheduler"), "must be a class of torch.optim"),
        (TrainerConfig(optimizer="LBFGS"), "must not be LBFGS"),
        (TrainerConfig(optimizer="Rprop", weight_decay=0.1), "weight_decay must be 0 with Rprop"),
        (TrainerConfig(optimizer="Muon"), "Muon cannot train this model"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_optimizer(config, [parameter])


def test_bfloat16_forward_weights_are_a_copy_of_float32_ones() -> None:
    trainer = make(tiny_policy(dtype="bfloat16"), lr=1e-4, grad_clip=1.0, rounding="nearest")
    before = weights(trainer.policy)
    learn(trainer, a_batch())
    assert weights(trainer.policy).dtype == torch.bfloat16
    masters = trainer.state()["weights"]
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    moved = torch.cat([tensor.flatten() for tensor in masters.values()])
    assert torch.equal(moved.bfloat16(), weights(trainer.policy))
    assert (moved != before.float()).float().mean() > 0.5  # small steps are kept ...
    assert (
        weights(trainer.policy) != before
    ).float().mean() < 0.2  # ... which most bfloat16 words do not show yet


def test_bfloat16_gradients_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum over 150 microbatches equals that in float64, which one in bfloat16 does not."""
    collect = Masters.collect_gradients
    exact: dict[str, Tensor] = {}
    rounded: dict[str, Tensor] = {}

    def collected(masters: Masters, scale: float) -> None:
        for name, parameter in trainer.policy.model.named_parameters():
            if parameter.grad is not None:
                exact[name] = exact.get(name, 0) + parameter.grad.double()
                rounded[name] = rounded.get(name, 0) + parameter.grad
        collect(masters, scale)

    monkeypatch.setattr(Masters, "collect_gradients", collected)
    trainer = make(tiny_policy(dtype="bfloat16"), max_tokens_per_microbatch=1)
    episodes = [episode(i, [3, (2, i % 2)], advantage=1 + i % 3) for i in range(150)]
    (part,) = trainer.prepare(collate(episodes))
    trainer.backward(part)
    assert trainer.metrics()["trainer/microbatches"] == 150
    assert all(parameter.grad is None for parameter in trainer.policy.model.parameters())
    assert {master.grad.dtype for master in trainer._master.values()} == {torch.float32}
    assert exact.keys() == trainer._master.keys()
    ours, exactly, roughly = (
        torch.cat([gradients[name].flatten().double() for name in exact])
        for gradients in (
            {name: master.grad for name, master in trainer._master.items()},
            exact,
            rounded,
        )
    )
    assert (ours - exactly).norm() < 1e-5 * exactly.norm()
    assert (roughly - exactly).norm() > 1e-3 * exactly.norm()


def test_bfloat16_gradients_do_not_depend_on_the_size_of_microbatches() -> None:
    found = []
    for max_tokens_per_microbatch in (1, 10_000):
        trainer = make(
            tiny_policy(dtype="bfloat16"), max_tokens_per_microbatch=max_tokens_per_microbatch
        )
        (part,) = trainer.prepare(a_batch())
        trainer.backward(part)
        found.append(torch.cat([master.grad.flatten() for master in trainer._master.values()]))
    assert (found[0] - found[1]).norm() / found[1].norm() < 0.02


def test_a_restored_trainer_goes_on_as_if_it_had_never_stopped() -> None:
    options = {"optimizer": "AdamW", "lr": 0.01, "lr_schedule": "cosine", "warmup_steps": 2}
    one = make(tiny_policy(), route="rollout", **options)
    learn(one, a_batch())
    state = checkpoint_round_trip(one.state())
    other = make(tiny_policy(seed=5), route="rollout", **options)
    other.restore(state)
    assert (other.steps, other.policy.version, other.policy.weights_match_version) == (1, 1, False)
    for trainer in (one, other):
        for _ in range(2):
            learn(trainer, a_batch())
    assert torch.equal(weights(one.policy), weights(other.policy))
    assert one.metrics()["trainer/lr"] == other.metrics()["trainer/lr"]
    assert state["steps"] == 1  # a state does not move with its trainer


@pytest.mark.parametrize("optimizer", ["AdamW", "Adafactor", "SGD"])
def test_a_state_that_was_written_down_has_every_bit(optimizer: str) -> None:
    one, other = (
        make(tiny_policy(seed=seed), route="rollout", optimizer=optimizer, lr=0.01)
        for seed in (0, 5)
    )
    one.policy.assign_new_version(4)
    learn(one, a_batch())
    other.restore(checkpoint_round_trip(one.state()))
    assert other.policy.version_gaps == one.policy.version_gaps == ((4, 3),)
    for trainer in (one, other):
        learn(trainer, a_batch())
    assert torch.equal(weights(one.policy), weights(other.policy))


def test_the_state_of_another_optimizer_is_refused_before_anything_is_loaded() -> None:
    one, other = (
        make(tiny_policy(seed=seed), route="rollout", optimizer=name, lr=0.01)
        for seed, name in ((0, "AdamW"), (5, "SGD"))
    )
    learn(one, a_batch())
    before = weights(other.policy).clone()
    with pytest.raises(ValueError, match="the optimizer was AdamW"):
        other.restore(one.state())
    assert torch.equal(weights(other.policy), before)


def test_lag_is_counted_in_batches_after_a_resume() -> None:
    trainer = make(tiny_policy(), route="rollout")
    trainer.policy.assign_new_version(4)
    assert trainer.policy.version == 4
    batch = collate([episode(0, [3, (4, 0), (2, 1), (1, 3), (1, 4)])])
    (part,) = trainer.prepare(batch)
    assert part.lag.tolist() == [-1] * 3 + [1] * 4 + [0] * 4


@pytest.mark.parametrize("max_tokens_per_microbatch", [1, 10_000])
def test_an_inline_route_is_asked_in_every_pass_with_that_pass_s_own_values(
    max_tokens_per_microbatch: int,
) -> None:
    """Policy and proxy change between two optimizer steps, without an extra forward pass."""
    trainer = make(
        tiny_policy(),
        route="interp_prox_loglinear",
        minibatches_per_batch=2,
        max_tokens_per_microbatch=max_tokens_per_microbatch,
        lr=1e-2,
    )
    asked: list[Tensor] = []
    answer = trainer.old.logps

    def listen(batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        plain = [
            plain_logps(trainer.policy, batch.tokens[a:b].tolist()).float()
            for a, b in batch.spans()
        ]
        error = (now - torch.cat(plain))[batch.sampled].abs().max()
        assert error < 1e-5 and not now.requires_grad
        asked.append(batch.sampled)
        return answer(batch, now)

    trainer.old.logps = listen  # type: ignore[method-assign]
    figures = learn(trainer, a_batch())
    assert sum(int(sampled.sum()) for sampled in asked) == figures["trainer/tokens_with_gradient"]
    assert figures["old_logps/forward_tokens"] == 0 and figures["old_logps/exact_share"] == 0
    assert figures["correction/kept_share"] == 1


def test_an_inline_proxy_of_weight_one_gives_the_gradient_of_recomputing_it() -> None:
    recomputed, inline = (make(tiny_policy(), route="current_recompute") for _ in range(2))
    whole = OldLogpsConfig(route="interp_prox_loglinear", alpha=1.0)
    inline.old = build_old_logps(whole, LocalScorer(inline.policy, 1.0, 64))
    for trainer in (recomputed, inline):
        trainer.backward(trainer.prepare(a_batch())[0])
    torch.testing.assert_close(gradient(recomputed), gradient(inline), atol=1e-6, rtol=1e-5)


def test_a_route_hears_of_every_step_and_what_the_control_kept() -> None:
    """A band around D = 1 that contains no token keeps no token."""
    narrow = CorrectionConfig(mode="mask", low=0.0, high=1.0)
    trainer = make(tiny_policy(), correction=narrow, minibatches_per_batch=2)
    heard: list[float] = []
    trainer.old.trained = lambda kept: heard.append(kept)  # type: ignore[method-assign]
    figures = learn(trainer, a_batch())
    assert heard == [figures["correction/kept_share"]] * 2
    assert 0 <= figures["correction/kept_share"] < 1


def test_the_audit_sees_the_batch_before_anything_moves() -> None:
    trainer = make(tiny_policy())
    seen: list[tuple[Batch, Tensor]] = []

    def audit(batch: Batch, old_logp: Tensor) -> Mapping[str, float]:
        assert trainer.policy.weights_match_version
        seen.append((batch, old_logp))
        return {"audit/seen": 1.0}

    trainer.audit = audit
    assert learn(trainer, a_batch())["audit/seen"] == 1
    ((batch, old_logp),) = seen
    assert old_logp.shape == batch.sampled.shape


@pytest.mark.parametrize("route", ["interp_prox_loglinear", "snapshot_old"])
def test_a_batch_without_any_advantage_is_a_step_like_any_other(route: str) -> None:
    """Siblings with equal rewards need no gradient and no inline log-probabilities."""
    trainer = make(tiny_policy(), route=route)
    before = weights(trainer.policy)
    figures = learn(trainer, collate([episode(i, [4, (3, 1)], advantage=0.0) for i in range(3)]))
    assert torch.equal(weights(trainer.policy), before)
    assert figures["trainer/action_tokens"] == 9 and figures["objective/loss"] == 0
    assert trainer.scatter_sample() == []


def test_a_trainer_says_how_its_policy_is_run() -> None:
    trainer = make(tiny_policy(), share_prompts=False, gradient_checkpointing=True)
    passes = trainer.policy.passes
    assert passes.gradient_checkpointing and not passes.share_prompts and not passes.compile
    siblings = collate([episode(0, [(20, 0), 3, (2, 1)]) for _ in range(2)])
    for share in (False, True):
        metrics = learn(make(tiny_policy(), share_prompts=share), siblings)
        assert (metrics["trainer/forward_tokens"] < metrics["trainer/sequence_tokens"]) == share


def test_an_optimizer_is_fused_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    assert make_optimizer(TrainerConfig(), [weight]).defaults["fused"]

    def lacking(*given: Any, **options: Any) -> None:
        raise RuntimeError("no such kernel here")

    monkeypatch.setattr(torch, "_fused_adamw_", lacking)
    optimizer = make_optimizer(TrainerConfig(), [weight])
    assert not optimizer.defaults["fused"]
    weight.grad = torch.ones(2)
    optimizer.step()


def test_tokens_with_gradient_are_none_where_every_advantage_is_zero() -> None:
    metrics = learn(make(tiny_policy()), collate([episode(0, [4, (6, 1)], advantage=0.0)]))
    assert metrics["trainer/action_tokens"] == 6
    assert metrics["trainer/tokens_with_gradient"] == 0
    assert metrics["old_logps/exact_share"] == 1  # the route is still asked


def test_a_sampled_entropy_is_the_entropy_and_leaves_the_gradient_alone() -> None:
    policy, batch = tiny_policy(dtype="float64"), a_batch()
    where = batch.sampled
    full = policy.logps_and_entropy(batch, temperature=0.7, where=where)[1].detach()
    sample = where & (torch.arange(len(where)) % 3 == 0)
    logp, entropy = policy.logps_and_entropy(
        batch, temperature=0.7, where=where, entropy_sample=sample
    )
    assert not entropy.requires_grad
    torch.testing.assert_close(entropy, torch.where(sample, full, 0.0))
    assert torch.equal(logp, policy.logps(batch, temperature=0.7, where=where))
