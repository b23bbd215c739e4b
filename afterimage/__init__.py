"""Asynchronous RL for language-model agents in which off-policy correction means what it says.

`afterimage.train(afterimage.recipes.retail())` is the short way in; the data path is in `afterimage/loop.py`. Names are
imported when first used, so that `import afterimage` and the command line's `--help` stay quick.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Before torch loads: threads of two processes that spin while they wait slow each other down 15 to 30 times. They spin
# for as long as it takes to wake one, which is longer than most products of a small model.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if TYPE_CHECKING:
    from afterimage import recipes
    from afterimage.config import ConfigError, RunConfig
    from afterimage.envs.external import ExternalAgent
    from afterimage.launch.local import Run, RunFailed, evaluate, train
    from afterimage.policy import Policy
    from afterimage.trajectory import (
        Batch,
        Credited,
        Given,
        Group,
        Provenance,
        Sampled,
        Task,
        Trajectory,
        collate,
    )

_HOMES = {
    "Batch": "afterimage.trajectory",
    "ConfigError": "afterimage.config",
    "Credited": "afterimage.trajectory",
    "ExternalAgent": "afterimage.envs.external",
    "Given": "afterimage.trajectory",
    "Group": "afterimage.trajectory",
    "Policy": "afterimage.policy",
    "Provenance": "afterimage.trajectory",
    "Run": "afterimage.launch.local",
    "RunConfig": "afterimage.config",
    "RunFailed": "afterimage.launch.local",
    "Sampled": "afterimage.trajectory",
    "Task": "afterimage.trajectory",
    "Trajectory": "afterimage.trajectory",
    "collate": "afterimage.trajectory",
    "evaluate": "afterimage.launch.local",
    "recipes": "afterimage.recipes",
    "train": "afterimage.launch.local",
}

__all__ = [
    "Batch",
    "ConfigError",
    "Credited",
    "ExternalAgent",
    "Given",
    "Group",
    "Policy",
    "Provenance",
    "Run",
    "RunConfig",
    "RunFailed",
    "Sampled",
    "Task",
    "Trajectory",
    "collate",
    "evaluate",
    "recipes",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'afterimage' has no attribute {name!r}")
    home = import_module(_HOMES[name])
    return home if name == "recipes" else getattr(home, name)
