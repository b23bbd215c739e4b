"""Test `proxy`: its figures by hand, and that they show a policy which learns only the reward."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from tests.support.groups import context, group, made
from unstale.algorithms.advantages import grpo
from unstale.config import ConfigError
from unstale.records import Group, Trajectory
from unstale.research.techniques.flawed_success_penalty import (
    FlawedSuccessPenalty,
    FlawedSuccessPenaltyConfig,
)
from unstale.research.techniques.proxy import Proxy, ProxyConfig
from unstale.techniques.hooks import Techniques


def measured(*groups: Group, score: str = "success") -> list[float]:
    """Return the means of reward and score, and the reversed and the equal share."""
    found = Proxy(ProxyConfig(score=score)).measure(groups, groups, context())
    names = ("reward_mean", "score_mean", "reversed_share", "equal_score_share")
    return [found[f"proxy/{name}"] for name in names]


def scored(reward: float, score: float) -> Trajectory:
    return made(reward, facts={"right": score})


def test_the_figures_by_hand() -> None:
    """Five pairs have different rewards: two are reversed, one has equal scores."""
    first = group(*(scored(*each) for each in ((3, 0.0), (2, 1.0), (2, 0.5), (1, 0.0))))
    assert measured(first, score="right") == pytest.approx([2.0, 0.375, 2 / 5, 1 / 5])
    second = group(*(made(each, facts={"success": each > 1}) for each in (0.5, 2.5)))
    assert measured(second) == [1.5, 0.5, 0.0, 0.0]
    assert measured(first, second)[:2] == [1.5, 0.5]  # those of the second group
    same = group(made({"judge": 2.0, "check": 0.0}), made({"judge": 1.0, "check": 1.0}))
    assert measured(same, score="check")[1] == 0.5
    assert all(math.isnan(each) for each in measured(same, score="check")[2:])  # equal sums


def test_a_score_that_nothing_has_is_refused_and_cut_episodes_are_left_out() -> None:
    cut = made(0.0, stop="max_turns")
    mixed = group(scored(1.0, 1.0), cut)
    assert measured(mixed, score="right")[:2] == [1.0, 1.0]
    assert all(math.isnan(each) for each in measured(group(cut), score="right"))
    with pytest.raises(
        ConfigError, match="no episode has such a fact or reward; they have reward, right"
    ):
        measured(mixed, score="write")
    with pytest.raises(ConfigError, match=r"is success, and no episode .*; they have even"):
        measured(group(made({"even": 1.0}), cut))
    with pytest.raises(ConfigError, match=r"proxy\.score must name"):
        ProxyConfig(score="")


def test_the_reward_is_the_trained_one_and_a_cut_off_episode_is_no_success() -> None:
    """A flawed success gets 0.5 less, and so less than a failure with 0.75."""
    flawed, half = (made(each, facts={"success": each, "flaw": 1.0}) for each in (1.0, 0.75))
    cut = made({}, stop="max_turns")
    parts = {
        "proxy": Proxy(ProxyConfig()),
        "flawed_success_penalty": FlawedSuccessPenalty(FlawedSuccessPenaltyConfig()),
    }
    _, metrics = Techniques(parts).credit(
        [group(flawed, half, cut)],
        progress=0.0,
        version=0,
        estimate=grpo,
        identify=lambda task: task.key,
    )
    assert metrics["proxy/reward_mean"] == pytest.approx((0.5 + 0.75 + 0) / 3)
    assert metrics["proxy/score_mean"] == pytest.approx(1 / 3)
    assert metrics["proxy/reversed_share"] == pytest.approx(1 / 3)


def test_a_part_of_a_batch_may_lack_the_score() -> None:
    proxy, without = Proxy(ProxyConfig(score="right")), group(made(1.0))
    part = replace(context(), whole=False)
    assert math.isnan(proxy.measure([without], [without], part)["proxy/score_mean"])
    with pytest.raises(ConfigError, match=r"proxy\.score is right, and no episode has"):
        proxy.measure([without], [without], context())


def test_a_later_batch_without_the_score_does_not_end_the_run() -> None:
    proxy = Proxy(ProxyConfig(score="right"))
    with_it, without = group(scored(1.0, 1.0)), group(made(1.0))
    proxy.measure([with_it], [with_it], context())
    found = proxy.measure([without], [without], context())
    assert all(math.isnan(each) for each in found.values())


def test_they_show_a_policy_that_learns_the_reward_and_loses_the_score() -> None:
    """One of 10 arms has the score 0 and the reward 2. The others have their score as reward.

    24 seeds, groups of 8. Measured at the first step and the last: reward 0.53 and 1.98, score 0.47
    and 0.01. Of the first batch's pairs with different rewards, 6% are reversed.
    """
    noise = torch.Generator().manual_seed(0)
    score = torch.linspace(0, 0.9, 10)
    reward = torch.where(torch.arange(10) == 0, 2.0, score)
    logits = torch.zeros(24, 10)
    logits[:, 0] = -1.0
    batches: list[Tensor] = []
    for _ in range(60):
        chance = logits.softmax(1)
        drawn = torch.multinomial(chance, 8, replacement=True, generator=noise)
        advantage = reward[drawn] - reward[drawn].mean(1, keepdim=True)
        each = advantage[..., None] * (one_hot(drawn, 10) - chance[:, None])
        logits = logits + each.mean(1)
        batches.append(drawn)
    first, last = (
        measured(
            *(group(*(scored(float(reward[i]), float(score[i])) for i in row)) for row in drawn),
            score="right",
        )
        for drawn in (batches[0], batches[-1])
    )
    assert last[0] > first[0] + 1 and last[1] < first[1] - 0.3
    assert first[2] > 0.02 and last[2] > 0.9
