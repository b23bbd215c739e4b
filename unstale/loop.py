"""The training loop.

    tasks -> rollout -> groups -> advantages -> batch -> old log-probs -> loss -> weights -> engines

Three activities overlap:

    produce()      start groups of episodes, each when the staleness queue has a free ticket
    take_steps()   train on finished groups, the oldest first
    Publication    load new weights into all engines, free tickets, write checkpoint and metrics

A ticket is the permission to start a group. No optimizer step runs before the current version is
published. An error in any component ends the run. An episode that fails, also because the user's
environment or reward raised an error, does not.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from unstale.config import RunConfig
from unstale.durability import CheckpointWriter, RunJournal
from unstale.durability.checkpoint import Checkpoint, Progress
from unstale.engines import GenerationControl, rates
from unstale.envs.elastic import read_pools
from unstale.observe import RunRecorder
from unstale.old_logps import OldLogps
from unstale.records import (
    Batch,
    Group,
    GroupRequest,
    ScoredTrajectory,
    collate,
    concatenate,
)
from unstale.rollout import Evaluation, GroupRollout, activity
from unstale.rollout.episode import require_finished
from unstale.rollout.evaluation import FinishedEpisodes, measure_success
from unstale.rollout.hooks import RunHooks
from unstale.rollout.metrics import describe, describe_advantages
from unstale.rollout.staleness_queue import (
    PendingPieces,
    StalenessQueue,
    measure_replay,
    measure_staleness,
)
from unstale.rollout.timeouts import run_to_completion
from unstale.trainer import AuditObserver, Trainer
from unstale.trainer.threads import FREED_MEMORY, WorkerThread
from unstale.weights.publish import Publisher

LARGE_BATCH_TOKENS = 1 << 16
"""Least number of tokens of a batch that is built in the trainer's thread instead of the event
loop. Building this many takes about 10 ms.
"""


@dataclass(frozen=True, slots=True)
class RunComponents:
    """All components of a run that the training loop connects. `unstale/builders/` creates them."""

    config: RunConfig
    progress: Progress
    """The progress from which the run starts: step 0, or the step of the loaded checkpoint."""
    resumed_requests: Sequence[GroupRequest]
    """Requests of groups that were started before a resume but not trained on, in the order of
    their start.
    """
    requests: AsyncIterator[GroupRequest]
    """Requests for new groups of episodes, one for each training task."""
    engine: GenerationControl
    rollout: GroupRollout
    evaluation: Evaluation | None
    """The evaluation on the held-out tasks. None if the run has no held-out tasks."""
    queue: StalenessQueue
    pending: PendingPieces
    """Sampled pieces (runs of tokens of one version) that no batch has contained yet."""
    techniques: RunHooks
    old_logps: OldLogps
    auditor: AuditObserver
    trainer: Trainer
    publisher: Publisher
    journal: RunJournal
    checkpoints: CheckpointWriter
    log: RunRecorder
    trainer_thread: WorkerThread
    io_thread: WorkerThread
    """The thread that writes versions and checkpoints. asyncio's own threads may all be occupied by
    environments.
    """

    def close(self) -> None:
        """Stop the trainer's thread and the I/O thread after their current work."""
        self.trainer_thread.close()
        self.io_thread.close()


async def train(run: RunComponents, on_start: Callable[[], None] = lambda: None) -> bool:
    """Train to the last step. In deterministic mode, train only to the next checkpoint.

    Return True if the run is complete. Otherwise the caller must load the new checkpoint and call
    this function again. `on_start` is called when the engine has started, before training.
    """
    await run.engine.start()
    on_start()
    complete = run.progress.step >= run.config.max_steps or ends_early(run)
    publication = Publication(run, run.progress, last=complete)
    await publication.finished()
    if complete:
        return True
    async with asyncio.TaskGroup() as tasks:
        producer = tasks.create_task(produce(run))
        progress = await take_steps(run, publication)
        if run.config.deterministic:
            await run.engine.interrupt()
            await asyncio.sleep(0)  # gives the journal time to record the interrupted replies
        producer.cancel()
    if run.config.deterministic:  # no episode is running now, so the journal contains every token
        snapshot = await run.trainer_thread.run(run.checkpoints.snapshot, progress, run.trainer)
        await save_checkpoint(run, snapshot)
    return not run.config.deterministic


