"""Read TOML and JSON files from untrusted sources, and wait until files are on disk."""

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from unstale.config.checks import ConfigError
from unstale.config.names import unique_names

MAX_DEPTH = 100
"""Largest nesting depth of a value in a file. Python and templates cannot process much deeper
values.
"""


def flush_to_disk(path: Path) -> None:
    """Block until a file, or a folder's list of files, is on disk and so safe from a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or the table in a file whose name ends with .toml.

    Raises `ConfigError` if the file cannot be read, is nested too deeply, or has no object.
    """
    kind = "TOML" if path.suffix == ".toml" else "JSON"
    try:
        text = path.read_text(encoding="utf-8")
        value = (
            tomllib.loads(text)
            if kind == "TOML"
            else json.loads(text, object_pairs_hook=unique_names)
        )
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid {kind}: {error}") from None
    except RecursionError:
        value = _TOO_DEEP
    if value is _TOO_DEEP or is_too_deep(value):
        raise ConfigError(f"{path} is nested more than {MAX_DEPTH} times: flatten its values")
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold an object, got {value!r:.40}")
    return value


_TOO_DEEP = object()


def is_too_deep(value: Any, limit: int = MAX_DEPTH) -> bool:
    """Return True if lists and mappings in `value` are nested more than `limit` deep.

    >>> is_too_deep([[1]], 1), is_too_deep([[1]], 2)
    (True, False)
    """
    level = [value]
    for _ in range(limit):
        level = [each for outer in level for each in _contents(outer)]
    return any(isinstance(each, list | tuple | Mapping) for each in level)


def _contents(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()
