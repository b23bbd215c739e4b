"""`episode_filter`: training on some episodes of a larger group only.

`schedule.group_size` episodes of each task are sampled, and n of them are trained on. This number n
changes linearly from `n` at the start of the run to `last` at its end. Smaller groups stay whole.

`variance`: the episodes with the largest variance of advantages, n times the number of groups from
the whole batch. These always are the k episodes with the lowest advantages and the rest with the
highest, for the best k. Kept episodes keep the advantages that were computed over all episodes. For
an episode with several advantages, their mean counts. From D3S, which also chooses tokens
(`top_tokens`).
`clean_success`: successes and failures in the group's proportion, but at least 2 of each if the
group has them. The first failures are kept, and the successes with the lowest penalty: tool errors
per tool call, 0.5 without a call. From GRPO-RoC of rStar2-Agent (arXiv 2508.20722, section 3.2).
`contrast`: n / 2 episodes with the highest and n / 2 with the lowest reward. From Sol-RL.
`balanced`: some of the highest and the rest of the lowest rewards, for a mean nearest to `target`.
From ARRoL, which uses the predicted success of replies that have not ended.

The last three rules act before advantages are computed, so the other episodes do not count in a
group's baseline.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from unstale.config.checks import ConfigError, Range, Section, Share
from unstale.config.techniques import Entry, require_sequences
from unstale.records import Group, ScoredTrajectory, Trajectory
from unstale.research.techniques.facts import RequiredFact
from unstale.techniques.hooks import CreditContext

if TYPE_CHECKING:
    from unstale.config import RunConfig

LEAST_OF_EACH = 2
"""Smallest number of successes, and of failures, that `clean_success` keeps if the group has as
many, as in rStar2-Agent.
"""
SMALLEST_PENALTY = 0.01
"""Smallest penalty that `order = sample` uses. Smaller ones are raised to it, because a success is
chosen with weight 1 / penalty, which must be finite.
"""
_READ_BY = {
    "target": ("balanced",),
    "order": ("clean_success",),
    "errors": ("clean_success",),
    "calls": ("clean_success",),
    "extra": ("clean_success",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFilterConfig(Section):
    """Training on some episodes of a larger group only (D3S, GRPO-RoC, Sol-RL, ARRoL)."""

    selector: ClassVar[str] = "rule"
    read_by: ClassVar[Mapping[str, Sequence[str]]] = _READ_BY

    rule: Literal["variance", "clean_success", "contrast", "balanced"] = "variance"
    """The rule by which the episodes to train on are chosen."""
    n: Annotated[int, Range(2)] = 4
    """Number of episodes of a task that are trained on at the start of the run. It must be smaller
    than `schedule.group_size`.
    """
    last: Annotated[int, Range(0)] = 0
    """Number of episodes of a task that are trained on at the end of the run; 0 means `n`,
    otherwise at least 2. The number changes linearly from `n` to this.
    """
    target: Share = 0.5
    """Only for `balanced`: target of the mean reward of the chosen episodes. Rewards should be from
    0 to 1.
    """
    order: Literal["sort", "sample"] = "sort"
    """Only for `clean_success`: keep the successes with the lowest penalties, or draw successes
    with weights 1 / penalty.
    """
    errors: str = "tool_errors"
    """Only for `clean_success`: name of the environment's fact (a reported number) with the number
    of tool errors.
    """
    calls: str = "tool_calls"
    """Only for `clean_success`: name of the environment's fact (a reported number) with the number
    of tool calls. If it is not reported, turns count instead.
    """
    extra: str = ""
    """Only for `clean_success`: name of a fact (a reported number) from 0 to 1 that is added to the
    penalty, such as one of a wrong format. Empty adds nothing.
    """

    def check_combination(self) -> None:
        if self.last == 1:
            raise ConfigError(
                "episode_filter.last must be 0 or >= 2, got 1: one episode has no comparison"
            )
        if self.rule == "clean_success" and not self.errors:
            raise ConfigError("episode_filter.errors must name a fact of the environment, got ''")
        least = 2 * LEAST_OF_EACH
        if self.rule == "clean_success" and min(self.n, self.last or self.n) < least:
            raise ConfigError(
                f"episode_filter.n and episode_filter.last must be >= {least} with "
                f"episode_filter.rule = clean_success, got {self.n} and {self.last}: it keeps "
                f"{LEAST_OF_EACH} successes and failures each"
            )

    def size(self, progress: float) -> int:
        """Return the number of episodes of a task to train on.

        `progress` is the share of the run that is done.
        """
        return round(self.n + ((self.last or self.n) - self.n) * progress)


class EpisodeFilter:
    """A filter that chooses some episodes of each group, by reward or by tool errors."""

    def __init__(self, options: EpisodeFilterConfig) -> None:
        self._options = options
        self._errors = RequiredFact(options.errors, option="episode_filter.errors")

    def select(self, groups: Sequence[Group], context: CreditContext) -> Sequence[Group]:
        size = self._options.size(context.progress)
        if self._options.rule == "clean_success":
            self._errors.require(groups, context)
        return [self._picked(group, size) for group in groups]

    def _picked(self, group: Group, size: int) -> Group:
        items = group.trajectories
        if len(items) <= size:
            return group
        rewards = [item.reward for item in items]
        match self._options.rule:
            case "contrast":
                places = contrast(rewards, size)
            case "balanced":
                places = balanced(rewards, size, target=self._options.target)
            case _:
                places = self._clean(group, size)
        return leave_out(group, places)

    def _clean(self, group: Group, size: int) -> frozenset[int]:
        items = group.trajectories
        options = self._options
        success = [place for place, item in enumerate(items) if item.success]
        failure = [place for place, item in enumerate(items) if not item.success]
        num_successes = split(len(success), len(failure), size)
        penalty = {place: self._penalty(items[place]) for place in success}
        if options.order == "sample":
            random = Random(f"pick/{items[0].seed}/{group.number}")
            weights = {place: 1 / max(penalty[place], SMALLEST_PENALTY) for place in success}
            # The smallest of exponential times are a sample without replacement by weight.
            rank = {place: random.expovariate(weights[place]) for place in success}
        else:
            rank = penalty
        cleanest = sorted(success, key=lambda place: rank[place])[:num_successes]
        return frozenset({*cleanest, *failure[: size - num_successes]})

    def _penalty(self, item: Trajectory) -> float:
        options = self._options
        errors = item.facts.get(options.errors, 0.0)
        calls = item.facts.get(options.calls, item.num_turns)
        penalty = errors / calls if calls else 0.5
        return penalty + item.facts.get(options.extra, 0.0)


class EpisodeFilterByAdvantage:
    """A filter that chooses some episodes of the whole batch, by advantage."""

    def __init__(self, options: EpisodeFilterConfig) -> None:
        self._options = options

    def select_scored(
        self, groups: Sequence[Group], scored: Sequence[ScoredTrajectory], context: CreditContext
    ) -> Sequence[Group]:
        values = {each.trajectory.episode: fmean(each.advantage) for each in scored}
        items = [item for group in groups for item in group.trajectories]
        # An estimator may leave episodes out. Nothing is learned from them.
        scored_places = [place for place, item in enumerate(items) if item.episode in values]
        advantages = [values[items[place].episode] for place in scored_places]
        size = self._options.size(context.progress) * len(groups)
        if len(advantages) <= size:
            return groups
        places = {scored_places[i] for i in largest_variance(advantages, size)}
        ends = list(accumulate((len(group.trajectories) for group in groups), initial=0))
        return [
            leave_out(group, frozenset(place - first for place in places))
            for group, first in zip(groups, ends[:-1], strict=True)
        ]


def leave_out(group: Group, kept: Collection[int]) -> Group:
    """Return the group with only those trajectories whose index is in `kept`."""
    items = group.trajectories
    return replace(
        group,
        trajectories=tuple(item for place, item in enumerate(items) if place in kept),
        unused=(*group.unused, *(item for place, item in enumerate(items) if place not in kept)),
    )


def largest_variance(values: Sequence[float], size: int) -> frozenset[int]:
    """Return the indices of the `size` values that together have the largest variance.

    >>> sorted(largest_variance([-2, -1, 0, 1, 3], 3))
    [0, 1, 4]
    """
    order = sorted(range(len(values)), key=lambda place: values[place])
    middle = fmean(values)
    scale = max(abs(value - middle) for value in values) or 1.0
    values = [(value - middle) / scale for value in values]
    sums = [0.0, *accumulate(values[place] for place in order)]
    squares = [0.0, *accumulate(values[place] ** 2 for place in order)]

    def spread(low: int) -> float:
        high = len(order) - size + low
        total = sums[low] + sums[-1] - sums[high]
        return squares[low] + squares[-1] - squares[high] - total**2 / size

    # Of equal spreads the most even division, which rounding errors must not decide. The spreads
    # are at least 1, unless all values are equal.
    low = max(range(size + 1), key=lambda low: (round(spread(low), 9), -abs(2 * low - size)))
    return frozenset(order[:low] + order[len(order) - size + low :])


def contrast(rewards: Sequence[float], size: int) -> frozenset[int]:
    """Return the indices of the `size` most extreme rewards: one half lowest, one half highest.

    If `size` is odd, there is one more high reward than low ones.
    """
    order = sorted(range(len(rewards)), key=lambda place: rewards[place])
    low = size // 2
    return frozenset(order[:low] + order[len(order) - size + low :])


def balanced(rewards: Sequence[float], size: int, *, target: float) -> frozenset[int]:
    """Return the indices of `size` rewards whose mean is near `target`.

    They are the n lowest and the `size` - n highest rewards. n makes their mean nearest to
    `target`.

    >>> sorted(balanced([0.9, 0.8, 0.2, 0.1], 2, target=0.5))
    [0, 3]
    """
    order = sorted(range(len(rewards)), key=lambda place: rewards[place])
    scale = max(abs(reward - target) for reward in rewards) or 1.0

    def chosen(low: int) -> list[int]:
        return order[:low] + order[len(order) - size + low :]

    def distance(low: int) -> tuple[float, float]:
        mean = fmean(rewards[place] for place in chosen(low))
        return round(abs(mean - target) / scale, 9), abs(2 * low - size)

    return frozenset(chosen(min(range(size + 1), key=distance)))


def split(num_successes: int, num_failures: int, size: int) -> int:
    """Return how many successes `clean_success` keeps among its `size` episodes of a group.

    The group must have more than `size` episodes.

    >>> split(5, 3, 4), split(15, 1, 8), split(1, 15, 8), split(8, 0, 4)
    (2, 7, 1, 4)
    """
    share = round(num_successes * size / (num_successes + num_failures))
    most = size - min(LEAST_OF_EACH, num_failures)
    least = max(min(LEAST_OF_EACH, num_successes), size - num_failures)
    return min(max(share, least), most, num_successes)


def make(options: EpisodeFilterConfig) -> EpisodeFilter | EpisodeFilterByAdvantage:
    """Return the filter for the rule in the options."""
    return (
        EpisodeFilterByAdvantage(options) if options.rule == "variance" else EpisodeFilter(options)
    )


def _describe(options: EpisodeFilterConfig) -> str:
    chosen = {
        "variance": "those with the largest variance of advantages over the batch",
        "clean_success": f"of the successes those with the fewest {options.errors}",
        "contrast": "those with the highest and the lowest rewards",
        "balanced": f"those with rewards of a mean near {options.target:g}",
    }[options.rule]
    last = f", {options.last} at the end" if options.last else ""
    return f"a part of the episodes of a task is trained on, {options.n} at first{last}: {chosen}"


def _check(options: EpisodeFilterConfig, config: RunConfig) -> None:
    size = config.schedule.group_size
    if options.n >= size:
        raise ConfigError(
            f"episode_filter.n must be < {size} (schedule.group_size), got {options.n}: nothing "
            "would be left out. Sample larger groups, such as with --schedule.group_size "
            f"{2 * options.n}"
        )
    if options.last > size:
        raise ConfigError(
            f"episode_filter.last must be <= {size} (schedule.group_size), got {options.last}"
        )
    require_sequences(config, min(options.n, options.last or options.n), "episode_filter.n")


_MEASURED = """
4 of 16 episodes of 4 softmax bandits with 12 arms, 64 seeds: the cosine of their gradient with the
exact one.

