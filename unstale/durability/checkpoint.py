"""Checkpoints and versions on the disk: what a killed run goes on from, and what its engines were given.

    checkpoints/step000012-version000012/
        manifest.json        the state as a tree, and the checksum of every file
        trainer/             weights and optimizer: torch's distributed checkpoint, in safetensors files
        state.safetensors    every other tensor
        policy.safetensors   the forward weights, which are the version's
    versions/000013.safetensors
                             a version published since: what leads to it from the one before, or all of it

Everything is written aside and brought to the disk before it gets its name; a checkpoint is read again and compared.
Nothing that is read is ever executed: JSON and safetensors, no pickle.
"""

import json
import math
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from unstale.weights.codec import advance, checksum, dumps, loads, whole, words
from unstale.weights.publish import VersionedWeights
from unstale.weights.store import Delta

CHECKPOINTS, VERSIONS = "checkpoints", "versions"
"""Their folders in a run folder."""

FORMAT = 1
_CHECKPOINT, _VERSION = re.compile(r"step(\d+)-version(\d+)"), re.compile(r"(\d+)\.safetensors")
_MANIFEST, _STATE, _POLICY = "manifest.json", "state.safetensors", "policy.safetensors"
_TRAINER = "trainer"
"""The part of the state that grows with the model, and can be read again by other shards."""


class CheckpointError(RuntimeError):
    """A checkpoint or a version on the disk cannot be read: names it and the cause."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come: so many steps, of which the last is neither published nor written down."""

    step: int = 0
    row: Mapping[str, Any] = field(default_factory=dict)
    """What there is to write of it."""


class Stateful(Protocol):
    """A part of a run whose state a checkpoint holds: a tree of mappings, lists, tensors, numbers and text."""

    def state(self) -> Mapping[str, Any]:
        """As it is at this moment. Nothing but an optimizer step changes what was returned; it is not copied."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All of a run at one moment, but for its episodes, which are in the journal."""

    progress: Progress
    version: int
    states: Mapping[str, Any]
    """By part."""
    policy: Mapping[str, Tensor]
    """The forward weights. As in `states`, tensors are the live ones until it is read from the disk."""


