"""Groups of simulated engines: times worked out by hand, and the effect over 20 seeds.

The effects hold in these simulations, at equal load. docs/planning.md has cases in which groups
lose.
"""

from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest

from unstale.analysis.planner.clock import SimulatedClock
from unstale.analysis.planner.costs import LinearCosts
from unstale.analysis.planner.engines import SimulatedEnginePool, SimulatedReply
from unstale.analysis.planner.measured import recorded_fleet
from unstale.analysis.planner.simulate import (
    Constant,
    Fleet,
    LogNormal,
    SimulationResult,
    Workload,
    simulate,
)
from unstale.cli.main import main
from unstale.config import ClusterConfig, ConfigError, EngineConfig, RunConfig, ScheduleConfig
from unstale.durability import virtual_clock

STEP = LinearCosts(decode=0.1, prefill_token=0.01)


class Seen:
    """Requests of simulated replies, and what came of them: (time, tokens, complete)."""

    def __init__(self, fleet: Fleet, costs: LinearCosts = STEP) -> None:
        self.clock = SimulatedClock()
        self.engines = SimulatedEnginePool(self.clock, costs, fleet)
        self.engines.lengths.add(10)
        self.pieces: list[tuple[float, int, bool]] = []
        self.made: list[SimulatedReply] = []

    def ask(self, *, context: int, tokens: int) -> SimulatedReply:
        def on_tokens(count: int, complete: bool) -> None:
            self.pieces.append((round(self.clock.now, 6), count, complete))

        number = len(self.made)
        reply = SimulatedReply(number, (), on_tokens, context, left=tokens)
        reply.requested_at = self.clock.now
        self.made.append(reply)
        self.engines.sample(reply)
        return reply

    def play(self, *actions: tuple[float, Any]) -> None:
        async def run() -> None:
            self.engines.resume(0)
            for time, action in actions:
                self.clock.at(time, action)
            await self.clock.sleep(100)

        virtual_clock.run(run(), virtual=True)

    @property
    def waits(self) -> list[float]:
        return [round(wait, 6) for _, wait in self.engines.first_tokens]


def test_the_first_token_comes_with_the_first_step_after_the_contexts() -> None:
    """One engine: 0.5 s of context and a step; the second one's 0.3 s come after that step."""
    seen = Seen(Fleet())
    seen.play(
        (0.0, lambda: seen.ask(context=50, tokens=9)),
        (0.55, lambda: seen.ask(context=30, tokens=5)),
    )
    assert seen.waits == pytest.approx([0.6, 0.6 + 0.3 + 0.1 - 0.55])


def test_a_full_engine_rejects_also_in_the_simulation() -> None:
    """The second request goes to the engine with a place, although the other has its prefix."""
    seen = Seen(Fleet(engines=2, max_running=1))

    def second() -> None:
        reply = SimulatedReply(9, (), lambda tokens, complete: None, 10, left=2)
        reply.engine, reply.cached = seen.engines.members[0], 1000
        reply.requested_at = seen.clock.now
        seen.engines.sample(reply)

    seen.play((0.0, lambda: seen.ask(context=10, tokens=30)), (1.0, second))
    assert (seen.waits[-1], seen.engines.rejects) == (0.2, 1)


COSTS = LinearCosts(
    decode=0.012,
    decode_reply=1e-4,
    decode_context=2e-8,
    prefill_token=1e-4,
    train_token=1e-6,
)
AGENT = Workload(
    prompt_tokens=LogNormal(2000, 0.8, 12000),
    turns=Constant(4),
    reply_tokens=LogNormal(150, 0.8, 2000),
    tool_tokens=LogNormal(500, 1.0, 8000),
    tool_s=LogNormal(2, 1),
)
SCHEDULE = ScheduleConfig(max_staleness=1, groups_per_step=8, group_size=4)
POOL = Fleet(engines=4, max_running=32)


def runs(fleet: Fleet, workload: Workload = AGENT, *, seeds: int = 20) -> list[SimulationResult]:
    return [simulate(workload, fleet, SCHEDULE, COSTS, steps=3, seed=seed) for seed in range(seeds)]


@pytest.mark.costly
def test_groups_shorten_the_wait_for_the_first_token() -> None:
    """Prompts of 2000 tokens and four short turns, two of four engines for prompts."""
    plain = runs(POOL)
    grouped = runs(replace(POOL, prefill_engines=2))
    ratios = [b.first_token_s / a.first_token_s for a, b in zip(plain, grouped, strict=True)]
    assert sum(ratio < 1 for ratio in ratios) >= 18
    assert fmean(ratios) < 0.75


def test_every_token_is_trained_on_with_groups_and_dying_engines() -> None:
    fleet = replace(POOL, prefill_engines=1, prefill_ratio=2.0)
    fleet = replace(fleet, failures_per_hour=400.0, restart_s=1.0)
    result = simulate(AGENT, fleet, SCHEDULE, COSTS, steps=4)
    plain = simulate(AGENT, POOL, SCHEDULE, COSTS, steps=4)
    assert result.deaths > 0
    trained = sum(result.staleness_histogram.values())
    assert trained == sum(plain.staleness_histogram.values())


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"prefill_engines": 4}, "fleet.prefill_engines must be < 4"),
        ({"prefill_ratio": 2.0}, "fleet.prefill_ratio is used only with fleet.prefill_engines"),
    ],
)
def test_groups_that_cannot_be_are_refused(values: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Fleet(engines=4, **values)


def test_the_engines_of_a_recorded_run_are_those_of_all_hosts() -> None:
    engine = EngineConfig(processes=2, max_running=16, prefill_engines=1)
    for hosts, engines, prefill_engines in ((0, 2, 1), (3, 6, 2)):
        config = RunConfig(
            recipe="retail", engine=engine, cluster=ClusterConfig(engine_hosts=hosts)
        )
        fleet = recorded_fleet(config)
        assert (fleet.engines, fleet.prefill_engines, fleet.max_running) == (
            engines,
            prefill_engines,
            8,
        )


def test_two_simulations_are_shown_in_columns(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "simulate --steps 3 --set fleet.engines=2 costs.decode=0.01 costs.train=0.1 "
        "--against fleet.prefill_engines=1"
    )
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["as", "set", "fleet.prefill_engines=1"]
    (first,) = (line for line in lines if line.startswith("first token"))
    assert first.count("mean") == 2 and "prefill group" in "".join(lines)
