"""Write, flush, read and verify the files of one checkpoint. `checkpoint` describes its folder.

The formats are JSON and safetensors, not pickle, so reading a file never executes code. A
forward-pass weight that equals the trainer's weight in another precision is not written again.
Copies of forward-pass weights, such as those of earlier versions, are written as differences from
them. Files are written and read in parts, so no second copy of the model is needed in memory.
"""

import json
import math
import warnings
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import DistError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from unstale.config.files import flush_to_disk
from unstale.model.sharding import host_copy, is_sharded
from unstale.weights.bits import words
from unstale.weights.codec import Encoded, apply, encode, file_of, read_tensors

FORMAT = 3
MANIFEST = "manifest.json"
STATE = "state.safetensors"
TRAINER = "trainer"
"""Name of the component with the weights and the optimizer state. Its tensors are stored in torch's
distributed format, which a run with another number of ranks can read.
"""
WEIGHTS_PREFIX = f"/{TRAINER}/weights/"
"""Beginning of the names of the trainer's weights in a checkpoint's files."""
POLICY_PREFIX = "/policy/"
"""Beginning of the names of forward-pass weights in a checkpoint's files. A forward-pass weight is
left out if it can be made from the trainer's weight by a conversion to another precision.
"""

MIN_FILE_BYTES = 8 << 20
MAX_FILES = 64
"""Approximate largest number of files for the trainer's state. They are written one after the
other. Each takes memory for two copies of the file while it is written.
"""
_READ_BYTES = 1 << 20
_SHORTAGES = (
    "not enough memory",
    "out of memory",
    "allocate memory",
    "unable to mmap",
    "Too many open files",
)
"""Parts of the messages with which torch reports a lack of memory or file descriptors. Most of
these errors have no class of their own.
"""


