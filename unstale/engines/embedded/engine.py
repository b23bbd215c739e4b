"""The embedded engine: a child process on this machine that samples, connected by a socket.

The number of the child's threads is set before it loads torch. If there were more threads than
cores, sampling and training would each be twenty times slower. The child ignores Ctrl-C. It ends
only by `close`, or when this process ends.
"""

import asyncio
import contextlib
import itertools
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeGuard

import numpy as np
from torch import Tensor

from unstale.config.files import read_mapping
from unstale.engines import (
    NOT_STARTED,
    CacheNotSent,
    EngineDied,
    Rejected,
    Reply,
    ReplyStop,
    SamplingParams,
    Update,
    check_load,
    check_request,
    check_resume,
)
from unstale.engines.embedded.posted_experts import PostedExperts
from unstale.engines.embedded.worker import LOGP, READY, TOKEN
from unstale.engines.registry import EngineOptions, EngineSpec
from unstale.kept_sets import KeptSets
from unstale.records import Sampled
from unstale.routed_experts import RoutedExperts
from unstale.signals import Signals
from unstale.threads import in_thread
from unstale.weights.child_process import BEAT_S, Bytes, Child, ChildFrozen, Frames, Header, frame
from unstale.weights.codec import file_of, file_parts
from unstale.weights.gpu_handles import handles_of
from unstale.weights.store import Delta

STEP_S = 0.02
"""Seconds between two decoding steps, by the event loop's clock, if the engine is deterministic
(`EngineOptions.lockstep`).
"""
FULL = "the engine cannot begin the request at once"
_READ_BYTES = 1 << 20
_JOINED_BYTES = 1 << 16
"""Largest size in bytes of a message whose parts are joined and sent by one system call."""
_COUNTERS = (
    "sampled_tokens",
    "prefill_tokens",
    "cached_tokens",
    "reprefill_tokens",
    "reprefill_s",
    "received_tokens",
    "busy_s",
    "idle_s",
    "steps",
    "rows",
    "cpu_s",
)


@dataclass(frozen=True, slots=True)
class _Message:
    piece: Sampled
    stop: ReplyStop
    first_token_s: float | None
    routed_experts: Sequence[Any] | None
    """The dtype and shape of the routed experts of the reply's tokens, which are in a file. None if
    there is no file.
    """


