"""Parse, read and change options by their full names, such as `trainer.lr`."""

import ast
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from unstale.config import ObjectiveConfig, OldLogpsConfig, RunConfig, TaskConfig
from unstale.config.checks import (
    ConfigError,
    OneOf,
    Section,
    check_type,
    converted,
    kinds_of,
    option_types,
)
from unstale.config.files import read_mapping
from unstale.config.names import RENAMED, nearest_option, present_names, synonyms, value_hint
from unstale.config.tasks import make_task
from unstale.config.techniques import chosen, techniques


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a run. `section` is "" for options of the run itself, such as `seed`."""

    section: str
    field: str
    kind: Any
    owner: type
    """The class that declares the option. Its source has the option's help text."""

    @property
    def name(self) -> str:
        return f"{self.section}.{self.field}" if self.section else self.field

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The Python types that a value of the option may have."""
        return kinds_of(self.kind)

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that the option allows. Empty if it allows other values than certain words."""
        if get_origin(self.kind) is Literal:
            return get_args(self.kind)
        rules = getattr(self.kind, "__metadata__", ())
        return tuple(name for rule in rules if isinstance(rule, OneOf) for name in rule.table())

    @property
    def values(self) -> str:
        """The allowed values as text for the help: words or names of types, separated by `|`."""
        if self.choices:
            return "|".join(self.choices)
        names = ("none" if kind is type(None) else kind.__name__.upper() for kind in self.kinds)
        return "|".join(names)

    def of(self, config: RunConfig) -> Any:
        """Return the option's value in a configuration. None if the configuration does not have the
        option.
        """
        return getattr(section_of(config, self.section), self.field, None)

    def is_in(self, config: RunConfig) -> bool:
        """Return True if a configuration has the option. This depends on its route, objective, task
        and techniques.
        """
        return hasattr(section_of(config, self.section), self.field)

    def parse(self, text: str) -> Any:
        """Return the value of the option that a word of the command line gives.

        Raises `ConfigError` if the word is not of the option's type.
        """
        if self.choices:
            if text not in self.choices:
                hint = value_hint(self.name, text, self.choices)
                raise ConfigError(f"--{self.name} cannot be {text!r}{hint}")
            return text
        if bool in self.kinds:
            if text.lower() not in ("true", "false"):
                raise ConfigError(f"--{self.name} must be true or false, got {text!r}")
            return text.lower() == "true"
        if type(None) in self.kinds and text.lower() == "none":
            return None
        try:
            return self.kinds[0](text)
        except ValueError:
            expected = "a whole number" if self.kinds[0] is int else "a number"
            raise ConfigError(f"--{self.name} must be {expected}, got {text!r:.60}") from None

    def read(self, value: Any, where: str) -> Any:
        """Return the value of the option that a value in a JSON or TOML file gives.

        For an option of type float, null means infinity. Raises `ConfigError` if the value is not
        of the option's type. The message begins with `where`.
        """
        if self.kinds == (float,) and value is None:
            return math.inf
        value = converted(value, self.kind)
        check_type(where, value, self.kind)
        return value


TECHNIQUE_OPTIONS = "technique_options"
"""The name of the field of `RunConfig` with the sections of the chosen techniques."""


@cache
def sections() -> dict[str, Any]:
    """Return the class of every section by its name. `RunConfig` itself has the name "".

    The sections of all techniques are included, though a configuration has only those of chosen
    ones.
    """
    types = option_types(RunConfig)
    classes = {name: kind for name, kind in types.items() if is_dataclass(kind)}
    own = {name: entry.options for name, entry in techniques().items()}
    return {"": RunConfig, **classes, **own}


def section_of(config: RunConfig, name: str) -> Any:
    """Return the section `name` of a configuration. None if it belongs to a technique that is not
    chosen.
    """
    if name in techniques():
        return config.technique_options.get(name)
    return getattr(config, name) if name else config


def options() -> dict[str, Option]:
    """Return all options by full name, in the order of the sections in `RunConfig`."""
    variants = (OldLogpsConfig, ObjectiveConfig, TaskConfig)
    return _options(tuple(each for cls in variants for each in cls.classes()))


