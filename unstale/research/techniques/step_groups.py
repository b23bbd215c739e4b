"""`step_groups`: an advantage for each turn, by comparison with siblings in the same situation.

An observation is the text before a reply, and an action is the reply. Those of one group are the
same if their tokens are. R is the discounted return of a turn, A_E the advantage of its episode.
a_k is R minus the mean R over all turns of the group with the same last k observations, divided by
the standard deviation (with divisor n) of these R plus 1e-6. a_k is 0 for a turn without another
turn to compare.

`gigpo`: A_E + weight * a_1. From GiGPO (arXiv 2505.10978).
`hgpo`: the mean of A_E and a_1, ..., a_K+1 with weights (k + 1)^alpha, where k is 0 for A_E. Terms
that are exactly 0 are left out. K is `history`. From HGPO.
`salt`: the mean of A_E over all turns of the group with the same observation, action and next
observation. From SALT.
`two_level`: A_E + weight * a, where a is computed as a_k over turns with the same number. From
UI-S1, with `cut_below` 1 and the environment `traces`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import sqrt
from typing import ClassVar, Literal

from unstale.config.checks import Count, NonNegative, Section, Share
from unstale.config.techniques import Entry
from unstale.records import Group, Sampled, ScoredTrajectory, Trajectory, walk
from unstale.techniques.hooks import CreditContext

EPSILON = 1e-6
"""A constant added to a standard deviation before dividing by it."""
_RETURNS = ("gigpo", "hgpo", "two_level")
_READ_BY = {
    "history": ("hgpo",),
    "alpha": ("hgpo",),
    "episode": ("hgpo",),
    "weight": ("gigpo", "two_level"),
    "discount": _RETURNS,
    "std": _RETURNS,
    "cut_below": _RETURNS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroupsConfig(Section):
    """An advantage for each turn, by comparison with turns of the group in the same situation."""

    selector: ClassVar[str] = "rule"
    read_by: ClassVar[Mapping[str, Sequence[str]]] = _READ_BY

    rule: Literal["gigpo", "hgpo", "salt", "two_level"] = "gigpo"
    """The formula of the advantage of a turn, and the turns that are compared."""
    discount: Share = 0.95
    """Not for `salt`: discount of the return: the weight of a later turn's reward falls by this
    factor per turn.
    """
    std: bool = True
    """Not for `salt`: divide by the standard deviation of the compared returns."""
    cut_below: float | None = None
    """Not for `salt`: returns end with the first turn whose own reward is smaller than this. None
    lets all returns run to the end.
    """
    weight: NonNegative = 1.0
    """Only for `gigpo` and `two_level`: weight of the turn's own advantage, which is added to the
    episode's.
    """
    history: Count = 1
    """Only for `hgpo`: largest number of earlier observations that compared turns must share."""
    alpha: NonNegative = 1.0
    """Only for `hgpo`: exponent of the weights (k + 1)^alpha. Larger values favour longer shared
    histories.
    """
    episode: bool = True
    """Only for `hgpo`: include the episode's advantage in the weighted mean that is a turn's
    advantage.
    """


@dataclass(frozen=True, slots=True)
class _Step:
    """A turn, with everything that its advantage depends on."""

    place: tuple[int, int]
    """Number of the episode, and number of the turn in the episode."""
    inherited: float
    value: float
    """The return of the turn: the sum of discounted rewards from this turn on."""
    observations: tuple[int, ...]
    """The numbers of all observations of the episode up to this turn. Equal texts within a group
    have the same number.
    """
    action: int
    following: int

    def window(self, size: int) -> Hashable:
        """Return the last `size` observations up to this turn. Those before the
        first turn are -1.
        """
        return ((-1,) * size + self.observations)[-size:]


class StepGroups:
    """A technique that gives each turn an advantage, by comparison with turns of the same group."""

    def __init__(self, options: StepGroupsConfig) -> None:
        self._options = options

    def recredit(
        self, groups: Sequence[Group], scored: Sequence[ScoredTrajectory], context: CreditContext
    ) -> list[ScoredTrajectory]:
        inherited = {each.trajectory.episode: each for each in scored}
        values: dict[tuple[int, int], float] = {}
        shared = 0
        for group in groups:
            items = [item for item in group.trajectories if item.episode in inherited]
            steps = self._steps([inherited[item.episode] for item in items])
            values |= self._advantages(steps)
            shared += _count_shared(steps, self._key)
        context.metrics["step_groups/shared_share"] = shared / len(values) if values else 0.0
        return [_replaced(each, values) for each in scored]

    def _steps(self, scored: Sequence[ScoredTrajectory]) -> list[_Step]:
        from unstale.algorithms.advantages import reward_to_go, turn_rewards

        numbers: dict[tuple[int, ...], int] = {}
        steps = []
        for each in scored:
            item = each.trajectory
            texts = [numbers.setdefault(text, len(numbers)) for text in _texts(item)]
            seen, done = texts[::2], texts[1::2]
            rewards = turn_rewards(item)
            values = [
                value
                for part in rewards.split(self._parts(item))
                for value in reward_to_go(part, discount=self._options.discount).tolist()
            ]
            for turn, (value, advantage) in enumerate(zip(values, _per_turn(each), strict=True)):
                place = (item.episode, turn)
                past = tuple(seen[: turn + 1])
                steps.append(_Step(place, advantage, value, past, done[turn], seen[turn + 1]))
        return steps

    def _parts(self, item: Trajectory) -> list[int]:
        """Return the lengths in turns of an episode's parts. Returns do not reach beyond a part."""
        bound = self._options.cut_below
        cut = [bound is not None and each < bound for each in item.turn_rewards]
        ends = [0, *(number for number, is_cut in enumerate(cut, 1) if is_cut)]
        parts = [end - start for start, end in pairwise(ends)]
        return [*parts, item.num_turns - ends[-1]]

    def _key(self, step: _Step) -> Hashable:
        """Return a key that is the same for the turns that are compared.

        For `hgpo`, which compares histories of several lengths, it has only the last observation.
        """
        match self._options.rule:
            case "salt":
                return (step.observations[-1], step.action, step.following)
            case "two_level":
                return step.place[1]
            case _:
                return step.window(1)

    def _advantages(self, steps: Sequence[_Step]) -> dict[tuple[int, int], float]:
        options = self._options
        if options.rule == "salt":
            shared = defaultdict(list)
            for step in steps:
                shared[self._key(step)].append(step.inherited)
            return {step.place: _mean(shared[self._key(step)]) for step in steps}
        if options.rule != "hgpo":
            relative = _compare(steps, self._key, std=options.std)
            return {
                step.place: step.inherited + options.weight * relative[step.place] for step in steps
            }
        levels = [
            _compare(steps, partial(_Step.window, size=size), std=options.std)
            for size in range(1, options.history + 2)
        ]
        if options.episode:
            levels.insert(0, {step.place: step.inherited for step in steps})
        first = 0 if options.episode else 1
        weights = [(k + 1.0) ** options.alpha for k in range(first, first + len(levels))]
        means = {}
        for step in steps:
            terms = [(w, level[step.place]) for w, level in zip(weights, levels, strict=True)]
            total = sum(w for w, value in terms if value)
            means[step.place] = sum(w * value for w, value in terms) / total if total else 0.0
        return means


