"""Public fakes and conformance suites. What passes a suite keeps its room's contract (architecture.md, section 4)."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from afterimage.adapters import Lora
from afterimage.checkpoint import Checkpoints, Stand
from afterimage.engines import REQUIRED_COUNTERS, Engine, EngineDied, Reply, SamplingParams
from afterimage.envs import Closing, Message, Taskset, ToolCall, Turn, combined
from afterimage.old_logps import Needs, OldLogps, has_clean_behavior
from afterimage.policy import DTYPES, Policy
from afterimage.trajectory import Batch, Credited, Given, Open, Piece, Sampled, Task, Trajectory, collate, walk


def tiny_policy(*, seed: int = 0, dtype: str = "float32", lora: Lora | None = None) -> Policy:
    """A random Qwen3 with 64 words, on the CPU: small enough for a test, and far enough from uniform to tell apart."""
    words = {f"w{i}": i for i in range(64)}
    inner = Tokenizer(WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="w1")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    Module.to(model, DTYPES[dtype])
    return Policy(model, tokenizer, lora=lora)


def plain_logps(policy: Policy, tokens: Sequence[int], *, temperature: float = 1.0) -> Tensor:
    """`[T]` of one sequence by an ordinary forward pass of the model, unpacked: the slow reference."""
    row = torch.tensor([tokens], device=policy.device)
    with torch.no_grad():
        logits = policy.model(input_ids=row, use_cache=False).logits[0, :-1]
    logp = torch.log_softmax(logits.double() / temperature, -1).gather(1, row[0, 1:, None]).squeeze(1)
    return torch.cat([logp.new_zeros(1), logp])


def episode(number: int, plan: Sequence[int | tuple[int, int] | tuple[int, int, bool]], **rest: float) -> Credited:
    """A random episode: `n` is n given tokens, `(n, version)` or `(n, version, clean)` n sampled ones.

    `rest`: `advantage` (1.0). Tokens and `behavior_logp` follow from `number` alone.
    """
    noise = torch.Generator().manual_seed(number)
    pieces: list[Piece] = []
    for item in plan:
        count, *how = (item,) if isinstance(item, int) else item
        tokens = tuple(torch.randint(2, 64, (count,), generator=noise).tolist())
        if how:
            behavior_logp = tuple((-1 - torch.rand(count, generator=noise) * 4).tolist())
            pieces.append(Sampled(tokens, behavior_logp, how[0], clean=bool(how[1]) if len(how) > 1 else True))
        else:
            pieces.append(Given(tokens))
    task = Task("random", "train", number)
    trajectory = Trajectory(tuple(pieces), {"reward": 1.0}, "done", task, seed=number, episode=number)
    return Credited(trajectory, (rest.get("advantage", 1.0),))


def nudge(policy: Policy, *, seed: int, size: float = 0.02) -> None:
    """Move the weights as an optimizer step would: the policy is no longer at its version."""
    noise = torch.Generator().manual_seed(seed)
    moved = {
        name: tensor + size * torch.randn(tensor.shape, generator=noise).to(tensor)
        for name, tensor in policy.weights().items()
    }
    policy.load_weights(moved)


def written_down(state: Any) -> Any:
    """What comes back of a part's state that a checkpoint held. TypeError for what no checkpoint can hold."""
    with TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder), {"part": cast(Any, SimpleNamespace(state=lambda: state))})
        return checkpoints.load(checkpoints.save(Stand(), tiny_policy())).states["part"]


def check_old_logps(make: Callable[[Policy], OldLogps], *, lora: Lora | None = None) -> None:
    """`make(policy)` returns a route that scores at temperature 1. Raises AssertionError with what is broken.

    Three versions are published; a batch holds tokens of all of them, within a turn and across turns, and a few
    sampled over a kept cache. A route may be as wrong as it likes about a token, but not about a token it calls exact.
    Then a run is killed, and goes on from its checkpoint with all that was sampled since.
    """
    policy = tiny_policy(lora=lora)
    with closing(make(policy)) as route, closing(make(policy)) as restored:
        always_exact = _check_route(route, restored, policy)
    _check_recovery(make, always_exact=always_exact, lora=lora)