class EmbeddedEngine:
    """An engine in a child process. It must be started, used and closed on the same event loop.

    With `options.lockstep`, the child computes one step every `STEP_S` seconds while replies are
    pending. The event loop blocks until the step is done, so that runs are deterministic.
    """

    def __init__(self, options: EngineOptions) -> None:
        path = options.model_folder / "config.json"
        if not path.is_file():
            raise ValueError(f"{options.model_folder} is not a model folder: it has no config.json")
        options.check_context(read_mapping(path).get("max_position_embeddings"))
        self._options = options
        self.takes_deltas = options.deltas
        self.runner = ""
        """Name of the code that computes the model, such as "qwen3 decoder". `start` sets it."""
        self.vocab_size = 0
        self._cache_port = 0
        """The port at which the child process receives caches. 0 if it does not."""
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[_Message]] = {}
        self._answers: dict[int, asyncio.Future[Header]] = {}
        self._counters = dict.fromkeys(_COUNTERS, 0.0)
        self._error = ""
        """The reason why the engine ended. Empty while it works."""
        self._version = -1
        self._versions: set[int] = set()
        """The versions whose LoRA adapters the child process holds. Empty if adapters are merged
        into the weights.
        """
        self._running = False
        self._child: _Child | None = None
        self._next_poll: asyncio.TimerHandle | None = None
        self._routed_experts: PostedExperts | None = None
        self._unread: set[int] = set()
        """Numbers of the replies whose routed experts are still in a file."""
        self._all_read = asyncio.Event()

    async def start(self) -> None:
        """Start the child process, or reset a running one. Wait until it can receive weights.

        Raises ValueError if the child cannot run the model.
        """
        alive = self._child is not None and not self._error
        self._end("the engine was started again")
        self._error = ""
        self._version = -1
        self._versions = set()
        if alive:
            await self._command({"op": "reset"})
        else:
            await self._start_process()
        self._counters = dict.fromkeys(_COUNTERS, 0.0)

    async def sample(self, tokens: Sequence[int], params: SamplingParams) -> Reply:
        check_request(
            tokens,
            params,
            max_context=self._options.max_context,
            vocab_size=self.vocab_size,
            keeps_sets=not self._options.bitwise,
            truncates=True,
            measures=True,
            versions=self._versions,
            pictures=self._options.pictures is not None,
        )
        child = self._live_child()
        number = next(self._numbers)
        future = self._expect(self._replies, number)
        fields = [
            number,
            params.max_tokens,
            params.stop_tokens,
            params.temperature,
            params.seed,
            params.truncation,
            params.version,
            params.signals,
            params.return_sets,
        ]
        text = np.array(tokens, np.int32).tobytes()
        child.send({"op": "sample", "request": fields, "waits": params.waits}, [text])
        try:
            reply = await future
            piece = reply.piece
            if self._routed_experts and reply.routed_experts:
                first = params.first_routed(piece.version)
                piece = replace(
                    piece,
                    routed_experts=await self._read_experts(number, reply.routed_experts, first),
                )
            return Reply(piece, reply.stop, reply.first_token_s)
        except asyncio.CancelledError:
            if self._replies.pop(number, None):
                child.send({"op": "cancel", "id": number})
            raise
        finally:
            self._forget_experts(number)

    async def _read_experts(self, number: int, about: Sequence[Any], first: int) -> RoutedExperts:
        """Return the routed experts of the reply `number`, from the token `first` on.

        The child process wrote them to a file. `about` has their dtype and shape. A thread reads
        the file, except with `lockstep`: the virtual clock of a deterministic run would advance
        meanwhile.
        """
        assert self._routed_experts
        take = partial(self._routed_experts.take, number, about, first)
        try:
            return take() if self._options.lockstep else await in_thread(take)
        except OSError as error:
            self._end(f"the routed experts of a reply cannot be read: {error}")
            raise EngineDied(self._error) from error

    def _forget_experts(self, number: int) -> None:
        """Remove the file of a reply's routed experts, if any. Wake up a waiting `interrupt`."""
        if number not in self._unread:
            return
        self._unread.remove(number)
        self._all_read.set()
        if self._routed_experts:
            self._routed_experts.drop(number)

    async def stage(self, update: Update, version: int) -> None:
        """Raise `EngineDied` if the child process does not work. Otherwise, do nothing.

        `load` does all the work: on a GPU the child reads weights in place, and on a CPU preparing
        them would slow sampling.
        """
        self._live_child()

    async def interrupt(self) -> None:
        self._running = False
        await self._command({"op": "interrupt"})
        while self._unread:  # a caller may need every piece of this version
            self._all_read.clear()
            await self._all_read.wait()

    async def load(self, update: Update, version: int) -> None:
        """Load weights as `Engine.load` describes.

        The tensors must not change before this call returns.
        """
        check_load(update, version, self._version, sampling=self._running, deltas=self.takes_deltas)
        header = {"op": "load", "version": version, "delta": isinstance(update, Delta)}
        if self._is_read_in_place(update):
            handles = await in_thread(handles_of, update)
            await self._command(header | {"handles": handles})
        else:
            await self._command(header, await in_thread(_pack_update, update))
        self._version = version
        if self._options.adapters == "unmerged":
            self._versions.add(version)

    async def add_version(self, adapters: Mapping[str, Tensor], version: int) -> None:
        await self._command({"op": "add", "version": version}, file_of(adapters))
        self._versions.add(version)

    async def keep_versions(self, versions: Collection[int]) -> None:
        self._versions &= {*versions, self._version}
        await self._command({"op": "keep", "versions": sorted(versions)})

    async def cache_address(self, tokens: Sequence[int]) -> str:
        self._live_child()
        return f"{self._options.cache_host}:{self._cache_port}"

    async def send_cache(self, tokens: Sequence[int], address: str) -> int:
        context = np.array(tokens, np.int32).tobytes()
        try:
            answer = await self._command({"op": "send", "address": address}, [context])
        except ValueError as error:
            raise CacheNotSent(str(error)) from None
        return int(answer["stored"])

    def _is_read_in_place(self, update: Update) -> TypeGuard[Mapping[str, Tensor]]:
        """Return True if the child process reads the weights directly from the GPU's memory.

        Return False if the engine accepts deltas or adapters, because the child then keeps weights
        in main memory.
        """
        if isinstance(update, Delta) or self.takes_deltas or self._options.merging:
            return False
        return bool(update) and all(tensor.is_cuda for tensor in update.values())

    async def resume(self) -> None:
        self._live_child()
        check_resume(self._version)
        await self._command({"op": "resume"})
        self._running = True
        self._schedule_poll()

    async def close(self) -> None:
        """End the child process, if there is one, and wait for its end."""
        self._end("the engine is closed")
        if self._child is not None:
            self._child.kill()
            try:
                await in_thread(self._child.wait)
            finally:
                self._child.wait()
        if self._routed_experts is not None:
            self._routed_experts.close()
            self._routed_experts = None

    def metrics(self) -> Mapping[str, float]:
        """Return the counters since the last call, and the mean batch size of decoding steps.

        `reprefill_s` estimates the seconds spent on computing dropped contexts again: the time of
        each step is divided in proportion to the tokens.
        """
        counters = self._counters
        self._counters = dict.fromkeys(_COUNTERS, 0.0)
        rows = counters.pop("rows")
        steps = counters["steps"]
        return counters | {"batch_size_mean": rows / steps if steps else 0.0}

    @property
    def pid(self) -> int:
        """The id of the child process."""
        if self._child is None:
            raise RuntimeError(NOT_STARTED)
        return self._child.pid

    async def _start_process(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None  # if no new process can be created, the next start tries again
        if self._options.record_experts and self._routed_experts is None:
            self._routed_experts = PostedExperts()
        if self._routed_experts:
            self._routed_experts.clear(arrived=self._unread)
        child_class = _LockstepChild if self._options.lockstep else _Child
        folder = str(self._routed_experts.folder) if self._routed_experts else ""
        self._child = child_class(self._options, folder, self._on_message, self._on_lost)
        ready = self._expect(self._answers, READY)
        await self._child.connect()
        self._child.listen(READY)
        model = await ready
        self.runner = model["runner"]
        self.vocab_size = model["vocab_size"]
        self._cache_port = model.get("cache_port", 0)
        if model["warning"]:
            warnings.warn(model["warning"], RuntimeWarning, stacklevel=3)

    def _live_child(self) -> "_Child":
        if self._error:
            raise EngineDied(self._error)
        if self._child is None:
            raise RuntimeError(NOT_STARTED)
        return self._child

    async def _command(self, header: Header, body: Sequence[Bytes] = ()) -> Header:
        """Send a command to the child process, and return its answer.

        Raises ValueError if the command fails in the child.
        """
        child = self._live_child()
        number = next(self._numbers)
        future = self._expect(self._answers, number)
        child.send({**header, "id": number}, body)
        child.listen(number)
        answer: Header = await future
        return answer

    def _expect(
        self, futures: "dict[int, asyncio.Future[Any]]", number: int
    ) -> "asyncio.Future[Any]":
        future = futures[number] = asyncio.get_running_loop().create_future()
        self._schedule_poll()
        return future

    def _schedule_poll(self) -> None:
        if self._next_poll is None and self._child is not None and self._is_pending():
            self._next_poll = asyncio.get_running_loop().call_later(
                self._child.poll_s, self._poll, self._child
            )

    def _poll(self, child: "_Child") -> None:
        self._next_poll = None
        child.poll(next(self._numbers))
        self._schedule_poll()

    def _is_pending(self) -> bool:
        if self._options.lockstep:
            return self._running and bool(self._replies)
        return bool(self._replies or self._answers)

    def _on_message(self, header: Header, body: bytearray) -> None:
        for name, amount in header.get("counters", {}).items():
            self._counters[name] += amount
        match header["op"]:
            case "reply":
                self._on_reply(header, body)
            case "rejected":
                _resolve(self._replies.pop(header["reply"], None), Rejected(FULL))
            case "done":
                answer = ValueError(header["error"]) if header["error"] else header | {"body": body}
                _resolve(self._answers.pop(header["id"], None), answer)

    def _on_reply(self, header: Header, body: bytearray) -> None:
        number, about = header["reply"], header["routes"]
        own = len(body) - header["kept"] - header["signals"]
        count = own // (TOKEN.itemsize + LOGP.itemsize)
        tokens = np.frombuffer(body, TOKEN, count)
        behavior_logp = np.frombuffer(body, LOGP, count, tokens.nbytes)
        kept = None
        if header["kept"]:
            kept = KeptSets.frombuffer(body[own:], count)
        signals = None
        if header["signals"]:
            signals = Signals.frombuffer(body[own + header["kept"] :])
        piece = Sampled(
            tuple(tokens.tolist()),
            tuple(behavior_logp.tolist()),
            header["version"],
            header["clean"],
            kept_sets=kept,
            signals=signals,
        )
        if about:
            self._unread.add(number)
        future = self._replies.pop(number, None)
        if future is None:  # the request was cancelled
            self._forget_experts(number)
        _resolve(future, _Message(piece, header["stop"], header["first_token_s"], about))

    def _on_lost(self, child: "_Child", error: str) -> None:
        """Make all calls raise an error, because the child process has ended or does not react.

        `error` is the text of the error. If it is empty, the text has the child's exit code and
        stderr.
        """
        if child is self._child and not self._error:
            self._end(error or child.last_words())

    def _end(self, error: str) -> None:
        """Make pending and later calls raise `EngineDied` with the text `error`."""
        self._error = self._error or error
        self._running = False
        if self._next_poll is not None:
            self._next_poll.cancel()
            self._next_poll = None
        for futures in (self._replies, self._answers):
            for future in futures.values():
                _resolve(future, EngineDied(self._error))
            futures.clear()


def _resolve(future: "asyncio.Future[Any] | None", result: _Message | Header | Exception) -> None:
    """Set the result or the error of a future, unless it was cancelled."""
    if future is None or future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


class _Child(Child, asyncio.Protocol):
    """The engine's child process, and its socket.

    `on_message` is called for each message from the child, and `on_lost` when the child has ended
    or does not react.
    """

    poll_s = BEAT_S

    def __init__(
        self,
        options: EngineOptions,
        experts_folder: str,
        on_message: Callable[[Header, bytearray], None],
        on_lost: Callable[["_Child", str], None],
    ) -> None:
        super().__init__(
            "engine",
            "unstale.engines.embedded.worker",
            asdict(options)
            | {
                "model_folder": str(options.model_folder.resolve()),
                "experts_folder": experts_folder,
                "pictures": str(options.pictures.folder) if options.pictures else "",
            },
            threads=options.threads,
            gpus=options.gpus,
        )
        self._on_message = on_message
        self._on_lost = on_lost
        self._frames = Frames()
        self._transport: asyncio.WriteTransport | None = None

    async def connect(self) -> None:
        self._transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: self, sock=self.socket
        )

    def send(self, header: Header, body: Sequence[Bytes] = ()) -> None:
        """Send one message to the child process.

        No error is raised if the child has ended, but `on_lost` is called later.
        """
        parts = [memoryview(part) for part in frame(header, body)]
        if self._transport is not None:
            if sum(part.nbytes for part in parts) <= _JOINED_BYTES:
                parts = [memoryview(b"".join(parts))]
            for part in parts:
                self._transport.write(part)
            return
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for part in parts:
                    self.sendall(part)
        except ChildFrozen as frozen:
            self._on_lost(self, str(frozen))

    def listen(self, number: int) -> None:
        """Do nothing: the event loop receives the answer to request `number`."""

    def poll(self, number: int) -> None:
        """Call `on_lost` if the process has sent no heartbeat for too long. Ignore `number`."""
        try:
            self.check()
        except ChildFrozen as frozen:
            self._on_lost(self, str(frozen))

    def kill(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        super().kill()

    def data_received(self, data: bytes) -> None:
        for header, body in self._frames.feed(data):
            self._on_message(header, body)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None or isinstance(exc, OSError):
            self._on_lost(self, "")
        else:  # `data_received` failed, and the process is still running
            self.kill()
            self._on_lost(self, f"a message of the engine process failed: {exc!r}")


class _LockstepChild(_Child):
    """An engine's child process whose answers blocking calls read, for deterministic runs."""

    poll_s = STEP_S
    _answered = READY - 1

    async def connect(self) -> None:
        """Do nothing, because the socket is already connected."""

    def listen(self, number: int) -> None:
        """Schedule a call that blocks the event loop until the answer to request `number` is there.

        Callbacks that were scheduled earlier run first.
        """
        asyncio.get_running_loop().call_soon(self._receive_until, number)

    def poll(self, number: int) -> None:
        self.send({"op": "step", "id": number})
        self._receive_until(number)

    def _receive_until(self, number: int) -> None:
        """Read and handle messages up to the answer to request `number`. Leave later ones."""
        data = b""
        while self._answered < number and self.socket.fileno() >= 0:
            for header, body in self._frames.feed(data):
                self._on_message(header, body)
                self._answered = max(self._answered, header.get("id", READY))
                if self._answered >= number:
                    return
            try:
                data = self.recv(_READ_BYTES)
            except ChildFrozen as frozen:
                return self._on_lost(self, str(frozen))
            if not data:
                return self._on_lost(self, "")


def _pack_update(update: Update) -> Sequence[Bytes]:
    """Return weights or a delta as the parts of a safetensors file, ready to send.

    Weights in main memory and compressed deltas are not copied.
    """
    return file_parts(update) if isinstance(update, Delta) else file_of(update)


SPEC = EngineSpec(
    EmbeddedEngine,
    takes_packed=True,
    adapter_deltas=True,
    keeps_sets=True,
    unmerged=True,
    reads_gpu=True,
)
