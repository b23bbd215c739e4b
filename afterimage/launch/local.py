"""One machine: the engine in a process of its own, the trainer beside the event loop in this one."""

import asyncio
import math
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from safetensors import SafetensorError

from afterimage import loop
from afterimage.build import build, build_machine
from afterimage.config import ConfigError, RunConfig
from afterimage.journal import JOURNAL
from afterimage.launch.machine import cores
from afterimage.lint import check
from afterimage.observe.live import LiveDisplay
from afterimage.observe.metrics import RunFolder, RunLog
from afterimage.observe.report import write_report
from afterimage.policy import DTYPES, Policy
from afterimage.publish import DirectPublisher
from afterimage.recording import WENT_WRONG, WentWrong
from afterimage.rollout import Rollout, examine
from afterimage.trainer import NOT_FINITE, Trainer

POLICY = "policy"
"""Where a run folder holds the trained model."""


class RunFailed(RuntimeError):
    """The machinery of a run failed. Its `__cause__` is the first error; the run folder holds the traceback."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run that ended, and what it left behind."""

    folder: Path
    report: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One row per step."""
        return RunFolder(self.folder).metrics()

    @property
    def policy(self) -> Policy:
        """The trained policy, read from the run folder."""
        return Policy.load(self.folder / POLICY)


def train(config: RunConfig, *, console: Console | None = None, command: str = "") -> Run:
    """Run `config` to its end, with progress on the terminal. `command` is what the report says to do it again.

    Leaves a run folder with metrics, conversations, the policy as a Hugging Face folder, and the report. Raises
    `ConfigError` before anything is trained, `RunFailed` when the machinery fails; after Ctrl-C the folder is complete
    and `KeyboardInterrupt` goes on.
    """
    console = console or Console(soft_wrap=True)
    verdict = check(config)
    verdict.require()
    for warning in verdict.warnings:
        console.print(f"[yellow]warning:[/] {escape(str(warning))}", highlight=False)
    share_processor(config)
    machine = build_machine(config)
    folder = config.runs / (config.name or f"{config.recipe}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}")
    if (folder / JOURNAL).exists():
        raise ConfigError(f"{folder} already holds a run ({JOURNAL}); choose another name or remove it")
    log = RunLog.create(folder, config)
    log.event("started", cores=cores(), **({"command": command} if command else {}))
    reason = "failed"
    try:
        with LiveDisplay(config, console=console) as display:
            asyncio.run(_supervise(build(config, machine, log, display)))
        reason = "finished"
    except ExceptionGroup as failures:
        error = first_leaf(failures)
        log.failed("".join(traceback.format_exception(error)))
        if isinstance(error, NOT_FINITE):
            console.print(keep_evidence(machine.trainer, folder), highlight=False)
        raise RunFailed(f"{type(error).__name__}: {error} (traceback in {folder / 'error.txt'})") from error
    except KeyboardInterrupt:
        reason = "Ctrl-C"
        console.print("[yellow]stopped; saving what there is[/]")
        raise
    finally:
        log.event("stopped", reason=reason)
        log.close()
        if reason != "failed":
            machine.policy.save(folder / POLICY)
        report = write_report(folder)
        console.print(f"run folder {folder}\nreport     {report}", highlight=False)
    return Run(folder, report)


def keep_evidence(trainer: Trainer, folder: Path) -> str:
    """Write down what the trainer was at work on when it raised. What became of it, for whoever looks on."""
    suspect = trainer.suspect
    if suspect is None:
        return "no batch was kept: the trainer had none yet"
    part = suspect.part
    columns = {"old_logp": part.old_logp, "factor": part.factor, "norm": part.norm, "lag": part.lag}
    wrong = WentWrong(
        part.batch,
        columns | {"reference_logp": part.reference_logp},
        trainer.policy.weights(),
        {"stage": suspect.stage, "steps": str(trainer.steps), "version": str(trainer.policy.version)},
    )
    try:
        wrong.save(folder / WENT_WRONG)
    except (OSError, SafetensorError) as error:
        return f"the batch could not be kept: {error}"
    return f"the batch is kept; to see it again: afterimage replay {folder}"


async def _supervise(parts: loop.Parts) -> None:
    """The loop under one parent; whatever happens, the trainer's thread ends and the engine is given back."""
    try:
        async with asyncio.TaskGroup() as tasks:
            with parts.journal:
                watch = tasks.create_task(parts.journal.watch())
                await loop.run(parts)
                await parts.journal.barrier()
                watch.cancel()
    finally:
        parts.worker.shutdown(wait=True)
        parts.old.close()
        await parts.engine.close()
        parts.log.close()


def first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that began it: groups nest as tasks do, and the first to fail comes first."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@dataclass(frozen=True, slots=True)
class Grade:
    """Held-out success, with its 95% Wilson interval."""

    successes: int
    tasks: int

    @property
    def success(self) -> float:
        return self.successes / self.tasks

    @property
    def low(self) -> float:
        return self._wilson(-1)

    @property
    def high(self) -> float:
        return self._wilson(+1)

    def _wilson(self, side: int) -> float:
        z, n, p = 1.96, self.tasks, self.success
        spread = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return (p + z * z / (2 * n) + side * spread) / (1 + z * z / n)


def evaluate(trained: Path, config: RunConfig, *, console: Console | None = None) -> Grade:
    """Held-out success of a run's policy, or of any model folder, on the recipe's tasks.

    Raises `ConfigError` for what is wrong beforehand and `RunFailed` when the machinery fails.
    """
    if config.eval.tasks < 1:
        raise ConfigError(f"eval.tasks must be >= 1 to evaluate, got {config.eval.tasks}")
    folder = trained / POLICY if (trained / POLICY).is_dir() else trained
    config = replace(config, policy=str(folder))
    share_processor(config)
    machine = build_machine(config)
    console = console or Console()

    async def grade() -> list[bool]:
        engine = machine.speaker.engine
        rollout = Rollout(machine.speaker, machine.taskset, config.rollout)
        try:
            await engine.start()
            publisher = DirectPublisher(engine, dtype=DTYPES[config.engine.dtype])
            publisher.prepare(machine.policy)
            await publisher.publish()
            with LiveDisplay(config, console=console) as display:
                tasks = machine.taskset.held_out(config.eval.tasks)
                return await examine(rollout, tasks, seed=config.seed, progress=display.phase)
        finally:
            await engine.close()

    try:
        graded = asyncio.run(grade())
    except ExceptionGroup as failures:
        error = first_leaf(failures)
        raise RunFailed(f"{type(error).__name__}: {error}") from error
    return Grade(sum(graded), len(graded))


def share_processor(config: RunConfig) -> None:
    """Divide the cores among the processes of a run: with more threads than cores all run many times slower."""
    others = config.engine.threads + (config.old_logps.route == "old_logit_model")
    torch.set_num_threads(config.trainer.threads or max(1, cores() - others))
