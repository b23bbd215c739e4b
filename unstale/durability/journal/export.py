"""Export a journal: its episodes token by token, its episodes as text, or its samples of tokens."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from math import isnan
from pathlib import Path
from typing import IO, Any, Literal

from unstale.config import ConfigError, install
from unstale.durability.journal.conversations import (
    Decode,
    conversation,
    fork_columns,
    role_columns,
)
from unstale.durability.journal.reader import JournalReader, StoredEpisode
from unstale.durability.journal.token_rows import TrainedTokens
from unstale.durability.run_folder import Row, dumps
from unstale.records import NO_VERSION, Placed, Sampled, Trajectory, walk
from unstale.token_values import TokenFlag

ROW_GROUP = 256
"""Number of rows that are written to a Parquet file at a time, as one row group."""

TRAINED_COLUMNS = ("log_d", "log_s", "weight", "advantage", "entropy", "exact", "outcome")
"""Columns of an exported trajectory with one value for each of its tokens. They exist only if the
journal has the values of trained tokens.
"""

Content = Literal["tokens", "text", "samples"]
"""The kind of rows that an export has. `tokens`: a row is one episode, with a list over its tokens
in each column. `text`: a row is one episode as text. `samples`: a row is one of the tokens that
each step samples for its log (`JournalReader.token_samples`).
"""


def export_rows(journal: JournalReader, content: Content, decode: Decode) -> Iterator[Row]:
    """Yield the rows of an export of `content`. Only one row is in memory at a time.

    `decode` turns tokens into text.
    """
    match content:
        case "tokens":
            kept = journal.token_steps()
            return (_token_row(journal, kept, episode) for episode in journal.trajectories())
        case "text":
            return (conversation(episode, decode) for episode in journal.trajectories())
        case "samples":
            return journal.token_samples()


def _token_row(
    journal: JournalReader, kept: Mapping[int, Sequence[int]], episode: StoredEpisode
) -> Row:
    """Return an episode as a row, with the values of its trained tokens if the journal has any.

    `kept` has, by group, the steps whose token values the journal has. The values are those of the
    first step that trained on the episode. They are None if no such step trained on it.
    """
    row = token_row(episode)
    if not kept:
        return row
    steps = kept.get(episode.group, ())
    own = episode.trajectory.episode
    found = journal.trained_tokens(episode.group, steps[0], episode=own) if steps else []
    return row | trained_columns(episode.trajectory, found[0] if found else None)


def trained_columns(trajectory: Trajectory, values: TrainedTokens | None) -> Row:
    """Return the values of an episode's trained tokens as further columns of its row.

    The columns of `TRAINED_COLUMNS` are lists with one entry for each token of the episode. An
    entry is None for a context token, or if the value is not known. Without `values`, all columns
    are None.
    """
    if values is None:
        return {"route": None, "minibatch": None, **dict.fromkeys(TRAINED_COLUMNS)}
    columns: dict[str, list[Any]] = {
        name: [None if isnan(value) else value for value in getattr(values, name).tolist()]
        for name in ("log_d", "log_s", "weight", "advantage", "entropy")
    }
    columns["exact"] = values.has(TokenFlag.EXACT).tolist()
    columns["outcome"] = values.outcome
    at = [
        isinstance(piece, Sampled) for _, piece, _ in walk(trajectory.pieces) for _ in piece.tokens
    ]
    spread = {}
    for name, column in columns.items():
        entries = iter(column)
        spread[name] = [next(entries) if sampled else None for sampled in at]
    return {"route": values.route, "minibatch": values.minibatch, **spread}


def token_row(episode: StoredEpisode) -> Row:
    """Return an episode as a row of an export. The last six columns are lists with one entry per
    token.
    """
    trajectory = episode.trajectory
    behavior_logp: list[float | None] = []
    source_logp: list[float | None] = []
    version: list[int] = []
    provenance: list[str] = []
    turns: list[int] = []
    for _, piece, turn in walk(trajectory.pieces):
        count = len(piece.tokens)
        provenance += [piece.provenance.name] * count
        turns += [turn] * count
        known = piece.source_logp if isinstance(piece, Placed) else None
        source_logp += known or [None] * count
        if isinstance(piece, Sampled):
            behavior_logp += piece.behavior_logp
            version += [piece.version] * count
        else:
            behavior_logp += [None] * count
            version += [NO_VERSION] * count
    return {
        "task": trajectory.task.key,
        "group": episode.group,
        "episode": trajectory.episode,
        "seed": trajectory.seed,
        "step": episode.step,
        "versions": sorted(trajectory.versions),
        "rewards": dict(trajectory.rewards),
        "reward": trajectory.reward,
        "success": trajectory.success,
        "stop": trajectory.stop,
        **role_columns(trajectory),
        **fork_columns(trajectory),
        "turns": trajectory.num_turns,
        "token": list(trajectory.tokens),
        "behavior_logp": behavior_logp,
        "source_logp": source_logp,
        "version": version,
        "provenance": provenance,
        "turn": turns,
    }


def write_jsonl(rows: Iterable[Row], out: IO[str]) -> None:
    """Write one JSON object per line."""
    for row in rows:
        out.write(dumps(row) + "\n")


def write_parquet(rows: Iterator[Row], content: Content, out: Path) -> None:
    """Write the rows to a Parquet file. Raises `ConfigError` if pyarrow is missing.

    The file has the columns of values of trained tokens if the first row has them.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"Parquet needs the package pyarrow: {install('parquet')}") from error
    first = next(rows, None)
    schema = parquet_schema(pyarrow, content, with_values="log_d" in (first or ()))
    rows = chain([first] if first else [], rows)
    with pyarrow.parquet.ParquetWriter(str(out), schema) as writer:
        while chunk := list(islice(rows, ROW_GROUP)):
            for row in chunk:
                if "rewards" in row:
                    row["rewards"] = list(row["rewards"].items())
            writer.write_table(pyarrow.Table.from_pylist(chunk, schema=schema))


