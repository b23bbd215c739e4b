"""Test `segments`: the table of limits, when its next step begins, and what is refused."""

from typing import Any

import pytest

from unstale.config import ConfigError, EngineConfig, RolloutConfig, RunConfig
from unstale.config.options import override
from unstale.lint import check
from unstale.records import NO_BUDGET, EpisodeBudget
from unstale.techniques.hooks import EpisodeBudgeter, Outcome, Techniques
from unstale.techniques.segments import Segments, SegmentsConfig, Step, complete, parse_table

RUN = RunConfig(
    recipe="mine",
    techniques="segments",
    engine=EngineConfig(max_context=96_000),
    rollout=RolloutConfig(max_turns=97),
)


def outcome(episodes: int, cut_off: int, budget: EpisodeBudget) -> Outcome:
    return Outcome(
        "task", 0, 0, (0.0,) * episodes, failures=0, tokens=0, cut_off=cut_off, budget=budget
    )


def test_the_default_is_that_of_agentmath_at_the_length_of_its_episodes() -> None:
    options = complete(SegmentsConfig(), RUN)
    assert parse_table(options.table) == (
        Step(48_000, 48, 2),
        Step(72_000, 72, 3),
        Step(96_000, 96, 4),
    )
    assert Segments(options).episode_budget() == EpisodeBudget(
        context=48_000, calls=48, segments=2, segment_tokens=24_000, segment_calls=24
    )


def test_the_next_step_begins_if_more_than_a_tenth_of_a_window_was_cut_off() -> None:
    made = Segments(complete(SegmentsConfig(window=20), RUN))
    first = made.episode_budget()
    for _ in range(2):
        made.observe([outcome(10, 2, first), outcome(10, 0, first)])
        assert made.episode_budget() == first  # a tenth is not more than a tenth
    made.observe([outcome(10, 2, first), outcome(10, 1, first)])
    second = made.episode_budget()
    assert (second.context, second.calls, second.segments) == (72_000, 72, 3)
    made.observe([outcome(40, 40, first)])  # groups that began before
    assert made.episode_budget() == second
    made.observe([outcome(19, 19, second)])
    assert made.episode_budget() == second  # the window is not full
    made.observe([outcome(1, 0, second)])
    last = made.episode_budget()
    assert last.segments == 4
    made.observe([outcome(40, 40, last)])
    assert made.episode_budget() == last


@pytest.mark.parametrize("cut_share, moves", [(0.1, True), (0.5, False)])
def test_the_share_of_cut_episodes_decides_on_the_next_step(cut_share: float, moves: bool) -> None:
    made = Segments(complete(SegmentsConfig(window=20, cut_share=cut_share), RUN))
    first = made.episode_budget()
    made.observe([outcome(20, 10, first)])  # a half
    assert (made.episode_budget() != first) == moves


def test_a_shorter_limit_of_replies_does_not_hide_the_step_of_a_group() -> None:
    made = Segments(SegmentsConfig(window=4, table="10:2:1 20:4:1"))
    budget = EpisodeBudget(reply_tokens=5, context=10, calls=2, segments=1, segment_tokens=7)
    made.observe([outcome(4, 1, NO_BUDGET)])
    assert made.episode_budget().context == 10
    made.observe([outcome(4, 1, budget)])
    assert made.episode_budget().context == 20


def test_its_state_is_restored_also_with_fewer_steps() -> None:
    made = Segments(complete(SegmentsConfig(window=8), RUN))
    for _ in range(2):
        made.observe([outcome(8, 8, made.episode_budget())])
    made.observe([outcome(5, 5, made.episode_budget())])
    again = Segments(complete(SegmentsConfig(window=8), RUN))
    again.restore(made.state())
    assert again.episode_budget() == made.episode_budget() and again.state() == made.state()
    short = Segments(SegmentsConfig(table="100:4:2"))
    short.restore(made.state())
    assert short.episode_budget().context == 100


def test_the_default_follows_the_run_and_given_values_stay() -> None:
    short = override(RUN, {"engine.max_context": 1024, "rollout.max_turns": 1})
    made = complete(SegmentsConfig(calls=5), short)
    assert (made.table, made.tokens, made.calls) == ("512:1:2 768:1:3 1024:1:4", 256, 5)
    schedule = RUN.schedule
    groups = (schedule.max_staleness + 1) * schedule.groups_per_step
    assert made.max_concurrent_episodes == groups * schedule.group_size // 2
    assert short.technique_options == {"segments": SegmentsConfig()}, "it follows later changes"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"segments.table": "100:4"}, r"must be CONTEXT:CALLS:SEGMENTS for each step, .*'100:4'"),
        ({"segments.table": "100:0:2"}, "must be CONTEXT:CALLS:SEGMENTS for each step"),
        ({"segments.table": "100:4:2 90:8:3"}, "no smaller one, got 90:8:3 after 100:4:2"),
        ({"segments.table": "100:4:2 100:4:2"}, "larger limits in each step"),
        (
            {"segments.table": "96001:8:2"},
            r"more than 96000 tokens \(engine.max_context\), got 96001",
        ),
        ({"segments.table": "100:97:2"}, r"fewer tool calls than 97 \(rollout.max_turns\), got 97"),
        ({"techniques": "limits segments"}, "limits and segments"),
    ],
)
def test_wrong_options_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        override(RUN, values)


def test_the_linter_says_the_limits_and_it_is_built() -> None:
    facts = check(RUN).facts["techniques"]
    assert "at most 48000 tokens, 48 tool calls or 2 segments" in facts
    assert "at last 96000 tokens, 96 tool calls or 4 segments if more than 10% of 256" in facts
    made = Techniques.of(override(RUN, {"segments.max_concurrent_episodes": 7}))
    assert isinstance(made.budgeter, EpisodeBudgeter) and made.budgeter.max_concurrent_episodes == 7
    assert list(made.stateful) == ["technique/segments"] and made.limiter is None
    assert Techniques.of(override(RUN, {"techniques": "limits"})).budgeter is None
