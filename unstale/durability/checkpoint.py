"""The checkpoints and published versions of the weights in a run folder.

    checkpoints/step000012-version000012/
        manifest.json        states of all components as a tree, and the checksum of every file
        trainer/             weights and optimizer: torch's distributed checkpoint, as safetensors
        state.safetensors    every other tensor; copies of weights are stored as differences
    versions/000013.safetensors
                             weights of a version after the checkpoint: the difference from the
                             previous version, or all weights; several ranks write a folder
                             000013.parts instead, with one file for each rank

Everything is written under a temporary name, flushed to disk and then renamed. A checkpoint is also
read back and compared before it is renamed.
"""

import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from unstale.config.files import flush_to_disk
from unstale.durability.checkpoint_files import (
    MANIFEST,
    TRAINER,
    Checkpoint,
    CheckpointError,
    Progress,
    copied,
    read_checkpoint,
    read_manifest,
    read_policy,
    subtract,
    wrap_file_errors,
    write_checkpoint,
)
from unstale.durability.checkpoint_shards import (
    is_divided,
    read_parts,
    read_whole_policy,
    write_parts,
)
from unstale.durability.journal import JOURNAL, identity
from unstale.model.peers import SINGLE_PROCESS, RankGroup
from unstale.weights.bits import words
from unstale.weights.codec import advance, all_of, file_parts, loads
from unstale.weights.publish import VersionedWeights
from unstale.weights.store import Delta

__all__ = [
    "CHECKPOINTS",
    "VERSIONS",
    "Checkpoint",
    "CheckpointError",
    "Checkpoints",
    "Progress",
    "Stateful",
]

CHECKPOINTS = "checkpoints"
VERSIONS = "versions"

_CHECKPOINT_NAME = re.compile(r"step\d+-version(\d+)")
_VERSION_NAME = re.compile(r"(\d+)\.(?:safetensors|parts)")
_VERSION_SUFFIXES = (".safetensors", ".parts")


