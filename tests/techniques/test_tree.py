"""Groups of forked episodes: places of forks, advantages, and one loss for a shared token."""

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement, product
from typing import Any

import numpy as np
import pytest
import torch

from unstale.config import ConfigError, RunConfig
from unstale.config.options import override
from unstale.lint.techniques import TREE_BIASES
from unstale.records import (
    SURVIVAL,
    ContextPiece,
    Failure,
    Fork,
    Group,
    Provenance,
    Sampled,
    ScoredTrajectory,
    Task,
    Trajectory,
    collate,
)
from unstale.research.techniques.balance import Balance, BalanceConfig
from unstale.research.techniques.tree import Tree, TreeConfig
from unstale.research.techniques.tree_advantage import (
    TreeAdvantage,
    TreeAdvantageConfig,
    leaf_weights,
)
from unstale.rollout.answers import last_reply
from unstale.signals import Signals
from unstale.techniques.hooks import CreditContext, Outcome, Techniques

TASK = Task("bits", "train", 0)
TEXTS: Any = None
"""What strategies do with texts, which a tree does not need."""
LENGTH = 3
PREFIXES = [p for n in range(LENGTH) for p in product((0, 1), repeat=n)]
Node = tuple[tuple[int, ...], tuple["Node", ...]]
"""A prefix of tokens and the nodes of its continuations, which are one token longer."""


class Bits:
    """Three binary tokens with random probabilities. Each text has a random reward of 0 or 1."""

    def __init__(self, random: np.random.Generator) -> None:
        logits = random.normal(size=(len(PREFIXES), 2)) * 1.2
        powers = np.exp(logits)
        self.p = powers / powers.sum(1, keepdims=True)
        texts = list(product((0, 1), repeat=LENGTH))
        rewards = (random.random(len(texts)) < 0.4).astype(float)
        self.reward = dict(zip(texts, rewards.tolist(), strict=True))
        if len(set(self.reward.values())) < 2:
            self.reward[texts[0]] = 1 - self.reward[texts[0]]
        self.scores = {step: self._score(*step) for step in product(PREFIXES, (0, 1))}
        """For each prefix and next token the gradient of log p(token | prefix) by all logits."""

    def of(self, prefix: tuple[int, ...]) -> np.ndarray:
        return self.p[PREFIXES.index(prefix)]

    def entropy(self, prefix: tuple[int, ...]) -> float:
        return float(-(self.of(prefix) * np.log(self.of(prefix))).sum())

    @property
    def median_entropy(self) -> float:
        return float(np.median([self.entropy(prefix) for prefix in PREFIXES]))

    def score(self, text: tuple[int, ...], weights: Sequence[float]) -> np.ndarray:
        """Return the weighted sum of the scores of a text's tokens."""
        steps = ((text[:n], text[n]) for n in range(LENGTH))
        return sum(
            (weight * self.scores[step] for weight, step in zip(weights, steps, strict=True)),
            np.zeros_like(self.p),
        )

    def _score(self, prefix: tuple[int, ...], token: int) -> np.ndarray:
        gradient = np.zeros_like(self.p)
        gradient[PREFIXES.index(prefix)] = -self.of(prefix)
        gradient[PREFIXES.index(prefix), token] += 1
        return gradient

    def true_gradient(self) -> np.ndarray:
        total = np.zeros_like(self.p)
        for text, reward in self.reward.items():
            steps = [(text[:n], text[n]) for n in range(LENGTH)]
            p = math.prod(self.of(prefix)[token] for prefix, token in steps)
            total += self.score(text, [p * reward] * LENGTH)
        return total

    def trees(
        self,
        prefix: tuple[int, ...],
        width: Callable[[tuple[int, ...]], int],
        *,
        second: bool = False,
    ) -> list[tuple[float, Node]]:
        """Return every tree with its probability. `width` is the number of branches at a prefix.

        Branches are sorted, as their order makes no difference. With `second`, the second branch of
        two begins with the token that the first one did not sample.
        """
        if len(prefix) == LENGTH:
            return [(1.0, (prefix, ()))]
        one = [
            (self.of(prefix)[token] * p, tree)
            for token in (0, 1)
            for p, tree in self.trees((*prefix, token), width, second=second)
        ]
        found: dict[Node, float] = {}
        for chosen in product(one, repeat=width(prefix)):
            chance, branches = math.prod(p for p, _ in chosen), [tree for _, tree in chosen]
            if second and len(branches) == 2:
                token, other = (tree[0][-1] for tree in branches)
                chance *= (token != other) / self.of(prefix)[other]
            else:
                branches.sort()
            node = (prefix, tuple(branches))
            found[node] = found.get(node, 0.0) + chance
        return [(p, node) for node, p in found.items()]

    def retro(self, by: Callable[[tuple[int, ...]], list[float]]) -> list[tuple[float, Node]]:
        """Return trees with one fork where `by` is largest in the finished first episode."""
        found: dict[Node, float] = {}
        for p, tree in self.trees((), lambda prefix: 1):
            text = next(leaves(tree))
            place = int(np.argmax(by(text)))
            for q, branch in self.trees(text[:place], lambda prefix: 1):
                node: Node = (text[:place], tuple(sorted([line(text, place + 1), branch[1][0]])))
                for n in range(place - 1, -1, -1):
                    node = (text[:n], (node,))
                found[node] = found.get(node, 0.0) + p * q
        return [(p, node) for node, p in found.items()]

    def entropies(self, text: tuple[int, ...]) -> list[float]:
        return [self.entropy(text[:n]) for n in range(LENGTH)]

    def surprises(self, text: tuple[int, ...]) -> list[float]:
        """Return -p of each token. The first one is not forked."""
        return [-1.0, *(-float(self.of(text[:n])[text[n]]) for n in range(1, LENGTH))]


