"""The options of tasks, and the environments that the option `task.env` can name.

- `NAME`: an `EnvSpec` that a module in `unstale/envs` or `unstale/research/envs` assigns to `ENV`,
or that an entry point of another distribution names.
- `LIBRARY:NAME`: `unstale/research/adapters/LIBRARY.py` assigns a function of NAME to `TASKSET`.
The extra that installs the library has the library's name. Modules with an underscore are parts of
these.
- `NAME:SOURCE`: an environment like `NAME` whose spec takes a source, such as `dataset:FILE`. An
adapter with options has such a module (`tau2`).
- `MODULE:FACTORY`: a function or class of the user's code, called without arguments.

Importing this module imports neither torch nor an environment.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from unstale.config.checks import ConfigError, OneOf, Positive, PositiveInt, Section
from unstale.config.given import NameObject, name_tasks
from unstale.config.names import nearest
from unstale.config.plugins import Plugins, added_names, declared, missing_annexes, modules

if TYPE_CHECKING:
    from unstale.envs import Taskset

ISOLATION = {
    "none": (),
    "process": ("workers", "worker_memory_gb"),
    "ray": ("workers", "worker_memory_gb"),
}
"""The values of the option `task.isolate`, each with the options that only this value uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig(Section):
    """The tasks that the agent trains on.

    An environment with further options declares them in a subclass
    (`EnvSpec.options`).
    """

    selector: ClassVar[str] = "isolate"
    refused_unread: ClassVar = ("workers", "worker_memory_gb")
    reward_names: ClassVar[tuple[str, ...]] = ()
    """The names of the rewards that an episode gets. Empty if the options do not determine them."""

    env: Annotated[str, NameObject(name_tasks)]
    """Name of the environment: a shipped one (docs/your-own-task.md#shipped-environments),
    `library:name` (docs/libraries.md), or `module:factory` for your own.
    """
    isolate: Annotated[str, OneOf(lambda: ISOLATION)] = "none"
    """`process` runs environments in separate worker processes, and `ray` on the machines of a Ray
    cluster (docs/scale-out.md). A worker that hangs or crashes is ended, and the run continues.
    """
    workers: PositiveInt = 2
    """Number of worker processes for environments. Each runs many episodes at the same time."""
    worker_memory_gb: Positive = 4.0
    """Memory limit of a worker process in GB. Above it, the worker gets no new episodes and is
    replaced after its last one. Above twice the limit, it is killed and its episodes are retried.
    """

    def check_combination(self) -> None:
        expected = task_class(self.env)
        if type(self) is not expected:
            raise ConfigError(
                f"task.env {self.env!r} needs its options as a {expected.__name__}, "
                f"got a {type(self).__name__}. Use {expected.__name__}(...)"
            )

    @property
    def largest_reward(self) -> float | None:
        """The largest total reward that an episode can get. None if the options do not determine
        it.
        """
        return None

    @classmethod
    def classes(cls) -> "Sequence[type[TaskConfig]]":
        """Return `TaskConfig` and its subclasses, which have the options of environments."""
        return list(dict.fromkeys([TaskConfig, *(spec.options for spec in envs().values())]))


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """The declaration of an environment: how to make its task set, and its options."""

    name: str
    make: Callable[[Any], "Taskset"]
    """A function that makes the task set. Its argument is an instance of the class `options`."""
    options: type[TaskConfig] = TaskConfig
    """The class with the environment's options. The docstring under a field is its help text."""
    takes_source: bool = False
    """True if the value of `task.env` has a source after the name, as in `dataset:FILE`."""


ADDED = Plugins("unstale.environments", EnvSpec)


@cache
def shipped_envs() -> Mapping[str, EnvSpec]:
    """Return the declarations of this distribution's environments, by name. Adapters are not
    imported.
    """
    return {spec.name: spec for spec in declared("unstale.envs", "ENV")}


@cache
def envs() -> Mapping[str, EnvSpec]:
    """Return the declarations of all environments, also of other distributions, by name."""
    return {**shipped_envs(), **ADDED.load_all(shipped_envs())}


def libraries() -> dict[str, str]:
    """Return the adapter module of each environment library, by the library's name."""
    found = modules("unstale.adapters")
    return {name.replace("_", "-"): module for name, module in found.items()}


def find_spec(env: str) -> EnvSpec | None:
    """Return the declaration of the environment that `env`, a value of `task.env`, names.

    None for `LIBRARY:NAME` and `MODULE:FACTORY`. Raises `ConfigError` if a package with this
    environment cannot be used.
    """
    name, _, source = env.partition(":")
    spec = shipped_envs().get(name) or ADDED.load(name)
    return spec if spec and spec.takes_source == bool(source) else None


def task_class(env: str) -> type[TaskConfig]:
    """Return the class with the options of the environment that `env`, a value of `task.env`,
    names.

    The result is `TaskConfig` or a subclass. Raises `ConfigError` if there is no such environment.
    """
    if spec := find_spec(env):
        return spec.options
    name, _, source = env.partition(":")
    if source and name not in [*shipped_envs(), *added_names(ADDED.group)]:
        return TaskConfig
    specs = [f"{name}:SOURCE" if spec.takes_source else name for name, spec in envs().items()]
    named = (f"{name}:NAME" for name in libraries() if name not in envs())
    known = [*specs, *named, "MODULE:FACTORY"]
    meant = f"; did you mean dataset:{env}?" if Path(env).suffix else nearest(env, known)
    raise ConfigError(f"task.env cannot be {env!r}{meant}{missing_annexes()}")


def make_task(env: str = "retail", **values: Any) -> TaskConfig:
    """Return the options of the environment `env`, with `values` for some.

    Raises `ConfigError` if `values` sets an option of another environment to other than its
    default.
    """
    cls = task_class(env)
    known = {field.name for field in fields(cls)}
    for other in TaskConfig.classes():
        for field in fields(other):
            if field.name in known or field.name not in values:
                continue
            if values.pop(field.name) != field.default:
                name = str({option.name: option.default for option in fields(other)}["env"])
                owner = f"{name.partition(':')[0]}:SOURCE" if ":" in name else name
                raise ConfigError(f"task.{field.name} is an option of {owner}; task.env is {env}")
    return cls(env=env, **values)