class Checkpoints:
    """The checkpoints and versions of one run folder, and the `parts` that they hold.

    `snapshot` and `put` belong to the trainer's thread. What is held is written beside it, one checkpoint after the other;
    `weights` may be read meanwhile.
    """

    def __init__(self, run: Path, parts: Mapping[str, Stateful], *, keep: int = 2) -> None:
        self._folder, self._versions, self._keep = run / CHECKPOINTS, run / VERSIONS, keep
        self._parts = parts

    def snapshot(self, progress: Progress, source: VersionedWeights) -> Checkpoint:
        """All of the run at this moment. Gradients may be formed while it is written; the weights may not move."""
        states = {name: part.state() for name, part in self._parts.items()}
        return Checkpoint(progress, source.version, states, source.weights())

    def save(self, progress: Progress, source: VersionedWeights) -> str:
        """Take a snapshot and write it. Return the checkpoint's name."""
        return self.write(self.snapshot(progress, source))

    def write(self, checkpoint: Checkpoint) -> str:
        """Its name, once it is on the disk and was read back the same. Older ones are as they were."""
        name = f"step{checkpoint.progress.step:06d}-version{checkpoint.version:06d}"
        aside = self._folder / f"{name}.part"
        for stale in (
            aside,
            self._folder / name,
        ):  # of a life of the run that did not get to write it in its journal
            shutil.rmtree(stale, ignore_errors=True)
        with _named(aside, "written"):
            (aside / _TRAINER).mkdir(parents=True)
            _to_disk(self._folder.parent)
            _write(checkpoint, aside)
            _require_same(checkpoint, _read(aside), aside)
            aside.rename(self._folder / name)
            _to_disk(self._folder)
        return name

    def restore(self, checkpoint: Checkpoint) -> None:
        """Every part goes on from its state there."""
        if checkpoint.states.keys() != self._parts.keys():
            raise CheckpointError(
                f"it holds {sorted(checkpoint.states)}, the run has {sorted(self._parts)}"
            )
        for name, part in self._parts.items():
            part.restore(checkpoint.states[name])

    def load(self, name: str) -> Checkpoint:
        """`CheckpointError` unless it is whole and as it was written."""
        return _read(self._folder / name)

    def prune(self, known: Collection[str] | None = None) -> None:
        """Keep the newest, of those `known` to the journal, and the versions since the oldest that is kept."""
        kept = [path for _, path in self._checkpoints() if known is None or path.name in known][
            -self._keep :
        ]
        for path in set(self._folder.iterdir()) - set(kept):
            shutil.rmtree(path, ignore_errors=True)
        oldest = min(version for version, _ in self._checkpoints())
        for version, path in self._published():
            if version <= oldest:
                path.unlink()

    def forget(self, newest: int) -> None:
        """Remove the versions after `newest`: a deterministic run makes them again."""
        for version, path in self._published():
            if version > newest:
                path.unlink()

    def put(self, version: int, weights: Mapping[str, Tensor], delta: Delta | None = None) -> None:
        """A version's forward weights, on the disk when this returns. A checkpoint's too: it may turn out unsound.

        `delta` is what leads to them from the version before, if that is known and smaller.
        """
        given = delta or Delta(
            -1, version, checksum(weights), {name: whole(t) for name, t in weights.items()}
        )
        aside = self._versions / f"{version:06d}.part"
        with _named(aside, "written"):
            self._versions.mkdir(exist_ok=True)
            _to_disk(self._versions.parent)
            aside.write_bytes(dumps(given))
            _to_disk(aside)
            aside.rename(aside.with_suffix(".safetensors"))
            _to_disk(self._versions)

    def weights(self, version: int) -> dict[str, Tensor]:
        """A version's forward weights: a checkpoint's, moved on by the versions since. LookupError if they are gone."""
        at, path = max(
            (held for held in self._checkpoints() if held[0] <= version), default=(-1, None)
        )
        if path is None:
            raise LookupError(
                f"version {version} is on no disk: it is older than every checkpoint that is kept"
            )
        with _named(path):
            _require_sum(path, _POLICY, _manifest(path))
            weights = load_file(path / _POLICY)
        for number, file in self._published():
            if not at < number <= version:
                continue
            with _named(file):
                delta = loads(file.read_bytes())
                if delta.base == -1:
                    weights = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
                elif delta.base != at:
                    raise ValueError(
                        f"it leads on from version {delta.base}, and the one before it is {at}"
                    )
                advance(weights, delta)
            at = number
        if at != version:
            raise LookupError(f"version {version} is on no disk: the newest up to it is {at}")
        return weights

    @property
    def names(self) -> list[str]:
        """Of the checkpoints, oldest first."""
        return [path.name for _, path in self._checkpoints()]

    @property
    def published(self) -> list[int]:
        """Versions that have a file of their own, in order."""
        return [version for version, _ in self._published()]

    def _checkpoints(self) -> list[tuple[int, Path]]:
        """With their versions, oldest first."""
        return _numbered(self._folder, _CHECKPOINT)

    def _published(self) -> list[tuple[int, Path]]:
        return _numbered(self._versions, _VERSION)


def _numbered(folder: Path, name: re.Pattern[str]) -> list[tuple[int, Path]]:
    """What has such a name, by the last number in it."""
    found = [(match, path) for path in folder.glob("*") if (match := name.fullmatch(path.name))]
    return sorted((int(match[match.lastindex or 0]), path) for match, path in found)


def _write(checkpoint: Checkpoint, folder: Path) -> None:
    """All files of it, on the disk when this returns."""
    tensors: dict[str, Tensor] = {}
    stand = checkpoint.progress
    tree = _plant(checkpoint.states, "", tensors)
    sharded = {key: tensor for key, tensor in tensors.items() if key.startswith(f"/{_TRAINER}/")}
    if sharded:
        with _alone():
            save_sharded(
                dict(sharded),
                storage_writer=HuggingFaceStorageWriter(str(folder / _TRAINER)),
                no_dist=True,
            )
    save_file(
        {key: tensor for key, tensor in tensors.items() if key not in sharded}, folder / _STATE
    )
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.policy.items()},
        folder / _POLICY,
    )
    files = _files(folder)
    body = {
        "format": FORMAT,
        "stand": _plant([stand.step, dict(stand.row)], "", {}),
        "version": checkpoint.version,
        "files": {
            name: [path.stat().st_size, _sum(path.read_bytes())] for name, path in files.items()
        },
        "shapes": {key: [_word(tensor.dtype), *tensor.shape] for key, tensor in sharded.items()},
        "states": tree,
    }
    text = json.dumps(body, allow_nan=False)
    (folder / _MANIFEST).write_text(
        json.dumps({"sum": _sum(text.encode()), "body": body}, allow_nan=False)
    )
    for path in (*files.values(), folder / _MANIFEST, folder / _TRAINER, folder):
        _to_disk(path)


