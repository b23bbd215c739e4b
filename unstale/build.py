"""Create the objects of a run, such as model, engine, trainer and queue, from its `RunConfig`."""

import asyncio
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from rich.markup import escape

from unstale.algorithms.advantages import find_estimator
from unstale.cluster import components
from unstale.cluster.engine_host_weights import WeightPosts
from unstale.cluster.env_hosts import remote_workers
from unstale.cluster.gpus import gpu_memory_utilization, run_gpus, warn_of_shared_gpus
from unstale.cluster.ranked_trainer import RankedAuditor, RankedCheckpoints, RankedTrainer
from unstale.cluster.ranks import Notify, Ranks
from unstale.cluster.ranks_publish import RankedPublisher
from unstale.cluster.ranks_worker import Rank
from unstale.cluster.scoring_ranks import ScoringRank
from unstale.config import (
    SHIPPED_POLICIES,
    AdvantageConfig,
    ConfigError,
    Dtype,
    OldLogpsConfig,
    RunConfig,
    ScheduleConfig,
    install,
)
from unstale.config.hub import reading
from unstale.config.techniques import chosen
from unstale.durability.checkpoint import Checkpoints, Stateful
from unstale.durability.console import Console
from unstale.durability.journal import JOURNAL, Journal
from unstale.durability.journal.route_files import ROUTES, RouteFiles
from unstale.durability.resume import ResumeState
from unstale.engines import Engine
from unstale.engines.pool import EnginePool, Recovery, supervise
from unstale.engines.registry import EngineOptions, engine_spec, packs_weights
from unstale.engines.routing import Phases
from unstale.envs import (
    EnvError,
    HasGiveaways,
    Taskset,
    implements,
    sandbox,
)
from unstale.envs.chat import Chat
from unstale.envs.external import ExternalAgent
from unstale.envs.guard import Watchdog, each_within_limit, identity_within_limit, time_limit
from unstale.envs.registry import build_taskset, check_taskset, held_out_tasks, preparing
from unstale.isolation import IsolatedTasks, isolate
from unstale.loop import RunComponents
from unstale.model.forward import ForwardOptions
from unstale.model.loading import DTYPES
from unstale.model.lora import Lora, Merging
from unstale.model.peers import ALONE, Peers
from unstale.model.policy import Policy
from unstale.observe.recorder import Outputs, Recorder
from unstale.observe.trackers import find_trackers
from unstale.old_logps import OldLogps
from unstale.old_logps.scoring.local_scorer import LocalScorer, delta_store
from unstale.old_logps.scoring.scorer import Scorer
from unstale.records import Batch, Failure, Group, PendingPiece, ScoredTrajectory, Task
from unstale.rollout import Evaluation
from unstale.rollout.episode import Rollout
from unstale.rollout.evaluation import evaluate
from unstale.rollout.generator import Generator
from unstale.rollout.seeds import derive_seed
from unstale.rollout.segments import EpisodeSlots
from unstale.rollout.selection import Selection, make_pool, read_texts, require_repeats
from unstale.rollout.staleness_queue import PendingPieces, StalenessQueue
from unstale.techniques import NO_TECHNIQUES, Techniques
from unstale.trainer.auditor import Auditor
from unstale.trainer.failed_batch import save_failed_batch
from unstale.trainer.local import LocalTrainer
from unstale.trainer.rules import Rules
from unstale.trainer.threads import LocalThread, SharedCores, trainer_threads
from unstale.weights.publish import DirectPublisher, Publisher
from unstale.weights.recording import RECORDED, Recording


