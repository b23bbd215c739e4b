"""Compute avg@k and pass@k over several attempts at each held-out task, with 95% intervals.

Attempts at one task are correlated, so each task counts as one value from 0 to 1. The interval is a
bootstrap over tasks. If all values are 0 or 1, or all are equal, it is Wilson's interval, because a
bootstrap of equal values has no width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy

from unstale.observe.statistics import wilson

RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class TaskMean:
    """A mean over tasks, its 95% interval, and the name of the method for the interval."""

    value: float
    low: float
    high: float
    interval: Literal["Wilson", "bootstrap"]


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The number of successful attempts at each task, and the total number of failed episodes."""

    successes: tuple[int, ...]
    attempts: int = 1
    failed: int = 0

    @classmethod
    def of(cls, graded: Sequence[bool | None], attempts: int) -> "EvalResult":
        """Count the successes in `graded`. `attempts` adjacent values belong to one task."""
        successes = (
            graded[at : at + attempts].count(True) for at in range(0, len(graded), attempts)
        )
        return cls(tuple(successes), attempts, graded.count(None))

    def __str__(self) -> str:
        broken = (
            f"\n{self.failed} of {self.tasks * self.attempts} failed and count as no success"
            if self.failed
            else ""
        )
        return f"{self.tasks} tasks, {self.attempts} attempts each{broken}"

    @property
    def tasks(self) -> int:
        return len(self.successes)

    @property
    def success(self) -> float:
        return self.average.value

    @property
    def average(self) -> TaskMean:
        """Return avg@k, which is the mean success rate of an attempt."""
        return mean_over_tasks([count / self.attempts for count in self.successes])

    def passed(self, k: int) -> TaskMean:
        """Return pass@k, which is the probability that one of k attempts at a task succeeds."""
        return mean_over_tasks(
            [pass_at(k, attempts=self.attempts, successes=count) for count in self.successes]
        )


def pass_at(k: int, *, attempts: int, successes: int) -> float:
    """Return 1 - C(n - c, k) / C(n, k) for n attempts and c successes (arXiv:2107.03374, eq. 1).

    >>> pass_at(2, attempts=4, successes=1)
    0.5
    """
    if not 1 <= k <= attempts or not 0 <= successes <= attempts:
        raise ValueError(
            f"pass@{k} needs at least {k} attempts and 1 <= k; {successes} of {attempts} succeeded"
        )
    return 1 - math.comb(attempts - successes, k) / math.comb(attempts, k)


def mean_over_tasks(values: Sequence[float]) -> TaskMean:
    """Return mean and 95% interval of `values`, one per task and each between 0 and 1."""
    value = sum(values) / len(values)
    if len(set(values)) == 1 or set(values) <= {0.0, 1.0}:
        return TaskMean(value, *wilson(value, len(values)), "Wilson")
    from scipy.stats import bootstrap  # half a second, which most commands need not spend

    interval = bootstrap(
        (values,),
        numpy.mean,
        n_resamples=RESAMPLES,
        batch=100,
        method="percentile",
        rng=numpy.random.default_rng(0),
    ).confidence_interval
    return TaskMean(value, float(interval.low), float(interval.high), "bootstrap")
