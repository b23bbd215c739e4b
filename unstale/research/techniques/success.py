"""Success rates of tasks, counted for the techniques that choose tasks or group sizes by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from unstale.config.checks import ConfigError, Positive, Range
from unstale.techniques.hooks import Forecaster, Outcome

if TYPE_CHECKING:
    from unstale.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class SuccessThreshold:
    """The option `success_at` of techniques that count successes."""

    __slots__ = ()

    success_at: float = 1.0
    """Smallest reward at which an episode is a success. The default, 1, is for rewards of 0 and 1;
    lower it if no reward reaches 1.
    """


@dataclass(frozen=True, kw_only=True)
class SuccessShare:
    """The option `success_at` of techniques for which a reward may be a share of success."""

    __slots__ = ()

    success_at: float | None = None
    """Smallest reward at which an episode is a success. None: the reward itself, between 0 and 1,
    is the share of success.
    """


@dataclass(frozen=True, kw_only=True)
class RateOptions:
    """The options of techniques that keep the success rate of every task."""

    __slots__ = ()

    prior: Positive = 1.0
    """Number of successes, and also of failures, that are assumed for each task before its first
    visit.
    """
    decay: Annotated[float, Range(above=0, high=1)] = 0.98
    """Share of a task's counts of successes and failures that is kept after each batch. The counts
    of a task that is not visited return to `prior`.
    """


@dataclass(frozen=True, kw_only=True)
class ForecastOptions:
    """The option `forecast` of techniques that use an expected success rate of a task."""

    __slots__ = ()

    forecast: Literal["counts", "sampler"] = "counts"
    """The expected success rate V of a task: from its earlier results (`counts`, with `prior` and
    `decay`), or from the technique `predicted_sampler`, which also forecasts tasks that were never
    tried.
    """

    def check_sampler(self, name: str, config: RunConfig) -> None:
        """Raise `ConfigError` if a technique uses a sampler's forecasts, and the run has no such
        sampler.

        `name` is the name of the technique.
        """
        if self.forecast == "sampler" and "predicted_sampler" not in config.techniques.split():
            raise ConfigError(
                f"{name}.forecast = sampler needs the technique predicted_sampler, whose forecasts "
                f"it uses. Set --techniques '{config.techniques} predicted_sampler'"
            )


class ForecastUser:
    """A technique that may use the success rates that the run's sampler forecasts."""

    _forecaster: Forecaster | None = None

    def use_forecasts(self, forecaster: Forecaster) -> None:
        self._forecaster = forecaster

    def expected(self, task: str, options: ForecastOptions, tracker: SuccessTracker) -> float:
        """Return the expected success rate of a task, from `tracker` or a sampler, by `options`."""
        if options.forecast == "sampler" and self._forecaster:
            return self._forecaster.forecast_of(task)
        return tracker.mean(task)


@dataclass(frozen=True, kw_only=True)
class VisitOptions(RateOptions):
    """The options of techniques whose counts are also reduced at each visit to a task."""

    __slots__ = ()

    keep: Annotated[float, Range(above=0, high=1)] = 1.0
    """Share of a task's earlier counts of successes and failures that is kept at each visit to the
    task.
    """
    discount_prior: bool = False
    """Let `keep` reduce the assumed counts of `prior`, too. MSSR does so, with `keep` between 0.875
    and 0.96 and `prior` 4.
    """


@dataclass(slots=True)
class BetaCounts:
    """The parameters `a` and `b` of the Beta distribution of a task's success rate, and their time.

    The time is a number of batches.
    """

    a: float
    b: float
    num_batches: int

    @property
    def mean(self) -> float:
        return self.a / (self.a + self.b)


