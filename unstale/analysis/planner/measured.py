"""The workload and the durations of recorded runs, for `unstale simulate --like`."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from unstale.analysis.planner.costs import NO_OVERHEADS, LinearCosts, Overheads, Pace
from unstale.analysis.planner.fit import Fit, fit
from unstale.analysis.planner.hardware import Device, Shares
from unstale.analysis.planner.models import Model
from unstale.analysis.planner.recorded import RecordedRun, RecordedStep
from unstale.analysis.planner.result import SimulationResult
from unstale.analysis.planner.simulate import simulate
from unstale.analysis.planner.workload import (
    Constant,
    EpisodeShape,
    Fleet,
    LogNormal,
    Workload,
    mean_attended,
)
from unstale.config import ConfigError, RunConfig, ScheduleConfig
from unstale.config.routes import Needs
from unstale.config.techniques import chosen
from unstale.trainer.threads import trainer_threads


@dataclass(frozen=True, slots=True)
class SimulationSetup:
    """The arguments of `planner.simulate.simulate`, which simulates a run."""

    workload: Workload
    fleet: Fleet
    schedule: ScheduleConfig
    costs: LinearCosts
    needs: Needs
    overheads: Overheads = NO_OVERHEADS

    def simulate(self, steps: int, seed: int = 0) -> SimulationResult:
        return simulate(
            self.workload,
            self.fleet,
            self.schedule,
            self.costs,
            steps=steps,
            seed=seed,
            needs=self.needs,
            overheads=self.overheads,
        )


@dataclass(frozen=True, slots=True)
class FittedCosts:
    """Durations of engines and trainer, fitted to the recorded steps of one or more runs."""

    engine: Fit
    train: Fit
    old: Fit
    optimizer_s: float
    publish: float
    stage: float
    load: float

    @property
    def costs(self) -> LinearCosts:
        return LinearCosts(
            **self.engine.seconds,
            **self.train.seconds,
            **self.old.seconds,
            optimizer_s=self.optimizer_s,
            publish=self.publish,
            stage=self.stage,
            load=self.load,
        )


_CHANGES = frozenset({"tasks", "count", "turns", "groups"})
"""Values of `Entry.changes` (what a technique changes) that also change how long a run takes."""


def setup_of(run: RecordedRun, fitted: FittedCosts) -> SimulationSetup:
    """Return the arguments to simulate a recorded run, with its episodes and the durations
    `fitted`.

    The seconds of tool calls are drawn; the standard deviation of their logarithm is
    `task.latency_sigma`. Raises `ConfigError` if the run has techniques that cannot be simulated.
    The technique `limits` can be, because the recorded episodes are already cut off by it.
    """
    config = run.config
    other = [
        each.name
        for each in chosen(config.techniques)
        if each.changes & _CHANGES and each.name != "limits"
    ]
    if other:
        raise ConfigError(
            f"the run has techniques that cannot be simulated: {', '.join(other)}. Take a run "
            "without them"
        )
    return SimulationSetup(
        workload=recorded_workload(config, run.groups, run.call_s),
        fleet=recorded_fleet(config),
        schedule=config.schedule,
        costs=fitted.costs,
        needs=config.old_logps.needs,
        overheads=recorded_overheads(run, fitted),
    )


def recorded_workload(
    config: RunConfig, groups: Sequence[Sequence[EpisodeShape]], call_s: float
) -> Workload:
    """Return the recorded episodes `groups` as a workload.

    `call_s` is the mean seconds of a tool call.
    """
    task: Any = config.task
    delays = getattr(task, "latency_s", 0.0) > 0
    return Workload(
        recorded=tuple(map(tuple, groups)),
        tool_s=LogNormal(call_s, task.latency_sigma) if delays else Constant(call_s),
        equal_tool_s=delays,
        timeout_s=config.rollout.timeout_s,
        retries=config.rollout.retries,
    )


def recorded_overheads(run: RecordedRun, fitted: FittedCosts) -> Overheads:
    """Return the seconds of a run's smaller parts, and the pace of each of its steps.

    A pace has measured durations divided by the fitted ones.
    """
    between = [each.between for each in run.steps if each.between is not None]
    written = [each.checkpoint for each in run.steps if each.checkpoint]
    return Overheads(
        audit_s=fmean(each["audit/duration_s"] for each in run.steps),
        batch_s=fmean(between) if between else 0.0,
        checkpoint_s=fmean(written) if written else 0.0,
        checkpoint_every=round(len(run.steps) / len(written)) if written else 0,
        paces=tuple(pace(each, run, fitted) for each in run.steady),
    )


def recorded_fleet(config: RunConfig) -> Fleet:
    """Return the engines of a run on all its hosts.

    With `cluster.engine_hosts`, prefill and decode groups consist of whole hosts, so
    `engine.prefill_engines` counts hosts.
    """
    engine = config.engine
    hosts = config.cluster.engine_hosts
    return Fleet(
        engines=max(1, hosts) * engine.num_engines,
        max_running=engine.max_running // engine.num_started,
        keep_cache=engine.keep_cache,
        load_tokens=engine.load_tokens,
        prefill_engines=engine.prefill_engines * (engine.num_engines if hosts else 1),
        prefill_ratio=engine.prefill_ratio,
    )


def pace(step: RecordedStep, run: RecordedRun, fitted: FittedCosts) -> Pace:
    """Return the measured durations of a step, each divided by the one that `fitted` predicts."""

    def ratio(seconds: float, predicted: float) -> float:
        return seconds / predicted if predicted > 0 else 1.0

    busy_s = step["engine/busy_s"] * recorded_fleet(run.config).engines
    return Pace(
        engine=ratio(busy_s, fitted.engine.predict(engine_work(step))),
        train=ratio(step["trainer/update_s"], fitted.train.predict(training_work(step))),
        old=ratio(step["old_logps/prepare_s"], fitted.old.predict(scoring_work(step))),
    )


def engine_work(step: RecordedStep) -> dict[str, float]:
    """Return coefficient of `LinearCosts` -> amount of the engines' work in a step, such as
    decoding steps, that it multiplies.
    """
    decoding = step["engine/steps"]
    return {
        "decode": decoding,
        "decode_reply": decoding * step["engine/batch_size_mean"],
        "prefill_token": step["engine/prefill_tokens"],
    }


def training_work(step: RecordedStep) -> dict[str, float]:
    return {"train": 1.0, "train_token": step.tokens}


def scoring_work(step: RecordedStep) -> dict[str, float]:
    more_versions = max(0.0, step.versions - 1)
    return {
        "old": 1.0,
        "old_token": step.tokens,
        "old_version_token": step.tokens * more_versions,
    }


def fit_costs(runs: Sequence[RecordedRun]) -> FittedCosts:
    """Return the costs that fit the recorded steps of all `runs`, by least squares.

    The engines' busy time is fitted to numbers of decoding steps, of replies in these steps and of
    computed context tokens. Training and scoring are fitted to the tokens of a batch.
    """
    steps = [each for run in runs for each in run.steps]
    busy_s = [
        each["engine/busy_s"] * recorded_fleet(run.config).engines
        for run in runs
        for each in run.steps
    ]
    return FittedCosts(
        engine=fit(busy_s, [engine_work(each) for each in steps]),
        train=fit(
            [each["trainer/update_s"] for each in steps], [training_work(each) for each in steps]
        ),
        old=fit(
            [each["old_logps/prepare_s"] for each in steps], [scoring_work(each) for each in steps]
        ),
        optimizer_s=fmean(each.optimizer for each in steps),
        publish=fmean(each.publish for each in steps),
        stage=fmean(each.stage for each in steps),
        load=fmean(each.load for each in steps),
    )


def core_of_run(run: Path, model: Model) -> tuple[Device, Shares]:
    """Return a processor core of this machine as a device, with the speed that it reached in a run.

    The speed is right only if the run trained `model`. The bandwidth of main memory, through which
    processes exchange data, is measured now. Raises `ConfigError` if `RecordedRun.read` refuses the
    run, if its batches have too similar sizes, or if its number of cores was not recorded.
    """
    recorded = RecordedRun.read(run)
    setup = setup_of(recorded, fit_costs([recorded]))
    if not setup.costs.train_token:
        raise ConfigError(f"{run}: its batches are too similar in size to fit a cost per token")
    config = recorded.config
    if not (recorded.cores or config.trainer.threads):
        raise ConfigError(
            f"{run}: it does not say how many cores its trainer had; record another one, or one "
            "with --trainer.threads"
        )
    threads = training_threads(config, recorded.cores)
    return core_of(setup, model, training=threads, sampling=config.engine.threads)


def training_threads(config: RunConfig, num_cores: int) -> int:
    """Return the number of threads of all trainer ranks of a run together.

    The machine has `num_cores` cores. Threads that a trainer uses only while no episode runs count
    for synchronous runs, and not for others.
    """
    ranks = config.cluster.trainers
    alone = config.schedule.max_staleness == 0 and not (ranks or config.trainer.compile)
    threads = trainer_threads(config, with_engine_cores=alone, num_cores=num_cores)
    return threads * max(1, ranks)


def core_of(
    setup: SimulationSetup, model: Model, *, training: int, sampling: int
) -> tuple[Device, Shares]:
    """Return a processor core as a device, with the speed that the costs of `setup` imply.

    `training` is the number of threads of the trainer, and `sampling` that of each engine.
    """
    costs = setup.costs
    tokens = [shape.tokens for group in setup.workload.recorded for shape in group]
    attended = mean_attended(tokens)
    train = 3 * model.forward_flops(attended) / costs.train_token / training
    decode = train
    if costs.decode_reply:
        decode = model.forward_flops(attended) / costs.decode_reply / sampling
    peak = max(train, decode)
    copy_rate = _copy_rate()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(os.sched_getaffinity(0))
    device = Device(
        name="core of this machine",
        flops=peak,
        memory=memory,
        node=1 << 30,
        bandwidth=copy_rate,
        link=copy_rate,
        host_link=copy_rate,
        network=copy_rate,
    )
    shares = Shares(
        matmul=train / peak,
        decode=decode / peak,
        bandwidth=1.0,
        link=1.0,
        step_s=costs.decode,
        cores=1,
    )
    return device, shares


def _copy_rate() -> float:
    """Return the bytes per second that a copy in main memory reads and writes: the best of
    three.
    """
    source = torch.zeros(1 << 27, dtype=torch.uint8)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return 2 * source.nbytes / min(seconds[1:])