@dataclass(frozen=True, slots=True)
class Components:
    """The components of a run that sample and train. None of them needs a run folder."""

    policy: Policy
    taskset: Taskset
    generator: Generator
    scorer: Scorer | None
    """Computes log-probabilities for the old-logit route. The audit has a second scorer. None if
    the route is on trainer ranks.
    """
    old: OldLogps
    auditor: Auditor | RankedAuditor
    trainer: LocalTrainer | RankedTrainer
    techniques: Techniques = NO_TECHNIQUES

    @property
    def ranks(self) -> Ranks | None:
        """The trainer ranks. None if the trainer is in this process."""
        return self.trainer.ranks if isinstance(self.trainer, RankedTrainer) else None

    def save_policy(self, folder: Path) -> None:
        """Save the trained policy as a Hugging Face folder."""
        if isinstance(self.trainer, RankedTrainer):
            self.trainer.update_policy()
        self.policy.save(folder)

    def save_failed_batch(self, folder: Path) -> str:
        """Save the batch at which the trainer stopped. Return a message for the terminal."""
        if isinstance(self.trainer, RankedTrainer):
            return self.trainer.save_failed_batch(folder)
        return save_failed_batch(self.trainer, folder)


def build_machine(
    config: RunConfig,
    engine: Engine | None = None,
    ranks: Ranks | None = None,
    *,
    notify: Notify = lambda text: None,
) -> Components:
    """Return the components that sample and train, as `config` describes them.

    If `engine` is given, it replaces the engine that `config` describes. If `ranks` are given, the
    trainer uses them instead of new ones. `notify` is called with what new ranks wait for. Raises
    `ConfigError` for every mistake that can be found before the engine starts.
    """
    find_trackers(config.trackers)  # raises ConfigError for an unknown or missing tracker
    policy, taskset, generator = build_sampler(config, engine)
    if config.cluster.trainers:
        policy.check_length(config.engine.max_context)  # before ranks are waited for
        techniques = Techniques.of(config)  # raises ConfigError for those that ranks do not have
        makes = partial(build_rank, config), partial(build_scoring_rank, config)
        ranked = components.build_ranked(config, policy, makes, ranks, notify=notify)
        return Components(policy, taskset, generator, None, *ranked, techniques=techniques)
    scorer = build_scorer(config, policy)
    trainer, auditor = build_trainer(config, policy, scorer)
    own = (scorer, trainer.old, auditor, trainer, trainer.techniques)
    return Components(policy, taskset, generator, *own)


def build_server(config: RunConfig) -> tuple[Policy, Taskset, Generator]:
    """Return what `build_sampler` returns, for a server. Its clients send tasks and tools."""
    taskset = cast(Taskset, ExternalAgent(_no_agent, [None], name="server"))
    policy = load_policy(config)
    build_rollout(config, taskset)  # raises ConfigError if a package for the endpoint is missing
    return policy, taskset, build_generator(config, policy, taskset)


def _no_agent(*_: object) -> float:
    raise EnvError("a server runs no agent")


def build_sampler(
    config: RunConfig, engine: Engine | None = None
) -> tuple[Policy, Taskset, Generator]:
    """Return the policy, the task set, and the engine with its chat format.

    If `engine` is given, it replaces the engine that `config` describes. Raises `ConfigError` for
    invalid options.
    """
    if config.allow_weak_sandbox:
        sandbox.allow_weak()
    taskset = build_taskset(config.task)
    check_taskset(taskset, config.seed, config.steps * config.schedule.groups_per_step)
    with preparing(taskset, "giveaways()"):
        warn_of_giveaways(taskset)
    if config.selection.pool:  # both calls raise ConfigError for a pool that does not fit
        with preparing(taskset, "train() or text()"):
            pool = make_pool(taskset, config.seed, config.selection.pool)
            if any("texts" in entry.requires for entry in chosen(config.techniques)):
                read_texts(taskset, pool)
    with preparing(taskset, "train()"):
        require_repeats(config, taskset)
    num_held_out = len(held_out_tasks(taskset, config.eval.tasks))
    if num_held_out < config.eval.tasks:
        _print_note(
            f"note: {config.task.env} has {num_held_out} held-out tasks, fewer than "
            f"eval.tasks = {config.eval.tasks}"
        )
    if config.task.isolate == "ray":
        components.connect_run(config)
        taskset = isolate(taskset, config.task, remote_workers(config.cluster))
    else:
        taskset = isolate(taskset, config.task)
    policy = load_policy(config)
    build_rollout(config, taskset)  # raises ConfigError if a package for the task set is missing
    return policy, taskset, build_generator(config, policy, taskset, engine)


