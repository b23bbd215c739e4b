"""The backend `vllm`: a vLLM server that the run starts, or one that already runs on this host."""

import io
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from unstale.engines import SamplingParams
from unstale.engines.embedded.shared_weights import WEIGHTS
from unstale.engines.registry import EngineOptions, EngineSpec
from unstale.engines.remote import LOAD_S, RemoteEngine, ServerReply, decode_base64
from unstale.engines.vllm_server import EXTENSION, VllmServer


class VllmEngine(RemoteEngine):
    """An engine on one vLLM server.

    Without `options.url`, this engine starts the server and ends it. `extension` names a class that
    is added to the server's workers for loading weights. docs/engines.md shows how to start a
    server for `options.url`.

    vLLM's random numbers do not depend on a token's position. So an interrupted reply does not
    continue like an uninterrupted one. It is another sample from the same policy. The seed of a
    request combines `seed` with the length of the context, so that no random numbers are used
    twice.
    """

    NAME = "vLLM"
    HEALTH_PATH = "/health"
    GENERATE_PATH = "/inference/v1/generate"
    MIN_TEMPERATURE = 0.01

    def __init__(self, options: EngineOptions, *, extension: str = EXTENSION) -> None:
        if not options.url and find_spec("vllm") is None:
            raise ValueError(
                "engine.backend = vllm needs vLLM, which this Python does not have: install it, or "
                "give the engine.urls of servers that already run"
            )
        super().__init__(options, None if options.url else VllmServer(options, extension))

    async def _handshake(self) -> int:
        await self._loaded_version()
        return int((await self._http.call("GET", "/v1/models"))["data"][0]["max_model_len"])

    async def _pause(self, *, keep_cache: bool) -> None:
        clear_cache = "false" if keep_cache else "true"
        await self._post(f"/pause?mode=abort&clear_cache={clear_cache}")

    async def _abort(self, request_ids: Sequence[str]) -> None:
        ids = [f"generate-tokens-{request_id}" for request_id in request_ids]
        await self._post("/abort_requests", {"request_ids": ids})

    async def _load_weights(self, folder: Path, version: int) -> None:
        body = {"method": "unstale_load", "args": [str(folder / WEIGHTS)]}
        await self._post("/collective_rpc", body, timeout_s=LOAD_S)
        await self._post("/update_weight_version", {"new_version": str(version)})
        await self._post("/resume")

    async def _loaded_version(self) -> str:
        return str((await self._http.call("GET", "/weight_info"))["weight_version"])

    async def _unpause(self) -> None:
        await self._post("/resume")

    def _request_body(
        self, request_id: str, tokens: Sequence[int], params: SamplingParams
    ) -> Mapping[str, Any]:
        sampling = {
            "max_tokens": self._max_tokens(tokens, params),
            "stop_token_ids": list(params.stop_tokens),
            "ignore_eos": True,
            "temperature": params.temperature,
            "seed": hash((params.seed, len(tokens))) & (2**63 - 1),
            "logprobs": 0,
            "detokenize": False,
        }
        if self.options.record_routes:
            sampling["routed_experts_prompt_start"] = params.first_route(self._version)
        return {"request_id": request_id, "token_ids": list(tokens), "sampling_params": sampling}

    def _parse_reply(self, body: Mapping[str, Any]) -> ServerReply:
        choice = body["choices"][0]
        logps = choice["logprobs"]["content"] or []
        versions = choice["weight_versions"] or []
        prompt_details = body["usage"].get("prompt_tokens_details") or {}
        return ServerReply(
            tokens=tuple(choice["token_ids"]),
            logps=tuple((token["token_id"], token["logprob"]) for token in logps),
            versions=tuple((span["version"], span["end"]) for span in versions),
            finish_reason=choice["finish_reason"],
            cached_tokens=prompt_details.get("cached_tokens") or 0,
            routes=choice.get("routed_experts") or "",
        )

    def _decode_routes(self, routes: str) -> Any:
        """Return expert routes from a NumPy file in base64."""
        return np.load(io.BytesIO(decode_base64(routes)), allow_pickle=False)


SPEC = EngineSpec(VllmEngine)
