"""Compilation of this package's C code, once for each machine, and loading of the result."""

import ctypes
import errno
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

_FLAGS = (
    "-O3",
    "-march=native",
    "-fPIC",
    "-shared",
    "-std=gnu11",
    "-fno-math-errno",
    "-fno-trapping-math",
)

SHARED = Path(__file__).parent
"""The folder of the headers that C files of several packages include."""

_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM}


class NotCompiled(Exception):
    """Error: C code of this package cannot be compiled on this machine.

    The text gives the reason.
    """


@cache
def compile_library(source: Path, macros: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Load the compiled library of a C file from the user's cache folder, or compile it.

    `macros` are arguments of the compiler, such as `-DNAME=1`. The library's file name contains a
    hash of the C files, the flags, and the macros that the compiler defines for this CPU.

    Raises NotCompiled if there is no compiler or compiling fails, with the first error as its text.
    Raises OSError if files, processes or memory are exhausted. Callers should not continue with
    slower code then, because the run would soon fail for the same reason.
    """
    try:
        return _compiled(source, macros)
    except OSError as error:
        if error.errno in _SHORTAGES:
            raise
        raise NotCompiled(str(error)) from error


def _compiled(source: Path, macros: tuple[str, ...]) -> ctypes.CDLL:
    compiler = (
        shlex.split(os.environ.get("CC", ""))
        or [*filter(None, map(shutil.which, ("cc", "gcc", "clang")))][:1]
    )
    if not compiler:
        raise FileNotFoundError("no C compiler: CC, cc, gcc or clang")
    cpu = _run_compiler([*compiler, *_FLAGS, "-dM", "-E", "-x", "c", os.devnull])
    near = [*sorted(source.parent.glob("*.[ch]")), *sorted(SHARED.glob("*.h"))]
    inputs = "\0".join([source.name, *(path.read_text() for path in near), cpu, *_FLAGS, *macros])
    name = f"{source.stem}-{hashlib.sha256(inputs.encode()).hexdigest()[:24]}.so"
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
        arguments = [*macros, f"-I{SHARED}", str(source), "-o", str(made), "-lm"]
        _run_compiler([*compiler, *_FLAGS, *arguments])
        library = ctypes.CDLL(str(made))
        if made.parent.parent == folder:
            # atomic, since several processes may compile it at the same time
            made.replace(folder / name)
        return library


def _run_compiler(command: Sequence[str]) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        named = [line for line in done.stderr.splitlines() if "error: " in line]
        raise OSError(*named[:1] or [f"{command[0]} ended with {done.returncode}"])
    return done.stdout
