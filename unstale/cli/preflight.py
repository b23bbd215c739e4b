"""Steps before a run: refuse wrong settings, start engines early, import modules quickly."""

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.live import Live
from rich.spinner import Spinner

from unstale.config import ConfigError, RunConfig
from unstale.config.hub import require_model
from unstale.durability.console import Console
from unstale.durability.run_folder import CONFIG, EVENTS, METRICS
from unstale.weights.child_process import start_early

WORKER = "unstale.engines.embedded.worker"
"""Name of the module of the embedded engine's process. It is not imported here, because that
imports torch.
"""


def refuse_early(config: RunConfig) -> None:
    """Raise `ConfigError` for problems that are found without torch, whose import takes seconds.

    These are most refusals of the linter, a missing model, and a missing Ray. A model that may be
    downloaded is downloaded first. For runs that a Python program starts, these checks are made
    later.
    """
    from unstale.lint import check  # most commands do not need it
    from unstale.lint.rules import TRIES_ESTIMATOR

    check(config, without=TRIES_ESTIMATOR).require()
    require_model(config.pretrained_folder)  # downloads or converts it first, if that is needed
    cluster = config.cluster
    if cluster.trainers or cluster.engine_hosts or config.task.isolate == "ray":
        from unstale.cluster.session import require_ray

        require_ray()


def new_folder(config: RunConfig) -> Path:
    """Return the folder for a new run. Raises `ConfigError` if it already has a run."""
    from unstale.cli.resume import resume_command
    from unstale.durability.journal import JOURNAL

    recipe = config.recipe.rpartition(":")[2]
    name = config.name or f"{recipe}-seed{config.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = config.runs / name
    if files := [each for each in (JOURNAL, CONFIG, METRICS, EVENTS) if (folder / each).exists()]:
        raise ConfigError(
            f"{folder} already holds a run ({', '.join(files)}): resume it "
            f"({resume_command(folder)}), choose another name or remove it"
        )
    return folder


def start_engines(config: RunConfig) -> None:
    """Start the processes of the embedded engines, so that they import torch while this process
    does.

    Does nothing for engines on other hosts, or for runs with trainer ranks, with which they share
    GPUs.
    """
    engine = config.engine
    if engine.backend == "embedded" and not (
        config.cluster.trainers or config.cluster.engine_hosts
    ):
        for _ in range(engine.processes):
            start_early(WORKER, threads=engine.threads)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Return a context in which modules are imported without garbage collection.

    A collection visits all objects of torch and transformers, and collections take a fifth of the
    time of an import. Later collections do not visit these objects either. On a terminal, a status
    text is shown.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield  # the host program has imported torch, or decides itself about collections
        return
    status = Live(
        Spinner("dots", text="loading torch and transformers"),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,  # imported modules may keep a reference to them
        redirect_stderr=False,
    )
    gc.disable()
    try:
        with status:
            yield
    finally:
        gc.freeze()
        gc.enable()
