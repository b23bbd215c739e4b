"""Compiled functions for parts of a decoder layer, forward and backward.

On CPUs these are the functions of `kernels.c`. They need float32 tensors whose widths are multiples
of `WIDTH`. They run in torch's number of threads, started by torch's OpenMP library. If this
library is not found, they use one thread and warn. On GPUs they are the functions of `gpu_kernels`.
"""

import ctypes
import os
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from subprocess import CalledProcessError
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unstale.native import NotCompiled, compile_library

if TYPE_CHECKING:
    from unstale.model.gpu_kernels import GpuKernels

SOURCE = Path(__file__).with_name("kernels.c")

WIDTH = 16
"""The last dimension of each tensor must be a multiple of this number."""

ROWS = 64
"""Number of rows that a thread processes at once. It must equal the number in `kernels.c`."""

BLOCK = 64
"""Number of queries in one block of attention. It must equal the number in `kernels.c`."""

_OPENMP = ("libgomp.so.1", "libiomp5.so", "libomp.so")
"""Names of OpenMP libraries that torch may use if its build includes none."""

Argument = Tensor | int | float | None


class Kernels:
    """The compiled functions of a C file, by default `kernels.c`, as attributes.

    The arguments of a function are numbers, float32 tensors, and int64 tensors of indices. Nothing
    is checked. A tensor may be a slice of the columns of a contiguous tensor.
    """

    def __init__(self, source: Path = SOURCE) -> None:
        """Compile a C file.

        Raises NotCompiled if this fails, and OSError if memory, files or processes are exhausted.
        """
        self.library = compile_library(source)
        self._parallel = _openmp()

    def pieces(self, rows: int) -> int:
        """Return the number of parts, of up to `ROWS` rows each, into which kernels divide `rows`
        rows.
        """
        return -(-rows // ROWS)

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(self.library, name)
        function.restype = None

        def call(*arguments: Argument) -> None:
            if function.argtypes is None:
                kinds = {int: ctypes.c_int64, float: ctypes.c_float}
                types = [kinds.get(type(each), ctypes.c_void_p) for each in arguments]
                function.argtypes = [ctypes.c_void_p, ctypes.c_int64, *types]
            pointers = [each.data_ptr() if isinstance(each, Tensor) else each for each in arguments]
            threads = torch.get_num_threads()
            if threads > 1 and self._parallel is None:
                _warn_of_one_thread()
            function(self._parallel, threads, *pointers)

        setattr(self, name, call)
        return call


def _openmp() -> int | None:
    """Return the address of the function by which torch's OpenMP library starts threads.

    Return None if no known library is found. The kernels then run in one thread.
    """
    folder = Path(torch.__file__).parent
    own = [*folder.glob("lib/libgomp*"), *folder.parent.glob("torch.libs/libgomp*")]
    for name in [*map(str, own), *_OPENMP]:
        try:
            library = ctypes.CDLL(name, ctypes.DEFAULT_MODE | os.RTLD_NOLOAD)
        except OSError:  # this process has not loaded it, so torch does not use it
            continue
        if hasattr(library, "GOMP_parallel"):
            return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
    return None


@cache
def _warn_of_one_thread() -> None:
    warnings.warn(
        f"training on the CPU is slower, because {SOURCE.name} computes in one thread: none of "
        f"{', '.join(_OPENMP)} is loaded, with which it would start more. Install torch from PyPI",
        RuntimeWarning,
        stacklevel=3,
    )


@cache
def kernels(source: Path = SOURCE) -> Kernels | None:
    """Return the compiled functions of a C file. Without a compiler, warn and return None."""
    try:
        return Kernels(source)
    except NotCompiled as error:
        warnings.warn(
            f"training on the CPU is slower, because {source.name} does not compile: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


@cache
def gpu_kernels() -> "GpuKernels | None":
    """Return the kernels for GPUs. If Triton is missing or fails, warn and return None."""
    try:
        from unstale.model.gpu_kernels import GpuKernels

        found = GpuKernels()
        both = torch.zeros(1, 2, device="cuda")
        found.swiglu(both, torch.empty_like(both), 1, 1)
    except (ImportError, RuntimeError, OSError, CalledProcessError) as error:
        warnings.warn(
            "models on the GPU are slower, because Triton is not installed or cannot compile "
            f"kernels, for which it needs a C compiler: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return found


def kernels_for(x: Tensor) -> "Kernels | GpuKernels":
    """Return the compiled functions for the device of a tensor.

    Call this only if `fits` returns True for the tensor.
    """
    found = gpu_kernels() if x.is_cuda else kernels()
    assert found
    return found


def fits(*tensors: Tensor) -> bool:
    """Return True if the compiled kernels support the devices, dtypes and widths of all tensors.

    The width is the last dimension. Return False while torch.compile traces the caller.
    """
    if torch.compiler.is_compiling():
        return False
    if tensors[0].is_cuda:
        return fits_gpu(*tensors)
    return (
        all(
            each.device.type == "cpu"
            and each.dtype == torch.float32
            and each.shape[-1] % WIDTH == 0
            for each in tensors
        )
        and kernels() is not None
    )


def fits_gpu(*tensors: Tensor) -> bool:
    """Return True if the GPU kernels support the devices and dtypes of all tensors."""
    dtype = tensors[0].dtype
    return (
        dtype in (torch.bfloat16, torch.float16, torch.float32)
        and all(each.is_cuda and each.dtype == dtype for each in tensors)
        and gpu_kernels() is not None
    )
