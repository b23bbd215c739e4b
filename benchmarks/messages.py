"""Compare the processor time of a call by the Messages API with one by the Chat API.

    python -m benchmarks.messages          # two minutes on two cores

A scripted engine answers, so the time is that of the endpoint: to read, to check, to render, to
record and to answer. Both APIs get the same conversations, in rounds that alternate. The time of
the client's thread is subtracted. Writes a dated table under benchmarks/results/."""

import argparse
import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection
from statistics import median
from typing import Any

from benchmarks import tables
from unstale.cli.process import limit_threads
from unstale.cli.serve import SessionPool
from unstale.config import SHIPPED_POLICY, EngineConfig, RolloutConfig
from unstale.engines.scripted import ScriptedEngine
from unstale.envs.calculator import TOOL
from unstale.envs.chat import Chat
from unstale.envs.external import ExternalAgent
from unstale.model.loading import load_tokenizer
from unstale.rollout.endpoint.agents import AgentRollout
from unstale.rollout.endpoint.server import RecordingEndpoint
from unstale.rollout.generator import Generator

TURNS = 12
"""Calls of an episode. Each sends the whole conversation so far."""
BOUND = 1.2
"""Allowed ratio of Messages to Chat."""
WORDS = " ".join(["The result of the sum is in the table."] * 12)
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "10 + 20"}}\n</tool_call>'
FUNCTION = TOOL["function"]
PATHS = {"chat": "chat/completions", "messages": "messages"}


def bodies(api: str, *, tools: bool, stream: bool) -> list[bytes]:
    """Return the bodies of an episode's calls by one of the APIs. Their replies are `CALL`."""
    chat = api == "chat"
    part = {"type": "text", "text": WORDS}
    messages: list[Any] = [{"role": "user", "content": [part]}]
    options: dict[str, Any] = {"model": "policy", "max_tokens": 64, "stream": stream}
    if chat:
        messages.insert(0, {"role": "system", "content": WORDS})
    else:
        options["system"] = WORDS
    if tools:
        own = {**FUNCTION, "input_schema": FUNCTION["parameters"]}
        options["tools"] = [TOOL if chat else {k: own[k] for k in own if k != "parameters"}]
    found = []
    for turn in range(TURNS):
        found.append(json.dumps({**options, "messages": messages}).encode())
        if not tools:
            messages += [{"role": "assistant", "content": WORDS}, {"role": "user", "content": "?"}]
        elif chat:
            arguments = json.dumps({"expression": "10 + 20"})
            function = {"name": "calculate", "arguments": arguments}
            call = {"id": f"call{turn}", "type": "function", "function": function}
            messages += [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": f"call{turn}", "content": WORDS},
            ]
        else:
            use = {"type": "tool_use", "id": f"call{turn}", "name": "calculate"}
            result = {"type": "tool_result", "tool_use_id": f"call{turn}", "content": WORDS}
            messages += [
                {"role": "assistant", "content": [{**use, "input": {"expression": "10 + 20"}}]},
                {"role": "user", "content": [result]},
            ]
    return found


class Served:
    """An endpoint in a thread, whose policy answers every call with the same text."""

    def __init__(self, reply: str) -> None:
        self._reply = reply
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    @contextmanager
    def open(self) -> Iterator["Served"]:
        self._thread.start()
        self._up.wait()
        yield self
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        chat = Chat(load_tokenizer(SHIPPED_POLICY), ())
        reply = [*chat.encode(self._reply), chat.stop_tokens[0]]
        begin = tuple(chat.encode("<|im_start|>assistant\n"))

        def say(tokens: Sequence[int], params: Any) -> Sequence[int]:
            """Return the rest of the reply. A stream samples it in parts."""
            limit = max(0, len(tokens) - len(reply) - len(begin))
            places = range(len(tokens) - len(begin), limit - 1, -1)
            start = next(at for at in places if tuple(tokens[at : at + len(begin)]) == begin)
            return reply[len(tokens) - start - len(begin) :]

        engine = ScriptedEngine(say)
        await engine.start()
        await engine.load({}, version=0)
        await engine.resume()
        config = EngineConfig(max_context=1 << 16, max_completion_tokens=1 << 10)
        async with asyncio.TaskGroup() as calls:
            endpoint = RecordingEndpoint(find=lambda key: pool.find(key))
            rollout = AgentRollout(
                Generator(engine, chat, config),
                ExternalAgent(lambda *_: 0.0, ["x"]),
                RolloutConfig(max_turns=1 << 30),
                endpoint=endpoint,
            )
            pool = SessionPool(rollout, calls, 0)
            async with endpoint:
                self.port = int(endpoint.url.rpartition(":")[2])
                self.token = endpoint.token
                self._up.set()
                await self._end.wait()


def measure(served: Served, episodes: int, api: str, calls: Sequence[bytes]) -> float:
    """Return the milliseconds of processor time of a call, without the client's."""
    connection = HTTPConnection("127.0.0.1", served.port)
    headers = {"Authorization": f"Bearer {served.token}", "Content-Type": "application/json"}
    began = time.process_time() - time.thread_time()
    for _ in range(episodes):
        episode = f"{time.monotonic_ns()}"
        for body in calls:
            connection.request("POST", f"/e/{episode}/v1/{PATHS[api]}", body, headers)
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{api}: {answer.status} {text[:300]!r}")
    spent = time.process_time() - time.thread_time() - began
    connection.close()
    return 1e3 * spent / (episodes * len(calls))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--episodes", type=int, default=25, help="in each round")
    chosen = parser.parse_args()
    limit_threads()
    rows, worst = [], 0.0
    for tools in (False, True):
        with Served(CALL if tools else WORDS).open() as served:
            for stream in (False, True):
                kinds = {
                    api: partial(measure, served, chosen.episodes, api, calls)
                    for api in PATHS
                    for calls in [bodies(api, tools=tools, stream=stream)]
                }
                for warm_up in kinds.values():
                    warm_up()
                found = tables.alternate(kinds, chosen.rounds)
                ratios = tables.ratios(found, "messages", "chat")
                worst = max(worst, median(ratios))
                name = f"{'with' if tools else 'no'} tools, {'streamed' if stream else 'whole'}"
                times = [f"{median(found[api]):.2f} ms" for api in PATHS]
                rows.append(tables.row(name, *times, tables.spread(ratios)))
    lines = [
        f"Conversations of {TURNS} calls, each with the whole history; {chosen.rounds} alternating "
        f"rounds of {chosen.episodes} conversations. Processor time of a call in the endpoint's "
        f"process. The bound of the ratio is {BOUND:g}.",
        "",
        *tables.columns("calls", "Chat", "Messages", "ratio"),
        *rows,
    ]
    tables.write("messages", "A call by Messages and by Chat", lines)
    return int(worst > BOUND)


if __name__ == "__main__":
    sys.exit(main())
