"""vLLM behind its HTTP API: a server that is started here, or one that runs already on this host.

The server stamps every token with the version of the weights that sampled it, and the stamp has to be the version that
was loaded. After every load it says a few tokens, whose log-probabilities have to be those of the trainer's program
under the same weights. See docs/engines.md.
"""

import asyncio
import contextlib
import itertools
import secrets
import tempfile
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from afterimage.adapters import Merging
from afterimage.engines import EngineDied, Reply, ReplyStop, SamplingParams, Update, require_full_support
from afterimage.engines.http import Http, HttpError
from afterimage.engines.prefixes import Prefixes
from afterimage.engines.reference import Reference
from afterimage.engines.runner import DTYPES
from afterimage.engines.vllm_server import EXTENSION, Server
from afterimage.trajectory import Sampled
from afterimage.versions import Delta

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
_MIN_TEMPERATURE = 0.01
"""Below it vLLM samples at this temperature, and says so only in its log."""
_NO_LOGP = -9999.0
_STOPS: dict[str, ReplyStop] = {"stop": "stop", "length": "length", "abort": "interrupted"}
_T = TypeVar("_T")


class ProbeFailed(EngineDied):
    """The server's log-probabilities are not those of the weights that it was given: it is not to sample."""


class VllmEngine:
    """`Engine` on one vLLM server.

    Without a `url` the server is a process of this engine, and ends with it. With one it is somebody's who started it
    as docs/engines.md says, on this host: weights travel through a file in memory. `extension` is mixed into the
    workers of a server that is started here.

    A reply that goes on after an interruption is another draw from the same policy: vLLM's noise is not keyed by
    position. Its seed is made of `seed` and the length of the context, so that no noise is used twice. With
    `keep_cache` the server goes on with what it computed under older weights; what is sampled over it is not clean.
    With `merging` it is given adapters, and the server merges them into the weights of its own folder.
    """

    takes_deltas = False

    def __init__(  # noqa: PLR0913 - one for each knob of EngineConfig that the server needs
        self,
        model_folder: Path,
        *,
        dtype: Literal["bfloat16", "float32"] = "bfloat16",
        threads: int = 1,
        max_running: int = 128,
        max_context: int = 2048,
        keep_cache: bool = False,
        url: str = "",
        extension: str = EXTENSION,
        merging: Merging | None = None,
    ) -> None:
        self._reference = Reference(model_folder, dtype=DTYPES[dtype], merging=merging)
        self._merging = merging and asdict(merging)
        if max_context > (self._reference.max_tokens or max_context):
            raise ValueError(
                f"max_context={max_context} is more than the model's {self._reference.max_tokens} positions"
            )
        self._dtype = dtype
        self._max_context = max_context
        self._keep_cache = keep_cache
        self._pause = f"/pause?mode=abort&clear_cache={'false' if keep_cache else 'true'}"
        self._server: Server | None = None
        if not url:
            self._server = Server(model_folder, dtype=dtype, threads=threads, extension=extension)
            self._server.limit(running=max_running, context=max_context)
        self.url = self._server.url if self._server is not None else url
        self._http = Http(self.url)
        self._names = (f"{secrets.token_hex(4)}-{number}" for number in itertools.count())
        self._life: _Life | None = None
        self._version = -1
        """What the server holds, and has shown to hold."""

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
            (model,) = (await self._http.call("GET", "/v1/models"))["data"]
            await self._http.call("GET", "/weight_info")
        except HttpError as error:
            raise ValueError(f"{self.url} lacks what a run needs (see docs/engines.md): {error}") from error
        except OSError as error:
            raise self._lost(life, str(error)) from error
        if model["max_model_len"] < self._max_context:
            raise ValueError(
                f"max_context={self._max_context}, but {self.url} was started with {model['max_model_len']}"
            )
        await self._tell("/pause?mode=abort&clear_cache=true")

    async def sample(self, tokens: Sequence[int], params: SamplingParams) -> Reply:
        self._check_request(tokens, params)
        life = self._living()
        while not life.open.is_set():
            await self._or_end(life, life.open.wait())
        name, version = next(self._names), self._version
        life.begin(name)
        try:
            choice = await self._or_end(life, self._generate(name, tokens, params))
        finally:
            life.finish(name)
        piece = self._piece(choice, params, version)
        clean = life.count(tokens, piece.tokens, cached=choice["cached"])
        return Reply(replace(piece, clean=clean), _STOPS[choice["finish_reason"]])

    async def interrupt(self) -> None:
        life = self._living()
        life.open.clear()
        await self._tell(self._pause)
        try:
            async with asyncio.timeout(HANG_S):
                while life.pending:  # such as reached the server after the pause: they wait there
                    names = [f"generate-tokens-{name}" for name in life.pending]
                    await self._tell("/abort_requests", {"request_ids": names})
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.05):
                            await life.quiet.wait()
        except TimeoutError:
            raise self._lost(life, f"{len(life.pending)} aborted replies did not come back") from None

    async def load(self, update: Update, version: int) -> None:
        life = self._living()
        if isinstance(update, Delta):
            raise ValueError("this engine takes full weights: it has none that a delta could change")
        if version < 0:
            raise ValueError(f"version must be >= 0, got {version}")
        if life.open.is_set():
            raise RuntimeError("load while sampling: interrupt first, so that no reply mixes two versions")
        weights = self._reference.cast(update)
        await self._tell(self._pause)
        with tempfile.TemporaryDirectory(prefix="afterimage-", dir=_MEMORY) as folder:
            path = Path(folder) / "weights.safetensors"
            given = update if self._merging else weights
            await asyncio.to_thread(save_file, {name: tensor.cpu() for name, tensor in given.items()}, path)
            call = {"method": "afterimage_load", "args": [str(path), self._merging]}
            await self._tell("/collective_rpc", call, timeout_s=LOAD_S)
        await self._tell("/update_weight_version", {"new_version": str(version)})
        await self._tell("/resume")
        await self._probe(life, weights, version)
        self._version = version
        life.loaded()

    async def resume(self) -> None:
        life = self._living()
        if self._version < 0:
            raise RuntimeError("resume before the first load: there are no weights to sample from")
        await self._tell("/resume")
        life.open.set()

    async def close(self) -> None:
        """End a server that was started here, and wait for it."""
        if self._life is not None:
            self._life.end("the engine is closed")
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
        require_full_support(params)
        if not tokens:
            raise ValueError("nothing to continue: sample needs at least one token")
        if len(tokens) >= self._max_context:
            raise ValueError(f"{len(tokens)} tokens leave no room for a reply; raise max_context={self._max_context}")
        if 0 < params.temperature < _MIN_TEMPERATURE:
            raise ValueError(f"vLLM samples at a temperature of {_MIN_TEMPERATURE} or more, got {params.temperature}")
        ids = (*tokens, *params.stop_tokens)
        if not 0 <= min(ids) <= max(ids) < self._reference.vocab_size:
            raise ValueError(
                f"token ids from {min(ids)} to {max(ids)}, but the model has 0 to {self._reference.vocab_size - 1}; "
                "do tokenizer and model belong together?"
            )

    async def _generate(self, name: str, tokens: Sequence[int], params: SamplingParams) -> dict[str, Any]:
        """The server's one choice, and how many tokens of the context it had cached."""
        sampling = {
            "max_tokens": min(params.max_tokens, self._max_context - len(tokens)),
            "stop_token_ids": list(params.stop_tokens),
            "ignore_eos": True,
            "temperature": params.temperature,
            "seed": hash((params.seed, len(tokens))) & (2**63 - 1),
            "logprobs": 0,
            "detokenize": False,
        }
        body = {"request_id": name, "token_ids": list(tokens), "sampling_params": sampling}
        try:
            answer = await self._http.call("POST", "/inference/v1/generate", body)
        except HttpError as error:
            raise (ValueError(str(error)) if error.status in (400, 422) else error) from error
        details = answer["usage"].get("prompt_tokens_details") or {}
        return {**answer["choices"][0], "cached": details.get("cached_tokens") or 0}

    def _piece(self, choice: Mapping[str, Any], params: SamplingParams, version: int) -> Sampled:
        """What was sampled. Its stamps are the server's, and all of them `version`."""
        tokens = tuple(choice["token_ids"])
        said = choice["logprobs"]["content"] or []
        stamps = {span["version"] for span in choice["weight_versions"] or []}
        if stamps != ({str(version)} if tokens else set()):
            raise self._lost(self._living(), f"tokens of version {version} are stamped {sorted(stamps)} by the server")
        if [one["token_id"] for one in said] != list(tokens) or any(one["logprob"] <= _NO_LOGP for one in said):
            raise self._lost(self._living(), "the server sampled tokens without a log-probability")
        point_mass = params.temperature == 0
        return Sampled(tokens, tuple(0.0 if point_mass else min(0.0, one["logprob"]) for one in said), version)

    async def _probe(self, life: "_Life", weights: Mapping[str, Tensor], version: int) -> None:
        """Let the server say something, and hold it against the trainer's program. Raises `ProbeFailed`."""
        noise = torch.Generator().manual_seed(version)
        room = min(_PROBE_PROMPT, self._max_context - 1)
        prompt = torch.randint(self._reference.vocab_size, (room,), generator=noise).tolist()
        try:
            async with asyncio.timeout(LOAD_S):
                choice = await self._or_end(life, self._generate(next(self._names), prompt, _PROBE))
        except TimeoutError:
            raise self._lost(life, f"it said nothing within {LOAD_S:g} s") from None
        piece = self._piece(choice, _PROBE, version)
        tokens = [*prompt, *piece.tokens]
        logps = await asyncio.to_thread(self._reference.logps, weights, tokens, temperature=_PROBE.temperature)
        error = (logps[room - 1 :] - torch.tensor(piece.behavior_logp)).abs()
        if not error.mean() <= TOLERANCE[self._dtype]:
            message = (
                f"after loading version {version}, the log-probabilities of {len(error)} tokens are off by "
                f"{error.mean():.2g} in the mean, {error.max():.2g} at most, and {TOLERANCE[self._dtype]:g} is float "
                "noise: the server does not hold the weights that it was given, or leaves out the temperature"
            )
            raise ProbeFailed(str(self._lost(life, message)))
        life.worst = max(life.worst, float(error.mean()))

    async def _reach(self, life: "_Life") -> None:
        """Wait until a server that was started here answers; another's has to."""
        try:
            async with asyncio.timeout(LOAD_S):
                while True:
                    try:
                        return await self._http.call("GET", "/health")
                    except OSError as error:
                        if self._server is None or not self._server.lives:
                            raise self._lost(life, str(error)) from error
                        await asyncio.sleep(0.1)
        except TimeoutError:
            raise self._lost(life, f"it was not ready within {LOAD_S:g} s") from None

    async def _tell(self, path: str, body: Any = None, *, timeout_s: float = 0.0) -> None:
        """Raises `EngineDied` if the server does not do it, by `HANG_S` unless it may take longer."""
        life = self._living()
        try:
            async with asyncio.timeout(timeout_s or HANG_S):
                await self._or_end(life, self._http.call("POST", path, body))
        except TimeoutError:
            raise self._lost(life, f"it did not answer {path} within {timeout_s or HANG_S:g} s") from None

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
                await asyncio.wait((task, life.ended), timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
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
                held = (await self._http.call("GET", "/weight_info"))["weight_version"]
        except TimeoutError:
            raise self._lost(life, f"its engine did not answer for {HANG_S:g} s") from None
        if life.pending and held != str(self._version):
            raise self._lost(life, f"it holds version {held} by its own record, and was given {self._version}")

    def _lost(self, life: "_Life", error: str) -> EngineDied:
        """The server can no longer be worked with: everybody who waits gets to know, and a process of ours ends."""
        words = ""
        if self._server is not None:
            words = f"; {self._server.last_words()}" if not self._server.lives else ""
            self._server.condemn()
        life.end(f"vLLM at {self.url}: {error}{words}")
        return EngineDied(life.error)


_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


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
        self._known, self._dropped = Prefixes(), Prefixes()
        """Contexts that were computed under these weights, and under those before."""
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
        self._known, self._dropped = Prefixes(), self._known

    def count(self, context: Sequence[int], reply: Sequence[int], *, cached: int) -> bool:
        """What was sampled, and what was computed for it a second time. Whether all of that was under these weights."""
        self._sampled += len(reply)
        self._prefilled += len(context) - cached
        known = self._known.length(context)
        self._again += max(0, self._dropped.length(context) - max(cached, known))
        if clean := not self._keeps or cached <= known:
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
            "probe_error": self.worst,
        }
        self._since, self._busy_s, self.worst = now, 0.0, 0.0
        self._sampled = self._prefilled = self._again = 0
        return counted
