"""Groups of engines by scenario, with their own ratio of prefill to decode engines (P/D-Serve).

Sizes are compared with numbers worked out by hand. Pools of scripted engines show that requests
stay in their group, are offered again after a rejection, and lose nothing when engines move.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.support.run_engine import run_engine
from unstale.durability import virtual_clock
from unstale.engines import Engine, Rejected, Reply, SamplingParams
from unstale.engines.groups import Groups, GroupTimes, assign
from unstale.engines.pool import EnginePool, Recovery, supervise
from unstale.engines.prefixes import hash_blocks
from unstale.engines.routing import Phases
from unstale.engines.scripted import Delay, Script, ScriptedEngine


async def publish(engine: Engine, version: int) -> None:
    await engine.interrupt()
    await engine.load({}, version)
    await engine.resume()


def measured(
    *, requests: float, prefill_s: float, in_flight: float, at_one: float, each: float
) -> GroupTimes:
    """Return the times of a group in 100 s: replies of 10 tokens, whose seconds are `at_one` with
    one running request, and `each` more with each further one.
    """
    times = GroupTimes(requests, prefill_s, in_flight * 100, elapsed_s=100)
    for running in (1, 5):
        tokens = 5 * int(requests)
        times.add_reply(tokens, tokens * (at_one + each * (running - 1)), running)
    return times


def test_a_group_is_as_fast_as_its_slower_phase() -> None:
    """Prefill takes 2 s of each of 50 requests. A token takes 0.1 s plus 0.02 s for each of the
    other requests, so a reply takes 1 s with one request and 2.4 s with 8."""
    times = measured(requests=50, prefill_s=100, in_flight=8, at_one=0.1, each=0.02)
    assert times.rate((1, 3), 100) == 0.5, "one prefill engine"
    assert times.rate((3, 1), 100) == pytest.approx(1.5), "8 requests, or 3.3 a second"
    assert times.rate((9, 1), 100) == pytest.approx(8 / 2.4)
    assert times.rate((9, 1), 2) == pytest.approx(2 / 1.2), "only 2 may run"


@pytest.mark.parametrize(
    ("prefill_s", "each", "expected"),
    [
        (10, 0.1, (1, 5)),  # a reply takes 1 s of an engine, the prefill 0.2 s
        (50, 0.1, (3, 3)),  # 1 s each
        (250, 0.1, (5, 1)),
        (50, 0.0, (5, 1)),  # a step takes as long for 20 requests as for one
    ],
)
def test_the_ratio_follows_the_measured_times(
    prefill_s: float, each: float, expected: tuple[int, int]
) -> None:
    groups = Groups(Phases(1, moves=True))
    groups.times = [measured(requests=50, prefill_s=prefill_s, in_flight=20, at_one=0.1, each=each)]
    assert groups.sizes([(3, 3) if expected != (3, 3) else (1, 5)], 64) == [expected]


def test_the_group_with_more_requests_gets_more_engines_and_small_gains_move_none() -> None:
    def sizes(first: float, second: float) -> list[tuple[int, int]]:
        groups = Groups(Phases(scenarios="task_set", moves=True))
        groups.times = [
            measured(requests=n, prefill_s=0, in_flight=20, at_one=0.1, each=0.1)
            for n in (first, second)
        ]
        return groups.sizes([(0, 4), (0, 4)], 64)

    assert sizes(300, 100) == [(0, 6), (0, 2)]
    assert sizes(300, 0) == [(0, 7), (0, 1)]
    assert sizes(100, 95) == [(0, 4), (0, 4)]


def test_nothing_moves_before_anything_is_measured() -> None:
    assert Groups(Phases(1, moves=True)).sizes([(1, 3)], 64) == [(1, 3)]


def test_engines_keep_their_place_where_sizes_allow() -> None:
    cells = [(0, True), (0, False), (1, True), (1, False), (1, False)]
    assert assign(cells, [(1, 2), (1, 1)]) == [*cells[:4], (0, False)]
    assert Counter(assign(cells, [(1, 3), (0, 1)])) == {(0, True): 1, (0, False): 3, (1, False): 1}


def test_families_of_prompts_are_told_by_their_first_64_tokens() -> None:
    groups = Groups(Phases(scenarios="prefix"))
    system = [*range(64)]

    def group(context: Sequence[int]) -> int:
        return groups.of(groups.scenario("retail", hash_blocks(context)), engines=4, prefill=0)

    assert [group(system + [9] * 20), group([7] * 80), group([*system, 5])] == [0, 1, 0]


class Counting:
    """Scripted engines that record which of them served which scenario.

    Each runs at most `places` requests that must not wait. A token takes `token_s` seconds, and the
    only token of a prefill engine `prefill_s`.
    """

    token_s = 0.001
    prefill_s = 0.001
    spread_s = 0.0
    """Largest number of further seconds of a prefill. No two contexts have the same."""

    def __init__(self, count: int, *, places: int = 1 << 30) -> None:
        self.served: Counter[tuple[int, str]] = Counter()
        self.rejected = 0
        self.places = places
        self.engines = [self._engine(number) for number in range(count)]

    def _engine(self, number: int) -> "Limited":
        def script(tokens: Sequence[int], params: SamplingParams) -> list[int]:
            self.served[number, params.scenario] += 1
            return [1] * params.max_tokens

        async def delay(tokens: Sequence[int], params: SamplingParams) -> None:
            prefill_s = self.prefill_s + self.spread_s * (0.618034 * tokens[0] % 1)
            await asyncio.sleep(prefill_s if params.max_tokens == 1 else self.token_s)

        return Limited(self, script, delay)

    def of(self, scenario: str) -> set[int]:
        return {number for number, name in self.served if name == scenario}


class Limited(ScriptedEngine):
    """A scripted engine that rejects requests beyond `places`, and can send its cache."""

    def __init__(self, owner: Counting, script: Script, delay: Delay) -> None:
        super().__init__(script, token_delay=delay)
        self._owner = owner
        self.running = 0
        self.most = 0

    async def sample(self, tokens: Sequence[int], params: SamplingParams) -> Reply:
        await asyncio.sleep(0)
        if not params.waits and self.running >= self._owner.places:
            self._owner.rejected += 1
            raise Rejected("full")
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await super().sample(tokens, params)
        finally:
            self.running -= 1

    async def cache_address(self, tokens: Sequence[int]) -> str:
        return ""

    async def send_cache(self, tokens: Sequence[int], address: str) -> int:
        return len(tokens)


def ask(pool: EnginePool, scenario: str, number: int, length: int = 80) -> "asyncio.Task[Reply]":
    params = SamplingParams(4, (), scenario=scenario)
    return asyncio.ensure_future(pool.sample([number] * length, params))


def test_requests_of_a_scenario_stay_in_its_group() -> None:
    counting = Counting(4)
    phases = Phases(2, ratio=1.0, sends_cache=True, scenarios="task_set")
    pool = EnginePool(counting.engines, phases=phases)

    async def story() -> None:
        await publish(pool, 0)
        await ask(pool, "airline", 0)
        counting.served.clear()
        names = ("airline", "retail")
        await asyncio.gather(*(ask(pool, names[n % 2], n) for n in range(40)))
        assert counting.of("airline") == {0, 2} and counting.of("retail") == {1, 3}
        assert pool.metrics()["scenario_groups"] == 2
        await ask(pool, "third", 99)
        assert counting.of("third") in ({0, 2}, {1, 3}), "no engines are left for a third group"

    run_engine(pool, story)


def test_a_group_without_a_working_engine_is_served_by_the_others() -> None:
    counting = Counting(2)
    pool = supervise(EnginePool(counting.engines, phases=Phases(scenarios="task_set")), Recovery())

    async def story() -> None:
        await publish(pool, 0)
        await asyncio.gather(ask(pool, "airline", 1), ask(pool, "retail", 2))
        (own,) = counting.of("retail")
        counting.engines[own].die("killed")
        assert (await ask(pool, "retail", 3)).stop == "interrupted"
        assert (await ask(pool, "retail", 3)).stop == "length"
        assert counting.of("retail") == {0, 1}

    run_engine(pool, story)


def test_a_rejected_request_goes_to_the_next_prefill_engine_and_then_waits_in_the_pool() -> None:
    counting = Counting(4, places=1)
    pool = EnginePool(counting.engines, phases=Phases(3, ratio=1.0, sends_cache=True))

    async def story() -> None:
        await publish(pool, 0)
        replies = await asyncio.gather(*(ask(pool, "", n) for n in range(12)))
        assert {(reply.stop, len(reply.piece.tokens)) for reply in replies} == {("length", 4)}
        assert [engine.most for engine in counting.engines[:3]] == [1, 1, 1]
        assert counting.rejected > 0 and pool.metrics()["rejects"] == counting.rejected
        served = [counting.served[number, ""] for number in range(4)]
        assert sum(served[:3]) == 12 and min(served[:3]) > 0 and served[3] == 12

    run_engine(pool, story)


def test_waiting_requests_end_with_an_interruption_and_lose_nothing() -> None:
    counting = Counting(2, places=0)
    pool = EnginePool(counting.engines, phases=Phases(1, ratio=1.0, sends_cache=True))

    async def story() -> None:
        await publish(pool, 0)
        waiting = [ask(pool, "", n) for n in range(6)]
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in waiting), "all engines reject"
        await publish(pool, 1)
        replies = await asyncio.gather(*waiting)
        assert {(reply.stop, reply.piece.tokens) for reply in replies} == {("interrupted", ())}
        paused = [ask(pool, "", n) for n in range(6)]
        counting.places = 1
        replies = await asyncio.gather(*paused)
        assert {reply.stop for reply in replies} == {"length"}

    run_engine(pool, story)


def test_engines_change_phase_between_versions_as_measured() -> None:
    """First a prefill takes 20 ms and the rest of a reply 3 ms, then 1 ms and 60 ms."""
    counting = Counting(4, places=1)
    phases = Phases(1, ratio=1.0, sends_cache=True, moves=True)
    pool = EnginePool(counting.engines, max_running=2, phases=phases)
    counting.prefill_s = 0.02

    async def round_(version: int) -> float:
        await publish(pool, version)
        replies = await asyncio.gather(*(ask(pool, "", n) for n in range(16)))
        assert {(reply.stop, len(reply.piece.tokens)) for reply in replies} == {("length", 4)}
        await publish(pool, version + 1)
        return pool.metrics()["prefill_engines"]

    async def story() -> list[float]:
        await pool.start()
        found = [await round_(0)]
        counting.prefill_s, counting.token_s = 0.001, 0.02
        found += [await round_(version) for version in range(2, 10, 2)]
        await pool.close()
        return found

    found = virtual_clock.run(story(), virtual=True)
    assert (found[0], found[-1]) == (3, 1), found


def test_engines_change_phase_within_a_version_and_no_reply_is_interrupted() -> None:
    """First a prefill takes 2 to 3 s and the rest of a reply 0.3 s, then 0.1 s and 6 s. Prefill
    engines have two requests at once, so at first they are never idle."""
    counting = Counting(4, places=2)
    phases = Phases(1, ratio=1.0, sends_cache=True, moves=True)
    pool = EnginePool(counting.engines, max_running=2, phases=phases)
    replies: list[Reply] = []

    prompts = itertools.count()

    async def client(until: float) -> None:
        while asyncio.get_running_loop().time() < until:
            replies.append(await ask(pool, "", next(prompts)))

    async def serve(prefill_s: float, spread_s: float, token_s: float) -> dict[str, float]:
        counting.prefill_s, counting.spread_s, counting.token_s = prefill_s, spread_s, token_s
        until = asyncio.get_running_loop().time() + 300
        await asyncio.gather(*(client(until) for _ in range(16)))
        return dict(pool.metrics())

    async def story() -> list[dict[str, float]]:
        await pool.start()
        await publish(pool, 0)
        found = [await serve(2.0, 1.0, 0.1), await serve(0.1, 0.0, 2.0)]
        await pool.close()
        return found

    first, last = virtual_clock.run(story(), virtual=True)
    assert (first["prefill_engines"], last["prefill_engines"]) == (3, 1)
    assert (first["group_0/prefill_engines"], first["group_0/decode_engines"]) == (3, 1)
    assert (first["moves"], last["moves"]) == (2, 2)
    assert {(each.stop, len(each.piece.tokens)) for each in replies} == {("length", 4)}


def test_the_time_to_the_first_token_has_the_wait_for_a_rejecting_engine() -> None:
    """A prefill takes 0.4 s, and each scenario has a prefill engine, which runs one at a time."""
    counting = Counting(4, places=1)
    counting.prefill_s, counting.token_s = 0.4, 3.0
    phases = Phases(2, ratio=1.0, sends_cache=True, scenarios="task_set")
    pool = EnginePool(counting.engines, phases=phases)

    async def story() -> tuple[list[Reply], dict[str, float]]:
        await pool.start()
        await publish(pool, 0)
        for name in ("airline", "retail"):  # the second one creates its group
            await ask(pool, name, 0)
        pool.metrics()
        asked = [("airline", n) for n in range(1, 5)] + [("retail", 5)]
        replies = await asyncio.gather(*(ask(pool, *each) for each in asked))
        found = dict(pool.metrics())
        await pool.close()
        return replies, found

    replies, found = virtual_clock.run(story(), virtual=True)
    assert [reply.first_token_s for reply in replies] == pytest.approx([0.4, 0.8, 1.2, 1.6, 0.4])
    assert found["first_token_s"] == pytest.approx(0.88)
    assert found["group_0/first_token_s"] == pytest.approx(1.0)
    assert found["group_0/first_token_p99_s"] == pytest.approx(1.6)
    assert found["group_1/first_token_s"] == pytest.approx(0.4)
    assert (found["group_0/requests"], found["group_1/requests"]) == (4, 1)
    assert found["forwards"] == 3 and found["rejects"] >= 3
