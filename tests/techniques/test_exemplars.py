"""Test `exemplars`: solved tasks in prompts, their removal, and the gradient on a bandit.

A task has two answers. The right one has a small probability, and a larger one with examples.
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from unstale.config import ConfigError
from unstale.config.options import override
from unstale.recipes import RECIPES
from unstale.records import (
    ContextPiece,
    Edit,
    Failure,
    Fork,
    Group,
    Placed,
    Provenance,
    Sampled,
    ScoredTrajectory,
    Task,
    Trajectory,
    collate,
)
from unstale.research.techniques.exemplars import EXAMPLES, Exemplars, ExemplarsConfig
from unstale.techniques.hooks import CreditContext, Outcome

RIGHT, OTHER = 7, 8
SEEDED = 0.6
"""Probability of the right answer with examples."""
WORDS = ("add two numbers", "add three numbers", "name a town")


class Words:
    """Texts of tasks that have words, by their index."""

    def words(self, episode: Trajectory) -> str:
        return WORDS[episode.task.index]

    def text(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))


TEXTS: Any = Words()


def attempt(
    episode: int, token: int, *, logp: float = -0.5, fork: Fork | None = None, task: int = 0
) -> Trajectory:
    prompt = (1, 2, *((30, 31) if fork else ()), 3)
    pieces = (ContextPiece(prompt), Sampled((token,), (logp,), version=4))
    rewards = {"reward": float(token == RIGHT)}
    return Trajectory(pieces, rewards, "done", Task("t", "train", task), 0, episode, fork=fork)


def made(**options: Any) -> Exemplars:
    return Exemplars(ExemplarsConfig(**{"number": 2, **options}))


def context() -> CreditContext:
    return CreditContext(0.0, 0, lambda task: task.key, texts=TEXTS)


def group(*episodes: Trajectory) -> Group:
    return Group(episodes[0].task, episodes)


def solve(technique: Exemplars, *tasks: int) -> None:
    """Let the technique train on a solved group of each task."""
    for task in tasks:
        solved = group(attempt(1, RIGHT, task=task), attempt(2, OTHER, task=task))
        technique.estimate([solved], context())
        technique.observe([Outcome(solved.task.key, 0, 0, (1.0, 0.0), 0, 2)])


def forks(technique: Exemplars, *rounds: Sequence[Any]) -> Sequence[Fork | None]:
    return asyncio.run(technique.forks(rounds, TEXTS))


def test_the_most_similar_solved_tasks_are_shown_where_all_attempts_failed() -> None:
    technique = made(examples=1)
    failed = [attempt(5, OTHER), attempt(6, OTHER)]
    assert forks(technique, failed) == [None, None], "nothing was solved yet"
    solve(technique, 2, 1, 0)
    note = f"{EXAMPLES}\n\n{WORDS[1]}\n{RIGHT}"
    assert forks(technique, failed) == [Fork(5, 0, note=note)] * 2
    assert forks(technique, [Failure(failed[0].task, "begin", "broken"), failed[1]])[0]
    assert forks(technique, [attempt(5, RIGHT), failed[1]]) == [None, None]
    assert forks(technique, failed, failed) == () and technique.roots(8) == 6


def test_the_store_is_kept_and_restored_and_loses_its_oldest_task() -> None:
    technique = made(size=2)
    solve(technique, 2, 1, 2, 0)
    other = made()
    other.restore(technique.state())
    assert [task for task, *_ in other.state()["tasks"]] == ["t/train/2", "t/train/0"]
    before = technique.state()
    technique.estimate([group(attempt(1, RIGHT, task=1))], context())
    assert technique.state() == before, "only trained batches change the store"


def test_the_examples_are_removed_and_only_plain_attempts_are_the_baseline() -> None:
    fork = Fork(1, 0, note="examples")
    seeded = attempt(3, RIGHT, logp=math.log(SEEDED), fork=fork)
    items = made().estimate(
        [group(attempt(1, OTHER), attempt(2, OTHER), seeded, attempt(4, OTHER, fork=fork))],
        seen := context(),
    )
    assert [each.advantage for each in items] == [(0,), (0,), (1,), (0,)]
    pieces = items[2].trajectory.pieces
    assert pieces[0] == ContextPiece((1, 2, 3))
    edit = Edit(2, 2, (30, 31))
    source = (math.log(SEEDED),)
    assert pieces[1] == Placed((RIGHT,), Provenance.REWRITTEN, 4, source, edit)
    assert seen.metrics["exemplars/plain_success_share"] == 0
    assert seen.metrics["exemplars/success_share"] == 0.5
    assert collate(items, placed="guided").placed is not None
    (kept,) = made(keep=True).estimate([group(seeded)], context())
    assert kept.trajectory == seeded


def gradient(item: ScoredTrajectory, chance: float, placed: str) -> float:
    """Return an attempt's gradient by the logit of the right answer in the plain prompt."""
    _, piece = item.trajectory.pieces
    (token,), weight = piece.tokens, 1.0
    of_token = chance if token == RIGHT else 1 - chance
    if isinstance(piece, Placed) and placed == "guided":
        assert piece.source_logp
        weight = of_token / math.exp(piece.source_logp[0])
    return weight * item.advantage[0] * (float(token == RIGHT) - chance)


