"""Test `limits`: the quantile, which groups it limits and learns from, and its effect on turns.

In the toy, a policy has ways of 2 to 20 turns to solve a task, which succeed equally often.
"""

from collections.abc import Sequence

import pytest
import torch

from tests.support.bandit import Arm, Learner
from unstale.config import ConfigError, RunConfig
from unstale.config.options import override
from unstale.lint import check
from unstale.records import TurnLimit
from unstale.techniques.hooks import Outcome
from unstale.techniques.limits import Limits, LimitsConfig

RUN = RunConfig(recipe="mine", techniques="limits")


def outcome(*turns: int, limit: int = 0, task: str = "task") -> Outcome:
    return Outcome(task, 0, 0, (), 0, 0, success_turns=turns, turn_limit=limit)


def limit_after(turns: Sequence[int], **options: object) -> TurnLimit | None:
    limits = Limits(LimitsConfig(successes=1, **options))  # type: ignore[arg-type]
    limits.observe([outcome(*turns)])
    return limits.turn_limit(1, "task")


def test_the_limit_is_the_quantile_rounded_up() -> None:
    turns = [20, 2, 3, 4, 5, 8, 9, 10]
    assert limit_after(turns, quantile=1.0, remind=0) == TurnLimit(20)
    assert limit_after(turns) == TurnLimit(10, remind=2)
    assert limit_after([4] * 8, quantile=0.9, remind=0) == TurnLimit(4)
    assert limit_after(turns, extend=3, extensions=2, request="") == TurnLimit(
        10, remind=2, extend=3, extensions=2
    )


def test_there_is_no_limit_before_enough_successes_nor_in_every_eighth_group() -> None:
    limits = Limits(LimitsConfig(successes=4, window=6))
    limits.observe([outcome(3, 3), outcome(), outcome(3)])
    assert limits.turn_limit(1, "task") is None
    limits.observe([outcome(9)])
    found = [limits.turn_limit(number, "task") for number in range(17)]
    assert [number for number, limit in enumerate(found) if limit is None] == [0, 8, 16]
    assert found[1] == TurnLimit(5, remind=2)  # the quantile of 3, 3, 3, 9 is 4.5
    limits.observe([outcome(*[7] * 6)])
    assert limits.turn_limit(1, "task") == TurnLimit(7, remind=2)  # of the latest 6 alone


def test_successes_under_a_limit_do_not_lower_it() -> None:
    """If they counted, the limit would fall from 8 to 2, as each limit cuts off a quarter."""
    limits = Limits(LimitsConfig(successes=4, window=8))
    limits.observe([outcome(2, 4, 6, 8, 8)])
    for _ in range(20):
        limit = limits.turn_limit(1, "task")
        assert limit and limit.turns == 8
        limits.observe([outcome(2, 4, 6, limit=limit.turns)])


def test_with_scope_task_each_task_has_the_limit_of_its_own_successes() -> None:
    """With quantile 1 it is the longest one, as in DART."""
    limits = Limits(LimitsConfig(scope="task", quantile=1.0, successes=2))
    limits.observe([outcome(3, 5, task="a"), outcome(9, task="b")])
    assert limits.turn_limit(1, "a") == TurnLimit(5, remind=2)
    assert limits.turn_limit(1, "b") is None is limits.turn_limit(1, "c")
    limits.observe([outcome(7, task="b")])
    again = Limits(LimitsConfig(scope="task", quantile=1.0, successes=2))
    again.restore(limits.state())
    assert again.turn_limit(1, "b") == TurnLimit(9, remind=2)
    with pytest.raises(ConfigError, match=r"scope = task needs selection\.pool > 0, got 0"):
        override(RUN, {"limits.scope": "task"})
    facts = check(override(RUN, {"limits.scope": "task", "selection.pool": 8})).facts
    assert "of the latest 256 successes of its task" in facts["techniques"]


def test_its_state_is_restored() -> None:
    limits, again = Limits(LimitsConfig(successes=2)), Limits(LimitsConfig(successes=2))
    limits.observe([outcome(3, 5)])
    again.restore(limits.state())
    assert again.turn_limit(1, "task") == limits.turn_limit(1, "task") == TurnLimit(5, remind=2)
    limits.observe([outcome(9, 9, 9, 9)])
    assert again.turn_limit(1, "task") == TurnLimit(5, remind=2)


def test_wrong_options_are_refused() -> None:
    for values, message in [
        ({"limits.window": 8}, r"limits\.window must be >= 64 \(limits\.successes\), got 8"),
        ({"limits.extensions": 2}, r"used only with limits\.extend > 0"),
        ({"rollout.max_turns": 1}, r"limits needs rollout\.max_turns >= 2, got 1"),
    ]:
        with pytest.raises(ConfigError, match=message):
            override(RUN, values)


def test_the_linter_says_the_limit_and_warns_of_a_filter_that_takes_its_cost_away() -> None:
    facts = check(override(RUN, {"limits.extend": 4})).facts["techniques"]
    assert "as 75% of the latest 256 successes" in facts and "'MORE TURNS' give 4 more" in facts
    both = {"techniques": "limits truncated"}
    (finding,) = check(override(RUN, both)).warnings
    assert "limits with truncated" in finding.wrong and len(finding.fixes) == 2
    soft = {**both, "truncated.rule": "reward", "truncated.penalty": 0.3}
    assert not check(override(RUN, soft)).warnings


TURNS = (2, 3, 4, 5, 8, 9, 10, 20)
"""The number of turns of each way to solve the task. All succeed with probability 0.6."""
RIGHT: Arm = [(0.6, {"reward": 1}), (0.4, {"reward": 0})]
CUT: Arm = [(1.0, {"reward": 0, "stop": "max_turns"})]


def mean_turns(technique: Limits | None, *, steps: int) -> float:
    """Return the mean number of turns of an episode without a limit, after training."""
    logits = torch.zeros(24, len(TURNS))
    for number in range(steps):
        limit = technique.turn_limit(number, "task") if technique else None
        most = limit.turns if limit else TURNS[-1]
        learner = Learner([RIGHT if turns <= most else CUT for turns in TURNS], logits, seed=number)
        scored = [each.trajectory for each in learner.step({})]
        logits = learner.logits
        if technique:
            successes = [TURNS[each.tokens[0]] for each in scored if each.success]
            technique.observe([outcome(*successes, limit=limit.turns if limit else 0)])
    return float((logits.softmax(-1).mean(0) * torch.tensor(TURNS)).sum())


def test_turns_fall_at_an_equal_rate_of_success() -> None:
    """Measured after 24 steps: 7.5 turns without a limit, 5.3 with one; quantile 0.5: 3.5."""
    plain = mean_turns(None, steps=24)
    assert mean_turns(Limits(LimitsConfig()), steps=24) < plain - 1
    assert mean_turns(Limits(LimitsConfig(quantile=0.5)), steps=24) < plain - 2
