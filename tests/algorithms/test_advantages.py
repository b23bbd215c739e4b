"""Test the advantage estimators against values worked out by hand.

- Every estimator returns one result per trajectory, in order, and has the same signature.
- Groups of one, and groups with equal rewards, get exactly 0, never NaN.
- Estimators that compare siblings ignore other groups, and shifts of all rewards of a group.
- A turn's advantage depends only on the rewards from that turn on.
- Each registered estimator, and each of its options, can be selected by name.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from inspect import signature
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from unstale.algorithms.advantages import ESTIMATORS as REGISTERED
from unstale.algorithms.advantages import (
    batch_advantage,
    dr_grpo,
    grpo,
    grpo_advantage,
    grpo_no_std,
    opo,
    opo_advantage,
    reinforce_batch,
    reward_to_go,
    rloo,
    rloo_advantage,
    rloo_first,
    rloo_first_advantage,
    turn_level,
)
from unstale.builders import build_advantage
from unstale.config import AdvantageConfig, ConfigError
from unstale.config.declared import choices
from unstale.records import (
    ContextPiece,
    Group,
    Piece,
    Sampled,
    ScoredTrajectory,
    Task,
    Trajectory,
    collate,
)

Estimator = Callable[[Sequence[Group]], list[ScoredTrajectory]]

ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "grpo_no_std": grpo_no_std,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "rloo_first": rloo_first,
    "opo": opo,
    "reinforce_batch": reinforce_batch,
    "reinforce_batch, raw": partial(reinforce_batch, group_baseline=False, by_tokens=False),
    "turn_level": turn_level,
    "turn_level, discounted": partial(turn_level, discount=0.5),
}
SIBLINGS = [name for name in ESTIMATORS if name != "reinforce_batch, raw"]
TASK = Task("toy", "train", 0)


def episode(
    *rewards: float, turns: int = 1, tokens: int = 2, turn_rewards: tuple[float, ...] = ()
) -> Trajectory:
    """Return a trajectory of `turns` replies of `tokens` tokens. A number is a reward channel."""
    pieces: list[Piece] = []
    for _ in range(turns):
        pieces += [ContextPiece((1,)), Sampled((2,) * tokens, (-0.5,) * tokens, version=0)]
    channels = MappingProxyType({f"channel{i}": reward for i, reward in enumerate(rewards)})
    return Trajectory(
        tuple(pieces) or (ContextPiece((1,)),),
        rewards=channels,
        stop="done",
        task=TASK,
        seed=0,
        turn_rewards=turn_rewards,
    )


def groups(*rewards: Sequence[float]) -> list[Group]:
    return [Group(TASK, tuple(episode(reward) for reward in row)) for row in rewards]


def values(credited: list[ScoredTrajectory]) -> list[float]:
    return [number for item in credited for number in item.advantage]


ROWS = ([1.0, 0.0, 0.0, 1.0], [0.3, 0.6, 0.9])
FLAT = tensor([reward for row in ROWS for reward in row], dtype=torch.float64)
GROUP = tensor([0, 0, 0, 0, 1, 1, 1])


def test_grpo() -> None:
    spread = math.sqrt(1 / 3)  # sample deviation of two ones and two zeros
    expected = [0.5 / spread, -0.5 / spread, -0.5 / spread, 0.5 / spread, -1.0, 0.0, 1.0]
    assert values(grpo(groups(*ROWS))) == pytest.approx(expected, rel=1e-5, abs=1e-12)


@pytest.mark.parametrize("estimator", [grpo_no_std, dr_grpo])
def test_grpo_without_deviation(estimator: Estimator) -> None:
    assert values(estimator(groups(*ROWS))) == pytest.approx([0.5, -0.5, -0.5, 0.5, -0.3, 0.0, 0.3])


def test_rloo_compares_with_the_others_only() -> None:
    others = [1 / 3, 2 / 3, 2 / 3, 1 / 3, 0.75, 0.6, 0.45]
    expected = [reward - mean for reward, mean in zip(FLAT.tolist(), others, strict=True)]
    assert values(rloo(groups(*ROWS))) == pytest.approx(expected)


def test_opo_weighs_the_baseline_by_length() -> None:
    group = Group(TASK, (episode(1.0, tokens=1), episode(0.0, tokens=3)))
    assert values(opo([group])) == pytest.approx([0.75, -0.25])


def test_opo_of_a_group_without_action_tokens_is_zero() -> None:
    group = Group(TASK, (episode(1.0, turns=0), episode(0.0, turns=0)))
    assert values(opo([group])) == [0.0, 0.0]


def test_reinforce_batch_counts_trajectories_by_their_tokens() -> None:
    """Without the group means: +-0.5 and +-0.1. Token counts 1, 3, 2, 2 weight the mean (-0.125)
    and the variance."""
    batch = [
        Group(TASK, (episode(1.0, tokens=1), episode(0.0, tokens=3))),
        Group(TASK, (episode(0.4, tokens=2), episode(0.6, tokens=2))),
    ]
    rewards, tokens = [0.5, -0.5, -0.1, 0.1], [1, 3, 2, 2]
    mean = -0.125
    variance = sum(n * (x - mean) ** 2 for x, n in zip(rewards, tokens, strict=True)) / 7
    expected = [(x - mean) / math.sqrt(variance) for x in rewards]
    assert values(reinforce_batch(batch)) == pytest.approx(expected, rel=1e-6)


def test_reinforce_batch_without_groups_and_tokens_is_standardisation() -> None:
    found = values(reinforce_batch(groups(*ROWS), group_baseline=False, by_tokens=False))
    assert found == pytest.approx(((FLAT - FLAT.mean()) / FLAT.std()).tolist(), rel=1e-6)


def test_rewards_are_summed_over_channels() -> None:
    group = Group(TASK, (episode(1.0, 0.5), episode(0.5, 0.0)))
    assert values(grpo_no_std([group])) == pytest.approx([0.5, -0.5])


# --- turns
# ------------------------------------------------------------------------------------------------


def test_reward_to_go() -> None:
    assert reward_to_go(tensor([1.0, 0.0, 4.0]), discount=0.5).tolist() == [2.0, 2.0, 4.0]
    assert reward_to_go(tensor([1.0, 0.0, 4.0])).tolist() == [5.0, 4.0, 4.0]
    assert reward_to_go(torch.zeros(0)).tolist() == []
    with pytest.raises(ValueError, match="discount"):
        reward_to_go(torch.zeros(1), discount=1.1)


def test_turn_level_normalises_the_reward_to_go_over_the_group() -> None:
    """Returns 3, 2 and 1, 0: mean 1.5, sample deviation sqrt(5 / 3)."""
    group = Group(
        TASK,
        (
            episode(0.0, turns=2, turn_rewards=(1.0, 2.0)),
            episode(0.0, turns=2, turn_rewards=(1.0, 0.0)),
        ),
    )
    centred = [1.5, 0.5, -0.5, -1.5]
    assert values(turn_level([group], std=False)) == pytest.approx(centred)
    assert values(turn_level([group])) == pytest.approx(
        [x / math.sqrt(5 / 3) for x in centred], rel=1e-5
    )
    assert [len(item.advantage) for item in turn_level([group])] == [2, 2]


def test_turn_level_ignores_a_group_without_trajectories() -> None:
    """All its episodes failed, or a filter left them out."""
    full = Group(TASK, (episode(1.0, turns=2), episode(0.0, turns=2)))
    empty = Group(TASK, ())
    assert values(turn_level([empty, full])) == values(turn_level([full]))
    alone = Group(TASK, (episode(1.0),))
    assert values(turn_level([alone, empty, full], std=False)) == pytest.approx(
        [0.0, 0.5, 0.5, -0.5, -0.5]
    )


def test_an_outcome_falls_on_the_last_turn() -> None:
    group = Group(TASK, (episode(1.0, turns=2), episode(0.0, turns=2)))
    assert values(turn_level([group], std=False)) == pytest.approx([0.5, 0.5, -0.5, -0.5])
    assert values(turn_level([group], std=False, discount=0.5)) == pytest.approx(
        [0.125, 0.625, -0.375, -0.375]
    )


def test_credit_of_a_turn_reaches_its_tokens() -> None:
    group = Group(TASK, (episode(1.0, turns=2), episode(0.0, turns=2)))
    batch = collate(turn_level([group], std=False, discount=0.5))
    assert batch.advantage[:6].tolist() == pytest.approx([0.0, 0.125, 0.125, 0.0, 0.625, 0.625])


def test_a_trajectory_without_turns_has_one_zero() -> None:
    credited = turn_level(
        [Group(TASK, (episode(1.0, turns=0), episode(0.0, turns=1), episode(1.0, turns=1)))]
    )
    assert credited[0].advantage == (0.0,)
    assert credited[1].advantage[0] == -credited[2].advantage[0] < 0


def test_turn_rewards_must_be_one_per_turn() -> None:
    wrong = Group(TASK, (episode(0.0, turns=2, turn_rewards=(1.0,)), episode(0.0)))
    with pytest.raises(ValueError, match=r"toy/train/0: 1 turn_rewards, 2 turns"):
        turn_level([wrong])


# --- edges
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ESTIMATORS)
def test_one_result_per_trajectory_in_order(name: str) -> None:
    batch = groups(*ROWS)
    credited = ESTIMATORS[name](batch)
    assert [item.trajectory for item in credited] == [
        item for group in batch for item in group.trajectories
    ]
    assert all(type(number) is float for number in values(credited))
    assert ESTIMATORS[name]([]) == []
    assert ESTIMATORS[name]([Group(TASK, ())]) == []


@pytest.mark.parametrize("name", SIBLINGS)
def test_no_siblings_or_no_spread_is_exactly_zero(name: str) -> None:
    """In floating point the mean of six 0.1 is not 0.1. The rounding error must not be divided by
    itself."""
    batch = groups([0.7], [0.1] * 6, [1.0, 1.0])
    assert values(ESTIMATORS[name](batch)) == [0.0] * 9
    uneven = Group(TASK, (episode(1.0, tokens=1), episode(0.0, tokens=5)))
    mixed = values(ESTIMATORS[name]([*batch, uneven]))
    assert mixed[:9] == [0.0] * 9 and mixed[9] > 0 > mixed[10]


def test_a_lone_trajectory_of_several_turns_is_not_compared_with_itself() -> None:
    assert (
        values(turn_level([Group(TASK, (episode(0.0, turns=3, turn_rewards=(1.0, 0.0, 5.0)),))]))
        == [0.0] * 3
    )


def test_a_batch_without_spread_is_exactly_zero() -> None:
    assert values(reinforce_batch(groups([0.1, 0.1], [0.1]), group_baseline=False)) == [0.0] * 3


@pytest.mark.parametrize("name", ["grpo", "grpo_no_std", "dr_grpo", "rloo", "opo", "turn_level"])
def test_other_groups_change_nothing(name: str) -> None:
    alone = values(ESTIMATORS[name](groups(ROWS[1])))
    assert values(ESTIMATORS[name](groups([5.0, -9.0], ROWS[1])))[2:] == pytest.approx(alone)


@pytest.mark.parametrize("name", SIBLINGS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_an_error(name: str, bad: float) -> None:
    with pytest.raises(ValueError, match="toy/train/0 has reward"):
        ESTIMATORS[name](groups([1.0, bad]))


def test_a_turn_reward_that_is_no_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="turn_rewards"):
        turn_level([Group(TASK, (episode(0.0, turn_rewards=(math.nan,)), episode(0.0)))])


# --- tensors
# ------------------------------------------------------------------------------------------------


def test_added_episodes_do_not_count_in_the_baseline_of_rloo_first() -> None:
    """First 1, 0, 0 and added 1, 0: baselines 0, 1/2, 1/2, 1/3, 1/3. First 0.1, 0.1: 0.1."""
    first = tensor([True, True, True, False, False, True, True, False])
    rewards = tensor([1.0, 0, 0, 1, 0, 0.1, 0.1, 0.3], dtype=torch.float64)
    group = tensor([0] * 5 + [1] * 3)
    found = rloo_first_advantage(rewards, group, first=first).tolist()
    assert found[:5] == pytest.approx([1, -0.5, -0.5, 2 / 3, -1 / 3])
    assert found[5:] == [0.0, 0.0, pytest.approx(0.2)]
    assert rloo_first_advantage(FLAT, GROUP, first=FLAT >= 0).tolist() == pytest.approx(
        rloo_advantage(FLAT, GROUP).tolist()
    )
    alone = rloo_first_advantage(rewards[:2], group[:2], first=tensor([True, False]))
    assert alone.tolist() == [0.0, -1.0]
    items = tuple(replace(episode(reward), episode=n) for n, reward in enumerate((1, 0, 0, 1, 0)))
    batch = [Group(TASK, items, added=frozenset({3, 4}))]
    assert values(rloo_first(batch)) == pytest.approx(found[:5])


def test_records_and_tensors_agree() -> None:
    batch, lengths = groups(*ROWS), torch.full_like(FLAT, 2.0)
    assert values(grpo(batch)) == grpo_advantage(FLAT, GROUP).tolist()
    assert values(rloo(batch)) == rloo_advantage(FLAT, GROUP).tolist()
    assert values(opo(batch)) == opo_advantage(FLAT, GROUP, lengths=lengths).tolist()
    assert values(reinforce_batch(batch)) == batch_advantage(FLAT, GROUP, lengths=lengths).tolist()


def test_group_ids_are_any_integers_in_any_order() -> None:
    order = tensor([6, 0, 3, 4, 1, 5, 2])
    for estimator in (grpo_advantage, rloo_advantage):
        shuffled = estimator(FLAT[order], 100 - 7 * GROUP[order])
        torch.testing.assert_close(shuffled, estimator(FLAT, GROUP)[order])


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=8), st.integers(-100, 100))
@settings(deadline=None)
def test_a_shift_of_the_rewards_changes_nothing(rewards: list[int], shift: int) -> None:
    base, group = tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards), dtype=torch.long)
    for estimator in (grpo_advantage, rloo_advantage, batch_advantage):
        found = estimator(base, group)
        assert abs(found.sum().item()) < 1e-9
        torch.testing.assert_close(estimator(base + shift, group), found, rtol=1e-9, atol=1e-9)


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=6))
@settings(deadline=None)
def test_rloo_is_the_leave_one_out_mean(rewards: list[float]) -> None:
    base, group = tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards), dtype=torch.long)
    expected = [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    assert rloo_advantage(base, group).tolist() == pytest.approx(expected, abs=1e-9)


PARAMETERS_ONLY = {"by_tokens", "std"}
"""Parameters of estimators that are not options."""


def test_a_decorated_function_is_a_choice_with_its_parameters_as_options() -> None:
    declared = choices("advantages", "estimator")
    assert declared.keys() == REGISTERED.keys()
    names = {field.name for field in fields(AdvantageConfig)}
    for name, function in REGISTERED.items():
        parameters = signature(function).parameters.values()
        keywords = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
        assert declared[name] == keywords <= names | PARAMETERS_ONLY


@pytest.mark.parametrize("name", sorted(REGISTERED))
def test_every_estimator_is_selected_by_its_name(name: str) -> None:
    batch = groups(*ROWS)
    config = AdvantageConfig(estimator=name)
    assert values(build_advantage(config)(batch)) == values(REGISTERED[name](batch))


@pytest.mark.parametrize(
    "name, options",
    [("turn_level", {"discount": 0.5}), ("reinforce_batch", {"group_baseline": False})],
)
def test_an_option_of_an_estimator_reaches_it_and_is_refused_by_others(
    name: str, options: dict[str, Any]
) -> None:
    batch = groups(*ROWS)
    config = AdvantageConfig(estimator=name, **options)
    assert values(build_advantage(config)(batch)) == values(REGISTERED[name](batch, **options))
    (option,) = options
    with pytest.raises(ConfigError, match=f"advantage.{option} is an option of {name}"):
        AdvantageConfig(estimator="grpo", **options)