class SuccessTracker:
    """The Beta distributions of the success rates of all tasks.

    A group adds its successes to the parameter `a` of its task and its failures to `b`. From batch
    to batch, both return towards `prior`: after n batches without a group, a = prior + decay^n (a -
    prior). A group that arrives late is decayed by its own age, so the order of arrival does not
    matter. With `keep` < 1, each visit also multiplies the counts of earlier visits by `keep`; with
    `discount_prior` also the prior.
    """

    def __init__(  # noqa: PLR0913 - three of them describe the decay
        self,
        name: str,
        *,
        prior: float = 1.0,
        decay: float = 1.0,
        keep: float = 1.0,
        discount_prior: bool = False,
        success_at: float | None = None,
    ) -> None:
        """Create a tracker without results.

        A reward of at least `success_at` is a success. Without `success_at`, the reward itself is
        the share of success. `name` is the technique's name, for error messages. The other
        arguments are those of `RateOptions` and `VisitOptions`.
        """
        self._name = name
        self._prior = prior
        self._decay = decay
        self.keep = keep
        """Share of a task's earlier counts that is kept at a visit. It may change
        between batches.
        """
        self._kept_prior = 0.0 if discount_prior else prior
        self._success_at = success_at
        self._counts: dict[str, BetaCounts] = {}
        self._num_batches = 0

    def counts(self, task: str) -> BetaCounts:
        """Return the Beta distribution of a task's success rate.

        The weight of a result falls with each batch after it.
        """
        found = self._counts.get(task)
        if found is None:
            return BetaCounts(self._prior, self._prior, self._num_batches)
        return self._decayed(found, self._num_batches)

    def mean(self, task: str) -> float:
        """Return the expected success rate of a task."""
        return self.counts(task).mean

    def tasks(self) -> Sequence[str]:
        """Return all tasks with an observed group."""
        return list(self._counts)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Add the groups of a batch. Raises `ConfigError` for a reward that is not in [0, 1]."""
        for outcome in sorted(outcomes, key=lambda each: each.num_batches):
            if not outcome.rewards:
                continue
            self._num_batches = max(self._num_batches, outcome.num_batches)
            solved = sum(self.successes(outcome.rewards))
            before = self._counts.get(
                outcome.task, BetaCounts(self._prior, self._prior, outcome.num_batches)
            )
            now = self._decayed(before, max(before.num_batches, outcome.num_batches))
            weight = self._decay ** (now.num_batches - outcome.num_batches)
            a, b = (
                self._kept_prior + self.keep * (count - self._kept_prior)
                for count in (now.a, now.b)
            )
            self._counts[outcome.task] = BetaCounts(
                a + weight * solved, b + weight * (len(outcome.rewards) - solved), now.num_batches
            )

    def _decayed(self, counts: BetaCounts, num_batches: int) -> BetaCounts:
        factor = self._decay ** (num_batches - counts.num_batches)
        a, b = (self._prior + factor * (count - self._prior) for count in (counts.a, counts.b))
        return BetaCounts(a, b, num_batches)

    def successes(self, rewards: Sequence[float]) -> list[float]:
        """Return the success of each episode, from 0 to 1, as the function `successes` does."""
        return successes(self._name, rewards, self._success_at)

    def state(self) -> dict[str, Any]:
        """Return the tasks and the parameters of the distributions of their success rates."""
        return {
            "num_batches": self._num_batches,
            "tasks": list(self._counts),
            "a": [each.a for each in self._counts.values()],
            "b": [each.b for each in self._counts.values()],
            "batches": [each.num_batches for each in self._counts.values()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._num_batches = int(state["num_batches"])
        rows = zip(state["tasks"], state["a"], state["b"], state["batches"], strict=True)
        self._counts = {task: BetaCounts(a, b, int(when)) for task, a, b, when in rows}

    def map_means(self, change: Callable[[float], float]) -> None:
        """Replace the mean m of every task's distribution by `change(m)`.

        The sum a + b of the distribution's parameters does not change.
        """
        for task, counts in self._counts.items():
            weight = counts.a + counts.b
            won = weight * change(counts.mean)
            self._counts[task] = BetaCounts(won, weight - won, counts.num_batches)


def successes(name: str, rewards: Sequence[float], success_at: float | None) -> list[float]:
    """Return the success of each episode, from 0 to 1, by its reward.

    The success is 1 if the reward is at least `success_at`, otherwise 0. Without `success_at`, it
    is the reward itself, and `ConfigError` is raised for a reward outside [0, 1]. `name` is the
    technique's name, for this error message.
    """
    if success_at is not None:
        return [float(reward >= success_at) for reward in rewards]
    for reward in rewards:
        if not 0 <= reward <= 1:
            raise ConfigError(
                f"the technique {name} needs rewards between 0 and 1, got {reward:g}. Set "
                f"--{name}.success_at to the reward from which on an episode is a success"
            )
    return list(rewards)