def batch(random: Any, chance: float, technique: Exemplars) -> list[ScoredTrajectory]:
    """Sample a group of four attempts, of which two may have examples."""

    def say(chance: float, episode: int, fork: Fork | None = None) -> Trajectory:
        is_right = random.random() < chance
        token = RIGHT if is_right else OTHER
        return attempt(episode, token, logp=math.log(chance if is_right else 1 - chance), fork=fork)

    plain = [say(chance, 1), say(chance, 2)]
    starts = forks(technique, plain)
    more = [say(SEEDED if fork else chance, 3 + i, fork) for i, fork in enumerate(starts)]
    return technique.estimate([group(*plain, *more)], context())


def test_guided_attempts_have_the_exact_gradient_of_the_plain_prompt() -> None:
    technique, chance = made(), 0.02
    solve(technique, 1)
    random = np.random.default_rng(2)
    groups = [batch(random, chance, technique) for _ in range(3000)]
    seeded = [item for items in groups for item in items if item.trajectory.fork]
    exact = chance * (1 - chance)
    for placed, factor in (("guided", 1.0), ("anchor", SEEDED / chance)):
        values = np.array([gradient(item, chance, placed) for item in seeded])
        error = values.std() / math.sqrt(len(values))
        assert values.mean() == pytest.approx(factor * exact, abs=3 * error)
        assert factor * exact > 9 * error, "the test tells 0 apart"


@pytest.mark.costly
@pytest.mark.parametrize(("placed", "at_least"), [("anchor", 0.99), ("guided", 0.5)])
def test_the_success_without_examples_leaves_0(placed: str, at_least: float) -> None:
    technique, logit = made(), math.log(0.02 / 0.98)
    solve(technique, 1)
    random = np.random.default_rng(3)
    for _ in range(300):
        chance = 1 / (1 + math.exp(-logit))
        items = [item for _ in range(8) for item in batch(random, chance, technique)]
        logit += 4 * float(np.mean([gradient(item, chance, placed) for item in items]))
    assert 1 / (1 + math.exp(-logit)) > at_least


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"objective.placed": "mask"}, "placed = guided or anchor, got mask"),
        ({"exemplars.number": 8}, "exemplars.number must be below schedule.group_size .8., got 8"),
        ({"techniques": "exemplars step_groups"}, "exemplars cannot be used with step_groups"),
    ],
)
def test_what_would_teach_nothing_is_refused(values: dict, message: str) -> None:
    plain = {"techniques": "exemplars", "objective.placed": "anchor", "schedule.group_size": 8}
    with pytest.raises(ConfigError, match=message):
        override(RECIPES["calculator"](), {"advantage.estimator": "grpo", **plain, **values})
