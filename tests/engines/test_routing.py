"""A request goes to the group of its phase, and a member without a place rejects it.

The choice is compared with numbers worked out by hand. A pool of scripted engines with groups
keeps the promises of a pool: no request is stranded while engines die, restart or change weights.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.run_engine import run_engine
from tests.support.waits import until
from unstale.builders import build_engine
from unstale.config import (
    ClusterConfig,
    ConfigError,
    EngineConfig,
    RolloutConfig,
    RunConfig,
    TaskConfig,
    TrainerConfig,
)
from unstale.engines import Engine, GenerationOptions, SamplingParams
from unstale.engines.pool import EnginePool, Recovery, supervise
from unstale.engines.routing import (
    FOREIGN_TOKENS,
    Candidate,
    Phases,
    ReplyLengths,
    choose,
)
from unstale.engines.scripted import ScriptedEngine
from unstale.envs.chat import Chat
from unstale.records import ContextPiece, EpisodeBudget
from unstale.rollout.generator import Generator
from unstale.rollout.segments import BudgetUse
from unstale.rollout.transcript import Transcript
from unstale.testing import tiny_policy

PHASES = Phases(1, ratio=8.0)
REPLY = 100.0


def chosen(candidates: list[Candidate], context: int) -> tuple[int, int]:
    """Return the chosen engine and the number of rejects, for a reply of 100 tokens."""
    choice = choose(candidates, context=context, reply_tokens=REPLY, phases=PHASES)
    return choice.index, choice.rejects


def prefill(load: int = 0, cached: int = 0, *, free: bool = True) -> Candidate:
    return Candidate(load, cached, free, prefills=True)


def decode(load: int = 0, cached: int = 0, *, free: bool = True) -> Candidate:
    return Candidate(load, cached, free)


@pytest.mark.parametrize(("context", "index"), [(800, 1), (801, 0)])
def test_the_phase_is_new_context_against_expected_reply(context: int, index: int) -> None:
    """8 new tokens for each of 100 reply tokens are not yet too many."""
    assert chosen([prefill(load=7), decode(load=50)], context) == (index, 0)


def test_only_context_that_no_decode_engine_has_counts_as_new() -> None:
    assert chosen([prefill(), decode(cached=100)], 900) == (1, 0)
    assert chosen([prefill(), decode(cached=99)], 900) == (0, 0)


def test_a_prefix_in_the_other_group_is_worth_a_limited_number_of_tokens() -> None:
    """The request is for a decode engine, which would compute all 800 tokens more."""
    for cached, index in ((FOREIGN_TOKENS, 1), (FOREIGN_TOKENS + 1, 0)):
        wide = Phases(1, ratio=100.0)
        candidates = [prefill(cached=cached), decode()]
        choice = choose(candidates, context=2000, reply_tokens=REPLY, phases=wide)
        assert choice.index == index


def test_an_engine_without_a_place_rejects_and_the_next_one_is_asked() -> None:
    engines = [prefill(load=1, free=False), prefill(load=2, free=False), prefill(load=3), decode()]
    assert chosen(engines, 4000) == (2, 2)
    assert chosen([prefill(load=1, free=False), decode(load=9)], 4000) == (1, 1)
    assert chosen([prefill(load=9), decode(load=1, free=False)], 10) == (0, 1)


def test_if_all_reject_it_waits_at_the_least_loaded_of_its_group() -> None:
    engines = [prefill(load=3, free=False), prefill(load=2, free=False), decode(free=False)]
    assert chosen(engines, 4000) == (1, 2)
    assert chosen(engines, 10) == (2, 1)


def test_a_group_without_a_working_engine_is_left_out() -> None:
    assert chosen([decode(load=3), decode(load=2)], 4000) == (1, 0)
    assert chosen([prefill(load=3)], 10) == (0, 0)


async def no_delay(tokens: Sequence[int], params: SamplingParams) -> None:
    pass


class Asked(list[tuple[int, int]]):
    """Scripted engines that record (number of the engine, first token). Replies wait at a gate."""

    delay: Callable[[Sequence[int], SamplingParams], Awaitable[None]] = staticmethod(no_delay)
    """A further wait before each token."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.engines = [self._engine(number) for number in range(count)]

    def _engine(self, number: int) -> ScriptedEngine:
        def script(tokens: Sequence[int], params: SamplingParams) -> list[int]:
            self.append((number, tokens[0]))
            return [1] * params.max_tokens

        async def delay(tokens: Sequence[int], params: SamplingParams) -> None:
            await self.gate.wait()
            await self.delay(tokens, params)

        return ScriptedEngine(script, token_delay=delay)

    def where(self) -> dict[int, int]:
        return {task: number for number, task in self}


