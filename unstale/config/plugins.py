"""Find the plugins of a run: modules of this distribution, and entry points of others.

Each kind of plugin, such as routes, has a group of entry points. A plugin has the name of its entry
point, so names are known before anything is imported.

`unstale.analysis` and `unstale.research` are optional packages (annexes). All other code, the core,
never imports them by name. It finds their modules with `modules`.
"""

import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from unstale.config.checks import ConfigError

ANNEXES: Mapping[str, Sequence[str]] = {
    "unstale.adapters": ("unstale.research.adapters",),
    "unstale.envs": ("unstale.research.envs",),
    "unstale.listeners": ("unstale.analysis.listeners",),
    "unstale.recipes": ("unstale.research.recipes",),
    "unstale.techniques": ("unstale.research.techniques",),
    "unstale.verbs": ("unstale.analysis.commands", "unstale.research.commands"),
}
"""Packages of the annexes `unstale.analysis` and `unstale.research`, by the package of `unstale`
that they extend. Their modules count as modules of that package.

Some packages have modules only in annexes: adapters of libraries, commands, and code that is called
at the end of a run.
"""
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Plugins:
    """The plugins of one kind in other distributions."""

    group: str
    """The group of entry points in which these plugins are declared, such as `unstale.routes`."""
    kind: Any
    """The class of the plugins, or `Callable`. If it is a section of the configuration, each plugin
    is a subclass of it. An attribute `name` of a plugin must be the name of its entry point.
    """

    def load(self, name: str) -> Any:
        """Return the plugin `name`. None if no other distribution has one of this name.

        Raises `ConfigError` if the plugin cannot be imported, is not of the class `kind`, or is in
        two distributions.
        """
        points = read_entry_points()[self.group].get(name)
        if not points:
            return None
        if len(points) > 1:
            raise problem(self.group, name, "both have it. Uninstall one of them")
        try:
            thing = points[0].load()
        except (Exception, SystemExit) as error:
            raise problem(self.group, name, f"{type(error).__name__}: {error}") from error
        if not self._accepts(name, thing):
            given, expected = type(thing).__name__, self.kind.__name__
            cause = f"{points[0].value} is of type {given}, not {expected} with this name"
            raise problem(self.group, name, cause)
        return thing

    def _accepts(self, name: str, thing: Any) -> bool:
        if hasattr(self.kind, "selector"):
            is_variant = isinstance(thing, type) and issubclass(thing, self.kind)
            return is_variant and getattr(thing, self.kind.selector) == name
        return isinstance(thing, self.kind) and getattr(thing, "name", name) == name

    def load_all(self, own: Collection[str] = ()) -> dict[str, Any]:
        """Return the plugins that can be used, by name. Warn once about each of the others.

        `own` are names of this package itself, which no plugin can have.
        """
        things = {}
        for name in added_names(self.group, own):
            try:
                things[name] = self.load(name)
            except ConfigError as error:
                _warn(str(error))
        return things


def added_names(group: str, own: Collection[str] = ()) -> list[str]:
    """Return the names in a group of entry points, without the names in `own`. Nothing is imported.

    `own` are names of this package itself. A warning is printed once about each plugin with such a
    name.
    """
    names = sorted(read_entry_points()[group])
    for name in names:
        if name in own:
            _warn(str(problem(group, name, "unstale has this name itself")))
    return [name for name in names if name not in own]


def owner(group: str, name: str) -> str:
    """Return the name and version of the distribution that has an entry point.

    If several have it, all are in the text.
    """
    found = [point.dist for point in read_entry_points()[group][name] if point.dist]
    return " and ".join(sorted({f"{each.name} {each.version}" for each in found}))


def problem(group: str, name: str, cause: str) -> ConfigError:
    """Return an error about an entry point. Its text has the distribution and the cause."""
    where = f"entry point {name!r} of {owner(group, name)} in the group {group}"
    return ConfigError(f"{where} cannot be used: {cause}")


def modules(package: str) -> dict[str, str]:
    """Return the modules of a package of `unstale` and those that annexes add, by their short
    names.

    The values are full names. Nothing is imported. Subpackages are left out, and so are modules
    whose name begins with an underscore.
    """
    places = (package, *ANNEXES.get(package, ()))
    return dict(
        sorted(
            (each.name, f"{place}.{each.name}")
            for place in places
            for each in iter_modules([str(_folder(place))])
            if not (each.ispkg or each.name.startswith("_"))
        )
    )


def missing_annexes() -> str:
    """Return the end of an error message about an unknown name: the annexes that are not installed.

    These annexes may have the name. Empty if `unstale.analysis` and `unstale.research` are both
    installed.
    """
    names = {".".join(each.split(".")[:2]) for places in ANNEXES.values() for each in places}
    missing = sorted(name for name in names if not (_folder(name) / "__init__.py").exists())
    return f". It may be of {' or '.join(missing)}, not installed here" if missing else ""


def _folder(package: str) -> Path:
    return ROOT.joinpath(*package.split(".")[1:])


def declared(package: str, attribute: str) -> Iterator[Any]:
    """Import the modules that `modules(package)` lists, and yield their values of `attribute`.

    Modules without this attribute are left out.
    """
    for name in modules(package).values():
        module = import_module(name)
        if hasattr(module, attribute):
            yield getattr(module, attribute)


@cache
def read_entry_points() -> Mapping[str, Mapping[str, list[EntryPoint]]]:
    """Return the entry points of other distributions in this project's groups, by group and name.

    The current folder is not searched if it is on `sys.path` as "", because any user may have put
    files there.
    """
    groups: Any = defaultdict(lambda: defaultdict(list))
    found = distributions(path=[folder for folder in sys.path if folder])
    ours = [each for each in found if "[unstale." in (each.read_text("entry_points.txt") or "")]
    for each in {each.name: each for each in reversed(ours)}.values():  # the first on the path
        for point in each.entry_points:
            groups[point.group][point.name].append(point)
    return groups


@cache
def _warn(text: str) -> None:
    sys.stderr.write(f"warning: {text}\n")
