"""Rounds of decisions, in which a strategy forks or prunes the episodes of a group.

Each episode waits at places of decision in its replies, such as every 100 tokens. When every
episode of the group waits or has ended, the strategy decides about all of them at once: this is a
round. So decisions depend on the recorded tokens only, not on the speed of an engine. The journal
records a decision before any episode continues, and a resumed run repeats it.
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
from unstale.rollout.states import EnvStates
from unstale.techniques.hooks import DROPPED, Brancher, Decisions, Leaf, LookPlan

UNLIMITED = 1 << 30


class Start(NamedTuple):
    """The beginning of an episode of a group: from the prompt, or a fork of another episode."""

    fork: Fork | None = None
    """The place in an earlier episode after which this one differs. None if the episode starts
    anew.
    """
    prefix: Sequence[Piece] = ()
    """The pieces (runs of tokens) before the fork, and text that the strategy puts after them."""
    looks: "Looks | None" = None
    """The places at which the episode waits for a decision."""
    seed: int | None = None
    """The seed of the random numbers for sampling. None gives the episode a seed of its own."""
    states: EnvStates | None = None
    """States of the group's environments. None if no episode of it may be forked."""


NO_FORK = Start()
"""The `Start` of an episode that begins anew and waits for no decision."""


class Pruned(Exception):
    """Raised where a strategy decides to end an episode. The episode then has no reward."""


