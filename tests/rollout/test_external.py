"""Test external agents.

An unmodified agent gives trajectories with the tokens that the engine sampled. Weight updates, the
journal and resuming work as for other episodes, with the library's time-outs, retries and limits. A
fork is trained with its episode's advantage, no token twice. A run trains on it.
"""

import asyncio
import base64
import gc
import importlib.util
import inspect
import json
import os
import random
import signal
import threading
import time
import urllib.error
import urllib.request
import warnings
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import httpx2 as httpx
import pytest
from transformers import AutoTokenizer

from tests.cli.test_run import quiet, small
from tests.support.forked import Forked, run_forked
from tests.support.scripted_agents import SUMS, in_a_process, patient, with_sdk
from tests.support.waits import LIMIT_S, wait_until
from unstale.algorithms import advantages
from unstale.builders import build_rollout
from unstale.cli import session
from unstale.config import (
    SHIPPED_POLICY,
    ConfigError,
    EndpointConfig,
    EngineConfig,
    RolloutConfig,
    TaskConfig,
)
from unstale.config.options import override
from unstale.config.techniques import techniques
from unstale.durability import virtual_clock
from unstale.durability.journal import Journal, check
from unstale.engines import EngineDied, Reply, SamplingParams
from unstale.engines.scripted import ScriptedEngine
from unstale.envs import EnvError
from unstale.envs.chat import Chat
from unstale.envs.external import ExternalAgent
from unstale.envs.registry import build_taskset
from unstale.recipes import RECIPES
from unstale.records import (
    ContextPiece,
    Failure,
    Group,
    GroupRequest,
    Provenance,
    Sampled,
    Task,
    Trajectory,
    TurnLimit,
    collate,
)
from unstale.rollout.endpoint import connections, server
from unstale.rollout.endpoint.agents import AgentRollout
from unstale.rollout.endpoint.check import check_agent
from unstale.rollout.endpoint.server import RecordingEndpoint
from unstale.rollout.endpoint.wire import CompletionRequest
from unstale.rollout.generator import Generator
from unstale.rollout.timeouts import Attempt, first_error

pytestmark = pytest.mark.usefixtures("forked_children")

TOKENIZER = AutoTokenizer.from_pretrained(SHIPPED_POLICY)
CHAT = Chat(TOKENIZER, ())
TASK = Task("sums", "train", 0)


def says(text: str, *, end: bool = True) -> list[int]:
    return [*CHAT.encode(text), *([CHAT.stop_tokens[0]] if end else [])]


CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "10 + 20"}}\n</tool_call>'


def solver(tokens: Sequence[int], params: SamplingParams) -> list[int]:
    """A policy that calls the tool, then repeats its result. It continues interrupted replies."""
    text = CHAT.text(tokens, whole=True)
    before, _, begun = text.rpartition("<|im_start|>assistant\n")
    whole = says("It is 30.") if "<tool_response>" in before else says(CALL)
    return whole[len(says(begun, end=False)) :]


def own_logp(tokens: Sequence[int], token: int) -> float:
    """Return a log-probability that depends on the token and its place."""
    return -0.5 - len(tokens) / 3 - token / 7


class Witness(ScriptedEngine):
    """A scripted engine that remembers the context and the piece of each of its replies."""

    def __init__(self, script: Any, **options: Any) -> None:
        super().__init__(script, **options)
        self.replies: list[tuple[tuple[int, ...], Sampled]] = []

    async def sample(self, tokens: Sequence[int], params: SamplingParams) -> Reply:
        reply = await super().sample(tokens, params)
        self.replies.append((tuple(tokens), reply.piece))
        return reply


class World:
    """A scripted engine behind the endpoint, with a record of every sampled token and its
    context."""

    def __init__(self, say: Any = solver, delay: Any = None, **config: Any) -> None:
        self.room = {"max_context": 512, "max_completion_tokens": 64}
        self.room |= {name: config.pop(name) for name in self.room if name in config}
        self.chat: Chat = config.pop("chat", CHAT)
        logp = config.pop("logp", -0.5)
        self.engine = Witness(self._say, logp=logp, token_delay=delay)
        self.say, self.sampled = say, []
        self.config = RolloutConfig(**{"retries": 0, "timeout_s": LIMIT_S, **config})
        self.events: list[dict[str, Any]] = []
        self.arrived: list[Any] = []
        self.failures: list[tuple[int, Failure, bool]] = []
        self.endpoint = RecordingEndpoint()
        self.turn_limit: TurnLimit | None = None

    def _say(self, tokens: Sequence[int], params: SamplingParams) -> Sequence[int]:
        said = self.say(tokens, params)
        self.sampled.append((tuple(tokens), tuple(said), params.seed))
        return said

    def check_exact(self, trajectory: Trajectory) -> None:
        """Check that a trajectory is one conversation with all that the engine sampled."""
        assert not trajectory.branches and not self.events
        pieces = [piece for _, piece in self.engine.replies]
        recorded, sampled = (
            [
                (token, logp, piece.version)
                for piece in each
                for token, logp in zip(piece.tokens, piece.behavior_logp, strict=True)
            ]
            for each in (trajectory.sampled, pieces)
        )
        assert recorded == sampled
        for context, piece in self.engine.replies:
            read = (*context, *piece.tokens)
            assert trajectory.tokens[: len(read)] == read
        assert trajectory.tokens == read

    def rollout(self, tasks: ExternalAgent) -> AgentRollout:
        rollout = AgentRollout(
            Generator(self.engine, self.chat, EngineConfig(**self.room)),
            tasks,
            self.config,
            endpoint=self.endpoint,
            on_event=lambda kind, **fields: self.events.append({"kind": kind, **fields}),
            on_piece=self.arrived.append,
            on_failure=lambda *failure: self.failures.append(failure),
        )
        rollout.turn_limit = self.turn_limit
        return rollout

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        await self.start_engine()
        async with self.endpoint:
            yield

    async def start_engine(self) -> None:
        await self.engine.start()
        await self.engine.load({}, version=0)
        await self.engine.resume()

    def play(
        self, agent: Any, tasks: Sequence[Any] = SUMS, *, run: Any = asyncio.run, **options: Any
    ) -> Trajectory | Failure:
        async def main() -> Trajectory | Failure:
            async with self.open():
                rollout = self.rollout(ExternalAgent(agent, tasks, name="sums", **options))
                return await rollout.episode(TASK, env_seed=7, noise_seed=8)

        outcome: Trajectory | Failure = run(main())
        return outcome


