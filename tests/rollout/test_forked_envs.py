"""Test from what the environment of a forked episode continues: a copy, a snapshot or replies.

The episodes are the same in each case: tokens, rewards, facts and rows of the journal.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tests.rollout.test_episode import TASK, LetterChat, awake
from unstale.builders import build_rollout
from unstale.config import EngineConfig, RolloutConfig, RunConfig
from unstale.config.options import override
from unstale.engines import SamplingParams
from unstale.engines.scripted import ScriptedEngine
from unstale.envs import Message, Turn
from unstale.records import (
    ContextPiece,
    EpisodeRecord,
    Failure,
    Fork,
    Group,
    GroupRequest,
    Piece,
    Placed,
    Provenance,
    Trajectory,
)
from unstale.rollout import episode, no_more
from unstale.rollout.episode import Rollout
from unstale.rollout.generator import Generator
from unstale.rollout.rounds import Rounds, reply_spans
from unstale.techniques.hooks import Decisions, Leaf, LookPlan

TURNS = 4
REPLY = 3
"""Number of tokens of a reply. The last one is the stop token."""


class Again:
    """An environment with random answers. Its rewards and facts depend on all replies."""

    def __init__(self, seed: int, calls: Counter[str]) -> None:
        self.random, self.calls = Random(seed), calls
        self.heard: list[str] = []
        calls["open"] += 1

    async def begin(self) -> Turn:
        self.calls["begin"] += 1
        return Turn((Message("user", f"begin {self.random.randrange(100)}:"),))

    async def step(self, reply: Message) -> Turn:
        self.calls["step"] += 1
        self.heard.append(reply.content)
        number = self.random.randrange(100)
        turn = {"reward": number / 7, "rewards": {"r": number / 3}, "facts": {"sum": number}}
        done = len(self.heard) == TURNS
        facts = {"sum": float(number), f"fact_{len(self.heard)}": float(sum(map(len, self.heard)))}
        messages = () if done else (Message("user", f"{number} {''.join(self.heard)}:"),)
        return Turn(messages, done, **turn | {"facts": facts})

    def close(self) -> None:
        self.calls["open"] -= 1


class Saved(Again):
    def snapshot(self) -> str:
        return json.dumps([self.heard, self.random.getstate()])

    async def resume(self, state: str) -> None:
        self.calls["resume"] += 1
        self.heard, (version, numbers, gauss) = json.loads(state)
        self.random.setstate((version, tuple(numbers), gauss))


class Copied(Again):
    def fork(self) -> Any:
        self.calls["fork"] += 1
        copied = type(self)(0, self.calls)
        copied.heard = [*self.heard]
        copied.random.setstate(self.random.getstate())
        return copied


class Both(Copied, Saved):
    pass


class Tasks:
    name, tools = "toy", ()

    def __init__(self, kind: type[Again]) -> None:
        self.kind, self.calls = kind, Counter[str]()

    def train(self, seed: int) -> Any: ...

    def held_out(self, count: int) -> Any: ...

    def env(self, task: Any, seed: int) -> Again:
        return self.kind(seed, self.calls)


class Rows:
    """The rows of a journal, by episode."""

    def __init__(self) -> None:
        self.of: dict[int, list[Any]] = {}

    def __call__(self, number: int, index: int, *, episode: int, **start: Any) -> "Writer":
        self.of[episode] = [start]
        return Writer(self.of[episode])


class Writer:
    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def write_piece(self, position: int, piece: Piece) -> None:
        self._rows.append((position, piece))

    def write_snapshot(self, num_pieces: int, state: str) -> None:
        self._rows.append((num_pieces, state))

    def write_outcome(self, outcome: Trajectory | Failure) -> None:
        self._rows.append(outcome)

    def write_restart(self, reason: str, *, turns: int, sampled_tokens: int) -> None: ...


def say(tokens: Sequence[int], params: SamplingParams) -> list[int]:
    random = Random(f"{params.seed}/{tokens}")
    start = len(tokens) - max(i for i, token in enumerate(tokens) if token == ord(":")) - 1
    letters = [*random.choices([*b"abcdefgh"], k=REPLY - 1), ord(".")]
    return letters[start:][: params.max_tokens]


async def finished(results: Sequence[Trajectory | Failure]) -> Sequence[Fork]:
    """Fork the first episode in each of its replies, and then the last two forks."""
    trunks = results[:1] if len(results) == 2 else results[-2:] if len(results) == 10 else ()
    forks = []
    for trunk in trunks:
        pieces = trunk.pieces if isinstance(trunk, Trajectory) else ()
        for start, _ in reply_spans(pieces):
            forks += [Fork(trunk.episode, start), Fork(trunk.episode, start + 1)]
    return forks


class AtEachReply:
    """A strategy that forks the first episode after two tokens of each of its replies."""

    look_plan = LookPlan(2, 0)

    def roots(self, group_size: int) -> int:
        return 2

    def decide(self, leaves: Sequence[Leaf], left: int, random: Random) -> Decisions:
        waiting = [leaf for leaf in leaves if not leaf.ended and leaf.index in (0, 2)]
        places = [(leaf.episode, sum(len(each.tokens) for each in leaf.pieces)) for leaf in waiting]
        forks = [Fork(episode, at) for episode, at in places if left and at > REPLY]
        return Decisions({}, forks[:left], 0)


def run(tasks: Tasks, *, live: bool, forks: bool = True, rows: Rows | None = None) -> Group:
    async def main() -> Group:
        engine = await awake(ScriptedEngine(say))
        generator = Generator(engine, LetterChat(), EngineConfig())
        rollout = Rollout(generator, tasks, RolloutConfig(retries=0), forks=forks)
        request = GroupRequest(0, TASK, 0, 0, sizes=(2,))
        rounds = Rounds(AtEachReply(), request, 8, lambda number, row: None) if live else None
        more = no_more if live else finished
        return await rollout.group(
            request, size=2, open_writer=rows or Rows(), more=more, rounds=rounds
        )

    return asyncio.run(main())


@pytest.mark.parametrize("live", [False, True], ids=["finished", "live"])
@pytest.mark.parametrize("kind", [Saved, Copied, Both])
def test_a_fork_continues_from_a_copy_or_a_snapshot_as_a_new_environment_would(
    kind: type[Again], live: bool
) -> None:
    tasks, plain = Tasks(kind), Tasks(Again)
    group, expected = run(tasks, live=live), run(plain, live=live)
    assert group == expected and not group.failures
    assert plain.calls["begin"] == len(expected.trajectories) > 6
    assert tasks.calls["begin"] == 2, "one of each root"
    assert tasks.calls["step"] == sum(each.num_turns for each in group.trajectories)
    assert plain.calls["step"] > tasks.calls["step"]
    assert bool(tasks.calls["resume"]) == (kind is Saved), "a copy comes before a snapshot"
    assert tasks.calls["open"] == plain.calls["open"] == 0


@pytest.mark.parametrize("live", [False, True], ids=["finished", "live"])
def test_the_journal_does_not_show_how_a_fork_came_to_its_turn(live: bool) -> None:
    known, again = Rows(), Rows()
    run(Tasks(Saved), live=live, rows=known)
    tasks = Tasks(Saved)
    run(tasks, live=live, forks=False, rows=again)
    assert known.of == again.of and not tasks.calls["resume"]
    forked = [rows for rows in known.of.values() if "fork" in rows[0]]
    assert all(isinstance(rows[1][1], str) for rows in forked), "so a resume needs no parent"


def test_a_resumed_fork_has_its_own_snapshot_or_the_replies_of_a_parent_that_has_ended() -> None:
    rows = Rows()
    group = run(Tasks(Saved), live=False, rows=rows)
    fork = next(each for each in group.trajectories if each.fork and each.fork.at > 20)
    assert fork.fork
    for snapshot, resumes in ((rows.of[fork.episode][1], 1), (None, 0)):
        past = [
            EpisodeRecord(each.episode, each.pieces, each, fork=each.fork)
            for each in group.trajectories
        ]
        prefix = fork.fork.prefix_of(group.trajectories[0].pieces)
        past[fork.episode] = EpisodeRecord(
            fork.episode, prefix, None, snapshot=snapshot, fork=fork.fork
        )
        assert resumed(tasks := Tasks(Saved), past) == group
        assert (tasks.calls["resume"], tasks.calls["begin"]) == (resumes, 1 - resumes)


def resumed(tasks: Tasks, past: Sequence[EpisodeRecord]) -> Group:
    async def main() -> Group:
        engine = await awake(ScriptedEngine(say))
        generator = Generator(engine, LetterChat(), EngineConfig())
        rollout = Rollout(generator, tasks, RolloutConfig(), forks=True)
        rollout.restore(len(past), ())
        request = GroupRequest(0, TASK, 0, 0, begun=True, past=tuple(past), sizes=(2,))
        return await rollout.group(request, size=2)

    return asyncio.run(main())


class NotCopied(Copied):
    def fork(self) -> Any:
        return self


class NoEnvironment(Copied):
    def fork(self) -> Any:
        return None


class Broken(Copied):
    def fork(self) -> Any:
        raise OSError("no more disks")


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (NotCopied, "EnvError: fork() must return a copy of the environment, got <"),
        (NoEnvironment, "EnvError: fork() must return a copy of the environment, got None"),
        (Broken, "OSError: no more disks"),
    ],
)
def test_an_episode_fails_whose_environment_cannot_be_copied(kind: type[Again], says: str) -> None:
    tasks = Tasks(kind)
    group = run(tasks, live=False)
    assert [failure.stage for failure in group.failures] == ["begin"] * 2
    assert all(says in failure.error for failure in group.failures)
    assert tasks.calls["open"] == 0


class Fragile(Copied):
    """An environment whose third step fails, and whose copies cannot be closed."""

    is_copy = False

    async def step(self, reply: Message) -> Turn:
        if len(self.heard) == 2:
            raise OSError("broken")
        return await super().step(reply)

    def fork(self) -> Any:
        copied = super().fork()
        copied.is_copy = True
        return copied

    def close(self) -> None:
        super().close()
        if self.is_copy:
            raise OSError("is closed")


def test_copies_are_closed_if_episodes_fail_and_copies_that_fail_then_do_no_harm() -> None:
    tasks = Tasks(Fragile)
    group = run(tasks, live=True)
    assert {failure.stage for failure in group.failures} == {"step 3"}
    assert len(group.failures) == 7 and not group.trajectories
    assert tasks.calls["fork"] > 8 and tasks.calls["open"] == 0


class Changed(Again):
    """An environment that answers one reply of later episodes in another way."""

    changes = 0

    async def begin(self) -> Turn:
        self.is_first = not self.calls["begin"]
        return await super().begin()

    async def step(self, reply: Message) -> Turn:
        turn = await super().step(reply)
        if self.is_first or len(self.heard) != self.changes:
            return turn
        return replace(turn, messages=(Message("user", "changed:"),))


class ChangedEarly(Changed):
    changes = 1


class ChangedInText(Changed):
    changes = 2


@pytest.mark.parametrize(
    ("kind", "num_pieces", "blames_text"),
    [(ChangedInText, 3, True), (ChangedEarly, 3, False), (ChangedEarly, 1, False)],
    ids=["in the text", "before the text", "before a text without answers"],
)
def test_a_text_is_blamed_only_for_its_own_answers(
    kind: type[Again], num_pieces: int, blames_text: bool
) -> None:
    failed: list[bool] = []

    async def more(results: Sequence[Trajectory | Failure]) -> Sequence[Fork]:
        (trunk, *others) = results
        assert isinstance(trunk, Trajectory)
        start = reply_spans(trunk.pieces)[1][0]
        text = tuple(
            piece if isinstance(piece, ContextPiece) else Placed(piece.tokens, Provenance.FORCED)
            for piece in trunk.pieces[3 : 3 + num_pieces]
        )
        return () if others else [Fork(trunk.episode, start, text)]

    async def main() -> tuple[Group, Rollout]:
        generator = Generator(await awake(ScriptedEngine(say)), LetterChat(), EngineConfig())
        rollout = Rollout(
            generator,
            Tasks(kind),
            RolloutConfig(retries=1),
            on_failure=lambda episode, failure, is_last: failed.append(is_last),
        )
        request = GroupRequest(0, TASK, 0, 0, sizes=(1,))
        return await rollout.group(request, size=1, more=more), rollout

    group, rollout = asyncio.run(main())
    assert "has other tokens" in group.failures[0].error
    assert failed == ([True] if blames_text else [False, True])
    assert bool(rollout.quarantined) != blames_text


class Hanging(Copied):
    """An environment with copies, of which the one after the prompt never closes."""

    async def close(self) -> None:  # type: ignore[override]
        if not self.heard:
            await asyncio.Event().wait()
        super().close()


def test_a_cancelled_group_closes_its_copies_even_if_one_of_them_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(episode, "CLOSE_S", 0.1)
    tasks, reached = Tasks(Hanging), asyncio.Event()

    async def more(results: Sequence[Trajectory | Failure]) -> Sequence[Fork]:
        reached.set()
        await asyncio.Event().wait()
        raise AssertionError("cancelled before")

    async def main() -> None:
        generator = Generator(await awake(ScriptedEngine(say)), LetterChat(), EngineConfig())
        rollout = Rollout(generator, tasks, RolloutConfig(retries=0), forks=True)
        request = GroupRequest(0, TASK, 0, 0, sizes=(1,))
        running = asyncio.create_task(rollout.group(request, size=1, more=more))
        await reached.wait()
        assert tasks.calls["open"] == TURNS, "a copy after each turn but the last"
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())
    assert tasks.calls["open"] == 1


@pytest.mark.parametrize(
    ("techniques", "keeps"), [("tree tree_advantage", True), ("retry", True), ("hints", False)]
)
def test_environments_are_copied_only_for_forks_after_turns(techniques: str, keeps: bool) -> None:
    config = override(
        RunConfig(recipe="sums"), {"techniques": techniques, "objective.placed": "anchor"}
    )
    tasks = Tasks(Copied)

    async def main() -> None:
        generator = Generator(await awake(ScriptedEngine(say)), LetterChat(), EngineConfig())
        rollout = build_rollout(config, tasks)(generator, tasks, RolloutConfig())
        await rollout.group(GroupRequest(0, TASK, 0, 0), size=1)

    asyncio.run(main())
    assert tasks.calls["fork"] == keeps * TURNS and tasks.calls["open"] == 0