def build_trainer(
    config: RunConfig, policy: Policy, scorer: Scorer, *, on_rank: bool = False
) -> tuple[LocalTrainer, Auditor]:
    """Return the trainer, and the auditor that measures the errors of its old log-probabilities.

    The trainer's `old` is the old-logit route, which may have a process. The caller must close it.
    With `on_rank` it is the part of the route that a trainer rank has.
    """
    make = config.old_logps.make_on_rank if on_rank else config.old_logps.make
    old: OldLogps = make(scorer, lockstep=config.deterministic)
    techniques = Techniques.of(config)
    rules = Rules(config.correction, config.objective, techniques)
    auditor = Auditor(
        build_scorer(config, policy),
        old,
        rules,
        share=config.audit.share,
        is_bitwise=config.engine.bitwise,
    )
    return LocalTrainer(policy, config, old, auditor.look, techniques=techniques), auditor


def build_advantage(config: AdvantageConfig) -> Callable[[Sequence[Group]], list[ScoredTrajectory]]:
    """Return the configured advantage estimator.

    It is a function from the groups of one batch to the trajectories with their advantages.
    """
    return partial(find_estimator(config.estimator), **config.selected_options())


def build_scorer(config: RunConfig, policy: Policy) -> Scorer:
    """Return a new scorer: it computes log-probabilities by the current or past weights.

    A scorer keeps past weights for one user. So the old-logit route and the audit each need a
    scorer. Raises `ConfigError` if the policy's long sequences cannot be packed.
    """
    policy.check_length(config.engine.max_context)
    return LocalScorer(policy, config.engine.temperature, config.trainer.max_tokens_per_microbatch)


def lora_of(config: RunConfig) -> Lora | None:
    """Return the rank, scale and layers of the adapters of a run. None if it trains all weights."""
    options = config.trainer
    if not options.lora_rank:
        return None
    return Lora(options.lora_rank, options.lora_alpha, options.lora_targets, config.seed)


def load_policy(config: RunConfig, peers: Peers | None = None, *, trained: bool = True) -> Policy:
    """Load the model that a run starts from, with adapters if the run trains LoRA.

    `peers` are the ranks among which it is divided. Without `peers` the model is whole. It is then
    in main memory if the run has trainer ranks, because only they need it on a GPU. A policy that
    is not `trained` only scores.
    """
    options = config.trainer
    device = "cpu" if config.cluster.trainers and peers is None else None
    policy = Policy.load(
        config.policy_folder,
        dtype=options.dtype,
        device=device,
        lora=lora_of(config),
        peers=peers or ALONE,
        independent_rows=config.deterministic,
        trained=trained,
        chat_template=config.chat_template,
    )
    policy.check_context(config.cluster.context)
    policy.set_forward_options(ForwardOptions.of(config))
    if options.routing_replay:
        policy.replay_routes()
    return policy


