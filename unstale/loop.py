"""THE DATA PATH: tasks -> groups -> advantage -> batch -> old log-probabilities -> loss -> weights -> engines.

    produce()   admits groups      waits for a ticket             release() in settle() unblocks it
    rollout     runs episodes      waits for engine, environment  resume() in publish() unblocks it
    train()     consumes batches   waits for the oldest groups    finished episodes unblock it

When `train` returns, all else is cancelled. A failure of the machinery ends the run; a failed episode is data.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

from unstale.config import RunConfig
from unstale.durability.checkpoint import Checkpoint, Checkpoints, Progress
from unstale.durability.journal import Journal
from unstale.engines import Engine, rates
from unstale.model.policy import Policy
from unstale.observe.recorder import Recorder
from unstale.old_logps import OldLogps
from unstale.records import Batch, Group, GroupRequest, ScoredTrajectory, Task, collate
from unstale.rollout import evaluation
from unstale.rollout.episode import Rollout, require_finished
from unstale.rollout.metrics import describe, describe_advantages
from unstale.rollout.staleness_queue import PendingPieces, StalenessQueue, measure_staleness
from unstale.rollout.timeouts import reraise_after, run_to_completion
from unstale.trainer.auditor import Auditor
from unstale.trainer.local import LocalTrainer
from unstale.weights.publish import Publisher


@dataclass(frozen=True, slots=True)
class RunComponents:
    """Made by `build.py`; it never leaves the loop, which gives each room what that needs."""

    config: RunConfig
    stand: Progress
    begun: Sequence[GroupRequest]
    """What an earlier life of the run has handed out and not consumed, in order."""
    requests: Iterator[GroupRequest]
    held_out: Sequence[Task]
    engine: Engine
    rollout: Rollout
    examination: Rollout
    line: StalenessQueue
    ledger: PendingPieces
    advantage: Callable[[Sequence[Group]], list[ScoredTrajectory]]
    policy: Policy
    old: OldLogps
    auditor: Auditor
    trainer: LocalTrainer
    publisher: Publisher
    journal: Journal
    checkpoints: Checkpoints
    log: Recorder
    worker: Executor
    """The trainer's thread."""
    disk: Executor
    """The thread that writes checkpoints: environments may keep every other one busy."""

    def close(self) -> None:
        """End the threads, when what they are at is done."""
        self.worker.shutdown()
        self.disk.shutdown()

    async def beside(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run trainer code in its own thread, so that episodes go on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(
            self.worker, partial(function, *arguments)
        )

    async def aside(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run what waits for the disk in its own thread."""
        return await asyncio.get_running_loop().run_in_executor(
            self.disk, partial(function, *arguments)
        )


async def run(parts: RunComponents) -> bool:
    """From where it stands, that step finished first, to the end (True) or, deterministic, to the next checkpoint."""
    await parts.engine.start()
    done = parts.stand.step >= parts.config.steps
    await (settled := asyncio.create_task(settle(parts, parts.stand, last=done)))
    if done:
        return True
    async with asyncio.TaskGroup() as tasks:
        producer = tasks.create_task(produce(parts))
        stand = await train(parts, settled)
        if parts.config.deterministic:
            await parts.engine.interrupt()
            await asyncio.sleep(0)  # what the engine gave back is written down
        producer.cancel()
    if parts.config.deterministic:  # nothing is in flight: all of it is in the journal
        await save(parts, await parts.beside(parts.checkpoints.hold, stand, parts.policy))
    return not parts.config.deterministic


async def produce(parts: RunComponents) -> None:
    """tasks -> groups. Waits for a ticket; settle() returns tickets."""
    async with asyncio.TaskGroup() as in_flight:
        for request in parts.begun:
            await parts.line.readmit(request.number, partial(roll, parts, request), in_flight)
        for request in parts.requests:
            await parts.line.admit(partial(roll, parts, request), in_flight)
        parts.line.close(
            f"{parts.config.task.env} ran out of tasks: train() has to be endless, and most of it to work"
        )


async def roll(parts: RunComponents, request: GroupRequest) -> Group:
    """task -> group. It is in the journal before the line has it."""
    if not request.begun:
        parts.journal.add_request(request)
    group = await parts.rollout.group(
        request, size=parts.config.schedule.group_size, open_writer=parts.journal.begin
    )
    if not request.finished:
        await parts.journal.finish(group)
    return group


async def train(parts: RunComponents, settled: asyncio.Task[None]) -> Progress:
    """groups -> weights. Waits for the oldest groups; produce() admits them."""
    config, stand, last = parts.config, parts.stand, False
    deadline = time.monotonic() + 60 * config.minutes if config.minutes else float("inf")
    async with asyncio.TaskGroup() as beside:
        while not last:
            async with reraise_after(
                settled
            ):  # a batch that fails does not take the step before with it
                stand = Progress(stand.step + 1, await advance(parts, stand.step + 1, settled))
            last = stand.step >= config.steps or time.monotonic() > deadline
            due = last or stand.step % config.checkpoint.every == 0
            if due and config.deterministic:
                break
            settled = beside.create_task(settle(parts, stand, due=due, last=last))
    return stand


async def advance(
    parts: RunComponents, step: int, settled: asyncio.Task[None]
) -> Mapping[str, Any]:
    """One batch: groups -> weights, which are a new version that nobody has yet. What is to be written of it.

    The weights do not move before the version that they are is `settled`.
    """
    if not parts.config.schedule.max_staleness:
        await settled  # no other groups may begin before
    began = time.monotonic()
    with parts.log.span("wait", f"for the groups of step {step}"):
        groups = require_finished(await take(parts))
    waits = {"schedule/wait_for_batch_s": time.monotonic() - began, **parts.line.metrics()}
    scored = parts.advantage(groups)
    batch = collate(scored)
    ages = measure_staleness(
        batch, groups, lag=parts.policy.lag(batch.version), bound=parts.line.bound
    )
    learnt = await learn(batch, parts, step, settled)
    parts.ledger.discard(batch.episodes)
    parts.journal.consume(groups, step=step, version=parts.policy.version)
    parts.log.trajectories(step, groups)
    trained_on, parts.policy.version = parts.policy.version, parts.policy.version + 1
    parts.ledger.told.clear()
    spent = {**rates(parts.engine.metrics()), **parts.rollout.wait_times.read("rollout")}
    spent["trainer/processor_s"] = time.process_time()
    rollouts = {**describe(groups), **describe_advantages(groups, scored)}
    return {**waits, "version": trained_on, **rollouts, **ages, **learnt, **spent}


async def settle(
    parts: RunComponents, stand: Progress, *, due: bool = False, last: bool = False
) -> None:
    """The version that a step led to gets to the engines, tickets come back, and the step is written down.

    All of it goes on beside the next batch, up to where that moves the weights. If `due`, a checkpoint is made.
    """
    held, took = await publish(parts, stand, due=due)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(tell(parts, parts.ledger.versions))
        parts.line.release()
        if held:
            took |= await run_to_completion(save(parts, held))
        if parts.held_out and (
            last or stand.step % (parts.config.eval.every or parts.config.steps) == 0
        ):
            took |= await evaluate(parts, stand.step)
        if stand.step or "eval/success_rate" in took:
            parts.log.write(stand.step, {"version": parts.policy.version, **stand.row, **took})


async def save(parts: RunComponents, held: Checkpoint) -> dict[str, float]:
    """A checkpoint, from which the run can go on. It becomes current, and what it was trained on consumed, at once."""
    began = time.monotonic()
    with parts.log.span("checkpoint", f"step {held.stand.step}"):
        name = await parts.aside(parts.checkpoints.write, held)
        await parts.journal.checkpoint(name, step=held.stand.step, version=held.version)
        await parts.aside(parts.checkpoints.prune)
    return {"checkpoint/duration_s": time.monotonic() - began}


async def take(parts: RunComponents) -> Sequence[Group]:
    """The groups of the next batch. Until they are there, a route with work for idle time has the trainer's thread."""
    async with asyncio.TaskGroup() as tasks:
        taking = tasks.create_task(parts.line.take())
        taking.add_done_callback(lambda _: parts.ledger.news.set())
        while parts.old.needs.idle and not taking.done():
            parts.ledger.news.clear()
            if not await parts.beside(parts.old.idle):
                await parts.ledger.news.wait()
    return taking.result()


async def learn(
    batch: Batch, parts: RunComponents, step: int, settled: asyncio.Task[None]
) -> Mapping[str, Any]:
    """The optimizer steps of one batch. Pieces sampled by the weights about to change are scored in between."""
    if (
        not parts.old.needs.snapshots or parts.policy.version in batch.version
    ):  # the route has to have heard of it
        await parts.ledger.told.wait()
    with parts.log.span("old_logps", f"step {step}"):
        work = await parts.beside(parts.trainer.prepare, batch)
    for number, part in enumerate(work.parts):
        with parts.log.span("trainer", f"step {step}"):
            await parts.beside(parts.trainer.backward, part)
        await settled
        if number == 0 and parts.old.needs.closing:
            await parts.engine.interrupt()
            waiting = parts.ledger.of_version(parts.policy.version, excluding=batch.episodes)
            await parts.beside(parts.old.closing, waiting)
        with parts.log.span("trainer", f"step {step}"):
            await parts.beside(parts.trainer.step)
    parts.log.learnt(
        step, points=[*parts.trainer.points(), *parts.auditor.points()], events=parts.old.events()
    )
    return parts.trainer.metrics()


async def publish(
    parts: RunComponents, stand: Progress, *, due: bool
) -> tuple[Checkpoint | None, dict[str, float]]:
    """weights -> engines, as `policy.version`. What a checkpoint is to hold if one is `due`, and what it took."""
    began = time.monotonic()
    with parts.log.span("publish", f"version {parts.policy.version}"):
        held, thread_s = await parts.beside(leave, parts, stand, due, parts.ledger.versions)
        await parts.journal.publishing(parts.policy.version)
        with parts.log.span("standstill", f"version {parts.policy.version}"):
            await parts.publisher.publish()
    took = {"publish/duration_s": time.monotonic() - began, "publish/trainer_s": thread_s}
    return held, {**took, "publish/bytes": parts.publisher.bytes}


def leave(
    parts: RunComponents, stand: Progress, due: bool, live: Collection[int]
) -> tuple[Checkpoint | None, float]:
    """In the trainer's thread, before the next batch has it: all that a publication needs of it. And its seconds."""
    began = time.monotonic()
    held = parts.checkpoints.hold(stand, parts.policy) if due else None
    parts.publisher.prepare(parts.policy, live)
    parts.old.publishing()
    return held, time.monotonic() - began


async def tell(parts: RunComponents, live: Collection[int]) -> None:
    """Every engine holds the version: who scores hears of it, when the trainer's thread is free."""
    for room in (parts.old, parts.auditor):
        await parts.beside(room.published, live)
    parts.ledger.told.set()


async def evaluate(parts: RunComponents, step: int) -> Mapping[str, float]:
    """Held-out success of the version that the engine holds. The next optimizer step waits; episodes go on."""
    began = time.monotonic()
    with parts.log.span("eval", f"step {step}"):
        graded = await evaluation.evaluate(
            parts.examination, parts.held_out, seed=parts.config.seed, progress=parts.log.phase
        )
    success, failed = graded.count(True) / len(graded), graded.count(None)
    parts.log.event(
        "eval",
        step=step,
        version=parts.policy.version,
        success=success,
        tasks=len(graded),
        failed=failed,
    )
    return {
        "eval/success_rate": success,
        "eval/version": parts.policy.version,
        "eval/duration_s": time.monotonic() - began,
    }
