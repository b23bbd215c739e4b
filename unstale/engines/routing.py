"""Rules by which a pool of engines chooses the engine for a request.

The engines may be divided into two groups: one for requests with much new context (prefill), and
one for the others (decode). P/D-Serve divides engines in this way, and RollArt assigns phases to
hardware. The pool of a run and the planner's simulated pool use the same functions. `groups.py`
further divides the engines by scenario.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from unstale.config import EngineConfig

MAX_EXTRA_REPLIES = 8
"""Largest load by which an engine may exceed the least loaded engine and still be chosen for its
cache. A request with a short context has load 1.
"""
CACHED_TOKENS_PER_REPLY = 128
"""Number of cached context tokens that outweigh one more reply on an engine. With a small model,
computing this number of tokens takes as long as waiting for that reply.
"""
FOREIGN_TOKENS = MAX_EXTRA_REPLIES * CACHED_TOKENS_PER_REPLY
"""A request is sent to an engine of the other group if this engine has cached more of its context
than the best engine of its own group, by more than this number of tokens. So many tokens outweigh
`MAX_EXTRA_REPLIES` replies.
"""
_KEPT = 50
"""Number of last reply lengths from which the expected length is computed. With more, it would
follow changes too late.
"""


def request_weight(context: int, load_tokens: int) -> int:
    """Return the load of a request with `context` tokens: 1 + floor(context / load_tokens).

    If `load_tokens` is 0, the load is 1. Long contexts count more because each sampled token
    attends to all of its context. The formula is AgentMath's, with w_base = 1.
    """
    return 1 + (context // load_tokens if load_tokens else 0)


@dataclass(frozen=True, slots=True)
class Phases:
    """The division of a pool's engines into a prefill and a decode group.

    The prefill group is for requests with much new context.
    """

    prefill_engines: int = 0
    """Number of engines in the prefill group: the first ones of the pool. 0 means no groups."""
    ratio: float = 8.0
    """A request belongs to the prefill group if it has more than this number of new context tokens
    for each expected token of its reply.
    """

    sends_cache: bool = False
    """True if a prefill engine only computes the context, and sends it to a decode engine."""
    moves: bool = False
    """True if engines change groups as the measured times require (`groups.py`)."""
    scenarios: Literal["none", "task_set", "prefix"] = "none"
    """By what requests are divided among groups of engines: not, by the name of their task set, or
    by the beginning of their context.
    """

    @classmethod
    def of(cls, options: EngineConfig) -> Self:
        """Return the division that a run's options describe."""
        by_default: Literal["none", "task_set"] = "task_set" if options.divides else "none"
        return cls(
            options.prefill_engines,
            options.prefill_ratio,
            options.send_cache,
            options.move_engines,
            by_default if options.scenarios == "auto" else options.scenarios,
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
    """False if the engine already runs as many requests as it can. This one would wait."""
    prefills: bool = False
    """True if the engine belongs to the prefill group."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The engine that was chosen for a request."""

    index: int
    """The engine's index in the list of candidates."""
    has_place: bool
    """False if no engine can run the request at once, so that it must wait at the chosen engine."""
    rejects: int
    """Number of engines that would have been better, but cannot run the request at once."""
    is_prefill: bool
    """True if the request belongs to the prefill group."""


def choose(
    candidates: Sequence[Candidate], *, context: int, reply_tokens: float, phases: Phases
) -> Choice:
    """Choose an engine for a request with `context` tokens, by the group to which it belongs.

    `reply_tokens` is the expected length of the reply. The group is prefill if even the decode
    engine that has cached most of the context would have to compute too much of it
    (`Phases.is_prefill`), else decode. The request is sent to the other group if only that group
    has a free engine, or if an engine there has cached more than `FOREIGN_TOKENS` more of its
    context. If no engine is free, it waits in its group. A group without a working engine is
    ignored.

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

    Engines are sorted by the sum of their load and of the context that they would have to compute,
    where `CACHED_TOKENS_PER_REPLY` tokens count as a load of 1. Engines whose load exceeds the
    lowest load by more than `MAX_EXTRA_REPLIES` come last. The first engine that can run the
    request at once is chosen. If there is none, the request waits at the first one.
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
        """Add the length in tokens of a complete reply, including parts of earlier requests."""
        self._lengths.append(tokens)

    def expected(self, max_tokens: int, sampled: int = 0) -> float:
        """Return the number of tokens that a reply is expected to add to its first `sampled`
        tokens.

        It is the mean of what recorded replies longer than `sampled` added to their first `sampled`
        tokens, at most `max_tokens`. If there are none, it is `max_tokens`.
        """
        rests = [length - sampled for length in self._lengths if length > sampled]
        return min(float(max_tokens), sum(rests) / len(rests)) if rests else float(max_tokens)
