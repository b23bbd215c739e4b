"""What a run goes on from: the newest sound checkpoint, and all that the journal has of its episodes."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from unstale.build import Components, ResumeState, build_checkpoints
from unstale.config import ConfigError, RunConfig
from unstale.config.options import stored_config
from unstale.durability.checkpoint import Checkpoint, CheckpointError, Checkpoints, Progress
from unstale.durability.journal import JOURNAL, Journal, JournalError, Marked
from unstale.durability.run_folder import CONFIG, RunFolder, plain
from unstale.records import PendingPiece
from unstale.rollout.episode import FAILURE_WINDOW

Told = Callable[..., None]
"""Told of an event: its kind, and fields."""

FIXED = {
    "policy": "the weights are the checkpoint's",
    "seed": "tasks, episodes and noise derive from it",
    "deterministic": "the two modes leave different journals behind",
    "task": "the open episodes are of that task set",
    "schedule.group_size": "the open groups have that many episodes",
    "schedule.max_staleness": "the staleness bound of the groups in line was derived for it",
    "schedule.groups_per_step": "the staleness bound of the groups in line was derived for it",
    "schedule.lookahead_window": "the staleness bound of the groups in line was derived for it",
    "engine.max_context": "the open episodes were begun with that much room",
    "engine.max_completion_tokens": "the open replies were begun with that much room",
    "engine.temperature": "the open replies were sampled at it",
    "rollout.max_turns": "the open episodes were begun with that many turns",
    "old_logps.route": "the checkpoint holds the state of that route",
    "trainer.optimizer": "the checkpoint holds the state of that optimizer",
    "trainer.weight_decay": "the checkpoint holds the state of that optimizer",
    "trainer.dtype": "the versions that were published have that precision",
    "trainer.lora_rank": "the checkpoint holds adapters of that rank",
    "trainer.lora_alpha": "the versions that were published are merged with it",
    "trainer.lora_targets": "the checkpoint holds adapters of those layers",
    "audit.share": "the checkpoint holds the copies that the audit needs",
}
"""Knobs that a run keeps from its beginning to its end, and why. A section stands for all of its own."""

MEANING = {
    "steps": "the learning-rate schedule ends there, and is another one from here on",
    "trainer.lr": "holds from the next step; the optimizer's moments are of the old one",
    "trainer.minibatches_per_batch": "the learning-rate schedule counts optimizer steps, so its position moves",
}
"""What a change means, where it is more than that it holds from here on."""


@dataclass(frozen=True, slots=True)
class Recalled:
    """What the disk has of a run."""

    life: ResumeState
    checkpoint: Checkpoint
    highest: int
    """Of the versions that were published."""
    version_gaps: tuple[tuple[int, int], ...]
    """As `Policy.version_gaps`: where checkpoints were given a new number, those that are damaged by now included."""
    metrics: list[dict[str, Any]]
    """Of the steps that are written down."""


def differences(before: RunConfig, now: RunConfig) -> list[str]:
    """What a resumed run does otherwise, in words. `ConfigError` for what it has to keep."""
    one, other = plain(before), plain(now)
    changed = [
        (name, one_value, other_value)
        for name, one_value, other_value in _flat(one, other)
        if one_value != other_value and name not in ("runs", "name", "recipe")
    ]
    fixed = FIXED | {f"old_logps.{name}": why for name, why in now.old_logps.fixed.items()}
    for name, old, new in changed:
        reason = fixed.get(name) or fixed.get(name.split(".")[0])
        if reason:
            raise ConfigError(
                f"{name} cannot change from {old} to {new} in a run that goes on: {reason}"
            )
    words = [
        f"{name} is {new}, it was {old}: {MEANING.get(name, 'holds from here on')}"
        for name, old, new in changed
    ]
    if changed and now.deterministic:
        words.append("what comes out will not be what the run as it was begun would have given")
    return words


def load_resume_state(
    run: Path, checkpoints: Checkpoints, config: RunConfig, told: Told, *, first: bool = True
) -> Recalled:
    """Read what a run goes on from, and make the journal say the same. The `first` time all of that is checked.

    The newest checkpoint that is sound becomes the current one. A deterministic run forgets what came after it.
    Raises `CheckpointError` if none is sound, `JournalError` if the journal is not.
    """
    with Journal.read(run) as reader:
        if wrong := reader.unsound() if first else []:
            raise JournalError(f"the journal {reader.path} is damaged: {'; '.join(wrong)}")
        marks = reader.checkpoints()
    mark, checkpoint = _newest(run, checkpoints, marks, told)
    with Journal(run / JOURNAL) as journal:
        journal.rewind(mark.checkpoint, everything=config.deterministic)
    if config.deterministic:
        checkpoints.forget(mark.version)
    with Journal.read(run) as reader:
        checkpoints.prune({mark.name for mark in reader.checkpoints()})
        requests = tuple(reader.requests())
        admitted, place, episodes = reader.counts()
        life = ResumeState(
            progress=checkpoint.progress,
            requests=requests,
            admitted=admitted,
            place=place,
            episodes=episodes,
            quarantined=reader.given_up(config.rollout.retries),
            outcomes=reader.outcomes(FAILURE_WINDOW),
        )
        return Recalled(
            life, checkpoint, max(reader.versions(), default=-1), _jumps(marks), reader.steps()
        )


def revive(
    recalled: Recalled, machine: Components, checkpoints: Checkpoints, run: Path
) -> ResumeState:
    """Put every part where it was. The policy gets a number of its own if its checkpoint's was left behind."""
    policy = machine.policy
    try:
        checkpoints.restore(recalled.checkpoint)
    except ConfigError:
        raise
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"the newest sound checkpoint of {run} is not of this run: {error!r}"
        ) from error
    policy.version_gaps = max(policy.version_gaps, recalled.version_gaps, key=len)
    highest = max([recalled.highest, *(first for first, _ in policy.version_gaps)])
    if renumbered := highest > policy.version:
        policy.assign_new_version(highest + 1)
    past: defaultdict[int, list[PendingPiece]] = defaultdict(list)
    for piece in (piece for request in recalled.life.requests for piece in request.opens()):
        past[piece.piece.version].append(piece)
    own = past.pop(policy.version, [])
    try:
        machine.old.recover(past, checkpoints.weights)
        machine.auditor.recover(past, checkpoints.weights)
    except LookupError as error:
        raise CheckpointError(
            f"what pieces in the journal were sampled with is gone from {run}: {error}"
        ) from error
    for piece in own:
        machine.old.arrived(piece)
    if renumbered:  # so that the new number is on the disk before any engine has it
        with Journal(run / JOURNAL) as journal:
            name = checkpoints.save(recalled.life.progress, policy)
            asyncio.run(
                journal.checkpoint(name, step=recalled.life.progress.step, version=policy.version)
            )
    return recalled.life


