"""Beam search over the stages of an attempt: after each stage, a judge selects the attempts to
continue.

A stage is a number of replies, such as those that find a fault, change the code and test the
change. From SWE-Reasoner.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import TypeVar

from unstale.records import ENDED_BY_ENVIRONMENT, Fork, GroupRequest, Task, Trajectory, TurnLimit
from unstale.rollout.episode import Rollout
from unstale.rollout.rounds import NO_FORK, Start
from unstale.rollout.transcript import NullWriter

T = TypeVar("T")


async def beam_search(
    extend: Callable[[T | None, int, int], Awaitable[Sequence[T]]],
    rank: Callable[[Sequence[T], int], Awaitable[Sequence[T]]],
    *,
    stages: int,
    width: int,
    beam: int,
) -> T | None:
    """Return the best candidate after `stages` stages. None if no candidate is left.

    `extend(kept, number, stage)` returns `number` candidates of the stage (1, 2, ...) that continue
    the candidate `kept`, which is None in stage 1. Each stage has `width` candidates in total.
    `rank(candidates, stage)` sorts them, best first, and the first `beam` are kept.
    """
    kept: Sequence[T | None] = [None]
    for stage in range(1, stages + 1):
        shares = [width // len(kept) + (i < width % len(kept)) for i in range(len(kept))]
        async with asyncio.TaskGroup() as running:
            made = [
                running.create_task(_extended(extend, each, share, stage))
                for each, share in zip(kept, shares, strict=True)
            ]
        candidates = [each for one in made for each in one.result()]
        if not candidates:
            return None
        kept = (await rank(candidates, stage))[:beam]
    return kept[0]


async def _extended(
    extend: Callable[[T | None, int, int], Awaitable[Sequence[T]]],
    kept: T | None,
    share: int,
    stage: int,
) -> Sequence[T]:
    return await extend(kept, share, stage)


class StagedAttempts:
    """Attempts at one task that can be stopped after each stage and continued later."""

    def __init__(self, rollout: Rollout, task: Task, seed: int, *, ends: Sequence[int]) -> None:
        """Prepare the attempts. `ends` has the number of replies after which each stage ends. The
        last stage has no limit.
        """
        self._rollout = rollout
        self._request = GroupRequest(0, task, seed, 0)
        self._ends = ends
        self._numbers = count()
        self.tokens = 0
        """Number of tokens sampled so far."""

    async def extend(
        self, attempt: Trajectory | None, share: int, stage: int
    ) -> Sequence[Trajectory]:
        """Return `share` continuations of an attempt up to the end of a stage.

        None as the attempt starts new ones. An attempt that has ended is returned unchanged.
        Continuations that fail are left out.
        """
        if attempt and attempt.stop in ENDED_BY_ENVIRONMENT:
            return [attempt]
        start = NO_FORK
        if attempt:
            fork = Fork(attempt.episode, len(attempt))
            start = Start(fork, fork.prefix_of(attempt.pieces))
        limit = TurnLimit(self._ends[stage - 1]) if stage < len(self._ends) else None
        indices = [next(self._numbers) for _ in range(share)]
        results = await self._rollout.run_episodes(
            replace(self._request, turn_limit=limit),
            indices,
            {},
            NullWriter,
            starts=dict.fromkeys(indices, start),
        )
        ended = [each for each in results if isinstance(each, Trajectory)]
        self.tokens += sum(each.num_sampled for each in ended)
        return ended
