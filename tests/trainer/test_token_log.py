"""Test the values of trained tokens that the trainer collects for the journal.

Flags, weights and log-ratios follow their formulas on plain forward passes. They do not depend on
microbatches or ranks. They name the optimizer step of the batch that trained on a token, the route
of a replayed token, and what a technique changed. A trainer that keeps none collects none.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.ranks import run_ranks
from tests.trainer.test_ranks import STEPS, VARIANTS, batch_of
from tests.trainer.test_techniques import Shapes
from unstale.builders import build_old_logps, build_scorer, build_trainer
from unstale.config import (
    CorrectionConfig,
    JournalConfig,
    ObjectiveConfig,
    OldLogpsConfig,
    RunConfig,
    TrainerConfig,
)
from unstale.config.techniques import Need
from unstale.model.lora import Lora
from unstale.model.peers import SINGLE_PROCESS, RankGroup
from unstale.model.policy import Policy
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.records import Batch, Provenance, StoredLogps, collate
from unstale.techniques.hooks import Shaped, Signals, Techniques
from unstale.testing import episode, nudge, plain_logps, tiny_policy
from unstale.token_values import TokenFlag, TokenValues
from unstale.trainer import train_on
from unstale.trainer.local import LocalTrainer

PLANS: tuple[tuple[list[int | tuple[int, int]], float], ...] = (
    ([4, (6, 0), 3, (8, 1)], 1.0),
    ([5, (12, 1)], -0.5),
    ([2, (9, 0)], 0.0),
    ([7, (9, 0), 2, (5, 1), 3], -2.0),
    ([3], 1.0),
    ([3, (12, 0)], 1.0),
    ([3, (12, 0)], -1.0),
)
VETOED = 5
"""The sequence with an impossible token."""


def make(
    *shapers: object,
    route: str = "snapshot_old",
    needs: frozenset[Need] = frozenset(),
    share: float = 1.0,
    **sections: Any,
) -> LocalTrainer:
    """Return a trainer at version 1 whose route has versions 0 and 1."""
    policy = tiny_policy()
    trainer = sections.pop("trainer", {})
    config = RunConfig(
        recipe="",
        max_steps=10,
        trainer=TrainerConfig(**{"optimizer": "SGD", "lr": 0.1} | trainer),
        old_logps=OldLogpsConfig(route=route),
        journal=JournalConfig(token_share=share),
        **sections,
    )
    old = build_old_logps(config.old_logps, LocalScorer(policy, 1.0, 64))
    old.on_published(live={0})
    nudge(policy, seed=1)
    policy.version = 1
    old.on_published(live={0, 1})
    named = Techniques({str(number): each for number, each in enumerate(shapers)}, needs=needs)
    return LocalTrainer(policy, config, old, techniques=named)


def true_logps(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return old_logp and logp by plain forward passes with version 0 and with version 1."""
    before, now = tiny_policy(), tiny_policy()
    nudge(now, seed=1)
    passes = []
    for policy in (before, now):
        rows = [plain_logps(policy, batch.tokens[a:b].tolist()) for a, b in batch.spans()]
        passes.append(torch.cat(rows))
    return torch.where(batch.version == 0, passes[0], passes[1]), passes[1]


def a_batch() -> Batch:
    """Return a batch with tokens of two versions. Their discrepancy is 1/3, 1 or 3, or e^-6."""
    batch = collate([episode(i, plan, advantage=value) for i, (plan, value) in enumerate(PLANS)])
    old_logp, _ = true_logps(batch)
    places = torch.arange(len(batch.tokens))
    log_d = (places % 3 - 1) * math.log(3) * (places % 2)
    start, _ = batch.spans()[VETOED]
    log_d[start + 5] = -6.0
    behavior = torch.where(batch.sampled, old_logp - log_d, 0.0).float()
    return replace(batch, behavior_logp=behavior, group=tuple(range(len(PLANS))))


def learn(trainer: LocalTrainer, batch: Batch) -> dict[int, TokenValues]:
    train_on(trainer, batch)
    found = trainer.tokens()
    assert [each.episode for each in found] == sorted({each.episode for each in found})
    return {each.episode: each for each in found}


def flags(each: TokenValues, flag: TokenFlag) -> list[bool]:
    return each.has(flag).tolist()


