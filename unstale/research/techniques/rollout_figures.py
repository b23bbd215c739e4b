"""`rollout_figures`: figures of reliability, coverage and cost of the episodes of a batch.

These are the three criteria by which the survey GFCR compares the stages of rollouts: generate,
filter, control and replay. Reliability is the share of started episodes that the environment ended,
rather than a limit or an error. Coverage is the share of tasks with at least one success. Cost is
the number of sampled tokens per success, tokens of failed episodes included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unstale.config.checks import Section
from unstale.config.techniques import Entry
from unstale.records import Group
from unstale.techniques.hooks import CreditContext


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFiguresConfig(Section):
    """Figures of reliability, coverage and cost of the episodes of a batch (GFCR)."""


class RolloutFigures:
    """A technique that adds metrics of a batch's episodes and changes nothing."""

    def __init__(self, options: RolloutFiguresConfig) -> None: ...

    def measure(
        self, groups: Sequence[Group], graded: Sequence[Group], context: CreditContext
    ) -> Mapping[str, float]:
        """Return the metrics by name.

        A share is NaN without episodes, and the cost without a success.
        """
        episodes = [each for group in groups for each in group.finished]
        failures = [each for group in groups for each in group.failures]
        started = len(episodes) + len(failures)
        successes = sum(each.success for each in episodes)
        covered = sum(any(each.success for each in group.finished) for group in groups)
        tokens = sum(each.num_sampled_in_all for each in episodes)
        tokens += sum(each.sampled_tokens for each in failures)
        return {
            "rollout_figures/reliability_share": _divide(
                sum(each.stop == "done" for each in episodes), started
            ),
            "rollout_figures/coverage_share": _divide(covered, len(groups)),
            "rollout_figures/tokens_per_success": _divide(tokens, successes),
        }


def _divide(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _describe(options: RolloutFiguresConfig) -> str:
    return "measures reliability, coverage and cost of episodes; it changes nothing"


ENTRY = Entry(
    name="rollout_figures",
    slot="diagnostic",
    rows=(3,),
    makes=RolloutFigures,
    options=RolloutFiguresConfig,
    changes=frozenset(),
    describe=_describe,
    use="To compare samplers, allocators and filters by more than the success at the end.",
    measured="It has no effect to measure.",
    exactness="It changes nothing. The survey names the criteria; how they are measured is our own "
    "reading.",
    evidence="own reading",
)
