"""Test the critic of `advantage.estimator = gae` in the trainer.

Advantages are those of GAE on the critic's forecasts, and the loss is its formula: the same for any
cut into micro-batches and on two ranks. Single episodes without a group have a gradient. In the
warm-up only the critic learns. A restored trainer goes on bit for bit, with a head on the policy's
layers and with layers of its own. The critic learns to forecast.
"""

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.ranks import run_ranks
from unstale.algorithms.advantages import gae
from unstale.algorithms.gae import gae_advantage
from unstale.builders import build_old_logps
from unstale.config import (
    AdvantageConfig,
    CriticConfig,
    OldLogpsConfig,
    RunConfig,
    TrainerConfig,
)
from unstale.durability.checkpoint import Checkpoints, Progress
from unstale.model.peers import SINGLE_PROCESS, RankGroup
from unstale.model.policy import Policy
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.records import Batch, ContextPiece, Group, collate
from unstale.testing import checkpoint_round_trip, episode, tiny_policy
from unstale.trainer import train_on
from unstale.trainer.critic import token_rewards
from unstale.trainer.local import LocalTrainer

PLANS: tuple[tuple[list[Any], float, tuple[float, ...]], ...] = (
    ([4, (6, 0), 3, (2, 0)], 1.0, ()),
    ([5, (3, 0), 2, (4, 0)], -0.5, (0.25, 0.5)),
    ([2, (9, 0)], 0.0, ()),
    ([7, (2, 0), 2, (2, 0), 3], 2.0, (0.0, 1.0)),
)


def a_batch(first: int = 0) -> Batch:
    """Return a batch of groups of one episode each."""
    groups = []
    for number, (plan, reward, turn_rewards) in enumerate(PLANS, first):
        item = episode(number, plan).trajectory
        item = replace(item, rewards={"reward": reward}, turn_rewards=turn_rewards)
        groups.append(Group(item.task, (item,), number=number))
    return collate(gae(groups), groups=groups)


def make(
    policy: Policy,
    advantage: Mapping[str, Any] | None = None,
    critic: Mapping[str, Any] | None = None,
    **trainer: Any,
) -> LocalTrainer:
    config = RunConfig(
        recipe="",
        max_steps=10,
        advantage=AdvantageConfig(estimator="gae", **advantage or {}),
        critic=CriticConfig(**critic or {}),
        trainer=TrainerConfig(**{"lr": 1e-3, "grad_clip": 1e9} | trainer),
    )
    old = build_old_logps(OldLogpsConfig(route="rollout"), LocalScorer(policy, 1.0, 64))
    return LocalTrainer(policy, config, old)


def forecasts(trainer: LocalTrainer, batch: Batch) -> Tensor:
    """Return the forecast before each sampled token, from a plain pass over each sequence."""
    assert trainer.critic
    *weight, bias = trainer.critic.state()["head"]
    found = torch.zeros(len(batch.tokens))
    for start, end in batch.spans():
        row = batch.tokens[None, start:end]
        with torch.no_grad():
            hidden = trainer.policy.model.base_model(input_ids=row, use_cache=False)
        states = hidden.last_hidden_state[0, :-1]
        features = (states / states.norm(dim=-1, keepdim=True)).double()
        found[start + 1 : end] = (features @ torch.stack(weight) + bias).float()
    return torch.where(batch.sampled, found, 0.0)


def learn(trainer: LocalTrainer, batch: Batch) -> Mapping[str, float]:
    train_on(trainer, batch)
    return trainer.metrics()


def weights(trainer: LocalTrainer) -> Tensor:
    assert trainer.critic
    own = trainer.critic.state()["own"] or {"weights": {}}
    tensors = [*trainer.policy.weights().values(), *own["weights"].values()]
    head = trainer.critic.state()["head"]
    return torch.cat([each.flatten().clone() for each in (*tensors, head)])


