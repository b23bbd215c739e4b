"""Simulate a run: the real training loop on a virtual clock, with components that only take time.

`loop.train` runs with the real staleness queue, so a simulation schedules groups as training does.
Engines, trainer and publisher take the seconds of `Costs`. Episodes are simulated without the
coroutine and the journal of a real one, which are too slow for hundreds of thousands of episodes.
"""

from dataclasses import replace
from itertools import pairwise
from typing import cast

import numpy as np

from unstale import loop
from unstale.analysis.planner.clock import SimulatedClock
from unstale.analysis.planner.costs import NO_OVERHEADS, Costs, Overheads
from unstale.analysis.planner.engines import SimulatedEnginePool
from unstale.analysis.planner.episodes import SimulatedRollout
from unstale.analysis.planner.result import EngineWork, SimulationResult
from unstale.analysis.planner.rewards import SimulatedRewards
from unstale.analysis.planner.simulated import (
    InstantThread,
    NullAudit,
    NullCheckpoints,
    NullJournal,
    NullTechniques,
    SimulatedPublisher,
    SimulatedQueue,
    SimulatedRecorder,
    SimulatedRoute,
    SimulatedThread,
    SimulatedTrainer,
)
from unstale.analysis.planner.workload import (
    Constant,
    Distribution,
    EpisodeShape,
    Fleet,
    LogNormal,
    TurnShape,
    Workload,
)
from unstale.config import (
    CheckpointConfig,
    ConfigError,
    EvalConfig,
    RunConfig,
    ScheduleConfig,
    TrainerConfig,
)
from unstale.config.routes import Needs
from unstale.durability import virtual_clock
from unstale.durability.checkpoint import Progress
from unstale.envs.elastic import PoolSize
from unstale.observe.words import waiting
from unstale.rollout.failures import TooManyFailures
from unstale.rollout.hooks import RunHooks
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
    overheads: Overheads = NO_OVERHEADS,
) -> SimulationResult:
    """Simulate `steps` steps of a run. Equal arguments give an equal result.

    `needs` is what the way to get `old_logp` requires. Raises `ConfigError` if too many episodes
    fail with these settings, and `StalenessError` if a token is older than the bound.
    """
    _check(fleet, needs, steps)
    config = _config(schedule, fleet, steps, overheads.checkpoint_every)
    clock = SimulatedClock()
    engines = SimulatedEnginePool(clock, costs, fleet, overheads)
    pending = PendingPieces()
    techniques = NullTechniques()
    rollout = SimulatedRollout(
        workload,
        clock,
        engines,
        pending=pending,
        rewards=SimulatedRewards(
            clock,
            PoolSize(fleet.min_reward_processes, fleet.reward_processes),
            start_s=fleet.reward_start_s,
        ),
        seed=seed,
        overheads=overheads,
    )
    trainer = SimulatedTrainer(costs, rollout, fleet, closing=needs.closing, overheads=overheads)
    recorder = SimulatedRecorder(clock, engines, trainer)
    publisher = SimulatedPublisher(costs, clock, engines, trainer=trainer)
    snapshots = needs.snapshots and not fleet.colocated
    components = loop.RunComponents(
        config=config,
        progress=Progress(),
        resumed_requests=(),
        requests=techniques.requests(),
        engine=publisher,
        rollout=rollout,
        evaluation=None,
        queue=SimulatedQueue(schedule, fleet.steps_per_version),
        pending=pending,
        techniques=cast(RunHooks, techniques),
        old_logps=SimulatedRoute(Needs(closing=needs.closing, snapshots=snapshots), trainer),
        auditor=NullAudit(),
        trainer=trainer,
        publisher=publisher,
        journal=NullJournal(),
        checkpoints=NullCheckpoints(),
        log=recorder,
        trainer_thread=SimulatedThread(clock, trainer),
        io_thread=InstantThread(clock, overheads.checkpoint_s),
    )

    async def run() -> None:
        if fleet.failures_per_hour:
            engines.fail(np.random.default_rng([seed, 1]), fleet.failures_per_hour)
        await loop.train(components)

    try:
        virtual_clock.run(run(), virtual=True)
    except ExceptionGroup as failures:
        if isinstance(error := first_error(failures), TooManyFailures):
            raise ConfigError(f"the simulated run fails: {error}") from None
        raise error from None
    return _result(recorder, trainer, engines, schedule)


