"""Read a configuration from a mapping: the JSON file of a run folder."""

import math
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from unstale.config import RunConfig
from unstale.config.checks import ConfigError
from unstale.config.renamed import refuse_renamed

MAX_EXACT_INT = 1 << 53
"""Integers up to this size convert to float without loss."""


def stored_config(row: dict[str, Any], source: str = "config.json") -> RunConfig:
    """Return the configuration that a run folder holds.

    Options that the file lacks have their defaults. Raises `ConfigError` for an unknown or renamed option and for
    a value of the wrong type; the message begins with `source`.
    """
    config: RunConfig = _read_section(RunConfig, row, source, "")
    return config


def _read_section(section: Any, row: Any, source: str, prefix: str) -> Any:
    types = get_type_hints(section)
    if not isinstance(row, dict):
        raise ConfigError(f"{source} is not a section of a configuration")
    unknown = sorted(row.keys() - types.keys())
    for name in unknown:
        refuse_renamed(prefix + name, source)
    if unknown:
        raise ConfigError(f"{source} holds unknown options: {', '.join(unknown)}")
    values = {}
    for name, value in row.items():
        where = f"{source}, {name}"
        if is_dataclass(types[name]):
            values[name] = _read_section(types[name], value, where, f"{prefix}{name}.")
        else:
            values[name] = _read_value(types[name], value, where)
    try:
        return section(**values)
    except TypeError as error:
        raise ConfigError(f"{source}: {error}") from error


def _read_value(kind: Any, value: Any, where: str) -> Any:
    """Return a JSON value as an option's type: paths are strings, infinity is null, 1 stands for 1.0."""
    if get_origin(kind) is Literal:
        kinds = {type(choice) for choice in get_args(kind)}
    else:
        kinds = {*(get_args(kind) or (kind,))}
    if kind is float and value is None:
        return math.inf
    if type(value) is str and Path in kinds:
        return Path(value)
    is_exact = type(value) is int and float in kinds and abs(value) <= MAX_EXACT_INT
    if type(value) in kinds or is_exact:
        return value
    expected = " or ".join(sorted(each.__name__ for each in kinds))
    raise ConfigError(f"{where} cannot be {value!r}: expected {expected}")