async def produce(run: RunComponents) -> None:
    """Start groups of episodes, one for each free ticket of the staleness queue.

    A ticket is the permission to start a group. A task is drawn only when a ticket is free, so that
    a task sampler has the newest results. The function runs until it is cancelled or no task is
    left.
    """
    async with asyncio.TaskGroup() as in_flight:
        for request in run.resumed_requests:
            await run.queue.readmit(request.number, partial(roll, run, request), in_flight)
        await run.queue.wait_for_ticket()
        async for request in run.requests:
            await run.queue.admit(partial(roll, run, request), in_flight)
            await asyncio.sleep(0)  # the episodes of all free tickets would start in one round
            await run.queue.wait_for_ticket()
        run.queue.close(
            f"{run.config.task.env} ran out of tasks: train() must be endless, "
            "and most tasks must work"
        )


async def roll(run: RunComponents, request: GroupRequest) -> Group:
    """Run the episodes of one group and return it. The journal records its start and its end."""
    if not request.begun:
        run.journal.add_request(request)
    size = request.sizes[-1] if request.sizes else run.config.schedule.group_size
    more = partial(run.techniques.more, request)
    group = await run.rollout.group(
        request,
        size=size,
        open_writer=run.journal.begin,
        more=more,
        rounds=run.techniques.rounds(request),
    )
    if not request.finished:
        await run.journal.finish(group)
    return group


async def take_steps(run: RunComponents, publication: "Publication") -> Progress:
    """Train on one batch after another until the last step. Return the progress after it.

    In deterministic mode, return as soon as a checkpoint is due, before the new weights are
    published. `publication` is the publication of the weights before the first step.
    """
    config = run.config
    progress = run.progress
    saved = time.monotonic()
    deadline = saved + 60 * config.minutes if config.minutes else float("inf")
    last = False
    async with asyncio.TaskGroup() as tasks:
        while not last:
            async with publication.finish_before_errors():
                progress = await take_step(run, progress.step + 1, publication)
            now = time.monotonic()
            last = progress.step >= config.max_steps or now > deadline or ends_early(run)
            checkpoint_due = (
                last
                or progress.step % config.checkpoint.interval == 0
                or 0 < 60 * config.checkpoint.minutes <= now - saved
            )
            saved = now if checkpoint_due else saved
            if checkpoint_due and config.deterministic:
                break
            publication = Publication(
                run, progress, tasks.create_task, checkpoint=checkpoint_due, last=last
            )
    return progress


def ends_early(run: RunComponents) -> bool:
    """Return True if the run ends because evaluations no longer improve (`eval.patience`)."""
    return run.evaluation is not None and run.evaluation.ends_run


async def take_step(run: RunComponents, step: int, publication: "Publication") -> Progress:
    """Wait for the next batch and train on it. Return the progress, with the step's metrics.

    The new weights get a version number. The caller publishes them.
    """
    groups, left_out, metrics = await wait_for_batch(run, step, publication)
    batch, described = await build_batch(run, groups, step, left_out=left_out)
    learnt = await learn(run, batch, groups, step, publication)
    commit(run, batch, [*groups, *left_out], step)
    row = {**metrics, **described, **learnt, **measure_sampling(run)}
    row["old_logps/wait_s"] = metrics["old_logps/wait_s"] + learnt["old_logps/wait_s"]
    return Progress(step, row)


def commit(run: RunComponents, batch: Batch, groups: Sequence[Group], step: int) -> None:
    """Mark a step's groups as trained on, and start the next version of the weights.

    Called once for each step, after the last optimizer step and before the publication. Journal,
    techniques and trainer note the step in memory, and the next checkpoint writes all of it at
    once. Only values of the trained tokens are written before, and a resume removes them. So after
    a crash a run continues from the last checkpoint, whose weights have trained on each of its
    groups exactly once.
    """
    run.pending.discard(episodes_of(groups))
    run.journal.commit(
        groups,
        step=step,
        version=run.trainer.version,
        replayed=batch.replayed_groups,
        tokens=run.trainer.tokens(),
    )
    run.techniques.trained(groups, step)
    run.trainer.start_version()


