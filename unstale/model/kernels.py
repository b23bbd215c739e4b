"""The functions of `kernels.c`: parts of a decoder layer, forward and backward, on CPUs.

They need float32 tensors whose widths are multiples of `WIDTH`. They use as many threads as torch,
and the threads of torch's OpenMP library.
"""

import ctypes
import os
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from unstale.native import NotCompiled, compile_library

SOURCE = Path(__file__).with_name("kernels.c")

WIDTH = 16
"""Divisor of the widths of all tensors."""

ROWS = 64
"""Number of rows of one piece of work, as in `kernels.c`."""

BLOCK = 64
"""Number of queries of one block of attention, as in `kernels.c`."""

Argument = Tensor | int | float | None


class Kernels:
    """The compiled functions of `kernels.c`, as attributes.

    Their arguments are numbers and float32 tensors, or int64 tensors where they are indices. A
    tensor may be a slice of the columns of a contiguous one.
    """

    def __init__(self) -> None:
        """Raise what `compile_library` raises."""
        self._library = compile_library(SOURCE)
        self._parallel = _openmp()

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(self._library, name)
        function.restype = None

        def call(*arguments: Argument) -> None:
            if function.argtypes is None:
                kinds = {int: ctypes.c_int64, float: ctypes.c_float}
                types = [kinds.get(type(each), ctypes.c_void_p) for each in arguments]
                function.argtypes = [ctypes.c_void_p, ctypes.c_int64, *types]
            pointers = [each.data_ptr() if isinstance(each, Tensor) else each for each in arguments]
            function(self._parallel, torch.get_num_threads(), *pointers)

        setattr(self, name, call)
        return call


def _openmp() -> int | None:
    """Return the address of the function with which torch's OpenMP library starts threads.

    None if torch uses another library. The kernels then run in one thread.
    """
    folder = Path(torch.__file__).parent
    for path in [*folder.glob("lib/libgomp*"), *folder.parent.glob("torch.libs/libgomp*")]:
        try:
            library = ctypes.CDLL(str(path), ctypes.DEFAULT_MODE | os.RTLD_NOLOAD)
        except OSError:
            continue
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
    return None


@cache
def kernels() -> Kernels | None:
    """Return the compiled functions. Without a compiler, warn and return None."""
    try:
        return Kernels()
    except NotCompiled as error:
        warnings.warn(
            f"training on the CPU is slower, because {SOURCE.name} does not compile: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def fits(*tensors: Tensor) -> bool:
    """Return True if the kernels can run on tensors of these devices, dtypes and widths."""
    return (
        all(
            each.device.type == "cpu"
            and each.dtype == torch.float32
            and each.shape[-1] % WIDTH == 0
            for each in tensors
        )
        and not torch.compiler.is_compiling()
        and kernels() is not None
    )


def pieces(rows: int) -> int:
    """Return the number of pieces of work into which the kernels divide `rows`."""
    return -(-rows // ROWS)
