"""`bin_sizes`: a number of episodes for each bin of tasks, with an exact mean.

A task's bin is given by the share of its last groups that had a success. All groups of bin b have
n_b episodes. c_b is the number of groups of bin b among the last `window` groups, and v_b a moving
average of the variance of rewards in the bin. The sizes n_b satisfy sum c_b n_b = `mean` sum c_b
exactly, or have the largest possible sum below. Dynamic programming finds them.

`sqrt`: the sizes minimise sum c_b v_b / n_b, so n_b is about proportional to sqrt(v_b).
`weights`: each size n of a bin has a weight. Each batch multiplies it by exp(-rate (v / n + mu n)),
where v is the variance of rewards of the bin in the batch. The sizes have the largest product of
weights. Then the price mu grows by `mu_rate` times the batch's mean size minus `mean`. From
Rollout-GDRO.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from unstale.config.checks import ConfigError, NonNegative, Positive, PositiveInt, Section, Share
from unstale.config.techniques import Entry, require_sequences
from unstale.research.techniques.difficulty import FIXED_BINS, BinOptions, Bins, spread_of
from unstale.techniques.hooks import GroupSoFar, Outcome

if TYPE_CHECKING:
    from unstale.config import RunConfig

_READ_BY = {"beta": ("sqrt",), "rate": ("weights",), "mu_rate": ("weights",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class BinSizesConfig(Section, BinOptions):
    """A number of episodes for each bin of tasks, with an exact mean (Rollout-GDRO)."""

    selector: ClassVar[str] = "rule"
    read_by: ClassVar[Mapping[str, Sequence[str]]] = _READ_BY

    rule: Literal["sqrt", "weights"] = "sqrt"
    """The rule that chooses the sizes: by the variance of rewards in each bin, or by weights that
    each batch changes.
    """
    min: PositiveInt = 4
    """Smallest number of episodes of a group."""
    max: PositiveInt = 16
    """Largest number of episodes of a group."""
    mean: Positive = 8.0
    """Mean number of episodes per group, over the last `window` groups. Groups of tasks without a
    bin, which are new, have this number.
    """
    window: PositiveInt = 64
    """Number of past groups over which the mean is computed."""
    beta: Share = 0.1
    """Only for `sqrt`: weight of a batch in the moving average of the variance
    of a bin's rewards.
    """
    rate: NonNegative = 1.0
    """Only for `weights`: rate at which the weights of sizes change from batch to batch."""
    mu_rate: NonNegative = 0.001
    """Only for `weights`: rate at which mu changes, the price of an episode."""

    def check_combination(self) -> None:
        if not self.min <= self.mean <= self.max:
            raise ConfigError(
                "bin_sizes.mean must be between bin_sizes.min and bin_sizes.max, got "
                f"{self.mean:g}, {self.min} and {self.max}"
            )


class BinSizes:
    """A technique that gives all tasks in a bin of similar difficulty equally many episodes."""

    def __init__(self, options: BinSizesConfig) -> None:
        self._options = options
        self._bins = Bins(options)
        self._recent: deque[int] = deque(maxlen=options.window)
        """The bin of each of the last groups."""
        self._variances: dict[int, float] = {}
        self._log_weights = np.zeros((options.bins, options.max - options.min + 1))
        self._mu = 0.0
        self._sizes: dict[int, int] = {}

    def first(self, task: str) -> int:
        number = self._bins.find(task)
        return self._sizes.get(-1 if number is None else number, round(self._options.mean))

    def more(self, group: GroupSoFar) -> int:
        return 0

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        options = self._options
        finished = [each for each in outcomes if each.rewards]
        spreads: defaultdict[int, list[float]] = defaultdict(list)
        for outcome in finished:
            number = self._bins.find(outcome.task)
            if number is not None:
                spreads[number].append(spread_of(outcome.rewards))
                self._recent.append(number)
        for number, found in spreads.items():
            variance = sum(found) / len(found)
            before = self._variances.get(number, variance)
            self._variances[number] = before + options.beta * (variance - before)
            self._log_weights[number] -= options.rate * (
                variance / self._every + self._mu * self._every
            )
        if finished:
            realised = sum(len(each.rewards) + each.failures for each in finished) / len(finished)
            self._mu += options.mu_rate * (realised - options.mean)
        self._bins.observe(finished)
        self._choose()

    @property
    def _every(self) -> NDArray[np.float64]:
        """All sizes that a group may have, `[sizes]`."""
        return np.arange(self._options.min, self._options.max + 1, dtype=np.float64)

    def _choose(self) -> None:
        options, counts = self._options, Counter(self._recent)
        numbers = sorted(counts)
        if options.rule == "sqrt":
            utility = [-counts[each] * self._variances[each] / self._every for each in numbers]
        else:
            utility = [self._log_weights[each] for each in numbers]
        budget = int(options.mean * counts.total() + 1e-9)
        of_bins = [counts[each] for each in numbers]
        sizes = exact_sizes(of_bins, utility, least=options.min, budget=budget)
        self._sizes = dict(zip(numbers, sizes, strict=True))

    def state(self) -> Mapping[str, Any]:
        return {
            "bins": self._bins.state(),
            "recent": list(self._recent),
            "variances": [[number, value] for number, value in self._variances.items()],
            "log_weights": self._log_weights.tolist(),
            "mu": self._mu,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._bins.restore(state["bins"])
        self._recent = deque(map(int, state["recent"]), maxlen=self._options.window)
        self._variances = {int(number): float(value) for number, value in state["variances"]}
        self._log_weights = np.array(state["log_weights"])
        self._mu = float(state["mu"])
        self._choose()


def exact_sizes(
    counts: Sequence[int], utility: Sequence[NDArray[np.float64]], *, least: int, budget: int
) -> list[int]:
    """Return the group size of each bin with the largest total utility, by dynamic programming.

    `counts[b]` is the number of groups of bin b, and `utility[b][k]` the utility of the size `least
    + k` for that bin. The sum of counts times sizes is `budget`, or the largest possible sum below
    it. Raises ValueError if groups of `least` episodes already exceed the budget.
    """
    left = budget - least * sum(counts)
    if left < 0:
        raise ValueError(f"{sum(counts)} groups of {least} episodes are more than {budget}")
    best = np.full(left + 1, -np.inf)
    best[0] = 0.0
    chosen = []
    for count, values in zip(counts, utility, strict=True):
        options = np.full((len(values), left + 1), -np.inf)
        for k in range(min(len(values), left // count + 1)):
            options[k, k * count :] = best[: left + 1 - k * count] + values[k]
        chosen.append(options.argmax(axis=0))
        best = options.max(axis=0)
    total = int(np.flatnonzero(np.isfinite(best)).max())
    sizes = []
    for count, choice in zip(reversed(counts), reversed(chosen), strict=True):
        k = int(choice[total])
        sizes.append(least + k)
        total -= k * count
    return sizes[::-1]


def _check(options: BinSizesConfig, config: RunConfig) -> None:
    require_sequences(config, options.min, "bin_sizes.min")


def _describe(options: BinSizesConfig) -> str:
    return (
        f"{options.min} to {options.max} episodes per group, {options.mean:g} on average, equally "
        f"many for tasks of equal difficulty ({options.bins} bins); the gradient of a task grows "
        "with its number of episodes"
    )


_MEASURED = """
64 tasks with logits of normal distributions, 8 groups per step; the mean of p (1 - p) / n in the
second half of 60 steps, 20 seeds (standard error at most 0.0002). All mean sizes are between 7.9
and 8.2. `tests/techniques/test_difficulty_bins.py` repeats a row.

