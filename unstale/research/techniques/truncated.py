"""`truncated`: an episode that a limit cut off does not count as a failure.

An episode is cut off if it reached the limit of turns or of tokens, or if the limit of a reply
ended its last reply. A successful episode never counts as cut off.

`mask`: cut-off episodes are not trained on, and do not count in the baseline of their group.
`reward`: a cut-off episode gets the mean reward of the episodes of its group that ended by
themselves, minus `penalty`. In a group without such episodes, `mask` applies.

From RAVL, where an artificial end of an episode has no value of its own; DAPO (arXiv 2503.14476,
section 3.4) masks too long samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar, Literal

from unstale.config.checks import ConfigError, NonNegative, Section
from unstale.config.techniques import Entry
from unstale.records import CUT_OFF, Group, Trajectory
from unstale.techniques.hooks import CreditContext

if TYPE_CHECKING:
    from unstale.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedConfig(Section):
    """An episode that a limit cut off does not count as a failure (RAVL)."""

    selector: ClassVar[str] = "rule"
    read_by: ClassVar[Mapping[str, Sequence[str]]] = {"penalty": ("reward",)}

    rule: Literal["mask", "reward"] = "mask"
    """`mask` leaves cut-off episodes out, and `reward` gives them the mean reward of the others."""
    penalty: NonNegative = 0.0
    """Only for `reward`: amount by which the reward of a cut-off episode is below the mean of the
    others.
    """


class Truncated:
    """A technique that leaves out episodes that a limit cut off, or changes their reward."""

    def __init__(self, options: TruncatedConfig) -> None:
        self._options = options

    def select(self, groups: Sequence[Group], context: CreditContext) -> Sequence[Group]:
        """Return the groups without cut-off episodes, or with other rewards for these episodes, as
        the option `rule` demands.
        """
        selected = []
        finished = num_cut = 0
        for group in groups:
            items = group.trajectories
            cut = [is_cut(item) for item in items]
            ended = [item for item, short in zip(items, cut, strict=True) if not short]
            finished += len(items)
            num_cut += sum(cut)
            if self._options.rule == "reward" and ended:
                penalty = self._options.penalty
                kept = tuple(
                    _graded(item, ended, penalty) if short else item
                    for item, short in zip(items, cut, strict=True)
                )
                selected.append(replace(group, trajectories=kept))
                continue
            left_out = [item for item, short in zip(items, cut, strict=True) if short]
            selected.append(
                replace(group, trajectories=tuple(ended), unused=(*group.unused, *left_out))
            )
        context.metrics["truncated/share"] = num_cut / finished if finished else 0.0
        return selected


def is_cut(item: Trajectory) -> bool:
    """Return True for an unsuccessful episode that a limit ended, or whose last
    reply a limit cut.
    """
    return item.stop in CUT_OFF and not item.success


def _graded(item: Trajectory, ended: Sequence[Trajectory], penalty: float) -> Trajectory:
    """Return a cut-off episode whose reward is the mean reward of the episodes `ended`, minus
    `penalty`.

    It does not count as a success.
    """
    names = dict.fromkeys(name for each in ended for name in each.rewards)
    rewards = {name: fmean(each.rewards.get(name, 0.0) for each in ended) for name in names}
    if penalty:
        rewards["truncated"] = -penalty
    facts = {
        name: fmean(each.facts.get(name, 0.0) for each in ended)
        for name in dict.fromkeys(name for each in ended for name in each.facts)
        if name.startswith("reward/")
    }
    return item.with_rewards(rewards, {**facts, "success": 0.0})


def _describe(options: TruncatedConfig) -> str:
    if options.rule == "mask":
        return "episodes that a limit cut off are not trained on, nor counted in a baseline"
    less = f" minus {options.penalty:g}" if options.penalty else ""
    return f"an episode that a limit cut off gets the mean reward of its siblings{less}"


def _check(options: TruncatedConfig, config: RunConfig) -> None:
    size = config.schedule.group_size
    if options.rule == "reward" and size < 2:
        raise ConfigError(
            f"truncated.rule = reward needs schedule.group_size >= 2, got {size}: it takes the "
            "mean of siblings. Set truncated.rule mask"
        )


_MEASURED = """
A policy chooses short or long answers, which are right equally often, but half of the long ones
reach the limit. 24 seeds, 20 steps with 2 groups of 8; the share of long answers begins at 0.50:

| no technique | `mask` | `reward` | `reward` with `penalty` 0.3 |
|---|---|---|---|
| 0.05 | 0.47 | 0.48 | 0.10 |

It has not been measured on the desks.
"""

ENTRY = Entry(
    name="truncated",
    slot="filter",
    rows=(17, 59),
    makes=Truncated,
    options=TruncatedConfig,
    changes=frozenset({"groups", "reward"}),
    describe=_describe,
    use="Limits of turns or tokens cut off episodes that might have succeeded "
    "(`completion/truncated_share`), and shorter episodes are not the aim.",
    measured=_MEASURED,
    exactness="The objective is the reward given that no limit is reached: nothing holds episodes "
    "back from the limit, except `penalty`. D and S do not change. Our own reading: the mean of "
    "siblings as the value at the cut, and the penalty. RAVL itself learns values in a model of "
    "the environment, which no run here has.",
    evidence="own reading",
    check=_check,
)