def whole(outcome: Trajectory | Failure) -> Trajectory:
    assert isinstance(outcome, Trajectory), outcome
    return outcome


def test_on_the_virtual_clock_an_sdk_is_connected_in_memory_and_a_process_is_refused() -> None:
    virtual = partial(virtual_clock.run, virtual=True)
    trajectory = whole(World().play(with_sdk, run=virtual))
    assert (trajectory.reward, trajectory.num_turns) == (1.0, 2)
    failure = World().play(in_a_process, run=virtual)
    assert isinstance(failure, Failure) and failure.stage == "agent"


@pytest.mark.parametrize("agent", [with_sdk, in_a_process])
def test_an_agent_that_is_brought_along_becomes_a_trajectory_of_what_was_sampled(
    agent: Any,
) -> None:
    world = World()
    trajectory = whole(world.play(agent))
    assert (trajectory.rewards, trajectory.stop, trajectory.num_turns) == (
        {"reward": 1.0},
        "done",
        2,
    )
    assert not trajectory.branches and trajectory.facts["branches"] == 0
    (first, call, _), (second, answer, _) = world.sampled
    following = trajectory.pieces[2].tokens
    assert trajectory.tokens == (*first, *call, *following, *answer)
    assert second == (*first, *call, *following), (
        "the second reply was sampled after the first one's own tokens"
    )
    assert [len(open_.tokens) for open_ in world.arrived] == [
        len(first) + len(call),
        len(trajectory),
    ]
    assert not world.events


def test_weight_updates_interrupt_its_replies_as_anybodys() -> None:
    reached, go = asyncio.Event(), asyncio.Event()

    async def slow(tokens: Sequence[int], params: SamplingParams) -> None:
        if world.engine.version == 0 and CHAT.text(tokens[-1:]) == "10":
            reached.set()
            await go.wait()

    world = World(delay=slow)

    async def main() -> Trajectory | Failure:
        async with world.open(), asyncio.TaskGroup() as tasks:
            rollout = world.rollout(ExternalAgent(with_sdk, SUMS[:1], name="sums"))
            episode = tasks.create_task(rollout.episode(TASK, env_seed=7, noise_seed=8))
            await reached.wait()
            await world.engine.interrupt()
            await world.engine.load({}, version=1)
            await world.engine.resume()
        return episode.result()

    trajectory = whole(asyncio.run(main()))
    assert [piece.version for piece in trajectory.sampled] == [0, 1, 1]
    assert trajectory.num_turns == 2 and trajectory.reward == 1


def test_a_fork_is_a_trajectory_with_its_episodes_reward_and_no_token_is_trained_twice() -> None:
    async def forks(base_url: str, task: str, seed: int, api_key: str) -> dict[str, float]:
        ask = asker(base_url, api_key)
        history: list[Any] = [{"role": "user", "content": "one"}]
        history.append(await ask(history))
        history.append({"role": "user", "content": "two"})
        await ask(history)
        await ask(
            [*history[:-1], {"role": "user", "content": "three"}]
        )  # another way on from the first answer
        await ask(
            [{"role": "system", "content": "short"}, *history]
        )  # the same answer behind another beginning
        return {"right": 1.0, "style": 0.25}

    world = World(lambda tokens, params: says(f"so {len(tokens)} {params.seed % 10}"))
    trajectory = whole(world.play(forks))
    assert [one.reward for one in (trajectory, *trajectory.branches)] == [1.25] * 3
    beside, behind = trajectory.branches
    shared = trajectory.pieces[0].tokens + trajectory.pieces[1].tokens
    assert beside.tokens[: len(shared)] == shared
    sources = [[piece.provenance.name for piece in one.pieces] for one in trajectory.branches]
    assert sources == [
        ["ENVIRONMENT", how, "ENVIRONMENT", "SAMPLED"] for how in ("FORCED", "REWRITTEN")
    ]
    assert behind.pieces[1].tokens == trajectory.pieces[1].tokens
    assert [(event["parent"], event["at"], event["shared_replies"]) for event in world.events] == [
        (0, 2, 1),
        (0, 0, 0),
    ]
    assert [event["reason"] for event in world.events] == ["an earlier prompt was edited"] * 2
    other = Trajectory(
        (ContextPiece((1,)), Sampled((2,), (-1.0,), 0)), {"reward": 0.25}, "done", TASK, 3, 99
    )
    credited = advantages.grpo_no_std([Group(TASK, (trajectory, other))])
    assert [item.advantage for item in credited] == [(0.5,), (0.5,), (0.5,), (-0.5,)]
    batch = collate(credited[:3])
    assert batch.episodes == (0, 1, 2)
    assert int(batch.sampled.sum()) == sum(len(said) for _, said, _ in world.sampled)


