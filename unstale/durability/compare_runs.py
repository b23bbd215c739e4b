"""Whether two deterministic runs are the same, bit for bit, in all that was not measured."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from unstale.durability.checkpoint import Checkpoints
from unstale.durability.journal import Journal
from unstale.durability.journal.tables import COLUMNS
from unstale.durability.run_folder import METRICS, SAMPLES, TRAJECTORIES, RunFolder
from unstale.weights.codec import words

MEASURED = ("_s", "/busy_share")
"""How the names of metrics end that a clock gave: seconds, what happened in one, and shares of the time."""

SHOWN = 5
"""Differences of one file or table that are told."""

_POLICY = Path("policy") / "model.safetensors"


def differences(one: Path, other: Path) -> list[str]:
    """What two run folders do not share, in words; nothing for the same run.

    Compared are the weights of every checkpoint and version that both still hold, with the state of every part, the
    trained policy, the journal but for its times, and the files of metrics, conversations and samples but for what is
    `MEASURED`. Raises `JournalError`, `CheckpointError` or `ConfigError` for what cannot be read.
    """
    found = [*_checkpoints(one, other), *_some(str(_POLICY), _unlike(_model(one), _model(other)))]
    with Journal.read(one) as left, Journal.read(other) as right:
        for table in COLUMNS:
            question = f"SELECT * FROM {table} ORDER BY rowid"
            found += _some(
                f"{table} of the journal", _rows(left.rows(question), right.rows(question), table)
            )
    for name in (METRICS, TRAJECTORIES, SAMPLES):
        found += _some(name, _unlike(_lines(one, name), _lines(other, name)))
    return found


def _checkpoints(one: Path, other: Path) -> list[str]:
    left, right = Checkpoints(one, {}), Checkpoints(other, {})
    names = {*left.names} & {*right.names}
    found = [] if names else ["the checkpoints: none has the same name"]
    for name in sorted(names):
        saved, again = left.load(name), right.load(name)
        for what in ("progress", "version", "states", "policy"):
            found += _some(
                f"checkpoint {name}", _unlike(_tree(saved, what), _tree(again, what), what)
            )
    for version in sorted({*left.published} & {*right.published}):
        found += _some(f"version {version}", _unlike(left.weights(version), right.weights(version)))
    return found


def _tree(checkpoint: Any, what: str) -> Any:
    value = getattr(checkpoint, what)
    return [value.step, value.row] if what == "progress" else value


def _model(run: Path) -> dict[str, Tensor]:
    """Nothing while the run has not ended."""
    return load_file(run / _POLICY) if (run / _POLICY).exists() else {}


def _lines(run: Path, name: str) -> list[dict[str, Any]]:
    folder = RunFolder(run)
    return list(folder.rows(name)) if (run / name).exists() else []


def _rows(
    one: Sequence[Sequence[Any]], other: Sequence[Sequence[Any]], table: str
) -> Iterator[str]:
    """Differences of two tables, the times of their rows and the seals over these aside."""
    columns = (*(("id",) if table in ("versions", "events") else ()), *COLUMNS[table])
    for number, rows in enumerate(zip_longest(one, other)):
        if None in rows:
            yield f"row {number} is there only once"
            return
        left, right = (
            {name: _cell(name, cell) for name, cell in zip(columns, row, strict=False)}
            for row in rows
        )
        yield from _unlike(left, right, f"row {number}")


def _cell(column: str, value: Any) -> Any:
    """Times are measured; the fields of an event are told apart by their names."""
    match column:
        case "at":
            return None
        case "fields":
            return json.loads(value)
    return value


def _unlike(one: Any, other: Any, name: str = "") -> Iterator[str]:
    """Where two trees of mappings, lists, tensors, numbers and text differ, measured quantities aside."""
    match one, other:
        case Tensor(), Tensor():
            alike = one.shape == other.shape and one.dtype == other.dtype
            if not alike or not torch.equal(words(one.contiguous()), words(other.contiguous())):
                yield f"{name} differs"
        case Mapping(), Mapping():
            for key in {**one, **other}:
                if _measured(str(key)):
                    continue
                if key in one and key in other:
                    yield from _unlike(one[key], other[key], f"{name}/{key}")
                else:
                    yield f"{name}/{key} is there only once"
        case list(), list():
            for index, (left, right) in enumerate(zip(one, other, strict=False)):
                yield from _unlike(left, right, f"{name}/{index}")
            if len(one) != len(other):
                yield f"{name} has {len(one)} entries, and {len(other)}"
        case _:
            if type(one) is not type(other) or repr(one) != repr(other):
                yield f"{name} is {str(one)[:60]}, and {str(other)[:60]}"


def _measured(name: str) -> bool:
    """Metrics have a room in front of their name; other things may end as they like.

    >>> [_measured(name) for name in ("publish/duration_s", "engine/busy_s", "time_s", "log_s", "layers.0.w_s")]
    [True, True, True, False, False]
    """
    return name == "time_s" or ("/" in name and name.endswith(MEASURED))


def _some(where: str, found: Iterator[str]) -> list[str]:
    """The first few."""
    told = list(found)
    more = [f"{where}: and {len(told) - SHOWN} more"] if len(told) > SHOWN else []
    return [*(f"{where}: {text}" for text in told[:SHOWN]), *more]
