"""An engine behind a server's HTTP API, whosever server it is: what versions, time-outs and updates have in common.

The server stamps every token with the version of the weights that sampled it, and the stamp has to be the version that
was loaded. After every load it says a few tokens, whose log-probabilities have to be those of the trainer's program
under the same weights. See docs/engines.md.
"""

import asyncio
import contextlib
import itertools
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from unstale.config import Dtype
from unstale.engines import EngineDied, Reply, ReplyStop, SamplingParams, Update, check_request
from unstale.engines.embedded.reference import Reference
from unstale.engines.embedded.runner import DTYPES
from unstale.engines.embedded.shared_weights import SharedWeights
from unstale.engines.http import Http, HttpError
from unstale.engines.prefixes import CachedPrefixes
from unstale.engines.vllm_server import Server
from unstale.model.lora import Merging
from unstale.records import Sampled
from unstale.weights.store import Delta

LOOK_S = 2.0
"""How often a server that owes replies is asked whether its engine still works."""
HANG_S = 60.0
"""A server whose engine does not answer for so long is given up."""
LOAD_S = 600.0
"""The same while it starts, takes weights, and says its first tokens."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}
"""Mean absolute difference of log-probabilities from which on a server is not believed."""
_PROBE = SamplingParams(max_tokens=32, stop_tokens=(), temperature=1.25)
"""Not at temperature 1, where log-probabilities that leave the temperature out would pass."""
_PROBE_PROMPT = 32
_NO_LOGP = -9999.0
_NOISE = 1e-3
"""A log-probability so far above 0 is float noise."""
_STOPS: dict[str, ReplyStop] = {"stop": "stop", "length": "length", "abort": "interrupted"}
_T = TypeVar("_T")


class ProbeFailed(EngineDied):
    """The server's log-probabilities are not those of the weights that it was given: it is not to sample."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server says to one request."""

    tokens: tuple[int, ...]
    said: tuple[tuple[int, float], ...]
    """For each token, which one its log-probability is of, and that."""
    stamps: tuple[tuple[str, int], ...]
    """Versions, each with the number of the token before which it ends."""
    reason: str
    cached: int
    """Tokens of the context that it had computed before."""


