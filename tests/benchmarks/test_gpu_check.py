"""Test `python -m benchmarks.gpu_check`: what the ranks measure, and when a goal is met.

The script as a whole runs in `tests/cluster/test_gpu_check_run.py`, because it needs Ray.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_check import (
    GOALS,
    TINY,
    Check,
    Goal,
    Learned,
    judge,
    largest_difference,
    make_rank,
    make_size,
    planned_bytes,
    random_batch,
    rank_config,
)
from benchmarks.gpu_engines import Finding, Replay, judge_replay, judge_transfers
from benchmarks.gpu_runs import (
    Death,
    Deaths,
    judge_deaths,
    judge_endurance,
    slope_per_hour,
)
from tests.support.ranks import run_ranks
from unstale.model.peers import RankGroup

STEPS = 3
GOAL = {goal.name: goal for goal in GOALS}
LEARNED = Learned(
    losses=[-0.25] * 4,
    grad_norms=[1.0] * 4,
    exact=1.0,
    log_d=0.01,
    tokens_per_s=[1.0, 1.0, 900.0, 900.0],
    publish_s=[9.0, 9.0, 0.4, 0.4],
    restore_s=[0.0, 9.0, 0.4, 0.4],
    peak_bytes=30_000_000_000,
    checksums=(1, 2),
)


def learn_twice(peers: RankGroup, folder: Path) -> list[Learned]:
    """Train two new ranks, one after the other, and return what they measured."""
    size = make_size(TINY, folder, "cpu", 4, 40)
    config = rank_config(size, peers.count, STEPS)
    batch = random_batch(size, 0)
    return [make_rank(config, peers).learn(size, batch, STEPS) for _ in range(2)]


@pytest.mark.costly
def test_ranks_measure_their_steps(tmp_path: Path) -> None:
    size = make_size(TINY, tmp_path, "cpu", 4, 40)
    size.policy().save(size.folder)
    one = run_ranks(1, learn_twice, tmp_path)[0][0]
    (first, second), (peer, _) = run_ranks(2, learn_twice, tmp_path)
    assert first.checksums == second.checksums == peer.checksums and len(first.checksums) == 2
    assert first.losses == second.losses and first.exact == 1.0
    assert largest_difference(one.losses, first.losses) < 1e-3
    assert largest_difference(one.grad_norms, first.grad_norms) < 0.02
    assert all(loss < -0.1 for loss in one.losses)
    assert len(first.losses) == len(first.publish_s) == STEPS
    assert all(each > 0 for each in (*first.tokens_per_s, *first.publish_s, *first.restore_s[1:]))
    assert first.restore_s[0] == 0.0


class Told(Check):
    """A check with given measurements: of one rank, of all ranks, and of all ranks again."""

    def __init__(self, gpus: int, *measured: Learned, **options: Any) -> None:
        super().__init__(Path(), gpus, **options)
        self._told = measured or (LEARNED,) * 3

    def learn(self, count: int, *, turn: int = 1) -> Learned:
        return self._told[0 if count == 1 else turn]


def result(name: str, check: Check) -> str:
    """Return the verdict in the row of a goal."""
    return judge(GOAL[name], check).strip("| ").rpartition(" | ")[2]


@pytest.mark.parametrize("name", ["1", "4", "8"])
def test_a_goal_is_met_only_with_as_many_gpus_as_it_needs(name: str) -> None:
    needed = GOAL[name].gpus
    assert result(name, Told(needed)) == "met"
    on_fewer = "" if needed == 2 else f" (met on {needed - 1})"  # ranks never share a GPU
    assert result(name, Told(needed - 1)) == f"open: needs {needed} GPUs{on_fewer}"
    assert result(name, Told(0)) == f"open: needs {needed} GPUs"
    assert result(name, Told(8, is_tiny=True)).startswith("open: the sizes are not")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("1", {"losses": [-0.25, -0.25, -0.25, -0.2506]}),
        ("1", {"grad_norms": [1.0, 1.0, 1.02, 1.0]}),
        ("1", {"exact": 0.99}),
        ("1", {"log_d": 0.0102}),
        ("4", {"restore_s": [0.0, 0.0, 0.0, 0.6]}),
        ("4", {"publish_s": [0.0, 0.0, 0.6, 0.0]}),
        ("8", {"checksums": (1, 3)}),
    ],
)
def test_a_goal_is_missed(name: str, changes: dict[str, Any]) -> None:
    again = replace(LEARNED, **changes)
    first = LEARNED if name == "8" else again
    assert result(name, Told(8, LEARNED, first, again)) == "missed"


def test_the_speed_is_compared_with_a_peer() -> None:
    planned = round(planned_bytes(Told(2), 2))
    fitting = replace(LEARNED, peak_bytes=planned)
    assert result("2", Told(2, LEARNED, fitting)) == "open: no peer installed"
    assert result("2", Told(2, LEARNED, fitting, torchtitan=1000.0)) == "met"
    assert result("2", Told(2, LEARNED, fitting, torchtitan=1001.0)) == "missed"
    too_much = replace(LEARNED, peak_bytes=2 * planned)
    assert result("2", Told(2, LEARNED, too_much, torchtitan=1000.0)) == "missed"


def test_a_transfer_is_judged_by_its_standstill() -> None:
    assert judge_transfers("vLLM", {"file": 2.0, "nccl": 0.5}) == Finding(
        "vLLM: standstill 2.00 s by file, 0.50 s by nccl", met=True
    )
    assert not judge_transfers("vLLM", {"file": 2.1, "nccl": 0.5}).met
    assert not judge_transfers("vLLM", {"file": 0.5, "nccl": 0.6}).met
    assert judge_transfers("vLLM", {"file": 0.5}).open == "nccl needs vLLM and 2 GPUs"


@pytest.mark.parametrize(
    ("changes", "met"),
    [
        ({}, True),
        ({"replayed": 0.051}, False),
        ({"missing": 0.01}, False),
        ({"speed": 0.94}, False),
    ],
)
def test_replayed_routes_must_halve_d(changes: dict[str, float], met: bool) -> None:
    replayed = Replay(own=0.1, replayed=0.05, missing=0.0, speed=0.95)
    assert judge_replay(replace(replayed, **changes)).met == met


def test_a_killed_process_must_be_back_in_time_and_nothing_lost() -> None:
    found = Deaths(10.0, [Death("rank", 8.0), Death("raylet", 70.0)], [])
    assert judge_deaths(found).met
    assert "rank 8.0, raylet 70.0; a start takes 10.0; the run is" in judge_deaths(found).figure
    assert not judge_deaths(replace(found, start_s=9.0)).met
    assert not judge_deaths(replace(found, wrong=["1 groups lost or twice"])).met


def test_a_long_run_must_not_leak_and_be_as_fast_as_planned() -> None:
    assert slope_per_hour([0, 1800, 3600, 7200], [9e9, 9e9, 1e9, 3e9]) == pytest.approx(2e9)
    with pytest.raises(RuntimeError, match="too few"):
        slope_per_hour([0.0], [1.0])
    assert judge_endurance(0.9e9, 81.0, 100.0, is_goal=True).met
    assert not judge_endurance(1.1e9, 81.0, 100.0, is_goal=True).met
    assert not judge_endurance(0.9e9, 79.0, 100.0, is_goal=True).met
    small = judge_endurance(0.9e9, 1.0, 100.0, is_goal=False)
    assert small.met and small.open.startswith("a small policy")


def test_an_error_ends_one_goal() -> None:
    def fail(check: Check) -> Finding:
        raise RuntimeError("out of memory")

    found = judge(Goal("9", "a goal", 1, fail, 1), Told(1))
    assert "**Broke off:** RuntimeError: out of memory" in found and "not measured" in found