def _check_route(route: OldLogps, restored: OldLogps, policy: Policy) -> bool:
    """Whether it was exact wherever a route can be."""
    assert isinstance(route.needs, Needs), "needs is a Needs"
    copies: list[Policy] = []
    for version in range(3):
        if version:
            nudge(policy, seed=version)
        _publish(route, policy, version, copies)
        for piece in _pieces_of(version, _PLANS):
            route.arrived(piece)
        while version == 1 and route.idle(policy):
            pass
        if version < 2:
            route.closing(policy, _pieces_of(version, _PLANS))
    batch = collate([episode(number, plan) for number, plan in enumerate(_PLANS)])
    before = {name: getattr(batch, name).clone() for name in ("tokens", "behavior_logp", "version")}
    values, exact = _ask(route, policy, batch)
    _check_shape(batch, values, exact)
    _check_claims(batch, values, exact, copies)
    assert all(torch.equal(getattr(batch, name), old) for name, old in before.items()), "the batch is left as it was"
    again, _ = _ask(route, policy, batch)
    assert torch.equal(values, again), "asked twice, it answers the same"
    costs = route.costs()
    assert all(math.isfinite(cost) and cost >= 0 for cost in costs.values()), f"costs are finite and >= 0: {costs}"
    restored.restore(written_down(route.state()))
    restored.published(policy, live={0, 1, 2})
    for one, other in zip(_ask(restored, policy, batch), (values, exact), strict=True):
        assert torch.equal(one, other), "restored from its state, it answers the same"
    return torch.equal(exact, has_clean_behavior(batch))


def _check_recovery(make: Callable[[Policy], OldLogps], *, always_exact: bool, lora: Lora | None) -> None:
    """Killed when 3 and 4 were published after the checkpoint that holds the weights of 3: these are called 5 then."""
    policy, copies = tiny_policy(lora=lora), list[Policy]()
    with closing(make(policy)) as route:
        _run_to_checkpoint(route, policy, copies)
        state = route.state()
        for piece in _pieces_of(2, _INTERRUPTED)[1::2]:
            route.arrived(piece)
        for version in (3, 4):
            _publish(route, policy, version, copies)
            for piece in _pieces_of(version, _INTERRUPTED):
                route.arrived(piece)
            route.closing(policy, _pieces_of(version, _INTERRUPTED))
            nudge(policy, seed=version + 1)
    state = written_down(state)
    past = {version: _pieces_of(version, _INTERRUPTED) for version in range(5)}
    batch = collate([episode(number, plan) for number, plan in enumerate(_INTERRUPTED)])
    again = copies[3].twin()
    again.version = 3
    with closing(make(again)) as route:
        route.restore(state)
        again.renumber(5)
        route.recover(past, lambda version: copies[version].weights())
        _publish(route, again, 5, copies)
        for piece in _pieces_of(5, _INTERRUPTED):
            route.arrived(piece)
        values, exact = _ask(route, again, batch)
    _check_shape(batch, values, exact)
    _check_claims(batch, values, exact, copies)
    clean = has_clean_behavior(batch)
    if always_exact:
        assert torch.equal(exact, clean), "what its state lacked is made good by recover: it stays exact"
        return
    steady = tiny_policy(lora=lora)
    with closing(make(steady)) as route:
        _run_to_checkpoint(route, steady, [])
        steady.version = 3
        steady.renumber(5)
        _publish(route, steady, 5, [])
        expected, _ = _ask(route, steady, batch)
    other = clean & ~exact
    assert torch.equal(values[other], expected[other]), "recovered, it answers as if it had never been killed"


def _run_to_checkpoint(route: OldLogps, policy: Policy, copies: list[Policy]) -> None:
    """Versions 0 to 2, and the step that leads to 3, which is not published; half the pieces of 2 are still to come."""
    for version in range(3):
        _publish(route, policy, version, copies)
        arrived = _pieces_of(version, _INTERRUPTED)[:: 2 if version == 2 else 1]
        for piece in arrived:
            route.arrived(piece)
        while version == 1 and route.idle(policy):
            pass
        route.closing(policy, arrived)
        nudge(policy, seed=version + 1)
        route.trained(policy, kept=1.0)


def _publish(route: OldLogps, policy: Policy, version: int, copies: list[Policy]) -> None:
    policy.version = version
    copies.append(policy.twin())
    route.publishing(policy)
    route.published(policy, live=set(range(version + 1)))


_PLANS: tuple[list[int | tuple[int, int] | tuple[int, int, bool]], ...] = (
    [5, (4, 2)],
    [3, (6, 0), 2, (3, 1), 4, (5, 2)],
    [4, (3, 0), (2, 1), (4, 2), 3, (2, 2)],
    [2, (3, 1), (4, 2, False), 1],
)
_INTERRUPTED: tuple[list[int | tuple[int, int] | tuple[int, int, bool]], ...] = (
    [4, (3, 0), (2, 1), 3, (4, 2)],
    [3, (4, 2), (3, 3), 2, (3, 4)],
    [5, (3, 1), 2, (4, 3), (2, 5)],
    [3, (2, 2), 2, (3, 4), (2, 5)],
    [2, (3, 2, False), (2, 4, False), 3, (3, 5)],
    [6, (4, 5)],
)


