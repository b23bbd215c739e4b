"""One machine: the engine in a process of its own, the trainer beside the event loop in this one."""

import asyncio
import gc
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.markup import escape
from safetensors import SafetensorError

from unstale import loop
from unstale.build import (
    Components,
    build,
    build_checkpoints,
    build_machine,
    build_rollout,
    build_sampler,
)
from unstale.cli.grades import EvalResult
from unstale.cli.resume import begin, differences, load_resume_state, revive, stored
from unstale.cli.survivors import write_survivors
from unstale.config import ConfigError, RunConfig
from unstale.durability import virtual_clock
from unstale.durability.checkpoint import CHECKPOINTS, CheckpointError
from unstale.durability.journal import JOURNAL, Journal, JournalError, Marked
from unstale.durability.machine import alone
from unstale.durability.run_folder import EVENTS, BrokenFile, RunFolder, RunLog
from unstale.engines.pool import Recovery, supervise
from unstale.lint import check
from unstale.loop import RunComponents
from unstale.model.loading import DTYPES
from unstale.model.policy import Policy
from unstale.observe.live import LiveDisplay
from unstale.observe.report.page import write_report
from unstale.rollout import evaluation
from unstale.rollout.generator import Generator
from unstale.rollout.timeouts import first_error
from unstale.trainer.local import LocalTrainer
from unstale.trainer.records import NOT_FINITE
from unstale.weights.child_process import cores
from unstale.weights.publish import DirectPublisher
from unstale.weights.recording import WENT_WRONG, WentWrong