class Refusal(Exception):
    """Status and code of an error response."""


@pytest.mark.parametrize(
    "estimator",
    [
        advantages.grpo,
        advantages.rloo,
        advantages.opo,
        advantages.reinforce_batch,
        advantages.turn_level,
    ],
)
def test_every_estimator_counts_an_episode_once_whatever_its_branches(estimator: Any) -> None:
    def said(number: int, reward: float, *branches: Trajectory) -> Trajectory:
        pieces = (ContextPiece((1,)), Sampled((2, 3), (-1.0, -1.0), 0))
        return Trajectory(pieces, {"r": reward}, "done", TASK, number, number, branches=branches)

    alone = estimator([Group(TASK, (said(0, 1.0), said(1, 0.0), said(2, 0.0)))])
    forked = estimator(
        [
            Group(
                TASK,
                (
                    said(0, 1.0, said(3, 1.0)),
                    said(1, 0.0, said(4, 0.0)),
                    said(2, 0.0, said(5, 0.0)),
                ),
            )
        ]
    )
    assert [item.trajectory.episode for item in forked] == [0, 3, 1, 4, 2, 5]
    once = [item.advantage[0] for item in forked]
    assert once[::2] == once[1::2] == pytest.approx([item.advantage[0] for item in alone], rel=0.1)


def post(base_url: str, api_key: str, body: Any, path: str = "/chat/completions") -> Any:
    key = {"Authorization": f"Bearer {api_key}"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(base_url + path, json.dumps(body).encode(), key), timeout=LIMIT_S
        ) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            raise Refusal(error.code, json.load(error)["error"]["code"]) from None


def asker(base_url: str, api_key: str) -> Callable[..., Awaitable[Any]]:
    async def ask(messages: Any, **fields: Any) -> Any:
        answer = await asyncio.to_thread(post, base_url, api_key, {"messages": messages, **fields})
        return answer["choices"][0]["message"]

    return ask


def test_an_agent_that_fails_is_begun_again_with_its_seed_and_then_reported() -> None:
    seeds = []

    async def fails(base_url: str, task: str, seed: int, api_key: str) -> float:
        seeds.append(seed)
        await asker(base_url, api_key)([{"role": "user", "content": "one"}])
        await asker(base_url, api_key)([{"role": "user", "content": "two"}])
        raise KeyError("gone")

    world = World(retries=1)
    outcome = world.play(fails)
    assert isinstance(outcome, Failure) and outcome.stage == "agent"
    assert outcome.error.startswith("KeyError: 'gone' (tests/rollout/test_external.py, line ")
    assert seeds == [7, 7]
    assert [(episode, final) for episode, _, final in world.failures] == [
        (1, False),
        (0, False),
        (3, False),
        (2, True),
    ]


def test_an_agent_that_fails_after_an_accepted_call_was_not_ended_by_an_earlier_refusal() -> None:
    async def trims_and_fails(base_url: str, task: str, seed: int, api_key: str) -> float:
        ask = asker(base_url, api_key)
        with pytest.raises(Refusal):
            await ask([{"role": "user", "content": "too long " * 500}])
        await ask([{"role": "user", "content": "short"}])
        raise KeyError("gone")

    outcome = World().play(trims_and_fails)
    assert isinstance(outcome, Failure)
    assert outcome.error.startswith("KeyError: 'gone' (tests/rollout/test_external.py, line ")
    assert outcome.error.endswith("""in trims_and_fails: raise KeyError("gone"))""")


def test_a_refusal_ends_an_agent_although_another_of_its_calls_is_accepted_later() -> None:
    """One of two sub-agents is refused while the other one has not been answered yet."""
    refused, reached = asyncio.Event(), asyncio.Event()

    async def slow(tokens: Sequence[int], params: SamplingParams) -> None:
        if refused.is_set():
            reached.set()
            await asyncio.sleep(LIMIT_S)  # until the end of the agent cancels it

    async def gathers(base_url: str, task: str, seed: int, api_key: str) -> float:
        ask = asker(base_url, api_key)
        await ask([{"role": "user", "content": "first"}])
        try:
            await ask([{"role": "user", "content": "too long " * 500}])
        finally:
            refused.set()
            other = asyncio.create_task(ask([{"role": "user", "content": "short"}]))
            await reached.wait()
            other.cancel()
        return 1.0

    trajectory = whole(World(lambda tokens, params: says("so"), delay=slow).play(gathers))
    assert trajectory.stop == "max_tokens"


