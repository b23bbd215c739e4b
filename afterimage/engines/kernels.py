"""`kernels.c`, compiled once for a machine and a model's shape, and called with tensors.

Between the matrix products of a decoding step lie some twenty small operations a layer; as torch calls they cost more
than the products. They are four functions here. Whoever has no C compiler decodes by torch, several times slower.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from torch import Tensor

SOURCE = Path(__file__).with_name("kernels.c")
_FLAGS = ("-O3", "-march=native", "-fPIC", "-shared", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math")


class Kernels:
    """The functions of `kernels.c` by name. Arguments are tensors in one piece, whole numbers and floats."""

    def __init__(self, **shape: int) -> None:
        """Raises OSError, or CalledProcessError with the compiler's words in `stderr`."""
        self._library = ctypes.CDLL(str(_compiled(tuple(f"-D{name}={value}" for name, value in shape.items()))))

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(self._library, name)
        function.restype = None

        def call(*arguments: Tensor | int | float) -> None:
            if function.argtypes is None:
                kinds = {int: ctypes.c_int64, float: ctypes.c_float}
                function.argtypes = [kinds.get(type(each), ctypes.c_void_p) for each in arguments]
            function(*[_address(each) if isinstance(each, Tensor) else each for each in arguments])

        setattr(self, name, call)
        return call


def _address(tensor: Tensor) -> int:
    if not tensor.is_contiguous():
        raise ValueError(f"a kernel wants {list(tensor.shape)} in one piece, not with strides {tensor.stride()}")
    return tensor.data_ptr()


@cache
def _compiled(shape: tuple[str, ...]) -> Path:
    """The library for this shape: from the user's cache if it was made for this source, compiler and processor."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        raise FileNotFoundError("no C compiler: neither CC nor cc, gcc or clang on the PATH")
    macros = [compiler, *_FLAGS, "-dM", "-E", "-x", "c", os.devnull]  # of this compiler for this processor
    target = subprocess.run(macros, check=True, capture_output=True).stdout
    name = hashlib.sha256(b"\0".join([SOURCE.read_bytes(), target, *map(str.encode, (*_FLAGS, *shape))])).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "afterimage"
    library = folder / f"kernels-{name[:24]}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        scratch = tempfile.mkdtemp(dir=folder)
    except OSError:  # compiled for this process alone
        scratch = tempfile.mkdtemp(prefix="afterimage-")
        library = Path(scratch) / library.name
    made = Path(scratch) / "made.so"
    try:
        command = [compiler, *_FLAGS, *shape, str(SOURCE), "-o", str(made), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True)
        made.replace(library)  # whole, even if several compile it at once
    finally:
        if library.parent == folder:
            shutil.rmtree(scratch)
    return library
