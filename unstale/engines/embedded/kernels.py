"""The functions of `kernels.c`, which is compiled once for each machine and each shape of model.

Four of these functions replace twenty operations of torch in each layer.
"""

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from unstale.native import compile_library

SOURCE = Path(__file__).with_name("kernels.c")
RUNS_A_THREAD = 16
"""Smallest number of work items per thread. With fewer items, another thread saves no time."""


class Kernels:
    """The compiled functions of `kernels.c`, as attributes.

    The arguments of a function are ints, floats, and contiguous tensors on the CPU. Other tensors
    raise ValueError. The dtypes of tensors are not checked, so the caller must pass the right ones.
    """

    def __init__(self, source: Path = SOURCE, /, **shape: int) -> None:
        """Compile `source`. `shape` has sizes of the model, which become C macros.

        Raises NotCompiled or OSError, as `compile_library` does.
        """
        macros = tuple(f"-D{name}={value}" for name, value in shape.items())
        self.library = compile_library(source, macros)

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(self.library, name)
        function.restype = None

        def call(*arguments: Tensor | int | float) -> None:
            if function.argtypes is None:
                kinds = {int: ctypes.c_int64, float: ctypes.c_float}
                function.argtypes = [kinds.get(type(each), ctypes.c_void_p) for each in arguments]
            for each in arguments:
                if not isinstance(each, Tensor):
                    continue
                if not each.is_cpu:
                    raise ValueError(f"{name} needs tensors of the CPU, got one of {each.device}")
                if not each.is_contiguous():
                    raise ValueError(
                        f"{name} needs contiguous tensors, got strides {each.stride()} "
                        f"of {list(each.shape)}"
                    )
            function(*[each.data_ptr() if isinstance(each, Tensor) else each for each in arguments])

        setattr(self, name, call)
        return call


def divided(helpers: ThreadPoolExecutor, work: Callable[[int, int], None], count: int) -> None:
    """Divide `range(count)` into equal parts, and call `work(first, last)` for each in its own
    thread.

    There are at most as many threads as torch uses, and each gets about `RUNS_A_THREAD` items or
    more. `work` must release the interpreter lock.
    """
    parts = min(torch.get_num_threads(), -(-count // RUNS_A_THREAD))
    cuts = [count * part // parts for part in range(parts + 1)]
    others = [helpers.submit(work, *cut) for cut in pairwise(cuts[1:])]
    work(*cuts[:2])
    for other in others:
        other.result()
