"""The backend `vllm`: a vLLM server that the run starts, or one that already runs on this host."""

import asyncio
import io
import math
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tokenize import TokenError
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unstale.engines import Engine, SamplingParams, Update
from unstale.engines.encoded_experts import decode_base64
from unstale.engines.http import HttpError
from unstale.engines.registry import EngineOptions, EngineSpec
from unstale.engines.remote import (
    LOAD_S,
    NO_EXPERTS,
    RemoteEngine,
    ServerReply,
    VersionSpan,
    malformed_as_connection_error,
)
from unstale.engines.session import EngineSession
from unstale.engines.shared_weights import WEIGHTS, memory_folder
from unstale.engines.vllm_server import (
    EXTENSION,
    QUANTIZATION,
    VllmServer,
    can_quantise,
    require_vllm,
)
from unstale.engines.vllm_transfer import (
    MakeGroup,
    TransferGroup,
    join_request,
    nccl_groups,
    run_in_thread,
    send,
    update_request,
)
from unstale.kept_sets import KeptSets
from unstale.model.lora import write_adapter
from unstale.threads import in_thread

TRANSFER_S = 300.0
"""Largest number of seconds for sending weights by NCCL, and for forming the NCCL group of trainer
and workers.
"""


_MAX_HEADER = 1 << 16
"""Largest accepted size in bytes of the header of a NumPy file."""
_READ_HEADER = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class _Token(msgspec.Struct, gc=False):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None


class _Choice(msgspec.Struct):
    token_ids: tuple[int, ...]
    logprobs: _Logprobs
    weight_versions: list[VersionSpan] | None
    finish_reason: str
    sampling_mask: list[list[int]] | None = None
    routed_experts: msgspec.Raw = msgspec.Raw(NO_EXPERTS)


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage
    model: str | None = None


class VllmEngine(RemoteEngine):
    """An engine on one vLLM server.

    Without `options.url`, this engine starts and ends the server. vLLM adds the class named
    `extension`, which loads weights, to the server's workers. docs/engines.md shows how to start a
    server for `options.url`.

    vLLM's random numbers do not depend on a token's position. So an interrupted reply continues
    with other tokens than an uninterrupted one, although they are samples of the same policy. The
    seed for vLLM is made of `params.seed` and the length of the context, so that no random number
    is used twice.
    """

    NAME = "vLLM"
    HEALTH_PATH = "/health"
    GENERATE_PATH = "/inference/v1/generate"
    MIN_TEMPERATURE = 0.01
    TRUNCATES = True
    REPLY = _Reply

    def __init__(self, options: EngineOptions, *, extension: str = EXTENSION) -> None:
        if not options.url:
            require_vllm(options.python)
        if not options.url and options.quantise != "none" and not can_quantise():
            raise ValueError(
                f"engine.quantise = {options.quantise} with vLLM needs a GPU, or a CPU with AMX, "
                "and this machine has neither: set engine.backend = embedded or engine.quantise = "
                "none"
            )
        if options.truncation and not options.url and not torch.cuda.is_available():
            raise ValueError(
                f"{options.truncation} with vLLM needs a GPU, and this machine has none: vLLM "
                "returns kept sets only there. Set engine.backend = embedded"
            )
        super().__init__(options, None if options.url else VllmServer(options, extension))

    async def _handshake(self) -> int:
        await self._loaded_version()
        if self.server is None:
            await self._check_quantization()
        return int((await self._http.call("GET", "/v1/models"))["data"][0]["max_model_len"])

    async def _check_quantization(self) -> None:
        """Raise ValueError unless the server was started with the `--quantization` for
        `options.quantise`.
        """
        wanted = QUANTIZATION[self.options.quantise]
        body = {"method": "unstale_quantization"}
        ((found,), *_) = (await self._http.call("POST", "/collective_rpc", body))["results"]
        if found != wanted:
            flag = f"with --quantization {wanted}" if wanted else "without --quantization"
            raise ValueError(
                f"engine.quantise = {self.options.quantise} needs a server that was started "
                f"{flag}, but {self.url} has {found or 'no quantization'}: start it again, or set "
                "engine.quantise = fp8 for fp8_per_block and none for no quantization"
            )

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
        if params.truncation and params.temperature:
            sampling |= params.truncation._asdict()
        elif self.options.truncation and not params.temperature:
            # a server that returns sets accepts no temperature of 0
            sampling |= {"temperature": 1.0, "top_k": 1}
        if self.options.record_experts:
            sampling["routed_experts_prompt_start"] = params.first_routed(self._version)
        return {"request_id": request_id, "token_ids": list(tokens), "sampling_params": sampling}

    def _parse_reply(self, body: _Reply) -> ServerReply:
        choice = body.choices[0]
        content = choice.logprobs.content or ()
        prompt_details = body.usage.prompt_tokens_details or _PromptDetails()
        return ServerReply(
            tokens=choice.token_ids,
            logps=tuple([token.logprob for token in content]),
            logp_tokens=tuple([token.token_id for token in content]),
            versions=tuple((span.version, span.end) for span in choice.weight_versions or ()),
            finish_reason=choice.finish_reason,
            kept_sets=None if (sets := choice.sampling_mask) is None else KeptSets.of_lists(sets),
            cached_tokens=prompt_details.cached_tokens or 0,
            routed_experts=memoryview(choice.routed_experts),
        )

    def _decode_experts(self, routed_experts: memoryview) -> Any:
        """Return expert numbers `[tokens, layers, k]` from base64 of a NumPy file."""
        return read_array(decode_base64(routed_experts))


