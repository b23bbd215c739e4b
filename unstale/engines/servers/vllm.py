"""vLLM behind its HTTP API: a server that is started here, or one that runs already on this host."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unstale.engines import SamplingParams
from unstale.engines.embedded.shared_weights import WEIGHTS
from unstale.engines.registry import EngineOptions, EngineSpec
from unstale.engines.remote import LOAD_S, Answer, RemoteEngine
from unstale.engines.vllm_server import EXTENSION, Server


class VllmEngine(RemoteEngine):
    """`Engine` on one vLLM server.

    Without a `url` the server is a process of this engine, and ends with it. With one it is somebody's who started it
    as docs/engines.md says. `extension` is mixed into the workers of a server that is started here.

    A reply that goes on after an interruption is another draw from the same policy: vLLM's noise is not keyed by
    position. Its seed is made of `seed` and the length of the context, so that no noise is used twice.
    """

    _NAME = "vLLM"
    _HEALTH = "/health"
    _GENERATE = "/inference/v1/generate"
    _MIN_TEMPERATURE = 0.01

    def __init__(
        self,
        model_folder: Path,
        *,
        threads: int = 1,
        max_running: int = 128,
        extension: str = EXTENSION,
        **options: Any,
    ) -> None:
        super().__init__(model_folder, **options)
        if not self.url:
            server = Server(model_folder, dtype=self._dtype, threads=threads, extension=extension)
            server.limit(running=max_running, context=self._max_context)
            self._attach(server)

    async def _greet(self) -> int:
        await self._held()
        return int((await self._http.call("GET", "/v1/models"))["data"][0]["max_model_len"])

    async def _pause(self, *, keep: bool) -> None:
        await self._tell(f"/pause?mode=abort&clear_cache={'false' if keep else 'true'}")

    async def _abort(self, names: Sequence[str]) -> None:
        await self._tell(
            "/abort_requests", {"request_ids": [f"generate-tokens-{name}" for name in names]}
        )

    async def _take(self, folder: Path, version: int) -> None:
        body = {"method": "unstale_load", "args": [str(folder / WEIGHTS)]}
        await self._tell("/collective_rpc", body, timeout_s=LOAD_S)
        await self._tell("/update_weight_version", {"new_version": str(version)})
        await self._tell("/resume")

    async def _held(self) -> str:
        return str((await self._http.call("GET", "/weight_info"))["weight_version"])

    async def _open(self) -> None:
        await self._tell("/resume")

    def _request(self, name: str, tokens: Sequence[int], params: SamplingParams) -> Any:
        sampling = {
            "max_tokens": self._room(tokens, params),
            "stop_token_ids": list(params.stop_tokens),
            "ignore_eos": True,
            "temperature": params.temperature,
            "seed": hash((params.seed, len(tokens))) & (2**63 - 1),
            "logprobs": 0,
            "detokenize": False,
        }
        return {"request_id": name, "token_ids": list(tokens), "sampling_params": sampling}

    def _answer(self, said: Mapping[str, Any]) -> Answer:
        choice = said["choices"][0]
        details = said["usage"].get("prompt_tokens_details") or {}
        return Answer(
            tuple(choice["token_ids"]),
            tuple((one["token_id"], one["logprob"]) for one in choice["logprobs"]["content"] or []),
            tuple((span["version"], span["end"]) for span in choice["weight_versions"] or []),
            choice["finish_reason"],
            details.get("cached_tokens") or 0,
        )


def _make(options: EngineOptions) -> VllmEngine:
    return VllmEngine(
        options.model_folder,
        threads=options.config.threads,
        max_running=options.max_running,
        **options.for_server(),
    )


SPEC = EngineSpec(_make)