def test_the_branches_of_an_agent_that_ignores_its_end_are_reported_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No piece of them may keep old weights any longer."""

    async def refuses_to_end(attempt: Attempt) -> Any:
        with suppress(BaseException):
            await attempt
        raise EnvError("it ignores cancellation")

    async def forks(base_url: str, task: str, seed: int, api_key: str) -> float:
        ask = asker(base_url, api_key)
        await ask([{"role": "user", "content": "one"}])
        await ask([{"role": "user", "content": "two"}])
        return 1.0

    monkeypatch.setattr(Attempt, "outcome", refuses_to_end)
    world = World()
    assert isinstance(world.play(forks), Failure)
    assert [(episode, final) for episode, _, final in world.failures] == [(1, False), (0, True)]


def test_an_attempt_that_fails_leaves_nothing_for_the_garbage_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, make = list[weakref.ref[Any]](), ExternalAgent.env

    def env(self: ExternalAgent, task: Task, seed: int) -> Any:
        made = make(self, task, seed)
        held.append(weakref.ref(made))
        return made

    async def fails(base_url: str, task: str, seed: int, api_key: str) -> float:
        raise KeyError("gone")

    monkeypatch.setattr(ExternalAgent, "env", env)
    gc.disable()
    try:
        assert isinstance(World(retries=2).play(fails), Failure)
        assert [made() for made in held] == [None] * 3
    finally:
        gc.enable()


def test_what_an_agent_waits_for_and_its_own_time_are_told_apart() -> None:
    """Two parallel calls count once."""

    async def slow(tokens: Sequence[int], params: SamplingParams) -> None:
        await asyncio.sleep(0.02)

    async def thinks(base_url: str, task: str, seed: int, api_key: str) -> float:
        ask = asker(base_url, api_key)
        await asyncio.sleep(0.3)
        await asyncio.gather(*(ask([{"role": "user", "content": word}]) for word in ("one", "two")))
        await asyncio.sleep(0.3)
        return 1.0

    world = World(lambda tokens, params: says("a b c d e f"), slow)

    async def main() -> tuple[dict[str, float], float]:
        async with world.open():
            rollout, began = (
                world.rollout(ExternalAgent(thinks, SUMS, name="sums")),
                time.monotonic(),
            )
            whole(await rollout.episode(TASK, env_seed=7, noise_seed=8))
            return rollout.wait_times.read("rollout"), time.monotonic() - began

    spent, took = asyncio.run(main())
    assert spent["rollout/tool_wait_s"] >= 0.59 and spent["rollout/generation_wait_s"] >= 0.1
    assert sum(spent.values()) <= took


@pytest.mark.parametrize("given", ["much", float("nan"), {"a": None}, None])
def test_a_verdict_that_is_no_number_is_a_failed_episode(given: Any) -> None:
    async def odd(base_url: str, task: str, seed: int, api_key: str) -> Any:
        await asker(base_url, api_key)([{"role": "user", "content": "one"}])
        return given

    outcome = World().play(odd)
    assert isinstance(outcome, Failure)
    assert outcome.error.startswith("EnvError: the agent test_a_verdict_that_is_no_number")
    assert ".odd: rewards" in outcome.error
    assert "must be a finite number" in outcome.error


def test_an_agent_that_asks_nothing_is_a_failed_episode() -> None:
    async def silent(base_url: str, task: str, seed: int, api_key: str) -> float:
        return 1.0

    outcome = World().play(silent)
    assert isinstance(outcome, Failure) and "without an answer to any call" in outcome.error


def test_time_runs_out_between_calls_and_not_while_it_waits_for_a_reply() -> None:
    limit = 0.4

    async def slow(tokens: Sequence[int], params: SamplingParams) -> None:
        await asyncio.sleep(limit / 20)  # a reply has 30 tokens

    async def brisk(base_url: str, task: str, seed: int, api_key: str) -> float:
        ask, history = asker(base_url, api_key), []
        for number in range(3):
            history.append({"role": "user", "content": str(number)})
            history.append(await ask(history))
        return 1.0

    for limit in (0.4, 2.0, 10.0):  # a busy machine needs more time between two calls
        long = World(lambda tokens, params: says("so " * 30), slow, timeout_s=limit)
        if isinstance(played := long.play(brisk), Trajectory):
            break
    assert whole(played).num_turns == 3

    async def dreams(base_url: str, task: str, seed: int, api_key: str) -> float:
        await asker(base_url, api_key)([{"role": "user", "content": "one"}])
        return await asyncio.Event().wait() or 1.0

    outcome = World(timeout_s=0.2).play(dreams)
    assert isinstance(outcome, Failure) and outcome.error.startswith("TimeoutError")
    outcome = World().play(dreams, timeout_s=0.5)
    assert isinstance(outcome, Failure) and outcome.error.startswith("TimeoutError")


def test_a_thread_that_nobody_waits_for_any_more_is_refused() -> None:
    told, ended, over = [], threading.Event(), threading.Event()

    def lingers(base_url: str, task: str, seed: int, api_key: str) -> float:
        ended.wait(LIMIT_S)
        try:
            post(base_url, api_key, {"messages": [{"role": "user", "content": "one"}]})
        except Refusal as refusal:
            told.append(refusal.args)
        over.set()
        return 1.0

    async def main(world: World) -> Any:
        async with world.open():
            rollout = world.rollout(ExternalAgent(lingers, SUMS, name="sums"))
            outcome = await rollout.episode(TASK, env_seed=7, noise_seed=8)
            ended.set()
            await asyncio.to_thread(over.wait, LIMIT_S)
            return outcome

    outcome = asyncio.run(main(World(timeout_s=0.2)))
    assert isinstance(outcome, Failure) and told == [(404, "no_episode")]


def test_no_more_agents_run_at_a_time_than_allowed() -> None:
    running, most = 0, 0

    async def counts(base_url: str, task: str, seed: int, api_key: str) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asker(base_url, api_key)([{"role": "user", "content": "one"}])
        running -= 1
        return 1.0

    world = World()

    async def main() -> Group:
        async with world.open():
            rollout = world.rollout(ExternalAgent(counts, SUMS, name="sums", concurrency=2))
            return await rollout.group(GroupRequest(0, TASK, 0, 0), size=6)

    assert len(asyncio.run(main()).trajectories) == 6
    assert most == 2


def test_an_engines_death_ends_the_run_and_not_the_episode() -> None:
    def dies(tokens: Sequence[int], params: SamplingParams) -> Sequence[int]:
        raise EngineDied("out of memory")

    with pytest.raises(ExceptionGroup) as caught:
        World(dies, retries=3).play(with_sdk)
    error = first_error(caught.value)
    assert isinstance(error, EngineDied)


def test_a_limit_refuses_the_call_and_the_agent_may_still_say_what_it_was_worth() -> None:
    async def chats(base_url: str, task: str, seed: int, api_key: str) -> float:
        history: list[Any] = []
        while True:
            history.append({"role": "user", "content": "more"})
            try:
                history.append(await asker(base_url, api_key)(history))
            except Refusal as refusal:
                codes.append(refusal.args)
                if task == "resigned":
                    return 0.5
                raise

    codes: list[Any] = []
    cut = whole(World(max_turns=3).play(chats))
    assert (cut.stop, cut.rewards, cut.num_turns) == ("max_turns", {}, 3)
    judged = whole(World(max_turns=3).play(chats, ["resigned"]))
    assert (judged.stop, judged.reward) == ("done", 0.5)
    full = whole(World(lambda tokens, params: says("so " * 60), max_turns=99).play(chats))
    assert (full.stop, full.reward) == ("max_tokens", 0.0)
    assert codes == [(400, "max_turns")] * 2 + [(400, "context_length_exceeded")]


class Stop(Exception):
    """Raised in place of the death of the run's machine."""


