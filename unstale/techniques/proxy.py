"""`proxy`: figures of the trained reward beside a corrected score of the same episodes.

The trained reward is often a stand-in for what counts, such as a judge's grade for success. The
figures are the means of both, and two shares of the pairs of siblings with different rewards: those
with scores in the reverse order, and those with equal scores. Such pairs teach the wrong thing, or
only the reward. From GDRO (group-level direct reward optimization of diffusion models), which
reports reward and corrected score together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from unstale.config.checks import ConfigError, Section
from unstale.config.techniques import Entry
from unstale.records import Group, Trajectory
from unstale.techniques import CreditContext


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig(Section):
    """Figures of the trained reward beside a corrected score of the same episodes."""

    score: str = "success"
    """The corrected score: `success`, or the name of a fact or reward that the environment gives.
    """

    def check_combination(self) -> None:
        if not self.score:
            raise ConfigError("proxy.score must name a fact or a reward, such as success")


class Proxy:
    """A diagnostic of the groups of a batch."""

    def __init__(self, options: ProxyConfig) -> None:
        self._name = options.score

    def measure(self, groups: Sequence[Group], context: CreditContext) -> Mapping[str, float]:
        """Return the figures of the episodes that have the score. A mean of nothing is NaN.

        Raises `ConfigError` if episodes came to their end, and none of them has the score.
        """
        episodes = [each for group in groups for each in group.finished]
        ended = [each for each in episodes if each.stop == "done"]
        if ended and all(self._score(each) is None for each in ended):
            names = sorted({name for each in ended for name in (*each.facts, *each.rewards)})
            raise ConfigError(
                f"proxy.score is {self._name}, and no episode has such a fact or reward; they have "
                f"{', '.join(names) or 'none'}"
            )
        known = [
            (each.reward, score) for each in episodes if (score := self._score(each)) is not None
        ]
        pairs = [pair for group in groups for pair in self._pairs(group)]
        return {
            "proxy/reward_mean": _mean([reward for reward, _ in known]),
            "proxy/score_mean": _mean([score for _, score in known]),
            "proxy/reversed_share": _mean([order < 0 for order in pairs]),
            "proxy/equal_score_share": _mean([order == 0 for order in pairs]),
        }

    def _score(self, episode: Trajectory) -> float | None:
        if self._name == "success":
            return float(episode.success)
        return episode.facts.get(self._name, episode.rewards.get(self._name))

    def _pairs(self, group: Group) -> list[float]:
        """Return the difference of the scores of each pair, in the order of its rewards."""
        scored = [(each.reward, self._score(each)) for each in group.finished]
        return [
            (ours - theirs) * (1 if reward > other else -1)
            for (reward, ours), (other, theirs) in combinations(scored, 2)
            if reward != other and ours is not None and theirs is not None
        ]


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def _describe(options: ProxyConfig) -> str:
    return f"measures the reward beside the score `{options.score}`; it changes nothing"


_MEASURED = """
A softmax over 10 arms whose rewards are their scores, except that one arm of score 0 has the reward
2; groups of 8, 24 seeds, 60 steps. The reward rises from 0.53 to 1.98 and the score falls from 0.47
to 0.01; the reversed share rises from 6% to 100%. It has not been measured on the desks, whose
reward is the success itself.
"""

ENTRY = Entry(
    name="proxy",
    slot="diagnostic",
    rows=(52,),
    makes=Proxy,
    options=ProxyConfig,
    changes=frozenset(),
    describe=_describe,
    use="The reward is a judge's grade, a sum with bonuses, or anything else than the success.",
    measured=_MEASURED,
    exactness="It changes nothing. The source is about images; the two shares of pairs are our own "
    "reading.",
    evidence="abstract",
)
