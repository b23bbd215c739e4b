"""Trees that grow and are pruned while episodes run: rules by hand, and the mean gradient.

The mean gradient is that of every possible run of a group: the engine's draws and those of pruning
are enumerated, with the real rollout, rounds and advantages.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import pytest

from unstale.config import ConfigError, EngineConfig, RolloutConfig, RunConfig
from unstale.config.options import override
from unstale.engines import SamplingParams
from unstale.engines.scripted import ScriptedEngine
from unstale.envs import Message, Turn
from unstale.records import (
    SURVIVAL,
    ContextPiece,
    EpisodeRecord,
    Fork,
    Group,
    GroupRequest,
    Placed,
    Provenance,
    Sampled,
    Task,
    Trajectory,
    first_tokens,
)
from unstale.research.techniques import live_tree
from unstale.research.techniques.live_tree import ForecastTree, LiveTree
from unstale.research.techniques.tree import TreeConfig
from unstale.research.techniques.tree_advantage import TreeAdvantage, TreeAdvantageConfig
from unstale.rollout import rounds as rounds_module
from unstale.rollout.episode import Rollout
from unstale.rollout.generator import Generator
from unstale.rollout.rounds import Rounds
from unstale.signals import Signals
from unstale.techniques.hooks import CreditContext, Leaf

TASK = Task("bits", "train", 0)
PROMPT = 2
"""Number of tokens of the prompt."""
STOP = 12


@dataclass
class Draws:
    """The draws of one run, and the next run's beginning: every run is made once.

    A draw is known by its round, its episode's seed and its place. Draws of one round depend only
    on draws that are smaller in this order, whichever episode happens to go on first.
    """

    planned: dict[tuple[float, ...], int] = field(default_factory=dict)
    made: dict[tuple[float, ...], tuple[int, int]] = field(default_factory=dict)
    p: float = 1.0
    round: int = 0

    def draw(self, p: Sequence[float], *place: float) -> int:
        key = (self.round, *place)
        assert key not in self.made
        chosen = self.planned.get(key, 0)
        self.made[key] = chosen, len(p)
        self.p *= p[chosen]
        return chosen

    def following(self) -> "Draws | None":
        made = sorted(self.made.items())
        while made and made[-1][1][0] + 1 == made[-1][1][1]:
            made.pop()
        planned = {key: chosen for key, (chosen, _) in made}
        if made:
            planned[made[-1][0]] += 1
        return Draws(planned) if made else None


class Words:
    """Replies of 2 or 3 tokens with random probabilities and rewards."""

    longest = 3

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self._p: dict[tuple[int, ...], np.ndarray] = {}
        for prefix in self._prefixes():
            logits = 1.2 * random.normal(size=len(self.choices(prefix)))
            self._p[prefix] = np.exp(logits) / np.exp(logits).sum()
        self.reward = {text: float(random.random() < 0.4) for text, _ in self.texts()}

    def _prefixes(self) -> list[tuple[int, ...]]:
        return [(), (10,), (11,), (10, 10), (11, 10)]

    def choices(self, prefix: tuple[int, ...]) -> tuple[int, ...]:
        return (10, STOP) if len(prefix) == 1 else (10, 11)

    def of(self, prefix: tuple[int, ...]) -> np.ndarray:
        return self._p[prefix]

    def texts(self, prefix: tuple[int, ...] = (), p: float = 1.0) -> Iterator[tuple[Any, float]]:
        if len(prefix) == 3 or prefix[-1:] == (STOP,):
            yield prefix, p
            return
        for token, q in zip(self.choices(prefix), self.of(prefix).tolist(), strict=True):
            yield from self.texts((*prefix, token), p * q)

    def score(self, prefix: tuple[int, ...], token: int) -> dict[tuple[int, ...], np.ndarray]:
        gradient = -self.of(prefix)
        gradient[self.choices(prefix).index(token)] += 1
        return {prefix: gradient}

    def signals(self, tokens: Sequence[int]) -> Signals:
        p = self.of(tuple(tokens[PROMPT:]))
        order = np.argsort(-p)[:2]
        ids = np.array([self.choices(tuple(tokens[PROMPT:]))])[:, order]
        entropy = np.array([-(p * np.log(p)).sum()], np.float32)
        return Signals(entropy, ids.astype(np.int32), np.log(p[order])[None].astype(np.float32))


class Gradient(dict[tuple[int, ...], np.ndarray]):
    def __missing__(self, key: tuple[int, ...]) -> float:
        return 0.0

    def add(self, scale: float, other: Mapping[tuple[int, ...], np.ndarray]) -> None:
        for prefix, value in other.items():
            self[prefix] = self[prefix] + scale * value

    def distance(self, other: "Gradient") -> float:
        mine = np.concatenate([self[key] + 0 * other[key] for key in sorted(other)])
        true = np.concatenate([other[key] for key in sorted(other)])
        return float(np.linalg.norm(mine - true) / np.linalg.norm(true))


class WordChat:
    stop_tokens = (STOP,)
    longest_token = 8

    def encode_prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return (5, 6)

    def parse(self, tokens: Sequence[int]) -> Message:
        return Message("assistant", " ".join(map(str, tokens)))


class WordTasks:
    name, tools = "words", ()

    def __init__(self, words: Words) -> None:
        self._words = words

    def env(self, task: Task, seed: int) -> "WordTasks":
        return self

    async def begin(self) -> Turn:
        return Turn((Message("user", "go"),))

    async def step(self, reply: Message) -> Turn:
        text = tuple(map(int, reply.content.split()))
        return Turn((), done=True, rewards={"r": self._words.reward[text]})


class Seeded(Draws):
    """Draws of a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = Random(seed)

    def draw(self, p: Sequence[float], *place: float) -> int:
        return self._random.choices(range(len(p)), p)[0]


