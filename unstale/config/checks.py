"""What a knob can be: one clear message for a value that it cannot have."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Literal, get_args, get_origin, get_type_hints


class ConfigError(ValueError):
    """A knob has a value it cannot have. The message names field, value and range."""


def at_least(where: str, low: float, /, **values: float) -> None:
    """No value of the section is lower."""
    for name, value in values.items():
        if not value >= low:
            raise ConfigError(f"{where}.{name} must be >= {low:g}, got {value}")


def within(where: str, low: float, high: float, /, **values: float) -> None:
    """Every value of the section is in the range, its ends included."""
    for name, value in values.items():
        if not low <= value <= high:
            raise ConfigError(f"{where}.{name} must be between {low:g} and {high:g}, got {value}")


def nearest(word: str, known: Sequence[str]) -> str:
    """The words somebody may have meant, as the end of a sentence.

    >>> nearest("snapsht_old", ["rollout", "snapshot_old"])
    '; did you mean snapshot_old?'
    """
    close = get_close_matches(word, known, n=2, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else f"; there are: {', '.join(known)}"


def among_choices(where: str, section: object) -> None:
    """Fields with a fixed set of words hold one of them, also when they come from Python."""
    for name, kind in get_type_hints(type(section)).items():
        value = getattr(section, name)
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise ConfigError(
                f"{where}.{name} cannot be {value!r}{nearest(str(value), get_args(kind))}"
            )
