"""Asynchronous RL for language-model agents, with exact log-probabilities of stale tokens.

`unstale.train(unstale.recipes.retail())` trains the demo. The training loop is in
`unstale/loop.py`. Public names are imported when they are first used. So `import unstale` and
`unstale --help` do not load torch.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Set these before torch loads. OpenMP threads spin while they wait, by default for longer than most
# matrix products take. Spinning threads slow down other processes 15 to 30 times.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
# Use pages of 2 MB for large tensors. With small pages, page faults took much of each forward pass.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

if TYPE_CHECKING:
    from unstale import recipes
    from unstale.cli.evaluate import evaluate
    from unstale.cli.failures import RunFailed
    from unstale.cli.push import push_to_hub
    from unstale.cli.session import Run, resume, train
    from unstale.config import ConfigError, RunConfig
    from unstale.envs.external import ExternalAgent
    from unstale.model.policy import Policy
    from unstale.observe.trackers import RunOutcome, Sink, TrackedRun
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
    "RunOutcome": "unstale.observe.trackers",
    "Sink": "unstale.observe.trackers",
    "TrackedRun": "unstale.observe.trackers",
    "evaluate": "unstale.cli.evaluate",
    "push_to_hub": "unstale.cli.push",
    "resume": "unstale.cli.session",
    "train": "unstale.cli.session",
}
"""The module of each public name. A name that is not listed here is in `unstale.records`."""

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
    "RunOutcome",
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
    "resume",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'unstale' has no attribute {name!r}")
    if name == "recipes":
        return import_module("unstale.recipes")
    return getattr(import_module(_HOMES.get(name, "unstale.records")), name)
