"""Test `allocate`: its six rules, its mean number of episodes, and what episodes are spent on."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from unstale.config import ConfigError, RunConfig, ScheduleConfig, SelectionConfig
from unstale.config.options import override
from unstale.research.techniques.allocate import Allocate, AllocateConfig
from unstale.research.techniques.baseline import BaselineConfig, advantages
from unstale.research.techniques.budget import (
    find_price,
    half_width,
    mixed_error,
    num_further,
    segments,
    v0_utility,
)
from unstale.research.techniques.success import SuccessTracker
from unstale.techniques.hooks import GroupSoFar, Outcome

SEEDS, TASKS, GROUPS, LAG = 20, 64, 8, 2


def allocator(gain: str, **options: Any) -> Allocate:
    return Allocate(AllocateConfig(gain=gain, **options))  # type: ignore[arg-type]


def group(*rewards: float, first: int = 0, failed: int = 0, task: str = "a") -> GroupSoFar:
    started = len(rewards) + failed
    return GroupSoFar(task, rewards, started, first or started)


def outcome(task: str, *rewards: float, added: int = 0, version: int = 0) -> Outcome:
    return Outcome(task, version, 0, rewards, 0, 10, added)


def of(successes: int, size: int) -> tuple[float, ...]:
    return (1.0,) * successes + (0.0,) * (size - successes)


@pytest.mark.parametrize(
    ("gain", "options", "successes", "more"),
    [
        ("dars_et", {}, 2, 3),  # S = 0.375: (4 - 3) / 0.375 = 2.67
        ("dars_hw", {}, 2, 8),  # (6 - 3) / 0.375
        ("dars_et", {}, 0, 24),  # p = 1/16 asks for 27
        ("dars_hw", {"max": 64}, 0, 56),  # (7.5 - 0.9375) / 0.1172
        ("dars_hw", {}, 4, 0),
        ("dars_et", {"std": True}, 2, 2),  # S = 0.866: (8 - 6.928) / 0.866 = 1.24
        ("dars_hw", {"std": True}, 2, 6),  # (12 - 6.928) / 0.866 = 5.86
    ],
)
def test_dars(gain: str, options: dict[str, Any], successes: int, more: int) -> None:
    made = allocator(gain, **options)
    assert made.first("a") == 0
    assert made.more(group(*of(successes, 8))) == more
    assert made.more(group(*of(successes, 8), first=4)) == 0  # there are two stages


def test_failed_episodes_count_in_the_size() -> None:
    assert allocator("dars_et").more(group(*of(0, 8), failed=20)) == 4
    assert allocator("dars_et").more(group(*of(0, 8), failed=30)) == 0


def test_success_is_a_reward_from_success_at_on() -> None:
    assert allocator("dars_et", success_at=0.5).more(group(*[0.7] * 2, *[-3.0] * 6)) == 3
    with pytest.raises(ConfigError, match=r"allocate needs rewards between 0 and 1, got -3. Set"):
        allocator("dars_et").more(group(0.5, -3.0))


def test_the_interval_narrows() -> None:
    """Student's quantiles are 3.1824 and 2.7764; half of them times 0.5 / sqrt(n)."""
    assert half_width(4, 0.5, 0.95) == pytest.approx(0.7956, abs=5e-5)
    assert half_width(5, 0.5, 0.95) == pytest.approx(0.6208, abs=5e-5)


def test_interval_gives_more_to_groups_whose_rewards_differ() -> None:
    made = allocator("interval", mean=6.0, max=12)
    mixed, equal = (1.0, 0.0, 0.0, 1.0), (0.0,) * 4
    assert made.more(group(*mixed)) == 0  # there is no price yet
    made.observe([outcome("a", *mixed), outcome("b", *equal, 1.0, added=1)] * 8)
    assert made.more(group(*mixed)) == 4 and made.more(group(*equal)) == 0


def test_the_utility_of_v0() -> None:
    assert (v0_utility(2, 0.5), v0_utility(4, 0.5)) == (0.5, 1.75)