async def publish(engine: Engine, version: int) -> None:
    await engine.interrupt()
    await engine.load({}, version)
    await engine.resume()


def ask(
    tasks: asyncio.TaskGroup, pool: EnginePool, requests: dict[int, int], reply: int = 4
) -> list["asyncio.Task[Any]"]:
    """Ask for replies to contexts of given lengths. The key is the first token."""
    return [
        tasks.create_task(pool.sample([task] * length, SamplingParams(reply, ())))
        for task, length in requests.items()
    ]


def play(count: int, story: Callable[[Asked, EnginePool], Any], **options: Any) -> None:
    asked = Asked(count)
    pool = EnginePool(asked.engines, **{"phases": Phases(1), **options})

    async def live() -> None:
        await publish(pool, 0)
        await story(asked, pool)

    run_engine(pool, live)


def test_long_prompts_go_to_the_prefill_group_and_replies_to_the_others() -> None:
    """A reply has at most 4 tokens here: 33 new tokens are for the prefill group."""

    async def story(asked: Asked, pool: EnginePool) -> None:
        async with asyncio.TaskGroup() as tasks:
            ask(tasks, pool, {2: 200, 3: 33, 4: 32, 5: 8, 6: 8})
            await until(lambda: len(asked) == 5, "requests")
            asked.gate.set()
        assert asked.where() == {2: 0, 3: 0, 4: 1, 5: 2, 6: 1}
        counted = pool.metrics()
        assert (counted["prefill_requests"], counted["decode_requests"]) == (2, 3)
        assert counted["rejects"] == 0 == pool.metrics()["prefill_requests"]

    play(3, story)


def test_the_expected_reply_is_the_mean_of_those_before() -> None:
    """After replies of 4 tokens, one that may have 100 is expected to have 4."""

    async def story(asked: Asked, pool: EnginePool) -> None:
        asked.gate.set()
        await pool.sample([7] * 48, SamplingParams(100, ()))
        for _ in range(400):
            await pool.sample([7] * 8, SamplingParams(4, ()))
        asked.clear()
        await pool.sample([8] * 48, SamplingParams(100, ()))
        assert asked == [(0, 8)]

    play(2, story)


@pytest.mark.parametrize(
    "parts",
    [
        {"options": GenerationOptions(chunk=4)},
        {"budget_use": BudgetUse(EpisodeBudget(segments=99, segment_tokens=4))},
    ],
    ids=["chunks", "segments"],
)
def test_a_reply_requested_in_parts_is_expected_and_counted_as_one(parts: dict[str, Any]) -> None:
    """48 tokens of context for a reply of 40. A part of 4 alone would go to engine 0."""
    ended = asyncio.Event()

    async def pause(tokens: Sequence[int], params: SamplingParams) -> None:
        if params.sampled == 8 and not ended.is_set():
            ended.set()
            await asyncio.Event().wait()

    async def story(asked: Asked, pool: EnginePool) -> None:
        asked.gate.set()
        asked.delay = pause
        chat = cast(Chat, SimpleNamespace(stop_tokens=(0,)))
        generator = Generator(pool, chat, EngineConfig(max_completion_tokens=40))
        transcript = Transcript(0, 0)
        transcript.append(ContextPiece((7,) * 48))
        reply = asyncio.ensure_future(generator.generate(transcript, **parts))
        await ended.wait()
        await publish(pool, 1)
        tokens, _ = await reply
        assert len(tokens) == 40 and len(asked) >= 10
        assert {number for number, _ in asked} == {1}
        asked.clear()
        await pool.sample([8] * 300, SamplingParams(100, ()))
        assert asked.where() == {8: 1}

    play(2, story)


def test_the_rest_of_a_reply_is_expected_from_longer_ones() -> None:
    lengths = ReplyLengths()
    for tokens in (100, 900, 1000):
        lengths.add(tokens)
    assert lengths.expected(4096) == pytest.approx(2000 / 3)
    assert lengths.expected(4096, sampled=800) == 150
    assert lengths.expected(96, sampled=4000) == 96