def test_the_rewards_of_turns_follow_their_last_tokens() -> None:
    batch = a_batch()
    rewards = token_rewards(batch)
    start, end = batch.spans()[1]
    assert rewards[start:end].tolist() == [0] * 7 + [0.25] + [0] * 5 + [0.0]  # 0.5 - 0.5
    assert rewards.sum().item() == pytest.approx(1.0 + 0.25 + 0.0 + 3.0)
    wrong = replace(batch, turn_rewards=((1.0,), *batch.turn_rewards[1:]))
    with pytest.raises(ValueError, match="episode 0: 1 turn_rewards, 2 turns"):
        token_rewards(wrong)


@pytest.mark.parametrize("over", ["token", "turn"])
def test_advantages_are_gae_on_the_forecasts_of_the_newest_weights(over: str) -> None:
    trainer = make(
        tiny_policy(), {"lam": 0.8, "discount": 0.9, "over": over, "whiten": False}, {"lam": 0.5}
    )
    batch = a_batch()
    for _ in range(3):
        learn(trainer, batch)
    values = forecasts(trainer, batch)
    (part,) = trainer.prepare(batch)
    assert part.forecasts
    starts = part.forecasts.starts
    torch.testing.assert_close(part.forecasts.value[starts], values[starts], rtol=0, atol=1e-5)
    paid = batch.sampled.nonzero().squeeze(1)
    action = starts.cumsum(0) - 1
    rewards = torch.zeros(int(starts.sum()), dtype=torch.float64)
    rewards.index_add_(0, action[paid], token_rewards(batch)[paid])
    for lam, found in ((0.8, part.batch.advantage), (0.5, part.forecasts.target)):
        wanted = gae_advantage(
            rewards, values[starts], sequence=batch.sequence[starts], discount=0.9, lam=lam
        )
        if lam == 0.8:
            torch.testing.assert_close(
                found[paid].double(), wanted[action[paid]], rtol=0, atol=1e-5
            )
            assert (found[~batch.sampled] == 0).all()
        else:
            wanted = wanted + values[starts]
            torch.testing.assert_close(found[starts].double(), wanted, rtol=0, atol=1e-5)
    assert (len(rewards) == len(paid)) == (over == "token")


@pytest.mark.parametrize("model", ["trunk", "own"])
@pytest.mark.parametrize("over", ["token", "turn"])
def test_the_gradient_does_not_depend_on_the_cut_into_micro_batches(model: str, over: str) -> None:
    found = []
    for size in (1, 4096):
        trainer = make(
            tiny_policy(), {"over": over}, {"model": model}, max_tokens_per_microbatch=size
        )
        learn(trainer, a_batch())
        learn(trainer, a_batch(first=4))
        found.append(weights(trainer))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=2e-5)


def test_the_critic_s_gradient_reaches_the_layers_by_its_coefficient() -> None:
    """With rewards of 0 and a forecast of 0 only the critic's targets, moved here, have a loss."""
    norms = []
    for coef in (0.0, 0.1, 0.2):
        trainer = make(tiny_policy(), {"whiten": False}, {"coef": coef})
        assert trainer.critic
        trainer.critic._head[:-1] = 0.1
        (part,) = trainer.prepare(a_batch())
        assert part.forecasts
        silent = replace(part, batch=replace(part.batch, advantage=0 * part.batch.advantage))
        trainer.backward(silent)
        gradients = [each.grad for each in trainer.policy.model.parameters()]
        norms.append(torch.cat([each.flatten() for each in gradients if each is not None]).norm())
    assert norms[0] == 0
    torch.testing.assert_close(norms[2], 2 * norms[1])


def test_in_the_warm_up_only_the_critic_learns() -> None:
    trainer = make(tiny_policy(), critic={"warmup_steps": 2})
    assert trainer.critic
    for step in range(3):
        policy = torch.cat([each.flatten().clone() for each in trainer.policy.weights().values()])
        head = trainer.critic.state()["head"].clone()
        learn(trainer, a_batch())
        after = torch.cat([each.flatten() for each in trainer.policy.weights().values()])
        assert torch.equal(policy, after) == (step < 2)
        assert not torch.equal(head, trainer.critic.state()["head"])


