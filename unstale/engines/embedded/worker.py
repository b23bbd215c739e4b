"""The embedded engine's process: one loop that reads messages, steps the batcher, and answers.

Only this loop touches the weights and the version, and it does so between steps: that is the guard under which every
reply gets its version. The process ends by itself when the other side is gone.
"""

import json
import os
import select
import socket
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import load as unpack_tensors
from torch import Tensor

from unstale.engines.embedded.batcher import Batcher, Finished, Request
from unstale.engines.embedded.decoder import Qwen3Runner, supports
from unstale.engines.embedded.runner import DTYPES, Runner
from unstale.model.lora import Base, Merging
from unstale.weights.child_process import Frames, Header, pack
from unstale.weights.codec import advance, loads
from unstale.weights.store import Delta

_READ_BYTES = 1 << 20

Refusal = tuple[str, str]
"""Whose fault it is (`order` or `weights`) and what is wrong; both empty when nothing is."""
TAKEN: Refusal = ("", "")


def main(descriptor: int, options: str) -> None:
    """Serve the engine at the other end of the socket until it hangs up. `options` is JSON."""
    wanted = json.loads(options)
    torch.set_num_threads(wanted["threads"])
    torch.set_num_interop_threads(1)
    limits = {"max_slots": wanted["max_slots"], "max_context": wanted["max_context"]}
    # Never closed: the other side then sees the end only once the last words are written and there is an exit code.
    os.dup(descriptor)
    with socket.socket(fileno=descriptor) as connection, torch.inference_mode():

        def make() -> Batcher:
            runner = build_runner(Path(wanted["model_folder"]), dtype=wanted["dtype"], **limits)
            return Batcher(runner, **limits, keep_cache=wanted["keep_cache"])

        try:
            merging = wanted["merging"] and Merging(**wanted["merging"])
            base = Base(Path(wanted["model_folder"]), merging) if merging else None
            worker = _Worker(
                connection, make, deltas=wanted["deltas"], lockstep=wanted["lockstep"], base=base
            )
        except (ValueError, OSError) as error:
            connection.sendall(pack({"op": "refused", "error": str(error)}))
            return
        worker.serve()


def build_runner(
    folder: Path, *, dtype: str, max_slots: int, max_context: int, device: str = ""
) -> Runner:
    """Our decoder where it computes this model exactly, transformers' forward pass for everything else.

    The decoder runs on `device`, by default on CUDA where there is any; the other on the processor.
    """
    config = json.loads((folder / "config.json").read_text())
    if supports(config):
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        limits = {"max_slots": max_slots, "max_context": max_context}
        return Qwen3Runner(config, dtype=DTYPES[dtype], device=device, **limits)
    # Here, because importing transformers takes longer than all the rest of the start.
    from unstale.engines.embedded.fallback import TransformersRunner

    return TransformersRunner(
        folder, dtype=DTYPES[dtype], max_slots=max_slots, max_context=max_context
    )


class _Worker:
    def __init__(
        self,
        connection: socket.socket,
        make: Callable[[], Batcher],
        *,
        deltas: bool,
        lockstep: bool,
        base: Base | None,
    ) -> None:
        """What is loaded are adapters if there is a `base` to merge them into."""
        self._connection, self._base = connection, base
        self._make = make
        self._deltas = deltas
        self._lockstep = lockstep
        self._frames = Frames()
        self._begin()

    def _begin(self) -> None:
        """As a process that has just started: only the bytes still to be read are of an earlier life."""
        self._batcher = self._make()
        self._given: dict[str, Tensor] = {}
        """The weights of this version as they came, if deltas are to change them."""
        self._version = -1
        self._running = False
        self._idle_s = 0.0

    @property
    def _working(self) -> bool:
        return self._running and self._batcher.has_work

    def serve(self) -> None:
        """Messages first, then one step unless they ask for it, until the connection ends."""
        runner = self._batcher.runner
        about = {"runner": runner.name, "vocab_size": runner.vocab_size, "warning": runner.warning}
        self.send({"op": "ready", **about})
        while True:
            free = self._working and not self._lockstep
            start = perf_counter()
            readable, _, _ = select.select([self._connection], [], [], 0 if free else None)
            if not free:
                self._idle_s += perf_counter() - start
            if readable and not self._receive():
                return
            if self._working and not self._lockstep and not self._reply(self._batcher.step()):
                return

    def send(self, header: Header) -> bool:
        """False when nobody listens any more. The counters since the last message travel along."""
        counters = {**self._batcher.counters, "idle_s": self._idle_s}
        self._batcher.counters.clear()
        self._idle_s = 0.0
        try:
            self._connection.sendall(pack({**header, "counters": counters}))
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def _receive(self) -> bool:
        """Take what has arrived. False at the end of the connection."""
        try:
            data = self._connection.recv(_READ_BYTES)
        except ConnectionResetError:
            return False
        alive = bool(data)
        for header, body in self._frames.feed(data):
            alive = alive and self._handle(header, body)
        return alive

    def _handle(self, header: Header, body: bytes) -> bool:
        match header["op"]:
            case "sample":
                self._batcher.submit(_request(header["request"]))
                return True
            case "cancel":
                self._batcher.cancel(header["id"])
                return True
            case "step":
                finished = self._batcher.step() if self._working else []
                return self._reply(finished) and self._acknowledge(header)
            case "reset":
                del self._batcher  # two would need the memory of two
                self._begin()
                return self._acknowledge(header)
            case "interrupt":
                finished = self._batcher.interrupt() if self._running else []
                self._running = False
                return self._reply(finished) and self._acknowledge(header)
            case "load":
                return self._acknowledge(header, *self._load(header, body))
            case "resume":
                return self._acknowledge(header, *self._resume())
        raise ValueError(f"unknown message {header['op']!r}")

    def _load(self, header: Header, body: bytes) -> Refusal:
        if self._running:
            return (
                "order",
                "load while sampling: interrupt first, so that no reply mixes two versions",
            )
        try:
            update = (
                self._changed(loads(body), header["version"])
                if header["delta"]
                else unpack_tensors(body)
            )
            self._batcher.load(self._base.merged(update) if self._base else update)
        except ValueError as error:
            return "weights", str(error)
        self._given = update if self._deltas else {}
        self._version = header["version"]
        return TAKEN

    def _changed(self, delta: Delta, version: int) -> dict[str, Tensor]:
        """The weights of the delta's version, in place of those of this one."""
        delta.check_way(self._version, version)
        advance(self._given, delta)
        return self._given

    def _resume(self) -> Refusal:
        if self._version < 0:
            return "order", "resume before the first load: there are no weights to sample from"
        self._running = True
        return TAKEN

    def _acknowledge(self, header: Header, fault: str = "", error: str = "") -> bool:
        return self.send({"op": "done", "id": header["id"], "fault": fault, "error": error})

    def _reply(self, finished: list[Finished]) -> bool:
        if not finished:
            return True
        replies = [
            [reply.id, reply.tokens, reply.behavior_logp, reply.stop, reply.clean]
            for reply in finished
        ]
        return self.send({"op": "replies", "version": self._version, "replies": replies})


def _request(fields: list[Any]) -> Request:
    number, tokens, max_tokens, stop_tokens, temperature, seed = fields
    return Request(number, tuple(tokens), max_tokens, tuple(stop_tokens), temperature, seed)
