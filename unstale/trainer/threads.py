"""Threads for long computations, so that the asyncio event loop is not blocked."""

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar, TypeVarTuple, Unpack

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")


class WorkerThread(Protocol):
    """A thread that runs functions one after the other, in the order of the calls."""

    async def run(self, function: Callable[[Unpack[_Args]], _T], *arguments: *_Args) -> _T:
        """Run `function` in the thread. Return its result, or raise its error."""
        ...

    def close(self) -> None:
        """Stop the thread after the function that it runs now."""
        ...


class LocalThread:
    """A worker thread in this process."""

    def __init__(self, name: str, initializer: Callable[[], object] | None = None) -> None:
        """Start the thread. It runs `initializer` first."""
        self._executor = ThreadPoolExecutor(1, name, initializer)

    async def run(self, function: Callable[[Unpack[_Args]], _T], *arguments: *_Args) -> _T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, function, *arguments)

    def close(self) -> None:
        self._executor.shutdown()


def return_freed_memory() -> None:
    """Return freed memory to the system. Takes milliseconds.

    The C library of Linux keeps it in pieces that later blocks often do not fit: 4 bytes a weight.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
