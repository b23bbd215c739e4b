"""Test the benchmark of asynchrony: its workloads, its lower bounds on step time, its tables."""

from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks import asynchrony
from benchmarks.asynchrony import (
    ASYNC,
    SYNC,
    Measured,
    Result,
    Workload,
    learnt,
    measure,
    shown,
    tables,
    workloads,
)


def test_synchronous_runs_differ_in_the_schedule_and_have_all_cores_by_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asynchrony, "cores", lambda: 2)
    held = workloads()
    both = [work for work in held if work.synchronous]
    assert (
        all(one.latency_s < other.latency_s for one, other in pairwise(both))
        and both[0].latency_s == 0
    )
    points = [work for work in held if not work.synchronous]
    assert {work.max_staleness for work in points} == {1, 2, 3, 4} and {
        work.lookahead_window for work in points
    } == {1, 4, 16}
    assert len({(work.latency_s, work.latency_sigma) for work in points}) == 1
    for work in both:
        one, other = (
            work.config(seed=3, steps=4, synchronous=synchronous) for synchronous in (False, True)
        )
        assert one.schedule.max_staleness and other.schedule.max_staleness == 0
        assert (one.task, one.engine, one.seed) == (other.task, other.engine, other.seed)
        assert (one.trainer.threads, replace(one.trainer, threads=2)) == (1, other.trainer)
        assert one.schedule.groups_per_step == other.schedule.groups_per_step


def test_no_step_counts_that_fills_the_pipeline() -> None:
    """Two timed steps of 3 s: 2 s of engine, 1.5 s of trainer; 32 episodes of 9 s each, at most 96
    live."""
    rows = [
        {
            "time_s": 20.0 + 3 * step,
            "trainer/cpu_s": 2.5,
            "engine/busy_s": 2.2,
            "engine/cpu_s": 2.2,
            "engine/sampled_tokens": 1100,
            "trainer/action_tokens": 1000,
            "trainer/update_s": 1.0,
            "old_logps/prepare_s": 0.4,
            "publish/trainer_s": 0.1,
            "rollout/tool_wait_s": 216.0,
            "rollout/generation_wait_s": 72.0,
            "rollout/episodes": 32,
        }
        for step in range(4)
    ]
    rows[0]["engine/busy_s"] = rows[1]["engine/busy_s"] = 1000.0
    found = measure(rows, 2, live=96, num_cores=2)
    assert found.step_s == pytest.approx(3.0) and found.tools == pytest.approx(0.75)
    assert found.limits == pytest.approx(
        {"engine": 2.0, "trainer": 1.5, "episodes": 3.0, "processor": 2.35}
    )
    assert (found.ideal, found.limit) == (pytest.approx(3.0), "episodes")


def result(
    name: str, seconds: float, *, synchronous: bool = True, window: int = 4, tools: float = 0.6
) -> Result:
    work = Workload(
        name=name,
        latency_s=0.5,
        latency_sigma=0.5,
        max_staleness=2,
        lookahead_window=window,
        groups_per_step=4,
        group_size=8,
        synchronous=synchronous,
    )
    limits = {"engine": 0.9, "trainer": 1.0, "episodes": 0.4, "processor": 0.8}
    found = {ASYNC: [Measured(seconds, tools, limits, 0.9 * seconds)]}
    return Result(work, found | ({SYNC: [Measured(4.0, tools, limits)]} if synchronous else {}))


def test_the_tables_say_what_is_met_and_what_is_missed() -> None:
    lines = tables(
        [
            result("near", 1.25),
            result("far", 2.0),
            result("point", 1.6, synchronous=False, window=1),
        ]
    )
    assert (
        "| near | 60% | 2, 4 | 1 | 4.00 | 1.25 | 3.20 (3.20 to 3.20) | 1.00 | trainer | 80% (80% "
        "to 80%) |" in lines
    )
    ideal = (
        "85% of the ideal missed: 0.{} of 0.85, in 1 round; "
        "of the ideal with the staleness bound, 0.90."
    )
    for name, share, times in (("near", "80", "met: 3.20"), ("far", "50", "missed: 2.00")):
        faster = (
            f"2.8 times as fast, with 60% tools, {times} of 2.8, in 1 round "
            "(the ideal would be 4.00 times)"
        )
        assert f"* {name}: {faster}; {ideal.format(share)}" in lines
    assert "| 2 | 1 | 1 | 1.60 (1.60 to 1.60) | 2.50 | 1.00 | 62% | 90% |" in lines
    assert "| far | 2.00 | 0.90 | 1.00 | 0.40 | 0.80 | 1.80 | 90% |" in lines


def test_what_was_learnt_is_compared_at_every_graded_step_and_over_all_seeds() -> None:
    wanted = {
        "steps": 4,
        "groups_per_step": 2,
        "group_size": 8,
        "max_staleness": 2,
        "held_out": 100,
        "seeds": [3, 7],
    }
    graded = {SYNC: {0: [0.3, 0.3], 4: [0.8, 0.6]}, ASYNC: {0: [0.3, 0.3], 4: [0.7, 0.66]}}
    rising = [0.1, 0.3, 0.5, 0.7]
    lines = learnt(graded, {SYNC: [rising, rising], ASYNC: [[0.1, 0.1, 0.3, 0.5]] * 2}, wanted)
    assert "| 4 | 3 | 80.0% (71% to 87%) | 70.0% (60% to 78%) | no |" in lines
    assert "| 4 | 7 | 60.0% (50% to 69%) | 66.0% (56% to 75%) | yes |" in lines
    assert "| 4 | all | 70.0% (63% to 76%) | 68.0% (61% to 74%) | yes |" in lines
    assert lines[-1] == "| 1 to 4 | 40.0% | 25.0% | -15.0 |"


def test_without_tools_no_speed_is_promised() -> None:
    quick = result("quick", 1.1, tools=0.0)
    quick = replace(quick, work=replace(quick.work, latency_s=0.0))
    (told,) = [line for line in tables([quick]) if line.startswith("* ")]
    assert told == "* quick: 85% of the ideal met: 0.91 of 0.85, in 1 round."


def test_what_is_drawn_is_what_the_tables_say() -> None:
    over, curve = shown(
        [
            result("far", 2.0),
            result("near", 1.25, tools=0.3),
            result("point", 1.6, synchronous=False),
        ]
    )
    assert [(tools, times) for tools, times, *_ in over] == [(0.3, [3.2]), (0.6, [2.0])]
    assert [ideals for _, _, *ideals in over] == [
        [4.0, pytest.approx(4 / 1.125)],
        [4.0, pytest.approx(4 / 1.8)],
    ]
    assert curve == [(4, 2, 2.0), (4, 2, 2.5)]
