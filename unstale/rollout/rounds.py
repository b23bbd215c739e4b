"""Rounds: episodes of a group stop at places of decision, where a strategy forks or prunes them.

A round is complete when every episode of the group has ended or waits at its next place. Then the
strategy decides about all of them at once. So its decisions depend on recorded tokens only, not on
the speed of an engine. They are recorded before any episode continues, and repeated on a resume.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from typing import Any, NamedTuple

from unstale.records import (
    SURVIVAL,
    EpisodeRecord,
    Failure,
    Fork,
    GroupRequest,
    Piece,
    Placed,
    Provenance,
    Trajectory,
    first_tokens,
    replies,
)
from unstale.rollout.seeds import derive_seed
from unstale.techniques.hooks import DROPPED, Brancher, Decisions, Leaf, LookPlan

UNLIMITED = 1 << 30


class Start(NamedTuple):
    """The start of an episode."""

    fork: Fork | None = None
    """The place at which it was forked from another one. None for an episode that starts anew."""
    prefix: Sequence[Piece] = ()
    """The tokens before that place, and placed text."""
    looks: "Looks | None" = None
    """The places at which the episode waits for a decision."""
    seed: int | None = None
    """The seed of the random numbers for sampling. None for one of its own."""


NO_FORK = Start()
"""The `Start` of an episode that is not forked from another one."""


class Pruned(Exception):
    """Raised at a place of decision to end the episode there, without a reward."""


def reply_spans(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """Return the first and last place of each reply, with replies before a fork."""
    return [(start, start + len(tokens)) for start, tokens in replies(pieces)]


def look_places(
    pieces: Sequence[Piece], plan: LookPlan, fork: Fork | None, *, going: bool
) -> Iterator[int]:
    """Yield the places of decision of an episode, as numbers of tokens before them.

    The end of a reply is its last place, unless the plan has one place in a reply and that is
    earlier. So each token of a reply is looked at, however the reply goes on after it. `going` is
    True if the last reply continues. The decision that made the fork was its parent's, so the first
    place behind the fork in the same reply is left out.
    """
    spans = reply_spans(pieces)
    for number, (start, end) in enumerate(spans):
        is_open = going and number == len(spans) - 1
        places = [*range(start + plan.first, end + is_open, plan.every or UNLIMITED)]
        if not is_open and (plan.every or not places):
            places.append(end)
        if fork is None or start > fork.at:
            yield from places
        elif fork.at <= end:
            yield from [place for place in places if place >= fork.at][1:]


@dataclass(slots=True)
class Looks:
    """The places of decision of one episode."""

    rounds: "Rounds"
    index: int
    fork: Fork | None
    visited: int = 0
    """Number of places that the episode has passed."""
    weight: float = 1.0
    """The product of 1 / probability over the draws that the episode has survived."""

    @property
    def is_recorded(self) -> bool:
        """True if a round before a resume decided about the episode."""
        return self.rounds.has_decided(self.index)

    def left(self, length: int) -> int:
        """Return the number of tokens until the next place of a reply that has `length`."""
        plan = self.rounds.plan
        if length < plan.first:
            return plan.first - length
        return plan.every - (length - plan.first) % plan.every if plan.every else UNLIMITED

    async def visit(self, episode: int, pieces: Sequence[Piece], *, going: bool) -> None:
        """Wait for the decision at each place that was not visited. Raises `Pruned`.

        `going` is True if the last reply continues after the last of `pieces`.
        """
        places = [*look_places(pieces, self.rounds.plan, self.fork, going=going)]
        for place in places[self.visited :]:
            self.visited += 1
            before = first_tokens(pieces, place)
            is_open = going and before == tuple(pieces)
            is_end = not is_open and any(end == place for _, end in reply_spans(pieces))
            factor = await self.rounds.look(self, episode, before, going=not is_end)
            self.weight *= factor
            if self.weight <= 0:
                raise Pruned

    async def repeat(self, record: EpisodeRecord) -> None:
        """Visit the places of an episode that ended before a resume."""
        end = record.outcome
        is_pruned = isinstance(end, Trajectory) and end.stop == "pruned"
        pieces = end.pieces if isinstance(end, Trajectory) else record.pieces
        with suppress(Pruned):
            await self.visit(record.episode, pieces, going=is_pruned)

    def facts(self) -> dict[str, float]:
        """Return the episode's weight as a fact. Empty without a draw."""
        return {} if self.weight == 1 or self.weight < 0 else {SURVIVAL: self.weight}


Episode = Callable[[int, Start], Awaitable[Trajectory | Failure]]
"""A function that runs the episode with an index in its group."""


