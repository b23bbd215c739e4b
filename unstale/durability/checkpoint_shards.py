"""Write a checkpoint from several trainer processes (ranks). Any number of ranks can read it.

Each rank writes its part of the trainer's tensors, in torch's distributed checkpoint format, and a
file with its other tensors. When all files have been read back, the first rank writes the manifest.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from unstale.config.files import flush_to_disk
from unstale.durability.checkpoint_files import (
    MANIFEST,
    POLICY_PREFIX,
    TRAINER,
    WEIGHTS_PREFIX,
    Checkpoint,
    Progress,
    dtypes_and_shapes,
    forward_weights,
    from_json,
    is_cast,
    list_files,
    name_dtype,
    plain_errors,
    read_back,
    state_file,
    to_json,
    verify_file,
    write_manifest,
    write_tensors,
)
from unstale.model.peers import SINGLE_PROCESS, RankGroup
from unstale.model.sharding import is_sharded, local, part_of, zero_rows
from unstale.weights.bits import words
from unstale.weights.store import VersionStore

_FILE_ERRORS = (OSError, SafetensorError, ValueError, LookupError)
_OPTIMIZER = re.compile(rf"/{TRAINER}/optimizer/state/(\d+)/.*")

Layout = Mapping[str, Tensor]
"""The trainer's weights by name, in the optimizer's order. If a weight is divided among the ranks,
its optimizer state is divided in the same way.
"""


def is_divided(body: Mapping[str, Any]) -> bool:
    """Return True if several ranks wrote a checkpoint. `body` is the content of its manifest."""
    return "parts" in body


def write_parts(checkpoint: Checkpoint, folder: Path, peers: RankGroup) -> None:
    """Write a checkpoint into `folder` from several ranks.

    All ranks (`peers`) must call this function, each with its own state. Raises ValueError, on all
    ranks, if the tensors read back differ from those that were written.
    """
    tensors: dict[str, Tensor] = {}
    states = to_json(checkpoint.states, "", tensors)
    trained = {name: tensors.pop(name) for name in list(tensors) if name.startswith(f"/{TRAINER}/")}
    parts = {name: local(tensor) for name, tensor in trained.items()}
    dtypes = {}
    for name, weight in checkpoint.policy.items():
        dtypes[name] = name_dtype(weight) if is_cast(parts, name, weight) else ""
        if not dtypes[name]:
            tensors[POLICY_PREFIX + name] = weight.detach().cpu().contiguous()
    writer = HuggingFaceStorageWriter(str(folder / TRAINER), save_distributed=True)
    with plain_errors():
        save_sharded(dict(trained), storage_writer=writer, process_group=peers.group)
    own = folder / state_file(peers.rank)
    with peers.fail_together(_FILE_ERRORS):
        write_tensors(own, tensors)
        flush_to_disk(own)
    found = {name: torch.zeros_like(tensor) for name, tensor in trained.items()}
    _load(found, folder, peers)
    with peers.fail_together(_FILE_ERRORS):
        same = all(torch.equal(words(local(found[name])), words(parts[name])) for name in parts)
        if not same or not read_back([own], tensors):
            raise ValueError(f"rank {peers.rank}'s part reads back differently: check the disk")
    others = {"states": states, "policy": dtypes}
    written = peers.gather(others)
    with peers.fail_together(_FILE_ERRORS):
        if peers.rank == 0:
            shapes = dtypes_and_shapes(trained)
            own_keys = {"shapes": shapes, "parts": written[1:], "replicas": peers.replicas}
            write_manifest(checkpoint, folder, {**others, **own_keys})


def read_parts(
    folder: Path, body: Mapping[str, Any], layout: Layout, peers: RankGroup
) -> Checkpoint:
    """Read a checkpoint on several ranks, or one that several ranks wrote. Return this rank's
    state.

    All ranks (`peers`) must call this function. `body` is the content of the checkpoint's manifest.
    Raises ValueError, on all ranks, if a file is missing or changed.
    """
    with peers.fail_together(_FILE_ERRORS):
        files = sorted(list_files(folder).keys() - {MANIFEST})
        if files != sorted(body["files"]):
            unexpected = sorted(set(files) ^ body["files"].keys())
            raise ValueError(f"these files are missing or do not belong here: {unexpected}")
        for name in files[peers.rank :: peers.count]:
            verify_file(folder, name, body)
    targets = {name: _target(name, shape, layout) for name, shape in body["shapes"].items()}
    trained = _load(targets, folder, peers)
    others = body.get("parts", [])
    layout_written = (1 + len(others), body.get("replicas", 1))
    with peers.fail_together(_FILE_ERRORS):
        if layout_written == (peers.count, peers.replicas):
            written = body if peers.rank == 0 else others[peers.rank - 1]
            own = load_file(folder / state_file(peers.rank))
            parts = own | {name: local(tensor) for name, tensor in trained.items()}
            policy = forward_weights(written, parts)
            states = from_json(written["states"], own | trained, policy)
        else:
            states, policy = _divided_anew(folder, body, layout)
            trainer = {TRAINER: from_json(_of(body["states"], TRAINER), trained, {})}
            states = {name: state for name, state in states.items() if name != TRAINER} | trainer
    progress = Progress(*from_json(body["progress"], {}, {}))
    return Checkpoint(progress, body["version"], states, policy)


def read_whole_policy(folder: Path, body: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return all forward-pass weights of a checkpoint that several ranks wrote, in a single
    process.

    `body` is the content of its manifest. Raises ValueError if a file was changed.
    """
    for name in body["files"]:
        verify_file(folder, name, body)
    wanted = {
        name: _target(name, shape, {})
        for name, shape in body["shapes"].items()
        if name.startswith(WEIGHTS_PREFIX)
    }
    trained = _load(wanted, folder)
    written = _first_copy(body)
    if all(all(part["policy"].values()) for part in written):
        return forward_weights(body, trained)
    files = [load_file(folder / state_file(rank)) for rank in range(len(written))]
    return {
        name: _whole(name, trained.get(WEIGHTS_PREFIX + name), written, files)
        for name in body["policy"]
    }


