"""Check the values of options against their types, which define the allowed values."""

import argparse
import json
import math
import re
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from reprlib import repr as short_repr
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Self,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from unstale.config.given import NameObject
from unstale.config.names import unique_names, value_hint

MAX_EXACT_INT = 1 << 53
"""Largest finite number that an option may have: 2^53. A float can hold every integer up to it."""


class ConfigError(ValueError):
    """Error: a mistake of the user, mostly in an option.

    The text names the option, its value and what is allowed.
    """


@dataclass(frozen=True, slots=True)
class Range:
    """A rule in the type of an option: its value must be a number in a range.

    It must be at least `low`, at most `high`, and greater than `above`. None sets no limit.
    """

    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf

    def __str__(self) -> str:
        if self.above > -math.inf:
            return f"> {self.above:g}"
        if self.high < math.inf:
            return f"between {self.low:.10g} and {self.high:.10g}"
        return f">= {self.low:g}"

    def check(self, name: str, value: float) -> None:
        if not (self.low <= value <= self.high and value > self.above):
            raise ConfigError(f"{name} must be {self}, got {_shortened(value)}")


@dataclass(frozen=True, slots=True)
class OneOf:
    """A rule in the type of an option: its value must be one of some names.

    `table()` returns allowed name -> names of the options of the section that are used if the
    option has this value. Options that are used with every value are left out.
    """

    table: Callable[[], Mapping[str, Collection[str]]]

    def check(self, name: str, value: str) -> None:
        known = self.table()
        if value not in known:
            raise ConfigError(f"{name} cannot be {value!r}{value_hint(name, value, list(known))}")

    def readers(self, option: str) -> list[str]:
        """Return the allowed names with which `option` is used. Empty if it is used with all of
        them.
        """
        return [name for name, options in self.table().items() if option in options]


@dataclass(frozen=True, slots=True)
class JsonObject:
    """A rule in the type of an option: its value must be empty, or a JSON object as text."""

    def convert(self, value: Any) -> Any:
        """Return a dict, such as a TOML table gives, as JSON text.

        Return other values unchanged.
        """
        return json.dumps(value) if isinstance(value, dict) else value

    def check(self, name: str, value: str) -> None:
        try:
            is_object = not value or isinstance(
                json.loads(value, object_pairs_hook=unique_names), dict
            )
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise ConfigError(f'{name} must be a JSON object such as {{"a": 1}}, got {value!r}')


def bounded(kind: type[int] | type[float], low: float, high: float) -> Callable[[str], float]:
    """Return a function that parses a number from `low` to `high`, for argparse's parameter `type`.

    `kind` is `int` or `float`.
    """

    def number(text: str) -> float:
        value = kind(text)
        try:
            Range(low, high).check("", value)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error).strip()) from error
        return value

    number.__name__ = kind.__name__  # argparse names it in its message
    return number


def output_file(text: str) -> Path:
    """Return the path of a file that a command writes at its end, for argparse's parameter `type`.

    A path that cannot be written is refused before any work.
    """
    path = Path(text)
    try:
        require_writable(path)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def require_writable(path: Path) -> None:
    """Raise `ConfigError` if `path` is a folder, or a file that cannot be written."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder, and must be a file")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error


def is_served(name: str) -> bool:
    """Return True if a name is the address of a server."""
    return name.startswith(("http://", "https://"))


def require_empty_folder(folder: Path) -> None:
    """Raise `ConfigError` if `folder` is a file, or a folder that is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder. Name a new or empty one")


def check_size(name: str, value: Any) -> None:
    """Raise `ConfigError` if `value` is a finite number above `MAX_EXACT_INT`. `name` is the
    option.
    """
    if type(value) in (int, float) and MAX_EXACT_INT < abs(value) < math.inf:
        raise ConfigError(
            f"{name} must be at most {MAX_EXACT_INT} in size, got {_shortened(value)}"
        )


def _shortened(value: float) -> str:
    digits = str(value)
    return digits if len(digits) <= 30 else f"{digits[:10]}... ({len(digits)} digits)"


Count = Annotated[int, Range(0)]
PositiveInt = Annotated[int, Range(1)]
NonNegative = Annotated[float, Range(0)]
Positive = Annotated[float, Range(above=0)]
Share = Annotated[float, Range(0, 1)]


