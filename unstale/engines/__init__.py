"""The engine interface: tokens in, sampled tokens out with their log-probability and version."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar

from unstale.records import Sampled
from unstale.weights.store import Delta
from unstale.weights.store import Update as Update

NOT_STARTED = "the engine has not been started: await start() first"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of one reply.

    The random number of a token depends only on `seed` and the token's position in its sequence. So
    a reply that an interruption splits into two calls of `sample` gets the same tokens as a whole
    one.
    """

    max_tokens: int
    stop_tokens: tuple[int, ...]
    """A reply ends with the first of these tokens. It belongs to the reply, as it was sampled."""
    temperature: float = 1.0
    """0 is greedy: the most probable token is certain, so every log-probability is 0."""
    seed: int = 0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be >= 0 (0 is greedy), got {self.temperature}")


def check_request(
    tokens: Sequence[int],
    params: SamplingParams,
    *,
    max_context: int = 1 << 62,
    vocab_size: int = 0,
) -> None:
    """Raise ValueError for a request that no engine can serve. A `vocab_size` of 0 is unknown.

    >>> params = SamplingParams(max_tokens=8, stop_tokens=(9,))
    >>> check_request([5, 6], params, max_context=16, vocab_size=8)
    Traceback (most recent call last):
    ValueError: token ids from 5 to 9, but the model has 0 to 7; does the tokenizer fit the model?
    """
    if params.top_p < 1 or params.top_k > 0:
        raise ValueError(
            f"top_p={params.top_p}, top_k={params.top_k} truncate the support: the trainer's "
            "softmax has full support, so every importance ratio would be biased. "
            "Use top_p=1 and top_k=0; any temperature is allowed"
        )
    if not tokens:
        raise ValueError("the context is empty: sample needs at least one token")
    if len(tokens) >= max_context:
        raise ValueError(
            f"{len(tokens)} tokens leave no space for a reply; raise max_context={max_context}"
        )
    ids = (*tokens, *params.stop_tokens)
    if vocab_size and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(
            f"token ids from {min(ids)} to {max(ids)}, but the model has 0 to {vocab_size - 1}; "
            "does the tokenizer fit the model?"
        )


def check_load(update: Update, version: int, current: int, *, sampling: bool, deltas: bool) -> None:
    """Raise the errors of `Engine.load` that do not depend on names and shapes.

    `current` is the version that the engine holds, -1 before the first. `sampling` and `deltas` are
    true if it samples, and if it accepts a `Delta`.
    """
    if version < 0:
        raise ValueError(f"version must be >= 0, got {version}")
    if sampling:
        raise RuntimeError("load while sampling would mix two versions: interrupt first")
    if isinstance(update, Delta):
        if not deltas:
            raise ValueError("this engine takes full weights: make it with deltas=True")
        update.check_way(current, version)


def check_resume(current: int) -> None:
    """Raise RuntimeError for an engine without weights, whose version `current` is -1."""
    if current < 0:
        raise RuntimeError("resume before the first load: there are no weights to sample from")


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """The settings of one reply that differ from the run's defaults."""

    max_tokens: int = 1 << 30
    chunk: int = 1 << 30
    """Tokens sampled between two checks for the end of the reply."""
    find_end: Callable[[Sequence[int]], int | None] = lambda tokens: None
    """Returns the length of a reply that ends within these tokens, None if it does not end."""

    def is_over(self, tokens: Sequence[int]) -> bool:
        return self.find_end(tokens) is not None

    def cut(self, before: Sequence[int], piece: Sampled) -> Sampled:
        """Cut sampled tokens where the reply ends. `before` are the reply's earlier tokens."""
        length = self.find_end((*before, *piece.tokens))
        if length is None:
            return piece
        kept = length - len(before)
        return replace(piece, tokens=piece.tokens[:kept], behavior_logp=piece.behavior_logp[:kept])


DEFAULT_OPTIONS = GenerationOptions()

ReplyStop = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True, slots=True)
class Reply:
    """The tokens that one call of `sample` returns, all of one version, and why they ended.

    An interrupted reply may have no tokens.
    """

    piece: Sampled
    stop: ReplyStop


REQUIRED_COUNTERS = ("sampled_tokens", "reprefill_tokens", "reprefill_s", "busy_s", "idle_s")
"""The counters of every engine: tokens sampled, work repeated after weight updates, and time in
seconds.
"""


def rates(counters: Mapping[str, float]) -> dict[str, float]:
    """Return an engine's counters as metrics, with its throughput and busy share.

    >>> rates({"sampled_tokens": 30, "busy_s": 1.0, "idle_s": 2.0})["engine/sampled_tokens_per_s"]
    10.0
    """
    elapsed = counters["busy_s"] + counters["idle_s"] or 1.0
    per_time = {
        "sampled_tokens_per_s": counters["sampled_tokens"] / elapsed,
        "busy_share": counters["busy_s"] / elapsed,
    }
    return {f"engine/{name}": value for name, value in {**counters, **per_time}.items()}


class Stopwatch:
    """A sum of seconds for each named activity. Concurrent activities all count."""

    def __init__(self, *names: str) -> None:
        self._spent = dict.fromkeys(names, 0.0)

    async def on(self, name: str, work: Awaitable[_T]) -> _T:
        """Await the work and add its time to `name`."""
        start = time.monotonic()
        try:
            return await work
        finally:
            self.add(name, time.monotonic() - start)

    def add(self, name: str, seconds: float) -> None:
        self._spent[name] += seconds

    def read(self, component: str) -> dict[str, float]:
        """Return the seconds of each activity as metrics `component/name_s`, and reset them."""
        spent = self._spent
        self._spent = dict.fromkeys(spent, 0.0)
        return {f"{component}/{name}_s": seconds for name, seconds in spent.items()}


class EngineDied(RuntimeError):
    """A failure that ended the engine. Its `start` makes it usable again, without weights."""


class GenerationControl(Protocol):
    """The part of an `Engine` that the training loop calls."""

    async def start(self) -> None:
        """Start the engine, or start it again. `sample` then waits for `load` and `resume`.

        A second start drops weights, caches and counters, and pending samples raise `EngineDied`.
        """

    async def interrupt(self) -> None:
        """Make every pending `sample` return its tokens so far, and wait until all have returned.

        Later calls of `sample` wait for `resume`.
        """

    async def close(self) -> None:
        """Release all resources. Pending samples raise `EngineDied`."""

    def metrics(self) -> Mapping[str, float]:
        """Return the counters since the last call, at least `REQUIRED_COUNTERS`."""
        ...


class Engine(GenerationControl, Protocol):
    """A sampler: tokens in, tokens out, never re-tokenised.

    Every returned token has one log-probability in nats, of the distribution that was sampled,
    temperature included. The engine stamps each token with the version of the weights that sampled
    it, under the lock that guards weight changes.
    """

    takes_deltas: bool
    """`load` accepts a `Delta` from the current version."""

    async def sample(self, tokens: Sequence[int], params: SamplingParams) -> Reply:
        """Sample tokens after `tokens`. Waits while the engine is interrupted.

        Raises `EngineDied` if the engine ends before the reply does.
        """
        ...

    async def load(self, update: Update, version: int) -> None:
        """Load the weights of `version`. Call it only between `interrupt` and `resume`.

        Raises ValueError, changing nothing, for weights that do not fit or a delta of another
        version.
        """

    async def resume(self) -> None:
        """Sample again, with the weights loaded last."""
