"""Test the example agent at the retail desk, which uses the unmodified OpenAI SDK.

The recorded tokens of a run are those that the engine sampled, each once. Requests and responses
agree with the tokens. With equal task and noise, an episode has the tokens of the built-in
environment's.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from openai.resources.chat.completions import AsyncCompletions
from transformers import AutoTokenizer

from examples import retail_agent
from tests.cli.test_run import quiet, small
from unstale.cli import session as session_module
from unstale.config import (
    SHIPPED_POLICY,
    EngineConfig,
    EvalConfig,
    RolloutConfig,
    ScheduleConfig,
    TaskConfig,
)
from unstale.durability.journal import Journal, check
from unstale.engines import Reply, SamplingParams
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.engines.registry import EngineOptions
from unstale.envs import Message
from unstale.envs.chat import Chat
from unstale.envs.retail import RetailTasks
from unstale.model.policy import Policy
from unstale.records import ContextPiece, Piece, Sampled, Trajectory
from unstale.rollout.endpoint.agents import AgentRollout
from unstale.rollout.endpoint.server import RecordingEndpoint
from unstale.rollout.endpoint.session import AgentSession
from unstale.rollout.episode import Rollout
from unstale.rollout.generator import Generator

pytestmark = pytest.mark.usefixtures("forked_children")

CHAT = Chat(AutoTokenizer.from_pretrained(SHIPPED_POLICY), RetailTasks(level=1).tools)


class Witness:
    """A recorder of the engine's requests and replies, and of the SDK's."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sampled: dict[int, list[tuple[tuple[int, ...], Sampled]]] = defaultdict(list)
        """By the seed of an episode's noise: contexts, and what was sampled there."""
        self.said: dict[int, list[tuple[list[Any], Any]]] = defaultdict(list)
        """By episode: the messages of each call, and the message that it was answered with."""
        self._episodes: dict[str, int] = {}
        self._watch_engine(patch)
        self._watch_addresses(patch)
        self._watch_sdk(patch)

    def _watch_engine(self, patch: pytest.MonkeyPatch) -> None:
        sample = EmbeddedEngine.sample

        async def seen(
            engine: EmbeddedEngine, tokens: Sequence[int], params: SamplingParams
        ) -> Reply:
            context = tuple(tokens)
            reply = await sample(engine, tokens, params)
            if reply.piece.tokens:
                self.sampled[params.seed].append((context, reply.piece))
            return reply

        patch.setattr(EmbeddedEngine, "sample", seen)

    def _watch_addresses(self, patch: pytest.MonkeyPatch) -> None:
        opened = RecordingEndpoint.opened

        @contextmanager
        def seen(endpoint: RecordingEndpoint, session: AgentSession) -> Iterator[str]:
            with opened(endpoint, session) as address:
                self._episodes[address] = session.transcript.episode
                yield address

        patch.setattr(RecordingEndpoint, "opened", seen)

    def _watch_sdk(self, patch: pytest.MonkeyPatch) -> None:
        create = AsyncCompletions.create

        async def seen(completions: AsyncCompletions, **call: Any) -> Any:
            messages = list(call["messages"])
            completion = await create(completions, **call)
            episode = self._episodes[str(completions._client.base_url).rstrip("/")]
            self.said[episode].append((messages, completion.choices[0].message))
            return completion

        patch.setattr(AsyncCompletions, "create", seen)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retail_agent, "LATENCY_S", 0.0)


@pytest.mark.costly
def test_what_is_recorded_is_what_the_engine_sampled_call_by_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    witness = Witness(monkeypatch)
    config = small(
        tmp_path,
        task=TaskConfig(env="examples.retail_agent:tasks"),
        engine=EngineConfig(max_context=512, max_running=16),
        schedule=ScheduleConfig(max_staleness=1, groups_per_step=2, group_size=4),
        eval=EvalConfig(tasks=0),
    )
    run = session_module.train(config, console=quiet())
    with Journal.read(run.folder) as reader:
        assert check(reader) == []
        trained = [
            one
            for step in (1, 2, 3)
            for group in reader.consumed(step)
            for one in group.trajectories
        ]
    assert len(trained) == 24 and len({one.episode for one in trained}) == 24
    assert len({piece.version for one in trained for piece in one.sampled}) > 1
    for one in trained:
        places = [at for at, piece in enumerate(one.pieces) if isinstance(piece, Sampled)]
        recorded = [(tokens_of(one.pieces[:at]), one.pieces[at]) for at in places]
        assert recorded == witness.sampled[one.seed], (
            "tokens, log-probabilities and versions, each in its context"
        )
        assert_said(one, witness.said[one.episode])
    assert sum(row["trainer/action_tokens"] for row in run.metrics if row["step"]) == sum(
        len(piece.tokens) for one in trained for _, piece in witness.sampled[one.seed]
    )


