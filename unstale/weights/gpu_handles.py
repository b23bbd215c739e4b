"""Handles of tensors on a GPU, by which another process of this machine reads them in place.

This is CUDA's communication between processes (IPC). The other process must see the same GPUs. The
handles are JSON, because nothing is unpickled that another process sent.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Handle = dict[str, Any]


def handles_of(tensors: Mapping[str, Tensor]) -> list[Handle]:
    """Return the handles of tensors on GPUs, after all work on them.

    The tensors must live, and stay unchanged, until the other process has dropped its own.
    """
    for device in {tensor.device for tensor in tensors.values()}:
        torch.cuda.synchronize(device)
    torch.cuda.ipc_collect()  # frees what the other process has dropped since
    return [_handle(name, tensor.detach()) for name, tensor in tensors.items()]


def open_handles(handles: Sequence[Handle]) -> dict[str, Tensor]:
    """Return the tensors of another process by name, in its memory.

    Raises ValueError if CUDA cannot open that memory.
    """
    try:
        return {handle["name"]: _opened(handle) for handle in handles}
    except RuntimeError as error:
        raise ValueError(
            "the engine cannot read weights in the memory of the trainer's GPU. Both processes "
            f"need the same GPUs, and CUDA's communication between processes: {error}"
        ) from error


def _handle(name: str, tensor: Tensor) -> Handle:
    storage: Any = tensor.untyped_storage()
    device, memory, size, offset, counter, place, event, waits = storage._share_cuda_()
    return {
        "name": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "start": tensor.storage_offset(),
        "device": device,
        "memory": memory.hex(),
        "bytes": size,
        "offset": offset,
        "counter": counter.hex(),
        "place": place,
        "event": event.hex(),
        "waits": waits,
    }


def _opened(handle: Handle) -> Tensor:
    torch.cuda.init()
    storage = torch.UntypedStorage._new_shared_cuda(
        handle["device"],
        bytes.fromhex(handle["memory"]),
        handle["bytes"],
        handle["offset"],
        bytes.fromhex(handle["counter"]),
        handle["place"],
        bytes.fromhex(handle["event"]),
        handle["waits"],
    )
    empty = torch.empty(0, dtype=getattr(torch, handle["dtype"]), device=storage.device)
    return empty.set_(storage, handle["start"], handle["shape"], handle["stride"])
