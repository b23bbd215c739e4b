"""Create all components of a run, and connect them for the training loop."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unstale.builders.components import Components
from unstale.builders.local import build_advantage, build_local
from unstale.builders.ranked import build_ranked
from unstale.builders.sampling import build_rollout, build_sampler, for_evaluation
from unstale.cluster import components
from unstale.cluster.ranks import Notify, Ranks
from unstale.config import (
    ConfigError,
    RunConfig,
    ScheduleConfig,
)
from unstale.durability.best_policy import BestPolicy
from unstale.durability.journal import JOURNAL, Journal
from unstale.durability.journal.expert_files import ROUTED_EXPERTS, ExpertFiles
from unstale.durability.resume import ResumeState
from unstale.durability.run_folder import plain
from unstale.engines import Engine
from unstale.engines.following import EngineHub, restart_dead, share
from unstale.engines.pool import EnginePool, Recovery, supervise
from unstale.envs import (
    Taskset,
)
from unstale.envs.registry import held_out_tasks
from unstale.loop import RunComponents
from unstale.model.policy import Policy
from unstale.observe.recorder import Outputs, Recorder
from unstale.observe.trackers import find_trackers
from unstale.old_logps import OldLogps
from unstale.pictures import PictureError, decoded
from unstale.records import ContextPiece, Failure, PendingPiece
from unstale.rollout import Evaluation
from unstale.rollout.answers import AnswerReader
from unstale.rollout.episode import Rollout
from unstale.rollout.evaluation import evaluate
from unstale.rollout.hooks import RunHooks
from unstale.rollout.lessons import build_lessons
from unstale.rollout.processes.process import program
from unstale.rollout.processes.shards import ProcessRollout
from unstale.rollout.processes.wire import Setup
from unstale.rollout.segments import EpisodeSlots
from unstale.rollout.selection import Selection
from unstale.rollout.staleness_queue import PendingPieces, StalenessQueue
from unstale.rollout.text_vectors import text_vectors
from unstale.rollout.texts import PolicyTexts, prepare_strategy, require_solutions
from unstale.trainer.threads import LocalThread, SharedCores
from unstale.weights.recording import RECORDED

ROLLOUT_PROCESS = "unstale.cli.rollout_process"
"""The module whose `main` a rollout process runs."""


def build_components(
    config: RunConfig,
    engine: Engine | None = None,
    ranks: Ranks | None = None,
    *,
    notify: Notify = lambda text: None,
) -> Components:
    """Return the components that sample and train, as `config` describes them.

    If `engine` is given, it is used in place of the configured one. If `ranks` is given, the
    trainer uses these ranks and starts no new ones. `notify` is called with a text on what the
    start of ranks waits for. Raises `ConfigError` for every mistake that can be found before the
    engine starts.
    """
    find_trackers(config.trackers)  # raises ConfigError for an unknown or missing tracker
    sampler = build_sampler(config, engine)
    if config.cluster.trainers:
        return build_ranked(config, sampler, ranks=ranks, notify=notify)
    return build_local(config, *sampler)


def build(
    config: RunConfig, parts: Components, outputs: Outputs, start: ResumeState
) -> RunComponents:
    """Connect all components of a run for the training loop.

    `parts` are those that sample and train, and `outputs` the logs. `start` is the state of a
    resumed run, which is restored, or that of a new run.
    """
    policy, taskset, old = parts.policy, parts.taskset, parts.old
    _require_recorded_pictures(policy, start)
    pending = PendingPieces()
    folder = outputs.log.path
    experts = None
    if config.trainer.routing_replay:
        experts = ExpertFiles(folder / ROUTED_EXPERTS, keep=config.checkpoint.keep)
    journal = Journal(folder / JOURNAL, routed_experts=experts, keep_snapshots=config.deterministic)
    checkpoints = parts.checkpoints(config, folder)

    def decode(tokens: Sequence[int]) -> str:
        return decoded(tokens, lambda run: str(policy.tokenizer.decode(run)))

    recorder = Recorder(
        outputs,
        journal=journal,
        decode=decode,
    )
    if config.audit.record:
        parts.record(folder / RECORDED)
    posts = components.make_posts(
        config.cluster,
        checkpoints.weights,
        parts.posted_dtype(config),
    )
    weights = posts.at if posts else checkpoints.weights
    recovery = Recovery(weights, config.engine.restarts, recorder.event)
    hub = EngineHub()
    engine = parts.generator.engine
    if config.rollout.processes > 1:
        assert isinstance(engine, EnginePool), "require_divisible"
        engine = share(engine, hub)
    engine = supervise(engine, recovery)
    restart_dead(engine, hub)
    components.report_events(parts.generator.engine, recorder.event)
    generator = replace(parts.generator, engine=engine)

    make_rollout = partial(
        build_rollout(config, taskset, on_event=recorder.event),
        taskset=taskset,
        config=config.rollout,
    )
    budgeter = parts.techniques.budgeter
    slots = EpisodeSlots(budgeter.max_concurrent_episodes) if budgeter else None
    make_training_rollout: Callable[..., Rollout] = partial(make_rollout, generator, slots=slots)
    if config.rollout.processes > 1:
        make_training_rollout = partial(
            ProcessRollout,
            generator,
            taskset,
            config.rollout,
            setup=rollout_setup(config, policy.ends, hub, engine.max_running),
            program=program(ROLLOUT_PROCESS),
            hub=hub,
            on_event=recorder.event,
        )
    rollout = _training_rollout(
        make_training_rollout,
        _Listeners(old, pending, recorder),
        start,
    )
    selection = Selection(
        config,
        taskset,
        start,
        parts.techniques,
        skipped=rollout.quarantined,
        encode=parts.hidden_states
        and partial(
            text_vectors,
            states=parts.hidden_states,
            chat=generator.chat,
            max_context=config.engine.max_context,
        ),
    )
    texts = PolicyTexts(taskset, generator)
    require_solutions(parts.techniques, texts, taskset, config.seed)
    prepare_strategy(parts.techniques, texts)
    queue = build_queue(config.schedule, start, policy)
    shared_cores = SharedCores(
        config, are_engines_idle=lambda: queue.waits_for_training and engine.is_idle()
    )
    return RunComponents(
        config=config,
        progress=start.progress,
        resumed_requests=start.requests,
        requests=selection.requests(),
        engine=engine,
        rollout=rollout,
        evaluation=_evaluation(
            config,
            taskset,
            make_rollout(
                for_evaluation(generator, config.eval),
                on_failure=recorder.held_out_failure,
                on_blocked=recorder.blocked,
            ),
            start,
            best=_best_policy(config, parts, folder, start),
        ),
        queue=queue,
        pending=pending,
        techniques=RunHooks(
            techniques=parts.techniques,
            selection=selection,
            estimate=build_advantage(config.advantage),
            identify=selection.identify,
            answer=AnswerReader(taskset, parts.generator.chat),
            lag=parts.trainer.lag,
            resize=journal.resize,
            group_size=config.schedule.group_size,
            record_round=journal.add_round,
            hidden_states=parts.hidden_states,
            texts=texts,
            seed=config.seed,
            replay_experts=config.trainer.routing_replay,
            give_lessons=build_lessons(config, taskset, parts.generator.chat),
        ),
        old_logps=old,
        auditor=parts.auditor,
        trainer=parts.trainer,
        publisher=parts.publisher(config, engine, checkpoints, posts),
        journal=journal,
        checkpoints=checkpoints,
        log=recorder,
        trainer_thread=LocalThread("trainer", shared_cores.take),
        io_thread=LocalThread("io"),
    )


def _require_recorded_pictures(policy: Policy, start: ResumeState) -> None:
    """Raise `ConfigError` if a picture of an episode that a resume continues is lost or damaged."""
    pasts = (past for request in start.requests for past in request.past)
    pieces = (piece for past in pasts for each in (past, *past.branches) for piece in each.pieces)
    known = {each for piece in pieces if isinstance(piece, ContextPiece) for each in piece.pictures}
    if policy.pictures:
        try:
            policy.pictures.store.require(known)
        except PictureError as error:
            raise ConfigError(f"the run cannot be resumed: {error}") from error


def rollout_setup(
    config: RunConfig, ends: tuple[int, ...], hub: EngineHub, max_running: int
) -> Setup:
    """Return the data with which each rollout process of a run starts.

    `ends` are the tokens that end a reply. `hub` has the engines, and `max_running` is the number
    of replies that they sample at once.
    """
    count = config.rollout.processes
    sizes = hub.engines[0].engine.sizes
    return Setup(
        config=plain(config),
        ends=ends,
        engines=len(hub.engines),
        max_running=math.ceil(max_running / count),
        vocab_size=sizes.vocab_size,
        routed=sizes.routed,
        first_episode=0,
        stride=count,
        ray=components.ray_address() if config.cluster.engine_hosts else "",
    )


def _evaluation(
    config: RunConfig,
    taskset: Taskset,
    rollout: Rollout,
    start: ResumeState,
    *,
    best: BestPolicy | None,
) -> Evaluation | None:
    """Return the evaluation on the held-out tasks. None if there are no held-out tasks.

    In a new run, the first evaluation begins with one episode as a trial.
    """
    samples = config.eval.samples
    held_out = [task for task in held_out_tasks(taskset, config.eval.tasks) for _ in range(samples)]
    if not held_out:
        return None
    is_first = start.progress.step == 0

    async def measure(**options: Any) -> list[bool | None]:
        nonlocal is_first
        trial, is_first = is_first, False
        return await evaluate(rollout, held_out, seed=config.seed, trial=trial, **options)

    return Evaluation(measure, samples, best)


def _best_policy(
    config: RunConfig, parts: Components, folder: Path, start: ResumeState
) -> BestPolicy | None:
    """Return the object that keeps the best policy of a run in `folder`.

    None if `eval.keep_best` is `none`.
    """
    if config.eval.keep_best == "none":
        return None
    return BestPolicy(folder, config, parts.save_policy, step=start.progress.step)


@dataclass(frozen=True, slots=True)
class _Listeners:
    """Callbacks of the rollout for sampled tokens, and for ended, failed and restarted episodes.

    They notify `old`, which computes old log-probabilities, the list of tokens that wait for
    training, and the run's log.
    """

    old: OldLogps
    pending: PendingPieces
    recorder: Recorder

    def on_piece(self, piece: PendingPiece) -> None:
        self.pending.add(piece)
        self.old.on_piece(piece)

    def on_end(self, episode: int) -> None:
        self.old.on_end(self.pending.end(episode))

    def on_failure(self, episode: int, failure: Failure, final: bool) -> None:
        self.pending.discard([episode])
        self.recorder.failure(episode, failure, final)

    def on_restart(self, episode: int, failure: Failure) -> None:
        self.pending.discard([episode])
        self.recorder.restarted(episode, failure)


def _training_rollout(
    make_rollout: Callable[..., Rollout], listeners: _Listeners, start: ResumeState
) -> Rollout:
    """Return the object that runs training episodes. Episodes of a resumed run are restored."""
    rollout = make_rollout(
        on_piece=listeners.on_piece,
        on_end=listeners.on_end,
        on_failure=listeners.on_failure,
        on_restart=listeners.on_restart,
        on_blocked=listeners.recorder.blocked,
    )
    rollout.restore(start.episodes, start.quarantined, start.failed_shares)
    for request in start.requests:
        for piece in request.opens():
            listeners.pending.add(piece)
    return rollout


def build_queue(config: ScheduleConfig, start: ResumeState, policy: Policy) -> StalenessQueue:
    """Return the staleness queue, which limits the groups in flight and orders finished groups.

    If a run is resumed, the queue has the groups that were not trained on before.
    """
    queue = StalenessQueue(
        max_staleness=config.max_staleness,
        groups_per_step=config.groups_per_step,
        lookahead_window=config.lookahead_window,
        adaptive_window=config.adaptive_window,
    )
    ages: dict[int, int] = {}
    for request in start.requests if config.adaptive_window else ():
        if versions := sorted({each.piece.version for each in request.opens()}):
            ages[request.number] = int(policy.lag(torch.tensor(versions)).max())
    queue.restore(start.admitted, [request.number for request in start.requests], ages)
    return queue
