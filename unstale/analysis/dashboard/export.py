"""Send a selection of episodes or tokens as a file, JSON lines or Parquet, in parts.

All selected rows are sent. The memory needed is that of one part, and the journal is read in short
transactions. If a part cannot be read, the download breaks off, so that an incomplete file is not
taken for a complete one.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from math import isfinite
from typing import Any, Literal, get_args

import numpy as np

from unstale.analysis.dashboard.database import COLUMNS
from unstale.analysis.dashboard.factors import Brush, TokenChoice, find_rows, require_values
from unstale.analysis.dashboard.index import RunIndex
from unstale.analysis.dashboard.journals import open_journal, unreadable
from unstale.analysis.dashboard.table import (
    BadQuestion,
    Condition,
    as_row,
    parse_filter,
    parse_search,
)
from unstale.analysis.dashboard.tokens import NotYet
from unstale.config import install
from unstale.durability.journal import JournalReader
from unstale.durability.journal.export import parquet_schema, token_row, trained_columns
from unstale.durability.journal.token_rows import TrainedTokens
from unstale.durability.run_folder import Row, dumps
from unstale.records import Piece, Sampled, walk
from unstale.token_values import TokenFlag

Content = Literal["table", "tokens", "brushed"]
"""The meaning of a row of the file. `table`: an episode with the columns of the table of episodes.
`tokens`: a finished episode with lists over its tokens, as `unstale export-trajectories` writes it.
`brushed`: a trained token.
"""

Format = Literal["jsonl", "parquet"]

KINDS = {"jsonl": "application/x-ndjson", "parquet": "application/vnd.apache.parquet"}

PART_ROWS = 256
"""Largest number of rows in a part of a file, which is a row group of Parquet."""

PART_TOKENS = 100_000
"""Largest number of tokens in a part whose rows have lists over tokens. An episode with more tokens
is a part by itself.
"""

PAGE = 500
"""Number of episodes that are read at a time from the run's index, a database."""

EPISODES = 8
"""Number of episodes that are read from the journal in one transaction."""

_FLOATS = frozenset(
    {
        "reward",
        "advantage",
        "log_d_abs_max",
        "log_s_abs_max",
        "behavior_logp_mean",
        "behavior_logp_min",
    }
)
"""Columns of the table of episodes whose values are not whole numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """A request for a download from the dashboard.

    Episodes are selected by `filter` and `search`. Trained tokens are selected by `choice` (limits
    of step and lag, exact or not) and by `brush`, a rectangle in the plane of log D and log S.
    """

    content: str
    format: str
    filter: str = ""
    search: str = ""
    choice: TokenChoice = field(default_factory=TokenChoice)
    brush: Brush = field(default_factory=Brush)

    def __post_init__(self) -> None:
        for name, allowed in (("content", get_args(Content)), ("format", get_args(Format))):
            if getattr(self, name) not in allowed:
                raise BadQuestion(
                    f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}"
                )


def file_name(run: str, selection: ExportRequest) -> str:
    """Return the name of a download of the run `run`: letters, digits, dots, hyphens, underscores.

    >>> file_name("a/../b\\r\\n.", ExportRequest(content="table", format="jsonl"))
    'a-..-b-table.jsonl'
    """
    safe = re.sub(r"[^A-Za-z0-9._]+", "-", run)[:80].strip(".-") or "run"
    return f"{safe}-{selection.content}.{selection.format}"


def parquet_problem() -> str:
    """Return a sentence on why Parquet cannot be written. Empty if it can be written."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        return f"Parquet needs the package pyarrow: {install('parquet')}"
    return ""


def parts(index: RunIndex, selection: ExportRequest) -> Iterator[bytes]:
    """Return the parts of a file. The first row is computed before returning, so errors come early.

    Raises `BadQuestion`, `JournalError`, `NotYet` if the index does not have all episodes yet, and
    OSError without a journal or if the index has failed.
    """
    if selection.format == "parquet" and (problem := parquet_problem()):
        raise BadQuestion(problem)
    rows: Iterator[Row]
    size: Callable[[Row], int] = _one
    with_values = False
    if selection.content == "table":
        rows = _table(index, selection)
    else:
        if problem := unreadable(index.folder):
            raise FileNotFoundError(problem)
        if selection.content == "brushed":
            rows = _brushed(index, selection)
        else:
            with open_journal(index.folder) as journal:
                with_values = bool(journal.num_token_values)
            rows, size = _episodes(index, selection, with_values=with_values), _num_tokens
    first = list(islice(rows, 1))
    grouped = _grouped(chain(first, rows), size)
    if selection.format == "jsonl":
        return ("".join(dumps(row) + "\n" for row in part).encode() for part in grouped)
    return _parquet(grouped, selection, with_values=with_values)


