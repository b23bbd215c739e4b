"""A simulated run: the real loop on a virtual clock, with components that only take time.

`loop.train` runs with its real staleness queue, batches and staleness check, so a simulation makes
the same decisions as training. Engines, trainer and publisher take the seconds of `Costs`. The
rollout is simulated too: a real episode has a coroutine and journal rows, which is too slow for
hundreds of thousands of episodes.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

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
from unstale.planner.result import SimulationResult
from unstale.planner.simulated import (
    InstantThread,
    Lanes,
    NullAudit,
    NullCheckpoints,
    NullJournal,
    SimulatedPublisher,
    SimulatedQueue,
    SimulatedRoute,
    SimulatedThread,
    SimulatedTrainer,
)
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

_NO_NEEDS = Needs()


def simulate(  # noqa: PLR0913 - four parts of a run, its length, seed and route
    workload: Workload,
    fleet: Fleet,
    schedule: ScheduleConfig,
    costs: Costs,
    *,
    steps: int,
    seed: int = 0,
    needs: Needs = _NO_NEEDS,
) -> SimulationResult:
    """Simulate `steps` steps of a run. The same arguments give the same result.

    `needs` are those of the old-log-probability route (`simulated.needs`). Raises `ConfigError` for
    settings with which too many episodes fail, and `StalenessError` if a token is too old.
    """
    every = fleet.steps_per_version
    if steps < 2:
        raise ConfigError(
            f"a simulation needs at least 2 steps, because the first fills the queue; got {steps}"
        )
    if every > 1 and (fleet.colocated or needs.closing):
        raise ConfigError(
            f"steps_per_version must be 1 where engines pause in every step, got {every}"
        )
    clock = SimulatedClock()
    capacity = EngineCapacity(fleet.max_running, fleet.cache_tokens)
    members = [SimulatedEngine(clock, costs, capacity, number) for number in range(fleet.engines)]
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
    config = RunConfig(
        recipe="simulated",
        steps=steps,
        schedule=replace(schedule, max_staleness=schedule.max_staleness // every),
        checkpoint=CheckpointConfig(every=steps + 1),
        eval=EvalConfig(tasks=0),
    )
    requests = (
        GroupRequest(number, Task("simulated", "train", number), 0, number) for number in count()
    )

    async def run() -> None:
        if fleet.failures_per_hour:
            engines.fail(np.random.default_rng([seed, 1]), fleet.failures_per_hour)
        components = loop.RunComponents(
            config=config,
            progress=Progress(),
            resumed_requests=(),
            requests=requests,
            engine=publisher,
            rollout=rollout,
            evaluation=None,
            queue=SimulatedQueue(schedule, every),
            pending=pending,
            advantage=_zero_advantages,
            old_logps=SimulatedRoute(needs, trainer),
            auditor=NullAudit(),
            trainer=trainer,
            publisher=publisher,
            journal=NullJournal(),
            checkpoints=NullCheckpoints(),
            log=lanes,
            trainer_thread=SimulatedThread(clock, trainer),
            io_thread=InstantThread(),
        )
        await loop.train(components)

    try:
        virtual_clock.run(run(), virtual=True)
    except ExceptionGroup as failures:
        if isinstance(error := first_error(failures), TooManyFailures):
            raise ConfigError(f"the simulated run fails: {error}") from None
        raise error from None
    return _outcome(lanes, trainer, engines, schedule)


def _zero_advantages(groups: Sequence[Group]) -> list[ScoredTrajectory]:
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    return [ScoredTrajectory(trajectory, (0.0,)) for trajectory in trajectories]


def _outcome(
    lanes: Lanes, trainer: SimulatedTrainer, engines: SimulatedEnginePool, schedule: ScheduleConfig
) -> SimulationResult:
    steps = [after - before for before, after in zip(lanes.ends, lanes.ends[1:], strict=False)]
    filling = min(schedule.max_staleness + 1, len(steps) - 1)
    scored = lanes.share("old_logps", filling)
    members = engines.members
    batches = trainer.batches[filling:]
    totals = trainer.rollout.totals
    episodes = max(1, totals["episodes"])
    life_s = max(1e-9, totals["life_s"])
    return SimulationResult(
        steps_s=tuple(steps),
        filling=filling,
        groups_per_step=schedule.groups_per_step,
        trained_tokens=sum(tokens for tokens, _ in batches),
        trained_sampled=sum(sampled for _, sampled in batches),
        sampled_tokens=sum(engine.sampled for engine in members),
        lost_tokens=sum(engine.lost for engine in members),
        failed_episodes=int(totals["failed"]),
        deaths=engines.deaths,
        engine_busy_share=lanes.share("engines", filling) / len(members),
        trainer_busy_share=scored + lanes.share("train", filling) + lanes.share("publish", filling),
        trainer_wait_share=lanes.share("wait", filling),
        old_logps_share=scored,
        staleness_histogram=dict(sorted(trainer.ages.items())),
        staleness_bound=schedule.staleness_bound // trainer.every,
        episode_s=totals["life_s"] / episodes,
        engine_share=totals["engine_s"] / life_s,
        tool_share=totals["tool_s"] / life_s,
        ready_s=totals["ready_s"] / episodes,
    )