class CheckpointError(RuntimeError):
    """Error: a checkpoint or version cannot be read or written. The text names file and cause."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Training progress at a checkpoint. `step` is the number of steps done.

    When the checkpoint is taken, the weights of the last step are not yet published, and its
    metrics are not yet logged.
    """

    step: int = 0
    row: Mapping[str, Any] = field(default_factory=dict)
    """Metrics of the last step, which a resumed run logs."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The full state of a run at one moment, without the episodes, which are in the journal.

    Its tensors are either copies or the components' own tensors. In the second case, the checkpoint
    must be written before the next optimizer step.
    """

    progress: Progress
    version: int
    states: Mapping[str, Any]
    """The state of each component, by the component's name. A tensor in it that repeats a
    forward-pass weight is a `Difference`.
    """
    policy: Mapping[str, Tensor]
    """The weights that a forward pass uses, by the name of the parameter."""
    journal: int = 0
    """The random number that identifies the run's journal (`journal.identity`). 0 if it is not
    known.
    """


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that is stored as its bitwise difference from a weight of the same shape and dtype.

    `name` is the weight's name.
    """

    name: str
    encoded: Encoded


def subtract(state: Any, weights: Mapping[str, Tensor], name: str = "") -> Any:
    """Return the tree `state` with a `Difference` for each tensor that repeats one of `weights`.

    A tensor repeats a weight if it has the weight's name, shape and dtype. `name` is the name under
    which `state` is stored. A `Difference` is a copy, so the tensor itself may be changed later.
    """
    match state:
        case Tensor() if name in weights and _alike(state, weights[name]):
            weight = words(weights[name])
            return Difference(name, encode(words(state).to(weight.device) ^ weight))
        case Mapping():
            return {key: subtract(item, weights, str(key)) for key, item in state.items()}
        case list() | tuple():
            return [subtract(item, weights) for item in state]
    return state


def copied(state: Any) -> Any:
    """Return the tree `state` with copies of its tensors in main memory."""
    match state:
        case Tensor():
            return host_copy(state)
        case Mapping():
            return {key: copied(item) for key, item in state.items()}
        case list() | tuple():
            return [copied(item) for item in state]
    return state


def write_checkpoint(checkpoint: Checkpoint, folder: Path) -> None:
    """Write a checkpoint's files into an existing folder, flush them to disk and read them back.

    Raises `CheckpointError` if the tensors read back differ from those of the checkpoint.
    """
    tensors: dict[str, Tensor] = {}
    states = to_json(checkpoint.states, "", tensors)
    sharded = {key: value for key, value in tensors.items() if key.startswith(f"/{TRAINER}/")}
    dtypes = {}
    for name, weight in checkpoint.policy.items():
        dtypes[name] = name_dtype(weight) if is_cast(sharded, name, weight) else ""
        if not dtypes[name]:
            tensors[POLICY_PREFIX + name] = weight.detach().cpu().contiguous()
    if sharded:
        writer = HuggingFaceStorageWriter(str(folder / TRAINER), _divide(sharded))
        with plain_errors():
            save_sharded(dict(sharded), storage_writer=writer, no_dist=True)
    write_tensors(folder / STATE, {k: v for k, v in tensors.items() if k not in sharded})
    shapes = dtypes_and_shapes(sharded)
    write_manifest(checkpoint, folder, {"states": states, "policy": dtypes, "shapes": shapes})
    if not read_back(list_files(folder).values(), tensors):
        raise CheckpointError(
            f"{folder} reads back differently than it was written: check the disk"
        )


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    with path.open("wb") as file:
        file.writelines(file_of(tensors))


def state_file(rank: int) -> str:
    """Return the name of the file in which rank `rank` writes its tensors outside the trainer's
    state.
    """
    return f"{STATE.removesuffix('.safetensors')}-{rank:05d}.safetensors" if rank else STATE


def write_manifest(checkpoint: Checkpoint, folder: Path, content: Mapping[str, Any]) -> None:
    """Write a checkpoint's manifest, with the checksums of all files in `folder`. Flush all to
    disk.

    `content` has further fields of the manifest. Raises `CheckpointError` if the manifest reads
    back differently.
    """
    files = list_files(folder)
    progress = [checkpoint.progress.step, dict(checkpoint.progress.row)]
    body = {
        "format": FORMAT,
        "progress": to_json(progress, "", {}),
        "version": checkpoint.version,
        "journal": checkpoint.journal,
        "files": {name: _size_and_checksum(path) for name, path in files.items()},
        **content,
    }
    checksum = zlib.crc32(json.dumps(body, allow_nan=False).encode())
    manifest = json.dumps({"checksum": checksum, "body": body}, allow_nan=False)
    (folder / MANIFEST).write_text(manifest)
    for path in (*files.values(), folder / MANIFEST, folder / TRAINER, folder):
        flush_to_disk(path)
    if (folder / MANIFEST).read_text() != manifest:
        raise CheckpointError(
            f"{folder} reads back differently than it was written: check the disk"
        )


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint that one rank wrote, and verify its files.

    Raises `CheckpointError` if a file is missing or changed, or does not belong to the checkpoint.
    """
    with wrap_file_errors(folder):
        body = read_manifest(folder)
        files = list_files(folder)
        files.pop(MANIFEST)
        if unexpected := sorted(files.keys() ^ body["files"].keys()):
            raise ValueError(f"these files are missing or do not belong here: {unexpected}")
        for name in files:
            verify_file(folder, name, body)
        tensors = load_file(folder / STATE) | _load_trainer(folder / TRAINER, body["shapes"])
        policy = forward_weights(body, tensors)
        return Checkpoint(
            progress=Progress(*from_json(body["progress"], {}, {})),
            version=body["version"],
            states=from_json(body["states"], tensors, policy),
            policy=policy,
        )


def read_state(folder: Path, name: str) -> Any:
    """Return the state of the component `name`, other than the trainer, in a checkpoint of one
    rank. Its file is verified. Empty if the checkpoint has no such component.

    Raises `CheckpointError` if a file is missing or changed.
    """
    with wrap_file_errors(folder):
        body = read_manifest(folder)
        verify_file(folder, STATE, body)
        for key, tree in body["states"]["mapping"]:
            if key == name:
                return from_json(tree, load_file(folder / STATE), {})
        return {}


