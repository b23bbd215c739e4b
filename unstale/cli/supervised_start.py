"""Train a run's policy on demonstrations before its first step (a supervised start).

Demonstrations are episodes that the task set provides.
"""

import fcntl
import shutil
import time
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

from unstale.builders import build_chat, load_policy
from unstale.cli.sft import RECORD, SftOptions, learn
from unstale.config import AuditConfig, ClusterConfig, ConfigError, ObjectiveConfig, RunConfig
from unstale.config.start import start_folder, start_options
from unstale.config.tasks import find_spec, libraries
from unstale.durability.console import Console
from unstale.durability.run_folder import dumps
from unstale.envs import HasDemonstrations, HasTaskTools, implements
from unstale.envs.references import Reference, encode_conversation
from unstale.envs.registry import build_taskset, preparing
from unstale.model.policy import Policy


def make_start(config: RunConfig, console: Console) -> None:
    """Write the policy of a run's supervised start, unless another run with the same options did.

    Waits if another process makes it. Does nothing if the option `sft.steps` is 0. Raises
    `ConfigError` if the task set has no demonstrations, or if a demonstration or the chat template
    cannot be used.
    """
    if not config.sft.steps:
        return
    folder = start_folder(config)
    made = f"supervised start: {folder}, made by another run"
    if (folder / RECORD).is_file():
        console.print(made, highlight=False)
        return
    policy = load_policy(_plain(config))
    references = demonstrations(config, policy)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print("waiting for another run, which makes this supervised start")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / RECORD).is_file():
            console.print(made, highlight=False)
        else:
            _write(config, policy, references, folder, console)


def _write(
    config: RunConfig,
    policy: Policy,
    references: list[Reference],
    folder: Path,
    console: Console,
) -> None:
    began = time.monotonic()
    console.print(
        f"supervised start: {config.sft.steps} steps of {config.sft.batch} demonstrations of "
        f"{config.sft.env or config.task.env}",
        highlight=False,
    )
    options = SftOptions(batch=config.sft.batch)
    steps = learn(_plain(config), policy, references, options, console=console)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    policy.save(unfinished)
    record = {**start_options(config), "steps": [asdict(each) for each in steps]}
    (unfinished / RECORD).write_text(dumps(record), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    console.print(
        f"supervised start: {folder}, in {time.monotonic() - began:.0f} s", highlight=False
    )


def demonstrations(config: RunConfig, policy: Policy) -> list[Reference]:
    """Return the task set's demonstrations as conversations in tokens.

    Raises `ConfigError` if the task set has none, or if one is longer than `engine.max_context`.
    """
    env = config.sft.env or config.task.env
    if config.sft.env and not (find_spec(env) or env.partition(":")[0] in libraries()):
        raise ConfigError(
            f"sft.env cannot be {env!r}: it must be an environment of the package. For your own, "
            "leave it empty and set task.env"
        )
    taskset = solver = build_taskset(replace(config.task, env=env))
    if not implements(solver, HasDemonstrations):
        raise ConfigError(
            f"sft.steps must be 0 with {env}, got {config.sft.steps}: its task set has no method "
            "demonstration(task)"
        )
    try:
        chat = build_chat(config, policy.tokenizer, policy.ends, taskset)
        tasks = islice(taskset.train(config.seed), config.sft.demonstrations)
        references = []
        for task in tasks:
            form = chat
            with preparing(taskset, "demonstration() or tools_of()"):
                if implements(taskset, HasTaskTools):
                    form = chat.with_tools(taskset.tools_of(task))
                solved = solver.demonstration(task)
            references.append(encode_conversation(form, solved))
    except ValueError as error:
        raise ConfigError(f"no demonstrations of {env}: {error}") from error
    longest = max(len(each.tokens) for each in references)
    if longest > config.engine.max_context:
        raise ConfigError(
            f"engine.max_context must be at least {longest}, got {config.engine.max_context}: a "
            f"demonstration of {env} has that many tokens"
        )
    return references


def _plain(config: RunConfig) -> RunConfig:
    """Return the configuration for training on demonstrations: all weights, in float32."""
    trainer = replace(
        type(config.trainer)(dtype="float32"),
        lr=config.sft.lr,
        warmup_steps=1,
        max_tokens_per_microbatch=config.trainer.max_tokens_per_microbatch,
        gradient_checkpointing=config.trainer.gradient_checkpointing,
        threads=config.trainer.threads,
    )
    return replace(
        config.with_policy(config.pretrained_folder),
        max_steps=config.sft.steps,
        techniques="",
        technique_options={},
        objective=ObjectiveConfig(),
        audit=AuditConfig(),
        trainer=trainer,
        cluster=ClusterConfig(),
        engine=replace(config.engine, quantise="none", precise_engines=0),
    )
