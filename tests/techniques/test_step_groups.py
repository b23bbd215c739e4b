"""Test `step_groups`: the formulas of its four rules, and the variance of the gradient.

The toy is an environment of five observed states, two actions and five turns, whose reward depends
on the visited states and the actions. The policy is uniform, and depends on the state, or also on
the last action.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from tests.support.groups import context, group, made
from unstale.config import ConfigError
from unstale.records import ContextPiece, Sampled, ScoredTrajectory, Trajectory
from unstale.research.techniques.step_groups import StepGroups, StepGroupsConfig

A, B, C = 10, 11, 12
PLAIN = {"discount": 1.0, "std": False}
SEEDS, GROUPS, SIZE, TURNS = 20, 12, 8, 5


def advantages(
    items: Sequence[Trajectory], inherited: Sequence[float | tuple[float, ...]], **options: object
) -> list[tuple[float, ...]]:
    scored = [
        ScoredTrajectory(item, value if isinstance(value, tuple) else (value,))
        for item, value in zip(items, inherited, strict=True)
    ]
    technique = StepGroups(StepGroupsConfig(**options))  # type: ignore[arg-type]
    result = technique.recredit([group(*items)], scored, context())
    assert [each.trajectory for each in result] == list(items)
    return [each.advantage for each in result]


def three() -> list[Trajectory]:
    """Observations (A, B), (C, B) and (A, B), returns 1, 0 and 0."""
    plans = [(1, A), (0, C), (0, A)]
    return [
        made(reward, turns=[(first, 5), (B, 6)], episode=number)
        for number, (reward, first) in enumerate(plans)
    ]


def test_hgpo_weighs_longer_shared_histories_more() -> None:
    """Turn 2 of the first episode: a_1 = 2/3 with weight 2, a_2 = 1/2 with weight 3. In turn 1,
    the second episode has no equal, so all its terms are 0."""
    found = advantages(three(), [0, 0, 0], rule="hgpo", episode=False, **PLAIN)
    assert found[0] == pytest.approx((0.5, (2 * 2 / 3 + 3 / 2) / 5))
    assert found[1] == pytest.approx((0.0, -1 / 3))
    with_episode = advantages(three(), [0.6, 0, 0], rule="hgpo", alpha=0.0, **PLAIN)
    assert with_episode[0][1] == pytest.approx((0.6 + 2 / 3 + 1 / 2) / 3)


def test_gigpo_adds_the_comparison_of_equal_observations() -> None:
    """It is `hgpo` without a history, if the episode's advantage does not count there."""
    found = advantages(three(), [1.0, -0.5, -0.5], rule="gigpo", weight=0.5, **PLAIN)
    assert found[0] == pytest.approx((1 + 0.25, 1 + 1 / 3))
    alone = advantages(three(), [0, 0, 0], rule="gigpo", **PLAIN)
    assert alone == advantages(three(), [0, 0, 0], rule="hgpo", history=0, episode=False, **PLAIN)


def test_returns_are_discounted_and_divided_by_the_deviation_of_a_population() -> None:
    items = [
        made(1, turns=[(A, 5), (B, 6)], episode=0, turn_rewards=(1.0, 0.0)),
        made(0, turns=[(A, 5), (B, 6)], episode=1),
    ]
    found = advantages(items, [0, 0], rule="gigpo", discount=0.5, std=False)
    assert found == [pytest.approx((0.75, 0.5)), pytest.approx((-0.75, -0.5))]
    scaled = advantages(items, [0, 0], rule="gigpo", discount=0.5)
    assert scaled == [pytest.approx((1.0, 1.0), rel=1e-5), pytest.approx((-1, -1), rel=1e-5)]


def test_two_level_compares_turns_with_the_same_number() -> None:
    items = [made(1, turns=[(A, 5), (B, 6)], episode=0), made(0, turns=[(C, 5)], episode=1)]
    found = advantages(items, [1.0, -1.0], rule="two_level", discount=0.5, std=False)
    assert found == [pytest.approx((1.25, 1.0)), pytest.approx((-1.25,))]


def test_salt_shares_the_advantages_of_equal_transitions() -> None:
    """The first turns of both have the same action, and lead to the same observation."""
    items = [made(r, turns=[(A, 5), (B, 6 + r)], episode=r) for r in (0, 1)]
    assert advantages(items, [-1, 1], rule="salt") == [(0, -1), (0, 1)]
    assert advantages(items, [(-1, -3), (3, 1)], rule="salt") == [(1, -3), (1, 1)]
    other_end = [made(r, turns=[(A, 5), (B + r, 6)], episode=r) for r in (0, 1)]
    assert advantages(other_end, [-1, 1], rule="salt") == [(-1, -1), (1, 1)]


