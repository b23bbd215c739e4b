"""Engines sample. Tokens go in, tokens come out with the log-probability and the version they were sampled with."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar

from unstale.records import Sampled
from unstale.weights.store import Update as Update

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one reply.

    The noise of a token is keyed by `seed` and the token's absolute position in its sequence, so that a reply which
    continues in a second `sample` goes on with its own noise.
    """

    max_tokens: int
    stop_tokens: tuple[int, ...]
    """The reply ends with the first of these; it is part of the reply, for the policy chose it."""
    temperature: float = 1.0
    """0 is greedy: the distribution is then a point mass, and every log-probability is 0."""
    seed: int = 0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be >= 0 (0 is greedy), got {self.temperature}")


def require_full_support(params: SamplingParams) -> None:
    """Refuse sampling that cuts tokens off: their log-probability would be one that the trainer cannot reproduce.

    >>> require_full_support(SamplingParams(max_tokens=8, stop_tokens=(), temperature=0.7))
    """
    if params.top_p < 1 or params.top_k > 0:
        raise ValueError(
            f"top_p={params.top_p}, top_k={params.top_k} truncate the support: the reply would be sampled from a "
            "renormalised distribution that the trainer's softmax does not have, and every importance ratio would be "
            "biased. Use top_p=1 and top_k=0; the temperature is free"
        )


def check_request(
    tokens: Sequence[int], params: SamplingParams, *, max_context: int, vocab_size: int
) -> None:
    """Refuse what no engine can continue; with `vocab_size` 0 the model is not known yet.

    >>> check_request([5, 6], SamplingParams(max_tokens=8, stop_tokens=(9,)), max_context=16, vocab_size=8)
    Traceback (most recent call last):
    ValueError: token ids from 5 to 9, but the model has 0 to 7; do tokenizer and model belong together?
    """
    require_full_support(params)
    if not tokens:
        raise ValueError("nothing to continue: sample needs at least one token")
    if len(tokens) >= max_context:
        raise ValueError(
            f"{len(tokens)} tokens leave no room for a reply; raise max_context={max_context}"
        )
    ids = (*tokens, *params.stop_tokens)
    if vocab_size and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(
            f"token ids from {min(ids)} to {max(ids)}, but the model has 0 to {vocab_size - 1}; "
            "do tokenizer and model belong together?"
        )


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How one reply is asked for, where it is not as all others are."""

    max_tokens: int = 1 << 30
    chunk: int = 1 << 30
    """Tokens after which it is looked at."""
    find_end: Callable[[Sequence[int]], int | None] = lambda tokens: None
    """Gets all of its tokens so far; says how many of them it has, if it is to end there."""

    def is_over(self, said: Sequence[int]) -> bool:
        return self.find_end(said) is not None

    def cut(self, said: Sequence[int], piece: Sampled) -> Sampled:
        """What belongs to the reply of a piece that comes after `said`: where a reply ends depends on nothing later."""
        kept = self.find_end((*said, *piece.tokens))
        if kept is None:
            return piece
        kept -= len(said)
        return replace(piece, tokens=piece.tokens[:kept], behavior_logp=piece.behavior_logp[:kept])


DEFAULT_OPTIONS = GenerationOptions()

ReplyStop = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True, slots=True)
class Reply:
    """What `sample` returns: one piece of one version, and why it ended. An interrupted piece may be empty."""

    piece: Sampled
    stop: ReplyStop


REQUIRED_COUNTERS = ("sampled_tokens", "reprefill_tokens", "reprefill_s", "busy_s", "idle_s")
"""What every engine counts: tokens sampled, what weight updates made it compute again, and how its time went."""


def rates(counters: Mapping[str, float]) -> dict[str, float]:
    """An engine's counters as metrics, with its throughput and the share of the time that it worked.

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
    """Seconds by what they went to, of however many at once, all added up."""

    def __init__(self, *names: str) -> None:
        self._spent = dict.fromkeys(names, 0.0)

    async def on(self, name: str, work: Awaitable[_T]) -> _T:
        began = time.monotonic()
        try:
            return await work
        finally:
            self.add(name, time.monotonic() - began)

    def add(self, name: str, seconds: float) -> None:
        self._spent[name] += seconds

    def read(self, room: str) -> dict[str, float]:
        """As metrics of a room, and from 0 again."""
        spent, self._spent = self._spent, dict.fromkeys(self._spent, 0.0)
        return {f"{room}/{name}_s": seconds for name, seconds in spent.items()}


class EngineDied(RuntimeError):
    """The engine can no longer sample: the machinery failed. Only `start` brings it back, without what it held."""


class Engine(Protocol):
    """Tokens in, tokens out, never re-tokenised.

    Every returned token has one log-probability, under the distribution really sampled (temperature included). The
    version is stamped inside the engine under the lock that guards weight changes.
    """

    takes_deltas: bool
    """Whether `load` takes a `Delta` from the version that the engine holds."""

    async def start(self) -> None:
        """Bring the engine up, again too. Until `load` and `resume`, `sample` waits.

        Nothing of an earlier life is left: neither weights nor caches nor counters, and who waits gets `EngineDied`.
        """
        ...

    async def sample(self, tokens: Sequence[int], params: SamplingParams) -> Reply:
        """Continue `tokens`. Waits while the engine is interrupted. Raises `EngineDied`."""
        ...

    async def interrupt(self) -> None:
        """Make every pending `sample` return what it has, and return when all have. Later ones wait for `resume`."""
        ...

    async def load(self, update: Update, version: int) -> None:
        """Take these weights; tokens sampled from now on carry `version`. Only between `interrupt` and `resume`.

        ValueError for weights that do not fit, or a delta that does not lead to them; nothing is changed then.
        """
        ...

    async def resume(self) -> None:
        """Sample again."""
        ...

    async def close(self) -> None:
        """Give everything back. Pending samples end with `EngineDied`."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Counters since the last call: at least `REQUIRED_COUNTERS`."""
        ...


class GenerationControl(Protocol):
    """The part of an `Engine` that the loop calls."""

    async def start(self) -> None: ...

    async def interrupt(self) -> None: ...

    async def close(self) -> None: ...

    def metrics(self) -> Mapping[str, float]: ...
