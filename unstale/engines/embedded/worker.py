"""The process of the embedded engine: a loop that reads messages, decodes, and sends replies.

Only this loop changes the weights and their version, and only between decoding steps. So the
version that is returned with a token is the version that sampled it. The process ends when the run
closes its end of the socket.
"""

import json
import os
import select
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unstale.config.files import read_mapping
from unstale.engines.embedded.batcher import Batcher, FinishedReply, SampleRequest
from unstale.engines.embedded.cache_transfer import CacheReceiver, TransferFailed, send
from unstale.engines.embedded.decoder import (
    CannotDecode,
    Qwen3Runner,
    names_sizes,
    runs_on_gpu,
    supports,
)
from unstale.engines.embedded.posted_experts import post
from unstale.engines.embedded.runner import DTYPES, Runner
from unstale.engines.embedded.sampling import Sampler
from unstale.kept_sets import Truncation
from unstale.model.lora import Base, Merging
from unstale.model.packed_weights import RoundedWeights, pack
from unstale.pictures import PictureStore
from unstale.routed_experts import num_experts
from unstale.weights.child_process import Frames, Header, frame
from unstale.weights.codec import advance, loads, tensors_of
from unstale.weights.gpu_handles import open_handles

_READ_BYTES = 1 << 20
READY = -1
"""The `id` of the message that a new engine process sends when it can receive commands."""
TOKEN, LOGP = np.dtype(np.int32), np.dtype(np.float32)
"""Dtypes of two arrays in the body of a reply message: first the tokens, then their
log-probabilities. Kept sets and signals may follow.
"""


def main(descriptor: int, options: str) -> None:
    """Serve an engine over a socket until the run closes it.

    `options` is JSON: the fields of `EngineOptions`, and `experts_folder`, the folder for files of
    routed experts. `descriptor` is the file descriptor of the socket.
    """
    wanted = json.loads(options)
    torch.set_num_threads(wanted["threads"])
    torch.set_num_interop_threads(1)
    # Never closed here, so that the other end sees the end of this process only after its exit.
    os.dup(descriptor)
    with socket.socket(fileno=descriptor) as connection, torch.inference_mode():
        try:
            worker = _EngineWorker(connection, wanted)
        except (ValueError, OSError) as error:
            connection.sendall(b"".join(frame({"op": "done", "id": READY, "error": str(error)})))
            return
        worker.serve()


def build_runner(  # noqa: PLR0913 - the limits and the kind of runner
    folder: Path,
    *,
    dtype: str,
    max_slots: int,
    max_context: int,
    device: str = "",
    number: int = 0,
    record_experts: bool = False,
    quantise: str = "none",
    is_bitwise: bool = False,
    base: Base | None = None,
    pictures: PictureStore | None = None,
) -> Runner:
    """Return the fastest runner for the model in `folder`.

    It is the first of these that can compute the model: the decoder (`decoder.py`), transformers
    with packed sequences (`packed.py`), or transformers with one sequence at a time
    (`fallback.py`). With `is_bitwise`, it is a decoder whose log-probabilities equal the trainer's
    bit for bit. With `base`, it is transformers with packed sequences, which adds LoRA adapters of
    several versions to these base weights. `pictures` has the pixels of pictures in requests.

    The decoder runs on `device`. By default, this is GPU `number`, modulo the number of GPUs, or
    the CPU if there is none. transformers runs on the CPU. Raises ValueError if no runner computes
    the model correctly.
    """
    if is_bitwise:
        from unstale.engines.embedded.bitwise import BitwiseRunner  # it imports transformers

        return BitwiseRunner(
            folder, dtype=DTYPES[dtype], max_slots=max_slots, max_context=max_context
        )
    config = _read_config(folder)
    if supports(config) and base is None:
        device = device or (_gpu(number) if runs_on_gpu(config) else "cpu")
        # transformers computes experts where the decoder cannot.
        with suppress(CannotDecode):
            return Qwen3Runner(
                config,
                dtype=DTYPES[dtype],
                max_slots=max_slots,
                max_context=max_context,
                device=device,
                quantise=quantise,
            )
    # imported here, because transformers takes longer to import than everything else
    from unstale.engines.embedded.fallback import TransformersRunner
    from unstale.engines.embedded.packed import CannotPack, PackedRunner
    from unstale.model.pictures import reads_pictures

    options: dict[str, Any] = {
        "dtype": DTYPES[dtype],
        "max_slots": max_slots,
        "max_context": max_context,
        "record_experts": record_experts,
        "quantise": quantise,
    }
    try:
        if config.get("vision_config") and reads_pictures(folder):
            raise CannotPack("it reads pictures")
        return PackedRunner(folder, base=base, **options)
    except CannotPack as error:
        why_slow = str(error)
    if base:
        raise ValueError(
            "engine.adapters = unmerged needs a model whose sequences can be packed into one "
            f"forward pass: {why_slow}. Set engine.adapters = merged"
        )
    return TransformersRunner(folder, why_slow=why_slow, pictures=pictures, **options)


