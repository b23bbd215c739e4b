"""Send weights from the trainer's GPU to the workers of a vLLM server, by vLLM's NCCL transfer.

The trainer and the workers of one server form a group, in which the trainer has rank 0. An HTTP
request makes the workers receive, while a thread of the trainer sends. The request has a time
limit. NCCL has none, so nothing waits for the thread when the run ends.

With several trainer ranks, all weights are gathered before the first one is sent. So the
collectives of the trainer ranks never wait for those of this group.
"""

import asyncio
import base64
import contextlib
import threading
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

PACKET_BYTES = 1 << 28
"""Size in bytes above which a packet of weights is sent.

A packet ends with the tensor with which it exceeds this size, so it may be larger by almost one
tensor. The trainer needs memory for one packet's tensors and their joined copy, and a worker for up
to two packets.
"""


class TransferGroup(Protocol):
    """A communication group of the trainer (rank 0) and all workers of a server.

    Its methods block until they are done. Only `close` may be called by another thread.
    """

    id: str
    """The identifier with which workers join the group. For NCCL it is 128 bytes in base64."""
    device: torch.device
    """The device of the tensors that `broadcast` sends."""

    def join(self, size: int) -> None:
        """Join the group as rank 0. Wait until all `size` members have joined."""
        ...

    def broadcast(self, data: Tensor) -> None:
        """Send the bytes `data` to all workers. Return when its memory may be used again."""
        ...

    def close(self) -> None:
        """Close the group. This ends a `broadcast` that waits for a dead worker.

        A `join` that is in progress may continue to wait. If it succeeds later, it closes the group
        itself.
        """
        ...


MakeGroup = Callable[[], TransferGroup]


class NcclGroup:
    """An NCCL group whose rank 0 is the trainer, on the first GPU of this process."""

    def __init__(self) -> None:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        self.id = base64.b64encode(bytes(NCCLLibrary().ncclGetUniqueId().internal)).decode()
        self.device = torch.device("cuda", 0)
        self._stream = torch.cuda.Stream(self.device)
        self._communicator: Any = None
        self._lock = threading.Lock()
        self._closed = False

    def join(self, size: int) -> None:
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        communicator = uid_init_process_group(
            base64.b64decode(self.id), rank=0, world_size=size, device=self.device.index
        )
        if communicator.disabled:
            raise RuntimeError("vLLM's NCCL is disabled: unset VLLM_DISABLE_PYNCCL")
        with self._lock:
            self._communicator = communicator
            closed = self._closed
        if closed:
            communicator.destroy()
            raise RuntimeError("the group was closed before all members had joined")

    def broadcast(self, data: Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        self._communicator.broadcast(data, src=0, stream=self._stream)
        self._stream.synchronize()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            communicator = self._communicator
        if communicator is not None:
            communicator.destroy()


def nccl_groups() -> MakeGroup:
    """Return a function that makes an NCCL group of the trainer and a server's workers.

    Raises ValueError if this process has no CUDA GPU or no vLLM.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            "engine.transfer = nccl sends weights from a GPU of the trainer, and torch finds no "
            "CUDA GPU here: set engine.transfer = file"
        )
    if find_spec("vllm") is None:
        raise ValueError(
            "engine.transfer = nccl needs vLLM in the environment of the trainer, too: install it "
            "there, or set engine.transfer = file"
        )
    return NcclGroup


def join_request(group: TransferGroup, size: int) -> dict[str, Any]:
    """Return the body of the HTTP request that makes the workers join a group of `size` members."""
    return {
        "init_info": {
            "nccl_unique_id_b64": group.id,
            "rank_offset": 1,
            "world_size": size,
            "packed": True,
            "packed_buffer_size_bytes": PACKET_BYTES,
            "packed_num_buffers": 2,
        }
    }


def update_request(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the body of the HTTP request that makes workers receive `weights` in order."""
    return {
        "update_info": {
            "names": list(weights),
            "dtype_names": [str(each.dtype).removeprefix("torch.") for each in weights.values()],
            "shapes": [list(each.shape) for each in weights.values()],
        }
    }


def send(group: TransferGroup, weights: Mapping[str, Tensor]) -> None:
    """Send weights to the group in packets.

    A packet ends with the tensor with which it exceeds `PACKET_BYTES`.
    """
    packet: list[Tensor] = []
    size = 0
    for tensor in weights.values():
        data = tensor.to(group.device).contiguous().view(-1).view(torch.uint8)
        packet.append(data)
        size += data.numel()
        if size > PACKET_BYTES:
            group.broadcast(torch.cat(packet))
            packet, size = [], 0
    if packet:
        group.broadcast(torch.cat(packet))


def run_in_thread(call: Callable[[], None]) -> "asyncio.Future[None]":
    """Run a function in a new daemon thread. Return a future that is done when the function ends.

    If the function raises an error, the future raises ConnectionError with its text.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    def report(error: str) -> None:
        if future.done():
            return
        if error:
            future.set_exception(ConnectionError(f"the transfer of weights failed: {error}"))
        else:
            future.set_result(None)

    def run() -> None:
        error = "its thread ended"
        try:
            call()
            error = ""
        except (RuntimeError, OSError, ValueError) as raised:
            error = str(raised)
        finally:
            with contextlib.suppress(RuntimeError):  # the event loop may be closed
                loop.call_soon_threadsafe(report, error)

    threading.Thread(target=run, name="transfer", daemon=True).start()
    return future
