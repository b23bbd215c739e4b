"""THE DATA PATH: tasks -> groups -> credit -> batch -> old log-probabilities -> loss -> weights -> engines.

    produce()   admits groups      waits for a ticket            release() in train() unblocks it
    rollout     runs episodes      waits for engine, environment  resume() in publish() unblocks it
    train()     consumes batches   waits for the oldest groups    finished episodes unblock it

Healthy end: `train` returns, the producer and all episodes under it are cancelled. Any failure of the machinery ends
every task and leaves `run` with its own error; a failed episode is data and ends nothing.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from afterimage.auditor import Auditor
from afterimage.config import RunConfig
from afterimage.engines import Engine
from afterimage.journal import Journal
from afterimage.observe.recorder import Recorder
from afterimage.old_logps import OldLogps
from afterimage.policy import Policy
from afterimage.publish import Publisher
from afterimage.rollout import Rollout, describe, examine, require_finished
from afterimage.schedule import Ledger, Line, measure_staleness
from afterimage.trainer import Trainer
from afterimage.trajectory import Batch, Credited, Group, Task, collate

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop touches, each typed by its Protocol and made by `build.py`."""

    config: RunConfig
    tasks: Iterator[Task]
    held_out: Sequence[Task]
    engine: Engine
    rollout: Rollout
    examination: Rollout
    line: Line
    ledger: Ledger
    credit: Callable[[Sequence[Group]], list[Credited]]
    policy: Policy
    old: OldLogps
    auditor: Auditor
    trainer: Trainer
    publisher: Publisher
    journal: Journal
    log: Recorder
    worker: Executor

    async def beside(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run trainer code in its own thread, so that episodes go on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self.worker, partial(function, *arguments))


async def run(parts: Parts) -> None:
    """Until the configured steps or minutes are done."""
    parts.log.phase("starting the engine")
    await parts.engine.start()
    await publish(parts)
    if parts.held_out:
        graded = await evaluate(parts, step=0)
        parts.log.write(0, {"version": parts.policy.version, **engine_metrics(parts), **graded})
    async with asyncio.TaskGroup() as tasks:
        producer = tasks.create_task(produce(parts))
        await train(parts)
        producer.cancel()


async def produce(parts: Parts) -> None:
    """tasks -> groups. Waits for a ticket; train() returns tickets."""
    async with asyncio.TaskGroup() as in_flight:
        for number, task in enumerate(parts.tasks):
            await parts.line.admit(partial(roll, parts, number, task), in_flight)
        raise RuntimeError(f"{parts.config.task.env} ran out of training tasks: its train() has to be endless")


async def roll(parts: Parts, number: int, task: Task) -> Group:
    """task -> group. It is in the journal before the line has it."""
    size, seed = parts.config.schedule.group_size, parts.config.seed
    parts.journal.hand_out(number, task, seed=seed)
    group = await parts.rollout.group(task, number, size=size, seed=seed, begin=parts.journal.begin)
    await parts.journal.finish(group)
    return group


async def train(parts: Parts) -> None:
    """groups -> weights. Waits for the oldest groups; produce() admits them."""
    deadline = time.monotonic() + 60 * parts.config.minutes if parts.config.minutes else float("inf")
    for step in range(1, parts.config.steps + 1):
        began = time.monotonic()
        with parts.log.span("wait", f"for the groups of step {step}"):
            groups = await take(parts)
        waited = time.monotonic() - began
        require_finished(groups)
        batch = collate(parts.credit(groups))
        ages = measure_staleness(batch, groups, version=parts.policy.version, bound=parts.line.bound)
        learnt = await learn(batch, parts, step)
        trained_on = parts.policy.version
        consume(groups, parts, step)
        parts.policy.version += 1
        published = await publish(parts)
        parts.line.release()
        last = step == parts.config.steps or time.monotonic() > deadline
        graded = await evaluate(parts, step) if parts.held_out and (last or due(parts.config, step)) else {}
        waits = {"schedule/wait_groups_s": waited, **published, "version": trained_on}
        parts.log.write(step, {**waits, **describe(groups), **ages, **learnt, **engine_metrics(parts), **graded})
        if last:
            break