def numbered(tokens: Sequence[int], params: SamplingParams) -> list[int]:
    """A policy whose replies differ by their context and seed."""
    return says(f"so {len(tokens)} {params.seed % 1000}")


def halves(  # noqa: PLR0913 - the agent, its policy and where it is stopped
    folder: Path,
    agent: Any,
    *,
    after: int,
    reply: Any = numbered,
    room: int = 512,
    size: int = 2,
    delay: Any = None,
    run: Any = asyncio.run,
    **options: Any,
) -> tuple[Group, World, World]:
    """Run a group, stop it after so many replies, and resume it from its journal.

    `delay` is that of the run that is stopped.
    """

    def say(tokens: Sequence[int], params: SamplingParams) -> Sequence[int]:
        if len(first.sampled) == after:
            raise Stop
        return list(reply(tokens, params))

    async def begin(world: World) -> None:
        with Journal(folder / "journal.sqlite") as journal:
            try:
                async with world.open():
                    rollout = world.rollout(ExternalAgent(agent, SUMS, name="sums", **options))
                    journal.add_request(request)
                    await journal.publishing(0)
                    await rollout.group(request, size=size, open_writer=journal.begin)
            finally:
                journal.flush()

    async def go_on(world: World) -> Group:
        with Journal.read(folder) as reader:
            (past,) = reader.requests()
            counts = reader.counts()
        with Journal(folder / "journal.sqlite") as journal:
            async with world.open():
                rollout = world.rollout(ExternalAgent(agent, SUMS, name="sums", **options))
                rollout.restore(counts[2], ())
                group = await rollout.group(past, size=size, open_writer=journal.begin)
                await journal.finish(group)
        return group

    request = GroupRequest(0, TASK, 0, 0)
    first, second = World(say, delay, max_context=room), World(reply, max_context=room)
    with pytest.raises(ExceptionGroup):
        run(begin(first))
    return run(go_on(second)), first, second


@pytest.mark.costly
@pytest.mark.parametrize("after", [1, 2, 3])
def test_an_episode_with_forks_goes_on_from_its_journal_token_for_token(
    tmp_path: Path, after: int
) -> None:
    group, first, second = halves(tmp_path, patient, after=after)
    assert len(group.trajectories) == 2 and not group.failures
    assert len(first.sampled) + len(second.sampled) == 4, "what was recorded is not sampled again"
    assert not any("not_replayed" in str(event) for event in second.events)
    again = World(lambda tokens, params: says(f"so {len(tokens)} {params.seed % 1000}"))

    async def undisturbed() -> Group:
        async with again.open():
            rollout = again.rollout(ExternalAgent(patient, SUMS, name="sums"))
            return await rollout.group(GroupRequest(0, TASK, 0, 0), size=2)

    other = asyncio.run(undisturbed())
    assert [tokens_of(one) for one in group.trajectories] == [
        tokens_of(one) for one in other.trajectories
    ]
    with Journal.read(tmp_path) as reader:
        assert reader.group(0) == group and check(reader) == []
        assert len(list(reader.trajectories())) == 4


