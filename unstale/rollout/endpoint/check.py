"""Check that an external agent can be trained, interrupted and resumed."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from unstale.config import SHIPPED_POLICY, EngineConfig, RolloutConfig
from unstale.engines import SamplingParams
from unstale.engines.scripted import ScriptedEngine
from unstale.envs.chat import Chat
from unstale.envs.external import Agent, ExternalAgent
from unstale.model.loading import load_tokenizer
from unstale.records import Task, Trajectory
from unstale.rollout.endpoint.agents import AgentRollout
from unstale.rollout.endpoint.server import RecordingEndpoint
from unstale.rollout.generator import Generator

_REPLY_START = "<|im_start|>assistant\n"
_UNLIMITED = 1 << 30
_KEPT = ("asyncio_", "hook")
"""Prefixes of the names of threads that are reused later and so are no leak."""
_END_S = 1.0
"""Seconds that threads, tasks and connections of an episode have to end."""


def check_agent(  # noqa: PLR0913 - the agent, what it gets and its limits
    agent: Agent,
    task: Any,
    replies: Sequence[str] = ("Done.",),
    *,
    roles: Sequence[str] = (),
    seed: int = 0,
    timeout_s: float = 30.0,
) -> None:
    """Check with scripted replies, on one task, that an agent can be trained.

    The agent runs twice, and then once with only one call allowed. The n-th reply of each
    conversation is `replies[n]`, and the last one is repeated. A reply calls a tool with
    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. `roles` are those of
    `ExternalAgent`. Raises AssertionError with the reason if the agent cannot be trained.
    """
    tasks = ExternalAgent(agent, [task], roles=roles, timeout_s=timeout_s)
    asyncio.run(_check(tasks, replies, seed))


async def _check(tasks: ExternalAgent, replies: Sequence[str], seed: int) -> None:
    endpoint = RecordingEndpoint()
    generator = await _scripted_generator(replies)

    async def play(max_turns: int) -> Trajectory:
        config = RolloutConfig(retries=0, timeout_s=tasks.timeout_s, max_turns=max_turns)
        rollout = AgentRollout(generator, tasks, config, endpoint=endpoint)
        began = asyncio.get_running_loop().time()
        task = Task("external", "train", 0)
        outcome = await rollout.episode(task, env_seed=seed, noise_seed=seed)
        assert isinstance(outcome, Trajectory), (
            f"the agent failed in {outcome.stage}: {outcome.error}"
        )
        assert asyncio.get_running_loop().time() - began < tasks.timeout_s, (
            "the agent continues after a refused call: it should raise, or return its reward"
        )
        return outcome

    async with endpoint:
        first = await play(_UNLIMITED)
        held = await _count_held(endpoint)
        second = await play(_UNLIMITED)
        for name, count in (await _count_held(endpoint, held)).items():
            assert count <= held[name], (
                f"the agent leaves {name} behind: {held[name]} after one episode, {count} after two"
            )
        tokens = [[one.tokens for one in run.conversations] for run in (first, second)]
        assert tokens[0] == tokens[1], (
            "the agent's calls differ in a second run. Its randomness has to come from `seed`, and "
            "concurrent calls need a fixed order: else an episode cannot be resumed after a crash"
        )
        assert first.rewards == second.rewards, (
            f"the agent's reward differs in a second run: {first.rewards}, then {second.rewards}"
        )
        await play(1)


async def _scripted_generator(replies: Sequence[str]) -> Generator:
    """Return a generator that gives `replies[n]` as n-th reply of a conversation, then the last
    one.
    """
    chat = Chat(load_tokenizer(SHIPPED_POLICY), ())
    reply_start = chat.encode(_REPLY_START)

    def say(tokens: Sequence[int], params: SamplingParams) -> Sequence[int]:
        starts = [
            end
            for end in range(len(tokens) + 1)
            if tuple(tokens[max(0, end - len(reply_start)) : end]) == reply_start
        ]
        text = replies[min(len(starts), len(replies)) - 1]
        reply = [*chat.encode(text), chat.stop_tokens[0]]
        return reply[len(tokens) - starts[-1] :]

    engine = ScriptedEngine(say)
    await engine.start()
    await engine.load({}, 0)
    await engine.resume()
    return Generator(engine, chat, EngineConfig(max_context=1 << 16, max_completion_tokens=1 << 12))


async def _count_held(
    endpoint: RecordingEndpoint, allowed: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Count threads, tasks and connections shortly after an episode, to find leaks.

    With `allowed`, wait until no count exceeds the allowed one, but at most `_END_S` seconds.
    """
    until = asyncio.get_running_loop().time() + _END_S
    while True:
        await asyncio.sleep(0.2)
        threads = [each for each in threading.enumerate() if not each.name.startswith(_KEPT)]
        counts = {
            "threads": len(threads),
            "tasks": len(asyncio.all_tasks()),
            "connections": endpoint.num_connections,
        }
        is_over = asyncio.get_running_loop().time() >= until
        if allowed is None or is_over or all(counts[name] <= allowed[name] for name in counts):
            return counts
