"""Test difficulty bins: their weights and sizes, and what they do to hard tasks."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.support.groups import context, group, made
from unstale.config import ConfigError, RunConfig
from unstale.records import ScoredTrajectory, Task
from unstale.research.techniques.bin_sizes import BinSizes, BinSizesConfig, exact_sizes
from unstale.research.techniques.difficulty import Bins
from unstale.research.techniques.difficulty_bin_weights import (
    DifficultyBinWeights,
    DifficultyBinWeightsConfig,
)
from unstale.techniques.hooks import GroupSoFar, Outcome

SEEDS, TASKS, HARD, GROUPS, SIZE = 20, 24, 6, 6, 8


def outcome(task: str, *rewards: float, failures: int = 0) -> Outcome:
    return Outcome(task, 0, 0, rewards, failures, 10)


def visits(text: str, task: str = "a") -> list[Outcome]:
    """Return a group for each character: + with a success, - without."""
    return [outcome(task, 0.0, float(each == "+")) for each in text]


def test_a_task_is_in_the_bin_of_its_share_of_solved_groups() -> None:
    bins = Bins(DifficultyBinWeightsConfig(bins=4, visits=4, margin=0.0))
    found = []
    for each in visits("-+++++--"):
        bins.observe([each])
        found.append(bins.find("a"))
    assert found == [0, 2, 2, 3, 3, 3, 3, 2]  # of 0, 1/2, 2/3, 3/4, 1, 1, 3/4, 1/2
    assert bins.find("b") is None
    bins.observe([outcome("b")])
    assert bins.find("b") is None  # no episode ended


def test_a_task_changes_its_bin_only_beyond_the_margin() -> None:
    """Shares of 10 visits around the border 1/2: 0.5 is within 0.15 of it, 0.7 is beyond."""
    bins = Bins(DifficultyBinWeightsConfig(bins=2, visits=10, margin=0.15))
    bins.observe(visits("-----+++++"))
    assert bins.find("a") == 0
    bins.observe(visits("++"))
    assert bins.find("a") == 1
    bins.observe(visits("---"))
    assert bins.find("a") == 1  # 0.6 or 0.5 do not bring it back
    with pytest.raises(
        ConfigError, match=r"difficulty_bin_weights\.bins must be between 2 and 100, got 1"
    ):
        DifficultyBinWeightsConfig(bins=1)


def test_the_weight_of_a_bin() -> None:
    """Losses 1 and 1/2, beta 1/2: S = 3/4 of 1, exp(3/4) = 2.117; the limit 0.5: 1.6487."""
    weights = DifficultyBinWeights(DifficultyBinWeightsConfig(beta=0.5))
    assert weights.weight("a") == 1.0
    weights.observe([outcome("a", 0.0, 0.0)])
    assert weights.weight("a") == 1.0  # its first group has put it into a bin
    weights.observe([outcome("a", 0.0, 0.0)])
    assert weights.weight("a") == pytest.approx(math.exp(0.5))
    weights.observe([outcome("a", 0.0, 0.0)])
    assert weights.weight("a") == pytest.approx(2.117, abs=1e-3)
    limited = DifficultyBinWeights(DifficultyBinWeightsConfig(beta=0.5, limit=0.5))
    capped = DifficultyBinWeights(DifficultyBinWeightsConfig(beta=0.5, max_weight=1.25))
    for each in (limited, capped):
        each.restore(weights.state())
    assert (limited.weight("a"), capped.weight("a")) == pytest.approx((1.6487, 1.25), abs=1e-4)


def test_a_rare_bin_counts_more_with_by_share() -> None:
    weights = DifficultyBinWeights(
        DifficultyBinWeightsConfig(beta=1.0, by_share=True, limit=9.0, max_weight=99.0)
    )
    batch = [outcome("a", 0.0, 0.0), *(outcome(name, 1.0, 0.0) for name in "bcd")]
    weights.observe(batch)
    weights.observe(batch)
    assert weights.weight("a") == pytest.approx(math.exp(1 / (1 / 4)))
    assert weights.weight("b") == pytest.approx(math.exp(0.5 / (3 / 4)))
    even = DifficultyBinWeights(
        DifficultyBinWeightsConfig(
            beta=1.0, by_share=True, min_share=0.5, limit=9.0, max_weight=99.0
        )
    )
    even.observe(batch)
    even.observe(batch)
    assert even.weight("a") == pytest.approx(math.exp(1 / 0.5)), "1/4 counts as 1/2"


def test_advantages_are_multiplied_by_the_weight_of_their_task() -> None:
    weights = DifficultyBinWeights(DifficultyBinWeightsConfig(beta=1.0))
    for _ in range(2):
        weights.observe([outcome(Task("toy", "train", 0).key, 0.0, 0.0)])
    items = [made(1.0), made(0.0, episode=1), replace(made(1.0, episode=2), task=Task("x", "y", 1))]
    scored = [
        ScoredTrajectory(item, (value,)) for item, value in zip(items, (1, -2, 3), strict=True)
    ]
    seen = context()
    found = weights.recredit([group(*items)], scored, seen)
    assert [each.advantage[0] for each in found] == pytest.approx([math.e, -2 * math.e, 3])
    assert seen.metrics == {
        "difficulty_bin_weights/weight_mean": pytest.approx((2 * math.e + 1) / 3)
    }


def worst(options: DifficultyBinWeightsConfig | None) -> tuple[float, float]:
    """Return the success rates of 6 tasks that pull shared parameters the other way, and of 18."""
    found = []
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        features = rng.normal(0, 0.4, (TASKS, 4))
        features[:, 0] += np.where(np.arange(TASKS) < HARD, -0.6, 1.0)
        w = np.zeros(4)
        weights = DifficultyBinWeights(options) if options else None
        waiting: list[list[Outcome]] = []
        for _ in range(60):
            gradient, total, batch = np.zeros(4), 0.0, []
            for task in rng.choice(TASKS, GROUPS, replace=False):
                rate = 1 / (1 + math.exp(-features[task] @ w))
                rewards = (rng.random(SIZE) < rate).astype(float)
                advantage = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
                weight = weights.weight(str(task)) if weights else 1.0
                total += weight
                gradient += weight * (advantage * (rewards - rate)).mean() * features[task]
                batch.append(outcome(str(task), *rewards))
            w = w + 2 * gradient / total
            waiting.append(batch)
            if weights and len(waiting) > 1:
                weights.observe(waiting.pop(0))
        rates = 1 / (1 + np.exp(-features @ w))
        found.append((rates[:HARD].mean(), rates[HARD:].mean()))
    hard, others = np.mean(found, axis=0)
    return float(hard), float(others)


def test_the_worst_tasks_gain_at_the_cost_of_the_others() -> None:
    """Measured: 0.24 and 0.97 without, 0.48 and 0.81 with it (standard error at most 0.05)."""
    plain = worst(None)
    hard, others = worst(
        DifficultyBinWeightsConfig(eta=2.0, by_share=True, limit=5.0, max_weight=20.0)
    )
    assert hard > plain[0] + 0.1 and others < plain[1]


def test_the_square_root_law_with_an_exact_budget() -> None:
    """Variances 0.25 and 0.09 of equally many groups with a mean of 8 give 10 and 6 episodes."""
    every = np.arange(2.0, 17.0)
    assert exact_sizes([5, 5], [-0.25 / every, -0.09 / every], least=2, budget=80) == [10, 6]
    with pytest.raises(ValueError, match="2 groups of 5 episodes are more than 9"):
        exact_sizes([2], [np.zeros(3)], least=5, budget=9)


def test_dynamic_programming_finds_the_best_of_all_sizes() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        counts = [int(each) for each in rng.integers(1, 5, 3)]
        utility = [rng.normal(size=5) for _ in counts]
        budget = int(rng.integers(2 * sum(counts), 7 * sum(counts)))
        totals = {
            sizes: (
                sum(c * n for c, n in zip(counts, sizes, strict=True)),
                sum(values[n - 2] for values, n in zip(utility, sizes, strict=True)),
            )
            for sizes in product(range(2, 7), repeat=3)
        }
        fitting = {sizes: each for sizes, each in totals.items() if each[0] <= budget}
        best = max(fitting, key=lambda sizes: fitting[sizes])
        assert tuple(exact_sizes(counts, utility, least=2, budget=budget)) == best


def sizes_after(batches: int, **options: Any) -> tuple[BinSizes, list[int]]:
    """Return the sizes of a task that is solved half of the time, and of one that never is."""
    made = BinSizes(BinSizesConfig(**options))
    for _ in range(batches):
        made.observe([outcome("half", 1.0, 0.0, 1.0, 0.0), outcome("never", *[0.0] * 4)])
    return made, [made.first(task) for task in ("half", "never")]


def test_bins_with_equal_rewards_get_few_episodes() -> None:
    made, sizes = sizes_after(9)
    assert sizes == [12, 4] and made.first("new") == 8
    assert made.more(GroupSoFar("half", (0.0, 1.0), 2, 2)) == 0
    assert sizes_after(1)[1] == [8, 8]  # the bins are known, but no variance
    assert sizes_after(9, rule="weights")[1] == [12, 4]


def test_the_price_of_an_episode_rises_while_groups_are_too_large() -> None:
    """Groups of 4 with a mean of 2.5: mu grows by 1.5 mu_rate per batch."""
    made, _ = sizes_after(4, rule="weights", min=2, mean=2.5, mu_rate=0.01)
    assert made.state()["mu"] == pytest.approx(4 * 0.015)


@pytest.mark.parametrize("rule", ["sqrt", "weights"])
def test_a_restored_allocator_has_the_same_sizes(rule: str) -> None:
    one, sizes = sizes_after(9, rule=rule)
    other = BinSizes(BinSizesConfig(rule=rule))  # type: ignore[arg-type]
    other.restore(one.state())
    assert [other.first(task) for task in ("half", "never")] == sizes
    for each in (one, other):
        each.observe([outcome("never", 1.0, 0.0)] * 9)
    assert one.state() == other.state() and one.first("never") == other.first("never")


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"bin_sizes.mean must be between .* got 40, 4 and 16"):
        BinSizesConfig(mean=40.0)
    with pytest.raises(ConfigError, match=r"bin_sizes.rate is an option of weights"):
        BinSizesConfig(rate=2.0)
    for name in ("difficulty_bin_weights", "bin_sizes"):
        with pytest.raises(
            ConfigError, match=f"{name} needs selection.pool > 0.*earlier results of a task"
        ):
            RunConfig(recipe="mine", techniques=name)


def error_of_means(part: BinSizes | None, seed: int) -> tuple[float, float]:
    """Return the mean of p (1 - p) / n and of n, over the groups of a bandit's second half."""
    rng = np.random.default_rng(seed)
    rates = 1 / (1 + np.exp(-rng.normal(-2.5, 2.0, 64)))
    drawn, sizes = [], []
    for _ in range(60):
        batch = []
        for task in rng.choice(64, 8, replace=False):
            sizes.append(part.first(str(task)) if part else 8)
            drawn.append(rates[task])
            batch.append(outcome(str(task), *(rng.random(sizes[-1]) < rates[task]).astype(float)))
        if part:
            part.observe(batch)
    p, n = np.array(drawn[240:]), np.array(sizes[240:])
    return float((p * (1 - p) / n).mean()), float(n.mean())


def test_sizes_by_bin_lower_the_error_of_the_means() -> None:
    """Measured: 0.0119 with 8 episodes each, 0.0104 with 8.0 on average."""
    even = np.mean([error_of_means(None, seed) for seed in range(SEEDS)], axis=0)
    sqrt = np.mean(
        [error_of_means(BinSizes(BinSizesConfig()), seed) for seed in range(SEEDS)], axis=0
    )
    assert sqrt[1] == pytest.approx(8.0, abs=0.2)
    assert sqrt[0] < even[0] - 0.0007