def test_an_episode_whose_first_call_was_never_answered_is_what_its_branches_said(
    tmp_path: Path,
) -> None:
    async def never(tokens: Sequence[int], params: SamplingParams) -> None:
        if "hello?" in CHAT.text(tokens, whole=True):
            asked.set()
            await asyncio.Event().wait()

    async def hangs_up(base_url: str, task: str, seed: int, api_key: str) -> float:
        key = {"Authorization": f"Bearer {api_key}"}
        async with httpx.AsyncClient(headers=key, timeout=LIMIT_S) as client:
            for said in ("hello?", "one", "two"):
                body = {"messages": [{"role": "user", "content": said}]}
                asking = asyncio.create_task(client.post(f"{base_url}/chat/completions", json=body))
                if said == "hello?":
                    await asked.wait()
                    asking.cancel()
                await asyncio.wait([asking])
        return 1.0

    async def main(journal: Journal) -> Group:
        async with world.open():
            rollout = world.rollout(ExternalAgent(hangs_up, SUMS, name="sums"))
            journal.add_request(GroupRequest(0, TASK, 0, 0))
            await journal.publishing(0)
            group = await rollout.group(
                GroupRequest(0, TASK, 0, 0), size=1, open_writer=journal.begin
            )
            journal.flush()
            with Journal.read(tmp_path) as reader:
                assert reader.requests()[0].past[0].outcome == group.trajectories[0]
            await journal.finish(group)
            return group

    asked, world = asyncio.Event(), World(lambda tokens, params: says("so"), never)
    with Journal(tmp_path / "journal.sqlite") as journal:
        group = asyncio.run(main(journal))
    (trajectory,) = group.trajectories
    assert [one.num_turns for one in (trajectory, *trajectory.branches)] == [1, 1]
    assert trajectory.facts["branches"] == 1 and trajectory.reward == 1
    assert trajectory.episode == world.arrived[0].episode, (
        "what arrived early is found under its number"
    )
    with Journal.read(tmp_path) as reader:
        assert reader.group(0) == group and check(reader) == []


def tokens_of(trajectory: Trajectory) -> list[tuple[int, ...]]:
    return [one.tokens for one in (trajectory, *trajectory.branches)]


def test_an_agent_that_asks_otherwise_when_it_is_resumed_is_begun_anew(tmp_path: Path) -> None:
    times = 0

    async def forgetful(base_url: str, task: str, seed: int, api_key: str) -> float:
        nonlocal times
        times += 1
        ask = asker(base_url, api_key)
        history: list[Any] = [{"role": "user", "content": "one"}]
        history.append(await ask(history))
        await ask([*history, {"role": "user", "content": f"time {times}"}])
        await ask([*history, {"role": "user", "content": "the third"}])
        return 1.0

    group, _, second = halves(tmp_path, forgetful, after=5)
    assert len(group.trajectories) == 2 and not group.failures
    assert {(failure.stage, final) for _, failure, final in second.failures} <= {("replay", False)}
    with Journal.read(tmp_path) as reader:
        assert reader.rows("SELECT count(*) FROM restarts")[0][0] >= 1
        assert reader.group(0) == group and check(reader) == []


def test_tasks_come_in_every_order_and_never_under_the_same_name() -> None:
    tasks = ExternalAgent(with_sdk, ["a", "b", "c"], held_out=["d"])
    drawn = list(islice(tasks.train(4), 9))
    assert len({task.key for task in drawn}) == 9 and drawn == list(islice(tasks.train(4), 9))
    posed = [tasks.env(task, 0).task for task in drawn]
    assert [sorted(posed[at : at + 3]) for at in (0, 3, 6)] == [["a", "b", "c"]] * 3
    assert [task.index for task in tasks.held_out(5)] == [0]
    assert tasks.env(tasks.held_out(1)[0], 0).task == "d"


def test_what_an_agent_cannot_be_trained_with_is_refused(tmp_path: Path) -> None:
    config = small(
        tmp_path, task=TaskConfig(env="tests.support.scripted_agents:sdk_tasks"), deterministic=True
    )
    with pytest.raises(ConfigError, match="deterministic must be false with an ExternalAgent in"):
        build_rollout(config, ExternalAgent(in_a_process, SUMS))
    for option in ("certificate", "public_host"):
        elsewhere = replace(config, endpoint=EndpointConfig(**{option: "mine"}))
        with pytest.raises(ConfigError, match=rf"false with endpoint\.{option}"):
            build_rollout(elsewhere, build_taskset(config.task))
    limited = replace(config, deterministic=False, techniques="limits")
    with pytest.raises(ConfigError, match="limits cannot be used with an ExternalAgent"):
        build_rollout(limited, build_taskset(config.task))


FORKING: dict[str, dict[str, Any]] = {
    "bus": {"bus.load": "x", "objective.placed": "guided"},
    "exemplars": {"objective.placed": "guided"},
    "hints": {"objective.placed": "anchor"},
    "regenerate": {"engine.precise_engines": 1, "engine.processes": 2, "engine.quantise": "int4"},
    "retry": {"objective.placed": "guided"},
    "search": {},
    "tree": {"techniques": "tree tree_advantage"},
}
"""Options with which each technique that forks episodes can be used, by its name."""


def test_the_techniques_that_fork_are_those_of_the_slot() -> None:
    assert {each.name for each in techniques().values() if each.slot == "strategy"} == {*FORKING}


@pytest.mark.parametrize("name", FORKING)
def test_no_technique_can_fork_episodes_of_an_agent(name: str) -> None:
    given = {"techniques": name, "schedule.group_size": 8, **FORKING[name]}
    config = override(RECIPES["calculator"](), given)
    told = f"technique {name} cannot be used with an ExternalAgent, which cannot be started again"
    with pytest.raises(ConfigError, match=told):
        build_rollout(config, ExternalAgent(with_sdk, SUMS))


