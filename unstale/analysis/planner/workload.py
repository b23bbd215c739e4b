"""The simulated workload (turns, tokens and tool times of episodes) and the simulated engines."""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import NormalDist, fmean
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unstale.config.checks import (
    ConfigError,
    Count,
    NonNegative,
    Positive,
    PositiveInt,
    Range,
    Section,
    Share,
)


@dataclass(frozen=True, slots=True)
class Constant:
    """A distribution with only one value."""

    value: float

    def draw(
        self, random: np.random.Generator, count: int, *, common: float = 0.0
    ) -> NDArray[np.float64]:
        return np.full(count, float(self.value))


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A log-normal distribution. Values above `max` are replaced by `max`.

    `mean` is the mean before values are replaced. `LogNormal.capped` takes the mean after it.
    """

    mean: float
    sigma: float
    """Standard deviation of the logarithm of a value."""
    max: float = math.inf

    def draw(
        self, random: np.random.Generator, count: int, *, common: float = 0.0
    ) -> NDArray[np.float64]:
        """Draw `count` values at random.

        The logarithms of the values share a random term, which has the part `common` of their
        variance. The rest is independent.
        """
        if not self.mean:
            return np.zeros(count)
        noise = (
            math.sqrt(1 - common) * random.standard_normal(count)
            + math.sqrt(common) * random.standard_normal()
        )
        log_values = math.log(self.mean) - self.sigma**2 / 2 + self.sigma * noise
        return np.minimum(np.exp(log_values), self.max)

    @classmethod
    def capped(cls, mean: float, sigma: float, max: float) -> "LogNormal":
        """Return the distribution whose mean is `mean` after values above `max` are replaced by
        `max`.

        >>> drawn = LogNormal.capped(100, 1.0, max=300).draw(np.random.default_rng(0), 100_000)
        >>> round(float(drawn.mean())), float(drawn.max())
        (100, 300.0)
        """
        if not 0 < mean < max:
            raise ValueError(f"the mean must be between 0 and the maximum {max:g}, got {mean:g}")
        low = math.log(mean)
        high = low + 20 + 20 * sigma
        for _ in range(100):
            middle = (low + high) / 2
            if _capped_mean(middle, sigma, max) < mean:
                low = middle
            else:
                high = middle
        return cls(math.exp(low), sigma, max)


def _capped_mean(log_mean: float, sigma: float, max: float) -> float:
    """Return the mean of min(X, max) for a log-normal X with mean exp(`log_mean`)."""
    if not sigma:
        return min(math.exp(log_mean), max)
    cap = (math.log(max) - log_mean + sigma**2 / 2) / sigma
    below = NormalDist().cdf
    return math.exp(log_mean) * below(cap - sigma) + max * (1 - below(cap))


Distribution = Constant | LogNormal


@dataclass(frozen=True, slots=True)
class MeanRange:
    """A check of an option whose value is a distribution: its mean must be from `low` to `high`."""

    low: float
    high: float = 1e9

    def check(self, name: str, value: Distribution) -> None:
        Range(self.low, self.high).check(f"the mean of {name}", mean_of(value))


def mean_of(distribution: Distribution) -> float:
    """Return the mean of a distribution, before values above its maximum are replaced."""
    return distribution.value if isinstance(distribution, Constant) else distribution.mean


def largest_of(distribution: Distribution) -> float:
    """Return the largest value of a distribution, which may be infinite."""
    if isinstance(distribution, Constant):
        return distribution.value
    return distribution.max if distribution.mean else 0.0


AtLeastOne = Annotated[Distribution, MeanRange(1)]
AtLeastZero = Annotated[Distribution, MeanRange(0)]


class TurnShape(NamedTuple):
    """The size of a turn: tokens of the reply and of the environment's answer, and number of tool
    calls.
    """

    reply: int
    answer: int
    calls: int = 1


class Prefix(NamedTuple):
    """The first tokens of a context, up to the start of a reply, which other episodes may share."""

    name: int
    """Prefixes with equal names have equal tokens. The name 0 is for the start that all prompts
    share.
    """
    tokens: int


class EpisodeShape(NamedTuple):
    """The size of one episode: tokens of its prompt and of its turns. The last turn has no
    answer.
    """

    prompt: int
    turns: tuple[TurnShape, ...]
    prefixes: tuple[Prefix, ...] = ()
    """The first parts of its contexts, shortest first. An engine does not compute those that it has
    cached for another episode. If empty, the episodes of a group share only their prompt.
    """

    @property
    def sampled(self) -> int:
        return sum(turn.reply for turn in self.turns)

    @property
    def tokens(self) -> int:
        return self.prompt + self.sampled + sum(turn.answer for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload(Section):
    """The lengths of simulated episodes: distributions, or recorded groups from which to draw."""

    prompt_tokens: AtLeastOne = Constant(512)
    """Number of tokens in the prompt, which the episodes of a group share."""
    turns: Annotated[Distribution, MeanRange(1, 10_000)] = Constant(1)
    """Number of replies in an episode."""
    reply_tokens: AtLeastOne = field(default_factory=lambda: LogNormal(1024.0, 0.8))
    """Number of tokens in a reply."""
    prompt_share: Share = 0.5
    """Share of the variance of log reply lengths that the episodes of a group have in common,
    because they have the same prompt. The default is an assumption.
    """
    tool_tokens: AtLeastZero = Constant(0)
    """Number of tokens in the environment's answer to a reply."""
    tool_s: AtLeastZero = Constant(0)
    """Seconds that a tool call takes."""
    reward_s: AtLeastZero = Constant(0)
    """Seconds that the reward of an episode takes in one of `fleet.reward_processes`."""
    equal_tool_s: bool = False
    """True if the n-th tool call takes equally long in all episodes of a group. This is so in the
    customer-service environments of this package, which draw the times from the group's seed.
    """
    recorded: tuple[tuple[EpisodeShape, ...], ...] = ()
    """Recorded groups of episodes from which to draw. They replace all distributions except
    `tool_s`.
    """
    max_tokens: Annotated[int, Range(2)] = 1 << 30
    """Largest number of tokens in an episode."""
    timeout_s: Positive = math.inf
    """Seconds after which a tool call fails, with its episode: `rollout.timeout_s`."""
    retries: Count = 1
    """Number of times that a failed episode starts again: `rollout.retries`."""

    def check_combination(self) -> None:
        prompt = min(mean_of(self.prompt_tokens), largest_of(self.prompt_tokens))
        if not self.recorded and prompt >= self.max_tokens:
            raise ConfigError(
                f"the prompt must be shorter than the longest episode ({self.max_tokens} tokens), "
                f"got {prompt:g} tokens; the options are --prompt and --longest"
            )

    @property
    def longest(self) -> int:
        """The largest number of tokens that an episode of the workload can have."""
        if self.recorded:
            return max(shape.tokens for shape in self._recorded_shapes)
        turns = self._largest(self.turns, 1)
        replies = turns * self._largest(self.reply_tokens, 1)
        answers = (turns - 1) * self._largest(self.tool_tokens, 0)
        return min(self.max_tokens, self._largest(self.prompt_tokens, 1) + replies + answers)

    @property
    def longest_reply(self) -> int:
        """The largest number of tokens that a reply can have."""
        if self.recorded:
            return max(turn.reply for shape in self._recorded_shapes for turn in shape.turns)
        return min(self._largest(self.reply_tokens, 1), self.longest)

    @property
    def most_turns(self) -> int:
        """The largest number of replies that an episode can have.

        If the distribution has no maximum, this is the largest of 10,000 values drawn from it.
        """
        if self.recorded:
            return max(len(shape.turns) for shape in self._recorded_shapes)
        if math.isfinite(largest_of(self.turns)):
            return self._largest(self.turns, 1)
        return max(_integers(self.turns.draw(np.random.default_rng(0), 10_000), 1))

    def _largest(self, distribution: Distribution, low: int) -> int:
        """Return the largest value of a distribution, but at least `low` and at most
        `max_tokens`.
        """
        return max(low, round(min(largest_of(distribution), self.max_tokens)))

    @property
    def _recorded_shapes(self) -> list[EpisodeShape]:
        return [shape for group in self.recorded for shape in group]

    def group(
        self, random: np.random.Generator, size: int, *, number: int | None = None
    ) -> list[EpisodeShape]:
        """Draw the sizes of `size` episodes of one group.

        If there are recorded groups, the one with number `number` is used, or a random one if it is
        None. Numbers beyond the last recorded group start again at the first.
        """
        if self.recorded:
            if number is None:
                number = int(random.integers(len(self.recorded)))
            turn, index = divmod(number, len(self.recorded))
            return _siblings(random, self.recorded[index], size, turn)
        prompt = min(self.max_tokens - 1, *_integers(self.prompt_tokens.draw(random, 1), 1))
        turns = _integers(self.turns.draw(random, size), 1)
        replies = self.reply_tokens.draw(random, sum(turns), common=self.prompt_share)
        answers = self.tool_tokens.draw(random, sum(turns))
        sizes = zip(_integers(replies, 1), _integers(answers, 0), strict=True)
        return [
            self._truncated(prompt, [TurnShape(*size) for size in islice(sizes, count)])
            for count in turns
        ]

    def _truncated(self, prompt: int, turns: Sequence[TurnShape]) -> EpisodeShape:
        """Return an episode with this prompt and these turns, cut off at `max_tokens` tokens."""
        left = self.max_tokens - prompt
        kept: list[TurnShape] = []
        for turn in turns:
            kept.append(TurnShape(min(turn.reply, left), turn.answer))
            left -= turn.reply + turn.answer
            if left < 1:
                break
        return EpisodeShape(prompt, (*kept[:-1], TurnShape(kept[-1].reply, 0, 0)))