class RemoteEngine(ABC):
    """`Engine` on one server; what its API looks like is said by a subclass.

    Weights travel through a file in memory, so the server is on this host; with `deltas` it stays, and is changed in
    place. With `merging` it is given adapters, and hands on the weights that they are merged into. With `keep_cache` it
    goes on with what it computed under older weights; what is sampled over it is not clean.
    """

    _NAME: ClassVar[str]
    _HEALTH: ClassVar[str]
    _GENERATE: ClassVar[str]
    _MIN_TEMPERATURE: ClassVar[float]
    """Below it the server does not sample at the temperature that it is asked for."""

    def __init__(  # noqa: PLR0913 - the options that all servers have in common
        self,
        model_folder: Path,
        *,
        url: str = "",
        dtype: Dtype = "bfloat16",
        max_context: int = 2048,
        keep_cache: bool = False,
        deltas: bool = False,
        merging: Merging | None = None,
    ) -> None:
        if deltas and merging:
            raise ValueError(
                "servers are given merged weights: a delta of adapters does not change them"
            )
        self.takes_deltas = deltas
        self._reference = Reference(model_folder, dtype=DTYPES[dtype], merging=merging)
        if max_context > (self._reference.max_tokens or max_context):
            raise ValueError(
                f"max_context={max_context} is more than the model's {self._reference.max_tokens} positions"
            )
        self._dtype = dtype
        self._max_context = max_context
        self._keep_cache = keep_cache
        self.url = ""
        self._handed = SharedWeights()
        self._reached = False
        self._names = (f"{secrets.token_hex(4)}-{number}" for number in itertools.count())
        self._life: _Life | None = None
        self._version = -1
        """What the server holds, and has shown to hold."""
        if url:
            self._attach(url)

    def _attach(self, at: Server | str) -> None:
        """A server of ours, or the address of somebody's."""
        self._server = at if isinstance(at, Server) else None
        self.url = at.url if isinstance(at, Server) else at
        self._http = Http(self.url)

    @abstractmethod
    async def _greet(self) -> int:
        """Tokens that a context may have. Raises ValueError for a server that cannot be worked with."""

    @abstractmethod
    async def _pause(self, *, keep: bool) -> None:
        """Replies end with what they have; without `keep` the cache goes."""

    @abstractmethod
    async def _abort(self, names: Sequence[str]) -> None:
        """The same for replies that were asked for before the pause, and arrived after it."""

    @abstractmethod
    async def _take(self, folder: Path, version: int) -> None:
        """Weights and version; the server is ready to sample then."""

    @abstractmethod
    async def _held(self) -> str:
        """The version by the record of the engine behind the server, which has to work to say it."""

    @abstractmethod
    async def _open(self) -> None:
        """Undo a pause after which nothing was loaded."""

    @abstractmethod
    def _request(self, name: str, tokens: Sequence[int], params: SamplingParams) -> Any: ...

    @abstractmethod
    def _answer(self, said: Any) -> Answer: ...

    async def start(self) -> None:
        """Bring the server up, or find it. Raises ValueError if it is not one that can be worked with."""
        if self._life is not None:
            self._life.end("the engine was started again")
        life = self._life = _Life(keeps=self._keep_cache)
        self._version = -1
        if self._server is not None and not self._server.lives:
            await asyncio.to_thread(self._server.begin)
        await self._reach(life)
        try:
            async with asyncio.timeout(HANG_S):
                room = await self._greet()
        except (HttpError, LookupError, TypeError) as error:
            raise ValueError(
                f"{self.url} lacks what a run needs (see docs/engines.md): {error!r}"
            ) from error
        except OSError as error:
            raise self._lost(life, str(error) or f"it did not answer for {HANG_S:g} s") from error
        if room < self._max_context:
            raise ValueError(
                f"max_context={self._max_context}, but {self.url} was started with {room}"
            )
        await self._pause(keep=False)

    async def sample(self, tokens: Sequence[int], params: SamplingParams) -> Reply:
        self._check_request(tokens, params)
        life = self._living()
        while not life.open.is_set():
            await self._or_end(life, life.open.wait())
        name, version = next(self._names), self._version
        life.begin(name)
        try:
            answer = await self._or_end(life, self._generate(name, tokens, params))
        finally:
            life.finish(name)
        piece = self._piece(answer, params, version)
        clean = life.count(tokens, piece.tokens, cached=answer.cached)
        return Reply(replace(piece, clean=clean), _STOPS[answer.reason])

    async def interrupt(self) -> None:
        life = self._living()
        life.open.clear()
        await self._pause(keep=self._keep_cache)
        try:
            async with asyncio.timeout(HANG_S):
                while life.pending:  # such as reached the server after the pause
                    await self._abort([*life.pending])
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.05):
                            await life.quiet.wait()
        except TimeoutError:
            raise self._lost(
                life, f"{len(life.pending)} aborted replies did not come back"
            ) from None

    async def load(self, update: Update, version: int) -> None:
        life = self._living()
        if version < 0:
            raise ValueError(f"version must be >= 0, got {version}")
        if life.open.is_set():
            raise RuntimeError(
                "load while sampling: interrupt first, so that no reply mixes two versions"
            )
        try:
            await asyncio.to_thread(self._hand, update, version)
            await self._pause(keep=self._keep_cache)
            await self._take(self._handed.folder, version)
            await self._probe(life, self._handed.weights, version)
        finally:
            if not self.takes_deltas:
                self._handed.close()
        self._version = version
        life.loaded()

    def _hand(self, update: Update, version: int) -> None:
        """Lay the weights out for the server, or change those that lie there."""
        if not isinstance(update, Delta):
            self._handed.put(self._reference.cast(update))
        elif not self.takes_deltas:
            raise ValueError(
                "this engine takes full weights: it keeps none that a delta could change"
            )
        else:
            update.check_way(self._version, version)
            self._handed.advance(update)

    async def resume(self) -> None:
        life = self._living()
        if self._version < 0:
            raise RuntimeError("resume before the first load: there are no weights to sample from")
        await self._open()
        life.open.set()

    async def close(self) -> None:
        """End a server that was started here, and wait for it."""
        if self._life is not None:
            self._life.end("the engine is closed")
        self._handed.close()
        if self._server is not None:
            await asyncio.to_thread(self._server.close)

    def metrics(self) -> Mapping[str, float]:
        """Counters since the last call. Re-prefilling is charged the share of its tokens in the time of all."""
        return self._life.metrics() if self._life is not None else {}

    @property
    def pid(self) -> int:
        """The server that was started here, and its group of processes."""
        if self._server is None:
            raise RuntimeError(f"{self.url} is somebody else's process")
        return self._server.pid

    def _check_request(self, tokens: Sequence[int], params: SamplingParams) -> None:
        check_request(
            tokens, params, max_context=self._max_context, vocab_size=self._reference.vocab_size
        )
        if 0 < params.temperature < self._MIN_TEMPERATURE:
            raise ValueError(
                f"{self._NAME} samples at a temperature of {self._MIN_TEMPERATURE} or more, got {params.temperature}"
            )

    def _room(self, tokens: Sequence[int], params: SamplingParams) -> int:
        return min(params.max_tokens, self._max_context - len(tokens))

    async def _generate(self, name: str, tokens: Sequence[int], params: SamplingParams) -> Answer:
        """Raises ValueError for what the server refuses."""
        try:
            said = await self._http.call(
                "POST", self._GENERATE, self._request(name, tokens, params)
            )
        except HttpError as error:
            raise (ValueError(str(error)) if error.status in (400, 422) else error) from error
        with _readable():
            answer = self._answer(said)
            _ = _STOPS[answer.reason]
        return answer

    def _piece(self, answer: Answer, params: SamplingParams, version: int) -> Sampled:
        """What was sampled. Its stamps are the server's, and all of them `version`."""
        tokens, stamps = answer.tokens, answer.stamps
        if tokens and not (
            stamps and stamps[-1][1] == len(tokens) and {one for one, _ in stamps} == {str(version)}
        ):
            raise self._lost(
                self._living(),
                f"{len(tokens)} tokens of version {version} are stamped {stamps} by it",
            )
        sound = all(_NO_LOGP < logp < _NOISE for _, logp in answer.said)
        if not sound or [one for one, _ in answer.said] != list(tokens):
            raise self._lost(self._living(), "the server sampled tokens without a log-probability")
        point_mass = params.temperature == 0
        return Sampled(
            tokens, tuple(0.0 if point_mass else min(0.0, logp) for _, logp in answer.said), version
        )

    async def _probe(self, life: "_Life", weights: Mapping[str, Tensor], version: int) -> None:
        """Let the server say something, and hold it against the trainer's program. Raises `ProbeFailed`."""
        noise = torch.Generator().manual_seed(version)
        room = min(_PROBE_PROMPT, self._max_context - 1)
        prompt = torch.randint(self._reference.vocab_size, (room,), generator=noise).tolist()
        try:
            async with asyncio.timeout(LOAD_S):
                answer = await self._or_end(life, self._generate(next(self._names), prompt, _PROBE))
        except TimeoutError:
            raise self._lost(life, f"it said nothing within {LOAD_S:g} s") from None
        piece = self._piece(answer, _PROBE, version)
        tokens = [*prompt, *piece.tokens]
        logps = await asyncio.to_thread(
            self._reference.logps, weights, tokens, temperature=_PROBE.temperature
        )
        error = (logps[room - 1 :] - torch.tensor(piece.behavior_logp)).abs()
        if not piece.tokens:
            raise self._lost(life, "it was asked for a few tokens, and said none")
        if not error.mean() <= TOLERANCE[self._dtype]:
            message = (
                f"after loading version {version}, the log-probabilities of {len(error)} tokens are off by "
                f"{error.mean():.2g} in the mean, {error.max():.2g} at most, and {TOLERANCE[self._dtype]:g} is float "
                "noise: the server does not hold the weights that it was given, or leaves out the temperature"
            )
            raise ProbeFailed(str(self._lost(life, message)))
        life.worst = max(life.worst, float(error.mean()))

    async def _reach(self, life: "_Life") -> None:
        """Wait until a server that was started here answers, or another's that has answered before."""
        patience_s = LOAD_S if self._server is not None else HANG_S
        try:
            async with asyncio.timeout(patience_s):
                while True:
                    try:
                        await self._http.call("GET", self._HEALTH)
                        self._reached = True
                        return
                    except OSError as error:
                        if not (self._server.lives if self._server is not None else self._reached):
                            raise self._lost(life, str(error)) from error
                        await asyncio.sleep(0.1)
        except TimeoutError:
            raise self._lost(life, f"it was not ready within {patience_s:g} s") from None

    async def _tell(
        self, path: str, body: Any = None, *, timeout_s: float = 0.0, again: str = ""
    ) -> None:
        """Raises `EngineDied` if the server does not do it, by `HANG_S` unless it may take longer.

        Refused with the words `again`, it is told again.
        """
        life = self._living()
        try:
            async with asyncio.timeout(timeout_s or HANG_S):
                await self._or_end(life, self._post(path, body, again))
        except TimeoutError:
            raise self._lost(
                life, f"it did not answer {path} within {timeout_s or HANG_S:g} s"
            ) from None

    async def _post(self, path: str, body: Any, again: str) -> None:
        while True:
            try:
                await self._http.call("POST", path, body)
            except HttpError as error:
                if not again or again not in str(error):
                    raise
                await asyncio.sleep(0.05)
            else:
                return

    def _living(self) -> "_Life":
        if self._life is None:
            raise RuntimeError("the engine has not been started: await start() first")
        if self._life.error:
            raise EngineDied(self._life.error)
        return self._life

    async def _or_end(self, life: "_Life", awaitable: Awaitable[_T]) -> _T:
        """Wait for it for as long as the server works. Raises `EngineDied`."""
        task = asyncio.ensure_future(awaitable)
        try:
            while not task.done():
                await asyncio.wait(
                    (task, life.ended), timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED
                )
                if life.error:
                    raise EngineDied(life.error)
                if not task.done() and life.pending:
                    await self._look(life)
            return task.result()
        except OSError as error:
            raise self._lost(life, str(error)) from error
        finally:
            task.cancel()
            await asyncio.wait((task,))
            _ = task.cancelled() or task.exception()

    async def _look(self, life: "_Life") -> None:
        """Ask the engine behind the server what it holds: one that hangs cannot say."""
        if time.monotonic() < life.looked + LOOK_S:
            return
        life.looked = time.monotonic()
        try:
            async with asyncio.timeout(HANG_S):
                with _readable():
                    held = await self._held()
        except TimeoutError:
            raise self._lost(life, f"its engine did not answer for {HANG_S:g} s") from None
        if life.pending and held != str(self._version):
            raise self._lost(
                life, f"it holds version {held} by its own record, and was given {self._version}"
            )

    def _lost(self, life: "_Life", error: str) -> EngineDied:
        """The server can no longer be worked with: everybody who waits gets to know, and a process of ours ends."""
        if life.error:  # long known: what was begun since is not meant
            return EngineDied(life.error)
        words = ""
        if self._server is not None:
            words = f"; {self._server.last_words()}" if not self._server.lives else ""
            self._server.condemn()
        life.end(f"{self._NAME} at {self.url}: {error}{words}")
        return EngineDied(life.error)


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """An answer of another form than it should have is a failure of the server."""
    try:
        yield
    except (LookupError, TypeError, ValueError) as error:
        raise ConnectionError(f"its answer cannot be read: {error!r}") from error


