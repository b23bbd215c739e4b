"""Resume a run from its newest undamaged checkpoint and the episodes in its journal."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from unstale.config import ConfigError, RunConfig
from unstale.durability import virtual_clock
from unstale.durability.checkpoint import Checkpoint, CheckpointError, Checkpoints, Progress
from unstale.durability.journal import JOURNAL, CheckpointRow, Journal
from unstale.model.policy import Policy
from unstale.old_logps import OldLogps
from unstale.old_logps.scoring.scorer import Weights
from unstale.records import GroupRequest, PendingPiece, Task

MAX_GROUPS = 1000
"""Number of finished groups whose shares of failed episodes a resumed run reads, for the limit
`rollout.max_failed_share`.
"""


@dataclass(frozen=True, slots=True)
class ResumeState:
    """The progress of a run and the unfinished work in its journal. The default is that of a new
    run.
    """

    progress: Progress = field(default_factory=Progress)
    requests: tuple[GroupRequest, ...] = ()
    """Groups that no checkpoint was trained on, in the order of their start. Each request has the
    group's recorded episodes.
    """
    admitted: int = 0
    """Number of groups that the run has started."""
    place: int = 0
    """Index of the next task in the sequence of training tasks."""
    episodes: int = 0
    """Number of episodes that the run has begun."""
    quarantined: frozenset[Task] = frozenset()
    """Tasks whose episodes failed too often. They are not tried again."""
    failed_shares: tuple[float, ...] = ()
    """The share of failed episodes in each of the last finished groups, in the order in which the
    groups were started.
    """
    visits: Mapping[Task, int] = field(default_factory=dict)
    """Number of groups started on each task. Empty if the option `selection.pool` is not set."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """The state of a run, as `load_resume_state` read it from the run folder."""

    state: ResumeState
    checkpoint: Checkpoint
    highest: int
    """The highest version number that the run has published."""
    version_gaps: tuple[tuple[int, int], ...]
    """Version numbers that earlier resumes skipped, as in `Policy.version_gaps`. Numbers that only
    damaged checkpoints have count, too.
    """
    metrics: list[dict[str, Any]]
    """Metrics of each step before the step of the checkpoint."""


class Recoverable(Protocol):
    """A component that needs weights of earlier versions after a resume.

    In `recover`, `past` has the sampled tokens that no batch has contained yet, by the version that
    sampled them. `weights` is a function that reads the weights of a version from disk.
    """

    def recover(self, past: Mapping[int, Sequence[PendingPiece]], weights: Weights) -> None: ...


def load_resume_state(
    run: Path,
    checkpoints: Checkpoints,
    config: RunConfig,
    on_event: Callable[..., None],
) -> StoredRun:
    """Read the state of a run, and set its journal back to the newest undamaged checkpoint.

    A checkpoint is undamaged if every file has its recorded checksum. `on_event` is called for
    damaged ones. A deterministic run (`config`) also deletes everything newer than the checkpoint,
    because it is computed again. The metrics of the checkpoint's own step are logged again. If an
    evaluation followed this step, its results are kept and logged with them. Raises
    `CheckpointError` if no checkpoint is undamaged.
    """
    with Journal.read(run) as reader:
        rows = reader.checkpoints()
        row, checkpoint = _newest_sound(run, checkpoints, rows, on_event)
        checkpoints.require_journal(row.name)
        logged, metrics = reader.logged_step(row.step)
    evaluated = {name: value for name, value in metrics.items() if name.startswith("eval/")}
    progress = replace(checkpoint.progress, row={**checkpoint.progress.row, **evaluated})
    with Journal(run / JOURNAL) as journal:
        kept = logged if evaluated else -1
        journal.rewind(row.checkpoint, everything=config.deterministic, kept=kept)
    if config.deterministic:
        checkpoints.remove_after(row.version)
    with Journal.read(run, routed_experts=config.trainer.routing_replay) as reader:
        causes = checkpoints.prune({row.name for row in reader.checkpoints()})
        for name, cause in causes.items():
            on_event("checkpoint_not_removed", name=name, error=cause)
        admitted, place, episodes = reader.counts()
        state = ResumeState(
            progress=progress,
            requests=tuple(reader.requests()),
            admitted=admitted,
            place=place,
            episodes=episodes,
            quarantined=reader.given_up(config.rollout.retries),
            failed_shares=reader.failed_shares(MAX_GROUPS),
            visits=reader.visits() if config.selection.pool else {},
        )
        highest = max(reader.versions(), default=-1)
        earlier = [each for each in reader.steps() if each["step"] < row.step]
        return StoredRun(state, checkpoint, highest, _version_gaps(rows), earlier)


def restore(
    stored: StoredRun,
    checkpoints: Checkpoints,
    run: Path,
    policy: Policy,
    parts: tuple[OldLogps, Recoverable],
) -> ResumeState:
    """Restore every component from a stored run. Return the state from which the run continues.

    `parts` are the component that computes old log-probabilities, and the auditor. They receive the
    sampled tokens that no batch has contained yet, so that they can compute the values of these
    again. If the run published versions after the checkpoint, `policy` gets a higher version
    number, because a number must not be used twice. Raises `CheckpointError` if the checkpoint does
    not fit the options of the run, or a version that is needed is not on disk.
    """
    old_logps, auditor = parts
    try:
        checkpoints.restore(stored.checkpoint)
    except ConfigError:
        raise
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"the newest sound checkpoint of {run} does not fit the options of the run "
            f"({type(error).__name__}: {error}). What decides the content of a checkpoint must be "
            "as the run began: model, trainer.optimizer, trainer.lora_*, old_logps.route, "
            "techniques. Leave these options out of the command, and do not edit config.json"
        ) from error
    policy.version_gaps = max(policy.version_gaps, stored.version_gaps, key=len)
    highest = max([stored.highest, *(first for first, _ in policy.version_gaps)])
    is_renumbered = highest > policy.version
    if is_renumbered:
        policy.assign_new_version(highest + 1)
    past: defaultdict[int, list[PendingPiece]] = defaultdict(list)
    for request in stored.state.requests:
        for piece in request.opens():
            past[piece.piece.version].append(piece)
    current = past.pop(policy.version, [])
    try:
        old_logps.recover(past, checkpoints.weights)
        auditor.recover(past, checkpoints.weights)
    except LookupError as error:
        raise CheckpointError(
            f"{run} lacks a version that journaled pieces need: {error}"
        ) from error
    for piece in current:
        old_logps.on_piece(piece)
    if is_renumbered:  # the new number must be on disk before an engine loads it
        _save(run, checkpoints, stored.state.progress, policy)
    return stored.state


def init_run(run: Path, checkpoints: Checkpoints, policy: Policy) -> ResumeState:
    """Write the first checkpoint of a new run. Return the state of a run without any step or
    episode.
    """
    _save(run, checkpoints, Progress(), policy)
    return ResumeState()


def _save(run: Path, checkpoints: Checkpoints, progress: Progress, policy: Policy) -> None:
    with Journal(run / JOURNAL) as journal:
        name = checkpoints.save(progress, policy)
        virtual_clock.run(journal.checkpoint(name, step=progress.step, version=policy.version))


def _version_gaps(rows: Sequence[CheckpointRow]) -> tuple[tuple[int, int], ...]:
    """Return `(version, numbers skipped so far)` for every version before which resumes skipped
    numbers.

    Without skipped numbers, a version equals its step. `rows` are the checkpoints in order.

    >>> steps = [(0, 0), (5, 5), (5, 8), (10, 13)]
    >>> _version_gaps([CheckpointRow(i, *step, "") for i, step in enumerate(steps)])
    ((8, 3),)
    """
    skipped = [(0, 0), *((row.version, row.version - row.step) for row in rows)]
    return tuple(after for before, after in pairwise(skipped) if after[1] > before[1])


def _newest_sound(
    run: Path,
    checkpoints: Checkpoints,
    rows: Sequence[CheckpointRow],
    on_event: Callable[..., None],
) -> tuple[CheckpointRow, Checkpoint]:
    """Return the newest checkpoint in the journal whose files are undamaged: its row and its
    content.

    `on_event` is called for each damaged one. Raises `CheckpointError` if none is undamaged.
    """
    cause: CheckpointError | None = None
    for row in reversed(rows):
        try:
            return row, checkpoints.load(row.name)
        except CheckpointError as error:
            cause = cause or error
            on_event("checkpoint_unsound", name=row.name, error=str(error))
    reason = f"the newest one is damaged: {cause}" if cause else "its journal lists none"
    raise CheckpointError(
        f"{run} has no sound checkpoint to resume from; {reason}. Restore the folder from a copy, "
        "or start a new run"
    ) from cause
