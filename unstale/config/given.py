"""Names for Python objects that are passed as options: functions, task sets, trackers and rows."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Self

HERE = "__main__:"
"""Beginning of the name of an object that only this process can use."""

OR_SINK = (
    ", or a function of the run that returns an unstale.Sink, an object with its methods write(), "
    "text() and close(), or a list of these (docs/trackers.md)"
)
"""End of an error message: what the option `trackers` accepts in a Python program."""


class Given(str):
    """The name of a Python object that was passed as an option, which has the object as `value`.

    A copy that is sent to another process is a plain `str` without the object.
    """

    value: Any

    def __new__(cls, name: str, value: Any) -> Self:
        given = super().__new__(cls, name)
        given.value = value
        return given

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # another process gets only the name


@dataclass(frozen=True, slots=True)
class NameObject:
    """A rule in the type of an option: in Python, its value may be an object in place of a name."""

    name: Callable[[Any], Any]
    """A function that returns the name of an object that is allowed, and other values unchanged."""
    accepts: str = ""
    """Text on the objects that are allowed, for the error message."""

    def convert(self, value: Any) -> Any:
        return value if isinstance(value, str) else self.name(value)

    def check(self, name: str, value: str) -> None:
        """Do nothing: every text is allowed as a name."""


def name_function(value: Any) -> Any:
    """Return `module:function` for a function or class that can be imported, and other values
    unchanged.

    For a function that cannot be imported, return a `Given`, which only this process can use.

    >>> name_function(attrgetter), type(name_function(lambda reply, row: 1.0))
    ('operator:attrgetter', <class 'unstale.config.given.Given'>)
    """
    if not callable(value):
        return value
    module = getattr(value, "__module__", None) or "__main__"
    name = getattr(value, "__qualname__", type(value).__qualname__)
    try:
        is_found = attrgetter(name)(sys.modules[module]) is value
    except (AttributeError, KeyError):
        is_found = False
    if is_found and module != "__main__":
        return f"{module}:{name}"
    return Given(f"{HERE}{name}", value)


def name_functions(value: Any) -> Any:
    """Return the name of a function, or of all functions of a list.

    Return other values unchanged.
    """
    if isinstance(value, list | tuple) and value and all(map(callable, value)):
        names = "+".join(getattr(each, "__name__", type(each).__name__) for each in value)
        return Given(f"{HERE}{names}", value)
    return name_function(value)


def name_tasks(value: Any) -> Any:
    """Return a value for the option `task.env`, given rows, a task set, or a function that makes
    one.

    Return other values unchanged.
    """
    if hasattr(value, "held_out") and hasattr(value, "train") and not isinstance(value, type):
        return Given(f"{HERE}{type(value).__qualname__}", lambda: value)
    return name_function(value) if callable(value) else name_rows(value, f"dataset:{HERE}rows")


def name_held_out_rows(value: Any) -> Any:
    return name_rows(value, f"{HERE}held_out_rows")


def name_trackers(value: Any) -> Any:
    """Return a `Given` for a tracker or a list of trackers. It names them, separated by commas.

    A tracker is a name, a `Sink` (an object that receives metrics and texts), or a function that
    returns a `Sink`. Return other values unchanged.
    """
    trackers = value if isinstance(value, list | tuple) else [value]
    names = []
    for each in trackers:
        if isinstance(each, str):
            names.append(each)
        elif all(callable(getattr(each, method, None)) for method in ("write", "text", "close")):
            names.append(f"{HERE}{type(each).__qualname__}")
        elif callable(each):
            names.append(str(name_function(each)))
        else:
            return value
    return Given(",".join(names), trackers)


def name_rows(value: Any, name: str) -> Any:
    """Return a `Given` with the name `name` for rows: any iterable except `bytes`, such as a list.

    Return other values unchanged.
    """
    is_rows = isinstance(value, Iterable) and not isinstance(value, bytes)
    return Given(name, value) if is_rows else value
