"""The interface of engines.

An engine samples tokens. It returns them with their log-probabilities and the version of the
weights that sampled them.
"""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from torch import Tensor

from unstale.engines.prefixes import EpisodeTokens
from unstale.kept_sets import Truncation
from unstale.pictures import FIRST
from unstale.records import Sampled
from unstale.weights.store import Delta
from unstale.weights.store import Update as Update

NOT_STARTED = "the engine has not been started: await start() first"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of one reply.

    The random number with which a token is drawn depends only on `seed` and on the token's position
    in its sequence. So a reply that is interrupted, and continued by another call of `sample`, gets
    the same tokens as an uninterrupted one.
    """

    max_tokens: int
    stop_tokens: tuple[int, ...]
    """Tokens that end a reply. The one that ends it is part of the reply."""
    temperature: float = 1.0
    """Temperature of the softmax. 0 is greedy sampling: the most probable token is always taken,
    and every log-probability is 0.
    """
    seed: int = 0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    return_sets: bool = True
    """False if no kept sets are needed, as in evaluations. Then truncation is also allowed with an
    engine that returns none, and its log-probabilities may be over the whole vocabulary.
    """
    known_experts: tuple[int, int] = (-1, 0)
    """`(version, rows)`: the caller already has the experts that the MoE model of this version
    chose for the first `rows` tokens of the sequence. A reply of this version then lists experts
    only for later tokens. `(-1, 0)`: the caller has none.
    """
    sampled: int = 0
    """Number of tokens of this reply that earlier requests returned. It is above 0 if the reply was
    interrupted, or if it is requested in parts.
    """
    version: int = -1
    """Version of the LoRA adapters that must sample the reply (`VersionedEngine` only). -1 means
    the version that was loaded last.
    """
    remaining: int = 0
    """Largest number of tokens that this request and later ones may add, if the caller requests the
    reply in parts of `max_tokens` each. 0 means that the reply is requested at once.
    """
    precise: bool = False
    """True if an engine without rounding must sample the reply. It is read only by a pool in which
    some engines round and others do not.
    """
    waits: bool = True
    """False if an engine that cannot begin the request at once must raise `Rejected`. Engines that
    cannot tell let the request wait.
    """
    scenario: str = ""
    """The name of the request's task set. A pool may have a group of engines for each."""
    signals: bool = False
    """True to return, for each token, the entropy and the two most probable tokens of the
    distribution from which it was drawn (`Signals`). They are computed at `temperature`, or at 1 if
    it is 0. Of the real engines, only the embedded one returns them.
    """

    @property
    def truncation(self) -> Truncation:
        """The limits `top_p`, `top_k` and `min_p` as one object.

        The object is false if no token is cut off. Otherwise a reply has, for each of its tokens,
        the set of tokens that were kept, unless `return_sets` is False.
        """
        return Truncation(self.top_p, self.top_k, self.min_p)

    @property
    def reply_limit(self) -> int:
        """The largest number of tokens that this request and later ones may add to the reply.

        It is `remaining` or `max_tokens`, whichever is larger.
        """
        return max(self.remaining, self.max_tokens)

    def first_routed(self, version: int) -> int:
        """Return the index in the sequence of the first token whose experts a reply must return.

        `version` is the version that samples the reply. The result is 0 unless the caller already
        has experts of this version (`known_experts`).
        """
        known, rows = self.known_experts
        return rows if known == version else 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be >= 0 (0 is greedy), got {self.temperature}")


def check_request(  # noqa: PLR0913 - the limits of an engine
    tokens: Sequence[int],
    params: SamplingParams,
    *,
    max_context: int = 1 << 62,
    vocab_size: int = 0,
    keeps_sets: bool = False,
    truncates: bool = False,
    measures: bool = False,
    versions: Collection[int] = (),
    pictures: bool = False,
) -> None:
    """Raise ValueError for a request that the engine cannot serve.

    The context `tokens` must not be empty and must be shorter than `max_context`. Token ids must be
    below `vocab_size` (0: not checked). With `pictures`, ids of pictures are also allowed.
    Truncation (`top_p`, `top_k`, `min_p`) is only allowed with `keeps_sets`: the engine returns the
    kept tokens. With `truncates`, requests without `return_sets` may truncate too. Signals are only
    allowed with `measures`: the engine computes them. `params.version` must be -1 or one of
    `versions`.

    >>> params = SamplingParams(max_tokens=8, stop_tokens=(9,))
    >>> check_request([5, 6], params, max_context=16, vocab_size=8)
    Traceback (most recent call last):
    ValueError: token ids from 5 to 9, but the model has 0 to 7; does the tokenizer fit the model?
    """
    if params.truncation and not params.return_sets and not (truncates or keeps_sets):
        raise ValueError(
            f"{params.truncation} was requested, but this engine samples only from the whole "
            "vocabulary"
        )
    if params.truncation and params.return_sets and not keeps_sets:
        raise ValueError(
            f"{params.truncation} would truncate the support, but this engine does not return "
            "the set of tokens that it kept, so every importance ratio would be biased. Sample "
            "from the whole vocabulary; any temperature is allowed"
        )
    if params.signals and not measures:
        raise ValueError("this engine returns no signals of a token's distribution")
    if params.version >= 0 and params.version not in versions:
        raise ValueError(
            f"version {params.version} was requested, but the engine has {sorted(versions)}"
        )
    if not tokens:
        raise ValueError("the context is empty: sample needs at least one token")
    if len(tokens) >= max_context:
        raise ValueError(
            f"{len(tokens)} tokens leave no space for a reply; raise max_context={max_context}"
        )
    if not vocab_size:
        return
    new = tokens.unchecked(vocab_size) if isinstance(tokens, EpisodeTokens) else tokens
    ids = [*new, *params.stop_tokens]
    if pictures:
        ids = [each for each in ids if each < FIRST]
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(
            f"token ids from {min(ids)} to {max(ids)}, but the model has 0 to {vocab_size - 1}; "
            "does the tokenizer fit the model?"
        )