def test_a_full_group_rejects_and_nobody_waits_while_a_place_is_free() -> None:
    async def story(asked: Asked, pool: EnginePool) -> None:
        async with asyncio.TaskGroup() as tasks:
            ask(tasks, pool, dict.fromkeys(range(2, 8), 640))
            await until(lambda: len(asked) == 6, "requests")
            asked.gate.set()
        places = [number for number, _ in asked]
        assert sorted(places) == [0, 0, 1, 1, 2, 2] and places[:2] == [0, 0]
        assert pool.metrics()["rejects"] > 0

    play(3, story, max_running=2)


def test_without_the_prefill_engine_decode_engines_serve_its_requests() -> None:
    """The engine of the prefill group dies with a request. It continues elsewhere, and after the
    restart long prompts go there again, with the new version."""
    asked = Asked(3)
    back = asyncio.Event()

    def on_event(kind: str, **_: Any) -> None:
        if kind == "engine_back":
            back.set()

    recovery = Recovery(lambda version: {}, 1, on_event)
    pool = supervise(EnginePool(asked.engines, phases=Phases(1)), recovery)

    async def story() -> None:
        await publish(pool, 3)
        async with asyncio.TaskGroup() as tasks:
            (first,) = ask(tasks, pool, {9: 300})
            await until(lambda: len(asked) == 1, "requests")
            asked.engines[0].die("killed")
            reply = await first
            assert reply.stop == "interrupted" and not reply.piece.tokens
            (again,) = ask(tasks, pool, {10: 300})
            await until(lambda: len(asked) == 2, "requests")
            assert asked.where()[10] in (1, 2)
            asked.gate.set()
            assert (await again).piece.version == 3
        await back.wait()
        await publish(pool, 4)
        reply = await pool.sample([11] * 300, SamplingParams(4, ()))
        assert asked.where()[11] == 0 and reply.piece.version == 4

    run_engine(pool, story)


def test_an_interrupted_request_returns_its_version_from_either_group() -> None:
    async def story(asked: Asked, pool: EnginePool) -> None:
        async with asyncio.TaskGroup() as tasks:
            asking = ask(tasks, pool, {2: 300, 3: 8})
            await until(lambda: len(asked) == 2, "requests")
            await pool.interrupt()
            replies = [await each for each in asking]
        assert {(each.stop, each.piece.version) for each in replies} == {("interrupted", 0)}

    play(2, story)


def test_a_request_waits_for_the_kind_of_engine_that_it_asks_for() -> None:
    """The engine that does not round dies. Its requests wait for it, and no other serves them."""
    asked = Asked(3)
    started = asyncio.Event()
    pool = supervise(EnginePool(asked.engines, precise_engines=1), Recovery(lambda version: {}, 1))

    async def story() -> None:
        await publish(pool, 0)
        start = asked.engines[2].start

        async def slow_start() -> None:
            await started.wait()
            await start()

        asked.engines[2].start = slow_start  # type: ignore[method-assign]
        async with asyncio.TaskGroup() as tasks:

            def precise(task: int) -> "asyncio.Task[Any]":
                return tasks.create_task(pool.sample([task], SamplingParams(4, (), precise=True)))

            ask(tasks, pool, dict.fromkeys(range(10, 30), 4))
            first = precise(2)
            await until(lambda: len(asked) == 21, "requests")
            places = asked.where()
            assert places.pop(2) == 2 and {*places.values()} == {0, 1}
            asked.engines[2].die("killed")
            assert (await first).stop == "interrupted"
            again = precise(3)
            asked.gate.set()
            await pool.sample([4], SamplingParams(4, ()))
            assert not again.done() and 3 not in asked.where()
            started.set()
            await again
        assert asked.where()[3] == 2

    run_engine(pool, story)


def configured(engine: dict[str, Any], **options: Any) -> RunConfig:
    return RunConfig(
        recipe="toy",
        task=TaskConfig(env="tests.support.toy:ToyTasks"),
        engine=EngineConfig(**engine),
        **options,
    )


