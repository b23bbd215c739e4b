"""The result of several attempts at each task: the success of one, of the chosen, and of any."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.table import Table

from unstale.cli.grades import EvalResult, TaskMean, mean_over_tasks
from unstale.observe.statistics import PairedDifference, paired_difference
from unstale.research.votes import JudgeRecord

ALPHA = 0.05
"""Probability that a confidence interval does not contain the true success rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptResult:
    """The success of attempts, and of different ways to choose among them."""

    attempts: EvalResult
    first: tuple[bool | None, ...]
    """Success of the first attempt at each task; None if its episode failed."""
    chosen: Mapping[str, Sequence[bool | None]]
    """For each way of choosing, by name: the success of the chosen attempt at each
    task, or None.
    """
    populations: Mapping[str, EvalResult]
    """The attempts of each later population (PDR), by its name."""
    judge: Sequence[JudgeRecord] = ()
    """The judge's accuracy on each task that has both right and wrong attempts in the first
    population.
    """
    unread: float = 0.0
    """Share of the judge's votes on the first population from which no choice could be read."""
    tokens: Mapping[str, int]
    """Numbers of sampled tokens by purpose."""

    @property
    def ceiling(self) -> str:
        return f"pass@{self.attempts.attempts}"

    def rows(self) -> dict[str, TaskMean]:
        """Return mean successes by name: of one attempt, of each way of choosing, and of any
        attempt. Then those of one and of any attempt of each later population.
        """
        chosen = {
            name: mean_over_tasks([float(each is True) for each in graded])
            for name, graded in self.chosen.items()
        }
        attempts = self.attempts
        return {
            "one attempt": attempts.average,
            **chosen,
            self.ceiling: attempts.passed(attempts.attempts),
            **{f"one attempt, {name}": each.average for name, each in self.populations.items()},
            **{
                f"{self.ceiling}, {name}": each.passed(each.attempts)
                for name, each in self.populations.items()
            },
        }

    def gain(self, name: str) -> PairedDifference | None:
        """Return the success of the way of choosing `name` minus that of one attempt, paired by
        task.

        One attempt is the mean of all, except for a second attempt with a plan, which is compared
        with the first. None if no task differs or there is only one task.
        """
        graded = [float(each is True) for each in self.chosen[name]]
        if name == PLANNED:
            base = [float(each is True) for each in self.first]
        else:
            base = [count / self.attempts.attempts for count in self.attempts.successes]
        return paired_difference([one - other for one, other in zip(graded, base, strict=True)])

    def judge_rows(self) -> dict[str, TaskMean]:
        """Return the judge's accuracy by name: in votes, in comparisons, and that of random
        choice.
        """
        if not self.judge:
            return {}
        return {
            "one vote of the judge": mean_over_tasks([each.votes for each in self.judge]),
            "the judge's comparisons": mean_over_tasks([each.winners for each in self.judge]),
            "a judge at chance": mean_over_tasks([each.chance for each in self.judge]),
        }

    def judge_text(self) -> str:
        """Return a sentence about the accuracy of the judge. Empty if there was no judge."""
        if "votes" not in self.tokens and not self.judge:
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
        """Return a table of success rates with confidence intervals, and of the gain of each
        choice.

        The gain is the difference from one attempt.
        """
        table = Table("", "success", "95% interval", "gain", title=str(self.attempts))
        for name, mean in self.rows().items():
            gain = self.gain(name) if name in self.chosen else None
            table.add_row(name, *_cells(mean), _points(gain) if gain else "")
        table.add_section()
        for name, mean in self.judge_rows().items():
            table.add_row(name, *_cells(mean), "")
        return table


PLANNED = "second attempt with a plan"
"""The name of the second attempt with a plan, which is compared with the first attempt."""


def _cells(mean: TaskMean) -> tuple[str, str]:
    return f"{mean.value:.1%}", f"{mean.low:.1%} to {mean.high:.1%}"


def _points(gain: PairedDifference) -> str:
    low, high = gain.interval(ALPHA)
    return f"{100 * gain.mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
