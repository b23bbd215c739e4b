"""Segments of episodes: which episodes run at the same time, and what they use of their budgets.

A segment is a part of an episode with a limited number of sampled tokens or tool calls. An episode
needs a slot to run. At the end of a segment, it gives its slot to the oldest waiting episode, even
if that one is younger than itself. Otherwise a long episode would hold its slot until its end. The
paused episode continues when a slot is free and no older episode waits. It keeps its environment
and tokens. Its later tokens have the version that samples them.

No episode waits for a slot while it holds one, and every segment ends. Only a limited number of
older episodes can wait, so each episode continues eventually.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Self

from unstale.records import NO_BUDGET, EpisodeBudget, Piece, Stop, replies

if TYPE_CHECKING:
    from unstale.envs.chat import Chat

Age = tuple[int, int]
"""The key by which episodes wait: the number of the group, then the index in it. Smallest is
oldest.
"""
UNLIMITED = 1 << 62
"""A number of tokens that means "no limit"."""


class EpisodeSlots:
    """A semaphore that limits how many episodes run, and serves the oldest waiting one first."""

    def __init__(self, number: int) -> None:
        self._free = number
        self._waiting: list[tuple[Age, int, asyncio.Future[None]]] = []
        """A heap of the waiting episodes, oldest first. Setting the future lets the episode run."""
        self._order = count()

    async def take(self, age: Age) -> None:
        """Wait until an episode of this `age` may run. The oldest waiting episode is the next."""
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
        """Give a slot to the oldest waiting episode. If none waits, the slot becomes free."""
        while self._waiting:
            *_, given = heapq.heappop(self._waiting)
            if not given.done():
                given.set_result(None)
                return
        self._free += 1


class EpisodeSlot:
    """A context in which one episode runs. Entering it waits for a slot, leaving it frees the
    slot.
    """

    def __init__(self, slots: EpisodeSlots, age: Age, on_wait: Callable[[float], None]) -> None:
        """Create the context of one episode. Among waiting episodes, the one with the lowest `age`
        runs next.

        `on_wait` is called after each wait, with its duration in seconds.
        """
        self._slots = slots
        self._age = age
        self._on_wait = on_wait
        self._held = False
        self.wait_s = 0.0
        """Seconds that the episode has waited for slots, in total."""

    async def __aenter__(self) -> Self:
        await self._take()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._give_back()

    async def pause(self) -> None:
        """Give the slot to the oldest waiting episode, and wait for another slot.

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
    """The tokens, tool calls and segments of its budget that one attempt at an episode has used.

    They are computed from the episode's tokens, so they are the same after a resume.
    """

    __slots__ = ("_calls", "_segment_calls", "_slot", "_tokens", "budget", "segment")

    def __init__(self, budget: EpisodeBudget = NO_BUDGET, slot: EpisodeSlot | None = None) -> None:
        """Start with an unused budget. Between two segments, other episodes may run in this one's
        `slot`.
        """
        self.budget = budget
        self._slot = slot
        self.segment = 1
        """The number of the episode's current segment, from 1."""
        self._tokens = 0
        """Number of tokens that were sampled in the current segment."""
        self._segment_calls = 0
        self._calls = 0

    def replay(self, pieces: Sequence[Piece], chat: Chat) -> None:
        """Count the tokens and tool calls of the replies with which a resumed or forked episode
        begins.
        """
        for _, reply in replies(pieces):
            self.count(len(reply))
            self.count_calls(len(chat.parse(reply).tool_calls))

    def count(self, tokens: int) -> None:
        """Count this many sampled tokens. They fill the current segment first, then further
        ones.
        """
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
        """Begin the next segment if the current one is used up. Return True if so, otherwise
        False.
        """
        if not self._is_over:
            return False
        self.segment += 1
        self._tokens = self._segment_calls = 0
        return True

    @property
    def slot_wait_s(self) -> float:
        """Seconds that the episode has waited for slots, over all its attempts."""
        return self._slot.wait_s if self._slot else 0.0

    @property
    def segment_left(self) -> int:
        """Number of tokens that may still be sampled in the current segment."""
        return self._segment_limit - self._tokens

    async def tokens_left(self) -> int:
        """Return the number of tokens that may be sampled before the next pause.

        If the current segment is used up, first pause so that other episodes may run.
        """
        if self.begin_segment() and self._slot:
            await self._slot.pause()
        return self.segment_left

    def reply_limit(self, num_tokens: int) -> int:
        """Return the largest number of tokens of a reply after `num_tokens` tokens of the episode,
        by the budget.

        A value below 1 means that no reply is allowed.
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
        """Return why the budget allows no further reply: "max_turns" or "max_tokens". None if it
        allows one.

        `num_tokens` is the number of the episode's tokens so far.
        """
        budget = self.budget
        used_up = self.segment == budget.segments and self._is_over
        by_calls = budget.segment_calls and self._segment_calls >= budget.segment_calls
        if (budget.calls and self._calls >= budget.calls) or (used_up and by_calls):
            return "max_turns"
        return "max_tokens" if self.reply_limit(num_tokens) < 1 else None

    def facts(self) -> dict[str, float]:
        """Return the number of segments as a fact, a number that is reported with the episode.

        Empty if the budget has no segments.
        """
        return {"segments": float(self.segment)} if self.budget.segments else {}

    @property
    def _segment_limit(self) -> int:
        return self.budget.segment_tokens or UNLIMITED

    @property
    def _is_over(self) -> bool:
        """True if the current segment has no tokens or no tool calls left."""
        calls = self.budget.segment_calls
        return self._tokens >= self._segment_limit or bool(calls and self._segment_calls >= calls)
