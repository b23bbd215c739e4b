"""Trajectories for other tools: one row each, and per token what is known of it."""

import json
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

from unstale.config import ConfigError, install
from unstale.durability.journal.reader import JournalReader, Kept
from unstale.records import NO_VERSION, Sampled, walk

CHUNK = 256
"""Trajectories that a Parquet row group holds."""


def row(kept: Kept) -> dict[str, Any]:
    """What both formats write. The last five are lists with one entry a token."""
    trajectory = kept.trajectory
    columns: dict[str, list[Any]] = {
        "behavior_logp": [],
        "version": [],
        "provenance": [],
        "turn": [],
    }
    for _, piece, turn in walk(trajectory.pieces):
        count = len(piece.tokens)
        sampled = isinstance(piece, Sampled)
        columns["behavior_logp"] += (
            piece.behavior_logp if isinstance(piece, Sampled) else [None] * count
        )
        columns["version"] += [piece.version if isinstance(piece, Sampled) else NO_VERSION] * count
        columns["provenance"] += [piece.provenance.name] * count
        columns["turn"] += [turn if sampled else -1] * count
    return {
        "task": trajectory.task.key,
        "group": kept.group,
        "episode": trajectory.episode,
        "seed": trajectory.seed,
        "step": kept.step,
        "versions": sorted(trajectory.versions),
        "rewards": dict(trajectory.rewards),
        "reward": trajectory.reward,
        "success": trajectory.success,
        "stop": trajectory.stop,
        "turns": trajectory.num_turns,
        "token": list(trajectory.tokens),
        **columns,
    }


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null, as in the run folder's other files.

    >>> finite({"a": [0.5, float("nan")], "b": "text"})
    {'a': [0.5, None], 'b': 'text'}
    """
    match value:
        case dict():
            return {name: finite(item) for name, item in value.items()}
        case list():
            return [finite(item) for item in value]
        case float() if not math.isfinite(value):
            return None
    return value


def write_jsonl(journal: JournalReader, out: IO[str]) -> None:
    """A line at a time; the journal may be larger than memory."""
    for kept in journal.trajectories():
        out.write(json.dumps(finite(row(kept)), allow_nan=False) + "\n")


def write_parquet(journal: JournalReader, out: Path) -> None:
    """ConfigError when pyarrow is missing."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"Parquet needs the package pyarrow: {install('parquet')}") from error
    kinds = {
        "task": pyarrow.string(), "group": pyarrow.int64(), "episode": pyarrow.int64(), "seed": pyarrow.int64(),
        "step": pyarrow.int64(), "versions": pyarrow.list_(pyarrow.int32()),
        "rewards": pyarrow.map_(pyarrow.string(), pyarrow.float64()), "reward": pyarrow.float64(),
        "success": pyarrow.bool_(), "stop": pyarrow.string(), "turns": pyarrow.int32(),
        "token": pyarrow.list_(pyarrow.uint32()), "behavior_logp": pyarrow.list_(pyarrow.float32()),
        "version": pyarrow.list_(pyarrow.int32()), "provenance": pyarrow.list_(pyarrow.string()),
        "turn": pyarrow.list_(pyarrow.int32()),
    }  # fmt: skip
    schema = pyarrow.schema(list(kinds.items()))
    with pyarrow.parquet.ParquetWriter(str(out), schema) as writer:
        for rows in _chunks(map(row, journal.trajectories())):
            for each in rows:
                each["rewards"] = list(each["rewards"].items())
            writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))


def _chunks(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    while chunk := list(islice(rows, CHUNK)):
        yield chunk
