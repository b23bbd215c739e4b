"""Segments of episodes: how many episodes run at once, and the use of their budgets.

A slot is the permission to run. At the end of a segment, a running episode gives its slot to the
oldest waiting episode, even to a younger one: otherwise a long episode would hold its slot until
its end. The paused episode continues when a slot is free and no older episode waits. It keeps its
environment and tokens, and its later tokens have the version that samples them.

No episode waits for a slot while it holds one, and every segment ends. So each episode continues at
last, because only a limited number of older episodes can wait.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Self

from unstale.records import NO_BUDGET, EpisodeBudget, Piece, Sampled, Stop, walk

if TYPE_CHECKING:
    from unstale.envs.chat import Chat

Age = tuple[int, int]
"""The age of an episode: the number of its group, and its index in the group. The smallest is the
oldest.
"""
UNLIMITED = 1 << 62
"""The number of tokens that stands for "no limit"."""


class EpisodeSlots:
    """A semaphore that limits the number of running episodes.

    The oldest waiting episode runs next.
    """

    def __init__(self, number: int) -> None:
        self._free = number
        self._waiting: list[tuple[Age, int, asyncio.Future[None]]] = []
        """A heap of the waiting episodes, the oldest first. The future is done when the episode may
        run.
        """
        self._order = count()

    async def take(self, age: Age) -> None:
        """Wait until an episode of this age may run."""
        if self._free:
            self._free -= 1
            return
        given = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (age, next(self._order), given))
        try:
            await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled():  # given in the moment of the cancellation
                self.give_back()
            raise

    def give_back(self) -> None:
        """Let the oldest waiting episode run in place of one that stops.

        If none waits, one more may start later.
        """
        while self._waiting:
            *_, given = heapq.heappop(self._waiting)
            if not given.done():
                given.set_result(None)
                return
        self._free += 1


class EpisodeSlot:
    """The right of one episode to run: a context that is entered once the episode may run."""

    def __init__(self, slots: EpisodeSlots, age: Age, on_wait: Callable[[float], None]) -> None:
        """Create the slot of an episode. `age` decides which waiting episode runs first.

        `on_wait` is called with the seconds of each wait.
        """
        self._slots = slots
        self._age = age
        self._on_wait = on_wait
        self._held = False
        self.wait_s = 0.0
        """Seconds for which the episode has waited to run."""

    async def __aenter__(self) -> Self:
        await self._take()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._give_back()

    async def pause(self) -> None:
        """Let the oldest waiting episode run. Wait until this one may continue.

        Return at once if no episode waits.
        """
        self._give_back()
        await self._take()

    async def _take(self) -> None:
        began = time.monotonic()
        try:
            await self._slots.take(self._age)
            self._held = True
        finally:
            seconds = time.monotonic() - began
            self.wait_s += seconds
            self._on_wait(seconds)

    def _give_back(self) -> None:
        if self._held:
            self._held = False
            self._slots.give_back()


class BudgetUse:
    """The tokens, tool calls and segments that one attempt at an episode has used of its budget.

    Use is computed from the tokens and calls so far, so it is the same after a resume.
    """

    __slots__ = ("_calls", "_segment_calls", "_slot", "_tokens", "budget", "segment")

    def __init__(self, budget: EpisodeBudget = NO_BUDGET, slot: EpisodeSlot | None = None) -> None:
        """Begin with nothing used. `slot` lets a waiting episode run between two segments."""
        self.budget = budget
        self._slot = slot
        self.segment = 1
        """The number of the episode's current segment, from 1."""
        self._tokens = 0
        """Number of tokens sampled in the current segment."""
        self._segment_calls = 0
        self._calls = 0

    def replay(self, pieces: Sequence[Piece], chat: Chat) -> None:
        """Count the recorded replies of an episode that continues from an environment's
        snapshot.
        """
        replies: dict[int, list[int]] = {}
        for _, piece, turn in walk(pieces):
            if isinstance(piece, Sampled):
                replies.setdefault(turn, []).extend(piece.tokens)
        for reply in replies.values():
            self.count(len(reply))
            self.count_calls(len(chat.parse(reply).tool_calls))

    def count(self, tokens: int) -> None:
        """Count sampled tokens. When they fill a segment, begin the next one."""
        limit = self._segment_limit
        while tokens:
            self.begin_segment()
            taken = min(tokens, limit - self._tokens)
            self._tokens += taken
            tokens -= taken

    def count_calls(self, calls: int) -> None:
        self._calls += calls
        self._segment_calls += calls

    def begin_segment(self) -> bool:
        """If the current segment has ended, begin the next one and return True.

        Otherwise return False.
        """
        if not self._is_over:
            return False
        self.segment += 1
        self._tokens = self._segment_calls = 0
        return True

    @property
    def slot_wait_s(self) -> float:
        """Seconds for which the episode has waited to run, over all attempts."""
        return self._slot.wait_s if self._slot else 0.0

    @property
    def segment_left(self) -> int:
        """Number of tokens that may still be sampled in the episode's current segment."""
        return self._segment_limit - self._tokens

    async def tokens_left(self) -> int:
        """Return how many tokens may be sampled next.

        If the current segment has ended, first let a waiting episode run, and wait until this one
        may continue.
        """
        if self.begin_segment() and self._slot:
            await self._slot.pause()
        return self.segment_left

    def reply_limit(self, num_tokens: int) -> int:
        """Return how many tokens a reply may have after a context of `num_tokens`.

        Below 1 if none may follow.
        """
        budget = self.budget
        limits = [UNLIMITED]
        if budget.reply_tokens:
            limits.append(budget.reply_tokens)
        if budget.context:
            limits.append(budget.context - num_tokens)
        if budget.segments:
            used = self._tokens
            over = self._is_over
            left = budget.segments - self.segment - over
            limits.append(left * self._segment_limit + self._segment_limit - (0 if over else used))
        return min(limits)

    def stop(self, num_tokens: int) -> Stop | None:
        """Return "max_turns" or "max_tokens" if the budget allows no further reply, otherwise None.

        `num_tokens` is the length of the episode so far.
        """
        budget = self.budget
        used_up = self.segment == budget.segments and self._is_over
        by_calls = budget.segment_calls and self._segment_calls >= budget.segment_calls
        if (budget.calls and self._calls >= budget.calls) or (used_up and by_calls):
            return "max_turns"
        return "max_tokens" if self.reply_limit(num_tokens) < 1 else None

    def facts(self) -> dict[str, float]:
        """Return the number of segments as a fact of the episode.

        Empty if the budget has no segments.
        """
        return {"segments": float(self.segment)} if self.budget.segments else {}

    @property
    def _segment_limit(self) -> int:
        return self.budget.segment_tokens or UNLIMITED

    @property
    def _is_over(self) -> bool:
        """True if the current segment has used all its tokens or tool calls."""
        calls = self.budget.segment_calls
        return self._tokens >= self._segment_limit or bool(calls and self._segment_calls >= calls)
