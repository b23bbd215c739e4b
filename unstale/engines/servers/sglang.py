"""SGLang behind its HTTP API: a server that runs already on this host. See docs/engines.md."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unstale.engines import SamplingParams
from unstale.engines.prefixes import BLOCK
from unstale.engines.registry import EngineSpec
from unstale.engines.remote import LOAD_S, Answer, RemoteEngine


class SglangEngine(RemoteEngine):
    """`Engine` on one SGLang server.

    Noise is keyed by seed and position, as `SamplingParams` has it, where the server was started with
    `--enable-deterministic-inference`; elsewhere it knows no seeds.

    Its own way to pause waits for a second whenever a reply is on its way, and does not take back what arrives later.
    So it is not paused: this engine asks for nothing while it is interrupted, and aborts until all have come back.
    """

    _NAME = "SGLang"
    _HEALTH = "/model_info"
    _GENERATE = "/generate"
    _MIN_TEMPERATURE = 1e-6

    async def _greet(self) -> int:
        info = await self._http.call("GET", "/server_info")
        if preferred := info["preferred_sampling_params"]:
            raise ValueError(
                f"{self.url} has preferences of its own: start it without {preferred!r}"
            )
        if self._keep_cache and info["page_size"] % BLOCK:
            raise ValueError(
                f"engine.keep_cache needs to know what is cached in whole blocks of {BLOCK} tokens: start {self.url} "
                f"with --page-size {BLOCK}, not {info['page_size']}"
            )
        return int(info["max_req_input_len"])

    async def _pause(self, *, keep: bool) -> None:
        await self._abort(())

    async def _abort(self, names: Sequence[str]) -> None:
        await self._tell("/abort_request", {"abort_all": True})

    async def _take(self, folder: Path, version: int) -> None:
        body = {
            "model_path": str(folder),
            "load_format": "safetensors",
            "weight_version": str(version),
            "abort_all_requests": True,
            "flush_cache": not self._keep_cache or self._version < 0,
        }
        refused = (
            "the cache was not flushed"  # until a step that was begun before the abort is over
        )
        await self._tell("/update_weights_from_disk", body, timeout_s=LOAD_S, again=refused)

    async def _open(self) -> None:
        """It is never paused."""

    async def _held(self) -> str:
        states = (await self._http.call("GET", "/server_info"))["internal_states"]
        return " and ".join(sorted({state["weight_version"] for state in states}))

    async def _generate(self, name: str, tokens: Sequence[int], params: SamplingParams) -> Answer:
        """Goes on after the model's own end token, which ends a reply whether that was asked for or not."""
        answer = await super()._generate(name, tokens, params)
        while answer.reason == "stop" and answer.tokens[-1] not in params.stop_tokens:
            start = len(answer.tokens)
            left = self._room(tokens, params) - start
            if left <= 0:
                return replace(answer, reason="length")
            rest = replace(params, max_tokens=left)
            more = await super()._generate(f"{name}-{start}", [*tokens, *answer.tokens], rest)
            answer = Answer(
                answer.tokens + more.tokens,
                answer.said + more.said,
                (*answer.stamps, *((version, start + end) for version, end in more.stamps)),
                more.reason,
                answer.cached,
            )
        return answer

    def _request(self, name: str, tokens: Sequence[int], params: SamplingParams) -> Any:
        sampling = {  # not ignore_eos: under it no stop token counts
            "max_new_tokens": self._room(tokens, params),
            "stop_token_ids": list(params.stop_tokens),
            "temperature": params.temperature,
            "sampling_seed": params.seed & (2**63 - 1),
        }
        return {
            "rid": name,
            "input_ids": list(tokens),
            "sampling_params": sampling,
            "return_logprob": True,
        }

    def _answer(self, said: Mapping[str, Any]) -> Answer:
        tokens, meta = tuple(said["output_ids"]), said["meta_info"]
        reason = meta["finish_reason"]["type"]
        if reason == "stop" and not tokens:
            raise ValueError("a reply without a token came to an end")
        return Answer(
            tokens,
            tuple(
                (token, float(logp))
                for logp, token, _ in meta["output_token_logprobs"][: len(tokens)]
            ),
            tuple(
                (span["version"], span["end"]) for span in meta["weight_versions"] if span["end"]
            ),
            reason,
            meta.get("cached_tokens", 0),  # one that was aborted while it waited does not say
        )


SPEC = EngineSpec(
    lambda options: SglangEngine(options.model_folder, **options.for_server()), needs_urls=True
)
