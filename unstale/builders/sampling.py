"""Create task set, engine and rollout of a run: everything that makes episodes."""

import math
import secrets
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from rich.markup import escape
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from unstale.builders.policy import load_policy, loads_in_place, shares_deltas
from unstale.cluster import components
from unstale.cluster.env_hosts import remote_workers
from unstale.cluster.gpus import (
    engine_gpus,
    gpu_memory_utilization,
    run_gpus,
    warn_of_shared_gpus,
)
from unstale.config import (
    SHIPPED_POLICIES,
    ConfigError,
    Dtype,
    EvalConfig,
    RunConfig,
    install,
)
from unstale.config.given import HERE
from unstale.config.hub import reading
from unstale.config.techniques import chosen, reads_signals
from unstale.durability.console import Console
from unstale.durability.run_folder import plain
from unstale.engines import Engine
from unstale.engines.following import require_servers
from unstale.engines.pool import EnginePool
from unstale.engines.registry import EngineOptions, engine_spec, packs_weights
from unstale.engines.routing import Phases
from unstale.envs import (
    EnvError,
    HasNotice,
    Taskset,
    implements,
    sandbox,
)
from unstale.envs.chat import Chat
from unstale.envs.external import ExternalAgent
from unstale.envs.guard import (
    Watchdog,
    time_limit,
)
from unstale.envs.registry import (
    build_taskset,
    check_taskset,
    held_out_tasks,
    missing_methods,
    preparing,
)
from unstale.isolation import IsolatedTasks, isolate
from unstale.kept_sets import Truncation
from unstale.model.lora import Merging
from unstale.model.pictures import PictureInputs, PictureReader
from unstale.model.policy import Policy
from unstale.rollout.episode import Rollout
from unstale.rollout.generator import Generator
from unstale.rollout.selection import make_pool, read_texts, require_repeats


def build_sampler(
    config: RunConfig, engine: Engine | None = None
) -> tuple[Policy, Taskset, Generator]:
    """Return the policy, the task set, and the engine with its chat format.

    If `engine` is given, it is used in place of the configured one. Raises `ConfigError` for
    invalid options.
    """
    if config.allow_weak_sandbox:
        sandbox.allow_weak()
    taskset = build_taskset(config.task)
    check_taskset(taskset, config.seed, config.max_steps * config.schedule.groups_per_step)
    with preparing(taskset, "notice()"):
        print_notice(taskset)
    if config.selection.pool:  # both calls raise ConfigError for a pool that does not fit
        with preparing(taskset, "train() or text()"):
            pool = make_pool(taskset, config.seed, config.selection)
            if any("texts" in entry.requires for entry in chosen(config.techniques)):
                read_texts(taskset, pool)
    with preparing(taskset, "train()"):
        require_repeats(config, taskset)
    require_methods(config, taskset)
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
    build_rollout(config, taskset)  # raises ConfigError for what the task set cannot be used with
    policy = load_policy(config)
    generator = build_generator(config, policy, taskset, engine)
    if config.rollout.processes > 1:
        require_divisible(config, taskset, generator.engine)
    return policy, taskset, generator


def require_methods(config: RunConfig, taskset: Taskset) -> None:
    """Raise `ConfigError` if the task set lacks a method that a technique needs."""
    for name, methods in missing_methods(config, taskset).items():
        raise ConfigError(
            f"the technique {name} needs {methods} of the task set, and {taskset.name} has none: "
            "give the task set the method (docs/your-own-task.md), or choose another technique"
        )


def require_divisible(config: RunConfig, taskset: Taskset, engine: Engine) -> None:
    """Raise `ConfigError` if the episodes of a run cannot be divided among several processes."""
    count = config.rollout.processes
    if ends_freely(taskset):
        raise ConfigError(
            f"rollout.processes must be 1 with an ExternalAgent, got {count}: all agents of a run "
            "call one endpoint"
        )
    if has_several_conversations(taskset):
        raise ConfigError(
            f"rollout.processes must be 1 with {taskset.name}, got {count}: rollout processes "
            "record one conversation of an episode"
        )
    for name, value in plain(config.task).items():
        if isinstance(value, str) and HERE in value:
            raise ConfigError(
                f"task.{name} = {value} cannot be used with rollout.processes = {count}: rollout "
                "processes cannot import __main__. Move the code to a module"
            )
    try:
        require_servers(engine.engines if isinstance(engine, EnginePool) else [engine])
    except ValueError as error:
        raise ConfigError(str(error)) from None