def _texts(item: Trajectory) -> list[tuple[int, ...]]:
    """Return an episode's texts as tokens, in order: first observation, first action, ..., last
    observation.
    """
    texts: list[list[int]] = [[]]
    for _, piece, _ in walk(item.pieces):
        if isinstance(piece, Sampled) == len(texts) % 2:
            texts.append([])
        texts[-1] += piece.tokens
    if len(texts) % 2 == 0:
        texts.append([])
    return [tuple(text) for text in texts]


def _per_turn(scored: ScoredTrajectory) -> Sequence[float]:
    turns = scored.trajectory.num_turns
    if len(scored.advantage) not in (1, turns):
        raise ValueError("step_groups needs one advantage per episode or turn, not one per token")
    return scored.advantage * turns if len(scored.advantage) == 1 else scored.advantage


def _compare(
    steps: Sequence[_Step], key: Callable[[_Step], Hashable], *, std: bool
) -> dict[tuple[int, int], float]:
    """Return the return of each turn minus the mean return of the turns with the same key.

    The result has the key `_Step.place`. With `std`, the difference is divided by the standard
    deviation of these returns.
    """
    returns = defaultdict(list)
    for step in steps:
        returns[key(step)].append(step.value)
    scales = {}
    for each, values in returns.items():
        if min(values) < max(values):
            mean = _mean(values)
            variance = _mean([(value - mean) ** 2 for value in values])
            scales[each] = (mean, sqrt(variance) + EPSILON if std else 1.0)
    relative = {}
    for step in steps:
        mean, scale = scales.get(key(step), (step.value, 1.0))
        relative[step.place] = (step.value - mean) / scale
    return relative


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _count_shared(steps: Sequence[_Step], key: Callable[[_Step], Hashable]) -> int:
    counts = Counter(key(step) for step in steps)
    return sum(counts[key(step)] > 1 for step in steps)