async def build_batch(
    run: RunComponents,
    groups: Sequence[Group],
    step: int,
    *,
    left_out: Sequence[Group] = (),
    whole: bool = True,
) -> tuple[Batch, Mapping[str, object]]:
    """Return the batch of a step, and the metrics of this batch.

    `groups` are the groups to train on for the first time. Techniques may add stored groups. With
    `whole` False, `groups` are only a part of the step's groups. `left_out` are groups that are not
    trained on, but count in the metrics of the rollout. Raises `StalenessError` if a token is older
    than the run allows.
    """
    if whole:
        run.log.sample(step, [*groups, *left_out])
        if run.techniques.reads_states:
            with run.log.span("trainer", f"step {step}"):
                await run.trainer_thread.run(run.techniques.read_states, groups)
    done = (step - 1) / run.config.max_steps
    scored, credited = run.techniques.credit(
        groups, progress=done, version=run.trainer.version, whole=whole
    )
    await asyncio.sleep(0)  # each of the three takes a millisecond or more
    batch, staleness = await join(run, groups, scored, step)
    await asyncio.sleep(0)
    described = {**describe([*groups, *left_out]), **describe_advantages(groups, scored)}
    return batch, {**described, **credited, **staleness}


async def join(
    run: RunComponents, groups: Sequence[Group], scored: Sequence[ScoredTrajectory], step: int
) -> tuple[Batch, Mapping[str, object]]:
    """Join scored trajectories and replayed groups into a batch. Return it with staleness metrics.

    A large batch is built in the trainer's thread, so that episodes continue meanwhile. In a
    deterministic run it is not, because a call in a thread takes virtual time.
    """
    replay_age = run.techniques.max_replay_age

    def build() -> tuple[Batch, Mapping[str, object]]:
        fresh = collate(
            scored,
            groups=groups,
            replay_experts=run.config.trainer.routing_replay,
            placed=run.config.objective.placed,
        )
        batch = concatenate([fresh, *run.techniques.replayed(groups, step)])
        batch = run.techniques.prepared(batch, groups)
        lag = run.trainer.lag(batch.version)
        metrics = measure_staleness(batch, groups, lag=lag, bound=run.queue.bound)
        if replay_age or batch.replayed.any():
            metrics |= measure_replay(batch, lag=lag, bound=replay_age, version=run.trainer.version)
        return batch, metrics

    num_tokens = sum(len(each.trajectory) for each in scored)
    if run.config.deterministic or num_tokens < LARGE_BATCH_TOKENS:
        return build()
    return await run.trainer_thread.run(build)


async def wait_for_batch(
    run: RunComponents, step: int, publication: "Publication"
) -> tuple[Sequence[Group], Sequence[Group], Mapping[str, object]]:
    """Wait for the groups of the next batch.

    Return these groups, the groups that are left out of the batch, and metrics of the schedule.
    With `trainer.stream`, the gradient of finished groups is computed while the others are still
    being generated.
    """
    if run.config.schedule.max_staleness == 0:
        await publication.finished()  # frees the tickets that this step's groups need
    groups: list[Group] = []
    left_out: list[Group] = []
    part: Sequence[Group] = ()
    wait_s = scoring_s = 0.0
    while len(groups) < run.config.schedule.groups_per_step:
        await add_gradient(run, part, step, publication)
        began = time.monotonic()
        run.log.phase("", detail=partial(activity, run.rollout.wait_times))
        with run.log.span("wait", f"for the groups of step {step}"):
            taken, late_s = await take_groups(run, groups, publication)
        wait_s += time.monotonic() - began - late_s
        scoring_s += late_s
        part = leave_out_equal(run, taken, left_out)
        groups += part
    metrics = {
        "version": run.trainer.version,
        "schedule/wait_for_batch_s": wait_s,
        "old_logps/wait_s": scoring_s,
    }
    if run.config.schedule.resampled_groups:
        metrics["schedule/resampled_groups"] = len(left_out)
    ordered = require_finished(sorted(groups, key=lambda group: group.number))
    return ordered, left_out, {**metrics, **run.queue.metrics()}


