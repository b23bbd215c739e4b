"""Configuration -> objects: the one file that knows every concrete class."""

import asyncio
import math
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from unstale.config import (
    ConfigError,
    OldLogpsConfig,
    RunConfig,
    ScheduleConfig,
    install,
)
from unstale.durability.checkpoint import Checkpoints, Stateful
from unstale.durability.journal import JOURNAL, Journal
from unstale.durability.resume import ResumeState
from unstale.durability.run_folder import RunLog
from unstale.engines import Engine
from unstale.engines.pool import EnginePool, Recovery, supervise
from unstale.engines.registry import EngineOptions, engine_spec
from unstale.envs import Taskset
from unstale.envs.chat import Chat
from unstale.envs.external import ExternalAgent
from unstale.envs.registry import build_taskset
from unstale.loop import RunComponents
from unstale.model.forward import ForwardOptions
from unstale.model.loading import DTYPES
from unstale.model.lora import Lora, Merging
from unstale.model.policy import Policy
from unstale.observe.metrics import Sink, TensorBoardSink, require_tensorboard
from unstale.observe.recorder import Recorder, Watcher
from unstale.old_logps import OldLogps
from unstale.old_logps.scoring.scorer import LocalScorer, Scorer
from unstale.records import Failure, GroupRequest, PendingPiece
from unstale.rollout.episode import Rollout
from unstale.rollout.evaluation import evaluate
from unstale.rollout.generator import Generator
from unstale.rollout.staleness_queue import PendingPieces, StalenessQueue
from unstale.trainer.auditor import Auditor, Thresholds
from unstale.trainer.local import LocalTrainer
from unstale.trainer.records import Rules
from unstale.trainer.rules import build_advantage, build_correction, build_objective
from unstale.trainer.threads import LocalThread
from unstale.weights.child_process import cores
from unstale.weights.publish import DirectPublisher
from unstale.weights.recording import RECORDED, Recording
from unstale.weights.store import VersionStore

MAX_SKIPPED = 100_000
"""Tasks in a row that could not be finished before: then there are no others."""


@dataclass(frozen=True, slots=True)
class Components:
    """What generates and what learns. Making it refuses whatever is wrong, before there is a run folder."""

    policy: Policy
    taskset: Taskset
    generator: Generator
    scorer: LocalScorer
    """The route's own."""
    old: OldLogps
    auditor: Auditor
    trainer: LocalTrainer


def build_machine(config: RunConfig, engine: Engine | None = None) -> Components:
    """Raises `ConfigError` for anything that can be known to be wrong without starting the engine.

    `engine` is one that is there already, of the same configuration.
    """
    policy, taskset, generator = build_sampler(config, engine)
    scorer = build_scorer(config, policy)
    trainer, auditor = build_trainer(config, policy, scorer)
    if config.tensorboard:
        require_tensorboard()
    return Components(policy, taskset, generator, scorer, trainer.old, auditor, trainer)


def build_sampler(
    config: RunConfig, engine: Engine | None = None
) -> tuple[Policy, Taskset, Generator]:
    """What generates, with nothing of what learns. Else as `build_machine`."""
    policy, taskset = load_policy(config), build_taskset(config.task)
    build_rollout(config, taskset)  # refuses what it needs and has not
    return policy, taskset, build_generator(config, policy, taskset, engine)


def build_trainer(
    config: RunConfig, policy: Policy, scorer: LocalScorer
) -> tuple[LocalTrainer, Auditor]:
    """Make the trainer and its audit; the route uses `scorer`. The trainer's route is to be closed."""
    old = build_old_logps(config.old_logps, scorer, lockstep=config.deterministic)
    correction, objective = build_correction(config.correction), build_objective(config.objective)
    judge = Thresholds(correction, objective.surrogate)
    auditor = Auditor(build_scorer(config, policy), old, judge, share=config.audit.share)
    rules = Rules(
        correction=correction,
        objective=objective,
        temperature=config.engine.temperature,
        audit=auditor.look,
    )
    num_steps = config.steps * config.trainer.minibatches_per_batch
    return LocalTrainer(policy, config.trainer, rules, old, num_steps=num_steps), auditor