def leaves(tree: Node) -> Iterator[tuple[int, ...]]:
    if not tree[1]:
        yield tree[0]
    for each in tree[1]:
        yield from leaves(each)


def line(text: tuple[int, ...], start: int) -> Node:
    below = (line(text, start + 1),) if start < len(text) else ()
    return (text[:start], below)


def group_of(problem: Bits, roots: Sequence[Node]) -> Group:
    """Return a group whose episodes are the leaves of some trees. The first branch of each fork is
    the rest of the episode, the others are forked from it.
    """
    found: list[Trajectory] = []

    def add(node: Node, fork: Fork | None) -> None:
        number = len(found)
        text, forks = node[0], []
        while node[1]:
            forks += [(branch, Fork(number, len(node[0]))) for branch in node[1][1:]]
            node = node[1][0]
            text = node[0]
        found.append(
            Trajectory(
                (Sampled(text, (-1.0,) * LENGTH, 0),),
                {"reward": problem.reward[text]},
                "done",
                TASK,
                seed=number,
                episode=number,
                fork=fork,
            )
        )
        for branch, place in forks:
            add(branch, place)

    for root in roots:
        add(root, None)
    return Group(TASK, tuple(found))


CONTEXT = CreditContext(0.0, 0, lambda task: task.key)


def estimate(group: Group, rule: Any) -> list[ScoredTrajectory]:
    return TreeAdvantage(TreeAdvantageConfig(rule=rule)).estimate([group], CONTEXT)


Scored = Sequence[tuple[Trajectory, Sequence[float]]]
"""Episodes, and the advantage of each of their tokens."""
Estimator = Callable[[Group, Sequence[Node]], Scored]
"""Advantages of a group whose episodes are the leaves of some trees."""


def of_library(rule: str, *, forced: int = 0) -> Estimator:
    """Return the estimator of the library. Each token counts in its own episode.

    The first `forced` tokens of a fork have no loss.
    """

    def scored(group: Group, _: Sequence[Node]) -> Scored:
        rows = ((each.trajectory, each.advantage) for each in estimate(group, rule))
        return [(item, [0.0] * start(item) + [*row[start(item) :]]) for item, row in rows]

    def start(item: Trajectory) -> int:
        return item.fork.at + forced if item.fork else 0

    return scored


def of_leaves(baseline: Callable[[Group, int], float]) -> Estimator:
    """Return an estimator with the weights of the library: a token counts in every leaf below."""

    def scored(group: Group, roots: Sequence[Node]) -> Scored:
        weights = leaf_weights(group)
        found = []
        for item, root in zip(group.finished, roots_of(group), strict=True):
            advantage = weights[item.episode] * (item.reward - baseline(group, root))
            found.append((item, [advantage] * LENGTH))
        return found

    return scored