| mean and deviation of the logits | 8 each | `sqrt` | `sqrt`, `min` 2 | `weights`, `min` 2 |
|---|---|---|---|---|
| -2.5, 2 | 0.0119 | 0.0104 | 0.0114 | 0.0123 |
| -0.5, 2 | 0.0190 | 0.0185 | 0.0191 | 0.0195 |
| -1.5, 1 | 0.0185 | 0.0182 | 0.0188 | 0.0191 |

The error falls by 2% to 12% with `sqrt`, and rises with `weights`. Small groups also make the bins
less certain. The share of groups with equal rewards does not change. It has not been measured on
the desks.
"""

ENTRY = Entry(
    name="bin_sizes",
    slot="allocator",
    rows=(25,),
    makes=BinSizes,
    options=BinSizesConfig,
    changes=frozenset({"count"}),
    describe=_describe,
    check=_check,
    use="Tasks differ much in difficulty, and each comes too seldom for a success rate of its own, "
    "which `allocate` uses.",
    measured=_MEASURED,
    exactness="The gradient of a task is multiplied by its number of episodes, which does not "
    "depend on rewards of the group. D and S do not change. Our own reading: v / n as the loss of "
    "a size, and all sizes learning from each batch.",
    requires=frozenset({"siblings", "pool"}),
    fixed={
        "bins": FIXED_BINS,
        "min": "the checkpoint has a weight of each size",
        "max": "the checkpoint has a weight of each size",
    },
    evidence="paper",
)
