"""A fake of SGLang 0.5.23's HTTP API, as far as a run uses it, with a tiny model on the CPU.

It follows the source: entrypoints/http_server.py, managers/tokenizer_manager.py and scheduler.py
(under srt/). It reproduces what an engine must work around: an abort misses requests that are still
in the tokenizer process; the model's end tokens stop a reply by default, and `ignore_eos` disables
all stop tokens; aborted replies run one more step, or lack fields if they never started; the cache
is not flushed during a step.
"""

import asyncio
import base64
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from tests.support.fake_server import FakeServer, Speech, _Connected, gumbel
from unstale.model.policy import Policy
from unstale.testing import tiny_policy

_ALL = 1 << 30
_DEFAULTS = {
    "max_new_tokens": 128,
    "stop_token_ids": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": _ALL,
    "min_p": 0.0,
    "ignore_eos": False,
    "sampling_seed": None,
}


def kept_words(asked: Mapping[str, Any], logp: torch.Tensor) -> torch.Tensor:
    """Return True for the words that SGLang draws from: each limit acts on the whole vocabulary."""
    likely, order = logp.exp().sort(descending=True)
    keeps = likely.cumsum(0) - likely <= asked["top_p"]
    keeps &= torch.arange(len(likely)) < asked["top_k"]
    keeps &= likely >= asked["min_p"] * likely[0]
    return torch.zeros_like(keeps).scatter_(0, order, keeps)


