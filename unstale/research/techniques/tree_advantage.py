"""`tree_advantage`: advantages for groups in which episodes are forked from others.

A group consists of M trees. An edge e is a run of tokens between two forks; its leaves are the
episodes that contain it, and the reward of a leaf is R.

`loo`: A(e) = w(e) (V(e) - b(e)). V(e) is the mean reward of the leaves below e, in which every
branch of a fork counts the same. w(e) is the product of 1 / branches over the forks above e. b(e)
is the mean of V over the other branches of the nearest fork above e, or over the other trees.
`pooled`: A(e) = M / N times the sum, over the leaves below e, of R minus the mean reward of all N
leaves. `depth`: A(e) = M / n times (V(e) - mean) / deviation, over the n edges at the same number
of tokens; V is the mean reward of the leaves, or with `fusion` = path that of the branches of the
next fork, weighted by the probability of their tokens. That is BranchGRPO's rule, in which the
places of a tree are the denoising steps of an image.

`tree.prune` ends episodes early, at random if `tree.spare` is above 0. In `loo`, a leaf that
survived a random draw has the weight s = 1 / probability, and one that did not has s = 0: A(e) is
w(e) times the mean of s (R - b(e)) over the leaves below e, and V(e) the mean of s R. An episode
that was pruned without a random draw (`tree.spare 0`) is left out. The other rules leave out every
pruned episode.

BranchGRPO's pruning of gradients changes no episode: tokens of some levels (`kept_depths`), or of
episodes between the best and the worst one of a group (`kept_leaves`), get the advantage 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from unstale.config.checks import ConfigError, Range, Section
from unstale.config.techniques import Entry
from unstale.records import SURVIVAL, Group, Sampled, ScoredTrajectory, Trajectory, walk

if TYPE_CHECKING:
    from unstale.config import RunConfig
    from unstale.techniques.hooks import CreditContext

TINY = 1e-6
"""Smallest standard deviation by which `depth` divides. With a smaller one, advantages are 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeAdvantageConfig(Section):
    """Advantages for episodes that are forked from others of their group."""

    selector: ClassVar[str] = "rule"
    read_by: ClassVar[Mapping[str, Sequence[str]]] = {"fusion": ("depth",)}

    rule: Literal["loo", "pooled", "depth"] = "loo"
    """The rule by which the advantage of a token is computed. Only `loo` is unbiased."""
    fusion: Literal["leaves", "path"] = "leaves"
    """Only for `depth`: the value of a place is the mean reward of the leaves below it, or the mean
    of the branches of each fork, weighted by the probabilities with which the engine sampled them.
    """
    kept_depths: Annotated[float, Range(above=0, high=1)] = 1.0
    """Share of the levels of a tree whose tokens are trained on; other tokens have the advantage 0.
    A level is all tokens with the same number of forks before them. The first trained level
    advances by one with each version of the weights.
    """
    kept_leaves: Literal["all", "extremes"] = "all"
    """`all` trains on all leaves of a tree, which are the ends of episodes after their last fork.
    `extremes` trains only on the leaves with the highest or the lowest reward of the group.
    """