def build(
    config: RunConfig, machine: Components, outputs: Outputs, life: ResumeState
) -> RunComponents:
    """Connect all components of a run for the training loop. Restore the state of a resumed run."""
    policy, taskset, old = machine.policy, machine.taskset, machine.old
    pending = PendingPieces()
    piece_arrived = asyncio.Event()
    folder = outputs.log.path
    routes = None
    if config.trainer.routing_replay:
        routes = RouteFiles(folder / ROUTES, keep=config.checkpoint.keep)
    journal = Journal(folder / JOURNAL, routes=routes, keep_snapshots=config.deterministic)
    checkpoints = build_checkpoints(config, machine, folder)
    recorder = Recorder(
        outputs, journal=journal, decode=lambda tokens: str(policy.tokenizer.decode(tokens))
    )
    if config.audit.record:
        _record(machine, folder)
    posts = components.make_posts(
        config.cluster,
        checkpoints.weights,
        policy.dtype if machine.ranks else _travel_dtype(config, policy),
    )
    weights = posts.at if posts else checkpoints.weights
    recovery = Recovery(weights, config.engine.restarts, recorder.event)
    engine = supervise(machine.generator.engine, recovery)
    components.report_events(engine, recorder.event)
    generator = replace(machine.generator, engine=engine)

    make_rollout = partial(
        build_rollout(config, taskset, on_event=recorder.event),
        generator,
        taskset,
        config.rollout,
    )
    budgeter = machine.techniques.budgeter
    slots = EpisodeSlots(budgeter.max_concurrent_episodes) if budgeter else None
    rollout = _training_rollout(
        partial(make_rollout, slots=slots),
        _Listeners(old, pending, piece_arrived, recorder),
        life,
    )
    identify = partial(identity_within_limit, taskset)
    selection = Selection(
        config,
        taskset,
        life,
        machine.techniques,
        skipped=rollout.quarantined,
    )
    queue = build_queue(config.schedule, life, policy)
    shared_cores = SharedCores(
        config, are_engines_idle=lambda: queue.waits_for_training and engine.is_idle()
    )
    return RunComponents(
        config=config,
        progress=life.progress,
        resumed_requests=life.requests,
        requests=each_within_limit(selection.requests(), f"train() of {taskset.name}"),
        engine=engine,
        rollout=rollout,
        evaluation=_evaluation(config, taskset, make_rollout, recorder, life),
        queue=queue,
        pending=pending,
        advantage=partial(
            machine.techniques.credit,
            estimate=build_advantage(config.advantage),
            identify=identify,
        ),
        old_logps=old,
        auditor=machine.auditor,
        trainer=machine.trainer,
        publisher=_publisher(config, machine, engine, checkpoints, posts),
        journal=journal,
        checkpoints=checkpoints,
        log=recorder,
        trainer_thread=LocalThread("trainer", shared_cores.take),
        io_thread=LocalThread("io"),
        piece_arrived=piece_arrived,
        read_states=_states_reader(config, machine),
        consumed=partial(selection.consumed, lag=machine.trainer.lag),
        more=partial(selection.more, resize=journal.resize),
        replayed=partial(_replayed, machine.techniques, config.seed, identify),
        max_replay_age=machine.techniques.max_replay_age,
    )


def _record(machine: Components, folder: Path) -> None:
    """Let the auditor record batches and weights in the run folder."""
    if isinstance(machine.auditor, RankedAuditor):
        machine.auditor.record(folder / RECORDED)
    else:
        machine.auditor.recording = Recording(folder / RECORDED, base=machine.policy.base)


def _travel_dtype(config: RunConfig, policy: Policy) -> torch.dtype:
    """Return the precision in which weights are sent to the engines."""
    return policy.travel_dtype(DTYPES[config.engine.dtype])


def _evaluation(
    config: RunConfig,
    taskset: Taskset,
    make_rollout: Callable[..., Rollout],
    recorder: Recorder,
    life: ResumeState,
) -> Evaluation | None:
    """Return a function that measures success on the held-out tasks. None if there are none.

    In a new run, the first evaluation begins with one episode as a trial.
    """
    held_out = held_out_tasks(taskset, config.eval.tasks)
    if not held_out:
        return None
    rollout = make_rollout(on_failure=recorder.held_out_failure, on_blocked=recorder.blocked)
    is_first = life.progress.step == 0

    async def measure(**options: Any) -> list[bool | None]:
        nonlocal is_first
        trial, is_first = is_first, False
        return await evaluate(rollout, held_out, seed=config.seed, trial=trial, **options)

    return measure


def _publisher(
    config: RunConfig,
    machine: Components,
    engine: EnginePool,
    checkpoints: Checkpoints,
    posts: WeightPosts | None,
) -> Publisher:
    """Return the object that sends each version of the weights to the engines."""
    dtype = _travel_dtype(config, machine.policy)
    if isinstance(machine.trainer, RankedTrainer):
        return RankedPublisher(engine, machine.trainer, dtype=dtype, posts=posts)
    return DirectPublisher(
        engine,
        dtype=dtype,
        store=delta_store(machine.scorer) if shares_deltas(config) else None,
        put=checkpoints.write_version,
        post=posts.post if posts else None,
        in_place=loads_in_place(config),
        packed=config.engine.quantise if packs_weights(config) else "none",
    )


