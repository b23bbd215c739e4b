"""Compare two deterministic runs bit for bit."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from unstale.durability.best_policy import BEST, RECORD, read_best
from unstale.durability.checkpoint import Checkpoint, Checkpoints
from unstale.durability.journal import Journal, JournalReader
from unstale.durability.journal.tables import COLUMNS
from unstale.durability.run_folder import METRICS, RunFolder
from unstale.weights.bits import words

MEASURED = ("_s", "/busy_share")
"""Endings of the names of metrics that are measured with the real clock. They are not compared."""

MAX_LISTED = 5
"""Largest number of differences that are listed for one file or one table of the journal."""

_MODELS = ("policy", BEST)
"""Folders of a run folder with the folders with saved weights, in Hugging Face's format."""


def differences(one: Path, other: Path) -> list[str]:
    """Return a sentence for each difference between two run folders. The list is empty for equal
    runs.

    Compared are the checkpoints and versions that both folders have, the trained and the best
    policy, the record of evaluations, the journal and the metrics. Times, and metrics with an
    ending of `MEASURED`, are left out. Raises `JournalError`, `CheckpointError` or `ConfigError` if
    a file cannot be read.
    """
    found = _compare_checkpoints(one, other)
    found += _compare_models(one, other)
    found += _limit(f"{BEST}/{RECORD}", _compare(read_best(one), read_best(other)))
    with Journal.read(one) as left, Journal.read(other) as right:
        for table in COLUMNS:
            rows = _compare(_rows(left, table), _rows(right, table), "row")
            found += _limit(f"{table} of the journal", rows)
    return found + _limit(METRICS, _compare(_metrics(one), _metrics(other)))


def _compare_checkpoints(one: Path, other: Path) -> list[str]:
    left, right = Checkpoints(one, {}), Checkpoints(other, {})
    names = sorted({*left.names} & {*right.names})
    found = [] if names else ["the checkpoints: none has the same name"]
    for name in names:
        contents = _compare(_contents(left.load(name)), _contents(right.load(name)))
        found += _limit(f"checkpoint {name}", contents)
    for version in sorted({*left.versions} & {*right.versions}):
        weights = _compare(left.weights(version), right.weights(version))
        found += _limit(f"version {version}", weights)
    return found


def _contents(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint's contents without step and version, which its name has."""
    row = checkpoint.progress.row
    return {"row": row, "states": checkpoint.states, "policy": checkpoint.policy}


def _compare_models(one: Path, other: Path) -> list[str]:
    """Compare the models that both runs saved. One that only one of them has differs."""
    found = []
    pairs = [(run, run / name) for run in (one, other) for name in _MODELS]
    files = {path.relative_to(run) for run, each in pairs for path in each.rglob("*.safetensors")}
    for file in sorted(files):
        found += _limit(str(file), _compare(_weights(one / file), _weights(other / file)))
    return found


def _weights(file: Path) -> dict[str, Tensor]:
    return load_file(file) if file.exists() else {}


def _metrics(run: Path) -> list[dict[str, Any]]:
    return RunFolder(run).metrics() if (run / METRICS).exists() else []


def _rows(journal: JournalReader, table: str) -> list[dict[str, Any]]:
    """Return the rows of a journal's table without times.

    The checksums of the rows are left out too, because they cover the times.
    """
    # in forks, `at` is a place
    columns = [name for name in COLUMNS[table] if name != "at" or table == "forks"]
    values = journal.rows(f"SELECT {', '.join(columns)} FROM {table} ORDER BY rowid")
    rows = [dict(zip(columns, row, strict=True)) for row in values]
    if table == "events":
        rows = [{**row, "fields": json.loads(row["fields"])} for row in rows]
    return rows


def _compare(one: Any, other: Any, name: str = "") -> Iterator[str]:
    """Yield a text for each difference between two trees of mappings, lists and other values.

    `name` is the path of the two trees within the compared files.
    """
    match one, other:
        case Tensor(), Tensor():
            alike = one.shape == other.shape and one.dtype == other.dtype
            if not alike or not torch.equal(words(one.contiguous()), words(other.contiguous())):
                yield f"{name} differs"
        case Mapping(), Mapping():
            for key in {**one, **other}:
                if _is_measured(str(key)):
                    continue
                if key in one and key in other:
                    yield from _compare(one[key], other[key], f"{name}/{key}")
                else:
                    yield f"{name}/{key} is in only one of them"
        case list(), list():
            for index, (left, right) in enumerate(zip(one, other, strict=False)):
                yield from _compare(left, right, f"{name}/{index}")
            if len(one) != len(other):
                yield f"{name} has {len(one)} and {len(other)} entries"
        case _:
            if type(one) is not type(other) or repr(one) != repr(other):
                yield f"{name} is {str(one)[:60]} and {str(other)[:60]}"


def _is_measured(name: str) -> bool:
    """Return True for the name of a metric that depends on the real clock.

    Only names of metrics have a `/`. Other names, such as those of weights, give False.

    >>> names = ("publish/duration_s", "engine/busy_s", "time_s", "log_s", "layers.0.w_s")
    >>> [_is_measured(name) for name in names]
    [True, True, True, False, False]
    """
    return name == "time_s" or ("/" in name and name.endswith(MEASURED))


def _limit(where: str, found: Iterable[str]) -> list[str]:
    """Return the first `MAX_LISTED` differences, and a line with the number of further ones, if
    any.

    `where` begins each line.
    """
    texts = list(found)
    listed = [f"{where}: {text}" for text in texts[:MAX_LISTED]]
    if len(texts) > MAX_LISTED:
        listed.append(f"{where}: and {len(texts) - MAX_LISTED} more")
    return listed