def test_a_reply_in_two_pieces_is_one_action_and_branches_keep_their_advantage() -> None:
    whole = made(0, turns=[(A, 5), (B, 6)], episode=1)
    parts = (Sampled((5,), (-1.0,), 0), Sampled((), (), 1), ContextPiece((B,)))
    branch = made(episode=2)
    cut = made(1, episode=0, branches=(branch,))
    pieces = (ContextPiece((A,)), *parts, Sampled((6, 7), (-1.0, -1.0), 1))
    cut = Trajectory(pieces, cut.rewards, "done", cut.task, 0, 0, branches=(branch,))
    scored = [ScoredTrajectory(each, (1.0,)) for each in (cut, branch)]
    scored.append(ScoredTrajectory(whole, (-1.0,)))
    seen = context()
    result = StepGroups(StepGroupsConfig(rule="salt")).recredit([group(cut, whole)], scored, seen)
    assert [each.advantage for each in result] == [(0.0, 1.0), (1.0,), (0.0, -1.0)]
    assert seen.metrics == {"step_groups/shared_share": 0.5}


def test_an_option_of_another_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"step_groups\.history is an option of hgpo"):
        StepGroupsConfig(rule="salt", history=3)


@cache
def episodes(seed: int) -> list[list[tuple[Trajectory, list[tuple[int, int, int]]]]]:
    """Return groups of episodes, each with its states, last actions and actions."""
    noise = np.random.default_rng(seed)
    following, points = noise.integers(0, 5, (5, 2)), noise.random((5, 2)) < 0.3
    batch = []
    for _ in range(GROUPS):
        siblings = []
        for number in range(SIZE):
            state, last, reward = 0, 0, 0.0
            path = []
            for action in noise.integers(0, 2, TURNS).tolist():
                path.append((state, last, action))
                reward += points[state, action]
                state, last = int(following[state, action]), action
            turns = [(10 + state, 20 + action) for state, _, action in path]
            siblings.append((made(reward, turns=turns, episode=number), path))
        batch.append(siblings)
    return batch


def variance(technique: StepGroups | None, *, sees_action: bool) -> tuple[float, np.ndarray]:
    """Return the variance of a group's gradient divided by its squared mean, and the gradients."""
    scatter = signal = 0.0
    gradients = []
    for seed in range(SEEDS):
        estimates = []
        for siblings in episodes(seed):
            items = [item for item, _ in siblings]
            mean = sum(item.reward for item in items) / SIZE
            scored = [ScoredTrajectory(item, (item.reward - mean,)) for item in items]
            if technique:
                scored = technique.recredit([group(*items)], scored, context())
            gradient = np.zeros((10, 2))
            for each, (_, path) in zip(scored, siblings, strict=True):
                values = np.broadcast_to(each.advantage, TURNS)
                for value, (state, last, action) in zip(values, path, strict=True):
                    row = state + 5 * last * sees_action
                    gradient[row] -= value / 2
                    gradient[row, action] += value
            estimates.append(gradient / SIZE)
        found = np.array(estimates)
        spread = found.var(0, ddof=1).sum()
        scatter += spread
        signal += (found.mean(0) ** 2).sum() - spread / GROUPS
        gradients.append(found)
    return scatter / signal, np.array(gradients)


@pytest.mark.costly
def test_step_groups_lower_the_variance_where_states_come_again() -> None:
    """Measured with 60 groups for each of 24 seeds: 0.53 GRPO, 0.48 GiGPO, 0.45 HGPO."""
    grpo, plain = variance(None, sees_action=False)
    gigpo, _ = variance(StepGroups(StepGroupsConfig(**PLAIN)), sees_action=False)
    hgpo, _ = variance(StepGroups(StepGroupsConfig(rule="hgpo", **PLAIN)), sees_action=False)
    assert gigpo < 0.97 * grpo and hgpo < 0.93 * grpo
    # The law of SALT: no change where the policy depends on the key alone.
    salt = StepGroups(StepGroupsConfig(rule="salt"))
    np.testing.assert_allclose(variance(salt, sees_action=False)[1], plain, atol=1e-12)


@pytest.mark.costly
def test_salt_lowers_the_variance_of_a_policy_that_sees_more_than_the_key() -> None:
    """Measured with 60 groups for each of 24 seeds: 0.68 GRPO, 0.60 SALT."""
    grpo, _ = variance(None, sees_action=True)
    salt, _ = variance(StepGroups(StepGroupsConfig(rule="salt")), sees_action=True)
    assert salt < 0.95 * grpo
