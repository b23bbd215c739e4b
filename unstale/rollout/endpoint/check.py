"""Whether an agent can be trained, killed and resumed."""

import asyncio
import threading
from collections.abc import Sequence
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

_BEGIN = "<|im_start|>assistant\n"


def check_agent(
    agent: Agent,
    task: Any,
    replies: Sequence[str] = ("Done.",),
    *,
    seed: int = 0,
    timeout_s: float = 30.0,
) -> None:
    """Runs it twice on `task`, and once refused after its first call. AssertionError says what breaks, and why.

    The n-th reply of a conversation is `replies[n]`, and the last one from there on. A reply calls a tool as
    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
    """
    asyncio.run(_check(ExternalAgent(agent, [task], timeout_s=timeout_s), replies, seed))


async def _check(tasks: ExternalAgent, replies: Sequence[str], seed: int) -> None:
    chat = Chat(load_tokenizer(SHIPPED_POLICY), ())
    begin = chat.encode(_BEGIN)

    def say(tokens: Sequence[int], params: SamplingParams) -> Sequence[int]:
        ends = [
            at
            for at in range(len(tokens) + 1)
            if tuple(tokens[max(0, at - len(begin)) : at]) == begin
        ]
        reply = [*chat.encode(replies[min(len(ends), len(replies)) - 1]), chat.stop_tokens[0]]
        return reply[len(tokens) - ends[-1] :]

    engine, endpoint = ScriptedEngine(say), RecordingEndpoint()
    generator = Generator(
        engine, chat, EngineConfig(max_context=1 << 16, max_completion_tokens=1 << 12)
    )
    await engine.start()
    await engine.load({}, 0)
    await engine.resume()

    async def play(max_turns: int) -> Trajectory:
        config = RolloutConfig(retries=0, timeout_s=tasks._timeout_s, max_turns=max_turns)
        rollout = AgentRollout(generator, tasks, config, endpoint=endpoint)
        before = asyncio.get_running_loop().time()
        outcome = await rollout.episode(
            Task("external", "train", 0), env_seed=seed, noise_seed=seed
        )
        assert isinstance(outcome, Trajectory), f"it failed in {outcome.stage}: {outcome.error}"
        took = asyncio.get_running_loop().time() - before
        assert took < tasks._timeout_s, (
            "it goes on after a refused call: raise, or return what it was worth"
        )
        return outcome

    async with endpoint:
        first = await play(1 << 30)
        held = await _held(endpoint)
        again = await play(1 << 30)
        for name, now in (await _held(endpoint)).items():
            assert now <= held[name], (
                f"it leaves {name} behind: {held[name]} after an episode, {now} after two"
            )
        said = [[one.tokens for one in (each, *each.branches)] for each in (first, again)]
        assert said[0] == said[1], (
            "its calls come out otherwise the second time: what is random in it has to come from `seed`, and what it "
            "asks at the same time it has to ask in the same order; else a killed episode cannot be gone on with"
        )
        assert first.rewards == again.rewards, (
            f"it was worth {first.rewards}, and {again.rewards} the second time"
        )
        await play(1)


async def _held(endpoint: RecordingEndpoint) -> dict[str, int]:
    """What an agent may have left, a moment after its end."""
    await asyncio.sleep(0.2)
    threads = [thread for thread in threading.enumerate() if not thread.name.startswith("asyncio_")]
    return {
        "threads": len(threads),
        "tasks": len(asyncio.all_tasks()),
        "connections": endpoint.num_connections,
    }