def read_policy(folder: Path) -> dict[str, Tensor]:
    """Return the forward-pass weights of a checkpoint, by parameter. The files are verified.

    Raises `CheckpointError` if a file is missing or changed.
    """
    with wrap_file_errors(folder):
        body = read_manifest(folder)
        for name in body["files"]:
            verify_file(folder, name, body)
        wanted = {key for key in body["shapes"] if key.startswith(WEIGHTS_PREFIX)}
        trained = _load_trainer(folder / TRAINER, body["shapes"], wanted)
        return forward_weights(body, load_file(folder / STATE) | trained)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the content of the manifest in a checkpoint folder.

    Raises ValueError if its format or checksum is wrong.
    """
    manifest = json.loads((folder / MANIFEST).read_bytes())
    body = manifest["body"]
    if manifest["checksum"] != zlib.crc32(json.dumps(body, allow_nan=False).encode()):
        raise ValueError(f"{MANIFEST} was changed after it was written")
    if body["format"] != FORMAT:
        raise ValueError(f"its format is {body['format']}, this release reads {FORMAT}")
    return dict(body)


def verify_file(folder: Path, name: str, manifest: Mapping[str, Any]) -> None:
    """Raise ValueError if the size or checksum of the file `name` differs from the manifest."""
    if _size_and_checksum(folder / name) != manifest["files"][name]:
        raise ValueError(f"{name} was changed after it was written")


def to_json(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return the tree `value`, a component's state, as JSON values. Tuples become lists.

    Its tensors are added to `tensors`, under their path in the tree. `path` is the path of `value`.
    Raises TypeError for a value that cannot be saved.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": repr(value)}
        case Tensor():
            tensors[path] = (
                value.detach() if is_sharded(value) else value.detach().cpu().contiguous()
            )
            return {"tensor": path}
        case Difference(name, encoded):
            for i, stream in enumerate(encoded.streams):
                tensors[f"{path}/{i}"] = torch.frombuffer(bytearray(stream), dtype=torch.uint8)
            numbers = [encoded.kind, encoded.words, encoded.width, encoded.changed]
            return {"difference": path, "from": name, "of": [*numbers, len(encoded.streams)]}
        case Mapping() if all(type(key) in (str, int) for key in value):
            items = value.items()
            return {
                "mapping": [[key, to_json(item, f"{path}/{key}", tensors)] for key, item in items]
            }
        case list() | tuple():
            return [to_json(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]
    raise TypeError(f"{path or 'the state'} is a {type(value).__name__}, which cannot be saved")


def from_json(tree: Any, tensors: Mapping[str, Tensor], policy: Mapping[str, Tensor]) -> Any:
    """Return the state that `to_json` turned into `tree` and `tensors`.

    A `Difference` becomes a whole tensor again, with the weights in `policy`. Raises ValueError or
    KeyError if `to_json` cannot have returned `tree`.
    """
    match tree:
        case None | bool() | int() | float() | str():
            return tree
        case list():
            return [from_json(item, tensors, policy) for item in tree]
        case {"float": str(text)}:
            return float(text)
        case {"tensor": str(path)}:
            return tensors[path]
        case {
            "difference": str(path),
            "from": str(name),
            "of": [kind, size, width, changed, int(count)],
        }:
            streams = tuple(tensors[f"{path}/{i}"].numpy().tobytes() for i in range(count))
            whole = policy[name].clone(memory_format=torch.contiguous_format)
            apply(Encoded(kind, size, width, changed, streams), words(whole))
            return whole
        case {"mapping": list(pairs)}:
            mapping = {key: from_json(item, tensors, policy) for key, item in pairs}
            if len(mapping) == len(pairs):
                return mapping
    raise ValueError(f"{str(tree)[:40]} is not part of a state")


@contextmanager
def wrap_file_errors(path: Path, action: str = "read") -> Iterator[None]:
    """Return a context that turns an error of the file `path` into a `CheckpointError` that names
    it.

    Three kinds of errors stay unchanged, because the file may be undamaged: an `OSError` while
    reading an existing file, a lost connection to another rank, and a lack of memory or file
    descriptors. `action` is "read" or "written".
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
        if _is_unrelated(error, path):
            raise
        is_missing = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
        if isinstance(error, OSError) and action == "read" and not is_missing:
            raise
        cause = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path} cannot be {action}: {cause}") from error


