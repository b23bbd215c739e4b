"""`proxy`: figures of the trained reward beside a corrected score of the same episodes.

The trained reward is often a stand-in for what counts, such as a judge's grade for success. The
score measures what counts. The metrics are the means of both, and two shares of the pairs of
episodes of a group with different rewards: those with scores in the reverse order, from which the
policy learns the wrong thing, and those with equal scores, from which it only learns to get reward.
The trained reward includes the terms of techniques (`flawed_success_penalty`, `tool_bonus`), but
not the mean that `truncated.rule` = reward gives to cut-off episodes. From GDRO (group-level direct
reward optimization of diffusion models), which reports reward and corrected score together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from unstale.config.checks import ConfigError, Section
from unstale.config.techniques import Entry
from unstale.records import ENDED_BY_ENVIRONMENT, ROUNDED, Group, Trajectory
from unstale.research.techniques.facts import Seen
from unstale.techniques.hooks import CreditContext


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig(Section):
    """Figures of the trained reward beside a corrected score of the same episodes."""

    score: str = "success"
    """The corrected score: name of a fact or reward that the environment reports. With `success`
    the score is 1 or 0, and 0 for an episode that a limit ended.
    """

    def check_combination(self) -> None:
        if not self.score:
            raise ConfigError("proxy.score must name a fact or a reward, such as success")


class Proxy:
    """A technique that compares the trained reward with a corrected score, as metrics."""

    def __init__(self, options: ProxyConfig) -> None:
        self._name = options.score
        self._seen = Seen()

    def measure(
        self, groups: Sequence[Group], graded: Sequence[Group], context: CreditContext
    ) -> Mapping[str, float]:
        """Return metrics of the episodes that have the corrected score (`proxy.score`).

        They are NaN if no episode has it. Raises `ConfigError` if a whole batch of episodes lacks
        the score, though their environment ended them, and no earlier episode of the run had it.
        """
        ended = [
            each for group in groups for each in group.finished if each.stop in ENDED_BY_ENVIRONMENT
        ]
        has_score = any(self._score(each) is not None for each in ended)
        counts = bool(ended) and context.whole
        seen = self._seen.update(has_score, counts=counts, progress=context.progress)
        if counts and not seen:
            names = sorted({name for each in ended for name in (*each.facts, *each.rewards)})
            raise ConfigError(
                f"proxy.score is {self._name}, and no episode has such a fact or reward; they have "
                f"{', '.join(names) or 'none'}. Set proxy.score to one of them"
            )
        rows = [self._rows(*both) for both in zip(groups, graded, strict=True)]
        known = [row for each in rows for row in each]
        pairs = [order for each in rows for order in _orders(each)]
        return {
            "proxy/reward_mean": _mean([reward for reward, _ in known]),
            "proxy/score_mean": _mean([score for _, score in known]),
            "proxy/reversed_share": _mean([order < 0 for order in pairs]),
            "proxy/equal_score_share": _mean([order == 0 for order in pairs]),
        }

    def _rows(self, group: Group, graded: Group) -> list[tuple[float, float]]:
        """Return trained reward and corrected score of each episode of a group
        that has the score.
        """
        return [
            (trained.reward, score)
            for each, trained in zip(group.finished, graded.finished, strict=True)
            if (score := self._score(each)) is not None
        ]

    def _score(self, episode: Trajectory) -> float | None:
        score = episode.facts.get(self._name, episode.rewards.get(self._name))
        if self._name != "success":
            return score
        if score is None:
            return None if episode.stop in ENDED_BY_ENVIRONMENT else 0.0
        return float(score >= 1 - ROUNDED)


def _orders(rows: Sequence[tuple[float, float]]) -> list[float]:
    """Return a score difference for each pair of episodes with different rewards.

    It is the score of the episode with the higher reward minus that of the other. `rows` has reward
    and score of each episode.
    """
    return [
        (ours - theirs) * (1 if reward > other else -1)
        for (reward, ours), (other, theirs) in combinations(rows, 2)
        if reward != other
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
