"""Start the engines of a run early, and import modules quickly."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from unstale.config import RunConfig
from unstale.weights.child_process import start_early

WORKER = "unstale.engines.embedded.worker"
"""The module of the embedded engine's process. It is not imported here: it imports torch."""


def start_engines(config: RunConfig) -> None:
    """Start the processes of the embedded engines, which import torch at the same time as this one.

    Does nothing if they are to run on other hosts, or beside trainer ranks, which share the GPUs.
    """
    engine = config.engine
    if engine.backend == "embedded" and not (
        config.cluster.trainers or config.cluster.engine_hosts
    ):
        for _ in range(engine.processes):
            start_early(WORKER, threads=engine.threads)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Return a context in which modules are imported without garbage collections.

    Each collection would visit all objects of torch and transformers, which takes a fifth of the
    time. Later collections do not visit the imported objects either: they are kept anyway.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield  # the host program has imported torch, or decides itself about collections
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