def leave_out_equal(
    run: RunComponents, taken: Sequence[Group], left_out: list[Group]
) -> Sequence[Group]:
    """Move groups whose rewards are all equal from `taken` to `left_out`. Return the others.

    At most `schedule.resampled_groups` groups are left out in a step. New groups start in their
    place.
    """
    most = run.config.schedule.resampled_groups - len(left_out)
    equal = [group for group in taken if group.has_equal_rewards][:most] if most > 0 else []
    if not equal:
        return taken
    left_out += equal
    run.pending.discard(episodes_of(equal))
    run.queue.leave_out(len(equal))
    numbers = {group.number for group in equal}
    return [group for group in taken if group.number not in numbers]


async def add_gradient(
    run: RunComponents, groups: Sequence[Group], step: int, publication: "Publication"
) -> None:
    """Compute the gradient of some groups, before their batch is complete (`trainer.stream`)."""
    if not any(group.trajectories for group in groups):
        return
    part, _ = await build_batch(run, groups, step, whole=False)
    await until_scorable(run, part, publication)
    with run.log.span("trainer", f"step {step}"):
        await run.trainer_thread.run(run.trainer.add, part)


async def until_scorable(run: RunComponents, batch: Batch, publication: "Publication") -> None:
    """Wait until the old log-probabilities of a batch can be computed.

    In general this is when all engines have loaded the current version. There is no wait if the
    route (the method that computes them) has copies of past weights, does not load them into the
    trained model, and the current version sampled none of the batch's tokens. A route that loads
    them into the trained model must wait, because engines may still read that model's weights.
    """
    needs = run.old_logps.needs
    scores_kept_weights = needs.snapshots and not needs.trained_weights
    if not scores_kept_weights or batch.has_version(run.trainer.version):
        await publication.scorers_notified.wait()


async def take_groups(
    run: RunComponents, groups: Sequence[Group], publication: "Publication"
) -> tuple[Sequence[Group], float]:
    """Wait for the groups that the next batch needs besides `groups`.

    With `trainer.stream`, wait only for some of them. Meanwhile, a route that declares `needs.idle`
    computes old log-probabilities. Return the groups that arrived, and the seconds for which this
    computation continued after their arrival.
    """
    missing = run.config.schedule.groups_per_step - len(groups)
    of_queue = run.queue.take_part if run.config.trainer.stream else run.queue.take
    take = partial(of_queue, missing)
    arrived = math.inf

    def end_wait(_: object) -> None:
        nonlocal arrived
        arrived = time.monotonic()
        run.pending.changed.set()

    async with asyncio.TaskGroup() as tasks:
        taking = tasks.create_task(take())
        taking.add_done_callback(end_wait)
        if run.old_logps.needs.idle:
            await score_while_waiting(run, groups, publication, taking)
    return taking.result(), max(0.0, time.monotonic() - arrived)


async def score_while_waiting(
    run: RunComponents,
    groups: Sequence[Group],
    publication: "Publication",
    taking: asyncio.Task[Any],
) -> None:
    """Let the route compute `old_logp` until `taking` is done, about one forward pass at a time.

    It begins when all engines have the new version. Until then the trainer's thread is needed for
    the publication, and earlier versions may still sample tokens. `groups` are in the batch
    already.
    """
    is_told = False
    while not taking.done():
        run.pending.changed.clear()
        if publication.scorers_notified.is_set():
            if run.old_logps.needs.snapshots and not is_told:
                is_told = True
                past = run.pending.before(run.trainer.version, excluding=episodes_of(groups))
                run.old_logps.on_wait(past)
            if await run.trainer_thread.run(run.old_logps.score_while_idle):
                continue
        await run.pending.changed.wait()


async def learn(
    run: RunComponents,
    batch: Batch,
    groups: Sequence[Group],
    step: int,
    publication: "Publication",
) -> Mapping[str, Any]:
    """Take the optimizer steps of one batch, which consists of `groups`. Return their metrics.

    A route that declares `needs.scores_before_update` computes `old_logp` of tokens of the current
    version before the first optimizer step changes the weights. With `needs.closing`, it must do so
    for all of these tokens, so generation is paused first.
    """
    trainer = run.trainer
    needs = run.old_logps.needs
    await until_scorable(run, batch, publication)
    scoring_s = 0.0
    with run.log.span("old_logps", f"step {step}"):
        minibatches = await run.trainer_thread.run(trainer.prepare, batch)  # and correct D
    for number, minibatch in enumerate(minibatches):
        with run.log.span("trainer", f"step {step}"):
            await run.trainer_thread.run(trainer.backward, minibatch)
        await publication.finished()
        if number == 0 and needs.scores_before_update:
            began = time.monotonic()
            if needs.closing:
                await run.engine.interrupt()
            unscored = run.pending.of_version(trainer.version, excluding=episodes_of(groups))
            with run.log.span("old_logps", f"step {step}"):
                await run.trainer_thread.run(run.old_logps.before_update, unscored)
            scoring_s += time.monotonic() - began
        with run.log.span("trainer", f"step {step}"):
            await run.trainer_thread.run(trainer.step)
    points = [*trainer.scatter_sample(), *run.auditor.scatter_sample()]
    run.log.trained(step, points=points, events=run.old_logps.events())
    metrics = trainer.metrics()
    return {**metrics, "old_logps/wait_s": scoring_s + metrics["old_logps/prepare_s"]}


