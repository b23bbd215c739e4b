"""The real loop on a virtual clock, with engines, environments and a trainer that only take their time.

`loop.run` itself is driven, and with it `produce`, `train`, `StalenessQueue`, `PendingPieces`, `collate` and `measure_staleness`: who
may begin, what is taken, what is released and how old it may be is decided by the code that trains. Behind the loop's
Protocols stand an engine, a publisher and a trainer that cost seconds (`Costs`). `Rollout` is simulated too: the real
one has a coroutine, a context and journal rows for each episode, which hundreds of thousands of them cannot pay.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from unstale import loop
from unstale.config import CheckpointConfig, ConfigError, EvalConfig, RunConfig, ScheduleConfig
from unstale.durability import virtual_clock
from unstale.durability.checkpoint import Progress
from unstale.old_logps import Needs
from unstale.planner.clock import SimulatedClock
from unstale.planner.costs import Costs
from unstale.planner.engines import EngineCapacity, SimulatedEngine, SimulatedEnginePool
from unstale.planner.episodes import SimulatedRollout
from unstale.planner.parts import (
    Counted,
    Held,
    Idle,
    Lanes,
    SimulatedParts,
    SimulatedPublisher,
    SimulatedRoute,
    SimulatedTrainer,
)
from unstale.planner.result import SimulationResult
from unstale.planner.workload import (
    Constant,
    Distribution,
    EpisodeShape,
    Fleet,
    LogNormal,
    TurnShape,
    Workload,
)
from unstale.records import Group, GroupRequest, ScoredTrajectory, Task
from unstale.rollout.episode import TooManyFailures
from unstale.rollout.staleness_queue import PendingPieces
from unstale.rollout.timeouts import first_error

__all__ = [
    "Constant",
    "Costs",
    "Distribution",
    "EpisodeShape",
    "Fleet",
    "LogNormal",
    "SimulationResult",
    "TurnShape",
    "Workload",
    "simulate",
]


_WAITS = Needs()


def simulate(  # noqa: PLR0913 - the four things that a run is made of, and how long and which
    workload: Workload,
    fleet: Fleet,
    schedule: ScheduleConfig,
    costs: Costs,
    *,
    steps: int,
    seed: int = 0,
    needs: Needs = _WAITS,
) -> SimulationResult:
    """So many steps of a run. The same arguments give the same outcome. `needs` are the route's (`parts.needs`).

    Raises `ConfigError` for settings that cannot be or leave nothing to train on, `StalenessError` if the schedule
    broke its promise.
    """
    if steps < 2:
        raise ConfigError(
            f"a simulation takes at least 2 steps, for the first one fills the line, got {steps}"
        )
    if (every := fleet.steps_per_version) > 1 and (fleet.colocated or needs.closing):
        raise ConfigError(
            f"steps_per_version {every}: where engines stand for each step, a version is of one step"
        )
    clock = SimulatedClock()
    places = EngineCapacity(fleet.max_running, fleet.cache_tokens)
    members = [SimulatedEngine(clock, costs, places, number) for number in range(fleet.engines)]
    engines = SimulatedEnginePool(
        clock, members, keep_cache=fleet.keep_cache, restart_s=fleet.restart_s
    )
    pending = PendingPieces()
    rollout = SimulatedRollout(workload, clock, engines, pending=pending, seed=seed)
    trainer = SimulatedTrainer(
        costs, rollout, closing=needs.closing, colocated=fleet.colocated, every=every
    )
    lanes = Lanes(clock, engines, trainer)
    needs = replace(needs, idle=False, snapshots=needs.snapshots and not fleet.colocated)
    publisher = SimulatedPublisher(costs, clock, engines, trainer=trainer)
    versions = replace(schedule, max_staleness=schedule.max_staleness // every)
    config = RunConfig(
        recipe="simulated", steps=steps, schedule=versions, checkpoint=CheckpointConfig(every=steps + 1),
        eval=EvalConfig(tasks=0),
    )  # fmt: skip
    idle = Idle()

    def advantage(groups: Sequence[Group]) -> list[ScoredTrajectory]:
        return [ScoredTrajectory(one, (0.0,)) for group in groups for one in group.trajectories]

    requests = (
        GroupRequest(number, Task("simulated", "train", number), 0, number) for number in count()
    )

    async def run() -> None:
        if fleet.failures_per_hour:
            engines.fail(np.random.default_rng([seed, 1]), fleet.failures_per_hour)
        parts: dict[str, Any] = {
            "config": config, "stand": Progress(), "begun": (), "requests": requests, "held_out": (), "advantage": advantage,
            "line": Held(schedule, every), "ledger": pending, "engine": publisher, "publisher": publisher,
            "rollout": rollout, "examination": rollout, "policy": Counted(every), "old": SimulatedRoute(needs, trainer),
            "trainer": trainer, "auditor": idle, "journal": idle, "checkpoints": idle, "log": lanes, "worker": clock,
            "disk": clock,
        }  # fmt: skip
        await loop.run(SimulatedParts(**parts))

    try:
        virtual_clock.run(run(), virtual=True)
    except ExceptionGroup as failures:
        if isinstance(error := first_error(failures), TooManyFailures):
            raise ConfigError(f"the simulated run fails: {error}") from None
        raise error from None
    return _outcome(lanes, trainer, engines, schedule)


def _outcome(
    lanes: Lanes, trainer: SimulatedTrainer, engines: SimulatedEnginePool, schedule: ScheduleConfig
) -> SimulationResult:
    steps = [after - before for before, after in zip(lanes.ends, lanes.ends[1:], strict=False)]
    filling = min(schedule.max_staleness + 1, len(steps) - 1)
    scored = lanes.share("old_logps", filling)
    lives, batches, members = trainer.rollout.totals, trainer.batches[filling:], engines.members
    ended, life_s = max(1, lives["episodes"]), max(1e-9, lives["life_s"])
    return SimulationResult(
        steps_s=tuple(steps), filling=filling, groups_per_step=schedule.groups_per_step,
        trained_tokens=sum(tokens for tokens, _ in batches), trained_sampled=sum(sampled for _, sampled in batches),
        sampled_tokens=sum(engine.sampled for engine in members), lost_tokens=sum(engine.lost for engine in members),
        failed_episodes=int(lives["failed"]), deaths=engines.deaths,
        engine_busy_share=lanes.share("engines", filling) / len(members),
        trainer_busy_share=scored + lanes.share("train", filling) + lanes.share("publish", filling),
        trainer_wait_share=lanes.share("wait", filling), old_logps_share=scored,
        staleness_histogram=dict(sorted(trainer.ages.items())),
        staleness_bound=schedule.staleness_bound // trainer.every,
        episode_s=lives["life_s"] / ended, engine_share=lives["engine_s"] / life_s,
        tool_share=lives["tool_s"] / life_s, ready_s=lives["ready_s"] / ended,
    )  # fmt: skip