def begin(machine: Components, config: RunConfig, run: Path) -> ResumeState:
    """A run's first checkpoint, from which it begins as it would go on."""
    checkpoints = build_checkpoints(config, machine, run)
    with Journal(run / JOURNAL) as journal:
        name = checkpoints.save(Progress(), machine.policy)
        asyncio.run(journal.checkpoint(name, step=0, version=machine.policy.version))
    return ResumeState()


def _jumps(marks: Sequence[Marked]) -> tuple[tuple[int, int], ...]:
    """A version is as many batches old as its step; what its number is ahead of that was skipped.

    >>> _jumps([Marked(0, 0, 0, ""), Marked(1, 5, 5, ""), Marked(2, 5, 8, ""), Marked(3, 10, 13, "")])
    ((8, 3),)
    """
    skipped = [(mark.version, mark.version - mark.step) for mark in marks]
    return tuple(after for before, after in pairwise([(0, 0), *skipped]) if after[1] > before[1])


def _newest(
    run: Path, checkpoints: Checkpoints, marks: Sequence[Marked], told: Told
) -> tuple[Marked, Checkpoint]:
    """The newest checkpoint that the journal knows and the disk still has as it was."""
    cause: CheckpointError | None = None
    for mark in reversed(marks):
        try:
            return mark, checkpoints.load(mark.name)
        except CheckpointError as error:
            cause = cause or error
            told("checkpoint_unsound", name=mark.name, error=str(error))
    raise CheckpointError(f"{run} has no sound checkpoint to go on from") from cause


def _flat(one: Any, other: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """Both values of every knob, by its name."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = {**one, **other}
        return [
            row
            for key in keys
            for row in _flat(one.get(key), other.get(key), f"{name}.{key}" if name else key)
        ]
    return [(name, one, other)]


def stored(run: Path, *, named_env: str) -> RunConfig:
    """The configuration that a run was last begun with.

    Its task set is code where it is named `module:factory`: whoever goes on names it again.
    """
    folder = RunFolder(run)
    if links := sorted(path.name for path in run.iterdir() if path.is_symlink()):
        raise ConfigError(
            f"{run} holds links ({', '.join(links)}): what goes on is written there, so put files in place"
        )
    row = folder.config()
    if folder.gaps:
        raise ConfigError(f"{run} cannot be gone on with: {'; '.join(folder.gaps)}")
    config = stored_config(row)
    if ":" in config.task.env and named_env != config.task.env:
        raise ConfigError(
            f"{run / CONFIG} names code of yours as its task set; to go on, say --task.env {config.task.env}"
        )
    return replace(config, runs=run.parent, name=run.name)