def parquet_schema(pyarrow: Any, content: Content, *, with_values: bool) -> Any:
    """Return the schema of a Parquet export of `content`: its columns and their types.

    `pyarrow` is the module. `with_values` adds the columns of values of trained tokens, such as
    advantages, to an export of `tokens`.
    """
    text, integer, number = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
    versions = pyarrow.list_(pyarrow.int32())
    summary = {
        "task": text,
        "episode": integer,
        "step": integer,
        "versions": versions,
        "reward": number,
        "success": pyarrow.bool_(),
        "stop": text,
        "role": text,
        "role_reward": number,
        "parent": integer,
        "forked_at": integer,
    }
    match content:
        case "samples":
            columns = {"step": integer, "lag": integer, "log_d": number, "log_s": number}
            columns |= {"true_log_d": number, "true_log_s": number}
        case "text":
            piece = {"text": text, "version": integer, "provenance": text, "num_tokens": integer}
            pieces = pyarrow.list_(pyarrow.struct(piece))
            turn = pyarrow.struct({"role": text, "text": text, "pieces": pieces})
            columns = {**summary, "num_tokens": integer, "turns": pyarrow.list_(turn)}
        case "tokens":
            columns = {
                **summary,
                "group": integer,
                "seed": integer,
                "rewards": pyarrow.map_(text, number),
                "turns": pyarrow.int32(),
                "token": pyarrow.list_(pyarrow.uint32()),
                "behavior_logp": pyarrow.list_(pyarrow.float32()),
                "source_logp": pyarrow.list_(pyarrow.float32()),
                "version": versions,
                "provenance": pyarrow.list_(text),
                "turn": versions,
            }
            if with_values:
                numbers = dict.fromkeys(TRAINED_COLUMNS, pyarrow.list_(pyarrow.float32()))
                columns |= {"route": text, "minibatch": pyarrow.int32(), **numbers}
                columns["exact"] = pyarrow.list_(pyarrow.bool_())
                columns["outcome"] = pyarrow.list_(text)
    return pyarrow.schema(columns)