def measure_sampling(run: RunComponents) -> Mapping[str, float]:
    """Return metrics of the engines, of the episodes' waiting times and of reward processes.

    Times are in seconds, since the last call.
    """
    waits = run.rollout.wait_times.read("rollout")
    return {**rates(run.engine.metrics()), **waits, **read_pools()}


def episodes_of(groups: Sequence[Group]) -> frozenset[int]:
    """Return the numbers of all finished episodes of some groups.

    Episodes that an estimator or a filter left out of the batch are included.
    """
    return frozenset().union(*(group.episodes for group in groups))


class Publication:
    """The publication of one version: all engines load the new weights.

    It is an asyncio task that starts in the constructor and runs while the next batch is prepared:

        begin    in the trainer's thread: note the weights, copy the data of a checkpoint
        finish   in another thread: compress the version, and write it to disk
        stage    servers decode and check the weights while they generate
        load     interrupt generation, load the weights into all engines, resume generation: an
                 interrupted reply keeps its tokens, and the new weights sample the rest
        then     notify route and auditor, free the staleness queue's tickets of the trained batch,
                 write checkpoint and metrics
    """

    def __init__(
        self,
        run: RunComponents,
        progress: Progress,
        create_task: Callable[..., asyncio.Task[None]] = asyncio.create_task,
        *,
        checkpoint: bool = False,
        last: bool = False,
    ) -> None:
        """Start the publication of the trainer's current weights.

        `create_task` starts the asyncio task. If it is a task group's, the group receives errors of
        the publication. With `checkpoint`, a checkpoint is written. With `last`, the run is
        evaluated even if `eval.interval` does not ask for it.
        """
        self._run = run
        self._progress = progress
        self._checkpoint_due = checkpoint
        evaluation_due = last or run.config.evaluates_after(progress.step)
        self._evaluation = run.evaluation if evaluation_due else None
        self._evaluating: asyncio.Task[dict[str, float]] | None = None
        self.scorers_notified = asyncio.Event()
        """Set when the route (method to compute `old_logp`) and the auditor can use the new
        version.
        """
        self._task = create_task(self._publish())

    async def finished(self) -> None:
        """Wait until the publication is complete. Only then may the weights change again.

        Raises the error of the publication, if it failed.
        """
        await self._task

    @asynccontextmanager
    async def finish_before_errors(self) -> AsyncIterator[None]:
        """Return a context that waits for this publication before an exception leaves its body.

        The body trains on the next batch. If it fails, this publication is still completed. Its
        evaluation is cancelled, because a resumed run repeats it.
        """
        try:
            yield
        except Exception:
            self._evaluation = None
            if self._evaluating:
                self._evaluating.cancel()
            await self._task
            raise

    async def _publish(self) -> None:
        run = self._run
        snapshot, metrics = await self._load_engines()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._notify_scorers(run.pending.versions))
            run.queue.release()
            if snapshot:
                metrics |= await run_to_completion(save_checkpoint(run, snapshot))
            metrics |= await self._evaluate()
            if self._progress.step or self._evaluation:
                row = {"version": run.trainer.version, **self._progress.row, **metrics}
                run.log.write(self._progress.step, row)

    async def _evaluate(self) -> dict[str, float]:
        """Evaluate the policy if that is due. Return the metrics.

        Return {} if no evaluation is due, or if the run ends with an error during the evaluation.
        """
        if self._evaluation is None:
            return {}
        work = evaluate(self._run, self._evaluation, self._progress.step)
        self._evaluating = asyncio.create_task(work)
        try:
            return await self._evaluating
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._evaluation is not None or (task and task.cancelling()):
                raise
            return {}

    async def _load_engines(self) -> tuple[Checkpoint | None, dict[str, float]]:
        """Write the new version to disk and load it into every engine.

        Return the data of a checkpoint (None if no checkpoint is due), and metrics.
        """
        run = self._run
        version = run.trainer.version
        began = time.monotonic()
        with run.log.span("publish", f"version {version}"):
            snapshot, trainer_s = await run.trainer_thread.run(self._prepare, run.pending.versions)
            await run.io_thread.run(run.publisher.finish)
            await run.journal.publishing(version)
            await run.publisher.stage()
            staged = time.monotonic()
            with run.log.span("standstill", f"version {version}"):
                await run.publisher.publish()
        return snapshot, {
            "publish/duration_s": time.monotonic() - began,
            "publish/trainer_s": trainer_s,
            "publish/standstill_s": time.monotonic() - staged,
            "publish/bytes": run.publisher.bytes,
        }

    def _prepare(self, live: Collection[int]) -> tuple[Checkpoint | None, float]:
        """Begin the publication and copy a checkpoint's data, in the trainer's thread.

        Return this data (None if no checkpoint is due), and the seconds that this took. `live` are
        the versions whose sampled tokens are still to be trained on.
        """
        run = self._run
        began = time.monotonic()
        FREED_MEMORY.trim(now=self._checkpoint_due)  # of gradients and activations
        # Before the snapshot: the version store's copy is then equal to the weights it saves.
        run.publisher.begin(run.trainer, live)
        snapshot = None
        if self._checkpoint_due:
            snapshot = run.checkpoints.snapshot(self._progress, run.trainer)
        run.old_logps.before_publish()
        return snapshot, time.monotonic() - began

    async def _notify_scorers(self, live: Collection[int]) -> None:
        """Notify the route and the auditor that engines use the new version.

        The calls run in the trainer's thread. `live` are the versions whose sampled tokens are
        still to be trained on.
        """
        await self._run.trainer_thread.run(self._run.old_logps.on_published, live)
        await self._run.trainer_thread.run(self._run.auditor.on_published, live)
        self.scorers_notified.set()
        self._run.pending.changed.set()