def told_in_the_prompt(first: int) -> Batch:
    """Return a batch of new episodes, whose first word says the reward, with some noise."""
    groups = []
    for number in range(first, first + 24):
        item = episode(number, [(2, 0)]).trajectory
        told = ContextPiece((40 + number % 2, 7, 9))
        noise = random.Random(number).gauss(0, 0.1)
        item = replace(item, pieces=(told, *item.pieces), rewards={"reward": number % 2 + noise})
        groups.append(Group(item.task, (item,), number=number))
    return collate(gae(groups), groups=groups)


@pytest.mark.parametrize("model", ["trunk", "own"])
def test_the_critic_forecasts_new_episodes_after_few_batches(model: str) -> None:
    trainer = make(tiny_policy(), critic={"model": model})
    explained = [
        learn(trainer, told_in_the_prompt(24 * step))["critic/explained_variance"]
        for step in range(5)
    ]
    assert explained[0] == pytest.approx(0.0, abs=1e-6)
    assert min(explained[1:]) > 0.5


@pytest.mark.parametrize("options", [{}, {"model": "own"}, {"warmup_steps": 2}])
def test_a_restored_trainer_goes_on_as_if_it_had_never_stopped(options: dict[str, Any]) -> None:
    one = make(tiny_policy(), critic=options, minibatches_per_batch=2)
    learn(one, a_batch())
    state = checkpoint_round_trip(one.state())
    other = make(tiny_policy(seed=5), critic=options, minibatches_per_batch=2)
    other.restore(state)
    for trainer in (one, other):
        for number in range(2):
            learn(trainer, a_batch(first=number))
    assert torch.equal(weights(one), weights(other))


def learn_on_ranks(peers: RankGroup, folder: Path, options: Mapping[str, Any]) -> list[Tensor]:
    """Return the critic's head and the forecasts and advantages of a batch, after some steps."""
    trainer = make(Policy.load(folder, peers=peers), {"lam": 0.9}, options, lr=1e-4)
    assert trainer.critic
    for number in range(3):
        learn(trainer, a_batch(first=number))
    (part,) = trainer.prepare(a_batch())
    assert part.forecasts
    return [trainer.critic.state()["head"], part.forecasts.value, part.batch.advantage]


def test_two_ranks_learn_what_one_process_learns(tmp_path: Path) -> None:
    tiny_policy().save(tmp_path)
    alone = learn_on_ranks(SINGLE_PROCESS, tmp_path, {})
    for found in run_ranks(2, learn_on_ranks, tmp_path, {}):
        for ours, theirs in zip(found, alone, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def state_of(trainer: LocalTrainer) -> list[Tensor]:
    """Return the tensors of the critic's state."""
    assert trainer.critic
    state = trainer.critic.state()
    return [state["head"], state["squares"], state["products"]]


def save_on_ranks(peers: RankGroup, folder: Path, run: Path) -> tuple[str, list[Tensor]]:
    trainer = make(Policy.load(folder, peers=peers))
    learn(trainer, a_batch())
    checkpoints = Checkpoints(run, {"trainer": trainer}, peers=peers)
    return checkpoints.save(Progress(1, {}), trainer.policy), state_of(trainer)


def load_on_ranks(peers: RankGroup, folder: Path, run: Path, name: str) -> list[Tensor]:
    trainer = make(Policy.load(folder, peers=peers))
    checkpoints = Checkpoints(run, {"trainer": trainer}, peers=peers)
    checkpoints.restore(checkpoints.load(name))
    return state_of(trainer)


@pytest.mark.costly
def test_a_checkpoint_of_two_ranks_has_the_critic_for_any_number(tmp_path: Path) -> None:
    tiny_policy().save(tmp_path / "policy")
    folders = (tmp_path / "policy", tmp_path / "run")
    name, saved = run_ranks(2, save_on_ranks, *folders)[0]
    for loaded in (
        *run_ranks(2, load_on_ranks, *folders, name),
        *run_ranks(1, load_on_ranks, *folders, name),
    ):
        assert all(torch.equal(*pair) for pair in zip(loaded, saved, strict=True))
