"""The success of a policy on held-out tasks, as texts for reports and the terminal."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from unstale.observe.statistics import wilson
from unstale.observe.words import number, percent

FAILED = "failed"
UNBROKEN = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The result of an evaluation on held-out tasks, after `step` steps of training."""

    step: int
    success: float | None
    """Share of successful tasks. None if the evaluation failed, because no episode was finished."""
    tasks: int
    """Number of tasks, or 0 if it is not known."""
    failed: int = 0
    """Number of tasks with an episode that an error ended. They count as not successful."""

    @classmethod
    def of_event(cls, event: Mapping[str, Any]) -> Self | None:
        """Return the result in an event of the run's log. None if it is another kind of event."""
        share, step, tasks, failed = (
            number(event.get(name)) for name in ("success", "step", "tasks", "failed")
        )
        if step is None or (share is None and not tasks):
            return None
        return cls(int(step), share, int(tasks or 0), int(failed or 0))

    @classmethod
    def of_metrics(cls, row: Mapping[str, Any]) -> Self | None:
        """Return the result in a step's metrics. None if there was no evaluation after it."""
        names = {"success": "success_rate", "tasks": "tasks", "failed": "failed_tasks"}
        event = {field: row.get(f"eval/{name}") for field, name in names.items()}
        return cls.of_event({"step": row.get("step"), **event})

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% confidence interval of `success`. None if `success` or `tasks` is not known."""
        if self.success is None or not self.tasks:
            return None
        return wilson(min(1.0, max(0.0, self.success)), self.tasks)

    @property
    def share(self) -> str:
        """`success` in percent as text, or "failed"."""
        return FAILED if self.success is None else percent(self.success, 1)

    @property
    def about(self) -> str:
        """Text with the 95% interval of `success`, and the number of failed tasks if any."""
        if self.success is None:
            return f"all {self.tasks} tasks failed"
        parts = []
        if self.interval:
            low, high = (percent(bound, 1) for bound in self.interval)
            parts.append(f"95% interval {low}{UNBROKEN}to{UNBROKEN}{high}")
        if self.failed:
            parts.append(f"{self.failed} of {self.tasks} tasks failed")
        return ", ".join(parts)

    @property
    def counts(self) -> str:
        """Short text with the number of tasks and the 95% interval. Empty if neither is known.

        >>> HeldOut(3, 0.5, 4).counts, HeldOut(3, None, 4).counts, HeldOut(3, 0.5, 4, 1).counts
        ('4 tasks, 15% to 85%', 'all 4 tasks', '4 tasks, 1 failed, 15% to 85%')
        """
        if self.success is None:
            return f"all {self.tasks} tasks"
        if not self.interval:
            return ""
        failed = f", {self.failed} failed" if self.failed else ""
        low, high = (percent(bound) for bound in self.interval)
        return f"{self.tasks} tasks{failed}, {low} to {high}"

    def __str__(self) -> str:
        return f"{self.share} ({self.counts})" if self.counts else self.share

    @property
    def when(self) -> str:
        counted = "1 step" if self.step == 1 else f"{self.step} steps"
        return f"after {counted}" if self.step else "before training"


def held_out(events: Iterable[Mapping[str, Any]]) -> list[HeldOut]:
    """Return the results of evaluations in the events of a run's log, by step.

    A resumed run may repeat an evaluation. Then only the last result of the step is returned.
    """
    found = {each.step: each for event in events if (each := HeldOut.of_event(event))}
    return [found[step] for step in sorted(found)]


def improved(evaluations: Sequence[HeldOut]) -> bool:
    """Return True if the success of the last evaluation is above that of the first.

    False if there is no evaluation, or one of these two failed.
    """
    shares = [each.success for each in (*evaluations[:1], *evaluations[-1:])]
    return bool(shares) and None not in shares and shares[-1] > shares[0]  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The success before and after training, as texts.

    `shares` has pairs of a share in percent and a text about its uncertainty. `note` describes what
    was measured. `better` is True if success has increased.
    """

    shares: Sequence[tuple[str, str]]
    note: str
    better: bool = False


def outcome(
    evaluations: Sequence[HeldOut], rollouts: Sequence[float], asked: Any = None
) -> Outcome | None:
    """Return the success before and after training, in evaluations if there are any.

    Otherwise it is the success in training episodes: `rollouts` has the share of successful ones in
    each step. `asked` is the value of the option `eval.tasks`. None if there are no evaluations and
    fewer than two steps.
    """
    if not evaluations:
        return _of_rollouts(rollouts)
    first, last = evaluations[0], evaluations[-1]
    tasks = f"{last.tasks} held-out tasks" if last.tasks else "held-out tasks"
    if last.tasks and isinstance(asked, int) and last.tasks < asked:
        tasks += f" (fewer than eval.tasks = {asked})"
    if first.tasks != last.tasks and first.tasks and last.tasks:
        tasks = f"{first.tasks} and {tasks}"
    if first is last:
        return Outcome(
            [(last.share, last.about)], f"success on {tasks} {last.when}, one evaluation"
        )
    note = f"success on {tasks}, {first.when} and {last.when}"
    shares = [(each.share, each.about) for each in (first, last)]
    return Outcome(shares, note, improved(evaluations))


def _of_rollouts(rollouts: Sequence[float]) -> Outcome | None:
    if len(rollouts) < 2:
        return None
    few = max(1, min(5, len(rollouts) // 2))
    first, last = (sum(values) / few for values in (rollouts[:few], rollouts[-few:]))
    note = f"rollout success, mean of the first and of the last {few} steps (no evaluation)"
    return Outcome([(percent(first, 1), ""), (percent(last, 1), "")], note, last > first)


def remarks(evaluations: Sequence[HeldOut], changes: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return sentences about evaluations that failed, and about resumes with another data set of
    tasks.

    `changes` are the events of such resumes in the run's log.
    """
    failed = [f"The evaluation {each.when} failed." for each in evaluations if each.success is None]
    changed = [
        f"After step {int(number(event.get('step')) or 0)}, {str(event.get('text'))[:1000]}. "
        "Held-out shares before and after that differ in their tasks."
        for event in changes
    ]
    return [*failed, *changed]