def build_scorer(config: RunConfig, policy: Policy) -> LocalScorer:
    """Make a scorer for one consumer."""
    return LocalScorer(policy, config.engine.temperature, config.trainer.max_tokens_per_microbatch)


def load_policy(config: RunConfig) -> Policy:
    """The policy that a run begins with."""
    options = config.trainer
    lora = (
        Lora(options.lora_rank, options.lora_alpha, options.lora_targets, config.seed)
        if options.lora_rank
        else None
    )
    policy = Policy.load(config.policy_folder, dtype=options.dtype, lora=lora)
    policy.set_forward_options(ForwardOptions.of(options))
    return policy


def build(
    config: RunConfig, machine: Components, log: RunLog, watcher: Watcher, life: ResumeState
) -> RunComponents:
    """Everything the loop touches, as it stands in this life of the run."""
    policy, taskset, old = machine.policy, machine.taskset, machine.old
    pending = PendingPieces()
    piece_arrived = asyncio.Event()
    journal = Journal(log.path / JOURNAL)
    checkpoints = build_checkpoints(config, machine, log.path)
    sinks: list[Sink] = [journal]
    if config.tensorboard:
        sinks.append(TensorBoardSink(log.path / "tensorboard"))
    recorder = Recorder(log, watcher, sinks=sinks, on_event=journal.event)
    if config.audit.record:
        machine.auditor.recording = Recording(log.path / RECORDED, base=policy.base)
    recovery = Recovery(checkpoints.weights, config.engine.restarts, recorder.event)
    engine = supervise(machine.generator.engine, recovery)
    generator = replace(machine.generator, engine=engine)

    def on_piece(piece: PendingPiece) -> None:
        pending.add(piece)
        old.arrived(piece)
        piece_arrived.set()

    def on_failure(episode: int, failure: Failure, final: bool) -> None:
        pending.discard([episode])
        recorder.failure(episode, failure, final)

    def on_restart(episode: int, failure: Failure) -> None:
        pending.discard([episode])
        recorder.restarted(episode, failure)

    make_rollout = build_rollout(config, taskset, on_event=recorder.event)
    rollout = make_rollout(
        generator,
        taskset,
        config.rollout,
        on_piece=on_piece,
        on_failure=on_failure,
        on_restart=on_restart,
    )
    rollout.restore(life.episodes, life.quarantined, life.outcomes)
    for piece in (piece for request in life.requests for piece in request.opens()):
        pending.add(piece)
    held_out = taskset.held_out(config.eval.tasks)
    evaluation = None
    if held_out:
        evaluation_rollout = make_rollout(
            generator, taskset, config.rollout, on_failure=recorder.failure
        )
        evaluation = partial(evaluate, evaluation_rollout, held_out, seed=config.seed)
    return RunComponents(
        config=config,
        progress=life.progress,
        resumed_requests=life.requests,
        requests=training_requests(taskset, config.seed, life, skipped=rollout.quarantined),
        engine=engine,
        rollout=rollout,
        evaluation=evaluation,
        queue=build_queue(config.schedule, life),
        pending=pending,
        advantage=build_advantage(config.advantage),
        old_logps=old,
        auditor=machine.auditor,
        trainer=machine.trainer,
        publisher=DirectPublisher(
            engine,
            dtype=policy.travel_dtype(DTYPES[config.engine.dtype]),
            store=_store(machine.scorer) if shares_deltas(config) else None,
            put=checkpoints.write_version,
        ),
        journal=journal,
        checkpoints=checkpoints,
        log=recorder,
        trainer_thread=LocalThread("trainer", partial(_own_threads, trainer_threads(config))),
        io_thread=LocalThread("io"),
        piece_arrived=piece_arrived,
    )


def trainer_threads(config: RunConfig) -> int:
    """The cores are divided among the processes of a run: with more threads than cores all run many times slower."""
    others = config.engine.threads * config.engine.processes + (config.old_logps.needs.own_process)
    return config.trainer.threads or (1 if config.deterministic else max(1, cores() - others))


def _own_threads(count: int) -> None:
    """For products of this thread alone: torch gives every later one the number that was last asked for."""
    torch.set_num_threads(count)
    torch.get_num_threads()  # which settles it here
    ThreadPoolExecutor(1).submit(torch.set_num_threads, 1).result()


