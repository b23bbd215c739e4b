"""Test the training loop with the scripted engine.

Staleness keeps its bound with one straggler in seven. `closing` gets every unscored piece of the
version while generation is paused. A route is notified of a version, in the trainer's thread,
before any engine loads it and after all did. The next batch is prepared during publication and
checkpoint until weights change. A large batch is built while episodes continue. An exhausted task
set, a failed rollout and a failed route end the run with their own error, after the step before is
logged.
"""

import asyncio
import math
import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count, cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.drawn import taken
from tests.support.waits import LIMIT_S
from unstale import loop
from unstale.builders import LocalComponents, build
from unstale.config import (
    CheckpointConfig,
    EngineConfig,
    EvalConfig,
    RolloutConfig,
    RunConfig,
    ScheduleConfig,
    SelectionConfig,
    TaskConfig,
)
from unstale.config.options import override
from unstale.config.techniques import reads_signals
from unstale.durability.journal import Journal, trained_episodes
from unstale.durability.resume import ResumeState, init_run
from unstale.durability.run_folder import RunLog
from unstale.engines import Engine, SamplingParams
from unstale.engines.scripted import Delay, Script, ScriptedEngine
from unstale.envs import Message, Taskset, Turn
from unstale.envs.hooks import Identities
from unstale.loop import RunComponents
from unstale.model.policy import Policy
from unstale.observe.recorder import Outputs
from unstale.observe.trackers import RunOutcome
from unstale.old_logps import Needs, OldLogps
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.old_logps.scoring.scorer import Scorer
from unstale.records import Batch, Group, GroupRequest, PendingPiece, Task
from unstale.rollout import Evaluation
from unstale.rollout.generator import Generator
from unstale.rollout.selection import training_requests
from unstale.rollout.timeouts import first_error
from unstale.signals import Signals
from unstale.techniques.hooks import Draw, DrawContext, Outcome, Techniques
from unstale.testing import tiny_policy
from unstale.trainer.auditor import Auditor
from unstale.trainer.local import LocalTrainer, LossSpec

Route = Callable[[Scorer, ScriptedEngine], OldLogps]

REPLY = 6
"""Tokens of every reply; the last is the stop token 1."""


class NumberChat:
    stop_tokens = (1,)
    longest_token = 1

    def encode_prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        text = messages[0].content
        return (5, 2 + (int(text) if text.isdecimal() else len(text)) % 7)

    def with_tools(self, tools: Sequence[object]) -> "NumberChat":
        return self

    def text(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))

    def encode_content(self, text: str) -> tuple[int, ...]:
        return (3, 3)

    def encode_continuation(
        self, messages: Sequence[Message], *, ended: bool, calls: Sequence[object] = ()
    ) -> tuple[int, ...]:
        return (4,)

    def parse(self, tokens: Sequence[int]) -> Message:
        return Message("assistant", str(sum(tokens)))


class TwoTurns:
    """An environment of two turns. The first reply decides which sibling is rewarded."""

    def __init__(self, task: Task) -> None:
        self.task, self.said = task, 0

    async def begin(self) -> Turn:
        return Turn((Message("user", str(self.task.index)),))

    async def step(self, reply: Message) -> Turn:
        self.said += 1
        if self.task.index == 13_013:
            raise ZeroDivisionError("no such number")
        if self.said < 2:
            return Turn((Message("user", "again"),))
        return Turn((), done=True, rewards={"r": float(int(reply.content) % 2)})


class Numbers:
    name = "numbers"
    tools = ()

    def __init__(self, tasks: Iterator[int]) -> None:
        self.tasks = tasks

    def train(self, seed: int) -> Iterator[Task]:
        return (Task("numbers", "train", number) for number in self.tasks)

    def held_out(self, number: int) -> list[Task]:
        return []

    def text(self, task: Task) -> str:
        return f"number {task.index % 3}"

    def env(self, task: Task, seed: int) -> TwoTurns:
        return TwoTurns(task)


class Log:
    """A log that keeps the rows in memory."""

    def __init__(self, folder: RunLog) -> None:
        self.folder = folder
        self.rows: list[dict[str, Any]] = []

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.rows.append({"step": step, **metrics})

    def phase(
        self, text: str, *, done: int = 0, total: int = 0, detail: Callable[[], str] = str
    ) -> None: ...

    def close(self, outcome: RunOutcome) -> None:
        self.folder.close()

    def sample(self, step: int, groups: Any) -> None: ...

    def event(self, kind: str, **fields: Any) -> None: ...

    def trained(self, step: int, *, points: Any, events: Any) -> None: ...

    def failure(self, episode: int, failure: Any, final: bool) -> None: ...

    def span(self, lane: str, label: str) -> Any:
        return nullcontext()


