"""Every option of a run, in sections that follow the data flow. Importing it does not import torch.

A section is a frozen dataclass and each of its fields is an option. The type of a field holds the
allowed values, and the docstring under the field is its help text. A recipe is a function that
returns a `RunConfig`.
"""

import re
import shlex
import sys
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

from unstale.config.algorithm import AdvantageConfig as AdvantageConfig
from unstale.config.algorithm import AuditConfig as AuditConfig
from unstale.config.algorithm import CorrectionConfig as CorrectionConfig
from unstale.config.algorithm import Unit as Unit
from unstale.config.checks import ConfigError as ConfigError
from unstale.config.cluster import ClusterConfig as ClusterConfig
from unstale.config.names import nearest as nearest
from unstale.config.objectives import ObjectiveConfig as ObjectiveConfig
from unstale.config.routes import OldLogpsConfig as OldLogpsConfig
from unstale.config.run import MAX_SEED as MAX_SEED
from unstale.config.run import SHIPPED_POLICIES as SHIPPED_POLICIES
from unstale.config.run import SHIPPED_POLICY as SHIPPED_POLICY
from unstale.config.run import RunConfig as RunConfig
from unstale.config.sampling import Dtype as Dtype
from unstale.config.sampling import EndpointConfig as EndpointConfig
from unstale.config.sampling import EngineConfig as EngineConfig
from unstale.config.sampling import RolloutConfig as RolloutConfig
from unstale.config.sampling import ScheduleConfig as ScheduleConfig
from unstale.config.sampling import SelectionConfig as SelectionConfig
from unstale.config.sampling import Transfer as Transfer
from unstale.config.sampling import fast_dtype as fast_dtype
from unstale.config.sampling import staleness_bound as staleness_bound
from unstale.config.tasks import TaskConfig as TaskConfig
from unstale.config.tasks import make_task as make_task
from unstale.config.training import CheckpointConfig as CheckpointConfig
from unstale.config.training import EvalConfig as EvalConfig
from unstale.config.training import JournalConfig as JournalConfig
from unstale.config.training import SftConfig as SftConfig
from unstale.config.training import TrainerConfig as TrainerConfig


def install(extra: str) -> str:
    """Return the command that installs an extra (an optional group of packages), for messages.

    In a checkout the command installs from its folder, because another project may have the name
    `unstale` in package registries. Without a checkout it lists the packages of the extra.
    """
    if not (Path(__file__).parents[2] / "pyproject.toml").is_file():
        return shlex.join([sys.executable, "-m", "pip", "install", *packages_of(extra)])
    if extra in ("openenv", "verifiers"):  # their environments are docs/libraries.md#installation
        return f"make env-{extra}, then use .venv-adapters/{extra}/bin/python -m unstale"
    return f".venv/bin/pip install -c constraints.txt -e '.[{extra}]'"


def packages_of(extra: str) -> Iterator[str]:
    """Yield the packages that an extra of the installed project requires, nested extras included.

    >>> list(packages_of("tensorboard"))
    ['tensorboard']
    """
    for line in requires("unstale") or ():
        package, _, marker = line.partition(";")
        if not re.search(rf"extra == ['\"]{extra}['\"]", marker):
            continue
        nested = re.fullmatch(r"unstale\[([\w,-]+)\]", package.strip())
        for name in nested[1].split(",") if nested else ():
            yield from packages_of(name)
        if not nested:
            yield package.strip()