def check_load(update: Update, version: int, current: int, *, sampling: bool, deltas: bool) -> None:
    """Raise the errors of `Engine.load` that do not depend on names and shapes of weights.

    `current` is the version of the engine's weights, -1 before the first load. Raises RuntimeError
    if `sampling` is True: the engine is not interrupted. Raises ValueError for a negative
    `version`. Also raises it for a delta if `deltas` is False (the engine accepts none), or if the
    delta does not lead from `current` to `version`.
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
    """Raise RuntimeError if the engine has no weights: if their version, `current`, is -1."""
    if current < 0:
        raise RuntimeError("the engine has no weights to sample from: load them before resume")


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """Limits of one reply: its number of tokens, and a test for its end."""

    max_tokens: int = 1 << 30
    chunk: int = 1 << 30
    """Number of tokens that are sampled between two calls of `find_end`."""
    find_end: Callable[[Sequence[int]], int | None] = lambda tokens: None
    """A function that gets the reply's tokens so far. It returns the length at which the reply
    ends, or None if it does not end within these tokens.
    """

    def is_over(self, tokens: Sequence[int]) -> bool:
        return self.find_end(tokens) is not None

    def cut(self, before: Sequence[int], piece: Sampled) -> Sampled:
        """Return the newly sampled tokens `piece`, cut where `find_end` ends the reply.

        `before` are the reply's earlier tokens. If the reply does not end, all of `piece` is
        returned.
        """
        length = self.find_end((*before, *piece.tokens))
        if length is None:
            return piece
        return piece.first(length - len(before))


DEFAULT_OPTIONS = GenerationOptions()

ReplyStop = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of one call of `Engine.sample`.

    `piece` has the tokens, which one version of the weights sampled. `stop` is "stop" after a stop
    token, "length" at a token limit, and "interrupted" after `interrupt` or the death of the
    engine. An interrupted reply may have no tokens.
    """

    piece: Sampled
    stop: ReplyStop
    first_token_s: float | None = field(default=None, compare=False)
    """Seconds from the call until the first token was sampled. None if there is none, or if the
    engine does not measure it.
    """


REQUIRED_COUNTERS = ("sampled_tokens", "reprefill_tokens", "reprefill_s", "busy_s", "idle_s")
"""The counters that every engine returns. `reprefill_tokens` is the number of context tokens that
were computed again because a weight update dropped them from the cache, and `reprefill_s` the
seconds that this took. `busy_s` and `idle_s` are the seconds with and without requests.
"""


def rates(counters: Mapping[str, float]) -> dict[str, float]:
    """Return an engine's counters as metrics, with its tokens per second and share of busy time.

    Names get the prefix `engine/`, unless they contain a slash, as `engine_0/version` does.

    >>> rates({"sampled_tokens": 30, "busy_s": 1.0, "idle_s": 2.0})["engine/sampled_tokens_per_s"]
    10.0
    """
    return {
        name if "/" in name else f"engine/{name}": value
        for name, value in {**counters, **per_second(counters)}.items()
    }


def per_second(counters: Mapping[str, float]) -> dict[str, float]:
    """Return two metrics of an engine with these counters.

    `sampled_tokens_per_s` is its number of sampled tokens per second, and `busy_share` its share of
    busy time, 0 to 1.
    """
    elapsed = counters["busy_s"] + counters["idle_s"] or 1.0
    return {
        "sampled_tokens_per_s": counters["sampled_tokens"] / elapsed,
        "busy_share": counters["busy_s"] / elapsed,
    }


