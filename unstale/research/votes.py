"""Choose one of several attempts at a task, by votes: their answers, or a judge's comparisons.

In a tournament, the attempts are compared in groups of G, and the winners are compared again until
one is left. A comparison takes K votes of a judge, who reads the attempts in another order each
time. This is the vote of RTV (recursive tournament voting).
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

Ask = Callable[[Sequence[int], int], Awaitable[int | None]]
"""A function `(attempts, vote)` that asks a judge which attempt is best. It returns an element of
`attempts`, or None if the judge named none. The judge reads the attempts in the given order. `vote`
is the number of the vote in its comparison.
"""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of some attempts: a judge's votes, and the attempt that won."""

    attempts: tuple[int, ...]
    votes: tuple[int | None, ...]
    """The attempt that each vote named, None for a vote that named none."""
    winner: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A ranking of attempts, best first, and the comparisons behind it."""

    ranking: tuple[int, ...]
    comparisons: tuple[Comparison, ...] = ()


def most_voted(votes: Sequence[int | None], attempts: Sequence[int], random: Random) -> int:
    """Return the attempt with the most votes. Ties are broken at random, also if there are no
    votes.
    """
    counts = Counter(vote for vote in votes if vote is not None)
    most = max((counts[each] for each in attempts), default=0)
    return random.choice([each for each in attempts if counts[each] == most])


def by_majority(
    answers: Sequence[str], random: Random, weights: Sequence[float] | None = None
) -> Choice:
    """Rank attempts by how often their answer was given. An empty answer counts as none.

    With `weights`, one for each answer, an answer counts by them. Equal answers are ordered at
    random, and attempts without an answer come last.
    """
    counts: dict[str, float] = {}
    for answer, weight in zip(answers, weights or [1.0] * len(answers), strict=True):
        if answer:
            counts[answer] = counts.get(answer, 0.0) + weight
    order = {answer: random.random() for answer in sorted(counts)}
    rank = {answer: (-counts[answer], order[answer]) for answer in counts}
    ranking = sorted(range(len(answers)), key=lambda i: rank.get(answers[i], (1, 0.0)))
    return Choice(tuple(ranking))


async def by_tournament(
    attempts: Sequence[int], ask: Ask, *, votes: int, group: int, random: Random
) -> Choice:
    """Rank attempts by a tournament in groups of `group`, each decided by `votes` votes.

    An attempt that is alone in its group wins it. Attempts that lose in a later round rank higher.
    Raises ValueError without attempts, or if `group` is below 2.
    """
    if not attempts or group < 2:
        raise ValueError(f"{len(attempts)} attempts in groups of {group}")
    left, ranking = list(attempts), list[int]()
    comparisons: list[Comparison] = []
    while len(left) > 1:
        groups = [left[at : at + group] for at in range(0, len(left), group)]
        async with asyncio.TaskGroup() as running:
            asked = [
                running.create_task(_compare(each, ask, votes, Random(random.random())))
                for each in groups
                if len(each) > 1
            ]
        comparisons += (each.result() for each in asked)
        passed = groups[-1] if len(groups[-1]) == 1 else []
        winners = [*(each.result().winner for each in asked), *passed]
        ranking[:0] = [each for each in left if each not in winners]
        left = winners
    return Choice((*left, *ranking), tuple(comparisons))


async def _compare(attempts: Sequence[int], ask: Ask, votes: int, random: Random) -> Comparison:
    """Return the comparison of attempts by `votes` votes. Each vote rotates their order."""
    turns = [number % len(attempts) for number in range(votes)]
    async with asyncio.TaskGroup() as running:
        asked = [
            running.create_task(_vote(ask, (*attempts[turn:], *attempts[:turn]), number))
            for number, turn in enumerate(turns)
        ]
    named = tuple(each.result() for each in asked)
    return Comparison(tuple(attempts), named, most_voted(named, attempts, random))


async def _vote(ask: Ask, attempts: Sequence[int], number: int) -> int | None:
    return await ask(attempts, number)


@dataclass(frozen=True, slots=True)
class JudgeRecord:
    """A judge's accuracy in comparisons of right and wrong attempts at one task."""

    votes: float
    """Share of votes for a right attempt. A vote for no attempt counts as wrong."""
    winners: float
    """Share of comparisons that a right attempt won."""
    chance: float
    """Share of right attempts in these comparisons: the accuracy of a random choice."""


def judge_record(
    comparisons: Sequence[Comparison], right: Sequence[bool | None]
) -> JudgeRecord | None:
    """Return a judge's accuracy. None if no comparison had both right and wrong attempts.

    `right` is the success of each attempt; None counts as wrong.
    """
    mixed = [each for each in comparisons if len({right[one] is True for one in each.attempts}) > 1]
    if not mixed:
        return None
    return JudgeRecord(
        votes=fmean(
            fmean(vote is not None and right[vote] is True for vote in each.votes) for each in mixed
        ),
        winners=fmean(right[each.winner] is True for each in mixed),
        chance=fmean(fmean(right[one] is True for one in each.attempts) for each in mixed),
    )