class _Life:
    """From one start to the next: who waits, why it ended, what was counted. `keeps`: caches outlive their weights."""

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self.error = ""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.open = asyncio.Event()
        """Set while the engine samples."""
        self.pending: set[str] = set()
        self.quiet = asyncio.Event()
        self.looked = 0.0
        self.worst = 0.0
        """Of the probes' mean errors."""
        self._known, self._dropped = CachedPrefixes(), CachedPrefixes()
        """Contexts that were computed under these weights, and under those before (of kept caches: all before)."""
        self._since = self._busy_since = time.monotonic()
        self._busy_s = 0.0
        self._sampled = self._prefilled = self._again = 0

    def end(self, error: str) -> None:
        self.error = self.error or error
        if not self.ended.done():
            self.ended.set_result(None)

    def begin(self, name: str) -> None:
        if not self.pending:
            self._busy_since = time.monotonic()
        self.pending.add(name)
        self.quiet.clear()

    def finish(self, name: str) -> None:
        self.pending.discard(name)
        if not self.pending:
            self._busy_s += time.monotonic() - self._busy_since
            self.quiet.set()

    def loaded(self) -> None:
        if self._keeps:
            self._known.update(self._dropped)
        self._known, self._dropped = CachedPrefixes(), self._known

    def count(self, context: Sequence[int], reply: Sequence[int], *, cached: int) -> bool:
        """What was sampled, and what was computed for it a second time. Whether all of that was under these weights.

        Of a reply without a token nobody knows whether anything was computed for it.
        """
        if not reply:
            return True
        self._sampled += len(reply)
        self._prefilled += len(context) - cached
        known, before = self._known.length(context), self._dropped.length(context)
        self._again += max(0, before - max(cached, known))
        clean = not self._keeps or cached <= known
        if clean and (
            not self._keeps or before <= cached
        ):  # else the server may find the older ones next time
            self._known.add([*context, *reply])
        return clean

    def metrics(self) -> dict[str, float]:
        now = time.monotonic()
        if self.pending:
            self._busy_s, self._busy_since = self._busy_s + now - self._busy_since, now
        elapsed, busy_s = now - self._since, self._busy_s
        share = self._again / max(1, self._sampled + self._prefilled)
        counted = {
            "sampled_tokens": float(self._sampled),
            "prefill_tokens": float(self._prefilled),
            "reprefill_tokens": float(self._again),
            "reprefill_s": busy_s * share,
            "busy_s": busy_s,
            "idle_s": max(0.0, elapsed - busy_s),
            "probe_logp_error": self.worst,
        }
        self._since, self._busy_s, self.worst = now, 0.0, 0.0
        self._sampled = self._prefilled = self._again = 0
        return counted
