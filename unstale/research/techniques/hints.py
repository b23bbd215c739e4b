"""`hints`: the start of a solution as the start of some replies, the longer the harder the task.

A group begins with episodes without hints. Their mean reward is 1 - D, where D is the difficulty of
the task. Then `number` episodes follow whose first reply begins with the share w of a solution:

w = `shortest` + (`longest` - `shortest`) D, times a random number from 1 - `noise` to 1.

A hint is FORCED text, which no policy sampled. It is trained on where its episode has an advantage
above 0, and has no loss elsewhere. The baseline of an episode is the mean reward of the group
(`joint`), or of either its episodes with a hint or those without, whichever it belongs to
(`apart`). With `gap`, positive advantages of episodes without a hint and negative ones of those
with a hint are multiplied by 1 + D - D', where 1 - D' is the mean reward with hints. So the more
hints help, the more a success without one and a failure with one count. From ADHint;
`hint_entropy_weights` has its weights by entropy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from unstale.config.checks import ConfigError, Count, Section, Share
from unstale.config.techniques import Entry, refuse_slots, require_value
from unstale.records import (
    Failure,
    Fork,
    Group,
    Placed,
    Provenance,
    ScoredTrajectory,
    Trajectory,
    is_reply,
    replies,
    walk,
)
from unstale.techniques.hooks import CreditContext, Texts

if TYPE_CHECKING:
    from unstale.config import RunConfig

REFUSED = {
    "allocator": "which chooses the number of episodes of a group, too",
    "estimator": "which computes the advantages, too",
    "recredit": "which compares turns, and hints begin some of them",
}
"""Reasons why techniques of some slots (kinds of techniques) cannot be used with hints, by slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HintsConfig(Section):
    """Hints at the start of replies, which are longer for harder tasks (ADHint)."""

    number: Count = 0
    """Number of episodes of a group with a hint; 0 is half of `schedule.group_size`."""
    solution: str = ""
    """Field of the task's data with a solution, whose beginning is the hint. Empty takes the first
    reply of the task set's demonstration.
    """
    shortest: Share = 0.0
    """Share of the solution in a hint for a task that is always solved."""
    longest: Share = 0.9
    """Share of the solution in a hint for a task that is never solved."""
    noise: Share = 0.0
    """Largest share of a hint that is cut off at random. With 1, a hint can have every length up to
    its share w of the solution.
    """
    baseline: Literal["joint", "apart"] = "joint"
    """The baseline of an episode's advantage: the mean reward of all episodes of the group
    (`joint`), or only of those that also have a hint, or also have none (`apart`).
    """
    gap: bool = False
    """Multiply positive advantages of episodes without a hint, and negative advantages of episodes
    with a hint, by 1 + g. g is the group's mean reward with hints minus its mean reward without,
    with rewards clipped to 0..1.
    """

    def check_combination(self) -> None:
        if self.shortest > self.longest:
            raise ConfigError(
                f"hints.shortest must be <= hints.longest ({self.longest:g}), got {self.shortest:g}"
            )


class Hints:
    """A technique that begins some replies of a group with a part of a solution."""

    def __init__(self, options: HintsConfig) -> None:
        """Create the technique. `options.number` must be above 0: `Entry.complete` replaces a 0."""
        self._options = options
        self.solution_field = options.solution

    def roots(self, group_size: int) -> int:
        return group_size - self._options.number

    async def forks(
        self, rounds: Sequence[Sequence[Trajectory | Failure]], texts: Texts
    ) -> Sequence[Fork | None]:
        finished = [each for each in rounds[0] if isinstance(each, Trajectory)]
        if len(rounds) > 1 or not finished:
            return ()
        trunk = finished[0]
        solution = texts.solution(trunk.task, self.solution_field)
        start = replies(trunk.pieces)[0][0]
        random = Random(trunk.episode)
        forks: list[Fork | None] = []
        for _ in range(self._options.number):
            length = int(self._share(finished, random) * len(solution))
            hint = Placed(solution[:length], Provenance.FORCED)
            forks.append(Fork(trunk.episode, start, (hint,)) if length else None)
        return forks

    def _share(self, plain: Sequence[Trajectory], random: Random) -> float:
        """Return the share of the solution for the next hint, from the results of episodes without
        one.
        """
        options = self._options
        solved = fmean(min(1.0, max(0.0, each.reward)) for each in plain)
        share = options.shortest + (options.longest - options.shortest) * (1 - solved)
        return share * (1 - options.noise * random.random())

    def estimate(self, groups: Sequence[Group], context: CreditContext) -> list[ScoredTrajectory]:
        scored: list[ScoredTrajectory] = []
        shares: list[float] = []
        for group in groups:
            for each in group.trajectories:
                others = self._compared(each, group.finished)
                advantage = each.reward - fmean(other.reward for other in others)
                advantage *= self._factor(each, advantage, group)
                scored += credited(each, advantage)
                shares.append(_hinted_share(each))
        hinted = [each for each in shares if each]
        context.metrics["hints/episode_share"] = len(hinted) / max(1, len(shares))
        context.metrics["hints/token_share_mean"] = fmean(hinted) if hinted else 0.0
        return scored

    def _factor(self, episode: Trajectory, advantage: float, group: Group) -> float:
        """Return the factor of an advantage: 1 without `gap`, or if all episodes or none have a
        hint.
        """
        rewards: dict[bool, list[float]] = {True: [], False: []}
        for each in group.finished:
            rewards[bool(_hinted_share(each))].append(min(1.0, max(0.0, each.reward)))
        counts = self._options.gap and rewards[True] and rewards[False]
        if not counts or bool(_hinted_share(episode)) != (advantage < 0):
            return 1.0
        return 1 + fmean(rewards[True]) - fmean(rewards[False])

    def _compared(
        self, episode: Trajectory, siblings: Sequence[Trajectory]
    ) -> Sequence[Trajectory]:
        """Return the episodes of the group whose mean reward is the baseline of `episode`."""
        if self._options.baseline == "joint":
            return siblings
        hinted = bool(_hinted_share(episode))
        return [each for each in siblings if bool(_hinted_share(each)) == hinted]


