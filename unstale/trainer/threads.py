"""Threads for long computations, so that the asyncio event loop is not blocked."""

import asyncio
import ctypes
import gc
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar, TypeVarTuple, Unpack

import torch

from unstale.config import RunConfig
from unstale.model.forward import before_layer
from unstale.weights.child_process import cores

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")


class WorkerThread(Protocol):
    """A thread that runs functions one after the other, in the order of the calls."""

    async def run(self, function: Callable[[Unpack[_Args]], _T], *arguments: *_Args) -> _T:
        """Run `function` in the thread. Return its result, or raise its error."""
        ...

    def close(self) -> None:
        """Stop the thread when the function that it is running has returned."""
        ...


class LocalThread:
    """A worker thread in this process."""

    def __init__(self, name: str, before: Callable[[], object] = lambda: None) -> None:
        """Create the thread.

        `before` is called in the thread before each function, and before each layer of a model that
        the function runs.
        """
        self._executor = ThreadPoolExecutor(1, name, before_layer.set, (before,))
        self._before = before

    async def run(self, function: Callable[[Unpack[_Args]], _T], *arguments: *_Args) -> _T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._call, function, *arguments)

    def _call(self, function: Callable[[Unpack[_Args]], _T], *arguments: *_Args) -> _T:
        self._before()
        return function(*arguments)

    def close(self) -> None:
        self._executor.shutdown()


class FreedMemory:
    """A policy for returning freed memory of this process to the operating system.

    The C library of Linux keeps freed memory in blocks that later allocations often do not fit
    into: 4 bytes per weight of the model, and more with each step. Returning it takes milliseconds,
    but the next pass must allocate its memory again, which takes a tenth of a step in the demo. So
    freed memory is returned only when the process has grown by the factor `GROWTH` since the last
    time.

    Errors of environments and clients form reference cycles with the frames that they passed, and
    so with messages and replies. Python would almost never collect such cycles once they are old.
    """

    GROWTH = 1.25
    CYCLES_S = 60.0
    """Least number of seconds between two collections of reference cycles."""

    def __init__(self) -> None:
        self._size = 0
        self._collected_at = -math.inf

    def trim(self, *, now: bool) -> None:
        """Return freed memory to the operating system, with `now` or if the process has grown.

        Before that, collect reference cycles, with `now` or if `CYCLES_S` seconds have passed.
        """
        if now or time.monotonic() >= self._collected_at + self.CYCLES_S:
            gc.collect()
            self._collected_at = time.monotonic()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is None or not (now or resident_pages() >= self._size * self.GROWTH):
            return
        trim(0)
        self._size = resident_pages()


FREED_MEMORY = FreedMemory()
"""The policy of this process."""


def resident_pages() -> int:
    """Return the resident memory of this process in pages."""
    return int(Path("/proc/self/statm").read_text().split()[1])


def trainer_threads(
    config: RunConfig, *, with_engine_cores: bool = False, num_cores: int | None = None
) -> int:
    """Return the number of CPU threads of the trainer, or of each trainer rank.

    All processes of a run share `num_cores` cores. None means the cores that this process may use.
    More threads than cores in all would make every process many times slower. With
    `with_engine_cores`, the trainer also gets the cores of the engines.
    """
    if config.trainer.threads:
        return config.trainer.threads
    if config.deterministic:
        return 1
    engine_threads = config.engine.threads * config.engine.num_started
    if config.cluster.engine_hosts:  # on other machines, unless Ray runs on this one alone
        engine_threads *= 0 if config.cluster.address else config.cluster.engine_hosts
    if with_engine_cores:
        engine_threads = 0
    ranks_here = 0 if config.cluster.address else config.cluster.trainers
    needs = config.old_logps.needs
    scorers = config.old_logps.scoring_ranks if ranks_here else int(needs.own_process)
    free = (num_cores or cores()) - engine_threads - scorers
    return max(1, free // max(1, ranks_here))


class SharedCores:
    """The division of CPU cores between the engines and a trainer in this process.

    The trainer computes on the cores that the other processes leave, and also on the engines' cores
    while the engines have no request.
    """

    def __init__(self, config: RunConfig, *, are_engines_idle: Callable[[], bool]) -> None:
        """Divide the cores as the options of a run ask.

        `are_engines_idle` is called in the trainer's thread. It must return True if the engines
        have no request, and no group of training episodes can start before the next optimizer step.
        """
        self._while_sampling = trainer_threads(config)
        self._while_idle = trainer_threads(config, with_engine_cores=True)
        if config.trainer.compile:  # a compiled function is compiled again for each number
            self._while_idle = self._while_sampling
        self._are_engines_idle = are_engines_idle
        self._count = 0
        self._helper = ThreadPoolExecutor(1, "threads")

    def take(self) -> None:
        """Set the calling thread's number of torch threads to the cores that are free.

        Threads that start later get 1. A thread that starts while this method runs may get the
        number of the calling thread.
        """
        count = self._while_idle if self._are_engines_idle() else self._while_sampling
        if count == self._count:
            return
        torch.set_num_threads(count)
        torch.get_num_threads()  # makes the setting take effect in this thread
        # A new thread takes the number that was set last in any thread of the process.
        self._helper.submit(torch.set_num_threads, 1).result()
        self._count = count
