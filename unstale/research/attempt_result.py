"""The result of several attempts at each task: success of one, of the chosen one, and of any."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.table import Table

from unstale.cli.grades import EvalResult, TaskMean, mean_over_tasks
from unstale.observe.statistics import PairedDifference, paired_difference
from unstale.research.votes import JudgeRecord

ALPHA = 0.05
"""Probability with which an interval misses the true value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptResult:
    """The success of attempts and of choices among them, by task."""

    attempts: EvalResult
    first: tuple[bool | None, ...]
    """The success of the first attempt at each task, None for a failed episode."""
    chosen: Mapping[str, Sequence[bool | None]]
    """The success of a choice at each task, by the name of the way of choosing."""
    judge: Sequence[JudgeRecord] = ()
    """The record of the judge on each task with right and wrong attempts."""
    unread: float = 0.0
    """Share of the judge's votes that named no attempt."""
    tokens: Mapping[str, int]
    """Numbers of sampled tokens, by what they were sampled for."""

    @property
    def ceiling(self) -> str:
        return f"pass@{self.attempts.attempts}"

    def rows(self) -> dict[str, TaskMean]:
        """Return the success of one attempt, of each choice, and of any attempt, by name."""
        chosen = {
            name: mean_over_tasks([float(each is True) for each in graded])
            for name, graded in self.chosen.items()
        }
        attempts = self.attempts
        return {
            "one attempt": attempts.average,
            **chosen,
            self.ceiling: attempts.passed(attempts.attempts),
        }

    def gain(self, name: str) -> PairedDifference | None:
        """Return the success of a choice minus the mean of all attempts, paired by task.

        A second attempt with a plan is compared with the first. None if no task differs, or there
        is only one task.
        """
        graded = [float(each is True) for each in self.chosen[name]]
        if name == PLANNED:
            base = [float(each is True) for each in self.first]
        else:
            base = [count / self.attempts.attempts for count in self.attempts.successes]
        return paired_difference([one - other for one, other in zip(graded, base, strict=True)])

    def judge_rows(self) -> dict[str, TaskMean]:
        """Return the judge's success in votes and in comparisons, and that of chance, by name."""
        if not self.judge:
            return {}
        return {
            "one vote of the judge": mean_over_tasks([each.votes for each in self.judge]),
            "the judge's comparisons": mean_over_tasks([each.winners for each in self.judge]),
            "a judge at chance": mean_over_tasks([each.chance for each in self.judge]),
        }

    def judge_text(self) -> str:
        """Return a sentence about what the judge's votes are worth. Empty without a judge."""
        if "votes" not in self.tokens:
            return ""
        if not self.judge:
            return "no task had right and wrong attempts to compare: the judge is not measured"
        chance = fmean(each.chance for each in self.judge)
        rows = self.judge_rows()
        unread = f"; {self.unread:.0%} of its votes named no attempt" if self.unread else ""
        if rows["one vote of the judge"].low > chance:
            return f"the judge is better than chance{unread}"
        return f"the judge is not told apart from chance, which gains nothing{unread}"

    def as_json(self) -> dict[str, Any]:
        return {
            "tasks": self.attempts.tasks,
            "attempts": self.attempts.attempts,
            "failed": self.attempts.failed,
            "success": self.rows(),
            "gain": {
                name: {"mean": gain.mean, "interval": gain.interval(ALPHA)}
                for name in self.chosen
                if (gain := self.gain(name))
            },
            "judge": {**self.judge_rows(), "unread_share": self.unread} if self.judge else None,
            "tokens": self.tokens,
        }

    def table(self) -> Table:
        """Return the success rates with their intervals, and what a choice adds to one attempt."""
        table = Table("", "success", "95% interval", "gain", title=str(self.attempts))
        for name, mean in self.rows().items():
            gain = self.gain(name) if name in self.chosen else None
            table.add_row(name, *_cells(mean), _points(gain) if gain else "")
        table.add_section()
        for name, mean in self.judge_rows().items():
            table.add_row(name, *_cells(mean), "")
        return table


PLANNED = "second attempt with a plan"
"""The name of a choice that is compared with the first attempt."""


def _cells(mean: TaskMean) -> tuple[str, str]:
    return f"{mean.value:.1%}", f"{mean.low:.1%} to {mean.high:.1%}"


def _points(gain: PairedDifference) -> str:
    low, high = gain.interval(ALPHA)
    return f"{100 * gain.mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
