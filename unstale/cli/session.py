"""Train a new or a resumed run. The trainer runs in this process, and engines in others."""

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from unstale import loop
from unstale.builders import Components, build, build_components
from unstale.builders.footprint import predict_footprint, require_disk_to_resume
from unstale.cli.failures import RunFailed, exhausted, literal, print_failure
from unstale.cli.preflight import new_folder
from unstale.cli.process import limit_threads, rare_garbage_collection
from unstale.cli.resume import changes_to_run, resume_command
from unstale.cli.supervised_start import make_start
from unstale.cli.trained import POLICY
from unstale.cluster.ranks import NodesMissing, RanksDied
from unstale.cluster.session import end_after
from unstale.config import ConfigError, RunConfig
from unstale.config.gguf import origin_of
from unstale.config.options import unknown_option
from unstale.config.plugins import declared
from unstale.durability import virtual_clock
from unstale.durability.best_policy import BEST, read_best
from unstale.durability.checkpoint import CHECKPOINTS, CheckpointError
from unstale.durability.console import Console
from unstale.durability.journal import (
    JOURNAL,
    CheckpointRow,
    Journal,
    JournalError,
    holds_journal,
)
from unstale.durability.journal import check as check_journal
from unstale.durability.machine import lock_folder
from unstale.durability.resume import init_run, load_resume_state, restore
from unstale.durability.run_folder import (
    ERROR,
    EVENTS,
    HANG,
    REPORT,
    TOKENIZER,
    BrokenFile,
    RunFolder,
    RunLog,
    plain,
)
from unstale.envs.guard import OCCUPANCY, THREAD_S, error_text, traceback_text
from unstale.envs.registry import data_digests
from unstale.isolation import IsolatedTasks
from unstale.lint import check
from unstale.lint.policy_files import has_template, local_folder
from unstale.loop import RunComponents
from unstale.model.policy import Policy
from unstale.observe import RunRecorder
from unstale.observe.live import LiveDisplay
from unstale.observe.recorder import Outputs
from unstale.observe.trackers import OutcomeKind, RunOutcome, TrackedRun, Trackers
from unstale.rollout.timeouts import first_error
from unstale.stop_signals import begin_run, noted_hangs, stop_signals
from unstale.trainer.records import NOT_FINITE
from unstale.weights.child_process import cores

FAILURES = (
    *(ExceptionGroup, JournalError, CheckpointError),
    *(OSError, MemoryError, RuntimeError, SystemError, ImportError),
)
"""Classes of errors that end a run with a message of one line. The message for those in the second
group says if files, memory or threads have run out.
"""


TRACKERS_S = 10.0
"""Largest number of seconds to wait for experiment trackers when the process must end."""

OUTCOMES: Mapping[str, OutcomeKind] = {
    "finished": "finished",
    "Ctrl-C": "stopped",
    "failed": "failed",
}
"""The state of an ended run in the terms of experiment trackers, by the reason that the run logs.
"""


