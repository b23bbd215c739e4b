"""What is simulated: episodes (how many turns, how many tokens, how long tools take), and engines. Imports no torch."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unstale.config.checks import at_least, within

Drawn = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Constant:
    """Always the same."""

    value: float

    def draw(self, random: np.random.Generator, count: int) -> Drawn:
        return np.full(count, float(self.value))


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal with this mean; `sigma` is the standard deviation of the logarithm. What exceeds `most` is `most`.

    `mean` is that of the distribution before it is cut; `LogNormal.cut` finds the one whose mean is right after.
    """

    mean: float
    sigma: float
    most: float = math.inf

    def draw(self, random: np.random.Generator, count: int, *, common: float = 0.0) -> Drawn:
        """`common` is the share of the logarithm's variance that all of them have in common."""
        if not self.mean:
            return np.zeros(count)
        apart = (
            math.sqrt(1 - common) * random.standard_normal(count)
            + math.sqrt(common) * random.standard_normal()
        )
        return np.minimum(
            np.exp(math.log(self.mean) - self.sigma**2 / 2 + self.sigma * apart), self.most
        )

    @classmethod
    def cut(cls, mean: float, sigma: float, most: float) -> "LogNormal":
        """The log-normal that has this mean once it is cut at `most`, by bisection.

        >>> drawn = LogNormal.cut(100, 1.0, most=300).draw(np.random.default_rng(0), 100_000)
        >>> round(float(drawn.mean())), float(drawn.max())
        (100, 300.0)
        """
        if not 0 < mean < most:
            raise ValueError(
                f"the mean of what is cut at {most:g} is between 0 and that, got {mean:g}"
            )
        low, high = math.log(mean), math.log(mean) + 20 + 20 * sigma
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if _cut_mean(middle, sigma, most) < mean else (low, middle)
        return cls(math.exp(low), sigma, most)


def _cut_mean(log_mean: float, sigma: float, most: float) -> float:
    """E[min(X, most)] of a log-normal X with mean exp(`log_mean`): the limited expected value."""
    if not sigma:
        return min(math.exp(log_mean), most)
    at, below = (math.log(most) - log_mean + sigma**2 / 2) / sigma, NormalDist().cdf
    return math.exp(log_mean) * below(at - sigma) + most * (1 - below(at))


Distribution = Constant | LogNormal
"""What a quantity of an episode is drawn from."""


class TurnShape(NamedTuple):
    """One turn: a reply, what the environment answers, and how often it takes its time before it does."""

    reply: int
    given: int
    waits: int = 1