def build_server(config: RunConfig) -> tuple[Policy, Taskset, Generator]:
    """Return policy, task set and engine for a server to which clients send tasks and tools.

    The task set has no tasks of its own.
    """
    taskset = without_tasks("server")
    policy = load_policy(config)
    build_rollout(config, taskset)  # raises ConfigError if a package for the endpoint is missing
    return policy, taskset, build_generator(config, policy, taskset)


def without_tasks(name: str) -> Taskset:
    """Return a task set without tools, for commands that run no task. If its only task, a
    placeholder, is run, it raises an error that contains `name`.
    """

    def no_agent(*_: object) -> float:
        raise EnvError(f"{name} runs no task")

    return cast(Taskset, ExternalAgent(no_agent, [None], name=name))


def build_generator(
    config: RunConfig, policy: Policy, taskset: Taskset, engine: Engine | None = None
) -> Generator:
    """Return the engine with its chat format: the model's template with the tools of the task set.

    If `engine` is given, it is used in place of the configured one. Raises `ConfigError` if the
    model's tokenizer or template cannot be used.
    """
    try:
        engine = engine or build_engine(config, policy.merging, policy.pictures)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    reader = policy.pictures.reader if policy.pictures else None
    chat = build_chat(config, policy.tokenizer, policy.ends, taskset, reader)
    warn_of_hidden_tools(config, chat, taskset)
    return Generator(
        engine,
        chat,
        config.engine,
        pins=config.schedule.pin_versions,
        signals=reads_signals(config),
    )


def for_evaluation(generator: Generator, config: EvalConfig) -> Generator:
    """Return a generator that samples as evaluations do, with the same engine."""
    return replace(
        generator,
        temperature=None if config.temperature < 0 else config.temperature,
        truncation=generator.sampling_truncation._replace(**config.limits),
        return_sets=False,
        signals=False,
        precise=True,
    )


TEMPLATE_S = 30.0
"""Seconds in which a chat template must render some short conversations. Usually it takes 0.1 s."""


def build_chat(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    ends: tuple[int, ...],
    taskset: Taskset,
    pictures: PictureReader | None = None,
) -> Chat:
    """Return the chat format of a policy, with the tools of a task set.

    `ends` are the tokens that end a reply. `pictures` turns pictures into tokens, for a policy that
    reads them. Raises `ConfigError` if the tokenizer or its template cannot be used.
    """
    try:
        with (
            reading(Path(config.model), "chat template"),
            Watchdog(partial(print, file=sys.stderr)),
            time_limit("the chat template", TEMPLATE_S, "use another template"),
        ):
            return Chat(
                tokenizer,
                taskset.tools,
                ends=ends,
                template_kwargs=config.template_kwargs,
                tools_in_prompt=config.tools_in_prompt,
                pictures=pictures,
            )
    except ConfigError as error:
        if type(error.__cause__) is ValueError:  # the chat format's own, which names the cause
            raise ConfigError(str(error.__cause__)) from error
        raise


def print_notice(taskset: Taskset) -> None:
    """Print the notice of a task set (`HasNotice`), if it has one."""
    if text := taskset.notice() if implements(taskset, HasNotice) else "":
        _print_note(f"note: {escape(text)}")


