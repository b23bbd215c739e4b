"""Bins of tasks by difficulty, for the techniques of Group-DRO (`bin_sizes`,
`difficulty_bin_weights`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from unstale.config.checks import PositiveInt, Range, Share
from unstale.research.techniques.success import SuccessThreshold
from unstale.techniques.hooks import Outcome

FIXED_BINS = "the checkpoint has the bin of each task"
"""Reason why a resumed run cannot change the number of bins, for error messages."""


@dataclass(frozen=True, kw_only=True)
class BinOptions(SuccessThreshold):
    """Options of techniques that sort tasks into bins by difficulty."""

    __slots__ = ()

    bins: Annotated[int, Range(2, 100)] = 10
    """Number of bins of equal width. The first one has the hardest tasks."""
    visits: PositiveInt = 10
    """Number of last groups of a task from which its difficulty is computed."""
    margin: Share = 0.02
    """A task moves to another bin only if its share of solved groups lies outside its bin by more
    than this.
    """


@dataclass(slots=True)
class _Task:
    bin: int
    solved: list[int] = field(default_factory=list)
    """For each of the last groups of the task: 1 if it had a success, otherwise 0."""


class Bins:
    """The bin of each task, by the share of its last groups with at least one success."""

    def __init__(self, options: BinOptions) -> None:
        """Create bins without tasks."""
        self._num = options.bins
        self._visits = options.visits
        self._margin = options.margin
        self._success_at = options.success_at
        self._tasks: dict[str, _Task] = {}

    def find(self, task: str) -> int | None:
        """Return the bin of a task, from 0. None if no group of it was observed."""
        found = self._tasks.get(task)
        return None if found is None else found.bin

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Update the bins with the groups of a batch. Groups without a finished episode are
        ignored.
        """
        for outcome in outcomes:
            if not outcome.rewards:
                continue
            solved = int(max(outcome.rewards) >= self._success_at)
            task = self._tasks.get(outcome.task)
            if task is None:
                task = self._tasks[outcome.task] = _Task(self._bin_of(solved))
            task.solved = [*task.solved, solved][-self._visits :]
            share = sum(task.solved) / len(task.solved)
            low, high = (border / self._num for border in (task.bin, task.bin + 1))
            if not low - self._margin <= share < high + self._margin:
                task.bin = self._bin_of(share)

    def _bin_of(self, share: float) -> int:
        # A share such as 3 / 10 may be just below the border 0.3 as a float.
        return min(int(share * self._num + 1e-9), self._num - 1)

    def state(self) -> dict[str, Any]:
        return {name: [each.bin, list(each.solved)] for name, each in self._tasks.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._tasks = {
            name: _Task(int(number), [int(each) for each in solved])
            for name, (number, solved) in state.items()
        }


def spread_of(rewards: Sequence[float]) -> float:
    """Return the unbiased variance of rewards; 0 for a single reward."""
    if len(rewards) < 2:
        return 0.0
    mean = sum(rewards) / len(rewards)
    return sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)