class Rounds:
    """The rounds of decisions about the episodes of one group."""

    def __init__(
        self,
        strategy: Brancher,
        request: GroupRequest,
        size: int,
        record: Callable[[int, Mapping[str, Any]], None],
    ) -> None:
        """Create the rounds of a group of at most `size` episodes.

        `record` is called with the group's number and each round's decisions, as JSON. Those of
        `request` are repeated first.
        """
        self.plan = strategy.look_plan
        self._strategy = strategy
        self._request = request
        self._size = size
        self._record = record
        self._number = 0
        self._leaves: dict[int, Leaf] = {}
        self._paths: dict[int, tuple[Piece, ...]] = {}
        """The pieces before the fork of each forked episode, as their parents sampled them."""
        self._running: set[int] = set()
        self._waiting: dict[int, asyncio.Future[float]] = {}
        self._results: dict[int, Trajectory | Failure] = {}
        self._tasks: asyncio.TaskGroup | None = None

    def has_decided(self, index: int) -> bool:
        """Return True if a round before a resume decided about the episode with this index."""
        return any(index == each for row in self._request.rounds for each, _ in row["factors"])

    async def run(self, episode: Episode, roots: int) -> list[Trajectory | Failure]:
        """Run the episodes of the group, and return their results in the order of their start."""
        self._episode = episode
        async with asyncio.TaskGroup() as self._tasks:
            for _ in range(roots):
                self._begin(None, ())
        return [self._results[index] for index in range(len(self._results))]

    def _begin(self, fork: Fork | None, parent: tuple[Piece, ...], weight: float = 1.0) -> None:
        """Start an episode. `parent` are the pieces of the one from which it is forked.

        `weight` is that of the parent before this round: whether it survives does not decide about
        its forks, because the probability may depend on tokens after them.
        """
        assert self._tasks is not None
        index = len(self._paths)
        self._paths[index] = first_tokens(parent, fork.at) if fork else ()
        self._running.add(index)
        prefix = fork.prefix_of(parent) if fork else ()
        start = Start(fork, prefix, Looks(self, index, fork, weight=weight))
        self._tasks.create_task(self._one(index, start))

    async def _one(self, index: int, start: Start) -> None:
        outcome = await self._episode(index, start)
        self._results[index] = outcome
        leaf = self._leaves.get(index)
        if isinstance(outcome, Trajectory):
            pieces = self._path(index, outcome.fork, outcome.pieces)
            weight = outcome.facts.get(SURVIVAL, float(outcome.stop != "pruned"))
            leaf = Leaf(index, outcome.episode, pieces, outcome.fork, weight)
        if leaf:
            self._leaves[index] = replace(leaf, going=False, ended=True)
        self._running.discard(index)
        self._decide()

    async def look(
        self, looks: Looks, episode: int, pieces: Sequence[Piece], *, going: bool
    ) -> float:
        """Wait until the round is decided. Return the factor of the episode's weight.

        It is 0 or `DROPPED` if the episode is pruned.
        """
        index = looks.index
        path = self._path(index, looks.fork, pieces)
        self._leaves[index] = Leaf(index, episode, path, looks.fork, looks.weight, going)
        waiting = self._waiting[index] = asyncio.get_running_loop().create_future()
        self._running.discard(index)
        self._decide()
        return await waiting

    def _path(self, index: int, fork: Fork | None, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
        """Return an episode's pieces, with its parents' pieces in place of SHARED context."""
        skip = fork.at if fork else 0
        own: list[Piece] = []
        for piece in pieces:
            if skip <= 0:
                own.append(piece)
            skip -= len(piece.tokens)
        return (*self._paths[index], *own)

    def _decide(self) -> None:
        """Decide about all episodes, if none is running."""
        if self._running:
            return
        past = self._request.rounds
        if self._number < len(past):
            factors, forks, fresh = _read(past[self._number])
            if set(factors) != set(self._waiting):
                raise ValueError(
                    f"round {self._number} of group {self._request.number} was about episodes "
                    f"{sorted(factors)}, but {sorted(self._waiting)} wait for it"
                )
        else:
            factors, forks, fresh = self._asked()
            if not (factors or forks or fresh):
                return
            row = _row(factors, forks, fresh) | {"round": self._number}
            self._record(self._request.number, row)
        self._number += 1
        waiting, self._waiting = self._waiting, {}
        for index, decided in sorted(waiting.items()):
            self._running.add(index)
            decided.set_result(factors[index])
        by_episode = {leaf.episode: leaf for leaf in self._leaves.values()}
        for fork in forks:
            leaf = by_episode[fork.parent]
            self._begin(fork, leaf.pieces, leaf.weight)
        for _ in range(fresh):
            self._begin(None, ())

    def _asked(self) -> tuple[dict[int, float], list[Fork], int]:
        """Ask the strategy. Return the factors of waiting episodes, forks, and new episodes."""
        seed = derive_seed(self._request.seed, self._request.task.key, "round", self._number)
        random = Random(seed)
        leaves = [self._leaves[index] for index in sorted(self._leaves)]
        left = self._size - len(self._paths)
        decided: Decisions = self._strategy.decide(leaves, left, random)
        if len(decided.forks) + decided.fresh > left:
            raise ValueError(f"a strategy began more than the {left} episodes that were left")
        factors = {}
        for index in sorted(self._waiting):
            chance = decided.survival.get(index, 1.0)
            survives = chance >= 1 or (chance > 0 and random.random() < chance)
            factors[index] = 1 / chance if survives else DROPPED if not chance else 0.0
        return factors, list(decided.forks), decided.fresh


def _row(factors: Mapping[int, float], forks: Sequence[Fork], fresh: int) -> dict[str, Any]:
    """Return the decisions of a round as JSON. The text of a fork is a run of FORCED tokens."""
    rows = [[each.parent, each.at, [piece.tokens for piece in each.text]] for each in forks]
    return {"factors": [*factors.items()], "forks": rows, "fresh": fresh}


def _read(row: Mapping[str, Any]) -> tuple[dict[int, float], list[Fork], int]:
    forks = [
        Fork(parent, at, tuple(Placed(tuple(each), Provenance.FORCED) for each in text))
        for parent, at, text in row["forks"]
    ]
    return {int(index): float(factor) for index, factor in row["factors"]}, forks, row["fresh"]