@pytest.mark.costly
@pytest.mark.parametrize("tasks", ["sdk_tasks", "forking_tasks"])
def test_a_run_trains_on_it(tmp_path: Path, tasks: str) -> None:
    engine = EngineConfig(max_completion_tokens=24, max_context=256, max_running=8)
    config = small(
        tmp_path, task=TaskConfig(env=f"tests.support.scripted_agents:{tasks}"), engine=engine
    )
    run = session.train(config, console=quiet())
    assert len(run.metrics) >= 3 and run.report.exists()
    with Journal.read(run.folder) as reader:
        assert check(reader) == []
        groups = [group for step in (1, 2, 3) for group in reader.consumed(step)]
    assert len(groups) == 6
    branches = [len(one.branches) for group in groups for one in group.trajectories]
    assert set(branches) == ({1} if tasks == "forking_tasks" else {0})
    last = run.metrics[-1]
    assert last["old_logps/exact_share"] == 1 and last["env/branches_mean"] == branches[0]
    spoken = [piece for group in groups for one in group.trajectories for piece in one.sampled]
    assert {piece.provenance for piece in spoken} == {Provenance.SAMPLED}
    assert ("an earlier prompt was edited" in run.report.read_text()) == (tasks == "forking_tasks")


PAGE = (Path(__file__).parents[2] / "docs" / "your-own-agent.md").read_text()
SDK, SMOL, CHECKED, OPENAI_AGENTS, ANTHROPIC, TEAM = [
    block.split("```")[0] for block in PAGE.split("```python\n")[1:]
]


def test_the_limits_on_the_page_are_those_of_the_code() -> None:
    """The other figures there are those of tables, and of tests/rollout/test_claude_code.py."""
    token = RecordingEndpoint().token
    bits = 8 * len(base64.urlsafe_b64decode(token))
    options = inspect.signature(ExternalAgent).parameters
    for text in (
        f"a new key of {bits} bits",
        f"at least {connections.MIN_TOKEN_BITS} bits",
        f"At most {connections.MAX_STRANGERS} connections without the key are open",
        f"the head of a request has {connections.HEAD_TIMEOUT_S:g} s",
        f"ExternalAgent(timeout_s={options['timeout_s'].default:g})",
        f"ExternalAgent(concurrency={options['concurrency'].default})",
        f"at most `endpoint.format_retries` times ({EndpointConfig().format_retries})",
        f"at most {server.MAX_BODY_BYTES >> 20} MB, or {server.MAX_PICTURES_BYTES >> 20} MB for",
    ):
        assert text in " ".join(PAGE.split())


@pytest.mark.costly
def test_an_agent_of_a_library_becomes_trajectories_and_may_be_killed(tmp_path: Path) -> None:
    """smolagents as in the docs: its second call is a branch that rewrites the history."""
    pytest.importorskip("smolagents")
    (tmp_path / "desk.py").write_text(SMOL)
    spec = importlib.util.spec_from_file_location("desk", tmp_path / "desk.py")
    desk = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(desk)
    final = CALL.replace("calculate", "final_answer").replace(
        '"expression": "10 + 20"', '"answer": "30"'
    )

    def say(tokens: Sequence[int], params: SamplingParams) -> list[int]:
        text = CHAT.text(tokens, whole=True)
        begun = text.rpartition("<|im_start|>assistant\n")[2]
        return says(final if "Observation" in text else CALL)[len(says(begun, end=False)) :]

    world = World(say)
    world.room["max_context"] = 1024
    trajectory = whole(world.play(desk.agent))
    (second,) = trajectory.branches
    assert trajectory.rewards == {"reward": 1.0} and trajectory.num_turns == second.num_turns == 1
    assert [event["reason"] for event in world.events] == ["the message of an answer was edited"]
    assert "Observation:\n30" in CHAT.text(second.pieces[0].tokens, whole=True)
    check_agent(desk.agent, SUMS[0], (CALL, final))


def test_the_check_of_the_docs_runs(tmp_path: Path) -> None:
    (tmp_path / "agent_sums.py").write_text(SDK)
    run_forked(CHECKED, cwd=tmp_path)