class EpisodeShape(NamedTuple):
    """One episode: tokens it begins with, and its turns. After the last one nothing is given."""

    prompt: int
    turns: tuple[TurnShape, ...]

    @property
    def sampled(self) -> int:
        return sum(turn.reply for turn in self.turns)

    @property
    def tokens(self) -> int:
        """Prompt, replies, and what was given in between."""
        return self.prompt + self.sampled + sum(turn.given for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What an episode is. Token counts are drawn from distributions, or whole groups from `recorded` ones."""

    prompt_tokens: Distribution = Constant(512)
    """Tokens that an episode begins with. The siblings of a group share them."""
    turns: Distribution = Constant(1)
    """Replies of an episode."""
    reply_tokens: Distribution = field(default_factory=lambda: LogNormal(1024.0, 0.8))
    """Tokens of a reply."""
    prompt_share: float = 0.5
    """Share of the variance of the logarithm of log-normal replies that the prompt decides, for all siblings: assumed.
    What it is a share of stays as it is."""
    tool_tokens: Distribution = Constant(0)
    """Tokens that the environment answers a reply with."""
    tool_s: Distribution = Constant(0)
    """Seconds that the environment takes for it."""
    recorded: tuple[tuple[EpisodeShape, ...], ...] = ()
    """Groups of episodes that were seen; they take the place of all but `tool_s`."""
    max_tokens: int = 1 << 30
    """Tokens that an episode may hold; it ends there."""
    timeout_s: float = math.inf
    """An environment that takes longer for one answer has failed, as `rollout.timeout_s`."""
    retries: int = 1
    """Times that a failed episode is begun again, as `rollout.retries`."""

    def __post_init__(self) -> None:
        within("workload", 0, 1, prompt_share=self.prompt_share)

    def group(self, random: np.random.Generator, size: int) -> list[EpisodeShape]:
        """Siblings."""
        if self.recorded:
            siblings = self.recorded[int(random.integers(len(self.recorded)))]
            if len(siblings) == size:
                return list(siblings)
            return [siblings[int(index)] for index in random.integers(len(siblings), size=size)]
        prompt = _whole(self.prompt_tokens.draw(random, 1), 1)[0]
        turns = _whole(self.turns.draw(random, size), 1)
        common = {"common": self.prompt_share} if isinstance(self.reply_tokens, LogNormal) else {}
        replies = _whole(self.reply_tokens.draw(random, sum(turns), **common), 1)
        given = _whole(self.tool_tokens.draw(random, sum(turns)), 0)
        shapes, first = [], 0
        for count in turns:
            spoken = zip(replies[first : first + count], given[first : first + count], strict=True)
            shapes.append(self._within(prompt, [TurnShape(*turn) for turn in spoken]))
            first += count
        return shapes

    def _within(self, prompt: int, turns: Sequence[TurnShape]) -> EpisodeShape:
        """As much of these turns as there is room for; the last of them gets no answer."""
        room, kept = self.max_tokens - prompt, list[TurnShape]()
        for turn in turns:
            kept.append(TurnShape(min(turn.reply, room), turn.given))
            room -= turn.reply + turn.given
            if room < 1:
                break
        return EpisodeShape(prompt, (*kept[:-1], TurnShape(kept[-1].reply, 0, 0)))


def _whole(drawn: Drawn, least: int) -> list[int]:
    return [max(least, round(value)) for value in drawn.tolist()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The engines."""

    engines: int = 1
    max_running: int = 128
    """Replies that one engine runs at the same time."""
    cache_tokens: int = 0
    """Tokens of context that one engine has memory for, those of waiting episodes included; 0: `max_running` contexts,
    however long."""
    keep_cache: bool = False
    """Contexts are not computed again under a new version, as `engine.keep_cache`."""
    colocated: bool = False
    """They are the trainer's own devices: generation stands still from a batch's scoring to the new version."""
    steps_per_version: int = 1
    """Steps after which they take a version, and tickets come back: a step's batch is so large a part of a version's
    (verl's `trigger_parameter_sync_step`)."""
    failures_per_hour: float = 0.0
    """Deaths of one engine. Its replies go on elsewhere from what they had said before."""
    restart_s: float = 120.0
    """Until an engine that died is there again; it gets weights with the next version, as `engines.EnginePool` does."""

    def __post_init__(self) -> None:
        ones = {
            name: getattr(self, name) for name in ("engines", "max_running", "steps_per_version")
        }
        at_least("fleet", 1, **ones)
        more = {"cache_tokens": self.cache_tokens, "failures_per_hour": self.failures_per_hour}
        at_least("fleet", 0, restart_s=self.restart_s, **more)


def seen_in(lengths: Collection[float]) -> float:
    """Others that a token sees in sequences of these lengths: half of E[L^2] / E[L], for most are in long ones.

    >>> seen_in([10, 10]), seen_in([1, 19])
    (5.0, 9.05)
    """
    return sum(length**2 for length in lengths) / sum(lengths) / 2


class EpisodeStats(NamedTuple):
    """Means over episodes."""

    tokens: float
    seen: float
    """Others that a token of one sees: `seen_in` them."""
    longest: float
    """Tokens of the longest one to be held."""
    prompt: float
    sampled: float = 0.0
    turns: float = 1.0
    tool_s: float = 0.0
    """Of all answers of an episode together."""
    tail: float = 1.0
    """How much more the longest of a group's replies is than the mean."""

    @property
    def given(self) -> float:
        """Share that comes before the first reply."""
        return self.prompt / self.tokens

    @classmethod
    def of(cls, workload: Workload, *, group_size: int) -> "EpisodeStats":
        """From 64 groups."""
        random = np.random.default_rng(0)
        groups = [workload.group(random, group_size) for _ in range(64)]
        drawn = [shape for group in groups for shape in group]
        waits = fmean(sum(turn.waits for turn in shape.turns) for shape in drawn)
        tool_s = float(np.minimum(workload.tool_s.draw(random, 10_000), workload.timeout_s).mean())
        tokens, sampled = [shape.tokens for shape in drawn], fmean(shape.sampled for shape in drawn)
        return cls(
            tokens=fmean(tokens), seen=seen_in(tokens), longest=max(tokens), tool_s=waits * tool_s, sampled=sampled,
            prompt=fmean(shape.prompt for shape in drawn), turns=fmean(len(shape.turns) for shape in drawn),
            tail=fmean(max(shape.sampled for shape in group) for group in groups) / sampled,
        )  # fmt: skip
