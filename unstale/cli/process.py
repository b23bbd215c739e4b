"""Settings of the whole process: threads and garbage collection."""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SWITCH_INTERVAL_S = 1e-4
"""Seconds after which a thread must release Python's global interpreter lock if another waits. The
trainer needs the lock after every torch operation. With Python's default of 5 ms, the trainer is a
third slower while agents run.
"""

YOUNG_OBJECTS = 100_000
"""Number of new objects after which Python collects garbage. With its default of 700, this would
take a quarter of the time of every turn.
"""

NUM_ARENAS = 2
"""Number of heaps from which the C library serves all threads. By default it uses up to eight for
each core, and each keeps freed memory. In a run of agents with large requests, that was two thirds
of the memory.
"""
_M_ARENA_MAX = -8
"""The number by which glibc's `mallopt` calls its parameter `M_ARENA_MAX` (malloc.h)."""


def limit_threads() -> None:
    """Limit torch to one CPU thread in the calling thread. The trainer's thread has its own number.

    Otherwise OpenMP threads would spin without work. Also set `SWITCH_INTERVAL_S` and `NUM_ARENAS`.
    """
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_ARENA_MAX, NUM_ARENAS)


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Return a context in which reference cycles are collected rarely, and existing objects never.

    A collection of all objects takes about 0.25 s, in which trainer and event loop stop. A run
    creates few cycles: none for an episode without an error, 14 small objects for a recomputed
    step, 1,500 for a checkpoint.
    """
    thresholds = gc.get_threshold()
    was_frozen = gc.get_freeze_count() > 0
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        # Objects that the host program, or `quick_imports`, has frozen stay frozen. Then those of
        # the run do too, because Python has one set of frozen objects.
        if not was_frozen:
            gc.unfreeze()