def credited(episode: Trajectory, advantage: float) -> list[ScoredTrajectory]:
    """Return an episode and its further conversations, each scored with its advantage."""
    whole = ScoredTrajectory(episode, of_tokens(episode, advantage))
    return [whole, *(ScoredTrajectory(branch, (advantage,)) for branch in episode.branches)]


def of_tokens(episode: Trajectory, advantage: float) -> tuple[float, ...]:
    """Return the advantage of each token of an episode: `advantage`, but 0 for placed text if below
    0.

    Placed text is text in a reply that the policy did not sample there, such as a hint.
    """
    values = [advantage] * len(episode)
    for start, piece, _ in walk(episode.pieces):
        if isinstance(piece, Placed) and advantage < 0:
            values[start : start + len(piece.tokens)] = [0.0] * len(piece.tokens)
    return tuple(values)


def check_number(technique: str, number: int, config: RunConfig) -> None:
    """Raise `ConfigError` if `number`, the later episodes of a group, leaves none to begin with."""
    size = config.schedule.group_size
    if number >= size:
        raise ConfigError(
            f"{technique}.number must be below schedule.group_size ({size}), got {number}: a group "
            "begins with plain episodes"
        )


def complete_number(options: Any, config: RunConfig) -> Any:
    """Return the options. If their `number` is 0, it becomes half of `schedule.group_size`."""
    return replace(options, number=options.number or config.schedule.group_size // 2)


def _hinted_share(episode: Trajectory) -> float:
    """Return the share of an episode's reply tokens that belong to a hint."""
    counts = {True: 0, False: 0}
    for piece in filter(is_reply, episode.pieces):
        counts[isinstance(piece, Placed)] += len(piece.tokens)
    return counts[True] / max(1, sum(counts.values()))


def _check(options: HintsConfig, config: RunConfig) -> None:
    check_number("hints", options.number, config)
    reason = "otherwise hints have no loss: only the tokens after them are learned, never the hints"
    require_value("hints", "objective.placed", config.objective.placed, ["anchor"], reason)
    refuse_slots("hints", REFUSED, config)


def _describe(options: HintsConfig) -> str:
    return (
        f"{options.number} episodes of a group begin with a part of a solution, from "
        f"{options.shortest:.0%} to {options.longest:.0%} of it by the failures of the others; "
        "hints are trained on where they helped, which is imitation"
    )


_MEASURED = """
A combination lock: 8 positions with 4 words each, reward 1 only if all are right. 150 steps of 8
episodes, 4 of them with hints, 12 seeds (`tests/techniques/test_hints.py`). The probability of
opening the lock at the end:

| | hints trained on | not trained on |
|---|---|---|
| without hints | 0.00 | |
| `noise` 0 | 0.97 | 0.01 |
| `noise` 1 | 0.94 | 0.08 |
| `noise` 0, `baseline` apart | 0.96 | |
| `noise` 1, `baseline` apart | 0.91 | |

An untrained hint teaches only the last token: the episodes without a hint keep failing, so the hint
stays as long as it is. This is why `objective.placed` must be anchor. It has not been measured on
the desks.
"""

ENTRY = Entry(
    name="hints",
    slot="strategy",
    rows=(37,),
    makes=Hints,
    options=HintsConfig,
    changes=frozenset({"count", "advantage", "objective"}),
    describe=_describe,
    requires=frozenset({"siblings", "rewards"}),
    check=_check,
    task_methods=lambda options: () if options.solution else ("demonstration", "data_of"),
    complete=complete_number,
    use="Most tasks always fail, and solutions are known. Tasks need a field with a solution, or a "
    "task set with demonstrations.",
    measured=_MEASURED,
    exactness="Sampled tokens after a hint are in their own context, so their D and S are exact. "
    "The loss of hints is weighted imitation, not the gradient of the reward (docs/placed.md). "
    "That tokens with a hint count in the objective changes it, too: it is the success with hints. "
    "`gap` changes the mean advantage of a group from 0. `noise` as a factor, `joint`, the factor "
    "of `gap` and the defaults are our own reading.",
    evidence="notes",
)
