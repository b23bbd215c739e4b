"""Test the rollout's metrics: values worked out by hand, every standard metric in every row (NaN
without an episode), and one count per episode with its branches."""

import math
from typing import Any

import pytest

from unstale.records import ContextPiece, Failure, Group, Sampled, Task, Trajectory
from unstale.records import ScoredTrajectory as Scored
from unstale.rollout.metrics import describe, describe_advantages

TASK = Task("toy", "train", 1)


def played(reward: float, length: int = 1, **fields: Any) -> Trajectory:
    pieces = (ContextPiece((1, 2)), Sampled((3,) * length, (-0.1,) * length, 0))
    known = {"rewards": {"r": reward}, "stop": "done", "task": TASK, "seed": 0}
    return Trajectory(pieces, **{**known, **fields})


def test_episodes_and_rewards() -> None:
    good = played(1.0, facts={"calls": 2.0, "reward/style": 0.5})
    bad = played(0.0, 2, stop="max_turns", rewards={"r": -0.5, "s": 0.5})
    cut = played(0.0, 4, stop="max_tokens", rewards={})
    groups = [Group(TASK, (good, bad)), Group(TASK, (cut,), (Failure(TASK, "begin", "x"),))]
    unparsed = played(0.0, stop="invalid_format", rewards={})
    figures = describe([Group(TASK, (good, unparsed))])
    assert figures["completion/invalid_format_share"] == 0.5
    assert figures["completion/truncated_share"] == figures["reward/missing_share"] == 0
    figures = describe(groups)
    assert figures["rollout/episodes"] == 3 and figures["rollout/failed_episodes"] == 1
    assert figures["rollout/success_rate"] == pytest.approx(1 / 3)
    assert figures["rollout/turns_mean"] == 1
    assert figures["rollout/total_tokens_mean"] == pytest.approx((3 + 4 + 6) / 3)
    assert figures["reward/mean"] == pytest.approx(1 / 3)
    assert figures["reward/std"] == pytest.approx(
        math.sqrt(1 / 3)
    )  # 4/9 + 1/9 + 1/9 over n - 1 = 2
    assert figures["reward/r_mean"] == pytest.approx(0.5 / 3)
    assert figures["reward/s_mean"] == pytest.approx(0.5 / 3)
    assert figures["reward/style_mean"] == pytest.approx(0.5 / 3)
    assert figures["env/calls_mean"] == pytest.approx(2 / 3)
    assert figures["reward/zero_std_group_share"] == 0.5
    assert figures["completion/truncated_share"] == pytest.approx(2 / 3)
    assert figures["completion/max_turns_share"] == pytest.approx(1 / 3)
    assert figures["completion/max_tokens_share"] == pytest.approx(1 / 3)


def test_lengths_count_branches_and_have_percentiles() -> None:
    lengths = [*range(1, 11)]
    forked = played(1.0, 5, branches=(played(1.0, 6),))
    figures = describe([Group(TASK, (*(played(1.0, length) for length in lengths), forked))])
    assert figures["completion/tokens_mean"] == 6  # (1 + ... + 11) / 11
    assert figures["rollout/sampled_tokens"] == 66
    assert figures["completion/tokens_max"] == 11
    assert figures["completion/tokens_p50"] == 6
    assert figures["completion/tokens_p90"] == 10
    assert figures["completion/tokens_p99"] == 11


def test_every_standard_figure_is_in_every_row() -> None:
    full = describe([Group(TASK, (played(1.0), played(0.0)))])
    empty = describe([])
    assert set(full) - set(empty) == {"reward/r_mean"}
    assert all(math.isnan(empty[name]) for name in set(empty) if "rollout/" not in name)
    assert math.isnan(describe([Group(TASK, (played(1.0),))])["reward/std"])


def test_a_group_without_a_spread_of_advantages_teaches_nothing() -> None:
    one, two = played(1.0, episode=0), played(0.0, episode=1)
    same = played(1.0, episode=2, branches=(played(1.0, episode=3),))
    groups = [Group(TASK, (one, two)), Group(TASK, (same,)), Group(TASK, ())]
    scored = [
        Scored(one, (0.5,)),
        Scored(two, (-0.5,)),
        Scored(same, (0.25,)),
        Scored(same.branches[0], (0.25,)),
    ]
    figures = describe_advantages(groups, scored)
    assert figures == {"advantage/zero_spread_group_share": pytest.approx(2 / 3)}
    assert math.isnan(describe_advantages([], [])["advantage/zero_spread_group_share"])