def warn_of_hidden_tools(config: RunConfig, chat: Chat, taskset: Taskset) -> None:
    """Print a warning if prompts do not describe the tools of the task set.

    That is so if the model's chat template does not, and the option `tools_in_prompt` is not set.
    There is no warning for the package's own policies, which were trained on their tools. An
    external agent sends its tools later, so for it only the template and the option are checked.
    """
    folders = {folder.resolve() for folder in SHIPPED_POLICIES.values()}
    prompts, names = f"the prompts of {config.task.env}", "which tools there are"
    hides = chat.hides_tools
    if isinstance(taskset, ExternalAgent):
        prompts, names = "the prompts", "which tools an agent sends, if it sends any"
        hides = not (chat.renders_tools or config.tools_in_prompt)
    if hides and config.policy_folder.resolve() not in folders:
        _print_note(
            f"[yellow]warning:[/] the chat template of {escape(config.model)} does not render "
            f"tools, so {escape(prompts)} do not say {names}. Set tools_in_prompt = true to "
            "describe them in the prompt, unless the policy was trained without descriptions"
        )


def _print_note(text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(text, highlight=False)


def build_engine(
    config: RunConfig, merging: Merging | None, pictures: PictureInputs | None = None
) -> EnginePool:
    """Return all configured engines as one pool.

    `merging` describes the LoRA adapters of the run, and is None without. `pictures` is what the
    policy needs to read pictures, and is None if it cannot. Raises `ConfigError` if the engine does
    not support an option, or needs `engine.urls` and none is given.
    """
    options = config.engine
    spec = engine_spec(options.backend)
    if options.adapters == "unmerged" and not spec.unmerged:
        raise ConfigError(
            f"engine.adapters must be merged with engine.backend = {options.backend}, got "
            f"{options.adapters}: not built, because this engine loads one version at a time"
        )
    if spec.needs_urls and not options.urls.split():
        raise ConfigError(f"engine.backend = {options.backend} needs engine.urls")
    if options.truncated_by and not spec.keeps_sets:
        raise ConfigError(
            f"{options.truncated_by} is not built with engine.backend = {options.backend}, whose "
            "adapter does not read the tokens among which each token was drawn. Use embedded or "
            "vllm"
        )
    if config.eval.truncated_by and not (spec.truncates or spec.keeps_sets):
        raise ConfigError(
            f"{config.eval.truncated_by} is not built with engine.backend = {options.backend}, "
            "which samples only from the whole vocabulary"
        )
    urls = options.urls.split() or [""] * options.num_started
    max_running = math.ceil(options.max_running / options.num_started)
    over_file = options.transfer != "nccl" and not config.cluster.engine_hosts
    is_single = len(urls) == 1 and over_file and not loads_in_place(config)
    sends_deltas = is_single and (merging is None or spec.adapter_deltas)
    gpus = run_gpus(config).engines
    cache_key = secrets.token_hex(32) if options.send_cache else ""
    every = tuple(
        EngineOptions(
            config.policy_folder,
            url=url,
            args=tuple(shlex.split(options.args)),
            python=options.python,
            gpu_memory_utilization=gpu_memory_utilization(config),
            dtype=cast(Dtype, options.dtype),
            quantise=options.quantise if number < len(urls) - options.precise_engines else "none",
            bitwise=options.bitwise,
            threads=options.threads,
            gpus=gpus,
            gpus_each=engine_gpus(config) // options.servers if options.servers > 1 else 0,
            number=number,
            max_running=max_running,
            max_context=options.max_context,
            logit_bias=options.biases,
            truncation=Truncation(options.top_p, options.top_k, options.min_p),
            keep_cache=options.keep_cache,
            load_tokens=options.load_tokens,
            deltas=sends_deltas and (shares_deltas(config) or packs_weights(config)),
            packed=packs_weights(config),
            transfer=options.transfer,
            probe_tolerance=options.probe_tolerance,
            merging=merging,
            adapters=options.adapters if merging else "merged",
            # the versions of running episodes, the newest, and one that is being loaded
            max_versions=config.schedule.staleness_bound + 2 if config.schedule.pin_versions else 2,
            record_experts=config.trainer.routing_replay,
            pictures=pictures.store if pictures else None,
            cache_key=cache_key,
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
        phases=Phases.of(options),
        precise_engines=options.precise_engines,
    )


def build_rollout(
    config: RunConfig, taskset: Taskset, *, on_event: Callable[..., None] = lambda kind, **_: None
) -> Callable[..., Rollout]:
    """Return a function that creates the object that runs episodes of `taskset`.

    If an external agent runs them (`ExternalAgent`), all such objects share one HTTP endpoint.
    Raises `ConfigError` for an external agent if a package is missing, or if a technique, an
    advantage estimator or `deterministic` cannot be used with it.
    """
    if isinstance(taskset, IsolatedTasks):
        taskset.workers.on_event = on_event
    if not ends_freely(taskset):
        if has_several_conversations(taskset):
            tasks = f"{taskset.name} (several conversations in an episode)"
            _require_whole_episodes(config, tasks)
        forks = any(each.forks_after_turns for each in chosen(config.techniques))
        return partial(Rollout, deterministic=config.deterministic, forks=forks)
    _require_whole_episodes(config, "an ExternalAgent")
    _require_credit_by_role(config, taskset)
    if config.deterministic:
        _require_on_loop(config, taskset)
    try:
        from unstale.rollout.endpoint.agents import AgentRollout
        from unstale.rollout.endpoint.server import RecordingEndpoint

        endpoint = RecordingEndpoint(config.endpoint)
    except ModuleNotFoundError as error:
        raise ConfigError(f"an ExternalAgent needs {error.name}: {install('endpoint')}") from error
    return partial(AgentRollout, endpoint=endpoint, on_event=on_event)


def _require_whole_episodes(config: RunConfig, tasks: str) -> None:
    """Raise `ConfigError` for a technique that limits the turns of episodes, or forks them.

    `tasks` describes the task set in the error.
    """
    limiters = [each.name for each in chosen(config.techniques) if each.slot == "limiter"]
    if limiters:
        raise ConfigError(
            f"the technique {limiters[0]} cannot be used with {tasks}: remove it from techniques, "
            "and set rollout.max_turns"
        )
    if forking := [each.name for each in chosen(config.techniques) if each.slot == "strategy"]:
        raise ConfigError(
            f"the technique {forking[0]} cannot be used with {tasks}, which cannot be started "
            "again in the middle of an episode: remove it from techniques"
        )


def _require_on_loop(config: RunConfig, taskset: Taskset) -> None:
    """Raise `ConfigError` if an external agent's calls do not come from the run's event loop, are
    encrypted, or go to another address than the one where the endpoint listens.
    """
    if isinstance(taskset, IsolatedTasks) or not cast(ExternalAgent, taskset).is_coroutine:
        raise ConfigError(
            "deterministic must be false with an ExternalAgent in a thread or another process: a "
            "virtual clock does not wait for sockets. Make the agent an async function whose calls "
            "are awaited, with task.isolate = none"
        )
    for option in ("certificate", "public_host"):
        if getattr(config.endpoint, option):
            raise ConfigError(
                f"deterministic must be false with endpoint.{option}: the agents of a "
                "deterministic run are connected in memory, at endpoint.host and without TLS"
            )


def _require_credit_by_role(config: RunConfig, taskset: Taskset) -> None:
    """Raise `ConfigError` if a task set has roles and the advantages of the run do not distinguish
    them.
    """
    if not getattr(taskset, "roles", ()):
        return
    if config.advantage.estimator in ("turn_level", "gae"):
        raise ConfigError(
            f"advantage.estimator = {config.advantage.estimator} has no credit by role, and the "
            "task set has roles: use grpo, rloo or opo"
        )
    slots = ("estimator", "recredit")
    unaware = [
        each.name
        for each in chosen(config.techniques)
        if each.slot in slots or each.name == "novelty"
    ]
    if unaware:
        raise ConfigError(
            f"the technique {unaware[0]} has no credit by role, and the task set has roles: remove "
            "it from techniques"
        )


def has_several_conversations(taskset: Taskset) -> bool:
    """Return True if episodes of `taskset` may begin new conversations (`Turn.fresh`)."""
    return bool(getattr(taskset, "several_conversations", False))


def ends_freely(taskset: Taskset) -> bool:
    """Return True if an external agent (`ExternalAgent`) runs the episodes of `taskset`.

    Such an agent decides itself when an episode ends.
    """
    inner = taskset.inner if isinstance(taskset, IsolatedTasks) else taskset
    return isinstance(inner, ExternalAgent)