@dataclass(frozen=True, slots=True)
class Run:
    """A run that has finished or was stopped."""

    folder: Path
    report: Path
    """The path of the report. There is no such file if `unstale.analysis` is not installed."""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of the run, a mapping for each step."""
        return RunFolder(self.folder).metrics()

    @property
    def policy(self) -> Policy:
        """The trained policy, loaded from the run folder."""
        return Policy.load(self.folder / POLICY)


@end_after()
def train(
    config: RunConfig | None = None,
    *,
    console: Console | None = None,
    command: str = "",
    **wrong: Any,
) -> Run:
    """Train a new run with the options `config` to its end, and show progress on the terminal.

    This writes a run folder with the journal, metrics, the policy as a Hugging Face folder, and a
    report. `command` is the command line that the report shows; by default one that repeats the
    run. Raises `ConfigError` for wrong settings, and `RunFailed` if a component fails. Ctrl-C
    raises `KeyboardInterrupt` after the folder is written. Whatever ended the run, `unstale train
    --resume FOLDER` continues it from its last checkpoint.
    """
    console = console or Console(soft_wrap=True)
    config = require_config(config, wrong)
    folder = new_folder(config)
    _check(config, console)
    make_start(config, console)
    machine = _build_first(config, console)
    _check_footprint(config, machine.policy, folder, console)
    if machine.ranks and not machine.ranks.on_gpus:
        console.print("the trainer ranks use CPUs: the Ray cluster has no GPU", highlight=False)
    try:
        log = RunLog.create(folder, config)
    except OSError as error:
        raise ConfigError(f"the run folder {folder} cannot be created: {error}") from error
    with lock_folder(folder):
        try:
            trackers = _open_trackers(config, folder, console)
        except ConfigError:
            log.discard()
            raise
        with closing(trackers):
            facts: dict[str, Any] = {"command": command} if command else {}
            if digests := _data_of(machine):
                facts["data"] = digests
            if origin := origin_of(config.pretrained_folder):
                facts["policy_origin"] = origin
            log.event("started", cores=cores(), **facts)
            return _run_to_end(RunSession(config, log, machine, trackers), console)


@end_after()
def resume(
    folder: Path | str,
    config: RunConfig | None = None,
    *,
    console: Console | None = None,
    **wrong: Any,
) -> Run:
    """Continue the run in `folder` from its newest undamaged checkpoint, as `train` does.

    `config` may differ from the options of the run where `changes_to_run` allows it. Raises
    `ConfigError` if the folder has no run, or if the run is finished.
    """
    console = console or Console(soft_wrap=True)
    config = require_config(config, wrong)
    folder = Path(folder)
    changes = changes_to_run(folder, config)
    _check(config, console)
    for change in changes:
        console.print(f"[yellow]changed:[/] {literal(change)}", highlight=False)
    with lock_folder(folder):
        with console.status("checking the journal"):
            checkpoints, last_step = _read_progress(folder)
        if last_step >= config.max_steps and _is_finished(folder):
            raise ConfigError(f"the run in {folder} is finished; to continue it, raise --max_steps")
        step = checkpoints[-1].step if checkpoints else 0
        if config.max_steps < step:
            raise ConfigError(
                f"--max_steps is {config.max_steps}, but the run in {folder} is at step {step}"
            )
        make_start(config, console)
        # A run without a checkpoint ended before its first one, so it begins again.
        machine = None if checkpoints else _build_first(config, console)
        if machine:
            _check_footprint(config, machine.policy, folder, console)
        else:
            require_disk_to_resume(config, folder, step)
        with closing(_open_trackers(config, folder, console, step)) as trackers:
            try:
                log = RunLog.reopen(folder)
            except (OSError, BrokenFile) as error:
                raise ConfigError(f"{folder} cannot be resumed: {error}") from error
            facts = {"data": _data_of(machine)} if machine else {}
            log.event("resumed", step=step, changed=changes, cores=cores(), **facts)
            return _run_to_end(RunSession(config, log, machine, trackers), console)


def require_config(config: object, wrong: Iterable[str] = ()) -> RunConfig:
    """Return `config`. Raises `ConfigError` if it is not a `RunConfig`.

    `wrong` has the names of unknown arguments of the caller, which raise `ConfigError`, too.
    """
    if wrong:
        raise ConfigError(
            f"no such argument: {', '.join(wrong)}. Give options to a recipe, such as "
            f"unstale.recipes.llm(model=...). {' '.join(map(unknown_option, wrong))}"
        )
    if not isinstance(config, RunConfig):
        raise ConfigError(
            "config must be a RunConfig, such as unstale.recipes.llm(model=...), got "
            f"{config!r:.60}"
        )
    return config


def _build_first(config: RunConfig, console: Console) -> Components:
    """Return the components of a new run. Trainer ranks that die at their start are started again.

    Raises `RunFailed` if they cannot start.
    """
    note = partial(_note, console)
    restarts = 0
    while True:
        try:
            return build_components(config, notify=note)
        except RanksDied as error:
            if restarts == config.cluster.restarts:
                raise RunFailed(str(error)) from error
            restarts += 1
            note(f"{error}. Starting the trainer ranks again ({restarts})")
        except NodesMissing as error:
            raise RunFailed(str(error)) from error


def _open_trackers(
    config: RunConfig, folder: Path, console: Console, first_step: int = 0
) -> Trackers:
    run = TrackedRun(folder, plain(config), partial(_note, console), first_step)
    return Trackers.open(config.trackers, run)


def _note(console: Console, text: str) -> None:
    console.print(literal(text), highlight=False)


def _read_progress(folder: Path) -> tuple[list[CheckpointRow], int]:
    """Return the checkpoints in a run's journal, and the last logged step (-1 if none).

    The journal is checked first. Raises `RunFailed`, before anything is written, if it is damaged.
    """
    if not holds_journal(folder / JOURNAL):
        if any((folder / CHECKPOINTS).glob("step*")):
            raise ConfigError(f"{folder} has checkpoints but no {JOURNAL}: its episodes are lost")
        return [], -1
    try:
        with Journal.read(folder) as reader:
            if damage := check_journal(reader):
                raise RunFailed(f"the journal {reader.path} is damaged: {'; '.join(damage)}")
            last_step = max((row["step"] for row in reader.steps()), default=-1)
            return reader.checkpoints(), last_step
    except JournalError as error:
        raise RunFailed(str(error)) from error


def _is_finished(folder: Path) -> bool:
    """Return True if the last event in a run's log is that it finished, which is after the policy
    is saved.
    """
    events = list(RunFolder(folder).rows(EVENTS))
    return bool(events) and events[-1].get("reason") == "finished"


def _data_of(machine: Components) -> dict[str, str]:
    """Return a digest of the rows of the data set for each split. Empty if tasks do not come from
    rows.
    """
    taskset = machine.taskset
    return data_digests(taskset.inner if isinstance(taskset, IsolatedTasks) else taskset)


def _recorded_data(folder: Path) -> dict[str, str] | None:
    """Return the digests of the data set's rows that the run recorded last, by split. None without
    any.
    """
    found = [row["data"] for row in RunFolder(folder).rows(EVENTS) if "data" in row]
    return found[-1] if found else None


def _check(config: RunConfig, console: Console) -> None:
    """Print the linter's warnings about a configuration. Raise `ConfigError` if the linter refuses
    it.
    """
    if not (local_folder(config) / "config.json").is_file():
        check(config).require()
        _ = config.pretrained_folder  # download or convert it: some warnings depend on its size
    verdict = check(config)
    verdict.require()
    if config.chat_template and has_template(config.pretrained_folder):
        _note(console, "note: chat_template replaces the policy's own chat template")
    for warning in verdict.warnings:
        console.print(f"[yellow]warning:[/] {literal(warning)}", highlight=False)
    limit_threads()


def _check_footprint(config: RunConfig, policy: Policy, folder: Path, console: Console) -> None:
    """Print the memory and disk space that the run will need. Raise `ConfigError` if the disk is
    too full.
    """
    footprint = predict_footprint(config, policy)
    footprint.require_disk(folder)
    console.print(f"{footprint.weights:,} weights; {footprint}", highlight=False)


def _failure(error: BaseException, folder: Path) -> str:
    """Return a text that explains why a run failed."""
    if not folder.is_dir():
        return (
            f"the run folder {folder} was removed or renamed while the run wrote to it. Put it "
            "back and resume the run, or start it again"
        )
    if isinstance(error, JournalError):  # its text names the file and the cause
        return f"{error} (traceback in {ERROR})"
    text = exhausted(error) or f"{type(error).__name__}: {error_text(error)}"
    return f"{text} (traceback in {folder / ERROR})"


def _return_to(place: Path) -> str:
    """Change the working folder back to `place`, that at the start of the run.

    Return a sentence if user code had changed it, otherwise "".
    """
    with suppress(OSError):  # a folder may be gone
        now = Path.cwd()
        os.chdir(place)
        if now != place:
            return f"code of the task changed the working folder of the run to {now} (os.chdir)"
    return ""


def _run_to_end(session: "RunSession", console: Console) -> Run:
    """Train a run to its end, and return it. The first Ctrl-C stops it in order.

    A second one logs the event `stopped` and ends the process at once.
    """
    command = f"to continue: {resume_command(session.log.path)}"

    def on_end() -> None:
        detail = f"ended at once by a second signal; {command}"
        session.log.write_last_event("stopped", reason="Ctrl-C", detail=detail)

    limit_s = max(THREAD_S, 2 * session.config.rollout.timeout_s)
    begin_run(str(session.log.path.resolve()), command, limit_s)
    with stop_signals(f"; {command}", on_end), noted_hangs(session.log.path / HANG):
        return _run_and_record(session, console)


def _run_and_record(session: "RunSession", console: Console) -> Run:
    """Train a run to its end, record how it ended, and return it.

    Its components are ended in any case. After Ctrl-C, the policy is saved, too.
    """
    log = session.log
    folder, place = log.path, Path.cwd()
    reason, detail = "failed", "the program has an error, which is printed below"
    try:
        with (
            LiveDisplay(session.config, console=console) as display,
            rare_garbage_collection(),
        ):
            while not session.run_segment(display):
                pass
        reason, detail = "finished", _why_finished(session.config, folder)
    except FAILURES as failures:
        error = first_error(failures)
        moved = _return_to(place)
        with suppress(OSError):  # the disk may be the cause
            log.failed(traceback_text(error))
        if isinstance(error, NOT_FINITE) and session.machine:
            console.print(session.machine.save_failed_batch(folder), highlight=False)
        detail = moved or _failure(error, folder)
        raise RunFailed(detail) from error
    except ConfigError as error:
        detail = str(error)
        raise
    except asyncio.CancelledError:
        detail = f"{OCCUPANCY.canceller or 'some code'} cancelled the tasks of the run"
        raise RunFailed(detail) from None
    except KeyboardInterrupt:
        reason, detail = "Ctrl-C", f"to continue: {resume_command(folder)}"
        console.print("[yellow]stopping[/]")
        raise
    finally:
        _return_to(place)
        with ExitStack() as ending:  # the last is called first, and all are called whatever fails
            ending.callback(_record_end, session, console, reason, detail)
            ending.callback(_try, "the trainer ranks were not ended", session.end_ranks, console)
            if reason == "Ctrl-C":
                ending.callback(_try, "the policy was not saved", session.save_policy, console)
            ending.callback(_try, "the engine was not closed", session.close, console)
    return Run(folder, folder / REPORT)


def _try(problem: str, action: Callable[[], None], console: Console) -> None:
    """Call `action`, a step at the end of a run. If it fails, print `problem` with the error."""
    try:
        action()
    except FAILURES as error:
        console.print(f"{problem}: {literal(first_error(error))}", highlight=False)


def _record_end(session: "RunSession", console: Console, reason: str, detail: str) -> None:
    """Record how a run ended: for the trackers, in its event log and on the terminal.

    Then the functions that others have declared for the end of a run are called, such as that which
    writes the report.
    """
    log = session.log
    quiet = suppress(OSError, JournalError, ConfigError, ImportError, MemoryError)
    with quiet if reason == "failed" else nullcontext():
        try:
            session.close_trackers(RunOutcome(OUTCOMES[reason], detail))
        finally:
            log.event("stopped", reason=reason, detail=detail)
            log.close()
        console.print(f"run folder {log.path}", highlight=False)
        if best := read_best(log.path):
            metric = best["measured"]["metric"].removeprefix("eval/")
            console.print(
                f"best policy {log.path / BEST}: {metric} {best['value']:.3g} after "
                f"{best['step']} steps",
                highlight=False,
            )
        for run_ended in declared("unstale.listeners", "run_ended"):  # imported only now: slow
            line, warnings = run_ended(log.path)
            console.print(line, highlight=False)
            for warning in warnings:
                console.print(f"[yellow]{literal(warning)}[/]", highlight=False)
        if reason != "failed":  # the caller prints the error of a failed run at the very end
            console.print(literal(f"{reason}: {detail}"), highlight=False)


def _why_finished(config: RunConfig, folder: Path) -> str:
    step = max((row["step"] for row in RunFolder(folder).metrics()), default=0)
    if step >= config.max_steps:
        return f"all {config.max_steps} steps are done"
    if not config.minutes:  # only `eval.patience` ends a run without a time limit
        best = read_best(folder)
        return (
            f"the best evaluation is that after step {best['step']} (eval.patience = "
            f"{config.eval.patience}); {step} of {config.max_steps} steps are done"
        )
    limit = f"{config.minutes:g} minutes (--minutes)"
    return f"the time limit of {limit} was reached after step {step} of {config.max_steps}"


class RunSession:
    """A run in this process. It consists of one or more segments.

    An ordinary run is one segment. A deterministic run ends a segment at every checkpoint and loads
    the checkpoint from disk for the next segment, as a resumed run does. So it computes the same
    numbers whether it is resumed or not. Only the processes of the engine and of trainer ranks are
    kept between segments. If a trainer rank dies, the next segment begins at the last checkpoint
    with new processes.
    """

    def __init__(
        self,
        config: RunConfig,
        log: RunLog,
        machine: Components | None,
        trackers: Trackers | None = None,
    ) -> None:
        """Prepare a session.

        `machine` has the components of a new run. None means a resumed run.
        """
        self.config = config
        self.machine = machine
        self.log = log
        self._trackers = trackers or Trackers()
        self._is_new = machine is not None
        self._restarts = 0
        self._ranks = machine.ranks if machine else None
        """The trainer ranks of the run, or None if its trainer is a single process. The object is
        kept while no rank runs, because it stores whether the ranks need GPUs.
        """
        self._recorder: RunRecorder | None = None
        self._has_begun = False

    def run_segment(self, display: LiveDisplay) -> bool:
        """Train a segment: to the end of the run or, if it is deterministic, to the next
        checkpoint.

        At the end of the run, the policy is saved. Return True then, otherwise False.
        """
        try:
            done = self._run_segment(display)
            if done:
                self.save_policy()
        except (RanksDied, ExceptionGroup) as error:
            self._end_life(error)
            return False
        return done

    def save_policy(self) -> None:
        """Save the trained policy. Raises `RanksDied` if a trainer rank died."""
        if self.machine:
            self.machine.save_policy(self.log.path / POLICY)

    def _end_life(self, error: RanksDied | ExceptionGroup) -> None:
        """End the engine and all trainer ranks after one of the ranks has died. They can then start
        again.

        If `error` has another cause, or the ranks have started again `cluster.restarts` times, it
        is raised again.
        """
        died = error if isinstance(error, RanksDied) else error.subgroup(RanksDied)
        if died is None or self._restarts == self.config.cluster.restarts:
            raise error
        self._restarts += 1
        reason = str(first_error(died))
        self.log.event("trainer_died", reason=reason, restarts=self._restarts)
        self.close()
        self.end_ranks()
        self.machine = None

    def _run_segment(self, display: LiveDisplay) -> bool:
        config = self.config
        folder = self.log.path
        if self._is_new:
            machine = self.machine or self._build(display)
            display.phase("starting the engine")
            policy = machine.policy
            policy.open_pictures(folder)
            checkpoints = machine.checkpoints(config, folder)
            policy.tokenizer.backend_tokenizer.save(str(folder / TOKENIZER))
            state = init_run(folder, checkpoints, policy)
            self._is_new = False
        else:
            display.phase("reading the checkpoint and the journal")
            previous = self.machine
            machine = self._build(display)
            machine.policy.open_pictures(folder)
            changed = self._changed_data(machine) if previous is None else None
            checkpoints = machine.checkpoints(config, folder)
            stored = load_resume_state(
                folder,
                checkpoints,
                config,
                self.log.event,
            )
            state = restore(
                stored, checkpoints, folder, machine.policy, (machine.old, machine.auditor)
            )
            if previous is None:
                self.log.rewind(stored.metrics)
            if changed:
                self.log.event("data_changed", step=state.progress.step, **changed)
            del stored, previous  # their tensors take as much memory as the trainer
        self.machine = machine
        outputs = Outputs(self.log, display, self._trackers)
        parts = build(config, machine, outputs, state)
        self._recorder = parts.log
        return virtual_clock.run(
            _supervise(parts, self._begin), virtual=config.deterministic, on_stuck=self._end_stuck
        )

    def _changed_data(self, machine: Components) -> dict[str, Any] | None:
        """Return the digests of the data set's rows, and a text on how they changed since they were
        recorded.

        None if they have not changed or were not recorded. Raises `ConfigError` if they have
        changed and the option `allow_changed_data` is False.
        """
        now, before = _data_of(machine), _recorded_data(self.log.path)
        if before is None or now == before:
            return None
        changes = [
            f"{split.replace('_', '-')}: {before.get(split, 'none')}; now {now.get(split, 'none')}"
            for split in sorted(before.keys() | now.keys())
            if before.get(split) != now.get(split)
        ]
        text = f"the rows of {self.config.task.env} have changed ({', '.join(changes)})"
        if not self.config.allow_changed_data:
            raise ConfigError(
                f"{text}. Held-out shares before and after could not be compared. Put the old data "
                "back, start a new run, or add --allow_changed_data true"
            )
        return {"data": now, "text": text}

    def _begin(self) -> None:
        """Write the options of the run into its folder. This is called when the engine has started
        with them.

        If a resume fails before, its options are not written, so they cannot make the next resume
        fail.
        """
        if not self._has_begun:
            self.log.begin_again(self.config)
        self._has_begun = True

    def _build(self, display: LiveDisplay) -> Components:
        """Return the components of the run for its next segment. An engine and ranks that work are
        reused.
        """

        def note(text: str) -> None:
            display.phase(text)
            self.log.event("waiting", reason=text)

        engine = self.machine.generator.engine if self.machine else None
        machine = build_components(self.config, engine, self._ranks, notify=note)
        self._ranks = machine.ranks
        return machine

    def _end_stuck(self, reason: str) -> None:
        """Log that the run failed, because its event loop is blocked forever. Called in another
        thread.
        """
        self.log.failed(reason)
        self.log.event("stopped", reason="failed")
        print_failure("the run failed", reason)
        self._trackers.close(RunOutcome("failed", reason), TRACKERS_S)

    def close_trackers(self, outcome: RunOutcome) -> None:
        """Close the experiment trackers, which receive how the run ended. Log those that fail."""
        if self._recorder:
            self._recorder.close(outcome)
        else:
            self._trackers.close(outcome)

    def close(self) -> None:
        """Close the engine of a deterministic run. It stays open between the run's segments."""
        if self.machine and self.config.deterministic:
            virtual_clock.run(self.machine.generator.engine.close())

    def end_ranks(self) -> None:
        if self._ranks:
            self._ranks.close()


async def _supervise(parts: RunComponents, on_start: Callable[[], None]) -> bool:
    """Run the training loop and end its threads. Return True if the run has ended, not only a
    segment.

    `on_start` is called when the engine has started. The engine is closed at the end of the run.
    """
    done = True
    try:
        async with asyncio.TaskGroup() as tasks:
            with parts.journal:
                watch = tasks.create_task(parts.journal.watch())
                async with parts.rollout.resources:
                    done = await loop.train(parts, on_start)
                await parts.journal.barrier()
                watch.cancel()
    finally:
        parts.close()
        parts.old_logps.close()
        if done:
            await parts.engine.close()
    return done
