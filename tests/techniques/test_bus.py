"""Test `bus`: which texts of other runs begin episodes, and what they teach on a lock.

The lock has 8 positions with 4 words, and the reward is 1 if all are right. Three nodes share a
directory. One of them knows most positions, and the others none.
"""

import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.test_run import quiet
from tests.support.groups import TASK
from tests.support.tiny_runs import save_tiny, tiny_run
from tests.techniques.test_hints import (
    EPISODES,
    POSITIONS,
    PROMPT,
    RIGHT,
    WORDS,
    WRONG,
    context,
    ended,
    reply,
)
from unstale.cli import session
from unstale.config import ConfigError, RunConfig
from unstale.config.options import override
from unstale.durability.journal import Journal, check
from unstale.recipes import RECIPES
from unstale.records import (
    ContextPiece,
    Failure,
    Group,
    Placed,
    Provenance,
    Sampled,
    ScoredTrajectory,
    Trajectory,
    collate,
    has_loss,
    walk,
)
from unstale.research.techniques.bus import Bus, BusConfig, foreign
from unstale.techniques.hooks import Techniques

STEPS, SEEDS = 150, 3


class Words:
    """Texts whose tokens are words. Another `base` stands for another tokenizer."""

    def __init__(self, base: int = 0) -> None:
        self._base = base

    def text(self, tokens: Sequence[int]) -> str:
        return " ".join(f"w{token - self._base}" for token in tokens)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(int(word[1:]) + self._base for word in text.split())