def build_checkpoints(config: RunConfig, machine: Components, run: Path) -> Checkpoints:
    """They hold every part that has a state of its own."""
    parts: dict[str, Stateful] = {
        "trainer": machine.trainer,
        "old": machine.old,
        "auditor": machine.auditor,
    }
    return Checkpoints(run, parts, keep=config.checkpoint.keep)


def build_queue(config: ScheduleConfig, life: ResumeState) -> StalenessQueue:
    """The line, with what an earlier life of the run has in it."""
    queue = StalenessQueue(
        max_staleness=config.max_staleness,
        groups_per_step=config.groups_per_step,
        lookahead_window=config.lookahead_window,
    )
    queue.restore(life.admitted, [request.number for request in life.requests])
    return queue


def training_requests(
    taskset: Taskset, seed: int, life: ResumeState, *, skipped: Collection[str]
) -> Iterator[GroupRequest]:
    """The training tasks from where the run stands, but for those `skipped` by then; none if it would skip for ever."""
    number, since = life.admitted, 0
    for place, task in enumerate(islice(taskset.train(seed), life.place, None), life.place):
        since += 1
        if task.key not in skipped:
            yield GroupRequest(number, task, seed, place)
            number, since = number + 1, 0
        elif since > MAX_SKIPPED:
            return


def shares_deltas(config: RunConfig) -> bool:
    """Return True if the deltas that the route keeps are those that an engine loads."""
    same_precision = config.engine.dtype == config.trainer.dtype
    return config.old_logps.shares_deltas and (same_precision or config.trainer.lora_rank > 0)


def _store(scorer: LocalScorer) -> VersionStore | None:
    """The version store of the route, whose deltas publication may send."""
    return scorer.store if isinstance(scorer.store, VersionStore) else None


def build_generator(
    config: RunConfig, policy: Policy, taskset: Taskset, engine: Engine | None = None
) -> Generator:
    """The engine, and the conversation format of the policy's tokenizer with the task set's tools."""
    try:
        engine = engine or build_engine(config, policy.merging)
        chat = Chat(policy.tokenizer, taskset.tools, ends=policy.ends)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return Generator(engine, chat, config.engine)


def build_engine(config: RunConfig, merging: Merging | None) -> EnginePool:
    """Return a pool of the configured engines; with `merging`, they load adapters."""
    options = config.engine
    spec = engine_spec(options.backend)
    if spec.needs_urls and not options.urls.split():
        raise ConfigError(f"engine.backend = {options.backend} needs engine.urls")
    urls = options.urls.split() or [""] * options.processes
    max_running = math.ceil(options.max_running / options.processes)
    sends_deltas = len(urls) == 1 and (merging is None or spec.adapter_deltas)
    engines = [
        spec.make(
            EngineOptions(
                model_folder=config.policy_folder,
                config=options,
                url=url,
                max_running=max_running,
                deltas=sends_deltas and shares_deltas(config),
                merging=merging,
                lockstep=config.deterministic,
            )
        )
        for url in urls
    ]
    return EnginePool(engines, max_running=max_running, keep_cache=options.keep_cache)


def build_rollout(
    config: RunConfig, taskset: Taskset, *, on_event: Callable[..., None] = lambda kind, **_: None
) -> Callable[..., Rollout]:
    """What makes rollouts of this task set; those of agents that ask by themselves share one endpoint."""
    if not isinstance(taskset, ExternalAgent):
        return Rollout
    if config.deterministic:
        raise ConfigError(
            "deterministic must be false with an ExternalAgent: a virtual clock does not wait for sockets"
        )
    try:
        from unstale.rollout.endpoint.agents import AgentRollout
        from unstale.rollout.endpoint.server import RecordingEndpoint
    except ModuleNotFoundError as error:
        raise ConfigError(f"an ExternalAgent needs {error.name}: {install('endpoint')}") from error
    return partial(AgentRollout, endpoint=RecordingEndpoint(), on_event=on_event)


def build_old_logps(config: OldLogpsConfig, scorer: Scorer, *, lockstep: bool = False) -> OldLogps:
    """Make the route. With `lockstep` nothing depends on the speed of another process."""
    route: OldLogps = config.make(scorer, lockstep=lockstep)
    return route