| chosen | over the batch | within each group |
|---|---|---|
| at random | 0.61 | 0.50 |
| `variance` | 0.70 | |
| `contrast`, `balanced` (equal with rewards of 0 and 1) | | 0.66 |
| all 16 | 0.84 | 0.84 |

So the choice is better than as many episodes at random, and not better than training on all.

`clean_success`, 8 of 16: a policy can make a tool error that does not change its success. After 20
steps the share of such answers is 0.06 (24 seeds), and 0.57 without the rule. It has not been
measured on the desks.
"""

ENTRY = Entry(
    name="episode_filter",
    slot="filter",
    rows=(4, 21, 24),
    makes=make,
    options=EpisodeFilterConfig,
    changes=frozenset({"groups"}),
    describe=_describe,
    use="Sampling is cheap beside training, so that larger groups cost little and fewer episodes "
    "in the batch save much. `clean_success`: successes have tool errors that the reward ignores.",
    measured=_MEASURED,
    exactness="The gradient is that of the chosen episodes, which is another expectation than that "
    "of all. `variance` keeps every advantage, so its direction is near to that of all; the other "
    "rules change the baseline, too. D and S do not change. Our own reading: `variance` keeps the "
    "advantages of the whole groups; in `clean_success` the defaults of the facts, turns instead "
    "of calls, and the smallest penalty; rewards in place of predictions in `balanced`.",
    requires=frozenset({"siblings"}),
    evidence="notes",
    check=_check,
)
