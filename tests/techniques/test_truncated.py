"""Test `truncated`: which episodes are cut off, both rules, and the effect on long answers.

In the toy, a policy chooses a short or a long answer. Both are right equally often, but half of the
long ones reach the limit before they end.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.groups import context, group, made
from unstale.algorithms.advantages import grpo
from unstale.config import ConfigError, RunConfig
from unstale.config.options import override
from unstale.lint import check
from unstale.records import Group, Trajectory
from unstale.techniques import Techniques
from unstale.techniques.truncated import Truncated, TruncatedConfig

STOP, OTHER = 2, 7
"""The token that ends a reply, and another one. `made` has token 2 at the end."""


def selected(items: Group, *, stop_tokens: tuple[int, ...] = (STOP,), **options: Any) -> Group:
    seen = replace(context(), stop_tokens=stop_tokens)
    (result,) = Truncated(TruncatedConfig(**options)).select([items], seen)
    cut = [item.stop != "done" or item.tokens[-1] == OTHER for item in items.finished]
    expected = sum(cut) / len(cut) if stop_tokens else 0.0
    assert seen.metrics == {"truncated/share": expected}
    return result


def test_masked_episodes_have_no_gradient_and_are_not_in_the_mean_of_their_group() -> None:
    """Rewards 1, 0 and two cut-off episodes: the mean is 1/2, not 1/4."""
    right, wrong = made(1, episode=0), made(0, episode=1)
    turns, tokens = made(0, episode=2, stop="max_turns"), made(0, episode=3, stop="max_tokens")
    result = selected(group(right, turns, wrong, tokens))
    assert result.trajectories == (right, wrong) and result.unused == (turns, tokens)
    deviation = 0.5**0.5
    values = [each.advantage[0] for each in grpo([result])]
    assert values == pytest.approx([0.5 / deviation, -0.5 / deviation], abs=1e-5)


def test_a_reply_without_a_stop_token_was_cut_off() -> None:
    """Unless the tokens that end a reply are unknown, as with external agents."""
    whole, cut = made(0), made(0, turns=((1, OTHER),))
    earlier = made(0, turns=((1, OTHER), (1, STOP)))
    assert selected(group(whole, cut, earlier)).trajectories == (whole, earlier)
    assert selected(group(whole, cut), stop_tokens=()).trajectories == (whole, cut)


def test_a_success_and_a_wrong_format_are_not_cut_off() -> None:
    success, unread = made(1, turns=((1, OTHER),)), made(0, stop="invalid_format")
    seen = replace(context(), stop_tokens=(STOP,))
    (result,) = Truncated(TruncatedConfig()).select([group(success, unread)], seen)
    assert result.trajectories == (success, unread) and seen.metrics == {"truncated/share": 0.0}


def test_rule_reward_gives_the_mean_of_the_others_by_name_minus_the_penalty() -> None:
    ended = [made({"right": 1, "form": 0.5}), made({"right": 0, "form": 0.25})]
    cut = made({}, stop="max_turns")
    result = selected(group(ended[0], cut, ended[1]), rule="reward", penalty=0.125)
    assert result.trajectories[::2] == tuple(ended) and not result.unused
    graded = result.trajectories[1]
    assert graded.rewards == {"right": 0.5, "form": 0.375, "truncated": -0.125}
    assert graded.reward == 0.75 and not graded.success
    plain = selected(group(*ended, cut), rule="reward")
    assert [each.advantage[0] for each in grpo([plain])][2] == 0.0


def test_rule_reward_masks_where_no_episode_ended_by_itself() -> None:
    cut = [made({}, stop="max_turns"), made({}, stop="max_tokens")]
    result = selected(group(*cut), rule="reward")
    assert not result.trajectories and result.unused == tuple(cut)


def test_wrong_options_are_refused_and_the_linter_says_what_it_changes() -> None:
    base = RunConfig(recipe="mine", techniques="truncated")
    with pytest.raises(ConfigError, match=r"truncated\.penalty is an option of reward"):
        TruncatedConfig(penalty=0.1)
    with pytest.raises(ConfigError, match=r"rule = reward needs schedule\.group_size >= 2, got 1"):
        override(base, {"truncated.rule": "reward", "schedule.group_size": 1})
    assert "not trained on" in check(base).facts["techniques"]
    changed = override(base, {"truncated.rule": "reward", "truncated.penalty": 0.5})
    assert "mean reward of its siblings minus 0.5" in check(changed).facts["techniques"]


SEEDS, STEPS, GROUPS, SIZE = 24, 20, 2, 8
ANSWERS: list[list[list[Trajectory]]] = [
    [
        [made(right, turns=((length, STOP),), episode=seed) for right in (0, 1)]
        + [made(0, turns=((length, OTHER),), episode=seed, stop="max_tokens")]
        for length in (0, 1)
    ]
    for seed in range(SEEDS)
]
"""A wrong, a right and a cut-off answer for each seed and length. The seed is in `episode`, the
length in the first token."""


def share_of_long(**options: Any) -> float:
    """Return the probability of a long answer after training, mean over the seeds."""
    parts = {"truncated": Truncated(TruncatedConfig(**options))} if options else {}
    noise = torch.Generator().manual_seed(0)
    logits = torch.zeros(SEEDS)
    for _ in range(STEPS):
        share = logits.sigmoid()[:, None].expand(SEEDS, GROUPS * SIZE)
        long = torch.rand(share.shape, generator=noise) < share
        right = torch.rand(share.shape, generator=noise) < 0.6
        cut = long & (torch.rand(share.shape, generator=noise) < 0.5)
        kinds = zip(long.tolist(), torch.where(cut, 2, right.long()).tolist(), strict=True)
        answers = [
            [ANSWERS[seed][int(length)][kind] for length, kind in zip(*row, strict=True)]
            for seed, row in enumerate(kinds)
        ]
        groups = [
            group(*row[first : first + SIZE]) for row in answers for first in range(0, len(row), 8)
        ]
        scored, _ = Techniques(parts).credit(
            groups, progress=0.0, version=0, estimate=grpo, identify=lambda task: task.key
        )
        seeds = torch.tensor([each.trajectory.episode for each in scored])
        lengths = torch.tensor([each.trajectory.tokens[0] for each in scored])
        advantage = torch.tensor([each.advantage[0] for each in scored])
        gradient = torch.zeros(SEEDS).index_add(0, seeds, advantage * (lengths - share[seeds, 0]))
        logits = logits + 1.5 * gradient / (GROUPS * SIZE)
    return float(logits.sigmoid().mean())


def test_a_policy_that_is_graded_0_for_cut_offs_shortens_and_a_masked_one_does_not() -> None:
    """Measured: the share of long answers goes from 0.50 to 0.09, with `mask` to 0.50, with
    `reward` to 0.51, and with a penalty of 0.3 to 0.14.
    """
    assert share_of_long() < 0.2
    assert abs(share_of_long(rule="mask") - 0.5) < 0.1
    assert abs(share_of_long(rule="reward") - 0.5) < 0.1
    assert share_of_long(rule="reward", penalty=0.3) < 0.25
