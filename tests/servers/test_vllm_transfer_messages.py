"""Test weight transfers against vLLM's own code, without a GPU (`make test-engines`).

vLLM parses the messages, its workers read the packets, and the functions that the trainer calls
exist with these arguments.
"""

import inspect
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from unstale.engines import vllm_transfer
from unstale.engines.vllm_transfer import join_request, send, update_request
from unstale.testing import tiny_policy

pytest.importorskip("vllm")


class Packets:
    """A group that keeps what it sends."""

    id = "A" * 170 + "A="
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def join(self, size: int) -> None: ...

    def broadcast(self, data: Tensor, src: int = 0) -> None:
        self.sent.append(data)

    def close(self) -> None: ...


def test_vllm_parses_the_messages() -> None:
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo
    from vllm.entrypoints.rl.online import api_router

    joined = NCCLWeightTransferInitInfo(**join_request(Packets(), 3)["init_info"])
    assert joined.nccl_unique_id_bytes == bytes(128)
    assert (joined.packed, joined.rank_offset, joined.world_size) == (True, 1, 3)
    weights = tiny_policy(dtype="bfloat16").weights()
    update = NCCLWeightTransferUpdateInfo(**update_request(weights)["update_info"])
    assert {getattr(torch, name) for name in update.dtype_names} == {torch.bfloat16}
    paths = {route.path: route.methods for route in api_router.router.routes}
    for name in ("init", "shutdown"):
        assert paths[f"/{name}_weight_transfer_engine"] == {"POST"}
    for name in ("start_weight_update", "update_weights", "finish_weight_update"):
        assert paths[f"/{name}"] == {"POST"}
    assert paths["/get_world_size"] == {"GET"}
    finish = inspect.signature(api_router.finish_weight_update).parameters
    assert "weight_version" in finish


def test_the_functions_of_the_trainer_exist() -> None:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary, ncclUniqueId
    from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

    inspect.signature(uid_init_process_group).bind(bytes(128), rank=0, world_size=2, device=0)
    inspect.signature(PyNcclCommunicator.broadcast).bind(None, None, src=0, stream=None)
    inspect.signature(PyNcclCommunicator.destroy).bind(None)
    inspect.signature(NCCLLibrary.ncclGetUniqueId).bind(None)
    unique = ncclUniqueId()
    unique.internal[0] = -1
    assert bytes(unique.internal) == b"\xff" + bytes(127)


def test_vllms_workers_read_the_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer import packed_tensor

    weights, group = tiny_policy().weights(), Packets()
    size = 20_000
    monkeypatch.setattr(vllm_transfer, "PACKET_BYTES", size)
    send(group, weights)
    assert len(group.sent) > 2
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, count: (stream,) * count)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    received: dict[str, Tensor] = {}

    class Worker:
        def broadcast(self, data: Tensor, src: int) -> None:
            data.copy_(group.sent.pop(0))

    packed_tensor.packed_nccl_broadcast_consumer(
        iterator=((name, (list(each.shape), each.dtype)) for name, each in weights.items()),
        group=Worker(),
        src=0,
        post_unpack_func=received.update,
        buffer_size_bytes=size,
        num_buffers=2,
        device="cpu",
    )
    assert not group.sent and received.keys() == weights.keys()
    assert all(torch.equal(received[name], each) for name, each in weights.items())
