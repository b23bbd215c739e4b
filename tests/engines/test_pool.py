"""A dead engine is restarted, and its replies continue with the same tokens and versions.

A scripted engine tests who waits, the requested state and the number of restarts. A real process is
killed and stopped in the middle of replies.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.support.waits import until
from unstale.engines import Engine, EngineDied, SamplingParams, Update, rates
from unstale.engines import pool as pool_module
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.engines.pool import EnginePool, Recovery
from unstale.engines.registry import EngineOptions
from unstale.engines.scripted import ScriptedEngine
from unstale.records import Sampled
from unstale.weights import child_process
from unstale.weights.store import VersionStore

pytestmark = pytest.mark.usefixtures("forked_children")


def _count(tokens: Sequence[int], params: SamplingParams) -> list[int]:
    return [len(tokens) + index for index in range(params.max_tokens)]


class _Fake(ScriptedEngine):
    """A scripted engine that records its calls and dies at given ones."""

    def __init__(
        self, *, dies_at: Sequence[str] = (), delay: Callable[..., Awaitable[None]] | None = None
    ) -> None:
        super().__init__(_count, token_delay=delay)
        self.dies_at = list(dies_at)
        self.told: list[str] = []

    async def start(self) -> None:
        await super().start()
        self._note("start")

    async def stage(self, update: Update, version: int) -> None:
        self._note(f"stage {version}")
        await super().stage(update, version)

    async def interrupt(self) -> None:
        self._note("interrupt")
        await super().interrupt()

    async def load(self, update: Update, version: int) -> None:
        assert isinstance(update, dict)
        self._note(f"{update['from']} {version}")
        await super().load(update, version)

    async def resume(self) -> None:
        self._note("resume")
        await super().resume()

    def _note(self, call: str) -> None:
        self.told.append(call)
        if self.dies_at[:1] == [call]:
            self.die(f"death at {self.dies_at.pop(0)}")
            self._check_alive()


def _pool(*engines: Engine, restarts: int = 3, events: list[Any] | None = None) -> EnginePool:
    def on_event(kind: str, **fields: Any) -> None:
        if events is not None:
            events.append((kind, fields))

    weights: Any = {"from": "disk"}
    return EnginePool(engines, Recovery(lambda version: weights, restarts, on_event))


def test_a_pool_is_idle_while_no_engine_has_a_request() -> None:
    async def main() -> None:
        go = asyncio.Event()

        async def delay(*_: object) -> None:
            await go.wait()

        pool = _pool(_Fake(delay=delay), _Fake(delay=delay))
        await pool.start()
        await _publish(pool, 0)
        await pool.resume()
        assert pool.is_idle()
        params = SamplingParams(max_tokens=2, stop_tokens=())
        reply = asyncio.ensure_future(pool.sample([1], params))
        await until(lambda: not pool.is_idle(), "one of two engines to have a request")
        go.set()
        await reply
        assert pool.is_idle()
        await pool.close()

    asyncio.run(main())


async def _publish(engine: Engine, version: int, update: Any = None) -> None:
    await engine.interrupt()
    await engine.load(update or {"from": "trainer"}, version)
    await engine.resume()


async def _speak(
    engine: Engine, context: list[int], max_tokens: int, *, seed: int = 0
) -> list[Sampled]:
    """Sample one reply, over as many pieces as it takes."""
    pieces: list[Sampled] = []
    while True:
        said = [token for piece in pieces for token in piece.tokens]
        reply = await engine.sample(
            [*context, *said], SamplingParams(max_tokens - len(said), (), seed=seed)
        )
        if reply.piece.tokens:
            pieces.append(reply.piece)
        if reply.stop != "interrupted":
            return pieces


def test_who_waits_is_served_by_one_restart() -> None:
    """The engine dies during three replies. All continue, and the death is reported once."""
    events: list[tuple[str, dict[str, Any]]] = []
    gate = asyncio.Event()

    async def slow(tokens: Sequence[int], params: SamplingParams) -> None:
        if len(tokens) > 3:
            await gate.wait()

    async def live() -> None:
        fake = _Fake(delay=slow)
        engine = _pool(fake, events=events)
        await engine.start()
        await _publish(engine, 7)
        speaking = [asyncio.ensure_future(_speak(engine, [0], 9)) for _ in range(3)]
        await asyncio.sleep(0.01)
        fake.told.clear()
        fake.die("out of memory")
        await asyncio.sleep(0.01)
        gate.set()
        for pieces in await asyncio.gather(*speaking):
            assert [(piece.tokens, piece.version) for piece in pieces] == [(tuple(range(1, 10)), 7)]
        assert fake.told == ["start", "disk 7", "resume"]
        assert engine.metrics()["restarts"] == 1 and engine.metrics()["restarts"] == 0
        await engine.close()

    asyncio.run(live())
    assert events == [
        ("engine_lost", {"engine": 0, "cause": "out of memory"}),
        ("engine_restarted", {"engine": 0, "cause": "out of memory", "restarts": 1}),
        ("engine_back", {"engine": 0}),
    ]


def test_who_waits_for_a_new_life_may_go_without_it() -> None:
    """One of two waiting calls is cancelled during a restart. The other gets the restarted
    engine."""
    coming, gate = asyncio.Event(), asyncio.Event()

    class Slow(_Fake):
        async def start(self) -> None:
            await super().start()
            if len(self.told) > 3:
                coming.set()
                await gate.wait()

    async def live() -> None:
        fake = Slow()
        engine = _pool(fake)
        await engine.start()
        await _publish(engine, 7)
        fake.told.append("death")
        fake.die("out of memory")
        speaking = [asyncio.ensure_future(_speak(engine, [0], 3)) for _ in range(2)]
        await coming.wait()
        speaking[0].cancel()
        await engine.interrupt()
        resuming = asyncio.ensure_future(engine.resume())
        await asyncio.sleep(0.01)
        assert fake.told[-1] == "start", "it was told something before it was back"
        gate.set()
        await resuming
        (piece,) = await speaking[1]
        assert piece.tokens == (1, 2, 3) and speaking[0].cancelled()
        assert fake.told[4:] == ["death", "start", "disk 7", "resume"]
        assert engine.metrics()["restarts"] == 1
        await engine.close()

    asyncio.run(live())


def test_closing_ends_the_way_back() -> None:
    coming = asyncio.Event()

    class Stuck(_Fake):
        async def start(self) -> None:
            await super().start()
            if self.told.count("start") > 1:
                coming.set()
                await asyncio.Event().wait()

    async def live() -> None:
        fake = Stuck()
        engine = _pool(fake)
        await engine.start()
        await _publish(engine, 7)
        fake.die("out of memory")
        speaking = asyncio.ensure_future(_speak(engine, [0], 3))
        await coming.wait()
        async with asyncio.timeout(60):
            await engine.close()
            with pytest.raises((EngineDied, asyncio.CancelledError)):
                await speaking

    asyncio.run(live())


@pytest.mark.parametrize(
    ("dies_at", "told"),
    [
        (["stage 1"], ["stage 1", "start", "disk 1", "resume"]),
        (["interrupt"], ["stage 1", "interrupt", "start", "disk 1", "resume"]),
        (["trainer 1"], ["stage 1", "interrupt", "trainer 1", "start", "disk 1", "resume"]),
        (
            ["resume"],
            ["stage 1", "interrupt", "trainer 1", "resume", "start", "disk 1", "resume"],
        ),
        (
            ["resume", "disk 1"],
            ["stage 1", "interrupt", "trainer 1", "resume", *["start", "disk 1"] * 2, "resume"],
        ),
    ],
)
def test_a_death_at_publication_leads_to_what_was_asked_for(
    dies_at: list[str], told: list[str]
) -> None:
    async def live() -> None:
        fake = _Fake()
        engine = _pool(fake)
        await engine.start()
        await _publish(engine, 0)
        fake.told, fake.dies_at = [], dies_at
        await engine.stage({"from": "trainer"}, 1)  # type: ignore[dict-item]
        await _publish(engine, 1)
        assert fake.told == told
        (piece,) = await _speak(engine, [0], 3)
        assert (piece.tokens, piece.version) == ((1, 2, 3), 1)
        await engine.close()

    asyncio.run(live())


def test_between_interrupt_and_resume_a_new_life_does_not_sample() -> None:
    async def live() -> None:
        fake = _Fake()
        engine = _pool(fake)
        await engine.start()
        await _publish(engine, 0)
        await engine.interrupt()
        speaking = asyncio.ensure_future(_speak(engine, [0], 3))
        await asyncio.sleep(0)
        fake.die("a bad page")
        await until(lambda: fake.told[-2:] == ["start", "disk 0"], "the restart")
        assert not speaking.done()
        await engine.load({"from": "trainer"}, 1)  # type: ignore[dict-item]
        await engine.resume()
        (piece,) = await speaking
        assert piece.version == 1
        await engine.close()

    asyncio.run(live())


def test_before_the_first_version_there_is_nothing_to_bring_back() -> None:
    async def live() -> None:
        fake = _Fake(dies_at=["start"])
        engine = _pool(fake)
        await engine.start()
        speaking = asyncio.ensure_future(_speak(engine, [0], 3))
        await asyncio.sleep(0)
        fake.die("again")
        await until(lambda: fake.told == ["start", "start", "start"], "the second restart")
        assert not speaking.done()
        await _publish(engine, 0)
        assert (await speaking)[-1].version == 0
        await engine.close()

    asyncio.run(live())


def test_one_death_too_many_ends_the_run_with_its_cause() -> None:
    async def live() -> None:
        fake = _Fake()
        engine = _pool(fake, restarts=2)
        await engine.start()
        await _publish(engine, 0)
        fake.dies_at = ["disk 0"] * 2
        fake.die("the first death")
        ends = await asyncio.gather(
            *(_speak(engine, [0], 3) for _ in range(3)), return_exceptions=True
        )
        for end in ends:
            assert isinstance(end, EngineDied)
            assert "death at disk 0; all 2 restarts" in str(end) and "engine.restarts = 2" in str(
                end
            )
        with pytest.raises(EngineDied, match="death at disk 0"):
            await engine.interrupt()

    asyncio.run(live())


@pytest.mark.parametrize("closes", [False, True])
def test_an_engine_that_may_not_be_restarted_is_not(closes: bool) -> None:
    async def never(tokens: Sequence[int], params: SamplingParams) -> None:
        await asyncio.Event().wait()

    async def live() -> None:
        fake = _Fake(delay=never)
        engine = _pool(fake, restarts=3 if closes else 0)
        await engine.start()
        await _publish(engine, 0)
        fake.told.clear()
        speaking = asyncio.ensure_future(_speak(engine, [0], 3))
        await asyncio.sleep(0)
        if closes:
            await engine.close()
        else:
            fake.die("out of memory")
        with pytest.raises(
            EngineDied, match="^the engine is closed$" if closes else "^out of memory$"
        ):
            await speaking
        assert fake.told == []

    asyncio.run(live())


def _embedded(folder: Path, *, deltas: bool = False) -> EmbeddedEngine:
    return EmbeddedEngine(
        EngineOptions(folder, dtype="float32", max_running=8, max_context=1280, deltas=deltas)
    )


async def _undisturbed(
    engine: Engine, weights: Mapping[str, Tensor], contexts: Mapping[int, list[int]], *, end: int
) -> dict[int, list[int]]:
    """Return the replies to each seed's context with these weights and no failure."""
    await engine.start()
    await _publish(engine, 1, weights)
    return {
        seed: _said(await _speak(engine, context, end - len(context), seed=seed))
        for seed, context in contexts.items()
    }


