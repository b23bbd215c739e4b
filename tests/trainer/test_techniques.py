"""Test the chains of shapers and controllers in the trainer.

Without a technique, nothing is computed for them. A shaper sees all sequences and changes
advantages. A token that it drops still counts in the divisor. A controller sees the whole ratio of
every sequence, and scales or skips the optimizer step. A ratio and an objective replace those of
the loss. No technique sees a token that the policy did not sample.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from unstale.algorithms.objectives import Surrogate, none
from unstale.builders import build_old_logps
from unstale.config import (
    CorrectionConfig,
    ObjectiveConfig,
    OldLogpsConfig,
    RunConfig,
    TrainerConfig,
)
from unstale.config.techniques import Need
from unstale.config.techniques import techniques as all_techniques
from unstale.model.policy import Policy
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.records import Batch, Provenance, collate
from unstale.techniques.hooks import Shaped, Signals, StepPlan, StepSeen, Techniques
from unstale.testing import episode, nudge, plain_logps, tiny_policy
from unstale.trainer import train_on
from unstale.trainer.local import LocalTrainer

PLANS: tuple[tuple[list, float], ...] = (
    ([4, (6, 0), 3, (2, 1)], 1.0),
    ([5, (3, 1)], -0.5),
    ([2, (9, 0)], 0.0),
)


class Shapes:
    """A shaper that calls a function."""

    def __init__(self, function: Callable[[Batch, Signals], Shaped]) -> None:
        self.shape = function


class Plans:
    """A controller with a fixed answer. It records what it sees."""

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan
        self.seen: list[StepSeen] = []

    def plan(self, seen: StepSeen) -> StepPlan:
        self.seen.append(seen)
        return self._plan


def a_batch() -> Batch:
    return collate([episode(i, plan, advantage=value) for i, (plan, value) in enumerate(PLANS)])


def make(
    *techniques: object,
    policy: Policy | None = None,
    route: str = "snapshot_old",
    steps: int = 1,
    needs: frozenset[Need] = frozenset(),
) -> LocalTrainer:
    """Return a trainer at version 1 that takes plain gradient steps with lr 1."""
    policy = policy or tiny_policy(dtype="float64")
    config = RunConfig(
        recipe="",
        max_steps=10,
        correction=CorrectionConfig(mode="truncate", high=1e6),
        trainer=TrainerConfig(
            optimizer="SGD",
            lr=1.0,
            grad_clip=1e9,
            minibatches_per_batch=steps,
        ),
    )
    old = build_old_logps(OldLogpsConfig(route=route), LocalScorer(policy, 1.0, 64))
    old.on_published(live={0})
    nudge(policy, seed=1)
    policy.version = 1
    old.on_published(live={0, 1})
    named = Techniques({str(number): each for number, each in enumerate(techniques)}, needs=needs)
    return LocalTrainer(policy, config, old, techniques=named)


def gradient(trainer: LocalTrainer, batch: Batch) -> Tensor:
    (part,) = trainer.prepare(batch)
    trainer.backward(part)
    return torch.cat([p.grad.flatten() for p in trainer.policy.model.parameters()])


def change(trainer: LocalTrainer, batch: Batch) -> Tensor:
    """Return the change of the weights by the steps of a batch."""
    before = torch.cat([each.flatten().clone() for each in trainer.policy.weights().values()])
    train_on(trainer, batch)
    return torch.cat([each.flatten() for each in trainer.policy.weights().values()]) - before


def same(batch: Batch, signals: Signals) -> Shaped:
    return Shaped(batch.advantage, batch.trained)


def test_without_a_technique_and_with_one_that_changes_nothing_gradients_are_equal() -> None:
    config = RunConfig(recipe="")
    assert not Techniques.of(config).parts
    plain = gradient(make(), a_batch())
    assert torch.equal(gradient(make(), a_batch()), plain)
    torch.testing.assert_close(gradient(make(Shapes(same)), a_batch()), plain, rtol=0, atol=1e-15)
    controlled = gradient(make(Plans(StepPlan())), a_batch())
    torch.testing.assert_close(controlled, plain, rtol=0, atol=1e-15)


@pytest.mark.parametrize("route", ["snapshot_old", "current_recompute"])
def test_a_shaper_sees_every_sequence_and_changes_its_advantage(route: str) -> None:
    """The gradient is that of a batch with the new advantages, also where the old one was 0."""
    seen: list[tuple[Batch, Signals]] = []

    def double_and_add(batch: Batch, signals: Signals) -> Shaped:
        seen.append((batch, signals))
        return Shaped(2 * batch.advantage + 0.25, batch.trained)

    batch = a_batch()
    wanted = replace(batch, advantage=torch.where(batch.sampled, 2 * batch.advantage + 0.25, 0.0))
    expected = gradient(make(route=route), wanted)
    shaped = gradient(make(Shapes(double_and_add), route=route), batch)
    torch.testing.assert_close(shaped, expected, rtol=1e-9, atol=1e-12)
    ((given, signals),) = seen
    assert given.num_sequences == 3 and signals.progress == 0.0
    policy = tiny_policy(dtype="float64")
    nudge(policy, seed=1)
    start, end = batch.spans()[2]
    now = plain_logps(policy, batch.tokens[start:end].tolist())
    chosen = batch.sampled[start:end]
    torch.testing.assert_close(signals.logp[start:end][chosen], now[chosen])


def test_tokens_to_which_a_shaper_gives_an_advantage_are_counted() -> None:
    """The third sequence has the advantage 0 before, and the first has it afterwards."""

    def shift(batch: Batch, signals: Signals) -> Shaped:
        return Shaped(batch.advantage - 1.0, batch.trained)

    trainer = make(Shapes(shift))
    gradient(trainer, a_batch())
    metrics = trainer.metrics()
    assert metrics["trainer/action_tokens"] == 20
    assert metrics["trainer/tokens_with_gradient"] == 3 + 9
    assert metrics["objective/clip_share"] <= 1


def test_a_dropped_token_has_no_gradient_and_still_counts() -> None:
    batch = a_batch()
    first = torch.arange(len(batch.tokens)) < batch.offsets[1]

    def drop_the_first_sequence(batch: Batch, signals: Signals) -> Shaped:
        return Shaped(batch.advantage, ~first)

    without = replace(batch, advantage=batch.advantage.masked_fill(first, 0.0))
    for route in ("snapshot_old", "current_recompute"):
        expected = gradient(make(route=route), without)
        dropped = gradient(make(Shapes(drop_the_first_sequence), route=route), batch)
        torch.testing.assert_close(dropped, expected, rtol=1e-9, atol=1e-12)


def test_controllers_see_the_whole_ratio_of_every_sequence_and_scale_the_step() -> None:
    plain = change(make(), a_batch())
    half, third = Plans(StepPlan(lr_factor=0.5, metrics={"x/y": 4.0})), Plans(StepPlan(1 / 3))
    trainer = make(half, third)
    batch = a_batch()
    policy = tiny_policy(dtype="float64")
    nudge(policy, seed=1)
    torch.testing.assert_close(change(trainer, batch), plain / 6, rtol=1e-9, atol=1e-12)
    expected = []
    for start, end in batch.spans():
        now = plain_logps(policy, batch.tokens[start:end].tolist())
        ratio = now.double() - batch.behavior_logp[start:end].double()
        expected.append(float(ratio[batch.sampled[start:end]].sum()))
    (seen,) = half.seen
    assert sorted(seen.log_weight.tolist()) == pytest.approx(sorted(expected), abs=1e-9)
    metrics = trainer.metrics()
    assert seen.grad_norm == pytest.approx(metrics["trainer/grad_norm"])
    assert metrics["trainer/lr"] == pytest.approx(1 / 6) and metrics["x/y"] == 4.0


def test_halves_of_the_groups_have_the_whole_gradient_and_its_noise() -> None:
    """Groups have two sequences and one. Some tokens lag by one batch, the others by none."""
    batch = replace(a_batch(), group=(8, 5, 8))
    second = torch.zeros_like(batch.sampled)
    second[batch.offsets[1] : batch.offsets[2]] = True
    halves = [replace(batch, advantage=batch.advantage * each) for each in (~second, second)]
    a, b = (gradient(make(), each) for each in halves)
    sees = Plans(StepPlan())
    trainer = make(sees, needs=frozenset({"halves"}))
    torch.testing.assert_close(gradient(trainer, batch), a + b, rtol=1e-9, atol=1e-12)
    trainer.step()
    assert sees.seen[0].gradient_noise == pytest.approx(float((a - b).square().sum()))
    assert sees.seen[0].grad_norm == pytest.approx(float((a + b).norm()))
    kl = {
        lag: [
            math.exp(each["log_s"]) - 1 - each["log_s"]
            for each in trainer.scatter_sample()
            if each["lag"] == lag
        ]
        for lag in (0, 1)
    }
    assert sees.seen[0].kl_of_batch == pytest.approx(sum(kl[1]) / len(kl[1])) != 0
    assert sees.seen[0].kl == pytest.approx(sum(kl[0] + kl[1]) / len(kl[0] + kl[1]))


def test_a_skipped_step_changes_no_weight_and_each_step_has_its_own_sequences() -> None:
    skips = Plans(StepPlan(skip=True))
    trainer = make(skips, Plans(StepPlan()), steps=2)
    assert not change(trainer, a_batch()).any()
    assert [len(seen.log_weight) for seen in skips.seen] == [2, 1] and trainer.steps == 2
    assert trainer.metrics()["trainer/skipped_step_share"] == 1.0


def test_tokens_that_the_policy_did_not_sample_are_in_no_weight() -> None:
    batch = a_batch()
    planted = batch.sampled.nonzero()[0]
    foreign = batch.provenance.clone()
    foreign[planted] = int(Provenance.FOREIGN)
    found = []
    for behavior in (-0.5, -50.0):
        logp = batch.behavior_logp.clone()
        logp[planted] = behavior
        sees = Plans(StepPlan())
        trainer = make(sees)
        train_on(trainer, replace(batch, provenance=foreign, behavior_logp=logp))
        found.append(sees.seen[0].log_weight)
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("route", ["snapshot_old", "current_recompute"])
def test_signals_have_the_entropy_of_every_sampled_token(route: str) -> None:
    """It is that of the whole distribution at the engine's temperature, in nats."""
    seen: list[Signals] = []

    def look(batch: Batch, signals: Signals) -> Shaped:
        seen.append(signals)
        return same(batch, signals)

    batch = a_batch()
    make(Shapes(look), route=route).prepare(batch)
    assert not len(seen.pop().entropy)
    trainer = make(Shapes(look), route=route, needs=frozenset({"entropy"}))
    trainer.prepare(batch)
    policy = trainer.policy
    for start, end in batch.spans():
        row = batch.tokens[None, start:end]
        with torch.no_grad():
            logits = policy.model(input_ids=row, use_cache=False).logits[0, :-1]
        whole = logits.double().log_softmax(-1)
        expected = torch.cat([whole.new_zeros(1), -(whole.exp() * whole).sum(-1)])
        expected = expected.where(batch.sampled[start:end], 0.0)
        torch.testing.assert_close(seen[0].entropy[start:end], expected)


