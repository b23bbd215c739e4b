"""Test `baseline`: its formulas by hand, what it refuses, its state, and its effect in toys."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from tests.support.groups import context, made, rewarded
from unstale.config import ConfigError, RunConfig, ScheduleConfig, SelectionConfig
from unstale.config.options import override
from unstale.lint import check
from unstale.records import Group
from unstale.research.techniques.baseline import (
    BaselineConfig,
    PriorBaseline,
    advantages,
    make_baseline,
    shrink,
)
from unstale.techniques.hooks import Observer, Outcome, StepController, StepSeen, Techniques


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def estimated(groups: Sequence[Group], **options: Any) -> list[float]:
    estimator = make_baseline(BaselineConfig(**options))
    return [value for each in estimator.estimate(groups, context()) for value in each.advantage]


def outcome(task: str, *rewards: float, version: int = 0) -> Outcome:
    return Outcome(task, version, 0, rewards, failures=0, tokens=1)


MC_GRPO = {"centre": "median", "scale": "mad"}


UNBIASED = [
    BaselineConfig(centre="loo"),
    BaselineConfig(centre="prior"),
    BaselineConfig(centre="shrink", leave_out=True),
]


def test_the_median_and_its_distance_give_the_advantages_of_mc_grpo() -> None:
    """The median is 0.5, the median distance to it 0.25, and 4 of 5 episodes differ from it."""
    rewards = (0.0, 0.5, 1.0, 0.25, 0.75)
    wanted = numbers(-1.992, 0.0, 1.992, -0.996, 0.996)
    found = estimated([rewarded(*rewards)], **MC_GRPO)
    assert found == pytest.approx((1.25 * wanted).tolist(), abs=5e-4)


def test_the_advantage_of_a_minority_of_two_values_is_limited_by_a_floor() -> None:
    found = estimated([rewarded(1, 0, 0)], **MC_GRPO)
    assert found == pytest.approx([3 / 0.101, 0, 0])


def test_the_group_mean_is_shrunk_towards_the_prior() -> None:
    """Rewards -1 and 1, V = 0.5, m = -0.5: D = 0.75, w = 0.75, b = -0.25. Where m is closer to V
    than its standard deviation, b is V.
    """
    assert float(shrink(numbers(-0.5), numbers(0.5), 1 / 4)) == pytest.approx(-0.25)
    options = BaselineConfig(centre="shrink", reward_min=-1.0)
    found = advantages(numbers(-1, -1, -1, 1), options, value=0.5)
    assert found.tolist() == pytest.approx([-0.75, -0.75, -0.75, 1.25])
    found = advantages(numbers(1, 0, 1, 1), BaselineConfig(), value=0.6)
    assert found.tolist() == pytest.approx([0.4, -0.6, 0.4, 0.4])


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"centre": "mean"}, [0.75, -0.25, -0.25, -0.25]),
        ({"centre": "loo"}, [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ({"centre": "mean", "scale": "std"}, [1.5, -0.5, -0.5, -0.5]),
        ({"centre": "prior"}, [0.5, -0.5, -0.5, -0.5]),
    ],
)
def test_centres_and_scales_by_hand(options: dict[str, Any], wanted: list[float]) -> None:
    assert estimated([rewarded(1, 0, 0, 0)], **options) == pytest.approx(wanted, abs=1e-5)


def test_a_batch_of_single_episodes_is_normalised_as_a_whole() -> None:
    """V is 1/2 of tasks without a visit. The differences 0.5, -0.5, 0.5 have the standard deviation
    1 / sqrt(3).
    """
    groups = [rewarded(1), rewarded(0), replace(rewarded(), failures=()), rewarded(1)]
    found = estimated(groups, centre="prior", scale="batch")
    wanted = [math.sqrt(3) / 3, -2 * math.sqrt(3) / 3, math.sqrt(3) / 3]
    assert found == pytest.approx(wanted, abs=1e-5)
    assert estimated([rewarded(1), rewarded(1)], centre="prior", scale="batch") == [0, 0]


@pytest.mark.parametrize("centre", ["mean", "loo", "median"])
@pytest.mark.parametrize("scale", ["none", "std", "mad", "batch"])
def test_equal_rewards_and_single_episodes_have_no_advantage(centre: str, scale: str) -> None:
    """The mean of three times 0.1 is not 0.1 in binary numbers."""
    groups = [rewarded(0.1, 0.1, 0.1), rewarded(7)]
    assert estimated(groups, centre=centre, scale=scale) == [0, 0, 0, 0]


def test_the_median_and_groups_of_equal_rewards_keep_the_advantage_0_in_a_batch() -> None:
    """The differences to the medians are 0, 0, 1 and three times 0. Their mean is not 0."""
    found = estimated([rewarded(0, 0, 1), rewarded(0, 0, 0)], centre="median", scale="batch")
    assert found[2] > 1 and found[:2] == [0, 0] and found[3:] == [0, 0, 0]


@pytest.mark.parametrize("options", UNBIASED)
def test_an_unbiased_baseline_does_not_depend_on_the_own_reward(options: BaselineConfig) -> None:
    rewards = torch.rand(50, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    other = rewards.clone()
    other[:, 2] = 1 - other[:, 2]
    before, after = (advantages(each, options, value=0.3) - each for each in (rewards, other))
    torch.testing.assert_close(before[:, 2], after[:, 2])


def test_a_single_episode_is_compared_with_the_prior_alone() -> None:
    """With `leave_out` nothing else is left. Without, m = 1 is at its standard deviation from V."""
    for leave_out in (True, False):
        assert estimated([rewarded(1)], leave_out=leave_out) == [0.5]
    assert estimated([rewarded(1, 0, 0)], leave_out=True) == pytest.approx([0.75, -0.5, -0.5])


def test_branches_have_the_advantage_of_their_episode() -> None:
    parent = replace(made(1.0), branches=(made(0.0, episode=7),))
    group = replace(rewarded(0.0), trajectories=(parent, made(0.0, episode=1)))
    found = make_baseline(BaselineConfig(centre="mean")).estimate([group], context())
    assert [each.trajectory.episode for each in found] == [0, 7, 1]
    assert [each.advantage[0] for each in found] == [0.5, 0.5, -0.5]


def test_the_prior_is_learned_from_the_groups_that_were_trained_on() -> None:
    """Rewards from -1 to 3. The first group has 3 and 1: the counts are 1 + 1.5 and 1 + 0.5, so V
    is -1 + 4 * 2.5 / 4.
    """
    options = BaselineConfig(centre="prior", reward_min=-1.0, reward_max=3.0)
    estimator = make_baseline(options)
    assert isinstance(estimator, PriorBaseline)
    seen = context()
    key = seen.identify(rewarded(0).task)
    assert [each.advantage for each in estimator.estimate([rewarded(3, 1)], seen)] == [(2,), (0,)]
    assert seen.metrics["baseline/prior_abs_error_mean"] == 1.0
    assert estimator.value(key) == 1.0, "an estimate alone changes nothing"
    estimator.observe([outcome(key, 3.0, 1.0)])
    assert estimator.value(key) == pytest.approx(1.5)
    again = PriorBaseline(options)
    again.restore(estimator.state())
    assert again.value(key) == estimator.value(key) and again.value("other") == 1.0


def test_a_resumed_run_may_have_another_range_of_rewards() -> None:
    """Learned values keep their meaning. A task that was never seen gets the new middle."""
    before = PriorBaseline(BaselineConfig(centre="prior"))
    key = context().identify(rewarded(0).task)
    before.observe([outcome(key, 1.0, 1.0, 0.0)])
    assert before.value(key) == pytest.approx(3 / 5)
    after = PriorBaseline(BaselineConfig(centre="prior", reward_min=-1.0, reward_max=3.0))
    after.restore(before.state())
    assert after.value(key) == pytest.approx(3 / 5) and after.value("other") == 1.0
    narrow = PriorBaseline(BaselineConfig(centre="prior", reward_max=0.5))
    narrow.restore(before.state())
    assert narrow.value(key) == 0.5


def test_a_reward_outside_of_the_range_is_refused_also_of_an_unused_episode() -> None:
    estimator = make_baseline(BaselineConfig())
    group = replace(rewarded(1, 0), unused=(made(1.5, episode=9),))
    message = r"baseline.reward_min and baseline.reward_max, 0 and 1, got 1.5. Set them to"
    with pytest.raises(ConfigError, match=message):
        estimator.estimate([group], context())
    with pytest.raises(ValueError, match="toy/train/0 has the rewards"):
        make_baseline(BaselineConfig(centre="mean")).estimate([rewarded(math.nan)], context())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"baseline.centre": "median"}, "odd schedule.group_size, got 8.*group_size 9"),
        (
            {
                "techniques": "episode_filter baseline",
                "baseline.centre": "median",
                "schedule.group_size": 9,
                "episode_filter.rule": "contrast",
            },
            "odd episode_filter.n, got 4: .* --episode_filter.n 5",
        ),
        (
            {
                "techniques": "episode_filter baseline",
                "baseline.centre": "median",
                "schedule.group_size": 9,
                "episode_filter.rule": "balanced",
                "episode_filter.n": 7,
                "episode_filter.last": 3,
            },
            "needs episode_filter.last = 0 or 7 .episode_filter.n., got 3",
        ),
        (
            {
                "techniques": "flawed_success_penalty truncated baseline",
                "selection.pool": 4,
                "truncated.rule": "reward",
            },
            "shrink needs the environment's rewards.* flawed_success_penalty and truncated, "
            ".*centre loo",
        ),
        (
            {"techniques": "truncated baseline", "selection.pool": 4},
            "shrink learns the mean reward .*truncated.rule = mask leaves .*centre loo, or remove",
        ),
        ({"baseline.centre": "prior"}, "needs selection.pool > 0, got 0"),
        ({"baseline.centre": "loo", "schedule.group_size": 1}, "group_size >= 2, got 1"),
        ({"baseline.scale": "std"}, "must be none or batch with baseline.centre = shrink"),
        ({"baseline.reward_min": 1.0}, "reward_max must be > baseline.reward_min, got 1 and 1"),
        ({"baseline.centre": "mean", "baseline.prior": 2.0}, "is an option of prior, shrink"),
        (
            {"baseline.centre": "mean", "advantage.estimator": "rloo"},
            "replaces advantage.estimator",
        ),
    ],
)
def test_a_wrong_choice_is_refused_with_what_to_do(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        override(RunConfig(recipe="mine"), {"techniques": "baseline", **values})


def test_the_median_is_accepted_of_whole_groups_and_the_mean_beside_other_rewards() -> None:
    """`episode_filter` by variance acts after the advantages, so an even number is right there."""
    odd = RunConfig(recipe="mine", schedule=ScheduleConfig(group_size=9))
    override(
        odd,
        {
            "techniques": "episode_filter baseline",
            "baseline.centre": "median",
            "episode_filter.n": 4,
        },
    )
    values = {
        "episode_filter.rule": "contrast",
        "episode_filter.n": 5,
        "episode_filter.last": 5,
        "baseline.centre": "median",
    }
    override(odd, {"techniques": "episode_filter baseline", **values})
    loo = override(odd, {"techniques": "tool_bonus baseline", "baseline.centre": "loo"})
    assert list(Techniques.of(loo).parts) == ["tool_bonus", "baseline"]


def test_the_linter_warns_where_groups_of_a_median_may_become_even() -> None:
    odd = RunConfig(
        recipe="mine",
        techniques="baseline",
        schedule=ScheduleConfig(group_size=9),
        selection=SelectionConfig(pool=4),
    )

    def warned(**values: Any) -> list[str]:
        config = override(odd, {"baseline.centre": "median", **values})
        return [each.wrong for each in check(config).warnings if "median" in each.wrong]

    assert warned() == []
    assert warned(techniques="truncated baseline", **{"truncated.rule": "reward"}) == []
    assert warned(techniques="truncated allocate baseline") == [
        "allocate.gain dars_et with baseline.centre median",
        "baseline.centre median with allocate and truncated",
    ]
    assert warned(
        techniques="hard_task_stages baseline",
        **{"hard_task_stages.size": 8, "hard_task_stages.steps": 2},
    )


def test_the_prior_forgets_faster_while_the_policy_moves() -> None:
    """The numbers of MSSR: four successes and failures before, and a share of 0.875 to 0.96."""
    options = BaselineConfig(
        centre="prior", prior=4, decay=1, keep=0.96, discount_prior=True, kl_target=0.06
    )

    def after(kl: float) -> float:
        made = make_baseline(options)
        assert isinstance(made, PriorBaseline) and isinstance(made, StepController)
        plan = made.plan(StepSeen(torch.zeros(1), 1.0, kl=kl))
        assert plan.lr_factor == 1 and not plan.skip
        made.observe([Outcome("a", 0, 0, (1.0,), 0, 5)])
        assert made.value("a") == pytest.approx(
            (4 * plan.metrics["baseline/kept_share"] + 1)
            / (8 * plan.metrics["baseline/kept_share"] + 1)
        )
        return plan.metrics["baseline/kept_share"]

    assert after(0.0) == after(0.003) == 0.96
    assert after(0.06 * math.log2(1 / 0.9)) == pytest.approx(0.9)
    assert after(0.06) == 0.875
    assert after(math.nan) == 0.96, "a step without sampled tokens has no KL"
    still = make_baseline(BaselineConfig(centre="prior"))
    assert not isinstance(still, StepController), "a controller costs forward passes"


def test_single_episodes_are_accepted_with_a_prior_and_a_pool() -> None:
    """A baseline without a prior has no state, and runs with ranks."""
    made_config = RunConfig(recipe="mine", selection=SelectionConfig(pool=4))
    override(
        made_config,
        {"techniques": "baseline", "baseline.centre": "prior", "schedule.group_size": 1},
    )
    assert isinstance(make_baseline(BaselineConfig()), Observer)
    assert not isinstance(make_baseline(BaselineConfig(centre="loo")), Observer)


def wrong_signs(rewards: Tensor, advantage: Tensor) -> float:
    """Return the share of episodes with a gradient whose advantage has the wrong sign. The expected
    reward is 0.
    """
    trained = advantage != 0
    return float((advantage.sign() != rewards.sign())[trained].double().mean())


def test_the_median_of_one_more_episode_has_fewer_wrong_signs() -> None:
    """Measured, normal rewards: 0.249 with the mean of 2 and 0.125 with the median of 3; 0.166 with
    4 and 0.110 with 5. An even group gains little: 0.195 with 3, 0.187 with 4.
    """
    noise = torch.Generator().manual_seed(0)
    mean, median = BaselineConfig(centre="mean"), BaselineConfig(centre="median")

    def shares(size: int) -> tuple[float, float]:
        small = torch.randn(40_000, size, generator=noise, dtype=torch.float64)
        large = torch.randn(40_000, size + 1, generator=noise, dtype=torch.float64)
        return (
            wrong_signs(small, advantages(small, mean)),
            wrong_signs(large, advantages(large, median)),
        )

    assert shares(2) == pytest.approx((0.249, 0.125), abs=0.01)
    assert shares(4) == pytest.approx((0.166, 0.110), abs=0.01)
    assert shares(3) == pytest.approx((0.195, 0.187), abs=0.01)


def test_a_shrunk_mean_is_closer_unless_the_prior_is_bad() -> None:
    """Measured, rewards -1 and 1, groups of 4: the squared error is 0.250 for the mean, and 0.070,
    0.098, 0.231, 0.412 where V is wrong by 0, 0.2, 0.5, 1.
    """
    noise = torch.Generator().manual_seed(0)
    rewards = torch.randint(0, 2, (50_000, 4), generator=noise).double() * 2 - 1
    options = BaselineConfig(centre="shrink", reward_min=-1.0)

    def error(value: float) -> float:
        baseline = (rewards - advantages(rewards, options, value=value))[:, 0]
        return float(baseline.square().mean())

    errors = [error(value) for value in (0.0, 0.2, 0.5, 1.0)]
    assert errors == pytest.approx([0.070, 0.098, 0.231, 0.412], abs=0.01)
    assert errors[2] < float(rewards.mean(1).square().mean()) < errors[3]


SEEDS, TASKS, ARMS = 20, 16, 8


def gradient_error(size: int, **options: Any) -> float:
    """Return the mean squared error of a task's gradient, times its number of episodes.

    A bandit with one rewarded arm, 8 episodes a step for each seed, learning rate 4, 40 steps.
    """
    noise = torch.Generator().manual_seed(0)
    estimator = make_baseline(BaselineConfig(**options))
    logits = torch.zeros(SEEDS * TASKS, ARMS, dtype=torch.float64)
    logits[:, 0] = 2 * torch.randn(len(logits), generator=noise) - 1
    error = 0.0
    for step in range(40):
        drawn = torch.rand(SEEDS, TASKS, generator=noise).argsort(1)[:, : 8 // size]
        task = (drawn + TASKS * torch.arange(SEEDS)[:, None]).flatten()
        names = [str(each) for each in task.tolist()]
        policy = logits[task].softmax(-1)
        arm = torch.multinomial(policy, size, replacement=True, generator=noise)
        rewards = (arm == 0).double()
        value: Tensor | float = 0.0
        if isinstance(estimator, PriorBaseline):
            value = numbers(*map(estimator.value, names))
        advantage = advantages(rewards, estimator.options, value=value)
        score = one_hot(arm, ARMS) - policy[:, None]
        gradient = (advantage[..., None] * score).mean(1)
        exact = policy[:, :1] * (one_hot(torch.zeros_like(task), ARMS) - policy)
        error += size * float((gradient - exact).square().sum(1).mean()) / 40
        logits = logits.index_add(0, task, 4 * size * gradient)
        if isinstance(estimator, PriorBaseline):
            results = zip(names, rewards.tolist(), strict=True)
            estimator.observe([outcome(name, *each, version=step) for name, each in results])
    return error


def test_single_episodes_with_a_prior_have_less_variance_than_pairs() -> None:
    """At equal numbers of episodes. The error of a pair is that of its variance alone."""
    assert gradient_error(1, centre="prior") < 0.8 * gradient_error(2, centre="loo")