POLICY = "policy"
"""Where a run folder holds the trained model."""
SWITCH_S = 1e-4
"""How long the event loop may keep the interpreter from the trainer, which asks for it again after every operation of
torch. Python's own 5 ms cost it a third of its pace beside agents, three quarters beside a loop that never rests."""
YOUNG = 100_000
"""Objects made and kept before Python looks for cycles among them; its own 700 cost a quarter of every turn."""
_T = TypeVar("_T")


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
    and `KeyboardInterrupt` goes on. Whatever ends it, `resume` goes on from its last checkpoint.
    """
    console = console or Console(soft_wrap=True)
    _check(config, console)
    machine = build_machine(config)
    folder = config.runs / (
        config.name or f"{config.recipe}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    if (folder / JOURNAL).exists():
        raise ConfigError(
            f"{folder} already holds a run ({JOURNAL}); go on with it (--resume {folder}), choose another name or "
            "remove it"
        )
    try:
        log = RunLog.create(folder, config)
    except OSError as error:
        raise ConfigError(f"no run folder can be made at {folder}: {error}") from error
    with alone(folder):
        log.event("started", cores=cores(), **({"command": command} if command else {}))
        return _finish(RunSession(config, log, machine), log, console)


def resume(folder: Path, config: RunConfig, *, console: Console | None = None) -> Run:
    """Go on with the run in `folder`, whatever ended it, from its newest sound checkpoint. Else as `train`.

    `config` is the run's own or differs from it where it may (`differences`). Raises `ConfigError` for a folder that
    is no run's, or whose run is finished.
    """
    console = console or Console(soft_wrap=True)
    changed = differences(stored(folder, named_env=config.task.env), config)
    _check(config, console)
    for words in changed:
        console.print(f"[yellow]changed:[/] {escape(words)}", highlight=False)
    with alone(folder):
        marks, done = _reached(folder)
        if done >= config.steps and _is_whole(folder):
            raise ConfigError(
                f"the run in {folder} is finished; to go on with it, give it more steps (--steps)"
            )
        if marks and config.steps < marks[-1].step:
            raise ConfigError(
                f"the run in {folder} has {marks[-1].step} steps behind it, --steps is {config.steps}"
            )
        fresh = None if marks else build_machine(config)  # it ended before its first checkpoint
        try:
            log = RunLog.reopen(folder, config)
        except (OSError, BrokenFile) as error:
            raise ConfigError(f"{folder} cannot be gone on with: {error}") from error
        log.event("resumed", step=marks[-1].step if marks else 0, changed=changed, cores=cores())
        return _finish(RunSession(config, log, fresh), log, console)


def _reached(folder: Path) -> tuple[list[Marked], int]:
    """The checkpoints that a run has made, and the last step that is written down (-1 for none)."""
    if not (folder / JOURNAL).exists():
        if any((folder / CHECKPOINTS).glob("step*")):
            raise ConfigError(
                f"{folder} has checkpoints and no journal: what its episodes were is gone"
            )
        return [], -1
    try:
        with Journal.read(folder) as reader:
            return reader.checkpoints(), max((row["step"] for row in reader.steps()), default=-1)
    except JournalError as error:
        raise RunFailed(str(error)) from error


def _is_whole(folder: Path) -> bool:
    """Whether the last life of the run came to its end, and so has left the policy behind."""
    *_, last = {}, *RunFolder(folder).rows(EVENTS)
    return (last.get("kind"), last.get("reason")) == ("stopped", "finished")


def _check(config: RunConfig, console: Console) -> None:
    verdict = check(config)
    verdict.require()
    for warning in verdict.warnings:
        console.print(f"[yellow]warning:[/] {escape(str(warning))}", highlight=False)
    limit_threads()


def _finish(lives: "RunSession", log: RunLog, console: Console) -> Run:
    """Life after life to the end of the run, and what is left behind then."""
    folder, reason = log.path, "failed"
    try:
        with LiveDisplay(lives.config, console=console) as display, rare_garbage_collection():
            while not lives.next(display):
                pass
        reason = "finished"
    except (ExceptionGroup, JournalError, CheckpointError, OSError) as failures:
        error = first_error(failures)
        with suppress(OSError):  # the disk may be what failed
            log.failed("".join(traceback.format_exception(error)))
        if isinstance(error, NOT_FINITE) and lives.machine:
            console.print(save_failed_batch(lives.machine.trainer, folder), highlight=False)
        raise RunFailed(
            f"{type(error).__name__}: {error} (traceback in {folder / 'error.txt'})"
        ) from error
    except KeyboardInterrupt:
        reason = "Ctrl-C"
        console.print(
            f"[yellow]stopped; saving what there is; to go on: unstale train --resume {folder}[/]"
        )
        raise
    finally:
        lives.close()
        if reason != "failed" and lives.machine:
            lives.machine.policy.save(folder / POLICY)
        with suppress(OSError) if reason == "failed" else nullcontext():
            log.event("stopped", reason=reason)
            log.close()
            write_survivors(folder)
            report = write_report(folder)
            console.print(f"run folder {folder}\nreport     {report}", highlight=False)
    return Run(folder, report)


class RunSession:
    """A run, from one life to the next. An ordinary run has one; a deterministic one ends at every checkpoint.

    It is then begun anew from the disk, as after a kill, with nothing kept but the engine's process.
    """

    def __init__(self, config: RunConfig, log: RunLog, machine: Components | None) -> None:
        """With a `machine` the run begins, without one it goes on from the disk."""
        self.machine = machine
        self.config, self._log, self._fresh = config, log, machine is not None

    def next(self, display: LiveDisplay) -> bool:
        """One life. Whether it was the last."""
        config, folder, fresh, self._fresh = self.config, self._log.path, self._fresh, False
        display.phase("starting the engine" if fresh else "reading the checkpoint and the journal")
        if fresh and self.machine:
            machine, life = self.machine, begin(self.machine, config, folder)
        else:
            machine = build_machine(config, self.machine.generator.engine if self.machine else None)
            checkpoints = build_checkpoints(config, machine, folder)
            first = self.machine is None
            recalled = load_resume_state(folder, checkpoints, config, self._log.event, first=first)
            life = revive(recalled, machine, checkpoints, folder)
            if first:
                self._log.rewind(life.progress.step, recalled.metrics)
        self.machine = machine
        parts = build(config, machine, self._log, display, life)
        return virtual_clock.run(_supervise(parts), virtual=config.deterministic)

    def close(self) -> None:
        """Give the engine back, which a life that was cut short between two others may have left."""
        if self.machine and self.config.deterministic:
            asyncio.run(self.machine.generator.engine.close())


def save_failed_batch(trainer: LocalTrainer, folder: Path) -> str:
    """Write down what the trainer was at work on when it raised. What became of it, for whoever looks on."""
    failed = trainer.failed_batch
    if failed is None:
        return "no batch was kept: the trainer had none yet"
    part = failed.minibatch
    columns = {"old_logp": part.old_logp, "factor": part.factor, "norm": part.norm, "lag": part.lag}
    wrong = WentWrong(
        part.batch,
        columns | {"reference_logp": part.reference_logp},
        trainer.policy.weights(),
        {
            "stage": failed.stage,
            "steps": str(trainer.steps),
            "version": str(trainer.policy.version),
            "base": str(trainer.policy.base),
        },
    )
    try:
        wrong.save(folder / WENT_WRONG)
    except (OSError, SafetensorError) as error:
        return f"the batch could not be kept: {error}"
    return f"the batch is kept; to see it again: unstale replay {folder}"


async def _supervise(parts: RunComponents) -> bool:
    """The loop under one parent; whatever happens, its threads end and the engine is given back.

    Only a run that goes on in another life keeps its engine.
    """
    done = True
    try:
        async with asyncio.TaskGroup() as tasks:
            with parts.journal:
                watch = tasks.create_task(parts.journal.watch())
                async with parts.rollout.resources:
                    done = await loop.train(parts)
                await parts.journal.barrier()
                watch.cancel()
    finally:
        parts.close()
        parts.old_logps.close()
        if done:
            await parts.engine.close()
        parts.log.close()
    return done


def evaluate(
    trained: Path, config: RunConfig, *, attempts: int = 1, console: Console | None = None
) -> EvalResult:
    """Held-out success of a run's policy, or of any model folder, on the recipe's tasks, `attempts` at each.

    Raises `ConfigError` for what is wrong beforehand and `RunFailed` when the machinery fails.
    """
    if config.eval.tasks < 1:
        raise ConfigError(f"eval.tasks must be >= 1 to evaluate, got {config.eval.tasks}")
    if attempts < 1:
        raise ConfigError(f"there must be at least 1 attempt at a task, got {attempts}")
    folder = trained / POLICY if (trained / POLICY).is_dir() else trained
    config = replace(config, policy=str(folder))
    limit_threads()
    policy, taskset, generator = build_sampler(config)
    console = console or Console()

    async def grade() -> list[bool | None]:
        async with running_generator(config, policy, generator) as voice:
            rollout = build_rollout(config, taskset)(voice, taskset, config.rollout)
            with LiveDisplay(config, console=console) as display:
                tasks = taskset.held_out(config.eval.tasks)
                again = [task for task in tasks for _ in range(attempts)]
                async with rollout.resources:
                    return await evaluation.evaluate(
                        rollout, again, seed=config.seed, progress=display.phase
                    )

    return EvalResult.of(under_one_parent(grade()), attempts)


@asynccontextmanager
async def running_generator(
    config: RunConfig,
    policy: Policy,
    generator: Generator,
    *,
    told: Callable[..., None] = lambda kind, **_: None,
) -> AsyncIterator[Generator]:
    """Start an engine that samples from the policy and restarts as in a run, and yield its generator."""
    recovery = Recovery(lambda version: policy.weights(), config.engine.restarts, told)
    engine = supervise(generator.engine, recovery)
    try:
        await engine.start()
        publisher = DirectPublisher(engine, dtype=policy.travel_dtype(DTYPES[config.engine.dtype]))
        publisher.prepare(policy)
        await publisher.publish()
        yield replace(generator, engine=engine)
    finally:
        await engine.close()


def under_one_parent(work: Coroutine[Any, Any, _T]) -> _T:
    """Do it to its end. Raises the `ConfigError` that it ends with, and `RunFailed` for any other error."""

    async def parent() -> _T:
        async with asyncio.TaskGroup() as tasks:
            child = tasks.create_task(work)
        return child.result()

    try:
        return asyncio.run(parent())
    except ExceptionGroup as failures:
        error = first_error(failures)
        if isinstance(error, ConfigError):
            raise error from error.__cause__
        raise RunFailed(f"{type(error).__name__}: {error}") from error


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """For a run: the collector of cycles leaves alone what is there already, and seldom looks at what comes.

    A run leaves little in cycles: an episode nothing, a step that recomputes activations 14 objects, a checkpoint 1500,
    no tensor among them. So at most `YOUNG` small ones are kept for nothing. Looking for them costs more: at what torch
    and transformers consist of for a quarter of a second each time, and at every live episode for as long again per ten
    thousand, with the event loop and the trainer standing still. What a host program has frozen stays so.
    """
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.freeze()
    gc.set_threshold(YOUNG, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not frozen:
            gc.unfreeze()


def limit_threads() -> None:
    """One thread for all but the trainer, which has its own (`build.trainer_threads`): OpenMP's spin for one caller."""
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_S)