async def generator_of(words: Words, draws: Draws) -> Generator:
    def script(tokens: Sequence[int], params: SamplingParams) -> list[int]:
        text = tuple(tokens[PROMPT:])
        reply: list[int] = []
        while len(reply) < params.max_tokens and STOP not in reply:
            prefix = (*text, *reply)
            place = params.seed, len(prefix)
            reply.append(words.choices(prefix)[draws.draw(words.of(prefix).tolist(), *place)])
        return reply

    engine = ScriptedEngine(script, signals=words.signals)
    await engine.start()
    await engine.load({}, version=0)
    await engine.resume()
    chat: Any = WordChat()
    return Generator(engine, chat, EngineConfig(max_completion_tokens=words.longest), signals=True)


async def one_run(
    words: Words, strategy: LiveTree, size: int, draws: Draws, seed: int = 0
) -> Group:
    generator = await generator_of(words, draws)
    tasks: Any = WordTasks(words)
    roots = strategy.roots(size)
    request = GroupRequest(0, TASK, seed, 0, sizes=(roots,))
    rounds = Rounds(strategy, request, size, lambda number, row: None)
    return await Rollout(generator, tasks, RolloutConfig()).group(
        request, size=roots, rounds=rounds
    )


def runs(words: Words, options: TreeConfig, size: int) -> Iterator[tuple[float, Group]]:
    """Yield every group that the options can lead to, with its probability."""
    draws: Draws | None = Draws()
    patch = pytest.MonkeyPatch()
    while draws:
        current = draws

        class Drawn:
            """Random numbers below and above a probability of 1/2."""

            def __init__(self, seed: int, current: Draws = current) -> None:
                self._draws, self._number = current, 0
                current.round += 1

            def random(self) -> float:
                self._number += 1
                return 0.25 + 0.5 * self._draws.draw((0.5, 0.5), -1, self._number)

        patch.setattr(rounds_module, "Random", Drawn)
        group = asyncio.run(one_run(words, LiveTree(options), size, current))
        yield current.p, group
        draws = current.following()
    patch.undo()


CONTEXT = CreditContext(0.0, 0, lambda task: task.key)


def own_tokens(trajectory: Trajectory) -> list[bool]:
    return [isinstance(piece, Sampled) for piece in trajectory.pieces for _ in piece.tokens]


def bias(words: Words, options: TreeConfig, size: int) -> tuple[float, list[Group]]:
    """Return the distance of the mean gradient to the true one, and the groups."""
    true, mean, total = Gradient(), Gradient(), 0.0
    for text, p in words.texts():
        for n, token in enumerate(text):
            true.add(p * words.reward[text], words.score(text[:n], token))
    groups = []
    for p, group in runs(words, options, size):
        total += p
        groups.append(group)
        for scored in TreeAdvantage(TreeAdvantageConfig()).estimate([group], CONTEXT):
            for at, is_own in enumerate(own_tokens(scored.trajectory)):
                if is_own:
                    tokens = scored.trajectory.tokens
                    score = words.score(tokens[PROMPT:at], tokens[at])
                    mean.add(p / options.roots * scored.advantage[at], score)
    assert total == pytest.approx(1)
    return mean.distance(true), groups