def _pieces_of(version: int, plans: Sequence[Sequence[int | tuple[int, int] | tuple[int, int, bool]]]) -> list[Open]:
    """The pieces of these episodes that `version` sampled, as they would arrive."""
    found = []
    for number, plan in enumerate(plans):
        trajectory = episode(number, plan).trajectory
        for start, piece, _ in walk(trajectory.pieces):
            if isinstance(piece, Sampled) and piece.version == version:
                found.append(Open(number, trajectory.tokens[: start + len(piece.tokens)], start, piece))
    return found


def _ask(route: OldLogps, policy: Policy, batch: Batch) -> tuple[Tensor, Tensor]:
    now = torch.empty(0)
    if route.needs.now or route.needs.inline:
        now = policy.score(batch, batch.sampled, temperature=1.0, micro_tokens=64).logp
    return route.logps(batch, now)


def _check_shape(batch: Batch, values: Tensor, exact: Tensor) -> None:
    assert values.shape == exact.shape == batch.sampled.shape, "one value and one claim per token"
    assert values.dtype == torch.float32 and exact.dtype == torch.bool, "float32 values, bool claims"
    assert not values.requires_grad, "no gradient flows through an old logit"
    assert values.device.type == exact.device.type == "cpu", "answers are on the CPU"
    assert values[batch.sampled].isfinite().all(), "every action token has a finite value"
    assert not values[~batch.sampled].any(), "0 off the mask"
    assert not exact[~batch.sampled].any(), "nothing is exact off the mask"
    assert not exact[~batch.clean].any(), "a token sampled over a kept cache is never exact"


def _check_claims(batch: Batch, values: Tensor, exact: Tensor, copies: Sequence[Policy]) -> None:
    for start, end in batch.spans():
        tokens = batch.tokens[start:end].tolist()
        for version, copy in enumerate(copies):
            mine = exact[start:end] & (batch.version[start:end] == version)
            error = (values[start:end] - plain_logps(copy, tokens).float())[mine].abs()
            assert error.numel() == 0 or error.max() < 1e-5, (
                f"called exact at version {version}, but off by {error.max():.2g}"
            )


_PATIENCE_S = 120.0
_LONG = 1000
"""Tokens of a reply that is still being sampled when a short one beside it has ended."""


def check_engine(
    make: Callable[[], Engine], *, update: Mapping[str, Tensor], prompt: Sequence[int] = (1, 2, 3)
) -> None:
    """`make()` returns a fresh engine. Raises AssertionError with the promise that is broken and the likely mistake.

    `update` is a full set of weights for it; `prompt` a context that leaves room for a thousand tokens. Replies must
    take time: of two that begin together, the one of two tokens ends while the one of a thousand goes on.
    """
    asyncio.run(_check_engine(make(), update, list(prompt)))


async def _check_engine(engine: Engine, update: Mapping[str, Tensor], prompt: list[int]) -> None:
    """One engine for all checks: real ones take seconds to start. What waits before the first load comes first."""
    doing = "start"
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await engine.start()
            for check in (
                _check_waiting, _check_replies, _check_refusals, _check_interrupt, _check_again, _check_close,
            ):  # fmt: skip
                doing = check.__name__.removeprefix("_check_")
                await check(engine, update, prompt)
    except TimeoutError:
        raise AssertionError(f"{doing}: still waiting after {_PATIENCE_S:g} s; somebody is never told") from None
    finally:
        await engine.close()


async def _go(engine: Engine, update: Mapping[str, Tensor], version: int) -> None:
    await engine.interrupt()
    await engine.load(update, version)
    await engine.resume()


def _asking(max_tokens: int, *, stop_tokens: tuple[int, ...] = ()) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, stop_tokens=stop_tokens, seed=7)


def _check_reply(reply: Reply, *, version: int) -> None:
    piece = reply.piece
    assert piece.version == version, (
        f"sampled under version {version}, tagged {piece.version}: is the version stamped where the weights change?"
    )
    assert all(math.isfinite(logp) and logp <= 0 for logp in piece.behavior_logp), (
        f"behavior_logp must be finite and <= 0, got {piece.behavior_logp}: are these logits or probabilities?"
    )