def test_sizes_at_a_price_are_the_best_of_all_with_the_same_total() -> None:
    """One more episode can be worth more than the one before, so single steps are not the best."""
    rng = np.random.default_rng(0)
    sizes, worse = range(2, 9), 0
    for _ in range(20):
        rates = rng.uniform(0.05, 0.95, 3)
        utility = [[v0_utility(n, p) for n in sizes] for p in rates]
        hulls = [segments(each) for each in utility]
        price = find_price(hulls, budget := int(rng.integers(1, 18)))
        chosen = [num_further(hull, price) for hull in hulls]
        assert sum(chosen) <= budget

        def worth(further: tuple[int, ...], utility: list[list[float]] = utility) -> float:
            return sum(each[k] for each, k in zip(utility, further, strict=True))

        every = [k for k in product(range(7), repeat=3) if sum(k) <= sum(chosen)]
        assert worth(tuple(chosen)) == pytest.approx(max(map(worth, every)))
        greedy = [0, 0, 0]
        for _ in range(sum(chosen)):
            gains = [
                each[k + 1] - each[k] if k < 6 else -math.inf
                for each, k in zip(utility, greedy, strict=True)
            ]
            greedy[int(np.argmax(gains))] += 1
        worse += worth(tuple(greedy)) < worth(tuple(chosen)) - 1e-9
    assert worse


def test_the_square_root_law() -> None:
    """Variances 0.25 and 0.09 with a mean of 8 give 10 and 6 episodes."""
    made = allocator("sqrt_law", decay=1.0)
    assert made.first("new") == 8
    made.observe([outcome("half", *[0.5] * 9999), outcome("rare", *[0.1] * 9999)])
    assert (made.first("half"), made.first("rare")) == (10, 6)
    assert made.more(group(0.0, 1.0)) == 0


def test_the_risk_of_v05() -> None:
    """At k = 4, m = -1/2, V = 1/2: D = 0.75, w = 0.75, error 0.75^2 / 4 + 0.25^2 0.75 = 0.1875."""
    assert mixed_error(4, -0.5, 0.5) == pytest.approx(0.1875)
    assert mixed_error(5, -0.5, 0.5) == pytest.approx(0.8**2 / 5 + 0.2**2 * 0.8)
    made = allocator("v05_risk", max=16, decay=1.0)
    made.observe([outcome("a", *of(7499, 9998))])  # V = 1/2
    assert made.more(group(*of(1, 4))) == 11  # the 16th would lower the error by 0.0036
    assert made.more(group(*of(3, 4))) == 0  # as forecast
    assert made.more(group(*of(4, 16), first=4)) == 0


@pytest.mark.parametrize(
    ("options", "group_size", "pool", "message"),
    [
        ({"gain": "v0"}, 8, 0, "needs selection.pool > 0, got 0"),
        ({"gain": "interval"}, 8, 0, "mean must be above schedule.group_size"),
        ({"gain": "dars_et", "max": 8}, 8, 0, "max must be above schedule.group_size, got 8 and 8"),
        ({"gain": "v0", "mean": 40.0}, 8, 9, "between allocate.min and allocate.max, got 40, 2"),
        ({"gain": "dars_et", "cost": 0.1}, 8, 0, "allocate.cost is an option of v05_risk"),
        ({}, 1, 0, "needs schedule.group_size >= 2"),
    ],
)
def test_wrong_options_are_refused(
    options: dict[str, Any], group_size: int, pool: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig(
            recipe="mine",
            techniques="allocate",
            technique_options={"allocate": AllocateConfig(**options)},
            schedule=ScheduleConfig(group_size=group_size),
            selection=SelectionConfig(pool=pool),
        )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"baseline.decay": 0.5},
            r"allocate.decay must be baseline.decay .* got 0.98 and 0.5.*Set --allocate.decay 0.5",
        ),
        ({"allocate.prior": 4.0}, "allocate.prior must be baseline.prior .* got 4 and 1"),
        ({"baseline.keep": 0.9}, "baseline.keep must be 1 .* got 0.9"),
        ({"baseline.reward_min": -1.0}, "are -1 and 1.*set --allocate.success_at 1"),
        ({"allocate.success_at": 2.0}, "success_at must be above 0 .* and at most 1 .* got 2"),
    ],
)
def test_the_rule_of_v05_has_the_forecast_of_the_baseline(
    values: dict[str, Any], message: str
) -> None:
    both = override(
        RunConfig(recipe="mine", selection=SelectionConfig(pool=9)),
        {"techniques": "allocate baseline", "allocate.gain": "v05_risk"},
    )
    with pytest.raises(ConfigError, match=message):
        override(both, values)
    override(both, {"baseline.decay": 0.5, "allocate.decay": 0.5})
    override(both, {"baseline.reward_min": -1.0, "allocate.success_at": 1.0})
    override(both, {"allocate.gain": "sqrt_law", "baseline.decay": 0.5})