class ScoresAtClosing(OldLogps):
    """A route that scores each piece at `closing` and answers from those scores alone."""

    needs = Needs(closing=True)

    def __init__(self, scorer: Scorer, engine: ScriptedEngine) -> None:
        self.scorer = scorer
        self.engine = engine
        self.closed: dict[int, set[tuple[int, int]]] = {}
        self.missing: list[int] = []

    def before_update(self, unscored: Sequence[PendingPiece]) -> None:
        assert not self.engine._pending, "generation goes on while the version is being closed"
        version = self.scorer.version
        assert all(piece.piece.version == version for piece in unscored)
        self.closed[version] = {(piece.episode, piece.start) for piece in unscored}

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        return batch.behavior_logp.clone(), torch.zeros_like(batch.sampled)


class Quiet:
    """A display without output."""

    def update(self, metrics: Mapping[str, Any]) -> None: ...

    def phase(
        self, text: str, done: int = 0, total: int = 0, detail: Callable[[], str] = str
    ) -> None: ...

    def note(self, text: str) -> None: ...


def configure(
    *, steps: int = 12, deterministic: bool = False, every: int = 100, **schedule: int
) -> RunConfig:
    return RunConfig(
        recipe="numbers",
        max_steps=steps,
        deterministic=deterministic,
        task=TaskConfig(env="tests:numbers"),
        schedule=ScheduleConfig(
            **{"max_staleness": 1, "groups_per_step": 2, "group_size": 3, **schedule}
        ),
        engine=EngineConfig(max_completion_tokens=REPLY, max_context=64, restarts=0),
        rollout=RolloutConfig(retries=0),
        checkpoint=CheckpointConfig(interval=every),
        eval=EvalConfig(tasks=0),
    )


async def a_moment(tokens: Sequence[int], params: SamplingParams) -> None:
    slow = tokens[1] == 5  # one task in seven
    for _ in range(40 if slow else 1):
        await asyncio.sleep(0)


def first_state(machine: LocalComponents, config: RunConfig, folder: Path) -> ResumeState:
    """Write the first checkpoint of a run."""
    return init_run(folder, machine.checkpoints(config, folder), machine.policy)


def random_signals(tokens: Sequence[int]) -> Signals:
    """Return signals that depend on a context: an entropy of 0 to 2 nats, and two tokens."""
    number = zlib.crc32(bytes(token % 256 for token in tokens))
    p = 0.4 + number % 50 / 100
    logp = np.log(np.array([[p, (1 - p) * 0.9]], np.float32))
    entropy = np.array([number % 200 / 100], np.float32)
    return Signals(entropy, np.array([[7, 9]], np.int32), logp)


def noise(tokens: Sequence[int], params: SamplingParams) -> list[int]:
    """Return a reply that depends on the seed, without what was sampled of it before."""
    spoken = REPLY - params.reply_limit
    said = [6 + (params.seed >> (3 * i)) % 50 for i in range(REPLY - 1)]
    return [*said[spoken:], 1]


def toy_machine(  # noqa: PLR0913 - the policy and what it says
    config: RunConfig,
    taskset: Taskset,
    *,
    delay: Delay = a_moment,
    route: Route | None = None,
    policy: Policy | None = None,
    chat: Any = NumberChat(),  # noqa: B008 - it has no state
    say: Script = noise,
) -> LocalComponents:
    """Return real components with a scripted engine, which says what `say` returns."""
    policy = policy or tiny_policy(dtype=config.trainer.dtype)
    engine = ScriptedEngine(say, token_delay=delay, signals=random_signals)
    scorer = LocalScorer(policy, 1.0, 4096)
    old = (route or ScoresAtClosing)(scorer, engine)
    rules = LossSpec(config.correction, config.objective)
    auditor = Auditor(LocalScorer(policy, 1.0, 4096), old, rules, share=config.audit.share)
    techniques = Techniques.of(config)
    trainer = LocalTrainer(policy, config, old, auditor.look, techniques=techniques)
    generator = Generator(engine, chat, config.engine, signals=reads_signals(config))
    return LocalComponents(policy, taskset, generator, scorer, old, auditor, trainer, techniques)


