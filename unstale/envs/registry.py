"""Create the task set that the option `task.env` names, and check it before a run."""

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from itertools import islice
from pathlib import Path
from reprlib import repr as short_repr
from types import ModuleType
from typing import Any

from unstale.config import ConfigError, RunConfig, TaskConfig, install
from unstale.config.given import Given
from unstale.config.tasks import find_spec, libraries, task_class
from unstale.config.techniques import needed_methods
from unstale.envs import EnvError, ListedTasks, Taskset, members
from unstale.envs.guard import NoThread, Watchdog, describe, time_limit
from unstale.envs.mixed import MixedTasks
from unstale.records import Task

MAX_CHECKED = 1000
"""Largest number of training tasks that are drawn as a check before a run. They take about 1 ms."""


PREPARE_S = 60.0
"""Seconds that a method of a task set may take before a run, for example to list tasks."""
LOAD_S = 600.0
"""Seconds that the import of a user's module or the creation of a task set may take."""
_SLOW = "make it quicker, such as by storing on disk what it computes or downloads"


def build_taskset(config: TaskConfig) -> Taskset:
    """Return the task set that `task.env` names. Raises `ConfigError` if it cannot be created."""
    task_class(config.env)  # raises ConfigError for an unknown name
    if spec := find_spec(config.env):
        return spec.make(config)
    if config.env.partition(":")[0] in libraries():
        return make_with_library(config)
    problem = _problem(config)
    factory = import_user_code(config.env, problem)
    with user_code(problem), _limit(f"{config.env}()", LOAD_S):
        taskset: Taskset = factory()
        missing = [each for each in members(Taskset) if getattr(taskset, each, None) is None]
    if missing:
        lacks = f"{type(taskset).__name__} has no {', '.join(missing)}"
        raise ConfigError(f"{problem}: {lacks}; unstale.envs.Taskset says what each is")
    return taskset


def make_with_library(config: TaskConfig, **options: Any) -> Taskset:
    """Return the task set for `task.env = LIBRARY:NAME`.

    `options` are arguments of the library's adapter. Raises `ConfigError` if the library is
    missing, or the task set cannot be created.
    """
    library, _, name = config.env.partition(":")
    problem = _problem(config)
    try:
        factory = import_module(libraries()[library]).TASKSET
    except ImportError as error:
        hint = f" ({install(library)})" if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError(f"{problem}: {error}{hint}") from error
    with user_code(problem):
        taskset: Taskset = factory(name, **options)
    return taskset


def _problem(config: TaskConfig) -> str:
    return f"task.env {config.env!r} cannot be made"


def import_user_code(name: str, problem: str) -> Any:
    """Return the object that `module:attribute` names, after importing the module.

    If the option was given as a Python object (`Given`), return that object. Raises `ConfigError`
    that begins with `problem` if the import fails.
    """
    if isinstance(name, Given):
        return name.value
    module, _, attribute = name.partition(":")
    with user_code(problem), _limit(f"the import of {module}", LOAD_S):
        _import_from_current_folder(module.partition(".")[0])
        imported = import_module(module)
        if not hasattr(imported, attribute):
            text = f"module {module!r} has no attribute {attribute!r}{_origin(imported)}"
            raise AttributeError(text)
        return getattr(imported, attribute)


def _import_from_current_folder(name: str) -> None:
    """Import a module of the current folder, even if an installed module has the same name.

    Do nothing if the folder has no such module, if it is imported already, or if Python does not
    search the current folder. What the module itself imports is searched in the usual order, so
    that a foreign file in the folder does not replace a library.
    """
    if name in sys.modules or {"", os.getcwd()}.isdisjoint(sys.path):
        return
    spec = PathFinder.find_spec(name, [os.getcwd()])
    if spec is None or spec.loader is None:
        return
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise


def _origin(module: ModuleType) -> str:
    """Return the file of a module in brackets.

    For an installed module, the advice to rename the user's own module follows.
    """
    file = getattr(module, "__file__", None)
    if file is None:
        return ""
    installed = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    if installed.isdisjoint(Path(file).parents):
        return f" ({file})"
    return f" ({file}: this is an installed module. Give a module of yours another name)"