def test_the_example_of_the_docs_runs(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(SDK)
    code = """
import unstale
from unstale.config import EngineConfig, EvalConfig, RunConfig, ScheduleConfig, TaskConfig

unstale.train(RunConfig(
    recipe="sums", name="run", max_steps=1, eval=EvalConfig(tasks=2),
    task=TaskConfig(env="sums:tasks"), schedule=ScheduleConfig(groups_per_step=1, group_size=2),
    engine=EngineConfig(max_completion_tokens=16, max_context=256),
))
"""
    run_forked(code, cwd=tmp_path)
    assert (tmp_path / "runs" / "run" / "report.html").exists()


def test_serve_answers_until_it_is_stopped() -> None:
    words = ["serve", str(SHIPPED_POLICY), "calculator", "--token", "secret"]
    with Forked(words) as serving:

        def has_started() -> bool:
            assert serving.poll() is None, serving.output()
            return len(serving.output()[0].splitlines()) >= 2

        try:
            wait_until(has_started, "the address and the key")
            lines = serving.output()[0].splitlines()
            url = lines[0].split()[-1]
            assert lines[1].split() == ["API", "key", "secret"]
            body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
            for address in (url, url.replace("/v1", "/e/one/v1")):
                said = post(address, "secret", body)
                assert said["usage"]["completion_tokens"] <= 3
            with pytest.raises(Refusal, match="invalid_api_key"):
                post(url, "another", body)
        finally:
            serving.send_signal(signal.SIGINT)
            assert serving.wait(LIMIT_S) == 130


@pytest.mark.costly
def test_serve_sends_caches_and_tells_the_time_to_the_first_token() -> None:
    words = ["serve", str(SHIPPED_POLICY), "calculator", "--token", "secret"]
    words += ["--engine.processes=2", "--engine.prefill_engines=1", "--engine.prefill_ratio=1"]
    words += ["--engine.send_cache=true", "--engine.move_engines=true"]
    with Forked(words, forks_children=True) as serving:

        def has_started() -> bool:
            assert serving.poll() is None, serving.output()
            return len(serving.output()[0].splitlines()) >= 2

        def metrics(key: str) -> dict[str, float]:
            headers = {"Authorization": f"Bearer {key}"}
            page = urlopen(Request(url.replace("/v1", "/metrics"), headers=headers))
            found: dict[str, float] = json.loads(page.read())
            return found

        try:
            wait_until(has_started, "the address and the key")
            url = serving.output()[0].split()[2]
            body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
            for _ in range(2):
                assert post(url, "secret", body)["usage"]["completion_tokens"] > 1
            found = metrics("secret")
            assert found["engine/prefill_requests"] + found["engine/decode_requests"] == 2
            assert found["engine/prefill_requests"] and found["engine/received_tokens"]
            assert found["group_0/requests"] == 2 and found["group_0/first_token_s"] > 0
            assert metrics("secret") == found, "the next are measured over 10 seconds"
            with pytest.raises(HTTPError, match="401"):
                metrics("another")
        finally:
            serving.send_signal(signal.SIGINT)
            assert serving.wait(LIMIT_S) == 130


ANSWERS = (CALL, "It is 30.")


@pytest.mark.parametrize("agent", [with_sdk, in_a_process, patient])
def test_worked_examples_can_be_trained_killed_and_resumed(agent: Any) -> None:
    check_agent(agent, SUMS[0], ANSWERS)


async def _random(base_url: str, task: str, seed: int, api_key: str) -> float:
    await asker(base_url, api_key)([{"role": "user", "content": os.urandom(4).hex()}])
    return 1.0


async def _moody(base_url: str, task: str, seed: int, api_key: str) -> float:
    await asker(base_url, api_key)([{"role": "user", "content": "x"}])
    return random.random()


async def _stubborn(base_url: str, task: str, seed: int, api_key: str) -> float:
    for number in range(2):
        while True:
            with suppress(Refusal):
                await asker(base_url, api_key)([{"role": "user", "content": str(number)}])
                break
            await asyncio.sleep(0.05)
    return 1.0


async def _forgetful(base_url: str, task: str, seed: int, api_key: str) -> float:
    await asker(base_url, api_key)([{"role": "user", "content": "x"}])
    KEPT.append(asyncio.create_task(asyncio.Event().wait()))
    return 1.0


async def _open_handed(base_url: str, task: str, seed: int, api_key: str) -> float:
    KEPT.append(httpx.AsyncClient())
    answer = await KEPT[-1].post(
        f"{base_url}/chat/completions",
        headers={"Authorization": f"Bearer {api_key}"},
        json={"messages": [{"role": "user", "content": "x"}]},
    )
    return float(answer.status_code)


async def _wordless(base_url: str, task: str, seed: int, api_key: str) -> Any:
    await asker(base_url, api_key)([{"role": "user", "content": "x"}])


def _threaded(base_url: str, task: str, seed: int, api_key: str) -> float:
    post(base_url, api_key, {"messages": [{"role": "user", "content": "x"}]})
    threading.Thread(target=threading.Event().wait, args=(5,), daemon=True).start()
    return 1.0


KEPT: list[Any] = []


@pytest.mark.costly
@pytest.mark.parametrize(
    ("agent", "words"),
    [
        (_random, "calls differ in a second run"),
        (_moody, "reward differs in a second run"),
        (_stubborn, "continues after a refused call"),
        (_forgetful, "leaves tasks behind"),
        (_open_handed, "leaves connections behind"),
        (_wordless, "a finite number or numbers by name, got None"),
        (_threaded, "leaves threads behind"),
    ],
)
def test_what_an_agent_cannot_be_trained_for_is_told_beforehand(agent: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        timeout_s = 2.0 if agent is _stubborn else LIMIT_S
        check_agent(agent, SUMS[0], ANSWERS, timeout_s=timeout_s)
    with warnings.catch_warnings():  # of what the agent left open
        warnings.simplefilter("ignore", ResourceWarning)
        KEPT.clear()
        gc.collect()


def test_a_refused_request_is_freed_without_the_collector() -> None:
    """A request may be large. The collector would keep it until it next looks at old objects."""

    async def too_long(base_url: str, task: str, seed: int, api_key: str) -> float:
        with pytest.raises(Refusal):
            await asker(base_url, api_key)([{"role": "user", "content": "more " * 1000}])
        return 0.0

    gc.collect()
    gc.disable()
    try:
        World().play(too_long)
        assert not [each for each in gc.get_objects() if isinstance(each, CompletionRequest)]
    finally:
        gc.enable()


def test_an_agent_whose_last_reply_was_cut_has_not_ended_by_itself() -> None:
    """A client's own limit counts, and a stop text of the client is an end."""

    def asking(**fields: Any) -> Any:
        async def agent(base_url: str, task: str, seed: int, api_key: str) -> float:
            body = {"messages": [{"role": "user", "content": "hello"}], **fields}
            await asyncio.to_thread(post, base_url, api_key, body)
            return 0.0

        return agent

    def played(**fields: Any) -> tuple[str, float]:
        world = World(lambda tokens, params: says("It is 30.")[: params.max_tokens])
        outcome = whole(world.play(asking(**fields)))
        return outcome.stop, outcome.facts.get("cut_replies", 0.0)

    assert played() == ("done", 0.0)
    assert played(max_tokens=2) == ("cut_reply", 1.0)
    assert played(stop=["is"]) == ("done", 0.0)
