"""The base class of engines that are servers behind HTTP.

Two checks find a server that does not sample from the weights that it was sent. First, the server
returns the version that sampled each token, which must be the requested one. Second, after every
load, the engine lets the server sample a few tokens (the probe). Their log-probabilities are
compared with those of the trainer's model under the same weights. A reply is returned only after
the probe of its version has passed. See docs/engines.md.
"""

import asyncio
import contextlib
import itertools
import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec
import torch
from torch import Tensor

from unstale.config.files import read_mapping
from unstale.engines import (
    NOT_STARTED,
    EngineDied,
    Reply,
    ReplyStop,
    SamplingParams,
    Update,
    check_load,
    check_request,
    check_resume,
)
from unstale.engines.embedded.reference import ReferenceModel
from unstale.engines.embedded.runner import DTYPES
from unstale.engines.encoded_experts import cut_experts
from unstale.engines.http import (
    LARGE_BODY_BYTES,
    Body,
    Http,
    HttpError,
    decode_json,
    parsing_turn,
)
from unstale.engines.registry import EngineOptions, ModelSizes
from unstale.engines.session import EngineSession, deadline
from unstale.engines.shared_weights import SharedWeights
from unstale.engines.usage import UsageCounters
from unstale.engines.vllm_server import VllmServer
from unstale.kept_sets import KeptSets
from unstale.records import Sampled
from unstale.routed_experts import RoutedExperts, num_experts, pack_experts
from unstale.threads import in_thread
from unstale.weights.codec import advance
from unstale.weights.publish import DeltaInParts
from unstale.weights.store import Delta

HANG_S = 60.0
"""Seconds without an answer after which a server is treated as dead."""
PAUSE_S = 0.2
"""Seconds to wait for pending replies after another process has paused the server. Usually all have
ended by then. The others are aborted.
"""
LOAD_S = 600.0
"""Largest number of seconds for a start, a load or a probe (the test of loaded weights), for which
`HANG_S` would be too short.
"""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.05, "fp8": 0.2}
"""Largest allowed mean error in nats of the probe, the test of a server after each load.

Used if `engine.probe_tolerance` is 0. The keys are values of `engine.dtype` or `engine.quantise`.
Errors by rounding are smaller, even if only one of trainer and server rounds activations. For
example, the log-probabilities of SmolLM2 (135M) in bfloat16 differ by 0.04 from those in float32,
and by 0.06 from those of a server in bfloat16. They differ by 0.48 from those of a server that
ignores the temperature.
"""
_PROBE_PARAMS = SamplingParams(max_tokens=32, stop_tokens=(), temperature=1.25)
"""Sampling parameters of the probe, the test of a server after each load. With a temperature other
than 1, the probe also finds a server whose log-probabilities ignore the temperature.
"""
_PROBE_PROMPT = 32
_MIN_LOGP = -9999.0
"""The number that vLLM sends as the log-probability of a token without one."""
_MAX_LOGP = 1e-3
"""Log-probabilities in nats must be below this. Values slightly above 0 are rounding errors."""
NO_EXPERTS = memoryview(b"null")
_STOPS: dict[str, ReplyStop] = {"stop": "stop", "length": "length", "abort": "interrupted"}
_T = TypeVar("_T")


class ProbeFailed(EngineDied):
    """Error: the server's log-probabilities do not match the weights that were loaded."""


class VersionSpan(msgspec.Struct):
    """A part of a server's reply, sampled by one version of the weights.

    `end` is the index of the first token after the part.
    """

    version: str
    end: int


@dataclass(frozen=True, slots=True)
class ServerReply:
    """The answer of a server to one request."""

    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    """The log-probability of each token, in nats."""
    logp_tokens: tuple[int, ...]
    """The token ids to which the values in `logps` belong. They must equal `tokens`."""
    versions: tuple[tuple[str, int], ...]
    """The parts of the reply, each sampled by one version: the version as text, and the index of
    the first token after the part.
    """
    finish_reason: str
    cached_tokens: int
    """Number of context tokens that the server found in its prefix cache."""
    kept_sets: KeptSets | None = None
    """For each token, the set of tokens to which sampling was truncated. None if not returned."""
    routed_experts: memoryview = NO_EXPERTS
    """The experts that an MoE model chose for each token, as JSON text in the server's own
    encoding. The first row belongs to the first token for which the request asked for experts. The
    text is null or an empty string if there are none.
    """

    @property
    def has_experts(self) -> bool:
        return bytes(self.routed_experts[:4]) not in (b"null", b'""')