def read_array(file: NDArray[np.uint8]) -> NDArray[Any]:
    """Return the integers in the bytes of a NumPy file as an array, without a copy.

    Raises ValueError if the bytes are not such a file, or its numbers are not integers.
    """
    head = io.BytesIO(file[:_MAX_HEADER].tobytes())
    version = np.lib.format.read_magic(head)
    if version not in _READ_HEADER:
        raise ValueError(f"a NumPy file of version {version}")
    try:
        shape, is_fortran, dtype = _READ_HEADER[version](head)
    except (TypeError, SyntaxError, TokenError, RecursionError, MemoryError) as error:
        raise ValueError(f"a NumPy file with a damaged header: {error!r}") from error
    if dtype.kind not in "iu":
        raise ValueError(f"a NumPy file of {dtype}, not of integers")
    count = math.prod(shape)
    if min(shape, default=0) < 0 or count * dtype.itemsize > len(file):
        raise ValueError(f"a NumPy file of {len(file)} bytes for numbers of shape {shape}")
    numbers = np.frombuffer(file, dtype, count, head.tell())
    return numbers.reshape(shape, order="F" if is_fortran else "C")


class NcclVllmEngine(VllmEngine):
    """A vLLM engine that sends weights to its server by NCCL instead of in a file.

    The trainer and the server's workers form an NCCL group, until the engine is started again or a
    transfer fails. A failed transfer also ends the engine.
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        extension: str = EXTENSION,
        make_group: MakeGroup | None = None,
    ) -> None:
        """Create the engine.

        `make_group` makes the NCCL group of trainer and workers. By default, it is the result of
        `nccl_groups`. Raises ValueError if NCCL cannot be used here.
        """
        self._make_group = make_group or nccl_groups()
        self._group: TransferGroup | None = None
        super().__init__(options, extension=extension)

    async def _handshake(self) -> int:
        self._end_group()
        return await super()._handshake()

    async def close(self) -> None:
        self._end_group()
        await super().close()

    async def load(self, update: Update, version: int) -> None:
        await super().load(update, version)
        await self._verified(self._live_session())  # the probe may read the trained weights

    def _share(self, session: EngineSession, update: Update) -> Mapping[str, Tensor]:
        assert isinstance(update, Mapping), "check_load refuses deltas"
        return self._reference.cast(update)

    async def _send_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        await self._pause(keep_cache=self.options.keep_cache)
        with ExitStack() as on_error:
            on_error.callback(self._end_group)
            group = self._group or await self._join_group()
            await self._post("/start_weight_update")
            sending = partial(send, group, weights)
            await self._post_during("/update_weights", update_request(weights), sending)
            finish = {"weight_version": str(version)}
            await self._post("/finish_weight_update", finish, timeout_s=LOAD_S)
            on_error.pop_all()
        await self._post("/resume")

    async def _join_group(self) -> TransferGroup:
        session = self._live_session()
        if self.server is None:
            await self._end_earlier_transfers()
        size = 1 + await self._while_alive(session, self._num_workers())
        self._group = group = await in_thread(self._make_group)
        joining = partial(group.join, size)
        await self._post_during("/init_weight_transfer_engine", join_request(group, size), joining)
        return group

    async def _num_workers(self) -> int:
        with malformed_as_connection_error():
            return int((await self._http.call("GET", "/get_world_size"))["world_size"])

    async def _end_earlier_transfers(self) -> None:
        """End a transfer and an NCCL group that an earlier run may have left on a running server.

        If there are none, the server refuses these requests. This is not an error.
        """
        session = self._live_session()
        for path in ("/finish_weight_update", "/shutdown_weight_transfer_engine"):
            async with self._deadline(session, LOAD_S, f"no answer to {path}"):
                await self._while_alive(session, self._post_or_be_refused(path))

    async def _post_or_be_refused(self, path: str) -> None:
        with suppress(HttpError):
            await self._http.call("POST", path)

    async def _post_during(self, path: str, body: Any, call: Callable[[], None]) -> None:
        """Send a request to the server, run `call` in a thread at the same time, and wait for both.

        Raises `EngineDied` if one fails, or if they take longer than `TRANSFER_S`. The thread may
        then continue, because NCCL cannot stop a member that waits for others to join.
        """
        session = self._live_session()
        request = asyncio.ensure_future(self._http.call("POST", path, body))
        thread = run_in_thread(call)

        async def both() -> None:
            await asyncio.wait((request, thread), return_when=asyncio.FIRST_EXCEPTION)
            for each in (request, thread):
                if each.done():
                    each.result()

        try:
            async with self._deadline(session, TRANSFER_S, f"{path} did not end"):
                await self._while_alive(session, both())
        finally:
            request.cancel()

    def _end_group(self) -> None:
        """Close the NCCL group in a thread, without waiting for it."""
        group, self._group = self._group, None
        if group is not None:
            threading.Thread(target=group.close, name="end of transfers", daemon=True).start()


class AdapterVllmEngine(VllmEngine):
    """A `VersionedEngine` on a vLLM server with LoRA. Only adapters are sent to the server.

    Each version is a LoRA adapter, which the server reads from a folder in memory. A request names
    the adapter that must sample, and the reply names the one that did. vLLM's prefix cache keeps
    adapters apart, so a load drops no cached context. The probe (the test of a load) compares the
    server's log-probabilities with those of merged weights, which exist only in this process.
    """

    def __init__(self, options: EngineOptions, *, extension: str = EXTENSION) -> None:
        super().__init__(options, extension=extension)
        self._resources = ExitStack()
        self._folder: Path | None = None
        """The folder that contains a folder for each adapter. None before the first load."""
        self._prefix = ""
        """The beginning of the names of adapters. It is new at each start, because a running server
        may still have adapters of an earlier start.
        """

    async def _handshake(self) -> int:
        self._prefix = f"unstale-{secrets.token_hex(4)}-"
        try:
            await self._http.call("POST", "/v1/unload_lora_adapter", {"lora_name": ""})
        except HttpError as error:
            if error.status == 404:
                raise ValueError(
                    "engine.adapters = unmerged needs a server that loads adapters: start "
                    f"{self.url} with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
                ) from error
        return await super()._handshake()

    async def close(self) -> None:
        await super().close()
        self._resources.close()

    async def _pause(self, *, keep_cache: bool) -> None:
        await super()._pause(keep_cache=True)

    def _share(self, session: EngineSession, update: Update) -> Mapping[str, Tensor]:
        assert isinstance(update, Mapping), "check_load refuses deltas"
        self._write("next", update)
        return self._reference.cast(update)

    async def _send_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        assert self._folder is not None, "staged"
        name = self._name(version)
        (self._folder / "next").rename(self._folder / name)
        await self._load_adapter(name)
        self.versions.add(version)
        await self._post("/resume")

    async def add_version(self, adapters: Mapping[str, Tensor], version: int) -> None:
        name = self._name(version)
        await in_thread(self._write, name, adapters)
        await self._load_adapter(name)
        self.versions.add(version)

    async def keep_versions(self, versions: Collection[int]) -> None:
        assert self._folder is not None, "loaded"
        for version in sorted(self.versions - {*versions, self._version}):
            self.versions.remove(version)
            name = self._name(version)
            await self._change_adapters("/v1/unload_lora_adapter", {"lora_name": name})
            await in_thread(shutil.rmtree, self._folder / name)

    async def _load_adapter(self, name: str) -> None:
        body = {"lora_name": name, "lora_path": f"{self._folder}/{name}"}
        await self._change_adapters("/v1/load_lora_adapter", body)

    async def _change_adapters(self, path: str, body: Mapping[str, str]) -> None:
        session = self._live_session()
        async with self._deadline(session, LOAD_S, f"no answer to {path}"):
            # `bytes`, because the answer is no JSON
            await self._while_alive(session, self._http.call("POST", path, body, decode=bytes))

    def _write(self, name: str, adapters: Mapping[str, Tensor]) -> None:
        """Write adapters to the folder `name`, replacing its content. Runs in a thread."""
        assert self.options.merging is not None
        size = sum(tensor.nbytes for tensor in adapters.values())
        if self._folder is None:
            self._folder = memory_folder(self.options.max_versions * size, self._resources)
        shutil.rmtree(self._folder / name, ignore_errors=True)
        write_adapter(adapters, self._folder / name, scale=self.options.merging.scale)

    def _name(self, version: int) -> str:
        return f"{self._prefix}{version}"

    async def _loaded_version(self) -> str:
        """Return the last loaded version as text if the server has its adapter, otherwise ""."""
        await super()._loaded_version()  # the engine process answers this
        models = (await self._http.call("GET", "/v1/models"))["data"]
        has_newest = self._name(self._version) in {each["id"] for each in models}
        return str(self._version) if has_newest else ""

    def _request_body(
        self, request_id: str, tokens: Sequence[int], params: SamplingParams
    ) -> Mapping[str, Any]:
        version = self._version if params.version < 0 else params.version
        body = super()._request_body(request_id, tokens, params)
        return {**body, "model": self._name(version)}

    def _parse_reply(self, body: _Reply) -> ServerReply:
        """Return the reply. Its version is that of the adapter that the server names."""
        reply = super()._parse_reply(body)
        version = (body.model or "").removeprefix(self._prefix)
        return replace(reply, versions=((version, len(reply.tokens)),))


def make_engine(options: EngineOptions) -> Engine:
    """Return a vLLM engine of the kind that `options` ask for.

    It is an `AdapterVllmEngine` if `options.adapters` is `unmerged`. Otherwise `options.transfer`
    decides whether it sends weights by NCCL or in a file in memory.
    """
    if options.adapters == "unmerged":
        return AdapterVllmEngine(options)
    return NcclVllmEngine(options) if options.transfer == "nccl" else VllmEngine(options)


SPEC = EngineSpec(make_engine, deltas_in_parts=True, unmerged=True, keeps_sets=True)
