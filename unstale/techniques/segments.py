"""`segments`: long episodes run in segments, and their limits grow if they cut off too many.

At most `max_concurrent_episodes` episodes run at the same time. A segment of an episode ends after
`tokens` sampled tokens or `calls` tool calls, even within a reply. Then, if other episodes wait,
the oldest of them gets the slot of this episode, even if it is younger. The interrupted episode
continues when a slot is free and no older episode waits. It keeps its environment and its tokens.
Later tokens may have a newer version, and each token keeps its own `behavior_logp`. The staleness
bound holds, because a group's staleness is counted from its admission.

So a long episode does not hold its slot until its end. This costs time if groups are trained on in
strict order: episodes of the oldest groups, which the next batch needs, wait while younger ones
run. It pays only with a `schedule.lookahead_window`, in which finished younger groups are trained
on first. In strict order, set `tokens` above the length of most episodes.

`table` has steps of limits for an episode: tokens of its context, tool calls, segments. An episode
that reaches one of the three is cut off. Groups begin with the limits of the first step. When more
than `cut_share` of `window` episodes with the present limits were cut off, later groups have those
of the next step. By default, a segment has a quarter of the tokens and the tool calls of the run's
longest episode, and the steps allow 2, 3 and 4 segments. These are the shares of AgentMath. With
`engine.max_context` 96000 and `rollout.max_turns` 97, the numbers are also those of AgentMath:
`48000:48:2 72000:72:3 96000:96:4`. AgentMath's bonus for tool calls is the technique `tool_bonus`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from unstale.config.checks import ConfigError, Count, PositiveInt, Section, Share
from unstale.config.techniques import Entry
from unstale.records import EpisodeBudget
from unstale.techniques.hooks import Outcome

if TYPE_CHECKING:
    from unstale.config import RunConfig

_FORM = "CONTEXT:CALLS:SEGMENTS for each step, such as '4096:12:2 8192:24:4'"
_MOST_SEGMENTS = 4
"""Number of segments of the longest episode of a default table, from AgentMath."""


class Step(NamedTuple):
    """The limits of an episode in one step of the table: context tokens, tool calls, segments."""

    context: int
    calls: int
    segments: int


def parse_table(text: str) -> tuple[Step, ...]:
    """Return the steps of a table of limits. Raises `ConfigError` if the text is not such a table.

    >>> parse_table("100:4:2 200:8:2")
    (Step(context=100, calls=4, segments=2), Step(context=200, calls=8, segments=2))
    """
    try:
        steps = tuple(Step(*map(int, word.split(":"))) for word in text.split())
    except (ValueError, TypeError):
        steps = ()
    if not steps or min(map(min, steps)) < 1:
        raise ConfigError(f"segments.table must be {_FORM}, got {text!r}")
    for before, after in pairwise(steps):
        smaller = any(new < old for old, new in zip(before, after, strict=True))
        if smaller or before == after:
            raise ConfigError(
                "segments.table must have larger limits in each step, and no smaller one, got "
                f"{':'.join(map(str, after))} after {':'.join(map(str, before))}"
            )
    return steps


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentsConfig(Section):
    """Long episodes run in segments, with limits that grow (AgentMath)."""

    max_concurrent_episodes: Count = 0
    """Largest number of episodes that run at the same time, on all engines together. Take the
    number of replies that the engines sample at the same time, or more if tools are slow. 0 is half
    of the episodes that may be in flight, with groups of `schedule.group_size`.
    """
    tokens: Count = 0
    """Number of sampled tokens after which a segment ends; 0 is a quarter of
    `engine.max_context`.
    """
    calls: Count = 0
    """Number of tool calls after which a segment ends; 0 is a quarter of `rollout.max_turns`."""
    table: str = ""
    """Limits of an episode, as CONTEXT:CALLS:SEGMENTS for each step: tokens of its context, tool
    calls, and segments. Empty allows 2, 3 and 4 quarters of `engine.max_context` and of
    `rollout.max_turns`, in as many segments.
    """
    cut_share: Share = 0.1
    """If more than this share of the episodes was cut off, the next step of the table begins."""
    window: PositiveInt = 256
    """Number of episodes over which the share of cut-off episodes is measured."""

    def check_combination(self) -> None:
        if self.table:
            parse_table(self.table)

    def within(self, *, context: int, calls: int, episodes: int) -> SegmentsConfig:
        """Return the options, with computed values in place of 0 or an empty text.

        `context` and `calls` are the largest numbers of tokens and tool calls of an episode in the
        run. `episodes` is the largest number of episodes in flight.

        >>> SegmentsConfig().within(context=1024, calls=9, episodes=96).table
        '512:4:2 768:6:3 1024:9:4'
        """

        def part(whole: int, quarters: int) -> int:
            return max(1, whole * quarters // _MOST_SEGMENTS)

        steps = range(2, _MOST_SEGMENTS + 1)
        table = " ".join(f"{part(context, n)}:{part(calls, n)}:{n}" for n in steps)
        return replace(
            self,
            max_concurrent_episodes=self.max_concurrent_episodes or max(1, episodes // 2),
            tokens=self.tokens or part(context, 1),
            calls=self.calls or part(calls, 1),
            table=self.table or table,
        )


class Segments:
    """A technique that runs episodes in segments, and raises limits that cut off too many."""

    def __init__(self, options: SegmentsConfig) -> None:
        """Create the technique. No option may be 0 or empty: `complete` replaces these values."""
        self._options = options
        self._table = parse_table(options.table)
        self.max_concurrent_episodes = options.max_concurrent_episodes
        self._step = 0
        self._episodes = 0
        """Number of episodes under the present limits since the last decision about them."""
        self._cut_off = 0

    def episode_budget(self) -> EpisodeBudget:
        context, calls, segments = self._table[self._step]
        return EpisodeBudget(
            context=context,
            calls=calls,
            segments=segments,
            segment_tokens=self._options.tokens,
            segment_calls=self._options.calls,
        )

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Count the episodes that were cut off. If they are too many, begin the next step of the
        table.
        """
        options = self._options
        for outcome in outcomes:
            budget = outcome.budget
            if Step(budget.context, budget.calls, budget.segments) != self._table[self._step]:
                continue  # the group began before the present step
            self._episodes += len(outcome.rewards)
            self._cut_off += outcome.cut_off
            if self._episodes < options.window:
                continue
            is_last = self._step + 1 == len(self._table)
            if not is_last and self._cut_off > options.cut_share * self._episodes:
                self._step += 1
            self._episodes = self._cut_off = 0

    def state(self) -> Mapping[str, Any]:
        return {"step": self._step, "episodes": self._episodes, "cut_off": self._cut_off}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._step = min(state["step"], len(self._table) - 1)  # a resumed run may have fewer steps
        self._episodes = state["episodes"]
        self._cut_off = state["cut_off"]


