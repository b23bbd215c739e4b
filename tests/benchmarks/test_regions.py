"""`benchmarks.regions` gives each token the coefficient that the trainer would give it."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.regions import ARMS, Arm, StepTokens, coefficients, stopped
from tests.support.tiny_runs import save_tiny
from unstale.cli import main
from unstale.records import ContextPiece, Sampled, ScoredTrajectory, Task, Trajectory, collate
from unstale.research import study

FILE = Path(__file__).parents[2] / "benchmarks" / "studies" / "regions.toml"

D, S = (1.0, 0.9, 1.1, 1.0), (1.0, 1.1, 1.5, 0.5)
"""pi_old / mu and pi / pi_old of four tokens: one as sampled, one inside all limits, two beyond."""


def step() -> StepTokens:
    pieces = (ContextPiece((1, 2)), Sampled((3, 4, 5, 6), (-1.0,) * 4, 0))
    trajectory = Trajectory(pieces, {"reward": 1.0}, "done", Task("t", "train", 0), 0, 1)
    batch = collate([ScoredTrajectory(trajectory, (2.0, 2.0, 2.0, 2.0, 2.0, -2.0))])
    log_d, log_s = (torch.tensor((1.0, 1.0, *each)).log() for each in (D, S))
    old_logp = batch.behavior_logp + log_d
    return StepTokens(batch, old_logp, old_logp + log_s, torch.zeros(6))


def test_without_a_limit_a_coefficient_is_that_of_the_exact_gradient() -> None:
    found = coefficients(ARMS["none"], step())[2:]
    advantage = (2.0, 2.0, 2.0, -2.0)
    expected = [-d * s * a for d, s, a in zip(D, S, advantage, strict=True)]
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


def test_a_clip_stops_what_is_beyond_its_limits() -> None:
    found = coefficients(ARMS["ppo_clip (default)"], step())
    assert (found[2:] == 0).tolist() == [False, False, True, True]
    assert stopped(found, step()) == (2, 4)


def test_with_the_route_rollout_the_limit_is_on_the_product() -> None:
    within = replace(step(), logp=step().old_logp + math.log(1.25))  # D S of the third: 1.375
    exact, mixed = (
        (coefficients(ARMS[name], within)[2:5] == 0).tolist()
        for name in ("ppo_clip (default)", "ppo_clip of pi / mu")
    )
    assert exact == [False, False, False]
    assert mixed == [False, False, True]


def test_a_rejection_of_d_reads_pi_over_mu_with_current_recompute() -> None:
    band = {"mode": "mask", "low": 0.95, "high": 1.05, "unit": "token"}
    exact = coefficients(Arm({"loss_type": "none"}, band), step())[2:]
    mixed = coefficients(Arm({"loss_type": "none"}, band, "current_recompute"), step())[2:]
    assert (exact == 0).tolist() == [False, True, True, False]
    assert (mixed == 0).tolist() == [False, False, True, True]  # D S: 1, 0.99, 1.65, 0.5


def test_every_arm_of_the_study_is_accepted_and_samples_as_much(tmp_path: Path) -> None:
    save_tiny(tmp_path / "tiny")
    words = [str(FILE), "--model", str(tmp_path / "tiny"), "--seeds", "1"]
    plan = study.planned(main.parse(["compare", *words, "--runs", str(tmp_path / "runs")]))
    runs = [run for each in plan.comparisons for run in each.runs]
    assert len(runs) == 11
    sizes = {run.config.schedule.group_size * run.config.schedule.groups_per_step for run in runs}
    assert sizes == {64}