def make(
    folder: Path, tasks: Iterator[int], *, budget: int = 1, steps: int = 12, **toys: Any
) -> RunComponents:
    """Return a run that has not started. `toys` are options of `toy_machine`."""
    config = configure(steps=steps, max_staleness=budget)
    machine = toy_machine(config, Numbers(tasks), **toys)
    log = RunLog(folder)
    parts = build(config, machine, Outputs(log, Quiet()), first_state(machine, config, folder))
    return replace(parts, log=Log(log))  # type: ignore[arg-type]


def with_credit(parts: RunComponents, credit: Any) -> RunComponents:
    """Return the same run with another function that computes the advantages."""
    hooks = parts.techniques
    names = (
        "more",
        "rounds",
        "reads_states",
        "read_states",
        "replayed",
        "max_replay_age",
        "prepared",
        "trained",
    )
    calls = {name: getattr(hooks, name) for name in names}
    return replace(parts, techniques=SimpleNamespace(credit=credit, **calls))  # type: ignore[arg-type]


@contextmanager
def closing_worker(parts: RunComponents) -> Iterator[None]:
    try:
        yield
    finally:
        parts.close()
        parts.log.close(RunOutcome("finished"))


def run(parts: RunComponents) -> list[dict[str, Any]]:
    async def main() -> None:
        async with asyncio.timeout(LIMIT_S):
            await loop.train(parts)

    with closing_worker(parts), parts.journal:
        asyncio.run(main())
    return parts.log.rows  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("budget", [3, 1, 0])
def test_staleness_on_the_real_path_keeps_its_bound(tmp_path: Path, budget: int) -> None:
    rows = run(make(tmp_path, count(), budget=budget))
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert max(row["schedule/staleness_max"] for row in rows) == budget
    assert all(row["rollout/episodes"] == 6 for row in rows)


def test_closing_is_given_every_unscored_piece_of_the_version(tmp_path: Path) -> None:
    parts = make(tmp_path, count(), budget=2)
    seen: dict[int, set[tuple[int, int]]] = {}
    arrived = parts.rollout.on_piece

    def hear(piece: PendingPiece) -> None:
        arrived(piece)
        seen.setdefault(piece.piece.version, set()).add((piece.episode, piece.start))

    parts.rollout.on_piece = hear
    run(parts)
    closed = parts.old_logps.closed  # type: ignore[attr-defined]
    assert sorted(closed) == list(range(12))
    consumed: list[set[int]] = [set() for _ in range(12)]
    with Journal.read(tmp_path) as journal:
        for row in trained_episodes(journal):
            consumed[row["step"] - 1].add(row["episode"])
    for version, pieces in closed.items():
        assert pieces == {
            place for place in seen.get(version, ()) if place[0] not in consumed[version]
        }
    assert sum(map(len, closed.values())) >= 12 * 6


class ScoresWhileWaiting(OldLogps):
    """A route that notes what it is told while the trainer waits."""

    needs = Needs(idle=True, snapshots=True)

    def __init__(self, scorer: Scorer, engine: ScriptedEngine) -> None:
        self.scorer = scorer
        self.engine = engine
        self.published = -1
        self.past: dict[int, set[tuple[int, int, int]]] = {}

    def on_published(self, live: Collection[int]) -> None:
        self.published = self.scorer.version

    def on_wait(self, past: Sequence[PendingPiece]) -> None:
        assert self.published == self.scorer.version, "no engine has the version yet"
        self.past[self.scorer.version] = {
            (piece.piece.version, piece.episode, piece.start) for piece in past
        }

    def before_update(self, unscored: Sequence[PendingPiece]) -> None:
        raise AssertionError("the route keeps the weights")

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        return batch.behavior_logp.clone(), torch.zeros_like(batch.sampled)


def test_a_waiting_route_that_keeps_versions_is_told_every_piece_of_earlier_ones(
    tmp_path: Path,
) -> None:

    async def slowly(tokens: Sequence[int], params: SamplingParams) -> None:
        await asyncio.sleep(0.02)

    parts = make(tmp_path, count(), budget=2, route=ScoresWhileWaiting, delay=slowly)
    seen: set[tuple[int, int, int]] = set()
    arrived = parts.rollout.on_piece

    def hear(piece: PendingPiece) -> None:
        arrived(piece)
        seen.add((piece.piece.version, piece.episode, piece.start))

    parts.rollout.on_piece = hear
    rows = run(parts)
    past = parts.old_logps.past  # type: ignore[attr-defined]
    consumed: dict[int, int] = {}
    with Journal.read(tmp_path) as journal:
        for row in trained_episodes(journal):
            consumed[row["episode"]] = row["step"]
    for version, pieces in past.items():
        assert pieces == {
            place
            for place in seen
            if place[0] < version and consumed.get(place[1], len(rows) + 1) > version
        }
    assert any(past.values())
    assert all(row["old_logps/wait_s"] >= row["old_logps/prepare_s"] > 0 for row in rows)