def test_flags_weights_and_ratios_follow_their_formulas() -> None:
    batch = a_batch()
    old_logp, logp = true_logps(batch)
    trainer = make(
        correction=CorrectionConfig(mode="mask_weight", high=2.0, token_veto_threshold=0.01),
        objective=ObjectiveConfig(clip_low=0.1, clip_high=0.1, ratio_cap=1.2),
    )
    found = learn(trainer, batch)
    assert sorted(found) == [0, 1, 2, 3, 5, 6]  # the other one has no sampled token
    number: dict[str, int] = dict.fromkeys(("masked", "clipped_low", "clipped_high", "capped"), 0)
    for i, each in found.items():
        start, end = batch.spans()[i]
        at = torch.arange(start, end)[batch.sampled[start:end]]
        assert (each.group, each.route) == (i, "snapshot_old")
        assert each.advantage.tolist() == [PLANS[i][1]] * len(at)
        if i == 2:  # its advantage is 0
            assert each.minibatch is None and set(each.outcome) == {"skipped"}
            assert np.isnan([each.log_d, each.log_s, each.weight, each.entropy]).all()
            assert not each.flags.any()
            continue
        assert all(flags(each, TokenFlag.EXACT))
        log_d = (old_logp - batch.behavior_logp)[at].numpy()
        assert np.abs(each.log_d - log_d).max() < 1e-5
        d = np.exp(log_d)
        inside = (d >= 0.5) & (d <= 2)
        assert flags(each, TokenFlag.VETOED) == [i == VETOED] * len(at)
        assert flags(each, TokenFlag.MASKED) == (~inside & (i != VETOED)).tolist()
        assert not any(flags(each, TokenFlag.DROPPED))
        kept = inside & (i != VETOED)
        assert np.allclose(each.weight, np.where(kept, d, 0), atol=1e-4)
        assert ((each.weight == 0) == ~kept).all()
        if i == VETOED:  # nothing is left of it
            assert each.minibatch is None and np.isnan(each.log_s).all()
            assert set(each.outcome) == {"vetoed"}
            continue
        assert each.minibatch == 0
        log_s = (logp - old_logp)[at].numpy()
        s = np.exp(log_s)
        assert np.abs(each.log_s - log_s).max() < 1e-5
        assert ((np.abs(each.log_s) < 1e-5) == (batch.version[at] == 1).numpy()).all()
        low, high = (PLANS[i][1] < 0) & (s < 0.9), (PLANS[i][1] > 0) & (s > 1.1)
        assert flags(each, TokenFlag.CLIPPED_LOW) == low.tolist()
        assert flags(each, TokenFlag.CLIPPED_HIGH) == high.tolist()
        capped = kept & (d * s > 1.2)
        assert flags(each, TokenFlag.CAPPED) == capped.tolist()
        names = np.select(
            [~inside, low, high, capped],
            ["masked", "clipped_low", "clipped_high", "capped"],
            "kept",
        )
        assert each.outcome == names.tolist()
        for name in number:
            number[name] += int((names == name).sum())
    assert min(number.values()) >= 2, number


def test_values_do_not_depend_on_the_cut_into_microbatches() -> None:
    batch = a_batch()
    one = learn(make(), batch)
    two = learn(make(trainer={"max_tokens_per_microbatch": 8}), batch)
    assert one.keys() == two.keys()
    for i, each in one.items():
        require_close(each, two[i])


def require_close(one: TokenValues, two: TokenValues) -> None:
    """Compare all but entropies, of which each cut into microbatches measures others."""
    assert (one.group, one.episode, one.route) == (two.group, two.episode, two.route)
    assert one.minibatch == two.minibatch and one.flags.tolist() == two.flags.tolist()
    for name in ("log_d", "log_s", "weight", "advantage"):
        np.testing.assert_allclose(getattr(one, name), getattr(two, name), rtol=0, atol=2e-5)


def test_each_token_has_the_optimizer_step_that_trained_on_it() -> None:
    """Its log S is that of the weights before this step, so it is 0 only in the first one."""
    found = learn(make(trainer={"minibatches_per_batch": 2, "lr": 1.0}), a_batch())
    steps = {i: each.minibatch for i, each in found.items()}
    assert steps == {0: 0, 1: 1, 2: None, 3: 1, 5: 0, 6: 1}
    batch = a_batch()
    for i in (0, 1, 3):
        start, end = batch.spans()[i]
        current = batch.version[start:end][batch.sampled[start:end]].numpy() == 1
        assert current.any() and ((found[i].log_s[current] == 0).all()) == (steps[i] == 0)


def test_a_share_of_groups_is_collected() -> None:
    batch = replace(a_batch(), group=(0, 1, 2, 3, 4, 5, 5))
    assert sorted(learn(make(share=0.25), batch)) == [0, 2, 5, 6]
    assert learn(make(share=0.0), batch) == {}
    assert learn(make(), replace(batch, group=())) == {}  # a batch of supervised training


def test_with_an_entropy_bonus_every_token_has_its_entropy() -> None:
    batch = a_batch()
    trainer = make(objective=ObjectiveConfig(entropy_coef=0.1))
    (part,) = trainer.prepare(batch)
    trainer.backward(part)
    for each in trainer.tokens():
        start, end = batch.spans()[each.episode]
        row = batch.tokens[None, start:end]
        with torch.no_grad():
            logits = trainer.policy.model(input_ids=row, use_cache=False).logits[0, :-1]
        logps = logits.double().log_softmax(-1)
        entropy = torch.cat([torch.zeros(1), -(logps.exp() * logps).sum(-1)])
        expected = entropy[batch.sampled[start:end]].numpy()
        np.testing.assert_allclose(each.entropy, expected, rtol=0, atol=1e-5)