def live(**options: Any) -> TreeConfig:
    return TreeConfig(every=1, roots=2, **options)


def test_forks_at_a_large_entropy_while_episodes_run_do_not_bias_the_gradient() -> None:
    found, groups = bias(Words(6), live(branch="entropy", threshold=0.5), size=3)
    assert found < 1e-6
    places = {each.fork.at - PROMPT for group in groups for each in group.trajectories if each.fork}
    assert len(places) > 1 and 0 not in places


def test_an_episode_that_fails_before_its_recorded_places_does_not_end_a_resumed_run() -> None:
    """Its decisions, and the forks that they began, are repeated without it."""
    words = Words(0)
    options = live(branch="entropy", threshold=0.01, continuations=1)

    class Failing(WordTasks):
        failures = 0

        async def begin(self) -> Turn:
            if self.failures:
                self.failures -= 1
                raise RuntimeError("for once")
            return await super().begin()

    async def run_twice() -> Group:
        tasks: Any = Failing(words)
        generator = await generator_of(words, Seeded(0))
        rows: list[Mapping[str, Any]] = []
        request = GroupRequest(0, TASK, 0, 0, sizes=(2,))
        made = Rounds(LiveTree(options), request, 4, lambda number, row: rows.append(row))
        group = await Rollout(generator, tasks, RolloutConfig()).group(request, size=2, rounds=made)
        forked = next(number for number, row in enumerate(rows) if row["forks"])
        pieces = [first_tokens(each.pieces, PROMPT + forked + 1) for each in group.trajectories[:2]]
        request = replace(
            request,
            past=tuple(EpisodeRecord(episode, pieces[episode], None) for episode in (0, 1)),
            rounds=tuple(rows[: forked + 1]),
            begun=True,
        )
        tasks.failures = 1
        rollout = Rollout(generator, tasks, RolloutConfig())
        rollout.restore(2, ())
        made = Rounds(LiveTree(options), request, 4, lambda number, row: None)
        return await rollout.group(request, size=2, rounds=made)

    group = asyncio.run(run_twice())
    assert len(group.failures) == 1 and len(group.trajectories) == 3
    assert [each.fork is None for each in group.trajectories] == [True, False, False]


def least_sure(self: LiveTree, going: Sequence[Leaf]) -> list[Leaf]:
    """Return the least confident of the running episodes: a rule that compares them."""
    sure = {leaf.index: live_tree.confidence(live_tree.rows_of(leaf)) for leaf in going}
    return [leaf for leaf in going if len(sure) > 1 and sure[leaf.index] == min(sure.values())]


def test_pruning_by_a_draw_does_not_bias_the_gradient_and_dropping_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LiveTree, "_unsure", least_sure)
    options = live(branch="none", prune="confidence", spare=0.5)
    found, groups = bias(Words(6), options, size=2)
    assert found < 1e-6
    stops = {each.stop for group in groups for each in group.trajectories}
    assert stops == {"done", "cut_reply", "pruned"}
    assert bias(Words(6), replace(options, spare=0.0), size=2)[0] > 0.05


@pytest.mark.costly
def test_forks_and_pruning_together_do_not_bias_the_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LiveTree, "_unsure", least_sure)
    options = live(branch="entropy", threshold=0.5, prune="confidence", spare=0.5)
    found, groups = bias(Words(6), options, size=3)
    assert found < 1e-6
    forked = [each for group in groups for each in group.trajectories if each.fork]
    assert {each.facts.get(SURVIVAL, 1.0) for each in forked} == {2.0, 4.0}


def leaf(index: int, *entropies: float, fork: Fork | None = None, p: float = 0.5) -> Leaf:
    """Return a waiting episode with these entropies, and `p` of the likeliest token."""
    n = len(entropies)
    logp = np.log(np.array([[p, (1 - p) * 0.9]] * n, np.float32)).reshape(n, 2)
    signals = Signals(np.array(entropies, np.float32), np.array([[7, 9]] * n, np.int32), logp)
    tokens = (7,) * n
    pieces = (ContextPiece((5, 6)), Sampled(tokens, (-1.0,) * n, 0, signals=signals))
    return Leaf(index, index, pieces, fork, going=True)


def tree(**options: Any) -> LiveTree:
    return LiveTree(TreeConfig(**{"roots": 2, **options}))


