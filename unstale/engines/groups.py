"""Groups of engines by scenario, each with its own number of prefill and decode engines.

A scenario is a kind of requests whose contexts begin alike: the tasks of one task set, or a family
of prompts. P/D-Serve (arXiv 2408.08147) serves each scenario by a group of engines, so that these
engines have the common beginning in their caches. It adjusts the ratio of prefill to decode engines
to measured times. Its measure of success is the time to the first token.
"""

import math
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Self
from zlib import crc32

from unstale.engines.prefixes import BLOCK
from unstale.engines.routing import Phases

FAMILY_BLOCKS = 64 // BLOCK
"""Number of blocks at the beginning of a context that name its family of prompts: 64 tokens, a
part of most system prompts.
"""
MAX_SCENARIOS = 4096
"""Largest number of scenarios whose group is stored. Further scenarios get their group by a
hash.
"""
MIN_GAIN = 1.1
"""Engines change groups only if the slowest group gets this many times faster. A smaller gain is
less than the noise of the measured times.
"""
MOVE_S = 10.0
"""Seconds between two changes of the groups of engines while they serve."""
MOVE_REQUESTS = 32
"""Number of requests that must have ended before engines change groups while they serve."""
_RECENT = 1000
"""Number of last requests from which the 99th percentile of a time is computed."""
_DECAY = 0.5
"""Factor by which earlier measurements are multiplied when a new round of measuring begins."""

Size = tuple[int, int]
"""The numbers of prefill and of decode engines of a group. With no phases, all engines decode."""


@dataclass(slots=True)
class GroupTimes:
    """Measured work of a group of engines, in seconds and tokens. Older measurements count less
    after each call of `Groups.decay`.

    The time of a decode step is modelled as `a + b * running`, by least squares over replies.
    """

    requests: float = 0.0
    prefill_s: float = 0.0
    """Seconds in which prefill engines had requests, summed over the engines."""
    in_flight_s: float = 0.0
    """Seconds from request to reply, summed over the requests."""
    elapsed_s: float = 0.0
    tokens: float = 0.0
    """Tokens sampled by decode engines. The sums below are over these tokens."""
    _running: float = 0.0
    _running_squared: float = 0.0
    _seconds: float = 0.0
    _running_seconds: float = 0.0

    def add_reply(self, tokens: int, seconds: float, running: float) -> None:
        """Add a reply of `tokens` tokens that a decode engine sampled in `seconds`.

        `running` is the mean number of requests that the engine had meanwhile.
        """
        self.tokens += tokens
        self._running += tokens * running
        self._running_squared += tokens * running**2
        self._seconds += seconds
        self._running_seconds += seconds * running

    def token_s(self, running: float) -> float:
        """Return the seconds of one token of a reply, while the engine has `running` requests.

        >>> times = GroupTimes()
        >>> times.add_reply(10, 20.0, running=1)
        >>> times.add_reply(10, 40.0, running=3)
        >>> times.token_s(2), times.token_s(5)
        (3.0, 6.0)
        """
        mean, running_mean = self._seconds / self.tokens, self._running / self.tokens
        spread = self._running_squared / self.tokens - running_mean**2
        slope = 0.0
        if spread > 1e-9 * max(1.0, running_mean**2):
            slope = (self._running_seconds / self.tokens - mean * running_mean) / spread
        slope = min(max(slope, 0.0), mean / running_mean)  # no part of the time is negative
        return mean + slope * (running - running_mean)

    def rate(self, size: Size, max_running: int) -> float:
        """Return the requests per second that a group of this size could serve.

        The slower phase of the group determines this rate (P/D-Serve, section 3). Prefill engines
        need the measured time for each request. Decode engines sample the requests that are in
        flight, each engine at most `max_running`.
        """
        prefill, decode = size
        rates = [float("inf")]
        if self.prefill_s:
            rates.append(prefill * self.requests / self.prefill_s)
        if self.tokens:
            in_flight = self.in_flight_s / (self.elapsed_s or 1.0)
            sampling = min(in_flight, decode * max_running)
            seconds = self.tokens / self.requests * self.token_s(max(1.0, sampling / decode))
            rates.append(sampling / seconds if seconds else float("inf"))
        return min(rates)

    def decay(self) -> None:
        for each in fields(self):
            setattr(self, each.name, _DECAY * getattr(self, each.name))


@dataclass(slots=True)
class FirstTokens:
    """Times to the first token of requests, in seconds.

    >>> times = FirstTokens()
    >>> for seconds in (0.25, 0.75):
    ...     times.add(seconds)
    >>> times.metrics()
    {'first_token_s': 0.5, 'first_token_p99_s': 0.75}
    """

    requests: int = 0
    _total_s: float = 0.0
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def add(self, seconds: float) -> None:
        self.requests += 1
        self._total_s += seconds
        self._recent.append(seconds)

    @classmethod
    def joined(cls, parts: Iterable[Self]) -> Self:
        """Return the times of several groups as one object."""
        joined = cls(_recent=deque())
        for part in parts:
            joined.requests += part.requests
            joined._total_s += part._total_s
            joined._recent.extend(part._recent)
        return joined

    def metrics(self) -> dict[str, float]:
        """Return the mean and the 99th percentile. Empty without requests."""
        if not self.requests:
            return {}
        return {
            "first_token_s": self._total_s / self.requests,
            "first_token_p99_s": sorted(self._recent)[math.ceil(0.99 * len(self._recent)) - 1],
        }


