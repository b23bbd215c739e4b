"""Test the chain from groups to advantages: filters, an estimator, recredits."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.support.groups import group, made, rewarded
from unstale.algorithms.advantages import grpo
from unstale.config import AdvantageConfig, ConfigError, RunConfig
from unstale.config import techniques as registry
from unstale.config.techniques import Entry
from unstale.records import Group, ScoredTrajectory, Task
from unstale.research.techniques.ess_lr import ENTRY
from unstale.techniques.hooks import NO_TECHNIQUES, CreditContext, Techniques

BATCH = [rewarded(1, 0, 0, 1), rewarded(0.3, 0.6, 0.9)]


def key(task: Task) -> str:
    return task.key


def scored(groups: Sequence[Group], *parts: object) -> tuple[list[ScoredTrajectory], Any]:
    chosen = Techniques({str(number): part for number, part in enumerate(parts)})
    return chosen.credit(groups, progress=0.5, version=3, estimate=grpo, identify=key)


class Keeps:
    """A filter that keeps the trajectories with an index below `count`."""

    def __init__(self, count: int) -> None:
        self.count = count

    def select(self, groups: Sequence[Group], context: CreditContext) -> Sequence[Group]:
        return [
            replace(
                each,
                trajectories=each.trajectories[: self.count],
                unused=each.unused + each.trajectories[self.count :],
            )
            for each in groups
        ]


class Changes:
    """A recredit that changes the one advantage of each trajectory."""

    def __init__(self, change: Callable[[float], float]) -> None:
        self.change = change

    def recredit(
        self, groups: Sequence[Group], scored: Sequence[ScoredTrajectory], context: CreditContext
    ) -> list[ScoredTrajectory]:
        context.metrics["changes/seen"] = len(scored)
        return [replace(each, advantage=(self.change(each.advantage[0]),)) for each in scored]


class Rewards:
    """An estimator whose advantages are the rewards, plus the run's progress and version."""

    def estimate(self, groups: Sequence[Group], context: CreditContext) -> list[ScoredTrajectory]:
        assert context.identify(groups[0].task) == "toy/train/0"
        return [
            ScoredTrajectory(item, (item.reward + context.progress + context.version,))
            for each in groups
            for item in each.trajectories
        ]


def advantages(result: list[ScoredTrajectory]) -> list[float]:
    return [each.advantage[0] for each in result]


def test_without_techniques_the_advantages_are_the_estimators() -> None:
    result, metrics = NO_TECHNIQUES.credit(
        BATCH, progress=0.0, version=0, estimate=grpo, identify=key
    )
    assert result == grpo(BATCH) and metrics == {}


def test_filters_act_in_order_and_before_the_estimator() -> None:
    result, metrics = scored(BATCH, Keeps(3), Keeps(2))
    assert result == grpo([rewarded(1, 0), rewarded(0.3, 0.6)])
    assert metrics["filter/trained_share"] == pytest.approx(4 / 7)
    assert metrics["filter/trained_success_share"] == 1 / 2
    assert metrics["filter/trained_failure_share"] == 3 / 5


def test_an_estimator_replaces_the_configured_one() -> None:
    assert advantages(scored([rewarded(1, 0)], Rewards())[0]) == [4.5, 3.5]


def test_recredits_change_advantages_in_the_order_written() -> None:
    add, double = Changes(lambda value: value + 1), Changes(lambda value: 2 * value)
    assert advantages(scored([rewarded(1, 0)], Rewards(), add, double)[0]) == [11.0, 9.0]
    result, metrics = scored([rewarded(1, 0)], double, Rewards(), add)
    assert advantages(result) == [10.0, 8.0] and metrics == {"changes/seen": 2}


def test_a_batch_of_which_nothing_is_left_has_no_advantage() -> None:
    """The branches of its episodes, too."""
    branch = made(episode=8)
    batch = [rewarded(1, 0), group(made(1, episode=7, branches=(branch,)))]
    result, metrics = scored(batch, Keeps(0), Changes(lambda value: value + 1))
    assert advantages(result) == [0.0] * 4 and result[-1].trajectory is branch
    assert metrics["filter/trained_share"] == 0.0
    assert math.isnan(scored([rewarded(0)], Keeps(1))[1]["filter/trained_success_share"])


def test_an_estimator_beside_options_of_another_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry: Entry = replace(ENTRY, slot="estimator")
    monkeypatch.setattr(registry, "techniques", lambda: {"ess_lr": entry})
    RunConfig(recipe="", techniques="ess_lr")
    with pytest.raises(ConfigError, match=r"ess_lr replaces advantage\.estimator, got rloo"):
        RunConfig(recipe="", techniques="ess_lr", advantage=AdvantageConfig(estimator="rloo"))