def build_sampler(logit_bias: Sequence[tuple[int, float]], *, is_bitwise: bool) -> Sampler:
    if not is_bitwise:
        return Sampler(logit_bias)
    from unstale.engines.embedded.bitwise import BitwiseSampler  # it imports transformers

    return BitwiseSampler()


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a model's config.json.

    Sizes that the decoder needs and the file lacks are added from transformers' defaults.
    """
    config = read_mapping(folder / "config.json")
    if not supports(config) or names_sizes(config):
        return config
    # imported here, because transformers takes longer to import than everything else
    from transformers import AutoConfig

    complete: dict[str, Any] = AutoConfig.for_model(**config).to_dict()
    return complete


def _gpu(number: int) -> str:
    """Return the device `cuda:...` for the engine with this number. Make it torch's current device.

    Return "cpu" if there is no GPU.
    """
    if not torch.cuda.is_available():
        return "cpu"
    device = f"cuda:{number % torch.cuda.device_count()}"
    torch.cuda.set_device(device)  # Triton and graphs use torch's present GPU
    return device


class _EngineWorker:
    def __init__(self, connection: socket.socket, options: Mapping[str, Any]) -> None:
        self._connection = connection
        self._options = options
        merging = options["merging"]
        self._base = Base(Path(options["model_folder"]), Merging(**merging)) if merging else None
        """The base weights to which LoRA adapters are added. None if updates have full weights."""
        self._adds = bool(self._base and options["adapters"] == "unmerged")
        """True if each pass adds adapters of several versions to layers' outputs. False if adapters
        are merged into the weights.
        """
        self._lockstep = options["lockstep"]
        self._frames = Frames()
        self._sending = threading.Lock()
        """Held while a message is sent to the run's process, because threads send some of them."""
        self._receiver: CacheReceiver | None = None
        self._reset()

    def _reset(self) -> None:
        """Return to the state of a new process. Only unread messages are kept."""
        options = self._options
        limits = {"max_slots": options["max_running"], "max_context": options["max_context"]}
        folder = Path(options["model_folder"])
        records = options["record_experts"]
        runner = build_runner(
            folder,
            dtype=options["dtype"],
            number=options["number"],
            record_experts=records,
            quantise=options["quantise"],
            is_bitwise=options["bitwise"],
            base=self._base if self._adds else None,
            pictures=PictureStore(Path(options["pictures"])) if options["pictures"] else None,
            **limits,
        )
        experts = num_experts(_read_config(folder)) if records else 0
        if records and not experts:
            raise ValueError("trainer.routing_replay must be false: the policy has no experts")
        self._batcher = Batcher(
            runner,
            **limits,
            keep_cache=options["keep_cache"],
            num_experts=experts,
            sampler=build_sampler(options["logit_bias"], is_bitwise=options["bitwise"]),
        )
        if options["cache_key"] and self._receiver is None:
            self._receiver = self._open_receiver(runner, records=records)
        self._full_weights: dict[str, Tensor] = {}
        """The weights of the current version as they were received. Empty unless later updates may
        be deltas.
        """
        self._running = False
        self._idle_s = 0.0

    def _open_receiver(self, runner: Runner, *, records: bool) -> CacheReceiver:
        """Return a receiver of caches from other engines.

        Raises ValueError if the cache of this model cannot be sent.
        """
        if runner.cache is None or records:
            why = "without the experts of its tokens" if records else "it is not kept in pages"
            raise ValueError(
                f"engine.send_cache must be false: the cache of this policy cannot be sent "
                f"({runner.name}: {why})"
            )
        limit = self._options["max_context"] * (TOKEN.itemsize + runner.cache.token_bytes)
        return CacheReceiver(self._options["cache_host"], self._options["cache_key"], limit)

    @property
    def _working(self) -> bool:
        return self._running and self._batcher.has_work

    def serve(self) -> None:
        """Alternate between handling messages and running decoding steps, until the connection
        ends.

        In lockstep, a step is run only when a message asks for it.
        """
        runner = self._batcher.runner
        model = {"runner": runner.name, "vocab_size": runner.vocab_size, "warning": runner.warning}
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        caches = -1
        if self._receiver:
            model["cache_port"] = self._receiver.port
            caches = self._receiver.wake.fileno()
            poll.register(caches, select.POLLIN)
        with suppress(BrokenPipeError, ConnectionResetError):
            self._send({"op": "done", "id": READY, "error": "", **model})
            while True:
                must_step = self._working and not self._lockstep
                start = perf_counter()
                readable = [found for found, _ in poll.poll(0 if must_step else None)]
                if not must_step:
                    self._idle_s += perf_counter() - start
                if self._receiver and caches in readable:
                    arrived = self._receiver.take()
                    arrived.answer(self._batcher.take_cache(arrived.header, arrived.body))
                if self._connection.fileno() in readable:
                    data = self._connection.recv(_READ_BYTES)
                    if not data:
                        return
                    for header, body in self._frames.feed(data):
                        self._handle(header, body)
                if self._working and not self._lockstep:
                    self._reply(self._batcher.step())

    def _send(self, header: Header, body: bytes = b"") -> None:
        """Send a message, together with the counters since the last message."""
        counters = {**self._batcher.counters, "idle_s": self._idle_s}
        self._batcher.counters.clear()
        self._idle_s = 0.0
        self._send_frame({**header, "counters": counters}, body)

    def _send_frame(self, header: Header, body: bytes = b"") -> None:
        with self._sending:
            self._connection.sendall(b"".join(frame(header, [body])))

    def _handle(self, header: Header, body: bytearray) -> None:
        """Handle a message from the run's process. Confirm it, except `sample` and `cancel`.

        A thread confirms `send`.
        """
        error = ""
        match header["op"]:
            case "sample":
                number, most, stops, temperature, seed, limits, *others = header["request"]
                tokens = np.frombuffer(body, TOKEN).tolist()
                if not (header["waits"] or self._batcher.accepts(tokens)):
                    return self._send({"op": "rejected", "reply": number})
                truncation = Truncation(*limits)
                request = SampleRequest(
                    number, tokens, most, stops, temperature, seed, truncation, *others
                )
                return self._batcher.submit(request)
            case "cancel":
                return self._batcher.cancel(header["id"])
            case "step":
                self._reply(self._batcher.step() if self._working else [])
            case "reset":
                del self._batcher  # frees its memory before the next update arrives
                self._reset()
            case "interrupt":
                self._reply(self._batcher.interrupt() if self._running else [])
                self._running = False
            case "load":
                error = self._load(header, body)
            case "add":
                error = self._add(header["version"], tensors_of(body))
            case "keep":
                self._batcher.keep_versions(header["versions"])
            case "resume":
                self._running = True
            case "send":
                return self._send_cache(header, np.frombuffer(body, TOKEN))
            case unknown:
                raise ValueError(f"unknown message {unknown!r}")
        return self._send({"op": "done", "id": header["id"], "error": error})

    def _send_cache(self, header: Header, tokens: NDArray[np.int32]) -> None:
        """Send the cache of a context to another engine, in a thread, which confirms it."""
        about, parts = self._batcher.send_cache(tokens)

        def transfer() -> None:
            answer = {"op": "done", "id": header["id"], "error": ""}
            try:
                key = self._options["cache_key"]
                answer["stored"] = send(header["address"], key, about, parts)
            except TransferFailed as failed:
                answer["error"] = str(failed)
            with suppress(BrokenPipeError, ConnectionResetError):
                self._send_frame(answer)

        threading.Thread(target=transfer, daemon=True).start()

    def _load(self, header: Header, body: bytearray) -> str:
        """Load full weights or a delta. Return an error message, or "" on success."""
        try:
            if header["delta"]:
                advance(self._full_weights, loads(memoryview(body)))
                update = self._full_weights
            elif handles := header.get("handles"):
                update = self._received(open_handles(handles))
            else:
                update = self._received(tensors_of(body))
            self._batcher.load(self._to_load(update), header["version"])
            if header.get("handles"):  # the trainer may change its weights from now on
                torch.cuda.synchronize()
        except ValueError as error:
            return str(error)
        self._full_weights = update if self._options["deltas"] else {}
        return ""

    def _add(self, version: int, adapters: Mapping[str, Tensor]) -> str:
        """Add the adapters of an older version. Return an error message, or "" on success."""
        assert self._batcher.runner.adapters is not None
        try:
            self._batcher.runner.adapters.add(version, adapters)
        except ValueError as error:
            return str(error)
        return ""

    def _received(self, update: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return received full weights in the form to which later deltas of weights are applied.

        The weights are quantised if `options.packed` is set, otherwise unchanged.
        """
        if not self._options["packed"]:
            return dict(update)
        return pack(update, self._options["quantise"], DTYPES[self._options["dtype"]])

    def _to_load(self, update: dict[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the weights or adapters that the runner must load.

        Quantised weights are converted back when they are read. Adapters are merged with the base
        weights, unless each pass adds them to layers' outputs.
        """
        if self._adds:
            return update
        if self._base:
            return self._base.merged(update)
        if not self._options["packed"]:
            return update
        options = self._options
        return RoundedWeights(update, options["quantise"], DTYPES[options["dtype"]])

    def _reply(self, finished: list[FinishedReply]) -> None:
        """Send each finished reply in a message. Write its routed experts, if any, to a file."""
        for reply in finished:
            routed_experts = None
            if reply.experts is not None:
                routed_experts = post(self._options["experts_folder"], reply.id, reply.experts)
            kept = b"" if reply.kept_sets is None else reply.kept_sets.tobytes()
            signals = b"" if reply.signals is None else reply.signals.tobytes()
            header = {
                "op": "reply",
                "reply": reply.id,
                "version": reply.version,
                "stop": reply.stop,
                "clean": reply.clean,
                "routes": routed_experts,
                "kept": len(kept),
                "signals": len(signals),
                "first_token_s": reply.first_token_s,
            }
            tokens = np.array(reply.tokens, TOKEN).tobytes()
            logps = np.array(reply.behavior_logp, LOGP).tobytes()
            self._send(header, tokens + logps + kept + signals)