def _describe(options: SegmentsConfig) -> str:
    steps = parse_table(options.table)
    limits = [
        f"{each.context} tokens, {each.calls} tool calls or {each.segments} segments"
        for each in (steps[0], steps[-1])
    ]
    grown = ""
    if len(steps) > 1:
        grown = (
            f", and at last {limits[1]} if more than {options.cut_share:.0%} of {options.window} "
            "episodes are cut off"
        )
    return (
        f"at most {options.max_concurrent_episodes} episodes run at the same time, "
        f"{options.tokens} sampled tokens or {options.calls} tool calls at a time; then the oldest "
        f"waiting one continues. An episode has at most {limits[0]}{grown}"
    )


def complete(options: SegmentsConfig, config: RunConfig) -> SegmentsConfig:
    """Return the options, with values from the configuration in place of 0 or an empty text."""
    schedule = config.schedule
    in_flight = (schedule.max_staleness + 1) * schedule.groups_per_step * schedule.group_size
    return options.within(
        context=config.engine.max_context, calls=config.rollout.max_turns - 1, episodes=in_flight
    )


def _check(options: SegmentsConfig, config: RunConfig) -> None:
    if not options.table:
        return
    last = parse_table(options.table)[-1]
    if last.context > config.engine.max_context:
        raise ConfigError(
            f"segments.table must not have more than {config.engine.max_context} tokens "
            f"(engine.max_context), got {last.context}. Set --segments.table to {_FORM}, or a "
            "larger --engine.max_context"
        )
    if last.calls >= config.rollout.max_turns:
        raise ConfigError(
            f"segments.table must have fewer tool calls than {config.rollout.max_turns} "
            f"(rollout.max_turns), got {last.calls}: otherwise rollout.max_turns cuts episodes "
            f"off first. Set --segments.table to {_FORM}, or a larger --rollout.max_turns"
        )


_MEASURED = """
Tests show that the limits grow by the table and that every episode continues
(`tests/techniques/test_segments.py`, `tests/rollout/test_episode_slots.py`). A gain is not shown,
neither in time nor in success.
"""

ENTRY = Entry(
    name="segments",
    slot="limiter",
    rows=(47,),
    makes=Segments,
    options=SegmentsConfig,
    changes=frozenset({"turns"}),
    describe=_describe,
    check=_check,
    complete=complete,
    use="Episodes are long and of very different lengths, and more of them are in flight than the "
    "engines sample at the same time. Or the best limit of their length is not known.",
    measured=_MEASURED,
    exactness="The order in which episodes run changes, and not what they are trained with: tokens "
    "keep their version and `behavior_logp`. Episodes that a limit cuts off have no reward, so the "
    "objective prefers short ones until the limits have grown. Our own reading: the order by the "
    "age of groups, that limits of calls count all calls of a reply, `window`, and that limits "
    "never fall.",
    evidence="notes",
)
