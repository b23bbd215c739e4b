"""`tool_bonus`: a bonus for tool calls in successful episodes.

A success gets min(`most`, `base` + `per_call` * n) more, where n is the number of its tool calls.
A failure gets nothing, so calls without success do not pay. From AgentMath.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unstale.config.checks import ConfigError, NonNegative, Positive, Section
from unstale.config.techniques import Entry
from unstale.records import Group, Trajectory
from unstale.research.techniques.facts import RequiredFact
from unstale.research.techniques.rewards import add_reward
from unstale.techniques.hooks import CreditContext


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolBonusConfig(Section):
    """A bonus for tool calls in successful episodes (AgentMath)."""

    base: NonNegative = 0.0
    """Bonus of a successful episode without a tool call."""
    per_call: NonNegative = 0.05
    """Bonus for each tool call of a successful episode."""
    most: Positive = 0.2
    """Largest bonus of an episode."""
    calls: str = "tool_calls"
    """Name of the environment's fact (a reported number) with the number of tool calls."""

    def check_combination(self) -> None:
        if not self.base + self.per_call:
            raise ConfigError("tool_bonus.base or tool_bonus.per_call must be > 0, got 0 and 0")


class ToolBonus:
    """A technique that raises the reward of successful episodes with tool calls."""

    def __init__(self, options: ToolBonusConfig) -> None:
        self._options = options
        self._calls = RequiredFact(options.calls, option="tool_bonus.calls")

    def reward(self, groups: Sequence[Group], context: CreditContext) -> Sequence[Group]:
        self._calls.require(groups, context)
        return add_reward(groups, "tool_bonus", self._bonus, context)

    def _bonus(self, item: Trajectory) -> float:
        options = self._options
        if not item.success:
            return 0.0
        calls = item.facts.get(options.calls, 0.0)
        return min(options.most, options.base + options.per_call * calls)


def _describe(options: ToolBonusConfig) -> str:
    return (
        f"a success gets {options.base:g} and {options.per_call:g} per tool call more, at most "
        f"{options.most:g}"
    )


_MEASURED = """
A policy answers without tools (right with probability 0.5) or with 2 calls (0.6), and chooses tools
with probability 0.12 at first. After 30 steps with 2 groups of 8 it is 0.72, and 0.46 without the
bonus (24 seeds). If tools do not help, the bonus raises their use all the same: from 0.50 to 0.81
in 40 steps, and to 0.57 without it. It has not been measured on the desks.
"""

ENTRY = Entry(
    name="tool_bonus",
    slot="reward",
    rows=(47,),
    makes=ToolBonus,
    options=ToolBonusConfig,
    changes=frozenset({"reward"}),
    describe=_describe,
    by_group=lambda options: True,
    use="A policy answers without its tools, though they would help, and hardly tries them.",
    measured=_MEASURED,
    exactness="The objective is the reward with the bonus, so a policy may call tools without "
    "need, up to `most`. D and S do not change. Our own reading: the defaults of all "
    "three numbers.",
    evidence="notes",
)
