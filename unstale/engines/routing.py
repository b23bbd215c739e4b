"""Rules by which a pool of engines chooses the engine for a request.

The engines may be divided into two groups: one for requests with much new context (prefill), one
for the others (decode). P/D-Serve divides engines like this, and RollArt maps phases to hardware.
The pool of a run and the planner's simulated pool use the same functions.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Self

from unstale.config import EngineConfig

MAX_EXTRA_REPLIES = 8
"""The load that an engine may have beyond the least loaded engine and still be chosen for its
cache. A request with a short context has load 1.
"""
CACHED_TOKENS_PER_REPLY = 128
"""Number of cached context tokens that make up for one more reply on an engine. With a small model,
computing so many tokens takes as long as the wait for that reply.
"""
FOREIGN_TOKENS = MAX_EXTRA_REPLIES * CACHED_TOKENS_PER_REPLY
"""A request is sent to an engine of the other group if that engine has cached over this many more
of its context tokens than the best engine of its own group. They make up for `MAX_EXTRA_REPLIES`
replies.
"""
_WINDOW = 64
"""Number of requests whose loads are compared before an engine may change its group."""
_KEPT = 50
"""Number of the last reply lengths from which the expected length is computed. With more, it would
follow a change too late.
"""


def request_weight(context: int, load_tokens: int) -> int:
    """Return the load of a request with `context` tokens: 1 + floor(context / load_tokens).

    The load is 1 if `load_tokens` is 0. Long contexts count more because each sampled token attends
    to all of its context. The formula is AgentMath's, with w_base = 1.
    """
    return 1 + (context // load_tokens if load_tokens else 0)


@dataclass(frozen=True, slots=True)
class Phases:
    """The division of a pool's engines into a prefill and a decode group.

    The prefill group is for requests with much new context.
    """

    prefill_engines: int = 0
    """Number of engines in the prefill group: the first ones of the pool. 0: the pool has no
    groups.
    """
    ratio: float = 8.0
    """A request belongs to the prefill group if it has more than this many new context tokens for
    each expected token of its reply.
    """

    sends_cache: bool = False
    """True if a prefill engine only computes the context, and sends it to a decode engine."""
    moves: bool = False
    """True if an engine changes its group when the other group has much more load."""

    @classmethod
    def of(cls, options: EngineConfig) -> Self:
        """Return the division that the options of a run say."""
        return cls(
            options.prefill_engines, options.prefill_ratio, options.send_cache, options.move_engines
        )

    def is_prefill(self, new_tokens: int, reply_tokens: float) -> bool:
        """Return True if a request belongs to the prefill group.

        `new_tokens` is the number of context tokens that are not cached. `reply_tokens` is the
        expected length of the reply.

        >>> Phases(1, ratio=8).is_prefill(801, 100.0), Phases(1, ratio=8).is_prefill(800, 100.0)
        (True, False)
        """
        return new_tokens > self.ratio * reply_tokens


NO_PHASES = Phases()


@dataclass(frozen=True, slots=True)
class Candidate:
    """The state of a working engine that a request may be sent to."""

    load: int
    """Sum of the loads of the engine's running and waiting requests (`request_weight`)."""
    cached: int
    """Number of the request's context tokens that the engine has cached."""
    is_free: bool
    """False if the engine already runs as many requests as it can, so that this request would
    wait.
    """
    prefills: bool = False
    """True if the engine belongs to the prefill group."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The engine that was chosen for a request."""

    index: int
    """The engine's index in the list of candidates."""
    has_place: bool
    """False if no engine can run the request at once. The request waits at the chosen one."""
    rejects: int
    """Number of engines that would have been better, but cannot run the request at once."""
    is_prefill: bool
    """True if the request belongs to the prefill group."""