def decided(strategy: LiveTree, leaves: Sequence[Leaf], left: int = 8) -> list[tuple[int, int]]:
    """Return the parents and places of the forks of a round, in tokens after the prompt."""
    forks = strategy.decide(leaves, left, Random(0)).forks
    return [(each.parent, each.at - PROMPT) for each in forks]


def test_a_fork_is_before_the_first_token_with_a_large_entropy_since_the_last_place() -> None:
    strategy = tree(branch="entropy", every=4, threshold=1.0)
    before = (2.0, 0.1, 0.1, 0.1)
    assert decided(strategy, [leaf(0, *before, 0.2, 1.5, 1.9, 0.1), leaf(1, *before)]) == [(0, 5)]
    assert decided(strategy, [leaf(0, *before, 0.2, 1.5, 1.9, 0.1)], left=0) == []


def test_the_width_of_a_fork_grows_with_entropy_and_falls_with_confidence() -> None:
    widths = [
        [live_tree.echo_width(4, h, c) for h in (0.0, 0.25, 0.5, 0.75, 1.0)] for c in (0, 0.4, 0.8)
    ]
    assert widths == [[1, 1, 2, 3, 4], [1, 1, 1, 2, 2], [1, 1, 1, 1, 1]]
    assert all(row == sorted(row) for row in widths)


def test_no_tree_has_more_than_half_of_the_group_after_a_chain_of_large_entropies() -> None:
    strategy = tree(branch="confidence", every=1, threshold=0.5, continuations=7)
    leaves = [leaf(0, 3.0, p=0.01), leaf(1, 0.0, p=0.99)]
    for place in range(1, 6):
        left = 16 - len(leaves)
        for parent, at in decided(strategy, leaves, left)[:left]:
            fork = Fork(parent, at + PROMPT)
            leaves.append(leaf(len(leaves), *[3.0] * place, fork=fork, p=0.01))
        longer = leaf(0, *[3.0] * (place + 1), p=0.01).pieces
        leaves = [replace(each, pieces=longer) if each.index != 1 else each for each in leaves]
    assert len(leaves) == 9, "a tree of 8, and the other root"


def test_the_numbers_of_aepo_are_those_by_hand() -> None:
    assert [live_tree.aepo_roots(16, difference) for difference in (0, 2, -2)] == [9, 12, 5]
    assert live_tree.aepo_forks(0.5, 0.0, 0) and not live_tree.aepo_forks(0.49, 0.0, 0)
    assert live_tree.aepo_forks(0.4, 0.5, 0) and not live_tree.aepo_forks(0.5, 0.0, 1)
    assert not live_tree.aepo_forks(1.0, 100.0, 20), "a chain of 20 forks ends"


def turns(*replies: float) -> tuple[Any, ...]:
    """Return an episode with a tool call in each reply, of two tokens with this entropy."""
    pieces: list[Any] = []
    for entropy in replies:
        pieces += leaf(0, entropy, entropy).pieces
    return tuple(pieces)


def test_the_first_reply_to_a_tool_decides_how_many_episodes_begin() -> None:
    strategy = tree(branch="tool", every=2, roots=1)
    first = Leaf(0, 0, turns(2.0), going=True)
    assert strategy.decide([first], 15, Random(0)).fresh == 0
    second = replace(first, pieces=turns(2.0, 2.0))
    assert strategy.decide([second], 15, Random(0)).fresh == 8  # 9 of 16 begin anew
    assert strategy.decide([replace(second, ended=True)], 15, Random(0)).fresh == 15


def test_forks_at_replies_to_tools_are_after_the_tokens_whose_entropy_decides() -> None:
    strategy = tree(branch="tool", every=2)
    surely = replace(leaf(0), pieces=turns(0.0, 20.0))
    assert decided(strategy, [surely]) == [(0, 6)]
    assert decided(strategy, [replace(surely, pieces=turns(20.0, 0.0))]) == []
    assert decided(strategy, [replace(surely, pieces=turns(20.0))]) == [], "no tool yet"


def test_a_fork_begins_with_the_other_one_of_two_likely_tokens() -> None:
    strategy = tree(branch="second", every=3, least=0.2, margin=0.3)
    found = strategy.decide([leaf(0, 1.0, 1.0, 1.0)], 8, Random(0)).forks
    assert [(each.at, each.text[0].tokens, each.text[0].provenance) for each in found] == [
        (3, (9,), Provenance.FORCED)
    ]
    for options in ({"least": 0.5}, {"margin": 0.02}):
        strategy = tree(branch="second", every=3, **options)
        assert not strategy.decide([leaf(0, 1.0, 1.0, 1.0)], 8, Random(0)).forks