def roots_of(group: Group) -> list[int]:
    """Return for each episode the number of the episode from which its tree grew."""
    root: dict[int, int] = {}
    for each in group.finished:
        root[each.episode] = root[each.fork.parent] if each.fork else each.episode
    return list(root.values())


def other_roots(group: Group, root: int) -> float:
    """Return the mean reward of the trees without one of them, with the weights of the library."""
    weights, roots = leaf_weights(group), roots_of(group)
    others = sum(
        weights[each.episode] * each.reward
        for each, own in zip(group.finished, roots, strict=True)
        if own != root
    )
    return others / (len(set(roots)) - 1)


def pooled_leaving_out(group: Group, roots: Sequence[Node]) -> Scored:
    """The baseline of a leaf is the mean of all other leaves. It is N / (N - 1) times `pooled`."""
    factor = len(group.finished) / (len(group.finished) - 1)
    return [
        (item, [factor * each for each in row]) for item, row in of_library("pooled")(group, roots)
    ]


def node_minus_parent(group: Group, roots: Sequence[Node]) -> Scored:
    """A token's advantage is the mean reward below it minus that of its parent, which contains it.

    The parent of a first token is the mean of the trees' means.
    """
    rewards = {each.tokens: each.reward for each in group.finished}

    def mean(node: Node) -> float:
        return float(np.mean([rewards[leaf] for leaf in leaves(node)]))

    def add(node: Node, weight: float, parent: float) -> None:
        for each in node[1]:
            row = [0.0] * LENGTH
            row[len(node[0])] = weight / len(node[1]) * (mean(each) - parent)
            text = next(leaves(each))
            found.append((next(item for item in group.finished if item.tokens == text), row))
            add(each, weight / len(node[1]), mean(each))

    found: list[tuple[Trajectory, list[float]]] = []
    for root in roots:
        add(root, 1.0, float(np.mean([mean(each) for each in roots])))
    return found


Error = tuple[float, float]
"""Relative bias of a mean gradient, and its cosine with the true one."""


def error(found: np.ndarray, true: np.ndarray) -> Error:
    norm = np.linalg.norm
    size = float(norm(found) * norm(true))
    return float(norm(found - true) / norm(true)), float(
        (found * true).sum() / size
    ) if size else 1.0


def errors(
    problem: Bits, one: list[tuple[float, Node]], estimators: Mapping[str, Estimator]
) -> dict[str, Error]:
    """Return the error of each estimator, over all groups of two trees of `one`."""
    total = {name: np.zeros_like(problem.p) for name in estimators}
    for (p, first), (q, second) in combinations_with_replacement(one, 2):
        chance = p * q if first is second else 2 * p * q  # in both orders
        group = group_of(problem, [first, second])
        for name, estimator in estimators.items():
            for item, row in estimator(group, [first, second]):
                total[name] += problem.score(item.tokens, [chance / 2 * each for each in row])
    true = problem.true_gradient()
    return {name: error(found, true) for name, found in total.items()}


def pruned(
    problem: Bits, one: list[tuple[float, Node]], estimator: Estimator, *, spare: float
) -> Error:
    """Return the error with one tree, whose leaves with an unlikely second token are pruned."""
    total = np.zeros_like(problem.p)
    for p, root in one:
        group = group_of(problem, [root])
        low = [problem.of(each.tokens[:1])[each.tokens[1]] < 0.5 for each in group.trajectories]
        for kept in product((True, False), repeat=sum(low)):
            chance, found = p, []
            draws = iter(kept)
            for each, is_low in zip(group.trajectories, low, strict=True):
                if is_low and next(draws):
                    chance *= spare
                    each = replace(each, facts={SURVIVAL: 1 / spare} if spare else {})
                elif is_low:
                    chance *= 1 - spare
                    facts = {SURVIVAL: 0.0} if spare else {}
                    each = replace(each, stop="pruned", rewards={}, facts=facts)
                found.append(each)
            if not chance:
                continue
            for item, row in estimator(replace(group, trajectories=tuple(found)), [root]):
                total += problem.score(item.tokens, [chance * each for each in row])
    return error(total, problem.true_gradient())