@pytest.mark.parametrize("name", ["allocate", "bin_sizes"])
def test_the_smallest_groups_have_enough_sequences_for_the_minibatches(name: str) -> None:
    """A batch of 16 groups of at least 2 episodes may have 32 sequences."""
    gain = {"allocate.gain": "v0"} if name == "allocate" else {}
    options = {"techniques": name, f"{name}.min": 2, "schedule.groups_per_step": 16, **gain}
    config = RunConfig(recipe="mine", selection=SelectionConfig(pool=9))
    assert override(config, {**options, "trainer.minibatches_per_batch": 32})
    with pytest.raises(ConfigError, match=rf"must be <= 32 \({name}.min \* .*got 33"):
        override(config, {**options, "trainer.minibatches_per_batch": 33})


def gradient(rate: float, centre: str, *, leave_out: bool = False, most: int = 9) -> float:
    """Return E[sum of A (r - p)] / (E[n] p (1 - p)) of a group of 4 to `most` episodes, by
    enumeration. V is 1/2. It is 1 if the baseline is not biased.
    """
    part = allocator("v05_risk", max=most)
    chosen: dict[str, Any] = {"centre": centre, "leave_out": leave_out}
    options = BaselineConfig(**{name: value for name, value in chosen.items() if value})
    total = size = 0.0
    waiting = list(product((0.0, 1.0), repeat=4))
    while waiting:
        rewards = waiting.pop()
        if most > 4 and (more := part.more(group(*rewards, first=4))):
            waiting += [rewards + each for each in product((0.0, 1.0), repeat=more)]
            continue
        found = advantages(torch.tensor(rewards, dtype=torch.float64), options, value=0.5)
        probability = math.prod(rate if each else 1 - rate for each in rewards)
        total += probability * float((found * (torch.tensor(rewards) - rate)).sum())
        size += probability * len(rewards)
    return total / (size * rate * (1 - rate))


def test_the_baseline_of_v05_is_less_biased_with_its_added_episodes() -> None:
    """The prior alone is exact with any stop rule (Wald's identity)."""
    for rate in (0.1, 0.5, 0.8):
        assert gradient(rate, "shrink", most=4) < gradient(rate, "shrink") < 0.99
        assert gradient(rate, "prior") == pytest.approx(1)
    assert gradient(0.5, "shrink", leave_out=True, most=4) == pytest.approx(1)
    assert gradient(0.5, "shrink", leave_out=True) > 1.02