def _read(folder: Path) -> Checkpoint:
    """What `_write` wrote. `CheckpointError` for anything else."""
    with _named(folder):
        body = _manifest(folder)
        files = _files(folder)
        files.pop(_MANIFEST)
        if files.keys() != body["files"].keys():
            raise ValueError(
                f"{sorted(files.keys() ^ body['files'].keys())} should be there, or should not"
            )
        for name in files:
            _require_sum(folder, name, body)
        states = _grow(
            body["states"],
            load_file(folder / _STATE) | _load_sharded(folder / _TRAINER, body["shapes"]),
        )
        return Checkpoint(
            Progress(*_grow(body["stand"], {})),
            body["version"],
            states,
            load_file(folder / _POLICY),
        )


def _manifest(folder: Path) -> dict[str, Any]:
    held = json.loads((folder / _MANIFEST).read_bytes())
    body = held["body"]
    if held["sum"] != _sum(json.dumps(body, allow_nan=False).encode()):
        raise ValueError(f"{_MANIFEST} is not as it was written")
    if body["format"] != FORMAT:
        raise ValueError(f"it has format {body['format']}, this version reads {FORMAT}")
    return dict(body)


def _require_sum(folder: Path, name: str, body: Mapping[str, Any]) -> None:
    data = (folder / name).read_bytes()
    if [len(data), _sum(data)] != body["files"][name]:
        raise ValueError(f"{name} is not as it was written")


def _load_sharded(folder: Path, shapes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Nothing is allocated but for what the files hold."""
    held: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                held[key] = torch.empty_like(file.get_tensor(key))
    if {key: [_word(tensor.dtype), *tensor.shape] for key, tensor in held.items()} != dict(shapes):
        raise ValueError(f"{_TRAINER} holds other tensors than the manifest names")
    if held:
        with _alone():
            load_sharded(held, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return held


def _plant(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """As JSON, with the tensors beside it by the path to them. Tuples become lists."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": repr(value)}
        case Tensor():
            tensors[path] = value.detach().cpu().contiguous()
            return {"tensor": path}
        case Mapping() if all(type(key) in (str, int) for key in value):
            return {
                "of": [[key, _plant(item, f"{path}/{key}", tensors)] for key, item in value.items()]
            }
        case list() | tuple():
            return [_plant(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]
    raise TypeError(
        f"{path or 'the state'} is a {type(value).__name__}, which no checkpoint can hold"
    )


def _grow(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What was planted. ValueError or KeyError for what cannot have been."""
    match tree:
        case None | bool() | int() | float() | str():
            return tree
        case list():
            return [_grow(item, tensors) for item in tree]
        case {"float": str(text)}:
            return float(text)
        case {"tensor": str(path)}:
            return tensors[path]
        case {"of": list(pairs)}:
            held = {key: _grow(item, tensors) for key, item in pairs}
            if len(held) == len(pairs):
                return held
    raise ValueError(f"{str(tree)[:40]} is no part of a state")


def _require_same(written: Checkpoint, read: Checkpoint, where: Path) -> None:
    """`CheckpointError` unless what is on the disk is what was meant, bit for bit."""
    one: dict[str, Tensor] = dict(written.policy)
    other: dict[str, Tensor] = dict(read.policy)
    trees = _plant(written.states, "", one), _plant(read.states, "", other)
    same = trees[0] == trees[1] and one.keys() == other.keys()
    if not same or not all(
        torch.equal(words(one[name].cpu().contiguous()), words(other[name])) for name in one
    ):
        raise CheckpointError(
            f"{where} was read back other than it was written: the disk is not to be trusted"
        )


def _files(folder: Path) -> dict[str, Path]:
    return {
        str(path.relative_to(folder)): path
        for path in sorted(folder.rglob("*"))
        if not path.is_dir()
    }


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sum(data: bytes) -> int:
    return zlib.crc32(data)


def _to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _alone() -> Iterator[None]:
    """torch.distributed warns when it is alone, which here it is on purpose, and wraps what goes wrong."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled", category=UserWarning
        )
        try:
            yield
        except CheckpointException as error:
            ((cause, _),) = error.failures.values()
            raise cause from None


@contextmanager
def _named(path: Path, done: str = "read") -> Iterator[None]:
    """Whatever is wrong with a file is a `CheckpointError` that names it."""
    try:
        yield
    except CheckpointError:
        raise
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise CheckpointError(f"{path} cannot be {done}: {error}") from error
    except OSError as error:
        if done == "read":  # just now, which says nothing of what is there
            raise
        raise CheckpointError(
            f"{path} cannot be {done}: {type(error).__name__}: {error}"
        ) from error
    except (
        SafetensorError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RuntimeError,
        OverflowError,
    ) as error:
        raise CheckpointError(
            f"{path} cannot be {done}: {type(error).__name__}: {error}"
        ) from error