def test_a_fork_that_goes_on_like_its_parent_is_pruned() -> None:
    strategy = tree(branch="second", every=4, prune="similar", spare=0.5)
    parent = leaf(0, *[0.0] * 8)
    same = leaf(1, *[0.0] * 8, fork=Fork(0, 4))
    other = Sampled((1, 2, 3, 4, 5, 8), (-1.0,) * 6, 0)
    different = replace(
        same, index=2, pieces=(ContextPiece((5, 6)), Sampled((7, 7), (-1.0,) * 2, 0), other)
    )
    assert strategy.decide([parent, same, different], 0, Random(0)).survival == {1: 0.5}


def test_the_least_confident_quarter_at_two_places_is_pruned() -> None:
    strategy = tree(branch="none", roots=4, every=2, prune="confidence")
    sure = [leaf(i, *[0.0] * 4, p=0.9 - i / 10) for i in range(4)]
    assert strategy.decide(sure, 0, Random(0)).survival == {3: 0.25}
    early = [leaf(i, *[0.0] * 2, p=0.9 - i / 10) for i in range(4)]
    assert strategy.decide(early, 0, Random(0)).survival == {}


class Graded(dict[tuple[int, ...], float]):
    """Rewards of replies: 1 if the last token is 10."""

    def __missing__(self, text: tuple[int, ...]) -> float:
        return float(text[-1:] == (10,))


