"""vLLM's HTTP API as version 0.32 has it, as far as a run uses it, over a tiny model on the CPU.

Written from its source: entrypoints/rl/online/api_router.py, entrypoints/scale_out/token_in_token_out, v1/engine/core.
One thread serves, and the engine behind it is one loop, so weights and their version change only between tokens.
"""

import asyncio
import json
import threading
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file
from torch import Tensor

from afterimage.testing import tiny_policy

_BLOCK = 16
_HEADERS = (
    "HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {size}\r\nConnection: close\r\n\r\n"
)


class FakeVllm:
    """`with FakeVllm(folder) as server:` serves at `server.url`. Its faults are attributes, to be set by tests."""

    def __init__(self, folder: Path, *, max_model_len: int = 2048, raw_logprobs: bool = False) -> None:
        self.url = f"unix:{folder}/fake"
        self.stale_head = False
        """Loads leave the head as it was, as vLLM's CPU build does with tied embeddings."""
        self.corrupt = ""
        """A tensor that loads set to zero."""
        self.frozen = False
        """Its engine does nothing any more, while the process in front of it answers."""
        self.forgetful = False
        """Its record of versions is not written."""
        self.asked = 0
        """Replies that were asked for, probes among them."""
        self._max_model_len = max_model_len
        self._raw = raw_logprobs
        self._policy = tiny_policy(seed=99)
        self._head: Tensor | None = None
        self._version = "default"
        self._cached: set[tuple[int, ...]] = set()
        """Openings of contexts, in whole blocks."""
        self._paused = False
        self.running: dict[str, asyncio.Event] = {}
        self._ready = threading.Event()
        self._path = folder / "fake"
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    def die(self) -> None:
        """As by a signal: connections break off."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
            self._path.unlink()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        served: set[asyncio.Task[None]] = set()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._connection(reader, writer))
            served.add(task)
            task.add_done_callback(served.discard)

        server = await asyncio.start_unix_server(connected, self._path)
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in [*served]:
            task.cancel()
        await asyncio.gather(*served, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, target, _ = head.split("\r\n")[0].split(" ")
            size = int(head.lower().split("content-length:")[1].split("\r\n")[0])
            body = json.loads(await reader.readexactly(size) or b"null")
            answering = asyncio.ensure_future(self._answer(method, target, body))
            gone = asyncio.ensure_future(reader.read())
            await asyncio.wait((answering, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():  # the client hung up: vLLM aborts what it asked for
                answering.cancel()
                return
            gone.cancel()
            status, answer = answering.result()
            content = json.dumps(answer).encode()
            writer.write(_HEADERS.format(status=status, size=len(content)).encode() + content)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, method: str, target: str, body: Any) -> tuple[int, Any]:
        path, _, query = target.partition("?")
        match method, path:
            case "GET", "/health":
                return 200, None
            case "GET", "/v1/models":
                return 200, {"data": [{"id": "fake", "max_model_len": self._max_model_len}]}
            case "POST", "/inference/v1/generate":
                return await self._generate(body)
            case "POST", "/abort_requests":
                for name in body["request_ids"]:
                    if name in self.running:
                        self.running[name].set()
                return 200, {"status": "aborted"}
        while self.frozen:  # noqa: ASYNC110 - what follows asks the engine
            await asyncio.sleep(0.01)
        match method, path:
            case "GET", "/weight_info":
                return 200, {"weight_version": self._version}
            case "POST", "/pause":
                assert query in ("mode=abort&clear_cache=true", "mode=abort&clear_cache=false")
                self._paused = True
                if query.endswith("true"):
                    self._cached.clear()
                for aborted in self.running.values():
                    aborted.set()
                return 200, {"status": "paused"}
            case "POST", "/resume":
                self._paused = False
                return 200, {"status": "resumed"}
            case "POST", "/collective_rpc":
                assert self._paused and body["method"] == "afterimage_load"
                try:
                    self._load(self._take(*body["args"]))
                except ValueError as error:
                    return 500, {"error": {"message": str(error)}}
                return 200, {"results": [None]}
            case "POST", "/update_weight_version":
                self._version = self._version if self.forgetful else body["new_version"]
                return 200, {"success": True, "new_version": body["new_version"]}
        return 404, {"detail": "Not Found"}

    def _take(self, path: str, merging: dict[str, Any] | None) -> dict[str, Tensor]:
        assert merging is None
        return load_file(path)

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        taken = {name: torch.zeros_like(tensor) if name == self.corrupt else tensor for name, tensor in weights.items()}
        if self._head is None or not self.stale_head:
            self._head = taken["model.embed_tokens.weight"].clone()
        self._policy.load_weights(taken)

    async def _generate(self, body: Mapping[str, Any]) -> tuple[int, Any]:
        asked, context = body["sampling_params"], list(body["token_ids"])
        assert asked["ignore_eos"] and asked["logprobs"] == 0 and not asked["detokenize"]
        if len(context) + asked["max_tokens"] > self._max_model_len:
            return 400, {"error": {"message": "This model's maximum context length is exceeded"}}
        self.asked += 1
        cached = max((end for end in range(0, len(context), _BLOCK) if tuple(context[:end]) in self._cached), default=0)
        name = f"generate-tokens-{body['request_id']}"
        aborted = self.running[name] = asyncio.Event()
        noise = torch.Generator().manual_seed(asked["seed"])
        said: list[tuple[int, float]] = []
        versions: list[str] = []
        reason = "abort"
        try:
            while not aborted.is_set():
                await asyncio.sleep(0.001)
                if self._paused or self.frozen or aborted.is_set():
                    continue
                token, logprob = self._next(context, asked["temperature"], noise)
                context.append(token)
                said.append((token, logprob))
                versions.append(self._version)
                if token in asked["stop_token_ids"] or len(said) == asked["max_tokens"]:
                    reason = "stop" if token in asked["stop_token_ids"] else "length"
                    break
        finally:
            del self.running[name]
        spans: list[dict[str, Any]] = []
        for version, run in groupby(versions):
            start = spans[-1]["end"] if spans else 0
            spans.append({"version": version, "start": start, "end": start + len(list(run))})
        choice = {
            "index": 0,
            "finish_reason": reason,
            "token_ids": [token for token, _ in said],
            "logprobs": {"content": [{"token_id": token, "logprob": logprob} for token, logprob in said]},
            "weight_versions": spans,
        }
        self.cache(context)
        usage = {"prompt_tokens": len(body["token_ids"]), "prompt_tokens_details": {"cached_tokens": cached}}
        return 200, {"request_id": body["request_id"], "choices": [choice], "usage": usage}

    def cache(self, context: list[int]) -> None:
        self._cached.update(tuple(context[:end]) for end in range(_BLOCK, len(context), _BLOCK))

    @torch.no_grad()
    def _next(self, context: list[int], temperature: float, noise: torch.Generator) -> tuple[int, float]:
        model = self._policy.model.model
        hidden = model(input_ids=torch.tensor([context[-64:]]), use_cache=False).last_hidden_state[0, -1]
        logits = hidden @ (self._policy.model.lm_head.weight if self._head is None else self._head).T
        logp = (logits / (temperature or 1.0)).log_softmax(-1)
        gumbel = -torch.empty_like(logp).exponential_(generator=noise).log()
        token = int((logp + gumbel if temperature else logp).argmax())
        return token, float((logits.log_softmax(-1) if self._raw else logp)[token])