async def _check_replies(engine: Engine, update: Mapping[str, Tensor], prompt: list[int]) -> None:
    await _go(engine, update, 3)
    reply = await engine.sample(prompt, _asking(6))
    _check_reply(reply, version=3)
    said = reply.piece.tokens
    assert reply.stop == "length" and len(said) == 6, (
        f"asked for 6 tokens without stop tokens, got {len(said)} and {reply.stop!r}: does something else end a reply?"
    )
    assert (await engine.sample(prompt, _asking(6))).piece.tokens == said, (
        "the same seed and context gave another reply: noise must be keyed by (seed, position), not drawn from a stream"
    )
    missing = set(REQUIRED_COUNTERS) - engine.metrics().keys()
    assert not missing, f"metrics() lacks {sorted(missing)}: the loop and the report read them"
    first = said.index(said[3]) + 1
    reply = await engine.sample(prompt, _asking(6, stop_tokens=(said[3],)))
    _check_reply(reply, version=3)
    assert reply.stop == "stop" and reply.piece.tokens == said[:first], (
        f"stop token {said[3]} should end {said} after {first} tokens with 'stop' and be part of the reply, "
        f"got {reply.piece.tokens} and {reply.stop!r}"
    )


async def _check_refusals(engine: Engine, update: Mapping[str, Tensor], prompt: list[int]) -> None:
    await _go(engine, update, 3)
    for params in (replace(_asking(2), top_p=0.9), replace(_asking(2), top_k=5)):
        await _refuses(engine.sample(prompt, params), "top_p < 1 and top_k > 0 truncate the support", ValueError)
    await _refuses(engine.load(update, 4), "load while sampling mixes two versions in one reply", RuntimeError)
    await engine.interrupt()
    name, tensor = next(iter(update.items()))
    for mistake, wrong in (
        ("an unknown parameter", {**update, "no.such.parameter": tensor}),
        ("a parameter of another shape", {**update, name: tensor.new_zeros(*tensor.shape, 2)}),
    ):
        await _refuses(
            engine.load(wrong, 4), f"{mistake} means that policy and engine are not the same model", ValueError
        )
    await engine.resume()
    reply = await engine.sample(prompt, _asking(2))
    assert reply.piece.version == 3, f"a refused load must change nothing, but the version is now {reply.piece.version}"


async def _refuses(call: Awaitable[object], reason: str, kind: type[Exception]) -> None:
    try:
        await call
    except kind:
        return
    raise AssertionError(f"should raise {kind.__name__}: {reason}")


async def _check_interrupt(engine: Engine, update: Mapping[str, Tensor], prompt: list[int]) -> None:
    """Interrupt a long reply, change version, and go on from the same tokens."""
    await _go(engine, update, 3)
    order: list[str] = []

    async def speak() -> Reply:
        reply = await engine.sample(prompt, _asking(_LONG))
        order.append("reply")
        return reply

    async with asyncio.TaskGroup() as tasks:
        speaking = [tasks.create_task(speak()) for _ in range(3)]
        await engine.sample(prompt, _asking(2))
        await engine.interrupt()
        order.append("interrupt")
    assert order == ["reply"] * 3 + ["interrupt"], (
        f"interrupt must return after all pending samples have, got {order}: resolve replies before the acknowledgement"
    )
    for task in speaking:
        reply = task.result()
        _check_reply(reply, version=3)
        assert reply.stop == "interrupted" and len(reply.piece.tokens) < _LONG, (
            f"a pending sample must end with 'interrupted' and what it has, got {reply.stop!r} and "
            f"{len(reply.piece.tokens)} tokens: does interrupt wait for replies to end by themselves?"
        )
    await engine.load(update, 4)
    await engine.resume()
    reply = await engine.sample([*prompt, *speaking[0].result().piece.tokens], _asking(4))
    _check_reply(reply, version=4)
    assert reply.stop == "length" and len(reply.piece.tokens) == 4, (
        f"a reply must continue from the tokens of its first part, got {reply.stop!r} and {reply.piece.tokens}"
    )


async def _check_waiting(engine: Engine, update: Mapping[str, Tensor], prompt: list[int]) -> None:
    """Samples wait before the first resume, and between interrupt and resume."""
    for version in (0, 1):
        async with asyncio.TaskGroup() as tasks:
            await engine.interrupt()
            waiting = tasks.create_task(engine.sample(prompt, _asking(2)))
            await asyncio.sleep(0)
            await engine.interrupt()
            await engine.load(update, version)
            assert not waiting.done(), "a sample that arrives while the engine is interrupted waits for resume"
            await engine.resume()
        _check_reply(waiting.result(), version=version)
        assert waiting.result().stop == "length", "a sample that waited for resume is then sampled to its end"


