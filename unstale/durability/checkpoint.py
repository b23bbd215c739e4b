"""The checkpoints and published weight versions in a run folder.

    checkpoints/step000012-version000012/
        manifest.json        the state as a tree, and the checksum of every file
        trainer/             weights and optimizer: torch's distributed checkpoint, as safetensors
        state.safetensors    every other tensor; copies of the weights are differences from them
    versions/000013.safetensors
                             a later version: its difference from the previous one, or all of it;
                             a folder 000013.parts with a file of each rank, if ranks divide it

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
    """A component whose state is saved in checkpoints.

    The state consists of mappings, lists, tensors, numbers and text.
    """

    def state(self) -> Mapping[str, Any]:
        """Return the component's current state.

        Tensors are not copied. Only an optimizer step may change them.
        """
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Checkpoints:
    """A writer and reader of the checkpoints and weight versions in a run folder.

    `parts` are the components to save, by name. `keep` is the number of checkpoints that `prune`
    keeps. If the components are divided among `peers`, all ranks call `snapshot`, `write`, `load`
    and `restore` together. With `copies`, a snapshot has copies of the trainer's state and of the
    weights, in main memory. Call `snapshot` in the trainer's thread. `write_version`, `write` and
    `weights` may run in other threads, with one `write` at a time.
    """

    def __init__(
        self,
        run: Path,
        parts: Mapping[str, Stateful],
        *,
        keep: int = 2,
        peers: RankGroup = SINGLE_PROCESS,
        copies: bool = False,
    ) -> None:
        self._folder = run / CHECKPOINTS
        self._journal = run / JOURNAL
        self._versions = run / VERSIONS
        self._parts = parts
        self._keep = keep
        self._peers = peers
        self._copies = copies
        self._unremoved: set[str] = set()
        """Names of the checkpoints that `prune` could not remove."""

    def snapshot(self, progress: Progress, source: VersionedWeights) -> Checkpoint:
        """Return the current state of the run as a checkpoint, which is not yet written.

        Without `copies`, the weights must not change until the checkpoint is written.
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
        """Write the current state of the run as a checkpoint. Return the checkpoint's name."""
        return self.write(self.snapshot(progress, source))

    def write(self, checkpoint: Checkpoint) -> str:
        """Write a checkpoint, verify it on disk and return its name. Older checkpoints are kept.

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

        The disk may be full, and the run must still write its last log rows. Only the first rank
        removes the folder.
        """
        try:
            yield
        except CheckpointError:
            if self._peers.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    @contextmanager
    def _first_rank(self) -> Iterator[bool]:
        """Return a context whose body has work for the first rank only.

        The other ranks wait at its end. The context's value is True on the first rank.
        """
        with self._peers.fail_together((OSError,)):
            yield self._peers.rank == 0

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore every component from a checkpoint."""
        states = checkpoint.states
        if states.keys() != self._parts.keys():
            raise CheckpointError(
                f"the checkpoint has the states {sorted(states)}, "
                f"but the run has {sorted(self._parts)}"
            )
        for name, part in self._parts.items():
            part.restore(states[name])

    def load(self, name: str) -> Checkpoint:
        """Read a checkpoint. Raises `CheckpointError` unless it is complete and unchanged.

        Raises OSError, on all ranks, if some ranks have no such checkpoint in their run folder.
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
        """Raise `CheckpointError` if the checkpoint belongs to the journal of another run."""
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

        All ranks call this. If it fails on one rank, all ranks raise the error.
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
        """Remove all but the newest checkpoints, and the versions that no kept checkpoint needs.

        `known` are the names of the checkpoints in the journal. If given, checkpoints that it does
        not name are removed, too. Return an error text for each checkpoint that could not be
        removed. Later calls ignore these checkpoints.
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
        """Remove the files of all versions after `version`.

        A deterministic run will publish them again.
        """
        for number, path in self._list_versions():
            if number > version:
                _remove(path)

    def write_version(
        self, version: int, weights: Mapping[str, Tensor], delta: Delta | None = None
    ) -> None:
        """Write the weights of a version and flush them to disk.

        `delta` is the difference from the previous version. If it is given, only the difference is
        written. A version that a checkpoint contains is written too, because the checkpoint may
        turn out to be damaged later.
        """
        self.write_delta(delta or all_of(version, weights))

    def write_delta(self, delta: Delta) -> None:
        """Write a version, given as the difference from the previous one, and flush it to disk.

        All ranks must call this. If the ranks divide the difference, each writes its part.
        Otherwise the first rank writes all of it.
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
        """Return all weights of a checkpoint, as a forward pass uses them, by the parameter's name.

        Raises `CheckpointError` unless the checkpoint's files are complete and unchanged.
        """
        folder = self._folder / name
        with wrap_file_errors(folder):
            body = read_manifest(folder)
            return read_whole_policy(folder, body) if is_divided(body) else read_policy(folder)

    def adapter_base(self, name: str) -> int:
        """Return the checksum of the base model of a checkpoint's LoRA adapters.

        0 if the checkpoint has no adapters.
        """
        folder = self._folder / name
        with wrap_file_errors(folder):
            states = dict(read_manifest(folder)["states"]["mapping"])
            return int(dict(states[TRAINER]["mapping"]).get("base", 0))

    def weights(self, version: int) -> dict[str, Tensor]:
        """Return the weights of a version, computed from a checkpoint and the differences after it.

        Raises LookupError if the version is no longer on disk.
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
        """The checkpoint of each step, by step, oldest first.

        If a step has several, the newest is named.
        """
        return {int(name.removeprefix("step").partition("-")[0]): name for name in self.names}

    @property
    def versions(self) -> list[int]:
        """Versions that have a file in `versions/`, in ascending order."""
        return [version for version, _ in self._list_versions()]

    def _list_checkpoints(self) -> list[tuple[int, Path]]:
        return _list_by_version(self._folder, _CHECKPOINT_NAME)

    def _list_versions(self) -> list[tuple[int, Path]]:
        return _list_by_version(self._versions, _VERSION_NAME)


def _advance(
    weights: dict[str, Tensor], deltas: Sequence[Delta], current: int
) -> dict[str, Tensor]:
    """Return the weights of the version after `current`, given those of `current`.

    `deltas` has the difference of the two versions: one delta, or one for each rank's part of the
    weights. A delta with base -1 has all weights, as the difference from zeros.
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
    """Remove a folder, or as many of its files as possible.

    Return the error text, or "" on success.
    """
    try:
        shutil.rmtree(path)
    except OSError as error:
        shutil.rmtree(path, ignore_errors=True)  # the first call stops at the first error
        return str(error) if os.path.lexists(path) else ""
    return ""


def _list_by_version(folder: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    """Return `(version, path)` of a folder's entries whose names match `pattern`, oldest first."""
    matches = [(pattern.fullmatch(path.name), path) for path in folder.glob("*")]
    return sorted((int(match[1]), path) for match, path in matches if match)
