"""Read the runs of a comparison. Compute means over seeds with 95% intervals.

An arm is one configuration that was trained with several seeds. Means are over finished runs.
Training time counts from the start of the first step, without evaluations. Intervals are over seeds
(Student's t). Differences are between runs with the same seed. This module does not import torch,
so the tables can be written on another machine.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

from unstale.config import ConfigError
from unstale.config.files import read_mapping
from unstale.durability.run_folder import CONFIG, EVENTS, METRICS, Row, RunFolder, read_jsonl
from unstale.observe.held_out import HeldOut
from unstale.observe.run_rows import flatten, last_stop, step_of
from unstale.observe.statistics import paired_difference
from unstale.observe.words import number

PLAN, LAUNCHES = "plan.json", "launches.jsonl"
EXACT = "snapshot_old"
"""Default name of the reference arm, the configuration with which the others are compared. If no
arm has it, the first arm is the reference.
"""
SUCCESS, STALENESS = "rollout/success_rate", "schedule/staleness_mean"
KEPT, CLIPPED, EXACT_SHARE = (
    "correction/kept_share",
    "objective/clip_share",
    "old_logps/exact_share",
)
SERIES = (SUCCESS, STALENESS, KEPT, CLIPPED, EXACT_SHARE)
TOKENS = "rollout/sampled_tokens"
UNCOUNTED = "The number of sampled tokens was not recorded."

Point = tuple[float, float]
Unit = Literal["minutes", "tokens"]


@dataclass(frozen=True, slots=True)
class SeedMean:
    """A mean over `n` seeds, and the ends `low` and `high` of its 95% interval.

    `low` and `high` are None for a single seed and for equal values.
    """

    n: int
    mean: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        between = "" if self.low is None else f" ({self.low:z.3f} to {self.high:z.3f})"
        return f"{self.mean:.3g}{between}, n = {self.n}"


def mean_over_seeds(values: Iterable[float | None]) -> SeedMean | None:
    """Return the mean of the values that are not None, with its 95% interval.

    Return None if there is no such value. A single value or equal values get no interval, because
    they do not show how results spread.

    >>> print(mean_over_seeds([0.5, None, 0.75, 1.0]))
    0.75 (0.129 to 1.371), n = 3
    >>> print(mean_over_seeds([0.5, 0.5]))
    0.5, n = 2
    """
    present = [value for value in values if value is not None]
    if not present:
        return None
    n = len(present)
    mean = sum(present) / n
    spread = paired_difference(present)
    return SeedMean(n, mean, *(spread.interval(0.05) if spread else (None, None)))


def ended(folder: Path) -> tuple[str, str]:
    """Return the state of the run in `folder`, and the last line of its error message or "".

    The state is `finished`, `failed`, `unfinished` or `not begun`.
    """
    log = folder.with_name(f"{folder.name}.log")
    if not (folder / CONFIG).is_file():
        lines = log.read_text("utf-8", "replace").strip().splitlines() if log.is_file() else []
        return ("failed", lines[-1]) if lines else ("not begun", "")
    run = RunFolder(folder)
    if last_stop(run.rows(EVENTS)).get("reason") == "finished":
        return "finished", ""
    error = run.error().splitlines()
    return ("failed", error[-1]) if error else ("unfinished", "")


@dataclass(frozen=True, slots=True)
class TrainingBudget:
    """An amount of training after which runs are compared, in minutes or in sampled tokens."""

    unit: Unit
    amount: float


@dataclass(frozen=True, slots=True)
class TrialEvaluation:
    """An evaluation on held-out tasks: its success rate, and the amount of training before it."""

    step: int
    minutes: float
    tokens: float
    success: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A run of an arm. An arm is one configuration that is trained with several seeds."""

    arm: str
    seed: int
    folder: str
    state: str
    error: str
    config: Row
    minutes: float | None
    """Training time in minutes, without evaluations."""
    tokens: float | None
    """Number of sampled tokens in the groups that were trained on. None if it was not recorded."""
    evaluations: tuple[TrialEvaluation, ...]
    """The evaluations that did not fail, in the order of their steps."""
    last: HeldOut | None
    """The last evaluation, which may have failed. None without an evaluation."""
    series: Mapping[str, list[Point]]
    """Metric, one of `SERIES` -> its values as pairs (step, value)."""
    resets: int
    """Number of times that the run reset its moving average of the weights, from which `old_logp`
    can be computed.
    """
    launch: Row
    """The line of `launches.jsonl` with the start of this run. Empty if there is none."""

    @property
    def finished(self) -> bool:
        return self.state == "finished"

    @property
    def final(self) -> float | None:
        return self.last.success if self.last else None

    @property
    def best(self) -> float | None:
        return max((evaluation.success for evaluation in self.evaluations), default=None)

    @property
    def collapsed(self) -> bool:
        """True if the held-out success at the end is less than half of the run's highest."""
        return self.final is not None and self.best is not None and self.final < self.best / 2

    @property
    def late(self) -> float | None:
        """The mean success of training episodes over the last quarter of the steps. None without a
        step.
        """
        values = [value for _, value in self.series[SUCCESS]]
        return _mean(values[-max(1, len(values) // 4) :])

    def mean(self, name: str) -> float | None:
        return _mean([value for _, value in self.series[name]])

    def total(self, unit: Unit) -> float | None:
        """Return the amount of training in the whole run, in minutes or tokens. None if it is not
        known.
        """
        return self.minutes if unit == "minutes" else self.tokens

    def after(self, budget: TrainingBudget) -> float | None:
        """Return the held-out success after the amount of training `budget`.

        Success is interpolated linearly between evaluations. None before the first and after the
        last one.
        """
        return between(
            [
                (getattr(evaluation, budget.unit), evaluation.success)
                for evaluation in self.evaluations
            ],
            budget.amount,
        )


def between(points: Sequence[Point], x: float) -> float | None:
    """Return y at `x`, interpolated linearly between `points` (x, y). None outside their range.

    >>> between([(0.0, 0.25), (2.0, 0.5), (4.0, 0.75)], 3.0), between([(0.0, 0.25)], 1.0)
    (0.625, None)
    """
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * ((x - x0) / (x1 - x0) if x1 > x0 else 1.0)
    return None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def read_trial(folder: Path, arm: str, seed: int, launch: Row) -> Trial:
    """Read a run of the configuration `arm` from its folder. The run need not be finished.

    `launch` is the line of `launches.jsonl` with its start, or empty.
    """
    state, error = ended(folder)
    run = RunFolder(folder) if (folder / CONFIG).is_file() else None
    config = run.config() if run else {}
    rows = sorted(run.rows(METRICS) if run else (), key=step_of)
    events = list(run.rows(EVENTS)) if run else []
    minutes = _training_minutes(rows, events)
    tokens = _sampled_tokens(rows)
    evaluations = [each for row in rows if (each := HeldOut.of_metrics(row))]
    return Trial(
        arm=arm,
        seed=seed,
        folder=folder.name,
        state=state,
        error=error,
        config=config,
        minutes=max(minutes.values(), default=None),
        tokens=max(tokens.values(), default=0.0) or None,
        evaluations=tuple(
            TrialEvaluation(each.step, minutes.get(each.step, 0.0), tokens[each.step], each.success)
            for each in evaluations
            if each.success is not None
        ),
        last=evaluations[-1] if evaluations else None,
        series={
            name: [
                (step_of(row), value)
                for row in rows
                if (value := number(row.get(name))) is not None
            ]
            for name in SERIES
        },
        resets=sum(event.get("kind") == "ewma_reset" for event in events),
        launch=launch,
    )


def _training_minutes(rows: Sequence[Row], events: Sequence[Row]) -> dict[int, float]:
    """Return step -> minutes of training up to its end, without the time of evaluations."""
    timed = [
        (step_of(row), time) for row in rows if (time := number(row.get("time_s"))) is not None
    ]
    spans = [
        (event.get("lane"), event["start"], event["end"])
        for event in events
        if event.get("kind") == "span"
    ]
    return {step: seconds / 60 for step, seconds in training_seconds(timed, spans).items()}


def training_seconds(
    timed: Sequence[tuple[int, float]], spans: Iterable[tuple[Any, float, float]]
) -> dict[int, float]:
    """Return step -> seconds of training up to its end, without evaluations.

    `timed` has pairs (step, seconds from the start of the run to its end). `spans` are activities:
    lane, start and end in seconds. Training begins at the end of step 0. If there is no step 0, it
    begins with the first span of the lane `wait`. Evaluations must not overlap.

    >>> training_seconds([(0, 2.0), (1, 5.0), (2, 9.0)], [("eval", 0.0, 2.0), ("eval", 5.0, 6.0)])
    {0: 0.0, 1: 3.0, 2: 6.0}
    """
    spans = list(spans)
    waits = [start for lane, start, _ in spans if lane == "wait"]
    begin = next((time for step, time in timed if step == 0), min(waits, default=0.0))
    evaluations = sorted(
        (start, end) for lane, start, end in spans if lane == "eval" and start >= begin
    )
    starts = [start for start, _ in evaluations]
    totals = [0.0, *accumulate(end - start for start, end in evaluations)]
    found = {}
    for step, time in timed:
        begun = bisect_left(starts, time)
        unfinished = max(0.0, evaluations[begun - 1][1] - time) if begun else 0.0
        found[step] = time - begin - totals[begun] + unfinished
    return found


def _sampled_tokens(rows: Sequence[Row]) -> dict[int, float]:
    """Return step -> number of sampled tokens in all groups that were trained on up to this step.

    Episodes that a filter left out are counted. Groups that are replayed are counted once.
    """
    sampled = (number(row.get(TOKENS)) or 0.0 for row in rows)
    return dict(zip(map(step_of, rows), accumulate(sampled), strict=True))


@dataclass(frozen=True, slots=True)
class ArmResult:
    """The runs of one arm (a configuration), sorted by seed."""

    name: str
    trials: tuple[Trial, ...]

    @property
    def finished(self) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.trials if trial.finished)

    @property
    def collapsed(self) -> int:
        return sum(trial.collapsed for trial in self.finished)

    def mean(self, name: str) -> SeedMean | None:
        return mean_over_seeds(trial.mean(name) for trial in self.finished)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The runs of several configurations, called arms, that are compared."""

    name: str
    arms: tuple[ArmResult, ...]
    commands: tuple[str, ...]
    warnings: Mapping[str, Sequence[str]]
    """Arm (configuration) -> the linter's warnings about it. Arms that were not linted are
    missing.
    """
    reference_name: str = EXACT
    """Name of the arm (configuration) with which the others are compared. If no arm has this name,
    the first arm is used.
    """

    @property
    def trials(self) -> list[Trial]:
        return [trial for arm in self.arms for trial in arm.trials]

    @property
    def finished(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.finished]

    @property
    def reference(self) -> ArmResult:
        named = (arm for arm in self.arms if arm.name == self.reference_name)
        return next(named, self.arms[0])

    def budget(self, unit: Unit) -> TrainingBudget | None:
        """Return the largest amount of training, in `unit`, that all finished runs reached.

        Runs that did not record their amount are left out. Return None if no run recorded it, or if
        `unit` is minutes and the times of the runs cannot be compared.
        """
        if unit == "minutes" and self.shared_machine:
            return None
        totals = [total for trial in self.finished if (total := trial.total(unit)) is not None]
        return TrainingBudget(unit, min(totals)) if totals else None

    def not_comparable(self, unit: Unit) -> str:
        """Return a sentence on why `budget` returns None for `unit`."""
        return UNCOUNTED if unit == "tokens" else self.shared_machine

    @property
    def shared_machine(self) -> str:
        """The reason why the times of the runs cannot be compared, such as a shared machine. Empty
        if they can.
        """
        jobs = [number(trial.launch.get("jobs")) for trial in self.finished]
        if not jobs:
            return "No run has finished."
        if any(trial.config.get("deterministic") for trial in self.finished):
            return (
                "Left out: the runs are deterministic. Their engine waits for the trainer "
                "and tools take no time, so other runs take a different time."
            )
        if None in jobs:
            return "Left out: some runs may have shared the machine with others."
        if len(machines := self.launched("machine")) > 1:
            return f"Left out: the runs used different machines ({'; '.join(machines)})."
        most = max(job for job in jobs if job is not None)
        if most > 1:
            return f"Left out: up to {most:g} runs shared the machine, so times are not comparable."
        return ""

    def launched(self, name: str) -> list[str]:
        """Return the different values that the runs have for the field `name` of `launches.jsonl`,
        such as `commit`.
        """
        return sorted({str(trial.launch[name]) for trial in self.trials if trial.launch.get(name)})

    def pairs(self, arm: ArmResult, budget: TrainingBudget | None = None) -> list[float]:
        """Return the held-out success of each run of `arm` minus that of the reference's run with
        the same seed.

        An arm is a configuration. Success is that at the end of training, or after the amount
        `budget`. Runs without a partner are left out.
        """

        def success(trial: Trial) -> float | None:
            return _success(trial, budget)

        return self.paired_values(arm, success, success)

    def paired_values(
        self,
        arm: ArmResult,
        value: Callable[[Trial], float | None],
        reference_value: Callable[[Trial], float | None],
    ) -> list[float]:
        """Return `value` of each run of `arm` minus `reference_value` of the reference's run with
        the same seed.

        An arm is a configuration. A seed is left out if either run has not finished or has no
        value.
        """
        reference = {trial.seed: reference_value(trial) for trial in self.reference.finished}
        values = [(value(trial), reference.get(trial.seed)) for trial in arm.finished]
        return [
            own - baseline for own, baseline in values if own is not None and baseline is not None
        ]

    def versus(self, arm: ArmResult, budget: TrainingBudget | None = None) -> SeedMean | None:
        """Return the mean difference in held-out success between `arm` and the reference
        configuration.

        Runs with the same seed are paired. Success is that at the end of training, or after the
        amount `budget`. None for the reference itself, and without pairs.
        """
        return None if arm is self.reference else mean_over_seeds(self.pairs(arm, budget))

    def success(self, arm: ArmResult, budget: TrainingBudget | None = None) -> SeedMean | None:
        """Return the mean held-out success of the configuration `arm` over its seeds.

        Success is that at the end of training, or after the amount `budget`. None if no run has a
        value.
        """
        return mean_over_seeds(_success(trial, budget) for trial in arm.finished)

    def settings(self, name: str) -> list[Any]:
        """Return the different values that the option `name` has in the compared runs."""
        values = [flatten(trial.config).get(name) for trial in self.trials if trial.config]
        return list(dict.fromkeys(values))

    def differences(self, arm: ArmResult) -> dict[str, Any]:
        """Return the options that differ between the compared runs, by name, with their values in
        `arm`.
        """
        configs = [flatten(trial.config) for trial in self.trials if trial.config]
        options = next((flatten(trial.config) for trial in arm.trials if trial.config), {})
        return {
            name: value
            for name, value in options.items()
            if name not in ("seed", "name", "runs")
            and any(config.get(name) != value for config in configs)
        }


def _success(trial: Trial, budget: TrainingBudget | None) -> float | None:
    return trial.final if budget is None else trial.after(budget)


def grouped(warnings: Mapping[str, Sequence[str]]) -> list[str]:
    """Return each warning once, preceded by the names of the arms (configurations) that have it.

    >>> grouped({"a": ["nothing bounds S"], "b": [], "c": ["nothing bounds S"]})
    ['a, c: nothing bounds S']
    """
    arms: dict[str, list[str]] = {}
    for arm, texts in warnings.items():
        for warning in texts:
            arms.setdefault(warning, []).append(arm)
    return [f"{', '.join(names)}: {warning}" for warning, names in arms.items()]


def read_comparison(folder: Path) -> Comparison:
    """Read a comparison from its folder. Raises `ConfigError` if the folder is not that of a
    comparison.
    """
    path = folder / PLAN
    plan: Row = read_mapping(path) if path.is_file() else {}
    runs = {run["folder"]: (str(run["arm"]), int(run["seed"])) for run in plan.get("runs", [])}
    for config in sorted(folder.glob(f"*-seed*/{CONFIG}")):
        if config.parent.name not in runs and (
            match := re.fullmatch(r"(.+)-seed(\d+)", config.parent.name)
        ):
            runs[config.parent.name] = match[1], int(match[2])
    if not runs:
        raise ConfigError(
            f"{folder} is not a comparison: it has no {PLAN} and no folders <arm>-seed<k>"
        )
    begun = {
        str(row.get("run")): row
        for row in read_jsonl(folder / LAUNCHES)
        if row.get("kind") == "began"
    }
    trials = [
        read_trial(folder / name, arm, seed, begun.get(name, {}))
        for name, (arm, seed) in runs.items()
    ]
    arms: dict[str, list[Trial]] = {}
    for trial in sorted(trials, key=lambda trial: trial.seed):
        arms.setdefault(trial.arm, []).append(trial)
    return Comparison(
        name=folder.resolve().name,
        arms=tuple(ArmResult(name, tuple(runs_of_arm)) for name, runs_of_arm in arms.items()),
        commands=tuple(plan.get("commands", [])),
        warnings=plan.get("warnings", {}),
        reference_name=plan.get("reference", EXACT),
    )