LOO: Mapping[str, Estimator] = {"loo": of_library("loo")}
ESTIMATORS: Mapping[str, Estimator] = {
    **LOO,
    "baseline of the other roots only": of_leaves(other_roots),
    "pooled, leave one out": pooled_leaving_out,
    "pooled": of_library("pooled"),
    "depth": of_library("depth"),
    "node minus parent": node_minus_parent,
}


def table(count: int) -> dict[str, list[Error]]:
    """Return the errors of each rule in `count` random problems, with forks at a large entropy."""
    random = np.random.default_rng(57)
    rows: dict[str, list[Error]] = {}
    for _ in range(count):
        problem = Bits(random)
        wide = {p for p in PREFIXES if p and problem.entropy(p) > problem.median_entropy}
        one = problem.trees((), lambda p, wide=wide: 2 if p in wide else 1)
        found = errors(problem, one, ESTIMATORS)
        found["peaks"] = errors(problem, problem.retro(problem.entropies), LOO)["loo"]
        found["unlikely"] = errors(problem, problem.retro(problem.surprises), LOO)["loo"]
        other = problem.trees((), lambda p, wide=wide: 2 if p in wide else 1, second=True)
        rule = {"second": of_library("loo", forced=1)}
        found |= errors(problem, other, rule)
        found["spare 0.5"] = pruned(problem, one, LOO["loo"], spare=0.5)
        found["spare 0"] = pruned(problem, one, LOO["loo"], spare=0.0)
        without = of_leaves(lambda group, root: 0.0)
        found["spare 0, no baseline"] = pruned(problem, one, without, spare=0.0)
        for name, each in found.items():
            rows.setdefault(name, []).append(each)
    return rows


def test_leave_one_out_over_branches_is_unbiased_if_forks_look_at_the_past_only() -> None:
    found = {name: bias for name, ((bias, _),) in table(1).items()}
    exact = {"loo", "baseline of the other roots only", "spare 0.5"}
    assert {name for name, bias in found.items() if bias < 1e-12} == exact
    assert min(bias for name, bias in found.items() if name not in exact) > 0.05


@pytest.mark.costly
def test_the_biases_are_those_of_the_table() -> None:
    """Relative bias and cosine of the mean gradient, by enumeration of all trees.

    The bias of `spare 0` is 0.803 if the leaves that are left have no baseline. `loo` has one, the
    mean of the other branches of a fork, which changes the mean of a biased estimator: to 0.721.
    """
    rows = {name: np.array(values) for name, values in table(12).items()}
    found = {name: tuple(row.mean(0).round(3).tolist()) for name, row in rows.items()}
    # Without a leaf left, a problem has no gradient and no cosine.
    biases = {name: found.pop(name)[0] for name in ("spare 0", "spare 0, no baseline")}
    assert biases == {"spare 0": 0.721, "spare 0, no baseline": 0.803}
    biases |= {name: bias for name, (bias, _) in found.items()}
    for option, (told, _) in TREE_BIASES.items():
        name = option.rpartition(".")[2].removeprefix("rule ").removeprefix("branch ")
        assert told == biases[name], option
    assert found == {
        "loo": (0.0, 1.0),
        "baseline of the other roots only": (0.0, 1.0),
        "pooled, leave one out": (0.258, 0.976),
        "pooled": (0.430, 0.969),
        "depth": (0.575, 0.979),
        "node minus parent": (0.710, 0.716),
        "peaks": (0.185, 0.987),
        "unlikely": (0.162, 0.992),
        "second": (0.137, 0.981),
        "spare 0.5": (0.0, 1.0),
    }