def choose(
    candidates: Sequence[Candidate], *, context: int, reply_tokens: float, phases: Phases
) -> Choice:
    """Choose an engine for a request with `context` tokens, by the group to which it belongs.

    `reply_tokens` is the expected length of the reply. The group is prefill if the decode engine
    that has cached most of the context would still have to compute too much (`Phases.is_prefill`),
    else decode. The request is sent to the other group if only that group has a free engine, or if
    an engine there has cached more than `FOREIGN_TOKENS` more of its context. If no engine is free,
    it waits in its group. A group without a working engine is ignored.

    >>> prefill = Candidate(load=1, cached=0, is_free=True, prefills=True)
    >>> decode = Candidate(load=5, cached=0, is_free=True)
    >>> for context in (4000, 400):
    ...     choose([prefill, decode], context=context, reply_tokens=200.0, phases=Phases(1)).index
    0
    1
    """
    decode = [each for each in candidates if not each.prefills] or candidates
    is_prefill = phases.is_prefill(context - max(each.cached for each in decode), reply_tokens)
    groups: dict[bool, list[int]] = {True: [], False: []}
    for index, each in enumerate(candidates):
        groups[each.prefills == is_prefill].append(index)
    if not (groups[True] and groups[False]):
        return _choose_in(candidates, groups[True] or groups[False], is_prefill=is_prefill)
    home = _choose_in(candidates, groups[True], is_prefill=is_prefill)
    away = _choose_in(candidates, groups[False], is_prefill=is_prefill)
    saved = candidates[away.index].cached - candidates[home.index].cached
    if not away.has_place or (home.has_place and saved <= FOREIGN_TOKENS):
        return home
    rejects = away.rejects + (0 if home.has_place else home.rejects)
    return replace(away, rejects=rejects)


def _choose_in(
    candidates: Sequence[Candidate], group: Sequence[int], *, is_prefill: bool
) -> Choice:
    """Choose an engine of a group. `group` has the indices of its engines in `candidates`.

    The best engine has the lowest sum of load and context to compute, where
    `CACHED_TOKENS_PER_REPLY` tokens count as a load of 1. Engines whose load is more than
    `MAX_EXTRA_REPLIES` above the least come last. The best engine that can run the request at once
    is chosen. If there is none, the request waits at the best one.
    """
    most = min(candidates[index].load for index in group) + MAX_EXTRA_REPLIES

    def cost(index: int) -> tuple[bool, int, int]:
        each = candidates[index]
        return each.load > most, CACHED_TOKENS_PER_REPLY * each.load - each.cached, each.load

    order = sorted(group, key=cost)
    for rejects, index in enumerate(order):
        if candidates[index].is_free:
            return Choice(index, True, rejects, is_prefill)
    return Choice(order[0], False, len(order), is_prefill)


class GroupLoads:
    """The loads of both groups at the last requests, to divide the engines anew (P/D-Serve).

    The load of a group is proportional to the time that requests spend there. So the groups take
    equally many requests if the mean loads of their engines are equal.
    """

    def __init__(self) -> None:
        self._loads: list[tuple[float, float]] = []

    def add(self, candidates: Sequence[Candidate]) -> bool | None:
        """Add the loads at a request.

        Return the group that should get an engine of the other, True for prefill. None if the mean
        load of its engines is not over twice that of the other's, plus 1.
        """
        groups = [[each.load for each in candidates if each.prefills == k] for k in (False, True)]
        self._loads.append((fmean(groups[0] or [0]), fmean(groups[1] or [0])))
        if len(self._loads) < _WINDOW:
            return None
        decode, prefill = (fmean(loads) for loads in zip(*self._loads, strict=True))
        self._loads = []
        if prefill > 2 * decode + 1:
            return True
        return False if decode > 2 * prefill + 1 else None


class ReplyLengths:
    """The lengths of the last complete replies, to estimate the length of another reply.

    >>> lengths = ReplyLengths()
    >>> lengths.expected(64)
    64.0
    >>> lengths.add(10)
    >>> lengths.add(20)
    >>> lengths.expected(64), lengths.expected(4)
    (15.0, 4.0)
    >>> lengths.expected(64, sampled=12), lengths.expected(64, sampled=30)
    (8.0, 64.0)
    """

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=_KEPT)

    def add(self, tokens: int) -> None:
        """Add the length of a complete reply in tokens, including parts that earlier requests
        returned.
        """
        self._lengths.append(tokens)

    def expected(self, max_tokens: int, sampled: int = 0) -> float:
        """Return how many tokens a reply with `sampled` tokens is expected to add, at most
        `max_tokens`.

        It is the mean of the tokens that longer recorded replies had after their first `sampled`
        ones. It is `max_tokens` if no recorded reply is longer.
        """
        rests = [length - sampled for length in self._lengths if length > sampled]
        return min(float(max_tokens), sum(rests) / len(rests)) if rests else float(max_tokens)
