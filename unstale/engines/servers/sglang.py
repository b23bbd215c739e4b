"""The backend `sglang`: an SGLang server that already runs on this host. See docs/engines.md."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from unstale.config.files import read_mapping
from unstale.engines import SamplingParams
from unstale.engines.encoded_experts import decode_base64
from unstale.engines.prefixes import BLOCK
from unstale.engines.registry import EngineSpec
from unstale.engines.remote import (
    LOAD_S,
    NO_EXPERTS,
    RemoteEngine,
    ServerReply,
    VersionSpan,
)

WHOLE_TOP_K = -1
"""SGLang's value of `top_k` that sets no limit."""


class _FinishReason(msgspec.Struct):
    type: str


class _Meta(msgspec.Struct):
    finish_reason: _FinishReason
    output_token_logprobs: list[tuple[float, int, Any]]
    weight_versions: list[VersionSpan]
    cached_tokens: int = 0
    """Number of context tokens that the server found in its cache. The server omits it for a
    request that was aborted in its queue.
    """
    routed_experts: msgspec.Raw = msgspec.Raw(NO_EXPERTS)


class _Reply(msgspec.Struct):
    output_ids: tuple[int, ...]
    meta_info: _Meta


class SglangEngine(RemoteEngine):
    """An engine on one SGLang server.

    If the server was started with `--enable-deterministic-inference`, the random number of a token
    depends only on seed and position, as `SamplingParams` requires. Otherwise SGLang ignores seeds.

    This engine does not use SGLang's pause. The pause takes a second while replies are pending, and
    does not stop requests that arrive later. Instead, `interrupt` sends no more requests, and
    repeatedly aborts replies until all have returned.
    """

    NAME = "SGLang"
    HEALTH_PATH = "/model_info"
    GENERATE_PATH = "/generate"
    MIN_TEMPERATURE = 1e-6
    TRUNCATES = True
    REPLY = _Reply

    async def _handshake(self) -> int:
        info = await self._http.call("GET", "/server_info")
        if preferred := info["preferred_sampling_params"]:
            raise ValueError(
                f"{self.url} overrides sampling parameters: start it without {preferred!r}"
            )
        if quantization := info.get("quantization"):
            raise ValueError(
                f"start {self.url} without --quantization {quantization}: SGLang cannot load new "
                "weights into layers that it quantised"
            )
        if self.options.keep_cache and info["page_size"] % BLOCK:
            raise ValueError(
                f"engine.keep_cache needs cache pages of {BLOCK} tokens: start {self.url} with "
                f"--page-size {BLOCK}, not {info['page_size']}"
            )
        if self.options.record_experts and not info.get("enable_return_routed_experts"):
            raise ValueError(
                f"trainer.routing_replay needs routed experts: start {self.url} with "
                "--enable-return-routed-experts"
            )
        return int(info["max_req_input_len"])

    async def _pause(self, *, keep_cache: bool) -> None:
        await self._abort(())

    async def _abort(self, request_ids: Sequence[str]) -> None:
        await self._post("/abort_request", {"abort_all": True})

    async def _load_weights(self, folder: Path, version: int) -> None:
        body = {
            "model_path": str(folder),
            "load_format": "safetensors",
            "weight_version": str(version),
            "abort_all_requests": True,
            "flush_cache": not self.options.keep_cache or self._version < 0,
        }
        # The cache can be flushed only after the step that was running at the abort.
        await self._post(
            "/update_weights_from_disk",
            body,
            timeout_s=LOAD_S,
            retry_on="the cache was not flushed",
        )

    async def _unpause(self) -> None:
        """Do nothing: this engine never pauses the server."""

    async def _loaded_version(self) -> str:
        states = (await self._http.call("GET", "/server_info"))["internal_states"]
        return " and ".join(sorted({state["weight_version"] for state in states}))

    async def generate(
        self, request_id: str, tokens: Sequence[int], params: SamplingParams
    ) -> ServerReply:
        """Send a request to the server and return the whole reply.

        SGLang always stops at the model's end token. If this token is not among the request's stop
        tokens, further requests continue the reply.
        """
        reply = await super().generate(request_id, tokens, params)
        while reply.finish_reason == "stop" and reply.tokens[-1] not in params.stop_tokens:
            start = len(reply.tokens)
            left = self._max_tokens(tokens, params) - start
            if left <= 0:
                return replace(reply, finish_reason="length")
            more = await super().generate(
                f"{request_id}-{start}",
                [*tokens, *reply.tokens],
                replace(params, max_tokens=left),
            )
            moved = tuple((version, start + end) for version, end in more.versions)
            reply = ServerReply(
                tokens=reply.tokens + more.tokens,
                logps=reply.logps + more.logps,
                logp_tokens=reply.logp_tokens + more.logp_tokens,
                versions=reply.versions + moved,
                finish_reason=more.finish_reason,
                cached_tokens=reply.cached_tokens,
                routed_experts=more.routed_experts,  # of the whole text
            )
        return reply

    def _request_body(
        self, request_id: str, tokens: Sequence[int], params: SamplingParams
    ) -> Mapping[str, Any]:
        sampling = {  # not `ignore_eos`, which would ignore all stop tokens
            "max_new_tokens": self._max_tokens(tokens, params),
            "stop_token_ids": list(params.stop_tokens),
            "temperature": params.temperature,
            "sampling_seed": params.seed & (2**63 - 1),
        }
        if params.truncation and params.temperature:
            sampling |= {**params.truncation._asdict(), "top_k": params.top_k or WHOLE_TOP_K}
        body = {
            "rid": request_id,
            "input_ids": list(tokens),
            "sampling_params": sampling,
            "return_logprob": True,
        }
        if self.options.record_experts:
            body["return_routed_experts"] = True
            body["routed_experts_start_len"] = params.first_routed(self._version)
        return body

    def _parse_reply(self, body: _Reply) -> ServerReply:
        tokens = body.output_ids
        meta = body.meta_info
        finish_reason = meta.finish_reason.type
        if finish_reason == "stop" and not tokens:
            raise ValueError("a reply without tokens ended with a stop token")
        logps = meta.output_token_logprobs[: len(tokens)]
        return ServerReply(
            tokens=tokens,
            logps=tuple([logp for logp, _, _ in logps]),
            logp_tokens=tuple([token for _, token, _ in logps]),
            versions=tuple((span.version, span.end) for span in meta.weight_versions if span.end),
            finish_reason=finish_reason,
            cached_tokens=meta.cached_tokens,
            routed_experts=memoryview(meta.routed_experts),
        )

    def _decode_experts(self, routed_experts: memoryview) -> Any:
        """Return expert numbers `[tokens, layers, k]` from base64 of int32 numbers."""
        return np.frombuffer(decode_base64(routed_experts), "<i4").reshape(-1, *self._expert_shape)

    @cached_property
    def _expert_shape(self) -> tuple[int, int]:
        """The model's number of layers, and its number of experts for each token."""
        config = read_mapping(self.options.model_folder / "config.json")
        config = {**config, **(config.get("text_config") or {})}
        return config["num_hidden_layers"], config["num_experts_per_tok"]


SPEC = EngineSpec(SglangEngine, needs_urls=True, deltas_in_parts=True, truncates=True)