def _one(row: Row) -> int:
    return 1


def _num_tokens(row: Row) -> int:
    return len(row["token"])


def _grouped(rows: Iterable[Row], size: Callable[[Row], int]) -> Iterator[list[Row]]:
    """Yield the rows in parts of at most `PART_ROWS` rows and `PART_TOKENS` tokens."""
    part: list[Row] = []
    total = 0
    for row in rows:
        count = size(row)
        if part and (len(part) == PART_ROWS or total + count > PART_TOKENS):
            yield part
            part, total = [], 0
        part.append(row)
        total += count
    if part:
        yield part


class _Pipe:
    """A file object in memory. `take` returns what was written since the last call."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._at = 0
        self.closed = False

    def write(self, data: Any) -> int:
        data = bytes(data)
        self._parts.append(data)
        self._at += len(data)
        return len(data)

    def tell(self) -> int:
        return self._at

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def take(self) -> bytes:
        data = b"".join(self._parts)
        self._parts.clear()
        return data


def _parquet(
    grouped: Iterator[list[Row]], selection: ExportRequest, *, with_values: bool
) -> Iterator[bytes]:
    """Yield the bytes of a Parquet file: one row group per part, and the footer at the end."""
    import pyarrow
    import pyarrow.parquet

    if selection.content == "tokens":
        schema = parquet_schema(pyarrow, "tokens", with_values=with_values)
    else:
        schema = _schema(pyarrow, selection.content)
    pipe = _Pipe()
    with pyarrow.parquet.ParquetWriter(pyarrow.PythonFile(pipe, "w"), schema) as writer:
        for part in grouped:
            for row in part:
                for name in ("rewards", "figures"):
                    if name in row:
                        row[name] = list(row[name].items())
            writer.write_table(pyarrow.Table.from_pylist(part, schema=schema))
            yield pipe.take()
    yield pipe.take()


def _schema(pyarrow: Any, content: str) -> Any:
    text, integer, number = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
    if content == "table":
        columns = {
            column.name: text
            if column.kind == "text"
            else (number if column.name in _FLOATS else integer)
            for column in COLUMNS
        }
        columns |= {"figures": pyarrow.map_(text, number), "is_branch": pyarrow.bool_()}
        return pyarrow.schema(columns | {"note": text})
    small = pyarrow.float32()
    whole = ("episode", "group", "step", "token", "id", "version", "lag", "turn")
    columns = dict.fromkeys(whole, integer)
    columns |= dict.fromkeys(_VALUES, small)
    columns |= {"exact": pyarrow.bool_(), "outcome": text, "route": text, "minibatch": integer}
    return pyarrow.schema(columns)


def _table(index: RunIndex, selection: ExportRequest) -> Iterator[Row]:
    """Yield the selected rows of the table of episodes, in the order of the episodes' numbers."""
    names = [column.name for column in COLUMNS]
    for rows in _pages(index, selection, f"{', '.join(names)}, is_branch, note"):
        found = [as_row(row, names) for row in rows]
        marks = ", ".join("?" * len(found))
        figures: dict[int, Row] = {row["episode"]: {} for row in found}
        for episode, name, value in index.database.rows(
            f"SELECT episode, name, value FROM figures WHERE episode IN ({marks}) ORDER BY name",
            tuple(figures),
        ):
            figures[episode][name] = value
        for row in found:
            yield {
                **{name: row.get(name) for name in names},
                "figures": figures[row["episode"]],
                "is_branch": row["is_branch"],
                "note": row["note"],
            }


def _pages(
    index: RunIndex, selection: ExportRequest, names: str, *more: Condition
) -> Iterator[list[tuple[Any, ...]]]:
    """Yield the columns `names` of the selected episodes, as lists of at most `PAGE` rows.

    The first column must be the episode's number. Raises `NotYet` if the index does not have all
    episodes or texts yet, and OSError if the journal was replaced.
    """
    _require_complete(index)
    conditions = [*parse_filter(selection.filter), *more]
    if selection.search and index.search_problem:
        raise BadQuestion(index.search_problem)
    if selection.search:
        index.want_words()
        if index.lacks_words:
            read = f"{index.num_searchable} of {index.num_ended} episodes"
            raise NotYet(f"the texts are not read yet: {read} can be searched")
    if search := parse_search(selection.search):
        conditions.append(search)
    where = "".join(f" AND {condition.sql}" for condition in conditions)
    parameters = [value for condition in conditions for value in condition.parameters]
    last, begun = -1, index.num_restarts
    while True:
        rows = index.database.rows(
            f"SELECT {names} FROM episodes WHERE episode > ?{where} ORDER BY episode LIMIT {PAGE}",
            (last, *parameters),
        )
        if index.num_restarts != begun:
            raise OSError(f"the journal of {index.folder.name} was replaced during the export")
        if not rows:
            return
        yield rows
        last = rows[-1][0]


