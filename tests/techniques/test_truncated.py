"""Test `truncated`: which episodes are cut off, both rules, and the effect on long answers.

In the toy, a policy chooses a short or a long answer. Both are right equally often, but half of the
long ones reach the limit before they end.
"""

from typing import Any

import pytest

from tests.support.bandit import Learner
from tests.support.groups import context, group, made
from unstale.algorithms.advantages import grpo
from unstale.config import ConfigError, RunConfig
from unstale.config.options import override
from unstale.lint import check
from unstale.records import Group
from unstale.research.techniques.truncated import Truncated, TruncatedConfig


def selected(items: Group, **options: Any) -> Group:
    seen = context()
    (result,) = Truncated(TruncatedConfig(**options)).select([items], seen)
    cut = [item.stop != "done" for item in items.finished]
    assert seen.metrics == {"truncated/share": sum(cut) / len(cut)}
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


def test_an_episode_whose_last_reply_was_cut_is_cut_off() -> None:
    whole, cut = made(0), made(0, stop="cut_reply")
    assert selected(group(whole, cut)).trajectories == (whole,)


def test_a_success_and_a_wrong_format_are_not_cut_off() -> None:
    success, unread = made(1, stop="cut_reply"), made(0, stop="invalid_format")
    seen = context()
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


SHORT = [(0.6, {"reward": 1}), (0.4, {"reward": 0})]
LONG = [(0.3, {"reward": 1}), (0.2, {"reward": 0}), (0.5, {"reward": 0, "stop": "max_tokens"})]


def share_of_long(**options: Any) -> float:
    """Return the probability of a long answer after 20 steps."""
    parts = {"truncated": Truncated(TruncatedConfig(**options))} if options else {}
    learner = Learner([SHORT, LONG], [0.0, 0.0])
    for _ in range(20):
        learner.step(parts)
    return float(learner.p[1])


def test_a_policy_that_is_graded_0_for_cut_offs_shortens_and_a_masked_one_does_not() -> None:
    """Measured: the share of long answers goes from 0.50 to 0.05, with `mask` to 0.47, with
    `reward` to 0.48, and with a penalty of 0.3 to 0.10.
    """
    assert share_of_long() < 0.2
    assert abs(share_of_long(rule="mask") - 0.5) < 0.1
    assert abs(share_of_long(rule="reward") - 0.5) < 0.1
    assert share_of_long(rule="reward", penalty=0.3) < 0.25
