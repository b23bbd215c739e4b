"""Test `hints`: their length by difficulty, their advantages, and what they teach on a lock.

The lock has 8 positions with 4 words, and the reward is 1 if all are right. A policy that is never
right learns nothing from its own episodes.
"""

import asyncio
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.support.groups import TASK
from unstale.config import ConfigError
from unstale.config.options import override
from unstale.recipes import RECIPES
from unstale.records import (
    ContextPiece,
    Failure,
    Fork,
    Group,
    Piece,
    Placed,
    Provenance,
    Sampled,
    ScoredTrajectory,
    Task,
    Trajectory,
    collate,
    has_loss,
    walk,
)
from unstale.research.techniques.hint_entropy_weights import (
    HintEntropyWeights,
    HintEntropyWeightsConfig,
)
from unstale.research.techniques.hints import Hints, HintsConfig
from unstale.techniques.hooks import CreditContext, Signals

POSITIONS, WORDS, EPISODES, STEPS, SEEDS = 8, 4, 8, 150, 12
RIGHT = (0,) * POSITIONS
PROMPT = ContextPiece((WORDS,))


def reply(tokens: Sequence[int]) -> Sampled:
    return Sampled(tuple(tokens), (-0.5,) * len(tokens), version=0)


def ended(episode: int, *pieces: Piece, fork: Fork | None = None) -> Trajectory:
    """Return an episode of the lock, whose replies are the words at its positions."""
    said = tuple(token for piece in pieces for token in piece.tokens)
    rewards = {"reward": float(said == RIGHT)}
    return Trajectory((PROMPT, *pieces), rewards, "done", TASK, 0, episode, fork=fork)


class Solved:
    def solution(self, task: Task, field: str) -> tuple[int, ...]:
        return RIGHT


def forks(hints: Hints, results: Sequence[Trajectory | Failure]) -> Sequence[Fork | None]:
    texts: Any = Solved()
    first = asyncio.run(hints.forks([results], texts))
    assert asyncio.run(hints.forks([results, results], texts)) == ()
    return first


