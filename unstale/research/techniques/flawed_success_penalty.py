"""`flawed_success_penalty`: a lower reward for successes in which a judge has found an error.

A success gets `penalty` less if the fact that the option `fact` names is at least 0.5. The
environment reports the fact. `unstale.rewards.judge.find_flaw` asks a language model for it, about
successes only. While failures are common, a flawed success still has a reward above its group's
mean, so it is reinforced. When most episodes are clean successes, its reward is below the mean.
From FAPO (arXiv 2510.22543), where a success has reward 1, a failure -1 and a flawed success 0.
With rewards of 0 and 1, the penalty 0.5 gives the same advantages, if they are divided by the
standard deviation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unstale.config.checks import ConfigError, Positive, Section
from unstale.config.techniques import Entry
from unstale.records import Group, Trajectory
from unstale.research.techniques.facts import RequiredFact
from unstale.research.techniques.rewards import add_reward
from unstale.techniques.hooks import CreditContext

FLAWED = 0.5
"""Smallest value of the fact at which a success counts as flawed. A judge may report a probability
as the fact.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlawedSuccessPenaltyConfig(Section):
    """A lower reward for successes in which a judge has found an error (FAPO)."""

    penalty: Positive = 0.5
    """Amount subtracted from the reward of a flawed success. In the paper it is half the difference
    between the rewards of success and failure.
    """
    fact: str = "flaw"
    """Name of the environment's fact (a reported number): 1 for a success with an error, 0 for one
    without.
    """

    def check_combination(self) -> None:
        if not self.fact:
            raise ConfigError(
                "flawed_success_penalty.fact must name a fact of the environment, got ''"
            )


class FlawedSuccessPenalty:
    """A technique that lowers the reward of flawed successes."""

    def __init__(self, options: FlawedSuccessPenaltyConfig) -> None:
        self._options = options
        self._fact = RequiredFact(options.fact, option="flawed_success_penalty.fact")

    def reward(self, groups: Sequence[Group], context: CreditContext) -> Sequence[Group]:
        self._fact.require(groups, context)
        items = [item for group in groups for item in group.trajectories if item.success]
        flawed = sum(self._is_flawed(item) for item in items)
        context.metrics["flawed_success_penalty/success_share"] = (
            flawed / len(items) if items else 0.0
        )
        return add_reward(groups, "flawed_success_penalty", self._term, context)

    def _term(self, item: Trajectory) -> float:
        return -self._options.penalty if self._is_flawed(item) else 0.0

    def _is_flawed(self, item: Trajectory) -> bool:
        return item.success and item.facts.get(self._options.fact, 0.0) >= FLAWED


def _describe(options: FlawedSuccessPenaltyConfig) -> str:
    return (
        f"a success whose fact {options.fact} is at least {FLAWED:g} gets {options.penalty:g} less"
    )


_MEASURED = """
A policy of three answers: a failure (at first 0.70), a flawed success (0.25), a clean one (0.05).
24 seeds, 2 groups of 8 per step, rewards of 0 and 1:

| penalty | success after 5 steps | share of flawed successes after 20 steps |
|---|---|---|
| none | 0.91 | 0.98 |
| 0.5 | 0.87 | 0.09 |
| 1 (a flawed success is a failure) | 0.44 | 0.01 |

So flawed successes are unlearned, and success rises a little later than without the technique. It
has not been measured with a judge.
"""

ENTRY = Entry(
    name="flawed_success_penalty",
    slot="reward",
    rows=(32,),
    makes=FlawedSuccessPenalty,
    options=FlawedSuccessPenaltyConfig,
    changes=frozenset({"reward"}),
    describe=_describe,
    by_group=lambda options: True,
    use="The reward accepts right answers that were reached by wrong steps, and a judge can find "
    "these ([rewards](rewards.md#a-judge)). `flawed_success_penalty/success_share` shows how "
    "many there are.",
    measured=_MEASURED,
    exactness="The objective is the reward with the penalty: its optimum has clean successes. D "
    "and S do not change. The judge's errors become errors of the reward.",
)