def _require_complete(index: RunIndex) -> None:
    """Raise `NotYet` if the run's database lacks episodes of the journal, OSError if it failed."""
    if problem := index.failure or index.problem:
        raise OSError(problem)
    if not index.is_complete:
        raise NotYet(f"not all episodes are read yet: {index.coverage}")


def _episodes(index: RunIndex, selection: ExportRequest, *, with_values: bool) -> Iterator[Row]:
    """Yield the selected episodes that finished, with their tokens."""
    finished = Condition("outcome IN ('trained', 'waiting')")
    for rows in _pages(index, selection, "episode", finished):
        for start in range(0, len(rows), EPISODES):
            with open_journal(index.folder) as journal:
                found = [
                    _episode(journal, each, with_values=with_values)
                    for (each,) in rows[start : start + EPISODES]
                ]
            yield from found


def _episode(journal: JournalReader, number: int, *, with_values: bool) -> Row:
    """Return a finished episode. `with_values` adds the tokens' values in its first training."""
    episode = journal.episode(number)
    row = token_row(episode)
    if not with_values:
        return row
    values = journal.trained_tokens(episode.group, episode=number)
    return row | trained_columns(episode.trajectory, values[0] if values else None)


def _brushed(index: RunIndex, selection: ExportRequest) -> Iterator[Row]:
    """Yield the chosen tokens inside the selection's brush, in order of steps, groups and episodes.

    Without a brush, all chosen tokens are yielded, also those without a log D or log S.
    """
    with open_journal(index.folder) as journal:
        rows = find_rows(journal, selection.choice, limit=2**62).rows
    for row in rows:
        with open_journal(index.folder) as journal:
            found = journal.trained_tokens(row.group, row.step)
            require_values(found, row)
            trained = [(values, journal.pieces(values.episode)) for values in found]
        # Outside of the transaction, because a slow client would keep it open.
        for values, pieces in trained:
            yield from _tokens_of(values, pieces, selection)


_VALUES = (
    "behavior_logp",
    "old_logp",
    "logp",
    "log_d",
    "log_s",
    "weight",
    "advantage",
    "entropy",
)


def _tokens_of(
    values: TrainedTokens, pieces: Sequence[Piece], selection: ExportRequest
) -> Iterator[Row]:
    """Yield a row for each selected trained token of an episode."""
    sampled = [
        (start, piece, turn) for start, piece, turn in walk(pieces) if isinstance(piece, Sampled)
    ]
    places = [start + i for start, piece, _ in sampled for i in range(len(piece.tokens))]
    ids = [token for _, piece, _ in sampled for token in piece.tokens]
    versions = [piece.version for _, piece, _ in sampled for _ in piece.tokens]
    turns = [turn for _, piece, turn in sampled for _ in piece.tokens]
    columns = {name: _listed(getattr(values, name)) for name in _VALUES}
    exact = values.has(TokenFlag.EXACT).tolist()
    outcome = values.outcome
    for i in _inside(values, versions, selection):
        yield {
            "episode": values.episode,
            "group": values.group,
            "step": values.step,
            "token": places[i],
            "id": ids[i],
            "version": versions[i],
            "lag": values.version - versions[i],
            "turn": turns[i],
            **{name: column[i] for name, column in columns.items()},
            "exact": exact[i],
            "outcome": outcome[i],
            "route": values.route,
            "minibatch": values.minibatch,
        }


def _inside(values: TrainedTokens, versions: Sequence[int], selection: ExportRequest) -> list[int]:
    """Return the positions of the selected tokens among an episode's sampled tokens."""
    lag = values.version - np.array(versions, np.int64)
    where = selection.choice.contains(lag, values.flags)
    if selection.brush.is_set:
        where &= selection.brush.contains(values.log_d, values.log_s)
    found: list[int] = where.nonzero()[0].tolist()
    return found


def _listed(values: Any) -> list[float | None]:
    return [value if isfinite(value) else None for value in values.tolist()]