class _OptionNames(type):
    """The metaclass of sections. Creating a section with an unknown option raises `ConfigError`."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        for name in options:
            # A section with variants checks the names itself, because they depend on the variant.
            if name not in known and "__new__" not in vars(base_of(cls)):  # type: ignore[arg-type]
                section = section_name(cls)  # type: ignore[arg-type]
                raise ConfigError(unknown_option(f"{section}.{name}" if section else name))
        return super().__call__(*args, **options)


def unknown_option(name: str) -> str:
    """Return an error message about an option that does not exist, with options of similar name."""
    # an import at the top of the file would be circular
    text: str = import_module("unstale.config.options").unknown_option(name)
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Section(metaclass=_OptionNames):
    """A section of the configuration: a group of options, such as `trainer` with `trainer.lr`.

    Each section is a subclass, such as `AdvantageConfig` for `advantage`. Each of its fields is an
    option. The constructor checks each option by its type, and then the combination of options.
    """

    abstract: ClassVar[bool] = True
    """True in a base class of sections that is not a section itself, such as `VariantSection`."""
    selector: ClassVar[str] = ""
    """The option whose value decides which other options of the section are used, such as `route`
    in `old_logps`. Empty if there is none.
    """
    read_by: ClassVar[Mapping[str, Sequence[str]]] = {}
    """For each option, the values of the selector with which it is used. With other values, it must
    keep its default. Options that are always used are left out.
    """
    refused_unread: ClassVar[Sequence[str]] = ()
    """Options, besides those of `read_by`, that must keep their defaults if `applies` returns False
    for them.
    """
    read_with: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Options that are used only if another option than the selector has certain values. Each is
    mapped to that option and the condition, such as `= true`.
    """

    def __post_init__(self) -> None:
        cls: Any = type(self)
        section = section_name(cls)
        for name, kind in option_types(cls).items():
            value = converted(getattr(self, name), kind)
            object.__setattr__(self, name, value)
            check_value(f"{section}.{name}" if section else name, value, kind)
        self._refuse_unread()
        self.check_combination()

    def check_combination(self) -> None:
        """Raise `ConfigError` if the values of several options are not allowed together.

        Sections override this method.
        """

    def _refuse_unread(self) -> None:
        """Raise `ConfigError` if an option differs from its default although it is not used."""
        defaults = self.defaults()
        for name in self.unread(self._values()):
            value = getattr(self, name)
            if value == defaults[name]:
                continue
            section = section_name(type(self))
            if name in self.read_with:
                setting = f"{section}.{' '.join(self.read_with[name])}"
                raise ConfigError(f"{section}.{name} = {value} is used only with {setting}")
            raise ConfigError(
                f"{section}.{name} is an option of {', '.join(self.readers(name))}; "
                f"{section}.{self.selector} is {getattr(self, self.selector)}"
            )

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the default of each option of the section, by name."""
        return {field.name: field.default for field in fields(cls)}

    def _values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def unread(cls, values: Mapping[str, Any]) -> list[str]:
        """Return the options in `values` that are not used with these values, and must keep their
        defaults.

        `values` has options of the section by name. Options that it lacks have their defaults.
        """
        names = [name for name in (*cls.read_by, *cls.refused_unread) if name in values]
        if not names:
            return []
        section = object.__new__(cls)  # the constructor would refuse the options
        for name, default in cls.defaults().items():
            object.__setattr__(section, name, values.get(name, default))
        return [name for name in names if not section.applies(name)]

    @classmethod
    def decides(cls, option: str) -> str:
        """Return the name of the option whose value decides whether `option` is used. "" if there
        is none.
        """
        return cls.read_with[option][0] if option in cls.read_with else cls.selector

    @classmethod
    def classes(cls) -> "Sequence[type[Section]]":
        """Return all classes that declare options of this section. A section with variants has
        several.
        """
        return (cls,)

    def with_options(self, **changes: Any) -> Self:
        """Return a copy of the section in which some options have other values.

        An option that these changes make unused gets its default, if `unread` names it.
        """
        defaults = self.defaults()
        resets = {name: defaults[name] for name in self.unread({**self._values(), **changes})}
        return replace(self, **{**resets, **changes})

    @classmethod
    def readers(cls, option: str) -> list[str]:
        """Return the values of the selector with which `option` is used.

        The selector is the option, such as `route`, whose value decides this. Empty if `option` is
        always used.
        """
        if cls.read_by or not cls.selector:
            return list(cls.read_by.get(option, ()))
        (rule,) = option_types(base_of(cls))[cls.selector].__metadata__
        return list(rule.readers(option))

    def applies(self, option: str) -> bool:
        """Return True if the section has the option, and uses it with the selector's present
        value.
        """
        readers = self.readers(option)
        is_read = not readers or getattr(self, self.selector) in readers
        return is_read and option in {field.name for field in fields(self)}

    def selected_options(self) -> dict[str, Any]:
        """Return name -> value of the options that are used because of the selector's value.

        The selector is an option such as `route`. Options that are always used are left out.
        """
        chosen = getattr(self, self.selector)
        names = [field.name for field in fields(self) if chosen in self.readers(field.name)]
        return {name: getattr(self, name) for name in names}


def base_of(section: type[Section]) -> Any:
    """Return the common base class of a section's variants, such as `OldLogpsConfig` for a route's
    class.

    A section without variants is returned itself.
    """
    lineage = [each for each in section.__mro__ if issubclass(each, Section)]
    return next(each for each in reversed(lineage) if not vars(each).get("abstract"))


def section_name(section: type[Section]) -> str:
    """Return the prefix of a section's options, or "" for the options of the run itself.

    >>> class OldLogpsConfig(Section): ...
    >>> section_name(OldLogpsConfig)
    'old_logps'
    """
    words = base_of(section).__name__.removesuffix("Config")
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", words).lower()
    return "" if name == "run" else name


@cache
def option_types(section: Any) -> dict[str, Any]:
    """Return the type of each option of a section, by the option's name.

    A type with rules for its values, such as `Range`, is an `Annotated` that contains them.
    """
    types = get_type_hints(section, include_extras=True)
    return {field.name: types[field.name] for field in fields(section)}


_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
    type(None): "null",
}
"""Types of options in words, for error messages."""


def _with_article(kind: type) -> str:
    name = kind.__name__
    return f"an {name}" if name[0] in "AEIOU" else f"a {name}"


def kinds_of(kind: Any) -> tuple[Any, ...]:
    """Return the Python types that a value of an option may have.

    `kind` is the annotation of the option.
    """
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    origin = get_origin(kind)
    if origin is Literal:
        return (str,)
    if origin in (UnionType, Union):
        return get_args(kind)
    return (origin or kind,)


def converted(value: Any, kind: Any) -> Any:
    """Convert an option's value from the form used in Python or a TOML file to the option's type.

    By the type `kind`, a text becomes a path, a table JSON text, and a function or other object its
    name. Other values are returned unchanged.
    """
    if isinstance(value, str) and Path in kinds_of(kind):
        return Path(value)
    for rule in getattr(kind, "__metadata__", ()):
        if isinstance(rule, JsonObject | NameObject):
            value = rule.convert(value)
    return value


def check_type(name: str, value: Any, kind: Any) -> None:
    """Raise `ConfigError` if `value` has none of the Python types that `kind` allows.

    `name` is the option's full name. An integer is allowed where a float is.
    """
    kinds = kinds_of(kind)
    if isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool)):
        return
    if type(value) is int and float in kinds:
        return check_size(name, value)
    expected = " or ".join(sorted(_WORDS.get(each, _with_article(each)) for each in kinds))
    rules = getattr(kind, "__metadata__", ())
    expected += next((rule.accepts for rule in rules if isinstance(rule, NameObject)), "")
    hint = ""
    if issubclass(kinds[0], Section) and isinstance(value, Mapping):
        hint = f". Write {kinds[0].__name__}(...), or give it as a table to a recipe"
    raise ConfigError(f"{name} must be {expected}, got {short_repr(value)}{hint}")


def check_value(name: str, value: Any, kind: Any) -> None:
    """Raise `ConfigError` if `value` is not allowed by the option's type `kind`."""
    check_size(name, value)
    check_type(name, value, kind)
    if get_origin(kind) is Literal and value not in get_args(kind):
        hint = value_hint(name, str(value), get_args(kind))
        raise ConfigError(f"{name} cannot be {value!r}{hint}")
    for rule in getattr(kind, "__metadata__", ()):
        if value is not None:
            rule.check(name, value)
    if isinstance(value, float) and math.isnan(value):
        raise ConfigError(f"{name} must be a number, got nan")