class Topics(Words):
    """Replies of 24 tokens with a choice of two at every eighth, on which the next ones depend."""

    longest, every = 24, 8

    def __init__(self) -> None:
        self.reward = Graded()

    def choices(self, prefix: tuple[int, ...]) -> tuple[int, ...]:
        return (10, 11, 13, 14, 15, 16)

    def of(self, prefix: tuple[int, ...]) -> np.ndarray:
        place = len(prefix) % self.every
        topic = prefix[self.every // 2 :: self.every]
        liked = Random(str((topic, len(prefix)))).sample(range(6), 2)
        p = np.full(6, 0.005)
        p[liked] = (0.52, 0.46) if place == self.every // 2 else (0.975, 0.005)
        return p / p.sum()


def own_length(group: Group) -> int:
    """Return the number of tokens that were computed for a group: sampled, or put at a fork."""
    return sum(
        len(piece.tokens)
        for each in group.trajectories
        for piece in each.pieces
        if isinstance(piece, Sampled | Placed)
    )


def answers_per_1000(options: TreeConfig) -> float:
    """Return the number of different replies of groups of 8 to 1,000 tokens, of 40 groups."""
    answers = tokens = 0
    for seed in range(40):
        group = asyncio.run(one_run(Topics(), LiveTree(options), 8, Seeded(seed), seed))
        answers += len({each.tokens for each in group.trajectories if each.stop != "pruned"})
        tokens += own_length(group)
    return 1000 * answers / tokens


def test_forks_with_the_other_likely_token_give_more_different_replies_a_token() -> None:
    second = TreeConfig(branch="second", roots=2, every=4, prune="similar", spare=0.0)
    found = answers_per_1000(second)
    sampled = answers_per_1000(TreeConfig(branch="none", roots=8, every=4))
    assert (found, sampled) == (pytest.approx(54.6, abs=0.5), pytest.approx(37.9, abs=0.5))


class Openings(Words):
    """Replies of 16 tokens whose first one is 10 with a probability, and then they are surer.

    Sure ones succeed with probability 0.85, others with 0.15.
    """

    longest = 16

    def __init__(self, p: float) -> None:
        self.p, self.reward = p, Graded()

    def choices(self, prefix: tuple[int, ...]) -> tuple[int, ...]:
        return (10, 11)

    def of(self, prefix: tuple[int, ...]) -> np.ndarray:
        sure = prefix[:1] == (10,)
        if not prefix:
            p = self.p
        elif len(prefix) == self.longest - 1:
            p = 0.85 if sure else 0.15
        else:
            p = 0.95 if sure else 0.6
        return np.array([p, 1 - p])


def is_mixed(episodes: Sequence[Trajectory]) -> bool:
    return len({each.reward for each in episodes}) > 1


@pytest.mark.costly
def test_pruning_by_a_learned_forecast_leaves_more_mixed_groups_for_fewer_tokens() -> None:
    """The forecast learns from the survivors of the first 60 groups."""
    options = TreeConfig(branch="none", roots=8, every=4, prune="mixed", keep=0.5, spare=0.0)
    plain, strategy = LiveTree(TreeConfig(branch="none", roots=8, every=4)), ForecastTree(options)
    chances = np.random.default_rng(0).beta(0.5, 0.5, size=260)
    mixed, tokens, whole = {"pruned": 0, "any 4": 0}, 0, 0
    for seed, chance in enumerate(chances.tolist()):
        words = Openings(min(0.99, max(0.01, chance)))
        group = asyncio.run(one_run(words, strategy, 8, Seeded(seed), seed))
        strategy.measure([group], [group], CONTEXT)
        strategy.observe([])
        if seed >= 60:
            other = asyncio.run(one_run(words, plain, 8, Seeded(seed + 1000), seed))
            mixed["pruned"] += is_mixed([each for each in group.finished if each.stop != "pruned"])
            mixed["any 4"] += is_mixed(other.trajectories[:4])
            tokens, whole = tokens + own_length(group), whole + own_length(other)
    assert mixed == {"pruned": 153, "any 4": 130}
    assert tokens / whole == pytest.approx(0.64, abs=0.01)


def test_one_of_eight_decisions_prunes_nothing() -> None:
    strategy = LiveTree(TreeConfig(branch="none", prune="mixed", roots=8, every=4))
    leaves = [leaf(i, *[0.5] * 4, p=0.9 - i / 12) for i in range(8)]
    spared = [not strategy.decide(leaves, 0, Random(seed)).survival for seed in range(2000)]
    assert np.mean(spared) == pytest.approx(1 / 8, abs=0.02)


def test_the_kept_episodes_are_the_most_certain_of_both_kinds() -> None:
    assert live_tree.most_mixed([0.9, 0.8, 0.2, 0.1], 2) == [0, 3]
    assert live_tree.most_mixed([0.9, 0.8, 0.7], 2) == [1, 2]
    random = np.random.default_rng(0)
    mixed = {"kept": 0, "any": 0}
    for _ in range(1000):
        chances = random.beta(0.5, 0.5, size=8)
        success = random.random(8) < chances
        for name, kept in (("kept", live_tree.most_mixed(chances.tolist(), 4)), ("any", range(4))):
            mixed[name] += len({bool(success[i]) for i in kept}) > 1
    assert mixed["kept"] > 1.1 * mixed["any"], mixed


def test_a_forecast_learns_from_survivors_by_their_weight_and_is_restored() -> None:
    strategy = ForecastTree(TreeConfig(branch="none", prune="mixed", roots=4, every=2))
    episodes = []
    for number in range(40):
        sure = number % 2 == 0
        pieces = leaf(0, *([0.1] * 4 if sure else [2.0] * 4)).pieces
        # of the uncertain ones, most successes were pruned: the survivors stand for them
        success = sure or number % 4 == 1
        facts = {SURVIVAL: 4.0} if not sure and success else {}
        episodes.append(
            Trajectory(pieces, {"r": float(success)}, "done", TASK, number, number, facts=facts)
        )
    strategy.measure([], [], CONTEXT)
    group = Group(TASK, tuple(episodes))
    assert strategy.measure([group], [group], CONTEXT) == {"tree/forecast_error": 0.25}
    strategy.observe([])
    sure, unsure = (strategy.chance(leaf(0, *[h] * 4)) for h in (0.1, 2.0))
    assert sure > 0.9 and unsure == pytest.approx(0.8, abs=0.05), "4 of 5, not 1 of 2"
    again = ForecastTree(TreeConfig(branch="none", prune="mixed", roots=4, every=2))
    again.restore(strategy.state())
    assert again.chance(leaf(0, 0.7, 0.7)) == strategy.chance(leaf(0, 0.7, 0.7))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"engine.backend": "vllm"}, "not built for servers, which do not return the entropy"),
        ({"engine.top_p": 0.9}, "needs sampling from the whole vocabulary, got engine.top_p"),
        ({"tree.roots": 1}, "tree.roots must be from 2 to schedule.group_size"),
        ({"tree.prune": "similar", "tree.branch": "none"}, "tree.branch none makes no forks"),
        ({"tree.turn": 3}, "tree.turn is an option of turn"),
    ],
)
def test_what_live_trees_lack_is_refused_with_the_reason(
    options: dict[str, object], told: str
) -> None:
    given = {"techniques": "tree tree_advantage", "tree.branch": "entropy"} | options
    with pytest.raises(ConfigError, match=told):
        override(RunConfig(recipe="x"), given)