def test_episodes_that_no_batch_contains_keep_no_version(tmp_path: Path) -> None:
    """An estimator leaves out the last sibling. Its pieces are discarded with those of its group,
    and no route scores them any more."""
    parts = make(tmp_path, count(), steps=5)
    estimate = parts.techniques.credit
    consumed: set[int] = set()

    def without_the_last(groups: Sequence[Group], **seen: Any) -> tuple[list[Any], Any]:
        consumed.update(episode for group in groups for episode in group.episodes)
        kept = [replace(group, trajectories=group.trajectories[:-1]) for group in groups]
        return estimate(kept, **seen)

    closing, late = parts.old_logps.before_update, set[int]()

    def note(unscored: Sequence[PendingPiece]) -> None:
        late.update(piece.episode for piece in unscored if piece.episode in consumed)
        closing(unscored)

    parts.old_logps.before_update = note  # type: ignore[method-assign]
    rows = run(with_credit(parts, without_the_last))
    assert rows[-1]["trainer/action_tokens"] == 2 * 2 * 2 * REPLY
    assert not late
    left = {
        piece.episode
        for version in parts.pending.versions
        for piece in parts.pending.of_version(version)
    }
    assert len(consumed) == 5 * 2 * 3 and not left & consumed


def test_a_task_that_comes_again_has_another_seed(tmp_path: Path) -> None:
    """Also in a run that is resumed between its visits."""
    tasks = Numbers(cycle([3, 4]))

    def draw(tasks: Any, life: ResumeState, number: int) -> list[GroupRequest]:
        stream = training_requests(tasks, 7, life, identify=Identities(tasks), skipped=())
        return asyncio.run(taken(stream, number))

    requests = draw(tasks, ResumeState(), 6)
    assert [request.seed for request in requests[:2]] == [7, 7]
    assert len({(request.task, request.seed) for request in requests}) == 6
    resumed = draw(Numbers(cycle([3, 4])), ResumeState(place=3, admitted=3), 3)
    assert resumed == requests[3:]


def test_a_route_hears_of_a_version_before_any_engine_has_it_and_when_all_do(
    tmp_path: Path,
) -> None:
    parts, heard = make(tmp_path, count(), steps=3), list[tuple[str, int, int]]()
    engine, trainers = (
        parts.old_logps.engine,
        asyncio.run(parts.trainer_thread.run(threading.get_ident)),
    )  # type: ignore[attr-defined]

    def hear(name: str, *live: object) -> None:
        assert threading.get_ident() == trainers
        heard.append((name, parts.trainer.version, engine.version))

    parts.old_logps.before_publish = partial(hear, "publishing")  # type: ignore[method-assign]
    parts.old_logps.on_published = partial(hear, "published")  # type: ignore[method-assign]
    run(parts)
    assert heard == [
        call for v in range(4) for call in (("publishing", v, v - 1), ("published", v, v))
    ]


@pytest.mark.parametrize("large", [True, False])
def test_episodes_continue_while_a_large_batch_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    parts = make(tmp_path, count(), steps=2)
    trainers = asyncio.run(parts.trainer_thread.run(threading.get_ident))
    if large:
        monkeypatch.setattr(loop, "LARGE_BATCH_TOKENS", 2 * 3 * 2 * REPLY)  # less than a batch
    builders: set[int] = set()
    event_loops: list[asyncio.AbstractEventLoop] = []
    arrived, real = parts.rollout.on_piece, loop.collate

    def on_piece(piece: PendingPiece) -> None:
        event_loops.append(asyncio.get_running_loop())
        arrived(piece)

    def collate(*arguments: Any, **options: Any) -> Batch:
        builders.add(threading.get_ident())
        continued = threading.Event()
        event_loops[-1].call_soon_threadsafe(continued.set)
        assert not large or continued.wait(20), "the event loop waits for the batch"
        return real(*arguments, **options)

    parts.rollout.on_piece = on_piece
    monkeypatch.setattr(loop, "collate", collate)
    run(parts)
    assert builders == {trainers if large else threading.get_ident()}