def _said(pieces: Sequence[Sampled]) -> list[int]:
    return [token for piece in pieces for token in piece.tokens]


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize(
    ("how", "why"),
    [(signal.SIGKILL, "ended with signal 9"), (signal.SIGSTOP, "did not answer for 6 s")],
)
def test_replies_of_a_process_that_ends_go_on_token_for_token(
    how: signal.Signals,
    why: str,
    folder: Path,
    weights: list[Mapping[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five replies begin under version 0, continue under version 1, and then lose their process."""
    monkeypatch.setattr(child_process, "FROZEN_S", 6.0)
    causes: list[str] = []

    def on_event(kind: str, *, cause: str = "", **_: Any) -> None:
        if kind == "engine_lost":
            causes.append(cause)

    async def live() -> None:
        process = _embedded(folder)
        engine = EnginePool([process], Recovery(weights.__getitem__, 1, on_event))
        try:
            await engine.start()
            await _publish(engine, 0, weights[0])
            async with asyncio.TaskGroup() as tasks:
                speaking = {
                    seed: tasks.create_task(_speak(engine, [5, 6, seed], 1200, seed=seed))
                    for seed in range(5)
                }
                # A task of its own: its request follows the five, so they have tokens when it ends.
                await tasks.create_task(_speak(engine, [9], 20))
                await _publish(engine, 1, weights[1])
                await _speak(engine, [9], 20)
                os.kill(process.pid, how)
            assert len(causes) == engine.metrics()["restarts"] == 1 and why in causes[0]
            spoken = {seed: task.result() for seed, task in speaking.items()}
            contexts = {seed: [5, 6, seed, *pieces[0].tokens] for seed, pieces in spoken.items()}
            wanted = await _undisturbed(process, weights[1], contexts, end=1203)
        finally:
            await engine.close()
        for seed, (first, *rest) in spoken.items():
            assert first.version == 0 and first.tokens and {piece.version for piece in rest} == {1}
            assert _said(rest) == wanted[seed]

    asyncio.run(live())


def test_a_delta_without_its_base_becomes_full_weights(
    folder: Path, weights: list[Mapping[str, Tensor]]
) -> None:
    store = VersionStore(weights[0])
    for version, update in enumerate(weights):
        store.put(version, update)

    async def live() -> None:
        process = _embedded(folder, deltas=True)
        engine = EnginePool([process], Recovery(weights.__getitem__, restarts=1))
        assert engine.takes_deltas
        try:
            await engine.start()
            await _publish(engine, 0, weights[0])
            await engine.interrupt()
            os.kill(process.pid, signal.SIGKILL)
            await engine.load(store.delta(1), 1)
            await engine.resume()
            pieces = await _speak(engine, [5, 6], 60, seed=3)
            assert {piece.version for piece in pieces} == {1}
            wanted = await _undisturbed(process, weights[1], {3: [5, 6]}, end=62)
        finally:
            await engine.close()
        assert _said(pieces) == wanted[3]

    asyncio.run(live())


def test_an_elastic_pool_starts_with_one_engine_and_the_others_join() -> None:
    """Nothing waits for an engine that starts. It joins with the version of that moment."""
    gate = asyncio.Event()
    events: list[tuple[str, int]] = []

    class Late(_Fake):
        async def start(self) -> None:
            await gate.wait()
            await super().start()

    async def live() -> None:
        first, late = _Fake(), Late()
        weights: Any = {"from": "disk"}
        recovery = Recovery(
            lambda version: weights,
            restarts=0,
            on_event=lambda kind, *, engine, **_: events.append((kind, engine)),
        )
        pool = EnginePool([first, late], recovery, patience_s=60)
        await pool.start()
        for version in (0, 1):
            await _publish(pool, version)
        assert [piece.version for piece in await _speak(pool, [0], 3)] == [1]
        assert late.told == [] and events == [("engine_joined", 0)]
        gate.set()
        await until(lambda: late.told == ["start", "disk 1", "resume"], "the late engine")
        await _publish(pool, 2)
        assert late.told[3:] == ["interrupt", "trainer 2", "resume"]
        await pool.close()

    asyncio.run(live())
    assert events == [("engine_joined", 0), ("engine_joined", 1)]


def test_an_elastic_pool_does_not_wait_for_a_slow_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that lags behind in an update is lost, and loads the version again by itself."""
    monkeypatch.setattr(pool_module, "MAX_LAG_S", 0.3)
    gate = asyncio.Event()

    class Slow(_Fake):
        async def load(self, update: Update, version: int) -> None:
            if version == 1:
                await gate.wait()
            await super().load(update, version)

    async def live() -> None:
        slow = Slow()
        weights: Any = {"from": "disk"}
        engines = [_Fake(), slow]
        pool = EnginePool(engines, Recovery(lambda version: weights, restarts=1), patience_s=60)
        await pool.start()
        await asyncio.sleep(0.01)
        for version in (0, 1):
            await _publish(pool, version)
        assert [piece.version for piece in await _speak(pool, [0], 3)] == [1]
        assert pool.metrics()["crashes"] == 1
        gate.set()
        await until(lambda: slow.told[-3:] == ["start", "disk 1", "resume"], "the lost engine")
        await pool.close()

    asyncio.run(live())


def test_an_elastic_pool_gives_up_when_no_engine_was_up_for_too_long() -> None:
    class Never(_Fake):
        async def start(self) -> None:
            await asyncio.Event().wait()

    async def live() -> None:
        pool = EnginePool([Never()], patience_s=0.05)
        with pytest.raises(EngineDied, match=r"no engine was ready for 0\.05 s"):
            await pool.start()
        await pool.close()

    asyncio.run(live())


class _Counting(_Fake):
    """A fake with counters: 30 of 40 prompt tokens were cached, and half of the time busy."""

    def metrics(self) -> Mapping[str, float]:
        own = {"busy_s": 2.0, "idle_s": 2.0, "cached_tokens": 30.0, "prefill_tokens": 10.0}
        return {**super().metrics(), **own}


def test_each_engine_has_its_own_metrics() -> None:
    """Engine 0 dies and comes back. Then each of two engines holds one reply."""
    gate = asyncio.Event()

    async def held(tokens: Sequence[int], params: SamplingParams) -> None:
        if params.max_tokens == 5:
            await gate.wait()

    async def live() -> None:
        fakes = _Counting(delay=held), _Counting(delay=held)
        pool = _pool(*fakes)
        await pool.start()
        before = pool.metrics()
        assert before["engine_0/up"] == 1 and "engine_0/version" not in before
        fakes[0].die("out of memory")
        await _publish(pool, 7)
        await until(lambda: fakes[0].told[-1] == "resume", "the restart")
        await _speak(pool, [0], 8)
        replies = [asyncio.ensure_future(_speak(pool, [1, 2], 5)) for _ in range(2)]
        await asyncio.sleep(0.01)
        found = rates(pool.metrics())
        rates_of = [found.pop(f"engine_{number}/sampled_tokens_per_s") for number in range(2)]
        assert sorted(rates_of) == [0.0, 2.0]  # 8 tokens in 4 s, by one engine
        for number in range(2):
            prefix = f"engine_{number}/"
            assert {
                name.removeprefix(prefix): value
                for name, value in found.items()
                if name.startswith(prefix)
            } == {
                "up": 1.0,
                "version": 7.0,
                "running": 1.0,
                "restarts": float(number == 0),
                "busy_share": 0.5,
                "cached_share": 0.75,
            }
        gate.set()
        await asyncio.gather(*replies)
        assert pool.metrics()["engine_0/restarts"] == 0
        await pool.close()

    asyncio.run(live())


def test_a_pool_lists_a_bounded_number_of_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The metrics of an engine that is a pool itself are not mixed with those of its engines."""
    monkeypatch.setattr(pool_module, "MAX_LISTED", 2)
    inner = [EnginePool([_Fake(), _Fake()]) for _ in range(3)]
    outer = EnginePool(inner)

    async def live() -> None:
        await outer.start()
        for pool in inner:
            await _publish(pool, 5)
        await _publish(outer, 9)
        found = outer.metrics()
        listed = {name.partition("/")[0] for name in found if "/" in name}
        assert listed == {"engine_0", "engine_1"} and found["engine_1/version"] == 9
        await outer.close()

    asyncio.run(live())