@dataclass(slots=True)
class Edge:
    """A run of tokens between two forks of an episode, and the runs that continue it."""

    trajectory: Trajectory
    start: int
    end: int
    """Index after the last token of the run, which begins at `start` of its episode."""
    below: list[Edge] = field(default_factory=list)
    """The edges that continue this one. Empty at the end of an episode."""

    def over(self, baseline: float) -> float:
        """Return the weighted mean of R - `baseline` over the leaves below the edge (R: their
        reward).

        Each branch of a fork counts the same. The weight of a leaf is 1, or 1 / probability if it
        survived a random draw, or 0 if it did not.
        """
        if self.below:
            return fmean(each.over(baseline) for each in self.below)
        return survival(self.trajectory) * (self.trajectory.reward - baseline)

    @property
    def value(self) -> float:
        """The weighted mean reward of the leaves below the edge, as in `over`."""
        return self.over(0.0)

    def fused(self, values: int = 1) -> float:
        """Return the mean reward of the leaves below the edge, weighted by their `shares`."""
        return math.fsum(share * leaf.reward for leaf, share in self.shares(values))

    def shares(self, values: int = 1) -> Iterator[tuple[Trajectory, float]]:
        """Yield the leaves below the edge with their weights, whose sum is 1.

        The weight of a branch is in proportion to exp(log-probability of its tokens / `values`),
        and that of a leaf is the product of its branches'. Pruned branches are left out. At least
        one leaf must be below the edge.
        """
        kept = [each for each in self.below if any(each.leaves())]
        if not kept:
            yield self.trajectory, 1.0
            return
        logps = [each.logp() / values for each in kept]
        weights = [math.exp(logp - max(logps)) for logp in logps]
        total = math.fsum(weights)
        for weight, each in zip(weights, kept, strict=True):
            for leaf, share in each.shares(values):
                yield leaf, weight / total * share

    def logp(self) -> float:
        """Return the log-probability of the edge's sampled tokens when the engine drew them."""
        total = 0.0
        for start, piece, _ in walk(self.trajectory.pieces):
            if isinstance(piece, Sampled):
                low, high = max(self.start - start, 0), max(self.end - start, 0)
                total += math.fsum(piece.behavior_logp[low:high])
        return total

    def leaves(self) -> Iterator[Trajectory]:
        """Yield the episodes that contain the edge and were not pruned."""
        if not self.below and self.trajectory.stop != "pruned":
            yield self.trajectory
        for each in self.below:
            yield from each.leaves()

    def edges(self) -> Iterator[Edge]:
        """Yield this edge and all edges below it."""
        yield self
        for each in self.below:
            yield from each.edges()


def trees(group: Group) -> list[Edge]:
    """Return the first edge of each tree of a group, in the order of the episodes.

    Left out are episodes that were pruned without a random draw and from which no other was forked,
    and forks of a failed episode. Raises ValueError if an episode was forked from one that is not
    in the group or did not sample that place itself, or if a reward is not finite.
    """
    known = {each.episode: each for each in group.finished}
    children: dict[int, list[Trajectory]] = {}
    for each in known.values():
        if not math.isfinite(each.reward):
            raise ValueError(f"episode {each.episode} of {each.task.key} has reward {each.reward}")
        if each.fork is not None:
            parent = known.get(each.fork.parent)
            if parent is None and group.failures:
                continue
            if parent is None or each.fork.at < _place(parent):
                raise ValueError(
                    f"episode {each.episode} was forked after {each.fork.at} tokens of episode "
                    f"{each.fork.parent}, which are no tokens of its own in group {group.number}"
                )
            children.setdefault(each.fork.parent, []).append(each)

    def edge(trajectory: Trajectory, start: int, *, after: bool = False) -> Edge:
        """Return the edge that begins at token `start` of an episode.

        With `after`, forks at this very token are not part of it, because they precede it.
        """
        later = [
            each
            for each in children.get(trajectory.episode, ())
            if _place(each) > start or (_place(each) == start and not after)
        ]
        if not later:
            return Edge(trajectory, start, len(trajectory))
        end = min(map(_place, later))
        branches = [each for each in later if _place(each) == end]
        below = [edge(trajectory, end, after=True), *(edge(each, end) for each in branches)]
        return Edge(trajectory, start, end, below)

    roots = [edge(each, 0) for each in known.values() if each.fork is None]
    return [each for each in roots if _prune(each)]


def _prune(edge: Edge) -> bool:
    """Remove the branches that were pruned without a random draw. Return False if none is left."""
    if not edge.below:
        return edge.trajectory.stop != "pruned" or SURVIVAL in edge.trajectory.facts
    edge.below = [each for each in edge.below if _prune(each)]
    return bool(edge.below)


def survival(trajectory: Trajectory) -> float:
    """Return the weight of an episode: 1 / probability if it survived a random draw, 0 if pruned,
    else 1.
    """
    return trajectory.facts.get(SURVIVAL, float(trajectory.stop != "pruned"))


def effective_leaves(roots: Sequence[Edge], values: int = 1) -> float:
    """Return the effective number of leaves of a tree by `Edge.shares`, as a mean over trees.

    It is 1 / (sum of squared weights): all leaves if they have the same weight, and 1 if one leaf
    has the whole weight.
    """
    return fmean(1 / math.fsum(share**2 for _, share in root.shares(values)) for root in roots)