def assert_said(episode: Trajectory, calls: Sequence[tuple[list[Any], Any]]) -> None:
    """Check that the SDK's requests and responses agree with the tokens, turn by turn."""
    told, replies = turns(episode.pieces)
    assert len(calls) == len(replies) == len(told) == episode.num_turns
    assert [read(reply) for _, reply in calls] == [handed_out(reply) for reply in replies]
    assert told[0] == CHAT.encode_prompt([read(message) for message in calls[0][0]])
    for (before, after), new, reply in zip(
        pairwise(sent for sent, _ in calls), told[1:], replies[:-1], strict=True
    ):
        added = [read(message) for message in after[len(before) + 1 :]]
        assert new == CHAT.encode_continuation(added, ended=reply[-1] in CHAT.stop_tokens)
        assert after[: len(before)] == before


def handed_out(reply: Sequence[int]) -> Message:
    """Return the message of a reply's tokens. A malformed call is text only."""
    said = CHAT.parse(reply)
    return (
        Message("assistant", CHAT.text(reply))
        if any(call.error for call in said.tool_calls)
        else said
    )


def turns(pieces: Sequence[Piece]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the context before each reply and the reply, with pieces joined."""
    told, replies = [], []
    for before, piece in pairwise((None, *pieces)):
        if isinstance(piece, ContextPiece):
            told.append(piece.tokens)
        elif isinstance(before, Sampled):
            replies[-1] += piece.tokens
        else:
            replies.append(piece.tokens)
    return told, replies


def read(message: Any) -> Message:
    """Convert an OpenAI message, a dict or an object of the client, to a `Message`."""
    record = message if isinstance(message, dict) else message.model_dump(exclude_unset=True)
    calls = [call["function"] for call in record.get("tool_calls") or ()]
    written = "".join(
        f'<tool_call>{{"name": {json.dumps(call["name"])}, '
        f'"arguments": {call["arguments"]}}}</tool_call>'
        for call in calls
    )
    return Message(
        record["role"], record["content"] or "", CHAT.reader.parse_content(written).tool_calls
    )


def tokens_of(pieces: Sequence[Piece]) -> tuple[int, ...]:
    return tuple(token for piece in pieces for token in piece.tokens)


@pytest.mark.costly
def test_an_episode_is_the_environments_own_token_for_token() -> None:
    engine = EmbeddedEngine(
        EngineOptions(SHIPPED_POLICY, dtype="float32", max_running=16, max_context=512)
    )
    generator = Generator(engine, CHAT, EngineConfig(max_context=512))

    async def main() -> list[list[Trajectory]]:
        endpoint, tasks, found = RecordingEndpoint(), retail_agent.tasks(), []
        native = Rollout(generator, RetailTasks(level=1), RolloutConfig())
        agents = AgentRollout(generator, tasks, RolloutConfig(), endpoint=endpoint)
        await engine.start()
        await engine.load(Policy.load(SHIPPED_POLICY).weights(), version=0)
        await engine.resume()
        async with endpoint:
            for rollout in (native, agents):
                async with asyncio.TaskGroup() as group:
                    episodes = [
                        group.create_task(rollout.episode(task, env_seed=7, noise_seed=number))
                        for number, task in enumerate(tasks.held_out(24))
                    ]
                found.append([episode.result() for episode in episodes])
        await engine.close()
        return found

    own, through = asyncio.run(main())
    for one, other in zip(own, through, strict=True):
        assert (one.task, one.seed, one.stop, one.rewards) == (
            other.task,
            other.seed,
            other.stop,
            other.rewards,
        )
        answered = slice(
            len(other.pieces)
        )  # what no reply follows, because of a limit, the endpoint is never told
        assert [piece.tokens for piece in one.pieces[answered]] == [
            piece.tokens for piece in other.pieces
        ]
        assert one.sampled[-1].tokens == other.pieces[-1].tokens
        assert [logp for piece in one.sampled for logp in piece.behavior_logp] == pytest.approx(
            [logp for piece in other.sampled for logp in piece.behavior_logp], abs=1e-4
        )
    assert 0 < sum(one.success for one in own) < len(own), "some are served well, some are not"