@cache
def _options(registered: tuple[Any, ...]) -> dict[str, Option]:
    """Return all options by full name. `registered`, the known classes of sections, is the cache's
    key.
    """
    options: dict[str, Option] = {}
    for section, cls in sections().items():
        for each in cls.classes():
            for field, kind in _own_first(each):
                if not is_dataclass(kind) and field != TECHNIQUE_OPTIONS:
                    option = Option(section, field, kind, _owner(each, field))
                    options.setdefault(option.name, option)
    return options


def _own_first(section: Any) -> list[tuple[str, Any]]:
    """Return the options of a section with their types.

    Options come last if they are inherited from a class that is not a section itself.
    """

    def is_shared(item: tuple[str, Any]) -> bool:
        return not issubclass(_owner(section, item[0]), Section)

    return sorted(option_types(section).items(), key=is_shared)


def _owner(section: type, field: str) -> type:
    return next(base for base in section.__mro__ if field in vars(base).get("__annotations__", {}))


def override(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return a copy of the configuration with `values` for some options, by full name."""
    changes: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        option = options()[name]
        changes.setdefault(option.section, {})[option.field] = value
    run_options = changes.pop("", {})
    if task := changes.pop("task", {}):
        if task.get("env", config.task.env) == config.task.env:
            task = asdict(config.task) | task
        run_options["task"] = make_task(**task)
    names = run_options.get("techniques", config.techniques)
    own = {name: changes.pop(name) for name in techniques() if name in changes}
    if own or "techniques" in run_options:
        run_options[TECHNIQUE_OPTIONS] = _technique_options(config, names, own)
    changed = {}
    for name, of_section in changes.items():
        changed[name] = getattr(config, name).with_options(**of_section)
    return replace(config, **changed, **run_options)


def _technique_options(
    config: RunConfig, names: str, changes: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the options of the techniques in `names`, by technique, with new values for some.

    `changes` has the new values. It may name other techniques. These are returned, too, so that
    `RunConfig` refuses them.
    """
    now = {entry.name: entry.options() for entry in chosen(names)}
    now |= {name: each for name, each in config.technique_options.items() if name in now}
    for name, of_technique in changes.items():
        before = now.get(name) or techniques()[name].options()
        now[name] = before.with_options(**of_technique)
    return now


def read_values(row: Any, source: str) -> dict[str, Any]:
    """Return the options in a JSON object or TOML table, by full name.

    `row` has a table for each section. Raises `ConfigError` for an unknown or renamed option, or a
    value of the wrong type. The message begins with `source`, such as a file name.
    """
    leaves, known = list(_leaves(row, source)), options()
    wrong = [each for leaf in leaves if leaf[0] not in known for each in _innermost(*leaf)]
    if wrong:
        problems = " ".join(dict.fromkeys(map(unknown_option, wrong)))
        raise ConfigError(f"{source}: {problems}" if source else problems)
    place = f"{source}, " if source else ""
    return {name: known[name].read(value, f"{place}{name}") for name, value in leaves}


def _innermost(name: str, value: Any) -> list[str]:
    """Return the full names of unknown options in a table, which may contain further tables."""
    if name in RENAMED or not isinstance(value, dict) or not value:
        return [name]
    return [each for key, inner in value.items() for each in _innermost(f"{name}.{key}", inner)]


def _leaves(row: Any, source: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(row, dict):
        raise ConfigError(f"{source} must be a table of options, got {row!r:.40}")
    for name, value in row.items():
        if name == TECHNIQUE_OPTIONS:
            yield from _leaves(value, f"{source}, {name}")
        elif name not in sections():
            yield name, value
        elif isinstance(value, dict):
            yield from ((f"{name}.{field}", each) for field, each in value.items())
        else:
            where = f"{source}, {name}" if source else name
            raise ConfigError(f"{where} must be a table of options, got {value!r:.40}")


def former_name(name: str) -> str:
    """Return the part of an option's full name that was renamed. "" if the name is current.

    The result is `name` if the option was renamed, and the section's name if only the section was.
    """
    section = name.partition(".")[0]
    if name not in RENAMED and RENAMED.get(section) in sections():
        return section
    return name if name in RENAMED else ""


def unknown_option(name: str) -> str:
    """Return an error message about an option that does not exist, with options of similar name.

    >>> unknown_option("schedule.window")
    'schedule.window is now schedule.lookahead_window'
    >>> unknown_option("pick.n")
    'pick is now episode_filter'
    >>> unknown_option("rollout.n")
    'unknown option rollout.n; did you mean schedule.group_size?'
    """
    if former := former_name(name):
        return f"{former} is now {RENAMED[former]}"
    if option := options().get(name):  # another variant of the section has it
        return f"{name} is an option of {option.owner.__name__}"
    hint = option_hint(name, list(options())) or "; docs/options.md lists all"
    return f"unknown option {name}{hint}"


def option_hint(name: str, known: Sequence[str]) -> str:
    """Return the end of an error message: the options in `known` that are similar to `name`.

    Empty if none is. The names in `known` may begin with `--`. Options of techniques are named only
    if no other option is similar.
    """
    of_every_run = [
        each for each in known if each.removeprefix("--").partition(".")[0] not in techniques()
    ]
    similar = nearest_option(name, of_every_run) or nearest_option(name, known)
    return synonyms(name, known) or similar


def with_changes(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Return a copy of the configuration with some options changed.

    `changes` has values of options of the run itself by name, and by the name of a section either a
    new section or a table of some of its options, as in `{"trainer": {"lr": 1e-5}}`. Raises
    `ConfigError` for an unknown option or a value of the wrong type.
    """
    whole = {
        name: value
        for name, value in changes.items()
        if isinstance(value, Section) or name == TECHNIQUE_OPTIONS
    }
    rest = {name: value for name, value in changes.items() if name not in whole}
    return override(replace(config, **whole), read_values(rest, ""))


def read_file(path: Path) -> dict[str, Any]:
    """Return the options in a TOML or JSON file, by full name.

    Raises `ConfigError`, with the file and the option, for an unknown option or a wrong value.
    """
    row = read_mapping(path)
    return read_values(present_names(row) if "recipe" in row else row, str(path))


def stored_config(row: dict[str, Any], source: str = "config.json") -> RunConfig:
    """Return the configuration in a run folder's `config.json`. Options that it lacks get their
    defaults.

    `row` is the content of the file, whose name is `source` in messages. Raises `ConfigError` for
    an unknown option or a wrong value.
    """
    values = read_values(present_names(row), source)
    if "recipe" not in values:
        raise ConfigError(f"{source} has no option recipe")
    values = reset_unread(values)
    return override(RunConfig(recipe=values["recipe"]), values)


def reset_unread(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run, by full name, in which options that are not used have their
    defaults.

    An option is left out if its section does not have it, such as one of an objective that is not
    chosen.
    """
    changed = dict(values)
    for name in _unread(values):
        section, _, field = name.rpartition(".")
        defaults = sections()[section].defaults()
        if field in defaults:
            changed[name] = defaults[field]
        else:
            del changed[name]
    return changed


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in `values`, by full name, with `changes` made.

    Options that are not used after a change are left out.

    >>> merged({"correction.low": 0.9, "max_steps": 2}, {"correction.mode": "none"})
    {'max_steps': 2, 'correction.mode': 'none'}
    """
    joined = {**values, **changes}
    for name, decider in _unread(joined).items():
        if name not in changes and decider in changes:
            del joined[name]
    return joined


def _unread(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the options in `values` that are not used, and must keep their defaults.

    Each is mapped to the option that decides this. Names are full names. Options that `values`
    lacks have their defaults.
    """
    found = {}
    for section, cls in sections().items():
        if not section:
            continue
        prefix = f"{section}."
        own = {
            name.removeprefix(prefix): value
            for name, value in values.items()
            if name.startswith(prefix)
        }
        for name in cls.unread(own):
            found[prefix + name] = prefix + cls.decides(name)
    return found


def changed_options(before: RunConfig, now: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the options that differ between two configurations, by full name.

    Each is mapped to (value in `before`, value in `now`). None stands for an option that a
    configuration does not have.
    """
    values = {name: (option.of(before), option.of(now)) for name, option in options().items()}
    return {name: (old, new) for name, (old, new) in values.items() if old != new}


@cache
def field_docs(section: Any) -> dict[str, str]:
    """Return the docstring under each field of a dataclass, by the field's name, as one line.

    >>> from unstale.config import EvalConfig
    >>> field_docs(EvalConfig)["tasks"]
    'Number of held-out tasks; 0 turns the evaluation off.'
    """
    tree = ast.parse(Path(inspect.getfile(section)).read_text(encoding="utf-8"))
    body = next(
        node.body
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == section.__name__
    )
    docs = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            docs[ast.unparse(field.target)] = " ".join(str(ast.literal_eval(text.value)).split())
    return docs