def test_gradient_norms_are_those_of_each_sequence_alone() -> None:
    """They change neither the gradient of the loss nor the weights."""
    found: list[Tensor] = []

    def look(batch: Batch, signals: Signals) -> Shaped:
        found.extend(signals.gradient_norms([2, 0], part) for part in ("full", "head"))
        return same(batch, signals)

    batch = a_batch()
    trainer = make(Shapes(look))
    expected = []
    for i in (2, 0):
        start, end = batch.spans()[i]
        row = batch.tokens[None, start:end]
        model = trainer.policy.model
        hidden = model.base_model(input_ids=row, use_cache=False).last_hidden_state[0, :-1]
        weight = model.get_output_embeddings().weight
        sums = []
        for rows in (hidden, hidden.detach()):
            logp = (rows @ weight.T).log_softmax(-1).gather(1, row[0, 1:, None]).squeeze(1)
            sums.append(logp[batch.sampled[start + 1 : end]].sum())
        whole = torch.autograd.grad(sums[0], list(model.parameters()))
        head = torch.autograd.grad(sums[1], weight)
        expected.append([torch.cat([g.flatten() for g in each]).norm() for each in (whole, head)])
    after = gradient(trainer, batch)
    torch.testing.assert_close(torch.stack(found).T, torch.tensor(expected).double())
    torch.testing.assert_close(after, gradient(make(Shapes(same)), batch), rtol=0, atol=1e-15)


