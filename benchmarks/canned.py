"""Engines, a server and environments that answer at once, for `benchmarks.event_loop`.

A reply of n tokens is always the same. Its last token is a stop token. Routes have 48 layers of 8
experts for each token, as in Qwen3-30B-A3B.
"""

import asyncio
import base64
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from unstale.engines import Reply, SamplingParams
from unstale.engines.registry import EngineOptions
from unstale.engines.scripted import ScriptedEngine
from unstale.engines.servers.vllm import VllmEngine
from unstale.envs import Message, Turn
from unstale.records import Sampled, Task
from unstale.routed_experts import RoutedExperts

LAYERS, TOP_K, EXPERTS = 48, 8, 128
ANSWER = Message("user", " ".join(["the order was sent and is on its way"] * 8))
"""The text with which the environment answers each turn."""
FIRST_TOKEN, LAST_TOKEN = 300, 1000
"""The tokens of replies. They are words of the base policy's vocabulary that end no reply."""


@cache
def tokens_of(count: int, stop: int) -> tuple[int, ...]:
    noise = np.random.default_rng(count)
    return (*noise.integers(FIRST_TOKEN, LAST_TOKEN, count - 1).tolist(), stop)


@cache
def logps_of(count: int) -> tuple[float, ...]:
    noise = np.random.default_rng(count)
    return tuple((-noise.random(count, np.float32)).tolist())


@cache
def experts_of(rows: int) -> Any:
    return np.random.default_rng(rows).integers(0, EXPERTS, (rows, LAYERS, TOP_K), np.uint8)


class CannedEngine(ScriptedEngine):
    """An engine in this process, whose replies are ready."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(lambda tokens, params: ())
        self._record_experts = options.record_experts

    async def sample(self, tokens: Sequence[int], params: SamplingParams) -> Reply:
        await asyncio.sleep(0)
        count = params.max_tokens
        routed_experts = None
        if self._record_experts:
            first = params.first_routed(self.version)
            routed_experts = RoutedExperts(first, experts_of(len(tokens) + count - 1 - first))
        reply = tokens_of(count, params.stop_tokens[0])
        return Reply(
            Sampled(reply, logps_of(count), self.version, routed_experts=routed_experts), "stop"
        )


class UnprobedVllm(VllmEngine):
    """An engine on a `CannedServer`, which has no model that a probe could be compared with."""

    async def _probe(self, session: Any, version: int, weights: Mapping[str, Tensor]) -> None:
        """Do nothing."""


class CannedServer:
    """A server with vLLM's API on a Unix socket. It serves version 0."""

    def __init__(self, *, routed_experts: bool) -> None:
        self._routed_experts = routed_experts
        self._bodies: dict[tuple[int, int], bytes] = {}

    def serve(self, path: str) -> None:
        """Answer requests until the process ends."""

        async def listen() -> None:
            server = await asyncio.start_unix_server(self._answer, path, backlog=4096)
            await server.serve_forever()

        asyncio.run(listen())

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = int(head.lower().split("content-length:")[1].split("\r\n")[0])
        request = json.loads(await reader.readexactly(size) or b"null")
        body = self._body(head.split(" ")[1], request)
        lines = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(lines.encode() + body)
        await writer.drain()
        writer.close()

    def _body(self, target: str, request: Any) -> bytes:
        match target.partition("?")[0]:
            case "/inference/v1/generate":
                return self._reply(request["token_ids"], request["sampling_params"])
            case "/v1/models":
                return json.dumps({"data": [{"max_model_len": 1 << 20}]}).encode()
            case "/collective_rpc":  # the quantization of the server's workers
                return b'{"results": [[null]]}'
            case "/weight_info":
                return b'{"weight_version": "0"}'
        return b"{}"

    def _reply(self, context: Sequence[int], asked: Mapping[str, Any]) -> bytes:
        count = asked["max_tokens"]
        first = asked.get("routed_experts_prompt_start", 0)
        key = (count, len(context) + count - 1 - first)
        if key not in self._bodies:
            choice = _choice(count, asked["stop_token_ids"][0])
            if self._routed_experts:
                choice["routed_experts"] = _npy(key[1])
            body = {"choices": [choice], "usage": {"prompt_tokens_details": None}}
            self._bodies[key] = json.dumps(body, separators=(",", ":")).encode()
        return self._bodies[key]


def _choice(count: int, stop: int) -> dict[str, Any]:
    tokens = tokens_of(count, stop)
    content = [
        {"token_id": token, "logprob": logp, "rank": 1, "top_logprobs": []}
        for token, logp in zip(tokens, logps_of(count), strict=True)
    ]
    return {
        "index": 0,
        "finish_reason": "stop",
        "token_ids": tokens,
        "logprobs": {"content": content},
        "weight_versions": [{"version": "0", "start": 0, "end": count}],
    }


def _npy(rows: int) -> str:
    file = io.BytesIO()
    np.save(file, experts_of(rows))
    return base64.b64encode(file.getvalue()).decode()


def serve(folder: Path, routed_experts: bool) -> None:
    CannedServer(routed_experts=routed_experts).serve(str(folder / "server"))


class CannedEnv:
    """An environment with a fixed number of turns. Each has another prompt."""

    def __init__(self, turns: int, seed: int) -> None:
        self._left = turns
        self._seed = seed

    async def begin(self) -> Turn:
        return Turn((Message("user", f"customer {self._seed}"), ANSWER))

    async def step(self, reply: Message) -> Turn:
        self._left -= 1
        return Turn((ANSWER,)) if self._left else Turn((), done=True, rewards={"r": 1.0})


class CannedTasks:
    """A task set in which the number of a task is its number of turns."""

    name = "canned"
    tools = ()

    def train(self, seed: int) -> Iterator[Task]:
        return (Task(self.name, "train", number) for number in count(1))

    def held_out(self, number: int) -> list[Task]:
        return []

    def env(self, task: Task, seed: int) -> CannedEnv:
        return CannedEnv(task.index, seed)
