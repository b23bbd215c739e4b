"""Rules of the technique `tree` that fork and prune episodes while they run.

A decision is made whenever an episode has sampled `every` more tokens. A rule reads the tokens so
far, and their signals (entropies and probabilities), of all episodes of the group.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from unstale.records import SURVIVAL, Fork, Placed, Provenance, Sampled
from unstale.research.techniques.forecast import sigmoid
from unstale.rollout.rounds import reply_spans
from unstale.techniques.hooks import Decisions, Leaf, LookPlan

if TYPE_CHECKING:
    from unstale.records import Group, Trajectory
    from unstale.research.techniques.tree import TreeConfig
    from unstale.techniques.hooks import CreditContext, Outcome

LOOKS = 2
"""An episode is pruned if its confidence is below the group's quantile in this many successive runs
of `every` tokens.
"""
QUANTILE = 0.25
GAMMA, PENALTY, ENOUGH = 0.2, 0.05, 0.5
"""AEPO's constants: the weight of an entropy difference, the penalty of each successive fork, and
the bound above which it forks.
"""
CONTROL = 1 / 8
"""Share of the decisions of `tree.prune` = mixed at which nothing is pruned, as a control."""
WINDOW = 512
"""Number of last graded episodes to which the forecast of success is fitted."""
NEWTON_STEPS = 8


@dataclass(frozen=True, slots=True)
class Row:
    """A sampled token of an episode: its position, log-probability, entropy and most likely
    tokens.
    """

    at: int
    token: int
    logp: float
    entropy: float
    likeliest: tuple[int, int]
    p: tuple[float, float]
    """Probabilities of the two most likely tokens, in the order of `likeliest`."""


def rows_of(leaf: Leaf) -> list[Row]:
    """Return the sampled tokens of an episode that have signals, including those
    before its forks.
    """
    rows: list[Row] = []
    start = 0
    for piece in leaf.pieces:
        if isinstance(piece, Sampled) and (signals := piece.signals):
            columns = zip(
                piece.tokens,
                piece.behavior_logp,
                signals.entropy.tolist(),
                signals.likeliest.tolist(),
                signals.logp.tolist(),
                strict=True,
            )
            for at, (token, logp, entropy, (a, b), (p, q)) in enumerate(columns, start):
                rows.append(Row(at, token, logp, entropy, (a, b), (math.exp(p), math.exp(q))))
        start += len(piece.tokens)
    return rows


def confidence(rows: Sequence[Row]) -> float:
    """Return the mean probability of the most likely token over `rows`; 1 without rows."""
    return fmean(row.p[0] for row in rows) if rows else 1.0


def chunk_of(leaf: Leaf, every: int) -> list[Row]:
    """Return the tokens of an episode's last reply since the last decision on forks and pruning.

    Such a decision is made after every `every` tokens of a reply.
    """
    start, end = reply_spans(leaf.pieces)[-1]
    since = start + (end - start - 1) // every * every
    return [row for row in rows_of(leaf) if row.at >= since]


def echo_width(most: int, entropy: float, sure: float) -> int:
    """Return ECHO's number of branches, from 1 to `most`.

    It rises with `entropy`, from 0 to 1, and falls with the confidence `sure`.
    """
    return min(most, max(1, math.floor(most * entropy * (1 - sure) + 0.5)))


def aepo_roots(size: int, difference: float) -> int:
    """Return the number of a group's `size` episodes that start from the prompt instead of a fork,
    by AEPO's rule.

    `difference` is the entropy of the first reply minus that of replies to tools' results, in nats.
    """
    return int(size / (1 + math.exp(-0.5 * difference))) + 1


def aepo_forks(draw: float, difference: float, successive: int) -> bool:
    """Return True if AEPO forks at a reply to a tool's result.

    `draw` is uniform in [0, 1]. `difference` is the entropy of this reply minus that of the first
    one, in nats. `successive` is the number of replies directly before it that were forked as well.
    """
    return (draw + GAMMA * difference) * (1 - PENALTY * successive) >= ENOUGH


def most_mixed(chances: Sequence[float], keep: int) -> list[int]:
    """Return the indices of `keep` episodes whose mean chance of success is nearest to 1/2.

    They are some with the highest chances and some with the lowest.

    >>> most_mixed([0.9, 0.8, 0.2, 0.1], 2)
    [0, 3]
    """
    order = sorted(range(len(chances)), key=lambda i: -chances[i])
    ends = [order[:top] + order[len(order) - keep + top :] for top in range(keep + 1)]
    return sorted(min(ends, key=lambda each: abs(sum(chances[i] for i in each) - keep / 2)))


def edit_distance(one: Sequence[int], other: Sequence[int]) -> float:
    """Return the edit distance of two token sequences, as a share of the length of the longer one.

    >>> edit_distance((1, 2, 3, 4), (1, 3, 4, 5))
    0.5
    """
    row = list(range(len(other) + 1))
    for number, token in enumerate(one, 1):
        above, row[0] = row[0], number
        for i, each in enumerate(other, 1):
            above, row[i] = row[i], min(row[i] + 1, row[i - 1] + 1, above + (token != each))
    return row[-1] / max(len(one), len(other), 1)


class LiveTree:
    """A strategy that forks and prunes the episodes of a group while they run."""

    def __init__(self, options: TreeConfig) -> None:
        """Create the strategy. `options.roots` must be above 0: `Entry.complete` replaces a 0."""
        self._options = options
        self.look_plan = LookPlan(options.every, 0 if options.branch == "tool" else options.every)

    def roots(self, group_size: int) -> int:
        return self._options.roots

    def decide(self, leaves: Sequence[Leaf], left: int, random: Random) -> Decisions:
        waiting = [leaf for leaf in leaves if not leaf.ended]
        survival = self._survival(leaves, waiting, random)
        forks: list[Fork] = []
        for leaf in waiting:
            if survival.get(leaf.index) != 0:
                match self._options.branch:
                    case "entropy":
                        forks += self._at_entropy(leaf)
                    case "second":
                        forks += self._at_second(leaf)
                    case "confidence":
                        forks += self._at_confidence(leaf, leaves, left, forks)
                    case "tool":
                        forks += self._at_tool(leaf, leaves, random)
        begun = len(leaves)
        adaptive = self._options.branch == "tool" and self._options.roots == 1
        fresh = self._fresh(leaves, left, begun) if adaptive else 0
        return Decisions(survival, forks[: left - fresh], fresh)

    def _at_entropy(self, leaf: Leaf) -> Iterator[Fork]:
        """Yield forks before the first new token whose entropy is above the threshold."""
        for row in chunk_of(leaf, self._options.every):
            if row.entropy > self._options.threshold and row.at > _first(leaf):
                yield from [Fork(leaf.episode, row.at)] * self._options.continuations
                return

    def _at_confidence(
        self, leaf: Leaf, leaves: Sequence[Leaf], left: int, forks: Sequence[Fork]
    ) -> list[Fork]:
        """Return ECHO's forks of an episode; fewer or none if its tree would exceed half of the
        group.

        `forks` are those already chosen in this round for other episodes.
        """
        if not leaf.going:
            return []
        options = self._options
        rows = chunk_of(leaf, options.every)
        entropy = min(1.0, fmean(row.entropy for row in rows) / options.threshold) if rows else 0.0
        width = echo_width(options.continuations + 1, entropy, confidence(rows))
        root = _root(leaf, leaves)
        roots = {each.episode: _root(each, leaves) for each in leaves}
        tree = [*roots.values(), *(roots[fork.parent] for fork in forks)].count(root)
        place = sum(len(piece.tokens) for piece in leaf.pieces)
        number = min(width - 1, (len(leaves) + left) // 2 - tree)
        return [Fork(leaf.episode, place)] * max(0, number)

    def _at_second(self, leaf: Leaf) -> Iterator[Fork]:
        """Yield a fork at the first new token with two likely candidates (LATR).

        The fork begins with the candidate that was not sampled.
        """
        options = self._options
        for row in chunk_of(leaf, options.every):
            (a, b), (p, q) = row.likeliest, row.p
            if q > options.least and p - q < options.margin and row.at > _first(leaf):
                text = Placed((b if row.token == a else a,), Provenance.FORCED)
                yield Fork(leaf.episode, row.at, (text,))
                return

    def _at_tool(self, leaf: Leaf, leaves: Sequence[Leaf], random: Random) -> Iterator[Fork]:
        """Yield forks in the episode's last reply that has `every` tokens, after these tokens.

        Yield nothing if AEPO's rule does not fork there. The first such reply is never forked.
        """
        found = _entropies(leaf, self._options.every)
        if len(found) < 2 or not leaf.going:
            return
        places = [place for place, _ in found]
        forked = {each.fork.at for each in leaves if each.fork and _is_on(each.fork, leaf, leaves)}
        successive = 0
        while successive < len(places) - 1 and places[-2 - successive] in forked:
            successive += 1
        if aepo_forks(random.random(), found[-1][1] - found[0][1], successive):
            yield from [Fork(leaf.episode, places[-1])] * self._options.continuations

    def _fresh(self, leaves: Sequence[Leaf], left: int, begun: int) -> int:
        """Return AEPO's number of new episodes that start from the prompt.

        It is decided when the group's first episode first replies to a tool's result. When all
        episodes have ended, the rest of the group starts.
        """
        if all(leaf.ended for leaf in leaves):
            return left
        found = _entropies(leaves[0], self._options.every)
        if begun > 1 or len(found) < 2:
            return 0
        difference = found[0][1] - fmean(entropy for _, entropy in found[1:])
        return min(left, max(1, aepo_roots(begun + left, difference) - 1))

    def _survival(
        self, leaves: Sequence[Leaf], waiting: Sequence[Leaf], random: Random
    ) -> dict[int, float]:
        """Return the probability of survival of each episode that the rule would
        prune, by index.
        """
        going = [leaf for leaf in waiting if leaf.going]
        if self._options.prune == "confidence":
            pruned = self._unsure(going)
        elif self._options.prune == "similar":
            pruned = [leaf for leaf in going if self._is_similar(leaf, leaves)]
        elif self._options.prune == "mixed":
            pruned = self._unmixed(going, leaves, random)
        else:
            pruned = []
        return {leaf.index: self._options.spare for leaf in pruned}

    def _unsure(self, going: Sequence[Leaf]) -> list[Leaf]:
        """Return the episodes with a confidence below the group's quantile in each of the last
        chunks.

        A chunk has `every` tokens.
        """
        every = self._options.every
        read = {leaf.index: rows_of(leaf) for leaf in going}
        rows = {index: each for index, each in read.items() if len(each) >= LOOKS * every}
        low = set(rows)
        for number in range(LOOKS):
            sure = {
                index: confidence(each[len(each) - (number + 1) * every :][:every])
                for index, each in rows.items()
            }
            bound = sorted(sure.values())[int(QUANTILE * len(sure))] if sure else 0.0
            low &= {index for index, value in sure.items() if value < bound}
        return [leaf for leaf in going if leaf.index in low]

    def _is_similar(self, leaf: Leaf, leaves: Sequence[Leaf]) -> bool:
        """Return True if a fork's first tokens are nearly those of its parent after the fork
        (LATR).
        """
        if leaf.fork is None:
            return False
        every, at = self._options.every, leaf.fork.at
        tokens = _tokens(leaf)[at:]
        if not every <= len(tokens) < 2 * every:
            return False
        parent = next(each for each in leaves if each.episode == leaf.fork.parent)
        beside = _tokens(parent)[at : at + len(tokens)]
        return edit_distance(tokens, beside) < self._options.distance

    def _unmixed(self, going: Sequence[Leaf], leaves: Sequence[Leaf], random: Random) -> list[Leaf]:
        """Return the episodes to prune: all but the share `keep` with the most mixed forecasts
        (ARRoL).
        """
        keep = max(2, round(self._options.keep * len(leaves)))
        if len(going) <= keep or random.random() < CONTROL:
            return []
        kept = most_mixed([self.chance(leaf) for leaf in going], keep)
        return [leaf for i, leaf in enumerate(going) if i not in kept]

    def chance(self, leaf: Leaf) -> float:
        """Return a forecast of the episode's success: the mean probability of its likeliest
        tokens.
        """
        return confidence(rows_of(leaf))


class ForecastTree(LiveTree):
    """A strategy that forecasts the success of each episode from its first tokens (ARRoL).

    The forecast is a logistic regression on the mean entropy and the mean log-probability of an
    episode's first `every` sampled tokens. It is fitted to the last `WINDOW` graded episodes. An
    episode that survived a random draw has a larger weight, because it stands for the pruned ones.
    """

    def __init__(self, options: TreeConfig) -> None:
        super().__init__(options)
        self._window: deque[list[float]] = deque(maxlen=WINDOW)
        self._seen: list[list[float]] = []
        self._slopes = np.zeros(3)

    def chance(self, leaf: Leaf) -> float:
        return float(sigmoid(self._slopes @ self._features(rows_of(leaf))))

    def _features(self, rows: Sequence[Row]) -> list[float]:
        first = rows[: self._options.every]
        return [1.0, fmean(row.entropy for row in first), fmean(row.logp for row in first)]

    def measure(
        self, groups: Sequence[Group], graded: Sequence[Group], context: CreditContext
    ) -> dict[str, float]:
        """Keep the graded episodes for `observe`. Return the mean squared error of forecasts."""
        seen = self._examples(each for group in groups for each in group.finished)
        if context.whole:
            self._seen = seen
        errors = [(float(sigmoid(self._slopes @ row[:3])) - row[3]) ** 2 for row in seen]
        return {"tree/forecast_error": fmean(errors)} if errors else {}

    def _examples(self, episodes: Iterable[Trajectory]) -> list[list[float]]:
        """Return features, success and weight of the graded episodes with an own beginning."""
        found = []
        for each in episodes:
            rows = rows_of(Leaf(0, each.episode, each.pieces))
            if not each.fork and each.stop != "pruned" and rows:
                weight = each.facts.get(SURVIVAL, 1.0)
                found.append([*self._features(rows), float(each.success), weight])
        return found

    def learn(self, episodes: Iterable[Trajectory]) -> int:
        """Fit the forecast to recorded episodes. Return the number of those that it can read."""
        self._window.extend(self._examples(episodes))
        self._fit()
        return len(self._window)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self._window.extend(self._seen)
        self._seen = []
        self._fit()

    def _fit(self) -> None:
        """Fit the regression by Newton's method, with a small penalty of squared weights."""
        if not self._window:
            return
        table = np.array(self._window)
        x, success, weight = table[:, :3], table[:, 3], table[:, 4]
        slopes = np.zeros(3)
        for _ in range(NEWTON_STEPS):
            p = sigmoid(x @ slopes)
            gradient = x.T @ (weight * (success - p)) - slopes
            curvature = (x * (weight * p * (1 - p))[:, None]).T @ x + np.eye(3)
            slopes += np.linalg.solve(curvature, gradient)
        self._slopes = slopes

    def state(self) -> Mapping[str, Any]:
        return {"window": [list(row) for row in self._window]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._window = deque([[*map(float, row)] for row in state["window"]], maxlen=WINDOW)
        self._fit()


def _first(leaf: Leaf) -> int:
    return reply_spans(leaf.pieces)[0][0]


def _tokens(leaf: Leaf) -> list[int]:
    return [token for piece in leaf.pieces for token in piece.tokens]


def _root(leaf: Leaf, leaves: Sequence[Leaf]) -> int:
    """Return the number of the episode from which an episode's chain of forks starts."""
    by_episode = {each.episode: each for each in leaves}
    while leaf.fork and leaf.fork.parent in by_episode:
        leaf = by_episode[leaf.fork.parent]
    return leaf.episode


def _is_on(fork: Fork, leaf: Leaf, leaves: Sequence[Leaf]) -> bool:
    """Return True if a fork starts from an episode, or from the part that it
    shares with a parent.
    """
    by_episode = {each.episode: each for each in leaves}
    end = sum(len(piece.tokens) for piece in leaf.pieces)
    while True:
        if fork.parent == leaf.episode and fork.at <= end:
            return True
        if leaf.fork is None or leaf.fork.parent not in by_episode:
            return False
        end, leaf = leaf.fork.at, by_episode[leaf.fork.parent]


def _entropies(leaf: Leaf, count: int) -> list[tuple[int, float]]:
    """Return (position, entropy) for each reply of at least `count` tokens.

    The position is that after the reply's first `count` tokens, in the episode. The entropy is the
    mean over these tokens, in nats.
    """
    rows = {row.at: row.entropy for row in rows_of(leaf)}
    found = []
    for start, end in reply_spans(leaf.pieces):
        values = [rows[at] for at in range(start, min(end, start + count)) if at in rows]
        if values and end - start >= count:
            found.append((start + count, fmean(values)))
    return found