def node(folder: Path | str, name: str, **options: Any) -> Bus:
    values = {"number": EPISODES // 2, "folder": str(folder), "node": name, **options}
    return Bus(BusConfig(**values))


def exchanged(bus: Bus, results: Sequence[Trajectory | Failure], base: int = 0) -> list[Any]:
    return [fork.text for fork in asyncio.run(bus.forks([results], Words(base)))]


def test_a_success_of_one_run_begins_episodes_of_another_in_its_own_tokens(tmp_path: Path) -> None:
    one, other = node(tmp_path, "one"), node(tmp_path, "other")
    assert one.roots(EPISODES) == 4
    assert exchanged(one, [ended(8, reply(RIGHT)), WRONG]) == []
    assert exchanged(one, [WRONG]) == [], "a run does not read its own texts"
    found = exchanged(other, [WRONG, WRONG], base=10)
    assert found == [(Placed((10,) * POSITIONS, Provenance.FOREIGN),)]
    (path,) = tmp_path.glob("*/*.json")
    assert json.loads(path.read_text()) == {"task": TASK.key, "text": " ".join(["w0"] * 8)}
    for number in range(9):
        (path.parent / f"third.{number}.json").write_text(
            json.dumps({"task": TASK.key, "text": f"w{number}"})
        )
    (path.parent / "third.9.json").write_text("{")
    (path.parent / "third.10.json").write_text(json.dumps({"task": "another", "text": "w1"}))
    assert len(exchanged(other, [WRONG])) == 4
    assert exchanged(other, [Failure(TASK, "begin", "broken")]) == []
    failed = node(tmp_path, "fourth", when="failed")
    assert exchanged(failed, [WRONG, ended(9, reply(RIGHT))]) == []
    assert len(exchanged(failed, [WRONG])) == 4


def test_a_run_goes_on_without_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    bus = node(folder, "one")
    exchanged(bus, [ended(8, reply(RIGHT))])
    shutil.rmtree(folder)
    folder.write_text("no directory")
    assert exchanged(bus, [ended(9, reply(RIGHT))]) == []
    seen = context()
    assert len(bus.estimate([Group(TASK, (WRONG, ended(9, reply(RIGHT))))], seen)) == 2
    assert seen.metrics["bus/lost"] == 1


def test_foreign_text_is_in_no_ratio_and_learned_only_if_it_helped() -> None:
    text = Placed(RIGHT[:-1], Provenance.FOREIGN)
    end = Sampled(RIGHT[-1:], (-50.0,), version=0)
    helped = ended(9, text, end)
    bus = node("x", "one")
    plain, good = bus.estimate([Group(TASK, (WRONG, helped))], context())
    assert good.advantage == (0.5,) * 9 and plain.advantage == (-0.5,) * 9
    _, bad = bus.estimate(
        [Group(TASK, (ended(8, reply(RIGHT)), ended(9, text, reply((1,)))))], context()
    )
    assert bad.advantage == (-0.5, *[0.0] * 7, -0.5)
    batch = collate([good], placed="anchor")
    assert batch.sampled.tolist() == [False] * 8 + [True], "one token has a ratio: the end"
    assert batch.behavior_logp[:8].abs().sum() == 0
    assert batch.placed is not None and batch.placed.trained.sum() == 7
    assert collate([ScoredTrajectory(helped, (0.5,))]).trained.sum() == 1, "no loss with mask"


def test_an_episode_becomes_text_that_the_policy_ends() -> None:
    answer = ContextPiece((70, 71))
    pieces = (PROMPT, reply((1, 2)), reply((3,)), answer, reply((4, 5)))
    assert foreign(pieces) == (
        PROMPT.tokens,
        (Placed((1, 2, 3), Provenance.FOREIGN), answer, Placed((4,), Provenance.FOREIGN)),
    )
    assert foreign((PROMPT, reply((1,)))) == (PROMPT.tokens, ())


def draw(policy: np.ndarray, random: Any, start: int) -> Sampled:
    drawn, bounds = random.random(POSITIONS), policy.cumsum(1)
    return reply([int((bounds[i] < drawn[i]).sum()) for i in range(start, POSITIONS)])


def learn(bus: Bus | None, logits: np.ndarray, random: Any, first: int) -> None:
    """Take a step of a node: its own episodes, and those that begin with texts of others."""
    weights = np.exp(logits - logits.max(1, keepdims=True))
    policy = weights / weights.sum(1, keepdims=True)
    own = EPISODES // 2 if bus else EPISODES
    episodes = [ended(first + i, draw(policy, random, 0)) for i in range(own)]
    for fork in asyncio.run(bus.forks([episodes], Words())) if bus else ():
        (text,) = fork.text
        cut = replace(text, tokens=text.tokens[:-1])  # the last word takes the place of the end
        end = draw(policy, random, POSITIONS - 1)
        episodes.append(ended(first + len(episodes), cut, end, fork=fork))
    gradient = np.zeros_like(logits)
    grader = bus or node("x", "alone")
    for item in grader.estimate([Group(TASK, tuple(episodes))], context()):
        for start, piece, turn in walk(item.trajectory.pieces):
            if turn >= 0 and (isinstance(piece, Sampled) or has_loss(piece, "anchor")):
                for place, token in enumerate(piece.tokens, start=start):
                    gradient[place - 1] -= item.advantage[place] * policy[place - 1]
                    gradient[place - 1, token] += item.advantage[place]
    logits += 2.0 * gradient / EPISODES


def opens(logits: np.ndarray) -> float:
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return float(np.prod(weights[:, 0] / weights.sum(1)))


@pytest.mark.costly
def test_a_node_that_knows_nothing_learns_from_one_that_does(tmp_path: Path) -> None:
    shared, alone = [], []
    for seed in range(SEEDS):
        random = np.random.default_rng(seed)
        folder = tmp_path / str(seed)
        nodes = [node(folder, name) for name in ("small", "second", "strong")]
        states = [np.zeros((POSITIONS, WORDS)) for _ in range(4)]
        states[2][:6, 0] = 6.0
        for step in range(STEPS):
            for bus, logits in zip((*nodes, None), states, strict=True):
                learn(bus, logits, random, step * EPISODES)
        shared.append(opens(states[0]))
        alone.append(opens(states[3]))
    assert np.mean(alone) < 0.01
    assert np.mean(shared) > 0.9, shared


EVEN = "tests.support.tiny_runs:EvenTasks"


def configure(model: Path, runs: Path, **values: Any) -> RunConfig:
    config = tiny_run(model, runs, max_steps=3)
    config = replace(
        config,
        schedule=replace(config.schedule, group_size=4),
        task=replace(config.task, env=EVEN),
    )
    return override(config, values)


@pytest.mark.usefixtures("forked_children")
@pytest.mark.costly
def test_successes_of_an_earlier_run_are_loaded_and_rewarded_here(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    first = session.train(configure(tmp_path / "model", tmp_path / "a"), console=quiet())
    with Journal.read(first.folder) as reader:
        ended = [each.trajectory for each in reader.trajectories()]
    known = {each.task.key for each in ended if each.reward >= 0.6}
    options: dict[str, Any] = {"techniques": "bus", "bus.load": str(first.folder)}
    options |= {"bus.success_at": 0.6, "objective.placed": "anchor", "deterministic": False}
    run = session.train(configure(tmp_path / "model", tmp_path / "b", **options), console=quiet())
    assert max(row["bus/episode_share"] for row in run.metrics) > 0
    with Journal.read(run.folder) as reader:
        assert check(reader) == []
        forked = [each.trajectory for each in reader.trajectories() if each.trajectory.fork]
    assert forked and {each.task.key for each in forked} <= known
    for each in forked:
        *_, text = (piece for piece in each.pieces if isinstance(piece, Placed))
        assert text.provenance == Provenance.FOREIGN
        assert isinstance(each.pieces[each.pieces.index(text) + 1], Sampled)
    assert max(sum(isinstance(one, Placed) for one in each.pieces) for each in forked) == 2, (
        "a text has all turns of its episode, and the environment repeats its answers"
    )


def test_wrong_options_are_refused() -> None:
    base = RECIPES["calculator"]()
    good = {"techniques": "bus", "bus.load": "x", "objective.placed": "anchor"}
    assert Techniques.of(override(base, good)).strategy is not None
    for values, says in (
        ({"bus.load": ""}, r"the technique bus needs bus.folder or bus.load"),
        ({"bus.folder": "y"}, r"bus.folder and bus.node are given together"),
        ({"bus.folder": "y", "bus.node": "a.b"}, r"letters, digits and - only"),
        ({"objective.placed": "mask"}, r"objective.placed = anchor, got mask"),
        ({"deterministic": True}, r"deterministic must be false with the technique bus"),
        ({"bus.number": 99}, r"bus.number must be below schedule.group_size"),
    ):
        with pytest.raises(ConfigError, match=says):
            override(base, {**good, **values})
