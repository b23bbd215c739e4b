"""A fake of vLLM 0.32's HTTP API, as far as a run uses it, with a tiny model on the CPU.

It follows the source: entrypoints/rl/online/api_router.py,
entrypoints/scale_out/token_in_token_out, v1/engine/core.
"""

import asyncio
import base64
import copy
import io
import time
from collections.abc import Awaitable, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.support.fake_server import FakeServer, Speech, _Connected, gumbel
from tests.support.gloo_groups import GlooWorkers
from unstale.model.policy import Policy
from unstale.testing import tiny_policy

_BLOCK = 16
_SCALE_BLOCK = 128
"""Number of rows and of columns of a weight that share a scale in FP8."""


def rounded_as_vllm(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights rounded to FP8 as vLLM does, which joins some matrices of a layer first."""
    result = {name: each.float() for name, each in weights.items()}
    for joined in (
        ("q_proj", "k_proj", "v_proj"),
        ("gate_proj", "up_proj"),
        ("o_proj",),
        ("down_proj",),
    ):
        for name in weights:
            if f"{joined[0]}.weight" in name:
                names = [name.replace(joined[0], each) for each in joined]
                whole = torch.cat([weights[each].bfloat16() for each in names])
                parts = _round_blocks(whole, _SCALE_BLOCK).float()
                result |= zip(
                    names, parts.split([len(weights[each]) for each in names]), strict=True
                )
    return result


def _round_blocks(values: torch.Tensor, rows: int) -> torch.Tensor:
    """Return numbers `[..., R, C]` rounded to FP8, in blocks of `rows` times 128."""
    flat = values.reshape(-1, values.shape[-1]).float()
    height, width = flat.shape
    size = (-(-height // rows) * rows, -(-width // _SCALE_BLOCK) * _SCALE_BLOCK)
    wide = F.pad(flat, (0, size[1] - width, 0, size[0] - height))
    blocks = wide.view(size[0] // rows, rows, -1, _SCALE_BLOCK)
    scale = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / 448
    rounded = (blocks * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return rounded.reshape(size)[:height, :width].reshape(values.shape).to(values.dtype)


def kept_words(asked: Mapping[str, Any], logp: torch.Tensor) -> torch.Tensor:
    """Return True for the words that vLLM draws from: by min-p, then top-k, then top-p."""
    likely = logp.exp()
    likely[likely < asked.get("min_p", 0) * likely.max()] = 0
    order = likely.argsort(descending=True)
    if asked.get("top_k", 0) > 0:
        likely[order[asked["top_k"] :]] = 0
    shares = likely[order] / likely.sum()
    likely[order[shares.cumsum(0) - shares >= asked.get("top_p", 1)]] = 0
    return likely > 0


class FakeVllm(FakeServer):
    """A fake vLLM server on a socket in `folder`."""

    tick_s = 0.001
    """Seconds between two looks at whether a reply goes on."""

    def __init__(
        self,
        folder: Path,
        policy: Policy | None = None,
        *,
        max_model_len: int = 2048,
        raw_logprobs: bool = False,
        quantization: str | None = None,
    ) -> None:
        """`quantization` is the value of --quantization.

        With `fp8_per_block` the weights are rounded at each load, and the inputs of the layers in
        each pass, in vLLM's blocks and with its inverse scales. This file has its own code for
        this, and uses none of the package's.
        """
        super().__init__(policy or tiny_policy(seed=99))
        self._quantization = quantization
        if quantization == "fp8_per_block":
            for name, module in self.policy.model.named_modules():
                if name.endswith("_proj"):
                    module.register_forward_pre_hook(
                        lambda _, inputs: (_round_blocks(inputs[0], 1), *inputs[1:])
                    )
        self.url = f"unix:{folder}/fake"
        self._path = folder / "fake"
        self._max_model_len = max_model_len
        self._raw = raw_logprobs
        self.returns_masks = False
        """With `--return-sampling-mask`. Requests then need a temperature and a top-k."""
        self.confuses_masks = False
        """True if each token has the mask of the one before it."""
        self._version = "default"
        self._cached: set[tuple[Any, ...]] = set()
        """Beginnings of contexts whose whole blocks are in the cache."""
        self._paused = False
        self.workers: GlooWorkers | None = None
        """Set by tests of weight transfers: the workers, with gloo in place of NCCL."""
        self.adapters: dict[str, Any] | None = None
        """With `--enable-lora`: a model of PEFT for each adapter, by the adapter's name."""
        self.confuses_adapters = False
        """True if every request is sampled by the adapter that was loaded first."""

    def pace(self, asked: Mapping[str, Any]) -> float:
        """Return the seconds between two tokens of a reply with these sampling parameters."""
        return 0.0

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        is_fp8 = self._quantization == "fp8_per_block"
        super().load(rounded_as_vllm(weights) if is_fp8 else weights)

    def listen(self, connected: _Connected) -> Awaitable[asyncio.Server]:
        self._path.unlink(missing_ok=True)
        return asyncio.start_unix_server(connected, self._path)

    def die(self) -> None:
        super().die()
        self._path.unlink(missing_ok=True)

    async def answer(self, method: str, target: str, body: Any) -> tuple[int, Any]:
        path, _, query = target.partition("?")
        match method, path:
            case "GET", "/health":
                return 200, None
            case "GET", "/v1/models":
                models = [{"id": "fake", "max_model_len": self._max_model_len}]
                return 200, {"data": models + [{"id": name} for name in self.adapters or ()]}
            case "POST", "/inference/v1/generate":
                return await self._generate(body)
            case "POST", "/abort_requests":
                for name in body["request_ids"]:
                    if name in self.running:
                        self.running[name].aborted = True
                return 200, {"status": "aborted"}
        await self.thaw()
        match method, path:
            case "POST", "/v1/load_lora_adapter" | "/v1/unload_lora_adapter" if (
                self.adapters is not None
            ):
                return self._change_adapters(self.adapters, path, body)
            case "GET", "/weight_info":
                return 200, {"weight_version": self._version}
            case "POST", "/pause":
                assert query in ("mode=abort&clear_cache=true", "mode=abort&clear_cache=false")
                self._paused = True
                if query.endswith("true"):
                    self._cached.clear()
                for speech in self.running.values():
                    speech.aborted = True
                return 200, {"status": "paused"}
            case "POST", "/resume":
                self._paused = False
                return 200, {"status": "resumed"}
            case "POST", "/collective_rpc" if body["method"] == "unstale_quantization":
                return 200, {"results": [[self._quantization]]}
            case "POST", "/collective_rpc":
                assert self._paused and body["method"] == "unstale_load"
                self.load(load_file(body["args"][0]))
                return 200, {"results": [None]}
            case "POST", "/update_weight_version":
                self._version = self._version if self.forgetful else body["new_version"]
                return 200, {"success": True, "new_version": body["new_version"]}
        if self.workers is not None:
            return await self._transfer(self.workers, path, body)
        return 404, {"detail": "Not Found"}

    def _change_adapters(
        self, adapters: dict[str, Any], path: str, body: Mapping[str, str]
    ) -> tuple[int, Any]:
        name = body["lora_name"]
        if not name or (path.startswith("/v1/load") and name in adapters):
            return 400, {"error": {"message": f"bad lora_name {name!r}"}}
        if path.startswith("/v1/load"):
            from peft import PeftModel  # the environment of real servers lacks it

            base = copy.deepcopy(self.policy.model)
            adapters[name] = PeftModel.from_pretrained(base, body["lora_path"]).eval()
        elif adapters.pop(name, None) is None:
            return 404, {"error": {"message": f"The lora adapter {name!r} cannot be found."}}
        return 200, b"Success: LoRA adapter changed."

    def step(self, speech: Speech) -> tuple[int, float, float]:
        if not isinstance(speech, _AdapterSpeech):
            return super().step(speech)
        return speech.next(SimpleNamespace(model=speech.model.base_model.model), self.head)  # type: ignore[arg-type]

    async def _transfer(self, workers: GlooWorkers, path: str, body: Any) -> tuple[int, Any]:
        """Answer the requests of a weight transfer. Requests in a wrong order are an error."""
        try:
            match path:
                case "/get_world_size":
                    return 200, {"world_size": workers.count}
                case "/init_weight_transfer_engine":
                    await asyncio.to_thread(workers.join, body["init_info"])
                case "/start_weight_update":
                    assert self._paused
                    workers.start()
                case "/update_weights":
                    await asyncio.to_thread(workers.receive, **body["update_info"])
                case "/finish_weight_update":
                    weights = await asyncio.to_thread(workers.finish)
                    if body is not None:
                        self.load(weights)
                        self._version = self._version if self.forgetful else body["weight_version"]
                case "/shutdown_weight_transfer_engine":
                    workers.leave()
                case _:
                    return 404, {"detail": "Not Found"}
        except RuntimeError as error:
            return 500, {"error": str(error)}
        return 200, {"message": "done"}

    async def _generate(self, body: Mapping[str, Any]) -> tuple[int, Any]:
        asked, context = body["sampling_params"], list(body["token_ids"])
        assert asked["ignore_eos"] and asked["logprobs"] == 0 and not asked["detokenize"]
        if refusal := self._refusal(asked, len(context)):
            return 400, {"error": {"message": refusal}}
        self.asked += 1
        salt = (body.get("model"),) if self.adapters else ()
        cached = max(
            (
                end
                for end in range(0, len(context), _BLOCK)
                if (*salt, *context[:end]) in self._cached
            ),
            default=0,
        )
        name = f"generate-tokens-{body['request_id']}"
        noise = torch.Generator().manual_seed(asked["seed"])
        speech = Speech(context, asked["temperature"], lambda _, size: gumbel(noise, size))
        model = body.get("model")
        if self.adapters is not None:
            if model not in self.adapters:
                return 404, {"error": {"message": f"The model {model!r} does not exist."}}
            model = next(iter(self.adapters)) if self.confuses_adapters else model
            speech = _AdapterSpeech(speech.context, speech.temperature, speech.noise)
            speech.model = self.adapters[model]
        speech.keep = partial(kept_words, asked) if "top_p" in asked or "top_k" in asked else None
        self.running[name] = speech
        due = time.monotonic() + self.pace(asked)
        said: list[tuple[int, float]] = []
        versions: list[str] = []
        reason = "abort"
        try:
            while not speech.aborted:
                await asyncio.sleep(self.tick_s)
                early = time.monotonic() < due
                if self._paused or self.frozen or speech.aborted or early:
                    continue
                due += self.pace(asked)
                token, logprob, raw = self.step(speech)
                said.append((token, raw if self._raw else logprob))
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
            "logprobs": {
                "content": [{"token_id": token, "logprob": logprob} for token, logprob in said]
            },
            "weight_versions": spans,
        }
        if self.returns_masks:
            choice["sampling_mask"] = self._masks(speech)
        if self.recorder and speech.routed_experts:
            rows = torch.cat(speech.routed_experts)[asked.get("routed_experts_prompt_start", 0) :]
            file = io.BytesIO()
            np.save(file, rows.to(torch.uint8).numpy())
            choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        self.cache(context, salt)
        usage = {
            "prompt_tokens": len(body["token_ids"]),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        return 200, {
            "request_id": body["request_id"],
            "model": model or "fake",
            "choices": [choice],
            "usage": usage,
        }

    def _refusal(self, asked: Mapping[str, Any], context: int) -> str:
        if context + asked["max_tokens"] > self._max_model_len:
            return "This model's maximum context length is exceeded"
        if self.returns_masks and (asked["temperature"] <= 0 or asked.get("top_k", 0) <= 0):
            return "sampling distribution replay requires temperature > 0 and top_k > 0"
        return ""

    def _masks(self, speech: Speech) -> list[list[int]]:
        """Return the words among which each token was drawn, in no order."""
        shift = speech.kept[:1] * self.confuses_masks
        return [mask[::-1] for mask in [*shift, *speech.kept][: len(speech.kept)]]

    def cache(self, context: list[int], salt: tuple[Any, ...] = ()) -> None:
        ends = range(_BLOCK, len(context), _BLOCK)
        self._cached.update((*salt, *context[:end]) for end in ends)


class _AdapterSpeech(Speech):
    """A reply that an adapter samples."""

    model: Any
