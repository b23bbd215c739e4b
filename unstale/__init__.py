"""Asynchronous RL for language-model agents, with exact log-probabilities of stale tokens.

`unstale.train(unstale.recipes.retail())` trains the demo. The training loop is in
`unstale/loop.py`. Names are imported when first used, so that `import unstale` and the command
line's `--help` are quick.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Set before torch loads. OpenMP threads that spin while they wait slow the threads of another
# process down 15 to 30 times, and by default they spin longer than most products take.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
# Use pages of 2 MB for large tensors: page faults of small ones took a good part of each pass.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

if TYPE_CHECKING:
    from unstale import recipes
    from unstale.cli.evaluate import evaluate
    from unstale.cli.failures import RunFailed
    from unstale.cli.push import push_to_hub
    from unstale.cli.session import Run, train
    from unstale.config import ConfigError, RunConfig
    from unstale.envs.external import ExternalAgent
    from unstale.model.policy import Policy
    from unstale.observe.trackers import Sink, TrackedRun
    from unstale.records import (
        Batch,
        ContextPiece,
        Group,
        Provenance,
        Sampled,
        ScoredTrajectory,
        Task,
        Trajectory,
        collate,
    )

_HOMES = {
    "ConfigError": "unstale.config",
    "ExternalAgent": "unstale.envs.external",
    "Policy": "unstale.model.policy",
    "Run": "unstale.cli.session",
    "RunConfig": "unstale.config",
    "RunFailed": "unstale.cli.failures",
    "Sink": "unstale.observe.trackers",
    "TrackedRun": "unstale.observe.trackers",
    "evaluate": "unstale.cli.evaluate",
    "push_to_hub": "unstale.cli.push",
    "train": "unstale.cli.session",
}
"""Public name -> module. Names that are not listed are in `unstale.records`."""

__all__ = [
    "Batch",
    "ConfigError",
    "ContextPiece",
    "ExternalAgent",
    "Group",
    "Policy",
    "Provenance",
    "Run",
    "RunConfig",
    "RunFailed",
    "Sampled",
    "ScoredTrajectory",
    "Sink",
    "Task",
    "TrackedRun",
    "Trajectory",
    "collate",
    "evaluate",
    "push_to_hub",
    "recipes",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'unstale' has no attribute {name!r}")
    if name == "recipes":
        return import_module("unstale.recipes")
    return getattr(import_module(_HOMES.get(name, "unstale.records")), name)
