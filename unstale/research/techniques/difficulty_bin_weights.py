"""`difficulty_bin_weights`: larger advantages in the bins of tasks with the highest loss.

Tasks are in bins by the share of their last groups that had a success. L_b, the loss of bin b in a
batch, is 1 minus the mean reward of the bin's tasks. After each batch with tasks of the bin, its
moving average becomes S_b = (1 - beta) S_b + beta L_b. The advantages of a task are multiplied by
min(omega, max_weight), omega = exp(eta clip(S_b, -limit, limit)). A new task has the factor 1. With
`by_share`, L_b is divided by the bin's share of the batch. From Prompt-GDRO, where the loss is that
of the objective.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import Any

from unstale.config.checks import NonNegative, Positive, Section, Share
from unstale.config.techniques import Entry
from unstale.records import Group, ScoredTrajectory
from unstale.research.techniques.difficulty import FIXED_BINS, BinOptions, Bins
from unstale.techniques.hooks import CreditContext, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class DifficultyBinWeightsConfig(Section, BinOptions):
    """Larger advantages in the bins of tasks with the highest loss (Prompt-GDRO)."""

    eta: NonNegative = 1.0
    """Coefficient eta of S_b, the average loss of a bin, in the bin's weight exp(eta S_b)."""
    beta: Share = 0.1
    """Weight of the newest batch in the moving average of a bin's loss."""
    limit: Positive = 2.0
    """Largest absolute value of S_b, the average loss of a bin, in the bin's
    weight exp(eta S_b).
    """
    max_weight: Positive = 4.0
    """Largest weight of a bin, by which the advantages of its tasks are multiplied."""
    by_share: bool = False
    """Divide the loss of a bin by its share of the batch, so that rare bins get larger weights."""
    min_share: Share = 0.05
    """Smallest share by which `by_share` divides."""


class DifficultyBinWeights:
    """A technique that multiplies the advantages of each task by the weight of the task's bin."""

    def __init__(self, options: DifficultyBinWeightsConfig) -> None:
        self._options = options
        self._bins = Bins(options)
        self._losses: dict[int, float] = {}

    def weight(self, task: str) -> float:
        """Return the factor of a task's advantages. It is 1 for a task without a bin."""
        options, number = self._options, self._bins.find(task)
        if number is None:
            return 1.0
        loss = self._losses.get(number, 0.0)
        clipped = min(max(loss, -options.limit), options.limit)
        return min(exp(options.eta * clipped), options.max_weight)

    def recredit(
        self, groups: Sequence[Group], scored: Sequence[ScoredTrajectory], context: CreditContext
    ) -> list[ScoredTrajectory]:
        weights = [self.weight(context.identify(each.trajectory.task)) for each in scored]
        context.metrics["difficulty_bin_weights/weight_mean"] = sum(weights) / max(1, len(weights))
        return [
            replace(each, advantage=tuple(weight * value for value in each.advantage))
            for each, weight in zip(scored, weights, strict=True)
        ]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        options = self._options
        finished = [each for each in outcomes if each.rewards]
        losses: defaultdict[int, list[float]] = defaultdict(list)
        for outcome in finished:
            number = self._bins.find(outcome.task)
            if number is not None:
                losses[number].append(1 - sum(outcome.rewards) / len(outcome.rewards))
        for number, found in losses.items():
            loss = sum(found) / len(found)
            if options.by_share:
                loss /= max(len(found) / len(finished), options.min_share)
            before = self._losses.get(number, 0.0)
            self._losses[number] = before + options.beta * (loss - before)
        self._bins.observe(finished)

    def state(self) -> Mapping[str, Any]:
        losses = [[number, loss] for number, loss in self._losses.items()]
        return {"bins": self._bins.state(), "losses": losses}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._bins.restore(state["bins"])
        self._losses = {int(number): float(loss) for number, loss in state["losses"]}


def _describe(options: DifficultyBinWeightsConfig) -> str:
    return (
        f"the advantages of a task are multiplied by exp({options.eta:g} S), at most "
        f"{options.max_weight:g}, where S is the average loss of tasks of equal difficulty "
        f"({options.bins} bins)"
    )


_MEASURED = """
24 tasks that share 4 parameters, of which 6 pull the parameters the other way; groups of 8, 6
groups per step, results known a step later, equal sums of weights; success rates after 60 steps, 20
seeds. The standard errors are at most 0.05, and 0.01 for all tasks together in the first three
rows.
`tests/techniques/test_difficulty_bins.py` repeats two rows.

| options | the 6 tasks | the 18 others | all |
|---|---|---|---|
| without | 0.24 | 0.97 | 0.79 |
| defaults | 0.25 | 0.96 | 0.79 |
| `eta` 2, `by_share` | 0.31 | 0.94 | 0.78 |
| `eta` 2, `by_share`, `limit` 5, `max_weight` 20 | 0.48 | 0.81 | 0.73 |

The worst tasks gain, at the cost of the others. With the defaults, hardly anything changes. Tasks
that always fail gain nothing, because their advantages are 0. It has not been measured on the
desks.
"""

ENTRY = Entry(
    name="difficulty_bin_weights",
    slot="recredit",
    rows=(25,),
    makes=DifficultyBinWeights,
    options=DifficultyBinWeightsConfig,
    changes=frozenset({"advantage"}),
    describe=_describe,
    by_group=lambda options: True,
    use="The hardest tasks that are solved at times matter most, and easy ones outweigh them.",
    measured=_MEASURED,
    exactness="The gradient is that of a weighted mean of the tasks' rewards. The weights are from "
    "earlier batches, so none depends on the rewards that it multiplies. D and S do not change. 1 "
    "minus the mean reward as the loss, and the values of all options but `bins`, are our own "
    "reading.",
    requires=frozenset({"pool"}),
    fixed={"bins": FIXED_BINS},
    evidence="paper",
)