def test_a_ratio_and_an_objective_replace_those_of_the_loss() -> None:
    class Doubled:
        def log_ratio(self, logp: Tensor, old_logp: Tensor, batch: Batch) -> Tensor:
            return torch.where(batch.sampled, logp - logp.detach() + math.log(2), 0.0)

    class Quadrupled:
        def surrogate(self, log_ratio: Tensor, batch: Batch, options: ObjectiveConfig) -> Surrogate:
            assert options.loss_type == "ppo_clip"
            return none(log_ratio, 4 * batch.advantage)

    class Plain(Doubled):
        def log_ratio(self, logp: Tensor, old_logp: Tensor, batch: Batch) -> Tensor:
            return torch.where(batch.sampled, logp - logp.detach(), 0.0)

    for route in ("snapshot_old", "interp_prox_linear"):
        plain = gradient(make(Plain(), route=route), a_batch())
        changed = gradient(make(Doubled(), Quadrupled(), route=route), a_batch())
        torch.testing.assert_close(changed, 8 * plain, rtol=1e-9, atol=1e-12)
        unclipped = gradient(make(Plain(), Quadrupled(), route=route), a_batch())
        torch.testing.assert_close(unclipped, 4 * plain, rtol=1e-9, atol=1e-12)


TOKEN_TECHNIQUES = tuple(
    name
    for name, entry in all_techniques().items()
    if entry.slot in ("ratio", "shaper", "objective", "controller")
)