def _replaced(scored: ScoredTrajectory, values: dict[tuple[int, int], float]) -> ScoredTrajectory:
    """Return a trajectory with the advantages of its turns instead of the episode's.

    Further conversations of its agent keep the advantage of the episode.
    """
    item = scored.trajectory
    turns = [values.get((item.episode, turn)) for turn in range(item.num_turns)]
    known = tuple(value for value in turns if value is not None)
    return replace(scored, advantage=known) if turns and len(known) == len(turns) else scored


def _describe(options: StepGroupsConfig) -> str:
    compared = {
        "gigpo": "the advantage of a turn is its episode's plus "
        f"{options.weight:g} times that among turns of siblings with the same observation",
        "hgpo": "the advantage of a turn is a mean of its episode's and those among turns of "
        f"siblings with the same last 1 to {options.history + 1} observations"
        if options.episode
        else "the advantage of a turn is a mean of those among turns of siblings with the same "
        f"last 1 to {options.history + 1} observations",
        "salt": "turns of siblings with the same observation, action and next observation have "
        "the mean of their advantages",
        "two_level": "the advantage of a turn is its episode's plus "
        f"{options.weight:g} times that among turns of siblings with the same number",
    }[options.rule]
    return f"{compared}; texts are compared token by token, within a group"


_MEASURED = """
An environment of 5 observed states, 2 actions and 5 turns; groups of 8, a uniform policy, no
discount, no division by the deviation. The variance of a group's gradient divided by its squared
mean, averaged over 24 environments with 60 groups each:

| policy depends on | none (GRPO without std) | `gigpo` | `hgpo` | `salt` | `two_level` |
|---|---|---|---|---|---|
| state | 0.53 | 0.48 | 0.45 | 0.53 | 0.53 |
| state and last action | 0.68 | 0.63 | 0.58 | 0.60 | 0.68 |

With noise of deviation 1 on the reward, only `salt` keeps its gain where the policy depends on the
last action, too (median 1.86 instead of 2.21). It has not been measured on the desks, where
siblings come back to the same observation less often.
"""

ENTRY = Entry(
    name="step_groups",
    slot="recredit",
    rows=(33, 46, 51),
    makes=StepGroups,
    options=StepGroupsConfig,
    changes=frozenset({"advantage"}),
    describe=_describe,
    by_group=lambda options: True,
    use="Episodes have many turns, and siblings come back to the same observations. "
    "`step_groups/shared_share` shows how often they do.",
    measured=_MEASURED,
    exactness="`salt` leaves the gradient as it is where the policy depends on nothing but the "
    "key. The other rules add a term whose baseline is a mean over siblings, which includes "
    "the turn itself; their direction is no longer that of the episode's reward alone. D and S do "
    "not change. Our own reading: windows that begin before the first observation, and 0 for a "
    "turn without an equal.",
    requires=frozenset({"siblings"}),
    evidence="notes",
)
