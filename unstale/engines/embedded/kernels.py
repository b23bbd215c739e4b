"""The functions of `kernels.c`, which is compiled once for each machine and model shape.

In each layer of a model, four of its functions replace twenty operations of torch.
"""

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("kernels.c")
RUNS_A_THREAD = 16
"""Number of runs of tokens from which on one more thread is faster."""
_FLAGS = (
    "-O3",
    "-march=native",
    "-fPIC",
    "-shared",
    "-std=gnu11",
    "-fno-math-errno",
    "-fno-trapping-math",
)


class Kernels:
    """The compiled functions of `kernels.c`, as attributes.

    Their arguments are contiguous tensors, ints and floats.
    """

    def __init__(self, **shape: int) -> None:
        """Compile `kernels.c` with the sizes of a model as macros.

        Raises OSError with the compiler's first error.
        """
        self._library = _loaded(tuple(f"-D{name}={value}" for name, value in shape.items()))

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(self._library, name)
        function.restype = None

        def call(*arguments: Tensor | int | float) -> None:
            if function.argtypes is None:
                kinds = {int: ctypes.c_int64, float: ctypes.c_float}
                function.argtypes = [kinds.get(type(each), ctypes.c_void_p) for each in arguments]
            for each in arguments:
                if isinstance(each, Tensor) and not each.is_contiguous():
                    raise ValueError(
                        f"{name} needs contiguous tensors, got strides {each.stride()} "
                        f"of {list(each.shape)}"
                    )
            function(*[each.data_ptr() if isinstance(each, Tensor) else each for each in arguments])

        setattr(self, name, call)
        return call


def divided(helpers: ThreadPoolExecutor, work: Callable[[int, int], None], count: int) -> None:
    """Call `work(first, last)` for equal parts of `range(count)`, on torch's number of threads.

    `work` must release the interpreter lock.
    """
    parts = min(torch.get_num_threads(), -(-count // RUNS_A_THREAD))
    cuts = [count * part // parts for part in range(parts + 1)]
    others = [helpers.submit(work, *cut) for cut in pairwise(cuts[1:])]
    work(*cuts[:2])
    for other in others:
        other.result()


@cache
def _loaded(shape: tuple[str, ...]) -> ctypes.CDLL:
    """Load the compiled library from the user's cache folder, or compile it.

    Its file name is a hash of the source, the flags, and the macros that the compiler defines for
    this CPU.
    """
    compiler = (
        shlex.split(os.environ.get("CC", ""))
        or [*filter(None, map(shutil.which, ("cc", "gcc", "clang")))][:1]
    )
    if not compiler:
        raise FileNotFoundError("no C compiler: CC, cc, gcc or clang")
    macros = _run_compiler([*compiler, *_FLAGS, "-dM", "-E", "-x", "c", os.devnull])
    inputs = "\0".join([SOURCE.read_text(), macros, *_FLAGS, *shape])
    name = f"kernels-{hashlib.sha256(inputs.encode()).hexdigest()[:24]}.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "unstale")
    with suppress(OSError):  # the file is missing or damaged
        return ctypes.CDLL(str(folder / name))
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        scratch = tempfile.TemporaryDirectory(dir=folder)
    except OSError:  # there is no cache folder: compile for this process alone
        scratch = tempfile.TemporaryDirectory()
    with scratch as place:
        made = Path(place, name)
        _run_compiler([*compiler, *_FLAGS, *shape, str(SOURCE), "-o", str(made), "-lm"])
        library = ctypes.CDLL(str(made))
        if made.parent.parent == folder:
            # atomic, since several processes may compile it at the same time
            made.replace(folder / name)
        return library


def _run_compiler(command: Sequence[str]) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        named = [line for line in done.stderr.splitlines() if "error" in line]
        raise OSError(*named[:1] or [f"{command[0]} ended with {done.returncode}"])
    return done.stdout
