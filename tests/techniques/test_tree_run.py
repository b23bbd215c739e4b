"""Test a whole asynchronous run with forked episodes: weights change between parent and fork."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cli.test_run import quiet
from tests.support.tiny_runs import save_tiny, tiny_run
from unstale.cli import session
from unstale.config import RunConfig
from unstale.config.options import override
from unstale.durability.journal import Journal, check
from unstale.model.policy import Policy
from unstale.records import Provenance, Sampled, Trajectory, walk
from unstale.testing import plain_logps
from unstale.token_values import TokenFlag

pytestmark = pytest.mark.usefixtures("forked_children")

TOLERANCE = 1e-5
"""Largest difference of two log-probabilities in float32, in nats."""


LIVE = {"entropy": {"tree.threshold": 3.0, "tree.every": 3}, "second": {"tree.every": 3}}
"""Options with which episodes of the tiny policy are forked while they run."""


def configure(model: Path, runs: Path, branch: str) -> RunConfig:
    config = tiny_run(model, runs, max_steps=5)
    schedule = replace(config.schedule, group_size=4)
    return override(
        replace(config, schedule=schedule),
        {
            "techniques": "tree tree_advantage",
            "tree.branch": branch,
            **({"tree.places": 1} if branch in ("unlikely", "peaks") else LIVE.get(branch, {})),
        },
    )


def require_plain(policy: Policy, trajectory: Trajectory) -> int:
    """Compare the tokens that version 0 sampled with a plain forward pass. Return their number."""
    logps = plain_logps(policy, trajectory.tokens).tolist()
    count = 0
    for start, piece, _ in walk(trajectory.pieces):
        if isinstance(piece, Sampled) and piece.version == 0:
            expected = logps[start : start + len(piece.tokens)]
            assert piece.behavior_logp == pytest.approx(expected, abs=TOLERANCE)
            count += len(piece.tokens)
    return count


@pytest.mark.parametrize("branch", ["turn", "peaks", "entropy"])
@pytest.mark.costly
def test_the_own_tokens_of_a_fork_have_exact_old_log_probabilities(
    tmp_path: Path, branch: str
) -> None:
    """In float32 D is 1: `old_logp` and the engine's `behavior_logp` are of the same version."""
    save_tiny(tmp_path / "model")
    base = Policy.load(tmp_path / "model", dtype="float32")
    run = session.train(configure(tmp_path / "model", tmp_path, branch), console=quiet())
    assert {row["old_logps/exact_share"] for row in run.metrics} == {1.0}
    assert min(row["trainer/grad_norm"] for row in run.metrics) > 0
    with Journal.read(run.folder) as reader:
        assert check(reader) == []
        ended = {each.trajectory.episode: each.trajectory for each in reader.trajectories()}
        values = [
            each
            for group, steps in reader.token_steps().items()
            for step in steps
            for each in reader.trained_tokens(group, step)
        ]
    assert not any(each.advantage.any() for each in values if each.minibatch is None)
    trained = [each for each in values if each.minibatch is not None]
    forks = [each for each in trained if ended[each.episode].fork]
    assert forks
    for each in trained:
        assert each.has(TokenFlag.EXACT).all()
        assert np.abs(each.log_d).max() < TOLERANCE
        assert len(each.flags) == ended[each.episode].num_sampled
    later = 0
    for each in forks:
        trajectory = ended[each.episode]
        assert trajectory.fork is not None
        parent = ended[trajectory.fork.parent]
        later += max(trajectory.versions) > max(parent.versions)
        assert all(piece.clean for piece in trajectory.sampled)
        shared = [piece for piece in trajectory.pieces if piece.provenance == Provenance.SHARED]
        assert (
            shared
            and trajectory.tokens[: trajectory.fork.at] == parent.tokens[: trajectory.fork.at]
        )
    assert later, "no weights changed between a parent and its fork"
    with torch.inference_mode():
        assert sum(require_plain(base, each) for each in ended.values() if each.fork)


def test_a_tree_is_trained_with_ratios_over_whole_sequences(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    options = {
        "objective.loss_type": "gspo",
        "correction.unit": "sequence",
        "correction.token_veto_threshold": 1e-4,
    }
    config = override(configure(tmp_path / "model", tmp_path, "unlikely"), options)
    run = session.train(replace(config, max_steps=3), console=quiet())
    assert {row["old_logps/exact_share"] for row in run.metrics} == {1.0}
    assert {row["correction/kept_share"] for row in run.metrics} == {1.0}
    assert min(row["trainer/grad_norm"] for row in run.metrics) > 0