def test_a_term_of_every_token_has_the_mean_of_independent_episodes() -> None:
    """KL and entropy weight a token by 1 / branches at the forks before it."""
    problem = Bits(np.random.default_rng(57))
    value = {step: math.sin(i) for i, step in enumerate(product(PREFIXES, (0, 1)))}
    mean = found = 0.0
    for text in problem.reward:
        steps = [(text[:n], text[n]) for n in range(LENGTH)]
        chance = math.prod(problem.of(prefix)[token] for prefix, token in steps)
        mean += chance * sum(value[step] for step in steps)
    for p, root in problem.trees((), lambda prefix: len(prefix) + 1):
        batch = collate(
            [ScoredTrajectory(each, (1.0,)) for each in shared(group_of(problem, [root]))]
        )
        assert batch.shared and batch.count(batch.sampled)[0] == LENGTH
        for (start, end), owned in zip(batch.spans(), batch.sampled.split(LENGTH), strict=True):
            text = tuple(batch.tokens[start:end].tolist())
            for n in owned.nonzero().squeeze(1).tolist():
                found += p * batch.shared.reach[start + n].item() * value[text[:n], text[n]]
    assert found == pytest.approx(mean, rel=1e-6)


def shared(group: Group) -> Sequence[Trajectory]:
    """Return the episodes of a group with their parents' tokens as SHARED context."""
    found: list[Trajectory] = []
    for each in group.trajectories:
        pieces = each.pieces
        if each.fork:
            own = Sampled(each.tokens[each.fork.at :], (-1.0,) * (LENGTH - each.fork.at), 0)
            pieces = (*each.fork.prefix_of(found[each.fork.parent].pieces), own)
        found.append(replace(each, pieces=pieces))
    return found


INLINE = {"engine.top_p": 0.9, "old_logps.route": "interp_prox_loglinear"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"techniques": "tree"}, "needs the technique tree_advantage"),
        ({"techniques": "tree_advantage"}, "needs the technique tree"),
        ({"schedule.group_size": 9}, "must be a multiple of 2 and at least 4, got 9"),
        ({"schedule.group_size": 2}, "must be a multiple of 2 and at least 4, got 2"),
        ({"techniques": "tree tree_advantage allocate"}, "cannot be used with allocate"),
        ({"techniques": "tree tree_advantage replay"}, "cannot be used with replay"),
        ({"techniques": "tree tree_advantage truncated"}, "cannot be used with truncated"),
        ({"techniques": "tree tree_advantage novelty"}, "cannot be used with novelty"),
        ({"tree.turn": 11}, "must be at most rollout.max_turns = 10, got 11"),
        ({"objective.loss_type": "gspo", "engine.top_p": 0.9}, "from the whole vocabulary"),
        ({"techniques": "tree tree_advantage ess_lr", "engine.top_k": 5}, "no kept sets"),
        (INLINE | {"correction.unit": "sequence"}, "in every training pass, without its kept sets"),
        (INLINE | {"correction.token_veto_threshold": 1e-4}, "or correction.token_veto_threshold"),
        ({"objective.loss_aggregation": "sequence_mean"}, "than sequence_mean"),
        ({"trainer.routing_replay": True}, "needs trainer.routing_replay = false"),
    ],
)
def test_what_a_tree_would_make_wrong_is_refused_with_the_reason(
    options: dict[str, object], told: str
) -> None:
    fits = {"techniques": "tree tree_advantage", "schedule.group_size": 8}
    override(RunConfig(recipe=""), fits | INLINE)
    override(
        RunConfig(recipe=""), fits | {"objective.loss_type": "gspo", "correction.unit": "turn"}
    )
    with pytest.raises(ConfigError, match=told):
        override(RunConfig(recipe=""), fits | options)


def test_each_root_has_as_many_forks_as_its_group_was_given_episodes() -> None:
    tree = Tree(TreeConfig(branch="unlikely", places=3, continuations=2))
    assert tree.roots(14) == 2
    pieces = (
        ContextPiece((1, 2)),
        Sampled((3, 4, 5), (-0.1, -3.0, -0.2), 0),
        ContextPiece((6,)),
        Sampled((7, 8), (-2.0, -1.0), 0),
    )
    trunk = Trajectory(pieces, {"reward": 1.0}, "done", TASK, seed=0, episode=9)
    forks = asyncio.run(tree.forks([[trunk, Failure(TASK, "begin", "broken")]], TEXTS))
    assert forks == [Fork(9, at) for at in (3, 6, 7, 3, 6, 7)]
    turns = Tree(TreeConfig(turn=2, continuations=3))
    assert turns.roots(8) == 2 and asyncio.run(turns.forks([[trunk]], TEXTS)) == [Fork(9, 6)] * 3
    assert asyncio.run(Tree(TreeConfig(turn=3)).forks([[trunk]], TEXTS)) == []
    assert asyncio.run(turns.forks([[trunk], [trunk]], TEXTS)) == [], "there is one round of forks"