def test_a_technique_that_drops_tokens_or_changes_advantages_is_seen() -> None:
    """It also gives every token its entropy, if it needs entropies."""

    def shape(batch: Batch, signals: Signals) -> Shaped:
        return Shaped(
            batch.advantage + 0.5, batch.trained & (torch.arange(len(batch.tokens)) % 5 > 0)
        )

    needs: frozenset[Need] = frozenset({"entropy"})
    for route in ("snapshot_old", "interp_prox_linear"):
        batch = a_batch()
        trainer = make(
            Shapes(shape),
            route=route,
            needs=needs,
            correction=CorrectionConfig(mode="mask", high=2.0),
        )
        found = learn(trainer, batch)
        dropped = 0
        for i, each in found.items():
            start, end = batch.spans()[i]
            place = torch.arange(start, end)[batch.sampled[start:end]].numpy()
            assert each.advantage.tolist() == [PLANS[i][1] + 0.5] * len(place)
            assert np.isfinite(each.entropy).all()
            lost = each.has(TokenFlag.DROPPED)
            assert not (lost & (place % 5 > 0)).any()
            assert ((place % 5 == 0) == (lost | each.has(TokenFlag.MASKED)))[place % 5 == 0].all()
            dropped += each.outcome.count("dropped")
        assert dropped >= 5


def test_a_route_that_computes_its_values_in_the_pass_gives_them_too() -> None:
    batch = a_batch()
    _, logp = true_logps(batch)
    found = learn(make(route="interp_prox_linear"), batch)
    start, end = batch.spans()[0]
    at = torch.arange(start, end)[batch.sampled[start:end]]
    each = found[0]
    assert (each.route, each.minibatch) == ("interp_prox_linear", 0)
    behavior = batch.behavior_logp[at].numpy()
    np.testing.assert_allclose(behavior + each.log_d + each.log_s, logp[at].numpy(), atol=1e-5)
    assert np.isnan(found[2].log_d).all() and found[2].minibatch is None
    assert not each.has(TokenFlag.EXACT)[:6].any()


def test_a_replayed_episode_has_its_stored_values() -> None:
    batch = a_batch()
    start, end = batch.spans()[3]
    is_replayed = torch.zeros_like(batch.sampled)
    is_replayed[start:end] = batch.sampled[start:end]
    stored = torch.where(is_replayed, batch.behavior_logp - 0.25, 0.0)
    exact = is_replayed & (torch.arange(len(batch.tokens)) % 2 == 0)
    again = replace(
        batch,
        provenance=torch.where(is_replayed, int(Provenance.REPLAYED), batch.provenance),
        stored=StoredLogps(stored, exact),
    )
    found = learn(make(), again)
    assert {each.route for i, each in found.items() if i != 3} == {"snapshot_old"}
    each = found[3]
    assert each.route == "stored" and np.abs(each.log_d + 0.25).max() < 1e-6
    assert flags(each, TokenFlag.EXACT) == exact[is_replayed].tolist()


def values_of(peers: RankGroup, folder: Path, variants: Mapping[str, RunConfig]) -> Any:
    return {name: learn_on(peers, folder, config) for name, config in variants.items()}


def learn_on(peers: RankGroup, folder: Path, config: RunConfig) -> list[list[TokenValues]]:
    """Train for some steps. Return the values of each step."""
    options = config.trainer
    lora = Lora(options.lora_rank) if options.lora_rank else None
    policy = Policy.load(folder, dtype=options.dtype, lora=lora, peers=peers)
    trainer, _ = build_trainer(config, policy, build_scorer(config, policy))
    found = []
    for step in range(STEPS):
        policy.version = step
        trainer.old.on_published(range(max(0, step - 2), step + 1))
        batch = batch_of(step)
        found.append([*learn(trainer, replace(batch, group=(0, 0, 1, 1, 2))).values()])
    trainer.old.close()
    return found


def in_context_groups(peers: RankGroup, folder: Path, variants: Mapping[str, RunConfig]) -> Any:
    return values_of(peers.in_context_groups(2), folder, variants)


@pytest.mark.costly(cases=0)
@pytest.mark.parametrize("function", [values_of, in_context_groups])
def test_ranks_have_the_values_of_one_process(tmp_path: Path, function: Any) -> None:
    tiny_policy(seed=3).save(tmp_path)
    names = ("own", "two steps a batch", "inline", "techniques")
    variants = {
        name: replace(VARIANTS[name], journal=JournalConfig(token_share=0.6)) for name in names
    }
    alone = values_of(SINGLE_PROCESS, tmp_path, variants)
    first, *_ = run_ranks(2, function, tmp_path, variants)
    for name in names:
        for one, two in zip(alone[name], first[name], strict=True):
            assert [each.group for each in one] == [each.group for each in two] == [0, 0, 2]
            for left, right in zip(one, two, strict=True):
                require_close(left, right)
        assert {each.minibatch for step in alone[name] for each in step} >= {0}
