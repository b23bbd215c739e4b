"""Test `regenerate`: which episodes are sampled again, by which engines, and what is trained on."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_run import quiet
from tests.support.tiny_runs import save_tiny, tiny_run
from unstale.cli import session
from unstale.config import ConfigError, RunConfig
from unstale.config.options import override
from unstale.durability.journal import Journal
from unstale.model.policy import Policy
from unstale.records import ContextPiece, Failure, Fork, Group, Sampled, Task, Trajectory
from unstale.research.techniques.regenerate import Regenerate, RegenerateConfig
from unstale.techniques.hooks import CreditContext
from unstale.testing import plain_logps

TASK = Task("t", "train", 0)
TEXTS: Any = None
NEEDED = {
    "techniques": "regenerate",
    "engine.quantise": "nvfp4",
    "engine.processes": 2,
    "engine.precise_engines": 1,
    "schedule.group_size": 12,
}


def attempt(
    episode: int, reward: float, *, tokens: tuple[int, ...] = (5, 6), fork: Fork | None = None
) -> Trajectory:
    pieces = (ContextPiece((1, 2)), Sampled(tokens, (-0.5,) * len(tokens), version=0))
    return Trajectory(pieces, {"r": reward}, "done", TASK, 7, episode, fork=fork)


def forks(*rounds: list[Any]) -> list[Fork]:
    technique = Regenerate(RegenerateConfig(number=2))
    assert technique.roots(8) == 6
    return list(asyncio.run(technique.forks(rounds, TEXTS)))


def test_the_highest_and_the_lowest_rewards_are_sampled_again() -> None:
    rewards = [0.5, 0.9, 0.1, 0.6]
    explored = [attempt(number, reward) for number, reward in enumerate(rewards)]
    failed = Failure(TASK, "begin", "broken")
    chosen = forks([failed, *explored])
    assert chosen == [Fork(1, 0), Fork(2, 0)] and all(each.repeats for each in chosen)
    assert forks([attempt(0, 1.0), attempt(1, 1.0)]) == [], "equal rewards teach nothing"
    assert forks(explored, [attempt(9, 1.0, fork=chosen[0])]) == []


def test_only_what_was_sampled_again_is_trained_on() -> None:
    again = [
        attempt(2, 1.0, fork=Fork(0, 0)),
        attempt(3, 0.0, tokens=(5, 7, 8), fork=Fork(1, 0)),
    ]
    explored = [attempt(0, 1.0), attempt(1, 0.5)]
    context = CreditContext(0.0, 0, lambda task: task.key)
    (group,) = Regenerate(RegenerateConfig(number=2)).select(
        [Group(TASK, (*explored, *again))], context
    )
    assert group.trajectories == tuple(again) and group.unused == tuple(explored)
    assert context.metrics == {
        "regenerate/reward_gap_mean": 0.25,
        "regenerate/equal_token_share": (1 + 3 / 5) / 2,
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"engine.precise_engines": 0}, "needs engine.precise_engines > 0, got 0.*Set --engine.q"),
        ({"schedule.group_size": 4}, r"must be at least 2 and below 2 \(half of .*got 2"),
        ({"regenerate.number": 6}, r"must be at least 2 and below 6 \(half of .*got 6"),
        ({"techniques": "regenerate allocate"}, "cannot be used with allocate, which chooses"),
        ({"deterministic": True}, "deterministic"),
        ({"trainer.quantise": "nvfp4"}, "trainer.quantise must be none with .*regenerate"),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        override(RunConfig(recipe="mine"), NEEDED | values)


@pytest.mark.costly
def test_a_run_trains_on_what_engines_without_rounding_sampled(tmp_path: Path) -> None:
    """Its tokens have the log-probabilities of the policy, and the explored ones have not."""
    save_tiny(tmp_path / "model")
    config = tiny_run(tmp_path / "model", tmp_path, max_steps=2)
    run = session.train(override(config, NEEDED | {"deterministic": False}), console=quiet())
    policy = Policy.load(tmp_path / "model", dtype="float32")
    with Journal.read(run.folder) as journal:
        stored = [each.trajectory for each in journal.trajectories()]
        trained = {
            each.episode for step in journal.token_steps() for each in journal.trained_tokens(step)
        }
    known = {each.episode: each for each in stored}
    errors: dict[bool, list[float]] = {True: [], False: []}
    for each in stored:
        if each.versions == {0}:
            plain = plain_logps(policy, list(each.tokens))
            start = 0
            for piece in each.pieces:
                if isinstance(piece, Sampled):
                    truth = plain[start : start + len(piece.tokens)].tolist()
                    pairs = zip(truth, piece.behavior_logp, strict=True)
                    errors[each.fork is not None] += [abs(one - other) for one, other in pairs]
                start += len(piece.tokens)
    assert max(errors[True]) < 1e-4 < 1e-2 < max(errors[False])
    again = [each for each in stored if each.fork]
    assert trained and all(known[number].fork for number in trained)
    for each in again:
        assert each.fork
        assert each.seed == known[each.fork.parent].seed and each.fork.repeats
    assert len({each.seed for each in stored}) == len(stored) - len(again)
    for row in run.metrics:
        assert row["correction/log_d_abs_p99"] < 1e-4
        assert row["filter/trained_share"] == 3 / 12