class RemoteEngine(ABC):
    """An engine on one server. A subclass describes the HTTP API of the server.

    Weights are passed in a file in memory, so the server must run on this host. With
    `options.deltas` the file is kept, and a delta changes it in place. With `options.merging` the
    updates are LoRA adapters: the engine adds them to the base weights and writes the sums.
    """

    NAME: ClassVar[str]
    HEALTH_PATH: ClassVar[str]
    GENERATE_PATH: ClassVar[str]
    MIN_TEMPERATURE: ClassVar[float]
    """Lowest temperature above 0 that the server applies unchanged. Lower ones are refused."""
    TRUNCATES: ClassVar[bool] = False
    """True if `_request_body` sends `top_p`, `top_k` and `min_p`. Otherwise they are refused."""
    REPLY: ClassVar[Any] = Any
    """The msgspec type of a reply's JSON. Fields that the type does not name are skipped, which
    makes long replies faster to read.
    """

    def __init__(self, options: EngineOptions, server: VllmServer | None = None) -> None:
        """Create an engine for the running server at `options.url`, or for `server`, which `start`
        starts.

        Raises ValueError for options that do not fit together or do not fit the model.
        """
        if options.deltas and options.merging:
            raise ValueError("deltas of adapters do not change merged weights: use full updates")
        self.options = options
        self.server = server
        self.takes_deltas = options.deltas
        self.url = server.url if server is not None else options.url
        try:
            self._http = Http(self.url)
        except ValueError as error:
            raise ValueError(f"engine.urls: {error}") from None
        config = read_mapping(options.model_folder / "config.json")
        self._num_experts = num_experts(config)
        if options.record_experts and not self._num_experts:
            raise ValueError("trainer.routing_replay must be false: the policy has no experts")
        self.sizes = options.sizes or self._model_sizes()
        self._weights = SharedWeights()
        self._was_reached = False
        self._request_ids = (f"{secrets.token_hex(4)}-{number}" for number in itertools.count())
        self._session: _Session | None = None
        self._version = -1
        """The version of the weights that was loaded last. -1 before the first load."""
        self.versions: set[int] = set()
        """The versions that a request may ask for. Empty except in a `VersionedEngine`."""
        self._staged: tuple[Update, int, Mapping[str, Tensor]] | None = None
        """The last staged update, its version, and the weights that `_share` returned for it. None
        if no update is staged.
        """

    @cached_property
    def _reference(self) -> ReferenceModel:
        return ReferenceModel(
            self.options.model_folder,
            dtype=DTYPES[self.options.dtype],
            merging=self.options.merging,
            quantise=self.options.quantise,
        )

    def _model_sizes(self) -> ModelSizes:
        """Return what `sample` must know about the model to check requests and replies.

        Raises ValueError if the model has too few positions for `max_context`.
        """
        self.options.check_context(self._reference.max_positions)
        routed = self._reference.routed_layers() if self.options.record_experts else ()
        return ModelSizes(self._reference.vocab_size, routed)

    @abstractmethod
    async def _handshake(self) -> int:
        """Check the server's settings. Return the largest length of a context on the server, in
        tokens.

        Raises ValueError for a server that cannot be used.
        """

    @abstractmethod
    async def _pause(self, *, keep_cache: bool) -> None:
        """Stop all replies on the server. Clear its prefix cache unless `keep_cache` is set."""

    @abstractmethod
    async def _abort(self, request_ids: Sequence[str]) -> None:
        """Stop the requests with these ids, which reached the server after it was paused."""

    @abstractmethod
    async def _load_weights(self, folder: Path, version: int) -> None:
        """Make the server load the weight file in `folder` as `version`, and end its pause."""

    @abstractmethod
    async def _loaded_version(self) -> str:
        """Return the version of the server's weights, as the server reports it.

        The server's engine process must answer this request itself, so that a frozen process is
        noticed.
        """

    @abstractmethod
    async def _unpause(self) -> None:
        """End the server's pause, unless `_load_weights` has already ended it."""

    @abstractmethod
    def _request_body(
        self, request_id: str, tokens: Sequence[int], params: SamplingParams
    ) -> Mapping[str, Any]: ...

    @abstractmethod
    def _parse_reply(self, body: Any) -> ServerReply:
        """Return the reply in the decoded JSON `body`, an object of the type `REPLY`.

        Called in a thread for large replies. Raises LookupError, TypeError or ValueError if the
        JSON is malformed.
        """

    def _decode_experts(self, routed_experts: memoryview) -> Any:
        """Decode `ServerReply.routed_experts`: return expert numbers `[tokens, layers, k]`.

        `k` is the number of experts for each token. A backend whose replies have `routed_experts`
        must define this method.
        """
        raise NotImplementedError(f"{type(self).__name__} does not decode routed experts")

    async def start(self) -> None:
        """Start the server, or connect to a running one.

        Raises ValueError if the server lacks a feature that a run needs, and `EngineDied` if it
        does not answer.
        """
        await self._end_session("the engine was started again")
        session = self._session = _Session(self._check_health, keep_cache=self.options.keep_cache)
        self._version = -1
        self.versions = set()
        self._staged = None
        if self.server is not None and not self.server.alive:
            await in_thread(self.server.start, lambda: not session.error)
        await self._wait_until_reachable(session)
        try:
            async with self._deadline(session, HANG_S, "no answer"):
                max_context = await self._handshake()
        except (HttpError, LookupError, TypeError) as error:
            raise ValueError(
                f"{self.url} lacks what a run needs (see docs/engines.md): {error!r}"
            ) from error
        except OSError as error:
            raise self._fail(session, str(error)) from error
        if max_context < self.options.max_context:
            raise ValueError(
                f"max_context={self.options.max_context}, but {self.url} was started with "
                f"{max_context}"
            )
        await self._pause(keep_cache=False)

    async def sample(self, tokens: Sequence[int], params: SamplingParams) -> Reply:
        self._check_request(tokens, params)
        session = self._live_session()
        while not session.open.is_set():
            await self._while_alive(session, session.open.wait())
        request_id = next(self._request_ids)
        version = self._version if params.version < 0 else params.version
        session.begin(request_id)
        try:
            reply = await self._while_alive(session, self.generate(request_id, tokens, params))
            await self._verified(session)
            routed_experts = None
            if self.options.record_experts and reply.has_experts:
                stop = len(tokens) + len(reply.tokens)
                first = params.first_routed(version)
                routed_experts = await self._experts_in_thread(
                    session, reply.routed_experts, first, stop
                )
        finally:  # after the experts: `interrupt` may need every piece of this version
            session.finish(request_id)
        piece = self._checked_piece(reply, params, version)
        clean = session.usage.count(tokens, piece.tokens, cached=reply.cached_tokens)
        return Reply(
            replace(piece, clean=clean, routed_experts=routed_experts), _STOPS[reply.finish_reason]
        )

    async def _experts_in_thread(
        self, session: "_Session", encoded: memoryview, first: int, stop: int
    ) -> RoutedExperts:
        async def read() -> RoutedExperts:
            async with parsing_turn():
                return await in_thread(self._read_experts, encoded, first, stop)

        try:
            return await self._while_alive(session, read())
        except ValueError as error:
            raise self._fail(session, f"malformed routed experts: {error}") from error

    def _read_experts(self, encoded: memoryview, first: int, stop: int) -> RoutedExperts:
        """Return the experts of the tokens `first` to `stop` - 1 of a sequence.

        Raises ValueError if `encoded` is invalid, or has rows for tokens from `stop` on.
        """
        decoded = self._decode_experts(encoded)
        experts = pack_experts(decoded, self._num_experts, routed=self.sizes.routed)
        routed_experts = RoutedExperts(first, experts)
        if routed_experts.stop > stop:
            raise ValueError(f"{routed_experts.stop} rows for {stop} tokens")
        return routed_experts

    async def stage(self, update: Update, version: int) -> None:
        session = self._live_session()
        check_load(update, version, self._version, sampling=False, deltas=self.takes_deltas)
        if self._staged and self._staged[0] is update and self._staged[1] == version:
            return
        self._staged = None
        await self._verified(session)  # the probe reads the file
        # not `_while_alive`: a file that cannot be written is not the server's fault
        shared = await session.while_alive(in_thread(self._share, session, update))
        self._staged = update, version, shared

    async def interrupt(self) -> None:
        session = self._live_session()
        session.open.clear()
        await self._verified(session)  # the pause would end the probe
        await self._pause(keep_cache=self.options.keep_cache)
        await self._drain(session)  # some requests reached the server after the pause

    async def _drain(self, session: "_Session") -> None:
        """Stop the server's pending requests. Wait until all calls of `sample` have replies."""
        while left := len(session.pending):
            async with self._deadline(session, HANG_S, "aborted replies did not return"):
                while len(session.pending) == left:
                    await self._abort([*session.pending])
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.05):
                            await session.quiet.wait()

    async def load(self, update: Update, version: int) -> None:
        session = self._live_session()
        sampling = session.open.is_set()
        check_load(update, version, self._version, sampling=sampling, deltas=self.takes_deltas)
        await self.stage(update, version)
        assert self._staged is not None
        (*_, weights), self._staged = self._staged, None
        with ExitStack() as until_probed:
            if not self.takes_deltas:
                until_probed.callback(self._weights.close)
            until_probed.enter_context(_reading(weights))
            await self._send_weights(weights, version)
            self._version = version
            session.usage.loaded()
            session.probe = asyncio.ensure_future(self._probe(session, version, weights))
            session.probe.add_done_callback(partial(_probe_ended, until_probed.pop_all()))

    async def _send_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Pause the server and make it load `weights`, a result of `_share`."""
        assert isinstance(weights, SharedWeights)
        await self._pause(keep_cache=self.options.keep_cache)
        await self._load_weights(weights.folder, version)

    def _share(self, session: EngineSession, update: Update) -> Mapping[str, Tensor]:
        """Write an update to the file that the server reads. Return the weights in the file.

        A delta changes the weights in the file. If the update already is a file with exactly these
        weights, nothing is written, and this file is used. Runs in a thread.
        """
        with _reading(update), self._weights.changing():
            if session.error:  # a later start has written other weights
                raise EngineDied(session.error)
            if isinstance(update, Delta):
                for part in update.read() if isinstance(update, DeltaInParts) else (update,):
                    advance(self._weights.weights, part)
                return self._weights
            weights = self._reference.cast(update)
            if isinstance(update, SharedWeights) and update.holds(weights):
                return update
            self._weights.write(weights)
            return self._weights

    async def resume(self) -> None:
        session = self._live_session()
        check_resume(self._version)
        await self._unpause()
        session.open.set()

    async def verified(self) -> None:
        """Wait for the probe, the test of the loaded weights. Raises `EngineDied` if it fails."""
        await self._verified(self._live_session())

    def fail(self, reason: str) -> EngineDied:
        """End this engine, because another process found its server dead. `reason` is its report.

        Return the error that all calls raise until the next start. The server is killed if this
        engine started it.
        """
        return self._fail(self._live_session(), reason)

    def follow(self, version: int, probe: "asyncio.Future[None]") -> None:
        """Begin to sample from a server that another process has started and loaded with `version`.

        Called on the engine's event loop instead of `start`, `load` and `resume`. `probe` is a
        future that the caller completes when the other process has tested the weights. Replies are
        returned only then.
        """
        session = self._session
        if session is None or session.error:
            session = self._session = _Session(
                self._check_health, keep_cache=self.options.keep_cache
            )
            self._version = -1
        if version != self._version:
            session.usage.loaded()
        self._version = version
        session.probe = probe
        session.open.set()

    def unfollow(self, reason: str) -> None:
        """Make all calls fail until the next `follow`, because the other process lost the server.

        `reason` is the text of the error.
        """
        if self._session is not None:
            self._session.end(reason)

    async def leave(self) -> None:
        """Send no requests until the next `follow`. Wait until all pending replies have returned.

        Meanwhile, the process that controls the server pauses it. Raises `EngineDied` if the server
        fails or the replies do not return in time.
        """
        session = self._live_session()
        session.open.clear()
        if session.pending:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE_S):
                    await session.quiet.wait()
        await self._drain(session)

    async def close(self) -> None:
        """Close the engine. If this engine started the server, end it and wait for its end."""
        await self._end_session("the engine is closed")
        if self.server is not None:
            await in_thread(self.server.close)
        await in_thread(self._close_weights)

    def _close_weights(self) -> None:
        """Remove the weight file. First wait for a thread that writes it for a cancelled
        `stage`.
        """
        with self._weights.changing():
            self._weights.close()

    def metrics(self) -> Mapping[str, float]:
        return self._session.usage.read() if self._session is not None else {}

    def _check_request(self, tokens: Sequence[int], params: SamplingParams) -> None:
        limit = self.options.max_context
        check_request(
            tokens,
            params,
            max_context=limit,
            vocab_size=self.sizes.vocab_size,
            keeps_sets=bool(self.options.truncation),
            truncates=self.TRUNCATES,
            versions=self.versions,
        )
        if 0 < params.temperature < self.MIN_TEMPERATURE:
            raise ValueError(
                f"{self.NAME} needs temperature 0 or >= {self.MIN_TEMPERATURE}, "
                f"got {params.temperature}"
            )

    def _max_tokens(self, tokens: Sequence[int], params: SamplingParams) -> int:
        return min(params.max_tokens, self.options.max_context - len(tokens))

    async def generate(
        self, request_id: str, tokens: Sequence[int], params: SamplingParams
    ) -> ServerReply:
        """Send one request to the server and return its reply.

        Raises ValueError if the server rejects it.
        """
        request = self._request_body(request_id, tokens, params)
        try:
            reply: ServerReply = await self._http.call(
                "POST", self.GENERATE_PATH, request, decode=self._decode_reply
            )
        except HttpError as error:
            if error.status in (400, 422):
                raise ValueError(str(error)) from error
            raise
        return reply

    def _decode_reply(self, body: Body) -> ServerReply:
        """Return the reply in the bytes of a JSON text.

        Raises ConnectionError if the JSON is malformed.
        """
        routed_experts = None
        if self.options.record_experts and len(body) > LARGE_BODY_BYTES:
            body, routed_experts = cut_experts(body)
        with malformed_as_connection_error():
            reply = self._parse_reply(decode_json(body, self.REPLY))
            if reply.finish_reason not in _STOPS:
                raise ValueError(f"unknown finish reason {reply.finish_reason!r}")
        return reply if routed_experts is None else replace(reply, routed_experts=routed_experts)

    def _checked_piece(self, reply: ServerReply, params: SamplingParams, version: int) -> Sampled:
        """Check a reply, and return its tokens and log-probabilities.

        Raises `EngineDied` if a token was sampled by another version than `version`, or has no
        valid log-probability.
        """
        tokens = reply.tokens
        session = self._live_session()
        if tokens:
            stamped = {stamp for stamp, _ in reply.versions}
            if stamped != {str(version)} or reply.versions[-1][1] != len(tokens):
                reason = f"{len(tokens)} tokens of version {version} are stamped {reply.versions}"
                raise self._fail(session, reason)
        logps = reply.logps
        if reply.logp_tokens != tokens or len(logps) != len(tokens) or not _in_range(logps):
            raise self._fail(session, _describe_fault(reply))
        if max(logps, default=-1.0) >= 0:
            logps = tuple(min(0.0, logp) for logp in logps)
        if params.temperature == 0:  # greedy sampling: the chosen token has probability 1
            return Sampled(tokens, (0.0,) * len(tokens), version)
        if not (params.truncation and params.return_sets and tokens):
            return Sampled(tokens, logps, version)
        kept = reply.kept_sets
        if kept is None:
            reason = f"{params.truncation} is set, but the server returns no kept sets"
            raise self._fail(session, f"{reason}: start it with --return-sampling-mask")
        if len(kept) != len(tokens) or not kept.contain(tokens):
            reason = f"the {len(kept)} kept sets of {len(tokens)} tokens do not contain them"
            raise self._fail(session, reason)
        return Sampled(tokens, logps, version, kept_sets=kept)

    async def _verified(self, session: "_Session") -> None:
        """Wait for the probe, the test of the loaded weights. Raise its error if it fails."""
        if session.probe is not None:
            await asyncio.wait((session.probe,))
            session.probe.result()

    async def _probe(
        self, session: "_Session", version: int, weights: Mapping[str, Tensor]
    ) -> None:
        """Let the server sample tokens. Compare their log-probabilities with those of the trainer's
        model.

        Raises `ProbeFailed` if the mean absolute error in nats exceeds `options.probe_tolerance`.
        """
        try:
            errors = await self._probe_errors(session, version, weights)
        except EngineDied:
            raise
        except (ValueError, RuntimeError) as error:  # not one of the replies that wait for it
            raise self._fail(session, f"the probe failed: {error}") from error
        mean = float(errors.mean())
        session.usage.probed(mean)
        options = self.options
        number_format = options.dtype if options.quantise == "none" else options.quantise
        tolerance = options.probe_tolerance or TOLERANCE[number_format]
        if not mean <= tolerance:
            reason = (
                f"after loading version {version}, the log-probabilities of {len(errors)} tokens "
                f"differ by {mean:.2g} on average and {errors.max():.2g} at most; "
                f"engine.probe_tolerance allows {tolerance:g}. The server has other weights or no "
                "temperature"
            )
            raise ProbeFailed(str(self._fail(session, reason)))

    async def _probe_errors(
        self, session: "_Session", version: int, weights: Mapping[str, Tensor]
    ) -> Tensor:
        """Make the server sample tokens. Return the absolute errors of their log-probabilities in
        nats.

        The true values are computed by the trainer's model with `weights`.
        """
        prompt = self._probe_prompt(version)
        params = replace(_PROBE_PARAMS, **self.options.truncation._asdict())
        request = self.generate(next(self._request_ids), prompt, params)
        async with self._deadline(session, LOAD_S, "no reply to the probe"):
            reply = await self._while_alive(session, request)
        piece = self._checked_piece(reply, params, version)
        if not piece.tokens:
            raise self._fail(session, "the reply to the probe has no tokens")
        if self.options.record_experts and not reply.has_experts:
            reason = (
                "trainer.routing_replay is set, but the server returns no routed experts: start it "
                "with --enable-return-routed-experts"
            )
            raise self._fail(session, reason)
        expected = await session.while_alive(
            in_thread(self._expected_logps, weights, [*prompt, *piece.tokens], piece.kept_sets)
        )
        return (expected[len(prompt) - 1 :] - torch.tensor(piece.behavior_logp)).abs()

    def _expected_logps(
        self, weights: Mapping[str, Tensor], tokens: Sequence[int], kept_sets: KeptSets | None
    ) -> Tensor:
        """Return the trainer's log-probabilities of all `tokens` except the first, `[T - 1]`.

        `kept_sets` has the sets to which the last tokens were truncated. Their log-probabilities
        are over these sets. Runs in a thread.
        """
        with _reading(weights):  # the thread may run on after the probe was cancelled
            heat = _PROBE_PARAMS.temperature
            return self._reference.logps(weights, tokens, temperature=heat, kept_sets=kept_sets)

    def _probe_prompt(self, version: int) -> list[int]:
        """Return random prompt tokens for the probe, equal in all engines that load `version`."""
        noise = torch.Generator().manual_seed(version)
        length = min(_PROBE_PROMPT, self.options.max_context - 1)
        tokens: list[int] = torch.randint(
            self.sizes.vocab_size, (length,), generator=noise
        ).tolist()
        return tokens

    async def _wait_until_reachable(self, session: "_Session") -> None:
        """Wait until the server answers.

        Raises `EngineDied` if a server that this engine started has ended. A server that runs
        already must answer the first request at once. When it has answered before, up to `HANG_S`
        seconds are allowed.
        """
        timeout_s = LOAD_S if self.server is not None else HANG_S
        async with self._deadline(session, timeout_s, "not ready"):
            while not await self._is_reachable(session):  # noqa: ASYNC110 - no event exists
                await asyncio.sleep(0.1)
        self._was_reached = True

    async def _is_reachable(self, session: "_Session") -> bool:
        try:
            await self._http.call("GET", self.HEALTH_PATH)
        except OSError as error:
            may_come = self.server.alive if self.server is not None else self._was_reached
            if may_come:
                return False
            raise self._fail(session, str(error)) from error
        return True

    async def _post(
        self, path: str, body: Any = None, *, timeout_s: float | None = None, retry_on: str = ""
    ) -> None:
        """Send a command to the server.

        Raises `EngineDied` if the server refuses the command, or does not answer within `timeout_s`
        seconds (None: `HANG_S`). If a refusal contains the text `retry_on`, the command is sent
        again instead, until `timeout_s` seconds are over.
        """
        session = self._live_session()
        async with self._deadline(session, timeout_s or HANG_S, f"no answer to {path}"):
            await self._while_alive(session, self._post_with_retries(path, body, retry_on))

    async def _post_with_retries(self, path: str, body: Any, retry_on: str) -> None:
        while True:
            try:
                await self._http.call("POST", path, body)
            except HttpError as error:
                if not retry_on or retry_on not in str(error):
                    raise
                await asyncio.sleep(0.05)
            else:
                return

    def _deadline(
        self, session: "_Session", seconds: float, failure: str
    ) -> AbstractAsyncContextManager[None]:
        """Return a context that raises `EngineDied` if its body takes longer than `seconds`.

        `failure` is the reason in the error's text, such as "no answer".
        """
        return deadline(seconds, partial(self._fail, session), failure)

    async def _end_session(self, reason: str) -> None:
        if self._session is not None:
            self._session.end(reason)
            if self._session.probe is not None:
                await asyncio.wait((self._session.probe,))

    def _live_session(self) -> "_Session":
        if self._session is None:
            raise RuntimeError(NOT_STARTED)
        if self._session.error:
            raise EngineDied(self._session.error)
        return self._session

    async def _while_alive(self, session: "_Session", awaitable: Awaitable[_T]) -> _T:
        """Await a result of the server. Raises `EngineDied` if server or request fails."""
        try:
            return await session.while_alive(awaitable)
        except OSError as error:
            raise self._fail(session, str(error)) from error

    async def _check_health(self, session: "_Session") -> None:
        """Raise `EngineDied` if the server does not answer, or reports an unexpected version."""
        async with self._deadline(session, HANG_S, "its engine did not answer"):
            with malformed_as_connection_error():
                version = await self._loaded_version()
        if session.pending and version != str(self._version):
            reason = f"it reports version {version}, but {self._version} was loaded"
            raise self._fail(session, reason)

    def _fail(self, session: "_Session", reason: str) -> EngineDied:
        """End the session because the server failed. Return the error to raise.

        All calls until the next start raise the same error. The server is killed if this engine
        started it.
        """
        if session.error:
            return EngineDied(session.error)
        log = ""
        if self.server is not None:
            if not self.server.alive:
                log = f"; {self.server.describe_exit()}"
            self.server.kill()
        session.end(f"{self.NAME} at {self.url}: {reason}{log}")
        return EngineDied(session.error)


def _reading(weights: Update) -> AbstractContextManager[None]:
    """Return a context in which the file of `weights` does not change.

    For weights that are in no file, the context does nothing.
    """
    return weights.reading() if isinstance(weights, SharedWeights) else contextlib.nullcontext()


def _probe_ended(resources: ExitStack, probe: "asyncio.Future[None]") -> None:
    resources.close()
    if not probe.cancelled():
        probe.exception()  # marks it as retrieved: nobody may wait for this probe


def _in_range(logps: Sequence[float]) -> bool:
    """Return True if all values can be log-probabilities of sampled tokens. False if one is NaN."""
    if not logps:
        return True
    return math.isfinite(sum(logps)) and min(logps) > _MIN_LOGP and max(logps) < _MAX_LOGP


def _describe_fault(reply: ServerReply) -> str:
    tokens, logps, named = reply.tokens, reply.logps, reply.logp_tokens
    if not len(logps) == len(named) == len(tokens):
        return (
            f"a reply of {len(tokens)} tokens has {len(logps)} log-probabilities for {len(named)} "
            "token ids: the server must send one for each token"
        )
    for index, (token, name, logp) in enumerate(zip(tokens, named, logps, strict=True)):
        if token != name:
            return (
                f"token {index} of a reply is {token}, but the log-probability there is of token "
                f"{name}"
            )
        if not _in_range([logp]):
            return (
                f"token {index} of a reply, {token}, has the log-probability {logp}: it must be "
                f"above {_MIN_LOGP:g}, which servers send for none, and at most 0"
            )
    return "the sum of its log-probabilities is not finite"


@contextlib.contextmanager
def malformed_as_connection_error() -> Iterator[None]:
    """Return a context that turns errors from a malformed answer into ConnectionError."""
    try:
        yield
    except (LookupError, TypeError, ValueError) as error:
        raise ConnectionError(f"malformed answer: {error!r}") from error


class _Session(EngineSession):
    def __init__(self, check_health: "Callable[[_Session], Awaitable[None]]", *, keep_cache: bool):
        super().__init__(partial(check_health, self))
        self.usage = UsageCounters(keep_cache=keep_cache)
        self.probe: asyncio.Future[None] | None = None
        """A future of the probe, the test of the last loaded version. Its error is that of the
        test. None before the first load.
        """

    def begin(self, request_id: str) -> None:
        self.usage.begin()
        super().begin(request_id)

    def finish(self, request_id: str) -> None:
        super().finish(request_id)
        if not self.pending:
            self.usage.end()