class Groups:
    """The groups of a pool's engines, with the scenarios that each serves and the engines that it
    needs.

    >>> groups = Groups(Phases(2, scenarios="task_set"))
    >>> names = ("retail", "airline", "retail", "telecom")
    >>> [groups.of(name, engines=4, prefill=2) for name in names]
    [0, 1, 0, 0]
    >>> groups.equal_sizes(engines=5, prefill=2)
    [(1, 2), (1, 1)]
    """

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._group_of: dict[Hashable, int] = {}
        self.times: list[GroupTimes] = [GroupTimes()]

    @property
    def count(self) -> int:
        return len(self.times)

    def scenario(self, name: str, blocks: Sequence[int]) -> Hashable:
        """Return the scenario of a request: that of its task set `name`, or of its prompt's family.

        `blocks` are the block hashes of the context.
        """
        if self._phases.scenarios == "none":
            return ""
        return tuple(blocks[:FAMILY_BLOCKS]) if self._phases.scenarios == "prefix" else name

    def of(self, scenario: Hashable, engines: int, prefill: int) -> int:
        """Return the number of the group of engines that serves a scenario.

        A new scenario gets a new group if the engines suffice: each group needs an engine, or with
        `prefill` one prefill and one decode engine. Otherwise it joins the group with the fewest
        requests. `engines` is the number of all engines, `prefill` that of prefill engines.
        """
        if (group := self._group_of.get(scenario)) is not None:
            return group
        if len(self._group_of) >= MAX_SCENARIOS:
            return crc32(repr(scenario).encode()) % self.count
        if not self._group_of:
            group = 0
        elif self.count < self._most(engines, prefill):
            self.times.append(GroupTimes())
            group = self.count - 1
        else:
            scenarios = [*self._group_of.values()]
            group = min(
                range(self.count), key=lambda n: (self.times[n].requests, scenarios.count(n))
            )
        self._group_of[scenario] = group
        return group

    def _most(self, engines: int, prefill: int) -> int:
        if not self._phases.prefill_engines:
            return max(1, engines)
        return max(1, min(prefill, engines - prefill))

    def equal_sizes(self, engines: int, prefill: int) -> list[Size]:
        """Return sizes that divide `engines` engines equally, `prefill` of them prefill engines."""

        def share(total: int, number: int) -> int:
            return total // self.count + (number < total % self.count)

        numbers = range(self.count)
        return [(share(prefill, n), share(engines - prefill, n)) for n in numbers]

    def sizes(self, current: Sequence[Size], max_running: int) -> list[Size]:
        """Return the sizes of all groups with which the slowest group, relative to its requests, is
        fastest.

        Return `current` if other sizes are not at least `MIN_GAIN` times as fast, or if nothing was
        measured. `max_running` is the largest number of requests of one engine.
        """
        engines = sum(map(sum, current))
        least = 2 if self._phases.prefill_engines else 1
        if not any(times.requests for times in self.times) or engines < least * self.count:
            return [*current]
        sizes = [self._split(times, least, max_running) for times in self.times]
        for _ in range(engines - least * self.count):
            slowest = min(range(self.count), key=lambda n: self._ease(n, sizes[n], max_running))
            size = sum(sizes[slowest]) + 1
            sizes[slowest] = self._split(self.times[slowest], size, max_running)
        if self._slowest(sizes, max_running) < MIN_GAIN * self._slowest(current, max_running):
            return [*current]
        return sizes

    def _split(self, times: GroupTimes, engines: int, max_running: int) -> Size:
        """Return the fastest division of a group's engines into prefill and decode engines."""
        if not self._phases.prefill_engines:
            return 0, engines
        divisions = [(number, engines - number) for number in range(1, engines)]
        return max(divisions, key=lambda size: times.rate(size, max_running))

    def _ease(self, number: int, size: Size, max_running: int) -> float:
        """Return the ratio of the rate at which a group of engines can serve requests to the rate
        at which requests arrive.
        """
        times = self.times[number]
        if not times.requests:
            return float("inf")
        return times.rate(size, max_running) / times.requests

    def _slowest(self, sizes: Sequence[Size], max_running: int) -> float:
        return min(self._ease(number, size, max_running) for number, size in enumerate(sizes))

    def decay(self) -> None:
        """Reduce the weight of all measurements so far, so that later ones count more."""
        for times in self.times:
            times.decay()


def assign(current: Sequence[tuple[int, bool]], sizes: Sequence[Size]) -> list[tuple[int, bool]]:
    """Return the group and the phase (True: prefill) of each engine, so that groups have `sizes`.

    As many engines as possible keep their group and phase, which are in `current`.

    >>> assign([(0, True), (0, False), (0, False), (0, False)], [(1, 1), (1, 1)])
    [(0, True), (0, False), (1, True), (1, False)]
    """
    left: defaultdict[tuple[int, bool], int] = defaultdict(int)
    for group, (prefill, decode) in enumerate(sizes):
        left[group, True], left[group, False] = prefill, decode
    kept = []
    for cell in current:
        stays = left[cell] > 0
        left[cell] -= stays
        kept.append(stays)
    free = [cell for cell, count in left.items() for _ in range(count)]
    return [cell if stays else free.pop(0) for cell, stays in zip(current, kept, strict=True)]