def made(**options: Any) -> Hints:
    return Hints(HintsConfig(**{"number": EPISODES // 2, **options}))


def hinted(parent: int, length: int) -> Fork:
    """Return a fork before the reply of an episode, with a hint."""
    return Fork(parent, 1, (Placed(RIGHT[:length], Provenance.FORCED),))


def context() -> CreditContext:
    return CreditContext(0.0, 0, lambda task: task.key)


WRONG = ended(7, reply((1,) * POSITIONS))
OPEN = ended(8, reply(RIGHT))


@pytest.mark.parametrize(
    ("results", "length"), [((WRONG, WRONG), 7), ((WRONG, OPEN), 3), ((OPEN, OPEN), 0)]
)
def test_a_hint_is_the_longer_the_more_often_the_task_fails(
    results: Sequence[Trajectory], length: int
) -> None:
    hints = made()
    assert hints.roots(EPISODES) == 4
    expected = hinted(results[0].episode, length) if length else None
    assert forks(hints, results) == [expected] * 4
    assert forks(hints, results) == forks(hints, results), "a resumed run forks in the same way"


def test_noise_shortens_hints_and_shortest_gives_some_always() -> None:
    found = forks(made(noise=1, number=40), [WRONG])
    lengths = [len(fork.text[0].tokens) if fork else 0 for fork in found]
    assert min(lengths) <= 1 and max(lengths) >= 6 and len(set(lengths)) > 5
    (fork,) = forks(made(shortest=0.5, number=1), [OPEN])
    assert fork == hinted(8, 4)


def test_failed_episodes_have_no_hint_to_measure() -> None:
    assert forks(made(), [Failure(TASK, "begin", "broken")]) == ()
    assert len(forks(made(), [Failure(TASK, "begin", "broken"), WRONG])) == 4


def test_a_hint_is_forced_text_before_the_reply() -> None:
    (fork,) = forks(made(number=1, longest=0.25), [WRONG])
    assert fork is not None
    assert fork.prefix_of(WRONG.pieces) == (PROMPT, Placed((0, 0), Provenance.FORCED))


def test_a_hint_has_an_advantage_only_if_its_episode_has_one_above_0() -> None:
    fork = hinted(7, 2)
    (hint,) = fork.text
    helped = ended(9, hint, reply((0,) * 6), fork=fork)
    failed = ended(10, hint, reply((1,) * 6), fork=fork)
    group = Group(TASK, (WRONG, helped, failed))
    seen = context()
    plain, good, bad = made().estimate([group], seen)
    assert plain.advantage == (pytest.approx(-1 / 3),) * 9
    assert good.advantage == (pytest.approx(2 / 3),) * 9
    assert bad.advantage == (pytest.approx(-1 / 3), 0, 0, *[pytest.approx(-1 / 3)] * 6)
    assert seen.metrics["hints/episode_share"] == pytest.approx(2 / 3)
    assert seen.metrics["hints/token_share_mean"] == pytest.approx(1 / 4)
    plain, good, bad = made(baseline="apart").estimate([group], context())
    assert plain.advantage == (0,) * 9
    assert (good.advantage[0], bad.advantage[0]) == (0.5, -0.5)


def test_successes_without_and_failures_with_a_hint_weigh_more_where_hints_help() -> None:
    fork = hinted(7, 2)
    (hint,) = fork.text
    helped = ended(9, hint, reply((0,) * 6), fork=fork)
    failed = ended(10, hint, reply((1,) * 6), fork=fork)
    group = Group(TASK, (OPEN, WRONG, WRONG, WRONG, helped, helped, helped, failed))
    items = made(baseline="apart", gap=True).estimate([group], context())
    found = [item.advantage[-1] for item in items]
    assert found == [0.75 * 1.5, *[-0.25] * 3, *[0.25] * 3, -0.75 * 1.5]
    same = Group(TASK, (OPEN, WRONG))
    assert [item.advantage[-1] for item in made(gap=True).estimate([same], context())] == [
        0.5,
        -0.5,
    ]


def test_a_hint_token_weighs_less_the_further_its_entropy_is_from_the_continuation() -> None:
    fork = hinted(7, 2)
    (hint,) = fork.text
    episode = ended(9, hint, reply((0,) * 6), fork=fork)
    plain = ended(8, reply(RIGHT))
    batch = collate([ScoredTrajectory(each, (2.0,)) for each in (plain, episode)], placed="anchor")
    entropy = torch.tensor([0.0, *[1.0] * 8, 0.0, 3.0, 0.5, *[0.5] * 6])
    signals = cast(Signals, SimpleNamespace(entropy=entropy))
    shaped = HintEntropyWeights(HintEntropyWeightsConfig()).shape(batch, signals)
    expected = [0, *[2] * 8, 0, 2 * math.exp(-2.5), 2, *[2] * 6]
    assert shaped.advantage.tolist() == pytest.approx(expected)


def open_lock(seed: int, placed: Any, **options: Any) -> float:
    """Train a policy of independent positions. Return the probability that it opens the lock."""
    random = np.random.default_rng(seed)
    hints = made(**options)
    logits = np.zeros((POSITIONS, WORDS))
    for step in range(STEPS):
        weights = np.exp(logits - logits.max(1, keepdims=True))
        policy = weights / weights.sum(1, keepdims=True)
        bounds = policy.cumsum(1)

        def say(start: int, bounds: np.ndarray = bounds) -> Sampled:
            drawn = random.random(POSITIONS)
            return reply([int((bounds[i] < drawn[i]).sum()) for i in range(start, POSITIONS)])

        first = step * EPISODES
        episodes = [ended(first + i, say(0)) for i in range(hints.roots(EPISODES))]
        for fork in forks(hints, episodes):
            number = first + len(episodes)
            if fork is None:
                episodes.append(ended(number, say(0)))
            else:
                _, hint = fork.prefix_of(episodes[0].pieces)
                episodes.append(ended(number, hint, say(len(hint.tokens)), fork=fork))
        gradient = np.zeros_like(logits)
        for item in hints.estimate([Group(TASK, tuple(episodes))], context()):
            for start, piece, turn in walk(item.trajectory.pieces):
                if turn < 0 or not (isinstance(piece, Sampled) or has_loss(piece, placed)):
                    continue
                for place, token in enumerate(piece.tokens, start=start):
                    position, advantage = place - 1, item.advantage[place]
                    gradient[position] -= advantage * policy[position]
                    gradient[position, token] += advantage
        logits += 2.0 * gradient / EPISODES
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return float((weights / weights.sum(1, keepdims=True))[:, 0].prod())


@pytest.mark.parametrize(
    ("placed", "noise", "expected", "error"),
    [
        ("anchor", 0, 0.971, 0.01),
        ("mask", 0, 0.0, 0.02),
        ("anchor", 1, 0.94, 0.02),
        ("mask", 1, 0.07, 0.05),
    ],
)
@pytest.mark.costly(cases=1)
def test_hints_open_the_lock_if_they_are_trained_on(
    placed: str, noise: float, expected: float, error: float
) -> None:
    opened = [open_lock(seed, placed, noise=noise) for seed in range(SEEDS)]
    assert np.mean(opened) == pytest.approx(expected, abs=error)


ANCHOR = {"techniques": "hints", "objective.placed": "anchor"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"objective.placed": "mask"}, "needs objective.placed = anchor, got mask: .* never the"),
        ({"hints.number": 8}, "hints.number must be below schedule.group_size .8., got 8"),
        ({"techniques": "hints allocate"}, "hints cannot be used with allocate"),
        ({"techniques": "hints step_groups"}, "hints cannot be used with step_groups"),
        ({"hints.shortest": 0.95}, "hints.shortest must be <= hints.longest .0.9., got 0.95"),
    ],
)
def test_what_would_teach_nothing_is_refused(values: dict, message: str) -> None:
    plain = {"advantage.estimator": "grpo", "schedule.group_size": 8}
    with pytest.raises(ConfigError, match=message):
        override(RECIPES["calculator"](), {**plain, **ANCHOR, **values})