def _states_reader(
    config: RunConfig, machine: Components
) -> Callable[[Sequence[Group]], None] | None:
    """Return the function that passes hidden states to techniques. None if none of them reads any.

    Such techniques have state, so they are refused with trainer ranks.
    """
    if not machine.techniques.states_readers or isinstance(machine.trainer, RankedTrainer):
        return None
    return partial(
        machine.techniques.read_states,
        compute=machine.trainer.hidden_states,
        replay_routes=config.trainer.routing_replay,
    )


def _replayed(
    techniques: Techniques,
    seed: int,
    identify: Callable[[Task], str],
    groups: Sequence[Group],
    step: int,
) -> Sequence[Batch]:
    """Return batches of stored groups that join the fresh groups of a step."""
    if not techniques.sources:
        return ()
    own = derive_seed(seed, "replay", step)
    return techniques.replayed(groups, own, identify=identify)


@dataclass(frozen=True, slots=True)
class _Listeners:
    """Callbacks of the rollout. They pass on sampled tokens, and failed or restarted episodes.

    The receivers are the old-logit route, the list of tokens not yet trained on, and the run's log.
    """

    old: OldLogps
    pending: PendingPieces
    piece_arrived: asyncio.Event
    recorder: Recorder

    def on_piece(self, piece: PendingPiece) -> None:
        self.pending.add(piece)
        self.old.arrived(piece)
        self.piece_arrived.set()

    def on_failure(self, episode: int, failure: Failure, final: bool) -> None:
        self.pending.discard([episode])
        self.recorder.failure(episode, failure, final)

    def on_restart(self, episode: int, failure: Failure) -> None:
        self.pending.discard([episode])
        self.recorder.restarted(episode, failure)


def _training_rollout(
    make_rollout: Callable[..., Rollout], listeners: _Listeners, life: ResumeState
) -> Rollout:
    """Return the object that runs training episodes.

    Give it the episodes that a resumed run had begun.
    """
    rollout = make_rollout(
        on_piece=listeners.on_piece,
        on_failure=listeners.on_failure,
        on_restart=listeners.on_restart,
        on_blocked=listeners.recorder.blocked,
    )
    rollout.restore(life.episodes, life.quarantined, life.failed_shares)
    for request in life.requests:
        for piece in request.opens():
            listeners.pending.add(piece)
    return rollout


def build_checkpoints(config: RunConfig, machine: Components, run: Path) -> Checkpoints:
    """Return the writer of checkpoints of the trainer, the old-logit route and the auditor."""
    if isinstance(machine.trainer, RankedTrainer):
        return RankedCheckpoints(machine.trainer, run, keep=config.checkpoint.keep)
    assert isinstance(machine.auditor, Auditor)
    parts: dict[str, Stateful] = {
        "trainer": machine.trainer,
        "old": machine.old,
        "auditor": machine.auditor,
        **machine.techniques.stateful,
    }
    # A route may change the trained weights while a checkpoint is written.
    copies = config.old_logps.needs.trained_weights
    return Checkpoints(run, parts, keep=config.checkpoint.keep, copies=copies)


def build_rank(config: RunConfig, peers: Peers) -> Rank:
    """Return the components of one of several trainer ranks. All ranks must call it."""
    torch.set_num_threads(trainer_threads(config))
    policy = load_policy(config, peers.in_context_groups(config.cluster.context))
    scorer = build_scorer(config, policy)
    trainer, auditor = build_trainer(config, policy, scorer, on_rank=True)
    store = delta_store(scorer) if config.old_logps.shares_deltas else None
    return Rank(policy, trainer, auditor, store)


def build_scoring_rank(config: RunConfig, peers: Peers) -> ScoringRank:
    """Return one of several ranks that only score. All ranks must call it."""
    torch.set_num_threads(1)
    policy = load_policy(config, peers, trained=False)
    return ScoringRank(policy, build_scorer(config, policy))


def build_queue(config: ScheduleConfig, life: ResumeState, policy: Policy) -> StalenessQueue:
    """Return the staleness queue: it limits the groups in flight and sorts finished ones.

    In a resumed run it contains the groups that were not trained on before the resume.
    """
    queue = StalenessQueue(
        max_staleness=config.max_staleness,
        groups_per_step=config.groups_per_step,
        lookahead_window=config.lookahead_window,
        adaptive_window=config.adaptive_window,
    )
    ages: dict[int, int] = {}
    for request in life.requests if config.adaptive_window else ():
        if versions := sorted({each.piece.version for each in request.opens()}):
            ages[request.number] = int(policy.lag(torch.tensor(versions)).max())
    queue.restore(life.admitted, [request.number for request in life.requests], ages)
    return queue