def test_a_run_has_the_groups_of_its_options(tmp_path: Path) -> None:
    tiny_policy().save(tmp_path)
    options = {"processes": 3, "prefill_engines": 2, "prefill_ratio": 5.0, "max_context": 512}
    options |= {"send_cache": True, "move_engines": True}
    pool = build_engine(configured(options, model=str(tmp_path)), None)
    assert pool.phases == Phases(2, 5.0, sends_cache=True, moves=True, scenarios="task_set")
    keys = {cast(Any, engine)._options.cache_key for engine in pool.engines}
    assert len(keys) == 1 and len(keys.pop()) == 64
    assert supervise(pool, Recovery()).phases == pool.phases
    options = {"processes": 3, "quantise": "nvfp4", "precise_engines": 1}
    pool = build_engine(configured(options, model=str(tmp_path)), None)
    assert supervise(pool, Recovery()).precise_engines == pool.precise_engines == 1


@pytest.mark.parametrize(
    ("engine", "hosts", "why"),
    [
        ({"prefill_engines": 1}, 0, r"prefill_engines must be < 1 \(the engines of engine.proc"),
        ({"prefill_engines": 3, "processes": 3}, 0, "must be < 3 .* at least one must decode"),
        ({"prefill_engines": 2, "processes": 4}, 2, r"must be < 2 \(the engines of cluster.engine"),
        ({"prefill_ratio": 3.0}, 0, "prefill_ratio = 3 is used only with engine.prefill_engines"),
        ({"send_cache": True}, 0, "send_cache = true is used only with engine.prefill_engines"),
        ({"move_engines": True}, 0, "move_engines = true is used only with engine.prefill_engines"),
        ({"scenarios": "prefix"}, 0, "scenarios must be auto or none with one engine, got prefix"),
        (
            {"prefill_engines": 1, "send_cache": True, "backend": "vllm", "urls": "unix:a unix:b"},
            0,
            "send_cache needs engine.backend = embedded, got vllm",
        ),
        ({"prefill_ratio": 0.0, "prefill_engines": 1}, 0, "prefill_ratio must be > 0"),
        ({"precise_engines": 1}, 0, "precise_engines = 1 needs engine.quantise other than none"),
        ({"quantise": "fp8", "precise_engines": 1}, 0, "needs more engines .* got 1"),
        (
            {"quantise": "fp8", "precise_engines": 1, "processes": 2},
            2,
            "precise_engines must be 0 with cluster.engine_hosts",
        ),
        (
            {"quantise": "fp8", "precise_engines": 1, "processes": 3, "prefill_engines": 1},
            0,
            "needs engine.prefill_engines = 0",
        ),
    ],
)
def test_groups_that_cannot_be_are_refused(engine: dict[str, Any], hosts: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        configured(engine, cluster=ClusterConfig(engine_hosts=hosts))


def test_caches_without_experts_are_not_sent_where_routes_are_replayed() -> None:
    engine = {"processes": 2, "prefill_engines": 1, "send_cache": True}
    with pytest.raises(ConfigError, match=r"send_cache needs trainer.routing_replay = false"):
        configured(engine, trainer=TrainerConfig(routing_replay=True))


@pytest.mark.parametrize("option", ["scenarios = prefix", "send_cache", "move_engines"])
def test_rollout_processes_form_no_groups(option: str) -> None:
    name, _, value = option.partition(" = ")
    engine = {"prefill_engines": 1, name: value or True}
    with pytest.raises(ConfigError, match=f"rollout.processes must be 1 with engine.{option}"):
        configured(
            engine,
            cluster=ClusterConfig(engine_hosts=2),
            rollout=RolloutConfig(processes=2),
        )


def test_a_request_names_its_task_set() -> None:
    asked = Asked(1)
    asked.gate.set()
    seen: list[str] = []

    async def note(tokens: Sequence[int], params: SamplingParams) -> None:
        seen.append(params.scenario)

    asked.delay = note
    (engine,) = asked.engines
    chat = cast(Chat, SimpleNamespace(stop_tokens=()))
    generator = Generator(engine, chat, EngineConfig(max_completion_tokens=2))

    async def story() -> None:
        await publish(engine, 0)
        transcript = Transcript(0, 0, task_set="retail")
        for each in (transcript, transcript.add_branch(1)):
            each.append(ContextPiece((5, 6)))
            await generator.generate(each)
        assert seen == ["retail"] * 4

    run_engine(engine, story)


def test_a_pool_refuses_an_empty_group() -> None:
    with pytest.raises(ValueError, match="fewer engines than the pool"):
        EnginePool(Asked(2).engines, phases=Phases(2))
