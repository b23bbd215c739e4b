"""The task sets that `task.env` can name. Each is declared in the file that implements it.

- `NAME`: a module in `unstale/envs` that assigns an `EnvSpec` to `ENV`.
- `LIBRARY:NAME`: `unstale/envs/adapters/LIBRARY.py` assigns a function of NAME to `TASKSET`.
  The extra that installs the library has the library's name.
- `MODULE:FACTORY`: a function or class of the user's code, called without arguments.
"""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from unstale import envs
from unstale.config import ConfigError, TaskConfig, install, nearest
from unstale.envs import Taskset, adapters


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """The declaration of a shipped environment."""

    name: str
    make: Callable[[Any], Taskset]
    """Makes the task set from an instance of `options`."""
    options: type[TaskConfig] = TaskConfig
    """The options of section `task`. The docstring under a field is its help text."""


@cache
def shipped_envs() -> dict[str, EnvSpec]:
    """Return the declared environments by name. Imports neither torch nor an adapter."""
    specs = {}
    for module in pkgutil.iter_modules(envs.__path__):
        if module.name != "adapters":
            spec = getattr(import_module(f"{envs.__name__}.{module.name}"), "ENV", None)
            if isinstance(spec, EnvSpec):
                specs[spec.name] = spec
    return specs


def libraries() -> dict[str, str]:
    """Return the modules of the adapters by the names of their libraries."""
    modules = [module.name for module in pkgutil.iter_modules(adapters.__path__)]
    return {name.replace("_", "-"): f"{adapters.__name__}.{name}" for name in modules}


def task_options(env: str) -> type[TaskConfig]:
    """Return the options class of an environment. Raises `ConfigError` for an unknown one."""
    if ":" in env:
        return TaskConfig
    if env not in shipped_envs():
        known = [*shipped_envs(), *(f"{library}:NAME" for library in libraries()), "MODULE:FACTORY"]
        raise ConfigError(f"task.env cannot be {env!r}{nearest(env, known)}")
    return shipped_envs()[env].options


def build_taskset(config: TaskConfig) -> Taskset:
    """Return the task set that `task.env` names. Raises `ConfigError` if it cannot be made."""
    task_options(config.env)  # refuses an unknown name
    if spec := shipped_envs().get(config.env):
        return spec.make(config)
    module, _, name = config.env.partition(":")
    adapter = libraries().get(module)
    try:
        factory = getattr(import_module(adapter or module), "TASKSET" if adapter else name)
    except (ImportError, AttributeError) as error:
        is_missing = adapter and isinstance(error, ModuleNotFoundError)
        hint = f" ({install(module)})" if is_missing else ""
        raise ConfigError(f"task.env {config.env!r} cannot be made: {error}{hint}") from error
    taskset: Taskset = factory(name) if adapter else factory()
    return taskset
