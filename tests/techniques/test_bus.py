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
from transformers import AutoTokenizer

from tests.cli.test_run import quiet
from tests.rollout.test_episode import awake
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
from unstale.config import (
    SHIPPED_POLICY,
    ConfigError,
    EngineConfig,
    RolloutConfig,
    RunConfig,
)
from unstale.config.options import override
from unstale.durability.journal import JOURNAL, Journal, check
from unstale.engines import SamplingParams
from unstale.engines.scripted import ScriptedEngine
from unstale.envs import Message, Turn
from unstale.envs.chat import Chat
from unstale.envs.desk import DeskTasks
from unstale.envs.desk.expert import expert_replies
from unstale.envs.retail import RetailTasks
from unstale.recipes import RECIPES
from unstale.records import (
    ContextPiece,
    EpisodeRecord,
    Failure,
    Fork,
    Group,
    GroupRequest,
    Placed,
    Provenance,
    Sampled,
    ScoredTrajectory,
    Task,
    Trajectory,
    collate,
    has_loss,
    walk,
)
from unstale.research.techniques.bus import Bus, BusConfig, foreign
from unstale.research.techniques.shared_texts import SharedTexts
from unstale.rollout.episode import Rollout
from unstale.rollout.generator import Generator
from unstale.rollout.texts import PolicyTexts
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

    def whole(self, tokens: Sequence[int]) -> str:
        return self.text(tokens)

    def encode_whole(self, text: str, after: str) -> tuple[int, ...]:
        return self.encode(text)


