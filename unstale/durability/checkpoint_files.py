"""Write, flush, read and verify the files of one checkpoint. `checkpoint` has their layout.

The formats are JSON and safetensors, not pickle, so reading a file never executes code.
"""

import json
import math
import os
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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

from unstale.weights.codec import words

FORMAT = 2
MANIFEST = "manifest.json"
STATE = "state.safetensors"
POLICY = "policy.safetensors"
TRAINER = "trainer"
"""Name of the component whose state grows with the model. It is stored in torch's distributed
format, which a run with another number of shards can read.
"""


class CheckpointError(RuntimeError):
    """Error: a checkpoint or version cannot be read or written. The text names file and cause."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Training progress. The last step's weights are not yet published, nor its metrics logged."""

    step: int = 0
    row: Mapping[str, Any] = field(default_factory=dict)
    """Metrics of the last step."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The full state of a run at one moment, except its episodes, which the journal has.

    It holds the trainer's own tensors, not copies. So it must be written before the next optimizer
    step.
    """

    progress: Progress
    version: int
    states: Mapping[str, Any]
    """The state of each component, by the component's name."""
    policy: Mapping[str, Tensor]
    """The weights that a forward pass uses, by the parameter's name."""


def write_checkpoint(checkpoint: Checkpoint, folder: Path) -> None:
    """Write all files of a checkpoint into an existing folder, and flush them to disk."""
    tensors: dict[str, Tensor] = {}
    states = to_json(checkpoint.states, "", tensors)
    prefix = f"/{TRAINER}/"
    sharded = {key: tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    if sharded:
        writer = HuggingFaceStorageWriter(str(folder / TRAINER))
        with _single_process():
            save_sharded(dict(sharded), storage_writer=writer, no_dist=True)
    others = {key: tensor for key, tensor in tensors.items() if key not in sharded}
    save_file(others, folder / STATE)
    policy = {key: tensor.detach().cpu().contiguous() for key, tensor in checkpoint.policy.items()}
    save_file(policy, folder / POLICY)
    files = _list_files(folder)
    progress = [checkpoint.progress.step, dict(checkpoint.progress.row)]
    body = {
        "format": FORMAT,
        "progress": to_json(progress, "", {}),
        "version": checkpoint.version,
        "files": {name: _size_and_checksum(path) for name, path in files.items()},
        "shapes": _shapes(sharded),
        "states": states,
    }
    checksum = zlib.crc32(json.dumps(body, allow_nan=False).encode())
    manifest = json.dumps({"checksum": checksum, "body": body}, allow_nan=False)
    (folder / MANIFEST).write_text(manifest)
    for path in (*files.values(), folder / MANIFEST, folder / TRAINER, folder):
        flush_to_disk(path)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint and verify it.

    Raises `CheckpointError` if a file is missing, additional or changed.
    """
    with wrap_file_errors(folder):
        body = read_manifest(folder)
        files = _list_files(folder)
        files.pop(MANIFEST)
        if unexpected := sorted(files.keys() ^ body["files"].keys()):
            raise ValueError(f"these files are missing or do not belong here: {unexpected}")
        for name in files:
            verify_file(folder, name, body)
        tensors = load_file(folder / STATE) | _load_trainer(folder / TRAINER, body["shapes"])
        return Checkpoint(
            progress=Progress(*from_json(body["progress"], {})),
            version=body["version"],
            states=from_json(body["states"], tensors),
            policy=load_file(folder / POLICY),
        )


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the content of the manifest, after a check of its format and checksum."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    body = manifest["body"]
    if manifest["checksum"] != zlib.crc32(json.dumps(body, allow_nan=False).encode()):
        raise ValueError(f"{MANIFEST} was changed after it was written")
    if body["format"] != FORMAT:
        raise ValueError(f"its format is {body['format']}, this release reads {FORMAT}")
    return dict(body)


def verify_file(folder: Path, name: str, manifest: Mapping[str, Any]) -> None:
    """Raise ValueError if a file's size or checksum is not the one in the manifest."""
    if _size_and_checksum(folder / name) != manifest["files"][name]:
        raise ValueError(f"{name} was changed after it was written")


def require_same(written: Checkpoint, read: Checkpoint, folder: Path) -> None:
    """Raise `CheckpointError` unless two checkpoints are equal, bit for bit."""
    written_tensors: dict[str, Tensor] = dict(written.policy)
    read_tensors: dict[str, Tensor] = dict(read.policy)
    written_tree = to_json(written.states, "", written_tensors)
    read_tree = to_json(read.states, "", read_tensors)
    is_same = written_tree == read_tree and written_tensors.keys() == read_tensors.keys()
    for name, tensor in written_tensors.items() if is_same else ():
        is_same &= torch.equal(words(tensor.cpu().contiguous()), words(read_tensors[name]))
    if not is_same:
        raise CheckpointError(
            f"{folder} reads back differently than it was written: check the disk"
        )


def to_json(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return a state as JSON values.

    Its tensors are added to `tensors`, by their path in the state.

    Tuples become lists.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": repr(value)}
        case Tensor():
            tensors[path] = value.detach().cpu().contiguous()
            return {"tensor": path}
        case Mapping() if all(type(key) in (str, int) for key in value):
            items = value.items()
            return {
                "mapping": [[key, to_json(item, f"{path}/{key}", tensors)] for key, item in items]
            }
        case list() | tuple():
            return [to_json(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]
    raise TypeError(f"{path or 'the state'} is a {type(value).__name__}, which cannot be saved")


def from_json(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that was given to `to_json`.

    Raises ValueError or KeyError for any other input.
    """
    match tree:
        case None | bool() | int() | float() | str():
            return tree
        case list():
            return [from_json(item, tensors) for item in tree]
        case {"float": str(text)}:
            return float(text)
        case {"tensor": str(path)}:
            return tensors[path]
        case {"mapping": list(pairs)}:
            mapping = {key: from_json(item, tensors) for key, item in pairs}
            if len(mapping) == len(pairs):
                return mapping
    raise ValueError(f"{str(tree)[:40]} is not part of a state")


def flush_to_disk(path: Path) -> None:
    """Wait until a file, or the list of files in a folder, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def wrap_file_errors(path: Path, action: str = "read") -> Iterator[None]:
    """Turn errors of a file's content into a `CheckpointError` that names the file.

    An existing file that cannot be read stays an OSError, because its content may be undamaged.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (
        OSError,
        SafetensorError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RuntimeError,
        OverflowError,
    ) as error:
        is_missing = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
        if isinstance(error, OSError) and action == "read" and not is_missing:
            raise
        cause = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path} cannot be {action}: {cause}") from error


def _load_trainer(folder: Path, shapes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Load the trainer's tensors.

    Their sizes come from the files, so a damaged manifest cannot exhaust the memory.
    """
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                tensors[key] = torch.empty_like(file.get_tensor(key))
    if _shapes(tensors) != dict(shapes):
        raise ValueError(f"the tensors in {TRAINER} differ from those in the manifest")
    if tensors:
        reader = HuggingFaceStorageReader(str(folder))
        with _single_process():
            load_sharded(tensors, storage_reader=reader, no_dist=True)
    return tensors


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    return {
        key: [str(tensor.dtype).removeprefix("torch."), *tensor.shape]
        for key, tensor in tensors.items()
    }


def _list_files(folder: Path) -> dict[str, Path]:
    paths = sorted(path for path in folder.rglob("*") if not path.is_dir())
    return {str(path.relative_to(folder)): path for path in paths}


def _size_and_checksum(path: Path) -> list[int]:
    data = path.read_bytes()
    return [len(data), zlib.crc32(data)]


@contextmanager
def _single_process() -> Iterator[None]:
    """Silence torch.distributed's warning that it is not initialised, and unwrap its errors."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled", category=UserWarning
        )
        try:
            yield
        except CheckpointException as error:
            ((cause, _),) = error.failures.values()
            raise cause from None