async def save_checkpoint(run: RunComponents, snapshot: Checkpoint) -> dict[str, float]:
    """Write a checkpoint to disk. Return the duration in seconds as a metric.

    The journal then records the checkpoint, and that the groups on which its weights were trained
    are done. Old checkpoints are removed.
    """
    began = time.monotonic()
    step = snapshot.progress.step
    with run.log.span("checkpoint", f"step {step}"):
        name = await run.io_thread.run(run.checkpoints.write, snapshot)
        await run.journal.checkpoint(name, step=step, version=snapshot.version)
        causes = await run.io_thread.run(run.checkpoints.prune)
    for name, cause in causes.items():
        run.log.event("checkpoint_not_removed", name=name, error=cause)
    return {"checkpoint/duration_s": time.monotonic() - began}


async def evaluate(run: RunComponents, evaluation: Evaluation, step: int) -> dict[str, float]:
    """Measure success and reward on the held-out tasks. Return them as metrics.

    Training episodes continue meanwhile, but the next optimizer step waits.
    """
    began = time.monotonic()
    version = run.trainer.version
    finished = FinishedEpisodes()
    with run.log.span("eval", f"step {step}"):
        outcomes = await evaluation.measure(progress=run.log.phase, finished=finished)
    measured = measure_success(outcomes, evaluation.samples)
    reward = finished.means(finished.successes)["reward"]
    metrics: Mapping[str, float] = {**measured, "eval/reward_mean": reward}
    run.log.event(
        "eval",
        step=step,
        version=version,
        success=metrics["eval/success_rate"],
        tasks=int(metrics["eval/tasks"]),
        failed=int(metrics["eval/failed_tasks"]),
    )
    best = evaluation.best
    if best is not None and await run.trainer_thread.run(best.add, step, version, metrics):
        run.log.event("best_policy", step=step, version=version)
    return {
        **metrics,
        "eval/version": version,
        "eval/duration_s": time.monotonic() - began,
        **finished.waits,
    }