@contextmanager
def user_code(problem: str) -> Iterator[None]:
    """Return a context that turns errors of user code into `ConfigError`.

    Its text begins with `problem` and names the line that raised the error.
    """
    try:
        yield
    except (ConfigError, KeyboardInterrupt, NoThread):
        raise
    except BaseException as error:
        raise ConfigError(f"{problem}: {describe(error)}") from error


def check_taskset(taskset: Taskset, seed: int, num_tasks: int) -> None:
    """Raise `ConfigError` if a task set has invalid tools, or fewer training tasks than
    `num_tasks`.
    """
    name = _name(taskset)
    with user_code(f"the tools of {name} cannot be read"), preparing(taskset, "tools"):
        tools = tuple(taskset.tools)
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ConfigError(
                f"a tool of {name} has no schema: {short_repr(tool)}; "
                "write it with unstale.envs.tool_schema(name, description, properties)"
            )
    wanted = min(num_tasks, MAX_CHECKED)
    with user_code(f"train({seed}) of {name} failed"), preparing(taskset, "train()"):
        drawn = [
            _task(task, f"train({seed})", name) for task in islice(taskset.train(seed), wanted)
        ]
    if len(drawn) < wanted:
        raise ConfigError(
            f"train({seed}) of {name} ended after {len(drawn)} tasks; it must be endless: repeat "
            "the tasks with new numbers, as unstale.envs.ListedTasks does"
        )


def missing_methods(config: RunConfig, taskset: Taskset) -> dict[str, str]:
    """Return the techniques whose needs the task set does not meet. Each has the names of the
    methods of which it needs one.
    """
    return {
        name: " or ".join(f"{method}()" for method in methods)
        for name, methods in needed_methods(config).items()
        if all(getattr(taskset, method, None) is None for method in methods)
    }


def held_out_tasks(taskset: Taskset, count: int) -> list[Task]:
    """Return up to `count` held-out tasks. Raises `ConfigError` if the task set fails to list
    them.
    """
    name = _name(taskset)
    problem = f"held_out({count}) of {name} failed"
    with user_code(problem), preparing(taskset, "held_out()"):
        return [_task(task, f"held_out({count})", name) for task in taskset.held_out(count)]


def data_digests(taskset: Taskset) -> dict[str, str]:
    """Return split -> number and digest of its rows, for a task set that has rows.

    The splits of a mixture are named as in `math/train`. A task set around another one has its rows
    in `digested`. Empty for a task set without rows. Of values that are not JSON, such as images,
    only the type counts.
    """
    if isinstance(taskset, MixedTasks):
        return {
            f"{part.name}/{split}": digest
            for part in taskset.parts
            for split, digest in data_digests(part).items()
        }
    rows = taskset.data if isinstance(taskset, ListedTasks) else getattr(taskset, "digested", {})
    return {split: _digest(each) for split, each in rows.items()}


def _digest(rows: Sequence[Any]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for row in rows:
        text = json.dumps(row, default=lambda value: type(value).__name__, skipkeys=True)
        digest.update(text.encode("utf-8", "surrogatepass") + b"\n")
    return f"{len(rows)} rows, digest {digest.hexdigest()}"


@contextmanager
def preparing(taskset: Taskset, method: str) -> Iterator[None]:
    """Return a context in which a method of a task set may take `PREPARE_S` seconds.

    After that, `ConfigError` is raised. `method` is its name in the error.
    """
    with _limit(f"{method} of {_name(taskset)}"):
        yield


def _name(taskset: Taskset) -> str:
    with _limit(f"the name of a {type(taskset).__name__}"):
        return str(getattr(taskset, "name", type(taskset).__name__))


@contextmanager
def _limit(name: str, limit_s: float | None = None) -> Iterator[None]:
    try:
        with Watchdog(), time_limit(name, PREPARE_S if limit_s is None else limit_s, _SLOW):
            yield
    except EnvError as error:
        raise ConfigError(str(error)) from None


def _task(task: Any, method: str, name: str) -> Task:
    if not isinstance(task, Task):
        raise ConfigError(
            f"{method} of {name} gave {short_repr(task)}; it must give "
            f"unstale.records.Task({name!r}, split, number)"
        )
    return task