async def take(parts: Parts) -> list[Group]:
    """The groups of the next batch. Until they are there, a route with work for idle time has the trainer's thread."""
    async with asyncio.TaskGroup() as tasks:
        taking = tasks.create_task(parts.line.take())
        taking.add_done_callback(lambda _: parts.ledger.news.set())
        while parts.old.needs.idle and not taking.done():
            parts.ledger.news.clear()
            if not await parts.beside(parts.old.idle, parts.policy):
                await parts.ledger.news.wait()
    return taking.result()


async def learn(batch: Batch, parts: Parts, step: int) -> Mapping[str, Any]:
    """The optimizer steps of one batch. Pieces sampled by the weights about to change are scored in between."""
    with parts.log.span("old_logps", f"step {step}"):
        work = await parts.beside(parts.trainer.prepare, batch)
    for number, part in enumerate(work.parts):
        with parts.log.span("trainer", f"step {step}"):
            await parts.beside(parts.trainer.backward, part)
        if number == 0 and parts.old.needs.closing:
            await parts.engine.interrupt()
            waiting = parts.ledger.of(parts.policy.version, besides=batch.episodes)
            await parts.beside(parts.old.closing, parts.policy, waiting)
        with parts.log.span("trainer", f"step {step}"):
            await parts.beside(parts.trainer.step)
    parts.log.points({"step": step, **point} for point in [*parts.trainer.points(), *parts.auditor.points()])
    for happened in parts.old.events():
        parts.log.event(step=step, **happened)
    return parts.trainer.metrics()


def consume(groups: Sequence[Group], parts: Parts, step: int) -> None:
    """What was trained on is written down, and nothing more will be asked about it."""
    finished = [trajectory for group in groups for trajectory in group.trajectories]
    parts.ledger.settle(trajectory.episode for trajectory in finished)
    parts.journal.consume(groups, step=step, version=parts.policy.version)
    parts.log.trajectories(step, finished)


async def publish(parts: Parts) -> dict[str, float]:
    """weights -> engines, as `policy.version`. Returns what it took."""
    began = time.monotonic()
    with parts.log.span("publish", f"version {parts.policy.version}"):
        await parts.beside(parts.publisher.prepare, parts.policy, parts.ledger.versions)
        await parts.beside(parts.old.publishing, parts.policy)
        await parts.journal.publishing(parts.policy.version)
        await parts.publisher.publish()
        await parts.beside(parts.old.published, parts.policy, parts.ledger.versions)
        await parts.beside(parts.auditor.published, parts.policy, parts.ledger.versions)
    return {"publish/seconds": time.monotonic() - began, "publish/bytes": parts.publisher.bytes}


def due(config: RunConfig, step: int) -> bool:
    """Whether held-out tasks are run after this step."""
    return config.eval.every > 0 and step % config.eval.every == 0


async def evaluate(parts: Parts, step: int) -> Mapping[str, float]:
    """Held-out success of the version that the engine holds. Training waits; episodes in flight go on."""
    with parts.log.span("eval", f"step {step}"):
        graded = await examine(parts.examination, parts.held_out, seed=parts.config.seed, progress=parts.log.phase)
    success = sum(graded) / len(graded)
    parts.log.event("eval", step=step, version=parts.policy.version, success=success, tasks=len(graded))
    return {"eval/success": success, "eval/version": parts.policy.version}


def engine_metrics(parts: Parts) -> dict[str, float]:
    """The engine's counters since the last step, with its throughput and the share of the time that it worked."""
    counters = parts.engine.metrics()
    elapsed = counters["busy_s"] + counters["idle_s"] or 1.0
    rates = {"tokens_per_s": counters["sampled_tokens"] / elapsed, "busy_share": counters["busy_s"] / elapsed}
    return {f"engine/{name}": value for name, value in {**counters, **rates}.items()}