class Stateful(Protocol):
    """A component of a run whose state is saved in checkpoints.

    The state is a tree of mappings, lists, tensors, numbers and text.
    """

    def state(self) -> Mapping[str, Any]:
        """Return the component's current state. Its tensors are the component's own, not copies.

        Nothing but an optimizer step may change these tensors.
        """
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Checkpoints:
    """A writer and reader of the checkpoints and weight versions in a run folder.

    `parts` are the components whose state is saved, by name. `prune` keeps the newest `keep`
    checkpoints. `peers` are the ranks of the trainer. If there are several, all of them call
    `snapshot`, `write`, `load` and `restore` together. With `copies`, a snapshot copies the
    trainer's state and the weights to main memory. Without `every_version`, a version that is
    written whole replaces those before its predecessor. Call `snapshot` in the trainer's thread.
    `write_version`, `write` and `weights` may run in other threads, with one `write` at a time.
    """

    def __init__(  # noqa: PLR0913 - all but two have defaults
        self,
        run: Path,
        parts: Mapping[str, Stateful],
        *,
        keep: int = 2,
        peers: RankGroup = SINGLE_PROCESS,
        copies: bool = False,
        every_version: bool = True,
    ) -> None:
        self._folder = run / CHECKPOINTS
        self._journal = run / JOURNAL
        self._versions = run / VERSIONS
        self._parts = parts
        self._keep = keep
        self._peers = peers
        self._copies = copies
        self._every_version = every_version
        self._unremoved: set[str] = set()
        """Names of the checkpoints that `prune` could not remove."""

    def snapshot(self, progress: Progress, source: VersionedWeights) -> Checkpoint:
        """Return the current state of the run as a checkpoint in memory.

        `source` has the current weights and their version. If the `Checkpoints` were created
        without `copies`, no optimizer step may run before the checkpoint is written.
        """
        weights = source.weights()
        states = {name: part.state() for name, part in self._parts.items()}
        others = {name: subtract(states[name], weights) for name in states if name != TRAINER}
        states |= others
        if self._copies:
            states[TRAINER] = copied(states[TRAINER])
            weights = copied(weights)
        return Checkpoint(progress, source.version, states, weights, identity(self._journal))

    def save(self, progress: Progress, source: VersionedWeights) -> str:
        """Write the current state of the run as a checkpoint. Return the name of the checkpoint's
        folder.
        """
        return self.write(self.snapshot(progress, source))

    def write(self, checkpoint: Checkpoint) -> str:
        """Write a checkpoint and verify it on disk. Return the name of its folder.

        Raises `CheckpointError` if it cannot be written. Files of the failed attempt are removed.
        """
        name = f"step{checkpoint.progress.step:06d}-version{checkpoint.version:06d}"
        final = self._folder / name
        partial = self._folder / f"{name}.part"
        with self._remove_after_error(partial), wrap_file_errors(partial, "written"):
            with self._first_rank() as is_first:
                # A crash may have left them before the journal recorded the checkpoint.
                for stale in (partial, final) if is_first else ():
                    shutil.rmtree(stale, ignore_errors=True)
                if is_first:
                    (partial / TRAINER).mkdir(parents=True)
                    flush_to_disk(self._folder.parent)
            if self._peers.count > 1:
                write_parts(checkpoint, partial, self._peers)
            else:
                write_checkpoint(checkpoint, partial)
            with self._first_rank() as is_first:
                if is_first:
                    partial.rename(final)
                    flush_to_disk(self._folder)
        return name

    @contextmanager
    def _remove_after_error(self, partial: Path) -> Iterator[None]:
        """Return a context that removes the folder `partial` if its body raises `CheckpointError`.

        This frees space on a full disk, on which the run still has to write its last log rows. Only
        the first rank removes the folder.
        """
        try:
            yield
        except CheckpointError:
            if self._peers.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    @contextmanager
    def _first_rank(self) -> Iterator[bool]:
        """Return a context for work that only the first rank does.

        The value of the context is True on the first rank. The other ranks wait at the end of its
        body.
        """
        with self._peers.fail_together((OSError,)):
            yield self._peers.rank == 0

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore every component from a checkpoint.

        Raises `CheckpointError` if the checkpoint has other components than the run.
        """
        states = checkpoint.states
        if states.keys() != self._parts.keys():
            raise CheckpointError(
                f"the checkpoint has the states {sorted(states)}, "
                f"but the run has {sorted(self._parts)}"
            )
        for name, part in self._parts.items():
            part.restore(states[name])

    def load(self, name: str) -> Checkpoint:
        """Read the checkpoint in the folder `name`, and verify it.

        Raises `CheckpointError` if a file is missing or changed. Raises `OSError`, on all ranks, if
        only some ranks find the checkpoint in their run folder.
        """
        folder = self._folder / name
        with wrap_file_errors(folder):
            body = self._read_manifest(folder)
            if self._peers.count == 1 and not is_divided(body):
                return read_checkpoint(folder)
            trainer = self._parts.get(TRAINER)
            layout = trainer.state()["weights"] if trainer else {}
            return read_parts(folder, body, layout, self._peers)

    def require_journal(self, name: str) -> None:
        """Raise `CheckpointError` if the checkpoint `name` was written with another journal than
        the run's.
        """
        folder = self._folder / name
        with wrap_file_errors(folder):
            number = int(read_manifest(folder).get("journal", 0))
        if number and number != identity(self._journal):
            raise CheckpointError(
                f"{self._journal} is the journal of another run: {folder} was written with a "
                "different one. Put the run's own journal and checkpoints back"
            )

    def _read_manifest(self, folder: Path) -> dict[str, Any]:
        """Return the content of a checkpoint's manifest.

        All ranks call this method. If it fails on one rank, all ranks raise the error.
        """
        with self._peers.fail_together((OSError,)):
            is_visible = (folder / MANIFEST).is_file()
        visible = self._peers.gather(is_visible)
        if any(visible) and not all(visible):
            raise OSError(
                f"trainer rank {visible.index(False)} cannot see {folder / MANIFEST}, but rank "
                f"{visible.index(True)} can: every rank must reach the run folder"
            )
        with self._peers.fail_together((ValueError, LookupError, TypeError, OSError, RuntimeError)):
            return read_manifest(folder)

    def prune(self, known: Collection[str] | None = None) -> dict[str, str]:
        """Remove old checkpoints, and the weight versions up to the oldest checkpoint that is kept.

        The newest `keep` checkpoints stay. `known` are the names of the checkpoints in the journal.
        If it is given, all other checkpoints are removed, too. Return, by name, an error text for
        each checkpoint that could not be removed. Later calls do not try to remove it again.
        """
        usable = [
            (version, path)
            for version, path in self._list_checkpoints()
            if path.name not in self._unremoved and (known is None or path.name in known)
        ]
        kept = usable[-self._keep :]
        oldest = min((version for version, _ in kept), default=-1)
        ignored = self._unremoved | {path.name for _, path in kept}
        causes = {}
        for path in sorted(self._folder.iterdir()):
            is_checkpoint = _CHECKPOINT_NAME.fullmatch(path.name.removesuffix(".part"))
            if is_checkpoint and path.name not in ignored and (cause := _remove_folder(path)):
                causes[path.name] = cause
        self._unremoved |= causes.keys()
        for version, path in self._list_versions():
            if version <= oldest:
                _remove(path)
        return causes

    def remove_after(self, version: int) -> None:
        """Remove the files of all versions with a number above `version`.

        A deterministic run calls this when it resumes, because it will publish these versions
        again.
        """
        for number, path in self._list_versions():
            if number > version:
                _remove(path)

    def write_version(
        self, version: int, weights: Mapping[str, Tensor], delta: Delta | None = None
    ) -> None:
        """Write the weights of a published version to the folder `versions`, and flush them to
        disk.

        If `delta`, the difference from the previous version, is given, only this difference is
        written. A version is written even if a checkpoint has the same weights, because the
        checkpoint may be damaged later.
        """
        self.write_delta(delta or all_of(version, weights))
        if delta is None and not self._every_version:
            # the version before may be the one that the engine has now
            for _, path in self._list_versions()[:-2]:
                _remove(path)

    def write_delta(self, delta: Delta) -> None:
        """Write a published version to the folder `versions`, as a difference from the previous
        version.

        It is flushed to disk. All ranks must call this method. If each rank has only a part of the
        difference, each writes its part. Otherwise the first rank writes all of it.
        """
        is_divided = delta.starts is not None
        partial = self._versions / f"{delta.version:06d}.part"
        final = partial.with_suffix(".parts" if is_divided else ".safetensors")
        own = partial / f"{self._peers.rank:05d}.safetensors" if is_divided else partial
        with wrap_file_errors(partial, "written"):
            with self._first_rank() as is_first:
                if is_first:
                    self._versions.mkdir(exist_ok=True)
                    flush_to_disk(self._versions.parent)
                    _remove(partial)
                    (partial if is_divided else self._versions).mkdir(exist_ok=True)
            with self._peers.fail_together((OSError,)):
                if self._peers.is_first_replica if is_divided else self._peers.rank == 0:
                    with own.open("wb") as file:
                        file.writelines(file_parts(delta))
                    flush_to_disk(own)
            with self._first_rank() as is_first:
                if is_first:
                    flush_to_disk(partial)
                    # Another number of ranks may have written the version before a crash.
                    for suffix in _VERSION_SUFFIXES:
                        _remove(partial.with_suffix(suffix))
                    partial.rename(final)
                    flush_to_disk(self._versions)

    def read_weights(self, name: str) -> dict[str, Tensor]:
        """Return all weights of the checkpoint `name`, by parameter, in the precision of a forward
        pass.

        Raises `CheckpointError` if a file of the checkpoint is missing or changed.
        """
        folder = self._folder / name
        with wrap_file_errors(folder):
            body = read_manifest(folder)
            return read_whole_policy(folder, body) if is_divided(body) else read_policy(folder)

    def adapter_base(self, name: str) -> int:
        """Return a checksum of the base model to which the LoRA adapters in the checkpoint `name`
        belong.

        0 if the checkpoint has no adapters.
        """
        folder = self._folder / name
        with wrap_file_errors(folder):
            states = dict(read_manifest(folder)["states"]["mapping"])
            return int(dict(states[TRAINER]["mapping"]).get("base", 0))

    def weights(self, version: int) -> dict[str, Tensor]:
        """Return the weights of a version, by parameter, computed from an older checkpoint and
        differences.

        Raises `LookupError` if the files for this are no longer on disk.
        """
        older = [entry for entry in self._list_checkpoints() if entry[0] <= version]
        if not older:
            raise LookupError(f"version {version} is older than every checkpoint on disk")
        current, folder = max(older)
        weights = self.read_weights(folder.name)
        for number, path in self._list_versions():
            if not current < number <= version:
                continue
            with wrap_file_errors(path):
                files = sorted(path.iterdir()) if path.is_dir() else [path]
                weights = _advance(weights, [loads(each.read_bytes()) for each in files], current)
            current = number
        if current != version:
            raise LookupError(
                f"version {version} is not on disk: the newest before it is {current}"
            )
        return weights

    @property
    def names(self) -> list[str]:
        """Names of the checkpoints, oldest first."""
        return [path.name for _, path in self._list_checkpoints()]

    @property
    def steps(self) -> dict[int, str]:
        """The name of the checkpoint of each step, by step, oldest first.

        If a step has several checkpoints, this is the newest.
        """
        return {int(name.removeprefix("step").partition("-")[0]): name for name in self.names}

    @property
    def versions(self) -> list[int]:
        """Numbers of the versions that have a file in the folder `versions`, in ascending order."""
        return [version for version, _ in self._list_versions()]

    def _list_checkpoints(self) -> list[tuple[int, Path]]:
        return _list_by_version(self._folder, _CHECKPOINT_NAME)

    def _list_versions(self) -> list[tuple[int, Path]]:
        return _list_by_version(self._versions, _VERSION_NAME)


def _advance(
    weights: dict[str, Tensor], deltas: Sequence[Delta], current: int
) -> dict[str, Tensor]:
    """Return the weights of the version after `current`, given those of `current`.

    `deltas` is the difference of the two versions: one element, or one for each rank's part of the
    weights. A delta with base -1 does not need the earlier weights. Raises ValueError if the deltas
    do not fit together or do not start from `current`.
    """
    if len({(delta.base, delta.version) for delta in deltas}) != 1:
        raise ValueError(f"its {len(deltas)} parts are not of one version")
    base = deltas[0].base
    if base == -1:
        weights = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    elif base != current:
        raise ValueError(f"it starts from version {base}, but the one before it is {current}")
    given = sum(encoded.words for delta in deltas for encoded in delta.tensors.values())
    if given != sum(words(tensor).numel() for tensor in weights.values()):
        raise ValueError(f"its {len(deltas)} parts are not whole weights")
    for delta in deltas:
        advance(weights, delta)
    return weights


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _remove_folder(path: Path) -> str:
    """Remove a folder. If that fails, remove as many of its files as possible and return the error
    text.

    Return "" on success.
    """
    try:
        shutil.rmtree(path)
    except OSError as error:
        shutil.rmtree(path, ignore_errors=True)  # the first call stops at the first error
        return str(error) if os.path.lexists(path) else ""
    return ""


def _list_by_version(folder: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    """Return `(version, path)` of the entries of a folder, by version.

    `pattern` matches the whole name of an entry, and its first group the version. Other entries are
    left out.
    """
    matches = [(pattern.fullmatch(path.name), path) for path in folder.glob("*")]
    return sorted((int(match[1]), path) for match, path in matches if match)