def reply_spans(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """Return the token offsets of each reply: its start and its end. Replies before a fork are
    included.
    """
    return [(start, start + len(tokens)) for start, tokens in replies(pieces)]


def look_places(
    pieces: Sequence[Piece], plan: LookPlan, fork: Fork | None, *, going: bool
) -> Iterator[int]:
    """Yield the places of an episode at which a strategy decides, each as the number of tokens
    before it.

    `plan` says where in a reply these places are. `going` is True if the last reply is incomplete.
    The end of a complete reply is a place too, unless the plan has one place per reply and the
    reply has reached it. `fork` is the fork with which the episode began. Places before it are left
    out, and also the first one from there on in the same reply: there the strategy decided to make
    this fork.
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
    """The places at which an episode waits for the strategy to continue, fork or end it."""

    rounds: "Rounds"
    index: int
    fork: Fork | None
    visited: int = 0
    """Number of places of decision that the episode has passed."""
    weight: float = 1.0
    """Importance weight of the episode: the product of 1 / p, where p is its probability to survive
    a decision.
    """

    @property
    def is_recorded(self) -> bool:
        """True if the journal has a decision about this episode from before a resume."""
        return self.rounds.has_decided(self.index)

    def left(self, length: int) -> int:
        """Return how many tokens a reply of `length` tokens still has before the next decision
        about it.
        """
        plan = self.rounds.plan
        if length < plan.first:
            return plan.first - length
        return plan.every - (length - plan.first) % plan.every if plan.every else UNLIMITED

    async def visit(self, episode: int, pieces: Sequence[Piece], *, going: bool) -> None:
        """Wait for the decision at each place that the episode has reached and not yet visited.

        `episode` is the episode's number, and `pieces` are its tokens. `going` is True if the last
        reply is incomplete. Raises `Pruned` if a decision ends the episode.
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
        """Repeat the decisions about an episode that were made before a resume, without running it.

        `record` is the journal's record of the episode. At each place that the episode had reached,
        wait for the decision about it, like a running episode.
        """
        end = record.outcome
        is_pruned = isinstance(end, Trajectory) and end.stop == "pruned"
        pieces = end.pieces if isinstance(end, Trajectory) else record.pieces
        with suppress(Pruned):
            await self.visit(record.episode, pieces, going=is_pruned)

    def facts(self) -> dict[str, float]:
        """Return the importance weight as a fact, a number that is reported with the episode.

        Empty if the weight is 1.
        """
        return {} if self.weight == 1 or self.weight < 0 else {SURVIVAL: self.weight}


Episode = Callable[[int, Start], Awaitable[Trajectory | Failure]]
"""A function `(index, start)` that runs the episode with this index in its group."""


class Rounds:
    """The rounds in which a strategy decides which episodes of a group to fork or to end."""

    def __init__(
        self,
        strategy: Brancher,
        request: GroupRequest,
        size: int,
        record: Callable[[int, Mapping[str, Any]], None],
    ) -> None:
        """Create the rounds of a group of at most `size` episodes.

        The decisions recorded in `request` are repeated first. `record` is called with the number
        of the group and the decisions of each new round, as JSON.
        """
        self.plan = strategy.look_plan
        self._strategy = strategy
        self._request = request
        self._size = size
        self._record = record
        self._number = 0
        self._leaves: dict[int, Leaf] = {}
        self._paths: dict[int, tuple[Piece, ...]] = {}
        """Index of an episode -> the tokens before its fork, as the parent episodes sampled
        them.
        """
        self._running: set[int] = set()
        self._waiting: dict[int, asyncio.Future[float]] = {}
        self._results: dict[int, Trajectory | Failure] = {}
        self._tasks: asyncio.TaskGroup | None = None

    def has_decided(self, index: int) -> bool:
        """Return True if the journal has a decision about this episode from before a resume."""
        return any(index == each for row in self._request.rounds for each, _ in row["factors"])

    async def run(self, episode: Episode, roots: int) -> list[Trajectory | Failure]:
        """Run `roots` episodes and their forks. Return all results, in the order in which they
        started.

        `episode` is the function that runs one of them.
        """
        self._episode = episode
        async with asyncio.TaskGroup() as self._tasks:
            for _ in range(roots):
                self._begin(None, ())
        return [self._results[index] for index in range(len(self._results))]

    def _begin(self, fork: Fork | None, parent: tuple[Piece, ...], weight: float = 1.0) -> None:
        """Start an episode, which is forked from an episode with the pieces `parent` unless `fork`
        is None.

        `weight` is the weight of the parent before this round. The parent's own survival must not
        change the weight of its forks, because its probability may depend on tokens after the fork.
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
        """Wait until the round is decided. Return the factor by which the episode's weight changes.

        If the episode survives, the factor is 1 / p, where p was its probability to survive. If it
        ends here, the factor is 0, or `DROPPED` if p was 0.
        """
        index = looks.index
        path = self._path(index, looks.fork, pieces)
        self._leaves[index] = Leaf(index, episode, path, looks.fork, looks.weight, going)
        waiting = self._waiting[index] = asyncio.get_running_loop().create_future()
        self._running.discard(index)
        self._decide()
        return await waiting

    def _path(self, index: int, fork: Fork | None, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
        """Return all pieces of an episode. Those before its fork are taken from the parent
        episodes, which sampled them.
        """
        skip = fork.at if fork else 0
        own: list[Piece] = []
        for piece in pieces:
            if skip <= 0:
                own.append(piece)
            skip -= len(piece.tokens)
        return (*self._paths[index], *own)

    def _decide(self) -> None:
        """If no episode is running, let the strategy decide about all waiting episodes, and start
        the forks that it returns.
        """
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
        """Let the strategy decide. Return the weight factors of the waiting episodes by their
        index, the forks to start, and the number of episodes to start anew.
        """
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
    """Return the decisions of one round as a JSON record."""
    rows = [[each.parent, each.at, [piece.tokens for piece in each.text]] for each in forks]
    return {"factors": [*factors.items()], "forks": rows, "fresh": fresh}


def _read(row: Mapping[str, Any]) -> tuple[dict[int, float], list[Fork], int]:
    forks = [
        Fork(parent, at, tuple(Placed(tuple(each), Provenance.FORCED) for each in text))
        for parent, at, text in row["forks"]
    ]
    return {int(index): float(factor) for index, factor in row["factors"]}, forks, row["fresh"]
