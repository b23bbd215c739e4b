"""Start the engines' processes of a run before this process imports torch, which takes seconds."""

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