def _check(fleet: Fleet, needs: Needs, steps: int) -> None:
    if steps < 2:
        raise ConfigError(
            f"a simulation needs at least 2 steps, because the first fills the queue; got {steps}"
        )
    if fleet.stream and fleet.colocated:
        raise ConfigError(
            "fleet.stream must be false with fleet.colocated, got true: the trainer cannot work "
            "while engines sample on its devices"
        )
    every = fleet.steps_per_version
    if every > 1 and (fleet.colocated or needs.closing):
        raise ConfigError(
            f"steps_per_version must be 1 where engines pause in every step, got {every}"
        )


def _config(schedule: ScheduleConfig, fleet: Fleet, steps: int, checkpoint_every: int) -> RunConfig:
    """Return the configuration with which the training loop is simulated. It has no evaluations."""
    max_staleness = schedule.max_staleness // fleet.steps_per_version
    return RunConfig(
        recipe="simulated",
        max_steps=steps,
        schedule=replace(schedule, max_staleness=max_staleness),
        trainer=TrainerConfig(stream=fleet.stream),
        checkpoint=CheckpointConfig(interval=checkpoint_every or steps + 1),
        eval=EvalConfig(tasks=0),
    )


def _result(
    recorder: SimulatedRecorder,
    trainer: SimulatedTrainer,
    engines: SimulatedEnginePool,
    schedule: ScheduleConfig,
) -> SimulationResult:
    steps = [after - before for before, after in pairwise(recorder.ends)]
    filling = min(schedule.max_staleness + 1, len(steps) - 1)
    scored, trained, published = (
        recorder.share(lane, filling) for lane in ("old_logps", "train", "publish")
    )
    members = engines.members
    batches = trainer.batches[filling:]
    totals = trainer.rollout.totals
    episodes = max(1, totals["episodes"])
    life_s = max(1e-9, totals["life_s"])
    waits = [wait for time, wait in engines.first_tokens if time > recorder.ends[filling]]
    num_prefill = sum(engine.prefills for engine in members)
    busy, prefill_busy = (recorder.share(lane, filling) for lane in ("engines", "prefill_engines"))
    return SimulationResult(
        waiting=waiting(recorder.rows[filling:]),
        versions_mean=float(np.mean(trainer.num_versions[filling:] or [1.0])),
        work=EngineWork(
            steps=recorder.total("steps", filling),
            sampled=recorder.total("sampled", filling),
            prefilled=recorder.total("prefilled", filling),
        ),
        steps_s=tuple(steps),
        filling=filling,
        groups_per_step=schedule.groups_per_step,
        trained_tokens=sum(tokens for tokens, _ in batches),
        trained_sampled=sum(sampled for _, sampled in batches),
        sampled_tokens=sum(engine.sampled for engine in members),
        lost_tokens=sum(engine.lost for engine in members),
        failed_episodes=int(totals["failed"]),
        deaths=engines.deaths,
        engine_busy_share=busy / len(members),
        prefill_busy_share=prefill_busy / max(1, num_prefill),
        decode_busy_share=(busy - prefill_busy) / (len(members) - num_prefill),
        first_token_s=float(np.mean(waits)) if waits else 0.0,
        first_token_p99_s=float(np.quantile(waits, 0.99)) if waits else 0.0,
        rejects=engines.rejects,
        longest_queue=max(engine.longest_queue for engine in members),
        trainer_busy_share=scored + trained + published,
        trainer_wait_share=recorder.share("wait", filling),
        old_logps_share=scored,
        staleness_histogram=dict(sorted(trainer.ages.items())),
        staleness_bound=schedule.staleness_bound // trainer.every,
        episode_s=totals["life_s"] / episodes,
        engine_share=totals["engine_s"] / life_s,
        tool_share=totals["tool_s"] / life_s,
        ready_s=totals["ready_s"] / episodes,
        reward_wait_s=trainer.rollout.rewards.wait_s / episodes,
        reward_starts=trainer.rollout.rewards.starts,
    )
