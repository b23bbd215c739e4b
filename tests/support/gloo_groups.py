"""Groups of a trainer and the workers of a fake vLLM server, over gloo in place of NCCL.

The workers follow vLLM 0.32's distributed/weight_transfer: nccl_engine and packed_tensor.
"""

import base64
import datetime
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from tests.support.waits import LIMIT_S

_TIMEOUT = datetime.timedelta(seconds=LIMIT_S)


def _gloo(file: str, rank: int, size: int) -> Any:
    """Join a group on loopback, whose members meet in a file."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = _TIMEOUT
    return dist.ProcessGroupGloo(FileStore(file, size), rank, size, options)


def _broadcast(group: Any, data: Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([data], options).wait()


class GlooGroup:
    """The trainer's side, a `TransferGroup`. Its id contains the file by which all members meet."""

    device = torch.device("cpu")

    def __init__(self, file: Path) -> None:
        self.id = base64.b64encode(str(file).encode()).decode()
        self.packets: list[int] = []
        """Bytes of each packet that was sent."""
        self.closed = threading.Event()
        self._group: Any = None

    def join(self, size: int) -> None:
        file = base64.b64decode(self.id).decode()
        while not Path(file + ".workers").exists():
            if self.closed.wait(0.01):
                raise RuntimeError("the group was closed")
        self._group = _gloo(file, 0, size)

    def broadcast(self, data: Tensor) -> None:
        self.packets.append(data.numel())
        _broadcast(self._group, data)

    def close(self) -> None:
        self.closed.set()
        if self._group is not None:
            self._group.abort()


class GlooWorkers:
    """The workers of a fake server. All of them must receive the same weights."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self.joined = 0
        """The number of groups that the workers joined."""
        self.on_packet: Callable[[], None] = lambda: None
        """Called before each packet is received."""
        self.refusals = 0
        """Number of times that the workers refuse to join a group."""
        self._lock = threading.Lock()
        """Held while the workers compute: they answer one request after the other."""
        self._groups: list[Any] = []
        self._limit = 0
        self._active = False
        self._received: dict[str, Tensor] = {}

    def join(self, info: Mapping[str, Any]) -> None:
        """Join a group, as `init_info` of the request says."""
        offset, size = info["rank_offset"], info["world_size"]
        assert info["packed"] and info["packed_num_buffers"] and size == self.count + offset
        if self.refusals:
            self.refusals -= 1
            raise RuntimeError("no such group")
        file = base64.b64decode(info["nccl_unique_id_b64"], validate=True).decode()
        Path(file + ".workers").touch()  # gloo cannot be interrupted while it waits for others
        self._limit = info["packed_buffer_size_bytes"]
        with ThreadPoolExecutor(self.count) as threads:
            self._groups = [*threads.map(lambda rank: _gloo(file, rank, size), range(offset, size))]
        self.joined += 1

    def start(self) -> None:
        if self._active:
            raise RuntimeError("start_weight_update called while a weight update is active")
        self._active = True
        self._received = {}

    def receive(
        self, names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> None:
        if not self._active or not self._groups:
            raise RuntimeError("start_weight_update must be called before update_weights")
        packet: list[tuple[str, torch.dtype, Sequence[int]]] = []
        size = 0
        self._lock.acquire()
        try:
            for name, dtype_name, shape in zip(names, dtype_names, shapes, strict=True):
                dtype = getattr(torch, dtype_name)
                packet.append((name, dtype, shape))
                size += math.prod(shape) * dtype.itemsize
                if size > self._limit:
                    self._receive(packet, size)
                    packet, size = [], 0
            if packet:
                self._receive(packet, size)
        except BaseException:
            self._active = False
            raise
        finally:
            self._lock.release()

    def _receive(self, packet: Sequence[tuple[str, torch.dtype, Sequence[int]]], size: int) -> None:
        self.on_packet()
        copies = [torch.empty(size, dtype=torch.uint8) for _ in self._groups]
        with ThreadPoolExecutor(self.count) as threads:
            [*threads.map(_broadcast, self._groups, copies)]
        assert all(torch.equal(copies[0], copy) for copy in copies)
        sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in packet]
        for (name, dtype, shape), data in zip(packet, copies[0].split(sizes), strict=True):
            self._received[name] = data.view(dtype).view(tuple(shape))

    def finish(self) -> dict[str, Tensor]:
        with self._lock:  # waits for `receive`
            pass
        if not self._active:
            raise RuntimeError("finish_weight_update called without start_weight_update")
        self._active = False
        return self._received

    def leave(self) -> None:
        if self._active:
            raise RuntimeError("Cannot release a trainer connection during a weight update")
        self._groups = []

    def die(self) -> None:
        """Break the connections, as after SIGKILL."""
        for group in self._groups:
            group.abort()