WITHOUT_RATIO = ("opmd",)
"""Techniques whose loss does not depend on the ratio of a token."""
REQUIRED: dict[str, dict[str, float]] = {"estr": {"tau": 100.0}}
"""Options without a default that a run can have."""


def planted(name: str, where: Callable[[Batch], Tensor], log_ratio: float) -> Tensor:
    """Return the change of the weights by a step with a technique.

    `log_ratio` is added to log pi / mu and to log pi / pi_old of some tokens.
    """
    entry = all_techniques()[name]
    trainer = make(entry.makes(entry.options(**REQUIRED.get(name, {}))), needs=entry.requires)
    batch = a_batch()
    batch = replace(batch, group=(0, 0, 0), engine_entropy=torch.ones(len(batch.tokens)))
    tokens = where(batch)
    logps = trainer.old.logps

    def old_logps(batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        values, exact = logps(batch, now)
        return values - log_ratio * where(batch), exact

    trainer.old.logps = old_logps  # type: ignore[method-assign]
    behavior_logp = batch.behavior_logp - log_ratio * tokens
    return change(trainer, replace(batch, behavior_logp=behavior_logp))


@pytest.mark.parametrize("name", TOKEN_TECHNIQUES)
def test_a_token_that_was_not_sampled_changes_nothing_in_any_technique(name: str) -> None:
    """Not even with a log-ratio of 50. A sampled token with one of 0.5 changes the step, except
    with a loss that has no ratio.
    """
    plain = planted(name, lambda batch: ~batch.sampled, 0.0)
    assert plain.any()
    assert torch.equal(planted(name, lambda batch: ~batch.sampled, 50.0), plain)
    moved = not torch.equal(planted(name, lambda batch: batch.sampled, 0.5), plain)
    assert moved == (name not in WITHOUT_RATIO)