def _siblings(
    random: np.random.Generator, recorded: Sequence[EpisodeShape], size: int, turn: int
) -> list[EpisodeShape]:
    """Return `size` episodes, drawn from the episodes `recorded` of one group.

    `turn` is the number of times that the group was used before. An episode that is drawn twice
    shares only its prompt with itself. A group that is used again shares with its earlier use only
    the tokens with which all prompts begin.
    """
    indices = range(size)
    if len(recorded) != size:
        indices = random.integers(len(recorded), size=size).tolist()
    used: Counter[int] = Counter()
    siblings = []
    for index in indices:
        shape = recorded[index]
        prefixes = shape.prefixes
        if used[index]:
            prefixes = tuple(each for each in prefixes if each.tokens <= shape.prompt)
        if turn:
            prefixes = tuple(
                each._replace(name=each.name + turn * _MAX_PREFIXES) if each.name else each
                for each in prefixes
            )
        used[index] += 1
        siblings.append(shape._replace(prefixes=prefixes))
    return siblings


_MAX_PREFIXES = 1 << 40
"""The names of a recorded run's prefixes are numbers below this bound. When a recorded group is
simulated again, a multiple of the bound is added to its names, so that its prefixes are not in the
simulated cache.
"""


def _integers(values: NDArray[np.float64], low: int) -> list[int]:
    return [max(low, round(value)) for value in values.tolist()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet(Section):
    """The simulated engines."""

    engines: PositiveInt = 1
    max_running: PositiveInt = 128
    """Largest number of replies that one engine samples at the same time."""
    cache_tokens: Count = 0
    """Number of context tokens that fit into an engine's memory. 0 means no limit."""
    keep_cache: bool = False
    """Keep cached contexts when a new version of the weights is loaded, as `engine.keep_cache`."""
    load_tokens: Count = 0
    """Number of context tokens that add as much load to an engine as one reply:
    `engine.load_tokens`.
    """
    prefill_engines: Count = 0
    """Number of engines in the prefill group (`engine.prefill_engines`). These are the first
    engines of the pool.
    """
    prefill_ratio: Positive = 8.0
    """A request goes to the prefill group if it has more new context tokens than this multiple of
    its expected reply tokens: `engine.prefill_ratio`.
    """
    colocated: bool = False
    """If True, engines run on the trainer's devices. They pause from the scoring of a batch until
    they have loaded the new version.
    """
    stream: bool = False
    """If True, the trainer computes the gradient of each group as soon as it has ended:
    `trainer.stream`.
    """
    steps_per_version: PositiveInt = 1
    """Number of steps between two published versions (`trigger_parameter_sync_step` of verl)."""
    failures_per_hour: NonNegative = 0.0
    """Mean number of failures of an engine per hour. Its replies continue on other engines from the
    tokens that their episodes have received.
    """
    restart_s: NonNegative = 120.0
    """Seconds until a failed engine has restarted. It then loads the next version, or the current
    one if all engines have failed.
    """
    reward_processes: PositiveInt = 1
    """Largest number of processes that compute rewards: `task.reward_processes`."""
    min_reward_processes: Count = 1
    """Number of these that remain when idle: `task.min_reward_processes`."""
    reward_start_s: NonNegative = 5.0
    """Seconds until a process for rewards has started."""

    def check_combination(self) -> None:
        if self.prefill_engines and self.prefill_engines >= self.engines:
            raise ConfigError(
                f"fleet.prefill_engines must be < {self.engines} (fleet.engines), because at least "
                f"one must decode; got {self.prefill_engines}"
            )
        if self.min_reward_processes > self.reward_processes:
            raise ConfigError(
                f"fleet.min_reward_processes must be at most {self.reward_processes} "
                f"(fleet.reward_processes), got {self.min_reward_processes}"
            )
        if self.prefill_ratio != 8.0 and not self.prefill_engines:
            raise ConfigError("fleet.prefill_ratio is used only with fleet.prefill_engines > 0")


def mean_attended(lengths: Collection[float]) -> float:
    """Return the mean number of tokens that a token attends to, for episodes of these lengths.

    The result is E[L^2] / (2 E[L]), where L is the length of an episode.

    >>> mean_attended([10, 10]), mean_attended([1, 19])
    (5.0, 9.05)
    """
    return sum(length**2 for length in lengths) / sum(lengths) / 2


class EpisodeStats(NamedTuple):
    """Means over the episodes of a workload. Lengths are in tokens."""

    tokens: float
    attended: float
    """Mean number of tokens to which a token attends (see `mean_attended`)."""
    longest: float
    """Largest number of tokens that an episode can have, for which there must be memory."""
    prompt: float
    sampled: float = 0.0
    turns: float = 1.0
    tool_s: float = 0.0
    """Mean seconds of all tool calls of an episode."""
    tail: float = 1.0
    """Mean sampled tokens of the longest episode of a group, divided by the mean of all
    episodes.
    """
    slowest: float = 1.0
    """Tokens of the longest of many episodes that were drawn, divided by the mean. Times are
    computed from it and not from `longest`, because episodes of the largest possible length are
    rare.
    """

    @property
    def prompt_fraction(self) -> float:
        return self.prompt / self.tokens

    @classmethod
    def of(cls, workload: Workload, *, group_size: int) -> "EpisodeStats":
        """Return the means over the episodes of 64 groups that are drawn at random."""
        random = np.random.default_rng(0)
        groups = [workload.group(random, group_size) for _ in range(64)]
        episodes = [shape for group in groups for shape in group]
        calls = fmean(sum(turn.calls for turn in shape.turns) for shape in episodes)
        call_s = np.minimum(workload.tool_s.draw(random, 10_000), workload.timeout_s)
        tokens = [shape.tokens for shape in episodes]
        sampled = fmean(shape.sampled for shape in episodes)
        return cls(
            tokens=fmean(tokens),
            attended=mean_attended(tokens),
            longest=workload.longest,
            prompt=fmean(shape.prompt for shape in episodes),
            sampled=sampled,
            turns=fmean(len(shape.turns) for shape in episodes),
            tool_s=calls * float(call_s.mean()),
            tail=fmean(max(shape.sampled for shape in group) for group in groups) / sampled,
            slowest=max(tokens) / fmean(tokens),
        )
