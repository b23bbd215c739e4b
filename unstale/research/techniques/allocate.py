"""`allocate`: more episodes for tasks that need them.

N is the number of episodes of a group's first stage, p the success rate of its task, A an
advantage. Each rule ends with the paper that it is from.

`dars_et`: n episodes with the success rate p have the sum of |A| n S, S = 2 p (1 - p). Episodes are
added until this sum is that of N episodes with p = 1/2. p is the share of successes in the first
stage, or 0.5 / N without any. Groups with p >= 1/2 get no more. From DARS.
`dars_hw`: as `dars_et`, until the sum is 2 (1 - p) times that of N episodes with p = 1/2. From
DARS.
`interval`: one more episode is worth h(n) - h(n + 1), where h = t s / sqrt(n) is half the width of
Student's confidence interval of the mean reward, and s the standard deviation of the first stage.
From XRPO.
`v0`: n episodes are worth n (1 - p) (1 - (1 - p)^(n - 1)). p is from earlier groups, or with
`forecast` = sampler the forecast of the model of `predicted_sampler`. From V0.
`sqrt_law`: n episodes are worth -p (1 - p) / n, which makes n proportional to sqrt(p (1 - p)). p is
from earlier groups. From Rollout-GDRO.
`v05_risk`: episodes are added while each lowers the squared error of V0.5's baseline by more than
`cost`. The baseline mixes the mean reward with the forecast p. From V0.5.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from unstale.config.checks import ConfigError, NonNegative, Positive, PositiveInt, Range, Section
from unstale.config.techniques import Entry, require_sequences
from unstale.research.techniques.baseline import BaselineConfig
from unstale.research.techniques.budget import (
    Segment,
    dars_further,
    find_price,
    interval_segments,
    mean_utility,
    mixed_error,
    num_further,
    segments,
    v0_utility,
)
from unstale.research.techniques.success import (
    ForecastOptions,
    ForecastUser,
    RateOptions,
    SuccessShare,
    SuccessTracker,
)
from unstale.techniques.hooks import GroupSoFar, Outcome

if TYPE_CHECKING:
    from unstale.config import RunConfig

_DARS = ("dars_et", "dars_hw")
_BEFORE = ("v0", "sqrt_law")
"""Rules that choose a group's size before the group starts."""
_PRICED = (*_BEFORE, "interval")
_TRACKED = (*_BEFORE, "v05_risk")
_READ_BY = {
    "min": _BEFORE,
    "mean": _PRICED,
    "window": _PRICED,
    "std": _DARS,
    "level": ("interval",),
    "cost": ("v05_risk",),
    "prior": _TRACKED,
    "decay": _TRACKED,
    "forecast": _TRACKED,
    "success_at": (*_TRACKED, *_DARS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocateConfig(Section, ForecastOptions, RateOptions, SuccessShare):
    """More episodes for tasks that need them (DARS, XRPO, V0, V0.5, Rollout-GDRO)."""

    selector: ClassVar[str] = "gain"
    read_by: ClassVar[Mapping[str, Sequence[str]]] = _READ_BY

    gain: Literal["dars_et", "dars_hw", "interval", "v0", "sqrt_law", "v05_risk"] = "dars_et"
    """The rule that chooses the number of episodes. `v0` and `sqrt_law` choose the size of a group
    before it starts. The others begin with `schedule.group_size` episodes, and add some when these
    have ended.
    """
    max: PositiveInt = 32
    """Largest number of episodes of a group. The paper DARS uses 32 with `dars_et` and 64 with
    `dars_hw`.
    """
    min: PositiveInt = 2
    """Only for `v0` and `sqrt_law`: smallest number of episodes of a group."""
    mean: Positive = 8.0
    """Only for `interval`, `v0` and `sqrt_law`: mean number of episodes per group. An episode is
    added if it is worth more than a price, with which past groups would have had this mean or
    slightly less.
    """
    window: PositiveInt = 64
    """Only for `interval`, `v0` and `sqrt_law`: number of past groups over which the number of
    episodes has the mean `mean`.
    """
    std: bool = False
    """Only for `dars_et` and `dars_hw`: S = 2 sqrt(p (1 - p)), which fits advantages that are
    divided by the standard deviation of the group.
    """
    level: Annotated[float, Range(above=0, high=0.9999)] = 0.95
    """Only for `interval`: probability that the confidence interval contains the
    true mean reward.
    """
    cost: NonNegative = 0.0039
    """Only for `v05_risk`: an episode is added if it lowers the squared error of the baseline by
    more than this, for rewards in [-1, 1].
    """

    def check_combination(self) -> None:
        if self.gain in _BEFORE and not self.min <= self.mean <= self.max:
            raise ConfigError(
                "allocate.mean must be between allocate.min and allocate.max, got "
                f"{self.mean:g}, {self.min} and {self.max}"
            )


class Allocate(ForecastUser):
    """A technique that chooses the number of episodes of a group by one of six rules.

    With `interval`, `v0` and `sqrt_law`, an episode is added if its utility exceeds a price, chosen
    so that the last groups would have had the mean number of episodes. The size of each group is
    chosen when the group starts, or when its first stage has ended, without waiting for other
    groups.
    """

    def __init__(self, options: AllocateConfig) -> None:
        self._options = options
        self._tracker = SuccessTracker(
            "allocate", prior=options.prior, decay=options.decay, success_at=options.success_at
        )
        self._recent: deque[Outcome] = deque(maxlen=options.window)
        self._price: float | None = None
        """The utility that a further episode of a group must exceed to be added. None if it must be
        computed again: before the first batch, after each batch and after a restart.
        """

    def first(self, task: str) -> int:
        options = self._options
        if options.gain not in _BEFORE:
            return 0
        self._find_price()
        if self._price is None:
            return round(options.mean)
        return options.min + num_further(self._worth_before(task), self._price)

    def more(self, group: GroupSoFar) -> int:
        options = self._options
        left = max(0, options.max - group.started)
        if options.gain == "v05_risk":
            return min(left, self._num_worth_their_cost(group))
        if options.gain in _BEFORE or group.started > group.first:
            return 0
        if options.gain == "interval":
            self._find_price()
            if self._price is None:
                return 0
            return num_further(self._worth_after(group.rewards, left), self._price)
        successes = self._tracker.successes(group.rewards)
        further = dars_further(
            len(successes),
            sum(successes) / len(successes),
            by_hardness=options.gain == "dars_hw",
            std=options.std,
        )
        return min(left, further)

    def _worth_before(self, task: str) -> list[Segment]:
        """Return the utility of a task's episodes beyond `min`, in segments of constant slope.

        It is computed before the task's group starts.
        """
        options = self._options
        p = self.expected(task, options, self._tracker)
        utility = v0_utility if options.gain == "v0" else mean_utility
        return segments([utility(n, p) for n in range(options.min, options.max + 1)])

    def _worth_after(self, rewards: Sequence[float], left: int) -> list[Segment]:
        """Return the utility of up to `left` more episodes, in segments of constant slope.

        It is computed from the group's `rewards` so far.
        """
        options, size = self._options, len(rewards)
        if size < 2:
            return []
        return interval_segments(size, left, stdev(rewards), level=options.level)

    def _num_worth_their_cost(self, group: GroupSoFar) -> int:
        """Return how many more episodes to add: each must lower the baseline's error by over
        `cost`.
        """
        successes = self._tracker.successes(group.rewards)
        mean = 2 * sum(successes) / len(successes) - 1
        forecast = 2 * self.expected(group.task, self._options, self._tracker) - 1
        error = mixed_error(len(successes), mean, forecast)
        for size in range(len(successes), self._options.max):
            following = mixed_error(size + 1, mean, forecast)
            if error - following <= self._options.cost:
                return size - len(successes)
            error = following
        return self._options.max

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        if self._options.gain in _TRACKED:
            self._tracker.observe(outcomes)
        if self._options.gain in _PRICED:
            self._recent.extend(each for each in outcomes if each.rewards)
            self._price = None

    def _find_price(self) -> None:
        if not self._recent or self._price is not None:
            return
        options = self._options
        if options.gain == "interval":
            stages = [each.rewards[: len(each.rewards) - each.added] for each in self._recent]
            hulls = [self._worth_after(each, options.max - len(each)) for each in stages]
            least = sum(len(each) for each in stages)
        else:
            hulls = [self._worth_before(each.task) for each in self._recent]
            least = options.min * len(hulls)
        self._price = find_price(hulls, options.mean * len(hulls) - least)

    def state(self) -> Mapping[str, Any]:
        recent = [[each.task, list(each.rewards), each.added] for each in self._recent]
        return {"tracker": self._tracker.state(), "recent": recent}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._tracker.restore(state["tracker"])
        self._recent.clear()
        for task, rewards, added in state["recent"]:
            self._recent.append(Outcome(task, 0, 0, tuple(rewards), 0, 0, int(added)))
        self._price = None


def _check(options: AllocateConfig, config: RunConfig) -> None:
    size = config.schedule.group_size
    if options.gain in _TRACKED and not config.selection.pool:
        raise ConfigError(
            f"allocate.gain = {options.gain} needs selection.pool > 0, got 0: it learns the "
            "success rates of tasks that come again. Set --selection.pool to the number of tasks"
        )
    if options.gain == "interval" and not size < options.mean <= options.max:
        raise ConfigError(
            "allocate.mean must be above schedule.group_size and at most allocate.max, got "
            f"{options.mean:g}, {size} and {options.max}"
        )
    if options.gain not in _BEFORE and options.max <= size:
        raise ConfigError(
            f"allocate.max must be above schedule.group_size, got {options.max} and {size}"
        )
    if options.gain in _BEFORE:
        require_sequences(config, options.min, "allocate.min")
    options.check_sampler("allocate", config)
    baseline = config.technique_options.get("baseline")
    if options.gain == "v05_risk" and isinstance(baseline, BaselineConfig):
        _require_same_forecast(options, baseline)


def _require_same_forecast(options: AllocateConfig, baseline: BaselineConfig) -> None:
    """Raise `ConfigError` if `baseline` and the rule `v05_risk` forecast rewards differently."""
    if baseline.centre != "shrink":
        return
    if options.forecast != baseline.forecast:
        raise ConfigError(
            f"allocate.forecast must be {baseline.forecast} (baseline.forecast) with allocate.gain "
            f"= v05_risk, got {options.forecast}: episodes are added to lower the error of that "
            "baseline"
        )
    pairs = [
        ("allocate.prior", options.prior, "baseline.prior", baseline.prior),
        ("allocate.decay", options.decay, "baseline.decay", baseline.decay),
    ]
    for name, value, other, wanted in pairs:
        if value != wanted:
            raise ConfigError(
                f"{name} must be {other} with allocate.gain = v05_risk, got {value:g} and "
                f"{wanted:g}: episodes are added to lower the error of that baseline. "
                f"Set --{name} {wanted:g}"
            )
    if baseline.keep != 1:
        raise ConfigError(
            f"baseline.keep must be 1 with allocate.gain = v05_risk, got {baseline.keep:g}: "
            "allocate does not discount the counts at each visit"
        )
    low, high = baseline.reward_min, baseline.reward_max
    if options.success_at is None and (low, high) != (0, 1):
        raise ConfigError(
            "allocate.gain = v05_risk needs rewards between 0 and 1, and baseline.reward_min and "
            f"baseline.reward_max are {low:g} and {high:g}. If there are no others, set "
            f"--allocate.success_at {high:g}"
        )
    if options.success_at is not None and not low < options.success_at <= high:
        raise ConfigError(
            f"allocate.success_at must be above {low:g} (baseline.reward_min) and at most "
            f"{high:g} (baseline.reward_max), got {options.success_at:g}"
        )


def _describe(options: AllocateConfig) -> str:
    if options.gain in _BEFORE:
        sizes = f"{options.min} to {options.max} episodes per group by {options.gain}"
    else:
        sizes = f"up to {options.max} episodes per group by {options.gain}"
    mean = f", {options.mean:g} on average" if options.gain in _PRICED else ""
    stage = (
        "by the results of earlier groups"
        if options.gain in _BEFORE
        else "some of which start when the first ones have ended"
    )
    return f"{sizes}{mean}, {stage}; the gradient of a task grows with its number of episodes"


_MEASURED = """
64 tasks whose success rates drift, results known 2 steps later; 20 seeds, the second half of 60
steps. Hard tasks have a success rate below 0.2. `tests/techniques/test_allocate.py` repeats some
rows. Shares of hard tasks are of episodes and of abs(A).

| `gain` | first stage | episodes | hard tasks | abs(A) per episode | groups with equal rewards |
|---|---|---|---|---|---|
| none | 8 | 8 | 0.33, 0.16 | 0.256 | 0.30 |
| `dars_et` | 8 | 15.0 | 0.57, 0.32 | 0.214 | 0.17 |
| none | 16 | 16 | 0.34, 0.17 | 0.275 | 0.18 |
| `dars_hw`, `max` 64 | 8 | 23.6 | 0.66, 0.40 | 0.200 | 0.14 |
| `interval`, `mean` 8 | 4 | 7.9 | 0.26, 0.13 | 0.291 | 0.48 |
| `sqrt_law`, `mean` 8 | | 8.1 | 0.28, 0.14 | 0.292 | 0.30 |
| `v0`, `mean` 8 | | 7.7 | 0.70, 0.57 | 0.189 | 0.56 |

So DARS moves episodes to hard tasks, `interval` and `sqrt_law` to those with mixed results. `v0`
gives most episodes to a few hard tasks and leaves `min` for the others, of which more groups then
have equal rewards.

With 4 episodes at first, `v05_risk` needs 5.3 on average for a squared error of V0.5's baseline of
0.009; 6 episodes each have 0.012, 8 have 0.0095. That baseline is `baseline` with `centre` shrink.
Its options `prior` and `decay` must be equal to those of `allocate`.

The gradient of a task by enumeration, divided by the mean number of episodes and by the exact one,
for p of 0.1 to 0.8 and V of 0.2 and 0.5:

| `baseline` | 4 episodes | `v05_risk`, 4 to 10 episodes |
|---|---|---|
| `shrink` | 0.71 to 0.97 | 0.80 to 0.98 |
| `shrink` with `leave_out` | 1 | 0.96 to 1.05 |
| `loo` | 1 | 0.98 to 1.07 |
| `prior`, and `advantage.estimator rloo_first` | 1 | 1 |

So the baseline of V0.5 is biased, and more so without added episodes.

None of the rules has been measured on the desks.
"""

ENTRY = Entry(
    name="allocate",
    slot="allocator",
    rows=(7, 25, 27, 29, 35),
    makes=Allocate,
    options=AllocateConfig,
    changes=frozenset({"count"}),
    describe=_describe,
    check=_check,
    use="Tasks differ much in difficulty. `dars_et` and `dars_hw` spend more episodes on hard "
    "tasks, `interval` and `sqrt_law` on those with mixed results. Groups take longer if episodes "
    "are added when the first ones have ended.",
    measured=_MEASURED,
    exactness="The gradient of a task is multiplied by its mean number of episodes. With all "
    "rules but `v0` and `sqrt_law`, this number depends on rewards of the group, so a mean over "
    "the group is a biased baseline; that of `advantage.estimator rloo_first` is not. D and S do "
    "not change. Our own reading: the price, the decay of success rates, and of `interval` the "
    "single second stage, and s that does not change with n. V0 and V0.5 forecast p by "
    "a model, as `forecast` = sampler does. A forecast is made before the group's rewards are "
    "known, so it adds no bias of its own.",
    requires=frozenset({"siblings"}),
    evidence="notes",
)
