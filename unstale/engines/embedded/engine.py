"""The engine that needs no server: a process of its own on this machine, reached through a socket.

Its threads are set before torch loads there: with more threads than cores, generation and training slow each other
down twenty times. The process gets a session of its own and ignores Ctrl-C, so only `close` or the end of this
process ends it.
"""

import asyncio
import contextlib
import itertools
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from unstale.engines import EngineDied, Reply, SamplingParams, Update, check_request
from unstale.engines.registry import EngineOptions, EngineSpec
from unstale.model.lora import Merging
from unstale.records import Sampled
from unstale.weights.child_process import BEAT_S, Bytes, Child, ChildFrozen, Frames, Header, frame
from unstale.weights.codec import dumps, file_of
from unstale.weights.store import Delta

STEP_S = 0.02
"""From one step to the next in lockstep, on the event loop's clock."""
_READ_BYTES = 1 << 20
_NOT_STARTED = "the engine has not been started: await start() first"
_COUNTERS = (
    "sampled_tokens", "prefill_tokens", "cached_tokens", "reprefill_tokens", "reprefill_s", "busy_s", "idle_s", "steps",
    "rows", "cpu_s",
)  # fmt: skip


class EmbeddedEngine:
    """`Engine` in a child process. Start it, use it and close it on one event loop.

    `dtype` is the engine's alone; weights are cast when they are loaded. `max_slots` replies are sampled at once,
    further ones wait; contexts of past turns are kept in idle slots, so a few more slots than episodes in flight
    are well spent. A reply ends with "length" where its sequence reaches `max_context`. With `keep_cache` a context
    that was computed under older weights is used as it is, and what is sampled over it is not clean. With `deltas`
    it takes deltas, for the memory of one more copy of the weights as they were given. With `merging` it is given
    adapters, and merges them into the weights of `model_folder`.

    In `lockstep` the process only does what it is told, a step every `STEP_S` while replies are due, and its answers
    are read before anything else happens: what comes of it depends on the order of the calls and on nothing else.
    """

    def __init__(  # noqa: PLR0913 - one for each knob of EngineConfig that the process needs
        self,
        model_folder: Path,
        *,
        dtype: Literal["bfloat16", "float32"] = "bfloat16",
        threads: int = 1,
        max_slots: int = 128,
        max_context: int = 2048,
        keep_cache: bool = False,
        deltas: bool = False,
        lockstep: bool = False,
        merging: Merging | None = None,
    ) -> None:
        _check(
            model_folder, dtype=dtype, threads=threads, max_slots=max_slots, max_context=max_context
        )
        self._options: dict[str, Any] = {
            "model_folder": str(model_folder.resolve()),
            "dtype": dtype,
            "threads": threads,
            "max_slots": max_slots,
            "max_context": max_context,
            "keep_cache": keep_cache,
            "deltas": deltas,
            "lockstep": lockstep,
            "merging": merging and asdict(merging),
        }
        self.takes_deltas = deltas
        self.max_context = max_context
        self.runner = ""
        """Which program runs the model; known after `start`."""
        self.vocab_size = 0
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._counters = dict.fromkeys(_COUNTERS, 0.0)
        self._error = ""
        """Why the engine can no longer sample; empty while it can."""
        self._running = False
        self._child: _Child | None = None
        self._turns: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Start the process and wait until it is ready for weights; one that lives forgets all it knows.

        Raises ValueError if it refuses the model.
        """
        lives = self._child is not None and not self._error
        self._end("the engine was started again")
        self._error, self._running = "", False
        if lives:
            await self._ask({"op": "reset"})
        else:
            await self._begin()
        self._counters = dict.fromkeys(_COUNTERS, 0.0)

    async def sample(self, tokens: Sequence[int], params: SamplingParams) -> Reply:
        check_request(tokens, params, max_context=self.max_context, vocab_size=self.vocab_size)
        child, number = self._living(), next(self._numbers)
        future = self._expect(self._replies, number)
        fields = [
            number,
            list(tokens),
            params.max_tokens,
            params.stop_tokens,
            params.temperature,
            params.seed,
        ]
        child.send({"op": "sample", "request": fields})
        try:
            return await future
        except asyncio.CancelledError:
            if self._replies.pop(number, None):
                child.send({"op": "cancel", "id": number})
            raise

    async def interrupt(self) -> None:
        self._running = False
        await self._ask({"op": "interrupt"})

    async def load(self, update: Update, version: int) -> None:
        """As the Protocol says; the tensors must not change before this returns."""
        if version < 0:
            raise ValueError(f"version must be >= 0, got {version}")
        delta = isinstance(update, Delta)
        if delta and not self.takes_deltas:
            raise ValueError(
                "this engine keeps no weights that a delta could change: make it with deltas=True"
            )
        body = await asyncio.to_thread(_pack_update, update)
        await self._ask({"op": "load", "version": version, "delta": delta}, body)

    async def resume(self) -> None:
        await self._ask({"op": "resume"})
        self._running = True
        self._take_turns()

    async def close(self) -> None:
        """End the process and wait for it. Harmless when it is gone already."""
        self._end("the engine is closed")
        if self._child is not None:
            self._child.kill()
            try:
                await asyncio.to_thread(self._child.wait)
            finally:
                self._child.wait()

    def metrics(self) -> Mapping[str, float]:
        """Counters since the last call. A step's time is charged to re-prefilling by the share of its tokens."""
        counters, self._counters = self._counters, dict.fromkeys(_COUNTERS, 0.0)
        rows, steps = counters.pop("rows"), counters["steps"]
        return counters | {"batch_size_mean": rows / steps if steps else 0.0}

    @property
    def pid(self) -> int:
        """The process that samples."""
        if self._child is None:
            raise RuntimeError(_NOT_STARTED)
        return self._child.pid

    async def _begin(self) -> None:
        """A process of its own, in place of one that has ended."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        kind = _Stepped if self._options["lockstep"] else _Child
        self._child = kind(self._options, self._arrived, self._lost)
        ready = self._expect(self._answers, _READY)
        await self._child.connect()
        self._child.listen(_READY)
        await ready

    def _living(self) -> "_Child":
        if self._error:
            raise EngineDied(self._error)
        if self._child is None:
            raise RuntimeError(_NOT_STARTED)
        return self._child

    async def _ask(self, header: Header, body: Sequence[Bytes] = ()) -> None:
        """Send and wait for the acknowledgement, which comes after everything the process said before it."""
        child, number = self._living(), next(self._numbers)
        future = self._expect(self._answers, number)
        child.send({**header, "id": number}, body)
        child.listen(number)
        await future

    def _expect(
        self, futures: "dict[int, asyncio.Future[Any]]", number: int
    ) -> "asyncio.Future[Any]":
        future = futures[number] = asyncio.get_running_loop().create_future()
        self._take_turns()
        return future

    def _take_turns(self) -> None:
        """The process has its turns for as long as something is due."""
        if self._turns is None and self._child is not None and self._is_due():
            self._turns = asyncio.get_running_loop().call_later(
                self._child.turn_s, self._turn, self._child
            )

    def _turn(self, child: "_Child") -> None:
        self._turns = None
        child.turn(next(self._numbers))
        self._take_turns()

    def _is_due(self) -> bool:
        if self._options["lockstep"]:
            return self._running and bool(self._replies)
        return bool(self._replies or self._answers)

    def _arrived(self, header: Header) -> None:
        for name, amount in header.get("counters", {}).items():
            self._counters[name] += amount
        match header["op"]:
            case "replies":
                for number, tokens, behavior_logp, stop, clean in header["replies"]:
                    piece = Sampled(tuple(tokens), tuple(behavior_logp), header["version"], clean)
                    _settle(self._replies.pop(number, None), Reply(piece, stop))
            case "done":
                _settle(self._answers.pop(header["id"], None), None, error=_fault(header))
            case "ready":
                self.runner, self.vocab_size = header["runner"], header["vocab_size"]
                _settle(self._answers.pop(_READY, None), None)
                if header["warning"]:
                    warnings.warn(header["warning"], RuntimeWarning, stacklevel=2)
            case "refused":
                _settle(self._answers.pop(_READY, None), None, error=ValueError(header["error"]))

    def _lost(self, child: "_Child", error: str) -> None:
        """The process is gone, or as good as gone; without `error`, its last words say why."""
        if child is self._child and not self._error:
            self._end(error or child.last_words())

    def _end(self, error: str) -> None:
        """Nothing more will come: everyone who waits gets `EngineDied`."""
        self._error = self._error or error
        if self._turns is not None:
            self._turns.cancel()
            self._turns = None
        for futures in (self._replies, self._answers):
            for future in futures.values():
                _settle(future, None, error=EngineDied(self._error))
            futures.clear()


_READY = -1


def _settle(
    future: "asyncio.Future[Any] | None", result: Reply | None, *, error: Exception | None = None
) -> None:
    """Answer a caller, unless it has stopped waiting."""
    if future is None or future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _fault(header: Header) -> Exception | None:
    match header["fault"]:
        case "":
            return None
        case "weights":
            return ValueError(header["error"])
    return RuntimeError(header["error"])


class _Child(Child, asyncio.Protocol):
    """The process, its socket on the event loop: each frame becomes a call of `arrived`, its end one of `lost`."""

    turn_s = BEAT_S

    def __init__(
        self,
        options: Mapping[str, Any],
        arrived: Callable[[Header], None],
        lost: Callable[["_Child", str], None],
    ) -> None:
        super().__init__(
            "engine",
            "unstale.engines.embedded.worker",
            dict(options),
            threads=int(options["threads"]),
        )
        self._arrived = arrived
        self._lost = lost
        self._frames = Frames()
        self._transport: asyncio.WriteTransport | None = None

    async def connect(self) -> None:
        self._transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: self, sock=self.socket
        )

    def send(self, header: Header, body: Sequence[Bytes] = ()) -> None:
        """One frame, its body in parts. The end of the process shows where it is listened to."""
        parts = [memoryview(part) for part in frame(header, body)]
        if self._transport is not None:
            for part in parts:
                self._transport.write(part)
            return
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for part in parts:
                    self.sendall(part)
        except ChildFrozen as frozen:
            self._lost(self, str(frozen))

    def listen(self, number: int) -> None:
        """The answer of this number is waited for. The event loop listens."""

    def turn(self, number: int) -> None:
        """It works by itself; whoever waits for it wants to know that it does."""
        try:
            self.check()
        except ChildFrozen as frozen:
            self._lost(self, str(frozen))

    def kill(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        super().kill()

    def data_received(self, data: bytes) -> None:
        for header, _ in self._frames.feed(data):
            self._arrived(header)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost(self, "")


class _Stepped(_Child):
    """The process in lockstep, without the event loop's sockets."""

    turn_s = STEP_S
    _answered = _READY - 1

    async def connect(self) -> None:
        """It is."""

    def listen(self, number: int) -> None:
        """Not at once: whoever gets a reply with the answer goes on before whoever waits for the answer."""
        asyncio.get_running_loop().call_soon(self._hear, number)

    def turn(self, number: int) -> None:
        self.send({"op": "step", "id": number})
        self._hear(number)

    def _hear(self, number: int) -> None:
        """Take in what the process says up to the answer of this number, and nothing after it."""
        data = b""
        while self._answered < number and self.socket.fileno() >= 0:
            for header, _ in self._frames.feed(data):
                self._arrived(header)
                self._answered = max(self._answered, header.get("id", _READY))
                if self._answered >= number:
                    return
            try:
                data = self.recv(_READ_BYTES)
            except ChildFrozen as frozen:
                return self._lost(self, str(frozen))
            if not data:
                return self._lost(self, "")


def _pack_update(update: Update) -> Sequence[Bytes]:
    """A safetensors file, in parts: of whole weights, their own memory."""
    return [dumps(update)] if isinstance(update, Delta) else file_of(update)


def _check(model_folder: Path, *, dtype: str, **limits: int) -> None:
    """Refuse what cannot work before a process is started."""
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"dtype must be bfloat16 or float32, got {dtype!r}")
    for name, value in limits.items():
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    path = model_folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{model_folder} is not a model folder: it has no config.json")
    known = json.loads(path.read_text()).get("max_position_embeddings")
    if known is not None and limits["max_context"] > known:
        raise ValueError(
            f"max_context={limits['max_context']} is more than the model's {known} positions"
        )


def _make(options: EngineOptions) -> EmbeddedEngine:
    return EmbeddedEngine(
        options.model_folder,
        dtype=options.dtype,
        threads=options.config.threads,
        max_slots=options.max_running,
        max_context=options.config.max_context,
        keep_cache=options.config.keep_cache,
        deltas=options.deltas,
        lockstep=options.lockstep,
        merging=options.merging,
    )


SPEC = EngineSpec(_make, adapter_deltas=True)