def node(folder: Path | str, name: str, **options: Any) -> Bus:
    values = {"number": EPISODES // 2, "folder": str(folder), "node": name, **options}
    return Bus(BusConfig(**values))


def exchanged(bus: Bus, results: Sequence[Trajectory | Failure], base: int = 0) -> list[Any]:
    found = asyncio.run(bus.forks([results], Words(base)))
    asyncio.run(bus.forks([results, [WRONG] * len(found)], Words(base)))
    finished = tuple(each for each in results if isinstance(each, Trajectory))
    bus.estimate([Group(TASK, finished)], context())  # the group ends
    assert len(found) == (EPISODES // 2 if finished else 0), "a group has its full number"
    return [fork.text for fork in found if fork]


def test_a_success_of_one_run_begins_episodes_of_another_in_its_own_tokens(tmp_path: Path) -> None:
    one, other = node(tmp_path, "one"), node(tmp_path, "other")
    assert one.roots(EPISODES) == 4
    assert exchanged(one, [ended(8, reply(RIGHT)), WRONG]) == []
    assert exchanged(one, [WRONG]) == [], "a run does not read its own texts"
    found = exchanged(other, [WRONG, WRONG], base=10)
    assert found == [(Placed((10,) * (POSITIONS - 1), Provenance.FOREIGN),)]
    (path,) = tmp_path.glob("*/*.json")
    message = json.loads(path.read_text())
    _, text = json.loads(message["text"])
    assert message["task"] == TASK.key and text == " ".join(["w0"] * 7)
    for number in range(9):
        text = json.dumps(["another prompt", f"w{number}"])
        content = json.dumps({"task": TASK.key, "text": text})
        (path.parent / f"third.{number}.json").write_text(content)
    turns = json.dumps(["another prompt", "w1", "w2", "w3"])
    for number, text in enumerate(("{", "[]", '["", 1]', '["", "w1", "w2"]', turns, "7"), start=20):
        content = json.dumps({"task": TASK.key, "text": text})
        (path.parent / f"third.{number}.json").write_text(content)
    (path.parent / "third.9.json").write_text("{")
    (path.parent / "third.10.json").write_text(json.dumps({"task": "another", "text": "w1"}))
    many = node(tmp_path, "other", number=4)
    assert {len(text) for text in exchanged(many, [WRONG])} == {1}, "others are no such episodes"
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
    prompt, text = foreign(pieces)
    one, other, _, last = text
    assert prompt == PROMPT.tokens and [each.tokens for each in text] == [
        (1, 2),
        (3,),
        (70, 71),
        (4,),
    ]
    assert text[2] == answer and isinstance(last, Placed)
    assert last.source_logp == reply((4, 5)).behavior_logp[:1], "the run that sampled it is known"
    assert {one.provenance, other.provenance, last.provenance} == {Provenance.FOREIGN}
    placed = ContextPiece((1,)), Placed((2, 3), Provenance.FORCED)
    assert foreign(placed) == ((1,), (Placed((2,), Provenance.FOREIGN),))
    assert foreign((PROMPT, reply((1,)))) == (PROMPT.tokens, ())
    assert foreign((PROMPT, reply((1, 2)), answer, reply((3,)))) == (PROMPT.tokens, ())
    cut = PROMPT, reply((1, 2)), answer
    assert foreign(cut) == (PROMPT.tokens, ()), "its last reply would have its end"


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
        if fork is None:
            episodes.append(ended(first + len(episodes), draw(policy, random, 0)))
            continue
        (cut,) = fork.text
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


class OtherDesk(DeskTasks):
    """A desk whose answers end in another way."""

    def env(self, task: Task, seed: int) -> Any:
        env: Any = super().env(task, seed)
        step = env.step

        async def other(reply: Message) -> Turn:
            turn = await step(reply)
            said = (replace(each, content=f"{each.content}!") for each in turn.messages)
            return replace(turn, messages=tuple(said))

        env.step = other
        return env


DESK = RetailTasks()
CUSTOMER = next(iter(DESK.train(0)))
EXPERT = expert_replies(DESK.scenario(CUSTOMER))
NEVER_HELPS = [Message("assistant", "Hello.")]


def at_retail(
    bus: Bus,
    replies: Sequence[Message],
    tasks: DeskTasks = DESK,
    past: Sequence[EpisodeRecord] = (),
) -> tuple[Group, Rollout]:
    """Play a group at the retail desk. The policy gives `replies`, and ends those of others."""
    chat = Chat(AutoTokenizer.from_pretrained(SHIPPED_POLICY), tasks.tools)
    spoken = [*map(chat.encode_reply, replies)]

    def say(tokens: Sequence[int], params: SamplingParams) -> Sequence[int]:
        if params.sampled:
            return chat.stop_tokens[:1]
        place, heard = 0, chat.text(tokens, whole=True)
        for tried in spoken:
            found = heard.find(chat.text(tried, whole=True), place)
            if found < 0:
                return tried
            place = found + 1
        return spoken[-1]

    async def main() -> tuple[Group, Rollout]:
        engine = await awake(ScriptedEngine(say))
        config = EngineConfig(max_context=4096, max_completion_tokens=512)
        generator = Generator(engine, chat, config)
        rollout = Rollout(generator, tasks, RolloutConfig())
        texts, first = PolicyTexts(tasks, generator), bus.roots(EPISODES)

        async def more(results: Sequence[Trajectory | Failure]) -> Sequence[Fork | None]:
            rounds = [results[:first], results[first:]] if len(results) > first else [results]
            return await bus.forks(rounds, texts)

        request = GroupRequest(0, CUSTOMER, 0, 0, past=tuple(past), sizes=(first,))
        return await rollout.group(request, size=first, more=more), rollout

    return asyncio.run(main())


def test_a_success_of_several_turns_reaches_another_run_which_rewards_it(tmp_path: Path) -> None:
    group, _ = at_retail(node(tmp_path, "one"), EXPERT)
    assert len(group.trajectories) == EPISODES and all(each.success for each in group.trajectories)
    other = node(tmp_path, "other")
    group, _ = at_retail(other, NEVER_HELPS)
    assert len(group.trajectories) == EPISODES
    (begun,) = (each for each in group.trajectories if each.fork)
    assert begun.success and sum(each.success for each in group.trajectories) == 1
    texts = [each for each in begun.pieces if isinstance(each, Placed)]
    assert len(texts) == begun.num_turns == len(EXPERT) > 1
    assert {each.provenance for each in texts} == {Provenance.FOREIGN}
    assert len(begun.sampled) == 1, "the policy only ends the last reply"
    (item,) = (each for each in other.estimate([group], context()) if each.trajectory is begun)
    batch = collate([item], placed="anchor")
    assert batch.sampled.sum() == 1, "no foreign token has a ratio"
    assert batch.placed is not None and batch.placed.trained.sum() > 0
    shutil.rmtree(tmp_path)
    past = [
        EpisodeRecord(each.episode, each.pieces[:-1], None, fork=each.fork)
        if each.fork
        else EpisodeRecord(each.episode, each.pieces, each)
        for each in group.trajectories
    ]
    resumed, _ = at_retail(node(tmp_path, "other"), NEVER_HELPS, past=past)
    (again,) = (each for each in resumed.trajectories if each.fork)
    assert again.pieces == begun.pieces and len(resumed.trajectories) == EPISODES
    group, _ = at_retail(node(tmp_path, "third"), NEVER_HELPS)
    assert len(group.trajectories) == EPISODES and not any(each.fork for each in group.trajectories)


def test_a_text_that_this_environment_answers_differently_costs_one_episode(
    tmp_path: Path,
) -> None:
    at_retail(node(tmp_path, "one"), EXPERT)
    other = node(tmp_path, "other")
    group, rollout = at_retail(other, NEVER_HELPS, OtherDesk(DESK.domain))
    (failure,) = group.failures
    assert "piece 2 has other tokens" in failure.error
    assert failure.fork and {type(each) for each in failure.fork.text} == {Placed, ContextPiece}
    assert len(group.trajectories) == EPISODES - 1 and not rollout.quarantined
    group, _ = at_retail(other, NEVER_HELPS, OtherDesk(DESK.domain))
    assert len(group.trajectories) == EPISODES, "the text is not tried again"
    seen = context()
    other.estimate([group], seen)
    assert seen.metrics["bus/refused"] == 1


def share(folder: Path, first: int) -> None:
    """Write three texts of one word each to the folder, as another run, over earlier ones."""
    texts = {str(number): json.dumps(["", f"w{first + number}"]) for number in range(3)}
    SharedTexts(str(folder), "third").write(TASK.key, {k: {"text": v} for k, v in texts.items()})


def test_a_text_that_was_not_tried_is_not_refused_in_later_calls_or_a_resumed_run(
    tmp_path: Path,
) -> None:
    at_retail(node(tmp_path, "one"), EXPERT)
    group, _ = at_retail(node(tmp_path, "other"), NEVER_HELPS, OtherDesk(DESK.domain))
    folder = tmp_path / "words"
    share(folder, 0)
    bus = node(folder, "one", number=3)
    first, *others = asyncio.run(bus.forks([[WRONG]], Words()))
    assert first is not None and None not in others
    failure = replace(group.failures[0], task=TASK, fork=first)
    with Journal(tmp_path / JOURNAL) as journal:
        asyncio.run(journal.publishing(0))
        journal.add_request(GroupRequest(0, TASK, 0, 0))
        prefix = first.prefix_of(WRONG.pieces)
        journal.begin(0, 0, episode=first.parent, seed=0)
        page = journal.begin(0, 1, episode=8, seed=0, fork=first, prefix=prefix)
        page.write_outcome(failure)
    with Journal.read(tmp_path) as read:
        ((_, recorded),) = (each.past for each in read.requests())
    assert recorded.outcome == failure
    results = [[WRONG], [failure, WRONG, WRONG]]

    def judge(bus: Bus) -> None:
        assert len(asyncio.run(bus.forks(results[:1], Words()))) == 3
        assert asyncio.run(bus.forks(results, Words())) == ()

    shutil.rmtree(folder)
    judge(bus)
    judge(bus)  # as after each round that an allocator adds
    assert not folder.exists(), "nothing is chosen again"
    share(folder, 3)
    resumed = node(folder, "one", number=3)
    judge(resumed)
    shutil.rmtree(folder)
    judge(resumed)
    assert not folder.exists()
    for each in (bus, resumed):
        seen = context()
        each.estimate([Group(TASK, (WRONG,))], seen)
        assert seen.metrics["bus/refused"] == 1
        for start in (3, 0):
            share(folder, start)
            found = asyncio.run(each.forks([[WRONG]], Words()))
            assert {fork.text[0].tokens for fork in found if fork} == {
                (number,) for number in range(start, start + 3)
            } - {first.text[0].tokens}
            each.estimate([Group(TASK, (WRONG,))], context())


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
@pytest.mark.parametrize("placed", ["anchor", "guided"])
def test_successes_of_an_earlier_run_are_loaded_and_rewarded_here(
    tmp_path: Path, placed: str
) -> None:
    save_tiny(tmp_path / "model")
    first = session.train(configure(tmp_path / "model", tmp_path / "a"), console=quiet())
    with Journal.read(first.folder) as reader:
        ended = [each.trajectory for each in reader.trajectories()]
    known = {each.task.key for each in ended if each.reward >= 0.6}
    options: dict[str, Any] = {"techniques": "bus", "bus.load": str(first.folder)}
    options |= {"bus.success_at": 0.6, "objective.placed": placed, "deterministic": False}
    run = session.train(configure(tmp_path / "model", tmp_path / "b", **options), console=quiet())
    (row, *_) = (row for row in run.metrics if row["bus/episode_share"] > 0)
    assert row["placed/trained_share"] > 0
    assert row["placed/gamma_mean"] == 1 if placed == "anchor" else row["placed/gamma_mean"] > 0
    with Journal.read(run.folder) as reader:
        assert check(reader) == []
        forked = [each.trajectory for each in reader.trajectories() if each.trajectory.fork]
    assert forked and {each.task.key for each in forked} <= known
    for each in forked:
        *_, text = (piece for piece in each.pieces if isinstance(piece, Placed))
        assert text.provenance == Provenance.FOREIGN
        assert isinstance(each.pieces[each.pieces.index(text) + 1], Sampled)
    turns = (
        [turn for _, one, turn in walk(each.pieces) if isinstance(one, Placed)] for each in forked
    )
    assert max(len({*each}) for each in turns) == 2, (
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
        ({"objective.placed": "mask"}, r"objective.placed = anchor or guided, got mask"),
        (
            {"bus.folder": "y", "bus.node": "a", "objective.placed": "guided"},
            r"objective.placed = anchor, got guided: otherwise foreign text has no loss",
        ),
        ({"deterministic": True}, r"deterministic must be false with the technique bus"),
        ({"bus.number": 99}, r"bus.number must be below schedule.group_size"),
    ):
        with pytest.raises(ConfigError, match=says):
            override(base, {**good, **values})