class Keeps(OldLogps):
    """A route that answers at once for any version."""

    def __init__(self, *, snapshots: bool, trained_weights: bool = False) -> None:
        self.needs = Needs(snapshots=snapshots, trained_weights=trained_weights)

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        return batch.behavior_logp.clone(), torch.zeros_like(batch.sampled)


@pytest.mark.parametrize(
    ("snapshots", "trained_weights"), [(True, False), (False, False), (True, True)]
)
def test_the_next_batch_is_scored_and_its_gradient_formed_while_a_version_is_published(
    tmp_path: Path, snapshots: bool, trained_weights: bool
) -> None:
    """If the route keeps versions outside the trained model.

    Otherwise it is notified of the version first: an engine may still read the trained model's
    weights. The next optimizer step waits for both.
    """
    config = configure(steps=3, max_staleness=2)
    machine = toy_machine(
        config,
        Numbers(count()),
        route=lambda scorer, engine: Keeps(snapshots=snapshots, trained_weights=trained_weights),
    )
    log = RunLog(tmp_path)
    parts = replace(
        build(config, machine, Outputs(log, Quiet()), first_state(machine, config, tmp_path)),
        log=Log(log),
    )
    heard, formed = list[str](), threading.Event()
    beside = snapshots and not trained_weights

    def hear(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            heard.append(f"{name} {parts.trainer.steps}")
            (formed.set if name == "backward" else formed.clear)()
            return real(*arguments)

        setattr(owner, name, call)

    for owner, name in (
        (parts.trainer, "prepare"),
        (parts.trainer, "backward"),
        (parts.trainer, "step"),
    ):
        hear(owner, name)
    hear(parts.old_logps, "on_published")
    bring = parts.publisher.publish

    async def publish() -> None:
        if beside and 0 < parts.trainer.steps < 3:  # a slow engine
            assert await asyncio.to_thread(formed.wait, 20)
        await bring()

    parts.publisher.publish = publish  # type: ignore[method-assign]
    run(parts)
    between = (
        ["prepare {0}", "backward {0}", "on_published {0}"]
        if beside
        else ["on_published {0}", "prepare {0}", "backward {0}"]
    )
    first, *rest = (
        ["on_published 0", "prepare 0", "backward 0", "step 0"],
        *([*between, "step {0}"] for _ in range(2)),
    )
    told = [call.format(number) for number, calls in enumerate((first, *rest)) for call in calls]
    assert heard == [*told, "on_published 3"]


def keeping(folder: Path, *, snapshots: bool = True) -> RunComponents:
    """Prepare a run of three steps with a checkpoint after each."""
    config = configure(steps=3, max_staleness=2, every=1)
    machine = toy_machine(
        config, Numbers(count()), route=lambda scorer, engine: Keeps(snapshots=snapshots)
    )
    log = RunLog(folder)
    return replace(
        build(config, machine, Outputs(log, Quiet()), first_state(machine, config, folder)),
        log=Log(log),
    )


def test_engines_sample_while_a_version_that_the_journal_has_is_staged(tmp_path: Path) -> None:
    parts = keeping(tmp_path)
    heard = list[str]()
    note, stage, bring = parts.journal.publishing, parts.publisher.stage, parts.publisher.publish

    async def publishing(version: int) -> None:
        await note(version)
        heard.append(f"journal {version}")

    async def staging() -> None:
        if parts.trainer.version:
            reply = await cast(Engine, parts.engine).sample([1, 1], SamplingParams(1, ()))
            heard.append(f"stage, a reply of {reply.piece.version}")
        await stage()

    async def publish() -> None:
        heard.append("load")
        await bring()

    parts.journal.publishing = publishing  # type: ignore[method-assign]
    parts.publisher.stage = staging  # type: ignore[method-assign]
    parts.publisher.publish = publish  # type: ignore[method-assign]
    run(parts)
    told = [
        [f"journal {version}", f"stage, a reply of {version - 1}", "load"]
        for version in range(1, 4)
    ]
    assert heard == ["journal 0", "load", *(call for calls in told for call in calls)]


@pytest.mark.parametrize("snapshots", [True, False])
def test_a_checkpoint_is_written_beside_the_next_gradient_and_before_the_next_step(
    tmp_path: Path, snapshots: bool
) -> None:
    """It holds the live weights, which do not change until the save has read them."""
    parts = keeping(tmp_path, snapshots=snapshots)
    formed, moved = ([threading.Event() for _ in range(4)] for _ in range(2))
    form, move, write = parts.trainer.backward, parts.trainer.step, parts.checkpoints.write
    happened: list[str] = []

    def backward(part: Any) -> None:
        form(part)
        happened.append(f"backward {parts.trainer.steps + 1}")
        formed[parts.trainer.steps].set()

    def step() -> None:
        happened.append(f"step {parts.trainer.steps + 1}")
        moved[parts.trainer.steps].set()
        move()

    def late(held: Any) -> str:
        number = held.progress.step
        if number < 3:
            assert formed[number].wait(LIMIT_S)
            moved[number].wait(0.05)  # a step that did not wait would come now
        name = write(held)
        happened.append(f"written {number}")
        return name

    parts.trainer.backward, parts.trainer.step = backward, step  # type: ignore[method-assign]
    parts.checkpoints.write = late  # type: ignore[method-assign]
    run(parts)
    told = [[f"backward {n + 1}", f"written {n}", f"step {n + 1}"] for n in (1, 2)]
    assert happened == ["backward 1", "step 1", *told[0], *told[1], "written 3"]
    for number in (2, 3):
        held = parts.checkpoints.load(f"step{number:06d}-version{number:06d}")
        published = parts.checkpoints.weights(number)
        assert held.states["trainer"]["steps"] == number
        assert held.states["trainer"]["optimizer"]["state"][0]["step"] == number
        assert all(torch.equal(held.policy[name], tensor) for name, tensor in published.items())
        assert all(
            torch.equal(held.states["trainer"]["weights"][name], held.policy[name])
            for name in published
        )


class Counts:
    """A technique that counts the groups of each task."""

    def __init__(self) -> None:
        self.seen: list[Outcome] = []
        self.counts: dict[str, int] = {}

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self.seen += outcomes
        for outcome in outcomes:
            self.counts[outcome.task] = self.counts.get(outcome.task, 0) + 1

    def state(self) -> Mapping[str, Any]:
        return {"counts": dict(self.counts)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.counts = dict(state["counts"])


class Repeated(Numbers):
    """Numbers under new indices each time the list repeats."""

    def identity(self, task: Task) -> str:
        return str(task.index % 4)


def test_a_technique_learns_from_each_batch_once_and_its_state_is_in_the_checkpoint(
    tmp_path: Path,
) -> None:
    """The checkpoint of a step has the results of all batches up to that step."""
    config = configure(steps=3, every=1)
    counts = Counts()
    machine = toy_machine(
        config, Repeated(count()), route=lambda scorer, engine: Keeps(snapshots=True)
    )
    machine = replace(machine, techniques=Techniques({"counts": counts}))
    log = RunLog(tmp_path)
    parts = build(config, machine, Outputs(log, Quiet()), first_state(machine, config, tmp_path))
    rows = run(replace(parts, log=Log(log)))
    assert counts.counts == {"0": 2, "1": 2, "2": 1, "3": 1}
    for seen in counts.seen:
        assert len(seen.rewards) == 3 and seen.failures == 0 and seen.tokens == 3 * 2 * REPLY
        assert 0 <= seen.lag <= 1
    assert [outcome.num_batches + outcome.lag for outcome in counts.seen] == [0, 0, 1, 1, 2, 2]
    assert sum(seen.tokens for seen in counts.seen[:2]) == rows[0]["trainer/action_tokens"]
    states = [
        parts.checkpoints.load(f"step{step:06d}-version{step:06d}").states["technique/counts"]
        for step in (2, 3)  # the two that are kept
    ]
    assert [sum(state["counts"].values()) for state in states] == [4, 6]
    with closing_worker(parts):
        newest = parts.checkpoints.load("step000003-version000003")
        counts.counts = {}
        parts.checkpoints.restore(newest)
    assert counts.counts == {"0": 2, "1": 2, "2": 1, "3": 1}


class DrawsFirst(Counts):
    """A sampler that records how many groups it had learned from at each draw."""

    def __init__(self) -> None:
        super().__init__()
        self.known: list[int] = []

    def draw(self, tasks: Sequence[str], context: DrawContext) -> Draw:
        self.known.append(len(self.seen))
        return Draw(tasks[0])


def test_a_task_is_drawn_when_its_group_begins(tmp_path: Path) -> None:
    """Four groups begin at first. Each batch of two makes room for two, which are drawn after the
    sampler has learned from it.
    """
    config = replace(configure(steps=3), selection=SelectionConfig(pool=8))
    sampler = DrawsFirst()
    machine = toy_machine(
        config, Numbers(count()), route=lambda scorer, engine: Keeps(snapshots=True)
    )
    machine = replace(machine, techniques=Techniques({"first": sampler}))
    log = RunLog(tmp_path)
    parts = build(config, machine, Outputs(log, Quiet()), first_state(machine, config, tmp_path))
    run(replace(parts, log=Log(log)))
    assert sampler.known[:8] == [0, 0, 0, 0, 2, 2, 4, 4]


@pytest.mark.parametrize("centre", ["probe", "loo"])
def test_hidden_states_are_read_before_the_advantages_only_if_a_technique_needs_them(
    tmp_path: Path, centre: str
) -> None:
    config = override(configure(steps=3), {"techniques": "baseline", "baseline.centre": centre})
    machine = toy_machine(
        config, Numbers(count()), route=lambda scorer, engine: Keeps(snapshots=True)
    )
    log = RunLog(tmp_path)
    parts = build(config, machine, Outputs(log, Quiet()), first_state(machine, config, tmp_path))
    assert parts.techniques.reads_states == (centre == "probe")
    rows = run(replace(parts, log=Log(log)))
    for row in rows:
        passed = row.get("baseline/forward_tokens", 0)
        assert (0 < passed <= row["trainer/sequence_tokens"]) == (centre == "probe")


def test_a_part_of_a_batch_is_named_as_one(tmp_path: Path) -> None:
    """With `trainer.stream`, techniques see the first groups of a batch, and then all of it."""

    async def every_other_slow(tokens: Sequence[int], params: SamplingParams) -> None:
        for _ in range(40 * (tokens[1] % 2)):
            await asyncio.sleep(0)

    config = configure(steps=2)
    config = replace(config, trainer=replace(config.trainer, stream=True))
    machine = toy_machine(config, Numbers(count()), delay=every_other_slow)
    log, seen = RunLog(tmp_path), list[tuple[int, bool]]()
    parts = build(config, machine, Outputs(log, Quiet()), first_state(machine, config, tmp_path))
    credit = parts.techniques.credit

    def recorded(groups: Sequence[Group], *, whole: bool, **options: Any) -> Any:
        seen.append((len(groups), whole))
        return credit(groups, whole=whole, **options)

    run(with_credit(replace(parts, log=Log(log)), recorded))
    size = config.schedule.groups_per_step
    assert [each for each in seen if each[1]] == [(size, True)] * 2
    assert any(number < size for number, whole in seen if not whole)


def marked(folder: Path) -> list[int]:
    with Journal.read(folder) as reader:
        return [mark.step for mark in reader.checkpoints()]


@pytest.mark.parametrize("disk_fails", [False, True])
def test_a_batch_that_fails_leaves_the_step_before_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk_fails: bool
) -> None:
    """If that step cannot be written, its error is raised."""
    parts, failed = keeping(tmp_path), threading.Event()
    form, write, learn = parts.trainer.backward, parts.checkpoints.write, loop.learn
    happened: list[str] = []

    def backward(part: Any) -> None:
        if parts.trainer.steps == 2:
            raise FloatingPointError("nan in a gradient")
        form(part)

    async def learning(*given: Any) -> Mapping[str, Any]:
        try:
            return await learn(*given)
        except FloatingPointError:
            happened.append("batch 3 fails")
            # The loop can call this only after the error has reached a task that waits.
            asyncio.get_running_loop().call_soon(failed.set)
            raise

    def late(held: Any) -> str:
        assert held.progress.step != 2 or failed.wait(LIMIT_S)
        if disk_fails and held.progress.step == 2:
            raise OSError("the disk is full")
        name = write(held)
        happened.append(f"written {held.progress.step}")
        return name

    monkeypatch.setattr(loop, "learn", learning)
    parts.trainer.backward, parts.checkpoints.write = backward, late  # type: ignore[method-assign]
    with pytest.raises(ExceptionGroup) as failure:
        run(parts)
    happened.append("ended")
    written = [] if disk_fails else ["written 2"]
    assert happened == ["written 1", "batch 3 fails", *written, "ended"]
    assert str(first_error(failure.value)) == (
        "the disk is full" if disk_fails else "nan in a gradient"
    )
    assert [row["step"] for row in parts.log.rows] == ([1] if disk_fails else [1, 2])  # type: ignore[attr-defined]
    assert marked(tmp_path) == ([0, 1] if disk_fails else [0, 1, 2])


def test_a_batch_that_fails_does_not_wait_for_an_evaluation(tmp_path: Path) -> None:
    """Held-out episodes that never end are cancelled. The checkpoint before is written."""
    parts, cancelled = keeping(tmp_path), list[bool]()
    began = threading.Event()
    form = parts.trainer.backward

    def backward(part: Any) -> None:
        if parts.trainer.steps == 1:
            assert began.wait(LIMIT_S)
            raise FloatingPointError("nan in a gradient")
        form(part)

    async def evaluation(**_: Any) -> list[bool | None]:
        if parts.trainer.steps == 0:
            return [True]
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(True)
        return []

    parts.trainer.backward = backward  # type: ignore[method-assign]
    config = replace(parts.config, eval=replace(parts.config.eval, interval=1))
    with pytest.raises(ExceptionGroup) as failure:
        run(replace(parts, config=config, evaluation=Evaluation(evaluation)))
    assert str(first_error(failure.value)) == "nan in a gradient"
    assert cancelled and marked(tmp_path) == [0, 1]
    assert [row["step"] for row in parts.log.rows] == [0, 1]  # type: ignore[attr-defined]


def test_a_checkpoint_that_has_begun_outlives_a_cancellation(tmp_path: Path) -> None:
    parts = keeping(tmp_path)
    write = parts.checkpoints.write
    happened: list[str] = []

    async def main() -> None:
        events, running = asyncio.get_running_loop(), asyncio.create_task(loop.train(parts))

        async def cancel() -> None:
            running.cancel()
            for _ in range(20):  # it reaches every task
                await asyncio.sleep(0)
            happened.append("ended" if running.done() else "cancelled")

        def late(held: Any) -> str:
            if held.progress.step == 2:
                asyncio.run_coroutine_threadsafe(cancel(), events).result(LIMIT_S)
            name = write(held)
            happened.append(f"written {held.progress.step}")
            return name

        parts.checkpoints.write = late  # type: ignore[method-assign]
        with pytest.raises(asyncio.CancelledError):
            await running
        happened.append("ended")

    with closing_worker(parts), parts.journal:
        asyncio.run(main())
    assert happened == ["written 1", "cancelled", "written 2", "ended"]
    assert marked(tmp_path) == [0, 1, 2]


def test_what_keeps_every_thread_of_asyncio_busy_holds_up_no_checkpoint(tmp_path: Path) -> None:
    parts, over = keeping(tmp_path), threading.Event()

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        blocking = asyncio.create_task(asyncio.to_thread(over.wait, 2 * LIMIT_S))
        await asyncio.sleep(0)
        async with asyncio.timeout(LIMIT_S):
            await loop.train(parts)
        assert not blocking.done()
        over.set()
        await blocking

    with closing_worker(parts), parts.journal:
        asyncio.run(main())
    assert marked(tmp_path) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "tasks, says",
    [
        (iter(range(5)), "ran out of tasks"),
        (iter([13_013] * 50), "all 6 episodes of a batch failed"),
    ],
)
def test_what_cannot_go_on_ends_with_its_own_error(
    tmp_path: Path, tasks: Iterator[int], says: str
) -> None:
    with pytest.raises(ExceptionGroup) as failure:
        run(make(tmp_path, tasks))
    assert says in str(first_error(failure.value))


def test_a_failing_route_ends_the_run(tmp_path: Path) -> None:
    parts = make(tmp_path, count())

    def broken(unscored: Sequence[PendingPiece]) -> None:
        raise FloatingPointError("nan in a score")

    parts.old_logps.before_update = broken  # type: ignore[method-assign]
    with pytest.raises(ExceptionGroup) as failure:
        run(parts)
    assert str(first_error(failure.value)) == "nan in a score"


def test_an_evaluation_without_a_finished_episode_has_failed_and_is_not_zero() -> None:
    async def evaluation(**_: Any) -> list[bool | None]:
        return [None, None]

    events: list[dict[str, Any]] = []
    log = SimpleNamespace(
        span=lambda lane, label: nullcontext(),
        phase=print,
        event=lambda kind, **fields: events.append(fields),
    )
    run: Any = SimpleNamespace(trainer=SimpleNamespace(version=3), log=log)
    metrics = asyncio.run(loop.evaluate(run, Evaluation(evaluation), 2))
    assert math.isnan(metrics["eval/success_rate"]) and metrics["eval/failed_tasks"] == 2
    assert math.isnan(events[0]["success"]) and events[0]["failed"] == 2
