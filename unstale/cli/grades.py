"""Success rates over several attempts at each held-out task, with 95% intervals.

They are avg@k, pass@k and pass^k (`EvalResult`). Attempts at one task are correlated, so each task
counts as one value from 0 to 1. The interval is a bootstrap over tasks. If all values are 0 or 1,
or all are equal, it is Wilson's interval, because a bootstrap of equal values has no width.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Literal

import numpy
from rich.table import Table

from unstale.observe.held_out import FAILED
from unstale.observe.statistics import wilson

RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class TaskMean:
    """A mean over tasks, its 95% interval, and the method by which the interval was computed."""

    value: float
    low: float
    high: float
    interval: Literal["Wilson", "bootstrap"]


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The result of an evaluation.

    `successes` has the number of successful attempts for each task. `failed` is the number of
    episodes, over all tasks, that an error ended.
    """

    successes: tuple[int, ...]
    attempts: int = 1
    failed: int = 0
    by_env: Mapping[str, "EvalResult"] = field(default_factory=dict)
    """The result for each environment, by its name. Empty if all tasks are of one environment."""
    reward: float = math.nan
    """The mean reward of all finished episodes. NaN if it is not known."""
    turns: float = math.nan
    """Mean number of turns of a finished episode. NaN if it is not known."""
    tokens: float = math.nan
    """Mean number of tokens that the policy sampled in a finished episode. NaN if not known."""

    @classmethod
    def of(
        cls, graded: Sequence[bool | None], attempts: int, envs: Sequence[str] = ()
    ) -> "EvalResult":
        """Return the result of an evaluation from the success of each episode.

        In `graded`, `attempts` values in a row belong to one task, and None is an episode that an
        error ended. `envs` has the name of each episode's environment. Empty means one environment.
        """
        successes = (
            graded[at : at + attempts].count(True) for at in range(0, len(graded), attempts)
        )
        names = list(dict.fromkeys(envs))
        parts = {
            name: cls.of(list(compress(graded, (env == name for env in envs))), attempts)
            for name in (names if len(names) > 1 else ())
        }
        return cls(tuple(successes), attempts, graded.count(None), parts)

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
    def is_known(self) -> bool:
        """True if at least one episode finished.

        Otherwise the success of the policy is not known.
        """
        return self.failed < self.tasks * self.attempts

    @property
    def success(self) -> float:
        return self.average.value if self.is_known else math.nan

    @property
    def average(self) -> TaskMean:
        """avg@k: the mean share of successful attempts, where k is the number of attempts at each
        task.
        """
        return mean_over_tasks([count / self.attempts for count in self.successes])

    def passed(self, k: int) -> TaskMean:
        """Return pass@k: the mean probability that at least one of k attempts at a task
        succeeds.
        """
        return mean_over_tasks(
            [pass_at(k, attempts=self.attempts, successes=count) for count in self.successes]
        )

    def passed_all(self, k: int) -> TaskMean:
        """Return pass^k: the mean probability that all of k attempts at a task succeed."""
        return mean_over_tasks(
            [pass_all(k, attempts=self.attempts, successes=count) for count in self.successes]
        )

    def rows(self, ks: Sequence[int]) -> dict[str, TaskMean]:
        """Return avg@k for all attempts, and pass@k and pass^k for each k in `ks` above 1, by
        name.
        """
        rows = {f"avg@{self.attempts}": self.average}
        for k in sorted(set(ks) - {1}):
            rows[f"pass@{k}"] = self.passed(k)
            rows[f"pass^{k}"] = self.passed_all(k)
        return rows

    def as_json(self, ks: Sequence[int]) -> dict[str, Any]:
        """Return counts, `rows` and means for JSON, for all tasks and for each
        environment.
        """
        row: dict[str, Any] = {
            "result": {
                "successes": self.successes,
                "attempts": self.attempts,
                "failed": self.failed,
            },
            **(self.rows(ks) if self.is_known else {}),
        }
        row |= {f"{name}_mean": value for name, value in self._means().items()}
        if self.by_env:
            row["by_env"] = {env: part.as_json(ks) for env, part in self.by_env.items()}
        return row

    def table(self, ks: Sequence[int]) -> Table:
        """Return a table of `rows` for a terminal: for each environment, then for all tasks."""
        table = Table("", "held-out success", "95% interval", "", title=str(self))
        for env, part in {**self.by_env, "": self}.items():
            for name, estimate in part.rows(ks).items():
                if not part.is_known:
                    table.add_row(f"{env} {name}".strip(), FAILED, "", "")
                    continue
                interval = f"{estimate.low:.1%} to {estimate.high:.1%}"
                label = f"{env} {name}".strip()
                table.add_row(label, f"{estimate.value:.1%}", interval, estimate.interval)
            table.add_section()
        for name, value in self._means().items():
            table.add_row(f"mean {name}", f"{value:.4g}", "", "")
        return table

    def _means(self) -> dict[str, float]:
        means = {"reward": self.reward, "turns": self.turns, "tokens": self.tokens}
        return {name: value for name, value in means.items() if not math.isnan(value)}


def pass_at(k: int, *, attempts: int, successes: int) -> float:
    """Return the probability that at least one of k attempts succeeds, estimated from all attempts.

    For n attempts and c successes, it is 1 - C(n - c, k) / C(n, k) (arXiv:2107.03374, eq. 1).

    >>> pass_at(2, attempts=4, successes=1)
    0.5
    """
    _check_attempts(f"pass@{k}", k, attempts=attempts, successes=successes)
    return 1 - math.comb(attempts - successes, k) / math.comb(attempts, k)


def pass_all(k: int, *, attempts: int, successes: int) -> float:
    """Return the probability that all of k attempts succeed, estimated from all attempts.

    For n attempts and c successes, it is C(c, k) / C(n, k) (arXiv:2406.12045).

    >>> pass_all(2, attempts=4, successes=3)
    0.5
    """
    _check_attempts(f"pass^{k}", k, attempts=attempts, successes=successes)
    return math.comb(successes, k) / math.comb(attempts, k)


def _check_attempts(name: str, k: int, *, attempts: int, successes: int) -> None:
    if not 1 <= k <= attempts or not 0 <= successes <= attempts:
        raise ValueError(
            f"{name} needs at least {k} attempts and 1 <= k; {successes} of {attempts} succeeded"
        )


def mean_over_tasks(values: Sequence[float]) -> TaskMean:
    """Return the mean and 95% interval of `values`, which has a number from 0 to 1 for each
    task.
    """
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
