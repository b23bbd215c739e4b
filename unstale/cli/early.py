"""Refuse what cannot run, start the engines of a run early, and import modules quickly."""

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from unstale.config import ConfigError, RunConfig
from unstale.weights.child_process import start_early

WORKER = "unstale.engines.embedded.worker"
"""The module of the embedded engine's process. It is not imported here: it imports torch."""


def refuse_early(config: RunConfig) -> None:
    """Raise `ConfigError` for a configuration that a run refuses, before torch is imported.

    A run checks the same again, for those who start it from Python.
    """
    from unstale.lint import check  # most commands do not need it

    check(config).require()
    if not config.policy_download:
        _ = config.policy_folder
    if config.cluster.trainers or config.cluster.engine_hosts:
        from unstale.cluster.session import import_ray

        import_ray()


def new_folder(config: RunConfig) -> Path:
    """Return the folder of a new run. Raises `ConfigError` if it already holds a run."""
    from unstale.cli.resume import resume_command
    from unstale.durability.journal import JOURNAL

    recipe = config.recipe.rpartition(":")[2]
    name = config.name or f"{recipe}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = config.runs / name
    if (folder / JOURNAL).exists():
        raise ConfigError(
            f"{folder} already holds a run ({JOURNAL}): resume it ({resume_command(folder)}), "
            "choose another name or remove it"
        )
    return folder


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
    time. Later collections do not visit the imported objects either: they are kept anyway. A
    terminal shows meanwhile what is loaded, because it takes some seconds.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield  # the host program has imported torch, or decides itself about collections
        return
    gc.disable()
    try:
        with Console(stderr=True).status("loading torch and transformers"):
            yield
    finally:
        gc.freeze()
        gc.enable()
