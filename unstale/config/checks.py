"""Check the values of options: the allowed values are part of an option's type."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints


class ConfigError(ValueError):
    """An option with a value that is not allowed. The message has option, value and range."""


@dataclass(frozen=True, slots=True)
class Range:
    """The values that a number may have, both ends included; `above` excludes its end."""

    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf

    def __str__(self) -> str:
        if self.above > -math.inf:
            return f"> {self.above:g}"
        if self.high < math.inf:
            return f"between {self.low:g} and {self.high:g}"
        return f">= {self.low:g}"

    def check(self, name: str, value: float) -> None:
        if not (self.low <= value <= self.high and value > self.above):
            raise ConfigError(f"{name} must be {self}, got {value}")


Count = Annotated[int, Range(0)]
PositiveInt = Annotated[int, Range(1)]
NonNegative = Annotated[float, Range(0)]
Positive = Annotated[float, Range(above=0)]
Share = Annotated[float, Range(0, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A group of options. Making one checks every option by its type.

    The section `advantage` is the class `AdvantageConfig`.
    """

    selector: ClassVar[str] = ""
    """The option that selects a function; `readers` then gives the options of each."""

    def __post_init__(self) -> None:
        cls: Any = type(self)
        section = section_name(cls)
        for name, kind in option_types(cls).items():
            check_value(f"{section}.{name}" if section else name, getattr(self, name), kind)

    @classmethod
    def classes(cls) -> "Sequence[type[Section]]":
        """Return the classes that declare options of this section."""
        return (cls,)

    def with_options(self, **changes: Any) -> Self:
        """Return the section with other values of some options."""
        return replace(self, **changes)

    def readers(self, option: str) -> Sequence[str]:
        """Return the values of the selector that read an option; empty if all do."""
        return ()

    def selection(self) -> str:
        """Return the current selection as error messages show it."""
        return str(getattr(self, self.selector))

    def applies(self, option: str) -> bool:
        """Return False if the current selection does not read the option."""
        readers = self.readers(option)
        return not readers or getattr(self, self.selector) in readers

    def selected_options(self) -> dict[str, Any]:
        """Return the options, by name, that belong to the current selection."""
        chosen = getattr(self, self.selector)
        names = [field.name for field in fields(self) if chosen in self.readers(field.name)]
        return {name: getattr(self, name) for name in names}

    def refuse_unused(self) -> None:
        """Raise `ConfigError` if an option that is not read has another value than its default."""
        for option in fields(self):
            if not self.applies(option.name) and getattr(self, option.name) != option.default:
                section = section_name(type(self))
                readers = ", ".join(self.readers(option.name))
                raise ConfigError(
                    f"{section}.{option.name} is an option of {readers}; "
                    f"{section}.{self.selector} is {self.selection()}"
                )


def section_name(section: Any) -> str:
    """Return the prefix of a section's options; options of the run itself have none.

    >>> class OldLogpsConfig(Section): ...
    >>> section_name(OldLogpsConfig)
    'old_logps'
    """
    lineage = section.__mro__
    base = lineage[lineage.index(Section) - 1]  # options of an environment are the section `task`
    words = str(base.__name__).removesuffix("Config")
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", words).lower()
    return "" if name == "run" else name


@cache
def option_types(section: Any) -> dict[str, Any]:
    """Return name -> type of a section's options, with ranges and choices."""
    types = get_type_hints(section, include_extras=True)
    return {field.name: types[field.name] for field in fields(section)}


def check_value(name: str, value: Any, kind: Any) -> None:
    """Raise `ConfigError` if an option's value is not one that its type allows."""
    if get_origin(kind) is Literal and value not in get_args(kind):
        raise ConfigError(f"{name} cannot be {value!r}{nearest(str(value), get_args(kind))}")
    for rule in getattr(kind, "__metadata__", ()):
        if value is not None:
            rule.check(name, value)


def nearest(word: str, known: Sequence[str]) -> str:
    """Return the known words that resemble `word`, as the end of an error message.

    >>> nearest("snapsht_old", ["rollout", "snapshot_old"])
    '; did you mean snapshot_old?'
    """
    close = get_close_matches(word, known, n=2, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else f"; there are: {', '.join(known)}"


def at_least(section: str, low: float, /, **values: float) -> None:
    """Raise `ConfigError` for the first value that is below `low`."""
    for name, value in values.items():
        Range(low).check(f"{section}.{name}", value)


def within(section: str, low: float, high: float, /, **values: float) -> None:
    """Raise `ConfigError` for the first value that is not between `low` and `high`."""
    for name, value in values.items():
        Range(low, high).check(f"{section}.{name}", value)