def leaf_weights(group: Group) -> dict[int, float]:
    """Return the weight of each finished episode, by its number: 1 for an episode without forks.

    A fork divides the weight equally among its branches, so a tree has the weight 1 if no episode
    was pruned. A pruned episode has the weight 0.
    """

    def weigh(edge: Edge, weight: float) -> Iterator[tuple[int, float]]:
        if not edge.below:
            yield edge.trajectory.episode, weight * survival(edge.trajectory)
        for each in edge.below:
            yield from weigh(each, weight / len(edge.below))

    weights = {each.episode: 0.0 for each in group.finished}
    return weights | {
        episode: weight for root in trees(group) for episode, weight in weigh(root, 1.0)
    }


def _place(trajectory: Trajectory) -> int:
    """Return the number of tokens that an episode shares with its parent; 0 without a parent."""
    return trajectory.fork.at if trajectory.fork else 0


class TreeAdvantage:
    """A technique that computes one advantage for every token of a tree of episodes."""

    def __init__(self, options: TreeAdvantageConfig, values: int = 1) -> None:
        """Create the technique.

        `values` divides log-probabilities in `fusion` = path: the number of values that a token
        has, if a token is a step that draws several of them (BranchGRPO's code has their mean).
        """
        self._options = options
        is_fused = options.rule == "depth" and options.fusion == "path"
        fused = partial(depth, value=lambda edge: edge.fused(values))
        self._rule = fused if is_fused else RULES[options.rule]

    def estimate(self, groups: Sequence[Group], context: CreditContext) -> list[ScoredTrajectory]:
        scored = []
        for group in groups:
            advantages = {each.episode: [0.0] * len(each) for each in group.finished}
            roots = trees(group)
            for trajectory, start, end, advantage in self._rule(roots):
                advantages[trajectory.episode][start:end] = [advantage] * (end - start)
            for edge in self._without_gradient(roots, context.version):
                hidden = [0.0] * (edge.end - edge.start)
                advantages[edge.trajectory.episode][edge.start : edge.end] = hidden
            for each in group.trajectories:
                scored.append(ScoredTrajectory(each, tuple(advantages[each.episode])))
                whole = (fmean(advantages[each.episode]),)
                scored += [ScoredTrajectory(branch, whole) for branch in each.branches]
        return scored

    def _without_gradient(self, roots: Sequence[Edge], version: int) -> Iterator[Edge]:
        """Yield the edges whose advantage is set to 0 by `kept_depths` and `kept_leaves`
        (BranchGRPO).
        """
        levels = levels_of(roots)
        kept = math.ceil(self._options.kept_depths * len(levels))
        trained = {(version + number) % len(levels) for number in range(kept)} if levels else {}
        for number, level in enumerate(levels):
            if number not in trained:
                yield from level
        ends = [each for level in levels for each in level if not each.below]
        ends = [each for each in ends if each.trajectory.stop != "pruned"]
        if self._options.kept_leaves == "extremes" and ends:
            rewards = [each.trajectory.reward for each in ends]
            bounds = (min(rewards), max(rewards))
            yield from (each for each in ends if each.trajectory.reward not in bounds)


def levels_of(roots: Sequence[Edge]) -> list[list[Edge]]:
    """Return the edges by their level: list n has the edges with n forks before them."""
    levels: list[list[Edge]] = []
    level = list(roots)
    while level:
        levels.append(level)
        level = [below for each in level for below in each.below]
    return levels


Advantages = Iterator[tuple[Trajectory, int, int, float]]
"""Rows `(trajectory, start, end, advantage)`: the advantage of the tokens `start` to `end` of an
episode.
"""


def loo(roots: Sequence[Edge]) -> Advantages:
    """Yield the advantage of each edge by the rule `loo`, which compares the branches of a fork."""
    yield from _below(roots, 1.0, 0.0)


def _below(edges: Sequence[Edge], weight: float, baseline: float) -> Advantages:
    """Yield the advantages of the branches of a fork, and of the edges below them.

    `weight` is the branches' weight w. `baseline` is used if there is only one branch.
    """
    values = [each.value for each in edges]
    for number, each in enumerate(edges):
        others = values[:number] + values[number + 1 :]
        b = fmean(others) if others else baseline
        yield each.trajectory, each.start, each.end, weight * each.over(b)
        yield from _below(each.below, weight / max(1, len(each.below)), b)