@dataclass
class _Req:
    """A request in the scheduler."""

    speech: Speech
    began: bool = False
    said: list[tuple[float, int, None]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    reason: dict[str, Any] = field(default_factory=dict)


class FakeSglang(FakeServer):
    """A fake SGLang server on `port` of the loopback interface, or on a free one.

    `deterministic` has the effect of --enable-deterministic-inference.
    """

    notices_s = 0.3

    def __init__(self, policy: Policy | None = None, *, port: int = 0, **flags: Any) -> None:
        super().__init__(policy or tiny_policy(seed=99))
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.refuses = 0
        """Number of further cache flushes that fail because a step still runs."""
        self.frontend_s = 0.0
        """Seconds that a request waits in front of the scheduler."""
        self._flags = {
            "page_size": 16,
            "preferred_sampling_params": None,
            "quantization": None,
            "context_length": 2054,
        } | flags
        self._original = bool(self._flags.pop("original_logprob", False))
        self._deterministic = bool(self._flags.pop("deterministic", True))
        self._max_running = int(self._flags.pop("max_running", 64))
        self._version = "default"
        self._experts: dict[str, torch.Tensor] = {}
        self._cached: set[tuple[int, ...]] = set()
        self._readers = 0
        self._writing = asyncio.Lock()
        self._stream = torch.Generator().manual_seed(0)
        eos = self.policy.model.config.eos_token_id
        self.eos: set[int] = set(eos) if isinstance(eos, list) else {eos} - {None}

    def listen(self, connected: _Connected) -> Awaitable[asyncio.Server]:
        async def bound() -> asyncio.Server:
            server = await asyncio.start_server(connected, "127.0.0.1", self.port)
            self.port = server.sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{self.port}"
            return server

        return bound()

    async def answer(self, method: str, target: str, body: Any) -> tuple[int, Any]:
        match method, target:
            case "GET", "/model_info":
                return 200, {"is_generation": True, "weight_version": self._version}
            case "POST", "/generate":
                return await self._generate(body)
            case "POST", "/abort_request":
                for rid, req in self.running.items():
                    if body.get("abort_all") or (body.get("rid") and rid.startswith(body["rid"])):
                        req.speech.aborted = True
                return 200, None
        await self.thaw()
        match method, target:
            case "GET", "/server_info":
                room = self._flags["context_length"] - 6
                self._flags["enable_return_routed_experts"] = self.recorder is not None
                states = [{**self._flags, "weight_version": self._version}]
                top = {"weight_version": "default", "max_req_input_len": room, "version": "0.5.23"}
                return 200, {**self._flags, **top, "internal_states": states}
            case "POST", "/update_weights_from_disk":
                return await self._update(body)
        return 404, {"detail": "Not Found"}

    async def _update(self, body: Mapping[str, Any]) -> tuple[int, Any]:
        if body.get("abort_all_requests"):
            for req in self.running.values():
                req.speech.aborted = True
        async with self._writing:
            while self._readers:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            success, message = self._take(body)
        told = {"success": success, "message": message, "num_paused_requests": 0}
        return (200 if success else 400), told

    def _take(self, body: Mapping[str, Any]) -> tuple[bool, str]:
        if body.get("load_format") not in ("auto", "safetensors"):
            return False, "Failed to get model loader: <DummyModelLoader>."
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        if not files:
            return (
                False,
                "Failed to update weights: Cannot find any model weights with "
                f"`{body['model_path']}`.",
            )
        try:
            self.load({name: tensor for file in files for name, tensor in load_file(file).items()})
        except (SafetensorError, ValueError) as error:
            return False, f"Failed to update weights: {error}.\nRolling back to original weights."
        if body.get("weight_version") is not None and not self.forgetful:
            self._version = body["weight_version"]
        if body.get("flush_cache", True):
            if self.refuses:
                self.refuses -= 1
                return False, (
                    "Weights were updated, but the cache was not flushed because requests are "
                    "still running or queued. Retract or finish them, then call /flush_cache."
                )
            self._cached.clear()
        return (
            True,
            f"Succeeded to update model weights. Weight version updated to {self._version}.",
        )

    async def _generate(self, body: Mapping[str, Any]) -> tuple[int, Any]:
        """Validate a request and format the scheduler's reply, as the tokenizer process does."""
        unknown = body["sampling_params"].keys() - _DEFAULTS.keys()
        if unknown or body.keys() - {
            "rid",
            "input_ids",
            "sampling_params",
            "return_logprob",
            "stream",
            "return_routed_experts",
            "routed_experts_start_len",
        }:
            return 400, {"error": f"unknown field {sorted(unknown)}"}
        asked = (
            _DEFAULTS | (self._flags["preferred_sampling_params"] or {}) | body["sampling_params"]
        )
        asked["top_k"] = _ALL if asked["top_k"] == -1 else asked["top_k"]
        if asked["top_k"] < 1:
            return 400, {"error": {"message": "top_k must be -1 (disable) or at least 1"}}
        context, room = list(body["input_ids"]), self._flags["context_length"]
        if len(context) >= room:
            return 400, {
                "error": {
                    "message": f"The input ({len(context)} tokens) is longer than "
                    "the model's context"
                }
            }
        if len(context) + asked["max_new_tokens"] > room:
            return 400, {
                "error": {
                    "message": "Requested token count exceeds the model's maximum context length"
                }
            }
        self.asked += 1
        async with self._writing:  # readers wait for a writer
            self._readers += 1
        try:
            await asyncio.sleep(self.frontend_s)
            asked["max_new_tokens"] = min(asked["max_new_tokens"], room - len(context) - 2)
            reply = await self._schedule(body["rid"], context, asked)
            if self.recorder and body.get("return_routed_experts") and reply["output_ids"]:
                rows = self._experts.pop(body["rid"])[body.get("routed_experts_start_len", 0) :]
                encoded = base64.b64encode(rows.int().numpy().tobytes()).decode()
                reply["meta_info"]["routed_experts"] = encoded
            return 200, reply
        finally:
            self._readers -= 1

    async def _schedule(self, rid: str, context: list[int], asked: Mapping[str, Any]) -> Any:
        size = self._flags["page_size"]
        ends = range(0, len(context), size)
        cached = max((end for end in ends if tuple(context[:end]) in self._cached), default=0)
        prompt_tokens, greedy = len(context), asked["temperature"] < 1e-6
        speech = Speech(
            context, 0.0 if greedy else asked["temperature"], self._noise(asked["sampling_seed"])
        )
        if not greedy:
            speech.keep = partial(kept_words, asked)
        speech.renormalises = False
        req = self.running[rid] = _Req(speech)
        try:
            await self._run(req, asked)
        finally:
            del self.running[rid]
        if speech.routed_experts:
            self._experts[rid] = torch.cat(speech.routed_experts)
        self.cache(context)
        meta = {
            "id": rid,
            "finish_reason": req.reason,
            "weight_version": self._version,
            "weight_versions": [{"version": self._version, "start": 0, "end": len(req.ids)}],
            "input_token_logprobs": [],
            "output_token_logprobs": req.said,
            "output_token_logprobs_length": len(req.said),
            "completion_tokens": len(req.ids),
        }
        if not req.began:
            return {"text": "", "output_ids": [], "meta_info": meta}
        meta |= {
            "prompt_tokens": prompt_tokens,
            "cached_tokens": cached,
            "num_retractions": 0,
            "reasoning_tokens": 0,
        }
        return {"output_ids": req.ids, "meta_info": meta}

    async def _run(self, req: _Req, asked: Mapping[str, Any]) -> None:
        """Run a request in the scheduler.

        An abort takes effect between steps. A request that has started runs one more step.
        """
        while True:
            if not self.frozen:
                if req.speech.aborted:
                    req.reason = {"type": "abort", "message": "Abort in waiting queue"}
                    return
                if sum(other.began for other in self.running.values()) < self._max_running:
                    break
            await asyncio.sleep(0.001)
        req.began = True
        stops = set() if asked["ignore_eos"] else self.eos | set(asked["stop_token_ids"] or ())
        while not req.reason:
            await asyncio.sleep(0.001)
            if self.frozen:
                continue
            aborted = req.speech.aborted
            token, logp, raw = self.step(req.speech)
            req.ids.append(token)
            req.said.append((raw if self._original else logp, token, None))
            if aborted:
                req.reason = {
                    "type": "abort",
                    "message": "Aborted",
                    "status_code": None,
                    "err_type": None,
                }
            elif token in stops:
                req.reason = {"type": "stop", "matched": token}
            elif len(req.ids) == asked["max_new_tokens"]:
                req.reason = {"type": "length", "length": len(req.ids)}

    def _noise(self, seed: int | None) -> Callable[[int, int], torch.Tensor]:
        """Return a function that returns noise by position. Only a deterministic server uses the
        seed.
        """
        if not self._deterministic:
            return lambda position, size: gumbel(self._stream, size)
        seed = 42 if seed is None else seed
        return lambda position, size: gumbel(
            torch.Generator().manual_seed(hash((seed, position)) % 2**63), size
        )

    def cache(self, context: list[int]) -> None:
        size = self._flags["page_size"]
        self._cached.update(tuple(context[:end]) for end in range(size, len(context), size))