def _is_unrelated(error: Exception, path: Path) -> bool:
    """Return True for a lost connection to another rank, or a lack of memory or file descriptors.

    Such an error does not show that the content of `path` is damaged.
    """
    if isinstance(error, DistError | torch.OutOfMemoryError):
        return True
    text = str(error).replace(str(path), "")  # folders may have any name
    texts = ("gloo", *_SHORTAGES)  # gloo's errors have no class
    return isinstance(error, RuntimeError) and any(each in text for each in texts)


def _load_trainer(
    folder: Path, shapes: Mapping[str, Any], wanted: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Return the trainer's tensors of a checkpoint, by name.

    `shapes` has the dtype and shape of each from the manifest. `wanted` names the tensors to load;
    None loads all. Memory is allocated by the sizes in the files, so a damaged manifest cannot
    exhaust it. Raises ValueError if the sizes differ.
    """
    found: dict[str, list[Any]] = {}
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(key)
                found |= dtypes_and_shapes({key: tensor})
                if wanted is None or key in wanted:
                    tensors[key] = torch.empty_like(tensor)
    if found != dict(shapes):
        raise ValueError(f"the tensors in {TRAINER} differ from those in the manifest")
    if tensors:
        reader = HuggingFaceStorageReader(str(folder))
        with plain_errors():
            load_sharded(tensors, storage_reader=reader, no_dist=True)
    return tensors


def forward_weights(body: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's forward-pass weights, by parameter.

    `body` is the content of its manifest, and `tensors` has the tensors of its files. A weight of
    the trainer is converted to the precision of the forward pass. It is not copied if it has this
    precision.
    """
    return {
        name: tensors[WEIGHTS_PREFIX + name].to(getattr(torch, dtype))
        if dtype
        else tensors[POLICY_PREFIX + name]
        for name, dtype in body["policy"].items()
    }


def is_cast(tensors: Mapping[str, Tensor], name: str, weight: Tensor) -> bool:
    """Return True if `weight` equals, bit for bit, the trainer's weight `name` converted to its
    dtype.

    `tensors` has the trainer's weights, under names with `WEIGHTS_PREFIX`.
    """
    trained = tensors.get(WEIGHTS_PREFIX + name)
    if trained is None or trained.shape != weight.shape:
        return False
    return torch.equal(words(trained.to(weight.dtype)), words(weight.cpu().contiguous()))


def read_back(paths: Iterable[Path], written: Mapping[str, Tensor]) -> bool:
    """Return True if the safetensors files in `paths` have exactly the tensors `written`, bit for
    bit.
    """
    unread = dict(written)
    for path in paths:
        if path.suffix != ".safetensors":
            continue
        for key, read in read_tensors(path):
            tensor = unread.pop(key, None)
            if tensor is None or not _alike(tensor, read):
                return False
            if not torch.equal(words(tensor), words(read)):
                return False
    return not unread


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def _divide(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return, for each tensor, the number of the file in which it is written, from 1."""
    limit = max(MIN_FILE_BYTES, sum(tensor.nbytes for tensor in tensors.values()) // MAX_FILES)
    files: dict[str, int] = {}
    number = 1
    filled = 0
    for key, tensor in tensors.items():
        if filled and filled + tensor.nbytes > limit:
            number += 1
            filled = 0
        files[key] = number
        filled += tensor.nbytes
    return files


def name_dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def dtypes_and_shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    return {key: [name_dtype(tensor), *tensor.shape] for key, tensor in tensors.items()}


def list_files(folder: Path) -> dict[str, Path]:
    paths = sorted(path for path in folder.rglob("*") if not path.is_dir())
    return {str(path.relative_to(folder)): path for path in paths}


def _size_and_checksum(path: Path) -> list[int]:
    crc = 0
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            crc = zlib.crc32(data, crc)
        return [file.tell(), crc]


@contextmanager
def plain_errors() -> Iterator[None]:
    """Return a context that raises the cause of an error of torch's distributed checkpoints
    instead.

    It also suppresses the warning that torch.distributed is not initialised.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled", category=UserWarning
        )
        try:
            yield
        except CheckpointException as error:
            cause, _ = next(iter(error.failures.values()))
            raise cause from None
