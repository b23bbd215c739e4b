"""Trees that grow and are pruned while episodes run: rules by hand, and the mean gradient.

The mean gradient is that of every possible run of a group: the engine's draws and those of pruning
are enumerated, with the real rollout, rounds and advantages.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from unstale.config import EngineConfig, RolloutConfig
from unstale.engines import SamplingParams
from unstale.engines.scripted import ScriptedEngine
from unstale.envs import Message, Turn
from unstale.records import (
    SURVIVAL,
    Group,
    GroupRequest,
    Sampled,
    Task,
    Trajectory,
)
from unstale.research.techniques import live_tree
from unstale.research.techniques.live_tree import LiveTree
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
    """The draws of one run, and the next run's beginning: every run is made once."""

    planned: list[int] = field(default_factory=list)
    made: list[tuple[int, int]] = field(default_factory=list)
    p: float = 1.0

    def draw(self, p: Sequence[float]) -> int:
        place = len(self.made)
        chosen = self.planned[place] if place < len(self.planned) else 0
        self.made.append((chosen, len(p)))
        self.p *= p[chosen]
        return chosen

    def following(self) -> "Draws | None":
        made = list(self.made)
        while made and made[-1][0] + 1 == made[-1][1]:
            made.pop()
        return Draws([*(chosen for chosen, _ in made[:-1]), made[-1][0] + 1]) if made else None


class Words:
    """Replies of 2 or 3 tokens with random probabilities and rewards."""

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


async def one_run(words: Words, options: TreeConfig, size: int, draws: Draws) -> Group:
    def script(tokens: Sequence[int], params: SamplingParams) -> list[int]:
        text = tuple(tokens[PROMPT:])
        reply: list[int] = []
        while len(reply) < params.max_tokens and STOP not in reply:
            prefix = (*text, *reply)
            reply.append(words.choices(prefix)[draws.draw(words.of(prefix).tolist())])
        return reply

    engine = ScriptedEngine(script, signals=words.signals)
    await engine.start()
    await engine.load({}, version=0)
    await engine.resume()
    chat: Any = WordChat()
    generator = Generator(engine, chat, EngineConfig(max_completion_tokens=3), signals=True)
    tasks: Any = WordTasks(words)
    request = GroupRequest(0, TASK, 0, 0, sizes=(options.roots,))
    rounds = Rounds(LiveTree(options), request, size, lambda number, row: None)
    return await Rollout(generator, tasks, RolloutConfig()).group(
        request, size=options.roots, rounds=rounds
    )


def runs(words: Words, options: TreeConfig, size: int) -> Iterator[tuple[float, Group]]:
    """Yield every group that the options can lead to, with its probability."""
    draws: Draws | None = Draws()
    patch = pytest.MonkeyPatch()
    while draws:
        current = draws

        class Drawn:
            """Random numbers below and above a probability of 1/2."""

            def __init__(self, seed: int) -> None: ...

            def random(self, current: Draws = current) -> float:
                return 0.25 + 0.5 * current.draw((0.5, 0.5))

        patch.setattr(rounds_module, "Random", Drawn)
        group = asyncio.run(one_run(words, options, size, current))
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


def test_pruning_by_a_draw_does_not_bias_the_gradient_and_dropping_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The less confident of two running episodes is pruned: a rule that compares episodes."""

    def least_sure(self: LiveTree, going: Sequence[Leaf]) -> list[Leaf]:
        sure = {leaf.index: live_tree.confidence(live_tree.rows_of(leaf)) for leaf in going}
        return [leaf for leaf in going if len(sure) > 1 and sure[leaf.index] == min(sure.values())]

    monkeypatch.setattr(LiveTree, "_unsure", least_sure)
    options = live(branch="none", prune="confidence", spare=0.5)
    found, groups = bias(Words(6), options, size=2)
    assert found < 1e-6
    stops = {each.stop for group in groups for each in group.trajectories}
    assert stops == {"done", "cut_reply", "pruned"}
    assert bias(Words(6), replace(options, spare=0.0), size=2)[0] > 0.05


@pytest.mark.costly
def test_forks_and_pruning_together_do_not_bias_the_gradient() -> None:
    options = live(branch="entropy", threshold=0.5, prune="confidence", spare=0.5)
    found, groups = bias(Words(6), options, size=3)
    assert found < 1e-6
    forked = [each for group in groups for each in group.trajectories if each.fork]
    assert {each.facts.get(SURVIVAL, 1.0) for each in forked}