@pytest.mark.parametrize("gain", ["interval", "sqrt_law", "v0", "v05_risk"])
def test_a_restored_allocator_decides_the_same(gain: str) -> None:
    options = {} if gain == "v05_risk" else {"mean": 6.0}
    one, other = allocator(gain, **options), allocator(gain, **options)
    rng = np.random.default_rng(1)
    rewards = (rng.random((30, 4)) < rng.random((30, 1))).astype(float)
    one.observe([outcome(str(i % 9), *row, version=i // 9) for i, row in enumerate(rewards)])
    other.restore(one.state())
    asked = [
        (each.first(str(i)), each.more(group(*rewards[i], task=str(i))))
        for each in (one, other)
        for i in range(12)
    ]
    assert asked[:12] == asked[12:] and len(set(asked)) > 1


@dataclass
class Spent:
    """Figures of the groups in the second half of a bandit whose success rates drift."""

    rates: list[float] = field(default_factory=list)
    rewards: list[list[float]] = field(default_factory=list)
    forecasts: list[float] = field(default_factory=list)
    """The success rate of each task by the earlier groups."""

    @property
    def mean(self) -> float:
        return sum(map(len, self.rewards)) / len(self.rewards)

    def share(self, weigh: Callable[[list[float]], float], below: float = 0.2) -> float:
        """Return the share of groups on tasks with a success rate below a limit, weighted."""
        weights = np.array([weigh(each) for each in self.rewards])
        return float(weights[np.array(self.rates) < below].sum() / weights.sum())


def spread(rewards: list[float]) -> float:
    """Return the sum of |A|, where A is the reward minus the mean."""
    return float(np.abs(np.array(rewards) - np.mean(rewards)).sum())


def evenly() -> None:
    """Give every group the same number of episodes."""


def spend(make: Callable[[], Allocate | None], *, first: int, steps: int) -> Spent:
    spent = Spent()
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        part, tracker = make(), SuccessTracker("test", decay=0.98)
        logits = rng.normal(-0.5, 2.0, TASKS)
        waiting: list[list[Outcome]] = []
        for step in range(steps):
            logits = logits + rng.normal(0.0, 0.1, TASKS)
            batch = []
            for task in rng.choice(TASKS, GROUPS, replace=False):
                rate = 1 / (1 + math.exp(-logits[task]))
                size = (part.first(str(task)) if part else 0) or first
                rewards = list((rng.random(size) < rate).astype(float))
                while part and (n := part.more(group(*rewards, first=size, task=str(task)))):
                    rewards += list((rng.random(n) < rate).astype(float))
                batch.append(outcome(str(task), *rewards, added=len(rewards) - size, version=step))
                if step >= steps // 2:
                    spent.rates.append(rate)
                    spent.rewards.append(rewards)
                    spent.forecasts.append(tracker.mean(str(task)))
            waiting.append(batch)
            if len(waiting) > LAG:
                tracker.observe(waiting[0])
                if part:
                    part.observe(waiting[0])
                del waiting[0]
    return spent


def test_dars_spends_more_on_hard_tasks() -> None:
    """Measured shares of tasks below 0.2: of episodes 0.33 and 0.57, of |A| 0.16 and 0.32."""
    plain, dars = (
        spend(each, first=8, steps=20) for each in (evenly, lambda: allocator("dars_et"))
    )
    assert dars.share(len) > plain.share(len) + 0.15
    assert dars.share(spread) > plain.share(spread) + 0.08


def test_v0_spends_most_on_hard_tasks_and_more_groups_have_equal_rewards() -> None:
    """Measured with at most 16: 0.32 and 0.50 of episodes, 0.29 and 0.44 of groups."""
    plain, v0 = (
        spend(each, first=8, steps=24)
        for each in (evenly, lambda: allocator("v0", window=16, max=16))
    )
    assert v0.mean == pytest.approx(8.0, abs=0.5)
    assert v0.share(len) > plain.share(len) + 0.1
    equal = [np.mean([len(set(each)) == 1 for each in one.rewards]) for one in (plain, v0)]
    assert equal[1] > equal[0] + 0.08


def test_interval_raises_the_spread_per_episode() -> None:
    """Measured |A| per episode: 0.256 with 8 episodes each, 0.291 with 4 and 8 on average."""
    plain = spend(evenly, first=8, steps=40)
    chosen = spend(lambda: allocator("interval", window=32), first=4, steps=40)
    assert chosen.mean == pytest.approx(8.0, abs=0.4)
    each = [sum(map(spread, one.rewards)) / sum(map(len, one.rewards)) for one in (plain, chosen)]
    assert each[1] > each[0] + 0.015


def test_the_square_root_law_lowers_the_error_of_the_means() -> None:
    """Measured mean of p (1 - p) / n: 0.0183 with 8 episodes each, 0.0169 with 8.1 on average."""
    errors = []
    for make in (evenly, lambda: allocator("sqrt_law", window=16, max=16)):
        spent = spend(make, first=8, steps=40)
        assert spent.mean == pytest.approx(8.0, abs=0.3)
        pairs = zip(spent.rates, spent.rewards, strict=True)
        errors.append(np.mean([p * (1 - p) / len(rewards) for p, rewards in pairs]))
    assert errors[1] < errors[0] - 0.0006


def test_v05_needs_fewer_episodes_for_its_baseline() -> None:
    """Measured squared errors: 0.0121 with 6 episodes each, 0.0089 with 5.3 on average."""
    errors, means = [], []
    for first, make in ((6, evenly), (4, lambda: allocator("v05_risk", max=16))):
        spent = spend(make, first=first, steps=40)
        means.append(spent.mean)
        found = [
            mixed(rewards, forecast) - rate
            for rate, rewards, forecast in zip(
                spent.rates, spent.rewards, spent.forecasts, strict=True
            )
        ]
        errors.append(np.mean(np.square(found)))
    assert means[1] < means[0] - 0.4 and errors[1] < errors[0] - 0.002


def mixed(rewards: list[float], forecast: float) -> float:
    """Return the baseline of V0.5 for rewards 0 and 1, computed with rewards -1 and 1."""
    mean, forecast, noise = 2 * float(np.mean(rewards)) - 1, 2 * forecast - 1, 1 / len(rewards)
    distance = max(0.0, (mean - forecast) ** 2 - noise)
    weight = distance / (distance + noise)
    return (weight * mean + (1 - weight) * forecast + 1) / 2
