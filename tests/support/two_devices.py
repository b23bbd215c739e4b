"""A second device for tests on a machine that has only a CPU.

Within `TwoDevices`, tensors can be moved to `OTHER`. They are tensors of the CPU inside, but, as on
a GPU, an operation with tensors of both devices raises an error.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

OTHER = torch.device("lazy:0")
"""A device of PyTorch that needs no hardware and no further package."""
_COPY_INTO = torch.ops.aten.copy_.default
_COPIES = {torch.ops.aten._to_copy.default, _COPY_INTO}


class OtherTensor(Tensor):
    """A tensor on `OTHER`."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OtherTensor":
        made: OtherTensor = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=OTHER
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


class TwoDevices(TorchDispatchMode):
    """A context in which tensors can be created on `OTHER`, and moved there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


def _compute(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
    there = [isinstance(each, OtherTensor) for each in tensors if each.ndim]
    if func not in _COPIES and any(there) and not all(there):
        raise RuntimeError(f"{func} got tensors of two devices")
    is_other = any(isinstance(each, OtherTensor) for each in tensors)
    if func is _COPY_INTO:
        is_other = isinstance(args[0], OtherTensor)
    if kwargs.get("device") is not None:
        is_other = torch.device(kwargs["device"]) == OTHER
        kwargs = {**kwargs, "device": torch.device("cpu")}
    plain, named = tree_map_only(OtherTensor, lambda each: each.inner, (args, kwargs))
    found = func(*plain, **named)
    if not is_other:
        return found
    if func._schema.name.endswith("_"):
        return args[0]
    return tree_map_only(Tensor, OtherTensor, found)