def shares_deltas(config: RunConfig) -> bool:
    """Return True if the route's weight differences can also be sent to the engines.

    A delta is the lossless difference of the weights of two versions. It is then computed only
    once. Trainer ranks have deltas of their parts only, so whole weights are sent.
    """
    if config.cluster.trainers:
        return False
    same_precision = config.engine.dtype == config.trainer.dtype
    return config.old_logps.shares_deltas and (same_precision or config.trainer.lora_rank > 0)


def loads_in_place(config: RunConfig) -> bool:
    """Return True if the engines get whole weights on a GPU, not in main memory.

    They get them by NCCL, or the embedded engine reads them on the trainer's GPU.
    """
    options, cluster = config.engine, config.cluster
    if config.trainer.lora_rank or packs_weights(config):
        return False
    is_here = not (cluster.trainers or cluster.engine_hosts or cluster.address)
    reads_gpu = engine_spec(options.backend).reads_gpu and torch.cuda.is_available()
    return options.transfer == "nccl" or (options.transfer == "auto" and is_here and reads_gpu)


TEMPLATE_S = 30.0
"""Seconds in which a chat template must write some short conversations. It takes 0.1."""


def build_generator(
    config: RunConfig, policy: Policy, taskset: Taskset, engine: Engine | None = None
) -> Generator:
    """Return the engine with the chat format: the model's template and the task set's tools.

    Raises `ConfigError` if the model's tokenizer or template cannot be used.
    """
    try:
        engine = engine or build_engine(config, policy.merging)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    chat = build_chat(config, policy, taskset)
    warn_of_hidden_tools(config, chat, taskset)
    return Generator(engine, chat, config.engine)


def build_chat(config: RunConfig, policy: Policy, taskset: Taskset) -> Chat:
    """Return the chat format of a policy with the tools of a task set.

    Raises `ConfigError` if the policy's tokenizer or template cannot be used.
    """
    try:
        with (
            reading(Path(config.policy), "chat template"),
            Watchdog(partial(print, file=sys.stderr)),
            time_limit("the chat template", TEMPLATE_S, "use another template"),
        ):
            return Chat(
                policy.tokenizer,
                taskset.tools,
                ends=policy.ends,
                template_kwargs=config.template_kwargs,
                tools_in_prompt=config.tools_in_prompt,
            )
    except ConfigError as error:
        if type(error.__cause__) is ValueError:  # the chat format's own, which names the cause
            raise ConfigError(str(error.__cause__)) from error
        raise


def warn_of_giveaways(taskset: Taskset) -> None:
    """Print a warning if a task set pays replies that solve nothing."""
    text = taskset.giveaways() if implements(taskset, HasGiveaways) else ""
    if text:
        _print_note(
            f"[yellow]warning:[/] {escape(text)}. A policy may learn such replies instead of the "
            "task: leave these tasks out, or read some episodes of the run"
        )


def warn_of_hidden_tools(config: RunConfig, chat: Chat, taskset: Taskset) -> None:
    """Print a warning if no prompt describes the tools. The package's own policies know theirs.

    For an external agent, they are those that it sends with its calls.
    """
    folders = {folder.resolve() for folder in SHIPPED_POLICIES.values()}
    prompts, names = f"the prompts of {config.task.env}", "which tools there are"
    hides = chat.hides_tools
    if isinstance(taskset, ExternalAgent):
        names = "which tools an agent sends, if it sends any"
        hides = not (chat.renders_tools or config.tools_in_prompt)
    if hides and config.policy_folder.resolve() not in folders:
        _print_note(
            f"[yellow]warning:[/] the chat template of {escape(config.policy)} does not render "
            f"tools, so {escape(prompts)} do not say {names}. Set tools_in_prompt = true to "
            "describe them in the prompt, unless the policy was trained without descriptions"
        )


