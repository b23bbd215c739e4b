"""Find the plugins of a run: modules of this package and entry points of other distributions.

Each kind of thing has a group of entry points. The name of an entry point is the name of the thing,
so names are known before anything is imported.

Two packages of this distribution are annexes: `unstale.analysis` and `unstale.research`. The core,
which is all the rest, never imports them. Their modules are found here.
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
"""Packages of the annexes, by the package of the core whose modules theirs join. The core has no
modules of three: adapters of libraries, listeners to the end of a run, and commands.
"""
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Plugins:
    """The plugins of one kind that other distributions add."""

    group: str
    """The group of entry points, such as `unstale.routes`."""
    kind: Any
    """The class of the objects that entry points name, or `Callable`. For a section of the
    configuration, they are subclasses. An object with a name must have that of the entry point.
    """

    def load(self, name: str) -> Any:
        """Return the plugin with this name. None if no other distribution adds such a plugin.

        Raises `ConfigError` if it cannot be imported or is a wrong object, or if two distributions
        add the name.
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
        """Return the usable plugins by name. Print a warning, once, about each unusable plugin.

        `own` are names in this package, which no other distribution can replace.
        """
        things = {}
        for name in added_names(self.group, own):
            try:
                things[name] = self.load(name)
            except ConfigError as error:
                _warn(str(error))
        return things


def added_names(group: str, own: Collection[str] = ()) -> list[str]:
    """Return the names in a group of entry points. Nothing is imported, so some may be broken.

    Print a warning, once, about each name that is in `own`, the names in this package.
    """
    names = sorted(read_entry_points()[group])
    for name in names:
        if name in own:
            _warn(str(problem(group, name, "unstale has this name itself")))
    return [name for name in names if name not in own]


def owner(group: str, name: str) -> str:
    """Return the distribution that has an entry point, with its version."""
    found = [point.dist for point in read_entry_points()[group][name] if point.dist]
    return " and ".join(sorted({f"{each.name} {each.version}" for each in found}))


def problem(group: str, name: str, cause: str) -> ConfigError:
    """Return an error about an entry point."""
    where = f"entry point {name!r} of {owner(group, name)} in the group {group}"
    return ConfigError(f"{where} cannot be used: {cause}")


def modules(package: str) -> dict[str, str]:
    """Return the modules of a package of the core and those that the annexes add, by name.

    A module is its full name. Nothing is imported. Packages in it and modules with an underscore
    are left out.
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

    Empty if all are installed.
    """
    names = {".".join(each.split(".")[:2]) for places in ANNEXES.values() for each in places}
    missing = sorted(name for name in names if not (_folder(name) / "__init__.py").exists())
    return f". It may be of {' or '.join(missing)}, not installed here" if missing else ""


def _folder(package: str) -> Path:
    return ROOT.joinpath(*package.split(".")[1:])


def declared(package: str, attribute: str) -> Iterator[Any]:
    """Import the modules that `modules` finds. Yield the value of `attribute` of each."""
    for name in modules(package).values():
        module = import_module(name)
        if hasattr(module, attribute):
            yield getattr(module, attribute)


@cache
def read_entry_points() -> Mapping[str, Mapping[str, list[EntryPoint]]]:
    """Return the entry points of other distributions, by group and name.

    The current folder is not searched if it is on the path as "": it may be somebody else's.
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