def test_14_episodes_forked_at_the_largest_entropies_have_57_percent_of_the_tokens() -> None:
    """2 trunks, 3 places, 2 continuations: forks are halfway on average."""
    tree = Tree(TreeConfig(branch="peaks", places=3, continuations=2))
    length, peaks = 80, (20, 40, 60)
    entropy = np.array([2.0 if at in peaks else 0.5 for at in range(length)], np.float32)
    two = np.zeros((length, 2))
    signals = Signals(entropy, two.astype(np.int32), two.astype(np.float32))
    own = Sampled((7,) * length, (-9.0, *[-1.0] * (length - 1)), 0, signals=signals)
    trunks = [
        Trajectory((ContextPiece((1,)), own), {"r": 1.0}, "done", TASK, seed=i, episode=i)
        for i in range(tree.roots(14))
    ]
    forks = asyncio.run(tree.forks([trunks], TEXTS))
    assert sorted({each.at - 1 for each in forks if each}) == list(peaks)
    sampled = 2 * length + sum(1 + length - each.at for each in forks if each)
    assert 2 + len(forks) == 14 and round(sampled / (14 * length), 2) == 0.57


def test_pruned_gradients_are_those_of_some_levels_or_of_middling_episodes() -> None:
    problem = Bits(np.random.default_rng(57))
    roots = [tree for _, tree in problem.trees((), lambda prefix: 1 + (len(prefix) == 1))]
    group = group_of(problem, roots[:1] + roots[-1:])
    rewards = (0.0, 0.5, 1.0, 0.25)
    group = replace(
        group,
        trajectories=tuple(
            replace(each, rewards={"r": reward})
            for each, reward in zip(group.trajectories, rewards, strict=True)
        ),
    )

    def advantages(version: int, **options: Any) -> list[tuple[float, ...]]:
        technique = TreeAdvantage(TreeAdvantageConfig(rule="depth", **options))
        context = CreditContext(0.0, version, lambda task: task.key)
        return [each.advantage for each in technique.estimate([group], context)]

    whole = advantages(0)
    assert all(advantage for each in whole for advantage in each[1:])
    for version, kept in ((0, slice(0, 1)), (1, slice(1, 3)), (2, slice(0, 1))):
        for found, full in zip(advantages(version, kept_depths=0.5), whole, strict=True):
            expected = [0.0] * LENGTH
            expected[kept] = full[kept]
            assert list(found) == expected
    extremes = advantages(0, kept_leaves="extremes")
    for number, (found, full) in enumerate(zip(extremes, whole, strict=True)):
        trained = rewards[number] in (0.0, 1.0)
        assert found[1:] == (full[1:] if trained else (0.0, 0.0)) and found[0] == full[0]


def test_the_reward_of_a_place_is_fused_by_the_probabilities_of_its_branches() -> None:
    """The branches were sampled with 0.6 and 0.2, so the place before them is worth 0.75."""

    def episode(number: int, p: Sequence[float], reward: float, fork: Fork | None = None) -> Any:
        logps = tuple(map(math.log, p))
        skip = (ContextPiece((5,), Provenance.SHARED),) if fork else ()
        pieces = (*skip, Sampled((5, 6)[-len(p) :], logps, version=0))
        return Trajectory(pieces, {"r": reward}, "done", TASK, 0, number, fork=fork)

    whole = Group(
        TASK,
        (
            episode(0, (0.9, 0.6), 1.0),
            episode(1, (0.5, 0.5), 0.0),
            episode(2, (0.5, 0.5), 1.0),
            episode(3, (0.2,), 0.0, Fork(0, 1)),
        ),
    )
    for fusion, value in (("leaves", 0.5), ("path", 0.75)):
        config = override(
            RunConfig(recipe="mine"),
            {
                "techniques": "tree tree_advantage",
                "schedule.group_size": 4,
                "tree_advantage.rule": "depth",
                "tree_advantage.fusion": fusion,
            },
        )
        technique = Techniques.of(config).estimator
        assert technique
        found = technique.estimate([whole], CreditContext(0.0, 0, lambda task: task.key))
        values = np.array([value, 0.0, 1.0])
        wanted = (values - values.mean()) / values.std()
        assert [each.advantage[0] for each in found[:3]] == pytest.approx(wanted)
        assert found[0].advantage[1] == pytest.approx(3 / 4)  # of the rewards 1, 0, 1 and 0


