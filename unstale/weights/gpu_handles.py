"""Handles of tensors on a GPU, with which another process of this machine reads them in place.

The handles are those of CUDA's communication between processes (IPC). The other process must see
the same GPUs. Handles are JSON, because pickled data from another process could run code.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

Handle = dict[str, Any]
"""The data with which another process opens a tensor's GPU memory: the tensor's name, dtype, shape
and strides, and what torch needs (the device, the allocation's handle, size and offset in bytes,
and the counter of its users).
"""

_INSTEAD = "set engine.transfer = file"


def handles_of(tensors: Mapping[str, Tensor]) -> list[Handle]:
    """Wait for all GPU work on the tensors, and return their handles.

    The tensors must stay unchanged until the other process has released its views. Raises
    RuntimeError if CUDA cannot share their memory.
    """
    for device in {tensor.device for tensor in tensors.values()}:
        torch.cuda.synchronize(device)
    torch.cuda.ipc_collect()  # frees the counters of views that other processes have released
    try:
        return [_describe(name, tensor.detach()) for name, tensor in tensors.items()]
    except RuntimeError as error:
        raise RuntimeError(
            f"the memory of the trainer's GPU cannot be shared with the engine: {_INSTEAD}: {error}"
        ) from error


def open_handles(handles: Sequence[Handle]) -> dict[str, Tensor]:
    """Return views of another process's tensors, by name. Nothing is copied.

    Raises ValueError if CUDA cannot open the memory of that process.
    """
    torch.cuda.init()
    try:
        return {handle["name"]: _open(handle) for handle in handles}
    except RuntimeError as error:
        raise ValueError(
            "the engine cannot read weights in the memory of the trainer's GPU. Both processes "
            f"need the same GPUs, and CUDA's communication between processes: {_INSTEAD}: {error}"
        ) from error


def _describe(name: str, tensor: Tensor) -> Handle:
    # torch changes a storage that it shares, until the storage is freed. So another storage of the
    # same memory is shared, which is freed here.
    storage: Any = from_dlpack(tensor).untyped_storage()
    device, memory, size, offset, counter, place, _, _ = storage._share_cuda_()
    return {
        "name": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "device": device,
        "memory": memory.hex(),
        "bytes": size,
        "offset": offset,
        "counter": counter.hex(),
        "place": place,
    }


def _open(handle: Handle) -> Tensor:
    storage = torch.UntypedStorage._new_shared_cuda(
        handle["device"],
        bytes.fromhex(handle["memory"]),
        handle["bytes"],
        handle["offset"],
        bytes.fromhex(handle["counter"]),
        handle["place"],
        b"",  # no event to wait for, because the other process has waited
        False,
    )
    empty = torch.empty(0, dtype=getattr(torch, handle["dtype"]), device=storage.device)
    return empty.set_(storage, 0, handle["shape"], handle["stride"])
