"""Tests that every engine must pass, such as one that a user adds."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from unstale.durability import virtual_clock
from unstale.engines import REQUIRED_COUNTERS, Engine, EngineDied, Reply, SamplingParams

_TIMEOUT_S = 120.0
_LONG_REPLY = 1000
"""Number of tokens of a reply that takes so long that a short one ends before it."""


def check_engine(
    make: Callable[[], Engine], *, update: Mapping[str, Tensor], prompt: Sequence[int] = (1, 2, 3)
) -> None:
    """Test an engine. `make` returns a new one, and `update` is a full set of weights for it.

    Raise AssertionError with the probable mistake if the engine breaks its contract. Its context
    must have room for a thousand tokens after `prompt`. A reply of two tokens must end before one
    of a thousand tokens that started at the same time.
    """
    virtual_clock.run(_check_engine(make(), update, list(prompt)))


async def _check_engine(engine: Engine, update: Mapping[str, Tensor], prompt: list[int]) -> None:
    """Run all tests on one engine, because real engines take seconds to start.

    `_check_waiting` is first, because it needs an engine without weights.
    """
    current = "start"
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await engine.start()
            for check in (
                _check_waiting,
                _check_replies,
                _check_refusals,
                _check_interrupt,
                _check_restart,
                _check_close,
            ):
                current = check.__name__.removeprefix("_check_")
                await check(engine, update, prompt)
    except TimeoutError:
        raise AssertionError(
            f"{current}: not finished after {_TIMEOUT_S:g} s; is a caller never notified?"
        ) from None
    finally:
        await engine.close()


async def _publish(engine: Engine, update: Mapping[str, Tensor], version: int) -> None:
    await engine.interrupt()
    await engine.load(update, version)
    await engine.resume()


def _params(max_tokens: int, *, stop_tokens: tuple[int, ...] = ()) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, stop_tokens=stop_tokens, seed=7)


def _check_reply(reply: Reply, *, version: int) -> None:
    piece = reply.piece
    assert piece.version == version, (
        f"sampled under version {version}, tagged {piece.version}: "
        "is the version stamped where the weights change?"
    )
    assert all(math.isfinite(logp) and logp <= 0 for logp in piece.behavior_logp), (
        f"behavior_logp must be finite and <= 0, got {piece.behavior_logp}: "
        "are these logits or probabilities?"
    )


async def _check_replies(engine: Engine, update: Mapping[str, Tensor], prompt: list[int]) -> None:
    await _publish(engine, update, 3)
    reply = await engine.sample(prompt, _params(6))
    _check_reply(reply, version=3)
    tokens = reply.piece.tokens
    assert reply.stop == "length" and len(tokens) == 6, (
        f"max_tokens is 6 without stop tokens, got {len(tokens)} tokens and {reply.stop!r}: "
        "does something else end a reply?"
    )
    assert (await engine.sample(prompt, _params(6))).piece.tokens == tokens, (
        "the same seed and context gave another reply: "
        "noise must be keyed by (seed, position), not drawn from a stream"
    )
    missing = set(REQUIRED_COUNTERS) - engine.metrics().keys()
    assert not missing, f"metrics() lacks {sorted(missing)}: the loop and the report read them"
    first = tokens.index(tokens[3]) + 1
    reply = await engine.sample(prompt, _params(6, stop_tokens=(tokens[3],)))
    _check_reply(reply, version=3)
    assert reply.stop == "stop" and reply.piece.tokens == tokens[:first], (
        f"stop token {tokens[3]} should end {tokens} after {first} tokens with 'stop' "
        "and be part of the reply, "
        f"got {reply.piece.tokens} and {reply.stop!r}"
    )


async def _truncates(engine: Engine, prompt: list[int], params: SamplingParams) -> None:
    """Require that truncated sampling returns the tokens that it kept, or is refused by
    ValueError.
    """
    try:
        piece = (await engine.sample(prompt, params)).piece
    except ValueError:
        return
    assert piece.kept_sets is not None, (
        f"{params.truncation} truncates the support: return the kept set of each token, or raise "
        "ValueError"
    )
    assert not params.top_k or max(piece.kept_sets.sizes) <= params.top_k, "a set has over k tokens"
    piece.kept_sets.pack(piece.tokens)  # raises ValueError for a set without its token


async def _truncates_unrecorded(engine: Engine, prompt: list[int]) -> None:
    """Require that a truncated reply without sets is truncated, or is refused by ValueError."""
    greedy = (await engine.sample(prompt, replace(_params(6), temperature=0.0))).piece.tokens
    try:
        reply = await engine.sample(prompt, replace(_params(6), top_k=1, return_sets=False))
    except ValueError:
        return
    assert reply.piece.tokens == greedy, (
        f"with top_k=1 only the most probable tokens, {greedy}, can be sampled, got "
        f"{reply.piece.tokens}: apply the truncation, or raise ValueError"
    )


async def _check_refusals(engine: Engine, update: Mapping[str, Tensor], prompt: list[int]) -> None:
    await _publish(engine, update, 3)
    for params in (replace(_params(2), top_p=0.9), replace(_params(2), top_k=5)):
        await _truncates(engine, prompt, params)
    await _truncates_unrecorded(engine, prompt)
    await _refuses(
        engine.load(update, 4), "load while sampling mixes two versions in one reply", RuntimeError
    )
    await engine.interrupt()
    name, tensor = next(iter(update.items()))
    for mistake, wrong in (
        ("an unknown parameter", {**update, "no.such.parameter": tensor}),
        ("a parameter of another shape", {**update, name: tensor.new_zeros(*tensor.shape, 2)}),
    ):
        await _refuses(
            engine.load(wrong, 4),
            f"{mistake} means that policy and engine are not the same model",
            ValueError,
        )
    await engine.resume()
    reply = await engine.sample(prompt, _params(2))
    assert reply.piece.version == 3, (
        f"a refused load must change nothing, but the version is now {reply.piece.version}"
    )


async def _refuses(call: Awaitable[object], reason: str, kind: type[Exception]) -> None:
    try:
        await call
    except kind:
        return
    raise AssertionError(f"should raise {kind.__name__}: {reason}")


async def _check_interrupt(engine: Engine, update: Mapping[str, Tensor], prompt: list[int]) -> None:
    """Stage a version during long replies, interrupt them, load the version, and continue a
    reply.
    """
    await _publish(engine, update, 3)
    order: list[str] = []

    async def sample() -> Reply:
        reply = await engine.sample(prompt, _params(_LONG_REPLY))
        order.append("reply")
        return reply

    async with asyncio.TaskGroup() as tasks:
        samples = [tasks.create_task(sample()) for _ in range(3)]
        await engine.sample(prompt, _params(2))
        await engine.stage(update, 4)
        _check_reply(await engine.sample(prompt, _params(2)), version=3)
        assert not order, "stage must not interrupt replies"
        await engine.interrupt()
        order.append("interrupt")
    assert order == ["reply"] * 3 + ["interrupt"], (
        f"interrupt must return after all pending samples have, got {order}: "
        "resolve replies before the acknowledgement"
    )
    for task in samples:
        reply = task.result()
        _check_reply(reply, version=3)
        assert reply.stop == "interrupted" and len(reply.piece.tokens) < _LONG_REPLY, (
            f"a pending sample must end with 'interrupted' and what it has, got {reply.stop!r} and "
            f"{len(reply.piece.tokens)} tokens: does interrupt wait for replies to end?"
        )
    await engine.load(update, 4)
    await engine.resume()
    reply = await engine.sample([*prompt, *samples[0].result().piece.tokens], _params(4))
    _check_reply(reply, version=4)
    assert reply.stop == "length" and len(reply.piece.tokens) == 4, (
        "a reply must continue from the tokens of its first part, "
        f"got {reply.stop!r} and {reply.piece.tokens}"
    )


async def _check_waiting(engine: Engine, update: Mapping[str, Tensor], prompt: list[int]) -> None:
    """Require that requests wait before the first `resume`, and between `interrupt` and
    `resume`.
    """
    for version in (0, 1):
        async with asyncio.TaskGroup() as tasks:
            await engine.interrupt()
            waiting = tasks.create_task(engine.sample(prompt, _params(2)))
            await asyncio.sleep(0)
            await engine.interrupt()
            await engine.load(update, version)
            assert not waiting.done(), (
                "a sample that arrives while the engine is interrupted waits for resume"
            )
            await engine.resume()
        _check_reply(waiting.result(), version=version)
        assert waiting.result().stop == "length", (
            "a sample that waited for resume is then sampled to its end"
        )


async def _check_restart(engine: Engine, update: Mapping[str, Tensor], prompt: list[int]) -> None:
    """Start the engine a second time: once while a reply is sampled, and once while a request
    waits.
    """
    await _publish(engine, update, 5)
    tokens = (await engine.sample(prompt, _params(6))).piece.tokens
    died = "start must end pending samples"
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_refuses(engine.sample(prompt, _params(_LONG_REPLY)), died, EngineDied))
        await engine.sample(prompt, _params(2))
        await engine.start()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_refuses(engine.sample(prompt, _params(2)), died, EngineDied))
        await asyncio.sleep(0)
        await engine.start()
    count = engine.metrics()["sampled_tokens"]
    assert count == 0, (
        f"{count:g} tokens are counted from before start: start must reset all counters"
    )
    await _refuses(engine.resume(), "start must drop the weights", RuntimeError)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(engine.sample(prompt, _params(6)))
        await asyncio.sleep(0)
        await engine.load(update, 2)
        assert not waiting.done(), "a sample that arrives after start waits for load and resume"
        await engine.resume()
    _check_reply(waiting.result(), version=2)
    assert waiting.result().piece.tokens == tokens, (
        "the same weights and seed gave another reply after start"
    )


async def _check_close(engine: Engine, update: Mapping[str, Tensor], prompt: list[int]) -> None:
    await _publish(engine, update, 0)
    async with asyncio.TaskGroup() as tasks:
        pending = tasks.create_task(
            _refuses(engine.sample(prompt, _params(_LONG_REPLY)), "close ends it", EngineDied)
        )
        await engine.sample(prompt, _params(2))
        await engine.close()
    assert pending.done()
    await _refuses(engine.sample(prompt, _params(2)), "the engine is closed", EngineDied)
    await engine.close()