class Stopwatch:
    """A record of the seconds spent on each of several named activities.

    If an activity runs several times at once, the seconds of all runs are added.
    """

    def __init__(self, *names: str) -> None:
        self._spent = dict.fromkeys(names, 0.0)
        self.running = Counter[str]()
        """Number of calls of `on` that are in progress, for each activity."""

    async def on(self, name: str, work: Awaitable[_T]) -> _T:
        """Await `work` and return its result. Add the seconds it took to the activity `name`."""
        start = time.monotonic()
        self.running[name] += 1
        try:
            return await work
        finally:
            self.running[name] -= 1
            self.add(name, time.monotonic() - start)

    def add(self, name: str, seconds: float) -> None:
        self._spent[name] += seconds

    def read(self, component: str) -> dict[str, float]:
        """Return the seconds of each activity since the last call, as metrics
        `component/activity_s`.
        """
        spent = self._spent
        self._spent = dict.fromkeys(spent, 0.0)
        return {f"{component}/{name}_s": seconds for name, seconds in spent.items()}


class EngineDied(RuntimeError):
    """Error: the engine has failed. `Engine.start` makes it usable again, but without weights."""


class GenerationControl(Protocol):
    """The methods of an `Engine` that the training loop calls."""

    async def start(self) -> None:
        """Start the engine, or start it again.

        Calls of `sample` then wait until `load` and `resume` were called. A second start discards
        weights, caches and counters. Calls of `sample` that are pending at that time raise
        `EngineDied`.
        """

    async def interrupt(self) -> None:
        """Make every pending call of `sample` return the tokens sampled so far.

        Wait until all calls have returned. Later calls of `sample` wait for `resume`.
        """

    async def close(self) -> None:
        """Stop the engine and free its resources. Pending calls of `sample` raise `EngineDied`."""

    def metrics(self) -> Mapping[str, float]:
        """Return the counters since the last call, at least those in `REQUIRED_COUNTERS`."""
        ...


class Engine(GenerationControl, Protocol):
    """An engine that samples replies. Contexts and replies are tokens, never text.

    Every returned token has a log-probability in nats, under the distribution from which it was
    sampled, temperature included. It also has the version of the weights that sampled it. The
    engine reads the version under the lock that guards changes of the weights.
    """

    takes_deltas: bool
    """True if `load` accepts a `Delta`, the difference from the engine's current version."""

    async def sample(self, tokens: Sequence[int], params: SamplingParams) -> Reply:
        """Sample tokens that follow `tokens`. While the engine is interrupted, wait for `resume`.

        Raises `EngineDied` if the engine dies before the reply is complete, ValueError for a
        request that the engine cannot serve (`check_request`), and RuntimeError if the engine was
        never started.
        """
        ...

    async def stage(self, update: Update, version: int) -> None:
        """Prepare a later `load` of the same update while the engine samples.

        The engine's weights and version do not change. Calling `stage` is optional: without it,
        `load` does all of the work. Raises ValueError like `load`.
        """

    async def load(self, update: Update, version: int) -> None:
        """Load the weights of `version`. Must be called between `interrupt` and `resume`.

        Raises ValueError, and changes nothing, if names or shapes of the weights do not fit the
        model, or if `update` is a delta from another version than the engine's.
        """

    async def resume(self) -> None:
        """Let the engine sample again, with the weights that were loaded last."""


class Rejected(RuntimeError):
    """Error: the engine cannot begin a request at once, and the request must not wait there."""


class CacheNotSent(RuntimeError):
    """Error: the cache of a context did not arrive at another engine. No engine is harmed."""


class CacheEngine(Engine, Protocol):
    """An engine that can send the KV cache of a context to another engine of the same model.

    The cache goes directly from one engine's process to the other's, also between machines.
    """

    async def cache_address(self, tokens: Sequence[int]) -> str:
        """Return the address, host:port, to which another engine can send the cache of a
        context.
        """
        ...

    async def send_cache(self, tokens: Sequence[int], address: str) -> int:
        """Send keys and values of the longest cached beginning of a context to another engine.

        `address` is the other engine's `cache_address`. Return the number of tokens that it
        stored. It stores none of other weights. Raises `CacheNotSent` if the transfer fails.
        """
        ...


class VersionedEngine(Engine, Protocol):
    """An engine that holds LoRA adapters of several versions at once.

    The adapters are added to the outputs of layers, not merged into the weights. Every load adds a
    version. Requests of different versions are sampled in the same batch. A cached context is used
    only by requests of the version that computed it.
    """

    async def add_version(self, adapters: Mapping[str, Tensor], version: int) -> None:
        """Add adapters of a version that is older than the last loaded one.

        Allowed while the engine samples. Raises ValueError if the adapters do not fit the model.
        """

    async def keep_versions(self, versions: Collection[int]) -> None:
        """Drop adapters except those of `versions`, running requests, and the last loaded
        version.
        """