def _first_copy(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the entries in the manifest `body` of the ranks that hold the model's first replica.

    The ranks of other replicas wrote the same.
    """
    written = [{"states": body["states"], "policy": body["policy"]}, *body.get("parts", [])]
    return written[: len(written) // body.get("replicas", 1)]


def _whole(
    name: str,
    trained: Tensor | None,
    written: Sequence[Mapping[str, Any]],
    files: Sequence[Mapping[str, Tensor]],
) -> Tensor:
    """Return a whole forward-pass weight, joined from the parts of all ranks.

    `written` and `files` have the manifest entry and the tensors of each rank. A part that equals
    the trainer's weight in the dtype of the forward pass was not written. It is computed here from
    `trained`, the whole weight of the trainer, which is None if the trainer has no weight of this
    name. All other parts are in the ranks' files.
    """
    parts = [
        files[rank][POLICY_PREFIX + name]
        if trained is None or not part["policy"][name]
        else _chunk(trained, rank, len(written)).to(getattr(torch, part["policy"][name]))
        for rank, part in enumerate(written)
    ]
    is_divided = trained is not None and any(part.shape != trained.shape for part in parts)
    return torch.cat(parts) if is_divided else parts[0]


def _load(
    targets: dict[str, Tensor], folder: Path, peers: RankGroup = SINGLE_PROCESS
) -> dict[str, Tensor]:
    """Fill `targets` with the trainer's tensors of a checkpoint, and return it. All `peers` read
    together.
    """
    alone = peers.count == 1
    reader = HuggingFaceStorageReader(str(folder / TRAINER))
    with plain_errors():
        load_sharded(targets, storage_reader=reader, no_dist=alone, process_group=peers.group)
    return targets


def _target(name: str, shape: Sequence[Any], layout: Layout) -> Tensor:
    """Return a tensor of zeros into which the checkpoint's tensor `name` can be read.

    `shape` is its dtype and shape. If it is a weight of `layout` or a part of the optimizer's state
    for this weight, it is divided among the ranks as the weight is. Otherwise it is not divided.
    """
    dtype, size = getattr(torch, shape[0]), list(shape[1:])
    like = layout.get(name.removeprefix(WEIGHTS_PREFIX))
    if of_optimizer := _OPTIMIZER.fullmatch(name):
        number = int(of_optimizer[1])
        like = list(layout.values())[number] if number < len(layout) else None
    if like is not None and is_sharded(like) and size[:1] == list(like.shape[:1]):
        same = list(like.shape) == size  # then also the same mesh, as an optimizer needs it
        return torch.zeros_like(like, dtype=dtype) if same else zero_rows(like, *size[1:]).to(dtype)
    return torch.zeros(size, dtype=dtype)


def _divided_anew(
    folder: Path, body: Mapping[str, Any], layout: Layout
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return this rank's states and forward-pass weights, from a checkpoint of another number of
    ranks.

    This needs memory for all forward-pass weights, and for the states of all ranks that wrote it.
    """
    wholes = read_whole_policy(folder, body)
    states = []
    written = _first_copy(body)
    for rank, part in enumerate(written):
        file = load_file(folder / state_file(rank))
        policy = {
            name: _chunk(whole, rank, len(written))
            if part["policy"][name]
            else file[POLICY_PREFIX + name]
            for name, whole in wholes.items()
        }
        tree = {
            "mapping": [pair for pair in part["states"]["mapping"] if pair[0] != TRAINER],
        }
        states.append(from_json(tree, file, policy))
    own = {name: _own_part(name, whole, layout) for name, whole in wholes.items()}
    joined: dict[str, Any] = _join("", states, wholes, layout)
    return joined, own


def _chunk(whole: Tensor, rank: int, count: int) -> Tensor:
    """Return the part of the weight `whole` that belongs to rank `rank` of `count` ranks."""
    chunks = whole.chunk(count)
    return chunks[rank] if rank < len(chunks) else whole[:0]


def _join(name: str, values: Sequence[Any], wholes: Mapping[str, Tensor], layout: Layout) -> Any:
    """Return this rank's state from `values`, the states of all ranks that wrote the checkpoint.

    A tensor with the name of a weight is each rank's part of it, and is joined and divided again.
    All other values are the same on every rank. `name` is the name of the state.
    """
    first = values[0]
    match first:
        case Tensor() if name in wholes and first.dim() == wholes[name].dim():
            whole = first if first.shape == wholes[name].shape else torch.cat(list(values))
            return _own_part(name, whole, layout)
        case {"shelf": _, "movable": _, "versions": _}:
            return _join_store(values, wholes, layout)
        case Mapping():
            return {
                key: _join(str(key), [value[key] for value in values], wholes, layout)
                for key in first
            }
    return first


def _join_store(
    states: Sequence[Any], wholes: Mapping[str, Tensor], layout: Layout
) -> Mapping[str, Any]:
    """Return the state of this rank's version store, from those of the ranks that wrote the
    checkpoint.

    A version store keeps past versions of the weights. On each rank it has that rank's part of
    them.
    """
    stores = []
    for state in states:
        stores.append(VersionStore())
        stores[-1].restore(state)

    def own(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {
            name: _join(name, [part[name] for part in parts], wholes, layout).clone()
            for name in parts[0]
        }

    joined = VersionStore(own([state["movable"] for state in states]))
    for version in states[0]["versions"]:
        joined.put(version, own([store.tensors(version) for store in stores]))
    return joined.state()


def _own_part(name: str, whole: Tensor, layout: Layout) -> Tensor:
    return part_of(whole, layout[name]) if name in layout else whole


def _of(tree: Mapping[str, Any], name: str) -> Any:
    return next(value for key, value in tree["mapping"] if key == name)