def pooled(roots: Sequence[Edge]) -> Advantages:
    """Yield the advantage of each edge by the rule `pooled`: every leaf is an
    episode, as in GRPO.
    """
    rewards = [leaf.reward for root in roots for leaf in root.leaves()]
    if not rewards:  # every leaf was pruned
        return
    mean = fmean(rewards)
    for each in (edge for root in roots for edge in root.edges()):
        total = sum(leaf.reward - mean for leaf in each.leaves())
        yield each.trajectory, each.start, each.end, len(roots) / len(rewards) * total


def mean_of_leaves(edge: Edge) -> float:
    return fmean(leaf.reward for leaf in edge.leaves())


def depth(roots: Sequence[Edge], value: Callable[[Edge], float] = mean_of_leaves) -> Advantages:
    """Yield the advantages that compare the edges at the same number of tokens (BranchGRPO)."""
    edges = [edge for root in roots for edge in root.edges() if any(edge.leaves())]
    values = [value(each) for each in edges]
    cuts = sorted({place for each in edges for place in (each.start, each.end)})
    for start, end in pairwise(cuts):
        level = [i for i, each in enumerate(edges) if each.start <= start and end <= each.end]
        mean = fmean(values[i] for i in level)
        deviation = pstdev([values[i] for i in level])
        for i in level:
            score = (values[i] - mean) / deviation if deviation > TINY else 0.0
            yield edges[i].trajectory, start, end, len(roots) / len(level) * score


RULES = {"loo": loo, "pooled": pooled, "depth": depth}


def _check(options: TreeAdvantageConfig, config: RunConfig) -> None:
    if "tree" not in config.techniques.split():
        raise ConfigError(
            "the technique tree_advantage needs the technique tree, without which no episode is "
            f"forked. Set --techniques 'tree {config.techniques}'"
        )


_RULES = {
    "loo": "the reward below it minus that of the other branches of the fork above",
    "pooled": "the rewards below it minus the mean of all episodes (biased)",
    "depth": "the reward below it, standardised over the tokens at the same place (biased)",
}


def _describe(options: TreeAdvantageConfig) -> str:
    return f"the advantage of a token is {_RULES[options.rule]}; a shared token counts once"


_MEASURED = """
All trees of 12 small problems (three binary tokens, two roots, forks where the entropy of the
policy is large), enumerated: the bias of the mean gradient relative to its size, and the cosine of
the mean gradient with the true one.

| rule | bias | cosine |
|---|---|---|
| `loo`; also with the other trees as the only baseline | 0 | 1 |
| `pooled` | 0.430 | 0.969 |
| `pooled` without the leaf itself in the mean (not offered) | 0.258 | 0.976 |
| `depth` | 0.575 | 0.979 |
| a place minus the place before it (not offered) | 0.710 | 0.716 |
| `loo`, `tree.branch peaks` | 0.185 | 0.987 |
| `loo`, `tree.branch unlikely` | 0.162 | 0.992 |
| `loo`, `tree.branch second` | 0.137 | 0.981 |
| `loo`, one tree, unlikely second tokens pruned, `tree.spare 0.5` | 0 | 1 |
| the same with `tree.spare 0` | 0.721 | - |
| the same without a baseline (not offered) | 0.803 | - |

`pooled` gives every leaf the same weight. There is no such choice for `loo`, whose mean it would
change: each branch of a fork has the same weight. `unstale lint` warns of each biased choice.

A bias includes the scale: a cosine near 1 means that the direction is kept. It has not been
measured on the desks.
"""

ENTRY = Entry(
    name="tree_advantage",
    slot="estimator",
    rows=(5, 12, 14, 30, 43, 55),
    makes=TreeAdvantage,
    options=TreeAdvantageConfig,
    changes=frozenset({"advantage"}),
    describe=_describe,
    by_group=lambda options: True,
    check=_check,
    use="Always with `tree`. The rules `pooled` and `depth` are for comparison with papers.",
    measured=_MEASURED,
    exactness="`loo` does not change the mean of the gradient if the places of forks depend only "
    "on the tokens before them ([tree](#tree)) and the divisor of the loss is constant "
    "(`objective.loss_aggregation constant`). `pooled`, `depth`, `kept_depths` and `kept_leaves` "
    "bias it. D and S do not change.",
    evidence="own reading",
)