async def _check_again(engine: Engine, update: Mapping[str, Tensor], prompt: list[int]) -> None:
    """Start it again while one reply is being sampled and another waits."""
    await _go(engine, update, 5)
    said = (await engine.sample(prompt, _asking(6))).piece.tokens
    died = "start ends what an earlier life owed"
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_refuses(engine.sample(prompt, _asking(_LONG)), died, EngineDied))
        await engine.sample(prompt, _asking(2))
        await engine.start()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_refuses(engine.sample(prompt, _asking(2)), died, EngineDied))
        await asyncio.sleep(0)
        await engine.start()
    counted = engine.metrics()["sampled_tokens"]
    assert counted == 0, f"{counted:g} tokens are counted of an earlier life: start begins all counters again"
    await _refuses(engine.resume(), "the weights of an earlier life are gone", RuntimeError)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(engine.sample(prompt, _asking(6)))
        await asyncio.sleep(0)
        await engine.load(update, 2)
        assert not waiting.done(), "a sample that arrives after start waits for load and resume"
        await engine.resume()
    _check_reply(waiting.result(), version=2)
    assert waiting.result().piece.tokens == said, "the same weights and seed gave another reply after start"


async def _check_close(engine: Engine, update: Mapping[str, Tensor], prompt: list[int]) -> None:
    await _go(engine, update, 0)
    async with asyncio.TaskGroup() as tasks:
        pending = tasks.create_task(_refuses(engine.sample(prompt, _asking(_LONG)), "close ends it", EngineDied))
        await engine.sample(prompt, _asking(2))
        await engine.close()
    assert pending.done()
    await _refuses(engine.sample(prompt, _asking(2)), "the engine is closed", EngineDied)
    await engine.close()


NOISE = (
    Message("assistant", ""),
    Message("assistant", "hello"),
    Message("assistant", "", (ToolCall("", {}, error="the call is not JSON"),)),
    Message("assistant", "", (ToolCall("no_such_tool", {"x": 1}),)),
    Message("assistant", "bye", (ToolCall("no_such_tool", {}), ToolCall("", {}, error="the call is not JSON"))),
)
"""Replies that any policy may give; an environment answers all of them."""


def check_env(taskset: Taskset, *, episodes: int = 20, max_turns: int = 30) -> None:
    """Whether a task set and its environments keep their contract: AssertionError says what breaks it, and why.

    Plays `episodes` episodes of noise twice: the same task, seed and replies must give the same answers.
    """
    held_out = taskset.held_out(8)
    drawn = list(islice(taskset.train(0), 200))
    assert drawn == list(islice(taskset.train(0), 200)), (
        "train(0) gives other tasks the second time: seed all randomness"
    )
    both = {task.key for task in held_out} & {task.key for task in drawn}
    assert not both, f"held-out tasks are among the training tasks: {sorted(both)[:3]}"
    assert held_out == taskset.held_out(8), "held_out gives other tasks the second time: it must be a fixed set"
    for tool in taskset.tools:
        assert tool.get("function", {}).get("name"), f"a tool without function.name, as chat templates need it: {tool}"
    for number, task in enumerate(drawn[:episodes]):
        first, again = (asyncio.run(_play(taskset, task, number, max_turns)) for _ in range(2))
        assert first == again, f"{task.key} with seed {number} went differently the second time: seed all randomness"


async def _play(taskset: Taskset, task: Task, seed: int, max_turns: int) -> list[Turn]:
    env = taskset.env(task, seed)
    turns = [await env.begin()]
    assert turns[0].messages and not turns[0].done, f"{task.key} begins with nothing to answer: begin() poses the task"
    for number in range(max_turns):
        if turns[-1].done:
            break
        turns.append(combined(taskset, await env.step(NOISE[(seed + number) % len(NOISE)])))
    if isinstance(env, Closing):
        await env.close()
    for turn in turns:
        assert turn.done or turn.messages, f"{task.key}: a turn without messages that is not done leaves nothing to say"
        roles = {message.role for message in turn.messages}
        assert roles <= {"system", "user", "tool"}, f"{task.key}: an environment cannot speak as {roles}"
        assert all(map(math.isfinite, (turn.reward, *turn.rewards.values()))), f"{task.key}: rewards must be finite"
        assert not turn.rewards or turn.done, f"{task.key}: rewards count only with done=True; use reward for one reply"
    return turns