def forked(*, turn_rewards: Sequence[tuple[float, ...]] = ((), (), (), ())) -> Group:
    """Return two episodes of two turns, and two forks of the first one before its second reply."""
    shared = ContextPiece((3,), Provenance.SHARED)
    first = Sampled((3,), (-0.5,), 0)
    rest = (ContextPiece((4,)), Sampled((5,), (-1.0,), 0))
    episodes = [
        Trajectory(
            (ContextPiece((2,)), shared if fork else first, *rest),
            {"reward": reward},
            "done",
            TASK,
            seed=number,
            episode=number,
            turn_rewards=rewards,
            fork=fork,
        )
        for number, (fork, reward, rewards) in enumerate(
            zip(
                [None, None, Fork(0, 3), Fork(0, 3)],
                (1.0, 0.0, 1.0, 1.0),
                turn_rewards,
                strict=True,
            )
        )
    ]
    return Group(TASK, tuple(episodes), added=frozenset({2, 3}))


def test_equal_rewards_are_found_though_forked_episodes_have_fewer_turn_rewards() -> None:
    group = forked(turn_rewards=((0.5, 0.5), (0.5, 0.5), (0.5,), (0.5,)))
    assert not group.has_equal_rewards
    equal = tuple(replace(each, rewards={"reward": 1.0}) for each in group.trajectories)
    assert replace(group, trajectories=equal).has_equal_rewards
    unforked = tuple(replace(each, fork=None) for each in equal)
    assert not replace(group, trajectories=unforked).has_equal_rewards


class Observing:
    """A technique that keeps what it is told of the groups that were trained on."""

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = outcomes

    def state(self) -> dict[str, object]:
        return {}

    def restore(self, state: object) -> None: ...


def test_a_task_is_as_hard_as_its_episodes_with_a_beginning_of_their_own_say() -> None:
    seen = Observing()
    Techniques({"seen": seen}).consumed(
        [forked()], 1, lag=torch.zeros_like, identify=lambda task: task.key
    )
    (outcome,) = seen.outcomes
    assert outcome.rewards == (1.0, 0.0) and outcome.added == 0
    assert outcome.success_turns == (2,) and outcome.tokens == 6


def test_the_first_replies_of_a_group_are_those_that_were_sampled_first() -> None:
    measured = Balance(BalanceConfig()).measure([forked()], [forked()], CONTEXT)
    roots = replace(forked(), trajectories=forked().trajectories[:2])
    assert measured == Balance(BalanceConfig()).measure([roots], [roots], CONTEXT)
    assert measured["balance/sampled_mass"] == pytest.approx(math.exp(-0.5))


@pytest.mark.parametrize("rule", ["loo", "pooled", "depth"])
def test_a_group_whose_episodes_were_all_pruned_has_no_advantages(rule: Any) -> None:
    pieces = (ContextPiece((1,)), Sampled((2,), (-0.1,), 0))
    pruned = [
        Trajectory(pieces, {}, "pruned", TASK, 0, episode=number, facts={SURVIVAL: 0.0})
        for number in range(2)
    ]
    advantage = TreeAdvantage(TreeAdvantageConfig(rule=rule))
    context = CreditContext(0.0, 0, lambda task: task.key)
    scored = advantage.estimate([Group(TASK, tuple(pruned))], context)
    assert all(set(each.advantage) == {0.0} for each in scored)


def test_the_last_reply_of_an_episode_forked_within_it_is_whole() -> None:
    class Tokens:
        def parse(self, tokens: Sequence[int]) -> tuple[int, ...]:
            return tuple(tokens)

    shared = ContextPiece((7, 8, 4), Provenance.SHARED)
    forked = Trajectory(
        (ContextPiece((1,)), shared, Sampled((2, 9), (-0.1, -0.1), 0)), {}, "done", TASK, 0
    )
    chat: Any = Tokens()
    assert last_reply(forked, chat) == (7, 8, 4, 2, 9)
