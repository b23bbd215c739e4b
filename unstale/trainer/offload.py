"""Tensors of a device whose values are in main memory for most of the time."""

from typing import Any

import torch
from torch import Tensor, UntypedStorage

from unstale.model.sharding import host_copy, local


class MainMemory:
    """Values, in main memory, of tensors whose memory on the device was freed.

    Such a tensor keeps its shape, its device, its division among ranks and its gradient. It must
    not be read until `bring` is called. It must not share its memory with another tensor.
    """

    def __init__(self) -> None:
        self._placed: dict[int, tuple[Tensor, Tensor]] = {}
        """The tensors and their copies in main memory, by the address of the tensor's storage."""

    @torch.no_grad()
    def put(self, tensor: Tensor) -> None:
        """Copy a tensor's values to main memory, and free its memory on the device.

        The copy may be incomplete until `wait` returns.
        """
        storage = _storage(tensor)
        if storage._cdata in self._placed:
            _, host = self._placed[storage._cdata]
            local(host).copy_(local(tensor), non_blocking=True)
        else:
            self._placed[storage._cdata] = (tensor, host_copy(tensor, pinned=True))
        storage.resize_(0)

    @torch.no_grad()
    def bring(self, tensor: Tensor) -> None:
        """Allocate a tensor's memory on its device again, and copy its values back."""
        _, host = self._placed[_storage(tensor)._cdata]
        _storage(tensor).resize_(local(host).nbytes)
        local(tensor).copy_(local(host), non_blocking=True)

    def forget(self, tensor: Tensor) -> None:
        """Free the main-memory copy of a tensor that is no longer used."""
        self._placed.pop(_storage(tensor)._cdata, None)

    def numbers(self, value: Any) -> Any:
        """Return the copy in main memory of a tensor for which `put` was called.

        Any other value is returned unchanged.
        """
        if not isinstance(value, Tensor) or _storage(value)._cdata not in self._placed:
            return value
        return self._placed[_storage(value)._cdata][1]

    def wait(self) -> None:
        """Wait until all copies to main memory are complete."""
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()


def _storage(tensor: Tensor) -> UntypedStorage:
    return local(tensor.detach()).untyped_storage()