def _print_note(text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(text, highlight=False)


def build_engine(config: RunConfig, merging: Merging | None) -> EnginePool:
    """Return the configured engines as one pool.

    `merging` describes LoRA adapters, if the run has any.

    Raises `ConfigError` if the engine needs `engine.urls` and none is given.
    """
    options = config.engine
    spec = engine_spec(options.backend)
    if spec.needs_urls and not options.urls.split():
        raise ConfigError(f"engine.backend = {options.backend} needs engine.urls")
    urls = options.urls.split() or [""] * options.processes
    max_running = math.ceil(options.max_running / options.processes)
    over_file = options.transfer != "nccl" and not config.cluster.engine_hosts
    is_single = len(urls) == 1 and over_file and not loads_in_place(config)
    sends_deltas = is_single and (merging is None or spec.adapter_deltas)
    gpus = run_gpus(config).engines
    every = tuple(
        EngineOptions(
            config.policy_folder,
            url=url,
            args=tuple(shlex.split(options.args)),
            gpu_memory_utilization=gpu_memory_utilization(config),
            dtype=cast(Dtype, options.dtype),
            quantise=options.quantise,
            bitwise=options.bitwise,
            threads=options.threads,
            gpus=gpus,
            number=number,
            max_running=max_running,
            max_context=options.max_context,
            keep_cache=options.keep_cache,
            load_tokens=options.load_tokens,
            deltas=sends_deltas and (shares_deltas(config) or packs_weights(config)),
            packed=packs_weights(config),
            transfer=options.transfer,
            merging=merging,
            record_routes=config.trainer.routing_replay,
            lockstep=config.deterministic,
        )
        for number, url in enumerate(urls)
    )
    if config.cluster.engine_hosts:
        return components.make_host_pool(config, spec.make, every)
    warn_of_shared_gpus(config)
    engines = [spec.make(each) for each in every]
    return EnginePool(
        engines,
        max_running=max_running,
        keep_cache=options.keep_cache,
        load_tokens=options.load_tokens,
        phases=Phases(options.prefill_engines, options.prefill_ratio),
    )


def build_rollout(
    config: RunConfig, taskset: Taskset, *, on_event: Callable[..., None] = lambda kind, **_: None
) -> Callable[..., Rollout]:
    """Return a function that creates the object that runs episodes.

    For a task set of an external agent (`ExternalAgent`), all such objects share one HTTP endpoint.
    Raises `ConfigError` if a needed package is missing or the run is deterministic.
    """
    if isinstance(taskset, IsolatedTasks):
        taskset.workers.on_event = on_event
    if not ends_freely(taskset):
        return partial(Rollout, deterministic=config.deterministic)
    limiters = [each.name for each in chosen(config.techniques) if each.slot == "limiter"]
    if limiters:
        raise ConfigError(
            f"the technique {limiters[0]} cannot be used with an ExternalAgent, which counts its "
            "turns and calls itself: remove it from techniques, and set rollout.max_turns"
        )
    if config.deterministic:
        raise ConfigError(
            "deterministic must be false with an ExternalAgent: "
            "a virtual clock does not wait for sockets"
        )
    try:
        from unstale.rollout.endpoint.agents import AgentRollout
        from unstale.rollout.endpoint.server import RecordingEndpoint

        endpoint = RecordingEndpoint(config.endpoint)
    except ModuleNotFoundError as error:
        raise ConfigError(f"an ExternalAgent needs {error.name}: {install('endpoint')}") from error
    return partial(AgentRollout, endpoint=endpoint, on_event=on_event)


def ends_freely(taskset: Taskset) -> bool:
    """Return True if an external agent talks to the policy, which may end a reply by a text."""
    inner = taskset.inner if isinstance(taskset, IsolatedTasks) else taskset
    return isinstance(inner, ExternalAgent)


def build_old_logps(config: OldLogpsConfig, scorer: Scorer, *, lockstep: bool = False) -> OldLogps:
    """Return the configured old-logit route, which computes old log-probabilities.

    With `lockstep` the trainer waits for the route's child process, if it has one. The results then
    do not depend on the speed of that process.
    """
    route: OldLogps = config.make(scorer, lockstep=lockstep)
    return route
